"""Claims about the KV cache: how much of the memory, and of the traffic, it is, and what sharing its heads saves.

Bytes follow from the model's shape. Time does not: a kernel may need longer than its bytes do. So what is claimed of
bytes is computed, and what is claimed of time is measured.
"""

from __future__ import annotations

import dataclasses

from lab.core import cost, memory
from lab.core.record import Record
from lab.experiments import claim_curves as curves
from lab.experiments import claim_rules as rules
from lab.experiments.claim import UNTESTABLE, Evidence, Figure, Judgement
from lab.experiments.claim_rules import Condition, claim
from lab.models import catalog, shapes

TEXTBOOK = "llama-2-7b"
"""The 7B of the textbooks: every head has keys and values of its own."""


def cache_dominates_memory(evidence: Evidence) -> Judgement:
    """Claim 11."""
    record = evidence.of("lengths")[0]
    model, n_ctx = record.model, record.model.n_ctx_train
    if not n_ctx:
        return Judgement(UNTESTABLE, f"The context that {model.name} was trained for is not known.")
    settings = dataclasses.replace(record.settings, n_ctx=n_ctx, n_seq_max=1)
    cache, weights = memory.kv_cache_bytes(model, settings), sum(model.tensor_bytes.values()) or model.n_bytes
    if cache is None or not weights:
        return Judgement(UNTESTABLE, f"How large the cache of {model.name} is, is not known from its header.")
    known = Figure(f"cache over weights at {n_ctx:,} tokens", cache / weights, "times")
    per_position = memory.kv_bytes_per_position(model, settings.type_k, settings.type_v)
    has_window = any(model.windows or ())
    crossing = Figure("cache outgrows weights at", weights / per_position, "tokens") if per_position else None
    seven = shapes.model_of(catalog.find(TEXTBOOK), "F16")
    of_seven = Figure(
        f"the same of {seven.name} in F16 (trained for {seven.n_ctx_train or 0:,})",
        (seven.n_bytes or 0) / (memory.kv_bytes_per_position(seven) or 1),
        "tokens",
    )
    words = f"at the {n_ctx:,} tokens that it was trained for the cache of one sequence is larger than the weights"
    condition = rules.at_least(words, known, 1)
    return rules.decided([condition], [known, None if has_window else crossing, of_seven])


def shared_heads_cut_the_cost(evidence: Evidence) -> Judgement:
    """Claim 12."""
    by_heads: dict[int, list[Record]] = {}
    for record in evidence.of("heads"):
        if record.model.n_head_kv:
            by_heads.setdefault(record.model.n_head_kv, []).append(record)
    if len(by_heads) < 2:
        return rules.decided([Condition("two numbers of key-value heads", None, is_missing=True)], [])
    few, many = min(by_heads), max(by_heads)
    name = "a token per 1,000 positions with {} key-value heads"
    slopes = [curves.slope(name.format(n), curves.token_times(by_heads[n]), "ms", 1e3) for n in (few, many)]
    n_bytes = [_bytes_per_position(by_heads[n][0]) for n in (few, many)]
    ratio = _over(slopes[1], slopes[0])
    if None in slopes or not n_bytes[0] or not n_bytes[1]:
        return rules.decided([Condition("four context lengths of each", None, is_missing=True)], slopes)
    of_bytes = n_bytes[1] / n_bytes[0]
    words = f"the slopes differ as the bytes do, {of_bytes:.3g} times, within 25 %"
    condition = (
        rules.between(words, ratio, 0.75 * of_bytes, 1.25 * of_bytes)
        if ratio
        else Condition(f"{words} (a slope cannot be told from 0, so nor can their ratio)", None)
    )
    return rules.decided([condition], [ratio, Figure("ratio of the bytes", of_bytes, "times"), *slopes])


def _over(many: Figure | None, few: Figure | None) -> Figure | None:
    """The ratio of two slopes, as wide as both intervals together; None where one may be 0."""
    if many is None or few is None or not many.low or not few.low or not many.high or not few.high:
        return None
    if min(many.low, few.low) <= 0:
        return None
    return Figure("ratio of the slopes", many.value / few.value, "times", many.low / few.high, many.high / few.low)


def _bytes_per_position(record: Record) -> float | None:
    return memory.kv_bytes_per_position(record.model, record.settings.type_k, record.settings.type_v)


def compute_is_traded_for_traffic(evidence: Evidence) -> Judgement:
    """Claim 24."""
    record = evidence.of("lengths")[0]
    model, settings, n_ctx = record.model, record.settings, record.model.n_ctx_train
    if not n_ctx:
        return Judgement(UNTESTABLE, f"The context that {model.name} was trained for is not known.")
    with_cache = cost.step(model, 1, n_ctx - 1, 1, settings.type_k, settings.type_v)
    without = cost.step(model, n_ctx, 0, 1, settings.type_k, settings.type_v)
    if with_cache is None or without is None:
        return Judgement(UNTESTABLE, f"What a step of {model.name} costs is not known from its header.")
    share = Figure(
        f"cache of a step's bytes at {n_ctx:,} tokens", 100 * with_cache.kv_read_bytes / with_cache.n_bytes, "%"
    )
    saved = Figure(f"FLOPs of a step without a cache, at {n_ctx:,}", without.flops / with_cache.flops, "times")
    points = curves.token_times(evidence.of("context"))
    grown = None
    if len({place for place, _ in points}) > 1:
        w, k = curves.line(points)
        longest = points[-1][0]
        grown = Figure(
            f"of a token's time at {longest:,.0f} that the context makes", 100 * k * longest / (w + k * longest), "%"
        )
    words = f"within the {n_ctx:,} tokens that it was trained for the cache grows to over half of what a step reads"
    return rules.decided([rules.at_least(words, share, 50)], [share, saved, grown])


CLAIMS = (
    claim(
        11,
        "The KV cache dominates decode's memory",
        "Computed: at the context that the model was trained for, the cache of one sequence is at least as large as "
        "the weights.",
        ("lengths",),
        cache_dominates_memory,
        ignores_disturbances=True,
    ),
    claim(
        12,
        "Grouped-query attention cuts the cost of the cache",
        "Of two shapes that differ in key-value heads alone, the slopes of a token's time over positions differ as the "
        "bytes of the cache do, within 25 %.",
        ("heads",),
        shared_heads_cut_the_cost,
        source="Ainslie et al. (2023)",
    ),
    claim(
        24,
        "Reusing the cache trades compute for memory traffic",
        "Computed: within the context that the model was trained for, the cache grows to over half of the bytes that a "
        "decode step moves. How much of a token's time the context makes is measured and shown.",
        ("lengths",),
        compute_is_traded_for_traffic,
        also=("context",),
        ignores_disturbances=True,
    ),
)
