"""`lab why`: why two figures differ, as a table of parts, a picture, and the command that helps
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lab.app.help import Command
from lab.app.options import (
    DETAILS,
    NO_PLOT,
    SAMPLING,
    Duration,
    as_json_option,
    out_option,
    with_options,
)
from lab.app.server import REACHING, confirm
from lab.core import shell
from lab.core.files import exists, is_file
from lab.errors import LabError
from lab.runner.progress import ShowStatus, Status

MOST_LETTERS = 60  # of a picture's name


@click.command("why", cls=Command, first=("budget", "model", "url", "lib", "prefill"))
@click.argument("figures", nargs=-1, metavar="A [B]")
@with_options(
    click.option(
        "--budget",
        type=Duration(0),
        default="2min",
        show_default=True,
        help="Time to measure in; 0: measure nothing.",
    ),
    click.option(
        "--model",
        "-m",
        help="Measure with this model; with those of A and B with a comma; of a server: its name.",
    ),
    click.option(
        "--url", metavar="URL", help="B is this server with OpenAI's API, measured now."
    ),
    click.option(
        "--lib",
        multiple=True,
        help="Two folders of libraries, of A and B: measure both builds alternately.",
    ),
    click.option(
        "--device",
        "-d",
        help="The device of a figure without records, as in lab predict; of two with a comma.",
    ),
    click.option("--prefill", is_flag=True, help="Compare prefill instead of decode."),
    click.option(
        "--read",
        "only_read",
        is_flag=True,
        help="Print only what is read of A, or of A and B.",
    ),
    out_option("Folder for the measurements and the plot."),
    DETAILS,
    NO_PLOT,
    as_json_option(),
    *REACHING,
    *SAMPLING,
)
def command(
    figures: tuple[str, ...],
    out: str,
    no_plot: bool,
    as_json: bool,
    yes: bool,
    details: bool,
    only_read: bool,
    **options: Any,
) -> None:
    """Explain why two speeds differ, cause by cause.

    \b
      lab why results/mine.jsonl - --budget 5min    # paste B, then Ctrl-D
      lab why results/mine.jsonl http://127.0.0.1:8080/v1
      lab why pasted.txt --read                     # only what is read of it

    A and B are results files, texts that other programs printed (- for stdin), or figures such as
    "35 tokens/s". One file with two setups is enough; a figure of another program alone is
    measured here with --model. The command takes the ratio apart into factors: what the figures
    count, depth of the context, settings, model, server, machine, and what is not explained. It
    measures depth, settings and builds on this machine, from A's setup to B's and back, in blocks
    with fresh engines, until it is sure or --budget is spent. A change needs at least three
    blocks. The factor of another machine is predicted. What is unknown stays in the part that is
    not explained. A model that only a file names is never downloaded.
    """
    from lab.app import kinds
    from lab.features.why.question import why
    from lab.features.why.section import document, section
    from lab.show import console
    from lab.show.section import print_sections

    figures, options["url"] = sides_of(figures, options["url"])
    if only_read and options["url"]:
        raise LabError(
            "--read prints what a text says, and a server is measured.",
            "Leave one of them out.",
        )
    if only_read:
        print_read(figures, options["prefill"], as_json)
        return
    if options["url"]:
        confirm(options["url"], "at most 20 requests", yes)
    err = console.console(stderr=True)
    with console.progress(err, None, str) as (watch, _):
        watch = watch if err.is_terminal else each_once(watch)
        explained = why(*figures, out=out, watch=watch, **options)
    made = [section(explained, details)]
    stdout = console.console()
    if not as_json:
        print_sections(made, stdout)
    stem = free_stem(figures, Path(out))
    plots = [] if no_plot else kinds.draw_what_can_be(made, Path(out), stem)
    if as_json:
        console.print_json({**document(explained), "plots": [str(plot) for plot in plots]})
        return
    for plot in plots:
        stdout.print(f"plot     {plot}")


def sides_of(figures: tuple[str, ...], url: str | None) -> tuple[tuple[str, ...], str | None]:
    """The files, texts and figures, and the server, which may stand on either side.

    LabError for nothing to compare with, and for more than two.
    """
    from lab.features.why.question import EXAMPLE, is_url

    urls = list(filter(is_url, figures))
    if len(urls) == 1 and not url:
        url = urls[0]
        figures = tuple(name for name in figures if name != url)
    if not figures and url:
        raise LabError(
            f"{url} is one side, and lab why compares two.",
            f"Give the other one, a file or a figure: {shell.lab('why', 'A', url)}. "
            f"To measure the server alone: {shell.lab('measure', '--url', url)}",
        )
    if not figures:
        raise LabError("lab why compares two figures.", EXAMPLE)
    if len(figures) > 2 or figures.count("-") > 1:
        raise LabError(
            f"{' '.join(figures)}: too many.", "Give at most two, one of them from stdin (-)."
        )
    return figures, url


def print_read(figures: Sequence[str], prefill: bool, as_json: bool) -> None:
    """Print what is read of the sides, and measure nothing."""
    from lab.features.why.question import read_sides
    from lab.features.why.section import figure_document, read_section
    from lab.show import console
    from lab.show.section import print_section

    sides, chosen = read_sides(figures, prefill)
    if as_json:
        lists = dict[str, object]()
        for letter, side in zip("AB", sides, strict=False):
            lists[letter] = [figure_document(figure) for figure in side]
        console.print_json(lists)
        return
    print_section(read_section(sides, chosen), console.console())


def each_once(watch: ShowStatus) -> ShowStatus:
    """A watch for output that is no terminal: every sentence once, not once for each engine."""
    sentences = set[str]()

    def look(status: Status) -> None:
        if status.note or status.doing not in sentences:
            watch(status)
        sentences.add(status.doing)

    return look


def free_stem(figures: Sequence[str], folder: Path) -> str:
    """A name for pictures, from the names of the files, that no earlier picture has."""
    stems = [Path(name).stem for name in figures if is_file(name)]
    stem = "-and-".join(stems)[:MOST_LETTERS] or "why"
    free = stem
    number = 1
    while exists(folder / f"{free}-why.png"):
        number += 1
        free = f"{stem}-{number}"
    return free
