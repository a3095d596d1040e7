"""Is `lab why` right? Planted causes and equal setups (pasted texts: tests/test_why_pasted.py).

    python -m tests.bench.why planted              # 12 cases, about 20 minutes on two quiet cores
    python -m tests.bench.why equal                # 20 pairs of equal setups, about 5 minutes
    python -m tests.bench.why planted threads      # the planted cases whose name holds a word

A planted case measures two setups side by side (`lab ab`), gives them to `lab why` as two
sessions, and compares the causes with what was planted. A sleep in the loop is added to the times
of the steps: it must stay in the part that is not explained. Throttling is added to most of B's
runs, with the readings that a throttled CPU leaves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lab
from lab.core import phases, results
from lab.core.record import DECODE, Record
from lab.features.why.answer import WhyAnswer

DEEP = "450"
LONG = "1500"  # after a short prompt flash attention and cache types change nothing
SHORT = "64"
N_EQUAL = 20
BLOCKS = 3
QUIET = 4
DISTURBED = 6
SLEEP_MS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A planted case: B's changes, the causes to be named, and the budget in seconds."""

    name: str
    causes: frozenset[str]
    budget: int = 0
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    length: str = SHORT
    prefill: bool = False


CASES = (
    Case("threads", frozenset(["threads"]), 30, {"threads": 1}),
    Case(
        "flash attention",
        frozenset(["flash attention"]),
        200,
        {"flash_attn": "off"},
        LONG,
    ),
    Case("depth", frozenset(["depth"]), 90, {"prompt_len": DEEP}),
    Case(
        "cache type",
        frozenset(["cache type"]),
        200,
        {"cache_type_k": "q8_0"},
        LONG,
    ),
    Case(
        "ubatch, of prefill",
        frozenset(["ubatch"]),
        30,
        {"ubatch": 2},
        prefill=True,
    ),
    Case("quantization", frozenset(["quantization"]), 45, {"model": "smollm2-135m:F16"}),
    Case("a busy core", frozenset(["machine state"])),
    Case("a throttled engine", frozenset(["machine state"])),
    Case("prompt counted into the rate", frozenset(["what is counted"])),
    Case(
        "two causes",
        frozenset(["depth", "threads"]),
        150,
        {"prompt_len": DEEP, "threads": 1},
    ),
    Case(
        "three causes",
        frozenset(["depth", "threads", "quantization"]),
        240,
        {
            "prompt_len": DEEP,
            "threads": 1,
            "model": "smollm2-135m:F16",
        },
    ),
    Case("a sleep in the loop", frozenset(["not explained"])),
)


def with_sleep(record: Record, ms: float) -> Record:
    """The record as if every decode step had taken `ms` longer."""
    steps = record.run.steps
    added = [round(ms * 1e6) if kind == DECODE else 0 for kind in steps.kind]
    late = list(itertools.accumulate(added))
    late_starts = [0, *late[:-1]]
    changed = dataclasses.replace(
        steps,
        start_ns=tuple(map(sum, zip(steps.start_ns, late_starts, strict=True))),
        ready_ns=tuple(map(sum, zip(steps.ready_ns, late, strict=True))),
        end_ns=tuple(map(sum, zip(steps.end_ns, late, strict=True))),
    )
    noise = record.run.noise
    if noise and noise.samples:  # the run was watched for as long
        at_ms = (*noise.samples.at_ms[:-1], noise.samples.at_ms[-1] + late[-1] // 1_000_000)
        noise = dataclasses.replace(
            noise, samples=dataclasses.replace(noise.samples, at_ms=at_ms)
        )
    return dataclasses.replace(
        record, run=dataclasses.replace(record.run, steps=changed, noise=noise)
    )


def throttled(record: Record) -> Record:
    """The record as if the CPU had throttled, which made every token 1.5 times as long."""
    tpot_ns = phases.tpot_ns(record.run) or 0.0
    slower = with_sleep(record, 0.5 * tpot_ns / 1e6)
    noise = slower.run.noise
    if noise is None:
        raise SystemExit(
            "this machine's runs have no readings, so throttling cannot be planted"
        )
    hot = dataclasses.replace(
        noise,
        before=dataclasses.replace(noise.before, n_throttled=0),
        after=dataclasses.replace(noise.after, n_throttled=9),
    )
    return dataclasses.replace(slower, run=dataclasses.replace(slower.run, noise=hot))


def timed_runs(n_runs: int, folder: Path) -> list[Record]:
    """The timed runs of a plain session."""
    records = lab.measure("64", 100, n_runs, threads=1, out=folder)
    return [record for record in records if record.run.is_timed]


@contextmanager
def busy_cores(n_cores: int) -> Iterator[None]:
    """Programs that keep cores busy, in sessions of their own, as the scheduler shares by
    session."""
    spin = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(spin, start_new_session=True) for _ in range(n_cores)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()


def side_by_side(case: Case, folder: Path) -> tuple[list[Record], list[Record]]:
    """The runs of A and of B, which has the case's changes."""
    base = {
        "prompt_len": case.length,
        "threads": 2 if "threads" in case.changes else 1,
    }
    variants = [base, {**base, **case.changes}]
    sides: tuple[list[Record], list[Record]] = ([], [])
    for record in lab.ab(
        variants,
        gen=24,
        repeat=BLOCKS,
        out=folder / "ab",
    ):
        if record.run.is_timed:
            is_b = str(record.run.variant).startswith("B")
            sides[1 if is_b else 0].append(record)
    return sides


def disturbed_later(case: Case, folder: Path) -> tuple[list[Record], list[Record]]:
    """Two sessions of one setup; most runs of the second one are disturbed as the case says."""
    first = timed_runs(QUIET + DISTURBED, folder / "first")
    second = timed_runs(QUIET, folder / "second")
    with busy_cores(3 if "busy" in case.name else 0):
        third = timed_runs(DISTURBED, folder / "third")
    if "throttled" in case.name:
        third = [throttled(record) for record in third]
    if "sleep" in case.name:
        second = [with_sleep(record, SLEEP_MS) for record in second]
        third = [with_sleep(record, SLEEP_MS) for record in third]
    return first, [*second, *third]


def saved(
    records: Sequence[Record],
    session: str,
    folder: Path,
) -> Path:
    """The file of records as a plain session of its own."""
    path = folder / f"{session}.jsonl"
    for record in records:
        run = dataclasses.replace(record.run, block=None, variant=None)
        results.save(path, dataclasses.replace(record, run=run, session=session))
    return path


def as_whole_answer(record: Record) -> str:
    """A run as text-generation-webui prints it: its rate divides by the time of prefill too."""
    run = record.run
    seconds = (run.steps.end_ns[-1] - run.steps.start_ns[0]) / 1e9
    return (
        f"Output generated in {seconds:.3f} seconds ({run.n_gen / seconds:.3f} tokens/s, "
        f"{run.n_gen} tokens, context {run.n_prompt}, seed 1)\n"
    )


def planted(case: Case, folder: Path) -> tuple[bool, bool]:
    """Whether a case's causes are named first, and whether their product has the ratio in its
    range.
    """
    sides = side_by_side(case, folder) if case.changes else disturbed_later(case, folder)
    a: str | Path = saved(sides[0], "A", folder)
    b: str | Path = saved(sides[1], "B", folder)
    if "prompt counted" in case.name:
        b = as_whole_answer(sides[1][0])
    explained = lab.why(
        a,
        b,
        budget=case.budget,
        prefill=case.prefill,
        out=folder / "why",
    )
    is_right = names_causes(explained, case.causes)
    is_within = has_ratio_in_range(explained, case.causes)
    parts = [
        f"{part.name} {part.factor:.2f}" for part in explained.parts if part.log or part.half
    ]
    print(
        f"{case.name:29} {'right' if is_right else 'WRONG':6} "
        f"{'within' if is_within else 'BEYOND':7} ratio {explained.ratio:.2f}  {'; '.join(parts)}",
        flush=True,
    )
    return is_right, is_within


def is_open(explained: WhyAnswer) -> bool:
    """Whether a part of the ratio is not explained."""
    unexplained = explained.rest
    return unexplained.half is not None and abs(unexplained.log) > unexplained.half


def names_causes(explained: WhyAnswer, expected: frozenset[str]) -> bool:
    """Whether the first causes are the expected ones, or nothing is explained where nothing is to
    be.
    """
    if expected == {"not explained"}:
        return is_open(explained)
    names = [cause.name for cause in explained.causes]
    return set(names[: len(expected)]) == expected


def has_ratio_in_range(explained: WhyAnswer, expected: frozenset[str]) -> bool:
    """Whether the ratio lies in the range of the product of the expected parts."""
    named = [part for part in explained.parts if part.name in expected]
    halves = [part.half or 0.0 for part in named]
    halves += [1.96 * (figure.spread or 0.0) for _, figure in explained.pair.sides]
    product = sum(part.log for part in named)
    return abs(math.log(explained.ratio) - product) <= math.hypot(*halves, 0.01)


def equal(number: int, folder: Path) -> bool:
    """Whether two sessions of one setup have no cause, and nothing open."""
    for side in "AB":
        lab.measure("64", 24, 3, threads=1, out=folder / side)
    explained = lab.why(
        folder / "A",
        folder / "B",
        budget=0,
        out=folder,
    )
    is_wrong = bool(explained.causes) or is_open(explained)
    word = "WRONG" if is_wrong else "right"
    print(f"equal {number:2} {word} ratio {explained.ratio:.3f}", flush=True)
    return not is_wrong


def run_cases(mode: str, name_part: str) -> None:
    """Run the planted cases whose name holds a word, or pairs of equal setups."""
    began = time.monotonic()
    outcomes = list[tuple[bool, ...]]()
    if mode == "planted":
        for case in CASES:
            if name_part in case.name:
                with TemporaryDirectory() as folder:
                    outcomes.append(planted(case, Path(folder)))
    else:
        for number in range(N_EQUAL):
            with TemporaryDirectory() as folder:
                outcomes.append((equal(number, Path(folder)),))
    minutes = (time.monotonic() - began) / 60
    counts = [sum(column) for column in zip(*outcomes, strict=True)]
    labels = ["right", "within"][: len(counts)]
    summary = [
        f"{n} of {len(outcomes)} {label}" for n, label in zip(counts, labels, strict=True)
    ]
    print(f"{mode}: {', '.join(summary)}, {minutes:.1f} minutes")


def main(mode: str = "equal", argument: str = "") -> None:
    run_cases(mode, argument)


if __name__ == "__main__":
    main(*sys.argv[1:3])
