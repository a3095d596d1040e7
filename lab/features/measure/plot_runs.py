"""The pictures of runs and of requests to servers: prefill, decode, both laws of a sweep, and the variants of a trial.

All points of all runs are drawn, hollow for disturbed runs; the line is a median. A server does not show prefill, so a
picture with requests shows TTFT of both. Warm requests and short answers are drawn only where there are no others.
Experiments and loads have separate pictures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core import phases, request_times, shown
from lab.core.lists import plural
from lab.core.record import PREFILL, Record
from lab.core.request import RequestRecord, short_name
from lab.errors import LabError
from lab.features.compare import comparison, text_compare
from lab.features.measure import sweep_laws
from lab.show import canvas, table, text_setup
from lab.show.canvas import OF_DECODE, OF_PREFILL, points
from lab.show.text_setup import one_of
from lab.show.wording import seconds, times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Record | RequestRecord]

RUNNING, HEADROOM, WIDE = 15, 1.35, 12
"""Of a decode plot: the positions in a running median; the upper end, relative to the 95th percentile of the gaps of
the slowest line. If the lines differ by more than the factor WIDE, the axis is logarithmic."""

MOST_GROWTHS = 4
"""Lengths up to which a prefill plot of one setup says by how much the time grows from one to the next."""


def plot_prefill(records: Records, ax: Axes | None = None, by_session: bool = False) -> Axes:
    """Prefill time against prompt length, both logarithmic: points are runs, the thick line their medians.

    With requests to servers it shows TTFT. With `by_session` each session of a setup is a line.

        lab.plot_prefill(records)

    Thin lines are the steps of single runs. The dashed grey line is proportional to the length, at the lowest measured
    time per token; for a single line the picture says by how much the time grows. More than six setups have a panel
    each.
    """
    timed, rows = _timed(records, by_session)
    is_ttft = bool(table.alone(timed))
    figure = "ttft_s" if is_ttft else "prefill_s"
    rows = rows[(rows[figure] > 0) & (rows.n_prompt > 0)]
    if rows.empty:
        raise LabError("There is nothing to draw: no run has a prefill time.", "Measure some: lab measure")
    engine, setups = table.of_engine(timed), table.setups(rows)
    steps, kind = table.steps(engine), "run" if engine else "request"
    axes = canvas.panels(ax or canvas.new_axes(), [name for name, _ in setups])
    has_panels, per_token = axes[0] is not axes[-1], dict[float, float]()
    is_alone = has_panels or len(setups) == 1
    styles = canvas.styles(1) * len(setups) if has_panels else canvas.styles(len(setups))
    for (name, own), one, style in zip(setups, axes, styles, strict=True):
        if not is_ttft and not steps.empty:  # imported runs have no steps
            inside = steps[(steps.kind == PREFILL) & steps.compute_ms.notna() & steps.run.isin(own.run)]
            for number, (_, run) in enumerate(run for run in inside.groupby("run") if len(run[1]) > 1):
                label = "steps of each run" if is_alone and not number else "_"
                one.plot(run.n_past + run.n_tokens, run.ready_s, color=style["color"], lw=0.7, alpha=0.5, label=label)
        medians = own.groupby("n_prompt")[figure].median()
        at: dict[str, Any] = {"marker": "_", "ms": 16} if len(medians) == 1 else {}
        one.plot(medians, lw=2, color=style["color"], label=f"median over {kind}s" if is_alone else "_", **at)
        if not is_alone:  # the legend, with the shape of the points
            one.plot([], [], lw=2, ms=6, **style, label=f"{name}: median")
        of_points = f"{kind}s" if is_alone else None
        points(one, own.n_prompt, own[figure], own.disturbed, ms=6, alpha=0.6, **style, label=of_points)
        per_token |= {float(value / n): float(n) for n, value in medians.items()}
        if len(setups) == 1 < len(medians) <= MOST_GROWTHS and own.groupby("n_prompt").disturbed.mean().lt(0.5).all():
            for (n, t), (next_n, next_t) in itertools.pairwise(medians.items()):
                words = f"{times(next_n / n)} the tokens:\n{times(next_t / t)} the time"
                middle = math.sqrt(n * next_n), math.sqrt(t * next_t)
                one.annotate(words, middle, (-9, 6), textcoords="offset points", ha="right", va="bottom", fontsize=9)
    for one in dict.fromkeys(axes):
        canvas.in_proportion(one, list(rows.n_prompt), per_token)
        canvas.over_lengths(one, rows.n_prompt)
        if rows.n_prompt.nunique() > 1:
            one.set_yscale("log")
        else:
            one.set_ylim(0, 1.2 * rows[figure].max())
    canvas.name_axes(axes, "prompt length (tokens)", "TTFT (s)" if is_ttft else "prefill time (s)")
    what = "TTFT: time until the first token arrives" if is_ttft else "Prefill: time until the prompt is processed"
    canvas.finish(axes, f"{what}\n{_subject(timed, rows)}")
    return axes[0]


def plot_shares(records: Records, ax: Axes | None = None) -> Axes:
    """Where the time of a request goes: a bar for each of up to ten lengths, prefill and decode with their shares.

        lab.plot_shares(records)

    Bars are medians, as in the table. LabError without a run that decoded, and for several setups.
    """
    timed, rows = _timed(records, False)
    rows = rows[rows.e2e_s.gt(0) & rows.prefill_s.gt(0) & rows.tpot_ms.notna()]
    if rows.empty or len(table.setups(rows)) > 1:
        raise LabError("This picture needs runs of one setup that decoded.", "Measure one, with --gen 2 or more.")
    ax, own = ax or canvas.new_axes(), table.summary(rows)[::-1]
    own = own.iloc[:: -(-len(own) // 10)]
    marks = own.doubts.map(shown.mark)
    names = [
        f"{n:,} tokens in, {out:,} out\n{seconds(e2e)} {mark}".strip()
        for n, out, e2e, mark in zip(own.n_prompt, own.n_gen, own.e2e_s, marks, strict=True)
    ]
    share = 100 * own.prefill_share
    for label, colour, left, width in (
        ("prefill", OF_PREFILL, 0 * share, share),
        ("decode", OF_DECODE, share, 100 - share),
    ):
        bars = ax.barh(names, width, left=left, color=colour, label=label)
        words = [f"{label} {one:.0f} %" if one >= 12 else f"{one:.0f} %" if one >= 4 else "" for one in width]
        ax.bar_label(bars, words, label_type="center", color="white", fontsize=11)
    if marks.any():
        ax.barh(names[:1], 0, alpha=0, label="!: some runs disturbed; !!: half or more")
    ax.set(xlim=(0, 100), xlabel="share of the request's time (%)")
    ax.grid(visible=False, axis="y")
    canvas.finish([ax], f"Where the time of a request goes\n{_subject(timed, rows)}")
    return ax


def plot_decode(records: Records, ax: Axes | None = None, by_session: bool = False) -> Axes:
    """Decode time per token (ITL) against the token's position in the generation, one line per prompt length.

        lab.plot_decode(records)

    Points are tokens of all repeats (hollow: of disturbed runs); the line is the running median of the per-token
    medians. Points above the axis are counted and marked at its upper edge. Setups of very different speed get a
    logarithmic axis. More than six lines of several setups get a panel for each setup. Where tokens of a server arrive
    together, or it does not say how many arrive, gaps are between events (inter-chunk latency).
    """
    from matplotlib.ticker import MaxNLocator

    timed, rows = _timed(records, by_session)
    gaps = _gaps(timed, rows)
    if gaps is None:
        raise LabError("There is nothing to draw: no run decoded a token.", "Measure with --gen 2 or more.")
    lines = [(setup, n_prompt, own) for (setup, n_prompt), own in gaps.groupby(["setup", "n_prompt"], sort=False)]
    lines.sort(key=lambda line: line[1])
    setups, lengths = list(dict.fromkeys(gaps.setup)), sorted(set(gaps.n_prompt))
    axes = canvas.panels(ax or canvas.new_axes(), [setup for setup, *_ in lines])
    has_panels = axes[0] is not axes[-1]
    bases = dict(zip(setups, canvas.styles(len(setups), OF_DECODE), strict=True))
    top = HEADROOM * max(own.ms.quantile(0.95, "lower") for *_, own in lines) or 1.0
    labelled = set[str]()
    for (setup, n_prompt, own), one in zip(lines, axes, strict=True):
        colour = OF_DECODE if has_panels else bases[setup]["color"]
        style = canvas.styles(len(lengths), colour, is_shaded=True)[lengths.index(n_prompt)]
        style |= {} if has_panels or len(setups) == 1 else {"marker": bases[setup]["marker"]}
        running = own.groupby("place").ms.median().rolling(RUNNING, center=True, min_periods=1).median()
        above = own[own.ms > top]
        note = f" ({plural(len(above), 'point')} above the axis)" if len(above) else ""
        points(one, own.place, own.ms, own.hollow, ms=3, alpha=0.3, **style)
        if len(above):
            one.plot(above.place, [top] * len(above), ls="", marker="^", ms=5, color=style["color"], clip_on=False)
        one.plot(running, label="_", lw=2, color=style["color"])
        after = f"after {n_prompt:,} prompt tokens"
        name = after if has_panels else ", ".join(filter(None, [after, setup if len(setups) > 1 else ""])) + note
        if name not in labelled:
            one.plot([], [], lw=2, ms=4, **style, label=name)
        labelled.add(name)
        if has_panels and note:
            one.set_title(f"{one.get_title()}\n{after}{note}", fontsize=8, pad=8)
    middles = [own.ms.median() for *_, own in lines]
    is_log = max(middles) > WIDE * min(middles) > 0
    for one in dict.fromkeys(axes):
        one.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        one.set_yscale("log" if is_log else "linear")
        one.set_ylim(0.7 * min(middles) if is_log else 0, top)
    what = " or ".join(sorted(set(gaps.kind), reverse=True))
    title = {
        "token": "time per generated token",
        "event": "time between events with tokens (inter-chunk latency)",
    }.get(what, "time between tokens, or between events with tokens")
    first = " (the first ends TTFT)" if table.alone(timed) else " (prefill produces the first)"
    canvas.name_axes(axes, f"generated {what}{'' if has_panels else first}", f"time since the previous {what} (ms)")
    canvas.finish(axes, f"Decode: {title}\n{_subject(timed, rows)}")
    return axes[0]


def _gaps(timed: Records, rows: pd.DataFrame) -> pd.DataFrame | None:
    """A row for each gap of each answer, from that before its second token (or event) on; None without any."""
    import pandas as pd

    parts = []
    for setup, own in table.setups(rows) if len(rows) else ():
        for n_prompt, run, hollow in zip(own.n_prompt, own.run, own.disturbed, strict=True):
            record, kind = timed[run], "token"
            if isinstance(record, Record):
                ns: Sequence[float] = phases.itl_ns(record.run)
            else:
                by_token, ns = request_times.itl_ns(record.request), request_times.chunk_gaps_ns(record.request)
                kind = "event" if by_token is None or len(by_token) > len(ns) else "token"
            gaps = pd.DataFrame({"place": range(2, len(ns) + 2), "ms": [one / 1e6 for one in ns]})
            parts.append(gaps.assign(setup=setup, n_prompt=int(n_prompt), run=run, hollow=bool(hollow), kind=kind))
    made = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return made if len(made) else None


def plot_sweep(records: Sequence[Record], figure: Figure | None = None) -> Figure:
    """Both curves of sweeps, side by side: prefill time over length, decode time per token over position.

        lab.plot_sweep(lab.sweep(4096, every=256))

    Points are single runs, the band is their range, the dashed line the fitted law. More than six setups
    get a row each.
    """
    records = [record for record in _experiments_apart(records) if record.run.every]
    if not records:
        raise LabError("There is nothing to draw: no run is a sweep.", "Make one: lab sweep")
    figure, rows = figure or canvas.new_figure((11, 5)), table.runs(records)
    parts = canvas.in_parts(table.setups(rows))
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(parts)))
    shared: Any = "col" if len(parts) > 1 else False
    axes = figure.subplots(len(parts), 2, squeeze=False, sharex=shared, sharey=shared)
    for part, pair in zip(parts, axes, strict=True):
        for number, (label, runs) in enumerate(part):
            name, summary = f"{label}: " if len(part) > 1 else "", table.summary(runs)
            prefill, decode = sweep_laws.prefill_law(summary), sweep_laws.decode_law(summary)
            positions = sweep_laws.positions_of(runs)
            of_prefill, of_decode = list[Any](), list[Any]()
            if prefill:
                lengths = [summary.n_prompt.max() * i / 100 for i in range(101)]
                formula = f"{seconds(prefill.a)} + {seconds(prefill.b)} P + {seconds(prefill.c)} P\u00b2"
                formula = formula.replace(" ", "\u00a0")  # no line of the legend breaks there
                of_prefill = [lengths, [prefill.seconds(n) for n in lengths], f"prefill: {formula}"]
            if decode:
                reach = [0, positions.max()]
                formula = f"{seconds(decode.w / 1e3)} + {seconds(decode.k / 1e3)} p".replace(" ", "\u00a0")
                of_decode = [reach, [decode.ms(p) for p in reach], f"decode: {formula}"]
            for ax, at, column, colour, law in (
                (pair[0], runs.n_prompt, "prefill_s", OF_PREFILL, of_prefill),
                (pair[1], positions, "tpot_ms", OF_DECODE, of_decode),
            ):
                style = canvas.styles(len(part), colour)[number]
                if runs[column].notna().any():
                    ends = runs.groupby(at)[column].agg(["min", "max"])
                    ax.fill_between(ends.index, ends["min"], ends["max"], color=style["color"], alpha=0.2, lw=0)
                    words = label if name else "runs and their range"
                    points(ax, at, runs[column], runs.disturbed, ms=4, alpha=0.6, **style, label=words)
                if law:
                    ax.plot(*law[:2], ls="--", lw=1.8, color=style["color"], label=f"{name}fitted {law[2]}")
        left, right = pair
        below = f"\n{part[0][0]}" if len(parts) > 1 else ""
        left.set(title=f"Prefill{below}", xlabel="prompt length P (tokens)", ylabel="prefill time (s)")
        right.set(
            title=f"Decode{below}", xlabel="position p (tokens in the context)", ylabel="decode time per token (ms)"
        )
        for ax in pair:
            ax.title.set_fontsize(11)
            ax.set(xlim=(0, None), ylim=(0, None))
    canvas.finish(list(axes.flat), f"Prefill and decode in one pass through the context\n{_subject(records, rows)}")
    return figure


def drawings(records: Records, by_session: bool = False) -> dict[str, Callable[[Figure], Any]]:
    """The functions that draw the plots with data, by their names: ab, shares, prefill, decode, sweep.

    Requests that ran alone share the plots of plain runs. Runs of `lab ab` have ratios in place of prefill times.
    """
    timed = _experiments_apart(table.of_engine(records))
    sweeps, plain = [r for r in timed if r.run.every], [r for r in timed if not r.run.every]
    good = [record for record in table.alone(records) if table.went_well(record)]
    trials = text_compare.trials(table.of_engine(records))
    made: dict[str, Callable[[Figure], Any]] = {}
    for number, trial in enumerate(trials, 1):
        name = "ab" if len(trials) == 1 else f"ab-{number}"
        made[name] = partial(text_compare.plot_trial, trial, text_setup.where(trial))
    in_trials = {id(record) for trial in trials for record in trial}
    alone = [one for one in plain if id(one) not in in_trials]
    has_ttft = any(request_times.figures(one.request).ttft_ns and table.request_row(one, 0)["n_prompt"] for one in good)
    has_prefill = [one for one in alone if phases.prefill_ns(one.run)]
    is_one_setup = bool(alone) and not has_ttft and len(table.setups(table.runs(alone))) == 1
    if is_one_setup and any(phases.itl_ns(one.run) for one in has_prefill):
        made["shares"] = lambda figure: plot_shares(alone, figure.subplots())
    if has_ttft or has_prefill:
        shown: Records = [*alone, *(good if has_ttft else [])]
        made["prefill"] = lambda figure: plot_prefill(shown, figure.subplots(), by_session)
    if any(phases.itl_ns(one.run) for one in plain) or any(request_times.chunk_gaps_ns(one.request) for one in good):
        made["decode"] = lambda figure: plot_decode([*plain, *good], figure.subplots(), by_session)
    if sweeps:
        made["sweep"] = lambda figure: plot_sweep(sweeps, figure)
    return made


def _timed(records: Records, by_session: bool) -> tuple[list[Record | RequestRecord], pd.DataFrame]:
    """What went well and is neither an experiment nor part of a load, and its rows: `run` is the place in the list."""
    engine = table.of_engine(records)
    good = [record for record in table.alone(records) if table.went_well(record)]
    timed: list[Record | RequestRecord] = [*_experiments_apart(engine), *good]
    if not timed and (any(record.run.lever for record in engine) or table.loads_of(records)):
        raise LabError("There is nothing to draw: these are experiments.", "Their pictures: lab plot RESULTS")
    if not timed:
        what = "run" if engine or not table.alone(records) else "request"
        raise LabError(f"There is nothing to draw: no {what} went well.", "Look at the errors: lab show RESULTS")
    rows = table.runs(timed)
    usual = table.measured(rows)
    rows = usual if len(usual) else rows
    return timed, comparison.sessions_apart(rows) if by_session else rows


def _experiments_apart(records: Sequence[Record]) -> list[Record]:
    """Successful timed runs, without experiments, which have separate pictures."""
    return [record for record in records if record.run.is_timed and record.run.lever is None]


def _subject(records: Records, rows: pd.DataFrame) -> str:
    """Model, machine and repeats of runs; for requests also server and client."""
    n = rows.groupby([*text_setup.fields(rows), "n_prompt", "n_gen"], dropna=False).size()
    fewest, most = int(n.min()), int(n.max())
    repeats = f"{most} repeat{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} repeats"
    if not table.alone(records):
        return f"{text_setup.where(table.of_engine(records))} ({repeats})"
    of_server = rows[rows.server.notna()]
    ways = ["in process"] * (len(of_server) < len(rows)) + [f"through {one_of(of_server.server, 'servers')}"]
    models = one_of(rows.model.map(short_name), "models")
    return f"{models} {' and '.join(ways)}\nclient {one_of(of_server.machine, 'machines')}; {repeats}"
