"""The programs whose answers are read by patterns or labels, one entry each.

An entry says how a program writes its values, and what its rates count: `values.py` makes the
figures. Open `text.py` first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from lab.features.why.facts import Fact
from lab.features.why.figure import (
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    PREFILL,
    PROMPT,
    SEVERAL_LENGTHS,
    UNKNOWN,
    Figure,
)
from lab.features.why.readers import commands, values
from lab.features.why.readers.values import COUNTED_BY_NUMBERS, Program, collected
from lab.formats.numbers import GO_DURATION, NUMBER, number

GAP = r"\s{0,20}:\s{0,20}"
GO = rf"(?:{GO_DURATION}(?![\w.])|{NUMBER})"
N = r"\d[\d,]{0,12}"
SPACE = r"[\s>]{1,40}"  # a terminal may break a line at any space, and a quote mark it


def patterns(*texts: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(text, re.I) for text in texts)


OLLAMA = Program(
    source="Ollama",
    patterns=patterns(
        rf"\b(?:total duration|load duration){GAP}(?P<begin>{GO})",
        rf"\bprompt eval count{GAP}(?P<n_prompt>{N})",
        rf"\bprompt eval duration{GAP}(?P<prefill_go>{GO_DURATION})",
        rf"\bprompt eval rate{GAP}(?P<prefill_tps>{NUMBER})",
        rf"(?<!prompt )\beval count{GAP}(?P<n_gen>{N})",
        rf"(?<!prompt )\beval duration{GAP}(?P<decode_go>{GO_DURATION})",
        rf"(?<!prompt )\beval rate{GAP}(?P<decode_tps>{NUMBER})",
    ),
)
OLLAMA_API = Program(
    source="Ollama",
    sign=re.compile(r'(?<!prompt_)\beval_count"?\s{0,9}[:=]'),
    labels={
        "prompt_eval_count": "n_prompt",
        "prompt_eval_duration": "prefill_ns",
        "eval_count": "n_gen",
        "eval_duration": "decode_ns",
        "total_duration": "begin",
    },
)
TIMINGS = Program(
    source="llama-server timings",
    sign=re.compile(r"\bpredicted_(?:n|ms|per_second)\b|\bprompt_(?:n|ms)\b"),
    labels={
        "cache_n": "n_cached",
        "prompt_n": "n_prompt",
        "prompt_ms": "prefill_ms",
        "prompt_per_second": "prefill_tps",
        "predicted_n": "n_gen",
        "predicted_ms": "decode_ms",
        "predicted_per_second": "decode_tps",
        "draft_n": "drafted",
        "draft_n_accepted": "accepted",
        "prompt_tokens": "usage_prompt",
        "completion_tokens": "usage_gen",
        "cached_tokens": "usage_cached",
        "tokens_evaluated": "server_prompt",
        "tokens_predicted": "server_gen",
    },
    first="cache_n",
    counts=COUNTED_BY_NUMBERS,
)
LM_STUDIO = Program(
    source="LM Studio",
    patterns=patterns(
        rf"(?<![\d.,])(?P<decode_tps>{NUMBER}) ?tok/s(?:ec)?"
        r"(?=[\s\S]{0,160}?(?:\u2022|to first token))"
        rf"\s{{0,9}}\u2022?\s{{0,9}}(?P<n_gen>{N}) tokens?\b",
        r"\bAccepted (?P<accepted>\d{1,9})/(?P<drafted>\d{1,9}) draft tokens",
    ),
    reach=300,
)
LM_STUDIO_API = Program(
    source="LM Studio",
    sign=re.compile(r"\btime_to_first_token\b(?=[\s\S])"),
    labels={
        "prompt_tokens": "n_context",
        "completion_tokens": "n_gen",
        "tokens_per_second": "decode_tps",
        "model": "model",
        "quant": "quantization",
    },
)


def kobold_time(name: str, seconds: str, rate: str) -> str:
    """KoboldCpp's older words for a time and its rate: Process:0.23s (13.8ms/T = 72.65T/s)."""
    return (
        rf"\b{name}\s{{0,3}}:\s{{0,3}}(?P<{seconds}>{NUMBER})\s?s\s{{0,3}}"
        rf"\((?:[^()=\n]{{1,40}}=\s{{0,3}})?(?P<{rate}>{NUMBER})\s?T/s\)"
    )


KOBOLD = Program(
    source="KoboldCpp",
    patterns=patterns(
        r"\b(?:Ctx|Context)Limit\s{0,3}:\s{0,3}(?P<n_end>\d{1,9})/",
        r"\bAm(?:oun)?t\s{0,3}:\s{0,3}(?P<n_gen>\d{1,9})/",
        kobold_time("Process(?:ing)?", "prefill_s", "prefill_tps"),
        rf"\bProcessed:\s?(?P<n_prompt>\d{{1,9}}) in (?P<prefill_s>{NUMBER})\s?s "
        rf"\((?P<prefill_tps>{NUMBER})\s?T/s\)",
        kobold_time("Generat(?:e|ion)", "decode_s", "decode_tps"),
        rf"\bGenerated:\s?(?P<n_gen>\d{{1,9}})(?:/\d{{1,9}})? in (?P<decode_s>{NUMBER})\s?s "
        rf"\((?P<decode_tps>{NUMBER})\s?T/s\)",
        kobold_time("Total", "total_s", "whole_tps"),
        rf"\bTotal:(?P<total_s>{NUMBER})\s?s(?! ?\()",
    ),
    sign=re.compile(r"\b(?:Ctx|Context)Limit\s{0,3}:"),
    rounds_s=0.006,
    reach=600,
)
KOBOLD_BENCHMARK = Program(
    source="KoboldCpp's benchmark",
    sign=re.compile("GenerationSpeed"),
    labels={
        "MaxCtx": "n_end",
        "GenAmount": "n_gen",
        "ProcessingTime": "prefill_s",
        "ProcessingSpeed": "prefill_tps",
        "GenerationTime": "decode_s",
        "GenerationSpeed": "decode_tps",
        "TotalTime": "total_s",
        "Output": "output",
    },
    first="MaxCtx",
    is_of_server=False,
    n_streams=1,
    rounds_s=0.006,
)
KOBOLD_OLDEST = Program(
    source="KoboldCpp",
    patterns=patterns(
        r"\bProcessing Prompt[^(\n]{0,20}\((?P<n_prompt>\d{1,9}) / \d{1,9} tokens\)",
        r"\bGenerating \((?P<n_gen>\d{1,9}) / \d{1,9} tokens\)",
        rf"\bTime Taken - Processing:\s?(?P<prefill_s>{NUMBER})s \([^)\n]{{1,40}}\), "
        rf"Generation:\s?(?P<decode_s>{NUMBER})s \([^)\n]{{1,40}}\), "
        rf"Total:\s?(?P<total_s>{NUMBER})s",
    ),
    sign=re.compile(r"\bTime Taken - Processing:"),
    rounds_s=0.06,
)
KOBOLD_SETUP = (
    r"\bBenchmark Completed - v(?P<build>\d[\w.]{0,20})",
    r"\bThreads=(?P<threads>\d{1,4})\b",
    r"\bBlasBatchSize=(?P<batch>\d{1,6})\b",
    r"\bFlashAttention=(?P<flash_attn>True|False)\b",
    r"\bKvCache=(?P<quantkv>[0-2])\b",
    r"^\W{0,9}Layers: (?P<n_gpu_layers>-?\d{1,4})\s*$",
    r"^\W{0,9}Model: (?P<model>\S[^\n]{0,200}?)\s*$",
    r"^\W{0,9}MaxCtx: (?P<n_ctx>\d{1,9})\s*$",
)
"""What KoboldCpp's benchmark says about its setup, in the lines around its figures."""

KOBOLD_LINES = 14  # from the figures of a benchmark up to the line of its answer
NO_RATE = "Indeterminate"
TABBY_BEGIN = (
    r"Metrics(?: \(ID: [^)\n]{1,80}\))?: (?P<n_gen>\d{1,9}) tokens generated in "
    rf"(?P<total_s>{NUMBER}) seconds \((?:Queue: [^,]{{1,30}}, )?"
)
TABBY_END = (
    rf"Generate: (?:(?P<decode_tps>{NUMBER})|{NO_RATE}) T/s"
    r"(?:, Context: (?P<whole>\d{1,9}) tokens)?"
    r"(?:, Draft: (?P<accepted>\d{1,9}) / (?P<drafted>\d{1,9}) tokens accepted"
    r"(?: \([^)]{1,20}\))?)?"
    r"\)(?P<is_cut> <-- Not accurate)?"
)
TABBY = Program(
    source="TabbyAPI",
    patterns=patterns(
        (
            TABBY_BEGIN + r"Process: (?P<n_cached>\d{1,9}) cached tokens and "
            rf"(?P<n_prompt>\d{{1,9}}) new tokens at (?:(?P<prefill_tps>{NUMBER})|{NO_RATE}) T/s, "
            + TABBY_END
        ).replace(" ", SPACE),
        (
            TABBY_BEGIN
            + rf"Process: (?:(?P<prefill_tps>{NUMBER})|{NO_RATE}) T/s, "
            + TABBY_END.replace("whole", "n_whole")
        ).replace(" ", SPACE),
    ),
)
WEBUI = Program(
    source="text-generation-webui",
    patterns=patterns(
        rf"Output generated in (?P<total_s>{NUMBER}) seconds \((?P<whole_tps>{NUMBER}) tokens/s, "
        r"(?P<n_gen>\d{1,9}) tokens(?:, context (?P<n_context>\d{1,9}))?"
    ),
)


def mlx_rate(label: str, tokens: str, rate: str) -> str:
    """mlx_lm's words for a rate; older versions do not count the tokens."""
    return (
        rf"(?<!generate\] )\b{label}: (?:(?P<{tokens}>{N}) tokens, )?"
        rf"(?P<{rate}>{NUMBER}) tokens-per-sec\b"
    )


MLX = Program(
    source="mlx_lm",
    patterns=patterns(
        mlx_rate("Prompt", "n_prompt", "prefill_tps"),
        mlx_rate("Generation", "n_gen", "decode_tps"),
    ),
    counts=FIRST_FREE,
    is_of_server=False,
    n_streams=1,
    starts_empty=True,
)
MLX_BATCH = Program(
    source="mlx_lm, a batch",
    patterns=patterns(
        rf"\[batch_generate\] Prompt: {N} tokens, (?P<prefill_tps>{NUMBER}) tokens-per-sec",
        rf"\[batch_generate\] Generation: {N} tokens, (?P<decode_tps>{NUMBER}) tokens-per-sec",
    ),
    is_of_server=False,
)
MLX_BENCHMARK = Program(
    source="mlx_lm.benchmark",
    patterns=patterns(
        r"prompt_tokens=(?P<n_prompt>\d{1,12})(?:,| and) generation_tokens=(?P<n_gen>\d{1,12})"
        r"(?:, batch_size=(?P<n_streams>\d{1,6}))?",
        rf"(?:Trial \d{{1,4}}|Averages): {{1,9}}prompt_tps=(?P<prefill_tps>{NUMBER}), "
        rf"generation_tps=(?P<decode_tps>{NUMBER})",
    ),
    is_of_server=False,
    starts_empty=True,
    carried=("n_prompt", "n_gen", "n_streams"),
)
PLAIN = (OLLAMA, OLLAMA_API, LM_STUDIO, WEBUI, MLX, MLX_BATCH)
USAGES = (("usage_prompt", "usage_gen"), ("server_prompt", "server_gen"))
"""Counts of the prompt with its cached part and of the answer, which stand beside the timings."""

LOCALSCORE = {"gen_tps": DECODE, "prompt_tps": PREFILL}
LOCALSCORE_AVERAGES = {"avg_gen_tps": DECODE, "avg_prompt_tps": PREFILL}
ABOUT = re.compile(r"(?:~|\u2248|ca\.?|circa|about|around|approx\.?|etwa)\s{0,3}", re.I)
BARE = re.compile(
    r"(?<![\d.,])(\d[\d.,]{0,19})(?:\s{0,3}(?:tokens?|tok|t)\s{0,3}(?:/|per|p)\s{0,3}"
    r"s(?:ec(?:onds?)?)?\.?|\s{0,3}tps)(?!\w)",
    re.I,
)

LONGEST_SENTENCE = 200
BEFORE_RATE = re.compile(
    r"(?:[:=,~]|\b(?:at|get|gets|gives|is|are|runs|does|about|around))\s*$"
)
OF_PROMPT = re.compile(r"\b(?:prompt|prefill|pp\d*)\b", re.I)
NOT_MEASURED = re.compile(
    r"\b(?:expect\w*|should|would|could|target|goal|instead|supposed|used to|want|hope|need"
    r"|than|not|no|was|were|accepted|drafted|peak|max|total|per user|up to|at least|at most|if)\b",
    re.I,
)


def read(text: str) -> list[Figure]:
    """The figures of all these programs. ValueError for contradictions."""
    figures = list[Figure]()
    for program in PLAIN:
        for answer in collected(text, program):
            figures += values.figures_of(answer, program)
    figures += of_timings(text)
    figures += of_kobold(text)
    figures += of_tabby(text)
    trials = re.sub(r"\bAverages: ", "", text) if re.search(r"\bTrial \d", text) else text
    for answer in collected(trials, MLX_BENCHMARK):
        is_single = answer.count("n_streams") == 1
        counts = FIRST_FREE if is_single else MAYBE_FIRST
        figures += values.figures_of(answer, replace(MLX_BENCHMARK, counts=counts))
    figures += of_rates_alone(text)
    return figures


def of_timings(text: str) -> list[Figure]:
    """llama-server's timings; counts that stand beside them say what was cached."""
    last_ones = list[values.PastedAnswer]()
    for answer in collected(text, TIMINGS):
        if last_ones and is_continued(last_ones[-1], answer):
            last_ones.pop()
        last_ones.append(answer)
    figures = list[Figure]()
    for answer in last_ones:
        n_prompt = answer.count("n_prompt")
        n_gen = answer.count("n_gen")
        for prompt, generated in USAGES:
            n_of_usage = answer.count(prompt)
            fits = n_of_usage is not None and answer.count(generated) == n_gen
            if fits and n_prompt and n_gen and (n_of_usage or 0) >= n_prompt:
                answer.values.setdefault("n_cached", str((n_of_usage or 0) - n_prompt))
        figures += values.figures_of(answer, TIMINGS)
    return figures


def is_continued(earlier: values.PastedAnswer, later: values.PastedAnswer) -> bool:
    """Whether two timings are of one stream (`timings_per_token`), the second with more tokens."""
    for label in ("n_prompt", "prefill_ms", "n_cached"):
        if earlier.values.get(label) != later.values.get(label):
            return False
    n_earlier = earlier.count("n_gen")
    n_later = later.count("n_gen")
    return n_earlier is not None and n_later is not None and n_earlier < n_later


def of_kobold(text: str) -> list[Figure]:
    """KoboldCpp's answers and its benchmark.

    The older line names no processed tokens: they are known where the rounded time and rate leave
    only one number. The benchmark's prompt of ones fills the context but for the answer, which
    goes on with ones; a prompt of the user's has an unknown length.
    """
    figures = list[Figure]()
    for answer in collected(text, KOBOLD):
        prefill_s = answer.seconds("prefill") or 0.0
        tps = answer.number("prefill_tps") or 0.0
        error = KOBOLD.rounds_s * (tps + prefill_s)  # in tokens
        if "n_prompt" not in answer.values and tps and error < 0.5:
            answer.values["n_prompt"] = str(round(prefill_s * tps))
        figures += values.figures_of(answer, KOBOLD)
    for answer in collected(text, KOBOLD_OLDEST):
        figures += values.figures_of(answer, KOBOLD_OLDEST)
    lines = text.split("\n")
    for answer in collected(text, KOBOLD_BENCHMARK):
        n_context = answer.count("n_end")
        n_gen = answer.count("n_gen")
        if not n_context or not n_gen or n_gen >= n_context:
            continue
        answer.values["n_prompt"] = str(n_context - n_gen)
        figures_of_answer = values.figures_of(
            answer, replace(KOBOLD_BENCHMARK, starts_empty=True)
        )
        if answer.values.get("output") != "1":
            figures_of_answer = [
                replace(figure, n_prompt=None, depth=None, prefill_s=None, decode_s=None)
                for figure in figures_of_answer
            ]
        first = max(0, answer.line - KOBOLD_LINES)
        setup = facts_of_benchmark(lines[first : answer.line], first + 1)
        for place, figure in enumerate(figures):
            if figure.source == KOBOLD.source and first < (figure.line or 0) <= answer.line:
                figures[place] = replace(figure, facts={**setup, **figure.facts})
        figures += [
            replace(figure, facts={**setup, **figure.facts}) for figure in figures_of_answer
        ]
    return figures


def facts_of_benchmark(lines: Sequence[str], first: int) -> dict[str, Fact]:
    """What the lines of KoboldCpp's last benchmark say about its setup."""
    setup = dict[str, Fact]()
    for number_of_line, line in enumerate(lines, first):
        if "Benchmark Completed" in line:
            setup = {}
        for pattern in KOBOLD_SETUP:
            match = re.search(pattern, line[:1000])
            for name, written in match.groupdict().items() if match else ():
                setup |= commands.fact_of_printed(name, written, number_of_line)
    return setup


def of_tabby(text: str) -> list[Figure]:
    """TabbyAPI's answers. ValueError if prefill and decode took longer than everything."""
    figures = list[Figure]()
    for answer in collected(text, TABBY):
        figures_of_answer = values.figures_of(answer, TABBY)
        spent_s = 0.0
        for figure in figures_of_answer:
            n_tokens = figure.n_prompt if figure.is_prefill else figure.n_gen
            if not figure.was_cached:
                spent_s += (n_tokens or 0) / figure.tps
        total_s = answer.seconds("total") or 0.0
        if spent_s > 1.02 * total_s + 0.05:
            raise ValueError("prefill and decode took longer than everything")
        if "is_cut" in answer.values:
            figures_of_answer = [
                figure if figure.is_prefill else replace(figure, depth=None)
                for figure in figures_of_answer
            ]
        figures += figures_of_answer
    return figures


def of_rates_alone(text: str) -> list[Figure]:
    """Rates under labels: LM Studio's and LocalScore's, and those that many programs use."""
    figures = list[Figure]()
    if re.search(r"\btokens_per_second\b", text):
        if "time_to_first_token" in text:
            for answer in collected(text, LM_STUDIO_API):
                figures += values.figures_of(answer, LM_STUDIO_API)
        else:
            figures += of_label(text, "tokens_per_second")
    if not re.search(r"\b(?:avg_gen_tps|ttft_ms)\b", text):
        return figures + of_label(text, "gen_tps")
    for answer in values.answers(text, [*LOCALSCORE, *LOCALSCORE_AVERAGES]):
        for label in answer.values:
            phase = {**LOCALSCORE, **LOCALSCORE_AVERAGES}[label]
            counts = PROMPT if phase == PREFILL else MAYBE_FIRST
            if label in LOCALSCORE_AVERAGES:
                counts = SEVERAL_LENGTHS
            tps = answer.number(label)
            if tps:
                figure = Figure(source="LocalScore", tps=tps, phase=phase, counts=counts)
                figures.append(replace(figure, n_streams=1, line=answer.line))
    return figures


def of_label(text: str, label: str) -> list[Figure]:
    """Rates under a label that many programs use: what they count is unknown."""
    figures = list[Figure]()
    for answer in values.answers(text, [label]):
        tps = answer.number(label)
        if tps:
            source = f"{label} of an unknown program"
            figure = Figure(source=source, tps=tps, phase=UNKNOWN, counts=UNKNOWN)
            figures.append(replace(figure, line=answer.line))
    return figures


def read_bare(text: str) -> list[Figure]:
    """A text that is nothing but a figure, such as `~ 35 tokens/s`."""
    bare = text.strip()
    about = ABOUT.match(bare)
    if about:
        bare = bare[about.end() :]
    match = BARE.fullmatch(bare) or only_rate(bare)
    if not match:
        return []
    phase = PREFILL if OF_PROMPT.search(bare[: match.start()]) else UNKNOWN
    return [Figure(source="a bare figure", tps=number(match[1]), phase=phase, counts=UNKNOWN)]


def only_rate(sentence: str) -> re.Match[str] | None:
    """The only rate of a short line, if the line does not speak of what ought to be."""
    matches = list(BARE.finditer(sentence))
    is_short = len(sentence) <= LONGEST_SENTENCE and "\n" not in sentence
    if len(matches) != 1 or not is_short or NOT_MEASURED.search(sentence):
        return None
    before = sentence[: matches[0].start()]
    after = sentence[matches[0].end() :]
    is_told = BEFORE_RATE.search(before) and re.search(r"[A-Za-z]{2}", before)
    return matches[0] if is_told and not after.strip(" .!") else None
