"""Sessions of lab tune."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lab.core.record import FAILED, Record, Steps
from lab.features.tune import section
from lab.features.tune.figures import Tuned, of_sessions
from lab.features.tune.lines import CONFIRM, SEARCH, TuningLine
from lab.show.section import Context, Section
from tests.support.records import MACHINE, MODEL, SETTINGS, make_record, make_run

DEFAULT = "default"
OFF = "--flash-attn off"
ONE = "--threads 1"
LOSSY = "--cache-type-k q8_0"
BOTH = "--flash-attn off --no-repack"
CHOICES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    OFF: {"flash_attn": "off", "flash_attn_resolved": "off"},
    ONE: {"n_threads": 1},
    "--no-repack": {"repack": False},
    LOSSY: {"type_k": "q8_0"},
    BOTH: {"flash_attn": "off", "flash_attn_resolved": "off", "repack": False},
}


SESSION = "20260101T000000Z-tune"
N_PROMPT = 20
N_GEN = 301
COMMAND = ("tune", "--prompt-len", "20", "--gen", "301", "--allow-lossy")


def first_line(goal: str = "request") -> TuningLine:
    return TuningLine(
        session=SESSION,
        machine=MACHINE,
        model=MODEL,
        settings=SETTINGS,
        started_at="2026-01-01T00:00:00Z",
        goal=goal,
        n_gen=N_GEN,
        command=COMMAND,
    )


def run_of(
    variant: str, block: int, part: str = SEARCH, decode_ms: float = 9.0, **changes: Any
) -> Record:
    """A run of a choice: TTFT is 21 ms, TPOT decode_ms + 1; blocks differ by up to 2 %."""
    settings = dataclasses.replace(SETTINGS, **CHOICES.get(variant, {}))
    of_block = 1 + 0.01 * (block % 3)
    run = make_run(
        N_PROMPT,
        5,
        prefill_ms=of_block,
        decode_ms=decode_ms * of_block,
        block=block,
        variant=variant,
        part=part,
        **changes,
    )
    return make_record(
        run,
        session=SESSION,
        settings=settings,
        command=COMMAND,
    )


def searching(times_ms: dict[str, float], n_blocks: int = 4) -> list[Record]:
    """The search: a run of each choice in each block, with some jitter."""
    records = []
    for block in range(n_blocks):
        for i, (variant, ms) in enumerate(times_ms.items()):
            jitter = 1 + 0.003 * ((block * 7 + i) % 5 - 2)
            records.append(run_of(variant, block, decode_ms=ms * jitter))
    return records


def confirming(
    variant: str,
    gain: float = 2.0,
    n_blocks: int = 6,
) -> list[Record]:
    """The confirmation: default, winner, winner, default in each block."""
    records = []
    for block in range(n_blocks):
        for i, name in enumerate((DEFAULT, variant, variant, DEFAULT)):
            ms = 9.0 if name == DEFAULT else 9.0 / gain
            jitter = 1 + 0.002 * ((block + i) % 3 - 1)
            records.append(run_of(name, 100 + block, CONFIRM, ms * jitter, repeat=i // 2))
    return records


USUAL = {DEFAULT: 9.0, OFF: 4.5, ONE: 12.0}


def full_session() -> list[Any]:
    """A session with everything in it: a winner, a loser, a lossy choice, a failure."""
    failed = run_of(
        "--no-mmap",
        0,
        status=FAILED,
        error="llama.cpp is out of memory",
        steps=Steps(),
        token_ids=(),
    )
    return [first_line(), *searching({**USUAL, LOSSY: 8.0}), *confirming(OFF), failed]


def result_of(lines: Sequence[Any]) -> Tuned:
    (result,) = of_sessions(lines)
    return result


def section_of(lines: Sequence[Any]) -> Section:
    return section.section(result_of(lines), Context(details=True))
