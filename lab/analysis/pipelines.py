"""Devices that work as a pipeline: what waiting after every prefill step hides."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from lab.analysis.wording import seconds
from lab.core import phases
from lab.core.record import OK, Record

LEAST = 0.01
"""A difference that is worth a sentence."""


def sentences(records: Sequence[Record]) -> list[str]:
    """For each prompt that was prefilled both ways: how much longer it took with a wait after every step.

    Warm-ups count: a session on several devices makes a pair of them in every engine. Nothing is said of differences of
    up to LEAST.
    """
    times: dict[tuple[str, int], dict[bool, list[int]]] = defaultdict(lambda: {True: [], False: []})
    for record in records:
        run, prefill = record.run, phases.prefill_ns(record.run)
        is_plain = run.status == OK and run.lever is None and run.every is None
        if prefill and is_plain and (not run.warmup or run.n_gen == 1):
            times[record.model.name, run.n_prompt][record.settings.prefill_wait == "end"].append(prefill)
    made = []
    for (model, n_prompt), by_wait in sorted(times.items()):
        if not (by_wait[True] and by_wait[False]):
            continue
        once, always = (statistics.median(by_wait[is_once]) / 1e9 for is_once in (True, False))
        if abs(always / once - 1) > LEAST:
            numbers = f"{len(by_wait[False])} and {len(by_wait[True])} runs"
            cause = "several devices work as a pipeline" if always > once else "there is no gain from a pipeline here"
            made.append(
                f"Prefill of {n_prompt:,} tokens ({model}) took {always / once:.2f}x as long with a wait after every "
                f"step as with one at the end ({seconds(always)}, {seconds(once)}; medians of {numbers}): {cause}."
            )
    return made
