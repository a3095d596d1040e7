"""The runs of a loop: it takes them one after the other, and its reporter counts those that are
left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lab.runner.cases import Case

PlannedRun = tuple[int, Case]
"""The round and the case."""


class RunList:
    """The runs that are left, in their order."""

    def __init__(self, planned: Iterable[PlannedRun] = ()) -> None:
        self._left = list(planned)
        self.n_runs = len(self._left)  # those that are left, and those that were taken

    def __iter__(self) -> Iterator[PlannedRun]:
        return iter(self._left)

    def __len__(self) -> int:
        return len(self._left)

    @property
    def n_taken(self) -> int:
        return self.n_runs - len(self._left)

    @property
    def next(self) -> PlannedRun:
        return self._left[0]

    def take(self) -> PlannedRun:
        return self._left.pop(0)

    def put_back(self, run: PlannedRun) -> None:
        """The run that was taken last is to be made again."""
        self._left.insert(0, run)

    def add(self, runs: Iterable[PlannedRun]) -> None:
        """Make these at the end, too."""
        more = list(runs)
        self._left += more
        self.n_runs += len(more)

    def keep(self, runs: Iterable[PlannedRun]) -> None:
        """Drop all runs that are left but these."""
        kept_runs = list(runs)
        self.n_runs -= len(self._left) - len(kept_runs)
        self._left = kept_runs

    def pass_over(self, n_left: int) -> None:
        """Count the next runs as taken, until `n_left` are left."""
        self._left = self._left[len(self._left) - n_left :]
