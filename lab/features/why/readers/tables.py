"""Figures in tables: llama-bench in all its formats, scripts that compare two builds with it,
llama-benchy, llama-swap, llama-batched-bench and llama-sweep-bench."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.figure import (
    BOTH,
    DECODE,
    MAYBE_FIRST,
    MIXED,
    PREFILL,
    PROMPT,
    STEPS,
    Figure,
)
from lab.features.why.readers import commands, values
from lab.features.why.readers.values import PastedAnswer, Program, check_rate
from lab.formats import llama_bench_rows, markdown
from lab.formats.llama_bench_rows import HEADS, NO_SETTINGS, TEST, rate_of
from lab.formats.numbers import NUMBER, count, number

LLAMA_BENCH = "llama-bench"
NAMES = {
    "n_batch": ("batch",),
    "n_ubatch": ("ubatch",),
    "microbatch size": ("ubatch",),
    "n_threads": commands.THREADS,
    "n_threads_batch": ("threads_batch",),
    "type_k": ("cache_type_k",),
    "type_v": ("cache_type_v",),
    "n_gpu_layers": ("n_gpu_layers",),
    "flash_attn": ("flash_attn",),
    "devices": ("device",),
    "split_mode": ("split_mode",),
    "main_gpu": ("main_gpu",),
    "tensor_split": ("tensor_split",),
    "tensor_buft_overrides": ("override_tensor",),
    "n_cpu_moe": ("n_cpu_moe",),
    "use_mmap": ("mmap",),
    "no_kv_offload": ("kv_offload",),
}
"""Names of facts for columns of JSON and CSV; heads of Markdown are short options."""

NOT_STATED = ("", "auto", "none", "0.00", "unknown")
SIZES = ("n_prompt", "n_gen", "n_depth", "avg_ts", "stddev_ts")
IDENTITY = (
    "model_type",
    "model_n_params",
    "gpu_info",
    "backends",
    "build_number",
    "build_commit",
)
COLUMNS = (*NAMES, *SIZES, *IDENTITY)
OF_A_TEST = ("gpu", "model", "speedup", *NO_SETTINGS)
NEGATED = ("no_kv_offload", "nkvo", "nopo")
ON_CPU = re.compile(r"(CPU|BLAS|,)+")
OF_CLIENT = re.compile(r"peak t/s|ttfr|ttft|est_ppt|t/s \(", re.I)
MARKDOWN_SIGN = re.compile(r"\|\s{0,20}test\s{0,20}\|[^\n]{0,200}t/s", re.I)
BATCHED_SIGN = re.compile(r"\|\s{0,20}S_TG t/s")
ROUNDS_S = 0.0006  # of the times in tables of llama-batched-bench
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
SWAP = Program(source="llama-swap")
SWAP_HEADS = {
    "model": "model",
    "cached": "n_cached",
    "prompt": "n_prompt",
    "generated": "n_gen",
    "prompt speed": "prefill_tps",
    "gen speed": "decode_tps",
}
AGREE = 0.02

UNIT = r"(?:t|toks?|tokens?) ?(?:/|per) ?s(?:ec\w{0,4})?|tps"
HEAD_OF_PREFILL = re.compile(r"\b(?:pp *\d*|prompt|prefill)\b", re.I)
HEAD_OF_DECODE = re.compile(r"\b(?:tg *\d*|gen|generation|generated|decode)\b", re.I)
HEAD_OF_UNIT = re.compile(rf"\b(?:{UNIT})(?!\w)", re.I)
NO_RATE = re.compile(
    r"speed-?up|diff|change|delta|gain|\bratio|%|\b(?:ms|time|latency|count|peak|max|p\d\d)\b",
    re.I,
)
CELL_OF_RATE = re.compile(
    rf"~?(?P<tps>{NUMBER})(?: ?(?:\u00b1|\+/-) ?{NUMBER})?(?P<unit> ?(?:{UNIT}))?", re.I
)
NAMES_OF_LABELS = {
    "build": facts.BUILD,
    "version": facts.BUILD,
    "gpu": facts.HARDWARE,
    "device": facts.HARDWARE,
    "hardware": facts.HARDWARE,
    "card": facts.HARDWARE,
    "backend": facts.BACKEND,
    "quant": facts.QUANTIZATION,
    "quantization": facts.QUANTIZATION,
}

Columns = Mapping[str, str | None]


def read(text: str) -> list[Figure]:
    """The figures of all tables and of llama-bench's other formats. ValueError for odd rows."""
    figures = list[Figure]()
    if llama_bench_rows.is_csv(text):
        figures += of_csv(text)
    elif "avg_ts" in text:
        for answer in values.answers(text, COLUMNS):
            figures += of_columns(answer.values, answer.line)
    if MARKDOWN_SIGN.search(text):
        figures += of_markdown(text)
    if BATCHED_SIGN.search(text):
        for row in markdown.rows(text, lambda cells: "S_TG t/s" in cells):
            if not row.problem:
                figures += of_batch(row.cells, {}, row.line)
    figures += of_batch_lines(text)
    if "|" in text:
        figures += of_rate_columns(text)
    if re.search(r"\bGen Speed\b", text):
        figures += of_llama_swap(text)
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
        if not (row.get("n_prompt") or "").isdecimal():
            break  # what follows is another text
        figures += of_columns(row, line)
    return figures


def of_markdown(text: str) -> list[Figure]:
    """The tests of Markdown tables; a comparing script's table has a rate for each build."""
    figures = list[Figure]()
    prompts = dict[tuple[object, ...], int]()  # of llama-benchy, by model and depth
    for row in markdown.rows(text, has_test_and_rate):
        if row.problem:
            continue
        cells = {head.lower(): cell for head, cell in row.cells.items()}
        match = TEST.fullmatch(cells["test"])
        if not match or not (match[1] or match[2]):
            continue
        n_prompt, n_gen, n_depth = (int(size or 0) for size in match.groups())
        sizes = (n_prompt, n_gen, n_depth)
        if OF_CLIENT.search(" ".join(cells)):
            figures += of_client(cells, sizes, prompts, row.line)
            continue
        for head, cell in cells.items():
            if head.startswith("t/s"):
                tps, deviation = rate_of(cell)
                figure = bench_figure(facts_of_cells(cells, row.line), sizes, tps, deviation)
                build = head.removeprefix("t/s").strip()
                if build:
                    row_facts = {**figure.facts, facts.BUILD: Fact(build, row.line)}
                    figure = replace(figure, about=build, facts=row_facts)
                figures.append(replace(figure, line=row.line))
    return figures


def has_test_and_rate(cells: Sequence[str]) -> bool:
    """Whether cells are a head with a test and its rate: of llama-bench, or of a client."""
    heads = [cell.lower() for cell in cells]
    if "test" not in heads:
        return False
    behind = heads[heads.index("test") + 1 :]
    if not behind or not behind[0].startswith("t/s"):
        return False
    of_bench = all(head.startswith("t/s") or head == "speedup" for head in behind)
    return of_bench or bool(OF_CLIENT.search(" ".join(heads)))


def of_client(
    cells: Mapping[str, str],
    sizes: tuple[int, int, int],
    prompts: dict[tuple[object, ...], int],
    line: int,
) -> list[Figure]:
    """A test of llama-benchy, which asks a server: its answer begins after depth and prompt.

    Whether the rate of a prompt counts the tokens of its depth follows from its time.
    """
    n_prompt, n_gen, n_depth = sizes
    if "t/s" not in cells or (n_prompt and n_gen):
        return []
    tps, deviation = rate_of(cells["t/s"])
    key = (cells.get("model"), n_depth)
    shared: dict[str, Any] = {
        "source": "llama-benchy",
        "is_of_server": True,
        "spread": deviation / tps if deviation else None,
        "line": line,
        "facts": facts.stated({facts.MODEL: cells.get("model")}, line),
    }
    if n_gen:
        before = prompts.get(key)
        depth = None if before is None else before + n_depth
        shared |= {"n_gen": n_gen, "depth": depth, "n_prompt": before}
        return [Figure(tps=tps, phase=DECODE, counts=MAYBE_FIRST, **shared)]
    prompts[key] = n_prompt
    spent = next((cell for head, cell in cells.items() if head.startswith("est_ppt")), "")
    n_counted = tps * rate_of(spent)[0] / 1e3 if spent else 0.0
    if abs(n_counted - n_prompt - n_depth) <= AGREE * n_counted:
        shared |= {"n_prompt": n_prompt + n_depth, "depth": 0}
    elif abs(n_counted - n_prompt) <= AGREE * n_counted:
        shared |= {"n_prompt": n_prompt, "depth": n_depth}
    return [Figure(tps=tps, phase=PREFILL, counts=PROMPT, **shared)]


def of_columns(columns: Columns, line: int) -> list[Figure]:
    """A test in llama-bench's columns of JSON or CSV; nothing if its rate or sizes are missing."""
    n_prompt = columns.get("n_prompt")
    n_gen = columns.get("n_gen")
    if not columns.get("avg_ts") or n_prompt is None or n_gen is None:
        return []
    depth = columns.get("n_depth")
    sizes = (count(n_prompt), count(n_gen), count(depth) if depth else None)
    if not any(sizes[:2]):
        return []
    deviation = columns.get("stddev_ts")
    tps = number(columns["avg_ts"] or "")
    spread = number(deviation) if deviation else None
    figure = bench_figure(facts_of_columns(columns, line), sizes, tps, spread)
    return [replace(figure, line=line)]


def bench_figure(
    row_facts: Mapping[str, Fact],
    sizes: tuple[int, int, int | None],
    tps: float,
    deviation: float | None,
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
        facts={**OF_BENCH, **row_facts},
        spread=deviation / tps if deviation and tps else None,
    )


OF_BENCH = facts.defaults({facts.SPECULATION: facts.NO_DRAFTS, facts.SAMPLING: facts.GREEDY})
"""What is true of every test of a benchmark without a server."""


def facts_of_cells(cells: Mapping[str, str], line: int) -> dict[str, Fact]:
    """The facts of a row of Markdown; the table has no columns of settings at their default."""
    row_facts = dict(commands.implied(commands.BENCH))
    row_facts |= identity(cells.get("model"), cells.get("params"), line)
    row_facts |= facts.stated({facts.HARDWARE: cells.get("gpu")}, line)
    for head, cell in cells.items():
        if head in OF_A_TEST or head.startswith("t/s") or not cell:
            continue
        column = HEADS.get(head, head)
        if column == "backends":
            row_facts |= backend(cell, line)
            continue
        short = commands.NAMES_OF_FLAGS.get(f"-{head}", (head,))
        row_facts |= setting(NAMES.get(column, short), head, cell, line)
    return row_facts


def facts_of_columns(columns: Columns, line: int) -> dict[str, Fact]:
    """The facts of a row of JSON or CSV."""
    row_facts = identity(columns.get("model_type"), columns.get("model_n_params"), line)
    build = columns.get("build_number") or columns.get("build_commit")
    row_facts |= facts.stated(
        {facts.HARDWARE: columns.get("gpu_info"), facts.BUILD: build}, line
    )
    for column, names in NAMES.items():
        value = columns.get(column)
        if value and value.lower() not in NOT_STATED:
            row_facts |= setting(names, column, value, line)
    return row_facts | backend(columns.get("backends") or "", line)


def identity(model_type: str | None, params: str | None, line: int) -> dict[str, Fact]:
    """The model of a row, its quantization, and its parameters: exact, or rounded in Markdown."""
    model = (model_type or "")[:100]
    exact = int(params) if params and params.isdecimal() else None
    return facts.stated(
        {
            facts.MODEL: model,
            facts.QUANTIZATION: llama_bench_rows.model_of(model)[1],
            facts.PARAMETERS: exact or llama_bench_rows.params_of(params or ""),
        },
        line,
    )


def backend(written: str, line: int) -> dict[str, Fact]:
    """The backend; the CPU's holds no layers of a device."""
    if written and ON_CPU.fullmatch(written):
        return facts.stated({facts.BACKEND: written, "n_gpu_layers": 0}, line)
    return facts.stated({facts.BACKEND: written}, line)


def setting(names: Sequence[str], column: str, written: str, line: int) -> dict[str, Fact]:
    """The facts of a column of settings. A negative number of layers stands for all."""
    row_facts = dict[str, Fact]()
    for name in names:
        if name == "n_gpu_layers" and re.fullmatch(r"-\d{1,4}", written):
            row_facts[name] = Fact(None, line, shown=written)
        elif column in NEGATED:
            row_facts[name] = Fact(written.lower() not in commands.ON, line)
        else:
            row_facts |= commands.fact_of_setting(name, written, line)
    return row_facts


def of_batch_lines(text: str) -> list[Figure]:
    """The JSON lines of llama-batched-bench, or of llama-sweep-bench, which have no `pl`."""
    figures = list[Figure]()
    if not re.search(r"[\"']speed_tg[\"']", text):
        return figures
    for answer in values.answers(text, (*BATCHED_COLUMNS.values(), *NAMES)):
        cells = dict[str, str]()
        for head, name in BATCHED_COLUMNS.items():
            if name in answer.values:
                cells[head] = answer.values[name]
        if not set(BATCHED_COLUMNS) - set(cells) - {"B"}:
            row_facts = facts_of_columns(answer.values, answer.line)
            figures += of_batch(cells, row_facts, answer.line)
    return figures


def of_batch(
    cells: Mapping[str, str], row_facts: Mapping[str, Fact], line: int
) -> list[Figure]:
    """Prefill and decode of a row of llama-batched-bench (with a column B) or sweep-bench.

    The first's N_KV is the context at the end of all sequences, the second's what was in it before.
    Rates sum up all sequences. ValueError for a row that contradicts itself.
    """
    n_prompt = count(cells["PP"])
    n_gen = count(cells["TG"])
    n_kv = count(cells["N_KV"])
    n_streams = 1
    n_prompts = 1
    depth = n_kv
    depth_of_decode = n_kv
    source = "llama-sweep-bench"
    if "B" in cells:
        n_streams = count(cells["B"])
        depth = 0
        depth_of_decode = n_prompt
        source = "llama-batched-bench"
        n_prompts = n_streams
        if n_kv == n_prompt + n_streams * n_gen:  # one prompt for all
            n_prompts = 1
    prefill_s = number(cells["T_PP s"])
    decode_s = number(cells["T_TG s"])
    prefill_tps = number(cells["S_PP t/s"])
    decode_tps = number(cells["S_TG t/s"])
    check_rate(prefill_tps, n_prompt * n_prompts, prefill_s, ROUNDS_S)
    check_rate(decode_tps, n_gen * n_streams, decode_s, ROUNDS_S)
    shared: dict[str, Any] = {
        "source": source,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_steps": n_gen or None,
        "prefill_s": prefill_s or None,
        "decode_s": decode_s or None,
        "facts": {**OF_BENCH, **row_facts},
        "line": line,
    }
    figures = list[Figure]()
    if n_prompt and prefill_tps:
        prefill = Figure(tps=prefill_tps, phase=PREFILL, counts=PROMPT, depth=depth, **shared)
        figures.append(replace(prefill, n_streams=n_prompts))
    if n_gen and decode_tps:
        decode = Figure(tps=decode_tps, phase=DECODE, counts=STEPS, **shared)
        figures.append(replace(decode, depth=depth_of_decode, n_streams=n_streams))
    return figures


def of_llama_swap(text: str) -> list[Figure]:
    """The requests of llama-swap's table of activity: of a prompt only the new tokens are timed."""
    figures = list[Figure]()
    heads = list[str]()
    for line_number, line in enumerate(text.split("\n"), 1):
        cells = [cell.strip() for cell in re.split(r"[|\t]", line[:1000].strip("> |"))]
        names = [cell.lower() for cell in cells]
        if "gen speed" in names:
            heads = names
        elif len(cells) != len(heads):
            heads = []
        elif heads:
            read = dict(zip(heads, cells, strict=True))
            answer = PastedAnswer(line_number)
            for head, name in SWAP_HEADS.items():
                value = re.sub(r"\s*t/s$", "", read.get(head, ""))
                if (name == "model" and value) or re.match(r"\d", value):
                    answer.values[name] = value
            figures += values.figures_of(answer, SWAP)
    return figures


def of_rate_columns(text: str) -> list[Figure]:
    """Tables that people write: a row for each setup, columns of rates whose heads say of what."""
    figures = list[Figure]()
    heads = list[str]()
    for line_number, line in enumerate(text.split("\n"), 1):
        cells = markdown.cells_of(line)
        if not cells:
            if line.count("|") < 1:
                heads = []
        elif is_head_of_rates(cells):
            heads = cells
        elif len(cells) == len(heads):
            figures += of_row_of_rates(heads, cells, line_number)
    return figures


def is_head_of_rates(cells: Sequence[str]) -> bool:
    """Whether a head has columns of prefill or decode, and is of no known program."""
    names = [cell.lower() for cell in cells]
    is_known = has_test_and_rate(cells) or "gen speed" in names or "S_TG t/s" in cells
    has_numbers = any(map(CELL_OF_RATE.fullmatch, cells))
    if is_known or OF_CLIENT.search(" ".join(names)) or has_numbers:
        return False
    return any(map(sizes_of_head, cells)) or ("test" in names and has_unit(cells))


def has_unit(cells: Sequence[str]) -> bool:
    """Whether a head has columns of rates."""
    return any(HEAD_OF_UNIT.search(cell) for cell in cells)


def sizes_of_head(head: str) -> tuple[int, int, int] | None:
    """Tokens of the prompt, generated tokens and depth of a head; None for no column of one phase.

    A head without sizes has -1 for those of its phase, as its context is unknown.
    """
    if NO_RATE.search(head):
        return None
    plain = re.sub(rf"[(\[]?(?:{UNIT})[)\]]?", "", head, flags=re.I).strip()
    match = TEST.fullmatch(plain)
    if match and bool(match[1]) != bool(match[2]):
        n_prompt, n_gen, depth = (int(size or 0) for size in match.groups())
        return n_prompt, n_gen, depth
    is_prefill = bool(HEAD_OF_PREFILL.search(plain))
    is_decode = bool(HEAD_OF_DECODE.search(plain))
    if is_prefill == is_decode:
        return None
    return (-1, 0, -1) if is_prefill else (0, -1, -1)


def of_row_of_rates(heads: Sequence[str], cells: Sequence[str], line: int) -> list[Figure]:
    """The rates of a row; its other columns are labels, or facts by the names of their heads."""
    row = dict(zip(heads, cells, strict=True))
    test = next((cell for head, cell in row.items() if head.lower() == "test"), "")
    has_points = any(re.match(r"\d+\.\d", cell) for cell in cells)
    row_facts = dict[str, Fact]()
    labels = list[str]()
    figures = list[Figure]()
    for head, cell in row.items():
        if not cell or head.lower() == "test" or NO_RATE.search(head):
            continue
        sizes = sizes_of_head(test if test and HEAD_OF_UNIT.search(head) else head)
        if sizes is None:
            labels += [cell[:40]] if not figures else []
            row_facts |= facts_of_label(head.lower(), cell, line)
            continue
        tps = rate_of_cell(
            cell, bool(HEAD_OF_UNIT.search(head)) or -1 not in sizes, has_points
        )
        if tps:
            figures.append(rate_of_table(head, sizes, tps, is_of_test=bool(test)))
    completed = list[Figure]()
    for figure in figures:
        about = ", ".join(filter(None, (*labels, figure.about)))
        completed.append(replace(figure, about=about, facts=row_facts, line=line))
    return completed


def rate_of_cell(cell: str, has_unit: bool, has_points: bool) -> float | None:
    """The rate of a cell; None for another cell, or if its comma has two meanings.

    Where another number of the row has a decimal point, a comma marks thousands.
    """
    match = CELL_OF_RATE.fullmatch(cell)
    if not match or not (match["unit"] or has_unit):
        return None
    written = match["tps"].replace(",", "") if has_points else match["tps"]
    try:
        return number(written)
    except ValueError:
        return None


def rate_of_table(
    head: str, sizes: tuple[int, int, int], tps: float, is_of_test: bool
) -> Figure:
    """A rate under its head."""
    n_prompt, n_gen, depth = sizes
    phase = PREFILL if n_prompt else DECODE
    is_sized = -1 not in sizes
    about = "" if is_sized and not is_of_test else head
    return Figure(
        source="a table",
        tps=tps,
        phase=phase,
        counts=PROMPT if n_prompt else MAYBE_FIRST,
        n_prompt=n_prompt if is_sized and n_prompt else None,
        n_gen=n_gen if is_sized and n_gen else None,
        depth=depth if is_sized else None,
        about=about,
    )


def facts_of_label(head: str, cell: str, line: int) -> dict[str, Fact]:
    """The fact of a column that is no rate; none if its head does not name one."""
    if head == facts.MODEL:
        return facts.stated(commands.name_of_model(cell), line)
    name = NAMES_OF_LABELS.get(head)
    if name:
        return facts.stated({name: cell}, line)
    known = NAMES.get(HEADS.get(head, head), commands.NAMES_OF_FLAGS.get(f"-{head}", ()))
    return setting(known, head, cell, line)
