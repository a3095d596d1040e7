"""Two or more sets of runs beside each other, and what can honestly be said of the difference.

Runs are grouped by everything that was chosen or found (machine, build, model, settings); groups are never
pooled, and the fields in which they differ are named. A row compares one figure at one length. The intervals
of all rows together hold with 95 %: with more rows each must be surer of itself, so that a long table does
not find a difference by luck. Runs of `lab ab` were measured side by side in blocks and are compared block by
block, which takes out whatever the machine did meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis import table
from lab.core import stats
from lab.core.record import OK, Record
from lab.core.stats import Ratio
from lab.errors import LabError

if TYPE_CHECKING:
    import pandas as pd

AT_LEAST = 0.01
"""Differences below this are not claimed, however sure: memory layout and the like move a process that much."""

FASTER, SLOWER, ALIKE, TOO_FEW = "faster", "slower", "no difference", "too few runs"


@dataclass(frozen=True)
class Group:
    """The timed runs of one setup, as rows of `table.runs`. The label says in what it differs from the others."""

    label: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class Row:
    """One figure at one length. `ratio` is the other's time over the base's; None where runs are too few.

    `n_base` and `n_other` count what is compared: runs, or blocks where `paired`.
    """

    n_prompt: int
    n_gen: int | None  # None for prefill, which does not depend on it
    figure: str  # prefill_s, tpot_ms, decode_ms
    base: float  # medians
    other: float
    n_base: int
    n_other: int
    paired: bool
    ratio: Ratio | None
    verdict: str
    words: str


@dataclass(frozen=True)
class Comparison:
    """One group against the base. The last two name the figures that only one of them has."""

    base: str
    other: str
    rows: tuple[Row, ...]
    only_base: tuple[str, ...]
    only_other: tuple[str, ...]


def groups(records: Sequence[Record], base: str | None = None) -> list[Group]:
    """The setups in order of appearance; the first, or the one whose label contains `base`, comes first.

    Where all is one setup, its sessions are the groups. LabError where there is nothing to compare.
    """
    rows = table.runs(by_session(records))
    rows = rows[(rows.status == OK) & ~rows.warmup]
    found = [Group(label, part) for label, part in table.setups(rows)] if len(rows) else []
    if found and rows.block.notna().all():  # of a trial: A is the base, whatever came first
        found.sort(key=lambda group: str(group.rows.variant.iloc[0]))
    if len(found) < 2:
        raise LabError(
            "There is nothing to compare: all runs are of one setup and one session.",
            "Give results of another machine, model or setting, or measure two settings with lab ab.",
        )
    if base is not None:
        chosen = [group for group in found if base in group.label]
        if len(chosen) != 1:
            labels = "; ".join(group.label for group in found)
            many = "no group" if not chosen else f"{len(chosen)} groups"
            raise LabError(f"--base {base!r} names {many}.", f"Give a part of one of these: {labels}")
        found = chosen + [group for group in found if group is not chosen[0]]
    return found


def by_session(records: Sequence[Record]) -> list[Record]:
    """The same records; where all are of one setup, their sessions are made variants, to be set beside each other."""
    rows = table.runs([record for record in records if record.run.status == OK and not record.run.warmup])
    if rows.empty or len(table.setups(rows)) > 1 or rows.session.nunique() < 2:
        return list(records)
    return [
        dataclasses.replace(record, run=dataclasses.replace(record.run, variant=f"session {record.session}"))
        for record in records
    ]


def differences(found: Sequence[Group]) -> dict[str, list[Any]]:
    """The fields of the setup in which groups differ, with each group's value; None is unknown."""
    first = [group.rows.iloc[0] for group in found]
    values = {name: [None if row[name] != row[name] else row[name] for row in first] for name in table.SETUP}
    if any(group.rows.block.isna().all() for group in found):  # not a trial: sessions, which differ in no setting
        del values["variant"]
    values["sweep_every"] = [None if every is None else int(every) for every in values["sweep_every"]]
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def compare(records: Sequence[Record], base: str | None = None, at_least: float = AT_LEAST) -> list[Comparison]:
    """Each setup in `records` against the first, or against the one whose label contains `base`.

        for row in lab.compare(lab.read(["mine.jsonl", "yours.jsonl"]).records)[0].rows:
            print(row.n_prompt, row.figure, row.words)

    Where all is one setup, its sessions are compared. Differences below `at_least` are not claimed. LabError where
    there is nothing to compare.
    """
    return compare_groups(groups(records, base), at_least)


def compare_groups(
    found: Sequence[Group], at_least: float = AT_LEAST, confidence: float = stats.CONFIDENCE
) -> list[Comparison]:
    """Each group against the first. All intervals together hold with `confidence`."""
    figures = [_figures(group.rows) for group in found]
    shared = [[key for key in figures[0] if key in other] for other in figures[1:]]
    shared = [[key for key in keys if not _is_second_choice(key, keys)] for keys in shared]
    n_rows = sum(map(len, shared))
    each = 1 - (1 - confidence) / max(1, n_rows)
    comparisons = []
    for other, figures_there, keys in zip(found[1:], figures[1:], shared, strict=True):
        rows = tuple(_row(key, figures[0][key], figures_there[key], each, at_least) for key in keys)
        only_base, only_other = _without(figures[0], keys), _without(figures_there, keys)
        comparisons.append(Comparison(found[0].label, other.label, rows, only_base, only_other))
    return comparisons


Key = tuple[str, int, int | None]  # figure, n_prompt, n_gen
Values = dict[tuple[str, Any], list[float]]  # by (session, block); block is NaN outside of `lab ab`


def _figures(rows: pd.DataFrame) -> dict[Key, Values]:
    """Every figure that a group has: at which length, and the values of its runs."""
    found: dict[Key, Values] = {}
    for row in rows.to_dict("records"):
        unit = row["session"], row["block"] if row["block"] == row["block"] else None
        for figure in ("prefill_s", "tpot_ms", "decode_ms"):
            if row[figure] == row[figure]:
                key = figure, row["n_prompt"], None if figure == "prefill_s" else row["n_gen"]
                found.setdefault(key, {}).setdefault(unit, []).append(row[figure])
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][2] or 0, item[0][0] != "prefill_s")))


def _is_second_choice(key: Key, keys: Sequence[Key]) -> bool:
    """Decode compute stands in for TPOT only where one side has no TPOT (imported results)."""
    return key[0] == "decode_ms" and ("tpot_ms", *key[1:]) in keys


def _without(figures: dict[Key, Values], compared: Sequence[Key]) -> tuple[str, ...]:
    """The names of the figures that were not compared; of two that tell of the same decoding, one."""
    done = {(key[0] == "prefill_s", *key[1:]) for key in compared}
    names: dict[tuple[bool, int, int | None], str] = {}
    for key in figures:
        names.setdefault((key[0] == "prefill_s", *key[1:]), _name(key))
    return tuple(name for what, name in names.items() if what not in done)


def _row(key: Key, base: Values, other: Values, confidence: float, at_least: float) -> Row:
    blocks = [unit for unit in base if unit in other and unit[1] is not None]
    if blocks:
        pairs = [_centre(base[unit]) for unit in blocks], [_centre(other[unit]) for unit in blocks]
        ratio = stats.paired_ratio(*pairs, confidence)
        n_base = n_other = len(blocks)
    else:
        pairs = [value for each in base.values() for value in each], [v for each in other.values() for v in each]
        ratio = stats.ratio(*pairs, confidence)
        n_base, n_other = map(len, pairs)
    verdict, words = _verdict(ratio, at_least)
    if ratio is None:
        what = "blocks" if blocks else "runs"
        fewest = stats.fewest(bool(blocks), confidence)
        words = f"too few {what} to tell ({n_base} against {n_other}; {fewest} against {fewest} can)"
    return Row(
        n_prompt=key[1],
        n_gen=key[2],
        figure=key[0],
        base=statistics.median(pairs[0]),
        other=statistics.median(pairs[1]),
        n_base=n_base,
        n_other=n_other,
        paired=bool(blocks),
        ratio=ratio,
        verdict=verdict,
        words=words,
    )


def _verdict(ratio: Ratio | None, at_least: float) -> tuple[str, str]:
    if ratio is None:
        return TOO_FEW, ""
    if ratio.low > 1 + at_least:
        return SLOWER, f"slower: {ratio.estimate:.3g}x the time"
    if ratio.high < 1 / (1 + at_least):
        return FASTER, f"faster: {1 / ratio.estimate:.3g}x as fast"
    if ratio.high < 1 or ratio.low > 1:
        ends = sorted((ratio.low, ratio.high) if ratio.low > 1 else (1 / ratio.high, 1 / ratio.low))
        word = SLOWER if ratio.low > 1 else FASTER
        return (
            ALIKE,
            f"{word} by {100 * (ends[0] - 1):.2g} to {100 * (ends[1] - 1):.2g} %: too near to none to be claimed",
        )
    largest = max(ratio.high, 1 / ratio.low) - 1
    return ALIKE, f"no difference larger than {100 * largest:.2g} %"


def _centre(values: Sequence[float]) -> float:
    """The geometric mean: of a block's runs in ABBA order it takes out a steady drift."""
    return math.exp(statistics.fmean(map(math.log, values)))


def _name(key: Key) -> str:
    figure = {"prefill_s": "prefill", "tpot_ms": "TPOT", "decode_ms": "decode compute"}[key[0]]
    return f"{figure} at {key[1]:,}" + (f" with {key[2]:,} generated" if key[2] else "")
