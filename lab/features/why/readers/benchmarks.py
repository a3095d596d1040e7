"""Figures of benchmarks of servers, of TabbyAPI's log, and of llama-batched-bench's JSON lines.

Benchmarks of servers: `vllm bench serve`, SGLang's `bench_serving`, KoboldCpp's `--benchmark`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from lab.features.why.figure import BOTH, DECODE, MAYBE_FIRST, SERVED, STEPS, Figure
from lab.features.why.readers import fields, tables
from lab.features.why.readers.fields import (
    PastedAnswer,
    check_rate,
    count_if_given,
    matched,
    phases,
    share,
)
from lab.formats.numbers import NUMBER, count, number

SERVING_BEGIN = re.compile(r"={3,60} Serving Benchmark Result ={3,60}")
SERVING_LENGTH = 4_000  # letters of a block
SERVING_LABELS = {
    "duration": r"Benchmark duration \(s\)",
    "generated": r"Total generated tokens",
    "throughput": r"Output token throughput \(tok/s\)",
    "most at once": r"Max(?:imum)? request concurrency",
    "mean TPOT": r"Mean TPOT \(ms\)",
    "median TPOT": r"Median TPOT \(ms\)",
    "drafts": r"Accept length|Acceptance length",
}
OF_SGLANG = re.compile(r"^[>\s]{0,20}Backend:|\(retokenized\):", re.M)
N_STREAMS_OF_MOST = {1.0: 1}
"""Answers at once by the most that were allowed; with more allowed it is unknown."""

ROUNDS_S = 0.006  # of a printed time

SPACE = r"\s{1,40}"  # a terminal may break a line at any space
NO_RATE = "Indeterminate"
TABBY_RATE = rf"({NUMBER}|{NO_RATE})"
TABBY = re.compile(
    r"Metrics(?: \(ID: [^)\n]{1,80}\))?: (\d{1,9}) tokens generated in "
    rf"({NUMBER}) seconds \(Queue: [^,]{{1,30}}, Process: (\d{{1,9}}) cached tokens and "
    rf"(\d{{1,9}}) new tokens at {TABBY_RATE} T/s, Generate: {TABBY_RATE} T/s"
    r"(?:, Context: \d{1,9} tokens)?"
    r"(?:, Draft: (\d{1,9}) / (\d{1,9}) tokens accepted(?: \([^)]{1,20}\))?)?"
    r"\)( <-- Not accurate)?".replace(" ", SPACE)
)
TABBY_ROUNDS = 0.02  # share of the total, beside 0.05 s

KOBOLD_FIELDS = (
    *("MaxCtx", "GenAmount", "ProcessingTime", "ProcessingSpeed"),
    *("GenerationTime", "GenerationSpeed", "TotalTime", "Output"),
)
BATCHED_COLUMNS = {
    "PP": "pp",
    "TG": "tg",
    "B": "pl",
    "N_KV": "n_kv",
    "T_PP s": "t_pp",
    "S_PP t/s": "speed_pp",
    "T_TG s": "t_tg",
    "S_TG t/s": "speed_tg",
}
BATCHED_SETTINGS = (
    *("n_batch", "n_ubatch", "flash_attn", "n_gpu_layers", "n_threads", "n_threads_batch"),
)


def read(text: str) -> list[Figure]:
    """The figures of all these programs. ValueError for contradictions."""
    figures = list[Figure]()
    for line, block in serving_blocks(text):
        figures += of_serving(block, line)
    for line, match in matched(text, TABBY):
        figures += of_tabby(match, line)
    if "GenerationSpeed" in text:
        for answer in fields.answers(text, KOBOLD_FIELDS, first="MaxCtx"):
            figures += of_kobold(answer)
    if re.search(r"[\"']speed_tg[\"']", text):
        for answer in fields.answers(text, (*BATCHED_COLUMNS.values(), *BATCHED_SETTINGS)):
            figures += of_batch(answer)
    return figures


def serving_blocks(text: str) -> Iterator[tuple[int, str]]:
    """The blocks of benchmarks of a server, with the lines where they begin."""
    begins = list(matched(text, SERVING_BEGIN))
    for index, (line, match) in enumerate(begins):
        end = match.end() + SERVING_LENGTH
        if index + 1 < len(begins):
            end = min(end, begins[index + 1][1].start())
        yield line, text[match.end() : end]


def of_serving(block: str, line: int) -> list[Figure]:
    """The tokens of all answers over the whole duration, and the decode of one answer.

    The latter is the inverse of the mean TPOT, which has no first token. How many answers were
    decoded at once is known only where at most one was allowed. ValueError for contradictions.
    """
    values = dict[str, float]()
    for name, label in SERVING_LABELS.items():
        match = re.search(rf"(?:{label})\s{{0,3}}:\s{{1,60}}(-?{NUMBER})(?!\S)", block)
        if match:
            values[name] = number(match[1])
    source = "vLLM bench serve"
    if OF_SGLANG.search(block):
        source = "SGLang bench_serving"
    most_at_once = values.get("most at once")
    about = ""
    if most_at_once and most_at_once > 1:
        about = f"at most {most_at_once:.0f} at once"
    figure = Figure(
        source=source,
        tps=values.get("throughput", 0.0),
        phase=BOTH,
        counts=SERVED,
        n_streams=N_STREAMS_OF_MOST.get(most_at_once or 0),
        is_speculative=("drafts" in values) or None,
        line=line,
        about=about,
        is_of_server=True,
    )
    check_rate(figure.tps, values.get("generated", 0), values.get("duration", 0), ROUNDS_S)
    return [figure, *of_tpot(figure, values.get("mean TPOT"), values.get("median TPOT"))]


def of_tpot(figure: Figure, mean_ms: float | None, median_ms: float | None) -> list[Figure]:
    """The decode of an answer; nothing where the answers came in one piece."""
    if not mean_ms or mean_ms <= 0 or (median_ms is not None and median_ms <= 0):
        return []
    return [dataclasses.replace(figure, tps=1000 / mean_ms, phase=DECODE, counts=STEPS)]


def of_tabby(match: re.Match[str], line: int) -> list[Figure]:
    """Prefill and decode of an answer. ValueError if they took longer than everything."""
    n_gen = count(match[1])
    total_s = number(match[2])
    n_cached = count(match[3])
    n_prompt = count(match[4])
    rates = list[float | None]()
    spent_s = 0.0
    for printed, n_tokens in ((match[5], n_prompt), (match[6], n_gen)):
        if printed == NO_RATE or not number(printed):
            rates.append(None)
            continue
        rates.append(number(printed))
        spent_s += n_tokens / number(printed)
    if spent_s > total_s * (1 + TABBY_ROUNDS) + 0.05:
        raise ValueError("prefill and decode took longer than everything")
    n_context = n_cached + n_prompt
    is_truncated = match[9] is not None
    has_drafts = match[7] is not None
    n_accepted = count_if_given(match[7])
    n_drafted = count_if_given(match[8])
    return phases(
        rates[0],
        rates[1],
        MAYBE_FIRST,
        (n_cached, None if is_truncated else n_context),
        source="TabbyAPI",
        n_prompt=n_prompt,
        n_gen=n_gen,
        total_s=total_s,
        is_speculative=has_drafts or None,
        accepted=share(n_accepted, n_drafted),
        line=line,
        is_of_server=True,
    )


def of_kobold(answer: PastedAnswer) -> list[Figure]:
    """KoboldCpp's benchmark: its prompt of ones fills the context but for the generated tokens.

    A prompt of the user's has another length, which is not printed: the answer does not go on with
    ones. ValueError if the rates, times and tokens contradict each other.
    """
    n_context = answer.count("MaxCtx")
    n_gen = answer.count("GenAmount")
    if not n_context or not n_gen or n_gen >= n_context:
        return []
    n_prompt = n_context - n_gen
    times = [measured_value(answer, name) for name in ("ProcessingTime", "GenerationTime")]
    rates = [measured_value(answer, name) for name in ("ProcessingSpeed", "GenerationSpeed")]
    check_rate(rates[0], n_prompt, times[0] or 0, ROUNDS_S)
    check_rate(rates[1], n_gen, times[1] or 0, ROUNDS_S)
    shared: dict[str, Any] = {
        "source": "KoboldCpp's benchmark",
        "n_gen": n_gen,
        "n_streams": 1,
        "line": answer.line,
    }
    if answer.values.get("Output") != "1":
        return phases(rates[0], rates[1], MAYBE_FIRST, (None, None), **shared)
    shared |= {"n_prompt": n_prompt, "prefill_s": times[0], "decode_s": times[1]}
    return phases(rates[0], rates[1], MAYBE_FIRST, (0, n_prompt), **shared)


def measured_value(answer: PastedAnswer, name: str) -> float | None:
    """A time or rate; None if it is missing or 0."""
    return answer.number(name) or None


def of_batch(answer: PastedAnswer) -> list[Figure]:
    """A line of llama-batched-bench, or of llama-sweep-bench, which has no `pl`."""
    cells = dict[str, str]()
    for head, name in BATCHED_COLUMNS.items():
        if name in answer.values:
            cells[head] = answer.values[name]
    missing = set(BATCHED_COLUMNS) - set(cells)
    if missing - {"B"}:
        return []
    settings = tables.settings_of(answer.values)
    threads = answer.count("n_threads_batch")
    if threads is not None:
        settings["threads_batch"] = threads
    figures = list[Figure]()
    for figure in tables.of_batch(cells, answer.line):
        figures.append(dataclasses.replace(figure, settings=settings))
    return figures
