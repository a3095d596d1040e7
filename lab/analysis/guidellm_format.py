"""GuideLLM's figures, from a request's events.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lab.analysis.tool_groups import NS_PER_MS, NS_PER_S, Group, n_prompt, per_second, seconds, total
from lab.core import request_times as times
from lab.core.request import CHAT, Request

PERCENTILES = {
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


def inter_token_ns(request: Request) -> float | None:
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
        "inter_token_latency_ms": summary(inter_token_ns, NS_PER_MS, lambda one: (n_output(one) or 1.0) - 1.0),
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
    percentiles = {name: _percentile(ordered, share * whole) for name, share in PERCENTILES.items()}
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
