"""`lab why`: why two figures differ, as a table of parts, a picture, and the one command that helps most."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.app.help import Command
from lab.app.options import NO_PLOT, as_json_option, out_option, with_options
from lab.errors import LabError
from lab.features.serve.command import REACHING, confirm
from lab.show.wording import digits, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lab.features.why.reasons import Answer
    from lab.show.section import Section


def sections(found: Answer) -> list[Section]:
    """The answer as a section: the two figures, the table of parts, the last sentence, and a picture."""
    from lab.features.why.reasons import conclusion
    from lab.show.section import WIDE, Picture, Section, tabled

    fast, slow = found.letters
    lines = [
        f"{letter}  {digits(one.tps):>6} tokens/s   {one.label}" for letter, one in found.sides
    ]
    ratio = f"{slow} is {times(found.ratio)} as slow as {fast}. Of this:"
    columns = (
        ("part", lambda part: part.name),
        ("factor", lambda part: "-" if part.how == "unknown" else f"{part.factor:.2f}x"),
        ("range", lambda part: "{:.2f}-{:.2f}".format(*part.range) if part.half else ""),
        ("how known", lambda part: part.how),
    )
    last, command = conclusion(found)
    about = (
        "The factors multiply to the ratio. Their ranges are 95 % intervals, predicted ones 90 %. That of the rest "
        "combines those of the parts and of both figures."
    )
    return [
        Section(
            name="why",
            question="Why do these two figures differ?",
            words=[*lines, ratio if found.ratio > 1.005 else "They are equal."],
            **tabled(columns, found.parts, keep_all=True),
            notes=[*(f"{part.name}: {part.words}" for part in found.parts if part.words), about],
            sentences=[last, *([f"Try: {command}"] if command else [])],
            pictures=[
                Picture(
                    "why",
                    "The way from one rate to the other, part by part.",
                    partial(draw, found),
                    WIDE,
                )
            ],
        )
    ]


def draw(found: Answer, figure: Figure) -> None:
    """A waterfall from the faster rate to the slower one on a logarithmic axis; whiskers are the known ranges."""
    from lab.show import canvas

    ax = figure.subplots()
    rate = found.fast.tps
    (first, last) = found.letters
    shown = [part for part in found.parts if part.log or part.half]
    ends = [rate, found.slow.tps]
    ax.barh([0, len(shown) + 1], ends, color=canvas.COLOURS[0])
    for i, part in enumerate(shown, 1):
        after = rate / part.factor
        text = f"{part.factor:.2f}x"
        colour = (
            canvas.GUIDE
            if part is found.rest
            else canvas.COLOURS[1]
            if part.log > 0
            else canvas.COLOURS[2]
        )
        ax.barh([i], [abs(rate - after)], left=[min(rate, after)], color=colour, alpha=0.8)
        ax.plot([rate, rate], [i - 1, i + 0.4], color=canvas.GUIDE, lw=0.8)
        if part.half and part.range:
            whisker = [rate / part.range[0], rate / part.range[1]]
            ax.plot(whisker, [i, i], color=canvas.INK, lw=1.5, marker="|", ms=8)
            ends += whisker
            text += " ({:.2f}-{:.2f})".format(*part.range)
        ax.text(1.01, i, text, transform=ax.get_yaxis_transform(), va="center", fontsize=9)
        ends.append(rate := after)
    names = [
        f"{first}: {digits(found.fast.tps)}",
        *(part.name for part in shown),
        f"{last}: {digits(found.slow.tps)}",
    ]
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(min(ends) / 1.15, max(ends) * 1.05)
    ax.set_xlabel("tokens/s")
    canvas.finish([ax], f"Why {last} is {times(found.ratio)} as slow as {first}")


def document(found: Answer) -> dict[str, Any]:
    """The answer as JSON."""
    from lab.features.why.reasons import conclusion

    (last, command) = conclusion(found)
    parts = list[dict[str, Any]]()
    names = ("tps", "counts", "source", "label", "n_prompt", "n_gen", "n_depth", "settings")
    for part in found.parts:
        low, high = part.range or (None, None)
        known = {"factor": part.factor if part.how != "unknown" else None, "low": low, "high": high}
        parts.append({"part": part.name, **known, "how": part.how, "why": part.words})
    return {
        **{letter: {name: getattr(one, name) for name in names} for letter, one in found.sides},
        "slower": found.letters[1],
        "ratio": found.ratio,
        "parts": parts,
        "causes": [part.name for part in found.causes],
        "sentence": last,
        "command": command or None,
        "results": found.path and str(found.path),
    }


@click.command("why", cls=Command, first=("budget", "model", "url", "lib", "prefill"))
@click.argument("figures", nargs=-1, metavar="[A] [B]")
@with_options(
    click.option(
        "--budget",
        default="2min",
        show_default=True,
        help="Time to measure in; 0: measure nothing.",
    ),
    click.option(
        "--model",
        "-m",
        help="Measure with this model if the results name none; of a server: its name.",
    ),
    click.option("--url", metavar="URL", help="B is this server with OpenAI's API, measured now."),
    click.option(
        "--lib",
        multiple=True,
        help="Two folders of libraries, of A and B: measure both builds alternately.",
    ),
    click.option(
        "--device",
        help="The device of a figure without records, as in lab predict; of two with a comma.",
    ),
    click.option("--prefill", is_flag=True, help="Compare prefill instead of decode."),
    out_option("Folder for the measurements and the plot."),
    NO_PLOT,
    as_json_option(),
    *REACHING,
)
def command(
    figures: tuple[str, ...], out: str, no_plot: bool, as_json: bool, yes: bool, **asked: Any
) -> None:
    """Explain why two speeds differ, cause by cause.

    \b
      lab why results/mine.jsonl - --budget 5min    # paste B, then Ctrl-D
      lab why results/mine.jsonl --url http://127.0.0.1:8080/v1
      lab why old.jsonl new.jsonl --lib OLD --lib NEW

    A and B are results files, texts that other programs printed (- for stdin), or figures such as "35 tokens/s". One
    file with two setups is enough. A file with one is compared with the best that this machine can do, by the ceilings
    of its folder (lab ceilings); any other figure alone is measured here with --model. Without arguments the newest
    results in --out are used. The command takes the ratio apart into factors: what the figures count, depth of the
    context, settings, model, server, machine, and what is not explained. It measures depth, settings and builds on this
    machine, from A's setup to B's and back, in blocks with fresh engines, until it is sure or --budget is spent. A
    change needs at least three blocks. The factor of another machine is predicted. What is unknown stays in the part
    that is not explained.
    """
    from lab.app import kinds
    from lab.features.why.reasons import why
    from lab.show import console
    from lab.show.section import print_sections

    if len(figures) > 2 or figures.count("-") > 1:
        raise LabError(
            f"{' '.join(figures)}: too many.", "Give at most two, one of them from stdin (-)."
        )
    if not figures:
        files = sorted(Path(out).glob("*.jsonl"), key=lambda path: path.name)
        if not files:
            raise LabError(
                f"There are no results in {out}.", 'Give two figures: lab why A.jsonl "35 tokens/s"'
            )
        figures = tuple(map(str, files[-1 if asked["url"] else -2 :]))
    if asked["url"]:
        confirm(asked["url"], "at most 20 requests", yes)
    err = console.console(stderr=True)
    with console.progress(err, None, str) as (watch, _):
        found = why(*figures, out=out, watch=watch, **asked)
    made = sections(found)
    plots = [] if no_plot else kinds.draw(made, Path(out), found.path.stem if found.path else "why")
    if as_json:
        console.print_json({**document(found), "plots": [str(plot) for plot in plots]})
        return
    stdout = console.console()
    print_sections(made, stdout)
    for plot in plots:
        stdout.print(f"plot     {plot}")
