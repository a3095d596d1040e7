"""`lab measure --url`: the main job through a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.files import any_good
from lab.cli.running import EXIT_FAILED, collect, write_files
from lab.cli.servers import confirm, given
from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.core.request import RequestRecord
    from lab.runner.progress import ShowStatus
    from lab.runner.through_server import ServerPlan

OF_SERVERS = ("api", "api_key_env", "header", "yes", "timeout")
"""Parameters that only make sense with --url."""

OF_BOTH = (
    *("prompt_len", "gen", "repeat", "model", "prompt", "seed", "out", "as_json", "no_plot", "report", "stream"),
    *("dry_run", "url"),
)
"""Parameters that make sense with and without --url."""


def check_options(context: click.Context, url: str | None) -> None:
    """LabError where an option was given that makes no sense with a server, or without one."""
    options = given(context)
    if url is None:
        wrong = [option for name, option in options.items() if name in OF_SERVERS]
        problem = "only for a server, and no --url is given.", "Name the server: --url http://127.0.0.1:8080/v1"
    else:
        wrong = [option for name, option in options.items() if name not in (*OF_SERVERS, *OF_BOTH)]
        hint = f"Leave {'it' if len(wrong) == 1 else 'them'} out: a server has settings of its own."
        problem = "only for the lab's own engine, not for a server.", hint
    if wrong:
        raise LabError(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} {problem[0]}", problem[1])


def measure(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    """Looks at a server, says what cannot be seen of it, measures and shows."""
    from lab.runner import through_server
    from lab.runner.servers import connect
    from lab.show import console, text_endpoint

    options = given(context)
    lengths = asked["prompt_len"] if "prompt_len" in options else through_server.DEFAULT_LENGTHS
    wanted = through_server.wanted(lengths, asked["gen"], asked["repeat"], asked["prompt"], asked["seed"])
    confirm(url, wanted.words, asked["yes"])
    err = console.console(stderr=True)
    text_out = err if asked["as_json"] else console.console()
    model = asked["model"] if "model" in options else None
    err.print("looking at the server ...")
    reaching = asked["api"], asked["api_key_env"], asked["header"], asked["timeout"]
    with connect(url, model, *reaching, say=err.print) as server:
        text_endpoint.print_endpoint(server.endpoint, server.model, server.models, text_out)
        plan = through_server.make_plan(server, wanted)
        text_endpoint.print_unseen(plan.unseen, text_out)
        for sentence in plan.refused.values():
            err.print(f"Note: {sentence}", style="yellow")
        if asked["dry_run"]:
            text_endpoint.print_plan(plan, asked["as_json"])
            return
        _measure(plan, asked)


def _measure(plan: ServerPlan, asked: dict[str, Any]) -> None:
    from lab.runner.through_server import execute, new_results_file
    from lab.show import console, text_requests

    path = new_results_file(plan, Path(asked["out"]))

    def requests(watch: ShowStatus) -> Iterator[RequestRecord]:
        return execute(plan, path, watch, asked["stream"])

    err = console.console(stderr=True)
    stream_to = console.console(stderr=asked["as_json"]) if asked["stream"] else None
    records, problem = collect(requests, path, err, stream_to, in_blocks=True, describe=text_requests.finished)
    _show(records, path, plan, asked)
    if problem:
        raise problem
    if text_requests.failures(records):
        sys.exit(EXIT_FAILED)


def _show(records: list[RequestRecord], path: Path, plan: ServerPlan, asked: dict[str, Any]) -> None:
    """Prints the table, then draws: drawing may fail."""
    import dataclasses

    from lab.analysis.comparison import AT_LEAST
    from lab.show import console, text_requests

    if not records:
        return
    as_json, out = asked["as_json"], console.console()
    if not as_json:
        text_requests.print_requests(records, out)
    files = write_files(records, path, not asked["no_plot"], asked["report"], AT_LEAST, None if as_json else out)
    if not as_json and any_good(records):
        out.print(f"next     a page to hand on: lab report {path}")
    if as_json:
        known = {"endpoint": dataclasses.asdict(plan.server.endpoint), "model": plan.server.model}
        rows = {"rows": text_requests.as_rows(records), "warnings": text_requests.warnings(records)}
        console.print_json(
            {**files, **known, "unseen": plan.unseen, **rows, "failures": text_requests.failures(records)}
        )
