"""The picture of `lab tune`: how many times as fast as the default each choice is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lab.core import shell, shown
from lab.core.lists import plural
from lab.core.stats import Ratio
from lab.features.tune.choices import is_lossy
from lab.features.tune.figures import DEFAULT, TriedRow, Tuned
from lab.show import canvas, text_setup
from lab.show.section import UNKNOWN, WIDE
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DRAWN = 40
LABEL_LETTERS = 34  # in a line of a label
SEARCHED = "search, 95 % interval"
CONFIRMED = "confirmation, 95 % interval"


def plot_tuned(result: Tuned) -> Figure:
    """Draw how many times as fast as the default each choice that `lab tune` tried is.

        lab.plot_tuned(lab.tune(2000, 300, budget="5min"))

    Bars that end at 1 change nothing.
    """
    return draw(result, canvas.new_figure(WIDE))


def draw(result: Tuned, figure: Figure) -> Figure:
    """Draw a row for each choice: the search as diamonds, the winner's confirmation as a square."""
    tried = result.tried
    rows = list(tried[tried.speed > 0].itertuples())[:MOST_DRAWN]
    names = [wrapped(map(shell.without_folders, name_of(row))) for row in rows]
    ax = figure.subplots()
    n_lines = sum(max(2, 1 + name.count("\n")) for name in names)
    figure.set_figheight(1.9 + 0.19 * n_lines)
    for place, row in enumerate(rows):
        draw_choice(ax, place, row, result)
    ax.axvline(1, color=canvas.GUIDE, lw=1.2)
    ax.set_yticks(range(len(rows)), names, fontsize=canvas.SMALL_SIZE)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.95), max(high, 1.05))
    ax.set_xlabel("times as fast as the default\n\u2190 slower | faster \u2192")
    canvas.finish([ax], title_of(result, len(rows)), is_apart=True)
    return figure


def title_of(result: Tuned, n_rows: int) -> str:
    """What was found, then the model, the machine and the request."""
    lengths = f"{result.default.run.n_prompt:,} + {plural(result.asked.n_gen, 'token')}"
    subject = f"{subject_of(result)}: {lengths}"
    if n_rows == MOST_DRAWN:
        subject = f"{subject}; the {n_rows} fastest choices"
    return f"{finding(result)}\n{subject}"


def finding(result: Tuned) -> str:
    """What is recommended and its confirmed gain, or that nothing is."""
    if result.gain is None or result.won is None:
        return "No other setting is confirmed to be faster than the default"
    name = shell.without_folders(result.won)
    speed = (
        f"{digits(result.gain.estimate)} times as fast as the default ({ends(result.gain)})"
    )
    if not result.is_recommended:
        return f"No clear gain: {name} is {speed}"
    return f"{name} is {speed}"


def subject_of(result: Tuned) -> str:
    """The model and machine, and how many runs were disturbed."""
    where = text_setup.where([result.default])
    timed = result.runs.dropna(subset=["block"])
    n_disturbed = int(timed.is_disturbed.astype(bool).sum())
    return shown.titled(where, n_disturbed, f"{len(timed)} runs")


def draw_choice(ax: Axes, place: int, row: TriedRow, result: Tuned) -> None:
    """Draw a choice, and write its figure beside it. Of the winner only what was confirmed."""
    text = speed_of(row)
    if row.settings == result.won and result.gain is not None:
        draw_ratio(ax, place, result.gain, CONFIRMED)
        text = f"{digits(result.gain.estimate)} ({ends(result.gain)})"
    elif row.settings != DEFAULT:
        draw_ratio(ax, place, Ratio(row.speed, row.speed_low, row.speed_high), SEARCHED)
        text = f"{speed_of(row)} ({interval_of(row)})"
    canvas.write_beside(ax, place, text, canvas.SMALL_SIZE)


def draw_ratio(ax: Axes, place: int, ratio: Ratio, label: str) -> None:
    reach_left = max(0.0, ratio.estimate - ratio.low)
    reach_right = max(0.0, ratio.high - ratio.estimate)
    colour = canvas.COLOURS[1] if label == CONFIRMED else canvas.COLOURS[0]
    ax.errorbar(
        [ratio.estimate],
        [place],
        xerr=[[reach_left], [reach_right]],
        color=colour,
        label=label,
        marker="s" if label == CONFIRMED else "D",
        ms=6,
        capsize=3,
        ls="",
    )


def wrapped(lines: Iterable[str]) -> str:
    return "\n".join(
        textwrap.fill(line, LABEL_LETTERS, break_on_hyphens=False) for line in lines
    )


def name_of(row: TriedRow) -> list[str]:
    """The settings of a choice, and in a second line that they change the output."""
    lines = [str(row.settings)]
    if is_lossy(row.choice):
        lines.append("changes the model's output")
    return lines


def speed_of(row: TriedRow) -> str:
    """How many times as fast as the default; 1.00 for the default, UNKNOWN for a failed choice."""
    if not row.speed > 0:
        return UNKNOWN
    return "1.00" if row.settings == DEFAULT else digits(row.speed)


def interval_of(row: TriedRow) -> str:
    """The interval of a choice; "" for the default and failed choices."""
    if row.settings == DEFAULT or not row.speed > 0:
        return ""
    return f"{digits(row.speed_low)}-{digits(row.speed_high)}"


def ends(ratio: Ratio) -> str:
    return f"{digits(ratio.low)}-{digits(ratio.high)}"
