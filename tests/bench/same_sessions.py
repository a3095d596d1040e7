"""Does `lab compare` see differences between sessions that are the same?

    python3 -m uv run python -m tests.bench.same_sessions FOLDER [SESSIONS] [MINUTES]

Makes SESSIONS (16) equal sessions of `lab measure` spread over MINUTES (20) in FOLDER, unless they are there, and
compares every pair: alone (with the spread that is assumed for the machine) and with the other sessions known. At most
5 % of the pairs may get another verdict than "no difference", "too few runs" or "disturbed". Then a planted difference:
the times of one session of each pair made 5, 10, 20 and 50 % longer; how many pairs call it slower.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.core import results
from lab.core.record import Machine, Record, Steps
from lab.show import comparison
from lab.show.comparison import ALIKE, DISTURBED, SLOWER, TOO_FEW
from lab.show import disturbances

ARGUMENTS = ("--prompt-len", "16,256", "--gen", "32", "--repeat", "6", "--no-plot")


def measure(folder: Path, n_sessions: int, minutes: float) -> None:
    """The sessions that are still missing, each a process of its own, at equal intervals."""
    started = time.monotonic()
    for number in range(len(list(folder.glob("*.jsonl"))), n_sessions):
        wait_s = started + 60 * minutes * number / max(1, n_sessions - 1) - time.monotonic()
        time.sleep(max(0.0, wait_s))
        command = [sys.executable, "-m", "lab", "measure", *ARGUMENTS, "--out", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        print(f"session {number + 1} of {n_sessions}", file=sys.stderr, flush=True)


def slower(record: Record, factor: float) -> Record:
    """The record as if everything had taken `factor` times as long, on another machine of the same kind."""
    columns = {f.name: getattr(record.run.steps, f.name) for f in dataclasses.fields(Steps)}
    stamps = {
        name: tuple(round(factor * ns) for ns in columns[name])
        for name in ("start_ns", "ready_ns", "end_ns")
    }
    run = dataclasses.replace(record.run, steps=Steps(**{**columns, **stamps}))
    machine: Machine = dataclasses.replace(record.machine, os=f"{record.machine.os} (slower)")
    return dataclasses.replace(record, run=run, machine=machine)


def verdicts(a: Sequence[Record], b: Sequence[Record], others: Sequence[Record]) -> set[str]:
    (compared,) = comparison.compare([*a, *b], others=others)
    return {row.verdict for row in compared.rows}


def evaluate(sessions: dict[str, list[Record]]) -> None:
    pairs = list(itertools.combinations(sessions, 2))
    doubtful = sum(disturbances.is_doubtful(records) for records in sessions.values())
    print(
        f"{len(sessions)} sessions, {doubtful} of them disturbed in half of their runs or more; {len(pairs)} pairs"
    )
    for (_, figure), known in comparison.known_spreads(
        [r for records in sessions.values() for r in records]
    ).items():
        print(f"  {figure}: {math.expm1(known.sd):.1%} ({known.source})")
    for figure in ("prefill_s", "tpot_ms"):
        for n_prompt, values in centres(sessions, figure).items():
            deviation = statistics.stdev(math.log(value) for value in values)
            print(
                f"  {figure} at {n_prompt}: medians of sessions {min(values):.4g} to {max(values):.4g}, "
                f"standard deviation of logarithms {deviation:.3f}"
            )
    for name, with_others in (("each pair alone", False), ("the other sessions known", True)):
        called = 0
        found = dict.fromkeys((1.05, 1.1, 1.2, 1.5), 0)
        for a, b in pairs:
            others = [
                r
                for key, records in sessions.items()
                if with_others and key not in (a, b)
                for r in records
            ]
            called += not verdicts(sessions[a], sessions[b], others) <= {ALIKE, TOO_FEW, DISTURBED}
            for factor in found:
                changed = [slower(record, factor) for record in sessions[b]]
                found[factor] += SLOWER in verdicts(sessions[a], changed, others)
        planted = ", ".join(
            f"{factor - 1:.0%} in {n / len(pairs):.0%}" for factor, n in found.items()
        )
        print(
            f"{name}: {called} of {len(pairs)} pairs called different ({called / len(pairs):.1%}); planted: {planted}"
        )


def centres(sessions: dict[str, list[Record]], figure: str) -> dict[int, list[float]]:
    """The medians of the sessions, by prompt length."""
    from lab.show import table

    rows = table.runs([record for records in sessions.values() for record in records])
    rows = rows[(rows.status == "ok") & ~rows.warmup]
    return {
        int(n): part.groupby("session")[figure].median().tolist()
        for n, part in rows.groupby("n_prompt")
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    measure(
        folder,
        int(sys.argv[2]) if len(sys.argv) > 2 else 16,
        float(sys.argv[3]) if len(sys.argv) > 3 else 20,
    )
    sessions: dict[str, list[Record]] = {}
    for record in results.read([folder]).records:
        if record.run.status == "ok" and not record.run.warmup:
            sessions.setdefault(record.session, []).append(record)
    evaluate(sessions)


if __name__ == "__main__":
    main()
