"""The lab's plain runs as llama-bench's JSON.

A run gives a row of prefill and a row of decode. A `tg` row counts decode compute, without choosing
tokens, as llama-bench does.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence

from lab.core import phases
from lab.core.lines import to_json
from lab.core.record import UNKNOWN_THREADS, Record, Run
from lab.formats.llama_bench_rows import FLASH_ATTN
from lab.runner import machine

_NAMES = """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size
model_n_params n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers
n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split tensor_buft_overrides
load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt n_gen
n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
"""
COLUMNS = _NAMES.split()
"""llama-bench's columns in its order."""

NUMBERS = ("n_batch", "n_ubatch", "n_threads", "n_gpu_layers")
"""Settings that have the same name and meaning in both."""

DEFAULTS = {
    "cpu_mask": "0x0",
    "poll": 50,
    "split_mode": "layer",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "n_cpu_moe": 0,
    "main_gpu": 0,
    "fit_target": 0,
    "fit_min_ctx": 0,
    "cpu_strict": False,
    "no_kv_offload": False,
    "embeddings": False,
    "no_host": False,
    "devices": "auto",
    "load_mode": "auto",
    "lazy_mode": "auto",
}
"""What the lab leaves at llama.cpp's defaults, as llama-bench words these."""


def rows(records: Iterable[Record]) -> list[dict[str, object]]:
    """A row per setup and test: llama-bench's columns, `samples_ns` and `samples_ts`.

    What is unknown is None.
    """
    tests: dict[str, dict[str, object]] = {}
    samples: dict[str, list[int]] = {}
    n_tokens: dict[str, int] = {}
    for record in records:
        setup = setup_of(record)
        for run in timed_lengths(record.run):
            for ns, sizes in phases_of(run):
                row = setup | sizes
                key = test_key(record, run, row)
                tests.setdefault(key, row | {"test_time": run.started_at})
                samples.setdefault(key, []).append(ns)
                n_tokens[key] = sizes["n_prompt"] + sizes["n_gen"]
    for key, row in tests.items():
        row |= statistics_of(samples[key], n_tokens[key])
    return list(tests.values())


def as_json(rows: Sequence[dict[str, object]]) -> str:
    """The rows as llama-bench -o json prints them."""
    return json.dumps(rows, indent=2) + "\n"


def timed_lengths(run: Run) -> list[Run]:
    """The run, or each length of a sweep, if it succeeded and is no warm-up."""
    if not run.is_timed:
        return []
    return list(phases.by_length(run))


def phases_of(run: Run) -> list[tuple[int, dict[str, int]]]:
    """Nanoseconds of prefill and of all decode steps, with the sizes of llama-bench's tests."""
    tests = list[tuple[int, dict[str, int]]]()
    prefill_ns = phases.prefill_ns(run)
    if prefill_ns:
        tests.append((prefill_ns, {"n_prompt": run.n_prompt, "n_gen": 0, "n_depth": 0}))
    step_ns = phases.decode_compute_mean_ns(run)
    if step_ns:
        n_steps = run.n_gen - 1
        sizes = {"n_prompt": 0, "n_gen": n_steps, "n_depth": run.n_prompt}
        tests.append((round(step_ns * n_steps), sizes))
    return tests


def setup_of(record: Record) -> dict[str, object]:
    """The columns of machine, model and settings."""
    settings = record.settings
    model = record.model
    here = record.machine
    gpus = machine.accelerators(here.devices)
    backends = [device.name.rstrip("0123456789") for device in gpus or here.devices]
    commit = here.llama_cpp_commit
    columns: dict[str, object] = {
        **dict.fromkeys(COLUMNS),
        **DEFAULTS,
        "build_commit": commit and commit.partition("-")[0],  # without -dirty
        "cpu_info": here.cpu,
        "gpu_info": ", ".join(device.description for device in gpus),
        "backends": ",".join(dict.fromkeys(backends)) or None,
        "model_filename": model.file or None,
        "model_type": model.description or f"{model.name} {model.quantization or ''}".strip(),
        "model_size": sum(model.tensor_bytes.values()) or model.n_bytes,
        "model_n_params": model.n_params,
        "type_k": settings.type_k,
        "type_v": settings.type_v,
        "flash_attn": FLASH_ATTN.get(settings.flash_attn or ""),
        "repack": settings.repack is not False,
        "no_op_offload": int(settings.n_gpu_layers == 0 and bool(gpus)),
    }
    for name in NUMBERS:
        columns[name] = getattr(settings, name)
    if settings.n_threads == UNKNOWN_THREADS:
        columns["n_threads"] = None
    return columns


def test_key(record: Record, run: Run, row: dict[str, object]) -> str:
    """What tells one test from another; n_ctx does not, as it follows from the longest run."""
    settings = to_json(dataclasses.replace(record.settings, n_ctx=0))
    setup = [
        row,
        run.variant,
        run.every,
        record.model.sha256,
        settings,
        to_json(record.machine),
    ]
    return json.dumps(setup)


def statistics_of(samples_ns: list[int], n_tokens: int) -> dict[str, object]:
    """Means and standard deviations of a test's times and rates."""
    samples_ts = [1e9 * n_tokens / ns for ns in samples_ns]
    return {
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(deviation(samples_ns)),
        "avg_ts": round(statistics.fmean(samples_ts), 6),
        "stddev_ts": round(deviation(samples_ts), 6),
        "samples_ns": samples_ns,
        "samples_ts": [round(tps, 6) for tps in samples_ts],
    }


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 for one value."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values)
