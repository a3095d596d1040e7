"""The command that finds out what is wrong."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click

from lab.cli.options import ENGINE, MODEL, with_options
from lab.cli.running import EXIT_FAILED


@click.command()
@with_options(MODEL, *ENGINE)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, for bug reports.")
def doctor(as_json: bool, **asked: Any) -> None:
    """Find out why it does not run, or runs slower than elsewhere: build, settings and machine, in about a minute.

    Give the settings that seem slow: lab doctor -t 8. Each check has a figure and a verdict. A cause is called broken
    only where changing that one thing was measured to help, in turns with the settings as they are. What only shows in
    the system's files, or is a matter of choice, is worth a look.

    Keep the machine quiet meanwhile. The exit status is 1 where something is broken.
    """
    from lab.show import console, text_doctor
    from lab.why import checks, checkup

    with console.progress(console.console(stderr=True), None, str, in_blocks=True) as (watch, _):
        found = checkup.examine(asked, watch)
    if as_json:
        console.print_json(dataclasses.asdict(found))
    else:
        text_doctor.print_checkup(found, console.console())
    if any(check.verdict == checks.BROKEN for check in found.checks):
        sys.exit(EXIT_FAILED)
