"""The search of `lab tune`: which combination of settings is the fastest, from few runs in blocks.

A *choice* is the settings in which a combination differs from the default. A request has two phases, prefill and
decode, and a setting may influence one of them or both. For each phase the logarithm of the time is

    speed of the machine in this block + effects of single settings + of pairs + of the whole choice + noise

All effects are normal around 0, or around what the ceilings predict (tuning_model.py). This is a Gaussian process
(Rasmussen & Williams, Gaussian Processes for Machine Learning, 2.2), so a run of one choice also tells something about
choices that share settings with it. The first blocks try each setting alone. Each further block measures choices drawn
with the probability that they are the best (Thompson, 1933), so contenders get most blocks.

The winner of a search looks faster than it is, because it was chosen for being fast. So it is measured again, in blocks
that chose nothing; only those give the gain.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from lab.analysis import tuning_model
from lab.analysis.disturbances import disturbances
from lab.analysis.tuning_model import BLOCK, covariances, noise_variance
from lab.core import phases, stats
from lab.core.asked_settings import table
from lab.core.levers import Batch
from lab.core.lists import grouped
from lab.core.record import Record, Tuning
from lab.core.request import RequestRecord
from lab.core.stats import Ratio
from lab.models import catalog

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

AnyRecord = TypeVar("AnyRecord", Record, RequestRecord, Record | RequestRecord)

N_DRAWS = 400
KNOWN_WITHIN = 0.02
"""The search ends when the best choice is expected to be at most this share slower than the unknown best one."""

SIMPLER, UNSURE = 0.01, 0.1
"""A choice with fewer changes wins if it is slower by at most this share, or faster with at least this probability."""

HOPELESS = 1.5
"""Choices that are predicted to take this factor of the best one's time are not tried."""

AT_LEAST = 0.01
"""Smaller gains are not recommended, as in `lab ab`."""

FEWEST_CONFIRMED = 4
"""Blocks that a recommendation needs."""

DEFAULT = "default"
SEARCH, CONFIRM, LENGTHS = "search", "confirm", "lengths"
REQUEST, TTFT, TPOT, THROUGHPUT, GOODPUT = "request", "ttft", "tpot", "throughput", "goodput"
PREFILL, DECODE = "prefill", "decode"

Choice = tuning_model.Choice


@dataclass(frozen=True)
class Phase:
    """A part of the time that is minimized: the settings that influence it (None: all), and how often it counts."""

    name: str
    settings: frozenset[str] | None = None
    n: float = 1.0

    def part_of(self, choice: Choice) -> Choice:
        """The settings of a choice that influence this phase."""
        return tuple(one for one in choice if self.settings is None or one[0] in self.settings)


@dataclass(frozen=True)
class Timing:
    """The seconds of each phase of one run."""

    block: int
    choice: Choice
    seconds: Mapping[str, float]
    is_disturbed: bool = False


@dataclass(frozen=True)
class Standing:
    """What a search knows of a choice: its expected time and its ratio to the default's, with a 95 % interval."""

    choice: Choice
    seconds: float
    ratio: Ratio


def phases_of(goal: str, n_gen: int, is_batch: bool) -> tuple[Phase, ...]:
    """The phases that a goal minimizes, for requests of `n_gen` generated tokens.

    llama.cpp uses the threads of prefill (`threads_batch`) for every step of more than one token.
    """
    every = frozenset(table()) | {"model"}
    of_decode = every - {"ubatch", "batch", "threads" if is_batch else "threads_batch"}
    prefill, decode = Phase(PREFILL, every - {"threads"}), Phase(DECODE, of_decode, n_gen - 1)
    if goal == TTFT or n_gen < 2:
        return (prefill,)
    return (decode,) if goal == TPOT else (prefill, decode)


class Search:
    """The state of a search: `next_block` says what to measure, `learn` and `drop` take what came of it.

    `predicted` has the predicted time of each choice over the default's, by phase. `choices` may omit the default.
    """

    def __init__(
        self,
        choices: Iterable[Choice],
        of: Sequence[Phase],
        predicted: Mapping[str, Mapping[Choice, float]] | None = None,
        seed: int = 1,
        n_per_block: int = 5,
    ) -> None:
        import numpy as np

        self.phases, self.predicted, self.n_per_block = tuple(of), predicted or {}, n_per_block
        self.choices = [(), *(choice for choice in dict.fromkeys(choices) if self._matters(choice))]
        self.timings: list[Timing] = []
        self.dropped: dict[Choice, str] = {}
        self._rng = np.random.default_rng(seed)
        self._first: list[Choice] = []

    def _matters(self, choice: Choice) -> bool:
        return bool(choice) and all(any(phase.part_of((one,)) for phase in self.phases) for one in choice)

    def cut(self, shares: Mapping[str, float]) -> list[Choice]:
        """Drop the choices whose predicted time is HOPELESS; `shares` are those of the phases in the default's time.

        Returns the dropped choices. Single settings are tried in the order of their predicted times.
        """
        times = {
            choice: sum(share * self.predicted.get(name, {}).get(choice, 1.0) for name, share in shares.items())
            for choice in self.choices
        }
        best = min(times.values())
        for choice, time in times.items():
            if choice and time > HOPELESS * best:
                self.dropped[choice] = f"predicted to take {time:.2g}x the default's time"
        self._first = sorted((one for one in self.open if len(one) == 1), key=times.__getitem__)
        return list(self.dropped)

    @property
    def open(self) -> list[Choice]:
        """The choices that were not dropped, the default first."""
        return [choice for choice in self.choices if choice not in self.dropped]

    def learn(self, timings: Iterable[Timing]) -> None:
        """Take the times of runs."""
        self.timings += timings

    def drop(self, choice: Choice, reason: str) -> None:
        """Do not try a choice again."""
        self.dropped[choice] = reason
        self._first = [one for one in self._first if one != choice]

    def next_block(self) -> list[Choice]:
        """The choices of the next block: the default, the best so far, and draws; empty if the best is known."""
        if not self.timings and not self._first:
            self._first = [one for one in self.open if len(one) == 1]
        if self._first:
            now, self._first = self._first[: self.n_per_block], self._first[self.n_per_block :]
            return [(), *now]
        choices, draws = self._draws()
        best = _simplest(choices, draws)
        if _regret(draws, best) <= KNOWN_WITHIN and choices[best] in {timing.choice for timing in self.timings}:
            return []
        wanted = [choices[i] for i in dict.fromkeys([best, *draws.argmin(axis=1).tolist()])]
        return [(), *[choice for choice in wanted if choice][: self.n_per_block]]

    def best(self) -> Choice:
        """The choice with the least expected time; of nearly equal ones that with the fewest changes."""
        choices, draws = self._draws()
        return choices[_simplest(choices, draws)]

    def regret(self) -> float:
        """By which share the best choice is expected to be slower than the unknown best one."""
        choices, draws = self._draws()
        return _regret(draws, _simplest(choices, draws))

    def standings(self) -> list[Standing]:
        """What is known of the measured choices, the fastest first."""
        import numpy as np

        choices, draws = self._draws(list(dict.fromkeys([(), *(timing.choice for timing in self.timings)])))
        ratios = draws / draws[:, :1]
        low, high = np.quantile(ratios, [(1 - stats.CONFIDENCE) / 2, (1 + stats.CONFIDENCE) / 2], axis=0)
        middle, seconds = np.exp(np.log(ratios).mean(axis=0)), np.median(draws, axis=0)
        made = [
            Standing(choice, float(seconds[i]), Ratio(float(middle[i]), float(low[i]), float(high[i])))
            for i, choice in enumerate(choices)
        ]
        return sorted(made, key=lambda one: one.seconds)

    def _draws(self, choices: list[Choice] | None = None) -> tuple[list[Choice], Array]:
        """Choices, and N_DRAWS possible sets of their times in seconds, a column for each choice."""
        import numpy as np

        chosen = self.open if choices is None else choices
        total = np.zeros((N_DRAWS, len(chosen)))
        for phase in self.phases:
            default = [t.seconds[phase.name] for t in self.timings if not t.choice and phase.name in t.seconds]
            scale = phase.n * (statistics.median(default) if default else 1.0)
            mean, covariance = self._believed(phase, chosen)
            root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(chosen)))
            total += scale * np.exp(mean + self._rng.standard_normal((N_DRAWS, len(chosen))) @ root.T)
        return chosen, total

    def _believed(self, phase: Phase, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """Means and covariances of log(time / the default's time) in this phase, after all runs."""
        import numpy as np

        seen = [timing for timing in self.timings if phase.name in timing.seconds]
        known = self.predicted.get(phase.name, {})
        parts = [phase.part_of(choice) for choice in (*choices, *(timing.choice for timing in seen))]
        ratios = [known.get(part, 1.0) for part in parts]
        prior, mean, n = covariances(parts, bool(known)), np.log(np.array(ratios)), len(choices)
        if not seen:
            return mean, prior
        logs = np.array([math.log(timing.seconds[phase.name]) for timing in seen])
        blocks = np.array([timing.block for timing in seen])
        least = prior[n:, n:] + BLOCK**2 * (blocks[:, None] == blocks[None, :])
        wrong = logs - mean[n:]
        wrong = wrong - wrong.mean()
        noisy = least + np.diag(noise_variance(least, wrong, np.array([timing.is_disturbed for timing in seen])))
        gain = np.linalg.solve(noisy, prior[n:, :n]).T
        return mean[:n] + gain @ wrong, prior[:n, :n] - gain @ prior[n:, :n]


def _simplest(choices: Sequence[Choice], draws: Array) -> int:
    """The index of the choice with the least expected time, without changes that hardly or not certainly help.

    It may be slower by SIMPLER. A change is also left out if the choice without it is faster with a chance of UNSURE.
    """
    means = draws.mean(axis=0)
    fastest = int(means.argmin())
    parts = set(choices[fastest])
    near = [
        i
        for i, choice in enumerate(choices)
        if means[i] <= (1 + SIMPLER) * means[fastest]
        or (choice and parts.issuperset(choice) and (draws[:, i] < draws[:, fastest]).mean() >= UNSURE)
    ]
    return min(near, key=lambda i: (len(choices[i]), means[i]))


def _regret(draws: Array, best: int) -> float:
    return float((draws[:, best] / draws.min(axis=1)).mean() - 1)


@dataclass(frozen=True)
class Tried:
    """A measured choice: its runs in the search, its expected time, and that over the default's with an interval.

    `seconds` is of the phases that count for the goal. `error`: why it could not be measured; then there is no time.
    """

    choice: Choice
    variant: str
    n_runs: int
    seconds: float | None
    ratio: Ratio | None
    error: str | None = None


@dataclass(frozen=True)
class Measured:
    """A run of a session, or with `--serve` a load on a server. `timing` is None if it failed."""

    stage: str
    variant: str
    choice: Choice
    timing: Timing | None
    error: str | None = None


@dataclass(frozen=True)
class Crossing:
    """After a prompt of n_prompt tokens: the gain of the winner, and the answer lengths for which it is faster.

    `gain` is of answers of the length that was asked for. `from_gen` and `to_gen`: from and up to which number of
    generated tokens the winner is faster; None: no such end. `always` and `never` have neither.
    """

    n_prompt: int
    gain: float
    from_gen: int | None
    to_gen: int | None
    is_ever: bool


@dataclass(frozen=True)
class Tuned:
    """The result of a session of `lab tune`, made of its runs, or of its requests (`--serve`).

    `gain` is the default's time over the winner's in the blocks of the confirmation, `n_confirmed` in number; None for
    too few. `is_recommended`: the gain is larger than AT_LEAST, with its whole interval. `default` and `winner` are
    records of the two, from which command lines are made.
    """

    session: str
    goal: str
    n_prompt: int
    n_gen: int
    n_users: int
    tried: tuple[Tried, ...]  # the fastest first
    default: Record | RequestRecord
    winner: Record | RequestRecord | None  # None: the default won the search, or nothing was confirmed
    choice: Choice
    gain: Ratio | None
    n_confirmed: int
    crossings: tuple[Crossing, ...] = ()
    seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by phase: default, winner; confirmed

    @property
    def is_recommended(self) -> bool:
        return self.gain is not None and self.gain.low > 1 + AT_LEAST


def choice_of(record: Record, default: Record) -> Choice:
    """The settings in which a record differs from the default, by the lab's names."""
    own, base = record.settings, default.settings
    names = {name: setting.record_name or name for name, setting in table().items()}
    changed = {
        name: getattr(own, field)
        for name, field in names.items()
        if hasattr(own, field) and getattr(own, field) != getattr(base, field)
    }
    if record.model.quantization != default.model.quantization:
        changed["model"] = catalog.spec_of(record.model)
    return tuple(sorted(changed.items()))


def timing(record: Record, choice: Choice) -> Timing | None:
    """The seconds of each phase of a run: until the first token, and per further token; None for a failed run."""
    run = record.run
    first, each = phases.ttft_ns(run), phases.tpot_ns(run)
    if first is None or run.block is None:
        return None
    seconds = {PREFILL: first / 1e9, **({DECODE: each / 1e9} if each is not None else {})}
    return Timing(run.block, choice, seconds, bool(disturbances(record)))


def of_sessions(records: Sequence[Record]) -> list[Tuned]:
    """The results of all sessions of `lab tune` among the records in which the default was measured."""
    sessions = grouped((record for record in records if record.run.tuning), lambda record: record.session)
    made = [tuned(own) for own in sessions.values()]
    return [one for one in made if one]


def tuned(records: Sequence[Record]) -> Tuned | None:
    """The result of one session, from its records; None if the default was not measured."""
    known = [(record, record.run.tuning) for record in records if record.run.tuning and not record.run.warmup]
    default = next((record for record, _ in known if record.run.variant == DEFAULT and record.run.is_timed), None)
    if default is None or default.run.tuning is None:
        return None
    asked, lever = default.run.tuning, default.run.lever
    of_stage = grouped(known, lambda pair: pair[1].stage if pair[1] else None)
    confirmed = [record for record, _ in of_stage.get(CONFIRM, []) if record.run.is_timed]
    winner = next((record for record in confirmed if record.run.variant != DEFAULT), None)
    measured = []
    for record, own in known:
        choice = choice_of(record, default)
        found = timing(record, choice) if own and (own.stage == SEARCH or record.run.is_timed) else None
        measured.append(Measured(own.stage if own else "", record.run.variant or "", choice, found, record.run.error))
    tried, gain, n_confirmed, seconds = results(measured, phases_of(asked.goal, asked.n_gen, isinstance(lever, Batch)))
    return Tuned(
        session=default.session,
        goal=asked.goal,
        n_prompt=default.run.n_prompt,
        n_gen=asked.n_gen,
        n_users=lever.n_seq if isinstance(lever, Batch) else 1,
        tried=tried,
        default=default,
        winner=winner,
        choice=() if winner is None else choice_of(winner, default),
        gain=gain,
        n_confirmed=n_confirmed,
        crossings=_crossings([record for record, _ in of_stage.get(LENGTHS, [])], confirmed, asked.n_gen),
        seconds=seconds,
    )


def results(
    measured: Sequence[Measured], of: Sequence[Phase]
) -> tuple[tuple[Tried, ...], Ratio | None, int, dict[str, tuple[float, float]]]:
    """Fields of `Tuned`: what was tried in the search, and the gain, the blocks and the medians of the confirmation."""
    of_stage = grouped(measured, lambda one: one.stage)
    return _tried(of_stage.get(SEARCH, []), of), *_confirmed(of_stage.get(CONFIRM, []), of)


def _tried(searched: Sequence[Measured], of: Sequence[Phase]) -> tuple[Tried, ...]:
    search = Search([one.choice for one in searched], of)
    search.learn(one.timing for one in searched if one.timing)
    known = {one.choice: one for one in search.standings()}
    rows = []
    for variant, own in grouped(searched, lambda one: one.variant).items():
        choice, n_runs = own[-1].choice, sum(one.timing is not None for one in own)
        standing = known[choice] if n_runs else None
        rows.append(
            Tried(
                choice=choice,
                variant=variant,
                n_runs=n_runs,
                seconds=standing.seconds if standing else None,
                ratio=standing.ratio if standing else None,
                error=next((one.error for one in own if one.error), None),
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.seconds is None, row.seconds or 0.0)))


def _confirmed(
    confirmed: Sequence[Measured], of: Sequence[Phase]
) -> tuple[Ratio | None, int, dict[str, tuple[float, float]]]:
    """The default's time over the winner's by block, with its interval; the number of blocks; medians by phase.

    Student's t on logarithms of the blocks' ratios. A block may have several runs of both, as in the order ABBA.
    """
    totals: dict[int, tuple[float, float]] = {}
    parts: dict[str, list[tuple[float, float]]] = {}
    for block, own in grouped(confirmed, lambda one: one.timing.block if one.timing else None).items():
        sides: tuple[list[Timing], list[Timing]] = [], []
        for measured in own:
            if measured.timing:
                sides[measured.variant != DEFAULT].append(measured.timing)
        if not all(sides):
            continue
        means = {
            phase.name: tuple(statistics.geometric_mean(one.seconds[phase.name] for one in side) for side in sides)
            for phase in of
        }
        for name, (base, other) in means.items():
            parts.setdefault(name, []).append((base, other))
        base, other = (sum(phase.n * means[phase.name][i] for phase in of) for i in (0, 1))
        totals[block] = base, other
    ratios = [base / other for base, other in totals.values()]
    interval = stats.log_interval(ratios) if len(ratios) >= FEWEST_CONFIRMED else None
    gain = Ratio(statistics.geometric_mean(ratios), interval.low, interval.high) if interval else None
    medians = {
        name: (statistics.median(base for base, _ in pairs), statistics.median(other for _, other in pairs))
        for name, pairs in parts.items()
    }
    return gain, len(totals), medians


def _crossings(lengths: Sequence[Record], confirmed: Sequence[Record], n_gen: int) -> tuple[Crossing, ...]:
    """For each measured prompt length: from which answer length on (or up to which) the winner is faster."""
    runs = [
        (one.n_prompt, record.run.variant == DEFAULT, timing(dataclasses.replace(record, run=one), ()))
        for record in (*lengths, *confirmed)
        if record.run.is_timed
        for one in phases.by_length(record.run)
    ]
    rows = []
    for n_prompt in sorted({n for n, _, _ in runs}):
        sides = [
            [one for n, is_base, one in runs if n == n_prompt and is_base is base and one] for base in (True, False)
        ]
        if not all(sides) or not all(DECODE in one.seconds for side in sides for one in side):
            continue
        (first, each), (own_first, own_each) = (
            [statistics.median(one.seconds[name] for one in side) for name in (PREFILL, DECODE)] for side in sides
        )
        gain = (first + (n_gen - 1) * each) / (own_first + (n_gen - 1) * own_each)
        rows.append(Crossing(n_prompt, gain, *_range(own_first - first, own_each - each)))
    return tuple(rows)


def _range(more_first: float, more_each: float) -> tuple[int | None, int | None, bool]:
    """The answer lengths n with more_first + (n - 1) x more_each < 0, as Crossing has them."""
    if more_first <= 0 and more_each <= 0:
        return None, None, True
    if more_first >= 0 and more_each >= 0:
        return None, None, False
    at = 1 - more_first / more_each
    return (math.ceil(at), None, True) if more_each < 0 else (None, math.floor(at), True)


def tuning_of(record: Record | RequestRecord) -> Tuning | None:
    """What a record says about `lab tune`; None for the records of other commands."""
    if isinstance(record, Record):
        return record.run.tuning
    return record.request.asked.load.tuning if record.request.asked.load else None


def without(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    """The records that are not of `lab tune`."""
    return [record for record in records if tuning_of(record) is None]
