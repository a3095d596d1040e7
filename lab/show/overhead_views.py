"""A model in process and through a server: the parts of the difference and the settings of both sides, as text, and a
picture with TTFT and TPOT of both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.analysis.wording import digits
from lab.core import shown
from lab.core.lists import grouped, plural
from lab.core.record import OK, Record
from lab.core.request import CHAT, NO, Endpoint, RequestRecord
from lab.core.request_times import figures
from lab.drawing import canvas
from lab.drawing.canvas import COLOURS, GUIDE, INK
from lab.experiments import overhead_parts
from lab.experiments.overhead_parts import ENGINE, ORDER, UNEXPLAINED, LengthParts, Phase
from lab.runner import machine
from lab.show.section import WIDE, Columns, Picture, Section, numbered, tabled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHOLE, IN_PROCESS = "through the server", "in process"
LLAMA_SERVER = "llama-server"
CAPTION = (
    "TTFT and TPOT in process (above) and through the server (below), in parts. The unexplained rest is hatched; "
    "parts below zero are noise."
)


def sections(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[Section]:
    """A section for each session that has both: the settings of both sides, the parts, and sentences on them."""
    return [_section(ours, theirs) for ours, theirs in sessions(records, requests)]


def _section(ours: Sequence[Record], theirs: Sequence[RequestRecord]) -> Section:
    rows = overhead_parts.rows(ours, theirs)
    record, request = _first(ours, theirs)
    columns: Columns = (
        ("name", lambda one: one.name),
        ("in process", lambda one: one.in_process or "unknown"),
        ("server", lambda one: one.server or "not reported"),
        ("note", lambda one: "differs" if one.same == NO else ""),
    )
    phases = [_of_phase(row, phase) for row in rows for phase in row.phases]
    phases[-1:] = [dataclasses.replace(one, sentences=overhead_parts.sentences(rows)) for one in phases[-1:]]
    model, both = record.model, f"in process and through {request.endpoint.server or 'a server'}"
    title = f"{model.name} {model.quantization or ''}, {both}, {machine.label(record.machine)}"
    return Section(
        f"{model.name}, {both}",
        **tabled(columns, overhead_parts.settings(record, request), keep_all=True),
        parts=phases,
        pictures=[Picture("ways", CAPTION, partial(plot_parts, rows, title), WIDE)],
    )


def _of_phase(row: LengthParts, phase: Phase) -> Section:
    """The parts of a phase, the unexplained rest, and both wholes."""
    blocks = plural(row.n_blocks, "block")
    if row.n_middle < row.n_blocks:
        blocks = f"the middle {row.n_middle} of {blocks}"
    disturbed = f" ({', '.join(row.doubts)} {shown.mark(row.doubts)})" if row.doubts else ""
    what = f"{phase.name}, prompts of {row.n_prompt:,} tokens, {row.n_gen:,} generated"
    parts = [
        (
            part.name,
            digits(part.ms),
            f"{100 * part.ms / phase.server_ms:.1f}",
            f"{digits(part.low_ms)} to {digits(part.high_ms)}{' (noise)' if part.is_noise else ''}",
        )
        for part in phase.parts
    ]
    return Section(
        f"{what}; means of {blocks}{disturbed}",
        headings=("part", "ms", "% of the\nwhole", "range\nms"),
        cells=[
            *parts,
            (UNEXPLAINED, digits(phase.unexplained_ms), f"{100 * phase.unexplained:.1f}", ""),
            (WHOLE, digits(phase.server_ms), "100", ""),
            (IN_PROCESS, digits(phase.in_process_ms), "", ""),
        ],
    )


def as_rows(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [
        {
            "session": ours[0].session,
            "settings": [dataclasses.asdict(one) for one in overhead_parts.settings(*_first(ours, theirs))],
            "rows": [
                {**dataclasses.asdict(row), "phases": list(map(_phase_as_row, row.phases))}
                for row in overhead_parts.rows(ours, theirs)
            ],
        }
        for ours, theirs in sessions(records, requests)
    ]


def sessions(
    records: Sequence[Record], requests: Sequence[RequestRecord]
) -> list[tuple[list[Record], list[RequestRecord]]]:
    """Runs and requests of each session that measured the same tokens in process and through a server."""
    ours = grouped(records, lambda record: record.session)
    theirs = grouped(requests, lambda request: request.session)
    return [(own, theirs[name]) for name, own in ours.items() if overhead_parts.pairs(own, theirs.get(name, []))]


def finished(record: RequestRecord) -> str:
    """A line on a request of a block."""
    one = figures(record.request)
    if one.status != OK or one.ttft_ns is None:
        what = one.failure or "no token"
    else:
        tpot = f", TPOT {digits(one.tpot_ns / 1e6)} ms" if one.tpot_ns is not None else ""
        what = f"TTFT {digits(one.ttft_ns / 1e6)} ms{tpot}"
    return f"{one.asked.n_prompt or 0:,} tokens through the server, repeat {one.asked.repeat + 1}: {what}"


def failures(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[str]:
    """Failures, and requests that do not count."""
    words = [
        f"In process, repeat {record.run.repeat + 1}: {record.run.error}" for record in records if record.run.error
    ]
    for request in requests:
        one = figures(request.request)
        name = f"Through the server, repeat {one.asked.repeat + 1}"
        if one.status != OK:
            words.append(f"{name}: {one.failure}: {one.error}")
        elif not one.asked.warmup and one.is_warm:
            words.append(f"{name}: {one.n_cached:,} tokens of the prompt came from a cache, so it does not count.")
        elif not one.asked.warmup and one.is_short:
            words.append(f"{name}: the answer ended after {one.n_generated:,} tokens, so it does not count.")
    return words


def cannot(endpoint: Endpoint) -> list[str]:
    """Parts that cannot be separated on this server, for a message before the measurement."""
    if endpoint.server == LLAMA_SERVER:
        return []
    words = ["The server reports no times: scheduling, its engine and its stream cannot be separated."]
    words.append("Its token ids are unknown: the engine gets the same number of other tokens of the same text.")
    if endpoint.api == CHAT:
        words.append("Its template and its tokeniser cannot be timed separately.")
    return words


def _first(records: Sequence[Record], requests: Sequence[RequestRecord]) -> tuple[Record, RequestRecord]:
    return records[0], next(request for request in requests if request.request.pieces is not None)


def _phase_as_row(phase: Phase) -> dict[str, Any]:
    return {**dataclasses.asdict(phase), "unexplained_ms": phase.unexplained_ms, "unexplained": phase.unexplained}


SHADES = dict(zip(ORDER, (*COLOURS[:6], "#F0E442", GUIDE), strict=True))
"""The colour of each part, the same in all pictures."""

SIZE = (9.0, 2.2)
"""Inches: the width, and the height for each length."""


def drawings(lines: Sequence[Record | RequestRecord]) -> dict[str, Callable[[Figure], Figure]]:
    """The picture of each session that has both sides, by its name."""
    records = [line for line in lines if isinstance(line, Record)]
    shown = sections(records, [line for line in lines if isinstance(line, RequestRecord)])
    return {one.name: one.draw for one in numbered([section.pictures for section in shown])}


def plot_parts(rows: Sequence[LengthParts], title: str, figure: Figure) -> Figure:
    """A row of two axes for each length: TTFT and TPOT, in process above, the parts through the server below.

    Parts are stacked; those below zero (noise) go back from the end in a thin bar. The unexplained rest is hatched.
    """
    figure.set_size_inches(SIZE[0], 1.4 + SIZE[1] * len(rows))
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for row, pair in zip(rows, axes, strict=True):
        for phase, ax in zip(row.phases, pair, strict=False):
            _bars(ax, row, phase)
        for spare in pair[len(row.phases) :]:
            spare.remove()
    canvas.finish(figure.axes, title, is_apart=True)
    return figure


def _bars(ax: Axes, row: LengthParts, phase: Phase) -> None:
    ax.barh([1], [phase.in_process_ms], color=SHADES[ENGINE], height=0.6, label=ENGINE)
    left = farthest = 0.0
    for part in sorted(phase.parts, key=lambda part: part.ms < 0):
        y, height, name = (0, 0.6, part.name) if part.ms >= 0 else (-0.42, 0.15, f"{part.name} (noise below zero)")
        ax.barh([y], [part.ms], left=[left], color=SHADES[part.name], height=height, label=name)
        left += part.ms
        farthest = max(farthest, left)
    low, high = sorted((left, phase.server_ms))
    ax.barh([0], [high - low], left=[low], color="none", ec=INK, hatch="////", height=0.6, lw=0.6, label=UNEXPLAINED)
    ends = (1, phase.in_process_ms, phase.in_process_ms), (0, phase.server_ms, max(high, farthest))
    for y, ms, end in ends:
        ax.annotate(f" {digits(ms)}", (end, y), va="center", fontsize=9, color=INK)
    ax.set_xlim(0, 1.15 * max(phase.in_process_ms, high, farthest))
    ax.set_yticks([1, 0], ["in process", "through\nthe server"], fontsize=9)
    ax.set_xlabel(f"{phase.name} (ms)")
    doubts = f" ({', '.join(row.doubts)})" if row.doubts else ""
    ax.set_title(f"{row.n_prompt:,} prompt tokens, {row.n_gen:,} generated{doubts}", fontsize=10)
