"""Runs of lab stall by the fake engine."""

from __future__ import annotations

import dataclasses

from lab.core import script as scripts
from lab.core.record import Record
from lab.features import stall as room
from tests.support.records import SETTINGS, make_record, make_run, steps_of

ONE_CACHE = dataclasses.replace(SETTINGS, kv_unified=True, n_ubatch=512)


def text(sequence: int, n: int) -> list[int]:
    return [(7 * sequence + i) % 100 for i in range(n)]


def stall_record(
    n_prompt: int, chunk: int | None, n_streams: int = 1, decode_ms: float = 10
) -> Record:
    """A run of the fake engine: a prompt's token takes 1 ms, choosing a token 1 ms."""
    case = room.case(n_prompt, n_streams, chunk)
    script = room.write(case, text, ONE_CACHE)
    run = make_run(
        n_prompt,
        case.n_gen,
        steps=steps_of(script, decode_ms=decode_ms),
        experiment="stall",
        setup=case.setup,
        token_ids=tuple(range(scripts.n_chosen(script))),
    )
    return make_record(run, settings=ONE_CACHE)
