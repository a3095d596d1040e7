"""Whether lab record names what broke a cache, predicts what a mend saves, and adds little time.

    python3 -m uv run python -m tests.bench.record named       # 200 planted mutations, 4 minutes
    python3 -m uv run python -m tests.bench.record engine      # 40 planted in the server, 8 minutes
    python3 -m uv run python -m tests.bench.record clean       # 100 clean sessions, 5 minutes
    python3 -m uv run python -m tests.bench.record mended      # 12 sessions, twice each
    python3 -m uv run python -m tests.bench.record latency     # against a direct connection
    python3 -m uv run python -m tests.bench.record engine 100 clean 10     # with sizes of their own

`named`, `clean` and `mended`: a scripted agent of 12 turns against the llama-server of the
xllamacpp wheel. The agent plants the mutations and writes down where: the truth is built from what
it did, not from a comparison. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab.features.recording import breaks, figures, repeat
from lab.features.recording.lines import RecordedCall
from lab.features.recording.proxy import Proxy
from lab.features.recording.recorder import CallRecorder, RecordingSetup
from lab.models import catalog
from lab.remote.access import access
from lab.runner import machine
from tests.support.null_server import Behaviour, NullSettings, null_server
from tests.support.servers import NAME, RealServer, wheel_server

N_TURNS = 12
PLANTED = (*breaks.IN_PROMPT, breaks.OTHER_CONVERSATION, breaks.EVICTED)
"""What `named` plants: what a client does, and what needs no server of its own."""
N_SHIFTED = 400  # tokens of an answer that does not fit into a context of 512
ENGINE = {
    breaks.OTHER_SLOT: (
        "--parallel",
        "2",
        "--slot-prompt-similarity",
        "0.5",
        "--cache-ram",
        "0",
    ),
    breaks.CACHE_FULL: ("--parallel", "1", "--cache-ram", "1"),
    breaks.RESTARTED: ("--parallel", "1", "--cache-ram", "0"),
    breaks.NOT_ASKED: ("--parallel", "1", "--cache-ram", "0"),
    breaks.CONTEXT_SHIFT: (
        "--parallel",
        "1",
        "--cache-ram",
        "0",
        "--context-shift",
        "--ctx-size",
        "512",
    ),
}
"""What the server does to a cache, and the options with which it does."""
N_GEN = 12
CONTEXT = 2048
WORDS = (
    *(
        "anvil",
        "bellows",
        "chisel",
        "drill",
        "emery",
        "file",
        "gauge",
        "hammer",
        "iron",
        "jig",
    ),
    *("knife", "lathe", "mallet", "nail", "oil", "pliers", "quench", "rasp", "saw", "tongs"),
)
MENDED_KINDS = (breaks.CHANGED, breaks.REORDERED, breaks.INSERTED)
LEAST_NAMED = 0.99
MOST_OFF = 0.1
MOST_FIRST_MS = 1.0
MOST_EVENT_MS = 0.2
GAP_MS = 10.0

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Truth:
    """What the agent did before a call: the kind, and for a message its index and character."""

    kind: str
    index: int | None = None
    character: int | None = None


@dataclass
class Agent:
    """An agent with a history that talks to a server and plants mutations."""

    url: str
    draw: random.Random
    messages: Messages = field(default_factory=list)
    truths: dict[int, Truth] = field(default_factory=dict)
    n_calls: int = 0  # that had an answer or a refusal, as the recorder counts

    def text(self, n_lines: int = 3, n_words: int = 7) -> str:
        """Some lines that no other message has."""
        lines = []
        for _ in range(n_lines):
            lines.append(" ".join(self.draw.choices(WORDS, k=n_words)))
        return "\n".join(lines)

    def begin(self) -> None:
        self.messages = [
            {"role": "system", "content": f"System: {self.text(6)}"},
            {"role": "user", "content": f"User: {self.text()}"},
        ]

    def call(self, url: str | None = None, **fields: Any) -> float:
        """Send the messages and append the answer; returns the seconds."""
        began = time.perf_counter()
        status, text = post(url or self.url, self.messages, **fields)
        took = time.perf_counter() - began
        if url is None:
            self.n_calls += 1
        if status == 200:
            self.messages.append({"role": "assistant", "content": text})
        return took

    def next_message(self) -> None:
        self.messages.append({"role": "user", "content": f"User: {self.text()}"})


def post(url: str, messages: Messages, **fields: Any) -> tuple[int, str]:
    """Send a chat as a stream; returns the status and the answer's text."""
    body = {
        "model": NAME,
        "messages": messages,
        "stream": True,
        "max_tokens": N_GEN,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    headers = {"Content-Type": "application/json"}
    line.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    reply = line.getresponse()
    text = ""
    for event in reply.read().split(b"\n\n"):
        if event.startswith(b"data: {"):
            chunk = json.loads(event[6:])
            for choice in chunk.get("choices", []):
                text += choice["delta"].get("content") or ""
    line.close()
    return reply.status, text


def mutate(agent: Agent, kind: str, index: int) -> Truth:
    """Change an earlier message of the agent in a way that first shows at a known character."""
    message = agent.messages[index]
    text = message["content"]
    n_kept = agent.draw.randrange(2, max(3, len(text) // 2))
    new_letter = "#" if text[n_kept : n_kept + 1] != "#" else "@"
    if kind == breaks.CHANGED:
        message["content"] = f"{text[:n_kept]}{new_letter}{text[n_kept + 1 :]}"
        return Truth(kind, index, n_kept)
    if kind == breaks.SHORTENED:
        message["content"] = f"{text[:n_kept]}{new_letter}"
        return Truth(kind, index, n_kept)
    if kind == breaks.INSERTED:
        reminder = {"role": message["role"], "content": f"# Reminder: {agent.text(1)}"}
        agent.messages.insert(index, reminder)
        return Truth(kind, index, 0)
    if kind == breaks.REORDERED:
        first, second, *more = text.split("\n")
        message["content"] = "\n".join([second, first, *more])
        n_same = 0
        while first[n_same] == second[n_same]:
            n_same += 1
        return Truth(kind, index, n_same)
    del agent.messages[index]
    return Truth(kind, index, 0)


def positions(agent: Agent, kind: str) -> list[int]:
    """The messages that a mutation can change: those of the call before, without its answer."""
    candidates = []
    for index, message in enumerate(agent.messages[:-2]):
        lines = message["content"].split("\n")
        can_reorder = len(lines) > 1 and not (
            lines[0].startswith(lines[1]) or lines[1].startswith(lines[0])
        )
        is_long = len(message["content"]) > 40
        if is_long and (can_reorder or kind != breaks.REORDERED):
            candidates.append(index)
    return candidates


def plant(agent: Agent, kind: str, server: RealServer, n_planted: int) -> None:
    """Do something that breaks the cache of the agent's next call, and note what."""
    if kind == breaks.EVICTED:
        stranger = Agent(server.url, agent.draw)
        stranger.begin()
        stranger.call(server.url)  # past the recorder
        agent.truths[agent.n_calls + 1] = Truth(kind)
        return
    if kind == breaks.OTHER_CONVERSATION:
        stranger = Agent(agent.url, agent.draw)
        stranger.begin()
        stranger.call()
        agent.n_calls += 1
        agent.truths[agent.n_calls + 1] = Truth(kind)
        return
    if kind == breaks.CONTEXT_FULL:
        agent.messages.append({"role": "user", "content": agent.text(400)})
        agent.call()  # is refused
        agent.messages.pop()
    candidates = positions(agent, kind)
    index = candidates[n_planted % len(candidates)]
    if kind == breaks.CONTEXT_FULL:
        truth = mutate(agent, breaks.REMOVED, index)
    else:
        truth = mutate(agent, kind, index)
    agent.truths[agent.n_calls + 1] = Truth(kind, truth.index, truth.character)


@contextlib.contextmanager
def recorded(
    url: str, folder: str, log: Path | None = None, keeps_text: bool = False
) -> Iterator[tuple[str, CallRecorder]]:
    """A recorder before a server, in a thread: its address, and what it recorded."""
    recording = RecordingSetup(
        path=Path(folder) / "recording.jsonl",
        machine=machine.describe(),
        access=access(url),
        keeps_text=keeps_text,
        show=lambda call: None,
        log=log,
    )
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stopped = asyncio.Event()
    ports: list[int] = []

    async def run(recorder: CallRecorder) -> None:
        root = access(url).root
        async with Proxy(root, "127.0.0.1", 0, recorder.keep) as proxy:
            ports.append(proxy.port)
            ready.set()
            await stopped.wait()

    with CallRecorder(recording) as recorder:
        thread = threading.Thread(target=lambda: loop.run_until_complete(run(recorder)))
        thread.start()
        ready.wait(10)
        yield f"http://127.0.0.1:{ports[0]}/v1", recorder
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)


@contextlib.contextmanager
def recorded_by_command(url: str, folder: str) -> Iterator[str]:
    """The address of a `lab record` in a process of its own, as users have it."""
    options = ["--url", url, "--port", "0", "--out", folder, "--no-plot", "--json"]
    command = [sys.executable, "-m", "lab", "record", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    reader = threading.Thread(target=process.stderr.read)
    try:
        address = process.stderr.readline().split()[-1]
        reader.start()  # so that the pipe does not fill up
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def real_server(*options: str) -> Any:
    limits = (
        "--ctx-size",
        str(CONTEXT),
        "--parallel",
        "1",
        "--cache-ram",
        "0",
        "--threads",
        "1",
    )
    return wheel_server(catalog.embedded_path(), *limits, *options)


def session(
    server: RealServer,
    kinds: Callable[[int], str | None],
    draw: random.Random,
    n_planted: int = 0,
    is_timed: bool = False,
) -> tuple[list[RecordedCall], Agent]:
    """A session of 12 turns; `kinds` says what to plant before each turn. If it is timed, a call
    waits for what the recorder asks about the one before, and nothing is cached at its begin."""
    with tempfile.TemporaryDirectory() as folder:
        with recorded(server.url, folder, keeps_text=is_timed) as (url, recorder):
            if is_timed:
                plant(Agent(url, draw), breaks.EVICTED, server, 0)
            agent = Agent(url, draw)
            agent.begin()
            for turn in range(1, N_TURNS + 1):
                kind = kinds(turn)
                if kind is not None:
                    plant(agent, kind, server, n_planted + turn)
                agent.call()
                agent.next_message()
                if is_timed:
                    wait_for(recorder, agent.n_calls)
        return recorder.calls, agent


def repeated(server: RealServer, calls: list[RecordedCall]) -> list[RecordedCall]:
    """A session once more without its causes, as `lab record --check` sends it."""
    with tempfile.TemporaryDirectory() as folder:
        with recorded(server.url, folder) as (url, recorder):
            root = url.removesuffix("/v1")
            asyncio.run(repeat.send_again(calls, access(url), root, recorder.calls))
        return recorder.calls


def is_right(call: RecordedCall, truth: Truth | None) -> bool:
    cause = call.cause
    if truth is None or cause is None:
        return truth is None and cause is None
    named = (cause.kind, cause.index, cause.character)
    return named == (truth.kind, truth.index, truth.character)


def named(n_planted: int) -> bool:
    """Plant mutations of all kinds at every position; how many are named exactly?"""
    n_right = 0
    n_all = 0
    n_alarms = 0
    by_kind: Counter[tuple[str, bool]] = Counter()
    with real_server() as server:
        number = 0
        while n_all < n_planted:
            draw = random.Random(number)
            offset = number

            def kind_at(turn: int, offset: int = offset) -> str | None:
                if turn <= 2:
                    return None
                return PLANTED[(turn + offset) % len(PLANTED)]

            calls, agent = session(server, kind_at, draw, number * N_TURNS)
            for call in calls:
                truth = agent.truths.get(call.call)
                right = is_right(call, truth)
                if truth is not None:
                    n_all += 1
                    n_right += right
                    by_kind[truth.kind, right] += 1
                elif not right:
                    n_alarms += 1
                if not right:
                    print(f"session {number}, call {call.call}: {truth} named {call.cause}")
            number += 1
            print(f"{n_right} of {n_all} after {number} sessions", file=sys.stderr, flush=True)
    for kind in PLANTED:
        n_of_kind = by_kind[kind, True] + by_kind[kind, False]
        print(f"{kind:20} {by_kind[kind, True]} of {n_of_kind}")
    print(f"named exactly: {n_right} of {n_all} in {number} sessions; {n_alarms} false alarms")
    return n_right >= LEAST_NAMED * n_all


def engine(n_sessions: int) -> bool:
    """Plant what a server does to its cache; how many are named, and what else is?"""
    n_right = 0
    n_alarms = 0
    for number in range(n_sessions):
        kind = list(ENGINE)[number % len(ENGINE)]
        calls, planted = engine_session(kind, random.Random(number), with_log=number % 2 == 0)
        for call in calls:
            name = call.cause.kind if call.cause else None
            if call.call == planted:
                n_right += name == kind
            else:
                n_alarms += name is not None
            if name != (kind if call.call == planted else None):
                print(f"session {number}, call {call.call}: {kind}, named {call.cause}")
        print(f"{n_right} of {number + 1}", file=sys.stderr, flush=True)
    print(f"named: {n_right} of {n_sessions} of the server's; {n_alarms} false alarms")
    return n_right >= LEAST_NAMED * n_sessions and n_alarms == 0


def engine_session(
    kind: str, draw: random.Random, with_log: bool
) -> tuple[list[RecordedCall], int]:
    """Five calls before whose fourth the server does something; its number as recorded."""
    options = ("--ctx-size", str(CONTEXT), "--threads", "1", *ENGINE[kind])
    # only the log shows what the server's cache memory dropped
    needs_log = with_log or kind == breaks.CACHE_FULL
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        first = stack.enter_context(contextlib.ExitStack())
        server = first.enter_context(wheel_server(catalog.embedded_path(), *options))
        log = Path(folder) / "server.log"
        log.symlink_to(server.log)
        url, recorder = stack.enter_context(
            recorded(server.url, folder, log if needs_log else None)
        )
        agent = Agent(url, draw)
        agent.begin()
        for turn in range(1, 6):
            fields: dict[str, Any] = {}
            if turn == 3 and kind == breaks.CONTEXT_SHIFT:
                fields["max_tokens"] = N_SHIFTED
            if turn == 4 and kind == breaks.CONTEXT_SHIFT:
                agent.messages[-2]["content"] = agent.messages[-2]["content"][:200]
            if turn == 4 and kind == breaks.OTHER_SLOT:
                agent.messages[-1]["content"] = agent.text(24)
            if turn == 4 and kind == breaks.CACHE_FULL:
                plant(agent, breaks.OTHER_CONVERSATION, server, 0)
            if turn == 4 and kind == breaks.NOT_ASKED:
                fields["cache_prompt"] = False
            if turn == 4 and kind == breaks.RESTARTED:
                first.close()
                port = str(urlsplit(server.url).port)
                again = wheel_server(catalog.embedded_path(), *options, "--port", port)
                log.unlink()
                log.symlink_to(stack.enter_context(again).log)
            if turn == 4:
                planted = agent.n_calls + 1
            agent.call(**fields)
            agent.next_message()
            wait_for(recorder, agent.n_calls)
    return recorder.calls, planted


def wait_for(recorder: CallRecorder, n_calls: int) -> None:
    """Wait until calls are recorded, as an agent that works between its calls does."""
    deadline = time.monotonic() + 60
    while len(recorder.calls) < n_calls and time.monotonic() < deadline:
        time.sleep(0.02)


def clean(n_sessions: int) -> bool:
    """Clean sessions: nothing may be named."""
    n_alarms = 0
    n_calls = 0
    with real_server() as server:
        for number in range(n_sessions):
            print(f"clean session {number}", file=sys.stderr, flush=True)
            calls, _ = session(server, lambda turn: None, random.Random(1000 + number))
            n_calls += len(calls)
            for call in calls:
                if call.cause is not None:
                    n_alarms += 1
                    print(f"session {number}, call {call.call}: named {call.cause}")
    print(f"{n_alarms} false alarms in {n_sessions} clean sessions of {n_calls} calls")
    return n_alarms == 0


def mended(n_sessions: int) -> bool:
    """Predict the time of each session without its causes, and measure it."""
    errors = []
    with real_server() as server:
        for number in range(n_sessions):
            kind = MENDED_KINDS[number % len(MENDED_KINDS)]
            every = 2 + number % 2

            def kind_at(turn: int, kind: str = kind, every: int = every) -> str | None:
                return kind if turn > 2 and turn % every == 0 else None

            calls, _ = session(server, kind_at, random.Random(number), is_timed=True)
            session_s = sum(call.ended_ns for call in calls) / 1e9
            saved_s = sum(mend.saved_s or 0.0 for mend in figures.mends(calls))
            again = repeated(server, calls)
            measured_s = sum(call.ended_ns for call in again) / 1e9
            error = (session_s - saved_s) / measured_s - 1
            errors.append(abs(error))
            print(
                f"{kind:16} every {every} turns: took {session_s:.2f} s, predicted mended "
                f"{session_s - saved_s:.2f} s, measured {measured_s:.2f} s ({error:+.1%})."
                f"{repeat.others_of(calls, again)}"
            )
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return statistics.median(errors) <= MOST_OFF


def latency(n_pairs: int) -> bool:
    """The time to the first byte, and how late events are, through the proxy and without it."""
    how = Behaviour(first_ms=GAP_MS, gap_ms=GAP_MS)
    firsts: dict[str, list[float]] = {"direct": [], "through": []}
    events: dict[str, list[float]] = {"direct": [], "through": []}
    with (
        null_server(NullSettings(models={"null": how})) as server,
        tempfile.TemporaryDirectory() as folder,
        recorded_by_command(server.url, folder) as url,
    ):
        lines = {
            "direct": http.client.HTTPConnection(urlsplit(server.url).netloc),
            "through": http.client.HTTPConnection(urlsplit(url).netloc),
        }
        for _ in range(n_pairs):
            for name, line in lines.items():
                sent_ns, arrived_ns = timed_stream(line)
                log = server.sent()["streams"][-1]
                firsts[name].append((arrived_ns[0] - sent_ns) / 1e6)
                late = zip(arrived_ns[3:15], log["sent_ns"][3:15], strict=True)
                events[name].append(statistics.median(b - a for b, a in late) / 1e6)
    first_ms = statistics.median(firsts["through"]) - statistics.median(firsts["direct"])
    event_ms = statistics.median(events["through"]) - statistics.median(events["direct"])
    print(
        f"added to the first byte: {first_ms:.3f} ms; to an event: {event_ms:.3f} ms (medians)"
    )
    return first_ms < MOST_FIRST_MS and event_ms < MOST_EVENT_MS


def timed_stream(line: http.client.HTTPConnection) -> tuple[int, list[int]]:
    """When a stream was asked for, and when each of its events came."""
    messages = [{"role": "user", "content": "word " * 1000}]
    body = json.dumps(
        {"model": "null", "stream": True, "max_tokens": 16, "messages": messages}
    )
    sent_ns = time.perf_counter_ns()
    line.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    reply = line.getresponse()
    arrived_ns: list[int] = []
    data = reply.read1(1 << 16)
    while data:
        arrived_ns += [time.perf_counter_ns()] * data.count(b"\n\n")
        data = reply.read1(1 << 16)
    return sent_ns, arrived_ns


PARTS = {
    "named": (named, 200),
    "engine": (engine, 40),
    "clean": (clean, 100),
    "mended": (mended, 12),
    "latency": (latency, 100),
}
"""The parts, each with its usual size."""


def asked_sizes(words: Sequence[str]) -> dict[str, int]:
    """The parts that were asked for, with their sizes: all without words."""
    sizes: dict[str, int] = {}
    name = ""
    for word in words or list(PARTS):
        if word in PARTS:
            name = word
            sizes[name] = PARTS[name][1]
        elif name and word.isdecimal() and int(word) > 0:
            sizes[name] = int(word)
        else:
            sys.exit(f"{word} is neither a part ({', '.join(PARTS)}) nor its size.")
    return sizes


if __name__ == "__main__":
    has_missed = False
    for part, size in asked_sizes(sys.argv[1:]).items():
        has_missed = not PARTS[part][0](size) or has_missed
    sys.exit(int(has_missed))
