"""Other tools' figures beside the lab's, from the same server and work, by the tools' own definitions.

    python3 -m uv run python -m tests.bench.other_tools [SERVER,...] [ROUNDS] [TOOL ...]

SERVER is null (known times), llama-server (on the lab's own libraries) or llama-cpp-python's; all of them by default.
Each round runs each tool of tool_runs.py that is installed and right before it the lab: the same prompts (but
llama-benchy, which makes its own of that length), answers of N_GEN tokens, 1 and 4 at a time. The lab's requests are
then re-expressed with analysis/tool_formats.py. What counts is the median over rounds of tool / lab for each field;
within 0.97 to 1.03 wanted, and the rest is marked.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.analysis import tool_formats
from lab.analysis.tool_formats import Group, groups
from lab.core import request_times as times
from lab.core.request import CHAT, CLOSED, Asked, Load
from lab.endpoints.formats import ask_for
from lab.endpoints.send_plan import SendPlan
from lab.models import catalog
from lab.runner.servers import Server, connect
from tests import servers
from tests.bench import tool_runs
from tests.bench.tool_runs import ToolMissing, Work
from tests.bench.truth import WORDS
from tests.null_server import Behaviour, NullSettings, null_server

N_REQUESTS, N_PROMPT, N_GEN = 8, 128, 32
AT_ONCE = (1, 4)
NARROW = 0.03
EXTRA = {"cache_prompt": False, "max_tokens": N_GEN, "temperature": 0}


def as_llama_benchy(group: Group) -> dict[str, Any]:
    """llama-benchy's figures (eugr/llama-benchy, src/llama_benchy/client.py and results.py, version 0.4.0).

    e2e_ttft: the first event with content - the sending. tg_req_throughput: the tokens after the first one over the
    time from the first to the last event with content; the count by the usage.
    """
    ttfts_ms = [ns / 1e6 for request in group.ok if (ns := times.ttft_ns(request)) is not None]
    gaps_ns = tool_formats.per_request(group.ok, times.n_generated).inter_token
    return {
        "e2e_ttft": {"mean": statistics.fmean(ttfts_ms)},
        "tg_req_throughput": {"mean": (1e9 / gaps_ns[gaps_ns > 0]).mean()},
    }


def as_guidellm(group: Group) -> dict[str, Any]:
    (benchmark,) = tool_formats.report([group])["benchmarks"]
    answer: dict[str, Any] = benchmark
    return answer


@dataclass(frozen=True)
class Side:
    """A tool's fields that are compared, as paths into its document, and the lab's document of the same form."""

    ours: Callable[[Group], dict[str, Any]]
    fields: tuple[str, ...]


SIDES = {
    "GuideLLM": Side(
        as_guidellm,
        (
            "metrics.time_to_first_token_ms.successful.median",
            "metrics.time_per_output_token_ms.successful.mean",
            "metrics.inter_token_latency_ms.successful.mean",
            "metrics.request_latency.successful.median",
            "metrics.output_token_count.successful.mean",
            "metrics.prompt_token_count.successful.mean",
            "metrics.output_tokens_per_second.successful.mean",
        ),
    ),
    "AIPerf": Side(
        tool_formats.aiperf_summary,
        (
            "time_to_first_token.p50",
            "inter_token_latency.avg",
            "inter_chunk_latency.avg",
            "request_latency.p50",
            "output_sequence_length.avg",
            "output_token_throughput_per_user.avg",
            "output_token_throughput.avg",
        ),
    ),
    "vllm bench": Side(
        tool_formats.vllm_summary,
        (
            "median_ttft_ms",
            "mean_tpot_ms",
            "mean_itl_ms",
            "median_e2el_ms",
            "total_input_tokens",
            "total_output_tokens",
            "output_throughput",
        ),
    ),
    "llama-benchy": Side(as_llama_benchy, ("e2e_ttft.mean", "tg_req_throughput.mean")),
}


def at(document: dict[str, Any], path: str) -> float | None:
    """The number at a path such as "time_to_first_token.p50"."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


@contextmanager
def served(name: str) -> Iterator[tuple[str, str, Path | None]]:
    """A server's address, its model's name, and the file of the model."""
    model = catalog.embedded_path()
    if name == "null":
        with null_server(NullSettings(models={"null": Behaviour(first_ms=100, gap_ms=10)})) as null:
            yield null.url, "null", None
    elif name == "llama-server":
        with servers.llama_server(model, "--threads", "1", "--parallel", "4", "--ctx-size", "4096") as real:
            yield real.url, servers.NAME, model
    else:
        with servers.llama_cpp_server(model, "--n_threads", "1", "--n_ctx", "1024") as real:
            yield real.url, servers.NAME, model


def lab_group(server: Server, prompts: Sequence[str], n_at_once: int) -> Group:
    """The lab's requests: each prompt once."""
    load = Load(
        arrivals=CLOSED, concurrency=n_at_once, round=0, warmup_s=0, duration_s=3600, lengths=f"{N_PROMPT}", seed=1
    )
    asked = Asked(n_prompt=N_PROMPT, n_gen=N_GEN, temperature=0.0, seed=1, ignore_eos=server.ignores_eos, load=load)
    asks = tuple(ask_for(CHAT, server.model, prompt, asked, server.endpoint.accepted) for prompt in prompts)
    replies = list(server.client.run(SendPlan(asks=asks, api=CHAT, n_at_once=n_at_once)))
    (group,) = groups(server.record("bench", server.counted(asks[one.index], one)) for one in replies)
    return group


Ratios = dict[tuple[int, str, str], list[tuple[float, float]]]  # ours and theirs by users, tool and field


def measured(name: str, n_rounds: int, tools: Sequence[str], ratios: Ratios, missing: dict[str, str]) -> None:
    """Fill `ratios`, and `missing` with why a tool has none; what there is stays where it is interrupted."""
    with (
        tempfile.TemporaryDirectory() as root,
        served(name) as (url, model, file),
        connect(url, model, api=CHAT) as server,
    ):
        folder = Path(root)
        tokenizer = tool_runs.word_tokenizer(folder / "words", WORDS)
        if file is not None:
            tokenizer = tool_runs.gguf_tokenizer(file)
        text = " ".join(random.Random(1).choices(WORDS, k=4 * N_PROMPT))
        for number in range(n_rounds):
            order = tools if number % 2 == 0 else tools[::-1]
            for n_at_once in AT_ONCE:
                for tool in order:
                    if tool in missing:
                        continue
                    made = [server.prompt(N_PROMPT, text, number, repeat).text for repeat in range(N_REQUESTS)]
                    work = Work(
                        url=url,
                        model=model,
                        prompts=tuple(made),
                        n_prompt=N_PROMPT,
                        n_gen=N_GEN,
                        n_at_once=n_at_once,
                        tokenizer=tokenizer,
                        extra=EXTRA,
                    )
                    (place := folder / f"{tool} {n_at_once} {number}").mkdir()
                    ours = SIDES[tool].ours(lab_group(server, made, n_at_once))
                    try:
                        theirs = tool_runs.TOOLS[tool](work, place)
                    except ToolMissing as problem:
                        missing[tool] = str(problem)
                        continue
                    for path in SIDES[tool].fields:
                        one, other = at(ours, path), at(theirs, path)
                        if one and other:
                            ratios.setdefault((n_at_once, tool, path), []).append((one, other))


def print_ratios(name: str, ratios: Ratios, missing: dict[str, str]) -> None:
    for (n_at_once, tool, path), pairs in sorted(ratios.items()):
        lab, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        mark = "" if abs(ratio - 1) <= NARROW else "  <- not within 3 %"
        print(f"{name}, {n_at_once} at a time, {tool}: {path}: {other:.2f} / {lab:.2f} = {ratio:.3f}{mark}", flush=True)
    for tool, why in missing.items():
        print(f"{name}, {tool}: {why}")


def main() -> None:
    names = sys.argv[1].split(",") if len(sys.argv) > 1 else ["null", "llama-server", "llama-cpp-python"]
    n_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    tools = sys.argv[3:] or list(tool_runs.TOOLS)
    if unknown := set(tools) - set(tool_runs.TOOLS):
        sys.exit(f"There is no tool {', '.join(unknown)}. Name some of: {', '.join(tool_runs.TOOLS)}")
    print(f"tool / lab, medians of {n_rounds} rounds of {N_REQUESTS} requests: {N_PROMPT} + {N_GEN} tokens")
    for name in names:
        ratios: Ratios = {}
        missing: dict[str, str] = {}
        try:
            measured(name, n_rounds, tools, ratios, missing)
        finally:
            print_ratios(name, ratios, missing)


if __name__ == "__main__":
    main()
