"""Which pictures records of plain runs and of requests to servers have.

All points of all runs are drawn, hollow for disturbed runs; the line is a median. A picture with
requests shows TTFT in the place of prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lab.core import phases, request_times
from lab.core.record import Record
from lab.show import selection, table, text_setup
from lab.show.plot_decode import plot_decode
from lab.show.plot_prefill import plot_prefill
from lab.show.plot_shares import plot_shares
from lab.show.plot_sweep import plot_sweep
from lab.show.plot_trial import plot_trial, trials
from lab.show.table import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], object]


def drawings(records: Records) -> dict[str, Draw]:
    """The functions that draw the pictures with data: trial, sweep, shares, prefill, decode.

    Several trials are trial-1, trial-2 and so on.
    """
    timed = selection.plain_runs(records)
    runs = [record for record in timed if not record.run.every]
    requests = selection.answered(records)
    trials_of_runs = trials(timed)
    draw = _of_trials(trials_of_runs)
    if len(runs) < len(timed):
        draw["sweep"] = partial(plot_sweep, timed)
    in_trials = {id(record) for trial in trials_of_runs for record in trial}
    prefilled = []
    for record in runs:
        if id(record) not in in_trials and phases.prefill_ns(record.run):
            prefilled.append(record)
    shown_requests = requests if _has_ttft(requests) else []
    if not shown_requests and _decodes(prefilled) and _is_one_setup(prefilled):
        draw["shares"] = _on_axes(plot_shares, prefilled)
    if prefilled or shown_requests:
        draw["prefill"] = _on_axes(plot_prefill, [*prefilled, *shown_requests])
    if _decodes(runs) or any(
        request_times.chunk_gaps_ns(record.request) for record in requests
    ):
        draw["decode"] = _on_axes(plot_decode, [*runs, *requests])
    return draw


def _of_trials(trials_of_runs: Sequence[Sequence[Record]]) -> dict[str, Draw]:
    draw: dict[str, Draw] = {}
    for number, trial in enumerate(trials_of_runs, 1):
        name = "trial" if len(trials_of_runs) == 1 else f"trial-{number}"
        draw[name] = partial(plot_trial, trial, text_setup.where(trial))
    return draw


def _on_axes(plot: Callable[[Records, Axes], object], records: Records) -> Draw:
    return lambda figure: plot(records, figure.subplots())


def _has_ttft(requests: Records) -> bool:
    """Whether a request with a known prompt length has a TTFT."""
    if not requests:
        return False
    rows = table.runs(requests)
    return bool((rows.ttft_s.gt(0) & rows.n_prompt.notna()).any())


def _decodes(runs: Sequence[Record]) -> bool:
    return any(phases.itl_ns(record.run) for record in runs)


def _is_one_setup(runs: Sequence[Record]) -> bool:
    return len(table.by_setup(runs)) == 1
