"""A checkup as text: a row for each check, then what is wrong, with the command that mends it."""

from __future__ import annotations

from rich.console import Console

from lab.show import text_setup
from lab.show.section import UNKNOWN, Columns, Section, print_section, tabled
from lab.why.checks import BROKEN
from lab.why.checkup import Checkup


def print_checkup(checkup: Checkup, out: Console) -> None:
    """Prints the machine, every check, and a paragraph for each that is broken or worth a look."""
    for line in text_setup.describe(checkup.machine, checkup.model):
        out.print(line)
    out.print()
    columns: Columns = (
        ("name", lambda check: check.name),
        ("figure", lambda check: check.figure or UNKNOWN),
        ("verdict", lambda check: check.verdict),
    )
    print_section(Section(**tabled(columns, checkup.checks, keep_all=True)), out)
    for check in checkup.causes:
        out.print(f"\n{check.name} ({check.verdict}): {check.words}")
        if check.command:
            out.print(f"    {check.command}")
    n_broken = sum(check.verdict == BROKEN for check in checkup.checks)
    out.print(f"\n{len(checkup.checks)} checks in {checkup.seconds:.0f} s; broken: {n_broken}.")
