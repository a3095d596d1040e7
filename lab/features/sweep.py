"""Measure both phases at many lengths in one pass through the context: `lab.sweep` and the
command."""

from __future__ import annotations

from typing import Any, Unpack

import click

from lab.app import running
from lab.app.collection import Results
from lab.app.command_words import words_of_values
from lab.app.help import Command
from lab.app.options import (
    DRY_RUN,
    OUTPUT,
    SEED,
    SETTINGS,
    TOKENS,
    UNTIL,
    gen_option,
    with_options,
    with_until,
)
from lab.core.arguments import Repeating, StrPath
from lab.core.keywords import EngineSettings
from lab.core.record import Record
from lab.core.stored_command import storing
from lab.models import catalog
from lab.runner.plan import DEFAULT_REPEAT, make_plan
from lab.runner.progress import Watch
from lab.runner.session import carry_out


class SweepSettings(EngineSettings, Repeating, total=False):
    pass


def sweep(
    max_len: int = 8192,
    every: int = 512,
    gen: int = 16,
    repeat: int = DEFAULT_REPEAT,
    model: str = catalog.DEFAULT,
    *,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[SweepSettings],
) -> Results[Record]:
    """Measure prefill and decode at many lengths; returns a record for each pass.

        lab.plot_sweep(lab.sweep(4096, every=256))

    After each `every` prompt tokens the sweep generates `gen` tokens and forgets them. The other
    arguments are those of `measure`.
    """
    options = {
        "max_len": max_len,
        "every": every,
        "gen": gen,
        "repeat": repeat,
        "model": model,
    }
    plan_settings = with_until(**settings)
    with storing(words_of_values(command, {**options, **settings})):
        return Results(
            carry_out(
                lambda worker: make_plan(
                    worker, [max_len], gen, repeat, model, every=every, **plan_settings
                ),
                out,
                watch,
            )
        )


@click.command(
    "sweep", cls=Command, first=("model", "max-len", "every", "gen", "repeat", "report")
)
@with_options(
    click.option(
        "--max-len",
        type=TOKENS,
        default=8192,
        show_default=True,
        help="Prompt tokens at the end of the pass.",
    ),
    click.option(
        "--every",
        "-e",
        type=TOKENS,
        default=512,
        show_default=True,
        help="Prompt tokens between two measurements of decode.",
    ),
    gen_option(16, "Tokens to generate at each measurement."),
    click.option(
        "--repeat",
        "-r",
        default=DEFAULT_REPEAT,
        show_default=True,
        help="Passes through the context.",
    ),
    *UNTIL,
    *SETTINGS,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def command(max_len: int, **options: Any) -> None:
    """Measure how both phases slow down as one prompt grows.

    \b
      lab sweep
      lab sweep --max-len 32k --every 2k --model llama-3.2-3b

    After every --every prompt tokens the lab generates --gen tokens, removes them again, and
    continues with the prompt. The prefill time of a length is the sum of the steps up to it, so no
    prefix is computed twice. The command also fits a formula to each curve.
    """
    running.carry_out(
        make_plan, prompt_len=str(max_len), stream=False, **with_until(**options)
    )
