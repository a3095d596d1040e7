"""The picture of sweeps: how both phases slow down through the context, with the fitted laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lab.core import figures, growth
from lab.core.figures import FigureKind
from lab.core.record import DECODE as DECODE_STEPS, Record
from lab.core.results import Readable, measured_of
from lab.core.shown import is_unreliable
from lab.errors import LabError
from lab.show import canvas, selection, summaries, sweep_laws, table, text_growth
from lab.show.canvas import OF_DECODE, OF_PREFILL
from lab.show.sweep_laws import Law
from lab.show.wording import seconds, times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_BREAK = "\u00a0"  # a space at which no line of a legend breaks
N_CURVE = 101  # points of a law's curve


class SweepPhase(NamedTuple):
    """What a panel shows: columns of rows, the unit of y in parts of a second, and labels."""

    name: str
    x: str
    figure: FigureKind
    per_s: float
    colour: str
    x_label: str


PREFILL = SweepPhase(
    "prefill",
    "n_prompt",
    figures.PREFILL,
    1,
    OF_PREFILL,
    "prompt length P (tokens)",
)
DECODE = SweepPhase(
    "decode",
    "position",
    figures.TPOT,
    1e3,
    OF_DECODE,
    "position p (tokens in the context)",
)


def plot_sweep(records: Readable, figure: Figure | None = None) -> Figure:
    """Draw both curves of sweeps, side by side.

        lab.plot_sweep(lab.sweep(4096, every=256))

    Left is prefill time over length, right decode time per token over position. Points are single
    runs, the band is their range, the dashed line the fitted law. LabError if no run is a sweep.
    """
    runs_of_engine = table.of_engine(measured_of(records))
    sweeps = [record for record in runs_of_engine if record.run.is_timed and record.run.every]
    if not sweeps:
        raise LabError("There is nothing to draw: no run is a sweep.", "Make one: lab sweep")
    figure = figure or canvas.new_figure((11, 5))
    rows = table.runs(sweeps)
    rows["position"] = sweep_laws.positions_of(rows)
    left, right = figure.subplots(1, 2)
    setups = table.setups(rows)
    styles_of_prefill = canvas.styles(len(setups), OF_PREFILL)
    styles_of_decode = canvas.styles(len(setups), OF_DECODE)
    for number, (setup, runs) in enumerate(setups):
        name = setup if len(setups) > 1 else ""
        summary = summaries.summary(runs)
        prefill_law = sweep_laws.prefill_law(summary)
        decode_law = sweep_laws.decode_law(summary)
        _draw_phase(left, PREFILL, runs, prefill_law, styles_of_prefill[number], name)
        _draw_phase(right, DECODE, runs, decode_law, styles_of_decode[number], name)
        of_setup = [sweeps[index] for index in dict.fromkeys(runs.run)]
        _mark_cliff(right, of_setup, styles_of_decode[number])
    _finish_panel(left, "Prefill", PREFILL)
    _finish_panel(right, "Decode", DECODE)
    title = "Prefill and decode in one pass through the context"
    if len(setups) == 1:
        title = finding(rows) or title
    canvas.finish([left, right], f"{title}\n{selection.subject(sweeps, rows)}")
    return figure


def finding(rows: pd.DataFrame) -> str | None:
    """How much longer both phases take at the end of the pass than at its first length.

    None for a single length, and if half of the runs were disturbed.
    """
    medians = rows.groupby("n_prompt")[[figures.PREFILL.name, figures.TPOT.name]].median()
    if len(medians) < 2 or is_unreliable(len(rows), int(rows.disturbed.sum())):
        return None
    length = times(medians.index[-1] / medians.index[0])
    growth = medians.iloc[-1] / medians.iloc[0]
    text = (
        f"{length} the prompt takes {times(growth[figures.PREFILL.name])} the time to prefill"
    )
    of_token = growth[figures.TPOT.name]
    if math.isnan(of_token):
        return text
    return f"{text}, and a token after it {times(of_token)} the time"


def _draw_phase(
    ax: Axes,
    phase: SweepPhase,
    runs: pd.DataFrame,
    law: Law | None,
    style: canvas.Style,
    setup: str,
) -> None:
    """Draw the runs of a setup, their range, and the law; `setup` is "" if there is only one."""
    x = runs[phase.x]
    y = runs[phase.figure.name]
    color = style["color"]
    if y.notna().any():
        range_at = y.groupby(x).agg(["min", "max"])
        ax.fill_between(
            range_at.index, range_at["min"], range_at["max"], color=color, alpha=0.2, lw=0
        )
        label = setup or "runs and their range"
        canvas.points(ax, x, y, runs.disturbed, ms=4, alpha=0.6, **style, label=label)
    if law:
        label = f"fitted {phase.name}: {_formula(law)}"
        if setup:
            label = f"{setup}: {label}"
        lengths = [x.max() * i / (N_CURVE - 1) for i in range(N_CURVE)]
        curve = [phase.per_s * law.seconds(length) for length in lengths]
        ax.plot(lengths, curve, ls="--", lw=1.8, color=color, label=label)


def _mark_cliff(ax: Axes, records: Sequence[Record], style: canvas.Style) -> None:
    """A line where decode follows another slope, if a sentence says so."""
    steady = text_growth.steady(records)
    cliff = growth.cliff(steady, DECODE_STEPS) if steady else None
    if cliff is not None:
        label = f"cliff at about {round(cliff.n_past, -1):,.0f}"
        ax.axvline(cliff.n_past, ls=":", lw=1.5, color=style["color"], label=label)


def _formula(law: Law) -> str:
    """The law as a legend writes it, on one line."""
    fixed = seconds(law.a)
    slope = seconds(law.b)
    formula = f"{fixed} + {slope} p"
    if law.c is not None:
        formula = f"{fixed} + {slope} P + {seconds(law.c)} P\u00b2"
    return formula.replace(" ", NO_BREAK)


def _finish_panel(ax: Axes, title: str, phase: SweepPhase) -> None:
    ax.set_title(title, fontsize=canvas.TITLE_SIZE)
    ax.set(xlabel=phase.x_label, ylabel=phase.figure.axis, xlim=(0, None), ylim=(0, None))
