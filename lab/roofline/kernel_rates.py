"""The best rates of kernels, looked up in the probes of ceilings.

The rate of a product is the one of the probed shape most like it, the rate of attention the one of
its length. Between probed sizes it is interpolated, linear in logarithms; outside of them the
nearest counts. What was not probed is a LabError that names the command to measure it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lab.core import shell
from lab.core.attention import AttentionLayers
from lab.core.lists import grouped, plural
from lab.core.matrices import EXPERTS, Matrix
from lab.core.record import Ceilings, Model, Rate
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import ATTENTION, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION
from lab.roofline import probing
from lab.roofline.probes import READ, used_types

READERS = (MUL_MAT, MUL_MAT_ID, READ)
"""Operations that read all of their bytes from the device's own memory."""


class KernelShape(NamedTuple):
    """What probes of one kernel have in common, beside n_tokens and n_positions."""

    op: str
    type: str  # of weights, or of the cache
    rows: int  # of attention: heads
    columns: int  # of attention: the dimension of a head
    n_head_kv: int | None = None


# Products


def product_s_per_byte(
    ceilings: Ceilings, model: Model, matrix: Matrix, n_tokens: int, n_threads: int
) -> float:
    """Least seconds of a product, per byte of weights that it reads."""
    op = MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT
    shape = KernelShape(op, matrix.type, matrix.rows, matrix.columns)
    shapes = _nearest_first(_rates_with(ceilings, n_threads), shape)
    if not shapes:
        raise _no_products(ceilings, model, matrix.type, n_threads)
    by_size = _nearest_with_size(shapes, n_tokens)
    points = {}
    for n, rates in by_size.items():
        points[n] = min(best_s(rate) / rate.n_bytes for rate in rates)
    return interpolated(points, n_tokens)


def _nearest_with_size(
    shapes: Sequence[dict[int, list[Rate]]], n_tokens: int
) -> dict[int, list[Rate]]:
    """The nearest shape that was probed with n_tokens, or with as many sizes as any shape.

    Between a few sizes interpolation says too little.
    """
    most_sizes = max(map(len, shapes))
    for by_size in shapes:
        if n_tokens in by_size or len(by_size) == most_sizes:
            return by_size
    return shapes[0]


# Attention


def attention_s_per_flop(
    ceilings: Ceilings,
    model: Model,
    heads: AttentionLayers,
    kind: str,
    n_tokens: int,
    n_threads: int,
    n_positions: int,
    is_flash: bool = True,
) -> float:
    """Least seconds of attention with n_tokens queries over n_positions, per FLOP.

    `kind` is the type of the cache.
    """
    at_length = {}
    points = attention_points(ceilings, model, heads, kind, n_threads, is_flash)
    for n, by_length in points.items():
        at_length[n] = interpolated(by_length, n_positions)
    return interpolated(at_length, n_tokens)


def attention_points(
    ceilings: Ceilings,
    model: Model,
    heads: AttentionLayers,
    kind: str,
    n_threads: int,
    is_flash: bool,
) -> dict[int, dict[int, float]]:
    """Least seconds of attention per FLOP, by queries and positions.

    Without flash attention those of plain attention, if it was probed.
    """
    flash = KernelShape(ATTENTION, kind, heads.n_head, heads.head_dim, heads.n_head_kv)
    rates = _rates_with(ceilings, n_threads)
    shapes = []
    if not is_flash:
        shapes = _nearest_first(rates, flash._replace(op=PLAIN_ATTENTION))
    shapes = shapes or _nearest_first(rates, flash)
    if not shapes:
        raise _not_measured(
            ceilings, model, f"attention on a {kind} cache", n_threads, "-ctk", kind.lower()
        )
    points: dict[int, dict[int, float]] = {}
    for n, rates_of_size in shapes[0].items():
        points[n] = {}
        for rate in rates_of_size:
            s_per_flop = best_s(rate) / rate.flops if rate.flops else math.inf
            points[n][rate.n_positions or 1] = s_per_flop
    return points


# Copies, and the best of all


def copy_s(ceilings: Ceilings, op: str, n_bytes: float) -> float:
    """Least seconds of an upload or download of n_bytes.

    A latency and a time per byte, from the smallest and the largest probed copy.
    """
    points = sorted((rate.n_bytes, best_s(rate)) for rate in ceilings.rates if rate.op == op)
    if not points:
        raise lacking(f"copies to and from {ceilings.device}")
    few_bytes, few_s = points[0]
    many_bytes, many_s = points[-1]
    if many_bytes == few_bytes:
        return many_s / many_bytes * n_bytes
    s_per_byte = max(0.0, many_s - few_s) / (many_bytes - few_bytes)
    latency_s = max(0.0, few_s - s_per_byte * few_bytes)
    return latency_s + s_per_byte * n_bytes


class Roof(NamedTuple):
    """The machine's best, over all kernels: FLOP/s and bytes/s (both in 10^9)."""

    gflops: float
    gbps: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic is the limit."""
        return self.gflops / self.gbps


def roof(ceilings: Ceilings, layers: Sequence[str | None] = ()) -> Roof:
    """The best of all probes. With `layers` on several devices, weighted by their shares of the
    layers."""
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


# Looking up


def best_s(rate: Rate) -> float:
    return min(rate.times_ns) / 1e9


def _rates_with(ceilings: Ceilings, n_threads: int) -> list[Rate]:
    """The rates of a GPU, or of the CPU with n_threads."""
    return [rate for rate in ceilings.rates if ceilings.on_gpu or rate.n_threads == n_threads]


def _nearest_first(rates: Sequence[Rate], shape: KernelShape) -> list[dict[int, list[Rate]]]:
    """The rates of each probed shape by n_tokens; first the shape most like the wanted one."""
    of_kernel = [rate for rate in rates if (rate.op, rate.type) == (shape.op, shape.type)]
    shapes = grouped(
        of_kernel,
        lambda rate: (
            rate.rows,
            rate.columns,
            rate.n_head_kv,
            rate.n_expert,
            rate.n_expert_used,
        ),
    )
    nearest = sorted(shapes.values(), key=lambda rates: _distance(rates[0], shape))
    return [grouped(rates, lambda rate: rate.n_tokens) for rates in nearest]


def _distance(rate: Rate, shape: KernelShape) -> float:
    """How far a probed shape is from the wanted one, in logarithms."""
    heads_per_key = shape.rows / (shape.n_head_kv or shape.rows)
    probed_heads_per_key = rate.rows / (rate.n_head_kv or rate.rows)
    ratios = (
        rate.rows / shape.rows,
        rate.columns / shape.columns,
        probed_heads_per_key / heads_per_key,
    )
    return sum(abs(math.log(ratio)) for ratio in ratios)


def interpolated(points: Mapping[int, float], n: int) -> float:
    """The value at n: on a straight line in logarithms between two points, otherwise of the
    nearest."""
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


# What was not probed


def lacking(what: str) -> LabError:
    return LabError(
        f"The ceilings of {what} have not been measured.",
        "Measure them with the settings of the runs: lab ceilings",
    )


def _no_products(ceilings: Ceilings, model: Model, kind: str, n_threads: int) -> LabError:
    """The error for a type of weights without a rate; it names all types of the model that lack
    one."""
    probed = {rate.type for rate in _rates_with(ceilings, n_threads)}
    missing = [name for name in used_types(model) if name not in probed] or [kind]
    return _not_measured(
        ceilings, model, " and ".join(missing), n_threads, "--types", ",".join(missing)
    )


def _not_measured(
    ceilings: Ceilings, model: Model, what: str, n_threads: int, option: str, value: str
) -> LabError:
    """The error for a kernel without a rate; `option` and its value measure it."""
    arguments: list[object] = [option, value]
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
