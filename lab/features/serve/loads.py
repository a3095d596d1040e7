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
from lab.remote.formats import MOST_AT_ONCE, Reply, SendPlan
from lab.remote.servers import Reaching, Server, connect, needs_count, prompt_text, reaching_of
from lab.remote.through_server import GONE, gone, warn_of_failures
from lab.runner import progress
from lab.runner.progress import ShowStatus, Status
from lab.runner.prompts import TEXT

MOST_VALUES = 32
MOST_TOKENS = 10_000_000
MOST_DRAWN = 20_000  # lengths drawn for a window; then they repeat
MOST_ARMS = 50
STALL_S = 60.0

LIMITS: dict[str, tuple[float, float, float]] = {
    "warmup": (5.0, 0, 86_400),
    "duration": (15.0, 0.1, 86_400),
    "rounds": (3, 1, 100),
    "max_requests": (2000, 1, 10_000_000),
    "timeout": (300.0, 0.1, 86_400),
}
"""The default of an option, its lowest and its highest value."""

MOST_LOST = (
    20  # a server counts as gone after this number of requests in a row without a connection
)
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
    values = list[int]()
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", words):
        low = int(match[1])
        high = int(match[2] or match[1])
        n = min(high + 1 - low, MOST_VALUES)
        values = [low + math.floor((i + 0.5) * (high + 1 - low) / n) for i in range(n)]
    elif match := re.fullmatch(
        r"(normal|lognormal):(\d{1,9}(?:\.\d+)?),\s*(\d{1,9}(?:\.\d+)?)", words
    ):
        middle = float(match[2])
        spread = float(match[3])
        normal = [
            spread * NormalDist().inv_cdf((i + 0.5) / MOST_VALUES) for i in range(MOST_VALUES)
        ]
        is_normal = match[1] == "normal"
        most = math.log(2 * MOST_TOKENS)  # beyond it is refused anyway
        values = [
            round(middle + z if is_normal else middle * math.exp(min(z, most))) for z in normal
        ]
    if not values or not 1 <= min(values) <= max(values) <= MOST_TOKENS:
        hint = f"Write {option} as 512, 100-1000, normal:500,100 or lognormal:300,0.8 (median, sigma of the logarithm)."
        raise LabError(f"{option} {words} is not possible.", hint)
    return Lengths(words, tuple(values) if len(set(values)) > 1 else (values[0],))


def drawn(prompts: Lengths, answers: Lengths, n: int, seed: str) -> tuple[tuple[int, int], ...]:
    """For n requests: the index of a value of `prompts`, and the number of tokens to generate."""

    def decks(values: Sequence[int], name: str) -> Iterator[int]:
        rng = random.Random(f"{seed} {name}")
        while True:
            yield from rng.sample(values, len(values))

    pairs = zip(
        decks(range(len(prompts.values)), "prompts"), decks(answers.values, "answers"), strict=False
    )
    return tuple(itertools.islice(pairs, n))


def spread_s(load: Load) -> float:
    """Users of a closed loop begin at random times within this: together they would stay together, in waves."""
    return load.warmup_s / 2 if load.arrivals == CLOSED and load.concurrency != 1 else 0.0


@dataclass(frozen=True)
class LoadPlan:
    """A session of loads."""

    windows: tuple[Load, ...]  # an arm in a round each, in the order in which they are measured
    prompts: Lengths  # `values` are the lengths of the prompts to make
    answers: Lengths
    max_requests: int
    timeout_s: float
    seconds: float  # of all windows, without the ends of their last requests


class LoadOptions(Reaching, total=False):
    """The options of a load. Lengths are those of `parse`; the others have the defaults of LIMITS."""

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
    prompts = parse("--prompt-len", asked.get("prompt_len", 256))
    answers = parse("--gen", asked.get("gen", 64))
    users = asked.get("concurrency")
    rates = asked.get("rate")
    slo = asked.get("slo")
    given: dict[str, Any] = {**asked}
    if users is not None and rates is not None:
        raise LabError(
            "--concurrency (closed loop) and --rate (open loop) exclude each other.",
            "Give one of them.",
        )
    levels = _numbers("--rate", rates, 0.001, 10_000) if rates is not None else []
    levels = levels or _numbers(
        "--concurrency", "1,2,4,8" if users is None else users, 1, MOST_AT_ONCE, True
    )
    warmup_s, duration_s, rounds, most, timeout_s = (
        _numbers(f"--{name.replace('_', '-')}", [given.get(name, default)], least, highest)[0]
        for name, (default, least, highest) in LIMITS.items()
    )
    reach_s = REST * (warmup_s + duration_s)
    needed = rounds * (len(levels) * max(levels) if rates is None else reach_s * sum(levels))
    if needed > most:
        raise LabError(
            f"--max-requests {most:,.0f} is too few: this load needs {needed:,.0f} or more, including those after each "
            "window, until its last request ends.",
            "Increase --max-requests, or use less load, a shorter --duration or fewer --rounds.",
        )
    of_all: dict[str, Any] = {
        "warmup_s": warmup_s,
        "duration_s": duration_s,
        "lengths": f"{prompts.asked} + {answers.asked} tokens",
        "seed": asked.get("seed", 1),
        "slo": parse_slo(slo) if isinstance(slo, str) else slo,
    }
    windows = [
        Load(round=i, arrivals=CLOSED, concurrency=int(level), **of_all)
        if rates is None
        else Load(round=i, arrivals=POISSON, rate=level, **of_all)
        for i in range(int(rounds))  # all arms in each round, in random order
        for level in random.Random(f"{of_all['seed']} {i}").sample(levels, len(levels))
    ]
    return LoadPlan(
        tuple(windows),
        prompts,
        answers,
        int(most),
        timeout_s,
        len(windows) * (warmup_s + duration_s),
    )


def _numbers(
    option: str, given: Numbers, least: float, most: float, whole: bool = False
) -> list[float]:
    """The different numbers of a list, or LabError."""
    parts = (
        given.split(",")
        if isinstance(given, str)
        else given
        if isinstance(given, Sequence)
        else [given]
    )
    numbers = list[float]()
    with suppress(ValueError):
        numbers = list(dict.fromkeys(float(part) for part in parts))
    if not 1 <= len(numbers) <= MOST_ARMS:
        raise LabError(
            f"{option} {given} is not a list of numbers.",
            f"Give up to {MOST_ARMS}, with commas: 1,2,4",
        )
    for number in numbers:
        if not least <= number <= most or (whole and number != int(number)):  # also for NaN
            kind = "whole numbers" if whole else "a number"
            raise LabError(
                f"{option} {number:g} is not possible.", f"Give {kind} from {least:g} to {most:,}."
            )
    return numbers


def times_ns(load: Load) -> tuple[int, ...] | None:
    """The times of an open loop's requests: random, as if users were independent (a Poisson process)."""
    if load.rate is None:
        return None
    end_s = REST * (load.warmup_s + load.duration_s)
    rng = random.Random(f"{load.seed} {load.rate} {load.round}")
    times_s = itertools.accumulate(rng.expovariate(load.rate) for _ in itertools.repeat(None))
    return tuple(
        round(1e9 * at_s) for at_s in itertools.takewhile(lambda at_s: at_s < end_s, times_s)
    )


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
    text = prompt_text(prompt)
    notes = list[str]()
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
    """A running session of loads."""

    server: Server
    path: Path
    watch: ShowStatus
    lost: list[Request] = field(default_factory=list)  # requests in a row with a failure in GONE
    kept: set[int] = field(
        default_factory=set
    )  # the requests of the last plan that are in the file

    def send(self, plan: SendPlan, status: Status, later_s: float) -> Iterator[RequestRecord]:
        """Send the requests of a plan; yield each record after it is written to the file.

        Writes the finished requests every LOOK_S; sleeps in between, because the server may share the cores. At the end
        the server counts the tokens of answers without a count. Finished requests are kept even if the plan ends early.
        `later_s` is the time of the plans that follow.
        """
        self.kept.clear()
        n_failed = 0
        uncounted = list[Reply]()
        end_s = time.monotonic() + (plan.stop_s or 0)
        try:
            for batch in self.server.client.batches(plan, LOOK_S):
                final: list[Reply] = []
                for reply in batch:
                    self.lost = [*self.lost, reply.request] if reply.request.failure in GONE else []
                    n_failed += reply.request.status != OK
                    (uncounted if needs_count(reply.request) else final).append(reply)
                yield from self._keep(final)
                so_far = plural(len(self.kept), "request") + (
                    f", {n_failed:,} failed" if n_failed else ""
                )
                left_s = later_s + max(0.0, end_s - time.monotonic())
                self.watch(dataclasses.replace(status, part=so_far, left_s=left_s))
            for i, reply in enumerate(
                uncounted if len(self.lost) < MOST_LOST else ()
            ):  # the server is idle now
                uncounted[i] = dataclasses.replace(reply, request=self.server.counted(reply))
                if needs_count(uncounted[i].request):  # the server has no tokenizer
                    break
            yield from self._keep(uncounted)
        except (
            BaseException
        ):  # after Ctrl-C, in a closed generator, without a client, or with a full disk
            with suppress(LabError):
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
    plan: LoadPlan,
    server: Server,
    text: str,
    path: Path,
    watch: ShowStatus,
    note: Callable[[str], object],
) -> Generator[RequestRecord, None, None]:
    """Measure the plan's windows; yield each record after it is written to the file `path`.

    Calls `note` with sentences for the user. LabError if the server is gone. Stopping early (Ctrl-C) keeps all finished
    requests.
    """
    session = Session(server, path, watch)
    lengths = plan.prompts.values
    longest = max(plan.answers.values)
    asks = []
    n_left = plan.max_requests
    later_s = plan.seconds
    seed = plan.windows[0].seed
    with unless_empty(path):
        for i, n in enumerate(lengths):
            watch(Status("sizing prompts", n_runs=len(lengths), n_runs_done=i))
            asks.append(server.ask(n, longest, text))
        if too_long := server.too_long(max(lengths), longest):
            note(str(too_long).replace("\n", " "))
        for i, load in enumerate(plan.windows):
            due_ns = times_ns(load)
            stop_s = load.warmup_s + load.duration_s
            name = f"{load.label}, round {load.round + 1}"
            n_most = (
                n_left // (len(plan.windows) - i) if due_ns is None else min(len(due_ns), n_left)
            )
            own: dict[str, Any] = {"load": load, "repeat": load.round}
            sending = SendPlan(
                asks=tuple(
                    dataclasses.replace(ask, asked=dataclasses.replace(ask.asked, **own))
                    for ask in asks
                ),
                api=server.endpoint.api,
                n_at_once=load.concurrency or MOST_AT_ONCE,
                n_requests=n_most,
                times_ns=due_ns,
                timeout_s=plan.timeout_s,
                stall_s=STALL_S,
                stop_s=stop_s,
                spread_s=spread_s(load),
                order=drawn(
                    plan.prompts, plan.answers, min(n_most, MOST_DRAWN), f"{seed} {load.round}"
                ),
                most_lost=MOST_LOST,
            )
            began = time.monotonic()
            later_s = later_s - stop_s
            yield from session.send(
                sending, Status(f"{name} of {1 + plan.windows[-1].round}"), later_s
            )
            lasted_s = time.monotonic() - began
            if len(session.lost) >= MOST_LOST:
                raise gone(server, path, session.lost, f"{name}; ")
            if due_ns is None and len(session.kept) >= n_most and lasted_s < stop_s:
                needed = round(1.2 * n_most * stop_s / lasted_s * len(plan.windows), -2)
                note(
                    f"{name} ended after {lasted_s:.1f} s of {stop_s:g} s: it used its share of --max-requests "
                    f"({n_most:,}). Use --max-requests {needed:.0f} for all windows."
                )
            n_left -= len(session.kept)
