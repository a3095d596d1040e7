"""The least time of a step: its kernels at their best rates, on the CPU, one GPU or both.

A product takes its bytes at the rate of its weights' type, on the device that the layer lies on; a
product of several layers counts there by its share of these layers. Between devices moves the
hidden state, n_embd numbers of 4 bytes a token, and to the CPU the logits, at the rate of copies to
and from the GPU. With layers on the CPU beside a GPU llama.cpp copies their weights to the GPU for
steps of 32 tokens and more (ggml-backend.cpp, op_offload).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lab.core import cost, memory
from lab.core.matrices import ATTENTION, EXPERTS
from lab.core.record import Ceilings, Model, Settings
from lab.errors import LabError
from lab.process.wire import DOWNLOAD, UPLOAD
from lab.roofline import kernel_rates, probing
from lab.roofline.probes import used_types

LEAST_COPIED = 32
"""The fewest tokens of a step that has weights copied to a GPU (offload_op of ggml-cuda and
ggml-vulkan)."""

VALUE_BYTES = 4  # of a number of the hidden state and of the logits

Spans = Sequence[cost.Span]
DeviceName = str | None  # None is the CPU
Seconds = defaultdict[DeviceName, float]
Layers = tuple[DeviceName, ...]  # the device of each layer, the output last


class Kernels(NamedTuple):
    """Least seconds of a step or a phase in its kernels; `between_s` is what moves between the CPU
    and a GPU."""

    layers_s: float
    head_s: float
    attention_s: float
    between_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


class StepParts(NamedTuple):
    """The least seconds of a step by device."""

    by_device: dict[DeviceName, Kernels]
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


def known(step: cost.StepCost | None, model: Model) -> cost.StepCost:
    """The cost of a model's step; a LabError instead of None."""
    if step is None:
        raise not_known(model)
    return step


@dataclass(frozen=True)
class StepKernels:
    """The kernels of a model's steps under some settings, beside the ceilings of a machine.

    `layers` has the device of each layer, by default by the rule of `probing.layers`. With the
    ceilings of one device alone all layers are there.
    """

    model: Model
    settings: Settings
    ceilings: Ceilings
    layers: Layers | None = None

    def total(
        self, n_tokens: int, n_past: int, n_outputs: int, further: Spans = ()
    ) -> Kernels:
        """Least time of a step in its kernels, as `parts` has it by device."""
        return self.parts(n_tokens, n_past, n_outputs, further).total

    def parts(
        self, n_tokens: int, n_past: int, n_outputs: int, further: Spans = ()
    ) -> StepParts:
        """Least time of a step on each device; `further` are its other sequences.

        LabError for a model of unknown cost, and for a missing probe.
        """
        return _StepOnDevices(self, [(n_tokens, n_past), *further], n_outputs).parts()


class _StepOnDevices:
    """A step of one or more sequences (`spans`), with the ceilings of each device."""

    def __init__(self, kernels: StepKernels, spans: Spans, n_outputs: int) -> None:
        model = kernels.model
        settings = kernels.settings
        ceilings = kernels.ceilings
        layers = kernels.layers
        self.model = model
        self.settings = settings
        self.n_sequences = Counter(spans)  # equal sequences are computed once
        self.n_tokens = sum(n_tokens for n_tokens, _ in spans)
        self.n_outputs = n_outputs
        self.n_threads = settings.n_threads_batch if self.n_tokens > 1 else settings.n_threads
        self.ceilings: dict[DeviceName, Ceilings] = {}
        for of_device in probing.each_device(ceilings):
            self.ceilings[of_device.device] = of_device
        gpus = [name for name in self.ceilings if name is not None]
        self.gpu = gpus[0] if gpus else None
        self.is_split = len(self.ceilings) > 1
        if not self.is_split:
            layers = (ceilings.device,) * ((model.n_layer or 0) + 1)
        elif layers is None:
            layers = probing.layers(ceilings.machine, model, settings)
        self.layers = layers[:-1]
        self.output = layers[-1]
        self.expert_layers = self.layers
        if self.is_split:
            self.expert_layers = self._layers_of_experts()

    def _layers_of_experts(self) -> Layers:
        """The device of each layer's experts."""
        on_cpu = memory.experts_on_cpu(self.settings, len(self.layers))
        devices = list[DeviceName]()
        for device, is_on_cpu in zip(self.layers, on_cpu, strict=True):
            devices.append(None if is_on_cpu else device)
        return tuple(devices)

    def parts(self) -> StepParts:
        work = cost.products(self.model, self.n_tokens, self.n_outputs)
        if work is None or cost.attended(self.model, 1, 0) is None:
            raise not_known(self.model)
        caches = self.caches()
        for name in (*self.layers, self.output, *caches):
            if name not in self.ceilings:
                raise kernel_rates.lacking(name or probing.CPU)
        layers_s: Seconds = defaultdict(float)
        head_s: Seconds = defaultdict(float)
        types = used_types(self.model)  # others weigh too little to be probed
        uploaded_bytes = 0.0
        for product in work:
            if product.is_head:
                self.add_product(head_s, product, (self.output,))
            elif product.matrix.type in types:
                layers = self.layers_with(product)
                uploaded_bytes += self.add_product(layers_s, product, layers)
        attention_s = self.attention_s(caches)
        by_device = {}
        for name in (*self.layers, self.output, *self.ceilings):
            by_device[name] = Kernels(layers_s[name], head_s[name], attention_s[name])
        between_s = self.between_s(uploaded_bytes) if self.is_split else 0.0
        return StepParts(by_device, between_s)

    def caches(self) -> Layers:
        """The device of each layer's cache; a single one if all caches are on the CPU."""
        if self.settings.kv_offload is False and self.is_split:
            return (None,)
        return self.layers

    def layers_with(self, product: cost.Product) -> Layers:
        """The device of each layer that has weights of a product."""
        part = product.matrix.part
        layers = self.expert_layers if part == EXPERTS else self.layers
        if product.is_last:
            return layers[-1:]
        is_in_all_layers = part == ATTENTION or self.model.arch in cost.NEVER_SKIPS
        if is_in_all_layers or len(layers) == 1:
            return layers
        return layers[:-1]  # the last layer computes only outputs, in a product of its own

    def add_product(self, seconds: Seconds, product: cost.Product, layers: Layers) -> float:
        """Add the time of a product to the devices of its layers; returns the bytes of weights that
        are copied to the GPU for it."""
        uploaded_bytes = 0.0
        for name, n_layers in Counter(layers).items():
            n_bytes = product.n_bytes * n_layers / len(layers)
            device = name
            if name is None and self.is_uploaded(product):
                device = self.gpu
                uploaded_bytes += n_bytes
            s_per_byte = kernel_rates.product_s_per_byte(
                self.ceilings[device],
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
        for rate in self.ceilings[None].rates:
            if rate.type == product.matrix.type and rate.buffer != probing.CPU:
                return False  # repacked: only the CPU can read these weights
        return True

    def attention_s(self, caches: Layers) -> Seconds:
        """Seconds of attention on the device of each layer's cache."""
        seconds: Seconds = defaultdict(float)
        is_flash = self.settings.uses_flash
        for name, n_layers in Counter(caches).items():
            share = n_layers / len(caches)
            skips_masked = name is None and is_flash  # the CPU's flash attention does
            for span, n_sequences in self.n_sequences.items():
                masked: Spans = []
                if self.settings.kv_unified and not skips_masked:
                    masked = self.sequences_beside(span)
                span_s = self.attention_of_span_s(name, span, masked, is_flash)
                seconds[name] += share * n_sequences * span_s
        return seconds

    def sequences_beside(self, span: cost.Span) -> list[cost.Span]:
        """The other sequences of the step; in a common cache their positions are computed too."""
        sequences = list(self.n_sequences.elements())
        sequences.remove(span)
        return sequences

    def attention_of_span_s(
        self, device: DeviceName, span: cost.Span, masked: Spans, is_flash: bool
    ) -> float:
        """Seconds of one sequence's attention in all layers, if their caches are on a device."""
        n_tokens, n_past = span
        seconds = 0.0
        for part in cost.attended(self.model, n_tokens, n_past, masked) or ():
            heads = part.heads
            flops_per_pair = 2 * (heads.head_dim + heads.head_dim_v)
            n_heads = heads.n_layer * heads.n_head
            s_per_flop = kernel_rates.attention_s_per_flop(
                self.ceilings[device],
                self.model,
                heads,
                self.settings.cache_types[0].upper(),
                n_tokens,
                self.n_threads,
                part.n_positions,
                is_flash,
            )
            seconds += flops_per_pair * n_heads * part.n_pairs * s_per_flop
        return seconds

    def between_s(self, uploaded_bytes: float) -> float:
        """Seconds of the copies: weights for the GPU, the hidden state wherever the device changes,
        and the logits."""
        hidden_bytes = VALUE_BYTES * (self.model.n_embd or 0)
        logits_bytes = VALUE_BYTES * (self.model.n_vocab or 0)
        seconds = self.copy_s(None, self.gpu, uploaded_bytes)
        device = None  # the embedding table is on the CPU
        for layer in self.layers:
            seconds += self.copy_s(device, layer, self.n_tokens * hidden_bytes)
            device = layer
        seconds += self.copy_s(device, self.output, self.n_outputs * hidden_bytes)
        return seconds + self.copy_s(self.output, None, self.n_outputs * logits_bytes)

    def copy_s(self, source: DeviceName, target: DeviceName, n_bytes: float) -> float:
        """Seconds of a copy from one device to another."""
        if source == target or not n_bytes:
            return 0.0
        op = UPLOAD if source is None else DOWNLOAD
        return kernel_rates.copy_s(self.ceilings[self.gpu], op, n_bytes)
