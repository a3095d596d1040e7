"""Best times out of measured rates: of a product in the shape that is most like it, of attention at its length.

Between measured sizes lie straight lines on logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from lab.core.lists import plural
from lab.core.record import Ceilings, Model, Rate
from lab.core.shape import EXPERTS, Heads, Matrix
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import ATTENTION, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION
from lab.why import where
from lab.why.probe_plan import used_types


def of_matrix(ceilings: Ceilings, model: Model, matrix: Matrix, n_tokens: int, n_threads: int) -> float:
    """Best time of a product, per byte of weights that it reads; between measured columns interpolated."""
    op = MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT
    rates = rates_for(ceilings, op, matrix.type, n_threads)
    if not rates:
        known = {rate.type for rate in ceilings.rates if ceilings.on_gpu or rate.n_threads == n_threads}
        lacking = [kind for kind in used_types(model) if kind not in known] or [matrix.type]
        raise LabError(
            f"The ceilings of {' and '.join(lacking)} {_on(ceilings, n_threads)} are not measured on this machine.",
            f"Run: lab ceilings -m {catalog.spec_of(model)} --types {','.join(lacking)}{_option(ceilings, n_threads)}",
        )
    by_shape = _by_shape(rates, (matrix.rows, matrix.columns))
    most = max(len(points) for points in by_shape)
    nearest = by_shape[0]
    if n_tokens not in nearest:  # a shape that is probed at few sizes of step does not say what lies between
        nearest = next(points for points in by_shape if n_tokens in points or len(points) == most)
    _check_measured(ceilings, rates[0], nearest, n_tokens)
    return _between({n: rate_of(rates)[0] for n, rates in nearest.items()}, n_tokens)


def of_attention(
    ceilings: Ceilings,
    model: Model,
    heads: Heads,
    kind: str,
    n_tokens: int,
    n_threads: int,
    n_positions: int,
    is_flash: bool = True,
) -> float:
    """Best time of attention with n_tokens queries over n_positions, per FLOP; between lengths interpolated.

    Without `is_flash` that of plain attention, or of flash attention where plain attention was not probed.
    """
    op = PLAIN_ATTENTION if not is_flash and rates_for(ceilings, PLAIN_ATTENTION, kind, n_threads) else ATTENTION
    rates = rates_for(ceilings, op, kind, n_threads)
    if not rates:
        raise LabError(
            f"The ceiling of attention on a {kind} cache {_on(ceilings, n_threads)} is not measured.",
            f"Run: lab ceilings -m {catalog.spec_of(model)} -ctk {kind.lower()}{_option(ceilings, n_threads)}",
        )
    rates = [rate for rate in rates if rate.n_positions] or rates  # older files have one length, which they do not say
    nearest = _by_shape(rates, (heads.n_head, model.head_dim, heads.n_head_kv))[0]
    _check_measured(ceilings, rates[0], nearest, n_tokens)
    points = {}
    for n, alike in nearest.items():
        points[n] = _between({rate.n_positions or 0: rate_of([rate])[1] for rate in alike}, n_positions)
    return _between(points, n_tokens)


def _check_measured(ceilings: Ceilings, one: Rate, sizes: Collection[int], n_tokens: int) -> None:
    """LabError for a size of step beyond those of a kernel that were probed before the session ended early."""
    kernel = one.op, one.type, one.n_threads
    is_cut = any((lacking.op, lacking.type, lacking.n_threads) == kernel for lacking in ceilings.missing or ())
    if is_cut and not min(sizes) <= n_tokens <= max(sizes):
        raise LabError(
            f"The ceiling of {one.op} of {one.type} for {n_tokens} tokens is not measured: its session ended early.",
            f"Measure the rest, with the settings of the runs: lab ceilings{_option(ceilings, one.n_threads)}",
        )


def rates_for(ceilings: Ceilings, op: str, kind: str, n_threads: int) -> list[Rate]:
    """The rates of a kernel and type, of the CPU with so many threads; a device has its own."""
    rates = [rate for rate in ceilings.rates if (rate.op, rate.type) == (op, kind)]
    return [rate for rate in rates if ceilings.on_gpu or rate.n_threads == n_threads]


def copy_s(ceilings: Ceilings, op: str, n_bytes: float) -> float | None:
    """Best seconds of an upload or download of so many bytes: a constant and so much a byte, from the smallest and the
    largest that were measured. None without these."""
    points = sorted((rate.n_bytes, min(rate.times_ns) / 1e9) for rate in ceilings.rates if rate.op == op)
    if not points:
        return None
    (few, few_s), (many, many_s) = points[0], points[-1]
    per_byte = max(0.0, many_s - few_s) / (many - few) if many > few else many_s / many
    return max(0.0, few_s - per_byte * few) + per_byte * n_bytes


def _on(ceilings: Ceilings, n_threads: int) -> str:
    return (
        f"on {where.label(where.measured_on(ceilings))}" if ceilings.on_gpu else f"with {plural(n_threads, 'thread')}"
    )


def _option(ceilings: Ceilings, n_threads: int) -> str:
    repack = " --no-repack" if ceilings.repack is False else ""
    return "" if ceilings.on_gpu else f" --threads {n_threads}{repack}"


def rate_of(rates: Sequence[Rate]) -> tuple[float, float]:
    """Best seconds per byte, and per FLOP, of the same probe."""
    best = min(rates, key=lambda rate: min(rate.times_ns) / rate.n_bytes)
    seconds = min(best.times_ns) / 1e9
    return seconds / best.n_bytes, seconds / best.flops if best.flops else math.inf


def _by_shape(rates: Sequence[Rate], wanted: tuple[int | None, ...]) -> list[dict[int, list[Rate]]]:
    """The rates of each probed shape by n_tokens, the shape that is most like (rows, columns, n_head_kv) first.

    Kernels are slower on small matrices; heads that share keys are another kernel.
    """
    rows, columns, n_head_kv = (*wanted, None)[:3]
    shapes: dict[tuple[object, ...], dict[int, list[Rate]]] = {}
    distances: dict[tuple[object, ...], float] = {}
    for rate in rates:
        key = rate.rows, rate.columns, rate.n_head_kv, rate.n_expert, rate.n_expert_used
        shared = (rate.rows / (rate.n_head_kv or rate.rows)) / ((rows or 1) / (n_head_kv or rows or 1))
        pairs = (rate.rows, rows or 1), (rate.columns, columns or 1), (shared, 1)
        distances[key] = sum(abs(math.log(here / there)) for here, there in pairs)
        shapes.setdefault(key, {}).setdefault(rate.n_tokens, []).append(rate)
    return [shapes[key] for key in sorted(shapes, key=lambda key: distances[key])]


def _between(points: dict[int, float], n: int) -> float:
    """A value at n out of values at some n, straight lines on logarithms; the nearest outside of them."""
    below = max((x for x in points if x <= n), default=min(points))
    above = min((x for x in points if x >= n), default=max(points))
    if below >= above:
        return points[below if n >= below else above]
    share = (math.log(n) - math.log(below)) / (math.log(above) - math.log(below))
    return math.exp((1 - share) * math.log(points[below]) + share * math.log(points[above]))
