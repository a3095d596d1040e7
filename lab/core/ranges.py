"""What the fields of a results file may hold: files come from anyone, and figures are computed from them.

The first row of RANGES whose pattern is a field's name counts. Ends are far beyond what a machine can do, and close
enough that arithmetic neither overflows nor takes gigabytes.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from typing import Any

RANGES: tuple[tuple[str, float, float], ...] = (
    ("n_batch|n_ubatch|n_seq_max|every|concurrency", 1, 10**7),
    ("n_threads.*|n_gpu_layers|n_cpu_moe|main_gpu", -1, 10**6),
    ("n_layer|n_head.*|head_dim.*|n_expert.*|heads.*|windows|n_cores.*|n_slots", 0, 10**5),
    ("n_prompt.*|n_gen|n_ctx.*|n_context|n_before|n_streams|n_draft|n_seq|n_past|chunk", 0, 10**7),
    ("n_tokens|n_outputs|n_positions|.*_tokens|repeat|block|engine|round", 0, 10**7),
    ("n_embd|n_ff.*|n_vocab|token_ids", 0, 10**9),
    ("rows|columns", 0, 10**11),
    ("times_ns", 1, 10**15),
    (".*_ns", 0, 10**15),
    ("n|.*_bytes|n_params|.*_j|joules", 0, 10**16),
    ("flops", 0, 10**21),
    ("seed", -(2**63), 2**64),
    ("rate|duration_s", 1e-9, 10**9),
    (".*", -(10**15), 10**15),
)
MOST_LETTERS = 10_000
"""Length of a text."""


def check(value: Any, place: str, name: str = "") -> None:
    """ValueError if a part of a line's dataclass is outside of its range; `place` names the whole."""
    kind = type(value)
    if kind is int or kind is float:
        _check_numbers(value, value, place, name)
    elif kind is str:
        if len(value) > MOST_LETTERS:
            raise ValueError(f"{place} has {len(value):,} letters, and may have {MOST_LETTERS:,}")
    elif kind is tuple and value:
        kinds = set(map(type, value))
        if kinds <= {int, float}:
            _check_numbers(min(value), max(value), place, name)
        elif kinds == {str}:
            check(max(value, key=len), place, name)
        else:
            for part in value:
                check(part, place, name)
    elif kind is dict:
        for key, part in value.items():
            check(key, place)
            check(part, place, name)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check(getattr(value, field.name), f"{place}.{field.name}", field.name)


def _check_numbers(low: float, high: float, place: str, name: str) -> None:
    least, most = _range(name)
    if not (least <= low and high <= most):
        wrong = low if low < least else high
        shown = f"{wrong:,}" if abs(wrong) < 10**21 else "too large" if wrong > 0 else "too small"
        raise ValueError(f"{place} is {shown}, and may be {least:,} to {most:,}")


@cache
def _range(name: str) -> tuple[float, float]:
    return next((least, most) for pattern, least, most in RANGES if re.fullmatch(pattern, name))
