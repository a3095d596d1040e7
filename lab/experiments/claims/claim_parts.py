"""The parts of a session of claims: a few measurements under fixed names, each used by several claims.

Parts with one model under one setting run in rounds, as in `lab measure`. Parts that compare run in blocks with fresh
engines, as in `lab ab`, but with one turn, because more blocks then fit into the time. Their variants: threads `all`
and `half`; quantizations, cache and heads by their type or model's name; flash and buffers `on` and `off`. Parts that
no script can make (`dependence`, `queue`) have a function that makes their runs, which have no steps.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import request_times, stats
from lab.core.levers import LOOKUP
from lab.core.record import OK, Arrivals, Model, Record, Run, Steps
from lab.core.request import CONSTANT, Request
from lab.errors import LabError
from lab.experiments import batching, prefix_cache, speculation, stalls
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import load_plan, loading, own_server, prompts, side_by_side
from lab.runner.cases import Case, Plan, measured_run, utc_now
from lab.runner.plan import make_plan, with_cases
from lab.runner.progress import ShowStatus, Status
from lab.runner.servers import connect, prompt_text
from lab.why import attention_weights

CEILINGS = "ceilings"
"""The part of claims whose figures need the machine's ceilings; measured if unknown."""

LONGEST = 8000
"""Positions of the walk through the context, unless the model was trained for fewer."""

TIMEOUT_S, LEAST_S, FEWEST_DUE = 300.0, 8.0, 8
"""Of requests to a server: when one times out, and how long they are sent and how many, at least."""

SENTENCE = "The cat sat on the mat"
"""Its first token is replaced, to see what K and V of the others depend on."""

FEW_HEADS, ALL_HEADS = "smollm2-135m", "smollm2-135m-mha"
"""Shapes of the catalog that differ only in their heads for keys and values."""


@dataclass(frozen=True)
class Trial:
    """One plan in rounds, or several in blocks, by the names of their variants.

    `measure`: makes the runs of one plan that is more than scripts.
    """

    plans: Mapping[str, Plan]
    n_blocks: int = 0
    measure: Callable[[Plan, Worker, ShowStatus], Iterator[Run]] | None = None

    @property
    def n_runs(self) -> int:
        """Planned timed runs."""
        return sum(len(plan.cases) * (self.n_blocks or plan.n_repeat) for plan in self.plans.values())

    def of_part(self, part: str, is_quick: bool) -> Trial:
        """The same, with plans that write the part's name and `is_quick` into every run."""
        plans = self.plans.items()
        named = {key: dataclasses.replace(plan, part=part, is_quick=is_quick) for key, plan in plans}
        return dataclasses.replace(self, plans=named)


@dataclass(frozen=True)
class Asked:
    """The input for planning parts. `settings` are those of `make_plan`; `base` is a plan made from them."""

    worker: Worker
    settings: Mapping[str, Any]
    base: Plan
    folder: Path  # for saved states
    is_quick: bool

    def plan(self, lengths: str | Sequence[int], gen: int, repeat: int, **changes: Any) -> Plan:
        """A plan of plain runs, with some settings changed."""
        return make_plan(self.worker, lengths, gen, repeat, **{**self.settings, **changes})


@dataclass(frozen=True)
class Part:
    """A part of the session. `plan` raises a LabError if it cannot be measured here.

    `seconds` and `quick_s` (None: not in a quick session) are its times on 2 cores of an EPYC with the embedded model.
    """

    name: str
    what: str
    seconds: float
    quick_s: float | None
    plan: Callable[[Asked], list[Trial]]


def _in_rounds(plan: Plan) -> list[Trial]:
    return [Trial({"": plan})]


def _in_blocks(plans: dict[str, Plan], n_blocks: int) -> list[Trial]:
    side_by_side.check(plans)
    return [Trial(plans, n_blocks)]


def _lengths(asked: Asked) -> list[Trial]:
    if asked.is_quick:
        return _in_rounds(asked.plan("100,500,1000", gen=64, repeat=3))
    return _in_rounds(asked.plan("100,500,1000,2000", gen=200, repeat=5))


def _threads(asked: Asked) -> list[Trial]:
    n_threads = asked.base.settings.n_threads
    if n_threads < 2:
        raise LabError("The session has one thread, which cannot be halved.", "On several cores: --threads 2")
    n_blocks = 3 if asked.is_quick else 6
    sides = {"all": n_threads, "half": n_threads // 2}
    plans = {name: asked.plan("512", 64, n_blocks, threads=n, threads_batch=n) for name, n in sides.items()}
    return _in_blocks(plans, n_blocks)


def _context(asked: Asked) -> list[Trial]:
    gen, model = 16, asked.base.model
    every, most, repeat = (512, 2048, 1) if asked.is_quick else (1000, LONGEST, 2)
    longest = min(most, (model.n_ctx_train or LONGEST) - gen)
    if longest < 2 * every:
        raise LabError(f"The context of {model.name} ({longest + gen:,} tokens) is too short to measure a slope.")
    return _in_rounds(asked.plan([longest // every * every], gen, repeat, every=every))


def _batch(asked: Asked) -> list[Trial]:
    numbers, repeat = ("1,4,16", 1) if asked.is_quick else ("1,2,4,8,16", 3)
    return _in_rounds(batching.plan(asked.worker, numbers, "256", 16, repeat, **asked.settings))


def _heads(asked: Asked) -> list[Trial]:
    """Always the same two models, whose difference is known."""
    plans = {
        name: asked.plan([3000], 16, 2, every=500, model=f"synthetic:{name}", prompt="random")
        for name in (FEW_HEADS, ALL_HEADS)
    }
    return _in_blocks(plans, 2)


def _quantizations(asked: Asked) -> list[Trial]:
    kinds, n_blocks = (("Q8_0", "Q4_0"), 3) if asked.is_quick else (("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M"), 6)
    spec = catalog.parse(asked.settings["model"])
    if spec.entry is None:
        raise LabError(
            f"{spec.text} is not in the lab's list of models, so it cannot be made in other quantizations.",
            "Use a model of the list: lab models",
        )
    is_synthetic = spec.source == catalog.SYNTHETIC
    if not is_synthetic and obtain.locate(catalog.parse(spec.entry.name)) is None:
        raise LabError(
            f"Other quantizations are made from {spec.entry.name}, which is not on this machine.",
            f"Get it first: lab models pull {spec.entry.name}",
        )
    prefix = "synthetic:" if is_synthetic else ""
    plans = {kind: asked.plan("64", 64, n_blocks, model=f"{prefix}{spec.entry.name}:{kind}") for kind in kinds}
    return _in_blocks(plans, n_blocks)


def _flash(asked: Asked) -> list[Trial]:
    plans = {name: asked.plan("256,1000,4000", 2, 3, flash_attn=name) for name in ("on", "off")}
    return _in_blocks(plans, 3)


def _buffers(asked: Asked) -> list[Trial]:
    """Short prompts in long contexts: llama.cpp allocates its buffers for a whole context."""
    longest = min(asked.base.model.n_ctx_train or LONGEST, LONGEST)
    plans = {name: asked.plan("16", 2, 1, flash_attn=name) for name in ("on", "off")}
    long = {name: with_cases(plan, [Case(16, 2, sequences=(longest,))], measured_run) for name, plan in plans.items()}
    return _in_blocks(long, 1)


def _dependence(asked: Asked) -> list[Trial]:
    plan = asked.plan([attention_weights.MOST_TOKENS], 1, 1, flash_attn="off")
    return [Trial({"": plan}, measure=_first_token_replaced)]


def _first_token_replaced(plan: Plan, worker: Worker, watch: ShowStatus) -> Iterator[Run]:
    """A run that holds how K and V of later tokens change when the first token is replaced."""
    watch(Status("comparing K and V"))
    worker.use(plan.backend)
    started_at, (found, _) = utc_now(), attention_weights.of_text(worker, plan, SENTENCE)
    yield _plain(Case(len(found.tokens), 1), started_at, changes=found.looks.changes)


def _queue(asked: Asked) -> list[Trial]:
    own_server.check()
    return [Trial({"": asked.plan("64", 16, 1)}, measure=_arrivals)]


def _arrivals(plan: Plan, worker: Worker, watch: ShowStatus) -> Iterator[Run]:
    """A run for requests at half the capacity of a server, and one for twice of it, each until its queue is empty."""
    watch(Status("starting a server"))
    settings, (case,) = plan.settings, plan.cases
    started = own_server.start(plan.file.path, plan.model.name, settings.n_threads, settings.n_gpu_layers)
    try:
        with connect(started.url, timeout=TIMEOUT_S) as server:

            def requests(duration_s: float, **load: Any) -> list[Request]:
                load |= {"prompt_len": case.n_prompt, "gen": case.n_gen, "duration": duration_s}
                loads = load_plan.make_plan(warmup=0.0, rounds=1, **load)
                (window,) = loads.windows
                asks = loading.asks_of(loads, server, prompt_text(prompts.TEXT), lambda words: watch(Status(words)))
                watch(Status(f"sending requests, {window.load.label}"))
                n_most = loads.max_requests if window.times_ns is None else len(window.times_ns)
                sent = server.client.run(loading.send_plan(loads, window, server, asks, n_most))
                return [reply.request for reply in sent]

            times_s = [(one.ended_ns or 0) / 1e9 for one in requests(LEAST_S, concurrency=1) if one.status == OK]
            if not times_s or not min(times_s) > 0:
                raise LabError("The server answered no request.", "Start it by itself: python -m llama_cpp.server")
            capacity = 1 / statistics.median(times_s)
            for share in (0.5, 2.0):
                started_at, rate = utc_now(), share * capacity
                found = requests(max(LEAST_S, FEWEST_DUE / rate), rate=rate, arrivals=CONSTANT)
                yield _plain(case, started_at, arrivals=arrivals(found, rate, capacity))
    finally:
        started.end()


def arrivals(requests: Sequence[Request], rate: float, capacity: float) -> Arrivals:
    """When the requests of an open loop were due, and their TTFT from then (E2E if the answer came at once)."""
    known = []
    for one in requests:
        first = request_times.ttft_ns(one) or request_times.e2e_ns(one)
        late = request_times.dispatch_delay_ns(one)
        if one.status == OK and one.scheduled_ns is not None and first is not None and late is not None:
            known.append((one.scheduled_ns, late + first))
    known.sort()
    due_ns, ttft_ns = tuple(due for due, _ in known), tuple(ttft for _, ttft in known)
    return Arrivals(rate, capacity, due_ns, ttft_ns, len(requests) - len(known))


def _plain(case: Case, started_at: str, **found: Any) -> Run:
    """A run without steps, with what was found instead."""
    return Run(
        n_prompt=case.n_prompt,
        n_gen=case.n_gen,
        repeat=0,
        warmup=False,
        started_at=started_at,
        status=OK,
        steps=Steps(),
        token_ids=(),
        **found,
    )


def _cache(asked: Asked) -> list[Trial]:
    """No longer prompts, because on a CPU prefill with a q4_0 cache takes four times as long as with f16."""
    plans = {kind: asked.plan("3500", 32, 3, cache_type_k=kind, cache_type_v=kind) for kind in ("f16", "q8_0", "q4_0")}
    return _in_blocks(plans, 3)


def _speculation(asked: Asked) -> list[Trial]:
    """Drafts by lookup, and by the same model in a smaller quantization if that can be made."""
    if asked.base.file.source == catalog.SYNTHETIC:
        raise LabError("With random weights no draft is accepted.", "Use a model with real weights.")
    texts = asked.settings.get("prompt", prompts.TEXT)
    if texts == prompts.TEXT:
        texts = "code,table,story" if asked.is_quick else speculation.DEFAULT_TEXTS

    def plan(draft: str, lengths: str, n_blocks: int) -> Trial:
        settings = {**asked.settings, "prompt": texts}
        return Trial({"": speculation.plan(asked.worker, draft, lengths, 256, 64, n_blocks, **settings)})

    if asked.is_quick:
        return [plan(LOOKUP, "4", 3)]
    trials, spec = [plan(LOOKUP, "2,4", stats.fewest_for_interval())], catalog.parse(asked.settings["model"])
    smaller = next(kind for kind in ("Q4_0", "Q2_K") if kind != asked.base.model.quantization)
    if spec.entry is not None and obtain.locate(catalog.parse(spec.entry.name)) is not None:
        try:
            trials.append(plan(f"{spec.entry.name}:{smaller}", "3", stats.fewest_for_interval()))
        except LabError as problem:  # lookup can be judged without
            looked_up = trials[0].plans[""]
            warning = f"Only drafts by lookup are measured: {problem}"
            trials = [Trial({"": dataclasses.replace(looked_up, warnings=(*looked_up.warnings, warning))})]
    return trials


def _prefix(asked: Asked) -> list[Trial]:
    most = (asked.base.model.n_ctx_train or LONGEST) - prefix_cache.DEFAULT_SUFFIX - 1
    lengths = [n for n in ((64, 256, 1024) if asked.is_quick else (64, 256, 1024, 4096)) if n <= most]
    repeat = 1 if asked.is_quick else 3
    return _in_rounds(prefix_cache.plan(asked.worker, lengths, repeat=repeat, folder=asked.folder, **asked.settings))


def _no_cache(asked: Asked) -> list[Trial]:
    return _in_rounds(asked.plan("16,32,64,128,256,512", 1, 1 if asked.is_quick else 3))


def _stall(asked: Asked) -> list[Trial]:
    repeat = 1 if asked.is_quick else 3
    return _in_rounds(stalls.plan(asked.worker, 1024, "64,256", "2", repeat, **asked.settings))


PARTS = {
    part.name: part
    for part in (
        Part("lengths", "prompts of several lengths, with generated tokens", 115, 25, _lengths),
        Part("no_cache", "prompts with one generated token: a step without a KV cache", 11, 4, _no_cache),
        Part("context", "one walk through the context", 105, 10, _context),
        Part("batch", "sequences decoded together", 80, 20, _batch),
        Part("prefix", "a prefix cold, cached and restored", 80, 8, _prefix),
        Part("stall", "a long prompt beside running answers, in chunks and all at once", 55, 20, _stall),
        Part("threads", "all threads against half of them", 48, 24, _threads),
        Part("quantizations", "the same model in several quantizations", 45, 20, _quantizations),
        Part("flash", "flash attention on and off", 150, None, _flash),
        Part("buffers", "memory of a long context, with flash attention on and off", 6, 6, _buffers),
        Part("dependence", "K and V of a sentence, with another first token", 3, 3, _dependence),
        Part("queue", "requests to a server at half and at twice its capacity", 60, None, _queue),
        Part("cache", "KV caches of several types", 345, None, _cache),
        Part("heads", "two shapes that differ in the heads for keys and values", 55, None, _heads),
        Part("speculation", "tokens drafted and verified together", 240, 40, _speculation),
    )
}
"""All parts by name, in the order in which they are measured."""


def is_quick(records: Sequence[Record]) -> bool:
    """Whether these are the runs of a quick session."""
    return any(record.run.is_quick for record in records)


def expected_s(name: str, is_quick_session: bool, model: Model) -> float:
    """The estimated seconds of a part, in proportion to the model's weights."""
    part, known = PARTS[name], catalog.entries()[catalog.DEFAULT].n_bytes or 1
    seconds = (part.quick_s if is_quick_session else part.seconds) or 0.0
    return seconds * max(1.0, (model.n_bytes or known) / known)
