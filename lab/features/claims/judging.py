"""Judges claims (claims.toml) by their conditions: figures of a session, and thresholds that were
fixed before it.

A condition holds if the whole interval of each of its figures lies within the thresholds, fails if
an interval lies outside, and cannot be told if an interval contains a threshold. A claim holds if
all of its conditions hold, and fails if one fails. The printed criterion is made from the
conditions, so both always agree.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from lab.core.lists import grouped, join_and, plural
from lab.core.record import Ceilings, Record
from lab.core.shown import is_unreliable
from lab.errors import LabError
from lab.features.claims import figures as figure_functions
from lab.features.claims.evidence import Evidence
from lab.features.claims.figures import ClaimFigure
from lab.roofline import probing
from lab.runner import disturbances
from lab.show.wording import digits

HOLDS = "holds here"
HOLDS_NOT = "does not hold here"
UNSURE = "cannot be told"
UNTESTABLE = "not testable here"
VERDICTS = (HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE)
OF_SEVERAL = {HOLDS: "hold here", HOLDS_NOT: "do not hold here"}
"""Verdicts as several claims have them, where that is said in another way."""


REASONS = {
    HOLDS_NOT: "Fails: {}.",
    UNTESTABLE: "Not measured: {}.",
    UNSURE: "Cannot be told: {}.",
    HOLDS: "Holds: {}.",
}
"""The sentence for the figures of each verdict. The first verdict that a figure has is that of the
claim."""

CEILINGS = "ceilings"  # among the parts of a claim: its figures need the machine's ceilings
ONE_BY_ONE = ("lengths", "context")
"""Parts whose runs are compared with nothing beside them, so that a disturbance counts fully."""

MOST_SHOWN = 3  # figures in a cell


Claim = dict[str, Any]
"""A claim of claims.toml: `number`, `words`, `parts`, `conditions`, and `note` and `source` where
there are any."""


class ClaimCondition(TypedDict):
    """A condition of a claim, as far as it is about a figure's value."""

    least: NotRequired[float]
    most: NotRequired[float]
    unit: NotRequired[str]


class FigureRow(TypedDict):
    """A figure with its interval, and the thresholds of its condition."""

    name: str
    unit: str
    value: float | None
    low: float
    high: float | None
    n: int
    least: float | None
    most: float | None
    verdict: str


class JudgedClaim(TypedDict):
    """A claim with its verdict."""

    number: int
    claim: str
    source: str
    verdict: str
    words: str
    criterion: str
    parts: Sequence[str]
    figures: list[FigureRow]


class ClaimRow(JudgedClaim):
    """A judged claim of a session."""

    session: str


def read_claims() -> tuple[Claim, ...]:
    text = Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")
    claims = tomllib.loads(text)
    return tuple({"number": int(number), **claim} for number, claim in claims.items())


CLAIMS = read_claims()
PARTS: frozenset[str] = frozenset().union(*(claim["parts"] for claim in CLAIMS))
"""The parts of a session of claims, which its runs name."""


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a session of claims: a row for each claim (as `judge` returns it), and the
    session's records."""

    session: str
    rows: list[ClaimRow]
    records: tuple[Record, ...] = field(repr=False)

    @property
    def summary(self) -> str:
        """The number of claims with each verdict, in a sentence."""
        verdicts = [row["verdict"] for row in self.rows]
        counts = []
        for name in VERDICTS:
            n_claims = verdicts.count(name)
            if n_claims == 1:
                counts.append(f"1 {name}")
            elif n_claims:
                counts.append(f"{n_claims} {OF_SEVERAL.get(name, name)}")
        return f"{plural(len(verdicts), 'claim')}: {join_and(counts) or 'none is left'}."


def of_sessions(
    claims: Sequence[Claim], records: Iterable[Record], ceilings: Sequence[Ceilings]
) -> Iterator[Verdicts]:
    """The verdicts of each session of claims among the records; claims that lack a part are left
    out."""
    of_parts = [record for record in records if record.run.part]
    for session, of_session in grouped(of_parts, lambda record: record.session).items():
        place = probing.place_of_record(of_session[0])
        evidence = Evidence(of_session, probing.known(ceilings, place))
        tried = {CEILINGS, *(record.run.part for record in of_session)}
        rows: list[ClaimRow] = []
        for claim in claims:
            if tried.issuperset(claim["parts"]):
                rows.append({"session": session, **judge(claim, evidence)})
        yield Verdicts(session, rows, tuple(of_session))


def failures(records: Iterable[Record]) -> dict[str, str]:
    """Parts without a successful run, with the error of the first run."""
    errors: dict[str, str] = {}
    parts_with_times: set[str | None] = set()
    for record in records:
        run = record.run
        if run.is_timed:
            parts_with_times.add(run.part)
        elif run.error and run.part:
            errors.setdefault(run.part, run.error)
    return {part: error for part, error in errors.items() if part not in parts_with_times}


@dataclass(frozen=True)
class JudgedFigure:
    """A figure beside its thresholds."""

    figure: ClaimFigure
    condition: ClaimCondition

    @property
    def verdict(self) -> str:
        least = self.condition.get("least", -math.inf)
        most = self.condition.get("most", math.inf)
        low = self.figure.low
        high = math.inf if self.figure.high is None else self.figure.high
        if least <= low and high <= most:
            return HOLDS
        if high < least or low > most:
            return HOLDS_NOT
        return UNSURE

    @property
    def sentence(self) -> str:
        """The figure with its interval, and what it must be."""
        ends = (self.condition.get("least"), self.condition.get("most"))
        thresholds = [end for end in ends if end is not None]
        text = f"{self.figure.name}: {value_text(self.figure, thresholds)}"
        if self.figure.n < 3:
            text += f", interval assumed for {plural(self.figure.n, 'value')}"
        return f"{text}, must be {bounds(self.condition)}"

    @property
    def row(self) -> FigureRow:
        return {
            "name": self.figure.name,
            "value": self.figure.value,
            "low": self.figure.low,
            "high": self.figure.high,
            "unit": self.figure.unit,
            "n": self.figure.n,
            "least": self.condition.get("least"),
            "most": self.condition.get("most"),
            "verdict": self.verdict,
        }


def bounds(condition: ClaimCondition) -> str:
    """The thresholds of a condition in words."""
    least = condition.get("least")
    most = condition.get("most")
    if most is None:
        text = f"at least {least:,.4g}"
    elif least is None:
        text = f"at most {most:,.4g}"
    else:
        text = f"between {least:,.4g} and {most:,.4g}"
    return f"{text} {condition['unit']}" if "unit" in condition else text


def value_text(figure: ClaimFigure, thresholds: Sequence[float]) -> str:
    """A figure with its unit and its interval."""
    unit = figure.unit if figure.unit == "x" else f" {figure.unit}"
    low = digits_beside(figure.low, thresholds)
    if figure.value is None or figure.high is None:
        return f"at least {low}{unit}"
    value = digits_beside(figure.value, thresholds)
    if figure.low == figure.high:
        return f"{value}{unit}"
    return f"{value}{unit} ({low}-{digits_beside(figure.high, thresholds)})"


def digits_beside(value: float, thresholds: Sequence[float]) -> str:
    """A number with enough digits to show on which side of each threshold it lies."""
    for threshold in thresholds:
        if value != threshold and digits(value) == digits(threshold):
            n_decimals = math.ceil(-math.log10(abs(value - threshold)))
            return f"{value:,.{max(1, n_decimals)}f}"
    return digits(value)


def criterion(claim: Claim) -> str:
    """What a claim must fulfil to hold, in sentences."""
    sentences: list[str] = []
    for condition in claim["conditions"]:
        sentences.append(f"{condition['what']} is {bounds(condition)}.")
    if "note" in claim:
        sentences.append(claim["note"])
    return " ".join(sentences)


def judge(claim: Claim, evidence: Evidence) -> JudgedClaim:
    """The row of a claim: words, criterion, parts, verdict, reasons, and its figures with intervals
    and thresholds."""
    row: JudgedClaim = {
        "number": claim["number"],
        "claim": claim["words"],
        "source": claim.get("source", ""),
        "verdict": UNTESTABLE,
        "words": missing(claim, evidence),
        "criterion": criterion(claim),
        "parts": claim["parts"],
        "figures": [],
    }
    if row["words"]:
        return row
    try:
        judged = judged_figures(claim, evidence)
    except LabError as problem:  # a kernel that was not probed, a model that cannot be counted
        return {**row, "words": f"{problem.what} {problem.hint}".strip()}
    sentences: dict[str, list[str]] = {verdict: [] for verdict in REASONS}
    for condition in claim["conditions"]:
        figures = judged[condition["what"]]
        if not figures:
            what = condition["what"]
            sentences[UNTESTABLE].append(f"{what[:1].lower()}{what[1:]}")
        for figure in figures:
            sentences[figure.verdict].append(figure.sentence)
            row["figures"].append(figure.row)
    verdict, words = verdict_and_words(claim, evidence, sentences)
    return {**row, "verdict": verdict, "words": words}


def judged_figures(claim: Claim, evidence: Evidence) -> dict[str, list[JudgedFigure]]:
    """The figures of each condition, by what it says. LabError if one cannot be computed."""
    judged: dict[str, list[JudgedFigure]] = {}
    for condition in claim["conditions"]:
        name, *arguments = condition["figures"]
        figures = getattr(figure_functions, name)(evidence, *arguments)
        judged[condition["what"]] = [
            JudgedFigure(figure, condition) for figure in figures if figure is not None
        ]
    return judged


def verdict_and_words(
    claim: Claim, evidence: Evidence, sentences: Mapping[str, Sequence[str]]
) -> tuple[str, str]:
    """The verdict by the figures' `sentences`, and the reasons; mostly disturbed runs are not
    sure."""
    verdicts = [verdict for verdict in REASONS if sentences[verdict]]
    reasons: list[str] = []
    for verdict in verdicts:
        shown = list(sentences[verdict][:MOST_SHOWN])
        n_more = len(sentences[verdict]) - MOST_SHOWN
        if n_more > 0:
            shown.append(f"{n_more} more")
        reasons.append(REASONS[verdict].format("; ".join(shown)))
    verdict = verdicts[0]
    parts_alone = [part for part in claim["parts"] if part in ONE_BY_ONE]
    runs = evidence.of(*parts_alone).record
    n_disturbed = disturbances.n_disturbed(runs)
    if is_unreliable(len(runs), n_disturbed) and verdict in (HOLDS, HOLDS_NOT):
        verdict = UNSURE
        reasons.insert(
            0, f"{n_disturbed} of {len(runs)} runs were disturbed, so this is not sure."
        )
    return verdict, " ".join(reasons)


def missing(claim: Claim, evidence: Evidence) -> str:
    """What a claim needs and the session does not have; "" if it has all."""
    for part in claim["parts"]:
        if part == CEILINGS:
            try:
                evidence.need_ceilings()
            except LabError as problem:
                return f"{problem.what} {problem.hint}"
        elif evidence.of(part).empty:
            error = failures(evidence.records).get(part)
            if error:
                return f"The measurement `{part}` failed: {error}"
            return f"The session has no measurement `{part}`."
    return ""
