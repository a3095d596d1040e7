"""All experiments, in the order in which they are shown, and their commands."""

from __future__ import annotations

from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, ENGINE, MODEL, OUTPUT, PROMPT, SEED, TOKENS, unified, with_options
from lab.features import batch as batching
from lab.features import stall as stalls
from lab.features.experiment import Experiment, planning
from lab.features.running import Output, carry_out, collect
from lab.features.serve.command import REACHING, TIMEOUT, URL, confirm, given
from lab.features.speculate import speculation
from lab.features.turns import conversation

EXPERIMENTS = (
    batching.EXPERIMENT,
    conversation.EXPERIMENT,
    stalls.EXPERIMENT,
    speculation.EXPERIMENT,
)


def _command(experiment: Experiment) -> click.Command:
    """The command of an experiment: its own options, then those of the engine."""
    own: list[Any] = []
    for option in experiment.options:
        default = experiment.default(option)
        flag = option.flag or option.name.replace("_", "-")
        names = [option.name, f"--{flag}", *([f"-{option.short}"] if option.short else [])]
        is_flag, is_tokens = default is False, option.name in ("gen",)
        own.append(
            click.option(
                *names,
                type=TOKENS if is_tokens and option.type is None else option.type,
                default=default,
                is_flag=is_flag,
                show_default=default not in (None, "") and not is_flag,
                metavar=option.metavar,
                help=option.help,
            )
        )
    names = [option.name for option in experiment.options]
    prompt = [] if "prompt" in names else [PROMPT]
    kv_unified = [unified(default)] if (default := experiment.lever.kv_unified) else []

    reaching = [URL, *REACHING, TIMEOUT] if experiment.is_served else []

    @click.pass_context
    @with_options(*own, MODEL, *prompt, *ENGINE, *kv_unified, SEED, *OUTPUT, DRY_RUN, *reaching)
    def measure(context: click.Context, out: str, url: str | None = None, **asked: Any) -> None:
        if url is not None:
            return converse(context, url, {"out": out, **asked})
        if experiment.is_served:
            from lab.features.measure.measuring import ONLY_SERVER, check_side

            check_side(given(context), url)
            asked = {name: value for name, value in asked.items() if name not in ONLY_SERVER}
        with planning(experiment.plan, out, experiment.saves_states) as make:
            carry_out(make, out, **asked)

    first = ("model", *(option.flag or option.name.replace("_", "-") for option in experiment.options))[:6]
    return click.command(experiment.name, cls=Command, first=first, help=experiment.about)(measure)


def converse(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    """`lab turns` through a server."""
    from lab.features.measure.measuring import check_side
    from lab.features.serve import text_requests
    from lab.features.serve.servers import connect, prompt_text, reaching_of
    from lab.features.turns import conversation, served
    from lab.show import console

    options = given(context)
    check_side(options, url)
    lever = conversation.lever_of(*(asked[name] for name in ("system", "turn", "turns", "breaks", "seed")))
    confirm(url, f"{len(lever.messages)} requests", asked["yes"])
    output, err = Output.taken_from(asked), console.console(stderr=True)
    err.print("examining the server ...")
    with connect(url, asked["model"] if "model" in options else None, err.print, **reaching_of(asked)) as server:
        if asked["dry_run"]:
            n_most = lever.system + sum(lever.messages) + sum(lever.answers)
            err.print(f"{len(lever.messages)} turns, up to about {n_most:,} tokens in the last")
            return
        path, text = server.new_file(output.folder), prompt_text(asked["prompt"])
        records, problem = collect(
            lambda watch: served.execute(lever, server, text, path, watch), path, err, None, text_requests.finished
        )
        output.end(records, path, problem, any(one.request.status != "ok" for one in records))


COMMANDS = tuple(map(_command, EXPERIMENTS))
