"""What a run of `lab stall` does, and what it cannot: its case, its script, refusals.

The newcomer is sequence 0, the streams are 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import script
from lab.core.levers import Stall
from lab.core.record import MIXED, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.runner.case import Case, Text

N_CONTEXT, N_BEFORE, N_GEN = 128, 32, 9
"""Tokens of each stream's own prompt, steps of the streams alone, and tokens of the newcomer's answer."""


def case(n_prompt: int, n_streams: int, chunk: int | None, limit_s: float | None = None) -> Case:
    """So many streams, and a prompt of n_prompt tokens in chunks, or (None) all at once; `limit_s` of --max-stall."""
    n_stream = N_CONTEXT + N_BEFORE + n_mixed(n_prompt, chunk) + N_GEN
    return Case(
        n_prompt,
        N_GEN,
        lever=Stall(n_streams, chunk, N_CONTEXT, N_BEFORE, limit_s),
        sequences=(n_prompt + N_GEN, *(n_stream,) * n_streams),
    )


def n_mixed(n_prompt: int, chunk: int | None) -> int:
    """How many steps mix a part of the prompt with the streams' tokens."""
    return 0 if chunk is None else -(-n_prompt // chunk)


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the streams' own prompts, their steps alone, the newcomer's prompt, and steps of all."""
    lever = case.lever
    assert isinstance(lever, Stall)
    streams, prompt = range(1, 1 + lever.n_streams), text(0, case.n_prompt)
    operations = [step for i in streams for step in script.prefill(i, text(i, lever.n_context), settings.n_ubatch)]
    operations += script.decode(streams, lever.n_before)
    if lever.chunk is None:
        operations += script.prefill(0, prompt, settings.n_ubatch)
    else:
        others = tuple(Part(i, None, 1) for i in streams)
        for first in range(0, len(prompt), lever.chunk):
            tokens = tuple(prompt[first : first + lever.chunk])
            is_last = first + lever.chunk >= len(prompt)
            operations.append(Operation(MIXED, (Part(0, tokens, int(is_last)), *others)))
    return [*operations, *script.decode([0, *streams], case.n_gen - 1)]


def newcomer_ids(run: Run) -> tuple[int, ...]:
    """The tokens that were chosen for the newcomer; nothing for other runs."""
    if run.stall is None:
        return ()
    n, lever = run.stall.n_streams, run.stall
    first = n * (1 + lever.n_before + max(0, n_mixed(run.n_prompt, lever.chunk) - 1))
    second = first + (1 if lever.chunk is None else n + 1)  # the last mixed step also chooses a token of each stream
    return (*run.token_ids[first : first + 1], *run.token_ids[second :: n + 1])


def check_chunks(chunks: Sequence[int], n_prompt: int, n_streams: int, n_batch: int) -> None:
    """LabError where the largest chunk is longer than the prompt, or does not fit into a batch with the streams."""
    most = max(chunks, default=0)
    if most > n_prompt:
        raise LabError(
            f"--chunk {most:,} is longer than the prompt of {n_prompt:,} tokens.",
            "Give smaller chunks; the prompt all at once is measured in any case.",
        )
    most = max(most, 1)  # of the search, or the newcomer's own tokens
    if most + n_streams > n_batch:
        raise LabError(
            f"A chunk of {most:,} tokens and {n_streams:,} streams do not fit into a batch of {n_batch:,} tokens.",
            f"Use --batch {most + n_streams}, a smaller --chunk, or fewer --streams.",
        )
