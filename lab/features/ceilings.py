"""The machine's ceilings: `lab ceilings` and `lab.ceilings` measure what is unknown, and show the
best rates.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import click

from lab.app.help import Command
from lab.app.options import SETTINGS, as_json_option, out_option, with_options
from lab.core.arguments import StrPath, Texts
from lab.core.asked_settings import parts
from lab.core.keywords import EngineSettings
from lab.core.lists import plural
from lab.core.record import Ceilings, Rate
from lab.errors import EXIT_INTERRUPTED, warn
from lab.models import catalog
from lab.process.wire import ATTENTION, DOWNLOAD, PLAIN_ATTENTION, UPLOAD, Probe
from lab.roofline import kernel_rates, measuring, probing
from lab.roofline.probes import READ
from lab.roofline.probing import Say
from lab.runner import progress
from lab.runner.progress import ShowStatus, Status, Watch, duration
from lab.show.cells import TEXT, Column
from lab.show.section import UNKNOWN, Columns, Section, tabled
from lab.show.wording import digits


@click.command("ceilings", cls=Command, first=("model", "types", "threads", "again", "out"))
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
def command(types: str, again: bool, out: str, as_json: bool, **settings: Any) -> None:
    """Measure how fast this machine's basic operations can be.

    \b
      lab ceilings                          # half a minute on two cores
      lab ceilings -m llama-3.2-3b --types Q4_K,Q8_0

    For each weight type of a model, measures how fast ggml's own kernels read it (one column, as in
    decode) and multiply it (many columns, as in prefill). Also measures attention and plain
    reading, all with the given settings. The command first says how many kernels it measures and
    how long that takes. It keeps results in --out, also after Ctrl-C, and uses them again while
    machine and build are the same.

    With a GPU (--device, --n-gpu-layers) it measures the GPU in its own memory, copies to and from
    it, and the CPU if some layers stay there. It measures one GPU, not several.
    """
    from lab.show import console
    from lab.show.section import print_sections

    err = console.console(stderr=True)
    model = settings.pop("model")
    more_types = [kind.strip().upper() for kind in types.split(",") if kind.strip()]
    warn_in_yellow = partial(err.print, style="yellow")
    try:
        with (
            console.transfer(err) as watch_file,
            console.progress(err, None, str) as (watch, _),
        ):
            settings["watch"] = watch_file
            measured = measure(
                model,
                more_types,
                Path(out),
                err.print,
                watch,
                warn_in_yellow,
                again,
                **settings,
            )
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if as_json:
        console.print_json(dataclasses.asdict(measured))
        return
    print_sections([section(measured)], console.console())


def ceilings(
    model: str = catalog.DEFAULT,
    types: Texts = ("Q4_0", "Q8_0"),
    *,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[EngineSettings],
) -> Ceilings:
    """This machine's ceilings for a model (a SPEC), measured if unknown, and kept in `out`.

        best = lab.ceilings("smollm2-135m", types=["Q8_0"], threads=2)

    `types` are measured besides the model's own; `settings` are those of the engine, such as
    threads or device. The ceilings are those of the device with most layers; `others` are those of
    the further devices that the settings use.
    """
    with progress.shown_to(watch) as show:

        def say(sentence: str) -> None:
            show(Status(sentence))

        folder = Path(out)
        best = measure(
            model, parts(types), folder, say, show, warn, False, watch=None, **settings
        )
        say(
            f"The speeds of {len(best.rates)} basic operations (kernels) were measured at "
            f"{best.measured_at}"
        )
    return best


def measure(
    model: str,
    types: Sequence[str],
    out: Path,
    say: Say,
    tell: ShowStatus,
    warn: Say,
    again: bool,
    **settings: Any,
) -> Ceilings:
    """Measure the probes of a model that `out` does not answer (with `again` all), and return all
    its ceilings.
    """
    from lab.models.obtain import find
    from lab.process.worker import Worker
    from lab.runner.plan import make_plan
    from lab.show import text_plan

    with Worker() as worker:
        found_model = find(worker, model)
        plan = make_plan(worker, [1], 1, 1, **settings)
        for line in text_plan.describe(plan.machine, found_model):
            say(line)
        where = probing.place_of(plan.machine, found_model, plan.settings)
        sessions = [] if again else probing.kept(out, warn)
        todo = measuring.unknown(found_model, plan.settings, types, where, sessions)
        say(before(todo))
        try:
            return measuring.obtain(worker, where, todo, tell, warn, out)
        except KeyboardInterrupt:
            sessions = probing.kept(out, lambda sentence: None)
            left = measuring.unknown(found_model, plan.settings, types, where, sessions)
            say(
                f"\nInterrupted. Finished measurements are kept in {out}. {len(left)} of "
                f"{len(todo)} kernels are missing. The same command measures them."
            )
            raise


def before(todo: Sequence[Probe]) -> str:
    """What will be measured, and how long it takes."""
    if not todo:
        return "All kernels are measured already."
    return (
        f"{plural(len(todo), 'kernel')} to measure in {measuring.ROUNDS} rounds: about "
        f"{duration(measuring.expected_s(todo))}, longer if other programs use the cores. Ctrl-C "
        "keeps the measured kernels."
    )


def section(ceilings: Ceilings) -> Section:
    """The kernels' best rates, and the ridge of the roofline."""
    roof = kernel_rates.roof(ceilings)
    label = probing.device_label(ceilings.machine, ceilings.device)
    rates = sorted(ceilings.rates, key=_order)
    return Section(
        f"Ceilings of {label}, measured {ceilings.measured_at}",
        answer=f"Best: {digits(roof.gbps)} GB/s and {digits(roof.gflops)} GFLOP/s. Arithmetic "
        f"limits work above {digits(roof.ridge)} FLOPs per byte (the ridge), memory traffic limits "
        "work below.",
        **tabled(GPU_COLUMNS if ceilings.on_gpu else CPU_COLUMNS, rates, keep_all=True),
        parts=[section(of_device) for of_device in ceilings.others or ()],
    )


def _order(rate: Rate) -> tuple[object, ...]:
    return (
        rate.op,
        rate.type,
        -rate.n_threads,
        rate.rows,
        rate.columns,
        rate.n_tokens,
        rate.n_positions or 0,
    )


def _shape(rate: Rate) -> str:
    """The shape of a kernel in words."""
    if rate.op in (ATTENTION, PLAIN_ATTENTION):
        heads = f"{rate.rows} heads of {rate.columns}"
        return f"{heads} over {rate.n_positions:,}" if rate.n_positions else heads
    if rate.op in (UPLOAD, DOWNLOAD):
        return f"{rate.n_bytes:,} bytes"
    if rate.op == READ:
        return UNKNOWN
    matrix = f"{rate.rows} x {rate.columns}"
    return f"{matrix}, {rate.n_expert_used} of {rate.n_expert}" if rate.n_expert else matrix


def _gflops(rate: Rate) -> str:
    return digits(probing.gflops(rate)) if rate.flops else UNKNOWN


def _columns(threads: Callable[[Rate], str]) -> Columns[Rate]:
    return (
        Column("kernel", lambda rate: rate.op, TEXT),
        Column("type", lambda rate: rate.type, TEXT),
        Column("shape", _shape),
        Column("buffer", lambda rate: rate.buffer, TEXT, priority=-1),
        Column("tokens", lambda rate: str(rate.n_tokens)),
        Column("threads", threads),
        Column("GB/s", lambda rate: digits(probing.gbps(rate))),
        Column("GFLOP/s", _gflops),
    )


CPU_COLUMNS = _columns(lambda rate: str(rate.n_threads))
GPU_COLUMNS = _columns(lambda rate: UNKNOWN)  # the host's threads do not matter
