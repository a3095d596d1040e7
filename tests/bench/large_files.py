"""What every command that reads results takes for large files, and for small ones that want much.

    python -m tests.bench.large_files [--cases 1,000] [--commands report,show]

Each command is a process of its own. Beyond the start, which is what the command takes for a file
of one session, it may take 1 s of CPU time and 50 MB for each MB of the file; MOST_START bounds the
start. Exits with 1 if a command takes more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.hostile import fields, large

COMMANDS = {
    name: words for name, words in fields.COMMANDS.items() if name not in ("json", "predict")
}
SAMPLE = fields.RESULTS / "sample-sweep-smollm2-135m-amd-epyc.jsonl"
MOST_CPU_S = 120  # then the kernel ends the process
MOST_KB = 4_000_000  # of address space
LIMITED = f'ulimit -t {MOST_CPU_S} -v {MOST_KB}; exec "$0" "$@"'


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    peak_mb: float
    status: int


def cost_of(command: str, path: Path) -> Cost:
    """What a command takes for a file, start of Python included."""
    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    names = {
        "FILE": str(path),
        "FOLDER": str(path.parent),
        "OUT": str(out),
        "SAMPLE": str(SAMPLE),
        "OUT/page.html": str(out / "page.html"),
    }
    words = [names.get(word, word) for word in COMMANDS[command]]
    process = subprocess.Popen(
        ["bash", "-c", LIMITED, sys.executable, "-m", "lab", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(
        cpu_s=used.ru_utime + used.ru_stime,
        peak_mb=used.ru_maxrss * 1024 / 1e6,
        status=process.returncode,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="", help="a part of the name")
    parser.add_argument("--commands", default=",".join(COMMANDS))
    asked = parser.parse_args()
    commands = asked.commands.split(",")
    n_beyond = 0
    with tempfile.TemporaryDirectory() as folder:
        starts = {
            command: cost_of(command, written(folder, "1 session")) for command in commands
        }
        for name in (*large.CASES, *large.PAGES):
            if asked.cases not in name:
                continue
            path = written(folder, name)
            for command in commands:
                n_beyond += report(
                    name, command, cost_of(command, path), starts[command], path
                )
            path.unlink()
    print(f"{n_beyond} beyond the bound")
    raise SystemExit(1 if n_beyond else 0)


def written(folder: str, name: str) -> Path:
    path = Path(folder) / ("x.html" if name in large.PAGES else "x.jsonl")
    path.write_bytes(large.content(name))
    return path


def report(name: str, command: str, cost: Cost, start: Cost, path: Path) -> bool:
    """Print what a command took. Whether that is beyond the bound."""
    size_mb = path.stat().st_size / 1e6
    most_s = start.cpu_s + fields.S_A_MB * size_mb + fields.START_S
    most_mb = start.peak_mb + fields.BYTES_A_BYTE * size_mb
    is_beyond = cost.cpu_s > most_s or cost.peak_mb > most_mb
    mark = " !" if is_beyond else ""
    print(
        f"{name:34} {size_mb:6.2f} MB  {command:12} {cost.cpu_s:6.1f} s {cost.peak_mb:6.0f} MB"
        f"  status {cost.status}{mark}",
        flush=True,
    )
    return is_beyond


if __name__ == "__main__":
    main()
