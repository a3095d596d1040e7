"""How many at once: B sequences decoded together, one token of each in every step.

A decode step reads all weights to make one token. With B sequences in the step they are read once for B tokens, so
while reading is the limit the step takes hardly longer, and B users are served in the time of one. From some B on
arithmetic takes over (the ridge of the roofline), and each further sequence costs its share of time. Attention is never
shared: every sequence reads its own cache.

T(B) is the mean time of a decode step; B / T(B) tokens per second in all, 1 / T(B) per user. Efficiency is
B x T(1) / T(B): 1 is no gain, B is ideal.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import cost, lever_figures, memory, script
from lab.core.cost import StepCost
from lab.core.levers import Batch
from lab.core.lists import grouped
from lab.core.record import COPY, PREFILL, Record, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.experiments import cases
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.plan import make_plan, with_cases
from lab.runner.planned import Case, Plan, Text
from lab.runner.progress import ShowStatus
from lab.runner.session import carry_out
from lab.why import roofline
from lab.why.step_prediction import StepPrediction

DEFAULT_SEQUENCES = "1,2,4,8,16"
N_OWN = 16
"""Last tokens of a shared prompt that are each sequence's own: equal texts would all be answered with equal tokens."""

MOST_SEQUENCES = 256
"""LLAMA_MAX_SEQ of llama.cpp: with more it ends the process."""


@dataclass(frozen=True)
class Row:
    """One number of sequences of one setup: medians over runs, and the least and largest step time of a run.

    `expected_s` is the predicted T(B), None without ceilings; `kv_bytes` what the sequences hold at their end.
    """

    n_prompt: int
    n_gen: int
    n_seq: int
    is_shared: bool
    n_runs: int
    step_s: float
    step_min_s: float
    step_max_s: float
    total_tps: float
    user_tps: float
    efficiency: float | None  # None where one sequence was not measured
    prefill_s: float
    kv_bytes: int | None
    expected_s: float | None


def batch(
    sequences: str | int | Sequence[int] = DEFAULT_SEQUENCES,
    prompt_len: str | int | Sequence[int] = "256",
    gen: int = 32,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    shared_prompt: bool = False,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Any,
) -> list[Record]:
    """Decode so many sequences at once, after prompts of prompt_len tokens each; a record a run, as of `measure`.

        lab.batch("1,4,16", gen=32)

    With `shared_prompt` the prompts are equal but for their last 16 tokens, and are prefilled once.
    """

    def make(worker: Worker) -> Plan:
        return plan(worker, sequences, prompt_len, gen, repeat, shared_prompt=shared_prompt, model=model, **settings)

    return carry_out(make, out, watch)


def plan(
    worker: Worker,
    sequences: str | int | Sequence[int] = DEFAULT_SEQUENCES,
    prompt_len: str | int | Sequence[int] = "256",
    gen: int = 32,
    repeat: int | None = None,
    *,
    shared_prompt: bool = False,
    **asked: Any,
) -> Plan:
    """The plan of `batch`. LabError for numbers that cannot be."""
    numbers = cases.numbers("--sequences", sequences, MOST_SEQUENCES)
    if gen < 2:
        raise LabError(f"--gen {gen} leaves nothing to decode together.", "Give 2 or more.")
    made = make_plan(worker, [prompt_len] if isinstance(prompt_len, int) else prompt_len, gen, repeat, **asked)
    if shared_prompt:
        cases.need_every_position(made.model)
        if min(case.n_prompt for case in made.cases) <= N_OWN:
            raise LabError(
                f"Of a prompt of {N_OWN} tokens or fewer nothing is shared.", "Give longer prompts: --prompt-len 256"
            )
    if max(numbers) > made.settings.n_batch:
        raise LabError(
            f"{max(numbers)} sequences do not fit into a batch of {made.settings.n_batch} tokens.",
            f"Use --batch {max(numbers)}, or fewer --sequences.",
        )
    wanted = [
        Case(case.n_prompt, gen, lever=lever, sequences=_lengths(lever, case.n_prompt, gen, made.settings))
        for case in made.cases
        for lever in (Batch(n, shared_prompt) for n in numbers)
    ]
    return with_cases(made, wanted, write)


def _lengths(lever: Batch, n_prompt: int, n_gen: int, settings: Settings) -> tuple[int, ...]:
    """Positions that the sequences take in the cache: what they share in one cache takes its place once."""
    own = N_OWN if lever.is_shared and settings.kv_unified else n_prompt
    return (n_prompt + n_gen, *(own + n_gen,) * (lever.n_seq - 1))


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the prompts, several in a step where they fit, then n_gen - 1 steps of a token of each sequence."""
    assert isinstance(case.lever, Batch)
    n_seq, n_prompt = case.lever.n_seq, case.n_prompt
    n_common = n_prompt - N_OWN if case.lever.is_shared and n_seq > 1 and n_prompt > N_OWN else 0
    operations: list[Operation] = []
    if n_common:
        operations += script.prefill(0, text(0, n_common), settings.n_ubatch, is_last=False)
        operations += [Operation(COPY, sequence=0, target=i) for i in range(1, n_seq)]
    prompts = [text(i, n_prompt)[n_common:] for i in range(n_seq)]
    return [*operations, *_prefill(prompts, settings), *script.decode(range(n_seq), case.n_gen - 1)]


def _prefill(prompts: Sequence[Sequence[int]], settings: Settings) -> list[Operation]:
    """Prompts of equal length together, as llama.cpp itself cuts a batch of n_batch tokens into steps of n_ubatch.

    Sequences with a cache each go in equal slices, as many of them as fit into the batch; with one cache for all, whole
    prompts follow each other.
    """
    n_prompt, n_most = len(prompts[0]), settings.n_ubatch if settings.kv_unified else settings.n_batch
    n_together = max(1, min(len(prompts), settings.n_ubatch, n_most // n_prompt))
    operations = []
    for start in range(0, len(prompts), n_together):
        group = range(start, min(start + n_together, len(prompts)))
        n_slice = settings.n_ubatch // len(group)
        for first in range(0, n_prompt, n_slice):
            end = min(first + n_slice, n_prompt)
            parts = tuple(Part(i, tuple(prompts[i][first:end]), int(end == n_prompt)) for i in group)
            operations.append(Operation(PREFILL, parts))
    return operations


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each number of sequences, of timed runs of one setup that went well."""
    by_case = grouped(
        (record for record in records if lever_figures.figures(record.run)),
        lambda record: (record.run.n_prompt, record.run.n_gen, record.run.batch) if record.run.batch else None,
    )
    alone = {
        (n_prompt, n_gen, lever.is_shared): statistics.median(lever_figures.step_s(record.run) for record in alike)
        for (n_prompt, n_gen, lever), alike in by_case.items()
        if lever.n_seq == 1
    }
    made = []
    for (n_prompt, n_gen, lever), alike in sorted(by_case.items(), key=_place):
        times = [lever_figures.step_s(record.run) for record in alike]
        n, step, one = lever.n_seq, statistics.median(times), alone.get((n_prompt, n_gen, lever.is_shared))
        first = alike[0]
        per_position = memory.kv_bytes_per_position(first.model, first.settings.type_k, first.settings.type_v)
        made.append(
            Row(
                n_prompt,
                n_gen,
                n,
                lever.is_shared,
                len(times),
                step,
                min(times),
                max(times),
                n / step,
                1 / step,
                None if one is None else n * one / step,
                statistics.median(lever_figures.batch(record.run)["prefill_s"] for record in alike),
                None
                if per_position is None
                else round(sum(_lengths(lever, n_prompt, n_gen, first.settings)) * per_position),
                expected_s(prediction, n_prompt, n_gen, n) if prediction else None,
            )
        )
    return made


def _place(item: tuple[tuple[int, int, Batch], Any]) -> tuple[int, int, bool, int]:
    n_prompt, n_gen, lever = item[0]
    return n_prompt, n_gen, lever.is_shared, lever.n_seq


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ only in the number of sequences, together."""
    groups = grouped(rows, lambda row: (row.n_prompt, row.n_gen, row.is_shared))
    return list(groups.values())


def expected_s(prediction: StepPrediction, n_prompt: int, n_gen: int, n_seq: int) -> float | None:
    """T(B) in the middle of the answers."""
    n_past = n_prompt + max(0, n_gen - 2) // 2
    return prediction.seconds(1, n_past, n_seq, [(1, n_past)] * (n_seq - 1))


def knee(measured: Sequence[Row]) -> float | None:
    """How many sequences make a step twice as long as one does, between two that were measured; None beyond them."""
    times = [(row.n_seq, row.step_s) for row in measured]
    if not times or times[0][0] != 1:
        return None
    limit = 2 * times[0][1]
    for (n, seconds), (n_next, seconds_next) in itertools.pairwise(times):
        if seconds <= limit < seconds_next:
            share = (limit - seconds) / (seconds_next - seconds)
            return math.exp((1 - share) * math.log(n) + share * math.log(n_next))
    return None


def ridge(prediction: StepPrediction, n_prompt: int, n_gen: int) -> float | None:
    """How many sequences bring a step to the ridge: by then its weights are used as often as arithmetic can follow.

    The ridge of the machine (FLOPs per byte) over the FLOPs that a sequence adds per byte of weights. None where the
    model's cost is not known.
    """
    one, more = (_cost(prediction, n_prompt + n_gen // 2, n) for n in (1, 2))
    if one is None or more is None:
        return None
    best = roofline.roof(prediction.ceilings)
    traffic_s, arithmetic_s = one.n_bytes / best.gbps, (more.flops - one.flops) / best.gflops
    more_traffic_s = (more.n_bytes - one.n_bytes) / best.gbps
    return traffic_s / (arithmetic_s - more_traffic_s) if arithmetic_s > more_traffic_s else None


def sentences(measured: Sequence[Row], prediction: StepPrediction | None) -> list[str]:
    """What rows of one setup and prompt length show, in words."""
    if not measured:
        return []
    words, most, best = [], measured[-1], max(measured, key=lambda row: row.total_tps)
    if most.efficiency is not None and most.n_seq > 1:
        share = most.user_tps / measured[0].user_tps
        words.append(
            f"{most.n_seq} sequences at once: {most.efficiency:.2g} times the tokens of one in all, and each user gets "
            f"{share:.0%} of the rate of a single one."
        )
        worse = [row for row in measured[1:] if row.efficiency is not None and row.efficiency < 1]
        if worse:
            numbers = ", ".join(str(row.n_seq) for row in worse)
            words.append(
                f"With {numbers} the total is below that of one: a single token in a step has a kernel of its own."
            )
        if best.n_seq not in (1, most.n_seq):
            words.append(f"The most in all come from {best.n_seq} at once.")
    doubled = knee(measured)
    at_ridge = ridge(prediction, measured[0].n_prompt, measured[0].n_gen) if prediction else None
    if doubled is not None:
        words.append(f"A step takes twice as long as with one from about {doubled:.2g} sequences on.")
    elif len(measured) > 1 and measured[0].n_seq == 1:
        words.append(f"Up to {most.n_seq} sequences a step never takes twice as long as with one.")
    if at_ridge is not None:
        words.append(f"By the machine's ridge, arithmetic takes as long as reading at about {at_ridge:.2g} sequences.")
    if by := cases.off_by((row.expected_s, row.step_s) for row in measured):
        words.append(f"Predictions are off {by}.")
    return words


def _cost(prediction: StepPrediction, n_past: int, n_seq: int) -> StepCost | None:
    settings = prediction.settings
    return cost.step(prediction.model, 1, n_past, n_seq, settings.type_k, settings.type_v, [(1, n_past)] * (n_seq - 1))
