"""A textbook claim as data: its words, the measurements that it needs, and the conditions under which it holds.

A condition is a figure and its thresholds, fixed before the measurement. It holds if the whole interval of the figure
lies within the thresholds, fails if all of it lies outside, and cannot be told if a threshold lies within the interval.
A claim holds if all of its conditions hold, and fails if one fails. The printed criterion is made from the conditions,
so both always agree. The method for an interval depends on the number of measurements: see `figure`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.analysis import disturbances, spread
from lab.analysis.wording import digits
from lab.core import phases, stats
from lab.core.lists import grouped, plural
from lab.core.record import OK, Ceilings, Record, Run
from lab.errors import LabError
from lab.experiments.claims.claim_parts import CEILINGS, PARTS
from lab.experiments.common import need_every_position
from lab.why import roofline

HOLDS, HOLDS_NOT = "holds here", "does not hold here"
UNSURE, UNTESTABLE = "cannot be told", "not testable here"

ASSUMED = math.exp(2 * math.sqrt(2) * spread.VIRTUAL)
"""The factor by which the range of one or two runs is widened: two sessions of a virtual machine rarely exceed it."""

ABOVE_0 = math.ulp(0.0)
"""The threshold of a condition that a figure is above 0."""

MOST_SHOWN = 4
"""Most conditions of one kind that a sentence lists; it counts the others."""

NEAR = 0.15
"""A length that differs from the wanted one by at most this share replaces it."""

CUTS_THE_CACHE = ("prefix", "stall", "speculation")
"""Parts that copy or cut the cache."""

Value = Callable[[Run], float | None]
Point = tuple[float, float]
"""A length or position, and a time there."""


@dataclass(frozen=True)
class Figure:
    """A measured or computed value, with the ends of its interval or range if it has one.

    `n`: the number of runs, blocks or points of a curve behind it; None for a computed one.
    """

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None

    @property
    def ends(self) -> Point:
        """The interval; for a figure without one the value twice."""
        return self.value if self.low is None else self.low, self.value if self.high is None else self.high

    @property
    def words(self) -> str:
        """`share: 64 % (61-67)`, a figure in a line."""
        unit = "x" if self.unit == "times" else f" {self.unit}" if self.unit else ""
        low, high = self.ends
        if high == math.inf:
            return f"{self.name}: {digits(low)}{unit} or more"
        dash = " to " if low < 0 else "-"
        interval = f" ({digits(low)}{dash}{digits(high)})" if low != high else ""
        return f"{self.name}: {digits(self.value)}{unit}{interval}"


@dataclass(frozen=True)
class Condition:
    """Figures must lie within thresholds; one of them may be missing. `what` names the figures in the criterion."""

    what: str
    least: float = -math.inf
    most: float = math.inf
    unit: str = ""

    @property
    def bounds(self) -> str:
        """The thresholds in words."""
        least, most, unit = f"{self.least:,.4g}", f"{self.most:,.4g}", f" {self.unit}" if self.unit else ""
        if self.least == ABOVE_0:
            return "above 0"
        if self.most == math.inf:
            return f"at least {least}{unit}"
        return f"at most {most}{unit}" if self.least == -math.inf else f"between {least} and {most}{unit}"

    def holds(self, known: Figure) -> bool | None:
        """Whether a figure lies within the thresholds; None if its interval contains a threshold."""
        low, high = known.ends
        if self.least <= low and high <= self.most:
            return True
        return False if high < self.least or low > self.most else None


@dataclass(frozen=True)
class Evidence:
    """The measurements for all claims: the records of a session, and the machine's ceilings.

    `others` are records of other machines and `other_ceilings` their ceilings. `is_quick`: the session made only the
    short measurements.
    """

    records: tuple[Record, ...]
    ceilings: Ceilings | None = None
    others: tuple[Record, ...] = ()
    other_ceilings: tuple[Ceilings, ...] = ()
    is_quick: bool = False

    def of(self, part: str) -> tuple[Record, ...]:
        """The successful timed runs of a part of the session."""
        return tuple(record for record in self.records if record.run.part == part and record.run.is_timed)

    def by(self, key: Callable[[Record], Any], *parts: str) -> dict[Any, list[Record]]:
        """The same runs, of several parts, by a key in ascending order; without those whose key is None."""
        records = [record for part in parts for record in self.of(part)]
        return dict(sorted(grouped(records, key).items()))

    def lengths(self, part: str = "lengths") -> dict[int, list[Record]]:
        """The same runs by the length of their prompt, in ascending order."""
        return self.by(lambda record: record.run.n_prompt, part)

    def near(self, wanted: int, part: str = "lengths") -> tuple[int, list[Record]]:
        """The length nearest to the wanted one, and its runs; none if no length is within 15 % of it."""
        close = [(abs(n - wanted), n, own) for n, own in self.lengths(part).items() if abs(n - wanted) <= NEAR * wanted]
        _, n, own = min(close, key=lambda one: one[:2], default=(0, wanted, []))
        return n, own

    @property
    def best(self) -> Ceilings:
        """The ceilings, for claims that need them."""
        assert self.ceilings is not None
        return self.ceilings

    def lacks(self, part: str) -> str:
        """Why a part of the session cannot be judged; "" if it has successful runs."""
        if part == CEILINGS:
            return self._lacks_ceilings()
        if self.of(part):
            return ""
        failed = [record for record in self.records if record.run.part == part and record.run.status != OK]
        if failed:
            return f"All runs of the measurement `{part}` failed: {failed[0].run.error or failed[0].run.status}"
        if self.is_quick and part in PARTS and PARTS[part].quick_s is None:
            return f"--quick leaves the measurement `{part}` out."
        some = self.records[0] if self.records else None
        if some and part == "threads" and some.settings.n_threads < 2:
            return "The session has one thread, which cannot be halved. On several cores: --threads 2"
        if some and part == "speculation" and some.model.source == "synthetic":
            return "With random weights no draft is accepted, so there is no speed-up to measure."
        if some and part in CUTS_THE_CACHE:
            try:
                need_every_position(some.model)
            except LabError as problem:
                return problem.what
        return f"This session does not include the measurement `{part}`."

    def _lacks_ceilings(self) -> str:
        if self.ceilings is None or roof(self.ceilings) is None:
            return "The ceilings of this machine are not measured. Run: lab ceilings"
        if any((record.settings.n_gpu_layers != 0) != self.ceilings.on_gpu for record in self.records):
            return "The known ceilings are of another device (CPU or GPU) than the runs."
        return ""


@dataclass(frozen=True)
class Measured:
    """The figures that a claim's function finds in the evidence.

    `tested`: the figures of each condition, None for one that was not measured. A condition without figures counts as
    not measured. `shown`: the figures to print, by default the tested ones. `remark`: a sentence.
    """

    tested: Sequence[Sequence[Figure | None]]
    shown: Sequence[Figure | None] | None = None
    remark: str = ""

    @property
    def figures(self) -> tuple[Figure, ...]:
        chosen = itertools.chain(*self.tested) if self.shown is None else self.shown
        return tuple(known for known in chosen if known is not None)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, the reasons in sentences, and the figures."""

    verdict: str
    words: str
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A claim, its conditions, the parts of the session that it needs, and the function that makes their figures.

    `also` names useful parts that are not required. `note` is added to the criterion; `refuted` is added to the reasons
    if a condition fails. If at least half of its runs were disturbed, the verdict is open, unless the claim
    `ignores_disturbances`, because it is computed or compares runs made side by side. `source`: who claims it, if
    known.
    """

    number: int
    words: str
    needs: tuple[str, ...]
    conditions: tuple[Condition, ...]
    measure: Callable[[Evidence], Measured] = field(repr=False)
    note: str = ""
    refuted: str = ""
    also: tuple[str, ...] = ()
    ignores_disturbances: bool = False
    source: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return self.needs + self.also

    @property
    def criterion(self) -> str:
        """The conditions in words."""
        return " ".join([*(f"{one.what} is {one.bounds}." for one in self.conditions), *filter(None, [self.note])])

    def judge(self, evidence: Evidence) -> Judgement:
        """The verdict by the evidence; not testable if a needed part is missing."""
        if reason := next(filter(None, map(evidence.lacks, self.needs)), ""):
            return Judgement(UNTESTABLE, reason)
        try:
            measured = self.measure(evidence)
        except LabError as problem:  # a kernel that was not probed, a catalog that was edited
            return Judgement(UNTESTABLE, " ".join(filter(None, (problem.what, problem.hint))))
        judgement = self._decide(measured)
        runs = [record for part in self.needs for record in evidence.of(part)]
        n_disturbed = sum(bool(disturbances.disturbances(record)) for record in runs)
        is_sure = self.ignores_disturbances or 2 * n_disturbed < len(runs) or not runs
        if is_sure or judgement.verdict not in (HOLDS, HOLDS_NOT):
            return judgement
        doubt = f"{n_disturbed} of {len(runs)} runs were disturbed, so this is not sure. "
        return Judgement(UNSURE, doubt + judgement.words, judgement.figures)

    def _decide(self, measured: Measured) -> Judgement:
        """The verdict of all conditions together, and which of them fail, hold, or cannot be told."""
        groups: dict[str, list[str]] = {"Fails": [], "Cannot be told": [], "Not measured": [], "Holds": []}
        for condition, figures in itertools.zip_longest(self.conditions, measured.tested, fillvalue=()):
            assert isinstance(condition, Condition)
            for known in figures or [None]:
                if known is None:
                    groups["Not measured"].append(condition.what[0].lower() + condition.what[1:])
                    continue
                group = {True: "Holds", False: "Fails", None: "Cannot be told"}[condition.holds(known)]
                few = f", interval assumed for {plural(known.n, 'run')}" if known.n in (1, 2) and known.n else ""
                groups[group].append(f"{known.words}{few}, must be {condition.bounds}")
        verdicts = {"Fails": HOLDS_NOT, "Not measured": UNTESTABLE, "Cannot be told": UNSURE}
        verdict = next((verdict for name, verdict in verdicts.items() if groups[name]), HOLDS)
        sentences = [f"{name}: {_listed(list(dict.fromkeys(parts)))}." for name, parts in groups.items() if parts]
        remarks = filter(None, [self.refuted if verdict == HOLDS_NOT else "", measured.remark])
        return Judgement(verdict, " ".join([*sentences, *remarks]), measured.figures)


def claim(
    number: int, words: str, *conditions: Condition, needs: tuple[str, ...], **more: Any
) -> Callable[[Callable[[Evidence], Measured]], Claim]:
    """Makes a claim of the decorated function, which makes the figures of its conditions. `more`: fields of Claim."""
    return lambda measure: Claim(number, words, needs, conditions, measure, **more)


def _listed(parts: Sequence[str]) -> str:
    more = [f"{len(parts) - MOST_SHOWN} more"] if len(parts) > MOST_SHOWN else []
    return "; ".join([*parts[:MOST_SHOWN], *more])


def share(name: str, values: Iterable[float | None]) -> Figure | None:
    """Like `figure`, for shares in percent: the interval ends at 100 %."""
    known = [value for value in values if value is not None and 0 < value < math.inf]
    found = figure(name, known, "%", 100)
    if found is None or max(known) > 1:  # faster than its ceiling: that must stay visible
        return found
    interval = None if stats.median_interval(known) else stats.interval_of_shares(known)
    low, high = (100 * interval.low, 100 * interval.high) if interval else found.ends
    return dataclasses.replace(found, low=low, high=min(100.0, high))


def figure(name: str, values: Iterable[float | None], unit: str = "", scale: float = 1.0) -> Figure | None:
    """The centre of positive values, one per run or block, with its 95 % interval; None for no values.

    6 and more: the median with its order-statistics interval. 3 to 5: the geometric mean with Student's t interval on
    logarithms. One or two: their range, widened by the factor ASSUMED at both ends.
    """
    known = [value for value in values if value is not None and 0 < value < math.inf]
    if not known:
        return None
    interval, centre = stats.median_interval(known), statistics.median(known)
    if interval is None:
        interval, centre = stats.log_interval(known), statistics.geometric_mean(known)
    ends = (interval.low, interval.high) if interval else (min(known) / ASSUMED, max(known) * ASSUMED)
    return Figure(name, scale * centre, unit, scale * ends[0], scale * ends[1], len(known))


def each(
    groups: Mapping[Any, Sequence[Record]], name: str, value: Value, unit: str = "", scale: float = 1.0
) -> list[Figure | None]:
    """A figure for each group, by a name with a place for the group's key."""
    return [figure(name.format(key), [value(r.run) for r in own], unit, scale) for key, own in groups.items()]


def compared(name: str, base: Sequence[Record], other: Sequence[Record], value: Value) -> Figure | None:
    """The value of `other` over that of `base`, block by block; None without a common block."""
    both = by_block(base, value), by_block(other, value)
    return figure(name, [both[1][block] / both[0][block] for block in both[0] if block in both[1]], "times")


def successive(groups: Mapping[Any, Sequence[Record]], name: str, value: Value) -> list[Figure | None]:
    """Each group compared with the previous one; `name` has places for both keys."""
    pairs = itertools.pairwise(groups.items())
    return [compared(name.format(key, before), base, own, value) for (before, base), (key, own) in pairs]


def scaled(known: Figure | None, factor: float, name: str, unit: str = "times") -> Figure | None:
    """The same figure, with its interval, in another unit or relative to an expected value."""
    if known is None:
        return None
    low, high = known.ends
    return dataclasses.replace(
        known, name=name, value=factor * known.value, unit=unit, low=factor * low, high=factor * high
    )


def decode_tps(run: Run) -> float | None:
    """Tokens per second of decode."""
    tpot = phases.tpot_ns(run)
    return 1e9 / tpot if tpot else None


def by_block(records: Iterable[Record], value: Value) -> dict[int, float]:
    """The value of each block or repeat, the geometric mean of several runs. Runs without a value are left out."""
    values = [(block(record.run), value(record.run) or 0.0) for record in records]
    known = grouped(values, lambda pair: pair[0] if pair[1] > 0 else None)
    return {key: statistics.geometric_mean(taken for _, taken in own) for key, own in known.items()}


def block(run: Run) -> int:
    """The block of a run, or its repeat."""
    return run.repeat if run.block is None else run.block


def roof(best: Ceilings | None) -> roofline.Roof | None:
    """The machine's best; None without ceilings, and if these lack reading of weights or memory."""
    reads = best is not None and any(rate.n_tokens == 1 and rate.op in roofline.READERS for rate in best.rates)
    return roofline.roof(best) if best is not None and reads else None


def slope(name: str, points: Sequence[Point], unit: str, scale: float) -> Figure | None:
    """The slope of times over positions with its interval; None for fewer than 4 positions."""
    rise = stats.slope([place for place, _ in points], [time for _, time in points])
    if rise is None or not scale:
        return None
    return Figure(name, scale * rise.estimate, unit, scale * rise.low, scale * rise.high, len(points))


def token_times(records: Sequence[Record]) -> list[Point]:
    """The mean position of the decoded tokens, and their TPOT in ms, of each length of each run."""
    legs = [leg for record in records for leg in phases.by_length(record.run)]
    times = [(leg.n_prompt + (leg.n_gen - 2) / 2, phases.tpot_ns(leg)) for leg in legs]
    return sorted((place, tpot / 1e6) for place, tpot in times if tpot and tpot > 0)


def line(points: Sequence[Point]) -> Point:
    """w and k of t(p) = w + k p, neither below 0."""
    places, times = zip(*points, strict=True)
    w, k = stats.fit([[1.0] * len(points), list(places)], list(times))
    return w, k


def at(curve: Sequence[Point], x: float) -> float:
    """The interpolated value; outside the points that of the nearest one."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= x < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[0][1] if x < curve[0][0] else curve[-1][1]
