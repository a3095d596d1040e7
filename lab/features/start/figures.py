"""The figures of starts: a table of stages, and how long the engine waited for the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.features.start.lines import COLD, PROCESS, STAGES, WARM, StartLine

if TYPE_CHECKING:
    import pandas as pd

KEYS = ["is_mapped", "cache"]


@dataclass(frozen=True)
class StartSetup:
    """All starts with one value of mmap and one state of the cache, one row each."""

    is_mapped: bool
    cache: str
    starts: pd.DataFrame

    @property
    def median_start(self) -> pd.Series:
        """The start with the median time (the lower of two): its stages add up to that time."""
        in_order = self.starts.sort_values("first_token_s")
        return in_order.iloc[(len(in_order) - 1) // 2]


@dataclass(frozen=True)
class DiskWait:
    """How much longer a cold start takes than the warm one of its round, without the process."""

    seconds: float
    low_s: float
    high_s: float
    disk_s: float  # of reading the file in order
    n_bytes: int

    @property
    def is_clear(self) -> bool:
        """Whether the cold start was the slower one in every round."""
        return self.low_s > 0

    @property
    def disk_gbps(self) -> float:
        return self.n_bytes / self.disk_s / 1e9


def starts_table(lines: Sequence[StartLine]) -> pd.DataFrame:
    """A row for each start with the cache as it was meant to be, with a column for each stage."""
    import pandas as pd

    rows = []
    for line in lines:
        if line.is_confirmed:
            row = {
                "session": line.session,
                "is_mapped": line.settings.mmap is not False,
                "cache": line.cache,
                "round": line.round,
                **line.stages,
                "first_token_s": line.first_token_s,
                "second_prefill_s": line.second_prefill_s,
                "n_faults": line.n_faults,
                "read_bytes": line.read_bytes,
                "disk_s": line.disk_s,
            }
            rows.append(row)
    columns = ["session", *KEYS, "round", *STAGES, "first_token_s", "second_prefill_s"]
    return pd.DataFrame(rows, columns=[*columns, "n_faults", "read_bytes", "disk_s"])


def setups(table: pd.DataFrame) -> list[StartSetup]:
    """The starts by mmap (on first) and cache (cold first)."""
    groups = []
    for (is_mapped, cache), starts in table.groupby(KEYS):
        groups.append(StartSetup(bool(is_mapped), str(cache), starts))
    return sorted(groups, key=lambda setup: (not setup.is_mapped, setup.cache))


def disk_wait(table: pd.DataFrame, n_bytes: int | None, is_mapped: bool) -> DiskWait | None:
    """The wait for the disk with mmap on or off; None without a round that has both starts."""
    of_mmap = table[table.is_mapped == is_mapped]
    model_s = of_mmap.first_token_s - of_mmap[PROCESS]  # before it nobody reads the file
    times = of_mmap.assign(model_s=model_s).pivot_table(
        index="round", columns="cache", values="model_s"
    )
    if n_bytes is None or not {COLD, WARM} <= set(times.columns):
        return None
    waits = (times[COLD] - times[WARM]).dropna()
    disk_s = table.disk_s.astype(float).median()
    if waits.empty or not disk_s > 0:
        return None
    return DiskWait(waits.median(), waits.min(), waits.max(), disk_s, n_bytes)
