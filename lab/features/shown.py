"""The commands that show what was measured before: show, plot, report; and `lab words`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.help import Command
from lab.cli.options import AT_LEAST, DETAILS, PLOTS_OUT, as_json_option
from lab.core import shell
from lab.errors import LabError, printable
from lab.features import known, running

if TYPE_CHECKING:
    from lab.core.record import Buffer, Record
    from lab.core.request import RequestRecord


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--placement", is_flag=True, help="Show which device held which layers, caches and buffers, instead of times."
)
@DETAILS
@as_json_option("tables")
def show(results: tuple[str, ...], placement: bool, details: bool, as_json: bool) -> None:
    """Show saved results (files or folders) as tables.

    \b
      lab show results/FILE.jsonl
      lab show results/ --details
    """
    from lab.show import console

    reading = running.read_runs(results, "place") if placement else running.read(results, with_traces=True)
    records = list(reading.records)
    if placement:
        return _show_placement(records, as_json)
    measured: list[Record | RequestRecord] = [*records, *reading.requests, *reading.traces]
    made = known.sections(measured, running.context(measured, results, ceilings=reading.ceilings, details=details))
    faster = running.faster_settings(results, records)
    if as_json:
        console.print_json({**known.as_json(measured, made), **({"faster_settings": faster} if faster else {})})
    else:
        out = console.console(details=running.hint(details))
        known.print_results(measured, out, made, faster)
        for line in running.next_steps(records, running.plot_folder(results, None), shell.lab("explain", *results)):
            out.print(line)


PARTS = {"model": "weights", "KV": "KV cache", "RS": "recurrent state", "compute": "compute", "output": "output"}
"""Parts of a record's buffers, and their headings."""


def _show_placement(records: Sequence[Record], as_json: bool) -> None:
    """Where llama.cpp put each setup, for its largest run: devices with layers, and bytes of its buffers by part."""
    from lab.core.placement import CPU, device_of
    from lab.show import console, table
    from lab.show.text_setup import megabytes, ranges

    out, setups = console.console(), []
    for label, part in table.setups(table.runs(records)):
        own = [records[number] for number in dict.fromkeys(part.run)]
        known = [(record.run.placement, record) for record in own if record.run.placement is not None]
        largest = max(known, key=lambda pair: sum(buffer.n_bytes for buffer in pair[0].buffers), default=None)
        rows: list[dict[str, Any]] | None = None
        if largest:
            placement, record = largest
            buffers: dict[str, list[Buffer]] = {}
            for one in placement.buffers:
                buffers.setdefault(device_of(one, record.machine.devices), []).append(one)
            rows = []
            for name in sorted(dict.fromkeys([*placement.layers, *buffers]), key=lambda name: name == CPU):
                sizes: dict[str, dict[str, int]] = {"bytes": {}, "model_buffers": {}}
                for one in buffers.get(name, ()):
                    sizes["bytes"][one.part] = sizes["bytes"].get(one.part, 0) + one.n_bytes
                    if one.part == "model":
                        sizes["model_buffers"][one.name] = sizes["model_buffers"].get(one.name, 0) + one.n_bytes
                layers = [layer for layer, device in enumerate(placement.layers) if device == name]
                rows.append({"device": name, "layers": layers, "output_layer": len(placement.layers) - 1, **sizes})
        setups.append({"setup": label, "devices": rows})
        if as_json:
            continue
        out.print(f"\n{label}: placement reported by llama.cpp", highlight=False)
        if rows is None:
            out.print("not recorded")
            continue
        parts = [name for name in PARTS if name != "RS" or any(row["bytes"].get(name) for row in rows)]
        grid = console.Grid("device", "layers", *(f"{PARTS[name]} MB" for name in parts), "in")
        for row in rows:
            names = row["model_buffers"]
            several = [name if len(names) == 1 else f"{name} {megabytes(n)}" for name, n in names.items()]
            of_parts = (megabytes(row["bytes"].get(name, 0)) for name in parts)
            grid.add_row(row["device"], ranges(row["layers"], row["output_layer"]), *of_parts, ", ".join(several))
        out.print(grid)
    if as_json:
        console.print_json({"setups": setups})


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@PLOTS_OUT
def plot(results: tuple[str, ...], out: str | None) -> None:
    """Draw the plots of saved results (files or folders).

    \b
      lab plot results/FILE.jsonl
      lab plot before.jsonl after.jsonl --out pictures
    """
    from lab.features.measure import text_results

    reading = running.read(results, with_traces=True)
    first = Path(results[0])
    measured = [*reading.measured, *reading.traces]
    if not running.any_good(measured):
        raise LabError("There is nothing to draw: no run succeeded.", "Look at the errors: lab show RESULTS")
    for sentence in text_results.imported(reading.records):
        running.note(sentence)
    stem = first.stem + (f"-and-{len(results) - 1}-more" if len(results) > 1 else "")
    made = known.sections(measured, running.context(measured, results, ceilings=reading.ceilings))
    for path in known.draw(made, running.plot_folder(results, out), stem):
        click.echo(printable(str(path)))


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option("--out", "-o", metavar="FILE", help="The page.  [default: the first results file's name, with .html]")
@click.option("--ceilings", default=running.RESULTS, show_default=True, help="Folder with the ceilings.")
@AT_LEAST
@click.option("--no-explore", is_flag=True, help="Leave out the sliders that predict other requests and devices.")
def report(results: tuple[str, ...], out: str | None, ceilings: str, at_least: float, no_explore: bool) -> None:
    """Write results as one HTML page with the raw data inside.

    \b
      lab report results/FILE.jsonl
      lab report results/ --out report.html

    The page contains the data and needs no network, so you can mail it or put it on any server. lab show and lab
    compare read the records in it. If the ceilings of a machine are known (lab ceilings), it says what limited each
    phase, and has sliders for prompts, answers, users and devices, which predict as lab predict does.
    """
    from lab.features import page

    reading = running.read(results, with_traces=True)
    first = Path(results[0])
    default = first / "report.html" if first.is_dir() else first.with_suffix(".html")
    if first.name.startswith("sample-"):
        default = Path(default.name)  # not beside the samples of this repository
    path = Path(out) if out else default
    if path.suffix != ".html":
        raise LabError(f"A page's name must end in .html, and {path} does not.", "For example: --out report.html")
    if path.resolve() in {Path(each).resolve() for each in results}:
        raise LabError(f"--out {path} would overwrite the results.", "Choose another name: --out report.html")
    others = running.nearby(results, reading.records).records
    known = running.ceilings_of(reading, ceilings)
    measured = [*reading.measured, *reading.traces]
    click.echo(printable(str(page.report(path, measured, known, at_least, others, not no_explore))))


@click.command(cls=Command)
@click.argument("term", nargs=-1)
@as_json_option("text")
def words(term: tuple[str, ...], as_json: bool) -> None:
    """Explain the lab's terms, such as TTFT, ridge or goodput.

    \b
      lab words                             # all terms
      lab words ttft
    """
    from lab.show import console, terms

    found = [terms.find(" ".join(term))] if term else terms.terms()
    if as_json:
        console.print_json([dataclasses.asdict(one) for one in found])
        return
    formatter = click.HelpFormatter(max_width=100)
    formatter.write_dl([(one.name, one.meaning.replace("`", "")) for one in found])
    if term:
        more = {"unit": found[0].unit, "shown in": found[0].shown, "also": ", ".join(found[0].also)}
        formatter.write_dl([(name, value) for name, value in more.items() if value])
    click.echo(formatter.getvalue(), nl=False)
