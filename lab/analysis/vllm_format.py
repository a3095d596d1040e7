"""The figures of `vllm bench serve`, from a request's events.

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

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lab.analysis.tool_groups import NS_PER_MS, NS_PER_S, Group, n_prompt, per_second, quantile, seconds, total
from lab.core import request_times as times
from lab.core.request import CHAT, GENERATED, OTHER, Request


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


def summary(group: Group) -> dict[str, Any]:
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
