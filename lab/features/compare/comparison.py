"""Compares two or more sets of runs, or of requests to servers.

Runs are grouped by machine, build, model and settings. Groups are never pooled, and the fields in which they differ are
named. A row compares one figure at one length. The intervals of all rows hold together with 95 %: with more rows each
interval is wider, so that a long table does not find a difference by chance. Runs of `lab ab` were measured side by
side in blocks and are compared block by block, which cancels changes of the machine's speed. Other sessions also differ
because sessions of one machine vary (spread.py), so a verdict requires a larger difference. A session gets no verdict
if at least half of its runs were disturbed.

The verdict is faster or slower if the whole interval differs from 1 by at least a given share. Other verdicts say how
large a difference can still be, or how large it seems and why it is unclear.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core import shown, stats
from lab.core.lists import grouped, plural
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.features.compare.spread import (
    FIGURE_NAMES,
    Key,
    Side,
    Spread,
    compared_figures,
    is_second_choice,
    known_spreads,
    sides_of,
    without,
)
from lab.features.serve import load_figures
from lab.show import request_table, setup_columns, table
from lab.show.wording import percent, times

if TYPE_CHECKING:
    import pandas as pd

FASTER, SLOWER, ALIKE, TOO_FEW, DISTURBED = "faster", "slower", "no difference", "too few runs", "disturbed"

WIDEST = 0.5
"""If a difference of more than this is possible, the verdict is not "no difference"."""


NO_OVERLAP = "the runs of the two sides do not overlap"
"""Added to the words of a row if each run of one side took more than all runs of the other."""


def about(estimate: float) -> str:
    """A ratio in words, without a verdict."""
    if max(estimate, 1 / estimate) < 1.05:
        return "about the same time"
    return f"about {times(estimate)} the time" if estimate > 1 else f"about {times(1 / estimate)} as fast"


def verdict(ratio: Ratio, at_least: float) -> tuple[str, str]:
    """The verdict that the interval of a ratio allows, and its words."""
    if ratio.low > 1 + at_least:
        return SLOWER, f"slower, {times(ratio.estimate)} the time"
    if ratio.high < 1 / (1 + at_least):
        return FASTER, f"faster, {times(1 / ratio.estimate)} as fast"
    largest = max(ratio.high, 1 / ratio.low) - 1
    if largest > WIDEST:
        return TOO_FEW, f"unclear, too few runs or too much spread: {about(ratio.estimate)}"
    if ratio.high < 1 or ratio.low > 1:
        ends = sorted((ratio.low, ratio.high) if ratio.low > 1 else (1 / ratio.high, 1 / ratio.low))
        word = SLOWER if ratio.low > 1 else FASTER
        by = " to ".join(percent(end - 1) for end in ends)
        return ALIKE, f"no difference clearly above {percent(at_least)}: {word} by {by}"
    return ALIKE, f"no difference larger than {percent(largest)}"


AT_LEAST = 0.01
"""Smaller differences count as none: memory layout, for example, changes the speed of a process by about as much."""

FEWEST_RUNS = 3
"""Runs that a session needs for an interval of its ratio to another."""


@dataclass(frozen=True)
class Group:
    """The timed runs of one setup, as rows of `table.runs`. The label names its differences from the others."""

    label: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class ComparedFigure:
    """One figure at one length. `estimate` is the other's time divided by the base's.

    `ratio` is the same with its interval; None if runs are too few for one. `n_base` and `n_other` count runs, or
    blocks if `paired`.
    """

    n_prompt: int
    n_gen: int | None  # None for prefill
    figure: str  # of FIGURE_NAMES
    base: float  # medians
    other: float
    n_base: int
    n_other: int
    paired: bool
    estimate: float
    ratio: Ratio | None
    verdict: str
    words: str
    lever: str | None = None  # of an experiment
    doubts: tuple[str, ...] = ()  # some of core/shown.py, of both sides


@dataclass(frozen=True)
class Comparison:
    """One group against the base.

    `only_base` and `only_other` name the figures that the other lacks. `spreads` describe the standard deviation
    between sessions of one machine, which a verdict takes into account.
    """

    base: str
    other: str
    rows: tuple[ComparedFigure, ...]
    only_base: tuple[str, ...]
    only_other: tuple[str, ...]
    spreads: tuple[str, ...] = ()


def groups(records: Sequence[Record | RequestRecord], base: str | None = None) -> list[Group]:
    """The setups in order of appearance, but the one whose label contains `base` first.

    If all runs are of one setup, its sessions are the groups. Warm and short requests are left out. For loads, rounds
    are compared (load_figures.py). LabError if there is nothing to compare.
    """
    if not records:
        raise LabError("There is nothing to compare: no records are given.", "Measure some: lab measure")
    rows = sessions_apart(load_figures.rows(records))
    setups = [Group(label, part) for label, part in table.setups(rows)] if len(rows) else []
    if setups and rows.block.notna().all():  # of a trial: A is the base
        setups.sort(key=lambda group: str(group.rows.variant.iloc[0]))
    if len(setups) < 2:
        raise LabError(
            "There is nothing to compare: all runs are of one setup and one session.",
            "Give results of another machine, model or setting, or measure two settings with lab ab.",
        )
    if base is not None:
        chosen = [group for group in setups if base in group.label]
        if len(chosen) != 1:
            labels = "; ".join(group.label for group in setups)
            many = "no group" if not chosen else f"{len(chosen)} groups"
            raise LabError(f"--base {base!r} names {many}.", f"Give a part of one of these: {labels}")
        setups = chosen + [group for group in setups if group is not chosen[0]]
    return setups


def by_session(records: Sequence[Record]) -> list[Record]:
    """As `sessions_apart`, for records."""
    if not _is_one_setup(request_table.measured(table.runs(records))):
        return list(records)
    return [
        dataclasses.replace(record, run=dataclasses.replace(record.run, variant=f"session {record.session}"))
        for record in records
    ]


def sessions_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows; if all are of one setup, their sessions become variants, so that they can be compared."""
    if not _is_one_setup(rows):
        return rows
    return rows.assign(variant=[f"session {session}" for session in rows.session])


def _is_one_setup(rows: pd.DataFrame) -> bool:
    """Whether rows are of several sessions of one setup."""
    return not rows.empty and len(table.setups(rows)) == 1 and rows.session.nunique() > 1


def differences(setups: Sequence[Group]) -> dict[str, list[Any]]:
    """The fields of the setup in which groups differ, with each group's value; None: see `setup_columns.unset`.

    Fields that only engines or only servers have are left out if all of those agree.
    """
    is_served = [setup_columns.is_request(group.rows.iloc[0]) for group in setups]
    values, kept = {}, list[str]()
    for name in setup_columns.fields(setups[0].rows):
        found = [group.rows[name].tolist()[0] for group in setups]  # tolist: numbers of Python
        own = values[name] = [None if value != value else value for value in found]
        if name == "sweep_every":
            own[:] = [None if every is None else int(every) for every in own]
        if any(is_served) and not all(is_served):  # fields of one kind are compared within that kind
            if name in setup_columns.of_engine_only():
                own = [value for value, served in zip(own, is_served, strict=True) if not served]
            elif name in setup_columns.SERVING and name != "server":
                own = [value for value, served in zip(own, is_served, strict=True) if served]
        kept += [name] if len(set(own)) > 1 else []
    is_setting = all(name is not None and not name.startswith("session ") for name in values["variant"])
    if any(group.rows.block.isna().all() for group in setups) and not is_setting:
        kept = [name for name in kept if name != "variant"]  # neither of a trial nor imported: sessions
    return {name: values[name] for name in kept}


def compare(
    records: Sequence[Record | RequestRecord],
    base: str | None = None,
    at_least: float = AT_LEAST,
    others: Sequence[Record | RequestRecord] = (),
) -> list[Comparison]:
    """Each setup in `records` against the first, or against the one whose label contains `base`.

        for row in lab.compare(lab.read(["mine.jsonl", "yours.jsonl"]).records)[0].rows:
            print(row.n_prompt, row.figure, row.words)

    If all runs are of one setup, its sessions are compared. Differences below `at_least` count as none. `others` are
    more sessions of the same machines: they show how much sessions vary. LabError if there is nothing to compare.
    """
    return compare_groups(groups(records, base), at_least, known_spreads([*records, *others]))


def compare_groups(
    setups: Sequence[Group],
    at_least: float = AT_LEAST,
    known: Mapping[tuple[Any, str], Spread] | None = None,
    confidence: float = stats.CONFIDENCE,
) -> list[Comparison]:
    """Each group against the first. All intervals hold together with `confidence`; `known` are `known_spreads`."""
    figures = compared_figures([group.rows for group in setups])
    base, *others = [sides_of(group.rows, dict(known or {}), figures) for group in setups]
    compared = []
    for other in others:
        keys = [key for key in base if key in other]
        compared.append([key for key in keys if not is_second_choice(key, keys)])
    of_one_row = 1 - (1 - confidence) / max(1, sum(map(len, compared)))
    comparisons = []
    for group, other, keys in zip(setups[1:], others, compared, strict=True):
        rows = tuple(_row(key, base[key], other[key], of_one_row, at_least) for key in keys)
        unpaired = [key for key, row in zip(keys, rows, strict=True) if not row.paired]
        spreads = {(FIGURE_NAMES[key[0]], side[key].spread) for key in unpaired for side in (base, other)}
        comparisons.append(
            Comparison(
                setups[0].label,
                group.label,
                rows,
                only_base=without(base, keys),
                only_other=without(other, keys),
                spreads=tuple(f"{figure}: {spread.words}" for figure, spread in sorted(spreads, key=str)),
            )
        )
    return comparisons


def _row(key: Key, base: Side, other: Side, confidence: float, at_least: float) -> ComparedFigure:
    """One figure of two sides: by block if they were measured side by side, otherwise by session."""
    blocks = [unit for unit in base.values if unit in other.values and unit[1] is not None]
    ratio: Ratio | None = None
    if blocks:  # the mean of the runs of a block, in the order ABBA, cancels a steady drift
        a, b = ([statistics.geometric_mean(side.values[block]) for block in blocks] for side in (base, other))
        estimate = math.exp(statistics.median(math.log(y / x) for x, y in zip(a, b, strict=True)))
        ratio = stats.paired_ratio(a, b, confidence)
        too_few = f"unclear, {plural(len(blocks), 'block')}; an interval needs {stats.fewest_for_interval(confidence)}"
    else:
        by_session = [grouped(side.values, lambda unit: unit[0]).values() for side in (base, other)]
        units = zip((base, other), by_session, strict=True)
        sides = [[_flat(side.values[unit] for unit in own) for own in of_side] for side, of_side in units]
        n_base, n_other = (max(map(len, of_side)) for of_side in sides)
        too_few = f"unclear, {n_base} against {plural(n_other, 'run')}; an interval needs {FEWEST_RUNS} each"
        if min(n_base, n_other) < FEWEST_RUNS:
            means = [statistics.fmean(statistics.median(map(math.log, one)) for one in of_side) for of_side in sides]
            estimate = math.exp(means[1] - means[0])
        else:  # only sessions with enough runs count
            sides = [[values for values in of_side if len(values) >= FEWEST_RUNS] for of_side in sides]
            spreads = (base.spread.sd, base.spread.df), (other.spread.sd, other.spread.df)
            ratio = stats.between_sessions((sides[0], sides[1]), spreads, confidence)
            estimate = ratio.estimate
        a, b = map(_flat, sides)
    is_assumed = not blocks and math.isinf(min(base.spread.df, other.spread.df))
    own = [[] if ratio else [shown.FEW], [shown.ASSUMED] if is_assumed else []]
    doubts = shown.all_of([base.doubts, other.doubts, *own])
    if shown.DISTURBED in doubts:
        ratio, told, words = None, DISTURBED, f"unclear, at least half of the runs were disturbed: {about(estimate)}"
    elif ratio is None:
        told, words = TOO_FEW, f"{too_few}: {about(estimate)}"
    else:
        told, words = verdict(ratio, at_least)
    if not blocks and told not in (ALIKE, DISTURBED) and min(len(a), len(b)) > 1:
        words += f"; {NO_OVERLAP}" if max(a) < min(b) or max(b) < min(a) else ""
    return ComparedFigure(
        n_prompt=key[1],
        n_gen=key[2],
        figure=key[0],
        lever=key[3],
        base=statistics.median(a),
        other=statistics.median(b),
        n_base=len(a),
        n_other=len(b),
        paired=bool(blocks),
        estimate=estimate,
        ratio=ratio,
        verdict=told,
        words=words,
        doubts=doubts,
    )


def _flat(parts: Iterable[Sequence[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(parts))
