"""AIPerf's figures, from a request's events.

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
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lab.analysis.tool_groups import NS_PER_MS, NS_PER_S, Group, n_prompt, per_second, quantile, seconds, total
from lab.core import request_times as times
from lab.core.request import Request

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def summary(group: Group) -> dict[str, Any]:
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


def inter_token_ns(request: Request) -> float | None:
    """(last content - first content) / (n - 1). None where n is not known or below 2."""
    n, first_ns, last_ns = times.n_generated(request), times.ttft_ns(request), times.e2e_ns(request)
    return None if n is None or n < 2 or first_ns is None or last_ns is None else (last_ns - first_ns) / (n - 1)


def _columns(requests: Sequence[Request]) -> dict[str, tuple[str, list[float]]]:
    """The values of each figure that has one value for a request, or several (inter_chunk_latency)."""

    def known(values: Sequence[float | None], divisor: float = 1.0) -> list[float]:
        return [value / divisor for value in values if value is not None]

    gaps_ns = [times.chunk_gaps_ns(request) for request in requests]
    itl_ns = [inter_token_ns(request) for request in requests]
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
    percentiles = {f"p{percent}": quantile(ordered, percent / 100) for percent in PERCENTILES}
    ends = {"min": ordered[0], "max": ordered[-1], "std": statistics.pstdev(ordered)}
    return {"unit": unit, "avg": statistics.fmean(ordered), **percentiles, **ends, "count": len(ordered)}
