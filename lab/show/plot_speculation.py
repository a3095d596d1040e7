"""The pictures of `lab speculate`: the speed-up over the draft length, and what a step of several positions costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core import guesses
from lab.core.record import Record
from lab.experiments import speculation_rows
from lab.experiments.speculation_rows import CurveRow, Row
from lab.show.canvas import COLOURS, MARKERS, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 8


def plot_speculation(rows: Sequence[Row], records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """A panel for each text: the speed-up over the draft length. Points are blocks, dashes the prediction.

    Of rows and runs of one setup.
    """
    keys = list(dict.fromkeys((row.text, row.n_prompt, row.n_gen) for row in rows))[:MOST_PANELS]
    n_columns = min(len(keys), 4)
    axes = figure.subplots(-(-len(keys) // n_columns), n_columns, sharey=True, sharex=True, squeeze=False).flat
    for ax, key in zip(axes, keys, strict=False):
        alike = [row for row in rows if (row.text, row.n_prompt, row.n_gen) == key]
        for i, draft in enumerate(dict.fromkeys(row.draft for row in alike)):
            _speed_ups(ax, [row for row in alike if row.draft == draft], records, COLOURS[i], MARKERS[i])
        ax.axhline(1, color="#666666", ls=":", lw=1.2, label="plain decoding")
        lengths = sorted({row.n_draft for row in rows})
        ax.set_xticks(lengths)
        ax.set_title(f"{key[0]}, {key[1]:,} + {key[2]:,} tokens", fontsize=10)
        ax.set_xlabel("guesses at a time")
        tidy(ax)
    for ax in list(axes)[len(keys) :]:
        ax.set_visible(False)
    first = figure.axes[0]
    first.set_ylim(bottom=0)
    first.set_ylabel("speed-up over plain decoding")
    handles, labels = first.get_legend_handles_labels()
    for ax in figure.axes:
        if legend := ax.get_legend():
            legend.remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"Guessing ahead: {subject}", fontsize=11)
    return figure


def _speed_ups(ax: Axes, alike: Sequence[Row], records: Sequence[Record], colour: str, marker: str) -> None:
    """Of one text and draft."""
    ordered = sorted((row for row in alike if row.speed_up is not None), key=lambda row: row.n_draft)
    name = f"guessed: {alike[0].draft}"
    points = [point for row in ordered for point in _blocks(row, records)]
    ax.plot(
        [row.n_draft for row in ordered],
        [row.speed_up or 0.0 for row in ordered],
        color=colour,
        lw=2,
        marker="_",
        ms=14,
        label=name,
    )
    if points:
        ax.plot(*zip(*points, strict=True), ls="", marker=marker, color=colour, ms=5, alpha=0.6, mew=0, label="blocks")
    expected = [(row.n_draft, row.expected) for row in ordered if row.expected is not None]
    if expected:
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, marker="x", ms=5, label="predicted")


def _blocks(row: Row, records: Sequence[Record]) -> list[tuple[int, float]]:
    """The speed-up of each block."""
    times = speculation_rows.by_block(records, row.key)
    return [
        (row.n_draft, plain / seconds)
        for (draft, n_draft), of_blocks in times.items()
        if (draft, n_draft) == (row.draft, row.n_draft)
        for block, seconds in of_blocks.items()
        if (plain := times.get(("", 0), {}).get(block)) is not None
    ]


def plot_curve(rows: Sequence[CurveRow], records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """The time of a step of several positions over that of one: points are single steps, the line their median.

    Where speed-ups are tabulated by the share of right guesses, a second panel draws them.
    """
    has_gains = any(row.speed_ups for row in rows)
    axes = figure.subplots(1, 2 if has_gains else 1, squeeze=False)[0]
    for i, key in enumerate(dict.fromkeys((row.n_prompt, row.draft) for row in rows)):
        alike = [row for row in rows if (row.n_prompt, row.draft) == key]
        _costs(axes[0], alike, records, COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
    numbers = sorted({row.n_positions for row in rows})
    axes[0].plot(numbers, numbers, color="#666666", ls=":", lw=1.2, label="if each position cost a step")
    axes[0].axhline(1, color="#666666", ls="-.", lw=1.2, label="if they cost nothing")
    axes[0].set_xlabel("positions in a step")
    axes[0].set_ylabel("time of a step, in steps of one position")
    if has_gains:
        _gains(axes[1], rows)
    for ax, ticks in zip(axes, (numbers, [n - 1 for n in numbers if n > 1]), strict=False):
        ax.set_xticks(ticks[:: -(-len(ticks) // 16)])
        ax.set_ylim(bottom=0)
        tidy(ax)
    if has_gains:
        axes[1].legend(
            title="guesses that are right", ncols=4, frameon=False, fontsize=8, title_fontsize=8, loc="lower left"
        )
    figure.suptitle(f"Verifying several tokens at once: {subject}", fontsize=11)
    return figure


def _costs(ax: Axes, alike: Sequence[CurveRow], records: Sequence[Record], colour: str, marker: str) -> None:
    """The curve of one prompt length, beside one draft."""
    name = f"after {alike[0].n_prompt:,} prompt tokens" + (f", {alike[0].draft}" if alike[0].c is not None else "")
    ax.plot([row.n_positions for row in alike], [row.v for row in alike], color=colour, lw=2, label=f"{name}: median")
    points = []
    for run in (record.run for record in records):
        its = run.speculation.draft if run.speculation else None
        is_of = (run.n_prompt, its) == (alike[0].n_prompt, alike[0].draft)
        times = guesses.step_times([run]) if is_of else None
        one = alike[0].step_s / alike[0].v
        points += [(n, seconds / one) for n, seconds in times.target.items()] if times else []
    if points:
        ax.plot(*zip(*points, strict=True), ls="", marker=marker, color=colour, ms=5, alpha=0.6, mew=0, label="runs")
    expected = [(row.n_positions, row.expected_v) for row in alike if row.expected_v is not None]
    if expected:
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, label="predicted from ceilings")


def _gains(ax: Axes, rows: Sequence[CurveRow]) -> None:
    """Speed-ups of the first curve, a line for each share of right guesses."""
    first = rows[0].n_prompt, rows[0].draft
    alike = [row for row in rows if (row.n_prompt, row.draft) == first and row.speed_ups]
    for i, share in enumerate(speculation_rows.ACCEPTANCES):
        numbers, gains = [row.n_positions - 1 for row in alike], [row.speed_ups[i] for row in alike]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        ax.plot(numbers, gains, color=colour, marker=marker, ms=4, lw=1.6, label=f"{share:.0%}")
    ax.axhline(1, color="#666666", ls=":", lw=1.2, label="plain")
    ax.set_xlabel("guesses at a time")
    ax.set_ylabel("speed-up by arithmetic")
