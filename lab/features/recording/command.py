"""The command `lab record`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.app import kinds
from lab.app.help import Command
from lab.app.options import OUTPUT, UnstoredArgument, with_options
from lab.app.output import Output
from lab.core import results, stored_command
from lab.core.lists import plural
from lab.errors import LabError
from lab.features.recording import repeat, sentences
from lab.features.recording.lines import RecordedCall
from lab.features.recording.proxy import Proxy
from lab.features.recording.recorder import CallRecorder, RecordingSetup, without_text
from lab.remote.access import Access, access
from lab.runner import machine

if TYPE_CHECKING:
    from lab.show.console import Terminal

URL = "{url}"
BASE = "{base}"
"""What stands in an agent's command for the address to use, with /v1 and without."""

OF_OPENAI = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
OF_ANTHROPIC = "ANTHROPIC_BASE_URL"
"""Variables by which clients are pointed at a server; Anthropic's add /v1 themselves."""

LOOPBACK = "127.0.0.1"
SWITCH_S = 0.0005  # after which the thread that compares prompts lets streams go on


@dataclass(frozen=True)
class Listening:
    """Where the proxy listens, and the program that it starts."""

    host: str
    port: int
    agent: tuple[str, ...]
    repeated: tuple[RecordedCall, ...] = ()  # a session to send again


OPTIONS = (
    click.option(
        "--url",
        required=True,
        metavar="URL",
        help="The server to pass requests on to: http://127.0.0.1:8080",
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65_535),
        default=8090,
        show_default=True,
        help="Port to listen on; 0 for a free one.",
    ),
    click.option(
        "--host",
        default=LOOPBACK,
        show_default=True,
        help="Address to listen on. Any other one lets other machines use the server.",
    ),
    click.option(
        "--log",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The log that llama-server writes: its slots and cache, call by call.",
    ),
    click.option(
        "--check",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Repeat a recorded session without what its client changed, and compare the times "
        "with the predicted ones.",
    ),
    click.option(
        "--keep-text",
        is_flag=True,
        help="Store the requests' prompts too (for lab turns --replay).",
    ),
)


@click.command(
    "record", cls=Command, first=("url", "port", "host", "log", "keep-text", "check")
)
@click.argument(
    "agent",
    cls=UnstoredArgument,
    nargs=-1,
    metavar="[-- AGENT...]",
    type=click.UNPROCESSED,
)
@with_options(*OPTIONS, *OUTPUT)
def command(
    agent: tuple[str, ...],
    url: str,
    port: int,
    host: str,
    log: Path | None,
    check: Path | None,
    keep_text: bool,
    **options: Any,
) -> None:
    """Record an agent's requests, and name what breaks its server's cache.

    \b
      lab record --url http://127.0.0.1:8080    # prints the address to use
      lab record --url http://127.0.0.1:8080 -- my-agent --base-url {url}
      lab record --url ... --check results/...-record.jsonl    # once more

    Passes every request on unchanged, and its answer back as it comes. Prints a line for each
    request with a prompt: its tokens, those cached, those read again, and what broke the cache: the
    first message and character that differ from the best earlier prompt, or what the server did
    with its slots. At the end the bill, and what each mend would save. Ctrl-C, or the end of the
    AGENT, ends the recording. {url} in its command is the address to use, {base} the same without
    /v1; OPENAI_BASE_URL, OPENAI_API_BASE and ANTHROPIC_BASE_URL are set for it.

    Sends nothing to anywhere but --url. A llama-server is also asked to render and tokenize the
    prompts and to show its slots, after each answer. The results hold lengths, hashes and times; no
    keys, and no text without --keep-text.
    """
    from lab.show import console

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    server = access(url)
    path = results.new_file(output.folder, "record")
    recording = RecordingSetup(
        path=path,
        machine=machine.describe(),
        access=server,
        keeps_text=keep_text,
        show=shown_by(err, bool(agent)),
        command=stored_command.command(),
        log=log,
    )
    repeated = tuple(repeat.read_session(check)) if check else ()
    listening = Listening(host, port, agent, repeated)
    sys.setswitchinterval(SWITCH_S)
    with results.unless_empty(path), CallRecorder(recording) as recorder:
        status = asyncio.run(record(recorder, server, listening, err))
    finish(recorder, output, path, keep_text, repeated)
    if status:
        sys.exit(status)


def shown_by(err: Terminal, has_agent: bool) -> Callable[[RecordedCall], None]:
    """What prints a line for each call: nothing while an agent has the terminal."""

    def show(call: RecordedCall) -> None:
        if not has_agent:
            err.print(live_line(call), markup=False, highlight=False)

    return show


def live_line(call: RecordedCall) -> str:
    """A call in one line: conversation, turn, tokens, times, and what broke the cache."""
    place = f"call {call.call}  conversation {call.conversation}, turn {call.turn}:"
    if call.failure is not None:
        return f"{place} {call.failure}"
    line = f"{place} prompt {in_digits(call.n_prompt)}, cached {in_digits(call.n_cached)}"
    if call.ttft_ns is not None:
        line += f", TTFT {call.ttft_ns / 1e9:.2f} s"
    line += f", in all {call.ended_ns / 1e9:.2f} s"
    if call.cause is not None:
        line += f"; {again(call)}{sentences.label(call.cause)}"
    return line


def again(call: RecordedCall) -> str:
    """How many tokens a call read again, if that is known."""
    if call.n_prompt is None or call.n_cached is None or call.n_new is None:
        return ""
    n_again = max(0, call.n_prompt - call.n_cached - call.n_new)
    return f"{plural(n_again, 'token')} read again: "


def in_digits(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


async def record(
    recorder: CallRecorder, server: Access, listening: Listening, err: Terminal
) -> int | None:
    """Listen until Ctrl-C, or until the agent or the repeated session ends; returns the agent's
    exit status."""
    root = server.root
    proxy_of = Proxy(root, listening.host, listening.port, recorder.keep, server.url)
    async with proxy_of as proxy:
        address = f"http://{proxy.host}:{proxy.port}"
        if listening.repeated:
            await repeat.send_again(listening.repeated, server, address, recorder.calls)
            return None
        err.print(
            f"Recording {root}. Point the client at {address}/v1 (Anthropic's clients: {address})",
            highlight=False,
            soft_wrap=True,
        )
        if listening.agent:
            return await run_agent(listening.agent, address)
        err.print("Ctrl-C ends the recording.")
        await until_interrupted()
    return None


async def until_interrupted() -> None:
    """Wait for SIGINT or SIGTERM."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()


async def run_agent(agent: Sequence[str], address: str) -> int:
    """Run the agent until it ends. Ctrl-C goes to the agent, which shares the terminal."""
    url = f"{address}/v1"
    arguments = [word.replace(URL, url).replace(BASE, address) for word in agent]
    environment = {**os.environ, **dict.fromkeys(OF_OPENAI, url), OF_ANTHROPIC: address}
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    try:
        process = await asyncio.create_subprocess_exec(*arguments, env=environment)
    except OSError as problem:
        raise LabError(
            f"{arguments[0]} cannot be started: {problem.strerror}.",
            "Check its name after --.",
        ) from None
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()


def finish(
    recorder: CallRecorder,
    output: Output,
    path: Path,
    keeps_text: bool,
    repeated: Sequence[RecordedCall] = (),
) -> None:
    """Print the bill. Excerpts of changed texts appear on the terminal, and nowhere else without
    --keep-text."""
    saved = list(recorder.calls)
    if not keeps_text:
        saved = list(map(without_text, recorder.calls))
    if not saved and recorder.problem is None:
        raise LabError(
            "Nothing was recorded: no request with a prompt came.",
            "Point the client at the address that lab record prints.",
        )
    shown = kinds.sections(saved if output.as_json else recorder.calls)
    if repeated and len(saved) == len(repeated):
        shown = [*shown, repeat.compared(repeated, saved)]
    output.finish(saved, path, recorder.problem, shown=shown)
