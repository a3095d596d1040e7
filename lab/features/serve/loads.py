"""`lab load`: plan a load, put it on a server window after window, and write each request soon after it has ended.

An arm is a level of load: a number of users, or a rate. Each round measures every arm once, in random order, because
servers and machines drift. One arm in one round is a window: a warm-up, then the steady window. Between two windows the
server is idle: all requests of the last one have ended.

Prompts and answers have one length or a distribution of lengths. A distribution becomes a pool of at most MOST_VALUES
equally likely values, its quantiles, so that a few prompts of exact length represent it. Requests draw from shuffled
decks of the pool, so that after each deck all values came equally often.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, Unpack

from lab.core.asked_settings import in_digits
from lab.core.lists import plural
from lab.core.record import OK
from lab.core.request import CLOSED, POISSON, Load, Request, RequestRecord, Slo, parse_slo
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.features.serve.formats import MOST_AT_ONCE, Reply, SendPlan
from lab.features.serve.servers import Reaching, Server, connect, needs_count, prompt_text, reaching_of
from lab.features.serve.through_server import GONE, gone, warn_of_failures
from lab.runner import progress
from lab.runner.progress import ShowStatus, Status
from lab.runner.prompts import TEXT

MOST_VALUES, MOST_TOKENS = 32, 10_000_000
MOST_DRAWN = 20_000  # lengths drawn for a window; then they repeat

DEFAULT_CONCURRENCY = "1,2,4,8"
WARMUP_S, DURATION_S, ROUNDS = 5.0, 15.0, 3
MAX_REQUESTS, TIMEOUT_S, STALL_S = 2000, 300.0, 60.0
MOST_ARMS, MOST_ROUNDS, MOST_REQUESTS, LONGEST_S = 50, 100, 10_000_000, 86_400.0
LEAST_RATE, MOST_RATE = 0.001, 10_000.0

MOST_LOST = 20  # a server counts as gone after this number of requests in a row without a connection
REST = 2.0
"""An open loop has times for REST times its window, because the load continues until the window's requests end."""

LOOK_S = 1.0  # interval of writing finished requests to disk

Numbers = str | float | Sequence[float]


class Lengths(NamedTuple):
    """A length or a distribution of lengths: its text, and its pool of values in ascending order."""

    asked: str
    values: tuple[int, ...]


def parse(option: str, text: str | int) -> Lengths:
    """`512`, `100-1000` (uniform), `normal:MEAN,SD`, `lognormal:MEDIAN,SIGMA` (of the logarithm), or LabError."""
    words = in_digits(str(text).strip())
    hint = f"Write {option} as 512, 100-1000, normal:500,100 or lognormal:300,0.8 (median, sigma of the logarithm)."
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", words):
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise LabError(f"{option} {words} begins with the larger number.", hint)
        n = high - low + 1
        step = n / min(n, MOST_VALUES)
        values = [low + math.floor((i + 0.5) * step) for i in range(min(n, MOST_VALUES))]
    elif match := re.fullmatch(r"(normal|lognormal):(\d{1,9}(?:\.\d+)?),\s*(\d{1,9}(?:\.\d+)?)", words):
        middle, spread = float(match[2]), float(match[3])
        if middle <= 0 or (match[1] == "lognormal" and spread > 10):
            raise LabError(f"{option} {words} is not possible.", hint)
        normal = [spread * NormalDist().inv_cdf((i + 0.5) / MOST_VALUES) for i in range(MOST_VALUES)]
        values = [round(middle + z if match[1] == "normal" else middle * math.exp(z)) for z in normal]
    else:
        raise LabError(f"{option} {words} is not a length.", hint)
    if not 1 <= min(values) <= max(values) <= MOST_TOKENS:
        raise LabError(f"{option} {words} has lengths from {min(values):,} to {max(values):,} tokens.", hint)
    return Lengths(words, tuple(values) if len(set(values)) > 1 else (values[0],))


def drawn(prompts: Lengths, answers: Lengths, n: int, seed: str) -> tuple[tuple[int, int], ...]:
    """For n requests: the index of a value of `prompts`, and the number of tokens to generate."""

    def decks(values: Sequence[int], name: str) -> Iterator[int]:
        rng = random.Random(f"{seed} {name}")
        while True:
            yield from rng.sample(values, len(values))

    pairs = zip(decks(range(len(prompts.values)), "prompts"), decks(answers.values, "answers"), strict=False)
    return tuple(itertools.islice(pairs, n))


def spread_s(load: Load) -> float:
    """Users of a closed loop begin at random times within this: together they would stay together, in waves."""
    return load.warmup_s / 2 if load.arrivals == CLOSED and load.concurrency != 1 else 0.0


class Window(NamedTuple):
    """One arm in one round. `times_ns` are the times of an open loop's requests from its start."""

    load: Load
    times_ns: tuple[int, ...] | None = None

    @property
    def stop_s(self) -> float:
        """When the steady window ends."""
        return self.load.warmup_s + self.load.duration_s

    @property
    def label(self) -> str:
        """Such as "8 users, round 2"."""
        return f"{self.load.label}, round {self.load.round + 1}"


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """A session of loads."""

    windows: tuple[Window, ...]  # in the order in which they are measured
    prompts: Lengths  # `values` are the lengths of the prompts to make
    answers: Lengths
    max_requests: int
    timeout_s: float
    seed: int

    @property
    def n_most(self) -> int:
        """Maximum number of requests."""
        times_ns = [window.times_ns for window in self.windows if window.times_ns is not None]
        return sum(map(len, times_ns)) if times_ns else self.max_requests

    @property
    def seconds(self) -> float:
        """Duration of all windows, without the ends of their last requests."""
        return sum(window.stop_s for window in self.windows)

    def order(self, window: Window, n: int) -> tuple[tuple[int, int], ...]:
        """For n requests of a window: the prompt's index, and the tokens to generate. Equal for all arms of a round."""
        return drawn(self.prompts, self.answers, min(n, MOST_DRAWN), f"{self.seed} {window.load.round}")


class LoadOptions(Reaching, total=False):
    """The options of a load. Lengths are those of `parse`; the default levels are DEFAULT_CONCURRENCY."""

    concurrency: Numbers | None
    rate: Numbers | None
    prompt_len: str | int
    gen: str | int
    warmup: float
    duration: float
    rounds: int
    slo: str | Slo | None
    max_requests: int
    seed: int


def make_plan(**asked: Unpack[LoadOptions]) -> LoadPlan:
    """The plan of a load: a closed loop for each of `concurrency`, or an open loop for each `rate`.

    LabError for invalid options, and if the load could need more than `max_requests`.
    """
    slo, seed = asked.get("slo"), asked.get("seed", 1)
    prompts, answers = parse("--prompt-len", asked.get("prompt_len", 256)), parse("--gen", asked.get("gen", 64))
    rounds = int(_checked("--rounds", asked.get("rounds", ROUNDS), 1, MOST_ROUNDS))
    most = int(_checked("--max-requests", asked.get("max_requests", MAX_REQUESTS), 1, MOST_REQUESTS))
    base = Load(
        arrivals=CLOSED,
        round=0,
        warmup_s=_checked("--warmup", asked.get("warmup", WARMUP_S), 0, LONGEST_S),
        duration_s=_checked("--duration", asked.get("duration", DURATION_S), 0.1, LONGEST_S),
        lengths=f"{prompts.asked} + {answers.asked} tokens",
        seed=seed,
        slo=parse_slo(slo) if isinstance(slo, str) else slo,
    )
    arms = _arms(base, asked)
    n_windows, users = len(arms) * rounds, max(arm.concurrency or 0 for arm in arms)
    if most // n_windows < users:
        raise LabError(
            f"{most:,} requests are too few: {n_windows} windows of up to {users} users need at least one for each "
            "user.",
            f"Allow more: --max-requests {10 * users * n_windows}",
        )
    windows, n = list[Window](), 0
    for round_ in range(rounds):  # all arms in each round, in random order
        for arm in random.Random(f"{seed} {round_}").sample(arms, len(arms)):
            load, times_ns = dataclasses.replace(arm, round=round_), None
            if load.arrivals != CLOSED:
                times_ns = tuple(round(1e9 * at_s) for at_s in itertools.islice(_times_s(load), most + 1 - n))
                n += len(times_ns)
            windows.append(Window(load, times_ns))
            if n > most:
                needed = sum((one.rate or 0) * REST * (one.warmup_s + one.duration_s) for one in arms) * rounds
                raise LabError(
                    f"This load could need more than --max-requests {most:,}: about {needed:,.0f} requests, including "
                    "those after each window, until its last request ends.",
                    "Increase --max-requests, or use lower rates, a shorter --duration or fewer --rounds.",
                )
    timeout_s = _checked("--timeout", asked.get("timeout", TIMEOUT_S), 0.1, LONGEST_S)
    return LoadPlan(
        windows=tuple(windows), prompts=prompts, answers=answers, max_requests=most, timeout_s=timeout_s, seed=seed
    )


def _checked(option: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:  # also for NaN
        raise LabError(f"{option} {value:g} is not possible.", f"Give a number from {least:g} to {most:,g}.")
    return float(value)


def _arms(base: Load, asked: LoadOptions) -> list[Load]:
    """A load for each number of users or each rate."""
    users, rates = asked.get("concurrency"), asked.get("rate")
    if users is not None and rates is not None:
        raise LabError("--concurrency (closed loop) and --rate (open loop) exclude each other.", "Give one of them.")
    option, given = ("--concurrency", users) if rates is None else ("--rate", rates)
    given = DEFAULT_CONCURRENCY if given is None else given
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, Sequence) else [given]
    try:
        levels = list(dict.fromkeys(float(part) for part in parts))
    except ValueError:
        levels = []
    if not 1 <= len(levels) <= MOST_ARMS:
        raise LabError(f"{option} {given} is not a list of numbers.", f"Give up to {MOST_ARMS}, with commas: 1,2,4")
    if rates is not None:
        levels = [_checked(option, level, LEAST_RATE, MOST_RATE) for level in levels]
        return [dataclasses.replace(base, arrivals=POISSON, rate=level) for level in levels]
    if wrong := [n for n in levels if not (1 <= n <= MOST_AT_ONCE and n == int(n))]:
        raise LabError(f"{option} {wrong[0]:g} is not possible.", f"Give whole numbers from 1 to {MOST_AT_ONCE}.")
    return [dataclasses.replace(base, concurrency=int(n)) for n in levels]


def _times_s(load: Load) -> Iterator[float]:
    """The times of an open loop's requests: random, as if users were independent (a Poisson process)."""
    end_s, rng = REST * (load.warmup_s + load.duration_s), random.Random(f"{load.seed} {load.rate} {load.round}")
    times_s = itertools.accumulate(rng.expovariate(load.rate or 0.0) for _ in itertools.repeat(None))
    return itertools.takewhile(lambda at_s: at_s < end_s, times_s)


def load(
    url: str,
    *,
    model: str | None = None,
    prompt: str = TEXT,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **asked: Unpack[LoadOptions],
) -> list[RequestRecord]:
    """Put load on a server and return the records of all requests, which are also in a new file in `out`.

        records = lab.load("http://127.0.0.1:8080/v1", concurrency=[1, 4, 16], duration=30)

    A closed loop for each of `concurrency` (its users), or an open loop for each `rate` (requests per second). Lengths
    are numbers or distributions: "100-1000", "normal:500,100", "lognormal:300,0.8". Each round measures every load
    once: `warmup` seconds, then `duration` seconds that count. `slo` are limits such as "ttft=1s,tpot=50ms". Sends at
    most `max_requests`, besides those that examine the server and count prompts. Failed requests are records too, with
    a warning. The other arguments are those of `lab.measure` with `url`. LabError if no server answers, or it stops
    answering.
    """
    plan = make_plan(**asked)
    text, notes = prompt_text(prompt), list[str]()
    with progress.in_notebook() as watching:
        show = watch or watching
        how = reaching_of({**asked, "timeout": plan.timeout_s})
        with connect(url, model, lambda words: show(Status(words)), **how) as server:
            path = server.new_file(Path(out))
            records = list(execute(plan, server, text, path, show, notes.append))
    warn_of_failures(notes, [record.request.error for record in records])
    return records


@dataclass
class Session:
    """A running session of loads. Calls `report` with what it is doing."""

    server: Server
    path: Path
    report: Callable[[str], object]
    lost: list[Request] = field(default_factory=list)  # requests in a row with a failure in GONE
    can_count: bool = True  # whether the server can count tokens of answers whose stream did not
    kept: set[int] = field(default_factory=set)  # the requests of the last plan that are in the file
    n_failed: int = 0  # of the last plan

    def send(self, plan: SendPlan, look: Callable[[], object]) -> Iterator[RequestRecord]:
        """Send the requests of a plan; yield each record after it is written to the file.

        Writes the finished requests every LOOK_S, then calls `look`; sleeps in between, because the server may share
        the cores. At the end the server counts the tokens of answers without a count. Finished requests are kept even
        if the plan ends early.
        """
        self.kept.clear()
        self.n_failed, uncounted = 0, list[Reply]()
        try:
            for batch in self.server.client.batches(plan, LOOK_S):
                final: list[Reply] = []
                for reply in batch:
                    request = reply.request
                    self.lost = [*self.lost, request] if request.failure in GONE else []
                    self.n_failed += request.status != OK
                    (uncounted if self.can_count and needs_count(request) else final).append(reply)
                yield from self._keep(final)
                look()
            is_gone = len(self.lost) >= MOST_LOST
            for i, reply in enumerate([] if is_gone else uncounted):  # the server is idle now
                if len(uncounted) > 1 and i % 10 == 0:
                    self.report(f"counting the tokens of answers, {i} of {len(uncounted)}")
                request = self.server.counted(reply)
                uncounted[i] = dataclasses.replace(reply, request=request)
                if needs_count(request):  # the server has no tokenizer
                    self.can_count = False
                    break
            yield from self._keep(uncounted)
        except BaseException:  # after Ctrl-C, in a closed generator, without a client, or with a full disk
            with suppress(LabError):  # then the rest goes to the same rescue file
                self._keep((*self.server.client.given_up(), *uncounted))
            raise

    def _keep(self, replies: Iterable[Reply]) -> list[RequestRecord]:
        """Write the new replies."""
        new = (one for one in replies if one.index not in self.kept)
        if records := {one.index: self.server.record(self.path.stem, one.request) for one in new}:
            n_bytes = self.path.stat().st_size
            try:
                save(self.path, *records.values())
            finally:  # after Ctrl-C during the write, do not write them again
                if self.path.stat().st_size > n_bytes:
                    self.kept.update(records)
        return list(records.values())


def execute(
    plan: LoadPlan, server: Server, text: str, path: Path, watch: ShowStatus, note: Callable[[str], object]
) -> Generator[RequestRecord, None, None]:
    """Measure the plan's windows; yield each record after it is written to the file `path`.

    Calls `note` with sentences for the user. LabError if the server is gone. Stopping early (Ctrl-C) keeps all finished
    requests.
    """
    began, part, later_s = 0.0, "", plan.seconds

    def report(doing: str) -> None:
        watch(Status(doing, part=part))

    def show(is_over: bool = False) -> None:
        lasted_s = time.monotonic() - began
        left_s = later_s + (0.0 if is_over else max(0.0, window.stop_s - lasted_s))
        doing = plural(len(session.kept), "request") + (f", {session.n_failed:,} failed" if session.n_failed else "")
        if not is_over and lasted_s > window.stop_s:
            doing = f"waiting for the last requests, {doing}"
        elif not is_over and lasted_s < window.load.warmup_s:
            doing = f"warming up, {doing}"
        watch(Status(doing, part=part, left_s=left_s))

    session = Session(server, path, report)
    with unless_empty(path):
        asks, lengths, longest, n_left = [], plan.prompts.values, max(plan.answers.values), plan.max_requests
        for i, n in enumerate(lengths):
            report(f"sizing prompts, {i + 1} of {len(lengths)}")
            prompt = server.prompt(n, text, plan.seed, i)
            asks.append(server.ask(prompt, n, longest))
        if too_long := server.too_long(max(lengths), longest):
            note(str(too_long).replace("\n", " "))
        for i, window in enumerate(plan.windows):
            n_most = n_left // (len(plan.windows) - i) if window.times_ns is None else len(window.times_ns)
            own: dict[str, Any] = {"load": window.load, "repeat": window.load.round}
            sending = SendPlan(
                asks=tuple(dataclasses.replace(ask, asked=dataclasses.replace(ask.asked, **own)) for ask in asks),
                api=server.endpoint.api,
                n_at_once=window.load.concurrency or MOST_AT_ONCE,
                n_requests=n_most,
                times_ns=window.times_ns,
                timeout_s=plan.timeout_s,
                stall_s=STALL_S,
                stop_s=window.stop_s,
                spread_s=spread_s(window.load),
                order=plan.order(window, n_most),
                most_lost=MOST_LOST,
            )
            part = f"{window.label} of {1 + max(one.load.round for one in plan.windows)}"
            began, later_s = time.monotonic(), later_s - window.stop_s
            yield from session.send(sending, show)
            lasted_s = time.monotonic() - began
            show(is_over=True)
            if len(session.lost) >= MOST_LOST:
                raise gone(server, path, session.lost, f"{window.label}; ")
            if window.times_ns is None and len(session.kept) >= n_most and lasted_s < window.stop_s:
                needed = round(1.2 * n_most * window.stop_s / lasted_s * len(plan.windows), -2)
                note(
                    f"{window.label} ended after {lasted_s:.1f} s of {window.stop_s:g} s: it used its share of "
                    f"--max-requests ({n_most:,}). Use --max-requests {needed:.0f} for all windows."
                )
            n_left -= len(session.kept)
