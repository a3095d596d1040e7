"""The result of a session of `lab tune`, from its records: what was tried, the winner, and its confirmed gain.

The winner of a search (tuning_search.py) looks faster than it is, because it was chosen for being fast. So it is
measured again, in blocks that chose nothing; only those give the gain.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.core import phases, stats
from lab.core.asked_settings import table
from lab.core.levers import Batch
from lab.core.lists import grouped
from lab.core.record import Record
from lab.core.stats import Ratio
from lab.features.tune.search import Choice, Phase, Search, Timing
from lab.models import catalog
from lab.show.disturbances import disturbances

AT_LEAST = 0.01
"""Smaller gains are not recommended, as in `lab ab`."""

FOUND_IN = 0.8
"""The share of sessions in which a gain that counts as visible is found."""

FEWEST_CONFIRMED = 4
"""Blocks that a recommendation needs."""

LOSSY = ("cache_type_k", "cache_type_v", "model")
"""Settings that change what the model writes."""

DEFAULT = "default"
SEARCH, CONFIRM, LENGTHS = "search", "confirm", "lengths"
REQUEST, TTFT, TPOT, THROUGHPUT = "request", "ttft", "tpot", "throughput"
PREFILL, DECODE = "prefill", "decode"


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
    """A run of a session. `timing` is None if it failed."""

    stage: str
    variant: str
    choice: Choice
    timing: Timing | None
    error: str | None = None


@dataclass(frozen=True)
class Crossing:
    """After a prompt of n_prompt tokens: the gain of the winner, and the answer lengths for which it is faster.

    `gain` is of answers of the length that was asked for. `from_gen` and `to_gen`: from and up to which number of
    generated tokens the winner is faster; None: no such end. `is_ever`: there are such answers.
    """

    n_prompt: int
    gain: float
    from_gen: int | None
    to_gen: int | None
    is_ever: bool


@dataclass(frozen=True)
class Tuned:
    """The result of a session of `lab tune`, made of its runs.

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
    default: Record
    winner: Record | None  # None: the default won the search, or nothing was confirmed
    choice: Choice
    gain: Ratio | None
    n_confirmed: int
    crossings: tuple[Crossing, ...] = ()
    seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by phase: default, winner; confirmed
    measured: tuple[Measured, ...] = ()
    visible: float | None = None  # the gain that these blocks would show in 4 of 5 sessions

    @property
    def won(self) -> str | None:
        """The winner's settings as options."""
        return self.winner.run.variant if self.winner else None

    @property
    def is_recommended(self) -> bool:
        return self.gain is not None and self.gain.low > 1 + AT_LEAST

    @property
    def settings(self) -> dict[str, Any]:
        """The recommended changes as keywords of `lab.measure`; {} without a recommendation."""
        if not self.is_recommended or self.winner is None:
            return {}
        own = dict(self.choice)
        if "threads" in own:  # alone it would change the threads of prefill, too
            own.setdefault("threads_batch", self.winner.settings.n_threads_batch)
        return own


def is_lossy(choice: Choice) -> bool:
    """Whether a choice changes what the model writes."""
    return any(name in LOSSY for name, _ in choice)


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
    if run.block is None or not first or first < 0:
        return None
    seconds = {PREFILL: first / 1e9, **({DECODE: each / 1e9} if each and each > 0 else {})}
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
    tried, gain, n_confirmed, seconds, visible = results(
        measured, phases_of(asked.goal, asked.n_gen, isinstance(lever, Batch))
    )
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
        measured=tuple(measured),
        visible=visible,
    )


def results(
    measured: Sequence[Measured], of: Sequence[Phase]
) -> tuple[tuple[Tried, ...], Ratio | None, int, dict[str, tuple[float, float]], float | None]:
    """Fields of `Tuned`: what was tried; of the confirmation the gain, the blocks, medians, and the visible gain."""
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
) -> tuple[Ratio | None, int, dict[str, tuple[float, float]], float | None]:
    """The default's time over the winner's by block, with its interval; the number of blocks; medians by phase.

    Student's t on logarithms of the blocks' ratios. A block may have several runs of both, as in the order ABBA. Last
    the smallest gain whose interval such blocks put above AT_LEAST in 4 of 5 sessions. A smaller gain is found only
    where noise makes it look larger.
    """
    totals: dict[int, tuple[float, float]] = {}
    parts: dict[str, list[tuple[float, float]]] = {}
    for block, own in grouped(confirmed, lambda one: one.timing.block if one.timing else None).items():
        sides: tuple[list[Timing], list[Timing]] = [], []
        for measured in own:
            if measured.timing and all(phase.name in measured.timing.seconds for phase in of):
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
    visible = None
    if gain:
        from scipy.special import stdtrit

        n = len(ratios)
        error = statistics.stdev(map(math.log, ratios)) / math.sqrt(n)
        shares = (1 + stats.CONFIDENCE) / 2, FOUND_IN
        visible = (1 + AT_LEAST) * math.exp(error * sum(float(stdtrit(n - 1, share)) for share in shares))
    return gain, len(totals), medians, visible


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


def without(records: Iterable[Record]) -> list[Record]:
    """The records that are not of `lab tune`."""
    return [record for record in records if record.run.tuning is None]
