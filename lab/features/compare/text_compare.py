"""Comparisons as text: which setup is faster, how setups differ, and by how much; and the picture of `lab ab`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.core import shown
from lab.core.lists import grouped, join_and
from lab.core.record import Record
from lab.show import canvas, comparison, text_setup
from lab.show.canvas import COLOURS, GUIDE, points
from lab.show.comparison import (
    ALIKE,
    DISTURBED,
    FASTER,
    FEWEST_SESSIONS,
    SLOWER,
    TOO_FEW,
    Comparison,
    Group,
    figure_names,
)
from lab.show.section import Columns, Section, print_lines, print_sections, tabled
from lab.show.wording import digits, percent, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """A section for each group against the base: times, ratios, verdicts, and why some are unclear."""
    made = []
    for compared in comparisons:
        rows = compared.rows
        sentences = [] if compared.rows else ["The two have no length in common."]
        for why in dict.fromkeys(
            row.words.partition(":")[0] for row in rows if row.verdict == TOO_FEW
        ):
            sentences.append(
                f"U{why[1:].replace(',', ':', 1)}. Repeat both measurements, or use more runs (--repeat)."
            )
        if DISTURBED in {row.verdict for row in rows}:
            sentences.append(
                "Unclear (disturbed): no interval, because at least half of the runs were disturbed."
            )
        for side, names in (("base", compared.only_base), ("other", compared.only_other)):
            sentences += [f"Only in the {side}: {', '.join(names)}."] * bool(names)
        table = tabled(COLUMNS, rows, keep_all=True)
        about = "time ratio = other / base, below it the 95 % interval (3 or more runs of each; log-normal times assumed)"
        about *= any(row.ratio for row in rows)
        made.append(
            Section(f"{compared.other} against the base", about, **table, sentences=sentences)
        )
    return made


COLUMNS: Columns = (
    (
        "prompt\ntokens",
        lambda row: "\n".join(
            filter(None, [f"{row.n_prompt:,}" if row.n_prompt else "", row.case or ""])
        ),
    ),
    ("figure", lambda row: f"{figure_names()[row.figure]}, {row.figure.rpartition('_')[2]}"),
    ("base", lambda row: digits(row.base)),
    ("other", lambda row: digits(row.other)),
    (
        "runs",
        lambda row: (
            ", ".join(map(str, dict.fromkeys((row.n_base, row.n_other)))) + shown.mark(row.doubts)
        ),
    ),
    (
        "time\nratio",
        lambda row: (
            digits(row.estimate)
            + (f"\n{digits(row.ratio.low)}-{digits(row.ratio.high)}" if row.ratio else "")
        ),
    ),
    (
        "verdict",
        lambda row: (
            f"{ALIKE}\nabove {percent(max(row.ratio.high, 1 / row.ratio.low) - 1)}"
            if row.verdict == ALIKE
            else {TOO_FEW: "unclear", DISTURBED: "unclear (disturbed)"}.get(
                row.verdict, row.verdict
            )
        ),
    ),
)


def print_comparisons(
    groups: Sequence[Group],
    comparisons: Sequence[Comparison],
    at_least: float,
    out: Console,
    warnings: Sequence[str] = (),
) -> None:
    """Prints who is faster, how the groups differ, a table per group against the base, and warnings."""
    for compared in comparisons:
        out.print(Text(overall(compared), style="bold"))
    out.print(Text("\nBase: ", style="bold") + Text(groups[0].label))
    fields = differences(groups)
    out.print("Differences:" if fields else "Equal setups, measured at different times.")
    print_lines([Text(f"  {field}: {' | '.join(values)}") for field, values in fields.items()], out)
    notes = how_compared(groups, comparisons, at_least)
    *before, last = sections(comparisons)
    print_sections([*before, dataclasses.replace(last, warnings=warnings, notes=notes)], out)


def overall(compared: Comparison) -> str:
    """One sentence on all rows: in how many the other is slower or faster, and by how much."""
    base = compared.base
    other = compared.other
    n = len(compared.rows)
    if not n:
        return f"{other} and {base} have no length in common."
    rows = grouped(compared.rows, lambda row: row.verdict)
    words = list[str]()

    def reach(ratios: Iterable[float]) -> str:
        """The lowest and the highest in words."""
        low, *_, high = sorted([*ratios] * 2)
        return f"{' to '.join(dict.fromkeys(times(one).removesuffix('x') for one in (low, high)))} times"

    if set(rows) <= {TOO_FEW, DISTURBED}:
        medians = f"too few runs or much spread (medians: {reach(row.estimate for row in compared.rows)} the time)"
        why = "runs were disturbed" if DISTURBED in rows else medians
        return f"It is unclear whether {other} or {base} is faster: {why}."
    if set(rows) == {ALIKE}:
        return f"There is no clear difference between {other} and {base}."
    for told, unit, power in ((SLOWER, "the time", 1), (FASTER, "as fast", -1)):
        if told in rows:
            where = "all rows" if len(rows) == 1 else f"{len(rows[told])} of {n} rows"
            ratios = reach(row.estimate**power for row in rows[told])
            words.append(f"{told}{'' if words else f' than {base}'} in {where} ({ratios} {unit})")
    n_unclear = sum(len(rows.get(verdict, ())) for verdict in (TOO_FEW, DISTURBED))
    alike = f"no clear difference in {len(rows[ALIKE])} of {n} rows" if ALIKE in rows else ""
    told = f"{other} is {' and '.join(words)}" if words else f"{other} against {base}"
    rest = (
        f" The {f'other {n_unclear} are' if n_unclear > 1 else 'other is'} unclear."
        if n_unclear
        else ""
    )
    return f"{told}{('; ' if words else ': ') * bool(alike)}{alike}.{rest}"


def answers(comparisons: Sequence[Comparison]) -> list[str]:
    """The fastest by the medians; of each comparison a verdict, and its rows at the shortest and the longest prompt."""
    sentences = []
    if len(comparisons) > 1:
        labels = [comparisons[0].base, *(compared.other for compared in comparisons)]
        rows = [
            {row.name: row.estimate for row in one.rows if shown.is_firm(row.doubts)}
            for one in comparisons
        ]
        wins: dict[str, list[str]] = {}
        for what in rows[0]:
            if all(what in others for others in rows):
                ratios = [1.0, *(others[what] for others in rows)]
                wins.setdefault(labels[ratios.index(min(ratios))], []).append(what)
        for label, figures in wins.items():
            where = f" in {', '.join(figures)}" if len(wins) > 1 else ""
            sentences.append(f"By the medians, {label} is the fastest{where}.")
    for compared in comparisons:
        lengths = {row.n_prompt for row in (*compared.rows[:1], *compared.rows[-1:])}
        told = [f"{row.name}: {row.words}." for row in compared.rows if row.n_prompt in lengths]
        sentences += [
            overall(compared),
            *(f"{sentence[:1].upper()}{sentence[1:]}" for sentence in told),
        ]
    return sentences


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The fields in which groups differ, with their values as text, in the order of the groups."""

    def words(field: str, value: Any) -> str:
        if value is None:
            return text_setup.unset(field)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        most = 12 if field.endswith("sha256") else 60
        return text if len(text) <= most else f"{text[: most - 3]}..."

    differ = comparison.differences(groups)
    return {field: [words(field, value) for value in values] for field, values in differ.items()}


def how_compared(
    groups: Sequence[Group], comparisons: Sequence[Comparison], at_least: float
) -> list[str]:
    """Sentences on how the ratios were computed, and their limits."""
    is_paired = {row.paired for compared in comparisons for row in compared.rows}
    n_served = sum(text_setup.is_request(group.rows.iloc[0]) for group in groups)
    how = "the median over blocks" if is_paired == {True} else "of session medians"
    how = (
        "the median over blocks of one trial, otherwise of session medians"
        if len(is_paired) > 1
        else how
    )
    sentences = [
        f"Time ratio: other / base, {how}, so it can differ from the ratio of the columns. The 95 % intervals hold "
        f"jointly. Differences below {percent(at_least)} count as none."
    ]
    if spreads := dict.fromkeys(words for compared in comparisons for words in compared.spreads):
        by_words = grouped((words.split(": ", 1) for words in spreads), itemgetter(1))
        parts = [
            f"{words} for {join_and([name for name, _ in same])}"
            for words, same in by_words.items()
        ]
        sentences.append(
            f"Sessions on one machine vary, so a verdict needs a larger difference. Standard deviation: "
            f"{'; '.join(parts)}. To measure it: {FEWEST_SESSIONS} or more sessions of equal setup in one folder."
        )
    if True not in is_paired and len({group.rows.machine.iloc[0] for group in groups}) == 1:
        see = "" if n_served else " lab ab measures side by side."
        sentences.append(
            f"The sessions ran at different times, which can explain a part of a difference.{see}"
        )
    if 0 < n_served < len(groups):
        sentences.append(
            "In process, TTFT is prefill plus sampling one token. Through a server it also includes templates, "
            "tokenization, queueing, HTTP and the client, and TPOT uses arrival times. The settings of the server's "
            "engine are not visible, so they are not compared."
        )
    return sentences


def as_json(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Groups, their differences and their comparisons, as one JSON document."""
    return {
        "groups": [group.label for group in groups],
        "differences": comparison.differences(groups),
        "comparisons": [dataclasses.asdict(compared) for compared in comparisons],
    }


def trials(records: Sequence[Record]) -> list[list[Record]]:
    """The timed runs of each trial with at least two variants."""
    timed = [
        one
        for one in records
        if one.run.is_timed and one.run.block is not None and not one.run.is_apart
    ]
    of_sessions = grouped(timed, lambda record: record.session).values()
    return [list(own) for own in of_sessions if len({record.run.variant for record in own}) > 1]


def plot_trial(records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """Time of each variant over that of the base: a point for each block (hollow: disturbed), and their median."""
    base, *others = comparison.groups(records)
    compared = comparison.compare_groups([base, *others])
    n_columns = min(len(compared), 2)
    n_figures = max(len(one.rows) for one in compared)
    figure.set_figheight(math.ceil(len(compared) / n_columns) * (1.2 + 0.4 * n_figures) + 0.8)
    axes = canvas.grid(figure, len(compared), n_columns, sharex=True)
    for ax, one, other in zip(axes, compared, others, strict=True):
        names = []
        cases = [
            comparison.cases(group.rows, [row.figure for row in one.rows])
            for group in (base, other)
        ]
        for at, row in enumerate(one.rows):
            sides = [
                of_side[row.figure, row.n_prompt, row.n_gen, row.case].groupby("block")
                for of_side in cases
            ]
            of_base, of_other = (side.value.agg(statistics.geometric_mean) for side in sides)
            hollow = sides[0].disturbed.any() | sides[1].disturbed.any()
            ratios = (of_other / of_base).dropna()
            ys = [at + 0.24 * ((i % 5) - 2) / 2 for i in range(len(ratios))]
            points(
                ax,
                ratios,
                ys,
                hollow[ratios.index],
                marker="o",
                color=COLOURS[5],
                ms=5,
                alpha=0.8,
                label="block",
            )
            label = "median over blocks, no interval (too few blocks, or disturbed)"
            reach = None
            words = ""
            if row.ratio is not None:
                label = "median over blocks, 95 % interval (for all figures together)"
                reach = [
                    [max(0, row.estimate - row.ratio.low)],
                    [max(0, row.ratio.high - row.estimate)],
                ]
                words = f" ({digits(row.ratio.low)}-{digits(row.ratio.high)})"
            style: dict[str, Any] = {
                "marker": "D",
                "ms": 7,
                "color": COLOURS[0],
                "ls": "",
                "capsize": 4,
                "zorder": 3,
            }
            ax.errorbar(
                [row.estimate],
                [at],
                xerr=reach,
                label=label,
                mfc=None if reach else "none",
                **style,
            )
            beside = ax.get_yaxis_transform()
            ax.text(
                1.02,
                at,
                f"{digits(row.estimate)}{words}",
                transform=beside,
                va="center",
                fontsize=9,
            )
            lever = f"\n{row.case}" if row.case else ""
            names.append(f"{figure_names()[row.figure]}, {row.n_prompt:,} tokens{lever}")
        ax.axvline(1, color=GUIDE, lw=1.2)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        a, b = (name.partition(":")[0] for name in (one.other, one.base))
        ax.set_xlabel(f"time of {a} / time of {b}\n\u2190 {a} is faster | {b} is faster \u2192")
        ax.set_title(f"{one.other}\nagainst {one.base}", fontsize=10)
        ax.xaxis.set_tick_params(labelbottom=True)
    axes[0].set_xscale("log")
    low, high = axes[0].get_xlim()
    end = max(1 / low, high, 1.05)
    axes[0].set_xlim(1 / end, end)
    blocks = {record.run.block for record in records}
    canvas.finish(
        axes,
        f"Which variant is faster, block by block\n{subject} ({len(blocks)} blocks)",
        is_apart=True,
    )
    return figure
