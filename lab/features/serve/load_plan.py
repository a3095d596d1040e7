"""Plan a load: its arms, its rounds, the times of its requests, and their maximum number.

An arm is a level of load: a number of users, a rate, or a replay. Each round measures every arm once, in random order,
because servers and machines drift. One arm in one round is a window: a warm-up, then the steady window.

Prompts and answers have one length, a distribution of lengths, or those of a file. A distribution becomes a pool of at
most MOST_VALUES equally likely values, its quantiles, so that a few prompts of exact length represent it. Requests draw
from shuffled decks of the pool, so that after each deck all values came equally often. Prompts and answers are drawn
independently.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Unpack

from lab.core.asked_settings import in_digits
from lab.core.request import CLOSED, CONSTANT, POISSON, REPLAY, Load, Slo, parse_slo
from lab.errors import LabError
from lab.features.serve.send_plan import MOST_AT_ONCE
from lab.features.serve.servers import Reaching

MOST_VALUES = 32
MOST_TOKENS = 10_000_000
MOST_CALLS = 200_000
"""Maximum number of requests read from a file."""

OWN = ("n_prompt", "n_gen", "at_s")
MOONCAKE = ("input_length", "output_length", "timestamp")
"""Field names in replay files: the lab's, and those of Mooncake's traces (FAST '25; timestamp in milliseconds).

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces."""

DEFAULT_CONCURRENCY = "1,2,4,8"
WARMUP_S, DURATION_S, ROUNDS = 5.0, 15.0, 3
MAX_REQUESTS = 2000
MOST_DRAWN = 20_000
"""Maximum number of lengths drawn for a window; then they repeat."""

TIMEOUT_S, STALL_S = 300.0, 60.0
MOST_LOST = 20
"""A server counts as gone after this number of requests in a row without a connection."""

MOST_ARMS, MOST_ROUNDS = 50, 100
LONGEST_S = 86_400.0
MOST_REQUESTS = 10_000_000
LEAST_RATE, MOST_RATE = 0.001, 10_000.0
REST = 2.0
"""An open loop has times for REST times its window, because the load continues until the window's requests end."""

Numbers = str | float | Sequence[float]


@dataclass(frozen=True)
class Lengths:
    """A length or a distribution of lengths: its text, and its pool of values in ascending order."""

    asked: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a replay file: tokens of the prompt and of the answer, and its time."""

    n_prompt: int
    n_gen: int
    at_s: float | None


def parse(option: str, text: str | int) -> Lengths:
    """`512`, `100-1000` (uniform), `normal:MEAN,SD`, `lognormal:MEDIAN,SIGMA` (of the logarithm), or LabError."""
    words = in_digits(str(text).strip())
    hint = f"Write {option} as 512, 100-1000, normal:500,100 or lognormal:300,0.8 (median, sigma of the logarithm)."
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", words):
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise LabError(f"{option} {words} begins with the larger number.", hint)
        values = _uniform(low, high)
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


def _uniform(low: int, high: int) -> list[int]:
    n = high - low + 1
    if n <= MOST_VALUES:
        return list(range(low, high + 1))
    return [low + math.floor((i + 0.5) * n / MOST_VALUES) for i in range(MOST_VALUES)]


def drawn(prompts: Lengths, answers: Lengths, n: int, seed: str) -> tuple[tuple[int, int], ...]:
    """For n requests: the index of a value of `prompts`, and the number of tokens to generate."""
    of_prompts = _decks(range(len(prompts.values)), f"{seed} prompts")
    of_answers = _decks(answers.values, f"{seed} answers")
    return tuple((next(of_prompts), next(of_answers)) for _ in range(n))


def _decks(values: Sequence[int], seed: str) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(values, len(values))


def read(path: Path) -> tuple[list[Call], list[str]]:
    """The requests of a replay file in the order of their times, and sentences about skipped lines.

    Times count from the first request. LabError if no line is valid, or only some have a time.
    """
    calls: list[Call] = []
    bad: dict[str, list[int]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if len(calls) == MOST_CALLS:
                    bad[f"only {MOST_CALLS:,} requests are read"] = [number]
                    break
                try:
                    calls.append(_call(line))
                except ValueError as problem:
                    bad.setdefault(str(problem), []).append(number)
    except OSError as problem:
        raise LabError(f"The file {path} cannot be read: {problem.strerror}.", "Check its name.") from None
    more = {problem: f" and {len(at) - 1:,} more" if len(at) > 1 else "" for problem, at in bad.items()}
    notes = [f"{path.name} line {at[0]}{more[problem]} skipped: {problem}." for problem, at in bad.items()]
    if not calls:
        raise LabError(
            " ".join(notes) or f"The file {path} is empty.",
            'Each line is an object: {"n_prompt": 500, "n_gen": 100, "at_s": 0.25}',
        )
    if 0 < sum(call.at_s is None for call in calls) < len(calls):
        raise LabError(f"Only some lines of {path} have a time.", "Give at_s in all lines, or in none.")
    calls.sort(key=lambda call: call.at_s or 0.0)
    start_s = calls[0].at_s or 0.0
    return [
        Call(call.n_prompt, call.n_gen, None if call.at_s is None else call.at_s - start_s) for call in calls
    ], notes


def _call(line: bytes) -> Call:
    """The request in a line. ValueError says what is wrong with it."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    of_prompt, of_answer, of_time = MOONCAKE if MOONCAKE[0] in fields else OWN
    at = fields.get(of_time)
    if at is not None and (type(at) not in (int, float) or not 0 <= at < 1e15):
        raise ValueError(f"{of_time} is not a time")
    at_s = None if at is None else at / 1000 if of_time == MOONCAKE[2] else float(at)
    return Call(_tokens(fields, of_prompt), _tokens(fields, of_answer), at_s)


def _tokens(fields: dict[str, Any], name: str) -> int:
    n = fields.get(name)
    if type(n) is not int or not 1 <= n <= MOST_TOKENS:
        raise ValueError(f"{name} is {'missing' if n is None else 'not a number of tokens'}")
    return n


def pool(calls: Sequence[Call]) -> tuple[int, ...]:
    """The prompt lengths that represent those of `calls`: all, or quantiles if there are too many."""
    ordered = sorted(call.n_prompt for call in calls)
    if len(set(ordered)) <= MOST_VALUES:
        return tuple(sorted(set(ordered)))
    picked = {ordered[int((i + 0.5) * len(ordered) / MOST_VALUES)] for i in range(MOST_VALUES)}
    return tuple(sorted(picked))


def nearest(values: Sequence[int], n: int) -> int:
    """The index of the value nearest to n."""
    i = bisect_left(values, n)
    return min((j for j in (i - 1, i) if 0 <= j < len(values)), key=lambda j: abs(values[j] - n))


def spread_s(load: Load) -> float:
    """Users of a closed loop begin at random times within this: together they would stay together, in waves."""
    return load.warmup_s / 2 if load.arrivals == CLOSED and load.concurrency != 1 else 0.0


@dataclass(frozen=True)
class Window:
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
    answers: Lengths | None  # None: as in `calls`
    calls: tuple[Call, ...]  # of a file to replay
    max_requests: int
    timeout_s: float
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def n_most(self) -> int:
        """Maximum number of requests."""
        if self.windows[0].times_ns is None:
            return self.max_requests
        return sum(len(window.times_ns or ()) for window in self.windows)

    @property
    def seconds(self) -> float:
        """Duration of all windows, without the ends of their last requests."""
        return sum(window.stop_s for window in self.windows)

    @property
    def longest_answer(self) -> int:
        return max(call.n_gen for call in self.calls) if self.answers is None else max(self.answers.values)

    def order(self, window: Window, n: int) -> tuple[tuple[int, int], ...]:
        """For n requests of a window: the prompt's index, and the tokens to generate. Equal for all arms of a round."""
        if self.answers is None:
            values = self.prompts.values
            calls = self.calls[:n]
            return tuple((nearest(values, call.n_prompt), call.n_gen) for call in calls)
        return drawn(self.prompts, self.answers, min(n, MOST_DRAWN), f"{self.seed} {window.load.round}")


class LoadOptions(Reaching, total=False):
    """The options of a load. Lengths are those of `parse`; the default levels are DEFAULT_CONCURRENCY."""

    concurrency: Numbers | None
    rate: Numbers | None
    arrivals: str
    replay: str | Path | None
    prompt_len: str | int
    gen: str | int
    warmup: float | None
    duration: float | None
    rounds: int | None
    slo: str | Slo | None
    max_requests: int
    seed: int


def make_plan(**asked: Unpack[LoadOptions]) -> LoadPlan:
    """The plan of a load: a closed loop for each of `concurrency`, an open loop for each `rate`, or a replay.

    With `replay` the lengths come from a file, and the times too unless `concurrency` or `rate` is given. LabError for
    invalid options, and if the load could need more than `max_requests`.
    """
    replay, slo, seed = asked.get("replay"), asked.get("slo"), asked.get("seed", 1)
    prompts, answers = parse("--prompt-len", asked.get("prompt_len", 256)), parse("--gen", asked.get("gen", 64))
    lengths, notes, calls = f"{prompts.asked} + {answers.asked} tokens", list[str](), list[Call]()
    if replay is not None:
        path = Path(replay)
        calls, notes = read(path)
        lengths = f"as in {path.name}"
        prompts = Lengths(lengths, pool(calls))
        notes += _rounded(prompts, calls)
    is_replay = bool(calls) and asked.get("concurrency") is None and asked.get("rate") is None
    rounds, warmup_s, duration_s = (1, 0.0, _span_s(calls, replay)) if is_replay else (ROUNDS, WARMUP_S, DURATION_S)
    base = Load(
        arrivals=REPLAY if is_replay else CLOSED,
        round=0,
        warmup_s=_checked("--warmup", asked.get("warmup"), warmup_s, 0, LONGEST_S),
        duration_s=_checked("--duration", asked.get("duration"), duration_s, 0.1, LONGEST_S),
        lengths=lengths,
        seed=seed,
        slo=parse_slo(slo) if isinstance(slo, str) else slo,
    )
    arms = [base] if is_replay else _arms(base, asked)
    rounds = int(_checked("--rounds", asked.get("rounds"), rounds, 1, MOST_ROUNDS))
    max_requests = int(_checked("--max-requests", asked.get("max_requests"), MAX_REQUESTS, 1, MOST_REQUESTS))
    _check_number(arms, rounds, max_requests)
    plan = LoadPlan(
        windows=tuple(_windows(arms, rounds, calls)),
        prompts=prompts,
        answers=None if calls else answers,
        calls=tuple(calls),
        max_requests=max_requests,
        timeout_s=_checked("--timeout", asked.get("timeout"), TIMEOUT_S, 0.1, LONGEST_S),
        seed=seed,
        notes=tuple(notes),
    )
    if plan.n_most > max_requests:
        raise _too_many(f"{plan.n_most:,}", max_requests)
    return plan


def _checked(option: str, asked: float | None, default: float, least: float, most: float) -> float:
    value = default if asked is None else asked
    if not least <= value <= most:  # also for NaN
        raise LabError(f"{option} {value:g} is not possible.", f"Give a number from {least:g} to {most:,g}.")
    return float(value)


def _span_s(calls: Sequence[Call], replay: str | Path | None) -> float:
    """Duration of a replay with its last request; at least 1 s."""
    last_s = calls[-1].at_s
    if last_s is None:
        raise LabError(f"The requests in {replay} have no times.", "Add --concurrency or --rate to use their lengths.")
    return max(1.0, last_s + 0.001)


def _rounded(prompts: Lengths, calls: Sequence[Call]) -> list[str]:
    """A note if the prompts do not have the exact lengths of the file."""
    values = prompts.values
    differences = sorted(abs(values[nearest(values, call.n_prompt)] - call.n_prompt) / call.n_prompt for call in calls)
    if not differences[-1]:
        return []
    median, most = differences[len(differences) // 2], differences[-1]
    return [
        f"The prompts have {len(values)} lengths, the nearest to the file's: median difference {median:.1%}, at most "
        f"{most:.0%}. Answers have the file's lengths."
    ]


def _arms(base: Load, asked: LoadOptions) -> list[Load]:
    """A load for each requested level."""
    concurrency, rate, arrivals = asked.get("concurrency"), asked.get("rate"), asked.get("arrivals", POISSON)
    if concurrency is not None and rate is not None:
        raise LabError("--concurrency (closed loop) and --rate (open loop) exclude each other.", "Give one of them.")
    if rate is None:
        users = _numbers("--concurrency", DEFAULT_CONCURRENCY if concurrency is None else concurrency)
        if wrong := [n for n in users if not (1 <= n <= MOST_AT_ONCE and n == int(n))]:
            raise LabError(
                f"--concurrency {wrong[0]:g} is not possible.", f"Give whole numbers from 1 to {MOST_AT_ONCE}."
            )
        return [dataclasses.replace(base, concurrency=int(n)) for n in users]
    if arrivals not in (POISSON, CONSTANT):
        raise LabError(f"--arrivals {arrivals} is not known.", f"Choose {POISSON} or {CONSTANT}.")
    rates = [_checked("--rate", rate, 0, LEAST_RATE, MOST_RATE) for rate in _numbers("--rate", rate)]
    return [dataclasses.replace(base, arrivals=arrivals, rate=rate) for rate in rates]


def _numbers(option: str, asked: Numbers) -> list[float]:
    """The distinct numbers in a list or in text with commas."""
    parts = asked.split(",") if isinstance(asked, str) else asked if isinstance(asked, Sequence) else [asked]
    try:
        numbers = list(dict.fromkeys(float(part) for part in parts))
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= MOST_ARMS:
        raise LabError(f"{option} {asked} is not a list of numbers.", f"Give up to {MOST_ARMS}, with commas: 1,2,4")
    return numbers


def _check_number(arms: Sequence[Load], rounds: int, most: int) -> None:
    """LabError if a closed loop has fewer requests than users, or an open loop certainly needs more than `most`."""
    if arms[0].arrivals == CLOSED:
        users = max(arm.concurrency or 0 for arm in arms)
        if most // (len(arms) * rounds) < users:
            raise LabError(
                f"{most:,} requests are too few: {len(arms) * rounds} windows of up to {users} users need at least one "
                "for each user.",
                f"Allow more: --max-requests {10 * users * len(arms) * rounds}",
            )
        return
    needed = sum((arm.rate or 0) * REST * (arm.warmup_s + arm.duration_s) for arm in arms) * rounds
    if needed > most + 10 * math.sqrt(needed):
        raise _too_many(f"about {needed:,.0f}", most)


def _too_many(needed: str, most: int) -> LabError:
    return LabError(
        f"This load could need {needed} requests (including those after each window, until its last request ends), "
        f"but --max-requests is {most:,}.",
        "Increase --max-requests, or use lower rates, a shorter --duration or fewer --rounds.",
    )


def _windows(arms: Sequence[Load], rounds: int, calls: Sequence[Call]) -> Iterator[Window]:
    """All arms in each round, in random order."""
    for n in range(rounds):
        for arm in random.Random(f"{arms[0].seed} {n}").sample(arms, len(arms)):
            load = dataclasses.replace(arm, round=n)
            times_s = _times_s(load, calls)
            yield Window(load, None if times_s is None else tuple(round(at_s * 1e9) for at_s in times_s))


def _times_s(load: Load, calls: Sequence[Call]) -> Iterator[float] | None:
    """The times of an open loop's requests; None for a closed loop."""
    end_s = REST * (load.warmup_s + load.duration_s)
    rng = random.Random(f"{load.seed} {load.rate} {load.round}")
    rate = load.rate or 0.0
    if load.arrivals == CLOSED:
        return None
    if load.arrivals == REPLAY:
        times_s: Iterator[float] = (call.at_s or 0.0 for call in calls)
    elif load.arrivals == CONSTANT:
        times_s = (i / rate for i in itertools.count())
    else:
        times_s = itertools.accumulate(rng.expovariate(rate) for _ in itertools.repeat(None))
    return itertools.takewhile(lambda at_s: at_s < end_s, times_s)
