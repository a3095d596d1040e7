"""What a page shows of requests to servers: who answered, tables, what the server can do, and pictures.

What a page shows of loads on servers: who answered, the table of arms, what it shows, and pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis import load_figures, load_sessions, loads, request_table, setup_columns, table, wording
from lab.analysis.load_sessions import LoadSession
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.show import plot_load, plot_requests, request_words, text_load, text_requests, text_results, text_setup
from lab.show.page_parts import Picture, picture

if TYPE_CHECKING:
    import pandas as pd

CAPTIONS = {
    "prefill": "TTFT: time until the first token arrives. Points are requests, the line their median; the dashed line "
    "is what the time would be in proportion.",
    "decode": "The gaps of each answer. Points are gaps between tokens or, where the server does not say how many "
    "tokens are in an event, between events; the line is their running median, or mean.",
}


def setups(records: Sequence[Record | RequestRecord]) -> list[dict[str, Any]]:
    """Each setup of the requests that ran alone: label, facts, and the same shape as that of runs."""
    own = _good(records)
    shown = []
    for label, rows in table.setups(table.runs(own)) if own else []:
        shown.append({"label": label, "facts": facts(own[rows.run.iloc[0]]), "parts": list[Any]()})
    return shown


def served(records: Sequence[Record | RequestRecord]) -> dict[str, Any]:
    """The sections of the requests that ran alone, and their failures."""
    return {
        "sections": sections(records),
        "failures": text_requests.failures(request_table.alone(records)),
        "meanings": text_requests.MEANINGS,
    }


def sections(records: Sequence[Record | RequestRecord]) -> list[dict[str, Any]]:
    """Each setup of the requests that ran alone: its tables with what they show, what the server can do, doubts."""
    own = _good(records)
    shown = []
    for label, rows in table.setups(table.runs(own)) if own else []:
        chosen = [own[number] for number in rows.run]
        capabilities = {
            "caption": f"{label}: what the server can do",
            "headings": ["what it can do", "answer", "as seen in"],
            "rows": [[one.name, one.answer, one.how] for one in chosen[0].endpoint.capabilities],
        }
        shown.append(
            {
                "label": label,
                "tables": [_table(label, part) for _, part in table.summary(rows).groupby("n_gen")],
                "capabilities": [capabilities] if capabilities["rows"] else [],
                "warnings": request_words.doubts(chosen),
            }
        )
    return shown


def facts(record: RequestRecord) -> dict[str, str]:
    """The server, the model, and the machine of the client, in words. What is not known is left out."""
    endpoint = record.endpoint
    named = " ".join(word for word in (endpoint.server or "a server without a name", endpoint.version) if word)
    settings = endpoint.settings
    parts = (
        {
            f"{settings.n_slots} slots": settings.n_slots,
            f"a context of {settings.n_ctx:,} tokens" if settings.n_ctx else "": settings.n_ctx,
            f"file {settings.model_file}": settings.model_file,
            f"quantization {settings.quantization}": settings.quantization,
        }
        if settings
        else {}
    )
    known = ", ".join(words for words, value in parts.items() if value is not None)
    texts = {"server": f"{named} at {endpoint.url}, through {endpoint.api}", "model": record.model}
    return texts | ({"settings": known} if known else {}) | {"client": text_setup.facts(record.machine)["machine"]}


def times(records: Sequence[Record | RequestRecord], with_labels: bool) -> list[str]:
    """A sentence on the longest prompt of each setup."""
    own = [record for record in _good(records) if request_table.is_measured(record)] or _good(records)
    of_setup = table.setups(table.runs(own)) if own else []
    return [_time(label if with_labels else "", table.summary(rows).iloc[-1].to_dict()) for label, rows in of_setup]


def question(records: Sequence[Record | RequestRecord]) -> str:
    """What a page on nothing but requests answers."""
    labels = [label for label, _ in table.setups(table.runs(_good(records)))]
    if len(labels) == 1:
        first = _good(records)[0]
        name = setup_columns.short_name(first.model)
        return f"How fast does {name} answer through {first.endpoint.server or 'its server'}?"
    return text_results.question(labels)


def curves(records: Sequence[Record | RequestRecord]) -> dict[str, Picture]:
    """The pictures by name, with those of runs in them; empty without requests."""
    shows = (
        " ".join(
            f"{label}: {' '.join(text_requests.findings(part))}"
            for label, rows in table.setups(text_requests.summary(request_table.alone(records)))
            for _, part in rows.groupby("n_gen")
        )
        if _good(records)
        else ""
    )
    drawn = plot_requests.drawings(records, by_session=True)
    return {name: picture(draw, name, CAPTIONS[name], shows, (5, 3.9)) for name, draw in drawn.items()}


def _good(records: Sequence[Record | RequestRecord]) -> list[RequestRecord]:
    return [record for record in request_table.alone(records) if request_table.went_well(record)]


def _table(label: str, rows: pd.DataFrame) -> dict[str, Any]:
    headings, lines = text_requests.request_cells(rows)
    of_server = text_requests.own_times(rows)
    return {
        "caption": f"{label}: {text_requests.heading(rows)}",
        "counted": "requests",
        "headings": headings,
        "rows": [
            {"n_prompt": text_requests.length(row.n_prompt), "runs": str(row.repeats), "cells": cells, "notes": []}
            for row, cells in zip(rows.itertuples(), lines, strict=True)
        ],
        "findings": text_requests.findings(rows),
        "own_times": [
            {
                "caption": f"{label}: {text_requests.OWN_CAPTION[:1].lower()}{text_requests.OWN_CAPTION[1:]}",
                "headings": ["prompt tokens", *text_requests.OWN_HEADINGS],
                "rows": of_server,
            }
        ]
        if of_server
        else [],
    }


def _time(label: str, row: Mapping[str, Any]) -> str:
    n = text_requests.length(row["n_prompt"])
    words = f"of a prompt of {n} tokens the first token arrives after {wording.seconds(row['ttft_s'])}"
    if row["tpot_ms"] > 0 and not row["n_bounds"]:
        words += f"; after it each token takes {wording.seconds(row['tpot_ms'] / 1e3)}"
        words += f" ({wording.digits(1e3 / row['tpot_ms'])} a second)"
    elif row["tpot_low_ms"] > 0:
        ends = (wording.seconds(row[name] / 1e3) for name in ("tpot_low_ms", "tpot_high_ms"))
        words += f"; after it each token takes {' to '.join(ends)}"
    return f"{label}: {words}." if label else f"{words[:1].upper()}{words[1:]}."


LOAD_CAPTIONS = {
    "load": "Latency over load. Points are requests, lines their median and the percentiles that some request is "
    "beyond; limits are dashed.",
    "throughput": "Throughput against latency: tokens per second of all users, over the median wait of one. Points are "
    "arms, with their range over rounds.",
    "timeline": "The timeline of the requests of the first round: waiting for the first token, then being answered. "
    "The steady window is shaded.",
}


def load_sections(records: Sequence[Record | RequestRecord]) -> list[dict[str, Any]]:
    """Each session of loads: title, table, sentences, pictures."""
    sessions = load_sessions.sessions(records)
    return [_section(one, f"session{number}-" if len(sessions) > 1 else "") for number, one in enumerate(sessions, 1)]


def load_setups(records: Sequence[Record | RequestRecord], known: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who answered loads: label and facts, in the shape of those of runs; without those that are `known`."""
    firsts = {record.session: record for record in reversed(request_table.loads_of(records))}
    shown: list[dict[str, Any]] = []
    for session in load_sessions.sessions(records):
        own = facts(firsts[session.name])
        if own not in [one["facts"] for one in [*known, *shown]]:
            label = plot_load.title(session.endpoint, session.model, session.machine)
            shown.append({"label": label, "facts": own, "parts": list[Any]()})
    return shown


def load_question(records: Sequence[Record | RequestRecord]) -> str:
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
                draw,
                f"{prefix}{name}",
                LOAD_CAPTIONS[name.partition("-")[0]],
                " ".join(sentences),
                plot_load.size(name),
            )
            for name, draw in drawn.items()
        ],
    }
