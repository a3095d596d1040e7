"""A server against the engine: measured here, and taken apart by the times that it reports."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.core import request_times, stats
from lab.core.lists import plural
from lab.core.request import Request
from lab.errors import LabError
from lab.features.serve import access, through_server
from lab.features.serve.servers import connect
from lab.features.why.parts import EQUAL, FEWEST, Part, length
from lab.features.why.pasted import Setup
from lab.features.why.trial import limited
from lab.runner.progress import ShowStatus, Status
from lab.show.wording import seconds

HTTP, TEXT, SAMPLING, SLOTS, CACHE = "HTTP", "template and tokenizing", "sampling", "slots", "cache"
REPEATS, PINGS, SHORTEST, LONGEST = 10, 5, 100, 64


def measured(
    like: Setup, url: str, model: str | None, budget_s: float, out: Path, watch: ShowStatus, **how: Any
) -> tuple[Path, float]:
    """Send requests of the length of `like` until the budget is spent. Returns their file, and the round trip of HTTP.

    LabError where no request was answered in that time.
    """
    plan = through_server.make_plan([max(SHORTEST, length(like))], max(2, min(like.n_gen or LONGEST, LONGEST)), REPEATS)
    path, trips = None, list[float]()
    with limited(watch, budget_s) as look, connect(url, model, lambda words: look(Status(words)), **how) as server:
        for _ in range(PINGS):
            began = time.monotonic()
            access.ask(server.access, f"{server.access.interface(server.endpoint.api).rpartition('/v1')[0]}/v1/models")
            trips.append(time.monotonic() - began)
        plan, path = through_server.fitted(plan, server), server.new_file(out)
        for _ in through_server.execute(plan, server, path, look):
            pass
    if path is None or not path.exists():
        raise LabError(f"{url} answered no request within {seconds(budget_s)}.", "Give more time: --budget 5min")
    return path, statistics.median(trips)


def parts(sides: Mapping[str, Setup]) -> list[Part]:
    """What a server adds to the engine; no part for two engines or two servers."""
    served = [letter for letter, one in sides.items() if one.requests]
    if len(served) != 1:
        return []
    (letter,), slow = served, list(sides)[1]
    one, other, sign = sides[letter], *(each for x, each in sides.items() if x != letter), 1 if letter == slow else -1
    requests, endpoint = [record.request for record in one.requests], one.requests[0].endpoint
    pairs = [pair for request in requests if (pair := _client_and_server_s(request, one.is_prefill))]
    trip_s = one.round_trip_s if one.is_prefill else 0.0
    made = list[Part]()
    for name, logs, words in (
        (
            (HTTP, [math.log(client / (client - trip_s)) for client, _ in pairs if client > trip_s], "a round trip"),
            (
                TEXT,
                [math.log((client - trip_s) / own) for client, own in pairs if client > trip_s],
                "before the prompt",
            ),
        )
        if one.is_prefill
        else ((HTTP, [math.log(client / own) for client, own in pairs], "streaming"),)
    ):
        if len(logs) < FEWEST:
            n_timed = plural(len(logs), "request")
            made.append(Part(name, words=f"only {n_timed} with times of {letter} itself (--budget)"))
            continue
        half, how = stats.mean_half_width(logs, stats.CONFIDENCE), f"from {letter}'s own times, {len(logs)} requests"
        client_s, own_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        words = f"{seconds(client_s)} at the client, {seconds(own_s)} in {letter} ({words})"
        made.append(Part(name, sign * statistics.fmean(logs), half, how, words))
    is_greedy = bool(other.records) and all(request.asked.temperature == 0 for request in requests)
    words = "both choose the likeliest token" if is_greedy else "how both choose a token is not known"
    made.append(Part(SAMPLING, how=EQUAL if is_greedy else Part.how, words=words))
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    words = f"{n_slots or 'an unknown number of'} slots in {letter}; one request ran at a time"
    made.append(Part(SLOTS, how=EQUAL if n_slots == 1 else Part.how, words="" if n_slots == 1 else words))
    cached = [request.usage.cached_tokens for request in requests if request.usage]
    if not one.is_prefill:
        return [*made, Part(CACHE, how=EQUAL)]
    if not cached or None in cached or not one.n_prompt:
        return [*made, Part(CACHE, words=f"{letter} does not report cached tokens")]
    n = statistics.fmean(n for n in cached if n is not None)
    words = f"{n:,.0f} of {one.n_prompt:,} tokens came from {letter}'s cache" if n else ""
    return [
        *made,
        Part(CACHE, sign * math.log1p(-min(n / one.n_prompt, 0.99)), 0.0, "arithmetic" if n else EQUAL, words),
    ]


def _client_and_server_s(request: Request, is_prefill: bool) -> tuple[float, float] | None:
    """Seconds of a prompt, or of a token, at the client and by the server; None where the server does not say."""
    timings = request.timings
    figures = request_times.figures(request)
    client_ns = figures.ttft_ns if is_prefill else figures.tpot_ns
    own_ms = timings and (timings.prompt_ms if is_prefill else timings.gen_ms)
    n = 1 if is_prefill else ((timings.n_gen if timings else None) or 0) - 1
    return (client_ns / 1e9, own_ms / 1e3 / n) if client_ns and own_ms and n > 0 else None
