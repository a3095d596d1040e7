"""The pictures of `lab explain`: the roofline with every phase, and the parts of a request's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core import shown
from lab.features.limits.roofline import Explained, Roof
from lab.show import canvas
from lab.show.canvas import COLOURS, INK, MARKERS, PAPER, new_axes, points, write
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HATCHES = ("", "//", "..", "xx", "--")
BETWEEN, ALL_ELSE = "between devices", "all else"

FEW = 5
"""The most lengths that a picture or a sentence names each."""


def plot_roofline(rows: Sequence[Explained], roof: Roof, subject: str, ax: Axes | None = None) -> Axes:
    """GFLOP/s over FLOPs per byte: each phase at each length as a point under the machine's two roofs.

    lab.plot_roofline(lab.explain(records, best), lesson.roof(best), "my machine")
    """
    ax = ax or new_axes()
    low = min([1, *(row.intensity for row in rows)]) / 2
    high = max([roof.ridge, *(row.intensity for row in rows)]) * 3
    ridge = [low, roof.ridge, high]
    label = f"roof: {digits(roof.gbps)} GB/s, then {digits(roof.gflops)} GFLOP/s"
    ax.plot(ridge, [min(roof.gbps * x, roof.gflops) for x in ridge], color=INK, lw=2, label=label)
    labels, marked = list[tuple[float, float, str]](), list[tuple[float, float]]()
    for number, phase in enumerate(("prefill", "decode")):
        chosen = [row for row in rows if row.phase == phase]
        if not chosen:
            continue
        style = {"color": COLOURS[number], "marker": MARKERS[number]}
        unsure = [not shown.is_firm(row.doubts) for row in chosen]
        points(ax, [r.intensity for r in chosen], [r.gflops for r in chosen], unsure, ms=7, **style, label=phase)
        ceilings = [(row.intensity, row.flops / row.least_s / 1e9) for row in chosen]
        bar: dict[str, Any] = {"ls": "", "marker": "_", "ms": 9, "mew": 2, "color": COLOURS[number]}
        ax.plot(*zip(*ceilings, strict=True), **bar, label=f"{phase}: ceiling of its kernels")
        marked += ceilings
        named = chosen if len(chosen) <= FEW else (chosen[0], chosen[-1])
        labels += [(row.intensity, row.gflops, f"{row.n_prompt:,}") for row in named]
        marked += [(row.intensity, row.gflops) for row in chosen]
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(bottom=ax.get_ylim()[0] / 1.5)  # for labels
    ax.set_xlabel("arithmetic intensity (FLOPs per byte)")
    ax.set_ylabel("rate of arithmetic (GFLOP/s)")
    canvas.finish([ax], f"Roofline: the rate of each phase (numbers: prompt tokens)\n{subject}")
    canvas.label_points(ax, labels, marked)
    return ax


def plot_where(rows: Sequence[Explained], subject: str, ax: Axes | None = None) -> Axes:
    """Stacked bars over prompt lengths: the parts of a request's time in percent, by device if there are several.

    lab.plot_where(lab.explain(records, best), "my machine")
    """
    ax = ax or new_axes()
    requests = sorted({(row.n_prompt, row.n_gen) for row in rows})
    gens = {n_gen for _, n_gen in requests}
    labels = [f"{n:,}" if len(gens) == 1 else f"{n:,} + {n_gen:,}" for n, n_gen in requests]
    doubts = [shown.all_of([row.doubts for row in rows if (row.n_prompt, row.n_gen) == one]) for one in requests]
    labels = [label + shown.mark(its) for label, its in zip(labels, doubts, strict=True)]
    names = [f"{phase}: {name}" for phase in ("prefill", "decode") for name in _names(rows, phase)]
    parts: dict[str, list[float]] = {name: [0.0] * len(requests) for name in names}
    for row in rows:
        at = requests.index((row.n_prompt, row.n_gen))
        own = _parts(row)  # scaled to the phase's share of the request
        for name, seconds in own.items():
            parts[f"{row.phase}: {name}"][at] += row.of_request * seconds / sum(own.values())
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    base = [0.0] * len(requests)
    for name, values in parts.items():
        shares = [100 * value / total for value, total in zip(values, totals, strict=True)]
        alike = [other for other in names if other.partition(":")[0] == name.partition(":")[0]]
        number = alike.index(name)
        ax.bar(
            labels,
            shares,
            bottom=base,
            color=COLOURS[0] if name.startswith("prefill") else COLOURS[1],
            alpha=1 - 0.3 * number * 2 / max(2, len(alike) - 1),
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor=PAPER,
            label=name,
        )
        base = [a + b for a, b in zip(base, shares, strict=True)]
    if len(requests) > FEW:
        ax.set_xticks(range(0, len(requests), -(-len(requests) // FEW)))
    ax.set_xlabel("prompt length (tokens)" + (" + generated tokens" if len(gens) > 1 else ""))
    ax.set_ylabel("share of the request's time (%)")
    n_gen = f"{max(gens):,} generated tokens" if len(gens) == 1 else "generated tokens"
    note = "\n!: some runs were disturbed; !!: unreliable" if any(map(shown.mark, doubts)) else ""
    canvas.finish([ax], f"Where the time goes: prompt and {n_gen}\n{subject}{note}")
    return ax


def _parts(row: Explained) -> dict[str, float]:
    """Seconds of a phase's parts, which add up to the measured time unless a kernel was faster than its ceiling.

    Devices that work at the same time share the time of the slowest, in proportion to their own times.
    """
    rest = max(0.0, row.measured_s - row.least_s)
    if not row.shares:
        weights = row.kernels.layers_s + row.kernels.head_s
        cache = "attention" if row.phase == "prefill" else "KV cache"
        return {"weights": weights, cache: row.kernels.attention_s, ALL_ELSE: rest}
    scale = row.least_s / row.kernels.total_s if row.overlaps else 1.0
    parts = {share.device: scale * share.kernels.total_s for share in row.shares}
    between = {} if row.between_s is None else {BETWEEN: scale * row.between_s}
    return parts | between | {ALL_ELSE: rest}


def _names(rows: Sequence[Explained], phase: str) -> list[str]:
    """The names of a phase's parts, in the order of the bars."""
    names = dict.fromkeys(name for row in rows if row.phase == phase for name in _parts(row))
    last = [name for name in (BETWEEN, ALL_ELSE) if name in names]
    return [*(name for name in names if name not in last), *last]


def save_why(rows: Sequence[Explained], roof: Roof, subject: str, folder: Path, stem: str) -> list[Path]:
    """Both as PNG and SVG: `<stem>-roofline`, `<stem>-where`."""
    return [
        *write(lambda figure: plot_roofline(rows, roof, subject, figure.subplots()), folder, f"{stem}-roofline"),
        *write(lambda figure: plot_where(rows, subject, figure.subplots()), folder, f"{stem}-where"),
    ]
