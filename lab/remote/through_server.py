"""Requests to a server, one after the other: send requests of several prompt lengths, keep each, and show them.

As with the engine, lengths are shuffled within each round, because machines drift. Before the rounds each length gets a
warm-up request, which does not count. A failed request is recorded and the others continue; the session ends if the
server is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from warnings import warn

from rich.console import Console

from lab.core import request_times as times
from lab.core.lists import grouped, plural
from lab.core.record import OK
from lab.core.request import LOST, REASONING, REFUSED, Endpoint, Request, RequestRecord, short_name
from lab.core.request_times import Figures, figures
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.show import plot_runs, text_results
from lab.remote.servers import TOKENIZE, Reaching, Server, connect, prompt_text
from lab.process.worker import MAX_TOKENS
from lab.runner import progress
from lab.runner.cases import Case, shuffled
from lab.runner.plan import DEFAULT_GEN, DEFAULT_REPEAT, parse_lengths
from lab.runner.progress import Reporter, ShowStatus, Status
from lab.runner.prompts import TEXT
from lab.show import table
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
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd

GONE = (REFUSED, LOST)  # failures that mean, several times in a row, that the server is gone
DEFAULT_LENGTHS = "100,1000"  # without 10: in most chats the template alone is longer
WARMUP_GEN = 16  # maximum number of tokens that a warm-up generates
MAX_GONE = 3  # failures in a row to reach the server, which end the session
PAUSE_S = 1.0  # after a failure

SHOWN = ("ttft_s", "first_output_s", "tpot_ms", "decode_tps", "stall_ms", "e2e_s")

OF_SERVER: Columns = (
    ("prompt\ntokens", lambda row: length(row["n_prompt"])),
    ("prompt\ns", lambda row: digits(row["server_prompt_s"])),
    ("decode\ns", lambda row: digits(row["server_decode_s"])),
    ("TTFT minus\nprompt ms", lambda row: digits(1e3 * (row["ttft_s"] - row["server_prompt_s"]))),
)
"""The server's own times, and TTFT without them."""

MEANINGS = (
    "TTFT: from sending the request to the first token, with tokenization, queueing and network (prefill alone is not "
    "visible). TPOT: time per token after the first. E2E: whole request."
)
CAPTIONS = {
    "prefill": "TTFT: time until the first token arrives. Points are requests, the line is their median. The dashed "
    "line shows growth in proportion to the length.",
    "decode": "The gaps of each answer. Points are gaps between tokens or, if the server does not count tokens per "
    "event, between events. The line is their running median, or mean.",
}


def gone(server: Server, path: Path, lost: Sequence[Request], during: str = "") -> LabError:
    """The error after requests in a row with a failure in GONE."""
    why = f"{lost[-1].failure}: {(lost[-1].error or '').rstrip('.')}"
    return LabError(
        f"The server at {server.endpoint.url} is gone: {len(lost)} requests in a row failed ({during}{why}).",
        f"Read its log, and restart it. The finished requests are in {path}",
    )


def warn_of_failures(notes: Iterable[str], errors: Iterable[str | None]) -> None:
    """Python warnings for a session's notes and failed requests, at the line of the user's call."""
    failed = [error for error in errors if error]
    for sentence in (*notes, *([f"{len(failed)} requests failed: {failed[0]}"] if failed else [])):
        warn(sentence, stacklevel=3)


@dataclass(frozen=True)
class ServerPlan:
    """What to measure on any server."""

    cases: tuple[Case, ...]
    n_repeat: int
    text: str
    seed: int

    @property
    def summary(self) -> str:
        """The maximum of what a server will be sent, with warm-ups."""
        most = max(case.n_prompt + case.n_gen for case in self.cases)
        n = len(self.cases) * (self.n_repeat + 1)
        return f"{n:,} requests for up to {most:,} tokens each, and small ones to examine it"


def make_plan(
    prompt_len: str | Sequence[int] | None = None,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    prompt: str = TEXT,
    seed: int = 1,
) -> ServerPlan:
    """The plan of a measurement, for any server. LabError for invalid arguments."""
    lengths = parse_lengths(DEFAULT_LENGTHS if prompt_len is None else prompt_len)
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    for name, value, most in (("gen", gen, MAX_TOKENS), ("repeat", n_repeat, 10_000)):
        if not 1 <= value <= most:
            raise LabError(
                f"--{name} {value:,} is not possible.", f"Give a whole number from 1 to {most:,}."
            )
    return ServerPlan(tuple(Case(n, gen) for n in lengths), n_repeat, prompt_text(prompt), seed)


def check(plan: ServerPlan, server: Server) -> None:
    """LabError if the server cannot count the tokens of a prompt, or a length is not possible on it."""
    for case in plan.cases:
        server.least(case.n_prompt)
        if problem := server.too_long(case.n_prompt, case.n_gen):
            raise problem


def measure(
    url: str,
    plan: ServerPlan,
    model: str | None,
    out: str | Path,
    watch: ShowStatus | None,
    **how: Unpack[Reaching],
) -> list[RequestRecord]:
    """What `lab.measure` does with `url`."""
    with progress.in_notebook() as watching:
        show = watch or watching
        with connect(url, model, lambda words: show(Status(words)), **how) as server:
            check(plan, server)
            records = list(execute(plan, server, server.new_file(Path(out)), show))
    warn_of_failures(
        (), [record.request.error for record in records if not record.request.asked.warmup]
    )
    return records


def execute(
    plan: ServerPlan, server: Server, path: Path, watch: ShowStatus
) -> Iterator[RequestRecord]:
    """Send the plan's requests, append each to `path` when it ends, and yield its record. LabError if it is gone."""
    warmups = [(0, case) for case in sorted(plan.cases, key=lambda case: case.n_prompt)]
    todo = [
        run for repeat in range(plan.n_repeat) for run in shuffled(plan.cases, plan.seed, repeat)
    ]
    reporter = Reporter(watch, todo, lambda case: (case.n_prompt, case.n_gen))
    lost: list[Request] = []  # in a row
    with unless_empty(path):
        watch(Status("sizing prompts"))
        asks = {
            one: server.ask(one.n_prompt, one.n_gen, plan.text, seed=plan.seed)
            for one in plan.cases
        }
        while warmups or todo:
            is_warmup = bool(warmups)
            repeat, case = (warmups or todo).pop(0)
            ask = asks[case].of_length(min(WARMUP_GEN, case.n_gen) if is_warmup else case.n_gen)
            ask = replace(ask, asked=replace(ask.asked, repeat=repeat, warmup=is_warmup))
            reply = server.send(ask, reporter.answer_watcher(case, repeat, is_warmup))
            request = reply.request if is_warmup else server.counted(reply)
            own = figures(request)
            if own.status == OK and own.ttft_ns is not None and own.e2e_ns is not None:
                reporter.learn(case, own.ttft_ns, own.e2e_ns - own.ttft_ns, own.asked.n_gen)
            record = server.record(path.stem, request)
            save(path, record)
            yield record
            lost = [*lost, request] if request.failure in GONE else []
            if len(lost) >= MAX_GONE:
                raise gone(server, path, lost)
            if request.status != OK and (warmups or todo):
                time.sleep(PAUSE_S)


def length(n_prompt: float | None) -> str:
    """A prompt's length; "?" if nobody counted it."""
    return "?" if n_prompt is None or n_prompt != n_prompt else f"{n_prompt:,.0f}"


def _name(one: Figures) -> str:
    n = table.n_prompt(one)
    name = "a prompt of unknown length" if n is None else f"{n:,} prompt tokens"
    return f"{name}, repeat {one.asked.repeat + 1}"


def finished(record: RequestRecord) -> str:
    """A line on a request that has ended."""
    one = figures(record.request)
    if one.status != OK:
        what = one.failure or one.status
    elif one.came_at_once:
        what = f"E2E {digits((one.e2e_ns or 0) / 1e9)} s; the answer arrived in one piece, so TTFT is unknown"
    elif one.ttft_ns is None:
        what = "no token arrived"
    else:
        ends = dict.fromkeys(one.tpot_bounds_ns or ())  # one, if it is known exactly
        what = f"TTFT {digits(one.ttft_ns / 1e9)} s"
        what += f", TPOT {' to '.join(digits(ns / 1e6) for ns in ends)} ms" if ends else ""
        what += " (warm)" if one.is_warm else " (short)" if one.is_short else ""
    return f"{_name(one)}: {what}"


def print_endpoint(endpoint: Endpoint, model: str, models: Sequence[str], out: Console) -> None:
    """Which server, which of its models, and the table of its capabilities."""
    server = " ".join(word for word in (endpoint.server, endpoint.version) if word) or "not named"
    out.print(f"server   {server} at {endpoint.url}, through {endpoint.api}")
    out.print(f"model    {model}" + (f" (of {len(models)})" if len(models) > 1 else ""))
    print_section(capabilities(endpoint), out)


def capabilities(endpoint: Endpoint, title: str = "") -> Section:
    """What the server can do, and what showed that."""
    names = {"what it can do": "name", "answer": "answer", "as seen in": "how"}
    columns = [(heading, attrgetter(name)) for heading, name in names.items()]
    return Section(title, **tabled(columns, endpoint.capabilities, keep_all=True))


def failures(records: Sequence[RequestRecord]) -> list[str]:
    """One line per class of failure, with its count and its first request. Warm-ups are counted separately."""
    own = [record.request for record in table.alone(records)]
    lines = []
    failed = [request for request in own if request.status != OK]
    by_class = grouped(
        failed, lambda request: (request.asked.warmup, request.failure or request.status)
    )
    for (is_warmup, name), (first, *others) in by_class.items():
        n = sum(request.asked.warmup == is_warmup for request in own)
        kind = f"{'warm-up ' * is_warmup}request{'s' * (n != 1)}"
        example = f"{_name(figures(first))}: {first.error}"
        lines.append(f"{1 + len(others)} of {n} {kind} ({name}), for example {example}")
    return lines


def warnings(records: Sequence[RequestRecord]) -> list[str]:
    """Sentences on requests that ran alone; of several setups each begins with its label."""
    own = [record for record in table.alone(records) if table.went_well(record)]
    setups = table.setups(table.runs(own)) if own else []
    return [
        f"{label}: {sentence}" if len(setups) > 1 else sentence
        for label, rows in setups
        for sentence in _doubts([own[index].request for index in rows.run])
    ]


def _doubts(requests: Sequence[Request]) -> list[str]:
    """What requests of one setup that went well do not show, or show of another work than was asked for."""
    ones = [figures(request) for request in requests]
    n = len(requests)
    cached = [one.n_cached or 0 for one in ones if one.is_warm]
    short = [one for one in ones if one.is_short]
    lengths = span([one.n_generated or 0 for one in short])
    reasons = " or ".join(sorted({one.finish_reason or "none given" for one in short}))
    is_unsaid = not cached and any(one.is_warm is None for one in ones)
    is_tokenized = any(one.usage and one.usage.counted_by == TOKENIZE for one in requests)
    n_bounds = sum(one.tpot_ns is None and one.tpot_bounds_ns is not None for one in ones)
    by_events = [
        not one.came_at_once and times.itl_ns(own) is None
        for own, one in zip(requests, ones, strict=True)
    ]
    n_reasoned = sum(REASONING in request.events.kind for request in requests)
    apart = "have separate rows"
    unknown = "the number of tokens in the first event is unknown"
    sentences = (
        (
            cached,
            f"{len(cached)} of {n} requests had {span(cached)} prompt tokens in the server's cache, and {apart}.",
        ),
        (
            is_unsaid,
            "The server does not report cached prompt tokens. Each prompt began with a different nonce.",
        ),
        (
            short,
            f"{len(short)} of {n} answers were shorter than requested ({lengths} tokens: {reasons}), and {apart}.",
        ),
        (
            is_tokenized,
            "The stream did not count tokens. Its text was tokenized afterwards, which may merge some.",
        ),
        (n_bounds, f"In {n_bounds} of {n} requests {unknown}: TPOT lies between the two figures."),
        (
            any(by_events),
            "Events do not say how many tokens they contain: gaps are between events, not tokens.",
        ),
        (n_reasoned, f"{n_reasoned} of {n} answers began with reasoning, which counts as tokens."),
    )
    return [*held_back(ones), *(sentence for is_so, sentence in sentences if is_so)]


def held_back(answers: Sequence[Figures]) -> list[str]:
    """A sentence on answers that arrived in one piece, if there are any."""
    n = sum(answer.came_at_once for answer in answers)
    if not n:
        return []
    return [
        f"{n} of {len(answers)} answers arrived in one piece: the server or a proxy held them "
        "back until they were complete. Their TTFT and TPOT are unknown."
    ]


def span(numbers: Sequence[int]) -> str:
    """The smallest and the largest number, such as "3 to 1,000"; the number, if all are equal."""
    smallest = min(numbers, default=0)
    largest = max(numbers, default=0)
    if smallest == largest:
        return f"{smallest:,}"
    return f"{smallest:,} to {largest:,}"


def server_options(record: RequestRecord) -> dict[str, object]:
    """The options that name the server of a request."""
    return {"url": record.endpoint.url, "model": record.model, "api": record.endpoint.api}


def sections(records: Sequence[RequestRecord]) -> list[Section]:
    """A section for each setup and number of generated tokens: medians, then the server's own times."""
    rows = table.summary(table.runs(table.alone(records)))
    made = []
    for label, of_setup in table.setups(rows) if len(rows) else []:
        for n_gen, part in of_setup.groupby("n_gen"):
            known = part.first_output_s.notna()  # of an answer that was all reasoning it is not
            has_reasoning = bool(
                (part.first_output_s[known] != part.ttft_s[known]).any() or not known.all()
            )
            names = [name for name in SHOWN if name != "first_output_s" or has_reasoning]
            columns: Columns = [
                ("prompt\ntokens", lambda row: length(row["n_prompt"])),
                *([("n", lambda row: f"{row['repeats']}")] if part.repeats.nunique() > 1 else []),
                ("answer\ntokens", _answer),
                *((text_results.HEADINGS[name], partial(_figure, name=name)) for name in names),
                (
                    "note",
                    lambda row: ", ".join(
                        kind for kind in table.REQUEST_KINDS if row[kind] is True
                    ),
                ),
            ]
            timed = part[part.server_prompt_s.notna() | part.server_decode_s.notna()].to_dict(
                "records"
            )
            own_times = Section("Times reported by the server, medians", **tabled(OF_SERVER, timed))
            made.append(
                Section(
                    label,
                    f"{plural(int(n_gen), 'token')} requested; {text_results.below(part, 'request')}",
                    **tabled(columns, part.to_dict("records")),
                    answer=_time("", part),
                    notes=[MEANINGS],
                    parts=[own_times] if timed else [],
                )
            )
    return made


def _answer(row: dict[str, Any]) -> str:
    """Tokens of the answers, with their range if they differ."""
    one = table.shown_in(row, "n_answer")
    ends = f"\n{one.low:,.0f}-{one.high:,.0f}" if one.low != one.high else ""
    return UNKNOWN if one.value != one.value else f"{one.value:,.0f}{ends}"


def _figure(row: dict[str, Any], name: str) -> str:
    """The cell of a figure. TPOT and decode rate are "a to b" if a request of the row has only bounds."""
    if name in ("tpot_ms", "decode_tps") and row["n_bounds"]:
        ends = [row["tpot_low_ms"], row["tpot_high_ms"]]
        if name == "decode_tps":
            ends = [1e3 / ms if ms > 0 else float("nan") for ms in reversed(ends)]
        return " to ".join(map(digits, ends))
    return text_results.figure(row, name)


def _time(label: str, rows: pd.DataFrame) -> str:
    """A sentence on the longest prompt of a setup of requests."""
    row = rows.iloc[-1]
    words = f"the first token of {length(row.n_prompt)} prompt tokens arrives after {seconds(row.ttft_s)}"
    if row.tpot_low_ms > 0:
        ends = [row.tpot_low_ms, row.tpot_high_ms] if row.n_bounds else [row.tpot_ms]
        words += f", each further token takes {' to '.join(seconds(ms / 1e3) for ms in ends)}"
        words += "" if row.n_bounds else f" ({digits(1e3 / row.tpot_ms)} tokens/s)"
    return f"{label}: {words}." if label else f"{words[:1].upper()}{words[1:]}."


def chapters(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Requests that ran alone; runs of the engine are in the same pictures."""
    good = [record for record in records if table.went_well(record)]
    if not good:
        return []
    rows = table.setups(table.runs(good))
    of_setups = table.setups(table.runs([one for one in good if table.is_measured(one)] or good))
    question = text_results.question([label for label, _ in rows])
    if len(rows) == 1:
        server = good[0].endpoint.server or "its server"
        question = f"How fast does {short_name(good[0].model)} answer through {server}?"
    parts = sections(records)
    if context.is_page:
        seen = [(label, good[part.run.iloc[0]].endpoint) for label, part in rows]
        parts += [
            capabilities(one, f"{label}: what the server can do")
            for label, one in seen
            if one.capabilities
        ]
    drawn = plot_runs.drawings([*(context.runs if context.together else ()), *records])
    return [
        Section(
            "Through a server",
            name="requests",
            question=question,
            sentences=[
                _time(label if len(of_setups) > 1 else "", table.summary(part))
                for label, part in of_setups
            ],
            warnings=warnings(records),
            parts=parts,
            pictures=[
                Picture(one, caption, drawn[one])
                for one, caption in CAPTIONS.items()
                if one in drawn
            ],
            data=partial(text_results.summary_rows, records),
        )
    ]


KINDS = (Kind("requests", lambda one: bool(table.alone([one])), chapters),)
