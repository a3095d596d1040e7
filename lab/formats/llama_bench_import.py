"""llama-bench's output as records of the lab: a sample of a test is a run of one step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lab.core import files
from lab.core.lines import from_json, to_json
from lab.core.record import (
    DECODE,
    OK,
    PREFILL,
    UNKNOWN_THREADS,
    Device,
    Machine,
    Model,
    Record,
    Run,
    Settings,
    Steps,
)
from lab.errors import LabError, printable
from lab.formats import llama_bench_rows, text
from lab.formats.llama_bench_rows import FLASH_ATTN, READABLE, BenchRow

MOST_REASONS = 5
NUMBERS = ("n_batch", "n_ubatch", "n_threads", "n_gpu_layers")
REQUIRED = ("model_filename", "test_time", "n_batch")
"""What every build of llama-bench writes."""
TABLE_OF_THE_LAB = re.compile(r'"?run"?,"?session"?,"?model"?,')


def read(name: str, device: str | None = None) -> tuple[list[Record], list[str]]:
    """Records of llama-bench's output (`-`: stdin), and sentences on what is not read.

    LabError if nothing can be read.
    """
    shown = "The pasted text" if name == files.STDIN else name
    content = text.read(name, READABLE)
    if not content.strip():
        raise LabError(f"{shown} is empty.", READABLE)
    refuse_own_formats(content, shown)
    rows, skipped = llama_bench_rows.parse(content, shown, device)
    records: list[Record] = []
    for row in llama_bench_rows.kept_apart(rows):
        try:
            samples = records_of(row, Path(name).stem)
            records += [from_json(Record, to_json(record)) for record in samples]
        except (KeyError, OverflowError, TypeError, ValueError) as problem:
            reason = printable(str(problem)).strip("'")
            skipped.append(f"{row.place} skipped: it lacks or garbles {reason}")
            continue
        if not samples:
            skipped.append(f"{row.place} skipped: {reason_for_no_run(row)}")
    skipped.sort(key=number_of_place)
    if not records:
        reasons = [
            f" {sentence[:1].upper()}{sentence[1:]}." for sentence in skipped[:MOST_REASONS]
        ]
        raise LabError(
            f"{shown} has no result that the lab can read.{''.join(reasons)}", READABLE
        )
    return records, skipped


def refuse_own_formats(content: str, shown: str) -> None:
    """LabError for files that the lab itself wrote: there is nothing to import in them."""
    begin = content.lstrip()[:2000]
    if begin.startswith("{") and '"session":' in begin and '"machine":' in begin:
        raise LabError(
            f"{shown} is a results file of the lab already.", "Use it as it is: lab show FILE"
        )
    if TABLE_OF_THE_LAB.match(begin):
        raise LabError(
            f"{shown} is a table that lab export wrote, which leaves out what a record needs.",
            "Use the results file itself, or export it anew: lab export RESULTS --as json",
        )


def number_of_place(sentence: str) -> int:
    """The number of the line or test that a sentence is about."""
    match = re.search(r"\d+", sentence)
    if match is None:
        return 0
    return int(match[0])


def reason_for_no_run(row: BenchRow) -> str:
    """Why a test is no run of the lab."""
    if row.columns.get("n_prompt") and row.columns.get("n_gen"):
        return "it times prefill and decode as one"
    return "it times a prefill that does not begin at position 0"


def records_of(row: BenchRow, stem: str) -> list[Record]:
    """One record per sample of a test; none for what `reason_for_no_run` says.

    KeyError or ValueError for a row that lacks or garbles a column.
    """
    columns = row.columns
    missing = [name for name in REQUIRED if columns.get(name) is None]
    if missing and not row.is_of_table:
        raise KeyError(", ".join(missing))
    n_prompt = whole_number(columns.get("n_prompt"))
    n_gen = whole_number(columns.get("n_gen"))
    n_depth = whole_number(columns.get("n_depth"))
    if (n_prompt > 0) == (n_gen > 0) or (n_prompt and n_depth):
        return []
    samples_ns = list(map(int, columns.get("samples_ns") or [columns["avg_ns"]]))
    if min(samples_ns) <= 0:
        raise ValueError("samples_ns: a time of 0 or less")
    here = machine_of(row)
    model = model_of(row)
    settings = settings_of(row, n_prompt + n_gen + n_depth)
    records = list[Record]()
    for repeat, ns in enumerate(samples_ns):
        run = Run(
            n_prompt=n_prompt or max(1, n_depth),  # the first token at depth 0 is the BOS
            n_gen=n_gen + 1,
            repeat=repeat,
            warmup=False,
            started_at=str(columns.get("test_time") or ""),
            status=OK,
            variant=row.other_settings,
            steps=whole_phase(n_prompt, n_gen, n_depth, ns),
            token_ids=(),
            imported_from="llama-bench",
        )
        records.append(Record(f"imported-{stem}", here, model, settings, run))
    return records


def whole_phase(n_prompt: int, n_gen: int, n_depth: int, phase_ns: int) -> Steps:
    """A whole phase as one step: llama-bench does not say when its steps were done."""
    return Steps(
        kind=(PREFILL if n_prompt else DECODE,),
        n_tokens=(n_prompt or n_gen,),
        n_past=(n_depth,),
        start_ns=(0,),
        ready_ns=(phase_ns,),
        end_ns=(phase_ns,),
        n_seq=(1,),
        n_outputs=(n_gen,),
    )


def whole_number(value: Any) -> int:
    """A whole number; 0 for nothing."""
    return int(value or 0)


def machine_of(row: BenchRow) -> Machine:
    """The machine as far as the row names it."""
    devices: list[Device] = []
    for gpu in str(row.columns.get("gpu_info") or "").split(","):
        name = gpu.strip()
        if name:
            devices.append(Device(f"GPU{len(devices)}", name, "gpu"))
    return Machine(
        cpu=row.columns.get("cpu_info") or None,
        llama_cpp_commit=row.columns.get("build_commit") or None,
        devices=tuple(devices),
    )


def model_of(row: BenchRow) -> Model:
    """The model as far as the row names it."""
    columns = row.columns
    file = re.split(r"[/\\]", str(columns.get("model_filename") or ""))[-1]
    model_type = str(columns.get("model_type") or "unknown model")
    name, quantization = llama_bench_rows.model_of(model_type)
    n_params = columns.get("model_n_params")
    return Model(
        name=file.removesuffix(".gguf") or name,
        source="file",
        file=file,
        quantization=quantization if row.is_of_table else columns.get("quantization"),
        tensor_bytes={},
        n_params=None if n_params in (None, "") else int(n_params),
        description=columns.get("model_type") or None,
    )


def settings_of(row: BenchRow, n_ctx: int) -> Settings:
    """The settings of a row. llama-bench uses its threads for both phases."""
    columns = row.columns
    numbers: dict[str, Any] = dict.fromkeys(NUMBERS, UNKNOWN_THREADS)
    numbers["n_ubatch"] = columns.get("n_batch")  # of builds without ubatches
    for name in NUMBERS:
        if columns.get(name) is not None:
            numbers[name] = int(columns[name])
    if not columns.get("gpu_info"):
        numbers["n_gpu_layers"] = 0
    flash_attn = None
    if columns.get("flash_attn") is not None:
        names = {value: name for name, value in FLASH_ATTN.items()}
        flash_attn = names.get(int(columns["flash_attn"]), "auto")
    is_repacked = str(columns.get("repack")).lower() not in ("0", "false")
    return Settings(
        n_ctx=n_ctx,
        n_threads_batch=numbers["n_threads"],
        **numbers,
        flash_attn=flash_attn,
        type_k=columns.get("type_k") or None,
        type_v=columns.get("type_v") or None,
        prompt="random",
        repack=None if is_repacked else False,
    )
