"""The least time of a step: its kernels at their ceilings, on the CPU, one GPU or both, and what
moves between.

The rate of a product is the one of the probed shape most like it, the rate of attention the one of
its length; between probed sizes it is interpolated, linear in logarithms. A product takes its bytes
at the rate of its weights' type on the device that the layer lies on; products of several layers
count there by how many of these layers it holds. Between devices moves the hidden state, n_embd
numbers of 4 bytes a token, and to the CPU the logits, at what copies to and from the GPU took. With
layers on the CPU beside a GPU llama.cpp copies their weights to the GPU for steps of 32 tokens and
more (ggml-backend.cpp, op_offload).
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from lab.core import cost, shell
from lab.core.lists import grouped, plural
from lab.core.record import Ceilings, Model, Rate, Settings
from lab.core.shape import ATTENTION as IN_ATTENTION, EXPERTS, Heads, Matrix
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import ATTENTION, DOWNLOAD, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION, UPLOAD
from lab.roofline import probing
from lab.roofline.probes import READ, used_types

LEAST_COPIED = 32
"""Tokens of a step from which on weights are copied to a GPU (offload_op of ggml-cuda and
ggml-vulkan).
"""

VALUE_BYTES = 4  # of a number of the hidden state and of the logits
READERS = (MUL_MAT, MUL_MAT_ID, READ)
"""Operations that read all of their bytes from the device's own memory."""

Spans = Sequence[cost.Span]
Seconds = defaultdict[str | None, float]  # by device
Layers = tuple[str | None, ...]  # the device of each layer, the output last; None is the CPU


class Kernels(NamedTuple):
    """Least seconds of a step or a phase in its kernels; `between_s` is what moves between the CPU
    and a GPU.
    """

    layers_s: float
    head_s: float
    attention_s: float
    between_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


class StepParts(NamedTuple):
    """The least seconds of a step by device."""

    by_device: dict[str | None, Kernels]
    between_s: float = 0.0

    @property
    def total(self) -> Kernels:
        """The sum, one device after the other."""
        devices = self.by_device.values()
        return Kernels(
            layers_s=sum(kernels.layers_s for kernels in devices),
            head_s=sum(kernels.head_s for kernels in devices),
            attention_s=sum(kernels.attention_s for kernels in devices),
            between_s=self.between_s,
        )


def not_known(model: Model) -> LabError:
    """The error for a model whose steps have an unknown cost."""
    reason = f" ({model.uncounted})" if model.uncounted else ""
    return LabError(
        f"The cost of a step of {model.name} cannot be derived from its header{reason}.",
        "Use another model.",
    )


def step_cost(model: Model, *size: Any) -> cost.StepCost:
    """`cost.step`; a LabError instead of None."""
    step = cost.step(model, *size)
    if step is None:
        raise not_known(model)
    return step


def total(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    further: Spans = (),
) -> Kernels:
    """Least time of a step in its kernels, as `parts` has it by device."""
    return parts(model, settings, ceilings, n_tokens, n_past, n_outputs, further).total


def parts(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    further: Spans = (),
    layers: Layers | None = None,
) -> StepParts:
    """Least time of a step on each device; `further` are its other sequences.

    `layers` has the device of each layer, by default by the rule of `probing.layers`. With the
    ceilings of one device alone all layers are there. LabError for a model of unknown cost, and for
    a missing probe.
    """
    step = StepOnDevices(
        model, settings, ceilings, [(n_tokens, n_past), *further], n_outputs, layers
    )
    return step.parts()


class StepOnDevices:
    """A step of one or more sequences, `spans`, on the devices of ceilings: computes its parts."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        ceilings: Ceilings,
        spans: Spans,
        n_outputs: int,
        layers: Layers | None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.spans = Counter(spans)  # equal sequences are computed once
        self.n_tokens = sum(n_tokens for n_tokens, _ in spans)
        self.n_outputs = n_outputs
        self.devices: dict[str | None, Ceilings] = {}
        self.gpu: str | None = None
        for of_device in probing.each_device(ceilings):
            self.devices[of_device.device] = of_device
            self.gpu = self.gpu or of_device.device
        self.is_split = len(self.devices) > 1
        if not self.is_split:
            layers = tuple(self.devices) * ((model.n_layer or 0) + 1)
        elif layers is None:
            layers = probing.layers(ceilings.machine, model, settings)
        self.layers = layers
        self.blocks = layers[:-1]
        self.output = layers[-1]
        self.n_threads = settings.n_threads_batch if self.n_tokens > 1 else settings.n_threads

    def parts(self) -> StepParts:
        work = cost.products(self.model, self.n_tokens, self.n_outputs)
        if work is None or cost.attended(self.model, 1, 0) is None:
            raise not_known(self.model)
        caches = self.blocks
        if self.settings.kv_offload is False and self.is_split:
            caches = (None,)  # all on the CPU
        for name in (*self.layers, *caches):
            if name not in self.devices:
                raise _lacking(name or probing.CPU)
        in_layers: Seconds = defaultdict(float)
        in_head: Seconds = defaultdict(float)
        used = set(used_types(self.model))
        uploaded_bytes = 0.0
        for product in work:
            if product.is_head:
                self.add_product(in_head, product, (self.output,))
            elif product.matrix.type in used:
                blocks = self.blocks_with(product)
                uploaded_bytes += self.add_product(in_layers, product, blocks)
        in_attention = self.attention_s(caches)
        between_s = self.between_s(uploaded_bytes) if self.is_split else 0.0
        by_device = {}
        for name in (*self.layers, *self.devices):
            by_device[name] = Kernels(in_layers[name], in_head[name], in_attention[name])
        return StepParts(by_device, between_s)

    def add_product(self, seconds: Seconds, product: cost.Product, blocks: Layers) -> float:
        """Add the time of a product to the devices of its layers; returns the bytes that are copied
        to the GPU.
        """
        uploaded_bytes = 0.0
        for name, n_layers in Counter(blocks).items():
            share = n_layers / len(blocks)
            n_bytes = share * product.n_bytes
            device = name
            if name is None and self.is_uploaded(product):
                device = self.gpu
                uploaded_bytes += n_bytes
            s_per_byte = product_s_per_byte(
                self.devices[device],
                self.model,
                product.matrix,
                product.n_tokens,
                self.n_threads,
            )
            seconds[device] += n_bytes * s_per_byte
        return uploaded_bytes

    def is_uploaded(self, product: cost.Product) -> bool:
        """Whether llama.cpp copies a product's weights from the CPU to the GPU for this step."""
        if self.gpu is None or product.n_tokens < LEAST_COPIED:
            return False
        if self.settings.op_offload is False:
            return False
        for rate in self.devices[None].rates:
            if rate.type == product.matrix.type and rate.buffer != probing.CPU:
                return False  # repacked: only the CPU can read these weights
        return True

    def blocks_with(self, product: cost.Product) -> Layers:
        """The device of each layer that has weights of a product."""
        blocks = self.blocks
        if product.matrix.part == EXPERTS and self.settings.n_cpu_moe and self.is_split:
            n_on_cpu = min(self.settings.n_cpu_moe, len(blocks))
            blocks = (None,) * n_on_cpu + blocks[n_on_cpu:]
        if product.is_last:
            return blocks[-1:]
        is_in_all_layers = product.matrix.part == IN_ATTENTION
        if is_in_all_layers or self.model.arch in cost.NEVER_SKIPS or len(blocks) == 1:
            return blocks
        return blocks[:-1]  # the last layer computes only outputs, in a product of its own

    def attention_s(self, caches: Layers) -> Seconds:
        """Seconds of attention on the device of each layer's cache."""
        seconds: Seconds = defaultdict(float)
        kind = self.settings.type_k.upper()
        is_flash = self.settings.flash_attn_resolved != "off"
        key_dim = self.model.head_dim or 0
        flops_per_pair = 2 * (key_dim + (self.model.head_dim_v or key_dim))
        for name, n_layers in Counter(caches).items():
            share = n_layers / len(caches)
            skips_masked = name is None and is_flash  # the CPU's flash attention does
            for span, n_sequences in self.spans.items():
                n_tokens, n_past = span
                beside: list[
                    cost.Span
                ] = []  # sequences whose positions are computed and masked
                if self.settings.kv_unified and not skips_masked:
                    beside += self.spans.elements()
                    beside.remove(span)
                for part in cost.attended(self.model, n_tokens, n_past, beside) or ():
                    flops = (
                        flops_per_pair * part.heads.n_layer * part.heads.n_head * part.n_pairs
                    )
                    s_per_flop = attention_s_per_flop(
                        self.devices[name],
                        self.model,
                        part.heads,
                        kind,
                        n_tokens,
                        self.n_threads,
                        part.n_positions,
                        is_flash,
                    )
                    seconds[name] += share * n_sequences * flops * s_per_flop
        return seconds

    def between_s(self, uploaded_bytes: float) -> float:
        """Seconds of the copies: the hidden state wherever the device changes, the logits, and
        weights for the GPU.
        """
        hidden_bytes = VALUE_BYTES * (self.model.n_embd or 0)
        logits_bytes = VALUE_BYTES * (self.model.n_vocab or 0)
        seconds = self.move_s(None, self.gpu, uploaded_bytes)
        device = None  # the embedding table is on the CPU
        for block in self.blocks:
            seconds += self.move_s(device, block, self.n_tokens * hidden_bytes)
            device = block
        seconds += self.move_s(device, self.output, self.n_outputs * hidden_bytes)
        return seconds + self.move_s(self.output, None, self.n_outputs * logits_bytes)

    def move_s(self, source: str | None, target: str | None, n_bytes: float) -> float:
        """Seconds of a copy from a device to another one."""
        if source == target or not n_bytes:
            return 0.0
        return copy_s(self.devices[self.gpu], UPLOAD if source is None else DOWNLOAD, n_bytes)


def product_s_per_byte(
    ceilings: Ceilings, model: Model, matrix: Matrix, n_tokens: int, n_threads: int
) -> float:
    """Best time of a product, per byte of weights that it reads; between measured columns
    interpolated.
    """
    op = MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT
    by_shape = _by_shape(ceilings, op, matrix.type, n_threads, matrix.rows, matrix.columns)
    if not by_shape:
        raise _no_products(ceilings, model, matrix.type, n_threads)
    most_sizes = max(map(len, by_shape))
    points = {}
    for by_size in by_shape:
        # Between sizes only shapes with the most sizes are interpolated: few say too little.
        if n_tokens in by_size or len(by_size) == most_sizes:
            for n, rates in by_size.items():
                points[n] = min(_best_s(rate) / rate.n_bytes for rate in rates)
            break
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
    """Best time of attention with n_tokens queries over n_positions, per FLOP; between lengths
    interpolated.
    """
    at_length = {}
    points = attention_points(ceilings, model, heads, kind, n_tokens, n_threads, is_flash)
    for n, by_length in points.items():
        at_length[n] = _interpolated(by_length, n_positions)
    return _interpolated(at_length, n_tokens)


def attention_points(
    ceilings: Ceilings,
    model: Model,
    heads: Heads,
    kind: str,
    n_tokens: int,
    n_threads: int,
    is_flash: bool,
) -> dict[int, dict[int, float]]:
    """Best times of attention (plain, if it was probed and not `is_flash`) per FLOP by queries and
    positions.
    """
    size = (kind, n_threads, heads.n_head, model.head_dim or 1, heads.n_head_kv)
    by_shape = []
    if not is_flash:
        by_shape = _by_shape(ceilings, PLAIN_ATTENTION, *size)
    by_shape = by_shape or _by_shape(ceilings, ATTENTION, *size)
    if not by_shape:
        raise _not_measured(
            ceilings, model, f"attention on a {kind} cache", n_threads, "-ctk", kind.lower()
        )
    points: dict[int, dict[int, float]] = {}
    for n, rates in by_shape[0].items():
        points[n] = {}
        for rate in rates:
            s_per_flop = _best_s(rate) / rate.flops if rate.flops else math.inf
            points[n][rate.n_positions or 0] = s_per_flop
    return points


def _by_shape(
    ceilings: Ceilings,
    op: str,
    kind: str,
    n_threads: int,
    rows: int,
    columns: int,
    n_head_kv: int | None = None,
) -> list[dict[int, list[Rate]]]:
    """The rates of each probed shape (on the CPU: with n_threads) by n_tokens, first the shape most
    like this one.
    """
    heads_per_key = rows / (n_head_kv or rows)

    def distance(rates: Sequence[Rate]) -> float:
        """How far the shape of these rates is from this one, in logarithms."""
        probed = rates[0]
        probed_heads_per_key = probed.rows / (probed.n_head_kv or probed.rows)
        ratios = (
            probed.rows / rows,
            probed.columns / columns,
            probed_heads_per_key / heads_per_key,
        )
        return sum(abs(math.log(ratio)) for ratio in ratios)

    rates = [
        rate
        for rate in _rates_with(ceilings, n_threads)
        if rate.op == op and rate.type == kind
    ]
    shapes = grouped(
        rates,
        lambda rate: (
            rate.rows,
            rate.columns,
            rate.n_head_kv,
            rate.n_expert,
            rate.n_expert_used,
        ),
    )
    nearest_first = sorted(shapes.values(), key=distance)
    return [
        grouped(rates_of_shape, lambda rate: rate.n_tokens) for rates_of_shape in nearest_first
    ]


def _rates_with(ceilings: Ceilings, n_threads: int) -> list[Rate]:
    """The rates of a GPU, or of the CPU with n_threads."""
    return [rate for rate in ceilings.rates if ceilings.on_gpu or rate.n_threads == n_threads]


def _no_products(ceilings: Ceilings, model: Model, kind: str, n_threads: int) -> LabError:
    """The error for a type of weights without a rate: it names all types of the model that lack
    one.
    """
    probed = {rate.type for rate in _rates_with(ceilings, n_threads)}
    lacking = [name for name in used_types(model) if name not in probed] or [kind]
    return _not_measured(
        ceilings, model, " and ".join(lacking), n_threads, "--types", ",".join(lacking)
    )


def _not_measured(
    ceilings: Ceilings, model: Model, what: str, n_threads: int, *asked: str
) -> LabError:
    arguments: list[object] = [*asked]
    if ceilings.on_gpu:
        place = f"on {ceilings.device}"
    else:
        place = f"with {plural(n_threads, 'thread')}"
        arguments += ["--threads", n_threads]
        if ceilings.repack is False:
            arguments.append("--no-repack")
    command = shell.lab("ceilings", "-m", catalog.spec_of(model), *arguments)
    return LabError(
        f"The ceilings of {what} {place} have not been measured here.", f"Run: {command}"
    )


def _lacking(what: str) -> LabError:
    return LabError(
        f"The ceilings of {what} have not been measured.",
        "Measure them with the settings of the runs: lab ceilings",
    )


def copy_s(ceilings: Ceilings, op: str, n_bytes: float) -> float:
    """Best seconds of an upload or download of n_bytes: a constant, and a time per byte, from two
    probed copies.
    """
    points = sorted((rate.n_bytes, _best_s(rate)) for rate in ceilings.rates if rate.op == op)
    if not points:
        raise _lacking(f"copies to and from {ceilings.device}")
    few_bytes, few_s = points[0]
    many_bytes, many_s = points[-1]
    if many_bytes == few_bytes:
        return many_s / many_bytes * n_bytes
    s_per_byte = max(0.0, many_s - few_s) / (many_bytes - few_bytes)
    latency_s = max(0.0, few_s - s_per_byte * few_bytes)
    return latency_s + s_per_byte * n_bytes


def _best_s(rate: Rate) -> float:
    return min(rate.times_ns) / 1e9


def _interpolated(points: dict[int, float], n: int) -> float:
    """A value at n out of values at some n, straight lines on logarithms; the nearest outside of
    them.
    """
    sizes = sorted(points)
    if n <= sizes[0]:
        return points[sizes[0]]
    if n >= sizes[-1]:
        return points[sizes[-1]]
    index = bisect.bisect_right(sizes, n)
    below = sizes[index - 1]
    above = sizes[index]
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
    """The best of all probes. With `layers` on several devices, weighted by their shares of the
    layers.
    """
    roofs = {}
    for of_device in probing.each_device(ceilings):
        roofs[of_device.device] = _roof_of_device(of_device)
    has_all_roofs = roofs.keys() >= set(layers)
    if len(roofs) == 1 or not layers or not has_all_roofs:
        return roofs[ceilings.device]
    return Roof(
        gflops=len(layers) / sum(1 / roofs[name].gflops for name in layers),
        gbps=len(layers) / sum(1 / roofs[name].gbps for name in layers),
    )


def _roof_of_device(ceilings: Ceilings) -> Roof:
    readers = [rate for rate in ceilings.rates if rate.n_tokens == 1 and rate.op in READERS]
    return Roof(
        gflops=max(map(probing.gflops, ceilings.rates)),
        gbps=max(map(probing.gbps, readers)),
    )
