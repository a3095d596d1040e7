"""The least time of a step: its kernels at their ceilings, on the devices that hold its layers, and what moves between.

A product takes its bytes at the rate of its weights' type on the device that the layer lies on; products of several
layers count there by how many of these layers it holds. Between devices moves the hidden state, n_embd numbers of 4
bytes a token, and to this machine the logits, at what copies to and from the devices took. With layers on the CPU
beside a GPU llama.cpp copies their weights to the GPU for steps of 32 tokens and more (ggml-backend.cpp, op_offload).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import cost
from lab.core.record import Ceilings, Model, Settings
from lab.core.shape import ATTENTION as IN_ATTENTION
from lab.core.shape import EXPERTS
from lab.errors import LabError
from lab.process.wire import DOWNLOAD, UPLOAD
from lab.why import kernel_rates, where
from lab.why.probe_plan import used_types

LEAST_COPIED = 32
"""Tokens of a step from which on weights are copied to a GPU (offload_op of ggml-cuda and ggml-vulkan)."""

VALUE_BYTES = 4

Layers = tuple[str | None, ...]
"""The device of each layer, the output last; None is the CPU."""


@dataclass(frozen=True)
class Kernels:
    """Least seconds of a step or a phase in its kernels; `between_s` is what moves between devices, as far as known."""

    layers_s: float
    head_s: float
    attention_s: float
    between_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.layers_s + self.head_s + self.attention_s + self.between_s


@dataclass(frozen=True)
class Parts:
    """The same of a step by device; `between_s` is None where the copies of a device were not measured."""

    by_device: dict[str | None, Kernels]
    between_s: float | None = 0.0

    @property
    def total(self) -> Kernels:
        """All of it, one after the other."""
        return sum_of([*self.by_device.values(), Kernels(0.0, 0.0, 0.0, self.between_s or 0.0)])


def sum_of(parts: Sequence[Kernels]) -> Kernels:
    """Times that follow one another."""
    return Kernels(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))


def mean(steps: Sequence[Parts], n: int) -> Parts:
    """The sum of steps on the same devices, divided by n."""
    by_device = {}
    for name in steps[0].by_device:
        whole = sum_of([step.by_device[name] for step in steps])
        by_device[name] = Kernels(*(seconds / n for seconds in dataclasses.astuple(whole)))
    between = [step.between_s for step in steps]
    return Parts(by_device, None if None in between else sum(seconds or 0.0 for seconds in between) / n)


def least_s(steps: Sequence[Parts], overlaps: bool) -> float:
    """Seconds of steps that follow one another, at least.

    With `overlaps` each device begins the next step when it is through with one: the first step goes through all
    devices, and each further one takes what the slowest device needs for it.
    """
    if not overlaps or not steps:
        return sum(step.total.total_s for step in steps)
    slowest = [max(kernels.total_s for kernels in step.by_device.values()) for step in steps]
    return steps[0].total.total_s + sum(slowest[1:])


def total(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    others: Sequence[cost.Span] = (),
) -> Kernels:
    """Least time of a step in its kernels, as `parts` has it by device."""
    return parts(model, settings, ceilings, n_tokens, n_past, n_outputs, others).total


def not_known(model: Model) -> LabError:
    """What a step of a model costs is not known."""
    reason = f" ({model.uncounted})" if model.uncounted else ""
    return LabError(f"What a step of {model.name} costs is not known from its header{reason}.", "Take another model.")


def parts(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    others: Sequence[cost.Span] = (),
    layers: Layers | None = None,
) -> Parts:
    """Least time of a step on each device; `others` are further sequences in it, whose attention is each its own.

    `layers` says where the layers lie; without it the rule of `where.layers` does. With the ceilings of one device
    alone all of them lie there. LabError where the model's cost is not known, and for a missing probe.
    """
    spans = Counter([(n_tokens, n_past), *others])
    n_all = sum(n * times for (n, _), times in spans.items())
    work = cost.products(model, n_all, n_outputs)
    if work is None or cost.attended(model, n_tokens, n_past) is None:
        raise not_known(model)
    by_device = {where.measured_on(one): one for one in (ceilings, *(ceilings.others or ()))}
    if len(by_device) == 1:
        layers = tuple(by_device) * ((model.n_layer or 0) + 1)
    elif layers is None:
        layers = where.layers(ceilings.machine, model, settings)
    step = _Step(model, settings, by_device, layers, n_all)
    in_order = [name for name in dict.fromkeys((*layers, *by_device)) if name in by_device]
    seconds: dict[str | None, list[float]] = {name: [0.0, 0.0, 0.0] for name in in_order}
    uploaded = 0.0
    used = {*used_types(model), *(product.matrix.type for product in work if product.is_head)}
    for product in work:
        if product.matrix.type in used:
            for name, share in step.shares(product):
                target = step.computes(product, name)
                uploaded += share * product.n_bytes if target != name else 0.0
                seconds_per_byte = kernel_rates.of_matrix(
                    step.ceilings(target), model, product.matrix, product.n_tokens, step.n_threads
                )
                seconds[target][product.is_head] += share * product.n_bytes * seconds_per_byte
    for name, share in step.attention_shares():
        for (n, past), times in spans.items():
            seconds[name][2] += share * times * _attention_s(step, name, n, past)
    return Parts({name: Kernels(*times) for name, times in seconds.items()}, step.between_s(n_outputs, uploaded))


@dataclass(frozen=True)
class _Step:
    """What decides where the parts of a step are computed."""

    model: Model
    settings: Settings
    by_device: Mapping[str | None, Ceilings]
    layers: Layers
    n_tokens: int  # of all sequences

    @property
    def n_threads(self) -> int:
        return self.settings.n_threads if self.n_tokens == 1 else self.settings.n_threads_batch

    def ceilings(self, name: str | None) -> Ceilings:
        if name not in self.by_device:
            raise LabError(
                f"The ceilings of {where.label(name)} are not measured.",
                "Measure them with the settings of the runs: lab ceilings",
            )
        return self.by_device[name]

    def shares(self, product: cost.Product) -> list[tuple[str | None, float]]:
        """The devices that hold a product's weights, and how much of them each."""
        *blocks, output = self.layers
        if product.is_head:
            return [(output, 1.0)]
        if product.matrix.part == EXPERTS and self.settings.n_cpu_moe and len(self.by_device) > 1:
            n_moved = min(self.settings.n_cpu_moe, len(blocks))
            blocks[:n_moved] = [None] * n_moved
        if product.is_last:
            return [(blocks[-1], 1.0)]
        is_last_apart = product.matrix.part != IN_ATTENTION and self.model.arch not in cost.NEVER_SKIPS
        return _by_count(blocks[:-1] if is_last_apart and len(blocks) > 1 else blocks)

    def attention_shares(self) -> list[tuple[str | None, float]]:
        """The devices that hold the layers' caches."""
        if self.settings.kv_offload is False and len(self.by_device) > 1:
            return [(None, 1.0)]
        return _by_count(self.layers[:-1])

    def computes(self, product: cost.Product, name: str | None) -> str | None:
        """The device that computes a product whose weights lie on one: for many tokens a GPU takes those of the CPU."""
        if name is not None or product.n_tokens < LEAST_COPIED or self.settings.op_offload is False:
            return name
        kept = [rate for rate in self.ceilings(None).rates if rate.type == product.matrix.type]
        if any(rate.buffer != where.CPU for rate in kept):  # only the CPU can read its repacked weights
            return name
        return next((other for other in self.by_device if other is not None and not self.is_remote(other)), name)

    def is_remote(self, name: str | None) -> bool:
        device = where.device(self.ceilings(name).machine, name)
        return device is not None and where.is_remote(device)

    def between_s(self, n_outputs: int, uploaded: float) -> float | None:
        """Seconds of the copies: the hidden state wherever the device changes, the logits, and weights for a GPU."""
        if len(self.by_device) == 1:
            return 0.0
        n_embd, n_vocab = self.model.n_embd or 0, self.model.n_vocab or 0
        *blocks, output = self.layers
        places = [(None, 0), *((name, self.n_tokens * n_embd) for name in blocks)]
        places += [(output, n_outputs * n_embd), (None, n_outputs * n_vocab)]
        total = 0.0
        for (source, _), (target, n_values) in itertools.pairwise(places):
            if source == target or not n_values:
                continue
            times = [self._copy_s(DOWNLOAD, source, n_values), self._copy_s(UPLOAD, target, n_values)]
            known = [seconds for seconds in times if seconds is not None]
            if len(known) < 2:
                return None
            is_direct = None not in (source, target) and not self.is_remote(source) and not self.is_remote(target)
            total += max(known) if is_direct else sum(known)
        if uploaded:
            name = next(other for other in self.by_device if other is not None and not self.is_remote(other))
            weights_s = kernel_rates.copy_s(self.ceilings(name), UPLOAD, uploaded)
            if weights_s is None:
                return None
            total += weights_s
        return total

    def _copy_s(self, op: str, name: str | None, n_values: int) -> float | None:
        return 0.0 if name is None else kernel_rates.copy_s(self.ceilings(name), op, n_values * VALUE_BYTES)


def _by_count(layers: Sequence[str | None]) -> list[tuple[str | None, float]]:
    return [(name, n / len(layers)) for name, n in Counter(layers).items()]


def _attention_s(step: _Step, name: str | None, n_tokens: int, n_past: int) -> float:
    """Attention of one sequence in all layers, if one device did it."""
    model, kind, is_flash = step.model, step.settings.type_k.upper(), step.settings.flash_attn_resolved != "off"
    width = 2 * ((model.head_dim or 0) + (model.head_dim_v or model.head_dim or 0))
    seconds = 0.0
    for part in cost.attended(model, n_tokens, n_past) or ():
        flops = width * part.heads.n_layer * part.heads.n_head * part.n_pairs
        seconds += flops * kernel_rates.of_attention(
            step.ceilings(name), model, part.heads, kind, n_tokens, step.n_threads, part.n_positions, is_flash
        )
    return seconds
