"""The result of a session: what was tried, the winner, and its gain in blocks that chose nothing.

The winner looks faster than it is, because it was chosen for being fast. So it is measured again,
in new blocks; only those give the gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

from lab.core import phases, stats
from lab.core.asked_settings import table
from lab.core.lists import grouped, plural
from lab.core.record import Record
from lab.core.stats import Ratio
from lab.features.tune.choices import (
    DECODE,
    PREFILL,
    Choice,
    Timing,
    TunedPhase,
    is_lossy,
    phases_of,
)
from lab.features.tune.lines import CONFIRM, PARTS, SEARCH, TPOT, TTFT, TuningLine
from lab.features.tune.search import Search
from lab.models import catalog
from lab.runner.batches import batch_of
from lab.runner.disturbances import disturbances
from lab.show.comparison import AT_LEAST

if TYPE_CHECKING:
    import pandas as pd

FEWEST_CONFIRMED = 4  # the fewest blocks that a recommendation needs
DEFAULT = "default"
WINNER = "winner"
COLUMNS = ["part", "variant", "choice", "error", "block", "is_disturbed", PREFILL, DECODE]


@dataclass(frozen=True)
class Tuned:
    """The result of a session of `lab tune`.

    `winner` is a record of the confirmation; None: the default won, or nothing was confirmed.
    `gain` is the default's time over the winner's in the `n_confirmed` blocks; None for too few.
    `runs` has a row for each run, with its seconds until the first token (prefill) and per further
    one (decode). `tried` has a row for each choice of the search, and for a winner that it did not
    measure itself: the default, the winner, then the fastest first; its figures are NaN if it
    failed. `medians` has the seconds of the default and
    the winner in the confirmation by phase.
    """

    asked: TuningLine
    default: Record
    winner: Record | None
    gain: Ratio | None
    n_confirmed: int
    runs: pd.DataFrame
    tried: pd.DataFrame
    medians: pd.DataFrame

    @property
    def won(self) -> str | None:
        """The winner's settings as options."""
        return self.winner.run.variant if self.winner else None

    @property
    def choice(self) -> Choice:
        return choice_of(self.winner, self.default) if self.winner else ()

    @property
    def is_recommended(self) -> bool:
        """Whether the whole interval of the gain is above AT_LEAST."""
        return is_clear_gain(self.gain)

    @property
    def settings(self) -> dict[str, object]:
        """The recommended changes as keywords of `lab.measure`; {} without a recommendation."""
        if self.winner is None or not self.is_recommended:
            return {}
        changes = dict(self.choice)
        if "threads" in changes:  # alone it would change the threads of prefill, too
            changes.setdefault("threads_batch", self.winner.settings.n_threads_batch)
        return changes

    @property
    def n_users(self) -> int:
        batch = batch_of(self.default.run)
        return batch.n_seq if batch else 1

    @property
    def aim(self) -> str:
        """What is faster: `2,000 + 300 tokens`, or the tokens that the goal is about."""
        n_prompt = f"{self.default.run.n_prompt:,}"
        aim = f"{n_prompt} + {plural(self.asked.n_gen, 'token')}"
        if self.asked.goal == TTFT:
            aim = f"the first token after {n_prompt} prompt tokens"
        elif self.asked.goal == TPOT:
            aim = f"each further token after {n_prompt} prompt tokens"
        if self.n_users == 1:
            return aim
        return f"{aim} for each of {plural(self.n_users, 'user')}"


class Winner(NamedTuple):
    """The choice that was confirmed, and its settings as options."""

    settings: str
    choice: Choice


def is_clear_gain(gain: Ratio | None) -> bool:
    return gain is not None and gain.low > 1 + AT_LEAST


def choice_of(record: Record, default: Record) -> Choice:
    """The settings in which a record differs from the default, by the lab's names."""
    changes: dict[str, object] = {}
    for name, setting in table().items():
        field = setting.recorded
        if hasattr(record.settings, field):
            value = getattr(record.settings, field)
            if value != getattr(default.settings, field):
                changes[name] = value
    if record.model.quantization != default.model.quantization:
        changes["model"] = catalog.spec_of(record.model)
    return tuple(sorted(changes.items()))


def timing(record: Record, choice: Choice) -> Timing | None:
    """The seconds of each phase of a run: until the first token, and per further token.

    None for a failed run.
    """
    run = record.run
    ttft_ns = phases.ttft_ns(run)
    tpot_ns = phases.tpot_ns(run)
    if not run.is_timed or run.block is None or not ttft_ns or ttft_ns < 0:
        return None
    seconds = {PREFILL: ttft_ns / 1e9}
    if tpot_ns and tpot_ns > 0:
        seconds[DECODE] = tpot_ns / 1e9
    return Timing(run.block, choice, seconds, bool(disturbances(record)))


def is_mine(line: object) -> TypeGuard[Record | TuningLine]:
    """Whether a line is of a session of `lab tune`."""
    is_run = isinstance(line, Record) and line.run.part in PARTS
    return is_run or isinstance(line, TuningLine)


def of_sessions(lines: Iterable[object]) -> list[Tuned]:
    """The results of all sessions of `lab tune` in which the default was measured."""
    sessions = grouped(filter(is_mine, lines), lambda line: line.session)
    results = map(tuned, sessions.values())
    return [result for result in results if result is not None]


def tuned(lines: Sequence[object]) -> Tuned | None:
    """The result of one session, from its lines; None if the default was not measured."""
    asked = [line for line in lines if isinstance(line, TuningLine)]
    records = []
    for line in lines:
        if isinstance(line, Record) and line.run.part in PARTS and not line.run.warmup:
            records.append(line)
    defaults = [record for record in records if is_default(record) and record.run.is_timed]
    if not asked or not defaults:
        return None
    goal = asked[0]
    default = defaults[0]
    goal_phases = phases_of(goal.goal, goal.n_gen, batch_of(default.run) is not None)
    runs, timings = rows_of_runs(records, default)
    searched = runs[runs.part == SEARCH]
    search = Search(searched.choice, goal_phases)
    search.timings = timings
    times = times_of_blocks(runs[runs.part == CONFIRM], goal_phases)
    totals = total_times(times, goal_phases)
    winners = []
    for record in records:
        if record.run.part == CONFIRM and record.run.is_timed and not is_default(record):
            winners.append(record)
    gain = gain_of(totals)
    winner = None
    if winners:
        settings = winners[0].run.variant or ""
        winner = Winner(settings, choice_of(winners[0], default))
    return Tuned(
        asked=goal,
        default=default,
        winner=winners[0] if winners else None,
        gain=gain,
        n_confirmed=len(totals),
        runs=runs,
        tried=tried_choices(searched, search, winner, is_clear_gain(gain)),
        medians=medians_of(times, totals),
    )


def is_default(record: Record) -> bool:
    return record.run.variant == DEFAULT


def rows_of_runs(
    records: Sequence[Record], default: Record
) -> tuple[pd.DataFrame, list[Timing]]:
    """A row for each run, and the timings of the search."""
    import pandas as pd

    rows = []
    timings = []
    for record in records:
        choice = choice_of(record, default)
        row: dict[str, object] = {
            "part": record.run.part,
            "variant": record.run.variant or "",
            "choice": choice,
            "error": record.run.error or "",
        }
        timed = timing(record, choice)
        if timed is not None:
            row |= {"block": timed.block, "is_disturbed": timed.is_disturbed, **timed.seconds}
            if record.run.part == SEARCH:
                timings.append(timed)
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS), timings


def times_of_blocks(
    runs: pd.DataFrame, goal_phases: Sequence[TunedPhase]
) -> dict[str, pd.DataFrame]:
    """For each phase the seconds of the default and the winner in each block of the confirmation.

    A block may have several runs of both: their geometric mean.
    """
    import numpy as np

    names = [phase.name for phase in goal_phases]
    timed = runs.dropna(subset=["block", *names])
    side = timed.variant.where(timed.variant == DEFAULT, WINNER)
    logs = np.log(timed[names].astype(float)).groupby([timed.block, side]).mean()
    times = {}
    for name in names:
        by_side = logs[name].unstack().reindex(columns=[DEFAULT, WINNER])
        times[name] = np.exp(by_side)
    return times


def total_times(
    times: dict[str, pd.DataFrame], goal_phases: Sequence[TunedPhase]
) -> pd.DataFrame:
    """The seconds of all phases in each block that has runs of both."""
    totals = sum(phase.n * times[phase.name] for phase in goal_phases)
    timed: pd.DataFrame = totals.dropna()
    return timed


def gain_of(totals: pd.DataFrame) -> Ratio | None:
    """The default's time over the winner's: the geometric mean of blocks, by Student's t."""
    if len(totals) < FEWEST_CONFIRMED:
        return None
    ratios = (totals[DEFAULT] / totals[WINNER]).astype(float).tolist()
    interval = stats.log_interval(ratios)
    if interval is None:
        return None
    log_mean = math.fsum(map(math.log, ratios)) / len(ratios)
    return Ratio(math.exp(log_mean), interval.low, interval.high)


def medians_of(times: dict[str, pd.DataFrame], totals: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    medians = {name: by_side.loc[totals.index].median() for name, by_side in times.items()}
    return pd.DataFrame(medians).T.dropna()


def tried_choices(
    runs: pd.DataFrame, search: Search, winner: Winner | None, is_recommended: bool
) -> pd.DataFrame:
    """A row for each choice of the search and the winner: time, how many times as fast as the
    default, verdict."""
    import numpy as np
    import pandas as pd

    tried = runs.groupby("variant", sort=False).agg(
        choice=("choice", "last"), n_runs=("block", "count"), error=("error", "max")
    )
    tried = tried.rename_axis("settings").reset_index()
    won = winner.settings if winner else None
    if winner is not None and won not in set(tried.settings):
        unmeasured = {"settings": won, "choice": winner.choice, "n_runs": 0, "error": ""}
        tried = pd.concat([tried, pd.DataFrame([unmeasured])], ignore_index=True)
    log_ratio, deviation = search.expected(list(tried.choice))
    is_known = (tried.n_runs > 0) | (tried.settings == won)
    log_time = pd.Series(log_ratio).where(is_known)
    half_width = NormalDist().inv_cdf((1 + stats.CONFIDENCE) / 2) * deviation
    tried["time_s"] = np.exp(log_time) * sum(search.default_s().values())
    tried["speed"] = np.exp(-log_time)
    tried["speed_low"] = np.exp(-log_time - half_width)
    tried["speed_high"] = np.exp(-log_time + half_width)
    tried["changes_output"] = tried.choice.map(is_lossy)
    verdicts = []
    places = []
    for row in tried.itertuples():
        verdicts.append(verdict(row, won, is_recommended))
        places.append(place(row.settings, won))
    tried = tried.assign(verdict=verdicts, place=places)
    return tried.sort_values(["place", "time_s"], ignore_index=True).drop(columns="place")


def place(settings: str, won: str | None) -> int:
    """The default first, then the winner."""
    if settings == DEFAULT:
        return 0
    return 1 if settings == won else 2


class TriedRow(Protocol):
    """A row of `tried_choices`."""

    settings: str
    choice: Choice
    n_runs: int
    error: str
    time_s: float
    speed: float
    speed_low: float
    speed_high: float
    verdict: str


def verdict(row: TriedRow, won: str | None, is_recommended: bool) -> str:
    if math.isnan(row.time_s):
        return "failed"
    if row.settings == DEFAULT:
        return "the base"
    if row.settings == won:
        return "recommended" if is_recommended else "gain not confirmed"
    if row.speed_high < 1:
        return "slower"
    return "faster in the search" if row.speed_low > 1 else "no clear difference"
