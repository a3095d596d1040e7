"""The picture of stalls: how long streams waited for each token while a newcomer's prompt was prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.analysis import setup_columns, table
from lab.analysis.wording import seconds
from lab.core import gaps
from lab.core.gaps import Gaps
from lab.core.record import OK, Record
from lab.errors import LabError
from lab.runner import machine
from lab.show.canvas import COLOURS, GUIDE, LINES, MARKERS, plain_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 4

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
    timed = [record for record in records if record.run.status == OK and not record.run.warmup]
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
    if len(chunks) > MOST_PANELS:
        chunks = [chunks[round(i * (len(chunks) - 1) / (MOST_PANELS - 1))] for i in range(MOST_PANELS)]
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
