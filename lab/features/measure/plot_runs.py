"""The pictures of runs and of requests to servers: prefill, decode, both laws of a sweep, and the variants of a trial.

All points of all runs are drawn, hollow for disturbed runs; the line is a median. A server does not show prefill, so a
picture with requests shows TTFT of both. Warm requests and short answers are drawn and named. Experiments and loads
have separate pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core import phases
from lab.core import request_times as times
from lab.core.record import PREFILL, Record
from lab.core.request import RequestRecord, short_name
from lab.errors import LabError
from lab.features.compare import comparison, plot_trial
from lab.features.measure import sweep_laws
from lab.show import canvas, request_table, setup_columns, table
from lab.show.canvas import MOST_SERIES, points, unbroken
from lab.show.setup_columns import one_of
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Record | RequestRecord]

RUNNING = 15
"""Positions in the running median, or mean, of a decode plot."""

OFF = 0.05
"""If the table's TPOT differs from the line of the decode plot by more than this share, the legend says why."""

HEADROOM = 1.35
"""The upper end of a decode plot, relative to the 95th percentile of the gaps of its slowest line."""

WIDE = 12
"""If the slowest line of a decode plot is slower than the fastest by more than this factor, the axis is logarithmic."""


def plot_prefill(records: Records, ax: Axes | None = None, by_session: bool = False) -> Axes:
    """Prefill time against prompt length, both logarithmic: points are runs, the thick line their medians.

    With requests to servers it shows TTFT. With `by_session` each session of a setup is a line.

        lab.plot_prefill(records)

    Thin lines are the steps of single runs. The dashed grey line is proportional to the length, at the lowest measured
    time per token. More than six setups have a panel each.
    """
    timed, rows = _timed(records, by_session)
    is_ttft = bool(request_table.alone(timed))
    figure = "ttft_s" if is_ttft else "prefill_s"
    rows = rows[(rows[figure] > 0) & (rows.n_prompt > 0)]
    if rows.empty:
        raise LabError("There is nothing to draw: no run has a prefill time.", "Measure some: lab measure")
    lines, steps = _lines(rows), table.steps(request_table.of_engine(timed))
    axes = canvas.panels(ax or canvas.new_axes(), [name for name, *_ in lines])
    has_panels = axes[0] is not axes[-1]
    styles = canvas.styles(1 if has_panels else 1 + lines[-1][2])
    per_token: dict[float, float] = {}
    for (name, own, setup, is_usual), one in zip(lines, axes, strict=True):
        style, is_alone = styles[0 if has_panels else setup], has_panels or not name
        if not is_ttft and not steps.empty:  # imported runs have no steps
            label = "steps of each run" if is_alone else "_"
            inside = steps[(steps.kind == PREFILL) & steps.compute_ms.notna() & steps.run.isin(own.run)]
            for _, run in inside.groupby("run"):
                if len(run) > 1:
                    of_run = run.n_past + run.n_tokens, run.ready_s
                    one.plot(*of_run, color=style["color"], lw=0.7, alpha=0.5, label=label)
                    label = "_"
        medians = own.groupby("n_prompt")[figure].median()
        label = f"median over {_kind(timed)}s" if is_alone else f"{name}: median"
        at: dict[str, Any] = {"marker": "_", "ms": 16} if len(medians) == 1 else {}
        one.plot(medians, ls="-" if is_usual else ":", lw=2, color=style["color"], label=label, **at)
        of_points = own.n_prompt, own[figure], own.disturbed
        points(one, *of_points, ms=6, alpha=0.6, **style, label=f"{_kind(timed)}s" if is_alone else None)
        if is_usual or not any(usual for *_, usual in lines):
            per_token |= {float(value / n): float(n) for n, value in medians.items()}
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


def plot_decode(records: Records, ax: Axes | None = None, by_session: bool = False) -> Axes:
    """Decode time per token (ITL) against the token's position in the generation, one line per prompt length.

        lab.plot_decode(records)

    Points are tokens of all repeats (hollow: of disturbed runs); the line is the running median of the per-token
    medians. Points above the axis are counted and marked at its upper edge. Setups of very different speed get a
    logarithmic axis. More than six lines get a panel for each setup, or for each length if there are more lengths.

    If a server does not say how many tokens are in an event, gaps are between events (inter-chunk latency). Tokens that
    arrived together have gaps of 0, and the line is a running mean.
    """
    from matplotlib.ticker import MaxNLocator

    timed, rows = _timed(records, by_session)
    gaps = _gaps(timed, rows)
    if gaps is None:
        raise LabError("There is nothing to draw: no run decoded a token.", "Measure with --gen 2 or more.")
    lines = [own for _, own in gaps.groupby(["line", "n_prompt"])]
    lengths = [f"after {own.n_prompt.iloc[0]:,} prompt tokens" for own in lines]
    setups = [own.setup.iloc[0] for own in lines]
    by_length = len(set(setups)) <= MOST_SERIES < gaps.n_prompt.nunique()
    panels, names = (lengths, setups) if by_length else (setups, lengths)
    axes = canvas.panels(ax or canvas.new_axes(), panels)
    has_panels = axes[0] is not axes[-1]
    shortest_first = sorted(range(len(lines)), key=lambda i: int(lines[i].n_prompt.iloc[0]))
    if has_panels:
        colours = {names[i]: None for i in shortest_first}
        styles = dict(zip(colours, canvas.styles(len(colours)), strict=True))
        for name, style in styles.items():  # the legend, in their order
            axes[0].plot([], [], lw=2, color=style["color"], label=name)
    together = [own.together.any() for own in lines]  # then the median gap means nothing
    known = [own.ms[own.ms > 0] for own in lines]
    top = HEADROOM * max(ms.quantile(0.95, "lower") if len(ms) else 1.0 for ms in known)
    for i, (own, one) in enumerate(zip(lines, axes, strict=True)):
        style = styles[names[i]] if has_panels else canvas.styles(len(lines))[i]
        centre = "mean" if together[i] else "median"
        running = own.groupby("place").ms.agg(centre).rolling(RUNNING, center=True, min_periods=1).agg(centre)
        note = ", running mean" if together[i] else ""
        if not has_panels and not note and (own.kind == "token").all():
            tpot_ms = own.groupby("run").ms.mean().median()
            is_off = abs(tpot_ms / running.median() - 1) > OFF
            note = f" (TPOT {digits(tpot_ms)} ms: mean over tokens)" if is_off else ""
        above = own[own.ms > top]
        note += f" ({len(above):,} point{'s' * (len(above) > 1)} above the axis)" if len(above) else ""
        points(one, own.place, own.ms, own.hollow, ms=3, alpha=0.3, **style)
        if len(above):
            one.plot(above.place, [top] * len(above), ls="", marker="^", ms=5, color=style["color"], clip_on=False)
        label = "_" if has_panels else ", ".join(filter(None, (lengths[i], setups[i]))) + note
        one.plot(running, color=style["color"], lw=2, ls="-" if own.usual.all() else ":", label=label)
        if has_panels and note:
            one.set_title(f"{one.get_title()}\n{names[i]}{note}", fontsize=8, pad=8)
    middles = [ms.median() for ms in known if len(ms)]
    is_log = bool(middles) and max(middles) > WIDE * min(middles) and not any(together)
    for one in dict.fromkeys(axes):
        one.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        one.set_yscale("log" if is_log else "linear")
        one.set_ylim(0.7 * min(middles) if is_log else 0, top)
    what = " or ".join(sorted(set(gaps.kind), reverse=True))
    title = {
        "token": "time per generated token",
        "event": "time between events with tokens (inter-chunk latency)",
    }.get(what, "time between tokens, or between events with tokens")
    first = " (the first ends TTFT)" if request_table.alone(timed) else " (prefill produces the first)"
    canvas.name_axes(axes, f"generated {what}{'' if has_panels else first}", f"time since the previous {what} (ms)")
    canvas.finish(axes, f"Decode: {title}\n{_subject(timed, rows)}")
    return axes[0]


def _gaps(timed: Records, rows: pd.DataFrame) -> pd.DataFrame | None:
    """A row for each gap of each answer, from that before its second token (or event) on; None without any.

    `kind`: what it is between; `together`: some tokens of the answer arrived in one event.
    """
    import pandas as pd

    parts = []
    for line, (setup, own, _, usual) in enumerate(_lines(rows)):
        for n_prompt, run, hollow in zip(own.n_prompt, own.run, own.disturbed, strict=True):
            record, kind, together = timed[run], "token", False
            if isinstance(record, Record):
                ns: Sequence[float] = phases.itl_ns(record.run)
            else:
                by_token, ns = times.itl_ns(record.request), times.chunk_gaps_ns(record.request)
                kind, together = ("event", False) if by_token is None else ("token", len(by_token) > len(ns))
                ns = ns if by_token is None else by_token
            if ns:
                of_line = {"line": line, "setup": setup, "n_prompt": int(n_prompt), "run": run, "usual": usual}
                of_answer = {"hollow": bool(hollow), "kind": kind, "together": together}
                gaps = pd.DataFrame({"place": range(2, len(ns) + 2), "ms": [one / 1e6 for one in ns]})
                parts.append(gaps.assign(**of_line, **of_answer))
    if not parts:
        return None
    all_of_them = pd.concat(parts, ignore_index=True)
    if all_of_them.kind.nunique() > 1:
        kinds = all_of_them.groupby(["line", "n_prompt"]).kind.transform("first")
        named = zip(all_of_them.setup, kinds, strict=True)
        all_of_them["setup"] = [", ".join(filter(None, (setup, f"between {kind}s"))) for setup, kind in named]
    return all_of_them


def plot_sweep(records: Sequence[Record], figure: Figure | None = None, stacked: bool = False) -> Figure:
    """Both curves of sweeps, side by side or stacked: prefill time over length, decode time per token over position.

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
    shape = (2, 1) if stacked and len(parts) == 1 else (len(parts), 2)
    shared: Any = "col" if len(parts) > 1 else False
    axes = figure.subplots(*shape, squeeze=False, sharex=shared, sharey=shared).reshape(-1, 2)
    for part, (left, right) in zip(parts, axes, strict=True):
        for (label, runs), style in zip(part, canvas.styles(len(part)), strict=True):
            name, summary = f"{label}: " if len(part) > 1 else "", table.summary(runs)
            prefill, decode = sweep_laws.prefill_law(summary), sweep_laws.decode_law(summary)
            x = runs.n_prompt, sweep_laws.positions_of(runs)
            for ax, at, column, law in ((left, x[0], "prefill_s", prefill), (right, x[1], "tpot_ms", decode)):
                if runs[column].isna().all():
                    continue
                ends = runs.groupby(at)[column].agg(["min", "max"])
                ax.fill_between(ends.index, ends["min"], ends["max"], color=style["color"], alpha=0.2, lw=0)
                words = ("_" if law else name) if name else "runs and their range"
                points(ax, at, runs[column], runs.disturbed, ms=4, alpha=0.6, **style, label=words)
            dashed: dict[str, Any] = {"ls": "--", "lw": 1.8, "color": style["color"]}
            if prefill:
                text = unbroken(f"{seconds(prefill.a)} + {seconds(prefill.b)} P + {seconds(prefill.c)} P\u00b2")
                lengths = [summary.n_prompt.max() * i / 100 for i in range(101)]
                label = f"{name}fitted prefill law: {text}"
                left.plot(lengths, [prefill.seconds(n) for n in lengths], label=label, **dashed)
            if decode:
                text = unbroken(f"{seconds(decode.w / 1e3)} + {seconds(decode.k / 1e3)} p")
                reach = [0, sweep_laws.positions_of(summary).max()]
                right.plot(reach, [decode.ms(p) for p in reach], label=f"{name}fitted decode law: {text}", **dashed)
        name = f"\n{part[0][0]}" if len(parts) > 1 else ""
        left.set_title(f"Prefill{name}", fontsize=11)
        right.set_title(f"Decode{name}", fontsize=11)
        left.set(xlabel="prompt length P (tokens)", ylabel="prefill time (s)")
        right.set(xlabel="position p (tokens in the context)", ylabel="decode time per token (ms)")
        for ax in (left, right):
            ax.set_ylim(bottom=0)
            ax.set_xlim(left=0)
    title = f"Prefill and decode in one pass through the context\n{_subject(records, rows)}"
    canvas.finish(list(axes.flat), title)
    return figure


def drawings(records: Records, stacked: bool = False, by_session: bool = False) -> dict[str, Callable[[Figure], Any]]:
    """The functions that draw the plots with data, by their names: ab, prefill, decode, sweep.

    Requests that ran alone share the plots of plain runs. Runs of `lab ab` have ratios in place of prefill times.
    """
    timed = _experiments_apart(request_table.of_engine(records))
    sweeps, plain = [r for r in timed if r.run.every], [r for r in timed if not r.run.every]
    good = [record for record in request_table.alone(records) if request_table.went_well(record)]
    draw_by_name: dict[str, Callable[[Figure], Any]] = {}
    has_ttft = any(times.figures(one.request).ttft_ns and request_table.run_row(one, 0)["n_prompt"] for one in good)
    trials = plot_trial.sessions(request_table.of_engine(records))
    for number, trial in enumerate(trials, 1):
        name = "ab" if len(trials) == 1 else f"ab-{number}"
        draw_by_name[name] = partial(plot_trial.plot_trial, trial, setup_columns.where(trial))
    in_trials = {id(record) for trial in trials for record in trial}
    shown: Records = [*(one for one in plain if id(one) not in in_trials), *(good if has_ttft else [])]
    if has_ttft or any(phases.prefill_ns(record.run) for record in request_table.of_engine(shown)):
        draw_by_name["prefill"] = lambda figure: plot_prefill(shown, figure.subplots(), by_session)
    if any(phases.itl_ns(one.run) for one in plain) or any(times.chunk_gaps_ns(one.request) for one in good):
        draw_by_name["decode"] = lambda figure: plot_decode([*plain, *good], figure.subplots(), by_session)
    if sweeps:
        draw_by_name["sweep"] = lambda figure: plot_sweep(sweeps, figure, stacked)
    return draw_by_name


def _timed(records: Records, by_session: bool) -> tuple[list[Record | RequestRecord], pd.DataFrame]:
    """What went well and is neither an experiment nor part of a load, and its rows: `run` is the place in the list."""
    engine = request_table.of_engine(records)
    good = [record for record in request_table.alone(records) if request_table.went_well(record)]
    timed: list[Record | RequestRecord] = [*_experiments_apart(engine), *good]
    if not timed and (any(record.run.lever for record in engine) or request_table.loads_of(records)):
        raise LabError("There is nothing to draw: these are experiments.", "Their pictures: lab plot RESULTS")
    if not timed:
        raise LabError(
            f"There is nothing to draw: no {_kind(records)} went well.", "Look at the errors: lab show RESULTS"
        )
    rows = table.runs(timed)
    return timed, comparison.sessions_apart(rows) if by_session else rows


def _experiments_apart(records: Sequence[Record]) -> list[Record]:
    """Successful timed runs, without experiments, which have separate pictures."""
    return [record for record in records if record.run.is_timed and record.run.lever is None]


def _kind(records: Records) -> str:
    return "request" if request_table.alone(records) and not request_table.of_engine(records) else "run"


def _lines(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame, int, bool]]:
    """The lines of a picture: name, rows, number of the setup, and whether neither warm nor of short answers."""
    setups, made = table.setups(rows) if len(rows) else [], []
    for number, (label, own) in enumerate(setups):
        warm, short = (own[kind].eq(True) if kind in own else own.run.ne(own.run) for kind in ("warm", "short"))
        for is_warm, is_short in itertools.product((False, True), repeat=2):
            if len(part := own[(warm == is_warm) & (short == is_short)]):
                words = [label * (len(setups) > 1), "warm" * is_warm, "short answers" * is_short]
                made.append((", ".join(filter(None, words)), part, number, not (is_warm or is_short)))
    return made


def _subject(records: Records, rows: pd.DataFrame) -> str:
    """Model, machine and repeats of runs; for requests also server and client."""
    n = rows.groupby([*setup_columns.fields(rows), "n_prompt", "n_gen"], dropna=False).size()
    fewest, most = int(n.min()), int(n.max())
    repeats = f"{most} repeat{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} repeats"
    if not request_table.alone(records):
        return f"{setup_columns.where(request_table.of_engine(records))} ({repeats})"
    of_server = rows[rows.server.notna()]
    ways = ["in process"] * (len(of_server) < len(rows)) + [f"through {one_of(of_server.server, 'servers')}"]
    models = one_of(rows.model.map(short_name), "models")
    return f"{models} {' and '.join(ways)}\nclient {one_of(of_server.machine, 'machines')}; {repeats}"
