"""What a search measures next, and what follows from it; it starts no engine and reads no clock.

Each block has a run of every build in it, in fresh engines. First come blocks of the two ends, and
of the good end a second time. If the bad end is slower, a build in the middle is measured beside
both ends: it is slow if it is slower than the good end, and fast if the bad end is slower than it.
Blocks are added until one of the two is proven. A build for which neither is proven after the last
block is left out. At last new blocks compare the two neighbours that remain.

The intervals are evaluated only after the numbers of blocks in LOOKS. The chances of an error of
all evaluations add up to at most ENDS_ERROR + STEPS_ERROR + PAIR_ERROR.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import stats
from lab.core.stats import Interval, Ratio

LOOKS = (6, 9, 13, 19, 28, 40)
"""Blocks of a trial after which its intervals are evaluated; the last number ends it."""

ENDS_ERROR = 0.02
STEPS_ERROR = 0.02
PAIR_ERROR = 0.01

ENDS = "ends"
STEP = "step"
PAIR = "pair"

AGAIN = -1  # the place of the good end's second run in a block
GOOD = 0  # its place in the series

SLOWER = "slower"
FASTER = "faster"
SAME = "no difference"
UNCLEAR = "unclear"
"""Verdicts on the bad end."""

FAST = "fast"
SLOW = "slow"
"""Verdicts on a build between the ends. UNCLEAR: left out."""

Times = Mapping[str, float]
"""Seconds by figure."""


@dataclass(frozen=True)
class ComparedBlock:
    """Runs measured side by side: times of each build, by its place in the series."""

    stage: str
    times: Mapping[int, Times]

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(sorted(self.times))


@dataclass(frozen=True)
class NextBlock:
    """What the next block holds."""

    stage: str
    places: tuple[int, ...]
    figures: tuple[str, ...]  # for which it is measured
    n_blocks: int  # measured so far


@dataclass
class Halving:
    """Where a figure became slower: after `fast`, and at `slow` at the latest."""

    fast: int
    slow: int
    between: list[int]  # builds that are still to be judged


def ratio_of(
    baseline: Sequence[float], candidate: Sequence[float], error: float
) -> Ratio | None:
    """The ratio candidate / baseline of blocks; None for too few.

    Its interval is wrong on one side with a chance of at most `error`. It is where two intervals
    overlap, each with half of that chance. Student's t of the logarithms needs few blocks on a
    quiet machine; the sign test is hardly widened by some disturbed blocks.
    """
    pairs = zip(baseline, candidate, strict=True)
    ratios = [slow / fast for fast, slow in pairs]
    if len(ratios) < LOOKS[0]:
        return None
    by_mean = stats.log_interval(ratios, 1 - error)
    by_signs = stats.paired_ratio(baseline, candidate, 1 - error)
    intervals = [Interval(side.low, side.high) for side in (by_mean, by_signs) if side]
    low = max(interval.low for interval in intervals)
    high = min(interval.high for interval in intervals)
    if low > high:
        return None
    estimate = min(max(statistics.median(ratios), low), high)
    return Ratio(estimate, low, high)


class RegressionSearch:
    """The state of a search: `next_trial` says what to measure, `take` and `drop` take results."""

    def __init__(self, n_builds: int, figures: Sequence[str], at_least: float) -> None:
        self.n_builds = n_builds
        self.figures = tuple(figures)
        self.at_least = at_least
        self.blocks: list[ComparedBlock] = []
        self.dropped: dict[int, str] = {}  # builds that do not run, and why
        self.unclear: dict[str, set[int]] = {}  # by figure: builds without a verdict
        self.ends: dict[str, str] = {}  # verdicts on the bad end
        self.verdicts: dict[tuple[str, int], str] = {}  # by figure and place
        self.halvings: dict[str, Halving] = {}  # of the figures that became slower
        self.proven: dict[str, Ratio] = {}  # by figure: the ratio of the pair
        self.unproven: set[str] = set()

    @property
    def bad(self) -> int:
        return self.n_builds - 1

    def next_trial(self) -> NextBlock | None:
        """What the next block holds; None after the last one."""
        if len(self.ends) < len(self.figures):
            return self._trial(ENDS, (AGAIN, GOOD, self.bad), self.figures)
        for halving in self.halvings.values():
            usable = self._usable(halving)
            if usable:
                middle = usable[len(usable) // 2]
                return self._trial(STEP, (GOOD, middle, self.bad), self._open_at(middle))
        for figure, halving in self.halvings.items():
            if figure not in self.proven and figure not in self.unproven:
                places = tuple(sorted({GOOD, halving.fast, halving.slow}))
                return self._trial(PAIR, places, self._with_pair(halving))
        return None

    def take(self, block: ComparedBlock) -> None:
        """Add a complete block, and judge what its trial shows by now."""
        self.blocks.append(block)
        n_blocks = len(self.blocks_of(block.stage, block.places))
        if n_blocks not in LOOKS:
            return
        is_last = n_blocks == LOOKS[-1]
        if block.stage == ENDS:
            self._judge_ends(is_last)
        elif block.stage == STEP:
            self._judge_step(block.places, is_last)
        else:
            self._judge_pair(block.places, is_last)

    def drop(self, place: int, reason: str) -> None:
        """Leave a build out because it does not run."""
        self.dropped[place] = reason

    def blocks_of(self, stage: str, places: tuple[int, ...]) -> list[ComparedBlock]:
        """The blocks of one trial."""
        return [
            block
            for block in self.blocks
            if block.stage == stage and block.places == tuple(sorted(places))
        ]

    def left_out(self, figure: str) -> list[int]:
        """The builds between the neighbours that were found, in order: none has a verdict."""
        halving = self.halvings[figure]
        return list(range(halving.fast + 1, halving.slow))

    def ratio_to_good(self, place: int, figure: str) -> Ratio | None:
        """A build's time over the good end's, from all blocks that have both."""
        error = self.end_error
        if place not in (AGAIN, self.bad):
            error = self.step_error
        return self._ratio(self.blocks, GOOD, place, figure, error)

    def ends_ratio(self, place: int, figure: str) -> Ratio | None:
        """The ratio of the bad end, or of the good one again, from the blocks that judge it."""
        blocks = [block for block in self.blocks if block.stage == ENDS]
        return self._ratio(blocks, GOOD, place, figure, self.end_error)

    @property
    def end_error(self) -> float:
        """The chance of an error of one interval of the ends."""
        return ENDS_ERROR / (len(self.figures) * len(LOOKS))

    @property
    def step_error(self) -> float:
        """The same of a build between. A figure has at most as many verdicts as halves follow."""
        n_verdicts = len(self.figures) * max(1, (self.n_builds - 2).bit_length())
        return STEPS_ERROR / (n_verdicts * len(LOOKS))

    @property
    def pair_error(self) -> float:
        return PAIR_ERROR / (len(self.figures) * len(LOOKS))

    def _trial(self, stage: str, places: tuple[int, ...], figures: Sequence[str]) -> NextBlock:
        n_blocks = len(self.blocks_of(stage, places))
        return NextBlock(stage, places, tuple(figures), n_blocks)

    def _usable(self, halving: Halving) -> list[int]:
        return [place for place in halving.between if place not in self.dropped]

    def _open_at(self, place: int) -> list[str]:
        """The figures for which a build is still to be judged."""
        return [
            figure for figure, halving in self.halvings.items() if place in halving.between
        ]

    def _with_pair(self, pair: Halving) -> list[str]:
        """The figures that became slower between the same two builds."""
        return [
            figure
            for figure, halving in self.halvings.items()
            if (halving.fast, halving.slow) == (pair.fast, pair.slow)
        ]

    def _ratio(
        self,
        blocks: Sequence[ComparedBlock],
        base: int,
        candidate: int,
        figure: str,
        error: float,
    ) -> Ratio | None:
        base_times = []
        candidate_times = []
        for block in blocks:
            if base in block.times and candidate in block.times:
                base_times.append(block.times[base][figure])
                candidate_times.append(block.times[candidate][figure])
        return ratio_of(base_times, candidate_times, error)

    def _judge_ends(self, is_last: bool) -> None:
        """Judge the bad end. The verdicts on all figures rest on the same blocks."""
        verdicts = {}
        for figure in self.figures:
            ratio = self.ends_ratio(self.bad, figure)
            verdicts[figure] = verdict_on_ends(ratio, self.at_least)
        if UNCLEAR in verdicts.values() and not is_last:
            return
        self.ends = verdicts
        for figure, verdict in verdicts.items():
            if verdict == SLOWER:
                between = list(range(GOOD + 1, self.bad))
                self.halvings[figure] = Halving(GOOD, self.bad, between)
                self.unclear[figure] = set()

    def _judge_step(self, places: tuple[int, ...], is_last: bool) -> None:
        """Judge the build in the middle, for each figure for which it is still to be judged."""
        middle = places[1]
        blocks = self.blocks_of(STEP, places)
        for figure in self._open_at(middle):
            halving = self.halvings[figure]
            to_good = self._ratio(blocks, GOOD, middle, figure, self.step_error)
            to_bad = self._ratio(blocks, middle, self.bad, figure, self.step_error)
            verdict = verdict_on_step(to_good, to_bad)
            if verdict == UNCLEAR:
                if is_last:
                    self.unclear[figure].add(middle)
                    halving.between.remove(middle)
                continue
            self.verdicts[figure, middle] = verdict
            if verdict == SLOW:
                halving.slow = middle
            else:
                halving.fast = middle
            halving.between = [
                place for place in halving.between if halving.fast < place < halving.slow
            ]

    def _judge_pair(self, places: tuple[int, ...], is_last: bool) -> None:
        """Judge whether the second of the neighbours is slower than the first."""
        blocks = self.blocks_of(PAIR, places)
        for figure, halving in self.halvings.items():
            pair = tuple(sorted({GOOD, halving.fast, halving.slow}))
            if pair != places or figure in self.proven:
                continue
            ratio = self._ratio(blocks, halving.fast, halving.slow, figure, self.pair_error)
            if ratio is not None and ratio.low > 1:
                self.proven[figure] = ratio
            elif is_last:
                self.unproven.add(figure)


def verdict_on_ends(ratio: Ratio | None, at_least: float) -> str:
    """SLOWER and FASTER leave it open how much; SAME excludes a slowdown of `at_least`."""
    if ratio is None:
        return UNCLEAR
    if ratio.high < 1 + at_least:
        is_faster = ratio.high < 1 and ratio.estimate < 1 / (1 + at_least)
        return FASTER if is_faster else SAME
    return SLOWER if ratio.low > 1 else UNCLEAR


def verdict_on_step(to_good: Ratio | None, to_bad: Ratio | None) -> str:
    """The verdict on a build, by its time over the good end's, and the bad end's over its own.

    If both are above 1, the build is between the ends, and the larger ratio decides.
    """
    is_slow = to_good is not None and to_good.low > 1
    is_fast = to_bad is not None and to_bad.low > 1
    if is_slow and is_fast:
        assert to_good is not None
        assert to_bad is not None
        is_fast = math.log(to_bad.estimate) > math.log(to_good.estimate)
        is_slow = not is_fast
    if is_slow:
        return SLOW
    return FAST if is_fast else UNCLEAR
