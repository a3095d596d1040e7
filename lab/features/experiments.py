"""All experiments, in the order in which they are shown, and their commands."""

from __future__ import annotations

from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, ENGINE, MODEL, OUTPUT, PROMPT, SEED, TOKENS, unified, with_options
from lab.features import batch as batching
from lab.features import prefix as prefix_cache
from lab.features import stall as stalls
from lab.features import turns as conversations
from lab.features.experiment import Experiment, planning
from lab.features.running import carry_out
from lab.features.speculate import speculation

EXPERIMENTS = (
    batching.EXPERIMENT,
    prefix_cache.EXPERIMENT,
    conversations.EXPERIMENT,
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
        is_flag, is_tokens = default is False, option.name in ("gen", "suffix_len")
        own.append(
            click.option(
                *names,
                type=TOKENS if is_tokens and option.type is None else option.type,
                default=default,
                is_flag=is_flag,
                show_default=default is not None and not is_flag,
                metavar=option.metavar,
                help=option.help,
            )
        )
    names = [option.name for option in experiment.options]
    prompt = [] if "prompt" in names else [PROMPT]
    kv_unified = [unified(default)] if (default := experiment.lever.kv_unified) else []

    @with_options(*own, MODEL, *prompt, *ENGINE, *kv_unified, SEED, *OUTPUT, DRY_RUN)
    def measure(out: str, **asked: Any) -> None:
        with planning(experiment.plan, out, experiment.saves_states) as make:
            carry_out(make, out, **asked)

    first = ("model", *(option.flag or option.name.replace("_", "-") for option in experiment.options))[:6]
    return click.command(experiment.name, cls=Command, first=first, help=experiment.about)(measure)


COMMANDS = tuple(map(_command, EXPERIMENTS))
