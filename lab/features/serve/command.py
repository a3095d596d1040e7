"""The commands for servers with OpenAI's API: server, load, and what measure does with --url."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from typing import Any

import click
from click.core import ParameterSource

from lab.app.help import EXIT_INTERRUPTED, Command
from lab.app.options import OUTPUT, PROMPT, SEED, as_json_option, with_options
from lab.core.lists import plural
from lab.errors import LabError
from lab.app.running import Output, any_good, collect, note

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
SERVED_MODEL = click.option(
    "--model", "-m", help="The server's name for the model.  [default: its only one]"
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


@click.command(cls=Command, first=("model", "api", "api-key-env", "timeout", "json"))
@click.argument("url")
@with_options(SERVED_MODEL, *REACHING, TIMEOUT)
@as_json_option()
def server(url: str, model: str | None, yes: bool, as_json: bool, **how: Any) -> None:
    """Show what a server can do: count tokens, reuse prompts, serve many.

    \b
      lab server http://127.0.0.1:8080/v1
      lab server https://HOST/v1 --model NAME --api-key-env MY_KEY

    Sends at most ten requests with a few tokens each.
    """
    from lab.remote.servers import connect
    from lab.remote.through_server import print_endpoint
    from lab.show import console

    confirm(url, "some requests", yes)
    say = console.console(stderr=True).print
    with connect(url, model, say, **how) as found:
        if as_json:
            endpoint = dataclasses.asdict(found.endpoint)
            console.print_json({"endpoint": endpoint, "model": found.model, "models": found.models})
        else:
            print_endpoint(found.endpoint, found.model, found.models, console.console())


@click.command(cls=Command, first=("url", "concurrency", "rate", "prompt-len", "gen", "slo"))
@with_options(
    click.option("--url", required=True, metavar="URL", help=A_SERVER),
    click.option(
        "--concurrency",
        "-c",
        help="Numbers of users, each with one request at a time.  [default: 1,2,4,8]",
    ),
    click.option(
        "--rate",
        metavar="LIST",
        help="Instead of users: requests per second, at random times: 0.5,1.",
    ),
    click.option(
        "--prompt-len",
        "-p",
        default="256",
        show_default=True,
        help="Tokens: 256, 8k, 100-1000, normal:500,100 or lognormal:300,0.8 (median, sigma of the logarithm).",
    ),
    click.option(
        "--gen",
        "-n",
        default="64",
        show_default=True,
        help="Tokens of each answer, in the same forms.",
    ),
    click.option(
        "--warmup", default=5.0, show_default=True, help="Seconds before the steady window."
    ),
    click.option(
        "--duration", default=15.0, show_default=True, help="Seconds of the steady window."
    ),
    click.option("--rounds", default=3, show_default=True, help="How often to measure each load."),
    click.option(
        "--slo",
        metavar="LIMITS",
        help="Limits that a good answer meets: ttft=1s,tpot=50ms,e2e=10s.",
    ),
    click.option(
        "--max-requests",
        default=2000,
        show_default=True,
        help="Maximum number of requests. Small ones that examine the server and size prompts do not count.",
    ),
    click.option(
        "--timeout",
        default=300.0,
        show_default=True,
        help="Seconds after which a request times out.",
    ),
    PROMPT,
    SERVED_MODEL,
    *REACHING,
    SEED,
    *OUTPUT,
    click.option(
        "--dry-run", is_flag=True, help="Show the loads and how long they take; send nothing."
    ),
)
def load(url: str, model: str | None, yes: bool, prompt: str, dry_run: bool, **asked: Any) -> None:
    """Put load on a server, and measure latencies and rates.

    \b
      lab load --url http://127.0.0.1:8080/v1       # 1, 2, 4, 8 users; 4 minutes
      lab load --url http://127.0.0.1:8080/v1 --rate 0.5,1,2 --slo ttft=1s

    Each round measures every load once, in random order: a warm-up, then the steady window. Users begin at random times
    of the warm-up, and the last requests of the window end under the same load. Each request is a line of a new file in
    --out. Failed requests count as results: the exit status is 0 if any request succeeded, 1 if none did or the server
    is gone, and 130 after Ctrl-C, which keeps finished requests and shows complete rounds.
    """
    from lab.core import results
    from lab.features.serve import load_figures, loads
    from lab.remote.servers import connect, prompt_text, reaching_of
    from lab.show import console

    err = console.console(stderr=True)
    output = Output.taken_from(asked)
    plan = loads.make_plan(**asked)
    text = prompt_text(prompt)
    if dry_run:
        in_order = sorted(plan.windows, key=lambda one: one.concurrency or one.rate or 0)
        known = {
            "loads": list(dict.fromkeys(one.label for one in in_order)),
            "lengths": plan.windows[0].lengths,
            "windows": len(plan.windows),
            "warmup_s": plan.windows[0].warmup_s,
            "duration_s": plan.windows[0].duration_s,
            "max_requests": plan.max_requests,
            "seconds": plan.seconds,
        }
        lines = (
            f"{name:13} {'; '.join(one) if isinstance(one, list) else one}"
            for name, one in known.items()
        )
        return (
            console.print_json(known)
            if output.as_json
            else console.console().print("\n".join(lines))
        )
    confirm(
        url, f"at most {plural(plan.max_requests, 'request')}, and small ones to examine it", yes
    )
    problem: LabError | None = None
    is_interrupted = False
    with connect(url, model, err.print, **reaching_of(asked)) as server:
        path = server.new_file(output.folder)
        try:
            with (
                console.progress(err, None, str) as (watch, _),
                closing(loads.execute(plan, server, text, path, watch, note)) as running,
            ):
                for _ in running:
                    pass
        except LabError as error:
            problem = error
        except KeyboardInterrupt:
            is_interrupted = True
    kept = results.read([path]).requests if path.exists() else ()
    if is_interrupted:
        where = (
            f". {plural(len(kept), 'request')} in {path}"
            if kept
            else " before a request was finished."
        )
        err.print(f"\nInterrupted{where}")
    made = load_figures.sections(kept)
    failed = not is_interrupted and not any_good(kept)
    output.finish(
        kept, path, problem, failed, made, document=lambda: made[0].document()["loads"][0]
    )
    if is_interrupted:
        sys.exit(EXIT_INTERRUPTED)


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
