"""All claims, and their verdicts from records.

Verdicts are not stored: a file of runs is judged again whenever it is shown.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from lab.core.lists import grouped, join_and
from lab.core.record import Ceilings, Record
from lab.experiments.claims import claim_parts, of_changes, of_hardware, of_limits, of_time
from lab.experiments.claims.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Claim, Evidence, Judgement
from lab.experiments.claims.claim_parts import CEILINGS
from lab.why import probing, where
from lab.why.where import Where

CLAIMS: tuple[Claim, ...] = tuple(
    sorted(
        (*of_time.CLAIMS, *of_limits.CLAIMS, *of_changes.CLAIMS, *of_hardware.CLAIMS),
        key=attrgetter("number"),
    )
)
"""All claims in order."""

MOST_SHOWN = 3
"""The most figures in the line of a claim."""

VERDICTS = {
    HOLDS: ("holds", "hold"),
    HOLDS_NOT: ("does not", "do not"),
    UNSURE: (UNSURE, UNSURE),
    UNTESTABLE: (f"is {UNTESTABLE}", f"are {UNTESTABLE}"),
}
"""The verdicts in a sentence about one claim, and about several."""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict."""

    claim: Claim
    judgement: Judgement

    def as_row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "number": self.claim.number,
            "claim": self.claim.words,
            "source": self.claim.source,
            "verdict": self.judgement.verdict,
            "figures": [dataclasses.asdict(figure) for figure in self.judgement.figures],
            "criterion": self.claim.criterion,
            "words": self.judgement.words,
            "parts": list(self.claim.parts),
        }

    @property
    def first_figures(self) -> list[str]:
        """The figures in words; if there are many, the first ones and the number of the others."""
        figures = [figure.words for figure in self.judgement.figures]
        if len(figures) > MOST_SHOWN:
            figures[MOST_SHOWN:] = [f"{len(figures) - MOST_SHOWN} more"]
        return figures

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Number, claim, figures, criterion, verdict: its line in a table."""
        line = "; ".join(self.first_figures) or "-"
        return str(self.claim.number), self.claim.words, line, self.claim.criterion, self.judgement.verdict


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a session of claims, and the records behind them.

    A notebook shows them as a table; `rows` are dictionaries, as in the JSON of `lab claims`.
    """

    judged: tuple[Judged, ...]
    records: tuple[Record, ...] = dataclasses.field(repr=False)
    unmeasured: tuple[int, ...] = ()  # numbers of claims without measurements, which are left out
    is_quick: bool = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [one.as_row() for one in self.judged]

    def __repr__(self) -> str:
        lines = [" | ".join(one.cells) for one in self.judged]
        return "\n".join([*lines, summary(self.judged)])

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        head = "".join(f"<th>{name}</th>" for name in ("", "claim", "figures", "criterion", "verdict"))
        lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in one.cells) for one in self.judged]
        body = "".join(f'<tr style="text-align: left">{line}</tr>' for line in lines)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{summary(self.judged)}</p>"


def summary(judged: Sequence[Judged]) -> str:
    """The number of claims with each verdict, in a sentence."""
    verdicts = [one.judgement.verdict for one in judged]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    parts = [f"{n} {VERDICTS[verdict][n > 1]}" for verdict, n in counts.items() if n]
    of = f"Of {len(judged)} claims" if len(judged) > 1 else "Of 1 claim"
    return f"{of} {join_and(parts) or 'none is left'}."


def of_sessions(
    records: Sequence[Record],
    known: Sequence[Ceilings] = (),
    others: Sequence[Record] = (),
    theirs: Sequence[Ceilings] = (),
) -> list[tuple[str, Verdicts]]:
    """The verdicts of each session of claims by its name; other records are evidence like `others`.

    Claims without measurements are left out. `theirs` are ceilings that came with `others`.
    """
    sessions = grouped(records, lambda record: record.session)
    made = []
    for name, own in sessions.items():
        if all(record.run.part is None for record in own):
            continue
        rest = [record for record in records if record.session != name]
        evidence = evidence_of(own, where.of_record(own[0]), known, [*rest, *others], theirs)
        made.append((name, verdicts(CLAIMS, evidence, are_chosen=False)))
    return made


def evidence_of(
    records: Sequence[Record],
    here: Where,
    known: Sequence[Ceilings] = (),
    others: Sequence[Record] = (),
    theirs: Sequence[Ceilings] = (),
    is_quick: bool | None = None,
) -> Evidence:
    """The evidence of one session on a machine: its own ceilings from `known`, and the results of other machines.

    Other records of a machine with the same description are left out. Without `is_quick` the runs decide it.
    """
    return Evidence(
        tuple(records),
        probing.known(known, here),
        tuple(record for record in others if not where.same(record.machine, here.machine)),
        tuple(ceilings for ceilings in (*known, *theirs) if not where.same(ceilings.machine, here.machine)),
        claim_parts.is_quick(records) if is_quick is None else is_quick,
    )


def verdicts(claims: Sequence[Claim], evidence: Evidence, are_chosen: bool = True) -> Verdicts:
    """Judge claims. Unless the user chose them, claims without measurements are left out."""
    tried = {record.run.part for record in evidence.records}
    wanted = [
        claim
        for claim in claims
        if are_chosen or not _measured(claim) or any(part in tried for part in _measured(claim))
    ]
    left_out = tuple(claim.number for claim in claims if claim not in wanted)
    judged = tuple(Judged(claim, claim.judge(evidence)) for claim in wanted)
    return Verdicts(judged, evidence.records, left_out, evidence.is_quick)


def failures(records: Sequence[Record]) -> dict[str, str]:
    """Parts without a successful run, with the error of the first run."""
    good = {record.run.part for record in records if record.run.is_timed}
    errors: dict[str, str] = {}
    for record in records:
        part = record.run.part
        if part is not None and part not in good and record.run.error:
            errors.setdefault(part, record.run.error)
    return errors


def _measured(claim: Claim) -> list[str]:
    """The parts of a claim that are runs."""
    return [part for part in claim.parts if part != CEILINGS]
