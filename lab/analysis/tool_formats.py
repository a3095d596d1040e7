"""Requests as other tools would have reported them: the same events, by the tools' definitions and field names.

Each tool gives its figures in a JSON document for each load; py, py and py
say by which definitions, and where those were read. What a tool would give as 0 for want of a value is None here.

A tool counts every request that is no warm-up, also one whose prompt came from a cache.

What the definitions of other tools share: the requests of one of their runs, its time, and what is counted.

AIPerf's figures, from a request's events.

Definitions: ai-dynamo/aiperf, src/aiperf/metrics/types/*.py (one file for each figure) and, for what counts as content,
src/aiperf/endpoints/openai_chat.py and openai_completions.py; percentiles: src/aiperf/metrics/metric_dicts.py. Version
0.13.0, the document profile_export_aiperf.json, with the server's counts of tokens (--use-server-token-count).

- time_to_first_token: the first response with text, reasoning or a tool call - the sending; time_to_first_output_token
  the first that is not reasoning only; time_to_second_token the gap between the first two responses, whatever is in
  them.
- request_latency: the last response with content - the sending.
- inter_token_latency: (request_latency - time_to_first_token) / (n - 1). With --per-chunk-usage it would subtract the
  tokens of the first response; that is the lab's TPOT.
- inter_chunk_latency: the gaps between responses with content; one list of all requests.
- output_token_throughput_per_user: 1 / inter_token_latency; e2e_output_token_throughput: n / request_latency;
  prefill_throughput_per_user: tokens of the prompt / time_to_first_token.
- Throughput: over benchmark_duration, from the first sending to the end of the last request.

GuideLLM's figures, from a request's events.

Definitions: vllm-project/guidellm, src/guidellm/schemas/base/request_stats.py (figures of a request),
src/guidellm/backends/openai/http.py and request_handlers.py (what is timed), src/guidellm/benchmark/schemas/metrics.py
and src/guidellm/schemas/base/statistics.py (summaries). Version 0.8.1.

- time_to_first_token_ms: the first line with text, reasoning or a tool call - the first write of the request;
  time_to_first_output_token_ms: the first that is not reasoning only.
- request_latency, in seconds: the end of the stream - the first write.
- time_per_output_token_ms: (the last such line - the first write) / n, so TTFT is in it. Weighted by n.
- inter_token_latency_ms: the mean of a request, (last - first) / (n - 1), also where several tokens came first.
  Weighted by n - 1. Gaps between tokens are not kept, so neither a stall nor a bundle can be seen in it.
- n by the usage, else one token for each line with content.
- Percentiles are the smallest value that so many weights do not exceed; standard deviations those of the population.
- Rates: of them only the means are given here, counts over the time from the first sending to the last end.

The figures of `vllm bench serve`, from a request's events.

Definitions: vllm-project/vllm, vllm/benchmarks/lib/endpoint_request_func.py (what is timed) and
vllm/benchmarks/serve.py (`calculate_metrics`, the names of the JSON), version 0.33.0.

- ttft: the first chunk that it takes for a token - the sending. In a chat that is content, reasoning (under the name
  `reasoning` only; a record does not say which name there was), a tool call, or an empty content without a role; in
  completions any chunk with a choice, also an empty one at the beginning or the one with the reason of the end.
- itl: the time between such chunks, however many tokens are in them. One list of all requests.
- e2el: the last such chunk - the sending.
- tpot: (e2el - ttft) / (n - 1), also where several tokens came in the first chunk. n by the usage.
- Throughput: requests or tokens over the time from the first sending to the last end. Percentiles are linear between
  ranks, standard deviations those of the population.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import CHAT, CLOSED, GENERATED, OTHER, Endpoint, Request, RequestRecord
from lab.errors import LabError

NS_PER_MS, NS_PER_S = 1e6, 1e9


@dataclass(frozen=True)
class Group:
    """The requests that a tool would have measured in one run: one load, or one pair of lengths without a load."""

    endpoint: Endpoint
    model: str
    requests: tuple[Request, ...]

    @property
    def ok(self) -> tuple[Request, ...]:
        return tuple(request for request in self.requests if request.status == OK)

    @property
    def n_failed(self) -> int:
        return len(self.requests) - len(self.ok)

    @property
    def n_at_once(self) -> int | None:
        """Users of a closed loop; 1 without a load; None in an open loop."""
        load = self.requests[0].asked.load
        return 1 if load is None else load.concurrency if load.arrivals == CLOSED else None

    @property
    def rate(self) -> float | None:
        """Requests per second of an open loop, as intended."""
        load = self.requests[0].asked.load
        return None if load is None else load.rate


def groups(records: Iterable[RequestRecord]) -> list[Group]:
    """The requests by session, server, model, interface and load (without a load: by lengths).

    Warm-ups are left out, and of a load what was due before or after its steady window.
    """
    collected: dict[object, list[RequestRecord]] = {}
    for record in records:
        asked = record.request.asked
        if not asked.warmup and _is_inside(record.request):
            work = (asked.n_prompt, asked.n_gen) if asked.load is None else (asked.load.words, asked.load.lengths)
            key = record.session, record.endpoint.url, record.endpoint.api, record.model, asked.load is None, work
            collected.setdefault(key, []).append(record)
    return [Group(rows[0].endpoint, rows[0].model, tuple(row.request for row in rows)) for rows in collected.values()]


def _is_inside(request: Request) -> bool:
    """Whether a request was due inside the steady window of its load, if it is of one."""
    load, due_ns = request.asked.load, request.sent_ns if request.scheduled_ns is None else request.scheduled_ns
    if load is None or due_ns is None:
        return True
    return 0 <= due_ns - load.warmup_s * NS_PER_S < load.duration_s * NS_PER_S


def seconds(requests: Sequence[Request], end_ns: Callable[[Request], int | None]) -> float | None:
    """How long the requests took, from the first sending to the last end (`end_ns`, from the sending).

    The rounds of a load are added up; without a load the requests ran one after the other. None where no end is known.
    """
    spans: dict[object, list[tuple[int, int]]] = {}
    for number, request in enumerate(requests):
        ended_ns, load = end_ns(request), request.asked.load
        if ended_ns is not None:
            begun_ns = 0 if load is None else request.sent_ns or 0
            spans.setdefault(number if load is None else (load.round,), []).append((begun_ns, begun_ns + ended_ns))
    total_ns = sum(max(end for _, end in span) - min(begin for begin, _ in span) for span in spans.values())
    return total_ns / NS_PER_S if spans else None


def per_second(amount: float | None, of_seconds: float | None) -> float | None:
    """amount / seconds; None where one of them is not known."""
    return None if amount is None or not of_seconds else amount / of_seconds


def total(counts: Sequence[int | None]) -> int | None:
    """The sum; None where there is nothing, or one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def n_prompt(request: Request) -> int | None:
    """Tokens of the prompt by the server's usage, the template of a chat included."""
    return request.usage.prompt_tokens if request.usage else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ordered values, linear between the two nearest ranks, as numpy's default."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


AIPERF_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def aiperf_summary(group: Group) -> dict[str, Any]:
    """The JSON document of a run. A figure that no request has is left out, as AIPerf does."""
    requests = [request for request in group.ok if times.generated(request)]
    duration = seconds(requests, times.e2e_ns)
    n_input = total([n_prompt(request) for request in requests])
    n_output = total([times.n_generated(request) for request in requests])
    n_failed = len(group.requests) - len(requests)
    totals = {
        "request_count": ("requests", len(requests)),
        "error_request_count": ("requests", n_failed),
        "request_throughput": ("requests/sec", per_second(len(requests), duration)),
        "output_token_throughput": ("tokens/sec", per_second(n_output, duration)),
        "input_token_throughput": ("tokens/sec", per_second(n_input, duration)),
        "total_token_throughput": ("tokens/sec", per_second(total([n_input, n_output]), duration)),
        "total_isl": ("tokens", n_input),
        "total_osl": ("tokens", n_output),
        "benchmark_duration": ("sec", duration),
    }
    return {
        "input_config": _config(group),
        "start_time": group.requests[0].started_at,
        **{tag: {"unit": unit, "avg": value} for tag, (unit, value) in totals.items() if value is not None},
        **{tag: _spread(unit, values) for tag, (unit, values) in _columns(requests).items() if values},
    }


def _config(group: Group) -> dict[str, Any]:
    endpoint = {"urls": [group.endpoint.url], "type": group.endpoint.api, "streaming": True}
    phase = {"requests": len(group.requests), "concurrency": group.n_at_once, "rate": group.rate}
    return {"models": {"items": [{"name": group.model}]}, "endpoint": endpoint, "phases": [phase]}


def aiperf_inter_token_ns(request: Request) -> float | None:
    """(last content - first content) / (n - 1). None where n is not known or below 2."""
    n, first_ns, last_ns = times.n_generated(request), times.ttft_ns(request), times.e2e_ns(request)
    return None if n is None or n < 2 or first_ns is None or last_ns is None else (last_ns - first_ns) / (n - 1)


def _columns(requests: Sequence[Request]) -> dict[str, tuple[str, list[float]]]:
    """The values of each figure that has one value for a request, or several (inter_chunk_latency)."""

    def known(values: Sequence[float | None], divisor: float = 1.0) -> list[float]:
        return [value / divisor for value in values if value is not None]

    gaps_ns = [times.chunk_gaps_ns(request) for request in requests]
    itl_ns = [aiperf_inter_token_ns(request) for request in requests]
    lengths = [times.n_generated(request) for request in requests]
    e2e_ns = [times.e2e_ns(request) for request in requests]
    ttft_ns = [times.ttft_ns(request) for request in requests]
    prompts = [n_prompt(request) for request in requests]
    cached = [request.usage.cached_tokens if request.usage else None for request in requests]
    ms, tokens, rate = "ms", "tokens", "tokens/sec/user"
    return {
        "time_to_first_token": (ms, known(ttft_ns, NS_PER_MS)),
        "time_to_second_token": (ms, known([gaps[0] for gaps in gaps_ns if gaps], NS_PER_MS)),
        "time_to_first_output_token": (ms, known([times.first_output_ns(one) for one in requests], NS_PER_MS)),
        "request_latency": (ms, known(e2e_ns, NS_PER_MS)),
        "inter_token_latency": (ms, known(itl_ns, NS_PER_MS)),
        "inter_chunk_latency": (ms, known([gap for gaps in gaps_ns for gap in gaps], NS_PER_MS)),
        "output_token_throughput_per_user": (rate, [NS_PER_S / ns for ns in itl_ns if ns]),
        "e2e_output_token_throughput": (rate, _rates(lengths, e2e_ns)),
        "prefill_throughput_per_user": (rate, _rates(prompts, ttft_ns)),
        "output_sequence_length": (tokens, known(lengths)),
        "input_sequence_length": (tokens, known(prompts)),
        "usage_prompt_cache_read_tokens": (tokens, known(cached)),
    }


def _rates(counts: Sequence[int | None], times_ns: Sequence[int | None]) -> list[float]:
    return [NS_PER_S * n / ns for n, ns in zip(counts, times_ns, strict=True) if n is not None and ns]


def _spread(unit: str, values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    percentiles = {f"p{percent}": quantile(ordered, percent / 100) for percent in AIPERF_PERCENTILES}
    ends = {"min": ordered[0], "max": ordered[-1], "std": statistics.pstdev(ordered)}
    return {"unit": unit, "avg": statistics.fmean(ordered), **percentiles, **ends, "count": len(ordered)}


GUIDELLM_PERCENTILES = {
    "p001": 0.001,
    "p01": 0.01,
    "p05": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p999": 0.999,
}

Weighted = tuple[float, float]  # a value and its weight


def report(groups: Sequence[Group]) -> dict[str, Any]:
    """GuideLLM's report: one benchmark for each group."""
    return {"metadata": {"version": 1}, "benchmarks": [_benchmark(group) for group in groups]}


def n_output(request: Request) -> int | None:
    """Completion tokens; where they were not counted, events with content."""
    n = times.n_generated(request)
    return len(times.generated(request)) or None if n is None else n


def per_output_token_ns(request: Request) -> float | None:
    """(last content - sending) / n: TTFT is a part of it."""
    n, last_ns = n_output(request), times.e2e_ns(request)
    return None if not n or last_ns is None else last_ns / n


def guidellm_inter_token_ns(request: Request) -> float | None:
    """(last content - first content) / (n - 1). None below 2 tokens."""
    n, first_ns, last_ns = n_output(request), times.ttft_ns(request), times.e2e_ns(request)
    return None if n is None or n < 2 or first_ns is None or last_ns is None else (last_ns - first_ns) / (n - 1)


def _benchmark(group: Group) -> dict[str, Any]:
    strategy = {"type_": "concurrent", "streams": group.n_at_once}
    if group.n_at_once is None:
        strategy = {"type_": group.requests[0].asked.load.arrivals, "rate": group.rate}  # type: ignore[union-attr,dict-item]
    backend = {
        "target": group.endpoint.url.removesuffix("/v1"),
        "model": group.model,
        "request_format": f"/v1/{'chat/completions' if group.endpoint.api == CHAT else 'completions'}",
    }
    return {
        "type_": "generative_benchmark",
        "config": {"strategy": strategy, "backend": backend},
        "duration": seconds(group.ok, lambda request: request.ended_ns),
        "metrics": _metrics(group),
    }


def _metrics(group: Group) -> dict[str, Any]:
    requests = group.ok
    duration = seconds(requests, lambda request: request.ended_ns)
    n_all_output, n_all_prompt = total([n_output(one) for one in requests]), total([n_prompt(one) for one in requests])
    counts = {"successful": len(requests), "errored": group.n_failed, "incomplete": 0, "total": len(group.requests)}

    def summary(
        figure: Callable[[Request], float | None],
        divisor: float = 1.0,
        weight: Callable[[Request], float] = lambda request: 1.0,
    ) -> dict[str, Any]:
        values = [(figure(request), weight(request)) for request in requests]
        return {"successful": distribution([(value / divisor, by) for value, by in values if value is not None])}

    def rate(amount: int | None) -> dict[str, Any]:
        return {"successful": {"mean": per_second(amount, duration)}}

    return {
        "request_totals": counts,
        "requests_per_second": rate(len(requests)),
        "request_latency": summary(lambda request: request.ended_ns, NS_PER_S),
        "prompt_token_count": summary(n_prompt),
        "output_token_count": summary(n_output),
        "time_to_first_token_ms": summary(times.ttft_ns, NS_PER_MS),
        "time_to_first_output_token_ms": summary(times.first_output_ns, NS_PER_MS),
        "time_per_output_token_ms": summary(per_output_token_ns, NS_PER_MS, lambda one: n_output(one) or 0.0),
        "inter_token_latency_ms": summary(guidellm_inter_token_ns, NS_PER_MS, lambda one: (n_output(one) or 1.0) - 1.0),
        "output_tokens_per_second": rate(n_all_output),
        "tokens_per_second": rate(total([n_all_prompt, n_all_output])),
    }


def distribution(values: Sequence[Weighted]) -> dict[str, Any] | None:
    """A summary of weighted values. None where there are none."""
    ordered = sorted(values)
    whole = sum(weight for _, weight in ordered)
    if not whole:
        return None
    mean = sum(value * weight for value, weight in ordered) / whole
    variance = sum(weight * (value - mean) ** 2 for value, weight in ordered) / whole
    percentiles = {name: _percentile(ordered, share * whole) for name, share in GUIDELLM_PERCENTILES.items()}
    return {
        "mean": mean,
        "median": percentiles["p50"],
        "variance": variance,
        "std_dev": math.sqrt(variance),
        "min": ordered[0][0],
        "max": ordered[-1][0],
        "count": round(whole),
        "total_sum": mean * round(whole),
        "percentiles": percentiles,
    }


def _percentile(ordered: Sequence[Weighted], wanted: float) -> float:
    """The first value at which the weights so far reach `wanted`."""
    so_far = 0.0
    for value, weight in ordered:
        so_far += weight
        if so_far >= wanted * (1 - 1e-12):
            return value
    return ordered[-1][0]


def chunks_ns(request: Request, api: str) -> list[int]:
    """When the chunks arrived that vLLM takes for tokens.

    A chat's empty chunks without a role are OTHER in a record, and so is the last one, which has the reason of the end
    and no content: they count where content comes after them.
    """
    events = request.events
    generated = times.generated(request)
    last = generated[-1] if generated else -1
    return [
        arrive_ns
        for number, (arrive_ns, kind) in enumerate(zip(events.arrive_ns, events.kind, strict=True))
        if kind in GENERATED or (kind == OTHER and (api != CHAT or number < last))
    ]


def vllm_summary(group: Group) -> dict[str, Any]:
    """The JSON document of a run, with what --save-detailed keeps."""
    api = group.endpoint.api
    arrivals = [(request, chunks_ns(request, api)) for request in group.ok]
    arrivals = [(request, ns) for request, ns in arrivals if ns]
    lengths = [times.n_generated(request) for request, _ in arrivals]
    itls_ns = [[b - a for a, b in pairwise(ns)] for _, ns in arrivals]
    duration = seconds([request for request, _ in arrivals], lambda request: request.ended_ns)
    n_input, n_output = total([n_prompt(request) for request, _ in arrivals]), total(lengths)
    columns: dict[str, list[float]] = {
        "ttft": [ns[0] for _, ns in arrivals],
        "tpot": [(ns[-1] - ns[0]) / (n - 1) for (_, ns), n in zip(arrivals, lengths, strict=True) if n and n > 1],
        "itl": [gap for gaps in itls_ns for gap in gaps],
        "e2el": [ns[-1] for _, ns in arrivals],
    }
    return {
        "date": group.requests[0].started_at,
        "backend": "openai-chat" if api == CHAT else "openai",
        "model_id": group.model,
        "num_prompts": len(group.requests),
        "request_rate": "inf" if group.rate is None else group.rate,
        "max_concurrency": group.n_at_once,
        "duration": duration,
        "completed": len(arrivals),
        "failed": len(group.requests) - len(arrivals),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "request_throughput": per_second(len(arrivals), duration),
        "output_throughput": per_second(n_output, duration),
        "total_token_throughput": per_second(total([n_input, n_output]), duration),
        **{key: value for name, values in columns.items() for key, value in _statistics(name, values).items()},
        "input_lens": [n_prompt(request) for request, _ in arrivals],
        "output_lens": lengths,
        "ttfts": [ns[0] / NS_PER_S for _, ns in arrivals],
        "itls": [[gap / NS_PER_S for gap in gaps] for gaps in itls_ns],
        "errors": [request.error or "" for request in group.requests],
    }


def _statistics(name: str, values_ns: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values_ns)
    figures = {
        "mean": statistics.fmean(ordered) if ordered else None,
        "median": statistics.median(ordered) if ordered else None,
        "std": statistics.pstdev(ordered) if ordered else None,
        "p99": quantile(ordered, 0.99) if ordered else None,
    }
    return {f"{word}_{name}_ms": None if ns is None else ns / NS_PER_MS for word, ns in figures.items()}


FORMATS = ("guidellm", "aiperf", "vllm")


def written(records: Iterable[RequestRecord], form: str) -> str:
    """The requests in one of FORMATS: GuideLLM's report, or a line of JSON for each run of AIPerf or vLLM.

    LabError where there are none.
    """
    grouped = groups(records)
    if not grouped:
        raise LabError(
            f"There are no requests to a server here, which --format {form} is for.",
            "Measure a server: lab measure --url http://127.0.0.1:8080/v1",
        )
    if form == "guidellm":
        return json.dumps(report(grouped), indent=2) + "\n"
    summary = {"aiperf": aiperf_summary, "vllm": vllm_summary}[form]
    return "".join(json.dumps(summary(group)) + "\n" for group in grouped)
