"""Does `lab why` find planted causes on the real engine, and no cause where there is none?

    python -m tests.bench.why planted              # 12 cases, about 20 minutes on two quiet cores
    python -m tests.bench.why equal                # 20 pairs of equal setups, about 5 minutes
    python -m tests.bench.why planted threads      # the planted cases whose name holds a word

A planted case measures two setups side by side (`lab ab`), gives them to `lab why` as two sessions, and compares the
causes with what was planted. The truth of their factors is the ratio that the trial of `lab ab` measured. The other
cases are two sessions of `lab measure`. A sleep in the loop is added to the times of the steps: it must stay in the
part that is not explained. Throttling is added to most of B's runs, with the readings that a throttled CPU leaves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lab
from lab.core import phases, results
from lab.core.record import DECODE, Record

DEEP = "450"
LONG = "1500"
N_EQUAL = 20
BLOCKS = 3
QUIET = 4
DISTURBED = 6
CASES: dict[
    str, tuple[dict[str, Any], set[str], int]
] = {  # B's changes, what is to be named, the budget in seconds
    "threads": ({"threads": 1}, {"threads"}, 30),
    "flash attention": ({"flash_attn": "off"}, {"flash attention"}, 200),
    "depth": ({"prompt_len": DEEP}, {"depth"}, 90),
    "cache type": ({"cache_type_k": "q8_0"}, {"cache type"}, 200),
    "ubatch, of prefill": ({"ubatch": 2}, {"ubatch"}, 30),
    "quantization": ({"model": "smollm2-135m:F16"}, {"quantization"}, 45),
    "a busy core": ({}, {"machine state"}, 0),
    "a throttled engine": ({}, {"machine state"}, 0),
    "prompt counted into the rate": ({}, {"what is counted"}, 0),
    "two causes": ({"prompt_len": DEEP, "threads": 1}, {"depth", "threads"}, 150),
    "three causes": (
        {"prompt_len": DEEP, "threads": 1, "model": "smollm2-135m:F16"},
        {"depth", "threads", "quantization"},
        240,
    ),
    "a sleep in the loop": ({}, {"not explained"}, 0),
}


def slept(record: Record, ms: float) -> Record:
    """The record as if every decode step had taken `ms` longer."""
    steps = record.run.steps
    noise = record.run.noise
    late = [*itertools.accumulate(round(ms * 1e6) * (kind == DECODE) for kind in steps.kind)]
    starts = tuple(map(operator.add, steps.start_ns, [0, *late]))
    ready, ends = (
        tuple(map(operator.add, column, late)) for column in (steps.ready_ns, steps.end_ns)
    )
    changed = dataclasses.replace(steps, start_ns=starts, ready_ns=ready, end_ns=ends)
    if noise and noise.samples:  # the run was watched for as long
        at_ms = (*noise.samples.at_ms[:-1], noise.samples.at_ms[-1] + late[-1] // 1_000_000)
        noise = dataclasses.replace(noise, samples=dataclasses.replace(noise.samples, at_ms=at_ms))
    return dataclasses.replace(
        record, run=dataclasses.replace(record.run, steps=changed, noise=noise)
    )


def throttled(record: Record) -> Record:
    """The record as if the CPU had throttled during the run, which made every token 1.5 times as long."""
    tpot = phases.tpot_ns(record.run) or 0.0
    late = slept(record, 0.5 * tpot / 1e6)
    noise = late.run.noise
    if noise is None:
        raise SystemExit("this machine's runs have no readings, so throttling cannot be planted")
    before, after = (
        dataclasses.replace(one, n_throttled=n) for one, n in ((noise.before, 0), (noise.after, 9))
    )
    heat = dataclasses.replace(noise, before=before, after=after)
    return dataclasses.replace(late, run=dataclasses.replace(late.run, noise=heat))


def timed(n: int, folder: Path) -> list[Record]:
    """The timed runs of a plain session."""
    return [one for one in lab.measure("64", 100, n, threads=1, out=folder) if one.run.is_timed]


def planted(name: str, folder: Path) -> tuple[bool, bool]:
    """Whether the causes of a case are named first, and whether the ratio lies in the range of their product."""
    changes, wanted, budget = CASES[name]
    at = (
        LONG if name in ("flash attention", "cache type") else "64"
    )  # after a short prompt they change nothing
    base = {"prompt_len": at, "threads": 2 if "threads" in changes else 1}
    sides: list[list[Record]] = [[], []]
    if changes:
        for one in lab.ab([base, {**base, **changes}], gen=24, blocks=BLOCKS, out=folder / "ab"):
            if one.run.is_timed:
                sides[str(one.run.variant).startswith("B")].append(one)
    else:
        sides = [timed(QUIET + DISTURBED, folder / "first"), timed(QUIET, folder / "second")]
        # sessions of their own: the scheduler shares cores between sessions first, and the engine has one
        spin = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(spin, start_new_session=True) for _ in range(3 * ("busy" in name))]
        try:
            sides[1] += timed(DISTURBED, folder / "third")
        finally:
            for process in busy:
                process.kill()
    if "throttled" in name:
        sides[1] = [*sides[1][:QUIET], *map(throttled, sides[1][QUIET:])]
    if "sleep" in name:
        sides[1] = [slept(one, 10) for one in sides[1]]
    paths: list[str | Path] = []
    for side, own in zip("AB", sides, strict=True):
        runs = [dataclasses.replace(one.run, block=None, variant=None) for one in own]
        made = [
            dataclasses.replace(one, run=run, session=side)
            for one, run in zip(own, runs, strict=True)
        ]
        paths.append(folder / f"{side}.jsonl")
        results.save(folder / f"{side}.jsonl", *made)
        if side == "B" and "prompt counted" in name:
            run = made[0].run
            seconds = (run.steps.end_ns[-1] - run.steps.start_ns[0]) / 1e9
            text = f"Output generated in {seconds:.3f} seconds ({run.n_gen / seconds:.3f} tokens/s, {run.n_gen} tokens"
            paths[-1] = f"{text}, context {run.n_prompt}, seed 1)"
    found = lab.why(
        paths[0], paths[1], budget=budget, prefill="prefill" in name, out=folder / "why"
    )
    causes = [part.name for part in found.causes]
    rest = found.rest
    shown = "; ".join(
        f"{p.name} {p.factor:.2f} ({'{:.2f}-{:.2f}'.format(*p.range) if p.range else 'range unknown'})"
        for p in found.parts
        if p.log or p.half
    )
    is_open = rest.half is not None and abs(rest.log) > rest.half
    is_right = is_open if wanted == {"not explained"} else set(causes[: len(wanted)]) == wanted
    named = [part for part in found.parts if part.name in wanted]
    spreads = [(one.spread or 0.0) for one in (found.fast, found.slow)]
    half = math.hypot(
        *((part.half or 0.0) for part in named), *(1.96 * spread for spread in spreads), 0.01
    )
    is_within = abs(math.log(found.ratio) - sum(part.log for part in named)) <= half
    words = f"{'right' if is_right else 'WRONG':6} {'within' if is_within else 'BEYOND':7}"
    print(f"{name:29} {words} ratio {found.ratio:.2f}  {shown}", flush=True)
    return is_right, is_within


def equal(number: int, folder: Path) -> bool:
    """Whether two sessions of one setup have no cause, and nothing open."""
    for side in "AB":
        lab.measure("64", 24, 3, threads=1, out=folder / side)
    found = lab.why(folder / "A", folder / "B", budget=0, out=folder)
    is_open = bool(found.causes) or (
        found.rest.half is not None and abs(found.rest.log) > found.rest.half
    )
    print(f"equal {number:2} {'WRONG' if is_open else 'right'} ratio {found.ratio:.3f}", flush=True)
    return not is_open


def main(mode: str, *words: str) -> None:
    began = time.monotonic()
    outcomes = list[tuple[bool, ...]]()
    cases = [name for name in CASES if not words or any(word in name for word in words)]
    for number, name in enumerate(cases if mode == "planted" else [""] * N_EQUAL):
        with TemporaryDirectory() as folder:
            outcomes.append(planted(name, Path(folder)) if name else (equal(number, Path(folder)),))
    counted = [sum(column) for column in zip(*outcomes, strict=True)]
    said = [
        f"{n} of {len(outcomes)} {what}"
        for n, what in zip(counted, ("right", "within"), strict=False)
    ]
    print(f"{mode}: {', '.join(said)}, {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["equal"]))
