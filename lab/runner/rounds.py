"""Decide how many rounds follow the planned ones.

By default there are three rounds, and more for quick lengths. With `--until` a fixed number of pilot rounds gives the
spread, from which the lab computes once how many rounds each length needs. It does not stop as soon as an interval is
narrow: that would prefer intervals that are narrow by chance, which contain the true value too rarely. Two stages:
Stein, "A two-sample test for a linear hypothesis" (1945).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import phases, record, stats
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


class Rounds:
    """Keeps the finished runs, and decides which lengths are measured again."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started = time.monotonic()
        self.is_decided = False  # whether the runs after the planned ones are known
        self.done: list[tuple[Case, Run]] = []
        self.given_up: set[Case] = set()

    def further(self) -> list[tuple[int, Case]]:
        """(repeat, case) of all runs after the planned ones, once; empty if none are needed or no time is left."""
        done = [(case, run) for case, run in self.done if case not in self.given_up]
        if self.is_decided or not done or self.is_out_of_time():
            return []
        self.is_decided = True
        runs = {case: [run for its_case, run in done if its_case == case] for case, _ in done}
        if until := self._plan.until:  # for intervals within the share; in a sweep the worst length counts
            needed = {
                case: max((stats.repeats_needed(values, until.share) for values in _figures(own).values()), default=0)
                for case, own in runs.items()
            }
            targets = {case: min(until.max_repeats, n) for case, n in needed.items()}
        else:
            cost_s = {case: _seconds(own) for case, own in runs.items()}
            extra = extra_runs(self._plan, cost_s, time.monotonic() - self._started)
            targets = {case: self._plan.n_repeat + n for case, n in extra.items()}
        first = 1 + max(run.repeat for _, run in done)
        rounds = range(first, max(targets.values(), default=0))
        return [run for n in rounds for run in self._plan.round(n, [case for case in targets if n < targets[case]])]

    def is_out_of_time(self) -> bool:
        """Whether `--max-minutes` forbids a new round."""
        until = self._plan.until
        if until is None or until.max_minutes is None:
            return False
        return time.monotonic() - self._started >= 60 * until.max_minutes


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


def _seconds(runs: Sequence[Run]) -> float:
    """The median time of these runs from first start to last end."""
    times = [phases.e2e_ns(run) for run in runs if run.status == record.OK]
    known = [ns for ns in times if ns is not None]
    return statistics.median(known) / 1e9 if known else float("inf")
