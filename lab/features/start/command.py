"""The command `lab start`, and its kind of results."""

from __future__ import annotations

from typing import Any

import click

from lab.app.help import Command
from lab.app.options import (
    MODEL,
    OUTPUT,
    SEED,
    prompt_len_option,
    setting_option,
    with_options,
)
from lab.app.output import Output
from lab.app.running import collect, introduce
from lab.core.asked_settings import table
from lab.features.start import limited, measuring, memory_section
from lab.features.start.lines import StartLine
from lab.features.start.section import sections
from lab.roofline.paging import MemoryLine
from lab.runner.session import new_results_file
from lab.show.section import Kind
from lab.show.wording import seconds

KINDS = (
    Kind("start", lambda line: isinstance(line, StartLine), lambda lines, _: sections(lines)),
    Kind(
        "memory",
        lambda line: isinstance(line, MemoryLine),
        lambda lines, _: memory_section.sections(lines),
    ),
)

PROMPT_LEN = prompt_len_option(128, "Tokens of the prompt (random ones).")
MMAP = click.option(
    "--mmap",
    default="on,off",
    show_default=True,
    help="With the model file mapped into memory (on), read into memory (off), or both.",
)
REPEAT = click.option(
    "--repeat", "-r", default=5, show_default=True, help="Starts of each kind."
)
MEMORY = click.option(
    "--memory",
    metavar="LIMITS",
    help="Decode with limited memory instead: shares of the file or sizes, such as 60%,80%,1GB.",
)
SETTINGS = [
    setting_option(name)
    for name, setting in table().items()
    if setting.changes_start and name != "mmap"
]


@click.command("start", cls=Command, first=("model", "mmap", "prompt-len", "repeat", "memory"))
@with_options(MODEL, MMAP, PROMPT_LEN, REPEAT, MEMORY, *SETTINGS, SEED, *OUTPUT)
def command(
    mmap: str, model: str, prompt_len: int, repeat: int, memory: str | None, **options: Any
) -> None:
    """Show what it takes until the first token can come, from the disk and from memory.

    \b
      lab start                             # from the disk and the page cache
      lab start -m llama-3.2-3b --mmap on
      lab start -m llama-3.2-1b --memory 60%,80%,1GB

    Starts a fresh engine each time and stamps the stages: start the process, load the weights, make
    the context, decode one token, prefill the prompt (up to the first token), and prefill it again.
    Before a cold start the file's pages are dropped from the system's page cache, and the lab looks
    whether they are gone; if they are not, it says nothing about cold starts. Before a warm start
    the file is read.

    Beside each cold start the whole file is read in order, which is the best that the disk can do.
    The wait for the disk is the difference between the cold and the warm start of a round. Rounds
    have every kind of start once, in random order. Python and the libraries are in memory already.

    With --memory it decodes some tokens on the CPU with mmap, under each limit of the memory of the
    whole process and without a limit. It shows tokens per second against memory, and what comes
    from the disk. Linux only: as root with control groups, or in a session of systemd.
    """
    from lab.show import console

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    if memory is not None:
        measure_limited(model, memory, repeat, mmap, output, options)
        return
    mapped = measuring.mmap_values(mmap)
    with console.transfer(err) as show_transfer:
        plan = measuring.make_start_plan(model, prompt_len, repeat, show_transfer, options)
    introduce([plan], err, err)
    path = new_results_file(plan, output.folder)
    lines, problem = collect(
        lambda watch: measuring.execute(plan, mapped, path, watch),
        path,
        err,
        describe=finished,
    )
    output.finish(lines, path, problem)


def measure_limited(
    model: str, memory: str, repeat: int, mmap: str, output: Output, options: dict[str, Any]
) -> None:
    """Decode with limited memory, show it, and save it."""
    from lab.show import console

    err = console.console(stderr=True)
    with console.transfer(err) as show_transfer:
        starts = limited.make_limited_starts(
            model, memory, repeat, mmap, show_transfer, options
        )
    introduce([starts.plan], err, err)
    path = new_results_file(starts.plan, output.folder)
    lines, problem = collect(
        lambda watch: limited.execute(starts, path, watch),
        path,
        err,
        describe=limited_finished,
    )
    output.finish(lines, path, problem)


def limited_finished(line: MemoryLine) -> str:
    """A progress line for a start with limited memory."""
    if line.limit_bytes is None:
        return f"no limit: {seconds(line.token_s)} for each token"
    return f"{line.limit_bytes / 1e6:,.0f} MB: {seconds(line.token_s)} for each token"


def finished(line: StartLine) -> str:
    """A progress line for a start."""
    mapping = "without mmap" if line.settings.mmap is False else "with mmap"
    return f"{line.cache} start {mapping}: first token after {seconds(line.first_token_s)}"
