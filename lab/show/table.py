"""Records as tables: one row per run (or request), one row per step, and a summary over repeats.

Rates are computed here from times. A figure of several runs is their median with its interval: a
mean with a standard deviation says little where another process can halve a rate for seconds. A
sweep has one row per prompt length.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.core import experiments, phases, shown, stats
from lab.core.lists import first_known
from lab.core.record import DECODE, GPU, OK, PREFILL, Record, Run
from lab.core.request import RequestRecord
from lab.core.request_times import RequestFigures, figures
from lab.core.shown import Shown
from lab.runner import disturbances
from lab.show import text_setup

if TYPE_CHECKING:
    import pandas as pd

NAN = float("nan")
FIGURES = (
    *("prefill_s", "prefill_tps", "ttft_s", "tpot_ms", "decode_tps", "decode_ms", "e2e_s"),
    "prefill_share",
)
"""Figures of a run. `decode_ms` is decode compute per token without sampling (as llama-bench
counts)."""

REQUEST_FIGURES = (
    *("first_output_s", "stall_ms", "tpot_low_ms", "tpot_high_ms", "n_answer"),
    *("server_prompt_s", "server_decode_s"),
)
"""Figures of requests only. `tpot_low_ms` and `tpot_high_ms` are bounds of TPOT; the last two are
times reported by llama-server."""

REQUEST_KINDS = ("warm", "short")
"""Requests of equal setup and length differ in these: cached prompt tokens, and an answer that is
shorter than requested. None if the server does not report it."""

OPPOSITE_ENDS = {"": "", "_low": "_high", "_high": "_low", "_min": "_max", "_max": "_min"}
"""The end of a rate, and the end of the time that it comes from."""

Records = Sequence[Record | RequestRecord]


def runs(records: Records) -> pd.DataFrame:
    """One row per run or request, including warm-ups and failures.

        lab.runs(records)[["n_prompt", "prefill_s", "tpot_ms"]]

    Columns: the setup, figures (NaN if missing), status. A sweep has one row per length. `run` is
    the number of the record, the same for all lengths of a sweep. An experiment has its case in
    words in `case`, and its own figures. `j_per_token` is the energy of the whole run, with
    everything that ran on what `energy_of` names, over its generated tokens. Requests add columns:
    `server`, `warm`, ...
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for index, record in enumerate(records):
        if isinstance(record, RequestRecord):
            rows.append(request_row(record, index))
        else:
            rows += [_run_row(record, run, index) for run in phases.by_length(record.run)]
    for row in rows:
        if row["status"] != OK:
            _forget_figures(row)
    table = pd.DataFrame(rows)
    if "server" in table:  # requests can lack these
        for name in ("engine", *FIGURES, "j_per_token", "energy_of"):
            if name not in table:
                table[name] = NAN
    return table


def _forget_figures(row: dict[str, Any]) -> None:
    """A failed run has no figures, also if some of its steps were timed."""
    for name in (*FIGURES, *REQUEST_FIGURES):
        if name in row:
            row[name] = NAN


def _common(record: Record, index: int) -> dict[str, Any]:
    """What the rows of a run and of its steps have in common."""
    run = record.run
    return {
        "run": index,
        "session": record.session,
        **text_setup.of_run(record),
        "n_prompt": run.n_prompt,
        "n_gen": run.n_gen,
        "repeat": run.repeat,
        "warmup": run.warmup,
        "disturbed": bool(disturbances.disturbances(record)),
        "case": experiments.case_label(run.experiment, run.case),
    }


def _run_row(record: Record, run: Run, index: int) -> dict[str, Any]:
    """A run, or a sweep's part up to a length."""
    e2e_ns = phases.e2e_ns(run)
    joules = _joules(record)
    row = _common(record, index) | {
        "n_prompt": run.n_prompt,
        "block": run.block,
        "engine": run.engine,
        "status": run.status,
        "error": run.error,
        "started_at": run.started_at,
        "virtual": record.machine.virtual,
        **dict.fromkeys(FIGURES, NAN),
        "e2e_s": or_nan(e2e_ns, 1e-9),
        "j_per_token": sum(joules.values()) / run.n_gen if joules and run.n_gen else NAN,
        "energy_of": " + ".join(joules) or None,
    }
    if not run.is_plain:  # an experiment has phases of its own
        return row | experiments.figures(run)
    prefill_ns = phases.prefill_ns(run)
    tpot_ns = phases.tpot_ns(run)
    if prefill_ns:
        row["prefill_s"] = prefill_ns * 1e-9
        row["prefill_tps"] = run.n_prompt / (prefill_ns * 1e-9)
        row["prefill_share"] = prefill_ns / e2e_ns if e2e_ns else NAN
    if tpot_ns:
        row["tpot_ms"] = tpot_ns * 1e-6
        row["decode_tps"] = 1e9 / tpot_ns
    row["ttft_s"] = or_nan(phases.ttft_ns(run), 1e-9)
    row["decode_ms"] = or_nan(phases.decode_compute_mean_ns(run), 1e-6)
    return row


def _joules(record: Record) -> dict[str, float]:
    """The energy of a plain run by what it covers.

    Graphics cards count only where the build can compute on one.
    """
    run = record.run
    is_measured = run.status == OK and run.is_plain and run.every is None
    if not is_measured or run.noise is None or run.noise.joules is None:
        return {}
    has_gpu = any(device.type in ("gpu", "igpu") for device in record.machine.devices)
    joules = dict(run.noise.joules)
    if not has_gpu:
        joules.pop(GPU, None)
    return joules


def request_row(record: RequestRecord, index: int) -> dict[str, Any]:
    """The row of `lab.runs` for a request, without figures of an engine. Unknown times are NaN."""
    request = figures(record.request)
    asked = request.asked
    timings = record.request.timings
    tpot_low_ns, tpot_high_ns = request.tpot_bounds_ns or (None, None)
    return {
        "run": index,
        "session": record.session,
        **text_setup.of_request(record),
        "n_prompt": n_prompt(request),
        "n_gen": asked.n_gen,
        "repeat": asked.repeat,
        "block": None,
        "virtual": record.machine.virtual,
        "warmup": asked.warmup,
        "disturbed": False,
        "status": record.status,
        "error": record.error,
        "started_at": record.started_at,
        "ttft_s": or_nan(request.ttft_ns, 1e-9),
        "tpot_ms": or_nan(request.tpot_ns, 1e-6),
        "decode_tps": 1e9 / request.tpot_ns if request.tpot_ns else NAN,
        "e2e_s": or_nan(request.e2e_ns, 1e-9),
        "case": experiments.case_label(asked.experiment, asked.case),
        "url": record.endpoint.url,
        "warm": request.is_warm,
        "short": request.is_short,
        "n_prompt_counted": request.n_prompt,
        "n_cached": request.n_cached,
        "n_answer": request.n_generated,
        "n_events": request.n_events,
        "first_output_s": or_nan(request.first_output_ns, 1e-9),
        "stall_ms": or_nan(request.longest_stall_ns, 1e-6),
        "tpot_low_ms": or_nan(tpot_low_ns, 1e-6),
        "tpot_high_ms": or_nan(tpot_high_ns, 1e-6),
        "server_prompt_s": or_nan(timings.prompt_ms if timings else None, 1e-3),
        "server_decode_s": or_nan(timings.gen_ms if timings else None, 1e-3),
        "failure": record.request.failure,
        "finish_reason": record.request.finish_reason,
    }


def or_nan(value: float | None, factor: float) -> float:
    """A value times a factor; NaN for None."""
    return NAN if value is None else value * factor


def steps(records: Records) -> pd.DataFrame:
    """One row per step. `run` is the row of its run in `runs`. Requests have no steps.

    `generated` numbers the tokens of an answer from 1, which came out of prefill. `itl_ms` is NaN
    for prefill steps. `compute_ms` is NaN for prefill steps that were not timed one by one: their
    `ready_s` is the time of submission, except for the last step.

        lab.steps(records).groupby("kind").compute_ms.median()
    """
    import pandas as pd

    tables = []
    for index, record in enumerate(records):
        if isinstance(record, Record) and record.run.steps.kind:
            tables.append(_steps_of(record, index))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _steps_of(record: Record, index: int) -> pd.DataFrame:
    import pandas as pd

    rows = record.run.steps.frame()
    is_decode = rows.kind == DECODE
    is_last_before_decode = is_decode.shift(-1, fill_value=True)
    chose_a_token = is_decode | is_last_before_decode
    number_of_token = 1 + tokens_since_prefill(is_decode)
    compute_ms = (rows.ready_ns - rows.start_ns) * 1e-6
    if not phases.times_prefill_steps(record.settings):
        compute_ms = compute_ms.mask(rows.kind == PREFILL)
    previous_end_ns = rows.end_ns.shift(fill_value=0)
    itl_ms = (rows.end_ns - previous_end_ns) * 1e-6
    columns = {
        **_common(record, index),
        "kind": rows.kind,
        "generated": number_of_token.where(chose_a_token, 0),
        "n_tokens": rows.n_tokens,
        "n_past": rows.n_past,
        "n_seq": rows.n_seq,
        "n_outputs": rows.n_outputs,
        "start_s": rows.start_ns * 1e-9,
        "ready_s": rows.ready_ns * 1e-9,
        "end_s": rows.end_ns * 1e-9,
        "compute_ms": compute_ms,
        "itl_ms": itl_ms.where(is_decode),
    }
    return pd.DataFrame(columns, index=rows.index)


def tokens_since_prefill(is_decode: pd.Series) -> pd.Series:
    """[F, F, T, T, F, T] gives [0, 0, 1, 2, 0, 1]."""
    answer = (~is_decode).cumsum()
    return is_decode.astype(int).groupby(answer).cumsum()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per setup and length over the successful timed runs, without experiments.

        lab.summary(lab.runs(records))

    Columns: `repeats`, how many of them were `disturbed`, the `doubts` (core/shown.py) of all
    figures of the row, and for each figure the median, the ends of its 95 % interval (`_low`,
    `_high`; NaN for fewer than 6 runs), and its range (`_min`, `_max`). `j_per_token` is included
    if a run has it, unless a row's runs differ in `energy_of`. Requests that are `warm`, or
    `short` of the requested tokens, have separate rows.
    """
    import pandas as pd

    if table.empty:
        return table
    request_kinds = REQUEST_KINDS if "server" in table else ()
    keys = [*text_setup.fields(table), *request_kinds, "n_prompt", "n_gen"]
    timed = table[(table.status == OK) & ~table.warmup & table.case.isna()]
    rows = []
    for key, group in timed.groupby(keys, dropna=False, sort=False):
        rows.append(dict(zip(keys, key, strict=True)) | _summary_of(group))
    if not rows:
        return table[:0]
    return pd.DataFrame(rows).sort_values(
        ["n_prompt", "n_gen"], kind="stable", ignore_index=True
    )


def _summary_of(group: pd.DataFrame) -> dict[str, Any]:
    """The figures of repeats, with their doubts."""
    n_disturbed = int(group.disturbed.sum())
    row: dict[str, Any] = {
        "repeats": len(group),
        "disturbed": n_disturbed,
        "doubts": shown.of_runs(len(group), n_disturbed, stats.fewest_for_interval()),
    }
    names = list(FIGURES)
    if "server" in group:
        names += REQUEST_FIGURES
        has_bounds_only = group.tpot_ms.isna() & group.tpot_low_ms.notna()
        row["n_bounds"] = int(has_bounds_only.sum())
    if group.energy_of.nunique() == 1:
        row["energy_of"] = group.energy_of.dropna().iloc[0]
        names.append("j_per_token")
    for name in names:
        values = group[name].dropna().tolist()
        interval = stats.median_interval(values) or stats.Interval(NAN, NAN)
        row[name] = statistics.median(values) if values else NAN
        row[f"{name}_low"] = interval.low
        row[f"{name}_high"] = interval.high
        row[f"{name}_min"] = min(values, default=NAN)
        row[f"{name}_max"] = max(values, default=NAN)
    n_prompt = group.n_prompt.iloc[0]
    _add_rate(row, "prefill_tps", "prefill_s", n_prompt)
    _add_rate(row, "decode_tps", "tpot_ms", 1e3)  # of a token, in ms
    return row


def _add_rate(row: dict[str, Any], rate: str, time: str, amount: float) -> None:
    """A rate and its ends: `amount` per time. The lowest rate belongs to the longest time."""
    for end, end_of_time in OPPOSITE_ENDS.items():
        value = row[time + end_of_time]
        row[rate + end] = amount / value if value else NAN


def shown_in(row: Mapping[str, Any], figure: str, scale: float = 1.0) -> Shown:
    """A figure of a row of `summary` with its interval, or its range if runs are too few for
    one."""
    value = scale * row[figure]
    doubts = row["doubts"]
    if row["repeats"] < 2:
        return Shown(value, None, None, row["repeats"], doubts)
    has_interval = row[f"{figure}_low"] == row[f"{figure}_low"]  # not NaN
    low, high = ("low", "high") if has_interval else ("min", "max")
    return Shown(
        value,
        scale * row[f"{figure}_{low}"],
        scale * row[f"{figure}_{high}"],
        row["repeats"],
        doubts,
    )


def firm(rows: pd.DataFrame) -> pd.DataFrame:
    """The reliable rows of `summary`."""
    if rows.empty:
        return rows
    return rows[rows.doubts.map(shown.is_firm).astype(bool)]


def setups(table: pd.DataFrame) -> list[tuple[str, Any]]:
    """Each setup of a table (of runs, steps or a summary): its label, and its rows."""
    groups = [
        rows for _, rows in table.groupby(text_setup.fields(table), dropna=False, sort=False)
    ]
    labels = text_setup.labels(table, [rows.iloc[0] for rows in groups])
    return list(zip(labels, groups, strict=True))


def requests_of(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    """All requests to servers."""
    return [record for record in records if isinstance(record, RequestRecord)]


def alone(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    """The requests that ran alone, one after the other."""
    return [request for request in requests_of(records) if request.experiment is None]


def requests_of_experiments(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    """The requests of experiments, such as conversations."""
    return [request for request in requests_of(records) if request.experiment is not None]


def of_engine(records: Records) -> list[Record]:
    """The runs of the engine."""
    return [record for record in records if isinstance(record, Record)]


def went_well(record: RequestRecord) -> bool:
    """Whether a request succeeded and is not a warm-up."""
    return record.is_timed


def is_measured(record: RequestRecord) -> bool:
    """Whether a request is a repeat of the others: not known to be warm, with a full answer."""
    request = figures(record.request)
    return went_well(record) and request.is_warm is not True and request.is_short is not True


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: timed and successful.

    Requests also ran alone, are not known to be warm, and have a full answer.
    """
    rows = rows[(rows.status == OK) & ~rows.warmup]
    if "server" not in rows:
        return rows
    is_request = rows.server.notna()
    is_special = rows.warm.eq(True) | rows.short.eq(True) | rows.case.notna()
    return rows[~(is_request & is_special)]


def n_prompt(request: RequestFigures) -> int | None:
    """Tokens of the prompt: as requested, otherwise as counted by the server."""
    asked = request.asked
    return first_known((asked.n_prompt, asked.n_prompt_counted, request.n_prompt))
