"""Judges a claim by its conditions: figures of a session, whose thresholds were fixed before the measurement.

A condition holds if the whole interval of each of its figures lies within the thresholds, fails if an interval lies
outside, and cannot be told if an interval contains a threshold. A claim holds if all of its conditions hold, and fails
if one fails. The printed criterion is made from the conditions, so both always agree.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.core import stats
from lab.core.lists import grouped, join_and, plural
from lab.core.record import Ceilings, Record
from lab.errors import LabError
from lab.features.compare import comparison
from lab.features.limits import probing, step_kernels
from lab.show import disturbances
from lab.show.wording import digits

HOLDS, HOLDS_NOT = "holds here", "does not hold here"
UNSURE, UNTESTABLE = "cannot be told", "not testable here"

CEILINGS = "ceilings"
"""Among the parts of a claim: its figures need the machine's ceilings."""

ONE_BY_ONE = ("lengths", "context")
"""Parts whose runs are compared with nothing beside them, so that a disturbance counts fully."""

ASSUMED = math.exp(2 * math.sqrt(2) * comparison.VIRTUAL)
"""The factor by which the range of one or two values is widened: two sessions of a virtual machine rarely exceed it."""

MOST_SHOWN = 3
"""The most figures in a cell or a sentence."""


@dataclass(frozen=True)
class Figure:
    """A value with its interval; `n` is the number of values behind it."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    n: int

    @property
    def words(self) -> str:
        """`share: 64.2 % (61.0-67.0)`."""
        unit = self.unit if self.unit in ("", "x") else f" {self.unit}"
        if self.high == math.inf:
            return f"{self.name}: at least {digits(self.low)}{unit}"
        interval = f" ({digits(self.low)}-{digits(self.high)})" if self.low != self.high else ""
        return f"{self.name}: {digits(self.value)}{unit}{interval}"


@dataclass(frozen=True)
class Evidence:
    """The records of one session of claims, and the ceilings of its machine, if they are known."""

    records: Sequence[Record]
    ceilings: Ceilings | None = None

    def of(self, *parts: str) -> list[Record]:
        """The timed runs of parts."""
        return [record for record in self.records if record.run.part in parts and record.run.is_timed]

    @property
    def best(self) -> Ceilings:
        """The ceilings, for claims that need them."""
        assert self.ceilings is not None
        return self.ceilings

    def lacks(self, part: str) -> str:
        """Why a part cannot be judged; "" if it can."""
        if part == CEILINGS:
            rates = self.ceilings.rates if self.ceilings else ()
            is_read = any(rate.n_tokens == 1 and rate.op in step_kernels.READERS for rate in rates)
            return "" if is_read else "The ceilings of this machine are not measured. Run: lab ceilings"
        if self.of(part):
            return ""
        error = failures(self.records).get(part)
        return f"The measurement `{part}` failed: {error}" if error else f"The session has no measurement `{part}`."


@dataclass(frozen=True)
class Condition:
    """Figures, made by a function with some words, and their thresholds. `what` names them in the criterion."""

    figures: Callable[..., Iterable[Figure | None]] = field(repr=False)
    given: tuple[str, ...]
    what: str
    least: float = -math.inf
    most: float = math.inf
    unit: str = ""

    @property
    def bounds(self) -> str:
        """The thresholds in words."""
        least, most, unit = f"{self.least:,.4g}", f"{self.most:,.4g}", f" {self.unit}" if self.unit else ""
        if self.most == math.inf:
            return f"at least {least}{unit}"
        return f"at most {most}{unit}" if self.least == -math.inf else f"between {least} and {most}{unit}"


@dataclass(frozen=True)
class Claim:
    """A claim, who claims it (if known), the parts of a session that it needs, and its conditions."""

    number: int
    words: str
    parts: tuple[str, ...]
    conditions: tuple[Condition, ...]
    note: str = ""
    source: str = ""

    @property
    def criterion(self) -> str:
        """The conditions in words."""
        return " ".join([*(f"{one.what} is {one.bounds}." for one in self.conditions), *filter(None, [self.note])])


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, the reasons in sentences, and each figure with its condition."""

    claim: Claim
    verdict: str
    words: str
    figures: tuple[tuple[Figure, Condition], ...] = ()


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a session of claims, with its records."""

    session: str
    judged: tuple[Judged, ...]
    records: tuple[Record, ...] = field(repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each claim, as the JSON of `lab claims` has it."""
        return [
            {
                "session": self.session,
                "number": one.claim.number,
                "claim": one.claim.words,
                "source": one.claim.source,
                "verdict": one.verdict,
                "criterion": one.claim.criterion,
                "words": one.words,
                "figures": [
                    {key: None if value == math.inf else value for key, value in dataclasses.asdict(figure).items()}
                    for figure, _ in one.figures
                ],
                "parts": list(one.claim.parts),
            }
            for one in self.judged
        ]

    @property
    def summary(self) -> str:
        """The number of claims with each verdict, in a sentence."""
        verdicts = [one.verdict for one in self.judged]
        counts = [f"{verdicts.count(one)} {one}" for one in (HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE) if one in verdicts]
        return f"{plural(len(verdicts), 'claim')}: {join_and(counts) or 'none is left'}."


def of_sessions(claims: Sequence[Claim], records: Iterable[Record], known: Sequence[Ceilings]) -> Iterator[Verdicts]:
    """The verdicts of each session of claims among the records; claims that lack a part are left out."""
    for session, own in grouped((one for one in records if one.run.part), lambda one: one.session).items():
        evidence = Evidence(own, probing.known(known, probing.place_of_record(own[0])))
        tried = {CEILINGS, *(record.run.part for record in own)}
        judged = tuple(judge(one, evidence) for one in claims if tried.issuperset(one.parts))
        yield Verdicts(session, judged, tuple(own))


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """The verdict on a claim."""
    if reason := next(filter(None, map(evidence.lacks, claim.parts)), ""):
        return Judged(claim, UNTESTABLE, reason)
    groups: dict[str, list[str]] = {HOLDS_NOT: [], UNTESTABLE: [], UNSURE: [], HOLDS: []}
    figures = list[tuple[Figure, Condition]]()
    for condition in claim.conditions:
        try:
            found = [one for one in condition.figures(evidence, *condition.given) if one is not None]
        except LabError as problem:  # a kernel that was not probed, a model that cannot be counted
            return Judged(claim, UNTESTABLE, f"{problem.what} {problem.hint}".strip())
        if not found:
            groups[UNTESTABLE].append(f"{condition.what[:1].lower()}{condition.what[1:]}")
        for one in found:
            is_within = condition.least <= one.low and one.high <= condition.most
            is_outside = one.high < condition.least or one.low > condition.most
            few = f", interval assumed for {plural(one.n, 'value')}" if one.n < 3 else ""
            shown = f"{one.words}{few}, must be {condition.bounds}"
            groups[HOLDS if is_within else HOLDS_NOT if is_outside else UNSURE].append(shown)
            figures.append((one, condition))
    verdict = next(name for name, known in groups.items() if known)
    begins = {HOLDS_NOT: "Fails", UNTESTABLE: "Not measured", UNSURE: "Cannot be told", HOLDS: "Holds"}
    reasons = []
    for name, known in groups.items():
        more = [f"{len(known) - MOST_SHOWN} more"] if len(known) > MOST_SHOWN else []
        reasons += [f"{begins[name]}: {'; '.join([*known[:MOST_SHOWN], *more])}."] if known else []
    words = " ".join(reasons)
    runs = evidence.of(*(part for part in claim.parts if part in ONE_BY_ONE))
    n_disturbed = sum(bool(disturbances.disturbances(record)) for record in runs)
    if 2 * n_disturbed >= len(runs) > 0 and verdict in (HOLDS, HOLDS_NOT):
        verdict, words = UNSURE, f"{n_disturbed} of {len(runs)} runs were disturbed, so this is not sure. {words}"
    return Judged(claim, verdict, words, tuple(figures))


def failures(records: Iterable[Record]) -> dict[str, str]:
    """Parts without a successful run, with the error of the first run."""
    runs = [record.run for record in records]
    good = {run.part for run in runs if run.is_timed}
    return {run.part: run.error for run in reversed(runs) if run.error and run.part and run.part not in good}


def figure(name: str, values: Iterable[float | None], unit: str = "x", scale: float = 1.0) -> Figure | None:
    """The centre of positive values, one for each engine, walk or block, with its 95 % interval; None for no values.

    6 and more: the median with its order-statistics interval. 3 to 5: the geometric mean with Student's t interval on
    logarithms. One or two: their range, widened by the factor ASSUMED. If one is infinite: from the least one upwards.
    """
    known = sorted(scale * value for value in values if value is not None and value > 0)
    if not known:
        return None
    if known[-1] == math.inf:
        return Figure(name, math.inf, known[0], math.inf, unit, len(known))
    interval, centre = stats.median_interval(known), statistics.median(known)
    if interval is None:
        interval, centre = stats.log_interval(known), statistics.geometric_mean(known)
    ends = (interval.low, interval.high) if interval else (known[0] / ASSUMED, known[-1] * ASSUMED)
    return Figure(name, centre, *ends, unit, len(known))
