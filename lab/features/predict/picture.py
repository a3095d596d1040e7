"""The picture of predictions: the time of a request on each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core.lists import plural
from lab.errors import LabError
from lab.roofline.prediction import Prediction
from lab.show import canvas
from lab.show.canvas import COLOURS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_requests(rows: Sequence[Prediction], ax: Axes | None = None) -> Axes:
    """Stacked bars of prefill and decode over devices, fastest first, with the range of the whole.

    The bars have the times of the table: the expected ones.

        lab.plot_requests(lab.predict("8000", 300, "llama-3.1-8b", "geforce")[:5])
    """
    if not rows:
        raise LabError(
            "There is nothing to draw: no predictions are given.", "Make some: lab predict"
        )
    ax = ax or canvas.new_axes()
    figure = canvas.figure_of(ax)
    first = rows[0]
    from_below = rows[::-1]
    has_several_models = len({row.label for row in rows}) > 1
    names = []
    prefill_s = []
    decode_s = []
    for row in from_below:
        if has_several_models:
            names.append(f"{row.name}, {row.label}")
        else:
            names.append(row.name)
        prefill_s.append(row.prefill.shown_s)
        decode_s.append(row.e2e.shown_s - row.prefill.shown_s)
    ax.barh(names, prefill_s, color=COLOURS[0], label="prefill")
    ax.barh(
        names,
        decode_s,
        left=prefill_s,
        color=COLOURS[1],
        hatch="//",
        edgecolor="white",
        label="decode",
    )
    for name, row in zip(names, from_below, strict=True):
        dashes = "-" if row.is_measured else "--"
        ax.plot(row.e2e_s, [name, name], ls=dashes, color=INK, lw=1.2)
    ax.plot([], [], color=INK, ls="--", label="90 % range, predicted")
    if any(row.is_measured for row in rows):
        ax.plot([], [], color=INK, ls="-", label="range, measured")
    ax.set_xlabel("time of the request (s)")
    figure.set_figheight(max(figure.get_figheight(), 1.6 + 0.28 * len(rows)))
    canvas.finish(
        [ax],
        f"Time of a request on each device\n"
        f"{first.label}: {plural(first.n_prompt, 'token')} in, {first.n_gen:,} out",
    )
    return ax
