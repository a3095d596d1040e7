"""Every field of every sample with values that nobody measured, through every command that reads
results.

    python -m tests.bench.fuzz_fields --minutes 10

Draws cases at random without repeating one, prints each new kind of problem once, and writes the
case of each into --seeds (a line of JSON). Nothing but a result or a LabError may come out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.hostile import fields
from tests.hostile.fields import Case, Finding


def all_cases() -> list[Case]:
    """Every field of every sample, with every change, in each choice of lines."""
    cases: dict[Case, None] = {}
    for path in sorted(fields.RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            document = json.loads(line)
            for field in fields.fields(document):
                value = fields.part_of(document, field)
                for change in (*fields.changes(value), *fields.OF_DOCUMENT):
                    for lines in fields.LINES:
                        cases[Case(path.name, field, change, lines)] = None
    return list(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", default="", help="a part of the name")
    parser.add_argument("--field", default="", help="a part of the field's place")
    parser.add_argument("--commands", default=",".join(fields.COMMANDS))
    parser.add_argument("--n-commands", type=int, default=4, help="drawn for each case")
    parser.add_argument("--seeds", type=Path)
    parser.add_argument("--traces", action="store_true")
    asked = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if asked.sample in case.sample and asked.field in case.field
    ]
    drawn = random.Random(asked.seed)
    drawn.shuffle(cases)
    end = time.monotonic() + 60 * asked.minutes
    problems: dict[str, Finding] = {}
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if time.monotonic() > end:
                break
            commands = drawn.sample(asked.commands.split(","), asked.n_commands)
            findings, is_read = fields.attack(case, Path(folder), tuple(commands))
            counts["tried"] += 1
            counts["read"] += is_read
            for finding in findings:
                counts["found"] += 1
                if finding.problem not in problems:
                    problems[finding.problem] = finding
                    report(finding, asked.traces)
    minutes = (time.monotonic() - began) / 60
    print(
        f"{counts['tried']:,} of {len(cases):,} cases in {minutes:.1f} minutes"
        f" ({counts['tried'] / minutes:.0f} a minute), {counts['read']:,} of them read;"
        f" {counts['found']} findings of {len(problems)} kinds"
    )
    if asked.seeds is not None:
        asked.seeds.write_text("".join(map(seed, problems.values())))
    raise SystemExit(1 if problems else 0)


def seed(finding: Finding) -> str:
    """A line of tests/hostile/seeds.jsonl."""
    return json.dumps({**dataclasses.asdict(finding.case), "command": finding.command}) + "\n"


def report(finding: Finding, has_trace: bool) -> None:
    case = finding.case
    print(
        f"{finding.command}: {finding.problem}\n"
        f"    {case.sample} {case.field}, {case.change}, {case.lines}",
        flush=True,
    )
    if has_trace:
        print(finding.details, flush=True)


if __name__ == "__main__":
    main()
