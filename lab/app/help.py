"""The help of a command: its purpose, examples, the options that matter most, the others in groups,
then details."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lab.core import sampling
from lab.core.asked_settings import table

MOST_UNGROUPED = 7  # options that are listed without groups, where a command has no more


def dashed(name: str) -> str:
    """The option of a parameter, without its first dashes."""
    return name.replace("_", "-")


def names_in(group: str) -> tuple[str, ...]:
    """The options of the settings of a group."""
    settings = table().values()
    return tuple(dashed(setting.name) for setting in settings if setting.group == group)


GROUPS = {
    "What to measure": (),  # and every option that is in no group
    "Filters": ("all", "at-least"),
    "Number of runs": (*("repeat", "until", "max-repeats", "budget"),),
    "Model": ("model", "served-model"),
    "Engine": ("settings", *names_in("Engine")),
    "Choosing tokens": (*map(dashed, sampling.table()), "chain"),
    "Devices": ("backend", "gbps", "memory", *names_in("Devices")),
    "Server": (
        "url",
        "api",
        "api-key-env",
        "header",
        "timeout",
        "yes",
        "host",
        "port",
        "cache",
        "open-network",
    ),
    "Rarely needed": (
        *names_in("Rarely needed"),
        "warmup",
        "max-requests",
        "describe",
        "check",
    ),
    "Output": (
        *(
            "out",
            "report",
            "no-explore",
            "no-plot",
            "json",
            "details",
            "stream",
            "dry-run",
            "base",
        ),
        *("file", "csv", "ceilings", "as", "table", "save", "help", "help-all"),
    ),
}
"""The groups of options, without their dashes; those of one command belong to the first."""

MOST = 15
REST = ("Engine", "Choosing tokens", "Devices", "Server", "Rarely needed")
"""Where a command has more than MOST options, only --help-all shows these groups."""

ALL = "lab.help_all"  # in a context's `meta`: whether the help shows every option


def show_all(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Print the whole help, and end."""
    if asked:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Command(click.Command):
    """A command whose help shows first what most users need. `first` names its four to six main
    options."""

    def __init__(self, *args: Any, first: tuple[str, ...] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self.first = first
        if len(self.params) > MOST:
            about = "Show all options: also threads, batches, GPU layers, KV cache, servers."
            option = click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=show_all,
                help=about,
            )
            self.params.append(option)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; what it measures holds the words that asked for it."""
        from lab.app.command_words import words_of_command
        from lab.core.stored_command import storing

        with storing(words_of_command(ctx)):
            return super().invoke(ctx)

    @property
    def paragraphs(self) -> list[str]:
        """Purpose, examples, details."""
        return inspect.cleandoc(self.help or "").split("\n\n")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the purpose and the examples."""
        for paragraph in self.paragraphs[:2]:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(paragraph)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the main options, then the others in groups."""
        rows = self._rows(ctx)
        first = self.first if len(rows) > MOST_UNGROUPED else tuple(rows)
        if "help-all" in rows and ALL not in ctx.meta:
            for title in REST:
                for name in GROUPS[title]:
                    if name not in first:
                        rows.pop(name, None)
        _write_group("Options", first, rows, formatter)
        for title, names in GROUPS.items():
            _write_group(title, names or _in_no_group(rows), rows, formatter)

    def _rows(self, ctx: click.Context) -> dict[str, tuple[str, str]]:
        """The options and their help, by their names without dashes."""
        rows: dict[str, tuple[str, str]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if isinstance(option, click.Option) and record:
                rows[max(option.opts, key=len).removeprefix("--")] = record
        return rows

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the details."""
        details = self.paragraphs[2:]
        if details:
            with formatter.section("Details"):
                formatter.write_text("\n\n".join(details))


def _in_no_group(rows: Mapping[str, object]) -> tuple[str, ...]:
    grouped = set().union(*GROUPS.values())
    return tuple(name for name in rows if name not in grouped)


def _write_group(
    title: str,
    names: Sequence[str],
    rows: dict[str, tuple[str, str]],
    formatter: click.HelpFormatter,
) -> None:
    """Write the options of these names that are left in `rows`, and remove them there."""
    shown = [rows.pop(name) for name in names if name in rows]
    if shown:
        with formatter.section(title):
            formatter.write_dl(shown)


class CommandGroup(click.Group):
    """A group of such commands."""

    command_class = Command
