"""Claims about the effect of a change: another setting, batches, drafts, cached prefixes, chunks.

Both sides of a setting are measured in blocks, side by side, and compared block by block, so that slow changes of the
machine cancel. In the lab's experiments every repeat is a unit, so that neighbouring rows (more sequences, a longer
prefix, a smaller chunk) are compared by their ratio within repeats.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from lab.analysis.wording import digits
from lab.core import cost, guesses, lever_figures, memory, phases, prefix_times
from lab.core.levers import in_chunks
from lab.core.lists import grouped, plural
from lab.core.record import Record, Run
from lab.errors import LabError
from lab.experiments import batching
from lab.experiments.claims import claim as rules
from lab.experiments.claims.claim import Condition, Evidence, Figure, Measured, claim
from lab.experiments.claims.claim_parts import CEILINGS
from lab.why import learning
from lab.why.step_prediction import StepPrediction

LONG = 4000
"""Tokens of a context that counts as long."""

ANSWERS, N_BATCHES, MOST_PLACES = "lognormal:300,0.8", 100, 64
"""Lengths of answers as in `lab load`, the number of them for each place, and the most places."""

GAIN = 1 / 1.03
"""A time counts as faster up to this share of the other: a gain below 3 % does not matter."""


@claim(
    9,
    "Batching raises decode's intensity until it turns compute-bound at a batch B*",
    Condition("The number of sequences at which a step takes twice as long as with one, over B*,", 1 / 1.5, 1.5),
    needs=("batch", CEILINGS),
    note="B* is the number of sequences at which, from the ceilings, arithmetic takes as long as memory traffic.",
    source="Pope et al. (2022)",
)
def knee_over_ridge(evidence: Evidence) -> Measured:
    records = evidence.of("batch")
    first = records[0]
    prediction = StepPrediction(first.model, first.settings, evidence.best, learning.fit([]), 0)
    ridge = batching.ridge(prediction, first.run.n_prompt, first.run.n_gen)
    rows = batching.rows(records, prediction)
    if ridge is None or not rows:
        raise LabError(f"The cost or the time of a step of {first.model.name} is unknown.")
    at_ridge = Figure("arithmetic takes as long as memory traffic, from the ceilings, at", ridge, "sequences")
    knees = [batching.knee(batching.rows(own)) for own in grouped(records, lambda record: record.run.repeat).values()]
    knee = rules.figure("a step takes twice as long as with one at", knees, "sequences")
    most, n_without = max(row.n_seq for row in rows), knees.count(None)
    name = f"sequences at which a step takes twice as long as with one, over {digits(ridge)}"
    if 2 * n_without >= len(knees) or knee is None:
        beyond = Figure(f"{name} (up to {most} no step does)", most / ridge, "times", most / ridge, math.inf)
        return Measured(([beyond],), [at_ridge])
    if n_without:  # some lie at an unknown distance beyond the measured range
        name += f" (in {n_without} of {len(knees)} repeats no step of up to {most} does)"
        return Measured(([Figure(name, 0.0, "times", 0.0, math.inf)],), [knee, at_ridge])
    return Measured(([rules.scaled(knee, 1 / ridge, name)],), [knee, at_ridge])


@claim(
    10,
    "Batched decode: each user is slower, the whole is faster",
    Condition("The time of a step over that with the next smaller number of sequences", 1),
    Condition("That ratio over the ratio of the numbers of sequences", most=1),
    needs=("batch",),
    note="This must hold for all measured numbers, up to 16.",
    ignores_disturbances=True,
)
def steps_of_batches(evidence: Evidence) -> Measured:
    numbers = evidence.by(lambda record: record.run.batch.n_seq if record.run.batch else None, "batch")
    steps = rules.successive(numbers, "a step of {} over one of {}", _step_s)
    for_each = [
        rules.scaled(step, few / many, f"the same, for {many / few:.3g}x the sequences ({many} over {few})")
        for step, (few, many) in zip(steps, itertools.pairwise(numbers), strict=True)
    ]
    return Measured((steps, for_each), steps)


def _step_s(run: Run) -> float | None:
    return lever_figures.step_s(run) if lever_figures.figures(run) else None


@claim(
    13,
    "Quantization speeds decode up",
    Condition("In blocks, the time per token of each file over that of the next larger one", most=1),
    needs=("quantizations",),
    ignores_disturbances=True,
)
def decode_by_format(evidence: Evidence) -> Measured:
    sized = [record for record in evidence.of("quantizations") if record.model.n_bytes]
    sized.sort(key=lambda record: -(record.model.n_bytes or 0))
    formats = grouped(sized, lambda record: record.model.quantization or None)
    ratios = rules.successive(formats, "a token in {} over one in {}", phases.tpot_ns)
    return Measured((ratios,), rules.each(formats, "decode of {}", rules.decode_tps, "tokens/s"))


@claim(
    16,
    "Flash attention speeds prefill up significantly",
    Condition("In blocks, the time of prefill of 4,000 tokens without it over that with it", 1.2),
    needs=("flash",),
    ignores_disturbances=True,
    source="Dao et al. (2022)",
)
def prefill_without_flash(evidence: Evidence) -> Measured:
    figures: dict[int, Figure | None] = {}
    for n, records in evidence.lengths("flash").items():
        sides = grouped(records, lambda record: record.settings.flash_attn_resolved or record.settings.flash_attn)
        name = f"prefill of {n:,} tokens without it over with it"
        figures[n] = rules.compared(name, sides.get("on", []), sides.get("off", []), phases.prefill_ns)
    return Measured(([figures.get(evidence.near(LONG, "flash")[0])],), list(figures.values()))


@claim(
    17,
    "A quantized cache speeds decode up",
    Condition("In blocks, after 3,500 tokens, the time per token with q8_0 over that with f16", most=GAIN),
    Condition("The same with q4_0", most=GAIN),
    needs=("cache",),
    note="A smaller gain counts as none.",
    ignores_disturbances=True,
)
def decode_by_cache_type(evidence: Evidence) -> Measured:
    n, records = evidence.near(LONG, "cache")
    types = grouped(records, lambda record: record.settings.type_k.lower())
    ratios = [
        rules.compared(
            f"decode with {kind} over f16 at {n:,}", types.get("f16", []), types.get(kind, []), phases.tpot_ns
        )
        for kind in ("q8_0", "q4_0")
    ]
    return Measured([[ratio] for ratio in ratios])


@claim(
    18,
    "Speculative decoding gives 2 to 3 times",
    Condition("The speed-up of the median text against plain decoding in the same repeat", 2),
    needs=("speculation",),
    note="The better draft (lookup, a smaller quantization) at its best length counts.",
    ignores_disturbances=True,
    source="Leviathan et al. (2022)",
)
def speed_up_of_guessing(evidence: Evidence) -> Measured:
    """The speed-up of the median text, for each draft at its best length."""
    by_guess = grouped(evidence.of("speculation"), _guess)
    plain = _token_s(by_guess.pop(("", 0), []))
    figures: dict[str, Figure] = {}
    for (draft, n_draft), records in by_guess.items():
        guessed = _token_s(records)
        repeats = grouped((place for place in guessed if place in plain), lambda place: place[1])
        gains = [statistics.median(plain[place] / guessed[place] for place in own) for own in repeats.values()]
        known = rules.figure(f"speed-up of the median text, {n_draft} drafted by {draft}", gains, "times")
        if known is not None and (draft not in figures or known.value > figures[draft].value):
            figures[draft] = known
    best = max(figures.values(), key=lambda known: known.value, default=None)
    remark = f"Measured on {plural(len({text for text, _ in plain}), 'text')}." if best else ""
    return Measured(([best],), list(figures.values()), remark)


def _guess(record: Record) -> tuple[str, int] | None:
    """The draft and its length of a run, ("", 0) for plain decoding; None if its time is unknown."""
    lever = record.run.speculation
    if lever is None or lever.text is None or guesses.tpot_s(record.run) is None:
        return None
    return (str(lever.draft), lever.n_draft) if lever.n_draft else ("", 0)


def _token_s(records: Sequence[Record]) -> dict[tuple[str, int], float]:
    """Seconds per token of each text in each repeat."""
    times: dict[tuple[str, int], list[float]] = {}
    for run in (record.run for record in records):
        lever, tpot = run.speculation, guesses.tpot_s(run)
        if lever is not None and tpot is not None:
            place = str(lever.text), run.repeat if run.engine is None else run.engine
            times.setdefault(place, []).append(tpot)
    return {place: statistics.geometric_mean(own) for place, own in times.items()}


@claim(
    19,
    "Prompt caching pays the more, the longer the prefix",
    Condition("TTFT as a share of the cold TTFT, over the same with the next shorter prefix cached,", most=1),
    needs=("prefix",),
    ignores_disturbances=True,
)
def cached_by_length(evidence: Evidence) -> Measured:
    lengths = evidence.by(lambda record: record.run.prefix.n_prefix if record.run.prefix else None, "prefix")
    ratios = rules.successive(lengths, "share of the cold TTFT with {:,} cached over that with {:,}", _left)
    return Measured((ratios,), rules.each(lengths, "TTFT with {:,} cached, share of the cold TTFT", _left, "%", 100))


def _left(run: Run) -> float | None:
    taken = prefix_times.figures(run)
    return taken["cached_s"] / taken["cold_s"] if taken and taken["cold_s"] > 0 else None


@claim(
    21,
    "Chunked prefill keeps the decode of others going",
    Condition("The longest gap of a stream over that with the next larger chunk (or all at once)", most=1),
    needs=("stall",),
    ignores_disturbances=True,
    source="Sarathi-Serve (2024)",
)
def gaps_by_chunk(evidence: Evidence) -> Measured:
    sizes = evidence.by(
        lambda record: -(record.run.stall.chunk or record.run.n_prompt) if record.run.stall else None, "stall"
    )
    chunks = {in_chunks(own[0].run.stall.chunk): own for own in sizes.values() if own[0].run.stall}
    ratios = rules.successive(chunks, "the longest gap {} over that {}", _gap_ms)
    return Measured((ratios,), rules.each(chunks, "longest gap, {}", _gap_ms, "ms"))


def _gap_ms(run: Run) -> float | None:
    return lever_figures.figures(run).get("gap_ms")


@claim(
    32,
    "100 requests with the same prefix of 20,000 tokens pay its prefill once",
    Condition(
        "The time of 100 requests with a cached prefix, over that of one prefill of it and 100 of the rest,", most=1.25
    ),
    needs=("prefix",),
    note="Scaled: measured with the longest prefix of the session instead of 20,000 tokens, each request with a few "
    "tokens of its own. A longer prefix favours the claim, because its prefill grows at least as fast as its copy.",
    ignores_disturbances=True,
    source="aimadetools.com/blog/prefix-caching-llm-apis",
)
def prefills_of_100(evidence: Evidence) -> Measured:
    """One cold request and 99 with the prefix cached, from the times of single ones."""
    lengths = evidence.by(lambda record: record.run.prefix.n_prefix if record.run.prefix else None, "prefix")
    longest = max(lengths, default=0)
    known = [
        taken
        for record in lengths.get(longest, [])
        if phases.times_prefill_steps(record.settings) and (taken := prefix_times.times(record.run))
    ]
    ratios = [
        (one["cold_s"] + 99 * one["cached_s"]) / (one["cold_s"] + 99 * (one["cold_s"] - one["prefix_s"]))
        for one in known
        if one["cold_s"] > one["prefix_s"]
    ]
    shares = [(one["cold_s"] + 99 * one["cached_s"]) / (100 * one["cold_s"]) for one in known if one["cold_s"] > 0]
    tested = rules.figure(f"100 requests over one prefill of {longest:,} tokens and 100 of the rest", ratios, "times")
    return Measured(([tested],), [tested, rules.figure("the same over 100 cold requests", shares, "%", 100)])


@claim(
    33,
    "Flash attention avoids writing the matrix of scores",
    Condition(
        "The memory that it saves in the compute buffer, over what the scores of a layer need there,", 0.75, 1.25
    ),
    Condition("The bytes of a full prefill step with all scores written and read, over those without,", 2),
    needs=("buffers",),
    note="At the end of a context of up to 8,000 tokens. The buffers are measured, the bytes computed.",
    ignores_disturbances=True,
    source="Dao et al. (2022)",
)
def matrix_of_scores(evidence: Evidence) -> Measured:
    """The compute buffer with and without the matrix, and the bytes of a step with and without it."""
    sides = evidence.by(lambda one: one.settings.flash_attn_resolved or one.settings.flash_attn, "buffers")
    buffers = {name: _compute_bytes(own[0]) for name, own in sides.items()}
    on, off = buffers.get("on"), buffers.get("off")
    if not on or not off:
        return Measured(())
    first = sides["off"][0]
    model, settings = first.model, first.settings
    expected = [memory.compute_bytes(model, sides[name][0].settings) for name in ("off", "on")]
    n_tokens = min(settings.n_ubatch, settings.n_ctx)
    n_past = settings.n_ctx - n_tokens
    step = cost.step(model, n_tokens, n_past, 0, settings.type_k, settings.type_v)
    seen = cost.attended(model, n_tokens, n_past)
    if step is None or seen is None or expected[0] is None or expected[1] is None:
        raise LabError(f"The memory or the cost of a step of {model.name} cannot be derived from its header.")
    shown = [Figure(f"compute buffer {name} it", n / 1e6, "MB") for name, n in (("without", off), ("with", on))]
    n_bytes = sum(8 * one.heads.n_layer * one.heads.n_head * n_tokens * one.n_positions for one in seen)
    traffic = Figure(f"bytes of a step at {settings.n_ctx:,} tokens", (step.n_bytes + n_bytes) / step.n_bytes, "times")
    needed = expected[0] - expected[1]
    if needed <= 0:
        raise LabError(f"At {settings.n_ctx:,} tokens other results need more of the compute buffer than the scores.")
    saved = Figure("memory saved in the buffer, over what the scores need", (off - on) / needed, "times")
    return Measured(([saved], [traffic]), [*shown, saved, traffic])


def _compute_bytes(record: Record) -> int:
    placement = record.run.placement
    return sum(buffer.n_bytes for buffer in placement.buffers if buffer.part == "compute") if placement else 0


CLAIMS = (
    knee_over_ridge,
    steps_of_batches,
    decode_by_format,
    prefill_without_flash,
    decode_by_cache_type,
    speed_up_of_guessing,
    cached_by_length,
    gaps_by_chunk,
    prefills_of_100,
    matrix_of_scores,
)
