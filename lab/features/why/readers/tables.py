"""Figures in tables: llama-bench in all its formats, scripts that compare two builds with it,
llama-benchy, llama-swap, llama-batched-bench, llama-sweep-bench, and tables that people write."""

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
    UNKNOWN,
    Figure,
)
from lab.features.why.readers import commands, meaning
from lab.features.why.readers.answers import PastedAnswer, Program, labelled
from lab.features.why.readers.meaning import TABLE
from lab.features.why.readers.rates import AGREE, check_rate, figures_of
from lab.formats import llama_bench_rows, markdown
from lab.formats.llama_bench_rows import HEADS, NO_SETTINGS, TEST, rate_of
from lab.formats.numbers import NUMBER, count, number

LLAMA_BENCH = "llama-bench"
TABLE_OF_A_PERSON = "a table"
COLUMNS: Sequence[str] = TABLE["llama_bench"]["columns"]
BATCHED: Mapping[str, str] = TABLE["batched_bench"]
SWAP: Mapping[str, str] = TABLE["llama_swap"]
NOT_STATED = ("", "auto", "none", "0.00", "unknown")
NO_FACTS = ("speedup", *NO_SETTINGS)
ON_CPU = re.compile(r"(CPU|BLAS|,)+")
OF_CLIENT = re.compile(r"peak t/s|ttfr|ttft|est_ppt|t/s \((?:total|req)", re.I)
MARKDOWN_SIGN = re.compile(r"\|\s{0,20}test\s{0,20}\|[^\n]{0,200}t/s", re.I)
HEAD_OF_BUILD = re.compile(
    r"(?:(?P<before>[^|()]{1,60}?)\s{1,20})?t/s(?:\s{0,20}[(\[]?(?P<after>[^|()\[\]]{1,60})[)\]]?)?"
)
"""A head such as `t/s`, `t/s master`, `PR t/s`, `t/s (PR)`: a rate, and the build that it is of."""

ROUNDS_S = 0.0006  # of the times in tables of llama-batched-bench

UNIT = r"(?:t|toks?|tokens?) ?(?:/|per) ?s(?:ec\w{0,4})?|tps"
HEAD_OF_PREFILL = re.compile(r"\b(?:pp *\d*|prompt|prefill)\b", re.I)
HEAD_OF_DECODE = re.compile(
    r"\b(?:tg *\d*|gen|generation|generated|decode|(?<!prompt )eval(?:uation)? rate)\b", re.I
)
HEAD_OF_UNIT = re.compile(rf"\b(?:{UNIT})(?!\w)", re.I)
NO_RATE = re.compile(
    r"spee?d-?up|diff|change|delta|gain|\bratio|%|\b(?:ms|time|latency|count|peak|max|p\d\d)\b",
    re.I,
)
CELL_OF_RATE = re.compile(
    rf"~?(?P<tps>{NUMBER})(?: ?(?:\u00b1|\+/-) ?{NUMBER})?(?P<unit> ?(?:{UNIT}))?", re.I
)
OF_BENCH = facts.defaults({facts.SPECULATION: facts.NO_DRAFTS, facts.SAMPLING: facts.GREEDY})
"""What is true of every test of a benchmark without a server."""

NO_SIZE = -1  # of a head that says a phase alone
NO_PHASE = (NO_SIZE, NO_SIZE, NO_SIZE)  # of a head that says a unit alone
NEGATION = re.compile(r"\b(?:no|not|without|w/o)\b", re.I)
Sizes = tuple[int, int, int | None]
"""Tokens of the prompt, generated tokens, and the context before."""


def read(text: str) -> list[Figure]:
    """The figures of all tables and of llama-bench's other formats. ValueError for odd rows."""
    figures = of_exports(text)
    if MARKDOWN_SIGN.search(text):
        figures += of_markdown(text)
    if "S_TG t/s" in text:
        for row in markdown.rows(text, lambda cells: "S_TG t/s" in cells):
            if not row.problem:
                figures += of_batch(row.cells, {}, row.line)
    if "speed_tg" in text:
        figures += of_batch_lines(text)
    if "|" in text or "Gen Speed" in text:
        figures += of_other_tables(text)
    return figures


def of_exports(text: str) -> list[Figure]:
    """The tests of llama-bench's SQL, CSV and JSON."""
    if llama_bench_rows.is_sql(text):
        places = llama_bench_rows.rows_of_sql(text)
    elif llama_bench_rows.is_csv(text):
        return of_csv(text)
    elif "avg_ts" in text:
        answers = labelled(text, dict(zip(COLUMNS, COLUMNS, strict=True)))
        places = ((answer.line, answer.values) for answer in answers)
    else:
        return []
    figures = list[Figure]()
    for line, row in places:
        figures += of_columns({name: row.get(name, "") for name in COLUMNS}, line)
    return figures


def of_csv(text: str) -> list[Figure]:
    """The tests of llama-bench's CSV, which may stand within another text."""
    head = "build_commit"
    before, *tables = text.split(head)
    head_line = before.count("\n") + 1
    figures = list[Figure]()
    for rows in tables:
        quote = '"' if rows.startswith('"') else ""
        reader = csv.DictReader(io.StringIO(f"{quote}{head}{rows}"))
        for line, row in enumerate(reader, head_line + 1):
            if not (row.get("n_prompt") or "").isdecimal():
                break  # what follows is another text
            figures += of_columns({name: row.get(name) or "" for name in COLUMNS}, line)
        head_line += rows.count("\n")
    return figures


def of_columns(columns: Mapping[str, str], line: int) -> list[Figure]:
    """A test in llama-bench's columns of JSON or CSV; nothing if its rate or sizes are missing."""
    n_prompt = columns.get("n_prompt")
    n_gen = columns.get("n_gen")
    if not columns.get("avg_ts") or not n_prompt or not n_gen:
        return []
    depth = columns.get("n_depth")
    sizes = (count(n_prompt), count(n_gen), count(depth) if depth else None)
    deviation = columns.get("stddev_ts")
    rate = (number(columns["avg_ts"]), number(deviation) if deviation else None)
    return bench_figures(facts_of_row(columns, line), sizes, rate, line)


def of_markdown(text: str) -> list[Figure]:
    """The tests of Markdown tables; a comparing script's table has a rate for each build."""
    figures = list[Figure]()
    prompts = dict[tuple[object, ...], int]()  # of llama-benchy, by model and depth
    defaults = commands.implied(commands.BENCH)  # the table has no columns of these
    for row in markdown.rows(text, has_test_and_rate):
        cells = {head.lower(): cell for head, cell in row.cells.items()}
        sizes = None if row.problem else sizes_of_test(cells["test"])
        if not sizes:
            continue
        if OF_CLIENT.search(" ".join(cells)):
            figures += of_client(cells, sizes, prompts, row.line)
            continue
        row_facts = {**defaults, **facts_of_row(cells, row.line)}
        for head, cell in cells.items():
            named = HEAD_OF_BUILD.fullmatch(head)
            if named:
                build = named["before"] or named["after"] or ""
                of_build = facts.stated({facts.BUILD: build}, row.line)
                tests = bench_figures(
                    {**row_facts, **of_build}, sizes, rate_of(cell), row.line
                )
                figures += [replace(test, about=build) for test in tests]
    return figures


def sizes_of_test(test: str) -> tuple[int, int, int] | None:
    """The sizes of a test such as tg128 @ d4096; None for another word."""
    match = TEST.fullmatch(test)
    if not match or not (match[1] or match[2]):
        return None
    return int(match[1] or 0), int(match[2] or 0), int(match[3] or 0)


def has_test_and_rate(cells: Sequence[str]) -> bool:
    """Whether cells are a head with a test and its rate: of llama-bench, or of a client."""
    heads = [cell.lower() for cell in cells]
    if "test" not in heads:
        return False
    behind = heads[heads.index("test") + 1 :]
    if not any(map(HEAD_OF_BUILD.fullmatch, behind)):
        return False
    of_bench = all(
        HEAD_OF_BUILD.fullmatch(head) or head in HEADS or NO_RATE.search(head)
        for head in behind
    )
    return of_bench or bool(OF_CLIENT.search(" ".join(heads)))


def bench_figures(
    row_facts: Mapping[str, Fact], sizes: Sizes, rate: tuple[float, float | None], line: int
) -> list[Figure]:
    """A test of llama-bench, by its rate and deviation; none without sizes."""
    n_prompt, n_gen, n_depth = sizes
    tps, deviation = rate
    phase = DECODE
    counts = STEPS
    if n_prompt:
        phase = BOTH if n_gen else PREFILL
        counts = MIXED if n_gen else PROMPT
    elif not n_gen:
        return []
    return [
        Figure(
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
            line=line,
        )
    ]


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
        "tps": tps,
        "is_of_server": True,
        "spread": deviation / tps if deviation else None,
        "line": line,
        "facts": facts.stated({facts.MODEL: cells.get("model")}, line),
    }
    if n_gen:
        before = prompts.get(key)
        depth = None if before is None else before + n_depth
        shared |= {"n_gen": n_gen, "depth": depth, "n_prompt": before}
        return [Figure(phase=DECODE, counts=MAYBE_FIRST, **shared)]
    prompts[key] = n_prompt
    spent = next((cell for head, cell in cells.items() if head.startswith("est_ppt")), "")
    n_counted = tps * rate_of(spent)[0] / 1e3 if spent else 0.0
    if abs(n_counted - n_prompt - n_depth) <= AGREE * n_counted:
        shared |= {"n_prompt": n_prompt + n_depth, "depth": 0}
    elif abs(n_counted - n_prompt) <= AGREE * n_counted:
        shared |= {"n_prompt": n_prompt, "depth": n_depth}
    return [Figure(phase=PREFILL, counts=PROMPT, **shared)]


def facts_of_row(row: Mapping[str, str], line: int) -> dict[str, Fact]:
    """The facts of a row of llama-bench: model, device, build, settings."""
    columns = {HEADS.get(head, head): cell for head, cell in row.items()}
    model = columns.pop("model_type", "")[:100]
    params = columns.pop("model_n_params", "") or columns.get("params", "")
    n_params = int(params) if params.isdecimal() else llama_bench_rows.params_of(params)
    backend = columns.pop("backends", "")
    commit = columns.pop("build_commit", "")
    row_facts = facts.stated(
        {
            facts.MODEL: model,
            facts.QUANTIZATION: llama_bench_rows.model_of(model)[1],
            facts.PARAMETERS: n_params,
            facts.BACKEND: backend,
            facts.BUILD: commit,
        },
        line,
    )
    for column, cell in columns.items():
        is_rate = HEAD_OF_BUILD.fullmatch(column) or NO_RATE.search(column)
        is_setup = column not in NO_FACTS and not is_rate and not column.startswith(SIZES)
        if is_setup and cell.lower() not in NOT_STATED:
            row_facts |= meaning.facts_of_column(column, cell, line)
    if ON_CPU.fullmatch(backend):  # which holds no layers of a device
        row_facts["n_gpu_layers"] = Fact(0, line)
    return row_facts


SIZES = ("n_prompt", "n_gen", "n_depth", "avg_ts", "stddev_ts")


def of_batch_lines(text: str) -> list[Figure]:
    """The JSON lines of llama-batched-bench, or of llama-sweep-bench, which have no `pl`."""
    figures = list[Figure]()
    heads = {name: head for head, name in BATCHED.items()}
    for answer in labelled(text, {**dict(zip(COLUMNS, COLUMNS, strict=True)), **heads}):
        if set(BATCHED) - set(answer.values) <= {"B"}:
            settings = {
                name: value for name, value in answer.values.items() if name not in BATCHED
            }
            figures += of_batch(
                answer.values, facts_of_row(settings, answer.line), answer.line
            )
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
    n_streams = count(cells.get("B", "1"))
    n_prompts = n_streams
    if n_kv == n_prompt + n_streams * n_gen:  # one prompt for all
        n_prompts = 1
    source = "llama-sweep-bench"
    depths = (n_kv, n_kv)  # of the prompt, and of the answer
    if "B" in cells:
        source = "llama-batched-bench"
        depths = (0, n_prompt)
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
    prefill = Figure(tps=prefill_tps, phase=PREFILL, counts=PROMPT, depth=depths[0], **shared)
    decode = Figure(tps=decode_tps, phase=DECODE, counts=STEPS, depth=depths[1], **shared)
    figures = list[Figure]()
    if n_prompt and prefill_tps:
        figures.append(replace(prefill, n_streams=n_prompts))
    if n_gen and decode_tps:
        figures.append(replace(decode, n_streams=n_streams))
    return figures


def of_other_tables(text: str) -> list[Figure]:
    """llama-swap's table of activity, and tables that people write: rates under heads that say of
    what.
    """
    figures = list[Figure]()
    heads = list[str]()
    is_of_swap = False
    for line_number, line in enumerate(text.split("\n"), 1):
        cells = markdown.cells_of(line)
        of_swap = [cell.strip() for cell in re.split(r"[|\t]", line[:1000].strip("> |"))]
        names = [cell.lower() for cell in of_swap]
        if "gen speed" in names:
            heads = names
            is_of_swap = True
        elif is_of_swap and len(of_swap) == len(heads):
            row = dict(zip(heads, of_swap, strict=True))
            figures += of_swap_row(row, line_number)
        elif is_head_of_rates(cells):
            heads = cells
            is_of_swap = False
        elif heads and not is_of_swap and len(cells) == len(heads):
            figures += of_row_of_rates(dict(zip(heads, cells, strict=True)), line_number)
        elif not line.count("|"):
            heads = []
    return figures


def of_swap_row(row: Mapping[str, str], line: int) -> list[Figure]:
    """A request of llama-swap: of a prompt only the new tokens are timed."""
    answer = PastedAnswer(line)
    for head, name in SWAP.items():
        value = re.sub(r"\s*t/s$", "", row.get(head, ""))
        if (name == "model" and value) or re.match(r"\d", value):
            answer.values[name] = value
    return figures_of(answer, Program(source="llama-swap"))


def is_head_of_rates(cells: Sequence[str]) -> bool:
    """Whether a head has columns of prefill or decode, and is of no known program."""
    is_known = has_test_and_rate(cells) or "S_TG t/s" in cells
    has_numbers = any(map(CELL_OF_RATE.fullmatch, cells))
    if is_known or has_numbers or OF_CLIENT.search(" ".join(cells)):
        return False
    return (
        "test" in map(str.lower, cells)
        or any(map(sizes_of_head, cells))
        or any(map(is_unit_alone, cells))
    )


def is_unit_alone(head: str) -> bool:
    """Whether a head is of a rate, and says no phase: `tok/s`, `t/s after`."""
    return bool(HEAD_OF_UNIT.search(head)) and not NO_RATE.search(head)


def sizes_of_head(head: str) -> tuple[int, int, int] | None:
    """The sizes of a head; None for no column of one phase.

    A head without sizes has NO_SIZE for those of its phase, as its context is unknown.
    """
    if NO_RATE.search(head):
        return None
    plain = re.sub(rf"[(\[]?(?:{UNIT})[)\]]?", "", head, flags=re.I).strip()
    sizes = sizes_of_test(plain.partition(",")[0])
    if sizes and bool(sizes[0]) != bool(sizes[1]):
        return sizes
    is_prefill = bool(HEAD_OF_PREFILL.search(plain))
    is_decode = bool(HEAD_OF_DECODE.search(plain))
    if is_prefill == is_decode:
        return None
    return (NO_SIZE, 0, NO_SIZE) if is_prefill else (0, NO_SIZE, NO_SIZE)


def of_row_of_rates(row: Mapping[str, str], line: int) -> list[Figure]:
    """The rates of a row; its other columns are labels, or facts by the names of their heads."""
    test = next((cell for head, cell in row.items() if head.lower() == "test"), "")
    has_points = any(re.match(r"\d[\d,]*\.\d+(?![\d,.])", cell) for cell in row.values())
    has_phase = bool(test)
    for head, cell in row.items():
        has_unit = bool(HEAD_OF_UNIT.search(head))
        has_phase |= bool(sizes_of_head(head) and rate_of_cell(cell, has_unit, has_points))
    row_facts = dict[str, Fact]()
    labels = list[str]()
    figures = list[Figure]()
    for head, cell in row.items():
        if not cell or head.lower() == "test" or NO_RATE.search(head):
            continue
        of_cell = CELL_OF_RATE.fullmatch(cell)
        has_unit = bool(HEAD_OF_UNIT.search(head) or (of_cell and of_cell["unit"]))
        sizes = sizes_of_head(test if test and has_unit else head)
        if sizes is None and not has_phase and is_unit_alone(head):
            sizes = NO_PHASE
        if sizes is None and is_unit_alone(head):
            continue
        if sizes is None or (NO_SIZE in sizes and not of_cell):
            has_words = re.search("[^\\W\\d]", cell)
            name = cell if has_words else f"{head} {cell}"
            labels += [name[:40]] if not figures else []
            row_facts |= facts_of_label(head.lower(), cell, line)
            continue
        tps = rate_of_cell(cell, has_unit or NO_SIZE not in sizes, has_points)
        if tps:
            figure = rate_of_table(sizes, tps)
            is_named = (NO_SIZE in sizes and not HEAD_OF_UNIT.fullmatch(head)) or test
            figures.append(replace(figure, about=head if is_named else ""))
    completed = list[Figure]()
    for figure in figures:
        about = ", ".join(filter(None, (*labels, figure.about)))
        completed.append(replace(figure, about=about, facts=row_facts, line=line))
    return completed


def facts_of_label(head: str, cell: str, line: int) -> dict[str, Fact]:
    """The facts of a column that is no rate; none if its head does not name one."""
    column = HEADS.get(head, head)
    if head == facts.MODEL:
        return meaning.facts_of(head, cell, line)
    is_named = column in meaning.FACT_NAMES or f"-{column}" in meaning.FACT_NAMES
    if is_named:
        return meaning.facts_of_column(column, cell, line)
    has_options = "-" in cell and not NEGATION.search(cell)
    return commands.facts_of(commands.words_of(cell), "", line) if has_options else {}


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


def rate_of_table(sizes: tuple[int, int, int], tps: float) -> Figure:
    """A rate of a table that a person wrote."""
    if sizes == NO_PHASE:
        return Figure(source=TABLE_OF_A_PERSON, tps=tps, phase=UNKNOWN, counts=UNKNOWN)
    n_prompt, n_gen, depth = sizes
    return Figure(
        source=TABLE_OF_A_PERSON,
        tps=tps,
        phase=PREFILL if n_prompt else DECODE,
        counts=PROMPT if n_prompt else MAYBE_FIRST,
        n_prompt=n_prompt if n_prompt > 0 else None,
        n_gen=n_gen if n_gen > 0 else None,
        depth=None if depth == NO_SIZE else depth,
    )
