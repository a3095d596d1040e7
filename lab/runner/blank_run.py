"""What is known of a run before it is made: the fields that its case gives it, and the run that a failure leaves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lab.core import record
from lab.core.levers import LOOKUP, Batch, Prefix, Speculation, Stall
from lab.core.record import Run, Steps
from lab.errors import LabError
from lab.process.worker import WorkerDied
from lab.runner.case import Case


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
