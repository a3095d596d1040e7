"""Commands of the lab within a text, and whether they can be pasted: parsed, and planned."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import click

from lab.errors import LabError
from lab.main import lab as cli
from tests.support.command import run_lab

COMMAND = re.compile(
    r"(?<![\w/.-])lab ([a-z][a-z-]{1,20})(?=[\s.,;:)]|$)((?:(?! lab [a-z]).)*)"
)
BROKEN_CODE = re.compile(r"(?<!`)`([^`\n]{1,200})\n\s*([^`\n]{1,200})`(?!`)")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_0-9]*(?:\.[a-z]+|\.\.\.)?")
WHOLE_LINE = re.compile(
    r"\s*(?:\$ |\d+\. )?(?:[A-Z][^:`]{0,60}: |next: )?(?:python3? -m uv run )?"
)
"""What may stand before a command that is alone on its line."""

PATH = re.compile(r"[\w./~:-]+\.(?:jsonl|json|csv|md|txt|html|gguf|ini)|[\w.-]+/[\w./-]*|-")
ENDS = ".,;:)`"
NAMED_BY_READERS = ("--settings",)  # options whose values a reader has saved before


@dataclass
class PrintedCommand:
    """A command in a text: its words after `lab`, and the line that holds it."""

    words: list[str]
    line: str
    is_whole: bool  # a line of its own: no word of it is prose
    arguments: list[str] = field(default_factory=list)  # of these words, without prose

    @property
    def text(self) -> str:
        return shlex.join(["lab", *self.arguments])


def commands_in(text: str) -> Iterator[PrintedCommand]:
    """The commands of the lab in a text, each without the prose behind it."""
    for line in BROKEN_CODE.sub(r"`\1 \2`", text).splitlines():
        if line.startswith("Usage: "):
            continue
        for piece in re.split(r" && | \| |`", line):
            for match in COMMAND.finditer(piece):
                if match[1] not in cli.commands:
                    continue
                before = "`" if "`" in line else piece[: match.start()]
                has_more = match[2].startswith(" ")
                printed = PrintedCommand(
                    [match[1], *(words_of(match[2]) if has_more else [])],
                    line.strip(),
                    WHOLE_LINE.fullmatch(before) is not None and not is_prose(match[0]),
                )
                printed.arguments = printed.words
                if not printed.is_whole:
                    printed.arguments = without_prose(printed.words)
                yield printed


def is_prose(command: str) -> bool:
    """Whether what begins like a command goes on as a sentence."""
    return ". " in command or ", " in command or command.endswith((".", ","))


def words_of(command: str) -> list[str]:
    """The words of a command line, without its comment. Prose may have a single quote mark."""
    try:
        return shlex.split(re.split(r"\s+[#<>]", command)[0])
    except ValueError:
        return command.replace("'", "").replace('"', "").split()


def without_prose(parts: Sequence[str]) -> list[str]:
    """The parts up to the first that is neither an option, its value nor a path."""
    command, arguments = command_of(parts)
    names = options_of(command)
    position = len(arguments)
    while position < len(parts):
        word = parts[position]
        is_last = word.rstrip(ENDS) != word
        plain = word.rstrip(ENDS) or word
        if plain.startswith("-") and len(plain) > 1:
            arguments.append(plain)
            option = names.get(plain.partition("=")[0])
            takes_value = option is not None and not option.is_flag and "=" not in plain
            if takes_value and not is_last and position + 1 < len(parts):
                position += 1
                value = parts[position]
                arguments.append(value.rstrip(ENDS))
                is_last = value.rstrip(ENDS) != value
        elif is_argument(plain):
            arguments.append(plain)
        else:
            break
        if is_last:
            break
        position += 1
    return arguments


def is_argument(word: str) -> bool:
    """Whether a word looks like an argument and not like prose."""
    return bool(
        PATH.fullmatch(word)
        or PLACEHOLDER.fullmatch(word)
        or " " in word
        or re.fullmatch(r"[\w.-]+:[\w.:-]+", word)
    )


def command_of(parts: Sequence[str]) -> tuple[click.Command, list[str]]:
    """The command that parts name, with its subcommand, and its parts."""
    command = cli.commands[parts[0]]
    arguments = [parts[0]]
    if isinstance(command, click.Group) and len(parts) > 1 and parts[1] in command.commands:
        command = command.commands[parts[1]]
        arguments.append(parts[1])
    return command, arguments


def options_of(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their names."""
    names = dict[str, click.Option]()
    for option in command.params:
        if isinstance(option, click.Option):
            for name in (*option.opts, *option.secondary_opts):
                names[name] = option
    return names


def problem_of(printed: PrintedCommand) -> str:
    """Why the parser refuses a command; "" if it takes it.

    A mention within a sentence, such as `lab show --details`, need not be complete.
    """
    command, names = command_of(printed.arguments)
    arguments = filled(printed.arguments[len(names) :], command)
    if "--help" in arguments or (not arguments and not printed.is_whole):
        return ""
    try:
        command.make_context(names[-1], list(arguments))
    except (click.MissingParameter, click.BadOptionUsage) as problem:
        return problem.format_message() if printed.is_whole else ""
    except (click.ClickException, LabError) as problem:
        return str(problem)
    return ""


def filled(arguments: Sequence[str], command: click.Command) -> list[str]:
    """The arguments without the options whose value is the reader's: `--gen N`."""
    names = options_of(command)
    filled_in = list[str]()
    for argument in arguments:
        is_value = (
            bool(filled_in) and filled_in[-1] in names and not names[filled_in[-1]].is_flag
        )
        if is_value and (PLACEHOLDER.fullmatch(argument) or filled_in[-1] in NAMED_BY_READERS):
            filled_in.pop()
            continue
        filled_in.append(argument)
    return filled_in


def can_be_planned(printed: PrintedCommand) -> bool:
    """Whether a command has a plan that it can show without measuring, and no placeholder."""
    command, _ = command_of(printed.arguments)
    if not printed.arguments[1:] and printed.arguments == ["ab"]:  # named in a sentence
        return False
    if "--url" in printed.arguments or any(map(PLACEHOLDER.fullmatch, printed.arguments)):
        return False
    return "--dry-run" in options_of(command)


def problem_of_plan(printed: PrintedCommand) -> str:
    """Why a plan is refused; "" if it is made. Nothing is measured."""
    status, _, stderr = run_lab(*printed.arguments, "--dry-run")
    return stderr if status else ""
