"""From the stamps of a step's operations to their times, bytes, FLOPs and ceilings.

The engine stops after every operation (child.py). A stop costs time, which operations that compute
nothing (views) show, and the CPU's threads start and end at each: both are subtracted from every
other operation. Then the sum of all operations must be the time of the same step without stops;
`Phase.off` says how far it is from that. The ceiling of an operation is its kernel's (lab
ceilings).
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.core import cost
from lab.core.lists import grouped
from lab.core.memory import CPU, device_of
from lab.core.record import Ceilings, Device, Model, Settings
from lab.errors import LabError
from lab.features.trace.lines import SAMPLING, TracedPart, TracedPhase
from lab.features.trace.nodes import Node, Operand, StepTrace
from lab.features.trace.operations import (
    COPY_NAME,
    EMPTY,
    ON_ONE_THREAD,
    PRODUCTS,
    cost_of,
    matrix_of,
    place_of,
    weights_of,
)
from lab.roofline import kernel_rates, probing

COPIES = "copy between devices"
OUTSIDE = "outside operations"
SUMMED = ("n_bytes", "flops", "seconds", "least_s", "held_s", "n")


def phase(
    name: str,
    steps: StepTrace,
    model: Model,
    settings: Settings,
    ceilings: Ceilings | None = None,
    devices: Sequence[Device] = (),
) -> TracedPhase:
    """A phase of the way of a token, from the medians of its steps."""
    nodes = [(node, device_of(node.buffer, devices)) for node in steps.nodes]
    stops_ns = _cost_of_stops(nodes)
    kernels = _Kernels(steps, model, settings, _by_device(ceilings))
    usual_gap_ns = statistics.median(node.gap_ns for node in steps.nodes)
    parts: list[TracedPart] = []
    copied: set[str] = set()
    layer = None
    for node, device in nodes:
        operation, layer = place_of(node, layer)
        arriving = _arriving(node, copied)
        if arriving:
            copied |= {operand.name for operand in arriving}
            n_bytes = sum(operand.n_bytes for operand in arriving)
            gap_s = (node.gap_ns - usual_gap_ns) / 1e9
            parts.append(TracedPart(COPIES, layer, device, n_bytes, None, gap_s))
        if node.op not in EMPTY:
            taken_ns = node.ns - stops_ns.get(device, 0)
            if device == CPU and node.op not in ON_ONE_THREAD:
                taken_ns -= steps.threads_ns
            parts.append(_part(operation, layer, device, node, taken_ns / 1e9, kernels))
    parts.append(TracedPart(OUTSIDE, None, CPU, None, None, steps.outside_ns / 1e9))
    parts.append(TracedPart(SAMPLING, None, CPU, None, None, steps.choosing_ns / 1e9))
    return TracedPhase(
        name=name,
        n_tokens=steps.n_tokens,
        n_past=steps.n_past,
        parts=tuple(summed(parts, lambda part: (part.layer, part.operation, part.device))),
        stops_s={device: ns / 1e9 for device, ns in stops_ns.items()},
        untraced_s=steps.untraced_ns / 1e9,
        n_stops=len(steps.nodes),
        n_steps=steps.n_steps,
        threads_s=steps.threads_ns / 1e9 or None,
    )


def _cost_of_stops(nodes: Sequence[tuple[Node, str]]) -> dict[str, float]:
    """Nanoseconds of a stop by device: the median over its views."""
    views_ns: dict[str, list[float]] = {}
    for node, device in nodes:
        if node.op in EMPTY:
            views_ns.setdefault(device, []).append(node.ns)
    return {device: statistics.median(times) for device, times in views_ns.items()}


def _arriving(node: Node, copied: set[str]) -> list[Operand]:
    """The tensors that were copied to this device just before an operation."""
    operands = []
    for operand in node.sources:
        if COPY_NAME.fullmatch(operand.name) and operand.name not in copied:
            operands.append(operand)
    return operands


def _part(
    operation: str,
    layer: int | None,
    device: str,
    node: Node,
    seconds: float,
    kernels: _Kernels,
) -> TracedPart:
    n_bytes, flops = cost_of(node)
    least_s = kernels.least_s(node, device)
    held_s = 0.0 if least_s is None else seconds
    return TracedPart(operation, layer, device, n_bytes, flops, seconds, least_s, held_s)


def summed(
    parts: Sequence[TracedPart], key: Callable[[TracedPart], object]
) -> list[TracedPart]:
    """The sums of parts with equal keys, in order of appearance; None where nothing is known."""
    sums = []
    for parts_of_key in grouped(parts, key).values():
        totals: dict[str, Any] = {}
        for name in SUMMED:
            amounts = [getattr(part, name) for part in parts_of_key]
            known_amounts = [amount for amount in amounts if amount is not None]
            totals[name] = sum(known_amounts) if known_amounts else None
        sums.append(dataclasses.replace(parts_of_key[0], **totals))
    return sums


def _by_device(ceilings: Ceilings | None) -> dict[str, Ceilings]:
    if ceilings is None:
        return {}
    devices = probing.each_device(ceilings)
    return {ceilings.device or CPU: ceilings for ceilings in devices}


@dataclass(frozen=True)
class _Kernels:
    """The ceilings of the kernels of a step."""

    steps: StepTrace
    model: Model
    settings: Settings
    ceilings: dict[str, Ceilings]

    @property
    def n_threads(self) -> int:
        is_decode = self.steps.n_tokens == 1
        return self.settings.n_threads if is_decode else self.settings.n_threads_batch

    def least_s(self, node: Node, device: str) -> float | None:
        """Seconds of an operation at the ceiling of its kernel; None if that is not known."""
        ceilings = self.ceilings.get(device)
        if ceilings is None:
            return None
        with contextlib.suppress(LabError):  # this kernel was not probed
            if node.op == "FLASH_ATTN_EXT":
                return self._attention_s(node, ceilings)
            if node.op in PRODUCTS and weights_of(node):
                return self._product_s(node, ceilings)
        return None

    def _attention_s(self, node: Node, ceilings: Ceilings) -> float | None:
        """Seconds over the positions that tokens see."""
        query, keys, values = node.sources[:3]
        n_tokens = self.steps.n_tokens
        attended = cost.attended(self.model, n_tokens, self.steps.n_past) or []
        if len(attended) != 1 or query.ne[1] != n_tokens:
            return None  # layers differ, or the prompt was cut into several steps
        (layer,) = attended
        s_per_flop = kernel_rates.attention_s_per_flop(
            ceilings,
            self.model,
            layer.heads,
            keys.type,
            n_tokens,
            self.n_threads,
            layer.n_positions,
        )
        flops = 2 * query.ne[2] * layer.n_pairs * (keys.ne[0] + values.ne[0])
        return flops * s_per_flop

    def _product_s(self, node: Node, ceilings: Ceilings) -> float:
        n_tokens = node.result.ne[2] if node.op == "MUL_MAT_ID" else node.result.ne[1]
        n_input_bytes = sum(operand.n_bytes for operand in node.sources[1:])
        n_weight_bytes = cost_of(node)[0] - n_input_bytes
        s_per_byte = kernel_rates.product_s_per_byte(
            ceilings, self.model, matrix_of(node), n_tokens, self.n_threads
        )
        return n_weight_bytes * s_per_byte
