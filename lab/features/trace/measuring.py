"""Trace the engine: a token's way through the operations, or what tokens of a text look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from lab.core import script, stored_command
from lab.core.arguments import StrPath
from lab.core.asked_settings import check_number
from lab.core.keywords import EngineSettings
from lab.core.lists import plural
from lab.core.record import Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.features.trace.lines import AttentionLine, Looks, TraceLine
from lab.features.trace.nodes import Trace
from lab.features.trace.phases import phase
from lab.models import catalog, obtain
from lab.process.wire import Vocabulary
from lab.process.worker import Worker
from lab.roofline import probing
from lab.runner import prompts
from lab.runner.cases import Plan, utc_now
from lab.runner.plan import make_plan
from lab.runner.progress import SHORTEST_ANNOUNCED_S, duration
from lab.runner.session import new_results_file

CHILD = "lab.features.trace.child"
STOPPED = 1.3  # times as long takes a round that stops after each operation
MOST_TOKENS = 32  # tokens of a text whose attention weights can still be drawn


def trace(
    prompt_len: int = 200,
    gen: int = 8,
    repeat: int = 5,
    model: str = catalog.DEFAULT,
    *,
    ceilings: StrPath = "results",
    out: StrPath = "results",
    watch: obtain.ShowTransfer = obtain.silently,
    say: Callable[[str], None] = lambda sentence: None,
    **settings: Unpack[EngineSettings],
) -> TraceLine:
    """Trace prefill of a prompt and `gen` decode steps after it, `repeat` times.

        lab.trace(200, threads=2).decode.parts

    Rounds alternate with untraced ones. The folder `ceilings` has the machine's ceilings. Writes
    a results file in `out`. `say` is told how long it will take. LabError for what does not fit
    into memory.
    """
    check_number("gen", gen, 1000)
    check_number("repeat", repeat, 1000)
    with Worker() as worker:
        plan = make_plan(worker, [prompt_len], gen + 1, 1, model, watch=watch, **settings)
        _check(plan, "Use a shorter prompt or a smaller model.")
        n_batch = max(plan.settings.n_batch, prompt_len)
        wide = dataclasses.replace(plan.settings, n_batch=n_batch)
        vocabulary = worker.load(plan.file.path, wide)
        tokens = _prompt(worker, plan, vocabulary, prompt_len)
        chosen = worker.new_context(wide)
        placement = worker.placement()
        seconds = expected_s(worker, tokens, gen, repeat, wide.n_ubatch)
        if seconds >= SHORTEST_ANNOUNCED_S:
            say(f"{plural(repeat, 'round')}: about {duration(seconds)}")
        traced = worker.call(
            Trace, f"{CHILD}.trace", tokens=tokens, n_gen=gen, n_rounds=repeat
        )
    where = probing.place_of(plan.machine, plan.model, chosen, placement)
    known_ceilings = probing.known(probing.kept(Path(ceilings), lambda sentence: None), where)
    devices = plan.machine.devices
    path = new_results_file(plan, Path(out))
    line = TraceLine(
        session=path.stem,
        machine=plan.machine,
        model=plan.model,
        settings=chosen,
        started_at=utc_now(),
        prefill=phase("prefill", traced.prefill, plan.model, chosen, known_ceilings, devices),
        decode=phase("decode", traced.decode, plan.model, chosen, known_ceilings, devices),
        ceilings_measured_at=known_ceilings.measured_at if known_ceilings else None,
        placement=placement,
        command=stored_command.command(),
    )
    _save(path, line)
    return line


def _save(path: Path, line: TraceLine | AttentionLine) -> None:
    with unless_empty(path):
        save(path, line)


def expected_s(
    worker: Worker, tokens: Sequence[int], n_gen: int, n_rounds: int, n_ubatch: int
) -> float:
    """The seconds of a trace: a round with stops and one without, and two that warm up."""
    run = worker.run(script.run(tokens, n_gen + 1, n_ubatch), lambda progress: None)
    run_s = run.steps.end_ns[-1] / 1e9
    return (1 + STOPPED) * (n_rounds + 1) * run_s


def _check(plan: Plan, hint: str) -> None:
    if plan.refused:
        raise LabError(" ".join(plan.refused.values()), hint)


def _prompt(worker: Worker, plan: Plan, vocabulary: Vocabulary, n_tokens: int) -> list[int]:
    if plan.prompt.text is None:
        return prompts.random_ids(n_tokens, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0)
    ids = worker.tokenize(plan.prompt.text)
    return prompts.cut(ids, n_tokens, prompts.offset(plan.seed, 0, len(ids)), vocabulary.bos)


def attention(
    text: str,
    model: str = catalog.DEFAULT,
    out: StrPath | None = None,
    *,
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[EngineSettings],
) -> AttentionLine:
    """The attention weights of a short text, and how K and V depend on its first token.

        lab.attention("The cat sat on the mat").looks.changes

    Without flash attention, which never writes the weights. The text's first token is replaced by
    its last different one. Writes a results file in `out` unless that is None. LabError for a text
    of fewer than 3 or over 32 tokens, or of equal ones.
    """
    if settings.get("flash_attn", "off") == "on":
        raise LabError(
            "Flash attention never writes the weights.", "Look at them with --flash-attn off."
        )
    settings["flash_attn"] = "off"
    with Worker() as worker:
        plan = make_plan(worker, [MOST_TOKENS], 1, 1, model, watch=watch, **settings)
        _check(plan, "Use a smaller model.")
        wide = _for_one_step(plan.settings)
        vocabulary = worker.load(plan.file.path, wide)
        tokens = worker.tokenize(text)
        first = [] if vocabulary.bos is None else [vocabulary.bos]
        replacement = _replacement(text, tokens, len(first), plan.model.name)
        chosen = worker.new_context(wide)
        looks = worker.call(
            Looks,
            f"{CHILD}.look",
            tokens=[*first, *tokens],
            replaced=len(first),
            replacement=replacement,
        )
        pieces = worker.pieces()
    path = None if out is None else new_results_file(plan, Path(out))
    line = AttentionLine(
        session=path.stem if path else "",
        machine=plan.machine,
        model=plan.model,
        settings=chosen,
        started_at=utc_now(),
        text=text,
        tokens=tuple(_piece(pieces, token) for token in (*first, *tokens)),
        replaced=len(first),
        replacement=_piece(pieces, replacement),
        looks=looks,
        command=stored_command.command(),
    )
    if path:
        _save(path, line)
    return line


def _for_one_step(settings: Settings) -> Settings:
    """Settings that read the whole text in one step."""
    return dataclasses.replace(
        settings,
        n_ubatch=max(settings.n_ubatch, MOST_TOKENS),
        n_batch=max(settings.n_batch, MOST_TOKENS),
    )


def _replacement(text: str, tokens: list[int], n_before: int, model: str) -> int:
    """The last token of a text that differs from its first."""
    n_tokens = len(tokens)
    if n_tokens < 3 or n_before + n_tokens > MOST_TOKENS:
        raise LabError(
            f"The text has {plural(n_tokens, 'token')} in {model}.",
            f"Give one of 3 to {MOST_TOKENS - 1}: 'The cat sat'.",
        )
    for token in reversed(tokens):
        if token != tokens[0]:
            return token
    raise LabError(
        f"All tokens of the text {text!r} are equal.", "Give another one: 'The cat sat'."
    )


def _piece(pieces: list[bytes], token: int) -> str:
    return pieces[token].decode(errors="replace") or f"<{token}>"
