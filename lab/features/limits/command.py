"""The commands `lab ceilings` and `lab explain`."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from lab.app.help import EXIT_INTERRUPTED, Command
from lab.app.options import (
    DETAILS,
    NO_PLOT,
    PLOTS_OUT,
    SETTINGS,
    as_json_option,
    out_option,
    with_options,
)
from lab.errors import LabError
from lab.app.running import RESULTS, ceilings_of, draws, hint, plot_folder, read, without_tuning


@click.command(cls=Command, first=("model", "types", "threads", "again", "out"))
@with_options(
    *SETTINGS,
    click.option(
        "--types",
        default="Q4_0,Q8_0",
        show_default=True,
        help="Weight types to measure in addition to the model's.",
    ),
    click.option(
        "--again", is_flag=True, help="Measure known kernels again; the best rates count."
    ),
    out_option("Folder with the results."),
    as_json_option(),
)
def ceilings(types: str, again: bool, out: str, as_json: bool, **asked: Any) -> None:
    """Measure how fast this machine's basic operations can be.

    \b
      lab ceilings                          # half a minute on two cores
      lab ceilings -m llama-3.2-3b --types Q4_K,Q8_0

    For each weight type of a model, measures how fast ggml's own kernels read it (one column, as in decode) and
    multiply it (many columns, as in prefill). Also measures attention and plain reading, all with the given settings.
    The command first says how many kernels it measures and how long that takes. It keeps results in --out, also after
    Ctrl-C, and uses them again while machine and build are the same.

    With a GPU (--device, --n-gpu-layers) it measures the GPU in its own memory, copies to and from it, and the CPU if
    some layers stay there. It measures one GPU, not several.
    """
    from lab.features.limits import explanation
    from lab.roofline import probing
    from lab.show import console
    from lab.show.section import print_sections

    err = console.console(stderr=True)
    model = asked.pop("model")
    extra = [kind.strip().upper() for kind in types.split(",") if kind.strip()]
    warn = partial(err.print, style="yellow")
    try:
        with console.transfer(err) as watch_file, console.progress(err, None, str) as (watch, _):
            asked["watch"] = watch_file
            measured = probing.measure(
                model, extra, Path(out), err.print, watch, warn, again, **asked
            )
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if as_json:
        console.print_json(dataclasses.asdict(measured))
        return
    print_sections([explanation.of_ceilings(measured)], console.console())


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--ceilings", "folder", default=RESULTS, show_default=True, help="Folder with the ceilings."
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

    Shows how far each phase was from its ceiling. Names the changes of settings with the largest predicted gains, and
    the gains of batching, a cached prompt and speculative decoding, each with the command to try it.

    Needs the ceilings of the machine that measured: lab ceilings.
    """
    from lab.core.record import OK
    from lab.app import known
    from lab.features.limits import explanation
    from lab.roofline import probing
    from lab.show import text_results
    from lab.show import console, table
    from lab.show.section import print_marked, print_sections

    reading = without_tuning(read(results, steps_to="explain"))
    target = plot_folder(results, out) if draws(results, out, no_plot) else None
    records = [
        record for record in reading.records if record.run.status == OK and not record.run.warmup
    ]
    if not records:
        raise LabError(
            "No run succeeded, so there is nothing to explain.",
            "Look at the errors: lab show RESULTS",
        )
    given = ceilings_of(reading, folder)
    documents = []
    setups = table.setups(table.runs(records))
    for number, (label, setup) in enumerate(setups):
        stem = Path(results[0]).stem + (f"-{number + 1}" if len(setups) > 1 else "")
        chosen = [records[i] for i in dict.fromkeys(setup.run)]
        best = probing.need(given, probing.place_of_record(chosen[0]), label)
        section = explanation.explained(label, chosen, best)
        warnings = text_results.warnings(chosen)
        plots = known.draw([section], target, stem) if target else []
        more = {"plots": [str(plot) for plot in plots], "warnings": [*section.warnings, *warnings]}
        documents.append({**section.data(), **more})
        if not as_json:
            stdout = console.console(details=hint(details))
            print_sections([section], stdout)
            print_marked(warnings, [], stdout)
            for plot in plots:
                stdout.print(f"plot     {plot}")
    if as_json:
        console.print_json(documents)
