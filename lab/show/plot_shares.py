"""The picture of where the time of a request goes: shares of prefill and decode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lab.core import shown
from lab.core.figures import PREFILL_SHARE
from lab.core.lists import plural
from lab.core.results import Readable
from lab.errors import LabError
from lab.show import canvas, selection, summaries, table
from lab.show.canvas import OF_DECODE, OF_PREFILL
from lab.show.wording import seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_BARS = 10
BESIDE_BARS = 2.3
NAME_WIDTH = 1.05
NUMBER_WIDTH = 0.4
"""Inches beside the bars, and that a name with its number and a number need in a part of a bar."""


def plot_shares(records: Readable, ax: Axes | None = None) -> Axes:
    """Draw the shares of prefill and decode: a bar for each of up to ten lengths.

        lab.plot_shares(records)

    Bars are medians, as in the table. LabError without a run that decoded, and for several setups.
    """
    timed, rows = selection.timed_rows(records)
    rows = rows[rows.e2e_s.gt(0) & rows.prefill_s.gt(0) & rows.tpot_ms.notna()]
    if rows.empty or len(table.setups(rows)) > 1:
        raise LabError(
            "This picture needs runs of one setup that decoded.",
            "Measure one, with --gen 2 or more.",
        )
    ax = ax or canvas.new_axes()
    bars = summaries.summary(rows)[::-1]  # the first length is the highest bar
    bars = bars.iloc[:: math.ceil(len(bars) / MOST_BARS)]
    names = [_bar_name(row) for _, row in bars.iterrows()]
    prefill = 100 * bars.prefill_share
    _draw_part(ax, names, "prefill", OF_PREFILL, prefill, 0 * prefill)
    _draw_part(ax, names, "decode", OF_DECODE, 100 - prefill, prefill)
    if bars.doubts.map(shown.mark).any():
        ax.barh(names[:1], 0, alpha=0, label="!: some runs disturbed; !!: half or more")
    ax.set(xlim=(0, 100), xlabel="share of the request's time (%)")
    subject = selection.subject(timed, rows)
    canvas.finish([ax], f"{_finding(rows)}\n{subject}")
    ax.grid(visible=False, axis="y")
    return ax


def _finding(rows: pd.DataFrame) -> str:
    """Prefill's share with the shortest and the longest prompt, or what the picture shows."""

    def percent(share: float) -> str:
        return f"{100 * share:.0f} %"

    stated = ""
    if rows.n_gen.nunique() == 1:
        stated = selection.stated_at_ends(rows, PREFILL_SHARE.name, percent, "with")
    return f"Prefill's share: {stated}" if stated else "Where the time of a request goes"


def _bar_name(row: pd.Series) -> str:
    lengths = f"{plural(row.n_prompt, 'token')} in, {row.n_gen:,} out"
    mark = shown.mark(row.doubts)
    return f"{lengths}\n{seconds(row.e2e_s)} {mark}".rstrip()


def _draw_part(
    ax: Axes, names: list[str], phase: str, colour: str, percents: pd.Series, left: pd.Series
) -> None:
    bars = ax.barh(names, percents, left=left, color=colour, label=phase)
    inches = canvas.column_width(ax) - BESIDE_BARS
    labels = [_part_label(phase, percent, percent / 100 * inches) for percent in percents]
    ax.bar_label(bars, labels, label_type="center", color="white", fontsize=canvas.TITLE_SIZE)


def _part_label(phase: str, percent: float, inches: float) -> str:
    if inches >= NAME_WIDTH:
        return f"{phase} {percent:.0f} %"
    return f"{percent:.0f} %" if inches >= NUMBER_WIDTH else ""
