"""`lab overhead`: the same model in process and through a server, in turns.

A server is slower than the model in process for many reasons: HTTP, templates and tokenisers, waiting for a slot,
samplers, a stream that is written while the model computes, other settings. Here both get the same tokens and lengths,
one after the other in random order, in blocks. Each block has a fresh engine in process, and measures each part of the
server separately. overhead_parts.py evaluates the parts.

llama-server's /tokenize reads the whole question before it looks for the text to tokenise: a question without text
costs HTTP and the client alone. /apply-template does the first step of a chat, /tokenize the next (llama.cpp
tools/server/server-context.cpp). The client of the measured requests sends all of them, so each includes its cost.

Idle threads of llama.cpp spin for a moment before they sleep, so the lab waits SETTLE_S after each turn.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import results
from lab.core.record import Record, Run
from lab.core.request import CHAT, Asked, Pieces, Request, RequestRecord, ServerTimings
from lab.endpoints import prompts as server_prompts
from lab.endpoints.access import ask
from lab.endpoints.formats import as_dict, as_number, prompt_fields, timings_of
from lab.endpoints.prompts import Prompt
from lab.endpoints.send_plan import Ask, SendPlan, fresh_nonce
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import machine, progress, prompts
from lab.runner.cases import Case, Plan
from lab.runner.plan import make_plan, parse_lengths
from lab.runner.progress import Reporter, ShowStatus, Status
from lab.runner.servers import Server, connect, reaching_of
from lab.runner.warm_engine import WarmEngine

DEFAULT_LENGTHS, DEFAULT_GEN, N_BLOCKS = "512", 64, 6

SETTLE_S = 0.5
"""Between two turns. An idle llama-server took up to 10 ms of CPU time after an answer, and then none (2 cores,
OpenMP); without OpenMP threads spin for some 0.2 s (ggml-cpu.c, `ggml_graph_compute_poll_for_work`)."""

N_SAMPLINGS = 32
N_WARMUP_GEN = 4
LINE_BYTES = 40_000
N_QUESTIONS = 5
"""Questions of each kind in a block."""

LLAMA_SERVER = "llama-server"

IDLE = {
    "top_n_sigma": -1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0.0,
    "dynatemp_range": 0.0,
}
"""Samplers that the lab cannot time, at the values that disable them."""

GIVEN = "as the server was given"
"""The source of prompts, in the settings of a record."""


@dataclass(frozen=True)
class Turns:
    """A server, and a plan for the same model in process."""

    server: Server
    plan: Plan
    n_blocks: int
    lengths: tuple[int, ...]
    samplers: tuple[tuple[str, float], ...] | None
    new_worker: Callable[[], Worker] = Worker


def overhead(
    url: str,
    model: str = catalog.DEFAULT,
    prompt_len: str | Sequence[int] = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    blocks: int = N_BLOCKS,
    *,
    served_model: str | None = None,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **options: Any,
) -> list[Record | RequestRecord]:
    """Measure a model in process and through a server that has it, in turns. Returns the lines of the results file.

        lines = lab.overhead("http://127.0.0.1:8080/v1", "MODEL.gguf", "512", gen=64)

    `options` are those of `lab.measure` for reaching a server, and the settings of the engine (give those of the
    server). LabError if the server cannot be reached, or has another model.
    """
    how = reaching_of(options)
    settings = {name: value for name, value in options.items() if name not in how}
    with connect(url, served_model, **how) as server:
        with Worker() as worker:
            turns = prepare(server, worker, prompt_len, gen, blocks, model=model, **settings)
        path = new_file(turns, Path(out))
        with progress.in_notebook() as watching:
            return list(execute(turns, path, watch or watching))


def prepare(
    server: Server,
    worker: Worker,
    prompt_len: str | Sequence[int] = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    blocks: int = N_BLOCKS,
    **asked: Any,
) -> Turns:
    """Check everything in advance. LabError for impossible values."""
    if not 1 <= blocks <= 1000:
        raise LabError(f"--blocks {blocks} is not possible.", "Give a whole number from 1 to 1,000.")
    if gen < 2:
        raise LabError(f"--gen {gen} is not possible.", "Give at least 2: the first token needs no decode step.")
    if asked.get("prompt") == prompts.RANDOM:
        raise LabError("Servers do not accept random tokens.", "Use --prompt text, or a file.")
    lengths = parse_lengths(prompt_len)
    plan = make_plan(worker, lengths, gen, blocks, **asked)
    if plan.refused:
        raise LabError(" ".join(plan.refused.values()), "Take shorter prompts or a smaller model.")
    if too_long := server.too_long(max(lengths), gen):
        raise too_long
    plan = dataclasses.replace(
        plan, settings=dataclasses.replace(plan.settings, prompt=GIVEN, prompt_sha256=plan.prompt.sha256)
    )
    return Turns(server, plan, blocks, lengths, samplers(server))


def new_file(turns: Turns, folder: Path) -> Path:
    """A results file for both sides."""
    gen = turns.plan.cases[0].n_gen
    n_bytes = (LINE_BYTES + 250 * gen) * (turns.n_blocks + 1) * len(turns.lengths)
    return results.new_file(folder, f"{machine.slug(turns.plan.model.name)}-overhead", n_bytes)


def execute(turns: Turns, path: Path, watch: ShowStatus) -> Iterator[Record | RequestRecord]:
    """Measure in blocks. Each finished line is appended to `path` and yielded.

    A failed request or run leaves its line, and the block goes on.
    """
    chance = random.Random(turns.plan.seed)
    with results.unless_empty(path):
        for number, length in enumerate(turns.lengths):
            watch(Status("warming up the server"))
            warm_up = _warm_up(turns, path, number, length)
            results.save(path, warm_up)
            yield warm_up
        for block in range(turns.n_blocks):
            for line in _block(turns, path, block, watch, chance):
                results.save(path, line)
                yield line


def _block(
    turns: Turns, path: Path, block: int, watch: ShowStatus, chance: random.Random
) -> Iterator[Record | RequestRecord]:
    """One block: a fresh engine, and for each length both sides, in random order."""
    plan = turns.plan
    cases = chance.sample(list(plan.cases), len(plan.cases))
    todo = [(block, case) for case in cases]
    with turns.new_worker() as worker:
        engine = WarmEngine(plan, worker, Reporter(watch, todo, plan.n_tokens))
        engine.load()
        engine.open(plan.cases)

        def line(run: Run) -> Record:
            return Record(path.stem, plan.machine, engine.model, engine.settings, dataclasses.replace(run, block=block))

        for _, run in engine.warm_up(plan.cases):
            yield line(run)
        sampling_ns = worker.time_sampling(turns.samplers, N_SAMPLINGS) if turns.samplers else None
        for case in cases:
            prompt = turns.server.prompt(case.n_prompt, _text(plan), plan.seed, block)
            ids = token_ids(turns.server, prompt.text)
            _check(ids, prompt.n_tokens, turns)
            sides = [True, False]
            chance.shuffle(sides)
            for is_in_process in sides:
                time.sleep(SETTLE_S)
                if is_in_process:
                    own = dataclasses.replace(case, n_prompt=prompt.n_tokens)
                    yield line(engine.run(own, block, given=ids or ()))
                else:
                    watch(Status("through the server", case, block))
                    yield _through(turns, path, case, block, prompt, sampling_ns)


def _text(plan: Plan) -> str:
    assert plan.prompt.text is not None  # `prepare` refuses random prompts
    return plan.prompt.text


def _check(ids: Sequence[int] | None, n_tokens: int, turns: Turns) -> None:
    """LabError if the server's tokens cannot be those of the model in process."""
    if ids is None:
        return
    n_vocab = turns.plan.model.n_vocab
    if len(ids) != n_tokens or (n_vocab is not None and max(ids) >= n_vocab):
        raise LabError(
            f"The server's tokens are not those of {turns.plan.model.name}.",
            "Give the model file of the server: -m MODEL.gguf",
        )


def _through(
    turns: Turns, path: Path, case: Case, block: int, prompt: Prompt, sampling_ns: tuple[int, ...] | None
) -> RequestRecord:
    """The request of a block, with the times of its parts."""
    server = turns.server
    ask = server.ask(prompt, server.asked(prompt, case.n_prompt, case.n_gen, seed=turns.plan.seed, repeat=block))
    request = _send(server, dataclasses.replace(ask, nonce=None))  # the same prompt as in process
    time.sleep(SETTLE_S)
    of_way = pieces(server, prompt.text, ask, sampling_ns)
    return server.record(path.stem, dataclasses.replace(request, pieces=of_way))


def _warm_up(turns: Turns, path: Path, number: int, length: int) -> RequestRecord:
    server, seed = turns.server, turns.plan.seed
    prompt = server.prompt(length, _text(turns.plan), seed, -1 - number)
    asked = server.asked(prompt, length, N_WARMUP_GEN, seed=seed, warmup=True)
    return server.record(path.stem, _send(server, server.ask(prompt, asked)))


def _send(server: Server, ask: Ask) -> Request:
    return server.counted(ask, server.send(ask))


def token_ids(server: Server, text: str) -> list[int] | None:
    """The server's tokens of a prompt with its template. None if it does not return them."""
    if server.endpoint.server != LLAMA_SERVER:
        return None
    ids = server_prompts.token_ids(server.access, server.endpoint.api, text)
    return ids if isinstance(ids, list) and ids and all(type(one) is int for one in ids) else None


def pieces(server: Server, text: str, sent: Ask, sampling_ns: tuple[int, ...] | None) -> Pieces:
    """The times of the parts of a request for the prompt `text`."""
    if server.endpoint.server != LLAMA_SERVER:
        return Pieces(http_ns=_times(server, {}, None) or (), sampling_ns=sampling_ns)
    is_chat = server.endpoint.api == CHAT
    return Pieces(
        http_ns=_times(server, {"unread": text}, "/tokenize") or (),
        template_ns=_times(server, prompt_fields(CHAT, text), "/apply-template") if is_chat else None,
        tokenize_ns=_times(server, server_prompts.tokenize_fields(text), "/tokenize"),
        whole=_whole(server, sent),
        sampling_ns=sampling_ns,
    )


def samplers(server: Server) -> tuple[tuple[str, float], ...] | None:
    """The samplers of a measured request and their values; None if the lab cannot time them."""
    props = ask(server.access, f"{server.access.root}/props").parsed
    params = as_dict(as_dict(as_dict(props).get("default_generation_settings")).get("params"))
    names = params.get("samplers")
    if not isinstance(names, list) or any(params.get(name, idle) != idle for name, idle in IDLE.items()):
        return None
    named = {"top_k": "top_k", "typ_p": "typical_p", "top_p": "top_p", "min_p": "min_p"}
    values = {name: as_number(params.get(field)) for name, field in named.items()}
    values["temperature"] = server.temperature or 0.0
    return tuple((name, value) for name in names if (value := values.get(name)) is not None)


def _times(server: Server, fields: Mapping[str, Any], path: str | None) -> tuple[int, ...] | None:
    """The times from sending a question to the first byte of its answer, N_QUESTIONS times; None without answers.

    Without `path` it sends an empty request to the interface, which rejects it immediately.
    """
    question = Ask(asked=Asked(n_prompt=None, n_gen=0), body=json.dumps(fields))
    plan = SendPlan(asks=(question,), api=server.endpoint.api, n_requests=N_QUESTIONS, path=path, timeout_s=60.0)
    wanted = 200 if path else None
    replies = [reply.request for reply in server.client.run(plan)]
    answered = [request.headers_ns for request in replies if wanted in (None, request.http_status)]
    return tuple(ns for ns in answered if ns is not None) or None


def _whole(server: Server, sent: Ask) -> ServerTimings | None:
    """The server's times of the same request without streaming, with another nonce."""
    nonce = fresh_nonce(random.Random())
    text = sent.body if sent.nonce is None else sent.body.replace(sent.nonce, nonce, 1)
    answer = server_prompts.ask_whole(server.access, server.endpoint.api, text)
    return timings_of(as_dict(as_dict(answer.parsed).get("timings"))) if answer.status == 200 else None
