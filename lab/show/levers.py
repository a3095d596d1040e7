"""Experiments as tables, sentences and pictures: what `lab batch`, `prefix`, `stall`, `speculate` showed, by setup."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.analysis import disturbances, table
from lab.core.record import OK, Ceilings, Record
from lab.core.shown import MARK
from lab.experiments.experiment import Table
from lab.experiments.known import EXPERIMENTS
from lab.show.console import grid_of
from lab.show.lever_kinds import Section
from lab.why.step_prediction import StepPrediction, prediction_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sections(records: Sequence[Record], known: Sequence[Ceilings] = (), others: Sequence[Record] = ()) -> list[Section]:
    """What the experiments among `records` showed. `known` ceilings and `others`, plain runs, predict it."""
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


def print_sections(shown: Sequence[Section], out: Console) -> None:
    """Prints each as a table with its sentences."""
    for section in shown:
        out.print()
        out.print(Text(section.title, style="bold"))
        grid = grid_of(*section.headings)
        for cells in section.cells:
            grid.add_row(*cells)
        out.print(grid)
        for sentence in section.sentences:
            out.print(sentence)


def as_rows(shown: Sequence[Section]) -> list[dict[str, Any]]:
    """The rows of all sections as JSON has them, each with the name of its experiment and its setup."""
    return [
        {"experiment": section.kind.name, "setup": section.label, **dataclasses.asdict(row)}
        for section in shown
        for row in section.rows
    ]


def more(shown: Sequence[Section]) -> dict[str, list[dict[str, Any]]]:
    """What JSON has besides the rows, by name: break-even lengths, and what searches ended with."""
    lists: dict[str, list[dict[str, Any]]] = {}
    for section in shown:
        for name, values in section.more.items():
            lists.setdefault(name, []).extend({"setup": section.label, **dataclasses.asdict(one)} for one in values)
    return {name: values for name, values in lists.items() if values}


def questions(shown: Sequence[Section]) -> list[str]:
    """What the experiments answer."""
    return list(dict.fromkeys(section.kind.question for section in shown))


def drawings(shown: Sequence[Section]) -> dict[str, Callable[[Figure], Any]]:
    """What draws the pictures, by their names."""
    names = [section.kind.name for section in shown]
    return {
        name if names.count(name) == 1 else f"{name}-{1 + names[:i].count(name)}": section.draw
        for i, (name, section) in enumerate(zip(names, shown, strict=True))
    }


def _section(kind: Table, label: str, records: tuple[Record, ...], prediction: StepPrediction | None) -> Section:
    """A section; a column in which nothing is known is left out."""
    rows = tuple(kind.rows(records, prediction))
    words, lists = kind.conclude(rows, records, prediction)
    cells = [tuple(show(row) for _, show in kind.columns) for row in rows]
    shown = [i for i in range(len(kind.columns)) if any(line[i] != "-" for line in cells)]
    is_predicted = any(word in kind.columns[i][0] for i in shown for word in ("predicted", "promised"))
    basis = list[str]()
    if kind.is_by_ceilings and prediction is None:
        basis = ["Nothing is predicted: measure the ceilings first (lab ceilings)."]
    elif kind.is_by_ceilings and is_predicted and prediction:
        basis = [prediction.basis]
    n_disturbed = sum(bool(disturbances.disturbances(record)) for record in records)
    by_case = ([record for record in records if record.run.name == name] for name in {r.run.name for r in records})
    if any(map(disturbances.is_doubtful, by_case)):
        words = [f"{n_disturbed} of {len(records)} runs were disturbed, so nothing is concluded. Measure again."]
    return Section(
        kind,
        f"{label} ({MARK} {n_disturbed} of {len(records)} runs disturbed)" if n_disturbed else label,
        records,
        rows,
        prediction,
        tuple(kind.columns[i][0] for i in shown),
        tuple(tuple(line[i] for i in shown) for line in cells),
        (*words, *basis),
        lists,
    )
