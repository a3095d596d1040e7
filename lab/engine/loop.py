"""The timed loop: start, ready and end of every step, and nothing else between them.

A run is legs. An ordinary run has one: prefill the prompt, then generate. A sweep has one per length:
prefill some more, generate there, forget what was generated, go on. So no prefix is computed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.core.record import DECODE, PREFILL, Steps
from lab.process.wire import N_PREFILLED


@dataclass(frozen=True)
class Leg:
    """A stretch of a run: prefill these chunks, then decode."""

    chunks: Sequence[tuple[int, Any]]  # (n_tokens, batch)
    singles: Sequence[Any]  # batches of one token
    slots: Sequence[Any]  # where chosen tokens go: one more than singles, since prefill gives the first


def walk(
    forward: Callable[[Any], None],
    choose: Callable[[Any], Any],
    legs: Sequence[Leg],
    roll_back: Callable[[int], None],
    clock: Callable[[], int],
    progress: memoryview[int] | list[int],
) -> list[int]:
    """The timed loop: for each leg prefill its chunks, then decode. Returns start, ready, end of each step.

    `forward` runs a batch to its end, `choose` puts the most likely next token into a slot, `roll_back`
    makes the context forget what comes after so many tokens (before each leg but the first). A slot is the
    memory that the next single batch reads its token from, so no token passes through Python: after
    megabytes of weights have gone through the caches, every object that is touched here costs time.
    """
    stamps: list[int] = []
    stamp = stamps.append
    n_prefilled = progress[N_PREFILLED] = 0
    for leg in legs:
        if n_prefilled:
            roll_back(n_prefilled)
        for n, batch in leg.chunks[:-1]:
            stamp(clock())
            forward(batch)
            stamp(clock())
            stamp(stamps[-1])  # no token is chosen here: the step ends when it is ready
            n_prefilled += n
            progress[N_PREFILLED] = n_prefilled
        n, last = leg.chunks[-1]
        for batch, slot in zip([last, *leg.singles], leg.slots, strict=True):
            stamp(clock())
            forward(batch)
            stamp(clock())
            choose(slot)
            stamp(clock())
        n_prefilled += n
        progress[N_PREFILLED] = n_prefilled
    return stamps


def as_steps(legs: Sequence[tuple[Sequence[int], int]], stamps: Sequence[int]) -> Steps:
    """The stamps of `walk` as columns, counted from the first start. A leg is (sizes of its chunks, n decode steps)."""
    kind: list[str] = []
    n_tokens: list[int] = []
    n_past: list[int] = []
    n_prompt = 0
    for sizes, n_decode in legs:
        kind += [PREFILL] * len(sizes) + [DECODE] * n_decode
        n_tokens += [*sizes] + [1] * n_decode
        n_past += itertools.accumulate(sizes[:-1], initial=n_prompt)
        n_prompt += sum(sizes)
        n_past += range(n_prompt, n_prompt + n_decode)
    since_start = [stamp - stamps[0] for stamp in stamps]
    return Steps(
        kind=tuple(kind),
        n_tokens=tuple(n_tokens),
        n_past=tuple(n_past),
        start_ns=tuple(since_start[0::3]),
        ready_ns=tuple(since_start[1::3]),
        end_ns=tuple(since_start[2::3]),
    )
