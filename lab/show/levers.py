"""The results of `lab batch`, `prefix`, `stall` and `speculate` by setup, as tables, sentences and pictures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.analysis import disturbances, table
from lab.core.record import OK, Ceilings, Record
from lab.core.shown import MARK
from lab.experiments.experiment import Table
from lab.experiments.known import EXPERIMENTS
from lab.show.section import WIDE, Picture, Section, numbered_alike, tabled
from lab.why.step_prediction import StepPrediction, prediction_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {one.name: experiment.chapter for experiment in EXPERIMENTS for one in experiment.tables}
"""Titles of the chapters of a page, by the name of the table."""


def sections(records: Sequence[Record], known: Sequence[Ceilings] = (), others: Sequence[Record] = ()) -> list[Section]:
    """The results of the experiments in `records`, predicted from `known` ceilings and `others`, plain runs."""
    timed = [record for record in records if record.run.status == OK and not record.run.warmup and record.run.lever]
    made = []
    for experiment in EXPERIMENTS:
        own = [record for record in timed if isinstance(record.run.lever, experiment.lever)]
        setups = table.setups(table.runs(own)) if own else []
        for kind, (label, rows) in itertools.product(experiment.tables, setups):
            chosen = tuple(own[i] for i in dict.fromkeys(rows.run))
            section = _section(kind, label, chosen, prediction_for(chosen[0], known, [*records, *others]))
            if section.rows:
                made.append(section)
    return made


def _section(kind: Table, label: str, records: tuple[Record, ...], prediction: StepPrediction | None) -> Section:
    """A table of an experiment with its sentences and the basis of its predictions."""
    rows = tuple(kind.rows(records, prediction))
    words, more = kind.conclude(rows, records, prediction)
    shown = tabled(kind.columns, rows)
    is_predicted = any("predicted" in heading for heading in shown["headings"])
    basis = list[str]()
    if kind.is_by_ceilings and prediction is None:
        basis = ["No predictions: measure the ceilings first (lab ceilings)."]
    elif kind.is_by_ceilings and is_predicted and prediction:
        basis = [prediction.basis]
    n_disturbed = sum(bool(disturbances.disturbances(record)) for record in records)
    by_case = ([record for record in records if record.run.name == name] for name in {r.run.name for r in records})
    if any(map(disturbances.is_doubtful, by_case)):
        words = [f"No conclusions: {n_disturbed} of {len(records)} runs were disturbed. Measure again."]
    title = f"{label} ({MARK} {n_disturbed} of {len(records)} runs disturbed)" if n_disturbed else label
    return Section(
        title,
        kind.title,
        name=kind.name,
        question=kind.question,
        **shown,
        sentences=[*words, *basis],
        pictures=[Picture(kind.name, kind.caption, partial(kind.draw, rows, records, prediction, title), WIDE)],
        more=more,
    )


def as_rows(shown: Sequence[Section]) -> list[dict[str, Any]]:
    """The rows of all sections for JSON, each with the name of its experiment and its setup."""
    return [
        {"experiment": section.name, "setup": section.title, **dataclasses.asdict(row)}
        for section in shown
        for row in section.rows
    ]


def more(shown: Sequence[Section]) -> dict[str, list[dict[str, Any]]]:
    """The further lists of the JSON output by name: break-even lengths, and results of searches."""
    lists: dict[str, list[dict[str, Any]]] = {}
    for section in shown:
        for name, values in section.more.items():
            lists.setdefault(name, []).extend({"setup": section.title, **dataclasses.asdict(one)} for one in values)
    return {name: values for name, values in lists.items() if values}


def drawings(shown: Sequence[Section]) -> dict[str, Callable[[Figure], Any]]:
    """The functions that draw the pictures, by name; several of one experiment are numbered."""
    return {one.name: one.draw for one in numbered_alike([one for section in shown for one in section.pictures])}
