"""The command that measures a model in process and through a server, and takes the difference apart: doors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.options import ENGINE, MODEL, SEED, as_json_option, out_option, with_options
from lab.cli.running import EXIT_FAILED, collect
from lab.cli.servers import REACHING, TIMEOUT, URL, confirm
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.core.record import Record
    from lab.core.request import RequestRecord


@click.command()
@with_options(
    URL,
    MODEL,
    click.option("--served-model", metavar="NAME", help="The server's name for the model.  [default: its only one]"),
    *REACHING,
    TIMEOUT,
    click.option("--prompt-len", "-p", default="512", show_default=True, help="Prompt lengths, as for measure."),
    click.option("--gen", "-n", default=64, show_default=True, help="Tokens to generate."),
    click.option("--blocks", default=6, show_default=True, help="Blocks; each measures both sides once."),
    click.option("--prompt", default="text", show_default=True, help="What prompts are cut from, as for measure."),
    *ENGINE,
    SEED,
    out_option("Folder for the results and the plot."),
    as_json_option("tables"),
    click.option("--no-plot", is_flag=True, help="Draw no plot."),
)
def doors(
    url: str | None,
    served_model: str | None,
    yes: bool,
    blocks: int,
    out: str,
    as_json: bool,
    no_plot: bool,
    **asked: Any,
) -> None:
    """Say why a server is slower than the same model in process: TTFT and TPOT, part by part.

    \b
      lab doors --url http://127.0.0.1:8080/v1 -m MODEL.gguf --threads 4

    The same tokens, in turns, in this process and through the server: the engine, sampling, the stream, HTTP,
    templating, tokenising, scheduling, and what is not explained. Start the server on this machine, and give the lab
    the settings with which it was started (threads, ubatch, flash attention, cache types), since no server says them.
    """
    from lab.core.request import RequestRecord
    from lab.experiments.door_blocks import execute, new_file, prepare
    from lab.process.worker import Worker
    from lab.runner.servers import connect, reaching_of
    from lab.show import console, door_views, text_endpoint, text_setup

    if url is None:
        raise LabError("Which server?", "Name it: --url http://127.0.0.1:8080/v1")
    err = console.console(stderr=True)
    confirm(url, f"about {15 * blocks} requests for each length", yes)
    how = reaching_of(asked)
    settings = {name: value for name, value in asked.items() if name not in how}
    with connect(url, served_model, **how) as server:
        text_out = err if as_json else console.console()
        text_endpoint.print_endpoint(server.endpoint, server.model, server.models, text_out)
        with Worker() as worker, console.transfer(err) as transferring:
            turns = prepare(server, worker, blocks=blocks, watch=transferring, **settings)
        for line in text_setup.describe(turns.plan.machine, turns.plan.model):
            text_out.print(line)
        for warning in [*turns.plan.warnings, *door_views.cannot(server.endpoint)]:
            err.print(f"Note: {warning}", style="yellow")
        path = new_file(turns, Path(out))

        def tell(line: Record | RequestRecord, finished: Callable[[Any], None]) -> None:
            if not isinstance(line, RequestRecord):
                finished(line)
            elif not line.request.asked.warmup and not err.is_terminal:
                err.print(door_views.finished(line))

        lines, problem = collect(
            lambda watch: execute(turns, path, watch),
            path,
            err,
            tell=tell,
            where=lambda lines, path: f"What had ended is in {path}" if lines else "",
        )
    has_all = _show(lines, path, not no_plot, as_json)
    if problem:
        raise problem
    if not has_all:
        sys.exit(EXIT_FAILED)


def _show(lines: list[Record | RequestRecord], path: Path, plots: bool, as_json: bool) -> bool:
    """Prints the parts, then draws. Returns whether every block has both sides."""
    from lab.core.record import Record
    from lab.core.request import RequestRecord
    from lab.experiments import door_parts
    from lab.show import canvas, console, door_views

    records = [line for line in lines if isinstance(line, Record)]
    requests = [line for line in lines if isinstance(line, RequestRecord)]
    out = console.console()
    if not as_json:
        door_views.print_parts(records, requests, out)
    failures = door_views.failures(records, requests)
    made = door_views.drawings(lines) if plots else {}
    drawn = [str(one) for name, draw in made.items() for one in canvas.write(draw, path.parent, f"{path.stem}-{name}")]
    if as_json:
        parts = door_views.as_rows(records, requests)
        console.print_json({"results": str(path), "plots": drawn, "sessions": parts, "failures": failures})
    else:
        for failure in failures:
            out.print(failure)
        out.print(f"\nresults  {path}")
        for name in drawn:
            out.print(f"plot     {name}")
    n_wanted = sum(not request.request.asked.warmup for request in requests)
    return bool(requests) and len(door_parts.pairs(records, requests)) == n_wanted
