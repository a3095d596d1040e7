"""PLACEHOLDER of branch `claims`: three toy claims, to be replaced by the 28 at the merge."""

from __future__ import annotations

from lab.core import phases
from lab.experiments.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Claim, Evidence, Figure, Judgement


def _reading(evidence: Evidence) -> Judgement:
    runs = [record.run for record in evidence.of("lengths") if record.run.n_prompt >= 100]
    shares = sorted((phases.prefill_ns(run) or 0) / (phases.ttft_ns(run) or 1) for run in runs)
    if not shares:
        return Judgement(UNTESTABLE, "No prompt of 100 tokens was measured.")
    figure = Figure("prefill of TTFT", 100 * shares[len(shares) // 2], "%", 100 * shares[0], 100 * shares[-1])
    verdict = HOLDS if shares[0] >= 0.95 else HOLDS_NOT if shares[-1] < 0.95 else UNSURE
    return Judgement(verdict, "Choosing a token takes the rest.", (figure,))


def _together(evidence: Evidence) -> Judgement:
    runs = [record.run for record in evidence.of("batch") if record.run.batch]
    if not runs:
        return Judgement(UNTESTABLE, "No batch was measured.")
    return Judgement(HOLDS, "", (Figure("sequences", max(run.batch.n_seq for run in runs if run.batch)),))


def _without(evidence: Evidence) -> Judgement:
    runs = [record.run for record in evidence.of("no_cache")]
    if not runs:
        return Judgement(UNTESTABLE, "Nothing was measured.")
    seconds = max(phases.prefill_ns(run) or 0 for run in runs) / 1e9
    return Judgement(HOLDS_NOT, "It is seconds.", (Figure("longest step", seconds, "s"),))


CLAIMS = (
    Claim(1, "the time to the first token is mostly prefill", "prefill >= 95 % of TTFT", ("lengths",), _reading),
    Claim(2, "batched decode: each user slower, the whole faster", "both true", ("batch",), _together),
    Claim(3, "without a cache a step takes minutes", "a minute", ("no_cache",), _without),
)
