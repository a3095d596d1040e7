"""Claims on a page: the verdicts in a table, then claim by claim the figures, the criterion, and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.core.record import Ceilings, Record
from lab.experiments import claim_verdicts
from lab.experiments.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE
from lab.experiments.claim_parts import PARTS
from lab.experiments.claim_verdicts import Judged, Verdicts
from lab.show import claim_pictures, text_claims, text_results
from lab.show.page_parts import Picture, picture

QUESTION = "Do the textbooks' claims hold on this machine?"
STYLES = {HOLDS: "holds", HOLDS_NOT: "fails", UNSURE: "unsure", UNTESTABLE: "quiet"}
"""Classes of the page's style sheet."""


def sections(
    records: Sequence[Record],
    known: Sequence[Ceilings] = (),
    others: Sequence[Record] = (),
    judged: Sequence[tuple[str, Verdicts]] = (),
) -> list[dict[str, Any]]:
    """What the page shows of each session of claims among the records, judged anew unless they are `judged`."""
    judged = judged or claim_verdicts.of_sessions(records, known, others)
    return [
        _section(f"session-{i}-", name if len(judged) > 1 else "", own, known, others)
        for i, (name, own) in enumerate(judged)
    ]


def _section(
    prefix: str, name: str, verdicts: Verdicts, known: Sequence[Ceilings], others: Sequence[Record]
) -> dict[str, Any]:
    pictures: dict[str, list[Picture]] = {}
    for drawing in claim_pictures.drawings(verdicts.records, known, others, stacked=True):
        tall = drawing.name.endswith(("sweep", "context", "heads"))
        size = (5, 7.6) if tall else (10, 4.6) if drawing.size == claim_pictures.WIDE else (5, 3.9)
        shows = " ".join(one.judgement.words for one in verdicts.judged if drawing.part in one.claim.parts)
        made = picture(drawing.draw, f"{prefix}{drawing.name}", drawing.caption, shows or drawing.caption, size)
        pictures.setdefault(drawing.part, []).append(made)
    shown_at: dict[str, int] = {}
    return {
        "name": name,
        "prefix": prefix,
        "summary": claim_verdicts.summary(verdicts.judged),
        "notes": text_claims.notes(verdicts),
        "rows": [_row(one, pictures, shown_at) for one in verdicts.judged],
        "warnings": text_results.warnings(verdicts.records),
        "failures": text_claims.failures(verdicts.records),
    }


def _row(one: Judged, pictures: dict[str, list[Picture]], shown_at: dict[str, int]) -> dict[str, Any]:
    """A claim; a picture that several rest on stands at the first, `elsewhere` leads there from the others."""
    number, words, _, criterion, verdict = one.cells
    own = [part for part in one.claim.parts if part in pictures]
    here = [part for part in own if part not in shown_at]
    elsewhere = [(PARTS[part].what if part in PARTS else part, shown_at[part]) for part in own if part in shown_at]
    shown_at.update(dict.fromkeys(here, one.claim.number))
    return {
        "number": number,
        "words": words,
        "source": one.claim.source,
        "first_figures": one.first_figures,
        "figures": [claim_verdicts.figure_words(figure) for figure in one.judgement.figures],
        "criterion": criterion,
        "verdict": verdict,
        "style": STYLES[one.judgement.verdict],
        "why": one.judgement.words,
        "pictures": [drawn for part in here for drawn in pictures[part]],
        "elsewhere": elsewhere,
    }
