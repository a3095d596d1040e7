"""The result of a session, from its lines: the search is repeated with the times of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lab.core import phases
from lab.core.lines import ResultLine
from lab.core.lists import grouped
from lab.core.record import OK, Record, Run
from lab.core.shown import is_unreliable
from lab.features.bisect.lines import DECODE, PREFILL, BisectLine, BuildLine, place_of
from lab.features.bisect.search import GOOD, SLOWER, ComparedBlock, RegressionSearch
from lab.runner.disturbances import disturbances


@dataclass(frozen=True)
class Bisected:
    """The result of a session of `lab bisect`.

    `records` has a timed run of each build that was measured, by its place in `asked.builds`.
    """

    asked: BisectLine
    search: RegressionSearch
    records: dict[int, Record]
    builds: dict[int, BuildLine]
    n_runs: int
    n_disturbed: int

    @property
    def is_disturbed(self) -> bool:
        return is_unreliable(self.n_runs, self.n_disturbed)

    @property
    def is_finished(self) -> bool:
        return self.search.next_trial() is None

    def label(self, place: int) -> str:
        return self.asked.builds[max(GOOD, place)]


class NeighbourPair(NamedTuple):
    """Two neighbours, and the figures that became slower between them."""

    fast: int
    slow: int
    figures: tuple[str, ...]


def pairs(result: Bisected) -> list[NeighbourPair]:
    """The pairs of neighbours in order of the series."""
    figures_of: dict[tuple[int, int], list[str]] = {}
    for figure, halving in result.search.halvings.items():
        figures_of.setdefault((halving.fast, halving.slow), []).append(figure)
    return [NeighbourPair(*places, tuple(figures_of[places])) for places in sorted(figures_of)]


def seconds_of_run(run: Run) -> dict[str, float]:
    """The seconds of a timed run's figures: of the whole prefill, and per further token."""
    times = {}
    for figure, ns in ((PREFILL, phases.prefill_ns(run)), (DECODE, phases.tpot_ns(run))):
        if ns and ns > 0:
            times[figure] = ns / 1e9
    return times


def times_of_block(
    records: Iterable[Record], labels: tuple[str, ...]
) -> dict[int, dict[str, float]]:
    """The times of each build in a block, by its place: the medians of its runs.

    Empty if a run failed: such a block is measured again.
    """
    by_place: dict[int, list[dict[str, float]]] = {}
    for record in records:
        if record.run.status != OK:
            return {}
        place = place_of(record.run.variant, labels)
        if place is not None and record.run.is_timed:
            by_place.setdefault(place, []).append(seconds_of_run(record.run))
    return {place: medians(of_runs) for place, of_runs in by_place.items()}


def medians(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure that every run has."""
    figures = set(times[0]).intersection(*times)
    return {figure: statistics.median(run[figure] for run in times) for figure in figures}


def is_mine(line: object) -> bool:
    """Whether a line describes a session of `lab bisect`; its runs are ordinary ones of a trial."""
    return isinstance(line, BisectLine | BuildLine)


def of_sessions(lines: Iterable[ResultLine], runs: Sequence[Record] = ()) -> list[Bisected]:
    """The results of all sessions, from their lines and runs."""
    by_session = grouped([*lines, *runs], lambda line: line.session)
    results = []
    for session in by_session.values():
        if any(isinstance(line, BisectLine) for line in session):
            results.append(bisected(session))
    return results


def bisected(lines: Sequence[object]) -> Bisected:
    """The result of one session, from its lines in any order."""
    asked = next(line for line in lines if isinstance(line, BisectLine))
    builds = {line.place: line for line in lines if isinstance(line, BuildLine)}
    search = RegressionSearch(len(asked.builds), asked.figures, asked.at_least)
    dropped = sorted(
        (line for line in builds.values() if line.problem), key=lambda line: line.n_blocks
    )
    records: dict[int, Record] = {}
    n_runs = 0
    n_disturbed = 0
    measured = [line for line in lines if isinstance(line, Record)]
    by_block = grouped(measured, lambda record: record.run.block)
    for number in sorted(by_block):
        while dropped and dropped[0].n_blocks <= number:
            search.drop(dropped[0].place, dropped[0].problem or "")
            dropped.pop(0)
        for record in by_block[number]:
            place = place_of(record.run.variant, asked.builds)
            if place is None or not record.run.is_timed:
                continue
            records.setdefault(max(GOOD, place), record)
            n_runs += 1
            n_disturbed += 1 if disturbances(record) else 0
        take_complete_block(search, times_of_block(by_block[number], asked.builds))
    for line in dropped:
        search.drop(line.place, line.problem or "")
    return Bisected(asked, search, records, builds, n_runs, n_disturbed)


def take_complete_block(
    search: RegressionSearch, times: Mapping[int, Mapping[str, float]]
) -> None:
    """Add a block to a search if it is complete, and the one that the search asked for."""
    upcoming = search.next_trial()
    if upcoming is None or set(times) != set(upcoming.places):
        return
    if all(set(search.figures) <= set(of_build) for of_build in times.values()):
        search.take(ComparedBlock(upcoming.stage, times))


def slow_figures(result: Bisected) -> list[str]:
    return [figure for figure, verdict in result.search.ends.items() if verdict == SLOWER]
