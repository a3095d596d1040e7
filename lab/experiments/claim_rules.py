"""What judges of claims share: figures with their intervals, conditions in three values, and reasons for no verdict.

A condition holds where the whole interval of its figure lies on one side of a threshold, fails where it lies on the
other, and cannot be told where the threshold lies within. A claim holds where all of its conditions do, and fails where
one does. How an interval is made depends on how often was measured: see `figure`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lab.analysis import disturbances, spread
from lab.analysis.wording import digits
from lab.core import stats
from lab.core.record import OK, Ceilings, Record, Run
from lab.errors import LabError
from lab.experiments import cases
from lab.experiments.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Claim, Evidence, Figure, Judgement
from lab.experiments.claim_parts import CEILINGS, PARTS
from lab.why import roofline
from lab.why.roofline import Roof

ASSUMED = math.exp(2 * math.sqrt(2) * spread.VIRTUAL)
"""The factor either way that is assumed of one or two runs: what two sessions of a virtual machine rarely exceed."""

MOST_SHOWN = 4
"""Conditions of one kind that a sentence lists; of more it says how many there are."""

CUTS_THE_CACHE = ("prefix", "stall", "speculation")
"""Parts that copy or cut the cache."""

Judge = Callable[[Evidence], Judgement]
Value = Callable[[Run], float | None]


@dataclass(frozen=True)
class Condition:
    """A part of a criterion. `holds` is None where it cannot be told; `is_missing`: since nothing was measured."""

    words: str
    holds: bool | None
    is_missing: bool = False


def claim(
    number: int,
    words: str,
    criterion: str,
    parts: tuple[str, ...],
    judge: Judge,
    *,
    also: tuple[str, ...] = (),
    ignores_disturbances: bool = False,
    source: str = "",
) -> Claim:
    """A claim whose judge is asked only where its parts are there, of which CEILINGS may be one.

    `also` names parts that tell more, but are not needed.
    Where half of its runs were disturbed, or more, the verdict is open, unless it `ignores_disturbances`: because it is
    computed, or compares what was measured side by side.
    """

    def judged(evidence: Evidence) -> Judgement:
        reasons = [reason for part in parts if (reason := lacking(evidence, part))]
        if reasons:
            return Judgement(UNTESTABLE, reasons[0])
        try:
            judgement = judge(evidence)
        except LabError as problem:  # a kernel that was not probed, a catalog that was edited
            return Judgement(UNTESTABLE, " ".join(filter(None, (problem.what, problem.hint))))
        runs = [record for part in parts for record in evidence.of(part)]
        n_disturbed = sum(bool(disturbances.disturbances(record)) for record in runs)
        if (
            ignores_disturbances
            or 2 * n_disturbed < len(runs)
            or not runs
            or judgement.verdict not in (HOLDS, HOLDS_NOT)
        ):
            return judgement
        doubt = f"{n_disturbed} of {len(runs)} runs were disturbed, so this is not sure. "
        return Judgement(UNSURE, doubt + judgement.words, judgement.figures)

    return Claim(number, words, criterion, (*parts, *also), judged, source)


def figure(name: str, values: Sequence[float | None], unit: str = "", scale: float = 1.0) -> Figure | None:
    """The centre of positive values, one a run or block, with its 95 % interval; None for no values.

    6 and more: the median, and the interval that their order gives. 3 to 5: the geometric mean, and that of Student's t
    on logarithms. One or two: their range, a factor ASSUMED wider at both ends.
    """
    known = [value for value in values if value is not None and 0 < value < math.inf]
    if not known:
        return None
    interval, centre = stats.median_interval(known), statistics.median(known)
    if interval is None:
        interval, centre = stats.log_interval(known), statistics.geometric_mean(known)
    ends = (interval.low, interval.high) if interval else (min(known) / ASSUMED, max(known) * ASSUMED)
    return Figure(name, scale * centre, unit, scale * ends[0], scale * ends[1], len(known))


def compared(name: str, base: Sequence[Record], other: Sequence[Record], value: Value, unit: str = "") -> Figure | None:
    """How many times that of `base` the value of `other` is, block by block; None without a common block."""
    both = by_block(base, value), by_block(other, value)
    return figure(name, [both[1][block] / both[0][block] for block in both[0] if block in both[1]], unit or "times")


def by_block(records: Sequence[Record], value: Value) -> dict[int, float]:
    """The value of each block, or repeat: of several runs the geometric mean. Runs without a value are left out."""
    blocks: dict[int, list[float]] = {}
    for record in records:
        taken = value(record.run)
        if taken is not None and taken > 0:
            block = record.run.repeat if record.run.block is None else record.run.block
            blocks.setdefault(block, []).append(taken)
    return {block: statistics.geometric_mean(values) for block, values in blocks.items()}


def by_length(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Runs by the length of their prompt, in ascending order."""
    lengths: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.run.n_prompt):
        lengths.setdefault(record.run.n_prompt, []).append(record)
    return lengths


def nearest(lengths: Mapping[int, object], wanted: int, within: float = 0.15) -> int | None:
    """The length that is nearest to the wanted one; None where none is as near as the share `within`."""
    close = [length for length in lengths if abs(length - wanted) <= within * wanted]
    return min(close, key=lambda length: abs(length - wanted), default=None)


def at_least(words: str, known: Figure | None, threshold: float) -> Condition:
    """That a figure is so large."""
    return _condition(words, known, threshold, math.inf)


def at_most(words: str, known: Figure | None, threshold: float) -> Condition:
    """That a figure is no larger."""
    return _condition(words, known, -math.inf, threshold)


def between(words: str, known: Figure | None, least: float, most: float) -> Condition:
    """That a figure lies within two thresholds."""
    return _condition(words, known, least, most)


def _condition(words: str, known: Figure | None, least: float, most: float) -> Condition:
    if known is None:
        return Condition(words, None, is_missing=True)
    low = known.value if known.low is None else known.low
    high = known.value if known.high is None else known.high
    holds = True if least <= low and high <= most else False if high < least or low > most else None
    return Condition(f"{words} ({shown(known)})", holds)


def decided(conditions: Sequence[Condition], figures: Sequence[Figure | None], *remarks: str) -> Judgement:
    """The verdict of all conditions together, and which of them held, did not, or could not be told."""
    kept = tuple(known for known in figures if known is not None)
    if any(condition.holds is False for condition in conditions):
        verdict = HOLDS_NOT
    elif not conditions or any(condition.is_missing for condition in conditions):
        verdict = UNTESTABLE
    else:
        verdict = UNSURE if any(condition.holds is None for condition in conditions) else HOLDS
    groups = {
        "No: ": [condition.words for condition in conditions if condition.holds is False],
        "Cannot be told: ": [one.words for one in conditions if one.holds is None and not one.is_missing],
        "Not measured: ": [condition.words for condition in conditions if condition.is_missing],
        "Yes: ": [condition.words for condition in conditions if condition.holds],
    }
    sentences = [f"{begin}{_listed(parts)}." for begin, parts in groups.items() if parts]
    words = [*(sentences or ["Nothing of it was measured."]), *filter(None, remarks)]
    return Judgement(verdict, " ".join(words), kept)


def shown(known: Figure) -> str:
    """A figure with its unit and interval."""
    unit = known.unit if known.unit in ("", "%") else f" {known.unit}"
    text = f"{digits(known.value)}{' %' if unit == '%' else unit}"
    if known.low is None or known.high is None:
        return text
    few = f", assumed of {known.n} run{'s' * (known.n > 1)}" if known.n in (1, 2) and known.n else ""
    return f"{text}, {digits(known.low)} to {digits(known.high)}{few}"


def lacking(evidence: Evidence, part: str) -> str:
    """Why nothing can be said from a part of the session; "" where it has runs that went well."""
    if part == CEILINGS:
        return _without_ceilings(evidence)
    if evidence.of(part):
        return ""
    failed = [record for record in evidence.records if record.run.part == part and record.run.status != OK]
    if failed:
        return f"All runs of the measurement `{part}` failed: {failed[0].run.error or failed[0].run.status}"
    if evidence.is_quick and part in PARTS and PARTS[part].quick_s is None:
        return f"--quick leaves the measurement `{part}` out."
    some = evidence.records[0] if evidence.records else None
    if some and part == "threads" and some.settings.n_threads < 2:
        return "There is one thread, which cannot be halved. On several cores: --threads 2"
    if some and part == "speculation" and some.model.source == "synthetic":
        return "A model with random weights guesses nothing right, so there is no speed-up to measure."
    if some and part in CUTS_THE_CACHE:
        try:
            cases.need_every_position(some.model)
        except LabError as problem:
            return problem.what
    return f"The measurement `{part}` was not made in this session."


def roof(best: Ceilings | None) -> Roof | None:
    """The machine's best; None without ceilings, and where these have no reading of weights or memory."""
    reads = best is not None and any(rate.n_tokens == 1 and rate.op in roofline.READERS for rate in best.rates)
    return roofline.roof(best) if best is not None and reads else None


def _without_ceilings(evidence: Evidence) -> str:
    """Why the ceilings of this machine are not at hand; "" where they are."""
    best = evidence.ceilings
    if best is None or roof(best) is None:
        return "The ceilings of this machine are not known. Measure them: lab ceilings"
    if any((record.settings.n_gpu_layers != 0) != best.on_gpu for record in evidence.records):
        return "The ceilings that are known are those of another device (CPU or GPU) than the runs used."
    return ""


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - MOST_SHOWN
    return "; ".join([*parts[:MOST_SHOWN], *([f"{more} more"] if more > 0 else [])])
