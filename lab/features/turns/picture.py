"""The picture of conversations: the tokens of each prompt, and the time of each turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core.record import Record
from lab.features.turns.conversation import DISK, MEMORY, NONE, SLOT
from lab.features.turns.figures import TurnRow
from lab.features.turns.sentences import SERVER
from lab.show import canvas

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TICKS = 16  # numbers of turns below a picture
TITLES = {
    MEMORY: "cache in memory",
    SLOT: "a slot for each conversation",
    DISK: "cache on disk",
    NONE: "no cache",
    SERVER: "the server's cache",
}
AGAIN = "read again"
NEW = "new tokens (prefill)"
PERFECT = "with a perfect cache (other runs, or a formula)"


def draw(
    rows: Sequence[TurnRow], records: Sequence[Record], title: str, figure: Figure
) -> None:
    """Tokens of each prompt (cached, read again, new), and below the time of each turn, with lines
    to compare with."""
    import pandas as pd

    conversations = list(pd.DataFrame(rows).groupby(["conversation", "keep"], sort=False))
    figure.set_figheight(figure.get_figheight() * 1.4)
    axes = figure.subplots(2, len(conversations), sharex=True, sharey="row", squeeze=False)
    for (tokens, times), ((_, keep), turns) in zip(axes.T, conversations, strict=True):
        stack_bars(
            tokens,
            turns,
            {
                "cached": (turns.n_cached, canvas.GRID),
                AGAIN: (turns.n_again, canvas.COLOURS[3]),
                NEW: (turns.n_computed - turns.n_again, canvas.OF_PREFILL),
            },
        )
        stack_bars(
            times,
            turns,
            {
                AGAIN: (turns.again_s, canvas.COLOURS[3]),
                NEW: (turns.ttft_s - turns.again_s, canvas.OF_PREFILL),
                "decode": (turns.turn_s - turns.ttft_s, canvas.OF_DECODE),
            },
        )
        if not turns.perfect_s.equals(turns.turn_s):
            draw_line(times, turns, turns.perfect_s, PERFECT, "-")
        draw_line(times, turns, turns.without_s, "without a cache", "--")
        draw_line(times, turns, turns.expected_turn_s, "predicted", ":")
        tokens.set_title(TITLES[keep], fontsize=canvas.PANEL_SIZE)
        name_turns(times, turns, len(conversations))
    axes[0, 0].set_ylabel("tokens of the prompt")
    axes[1, 0].set_ylabel("time of the turn (s)")
    canvas.finish(list(axes.flat), title, is_apart=True)


def stack_bars(ax: Axes, turns: pd.DataFrame, parts: dict[str, tuple[pd.Series, str]]) -> None:
    """Draw a bar for each turn, with these parts on top of each other: values and colours."""
    top = 0 * turns.turn
    for label, (values, colour) in parts.items():
        height = values.fillna(0)
        ax.bar(turns.turn, height, bottom=top, color=colour, label=label)
        top = top + height


def draw_line(
    ax: Axes, turns: pd.DataFrame, times_s: pd.Series, label: str, line_style: str
) -> None:
    """Draw a line across the bar of each turn, if the times of all turns are known."""
    if times_s.notna().all():
        left = turns.turn - 0.45
        right = turns.turn + 0.45
        ax.hlines(times_s, left, right, color=canvas.INK, ls=line_style, lw=1.6, label=label)


def name_turns(ax: Axes, turns: pd.DataFrame, n_panels: int) -> None:
    """Write the turns' numbers below the bars, and what broke the cache."""
    has_breaks = turns.breaks.any()
    ax.set_xlabel("turn, and what broke the cache" if has_breaks else "turn")
    named = turns.iloc[:: math.ceil(len(turns) * n_panels / MOST_TICKS)]
    labels = []
    for turn in named.itertuples():
        breaks = turn.breaks.replace(", ", "\n")
        labels.append(f"{turn.turn}\n{breaks}".rstrip())
    ax.set_xticks(named.turn, labels)
