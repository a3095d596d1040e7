"""Choosing a device: one request on many devices, results of many machines as a page, and what others published."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.help import Command
from lab.cli.options import NO_PLOT, TOKENS, as_json_option, with_options
from lab.cli.running import EXIT_FAILED, RESULTS, note
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.core.request import Slo
    from lab.why.candidates import Candidate
    from lab.why.published import Row


def _listed(texts: tuple[str, ...]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


@click.command(cls=Command, first=("model", "prompt-len", "gen", "users", "device", "slo"))
@click.argument("results", nargs=-1, metavar="[FOLDER]...")
@with_options(
    click.option("--model", "-m", "models", multiple=True, help="Models, as for predict; several with commas."),
    click.option("--prompt-len", "-p", type=TOKENS, default=1000, show_default=True, help="Tokens in the prompt."),
    click.option("--gen", "-n", type=TOKENS, default=200, show_default=True, help="Tokens to generate, 2 or more."),
    click.option("--users", default=1, show_default=True, help="Users whose answers are decoded together."),
    click.option(
        "--every",
        type=float,
        metavar="SECONDS",
        help="Each of --users sends a request this often, at random times: shows the number of devices needed.",
    ),
    click.option("--device", "-d", "devices", multiple=True, help="Only these devices or kinds; several with commas."),
    click.option("--kind", help="Only this kind: laptop, desktop, small, apple, geforce, radeon, arc or datacenter."),
    click.option("--memory", metavar="GB", help="Only devices with at most this much memory, such as 24GB."),
    click.option("--slo", metavar="LIMITS", help="Limits to keep, such as ttft=2s,tpot=50ms."),
    click.option("--at-least", type=float, metavar="RATE", help="With one --device: the models it decodes this fast."),
    click.option("--prices", metavar="FILE", help="CSV file with the columns device, price and, if known, watts."),
    click.option("--watts", type=float, help="Power of devices that --prices gives none for, in watts."),
    click.option("--kwh", type=float, metavar="PRICE", help="Price of a kilowatt-hour: shows the cost of energy."),
    click.option("--out", "-o", help="Folder of the page, or of the plots.  [default: board, or results]"),
    click.option("--check", is_flag=True, help="Only check contributed results; write no page."),
    NO_PLOT,
    as_json_option(),
)
def board(
    results: tuple[str, ...],
    models: tuple[str, ...],
    check: bool,
    out: str | None,
    no_plot: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Rank devices for a model, or make a page of results.

    \b
      lab board -m llama-3.1-8b -p 8k -n 300             # devices that hold it
      lab board -m llama-3.1-8b --users 1000 --every 60  # how many are needed
      lab board results/ --out board                     # a page of all results

    Without FOLDER: one row for each device that fits, fastest first, with 90 % ranges. This machine is among them
    with its measured times, or with a prediction from its ceilings. Times of other devices are predictions.

    With --every: how many devices of each kind all --users need, and what takes their time.

    With FOLDER: a static page, index.html in --out. It lists devices and models, and links to the curves and the
    records of each measured row. --check refuses files that hold no records, are copies, or are faster than the
    device can be; the exit status is then 1.
    """
    if results:
        _page(results, out or "board", check)
        return
    if check:
        raise LabError("--check needs the folder to check.", "lab board FOLDER --check")
    _request(_listed(models), out or RESULTS, no_plot, as_json, **asked)


def _page(results: tuple[str, ...], out: str, check: bool) -> None:
    from lab.core.results import read
    from lab.show import board_page
    from lab.why import contributions

    if check:
        found = contributions.refusals(results)
        for sentence in found:
            click.echo(f"refused  {sentence}")
        if found:
            sys.exit(EXIT_FAILED)
        click.echo("Nothing to refuse.")
        return
    contents = read(results)
    for sentence in contents.skipped:
        note(sentence)
    records, known = contents.records, contents.ceilings
    click.echo(f"page     {board_page.write_board(out, records, known, board_page.other_rows(records, known))}")


def _request(models: list[str], out: str, no_plot: bool, as_json: bool, **asked: Any) -> None:
    """Prints the candidates for what was `asked` for."""
    from lab.core.request import parse_slo
    from lab.drawing import canvas
    from lab.show import console, text_board
    from lab.show.section import print_section

    names, watts = _listed(asked["devices"]) + ([asked["kind"]] if asked["kind"] else []), asked["watts"]
    limits = parse_slo(asked["slo"]) if asked["slo"] else None
    found = _candidates(models, names, limits, asked)
    shown = text_board.section(found, limits, watts, asked["kwh"], has_here=not names)
    plots = []
    for picture in () if no_plot else shown.pictures:
        plots += canvas.write(picture.draw, Path(out), f"board-{picture.name}", picture.file_size)
    if as_json:
        rows = [{**_as_json(one), "joules_per_token": one.joules_per_token(watts)} for one in found]
        console.print_json({"rows": rows, "plots": [str(plot) for plot in plots]})
        return
    print_section(shown, console.console())
    for plot in plots:
        click.echo(f"plot     {plot}")


def _candidates(models: list[str], names: list[str], limits: Slo | None, asked: dict[str, Any]) -> list[Candidate]:
    """The models on the devices of these names; with --at-least the largest models of the only device."""
    from lab.why import candidates as choosing

    n_prompt, n_gen, users, at_least = (asked[name] for name in ("prompt_len", "gen", "users", "at_least"))
    if n_gen < 2 or n_prompt < 1 or users < 1:
        raise LabError("--prompt-len and --users need 1 or more, --gen 2 or more.", "Leave them out for the defaults.")
    if asked["every"] is not None:
        if not 0 < asked["every"] < float("inf"):
            raise LabError(f"--every {asked['every']:g} is not possible.", "Give seconds above 0: --every 60")
        if at_least is not None or asked["kwh"] is not None:
            raise LabError("--every counts devices, without --at-least and --kwh.", "Leave these out.")
    if at_least is None:
        prices = choosing.read_prices(asked["prices"]) if asked["prices"] else None
        how: dict[str, Any] = {
            "devices": names,
            "users": users,
            "every_s": asked["every"],
            "slo": limits,
            "prices": prices,
        }
        return _within(choosing.board(models or ["smollm2-135m"], n_prompt, n_gen, **how), asked["memory"])
    if len(names) != 1 or models:
        raise LabError("--at-least needs one --device and no --model.", "lab board -d rtx-4090 --at-least 20")
    found = choosing.largest(names[0], at_least, n_prompt, n_gen)
    if not found:
        raise LabError(f"{names[0]} decodes no model of the catalog at {at_least:g} tokens/s.", "Ask for less.")
    return found


def _within(found: list[Candidate], memory: str | None) -> list[Candidate]:
    """Those with at most this much memory. LabError where none is left."""
    if memory is None:
        return found
    try:
        most = 1e9 * float(memory.lower().removesuffix("gb"))
    except ValueError:
        raise LabError(f"--memory {memory!r} is not a size.", "Write it in GB: --memory 24GB") from None
    kept = [one for one in found if one.memory_bytes is not None and one.memory_bytes <= most]
    if not kept:
        raise LabError(f"No device here has {memory} or less.", "See all: lab board -m MODEL")
    return kept


def _as_json(one: Candidate) -> dict[str, Any]:
    """A candidate with its model by name; what does not fit has no times."""
    values = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    values |= {"e2e_s": one.e2e_s, "model": one.model.name, "quantization": one.model.quantization}
    values |= {name: None for name in ("ttft_s", "tpot_s", "e2e_s") if one.problem}
    values["device"] = one.device.about if one.device else None
    values["price"] = one.price.price if one.price else None
    values["demand"] = dataclasses.asdict(one.demand) if one.demand else None
    values["needs"] = one.needs and [dataclasses.asdict(need) if need else None for need in one.needs]
    return values


@click.command(cls=Command)
@click.option("--device", "-d", metavar="NAME", help="Devices whose name contains this, or a kind such as apple.")
@click.option("--model", "-m", metavar="NAME", help="Models whose name or quantization contains this.")
@click.option("--source", metavar="NAME", help="Sources whose name contains this.")
@as_json_option()
def published(device: str | None, model: str | None, source: str | None, as_json: bool) -> None:
    """List what other people measured and published.

    \b
      lab published                              # how many each source has
      lab published -d rtx-4090 -m llama-2-7b    # one line for each entry

    They are mean rates of whole tests, collected from llama.cpp's scoreboards and other pages in
    models/published.csv. A row that breaks a rule, such as one above the limit by memory bandwidth, names the rule. lab
    predict learns from the others.
    """
    from lab.show.text_published import chosen
    from lab.why import published as file

    rows = chosen(file.rows(), model=model, source=source, device=device)
    print_published(rows, as_json, is_summary=not (device or model or source))


def print_published(rows: Sequence[Row], as_json: bool, is_summary: bool = False) -> None:
    """Print published measurements as a table, as a summary of their sources, or as JSON."""
    from lab.show import console, text_published
    from lab.show.section import print_section

    if as_json:
        console.print_json({"rows": [dataclasses.asdict(row) for row in rows]})
        return
    print_section(text_published.summary(rows) if is_summary else text_published.section(rows), console.console())
