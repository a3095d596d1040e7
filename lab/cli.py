"""The command line: parse, call, print. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli_models import models
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.record import Record

CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mini-lab", message="mini-lab %(version)s")
def lab() -> None:
    """Measure LLM inference on this machine: prefill and decode, token by token."""


def main() -> None:
    """The `lab` command. A LabError is a sentence for its reader, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shall not end a session
    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: the engine ends too
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        sys.exit(lab.main(standalone_mode=False) or 0)
    except LabError as problem:
        click.echo(f"Error: {problem}", err=True)
        sys.exit(EXIT_FAILED)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _measuring_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what to measure and how; every command that measures has them."""
    for option in reversed(
        [
            click.option("--model", "-m", default="smollm2-135m", show_default=True, help="A SPEC: see lab models."),
            click.option("--repeat", "-r", default=3, show_default=True, help="Runs of each prompt length."),
            click.option(
                "--prompt", default="text", show_default=True, help="text (the lab's own), random, or a text file."
            ),
            click.option("--seed", default=1, show_default=True, help="Of the order of runs and of the prompts."),
            click.option("--threads", "-t", type=int, help="Threads for decode.  [default: physical cores]"),
            click.option("--threads-batch", type=int, help="Threads for prefill.  [default: as --threads]"),
            click.option("--batch", "-b", default=2048, show_default=True, help="Largest batch; caps --ubatch."),
            click.option("--ubatch", "-u", default=512, show_default=True, help="Tokens per prefill step."),
            click.option(
                "--n-gpu-layers",
                "-ngl",
                type=int,
                help="Layers on the GPU, 0 for none.  [default: all, where there is one]",
            ),
            click.option(
                "--flash-attn",
                "-fa",
                type=click.Choice(["on", "off", "auto"]),
                default="auto",
                show_default=True,
                help="Flash attention.",
            ),
            click.option(
                "--cache-type-k",
                "-ctk",
                type=click.Choice(CACHE_TYPES),
                default="f16",
                show_default=True,
                metavar="TYPE",
                help="Type of the K cache: " + ", ".join(CACHE_TYPES) + ".",
            ),
            click.option(
                "--cache-type-v",
                "-ctv",
                type=click.Choice(CACHE_TYPES),
                default="f16",
                show_default=True,
                metavar="TYPE",
                help="Type of the V cache, likewise.",
            ),
        ]
    ):
        command = option(command)
    return command


@lab.command()
@click.option(
    "--prompt-len",
    "-p",
    default="10,100,1000",
    show_default=True,
    help="Prompt lengths in tokens: 10,1000,10000 or 100-500+100 or 512-4096*2.",
)
@click.option("--gen", "-n", default=64, show_default=True, help="Tokens to generate in each run.")
@_measuring_options
@click.option("--out", "-o", default="results", show_default=True, help="Folder for the results and plots.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the table.")
@click.option("--stream", is_flag=True, help="Show the generated text as it comes.")
@click.option("--no-plot", is_flag=True, help="Draw no plots.")
@click.option("--dry-run", is_flag=True, help="Show the plan and its estimated memory, and measure nothing.")
def measure(out: str, as_json: bool, stream: bool, no_plot: bool, dry_run: bool, **asked: Any) -> None:
    """Time every token of generations at several prompt lengths.

    Without options: a first look that takes about half a minute on two cores. Each run prefills a prompt and
    generates --gen tokens; its time stamps go into a new file in --out the moment it ends. Exit status: 0
    when all runs went well, 1 when some failed, 130 after Ctrl-C.
    """
    from lab import terminal
    from lab.measure import execute, new_results_file
    from lab.plan import make_plan
    from lab.worker import Worker

    err = terminal.console(stderr=True)
    text_out = err if as_json else terminal.console()
    records: list[Record] = []
    with Worker() as worker:
        with terminal.transfer(err) as transferring:
            plan = make_plan(worker, **asked, watch=transferring, fetch=not dry_run)
        for line in terminal.describe(plan.machine, plan.model):
            text_out.print(line)
        for warning in [*plan.warnings, *([terminal.refused_lengths(plan)] if plan.refused else [])]:
            err.print(f"Note: {warning}", style="yellow")
        if dry_run:
            _print_plan(plan, as_json)
            return
        path = new_results_file(plan, Path(out))
        problem: LabError | None = None
        try:
            with terminal.progress(err, text_out if stream else None) as (watch, finished):
                for record in execute(plan, worker, path, watch, stream):
                    records.append(record)
                    finished(record)
        except LabError as error:
            problem = error  # told after what was measured before it
        except KeyboardInterrupt:
            n = sum(record.run.status == "ok" and not record.run.warmup for record in records)
            runs = "1 finished run is" if n == 1 else f"{n} finished runs are"
            err.print(f"\nInterrupted. {runs} in {path}" if n else "\nInterrupted before a run was finished.")
            sys.exit(EXIT_INTERRUPTED)
    _report(records, path, plots=not no_plot, as_json=as_json)
    if problem:
        raise problem
    if terminal.failures(records):
        sys.exit(EXIT_FAILED)


def _report(records: list[Record], path: Path, plots: bool, as_json: bool) -> None:
    """What a session ends with: the table first, since drawing may fail."""
    from lab import terminal

    if not records:
        return
    out = terminal.console()
    if not as_json:
        terminal.print_results(records, out)
        out.print(f"\nresults  {path}")
    drawn = _draw(records, path.parent, path.stem) if plots else []
    if as_json:
        files = {"session": path.stem, "results": str(path), "plots": [str(plot) for plot in drawn]}
        terminal.print_json({**files, **_as_json(records)})
    else:
        for plot in drawn:
            out.print(f"plot     {plot}")


@lab.command()
@click.argument("results", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the tables.")
def show(results: tuple[str, ...], as_json: bool) -> None:
    """Print the tables of results files (or folders of them) again."""
    from lab import terminal

    records = _read(results)
    if as_json:
        terminal.print_json(_as_json(records))
    else:
        terminal.print_results(records, terminal.console())


@lab.command()
@click.argument("results", nargs=-1, required=True)
@click.option("--out", "-o", help="Folder for the plots.  [default: where the first results file is]")
def plot(results: tuple[str, ...], out: str | None) -> None:
    """Draw the plots of results files (or folders of them) again, all in one picture."""
    records = _read(results)
    first = Path(results[0])
    folder = Path(out) if out else first if first.is_dir() else first.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise LabError(f"The folder {folder} cannot be made: {problem.strerror}.", "Choose another: --out") from None
    from lab.plot import save

    stem = first.stem + (f"-and-{len(results) - 1}-more" if len(results) > 1 else "")
    for path in save(records, folder, stem):
        click.echo(path)


@lab.command()
@click.option("--json", "as_json", is_flag=True, help="All that is known, as one JSON document.")
def machine(as_json: bool) -> None:
    """Say what is known of this machine, the llama.cpp build and its devices."""
    import dataclasses

    from lab import machine as this_machine
    from lab import terminal
    from lab.worker import Worker

    with Worker() as worker:
        build = worker.build
    here = this_machine.describe(build.llama_cpp_python, build.llama_cpp_commit, build.system_info, build.devices)
    if as_json:
        terminal.print_json(dataclasses.asdict(here))
        return
    for line in terminal.describe(here):
        click.echo(line)
    for device in here.devices:
        memory = f", {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else ""
        click.echo(f"device   {device.name}: {device.description} ({device.type}{memory})")
    click.echo(f"cores    {here.n_cores_physical} physical, {here.n_cores_usable} usable")
    click.echo(f"python   {here.python}")
    click.echo(f"flags    {here.system_info}")


lab.add_command(models)


def _read(results: tuple[str, ...]) -> list[Record]:
    from lab.results import read

    reading = read(results)
    for sentence in reading.skipped:
        click.echo(f"Note: {sentence}", err=True)
    if not reading.records:
        raise LabError(f"There is no run in {' '.join(results)}.", "Measure some: lab measure")
    return list(reading.records)


def _draw(records: list[Record], folder: Path, stem: str) -> list[Path]:
    from lab.plot import save
    from lab.record import OK

    if any(record.run.status == OK and not record.run.warmup for record in records):
        return save(records, folder, stem)
    return []


def _as_json(records: list[Record]) -> dict[str, Any]:
    from lab import table, terminal

    rows = table.summary(table.runs(records))
    return {"rows": rows.to_dict("records"), "failures": terminal.failures(records)}


def _print_plan(plan: Any, as_json: bool) -> None:
    import dataclasses

    from lab import terminal

    if as_json:
        lengths = [
            {"n_prompt": n, "memory": dataclasses.asdict(plan.memory(n)), "refused": plan.refused.get(n)}
            for n in plan.lengths
        ]
        settings = dataclasses.asdict(plan.settings)
        terminal.print_json({"lengths": lengths, "n_gen": plan.n_gen, "repeat": plan.n_repeat, "settings": settings})
        return
    out = terminal.console()
    out.print(f"\nPlan: {plan.n_repeat} rounds, {plan.n_gen:,} tokens generated per run; memory is an estimate")
    out.print(terminal.plan_table(plan))
    out.print(
        ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(plan.settings).items() if value is not None)
    )
