"""Experiments as tables, sentences and pictures: what `lab batch`, `prefix` and `stall` measured, by setup."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.analysis import disturbances, table
from lab.analysis.wording import digits
from lab.core.record import OK, Batch, Ceilings, Record
from lab.experiments import batching
from lab.show.console import grid_of
from lab.show.plot_batch import plot_batch
from lab.why.step_prediction import StepPrediction, prediction_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns = tuple[tuple[str, Callable[[Any], str]], ...]


@dataclass(frozen=True)
class Section:
    """What one experiment showed on one setup. `rows` are those of the experiment's file."""

    name: str
    label: str
    records: tuple[Record, ...]
    rows: tuple[Any, ...]
    prediction: StepPrediction | None
    headings: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.label}: {TITLES[self.name]}"


QUESTIONS = {"batch": "How many at once, and what does it cost each?"}
CAPTIONS = {
    "batch": "Tokens per second over how many sequences share a step: in all, and of each user. Points are runs, the "
    "line their median, dashes the prediction."
}
TITLES = {"batch": "sequences decoded together; medians over runs, below them their range"}

BATCH: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}{' shared' if row.is_shared else ''}"),
    ("sequences", lambda row: f"{row.n_seq:,}"),
    ("runs", lambda row: str(row.n_runs)),
    ("step\nms", lambda row: _ranged(1e3 * row.step_s, 1e3 * row.step_min_s, 1e3 * row.step_max_s, row.n_runs)),
    ("predicted\nms", lambda row: "-" if row.expected_s is None else digits(1e3 * row.expected_s)),
    ("tokens/s\nin all", lambda row: digits(row.total_tps)),
    ("tokens/s\nper user", lambda row: digits(row.user_tps)),
    ("gain", lambda row: "-" if row.gain is None else f"{digits(row.gain)}x"),
    ("prefill\ns", lambda row: digits(row.prefill_s)),
    ("KV cache\nMB", lambda row: "-" if row.kv_bytes is None else digits(row.kv_bytes / 1e6)),
)


def sections(records: Sequence[Record], known: Sequence[Ceilings] = (), others: Sequence[Record] = ()) -> list[Section]:
    """What the experiments among `records` showed. `known` ceilings and `others`, plain runs, predict it."""
    timed = [record for record in records if record.run.status == OK and not record.run.warmup and record.run.lever]
    if not timed:
        return []
    made = []
    for label, rows in table.setups(table.runs(timed)):
        of_setup = [timed[i] for i in dict.fromkeys(rows.run)]
        prediction = prediction_for(of_setup[0], known, [*records, *others])
        for kind, make in _KINDS.items():
            chosen = tuple(record for record in of_setup if isinstance(record.run.lever, kind))
            if chosen:
                made.append(make(label, chosen, prediction))
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
        {"experiment": section.name, "setup": section.label, **dataclasses.asdict(row)}
        for section in shown
        for row in section.rows
    ]


def questions(shown: Sequence[Section]) -> list[str]:
    """What the experiments answer."""
    return list(dict.fromkeys(QUESTIONS[section.name] for section in shown))


def drawings(shown: Sequence[Section]) -> dict[str, Callable[[Figure], Any]]:
    """What draws the pictures, by their names."""
    names = [section.name for section in shown]
    return {
        name if names.count(name) == 1 else f"{name}-{1 + names[:i].count(name)}": _PICTURES[name](section)
        for i, (name, section) in enumerate(zip(names, shown, strict=True))
    }


def _batch(label: str, records: tuple[Record, ...], prediction: StepPrediction | None) -> Section:
    rows = batching.rows(records, prediction)
    words = [
        sentence
        for n in sorted({row.n_prompt for row in rows})
        for sentence in batching.sentences([row for row in rows if row.n_prompt == n], prediction)
    ]
    return _section("batch", label, records, rows, prediction, BATCH, words)


def _section(
    name: str,
    label: str,
    records: tuple[Record, ...],
    rows: Sequence[Any],
    prediction: StepPrediction | None,
    columns: Columns,
    words: Sequence[str],
) -> Section:
    """A section; a column in which nothing is known is left out."""
    cells = [tuple(show(row) for _, show in columns) for row in rows]
    shown = [i for i in range(len(columns)) if any(line[i] != "-" for line in cells)]
    basis = [prediction.basis] if prediction else ["Nothing is predicted: measure the ceilings first (lab ceilings)."]
    if disturbances.is_doubtful(records):
        basis.append("Half of these runs or more were disturbed. Do not trust these figures: measure again.")
    return Section(
        name,
        label,
        records,
        tuple(rows),
        prediction,
        tuple(columns[i][0] for i in shown),
        tuple(tuple(line[i] for i in shown) for line in cells),
        (*words, *basis),
    )


def _ranged(value: float, low: float, high: float, n_runs: int) -> str:
    return digits(value) + (f"\n{digits(low)}-{digits(high)}" if n_runs > 1 else "")


def _draw_batch(section: Section) -> Callable[[Figure], Any]:
    first = section.rows[0]
    ridge = batching.ridge(section.prediction, first.n_prompt, first.n_gen) if section.prediction is not None else None
    return lambda figure: plot_batch(section.rows, section.records, section.label, ridge, figure)


_KINDS: dict[Any, Callable[[str, tuple[Record, ...], StepPrediction | None], Section]] = {Batch: _batch}
_PICTURES: dict[str, Callable[[Section], Callable[[Figure], Any]]] = {"batch": _draw_batch}
