"""A model in process and through a server, as text: the parts of the difference, and settings of both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from lab.analysis.wording import digits
from lab.core.record import OK, Record
from lab.core.request import CHAT, NO, Endpoint, RequestRecord
from lab.core.request_figures import figures
from lab.experiments import door_parts, door_settings
from lab.experiments.door_parts import UNEXPLAINED, Phase, Row
from lab.show.console import grid_of

WHOLE, IN_PROCESS = "through the server", "in process"
LLAMA_SERVER = "llama-server"


def has_both(records: Sequence[Record], requests: Sequence[RequestRecord]) -> bool:
    """Whether the same tokens were measured in process and through a server."""
    return bool(door_parts.pairs(records, requests))


def print_parts(records: Sequence[Record], requests: Sequence[RequestRecord], out: Console) -> None:
    """Prints for each server its settings and those in process, the parts, and what they show; else nothing."""
    for ours, theirs in sessions(records, requests):
        rows = door_parts.rows(ours, theirs)
        record, request = _first(ours, theirs)
        out.print()
        server = request.endpoint.server or "a server"
        out.print(Text(f"{record.model.name}, in process and through {server}", style="bold"))
        _print_settings(record, request, out)
        for row in rows:
            for phase in row.phases:
                _print_phase(row, phase, out)
        for sentence in door_settings.sentences(rows):
            out.print(sentence)


def as_rows(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [
        {
            "session": ours[0].session,
            "settings": [dataclasses.asdict(one) for one in door_settings.settings(*_first(ours, theirs))],
            "rows": [_as_row(row) for row in door_parts.rows(ours, theirs)],
        }
        for ours, theirs in sessions(records, requests)
    ]


def sessions(
    records: Sequence[Record], requests: Sequence[RequestRecord]
) -> list[tuple[list[Record], list[RequestRecord]]]:
    """Runs and requests of each session that has both."""
    names = dict.fromkeys(record.session for record in records)
    parted = [
        ([one for one in records if one.session == name], [one for one in requests if one.session == name])
        for name in names
    ]
    return [(ours, theirs) for ours, theirs in parted if has_both(ours, theirs)]


def finished(record: RequestRecord) -> str:
    """A line on a request of a block."""
    one = figures(record.request)
    if one.status != OK or one.ttft_ns is None:
        what = one.failure or "no token came"
    else:
        tpot = f", TPOT {digits(one.tpot_ns / 1e6)} ms" if one.tpot_ns is not None else ""
        what = f"TTFT {digits(one.ttft_ns / 1e6)} ms{tpot}"
    return f"{one.asked.n_prompt or 0:,} tokens through the server, repeat {one.asked.repeat + 1}: {what}"


def failures(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[str]:
    """What failed, and requests that do not count, in words."""
    words = [
        f"In process, repeat {record.run.repeat + 1}: {record.run.error}" for record in records if record.run.error
    ]
    for request in requests:
        one = figures(request.request)
        name = f"Through the server, repeat {one.asked.repeat + 1}"
        if one.status != OK:
            words.append(f"{name}: {one.failure}: {one.error}")
        elif not one.asked.warmup and one.is_warm:
            words.append(f"{name}: {one.n_cached:,} tokens of the prompt came from a cache; it is left out.")
        elif not one.asked.warmup and one.is_short:
            words.append(f"{name}: the answer ended after {one.n_generated:,} tokens; it is left out.")
    return words


def cannot(endpoint: Endpoint) -> list[str]:
    """What cannot be told apart on this server, said before it is measured."""
    if endpoint.server == LLAMA_SERVER:
        return []
    words = ["It gives no times of its own: scheduling, its engine and its stream cannot be told apart."]
    words.append("Its tokens are not known: the engine gets other tokens of the same text, as many as it counted.")
    if endpoint.api == CHAT:
        words.append("Its template and its tokeniser cannot be timed by themselves.")
    return words


def _first(records: Sequence[Record], requests: Sequence[RequestRecord]) -> tuple[Record, RequestRecord]:
    return records[0], next(request for request in requests if request.request.pieces is not None)


def _as_row(row: Row) -> dict[str, Any]:
    phases = [
        {**dataclasses.asdict(phase), "unexplained_ms": phase.unexplained_ms, "unexplained": phase.unexplained}
        for phase in row.phases
    ]
    return {**dataclasses.asdict(row), "phases": phases}


def _print_settings(record: Record, request: RequestRecord, out: Console) -> None:
    grid = grid_of("name", "in process", "server", "note")
    for one in door_settings.settings(record, request):
        note = "differs" if one.same == NO else ""
        grid.add_row(one.name, one.in_process or "not known", one.server or "it does not say", note)
    out.print(grid)


def _print_phase(row: Row, phase: Phase, out: Console) -> None:
    what = f"{phase.name}, prompts of {row.n_prompt:,} tokens, {row.n_gen:,} generated; "
    blocks = f"{row.n_blocks} block{'s' * (row.n_blocks > 1)}"
    if row.n_middle < row.n_blocks:
        blocks = f"the middle {row.n_middle} of {blocks}"
    out.print()
    out.print(Text(f"{what}means of {blocks}", style="bold"))
    grid = grid_of("part", "ms", "% of the\nwhole", "least and\nmost ms")
    for part in phase.parts:
        reach = f"{digits(part.low_ms)} {digits(part.high_ms)}"
        grid.add_row(part.name, digits(part.ms), f"{100 * part.ms / phase.server_ms:.1f}", reach)
    grid.add_row(UNEXPLAINED, digits(phase.unexplained_ms), f"{100 * phase.unexplained:.1f}", "")
    grid.add_row(Text(WHOLE, style="bold"), digits(phase.server_ms), "100", "")
    grid.add_row(Text(IN_PROCESS, style="bold"), digits(phase.in_process_ms), "", "")
    out.print(grid)
