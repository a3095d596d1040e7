"""The pictures of the main job where a server is measured: TTFT over prompt length, and the gaps of the answer.

A server shows no prefill, so both sides of a picture with runs of the engine are TTFT. What is not cold, or is shorter
than asked for, is drawn too, and named. Requests of loads have pictures of their own.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis import comparison, request_table, setup_columns, table
from lab.core import phases
from lab.core import request_times as times
from lab.core.record import OK, Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.show.canvas import COLOURS, LINES, MARKERS, new_axes, over_prompt_lengths, plain_ticks, tidy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Record | RequestRecord]

RUNNING = 15
"""Places that the line in the picture of the answer takes the median, or the mean, of."""

WIDE = 12
"""Where the gaps of some answers are more than so many times those of others, the axis is logarithmic."""

FEW_LINES = 8
"""Lines of a picture whose legend still fits into it."""

TITLE_WIDTH = 11
"""Letters of a title per inch of the picture."""


@dataclass(frozen=True)
class Line:
    """Requests (or runs) that make one line of a picture: its name, rows of `lab.runs`, and the number of its setup."""

    name: str
    rows: pd.DataFrame
    setup: int
    is_usual: bool  # cold, and whole answers


@dataclass(frozen=True)
class Gaps:
    """The gaps of one answer, in ms: before which of its tokens, or events, each was."""

    places: list[int]
    ms: list[float]
    of_tokens: bool
    came_together: bool  # some tokens with others in one event


def plot_ttft(records: Records, ax: Axes | None = None, by_session: bool = False) -> Axes:
    """TTFT against prompt length, both logarithmic: points are requests (and runs), lines their medians.

    The dashed grey line is proportional to the length, at the lowest TTFT per token that was measured cold. With
    `by_session` sessions of one setup are drawn apart. LabError where there is nothing to draw.
    """
    rows = _rows(records, by_session)
    rows = rows[(rows.ttft_s > 0) & (rows.n_prompt > 0)]
    if rows.empty:
        raise LabError("There is nothing to draw: no request went well.", "Look at the errors: lab show RESULTS")
    ax = ax or new_axes()
    lines, per_token = list(_lines(rows)), dict[float, float]()
    for line in lines:
        colour, marker = COLOURS[line.setup % len(COLOURS)], MARKERS[line.setup % len(MARKERS)]
        medians = line.rows.groupby("n_prompt").ttft_s.median()
        name = f"{line.name}: median" if line.name else "median over requests"
        ax.plot(medians.index, medians, lw=2, ls="-" if line.is_usual else ":", color=colour, label=name)
        points = None if line.name else "requests"
        x, y = line.rows.n_prompt, line.rows.ttft_s
        ax.plot(x, y, ls="", ms=6, alpha=0.6, mew=0, color=colour, marker=marker, label=points)
        if line.is_usual or not any(one.is_usual for one in lines):
            per_token.update((float(seconds / n), float(n)) for n, seconds in medians.items())
    over_prompt_lengths(ax, [rows.n_prompt.min(), rows.n_prompt.max()], per_token)
    ax.set_ylabel("TTFT (s)")
    return _finish(ax, "TTFT: time until the first token arrives", rows)


def plot_gaps(records: Records, ax: Axes | None = None, by_session: bool = False) -> Axes:
    """The gaps of answers against the place in the answer, one line a prompt length.

    Gaps are those between tokens (ITL) where the server says how many tokens are in an event: tokens that came together
    have a gap of 0. Else they are between events (inter-chunk latency). Points are gaps of all repeats; a line is the
    running median over places, or the running mean where tokens came together. Points above the axis are counted.
    """
    from matplotlib.ticker import MaxNLocator

    rows = _rows(records, by_session)
    gaps = {number: gaps_of(records[number]) for number in rows.run}
    drawn = [(line, n_prompt, part) for line in _lines(rows) for n_prompt, part in line.rows.groupby("n_prompt")]
    drawn = [(line, n_prompt, part) for line, n_prompt, part in drawn if any(gaps[number].ms for number in part.run)]
    if not drawn:
        raise LabError("There is nothing to draw: no answer had a second token.", "Measure with --gen 2 or more.")
    ax = ax or new_axes()
    used = [gaps[number] for _, _, part in drawn for number in part.run if gaps[number].ms]
    top = (1.35 + 0.08 * max(0, len(drawn) - 3) if len(drawn) <= FEW_LINES else 1.1) * _highest(used)
    lengths = {n: number for number, n in enumerate(sorted(rows.n_prompt.unique()))}
    has_both = len({one.of_tokens for one in used}) > 1
    for line, n_prompt, part in drawn:
        own = [gaps[number] for number in part.run if gaps[number].ms]
        number = line.setup * len(lengths) + lengths[n_prompt]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        label = f"after {n_prompt:,.0f} prompt tokens" + (f", {line.name}" if line.name else "")
        label += f", between {'tokens' if own[0].of_tokens else 'events'}" if has_both else ""
        _line_of_gaps(ax, own, label, top, colour, marker, LINES[line.setup % len(LINES)] if line.is_usual else ":")
    middles = [statistics.median(_positive(one)) for one in used if _positive(one)]
    if middles and max(middles) > WIDE * min(middles) and not any(one.came_together for one in used):
        ax.set_yscale("log")
        ax.set_ylim(0.7 * min(middles), top)
        plain_ticks(ax.yaxis)
    else:
        ax.set_ylim(0, top)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    what, title = "token", "Decode: time per generated token"
    if not used[0].of_tokens:
        what, title = "event", "Decode: inter-chunk latency, the time between events with tokens"
    if has_both:
        what, title = "token or event", "Decode: time between tokens, or between events with tokens"
    ax.set_xlabel(f"{what} of the answer (the first comes after TTFT)")
    ax.set_ylabel(f"time since the {what} before (ms)")
    return _finish(ax, title, rows)


def drawings(records: Records, by_session: bool = False) -> dict[str, Callable[[Figure], Any]]:
    """What draws the pictures that there is data for, by their names: prefill (TTFT in it), decode.

    Empty without requests that ran alone and went well. With runs of the engine these are in the same pictures.
    """
    good = [record for record in request_table.alone(records) if request_table.went_well(record)]
    kept = [record for record in records if not isinstance(record, Record) or not record.run.every]
    draw_by_name: dict[str, Callable[[Figure], Any]] = {}
    if any(
        times.ttft_ns(record.request) and (request_table.run_row(record, 0)["n_prompt"] or 0) > 0 for record in good
    ):
        draw_by_name["prefill"] = lambda figure: plot_ttft(kept, figure.subplots(), by_session)
    if any(times.chunk_gaps_ns(record.request) for record in good):
        draw_by_name["decode"] = lambda figure: plot_gaps(kept, figure.subplots(), by_session)
    return draw_by_name


def gaps_of(record: Record | RequestRecord) -> Gaps:
    """The gaps of a run of the engine, or of a request: between tokens where these are known, else between events."""
    if isinstance(record, Record):
        ns: Sequence[int] = phases.itl_ns(record.run)
        return Gaps(list(range(2, len(ns) + 2)), [one / 1e6 for one in ns], True, False)
    by_token = times.itl_ns(record.request)
    ns = times.chunk_gaps_ns(record.request) if by_token is None else by_token
    together = by_token is not None and len(by_token) > len(times.chunk_gaps_ns(record.request))
    return Gaps(list(range(2, len(ns) + 2)), [one / 1e6 for one in ns], by_token is not None, together)


def _rows(records: Records, by_session: bool) -> pd.DataFrame:
    """Rows of what went well and is neither an experiment nor part of a load."""
    rows = table.runs(records)
    if rows.empty:
        return rows.assign(ttft_s=[], n_prompt=[], run=[])
    rows = rows[(rows.status == OK) & ~rows.warmup & rows.lever.isna()]
    return comparison.sessions_apart(rows) if by_session else rows


def _lines(rows: pd.DataFrame) -> Iterator[Line]:
    """The setups, each with its warm requests and its short answers apart."""
    setups = table.setups(rows) if len(rows) else []
    for number, (label, own) in enumerate(setups):
        marks = [", ".join(word for word, is_so in _marks(row) if is_so) for row in own.to_dict("records")]
        for mark in dict.fromkeys(sorted(marks)):
            name = ", ".join(word for word in (label if len(setups) > 1 else "", mark) if word)
            yield Line(name, own[[one == mark for one in marks]], number, not mark)


def _marks(row: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    return ("warm", row.get("warm") is True), ("short answers", row.get("short") is True)


def _highest(used: Sequence[Gaps]) -> float:
    """What 95 % of the gaps of each answer are below; tokens that came with others do not count."""
    own = (sorted(_positive(one)) for one in used)
    return max((ms[int(0.95 * (len(ms) - 1))] for ms in own if ms), default=1.0)


def _positive(one: Gaps) -> list[float]:
    return [ms for ms in one.ms if ms > 0]


def _line_of_gaps(ax: Axes, own: Sequence[Gaps], label: str, top: float, colour: str, marker: str, style: str) -> None:
    """All gaps as points, those above the axis at its upper edge, and the line."""
    places = [place for one in own for place in one.places]
    ms = [value for one in own for value in one.ms]
    ax.plot(places, ms, ls="", marker=marker, ms=3, alpha=0.3, mew=0, color=colour)
    is_mean = any(one.came_together for one in own)
    label += ", running mean" if is_mean else ""
    above = [place for place, value in zip(places, ms, strict=True) if value > top]
    if above:
        ax.plot(above, [top] * len(above), ls="", marker="^", ms=5, color=colour, clip_on=False)
        label += f" ({len(above)} point{'s' * (len(above) > 1)} above the axis)"
    centre = statistics.fmean if is_mean else statistics.median
    by_place: dict[int, list[float]] = {}
    for place, value in zip(places, ms, strict=True):
        by_place.setdefault(place, []).append(value)
    middle = [centre(by_place[place]) for place in sorted(by_place)]
    firsts = [min(max(0, i - RUNNING // 2), max(0, len(middle) - RUNNING)) for i in range(len(middle))]
    running = [centre(middle[first : first + RUNNING]) for first in firsts]
    ax.plot(sorted(by_place), running, color=colour, lw=2, ls=style, label=label)


def _finish(ax: Axes, what: str, rows: pd.DataFrame) -> Axes:
    repeats = rows.groupby([*setup_columns.fields(rows), "n_prompt", "n_gen"], dropna=False).size()
    fewest, most = int(repeats.min()), int(repeats.max())
    n_repeat = f"{most} repeat{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} repeats"
    of_engine, of_server = rows[rows.server.isna()], rows[rows.server.notna()]
    where = [f"through {_one_of(of_server.server, 'servers')}"] if len(of_server) else []
    where = (["in process"] if len(of_engine) else []) + where
    client = f"client {_one_of(of_server.machine, 'machines')}; " if len(of_server) else ""
    lines = [
        what,
        f"{_one_of(rows.model.map(setup_columns.short_name), 'models')} {' and '.join(where)}",
        f"{client}{n_repeat}",
    ]
    figure = ax.get_figure(root=True)
    width = int(TITLE_WIDTH * figure.get_figwidth()) if figure else 80
    ax.set_title("\n".join("\n".join(textwrap.wrap(line, width)) for line in lines), fontsize=11, pad=9)
    return tidy(ax)


def _one_of(names: pd.Series, kind: str) -> str:
    distinct = sorted(set(names))
    return str(distinct[0]) if len(distinct) == 1 else f"{len(distinct)} {kind}"
