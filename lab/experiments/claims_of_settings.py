"""Claims about one setting that is changed: the type of the weights, of the cache, flash attention.

Both sides are measured in blocks, side by side, and compared block by block: what the machine did meanwhile cancels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lab.core import phases
from lab.core.record import Record
from lab.experiments import claim_rules as rules
from lab.experiments.claim import Evidence, Figure, Judgement
from lab.experiments.claim_rules import Condition, claim

LONG = 4000
"""Tokens of a context that counts as long."""

GAIN = 1 / 1.03
"""A time that is at most this share of another counts as faster: a gain of under 3 % nobody would notice."""


def smaller_is_faster(evidence: Evidence) -> Judgement:
    """Claim 13."""
    formats: dict[str, list[Record]] = {}
    for record in evidence.of("quantizations"):
        if record.model.quantization and record.model.n_bytes:
            formats.setdefault(record.model.quantization, []).append(record)
    ordered = sorted(formats, key=lambda kind: -(formats[kind][0].model.n_bytes or 0))
    rates = [
        rules.figure(f"decode of {kind}", [tpot and 1e9 / tpot for tpot in _tpots(formats[kind])], "tokens/s")
        for kind in ordered
    ]
    conditions = []
    for large, small in itertools.pairwise(ordered):
        known = rules.compared(f"{small} over {large}", formats[large], formats[small], phases.tpot_ns, "of its time")
        conditions.append(rules.at_most(f"{small} is faster than {large}, which is larger", known, 1))
    if len(ordered) < 2:
        conditions = [Condition("a second quantization", None, is_missing=True)]
    return rules.decided(conditions, rates)


def _tpots(records: Sequence[Record]) -> list[float | None]:
    return [phases.tpot_ns(record.run) for record in records]


def flash_attention_speeds_prefill_up(evidence: Evidence) -> Judgement:
    """Claim 16."""
    figures: dict[int, Figure | None] = {}
    lengths = rules.by_length(evidence.of("flash"))
    for n, records in lengths.items():
        on, off = (
            [r for r in records if (r.settings.flash_attn_resolved or r.settings.flash_attn) == which]
            for which in ("on", "off")
        )
        figures[n] = rules.compared(f"prefill of {n:,} tokens without over with it", on, off, phases.prefill_ns)
    n = rules.nearest(lengths, LONG) or 0
    words = f"without flash attention prefill of {n or LONG:,} tokens takes at least 1.2 times as long"
    return rules.decided([rules.at_least(words, figures.get(n), 1.2)], list(figures.values()))


def a_quantized_cache_speeds_decode_up(evidence: Evidence) -> Judgement:
    """Claim 17."""
    lengths = rules.by_length(evidence.of("cache"))
    n = rules.nearest(lengths, LONG) or 0
    types: dict[str, list[Record]] = {}
    for record in lengths.get(n, []):
        types.setdefault(record.settings.type_k.lower(), []).append(record)
    plain = types.pop("f16", [])
    figures = {
        kind: rules.compared(f"decode with {kind} over f16 at {n:,}", plain, types.get(kind, []), phases.tpot_ns)
        for kind in ("q8_0", "q4_0")
    }
    conditions = [
        rules.at_most(f"with a cache in {kind} a token takes at most 0.97 of the time", known, GAIN)
        for kind, known in figures.items()
    ]
    return rules.decided(conditions, list(figures.values()))


CLAIMS = (
    claim(
        13,
        "Quantization speeds decode up",
        "In blocks, from the largest file to the smallest, each takes less time per token than the next larger one. "
        "One that is slower refutes it; one whose interval spans 1 leaves it open.",
        ("quantizations",),
        smaller_is_faster,
        ignores_disturbances=True,
    ),
    claim(
        16,
        "Flash attention speeds prefill up significantly",
        "In blocks, prefill of 4,000 tokens takes at least 1.2 times as long without it.",
        ("flash",),
        flash_attention_speeds_prefill_up,
        ignores_disturbances=True,
        source="Dao et al. (2022)",
    ),
    claim(
        17,
        "A quantized cache speeds decode up",
        "In blocks, after 3,500 tokens a token with a cache in q8_0, and one in q4_0, takes at most 0.97 of the time "
        "with f16. A smaller gain counts as none.",
        ("cache",),
        a_quantized_cache_speeds_decode_up,
        ignores_disturbances=True,
    ),
)
