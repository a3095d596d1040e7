"""The parts of a server that the lab measured: what it adds to the engine, by its own times."""

from __future__ import annotations

import math
import statistics

from lab.core import request_times
from lab.core.lists import plural
from lab.core.request import Request
from lab.core.stats import mean_half_width
from lab.features.why.figure import Figure
from lab.features.why.parts import (
    ARITHMETIC,
    FEWEST,
    GapPart,
    Pair,
    equal,
    unknown,
)
from lab.show.wording import seconds

HTTP = "HTTP"
HTTP_OF_PREFILL = "HTTP, template and tokenizing"
SAMPLING_OF_SERVER = "sampling"
SLOTS = "slots"
CACHE = "cache"
MOST_CACHED = 0.99


def of_server(pair: Pair) -> list[GapPart]:
    """The parts of a server against an engine; none for two engines or two servers."""
    served = [letter for letter, figure in pair.sides if figure.requests]
    if len(served) != 1:
        return []
    letter = served[0]
    figure = dict(pair.sides)[letter]
    sign = 1 if letter == pair.letters[1] else -1
    return [
        http(figure, letter, sign),
        sampling(pair, figure),
        slots(figure, letter),
        cache(figure, letter, sign),
    ]


def http(figure: Figure, letter: str, sign: int) -> GapPart:
    """The client's time against the server's own, request by request."""
    name = HTTP
    times_of = of_decode
    if figure.is_prefill:
        name = HTTP_OF_PREFILL
        times_of = of_prefill
    at_client = list[float]()
    at_server = list[float]()
    logs = list[float]()
    for record in figure.requests:
        times = times_of(record.request)
        if times:
            client_s, server_s = times
            at_client.append(client_s)
            at_server.append(server_s)
            logs.append(math.log(client_s / server_s))
    if len(logs) < FEWEST:
        reason = (
            f"only {plural(len(logs), 'request')} with times of {letter} itself (--budget)"
        )
        return unknown(name, reason)
    client_s = statistics.median(at_client)
    server_s = statistics.median(at_server)
    reason = f"{seconds(client_s)} at the client, {seconds(server_s)} in {letter}"
    how = f"from {letter}'s own times, {len(logs)} requests"
    return GapPart(name, sign * statistics.fmean(logs), mean_half_width(logs), how, reason)


def of_prefill(request: Request) -> tuple[float, float] | None:
    """Seconds to the first token at the client, and of the prompt by the server's own times."""
    ttft_ns = request_times.figures(request).ttft_ns
    timings = request_times.server_timings(request)
    if not ttft_ns or timings is None or not timings.prompt_ms:
        return None
    return ttft_ns / 1e9, timings.prompt_ms / 1e3


def of_decode(request: Request) -> tuple[float, float] | None:
    """Seconds per token after the first at the client, and by the server's own times."""
    tpot_ns = request_times.figures(request).tpot_ns
    timings = request_times.server_timings(request)
    if not tpot_ns or timings is None or not timings.gen_ms or (timings.n_gen or 0) < 2:
        return None
    return tpot_ns / 1e9, timings.gen_ms / 1e3 / ((timings.n_gen or 0) - 1)


def sampling(pair: Pair, figure: Figure) -> GapPart:
    """Equal if a side is the engine and all requests were greedy, as the lab's runs are."""
    is_greedy = all(record.request.asked.temperature == 0 for record in figure.requests)
    has_engine = bool(pair.fast.records or pair.slow.records)
    if is_greedy and has_engine:
        return equal(SAMPLING_OF_SERVER)
    return unknown(SAMPLING_OF_SERVER, "not given for both", lacking="AB")


def slots(figure: Figure, letter: str) -> GapPart:
    """Equal if the server has one slot: more of them share its cache."""
    reported = figure.requests[0].endpoint.settings
    if reported is None or reported.n_slots is None:
        return unknown(SLOTS, f"{letter} does not report them; one request ran at a time")
    if reported.n_slots == 1:
        return equal(SLOTS)
    return unknown(SLOTS, f"{reported.n_slots} in {letter}; one request ran at a time")


def cache(figure: Figure, letter: str, sign: int) -> GapPart:
    """The prompt tokens that the server did not process."""
    if not figure.is_prefill:
        return equal(CACHE)
    counts = list[int]()
    for record in figure.requests:
        n_cached = request_times.n_cached(record.request)
        if n_cached is None:
            return unknown(CACHE, f"{letter} does not report cached tokens")
        counts.append(n_cached)
    if not figure.n_prompt:
        return unknown(CACHE, f"{letter} does not report prompt tokens")
    mean_cached = statistics.fmean(counts)
    log = math.log1p(-min(mean_cached / figure.n_prompt, MOST_CACHED))
    reason = f"{mean_cached:,.0f} of {plural(figure.n_prompt, 'token')} in {letter}"
    return GapPart(CACHE, sign * log, 0.0, ARITHMETIC, reason)
