"""The picture of decode with limited memory: tokens per second against the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.features.start.memory_figures import MemoryLimit
from lab.show import canvas
from lab.show.canvas import COLOURS, INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_memory(
    figure: Figure, limits: Sequence[MemoryLimit], file_bytes: int, subject: str
) -> None:
    """Draw each start as a point, the medians as a line, and the predicted ranges as bars."""
    ax = figure.subplots()
    limited = [limit for limit in limits if limit.limit_bytes is not None]
    sizes_gb = [(limit.limit_bytes or 0) / 1e9 for limit in limited]
    rates = [1 / limit.token_s for limit in limited]
    ax.plot(sizes_gb, rates, "-", color=COLOURS[0], label="median")
    for size_gb, limit in zip(sizes_gb, limited, strict=True):
        starts_tps = 1 / limit.starts.token_s
        is_first = limit is limited[0]
        label = "each start" if is_first else None
        ax.plot([size_gb] * len(starts_tps), starts_tps, ".", color=INK, label=label)
        if limit.expected_s is not None:
            ends = [1 / limit.expected_s[1], 1 / limit.expected_s[0]]
            label = "predicted from the other limits" if is_first else None
            (bar,) = ax.plot([size_gb] * 2, ends, "-", lw=8, alpha=0.4, label=label)
            bar.set(color=COLOURS[1], solid_capstyle="butt")
    for limit in limits:
        if limit.limit_bytes is None:
            ax.axhline(1 / limit.token_s, color=INK, ls="--", lw=1, label="without a limit")
    ax.axvline(file_bytes / 1e9, color=COLOURS[0], ls=":", label="size of the file")
    ax.set(yscale="log", xlabel="memory of the process (GB)", ylabel="decode (tokens/s)")
    canvas.plain_ticks(ax.yaxis)
    canvas.finish([ax], f"Decode with less memory than the model needs\n{subject}")
