"""Figures in JSON-like fields: llama-server's timings, Ollama's API, LM Studio's API, LocalScore.

Fields are read one by one, so a fragment without its brackets is as good as a whole document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lab.features.why.figure import (
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    PREFILL,
    PROMPT,
    SEVERAL_LENGTHS,
    STEPS,
    UNKNOWN,
    Figure,
)
from lab.features.why.readers import fields
from lab.features.why.readers.fields import (
    PastedAnswer,
    counts_first_token,
    matched,
    phases,
    plain_rate,
    share,
)
from lab.formats.numbers import count

TIMINGS = (
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_second",
    "draft_n",
    "draft_n_accepted",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "tokens_evaluated",
    "tokens_predicted",
)
OLLAMA = (
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
    "total_duration",
)
USAGES = (("prompt_tokens", "completion_tokens"), ("tokens_evaluated", "tokens_predicted"))
"""Counts of the prompt with its cached part and of the answer, which stand beside the timings."""

LM_STUDIO = ("prompt_tokens", "completion_tokens", "tokens_per_second", "model", "quant")
LOCALSCORE = {"gen_tps": DECODE, "prompt_tps": PREFILL}
LOCALSCORE_AVERAGES = {"avg_gen_tps": DECODE, "avg_prompt_tps": PREFILL}
MLX_HEADER = re.compile(
    r"prompt_tokens=(\d{1,12}), generation_tokens=(\d{1,12}), batch_size=(\d{1,6})"
)
MLX_TRIAL = re.compile(r"prompt_tps=([\d.]{1,20}), generation_tps=([\d.]{1,20})")


def read(text: str) -> list[Figure]:
    """The figures of all known fields. ValueError for contradictions and ambiguous numbers."""
    figures = list[Figure]()
    if re.search(r"\bpredicted_(?:n|ms|per_second)\b|\bprompt_(?:ms|per_second)\b", text):
        for answer in last_of_streams(fields.answers(text, TIMINGS, first="cache_n")):
            figures += of_timings(answer)
    if re.search(r'(?<!prompt_)\beval_count"?\s{0,9}[:=]', text):
        for answer in fields.answers(text, OLLAMA):
            figures += of_ollama(answer)
    if re.search(r"\btokens_per_second\b", text):
        if "time_to_first_token" in text:
            for answer in fields.answers(text, LM_STUDIO):
                figures += of_lm_studio(answer)
        else:
            figures += of_no_known_program(text, "tokens_per_second")
    if re.search(r"\bgeneration_tps\b", text):
        figures += of_mlx(text)
    if re.search(r"\b(?:avg_gen_tps|ttft_ms)\b", text):
        figures += of_localscore(text)
    else:
        figures += of_no_known_program(text, "gen_tps")
    return figures


def last_of_streams(answers: Sequence[PastedAnswer]) -> list[PastedAnswer]:
    """The answers without the earlier timings of the same stream (`timings_per_token`)."""
    last_ones = list[PastedAnswer]()
    for answer in answers:
        if last_ones and is_continued(last_ones[-1], answer):
            last_ones.pop()
        last_ones.append(answer)
    return last_ones


def is_continued(earlier: PastedAnswer, later: PastedAnswer) -> bool:
    """Whether two timings are of one answer, the second with more tokens."""
    same = [earlier.values.get(label) for label in ("prompt_n", "prompt_ms", "cache_n")]
    if same != [later.values.get(label) for label in ("prompt_n", "prompt_ms", "cache_n")]:
        return False
    n_earlier = earlier.count("predicted_n")
    n_later = later.count("predicted_n")
    return n_earlier is not None and n_later is not None and n_earlier < n_later


def of_timings(answer: PastedAnswer) -> list[Figure]:
    """Prefill and decode by llama-server's timings."""
    n_prompt = answer.count("prompt_n")
    n_cached = cached_tokens(answer)
    n_context = None
    if n_cached is not None and n_prompt is not None:
        n_context = n_cached + n_prompt
    prompt_s = seconds_of(answer, "prompt_ms")
    n_gen = answer.count("predicted_n")
    decode_s = seconds_of(answer, "predicted_ms")
    decode_tps, counts = rate_of_timings(answer, n_gen, decode_s)
    n_drafted = answer.count("draft_n")
    n_accepted = answer.count("draft_n_accepted")
    is_speculative = None if n_drafted is None else n_drafted > 0
    n_steps = None
    if n_gen and decode_s and not is_speculative:
        n_steps = n_gen - 1 or None
    return phases(
        plain_rate(answer.values.get("prompt_per_second"), n_prompt, prompt_s),
        decode_tps,
        counts,
        (n_cached, n_context),
        source="llama-server timings",
        n_prompt=n_prompt,
        n_gen=n_gen,
        n_steps=n_steps,
        prefill_s=prompt_s,
        decode_s=decode_s,
        is_speculative=is_speculative,
        accepted=share(n_accepted, n_drafted),
        line=answer.line,
        is_of_server=True,
    )


def cached_tokens(answer: PastedAnswer) -> int | None:
    """Tokens of the prompt that came from the cache; None if the text does not say it.

    Counts of another object in the same text (`usage`) are used only if they fit the answer.
    """
    n_cached = answer.count("cache_n")
    n_prompt = answer.count("prompt_n")
    n_gen = answer.count("predicted_n")
    if n_cached is not None or n_prompt is None or n_gen is None:
        return n_cached
    for prompt, completion in USAGES:
        n_of_usage = answer.count(prompt)
        if (
            n_of_usage is not None
            and n_of_usage >= n_prompt
            and answer.count(completion) == n_gen
        ):
            return n_of_usage - n_prompt
    return None


def seconds_of(answer: PastedAnswer, label: str) -> float | None:
    """A time in milliseconds, in seconds."""
    milliseconds = answer.number(label)
    return milliseconds / 1e3 if milliseconds else None


def rate_of_timings(
    answer: PastedAnswer, n_gen: int | None, decode_s: float | None
) -> tuple[float | None, str]:
    """Tokens per second of decode, and what they count; None if neither rate nor time is there."""
    printed = answer.values.get("predicted_per_second")
    if n_gen and n_gen > 1 and decode_s:
        if printed:
            return rate_and_count(printed, n_gen, decode_s)
        return (n_gen - 1) / decode_s, STEPS
    if printed:
        return plain_rate(printed, n_gen, decode_s), MAYBE_FIRST
    return None, MAYBE_FIRST


def rate_and_count(printed: str, n_gen: int, decode_s: float) -> tuple[float, str]:
    """The rate, and whether it counts the first token, whose time is of the prompt.

    ValueError if the printed rate fits neither.
    """
    is_first_counted = counts_first_token(printed, n_gen, decode_s)
    if is_first_counted is None:
        return n_gen / decode_s, MAYBE_FIRST
    if is_first_counted:
        return n_gen / decode_s, FIRST_FREE
    return (n_gen - 1) / decode_s, STEPS


def of_ollama(answer: PastedAnswer) -> list[Figure]:
    """Prefill and decode by Ollama's API, whose times are nanoseconds.

    It does not say whether a part of the prompt was cached, so the depth is unknown.
    """
    n_prompt = answer.count("prompt_eval_count")
    n_gen = answer.count("eval_count")
    prefill_s = (answer.number("prompt_eval_duration") or 0.0) / 1e9 or None
    decode_s = (answer.number("eval_duration") or 0.0) / 1e9 or None
    return phases(
        plain_rate(None, n_prompt, prefill_s),
        plain_rate(None, n_gen, decode_s),
        MAYBE_FIRST,
        (None, None),
        source="Ollama",
        n_prompt=n_prompt,
        n_gen=n_gen,
        prefill_s=prefill_s,
        decode_s=decode_s,
        line=answer.line,
        is_of_server=True,
    )


def of_lm_studio(answer: PastedAnswer) -> list[Figure]:
    """Decode by LM Studio's API. Its time to the first token may be of a cached prompt."""
    return phases(
        None,
        answer.number("tokens_per_second"),
        MAYBE_FIRST,
        (None, answer.count("prompt_tokens")),
        source="LM Studio",
        n_gen=answer.count("completion_tokens"),
        model=answer.values.get("model"),
        quantization=answer.values.get("quant"),
        line=answer.line,
        is_of_server=True,
    )


def of_mlx(text: str) -> list[Figure]:
    """Prefill and decode of mlx_lm.benchmark: a header, then trials. Rates sum up the batch."""
    headers = list(matched(text, MLX_HEADER))
    figures = list[Figure]()
    for line, trial in matched(text, MLX_TRIAL):
        before = [header for header_line, header in headers if header_line <= line]
        sizes: list[int | None] = [None, None, None]
        if before:
            sizes = [count(size) for size in before[-1].groups()]
        n_prompt, n_gen, n_streams = sizes
        figures += phases(
            float(trial[1]),
            float(trial[2]),
            FIRST_FREE if n_streams == 1 else MAYBE_FIRST,
            (0, n_prompt),
            source="mlx_lm.benchmark",
            n_prompt=n_prompt,
            n_gen=n_gen,
            n_streams=n_streams,
            line=line,
        )
    return figures


def of_no_known_program(text: str, label: str) -> list[Figure]:
    """Rates under a label that many programs use: what they count is unknown."""
    figures = list[Figure]()
    for answer in fields.answers(text, [label]):
        tps = answer.number(label)
        if tps:
            figures.append(
                Figure(
                    source=f"{label} of an unknown program",
                    tps=tps,
                    phase=UNKNOWN,
                    counts=UNKNOWN,
                    line=answer.line,
                )
            )
    return figures


def of_localscore(text: str) -> list[Figure]:
    """LocalScore's rates of a test, or averages over its tests."""
    figures = list[Figure]()
    for answer in fields.answers(text, [*LOCALSCORE, *LOCALSCORE_AVERAGES]):
        for label in answer.values:
            phase = {**LOCALSCORE, **LOCALSCORE_AVERAGES}[label]
            tps = answer.number(label)
            counts = PROMPT if phase == PREFILL else MAYBE_FIRST
            if label in LOCALSCORE_AVERAGES:
                counts = SEVERAL_LENGTHS
            if tps:
                figures.append(
                    Figure(
                        source="LocalScore",
                        tps=tps,
                        phase=phase,
                        counts=counts,
                        n_streams=1,
                        line=answer.line,
                    )
                )
    return figures
