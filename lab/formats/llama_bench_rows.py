"""llama-bench's output as rows of its columns: JSON, JSON lines, CSV, SQL, or Markdown in a text.

llama-bench tests prefill (`pp512`) and decode (`tg128 @ d4096`: 128 tokens after 4,096) separately.
Lines of llama.cpp's log before a Markdown table name the device, a line after it the build.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.errors import LabError
from lab.formats import markdown
from lab.formats.numbers import NUMBER, number
from lab.formats.text import MOST_LINES, cleaned

READABLE = (
    "Give llama-bench's output (best: llama-bench -o json), or a text with its Markdown table."
)
INSERT = "INSERT INTO "
FLASH_ATTN = {"off": 0, "on": 1, "auto": -1}
UNKNOWN_DEVICE = "unknown device"
HEADS = {
    "model": "model_type",
    "backend": "backends",
    "ngl": "n_gpu_layers",
    "threads": "n_threads",
    "th": "n_threads",
    "fa": "flash_attn",
    "rpk": "repack",
    "n_batch": "n_batch",
    "n_ubatch": "n_ubatch",
    "type_k": "type_k",
    "type_v": "type_v",
}
"""Heads of the Markdown table, and the columns that they show.

Other settings become the variant.
"""

LEFT_OUT = {
    "n_batch": 2048,
    "n_ubatch": 512,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": -1,
}
"""The Markdown table has no columns of settings that have their default."""

NO_SETTINGS = ("size", "params", "test", "t/s")
QUANTIZATION = re.compile(
    r"(?:mostly |all )?((?:I?Q|TQ)\d\w{0,20}|BF16|F16|F32|MXFP4)"
    r"(?: - (Small|Medium|Large|[\d.]{1,6} ?bpw)| MoE)?$"
)
TEST = re.compile(
    r"(?:pp *(\d{1,9}))?(?: *\+ *)?(?:tg *(\d{1,9}))?(?: *@ *(?:d|pp) *(\d{1,9}))?", re.I
)
RATE = re.compile(rf"({NUMBER})(?:\s{{0,9}}(?:\u00b1|\+/?-)\s{{0,9}}({NUMBER}))?")
DEVICES = tuple(
    re.compile(pattern, re.M)
    for pattern in (
        r"\bDevice (?P<device_id>\d{1,3}): (?P<hardware>[^\n,]{1,100}?),"
        r" (?:compute capability|gfx)",
        r"\bggml_vulkan: (?P<device_id>\d{1,3}) = (?P<hardware>[^\n]{1,100}?) \(",
        r"\bggml_metal\w{0,20}: (?:GPU name|picking default device|named"
        r" device): +(?P<hardware>(?!MTL\d)[^\n]{1,100})",
        r"(?:using device|- ) ?(?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)(?P<device_id>\d{1,3}) "
        r"\((?P<hardware>[^\n()]{1,80}(?:\([^\n()]{1,20}\)[^\n()]{0,40})?)\)",
        r"- (?:CUDA|ROCm|Vulkan|SYCL|MTL)(?P<device_id>\d{1,3}) {0,9}:"
        r" (?P<hardware>[^\n]{1,80}?) \(\d{2,9} MiB",
        r'\binference compute"? id=(?P<device_id>[\w-]{1,60})'
        r' [^\n]{0,200}\b(?:description|name)="(?P<hardware>[^"\n]{1,80})"',
        r"\| {1,4}(?P<device_id>\d{1,2})"
        r" {2,4}(?P<hardware>(?:NVIDIA|Tesla|Quadro) [^\n|]{1,60}?) {1,20}O(?:n|ff) ",
        r"^\W{0,9}(?:GPUs?|Hardware|Graphics card)[^\w\n]{0,4}:"
        r" {0,9}[^\w\n]{0,4}(?P<hardware>[^\n]{3,80})",
    )
)
"""Lines of logs that name a device, and its number."""

AFTER_DEVICE = re.compile(r"[\s*|]+$|, driver.*$", re.I)

HEAD = re.compile(r"[|\t]\s*test\s*[|\t]\s*t/s\s*(?:[|\t]|$)", re.M)
BUILD = re.compile(r"\bbuild: *([0-9a-f]{6,40})\b")


@dataclass(frozen=True)
class BenchRow:
    """A test: llama-bench's columns, and where it stands in the text."""

    place: str  # such as "line 7" or "test 2"
    columns: Mapping[str, Any]
    is_of_table: bool = False
    other_settings: str | None = None  # of a table: those that the lab has no name for


RECORDED = (
    *("model_filename", "model_type", "model_size", "model_n_params", "quantization"),
    *("n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "flash_attn"),
    *("repack", "build_commit", "build_number", "cpu_info", "gpu_info"),
    *("n_prompt", "n_gen", "n_depth"),
)
"""Columns that a record has a field for."""

MEASURED = (
    "test_time",
    "samples_ns",
    "samples_ts",
    "avg_ns",
    "avg_ts",
    "stddev_ns",
    "stddev_ts",
)


def kept_apart(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows, each with what makes it another setup than the rows before.

    Settings that a record has no field for are named where they differ, such as `no_kv_offload
    True`. Rows that differ in nothing are tests of two processes: the second has its place.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    further = []
    for name in names:
        values = {str(row.columns.get(name)) for row in rows}
        if name not in (*RECORDED, *MEASURED) and len(values) > 1:
            further.append(name)
    seen = set[tuple[str, ...]]()
    kept = []
    for row in rows:
        settings = [row.other_settings] if row.other_settings else []
        if not row.is_of_table:
            settings += [f"{name} {row.columns.get(name)}" for name in further]
        identity = (*(str(row.columns.get(name)) for name in RECORDED), *settings)
        if identity in seen:
            settings.append(row.place)
        seen.add(identity)
        kept.append(dataclasses.replace(row, other_settings=", ".join(settings) or None))
    return kept


@dataclass
class MarkdownTables:
    """What was read of the Markdown tables of a text so far."""

    rows: list[BenchRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def parse(text: str, name: str, device: str | None) -> tuple[list[BenchRow], list[str]]:
    """The rows of a text, and sentences on lines that are not read. LabError for another format."""
    begin = text.lstrip()[:1]
    try:
        if begin == "[":
            return numbered(json.loads(text)), []
        if begin == "{":
            lines = [line for line in text.splitlines() if line.strip()]
            return numbered([json.loads(line) for line in lines]), []
        if is_sql(text):
            return numbered([row for _, row in rows_of_sql(text)]), []
        if is_csv(text):
            return numbered(list(csv.DictReader(io.StringIO(text)))), []
    except (ValueError, RecursionError, csv.Error) as problem:
        table = of_tables(text, device)
        if table.rows or table.skipped:  # a post may begin with a bracket
            return table.rows, table.skipped
        raise LabError(
            f"{name} is not JSON or CSV of llama-bench: {problem}.", READABLE
        ) from None
    table = of_tables(text, device)
    return table.rows, table.skipped


def is_of_llama_bench(text: str) -> bool:
    """Whether a text, or its beginning, looks like llama-bench's output."""
    begin = text.lstrip()
    is_json = begin.startswith(("[", "{")) and '"build_commit"' in begin
    return is_json or is_csv(text) or is_sql(text) or bool(HEAD.search(text))


def is_csv(text: str) -> bool:
    """Whether a text is llama-bench's CSV."""
    return "build_commit," in text.replace('"', "") and not is_sql(text)


def is_sql(text: str) -> bool:
    """Whether a text is llama-bench's SQL, or its beginning."""
    return INSERT in text and "build_commit" in text


def rows_of_sql(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The columns of the tests in llama-bench's SQL, by line. csv.Error for odd quotes."""
    for line_number, line in enumerate(text.split("\n"), 1):
        _, _, names = line.partition(INSERT)
        names, values_word, values = names.partition(") VALUES (")
        if values_word:
            columns = [name.strip() for name in names.rpartition("(")[2].split(",")]
            written = values.rstrip().removesuffix(";").removesuffix(")")
            cells = next(csv.reader([written], quotechar="'", skipinitialspace=True))
            yield line_number, dict(zip(columns, cells, strict=False))


def numbered(parsed: Sequence[object]) -> list[BenchRow]:
    """Rows of parsed JSON or CSV; what is no object is left out."""
    rows = list[BenchRow]()
    for columns in parsed:
        if isinstance(columns, dict):
            rows.append(BenchRow(f"test {len(rows) + 1}", columns))
    return rows


def of_tables(text: str, device: str | None) -> MarkdownTables:
    """The rows of Markdown tables in a text; `device` is used if the text names none."""
    text = cleaned(text)
    n_lines = text.count("\n") + 1
    if n_lines > MOST_LINES:
        return MarkdownTables(
            skipped=[f"line 1: it has {n_lines:,} lines, and may have {MOST_LINES:,}"]
        )
    table = MarkdownTables()
    devices = devices_by_line(text)
    builds = builds_by_line(text)
    unnamed = None
    for line in markdown.rows(text, is_head):
        place = f"line {line.line}"
        try:
            if line.problem:
                raise ValueError(line.problem)
            row = row_of(place, line.cells)
        except (OverflowError, ValueError) as problem:
            table.skipped.append(f"{place} skipped: {problem}")
            continue
        gpus = last_before(devices, line.line) or device or ""
        columns = {**row.columns, "build_commit": first_after(builds, line.line)}
        if re.fullmatch(r"(CPU|BLAS|,)+", str(columns.get("backends"))):
            columns |= {"cpu_info": device, "gpu_info": ""}
        else:
            columns |= {"cpu_info": None, "gpu_info": gpus or UNKNOWN_DEVICE}
            if not gpus:
                unnamed = unnamed or place
        table.rows.append(BenchRow(place, columns, True, row.other_settings))
    if unnamed:
        table.skipped.append(
            f"{unnamed}: the text does not name the device; name it with --device"
        )
    return table


def is_head(cells: Sequence[str]) -> bool:
    """Whether cells are the head of llama-bench's table."""
    return [cell.lower() for cell in cells[-2:]] == ["test", "t/s"]


def devices_by_line(text: str) -> dict[int, str]:
    """The devices that a log names, by the line that names the last of them."""
    named = dict[int, str]()
    names = list[str]()
    last_line = 0
    for line_number, line in enumerate(text.split("\n"), 1):
        if "|" in line and markdown.cells_of(line):
            names = []
        for pattern in DEVICES:
            match = pattern.search(line[:1000])
            if match:
                name = device_named(match["hardware"])
                if names and last_line:
                    named.pop(last_line, None)
                names.append(name)
                last_line = line_number
                named[line_number] = ", ".join(dict.fromkeys(names))
                break
    return named


def device_named(written: str) -> str:
    """The name of a device, as a line of a log writes it."""
    return AFTER_DEVICE.sub("", written.strip()).replace(",", "")


def builds_by_line(text: str) -> dict[int, str]:
    """The builds that a text names, by line."""
    named = dict[int, str]()
    for line_number, line in enumerate(text.split("\n"), 1):
        match = BUILD.search(line[:1000])
        if match:
            named[line_number] = match[1]
    return named


def last_before(values: Mapping[int, str], line: int) -> str | None:
    """The value of the last line before this one."""
    lines = [each for each in values if each < line]
    return values[max(lines)] if lines else None


def first_after(values: Mapping[int, str], line: int) -> str | None:
    """The value of the first line after this one."""
    lines = [each for each in values if each > line]
    return values[min(lines)] if lines else None


def row_of(place: str, cells: Mapping[str, str]) -> BenchRow:
    """A row of the table. ValueError says what is wrong with it."""
    cells = {head.lower(): cell for head, cell in cells.items()}
    test = TEST.fullmatch(cells["test"])
    if not test or not (test[1] or test[2]):
        raise ValueError(
            f"{cells['test'][:100]!r} is not a test such as pp512 or tg128 @ d4096"
        )
    n_prompt, n_gen, n_depth = (int(length or 0) for length in test.groups())
    tps, deviation = rate_of(cells["t/s"])
    columns: dict[str, object] = dict(LEFT_OUT)
    more_settings = list[str]()
    for head, cell in cells.items():
        if head in HEADS and cell:
            columns[HEADS[head]] = cell
        elif head not in HEADS and head not in NO_SETTINGS:
            more_settings.append(f"{head} {cell}")
    columns |= {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": n_depth}
    columns |= {"avg_ts": tps, "stddev_ts": deviation}
    columns["avg_ns"] = round(1e9 * (n_prompt + n_gen) / tps)
    columns["model_n_params"] = params_of(cells.get("params", ""))
    return BenchRow(place, columns, True, ", ".join(more_settings) or None)


def rate_of(cell: str) -> tuple[float, float | None]:
    """Tokens per second and their standard deviation. ValueError if there is no rate above 0."""
    match = RATE.fullmatch(cell)
    tps = 0.0
    if match:
        tps = number(match[1])
    if not match or not tps:
        raise ValueError(f"{cell[:100]!r} is not a rate above 0")
    return tps, number(match[2]) if match[2] else None


def params_of(cell: str) -> int | None:
    """The number of parameters, from a cell such as 6.74 B."""
    match = re.fullmatch(r"([\d.]{1,12}) ([MB])", cell.replace(",", ""))
    if not match:
        return None
    unit = 1e6 if match[2] == "M" else 1e9
    return round(float(match[1]) * unit)


def model_of(model_type: str) -> tuple[str, str | None]:
    """The name of a model and its quantization, from llama-bench's column `model_type`."""
    match = QUANTIZATION.search(model_type)
    if not match:
        return model_type, None
    name = model_type[: match.start()].strip(" -.")
    quantization = match[1]
    if match[2] in ("Small", "Medium", "Large"):
        quantization = f"{quantization}_{match[2][0]}"
    return name, quantization
