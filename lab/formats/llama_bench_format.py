"""llama-bench's format (tools/llama-bench): the lab's runs as rows of it, and its output as records.

llama-bench tests prefill (`pp512`) and decode (`tg128 @ d4096`: 128 tokens after 4,096) separately; a run of the lab
gives a row of each. A `tg` row counts decode compute, without choosing tokens. Markdown tables are found within a text:
lines of llama.cpp's log before them name the device, a line after them the build.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core import phases
from lab.core.lines import from_json, to_json
from lab.core.record import (
    OK,
    UNKNOWN_THREADS,
    Device,
    Machine,
    Model,
    Record,
    Run,
    Settings,
    Steps,
    Totals,
)
from lab.errors import LabError, printable
from lab.runner import machine

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("json", "md")
_COLUMNS = """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch
n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload
flash_attn devices tensor_split tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack
fit_target fit_min_ctx n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
"""
COLUMNS = _COLUMNS.split()  # llama-bench's columns in its order
NUMBERS = (
    "n_batch",
    "n_ubatch",
    "n_threads",
    "n_gpu_layers",
)  # settings that have the same name and meaning in both
STDIN = "-"
MOST_REASONS = 5
MOST_LETTERS = 10_000
MOST_LINES = 50_000
"""Sentences on lines that an error repeats; the length of a line of a table; lines of a text with tables."""

READABLE = (
    "Give llama-bench's output (best: llama-bench -o json), or a text with its Markdown table."
)
REQUIRED = (
    "model_filename",
    "model_n_params",
    "test_time",
    "flash_attn",
    "type_k",
    "type_v",
    *NUMBERS,
)
FLASH_ATTN = {"off": 0, "on": 1, "auto": -1}
DEFAULTS = {
    **{
        "cpu_mask": "0x0",
        "poll": 50,
        "split_mode": "layer",
        "tensor_split": "0.00",
        "tensor_buft_overrides": "none",
    },
    **dict.fromkeys(("n_cpu_moe", "main_gpu", "fit_target", "fit_min_ctx"), 0),
    **dict.fromkeys(("cpu_strict", "no_kv_offload", "embeddings", "no_host"), False),
    **dict.fromkeys(("devices", "load_mode", "lazy_mode"), "auto"),
}
"""What the lab leaves at llama.cpp's defaults, as llama-bench words these."""

HEADS = {
    **{name: name for name in ("n_batch", "n_ubatch", "type_k", "type_v")},
    **{"model": "model_type", "backend": "backends", "ngl": "n_gpu_layers", "threads": "n_threads"},
    **{"fa": "flash_attn", "rpk": "repack"},
}
"""Heads of the Markdown table, and the columns that they show. Other settings become the variant."""

LEFT_OUT = {"n_batch": 2048, "n_ubatch": 512, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1}
"""The Markdown table has no columns of settings that have their default."""

QUANTIZATION = (
    r"(?:mostly |all )?((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4)(?: - (Small|Medium|Large|.*bpw)| MoE)?$"
)
TEST = r"(?:pp *(\d{1,9}))?(?: *\+ *)?(?:tg *(\d{1,9}))?(?: *@ *(?:d|pp) *(\d{1,9}))?"
NUMBER = r"(\d[\d.,]*\d|\d)"
RATE = rf"{NUMBER}(?:\s*(?:\u00c2?\u00b1|\+/?-)\s*{NUMBER})?"
"""A test such as `tg128 @ d4096`; a rate with its deviation. `lab why` reads pasted tables with them, too."""

UNKNOWN = "unknown device"
DEVICES = (
    r"\bDevice (?P<number>\d+): (?P<name>.{1,100}?), (?:compute capability|gfx)",  # CUDA and ROCm
    r"\bggml_vulkan: (?P<number>\d+) = (?P<name>.{1,100}?) \(",
    r"\bggml_metal\w*: (?:GPU name|picking default device|found device): +(?P<name>(?!MTL\d).+)",
)


def llama_bench_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row per setup and test: llama-bench's columns, `samples_ns` and `samples_ts`; unknown is None."""
    tests: dict[str, dict[str, Any]] = {}
    for record in records:
        settings = record.settings
        model = record.model
        here = record.machine
        offload = machine.accelerators(here.devices)
        backends = dict.fromkeys(
            device.name.rstrip("0123456789") for device in offload or here.devices
        )
        setup = {
            **dict.fromkeys(COLUMNS),
            **DEFAULTS,
            "build_commit": here.llama_cpp_commit
            and here.llama_cpp_commit.partition("-")[0],  # without -dirty
            "cpu_info": here.cpu,
            "gpu_info": ", ".join(device.description for device in offload),
            "backends": ",".join(backends) or None,
            "model_filename": model.file or None,
            "model_type": model.description
            or " ".join(filter(None, (model.name, model.quantization))),
            "model_size": sum(model.tensor_bytes.values()) or model.n_bytes,
            "model_n_params": model.n_params,
            **{name: getattr(settings, name) for name in (*NUMBERS, "type_k", "type_v")},
            **({"n_threads": None} if settings.n_threads == UNKNOWN_THREADS else {}),
            "flash_attn": FLASH_ATTN.get(settings.flash_attn),
            "repack": settings.repack is not False,
            "no_op_offload": int(settings.n_gpu_layers == 0 and bool(offload)),
        }
        chosen = to_json(
            dataclasses.replace(settings, n_ctx=0)
        )  # n_ctx is as long as the longest run needs
        for run in (
            run for run in phases.by_length(record.run) if run.status == OK and not run.warmup
        ):
            prefill = phases.prefill_ns(run)
            decode = phases.decode_compute_mean_ns(run)
            decode = decode and round(decode * (run.n_gen - 1))
            for ns, *test in (
                (prefill, run.n_prompt, 0, 0),
                (decode, 0, run.n_gen - 1, run.n_prompt),
            ):
                if ns:
                    row = setup | dict(zip(("n_prompt", "n_gen", "n_depth"), test, strict=True))
                    key = json.dumps(
                        [row, run.variant, run.every, model.sha256, chosen, to_json(here)]
                    )
                    test_of = tests.setdefault(
                        key, row | {"test_time": run.started_at, "samples_ns": []}
                    )
                    test_of["samples_ns"].append(ns)
    for row in tests.values():
        samples = row.pop("samples_ns")
        rates = [1e9 * (row["n_prompt"] + row["n_gen"]) / ns for ns in samples]
        spread = statistics.stdev if len(samples) > 1 else lambda values: 0.0
        row |= {"avg_ns": round(statistics.fmean(samples)), "stddev_ns": round(spread(samples))}
        row |= {"avg_ts": round(statistics.fmean(rates), 6), "stddev_ts": round(spread(rates), 6)}
        row |= {"samples_ns": samples, "samples_ts": [round(rate, 6) for rate in rates]}
    return list(tests.values())


def write(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Rows of `llama_bench_rows` in one of llama-bench's output FORMATS."""
    if kind == "json":
        return json.dumps(rows, indent=2) + "\n"
    lines = [
        "| model | size | params | backend | threads | test | t/s |",
        "| - | -: | -: | - | -: | -: | -: |",
    ]
    for row in rows:
        size = "" if row["model_size"] is None else f"{row['model_size'] / 2**20:,.2f} MiB"
        params = "" if row["model_n_params"] is None else f"{row['model_n_params'] / 1e6:,.2f} M"
        test = (
            f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']} @ d{row['n_depth']}"
        )
        rate = f"{row['avg_ts']:.2f} \u00b1 {row['stddev_ts']:.2f}"
        cells = (
            row["model_type"],
            size,
            params,
            row["backends"] or "",
            row["n_threads"] or "",
            test,
            rate,
        )
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def harmless(rows: pd.DataFrame) -> pd.DataFrame:
    """Texts that a spreadsheet would run as formulas begin with an apostrophe; numbers stay numbers."""

    def quoted(value: Any) -> Any:
        return (
            f"'{value}"
            if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
            else value
        )

    return rows.map(quoted) if len(rows) else rows


def read_llama_bench(path: Path, device: str | None = None) -> tuple[list[Record], list[str]]:
    """Records of llama-bench's json, jsonl, csv or Markdown output (`-`: stdin), and sentences on what is not read."""
    name = "The pasted text" if str(path) == STDIN else str(path)
    try:
        data = (
            sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
        )  # PowerShell writes UTF-16
        text = data.decode(
            "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        )
    except (OSError, UnicodeDecodeError) as problem:
        raise LabError(f"{name} cannot be read: {problem}.", READABLE) from None
    if not text.strip():
        raise LabError(f"{name} is empty.", READABLE)
    rows, skipped = _parse(text, name, device)
    records: list[Record] = []
    for number, row in enumerate(rows, 1):
        where = f"line {row['line']}" if "line" in row else f"test {number}"
        try:
            made = [from_json(Record, to_json(one)) for one in _records(row, path.stem)]
        except (KeyError, OverflowError, TypeError, ValueError) as problem:
            skipped.append(f"{where} skipped: it lacks or garbles {printable(str(problem))}")
            continue
        records += made
        if not made:
            is_both = row.get("n_prompt") and row.get("n_gen")
            what = (
                "prefill and decode as one"
                if is_both
                else "a prefill that does not begin at position 0"
            )
            skipped.append(f"{where} skipped: it times {what}")
    skipped.sort(key=lambda sentence: int(re.split(r"\D+", sentence, maxsplit=2)[1]))
    if not records:
        reasons = "".join(
            f" {sentence[:1].upper()}{sentence[1:]}." for sentence in skipped[:MOST_REASONS]
        )
        raise LabError(f"{name} has no result that the lab can read.{reasons}", READABLE)
    return records, skipped


def _parse(text: str, name: str, device: str | None) -> tuple[list[Any], list[str]]:
    """The rows of a text, and sentences on lines of tables that cannot be read."""
    begin = text.lstrip()[:1]
    try:
        if begin == "[":
            rows = json.loads(text)
        elif begin == "{":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        elif "build_commit," in text.replace('"', ""):
            rows = list(csv.DictReader(io.StringIO(text)))
        else:
            return _markdown_rows(text, device)
    except (ValueError, RecursionError, csv.Error) as problem:
        pasted, skipped = _markdown_rows(text, device)
        if pasted or skipped:  # a post may begin with a bracket
            return pasted, skipped
        raise LabError(f"{name} is not JSON or CSV of llama-bench: {problem}.", READABLE) from None
    return [row for row in rows if isinstance(row, dict)], []


def cells_of(line: str) -> list[str]:
    """The cells of a row of a Markdown table, also of a quoted one; [] for another line, or that below the head."""
    inner = re.fullmatch(r"[> \t]*\|(.*)\|\s*", line)
    if not inner or len(line) > MOST_LETTERS or not re.sub(r"[-|:+ ]", "", inner[1]):
        return []
    return [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", inner[1])]


def number(text: str) -> float:
    """A number with a decimal point or comma. ValueError where a comma could be either."""
    text = text.strip()
    if re.fullmatch(r"\d{1,3}(,\d{3})+\.\d+", text):
        return float(text.replace(",", ""))
    if re.fullmatch(r"\d+,\d{3}", text) and not text.startswith("0"):
        raise ValueError(f"{text} could be a decimal or thousands")
    if re.fullmatch(r"\d+,\d+", text):
        return float(text.replace(",", "."))
    if not re.fullmatch(r"\d+(\.\d+)?([eE][+-]?\d{1,2})?", text):
        raise ValueError(f"{text[:30]!r} is not a number")
    return float(text)


def _markdown_rows(text: str, device: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of Markdown tables in a text, with the number of their `line`, and sentences on what is not read."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    heads: list[str] = []
    gpus: dict[tuple[str, str], str] = {}
    n_built = 0  # rows above the last line that names a build
    is_log_over = False  # rows were read since the last line that names a device
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        return [], [f"it has {len(lines):,} lines, and may have {MOST_LINES:,}"]
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_LETTERS:
            problems += (
                [f"line {number} skipped: it has over {MOST_LETTERS:,} letters"]
                if "|" in line
                else []
            )
            continue
        if build := re.search(r"\bbuild: *([0-9a-f]{6,40})\b", line):
            for row in rows[n_built:]:
                row["build_commit"] = build[1]
            n_built = len(rows)
        if found := next(filter(None, (re.search(pattern, line) for pattern in DEVICES)), None):
            gpus = {} if is_log_over else gpus
            name = found["name"].strip().replace(",", "")
            is_log_over = False
            gpus[found.groupdict().get("number") or "", name] = name
            continue
        if not (cells := cells_of(line)):
            continue
        if cells[-2:] == ["test", "t/s"]:
            heads = cells
            continue
        try:
            if not heads:
                raise ValueError("it is not below the head of a table of llama-bench")
            if len(cells) != len(heads):
                raise ValueError(
                    f"it has {len(cells)} columns, and the head of the table has {len(heads)}"
                )
            row = _markdown_row(dict(zip(heads, cells, strict=True)))
        except (OverflowError, ValueError) as problem:
            problems.append(f"line {number} skipped: {problem}")
            continue
        is_log_over = True
        on_cpu = re.fullmatch(r"(CPU|BLAS|,)+", str(row.get("backends")))
        named = device and device.replace(",", "")
        gpu_info = "" if on_cpu else ", ".join(gpus.values()) or named or UNKNOWN
        rows.append(
            {**row, "cpu_info": named if on_cpu else None, "gpu_info": gpu_info, "line": number}
        )
    if unnamed := next((row["line"] for row in rows if row["gpu_info"] == UNKNOWN), None):
        problems.append(f"line {unnamed}: the text does not name the device; name it with --device")
    return rows, problems


def _markdown_row(cells: Mapping[str, str]) -> dict[str, Any]:
    """A row in llama-bench's columns. ValueError says what is wrong with it."""
    test = re.fullmatch(TEST, cells["test"])
    if not test or not (test[1] or test[2]):
        raise ValueError(f"{cells['test'][:100]!r} is not a test such as pp512 or tg128 @ d4096")
    rate = re.fullmatch(RATE, cells["t/s"])
    tps = number(rate[1]) if rate else 0.0
    if not tps:
        raise ValueError(f"{cells['t/s'][:100]!r} is not a rate above 0")
    n_prompt, n_gen, n_depth = (int(length or 0) for length in test.groups())
    model = cells.get("model") or "unknown model"
    kind = re.search(QUANTIZATION, model)
    others = [
        f"{head} {cell}"
        for head, cell in cells.items()
        if head not in (*HEADS, "size", "params", "test", "t/s")
    ]
    row = {
        **LEFT_OUT,
        **{HEADS[head]: cell for head, cell in cells.items() if head in HEADS and cell},
        "model_name": model[: kind.start()].strip(" -.") if kind else model,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "avg_ns": round(1e9 * (n_prompt + n_gen) / tps),
        "variant": ", ".join(others) or None,
    }
    if kind:
        row["quantization"] = kind[1] + (
            f"_{kind[2][0]}" if kind[2] in ("Small", "Medium", "Large") else ""
        )
    if params := re.fullmatch(r"([\d.]+) ([MB])", cells.get("params", "").replace(",", "")):
        row["model_n_params"] = round(float(params[1]) * {"M": 1e6, "B": 1e9}[params[2]])
    return row


def _records(row: Mapping[str, Any], stem: str) -> list[Record]:
    """One record per sample of a test; none for prefill and decode together, or for prefill after a depth."""
    if missing := [name for name in REQUIRED if row.get(name) is None and "line" not in row]:
        raise KeyError(", ".join(missing))
    n_prompt, n_gen, n_depth = (
        int(row.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth")
    )
    if (n_prompt > 0) == (n_gen > 0) or (n_prompt and n_depth):
        return []
    samples = row.get("samples_ns") or [row["avg_ns"]]
    if any(int(ns) <= 0 for ns in samples):
        raise ValueError("samples_ns: a time of 0 or less")
    run = Run(
        n_prompt=n_prompt
        or max(1, n_depth),  # the first token at depth 0 is the BOS, like the lab's prompt of one
        n_gen=n_gen + 1,
        repeat=0,
        warmup=False,
        started_at=str(row.get("test_time") or ""),
        status=OK,
        variant=row.get("variant"),
        steps=Steps(),
        token_ids=(),
    )
    gpus = [name.strip() for name in str(row.get("gpu_info") or "").split(",") if name.strip()]
    here = Machine(
        cpu=row.get("cpu_info") or None,
        llama_cpp_commit=row.get("build_commit") or None,
        devices=tuple(Device(f"GPU{i}", name, "gpu") for i, name in enumerate(gpus)),
    )
    file = re.split(r"[/\\]", str(row.get("model_filename") or ""))[-1]
    model = Model(
        name=file.removesuffix(".gguf") or row["model_name"],
        source="file",
        file=file,
        quantization=row.get("quantization"),
        tensor_bytes={},
        n_params=None if row.get("model_n_params") is None else int(row["model_n_params"]),
        description=row.get("model_type") or None,
    )
    numbers: dict[str, Any] = {name: int(row.get(name, UNKNOWN_THREADS)) for name in NUMBERS}
    if not row.get("gpu_info"):
        numbers["n_gpu_layers"] = 0
    flash_attn = row.get("flash_attn")
    asked = {number: name for name, number in FLASH_ATTN.items()}
    settings = Settings(
        n_ctx=n_prompt + n_gen + n_depth,
        n_threads_batch=numbers["n_threads"],
        **numbers,
        flash_attn="unknown" if flash_attn is None else asked.get(int(flash_attn), "auto"),
        type_k=str(row["type_k"]),
        type_v=str(row["type_v"]),
        prompt="random",
        repack=False if str(row.get("repack")).lower() in ("0", "false") else None,
    )
    totals = [
        Totals(prefill_ns=int(ns)) if n_prompt else Totals(decode_ns=int(ns)) for ns in samples
    ]
    runs = [
        dataclasses.replace(run, repeat=repeat, totals=one) for repeat, one in enumerate(totals)
    ]
    return [Record(f"imported-{stem}", here, model, settings, one) for one in runs]
