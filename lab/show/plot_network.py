"""The picture of what a network costs: the decode rate over the round trip, predicted, and measured where it was."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.analysis import networks
from lab.analysis.networks import Row
from lab.core import network
from lab.core.link import Link, bandwidth
from lab.core.network import Traffic
from lab.core.record import Record
from lab.core.stats import median_interval
from lab.runner import machine
from lab.show.canvas import COLOURS, GUIDE, LINES, MARKERS, plain_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N_POINTS = 200
"""Of a line."""


@dataclass(frozen=True)
class Curve:
    """What is predicted over all round trips at one bandwidth: a token's time without a network, and its traffic."""

    local_s: float
    token: Traffic  # of `n` tokens
    n: int
    bytes_per_s: float | None

    def rate(self, round_trip_s: float) -> float:
        """Tokens a second."""
        return 1 / (self.local_s + network.seconds(self.token, Link(round_trip_s, self.bytes_per_s)) / self.n)


def plot_network(
    rows: Sequence[Row], curves: Sequence[Curve], subject: str, figure: Figure, last_s: float = 0.0
) -> Figure:
    """Lines are predicted, points are runs, bars the intervals of their medians, where there are enough for one.

    It reaches to a round trip of `last_s`, and to the longest of a row.
    """
    ax = figure.subplots()
    last_s = 1.05 * max([last_s, *(row.link.round_trip_s for row in rows)]) or 1e-3
    _lines(ax, curves, last_s)
    _points(ax, rows)
    if curves:
        ax.axhline(1 / curves[0].local_s, color=GUIDE, ls=":", lw=1.2, label="without a network")
    ax.set_xlim(-0.02 * 1e3 * last_s, 1e3 * last_s)
    ax.set_ylim(bottom=0)
    plain_ticks(ax.xaxis)
    plain_ticks(ax.yaxis)
    ax.set_xlabel("round trip between the lab and a server (ms, as ping shows it)")
    ax.set_ylabel("decode rate (tokens per second)")
    ax.set_title(f"What the network costs\n{subject}", fontsize=11)
    tidy(ax)
    return figure


def drawing(
    rows: Sequence[Row], curves: Sequence[Curve], subject: str, last_s: float = 0.0
) -> Callable[[Figure], Figure]:
    """What `canvas.write` takes."""
    return lambda figure: plot_network(rows, curves, subject, figure, last_s)


def drawings(records: Sequence[Record]) -> dict[str, Callable[[Figure], Figure]]:
    """The picture of runs over several networks, by its name; none of runs of several models or placements."""
    linked = [record for record in records if record.run.link is not None and record.run.placement is not None]
    layers = {record.run.placement.layers for record in linked if record.run.placement}
    rows = networks.rows(linked) if len(layers) == 1 and len({record.model.name for record in linked}) == 1 else []
    if len({row.link for row in rows}) < 2 or len({(row.n_prompt, row.n_gen) for row in rows}) > 1:
        return {}
    model, n_servers = linked[0].model, len(set(*layers))
    subject = f"{model.name} {model.quantization or ''} over {n_servers} servers, {machine.label(linked[0].machine)}"
    return {"network": drawing(rows, curves_of(rows), subject)}


def curves_of(rows: Sequence[Row]) -> list[Curve]:
    """The curves that belong to measured rows: one for each bandwidth, the widest first."""
    widest_first = sorted({row.link.bytes_per_s or float("inf") for row in rows}, reverse=True)
    curves = []
    for bytes_per_s in widest_first:
        row = next(row for row in rows if (row.link.bytes_per_s or float("inf")) == bytes_per_s)
        n = row.n_gen - 1
        local_s = row.expected_tpot_s - network.seconds(row.token, row.link) / n
        curves.append(Curve(local_s, row.token, n, row.link.bytes_per_s))
    return curves


def _lines(ax: Axes, curves: Sequence[Curve], last_s: float) -> None:
    for number, curve in enumerate(curves):
        at = [last_s * i / N_POINTS for i in range(N_POINTS + 1)]
        colour, line = COLOURS[number % len(COLOURS)], LINES[number % len(LINES)]
        name = f"predicted, {bandwidth(curve.bytes_per_s)}"
        ax.plot([1e3 * s for s in at], [curve.rate(s) for s in at], lw=1.8, color=colour, ls=line, label=name)


def _points(ax: Axes, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(curve.bytes_per_s for curve in curves_of(rows)))
    is_named = set()
    for row in rows:
        number, at = names.index(row.link.bytes_per_s), 1e3 * row.link.round_trip_s
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        label = None if number in is_named else f"measured, {bandwidth(row.link.bytes_per_s)}"
        is_named.add(number)
        rates = [1 / seconds for seconds in row.tpot_s]
        ax.plot([at] * len(rates), rates, ls="", marker=marker, ms=4, alpha=0.4, mew=0, color=colour)
        middle, interval = statistics.median(rates), median_interval(rates)
        reach = [[middle - interval.low], [interval.high - middle]] if interval else None
        ax.errorbar([at], [middle], yerr=reach, marker=marker, ms=8, mfc="none", color=colour, ls="", label=label)
