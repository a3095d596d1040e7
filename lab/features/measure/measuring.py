"""Measuring in process, or through a server: `lab.measure` and `lab.sweep`, and the commands measure, sweep and ab."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lab.app import running, server
from lab.app.help import Command
from lab.app.options import AT_LEAST, DRY_RUN, OUTPUT, SEED, SETTINGS, SHARE, TOKENS, with_options
from lab.app.output import Output
from lab.app.running import collect, introduce
from lab.app.server import ONLY_SERVER, REACHING, TIMEOUT, URL, check_side
from lab.core import shell
from lab.core.record import Record
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.cases import Until
from lab.runner.plan import DEFAULT_GEN, DEFAULT_LENGTHS, N_PILOT, make_plan
from lab.runner.progress import ShowStatus
from lab.runner.session import carry_out, new_results_file


def measure(
    prompt_len: str | Sequence[int] | None = None,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    model: str | None = None,
    *,
    url: str | None = None,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    stream: bool = False,
    **settings: Any,
) -> list[Any]:
    """Measure and return the records, which are also in a new file in `out` (one line a run).

        records = lab.measure("10,1000", gen=100, threads=2)
        records = lab.measure("100,1000", gen=100, url="http://127.0.0.1:8080/v1")

    The default of `prompt_len` is "10,100,1000", with `url` "100,1000". Without `repeat` each length gets three runs,
    quick ones up to six. `watch` is called with a `Status` twice a second (with `stream` it holds the generated text);
    without one, a notebook shows a line. `settings` are the command's options, such as threads, device or flash_attn;
    `until` (0.02: 2 %) repeats until medians are that accurate, at most `max_repeats` times and `max_minutes` long.
    Failed runs are records too (`record.run.status`), with a warning.

    With `url` the lab measures a server with OpenAI's API: `model` is the server's name for the model (None: its only
    one), and `settings` are prompt, seed, api, api_key_env, header (a list of "NAME: VALUE") and timeout.
    """
    check_side([*settings, *["stream"] * stream], url)
    if url is not None:
        from lab.remote import session as server_session

        how = {name: settings.pop(name) for name in ONLY_SERVER if name in settings}
        server_plan = server_session.make_plan(prompt_len, gen, repeat, **settings)
        return server_session.carry_out(url, server_plan, model, out, watch, **how)

    wanted = with_until(**settings)
    lengths = prompt_len or DEFAULT_LENGTHS
    spec = model or catalog.DEFAULT
    return carry_out(
        lambda worker: make_plan(worker, lengths, gen, repeat, spec, **wanted), out, watch, stream
    )


def sweep(
    max_len: int = 8192,
    every: int = 512,
    gen: int = 16,
    repeat: int = 3,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Any,
) -> list[Record]:
    """Measure prefill and decode at many lengths in one pass through the context; returns a record for each pass.

        lab.plot_sweep(lab.sweep(4096, every=256))

    After each `every` prompt tokens the sweep generates `gen` tokens and forgets them. The other arguments are those of
    `measure`.
    """
    wanted = with_until(**settings)
    return carry_out(
        lambda worker: make_plan(worker, [max_len], gen, repeat, model, every=every, **wanted),
        out,
        watch,
    )


def with_until(
    until: float | None = None, max_repeats: int = 30, max_minutes: float | None = None, **rest: Any
) -> dict[str, Any]:
    """Keywords of `measure` as `make_plan` takes them. LabError for limits that are not possible."""
    if until is None and max_minutes is not None:
        raise LabError(
            "--max-minutes has an effect only with --until.", "Add --until 2%, or leave it out."
        )
    if until is None:
        return rest
    if until < 1e-4:
        raise LabError(f"--until {until:.2g} is not possible.", "Give at least 0.01%, such as 2%.")
    if max_repeats < N_PILOT:
        raise LabError(
            f"--max-repeats {max_repeats} is too few to see the spread.",
            f"Allow at least {N_PILOT}.",
        )
    return rest | {"until": Until(until, max_repeats, max_minutes)}


UNTIL = [
    click.option(
        "--until",
        type=SHARE,
        metavar="SHARE",
        help="Repeat until every median is known to within this share (95 % confidence), such as 2%.",
    ),
    click.option(
        "--max-repeats",
        default=30,
        show_default=True,
        help="With --until: maximum number of rounds.",
    ),
    click.option(
        "--max-minutes",
        type=float,
        help="With --until: start no round after this many minutes. With --url: the limit of the session.",
    ),
]


class WithVariants(Command):
    """A command whose arguments may be options in quotes, such as "--threads 2"."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click takes what begins with a dash for an option: a space before it makes it an argument."""
        return super().parse_args(
            ctx, [f" {arg}" if re.match(r"--?[\w-]+\s", arg) else arg for arg in args]
        )


def parse_variant(text: str) -> dict[str, Any]:
    """The settings that a variant of `lab ab` names, such as `--threads 1 --flash-attn off`. LabError if it cannot."""

    @with_options(*SETTINGS)
    def variant(**_: Any) -> None: ...

    command = click.command(cls=Command, add_help_option=False)(variant)
    try:
        context = command.make_context("variant", shell.split(text))
    except (click.ClickException, ValueError) as problem:
        message = (
            problem.format_message() if isinstance(problem, click.ClickException) else str(problem)
        )
        what = f"The variant {text!r} is not understood: {message}"
        raise LabError(what, "Write it as options: --threads 2") from None
    given = ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) in given
    }


@click.command(
    "measure", cls=Command, first=("model", "prompt-len", "gen", "repeat", "report", "url")
)
@click.pass_context
@with_options(
    click.option(
        "--prompt-len",
        "-p",
        default="10,100,1000",
        show_default=True,
        help="Prompt lengths in tokens: 10,1000,8k (k: 1,000), or ranges: 100-500+100 (steps of 100), 512-4096*2 "
        "(doubling).",
    ),
    click.option(
        "--gen",
        "-n",
        type=TOKENS,
        default=64,
        show_default=True,
        help="Tokens to generate in each run.",
    ),
    click.option(
        "--repeat",
        "-r",
        type=int,
        help="Rounds: each loads the model anew, then runs each length.  [default: 3; 6 if that adds little time]",
    ),
    *UNTIL,
    *SETTINGS,
    SEED,
    *OUTPUT,
    click.option("--stream", is_flag=True, help="Print the generated text, token by token."),
    DRY_RUN,
    URL,
    *REACHING,
    TIMEOUT,
)
def measure_command(context: click.Context, url: str | None, **asked: Any) -> None:
    """Time every token of answers to prompts of several lengths.

    \b
      lab measure                           # about half a minute on two cores
      lab measure --prompt-len 10,1k,10k --gen 200 --model llama-3.2-3b

    Each run prefills a prompt and generates --gen tokens. The command makes one new file in --out, and each run
    becomes a line of it as soon as it ends. Exit status: 0 if all runs succeeded, 1 if some failed, 130 after Ctrl-C.

    With --url the lab measures a server instead, one request at a time: by default three requests with 100 prompt
    tokens and three with 1,000. --model is then the server's name for a model (optional if it has only one), and
    options of the engine are rejected. The lab first prints what this server can do.
    """
    given = server.given(context)
    check_side(given, url)
    if url is not None:
        measure_server(url, given, asked)
        return
    running.carry_out(
        make_plan, **with_until(**{name: asked[name] for name in asked if name not in ONLY_SERVER})
    )


def measure_server(url: str, given: Sequence[str], asked: dict[str, Any]) -> None:
    """`lab measure --url`: the defaults of some options are others than those of the engine."""
    from lab.remote.session import make_plan as plan_of_server

    plan = plan_of_server(
        asked["prompt_len"] if "prompt_len" in given else None,
        asked["gen"],
        asked["repeat"],
        asked["prompt"],
        asked["seed"],
        asked["max_minutes"],
    )
    server.carry_out(url, plan, asked["model"] if "model" in given else None, asked)


@click.command("sweep", cls=Command, first=("model", "max-len", "every", "gen", "repeat", "report"))
@with_options(
    *(
        click.option(*names, type=type, default=default, show_default=True, help=help)
        for *names, type, default, help in (
            ("--max-len", TOKENS, 8192, "Prompt tokens at the end of the pass."),
            ("--every", "-e", TOKENS, 512, "Prompt tokens between two measurements of decode."),
            ("--gen", "-n", TOKENS, 16, "Tokens to generate at each measurement."),
            ("--repeat", "-r", int, 3, "Passes through the context."),
        )
    ),
    *UNTIL,
    *SETTINGS,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def sweep_command(max_len: int, **asked: Any) -> None:
    """Measure how both phases slow down as one prompt grows.

    \b
      lab sweep
      lab sweep --max-len 32k --every 2k --model llama-3.2-3b

    After every --every prompt tokens the lab generates --gen tokens, removes them again, and continues with the
    prompt. The prefill time of a length is the sum of the steps up to it, so no prefix is computed twice. The command
    also fits a formula to each curve.
    """
    running.carry_out(make_plan, prompt_len=str(max_len), stream=False, **with_until(**asked))


@click.command(
    cls=WithVariants, first=("prompt-len", "gen", "blocks", "sequences", "at-least", "report")
)
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT VARIANT...")
@with_options(
    click.option(
        "--prompt-len",
        "-p",
        default="256",
        show_default=True,
        help="Prompt lengths, as for measure.",
    ),
    click.option(
        "--gen",
        "-n",
        type=TOKENS,
        default=32,
        show_default=True,
        help="Tokens to generate in each run.",
    ),
    click.option(
        "--sequences",
        help="Sequences to decode together, as in lab batch.  [default: one sequence]",
    ),
    click.option(
        "--blocks", default=10, show_default=True, help="Blocks; each runs every variant twice."
    ),
    AT_LEAST,
    *SETTINGS,
    SEED,
    *OUTPUT,
)
def ab(
    variants: tuple[str, ...], blocks: int, at_least: float, sequences: str | None, **asked: Any
) -> None:
    """Compare settings or models, measured alternately.

    \b
      lab ab "--flash-attn on" "--flash-attn off" --prompt-len 256,2k
      lab ab "-m smollm2-135m" "-m smollm2-135m:Q8_0" --threads 2

    A VARIANT is options in quotes; the first is the base. Options outside quotes apply to all variants.

    In each block every variant gets a fresh engine and runs twice: in random order, then in reverse order. Changes of
    the machine's speed therefore affect all variants equally.
    """
    from lab.runner import batches, trial as side_by_side
    from lab.show import comparison, console, text_comparison, text_doubts

    output = Output.taken_from(asked)
    err = console.console(stderr=True)
    named = [(text.strip(), parse_variant(text)) for text in variants]
    with Worker() as worker, console.transfer(err) as transferring:
        make = (
            make_plan if sequences is None else functools.partial(batches.plan, sequences=sequences)
        )
        plans = side_by_side.plan(worker, named, blocks, make, **asked, watch=transferring)
    introduce(list(plans.values()), err, err)
    path = new_results_file(next(iter(plans.values())), output.folder)
    records, problem = collect(
        lambda watch: side_by_side.execute(plans, blocks, path, watch), path, err
    )
    if problem:
        raise problem
    groups = comparison.groups(records)
    comparisons = comparison.compare_groups(groups, at_least)
    tables = functools.partial(
        text_comparison.print_comparisons,
        groups,
        comparisons,
        at_least,
        warnings=text_doubts.warnings(records),
    )
    document = functools.partial(text_comparison.as_json, groups, comparisons)
    output.finish(records, path, tables=tables, document=document, at_least=at_least)
