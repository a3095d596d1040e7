"""Requests as rows of the same tables as runs, with additional columns.

A server does not show prefill, so a row has TTFT and no prefill time. A request with cached prompt tokens, or with a
shorter answer than requested, is measured but is not a repeat of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core.lists import first_known
from lab.core.record import OK, Record
from lab.core.request import RequestRecord
from lab.core.request_times import Figures, figures
from lab.show import setup_columns

if TYPE_CHECKING:
    import pandas as pd

FIGURES = (
    *("first_output_s", "stall_ms", "tpot_low_ms", "tpot_high_ms", "n_answer"),
    *("server_prompt_s", "server_decode_s"),
)
"""Figures of requests only. `tpot_low_ms` and `tpot_high_ms` are bounds of TPOT; the last two are times reported by
llama-server."""

KINDS = ("warm", "short")
"""Requests of equal setup and length differ in these: cached prompt tokens, and an answer that is shorter than
requested. None if the server does not report it."""


def loads_of(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    """The requests of loads."""
    return [one for one in records if isinstance(one, RequestRecord) and one.request.asked.load is not None]


def alone(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    """The requests that ran alone, one after the other."""
    requests = [one for one in records if isinstance(one, RequestRecord)]
    return [one for one in requests if one.request.asked.load is None and one.request.asked.turn is None]


def of_engine(records: Sequence[Record | RequestRecord]) -> list[Record]:
    """The runs of the engine."""
    return [one for one in records if isinstance(one, Record)]


def went_well(record: RequestRecord) -> bool:
    """Whether a request succeeded and is not a warm-up."""
    return record.request.status == OK and not record.request.asked.warmup


def is_measured(record: RequestRecord) -> bool:
    """Whether a request is a repeat of the others: successful, not known to be warm, with a full answer."""
    one = figures(record.request)
    return went_well(record) and one.is_warm is not True and one.is_short is not True


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: timed and successful; for requests also alone, not known to be warm, with a full answer."""
    rows = rows[(rows.status == OK) & ~rows.warmup]
    if "server" not in rows:
        return rows
    is_apart = rows.server.notna() & ((rows.warm == True) | (rows.short == True) | rows.lever.notna())  # noqa: E712
    return rows[~is_apart]


def n_prompt(one: Figures) -> int | None:
    """Tokens of the prompt: as requested, otherwise as counted by the server."""
    return first_known((one.asked.n_prompt, one.asked.n_prompt_counted, one.n_prompt))


def run_row(record: RequestRecord, index: int) -> dict[str, Any]:
    """The row of `lab.runs` for a request, without figures of an engine. Unknown times are NaN."""
    one = figures(record.request)
    asked, timings = one.asked, one.timings
    low, high = one.tpot_bounds_ns or (None, None)
    return {
        "run": index,
        "session": record.session,
        **setup_columns.of_request(record),
        "n_prompt": n_prompt(one),
        "n_gen": asked.n_gen,
        "repeat": asked.repeat,
        "block": None,
        "virtual": record.machine.virtual,
        "warmup": asked.warmup,
        "disturbed": False,
        "status": one.status,
        "error": one.error,
        "started_at": one.started_at,
        "ttft_s": or_nan(one.ttft_ns, 1e-9),
        "tpot_ms": or_nan(one.tpot_ns, 1e-6),
        "decode_tps": 1e9 / one.tpot_ns if one.tpot_ns else float("nan"),
        "e2e_s": or_nan(one.e2e_ns, 1e-9),
        "lever": None if asked.load is None else asked.load.label,
        "url": record.endpoint.url,
        "warm": one.is_warm,
        "short": one.is_short,
        "n_prompt_counted": one.n_prompt,
        "n_cached": one.n_cached,
        "n_answer": one.n_generated,
        "n_events": one.n_events,
        "first_output_s": or_nan(one.first_output_ns, 1e-9),
        "stall_ms": or_nan(one.longest_stall_ns, 1e-6),
        "tpot_low_ms": or_nan(low, 1e-6),
        "tpot_high_ms": or_nan(high, 1e-6),
        "server_prompt_s": or_nan(timings.prompt_ms if timings else None, 1e-3),
        "server_decode_s": or_nan(timings.gen_ms if timings else None, 1e-3),
        "failure": one.failure,
        "finish_reason": one.finish_reason,
    }


def or_nan(value: float | None, factor: float) -> float:
    """A known value times a factor; NaN for None."""
    return float("nan") if value is None else value * factor
