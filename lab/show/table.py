"""Records as tables: one row per run (or request), and one row per step.

Rates are computed here from times. A sweep has one row per prompt length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from lab.core import experiments, figures, phases, request_times, results
from lab.core.lists import first_known
from lab.core.record import DECODE, GPU, OK, PREFILL, Record, Run, Steps
from lab.core.request import RequestRecord
from lab.core.request_times import RequestFigures
from lab.core.results import Readable
from lab.runner import disturbances
from lab.show import columns, text_setup

if TYPE_CHECKING:
    import pandas as pd

NAN = figures.NAN
Records = Sequence[Record | RequestRecord]
Measured = TypeVar("Measured", bound=Record | RequestRecord)


def runs(records: Readable) -> pd.DataFrame:
    """One row per run or request, including warm-ups and failures.

        lab.runs(records)[["n_prompt", "prefill_s", "tpot_ms"]]

    `records` are those of `lab.measure` or `lab.read`, or paths of results files.

    Columns: the setup, figures (NaN if missing), status. `tpot_ms` is the time per output token
    with the choice of the token, `step_ms` the compute of a step without it. A sweep has one row
    per length. `row` is the number of the row, which `lab.steps` has too; `run` is the number of
    the record, the same for all lengths of a sweep. An experiment has its case in words in `case`,
    and its own figures. `j_per_token` is the energy of the whole run, with everything that ran on
    what `energy_of` names, over its generated tokens. Requests add columns: `server`, `warm`, ...
    docs/python.md lists all.
    """
    import pandas as pd

    rows: list[dict[str, object]] = []
    for index, record in enumerate(results.measured_of(records)):
        if isinstance(record, RequestRecord):
            rows.append(request_row(record, index))
        else:
            rows += [_run_row(record, run, index) for run in phases.by_length(record.run)]
    if not rows:
        return pd.DataFrame(columns=columns.of_runs())
    table = pd.DataFrame(rows)
    table.insert(0, "row", range(len(table)))
    names = figures.names(figures.FIGURES)
    if "server" in table:  # without a run beside requests these columns are missing
        for name in ("engine", *names, figures.ENERGY.name, "energy_of"):
            if name not in table:
                table[name] = NAN
    # A failed run has no figures, also if some of its steps were timed
    names += figures.names(figures.REQUEST_FIGURES)
    of_success = table.columns.intersection(names)
    table[of_success] = table[of_success].mask(table.status != OK)
    return table


def _common(record: Record, index: int) -> dict[str, object]:
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
        "status": run.status,
    }


def _run_row(record: Record, run: Run, index: int) -> dict[str, object]:
    """A run, or a sweep's part up to a length."""
    joules = _joules(record)
    return _common(record, index) | {
        "n_prompt": run.n_prompt,  # of a sweep this length
        "block": run.block,
        "engine": run.engine,
        "error": run.error,
        "started_at": run.started_at,
        "virtual": record.machine.virtual,
        **figures.of_run(run),
        "j_per_token": sum(joules.values()) / run.n_gen if joules and run.n_gen else NAN,
        "energy_of": " + ".join(joules) or None,
    }


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


def request_row(record: RequestRecord, index: int) -> dict[str, object]:
    """The row of `lab.runs` for a request, without figures of an engine. Unknown times are NaN."""
    request = request_times.figures(record.request)
    asked = request.asked
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
        "disturbed": bool(disturbances.of_request(record)),
        "status": record.status,
        "error": record.error,
        "started_at": record.started_at,
        **figures.of_request(request, figures.FIGURES),
        "case": experiments.case_label(asked.experiment, asked.case),
        "url": record.endpoint.url,
        "warm": request.is_warm,
        "short": request.is_short,
        "n_prompt_counted": request.n_prompt,
        "n_events": request.n_events,
        **figures.of_request(request, figures.REQUEST_FIGURES),
        "failure": record.request.failure,
        "finish_reason": record.request.finish_reason,
    }


def steps(records: Readable) -> pd.DataFrame:
    """One row per step. `row` is the row of its run in `runs`. Requests have no steps.

    Of a sweep, `row` is that of the length after which the step ran. `generated` numbers the tokens
    of an answer from 1, which came out of prefill. `itl_ms` is NaN for prefill steps. `compute_ms`
    is NaN for prefill steps that were not timed one by one: their `ready_s` is the time of
    submission, except for the last step.

        lab.steps(records).groupby("kind").compute_ms.median()
    """
    import pandas as pd

    of_runs: list[dict[str, object]] = []
    values_by_name: dict[str, list[object]] = {
        column.name: [] for column in dataclasses.fields(Steps)
    }
    n_steps: list[int] = []
    numbers: list[int] = []
    n_rows = 0
    for index, record in enumerate(results.measured_of(records)):
        lengths = _lengths(record)
        if isinstance(record, Record) and record.run.steps.kind:
            is_timed = phases.times_prefill_steps(record.settings)
            of_runs.append(_common(record, index) | {"times_prefill_steps": is_timed})
            n_steps.append(len(record.run.steps.kind))
            numbers += [n_rows + place for place in _places(record.run.steps, lengths)]
            for name, values in values_by_name.items():
                values += getattr(record.run.steps, name)
        n_rows += len(lengths)
    if not of_runs:
        return pd.DataFrame(columns=columns.of_steps())
    runs_of_steps = pd.DataFrame(of_runs)
    rows = runs_of_steps.loc[runs_of_steps.index.repeat(n_steps)].reset_index(drop=True)
    rows.insert(0, "row", numbers)
    return _with_figures(rows, pd.DataFrame(values_by_name))


def _lengths(record: Record | RequestRecord) -> list[int | None]:
    """The prompt length of each row that a record has in `runs`."""
    if not isinstance(record, Record) or record.run.every is None:
        return [None]
    return [run.n_prompt for run in phases.by_length(record.run)]


def _places(steps: Steps, lengths: Sequence[int | None]) -> list[int]:
    """Of each step the place of its row among those of its record: the first length that the
    prompt had not passed."""
    places: list[int] = []
    place = 0
    for kind, n_past, n_tokens in zip(steps.kind, steps.n_past, steps.n_tokens, strict=True):
        if kind == PREFILL:
            place = 0
            while place < len(lengths) - 1 and (lengths[place] or 0) < n_past + n_tokens:
                place += 1
        places.append(place)
    return places


def _with_figures(rows: pd.DataFrame, measured_steps: pd.DataFrame) -> pd.DataFrame:
    """What the steps of a run have in common (`rows`), and the columns and figures of each step."""
    steps_of_runs = measured_steps.groupby(rows.run)
    is_decode = measured_steps.kind == DECODE
    # The step before the first decode step
    ends_prefill = is_decode.groupby(rows.run).shift(-1, fill_value=True)
    compute_ms = (measured_steps.ready_ns - measured_steps.start_ns) * 1e-6
    is_submission = (measured_steps.kind == PREFILL) & ~rows.times_prefill_steps
    itl_ms = (measured_steps.end_ns - steps_of_runs.end_ns.shift(fill_value=0)) * 1e-6
    number_of_token = 1 + tokens_since_prefill(is_decode, rows.run)
    return rows.drop(columns="times_prefill_steps").assign(
        kind=measured_steps.kind,
        generated=number_of_token.where(is_decode | ends_prefill, 0),
        n_tokens=measured_steps.n_tokens,
        n_past=measured_steps.n_past,
        n_seq=measured_steps.n_seq,
        n_outputs=measured_steps.n_outputs,
        start_s=measured_steps.start_ns * 1e-9,
        ready_s=measured_steps.ready_ns * 1e-9,
        end_s=measured_steps.end_ns * 1e-9,
        compute_ms=compute_ms.mask(is_submission),
        itl_ms=itl_ms.where(is_decode),
    )


def tokens_since_prefill(is_decode: pd.Series, run: pd.Series) -> pd.Series:
    """The decode steps since the last prefill step of a run: [F, F, T, T, F, T] gives
    [0, 0, 1, 2, 0, 1]."""
    answer = (~is_decode).cumsum()  # one number for each answer's decode steps
    return is_decode.astype(int).groupby([run, answer]).cumsum()


def setups(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Each setup of a table (of runs, steps or a summary): its label, and its rows."""
    by_setup = table.groupby(text_setup.fields(table), dropna=False, sort=False)
    groups = [rows for _, rows in by_setup]
    labels = text_setup.labels(table, [rows.iloc[0] for rows in groups])
    return list(zip(labels, groups, strict=True))


def by_setup(records: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    """The runs, or the requests, of each setup, with its label."""
    if not records:
        return []
    of_setups = []
    for label, rows in setups(runs(records)):
        of_setups.append((label, [records[number] for number in dict.fromkeys(rows.run)]))
    return of_setups


def requests_of(records: Iterable[object]) -> list[RequestRecord]:
    """All requests to servers."""
    return [record for record in records if isinstance(record, RequestRecord)]


def alone(records: Iterable[object]) -> list[RequestRecord]:
    """The requests that ran alone, one after the other."""
    return [request for request in requests_of(records) if request.experiment is None]


def requests_of_experiments(records: Iterable[object]) -> list[RequestRecord]:
    """The requests of experiments, such as conversations."""
    return [request for request in requests_of(records) if request.experiment is not None]


def of_engine(records: Iterable[object]) -> list[Record]:
    """The runs of the engine."""
    return [record for record in records if isinstance(record, Record)]


def is_measured(record: RequestRecord) -> bool:
    """Whether a request is a repeat of the others: not known to be warm, with a full answer."""
    request = request_times.figures(record.request)
    return record.is_good and request.is_warm is not True and request.is_short is not True


def timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that succeeded and are no warm-ups, as Run.is_timed says of a run."""
    return rows[(rows.status == OK) & ~rows.warmup]


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: timed and successful.

    Requests also ran alone, are not known to be warm, and have a full answer.
    """
    rows = timed(rows)
    if "server" not in rows:
        return rows
    is_request = rows.server.notna()
    is_special = rows.warm.eq(True) | rows.short.eq(True) | rows.case.notna()
    return rows[~(is_request & is_special)]


def n_prompt(request: RequestFigures) -> int | None:
    """Tokens of the prompt: as requested, otherwise as counted by the server."""
    asked = request.asked
    return first_known((asked.n_prompt, asked.n_prompt_counted, request.n_prompt))
