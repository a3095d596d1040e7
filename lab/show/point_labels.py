"""Labels beside points, each at the nearest place where it hides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.show import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

GAP = 0.12  # inches between a point and its label
LETTER_WIDTH = 0.075
LETTER_HEIGHT = 0.15
"""Of a label beside a point, in inches."""

N_TRIES = 80  # heights that are tried for a label, above and below its point


def label_points(
    ax: Axes,
    labels: Sequence[tuple[float, float, str]],
    avoid: Sequence[tuple[float, float]] = (),
) -> None:
    """Write each text beside its point, clear of others and of `avoid`; call it last."""
    from matplotlib.transforms import Bbox

    figure = canvas.figure_of(ax)
    figure.draw_without_rendering()  # so that the layout is known
    radius = figure.dpi / 16
    taken: list[Bbox] = []
    for point in (*avoid, *((x, y) for x, y, _ in labels)):
        x, y = ax.transData.transform(point)
        taken.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    for x, y, text in sorted(labels, key=lambda label: -label[1]):
        box, is_left = _free_box(ax, x, y, text, taken)
        taken.append(box)
        corner = (box.x0, (box.y0 + box.y1) / 2)
        if is_left:
            corner = (box.x1, (box.y0 + box.y1) / 2)
        ax.annotate(
            text,
            (x, y),
            tuple(ax.transAxes.inverted().transform(corner)),
            textcoords="axes fraction",
            ha="right" if is_left else "left",
            va="center",
            fontsize=canvas.SMALL_SIZE,
            arrowprops={
                "arrowstyle": "-",
                "lw": 0.5,
                "color": canvas.GUIDE,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )


def _free_box(
    ax: Axes, x: float, y: float, text: str, taken: Sequence[Bbox]
) -> tuple[Bbox, bool]:
    """The nearest free place for a label in pixels, and whether it is at the left of its point.

    Without a free one: beside the point.
    """
    from matplotlib.transforms import Bbox

    inch = canvas.figure_of(ax).dpi
    frame = ax.get_window_extent()
    at_x, at_y = ax.transData.transform((x, y))
    width = (LETTER_WIDTH * len(text) + 0.05) * inch
    height = LETTER_HEIGHT * inch
    left = at_x + GAP * inch
    is_left = left + width > frame.x1
    if is_left:
        left = max(frame.x0, at_x - GAP * inch - width)
    for number in range(2 * N_TRIES):
        distance = (number // 2) * height / 4
        if number % 2 == 1:  # above and below in turn, ever farther away
            distance = -distance
        middle = at_y + distance
        box = Bbox.from_bounds(left, middle - height / 2, width, height)
        is_inside = frame.y0 <= box.y0 <= frame.y1 - height
        if is_inside and not box.count_overlaps(taken):
            return box, is_left
    return Bbox.from_bounds(left, at_y, width, height), is_left
