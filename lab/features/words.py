"""`lab words`: the lab's terms, explained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lab.app.help import Command
from lab.app.options import DETAILS, as_json_option

if TYPE_CHECKING:
    from lab.show.wording import Term


@click.command(cls=Command)
@click.argument("term", nargs=-1)
@as_json_option("text")
@DETAILS
def words(term: tuple[str, ...], as_json: bool, details: bool) -> None:
    """Explain the lab's terms, such as TTFT, ridge or ubatch.

    \b
      lab words                             # their names
      lab words ttft pp                    # of llama-bench too
      lab words --details                   # all of them, explained
    """
    from lab.show import console, wording

    terms = wording.named(term) if term else wording.terms()
    if as_json:
        console.print_json([entry._asdict() for entry in terms])
        return
    formatter = click.HelpFormatter(max_width=100)
    if term:
        for entry in terms:
            formatter.write_dl(facts(entry))
    elif details:
        formatter.write_dl([(entry.name, meaning(entry)) for entry in terms])
    else:
        formatter.write_text(", ".join(entry.name for entry in terms))
        formatter.write_text("Explained: lab words TERM, or all: lab words --details")
    click.echo(formatter.getvalue(), nl=False)


def facts(entry: Term) -> list[tuple[str, str]]:
    """A term and its meaning; then its unit, where it is shown, and its other names."""
    lines = [
        (entry.name, meaning(entry)),
        ("unit", entry.unit),
        ("shown in", entry.shown),
        ("also", ", ".join(entry.also)),
    ]
    return [line for line in lines if line[1]]


def meaning(entry: Term) -> str:
    return entry.meaning.replace("`", "")
