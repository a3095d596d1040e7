"""Decide how many rounds follow the planned ones.

By default there are three rounds, and more for quick lengths. With `--until` a fixed number of pilot rounds gives the
spread, from which the lab computes once how many rounds each length needs. It does not stop as soon as an interval is
narrow: that would prefer intervals that are narrow by chance, which contain the true value too rarely. Two stages:
Stein, "A two-sample test for a linear hypothesis" (1945).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import phases, stats
from lab.core.record import Run
from lab.runner.cases import Case, Plan

EXTRA_SHARE = 0.25
"""Maximum time of the extra rounds of quick lengths, as a share of the planned rounds' time."""


@dataclass(frozen=True)
class WideRow:
    """A figure with too wide an interval. `width` is the farther end's relative distance from the median, if any."""

    n_prompt: int
    figure: str
    width: float | None


def runs_needed(plan: Plan, done: Sequence[tuple[Case, Run]], planned_s: float) -> dict[Case, int]:
    """How many runs the cases need that need more than planned; the planned ones took `planned_s`."""
    runs = {case: [run for its_case, run in done if its_case == case] for case, _ in done}
    if until := plan.until:  # for intervals within the share; in a sweep the worst length counts
        wanted = {}
        for case, own in runs.items():
            needed = [stats.repeats_needed(values, until.share) for values in _figures(own).values()]
            wanted[case] = min(until.max_repeats, max(needed, default=0))
        return wanted
    times = {case: [ns for run in own if (ns := phases.e2e_ns(run)) is not None] for case, own in runs.items()}
    cost_s = {case: statistics.median(own) / 1e9 if own else math.inf for case, own in times.items()}
    extra = extra_runs(plan, cost_s, planned_s)
    return {case: plan.n_repeat + n for case, n in extra.items()}


def extra_runs(plan: Plan, cost_s: Mapping[Case, float], planned_s: float) -> dict[Case, int]:
    """How many extra runs the quickest cases get, where a run takes `cost_s` and all planned rounds `planned_s`."""
    left_s, n_more = EXTRA_SHARE * planned_s, stats.fewest_for_interval() - plan.n_repeat
    extra = dict[Case, int]()
    for case in sorted(cost_s, key=lambda case: cost_s[case]) if plan.is_more_if_cheap else ():
        left_s -= cost_s[case] * n_more
        if left_s < 0:
            break
        extra[case] = n_more
    return extra


def wide_rows(runs: Sequence[Run], share: float) -> list[WideRow]:
    """The figures (prefill time and TPOT by length) whose interval exceeds +- `share` of the median."""
    wide = []
    for (n_prompt, name), values in sorted(_figures(runs).items()):
        interval, middle = stats.median_interval(values), statistics.median(values)
        width = None if interval is None else max(interval.high - middle, middle - interval.low) / middle
        if width is None or width > share:
            wide.append(WideRow(n_prompt, name, width))
    return wide


def _figures(runs: Sequence[Run]) -> dict[tuple[int, str], list[float]]:
    """Prefill times and TPOTs in ns of the successful timed runs, by prompt length and name."""
    figures: dict[tuple[int, str], list[float]] = {}
    timed = (run for run in runs if run.is_timed)
    for leg in (leg for run in timed for leg in phases.by_length(run)):
        for name, value in (("prefill", phases.prefill_ns(leg)), ("TPOT", phases.tpot_ns(leg))):
            if value:
                figures.setdefault((leg.n_prompt, name), []).append(value)
    return figures
