"""The command line: parse, call, print. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections import UserDict
from typing import Any

import click

from lab import feature_list
from lab.app.help import CommandGroup
from lab.errors import EXIT_FAILED, EXIT_INTERRUPTED, LabError


class Commands(UserDict[str, Any]):
    """The commands by name; a module is imported when its command is used: `lab --help` is
    instant."""

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = feature_list.load(self.data[name].command)
        return command


class GroupedCommands(CommandGroup):
    """A group whose help lists its commands by what they are for, from the list of features
    alone."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(feature.name) for feature in feature_list.FEATURES)
        rows: dict[str, list[tuple[str, str]]] = {}
        for feature in feature_list.FEATURES:
            rows.setdefault(feature.group, []).append(
                (feature.name.ljust(width), feature.help)
            )
        for group, rows_of_group in rows.items():
            with formatter.section(group):
                formatter.write_dl(rows_of_group)


@click.group(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="mini-lab", message="mini-lab %(version)s")
def lab() -> None:
    """Measure LLM inference on this machine: prefill and decode, token by token.

    \b
      lab measure                     # a first look, about half a minute
      lab COMMAND --help              # what a command does, with examples
    """


COMPARE = 'To compare values, write each in quotes: lab ab "-t 6" "-t 12"'
HINTS = (
    (
        r"extra arguments? \([\d.,k ]+\)",
        "Separate several values with commas: --prompt-len 10,100,1000",
    ),
    (
        r"extra arguments? \(\S*(https?:|localhost|\d+\.\d+\.\d+\.\d+)",
        "The address of a server follows --url: lab measure --url http://localhost:8080",
    ),
    (
        r"extra arguments? \(\S*\.jsonl",
        "Saved results are read by other commands: lab show FILE.jsonl, lab compare FILE.jsonl",
    ),
    (
        "extra argument",
        "Each value follows its option: --model phi-3-mini --device rtx-4090 --prompt-len 10,1000",
    ),
    (
        r"Missing argument 'RESULTS",
        "Name the files or folders of results, such as results/FILE.jsonl. "
        "lab measure prints the name of its file at the end.",
    ),
    (
        r"Missing argument 'FILE\.",
        "Name a file with another tool's results: lab import bench.json",
    ),
    (
        r"Missing argument 'SPEC\.",
        "Name a model, such as phi-3-mini. All names: lab models",
    ),
    (
        "Missing option '--(good|bad)'",
        "Name a fast and a slow build: lab bisect --good 0.3.20 --bad 0.3.36",
    ),
    (
        "Missing option '--url'",
        "Give the address of your server: lab record --url http://localhost:8080",
    ),
    (
        "No such command '(bench|benchmark|llama-bench|run|perf|speed|test|time)'",
        "To measure a model's speed: lab measure --model phi-3-mini",
    ),
    (
        "No such command '(ls|list|pull|download|get|rm|info)'",
        "For files of models: lab models --help",
    ),
    (
        "No such command '(serve|server|proxy)'",
        "The lab measures a server that runs already: lab measure --url http://localhost:8080",
    ),
    (
        "No such command '(perplexity|ppl|quantize|kl)'",
        "For what quantizations cost and gain: lab quant --help",
    ),
    (
        "No such command '(devices?|gpus?|system|sysinfo|env|check|version)'",
        "For this machine and its devices: lab doctor",
    ),
    (
        "No such option '(-d|--depth|--n-depth)'",
        "Tokens already in the context are part of the prompt: --prompt-len 4096 --gen 128",
    ),
    (
        "No such option '(--backend|--gpus?|--cuda|--cpu|--vulkan|--metal)'",
        "Which devices there are: lab doctor. To choose: --device none, --n-gpu-layers 99",
    ),
    ("'--threads'.* is not a valid integer|Missing argument 'VARIANT", COMPARE),
    (
        "No such option '(-c|--ctx-size|--n-ctx|--num-ctx|--ctx|--context)'",
        "The context is as long as the request: --prompt-len 32k --gen 300",
    ),
    ("No such option '--(n-predict|num-predict)'", "Tokens to generate: --gen 300"),
    (
        "No such option '(-np|--parallel|--users)'",
        "Several at once: lab batch --sequences 1,4",
    ),
)
"""Beginnings of click's messages as patterns, and what to write instead.

The options of other programs are those that people type first.
"""

lab.commands = Commands(feature_list.by_name())


def main() -> None:
    """The `lab` command. A LabError is a sentence for its reader, not a traceback.

    Exit status: 0 when all went well, 1 for every error (in the command line too), 130 after
    Ctrl-C.
    """
    _prepare_streams()
    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: the engine ends too
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        status = lab.main(standalone_mode=False) or 0
        sys.stdout.flush()
        sys.exit(status)
    except LabError as problem:
        click.echo(f"Error: {problem}", err=True)
        sys.exit(EXIT_FAILED)
    except click.ClickException as problem:
        problem.show()
        hint = hint_of(problem.format_message())
        if hint:
            click.echo(hint, err=True)
        sys.exit(EXIT_FAILED)
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:
            name = str(problem.filename)
            click.echo(f"Error: No path has {len(name):,} letters: {name[:40]}...", err=True)
            sys.exit(EXIT_FAILED)
        if problem.errno != errno.ENOSPC:
            raise
        # Otherwise Python tries to write the rest once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        message = f"Error: The output cannot be written: {problem.strerror}.\nFree some space."
        click.echo(message, err=True)
        sys.exit(EXIT_FAILED)
    except (KeyboardInterrupt, click.Abort):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # again while Python ends: no traceback
        click.echo("Interrupted.", err=True)
        sys.exit(EXIT_INTERRUPTED)


def hint_of(message: str) -> str | None:
    """What to write instead, of an error in the command line."""
    for pattern, hint in HINTS:
        if re.search(pattern, message):
            return hint
    return None


def _replace_closed_streams() -> None:
    """Make the null device of the streams that the shell closed, as with `2>&-`.

    Otherwise the next file that is opened gets the number of a closed stream: messages of the
    engine would be written into results.
    """
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        try:
            os.fstat(number)
        except OSError:
            number_of_null = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number_of_null, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _prepare_streams() -> None:
    for name in ("COLUMNS", "LINES"):  # rich would fail at a superscript digit
        if not os.environ.get(name, "0").isdecimal():
            del os.environ[name]
    os.environ.pop("MPLBACKEND", None)  # no window is opened, and an unknown one is an error
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a letter shall not end a session.
            stream.reconfigure(errors="replace")
