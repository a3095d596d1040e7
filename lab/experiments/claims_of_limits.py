"""Claims about what limits a phase (arithmetic, memory traffic, or neither), and about the cache's part in it.

That a phase is near a roof is one sign, that it follows an intervention another: with half the threads half the FLOP/s
are left, but mostly more than half of the memory's rate. Both are asked. What the machine does at best comes from its
ceilings. FLOPs and bytes follow from the model's shape, time does not: a kernel may need longer than its bytes do. So
what is claimed of bytes is computed, and what is claimed of time is measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lab.core import cost, memory, phases, shape
from lab.core.record import Model, Record, Run
from lab.errors import LabError
from lab.experiments import claim as rules
from lab.experiments.claim import Condition, Evidence, Figure, Measured, claim
from lab.experiments.claim_parts import CEILINGS
from lab.models import catalog, shapes
from lab.why import roofline, step_kernels

BOOKS = "Pope et al. (2022); Austin et al. (2025)"

TEXTBOOK = "llama-2-7b"
"""The 7B of the textbooks: every head has keys and values of its own."""


@claim(
    1,
    "Prefill is compute-bound",
    Condition("The share of the time that its kernels need at their best, at the longest prompt,", 60, unit="%"),
    Condition("By the machine's roofs, the time of its FLOPs over that of its bytes", 1),
    Condition("The time with fewer threads, as a share of the factor by which they are fewer,", 85, unit="%"),
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
    share = rules.share("of what its kernels alone reach", [row.kernels.total_s / s for s in seconds])
    half, n_times = _half_the_threads(evidence, "prefill", phases.prefill_ns, is_batch=True)
    if half is None:
        return _threads_are_not_it(evidence, [reached, share])
    words = f"arithmetic alone over reading alone, {row.arithmetic_s:.3g} s and {row.traffic_s:.3g} s"
    of_threads = rules.scaled(half, 100 / n_times, f"{half.name}, of {n_times:.3g} times", "%")
    roofs = Figure(words, row.arithmetic_s / row.traffic_s, "times")
    return Measured(([share], [roofs], [of_threads]), [reached, share, half])


@claim(
    2,
    "Decode is memory-bound",
    Condition("The share of the fastest probe's bytes per second that decode reads", 60, unit="%"),
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
    share = rules.share("of plain reading", [rate and rate / gbps for rate in rates])
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
    refuted="Fewer threads also read less, which may be a part of it.",
    also=("quantizations",),
    ignores_disturbances=True,
)
def decode_with_less_arithmetic(evidence: Evidence) -> Measured:
    """Decode with half the threads; and, as another intervention, with a format of nearly the same bytes."""
    half, _ = _half_the_threads(evidence, "decode", phases.tpot_ns)
    if half is None:
        return _threads_are_not_it(evidence, [])
    formats = evidence.by(lambda record: record.model.quantization, "quantizations")
    sides = formats.get("Q4_0", []), formats.get("Q4_1", [])
    other = rules.compared("decode of Q4_1 over Q4_0 (1.1 times the bytes)", *sides, phases.tpot_ns)
    return Measured(([half],), [half, other])


@claim(
    14,
    "Decode yields at most bandwidth / bytes tokens per second",
    Condition("The share of the fastest probe's bytes per second that decode reads", most=100, unit="%"),
    needs=("lengths", CEILINGS),
    note="This must be so in every measured setup (lengths, quantizations).",
    refuted="Nothing reads faster than it can: the ceilings are too low (lab ceilings --again), or the weights "
    "stay in the processor's cache.",
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
        if found := rules.figure(f"{name}, of the limit", [rate and rate / gbps for rate in rates], "%", 100):
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
    note="Computed from the steps as they ran, with weights counted in F16.",
    ignores_disturbances=True,
)
def intensity_by_phase(evidence: Evidence) -> Measured:
    """FLOPs per byte of the steps of both phases, as they were, with weights in F16."""
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
            name = f"{known.name}, {value:.3g} FLOPs per byte, over {expected:,}"
            tested[is_prefill].append(rules.scaled(known, 1 / expected, name, ""))
            if is_prefill or n == max(lengths):
                shown.append(known)
    n_ubatch = first.settings.n_ubatch
    again = f"Weights are read again for every {n_ubatch:,} tokens of a prompt"
    remark = f"{again}, so longer ones reach no much higher one." if max(lengths) > n_ubatch else ""
    return Measured((tested[True], tested[False]), shown, remark)


def as_f16(model: Model) -> Model | None:
    """The model with all its matrices in F16; None where the lab cannot count them."""
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
    """10^9 bytes per second of a decode step in the middle of the answer; None where its cost is not known."""
    run, settings = record.run, record.settings
    step = cost.step(record.model, 1, run.n_prompt + max(0, run.n_gen - 2) // 2, 1, settings.type_k, settings.type_v)
    return step.n_bytes / token_ns if step and token_ns and token_ns > 0 else None


def _half_the_threads(
    evidence: Evidence, phase: str, value: rules.Value, is_batch: bool = False
) -> tuple[Figure | None, float]:
    """How many times as long a phase takes with half the threads, and how many times fewer these are.

    None on a GPU, and where one side is missing.
    """
    sides = evidence.by(lambda record: record.run.variant if record.settings.n_gpu_layers == 0 else None, "threads")
    if not {"all", "half"} <= sides.keys():
        return None, 1.0
    chosen = [sides[side][0].settings for side in ("all", "half")]
    n_all, n_half = ((one.n_threads_batch if is_batch else one.n_threads) for one in chosen)
    known = rules.compared(f"{phase} with {n_half} of {n_all} threads", sides["all"], sides["half"], value)
    return known, n_all / max(1, n_half)


def _threads_are_not_it(evidence: Evidence, figures: Sequence[Figure | None]) -> Measured:
    """What is shown where there is no comparison of threads, and why there is none."""
    if any(record.settings.n_gpu_layers > 0 for record in evidence.of("threads")):
        return Measured((), figures, "Layers are on a GPU here, where the CPU's threads decide nothing.")
    return Measured((), figures, "Half the threads, or all of them, were not measured.")


def _kernel_remark(record: Record, evidence: Evidence, gbps: float) -> str:
    """How fast the model's own kernels read alone, where that is much less than memory gives."""
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
    return f"The kernel is the limit: alone it reads {alone:.3g} GB/s of {gbps:.3g} that plain reading gives."


def _not_counted(model: Model) -> LabError:
    return LabError(f"What a step of {model.name} costs is not known from its header.")


def _trained_context(model: Model) -> int:
    """Positions that the model was trained for. LabError where that is not known."""
    if not model.n_ctx_train:
        raise LabError(f"The context that {model.name} was trained for is not known.")
    return model.n_ctx_train


@claim(
    11,
    "The KV cache dominates decode's memory",
    Condition("The cache of one sequence over the weights, at the context that the model was trained for,", 1),
    needs=("lengths",),
    note="This is computed.",
    ignores_disturbances=True,
)
def cache_over_weights(evidence: Evidence) -> Measured:
    record = evidence.of("lengths")[0]
    model, n_ctx = record.model, _trained_context(record.model)
    settings = dataclasses.replace(record.settings, n_ctx=n_ctx, n_seq_max=1)
    cache, weights = memory.kv_cache_bytes(model, settings), sum(model.tensor_bytes.values()) or model.n_bytes
    if cache is None or not weights:
        raise LabError(f"How large the cache of {model.name} is, is not known from its header.")
    known = Figure(f"cache over weights at {n_ctx:,} tokens", cache / weights, "times")
    per_position = memory.kv_bytes_per_position(model, settings.type_k, settings.type_v)
    crossing = Figure("cache outgrows weights at", weights / per_position, "tokens") if per_position else None
    seven = shapes.model_of(catalog.find(TEXTBOOK), "F16")
    name = f"the same of {seven.name} in F16 (trained for {seven.n_ctx_train or 0:,})"
    of_seven = Figure(name, (seven.n_bytes or 0) / (memory.kv_bytes_per_position(seven) or 1), "tokens")
    return Measured(([known],), [known, None if any(model.windows or ()) else crossing, of_seven])


@claim(
    12,
    "Grouped-query attention cuts the cost of the cache",
    Condition("The ratio of the slopes of a token's time over that of the cache's bytes", 0.75, 1.25),
    needs=("heads",),
    note="The slopes are those over positions, of two shapes that differ in key-value heads alone.",
    source="Ainslie et al. (2023)",
)
def slopes_by_heads(evidence: Evidence) -> Measured:
    by_heads = evidence.by(lambda record: record.model.n_head_kv or None, "heads")
    if len(by_heads) < 2:
        return Measured(())
    few, many = (by_heads[n] for n in (min(by_heads), max(by_heads)))
    name = "a token per 1,000 positions with {} key-value heads"
    slopes = [
        rules.slope(name.format(side[0].model.n_head_kv), rules.token_times(side), "ms", 1e3) for side in (few, many)
    ]
    n_bytes = [_bytes_per_position(side[0]) for side in (few, many)]
    if None in slopes or not n_bytes[0] or not n_bytes[1]:
        return Measured((), slopes)
    of_bytes, ratio = n_bytes[1] / n_bytes[0], _over(slopes[1], slopes[0])
    unknown = Figure("a slope cannot be told from 0, so nor can their ratio", 0.0, "times", 0.0, math.inf)
    tested = rules.scaled(ratio, 1 / of_bytes, "ratio of the slopes over that of the bytes") or unknown
    return Measured(([tested],), [ratio, Figure("ratio of the bytes", of_bytes, "times"), *slopes])


def _over(many: Figure | None, few: Figure | None) -> Figure | None:
    """The ratio of two slopes, as wide as both intervals together; None where one may be 0."""
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
    note="This is computed, for the context that the model was trained for. How much of a token's time the "
    "context makes is measured and shown.",
    also=("context",),
    ignores_disturbances=True,
)
def cache_of_a_step(evidence: Evidence) -> Measured:
    """The cache's share of a step's bytes at the trained context, and of a token's time where that was measured."""
    record = evidence.of("lengths")[0]
    model, settings, n_ctx = record.model, record.settings, _trained_context(record.model)
    with_cache = cost.step(model, 1, n_ctx - 1, 1, settings.type_k, settings.type_v)
    without = cost.step(model, n_ctx, 0, 1, settings.type_k, settings.type_v)
    if with_cache is None or without is None:
        raise _not_counted(model)
    of_bytes = 100 * with_cache.kv_read_bytes / with_cache.n_bytes
    share = Figure(f"cache of a step's bytes at {n_ctx:,} tokens", of_bytes, "%")
    saved = Figure(f"FLOPs of a step without a cache, at {n_ctx:,}", without.flops / with_cache.flops, "times")
    points, grown = rules.token_times(evidence.of("context")), None
    if len({place for place, _ in points}) > 1:
        (w, k), longest = rules.line(points), points[-1][0]
        name = f"of a token's time at {longest:,.0f} that the context makes"
        grown = Figure(name, 100 * k * longest / (w + k * longest), "%")
    return Measured(([share],), [share, saved, grown])


CLAIMS = (
    limit_of_prefill,
    limit_of_decode,
    decode_with_less_arithmetic,
    decode_under_the_roof,
    intensity_by_phase,
    cache_over_weights,
    slopes_by_heads,
    cache_of_a_step,
)
