"""Compare two or more sets of runs, or of requests to servers.

Runs are grouped by machine, build, model and settings; groups are never pooled. A row compares one
figure at one length. The intervals of all rows hold together with 95 %, so that a long table does
not find a difference by chance. Runs of `lab ab` are compared block by block, which cancels changes
of the machine's speed. Other sessions also differ because sessions of one machine vary, so a
verdict requires a difference that exceeds the spread between sessions: estimated from sessions of
equal setup on the same machine, or assumed. A session gets no verdict if at least half of its runs
were disturbed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core import figures, shown, stats
from lab.core.arguments import Share, share
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.core.results import Readable, measured_of
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.show import table, text_setup
from lab.show.session_spread import (
    Spread,
    between_sessions,
    default_spread,
    known_spreads,
    machine_of,
)
from lab.show.wording import percent, times

if TYPE_CHECKING:
    import pandas as pd

FASTER = "faster"
SLOWER = "slower"
ALIKE = "no difference"
TOO_FEW = "too few runs"
DISTURBED = "disturbed"
"""The verdicts on the second side of a comparison."""

MOST_GROUPS = 100  # setups or sessions that are compared: each takes some 10 ms
AT_LEAST = 0.01
"""Smaller differences count as none: memory layout, for example, changes the speed of a process by
about as much."""

WIDEST = 0.5
"""If the interval leaves a larger difference possible, the verdict is not "no difference"."""

SESSION = "session "  # begins the variant that is a session
FEWEST_RUNS = 3  # runs that a session needs for an interval of its ratio to another session

Spreads = Mapping[tuple[object, str], Spread]
"""By machine (`machine_of`) and figure."""


class Key(NamedTuple):
    """What a row compares."""

    figure: str  # of figures.labels
    n_prompt: int
    n_gen: int | None  # None for figures of prompts
    case: str | None  # of an experiment

    @property
    def label(self) -> str:
        """A figure that only one side has, in words."""
        label = f"{figures.labels()[self.figure]} at {self.n_prompt:,}"
        if self.case:
            label += f", {self.case}"
        if self.n_gen:
            label += f" with {self.n_gen:,} generated"
        return label


@dataclass(frozen=True)
class Group:
    """The timed runs of one setup, as rows of `table.runs`."""

    label: str  # what distinguishes the setup from those of the other groups
    rows: pd.DataFrame

    @property
    def is_server(self) -> bool:
        return text_setup.is_request(self.rows.iloc[0])


@dataclass(frozen=True)
class ComparedFigure:
    """One figure at one length, of two groups: the base and the other."""

    # The key, flat: `--json` writes these fields
    figure: str
    n_prompt: int
    n_gen: int | None
    case: str | None
    base: float  # median, in the unit of the figure
    other: float
    n_base: int  # runs, or blocks if `paired`
    n_other: int
    paired: bool  # compared block by block
    estimate: float  # the other's time over the base's
    ratio: Ratio | None  # the same with its interval; None if runs are too few for one
    verdict: str
    words: str  # the verdict as a part of a sentence
    doubts: tuple[str, ...] = ()  # of core/shown.py, of both sides

    @property
    def key(self) -> Key:
        return Key(self.figure, self.n_prompt, self.n_gen, self.case)

    @property
    def name(self) -> str:
        """The figure and its lengths, in words."""
        name = figures.labels()[self.figure]
        if self.case:
            name = f"{self.case}: {name}"
        if self.n_gen is None:
            return f"{name} of {self.n_prompt:,} tokens"
        return f"{name} after {self.n_prompt:,} prompt tokens ({self.n_gen:,} generated)"


@dataclass(frozen=True)
class Comparison:
    """One group against the base."""

    base: str  # labels of the groups
    other: str
    rows: tuple[ComparedFigure, ...]
    only_base: tuple[str, ...]  # figures that the other lacks, in words
    only_other: tuple[str, ...]
    spreads: tuple[str, ...] = ()  # how much sessions vary, in words


def compare(
    *records: Readable,
    base: str | None = None,
    at_least: Share = AT_LEAST,
    others: Readable = (),
) -> list[Comparison]:
    """Each setup in `records` against the first, or against the one whose label contains `base`.

        for row in lab.compare("mine.jsonl", "yours.jsonl")[0].rows:
            print(row.n_prompt, row.figure, row.words)

    `records` are records or results files; several are taken together. If all runs are of one
    setup, its sessions are compared. Differences below `at_least` count as none. `others` are more
    sessions of the same machines: they show how much sessions vary. LabError if there is nothing to
    compare.
    """
    measured = measured_of(records)
    spreads = known_spreads([*measured, *measured_of(others)])
    return compare_groups(groups(measured, base), share("at_least", at_least), spreads)


# The groups


def groups(records: Sequence[Record | RequestRecord], base: str | None = None) -> list[Group]:
    """The setups in order of appearance, but the one whose label contains `base` first.

    If all runs are of one setup, its sessions are the groups. Warm and short requests are left out.
    LabError if there is nothing to compare.
    """
    if not records:
        message = "There is nothing to compare: no records are given."
        raise LabError(message, "Measure some: lab measure")
    rows = rows_by_session(table.measured(table.runs(records)))
    if rows.empty:
        message = "There is nothing to compare: no run has a result."
        raise LabError(message, "See the errors of the runs: lab show RESULTS")
    setups = [Group(label, part) for label, part in table.setups(rows)]
    n_groups = len(setups)
    if n_groups == 1:
        n_groups = rows.session.nunique()
    if n_groups > MOST_GROUPS:
        raise LabError(
            f"{n_groups:,} setups or sessions are too many to compare: at most {MOST_GROUPS}.",
            "Give fewer results files.",
        )
    if len(setups) < 2:
        raise LabError(
            "There is nothing to compare: all runs are of one setup and one session.",
            "Give results of another machine, model or setting, or measure two settings with "
            "lab ab.",
        )
    if rows.block.notna().all():  # of a trial: A is the base
        setups.sort(key=lambda group: str(group.rows.variant.iloc[0]))
    return setups if base is None else _with_base_first(setups, base)


def _with_base_first(setups: Sequence[Group], base: str) -> list[Group]:
    matches = [group for group in setups if base in group.label]
    if len(matches) != 1:
        number = f"{len(matches)} groups" if matches else "no group"
        labels = "; ".join(group.label for group in setups)
        message = f"--base {base!r} names {number}."
        raise LabError(message, f"Give a part of one of these: {labels}")
    return matches + [group for group in setups if group is not matches[0]]


def _compares_sessions(rows: pd.DataFrame) -> bool:
    """Whether sessions are compared: there are several, and all are of one setup."""
    n_sessions = rows.session.nunique()
    return 2 <= n_sessions <= MOST_GROUPS and len(table.setups(rows)) == 1


def rows_by_session(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows; if sessions are compared, the session is their variant."""
    if not _compares_sessions(rows):
        return rows
    return rows.assign(variant=SESSION + rows.session)


def by_session(records: Sequence[Record]) -> list[Record]:
    """The same records; if sessions are compared, the session is their variant."""
    if not _compares_sessions(table.measured(table.runs(records))):
        return list(records)
    separate = []
    for record in records:
        run = dataclasses.replace(record.run, variant=f"{SESSION}{record.session}")
        separate.append(dataclasses.replace(record, run=run))
    return separate


def differences(setups: Sequence[Group]) -> dict[str, Sequence[object]]:
    """The fields of the setup in which groups differ, with each group's value.

    For None see `text_setup.unset`. Instruction sets of the CPU are shortened to those that not
    all groups have. Names of sessions are no difference.
    """
    differing: dict[str, Sequence[object]] = {}
    for name in text_setup.fields(setups[0].rows):
        values = [_first_value(group, name) for group in setups]
        comparable = []
        for group, value in zip(setups, values, strict=True):
            if _has_field(group, name):
                comparable.append(value)
        if len(set(comparable)) < 2:
            continue
        if name == "variant" and any(_names_session(variant) for variant in values):
            continue
        if name == "system_info" and None not in values:
            differing["CPU instructions of one side only"] = instructions_of_one_side(values)
        else:
            differing[name] = values
    return differing


def _first_value(group: Group, name: str) -> Any:
    """The value of a field as a number or text of Python; None for NaN."""
    value = group.rows[name].tolist()[0]
    if value != value:  # NaN
        return None
    if name == "sweep_every" and value is not None:
        return int(value)  # a float in a column with NaN
    return value


def _has_field(group: Group, name: str) -> bool:
    """Whether the runs of a group can have a value of a field: some only servers have, others only
    engines."""
    if name in text_setup.SERVING and name != "server":
        return group.is_server
    if name in text_setup.of_engine_only():
        return not group.is_server
    return True


def _names_session(variant: str | None) -> bool:
    """Whether a variant is none of a trial."""
    return variant is None or variant.startswith(SESSION)


def instructions_of_one_side(texts: Sequence[str]) -> list[str]:
    """The instruction sets of each text, such as "CPU : AVX2 = 1 | ...", that not all texts
    have."""
    flags_of_texts = []
    for text in texts:
        flags = [flag.strip() for flag in text.replace(" : ", " | ").split("|")]
        flags_of_texts.append([flag for flag in flags if flag])
    common = set.intersection(*map(set, flags_of_texts))
    sides = []
    for flags in flags_of_texts:
        special = [flag.removesuffix(" = 1") for flag in flags if flag not in common]
        sides.append(", ".join(special) or "none")
    return sides


# The rows


def compare_groups(
    setups: Sequence[Group], at_least: float = AT_LEAST, spreads: Spreads | None = None
) -> list[Comparison]:
    """Each group against the first. All intervals hold together with 95 %.

    `spreads`: measured ones (`known_spreads`); otherwise they are assumed.
    """
    base = setups[0]
    candidates = setups[1:]
    has_server = any(group.is_server for group in setups)
    times_of_pairs = []
    n_rows = 0
    for group in candidates:
        names = _figures_to_compare(base, group, has_server)
        of_base = cases(base.rows, names)
        of_group = cases(group.rows, names)
        times_of_pairs.append((of_base, of_group))
        n_rows += len(of_base.keys() & of_group.keys())
    confidence = 1 - (1 - stats.CONFIDENCE) / max(1, n_rows)  # of each row (Bonferroni)
    comparisons = []
    for group, (of_base, of_group) in zip(candidates, times_of_pairs, strict=True):
        rows = []
        sources = set()
        for key in of_base:
            if key not in of_group:
                continue
            base_side = _Side(of_base[key], _spread(base, key.figure, spreads or {}))
            other_side = _Side(of_group[key], _spread(group, key.figure, spreads or {}))
            row = _row(key, base_side, other_side, confidence, at_least)
            rows.append(row)
            if not row.paired:
                sources.add(_spread_in_words(key.figure, base_side.spread))
                sources.add(_spread_in_words(key.figure, other_side.spread))
        comparisons.append(
            Comparison(
                base.label,
                group.label,
                tuple(rows),
                only_base=tuple(key.label for key in of_base if key not in of_group),
                only_other=tuple(key.label for key in of_group if key not in of_base),
                spreads=tuple(sorted(sources)),
            )
        )
    return comparisons


def _figures_to_compare(base: Group, group: Group, has_server: bool) -> list[str]:
    """The compared figures of two groups.

    TTFT is left out without a server. Decode compute takes the place of TPOT if a side lacks TPOT,
    as imported results do.
    """
    left_out = [figures.DECODE_COMPUTE.name]
    for side in (base, group):
        if side.rows.tpot_ms.isna().all() and side.rows.step_ms.notna().any():
            left_out = [figures.TPOT.name]
    if not has_server:
        left_out.append(figures.TTFT.name)
    return [name for name in figures.labels() if name not in left_out]


def cases(rows: pd.DataFrame, names: Sequence[str]) -> dict[Key, pd.DataFrame]:
    """The times of every figure at every length and case: a row each run, its time in `value`.

    In the order of plain runs and experiments, lengths, cases, and figures. Only positive times.
    """
    import pandas as pd

    columns = ["session", "block", "disturbed", "n_prompt", "n_gen", "case"]
    values = rows.melt(
        id_vars=columns, value_vars=rows.columns.intersection(names), var_name="figure"
    )
    of_prompt = [figure.name for figure in figures.COMPARED if figure.is_of_prompt]
    values["n_gen"] = values.n_gen.mask(values.figure.isin(of_prompt))
    values = values[values.value > 0]
    tables: dict[Key, pd.DataFrame] = {}
    by_key = values.groupby(["figure", "n_prompt", "n_gen", "case"], sort=False, dropna=False)
    for (figure, n_prompt, n_gen, case), part in by_key:
        key = Key(figure, int(n_prompt), n_gen=None, case=None)
        if pd.notna(n_gen):
            key = key._replace(n_gen=int(n_gen))
        if pd.notna(case):
            key = key._replace(case=case)
        tables[key] = part
    cases_in_order = values.case.dropna().unique().tolist()

    def order(key: Key) -> tuple[object, ...]:
        place = -1
        if key.case is not None:
            place = cases_in_order.index(key.case)
        return place >= 0, key.n_prompt, place, key.n_gen or 0, names.index(key.figure)

    return {key: tables[key] for key in sorted(tables, key=order)}


def _spread(group: Group, figure: str, spreads: Spreads) -> Spread:
    measured = spreads.get((machine_of(group.rows), figure))
    return measured or default_spread(group.rows.iloc[0])


def _spread_in_words(figure: str, spread: Spread) -> str:
    return f"{figures.labels()[figure]}: {percent(math.expm1(spread.sd))} ({spread.source})"


class _Side(NamedTuple):
    """What one group has for a row."""

    times: pd.DataFrame  # as of `cases`
    spread: Spread  # between sessions of its machine

    def sessions(self) -> list[list[float]]:
        """The times of each session."""
        return [rows.value.tolist() for _, rows in self.times.groupby("session", sort=False)]

    def of_enough_runs(self) -> _Side:
        """The same without sessions that have too few runs for an interval."""
        n_runs = self.times.groupby("session").value.transform("size")
        return self._replace(times=self.times[n_runs >= FEWEST_RUNS])

    def blocks(self) -> pd.Series:
        """The mean time of each block; the order ABBA in a block cancels a steady drift."""
        return self.times.groupby(["session", "block"]).value.agg(statistics.geometric_mean)


class _Estimate(NamedTuple):
    """The ratio of two sides, and the times that it comes from."""

    base: list[float]
    other: list[float]
    is_paired: bool
    estimate: float
    ratio: Ratio | None  # with an interval
    too_few: str  # why there is no interval


def _row(
    key: Key, base: _Side, candidate: _Side, confidence: float, at_least: float
) -> ComparedFigure:
    """One figure of two sides: block by block if they were measured side by side."""
    compared = _by_block(base, candidate, confidence)
    if compared is None:
        base, candidate = _sides_that_count(base, candidate)
        compared = _by_session(base, candidate, confidence)
    doubts = _doubts(base, candidate, compared)
    ratio = compared.ratio
    if shown.DISTURBED in doubts:
        ratio = None
        outcome = DISTURBED
        words = (
            f"unclear, at least half of the runs were disturbed: {about(compared.estimate)}"
        )
    elif ratio is None:
        outcome = TOO_FEW
        words = f"{compared.too_few}: {about(compared.estimate)}"
    else:
        outcome, words = verdict(ratio, at_least)
    return ComparedFigure(
        **key._asdict(),
        base=statistics.median(compared.base),
        other=statistics.median(compared.other),
        n_base=len(compared.base),
        n_other=len(compared.other),
        paired=compared.is_paired,
        estimate=compared.estimate,
        ratio=ratio,
        verdict=outcome,
        words=words,
        doubts=doubts,
    )


def _by_block(base: _Side, candidate: _Side, confidence: float) -> _Estimate | None:
    """Compare the blocks that both sides have; None if there are none."""
    base_means = base.blocks()
    other_means = candidate.blocks()
    blocks = base_means.index.intersection(other_means.index)
    if blocks.empty:
        return None
    base_times = base_means[blocks].tolist()
    other_times = other_means[blocks].tolist()
    ratios = [y / x for x, y in zip(base_times, other_times, strict=True)]
    n_needed = stats.fewest_for_interval(confidence)
    return _Estimate(
        base_times,
        other_times,
        is_paired=True,
        estimate=statistics.median(ratios),
        ratio=stats.paired_ratio(base_times, other_times, confidence),
        too_few=f"unclear, {plural(len(blocks), 'block')}; an interval needs {n_needed}",
    )


def _sides_that_count(base: _Side, candidate: _Side) -> tuple[_Side, _Side]:
    """The sessions with enough runs for an interval, or all if a side has none of them."""
    of_base = base.of_enough_runs()
    of_other = candidate.of_enough_runs()
    if of_base.times.empty or of_other.times.empty:
        return base, candidate
    return of_base, of_other


def _by_session(base: _Side, candidate: _Side, confidence: float) -> _Estimate:
    """Compare the sessions of both sides."""
    base_sessions = base.sessions()
    other_sessions = candidate.sessions()
    n_base = max(map(len, base_sessions))
    n_other = max(map(len, other_sessions))
    ratio = None
    if min(n_base, n_other) >= FEWEST_RUNS:
        ratio = between_sessions(
            (base_sessions, other_sessions), (base.spread, candidate.spread), confidence
        )
    numbers = f"{n_base} against {plural(n_other, 'run')}"
    return _Estimate(
        list(itertools.chain(*base_sessions)),
        list(itertools.chain(*other_sessions)),
        is_paired=False,
        estimate=math.exp(_centre(other_sessions) - _centre(base_sessions)),
        ratio=ratio,
        too_few=f"unclear, {numbers}; an interval needs {FEWEST_RUNS} each",
    )


def _centre(sessions: Sequence[Sequence[float]]) -> float:
    """The mean over sessions of the median of logarithms."""
    return statistics.fmean(statistics.median(map(math.log, session)) for session in sessions)


def _doubts(base: _Side, candidate: _Side, compared: _Estimate) -> tuple[str, ...]:
    """The doubts of a row: of each session's runs, and of the interval."""
    doubts: list[tuple[str, ...]] = []
    for side in (base, candidate):
        for _, rows in side.times.groupby("session"):
            doubts.append(shown.of_runs(len(rows), rows.disturbed.sum(), fewest=0))
    if compared.ratio is None:
        doubts.append((shown.FEW,))
    is_assumed = base.spread.is_assumed and candidate.spread.is_assumed
    if is_assumed and not compared.is_paired:
        doubts.append((shown.ASSUMED,))
    return shown.all_of(doubts)


# The verdict


def about(estimate: float) -> str:
    """A ratio in words, without a verdict."""
    if max(estimate, 1 / estimate) < 1.05:
        return "about the same time"
    if estimate > 1:
        return f"about {times(estimate)} the time"
    return f"about {times(1 / estimate)} as fast"


def verdict(ratio: Ratio, at_least: float) -> tuple[str, str]:
    """The verdict that the interval of a ratio allows, and its words."""
    if ratio.low > 1 + at_least:
        return SLOWER, f"slower, {times(ratio.estimate)} the time"
    if ratio.high < 1 / (1 + at_least):
        return FASTER, f"faster, {times(1 / ratio.estimate)} as fast"
    contains_1 = ratio.low <= 1 <= ratio.high
    largest = max(ratio.high, 1 / ratio.low) - 1  # the largest difference that is possible
    if largest > WIDEST:
        place = "contains 1" if contains_1 else "comes close to 1"
        return TOO_FEW, f"unclear, the interval {place}: {about(ratio.estimate)}"
    if contains_1:
        return ALIKE, f"no difference larger than {percent(largest)}"
    if ratio.low > 1:
        least = percent(ratio.low - 1)
        reach = f"slower by {least} to {percent(ratio.high - 1)}"
    else:
        least = percent(1 / ratio.high - 1)
        reach = f"faster by {least} to {percent(1 / ratio.low - 1)}"
    return ALIKE, f"no difference clearly above {percent(at_least)}: {reach}"
