"""What a page shows of loads on servers: who answered, the table of arms, what it shows, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.analysis import load_figures, load_sessions, loads, request_table
from lab.analysis.load_sessions import LoadSession
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.show import page_requests, plot_load, text_load
from lab.show.page_parts import picture

CAPTIONS = {
    "load": "Latency over load. Points are requests, lines their median and the percentiles that some request is "
    "beyond; limits are dashed.",
    "throughput": "Throughput against latency: tokens per second of all users, over the median wait of one. Points are "
    "arms, with their range over rounds.",
    "timeline": "The timeline of the requests of the first round: waiting for the first token, then being answered. "
    "The steady window is shaded.",
}


def sections(records: Sequence[Record | RequestRecord]) -> list[dict[str, Any]]:
    """Each session of loads: title, table, sentences, pictures."""
    sessions = load_sessions.sessions(records)
    return [_section(one, f"session{number}-" if len(sessions) > 1 else "") for number, one in enumerate(sessions, 1)]


def setups(records: Sequence[Record | RequestRecord], known: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who answered loads: label and facts, in the shape of those of runs; without those that are `known`."""
    firsts = {record.session: record for record in reversed(request_table.loads_of(records))}
    shown: list[dict[str, Any]] = []
    for session in load_sessions.sessions(records):
        facts = page_requests.facts(firsts[session.name])
        if facts not in [one["facts"] for one in [*known, *shown]]:
            label = plot_load.title(session.endpoint, session.model, session.machine)
            shown.append({"label": label, "facts": facts, "parts": list[Any]()})
    return shown


def question(records: Sequence[Record | RequestRecord]) -> str:
    """What a page on nothing but loads answers."""
    sessions = load_sessions.sessions(records)
    if len({(one.endpoint.url, one.model) for one in sessions}) > 1:
        return "How much load do these servers stand?"
    return f"How much load does {sessions[0].model} stand through {sessions[0].endpoint.server or 'its server'}?"


def answers(records: Sequence[Record | RequestRecord]) -> list[str]:
    """Capacity of each session, where there are limits."""
    shown = [
        [load_figures.figures_of(arm) for arm in loads.arms(session.samples)]
        for session in load_sessions.sessions(records)
    ]
    return [sentence for of_session in shown for sentence in text_load.capacities(of_session)]


def _section(session: LoadSession, prefix: str) -> dict[str, Any]:
    shown = [load_figures.figures_of(arm) for arm in loads.arms(session.samples)]
    if not shown:
        return {"title": session.name, "headings": [], "cells": [], "sentences": [], "pictures": []}
    headings, cells = text_load.cells(shown)
    sentences = text_load.sentences(shown, session.endpoint)
    n_slots = session.endpoint.settings.n_slots if session.endpoint.settings else None
    title = plot_load.title(session.endpoint, session.model, session.machine)
    drawn = plot_load.drawings(session.samples, title, n_slots)
    return {
        "title": f"{title}: {text_load.heading(shown)}",
        "headings": headings,
        "cells": cells,
        "sentences": [*sentences, text_load.DEFINITIONS],
        "pictures": [
            picture(
                draw, f"{prefix}{name}", CAPTIONS[name.partition("-")[0]], " ".join(sentences), plot_load.size(name)
            )
            for name, draw in drawn.items()
        ],
    }
