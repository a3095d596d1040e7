"""Records as tables: one row per run (or request), one row per step, and a summary over repeats.

Rates are computed here from times. A figure of several runs is their median with its interval: a mean with a standard
deviation says little where another process can halve a rate for seconds. A sweep has one row per prompt length.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.core import experiments, phases, shown, stats
from lab.core.lists import first_known
from lab.core.record import DECODE, GPU, OK, PREFILL, Record, Run
from lab.core.request import RequestRecord
from lab.core.request_times import Figures, figures
from lab.core.shown import Shown
from lab.runner import disturbances
from lab.show import text_setup

if TYPE_CHECKING:
    import pandas as pd

FIGURES = (
    "prefill_s",
    "prefill_tps",
    "ttft_s",
    "tpot_ms",
    "decode_tps",
    "decode_ms",
    "e2e_s",
    "prefill_share",
)
"""Figures of a run. `decode_ms` is decode compute per token without sampling (as llama-bench counts)."""


def runs(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """One row per run or request, including warm-ups and failures: setup, figures (NaN if missing), status.

        lab.runs(records)[["n_prompt", "prefill_s", "tpot_ms"]]

    A sweep has one row per length; `run` is the number of the record. An experiment has a description in `lever` and
    its own figures (core/phases.py). `j_per_token` is the energy of the whole run, with everything that ran on what
    `energy_of` names, over its generated tokens. Requests add columns: `server`, `warm`, ...
    """
    import pandas as pd

    made = []
    for index, record in enumerate(records):
        if isinstance(record, RequestRecord):
            made.append(request_row(record, index))
        else:
            made += [_run_row(record, leg, index) for leg in phases.by_length(record.run)]
    for row in made:
        if row["status"] != OK:
            row |= dict.fromkeys(row.keys() & {*FIGURES, *REQUEST_FIGURES}, float("nan"))
    rows = pd.DataFrame(made)
    if "server" in rows:  # requests can lack these
        absent = [
            name for name in ("engine", *FIGURES, "j_per_token", "energy_of") if name not in rows
        ]
        rows[absent] = float("nan")
    return rows


def steps(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """One row per step. `run` is the row of its run in `runs`. Requests have no steps.

    `itl_ms` is NaN for prefill steps. `compute_ms` is NaN for prefill steps that were not timed one by one: their
    `ready_s` is the time of submission, except for the last step.

        lab.steps(records).groupby("kind").compute_ms.median()
    """
    import numpy as np
    import pandas as pd

    parts = []
    for index, record in enumerate(records):
        if not isinstance(record, Record) or not record.run.steps.kind:
            continue
        own = record.run.steps.frame()
        decodes = own.kind == DECODE
        number = own.index
        first_token = decodes.shift(-1, fill_value=True)  # a prefill step that a token came out of
        since_prefill = number - number.where(~decodes, 0).to_series().cummax().to_numpy()
        is_untimed = (own.kind == PREFILL) & (not phases.times_prefill_steps(record.settings))
        columns = {
            **_common(record, index),
            "kind": own.kind,
            "generated": np.where(
                decodes | first_token, since_prefill + 1, 0
            ),  # 1: it came out of prefill
            **{name: own[name] for name in ("n_tokens", "n_past", "n_seq", "n_outputs")},
            **{f"{name}_s": own[f"{name}_ns"] * 1e-9 for name in ("start", "ready", "end")},
            "compute_ms": ((own.ready_ns - own.start_ns) * 1e-6).mask(is_untimed),
            "itl_ms": (own.end_ns.diff().fillna(own.end_ns) * 1e-6).where(decodes),
        }
        parts.append(pd.DataFrame(columns, index=number))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per setup and length over the successful timed runs, without experiments.

        lab.summary(lab.runs(records))

    Columns: `repeats`, how many of them were `disturbed`, the `doubts` (core/shown.py) of all figures of the row, and
    for each figure the median, the ends of its 95 % interval (`_low`, `_high`; NaN for fewer than 6 runs), and its
    range (`_min`, `_max`). `j_per_token` is included if a run has it, unless a row's runs differ in `energy_of`.
    Requests that are `warm`, or `short` of the requested tokens, have separate rows.
    """
    import pandas as pd

    if table.empty:
        return table
    with_requests = "server" in table
    keys = [
        *text_setup.fields(table),
        *(REQUEST_KINDS if with_requests else ()),
        "n_prompt",
        "n_gen",
    ]
    groups = table[(table.status == OK) & ~table.warmup & table.lever.isna()].groupby(
        keys, dropna=False, sort=False
    )
    rows = []
    nan = float("nan")
    for key, group in groups:
        n = len(group)
        n_disturbed = int(group.disturbed.sum())
        doubts = shown.of_runs(n, n_disturbed, stats.fewest_for_interval())
        row = dict(zip(keys, key, strict=True)) | {
            "repeats": n,
            "disturbed": n_disturbed,
            "doubts": doubts,
        }
        if with_requests:  # with TPOT between bounds only
            row["n_bounds"] = int((group.tpot_ms.isna() & group.tpot_low_ms.notna()).sum())
        names = [*FIGURES, *(REQUEST_FIGURES if with_requests else ())]
        if group.energy_of.nunique() == 1:
            row["energy_of"] = group.energy_of.dropna().iloc[0]
            names.append("j_per_token")
        for name in names:
            values = group[name].dropna().tolist()
            interval = stats.median_interval(values) or stats.Interval(nan, nan)
            row |= {name: statistics.median(values) if values else nan}
            row |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
            row |= {
                f"{name}_min": min(values, default=nan),
                f"{name}_max": max(values, default=nan),
            }
        for rate, time, per in (
            ("prefill_tps", "prefill_s", row["n_prompt"]),
            ("decode_tps", "tpot_ms", 1e3),
        ):
            for end, other in (
                ("", ""),
                ("_low", "_high"),
                ("_high", "_low"),
                ("_min", "_max"),
                ("_max", "_min"),
            ):
                row[rate + end] = per / value if (value := row[time + other]) else nan
        rows.append(row)
    if not rows:
        return table[:0]
    return pd.DataFrame(rows).sort_values(["n_prompt", "n_gen"], kind="stable", ignore_index=True)


def shown_in(row: Mapping[str, Any], figure: str, scale: float = 1.0) -> Shown:
    """A figure of a row of `summary` with its interval, or its range if runs are too few for one."""
    ends = ("low", "high") if row[f"{figure}_low"] == row[f"{figure}_low"] else ("min", "max")
    low, high = (scale * row[f"{figure}_{end}"] if row["repeats"] > 1 else None for end in ends)
    return Shown(scale * row[figure], low, high, row["repeats"], row["doubts"])


def firm(rows: pd.DataFrame) -> pd.DataFrame:
    """The reliable rows of `summary`."""
    return rows[[shown.is_firm(doubts) for doubts in rows.doubts]] if len(rows) else rows


def setups(table: pd.DataFrame) -> list[tuple[str, Any]]:
    """Each setup of a table (of runs, steps or a summary): its label (text_setup.labels), and its rows."""
    groups = [rows for _, rows in table.groupby(text_setup.fields(table), dropna=False, sort=False)]
    return list(
        zip(text_setup.labels(table, [rows.iloc[0] for rows in groups]), groups, strict=True)
    )


def _common(record: Record, index: int) -> dict[str, Any]:
    """What the rows of a run and of its steps have in common."""
    run = record.run
    return {
        "run": index,
        "session": record.session,
        **text_setup.of_run(record),
        **{name: getattr(run, name) for name in ("n_prompt", "n_gen", "repeat", "warmup")},
        "disturbed": bool(disturbances.disturbances(record)),
        "lever": experiments.case_label(run.experiment, run.case),
    }


def _run_row(record: Record, run: Run, index: int) -> dict[str, Any]:
    """A run, or a sweep's part up to a length."""
    prefill = phases.prefill_ns(run)
    ttft = phases.ttft_ns(run)
    tpot = phases.tpot_ns(run)
    e2e = phases.e2e_ns(run)
    compute = phases.decode_compute_mean_ns(run)
    if not run.is_plain:  # an experiment has phases of its own
        prefill = ttft = tpot = compute = None
    joules: dict[
        str, float
    ] = {}  # by what they cover; graphics cards count where the build can compute on one
    if run.status == OK and run.is_plain and record.run.every is None and run.noise:
        has_gpu = any(device.type in ("gpu", "igpu") for device in record.machine.devices)
        joules = {
            kind: value
            for kind, value in (run.noise.joules or {}).items()
            if has_gpu or kind != GPU
        }
    return {
        **_common(record, index),
        "n_prompt": run.n_prompt,
        **{
            name: getattr(run, name)
            for name in ("block", "engine", "status", "error", "started_at")
        },
        "virtual": record.machine.virtual,
        "prefill_s": or_nan(prefill, 1e-9),
        "prefill_tps": run.n_prompt / (prefill * 1e-9) if prefill else float("nan"),
        "ttft_s": or_nan(ttft, 1e-9),
        "tpot_ms": or_nan(tpot, 1e-6),
        "decode_tps": 1e9 / tpot if tpot else float("nan"),
        "decode_ms": or_nan(compute, 1e-6),
        "e2e_s": or_nan(e2e, 1e-9),
        "prefill_share": prefill / e2e if prefill and e2e else float("nan"),
        "j_per_token": sum(joules.values()) / run.n_gen if joules and run.n_gen else float("nan"),
        "energy_of": " + ".join(joules) or None,
        **experiments.figures(run),
    }


REQUEST_FIGURES = (
    *("first_output_s", "stall_ms", "tpot_low_ms", "tpot_high_ms", "n_answer"),
    *("server_prompt_s", "server_decode_s"),
)
"""Figures of requests only. `tpot_low_ms` and `tpot_high_ms` are bounds of TPOT; the last two are times reported by
llama-server."""

REQUEST_KINDS = ("warm", "short")
"""Requests of equal setup and length differ in these: cached prompt tokens, and an answer that is shorter than
requested. None if the server does not report it."""


def alone(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    """The requests that ran alone, one after the other."""
    requests = [record for record in records if isinstance(record, RequestRecord)]
    return [request for request in requests if request.experiment is None]


def requests_of_experiments(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    """The requests of experiments, such as conversations."""
    requests = [record for record in records if isinstance(record, RequestRecord)]
    return [request for request in requests if request.experiment is not None]


def of_engine(records: Sequence[Record | RequestRecord]) -> list[Record]:
    """The runs of the engine."""
    return [one for one in records if isinstance(one, Record)]


def went_well(record: RequestRecord) -> bool:
    """Whether a request succeeded and is not a warm-up."""
    return record.is_timed


def is_measured(record: RequestRecord) -> bool:
    """Whether a request is a repeat of the others: successful, not known to be warm, with a full answer."""
    one = figures(record.request)
    return went_well(record) and one.is_warm is not True and one.is_short is not True


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: timed and successful; for requests also alone, not known to be warm, with a full answer."""
    rows = rows[(rows.status == OK) & ~rows.warmup]
    if "server" not in rows:
        return rows
    is_apart = rows.server.notna() & (
        (rows.warm == True) | (rows.short == True) | rows.lever.notna()
    )  # noqa: E712
    return rows[~is_apart]


def n_prompt(one: Figures) -> int | None:
    """Tokens of the prompt: as requested, otherwise as counted by the server."""
    return first_known((one.asked.n_prompt, one.asked.n_prompt_counted, one.n_prompt))


def request_row(record: RequestRecord, index: int) -> dict[str, Any]:
    """The row of `lab.runs` for a request, without figures of an engine. Unknown times are NaN."""
    one = figures(record.request)
    asked = one.asked
    timings = record.request.timings
    low, high = one.tpot_bounds_ns or (None, None)
    return {
        "run": index,
        "session": record.session,
        **text_setup.of_request(record),
        "n_prompt": n_prompt(one),
        "n_gen": asked.n_gen,
        "repeat": asked.repeat,
        "block": None,
        "virtual": record.machine.virtual,
        "warmup": asked.warmup,
        "disturbed": False,
        "status": record.status,
        "error": record.error,
        "started_at": record.started_at,
        "ttft_s": or_nan(one.ttft_ns, 1e-9),
        "tpot_ms": or_nan(one.tpot_ns, 1e-6),
        "decode_tps": 1e9 / one.tpot_ns if one.tpot_ns else float("nan"),
        "e2e_s": or_nan(one.e2e_ns, 1e-9),
        "lever": experiments.case_label(asked.experiment, asked.case),
        "url": record.endpoint.url,
        "warm": one.is_warm,
        "short": one.is_short,
        "n_prompt_counted": one.n_prompt,
        "n_cached": one.n_cached,
        "n_answer": one.n_generated,
        "n_events": one.n_events,
        "first_output_s": or_nan(one.first_output_ns, 1e-9),
        "stall_ms": or_nan(one.longest_stall_ns, 1e-6),
        "tpot_low_ms": or_nan(low, 1e-6),
        "tpot_high_ms": or_nan(high, 1e-6),
        "server_prompt_s": or_nan(timings.prompt_ms if timings else None, 1e-3),
        "server_decode_s": or_nan(timings.gen_ms if timings else None, 1e-3),
        "failure": record.request.failure,
        "finish_reason": record.request.finish_reason,
    }


def or_nan(value: float | None, factor: float) -> float:
    """A known value times a factor; NaN for None."""
    return float("nan") if value is None else value * factor
