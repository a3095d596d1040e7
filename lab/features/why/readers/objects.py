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
    Figure,
)
from lab.features.why.readers import fields
from lab.features.why.readers.fields import (
    Answer,
    counts_first_token,
    matched,
    plain_rate,
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
)
OLLAMA = (
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
    "total_duration",
)
LM_STUDIO = ("prompt_tokens", "completion_tokens", "tokens_per_second", "arch", "quant")
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
        for answer in last_of_streams(fields.answers(text, TIMINGS)):
            figures += of_timings(answer)
    if re.search(r'(?<!prompt_)\beval_count"?\s{0,9}[:=]', text):
        for answer in fields.answers(text, OLLAMA):
            figures += of_ollama(answer)
    if re.search(r"\btokens_per_second\b", text):
        for answer in fields.answers(text, LM_STUDIO):
            figures += of_lm_studio(answer)
    if re.search(r"\bgeneration_tps\b", text):
        figures += of_mlx(text)
    if re.search(r"\b(?:avg_)?gen_tps\b", text):
        figures += of_localscore(text)
    return figures


def last_of_streams(answers: Sequence[Answer]) -> list[Answer]:
    """The answers without the earlier timings of the same stream (`timings_per_token`)."""
    last_ones = list[Answer]()
    for answer in answers:
        if last_ones and is_continued(last_ones[-1], answer):
            last_ones.pop()
        last_ones.append(answer)
    return last_ones


def is_continued(earlier: Answer, later: Answer) -> bool:
    """Whether two timings are of one answer, the second with more tokens."""
    same = [earlier.values.get(label) for label in ("prompt_n", "prompt_ms", "cache_n")]
    if same != [later.values.get(label) for label in ("prompt_n", "prompt_ms", "cache_n")]:
        return False
    n_earlier = earlier.count("predicted_n")
    n_later = later.count("predicted_n")
    return n_earlier is not None and n_later is not None and n_earlier < n_later


def of_timings(answer: Answer) -> list[Figure]:
    """Prefill and decode by llama-server's timings."""
    n_prompt = answer.count("prompt_n")
    n_cached = cached_tokens(answer)
    n_context = None
    if n_cached is not None and n_prompt is not None:
        n_context = n_cached + n_prompt
    prompt_s = seconds_of(answer, "prompt_ms")
    prompt_tps = plain_rate(answer.values.get("prompt_per_second"), n_prompt, prompt_s)
    figures = list[Figure]()
    if prompt_tps:
        figures.append(
            Figure(
                source="llama-server timings",
                tps=prompt_tps,
                phase=PREFILL,
                counts=PROMPT,
                n_prompt=n_prompt,
                depth=n_cached,
                prefill_s=prompt_s or (n_prompt / prompt_tps if n_prompt else None),
                line=answer.line,
                is_of_server=True,
            )
        )
    decode = decode_of_timings(answer, n_context, n_prompt, prompt_s)
    if decode:
        figures.append(decode)
    return figures


def cached_tokens(answer: Answer) -> int | None:
    """Tokens of the prompt that came from the cache; None if the text does not say it.

    Counts of another object in the same text (`usage`) are used only if they fit the answer.
    """
    n_cached = answer.count("cache_n")
    n_prompt = answer.count("prompt_n")
    n_of_usage = answer.count("prompt_tokens")
    is_same_answer = answer.count("completion_tokens") == answer.count("predicted_n")
    if n_cached is not None or n_prompt is None or n_of_usage is None or not is_same_answer:
        return n_cached
    return n_of_usage - n_prompt if n_of_usage >= n_prompt else None


def seconds_of(answer: Answer, label: str) -> float | None:
    """A time in milliseconds, in seconds."""
    milliseconds = answer.number(label)
    return milliseconds / 1e3 if milliseconds else None


def decode_of_timings(
    answer: Answer, n_context: int | None, n_prompt: int | None, prompt_s: float | None
) -> Figure | None:
    """Decode by llama-server's timings, if there is a rate, or tokens and a time."""
    n_gen = answer.count("predicted_n")
    decode_s = seconds_of(answer, "predicted_ms")
    printed = answer.values.get("predicted_per_second")
    counts = MAYBE_FIRST
    tps = None
    if n_gen and n_gen > 1 and decode_s and printed:
        tps, counts = rate_and_count(printed, n_gen, decode_s)
    elif n_gen and n_gen > 1 and decode_s:
        tps = (n_gen - 1) / decode_s
        counts = STEPS
    elif printed:
        tps = plain_rate(printed, n_gen, decode_s)
    if not tps:
        return None
    n_drafted = answer.count("draft_n")
    n_accepted = answer.count("draft_n_accepted")
    is_speculative = bool(n_drafted) if n_drafted is not None else None
    n_steps = None
    if n_gen and decode_s and not is_speculative:
        n_steps = n_gen - 1
    return Figure(
        source="llama-server timings",
        tps=tps,
        phase=DECODE,
        counts=counts,
        n_prompt=n_prompt,
        n_gen=n_gen,
        depth=n_context,
        n_steps=n_steps or None,
        prefill_s=prompt_s,
        decode_s=decode_s,
        is_speculative=is_speculative,
        accepted=n_accepted / n_drafted if n_drafted and n_accepted is not None else None,
        line=answer.line,
        is_of_server=True,
    )


def rate_and_count(printed: str, n_gen: int, decode_s: float) -> tuple[float, str]:
    """The rate, and whether it counts the first token, whose time is of the prompt.

    ValueError if the printed rate fits neither.
    """
    is_first_counted = counts_first_token(printed.replace(",", "."), n_gen, decode_s)
    if is_first_counted is None:
        return n_gen / decode_s, MAYBE_FIRST
    if is_first_counted:
        return n_gen / decode_s, FIRST_FREE
    return (n_gen - 1) / decode_s, STEPS


def of_ollama(answer: Answer) -> list[Figure]:
    """Prefill and decode by Ollama's API, whose times are nanoseconds.

    It does not say whether a part of the prompt was cached, so the depth is unknown.
    """
    n_prompt = answer.count("prompt_eval_count")
    prompt_s = (answer.number("prompt_eval_duration") or 0.0) / 1e9
    n_gen = answer.count("eval_count")
    decode_s = (answer.number("eval_duration") or 0.0) / 1e9
    figures = list[Figure]()
    if n_gen and decode_s:
        figures.append(
            Figure(
                source="Ollama",
                tps=n_gen / decode_s,
                phase=DECODE,
                counts=MAYBE_FIRST,
                n_prompt=n_prompt,
                n_gen=n_gen,
                prefill_s=prompt_s or None,
                decode_s=decode_s,
                line=answer.line,
                is_of_server=True,
            )
        )
    if n_prompt and prompt_s:
        figures.append(
            Figure(
                source="Ollama",
                tps=n_prompt / prompt_s,
                phase=PREFILL,
                counts=PROMPT,
                n_prompt=n_prompt,
                prefill_s=prompt_s,
                line=answer.line,
                is_of_server=True,
            )
        )
    return figures


def of_lm_studio(answer: Answer) -> list[Figure]:
    """Decode by LM Studio's API. Its time to the first token may be of a cached prompt."""
    tps = answer.number("tokens_per_second")
    if not tps:
        return []
    return [
        Figure(
            source="LM Studio",
            tps=tps,
            phase=DECODE,
            counts=MAYBE_FIRST,
            n_gen=answer.count("completion_tokens"),
            depth=answer.count("prompt_tokens"),
            model=answer.values.get("arch"),
            quantization=answer.values.get("quant"),
            line=answer.line,
            is_of_server=True,
        )
    ]


def of_mlx(text: str) -> list[Figure]:
    """Prefill and decode of mlx_lm.benchmark: a header, then trials. Rates sum up the batch."""
    headers = list(matched(text, MLX_HEADER))
    figures = list[Figure]()
    for line, trial in matched(text, MLX_TRIAL):
        before = [header for header_line, header in headers if header_line <= line]
        n_prompt = n_gen = n_streams = None
        if before:
            n_prompt, n_gen, n_streams = (count(size) for size in before[-1].groups())
        counts_of_decode = FIRST_FREE if n_streams == 1 else MAYBE_FIRST
        rates = [(PREFILL, PROMPT, 0, trial[1]), (DECODE, counts_of_decode, n_prompt, trial[2])]
        for phase, counts, depth, rate in rates:
            figures.append(
                Figure(
                    source="mlx_lm.benchmark",
                    tps=float(rate),
                    phase=phase,
                    counts=counts,
                    n_prompt=n_prompt,
                    n_gen=None if phase == PREFILL else n_gen,
                    depth=depth,
                    n_streams=n_streams,
                    line=line,
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
