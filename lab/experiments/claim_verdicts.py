"""Verdicts from records: each claim against its criterion, and why not where the evidence is missing.

Nothing of this is stored: a file of runs is judged anew whenever it is shown.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.analysis.wording import digits
from lab.core.record import OK, Ceilings, Record
from lab.experiments import claim_parts
from lab.experiments.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Claim, Evidence, Figure, Judgement
from lab.experiments.claim_list import CLAIMS
from lab.experiments.claim_parts import CEILINGS
from lab.why import probing, where
from lab.why.where import Where

MOST_SHOWN = 3
"""Figures of a claim that its line shows."""

VERDICTS = {HOLDS: ("holds", "hold"), HOLDS_NOT: ("does not", "do not")}
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
        """The figures in words; of many the first ones, and how many more there are."""
        figures = list(map(figure_words, self.judgement.figures))
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
    """What a session of claims ended with: the claims judged, and the records that they were judged by.

    A notebook shows them as a table; `rows` are dictionaries, as in the JSON of `lab claims`.
    """

    judged: tuple[Judged, ...]
    records: tuple[Record, ...] = dataclasses.field(repr=False)
    unmeasured: tuple[int, ...] = ()  # numbers of claims left out, since nothing was measured for them
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


def figure_words(figure: Figure) -> str:
    """`share: 64 % (61 to 67)`, a figure in a line."""
    unit = f" {figure.unit}" if figure.unit else ""
    ends = (
        f" ({digits(figure.low)} to {digits(figure.high)})"
        if figure.low is not None and figure.high is not None and figure.low != figure.high
        else ""
    )
    return f"{figure.name}: {digits(figure.value)}{unit}{ends}"


def summary(judged: Sequence[Judged]) -> str:
    """How many claims got each verdict, in a sentence."""
    counts = {
        verdict: sum(one.judgement.verdict == verdict for one in judged)
        for verdict in (HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE)
    }
    parts = []
    for verdict, n in counts.items():
        if n:
            one, several = VERDICTS.get(verdict, (verdict, verdict))
            be = "" if verdict in VERDICTS or verdict == UNSURE else "is " if n == 1 else "are "
            parts.append(f"{n} {be}{one if n == 1 else several}")
    of = f"Of {len(judged)} claims " if len(judged) > 1 else "Of 1 claim "
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "none is left"
    return f"{of}{listed}."


def of_sessions(
    records: Sequence[Record],
    known: Sequence[Ceilings] = (),
    others: Sequence[Record] = (),
    theirs: Sequence[Ceilings] = (),
) -> list[tuple[str, Verdicts]]:
    """The verdicts of each session that measured for claims, by its name; other records are evidence as `others` are.

    A claim is left out where nothing was measured for it. `theirs` are ceilings that came with `others`.
    """
    sessions = dict.fromkeys(record.session for record in records if record.run.part is not None)
    made = []
    for name in sessions:
        own = [record for record in records if record.session == name]
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
    """The evidence of one session on a machine: of `known` ceilings its own, of all others what is of other machines.

    A sample from a machine of the same description says nothing of what this one can do.

    Where it is not said whether the session was a quick one, its runs say it.
    """
    return Evidence(
        tuple(records),
        probing.known(known, here),
        tuple(record for record in others if not where.same(record.machine, here.machine)),
        tuple(ceilings for ceilings in (*known, *theirs) if not where.same(ceilings.machine, here.machine)),
        claim_parts.is_quick(records) if is_quick is None else is_quick,
    )


def verdicts(claims: Sequence[Claim], evidence: Evidence, are_chosen: bool = True) -> Verdicts:
    """Judge claims. Of claims that nobody chose those are left out for which nothing was measured."""
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
    """Parts of which no run went well, and the error of the first one."""
    good = {record.run.part for record in records if record.run.status == OK and not record.run.warmup}
    errors: dict[str, str] = {}
    for record in records:
        part = record.run.part
        if part is not None and part not in good and record.run.error:
            errors.setdefault(part, record.run.error)
    return errors


def _measured(claim: Claim) -> list[str]:
    """The parts of a claim that are runs."""
    return [part for part in claim.parts if part != CEILINGS]
