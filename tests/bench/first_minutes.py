"""How long a newcomer waits: the command of the README with an empty cache, in an empty folder.

    python3 -m uv run python -m tests.bench.first_minutes FOLDER install [COMMIT]
    python3 -m uv run python -m tests.bench.first_minutes FOLDER measure

`install` clones this repository (or a COMMIT of it) into FOLDER, and does there what uv does
before the command runs: find the packages, download them, build llama.cpp. `measure` is the command
itself. In two parts, because each needs a quiet machine for some minutes. Downloaded bytes are
those of the whole machine. FOLDER/first_minutes.json keeps the figures of both.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COMMAND = "lab measure --prompt-len 10,1000,10000 --gen 200"
MOMENTS = {
    "first run shown": r"repeat 1: ",
    "table complete": r"results +results/",
}
"""Lines of the command's output that begin a moment."""


def downloaded_bytes() -> int:
    """Bytes that the machine's network devices have received."""
    n_bytes = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            n_bytes += int(counters.split()[0])
    return n_bytes


def environment(folder: Path) -> Mapping[str, str]:
    """The environment of a user whose caches are empty."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("VIRTUAL_")}
    return {**kept, "UV_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": ""}


def timed_lines(command: list[str], folder: Path) -> Iterator[tuple[float, str]]:
    """The lines that a command prints in the clone, with their seconds since its start."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder / "lab",
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        at_s = time.monotonic() - began
        print(f"{at_s:7.1f}  {line.rstrip()}", flush=True)
        yield at_s, line
    if process.wait():
        sys.exit(f"exit status {process.returncode}")
    yield time.monotonic() - began, ""


def install(folder: Path, commit: str) -> dict[str, float]:
    """Clone, and install what the command needs."""
    clone = folder / "lab"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "checkout", "-q", commit], check=True, cwd=clone)
    n_bytes = downloaded_bytes()
    figures: dict[str, float] = {}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for at_s, line in timed_lines([sys.executable, "-m", "uv", "sync"], folder):
        if re.search(r"Built llama-cpp-python", line):
            figures["build done, s"] = at_s
        if re.search(r"Installed \d+ packages", line):
            figures["packages there, s"] = at_s
            figures["packages"] = int(re.findall(r"\d+", line)[0])
    used_now = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used_now.ru_utime + used_now.ru_stime - used.ru_utime - used.ru_stime
    figures["processor time, s"] = seconds
    figures["downloaded, MB"] = (downloaded_bytes() - n_bytes) / 1e6
    figures["on disk, MB"] = disk_bytes(clone / ".venv") / 1e6
    return figures


def disk_bytes(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def measure(folder: Path) -> dict[str, float]:
    """Run the README's command, whose packages are there."""
    figures: dict[str, float] = {}
    command = [sys.executable, "-m", "uv", "run", *COMMAND.split()]
    for at_s, line in timed_lines(command, folder):
        announced = re.search(r": about (.*)", line)
        if announced and "announced after, s" not in figures:
            figures["announced after, s"] = at_s
        for moment, pattern in MOMENTS.items():
            if re.match(pattern, line) or re.search(f", {pattern}", line):
                figures.setdefault(f"{moment}, s", at_s)
        figures["end, s"] = at_s
    return figures


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    path = folder / "first_minutes.json"
    if sys.argv[2] == "install":
        commit = sys.argv[3] if len(sys.argv) > 3 else "HEAD"
        figures = install(folder, commit)
    else:
        figures = {**json.loads(path.read_text()), **measure(folder)}
        installed_s = figures["packages there, s"]
        for moment in MOMENTS:
            total_s = installed_s + figures[f"{moment}, s"]
            figures[f"{moment} after the command was typed, min"] = total_s / 60
    path.write_text(json.dumps(figures, indent=2))
    for name, figure in figures.items():
        print(f"{name:55} {figure:10.1f}")


if __name__ == "__main__":
    main()
