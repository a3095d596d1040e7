"""The pictures of runs and of requests to servers: prefill, decode, both laws of a sweep, and the variants of a trial.

All points of all runs are drawn, hollow for disturbed runs; the line is a median. A server does not show prefill, so a
picture with requests shows TTFT of both. Warm requests and short answers are drawn and named. Experiments and loads
have separate pictures.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

PREFILL_TITLE = "Prefill: time until the prompt is processed"

HEADROOM = 1.35
"""The upper end of a decode plot, relative to the 95th percentile of the gaps of its slowest line."""

WIDE = 12
"""If the slowest line of a decode plot is slower than the fastest by more than this factor, the axis is logarithmic."""


@dataclass(frozen=True)
class Line:
    """The runs or requests of one line of a picture: its name, rows of `lab.runs`, and the number of its setup."""

    name: str
    rows: pd.DataFrame
    setup: int
    is_usual: bool  # cold, and whole answers


@dataclass(frozen=True)
class Gaps:
    """The gaps of one answer in ms, from that before its second token, or event, on."""

    ms: list[float]
    of_tokens: bool
    came_together: bool  # some tokens with others in one event
    is_disturbed: bool


@dataclass(frozen=True)
class GapLine:
    """The answers of one line of a decode plot. `setup` is empty if there is only one."""

    setup: str
    n_prompt: int
    answers: list[Gaps]
    is_usual: bool

    @property
    def length(self) -> str:
        """In words."""
        return f"after {self.n_prompt:,} prompt tokens"

    @property
    def is_mean(self) -> bool:
        """Whether tokens arrived together, so that the median gap means nothing."""
        return any(one.came_together for one in self.answers)

    @property
    def ms(self) -> list[float]:
        """All gaps in order, without those of tokens that arrived together."""
        return sorted(ms for one in self.answers for ms in one.ms if ms > 0)


def plot_prefill(records: Records, ax: Axes | None = None, by_session: bool = False) -> Axes:
    """Prefill time against prompt length, both logarithmic: points are runs, the thick line their medians.

    With requests to servers it shows TTFT. With `by_session` each session of a setup is a line.

        lab.plot_prefill(records)

    Thin lines are the steps of single runs. The dashed grey line is proportional to the length, at the lowest measured
    time per token. More than six setups have a panel each.
    """
    timed, rows = _timed(records, by_session)
    is_ttft = bool(request_table.alone(timed))
    figure, what = ("ttft_s", "TTFT: time until the first token arrives") if is_ttft else ("prefill_s", PREFILL_TITLE)
    rows = rows[(rows[figure] > 0) & (rows.n_prompt > 0)]
    if rows.empty:
        raise LabError("There is nothing to draw: no run has a prefill time.", "Measure some: lab measure")
    lines, steps = list(_lines(rows)), table.steps(request_table.of_engine(timed))
    axes = canvas.panels(ax or canvas.new_axes(), [line.name for line in lines])
    has_panels = axes[0] is not axes[-1]
    styles = canvas.styles(1 if has_panels else 1 + lines[-1].setup)
    per_token: dict[float, float] = {}
    for line, one in zip(lines, axes, strict=True):
        style, is_alone = styles[0 if has_panels else line.setup], has_panels or not line.name
        if not is_ttft:
            _inside(one, steps, line.rows, style["color"], "steps of each run" if is_alone else "_")
        medians = line.rows.groupby("n_prompt")[figure].median()
        label = f"median over {_kind(timed)}s" if is_alone else f"{line.name}: median"
        at = {"marker": "_", "ms": 16} if len(medians) == 1 else {}
        shape = {"ls": "-" if line.is_usual else ":", "lw": 2, "color": style["color"], **at}
        one.plot(medians.index, medians, **shape, label=label)
        of_points = line.rows.n_prompt, line.rows[figure], line.rows.disturbed
        points(one, *of_points, ms=6, alpha=0.6, **style, label=f"{_kind(timed)}s" if is_alone else None)
        if line.is_usual or not any(line.is_usual for line in lines):
            per_token.update((float(value / n), float(n)) for n, value in medians.items())
    for one in dict.fromkeys(axes):
        canvas.in_proportion(one, list(rows.n_prompt), per_token)
        canvas.over_lengths(one, rows.n_prompt)
        if rows.n_prompt.nunique() > 1:
            one.set_yscale("log")
        else:
            one.set_ylim(0, 1.2 * rows[figure].max())
    canvas.name_axes(axes, "prompt length (tokens)", "TTFT (s)" if is_ttft else "prefill time (s)")
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
    lines = _gap_lines(timed, rows)
    if not lines:
        raise LabError("There is nothing to draw: no run decoded a token.", "Measure with --gen 2 or more.")
    by_length = len({line.setup for line in lines}) <= MOST_SERIES < len({line.n_prompt for line in lines})
    axes = canvas.panels(ax or canvas.new_axes(), [line.length if by_length else line.setup for line in lines])
    has_panels = axes[0] is not axes[-1]
    names = [line.setup if by_length else line.length for line in sorted(lines, key=lambda line: line.n_prompt)]
    colours = list(dict.fromkeys(names)) if has_panels else list(range(len(lines)))
    styles = dict(zip(colours, canvas.styles(len(colours)), strict=True))
    for name in colours if has_panels else []:  # the legend, in their order
        axes[0].plot([], [], lw=2, color=styles[name]["color"], label=name)
    top = HEADROOM * max(line.ms[int(0.95 * (len(line.ms) - 1))] if line.ms else 1.0 for line in lines)
    for i, (line, one) in enumerate(zip(lines, axes, strict=True)):
        name, note = line.setup if by_length else line.length, _note(line, top, not has_panels)
        label = ", ".join(word for word in (line.length, line.setup) if word) + note
        _line_of_gaps(one, line, "_" if has_panels else label, top, styles[name if has_panels else i])
        if has_panels and note:
            one.set_title(f"{one.get_title()}\n{name}{note}", fontsize=8, pad=8)
    middles = [statistics.median(line.ms) for line in lines if line.ms]
    is_log = bool(middles) and max(middles) > WIDE * min(middles) and not any(line.is_mean for line in lines)
    what, title = _what(lines)
    first = " (the first ends TTFT)" if request_table.alone(timed) else " (prefill produces the first)"
    for one in dict.fromkeys(axes):
        one.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        one.set_yscale("log" if is_log else "linear")
        one.set_ylim(0.7 * min(middles) if is_log else 0, top)
    x_label = f"generated {what}{'' if has_panels else first}"
    canvas.name_axes(axes, x_label, f"time since the previous {what} (ms)")
    canvas.finish(axes, f"{title}\n{_subject(timed, rows)}")
    return axes[0]


def plot_sweep(records: Sequence[Record], figure: Figure | None = None, stacked: bool = False) -> Figure:
    """Both curves of sweeps, side by side or stacked: prefill time over length, decode time per token over position.

        lab.plot_sweep(lab.sweep(4096, every=256))

    Points are single runs, the band is their range, the dashed line the fitted law. More than six setups
    get a row each.
    """
    records = [record for record in _experiments_apart(records) if record.run.every]
    if not records:
        raise LabError("There is nothing to draw: no run is a sweep.", "Make one: lab sweep")
    figure = figure or canvas.new_figure((11, 5))
    setups = table.setups(table.runs(records))
    parts = canvas.in_parts(setups)
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(parts)))
    shape = (2, 1) if stacked and len(parts) == 1 else (len(parts), 2)
    shared: Any = "col" if len(parts) > 1 else False
    axes = figure.subplots(*shape, squeeze=False, sharex=shared, sharey=shared).reshape(-1, 2)
    for part, (left, right) in zip(parts, axes, strict=True):
        for (label, runs), style in zip(part, canvas.styles(len(part)), strict=True):
            _laws(left, right, runs, style, f"{label}: " if len(part) > 1 else "")
        name = f"\n{part[0][0]}" if len(parts) > 1 else ""
        left.set_title(f"Prefill{name}", fontsize=11)
        right.set_title(f"Decode{name}", fontsize=11)
        left.set_xlabel("prompt length P (tokens)")
        left.set_ylabel("prefill time (s)")
        right.set_xlabel("position p (tokens in the context)")
        right.set_ylabel("decode time per token (ms)")
        for ax in (left, right):
            ax.set_ylim(bottom=0)
            ax.set_xlim(left=0)
    subject = _subject(records, table.runs(records))
    canvas.finish(list(axes.flat), f"Prefill and decode in one pass through the context\n{subject}")
    return figure


def _laws(left: Axes, right: Axes, runs: pd.DataFrame, style: dict[str, Any], name: str) -> None:
    """The runs of one setup and the fitted laws. With a single setup the legend explains points and dashes."""
    summary = table.summary(runs)
    prefill, decode = sweep_laws.prefill_law(summary), sweep_laws.decode_law(summary)
    drawn = "_" if name else "runs and their range"
    _band(left, runs, runs.n_prompt, "prefill_s", style, drawn if prefill else name or drawn)
    if prefill:
        law = f"{seconds(prefill.a)} + {seconds(prefill.b)} P + {seconds(prefill.c)} P\u00b2"
        lengths = [summary.n_prompt.max() * i / 100 for i in range(101)]
        law = f"{name}fitted prefill law: " + unbroken(law)
        left.plot(lengths, [prefill.seconds(n) for n in lengths], ls="--", lw=1.8, color=style["color"], label=law)
    if runs.tpot_ms.notna().any():
        _band(right, runs, sweep_laws.positions_of(runs), "tpot_ms", style, drawn if decode else name or drawn)
    if decode:
        law = f"{name}fitted decode law: " + unbroken(f"{seconds(decode.w / 1e3)} + {seconds(decode.k / 1e3)} p")
        ends = [0, sweep_laws.positions_of(summary).max()]
        right.plot(ends, [decode.ms(p) for p in ends], ls="--", lw=1.8, color=style["color"], label=law)


def drawings(records: Records, stacked: bool = False, by_session: bool = False) -> dict[str, Callable[[Figure], Any]]:
    """The functions that draw the plots with data, by their names: ab, prefill, decode, sweep.

    Requests that ran alone share the plots of plain runs. Runs of `lab ab` have ratios in place of prefill times.
    """
    timed = _experiments_apart(request_table.of_engine(records))
    sweeps, plain = [r for r in timed if r.run.every], [r for r in timed if not r.run.every]
    good = [record for record in request_table.alone(records) if request_table.went_well(record)]
    draw_by_name: dict[str, Callable[[Figure], Any]] = {}
    has_ttft = any(times.ttft_ns(one.request) and request_table.run_row(one, 0)["n_prompt"] for one in good)
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


def _lines(rows: pd.DataFrame) -> Iterator[Line]:
    """The setups, with warm requests and short answers as separate lines."""
    setups = table.setups(rows) if len(rows) else []
    for number, (label, own) in enumerate(setups):
        kinds = {"warm": "warm", "short": "short answers"}
        marks = [
            ", ".join(words for kind, words in kinds.items() if row.get(kind) is True) for row in own.to_dict("records")
        ]
        for mark in sorted(set(marks)):
            name = ", ".join(word for word in (label if len(setups) > 1 else "", mark) if word)
            yield Line(name, own[[one == mark for one in marks]], number, not mark)


def _inside(ax: Axes, steps: pd.DataFrame, rows: pd.DataFrame, colour: Any, label: str) -> None:
    """Thin lines: the prefill steps of each run if each was timed. Imported runs have none."""
    if steps.empty:
        return
    is_timed = (steps.kind == PREFILL) & steps.compute_ms.notna()
    for _, run in steps[is_timed & steps.run.isin(rows.run)].groupby("run"):
        if len(run) > 1:
            ax.plot(run.n_past + run.n_tokens, run.ready_s, color=colour, lw=0.7, alpha=0.5, label=label)
            label = "_"


def _gap_lines(timed: Records, rows: pd.DataFrame) -> list[GapLine]:
    """A line for each length of each setup; it names its kind of gaps if both kinds exist."""
    gaps = {number: _gaps(timed[number], is_hollow) for number, is_hollow in zip(rows.run, rows.disturbed, strict=True)}
    has_both = len({one.of_tokens for one in gaps.values() if one.ms}) > 1
    made = []
    for line in _lines(rows):
        for n_prompt, part in line.rows.groupby("n_prompt"):
            own = [gaps[number] for number in part.run if gaps[number].ms]
            of = f"between {'tokens' if own[0].of_tokens else 'events'}" if own and has_both else ""
            setup = ", ".join(word for word in (line.name, of) if word)
            made += [GapLine(setup, int(n_prompt), own, line.is_usual)] if own else []
    return made


def _gaps(record: Record | RequestRecord, is_disturbed: bool) -> Gaps:
    """The gaps of a run of the engine, or of a request: between tokens if known, otherwise between events."""
    if isinstance(record, Record):
        return Gaps([ns / 1e6 for ns in phases.itl_ns(record.run)], True, False, bool(is_disturbed))
    by_token, by_event = times.itl_ns(record.request), times.chunk_gaps_ns(record.request)
    together = by_token is not None and len(by_token) > len(by_event)
    ns = by_event if by_token is None else by_token
    return Gaps([one / 1e6 for one in ns], by_token is not None, together, bool(is_disturbed))


def _what(lines: Sequence[GapLine]) -> tuple[str, str]:
    """The kind of gaps, and the title."""
    kinds = {one.of_tokens for line in lines for one in line.answers}
    if len(kinds) > 1:
        return "token or event", "Decode: time between tokens, or between events with tokens"
    if kinds == {True}:
        return "token", "Decode: time per generated token"
    return "event", "Decode: time between events with tokens (inter-chunk latency)"


def _note(line: GapLine, top: float, has_tpot: bool) -> str:
    """The note of a line: that it is a mean, TPOT if that differs, and points above the axis."""
    note = ", running mean" if line.is_mean else ""
    if has_tpot and not line.is_mean and all(one.of_tokens for one in line.answers):
        tpot_ms = statistics.median(statistics.fmean(one.ms) for one in line.answers)
        is_off = abs(tpot_ms / statistics.median(_running(line)) - 1) > OFF
        note += f" (TPOT {digits(tpot_ms)} ms: mean over tokens)" if is_off else ""
    n_above = sum(ms > top for ms in line.ms)
    return note + (f" ({n_above:,} point{'s' * (n_above > 1)} above the axis)" if n_above else "")


def _running(line: GapLine) -> list[float]:
    """At each position the median (or mean) of the neighbouring positions' medians."""
    centre = statistics.fmean if line.is_mean else statistics.median
    by_place = itertools.zip_longest(*(one.ms for one in line.answers))
    middle = [centre([ms for ms in of_place if ms is not None]) for of_place in by_place]
    half = RUNNING // 2
    return [centre(middle[max(0, i - half) : i + half + 1]) for i in range(len(middle))]


def _line_of_gaps(ax: Axes, line: GapLine, label: str, top: float, style: dict[str, Any]) -> None:
    """All gaps as points, those above the axis at its upper edge, and the line."""
    rows = [(place, ms, one.is_disturbed) for one in line.answers for place, ms in enumerate(one.ms, 2)]
    points(ax, *zip(*rows, strict=True), ms=3, alpha=0.3, **style)
    above = [place for place, ms, _ in rows if ms > top]
    if above:
        ax.plot(above, [top] * len(above), ls="", marker="^", ms=5, color=style["color"], clip_on=False)
    running = _running(line)
    shape = "-" if line.is_usual else ":"
    ax.plot(range(2, len(running) + 2), running, color=style["color"], lw=2, ls=shape, label=label)


def _band(ax: Axes, runs: pd.DataFrame, x: pd.Series, figure: str, style: dict[str, Any], label: str) -> None:
    """Every run as a point, and the range over runs at each x as a band."""
    ends = runs.groupby(x)[figure].agg(["min", "max"])
    ax.fill_between(ends.index, ends["min"], ends["max"], color=style["color"], alpha=0.2, lw=0)
    points(ax, x, runs[figure], runs.disturbed, ms=4, alpha=0.6, **style, label=label)


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
