"""Claims about what limits a phase: arithmetic, memory traffic, or neither.

That a phase is near a roof is one sign, that it follows an intervention another: with half the threads half the FLOP/s
are left, but mostly more than half of the memory's rate. Both are asked. What the machine does at best comes from its
ceilings; what a step costs, from the model's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lab.core import cost, phases, shape
from lab.core.record import Model, Record, Run
from lab.errors import LabError
from lab.experiments import claim_rules as rules
from lab.experiments.claim import UNTESTABLE, Evidence, Figure, Judgement
from lab.experiments.claim_parts import CEILINGS
from lab.experiments.claim_rules import Condition, claim
from lab.why import roofline, step_kernels

OF_THREADS = 0.85
"""Where arithmetic is the limit, fewer threads cost at least this share of the factor by which they are fewer."""

BOOKS = "Pope et al. (2022); Austin et al. (2025)"


def prefill_is_compute_bound(evidence: Evidence) -> Judgement:
    """Claim 1."""
    best = evidence.ceilings
    assert best is not None
    lengths = rules.by_length(evidence.of("lengths"))
    n, records = list(lengths.items())[-1]
    row = next(row for row in roofline.explain(records, best) if row.phase == "prefill")
    seconds = [taken / 1e9 for record in records if (taken := phases.prefill_ns(record.run))]
    reached = rules.figure(f"FLOP/s at {n:,} tokens", [row.flops / s for s in seconds], "GFLOP/s", 1e-9)
    name = "of what its kernels alone reach"
    share = rules.figure(name, [row.kernels.total_s / s for s in seconds], "%", 100)
    half, n_times = _half_the_threads(evidence, "prefill", phases.prefill_ns, is_batch=True)
    if half is None:
        return _threads_are_not_it(evidence, [reached, share])
    words = f"arithmetic alone takes longer than reading does, {row.arithmetic_s:.3g} s and {row.traffic_s:.3g} s"
    least = OF_THREADS * n_times
    conditions = [
        rules.at_least("prefill reaches at least 60 % of its kernels' FLOP/s", share, 60),
        Condition(words, row.arithmetic_s > row.traffic_s),
        rules.at_least(f"half the threads take at least {least:.3g} times as long", half, least),
    ]
    return rules.decided(conditions, [reached, share, half])


def decode_is_memory_bound(evidence: Evidence) -> Judgement:
    """Claim 2."""
    best = evidence.ceilings
    assert best is not None
    n, records = next(iter(rules.by_length(evidence.of("lengths")).items()))
    gbps = roofline.roof(best).gbps
    rates = [_gbps(record, phases.decode_compute_mean_ns(record.run)) for record in records]
    reached = rules.figure(f"bytes per second after {n:,} tokens", rates, "GB/s")
    share = rules.figure("of plain reading", [rate and rate / gbps for rate in rates], "%", 100)
    if share is None and not any(rates):
        return _not_counted(records[0].model)
    half, _ = _half_the_threads(evidence, "decode", phases.tpot_ns)
    if half is None:
        return _threads_are_not_it(evidence, [reached, share])
    conditions = [
        rules.at_least("decode reads at least 60 % of what plain reading does", share, 60),
        rules.at_most("half the threads take at most 1.3 times as long", half, 1.3),
    ]
    return rules.decided(conditions, [reached, share, half], _kernel_remark(records[0], evidence, gbps))


def arithmetic_does_not_matter(evidence: Evidence) -> Judgement:
    """Claim 15."""
    half, _ = _half_the_threads(evidence, "decode", phases.tpot_ns)
    if half is None:
        return _threads_are_not_it(evidence, [])
    same_bytes = _same_bytes(evidence)
    remark = "" if half.low is None or half.low <= 1.1 else "Fewer threads also read less, which may be a part of it."
    condition = rules.at_most("half the threads take at most 1.1 times as long in decode", half, 1.1)
    return rules.decided([condition], [half, same_bytes], remark)


def _same_bytes(evidence: Evidence) -> Figure | None:
    """Another intervention on arithmetic: two formats of nearly the same bytes, each with kernels of its own."""
    records = evidence.of("quantizations")
    sides = [[record for record in records if record.model.quantization == kind] for kind in ("Q4_0", "Q4_1")]
    return rules.compared("decode of Q4_1 over Q4_0 (1.1 times the bytes)", sides[0], sides[1], phases.tpot_ns)


def never_above_the_roof(evidence: Evidence) -> Judgement:
    """Claim 14."""
    best = evidence.ceilings
    assert best is not None
    gbps = roofline.roof(best).gbps
    groups: dict[str, list[Record]] = {}
    for part in ("lengths", "quantizations"):
        for record in evidence.of(part):
            name = f"{record.model.quantization or record.model.name} after {record.run.n_prompt:,} tokens"
            groups.setdefault(name, []).append(record)
    figures = {
        name: rules.figure(f"{name}, of the limit", [_of_limit(record, gbps) for record in records], "%", 100)
        for name, records in groups.items()
    }
    known = {name: one for name, one in figures.items() if one is not None}
    if not known:
        return _not_counted(evidence.of("lengths")[0].model)
    ordered = sorted(known, key=lambda name: -known[name].value)
    conditions = [rules.at_most(f"{name} at most 100 %", known[name], 100) for name in ordered]
    judgement = rules.decided(conditions, [known[name] for name in ordered[:2]])
    if any(condition.holds is False for condition in conditions):
        words = " Nothing reads faster than it can: the ceilings are too low (lab ceilings --again), or the weights "
        judgement = dataclasses.replace(judgement, words=judgement.words + words + "stay in the processor's cache.")
    return judgement


def _of_limit(record: Record, gbps: float) -> float | None:
    rate = _gbps(record, phases.tpot_ns(record.run))
    return None if rate is None else rate / gbps


def intensity_by_phase(evidence: Evidence) -> Judgement:
    """Claim 8."""
    records = evidence.of("lengths")
    model = as_f16(records[0].model)
    if model is None:
        return _not_counted(records[0].model)
    n_ubatch = records[0].settings.n_ubatch
    figures, conditions, lengths = [], [], rules.by_length(records)
    for n, alike in lengths.items():
        for is_prefill in (True, False):
            value = _intensity(model, alike[0].run, is_prefill)
            if value is None:
                continue
            wanted, phase = (n, "prefill") if is_prefill else (1, "decode")
            known = Figure(f"{phase} at {n:,} tokens", value, "FLOPs per byte")
            if is_prefill or n == max(lengths):
                figures.append(known)
            words = f"{phase} at {n:,} tokens is {wanted:,} within a factor of 1.5"
            conditions.append(rules.between(words, known, wanted / 1.5, 1.5 * wanted))
    remark = f"Weights are read again for every {n_ubatch:,} tokens of a prompt, which no longer one exceeds by much."
    is_beyond = any(record.run.n_prompt > n_ubatch for record in records)
    return rules.decided(conditions, figures, remark if is_beyond else "")


def as_f16(model: Model) -> Model | None:
    """The model with all its matrices in F16; None where the lab cannot count them."""
    known = shape.matrices(model)
    if known is None:
        return None
    matrices = tuple(dataclasses.replace(matrix, type="F16") for matrix in known)
    n_bytes = round(sum(matrix.n_bytes for matrix in matrices))
    return dataclasses.replace(model, matrices=matrices, tensor_bytes={"F16": n_bytes})


def _intensity(model: Model, run: Run, is_prefill: bool) -> float | None:
    """FLOPs per byte of the steps of a phase, as they were."""
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
    sides: dict[str | None, list[Record]] = {"all": [], "half": []}
    for record in evidence.of("threads"):
        if record.settings.n_gpu_layers == 0:
            sides.setdefault(record.run.variant, []).append(record)
    whole, half = sides["all"], sides["half"]
    if not whole or not half:
        return None, 1.0
    chosen = [side[0].settings for side in (whole, half)]
    n_all, n_half = ((one.n_threads_batch if is_batch else one.n_threads) for one in chosen)
    known = rules.compared(f"{phase} with {n_half} of {n_all} threads", whole, half, value)
    return known, n_all / max(1, n_half)


def _threads_are_not_it(evidence: Evidence, figures: Sequence[Figure | None]) -> Judgement:
    """Why there is no comparison of threads."""
    if any(record.settings.n_gpu_layers > 0 for record in evidence.of("threads")):
        words = "Layers are on a GPU here, where the CPU's threads decide nothing."
    else:
        words = "Half the threads, or all of them, were not measured."
    return Judgement(UNTESTABLE, words, tuple(one for one in figures if one is not None))


def _kernel_remark(record: Record, evidence: Evidence, gbps: float) -> str:
    """How fast the model's own kernels read alone, where that is much less than memory gives."""
    settings, n_past = record.settings, record.run.n_prompt
    assert evidence.ceilings is not None
    try:
        kernels = step_kernels.total(record.model, settings, evidence.ceilings, 1, n_past, 1)
    except LabError:
        return ""
    step = cost.step(record.model, 1, n_past, 1, settings.type_k, settings.type_v)
    if kernels is None or step is None or kernels.total_s <= 0:
        return ""
    alone = step.n_bytes / kernels.total_s / 1e9
    if alone > gbps / roofline.KERNEL_FACTOR:
        return ""
    return f"The kernel is the limit: alone it reads {alone:.3g} GB/s of {gbps:.3g} that plain reading gives."


def _not_counted(model: Model) -> Judgement:
    return Judgement(UNTESTABLE, f"What a step of {model.name} costs is not known from its header.")


CLAIMS = (
    claim(
        1,
        "Prefill is compute-bound",
        "At the longest measured prompt the kernels, at the best they reach alone, account for at least 60 % of the "
        "time; by the machine's roofs its FLOPs take longer than its bytes; and fewer threads cost at least 85 % of "
        "the factor by which they are fewer (1.7 for half). The ceiling is that of the model's own kernels: another "
        "format may have faster ones.",
        ("lengths", "threads", CEILINGS),
        prefill_is_compute_bound,
        source=BOOKS,
    ),
    claim(
        2,
        "Decode is memory-bound",
        "After the shortest measured prompt decode reads at least 60 % of the bytes per second that any probe reads "
        "here, and half the threads take at most 1.3 times as long.",
        ("lengths", "threads", CEILINGS),
        decode_is_memory_bound,
        source=BOOKS,
    ),
    claim(
        8,
        "Arithmetic intensity: prefill about P FLOPs per byte, decode about 1 (F16)",
        "Computed from the steps as they ran, weights counted in F16: at every measured length prefill of P tokens is "
        "P, and decode 1, within a factor of 1.5.",
        ("lengths",),
        intensity_by_phase,
        ignores_disturbances=True,
    ),
    claim(
        14,
        "Decode yields at most bandwidth / bytes tokens per second",
        "In no measured setup (lengths, quantizations) the interval of the bytes read per second lies above the best "
        "that any probe reads here; it must lie below in all of them.",
        ("lengths", CEILINGS),
        never_above_the_roof,
        also=("quantizations",),
    ),
    claim(
        15,
        "FLOP/s do not matter for decode",
        "Half the threads take at most 1.1 times as long per token, in blocks.",
        ("threads",),
        arithmetic_does_not_matter,
        also=("quantizations",),
        ignores_disturbances=True,
    ),
)
