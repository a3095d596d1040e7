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

from lab.core import experiments, shown, stats
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord
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

WIDEST = (
    0.5  # if a difference of more than this is possible, the verdict is not "no difference"
)
AT_LEAST = 0.01
"""Smaller differences count as none: memory layout, for example, changes the speed of a process by
about as much."""

FEWEST_RUNS = 3  # runs that a session needs for an interval of its ratio to another
FIGURE_NAMES = {
    "prefill_s": "prefill",
    "ttft_s": "TTFT",
    "tpot_ms": "TPOT",
    "decode_ms": "decode compute",
}
"""The figures of plain runs that are compared. TTFT is compared only if a side is a server."""

OF_PROMPT = ("prefill_s", "ttft_s")  # they do not depend on the number of generated tokens


def figure_names() -> dict[str, str]:
    """The compared figures in words; those of experiments come last."""
    return FIGURE_NAMES | experiments.figure_names()


class Key(NamedTuple):
    """What a row compares."""

    figure: str  # of figure_names
    n_prompt: int
    n_gen: int | None  # None for figures of prompts
    case: str | None  # of an experiment

    @property
    def label(self) -> str:
        """A figure that only one side has, in words."""
        label = f"{figure_names()[self.figure]} at {self.n_prompt:,}"
        if self.case:
            label += f", {self.case}"
        if self.n_gen:
            label += f" with {self.n_gen:,} generated"
        return label


@dataclass(frozen=True)
class Group:
    """The timed runs of one setup, as rows of `table.runs`.

    The label names its differences from the others.
    """

    label: str
    rows: pd.DataFrame

    @property
    def is_server(self) -> bool:
        return text_setup.is_request(self.rows.iloc[0])


@dataclass(frozen=True)
class ComparedFigure:
    """One figure at one length, with medians of `base` and `other`.

    `estimate`: the other's time over the base's.
    """

    figure: str  # of figure_names
    n_prompt: int
    n_gen: int | None  # None for prefill
    case: str | None  # of an experiment
    base: float
    other: float
    n_base: int  # runs, or blocks if `paired`
    n_other: int
    paired: bool
    estimate: float
    ratio: Ratio | None  # with its interval; None if runs are too few for one
    verdict: str
    words: str
    doubts: tuple[str, ...] = ()  # of core/shown.py, of both sides

    @property
    def name(self) -> str:
        """The figure and its lengths, in words."""
        name = figure_names()[self.figure]
        if self.case:
            name = f"{self.case}: {name}"
        if self.n_gen is None:
            return f"{name} of {self.n_prompt:,} tokens"
        return f"{name} after {self.n_prompt:,} prompt tokens ({self.n_gen:,} generated)"


@dataclass(frozen=True)
class Comparison:
    """One group against the base: rows, figures that only one has, and the spreads of sessions."""

    base: str
    other: str
    rows: tuple[ComparedFigure, ...]
    only_base: tuple[str, ...]
    only_other: tuple[str, ...]
    spreads: tuple[str, ...] = ()


def compare(
    records: Sequence[Record | RequestRecord],
    base: str | None = None,
    at_least: float = AT_LEAST,
    others: Sequence[Record | RequestRecord] = (),
) -> list[Comparison]:
    """Each setup in `records` against the first, or against the one whose label contains `base`.

        for row in lab.compare(lab.read(["mine.jsonl", "yours.jsonl"]).records)[0].rows:
            print(row.n_prompt, row.figure, row.words)

    If all runs are of one setup, its sessions are compared. Differences below `at_least` count as
    none. `others` are more sessions of the same machines: they show how much sessions vary.
    LabError if there is nothing to compare.
    """
    return compare_groups(groups(records, base), at_least, known_spreads([*records, *others]))


def groups(records: Sequence[Record | RequestRecord], base: str | None = None) -> list[Group]:
    """The setups in order of appearance, but the one whose label contains `base` first.

    If all runs are of one setup, its sessions are the groups. Warm and short requests are left out.
    LabError if there is nothing to compare.
    """
    if not records:
        message = "There is nothing to compare: no records are given."
        raise LabError(message, "Measure some: lab measure")
    rows = sessions_apart(table.measured(table.runs(records)))
    setups = [Group(label, part) for label, part in table.setups(rows)] if len(rows) else []
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


def by_session(records: Sequence[Record]) -> list[Record]:
    """As `sessions_apart`, for records."""
    rows = table.measured(table.runs(records))
    if sessions_apart(rows) is rows:
        return list(records)
    separate = []
    for record in records:
        run = dataclasses.replace(record.run, variant=f"session {record.session}")
        separate.append(dataclasses.replace(record, run=run))
    return separate


def sessions_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows; if all are of one setup, their sessions become variants to be compared."""
    if rows.empty or rows.session.nunique() < 2 or len(table.setups(rows)) > 1:
        return rows
    return rows.assign(variant="session " + rows.session)


def differences(setups: Sequence[Group]) -> dict[str, list[Any]]:
    """The fields of the setup in which groups differ, with each group's value.

    For None see `text_setup.unset`.
    """
    values: dict[str, list[Any]] = {}
    for name in text_setup.fields(setups[0].rows):
        of_groups = [_first_value(group, name) for group in setups]
        if _differ(name, of_groups, setups):
            values[name] = of_groups
    names_sessions = any(
        name is None or str(name).startswith("session ") for name in values.get("variant", ())
    )
    is_no_trial = any(group.rows.block.isna().all() for group in setups)
    if names_sessions and is_no_trial:
        del values["variant"]
    texts = values.get("system_info", [None])
    if None not in texts:
        del values["system_info"]
        values["CPU instructions of one side only"] = _instructions_of_one_side(texts)
    return values


def _first_value(group: Group, name: str) -> Any:
    """The value of a field as a number or text of Python; None for NaN."""
    value = group.rows[name].tolist()[0]
    if value != value:  # NaN
        return None
    return int(value) if name == "sweep_every" and value else value


def _differ(name: str, values: Sequence[Any], setups: Sequence[Group]) -> bool:
    """Whether groups differ in a field; what only engines or only servers have is compared among
    them."""
    is_of_server = name in text_setup.SERVING and name != "server"
    is_of_one_kind = is_of_server or name in text_setup.of_engine_only()
    distinct = set()
    for value, group in zip(values, setups, strict=True):
        if not is_of_one_kind or group.is_server == is_of_server:
            distinct.add(value)
    return len(distinct) > 1


def _instructions_of_one_side(texts: Sequence[str]) -> list[str]:
    """What differs in texts such as "CPU : AVX2 = 1 | ..."."""
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


def compare_groups(
    setups: Sequence[Group],
    at_least: float = AT_LEAST,
    spreads: Mapping[tuple[Any, str], Spread] | None = None,
    confidence: float = stats.CONFIDENCE,
) -> list[Comparison]:
    """Each group against the first. All intervals hold together with `confidence`.

    `spreads` are those of `known_spreads`.
    """
    base = setups[0]
    figures = [name for name in figure_names() if any(name in group.rows for group in setups)]
    if not any(group.is_server for group in setups):
        figures.remove("ttft_s")
    pairs: list[tuple[Group, dict[Key, pd.DataFrame], dict[Key, pd.DataFrame]]] = []
    n_rows = 0
    for group in setups[1:]:
        names = _compared_figures(figures, base, group)
        of_base = cases(base.rows, names)
        of_group = cases(group.rows, names)
        pairs.append((group, of_base, of_group))
        n_rows += len(of_base.keys() & of_group.keys())
    row_confidence = 1 - (1 - confidence) / max(1, n_rows)
    comparisons = []
    for group, of_base, of_group in pairs:
        rows: list[ComparedFigure] = []
        sources: set[str] = set()
        for key in of_base:
            if key not in of_group:
                continue
            row_spreads = [_spread(side, key.figure, spreads or {}) for side in (base, group)]
            sides = (of_base[key], of_group[key])
            row = _row(key, sides, row_spreads, row_confidence, at_least)
            rows.append(row)
            if not row.paired:
                sources |= {_source(key.figure, spread) for spread in row_spreads}
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


def _compared_figures(figures: Sequence[str], base: Group, group: Group) -> list[str]:
    """TPOT, or decode compute if a side lacks TPOT, as imported results do."""
    lacks_tpot = False
    for side in (base, group):
        has_tpot = side.rows.tpot_ms.notna().any()
        has_compute = side.rows.decode_ms.notna().any()
        lacks_tpot = lacks_tpot or (has_compute and not has_tpot)
    left_out = "tpot_ms" if lacks_tpot else "decode_ms"
    return [name for name in figures if name != left_out]


def _spread(group: Group, figure: str, spreads: Mapping[tuple[Any, str], Spread]) -> Spread:
    measured = spreads.get((machine_of(group.rows), figure))
    return measured or default_spread(group.rows.iloc[0])


def _source(figure: str, spread: Spread) -> str:
    return f"{figure_names()[figure]}: {percent(math.expm1(spread.sd))} ({spread.source})"


def cases(rows: pd.DataFrame, figures: Sequence[str]) -> dict[Key, pd.DataFrame]:
    """The positive values of every figure at every length and case, a row each.

    In the order of plain runs and experiments, lengths, and figures.
    """
    columns = ["session", "block", "disturbed", "n_prompt", "n_gen", "case"]
    values = rows.melt(columns, rows.columns.intersection(figures), "figure")
    n_gen = values.n_gen.mask(values.figure.isin(OF_PROMPT)).fillna(-1)
    values = values[values.value > 0].assign(n_gen=n_gen, case=values.case.fillna(""))
    order_of_cases = list(dict.fromkeys(values.case))
    tables: dict[Key, pd.DataFrame] = {}
    for key, part in values.groupby(["figure", "n_prompt", "n_gen", "case"], sort=False):
        figure, n_prompt, n_generated, case = key
        n_gen_of_key = None if n_generated < 0 else int(n_generated)
        tables[Key(figure, int(n_prompt), n_gen_of_key, case or None)] = part

    def order(key: Key) -> tuple[Any, ...]:
        case = key.case or ""
        place = order_of_cases.index(case)
        return case != "", key.n_prompt, place, key.n_gen or 0, figures.index(key.figure)

    return {key: tables[key] for key in sorted(tables, key=order)}


class _Estimate(NamedTuple):
    """The ratio of two sides: by block, or by session."""

    base: list[float]
    other: list[float]
    estimate: float
    ratio: Ratio | None
    too_few: str  # the words if there is no interval


def _row(
    key: Key,
    sides: tuple[pd.DataFrame, pd.DataFrame],
    spreads: Sequence[Spread],
    confidence: float,
    at_least: float,
) -> ComparedFigure:
    """One figure of two sides: by block if they were measured side by side, otherwise by
    session."""
    of_blocks = _by_block(sides, confidence)
    is_paired = of_blocks is not None
    compared = of_blocks or _by_session(sides, spreads, confidence)
    is_assumed = not is_paired and math.isinf(min(spread.df for spread in spreads))
    doubts = _doubts(sides, has_interval=compared.ratio is not None, is_assumed=is_assumed)
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
        *key,
        base=statistics.median(compared.base),
        other=statistics.median(compared.other),
        n_base=len(compared.base),
        n_other=len(compared.other),
        paired=is_paired,
        estimate=compared.estimate,
        ratio=ratio,
        verdict=outcome,
        words=words,
        doubts=doubts,
    )


def _by_block(sides: tuple[pd.DataFrame, pd.DataFrame], confidence: float) -> _Estimate | None:
    """Compare the blocks that both sides have; None if there are none.

    The mean of the runs of a block, in the order ABBA, cancels a steady drift.
    """
    means = [
        side.groupby(["session", "block"]).value.agg(statistics.geometric_mean)
        for side in sides
    ]
    blocks = means[0].index.intersection(means[1].index)
    if blocks.empty:
        return None
    base = means[0][blocks].tolist()
    other = means[1][blocks].tolist()
    logs = [math.log(y / x) for x, y in zip(base, other, strict=True)]
    n_needed = stats.fewest_for_interval(confidence)
    return _Estimate(
        base,
        other,
        math.exp(statistics.median(logs)),
        stats.paired_ratio(base, other, confidence),
        f"unclear, {plural(len(blocks), 'block')}; an interval needs {n_needed}",
    )


def _by_session(
    sides: tuple[pd.DataFrame, pd.DataFrame], spreads: Sequence[Spread], confidence: float
) -> _Estimate:
    """Compare the sessions of both sides; for an interval only sessions with enough runs count."""
    sessions = [_values_by_session(side) for side in sides]
    n_base, n_other = (max(map(len, of_side)) for of_side in sessions)
    ratio = None
    if min(n_base, n_other) >= FEWEST_RUNS:
        sessions = [
            [values for values in of_side if len(values) >= FEWEST_RUNS]
            for of_side in sessions
        ]
        base_spread, other_spread = spreads
        ratio = between_sessions(
            (sessions[0], sessions[1]),
            ((base_spread.sd, base_spread.df), (other_spread.sd, other_spread.df)),
            confidence,
        )
    base_centre, other_centre = map(_centre, sessions)
    return _Estimate(
        list(itertools.chain(*sessions[0])),
        list(itertools.chain(*sessions[1])),
        math.exp(other_centre - base_centre),
        ratio,
        f"unclear, {n_base} against {plural(n_other, 'run')}; an interval needs {FEWEST_RUNS} each",
    )


def _values_by_session(side: pd.DataFrame) -> list[list[float]]:
    return [rows.value.tolist() for _, rows in side.groupby("session", sort=False)]


def _centre(sessions: Sequence[Sequence[float]]) -> float:
    """The mean over sessions of the median of logarithms."""
    return statistics.fmean(statistics.median(map(math.log, values)) for values in sessions)


def _doubts(
    sides: Sequence[pd.DataFrame], has_interval: bool, is_assumed: bool
) -> tuple[str, ...]:
    doubts: list[tuple[str, ...]] = []
    for side in sides:
        for _, rows in side.groupby("session"):
            doubts.append(shown.of_runs(len(rows), rows.disturbed.sum(), 0))
    if not has_interval:
        doubts.append((shown.FEW,))
    if is_assumed:
        doubts.append((shown.ASSUMED,))
    return shown.all_of(doubts)


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
    largest = max(ratio.high, 1 / ratio.low) - 1
    if largest > WIDEST:
        place = "contains 1" if ratio.low <= 1 <= ratio.high else "comes close to 1"
        return TOO_FEW, f"unclear, the interval {place}: {about(ratio.estimate)}"
    if ratio.low <= 1 <= ratio.high:
        return ALIKE, f"no difference larger than {percent(largest)}"
    if ratio.low > 1:
        range_in_words = f"{SLOWER} by {percent(ratio.low - 1)} to {percent(ratio.high - 1)}"
    else:
        least = percent(1 / ratio.high - 1)
        range_in_words = f"{FASTER} by {least} to {percent(1 / ratio.low - 1)}"
    return ALIKE, f"no difference clearly above {percent(at_least)}: {range_in_words}"
