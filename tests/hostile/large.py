"""Results files that are large, or small and want much work, for a bound on time and memory."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import random
from collections.abc import Callable, Iterator
from typing import Any

from lab.core.lines import to_json
from lab.core.request import TEXT, Events, Usage
from tests.support.records import MACHINE, MODEL, make_record, make_run
from tests.support.requests import make_request, make_request_record

N_LAYERS = 2_000  # as many as a line may have
N_EVENTS = 1_000


def sessions(n: int) -> Iterator[Any]:
    """One setup, measured again and again."""
    for number in range(n):
        yield make_record(make_run(20, 3), session=f"s{number}")


def models(n: int) -> Iterator[Any]:
    for number in range(n):
        model = dataclasses.replace(MODEL, name=f"m{number}")
        yield make_record(make_run(20, 3), session=f"s{number}", model=model)


def machines(n: int) -> Iterator[Any]:
    for number in range(n):
        machine = dataclasses.replace(MACHINE, cpu=f"CPU {number}")
        yield make_record(make_run(20, 3), session=f"s{number}", machine=machine)


def lengths(n: int) -> Iterator[Any]:
    for number in range(n):
        yield make_record(make_run(20 + number, 3))


def answers(n: int) -> Iterator[Any]:
    """One setup with as many numbers of generated tokens as runs."""
    for number in range(n):
        yield make_record(make_run(20, 3 + number % 200, number // 200))


def variants(n: int) -> Iterator[Any]:
    """A trial of many variants."""
    for number in range(n):
        yield make_record(make_run(20, 3, variant=f"v{number}", block=number % 7))


def requests(n: int) -> Iterator[Any]:
    for number in range(n):
        yield dataclasses.replace(make_request_record(), session=f"s{number}")


def lengths_of_requests(n: int) -> Iterator[Any]:
    for number in range(n):
        request = make_request()
        asked = dataclasses.replace(request.asked, n_prompt=number + 1)
        yield make_request_record(dataclasses.replace(request, asked=asked))


def counts(n: int) -> Iterator[Any]:
    """Requests whose events claim as many tokens as an event may have."""
    for number in range(n):
        arrive_ns = tuple(10**7 * (i + 1) for i in range(N_EVENTS))
        n_tokens = (10_000_000,) * N_EVENTS
        events = Events(arrive_ns, (9,) * N_EVENTS, (TEXT,) * N_EVENTS, n_tokens)
        usage = Usage(prompt_tokens=10, completion_tokens=10_000_000, cached_tokens=0)
        request = make_request(events=events, usage=usage)
        asked = dataclasses.replace(request.asked, n_gen=10_000_000, repeat=number)
        yield make_request_record(dataclasses.replace(request, asked=asked))


def long_answers(n: int) -> Iterator[Any]:
    """Runs that failed, and say that they were to generate as many tokens as a line may name."""
    for number in range(n):
        yield make_record(make_run(20, 3, number))
        failed = make_run(20, 3, number, status="crashed", error="exit status 1")
        yield make_record(dataclasses.replace(failed, n_gen=10_000_000))


def windows(n: int) -> Iterator[Any]:
    """A model whose layers all differ in what they attend to."""
    drawn = random.Random(1)
    for number in range(n):
        model = dataclasses.replace(
            MODEL,
            n_layer=N_LAYERS,
            windows=column(drawn, 10**6),
            heads=column(drawn, 10**4),
            heads_kv=column(drawn, 10**4),
        )
        yield make_record(make_run(20 + number, 3), model=model)


def column(drawn: random.Random, most: int) -> tuple[int, ...]:
    """A number for each layer."""
    return tuple(drawn.randrange(1, most) for _ in range(N_LAYERS))


def long_texts(n: int) -> Iterator[Any]:
    """Names of as many letters as a text may have, each another one."""
    for number in range(n):
        model = dataclasses.replace(MODEL, name=f"{number} {'name ' * 1_900}")
        yield make_record(make_run(20, 3), session=f"s{number}", model=model)


CASES: dict[str, tuple[Callable[[int], Iterator[Any]], int]] = {
    # What the file has, and how many of them.
    "1 session": (sessions, 1),
    "1,000 sessions": (sessions, 1_000),
    "3,000 sessions": (sessions, 3_000),
    "1,000 models": (models, 1_000),
    "1,000 machines": (machines, 1_000),
    "1,000 prompt lengths": (lengths, 1_000),
    "1,000 runs of 200 answers": (answers, 1_000),
    "1,000 variants": (variants, 1_000),
    "1,000 sessions of requests": (requests, 1_000),
    "1,000 prompt lengths of requests": (lengths_of_requests, 1_000),
    "requests with huge counts": (counts, 20),
    "failed runs with a huge n_gen": (long_answers, 50),
    "windows of 2,000 layers": (windows, 20),
    "100 names of 9,500 letters": (long_texts, 100),
}
PAGES: dict[str, bytes] = {
    "a page of 400,000 unreadable lines": b"x\n" * 400_000,
    "a page of 400,000 kinds": b"".join(
        b'{"schema":4,"kind":"%d"}\n' % number for number in range(400_000)
    ),
}


def content(name: str) -> bytes:
    """The file of a case; a page for those of PAGES."""
    if name in PAGES:
        return page_of(PAGES[name] + to_json(make_record()).encode() + b"\n")
    generate, n = CASES[name]
    return b"".join(to_json(line).encode() + b"\n" for line in generate(n))


def page_of(text: bytes) -> bytes:
    """A page with these lines as its records."""
    packed = base64.b64encode(gzip.compress(text))
    return b'<script id="mini-lab-records">' + packed + b"</script>"
