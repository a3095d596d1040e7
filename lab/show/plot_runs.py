"""The pictures: what a prompt costs, what each further token costs, and both laws of a sweep in one.

Every point of every run is drawn, those of disturbed runs hollow; the line over them is a median.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis import request_table, setup_columns, sweep_laws, table
from lab.analysis.wording import digits, seconds
from lab.core import phases
from lab.core.record import PREFILL, Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.runner import machine
from lab.show import plot_requests
from lab.show.canvas import COLOURS, LINES, MARKERS, new_axes, over_prompt_lengths, plain_ticks, points, tidy, unbroken

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RUNNING_MEDIAN = 15
"""Tokens that the line in the decode plot takes the median of."""

OFF = 0.05
"""Where the table's TPOT differs from the line of the decode plot by more than this, the legend says why."""

FEW_LINES = 8
"""Lines of a decode plot whose legend still fits into it."""

WIDE = 12
"""Where the slowest line of a decode plot takes more than so many times the fastest, the axis is logarithmic."""


def plot_prefill(records: Sequence[Record | RequestRecord], ax: Axes | None = None) -> Axes:
    """Prefill time against prompt length, both logarithmic: points are runs, the thick line their medians.

    Where there are requests to servers, which show no prefill, it is TTFT of all (plot_requests.py).

        lab.plot_prefill(records)

    Thin lines are single runs, step by step. The dashed grey line is proportional to the length, at the lowest
    time per token that was measured.
    """
    if request_table.alone(records):
        return plot_requests.plot_ttft(records, ax)
    records = _timed(records)
    ax = ax or new_axes()
    run_rows = table.runs(records)
    run_rows = run_rows[run_rows.prefill_s.notna()]
    if run_rows.empty:
        raise LabError("There is nothing to draw: no run has a prefill time.", "Measure some: lab measure")
    step_rows = table.steps(records)
    setups = table.setups(run_rows)
    per_token: dict[float, float] = {}
    for (label, rows), style in zip(setups, _styles(), strict=False):
        name = f"{label}: " if len(setups) > 1 else ""
        for _, run in _prefill_steps(step_rows, rows):
            if len(run) > 1:
                (thin,) = ax.plot(run.n_past + run.n_tokens, run.ready_s, color=style["color"], lw=0.7, alpha=0.5)
                thin.set_label("_" if name else "inside each run, step by step")
                name = name or " "
        medians = rows.groupby("n_prompt").prefill_s.median()
        ax.plot(medians.index, medians, lw=2, color=style["color"], label=f"{name}median over runs".strip())
        named = None if name.strip() else "runs"
        points(ax, rows.n_prompt, rows.prefill_s, rows.disturbed, ms=6, alpha=0.6, **style, label=named)
        per_token.update((float(seconds / n), float(n)) for n, seconds in medians.items())
    over_prompt_lengths(ax, [run_rows.n_prompt.min(), run_rows.n_prompt.max()], per_token)
    ax.set_ylabel("prefill time (s)")
    return _finish(ax, "Prefill: time until the prompt is processed", records)


def plot_decode(records: Sequence[Record | RequestRecord], ax: Axes | None = None) -> Axes:
    """Decode time per token (ITL) against the token's place in the generation, one line a prompt length.

    Where there are requests to servers, see plot_requests.py: their gaps may be those between events.

        lab.plot_decode(records)

    Points are tokens of all repeats (hollow: of disturbed runs); the line is the running median of the per-token
    medians. Points above
    the axis are counted and marked at its upper edge. Setups of very different speed get a logarithmic axis.
    """
    from matplotlib.ticker import MaxNLocator

    if request_table.alone(records):
        return plot_requests.plot_gaps(records, ax)
    records = _timed(records)
    ax = ax or new_axes()
    decode = table.steps(records)
    decode = decode[decode.itl_ms.notna()]
    if decode.empty:
        raise LabError("There is nothing to draw: no run decoded a token.", "Measure with --gen 2 or more.")
    groups = table.setups(decode)
    n_lines = decode.groupby([*setup_columns.fields(decode), "n_prompt"], dropna=False).ngroups
    of_lines = decode.groupby([*setup_columns.fields(decode), "n_prompt"], dropna=False).itl_ms
    medians = of_lines.median()
    headroom = 1.35 + 0.08 * max(0, n_lines - 3) if n_lines <= FEW_LINES else 1.1  # for the legend
    top = headroom * float(of_lines.quantile(0.95).max())
    lengths = {n: i for i, n in enumerate(sorted(decode.n_prompt.unique()))}
    for line, (setup, rows) in enumerate(groups):
        for n_prompt, tokens in rows.groupby("n_prompt"):
            number = line * len(lengths) + lengths[n_prompt]
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            dots: dict[str, Any] = {"marker": marker, "ms": 3, "alpha": 0.3, "color": colour}
            points(ax, tokens.generated, tokens.itl_ms, tokens.disturbed, **dots)
            above = tokens[tokens.itl_ms > top]
            if len(above):
                ax.plot(above.generated, [top] * len(above), ls="", marker="^", ms=5, color=colour, clip_on=False)
            middle = tokens.groupby("generated").itl_ms.median()
            middle = middle.rolling(RUNNING_MEDIAN, center=True, min_periods=1).median()
            label = (
                f"after {n_prompt:,} prompt tokens" + (f", {setup}" if len(groups) > 1 else "") + _tpot(tokens, middle)
            )
            label += f" ({len(above)} point{'s' * (len(above) > 1)} above the axis)" if len(above) else ""
            ax.plot(middle.index, middle, color=colour, lw=2, ls=LINES[line % len(LINES)], label=label)
    if medians.max() > WIDE * medians.min():
        ax.set_yscale("log")
        ax.set_ylim(0.7 * medians.min(), top)
        plain_ticks(ax.yaxis)
    else:
        ax.set_ylim(0, top)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.set_xlabel("generated token (the first comes out of prefill)")
    ax.set_ylabel("time since the token before (ms)")
    return _finish(ax, "Decode: time per generated token", records)


def plot_sweep(records: Sequence[Record], figure: Figure | None = None, stacked: bool = False) -> Figure:
    """Both curves of sweeps, side by side or stacked: prefill time over length, decode time per token over position.

        lab.plot_sweep(lab.sweep(4096, every=256))

    Points are single runs, the band is their range, the dashed line the fitted law.
    """
    records = [record for record in _timed(records) if record.run.every]
    if not records:
        raise LabError("There is nothing to draw: no run is a sweep.", "Make one: lab sweep")
    if figure is None:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(2, 1) if stacked else figure.subplots(1, 2)
    rows = table.runs(records)
    setups = table.setups(rows)
    for (label, runs), style in zip(setups, _styles(), strict=False):
        summary = table.summary(runs)
        name, drawn = (f"{label}: ", "_") if len(setups) > 1 else ("", "runs, and their range")
        prefill, decode = sweep_laws.prefill_law(summary), sweep_laws.decode_law(summary)
        _band(left, runs, runs.n_prompt, "prefill_s", style, drawn if prefill else name or drawn)
        if prefill:
            law = name + unbroken(f"{seconds(prefill.a)} + {seconds(prefill.b)} P + {seconds(prefill.c)} P\u00b2")
            lengths = [summary.n_prompt.max() * i / 100 for i in range(101)]
            left.plot(lengths, [prefill.seconds(n) for n in lengths], ls="--", lw=1.8, color=style["color"], label=law)
        if runs.tpot_ms.notna().any():
            _band(right, runs, sweep_laws.positions_of(runs), "tpot_ms", style, drawn if decode else name or drawn)
        if decode:
            law = name + unbroken(f"{seconds(decode.w / 1e3)} + {seconds(decode.k / 1e3)} p")
            ends = [0, sweep_laws.positions_of(summary).max()]
            right.plot(ends, [decode.ms(p) for p in ends], ls="--", lw=1.8, color=style["color"], label=law)
    left.set_xlabel("prompt length P (tokens)")
    left.set_ylabel("prefill time (s)")
    left.set_title("Prefill", fontsize=11)
    right.set_xlabel("position p (tokens in the context)")
    right.set_ylabel("decode time per token (ms)")
    right.set_title("Decode", fontsize=11)
    for ax in (left, right):
        ax.set_ylim(bottom=0)
        ax.set_xlim(left=0)
        plain_ticks(ax.xaxis)
        tidy(ax)
    n = max(record.run.repeat for record in records) + 1
    figure.suptitle(f"One walk through the context\n{_subject(records)} ({n} repeat{'s' * (n > 1)})", fontsize=11)
    return figure


def drawings(records: Sequence[Record], stacked: bool = False) -> dict[str, Callable[[Figure], Any]]:
    """What draws the plots that there is data for, by their names: prefill, decode, sweep."""
    timed = _plain(records)
    sweeps, plain = [r for r in timed if r.run.every], [r for r in timed if not r.run.every]
    draw_by_name: dict[str, Callable[[Figure], Any]] = {}
    if any(phases.prefill_ns(record.run) for record in plain):
        draw_by_name["prefill"] = lambda figure: plot_prefill(plain, figure.subplots())
    if any(phases.itl_ns(record.run) for record in plain):
        draw_by_name["decode"] = lambda figure: plot_decode(plain, figure.subplots())
    if sweeps:
        draw_by_name["sweep"] = lambda figure: plot_sweep(sweeps, figure, stacked)
    return draw_by_name


def _tpot(tokens: pd.DataFrame, line: pd.Series) -> str:
    """What a legend says where TPOT, a mean over tokens, lies off the line, which is a running median."""
    tpot_ms = tokens[tokens.generated > 1].groupby("run").itl_ms.mean().median()
    is_off = abs(tpot_ms / line.median() - 1) > OFF
    return f" (TPOT {digits(tpot_ms)} ms is a mean over tokens)" if is_off else ""


def _prefill_steps(step_rows: pd.DataFrame, runs: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
    """The prefill steps of each of `runs` that were timed one by one; imported runs have none."""
    if step_rows.empty:
        return []
    is_timed = (step_rows.kind == PREFILL) & step_rows.compute_ms.notna()
    return list(step_rows[is_timed & step_rows.run.isin(runs.run)].groupby("run"))


def _band(ax: Axes, runs: pd.DataFrame, x: pd.Series, figure: str, style: dict[str, Any], label: str) -> None:
    """Every run as a point, and the range over runs at each x as a band."""
    ends = runs.groupby(x)[figure].agg(["min", "max"])
    ax.fill_between(ends.index, ends["min"], ends["max"], color=style["color"], alpha=0.2, lw=0)
    points(ax, x, runs[figure], runs.disturbed, ms=4, alpha=0.6, **style, label=label)


def _timed(records: Sequence[Record | RequestRecord]) -> list[Record]:
    of_engine = request_table.of_engine(records)
    timed = _plain(of_engine)
    if not timed and (any(record.run.lever for record in of_engine) or request_table.loads_of(records)):
        raise LabError("There is nothing to draw: these are experiments.", "Their pictures: lab plot RESULTS")
    if not timed:
        raise LabError("There is nothing to draw: no run went well.", "Look at the errors: lab show RESULTS")
    return timed


def _plain(records: Sequence[Record]) -> list[Record]:
    """Timed runs that went well and are no experiment: those have pictures of their own."""
    return [record for record in records if record.run.is_timed and record.run.lever is None]


def _styles() -> list[dict[str, Any]]:
    return [{"color": colour, "marker": marker} for colour, marker in zip(COLOURS, MARKERS, strict=True)] * 8


def _finish(ax: Axes, what: str, records: Sequence[Record]) -> Axes:
    repeats = collections.Counter(
        (setup_columns.model_label(r), r.machine, r.settings, r.run.variant, r.run.n_prompt, r.run.n_gen)
        for r in records
    )
    fewest, most = min(repeats.values()), max(repeats.values())
    n_repeat = f"{most} repeat{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} repeats"
    ax.set_title(f"{what}\n{_subject(records)} ({n_repeat})", fontsize=11)
    return tidy(ax)


def _subject(records: Sequence[Record]) -> str:
    models = sorted({setup_columns.model_label(record) for record in records})
    machines = sorted({machine.label(r.machine, r.settings) for r in records})
    n_computers = len({(r.machine.cpu, r.machine.ram_bytes) for r in records})
    return f"{_short(models, 'models')} on {_short(machines, 'machines' if n_computers > 1 else 'devices')}"


def _short(names: list[str], kind: str) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} {kind}"
