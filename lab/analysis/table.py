"""Records as tables: one row per run, one row per step, and a summary over repeats.

Rates are computed here and never stored. A figure of several runs is their median with its interval: a mean with a
standard deviation says little on machines where another process can halve a rate for seconds. A sweep has one row
for each of its prompt lengths.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis import disturbances
from lab.core import energy, lever_figures, phases, stats
from lab.core.record import DECODE, OK, Record, Run, Settings
from lab.runner import machine

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("prefill_s", "prefill_tps", "ttft_s", "tpot_ms", "decode_tps", "decode_ms", "e2e_s", "prefill_share")
"""Of a run; `decode_ms` is decode compute per token, without choosing it (what llama-bench counts)."""

PLACING = (
    *("device", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe", "override_tensor"),
    *("kv_offload", "op_offload", "mmap", "lib", "prefill_wait"),
)
"""Settings of where a model runs."""

SETUP = (
    "model",
    "model_sha256",
    "machine",
    "devices",
    "power",
    "ram_gb",
    "os",
    "llama_cpp_python",
    "llama_cpp_commit",
    "system_info",
    "n_gpu_layers",
    "n_threads",
    "n_threads_batch",
    "n_batch",
    "n_ubatch",
    "flash_attn",
    "type_k",
    "type_v",
    "kv_unified",
    *PLACING,
    "prompt",
    "prompt_sha256",
    "sweep_every",
    "variant",
)
"""What must be equal, apart from n_prompt and n_gen, for runs to be repeats of each other."""

IDENTITY = ("model_sha256", "devices", "power", "ram_gb", "os", "llama_cpp_commit", "system_info", "prompt_sha256")
"""Parts of a setup that are shown only where nothing else differs between two setups."""


def runs(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run, warm-ups and failures included: setup, figures (NaN where there is none), status.

        lab.runs(records)[["n_prompt", "prefill_s", "tpot_ms"]]

    A sweep has one row per length; `run` is the number of the record. An experiment has its words in `lever`, and
    figures of its own (core/lever_figures.py). Joules and watts are of what `energy_source` names, whole and idle
    included (core/energy.py).
    """
    import pandas as pd

    return pd.DataFrame(
        [_run_row(record, leg, index) for index, record in enumerate(records) for leg in phases.by_length(record.run)]
    )


def steps(records: Sequence[Record]) -> pd.DataFrame:
    """One row a step. `run` is the row of its run in `runs`; `itl_ms` is NaN for prefill steps.

    lab.steps(records).groupby("kind").compute_ms.median()
    """
    import pandas as pd

    parts = [_step_rows(record, index) for index, record in enumerate(records) if record.run.steps.kind]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per setup and length over the timed runs that went well and are no experiment.

        lab.summary(lab.runs(records))

    Columns: `repeats`, how many of them were `disturbed`, and of each figure the median, the ends of its
    95 % interval (`_low`, `_high`; NaN for fewer than 6 runs), and the range (`_min`, `_max`). Figures of energy are
    among them where a run has some; a row whose runs have them from different sources has none.
    """
    import pandas as pd

    if table.empty:
        return table
    keys = [*SETUP, "n_prompt", "n_gen"]
    groups = table[(table.status == OK) & ~table.warmup & table.lever.isna()].groupby(keys, dropna=False, sort=False)
    rows = []
    with_energy = table.energy_source.notna().any()
    for key, group in groups:
        row = dict(zip(keys, key, strict=True)) | {"repeats": len(group), "disturbed": int(group.disturbed.sum())}
        sources = group.energy_source.dropna().unique()
        if with_energy:
            row["energy_source"] = sources[0] if len(sources) == 1 else None
        for name in (*FIGURES, *(energy.FIGURES if with_energy else ())):
            is_mixed = name in energy.FIGURES and len(sources) > 1
            values = [] if is_mixed else group[name].dropna().tolist()
            interval = stats.median_interval(values)
            nan = float("nan")
            row |= {
                name: statistics.median(values) if values else nan,
                f"{name}_low": interval.low if interval else nan,
                f"{name}_high": interval.high if interval else nan,
                f"{name}_min": min(values, default=nan),
                f"{name}_max": max(values, default=nan),
            }
        rows.append(row)
    return (
        pd.DataFrame(rows).sort_values(["n_prompt", "n_gen"], kind="stable", ignore_index=True) if rows else table[:0]
    )


def setups(table: pd.DataFrame) -> list[tuple[str, Any]]:
    """Each setup of a table (of runs, steps or a summary): its label, and its rows.

    The label has the fewest fields in which the setups differ; with a single setup, model and machine.
    """
    groups = table.groupby([*SETUP], dropna=False, sort=False)
    names = ["model", "machine"] if groups.ngroups < 2 else _differing(table, groups.ngroups)
    return [(", ".join(_named(rows.iloc[0], names)), rows) for _, rows in groups]


def _differing(table: pd.DataFrame, n_setups: int) -> list[str]:
    """The fewest fields in which setups differ: those that people chose before those of IDENTITY."""
    if table.variant.nunique() == n_setups:
        return ["variant"]
    names: list[str] = []
    n_distinct = 1
    for name in (*(name for name in SETUP if name not in IDENTITY), *IDENTITY):
        n = table.groupby([*names, name], dropna=False).ngroups
        if n > n_distinct:
            names.append(name)
            n_distinct = n
    names.sort(key=SETUP.index)
    return names if {"model", "machine"} & set(names) else ["model", *names]


def _named(row: pd.Series, names: Sequence[str]) -> list[str]:
    """The named fields of a setup in words. Without a sweep or a variant these two are left out."""
    words = []
    for name in names:
        value = row[name]
        if value != value or value is None:
            words += [] if unset(name) == "none" else [f"{name} {unset(name)}"]
            continue
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        if name in ("model", "machine", "variant"):
            words.append(text)
        else:
            words.append(f"{name} {text if len(text) <= 40 else f'{text[:12]}...'}")
    return words


def unset(name: str) -> str:
    """What it means that a field of a setup has no value: there is none, llama.cpp chose it, or it is not known."""
    return "none" if name in ("sweep_every", "variant") else "default" if name in PLACING else "unknown"


def model_label(record: Record) -> str:
    """Name and quantization as titles show them, and whether the weights are random or re-quantised."""
    model = record.model
    origin = {"synthetic": " (random weights)", "requantized": " (re-quantised)"}.get(model.source, "")
    return f"{model.name}{'' if model.quantization is None else f' {model.quantization}'}{origin}"


def _setup(record: Record) -> dict[str, Any]:
    settings, own = record.settings, ("flash_attn", "devices", *PLACING)
    return {
        "model": model_label(record),
        "machine": machine.label(record.machine, settings),
        "devices": _offload_devices(record),
        "power": record.machine.power,
        "model_sha256": record.model.sha256,
        "ram_gb": None if record.machine.ram_bytes is None else round(record.machine.ram_bytes / 1e9),
        "os": record.machine.os,
        "llama_cpp_python": record.machine.llama_cpp_python,
        "llama_cpp_commit": record.machine.llama_cpp_commit,
        "system_info": record.machine.system_info,
        "flash_attn": settings.flash_attn_resolved or settings.flash_attn,
        **{name: getattr(settings, name) for name in SETUP if hasattr(settings, name) and name not in own},
        **_placing(settings),
        "sweep_every": record.run.every,
        "variant": record.run.variant,
    }


def _placing(settings: Settings) -> dict[str, Any]:
    """The settings of PLACING, lists as one string; None where llama.cpp chooses."""
    values = {name: getattr(settings, "devices" if name == "device" else name) for name in PLACING}
    words = {
        name: ",".join(f"{part:g}" if isinstance(part, float) else part for part in value)
        for name, value in values.items()
        if isinstance(value, tuple)
    }
    waits = {"prefill_wait": settings.prefill_wait or "step"}
    return values | words | waits


def _offload_devices(record: Record) -> str | None:
    """All devices that layers could be offloaded to, such as "2 x NVIDIA H200". None where no device is known."""
    if not record.machine.devices:
        return None
    return machine.in_words(machine.accelerators(record.machine.devices)) or "none"


def _run_row(record: Record, run: Run, index: int) -> dict[str, Any]:
    prefill, ttft, tpot, e2e = phases.prefill_ns(run), phases.ttft_ns(run), phases.tpot_ns(run), phases.e2e_ns(run)
    if run.lever is not None:  # an experiment has phases of its own
        prefill = ttft = tpot = None
    row = {
        "run": index,
        "session": record.session,
        **_setup(record),
        "n_prompt": run.n_prompt,
        "n_gen": run.n_gen,
        "repeat": run.repeat,
        "block": run.block,
        "engine": run.engine,
        "virtual": record.machine.virtual,
        "power": record.machine.power,
        "warmup": run.warmup,
        "disturbed": bool(disturbances.disturbances(record)),
        "status": run.status,
        "error": run.error,
        "started_at": run.started_at,
        "prefill_s": _or_nan(prefill, 1e-9),
        "prefill_tps": run.n_prompt / (prefill * 1e-9) if prefill else float("nan"),
        "ttft_s": _or_nan(ttft, 1e-9),
        "tpot_ms": _or_nan(tpot, 1e-6),
        "decode_tps": 1e9 / tpot if tpot else float("nan"),
        "decode_ms": _or_nan(phases.decode_compute_mean_ns(run) if run.lever is None else None, 1e-6),
        "e2e_s": _or_nan(e2e, 1e-9),
        "prefill_share": prefill / e2e if prefill and e2e else float("nan"),
        "lever": None if run.lever is None else run.lever.words,
        "energy_source": energy.source(record),
        **dict.fromkeys(energy.FIGURES, float("nan")),
    }
    return row | energy.figures(dataclasses.replace(record, run=run)) | lever_figures.figures(run)


def _or_nan(value: float | None, factor: float) -> float:
    return float("nan") if value is None else value * factor


def _step_rows(record: Record, index: int) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    columns = record.run.steps
    start, ready, end = (np.array(column) for column in (columns.start_ns, columns.ready_ns, columns.end_ns))
    decodes = np.array(columns.kind) == DECODE
    number = np.arange(len(start))
    last_prefill = np.maximum.accumulate(np.where(decodes, 0, number))
    first_token = np.append(decodes[1:], True)  # a prefill step that a token came out of
    return pd.DataFrame(
        {
            "run": index,
            "session": record.session,
            **_setup(record),
            "n_prompt": record.run.n_prompt,
            "n_gen": record.run.n_gen,
            "repeat": record.run.repeat,
            "warmup": record.run.warmup,
            "lever": None if record.run.lever is None else record.run.lever.words,
            "kind": columns.kind,
            "generated": np.where(decodes | first_token, number - last_prefill + 1, 0),  # 1: it came out of prefill
            "n_tokens": columns.n_tokens,
            "n_past": columns.n_past,
            "n_seq": np.ones(len(start), dtype=int) if columns.n_seq is None else columns.n_seq,
            "n_outputs": np.nan if columns.n_outputs is None else columns.n_outputs,
            "start_s": start * 1e-9,
            "ready_s": ready * 1e-9,
            "end_s": end * 1e-9,
            "compute_ms": (ready - start) * 1e-6,
            "itl_ms": np.where(decodes, np.diff(end, prepend=0) * 1e-6, np.nan),
        }
    )
