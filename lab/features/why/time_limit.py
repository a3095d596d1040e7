"""The end of a measurement when its time is spent, even within a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from lab.runner.progress import ShowStatus, Status

T = TypeVar("T")


class TimeSpent(Exception):
    """The time is spent, in the middle of a run. What has ended before is kept."""


def limited(watch: ShowStatus, budget_s: float) -> ShowStatus:
    """The watch, which raises TimeSpent with the first status after the time is spent."""
    ends = time.monotonic() + budget_s

    def look(status: Status) -> None:
        watch(status)
        if time.monotonic() > ends:
            raise TimeSpent

    return look


def until_spent(measured: Iterable[T]) -> Iterator[T]:
    """What was measured before the time was spent."""
    try:
        yield from measured
    except TimeSpent:
        return
