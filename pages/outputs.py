"""What the pages show of commands: real outputs and the help. cog calls this module from comments
in the pages.

A command runs in the repository's folder, 100 columns wide, as a reader would run it; all in one
process, so that Python, pandas and matplotlib start once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from pathlib import Path
from unittest import mock

import click
import cog
from click.testing import CliRunner

from lab.main import lab
from tests.support.command import run_lab

ROOT = Path(__file__).parent.parent
WIDTH = 100
IS_THIS_MACHINE = "lab.features.why.machines.is_this_machine"
"""Pages are the same on the machine that measured the samples and on any other."""

SHARED_GROUPS = ("Engine", "Devices")
"""Groups of options that many commands share: the reference has them once."""


@functools.cache
def output_of(command: str) -> tuple[str, ...]:
    """The lines that `lab COMMAND` prints on stdout; pages may show the same command."""
    width = mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)})
    elsewhere = mock.patch(IS_THIS_MACHINE, return_value=False)
    with contextlib.chdir(ROOT), width, elsewhere:
        status, out, err = run_lab(*shlex.split(command))
    assert status == 0, f"lab {command}\n{err}"
    return tuple(line.rstrip() for line in out.splitlines())


def show(command: str, after: str | None = None, before: str | None = None) -> None:
    """Write a fenced block of the command and its output.

    `after`: the output follows the line that begins so. `before`: it ends before such a line.
    """
    lines = output_of(command)
    if after is not None:
        lines = lines[line_that_begins(lines, after) + 1 :]
    if before is not None:
        lines = lines[: line_that_begins(lines, before)]
    text = "\n".join(lines).strip("\n")
    cog.outl(f"```text\n$ lab {command}\n{text}\n```")


def line_that_begins(lines: tuple[str, ...], start: str) -> int:
    """The number of the first line that begins with a text."""
    return next(number for number, line in enumerate(lines) if line.startswith(start))


def show_help() -> None:
    """Write the help of every command; options that several share appear once."""
    first_commands: dict[str, str] = {}
    note_shared(("measure",), first_commands)
    write_help(lab, (), first_commands)


def help_of(arguments: tuple[str, ...]) -> str:
    """The whole help of a command."""
    short = help_with("--help", arguments)
    if "--help-all" in short:
        return help_with("--help-all", arguments)
    return short


def help_with(option: str, arguments: tuple[str, ...]) -> str:
    result = CliRunner().invoke(
        lab,
        [*arguments, option],
        prog_name="lab",
        terminal_width=WIDTH,
        env={"COLUMNS": str(WIDTH)},
    )
    return result.output


def note_shared(arguments: tuple[str, ...], first_commands: dict[str, str]) -> str:
    """The help of a command, with a reference where an earlier command has the same options."""
    command = " ".join(arguments)
    blocks = list[str]()
    for block in help_of(arguments).split("\n\n"):
        title = block.partition(":\n")[0]
        if title in SHARED_GROUPS:
            first = first_commands.setdefault(block, command)
            if first != command:
                block = f"{title}: as for lab {first}"
        blocks.append(block)
    return "\n\n".join(blocks)


def write_help(
    command: click.Command, arguments: tuple[str, ...], first_commands: dict[str, str]
) -> None:
    name = " ".join(("lab", *arguments))
    text = note_shared(arguments, first_commands)
    cog.out(f"## `{name}`\n\n```text\n{text}```\n\n")
    if isinstance(command, click.Group):
        for inner_name, inner in sorted(command.commands.items()):
            write_help(inner, (*arguments, inner_name), first_commands)
