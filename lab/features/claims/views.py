"""A session of claims as a section, and as a picture: each figure over its threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lab.core.record import QUANT, Record
from lab.features import known
from lab.features.claims import judging
from lab.features.claims.figures import CLAIMS
from lab.features.claims.judging import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Condition, Figure, Judged, Verdicts
from lab.features.claims.session import PARTS
from lab.features.measure import text_results
from lab.runner import as_options
from lab.show import canvas
from lab.show.canvas import COLOURS, GUIDE
from lab.show.section import Cell, Context, Kind, Picture, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

STYLES = {HOLDS: "holds", HOLDS_NOT: "fails", UNSURE: "unsure", UNTESTABLE: "quiet"}
"""Classes of the page's style sheet."""

CAPTION = "Each figure over its threshold, with its interval. It holds on the side to which its triangle points."

MOST_RATIO = 100.0
"""The picture ends at this multiple of a threshold, and at its inverse."""


def sections(sessions: Iterable[Verdicts], context: Context) -> list[Section]:
    """A table of all verdicts for each session, its picture and, on a page or with details, the criteria."""
    made, is_whole = [], context.details or context.is_page
    for i, verdicts in enumerate(sessions, 1):
        judged, failed = verdicts.judged, judging.failures(verdicts.records)
        rest = [record for record in verdicts.records if record.run.part not in failed]
        failures = [*(f"{part}: {error}" for part, error in failed.items()), *text_results.failures(rest)]
        figures = [(one, *pair) for one in judged for pair in one.figures]
        criteria = {
            str(one.claim.number): " ".join(
                [one.claim.criterion, *([f"Claimed by {one.claim.source}."] if one.claim.source else [])]
            )
            for one in judged
        }
        size = 10.0, 1.8 + 0.2 * len(figures)
        made.append(
            Section(
                "Claims and verdicts",
                f"session {verdicts.session}",
                name=f"claims-{i}",
                question="Do the textbooks' claims hold on this machine?",
                headings=("", "claim", "verdict", "figures"),
                cells=[
                    [str(one.claim.number), one.claim.words, Cell(one.verdict, style=STYLES[one.verdict]), one.words]
                    for one in judged
                ],
                warnings=[*known.warnings(verdicts.records), *(f"failed: {line}" for line in failures)],
                words=() if context.is_page else [verdicts.summary],
                sentences=[verdicts.summary] if context.is_page else (),
                pictures=[Picture("claims", CAPTION, partial(_draw, figures), size)] if figures else [],
                parts=[Section("The criteria, fixed before the measurement", facts=criteria)] if is_whole else [],
                data=partial(dict, rows=verdicts.rows),
            )
        )
    return made


def _draw(known: Sequence[tuple[Judged, Figure, Condition]], canvas_figure: Canvas) -> None:
    """A line for each figure and threshold: the interval of their ratio, in the colour of what it shows."""
    ax, labels = canvas_figure.subplots(), {"holds": COLOURS[2], "fails": COLOURS[1], "cannot be told": COLOURS[4]}
    for at, (_, figure, condition) in enumerate(known):
        for threshold, mark, above in ((condition.least, ">", -0.15), (condition.most, "<", 0.15)):
            if not math.isfinite(threshold):
                continue
            ends = (figure.low / threshold, figure.value / threshold, figure.high / threshold)
            low, value, high = (min(MOST_RATIO, max(1 / MOST_RATIO, ratio)) for ratio in ends)
            good, bad = (low >= 1, high < 1) if mark == ">" else (high <= 1, low > 1)
            colour = labels["holds" if good else "fails" if bad else "cannot be told"]
            y = at + above * math.isfinite(condition.least) * math.isfinite(condition.most)
            ax.plot([low, high], [y, y], color=colour, lw=2)
            ax.plot(value, y, mark, color=colour, ms=6)
    for label, colour in labels.items():
        ax.plot([], [], color=colour, lw=2, label=label)
    ax.axvline(1, color=GUIDE, lw=1.2)
    ax.set_xscale("log")
    ax.set_yticks(range(len(known)), [f"{one.claim.number}  {figure.name}" for one, figure, _ in known], fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("figure over threshold")
    canvas.finish([ax], "Textbook claims: each figure over its threshold", is_apart=True)


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """The verdicts of each session of claims, judged again."""
    return sections(judging.of_sessions(CLAIMS, records, context.ceilings), context)


def again(records: Sequence[Record]) -> str:
    """The command of a session of claims: with the settings of the parts that change none."""
    timed = as_options.timed(records)
    usual = [record for record in timed if record.run.block is None and record.run.lever is None] or timed
    tried = {record.run.part for record in timed}
    only = None if tried.issuperset(PARTS) else [claim.number for claim in CLAIMS if tried.issuperset(claim.parts)]
    return as_options.line("claims", {"only": only}, (), as_options.shared(usual))


KINDS = (Kind("claims", lambda one: isinstance(one, Record) and one.run.part not in (None, QUANT), chapters, again),)
