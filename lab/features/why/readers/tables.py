"""Figures in tables: llama-bench in all its formats, scripts that compare two builds with it,
llama-batched-bench and llama-sweep-bench."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lab.features.why.figure import (
    BOTH,
    DECODE,
    MIXED,
    PREFILL,
    PROMPT,
    STEPS,
    Figure,
)
from lab.features.why.readers import fields
from lab.features.why.readers.fields import check_rate, count_if_given, number_if_given, phases
from lab.formats import llama_bench_rows, markdown
from lab.formats.llama_bench_rows import HEADS, TEST, rate_of
from lab.formats.numbers import count, number

LLAMA_BENCH = "llama-bench"
COLUMNS = (
    "model_type",
    "model_n_params",
    "gpu_info",
    "backends",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "type_k",
    "type_v",
    "n_gpu_layers",
    "flash_attn",
    "n_prompt",
    "n_gen",
    "n_depth",
    "avg_ts",
    "stddev_ts",
)
MANY_LAYERS = 99  # llama-bench's default for all layers, before it was -1
NUMBERS = {"n_batch": "batch", "n_ubatch": "ubatch"}
TYPES = {"type_k": "cache_type_k", "type_v": "cache_type_v"}
FLASH_ATTN_WORDS = {
    "true": "on",
    "1": "on",
    "on": "on",
    "false": "off",
    "0": "off",
    "off": "off",
}
MARKDOWN_SIGN = re.compile(r"\|\s{0,20}test\s{0,20}\|[^\n]{0,200}t/s", re.I)
BATCHED_SIGN = re.compile(r"\|\s{0,20}S_TG t/s")
ROUNDS_S = 0.0006  # of the times in tables of llama-batched-bench


def read(text: str) -> list[Figure]:
    """The figures of all tables and of llama-bench's other formats. ValueError for odd rows."""
    figures = list[Figure]()
    if llama_bench_rows.is_csv(text):
        figures += of_csv(text)
    elif "avg_ts" in text:
        for answer in fields.answers(text, COLUMNS):
            figures += of_columns(answer.values, answer.line)
    if MARKDOWN_SIGN.search(text):
        figures += of_llama_bench(text)
    if BATCHED_SIGN.search(text):
        figures += of_batched_bench(text)
    return figures


def of_csv(text: str) -> list[Figure]:
    """The tests of llama-bench's CSV, which may stand within another text."""
    before, head, rows = text.partition("build_commit")
    before = before.rpartition("\n")[0]
    quote = '"' if rows.startswith('"') else ""
    first_line = before.count("\n") + (3 if before else 2)
    figures = list[Figure]()
    reader = csv.DictReader(io.StringIO(f"{quote}{head}{rows}"))
    for line, row in enumerate(reader, first_line):
        figures += of_columns(row, line)
    return figures


def of_llama_bench(text: str) -> list[Figure]:
    """The tests of Markdown tables; a comparing script's table has a rate for each build."""
    devices = llama_bench_rows.devices_by_line(text)
    figures = list[Figure]()
    for row in markdown.rows(text, has_test_and_rate):
        if row.problem:
            continue
        cells = {head.lower(): cell for head, cell in row.cells.items()}
        device = llama_bench_rows.last_before(devices, row.line) or cells.get("gpu")
        columns: dict[str, str | None] = {
            HEADS.get(head, head): cell for head, cell in cells.items()
        }
        columns["gpu_info"] = device
        if "microbatch size" in cells:
            columns["n_ubatch"] = cells["microbatch size"]
        for head, cell in cells.items():
            if head.startswith("t/s"):
                build = head.removeprefix("t/s").strip()
                figures += of_test(columns, cells["test"], cell, build, row.line)
    return figures


def has_test_and_rate(cells: Sequence[str]) -> bool:
    """Whether cells are a head with a test and its rate."""
    heads = [cell.lower() for cell in cells]
    return "test" in heads and any(head.startswith("t/s") for head in heads)


def of_columns(columns: Mapping[str, str | None], line: int) -> list[Figure]:
    """A test in llama-bench's columns of JSON or CSV; nothing if its rate or sizes are missing."""
    if not columns.get("avg_ts"):
        return []
    n_prompt = columns.get("n_prompt")
    n_gen = columns.get("n_gen")
    n_depth = columns.get("n_depth")
    if n_prompt is None or n_gen is None:
        return []
    sizes = [count(n_prompt), count(n_gen)]
    if not any(sizes):
        return []
    deviation = columns.get("stddev_ts")
    tps = number(columns["avg_ts"] or "")
    spread = number_if_given(deviation)
    return [
        bench_figure(columns, (sizes[0], sizes[1], count_if_given(n_depth)), tps, spread, line)
    ]


def of_test(
    columns: Mapping[str, str | None], test: str, rate: str, build: str, line: int
) -> list[Figure]:
    """A test of a Markdown table.

    ValueError if its rate cannot be read; nothing for another test.
    """
    match = TEST.fullmatch(test)
    if not match or not (match[1] or match[2]):
        return []
    n_prompt, n_gen, n_depth = (int(size or 0) for size in match.groups())
    tps, deviation = rate_of(rate)
    return [bench_figure(columns, (n_prompt, n_gen, n_depth), tps, deviation, line, build)]


def bench_figure(
    columns: Mapping[str, str | None],
    sizes: tuple[int, int, int | None],
    tps: float,
    deviation: float | None,
    line: int,
    build: str = "",
) -> Figure:
    """A test with its sizes: tokens of the prompt, generated tokens, and the context before."""
    n_prompt, n_gen, n_depth = sizes
    phase = DECODE
    counts = STEPS
    if n_prompt and n_gen:
        phase = BOTH
        counts = MIXED
    elif n_prompt:
        phase = PREFILL
        counts = PROMPT
    model = (columns.get("model_type") or "")[:100] or None
    _, quantization = llama_bench_rows.model_of(model or "")
    return Figure(
        source=LLAMA_BENCH,
        tps=tps,
        phase=phase,
        counts=counts,
        n_prompt=n_prompt or None,
        n_gen=n_gen or None,
        depth=n_depth,
        n_streams=1,
        n_steps=n_gen or None,
        compute_tps=tps if phase == DECODE else None,
        is_speculative=False,
        model=model,
        quantization=quantization,
        n_params=params_of(columns),
        device=columns.get("gpu_info") or None,
        settings=settings_of(columns),
        spread=deviation / tps if deviation and tps else None,
        line=line,
        about=build,
    )


def params_of(columns: Mapping[str, str | None]) -> int | None:
    """The number of parameters: exact in JSON and CSV, rounded in Markdown."""
    exact = columns.get("model_n_params") or ""
    if exact.isdecimal():
        return int(exact)
    return llama_bench_rows.params_of(columns.get("params") or "")


def settings_of(columns: Mapping[str, str | None]) -> dict[str, Any]:
    """The settings that a row names, as keywords of AskedSettings.

    llama-bench uses its threads for both phases. None stands for all layers.
    """
    settings = dict[str, Any]()
    for name, setting in NUMBERS.items():
        value = columns.get(name) or ""
        if value.isdecimal():
            settings[setting] = int(value)
    for name, setting in TYPES.items():
        if columns.get(name):
            settings[setting] = str(columns[name]).lower()
    threads = columns.get("n_threads") or ""
    if threads.isdecimal():
        settings |= {"threads": int(threads), "threads_batch": int(threads)}
    flash_attn = str(columns.get("flash_attn") or "").lower()
    if flash_attn:
        settings["flash_attn"] = FLASH_ATTN_WORDS.get(flash_attn, "auto")
    layers = columns.get("n_gpu_layers") or ""
    if re.fullmatch(r"(CPU|BLAS|,)+", columns.get("backends") or ""):
        settings["n_gpu_layers"] = 0
    elif re.fullmatch(r"-?\d{1,6}", layers):
        is_all = int(layers) < 0 or int(layers) >= MANY_LAYERS
        settings["n_gpu_layers"] = None if is_all else int(layers)
    return settings


def of_batched_bench(text: str) -> list[Figure]:
    """Prefill and decode of llama-batched-bench (with a column B) and llama-sweep-bench.

    The first's N_KV is the context at the end of all sequences, the second's what was in it before.
    ValueError for a row that contradicts itself.
    """
    figures = list[Figure]()
    for row in markdown.rows(text, lambda cells: "S_TG t/s" in cells):
        if row.problem:
            continue
        figures += of_batch(row.cells, row.line)
    return figures


def of_batch(cells: Mapping[str, str], line: int) -> list[Figure]:
    """The two figures of a row. Rates sum up all sequences."""
    n_prompt = count(cells["PP"])
    n_gen = count(cells["TG"])
    n_kv = count(cells["N_KV"])
    n_streams = 1
    n_prompts = 1
    depth = n_kv
    depth_of_decode = n_kv
    source = "llama-sweep-bench"
    n_prefilled = n_prompt
    if "B" in cells:
        n_streams = count(cells["B"])
        depth = 0
        depth_of_decode = n_prompt
        source = "llama-batched-bench"
        n_prompts = n_streams
        if n_kv == n_prompt + n_streams * n_gen:  # one prompt for all
            n_prompts = 1
        n_prefilled = n_prompt * n_prompts
    prefill_s = number(cells["T_PP s"])
    decode_s = number(cells["T_TG s"])
    prefill_tps = number(cells["S_PP t/s"])
    decode_tps = number(cells["S_TG t/s"])
    check_rate(prefill_tps, n_prefilled, prefill_s, ROUNDS_S)
    check_rate(decode_tps, n_gen * n_streams, decode_s, ROUNDS_S)
    shared: dict[str, Any] = {
        "source": source,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_steps": n_gen or None,
        "prefill_s": prefill_s or None,
        "decode_s": decode_s or None,
        "is_speculative": False,
        "line": line,
    }
    figures = list[Figure]()
    if n_prompt:
        figures += phases(
            prefill_tps, None, PROMPT, (depth, None), n_streams=n_prompts, **shared
        )
    if n_gen:
        figures += phases(
            None, decode_tps, STEPS, (None, depth_of_decode), n_streams=n_streams, **shared
        )
    return figures
