"""The pictures of runs and of requests to servers: prefill, decode, both laws of a sweep, and the variants of a trial.

All points of all runs are drawn, hollow for disturbed runs; the line is a median. A picture with requests shows TTFT in
the place of prefill. Warm requests and short answers are drawn only where there are no others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.core import phases, request_times, shown
from lab.core.lists import plural
from lab.core.record import PREFILL, Record
from lab.core.request import RequestRecord, short_name
from lab.errors import LabError
from lab.show import plot_trial
from lab.show import canvas, sweep_laws, table, text_setup
from lab.show.canvas import GUIDE, OF_DECODE, OF_PREFILL, points
from lab.show.text_setup import one_of
from lab.show.wording import digits, seconds, times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Record | RequestRecord]

RUNNING = 15
HEADROOM = 1.35
WIDE = 12
"""Of a decode plot: the positions in a running median; the upper end, relative to the 95th percentile of the gaps of
the slowest line. If the lines differ by more than the factor WIDE, the axis is logarithmic."""

NO_BREAK = "\u00a0"  # a space at which no line of a legend breaks
MOST_GROWTHS = 4  # lengths up to which a prefill plot of one setup says by how much the time grows from one to the next


def plot_prefill(records: Records, ax: Axes | None = None) -> Axes:
    """Prefill time against prompt length, both logarithmic: points are runs, the thick line their medians.

    With requests to servers it shows TTFT.

        lab.plot_prefill(records)

    Thin lines are the steps of single runs. The dashed grey line is proportional to the length, at the lowest measured
    time per token; for a single line the picture says by how much the time grows. More than six setups have a panel
    each.
    """
    timed, rows = _timed(records)
    is_ttft = bool(table.alone(timed))
    figure = "ttft_s" if is_ttft else "prefill_s"
    rows = rows[(rows[figure] > 0) & (rows.n_prompt > 0)]
    if rows.empty:
        raise LabError(
            "There is nothing to draw: no run has a prefill time.", "Measure some: lab measure"
        )
    setups = table.setups(rows)
    steps = table.steps(table.of_engine(timed))
    kind = "run" if table.of_engine(timed) else "request"
    axes = canvas.panels(ax or canvas.new_axes(), [name for name, _ in setups])
    is_alone = axes[0] is not axes[-1] or len(setups) == 1
    per_token = dict[float, str]()
    styles = canvas.styles(1) * len(setups) if is_alone else canvas.styles(len(setups))
    for (name, own), one, style in zip(setups, axes, styles, strict=True):
        if not is_ttft and not steps.empty:  # imported runs have no steps
            inside = steps[
                (steps.kind == PREFILL) & steps.compute_ms.notna() & steps.run.isin(own.run)
            ]
            for number, (_, run) in enumerate(
                run for run in inside.groupby("run") if len(run[1]) > 1
            ):
                label = (
                    "_"
                    if number or not (is_alone or own is setups[0][1])
                    else "progress within each run"
                )
                one.plot(
                    run.n_past + run.n_tokens,
                    run.ready_s,
                    color=style["color"],
                    lw=0.7,
                    alpha=0.5,
                    label=label,
                )
        medians = own.groupby("n_prompt")[figure].median()
        at: dict[str, Any] = {"marker": "_", "ms": 16} if len(medians) == 1 else {}
        one.plot(
            medians,
            lw=2,
            color=style["color"],
            label=f"median over {kind}s" if is_alone else "_",
            **at,
        )
        if not is_alone:  # the legend, with the shape of the points
            one.plot([], [], lw=2, ms=6, **style, label=f"{name}: median")
        of_points = f"{kind}s" if is_alone else None
        points(
            one, own.n_prompt, own[figure], own.disturbed, ms=6, alpha=0.6, **style, label=of_points
        )
        where = "" if is_alone else f" of {name}"
        per_token |= {float(value / n): f"{n:,.0f} tokens{where}" for n, value in medians.items()}
        if (
            len(setups) == 1 < len(medians) <= MOST_GROWTHS
            and own.groupby("n_prompt").disturbed.mean().lt(0.5).all()
        ):
            for (n, t), (next_n, next_t) in itertools.pairwise(medians.items()):
                words = f"{times(next_n / n)} the tokens:\n{times(next_t / t)} the time"
                middle = math.sqrt(n * next_n), math.sqrt(t * next_t)
                one.annotate(
                    words,
                    middle,
                    (-9, 6),
                    textcoords="offset points",
                    ha="right",
                    va="bottom",
                    fontsize=9,
                )
    ends = [rows.n_prompt.min(), rows.n_prompt.max()]
    cheapest = min(per_token)
    for one in dict.fromkeys(axes):
        if ends[0] == ends[1]:
            one.set_ylim(0, 1.2 * rows[figure].max())
        else:
            label = (
                f"{digits(1e3 * cheapest)} ms per token, as at {per_token[cheapest]} (proportional)"
            )
            one.plot(ends, [n * cheapest for n in ends], color=GUIDE, ls="--", lw=1.2, label=label)
            one.set_yscale("log")
        canvas.over_lengths(one, rows.n_prompt)
    canvas.name_axes(axes, "prompt length (tokens)", "TTFT (s)" if is_ttft else "prefill time (s)")
    what = (
        "TTFT: time until the first token arrives"
        if is_ttft
        else "Prefill: time until the prompt is processed"
    )
    canvas.finish(axes, f"{what}\n{_subject(timed, rows)}")
    return axes[0]


def plot_shares(records: Records, ax: Axes | None = None) -> Axes:
    """Where the time of a request goes: a bar for each of up to ten lengths, prefill and decode with their shares.

        lab.plot_shares(records)

    Bars are medians, as in the table. LabError without a run that decoded, and for several setups.
    """
    timed, rows = _timed(records)
    rows = rows[rows.e2e_s.gt(0) & rows.prefill_s.gt(0) & rows.tpot_ms.notna()]
    if rows.empty or len(table.setups(rows)) > 1:
        raise LabError(
            "This picture needs runs of one setup that decoded.",
            "Measure one, with --gen 2 or more.",
        )
    ax = ax or canvas.new_axes()
    own = table.summary(rows)[::-1]
    own = own.iloc[:: -(-len(own) // 10)]
    marks = own.doubts.map(shown.mark)
    names = [
        f"{row.n_prompt:,} tokens in, {row.n_gen:,} out\n{seconds(row.e2e_s)} {mark}".strip()
        for row, mark in zip(own.itertuples(), marks, strict=True)
    ]
    share = 100 * own.prefill_share
    none = 0 * own.prefill_share
    for label, colour, left, width in (
        ("prefill", OF_PREFILL, none, share),
        ("decode", OF_DECODE, share, 100 - share),
    ):
        bars = ax.barh(names, width, left=left, color=colour, label=label)
        words = [
            f"{label} {one:.0f} %" if one >= 12 else f"{one:.0f} %" if one >= 4 else ""
            for one in width
        ]
        ax.bar_label(bars, words, label_type="center", color="white", fontsize=11)
    if marks.any():
        ax.barh(names[:1], 0, alpha=0, label="!: some runs disturbed; !!: half or more")
    ax.set(xlim=(0, 100), xlabel="share of the request's time (%)")
    ax.grid(visible=False, axis="y")
    canvas.finish([ax], f"Where the time of a request goes\n{_subject(timed, rows)}")
    return ax


def plot_decode(records: Records, ax: Axes | None = None) -> Axes:
    """Decode time per token (ITL) against the token's position in the generation, one line per prompt length.

        lab.plot_decode(records)

    Points are tokens of all repeats (hollow: of disturbed runs); the line is the running median of the per-token
    medians. Points above the axis are counted and marked at its upper edge. Setups of very different speed get a
    logarithmic axis. More than six lines of several setups get a panel for each setup. Where tokens of a server arrive
    together, or it does not say how many arrive, gaps are between events (inter-chunk latency).
    """
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    timed, rows = _timed(records)
    parts = [
        pd.DataFrame()
    ]  # a row for each gap of each answer, from that before its second token (or event) on
    for setup, of_setup in table.setups(rows):
        for n_prompt, run, hollow in zip(
            of_setup.n_prompt, of_setup.run, of_setup.disturbed, strict=True
        ):
            record = timed[run]
            kind = "token"
            if isinstance(record, Record):
                ns: Sequence[float] = phases.itl_ns(record.run)
            else:
                by_token = request_times.itl_ns(record.request)
                ns = request_times.chunk_gaps_ns(record.request)
                kind = "event" if by_token is None or len(by_token) > len(ns) else "token"
            own = pd.DataFrame({"place": range(2, len(ns) + 2), "ms": [one / 1e6 for one in ns]})
            parts.append(
                own.assign(setup=setup, n_prompt=int(n_prompt), hollow=bool(hollow), kind=kind)
            )
    gaps = pd.concat(parts, ignore_index=True)
    if gaps.empty:
        raise LabError(
            "There is nothing to draw: no run decoded a token.", "Measure with --gen 2 or more."
        )
    lines = [(setup, n, own) for (setup, n), own in gaps.groupby(["setup", "n_prompt"], sort=False)]
    lines.sort(key=lambda line: line[1])
    setups = list(dict.fromkeys(gaps.setup))
    lengths = sorted(set(gaps.n_prompt))
    axes = canvas.panels(ax or canvas.new_axes(), [setup for setup, *_ in lines])
    has_panels = axes[0] is not axes[-1]
    is_alone = len(setups) == 1
    bases = dict(zip(setups, canvas.styles(len(setups), OF_DECODE), strict=True))
    top = HEADROOM * max(own.ms.quantile(0.95, "lower") for *_, own in lines) or 1.0
    for (setup, n_prompt, own), one in zip(lines, axes, strict=True):
        colour = OF_DECODE if has_panels else bases[setup]["color"]
        style = canvas.styles(len(lengths), colour, is_shaded=True)[lengths.index(n_prompt)]
        style |= {} if has_panels or is_alone else {"marker": bases[setup]["marker"]}
        running = (
            own.groupby("place").ms.median().rolling(RUNNING, center=True, min_periods=1).median()
        )
        above = own[own.ms > top]
        name = f"after {n_prompt:,} prompt tokens"
        note = f" ({plural(len(above), 'point')} above the axis)" if len(above) else ""
        points(one, own.place, own.ms, own.hollow, ms=3, alpha=0.3, **style)
        if len(above):
            one.plot(
                above.place,
                [top] * len(above),
                ls="",
                marker="^",
                ms=5,
                color=style["color"],
                clip_on=False,
            )
        one.plot(running, label="_", lw=2, color=style["color"])
        if has_panels and note:
            one.set_title(f"{one.get_title()}\n{name}{note}", fontsize=8, pad=8)
        in_legend = name if has_panels else f"{name}{'' if is_alone else f', {setup}'}{note}"
        one.plot([], [], lw=2, ms=4, **style, label=in_legend)
    middles = [own.ms.median() for *_, own in lines]
    is_log = max(middles) > WIDE * min(middles) > 0
    for one in dict.fromkeys(axes):
        one.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        one.set_yscale("log" if is_log else "linear")
        one.set_ylim(0.7 * min(middles) if is_log else 0, top)
    what = " or ".join(sorted(set(gaps.kind), reverse=True))
    titles = {
        "token": "time per generated token",
        "event": "time between events with tokens (inter-chunk latency)",
        "token or event": "time between tokens, or between events with tokens",
    }
    first = " (the first ends TTFT)" if table.alone(timed) else " (prefill produces the first)"
    canvas.name_axes(
        axes,
        f"generated {what}{'' if has_panels else first}",
        f"time since the previous {what} (ms)",
    )
    canvas.finish(axes, f"Decode: {titles[what]}\n{_subject(timed, rows)}")
    return axes[0]


def plot_sweep(records: Sequence[Record], figure: Figure | None = None) -> Figure:
    """Both curves of sweeps, side by side: prefill time over length, decode time per token over position.

        lab.plot_sweep(lab.sweep(4096, every=256))

    Points are single runs, the band is their range, the dashed line the fitted law.
    """
    records = [record for record in records if record.run.is_timed and record.run.every]
    if not records:
        raise LabError("There is nothing to draw: no run is a sweep.", "Make one: lab sweep")
    figure = figure or canvas.new_figure((11, 5))
    rows = table.runs(records)
    rows = rows.assign(position=sweep_laws.positions_of(rows))
    setups = table.setups(rows)
    (left, right) = figure.subplots(1, 2)
    for number, (label, runs) in enumerate(setups):
        name = f"{label}: " * (len(setups) > 1)
        summary = table.summary(runs)
        for ax, phase, x, y, per_s, colour, law in (
            (
                left,
                "prefill",
                "n_prompt",
                "prefill_s",
                1,
                OF_PREFILL,
                sweep_laws.prefill_law(summary),
            ),
            (
                right,
                "decode",
                "position",
                "tpot_ms",
                1e3,
                OF_DECODE,
                sweep_laws.decode_law(summary),
            ),
        ):
            style = canvas.styles(len(setups), colour)[number]
            if runs[y].notna().any():
                ends = runs.groupby(x)[y].agg(["min", "max"])
                ax.fill_between(
                    ends.index, ends["min"], ends["max"], color=style["color"], alpha=0.2, lw=0
                )
                words = label if name else "runs and their range"
                points(ax, runs[x], runs[y], runs.disturbed, ms=4, alpha=0.6, **style, label=words)
            if law:
                at = [runs[x].max() * i / 100 for i in range(101)]
                formula = (
                    law.formula.partition(" = ")[2].replace(" * ", " ").replace("^2", "\u00b2")
                )
                words = f"{name}fitted {phase}: {formula.replace(' ', NO_BREAK)}"
                ax.plot(
                    at,
                    [per_s * law.seconds(n) for n in at],
                    ls="--",
                    lw=1.8,
                    color=style["color"],
                    label=words,
                )
    left.set(title="Prefill", xlabel="prompt length P (tokens)", ylabel="prefill time (s)")
    right.set(
        title="Decode",
        xlabel="position p (tokens in the context)",
        ylabel="decode time per token (ms)",
    )
    for ax in (left, right):
        ax.title.set_fontsize(11)
        ax.set(xlim=(0, None), ylim=(0, None))
    canvas.finish(
        [left, right],
        f"Prefill and decode in one pass through the context\n{_subject(records, rows)}",
    )
    return figure


def drawings(records: Records) -> dict[str, Callable[[Figure], Any]]:
    """The functions that draw the plots with data, by their names: ab, shares, prefill, decode, sweep."""
    timed = [one for one in table.of_engine(records) if one.run.is_timed and one.run.is_plain]
    plain = [one for one in timed if not one.run.every]
    good = [one for one in table.alone(records) if table.went_well(one)]
    trials = plot_trial.trials(timed)
    made: dict[str, Callable[[Figure], Any]] = {}
    for number, trial in enumerate(trials, 1):
        draw = functools.partial(plot_trial.plot_trial, trial, text_setup.where(trial))
        made["ab" if len(trials) == 1 else f"ab-{number}"] = draw
    in_trials = {id(one) for trial in trials for one in trial}
    alone = [one for one in plain if id(one) not in in_trials and phases.prefill_ns(one.run)]
    answered = (
        good
        if any(row.ttft_s > 0 and row.n_prompt for row in table.runs(good).itertuples())
        else []
    )
    decodes = any(phases.itl_ns(one.run) for one in alone)
    if decodes and not answered and len(table.setups(table.runs(alone))) == 1:
        made["shares"] = lambda figure: plot_shares(alone, figure.subplots())
    if answered or alone:
        made["prefill"] = lambda figure: plot_prefill([*alone, *answered], figure.subplots())
    if any(phases.itl_ns(one.run) for one in plain) or any(
        request_times.chunk_gaps_ns(one.request) for one in good
    ):
        made["decode"] = lambda figure: plot_decode([*plain, *good], figure.subplots())
    if len(plain) < len(timed):
        made["sweep"] = lambda figure: plot_sweep(timed, figure)
    return made


def _timed(records: Records) -> tuple[list[Record | RequestRecord], pd.DataFrame]:
    """What went well and is no experiment, and its rows: `run` is the place in the list."""
    engine = table.of_engine(records)
    alone = table.alone(records)
    timed: list[Record | RequestRecord] = [
        one for one in engine if one.run.is_timed and one.run.is_plain
    ]
    timed += [one for one in alone if table.went_well(one)]
    if not timed and any(not record.run.is_plain for record in engine):
        raise LabError(
            "There is nothing to draw: these are experiments.", "Their pictures: lab plot RESULTS"
        )
    if not timed:
        what = "run" if engine or not alone else "request"
        raise LabError(
            f"There is nothing to draw: no {what} went well.",
            "Look at the errors: lab show RESULTS",
        )
    rows = table.runs(timed)
    usual = table.measured(rows)
    return timed, usual if len(usual) else rows


def _subject(records: Records, rows: pd.DataFrame) -> str:
    """Model, machine and repeats of runs; for requests also server and client."""
    n = rows.groupby([*text_setup.fields(rows), "n_prompt", "n_gen"], dropna=False).size()
    fewest = int(n.min())
    most = int(n.max())
    repeats = (
        f"{most} repeat{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} repeats"
    )
    if not table.alone(records):
        return f"{text_setup.where(table.of_engine(records))} ({repeats})"
    of_server = rows[rows.server.notna()]
    ways = ["in process"] * (len(of_server) < len(rows)) + [
        f"through {one_of(of_server.server, 'servers')}"
    ]
    models = one_of(rows.model.map(short_name), "models")
    return (
        f"{models} {' and '.join(ways)}\nclient {one_of(of_server.machine, 'machines')}; {repeats}"
    )
