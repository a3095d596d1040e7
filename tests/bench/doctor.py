"""Does `lab doctor` name what is wrong, and nothing where nothing is?

    python3 -m uv run python -m tests.bench.doctor [NAME ...]   # the faults below, or these; 40 s each
    python3 -m uv run python -m tests.bench.doctor healthy N    # N trials of the machine as it is

A planted fault is told rightly where the check that belongs to it has the verdict below, and no other check is broken.
Wanted: all faults; and of 40 healthy trials none with anything broken. A neighbour is a real process that burns a core;
of swap and of the governor the readings are faked, because a machine that others use shall not be made to swap.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lab.models import catalog
from lab.runner import limits
from lab.why import checkup
from lab.why.checkup import BROKEN, LOOK, Checkup

CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {  # what is asked, the check that belongs to it, its verdict
    "many-threads": ({"threads": 4 * (os.cpu_count() or 1)}, "threads", BROKEN),
    "one-thread": ({"threads": 1}, "threads", BROKEN),
    "neighbour": ({}, "other programs", LOOK),
    "swap": ({}, "memory", LOOK),
    "governor": ({}, "power", LOOK),
}


def examined(name: str) -> Checkup:
    """The checkup with this fault, if it is one of FAULTS."""
    asked = {"model": catalog.DEFAULT, **(FAULTS[name][0] if name in FAULTS else {})}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        root = limits.ROOT
        if name == "swap":
            patch.setattr(limits, "swap", lambda: (6 * 10**9, 8 * 10**9, 0))
        if name == "governor":
            root = Path(folder)
            (root / CPUFREQ).mkdir(parents=True)
            (root / CPUFREQ / "scaling_governor").write_text("powersave\n")
        if name != "neighbour":
            return checkup.examine(asked, lambda status: None, root)
        neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            return checkup.examine(asked, lambda status: None)
        finally:
            neighbour.kill()
            neighbour.wait()


def main() -> None:
    what, *rest = sys.argv[1:] or ["all"]
    names = ["healthy"] * int(rest[0]) if what == "healthy" else list(FAULTS) if what == "all" else [what, *rest]
    n_right = 0
    for name in names:
        found = examined(name)
        told = {check.name: check.verdict for check in found.checks if check.verdict in (LOOK, BROKEN)}
        _, belongs, verdict = FAULTS.get(name, ({}, "", None))
        others = [check for check, one in told.items() if one == BROKEN and check != belongs]
        is_right = told.get(belongs) == verdict and not others
        n_right += is_right
        print(f"{name:12} {'right' if is_right else 'WRONG'} {found.seconds:4.0f} s  {told}", flush=True)
    print(f"{n_right} of {len(names)} right")


if __name__ == "__main__":
    main()
