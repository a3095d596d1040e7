"""Sequences decoded together: the plan and the script, for `lab batch`, `lab ab` and `lab tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab import feature_list
from lab.core import script
from lab.core.arguments import Numbers
from lab.core.experiments import setup_of
from lab.core.lists import plural
from lab.core.record import COPY, PREFILL, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.runner.refusals import need_every_position, whole_numbers

NAME = feature_list.TOGETHER  # of the experiment in records
N_OWN = 16
"""Last tokens of a shared prompt, which differ between sequences: equal prompts would all get the
same answer.
"""
MOST_SEQUENCES = 256
"""LLAMA_MAX_SEQ of llama.cpp, which aborts with more."""


@dataclass(frozen=True)
class Batch:
    """n_seq sequences were decoded together, after prompts of n_prompt tokens each."""

    n_seq: int
    is_shared: bool  # the prompts differ only in their last tokens, and were prefilled once

    @property
    def label(self) -> str:
        sequences = plural(self.n_seq, "sequence")
        return f"{sequences}, shared prompt" if self.is_shared else sequences


def batch_of(run: Run) -> Batch | None:
    """The batch of a run; None for runs of other experiments."""
    return setup_of(Batch, run.case) if run.experiment == NAME else None


def plan(
    worker: Worker,
    sequences: Numbers,
    prompt_len: Numbers,
    gen: int,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    shared_prompt: bool = False,
    **settings: Any,
) -> Plan:
    """Every number of sequences, after prompts of every length. LabError for impossible numbers."""
    n_seqs = whole_numbers("--sequences", sequences, MOST_SEQUENCES)
    if gen < 2:
        raise LabError(
            f"--gen {gen} leaves nothing to decode together.", "Give at least --gen 2."
        )
    plain = make_plan(worker, prompt_len, gen, repeat, model, **settings)
    n_prompts = [case.n_prompt for case in plain.cases]
    if shared_prompt:
        need_every_position(plain.model)
        if min(n_prompts) <= N_OWN:
            raise LabError(
                f"--shared-prompt needs prompts of more than {N_OWN} tokens.",
                "Give longer prompts: --prompt-len 256",
            )
    most = max(n_seqs)
    if most > plain.settings.n_batch:
        raise LabError(
            f"{most} sequences do not fit into a batch of {plain.settings.n_batch} tokens.",
            f"Use --batch {most}, or fewer --sequences.",
        )
    cases: list[Case] = []
    for n_prompt in n_prompts:
        for n_seq in n_seqs:
            cases.append(case(Batch(n_seq, shared_prompt), n_prompt, gen, plain.settings))
    return with_cases(plain, cases, write)


def case(batch: Batch, n_prompt: int, n_gen: int, settings: Settings) -> Case:
    return Case(
        n_prompt,
        n_gen,
        experiment=NAME,
        setup=batch,
        sequences=cache_lengths(batch, n_prompt, n_gen, settings),
    )


def cache_lengths(
    batch: Batch, n_prompt: int, n_gen: int, settings: Settings
) -> tuple[int, ...]:
    """Cache positions of each sequence; a prompt that is shared in one cache counts once."""
    is_kept_once = batch.is_shared and settings.kv_unified
    n_added = N_OWN if is_kept_once else n_prompt
    return (n_prompt + n_gen, *(n_added + n_gen,) * (batch.n_seq - 1))


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the prompts (several in a step if they fit), then n_gen - 1 steps with a token of
    each sequence.
    """
    batch = case.setup
    assert isinstance(batch, Batch)
    n_seq = batch.n_seq
    operations: list[Operation] = []
    n_common = 0
    if batch.is_shared and n_seq > 1:
        n_common = max(0, case.n_prompt - N_OWN)
    if n_common:
        operations += script.prefill(0, text(0, n_common), settings.n_ubatch, is_last=False)
        operations += [Operation(COPY, sequence=0, target=i) for i in range(1, n_seq)]
    prompts = [text(i, case.n_prompt)[n_common:] for i in range(n_seq)]
    operations += prefill_together(prompts, settings)
    operations += script.decode(range(n_seq), case.n_gen - 1)
    return operations


def prefill_together(prompts: list[list[int]], settings: Settings) -> list[Operation]:
    """Prompts of equal length in common steps, as llama.cpp cuts n_batch tokens into steps of
    n_ubatch.

    With separate caches each step has an equal slice of as many prompts as fit into the batch. With
    one shared cache whole prompts follow each other.
    """
    n_tokens = len(prompts[0])
    n_fitting = settings.n_ubatch if settings.kv_unified else settings.n_batch
    n_together = max(1, min(len(prompts), settings.n_ubatch, n_fitting // n_tokens))
    operations: list[Operation] = []
    for start in range(0, len(prompts), n_together):
        group = range(start, min(start + n_together, len(prompts)))
        n_slice = settings.n_ubatch // len(group)
        for first in range(0, n_tokens, n_slice):
            end = min(first + n_slice, n_tokens)
            n_outputs = 1 if end == n_tokens else 0
            parts = [Part(i, tuple(prompts[i][first:end]), n_outputs) for i in group]
            operations.append(Operation(PREFILL, tuple(parts)))
    return operations
