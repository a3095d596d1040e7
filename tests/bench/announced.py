"""How true announced times are: each command that takes longer than 20 s says beforehand how long.

    python3 -m uv run python -m tests.bench.announced [NAME ...]

A row a command: the seconds it announced and those it took from then on, until its results were
there. Wanted: within 30 %. All commands take half an hour on two cores; each NAME of COMMANDS can
be run alone. The ceilings are measured first, into the same folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

COMMANDS = {
    "ceilings": "ceilings",
    "measure": "measure -p 10,1000,3000 -n 100",
    "repeats": "measure -p 10,1000 -n 64 -r 5",
    "until": "measure -p 10,200 -n 32 --until 5% --max-repeats 12",
    "sweep": "sweep --max-len 4096 -e 512 -r 2",
    "batch": "batch -p 256",
    "stall": "stall -p 1024 -r 2",
    "turns": "turns",
    "speculate": "speculate --draft lookup --draft-len 2,4",
    "ab": 'ab "--threads 1" "--threads 2" --repeat 4',
    "trace": "trace -p 1000 -n 32 -r 8",
    "quant": "quant --budget 3min",
    "tune": "tune -p 500 -n 100 --budget 2min",
    "claims": "claims --only 1,2,6,7",
    "why": "why",
    "doctor": "doctor",
}
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Announced(NamedTuple):
    """What a command announced, and how long it took from then on."""

    announced_s: float
    took_s: float


def seconds_in(text: str) -> float:
    """The seconds in a text such as `1 min 20 s`."""
    total_s = 0.0
    for number, unit in re.findall(r"(\d+) (s|min|h)\b", text):
        total_s += int(number) * UNITS[unit]
    return total_s


def run(command: str, folder: Path) -> Announced | None:
    """Run a command, and time it from its first announcement; None if it announced nothing."""
    began = time.monotonic()
    keeps_results = command != "doctor"
    options = f"--out {folder}" if keeps_results else ""
    process = subprocess.Popen(
        f"{sys.executable} -m lab {command} {options}",
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    announced: tuple[float, float] | None = None
    assert process.stdout is not None
    for line in process.stdout:
        match = re.search(r"about ((?:\d+ (?:s|min|h) ?)+)", line)
        if match and announced is None:
            announced = time.monotonic(), seconds_in(match[1])
            print(f"  {line.rstrip()}", flush=True)
    process.wait()
    ended = time.monotonic()
    if process.returncode:
        print(f"  exit status {process.returncode}", flush=True)
    if announced is None:
        print(f"  nothing announced in {ended - began:.0f} s", flush=True)
        return None
    at, announced_s = announced
    return Announced(announced_s, ended - at)


def main() -> None:
    names = sys.argv[1:] or list(COMMANDS)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"lab {COMMANDS[name]}", flush=True)
            result = run(COMMANDS[name], Path(folder))
            if result:
                ratio = result.took_s / result.announced_s
                print(
                    f"{name:10} announced {result.announced_s:5.0f} s, took "
                    f"{result.took_s:5.0f} s: {ratio:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
