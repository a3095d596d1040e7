"""Decide how many rounds follow the planned ones.

By default there are three rounds, and more for quick lengths. With `--until` a fixed number of pilot rounds gives the
spread, from which the lab computes once how many rounds each length needs. It does not stop as soon as an interval is
narrow: that would prefer intervals that are narrow by chance, which contain the true value too rarely. Two stages:
Stein, "A two-sample test for a linear hypothesis" (1945).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import phases, record, stats
from lab.core.record import Run
from lab.runner.cases import Case, Plan, Until

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
        self._targets: dict[Case, int] | None = None  # planned runs of each case
        self.done: list[tuple[Case, Run]] = []
        self.given_up: set[Case] = set()

    def next(self) -> list[tuple[int, Case]]:
        """(repeat, case) of the runs of one more round; empty if the plan is done."""
        done = [(case, run) for case, run in self.done if case not in self.given_up]
        if not done:
            return []
        repeat = 1 + max(run.repeat for _, run in done)
        until = self._plan.until
        if self.is_out_of_time():
            return []
        if self._targets is None:
            self._targets = self._needed(done, until) if until else self._affordable(done)
        wanted = [case for case in {case for case, _ in done} if repeat < self._targets.get(case, 0)]
        return self._plan.round(repeat, wanted)

    def is_out_of_time(self) -> bool:
        """Whether `--max-minutes` forbids a new round."""
        until = self._plan.until
        if until is None or until.max_minutes is None:
            return False
        return time.monotonic() - self._started >= 60 * until.max_minutes

    def _needed(self, done: Sequence[tuple[Case, Run]], until: Until) -> dict[Case, int]:
        """Runs that each case needs for intervals within the share; in a sweep the worst length counts."""
        needed = {}
        for case in {case for case, _ in done}:
            figures = _figures([run for its_case, run in done if its_case == case])
            most = max((stats.repeats_needed(values, until.share) for values in figures.values()), default=0)
            needed[case] = min(until.max_repeats, most)
        return needed

    def _affordable(self, done: Sequence[tuple[Case, Run]]) -> dict[Case, int]:
        """Enough runs for an interval for the quickest cases, within EXTRA_SHARE of the time."""
        if not self._plan.is_more_if_cheap:
            return {}
        cases = {case for case, _ in done}
        cost_s = {case: _seconds([run for its_case, run in done if its_case == case]) for case in cases}
        left_s = EXTRA_SHARE * (time.monotonic() - self._started)
        targets, enough = dict[Case, int](), stats.fewest_for_interval()
        for case in sorted(cost_s, key=lambda case: cost_s[case]):
            left_s -= cost_s[case] * (enough - self._plan.n_repeat)
            if left_s < 0:
                break
            targets[case] = enough
        return targets


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
