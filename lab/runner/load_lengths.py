"""Lengths of prompts and answers of a load: one, a distribution, or those of a file.

A distribution becomes a pool of at most MOST_VALUES equally likely values, its quantiles: so a few prompts, each sized
exactly, have its shape. Requests draw from shuffled decks of the pool: after each deck, all values came equally often.
Prompts and answers are drawn apart from each other.
"""

from __future__ import annotations

import json
import math
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from lab.errors import LabError

MOST_VALUES = 32
MOST_TOKENS = 10_000_000
MOST_CALLS = 200_000
"""Requests that are read from a file."""

OWN = ("n_prompt", "n_gen", "at_s")
MOONCAKE = ("input_length", "output_length", "timestamp")
"""Names in files to replay: the lab's, and those of the traces of Mooncake (FAST '25; timestamp in milliseconds).

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces."""


@dataclass(frozen=True)
class Lengths:
    """A length, or a distribution of lengths: how it was written, and its pool of values in ascending order."""

    words: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a file to replay: tokens of the prompt and of the answer, and when it came."""

    n_prompt: int
    n_gen: int
    at_s: float | None


def parse(option: str, text: str | int) -> Lengths:
    """`512`, `100-1000` (all lengths between alike), `normal:MEAN,SD`, `lognormal:MEDIAN,SIGMA` (of the logarithm).

    LabError for anything else, and for lengths below 1.
    """
    words = str(text).strip()
    hint = f"Write {option} as 512, 100-1000, normal:500,100 or lognormal:300,0.8 (median, sigma of the logarithm)."
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", words):
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise LabError(f"{option} {words} begins above its end.", hint)
        values = _uniform(low, high)
    elif match := re.fullmatch(r"(normal|lognormal):(\d{1,9}(?:\.\d+)?),(\d{1,9}(?:\.\d+)?)", words):
        middle, spread = float(match[2]), float(match[3])
        if middle <= 0 or (match[1] == "lognormal" and spread > 10):
            raise LabError(f"{option} {words} is not possible.", hint)
        normal = [spread * NormalDist().inv_cdf((i + 0.5) / MOST_VALUES) for i in range(MOST_VALUES)]
        values = [round(middle + z if match[1] == "normal" else middle * math.exp(z)) for z in normal]
    else:
        raise LabError(f"{option} {words} is not understood.", hint)
    if not 1 <= min(values) <= max(values) <= MOST_TOKENS:
        raise LabError(f"{option} {words} has lengths from {min(values):,} to {max(values):,} tokens.", hint)
    return Lengths(words, tuple(values) if len(set(values)) > 1 else (values[0],))


def _uniform(low: int, high: int) -> list[int]:
    n = high - low + 1
    if n <= MOST_VALUES:
        return list(range(low, high + 1))
    return [low + math.floor((i + 0.5) * n / MOST_VALUES) for i in range(MOST_VALUES)]


def drawn(prompts: Lengths, answers: Lengths, n: int, seed: str) -> tuple[tuple[int, int], ...]:
    """For n requests: which value of `prompts` (its index), and how many tokens to generate."""
    of_prompts = _decks(range(len(prompts.values)), f"{seed} prompts")
    of_answers = _decks(answers.values, f"{seed} answers")
    return tuple((next(of_prompts), next(of_answers)) for _ in range(n))


def _decks(values: Sequence[int], seed: str) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(values, len(values))


def read(path: Path) -> tuple[list[Call], list[str]]:
    """The requests of a file to replay in the order of their times, and sentences on the lines that are left out.

    Times count from the first one. LabError where no line is good, or only some have a time.
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
    notes = [_at_lines(path, numbers, problem) for problem, numbers in bad.items()]
    if not calls:
        raise LabError(
            " ".join(notes) or f"The file {path} is empty.",
            'Each line is an object: {"n_prompt": 500, "n_gen": 100, "at_s": 0.25}',
        )
    if 0 < sum(call.at_s is None for call in calls) < len(calls):
        raise LabError(f"Only some lines of {path} have a time.", "Give each of them at_s, or none.")
    calls.sort(key=lambda call: call.at_s or 0.0)
    start_s = calls[0].at_s or 0.0
    return [
        Call(call.n_prompt, call.n_gen, None if call.at_s is None else call.at_s - start_s) for call in calls
    ], notes


def _at_lines(path: Path, numbers: Sequence[int], problem: str) -> str:
    more = f" and {len(numbers) - 1:,} more" if len(numbers) > 1 else ""
    return f"{path.name} line {numbers[0]}{more} skipped: {problem}."


def _call(line: bytes) -> Call:
    """ValueError says what is wrong with a line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    of_prompt, of_answer, of_time = MOONCAKE if MOONCAKE[0] in fields else OWN
    at = fields.get(of_time)
    if at is not None and (type(at) not in (int, float) or not 0 <= at < 1e15):
        raise ValueError(f"{of_time} is no time")
    at_s = None if at is None else at / 1000 if of_time == MOONCAKE[2] else float(at)
    return Call(_tokens(fields, of_prompt), _tokens(fields, of_answer), at_s)


def _tokens(fields: dict[str, Any], name: str) -> int:
    n = fields.get(name)
    if type(n) is not int or not 1 <= n <= MOST_TOKENS:
        raise ValueError(f"{name} is {'missing' if n is None else 'no number of tokens'}")
    return n


def pool(calls: Sequence[Call]) -> tuple[int, ...]:
    """The lengths of the prompts that stand for those of `calls`: all, or the quantiles where they are too many."""
    ordered = sorted(call.n_prompt for call in calls)
    if len(set(ordered)) <= MOST_VALUES:
        return tuple(sorted(set(ordered)))
    picked = {ordered[int((i + 0.5) * len(ordered) / MOST_VALUES)] for i in range(MOST_VALUES)}
    return tuple(sorted(picked))


def nearest(values: Sequence[int], n: int) -> int:
    """The index of the value that is nearest to n."""
    i = bisect_left(values, n)
    return min((j for j in (i - 1, i) if 0 <= j < len(values)), key=lambda j: abs(values[j] - n))
