"""The commands that try a lever: batch, prefix, stall, speculate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from lab.cli.files import note, other_sessions
from lab.cli.options import DRY_RUN, ENGINE, MODEL, OUTPUT, SEED, SETTINGS, UNIFIED, with_options
from lab.cli.running import carry_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.core.record import Record
    from lab.why.step_prediction import StepPrediction

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

    from lab.experiments.batching import plan

    carry_out(plan, **asked)


@click.command()
@with_options(
    click.option(
        "--prefix-len", "-p", default="256,1024,4096", show_default=True, help="Tokens of the prefix, in a list."
    ),
    click.option("--suffix-len", "-s", default=64, show_default=True, help="Tokens of the prompt after the prefix."),
    REPEAT,
    *UNIFIED,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def prefix(out: str, **asked: Any) -> None:
    """Time the first token when the beginning of a prompt is known already.

    \b
      lab prefix --prefix-len 256,1024,4096 --suffix-len 64

    With nothing cached, with the prefix copied from another sequence, and after restoring a saved state from RAM and
    from disk (out of the system's file cache, where it can be dropped). Says whether the logits are equal bit by bit,
    what the prefill law promises, and from which length restoring pays, over networks as well (by arithmetic). States
    are saved in a hidden folder in --out, and deleted.
    """
    from lab.experiments import prefix_cache, saved_states

    with saved_states.folder_in(out) as folder:
        carry_out(functools.partial(prefix_cache.plan, folder=folder), out, **asked)


@click.command()
@with_options(
    click.option("--prompt-len", "-p", default="4096", show_default=True, help="Prompt tokens of the newcomer."),
    click.option(
        "--chunk",
        "-c",
        help="Tokens of the prompt in a step, in a list.  [default: those of 64,256,1024 that are no longer than the "
        "prompt; none with --max-stall]",
    ),
    click.option("--streams", "-s", default="1,4", show_default=True, help="Sequences that decode, in a list."),
    click.option("--max-stall", metavar="TIME", help="Search the largest chunk that keeps every gap within, as 100ms."),
    REPEAT,
    *UNIFIED,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def stall(out: str, max_stall: str | None, **asked: Any) -> None:
    """Prefill a long prompt in chunks while other sequences decode: how long do their answers stop?

    \b
      lab stall --prompt-len 4096 --chunk 64,256,1024 --streams 1,4
      lab stall --prompt-len 4096 --streams 4 --max-stall 100ms

    Every chunk rides in a step with one token of each stream; the last row is the prompt prefilled all at once, while
    the streams wait. Shows how many gaps were stalls (over twice the usual), the longest, the newcomer's time to first
    token, and what it costs in throughput, all with what the ceilings predict.
    """
    from lab.experiments import stall_search, stalls

    make = functools.partial(stalls.plan, max_stall=max_stall)
    if max_stall is None:
        carry_out(make, out, **asked)
        return
    limit_s = stall_search.parse_duration(max_stall)
    run = functools.partial(stall_search.execute, limit_s=limit_s, predict=_predictor(out))
    carry_out(make, out, run=run, **asked)


@click.command()
@with_options(
    click.option(
        "--draft",
        "-d",
        metavar="lookup|SPEC",
        help="Who guesses: lookup (what followed the same words before), or a model.  [default: lookup]",
    ),
    click.option("--draft-len", "-l", default="1,2,4,8", show_default=True, help="Guesses at a time, as 1,2,4 or 1-8."),
    click.option("--prompt-len", "-p", default="256", show_default=True, help="Prompt tokens."),
    click.option("--gen", "-n", default=128, show_default=True, help="Tokens that are generated."),
    click.option("--repeat", "-r", type=int, help="Blocks, each with a fresh engine and other prompts.  [default: 6]"),
    MODEL,
    click.option(
        "--prompt", metavar="TEXT", help="Kinds of text, or a text file.  [default: code,table,story,dialogue]"
    ),
    *ENGINE,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def speculate(**asked: Any) -> None:
    """Guess tokens ahead and verify them at once: does it pay, and how many?

    \b
      lab speculate --draft lookup --draft-len 1-8
      lab speculate --draft smollm2-135m:Q4_0 --prompt code,story

    Generates with guesses and without, in blocks. Shows for every kind of text how many guesses are right, what
    guessing and verifying cost, the speed-up over plain decoding with its interval, and what was predicted from the
    times of single steps; where it does not pay, why. The tokens are those of plain decoding, but for near-ties, which
    are reported. Of a model with random weights only the steps are timed.
    """
    from lab.experiments.speculation import plan

    carry_out(plan, **asked)


def _predictor(out: str) -> Callable[[Record], StepPrediction | None]:
    """Predicts for the setup of a record, from the ceilings and runs that lie in `out`."""
    from pathlib import Path

    from lab.why import probing, step_prediction

    @functools.cache
    def known() -> tuple[Any, Any]:
        folder = Path(out)
        return probing.kept(folder, note), other_sessions((str(folder / "none"),), [])

    return lambda record: step_prediction.prediction_for(record, *known())
