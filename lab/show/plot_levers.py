"""The picture of `lab batch`: tokens per second in all and per user, over how many sequences share a step.

The picture of a cached prefix: time to first token over its length, cold and used again in three ways.

Where the cold line crosses another is the length from which that way pays.

The picture of stalls: how long streams waited for each token while a newcomer's prompt was prefilled.

The pictures of `lab speculate`: the speed-up over the draft length, and what a step of several positions costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis import disturbances, setup_columns, table
from lab.analysis.wording import seconds
from lab.core import gaps, guesses, lever_figures, prefix_times
from lab.core.gaps import Gaps
from lab.core.record import Record
from lab.errors import LabError
from lab.experiments import batching, prefix_cache, speculation_rows
from lab.experiments.speculation_rows import CurveRow
from lab.runner import machine
from lab.show.canvas import COLOURS, GUIDE, LINES, MARKERS, plain_ticks, points, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_batch(
    rows: Sequence[batching.Row], records: Sequence[Record], subject: str, ridge: float | None, figure: Figure
) -> Figure:
    """Left the total rate, right that of each user: points are runs, the line their medians, dashes the prediction.

    Of rows and runs of one setup. The grey lines are what would be without any cost of sharing.
    """
    left, right = figure.subplots(1, 2)
    for ax, name, scale in ((left, "in all", 1), (right, "per user", 0)):
        styles = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False)
        groups = batching.alike(rows)
        for group, (colour, marker) in zip(groups, styles, strict=False):
            prompts = f"{group[0].n_prompt:,} prompt tokens{', shared' if group[0].is_shared else ''}"
            _rates(ax, group, records, scale, colour, marker, prompts)
        first = groups[0][0]
        if first.n_seq == 1:
            numbers = [row.n_seq for row in groups[0]]
            rates = [first.user_tps * (n if scale else 1) for n in numbers]
            ax.plot(numbers, rates, color="#666666", ls=":", lw=1.2, label="if sharing cost nothing")
        if ridge is not None and 1 <= ridge <= rows[-1].n_seq:
            ax.axvline(ridge, color="#666666", ls="-.", lw=1, label=f"ridge: {ridge:.2g} sequences")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(sorted({row.n_seq for row in rows}))
        plain_ticks(ax.yaxis)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.minorticks_off()
        ax.set_xlabel("sequences in a step")
        ax.set_ylabel(f"tokens per second {name}")
        ax.set_title("In all" if scale else "Each user", fontsize=11)
        tidy(ax)
    figure.suptitle(f"Decoding together: {subject}", fontsize=11)
    return figure


def _rates(
    ax: Axes, rows: Sequence[batching.Row], records: Sequence[Record], scale: int, colour: str, marker: str, name: str
) -> None:
    """The rates of one prompt length; `scale` 1: of all sequences together, 0: of each."""
    numbers = [row.n_seq for row in rows]
    ax.plot(numbers, [row.n_seq**scale / row.step_s for row in rows], color=colour, lw=2, label=f"{name}: median")
    of_runs = [
        (run.batch.n_seq, run.batch.n_seq**scale / lever_figures.step_s(run), bool(disturbances.disturbances(record)))
        for run, record in ((record.run, record) for record in records)
        if run.batch is not None
        and (run.n_prompt, run.n_gen, run.batch.is_shared) == (rows[0].n_prompt, rows[0].n_gen, rows[0].is_shared)
        and lever_figures.figures(run)
    ]
    points(ax, *zip(*of_runs, strict=True), marker=marker, color=colour, ms=5, alpha=0.6, label="runs")
    expected = [(row.n_seq, row.n_seq**scale / row.expected_s) for row in rows if row.expected_s]
    if expected:
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, label="predicted")


LABELS = (
    "cold (lines: medians, points: runs)",
    "prefix copied in the cache",
    "restored from RAM",
    "restored from disk",
)
NAMES = {"ram_s": "RAM", "disk_s": "disk"}
"""Of ways that have a break-even: its name."""


def plot_prefix(rows: Sequence[prefix_cache.Row], records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """Time to first token over the length of the prefix, both logarithmic: points are runs, the lines their medians.

    Of rows and runs of one setup. The dashed grey line is what the prefill law promises for the cold way. A dotted
    upright line is a break-even between two measured lengths; of others the legend says where restoring pays.
    """
    ax = figure.subplots()
    n_suffix = rows[0].n_suffix
    alike = [row for row in rows if row.n_suffix == n_suffix]
    own = [record for record in records if record.run.prefix and record.run.prefix.n_suffix == n_suffix]
    is_disturbed = [bool(disturbances.disturbances(record)) for record in own]
    known = {one.name: one for one in prefix_cache.break_even(alike)}
    lengths = [row.n_prefix for row in alike]
    for way, label, colour, marker, line in zip(prefix_times.WAYS, LABELS, COLOURS, MARKERS, LINES, strict=False):
        pays = known.get(NAMES.get(way, ""))
        name = f"{label} (pays {prefix_cache.words(pays)})" if pays else label
        style: dict[str, Any] = {"color": colour, "marker": marker, "mew": 0}
        ax.plot(lengths, [getattr(row, way) for row in alike], **style, ms=7, ls=line, lw=2, label=name)
        of_runs = [
            (record.run.prefix.n_prefix, figures[way], disturbed)
            for record, disturbed in zip(own, is_disturbed, strict=True)
            if record.run.prefix and (figures := prefix_times.figures(record.run))
        ]
        points(ax, *zip(*of_runs, strict=True), **style, ms=5, alpha=0.5)
        if pays and pays.is_measured and pays.n_tokens is not None:
            ax.axvline(pays.n_tokens, color=colour, ls=":", lw=1.4)
    promised = [(row.n_prefix, row.promised_s + row.cold_s - row.prefix_s) for row in alike if row.promised_s]
    if promised:
        ax.plot(*zip(*promised, strict=True), color=GUIDE, ls="--", lw=1.2, label="cold, as the prefill law promises")
    _axes(ax, lengths)
    ax.set_title(f"First token of a prompt: a prefix, and {n_suffix:,} tokens of its own\n{subject}", fontsize=11)
    tidy(ax)
    return figure


def _axes(ax: Axes, lengths: Sequence[int]) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(sorted(set(lengths)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.xaxis.minorticks_off()
    plain_ticks(ax.yaxis)
    ax.set_xlabel("length of the prefix (tokens)")
    ax.set_ylabel("time to first token (s)")


MOST_CHUNKS = 4

Lines = dict[str, list[Gaps]]
"""Runs that are drawn as one line, by its name."""


def plot_stall(records: Sequence[Record], figure: Figure | None = None, limit_s: float | None = None) -> Figure:
    """The gap before each token of the streams over the time since the newcomer's prompt came, a panel a chunk.

    A point is a token of a run; the line is the run with the median longest gap, and as wide as the wait was long. The
    upright line is the newcomer's first token. Of more than 4 chunks the smallest, the largest and two between are
    drawn. `limit_s` is drawn where it is given.
    """
    panels = _panels(records)
    if not panels:
        raise LabError("There is nothing to draw: no run shows a stall.", "Measure some: lab stall")
    if figure is None:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for ax, (chunk, lines) in zip(axes, panels.items(), strict=True):
        for name, runs in lines.items():
            _draw(ax, names.index(name), runs)
        if limit_s is not None:
            ax.axhline(1e3 * limit_s, color=GUIDE, ls="--", lw=1.4, label=f"limit: {seconds(limit_s)}")
        ax.set_title("all at once" if chunk is None else f"chunks of {chunk:,}", fontsize=11)
        ax.set_xlabel("since the prompt came (s)")
    for number, name in enumerate(names):
        colour, style = COLOURS[number % len(COLOURS)], LINES[number // len(COLOURS) % len(LINES)]
        axes[0].plot([], [], color=colour, ls=style, lw=1.6, label=name)
    axes[0].plot([], [], color=GUIDE, ls=":", lw=1.2, label="the newcomer's first token")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("time since the token before (ms)")
    plain_ticks(axes[0].yaxis)
    for ax in axes:
        plain_ticks(ax.xaxis)
        tidy(ax)
        if ax is not axes[0]:
            ax.get_legend().remove()
    figure.suptitle(_title(records), fontsize=11)
    return figure


def _draw(ax: Axes, number: int, runs: Sequence[Gaps]) -> None:
    colour = COLOURS[number % len(COLOURS)]
    for run in runs:
        gaps_ms = [1e3 * gap for gap in run.gaps_s]
        ax.plot(
            run.ends_s, gaps_ms, ls="", marker=MARKERS[number % len(MARKERS)], ms=3.5, alpha=0.5, mew=0, color=colour
        )
    middle = sorted(runs, key=lambda run: max(run.during_s))[(len(runs) - 1) // 2]
    gaps_ms = [1e3 * gap for gap in middle.gaps_s]
    began = middle.ends_s[0] - middle.gaps_s[0]
    style = LINES[number // len(COLOURS) % len(LINES)]
    ax.step([began, *middle.ends_s], [gaps_ms[0], *gaps_ms], where="pre", color=colour, lw=1.6, ls=style)
    ax.axvline(middle.newcomer_s, color=colour, ls=":", lw=1.2)


def _panels(records: Sequence[Record]) -> dict[int | None, Lines]:
    """By chunk, in ascending order and all at once last: the runs of each line."""
    timed = [record for record in records if record.run.is_timed]
    known = [(record, of) for record in timed if (of := gaps.of(record.run)) is not None]
    if not known:
        return {}
    runs = table.runs([record for record, _ in known])
    setups = table.setups(runs)
    n_lengths = len({record.run.n_prompt for record, _ in known})
    panels: dict[int | None, Lines] = {}
    for label, rows in setups:
        for index in rows.run:
            record, of = known[index]
            lever = record.run.stall
            assert lever is not None
            name = f"{lever.n_streams} stream{'s' * (lever.n_streams > 1)}"
            name += f", prompt of {record.run.n_prompt:,}" if n_lengths > 1 else ""
            name = f"{label}: {name}" if len(setups) > 1 else name
            panels.setdefault(lever.chunk, {}).setdefault(name, []).append(of)
    chunks = sorted(panels, key=lambda chunk: (chunk is None, chunk or 0))
    if len(chunks) > MOST_CHUNKS:
        chunks = [chunks[round(i * (len(chunks) - 1) / (MOST_CHUNKS - 1))] for i in range(MOST_CHUNKS)]
    return {chunk: dict(sorted(panels[chunk].items())) for chunk in chunks}


def _title(records: Sequence[Record]) -> str:
    own = [record for record in records if record.run.stall]
    models = sorted({setup_columns.model_label(record) for record in own})
    machines = sorted({machine.label(record.machine, record.settings) for record in own})
    lengths = sorted({f"{record.run.n_prompt:,}" for record in own})
    subject = " on ".join(
        names[0] if len(names) == 1 else f"{len(names)} {kind}"
        for names, kind in ((models, "models"), (machines, "machines"))
    )
    prompt = f"a prompt of {lengths[0]} tokens" if len(lengths) == 1 else "long prompts"
    n = 1 + max(record.run.repeat for record in own)
    return f"How long streams wait for each token when {prompt} comes\n{subject} ({n} repeat{'s' * (n > 1)})"


MOST_PANELS = 8


def plot_speculation(
    rows: Sequence[speculation_rows.Row], records: Sequence[Record], subject: str, figure: Figure
) -> Figure:
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


def _speed_ups(
    ax: Axes, alike: Sequence[speculation_rows.Row], records: Sequence[Record], colour: str, marker: str
) -> None:
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


def _blocks(row: speculation_rows.Row, records: Sequence[Record]) -> list[tuple[int, float]]:
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
