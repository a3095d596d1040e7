"""Commands that measure a server: the options that name one, and their loop: examine, plan,
measure, show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lab.app.options import Unstored, seconds_of
from lab.app.output import Output
from lab.app.running import collect
from lab.core import sampling
from lab.core.arguments import Reaching
from lab.core.asked_settings import flag, table
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.remote.session import ServerPlan

URL = click.option(
    "--url", metavar="URL", help="A server that speaks OpenAI's API: http://127.0.0.1:8080/v1"
)
REACHING = [
    click.option(
        "--api",
        type=click.Choice(["chat", "completions"]),
        help="API to use.  [default: detected]",
    ),
    click.option(
        "--api-key-env",
        metavar="NAME",
        help="The environment variable that holds the server's key.",
    ),
    click.option(
        "--header",
        cls=Unstored,
        multiple=True,
        metavar="NAME: VALUE",
        help="A header to send; repeat it for several.",
    ),
    click.option(
        "--yes",
        cls=Unstored,
        is_flag=True,
        help="Contact a server on another machine without asking.",
    ),
]
"""How to reach a server."""

TIMEOUT = click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    help="Seconds after which a request times out.",
)


ONLY_SERVER = (*Reaching.__annotations__, "yes")
"""Parameters that only a server has."""

BOTH_SIDES = {"prompt", "seed"}
ENGINE_RUNS = {"settings", "every", "until", "max_repeats", "stream"}
ONLY_ENGINE = ({*table(), *sampling.table()} | ENGINE_RUNS) - BOTH_SIDES
"""Parameters that only the lab's own engine has."""


def split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Reaching]:
    """Keywords of a public function for a server: those of its plan, and how to reach it."""
    from lab.remote.examination import reaching_of

    of_plan = {name: settings[name] for name in BOTH_SIDES & settings.keys()}
    budget = settings.get("budget")
    if budget is not None:
        of_plan["budget_s"] = seconds_of(budget)
    return of_plan, reaching_of(settings)


def of_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command without those that only a server has."""
    return {name: value for name, value in options.items() if name not in ONLY_SERVER}


def given(context: click.Context) -> list[str]:
    """The parameters that the user gave on the command line."""
    names = [str(option.name) for option in context.command.params]
    return [
        name
        for name in names
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]


def check_side(parameters: Iterable[str], url: str | None) -> None:
    """LabError for parameters that a server does not have, or that only a server has."""
    refused = ONLY_SERVER if url is None else ONLY_ENGINE
    flags = [flag(name) for name in parameters if name in refused]
    if not flags:
        return
    subject = f"{flags[0]} is" if len(flags) == 1 else f"{', '.join(flags)} are"
    if url is None:
        raise LabError(
            f"{subject} only for a server, but there is no --url.",
            "Add the server's address: --url http://127.0.0.1:8080/v1",
        )
    what = f"{subject} only for the lab's own engine, not for a server."
    if len(flags) == 1:
        raise LabError(what, "Leave it out: a server has its own settings.")
    raise LabError(what, "Leave them out: a server has its own settings.")


def confirm(url: str, what: str, yes: bool) -> None:
    """Ask once before a server on another machine is sent `what`, such as "at most 9 requests"."""
    from lab.remote.access import access, is_loopback

    server = access(url)
    if not (yes or is_loopback(server)):
        click.confirm(
            f"{server.url} is on another machine. Send it {what}?", abort=True, err=True
        )


def carry_out(url: str, plan: ServerPlan, model: str | None, options: dict[str, Any]) -> None:
    """Examine a server, show what it can do, measure a plan and show the results.

    `options` are the options of the command: those of REACHING, TIMEOUT and output, and dry_run.
    """
    from lab.remote import session
    from lab.remote.examination import connect, reaching_of
    from lab.show import console, text_requests

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    confirm(url, plan.summary, options["yes"])
    out = err if output.as_json else console.console()
    err.print("examining the server ...")
    with connect(url, model, err.print, plan.budget_s, **reaching_of(options)) as server:
        text_requests.print_endpoint(server.endpoint, server.name, server.models, out)
        session.check(plan, server)
        examined: dict[str, Any] = {
            "endpoint": dataclasses.asdict(server.endpoint),
            "model": server.name,
            "models": server.models,
        }
        if options["dry_run"]:
            if output.as_json:
                console.print_json({**examined, **_planned(plan)})
            else:
                out.print(f"\nPlan: {plan.summary}")
            return
        path = server.new_file(output.folder)
        records, problem = collect(
            lambda watch: session.execute(plan, server, path, watch),
            path,
            err,
            None,
            text_requests.finished,
        )
        has_failed = bool(text_requests.failures(records))
        output.finish(records, path, problem, has_failed, **examined)


def _planned(plan: ServerPlan) -> dict[str, object]:
    """A plan, for JSON."""
    from lab.remote.session import n_at_once

    cases = [
        {"n_prompt": case.n_prompt, "n_gen": case.n_gen, "n_at_once": n_at_once(case)}
        for case in plan.cases
    ]
    return {"cases": cases, "repeat": plan.n_repeat}
