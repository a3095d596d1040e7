"""The parts of a server's TTFT and TPOT, the settings of both sides, and sentences on them.

Every part is measured separately; the rest of the whole is "not explained". The parts of TTFT, in order: HTTP and the
client (a question of the same size that the server only reads), the chat template, the tokeniser, waiting for a slot
(until llama-server sends the head of its answer, when it begins with the prompt: server-context.cpp, `is_begin`), and
the model. The parts of TPOT: the engine, sampling as in the server, and the stream (the same request without streaming
has none).

`prompt_ms` and `predicted_ms` of llama-server begin with the prompt's first step and end with a sampled token
(server-common.h, `server_slot_stats`), like TTFT and TPOT of a run in process. Their difference is a part too: other
settings, or variation between processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.analysis import disturbances
from lab.analysis.wording import digits
from lab.core import phases, shown
from lab.core import request_times as times
from lab.core.lists import grouped
from lab.core.record import OK, Record, Run
from lab.core.request import NO, UNKNOWN, YES, Request, RequestRecord
from lab.core.request_times import figures

TTFT, TPOT = "TTFT", "TPOT"
ENGINE = "engine in process"
SAMPLING = "sampling"
OTHERWISE = "engine difference"
STREAM = "stream"
HTTP = "HTTP and client"
TEMPLATE = "templating"
TOKENIZE = "tokenising"
SLOT = "scheduling"
UNEXPLAINED = "not explained"
ORDER = (ENGINE, SAMPLING, OTHERWISE, STREAM, HTTP, TEMPLATE, TOKENIZE, SLOT)

PartTimes = dict[str, float | None]
"""Milliseconds of each part of a block; None if it cannot be measured on the server."""


@dataclass(frozen=True)
class PartTime:
    """One part: its mean over the middle blocks, and its range over all, in ms. Negative: the server needs less."""

    name: str
    ms: float
    low_ms: float
    high_ms: float

    @property
    def is_noise(self) -> bool:
        """Whether the part is negative, or its sign differs between blocks."""
        return self.ms < 0 or self.low_ms < 0 < self.high_ms


@dataclass(frozen=True)
class Phase:
    """TTFT or TPOT in process and through the server, and the parts of the latter. Means, in ms.

    `spread` is the spread of the engines in process over the blocks: (largest - smallest) / median. `hidden` names
    parts that cannot be measured on this server: they are in the unexplained rest.
    """

    name: str
    in_process_ms: float
    server_ms: float
    parts: tuple[PartTime, ...]
    spread: float
    hidden: tuple[str, ...]

    @property
    def unexplained_ms(self) -> float:
        return self.server_ms - sum(part.ms for part in self.parts)

    @property
    def unexplained(self) -> float:
        """The unexplained share of the whole."""
        return self.unexplained_ms / self.server_ms

    def ms(self, name: str) -> float | None:
        """The time of a part; None if not measured."""
        return next((part.ms for part in self.parts if part.name == name), None)


@dataclass(frozen=True)
class LengthParts:
    """One length of prompts and answers."""

    n_prompt: int
    n_gen: int
    n_blocks: int
    phases: tuple[Phase, ...]
    doubts: tuple[str, ...] = ()  # some of core/shown.py: of the blocks, by their runs in process

    @property
    def n_middle(self) -> int:
        """The number of blocks in the means."""
        return self.n_blocks - 2 * (self.n_blocks // 4)


@dataclass(frozen=True)
class Pair:
    """The run and the request of one block and length: the same tokens in process and through the server."""

    run: Run
    request: Request
    is_disturbed: bool


def pairs(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[Pair]:
    """Successful runs with their successful requests; without those whose prompt was partly cached."""
    runs = {
        (record.session, record.run.block, record.run.n_prompt, record.run.n_gen): record
        for record in records
        if record.run.block is not None and record.run.is_timed
    }
    both = []
    for record in requests:
        asked, request = record.request.asked, record.request
        if request.pieces is None or request.status != OK or asked.warmup or figures(request).is_warm:
            continue
        run = runs.get((record.session, asked.repeat, asked.n_prompt_counted or 0, asked.n_gen))
        if run is not None and not figures(request).is_short:
            both.append(Pair(run.run, request, bool(disturbances.disturbances(run))))
    return both


def rows(records: Sequence[Record], requests: Sequence[RequestRecord]) -> list[LengthParts]:
    """One row for each length, the shortest prompt first."""
    by_length = grouped(
        pairs(records, requests),
        lambda pair: (pair.request.asked.n_prompt or pair.run.n_prompt, pair.request.asked.n_gen),
    )
    made = []
    for length, alike in sorted(by_length.items()):
        ttft = _phase(TTFT, _blocks(alike, times.ttft_ns, phases.ttft_ns, parts_of_ttft))
        tpot = _phase(TPOT, _blocks(alike, times.tpot_ns, phases.tpot_ns, parts_of_tpot))
        doubts = shown.of_runs(len(alike), sum(pair.is_disturbed for pair in alike), 0)
        made.append(LengthParts(*length, len(alike), tuple(filter(None, (ttft, tpot))), doubts))
    return made


def _blocks(
    alike: Sequence[Pair],
    of_request: Callable[[Request], float | None],
    of_run: Callable[[Run], float | None],
    parts: Callable[[Pair, float, float], PartTimes],
) -> list[tuple[float, float, PartTimes]]:
    """For each block with both wholes: that in process, that of the server, and its parts."""
    both = ((pair, _ms(of_run(pair.run)), _ms(of_request(pair.request))) for pair in alike)
    return [(run, its, parts(pair, run, its)) for pair, run, its in both if run is not None and its is not None]


def parts_of_ttft(pair: Pair, engine_ms: float, server_ms: float) -> PartTimes:
    """The parts of the time to the first token of one request."""
    pieces, timings = pair.request.pieces, pair.request.timings
    http = _median_ms(pieces.http_ns) if pieces else None
    template, tokenize = (
        None if column is None or http is None else (_median_ms(column) or 0.0) - http
        for column in ((pieces.template_ns, pieces.tokenize_ns) if pieces else (None, None))
    )
    prompt = timings.prompt_ms if timings else None
    begun = _ms(pair.request.headers_ns)  # the head of the answer: the slot began
    is_head_early = prompt is not None and begun is not None and begun < server_ms - prompt / 2
    slot = None
    if is_head_early and begun is not None:
        slot = begun - sum(ms for ms in (http, template, tokenize) if ms is not None)
    return {
        ENGINE: engine_ms,
        OTHERWISE: None if prompt is None else prompt - engine_ms,
        HTTP: http,
        TEMPLATE: template,
        TOKENIZE: tokenize,
        SLOT: slot,
    }


def parts_of_tpot(pair: Pair, engine_ms: float, _: float) -> PartTimes:
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
    """The median sampling time of a token in process."""
    steps = run.steps
    first = phases.n_prefill_steps(run)
    pairs = zip(steps.ready_ns[first:], steps.end_ns[first:], strict=True)
    return statistics.median(end - ready for ready, end in pairs) / 1e6


def _per_token_ms(gen_ms: float | None, n_gen: int | None) -> float | None:
    """The time per token from llama-server's generation time, which has one step fewer than tokens."""
    return None if gen_ms is None or n_gen is None or n_gen < 2 else gen_ms / (n_gen - 1)


def _phase(name: str, blocks: Sequence[tuple[float, float, PartTimes]]) -> Phase | None:
    """Means over the middle half of the blocks, ordered by the extra time of the server; ranges over all blocks.

    Means add up, unlike medians; leaving out the outer blocks limits the weight of a disturbed one.
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
            PartTime(part, statistics.fmean(its[part] or 0.0 for _, _, its in middle), min(column), max(column))
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


HIDDEN = "threads, ubatch, flash attention and cache types"
"""Settings of the engine that no server reports."""

LEAST = 0.001
"""Sentences leave out parts below this share of the whole."""


@dataclass(frozen=True)
class Setting:
    """One setting on both sides; None if unknown. `same`: yes, no or unknown."""

    name: str
    in_process: str | None
    server: str | None
    same: str


def settings(record: Record, request: RequestRecord) -> list[Setting]:
    """The settings of both sides, and those that only the side in process reports."""
    own, model = record.settings, record.model
    theirs = request.endpoint.settings
    build = theirs.build if theirs else None
    commit = record.machine.llama_cpp_commit
    same_build = UNKNOWN if not build or not commit else YES if commit[:7] in build else NO
    slots = f"{theirs.n_slots}, each of {theirs.n_ctx:,} tokens" if theirs and theirs.n_slots and theirs.n_ctx else None
    threads = str(own.n_threads) + ("" if own.n_threads == own.n_threads_batch else f", prefill {own.n_threads_batch}")
    return [
        _held("model file", model.file.rpartition("/")[2], theirs.model_file if theirs else None),
        _held("quantization", model.quantization, theirs.quantization if theirs else None),
        Setting("llama.cpp", commit, build, same_build),
        Setting("slots", f"1, of {own.n_ctx:,} tokens", slots, UNKNOWN),
        Setting("threads", threads, None, UNKNOWN),
        Setting("ubatch", f"{own.n_ubatch:,}", None, UNKNOWN),
        Setting("flash attention", own.flash_attn_resolved or own.flash_attn, None, UNKNOWN),
        Setting("cache types", f"{own.type_k}, {own.type_v}", None, UNKNOWN),
    ]


def _held(name: str, own: str | None, theirs: str | None) -> Setting:
    same = UNKNOWN if own is None or theirs is None else YES if own.lower() == theirs.lower() else NO
    return Setting(name, own, theirs, same)


def sentences(rows: Sequence[LengthParts]) -> list[str]:
    """Sentences on the parts."""
    words = []
    for row in rows:
        if not shown.is_firm(row.doubts):
            words.append(
                f"No verdict for prompts of {row.n_prompt:,} tokens: at least half of the blocks were disturbed. "
                "Measure again while no other program runs."
            )
            continue
        for phase in row.phases:
            words.append(_difference(row, phase))
            words += [sentence for sentence in (_otherwise(phase), _hidden(phase)) if sentence]
    return words


def _difference(row: LengthParts, phase: Phase) -> str:
    more_ms = phase.server_ms - phase.in_process_ms
    way = "slower" if more_ms >= 0 else "faster"
    what = f"to the first token of {row.n_prompt:,} prompt tokens" if phase.name == TTFT else "for each further token"
    named = sorted(
        (
            part
            for part in phase.parts
            if part.name != ENGINE and not part.is_noise and abs(part.ms) >= LEAST * phase.server_ms
        ),
        key=lambda part: -abs(part.ms),
    )
    parts = [f"{part.name} {_signed(part.ms)}" for part in named] + [f"not explained {_signed(phase.unexplained_ms)}"]
    noise = [part.name for part in phase.parts if part.is_noise]
    around = f" Noise around zero: {', '.join(noise)}." if noise else ""
    both = f"{digits(phase.server_ms)} instead of {digits(phase.in_process_ms)} ms"
    percent = 100 * abs(more_ms) / phase.in_process_ms
    return f"The server is {percent:.1f} % {way} {what}, {both}. In ms: {', '.join(parts)}.{around}"


def _signed(ms: float) -> str:
    return f"{'-' if ms < 0 else '+'}{digits(abs(ms))}"


def _otherwise(phase: Phase) -> str | None:
    """A sentence on whether the engine in the server differs by more than engines in process do."""
    ms = phase.ms(OTHERWISE)
    if ms is None or abs(ms) < LEAST * phase.server_ms:
        return None
    share, spread = 100 * abs(ms) / phase.in_process_ms, 100 * phase.spread
    of_blocks = f"The server's engine differs by {share:.1f} % in {phase.name}, engines in process by {spread:.1f} %"
    if share <= spread:
        return f"{of_blocks} between blocks: this can be variation between processes, or the machine."
    return f"{of_blocks} between blocks: compare the server's {HIDDEN} (which it does not report) with those above."


def _hidden(phase: Phase) -> str | None:
    if not phase.hidden:
        return None
    return (
        f"{phase.name}: {', '.join(phase.hidden)} cannot be measured on this server and are part of what is not "
        "explained."
    )
