"""The commands that try a lever: batch, prefix, stall."""

from __future__ import annotations

from typing import Any

import click

from lab.cli.options import DRY_RUN, OUTPUT, SEED, SETTINGS, with_options
from lab.cli.running import carry_out

REPEAT = click.option(
    "--repeat", "-r", type=int, help="Runs of each case, each in a fresh engine.  [default: 3; 6 of cheap cases]"
)


@click.command()
@with_options(
    click.option("--sequences", "-s", default="1,2,4,8,16", show_default=True, help="How many at once, in a list."),
    click.option("--prompt-len", "-p", default="256", show_default=True, help="Prompt tokens of each sequence."),
    click.option("--gen", "-n", default=32, show_default=True, help="Tokens that each sequence generates."),
    click.option("--shared-prompt", is_flag=True, help="One prompt for all but its last 16 tokens, prefilled once."),
    REPEAT,
    *SETTINGS,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def batch(**asked: Any) -> None:
    """Decode several sequences together: what each costs, and what all gain.

    \b
      lab batch --sequences 1,4,16 --prompt-len 256
      lab batch --sequences 1,8 --kv-unified on --shared-prompt

    A step of B sequences reads the weights once for B tokens. Shows for each B the time of a step, tokens per
    second in all and per user, and what the ceilings predict; and from how many on arithmetic is the limit.
    """

    def make(worker: Any, **options: Any) -> Any:
        from lab.experiments.batching import plan

        return plan(worker, **options)

    carry_out(make, **asked)
