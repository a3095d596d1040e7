"""The timed loop: it executes every operation of a script and stamps its start, ready and end.

Everything is prepared before: the batches are in memory, and sampling writes each token where the
next step reads it. A step moves megabytes of weights through the CPU caches, so every object that
the loop touches costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lab.core.record import Steps
from lab.core.script import Shape
from lab.process.wire import N_PREFILLED

Action = tuple[Callable[[], object], Callable[[], object] | None, int]
"""What an operation executes, what follows (choosing tokens; None: nothing), and the prompt tokens
done by then."""


def walk(
    actions: Iterable[Action], clock: Callable[[], int], progress: memoryview[int] | list[int]
) -> list[int]:
    """Execute all actions in order. Returns three stamps of each: start, ready, end."""
    stamps: list[int] = []
    stamp = stamps.append
    for execute, choose, n_prefilled in actions:
        stamp(clock())
        execute()
        stamp(clock())
        if choose is None:
            stamp(stamps[-1])
        else:
            choose()
            stamp(clock())
        progress[N_PREFILLED] = n_prefilled
    return stamps


def as_steps(shapes: Sequence[Shape], stamps: Sequence[int]) -> Steps:
    """The stamps of `walk` as columns, relative to the first start."""
    if not shapes:
        return Steps()
    since_start = tuple(stamp - stamps[0] for stamp in stamps)
    columns = dict(zip(Shape._fields, zip(*shapes, strict=True), strict=True))
    return Steps(
        start_ns=since_start[0::3],
        ready_ns=since_start[1::3],
        end_ns=since_start[2::3],
        **columns,
    )
