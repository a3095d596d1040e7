"""The least time of a step: its kernels at their ceilings, on the CPU, one GPU or both, and what moves between.

The rate of a product is that of the probed shape most like it, the rate of attention that of its length; between
probed sizes it is interpolated, linear in logarithms.
A product takes its bytes at the rate of its weights' type on the device that the layer lies on; products of several
layers count there by how many of these layers it holds. Between devices moves the hidden state, n_embd numbers of 4
bytes a token, and to the CPU the logits, at what copies to and from the GPU took. With layers on the CPU
beside a GPU llama.cpp copies their weights to the GPU for steps of 32 tokens and more (ggml-backend.cpp, op_offload).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from lab.core import cost, shell
from lab.core.lists import grouped, plural
from lab.core.record import Ceilings, Model, Rate, Settings
from lab.core.shape import ATTENTION as IN_ATTENTION, EXPERTS, Heads, Matrix
from lab.errors import LabError
from lab.roofline import probing
from lab.roofline.probing import used_types
from lab.models import catalog
from lab.process.wire import ATTENTION, DOWNLOAD, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION, UPLOAD

LEAST_COPIED = 32
"""Tokens of a step from which on weights are copied to a GPU (offload_op of ggml-cuda and ggml-vulkan)."""

VALUE_BYTES = 4
READERS = (
    MUL_MAT,
    MUL_MAT_ID,
    probing.READ,
)  # probes that read all of their bytes from the device's own memory

Spans = Sequence[cost.Span]
Layers = tuple[str | None, ...]  # the device of each layer, the output last; None is the CPU


class Kernels(NamedTuple):
    """Least seconds of a step or a phase in its kernels; `between_s` is what moves between the CPU and a GPU."""

    layers_s: float
    head_s: float
    attention_s: float
    between_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


class Parts(NamedTuple):
    """The same of a step by device."""

    by_device: dict[str | None, Kernels]
    between_s: float = 0.0

    @property
    def total(self) -> Kernels:
        """The sum, one after the other."""
        layers_s, head_s, attention_s, _ = map(sum, zip(*self.by_device.values(), strict=True))
        return Kernels(layers_s, head_s, attention_s, self.between_s)


def not_known(model: Model) -> LabError:
    """The error for a model whose steps have an unknown cost."""
    what = f"The cost of a step of {model.name} cannot be derived from its header"
    return LabError(
        f"{what}{f' ({model.uncounted})' if model.uncounted else ''}.", "Use another model."
    )


def step_cost(model: Model, *size: Any) -> cost.StepCost:
    """`cost.step`, or a LabError."""
    if step := cost.step(model, *size):
        return step
    raise not_known(model)


def total(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    n: int,
    n_past: int,
    n_outputs: int,
    others: Spans = (),
) -> Kernels:
    """Least time of a step in its kernels, as `parts` has it by device."""
    return parts(model, settings, ceilings, n, n_past, n_outputs, others).total


def parts(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    others: Spans = (),
    layers: Layers | None = None,
) -> Parts:
    """Least time of a step on each device; `others` are further sequences in it, whose attention is each its own.

    `layers` says where the layers lie; without it the rule of `probing.layers` does. With the ceilings of one device
    alone all of them lie there. LabError where the model's cost is not known, and for a missing probe.
    """
    spans = Counter([(n_tokens, n_past), *others])
    n_all = sum(n * times for (n, _), times in spans.items())
    work = cost.products(model, n_all, n_outputs)
    if work is None or cost.attended(model, n_tokens, n_past) is None:
        raise not_known(model)
    by_device = {one.device: one for one in probing.each_device(ceilings)}
    is_split = len(by_device) > 1
    gpu = next((name for name in by_device if name is not None), None)
    n_threads = settings.n_threads if n_all == 1 else settings.n_threads_batch
    if not is_split:
        layers = tuple(by_device) * ((model.n_layer or 0) + 1)
    *blocks, output = layers or probing.layers(ceilings.machine, model, settings)
    caches: Sequence[str | None] = [None] if settings.kv_offload is False and is_split else blocks
    if lacking := [
        name or probing.CPU for name in (*blocks, output, *caches) if name not in by_device
    ]:
        raise _lacking(lacking[0])
    seconds = {name: [0.0, 0.0, 0.0] for name in dict.fromkeys((*blocks, output, *by_device))}
    used = {*used_types(model), *(product.matrix.type for product in work if product.is_head)}
    uploaded = 0.0
    for product in work:
        if product.matrix.type not in used:
            continue
        lies = (
            [output]
            if product.is_head
            else _blocks_with(product, model, settings, blocks, is_split)
        )
        for name, n in Counter(lies).items():
            target = name
            if (
                name is None
                and product.n_tokens >= LEAST_COPIED
                and settings.op_offload is not False
            ):
                kept = [rate for rate in by_device[None].rates if rate.type == product.matrix.type]
                if all(
                    rate.buffer == probing.CPU for rate in kept
                ):  # only the CPU can read its repacked weights
                    target = gpu
            n_bytes = n / len(lies) * product.n_bytes
            uploaded += n_bytes if target != name else 0.0
            s_per_byte = product_s_per_byte(
                by_device[target], model, product.matrix, product.n_tokens, n_threads
            )
            seconds[target][product.is_head] += n_bytes * s_per_byte
    kind = settings.type_k.upper()
    is_flash = settings.flash_attn_resolved != "off"
    width = 2 * ((model.head_dim or 0) + (model.head_dim_v or model.head_dim or 0))
    for name, n_layers in Counter(caches).items():
        is_whole = settings.kv_unified and (
            name is not None or not is_flash
        )  # the CPU's flash attention skips masks
        for (n, past), times in spans.items():
            beside = [*(spans - Counter([(n, past)])).elements()] if is_whole else []
            for part in cost.attended(model, n, past, beside) or ():
                flops = width * part.heads.n_layer * part.heads.n_head * part.n_pairs
                size = kind, n, n_threads, part.n_positions, is_flash
                s_per_flop = attention_s_per_flop(by_device[name], model, part.heads, *size)
                seconds[name][2] += n_layers / len(caches) * times * flops * s_per_flop
    between_s = (
        _between_s(model, by_device[gpu], [*blocks, output], n_all, n_outputs, uploaded)
        if is_split
        else 0.0
    )
    return Parts({name: Kernels(*times) for name, times in seconds.items()}, between_s)


def _blocks_with(
    product: cost.Product,
    model: Model,
    settings: Settings,
    blocks: Sequence[str | None],
    is_split: bool,
) -> Sequence[str | None]:
    """The device of each layer that has weights of a product."""
    if product.matrix.part == EXPERTS and settings.n_cpu_moe and is_split:
        n_moved = min(settings.n_cpu_moe, len(blocks))
        blocks = [*[None] * n_moved, *blocks[n_moved:]]
    if product.is_last:
        return blocks[-1:]
    is_last_apart = (
        product.matrix.part != IN_ATTENTION
        and model.arch not in cost.NEVER_SKIPS
        and len(blocks) > 1
    )
    return blocks[:-1] if is_last_apart else blocks


def _between_s(
    model: Model,
    gpu: Ceilings,
    layers: Sequence[str | None],
    n_tokens: int,
    n_outputs: int,
    uploaded: float,
) -> float:
    """Seconds of the copies: the hidden state wherever the device changes, the logits, and weights for the GPU."""
    hidden = VALUE_BYTES * (model.n_embd or 0)
    logits = VALUE_BYTES * (model.n_vocab or 0)
    sizes = [*[n_tokens * hidden] * (len(layers) - 1), n_outputs * hidden, n_outputs * logits]
    seconds = copy_s(gpu, UPLOAD, uploaded) if uploaded else 0.0
    for source, target, n_bytes in zip([None, *layers], [*layers, None], sizes, strict=True):
        if source != target and n_bytes:
            seconds += copy_s(gpu, UPLOAD if source is None else DOWNLOAD, n_bytes)
    return seconds


def product_s_per_byte(
    ceilings: Ceilings, model: Model, matrix: Matrix, n_tokens: int, n_threads: int
) -> float:
    """Best time of a product, per byte of weights that it reads; between measured columns interpolated."""
    op = MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT
    by_shape = _by_shape(ceilings, op, matrix.type, n_threads, matrix.rows, matrix.columns)
    if not by_shape:
        known = {
            rate.type for rate in ceilings.rates if ceilings.on_gpu or rate.n_threads == n_threads
        }
        lacking = [kind for kind in used_types(model) if kind not in known] or [matrix.type]
        raise _not_measured(
            ceilings, model, " and ".join(lacking), n_threads, "--types", ",".join(lacking)
        )
    nearest = by_shape[0]
    most = max(len(points) for points in by_shape)
    if (
        n_tokens not in nearest
    ):  # a shape that is probed at few sizes of step does not say what lies between
        nearest = next(points for points in by_shape if n_tokens in points or len(points) == most)
    points = {
        n: min(min(rate.times_ns) / 1e9 / rate.n_bytes for rate in rates)
        for n, rates in nearest.items()
    }
    return _interpolated(points, n_tokens)


def attention_s_per_flop(
    ceilings: Ceilings,
    model: Model,
    heads: Heads,
    kind: str,
    n_tokens: int,
    n_threads: int,
    n_positions: int,
    is_flash: bool = True,
) -> float:
    """Best time of attention with n_tokens queries over n_positions, per FLOP; between lengths interpolated."""
    points = attention_points(ceilings, model, heads, kind, n_tokens, n_threads, is_flash)
    return _interpolated(
        {n: _interpolated(by_position, n_positions) for n, by_position in points.items()}, n_tokens
    )


def attention_points(
    ceilings: Ceilings,
    model: Model,
    heads: Heads,
    kind: str,
    n_tokens: int,
    n_threads: int,
    is_flash: bool,
) -> dict[int, dict[int, float]]:
    """Best times of attention (plain, if it was probed and not `is_flash`) per FLOP by queries and positions."""
    for op in [ATTENTION] if is_flash else [PLAIN_ATTENTION, ATTENTION]:
        size = heads.n_head, model.head_dim or 1, heads.n_head_kv
        if by_shape := _by_shape(ceilings, op, kind, n_threads, *size):
            return {
                n: {
                    one.n_positions or 0: min(one.times_ns) / 1e9 / one.flops
                    if one.flops
                    else math.inf
                    for one in own
                }
                for n, own in by_shape[0].items()
            }
    raise _not_measured(
        ceilings, model, f"attention on a {kind} cache", n_threads, "-ctk", kind.lower()
    )


def _by_shape(
    ceilings: Ceilings,
    op: str,
    kind: str,
    n_threads: int,
    rows: int,
    columns: int,
    n_head_kv: int | None = None,
) -> list[dict[int, list[Rate]]]:
    """The rates of each probed shape (on the CPU: with n_threads) by n_tokens, that most like the wanted one first."""

    def distance(rates: Sequence[Rate]) -> float:
        own = rates[0]
        shared = (own.rows / (own.n_head_kv or own.rows)) / (rows / (n_head_kv or rows))
        return sum(
            abs(math.log(ratio)) for ratio in (own.rows / rows, own.columns / columns, shared)
        )

    rates = [one for one in ceilings.rates if (one.op, one.type) == (op, kind)]
    rates = [one for one in rates if ceilings.on_gpu or one.n_threads == n_threads]
    shapes = grouped(
        rates, lambda one: (one.rows, one.columns, one.n_head_kv, one.n_expert, one.n_expert_used)
    )
    return [grouped(own, lambda one: one.n_tokens) for own in sorted(shapes.values(), key=distance)]


def _not_measured(
    ceilings: Ceilings, model: Model, what: str, n_threads: int, *words: str
) -> LabError:
    on = f"on {ceilings.device}" if ceilings.on_gpu else f"with {plural(n_threads, 'thread')}"
    how = (
        []
        if ceilings.on_gpu
        else ["--threads", n_threads, *(["--no-repack"] if ceilings.repack is False else [])]
    )
    command = shell.lab("ceilings", "-m", catalog.spec_of(model), *words, *how)
    return LabError(f"The ceilings of {what} {on} have not been measured here.", f"Run: {command}")


def _lacking(what: str) -> LabError:
    hint = "Measure them with the settings of the runs: lab ceilings"
    return LabError(f"The ceilings of {what} have not been measured.", hint)


def copy_s(ceilings: Ceilings, op: str, n_bytes: float) -> float:
    """Best seconds of an upload or download of n_bytes: a constant, and a time per byte, from two probed copies."""
    points = sorted(
        (rate.n_bytes, min(rate.times_ns) / 1e9) for rate in ceilings.rates if rate.op == op
    )
    if not points:
        raise _lacking(f"copies to and from {ceilings.device}")
    (few, few_s) = points[0]
    (many, many_s) = points[-1]
    per_byte = max(0.0, many_s - few_s) / (many - few) if many > few else many_s / many
    return max(0.0, few_s - per_byte * few) + per_byte * n_bytes


def _interpolated(points: dict[int, float], n: int) -> float:
    """A value at n out of values at some n, straight lines on logarithms; the nearest outside of them."""
    below = max((x for x in points if x <= n), default=min(points))
    above = min((x for x in points if x >= n), default=max(points))
    if below >= above:
        return points[below if n >= below else above]
    share = (math.log(n) - math.log(below)) / (math.log(above) - math.log(below))
    return math.exp((1 - share) * math.log(points[below]) + share * math.log(points[above]))


class Roof(NamedTuple):
    """The machine's best, over all kernels: FLOP/s and bytes/s (both in 10^9)."""

    gflops: float
    gbps: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic is the limit."""
        return self.gflops / self.gbps


def roof(ceilings: Ceilings, layers: Layers = ()) -> Roof:
    """The best of all probes. With `layers` on several devices, weighted by their shares of the layers."""
    best = {
        one.device: Roof(
            gflops=max(map(probing.gflops, one.rates)),
            gbps=max(
                probing.gbps(rate)
                for rate in one.rates
                if rate.n_tokens == 1 and rate.op in READERS
            ),
        )
        for one in probing.each_device(ceilings)
    }
    if len(best) == 1 or not layers or not set(layers) <= set(best):
        return best[ceilings.device]
    seconds = (sum(n / best[name][i] for name, n in Counter(layers).items()) for i in (0, 1))
    return Roof(*(len(layers) / one for one in seconds))
