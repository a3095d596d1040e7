"""Requests to servers that were sent one after the other, as sections: medians, what they do not
show, and pictures."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from rich.console import Console

from lab.core import request_times as times
from lab.core.figures import (
    DECODE_RATE,
    E2E,
    FIRST_OUTPUT,
    LONGEST_STALL,
    TPOT,
    TTFT,
    FigureKind,
    per,
)
from lab.core.lists import grouped, plural
from lab.core.record import OK
from lab.core.request import (
    HIDDEN,
    REASONING,
    Capability,
    Endpoint,
    Request,
    RequestRecord,
    short_name,
)
from lab.core.request_times import RequestFigures, figures
from lab.remote.servers import TOKENIZE
from lab.runner import disturbances
from lab.show import plot_runs, summaries, table, text_results
from lab.show.cells import LONG_TEXT, Cell, Column, of_figure, stacked
from lab.show.section import (
    UNKNOWN,
    Columns,
    Context,
    Kind,
    Picture,
    Section,
    print_section,
    tabled,
)
from lab.show.wording import digits, labelled, seconds

if TYPE_CHECKING:
    import pandas as pd

LEAST_CLUMP = 1.5  # tokens per arrival, on average
SHOWN = (TTFT, FIRST_OUTPUT, TPOT, DECODE_RATE, LONGEST_STALL, E2E)

MEANINGS = (
    "TTFT: from sending the request to the first token, with tokenization, queueing and network "
    "(prefill alone is not visible). TPOT: time per token after the first. E2E: whole request."
)
CAPTIONS = {
    "prefill": "TTFT: time until the first token arrives. Points are requests, the line is their "
    "median. The dashed line shows growth in proportion to the length.",
    "decode": "The gaps of each answer. Points are gaps between tokens or, if the server does not "
    "count tokens per event, between events. The line is their running median, or mean.",
}


# Lines of a session


def finished(record: RequestRecord) -> str:
    """A line on a request that has ended."""
    times_of = figures(record.request)
    line = f"{_name(times_of)}: {_outcome(times_of)}"
    return f"{line} (disturbed)" if disturbances.of_request(record) else line


def _outcome(request: RequestFigures) -> str:
    """How a request went."""
    if request.request.status != OK:
        return request.request.failure or request.request.status
    if request.came_at_once:
        e2e = digits((request.e2e_ns or 0) / 1e9)
        return f"E2E {e2e} s; the answer arrived in one piece, so TTFT is unknown"
    if request.ttft_ns is None:
        return f"no token arrived{_counted(request)}"
    parts = [f"TTFT {digits(request.ttft_ns / 1e9)} s"]
    if request.tpot_bounds_ns:
        parts.append(f"TPOT {_tpot(request.tpot_bounds_ns)} ms")
    if has_clumps(request):
        parts.append(f"{request.tokens_per_arrival:.0f} tokens per arrival")
    outcome = ", ".join(parts)
    if request.is_warm:
        return f"{outcome} (warm)"
    if request.is_short:
        return f"{outcome} (short)"
    return outcome


def _counted(request: RequestFigures) -> str:
    """What the server counts of an answer without tokens."""
    if request.n_generated is None:
        return ""
    return f", and the server counts {plural(request.n_generated, 'generated token')}"


def has_clumps(request: RequestFigures) -> bool:
    """Whether several tokens came together, most of the time."""
    return (request.tokens_per_arrival or 1.0) >= LEAST_CLUMP


def _tpot(bounds_ns: tuple[float, float]) -> str:
    """TPOT in ms: a number if it is known exactly, otherwise its bounds."""
    low, high = (digits(ns / 1e6) for ns in bounds_ns)
    if low == high:
        return low
    return f"{low} to {high}"


def _name(request: RequestFigures) -> str:
    n_prompt = table.n_prompt(request)
    repeat = f"repeat {request.asked.repeat + 1}"
    if n_prompt is None:
        return f"a prompt of unknown length, {repeat}"
    return f"{n_prompt:,} prompt tokens, {repeat}"


def length(n_prompt: float | None) -> str:
    """A prompt's length; "?" if nobody counted it."""
    return "?" if n_prompt is None or n_prompt != n_prompt else f"{n_prompt:,.0f}"


# What a server can do


def print_endpoint(
    endpoint: Endpoint, model: str, models: Sequence[str], out: Console
) -> None:
    """Which server, which of its models, and the table of its capabilities."""
    names = [name for name in (endpoint.server, endpoint.version) if name]
    program = " ".join(names) or "not named"
    out.print(f"server   {program} at {endpoint.url}, through {endpoint.api}")
    if len(models) > 1:
        model = f"{model} (of {len(models)})"
    out.print(f"model    {model}")
    print_section(capabilities(endpoint), out)


def capabilities(endpoint: Endpoint, title: str = "") -> Section:
    """What the server can do, and what showed that."""
    columns: Columns[Capability] = [
        Column("what it can do", lambda capability: capability.name, LONG_TEXT),
        Column("answer", lambda capability: capability.answer, LONG_TEXT),
        Column("as seen in", lambda capability: capability.how, LONG_TEXT),
    ]
    return Section(title, **tabled(columns, endpoint.capabilities, keep_all=True))


# What went wrong, and what is not known


def failures(records: Sequence[RequestRecord]) -> list[str]:
    """One line per class of failure, with its count and its first request. Warm-ups are counted
    separately."""
    requests = [record.request for record in records]
    failed = [request for request in requests if request.status != OK]
    by_class = grouped(
        failed, lambda request: (request.asked.warmup, request.failure or request.status)
    )
    lines = []
    for (is_warmup, failure), of_class in by_class.items():
        n = sum(request.asked.warmup == is_warmup for request in requests)
        kind = plural(n, "warm-up request" if is_warmup else "request")
        first = of_class[0]
        lines.append(
            f"{len(of_class)} of {kind} ({failure}), for example "
            f"{_name(figures(first))}: {first.error}"
        )
    return lines


def warnings(records: Sequence[RequestRecord]) -> list[str]:
    """What successful requests do not show; of several setups each sentence begins with its
    label.
    """
    good = [record for record in table.alone(records) if record.is_good]
    setups = table.by_setup(good)
    sentences = []
    for label, of_setup in setups:
        of_requests = doubts([record.request for record in of_setup])
        for sentence in [*disturbances.request_sentences(of_setup), *of_requests]:
            sentences.append(f"{label}: {sentence}" if len(setups) > 1 else sentence)
    return sentences


def doubts(requests: Sequence[Request]) -> list[str]:
    """What successful requests of one setup do not show, or show of other work than was asked
    for.
    """
    figures_of = [figures(request) for request in requests]
    return [
        *_contradictions(requests),
        *_longer(requests),
        *held_back(figures_of),
        *_cache_doubts(figures_of),
        *_length_doubts(figures_of),
        *_token_doubts(requests, figures_of),
    ]


def _contradictions(requests: Sequence[Request]) -> list[str]:
    """A sentence on each number of the server that cannot be, with how often."""
    found = Counter(itertools.chain.from_iterable(map(times.contradictions, requests)))
    return [
        f"In {n} of {plural(len(requests), 'request')} the server {contradiction}: "
        "that cannot be, and is in no figure."
        for contradiction, n in found.items()
    ]


def _longer(requests: Sequence[Request]) -> list[str]:
    """A sentence on answers that went on beyond the requested length, if there are any."""
    longer = list(filter(times.exceeds_limit, requests))
    if not longer:
        return []
    return [
        f"{len(longer)} of {len(requests)} answers were longer than requested: the server ignores "
        "that limit. Their tokens are in no figure."
    ]


def held_back(answers: Sequence[RequestFigures]) -> list[str]:
    """A sentence on answers that arrived in one piece, if there are any."""
    n = sum(answer.came_at_once for answer in answers)
    if not n:
        return []
    return [
        f"{n} of {len(answers)} answers arrived in one piece: the server or a proxy held them "
        "back until they were complete. Their TTFT and TPOT are unknown."
    ]


def _cache_doubts(answers: Sequence[RequestFigures]) -> list[str]:
    cached = [answer.n_cached or 0 for answer in answers if answer.is_warm]
    if cached:
        return [
            f"{len(cached)} of {len(answers)} requests had {span(cached)} prompt tokens in the "
            "server's cache, and have separate rows."
        ]
    usages = [answer.request.usage for answer in answers]
    if any(usage is None or usage.cached_tokens is None for usage in usages):
        return [
            "The server does not report cached prompt tokens. "
            "Each prompt began with a different nonce."
        ]
    return []


def _length_doubts(answers: Sequence[RequestFigures]) -> list[str]:
    short = [answer for answer in answers if answer.is_short]
    if not short:
        return []
    lengths = span([answer.n_generated or 0 for answer in short])
    reasons = " or ".join(
        sorted({answer.request.finish_reason or "none given" for answer in short})
    )
    return [
        f"{len(short)} of {len(answers)} answers were shorter than requested "
        f"({lengths} tokens: {reasons}), and have separate rows."
    ]


def _token_doubts(requests: Sequence[Request], answers: Sequence[RequestFigures]) -> list[str]:
    """Sentences on tokens that nobody counted as they came, and on reasoning."""
    n = len(requests)
    sentences = _arrival_doubts(requests, answers)
    if any(request.usage and request.usage.counted_by == TOKENIZE for request in requests):
        sentences.append(
            "The stream did not count tokens. Its text was tokenized afterwards, "
            "which may merge some."
        )
    n_bounds = sum(
        answer.tpot_ns is None and answer.tpot_bounds_ns is not None for answer in answers
    )
    if n_bounds:
        sentences.append(
            f"In {n_bounds} of {n} requests the number of tokens in the first event is unknown: "
            "TPOT lies between the two figures."
        )
    in_pieces = [
        request
        for request, answer in zip(requests, answers, strict=True)
        if not answer.came_at_once
    ]
    if any(times.itl_ns(request) is None for request in in_pieces):
        sentences.append(
            "Events do not say how many tokens they contain: gaps are between events, not tokens."
        )
    n_reasoned = sum(REASONING in request.events.kind for request in requests)
    if n_reasoned:
        sentences.append(
            f"{n_reasoned} of {n} answers began with reasoning, which counts as tokens."
        )
    return sentences


def _arrival_doubts(
    requests: Sequence[Request], answers: Sequence[RequestFigures]
) -> list[str]:
    """Sentences on tokens that came together, and on those that were counted before their text
    came."""
    n = len(requests)
    sentences = []
    clumps = [answer.tokens_per_arrival or 0 for answer in answers if has_clumps(answer)]
    if clumps:
        sentences.append(
            f"{statistics.median(clumps):.0f} tokens per arrival in {len(clumps)} of {n} answers: "
            "the server or a proxy sends them together. TTFT is when the first of them came, TPOT "
            "the mean of those after the first arrival."
        )
    n_hidden = sum(is_hidden_first(request) for request in requests)
    if n_hidden:
        sentences.append(
            f"{n_hidden} of {n} answers began with tokens that the server counts and whose text "
            "did not come: TTFT is that of the first token, first output that of the first text."
        )
    return sentences


def is_hidden_first(request: Request) -> bool:
    """Whether an answer began with tokens whose text did not come with them."""
    indices = times.generated(request)
    return bool(indices) and request.events.kind[indices[0]] == HIDDEN


def span(numbers: Sequence[int]) -> str:
    """The smallest and the largest number, such as "3 to 1,000"; the number, if all are equal."""
    smallest = min(numbers, default=0)
    largest = max(numbers, default=0)
    if smallest == largest:
        return f"{smallest:,}"
    return f"{smallest:,} to {largest:,}"


# Tables


def sections(records: Sequence[RequestRecord]) -> list[Section]:
    """A section for each setup and number of generated tokens: medians, then the server's own
    times."""
    rows = summaries.summary(table.runs(records))
    if rows.empty:
        return []
    sections_of_setups = []
    for label, of_setup in table.setups(rows):
        for n_gen, of_length in of_setup.groupby("n_gen"):
            sections_of_setups.append(_section(label, int(n_gen), of_length))
    return sections_of_setups


def _section(label: str, n_gen: int, rows: pd.DataFrame) -> Section:
    """The medians of one setup and number of generated tokens, by prompt length."""
    parts = []
    has_server_times = rows.server_prompt_s.notna() | rows.server_decode_s.notna()
    if has_server_times.any():
        own_times = tabled(SERVER_COLUMNS, rows[has_server_times].to_dict("records"))
        parts.append(Section("Times reported by the server, medians", **own_times))
    return Section(
        label,
        f"{plural(n_gen, 'token')} requested; {text_results.medians(rows, 'request')}",
        text_results.below(rows, "request"),
        **tabled(_columns(rows), rows.to_dict("records")),
        answer=_sentence(rows),
        notes=[MEANINGS],
        parts=parts,
    )


def _columns(rows: pd.DataFrame) -> Columns[dict[str, Any]]:
    columns: list[Column[dict[str, Any]]] = [
        Column("prompt\ntokens", lambda row: length(row["n_prompt"]), is_in_title=True)
    ]
    if rows.repeats.nunique() > 1:
        columns.append(
            Column("n", lambda row: f"{row['repeats']}", priority=-2, is_in_title=True)
        )
    columns.append(Column("answer\ntokens", _answer_tokens, is_in_title=True))
    for figure in SHOWN:
        if figure is not FIRST_OUTPUT or _has_reasoning(rows):
            columns.append(of_figure(figure, partial(_figure, figure=figure)))
    columns.append(Column("note", _note, LONG_TEXT))
    return columns


def _has_reasoning(rows: pd.DataFrame) -> bool:
    """Whether some answers began with reasoning, or had nothing else (without a first output)."""
    is_known = rows.first_output_s.notna()
    came_later = rows.first_output_s[is_known] != rows.ttft_s[is_known]
    return bool(came_later.any() or not is_known.all())


def _answer_tokens(row: dict[str, object]) -> Cell | str:
    """Tokens of the answers, with their range if they differ."""
    n_answer = summaries.shown_in(row, "n_answer")
    if n_answer.value != n_answer.value:
        return UNKNOWN
    if n_answer.low == n_answer.high:
        return f"{n_answer.value:,.0f}"
    return stacked(f"{n_answer.value:,.0f}", f"{n_answer.low:,.0f}-{n_answer.high:,.0f}")


def _figure(row: dict[str, Any], figure: FigureKind) -> Cell | str:
    """The cell of a figure. TPOT and decode rate are "a to b" if a request of the row has only
    bounds."""
    if not row["n_bounds"] or figure not in (TPOT, DECODE_RATE):
        return text_results.cell(row, figure)
    low_ms = row["tpot_low_ms"]
    high_ms = row["tpot_high_ms"]
    if figure is TPOT:
        return f"{digits(low_ms)} to {digits(high_ms)}"
    return (
        f"{digits(per(1e3, high_ms) or table.NAN)} to {digits(per(1e3, low_ms) or table.NAN)}"
    )


def _note(row: dict[str, object]) -> str:
    return ", ".join(kind for kind in summaries.REQUEST_KINDS if row[kind] is True)


class ServerTimesRow(TypedDict):
    """A row of the summary: the columns of the server's own times."""

    n_prompt: int
    ttft_s: float
    server_prompt_s: float
    server_decode_s: float


SERVER_COLUMNS: Columns[ServerTimesRow] = (
    Column("prompt\ntokens", lambda row: length(row["n_prompt"]), is_in_title=True),
    Column("prompt\ns", lambda row: digits(row["server_prompt_s"])),
    Column("decode\ns", lambda row: digits(row["server_decode_s"])),
    Column(
        "TTFT minus\nprompt ms",
        lambda row: digits(1e3 * (row["ttft_s"] - row["server_prompt_s"])),
    ),
)
"""The server's own times, and TTFT without them."""


def _sentence(rows: pd.DataFrame) -> str:
    """A sentence on the longest prompt of a setup."""
    row = rows.iloc[-1]
    prompt = f"a prompt of {length(row.n_prompt)} tokens"
    if row.n_cached > 0:
        prompt = f"{prompt} ({length(row.n_cached)} of them from the server's cache)"
    if not row.ttft_s > 0:
        if row.e2e_s > 0:
            e2e = seconds(row.e2e_s)
            return f"After {prompt} the whole answer arrives in one piece after {e2e}."
        return f"After {prompt} no token arrived."
    first = f"After {prompt} the first token arrives after {seconds(row.ttft_s)}"
    if not row.tpot_low_ms > 0:
        return f"{first}."
    if row.n_bounds:
        low = seconds(row.tpot_low_ms / 1e3)
        high = seconds(row.tpot_high_ms / 1e3)
        return f"{first}, each further token takes {low} to {high}."
    tpot = seconds(row.tpot_ms / 1e3)
    return f"{first}, each further token takes {tpot} ({digits(1e3 / row.tpot_ms)} tokens/s)."


# Pages


def chapters(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """The results of requests that ran alone: none if none went well."""
    good = [record for record in records if record.is_good]
    if not good:
        return []
    setups = table.by_setup(good)
    measured = [record for record in good if table.is_measured(record)] or good
    parts = sections(records)
    if context.is_page:
        parts += _capabilities_of(setups)
    return [
        Section(
            "Through a server",
            name="requests",
            question=_question(good, setups),
            sentences=_sentences(measured),
            warnings=warnings(records),
            parts=parts,
            pictures=_pictures([*(context.runs if context.together else ()), *records]),
            data=partial(text_results.summary_rows, records),
        )
    ]


def _question(records: Sequence[RequestRecord], setups: Sequence[tuple[str, object]]) -> str:
    if len(setups) > 1:
        return text_results.question([label for label, _ in setups])
    server = records[0].endpoint.server or "its server"
    return f"How fast does {short_name(records[0].model)} answer through {server}?"


def _sentences(records: Sequence[RequestRecord]) -> list[str]:
    setups = table.setups(table.runs(records))
    sentences = []
    for label, rows in setups:
        sentence = _sentence(summaries.summary(rows))
        if len(setups) > 1:
            sentence = labelled(label, sentence)
        sentences.append(sentence)
    return sentences


def _capabilities_of(
    setups: Sequence[tuple[str, Sequence[RequestRecord]]],
) -> list[Section]:
    """What each examined server can do."""
    tables = []
    for label, of_setup in setups:
        endpoint = of_setup[0].endpoint
        if endpoint.capabilities:
            tables.append(capabilities(endpoint, f"{label}: what the server can do"))
    return tables


def _pictures(records: table.Records) -> list[Picture]:
    drawings = plot_runs.drawings(records)
    return [
        Picture(name, caption, drawings[name])
        for name, caption in CAPTIONS.items()
        if name in drawings
    ]


KINDS = (Kind("requests", lambda record: bool(table.alone([record])), chapters),)
