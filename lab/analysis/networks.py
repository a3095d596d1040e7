"""Runs over networks of several latencies and bandwidths: what each cost, and what the arithmetic predicts.

The prediction is the time without a delay, plus what lab/core/network.py says that the network adds.

`pipeline_gains` says what waiting after every prefill step costs where devices work as a pipeline.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis.wording import seconds
from lab.core import network, phases
from lab.core.link import Link
from lab.core.network import StepShape, Traffic
from lab.core.record import DECODE, OK, PREFILL, Record

LEAST = 0.01
"""A difference that is worth a sentence."""


def pipeline_gains(records: Sequence[Record]) -> list[str]:
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


LOCAL = Link(0.0)
"""Runs through the same relay when it neither delays nor throttles."""


@dataclass(frozen=True)
class TimesOverLink:
    """Runs of one case over one network: times of a prompt and of a token, and those predicted."""

    link: Link
    n_prompt: int
    n_gen: int
    prefill_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    expected_prefill_s: float
    expected_tpot_s: float
    prompt: Traffic
    token: Traffic  # of all decode steps

    @property
    def tpot_error(self) -> float:
        """Predicted over measured (the median), - 1."""
        return self.expected_tpot_s / statistics.median(self.tpot_s) - 1

    @property
    def prefill_error(self) -> float:
        """The same of prefill."""
        return self.expected_prefill_s / statistics.median(self.prefill_s) - 1


def rows(records: Sequence[Record]) -> list[TimesOverLink]:
    """A row for each network of each case, slower networks later; none without a run without delay.

    The records are of one model and one placement.
    """
    good = [record for record in records if _is_good(record)]
    made = []
    for case in sorted({(record.run.n_prompt, record.run.n_gen) for record in good}):
        here = [record for record in good if (record.run.n_prompt, record.run.n_gen) == case]
        traffic = _traffic(here[0])
        local = [record for record in here if record.run.link == LOCAL]
        if not local or traffic is None:
            continue
        base_prefill, base_tpot = (statistics.median(times) for times in _times(local))
        for link in sorted(_links(here), key=lambda link: (link.round_trip_s, -(link.bytes_per_s or float("inf")))):
            prefill, tpot = _times([record for record in here if record.run.link == link])
            made.append(
                TimesOverLink(
                    *(link, *case, prefill, tpot),
                    expected_prefill_s=base_prefill + network.seconds(traffic[0], link),
                    expected_tpot_s=base_tpot + network.seconds(traffic[1], link) / (case[1] - 1),
                    prompt=traffic[0],
                    token=traffic[1],
                )
            )
    return made


def _is_good(record: Record) -> bool:
    run = record.run
    return run.is_timed and run.link is not None and run.n_gen > 1 and run.lever is None


def _links(records: Sequence[Record]) -> set[Link]:
    return {record.run.link for record in records if record.run.link is not None}


def _times(records: Sequence[Record]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Prefill times and TPOTs in s."""
    runs = [record.run for record in records]
    prefill, tpot = ([measure(run) or 0.0 for run in runs] for measure in (phases.prefill_ns, phases.tpot_ns))
    return tuple(ns / 1e9 for ns in prefill), tuple(ns / 1e9 for ns in tpot)


def _traffic(record: Record) -> tuple[Traffic, Traffic] | None:
    """Of the prompt, and of all decode steps."""
    steps, placement = record.run.steps, record.run.placement
    if placement is None or set(steps.kind) != {PREFILL, DECODE}:
        return None
    n_outputs = steps.n_outputs or (1,) * len(steps.kind)
    shapes = [StepShape(*row) for row in zip(steps.n_tokens, steps.n_past, n_outputs, strict=True)]
    known = network.of_steps(record.model, record.settings, placement.layers, shapes)
    if known is None:
        return None
    n_prefill = phases.n_prefill_steps(record.run)
    return (sum(known[:n_prefill], Traffic()), sum(known[n_prefill:], Traffic()))
