"""Why steps become slower through the context, in sentences: `lab.core.growth` in words."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import growth, shell
from lab.core.attention import attention_layers
from lab.core.growth import BETWEEN, KERNEL, SLOPE, Cliff, Growth
from lab.core.record import DECODE, PREFILL, Record, Settings
from lab.runner import disturbances
from lab.runner.as_options import options
from lab.show.wording import digits, seconds, times

SPLIT = (256, 512)
"""Positions between which llama.cpp begins to split the cache among a CPU's threads: it does so
from 512 on (ops.cpp, use_split_kv_path), and a cache of 256 grows to 512 with the 257th
(llama-kv-cache.cpp, get_n_kv).
"""
SPLIT_TYPES = ({"f16"}, {"f32"})  # of keys and values
NEAR = 0.1  # relative, by which the place of a named cause may be missed
TRIED_AT = (
    2000  # prompt tokens at which flash attention is compared, unless fewer were measured
)


def steady(records: Sequence[Record]) -> list[Record]:
    """The runs that causes may be concluded from: timed by the lab, and not disturbed."""
    return [
        record
        for record in records
        if record.run.is_timed and not disturbances.disturbances(record)
    ]


def because(records: Sequence[Record], phase: str) -> str:
    """The clause on why long contexts are slower, after what was measured; "" if not countable.

    `records` are the steady runs of one setup.
    """
    if not records or growth.cliff(records, phase) is not None:
        return ""  # the cliff has a sentence of its own
    law = growth.growth(records, phase)
    if law is None:
        return ""
    if law.verdict == SLOPE:
        return f", because {_law(law)}"
    if law.verdict == KERNEL:
        return f", and {_slow_kernel(law, records[0])}"
    if law.why == BETWEEN:
        return f"; the lab cannot tell why: {_measured(law)}, {BETWEEN}"
    return f"; the lab cannot tell why: {law.why}"


def slow_phases(records: Sequence[Record]) -> list[str]:
    """The phases whose kernel of attention is slow, or may be."""
    phases = []
    for phase in (DECODE, PREFILL):
        law = growth.growth(records, phase) if records else None
        if law is not None and (law.verdict == KERNEL or law.why == BETWEEN):
            phases.append(phase)
    return phases


def sentences(records: Sequence[Record]) -> list[str]:
    """A sentence on each cliff, and a comparison to try where a kernel is slow, or may be."""
    lines = []
    for phase in (PREFILL, DECODE):
        cliff = growth.cliff(records, phase) if records else None
        if cliff is not None:
            lines.append(_cliff(cliff, records[0]))
    is_worth_a_try = lines or slow_phases(records)
    if is_worth_a_try and records[0].settings.can_be_plain:
        lines.append(f"Try the other kind of attention: {_comparison(records)}")
    return lines


def _law(law: Growth) -> str:
    rate = _rate(law.rate, law.phase)
    weight_rate = _rate(law.weight_rate, law.phase)
    rates = f"the KV cache is read at {rate}, the weights at {weight_rate}"
    if law.phase == PREFILL:
        rates = f"{rate} of attention; the weights are multiplied at {weight_rate}"
    return f"each token attends to all before it: {_cost(law)} ({rates})"


def _cost(law: Growth) -> str:
    """What positions cost; the medians need not agree with the table's means of whole answers."""
    cost = f"by median steps 1,000 positions cost {seconds(law.seconds_per_1000)}"
    return f"{cost} per token" if law.phase == PREFILL else cost


def _slow_kernel(law: Growth, record: Record) -> str:
    options_of: dict[bool | None, str] = {
        True: " (--flash-attn on)",
        False: " (--flash-attn off)",
    }
    kind = options_of.get(record.settings.stated_flash, "")
    kernel = f"llama.cpp's attention{kind} is slow here{_heads(record)}"
    limit = "arithmetic" if law.phase == PREFILL else "memory"
    return f"{limit} is not the limit: {_measured(law)}. {kernel}"


def _measured(law: Growth) -> str:
    """The cost of positions, and the two rates that are compared."""
    rate = _rate(law.rate, law.phase)
    weight_rate = _rate(law.weight_rate, law.phase)
    if law.phase == PREFILL:
        rates = (
            f"attention computes at {rate}, and the weights are multiplied at {weight_rate}"
        )
        return f"{_cost(law)}, {rates}"
    return f"{_cost(law)}, so the cache is read at {rate}, and the weights at {weight_rate}"


def _heads(record: Record) -> str:
    widths = sorted({heads.head_dim for heads in attention_layers(record.model) or ()})
    return f" for heads of {widths[0]}" if len(widths) == 1 else ""


def _rate(per_s: float, phase: str) -> str:
    unit = "GFLOP/s" if phase == PREFILL else "GB/s"
    return f"{digits(per_s / 1e9)} {unit}"


def _cliff(cliff: Cliff, record: Record) -> str:
    is_sharp = cliff.high - cliff.low <= NEAR * cliff.n_past
    place = f"about {round(cliff.n_past, -1):,.0f} positions"
    if not is_sharp:
        place = f"a place between {cliff.low:,.0f} and {cliff.high:,.0f} positions"
    steps = "a step of prefill" if cliff.phase == PREFILL else "a step of decode"
    if cliff.is_jump:
        what = f"{steps} takes {times(cliff.factor)} as long"
    else:
        what = f"each position costs {steps} {times(cliff.factor)} as much"
        if cliff.rate_before is not None and cliff.rate_after is not None:
            before = _rate(cliff.rate_before, cliff.phase)
            what += f" ({before} of attention before, {_rate(cliff.rate_after, cliff.phase)} after)"
    return f"Cliff: from {place} on {what}. Noise does not explain it{_name(cliff, record)}."


def _name(cliff: Cliff, record: Record) -> str:
    """What llama.cpp or the model is known to change there."""
    settings = record.settings
    if cliff.phase == DECODE and _splits_cache(settings) and _is_at(cliff, *SPLIT):
        first, second = SPLIT
        return (
            f"; llama.cpp splits a cache of {second} among threads, which has room for more than "
            f"{first} positions"
        )
    for heads in attention_layers(record.model) or ():
        if heads.window and _is_at(cliff, heads.window):
            return f"; the window of {heads.window:,} positions of some layers ends there"
    if cliff.phase == PREFILL and _is_at(cliff, settings.n_ubatch):
        return f"; the first ubatch of {settings.n_ubatch:,} tokens ends there"
    return ""


def _splits_cache(settings: Settings) -> bool:
    """Whether flash attention of one token is split among threads of the CPU."""
    if settings.n_gpu_layers or not settings.uses_flash or settings.n_threads < 2:
        return False
    return set(settings.cache_types) in SPLIT_TYPES


def _is_at(cliff: Cliff, first: int, last: int | None = None) -> bool:
    """Whether a cliff is at a place, or between two."""
    return (1 - NEAR) * first <= cliff.high and cliff.low <= (1 + NEAR) * (last or first)


def _comparison(records: Sequence[Record]) -> str:
    """The command that compares flash attention with plain attention, with these settings."""
    record = records[0]
    shared: list[str] = []
    for arguments in options(record):
        if arguments[0] != "--flash-attn":
            shared += arguments
    longest = max(record.run.n_prompt for record in records)
    used = "on" if record.settings.uses_flash else "off"
    alternative = "off" if record.settings.uses_flash else "on"
    return shell.lab(
        "ab",
        ["--flash-attn", used],
        ["--flash-attn", alternative],
        "--prompt-len",
        str(min(longest, TRIED_AT)),
        *shared,
    )
