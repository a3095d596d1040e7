"""Requests as other tools would report them: the same events, by the tools' definitions and field names.

Each tool writes a JSON document per run, over all requests except warm-ups, including those whose prompt was cached.
Where a tool would write 0 for an unknown value, this writes None. Times start when the request is sent.

AIPerf 0.13.0 (ai-dynamo/aiperf: src/aiperf/metrics/types/*.py, one file per figure; metrics/metric_dicts.py for
percentiles; endpoints/openai_chat.py and openai_completions.py for what counts as content), the document
profile_export_aiperf.json with the server's token counts (--use-server-token-count):

- time_to_first_token: to the first response with text, reasoning or a tool call; time_to_first_output_token: to the
  first with more than reasoning; time_to_second_token: the gap between the first two responses, whatever they hold.
- request_latency: to the last response with content.
- inter_token_latency: (request_latency - time_to_first_token) / (n - 1). With --per-chunk-usage AIPerf subtracts the
  tokens of the first response from n, which gives the lab's TPOT.
- inter_chunk_latency: the gaps between responses with content, as one list of all requests.
- output_token_throughput_per_user: 1 / inter_token_latency; e2e_output_token_throughput: n / request_latency;
  prefill_throughput_per_user: prompt tokens / time_to_first_token.
- Throughput: over benchmark_duration, from the first sending to the end of the last request.

GuideLLM 0.8.1 (vllm-project/guidellm: src/guidellm/schemas/base/request_stats.py for figures of a request and
statistics.py for summaries; backends/openai/http.py and request_handlers.py for what is timed;
benchmark/schemas/metrics.py):

- time_to_first_token_ms and time_to_first_output_token_ms: as in AIPerf, by lines of the stream. All times start at the
  first write of the request.
- request_latency, in seconds: to the end of the stream.
- time_per_output_token_ms: time to the last line with content / n, so it includes TTFT. Weighted by n.
- inter_token_latency_ms: the mean of a request, (last - first) / (n - 1), even if several tokens came first. Weighted
  by n - 1. It keeps no gaps between tokens, so stalls and bundled tokens do not show.
- n: by the usage, else one token per line with content.
- A percentile is the smallest value that this share of the weights does not exceed; standard deviations are the
  population's.
- Rates: only the means are written here, as counts over the time from the first sending to the last end.

`vllm bench serve` 0.33.0 (vllm-project/vllm: vllm/benchmarks/lib/endpoint_request_func.py for what is timed, serve.py
`calculate_metrics` for the names):

- ttft: to the first chunk that it takes for a token. In a chat: content, reasoning (only under the name `reasoning`; a
  record does not say which name it was), a tool call, or empty content without a role. In completions: any chunk with a
  choice, even an empty one at the beginning or the one with the finish reason.
- itl: the time between such chunks, however many tokens they hold, as one list of all requests.
- e2el: to the last such chunk. tpot: (e2el - ttft) / (n - 1), even if several tokens came in the first chunk; n by the
  usage.
- Throughput: requests or tokens over the time from the first sending to the last end. Percentiles are linear between
  ranks, standard deviations the population's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lab.core import request_times as times
from lab.core.lists import grouped
from lab.core.record import OK
from lab.core.request import CHAT, CLOSED, GENERATED, OTHER, Endpoint, Request, RequestRecord
from lab.errors import LabError

if TYPE_CHECKING:
    import pandas as pd

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

    def run_of(record: RequestRecord) -> Hashable:
        asked, load = record.request.asked, record.request.asked.load
        if asked.warmup or not _is_inside(record.request):
            return None
        work = (asked.n_prompt, asked.n_gen) if load is None else (load.label, load.lengths)
        return record.session, record.endpoint.url, record.endpoint.api, record.model, load is None, work

    runs = grouped(records, run_of).values()
    return [Group(rows[0].endpoint, rows[0].model, tuple(row.request for row in rows)) for rows in runs]


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


def n_output(request: Request) -> int | None:
    """Completion tokens; where they were not counted, events with content."""
    n = times.n_generated(request)
    return len(times.generated(request)) or None if n is None else n


def per_request(requests: Sequence[Request], n_tokens: Callable[[Request], int | None]) -> pd.DataFrame:
    """A row for each request, its times in ns from the sending; NaN where a figure is not known.

    `inter_token` is (last content - first content) / (n - 1), of at least 2 tokens.
    """
    import pandas as pd

    rows = [
        {
            "first": times.ttft_ns(one),
            "first_output": times.first_output_ns(one),
            "second_gap": next(iter(times.chunk_gaps_ns(one)), None),
            "last": times.e2e_ns(one),
            "ended": one.ended_ns,
            "n": n_tokens(one),
            "n_prompt": n_prompt(one),
            "n_cached": one.usage.cached_tokens if one.usage else None,
        }
        for one in requests
    ]
    names = ["first", "first_output", "second_gap", "last", "ended", "n", "n_prompt", "n_cached"]
    table = pd.DataFrame(rows, columns=names, dtype=float)
    return table.assign(inter_token=(table["last"] - table["first"]) / (table.n - 1).where(table.n >= 2))


AIPERF_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def aiperf_summary(group: Group) -> dict[str, Any]:
    """The JSON document of a run. A figure that no request has is left out, as AIPerf does."""
    import pandas as pd

    requests = [request for request in group.ok if times.generated(request)]
    duration = seconds(requests, times.e2e_ns)
    n_in, n_out = total([n_prompt(one) for one in requests]), total([times.n_generated(one) for one in requests])
    totals = {
        "request_count": ("requests", len(requests)),
        "error_request_count": ("requests", len(group.requests) - len(requests)),
        "request_throughput": ("requests/sec", per_second(len(requests), duration)),
        "output_token_throughput": ("tokens/sec", per_second(n_out, duration)),
        "input_token_throughput": ("tokens/sec", per_second(n_in, duration)),
        "total_token_throughput": ("tokens/sec", per_second(total([n_in, n_out]), duration)),
        "total_isl": ("tokens", n_in),
        "total_osl": ("tokens", n_out),
        "benchmark_duration": ("sec", duration),
    }
    of = per_request(requests, times.n_generated)
    gaps_ns = pd.Series([gap for one in requests for gap in times.chunk_gaps_ns(one)], dtype=float)

    def rate(n: Any, ns: pd.Series) -> pd.Series:
        return NS_PER_S * n / ns.where(ns != 0)

    figures = {
        "time_to_first_token": ("ms", of["first"] / NS_PER_MS),
        "time_to_second_token": ("ms", of.second_gap / NS_PER_MS),
        "time_to_first_output_token": ("ms", of.first_output / NS_PER_MS),
        "request_latency": ("ms", of["last"] / NS_PER_MS),
        "inter_token_latency": ("ms", of.inter_token / NS_PER_MS),
        "inter_chunk_latency": ("ms", gaps_ns / NS_PER_MS),
        "output_token_throughput_per_user": ("tokens/sec/user", rate(1, of.inter_token)),
        "e2e_output_token_throughput": ("tokens/sec/user", rate(of.n, of["last"])),
        "prefill_throughput_per_user": ("tokens/sec/user", rate(of.n_prompt, of["first"])),
        "output_sequence_length": ("tokens", of.n),
        "input_sequence_length": ("tokens", of.n_prompt),
        "usage_prompt_cache_read_tokens": ("tokens", of.n_cached),
    }
    return {
        "input_config": {
            "models": {"items": [{"name": group.model}]},
            "endpoint": {"urls": [group.endpoint.url], "type": group.endpoint.api, "streaming": True},
            "phases": [{"requests": len(group.requests), "concurrency": group.n_at_once, "rate": group.rate}],
        },
        "start_time": group.requests[0].started_at,
        **{tag: {"unit": unit, "avg": value} for tag, (unit, value) in totals.items() if value is not None},
        **{tag: _spread(unit, known) for tag, (unit, values) in figures.items() if len(known := values.dropna())},
    }


def _spread(unit: str, values: pd.Series) -> dict[str, Any]:
    percentiles = {f"p{percent}": values.quantile(percent / 100) for percent in AIPERF_PERCENTILES}
    ends = {"min": values.min(), "max": values.max(), "std": values.std(ddof=0)}
    return {"unit": unit, "avg": values.mean(), **percentiles, **ends, "count": len(values)}


GUIDELLM_SHARES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


def report(groups: Sequence[Group]) -> dict[str, Any]:
    """GuideLLM's report: one benchmark for each group."""
    return {"metadata": {"version": 1}, "benchmarks": [_benchmark(group) for group in groups]}


def _benchmark(group: Group) -> dict[str, Any]:
    load, requests = group.requests[0].asked.load, group.ok
    duration = seconds(requests, lambda request: request.ended_ns)
    n_in, n_out = total([n_prompt(one) for one in requests]), total([n_output(one) for one in requests])
    of = per_request(requests, n_output)
    figures = {  # values, and their weights
        "request_latency": (of.ended / NS_PER_S, 1.0),
        "prompt_token_count": (of.n_prompt, 1.0),
        "output_token_count": (of.n, 1.0),
        "time_to_first_token_ms": (of["first"] / NS_PER_MS, 1.0),
        "time_to_first_output_token_ms": (of.first_output / NS_PER_MS, 1.0),
        "time_per_output_token_ms": (of["last"] / of.n.where(of.n > 0) / NS_PER_MS, of.n),
        "inter_token_latency_ms": (of.inter_token / NS_PER_MS, of.n - 1),
    }

    def rate(amount: int | None) -> dict[str, Any]:
        return {"successful": {"mean": per_second(amount, duration)}}

    closed = {"type_": "concurrent", "streams": group.n_at_once}
    return {
        "type_": "generative_benchmark",
        "config": {
            "strategy": closed if load is None or group.n_at_once else {"type_": load.arrivals, "rate": group.rate},
            "backend": {
                "target": group.endpoint.url.removesuffix("/v1"),
                "model": group.model,
                "request_format": f"/v1/{'chat/completions' if group.endpoint.api == CHAT else 'completions'}",
            },
        },
        "duration": duration,
        "metrics": {
            "request_totals": {
                "successful": len(requests),
                "errored": len(group.requests) - len(requests),
                "incomplete": 0,
                "total": len(group.requests),
            },
            "requests_per_second": rate(len(requests)),
            **{name: {"successful": distribution(*columns)} for name, columns in figures.items()},
            "output_tokens_per_second": rate(n_out),
            "tokens_per_second": rate(total([n_in, n_out])),
        },
    }


def distribution(values: pd.Series, weights: pd.Series | float) -> dict[str, Any] | None:
    """A summary of weighted values. None where there are none."""
    known = values.to_frame("value").assign(weight=weights).dropna().sort_values(["value", "weight"])
    whole = known.weight.sum()
    if not whole:
        return None
    mean = (known.value * known.weight).sum() / whole
    variance = (known.weight * (known.value - mean) ** 2).sum() / whole
    so_far, percentiles = known.weight.cumsum(), {}
    for share in GUIDELLM_SHARES:  # the first value at which the weights so far reach the share
        place = so_far.searchsorted(share * whole * (1 - 1e-12))
        percentiles[f"p{str(share)[2:]:0<2}"] = known.value.iloc[place]  # p001, p05, p50
    return {
        "mean": mean,
        "median": percentiles["p50"],
        "variance": variance,
        "std_dev": math.sqrt(variance),
        "min": known.value.min(),
        "max": known.value.max(),
        "count": round(whole),
        "total_sum": mean * round(whole),
        "percentiles": percentiles,
    }


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
    arrivals = [(request, ns) for request in group.ok if (ns := chunks_ns(request, api))]
    requests = [request for request, _ in arrivals]
    lengths = [times.n_generated(request) for request in requests]
    itls_ns = [[b - a for a, b in pairwise(ns)] for _, ns in arrivals]
    duration = seconds(requests, lambda request: request.ended_ns)
    prompts = [n_prompt(request) for request in requests]
    n_in, n_out = total(prompts), total(lengths)
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
        "completed": len(requests),
        "failed": len(group.requests) - len(requests),
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "request_throughput": per_second(len(requests), duration),
        "output_throughput": per_second(n_out, duration),
        "total_token_throughput": per_second(total([n_in, n_out]), duration),
        **{key: value for name, values_ns in columns.items() for key, value in _statistics(name, values_ns).items()},
        "input_lens": prompts,
        "output_lens": lengths,
        "ttfts": [ns[0] / NS_PER_S for _, ns in arrivals],
        "itls": [[gap / NS_PER_S for gap in gaps] for gaps in itls_ns],
        "errors": [request.error or "" for request in group.requests],
    }


def _statistics(name: str, values_ns: Sequence[float]) -> dict[str, float | None]:
    import pandas as pd

    values = pd.Series(values_ns, dtype=float) / NS_PER_MS
    middle = {"mean": values.mean(), "median": values.median()}
    figures = middle | {"std": values.std(ddof=0), "p99": values.quantile(0.99)}
    return {f"{word}_{name}_ms": value if values_ns else None for word, value in figures.items()}


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
