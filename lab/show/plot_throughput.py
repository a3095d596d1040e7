"""The picture of throughput against latency: what all users get, over what one waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis.load_figures import ArmFigures, Latency, Rate
from lab.show.canvas import COLOURS, GUIDE, plain_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR = 0.05
"""Points that are nearer (as a share of both axes) have one label."""

WIDE = 12
"""Where the largest value is so many times the smallest median, an axis of latencies is logarithmic."""


def plot_throughput(shown: Sequence[ArmFigures], figure: Figure) -> None:
    """Tokens per second of all users over median TTFT, and over median TPOT: a point an arm, its range over rounds."""
    names = [name for name in ("ttft", "tpot") if any(getattr(one, name) and one.tokens_tps for one in shown)]
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    is_bound = any(one.tpot_is_bound for one in shown)
    words = {"ttft": ("median TTFT (s)", 1.0), "tpot": ("median TPOT (ms)" + (", at most" if is_bound else ""), 1e3)}
    for ax, name in zip(axes, names, strict=True):
        label, factor = words[name]
        known = [
            (one, _median_and_range(latency, factor), rate)
            for one in shown
            if (latency := getattr(one, name)) and (rate := one.tokens_tps)
        ]
        _throughput_panel(ax, known)
        ax.set_xlabel(label)
        plain_ticks(ax.xaxis)
        plain_ticks(ax.yaxis)
        plain_panel(ax)
    axes[0].set_ylabel("tokens per second, all users")
    legend_below(figure, axes[0])


def _median_and_range(latency: Latency, factor: float) -> tuple[float, float, float]:
    """The median, and the range of the medians of rounds."""
    return factor * latency.median_s, factor * min(latency.by_round_s), factor * max(latency.by_round_s)


def _throughput_panel(ax: Axes, known: Sequence[tuple[ArmFigures, tuple[float, float, float], Rate]]) -> None:
    xs = [middle for _, (middle, _, _), _ in known]
    ys = [rate.value for _, _, rate in known]
    x_range = _to_ends([of for _, of, _ in known])
    y_range = _to_ends([(rate.value, rate.low, rate.high) for _, _, rate in known])
    n = max(len(one.arm.rounds) for one, _, _ in known)
    ax.plot(xs, ys, color=GUIDE, lw=1, zorder=1)
    style: dict[str, Any] = {"ls": "", "marker": "o", "ms": 7, "color": COLOURS[0], "zorder": 2}
    if n > 1:
        label = f"an arm, and its range over {n} rounds"
        ax.errorbar(xs, ys, xerr=x_range, yerr=y_range, capsize=3, label=label, **style)
    else:
        ax.plot(xs, ys, label="an arm", **style)
    if max(xs) > WIDE * min(xs) > 0:
        ax.set_xscale("log")
        ax.set_xlim(right=2 * max(xs))
    else:
        ax.set_xlim(0, 1.3 * max(xs))
    ax.set_ylim(0, 1.15 * max([rate.high for _, _, rate in known] + [1e-9]))
    for x, y, text in _labels(ax, known, xs, ys):
        ax.annotate(text, (x, y), xytext=(7, -4), textcoords="offset points", va="top", fontsize=9)


def _to_ends(ranges: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """How far the low and the high ends are from each middle: never negative, as a median of all need not be inside."""
    return [[max(0, middle - low) for middle, low, _ in ranges], [max(0, high - middle) for middle, _, high in ranges]]


def _labels(
    ax: Axes, known: Sequence[tuple[ArmFigures, Any, Any]], xs: Sequence[float], ys: Sequence[float]
) -> list[tuple[float, float, str]]:
    """Where labels stand; arms that are drawn on top of each other have one."""
    places: list[tuple[float, float]] = [
        tuple(ax.transAxes.inverted().transform(ax.transData.transform(point))) for point in zip(xs, ys, strict=True)
    ]
    groups: list[list[int]] = []
    for i, (x, y) in enumerate(places):
        near = next((g for g in groups if max(abs(places[g[-1]][0] - x), abs(places[g[-1]][1] - y)) < NEAR), None)
        groups.append([i]) if near is None else near.append(i)
    made = []
    for group in groups:
        arms = [known[i][0].arm for i in group]
        first = [f"{arm.level:g}" if arm.level is not None else arm.label for arm in arms[:-1]]
        made.append((xs[group[-1]], ys[group[-1]], ", ".join([*first, arms[-1].load.words])))
    return made


def plain_panel(ax: Axes) -> None:
    """A tidy panel without a legend of its own."""
    legend = tidy(ax).get_legend()
    if legend is not None:
        legend.remove()


def legend_below(figure: Figure, ax: Axes) -> None:
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
