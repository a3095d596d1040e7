"""`lab words`: the lab's terms, explained."""

from __future__ import annotations

import click

from lab.app.help import Command
from lab.app.options import as_json_option


@click.command(cls=Command)
@click.argument("term", nargs=-1)
@as_json_option("text")
def words(term: tuple[str, ...], as_json: bool) -> None:
    """Explain the lab's terms, such as TTFT, ridge or ubatch.

    \b
      lab words                             # all terms
      lab words ttft
    """
    from lab.show import console, wording

    terms = [wording.term(" ".join(term))] if term else wording.terms()
    if as_json:
        console.print_json([each._asdict() for each in terms])
        return
    rows = [(each.name, each.meaning.replace("`", "")) for each in terms]
    if term:
        (asked_for,) = terms
        rows += [
            ("unit", asked_for.unit),
            ("shown in", asked_for.shown),
            ("also", ", ".join(asked_for.also)),
        ]
    formatter = click.HelpFormatter(max_width=100)
    formatter.write_dl([row for row in rows if row[1]])
    click.echo(formatter.getvalue(), nl=False)
