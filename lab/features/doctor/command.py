"""The command `lab doctor`: this machine, then the checks."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from lab.app.help import Command
from lab.app.options import DETAILS, ENGINE, MODEL, as_json_option, with_options
from lab.errors import EXIT_FAILED
from lab.features.doctor.checks import BROKEN, LOOK, UNKNOWN, Check
from lab.features.doctor.checkup import Checkup, examine
from lab.runner import machine

if TYPE_CHECKING:
    from rich.console import Console


BEFORE = (
    "Checks the build, the engine, the number of threads, attention and the machine: about half a "
    "minute, longer beside other programs."
)


@click.command(cls=Command, first=("model", "threads", "n-gpu-layers", "flash-attn", "lib"))
@with_options(MODEL, *ENGINE)
@click.option(
    "--beside/--no-beside",
    default=None,
    help="Keep a core busy for some seconds and see what that does to decode (Linux).  "
    "[default: in a terminal]",
)
@as_json_option(help="One JSON document on stdout, for bug reports.")
@DETAILS
def doctor(as_json: bool, details: bool, beside: bool | None, **options: Any) -> None:
    """Show this machine, and find out why the lab fails or is slow.

    \b
      lab doctor                            # half a minute
      lab doctor -t 8                       # are 8 threads right?
      lab doctor --lib FOLDER               # does this build run here?

    Shows the machine, the llama.cpp build and its devices. Then checks whether the build loads and
    the model runs (and which setting avoids a crash), whether the number of threads is right,
    whether flash attention is faster than plain attention, and whether the machine is throttled, on
    battery, busy or short of memory. Each check has a figure and a verdict. The threads are
    "broken" only if another number was measured to be faster, alternately. What the lab only reads
    from the system is "worth a look" at most.

    If the machine has readable energy counters (RAPL of the CPU, NVML of NVIDIA GPUs), measurements
    show joules per token.

    Keep the machine quiet during the checks. The exit status is 1 if something is broken.
    """
    from lab.show import console

    plants = sys.stdout.isatty() and "CI" not in os.environ if beside is None else beside
    err = console.console(stderr=True)
    err.print(BEFORE)
    if plants:
        err.print("Then decode beside a program that keeps a core busy: some seconds more.")
    with console.progress(err, None, str) as (watch, _):
        checkup = examine(options, watch, plants_neighbour=plants)
    if as_json:
        console.print_json(dataclasses.asdict(checkup))
    else:
        print_checkup(checkup, console.console(), details)
    if any(check.verdict == BROKEN for check in checkup.checks):
        sys.exit(EXIT_FAILED)


def print_checkup(checkup: Checkup, out: Console, details: bool) -> None:
    """Print the machine, a table of the checks, and what is worth a look; the worst first."""
    from lab.show import text_plan

    for line in text_plan.describe(checkup.machine, checkup.model):
        out.print(line)
    for line in facts(checkup) if details else ():
        out.print(line)
    out.print()
    print_table(checkup.checks, out)
    broken = [check for check in checkup.checks if check.verdict == BROKEN]
    doubtful = [check for check in checkup.checks if check.verdict == LOOK]
    unknown = [check for check in checkup.checks if check.verdict == UNKNOWN and check.words]
    for check in [*broken, *doubtful, *unknown]:
        out.print(f"\n{check.name} ({check.verdict}): {check.words}")
        if check.command:
            out.print(f"    {check.command}")
    n_checks = len(checkup.checks)
    more = "" if details else " Devices, cores, energy and the build's flags: --details"
    out.print(f"\n{n_checks} checks in {checkup.seconds:.0f} s, {len(broken)} broken.{more}")


def facts(checkup: Checkup) -> list[str]:
    """Lines on the devices, the cores, what counts energy, and the build."""
    here = checkup.machine
    lines: list[str] = []
    for device in here.devices:
        kind = device.type
        if device.memory_bytes:
            kind = f"{device.type}, {device.memory_bytes / 1e9:.1f} GB"
        lines.append(f"device   {device.name}: {machine.describe_device(device)} ({kind})")
    lines.append(f"cores    {here.n_cores_physical} physical, {here.n_cores_usable} usable")
    lines.append(f"energy   {checkup.energy}")
    lines.append(f"python   {here.python}")
    lines.append(f"flags    {here.system_info}")
    return lines


def print_table(checks: Sequence[Check], out: Console) -> None:
    from lab.show.cells import LONG_TEXT, TEXT, Column
    from lab.show.section import Columns, Section, print_section, tabled

    columns: Columns[Check] = (
        Column("name", lambda check: check.name, TEXT),
        Column("figure", lambda check: check.figure or "-", TEXT),
        Column("verdict", lambda check: check.verdict, LONG_TEXT),
    )
    print_section(Section(**tabled(columns, checks, keep_all=True)), out)
