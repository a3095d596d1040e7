"""Numbers of a line that must fit each other: ranges alone do not make a measurement.

Figures divide by these numbers and walk along them. What does not fit is refused where lines are
read, so that nothing behind has to ask again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lab.core.record import (
    COPY,
    DECODE,
    DRAFT,
    FORGET,
    LOAD,
    MIXED,
    OK,
    PREFILL,
    SAVE,
    VERIFY,
    Ceilings,
    Model,
    Rate,
    Record,
    Run,
    Settings,
    Steps,
)
from lab.core.request import Request, RequestRecord

KINDS = {PREFILL, DECODE, MIXED, DRAFT, VERIFY, FORGET, COPY, SAVE, LOAD}
WITH_TOKENS = {PREFILL, DECODE, MIXED, VERIFY}
READERS = {"read", "mul_mat", "mul_mat_id"}
WITH_FLOPS = {"mul_mat", "mul_mat_id", "attention", "plain_attention"}
MOST_IMPORTED = 100_000  # steps of an imported run
BY_LAYER = ("windows", "heads", "heads_kv", "head_dims", "states")


def check(line: object) -> None:
    """ValueError says which numbers of a line do not fit each other."""
    if isinstance(line, Record):
        check_model(line.model)
        check_steps(line.run.steps)
        if line.run.status == OK and line.run.is_plain:
            check_plain_run(line.run, line.settings)
    elif isinstance(line, RequestRecord):
        check_request(line.request)
    elif isinstance(line, Ceilings):
        check_ceilings(line)


def check_model(model: Model) -> None:
    for name in BY_LAYER:
        column = getattr(model, name)
        if column is not None and len(column) != model.n_layer:
            raise ValueError(f"model.{name} has {len(column):,} layers, not {model.n_layer}")


def check_steps(steps: Steps) -> None:
    unknown = set(steps.kind) - KINDS
    if unknown:
        raise ValueError("run.steps.kind has an unknown kind")
    is_ordered = (
        is_rising(steps.start_ns, steps.ready_ns)
        and is_rising(steps.ready_ns, steps.end_ns)
        and is_rising(steps.end_ns[:-1], steps.start_ns[1:])
    )
    if not is_ordered:
        raise ValueError("run.steps are not in the order of their times")
    for kind, n_tokens, start, ready in zip(
        steps.kind, steps.n_tokens, steps.start_ns, steps.ready_ns, strict=True
    ):
        if kind in WITH_TOKENS and (n_tokens < 1 or ready <= start):
            raise ValueError("run.steps has a step without tokens or without time")


def is_rising(earlier: Sequence[int], later: Sequence[int]) -> bool:
    """Whether no time of a column is after that of the other column."""
    return all(map(operator.le, earlier, later))


def check_plain_run(run: Run, settings: Settings) -> None:
    """The steps of a prompt and an answer, or of a sweep of them, have its tokens."""
    steps = run.steps
    if not steps.kind:
        raise ValueError("run.steps has no step of a run that succeeded")
    if run.imported_from is not None:
        check_imported_run(run, settings)
        return
    n_prefilled = 0
    for kind, n_tokens in zip(steps.kind, steps.n_tokens, strict=True):
        if kind == PREFILL:
            n_prefilled += n_tokens
    if n_prefilled != run.n_prompt:
        raise ValueError(
            f"run.steps has {n_prefilled:,} tokens of the prompt, not run.n_prompt, which is"
            f" {run.n_prompt:,}"
        )
    n_decoded = steps.kind.count(DECODE)
    if run.every is None and n_decoded != max(0, run.n_gen - 1):
        raise ValueError(
            f"run.steps has {n_decoded:,} tokens of the answer after the first, and run.n_gen is"
            f" {run.n_gen:,}"
        )


def check_imported_run(run: Run, settings: Settings) -> None:
    """One step has all tokens, so that nothing but its number says how many there were."""
    if len(run.steps.kind) != 1:
        raise ValueError("run.steps of an imported run is not one step")
    n_steps = run.n_prompt // settings.n_ubatch + run.n_gen
    if n_steps > MOST_IMPORTED:
        raise ValueError(f"run would have {n_steps:,} steps, and may have {MOST_IMPORTED:,}")


def check_ceilings(ceilings: Ceilings) -> None:
    for rate in ceilings.rates:
        check_rate(rate)
    has_arithmetic = any(rate.flops for rate in ceilings.rates)
    has_reading = any(rate.n_tokens == 1 and rate.op in READERS for rate in ceilings.rates)
    if not has_arithmetic or not has_reading:
        raise ValueError("ceilings.rates has no kernel that computes, or none that reads")
    for line in ceilings.others or ():
        check_ceilings(line)


def check_rate(rate: Rate) -> None:
    sizes = [rate.rows, rate.columns, rate.n_tokens, rate.n_threads, rate.n_bytes]
    if rate.op in WITH_FLOPS:
        sizes.append(rate.flops)
    for size in (rate.n_head_kv, rate.n_positions, rate.n_expert, rate.n_expert_used):
        if size is not None:
            sizes.append(size)
    if min(sizes) < 1 or not rate.times_ns:
        raise ValueError("ceilings.rates has a kernel without work, size or times")


def check_request(request: Request) -> None:
    events = request.events
    stamps = [request.headers_ns or 0, *events.arrive_ns]
    if request.ended_ns is not None:
        stamps.append(request.ended_ns)
    if not is_rising(stamps[:-1], stamps[1:]):
        raise ValueError("request.events are not in the order of their times")
