"""The answer as a section: both figures, the table of parts, a sentence and a picture."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core.shown import MARK, NOT_TO_BE_TRUSTED
from lab.features.why.answer import WhyAnswer
from lab.features.why.conclusion import conclude
from lab.features.why.parts import NOT_EXPLAINED, GapPart
from lab.show import canvas
from lab.show.section import WIDE, Picture, Section, tabled
from lab.show.wording import UNKNOWN, digits, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

ABOUT = (
    "The factors multiply to the ratio. Their ranges are 95 % intervals, predicted ones 90 %. "
    "The range of the rest combines those of the parts and of both figures."
)
NEARLY_EQUAL = 1.005
FIELDS = (
    "tps",
    "phase",
    "counts",
    "source",
    "label",
    "n_prompt",
    "n_gen",
    "depth",
    "n_streams",
)
"""Fields of a figure in JSON."""


def section(explained: WhyAnswer) -> Section:
    """The answer as it is printed, and drawn on a page."""
    fast, slow = explained.pair.letters
    lines = []
    for letter, figure in explained.pair.in_order:
        lines.append(f"{letter}  {digits(figure.tps):>6} tokens/s   {figure.label}")
    lines += explained.notes
    if explained.ratio > NEARLY_EQUAL:
        lines.append(f"{fast} is {times(explained.ratio)} as fast as {slow}. Of this:")
    else:
        lines.append("They are equal.")
    columns = (
        ("part", lambda part: part.name),
        ("factor", factor_cell),
        ("range", range_cell),
        ("by order", orders_cell),
        ("how known", lambda part: part.how),
    )
    notes = [f"{part.name}: {part.reason}" for part in explained.parts if part.reason]
    conclusion = conclude(explained)
    sentences = [conclusion.sentence]
    if conclusion.command:
        sentences.append(f"Try: {conclusion.command}")
    caption = "The way from one rate to the other, part by part."
    return Section(
        name="why",
        question="Why do these two figures differ?",
        words=lines,
        **tabled(columns, explained.parts),
        notes=[*notes, ABOUT],
        sentences=sentences,
        pictures=[Picture("why", caption, partial(draw, explained), WIDE)],
    )


def factor_cell(part: GapPart) -> str:
    """The factor, with the mark of a trial whose runs were disturbed."""
    if not part.has_factor:
        return UNKNOWN
    if part.is_doubtful:
        return f"{times(part.factor)} {NOT_TO_BE_TRUSTED}"
    if part.n_disturbed:
        return f"{times(part.factor)} {MARK}"
    return times(part.factor)


def range_cell(part: GapPart) -> str:
    """The range of a factor; "" if it is exact or not known."""
    if not part.half or part.range is None:
        return ""
    low, high = part.range
    return f"{low:.3g}-{high:.3g}"


def orders_cell(part: GapPart) -> str:
    """The factor on the way there and on the way back, if they differ; else ""."""
    if not part.orders or not part.depends_on_order:
        return ""
    there, back = map(times, map(math.exp, part.orders))
    return f"{there} or {back}"


def draw(explained: WhyAnswer, drawing: Drawing) -> None:
    """A waterfall from the faster rate to the slower one on a logarithmic axis, with ranges."""
    ax = drawing.subplots()
    parts = [part for part in explained.parts if part.log or part.half]
    rates = [explained.pair.fast.tps, explained.pair.slow.tps]
    ax.barh([0, len(parts) + 1], rates, color=canvas.COLOURS[0])
    rate = explained.pair.fast.tps
    for place, part in enumerate(parts, 1):
        rates += draw_part(ax, place, part, rate)
        rate /= part.factor
    fast, slow = explained.pair.letters
    names = [f"{fast}: {digits(explained.pair.fast.tps)}"]
    names += [part.name for part in parts]
    names.append(f"{slow}: {digits(explained.pair.slow.tps)}")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(min(rates) / 1.15, max(rates) * 1.05)
    ax.set_xlabel("tokens/s")
    canvas.finish([ax], f"Why {fast} is {times(explained.ratio)} as fast as {slow}")


def draw_part(ax: Axes, place: int, part: GapPart, rate: float) -> list[float]:
    """A bar from the rate before a part to the rate after it; the rates that the axis must show."""
    after = rate / part.factor
    left = min(rate, after)
    ax.barh([place], [abs(rate - after)], left=[left], color=colour_of(part), alpha=0.8)
    ax.plot([rate, rate], [place - 1, place + 0.4], color=canvas.GUIDE, lw=0.8)
    rates = [after]
    label = factor_cell(part)
    if part.half and part.range:
        whisker = [rate / part.range[0], rate / part.range[1]]
        ax.plot(whisker, [place, place], color=canvas.INK, lw=1.5, marker="|", ms=8)
        rates += whisker
        label = f"{label} ({range_cell(part)})"
    ax.text(1.01, place, label, transform=ax.get_yaxis_transform(), va="center", fontsize=9)
    return rates


def colour_of(part: GapPart) -> str:
    """The colour of a part: what slows, what speeds up, and what is not explained."""
    if part.name == NOT_EXPLAINED:
        return canvas.GUIDE
    if part.log > 0:
        return canvas.COLOURS[1]
    return canvas.COLOURS[2]


def document(explained: WhyAnswer) -> dict[str, Any]:
    """The answer as JSON."""
    conclusion = conclude(explained)
    sides = dict[str, Any]()
    for letter, figure in explained.pair.sides:
        fields = {name: getattr(figure, name) for name in FIELDS}
        sides[letter] = {**fields, "settings": dict(figure.settings)}
    return {
        **sides,
        "slower": explained.pair.letters[1],
        "ratio": explained.ratio,
        "parts": list(map(part_document, explained.parts)),
        "causes": [part.name for part in explained.causes],
        "notes": list(explained.notes),
        "sentence": conclusion.sentence,
        "command": conclusion.command or None,
        "results": str(explained.path) if explained.path else None,
    }


def part_document(part: GapPart) -> dict[str, Any]:
    """A part as JSON."""
    low, high = part.range or (None, None)
    return {
        "part": part.name,
        "factor": part.factor if part.has_factor else None,
        "low": low,
        "high": high,
        "how": part.how,
        "why": part.reason,
        "runs": part.n_runs,
        "disturbed": part.n_disturbed,
    }
