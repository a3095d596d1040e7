"""Does `lab compare` see differences between sessions that are the same?

    python3 -m uv run python -m tests.bench.same_sessions FOLDER [SESSIONS] [MINUTES]

Makes SESSIONS (16) equal sessions of `lab measure` spread over MINUTES (20) in FOLDER, unless they
are there, and compares every pair: alone (with the spread that is assumed for the machine) and with
the other sessions known. At most 5 % of the pairs may get another verdict than "no difference",
"too few runs" or "disturbed". Then a planted difference: the times of one session of each pair made
5, 10, 20 and 50 % longer; how many pairs call it slower.
"""

from __future__ import annotations

import argparse
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
from lab.core.lists import grouped
from lab.core.record import Record
from lab.runner import disturbances
from lab.show import comparison, session_spread, table
from lab.show.comparison import ALIKE, DISTURBED, SLOWER, TOO_FEW

ARGUMENTS = ("--prompt-len", "16,256", "--gen", "32", "--repeat", "6", "--no-plot")
EQUAL = {ALIKE, TOO_FEW, DISTURBED}
PLANTED = (1.05, 1.1, 1.2, 1.5)

Sessions = dict[str, list[Record]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "n_sessions",
        type=int,
        nargs="?",
        default=16,
    )
    parser.add_argument(
        "minutes",
        type=float,
        nargs="?",
        default=20,
    )
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    measure(asked.folder, asked.n_sessions, asked.minutes)
    timed = [record for record in results.read([asked.folder]).records if record.run.is_timed]
    sessions = grouped(timed, lambda record: record.session)
    print_spread(sessions)
    print_verdicts("each pair alone", sessions, knows_others=False)
    print_verdicts("the other sessions known", sessions, knows_others=True)


def measure(
    folder: Path,
    n_sessions: int,
    minutes: float,
) -> None:
    """The sessions that are still missing, each a process of its own, at equal intervals."""
    started = time.monotonic()
    interval_s = 60 * minutes / max(1, n_sessions - 1)
    for number in range(len(list(folder.glob("*.jsonl"))), n_sessions):
        wait_s = started + interval_s * number - time.monotonic()
        time.sleep(max(0.0, wait_s))
        command = [sys.executable, "-m", "lab", "measure", *ARGUMENTS, "--out", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        print(f"session {number + 1} of {n_sessions}", file=sys.stderr, flush=True)


def print_spread(sessions: Sessions) -> None:
    """How far the medians of the sessions lie apart, and the spread that `lab compare` assumes."""
    n_doubtful = sum(disturbances.is_doubtful(records) for records in sessions.values())
    print(
        f"{len(sessions)} sessions, {n_doubtful} of them disturbed in half of their runs or more; "
        f"{math.comb(len(sessions), 2)} pairs"
    )
    records = list(itertools.chain(*sessions.values()))
    for (_, figure), spread in session_spread.known_spreads(records).items():
        print(f"  {figure}: {math.expm1(spread.sd):.1%} ({spread.source})")
    rows = table.runs(records)
    for figure in ("prefill_s", "tpot_ms"):
        for n_prompt, of_length in rows.groupby("n_prompt"):
            medians = of_length.groupby("session")[figure].median()
            deviation = statistics.stdev(math.log(median) for median in medians)
            print(
                f"  {figure} at {n_prompt}: medians of sessions {medians.min():.4g} to "
                f"{medians.max():.4g}, standard deviation of logarithms {deviation:.3f}"
            )


def print_verdicts(
    title: str,
    sessions: Sessions,
    knows_others: bool,
) -> None:
    """How many pairs are called different, and in how many a planted difference is found."""
    n_different = 0
    n_found = dict.fromkeys(PLANTED, 0)
    pairs = list(itertools.combinations(sessions, 2))
    for first, second in pairs:
        other_records: list[Record] = []
        if knows_others:
            for name in sessions.keys() - {first, second}:
                other_records += sessions[name]
        if not verdicts(sessions[first], sessions[second], other_records) <= EQUAL:
            n_different += 1
        for factor in PLANTED:
            slower = [slowed(record, factor) for record in sessions[second]]
            if SLOWER in verdicts(sessions[first], slower, other_records):
                n_found[factor] += 1
    planted = [f"{factor - 1:.0%} in {n / len(pairs):.0%}" for factor, n in n_found.items()]
    print(
        f"{title}: {n_different} of {len(pairs)} pairs called different "
        f"({n_different / len(pairs):.1%}); planted: {', '.join(planted)}"
    )


def verdicts(
    first: Sequence[Record], second: Sequence[Record], other_records: Sequence[Record]
) -> set[str]:
    (compared,) = comparison.compare([*first, *second], others=other_records)
    return {row.verdict for row in compared.rows}


def slowed(record: Record, factor: float) -> Record:
    """The record as if everything had taken longer, on another machine of the same kind."""
    steps = record.run.steps
    changed = {}
    for name in ("start_ns", "ready_ns", "end_ns"):
        changed[name] = tuple(round(factor * stamp) for stamp in getattr(steps, name))
    run = dataclasses.replace(record.run, steps=dataclasses.replace(steps, **changed))
    machine = dataclasses.replace(record.machine, os=f"{record.machine.os} (slower)")
    return dataclasses.replace(record, run=run, machine=machine)


if __name__ == "__main__":
    main()
