"""What an experiment showed on one setup, and its picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core.record import Record
from lab.experiments import batching
from lab.experiments.experiment import Table
from lab.show.plot_levers import plot_batch, plot_curve, plot_prefix, plot_speculation, plot_stall
from lab.why.step_prediction import StepPrediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """What one experiment showed on one setup. `rows` are those of the experiment's file, `more` what JSON adds."""

    kind: Table
    label: str
    records: tuple[Record, ...]
    rows: tuple[Any, ...]
    prediction: StepPrediction | None
    headings: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]
    more: dict[str, list[Any]]

    @property
    def title(self) -> str:
        return f"{self.label}: {self.kind.title}"

    def draw(self, figure: Figure) -> None:
        """Draw its picture."""
        PICTURES[self.kind.name](self, figure)


def _draw_batch(section: Section, figure: Figure) -> None:
    first = section.rows[0]
    ridge = batching.ridge(section.prediction, first.n_prompt, first.n_gen) if section.prediction is not None else None
    plot_batch(section.rows, section.records, section.label, ridge, figure)


def _draw_prefix(section: Section, figure: Figure) -> None:
    plot_prefix(section.rows, section.records, section.label, figure)


def _draw_stall(section: Section, figure: Figure) -> None:
    limits = [record.run.stall.limit_s for record in section.records if record.run.stall]
    plot_stall(section.records, figure, max((limit for limit in limits if limit is not None), default=None))


def _draw_speculation(section: Section, figure: Figure) -> None:
    plot_speculation(section.rows, section.records, section.label, figure)


def _draw_curve(section: Section, figure: Figure) -> None:
    plot_curve(section.rows, section.records, section.label, figure)


PICTURES: dict[str, Callable[[Section, Figure], None]] = {
    "batch": _draw_batch,
    "prefix": _draw_prefix,
    "speculate": _draw_speculation,
    "curve": _draw_curve,
    "stall": _draw_stall,
}
"""What draws each table's rows, by its name."""
