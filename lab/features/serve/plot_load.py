"""The pictures of loads: latency over load, throughput against latency, and requests over time.

Each request is a point. Lines are the medians and percentiles of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped, plural
from lab.core.record import Machine, Record
from lab.core.request import CLOSED, Endpoint, RequestRecord
from lab.core.request_times import Figures
from lab.errors import LabError
from lab.features.serve import load_figures, loads
from lab.features.serve.load_figures import ArmFigures, Latency, Rate
from lab.features.serve.loads import Arm, Round, Sample
from lab.runner import machine as machines
from lab.show import canvas
from lab.show.canvas import COLOURS, GRID, GUIDE, MARKERS
from lab.show.section import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TAILS = ("95th percentile", "99th percentile")

WIDE = 12
"""If the largest value exceeds the smallest median by more than this factor, an axis of latencies is logarithmic."""


def plot_throughput(shown: Sequence[ArmFigures], title: str, figure: Figure) -> None:
    """Tokens per second of all users over median TTFT and median TPOT: a point per load, with its range over rounds."""
    names = [name for name in ("ttft", "tpot") if any(getattr(one, name) and one.tokens_tps for one in shown)]
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    is_bound = any(one.tpot_is_bound for one in shown)
    words = {"ttft": ("median TTFT (s)", 1.0), "tpot": ("median TPOT (ms)" + (", at most" if is_bound else ""), 1e3)}
    drawn = []
    for ax, name in zip(axes, names, strict=True):
        label, factor = words[name]
        known = [
            (one, (factor * latency.median_s, factor * min(latency.by_round_s), factor * max(latency.by_round_s)), rate)
            for one in shown
            if (latency := getattr(one, name)) and (rate := one.tokens_tps)
        ]
        bars = [(x, rate.value) for _, (_, *ends), rate in known for x in _along(*ends)]
        bars += [(middle, y) for _, (middle, *_), rate in known for y in _along(rate.low, rate.high)]
        drawn.append((ax, _throughput_panel(ax, known), bars))
        ax.set_xlabel(label)
    axes[0].set_ylabel("tokens per second, all users")
    canvas.finish(axes, title, is_apart=True)
    for ax, labels, bars in drawn:
        canvas.label_points(ax, labels, bars)


def _along(low: float, high: float) -> list[float]:
    """Positions on a bar, which labels avoid."""
    return [low + (high - low) * i / 20 for i in range(21)]


def _throughput_panel(
    ax: Axes, known: Sequence[tuple[ArmFigures, tuple[float, float, float], Rate]]
) -> list[tuple[float, float, str]]:
    """Draws the points, and returns their labels."""
    xs = [middle for _, (middle, _, _), _ in known]
    ys = [rate.value for _, _, rate in known]
    x_range = _to_ends([of for _, of, _ in known])
    y_range = _to_ends([(rate.value, rate.low, rate.high) for _, _, rate in known])
    n = max(len(one.arm.rounds) for one, _, _ in known)
    what = "number of users" if known[0][0].arm.load.arrivals == CLOSED else "request rate"
    ax.plot(xs, ys, color=GUIDE, lw=1, zorder=1)
    style: dict[str, Any] = {"ls": "", "marker": "o", "ms": 7, "color": COLOURS[0], "zorder": 2}
    if n > 1:
        label = f"{what}, with range over {n} rounds"
        ax.errorbar(xs, ys, xerr=x_range, yerr=y_range, capsize=3, label=label, **style)
    else:
        ax.plot(xs, ys, label=what, **style)
    farthest = max(high for _, (_, _, high), _ in known)
    if max(xs) > WIDE * min(xs) > 0:
        ax.set_xscale("log")
        ax.set_xlim(right=max(2 * max(xs), 1.1 * farthest))
    else:
        ax.set_xlim(0, max(1.3 * max(xs), 1.1 * farthest))
    ax.set_ylim(0, 1.15 * max([rate.high for _, _, rate in known] + [1e-9]))
    return [(x, y, one.arm.load.label) for x, y, (one, _, _) in zip(xs, ys, known, strict=True)]


def _to_ends(ranges: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """The distance of both ends from each middle, at least 0: the median of all can lie outside the rounds' range."""
    return [[max(0, middle - low) for middle, low, _ in ranges], [max(0, high - middle) for middle, _, high in ranges]]


MOST_PANELS, MOST_BARS = 6, 150
FEWEST_ROWS = 10
WAITING, ANSWERED = COLOURS[4], COLOURS[0]
FAILED = (COLOURS[1], COLOURS[3], COLOURS[6], COLOURS[2], COLOURS[5])
"""Colours of classes of failure, by their number."""


def plot_timeline(arms: Sequence[Arm], title: str, figure: Figure) -> None:
    """A bar per request of the first round of each load: waiting for the first token, then receiving the answer.

    The steady window is shaded. A failure is a mark at the time when the request was due. Of more than 6 loads the
    smallest, the largest and some between are drawn; of more than 150 requests, evenly spread ones.
    """
    chosen = list(arms)
    if len(arms) > MOST_PANELS:
        chosen = [arms[round(i * (len(arms) - 1) / (MOST_PANELS - 1))] for i in range(MOST_PANELS)]
    n_columns = 1 if len(chosen) == 1 else 2 if len(chosen) in (2, 4) else 3
    axes = canvas.grid(figure, len(chosen), n_columns, sharex=True)
    rounds = [arm.rounds[0] for arm in chosen]
    classes = list(dict.fromkeys(name for of in rounds for one in of.all if (name := _failure(one))))
    ends_s = [one.end_s for of in rounds for one in of.all if one.end_s < math.inf]  # so that no bar is cut off
    last_s = 1.01 * max([*ends_s, *(of.begin_s + of.load.duration_s for of in rounds)])
    for ax, arm, of_round in zip(axes, chosen, rounds, strict=True):
        _panel(ax, arm, of_round, classes, last_s)
    canvas.name_axes(axes, "since the start (s)", "requests, in order")
    _name_bars(axes[0], classes, arms[0].load.arrivals != CLOSED)
    canvas.finish(axes, title, is_apart=True)


def _panel(ax: Axes, arm: Arm, of_round: Round, classes: Sequence[str], last_s: float) -> None:
    ax.axvspan(of_round.begin_s, of_round.begin_s + of_round.load.duration_s, color=GRID, alpha=0.5, lw=0)
    step = math.ceil(len(of_round.all) / MOST_BARS)
    drawn = of_round.all[::step]
    for row, one in enumerate(drawn):
        if one.end_s < math.inf:
            first_s = min(one.first_s, one.end_s)
            ax.barh(row, first_s - one.at_s, left=one.at_s, height=0.9, color=WAITING, lw=0)
            ax.barh(row, one.end_s - first_s, left=first_s, height=0.9, color=ANSWERED, lw=0)
    for number, name in enumerate(classes):
        failed = [(one.at_s, row) for row, one in enumerate(drawn) if _failure(one) == name]
        colour, marker = _style(number)
        ax.plot(*zip(*failed, strict=True), ls="", ms=5, mew=0, color=colour, marker=marker) if failed else None
    n = len(of_round.all)
    words = f"{arm.label}: {n:,} request{'s' * (n != 1)}" + (f", 1 of {step} drawn" if step > 1 else "")
    ax.set_title(words, fontsize=10)
    ax.set_xlim(0, last_s)
    ax.set_ylim(max(len(drawn), FEWEST_ROWS) - 0.5, -0.5)
    ax.set_yticks([])


def _failure(one: Sample) -> str | None:
    return None if one.is_ok else one.figures.failure or "failed"


def _style(number: int) -> tuple[str, str]:
    return FAILED[number % len(FAILED)], MARKERS[number % len(MARKERS)]


def _name_bars(ax: Axes, classes: Sequence[str], is_open: bool) -> None:
    """Entries for the legend."""
    wait = "waiting for the first token" + (", from the intended time" if is_open else "")
    for label, colour in ((wait, WAITING), ("receiving the answer", ANSWERED), ("steady window (measured)", GRID)):
        ax.fill_between([], [], color=colour, alpha=0.5 if colour == GRID else 1, label=label)
    for number, name in enumerate(classes):
        colour, marker = _style(number)
        ax.plot([], [], ls="", ms=6, mew=0, color=colour, marker=marker, label=f"failed: {name}")


MOST_POINTS = 400
"""Maximum number of points of a load; of more requests, evenly spread ones are drawn."""

WIDTH = 0.16
"""Horizontal spread of a load's points to each side, as a share of the distance to the next load."""

CAPTIONS = {
    "load": "Latency over load. Points are requests, lines their median and percentiles. Limits are dashed.",
    "throughput": "Throughput against latency: tokens per second of all users, over a user's median TTFT. Points are "
    "arms, with their range over rounds.",
    "timeline": "The requests of the first round: waiting for the first token, then receiving the answer. The steady "
    "window is shaded.",
}
"""Captions of the pictures on a page."""

SIZES = {"load": (11, 5), "throughput": (11, 5), "timeline": (11, 7)}
"""Inches."""


def title(endpoint: Endpoint, model: str, machine: Machine) -> str:
    """Which model, server and client: such as "tiny on llama-server b1, 4 slots; client: 8 cores"."""
    server = " ".join(word for word in (endpoint.server, endpoint.version) if word) or "a server without a name"
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    slots = "" if n_slots is None else f", {n_slots} slot{'s' * (n_slots != 1)}"
    return f"{model} on {server}{slots}; client: {machines.label(machine)}"


def plot_arms(records: Sequence[Record | RequestRecord], name: str = "load", figure: Figure | None = None) -> Figure:
    """A picture of the first session of loads among records: load (latency over it), throughput, or timeline.

        lab.plot_arms(lab.load(url, concurrency="1,2,4"), "throughput")

    LabError if there is nothing to draw.
    """
    sessions = load_figures.sessions(records)
    if not sessions:
        raise LabError("There is nothing to draw: no request is part of a load.", "Measure some: lab load --url URL")
    one = sessions[0]
    n_slots = one.endpoint.settings.n_slots if one.endpoint.settings else None
    drawn = {own.name: own for own in pictures(one.samples, title(one.endpoint, one.model, one.machine), n_slots)}
    if name not in drawn:
        raise LabError(f"There is no picture {name!r} of this load.", f"Choose one of: {', '.join(drawn)}")
    figure = figure or canvas.new_figure(drawn[name].size)
    drawn[name].draw(figure)
    return figure


def pictures(samples: Sequence[Sample], title: str, n_slots: int | None = None) -> list[Picture]:
    """The pictures with data: load, throughput, timeline.

    Open and closed loops, and several lengths, have separate pictures: load-2, ... `n_slots` of the server are drawn
    beside its users.
    """
    figures = map(load_figures.figures_of, loads.arms(samples))
    groups = grouped(figures, lambda one: (one.arm.load.arrivals == CLOSED, one.arm.load.lengths))
    made = []
    for number, ((_, lengths), shown) in enumerate(groups.items(), 1):
        load, n_rounds = shown[0].arm.load, max(len(one.arm.rounds) for one in shown)
        below = f"{title}\n{lengths}; {load.duration_s:g} s window, {plural(n_rounds, 'round')}"
        drawings: dict[str, Callable[[Figure], Any]] = {}
        if any(one.ttft for one in shown):
            drawings["load"] = partial(plot_latency, shown, f"Latency over load\n{below}", n_slots)
        if any(one.tokens_tps and one.ttft for one in shown):
            drawings["throughput"] = partial(plot_throughput, shown, f"Throughput against latency\n{below}")
        words = f"The timeline of requests\n{title}\n{lengths}"
        drawings["timeline"] = partial(plot_timeline, [one.arm for one in shown], words)
        suffix = f"-{number}" if number > 1 else ""
        made += [Picture(f"{name}{suffix}", CAPTIONS[name], draw, SIZES[name]) for name, draw in drawings.items()]
    return made


def plot_latency(shown: Sequence[ArmFigures], title: str, n_slots: int | None, figure: Figure) -> None:
    """TTFT and TPOT over the load: a point per request, lines for the median and percentiles.

    Limits are dash-dotted lines. If there are more users than slots of the server, the slots are a dotted line.
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
    if slo and slo.label:
        axes[0].plot([], [], color=GUIDE, ls="-.", lw=1.4, label=f"limit: {slo.label}")
    _failures(axes[0], shown)
    canvas.finish(axes, title, is_apart=True)


def _latency_panel(
    ax: Axes,
    shown: Sequence[ArmFigures],
    name: str,
    of: Callable[[Figures], float | None],
    factor: float,
    limit_s: float | None,
) -> None:
    lines: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("median", *TAILS)}
    largest = 0.0
    for place, one in enumerate(shown):
        measured = sorted(factor * value for value in load_figures.values(one.arm.inside, of))
        largest = max([largest, *measured])
        drawn = _thinned(measured)
        xs = [place + WIDTH * (2 * (0.618034 * i % 1) - 1) for i in range(len(drawn))]
        label = "requests" if place == 0 else None
        ax.plot(xs, drawn, ls="", marker="o", ms=4, alpha=0.5, mew=0, color=COLOURS[5], label=label)
        latency: Latency | None = getattr(one, name)
        if latency is None:
            continue
        tails = [None if tail is None else tail.value_s for tail in (latency.p95, latency.p99)]
        for line, value in zip(lines, (latency.median_s, *tails), strict=True):
            if value is not None:
                lines[line][0].append(place)
                lines[line][1].append(factor * value)
    for number, (line, (xs, ys)) in enumerate(lines.items()):
        if xs:
            style: dict[str, Any] = {"color": COLOURS[(0, 1, 3)[number]], "marker": MARKERS[number]}
            ax.plot(xs, ys, lw=1.8, ms=5, label=line, **style)
    medians = [y for y in lines["median"][1] if y > 0]
    if medians and max(largest, factor * (limit_s or 0)) > WIDE * min(medians):
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.08 * max(largest, factor * (limit_s or 0)))
    if limit_s is not None:
        ax.axhline(factor * limit_s, color=GUIDE, ls="-.", lw=1.4)


def _thinned(ordered: Sequence[float]) -> list[float]:
    """At most MOST_POINTS of ordered values, evenly spread, including both ends."""
    if len(ordered) <= MOST_POINTS:
        return list(ordered)
    return [ordered[i * (len(ordered) - 1) // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def _load_axis(ax: Axes, shown: Sequence[ArmFigures], n_slots: int | None) -> None:
    levels = [one.arm.level for one in shown]
    names = ["replay" if level is None else f"{level:,g}" for level in levels]
    ax.set_xticks(range(len(shown)), names)
    ax.set_xlim(-0.5, len(shown) - 0.5)
    is_closed = shown[0].arm.load.arrivals == CLOSED
    ax.set_xlabel("users" if is_closed else "requests per second")
    n_inside = sum(level is not None and n_slots is not None and level <= n_slots for level in levels)
    if is_closed and n_slots is not None and n_inside < len(levels):
        words = f"to the right: more users than the server's {plural(n_slots, 'slot')}"
        ax.axvline(n_inside - 0.5, color=GUIDE, ls=":", lw=1.4, label=words)


def _failures(ax: Axes, shown: Sequence[ArmFigures]) -> None:
    for place, one in enumerate(shown):
        if n := one.n - one.n_ok:
            text = f"{n:,} of {one.n:,}\nfailed"
            ax.text(place, 1.0, text, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
