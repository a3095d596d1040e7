"""Hand-made requests to a server, with exact times."""

from __future__ import annotations

import dataclasses
from typing import Any

from lab.core.record import OK, Noise, NoiseReading, NoiseSamples
from lab.core.request import (
    CHAT,
    DONE,
    OTHER,
    ROLE,
    TEXT,
    USAGE,
    YES,
    Asked,
    Capability,
    Endpoint,
    Events,
    Request,
    RequestRecord,
    ServerSettings,
    Usage,
)
from tests.support.records import MACHINE

KINDS = (ROLE, TEXT, TEXT, TEXT, OTHER, USAGE, DONE)
ARRIVE_NS = (5, 100, 130, 190, 191, 191, 192)


def make_request(**changes: Any) -> Request:
    """A role at 5 ns, text at 100 (2 tokens), 130 (1), 190 (3), and the end."""
    request = Request(
        asked=Asked(n_prompt=10, n_gen=6),
        started_at="2026-01-01T00:00:00Z",
        sent_ns=1000,
        status=OK,
        events=Events(ARRIVE_NS, (9,) * 7, KINDS, (0, 2, 1, 3, 0, 0, 0)),
        usage=Usage(
            prompt_tokens=10,
            completion_tokens=6,
            cached_tokens=0,
        ),
    )
    return dataclasses.replace(request, **changes)


def make_request_record(request: Request | None = None) -> RequestRecord:
    endpoint = Endpoint(
        url="http://127.0.0.1:1/v1",
        api=CHAT,
        server="llama-server",
        capabilities=(Capability("streaming", YES, "seen"),),
        accepted=("ignore_eos",),
        settings=ServerSettings(n_slots=4, n_ctx=4096),
    )
    return RequestRecord(
        session="s",
        machine=MACHINE,
        endpoint=endpoint,
        model="tiny",
        request=request or make_request(),
    )


def noise_of(others_ms: int) -> Noise:
    """Two seconds in which other programs took this much of each half."""
    at_ms = (500, 1000, 1500, 2000)
    samples = NoiseSamples(at_ms, (others_ms,) * 4, (0,) * 4)
    return Noise(NoiseReading(), NoiseReading(), samples)


MS = 1_000_000


def served(
    n_prompt: int = 100,
    repeat: int = 0,
    first_ms: float = 50,
    gap_ms: float = 10,
    n_gen: int = 5,
    n_tokens: tuple[int, ...] | None = (1, 1, 1, 1, 1),
    session: str = "s",
    cached: int | None = 0,
    kinds: tuple[str, ...] = (TEXT,) * 5,
    **changes: Any,
) -> RequestRecord:
    """A request whose five events come at first_ms and then after every gap_ms, and its counts at
    the end."""
    arrive = [round((first_ms + i * gap_ms) * MS) for i in range(5)]
    counted = None if n_tokens is None else (*n_tokens, 0)
    request = make_request(
        asked=Asked(
            n_prompt=n_prompt,
            n_prompt_counted=n_prompt,
            n_gen=n_gen,
            repeat=repeat,
        ),
        events=Events(
            (*arrive, arrive[-1]),
            (9,) * 6,
            (*kinds, USAGE),
            counted,
        ),
        usage=Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n_gen,
            cached_tokens=cached,
        ),
    )
    request = dataclasses.replace(request, **changes)
    return dataclasses.replace(make_request_record(request), session=session)


def request_session(
    first_ms: float = 50, gap_ms: float = 10, name: str = "s", n: int = 3
) -> list[RequestRecord]:
    """Requests of 10 and 100 tokens; TTFT is 10 ms more for each 10 tokens."""
    return [
        served(n_prompt, repeat, first_ms + n_prompt + repeat, gap_ms, session=name)
        for repeat in range(n)
        for n_prompt in (10, 100)
    ]
