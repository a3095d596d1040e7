"""Judges claims (claims.toml) by their conditions: figures of a session, whose thresholds were fixed before it.

A condition holds if the whole interval of each of its figures lies within the thresholds, fails if an interval lies
outside, and cannot be told if an interval contains a threshold. A claim holds if all of its conditions hold, and fails
if one fails. The printed criterion is made from the conditions, so both always agree.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped, join_and, plural
from lab.core.record import Ceilings, Record
from lab.errors import LabError
from lab.features.claims import figures as functions
from lab.features.claims.figures import Evidence
from lab.roofline import probing, step_kernels
from lab.runner import disturbances
from lab.show import canvas, text_results
from lab.show.canvas import COLOURS, GUIDE
from lab.show.section import Cell, Columns, Context, Kind, Picture, Section, tabled
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOLDS = "holds here"
HOLDS_NOT = "does not hold here"
UNSURE = "cannot be told"
UNTESTABLE = "not testable here"
STYLES = {HOLDS: "holds", HOLDS_NOT: "fails", UNSURE: "unsure", UNTESTABLE: "quiet"}
"""Classes of the page's style sheet."""

REASONS = {HOLDS_NOT: "Fails", UNTESTABLE: "Not measured", UNSURE: "Cannot be told", HOLDS: "Holds"}
"""How the figures of each verdict are introduced. The first verdict that a figure has is that of the claim."""

CEILINGS = "ceilings"  # among the parts of a claim: its figures need the machine's ceilings
ONE_BY_ONE = ("lengths", "context")
"""Parts whose runs are compared with nothing beside them, so that a disturbance counts fully."""

MOST_SHOWN = 3
MOST_RATIO = 100.0
"""The most figures in a cell; the picture ends at this multiple of a threshold, and at its inverse."""

Claim = dict[str, Any]
"""A claim of claims.toml: `number`, `words`, `parts`, `conditions`, and `note` and `source` where there are any."""

CLAIMS: tuple[Claim, ...] = tuple(
    {"number": int(number), **claim}
    for number, claim in tomllib.loads(
        Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")
    ).items()
)


PARTS = frozenset(part for claim in CLAIMS for part in claim["parts"])
"""The parts of a session of claims, which its runs name."""


def bounds(condition: Mapping[str, Any]) -> str:
    """The thresholds of a condition in words."""
    least, most = (
        f"{condition[end]:,.4g}" if end in condition else "" for end in ("least", "most")
    )
    words = (
        f"between {least} and {most}"
        if least and most
        else f"at least {least}"
        if least
        else f"at most {most}"
    )
    return f"{words} {condition.get('unit', '')}".rstrip()


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a session of claims: a row for each claim (as `judge` returns it), and the session's records."""

    session: str
    rows: list[dict[str, Any]]
    records: tuple[Record, ...] = field(repr=False)

    @property
    def summary(self) -> str:
        """The number of claims with each verdict, in a sentence."""
        verdicts = [row["verdict"] for row in self.rows]
        counts = [f"{verdicts.count(one)} {one}" for one in STYLES if one in verdicts]
        return f"{plural(len(verdicts), 'claim')}: {join_and(counts) or 'none is left'}."


def of_sessions(
    claims: Sequence[Claim], records: Iterable[Record], known: Sequence[Ceilings]
) -> Iterator[Verdicts]:
    """The verdicts of each session of claims among the records; claims that lack a part are left out."""
    for session, own in grouped(
        (one for one in records if one.run.part), lambda one: one.session
    ).items():
        evidence = Evidence(own, probing.known(known, probing.place_of_record(own[0])))
        tried = {CEILINGS, *(record.run.part for record in own)}
        judged = [judge(one, evidence) for one in claims if tried.issuperset(one["parts"])]
        yield Verdicts(session, [{"session": session, **row} for row in judged], tuple(own))


def failures(records: Iterable[Record]) -> dict[str, str]:
    """Parts without a successful run, with the error of the first run."""
    runs = [record.run for record in records]
    good = {run.part for run in runs if run.is_timed}
    return {
        run.part: run.error
        for run in reversed(runs)
        if run.error and run.part and run.part not in good
    }


def judge(claim: Claim, evidence: Evidence) -> dict[str, Any]:
    """The row of a claim: words, criterion, parts, verdict, reasons, and its figures with intervals and thresholds."""
    criterion = [f"{one['what']} is {bounds(one)}." for one in claim["conditions"]]
    row = {"number": claim["number"], "claim": claim["words"], "source": claim.get("source", "")}
    row |= {"verdict": UNTESTABLE, "words": _missing(claim, evidence)}
    row |= {
        "criterion": " ".join([*criterion, *filter(None, [claim.get("note")])]),
        "parts": claim["parts"],
    }
    figures = list[dict[str, Any]]()
    shown = {verdict: list[str]() for verdict in REASONS}
    row["figures"] = figures
    if row["words"]:
        return row
    for condition in claim["conditions"]:
        name, *words = condition["figures"]
        try:
            found = [one for one in getattr(functions, name)(evidence, *words) if one is not None]
        except LabError as problem:  # a kernel that was not probed, a model that cannot be counted
            figures.clear()
            return row | {"words": f"{problem.what} {problem.hint}".strip()}
        if not found:
            shown[UNTESTABLE].append(f"{condition['what'][:1].lower()}{condition['what'][1:]}")
        least = condition.get("least", -math.inf)
        most = condition.get("most", math.inf)
        for one in found:
            low = one["low"]
            high = math.inf if one["high"] is None else one["high"]
            verdict = (
                HOLDS
                if least <= low and high <= most
                else HOLDS_NOT
                if high < least or low > most
                else UNSURE
            )
            unit = one["unit"] if one["unit"] == "x" else f" {one['unit']}"
            value = f"at least {digits(low)}{unit}"
            if one["value"] is not None:
                value = f"{digits(one['value'])}{unit}{f' ({digits(low)}-{digits(high)})' if low != high else ''}"
            few = f", interval assumed for {plural(one['n'], 'value')}" if one["n"] < 3 else ""
            shown[verdict].append(f"{one['name']}: {value}{few}, must be {bounds(condition)}")
            figures.append(
                one | {end: condition.get(end) for end in ("least", "most")} | {"verdict": verdict}
            )
    verdict = next(name for name, own in shown.items() if own)
    reasons = []
    for name, own in shown.items():
        more = [f"{len(own) - MOST_SHOWN} more"] if len(own) > MOST_SHOWN else []
        reasons += [f"{REASONS[name]}: {'; '.join([*own[:MOST_SHOWN], *more])}."] if own else []
    runs = evidence.of(*(part for part in claim["parts"] if part in ONE_BY_ONE)).record
    n_disturbed = sum(bool(disturbances.disturbances(record)) for record in runs)
    if 2 * n_disturbed >= len(runs) > 0 and verdict in (HOLDS, HOLDS_NOT):
        verdict = UNSURE
        reasons.insert(0, f"{n_disturbed} of {len(runs)} runs were disturbed, so this is not sure.")
    return row | {"verdict": verdict, "words": " ".join(reasons)}


def _missing(claim: Claim, evidence: Evidence) -> str:
    """What a claim needs and the session does not have; "" if it has all."""
    for part in claim["parts"]:
        rates = evidence.ceilings.rates if evidence.ceilings else ()
        if part == CEILINGS and not any(
            rate.n_tokens == 1 and rate.op in step_kernels.READERS for rate in rates
        ):
            return "The ceilings of this machine are not measured. Run: lab ceilings"
        if part != CEILINGS and evidence.of(part).empty:
            error = failures(evidence.records).get(part)
            return (
                f"The measurement `{part}` failed: {error}"
                if error
                else f"The session has no measurement `{part}`."
            )
    return ""


def sections(sessions: Iterable[Verdicts], context: Context) -> list[Section]:
    """A table of all verdicts for each session, its picture and, on a page or with details, the criteria."""
    made = []
    for i, verdicts in enumerate(sessions, 1):
        rows = verdicts.rows
        failed = failures(verdicts.records)
        parts = list[Section]()
        rest = [record for record in verdicts.records if record.run.part not in failed]
        errors = [
            *(f"{part}: {error}" for part, error in failed.items()),
            *text_results.failures(rest),
        ]
        sources = [f" Claimed by {row['source']}." * bool(row["source"]) for row in rows]
        criteria = {
            str(row["number"]): row["criterion"] + own
            for row, own in zip(rows, sources, strict=True)
        }
        if context.details or context.is_page:
            parts = [Section("The criteria, fixed before the measurement", facts=criteria)]
        n_figures = sum(len(row["figures"]) for row in rows)
        caption = "Each figure over its threshold, with its interval. It holds on the side to which its triangle points."
        picture = Picture("claims", caption, partial(_draw, rows), (10.0, 1.8 + 0.2 * n_figures))
        made.append(
            Section(
                "Claims and verdicts",
                f"session {verdicts.session}",
                name=f"claims-{i}",
                question="Do the textbooks' claims hold on this machine?",
                words=[verdicts.summary],
                **tabled(COLUMNS, rows, keep_all=True),
                warnings=[
                    *text_results.warnings(verdicts.records),
                    *(f"failed: {line}" for line in errors),
                ],
                pictures=[picture] if n_figures else [],
                parts=parts,
                data=partial(dict, rows=rows),
            )
        )
    return made


COLUMNS: Columns = (
    ("", lambda row: str(row["number"])),
    ("claim", lambda row: row["claim"]),
    ("verdict", lambda row: Cell(row["verdict"], style=STYLES[row["verdict"]])),
    ("figures", lambda row: row["words"]),
)


def _draw(rows: Sequence[Mapping[str, Any]], canvas_figure: Figure) -> None:
    """A line for each figure and threshold: the interval of their ratio, in the colour of the verdict."""
    colours = {HOLDS: COLOURS[2], HOLDS_NOT: COLOURS[1], UNSURE: COLOURS[4]}
    known = [(row, one) for row in rows for one in row["figures"]]
    ax = canvas_figure.subplots()
    for at, (_, one) in enumerate(known):
        for end, mark, apart in (("least", ">", -0.15), ("most", "<", 0.15)):
            if one[end] is not None:
                ends = [
                    math.inf if one[name] is None else one[name] / one[end]
                    for name in ("low", "value", "high")
                ]
                low, value, high = (min(MOST_RATIO, max(1 / MOST_RATIO, ratio)) for ratio in ends)
                y = at if None in (one["least"], one["most"]) else at + apart
                ax.plot([low, high], [y, y], color=colours[one["verdict"]], lw=2)
                ax.plot(value, y, mark, color=colours[one["verdict"]], ms=6)
    for label, colour in colours.items():
        ax.plot([], [], color=colour, lw=2, label=label)
    ax.axvline(1, color=GUIDE, lw=1.2)
    ax.set(xscale="log", xlabel="figure over threshold")
    ax.set_yticks(
        range(len(known)), [f"{row['number']}  {one['name']}" for row, one in known], fontsize=7
    )
    ax.invert_yaxis()
    canvas.finish([ax], "Textbook claims: each figure over its threshold", is_apart=True)


KINDS = (
    Kind(
        "claims",
        lambda one: isinstance(one, Record) and one.run.part in PARTS,
        lambda records, context: sections(of_sessions(CLAIMS, records, context.ceilings), context),
    ),
)
