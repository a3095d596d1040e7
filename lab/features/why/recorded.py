"""The figures of the lab's own results: runs and requests, by setup."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.app.reading import read
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.features.why import facts
from lab.features.why.figure import DECODE, PREFILL, PROMPT, STEPS, Figure
from lab.features.why.setups import facts_of
from lab.show import comparison, session_spread, table

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {DECODE: ("tpot_ms", "step_ms"), PREFILL: ("prefill_s", "ttft_s")}
"""Columns of a phase's figure; the second where no run has the first."""

COUNTS = {DECODE: STEPS, PREFILL: PROMPT}
Measured = Record | RequestRecord


def figures_of(name: str) -> list[list[Figure]]:
    """The figures of a results file or folder by setup, or by session if all are of one setup.

    LabError if no plain run or request succeeded, with the reason of the first failure.
    """
    measured = [record for record in read((name,)).measured if is_plain(record)]
    if not measured:
        raise LabError(f"{name} has no plain run.", "Measure some: lab measure")
    rows = table.measured(table.runs(measured))
    if rows.empty:
        raise LabError(
            f"{name} has no plain run that succeeded{first_error(measured)}.",
            "Measure some: lab measure",
        )
    rows = comparison.rows_by_session(rows)
    spreads = session_spread.known_spreads(measured)
    setups = table.setups(rows)
    groups = list[list[Figure]]()
    for label, runs in setups:
        about = ""
        if len(setups) > 1:
            about = label.partition(", ")[2]
        figures = list[Figure]()
        for _, repeats in runs.groupby(["n_prompt", "n_gen"]):
            records = [measured[index] for index in dict.fromkeys(repeats.run)]
            for phase in COLUMNS:
                figures += figure_of(repeats, records, phase, spreads, about)
        if figures:
            groups.append(figures)
    if not groups:
        raise LabError(f"{name} has no run with a rate.", "Measure some: lab measure")
    return groups


def is_plain(record: Measured) -> bool:
    """Whether a line is of a prompt and an answer, and of no experiment."""
    if isinstance(record, RequestRecord):
        return True
    return record.run.is_plain and not record.run.is_apart


def first_error(measured: Sequence[Measured]) -> str:
    """The first failure among runs and requests, to end a sentence; "" if there is none."""
    for record in measured:
        part = record.run if isinstance(record, Record) else record.request
        if part.error:
            return f": {part.error.rstrip('.')}"
    return ""


def figure_of(
    repeats: pd.DataFrame,
    records: Sequence[Measured],
    phase: str,
    spreads: Mapping[tuple[object, str], session_spread.Spread],
    about: str,
) -> list[Figure]:
    """The figure of repeats of one length in a phase, if they have it.

    `repeats`: rows of the table.
    """
    main, second_column = COLUMNS[phase]
    values = positive(repeats, main)
    second_values = positive(repeats, second_column)
    if not values:
        values = second_values
    if not values:
        return []
    first = repeats.iloc[0]
    n_prompt = int(first.n_prompt)
    n_gen = int(first.n_gen)
    depth = 0 if phase == PREFILL else n_prompt
    imported = first_imported(records)
    if imported and phase == DECODE:  # a test of llama-bench, which has no prompt
        n_gen -= 1
        depth = imported.run.steps.n_past[0]
    unit = n_prompt if phase == PREFILL else 1e3
    logs = [math.log(value) for value in values]
    between = spreads.get((session_spread.machine_of(repeats), main))
    if between is None:
        between = session_spread.default_spread(first)
    compute_tps = None
    if phase == DECODE and second_values:
        compute_tps = 1e3 / statistics.median(second_values)
    prefill_s = None
    prefills_s = positive(repeats, "prefill_s")
    if prefills_s:
        prefill_s = statistics.median(prefills_s)
    return [
        Figure(
            tps=unit / statistics.median(values),
            phase=phase,
            counts=COUNTS[phase],
            n_prompt=n_prompt,
            n_gen=n_gen,
            depth=depth,
            n_streams=1,
            prefill_s=prefill_s,
            spread=deviation_of_median(logs),
            between=between.sd,
            compute_tps=compute_tps,
            about=about,
            **setup_of(records, str(first.model)),
        )
    ]


def setup_of(records: Sequence[Measured], model: str) -> dict[str, Any]:
    """What was measured, as fields of a figure: runs of the engine, or requests to a server."""
    runs = tuple(record for record in records if isinstance(record, Record))
    if runs:
        setup_facts = facts_of(runs[0], model)
        source = runs[0].run.imported_from or "lab"
        return {"source": source, "facts": setup_facts, "records": runs}
    requests = tuple(record for record in records if isinstance(record, RequestRecord))
    reported = requests[0].endpoint.settings
    setup_facts = facts.stated({facts.MODEL: model})
    if reported:
        file = reported.model_file or model
        setup_facts = facts.stated(
            {facts.MODEL: file, facts.QUANTIZATION: reported.quantization}
        )
    return {
        "source": "server",
        "facts": setup_facts,
        "is_of_server": True,
        "requests": requests,
    }


def first_imported(records: Sequence[Measured]) -> Record | None:
    """The first record if another tool measured it."""
    first = records[0]
    if isinstance(first, Record) and first.run.imported_from:
        return first
    return None


def positive(rows: pd.DataFrame, column: str) -> list[float]:
    """The values of a column above 0; none if it is missing."""
    if column not in rows:
        return []
    return [float(value) for value in rows[column] if value > 0]


def deviation_of_median(logs: Sequence[float]) -> float | None:
    """The standard deviation of the median of some values; None for a single one."""
    if len(logs) < 2:
        return None
    return math.sqrt(math.pi / 2 / len(logs)) * statistics.stdev(logs)
