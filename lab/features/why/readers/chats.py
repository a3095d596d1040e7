"""Figures that programs print for people: Ollama, KoboldCpp, LM Studio, vLLM, mlx_lm,
text-generation-webui, and a bare figure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lab.features.why.figure import (
    BOTH,
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    PROMPT,
    UNKNOWN,
    WHOLE,
    WINDOW,
    Figure,
)
from lab.features.why.readers.fields import (
    PastedAnswer,
    check_rate,
    count_if_given,
    matched,
    phases,
    plain_rate,
    share,
)
from lab.formats.numbers import GO_DURATION, NUMBER, count, go_seconds, number

OLLAMA = re.compile(
    r"\b(total duration|load duration|prompt eval count|prompt eval duration|prompt eval rate"
    r"|eval count|eval duration|eval rate)\s{0,20}:\s{0,20}"
    rf"({GO_DURATION}(?![\w.])|{NUMBER})",
    re.I,
)
KOBOLD_BEGIN = re.compile(r"\b(?:Ctx|Context)Limit\s{0,3}:\s{0,3}(\d{1,9})/")
KOBOLD_AMOUNT = re.compile(r"\bAm(?:oun)?t\s{0,3}:\s{0,3}(\d{1,9})/")
KOBOLD_TIMES = re.compile(
    r"\b(Process|Generat|Total)[a-z]{0,4}\s{0,3}:\s{0,3}"
    rf"({NUMBER})\s?s\s{{0,3}}\((?:[^()=\n]{{1,40}}=\s{{0,3}})?({NUMBER})\s?T/s\)"
)
KOBOLD_ROUNDS_S = 0.006
KOBOLD_LINE = 600  # letters of an answer
WEBUI = re.compile(
    rf"Output generated in ({NUMBER}) seconds \(({NUMBER}) tokens/s, (\d{{1,9}}) tokens"
    r"(?:, context (\d{1,9}))?"
)
VLLM = re.compile(
    rf"Avg prompt throughput: {NUMBER} tokens/s, Avg generation throughput: ({NUMBER}) tokens/s"
)
MLX = re.compile(
    r"(\[batch_generate\] )?"
    rf"\b(Prompt|Generation): (\d[\d,]{{0,12}}) tokens, ({NUMBER}) tokens-per-sec\b"
)
LM_STUDIO = re.compile(
    rf"(?<![\d.,])({NUMBER}) ?tok/sec\s{{0,9}}\u2022?\s{{0,9}}(\d[\d,]{{0,12}}) tokens?\b"
)
LM_STUDIO_LINE = 120  # letters after the tokens
LM_STUDIO_DRAFT = re.compile(r"Accepted (\d{1,9})/(\d{1,9}) draft tokens")
ABOUT = re.compile(r"(?:~|\u2248|ca\.?|circa|about|around|approx\.?|etwa)\s{0,3}", re.I)
BARE = re.compile(
    r"(?<![\d.,])(\d[\d.,]{0,19})(?:\s{0,3}(?:tokens?|tok|t)\s{0,3}(?:/|per|p)\s{0,3}"
    r"s(?:ec(?:onds?)?)?\.?|\s{0,3}tps)(?!\w)",
    re.I,
)


def read(text: str) -> list[Figure]:
    """The figures of all these programs. ValueError for contradictions."""
    figures = list[Figure]()
    for answer in ollama_answers(text):
        figures += of_ollama(answer)
    for part in kobold_parts(text):
        figures += of_kobold(part)
    figures += of_webui(text)
    figures += of_vllm(text)
    figures += of_mlx(text)
    figures += of_lm_studio(text)
    return figures


def ollama_answers(text: str) -> list[PastedAnswer]:
    """The values of `ollama run --verbose`, by answer."""
    collected = list[PastedAnswer]()
    for line, match in matched(text, OLLAMA):
        label = match[1].lower()
        if not collected or is_of_next_answer(label, collected[-1]):
            collected.append(PastedAnswer(line))
        collected[-1].values[label] = match[2]
    return collected


def is_of_next_answer(label: str, answer: PastedAnswer) -> bool:
    """Whether a label is no longer of this answer: it has it, or is at its end already."""
    is_at_end = any(earlier.startswith("eval") for earlier in answer.values)
    begins_again = is_at_end and not label.startswith("eval")
    return begins_again or label in answer.values or label == "total duration"


def of_ollama(answer: PastedAnswer) -> list[Figure]:
    """Prefill and decode. It does not say whether a part of the prompt was cached."""
    values = answer.values
    n_prompt = answer.count("prompt eval count")
    n_gen = answer.count("eval count")
    prefill_s = go_seconds(values.get("prompt eval duration", "")) or None
    decode_s = go_seconds(values.get("eval duration", "")) or None
    return phases(
        plain_rate(values.get("prompt eval rate"), n_prompt, prefill_s),
        plain_rate(values.get("eval rate"), n_gen, decode_s),
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


def kobold_parts(text: str) -> Iterator[tuple[int, str]]:
    """The texts of KoboldCpp's answers with their lines."""
    begins = list(matched(text, KOBOLD_BEGIN))
    for index, (line, match) in enumerate(begins):
        end = match.start() + KOBOLD_LINE
        if index + 1 < len(begins):
            end = min(end, begins[index + 1][1].start())
        yield line, text[match.start() : end]


def of_kobold(part: tuple[int, str]) -> list[Figure]:
    """Prefill, decode and the whole answer. ValueError for contradictions.

    The limit's first number is the whole context at the end. Process counts the tokens that were
    not cached: their number is known where the rounded time and rate leave only one.
    """
    line, text = part
    amount = KOBOLD_AMOUNT.search(text)
    begin = KOBOLD_BEGIN.search(text)
    if not amount or not begin:
        return []
    n_gen = count(amount[1])
    depth = count(begin[1]) - n_gen
    if depth < 0:
        raise ValueError("the answer is longer than the context")
    times = {
        match[1]: (number(match[2]), number(match[3])) for match in KOBOLD_TIMES.finditer(text)
    }
    decode_s, decode_tps = times.get("Generat", (0.0, 0.0))
    total_s, total_tps = times.get("Total", (0.0, 0.0))
    prefill_s, prefill_tps = times.get("Process", (0.0, 0.0))
    check_rate(decode_tps, n_gen, decode_s, KOBOLD_ROUNDS_S)
    check_rate(total_tps, n_gen, total_s, KOBOLD_ROUNDS_S)
    if total_s and decode_s > total_s + KOBOLD_ROUNDS_S:
        raise ValueError("decode took longer than everything")
    n_processed = None
    error = KOBOLD_ROUNDS_S * (prefill_tps + prefill_s)  # in tokens
    if prefill_tps and error < 0.5:
        n_processed = round(prefill_s * prefill_tps)
    shared: dict[str, Any] = {
        "source": "KoboldCpp",
        "n_prompt": n_processed,
        "n_gen": n_gen,
        "prefill_s": prefill_s or None,
        "decode_s": decode_s or None,
        "total_s": total_s or None,
        "line": line,
        "is_of_server": True,
    }
    depths: tuple[int | None, int | None] = (None, depth)
    if n_processed is not None:
        depths = (max(0, depth - n_processed), depth)
    figures = phases(prefill_tps, decode_tps, MAYBE_FIRST, depths, **shared)
    if total_tps:
        figures.append(
            Figure(tps=total_tps, phase=BOTH, counts=WHOLE, depth=depths[1], **shared)
        )
    return figures


def of_webui(text: str) -> list[Figure]:
    """text-generation-webui divides by the time of prefill and decode."""
    figures = list[Figure]()
    for line, match in matched(text, WEBUI):
        total_s = number(match[1])
        n_gen = count(match[3])
        tps = plain_rate(match[2], n_gen, total_s)
        if tps:
            figures.append(
                Figure(
                    source="text-generation-webui",
                    tps=tps,
                    phase=BOTH,
                    counts=WHOLE,
                    n_gen=n_gen,
                    depth=count_if_given(match[4]),
                    total_s=total_s,
                    line=line,
                    is_of_server=True,
                )
            )
    return figures


def of_vllm(text: str) -> list[Figure]:
    """vLLM's log has an average over some seconds, of all requests together."""
    figures = list[Figure]()
    for line, match in matched(text, VLLM):
        tps = number(match[1])
        if tps:
            figures.append(
                Figure(
                    source="vLLM log",
                    tps=tps,
                    phase=DECODE,
                    counts=WINDOW,
                    line=line,
                    is_of_server=True,
                )
            )
    return figures


def of_batch(phase: str, tps: float, line: int) -> list[Figure]:
    """A rate of mlx_lm's batch_generate."""
    source = "mlx_lm, a batch"
    if phase == "Prompt":
        return phases(tps, None, PROMPT, (None, None), source=source, line=line)
    return phases(None, tps, MAYBE_FIRST, (None, None), source=source, line=line)


def of_mlx(text: str) -> list[Figure]:
    """mlx_lm.generate: its rate of decode counts the first token, but not its time.

    Rates of a batch sum up all its answers, whose number is not printed beside them.
    """
    figures = list[Figure]()
    n_prompt: int | None = None
    for line, match in matched(text, MLX):
        n_tokens = count(match[3])
        tps = number(match[4])
        if match[1]:
            figures += of_batch(match[2], tps, line)
            continue
        shared: dict[str, Any] = {"source": "mlx_lm", "n_streams": 1, "line": line}
        if match[2] == "Prompt":
            n_prompt = n_tokens
            shared["n_prompt"] = n_prompt
            figures += phases(tps, None, FIRST_FREE, (0, None), **shared)
        elif tps and n_tokens:
            shared |= {"n_prompt": n_prompt, "n_gen": n_tokens, "decode_s": n_tokens / tps}
            shared["n_steps"] = n_tokens - 1 or None
            figures += phases(None, tps, FIRST_FREE, (None, n_prompt), **shared)
    return figures


def of_lm_studio(text: str) -> list[Figure]:
    """The line below an answer in LM Studio; its context is unknown."""
    figures = list[Figure]()
    for line, match in matched(text, LM_STUDIO):
        shown = text[match.start() : match.end() + LM_STUDIO_LINE]
        if "\u2022" not in shown and "to first token" not in shown:
            continue
        draft = LM_STUDIO_DRAFT.search(shown)
        figures.append(
            Figure(
                source="LM Studio",
                tps=number(match[1]),
                phase=DECODE,
                counts=MAYBE_FIRST,
                n_gen=count(match[2]),
                is_speculative=True if draft else None,
                accepted=share(count(draft[1]), count(draft[2])) if draft else None,
                line=line,
                is_of_server=True,
            )
        )
    return figures


def read_bare(text: str) -> list[Figure]:
    """A text that is nothing but a figure, such as `~ 35 tokens/s`."""
    bare = text.strip()
    about = ABOUT.match(bare)
    if about:
        bare = bare[about.end() :]
    match = BARE.fullmatch(bare)
    if not match:
        return []
    return [
        Figure(source="a bare figure", tps=number(match[1]), phase=UNKNOWN, counts=UNKNOWN)
    ]
