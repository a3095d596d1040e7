"""The board in the terminal: one request on many devices, a row for each, and two pictures of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.analysis import wording
from lab.core import cost, shown
from lab.core.lists import plural
from lab.core.record import DECODE
from lab.core.request import Slo
from lab.drawing import canvas
from lab.drawing.canvas import COLOURS, GUIDE, INK
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled
from lab.why import published, serving
from lab.why.candidates import HERE, MEASURED, PREDICTED, Candidate, Span
from lab.why.serving import Demand, Need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 16
"""Devices in the picture of requests."""

CERTAIN = 0.95


def section(
    candidates: Sequence[Candidate],
    slo: Slo | None = None,
    watts: float | None = None,
    kwh: float | None = None,
    has_here: bool = True,
) -> Section:
    """The table of candidates, what it says in sentences, and its pictures.

    `kwh` is the price of a kilowatt-hour, `watts` the power of devices whose row of prices names none. `has_here`:
    whether this machine was asked for too.
    """
    first = candidates[0]
    models = list(dict.fromkeys(_model(one) for one in candidates))
    if first.demand is not None:
        return _of_demand(candidates, first.demand, models, _missing(candidates, has_here))
    columns: Columns = (
        ("name", lambda one: one.name),
        ("model", lambda one: _model(one) if len(models) > 1 else UNKNOWN),
        ("TTFT\ns", lambda one: _span(one, one.ttft_s)),
        ("tokens/s", lambda one: _span(one, one.tps)),
        ("E2E\ns", lambda one: _span(one, one.e2e_s)),
        ("memory\nGB", lambda one: wording.digits(one.needed_bytes / 1e9)),
        ("keeps\nlimits", lambda one: UNKNOWN if slo is None else _keeps(one)),
        ("price", lambda one: UNKNOWN if one.price is None else f"{one.price.price:,.0f}"),
        ("per million\ntokens", partial(_cost, watts=watts, kwh=kwh)),
        ("note", _note),
    )
    users = f", {first.users} users at once" if first.users > 1 else ""
    return Section(
        models[0] if len(models) == 1 else "Several models",
        f"{first.n_prompt:,} tokens in, {first.n_gen:,} out{users}",
        **tabled(columns, candidates),
        sentences=_sentences(candidates, slo, kwh, has_here),
        pictures=_pictures(candidates, models),
    )


def _missing(candidates: Sequence[Candidate], has_here: bool) -> list[str]:
    """A sentence where this machine was asked for and is not there."""
    if not has_here or any(one.name == HERE for one in candidates):
        return []
    return ["This machine is not in the table. Its prediction needs ceilings and a run: lab ceilings, lab measure"]


def _of_demand(
    candidates: Sequence[Candidate], demand: Demand, models: Sequence[str], missing: Sequence[str]
) -> Section:
    """How many devices of each kind serve users who send requests at random times."""
    columns: Columns = (
        ("name", lambda one: one.name),
        ("model", lambda one: _model(one) if len(models) > 1 else UNKNOWN),
        ("devices", lambda one: _ends(one, lambda need: f"{need.n_devices:,}", "-never")),
        ("TTFT, 90 %\ns", lambda one: _ends(one, lambda need: wording.digits(need.ttft_s))),
        ("E2E, 90 %\ns", lambda one: _ends(one, lambda need: wording.digits(need.e2e_s))),
        ("prefill\n% of time", lambda one: _ends(one, lambda need: f"{100 * need.shares[0]:.0f}")),
        ("decode\n% of time", lambda one: _ends(one, lambda need: f"{100 * need.shares[1]:.0f}")),
        ("price", lambda one: _ends(one, lambda need: f"{one.price.price * need.n_devices:,.0f}" if one.price else "")),
        ("note", lambda one: _note(one) if one.needs or one.problem else "prefill or decode unknown"),
    )
    limits = demand.slo.label if demand.slo else ""
    enough = [one for one in candidates if one.needs and one.needs[1]]
    sentences = [] if enough else ["No number of these devices is known to suffice."]
    if enough:
        fewest = enough[0]
        sentences.append(f"Fewest devices: {_ends(fewest, lambda need: f'{need.n_devices:,}')} ({fewest.name}).")
    sentences += missing
    if any(one.needs and None in one.needs for one in candidates):
        sentences.append(f"never: a request that has a device for itself already exceeds {limits}.")
    within = f" and 90 % of the answers keep {limits}" if limits else ""
    sentences.append(
        "Simulated with continuous batching: the fewest devices with which each gets at most "
        f"{100 * serving.BUSY:.0f} % of the requests that it can answer{within}. Users send at random times and are "
        "spread evenly. The rest of the time a device is idle. Ranges follow from those of prefill and decode alone; a "
        "step of several answers is assumed to reach the share of its rates that a step of one reaches."
    )
    if any(one.kind == PREDICTED for one in candidates):
        sentences.append(published.basis())
    each = f"each sends one of {demand.n_prompt:,} tokens in, {demand.n_gen:,} out every {demand.every_s:g} s"
    asked = f"{plural(demand.users, 'user')}: {demand.rate:.3g} requests/s; {each}"
    title = models[0] if len(models) == 1 else "Several models"
    return Section(title, asked, **tabled(columns, candidates), sentences=sentences)


def _ends(one: Candidate, of: Callable[[Need], str], never: str = "") -> str:
    """A figure at both ends of the range of needs; `never` follows if no number suffices at the slow end."""
    if one.needs is None:
        return UNKNOWN
    ends = [of(need) for need in one.needs if need]
    if not any(ends):
        return "never" if never else UNKNOWN
    return "-".join(dict.fromkeys(ends)) + (never if None in one.needs else "") + shown.mark(one.doubts)


def _model(one: Candidate) -> str:
    return f"{one.model.name} {one.model.quantization or ''}".strip()


def _span(one: Candidate, ends: Span) -> str:
    if one.problem or ends[0] != ends[0]:
        return UNKNOWN
    low, high = map(wording.digits, ends)
    return f"{low}{shown.mark(one.doubts)}" if low == high else f"{low}-{high}{shown.mark(one.doubts)}"


def _keeps(one: Candidate) -> str:
    if one.chance is None or one.chance != one.chance:
        return UNKNOWN
    if one.chance >= CERTAIN:
        return "yes"
    return "no" if one.chance <= 1 - CERTAIN else f"{100 * one.chance:.0f} %"


def _cost(one: Candidate, watts: float | None, kwh: float | None) -> str:
    joules = one.joules_per_token(watts)
    if one.problem or joules is None or kwh is None:
        return UNKNOWN
    return "-".join(wording.digits(1e6 * end / 3.6e6 * kwh) for end in joules)


def _note(one: Candidate) -> str:
    if one.problem or one.kind == MEASURED:
        return one.problem or MEASURED
    unknown = "memory size unknown" if one.device and one.memory_bytes is None else ""
    return "; ".join(filter(None, [unknown, one.rests_on and f"from {one.rests_on}"]))


def _sentences(candidates: Sequence[Candidate], slo: Slo | None, kwh: float | None, has_here: bool) -> list[str]:
    """The fastest, the first that keeps the limits, what a range is, and what the predictions are made from."""
    able = [one for one in candidates if not one.problem and one.e2e_s[0] == one.e2e_s[0]]
    sentences = [] if able else ["No device here can run this."]
    if able:
        best = min(able, key=lambda one: _middle(one.e2e_s))
        name = f"{best.name} with {_model(best)}" if len({_model(one) for one in able}) > 1 else best.name
        sentences.append(
            f"Fastest: {name}, {' to '.join(dict.fromkeys(map(wording.seconds, best.e2e_s)))} for the whole request."
        )
    if slo is not None:
        n = sum((one.chance or 0.0) >= CERTAIN for one in able)
        sentences.append(f"{n} of {len(candidates)} keep {slo.label} with at least {100 * CERTAIN:.0f} % certainty.")
    sentences += _missing(candidates, has_here)
    if able and able[0].users > 1:
        sentences.append(
            "TTFT is that of one prompt at a time; tokens/s is the rate of each user. Without ceilings of a device it "
            "assumes that a step of several users reaches the same share of the datasheet's figures as that of one."
        )
    if kwh is not None:
        sentences.append("The cost per million tokens is that of the energy of decode.")
    if any(one.kind == PREDICTED for one in candidates):
        sentences.append(published.basis())
    return sentences


def _pictures(candidates: Sequence[Candidate], models: Sequence[str]) -> list[Picture]:
    fitting = [one for one in candidates if not one.problem]
    able = [one for one in fitting if one.e2e_s[0] == one.e2e_s[0]]
    if len(able) < 2:
        return []
    caption = "Time of the request: prefill, then decode. Bars are the middles of ranges, lines the ranges."
    made = [
        Picture("requests", caption, lambda figure: plot_requests(able[:MOST_BARS], figure.subplots()), (10.0, 4.6))
    ]
    if len(models) == 1 and able[0].users == 1 and sum(one.device is not None for one in fitting) > 1:
        caption = "Decode rate over memory bandwidth. The line is the limit: every token reads all weights."
        made.append(
            Picture("bandwidth", caption, lambda figure: plot_bandwidth(fitting, figure.subplots()), (10.0, 4.6))
        )
    return made


def _middle(ends: Span) -> float:
    return math.sqrt(ends[0] * ends[1])


def plot_requests(candidates: Sequence[Candidate], ax: Axes | None = None) -> Axes:
    """Stacked bars of prefill and decode over devices, fastest first, with the range of the whole.

    lab.plot_requests(lab.board(["llama-3.1-8b"], 8000, 300, devices=["geforce"])[:5])
    """
    ax = ax or canvas.new_axes()
    figure = canvas.figure_of(ax)
    several = len({_model(one) for one in candidates}) > 1
    names = [f"{one.name}, {_model(one)}" if several else one.name for one in candidates][::-1]
    rows = candidates[::-1]
    prefill = [_middle(one.ttft_s) for one in rows]
    decode = [(one.n_gen - 1) * _middle(one.tpot_s) for one in rows]
    ax.barh(names, prefill, color=COLOURS[0], label="prefill")
    ax.barh(names, decode, left=prefill, color=COLOURS[1], hatch="//", edgecolor="white", label="decode")
    for name, one in zip(names, rows, strict=True):
        style: dict[str, Any] = {"color": INK, "lw": 1.2}
        ax.plot(one.e2e_s, [name, name], ls="-" if one.kind == MEASURED else "--", **style)
    ax.plot([], [], color=INK, ls="--", label="90 % range, predicted")
    if any(one.kind == MEASURED for one in rows):
        ax.plot([], [], color=INK, ls="-", label="range, measured")
    ax.set_xlabel("time of the request (s)")
    first = candidates[0]
    figure.set_figheight(max(figure.get_figheight(), 1.6 + 0.28 * len(rows)))
    canvas.finish([ax], f"{_model(first)}: {first.n_prompt:,} tokens in, {first.n_gen:,} out")
    return ax


def plot_bandwidth(candidates: Sequence[Candidate], ax: Axes) -> None:
    """Decode rates with their ranges over the devices' memory bandwidth, under the limit; both axes logarithmic."""
    known = [one for one in candidates if one.device is not None]
    first = known[0]
    past = first.n_prompt + max(0, first.n_gen - 2) // 2
    token = cost.step(first.model, 1, past, 1)
    bandwidths = [one.device.gbps for one in known if one.device]
    ends = [min(bandwidths) / 1.5, max(bandwidths) * 1.5]
    ax.set_xscale("log")
    ax.set_yscale("log")
    if token is not None:
        limit = [1e9 * gbps / token.n_bytes for gbps in ends]
        ax.plot(ends, limit, color=INK, lw=1.8, label="limit: bandwidth / bytes read per token")
    kinds = sorted({one.device.kind for one in known if one.device})
    for kind, style in zip(kinds, canvas.styles(len(kinds)), strict=True):
        own = [one for one in known if one.device and one.device.kind == kind]
        middles = [_middle(one.tps) for one in own]
        spread = [[m - one.tps[0] for m, one in zip(middles, own, strict=True)]]
        spread.append([one.tps[1] - m for m, one in zip(middles, own, strict=True)])
        x = [one.device.gbps for one in own if one.device]
        ax.errorbar(x, middles, yerr=spread, ls="", ms=5, lw=1, **style, label=f"{kind}, predicted")
    by_name = {one.device.name: one.device.gbps for one in known if one.device}
    others = [
        (by_name[row.device], row.tps)
        for row in published.rows()
        if not row.marks
        and row.phase == DECODE
        and (row.model, row.quantization) == (first.model.name, first.model.quantization)
        and row.device in by_name
    ]
    if others:
        style = {"color": INK, "mfc": "none", "marker": "s", "ls": "", "ms": 5}
        ax.plot(*zip(*others, strict=True), **style, label="published by others (short prompts)")
    for one in candidates:
        if one.device is None:
            rate = _middle(one.tps)
            ax.axhline(
                rate, color=GUIDE, ls="-" if one.kind == MEASURED else "--", lw=1.4, label=f"{one.name}, {one.kind}"
            )
    ax.set_xlabel("memory bandwidth by the datasheet (GB/s)")
    ax.set_ylabel("decode rate (tokens/s)")
    canvas.finish([ax], f"{_model(first)}: decode after {first.n_prompt:,} tokens")
