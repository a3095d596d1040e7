"""Records as tables: one row a run, one row a step, and the summary over repeats.

Rates are derived here and nowhere stored. A figure of several runs is their median with its interval: a mean
with a standard deviation says little on machines where a neighbour can halve a rate for seconds. A sweep is
shown as the runs that it stands for, one row per length.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab import machine, noise, phases, stats
from lab.record import DECODE, OK, Record, Run

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("prefill_s", "prefill_tps", "ttft_s", "tpot_ms", "decode_tps", "decode_ms", "e2e_s", "prefill_share")
"""Of a run; `decode_ms` is decode compute per token, without choosing it (what llama-bench counts)."""

SETUP = (
    "model",
    "model_sha256",
    "machine",
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
    "prompt",
    "prompt_sha256",
    "sweep_every",
    "variant",
)
"""What must be equal for runs to be repeats of each other, beside n_prompt and n_gen."""

IDENTITY = ("model_sha256", "ram_gb", "os", "llama_cpp_commit", "system_info", "prompt_sha256")
"""Parts of a setup that are shown only where nothing else tells two setups apart."""


def runs(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run, warm-ups and failures included: setup, figures (NaN where there is none), status.

    A sweep has one row per length; `run` is the number of the record.
    """
    import pandas as pd

    return pd.DataFrame(
        [_run_row(record, leg, index) for index, record in enumerate(records) for leg in phases.legs(record.run)]
    )


def steps(records: Sequence[Record]) -> pd.DataFrame:
    """One row a step. `run` is the row of its run in `runs`; `itl_ms` is NaN for prefill steps."""
    import pandas as pd

    parts = [_step_rows(record, index) for index, record in enumerate(records) if record.run.steps.kind]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per setup and length over the timed runs that went well.

    Columns: `repeats`, how many of them were `disturbed`, and of each figure the median, the ends of its
    95 % interval (`_low`, `_high`; NaN for fewer than 6 runs), and the range (`_min`, `_max`).
    """
    import pandas as pd

    if table.empty:
        return table
    keys = [*SETUP, "n_prompt", "n_gen"]
    groups = table[(table.status == OK) & ~table.warmup].groupby(keys, dropna=False, sort=False)
    rows = []
    for key, group in groups:
        row = dict(zip(keys, key, strict=True)) | {"repeats": len(group), "disturbed": int(group.disturbed.sum())}
        for name in FIGURES:
            values = group[name].dropna().tolist()
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

    The label has the fewest fields that tell the setups apart; with a single one, model and machine.
    """
    groups = table.groupby([*SETUP], dropna=False, sort=False)
    names = ["model", "machine"] if groups.ngroups < 2 else _telling(table, groups.ngroups)
    return [(", ".join(_named(rows.iloc[0], names)), rows) for _, rows in groups]


def _telling(table: pd.DataFrame, n_setups: int) -> list[str]:
    """The fields that tell setups apart: those that people chose before those that only identify a file or build."""
    if table.variant.nunique() == n_setups:
        return ["variant"]
    names: list[str] = []
    n_told = 1
    for name in (*(name for name in SETUP if name not in IDENTITY), *IDENTITY):
        n = table.groupby([*names, name], dropna=False).ngroups
        if n > n_told:
            names.append(name)
            n_told = n
    names.sort(key=SETUP.index)
    return names if {"model", "machine"} & set(names) else ["model", *names]


def sentences(summary_rows: pd.DataFrame) -> list[str]:
    """What the rows of one setup and one n_gen show, in words, computed from them."""
    rows = summary_rows[summary_rows.prefill_share.notna()].sort_values("n_prompt")
    if len(rows) < 2:
        return [_where_the_time_went(rows)] if len(rows) else []
    short, long, before = rows.iloc[0], rows.iloc[-1], rows.iloc[-2]
    if (far := rows[rows.n_prompt <= long.n_prompt / 2]).size:  # a step of a few percent shows nothing
        before = far.iloc[-1]
    n_times = long.n_prompt / before.n_prompt
    per_token = long.prefill_s / before.prefill_s / n_times
    clear = _apart(long, before, "prefill_s", long.n_prompt, before.n_prompt)
    growth = (
        f"each token cost {per_token:.2g}x as much, because it looks back at more of them"
        if clear and per_token > 1.1
        else f"each token cost {per_token:.2g}x as much, because few tokens do not fill the machine"
        if clear and per_token < 0.9
        else "about in proportion"
    )
    prefill = (
        f"Prefill of {long.n_prompt:,} tokens took {per_token * n_times:.3g}x the time of {before.n_prompt:,} "
        f"for {n_times:.3g}x the tokens: {growth}"
    )
    decode = ""
    if long.tpot_ms > 0 and short.tpot_ms > 0:  # not NaN: there was decoding
        slower = long.tpot_ms / short.tpot_ms
        clear = _apart(long, short, "tpot_ms", 1, 1)
        decode = (
            f"; a decoded token took {digits(short.tpot_ms)} ms after a prompt of {short.n_prompt:,} and "
            f"{digits(long.tpot_ms)} ms after {long.n_prompt:,} ("
            + (f"{slower:.2g}x: each step reads the whole KV cache" if clear and slower > 1.1 else f"{slower:.2g}x")
            + ")"
        )
    is_sweep = rows.sweep_every.notna().all()  # it generates too little to speak of shares
    return [f"{prefill}{decode}."] + ([] if is_sweep else [_where_the_time_went(rows)])


def _apart(one: pd.Series, other: pd.Series, figure: str, per_one: float, per_other: float) -> bool:
    """Whether the ranges of a figure (each over its own unit) do not overlap; one run alone has no range."""
    if min(one.repeats, other.repeats) < 2:
        return False
    low, high = one[f"{figure}_min"] / per_one, one[f"{figure}_max"] / per_one
    return bool(low > other[f"{figure}_max"] / per_other or high < other[f"{figure}_min"] / per_other)


def digits(value: float) -> str:
    """A number with three significant digits, and thousands separated."""
    if value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def seconds(value: float) -> str:
    """A time with three significant digits, in the unit that suits it: 62.6 s, 2.58 ms, 640 us, 1.20 ns."""
    if value != value or not value:
        return "-" if value else "0 s"
    units = {"s": 1.0, "ms": 1e3, "us": 1e6}
    unit = next((unit for unit, factor in units.items() if value * factor >= 1), "ns")
    return f"{digits(value * units.get(unit, 1e9))} {unit}"


def _where_the_time_went(rows: pd.DataFrame) -> str:
    rows = rows if len(rows) <= 5 else rows.iloc[[0, len(rows) // 2, -1]]
    parts = [f"{100 * row.prefill_share:.0f} % of the time at {row.n_prompt:,}" for row in rows.itertuples()]
    parts[1:] = [part.replace(" of the time", "") for part in parts[1:]]
    rest = f"decoding {rows.n_gen.iloc[0]:,} tokens" if rows.n_gen.iloc[0] > 1 else "choosing a token"
    return f"Prefill took {', '.join(parts)} prompt tokens; {rest} took the rest."


def _named(row: pd.Series, names: Sequence[str]) -> list[str]:
    """The fields of a setup in words; a sweep or a trial that it is not is no word."""
    words = []
    for name in names:
        value = row[name]
        if value != value or value is None:
            words += [] if name in ("sweep_every", "variant") else [f"{name} unknown"]
            continue
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        if name in ("model", "machine", "variant"):
            words.append(text)
        else:
            words.append(f"{name} {text if len(text) <= 40 else f'{text[:12]}...'}")
    return words


def model_label(record: Record) -> str:
    """Name and quantization as titles show them, and what is not ordinary about the weights."""
    model = record.model
    made = {"synthetic": " (random weights)", "requantized": " (re-quantised)"}.get(model.source, "")
    return f"{model.name}{'' if model.quantization is None else f' {model.quantization}'}{made}"


def _setup(record: Record) -> dict[str, Any]:
    settings = record.settings
    return {
        "model": model_label(record),
        "machine": machine.label(record.machine, settings.n_gpu_layers),
        "model_sha256": record.model.sha256,
        "ram_gb": None if record.machine.ram_bytes is None else round(record.machine.ram_bytes / 1e9),
        "os": record.machine.os,
        "llama_cpp_python": record.machine.llama_cpp_python,
        "llama_cpp_commit": record.machine.llama_cpp_commit,
        "system_info": record.machine.system_info,
        "flash_attn": settings.flash_attn_resolved or settings.flash_attn,
        **{name: getattr(settings, name) for name in SETUP if hasattr(settings, name) and name != "flash_attn"},
        "sweep_every": record.run.every,
        "variant": record.run.variant,
    }


def _run_row(record: Record, run: Run, index: int) -> dict[str, Any]:
    prefill, ttft, tpot, e2e = phases.prefill_ns(run), phases.ttft_ns(run), phases.tpot_ns(run), phases.e2e_ns(run)
    return {
        "run": index,
        "session": record.session,
        **_setup(record),
        "n_prompt": run.n_prompt,
        "n_gen": run.n_gen,
        "repeat": run.repeat,
        "block": run.block,
        "warmup": run.warmup,
        "disturbed": bool(noise.disturbances(run)),
        "status": run.status,
        "error": run.error,
        "started_at": run.started_at,
        "prefill_s": _or_nan(prefill, 1e-9),
        "prefill_tps": run.n_prompt / (prefill * 1e-9) if prefill else float("nan"),
        "ttft_s": _or_nan(ttft, 1e-9),
        "tpot_ms": _or_nan(tpot, 1e-6),
        "decode_tps": 1e9 / tpot if tpot else float("nan"),
        "decode_ms": _or_nan(phases.decode_compute_mean_ns(run), 1e-6),
        "e2e_s": _or_nan(e2e, 1e-9),
        "prefill_share": prefill / e2e if prefill and e2e else float("nan"),
    }


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
            "kind": columns.kind,
            "generated": np.where(decodes | first_token, number - last_prefill + 1, 0),  # 1: it came out of prefill
            "n_tokens": columns.n_tokens,
            "n_past": columns.n_past,
            "start_s": start * 1e-9,
            "ready_s": ready * 1e-9,
            "end_s": end * 1e-9,
            "compute_ms": (ready - start) * 1e-6,
            "itl_ms": np.where(decodes, np.diff(end, prepend=0) * 1e-6, np.nan),
        }
    )
