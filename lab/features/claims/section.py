"""The verdicts of a session of claims as a table, with their picture and the criteria."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from lab.core.record import Record
from lab.features.claims.judging import (
    CLAIMS,
    HOLDS,
    HOLDS_NOT,
    PARTS,
    UNSURE,
    UNTESTABLE,
    ClaimRow,
    FigureRow,
    Verdicts,
    failures,
    of_sessions,
)
from lab.show import canvas, text_doubts, text_setup
from lab.show.canvas import COLOURS, GUIDE
from lab.show.cells import LONG_TEXT, Cell, Column
from lab.show.section import Columns, Context, Kind, Picture, Section, tabled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {HOLDS: "holds", HOLDS_NOT: "fails", UNSURE: "unsure", UNTESTABLE: "quiet"}
"""Classes of the page's style sheet."""

SURPRISING = (HOLDS_NOT, UNSURE, HOLDS, UNTESTABLE)
COLOURS_OF_VERDICTS = {HOLDS: COLOURS[2], HOLDS_NOT: COLOURS[1], UNSURE: COLOURS[4]}
# Triangles that point to the side of a threshold that holds
Threshold = Literal["least", "most"]
MARKS: dict[Threshold, str] = {"least": ">", "most": "<"}
SHIFTS = {"least": -0.15, "most": 0.15}
"""By how much the lines of a figure with two thresholds lie above and below its place."""

MOST_RATIO = 100.0  # the picture ends at this multiple of a threshold, and at its inverse
CAPTION = (
    "Each figure over its threshold, with its interval. "
    "It holds on the side to which its triangle points."
)

COLUMNS: Columns[ClaimRow] = (
    Column("", lambda row: str(row["number"])),
    Column("claim", lambda row: row["claim"], LONG_TEXT),
    Column(
        "verdict", lambda row: Cell(row["verdict"], style=STYLES[row["verdict"]]), LONG_TEXT
    ),
    Column("figures", lambda row: row["words"], LONG_TEXT),
)


def sections(sessions: Iterable[Verdicts], context: Context) -> list[Section]:
    """A table of all verdicts for each session, its picture and, on a page or with details, the
    criteria."""
    has_criteria = context.details or context.is_page
    return [
        section(verdicts, f"claims-{number}", has_criteria)
        for number, verdicts in enumerate(sessions, 1)
    ]


def section(verdicts: Verdicts, name: str, has_criteria: bool) -> Section:
    rows = verdicts.rows if has_criteria else sorted(verdicts.rows, key=surprise)
    n_figures = sum(len(row["figures"]) for row in rows)
    size = (10.0, 1.8 + 0.2 * n_figures)
    picture = Picture("claims", CAPTION, partial(draw, verdicts), size)
    parts: list[Section] = []
    if has_criteria:
        title = "The criteria, fixed before the measurement"
        parts.append(
            Section(title, facts={str(row["number"]): criterion(row) for row in rows})
        )
    return Section(
        "Claims and verdicts",
        f"session {verdicts.session}",
        name=name,
        question="Do the textbooks' claims hold on this machine?",
        answer="" if has_criteria else verdicts.summary,
        words=[verdicts.summary] if has_criteria else [],
        **tabled(COLUMNS if has_criteria else COLUMNS[:-1], rows, keep_all=True),
        hidden="" if has_criteria else "the figures and criteria",
        warnings=warnings(verdicts.records),
        pictures=[picture] if n_figures else [],
        parts=parts,
        data=lambda: {"rows": verdicts.rows},
    )


def surprise(row: ClaimRow) -> int:
    """The order of a short table, which may leave out the last rows."""
    return SURPRISING.index(row["verdict"])


def criterion(row: ClaimRow) -> str:
    if not row["source"]:
        return str(row["criterion"])
    return f"{row['criterion']} Claimed by {row['source']}."


def warnings(records: Sequence[Record]) -> list[str]:
    """What disturbed the runs, and what failed; one line for a part without a successful run."""
    sentences = text_doubts.warnings(records)
    errors = failures(records)
    for part, error in errors.items():
        sentences.append(f"failed: {part}: {error}")
    of_good_parts = [record for record in records if record.run.part not in errors]
    for line in text_doubts.failures(of_good_parts):
        sentences.append(f"failed: {line}")
    return sentences


def draw(verdicts: Verdicts, canvas_figure: Figure) -> None:
    """A line for each figure and threshold: the interval of their ratio, in the colour of the
    verdict."""
    ax = canvas_figure.subplots()
    labels: list[str] = []
    for row in verdicts.rows:
        for figure in row["figures"]:
            draw_figure(ax, figure, len(labels))
            labels.append(f"{row['number']}  {figure['name']}")
    for verdict, colour in COLOURS_OF_VERDICTS.items():
        ax.plot([], [], color=colour, lw=2, label=verdict)
    for mark, side in ((">", "above"), ("<", "below")):
        ax.plot([], [], mark, color=GUIDE, label=f"the claim: {side} the threshold")
    ax.axvline(1, color=GUIDE, lw=1.2)
    ax.set(xscale="log", xlabel="figure over the threshold of its claim, with its interval")
    ax.set_yticks(range(len(labels)), labels, fontsize=canvas.SMALL_SIZE)
    ax.invert_yaxis()
    subject = text_setup.where(verdicts.records)
    canvas.finish([ax], f"{verdicts.summary.rstrip('.')}\n{subject}", is_apart=True)


def draw_figure(ax: Axes, figure: FigureRow, place: int) -> None:
    """Draw a judged figure over each of its thresholds, at this place of the y axis."""
    colour = COLOURS_OF_VERDICTS[figure["verdict"]]
    thresholds: list[tuple[Threshold, float]] = []
    for end in MARKS:
        threshold = figure[end]
        if threshold is not None:
            thresholds.append((end, threshold))
    for end, threshold in thresholds:
        y = place + SHIFTS[end] if len(thresholds) > 1 else place
        low = drawn_ratio(figure["low"], threshold)
        high = drawn_ratio(figure["high"], threshold)
        ax.plot([low, high], [y, y], color=colour, lw=2)
        value = drawn_ratio(figure["value"], threshold)
        ax.plot(value, y, MARKS[end], color=colour, ms=6)


def drawn_ratio(value: float | None, threshold: float) -> float:
    """A figure (None: infinite) over a threshold, within the picture."""
    ratio = math.inf if value is None else value / threshold
    return min(MOST_RATIO, max(1 / MOST_RATIO, ratio))


def is_of_claims(line: object) -> bool:
    return isinstance(line, Record) and line.run.part in PARTS


def sections_of_records(records: Sequence[Record], context: Context) -> list[Section]:
    return sections(of_sessions(CLAIMS, records, context.ceilings), context)


KINDS = (Kind("claims", is_of_claims, sections_of_records),)
