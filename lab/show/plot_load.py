"""The pictures of loads by name, and that of latency over load.

Each request is a point, and lines are what the table gives: medians, and percentiles that some request is beyond.
Throughput is in plot_throughput.py, the timeline of requests in plot_timeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis import load_figures, load_sessions, loads
from lab.analysis.load_figures import ArmFigures, Latency
from lab.analysis.loads import Sample
from lab.core.record import Machine, Record
from lab.core.request import Endpoint, RequestRecord
from lab.core.request_figures import Figures
from lab.core.server_load import CLOSED
from lab.errors import LabError
from lab.runner import machine as machines
from lab.show import plot_throughput, plot_timeline
from lab.show.canvas import COLOURS, GUIDE, LINES, MARKERS, plain_ticks
from lab.show.plot_throughput import WIDE, legend_below, plain_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 400
"""Points of an arm: of more requests, evenly spread ones of their order."""

WIDTH = 0.16
"""Over how much of the distance to an arm's neighbour its points are spread, to each side."""

TITLES = {
    "load": "Latency over load",
    "throughput": "Throughput against latency",
    "timeline": "The timeline of requests",
}


def title(endpoint: Endpoint, model: str, machine: Machine) -> str:
    """Which model, server and client: such as "tiny on llama-server b1, 4 slots; client: 8 cores"."""
    server = " ".join(word for word in (endpoint.server, endpoint.version) if word) or "a server without a name"
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    slots = "" if n_slots is None else f", {n_slots} slot{'s' * (n_slots != 1)}"
    return f"{model} on {server}{slots}; client: {machines.label(machine)}"


def size(name: str) -> tuple[float, float]:
    """Inches of the picture of that name."""
    return (11, 7) if name.startswith("timeline") else (11, 5)


def plot_arms(records: Sequence[Record | RequestRecord], name: str = "load", figure: Figure | None = None) -> Figure:
    """A picture of the first session of loads among records: load (latency over it), throughput, or timeline.

        lab.plot_arms(lab.load(url, concurrency="1,2,4"), "throughput")

    LabError where there is nothing to draw.
    """
    sessions = load_sessions.sessions(records)
    if not sessions:
        raise LabError("There is nothing to draw: no request is of a load.", "Make some: lab load --url URL")
    one = sessions[0]
    n_slots = one.endpoint.settings.n_slots if one.endpoint.settings else None
    drawn = drawings(one.samples, title(one.endpoint, one.model, one.machine), n_slots)
    if name not in drawn:
        raise LabError(f"There is no picture {name!r} of this load.", f"There is: {', '.join(drawn)}")
    if figure is None:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=size(name), layout="constrained")
    drawn[name](figure)
    return figure


def drawings(samples: Sequence[Sample], title: str, n_slots: int | None = None) -> dict[str, Callable[[Figure], Any]]:
    """What draws the pictures that there is data for: load, throughput, timeline.

    Of open loops beside closed ones, or of several lengths, each has its own: load-2, ... `n_slots` of the server are
    drawn beside its users.
    """
    groups: dict[tuple[bool, str], list[ArmFigures]] = {}
    for arm in loads.arms(samples):
        groups.setdefault((arm.load.arrivals == CLOSED, arm.load.lengths), []).append(load_figures.figures_of(arm))
    draw_by_name: dict[str, Callable[[Figure], Any]] = {}
    for number, ((_, lengths), shown) in enumerate(groups.items(), 1):
        suffix = f"-{number}" if number > 1 else ""
        below = f"{title}\n{lengths}; {_window(shown)}"
        if any(one.ttft for one in shown):
            draw_by_name[f"load{suffix}"] = _titled(plot_latency, shown, f"{TITLES['load']}\n{below}", n_slots)
        if any(one.tokens_tps and one.ttft for one in shown):
            draw_by_name[f"throughput{suffix}"] = _titled(
                plot_throughput.plot_throughput, shown, f"{TITLES['throughput']}\n{below}"
            )
        arms = [one.arm for one in shown]
        draw_by_name[f"timeline{suffix}"] = _titled(
            plot_timeline.plot_timeline, arms, f"{TITLES['timeline']}\n{title}\n{lengths}"
        )
    return draw_by_name


def _titled(draw: Callable[..., Any], of: Sequence[Any], title: str, *more: Any) -> Callable[[Figure], Any]:
    def titled(figure: Figure) -> None:
        draw(of, figure, *more)
        figure.suptitle(title, fontsize=11)

    return titled


def _window(shown: Sequence[ArmFigures]) -> str:
    load, n = shown[0].arm.load, max(len(one.arm.rounds) for one in shown)
    return f"window of {load.duration_s:g} s, {n} round{'s' * (n > 1)}"


def plot_latency(shown: Sequence[ArmFigures], figure: Figure, n_slots: int | None = None) -> None:
    """TTFT and TPOT over the load: a point a request, lines of the median and of percentiles.

    Limits are dashed; where users are more than the server's slots, the slots are a dotted line.
    """
    slo = next((one.arm.load.slo for one in shown if one.arm.load.slo), None)
    has_tpot = any(one.tpot for one in shown)
    axes = figure.subplots(1, 1 + has_tpot, squeeze=False)[0]
    is_bound = any(one.tpot_is_bound for one in shown)
    of_tpot = load_figures.tpot_bound_s if is_bound else load_figures.tpot_s
    _latency_panel(axes[0], shown, "ttft", load_figures.ttft_s, 1, slo.ttft_s if slo else None)
    is_open = shown[0].arm.load.arrivals != CLOSED
    axes[0].set_ylabel("TTFT (s)" + (" from the intended time" if is_open else ""))
    if has_tpot:
        _latency_panel(axes[1], shown, "tpot", of_tpot, 1e3, slo.tpot_s if slo else None)
        axes[1].set_ylabel("TPOT (ms)" + (", at most" if is_bound else ""))
    for ax in axes:
        _load_axis(ax, shown, n_slots)
        plain_panel(ax)
    if slo and slo.words:
        axes[0].plot([], [], color=GUIDE, ls="--", lw=1.4, label=f"limit: {slo.words}")
    _failures(axes[0], shown)
    legend_below(figure, axes[0])


def _latency_panel(
    ax: Axes,
    shown: Sequence[ArmFigures],
    name: str,
    of: Callable[[Figures], float | None],
    factor: float,
    limit_s: float | None,
) -> None:
    lines: dict[str, tuple[list[float], list[float]]] = {"median": ([], []), "95 %": ([], []), "99 %": ([], [])}
    largest = 0.0
    for place, one in zip(_places(shown), shown, strict=True):
        measured = sorted(factor * value for value in load_figures.values(one.arm.inside, of))
        largest = max([largest, *measured])
        drawn = _thinned(measured)
        xs = [place + WIDTH * (2 * (0.618034 * i % 1) - 1) for i in range(len(drawn))]
        label = "requests" if place == 0 else None
        ax.plot(xs, drawn, ls="", marker="o", ms=4, alpha=0.5, mew=0, color=COLOURS[5], label=label)
        latency: Latency | None = getattr(one, name)
        if latency is None:
            continue
        tails = (("median", latency.median_s), *_tails(latency))
        for line, value in tails:
            lines[line][0].append(place)
            lines[line][1].append(factor * value)
    for number, (line, (xs, ys)) in enumerate(lines.items()):
        if xs:
            style: dict[str, Any] = {
                "color": COLOURS[(0, 1, 3)[number]],
                "ls": LINES[number],
                "marker": MARKERS[number],
            }
            ax.plot(xs, ys, lw=1.8, ms=5, label=line, **style)
    medians = [y for y in lines["median"][1] if y > 0]
    if medians and max(largest, factor * (limit_s or 0)) > WIDE * min(medians):
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.08 * max(largest, factor * (limit_s or 0)))
    plain_ticks(ax.yaxis)
    if limit_s is not None:
        ax.axhline(factor * limit_s, color=GUIDE, ls="--", lw=1.4)


def _tails(latency: Latency) -> list[tuple[str, float]]:
    return [(name, tail.value_s) for name, tail in (("95 %", latency.p95), ("99 %", latency.p99)) if tail]


def _thinned(ordered: Sequence[float]) -> list[float]:
    """At most MOST_POINTS of ordered values, evenly spread, with both ends."""
    if len(ordered) <= MOST_POINTS:
        return list(ordered)
    return [ordered[i * (len(ordered) - 1) // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def _places(shown: Sequence[ArmFigures]) -> list[int]:
    """Arms stand in order, at equal distances: their levels are whatever was asked for."""
    return list(range(len(shown)))


def _load_axis(ax: Axes, shown: Sequence[ArmFigures], n_slots: int | None) -> None:
    levels = [one.arm.level for one in shown]
    names = ["replay" if level is None else f"{level:g}" for level in levels]
    ax.set_xticks(_places(shown), names)
    ax.set_xlim(-0.5, len(shown) - 0.5)
    is_closed = shown[0].arm.load.arrivals == CLOSED
    ax.set_xlabel("users" if is_closed else "requests per second")
    n_inside = sum(level is not None and n_slots is not None and level <= n_slots for level in levels)
    if is_closed and n_slots is not None and n_inside < len(levels):
        words = f"right of it: more users than the server's {n_slots} slot{'s' * (n_slots > 1)}"
        ax.axvline(n_inside - 0.5, color=GUIDE, ls=":", lw=1.4, label=words)


def _failures(ax: Axes, shown: Sequence[ArmFigures]) -> None:
    for place, one in zip(_places(shown), shown, strict=True):
        if n := one.n - one.n_ok:
            text = f"{n} of {one.n}\nfailed"
            ax.text(place, 1.0, text, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
