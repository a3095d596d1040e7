"""What tools report of a server whose every event was sent at a known time.

    python3 -m uv run python -m tests.bench.truth [BEHAVIOUR ...]

The null server behaves in one odd way after the other, and keeps when it sent what. The lab and each tool of
tool_runs.py that is installed send N requests, one at a time, with the tool's own defaults. The truth is what the
server sent to this very tool, by the definitions of core/request_times.py. A figure is bold where it is off by more
than 3 % (and 3 ms, of a single time); a dash is no such figure. Medians over requests, or what the tool has. Prints a
table for results/README.md.

The longest ITL is the longest time between two tokens of any request. For a tool: the most that it has for what it
calls the time between tokens or chunks.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.core import request_times as times
from lab.core.request import CHAT, Asked, Request
from lab.endpoints.access import access, ask
from lab.endpoints.send_plan import SendPlan
from lab.runner.servers import connect
from tests.bench import tool_runs
from tests.bench.tool_runs import ToolMissing, Work
from tests.null_server import (
    ACCEPT,
    ASKED,
    EMPTY,
    NEVER,
    RUNNING,
    TEMPLATE_TOKENS,
    Behaviour,
    NullSettings,
    null_server,
)

N, N_PROMPT, N_GEN = 6, 30, 32
SHARE, LEAST_MS = 0.03, 3.0
WORDS = tuple(a + b + c for a in "bcdfgklmnprst" for b in "aeiou" for c in "bdgklmnprst")
LAB = "lab"

EVEN = Behaviour(first_ms=100, gap_ms=10, usage=ASKED)
BUNDLED = replace(EVEN, gap_ms=40, bundle=4)
BEHAVIOURS: dict[str, tuple[Behaviour, str]] = {
    "even": (EVEN, "a token every 10 ms, the first after 100 ms"),
    "bundled": (BUNDLED, "four tokens in an event, every 40 ms; they are counted at the end"),
    "held": (
        replace(EVEN, n_held=11, usage=RUNNING),
        "twelve tokens in the first event, then one each; running counts for who asks for them",
    ),
    "no usage": (replace(BUNDLED, usage=NEVER), "four tokens in an event, and no usage streamed"),
    "role": (replace(EVEN, role=ACCEPT), "a chunk with an empty role at once, the first token after 100 ms"),
    "empty": (replace(EVEN, role=EMPTY), "an empty chunk without a role at once"),
    "stall": (replace(EVEN, stall_after=16, stall_ms=300), "a stall of 310 ms after 16 tokens"),
    "reasoning": (replace(EVEN, n_reasoning=16), "16 tokens of reasoning (reasoning_content), then 16 of the answer"),
    "cache": (
        replace(EVEN, first_ms=10, prompt_token_ms=3, has_cache=True),
        "a cache, in which these prompts are from an earlier run: 10 ms, and 3 ms for each token that is not in it",
    ),
}
FIGURES = ("TTFT", "first output", "TPOT", "longest ITL", "tokens", "cached tokens")
UNITS = {"TTFT": "ms", "first output": "ms", "TPOT": "ms", "longest ITL": "ms"}
WORTH = {  # what is shown of a behaviour: where it makes a difference
    "even": ("TTFT", "TPOT", "tokens"),
    "bundled": ("TPOT", "longest ITL", "tokens"),
    "held": ("TPOT", "tokens"),
    "no usage": ("TPOT", "tokens"),
    "role": ("TTFT", "TPOT"),
    "empty": ("TTFT", "TPOT", "longest ITL"),
    "stall": ("TPOT", "longest ITL"),
    "reasoning": ("TTFT", "first output", "TPOT", "tokens"),
    "cache": ("TTFT", "cached tokens"),
}

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Cell:
    """What one side reported, and what the server had sent to it."""

    shown: Figures
    truth: Figures


def of_the_log(streams: Sequence[dict[str, Any]], how: Behaviour) -> Figures:
    """The truth of some streams, from when the server had the request whole and when it sent each event."""
    rows = []
    for log in streams:
        sent_ns, n_tokens, n = log["sent_ns"], log["n_tokens"], sum(log["n_tokens"])
        cold_ns = sent_ns[0] - log["received_ns"] + log["n_cached"] * how.prompt_token_ms * 1e6
        n_reasoning = how.n_reasoning if log["is_chat"] else 0
        rows.append(
            {
                "TTFT": cold_ns / 1e6,
                "first output": (sent_ns[n_reasoning] - log["received_ns"]) / 1e6,
                "TPOT": (sent_ns[-1] - sent_ns[0]) / (n - n_tokens[0]) / 1e6,
                "longest ITL": max(b - a for a, b in pairwise(sent_ns)) / 1e6,
                "tokens": n,
                "cached tokens": log["n_cached"],
            }
        )
    medians = {name: statistics.median(row[name] for row in rows) for name in FIGURES}
    return {**medians, "longest ITL": max(row["longest ITL"] for row in rows)}


def of_the_lab(requests: Sequence[Request]) -> Figures:
    """The lab's figures: medians of requests. A range of TPOT counts as its middle where it is one value."""

    def median(figure: Callable[[Request], float | None], divisor: float = 1.0) -> float | None:
        known = [value / divisor for request in requests if (value := figure(request)) is not None]
        return statistics.median(known) if len(known) == len(requests) else None

    cached = [request.usage.cached_tokens if request.usage else None for request in requests]
    gaps = [gap for gap in map(times.longest_stall_ns, requests) if gap is not None]
    return {
        "TTFT": median(times.ttft_ns, 1e6),
        "first output": median(times.first_output_ns, 1e6),
        "TPOT": median(times.tpot_ns, 1e6),
        "longest ITL": max(gaps) / 1e6,
        "tokens": median(times.n_generated),
        "cached tokens": None if None in cached else statistics.median(n or 0 for n in cached),
        "least TPOT": median(lambda request: (times.tpot_bounds_ns(request) or (None, None))[0], 1e6),
        "most TPOT": median(lambda request: (times.tpot_bounds_ns(request) or (None, None))[1], 1e6),
    }


def of_guidellm(run: dict[str, Any]) -> Figures:
    metrics = run["metrics"]

    def median(name: str) -> float | None:
        summary = (metrics.get(name) or {}).get("successful") or {}
        return summary.get("median") if summary.get("count") else None

    cached = [one["input_metrics"].get("cached_tokens") for one in run["requests"]["successful"]]
    return {
        "TTFT": median("time_to_first_token_ms"),
        "first output": median("time_to_first_output_token_ms"),
        "TPOT": median("time_per_output_token_ms"),
        "ITL": median("inter_token_latency_ms"),
        "longest ITL": metrics["inter_token_latency_ms"]["successful"]["max"],
        "tokens": median("output_token_count"),
        "cached tokens": None if None in cached or not cached else statistics.median(cached),
    }


def of_aiperf(run: dict[str, Any]) -> Figures:
    def figure(name: str, statistic: str = "p50") -> float | None:
        value: float | None = run.get(name, {}).get(statistic)
        return value

    return {
        "TTFT": figure("time_to_first_token"),
        "first output": figure("time_to_first_output_token"),
        "TPOT": figure("inter_token_latency"),
        "longest ITL": figure("inter_chunk_latency", "max"),
        "tokens": figure("output_sequence_length"),
        "cached tokens": figure("usage_prompt_cache_read_tokens"),
    }


def of_vllm(run: dict[str, Any]) -> Figures:
    return {
        "TTFT": run["median_ttft_ms"],
        "TPOT": run["median_tpot_ms"],
        "longest ITL": run["p100_itl_ms"],
        "tokens": run["total_output_tokens"] / run["completed"] if run["completed"] else None,
    }


def of_llama_benchy(run: dict[str, Any]) -> Figures:
    rates = (run["tg_throughput"] or {}).get("values")
    return {
        "TTFT": statistics.median(run["e2e_ttft"]["values"]),
        "TPOT": 1e3 / statistics.median(rates) if rates else None,
    }


READ: dict[str, Callable[[dict[str, Any]], Figures]] = {
    "GuideLLM": of_guidellm,
    "AIPerf": of_aiperf,
    "vllm bench": of_vllm,
    "llama-benchy": of_llama_benchy,
}
PER_CHUNK = "AIPerf --per-chunk-usage"


def lab_run(url: str, model: str) -> list[Request]:
    with connect(url, model, api=CHAT) as server:
        made = [server.prompt(N_PROMPT, " ".join(WORDS), seed=1, repeat=repeat) for repeat in range(N)]
        asked = Asked(n_prompt=N_PROMPT, n_gen=N_GEN, temperature=0.0, seed=1, ignore_eos=server.ignores_eos)
        asks = tuple(server.ask(prompt, asked) for prompt in made)
        replies = list(server.client.run(SendPlan(asks=asks, api=CHAT)))
        return [server.counted(asks[reply.index], reply) for reply in replies]


def measured(name: str, folder: Path) -> dict[str, Cell | str]:
    """Each side's cell for a behaviour, or why there is none."""
    how, _ = BEHAVIOURS[name]
    model = name.replace(" ", "-")
    cells: dict[str, Cell | str] = {}
    with null_server(NullSettings(models={model: how})) as server:
        reached = access(server.url)

        def streams() -> list[dict[str, Any]]:
            logs: list[dict[str, Any]] = (ask(reached, f"{reached.root}/null/sent").parsed or {})["streams"]
            return [log for log in logs if len(log["sent_ns"]) and sum(log["n_tokens"]) == N_GEN]

        rng = random.Random(name)
        prompts = tuple(" ".join(rng.choices(WORDS, k=N_PROMPT - TEMPLATE_TOKENS)) for _ in range(N))
        tokenizer = tool_runs.word_tokenizer(folder / f"tokenizer {name}", WORDS)
        work = Work(
            url=server.url,
            model=model,
            prompts=prompts,
            n_prompt=N_PROMPT,
            n_gen=N_GEN,
            n_at_once=1,
            tokenizer=tokenizer,
        )
        runs = dict(tool_runs.TOOLS) | ({PER_CHUNK: tool_runs.aiperf_per_chunk} if how.usage == RUNNING else {})
        for prompt in prompts if how.has_cache else ():
            ask(reached, f"{server.url}/chat/completions", {"model": model, "messages": [{"content": prompt}]})
        requests = lab_run(server.url, model)
        cells[LAB] = Cell(of_the_lab(requests), of_the_log(streams()[-N:], how))
        for tool, run in runs.items():
            try:
                (place := folder / f"{name} {tool}").mkdir()
                report = run(work, place)
            except ToolMissing as problem:
                cells[tool] = str(problem)
                continue
            read = READ["AIPerf" if tool == PER_CHUNK else tool]
            cells[tool] = Cell(read(report), of_the_log(streams()[-N:], how))
    return cells


def shown(figure: str, cell: Cell | str | None) -> str:
    """A cell of the table: bold where it is not the truth."""
    if not isinstance(cell, Cell):
        return "missing" if cell else "-"
    value, truth = cell.shown.get(figure), cell.truth[figure]
    low, high = cell.shown.get(f"least {figure}"), cell.shown.get(f"most {figure}")
    if value is None and low is not None and high is not None:
        is_wrong = not low * (1 - SHARE) <= (truth or 0.0) <= high * (1 + SHARE)
        return f"**{low:.1f} to {high:.1f}**" if is_wrong else f"{low:.1f} to {high:.1f}"
    if value is None:
        return "-"
    text = f"{value:.1f}" if figure in UNITS else f"{value:.0f}"
    return f"**{text}**" if _is_wrong(figure, value, truth or 0.0) else text


def _is_wrong(figure: str, value: float, truth: float) -> bool:
    least = LEAST_MS if figure in ("TTFT", "first output", "longest ITL") else 0.5 if figure == "tokens" else 0.0
    return abs(value - truth) > max(SHARE * truth, least)


def main() -> None:
    names = sys.argv[1:] or list(BEHAVIOURS)
    columns = [LAB, *tool_runs.TOOLS]
    print(f"| the server | figure | truth | {' | '.join(columns)} |\n|{' - |' * (3 + len(columns))}", flush=True)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            cells = measured(name, Path(folder))
            lab = cells[LAB]
            assert isinstance(lab, Cell)
            notes += [f"{name}: {tool}: {cell}" for tool, cell in cells.items() if isinstance(cell, str)]
            for number, figure in enumerate(WORTH[name]):
                truth = lab.truth[figure] or 0.0
                row = [
                    BEHAVIOURS[name][1] if number == 0 else "",
                    f"{figure}, {UNITS[figure]}" if figure in UNITS else figure,
                ]
                row += [f"{truth:.1f}" if figure in UNITS else f"{truth:.0f}"]
                row += [_with_others(figure, tool, cells) for tool in columns]
                print(f"| {' | '.join(row)} |", flush=True)
    print("\n".join(notes))


def _counts(figure: str, cells: dict[str, Cell | str]) -> str:
    """The true counts, such as "0 or 25": what was in the cache depends on what a side sends."""
    counts = {cell.truth[figure] or 0.0 for cell in cells.values() if isinstance(cell, Cell)}
    return " or ".join(f"{count:.0f}" for count in sorted(counts))


def _with_others(figure: str, tool: str, cells: dict[str, Cell | str]) -> str:
    """A cell, with GuideLLM's inter-token latency and AIPerf's other count in brackets."""
    text, cell, other = shown(figure, cells.get(tool)), cells.get(tool), cells.get(PER_CHUNK)
    if tool == "GuideLLM" and figure == "TPOT" and isinstance(cell, Cell):
        itl = Cell({"TPOT": cell.shown["ITL"]}, cell.truth)
        return f"{text} (its ITL: {shown('TPOT', itl)})"
    if tool == "AIPerf" and figure == "TPOT" and isinstance(other, Cell):
        return f"{text} ({shown('TPOT', other)} with --per-chunk-usage)"
    return text


if __name__ == "__main__":
    main()
