"""Claims about the levers: sequences together, guesses ahead, prefixes used again, prompts in chunks.

Each experiment of the lab yields rows; here every repeat is a unit of its own, so that what is claimed of neighbouring
rows (more sequences, a longer prefix, a smaller chunk) is claimed of their ratio within repeats.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from lab.core import guesses, lever_figures, prefix_times
from lab.core.record import Record, Run
from lab.experiments import batching
from lab.experiments import claim_rules as rules
from lab.experiments.claim import UNTESTABLE, Evidence, Figure, Judgement
from lab.experiments.claim_parts import CEILINGS
from lab.experiments.claim_rules import Condition, claim
from lab.why import learning
from lab.why.step_prediction import StepPrediction

NEAR = 1.5
"""A prediction is near where it is right within this factor."""


def batching_turns_compute_bound(evidence: Evidence) -> Judgement:
    """Claim 9."""
    best, records = evidence.ceilings, evidence.of("batch")
    assert best is not None
    first = records[0]
    prediction = StepPrediction(first.model, first.settings, best, learning.fit([]), 0)
    ridge = batching.ridge(prediction, first.run.n_prompt, first.run.n_gen)
    rows = batching.rows(records, prediction)
    if ridge is None or not rows:
        return Judgement(UNTESTABLE, f"What a step of {first.model.name} costs, or took, is not known.")
    at_ridge = Figure("arithmetic takes as long as reading, by the ceilings, at", ridge, "sequences")
    repeats = {record.run.repeat for record in records}
    by_repeat = [batching.rows([r for r in records if r.run.repeat == repeat]) for repeat in repeats]
    knees = [batching.knee(of_repeat) for of_repeat in by_repeat]
    knee = rules.figure("a step takes twice as long as with one at", knees, "sequences")
    most = max(row.n_seq for row in rows)
    if 2 * sum(one is not None for one in knees) <= len(knees) or knee is None:
        words = f"the knee is near {ridge:.3g} sequences: up to {most} no step takes twice as long as with one"
        return rules.decided([Condition(words, False if most > NEAR * ridge else None)], [at_ridge])
    words = f"a step takes twice as long as with one near {ridge:.3g} sequences, within a factor of {NEAR}"
    if None in knees:  # some lie beyond what was measured: nobody knows how far
        words += f"; in {knees.count(None)} of {len(knees)} repeats no step of up to {most} takes so long"
        return rules.decided([Condition(words, None)], [knee, at_ridge])
    return rules.decided([rules.between(words, knee, ridge / NEAR, ridge * NEAR)], [knee, at_ridge])


def batching_slows_users_and_speeds_the_whole(evidence: Evidence) -> Judgement:
    """Claim 10."""
    by_number: dict[int, list[Record]] = {}
    for record in evidence.of("batch"):
        if record.run.batch is not None:
            by_number.setdefault(record.run.batch.n_seq, []).append(record)
    figures, conditions = [], []
    for few, many in itertools.pairwise(sorted(by_number)):
        step = rules.compared(f"a step of {many} over one of {few}", by_number[few], by_number[many], _step_s)
        figures.append(step)
        conditions.append(rules.at_least(f"with {many} each user is slower than with {few}", step, 1))
        words = f"with {many} all together are faster than with {few}, a step under {many / few:.3g} times as long"
        conditions.append(rules.at_most(words, step, many / few))
    return rules.decided(conditions or [Condition("two numbers of sequences", None, is_missing=True)], figures)


def _step_s(run: Run) -> float | None:
    return lever_figures.step_s(run) if lever_figures.figures(run) else None


def speculation_doubles(evidence: Evidence) -> Judgement:
    """Claim 18."""
    times: dict[tuple[str | None, int], dict[tuple[str, int], list[float]]] = {}
    for record in evidence.of("speculation"):
        lever, tpot = record.run.speculation, guesses.tpot_s(record.run)
        if lever is not None and lever.text is not None and tpot is not None:
            key = (lever.draft, lever.n_draft) if lever.n_draft else (None, 0)
            block = record.run.repeat if record.run.engine is None else record.run.engine
            times.setdefault(key, {}).setdefault((lever.text, block), []).append(tpot)
    plain = times.pop((None, 0), {})
    figures: dict[str, Figure] = {}
    for (draft, n_draft), guessed in times.items():
        gains: dict[int, list[float]] = {}
        for place in guessed.keys() & plain.keys():
            gain = statistics.geometric_mean(plain[place]) / statistics.geometric_mean(guessed[place])
            gains.setdefault(place[1], []).append(gain)
        name = f"speed-up of the median text, {n_draft} guessed by {draft}"
        known = rules.figure(name, [statistics.median(of_texts) for of_texts in gains.values()], "times")
        best_yet = figures.get(draft or "")
        if known is not None and (best_yet is None or known.value > best_yet.value):
            figures[draft or ""] = known
    best = max(figures.values(), key=lambda known: known.value, default=None)
    words = "with the better draft, at its better length, the median text is at least 2 times as fast"
    n_texts = len({text for text, _ in plain})
    remark = f"Over {n_texts} text{'s' * (n_texts != 1)}." if best else ""
    return rules.decided([rules.at_least(words, best, 2)], list(figures.values()), remark)


def longer_prefixes_pay_more(evidence: Evidence) -> Judgement:
    """Claim 19."""
    lengths: dict[int, list[Record]] = {}
    for record in evidence.of("prefix"):
        if record.run.prefix is not None:
            lengths.setdefault(record.run.prefix.n_prefix, []).append(record)
    ordered = sorted(lengths)
    left = [
        rules.figure(f"TTFT with {n:,} cached, of the cold one", [_left(r.run) for r in lengths[n]], "%", 100)
        for n in ordered
    ]
    conditions = []
    for short, long in itertools.pairwise(ordered):
        known = rules.compared(f"{long:,} over {short:,}", lengths[short], lengths[long], _left)
        words = f"of TTFT less is left with {long:,} tokens cached than with {short:,}"
        conditions.append(rules.at_most(words, known, 1))
    return rules.decided(conditions or [Condition("two prefix lengths", None, is_missing=True)], left)


def _left(run: Run) -> float | None:
    taken = prefix_times.figures(run)
    return taken["cached_s"] / taken["cold_s"] if taken and taken["cold_s"] > 0 else None


def chunks_keep_others_going(evidence: Evidence) -> Judgement:
    """Claim 21."""
    chunks: dict[int, list[Record]] = {}
    for record in evidence.of("stall"):
        if record.run.stall is not None:
            chunks.setdefault(record.run.stall.chunk or record.run.n_prompt, []).append(record)
    ordered = sorted(chunks, reverse=True)
    gaps = [rules.figure(f"longest gap, {_name(chunks[n])}", _gaps(chunks[n]), "ms") for n in ordered]
    conditions = []
    for large, small in itertools.pairwise(ordered):
        names = _name(chunks[small]), _name(chunks[large])
        known = rules.compared(f"{names[0]} over {names[1]}", chunks[large], chunks[small], _gap_ms)
        conditions.append(rules.at_most(f"the longest gap is shorter {names[0]} than {names[1]}", known, 1))
    return rules.decided(conditions or [Condition("two sizes of chunks", None, is_missing=True)], gaps)


def _gaps(records: Sequence[Record]) -> list[float | None]:
    return [_gap_ms(record.run) for record in records]


def _gap_ms(run: Run) -> float | None:
    return lever_figures.figures(run).get("gap_ms")


def _name(records: Sequence[Record]) -> str:
    lever = records[0].run.stall
    return f"in chunks of {lever.chunk:,}" if lever and lever.chunk else "all at once"


CLAIMS = (
    claim(
        9,
        "Batching raises decode's intensity until it turns compute-bound at a batch B*",
        "The number of sequences at which a step takes twice as long as with one is, within a factor of 1.5, that at "
        "which by the machine's ceilings arithmetic takes as long as reading.",
        ("batch", CEILINGS),
        batching_turns_compute_bound,
        source="Pope et al. (2022)",
    ),
    claim(
        10,
        "Batched decode: each user is slower, the whole is faster",
        "From each measured number of sequences to the next, up to 16, a step takes longer, but less so than the "
        "sequences are more. One pair that does not refutes it.",
        ("batch",),
        batching_slows_users_and_speeds_the_whole,
        ignores_disturbances=True,
    ),
    claim(
        18,
        "Speculative decoding gives 2 to 3 times",
        "Against plain decoding of the same text in the same repeat, the speed-up of the median text is at least 2, "
        "with the better of the drafts (lookup, a smaller model) at the better of its lengths.",
        ("speculation",),
        speculation_doubles,
        ignores_disturbances=True,
        source="Leviathan et al. (2022)",
    ),
    claim(
        19,
        "Prompt caching pays the more, the longer the prefix",
        "From each measured prefix to the next longer one, the share of the cold time to first token that is left with "
        "the prefix cached falls.",
        ("prefix",),
        longer_prefixes_pay_more,
        ignores_disturbances=True,
    ),
    claim(
        21,
        "Chunked prefill keeps the decode of others going",
        "From a prompt all at once to each smaller chunk, the longest gap between two tokens of a stream gets shorter.",
        ("stall",),
        chunks_keep_others_going,
        ignores_disturbances=True,
        source="Sarathi-Serve (2024)",
    ),
)
