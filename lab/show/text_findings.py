"""What a summary of one setup shows, in sentences: the answer, how times grow, and spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core import shown
from lab.core.lists import join_and, plural
from lab.core.record import DECODE, PREFILL
from lab.runner.plan import join
from lab.show import summaries, sweep_laws, text_growth
from lab.show.wording import digits, seconds, times

if TYPE_CHECKING:
    import pandas as pd

    from lab.core.record import Model, Record

WIDE_RANGES = 2.0
"""Do not state how prefill grows if the ranges (largest over smallest) of both lengths multiply to
more than this."""

WIDE_RUNS = 1.25  # the slowest run of a length over the fastest, above which that is said
MOST_LENGTHS = 5  # that a sentence names one by one


def answer(rows: pd.DataFrame, beyond: Sequence[int] = ()) -> str:
    """What a whole request takes: of a summary of one setup and n_gen, its longest reliable one.

    Lengths `beyond` the model's training come last.
    """
    row = max((row for _, row in rows.iterrows()), key=lambda row: _rank(row, beyond))
    token_ms = row.tpot_ms
    if not token_ms > 0:
        token_ms = row.step_ms  # of imported results
    decodes = token_ms > 0
    prompt = plural(row.n_prompt, "token")
    reliability = _reliability(row.doubts)
    is_request = row.prefill_share > 0 and not row.sweep_every > 0
    if is_request and decodes:
        rate = f"{digits(1e3 / token_ms)} tokens/s"
        share = (
            f"{100 * row.prefill_share:.0f} % prefill at {digits(row.prefill_tps)} tokens/s"
        )
        return (
            f"A request of {prompt} with {row.n_gen:,} back takes {seconds(row.e2e_s)}: {share}, "
            f"the rest decode at {rate}{reliability}."
        )
    prefill = f"Prefill of {prompt} takes {seconds(row.prefill_s)}"
    if not decodes:
        return f"{prefill}{reliability}."
    token = f"{seconds(token_ms / 1e3)} ({digits(1e3 / token_ms)} tokens/s)"
    if row.prefill_s > 0:
        return f"{prefill}, each token after it takes {token}{reliability}."
    return f"Each token after {prompt} takes {token}{reliability}."


def _rank(row: pd.Series, beyond: Sequence[int]) -> tuple[bool, bool, int]:
    return shown.is_firm(row.doubts), row.n_prompt not in beyond, row.n_prompt


def _reliability(doubts: Sequence[str]) -> str:
    if not shown.is_firm(doubts):
        return " (unreliable: its runs were disturbed)"
    if shown.PARTLY in doubts:
        return " (some of its runs were disturbed)"
    return ""


def laws(rows: pd.DataFrame) -> list[str]:
    """The fitted laws of a summary of one setup and n_gen, from its reliable rows."""
    firm = summaries.firm(rows)
    fitted = (sweep_laws.prefill_law(firm), sweep_laws.decode_law(firm))
    return [str(law) for law in fitted if law]


def findings(rows: pd.DataFrame, records: Sequence[Record]) -> list[str]:
    """Sentences on how times grow, in a summary of one setup and n_gen, and on why.

    Unreliable rows are left out, and the last sentence says so. Causes are concluded from the steps
    of `records`, the runs of the summary.
    """
    firm = summaries.firm(rows)
    steady = text_growth.steady(records)
    growth: dict[str, str] = {}
    requests = firm[firm.prefill_share.notna()]
    if len(requests) > 1:
        growth[PREFILL] = _prefill_growth(requests, steady)
        short = requests.iloc[0]
        long = requests.iloc[-1]
        if short.tpot_ms > 0 and long.tpot_ms > 0:  # not NaN: there was decoding
            growth[DECODE] = _decode_growth(short, long, steady)
    slow_phases = text_growth.slow_phases(steady)
    sentences = [growth.pop(phase) for phase in slow_phases if phase in growth]
    sentences += text_growth.sentences(steady)
    sentences += growth.values()
    disturbed = sorted(set(rows.n_prompt) - set(firm.n_prompt))
    if disturbed:
        lengths = f"{len(disturbed)} lengths up to {disturbed[-1]:,}"
        if len(disturbed) <= MOST_LENGTHS:
            lengths = join(disturbed)
        sentences.append(
            f"No findings from the runs of {lengths} prompt tokens: they were disturbed."
        )
    return sentences


def of_experts(model: Model) -> list[str]:
    """What decode of a mixture of experts depends on, for a model that is one."""
    if not model.n_expert or not model.n_expert_used:
        return []
    return [
        f"A mixture of experts: each token reads {model.n_expert_used} of {model.n_expert}, and"
        " which ones depends on the text. Newer llama.cpp keeps recent experts in a cache, so"
        " decode depends on the text too. Compare kinds of text: lab measure --prompt code; lab"
        " measure --prompt story; lab measure --prompt german"
    ]


def _prefill_growth(rows: pd.DataFrame, records: Sequence[Record]) -> str:
    """How prefill grew from a length of at most half (or the one before) to the longest."""
    long = rows.iloc[-1]
    halves = rows[rows.n_prompt <= long.n_prompt / 2]  # a step of a few percent shows nothing
    short = rows.iloc[-2] if halves.empty else halves.iloc[-1]
    tokens = long.n_prompt / short.n_prompt
    time = long.prefill_s / short.prefill_s
    growth = _growth(short, long, time / tokens, records)
    return (
        f"Prefill of {plural(long.n_prompt, 'token')} took {times(time)} as long as for "
        f"{short.n_prompt:,} ({times(tokens)} the tokens): {growth}."
    )


def _growth(
    short: pd.Series, long: pd.Series, per_token: float, records: Sequence[Record]
) -> str:
    """How the time per prompt token (a factor) grew; not stated if runs vary too much.

    Why a longer prompt is dearer is told. Why it is cheaper is not: whether reading the weights is
    the reason needs the best rate of reading, which no run shows.
    """
    is_clear = _are_apart(short, long, "prefill_tps") and not 0.9 <= per_token <= 1.1
    if is_clear:
        reason = text_growth.because(records, PREFILL) if per_token > 1 else ""
        return f"{times(per_token)} per token{reason}"
    range_of_short = short.prefill_s_max / short.prefill_s_min
    range_of_long = long.prefill_s_max / long.prefill_s_min
    if range_of_short * range_of_long > WIDE_RANGES:
        return "the runs vary too much to say if that is in proportion"
    return "about in proportion"


def _decode_growth(short: pd.Series, long: pd.Series, records: Sequence[Record]) -> str:
    slower = long.tpot_ms / short.tpot_ms
    reason = ""
    if _are_apart(short, long, "tpot_ms"):
        if slower > 1.1:
            reason = text_growth.because(records, DECODE)
    elif short.repeats > 1 and long.repeats > 1:
        reason = "; their ranges overlap, so it may be chance"
    return (
        f"Decode took {digits(short.tpot_ms)} ms per token after {short.n_prompt:,} prompt tokens "
        f"and {digits(long.tpot_ms)} ms after {long.n_prompt:,} ({times(slower)}){reason}."
    )


def _are_apart(short: pd.Series, long: pd.Series, name: str) -> bool:
    """Whether the ranges of a figure do not overlap. A single run has no range."""
    if short.repeats < 2 or long.repeats < 2:
        return False
    is_higher = long[f"{name}_min"] > short[f"{name}_max"]
    is_lower = long[f"{name}_max"] < short[f"{name}_min"]
    return bool(is_higher or is_lower)


def far_apart(rows: pd.DataFrame) -> list[str]:
    """A sentence on the length whose undisturbed runs differ the most, if that is much."""
    firm = summaries.firm(rows)
    widest = WIDE_RUNS
    sentences: list[str] = []
    for row in firm[firm.disturbed == 0].to_dict("records"):
        for name, label in (("prefill_s", "prefill time"), ("tpot_ms", "TPOT")):
            ratio = row[f"{name}_max"] / row[f"{name}_min"]
            if ratio > widest:
                widest = ratio
                sentences = [
                    f"With {row['n_prompt']:,} prompt tokens the largest {label} is {times(ratio)} "
                    "the smallest, and the lab recorded no disturbance. Measure again."
                ]
    return sentences


def beyond_training(lengths: Sequence[int], n_ctx_train: int | None) -> list[str]:
    """A sentence on the prompt lengths that exceed the model's training length with their
    answer."""
    if not lengths:
        return []
    names = join_and([f"{length:,}" for length in lengths])
    return [
        f"{names} prompt tokens: prompt and answer exceed the model's training length of "
        f"{n_ctx_train:,}: timing is valid, the text is not."
    ]
