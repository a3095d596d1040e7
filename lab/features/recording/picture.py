"""The picture of a recording: the tokens and the time of each call, with the causes below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core.lists import plural
from lab.features.recording.lines import RecordedCall
from lab.show import canvas

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TICKS = 16
MOST_NAMED = 6  # causes below the bars
LABEL_LETTERS = 14
LEAST_GAP = 0.06  # of all calls, between two named causes
AGAIN = canvas.COLOURS[3]


def draw(
    calls: Sequence[RecordedCall], table: pd.DataFrame, subject: str, figure: Figure
) -> None:
    """Bars of the calls: tokens cached, read again and new; below, their time with decode."""
    figure.set_figheight(figure.get_figheight() * 1.4)
    tokens, times = figure.subplots(2, 1, sharex=True)
    stack_bars(
        tokens,
        table,
        {
            "cached": (table.n_cached, canvas.GRID),
            "read again": (table.n_again, AGAIN),
            "new tokens (prefill)": (
                table.n_computed - table.n_again.fillna(0),
                canvas.OF_PREFILL,
            ),
        },
    )
    stack_bars(
        times,
        table,
        {
            "read again": (table.again_s, AGAIN),
            "new tokens (prefill)": (
                table.prefill_s - table.again_s.fillna(0),
                canvas.OF_PREFILL,
            ),
            "decode": (table.decode_s, canvas.OF_DECODE),
        },
    )
    tokens.set_ylabel("tokens of the prompt")
    times.set_ylabel("time of the call (s)")
    name_calls(times, calls, table)
    title = f"{plural(len(calls), 'recorded call')}: what is read again\n{subject}"
    canvas.finish([tokens, times], title, is_apart=True)


def stack_bars(ax: Axes, table: pd.DataFrame, parts: dict[str, tuple[pd.Series, str]]) -> None:
    """Draw a bar for each call, with these parts on top of each other: values and colours."""
    top = 0.0 * table.call
    for label, (values, colour) in parts.items():
        height = values.fillna(0)
        ax.bar(table.call, height, bottom=top, color=colour, label=label)
        top = top + height


def name_calls(ax: Axes, calls: Sequence[RecordedCall], table: pd.DataFrame) -> None:
    """Write the calls' numbers below the bars, and what broke the cache of the costliest."""
    step = math.ceil(len(calls) / MOST_TICKS)
    costliest = set(table[table.is_broken].nlargest(MOST_NAMED, "n_again").call)
    ticks = []
    labels = []
    named_at = -math.inf
    for call in calls:
        has_room = call.call - named_at >= LEAST_GAP * len(calls)
        if call.call in costliest and has_room:
            named_at = call.call
            ticks.append(call.call)
            labels.append(f"{call.call}\n{short_cause(call)}")
        elif (call.call - 1) % step == 0:
            ticks.append(call.call)
            labels.append(str(call.call))
    ax.set_xlabel("call, and what broke the cache" if costliest else "call")
    ax.set_xticks(ticks, labels, fontsize=canvas.SMALL_SIZE)


def short_cause(call: RecordedCall) -> str:
    """A cause in a few label, without texts."""
    cause = call.cause
    if cause is None:
        return ""
    label = cause.kind
    if cause.part is not None and cause.index is not None:
        label = f"{cause.part} {cause.index + 1}: {cause.kind}"
    return "\n".join(textwrap.wrap(label, LABEL_LETTERS))
