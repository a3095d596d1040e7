"""The options that name a server with OpenAI's API, and what measure does with --url."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
from click.core import ParameterSource

from lab.app.running import Output, collect

A_SERVER = "A server that speaks OpenAI's API: http://127.0.0.1:8080/v1"
URL = click.option("--url", metavar="URL", help=A_SERVER)
REACHING = [
    click.option(
        "--api", type=click.Choice(["chat", "completions"]), help="API to use.  [default: detected]"
    ),
    click.option(
        "--api-key-env",
        metavar="NAME",
        help="The environment variable that holds the server's key.",
    ),
    click.option(
        "--header",
        multiple=True,
        metavar="NAME: VALUE",
        help="A header to send; repeat it for several.",
    ),
    click.option("--yes", is_flag=True, help="Contact a server on another machine without asking."),
]
"""How to reach a server."""

TIMEOUT = click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds after which a request times out."
)


def given(context: click.Context) -> list[str]:
    """The parameters that the user gave on the command line."""
    names = [
        str(option.name) for option in context.command.params
    ]  # also those that the command does not get
    return [
        name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]


def confirm(url: str, what: str, yes: bool) -> None:
    """Ask once before a server on another machine is sent `what`, such as "at most 100 requests"."""
    from lab.remote.access import access, is_loopback

    asked = access(url)
    if not (yes or is_loopback(asked)):
        click.confirm(f"{asked.url} is on another machine. Send it {what}?", abort=True, err=True)


def measure_server(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    """Examine a server, show what it can do, measure it and show the results."""
    from lab.remote import through_server
    from lab.remote.servers import connect, reaching_of
    from lab.show import console

    options = given(context)
    output = Output.taken_from(asked)
    err = console.console(stderr=True)
    lengths, model = (asked[name] if name in options else None for name in ("prompt_len", "model"))
    plan = through_server.make_plan(
        lengths, **{name: asked[name] for name in ("gen", "repeat", "prompt", "seed")}
    )
    confirm(url, plan.summary, asked["yes"])
    out = err if output.as_json else console.console()
    err.print("examining the server ...")
    with connect(url, model, err.print, **reaching_of(asked)) as server:
        through_server.print_endpoint(server.endpoint, server.model, server.models, out)
        through_server.check(plan, server)
        known: dict[str, Any] = {
            "endpoint": dataclasses.asdict(server.endpoint),
            "model": server.model,
            "models": server.models,
        }
        if asked["dry_run"]:
            cases = [{"n_prompt": case.n_prompt, "n_gen": case.n_gen} for case in plan.cases]
            planned = {**known, "cases": cases, "repeat": plan.n_repeat}
            return (
                console.print_json(planned)
                if output.as_json
                else out.print(f"\nPlan: {plan.summary}")
            )
        path = server.new_file(output.folder)
        records, problem = collect(
            lambda watch: through_server.execute(plan, server, path, watch),
            path,
            err,
            None,
            through_server.finished,
        )
        output.finish(records, path, problem, bool(through_server.failures(records)), **known)
