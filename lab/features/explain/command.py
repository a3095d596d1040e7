"""The command `lab explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from lab.app import kinds
from lab.app.help import Command
from lab.app.options import DETAILS, NO_PLOT, PLOTS_OUT, as_json_option
from lab.app.reading import RESULTS, ceilings_of, draws, hint, plot_folder, read, without_parts
from lab.core.record import Record
from lab.errors import LabError
from lab.features.explain import server_budget
from lab.features.explain.section import explained
from lab.roofline import probing
from lab.show import console, table, text_doubts
from lab.show.section import Section, print_sections


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--ceilings",
    "folder",
    default=RESULTS,
    show_default=True,
    help="Folder with the ceilings.",
)
@PLOTS_OUT
@NO_PLOT
@DETAILS
@as_json_option("text")
def explain(
    results: tuple[str, ...],
    folder: str,
    out: str | None,
    no_plot: bool,
    details: bool,
    as_json: bool,
) -> None:
    """Explain what limited each phase, and what would help.

    \b
      lab explain results/FILE.jsonl
      lab explain results/ --details

    Shows how far each phase was from its ceiling. Names the changes of settings with the largest
    predicted gains, and the gains of batching, a cached prompt and speculative decoding, each with
    the command to try it.

    Needs the ceilings of the machine that measured: lab ceilings. Of requests to llama-server it
    shows what is inside and outside of the server's own times.
    """
    contents = read(results)
    of_server = server_budget.section(contents.requests)
    if of_server and not contents.records:
        print_server(of_server, as_json)
        return
    reading = without_parts(read(results, steps_to="explain"))
    folder_of_plots = plot_folder(results, out) if draws(results, out, no_plot) else None
    records = _of_good_runs(reading.records)
    sessions = ceilings_of(reading, folder)
    stdout = console.console(details=hint(details))
    documents = []
    setups = table.by_setup(records)
    for number, (label, of_setup) in enumerate(setups, start=1):
        ceilings = probing.need(
            sessions,
            probing.place_of_record(of_setup[0]),
            label,
            command=probing.commands(of_setup)[0],
        )
        section = explained(label, of_setup, ceilings)
        warnings = text_doubts.warnings(of_setup)
        stem = Path(results[0]).stem
        if len(setups) > 1:
            stem = f"{stem}-{number}"
        if not as_json:
            print_sections([section, Section(warnings=warnings)], stdout)
        plots: list[Path] = []
        if folder_of_plots is not None:
            plots = kinds.draw_what_can_be([section], folder_of_plots, stem)
        documents.append(
            {
                **section.data(),
                "plots": [str(plot) for plot in plots],
                "warnings": [*section.warnings, *warnings],
            }
        )
        if not as_json:
            for line in kinds.plot_lines(Path(folder_of_plots or "") / stem, plots):
                stdout.print(line)
    if as_json:
        console.print_json(documents)


def print_server(section: Section, as_json: bool) -> None:
    """What requests to llama-server show: the times that it reports itself."""
    if as_json:
        console.print_json([section.data()])
    else:
        print_sections([section], console.console())


def _of_good_runs(records: Sequence[Record]) -> list[Record]:
    """The records of runs that succeeded, without warm-ups. LabError where there is none."""
    good = [record for record in records if record.run.is_timed]
    own = [record for record in good if record.run.imported_from is None]
    if good and not own:
        raise LabError(
            f"These results were imported from {good[0].run.imported_from}, which tells only times "
            "of whole tests: what limited them is unknown.",
            "Compare them: lab compare, or lab why. What limits this machine: lab measure",
        )
    if not own:
        raise LabError(
            "No run succeeded, so there is nothing to explain.",
            "Look at the errors: lab show RESULTS",
        )
    return own
