"""The commands that try a lever: batch, prefix, stall, speculate.

The command that tries every claim of the textbooks: claims.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.options import DRY_RUN, ENGINE, MODEL, OUTPUT, PROMPT, SEED, SETTINGS, UNIFIED, with_options
from lab.cli.running import EXIT_FAILED, as_json_rows, carry_out, collect, note, other_sessions, write_files

if TYPE_CHECKING:
    from lab.core.record import Record
    from lab.experiments.claim_session import Session
    from lab.experiments.claim_verdicts import Verdicts
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
    from lab.experiments import cases, prefix_cache

    with cases.folder_in(out) as folder:
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
    from lab.experiments import stall_chunks, stalls

    make = functools.partial(stalls.plan, max_stall=max_stall)
    if max_stall is None:
        carry_out(make, out, **asked)
        return
    limit_s = stall_chunks.parse_duration(max_stall)
    run = functools.partial(stall_chunks.execute, limit_s=limit_s, predict=_predictor(out))
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
    from lab.why import probing, step_prediction

    @functools.cache
    def known() -> tuple[Any, Any]:
        folder = Path(out)
        return probing.kept(folder, note), other_sessions((str(folder / "none"),), [])

    return lambda record: step_prediction.prediction_for(record, *known())


@click.command()
@with_options(
    click.option("--only", metavar="NUMBERS", help="Only these claims, such as 2,9, and what they need."),
    click.option(
        "--quick",
        is_flag=True,
        help="Short prompts and few repeats: at most 4 minutes on two cores with the embedded model.",
    ),
    MODEL,
    PROMPT,
    *ENGINE,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def claims(only: str | None, quick: bool, **asked: Any) -> None:
    """Try what texts about LLM inference claim: is it so on this machine?

    \b
      lab claims --quick                    # all that 4 minutes can test
      lab claims --only 2,9 --report

    Each claim has a criterion, fixed before the measurement: it holds here, does not hold here, cannot be told (too
    noisy), or is not testable here, with the reason. What several claims need is measured once; all of it takes at most
    25 minutes on two cores with the embedded model. Every run is in one file the moment it ends: lab show and lab
    report judge that file again, also where the session was interrupted.
    """
    from lab.experiments import cases, claim_session
    from lab.process.worker import Worker
    from lab.runner.session import new_results_file
    from lab.show import claim_views, console, text_setup

    as_json, no_plot, report = asked.pop("as_json"), asked.pop("no_plot"), asked.pop("report")
    folder, dry_run = Path(asked.pop("out")), asked.pop("dry_run")
    chosen = claim_session.choose(only)
    err = console.console(stderr=True)
    with Worker() as worker, cases.folder_in(folder) as states:
        with console.transfer(err) as transferring:
            asked |= {"watch": transferring, "fetch": not dry_run}
            session = claim_session.plan(worker, chosen, quick, states, folder, **asked)
        for line in text_setup.describe(session.base.machine, session.base.model):
            err.print(line)
        for warning in session.warnings:
            err.print(f"Note: {warning}", style="yellow")
        for line in claim_views.plan_lines(session):
            err.print(line)
        if dry_run:
            _print_plan(session, as_json)
            return
        path = new_results_file(session.base, folder, session.n_runs)
        records, problem = collect(
            lambda watch: claim_session.execute(session, worker, path, watch, err.print), path, err
        )
    base = session.base
    verdicts = claim_session.judge(chosen, records, claim_session.place_of(base), folder, quick)
    _show(verdicts, path, as_json, not no_plot, report)
    if problem:
        raise problem
    if any(record.run.error and record.run.part not in session.problems for record in records):
        sys.exit(EXIT_FAILED)


def _show(verdicts: Verdicts, path: Path, as_json: bool, plots: bool, report: bool) -> None:
    """Prints the verdicts, then draws: drawing may fail."""
    from lab.analysis.comparison import AT_LEAST
    from lab.show import claim_views, console

    out = console.console()
    if not as_json:
        claim_views.print_verdicts(verdicts, out)
    records, files, judged = list(verdicts.records), dict[str, Any](), [(path.stem, verdicts)]
    if records:
        files = write_files(records, path, plots, report, AT_LEAST, None if as_json else out, judged=judged)
    if as_json:
        console.print_json({**files, **as_json_rows(records, judged=judged)})


def _print_plan(session: Session, as_json: bool) -> None:
    """What `--dry-run` shows."""
    from lab.show import claim_views, console

    if not as_json:
        console.console().print(claim_views.plan_table(session))
        return
    n_runs = {name: sum(trial.n_runs for trial in trials) for name, trials in session.trials.items()}
    console.print_json(
        {
            "claims": [claim.number for claim in session.claims],
            "parts": [
                {"part": name, "runs": n_runs.get(name), "expected_s": seconds}
                for name, seconds in session.expected_s.items()
            ],
            "problems": {name: str(problem) for name, problem in session.problems.items()},
        }
    )
