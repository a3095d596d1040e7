"""Measure prompts of several lengths, in process or through a server: `lab.measure` and the
command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, overload

import click

from lab.app import running, server
from lab.app.collection import Results
from lab.app.command_words import words_of_values
from lab.app.help import Command
from lab.app.options import (
    DRY_RUN,
    OUTPUT,
    SAMPLING,
    SEED,
    SETTINGS,
    UNTIL,
    Unstored,
    gen_option,
    lengths_option,
    with_options,
    with_until,
)
from lab.app.server import REACHING, TIMEOUT, URL, check_side
from lab.core.arguments import Numbers, Reaching, Repeating, StrPath
from lab.core.keywords import EngineSettings, SamplerSettings
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.core.stored_command import storing
from lab.models import catalog
from lab.runner.plan import DEFAULT_GEN, DEFAULT_LENGTHS, make_plan
from lab.runner.progress import Watch
from lab.runner.session import carry_out


class MeasureSettings(EngineSettings, SamplerSettings, Repeating, Reaching, total=False):
    every: int | None  # prompt tokens between two measurements of a sweep


@overload
def measure(
    prompt_len: Numbers | None = ...,
    gen: int = ...,
    repeat: int | None = ...,
    model: str | None = ...,
    *,
    url: None = ...,
    out: StrPath = ...,
    watch: Watch = ...,
    stream: bool = ...,
    **settings: Unpack[MeasureSettings],
) -> Results[Record]: ...


@overload
def measure(
    prompt_len: Numbers | None = ...,
    gen: int = ...,
    repeat: int | None = ...,
    model: str | None = ...,
    *,
    url: str,
    out: StrPath = ...,
    watch: Watch = ...,
    stream: bool = ...,
    **settings: Unpack[MeasureSettings],
) -> Results[RequestRecord]: ...


def measure(
    prompt_len: Numbers | None = None,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    model: str | None = None,
    *,
    url: str | None = None,
    out: StrPath = "results",
    watch: Watch = None,
    stream: bool = False,
    **settings: Unpack[MeasureSettings],
) -> Results[Record] | Results[RequestRecord]:
    """Measure and return the records, which are also in a new file in `out` (one line a run).

        records = lab.measure("10,1000", gen=100, threads=2)
        records = lab.measure("100,1000", gen=100, url="http://127.0.0.1:8080/v1")

    The default of `prompt_len` is "10,100,1000", with `url` "100,1000". Without `repeat` each
    length gets three runs, quick ones up to six. Progress is a line in a notebook or on a
    terminal, elsewhere lines of the log `lab`; `watch=False` is silent, and a function is called
    with a `Status` twice a second (with `stream` it holds the generated text). `settings` are the
    command's options, such as threads, device or flash_attn; `until` ("2%") repeats until medians
    are that accurate, at most `max_repeats` times and `budget` ("10min") long. `every` makes a
    sweep, as `lab.sweep`. Failed runs are records too (`record.run.status`), with a warning.

    With `url` the lab measures a server with OpenAI's API: `model` is the server's name for the
    model (None: its only one), and `settings` are prompt, seed, api, api_key_env, header (a list of
    "NAME: VALUE") and timeout.
    """
    check_side([*settings, "stream"] if stream else settings, url)
    options = {
        "prompt_len": prompt_len,
        "gen": gen,
        "repeat": repeat,
        "model": model,
        "url": url,
    }
    with storing(words_of_values(command, {**options, **settings})):
        if url is not None:
            from lab.remote import session as server_session

            of_plan, reaching = server.split(settings)
            plan = server_session.make_plan(prompt_len, gen, repeat, **of_plan)
            return Results(server_session.carry_out(url, plan, model, out, watch, **reaching))
        plan_settings = with_until(**settings)
        lengths = DEFAULT_LENGTHS if prompt_len is None else prompt_len
        spec = catalog.DEFAULT if model is None else model
        return Results(
            carry_out(
                lambda worker: make_plan(worker, lengths, gen, repeat, spec, **plan_settings),
                out,
                watch,
                stream,
            )
        )


@click.command(
    "measure", cls=Command, first=("model", "prompt-len", "gen", "repeat", "report", "url")
)
@click.pass_context
@with_options(
    lengths_option(
        "10,100,1000",
        "Prompt lengths in tokens: 10,1000,8k (k: 1,000), or ranges: 100-500+100 (steps of "
        "100), 512-4096*2 (doubling).",
    ),
    gen_option(64, "Tokens to generate in each run."),
    click.option(
        "--repeat",
        "-r",
        type=int,
        help="Rounds: each loads the model anew, then runs each length.  [default: 3; up to 6 "
        "for quick lengths, 2 for slow ones that agree]",
    ),
    *UNTIL,
    *SETTINGS,
    *SAMPLING,
    SEED,
    *OUTPUT,
    click.option(
        "--stream",
        cls=Unstored,
        is_flag=True,
        help="Print the generated text, token by token.",
    ),
    DRY_RUN,
    URL,
    *REACHING,
    TIMEOUT,
)
def command(context: click.Context, /, url: str | None, **options: Any) -> None:
    """Time every token of answers to prompts of several lengths.

    \b
      lab measure                           # about half a minute on two cores
      lab measure --prompt-len 10,1k,10k --gen 200 --model llama-3.2-3b

    Each run prefills a prompt and generates --gen tokens. The command makes one new file in --out,
    and each run becomes a line of it as soon as it ends. Exit status: 0 if all runs succeeded, 1 if
    some failed, 130 after Ctrl-C.

    With --url the lab measures a server instead, one request at a time: by default three requests
    with 100 prompt tokens and three with 1,000. --model is then the server's name for a model
    (optional if it has only one), and options of the engine are rejected. The lab first prints what
    this server can do.
    """
    given_options = server.given(context)
    check_side(given_options, url)
    if url is not None:
        _measure_server(url, given_options, options)
        return
    running.carry_out(make_plan, **with_until(**server.of_engine(options)))


def _measure_server(url: str, given_options: Sequence[str], options: dict[str, Any]) -> None:
    """The defaults of prompt lengths and of the model differ from those of the engine."""
    from lab.remote.session import make_plan as plan_of_server

    plan = plan_of_server(
        options["prompt_len"] if "prompt_len" in given_options else None,
        options["gen"],
        options["repeat"],
        options["prompt"],
        options["seed"],
        options["budget"],
    )
    model = options["model"] if "model" in given_options else None
    server.carry_out(url, plan, model, options)
