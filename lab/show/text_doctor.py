"""A checkup as text: a row for each check, then what is wrong, with the command that mends it."""

from __future__ import annotations

from rich.console import Console

from lab.show import text_setup
from lab.show.console import grid_of
from lab.why.checks import BROKEN
from lab.why.checkup import Checkup


def print_checkup(checkup: Checkup, out: Console) -> None:
    """Prints the machine, every check, and a paragraph for each that is broken or worth a look."""
    for line in text_setup.describe(checkup.machine, checkup.model):
        out.print(line)
    out.print()
    grid = grid_of("name", "figure", "verdict")
    for check in checkup.checks:
        grid.add_row(check.name, check.figure or "-", check.verdict)
    out.print(grid)
    for check in checkup.causes:
        out.print(f"\n{check.name} ({check.verdict}): {check.words}")
        if check.command:
            out.print(f"    {check.command}")
    n_broken = sum(check.verdict == BROKEN for check in checkup.checks)
    out.print(f"\n{len(checkup.checks)} checks in {checkup.seconds:.0f} s; broken: {n_broken}.")
