"""One token's way: what each operation of each layer takes of a prefill and of a decode step.

The engine stops after every operation (child.py). A stop costs time, which operations that compute nothing
(views) show, and the CPU's threads start and end at each: that is taken off every other operation. Then the sum of all
operations must be the time of the same step without stops; `Phase.off` says how far it is from that. Bytes and FLOPs
follow from the tensors' shapes and types. The ceiling of an operation is that of its kernel (lab ceilings).

Attention weights, layer by layer: a token asks (its query), and all tokens up to it answer (their keys). In prefill all
tokens ask at once, so the weights are a triangle; in decode only the new token asks, so they are one row. No step needs
the query of an earlier token, so the cache has keys and values only. K and V of a token depend on the tokens before it,
except in the first layer.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import click

from lab.cli.help import Command
from lab.cli.options import OUTPUT, SETTINGS, TOKENS, with_options
from lab.core import cost, shape
from lab.core.asked_settings import SettingsKeywords, check_number
from lab.core.lists import grouped, join_and, plural
from lab.core.memory import device_of
from lab.core.payloads import SAMPLING, Attention, Part, Phase, TokenTrace
from lab.core.record import Ceilings, Device, Model, Record, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.features.limits import probing, step_kernels
from lab.features.running import RESULTS, Output
from lab.features.serve.command import given
from lab.features.trace import nodes
from lab.features.trace.nodes import Node, StepTrace
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.cases import Plan, run_without_steps
from lab.runner.plan import make_plan
from lab.runner.session import new_results_file

ON_ONE_THREAD = ("GET_ROWS", "SET_ROWS", "SCALE")
"""Operations that the CPU never shares among threads (ggml_get_n_tasks of ggml-cpu.c)."""

EMPTY = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
"""Operations of ggml that only look at a tensor in another way."""

OPERATIONS = tomllib.loads(Path(__file__).with_name("operations.toml").read_text(encoding="utf-8"))
"""Names of operations by the weights that they use and by what ggml calls them, and families of these names."""

ATTENTION, COPIES, OUTSIDE, OUTPUT_MATRIX = "attention", "copy between devices", "outside operations", "last matrix"

_COPIED = re.compile(r"[^#]+#.+#\d+")
"""How ggml's scheduler names what it copies to the device of the next operations."""

MOST_TOKENS = 32
"""Tokens of a text whose attention weights can still be drawn."""


def trace(
    prompt_len: int = 200,
    gen: int = 8,
    repeat: int = 5,
    model: str = catalog.DEFAULT,
    *,
    results: str | Path = "results",
    out: str | Path = "results",
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[SettingsKeywords],
) -> Record:
    """Trace prefill of a prompt and `gen` decode steps after it, `repeat` times, in turns with untraced ones.

        traced = lab.trace(200, threads=2).run.trace

    `results` is the folder with the ceilings. Keeps what it found in a results file in `out`. LabError for what does
    not fit into memory.
    """
    check_number("gen", gen, 1000)
    check_number("repeat", repeat, 1000)
    with Worker() as worker:
        plan = make_plan(worker, [prompt_len], gen + 1, 1, model, watch=watch, **settings)
        if plan.refused:
            raise LabError(" ".join(plan.refused.values()), "Use a shorter prompt or a smaller model.")
        asked = dataclasses.replace(plan.settings, n_batch=max(plan.settings.n_batch, prompt_len))
        vocabulary = worker.load(plan.file.path, asked)
        if plan.prompt.text is None:
            tokens = prompts.random_ids(prompt_len, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0)
        else:
            ids = worker.tokenize(plan.prompt.text)
            tokens = prompts.cut(ids, prompt_len, prompts.offset(plan.seed, 0, len(ids)), vocabulary.bos)
        chosen = worker.new_context(asked)
        placed = worker.placement()
        where = probing.place_of(plan.machine, plan.model, chosen, placed)
        traced = nodes.trace(worker, tokens, gen, repeat)
    known = probing.known(probing.kept(Path(results), lambda sentence: None), where)
    prefill, decode = (
        phase(name, steps, plan.model, chosen, known, plan.machine.devices)
        for name, steps in (("prefill", traced.prefill), ("decode", traced.decode))
    )
    seen = TokenTrace(prefill, decode, known.measured_at if known else None)
    return _kept(plan, chosen, out, prompt_len, gen + 1, trace=seen, placement=placed)


def attention(
    text: str,
    model: str = catalog.DEFAULT,
    *,
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[SettingsKeywords],
) -> Attention:
    """The attention weights of a short text without flash attention, and how K and V depend on its first token.

        lab.attention("The cat sat on the mat").looks.changes

    The text's first token is replaced by its last other one. LabError for a text of fewer than 3 or over MOST_TOKENS
    tokens, or of equal ones.
    """
    seen = look(text, model, None, watch, **settings).run.attention
    assert seen is not None
    return seen


def look(
    text: str,
    model: str,
    out: str | Path | None,
    watch: obtain.ShowTransfer,
    **settings: Unpack[SettingsKeywords],
) -> Record:
    """`attention` as a run, in a results file in `out` unless that is None."""
    if settings.get("flash_attn", "off") == "on":
        raise LabError("Flash attention never writes the weights.", "Look at them with --flash-attn off.")
    settings["flash_attn"] = "off"
    with Worker() as worker:
        plan = make_plan(worker, [MOST_TOKENS], 1, 1, model, watch=watch, **settings)
        if plan.refused:
            raise LabError(" ".join(plan.refused.values()), "Use a smaller model.")
        sizes = {name: max(getattr(plan.settings, name), MOST_TOKENS) for name in ("n_ubatch", "n_batch")}
        asked = dataclasses.replace(plan.settings, **sizes)
        vocabulary = worker.load(plan.file.path, asked)
        own = worker.tokenize(text)
        tokens = own if vocabulary.bos is None else [vocabulary.bos, *own]
        if not 3 <= len(own) <= len(tokens) <= MOST_TOKENS:
            raise LabError(
                f"The text has {plural(len(own), 'token')} in {plan.model.name}.",
                f"Give one of 3 to {MOST_TOKENS - 1}: 'The cat sat'.",
            )
        chosen = worker.new_context(asked)
        others = [token for token in own if token != own[0]]
        if not others:
            raise LabError(f"All tokens of the text {text!r} are equal.", "Give another one: 'The cat sat'.")
        replaced = len(tokens) - len(own)
        looks, pieces = nodes.look(worker, tokens, replaced, others[-1]), worker.pieces()
        *texts, other = (pieces[token].decode(errors="replace") or f"<{token}>" for token in (*tokens, others[-1]))
    seen = Attention(text, tuple(texts), replaced, other, looks)
    return _kept(plan, chosen, out, len(tokens), 1, attention=seen)


def _kept(plan: Plan, settings: Settings, out: str | Path | None, n_prompt: int, n_gen: int, **found: Any) -> Record:
    """A record of what was found, in a results file of its own unless there is no folder."""
    record = Record("", plan.machine, plan.model, settings, run_without_steps(n_prompt, n_gen, **found))
    if out is None:
        return record
    path = new_results_file(plan, Path(out))
    record = dataclasses.replace(record, session=path.stem)
    with unless_empty(path):
        save(path, record)
    return record


def phase(
    name: str,
    steps: StepTrace,
    model: Model,
    settings: Settings,
    ceilings: Ceilings | None = None,
    devices: Sequence[Device] = (),
) -> Phase:
    """Arithmetic on the stamps of steps: the cost of a stop taken off, and what moves between devices."""
    held_by = [device_of(node.buffer, devices) for node in steps.nodes]  # CUDA0, CPU
    placed = list(zip(steps.nodes, held_by, strict=True))
    views = grouped((one for one in placed if one[0].op in EMPTY), lambda one: one[1])
    stops_ns = {device: statistics.median(node.ns for node, _ in own) for device, own in views.items()}
    usual_gap_ns = statistics.median(node.gap_ns for node in steps.nodes)
    by_device = {probing.label(one.device): one for one in probing.each_device(ceilings)} if ceilings else {}
    n_threads = settings.n_threads if steps.n_tokens == 1 else settings.n_threads_batch
    parts, copied, layer = list[Part](), set[str](), None
    for node, device in placed:
        operation, layer = place_of(node, layer)
        arriving = [one for one in node.sources if _COPIED.fullmatch(one.name) and one.name not in copied]
        if arriving:
            copied |= {one.name for one in arriving}
            gap_s = (node.gap_ns - usual_gap_ns) / 1e9
            parts.append(Part(COPIES, layer, device, sum(one.n_bytes for one in arriving), None, gap_s))
        if node.op in EMPTY:
            continue
        threads_ns = steps.threads_ns if device == "CPU" and node.op not in ON_ONE_THREAD else 0
        seconds, (n_bytes, flops) = (node.ns - stops_ns.get(device, 0) - threads_ns) / 1e9, cost_of(node)
        least_s = _least_s(node, steps, model, by_device.get(device), n_threads)
        held_s = 0.0 if least_s is None else seconds
        parts.append(Part(operation, layer, device, n_bytes, flops, seconds, least_s, held_s))
    for operation, nanoseconds in ((OUTSIDE, steps.outside_ns), (SAMPLING, steps.choosing_ns)):
        parts.append(Part(operation, None, "CPU", None, None, nanoseconds / 1e9))
    return Phase(
        name,
        steps.n_tokens,
        steps.n_past,
        tuple(summed(parts, lambda part: (part.layer, part.operation, part.device))),
        {name: ns / 1e9 for name, ns in stops_ns.items()},
        steps.untraced_ns / 1e9,
        len(steps.nodes),
        steps.n_steps,
        steps.threads_ns / 1e9 or None,
    )


def summed(parts: Sequence[Part], key: Callable[[Part], object]) -> list[Part]:
    """The sums of parts with equal keys, in the order in which they first appear; None only where nothing is known."""
    made = []
    for alike in grouped(parts, key).values():
        sums: dict[str, Any] = {}
        for name in ("n_bytes", "flops", "seconds", "least_s", "held_s", "n"):
            values = [value for part in alike if (value := getattr(part, name)) is not None]
            sums[name] = sum(values) if values else None
        made.append(dataclasses.replace(alike[0], **sums))
    return made


def _weight(node: Node) -> tuple[int | None, str] | None:
    """The layer and the plain name of the weights that an operation uses: (3, "attn_q"); None without weights."""
    for one in node.sources:
        if match := re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+)\.(?:weight|bias|scale)", one.name.split("#")[-2:][0]):
            return int(match[1]) if match[1] else None, match[2]
    return None


def place_of(node: Node, before: int | None) -> tuple[str, int | None]:
    """What an operation is for, and its layer, by its weights, else by names; `before` is the layer of the one before.

    An operation whose name has no meaning is in the layer of the one before.
    """
    layer, weights = _weight(node) or (None, "")
    name, plain = node.result.name, re.sub(r"_(exps|shexp)$", "", weights)
    if layer is None:
        in_name = re.search(r"(?:-|_l)(\d+)\b", name)
        layer = int(in_name[1]) if in_name else before if re.match(r"node_\d+", name) else None
    if "norm" in weights:
        return "norm", layer
    if node.op == "GET_ROWS":
        return "embedding" if weights == "token_embd" else "select rows", layer
    if weights:
        experts = ", experts" if weights.endswith("_exps") else ""
        return OPERATIONS["weights"].get(plain, f"other weights ({weights})") + experts, layer
    if name.startswith(("kq", "v_cont")):
        return ATTENTION, layer
    return OPERATIONS["ops"].get(node.op, f"other ({node.op.lower()})"), layer


def cost_of(node: Node) -> tuple[float, float | None]:
    """Bytes that an operation reads, of rows and experts only those that are used; FLOPs of products and attention.

    Attention counts all positions that its tensors have.
    """
    first, result = node.sources[0], node.result
    n_bytes = float(sum(one.n_bytes for one in node.sources))
    if node.op == "SET_ROWS":  # the others are the positions, and the cache, which is written
        return sum(one.n_bytes for one in node.sources[:2]), None
    if node.op == "GET_ROWS":
        return n_bytes - first.n_bytes * (1 - math.prod(result.ne[1:]) / math.prod(first.ne[1:])), None
    if node.op == "FLASH_ATTN_EXT":
        keys, values = node.sources[1:3]
        return n_bytes, 2.0 * math.prod(first.ne[1:]) * keys.ne[1] * (keys.ne[0] + values.ne[0])
    if node.op == "MUL_MAT_ID":
        matrix = _matrix(node)
        n_used, n_tokens = node.sources[2].ne[:2]
        n_bytes -= first.n_bytes * (1 - shape.n_experts_read(matrix, n_used, n_tokens) / matrix.n_expert)
    return n_bytes, 2.0 * first.ne[0] * math.prod(result.ne) if node.op in ("MUL_MAT", "MUL_MAT_ID") else None


def _matrix(node: Node) -> shape.Matrix:
    one = node.sources[0]
    part = shape.EXPERTS if node.op == "MUL_MAT_ID" else shape.FEED_FORWARD
    return shape.Matrix(part, one.type, one.ne[1], one.ne[0], 1, one.ne[2])


def _least_s(node: Node, steps: StepTrace, model: Model, ceilings: Ceilings | None, n_threads: int) -> float | None:
    """Seconds of an operation at the ceiling of its kernel; None where none is known.

    Attention counts as in `lab explain`: only the positions that tokens see, and not the masked rest of its tensors.
    """
    if ceilings is None:
        return None
    try:
        if node.op == "FLASH_ATTN_EXT":
            query, keys, values = node.sources[:3]
            seen = cost.attended(model, steps.n_tokens, steps.n_past) or []
            if len(seen) != 1 or query.ne[1] != steps.n_tokens:  # layers that differ, or a part of the prompt
                return None
            flops = 2 * query.ne[2] * seen[0].n_pairs * (keys.ne[0] + values.ne[0])
            return flops * step_kernels.attention_s_per_flop(
                ceilings, model, seen[0].heads, keys.type, steps.n_tokens, n_threads, seen[0].n_positions
            )
        if node.op in ("MUL_MAT", "MUL_MAT_ID") and _weight(node):
            n_tokens = node.result.ne[1] if node.op == "MUL_MAT" else node.result.ne[2]
            n_bytes = cost_of(node)[0] - sum(one.n_bytes for one in node.sources[1:])
            return n_bytes * step_kernels.product_s_per_byte(ceilings, model, _matrix(node), n_tokens, n_threads)
    except LabError:  # this kernel was not probed
        pass
    return None


@click.command("trace", cls=Command, first=("model", "prompt-len", "gen", "repeat", "attention", "threads"))
@with_options(
    click.option("--prompt-len", "-p", type=TOKENS, default=200, show_default=True, help="Tokens of the prompt."),
    click.option("--gen", "-n", default=8, show_default=True, help="Decode steps to trace after each prefill."),
    click.option("--repeat", "-r", default=5, show_default=True, help="How often to trace prefill and these steps."),
    click.option(
        "--attention",
        "text",
        metavar="TEXT",
        help="Show what each token of this text attends to, layer by layer, instead.",
    ),
    *SETTINGS,
    click.option("--ceilings", "results", default=RESULTS, show_default=True, help="Folder with the ceilings."),
    *OUTPUT,
)
def command(text: str | None, **asked: Any) -> None:
    """Show where the time of one token goes, operation by operation.

    \b
      lab trace                             # a prompt of 200 tokens
      lab trace -p 1000 -m llama-3.2-3b
      lab trace --attention "The cat sat on the mat"

    Follows a prefill and decode steps through llama.cpp. For each operation (norm, Q, K, V, attention, feed-forward,
    the last matrix, sampling) prints the bytes read, FLOPs, time, and the share of the kernel's ceiling (lab ceilings).

    The engine stops after each operation. Views, which compute nothing, show what a stop costs; that is taken off. The
    same steps run in turns without stops, and the output says how far the sum is from them. Keep the machine quiet.
    With several devices the copies between them are an operation of their own. The picture shows all layers. The
    results file keeps all figures, for lab show and lab report.
    """
    from lab.show import console, text_setup

    unused = {"prompt_len": "--prompt-len", "gen": "--gen", "repeat": "--repeat", "results": "--ceilings"}
    output, err = Output.taken_from(asked), console.console(stderr=True)
    if text is not None:
        if found := [unused[name] for name in sorted(unused) if name in given(click.get_current_context())]:
            raise LabError(
                f"--attention looks at its own text once and does not use {join_and(found)}.",
                f"Leave {join_and(found)} out, or trace times without --attention.",
            )
        asked = {name: value for name, value in asked.items() if name not in unused}
    with console.transfer(err) as watch:
        find = trace if text is None else lambda **settings: look(text, **settings)
        record = find(**asked, out=output.folder, watch=watch)
    for line in text_setup.describe(record.machine, record.model):
        err.print(line)
    output.finish([record], output.folder / f"{record.session}.jsonl")
