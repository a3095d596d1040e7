"""Sentences on what limited the phases of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core import shown
from lab.core.lists import join_and
from lab.core.record import PREFILL, Ceilings, Model, Settings
from lab.features.explain.advice import Advice
from lab.roofline.explanation import (
    ARITHMETIC,
    BETWEEN,
    KERNEL,
    OF_ATTENTION,
    OVERHEAD,
    TRAFFIC,
    ExplainedRow,
)
from lab.roofline.kernel_rates import Roof
from lab.show.text_ceilings import TOO_LOW
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

MOST_LENGTHS = 5  # lengths that a sentence names; of more it names the first and the last

LIMITS = {
    ARITHMETIC: "Arithmetic limits {phases}.",
    TRAFFIC: "Memory traffic limits {phases}.",
    KERNEL: "llama.cpp's kernel for this quantization (this machine is faster with others) limits "
    "{phases}.",
    OVERHEAD: "Overhead (time outside the large kernels) limits {phases}.",
    OF_ATTENTION[
        ARITHMETIC
    ]: "The arithmetic of attention ({options}) limits {phases}. {rates}",
    OF_ATTENTION[TRAFFIC]: "Reading the KV cache ({options}) limits {phases}. {rates}",
    OF_ATTENTION[
        KERNEL
    ]: "llama.cpp's kernel of attention ({options}) limits {phases}: memory and "
    "arithmetic would allow more. {rates}",
}


def answer(rows: pd.DataFrame, model: Model, advice: Sequence[Advice]) -> str:
    """What limits most rows, and what would help most."""
    limits = rows[rows.doubts.map(shown.is_firm)].limit.value_counts()
    if limits.empty:
        return "What limits these runs cannot be told: they, or the ceilings, were disturbed."
    limit = limits.index[0]
    what = f"{limit} limits the speed"
    if limit == KERNEL:
        kind = model.quantization or "these"
        what = (
            f"the largest part of the time goes to multiplying {kind} weights: llama.cpp's kernel "
            f"(routine) for {kind} is slower than memory and arithmetic allow"
        )
    if limit == OF_ATTENTION[KERNEL]:
        what = (
            "the largest part of the time goes to attention: llama.cpp's kernel (routine) for it "
            "is slower than memory and arithmetic allow"
        )
    help_sentence = "No known change helps."
    if advice:
        help_sentence = f"The change that helps most (predicted) is {advice[0].change}."
    return f"In {limits.iloc[0]} of {len(rows)} rows {what}. {help_sentence}"


def verdicts(rows: pd.DataFrame, settings: Settings) -> list[str]:
    """What limited the phases, with the share of the ceiling that each reached; a sentence for each
    limit.
    """
    sentences = []
    for limit, of_limit in rows[rows.doubts.map(shown.is_firm)].groupby("limit", sort=False):
        phases = [
            _share_of_ceiling(str(phase), of_phase)
            for phase, of_phase in of_limit.groupby("phase", sort=False)
        ]
        sentences.append(
            LIMITS[str(limit)].format(
                phases=" and ".join(phases),
                rates=_rates_of_attention(of_limit),
                options=f"--flash-attn {settings.flash_attention}, --cache-type-k "
                f"{settings.type_k}, --cache-type-v {settings.type_v}",
            )
        )
    disturbed = rows[rows.doubts.map(lambda doubts: shown.DISTURBED in doubts)]
    if len(disturbed):
        lengths = join_and([f"{n:,}" for n in sorted(set(disturbed.n_prompt))])
        sentences.append(
            f"No verdict on {' and '.join(disturbed.phase.unique())} at {lengths} prompt tokens: "
            "the runs were disturbed. Measure again while no other program runs."
        )
    if rows.doubts.map(lambda doubts: shown.ABOVE in doubts).any():
        sentences.append(
            f"A run was faster than its ceiling, so predicted gains are not sure: {TOO_LOW}."
        )
    return sentences


def _share_of_ceiling(phase: str, rows: pd.DataFrame) -> str:
    """A phase at its lengths, with the percentages of the ceiling that it reached there."""
    if len(rows) > MOST_LENGTHS:
        lengths = f"{rows.n_prompt.iloc[0]:,} to {rows.n_prompt.iloc[-1]:,}"
        percents = f"{100 * rows.of_ceiling.min():.0f} to {100 * rows.of_ceiling.max():.0f}"
    else:
        lengths = join_and([f"{n:,}" for n in sorted(set(rows.n_prompt))])
        percents = join_and([f"{100 * share:.0f}" for share in rows.of_ceiling])
    if phase == PREFILL:
        return f"prefill of {lengths} tokens ({percents} % of the ceiling)"
    return f"decode after {lengths} tokens ({percents} % of the ceiling)"


def _rates_of_attention(rows: pd.DataFrame) -> str:
    """What attention does at its ceiling in the longest row of each phase, beside the best."""
    rates = []
    for row in rows.groupby("phase", sort=False).tail(1).itertuples():
        if not row.attention_s:
            continue
        rate = f"reads the cache at {digits(row.attention_bytes / row.attention_s / 1e9)} GB/s"
        share = row.attention_traffic_s / row.attention_s
        if row.phase == PREFILL:
            rate = f"computes {digits(row.attention_flops / row.attention_s / 1e9)} GFLOP/s"
            share = row.attention_arithmetic_s / row.attention_s
        rates.append(
            f"{rate} in {row.phase} at {row.n_prompt:,} tokens, {100 * share:.0f} % of this "
            "machine's best"
        )
    return f"At its best it {join_and(rates)}."


def by_device(rows: pd.DataFrame) -> list[str]:
    """Where the time of each phase went, for runs on several devices."""
    sentences = []
    for row in rows.itertuples():
        if row.is_split and shown.ABOVE not in row.doubts:
            sentences.append(where_it_went(row))
    return sentences


def where_it_went(row: ExplainedRow) -> str:
    """The parts of a phase's time on several devices, in percent."""
    percents = []
    for name, seconds in row.parts.items():
        if seconds or name == BETWEEN:
            percents.append(f"{name} {100 * seconds / row.measured_s:.0f} %")
    beyond_s = max(0.0, row.measured_s - row.least_s)
    percents.append(f"rest {100 * beyond_s / row.measured_s:.0f} %")
    return (
        f"{row.phase.capitalize()} at {row.n_prompt:,} prompt tokens: {', '.join(percents)}."
    )


def on_the_roof(roof: Roof, ceilings: Ceilings) -> str:
    """The machine's best rates, and the ridge between them."""
    return (
        f"The machine's best: {digits(roof.gflops)} GFLOP/s and {digits(roof.gbps)} GB/s. Below "
        f"{digits(roof.ridge)} FLOPs per byte (the ridge) memory sets the upper bound, above it "
        f"arithmetic (ceilings of {ceilings.measured_at})."
    )
