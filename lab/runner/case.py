"""A case: one thing that is measured again and again, how it becomes a script, and the run that a failure leaves.

A plain case is a prompt of so many tokens and so many generated ones. An experiment (lab/experiments) has cases with a
lever, and writes their scripts itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lab.core import record, script
from lab.core.levers import LOOKUP, Batch, Lever, Prefix, Speculation, Stall, name_of
from lab.core.memory import padded
from lab.core.record import Run, Settings, Steps
from lab.core.script import Operation
from lab.errors import LabError
from lab.process.worker import WorkerDied


@dataclass(frozen=True)
class Case:
    """What a run does, whatever its prompts say: runs of one case are repeats of each other.

    `sequences`: how many tokens each sequence will have at its end; empty where there is one, of n_prompt + n_gen.
    `text`: what its prompts are cut from, as `--prompt` names it; None: what all are cut from.
    """

    n_prompt: int
    n_gen: int
    every: int | None = None  # a sweep
    lever: Lever | None = None
    sequences: tuple[int, ...] = ()
    text: str | None = None

    @property
    def n_generated(self) -> int:
        """Tokens that a measured run generates: n_gen, in a sweep as often as it stops to decode."""
        return self.n_gen * (1 if self.every is None else -(-self.n_prompt // self.every))

    @property
    def name(self) -> str:
        """In progress lines and in errors."""
        return name_of(self.n_prompt, self.lever)


Text = Callable[[int, int], list[int]]
"""Gives sequence i a prompt of n tokens."""


def measured_run(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script of a case without a lever."""
    prompt = text(0, case.n_prompt)
    if case.every is None:
        return script.run(prompt, case.n_gen, settings.n_ubatch)
    return script.sweep(prompt, case.n_gen, settings.n_ubatch, case.every)


def with_room(settings: Settings, cases: Sequence[Case]) -> Settings:
    """The settings of a context in which each of these cases can run, one after the other.

    Sequences share one cache (`kv_unified`), or have one each, all of the same size.
    """
    lengths = [case.sequences or (case.n_prompt + case.n_gen,) for case in cases]
    n_seq = max(map(len, lengths))
    n_ctx = max(map(sum, lengths))
    if n_seq > 1 and not settings.kv_unified:
        n_ctx = n_seq * padded(max(map(max, lengths)))
    return dataclasses.replace(settings, n_ctx=n_ctx, n_seq_max=n_seq)


def named(case: Case) -> dict[str, Any]:
    """The fields of a run that say what it did."""
    levers = {"batch": Batch, "prefix": Prefix, "stall": Stall, "speculation": Speculation}
    lever = {name: case.lever for name, kind in levers.items() if isinstance(case.lever, kind)}
    return {"n_prompt": case.n_prompt, "n_gen": case.n_gen, "every": case.every, **lever}


def is_of_draft(case: Case) -> bool:
    """Whether a draft model takes part."""
    return isinstance(case.lever, Speculation) and case.lever.draft not in (None, LOOKUP)


def failed_run(case: Case, repeat: int, problem: LabError, warmup: bool = False) -> Run:
    """The run that `problem` prevented."""
    return Run(
        **named(case),
        repeat=repeat,
        warmup=warmup,
        started_at=utc_now(),
        status=record.CRASHED if isinstance(problem, WorkerDied) else record.FAILED,
        error=str(problem),
        steps=Steps(),
        token_ids=(),
        prompt_offset=None,
        end_of_generation_at=None,
        noise=None,
    )


def utc_now() -> str:
    """This moment, as records have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
