"""Does `lab why` find planted causes on the real engine?

    python -m tests.bench.why                      # every case, about two minutes each on a quiet machine
    python -m tests.bench.why threads depth        # cases whose name holds a word
    python -m tests.bench.why equal --blocks 2 --budget 30s

Each case measures two setups side by side (`lab ab`), gives them to `lab why` as two sessions, and compares the largest
cause and its factor with what was planted. The true factor of a planted setting is the ratio that the trial measured; a
sleep in the loop is added to the times of the steps and must stay in the part that is not explained.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lab
from lab.core import results
from lab.core.record import DECODE, Record

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "equal": ({}, {}, set()),
    "threads": ({"threads": 1}, {"threads": 2}, {"threads"}),
    "flash attention": ({"flash_attn": "on"}, {"flash_attn": "off"}, {"flash attention"}),
    "depth": ({}, {"prompt_len": "2000"}, {"depth"}),
    "cache type": ({}, {"cache_type_k": "q8_0"}, {"cache type"}),
    "ubatch, of prefill": ({}, {"ubatch": 16}, {"ubatch"}),
    "quantization": ({}, {"model": "smollm2-135m:Q8_0"}, {"quantization"}),
    "depth and flash attention": ({}, {"prompt_len": "2000", "flash_attn": "off"}, {"depth", "flash attention"}),
    "a sleep in the loop": ({}, {"sleep_ms": 10}, {"not explained"}),
}


def slept(record: Record, ms: float) -> Record:
    """The record as if every decode step had taken `ms` longer."""
    steps, late = record.run.steps, 0
    moved: dict[str, list[int]] = {"start_ns": [], "ready_ns": [], "end_ns": []}
    for i, kind in enumerate(steps.kind):
        moved["start_ns"].append(steps.start_ns[i] + late)
        late += round(ms * 1e6) if kind == DECODE else 0
        moved["ready_ns"].append(steps.ready_ns[i] + late)
        moved["end_ns"].append(steps.end_ns[i] + late)
    starts, ready, ends = (tuple(moved[key]) for key in ("start_ns", "ready_ns", "end_ns"))
    changed = dataclasses.replace(steps, start_ns=starts, ready_ns=ready, end_ns=ends)
    return dataclasses.replace(record, run=dataclasses.replace(record.run, steps=changed))


def case(name: str, blocks: int, budget: str, shared: dict[str, Any], folder: Path) -> None:
    """Measure two setups, ask why they differ, and print what was found."""
    first, second, planted = CASES[name]
    sleep = second.get("sleep_ms", 0)
    base = {"prompt_len": "64", **shared}
    sides = [{**base, **first}, {key: value for key, value in {**base, **second}.items() if key != "sleep_ms"}]
    records = lab.ab(sides, gen=24, blocks=blocks, out=folder / "ab")
    names = sorted({str(record.run.variant) for record in records})
    paths = []
    for side, variant in zip("AB", names, strict=True):
        own = [one for one in records if one.run.variant == variant and one.run.is_timed]
        own = [slept(one, sleep) if sleep and side == "B" else one for one in own]
        plain = [dataclasses.replace(one.run, block=None, variant=None) for one in own]
        made = [dataclasses.replace(one, run=run, session=side) for one, run in zip(own, plain, strict=True)]
        paths.append(folder / f"{side}.jsonl")
        results.append(paths[-1], *made)
    found = lab.why(paths[0], paths[1], budget=budget, prefill="prefill" in name, out=folder / "why")
    causes = [part.name for part in found.causes]
    rest = found.rest
    shown = "; ".join(
        f"{p.name} {p.factor:.2f} ({'{:.2f}-{:.2f}'.format(*p.range) if p.range else 'range unknown'})"
        for p in found.parts
        if p.log or p.half
    )
    is_open = rest.half is not None and abs(rest.log) > rest.half
    right = is_open if planted == {"not explained"} else set(causes[: len(planted)]) == planted
    print(f"{name:28} {'right' if right else 'WRONG':6} ratio {found.ratio:.2f}  {shown}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only cases whose name holds one of these")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--budget", default="1min")
    parser.add_argument("--threads", type=int, default=1, help="of all cases except threads")
    asked = parser.parse_args(arguments)
    for name in CASES:
        if not asked.words or any(word in name for word in asked.words):
            with TemporaryDirectory() as folder:
                shared = {} if name == "threads" else {"threads": asked.threads}
                case(name, asked.blocks, asked.budget, shared, Path(folder))


if __name__ == "__main__":
    main()
