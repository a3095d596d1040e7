"""Requests to servers as sections: tables of medians, findings, pictures, warnings, failures, and their command."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core import levers
from lab.core.lists import grouped, plural
from lab.core.record import OK
from lab.core.request import RequestRecord, short_name
from lab.core.request_times import Figures, figures
from lab.features.measure import plot_runs, text_results
from lab.features.serve import request_words, text_endpoint
from lab.runner import as_options
from lab.show import request_table, table, wording
from lab.show.kind import Context, Kind
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled

if TYPE_CHECKING:
    import pandas as pd

SHOWN = ("ttft_s", "first_output_s", "tpot_ms", "decode_tps", "stall_ms", "e2e_s")

OF_SERVER: Columns = (
    ("prompt\ntokens", lambda row: length(row["n_prompt"])),
    ("prompt\ns", lambda row: wording.digits(row["server_prompt_s"])),
    ("decode\ns", lambda row: wording.digits(row["server_decode_s"])),
    ("TTFT minus\nprompt ms", lambda row: wording.digits(1e3 * (row["ttft_s"] - row["server_prompt_s"]))),
)
"""The server's own times, and TTFT without them."""

MEANINGS = (
    "TTFT: from sending the request to the first token, with tokenization, queueing and network (prefill alone is not "
    "visible). TPOT: time per token after the first. E2E: whole request."
)


def finished(record: RequestRecord) -> str:
    """A line on a request that has ended."""
    one = figures(record.request)
    if one.status != OK:
        what = one.failure or one.status
    elif one.came_at_once:
        seconds = wording.digits((one.e2e_ns or 0) / 1e9)
        what = f"E2E {seconds} s; the answer arrived in one piece, so TTFT is unknown"
    elif one.ttft_ns is None:
        what = "no token arrived"
    else:
        ends = dict.fromkeys(one.tpot_bounds_ns or ())  # one, if it is known exactly
        tpot = f", TPOT {' to '.join(wording.digits(ns / 1e6) for ns in ends)} ms" if ends else ""
        marks = [word for word, is_so in (("warm", one.is_warm), ("short", one.is_short)) if is_so]
        what = f"TTFT {wording.digits(one.ttft_ns / 1e9)} s{tpot}" + (f" ({', '.join(marks)})" if marks else "")
    return f"{_name(one)}, repeat {one.asked.repeat + 1}: {what}"


def sections(records: Sequence[RequestRecord]) -> list[Section]:
    """A section for each setup and number of generated tokens: medians, then the server's own times."""
    rows = table.summary(table.runs(request_table.alone(records)))
    return [
        _section(label, part)
        for label, of_setup in (table.setups(rows) if len(rows) else [])
        for _, part in of_setup.groupby("n_gen")
    ]


def _section(label: str, rows: pd.DataFrame) -> Section:
    known = rows.first_output_s.notna()  # of an answer that was all reasoning it is not
    has_reasoning = bool((rows.first_output_s[known] != rows.ttft_s[known]).any() or not known.all())
    timed = rows[rows.server_prompt_s.notna() | rows.server_decode_s.notna()].to_dict("records")
    of_server = [Section("Times reported by the server, medians", **tabled(OF_SERVER, timed))] if timed else []
    columns: Columns = [
        ("prompt\ntokens", lambda row: length(row["n_prompt"])),
        *([("n", lambda row: f"{row['repeats']}")] if rows.repeats.nunique() > 1 else []),
        ("answer\ntokens", _answer),
        *(
            (text_results.HEADINGS[name], partial(_figure, name=name))
            for name in SHOWN
            if name != "first_output_s" or has_reasoning
        ),
        ("note", lambda row: ", ".join(kind for kind in request_table.KINDS if row[kind] is True)),
    ]
    return Section(
        label,
        f"{plural(int(rows.n_gen.iloc[0]), 'token')} requested; {text_results.below(rows, 'request')}",
        **tabled(columns, rows.to_dict("records")),
        answer=_time("", rows),
        notes=[MEANINGS],
        sentences=_findings(rows),
        parts=of_server,
    )


def _findings(rows: pd.DataFrame) -> list[str]:
    """Sentences on a summary of one setup and one n_gen: TTFT over the prompt's length, and its share of E2E."""
    rows = rows[~((rows.warm == True) | (rows.short == True)) & (rows.ttft_s > 0) & (rows.n_prompt > 0)]  # noqa: E712
    if rows.empty:
        return []
    rows = rows.sort_values("n_prompt")
    short, long, sentences = rows.iloc[0], rows.iloc[-1], []
    if long.n_prompt > short.n_prompt:
        ratio = long.ttft_s / short.ttft_s
        times_word = "about the same as" if 0.95 < ratio < 1.05 else wording.times(ratio)
        sentences.append(
            f"TTFT of {long.n_prompt:,} prompt tokens was {times_word} that of {short.n_prompt:,} "
            f"({wording.times(long.n_prompt / short.n_prompt)} the tokens)."
        )
    if long.e2e_s > 0:
        ends = [row for row in (short, long)[: len(rows)] if row.e2e_s]
        shares = [f"{100 * row.ttft_s / row.e2e_s:.0f} % of E2E at {row.n_prompt:,}" for row in ends]
        sentences.append(f"TTFT was {' and '.join(dict.fromkeys(shares))} prompt tokens.")
    return sentences


def failures(records: Sequence[RequestRecord]) -> list[str]:
    """One line per class of failure, with its count and its first request. Warm-ups are counted separately."""
    own = [record.request for record in request_table.alone(records)]
    failed = [request for request in own if request.status != OK]
    by_class = grouped(failed, lambda request: (request.asked.warmup, request.failure or request.status))
    lines = []
    for (is_warmup, name), (first, *others) in by_class.items():
        n = sum(request.asked.warmup == is_warmup for request in own)
        kind = f"{'warm-up ' * is_warmup}request{'s' * (n != 1)}"
        example = f"{_name(figures(first))}, repeat {first.asked.repeat + 1}: {first.error}"
        lines.append(f"{1 + len(others)} of {n} {kind} ({name}), for example {example}")
    return lines


def warnings(records: Sequence[RequestRecord]) -> list[str]:
    """Sentences on requests that ran alone: warm and short ones, and unknown figures.

    With several setups each begins with its label.
    """
    own = [record for record in request_table.alone(records) if request_table.went_well(record)]
    setups = table.setups(table.runs(own)) if own else []
    return [
        f"{label}: {sentence}" if len(setups) > 1 else sentence
        for label, rows in setups
        for sentence in request_words.doubts([own[index] for index in rows.run])
    ]


def length(n_prompt: float | None) -> str:
    """A prompt's length; "?" if nobody counted it."""
    return "?" if n_prompt is None or n_prompt != n_prompt else f"{n_prompt:,.0f}"


def _name(one: Figures) -> str:
    n = request_table.n_prompt(one)
    name = "a prompt of unknown length" if n is None else levers.name_of(n, None)
    return name + (f", {one.asked.load.label}" if one.asked.load else "")


def _figure(row: dict[str, Any], name: str) -> str:
    """The cell of a figure. TPOT and decode rate are "a to b" if a request of the row has only bounds."""
    if name in ("tpot_ms", "decode_tps") and row["n_bounds"]:
        ends = [row["tpot_low_ms"], row["tpot_high_ms"]]
        if name == "decode_tps":
            ends = [1e3 / ms if ms > 0 else float("nan") for ms in reversed(ends)]
        return " to ".join(map(wording.digits, ends))
    return text_results.figure(row, name)


def _answer(row: dict[str, Any]) -> str:
    """Tokens of the answers, with their range if they differ."""
    one = table.shown_in(row, "n_answer")
    ends = f"\n{one.low:,.0f}-{one.high:,.0f}" if one.low != one.high else ""
    return UNKNOWN if one.value != one.value else f"{one.value:,.0f}{ends}"


OF_REQUESTS = (
    f"{MEANINGS} Figures are medians over requests, with 95 % intervals or, for fewer than 6 requests, ranges."
)
CAPTIONS = {
    "prefill": "TTFT: time until the first token arrives. Points are requests, the line is their median. The dashed "
    "line shows growth in proportion to the length.",
    "decode": "The gaps of each answer. Points are gaps between tokens or, if the server does not count tokens per "
    "event, between events. The line is their running median, or mean.",
}


def chapters(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Requests that ran alone; runs of the engine are in the same pictures."""
    good = [record for record in records if request_table.went_well(record)]
    if not good:
        return []
    rows = table.setups(table.runs(good))
    of_setups = table.setups(table.runs([one for one in good if request_table.is_measured(one)] or good))
    question = text_results.question([label for label, _ in rows])
    if len(rows) == 1:
        server = good[0].endpoint.server or "its server"
        question = f"How fast does {short_name(good[0].model)} answer through {server}?"
    parts = sections(records)
    if context.is_page:
        seen = [(label, good[part.run.iloc[0]].endpoint) for label, part in rows]
        parts += [
            text_endpoint.capabilities(one, f"{label}: what the server can do")
            for label, one in seen
            if one.capabilities
        ]
    drawn = plot_runs.drawings(
        [*(context.runs if context.together else ()), *records], by_session=context.by_session or context.is_page
    )
    return [
        Section(
            "Through a server",
            name="requests",
            question=question,
            words=[OF_REQUESTS],
            sentences=[_time(label if len(of_setups) > 1 else "", table.summary(part)) for label, part in of_setups],
            warnings=warnings(records),
            parts=parts,
            pictures=[Picture(one, caption, drawn[one]) for one, caption in CAPTIONS.items() if one in drawn],
            data=partial(text_results.summary_rows, records),
        )
    ]


def _time(label: str, rows: pd.DataFrame) -> str:
    """A sentence on the longest prompt of a setup of requests."""
    row = rows.iloc[-1]
    words = f"the first token of {length(row.n_prompt)} prompt tokens arrives after {wording.seconds(row.ttft_s)}"
    if row.tpot_ms > 0 and not row.n_bounds:
        words += f", each further token takes {wording.seconds(row.tpot_ms / 1e3)}"
        words += f" ({wording.digits(1e3 / row.tpot_ms)} tokens/s)"
    elif row.tpot_low_ms > 0:
        ends = (wording.seconds(ms / 1e3) for ms in (row.tpot_low_ms, row.tpot_high_ms))
        words += f", each further token takes {' to '.join(ends)}"
    return f"{label}: {words}." if label else f"{words[:1].upper()}{words[1:]}."


def again(records: Sequence[RequestRecord]) -> str:
    """The command of requests that ran alone. Keys and headers are in no record."""
    asked = [record.request.asked for record in records]
    given = {
        "prompt_len": sorted({one.n_prompt for one in asked if one.n_prompt is not None}),
        "gen": max(one.n_gen for one in asked),
        "repeat": 1 + max(one.repeat for one in asked),
    }
    return as_options.line("measure", server_options(records[0]) | given)


def server_options(record: RequestRecord) -> dict[str, object]:
    """The options that name the server of a request."""
    return {"url": record.endpoint.url, "model": record.model, "api": record.endpoint.api}


KINDS = (Kind("requests", lambda one: bool(request_table.alone([one])), chapters, again),)
