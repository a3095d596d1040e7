"""Judges claims (claims.toml) by their conditions: figures of a session, whose thresholds were fixed before it.

A condition holds if the whole interval of each of its figures lies within the thresholds, fails if an interval lies
outside, and cannot be told if an interval contains a threshold. A claim holds if all of its conditions hold, and fails
if one fails. The printed criterion is made from the conditions, so both always agree.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped, join_and, plural
from lab.core.record import QUANT, Ceilings, Record
from lab.errors import LabError
from lab.features import known
from lab.features.claims import figures as functions
from lab.features.claims.figures import Evidence, Figure
from lab.features.limits import probing, step_kernels
from lab.features.measure import text_results
from lab.runner import as_options
from lab.show import canvas, disturbances
from lab.show.canvas import COLOURS, GUIDE
from lab.show.section import Cell, Context, Kind, Picture, Section
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

HOLDS, HOLDS_NOT = "holds here", "does not hold here"
UNSURE, UNTESTABLE = "cannot be told", "not testable here"
STYLES = {HOLDS: "holds", HOLDS_NOT: "fails", UNSURE: "unsure", UNTESTABLE: "quiet"}
"""Classes of the page's style sheet."""

REASONS = {HOLDS_NOT: "Fails", UNTESTABLE: "Not measured", UNSURE: "Cannot be told", HOLDS: "Holds"}
"""How the figures of each verdict are introduced; the first verdict that a figure has is that of the claim."""

CEILINGS = "ceilings"
"""Among the parts of a claim: its figures need the machine's ceilings."""

ONE_BY_ONE = ("lengths", "context")
"""Parts whose runs are compared with nothing beside them, so that a disturbance counts fully."""

MOST_SHOWN, MOST_RATIO = 3, 100.0
"""The most figures in a cell; the picture ends at this multiple of a threshold, and at its inverse."""

CAPTION = "Each figure over its threshold, with its interval. It holds on the side to which its triangle points."


@dataclass(frozen=True)
class Condition:
    """Figures (a function of figures.py and words for it) with thresholds. `what` names them in the criterion."""

    figures: str
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


TEXTS = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
CLAIMS = tuple(
    Claim(int(number), **{**text, "conditions": tuple(Condition(**one) for one in text["conditions"])})
    for number, text in TEXTS.items()
)
"""All claims."""


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

        def as_row(figure: Figure) -> dict[str, Any]:
            return {key: None if value == math.inf else value for key, value in dataclasses.asdict(figure).items()}

        return [
            {
                "session": self.session,
                "number": one.claim.number,
                "claim": one.claim.words,
                "source": one.claim.source,
                "verdict": one.verdict,
                "criterion": one.claim.criterion,
                "words": one.words,
                "figures": [as_row(figure) for figure, _ in one.figures],
                "parts": list(one.claim.parts),
            }
            for one in self.judged
        ]

    @property
    def summary(self) -> str:
        """The number of claims with each verdict, in a sentence."""
        verdicts = [one.verdict for one in self.judged]
        counts = [f"{verdicts.count(one)} {one}" for one in STYLES if one in verdicts]
        return f"{plural(len(verdicts), 'claim')}: {join_and(counts) or 'none is left'}."


def of_sessions(claims: Sequence[Claim], records: Iterable[Record], known: Sequence[Ceilings]) -> Iterator[Verdicts]:
    """The verdicts of each session of claims among the records; claims that lack a part are left out."""
    for session, own in grouped((one for one in records if one.run.part), lambda one: one.session).items():
        evidence = Evidence(own, probing.known(known, probing.place_of_record(own[0])))
        tried = {CEILINGS, *(record.run.part for record in own)}
        judged = tuple(judge(one, evidence) for one in claims if tried.issuperset(one.parts))
        yield Verdicts(session, judged, tuple(own))


def failures(records: Iterable[Record]) -> dict[str, str]:
    """Parts without a successful run, with the error of the first run."""
    runs = [record.run for record in records]
    good = {run.part for run in runs if run.is_timed}
    return {run.part: run.error for run in reversed(runs) if run.error and run.part and run.part not in good}


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """The verdict on a claim."""
    for part in claim.parts:
        rates = evidence.ceilings.rates if evidence.ceilings else ()
        if part == CEILINGS and not any(rate.n_tokens == 1 and rate.op in step_kernels.READERS for rate in rates):
            return Judged(claim, UNTESTABLE, "The ceilings of this machine are not measured. Run: lab ceilings")
        if part != CEILINGS and evidence.of(part).empty:
            error = failures(evidence.records).get(part)
            failed = f"The measurement `{part}` failed: {error}"
            return Judged(claim, UNTESTABLE, failed if error else f"The session has no measurement `{part}`.")
    shown: dict[str, list[str]] = {verdict: [] for verdict in REASONS}
    figures = list[tuple[Figure, Condition]]()
    for condition in claim.conditions:
        name, *words = condition.figures.split()
        try:
            found = [one for one in getattr(functions, name)(evidence, *words) if one is not None]
        except LabError as problem:  # a kernel that was not probed, a model that cannot be counted
            return Judged(claim, UNTESTABLE, f"{problem.what} {problem.hint}".strip())
        if not found:
            shown[UNTESTABLE].append(f"{condition.what[:1].lower()}{condition.what[1:]}")
        for one in found:
            unit = one.unit if one.unit in ("", "x") else f" {one.unit}"
            interval = f" ({digits(one.low)}-{digits(one.high)})" if one.low != one.high else ""
            few = f", interval assumed for {plural(one.n, 'value')}" if one.n < 3 else ""
            is_within = condition.least <= one.low and one.high <= condition.most
            is_outside = one.high < condition.least or one.low > condition.most
            verdict = HOLDS if is_within else HOLDS_NOT if is_outside else UNSURE
            known = (
                f"{digits(one.value)}{unit}{interval}" if one.high < math.inf else f"at least {digits(one.low)}{unit}"
            )
            shown[verdict].append(f"{one.name}: {known}{few}, must be {condition.bounds}")
            figures.append((one, condition))
    verdict = next(name for name, own in shown.items() if own)
    reasons = []
    for name, own in shown.items():
        more = [f"{len(own) - MOST_SHOWN} more"] if len(own) > MOST_SHOWN else []
        reasons += [f"{REASONS[name]}: {'; '.join([*own[:MOST_SHOWN], *more])}."] if own else []
    runs = evidence.of(*(part for part in claim.parts if part in ONE_BY_ONE)).record
    n_disturbed = sum(bool(disturbances.disturbances(record)) for record in runs)
    if 2 * n_disturbed >= len(runs) > 0 and verdict in (HOLDS, HOLDS_NOT):
        verdict = UNSURE
        reasons.insert(0, f"{n_disturbed} of {len(runs)} runs were disturbed, so this is not sure.")
    return Judged(claim, verdict, " ".join(reasons), tuple(figures))


def sections(sessions: Iterable[Verdicts], context: Context) -> list[Section]:
    """A table of all verdicts for each session, its picture and, on a page or with details, the criteria."""
    made, is_whole = [], context.details or context.is_page
    for i, verdicts in enumerate(sessions, 1):
        judged, failed = verdicts.judged, failures(verdicts.records)
        rest = [record for record in verdicts.records if record.run.part not in failed]
        errors = [*(f"{part}: {error}" for part, error in failed.items()), *text_results.failures(rest)]
        figures = [(one.claim.number, *pair) for one in judged for pair in one.figures]
        criteria = {
            str(claim.number): claim.criterion + (f" Claimed by {claim.source}." if claim.source else "")
            for claim in (one.claim for one in judged)
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
                warnings=[*known.warnings(verdicts.records), *(f"failed: {line}" for line in errors)],
                words=() if context.is_page else [verdicts.summary],
                sentences=[verdicts.summary] if context.is_page else (),
                pictures=[Picture("claims", CAPTION, partial(_draw, figures), size)] if figures else [],
                parts=[Section("The criteria, fixed before the measurement", facts=criteria)] if is_whole else [],
                data=partial(dict, rows=verdicts.rows),
            )
        )
    return made


def _draw(known: Sequence[tuple[int, Figure, Condition]], canvas_figure: Canvas) -> None:
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
    ax.set_yticks(range(len(known)), [f"{number}  {figure.name}" for number, figure, _ in known], fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("figure over threshold")
    canvas.finish([ax], "Textbook claims: each figure over its threshold", is_apart=True)


def again(records: Sequence[Record]) -> str:
    """The command of a session of claims: with the settings of the parts that change none."""
    timed = as_options.timed(records)
    usual = [record for record in timed if record.run.block is None and record.run.lever is None] or timed
    tried = {CEILINGS, *(record.run.part for record in timed)}
    tested = [claim.number for claim in CLAIMS if tried.issuperset(claim.parts)]
    only = None if len(tested) == len(CLAIMS) else tested
    return as_options.line("claims", {"only": only}, (), as_options.shared(usual))


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """The verdicts of each session of claims, judged again."""
    return sections(of_sessions(CLAIMS, records, context.ceilings), context)


KINDS = (Kind("claims", lambda one: isinstance(one, Record) and one.run.part not in (None, QUANT), chapters, again),)
