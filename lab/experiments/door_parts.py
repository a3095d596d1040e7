"""What the way through a server is made of: the time to the first token, and of each further one, part by part.

Every part is measured by itself; what their sum leaves of the whole is named "not explained". Of TTFT, in the order of
the way: HTTP and the client (a question of the same size that the server only reads), the template of a chat, the
tokeniser, waiting for a slot (until llama-server sends the head of its answer, as soon as it begins with the prompt:
server-context.cpp, `is_begin`), then the model. Of TPOT: the engine, choosing a token as the server does, and the
stream (the same request, not streamed, has none).

`prompt_ms` and `predicted_ms` of llama-server begin with the prompt's first step and end with a chosen token
(server-common.h, `server_slot_stats`), as TTFT and TPOT of a run in process do. What they differ by is a part too:
other settings, or the draw of the process.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import phases
from lab.core import request_times as times
from lab.core.record import OK, Record, Run
from lab.core.request import Request, RequestRecord
from lab.core.request_figures import figures

TTFT, TPOT = "TTFT", "TPOT"
ENGINE = "engine, as in process"
SAMPLING = "sampling"
OTHERWISE = "engine, otherwise"
STREAM = "stream"
HTTP = "HTTP and client"
TEMPLATE = "templating"
TOKENIZE = "tokenising"
SLOT = "scheduling"
UNEXPLAINED = "not explained"
ORDER = (ENGINE, SAMPLING, OTHERWISE, STREAM, HTTP, TEMPLATE, TOKENIZE, SLOT)

Times = dict[str, float | None]
"""Milliseconds of each part of a block; None where the server does not let it be measured."""


@dataclass(frozen=True)
class Part:
    """One part: its mean over the middle blocks, and its range over all, in ms. Negative: the server needs less."""

    name: str
    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class Phase:
    """TTFT or TPOT: both wholes, the parts of the server's, and what these leave of it. Means, in ms.

    `spread` is how far the engines of the blocks lay apart in process: (largest - smallest) / median.
    `hidden` names parts that this server does not let be measured: they are in what is not explained.
    """

    name: str
    in_process_ms: float
    server_ms: float
    parts: tuple[Part, ...]
    spread: float
    hidden: tuple[str, ...]

    @property
    def unexplained_ms(self) -> float:
        return self.server_ms - sum(part.ms for part in self.parts)

    @property
    def unexplained(self) -> float:
        """The share of the whole."""
        return self.unexplained_ms / self.server_ms

    def ms(self, name: str) -> float | None:
        """Of a part; None where it was not measured."""
        return next((part.ms for part in self.parts if part.name == name), None)


@dataclass(frozen=True)
class Row:
    """One length of prompts and answers."""

    n_prompt: int
    n_gen: int
    n_blocks: int
    phases: tuple[Phase, ...]

    @property
    def n_middle(self) -> int:
        """Blocks that the means are of."""
        return self.n_blocks - 2 * (self.n_blocks // 4)


@dataclass(frozen=True)
class Pair:
    """What one block measured of one length: the same tokens in process and through the server."""

    run: Run
    request: Request


def pairs(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[Pair]:
    """Runs and the requests that belong to them, where both went well and no part of the prompt was cached."""
    runs = {
        (record.session, record.run.block, record.run.n_prompt, record.run.n_gen): record.run
        for record in records
        if record.run.block is not None and record.run.status == OK and not record.run.warmup
    }
    both = []
    for record in requests:
        asked, request = record.request.asked, record.request
        if request.pieces is None or request.status != OK or asked.warmup or figures(request).is_warm:
            continue
        run = runs.get((record.session, asked.repeat, asked.n_prompt_counted or 0, asked.n_gen))
        if run is not None and not figures(request).is_short:
            both.append(Pair(run, request))
    return both


def rows(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[Row]:
    """One row for each length, the shortest prompt first."""
    by_length: dict[tuple[int, int], list[Pair]] = {}
    for pair in pairs(records, requests):
        asked = pair.request.asked
        by_length.setdefault((asked.n_prompt or pair.run.n_prompt, asked.n_gen), []).append(pair)
    return [
        Row(*length, len(alike), tuple(phase for phase in (_ttft(alike), _tpot(alike)) if phase))
        for length, alike in sorted(by_length.items())
    ]


def _ttft(alike: Sequence[Pair]) -> Phase | None:
    blocks = []
    for pair in alike:
        server, engine = _ms(times.ttft_ns(pair.request)), _ms(phases.ttft_ns(pair.run))
        if server is not None and engine is not None:
            blocks.append((engine, server, parts_of_ttft(pair.request, engine, server)))
    return _phase(TTFT, blocks)


def _tpot(alike: Sequence[Pair]) -> Phase | None:
    blocks = []
    for pair in alike:
        server, engine = _ms(times.tpot_ns(pair.request)), _ms(phases.tpot_ns(pair.run))
        if server is not None and engine is not None:
            blocks.append((engine, server, parts_of_tpot(pair, engine)))
    return _phase(TPOT, blocks)


def parts_of_ttft(request: Request, engine_ms: float, server_ms: float) -> Times:
    """The parts of the time to the first token of one request."""
    pieces, timings = request.pieces, request.timings
    http = _median_ms(pieces.http_ns) if pieces else None
    template, tokenize = (
        None if column is None or http is None else (_median_ms(column) or 0.0) - http
        for column in ((pieces.template_ns, pieces.tokenize_ns) if pieces else (None, None))
    )
    prompt = timings.prompt_ms if timings else None
    begun = _ms(request.headers_ns)  # the head of the answer: the slot has begun
    is_head_early = prompt is not None and begun is not None and begun < server_ms - prompt / 2
    known = [http, template, tokenize]
    slot = None
    if is_head_early and begun is not None:
        slot = begun - sum(ms for ms in known if ms is not None)
    return {
        ENGINE: engine_ms,
        OTHERWISE: None if prompt is None else prompt - engine_ms,
        HTTP: http,
        TEMPLATE: template,
        TOKENIZE: tokenize,
        SLOT: slot,
    }


def parts_of_tpot(pair: Pair, engine_ms: float) -> Times:
    """The parts of the time of each further token of one request."""
    pieces, timings = pair.request.pieces, pair.request.timings
    streamed = _per_token_ms(timings.gen_ms, timings.n_gen) if timings else None
    whole = _per_token_ms(pieces.whole.gen_ms, pieces.whole.n_gen) if pieces and pieces.whole else None
    sampling = _median_ms(pieces.sampling_ns) if pieces and pieces.sampling_ns else None
    if sampling is not None:
        sampling -= _choosing_ms(pair.run)
    server = streamed if whole is None else whole
    return {
        ENGINE: engine_ms,
        SAMPLING: sampling,
        OTHERWISE: None if server is None else server - engine_ms - (sampling or 0.0),
        STREAM: None if streamed is None or whole is None else streamed - whole,
    }


def _choosing_ms(run: Run) -> float:
    """Of a token, in process: the median."""
    steps = run.steps
    first = phases.n_prefill_steps(run)
    return (
        statistics.median(end - ready for ready, end in zip(steps.ready_ns[first:], steps.end_ns[first:], strict=True))
        / 1e6
    )


def _per_token_ms(gen_ms: float | None, n_gen: int | None) -> float | None:
    """Of llama-server's time of generation, which has one step less than tokens."""
    return None if gen_ms is None or n_gen is None or n_gen < 2 else gen_ms / (n_gen - 1)


def _phase(name: str, blocks: Sequence[tuple[float, float, Times]]) -> Phase | None:
    """Means over the middle half of the blocks, by how much longer the server took; the ranges are those of all.

    Means add up, which medians do not; without the outer blocks one that was disturbed does not count for all.
    """
    if not blocks:
        return None
    ordered = sorted(blocks, key=lambda block: block[1] - block[0])
    n_outer = len(ordered) // 4
    middle = ordered[n_outer : len(ordered) - n_outer]
    columns = {
        part: [ms for _, _, its in ordered if (ms := its[part]) is not None]
        for part in ORDER
        if all(part in its for _, _, its in ordered)
    }
    is_measured = {part: len(column) == len(ordered) for part, column in columns.items()}
    engines = [engine for engine, _, _ in blocks]
    return Phase(
        name=name,
        in_process_ms=statistics.fmean(engine for engine, _, _ in middle),
        server_ms=statistics.fmean(server for _, server, _ in middle),
        parts=tuple(
            Part(part, statistics.fmean(its[part] or 0.0 for _, _, its in middle), min(column), max(column))
            for part, column in columns.items()
            if is_measured[part]
        ),
        spread=(max(engines) - min(engines)) / statistics.median(engines),
        hidden=tuple(part for part in columns if not is_measured[part]),
    )


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _median_ms(column_ns: Sequence[int]) -> float | None:
    return statistics.median(column_ns) / 1e6 if column_ns else None
