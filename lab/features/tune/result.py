"""`lab tune`: what its search measures next, and the result of a session: the confirmed gain, words and a picture.

The search measures each setting alone, then the most promising combinations, in blocks with the default. A *choice* is
the settings in which a combination differs from the default. A request has two phases, prefill and decode, and a
setting may influence one of them or both. For each phase the logarithm of the time is

    speed of the machine in this block + effects of settings + effects of pairs of settings + noise

Least squares find these effects from all runs; small ones are preferred, as the standard deviations below say. A block
measures the choice that is expected to be the fastest, and new ones that may be faster.

The winner looks faster than it is, because it was chosen for being fast. So it is measured again, in blocks that chose
nothing; only those give the gain.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from lab.core import phases, shell, stats
from lab.core.asked_settings import table
from lab.core.lists import grouped, plural
from lab.core.payloads import Tuning
from lab.core.record import Record
from lab.core.shown import MARK
from lab.core.stats import Ratio
from lab.formats import other_tools
from lab.models import catalog
from lab.runner.batches import batch_of
from lab.runner.disturbances import disturbances
from lab.show import canvas, console, text_setup
from lab.show.section import (
    UNKNOWN,
    WIDE,
    Columns,
    Context,
    Kind,
    Picture,
    Section,
    print_section,
    tabled,
)
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

    Array = np.ndarray[Any, np.dtype[np.float64]]

AT_LEAST = 0.01
FEWEST_CONFIRMED = 4  # the least gain, and the fewest blocks, that a recommendation needs
LOSSY = ("cache_type_k", "cache_type_v", "model")  # settings that change what the model writes
DEFAULT = "default"
SEARCH = "search"
CONFIRM = "confirm"
PREFILL = "prefill"
DECODE = "decode"
REQUEST = "request"
TTFT = "ttft"
TPOT = "tpot"
THROUGHPUT = "throughput"
SIDES = ["default", "winner"]

GOALS = {
    REQUEST: "time of the whole request",
    TTFT: "time to the first token",
    TPOT: "time of all tokens after the first",
    THROUGHPUT: "time of all requests together",
}
"""What each goal minimizes."""

MOST_ROWS = 12
MOST_DRAWN = 40
LABEL_LETTERS = 34  # rows on a terminal; choices in the picture; letters in a line
OF_TUNE = (
    "A search measured choices of settings in blocks with fresh engines. The table has the time that it expects of "
    "each, and the ratio of that to the default's, with a 95 % interval below. The search chose the fastest, so its "
    "ratios flatter the winner. The gain in the sentences comes from new blocks."
)
CAPTION = (
    "What was tried: the time with each choice of settings over that with the default; left of 1 it is faster. "
    "Bars are 95 % intervals."
)

Choice = tuple[
    tuple[str, Any], ...
]  # the settings that differ from the default, by name; empty: the default
SINGLE = 0.3
PAIR = 0.12
BLOCK = 1.0  # expected deviations of logarithms: a setting, a pair, a block's speed
NOISE = 0.02
DISTURBED = 0.3
LEAST_NOISE = 0.004
MOST_NOISE = 0.3
NOISE_RUNS = 2  # of runs: at first, disturbed; bounds
ALONE = {"mmap"}  # settings whose effect does not depend on the others'
PER_BLOCK = 6
ENOUGH = 2  # choices in a block besides the default; runs of the best one that end the search
SIMPLER = 0.01
UNSURE = 0.5
"""A choice with fewer changes wins if it is slower by at most this share. A change is left out, too, if its gain is
smaller than this many standard deviations."""


@dataclass(frozen=True)
class Phase:
    """A part of the time that is minimized: how often it counts, and the settings that do not influence it."""

    name: str
    n: float
    ignored: frozenset[str]

    def part_of(self, choice: Choice) -> Choice:
        """The settings of a choice that influence this phase."""
        return tuple(one for one in choice if one[0] not in self.ignored)


@dataclass(frozen=True)
class Timing:
    """The seconds of each phase of one run."""

    block: int
    choice: Choice
    seconds: Mapping[str, float]
    is_disturbed: bool = False


class Search:
    """The state of a search: `next_block` says what to measure; `timings` and `drop` take what came of it."""

    def __init__(self, choices: Iterable[Choice], of: Sequence[Phase]) -> None:
        self.phases = tuple(of)
        self.timings = list[Timing]()
        self.dropped = dict[Choice, str]()
        matters = {
            one
            for choice in choices
            for one in choice
            if any(phase.part_of((one,)) for phase in of)
        }
        self.choices = list(
            dict.fromkeys([(), *(choice for choice in choices if matters.issuperset(choice))])
        )
        self._n_alone: int | None = None  # runs before the first combination

    @property
    def open(self) -> list[Choice]:
        """The choices that were not dropped, the default first."""
        return [choice for choice in self.choices if choice not in self.dropped]

    def drop(self, choice: Choice, reason: str) -> None:
        """Do not try a choice again, nor choices that contain it."""
        self.dropped |= {other: reason for other in self.open if set(choice) <= set(other)}

    def next_block(self) -> list[Choice]:
        """The choices of the next block, the default first, a disturbed one again; empty if the best is known."""
        n_runs = Counter(one.choice for one in self.timings)
        calm = {one.choice for one in self.timings if not one.is_disturbed}
        tried = {choice for choice, n in n_runs.items() if choice in calm or n > 1}
        if alone := [choice for choice in self.open if len(choice) == 1 and choice not in tried]:
            return [(), *alone[:PER_BLOCK]]
        self._n_alone = len(self.timings) if self._n_alone is None else self._n_alone
        best = self.best()
        if sum(one.choice == best for one in self.timings[self._n_alone :]) >= ENOUGH:
            return []
        ratio, deviation = self.expected(self.open)
        promising = [self.open[i] for i in (ratio - deviation).argsort()]
        wanted = [best, *(choice for choice in promising if choice not in tried and choice != best)]
        return [(), *[choice for choice in wanted if choice][:PER_BLOCK]]

    def best(self) -> Choice:
        """The choice with the least expected time; of nearly equal ones that with the fewest changes."""
        choices = self.open
        (ratio, deviation) = self.expected(self.open)
        fastest = min(range(len(choices)), key=lambda i: ratio[i])
        simpler = math.log(1 + SIMPLER)
        spare = {
            True: max(simpler, UNSURE * deviation[fastest]),
            False: simpler,
        }  # by whether it is a part of it
        near = (
            i
            for i, one in enumerate(choices)
            if ratio[i] <= ratio[fastest] + spare[{*one} <= {*choices[fastest]}]
        )
        return choices[min(near, key=lambda i: (len(choices[i]), ratio[i]))]

    def default_s(self) -> dict[str, float]:
        """The median seconds of each phase of the default, as often as it counts."""
        own = [one.seconds for one in self.timings if not one.choice]
        known = {
            phase: [times[phase.name] for times in own if phase.name in times]
            for phase in self.phases
        }
        return {
            phase.name: phase.n * statistics.median(times)
            for phase, times in known.items()
            if times
        }

    def expected(self, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """log(time / the default's time) of choices and its standard deviation; NaN without a run of the default."""
        import numpy as np

        base = self.default_s()
        unknown = np.full(len(choices), math.nan)
        if not base:
            return unknown, unknown
        found = [
            (base[phase.name], *self._effects(phase, choices))
            for phase in self.phases
            if phase.name in base
        ]
        times = sum((base_s * np.exp(mean) for base_s, mean, _ in found), np.zeros(len(choices)))
        variance = sum((base_s * np.exp(mean) / times) ** 2 * own for base_s, mean, own in found)
        return np.log(times / sum(base.values())), np.sqrt(variance)

    def _effects(self, phase: Phase, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """The effects of choices on log(time) of a phase, and their variances, from all runs."""
        import numpy as np

        runs = [one for one in self.timings if phase.name in one.seconds]
        of_all = list[set[Choice]]()
        for own in (phase.part_of(choice) for choice in (*choices, *(run.choice for run in runs))):
            pairs = itertools.combinations((one for one in own if one[0] not in ALONE), 2)
            of_all.append({*((one,) for one in own), *pairs})
        names = list(dict.fromkeys(itertools.chain(*of_all)))
        has = np.array([[name in own for name in names] for own in of_all], float).reshape(
            len(of_all), len(names)
        )
        wanted = has[: len(choices)]
        measured = has[len(choices) :]
        blocks = [run.block for run in runs]
        x = np.hstack([measured, np.equal.outer(blocks, sorted(set(blocks)))])
        y = np.log([run.seconds[phase.name] for run in runs])
        y -= y.mean()
        sizes = [
            *(SINGLE if len(name) == 1 else PAIR for name in names),
            *(BLOCK for _ in set(blocks)),
        ]
        prior = np.diag(np.array(sizes) ** -2.0)
        noise = NOISE
        disturbed = np.array([one.is_disturbed for one in runs])
        for _ in range(4):  # the noise follows from the fit, and the fit from the noise
            weighted = (x / np.where(disturbed, max(DISTURBED, noise), noise)[:, None] ** 2).T
            covariance = np.linalg.inv(weighted @ x + prior)
            found = covariance @ weighted @ y
            wrong = (y - x @ found)[~disturbed]
            n_free = max(
                0.0,
                len(wrong)
                - float(np.einsum("ij,jk,ki->i", x, covariance, weighted)[~disturbed].sum()),
            )
            seen = (
                min(MOST_NOISE, max(LEAST_NOISE, math.sqrt(wrong @ wrong / n_free)))
                if n_free > 0.01
                else NOISE
            )
            noise = math.sqrt((n_free * seen**2 + NOISE_RUNS * NOISE**2) / (n_free + NOISE_RUNS))
        n = len(names)
        return wanted @ found[:n], np.einsum("ij,jk,ik->i", wanted, covariance[:n, :n], wanted)


@dataclass(frozen=True)
class Tuned:
    """The result of a session of `lab tune`, made of its runs.

    `default` and `winner` are records of the two; no winner: the default won the search, or nothing was confirmed.
    `gain` is the default's time over the winner's in the `n_confirmed` blocks of the confirmation; None for too few.

    `runs` has a row for each run, with its seconds until the first token (prefill) and per further one (decode).
    `tried` has a row for each choice of the search: the default, the winner, then the fastest first; its figures are
    NaN if it failed. `medians` has the seconds of the default and the winner in the confirmation by phase.
    """

    asked: Tuning
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
        return self.gain is not None and self.gain.low > 1 + AT_LEAST

    @property
    def settings(self) -> dict[str, Any]:
        """The recommended changes as keywords of `lab.measure`; {} without a recommendation."""
        own = dict(self.choice) if self.is_recommended else {}
        if self.winner and "threads" in own:  # alone it would change the threads of prefill, too
            own.setdefault("threads_batch", self.winner.settings.n_threads_batch)
        return own

    @property
    def n_users(self) -> int:
        batch = batch_of(self.default.run)
        return batch.n_seq if batch else 1

    @property
    def aim(self) -> str:
        """What is faster: `2,000 + 300 tokens`, or the tokens that the goal is about."""
        users = "" if self.n_users == 1 else f" for each of {plural(self.n_users, 'user')}"
        n_prompt = self.default.run.n_prompt
        first = {TTFT: "the first token", TPOT: "each further token"}
        if self.asked.goal in first:
            return f"{first[self.asked.goal]} after {n_prompt:,} prompt tokens{users}"
        return f"{n_prompt:,} + {self.asked.n_gen:,} tokens{users}"


def phases_of(goal: str, n_gen: int, is_batch: bool) -> tuple[Phase, ...]:
    """The phases that a goal minimizes, for requests of `n_gen` generated tokens."""
    prefill = Phase(PREFILL, 1, frozenset({"threads"}))
    decode = Phase(
        DECODE,
        n_gen - 1,
        frozenset({"ubatch", "batch", "threads" if is_batch else "threads_batch"}),
    )
    if goal == TTFT or n_gen < 2:
        return (prefill,)
    return (decode,) if goal == TPOT else (prefill, decode)


def is_lossy(choice: Choice) -> bool:
    """Whether a choice changes what the model writes."""
    return any(name in LOSSY for name, _ in choice)


def choice_of(record: Record, default: Record) -> Choice:
    """The settings in which a record differs from the default, by the lab's names."""
    own = record.settings
    base = default.settings
    changed = dict[str, Any]()
    for name, setting in table().items():
        field = setting.record_name or name
        if hasattr(own, field) and getattr(own, field) != getattr(base, field):
            changed[name] = getattr(own, field)
    if record.model.quantization != default.model.quantization:
        changed["model"] = catalog.spec_of(record.model)
    return tuple(sorted(changed.items()))


def timing(record: Record, choice: Choice) -> Timing | None:
    """The seconds of each phase of a run: until the first token, and per further token; None for a failed run."""
    run = record.run
    first = phases.ttft_ns(run)
    each = phases.tpot_ns(run)
    if not run.is_timed or run.block is None or not first or first < 0:
        return None
    times = {PREFILL: first / 1e9, **({DECODE: each / 1e9} if each and each > 0 else {})}
    return Timing(run.block, choice, times, bool(disturbances(record)))


def of_sessions(records: Iterable[Record]) -> list[Tuned]:
    """The results of all sessions of `lab tune` among the records in which the default was measured."""
    sessions = grouped(
        (record for record in records if record.run.tuning), lambda record: record.session
    )
    return [one for one in map(tuned, sessions.values()) if one]


def tuned(records: Sequence[Record]) -> Tuned | None:
    """The result of one session, from its records; None if the default was not measured."""
    import numpy as np
    import pandas as pd

    known = [
        (one, one.run.tuning.stage) for one in records if one.run.tuning and not one.run.warmup
    ]
    default = next(
        (one for one, _ in known if one.run.variant == DEFAULT and one.run.is_timed), None
    )
    if default is None or default.run.tuning is None:
        return None
    asked = default.run.tuning
    rows = list[dict[str, Any]]()
    timings = list[Timing]()
    for record, stage in known:
        choice = choice_of(record, default)
        row = {
            "stage": stage,
            "variant": record.run.variant or "",
            "choice": choice,
            "error": record.run.error or "",
        }
        rows.append(row)
        if found := timing(record, choice):
            rows[-1] |= {"block": found.block, "disturbed": found.is_disturbed, **found.seconds}
            timings += [found] if stage == SEARCH else []
    runs = pd.DataFrame(
        rows, columns=["stage", "variant", "choice", "error", "block", "disturbed", PREFILL, DECODE]
    )
    of = phases_of(asked.goal, asked.n_gen, batch_of(default.run) is not None)
    search = Search(runs.choice[runs.stage == SEARCH], of)
    search.timings = timings

    # the confirmation: Student's t on logarithms of the blocks' ratios; a block may have several runs of both (ABBA)
    names = [phase.name for phase in of]
    confirmed = runs[runs.stage == CONFIRM].dropna(subset=["block", *names])
    side = confirmed.variant.map(lambda variant: SIDES[variant != DEFAULT])
    logs = np.log(confirmed[names].astype(float)).groupby([confirmed.block, side]).mean()
    by_side = {
        name: np.exp(logs[name].unstack().reindex(columns=SIDES)) for name in names
    }  # geometric, of each block
    totals = sum(phase.n * by_side[phase.name] for phase in of).dropna()
    ratios = (totals.default / totals.winner).astype(float)
    interval = stats.log_interval(ratios.tolist()) if len(totals) >= FEWEST_CONFIRMED else None
    of_winner = (
        one
        for one, stage in known
        if stage == CONFIRM and one.run.is_timed and one.run.variant != DEFAULT
    )
    result = Tuned(
        asked=asked,
        default=default,
        winner=next(of_winner, None),
        gain=Ratio(float(np.exp(np.log(ratios).mean())), interval.low, interval.high)
        if interval
        else None,
        n_confirmed=len(totals),
        runs=runs,
        tried=pd.DataFrame(),
        medians=pd.DataFrame(
            {name: means.loc[totals.index].median() for name, means in by_side.items()}
        ).T.dropna(),
    )

    def verdict(row: Any) -> str:
        if not row.time_ratio > 0 or row.settings == DEFAULT:
            return "the base" if row.time_ratio > 0 else "failed"
        if row.settings == result.won:
            return "recommended" if result.is_recommended else "gain not confirmed"
        if row.time_ratio_low > 1:
            return "slower"
        return "faster in the search" if row.time_ratio_high < 1 else "no clear difference"

    tried = runs[runs.stage == SEARCH].groupby("variant", sort=False)
    tried = tried.agg(choice=("choice", "last"), n_runs=("block", "count"), error=("error", "max"))
    tried = tried.rename_axis("settings").reset_index()
    ratio, deviation = search.expected(list(tried.choice))
    middle = pd.Series(ratio).where(tried.n_runs > 0)
    half = NormalDist().inv_cdf((1 + stats.CONFIDENCE) / 2) * deviation
    tried["time_s"] = np.exp(middle) * sum(search.default_s().values())
    for name, log in (
        ("time_ratio", middle),
        ("time_ratio_low", middle - half),
        ("time_ratio_high", middle + half),
    ):
        tried[name] = np.exp(log)
    tried["changes_output"] = tried.choice.map(is_lossy)
    tried["verdict"] = [verdict(row) for row in tried.itertuples()]
    tried["place"] = [(DEFAULT, result.won, name).index(name) for name in tried.settings]
    tried = tried.sort_values(["place", "time_s"], ignore_index=True).drop(columns="place")
    return dataclasses.replace(result, tried=tried)


def without(records: Iterable[Record]) -> list[Record]:
    """The records that are not of `lab tune`."""
    return [record for record in records if record.run.tuning is None]


def compared(records: Sequence[Record]) -> list[Record]:
    """A record of the default and one of the winner of each session of `lab tune`."""
    return [each for one in of_sessions(records) for each in (one.default, one.winner) if each]


def sentences(one: Tuned) -> list[str]:
    """First the answer: what is recommended, or why nothing is. Then the times."""

    def faster(name: str, choice: Choice, gain: Ratio) -> tuple[str, str]:
        lossy = " (changes the model's output)" if is_lossy(choice) else ""
        interval = f"95 % interval {digits(gain.low)} to {digits(gain.high)}"
        return f"{name}{lossy}", f"{digits(gain.estimate)} times as fast ({interval}"

    if one.gain is None:
        others = one.tried[(one.tried.settings != DEFAULT) & one.tried.time_ratio.notna()]
        if others.empty:
            return ["No other setting was measured, so nothing is recommended."]
        best = next(others.itertuples())  # the winner, else the fastest
        ratio = Ratio(1 / best.time_ratio, 1 / best.time_ratio_high, 1 / best.time_ratio_low)
        if one.won is None and (ratio.low <= 1 or ratio.estimate < 1 + AT_LEAST):
            return ["Keep the default: nothing that was tried is faster beyond noise."]
        name, gain = faster(best.settings, best.choice, ratio)
        few = f"only {plural(one.n_confirmed, 'new block')} of at least {FEWEST_CONFIRMED} confirmed it"
        return [
            f"No recommendation: {name} was the fastest in the search, but "
            f"{few if one.n_confirmed else 'nothing confirmed it'}.",
            f"In the search it was {gain}). That is too optimistic, because the search chose the settings with the "
            "shortest times.",
            "Run lab tune again with a larger --budget.",
        ]
    blocks = f"{one.n_confirmed} new blocks"
    (name, gain) = faster(str(one.won), one.choice, one.gain)
    if not one.is_recommended:
        return [
            f"Keep the default: {name} was the fastest in the search, but {blocks} do not show a gain clearly "
            f"above {percent(AT_LEAST)}. There it is {gain})."
        ]
    words = {PREFILL: "first token after", DECODE: "each further token"}
    times = [
        f"{words[phase]} {seconds(winner)} instead of {seconds(default)}"
        for phase, default, winner in one.medians[SIDES].itertuples()
    ]
    return [
        f"{name} is {gain}, from {blocks} measured after the choice) for {one.aim}.",
        f"Medians of these blocks: {', '.join(times)}.",
    ]


def command_lines(one: Tuned) -> dict[str, str]:
    """The commands of llama-server and of the lab with the recommended settings; empty without a recommendation."""
    if not one.is_recommended or one.winner is None:
        return {}
    file = f"./{one.winner.model.file}"
    lengths = (one.default.run.n_prompt, one.asked.n_gen)
    model = [] if "model" in dict(one.choice) else ["--model", catalog.spec_of(one.default.model)]
    own = "--prompt-len", lengths[0], "--gen", lengths[1], *model, *shell.split(one.won or "")
    server = other_tools.llama_server(file, one.winner.settings, *lengths, one.n_users)
    return {"llama-server": server, "lab": shell.lab("measure", *own)}


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Searches for the fastest settings, a part for each session."""
    parts = [section(one, context) for one in of_sessions(records)]
    if not parts:
        lines = ["lab tune measured no run of the default, so nothing can be compared with it."]
        return [] if context.is_page else [Section(sentences=lines)]
    question = parts[0].question if len(parts) == 1 else "Which settings are the fastest?"
    return [
        Section(
            "The fastest settings", name="tune", question=question, words=[OF_TUNE], parts=parts
        )
    ]


def section(one: Tuned, context: Context = Context()) -> Section:  # noqa: B008  (frozen)
    """What a session found: the answer, what was tried, what to do next; more on a page and with details."""
    is_whole = context.details or context.is_page
    lines = sentences(one)
    warnings = list[str]()
    known = one.runs.dropna(subset=["block"])
    disturbed = known.disturbed.astype(bool)
    counting = known.stage == min(known.stage, default="")  # confirm < search
    doubt = f" ({MARK} {disturbed.sum()} of {len(known)} runs disturbed)" if disturbed.any() else ""
    if disturbed[counting].mean() >= 0.5:
        what = "Other programs disturbed at least half of the runs that count."
        warnings.append(f"{what} Run lab tune again while no other program runs.")
    if failed := [f"{row.settings} ({row.error})" for row in one.tried.itertuples() if row.error]:
        warnings.append(f"Runs failed with {'; '.join(failed)}.")
    commands = command_lines(one)
    if commands and not is_whole:
        lines.append(f"With these settings: {commands['lab']}")
    columns: Columns = [
        ("settings", _name),
        ("runs", lambda row: str(row.n_runs)),
        ("time", lambda row: seconds(row.time_s) if row.time_s > 0 else UNKNOWN),
        ("time\nratio", lambda row: "\n".join(_ratio(row)) or UNKNOWN),
        ("verdict", lambda row: row.verdict),
    ]
    facts = (
        [Section("The recommended settings as commands", facts=commands)]
        if commands and is_whole
        else []
    )
    return Section(
        f"{text_setup.where([one.default])}{doubt}",
        f"{one.aim}; goal: {GOALS.get(one.asked.goal, one.asked.goal)}",
        name=f"tune-{one.default.session}",
        question=f"Which settings are the fastest for {one.aim}?",
        words=() if context.is_page else lines[:1],
        **tabled(columns, list(one.tried.itertuples()), keep_all=True),
        most_rows=MOST_ROWS,
        warnings=warnings,
        sentences=lines if context.is_page else lines[1:],
        notes=[OF_TUNE] if context.details else [],
        parts=facts,
        pictures=[Picture("tune", CAPTION, partial(_draw, one), WIDE)],
        data=lambda: {"tunings": [_as_row(one)]},
    )


def show_tuned(found: Tuned) -> None:
    """Print what `lab tune` found: the answer, what was tried, and command lines.

    lab.show_tuned(lab.tune(2000, 300, budget="5min"))
    """
    print_section(section(found, Context(details=True)), console.console())


def plot_tuned(found: Tuned) -> Figure:
    """Draw the time of each choice that `lab tune` tried over the default's, and the winner's in the confirmation.

    lab.plot_tuned(lab.tune(2000, 300, budget="5min"))
    """
    return _draw(found, canvas.new_figure(WIDE))


def _name(row: Any) -> str:
    return f"{row.settings}\nchanges the model's output" if is_lossy(row.choice) else row.settings


def _ratio(row: Any) -> list[str]:
    """The ratio and its interval; only 1.00 of the default, nothing of a failed choice."""
    if row.settings == DEFAULT or not row.time_ratio > 0:
        return ["1.00"] * (row.time_ratio > 0)
    return [digits(row.time_ratio), f"{digits(row.time_ratio_low)}-{digits(row.time_ratio_high)}"]


def _as_row(one: Tuned) -> dict[str, Any]:
    """A session for JSON; what is unknown is None."""
    tried = one.tried.drop(columns="choice").astype(object)
    names = {PREFILL: "first_token", DECODE: "each_token"}
    return {
        "session": one.default.session,
        "subject": text_setup.where([one.default]),
        "goal": one.asked.goal,
        "n_prompt": one.default.run.n_prompt,
        "n_gen": one.asked.n_gen,
        "n_users": one.n_users,
        "recommended": one.won if one.is_recommended else None,
        "winner": one.won,
        "changes_output": is_lossy(one.choice),
        "gain": one.gain and one.gain.estimate,
        "gain_low": one.gain and one.gain.low,
        "gain_high": one.gain and one.gain.high,
        "n_blocks_confirmed": one.n_confirmed,
        **{
            f"{side}_{names[phase]}_s": one.medians.loc[phase, side]
            for phase in one.medians.index
            for side in SIDES
        },
        "tried": tried.where(tried.notna() & (tried != ""), None).to_dict("records"),
        "sentences": sentences(one),
        "command_lines": command_lines(one),
    }


def _draw(one: Tuned, figure: Figure) -> Figure:
    """The time of each choice over the default's: in the search as diamonds, in the confirmation as a square."""
    drawn = [row for row in one.tried.itertuples() if row.time_ratio > 0][:MOST_DRAWN]
    fill = partial(textwrap.fill, width=LABEL_LETTERS, break_on_hyphens=False)
    names = ["\n".join(map(fill, _name(row).split("\n"))) for row in drawn]
    ax = figure.subplots()
    figure.set_figheight(1.9 + 0.19 * sum(max(2, 1 + name.count("\n")) for name in names))
    for at, row in enumerate(drawn):
        marks: list[Any] = (
            [(at, "search", "D", row.time_ratio, row.time_ratio_low, row.time_ratio_high)]
            if at
            else []
        )
        if (gain := one.gain) and row.settings == one.won:
            marks += [
                (at - 0.3, "confirmation", "s", 1 / gain.estimate, 1 / gain.high, 1 / gain.low)
            ]
        for y, name, marker, x, left, right in marks:
            reach = [[max(0.0, x - left)], [max(0.0, right - x)]]
            style: dict[str, Any] = {"marker": marker, "ms": 6, "capsize": 3, "ls": ""}
            colour = canvas.COLOURS[name == "confirmation"]
            ax.errorbar([x], [y], xerr=reach, color=colour, label=f"{name}, 95 % interval", **style)
        text = " (".join(_ratio(row)) + ")" * (at > 0)
        ax.text(1.02, at, text, transform=ax.get_yaxis_transform(), va="center", fontsize=8)
    ax.axvline(1, color=canvas.GUIDE, lw=1.2)
    ax.set_yticks(range(len(drawn)), names, fontsize=8)
    ax.set_ylim(len(drawn) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.set_xlim(min(ax.get_xlim()[0], 0.95), max(ax.get_xlim()[1], 1.05))
    ax.set_xlabel("time / time with the default\n\u2190 faster | slower \u2192")
    some = f" (the {len(drawn)} fastest)" if len(drawn) == MOST_DRAWN else ""
    title = f"What was tried for {one.default.run.n_prompt:,} + {one.asked.n_gen:,} tokens{some}"
    canvas.finish([ax], f"{title}\n{text_setup.where([one.default])}", is_apart=True)
    return figure


KINDS = (
    Kind("tune", lambda one: isinstance(one, Record) and one.run.tuning is not None, chapters),
)
