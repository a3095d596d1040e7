"""What the lessons say of runs: the sentences of statements.py and agreement.py, printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lab.core import growth, stats
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.features.lessons import agreement, statements
from lab.features.lessons.counted import step_cost
from lab.features.lessons.statements import Judgement
from lab.features.lessons.timed import (
    compared,
    experiment_advice,
    figures,
    of_quiet_runs,
    rows,
    steps_by_size,
    timed_runs,
    times_of,
)
from lab.features.speculate import curve as speculation_curve
from lab.features.speculate.speed_ups import SpeedUpRow
from lab.roofline import explanation, kernel_rates
from lab.roofline.explanation import CostedPhase
from lab.roofline.step_kernels import StepKernels
from lab.show import summaries, sweep_laws, table, text_growth
from lab.show.sweep_laws import Law
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

REFUTED = (
    1.1  # times the best rate of reading: a step that reads faster shows that it is wrong
)
N_EARLY = 16  # tokens of an answer that are its beginning, and as many its end


def say(conclusion: str | Judgement) -> None:
    """Print a sentence with measured figures, in lines that a page can hold.

    No text cell has a measured figure: the cell that measured it says it.
    """
    sentence = conclusion.sentence if isinstance(conclusion, Judgement) else conclusion
    print(textwrap.fill(sentence, 100))


def along_answers(records: Sequence[Record]) -> None:
    """Say for each prompt length whether the tokens of an answer become dearer."""
    answers = table.steps(timed_runs(records)).query("generated > 1")
    for n_prompt, of_all_runs in answers.groupby("n_prompt"):
        of_length = of_quiet_runs(of_all_runs, of_all_runs.row)
        n_end = min(N_EARLY, int(of_length.generated.max()) // 2)
        is_early = of_length.generated <= 1 + n_end
        is_late = of_length.generated > of_length.generated.max() - n_end
        early_ms = of_length[is_early].groupby("row").itl_ms.median()
        late_ms = of_length[is_late].groupby("row").itl_ms.median()
        say(statements.along_answer(int(n_prompt), list(early_ms), list(late_ms)))


def longer_prompt(records: Sequence[Record]) -> Judgement:
    """What the longest prompt of these runs does to prefill and decode, against the shortest."""
    prefills = times_of(records, "prefill_s")
    tokens = times_of(records, "tpot_ms")
    short = min(prefills)
    long = max(prefills)
    prefill = statements.ratio(prefills[short], prefills[long])
    return statements.longer_prompt(
        (short, long), prefill, statements.ratio(tokens[short], tokens[long])
    )


def attention(records: Sequence[Record], phase: str = DECODE) -> Judgement:
    """Whether attention in runs of one setup is as slow as its work, or has a slow kernel."""
    steady = text_growth.steady(records)
    law = growth.growth(steady, phase) if steady else None
    return statements.slow_attention(law, phase)


def decode_law(sweep: Sequence[Record]) -> Law:
    """Print and return t(p) of a sweep of one setup, with a sentence where the curve has a cliff:
    then the line is none of the machine."""
    decode = sweep_laws.decode_law(summaries.summary(table.runs(timed_runs(sweep))))
    if decode is None:
        raise LabError("The formula needs at least three lengths.", "Take smaller steps.")
    print(decode)
    steady = text_growth.steady(sweep)
    if steady and growth.cliff(steady, DECODE) is not None:
        say(" ".join(text_growth.sentences(steady)))
    return decode


def same_weights(larger: Law, smaller: Law, bytes_ratio: float) -> str:
    """Say whether two fitted laws agree on w, for weights with this ratio of bytes, and return the
    verdict."""
    judgement = statements.same_weights(larger, smaller, bytes_ratio)
    say(judgement)
    return judgement.verdict


def limits(rows: pd.DataFrame) -> None:
    """Say what limits each phase of explained rows, and whether attention has a slow kernel."""
    for row in rows.itertuples():
        name = f"{row.phase} at {row.n_prompt:,} prompt tokens"
        say(statements.limit(row, name))
        say(statements.attention_of_row(row))


def cheaper_prompt_token(
    records: Sequence[Record], rows: pd.DataFrame, reading_ms: float
) -> None:
    """Say why a prompt token is cheaper than a generated one."""
    measured = figures(records).iloc[0]
    generated_ms = _parts_ms(rows[rows.phase == DECODE].iloc[0])
    prompt_ms = _parts_ms(rows[rows.phase == PREFILL].iloc[0])
    saved_ms = {
        name: part_ms - prompt_ms.get(name, 0.0) / measured.n_prompt
        for name, part_ms in generated_ms.items()
    }
    prompt_token_ms = 1e3 * measured.prefill_s / measured.n_prompt
    limit = rows[rows.phase == DECODE].iloc[0].limit
    say(
        statements.cheaper_prompt_token(
            measured.tpot_ms, prompt_token_ms, reading_ms, saved_ms, limit
        )
    )


def _parts_ms(row: CostedPhase) -> dict[str, float]:
    """The least milliseconds of an explained phase by part, as `explain` limits it by parts, and
    what it took beyond them."""
    parts_ms = {statements.WEIGHTS: 0.0}
    for name, part_s in row.parts.items():
        is_of_weights = name.endswith((explanation.LAYERS, explanation.OUTPUT))
        part = statements.WEIGHTS if is_of_weights else name
        parts_ms[part] = parts_ms.get(part, 0.0) + 1e3 * part_s
    parts_ms[statements.WORK_OUTSIDE] = 1e3 * max(0.0, row.measured_s - row.least_s)
    return parts_ms


def repacked(records: Sequence[Record]) -> None:
    """Say of each quantization in these records whether llama.cpp repacked its weights."""
    quantizations: list[str] = []
    for record in timed_runs(records):
        kind = record.model.quantization or "?"
        if kind not in quantizations:
            quantizations.append(kind)
            say(statements.repacked(kind, record.run.placement))


def batched(records: Sequence[Record], is_whole: bool = True) -> None:
    """Say whether a token is cheaper in the steps of a batch than alone; without `is_whole` only of
    the largest step."""
    per_token_ms: dict[int, list[float]] = {}
    for n_seq, of_size in steps_by_size(records).items():
        per_token_ms[n_seq] = [1e3 * step_s / n_seq for step_s in of_size]
    alone_ms = per_token_ms.pop(min(per_token_ms))
    kind = records[0].model.quantization or "?"
    for n_seq in sorted(per_token_ms):
        if is_whole or n_seq == max(per_token_ms):
            say(statements.batched(kind, n_seq, alone_ms, per_token_ms[n_seq]))


def threads_gain(records: Sequence[Record], n_prompt: int, n_threads: int) -> None:
    """Say what all threads gain over one in a trial of both."""
    (prefill,) = compared(records, "prefill_s", n_prompt)
    (decode,) = compared(records, "tpot_ms", n_prompt)
    by_block = _decode_over_prefill(records, n_prompt)
    say(statements.threads_gain(prefill.ratio, decode.ratio, n_threads, by_block))


def _decode_over_prefill(records: Sequence[Record], n_prompt: int) -> stats.Ratio | None:
    """What a trial's B changes in decode over what it changes in prefill, block by block: what
    makes a whole block slow cancels."""
    runs = table.runs(timed_runs(records)).query("n_prompt == @n_prompt")
    phases = runs.tpot_ms / runs.prefill_s
    means = phases.groupby([runs.session, runs.block, runs.variant]).mean()
    blocks = means.unstack().dropna()  # of two columns, A before B
    one_thread, all_threads = (list(blocks[variant]) for variant in sorted(blocks))
    return stats.paired_ratio(one_thread, all_threads)


def chunks_cost(records: Sequence[Record], chunk: int) -> Judgement:
    """What `lab.stall` with chunks of this size costs the new request, against all at once."""
    waits_s: dict[int | None, list[float]] = {}
    for record in timed_runs(records):
        (row,) = rows([record])
        waits_s.setdefault(row.chunk, []).append(row.newcomer_s)
    return statements.chunks_cost(chunk, waits_s[None], waits_s[chunk])


def disturbed(before: stats.Ratio | None, now: stats.Ratio | None) -> bool:
    """Whether the gain of all threads lies outside an earlier one, with a sentence if it does."""
    sentence = agreement.disturbed(before, now)
    if sentence:
        say(sentence)
    return sentence is not None


def same_request(before: Sequence[RequestRecord], now: Sequence[RequestRecord]) -> None:
    """Say it if a server's speed changed between two measurements of one request."""
    before_ms, now_ms = (
        list(table.runs(requests).query("not warmup").tpot_ms) for requests in (before, now)
    )
    sentence = agreement.same_request(before_ms, now_ms)
    if sentence:
        say(sentence)


def limit_of_step(
    name: str,
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    times_s: Sequence[float],
    n_past: int,
) -> None:
    """Say what limits a decode step of one sequence, by the rule of `explain`, from its seconds in
    each run.

    A step that reads much faster than the best rate refutes that rate: then nothing is concluded.
    """
    cost_of_step = step_cost(model, 1, n_past)
    best = kernel_rates.roof(ceilings)
    gbps = cost_of_step.n_bytes / statements.middle(times_s) / 1e9
    if gbps > REFUTED * best.gbps:
        say(
            f"What limits {name} cannot be told: it reads {digits(gbps)} GB/s, and the best rate "
            f"that was measured alone is {digits(best.gbps)}. That rate is too low: measure it "
            "again."
        )
        return
    try:
        kernels = StepKernels(model, settings, ceilings).total(1, n_past, 1)
    except LabError as error:
        say(f"What limits {name} cannot be told: {error.what}")
        return
    row = {
        "least_s": kernels.total_s,
        "traffic_s": cost_of_step.n_bytes / best.gbps / 1e9,
        "arithmetic_s": cost_of_step.flops / best.gflops / 1e9,
        "attention_s": kernels.attention_s,
        "attention_traffic_s": cost_of_step.kv_read_bytes / best.gbps / 1e9,
        "attention_arithmetic_s": cost_of_step.attention_flops / best.gflops / 1e9,
        "attention_flops": cost_of_step.attention_flops,
        "attention_bytes": cost_of_step.kv_read_bytes,
        "flops": cost_of_step.flops,
        "n_bytes": cost_of_step.n_bytes,
        "phase": DECODE,
        "parts": {
            explanation.LAYERS: kernels.layers_s,
            explanation.ATTENTION: kernels.attention_s,
        },
    }
    ends_s = (min(times_s), statements.middle(times_s), max(times_s))
    rows_of_runs: list[Any] = [
        SimpleNamespace(**row, measured_s=seconds) for seconds in ends_s
    ]
    say(statements.limit_in_runs(rows_of_runs, name))


def drafts(row: SpeedUpRow) -> None:
    """Say whether drafts pay, from a row of `lab.speculate`."""
    if row.length is None or row.speed_up is None:
        return
    interval = None if row.low is None or row.high is None else (row.low, row.high)
    say(statements.drafts(row.text, row.length, row.speed_up, interval))


def drafts_to_gain(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> None:
    """Say which number of drafts gains most by the measured times of steps of `lab.speculate`.

    `ceilings` and plain `runs` set it against what `experiments` predicts, for the same number.
    """
    steps = {row.n_positions - 1: row.v for row in speculation_curve.rows(timed_runs(records))}
    predicted = None
    for experiment in experiment_advice(runs, ceilings) if ceilings else ():
        if experiment.figures["experiment"] == "speculate":
            predicted = (experiment.figures["n_draft"], experiment.figures["gain"])
    if any(steps):
        say(agreement.drafts_to_gain(steps, predicted))
