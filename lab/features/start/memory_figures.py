"""The figures of decode with limited memory: a row for each limit, predicted from the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core.stats import Range
from lab.roofline import paging
from lab.roofline.paging import MemoryLine, PagingLaw

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class MemoryLimit:
    """All starts with one limit (None: without), and the range predicted without them."""

    limit_bytes: int | None
    starts: pd.DataFrame
    expected_s: Range | None  # of a token's time; None: not predicted

    @property
    def token_s(self) -> float:
        return float(self.starts.token_s.median())

    @property
    def room(self) -> float:
        return float(self.starts.room.median())

    @property
    def read_share(self) -> float:
        return float(self.starts.read_share.median())

    @property
    def n_inside(self) -> int:
        """Starts whose time lies in the predicted range."""
        if self.expected_s is None:
            return 0
        return int(self.starts.token_s.between(*self.expected_s).sum())


def memory_table(lines: Sequence[MemoryLine]) -> pd.DataFrame:
    """A row for each start whose file was dropped before."""
    import pandas as pd

    rows = []
    for line in lines:
        if line.is_confirmed:
            rows.append(
                {
                    "limit_bytes": line.limit_bytes or math.inf,
                    "room": line.room,
                    "token_s": line.token_s,
                    "read_share": line.read_share,
                    "n_faults": line.n_faults,
                    "disk_s": line.disk_s,
                }
            )
    columns = ["limit_bytes", "room", "token_s", "read_share", "n_faults", "disk_s"]
    return pd.DataFrame(rows, columns=columns).astype(float)


def memory_limits(lines: Sequence[MemoryLine]) -> list[MemoryLimit]:
    """The limits of one session, the smallest first, the starts without a limit last."""
    limits = []
    for limit, starts in memory_table(lines).groupby("limit_bytes"):
        if math.isinf(float(str(limit))):
            limits.append(MemoryLimit(None, starts, None))
            continue
        n_bytes = round(float(str(limit)))
        expected_s = predicted(lines, n_bytes, float(starts.room.median()))
        limits.append(MemoryLimit(n_bytes, starts, expected_s))
    return limits


def law_without(lines: Sequence[MemoryLine], limit_bytes: int) -> PagingLaw | None:
    """The law of the starts with other limits."""
    return paging.learn([line for line in lines if line.limit_bytes != limit_bytes])


def predicted(lines: Sequence[MemoryLine], limit_bytes: int, room: float) -> Range | None:
    """The range of a token's time with a limit, from the starts with other limits."""
    law = law_without(lines, limit_bytes)
    compute_s = paging.compute_span(lines)
    if law is None or compute_s is None or math.isnan(room):
        return None
    return law.token_s(lines[0].file_bytes, room, compute_s)
