"""One token's way: what each operation of each layer takes of a prefill and of a decode step.

The engine stops after every operation (child.py). A stop costs time, which operations that compute nothing
(views) show, and the CPU's threads start and end at each: that is taken off every other operation. Then the sum of all
operations must be the time of the same step without stops; `Phase.off` says how far it is from that. Bytes and FLOPs
follow from the tensors' shapes and types. The ceiling of an operation is that of its kernel (lab ceilings).
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Unpack

from lab.core import cost, shape
from lab.core.asked_settings import SettingsKeywords, check_number
from lab.core.lists import grouped
from lab.core.placement import device_of
from lab.core.record import Buffer, Ceilings, Device, Model, Record, Settings
from lab.core.results import save, unless_empty
from lab.core.traced import SAMPLING, Part, Phase, TokenTrace
from lab.errors import LabError
from lab.features.limits import probing, step_kernels
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

NORM, ATTENTION, EMBEDDING, OUTPUT = "norm", "attention", "embedding", "last matrix"
ROTATION, WRITE, ADD, ACTIVATION = "rotation", "write K and V", "add", "activation"
COPIES, OUTSIDE = "copy between devices", "outside operations"
_OF_WEIGHTS = {
    **{"attn_q": "Q", "attn_k": "K", "attn_v": "V", "attn_qkv": "Q, K and V", "attn_output": "attention output"},
    **{"ffn_gate": "feed-forward gate", "ffn_up": "feed-forward up", "ffn_down": "feed-forward down"},
    **{"ffn_gate_inp": "router", "ffn_gate_up": "feed-forward gate and up", "output": OUTPUT, "token_embd": OUTPUT},
}
_OF_OPS = {
    **{"RMS_NORM": NORM, "NORM": NORM, "L2_NORM": NORM, "ROPE": ROTATION, "GLU": ACTIVATION},
    **{"UNARY": ACTIVATION, "FLASH_ATTN_EXT": ATTENTION, "SOFT_MAX": ATTENTION, "MUL_MAT": ATTENTION},
    **{"SET_ROWS": WRITE, "ADD": ADD},
}
"""What an operation without weights is for: products of two computed tensors belong to attention."""

_COPIED = re.compile(r"[^#]+#.+#\d+")
"""How ggml's scheduler names what it copies to the device of the next operations."""


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
    return kept(plan, chosen, Path(out), prompt_len, gen + 1, trace=seen, placement=placed)


def kept(plan: Plan, settings: Settings, folder: Path | None, n_prompt: int, n_gen: int, **found: Any) -> Record:
    """A record of what was found, in a results file of its own unless there is no folder."""
    run = run_without_steps(n_prompt, n_gen, **found)
    if folder is None:
        return Record("", plan.machine, plan.model, settings, run)
    path = new_results_file(plan, folder)
    record = Record(path.stem, plan.machine, plan.model, settings, run)
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
    times = [statistics.median(node.times_ns) for node in steps.nodes]
    empty = [(_device(node, devices), ns) for node, ns in zip(steps.nodes, times, strict=True) if node.op in EMPTY]
    by_place = grouped(empty, itemgetter(0))
    stops_ns = {device: statistics.median(ns for _, ns in alike) for device, alike in by_place.items()}
    usual_gap_ns = statistics.median(statistics.median(node.gaps_ns) for node in steps.nodes)
    by_device = {probing.label(one.device): one for one in probing.each_device(ceilings)} if ceilings else {}
    n_threads = settings.n_threads if steps.n_tokens == 1 else settings.n_threads_batch
    parts, copied, layer = list[Part](), set[str](), None
    for node, ns in zip(steps.nodes, times, strict=True):
        layer = layer_of(node, layer)
        device = _device(node, devices)
        arriving = [one for one in node.sources if _COPIED.fullmatch(one.name) and one.name not in copied]
        if arriving:
            copied |= {one.name for one in arriving}
            gap_s = (statistics.median(node.gaps_ns) - usual_gap_ns) / 1e9
            parts.append(Part(COPIES, layer, device, sum(one.n_bytes for one in arriving), None, gap_s))
        if node.op in EMPTY:
            continue
        threads_ns = steps.threads_ns if device == "CPU" and node.op not in ON_ONE_THREAD else 0
        seconds, flops = (ns - stops_ns.get(device, 0) - threads_ns) / 1e9, flops_of(node)
        least_s = _least_s(node, steps, model, by_device.get(device), n_threads)
        read = bytes_of(node)
        held_s = 0.0 if least_s is None else seconds
        parts.append(Part(operation_of(node), layer, device, read, flops, seconds, least_s, held_s))
    for operation, nanoseconds in ((OUTSIDE, steps.outside_ns), (SAMPLING, steps.choosing_ns)):
        parts.append(Part(operation, None, "CPU", None, None, statistics.median(nanoseconds) / 1e9))
    return Phase(
        name,
        steps.n_tokens,
        steps.n_past,
        tuple(summed(parts, lambda part: (part.layer, part.operation, part.device))),
        {name: ns / 1e9 for name, ns in stops_ns.items()},
        statistics.median(steps.untraced_ns) / 1e9,
        len(steps.nodes),
        len(steps.outside_ns),
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


def operation_of(node: Node) -> str:
    """What an operation is for, by its weights, else by what ggml calls it."""
    weight = _weight(node)
    if weight and "norm" in weight[1]:
        return NORM
    if node.op == "GET_ROWS":
        return EMBEDDING if weight and weight[1] == "token_embd" else "select rows"
    if weight:
        plain = re.sub(r"_(exps|shexp)$", "", weight[1])
        named = _OF_WEIGHTS.get(plain, f"other weights ({weight[1]})")
        return f"{named}, experts" if weight[1].endswith("_exps") else named
    if node.result.name.startswith(("kq", "v_cont")):
        return ATTENTION
    return _OF_OPS.get(node.op, f"other ({node.op.lower()})")


def layer_of(node: Node, before: int | None) -> int | None:
    """The layer of an operation, by its weights or its name; for a name without meaning that of the one before."""
    weight = _weight(node)
    if weight and weight[0] is not None:
        return weight[0]
    name = node.result.name
    if match := re.search(r"(?:-|_l)(\d+)\b", name):
        return int(match[1])
    return before if re.match(r"node_\d+", name) else None


def bytes_of(node: Node) -> float:
    """Bytes that an operation reads: of its tensors, of selected rows, of the experts that its tokens use."""
    total = float(sum(one.n_bytes for one in node.sources))
    first = node.sources[0]
    if node.op == "SET_ROWS":  # the others are the positions, and the cache, which is written
        return sum(one.n_bytes for one in node.sources[:2])
    if node.op == "GET_ROWS":
        share = math.prod(node.result.ne[1:]) / math.prod(first.ne[1:])
        return total - first.n_bytes * (1 - share)
    if node.op == "MUL_MAT_ID":
        n_used, n_tokens = node.sources[2].ne[:2]
        matrix = _matrix(node)
        return total - first.n_bytes * (1 - shape.n_experts_read(matrix, n_used, n_tokens) / matrix.n_expert)
    return total


def flops_of(node: Node) -> float | None:
    """FLOPs of a product or of attention, over all positions that its tensors have; None for others."""
    first = node.sources[0]
    if node.op in ("MUL_MAT", "MUL_MAT_ID"):
        return 2.0 * first.ne[0] * math.prod(node.result.ne)
    if node.op == "FLASH_ATTN_EXT":
        keys, values = node.sources[1:3]
        return 2.0 * math.prod(first.ne[1:]) * keys.ne[1] * (keys.ne[0] + values.ne[0])
    return None


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
            n_bytes = bytes_of(node) - sum(one.n_bytes for one in node.sources[1:])
            return n_bytes * step_kernels.product_s_per_byte(ceilings, model, _matrix(node), n_tokens, n_threads)
    except LabError:  # this kernel was not probed
        pass
    return None


def _device(node: Node, devices: Sequence[Device]) -> str:
    """The device that holds an operation's result: CUDA0, CPU, RPC0."""
    return device_of(Buffer("", node.buffer, 0), devices)
