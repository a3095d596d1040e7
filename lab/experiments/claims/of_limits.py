"""Claims about what limits a phase (arithmetic, memory traffic, or neither), and about the cache.

A phase near a roof is one sign, its reaction to an intervention another: half the threads leave half the FLOP/s, but
usually more than half of the memory bandwidth. Both are tested. The machine's best comes from its ceilings. FLOPs and
bytes follow from the model's shape; time does not, because a kernel may be slower than its memory traffic. So claims
about bytes are computed, and claims about time are measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lab.analysis.wording import digits
from lab.core import cost, memory, phases, shape
from lab.core.lists import plural
from lab.core.record import Model, Record, Run
from lab.errors import LabError
from lab.experiments.claims import claim as rules
from lab.experiments.claims.claim import Condition, Evidence, Figure, Measured, claim
from lab.experiments.claims.claim_parts import CEILINGS
from lab.models import catalog, shapes
from lab.why import roofline, step_kernels

BOOKS = "Pope et al. (2022); Austin et al. (2025)"

TEXTBOOK = "llama-2-7b"
"""The 7B of the textbooks: every head has its own keys and values."""


@claim(
    1,
    "Prefill is compute-bound",
    Condition("At the longest prompt, the share of the time that its kernels need at their best", 60, unit="%"),
    Condition("The least time of its FLOPs over the least time of its bytes, from the ceilings,", 1),
    Condition("The slowdown with fewer threads, as a share of the reduction in threads,", 85, unit="%"),
    needs=("lengths", "threads", CEILINGS),
    note="The ceiling is that of the model's own kernels: another format may have faster ones.",
    source=BOOKS,
)
def limit_of_prefill(evidence: Evidence) -> Measured:
    """Prefill at the longest prompt against its kernels' ceilings, and with half the threads."""
    n, records = list(evidence.lengths().items())[-1]
    row = next(row for row in roofline.explain(records, evidence.best) if row.phase == "prefill")
    seconds = [taken / 1e9 for record in records if (taken := phases.prefill_ns(record.run))]
    reached = rules.figure(f"FLOP/s at {n:,} tokens", [row.flops / s for s in seconds], "GFLOP/s", 1e-9)
    share = rules.share("share of its kernels' best", [row.kernels.total_s / s for s in seconds])
    half, n_times = _half_the_threads(evidence, "prefill", phases.prefill_ns, is_batch=True)
    if half is None:
        return _threads_are_not_it(evidence, [reached, share])
    words = f"arithmetic ({digits(row.arithmetic_s)} s) over memory traffic ({digits(row.traffic_s)} s)"
    of_threads = rules.scaled(half, 100 / n_times, f"{half.name}, as a share of {digits(n_times)}x", "%")
    roofs = Figure(words, row.arithmetic_s / row.traffic_s, "times")
    return Measured(([share], [roofs], [of_threads]), [reached, share, half])


@claim(
    2,
    "Decode is memory-bound",
    Condition("Decode's bytes per second, as a share of the fastest probe,", 60, unit="%"),
    Condition("Decode's time with half the threads over that with all", most=1.3),
    needs=("lengths", "threads", CEILINGS),
    note="The bytes are those after the shortest measured prompt.",
    source=BOOKS,
)
def limit_of_decode(evidence: Evidence) -> Measured:
    n, records = next(iter(evidence.lengths().items()))
    gbps = roofline.roof(evidence.best).gbps
    rates = [_gbps(record, phases.decode_compute_mean_ns(record.run)) for record in records]
    reached = rules.figure(f"bytes per second after {n:,} tokens", rates, "GB/s")
    share = rules.share("share of plain reading", [rate and rate / gbps for rate in rates])
    if share is None and not any(rates):
        raise _not_counted(records[0].model)
    half, _ = _half_the_threads(evidence, "decode", phases.tpot_ns)
    if half is None:
        return _threads_are_not_it(evidence, [reached, share])
    return Measured(([share], [half]), [reached, share, half], _kernel_remark(records[0], evidence, gbps))


@claim(
    15,
    "FLOP/s do not matter for decode",
    Condition("The time per token with half the threads over that with all, in blocks,", most=1.1),
    needs=("threads",),
    refuted="Fewer threads also read less, which may explain part of it.",
    also=("quantizations",),
    ignores_disturbances=True,
)
def decode_with_less_arithmetic(evidence: Evidence) -> Measured:
    """Decode with half the threads; as a second intervention, with a format of nearly the same size."""
    half, _ = _half_the_threads(evidence, "decode", phases.tpot_ns)
    if half is None:
        return _threads_are_not_it(evidence, [])
    formats = evidence.by(lambda record: record.model.quantization, "quantizations")
    sides = formats.get("Q4_0", []), formats.get("Q4_1", [])
    other = rules.compared("decode of Q4_1 over Q4_0 (1.1x the bytes)", *sides, phases.tpot_ns)
    return Measured(([half],), [half, other])


@claim(
    14,
    "Decode yields at most bandwidth / bytes tokens per second",
    Condition("Decode's bytes per second, as a share of the fastest probe,", most=100, unit="%"),
    needs=("lengths", CEILINGS),
    note="This must hold in every measured setup (lengths, quantizations).",
    refuted="Either the ceilings are too low (lab ceilings --again), or the weights stay in the processor's cache.",
    also=("quantizations",),
)
def decode_under_the_roof(evidence: Evidence) -> Measured:
    gbps = roofline.roof(evidence.best).gbps
    groups = evidence.by(
        lambda one: f"{one.model.quantization or one.model.name} after {one.run.n_prompt:,} tokens",
        "lengths",
        "quantizations",
    )
    known = []
    for name, records in groups.items():
        rates = [_gbps(record, phases.tpot_ns(record.run)) for record in records]
        if found := rules.figure(f"{name}, share of the limit", [rate and rate / gbps for rate in rates], "%", 100):
            known.append(found)
    if not known:
        raise _not_counted(evidence.of("lengths")[0].model)
    known.sort(key=lambda one: -one.value)
    return Measured((known,), known[:2])


@claim(
    8,
    "Arithmetic intensity: prefill about P FLOPs per byte, decode about 1 (F16)",
    Condition("The FLOPs per byte of prefill over its tokens P, at every measured length,", 1 / 1.5, 1.5),
    Condition("The FLOPs per byte of decode", 1 / 1.5, 1.5),
    needs=("lengths",),
    note="Computed from the steps of the runs, with weights counted in F16.",
    ignores_disturbances=True,
)
def intensity_by_phase(evidence: Evidence) -> Measured:
    """FLOPs per byte of the steps of both phases, with weights counted in F16."""
    first, lengths = evidence.of("lengths")[0], evidence.lengths()
    model = as_f16(first.model)
    if model is None:
        raise _not_counted(first.model)
    tested: dict[bool, list[Figure | None]] = {True: [], False: []}
    shown = []
    for n, alike in lengths.items():
        for is_prefill, phase, expected in ((True, "prefill", n), (False, "decode", 1)):
            value = _intensity(model, alike[0].run, is_prefill)
            if value is None:
                continue
            known = Figure(f"{phase} at {n:,} tokens", value, "FLOPs per byte")
            name = f"{known.name}, {digits(value)} FLOPs per byte, over {expected:,}"
            tested[is_prefill].append(rules.scaled(known, 1 / expected, name, ""))
            if is_prefill or n == max(lengths):
                shown.append(known)
    n_ubatch = first.settings.n_ubatch
    again = f"Weights are read again for every {n_ubatch:,} tokens of a prompt"
    remark = f"{again}, so longer prompts reach hardly more." if max(lengths) > n_ubatch else ""
    return Measured((tested[True], tested[False]), shown, remark)


def as_f16(model: Model) -> Model | None:
    """The model with all its matrices in F16; None if the lab cannot count them."""
    known = shape.matrices(model)
    if known is None:
        return None
    matrices = tuple(dataclasses.replace(matrix, type="F16") for matrix in known)
    n_bytes = round(sum(matrix.n_bytes for matrix in matrices))
    return dataclasses.replace(model, matrices=matrices, tensor_bytes={"F16": n_bytes})


def _intensity(model: Model, run: Run, is_prefill: bool) -> float | None:
    last = phases.n_prefill_steps(run) - 1
    chosen = [i for i in range(len(run.steps.kind)) if (i <= last) == is_prefill]
    costs = [cost.step(model, run.steps.n_tokens[i], run.steps.n_past[i], int(i >= last)) for i in chosen]
    known = [one for one in costs if one is not None]
    return sum(one.flops for one in known) / sum(one.n_bytes for one in known) if known else None


def _gbps(record: Record, token_ns: float | None) -> float | None:
    """10^9 bytes per second of a decode step in the middle of the answer; None if its cost is unknown."""
    run, settings = record.run, record.settings
    step = cost.step(record.model, 1, run.n_prompt + max(0, run.n_gen - 2) // 2, 1, settings.type_k, settings.type_v)
    return step.n_bytes / token_ns if step and token_ns and token_ns > 0 else None


def _half_the_threads(
    evidence: Evidence, phase: str, value: rules.Value, is_batch: bool = False
) -> tuple[Figure | None, float]:
    """The time of a phase with half the threads over that with all, and the ratio of the threads.

    None on a GPU, and if one side is missing.
    """
    sides = evidence.by(lambda record: record.run.variant if record.settings.n_gpu_layers == 0 else None, "threads")
    if not {"all", "half"} <= sides.keys():
        return None, 1.0
    chosen = [sides[side][0].settings for side in ("all", "half")]
    n_all, n_half = ((one.n_threads_batch if is_batch else one.n_threads) for one in chosen)
    known = rules.compared(f"{phase} with {n_half} of {n_all} threads", sides["all"], sides["half"], value)
    return known, n_all / max(1, n_half)


def _threads_are_not_it(evidence: Evidence, figures: Sequence[Figure | None]) -> Measured:
    """The figures without a comparison of threads, and the reason."""
    if any(record.settings.n_gpu_layers > 0 for record in evidence.of("threads")):
        return Measured((), figures, "The layers are on a GPU, where the number of CPU threads hardly matters.")
    return Measured((), figures, "Runs with all or with half the threads are missing.")


def _kernel_remark(record: Record, evidence: Evidence, gbps: float) -> str:
    """A sentence if the model's own kernels read much more slowly than the memory allows."""
    settings, n_past = record.settings, record.run.n_prompt
    try:
        kernels = step_kernels.total(record.model, settings, evidence.best, 1, n_past, 1)
    except LabError:
        return ""
    step = cost.step(record.model, 1, n_past, 1, settings.type_k, settings.type_v)
    if kernels is None or step is None or kernels.total_s <= 0:
        return ""
    alone = step.n_bytes / kernels.total_s / 1e9
    if alone > gbps / roofline.KERNEL_FACTOR:
        return ""
    return f"The kernel is the limit: alone it reads {digits(alone)} GB/s; plain reading reaches {digits(gbps)} GB/s."


def _not_counted(model: Model) -> LabError:
    return LabError(f"The cost of a step of {model.name} cannot be derived from its header.")


def _trained_context(model: Model) -> int:
    """Positions that the model was trained for. LabError if unknown."""
    if not model.n_ctx_train:
        raise LabError(f"The context that {model.name} was trained for is unknown.")
    return model.n_ctx_train


@claim(
    11,
    "The KV cache dominates decode's memory",
    Condition("The cache of one sequence over the weights, at the context that the model was trained for,", 1),
    needs=("lengths",),
    note="Computed, not measured.",
    ignores_disturbances=True,
)
def cache_over_weights(evidence: Evidence) -> Measured:
    record = evidence.of("lengths")[0]
    model, n_ctx = record.model, _trained_context(record.model)
    settings = dataclasses.replace(record.settings, n_ctx=n_ctx, n_seq_max=1)
    cache, weights = memory.kv_cache_bytes(model, settings), sum(model.tensor_bytes.values()) or model.n_bytes
    if cache is None or not weights:
        raise LabError(f"The size of the cache of {model.name} cannot be derived from its header.")
    known = Figure(f"cache over weights at {n_ctx:,} tokens", cache / weights, "times")
    per_position = memory.kv_bytes_per_position(model, settings.type_k, settings.type_v)
    crossing = Figure("cache as large as the weights at", weights / per_position, "tokens") if per_position else None
    seven = shapes.model_of(catalog.find(TEXTBOOK), "F16")
    name = f"the same for {seven.name} in F16 (trained for {seven.n_ctx_train or 0:,})"
    of_seven = Figure(name, (seven.n_bytes or 0) / (memory.kv_bytes_per_position(seven) or 1), "tokens")
    return Measured(([known],), [known, None if any(model.windows or ()) else crossing, of_seven])


@claim(
    12,
    "Grouped-query attention cuts the cost of the cache",
    Condition("The ratio of the slopes of a token's time, over the ratio of the cache's bytes,", 0.75, 1.25),
    needs=("heads",),
    note="The slopes are over positions, for two shapes that differ only in key-value heads.",
    source="Ainslie et al. (2023)",
)
def slopes_by_heads(evidence: Evidence) -> Measured:
    by_heads = evidence.by(lambda record: record.model.n_head_kv or None, "heads")
    if len(by_heads) < 2:
        return Measured(())
    few, many = (by_heads[n] for n in (min(by_heads), max(by_heads)))
    name = "growth of a token's time per 1,000 positions, {} key-value heads"
    slopes = [
        rules.slope(name.format(side[0].model.n_head_kv), rules.token_times(side), "ms", 1e3) for side in (few, many)
    ]
    n_bytes = [_bytes_per_position(side[0]) for side in (few, many)]
    if None in slopes or not n_bytes[0] or not n_bytes[1]:
        return Measured((), slopes)
    of_bytes, ratio = n_bytes[1] / n_bytes[0], _over(slopes[1], slopes[0])
    unknown = Figure("ratio of the slopes unknown, because one may be 0", 0.0, "times", 0.0, math.inf)
    tested = rules.scaled(ratio, 1 / of_bytes, "ratio of the slopes over ratio of the bytes") or unknown
    return Measured(([tested],), [ratio, Figure("ratio of the bytes", of_bytes, "times"), *slopes])


def _over(many: Figure | None, few: Figure | None) -> Figure | None:
    """The ratio of two slopes, with the intervals of both; None if one may be 0."""
    if many is None or few is None or many.ends[0] <= 0 or few.ends[0] <= 0:
        return None
    low, high = many.ends[0] / few.ends[1], many.ends[1] / few.ends[0]
    return Figure("ratio of the slopes", many.value / few.value, "times", low, high)


def _bytes_per_position(record: Record) -> float | None:
    return memory.kv_bytes_per_position(record.model, record.settings.type_k, record.settings.type_v)


@claim(
    24,
    "Reusing the cache trades compute for memory traffic",
    Condition("The cache's share of the bytes of a decode step", 50, unit="%"),
    needs=("lengths",),
    note="Computed for the context that the model was trained for. The context's share of a token's time is measured "
    "and shown.",
    also=("context",),
    ignores_disturbances=True,
)
def cache_of_a_step(evidence: Evidence) -> Measured:
    """The cache's share of a step's bytes at the trained context, and of a token's time if that was measured."""
    record = evidence.of("lengths")[0]
    model, settings, n_ctx = record.model, record.settings, _trained_context(record.model)
    with_cache = cost.step(model, 1, n_ctx - 1, 1, settings.type_k, settings.type_v)
    without = cost.step(model, n_ctx, 0, 1, settings.type_k, settings.type_v)
    if with_cache is None or without is None:
        raise _not_counted(model)
    of_bytes = 100 * with_cache.kv_read_bytes / with_cache.n_bytes
    share = Figure(f"cache's share of a step's bytes at {n_ctx:,} tokens", of_bytes, "%")
    saved = Figure(
        f"FLOPs of a step without a cache over with it, at {n_ctx:,} tokens", without.flops / with_cache.flops, "times"
    )
    points, grown = rules.token_times(evidence.of("context")), None
    if len({place for place, _ in points}) > 1:
        (w, k), longest = rules.line(points), points[-1][0]
        name = f"context's share of a token's time at {longest:,.0f} tokens"
        grown = Figure(name, 100 * k * longest / (w + k * longest), "%")
    return Measured(([share],), [share, saved, grown])


@claim(
    29,
    "K and V of a token depend on that token alone",
    Condition("The change of later tokens' K or V when the first token is replaced, in any layer,", most=1, unit="%"),
    needs=("dependence",),
    note="The change is the norm of the difference over the norm.",
    ignores_disturbances=True,
    source="texts that explain one layer, such as Kanna, Why KV cache and not QKV cache (sithankanna.com)",
)
def values_of_one_token(evidence: Evidence) -> Measured:
    """The change of K and V in the first layer, and in that where it is largest."""
    changes = [100 * max(layer) for layer in evidence.of("dependence")[0].run.changes or ()]
    if not changes:
        return Measured(())
    largest = max(changes)
    known = Figure(f"largest change of K or V, in layer {changes.index(largest)}", largest, "%")
    first = Figure("change in layer 0, which sees only embeddings", changes[0], "%")
    n_changed = sum(change > 1 for change in changes)
    return Measured(([known],), [known, first], f"They change in {n_changed} of {plural(len(changes), 'layer')}.")


@claim(
    30,
    "Prefill reaches a high utilization of the machine's FLOP/s (MFU)",
    Condition("Prefill's FLOP/s at the longest prompt, as a share of the fastest probe,", 50, unit="%"),
    needs=("lengths", CEILINGS),
    note="The fastest probe may be of another format. Decode's share is shown.",
    source="Pope et al. (2022): 76 % in large batches",
)
def utilization_of_prefill(evidence: Evidence) -> Measured:
    """FLOP/s of both phases over the highest of all kernels."""
    n, records = list(evidence.lengths().items())[-1]
    peak, shares = roofline.roof(evidence.best).gflops, []
    values = {"prefill": phases.prefill_ns, "decode": phases.decode_compute_mean_ns}
    flops = {row.phase: row.flops for row in roofline.explain(records, evidence.best)}
    for phase, value in values.items():
        taken = [value(record.run) for record in records if phase in flops]
        known = [flops[phase] / ns / peak if ns else None for ns in taken]
        shares.append(rules.share(f"{phase}'s share of the peak at {n:,} tokens", known))
    return Measured((shares[:1],), [*shares, Figure("fastest probe", peak, "GFLOP/s")])


CLAIMS = (
    limit_of_prefill,
    limit_of_decode,
    decode_with_less_arithmetic,
    decode_under_the_roof,
    intensity_by_phase,
    cache_over_weights,
    slopes_by_heads,
    cache_of_a_step,
    values_of_one_token,
    utilization_of_prefill,
)
