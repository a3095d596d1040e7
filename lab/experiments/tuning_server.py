"""`lab tune --serve`: the fastest options of a server under a load, with a proof.

The lab starts the server from a command template, puts a closed loop of users on it, and ends it: once for each choice
in each block. The search of lab/analysis/tuning.py says which choices the next block measures. At last the winner and
the default alternate, in blocks that chose nothing. Their number is fixed before they begin: blocks added until a gain
shows would find gains in noise.

A first load on the default says how long an answer takes, and from that how long a window has to be.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Unpack

from lab.analysis import tuning_loads
from lab.analysis.tuning import (
    CONFIRM,
    FEWEST_CONFIRMED,
    GOODPUT,
    REQUEST,
    SEARCH,
    THROUGHPUT,
    TPOT,
    TTFT,
)
from lab.analysis.tuning_search import Choice, Phase, Search
from lab.core import results
from lab.core.lists import plural
from lab.core.record import FAILED, Tuning
from lab.core.request import NOT_SENT, Asked, Events, Load, Request, RequestRecord
from lab.core.request_times import figures
from lab.endpoints.access import access, ask
from lab.endpoints.connection import utc_now
from lab.errors import LabError
from lab.process.spawning import cause_of_death, detached
from lab.runner import load_plan, loading, machine, progress
from lab.runner.load_plan import LoadPlan, Window
from lab.runner.progress import ShowStatus, Status, duration
from lab.runner.prompts import TEXT
from lab.runner.server_session import ServerSession
from lab.runner.servers import Reaching, Server, connect, prompt_text, reconnect

GOALS = (THROUGHPUT, TTFT, TPOT, REQUEST)
PORT, SETTINGS = "{port}", "{settings}"
HINT = "Run the command by itself, without the settings and with a port of your choice."
EXAMPLE = f'"llama-server -m MODEL.gguf --port {PORT} {SETTINGS}"'
WARMUP = "warm-up"
"""The stage of the first load, which only says how long an answer takes."""

START_S, END_S, HELP_S, POLL_S = 300.0, 10.0, 20.0, 0.2
"""Time limits for a server to answer, to end, and to print its help."""

FIRST_S, LEAST_S = 0.1, 1.0
FEWEST_ANSWERS, FEWEST_EACH = 8, 2
"""A window lasts at least LEAST_S, and long enough for the default to give so many answers in all and to each user."""

FEWEST_TRIED = 3
"""Choices that the budget has to allow besides the default."""

MOST_CONFIRMED = 8
MOST_IN_A_BLOCK = 5
"""Choices besides the default."""

MOST_CHOICES, MOST_CHANGES = 600, 3
MOST_REQUESTS = 100_000
MOST_LETTERS = 200
"""Of a line of a server's log."""

FILE_BYTES = 10_000_000


@dataclass(frozen=True)
class ServerPlan:
    """What will be searched. `load` is the load of each window, whose duration the first load decides."""

    command: tuple[str, ...]  # with PORT and SETTINGS
    goal: str
    budget_s: float
    load: LoadPlan
    text: str
    choices: tuple[Choice, ...]
    model: str | None
    how: Reaching

    @property
    def options(self) -> list[str]:
        """The options that are tried, such as `--parallel`, in the order in which they are tried first."""
        return list(dict.fromkeys(tuning_loads.options_of((one[0],)).split()[0] for one in self.choices))

    def line(self, options: str) -> str:
        """The command with these options of a choice, for users; at llama-server's usual port."""
        return shlex.join(_words(self.command, 8080, shlex.split(options)))


def plan(
    template: str,
    prompt_len: int = 500,
    gen: int = 100,
    *,
    users: int = 4,
    goal: str = THROUGHPUT,
    slo: str | None = None,
    budget_s: float = 600.0,
    allow_lossy: bool = False,
    model: str | None = None,
    prompt: str = TEXT,
    seed: int = 1,
    **how: Unpack[Reaching],
) -> ServerPlan:
    """Check everything in advance, and ask the server for its options. With the limits `slo` the goal is goodput.

    LabError for a template or numbers that are not possible, and if the server has none of the options.
    """
    try:
        command = tuple(shlex.split(template))
    except ValueError as problem:
        raise LabError(f"The command {template} cannot be read: {problem}.", f"Write it as {EXAMPLE}") from None
    for name, what in ((PORT, "the port"), (SETTINGS, "the settings")):
        if name not in template:
            raise LabError(f"The command {template} has no place for {what}: {name}.", f"Write it as {EXAMPLE}")
    if goal not in GOALS:
        raise LabError(f"--goal {goal} is not known.", f"Choose one of {', '.join(GOALS)}.")
    asked: dict[str, Any] = {"prompt_len": prompt_len, "gen": gen, "slo": slo, "seed": seed, **how}
    load = load_plan.make_plan(concurrency=users, rounds=1, max_requests=MOST_REQUESTS, **asked)
    choices = _choices(prompt_len * users, users, _offered(command), allow_lossy)
    if not choices:
        raise LabError(
            f"{command[0]} --help names no option that the lab can try.", "The lab knows the options of llama-server."
        )
    goal = GOODPUT if slo else goal
    return ServerPlan(command, goal, budget_s, load, prompt_text(prompt), choices, model, how)


def tune_server(
    template: str, *args: Any, out: str | Path = "results", watch: ShowStatus | None = None, **asked: Any
) -> Iterator[RequestRecord]:
    """Search the fastest options of a server under a load; yield each request after it is written to a file in `out`.

    The other arguments are those of `plan`. LabError if the default cannot be measured.
    """
    made = plan(template, *args, **asked)
    with progress.in_notebook() as watching:
        yield from execute(made, new_file(made, Path(out)), watch or watching)


def new_file(plan: ServerPlan, folder: Path) -> Path:
    """A new results file for the requests."""
    return results.new_file(folder, machine.slug(Path(plan.command[0]).stem), FILE_BYTES)


def execute(plan: ServerPlan, path: Path, watch: ShowStatus) -> Generator[RequestRecord, None, None]:
    """Search, then confirm; yield each request after it is written to `path`. Leaving early ends the server.

    A choice that fails is dropped, with a record that says why. LabError if the default fails.
    """
    with results.unless_empty(path):
        yield from _Session(plan, path, watch).execute()


@dataclass
class _Session:
    """The state of a session. Its blocks count from 1; the first load is block 0."""

    plan: ServerPlan
    path: Path
    watch: ShowStatus
    server: Server | None = None  # the first one
    error_ns: tuple[int, int] | None = None
    warmup_s: float = 0.0
    window_s: float = FIRST_S
    once_s: float = 0.0  # for examining the server and the client
    costs_s: list[float] = field(default_factory=list)  # of a window, with starting the server
    block: int = 0
    part: str = ""
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.search = Search(self.plan.choices, (Phase(self.plan.goal),), seed=self.plan.load.seed)
        self.chance = random.Random(self.plan.load.seed)

    def execute(self) -> Iterator[RequestRecord]:
        """The first load, the blocks of the search, and those of the confirmation."""
        yield from self._first()
        while (n := self._n_affordable() - 2 * FEWEST_CONFIRMED) >= 2:
            self.search.n_per_block = min(MOST_IN_A_BLOCK, n - 1)
            if not (choices := self.search.next_block()):
                break
            self.block += 1
            for choice in self.chance.sample(choices, len(choices)):
                if choice not in self.search.dropped:
                    yield from self._measure(choice, SEARCH)
        winner = self.search.best()
        n_blocks = min(MOST_CONFIRMED, max(FEWEST_CONFIRMED, self._n_affordable() // 2))
        for i in range(n_blocks if winner else 0):
            self.block += 1
            for choice in ((), winner) if i % 2 else (winner, ()):
                yield from self._measure(choice, CONFIRM)

    def _n_affordable(self) -> int:
        """How many windows the rest of the budget allows."""
        return int(self._left_s() / statistics.fmean(self.costs_s))

    def _left_s(self) -> float:
        return self.plan.budget_s - (time.monotonic() - self.began)

    def _first(self) -> Iterator[RequestRecord]:
        """Examine the default, and decide how long windows are. LabError if the budget is too small for them."""
        records = []
        for record in self._measure((), WARMUP):
            records.append(record)
            yield record
        each_s = max(one.e2e_ns or 0 for one in map(figures, (record.request for record in records))) / 1e9
        users = self.plan.load.windows[0].load.concurrency or 1
        self.warmup_s, self.window_s = each_s, max(LEAST_S, each_s * max(FEWEST_EACH, FEWEST_ANSWERS / users))
        self.costs_s = [self.costs_s[0] - self.once_s + self.window_s + each_s]
        least = 1 + FEWEST_TRIED + 2 * FEWEST_CONFIRMED
        if self._n_affordable() < least:
            needed = time.monotonic() - self.began + least * self.costs_s[0]
            raise LabError(
                f"The budget of {duration(self.plan.budget_s)} is too small: to start this server and measure it once "
                f"takes about {duration(self.costs_s[0])}.",
                f"Use at least --budget {math.ceil(needed / 60)}min, or shorter prompts and answers.",
            )

    def _measure(self, choice: Choice, stage: str) -> Iterator[RequestRecord]:
        """One window; the search learns its figure, or drops the choice. LabError if the default fails."""
        begun, variant = time.monotonic(), tuning_loads.options_of(choice)
        load = dataclasses.replace(
            self.plan.load.windows[0].load,
            round=self.block,
            warmup_s=self.warmup_s,
            duration_s=self.window_s,
            tuning=Tuning(goal=self.plan.goal, stage=stage, n_gen=self.plan.load.longest_answer),
            variant=variant,
        )
        self.part = f"{stage}, block {self.block}, {variant}"
        records: list[RequestRecord] = []
        try:
            for record in self._window(choice, load):
                records.append(record)
                yield record
            found = tuning_loads.measured(records) if records else None
            if found is None:
                raise _Failed("The load ended before its window.")
        except _Failed as failure:
            if self.server:
                yield self._keep(load, str(failure))
            self._drop(choice, str(failure))
            return
        self.costs_s.append(time.monotonic() - begun)
        if found.error:
            self._drop(choice, found.error)
        elif found.timing and stage == SEARCH:
            self.search.learn([found.timing])

    def _drop(self, choice: Choice, reason: str) -> None:
        """Drop a choice. The default stays if it was measured before; LabError if it never was."""
        if choice:
            self.search.drop(choice, reason)
        elif all(timing.choice for timing in self.search.timings):
            raise LabError(f"The server cannot be measured: {reason.rstrip('.')}.", HINT)

    def _keep(self, load: Load, reason: str) -> RequestRecord:
        """Write why a choice has no requests, as a request that was not sent."""
        assert self.server
        asked = Asked(n_prompt=max(self.plan.load.prompts.values), n_gen=self.plan.load.longest_answer, load=load)
        request = Request(
            asked=asked, started_at=utc_now(), status=FAILED, failure=NOT_SENT, error=reason, events=Events()
        )
        record = self.server.record(self.path.stem, request, self.error_ns)
        results.save(self.path, record)
        return record

    def _window(self, choice: Choice, load: Load) -> Iterator[RequestRecord]:
        """Start the server, put the load on it, end it. Raises _Failed."""
        plan = dataclasses.replace(self.plan.load, windows=(Window(load),))
        port = _free_port()
        options = shlex.split(tuning_loads.options_of(choice)) if choice else []
        with _started(_words(self.plan.command, port, options)) as process, ExitStack() as stack:
            url = f"http://127.0.0.1:{port}/v1"
            try:
                self._wait(process, url)
                began = time.monotonic()
                if self.server is None:
                    self._report("examining the server")
                    server = stack.enter_context(connect(url, self.plan.model, self._report, **self.plan.how))
                else:
                    server = stack.enter_context(reconnect(self.server, url))
                asks = loading.asks_of(plan, server, self.plan.text, self._report)
            except LabError as problem:
                why = process.why_ended()
                if not (choice or why):
                    raise
                raise _Failed(why or problem.what) from None
            session = ServerSession(server, self.path, self._report, self.error_ns)
            if self.server is None:
                session.measure_client(min(loading.MOST_STREAMS, load.concurrency or 1))
                self.server, self.error_ns, self.once_s = server, session.error_ns, time.monotonic() - began
            to_send = loading.send_plan(plan, plan.windows[0], server, asks, MOST_REQUESTS)
            yield from session.send(to_send, loading.LOOK_S, lambda: self._report(plural(session.n_kept, "request")))
            if why := process.why_ended():
                raise _Failed(why)

    def _wait(self, process: _Process, url: str) -> None:
        """Wait until the server answers. Raises _Failed."""
        began, asked = time.monotonic(), access(url, self.plan.how.get("api_key_env"), self.plan.how.get("header", ()))
        while not any(ask(asked, address).status == 200 for address in (f"{asked.root}/health", f"{url}/models")):
            waited_s = time.monotonic() - began
            if why := process.why_ended():
                raise _Failed(why)
            if waited_s > START_S:
                raise _Failed(f"The server did not answer within {START_S:g} s at {url}.")
            self._report(f"starting the server, {waited_s:.0f} s")
            time.sleep(POLL_S)

    def _report(self, doing: str) -> None:
        elapsed_s = time.monotonic() - self.began
        self.watch(Status(doing, part=self.part, elapsed_s=elapsed_s, left_s=max(0.0, self._left_s())))


class _Failed(Exception):
    """A choice cannot be measured, and why."""


@dataclass(frozen=True)
class _Process:
    """A server that runs, and the file with all that it prints."""

    popen: subprocess.Popen[bytes]
    log: Path

    def why_ended(self) -> str | None:
        """Why it ended, with its last lines; None while it runs."""
        if self.popen.poll() is None:
            return None
        text = self.log.read_text(encoding="utf-8", errors="replace").replace(
            str(Path.home()), "~"
        )  # results are published
        lines = [line.strip()[:MOST_LETTERS] for line in text.splitlines()]
        return cause_of_death("The server", self.popen.returncode, [line for line in lines if line])

    def end(self) -> None:
        """End it with all its processes: ask first, then kill."""
        self._signal("SIGTERM")
        try:
            self.popen.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also after Ctrl-C
            self._signal("SIGKILL")
            self.popen.wait()

    def _signal(self, name: str) -> None:
        with suppress(OSError):
            if os.name == "nt":
                self.popen.terminate()
            else:
                os.killpg(self.popen.pid, getattr(signal, name))


@contextmanager
def _started(words: Sequence[str]) -> Iterator[_Process]:
    """A process that runs until the end of the block. LabError if there is no such program."""
    with tempfile.TemporaryDirectory(prefix="mini-lab-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            try:
                popen = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **detached()
                )
            except OSError as problem:
                raise LabError(f"{words[0]} cannot be started: {problem.strerror}.", HINT) from None
        process = _Process(popen, log)
        try:
            yield process
        finally:
            process.end()


def _words(command: Sequence[str], port: int, options: Sequence[str]) -> list[str]:
    """The words of a template with its port and its settings."""
    words: list[str] = []
    for word in command:
        words += options if word == SETTINGS else [word.replace(SETTINGS, shlex.join(options))]
    return [word.replace(PORT, str(port)) for word in words]


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _offered(command: Sequence[str]) -> set[str] | None:
    """The options that the server's help names; None if it prints none."""
    with _started(_words(command, _free_port(), ["--help"])) as process:
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(HELP_S)
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", process.log.read_text(encoding="utf-8", errors="replace")))
    return found if process.popen.returncode == 0 and len(found) > 1 else None


def _choices(n_tokens: int, users: int, offered: set[str] | None, allow_lossy: bool) -> tuple[Choice, ...]:
    """Single settings, the promising first, and combinations of up to MOST_CHANGES. `n_tokens`: of all prompts."""
    here = machine.describe()
    cores = {n for n in (here.n_cores_physical, here.n_cores_usable) if n}
    threads = sorted(cores | {max(1, n // 2) for n in cores})
    tried: dict[str, Sequence[Any]] = {
        "parallel": sorted({1, math.ceil(users / 2), users}),
        "flash_attn": ("off", "on"),
        "threads": threads,
        "threads_batch": threads,
        "ubatch_size": [n for n in (64, 128, 256, 1024, 2048) if n < 2 * n_tokens],
        "batch_size": [n for n in (256, 512, 1024, 4096) if n < 2 * n_tokens],
        "kv_unified": (True, False),
        "cont_batching": (False,),
    }
    if allow_lossy:
        tried |= dict.fromkeys(("cache_type_k", "cache_type_v"), ("q8_0", "q4_0"))
    singles = [(name, value) for name, values in tried.items() for value in values]
    known = [one for one in singles if offered is None or tuning_loads.options_of((one,)).split()[0] in offered]
    made = (
        tuple(sorted(several, key=itemgetter(0)))
        for n in range(1, MOST_CHANGES + 1)
        for several in itertools.combinations(known, n)
        if len({name for name, _ in several}) == n
    )
    return tuple(itertools.islice(made, MOST_CHOICES))
