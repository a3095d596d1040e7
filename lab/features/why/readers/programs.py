"""What needs more than a pattern: answers that are completed before their figures are made.

The patterns themselves stand in `programs.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from lab.features.why.figure import (
    DECODE,
    FIRST_FREE,
    PREFILL,
    STEPS,
    UNKNOWN,
    Figure,
)
from lab.features.why.readers.answers import PROGRAMS, PastedAnswer, Program, collected
from lab.features.why.readers.rates import figures_of
from lab.formats.numbers import number

SEVERAL_EVALUATIONS = re.compile(
    r"interactive mode|\bperplexity\b|session file|prompt cache|available commands", re.I
)
"""Words of programs whose timings sum up several prompts, or leave a part of one out."""

OF_LIBRARY = re.compile(r"\bllama_cpp\b|llama-cpp-python|\bLlama\.generate\b")
OF_CLI = re.compile(r"(?:^|[\s/\\'\"])(?:\./main|main\.exe|llama-cli)\b", re.M)
SERVER = "llama-server log"
SPEED_CHANGED = 0.1
USAGES = (("usage_prompt", "usage_gen"), ("server_prompt", "server_gen"))
"""Counts of the prompt with its cached part and of the answer, which stand beside the timings."""

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
END_OF_RANGE = re.compile(r"\d\s*(?:-|\u2013|to|and|or)\s*$")
OF_PROMPT = re.compile(r"\b(?:prompt|prefill|pp\d*)\b", re.I)
NOT_MEASURED = re.compile(
    r"\b(?:expect\w*|should|would|could|target|goal|instead|supposed|used to|want|hope|need"
    r"|than|not|no|was|were|accepted|drafted|peak|max|total|per user|up to|at least|at most|if)\b",
    re.I,
)


def read(text: str) -> list[Figure]:
    """The figures of all programs of the table. ValueError for contradictions."""
    figures = list[Figure]()
    for program in PROGRAMS:
        of_answers = COMPLETED.get(program.source, of_plain)
        figures += of_answers(collected(text, program), program, text)
    return figures


def of_plain(answers: list[PastedAnswer], program: Program, text: str) -> list[Figure]:
    """The figures of answers that say all themselves."""
    return [figure for answer in answers for figure in figures_of(answer, program)]


def of_log(answers: list[PastedAnswer], program: Program, text: str) -> list[Figure]:
    """The figures of llama.cpp's timings: of llama-server, of llama-cli, of a library."""
    has_several = SEVERAL_EVALUATIONS.search(text) is not None
    is_of_library = OF_LIBRARY.search(text) is not None
    names_cli = OF_CLI.search(text) is not None
    figures = list[Figure]()
    for answer in answers:
        values = answer.values
        counted = program
        if "old" in values:
            counted = replace(program, source="ik_llama.cpp or old llama-server log")
            if "decode_tps" not in values:
                counted = replace(counted, counts=FIRST_FREE)
        elif values.get("unit", "").startswith("run"):
            source = "llama-cpp-python" if is_of_library else "llama-cli"
            if is_of_library and names_cli:  # both print the same lines
                source = "llama.cpp"
            counted = replace(program, source=source, counts=STEPS, is_of_server=False)
            values["n_gen"] = str((answer.count("n_gen") or 0) + 1)
            if has_several:
                counted = replace(counted, source="llama.cpp, several evaluations")
            else:
                values.setdefault("n_cached", "0")
                counted = replace(counted, n_streams=1)
        if counted.is_of_server:
            values.pop("n_cached", None)
            add_context(answer)
        figures += of_unfinished(answer, counted)
    return figures


def add_context(answer: PastedAnswer) -> None:
    """Tokens before the answer of a server, if its log has the whole context.

    The newest token is not in the context yet when a slot is released.
    """
    n_context = answer.count("n_task")
    n_released = answer.count("n_released")
    if n_released is not None and "decode_ms" in answer.values:
        n_context = n_released - max(0, (answer.count("n_gen") or 0) - 1)
    is_whole = n_context is not None and n_context >= (answer.count("n_prompt") or 1)
    if is_whole and "shifted" not in answer.values:
        answer.values["n_context"] = str(n_context)


def of_unfinished(answer: PastedAnswer, program: Program) -> list[Figure]:
    """The figures of a request; of one whose last lines are missing from its progress."""
    values = answer.values
    if "decode_ms" in values or values.keys().isdisjoint(("tg", "pp")):
        return figures_of(answer, program)
    running = replace(program, about="still running")
    if "prefill_ms" not in values and "pp" in values:
        values["prefill_tps"] = values["pp"]
        answer.lines["prefill_tps"] = answer.lines["pp"]
        if "n_processed" in values:
            values["n_prompt"] = values["n_processed"]
    if "tg" not in values:
        return figures_of(answer, running if "pp" in values else program)
    values["decode_tps"] = values["tg"]
    answer.lines["decode_tps"] = answer.lines["tg"]
    values |= {"n_gen": values["n_decoded"]} if "n_decoded" in values else {}
    recent_tps = answer.number("tg_3s")
    decode_tps = answer.number("tg") or 0.0
    about = running.about
    if recent_tps is not None and abs(recent_tps / decode_tps - 1) > SPEED_CHANGED:
        about = f"{about}, {recent_tps:g} tokens/s in its last 3 s"
    figures = list[Figure]()
    for figure in figures_of(answer, running):
        is_finished = figure.is_prefill and "prefill_ms" in values
        about_phase = about if not figure.is_prefill else running.about
        depth = figure.depth
        if depth is None and not figure.is_prefill:
            depth = answer.count("n_task")
        figures.append(replace(figure, about="" if is_finished else about_phase, depth=depth))
    return figures


def of_timings(answers: list[PastedAnswer], program: Program, text: str) -> list[Figure]:
    """llama-server's timings; counts that stand beside them say what was cached."""
    last_ones = list[PastedAnswer]()
    for answer in answers:
        if last_ones and is_continued(last_ones[-1], answer):
            last_ones.pop()
        last_ones.append(answer)
    for answer in last_ones:
        n_prompt = answer.count("n_prompt")
        n_gen = answer.count("n_gen")
        for prompt, generated in USAGES:
            n_of_usage = answer.count(prompt)
            fits = n_of_usage is not None and answer.count(generated) == n_gen
            if fits and n_prompt and n_gen and (n_of_usage or 0) >= n_prompt:
                answer.values.setdefault("n_cached", str((n_of_usage or 0) - n_prompt))
    return of_plain(last_ones, program, text)


def is_continued(earlier: PastedAnswer, later: PastedAnswer) -> bool:
    """Whether two timings are of one stream (`timings_per_token`), the second with more tokens."""
    for name in ("n_prompt", "prefill_ms", "n_cached"):
        if earlier.values.get(name) != later.values.get(name):
            return False
    n_earlier = earlier.count("n_gen")
    n_later = later.count("n_gen")
    return n_earlier is not None and n_later is not None and n_earlier < n_later


def of_kobold(answers: list[PastedAnswer], program: Program, text: str) -> list[Figure]:
    """KoboldCpp's answers. An older line names no processed tokens: they are known where the
    rounded time and rate leave only one number. The oldest counts tokens that may be of another
    answer: its time per token says how many there were.
    """
    for answer in answers:
        token_s = answer.seconds("token")
        decode_s = answer.seconds("decode")
        if token_s and decode_s:
            answer.values["n_gen"] = str(round(decode_s / token_s))
        prefill_s = answer.seconds("prefill") or 0.0
        tps = answer.number("prefill_tps") or 0.0
        error = program.rounds_s * (tps + prefill_s)  # in tokens
        if "n_prompt" not in answer.values and tps and error < 0.5:
            answer.values["n_prompt"] = str(round(prefill_s * tps))
    return of_plain(answers, program, text)


def of_kobold_benchmark(
    answers: list[PastedAnswer], program: Program, text: str
) -> list[Figure]:
    """KoboldCpp's benchmark. Its prompt of ones fills the context but for the answer, which goes
    on with ones; a prompt of the user's has an unknown length.
    """
    figures = list[Figure]()
    for answer in answers:
        n_context = answer.count("n_end")
        n_gen = answer.count("n_gen")
        if not n_context or not n_gen or n_gen >= n_context:
            continue
        answer.values["n_prompt"] = str(n_context - n_gen)
        of_answer = figures_of(answer, replace(program, starts_empty=True))
        if not re.fullmatch("[ 1]+", answer.values.get("output", "")):
            of_answer = [
                replace(figure, n_prompt=None, depth=None, prefill_s=None, decode_s=None)
                for figure in of_answer
            ]
        figures += of_answer
    return figures


def of_serving(answers: list[PastedAnswer], program: Program, text: str) -> list[Figure]:
    """A benchmark of a server: all answers over the whole duration, and the decode of one answer.

    The latter is the inverse of the mean TPOT, which has no first token. How many answers were
    decoded at once is known only where at most one was allowed.
    """
    figures = list[Figure]()
    for answer in answers:
        if "begin" not in answer.values:
            continue
        most = answer.number("most_streams") or 0.0
        about = f"at most {most:.0f} at once" if most > 1 else ""
        counted = replace(program, about=about, n_streams=1 if most == 1 else None)
        if "of_sglang" in answer.values:
            counted = replace(counted, source="SGLang bench_serving")
        mean_ms = answer.values.pop("tpot_ms", "-")
        median_ms = answer.values.get("median_tpot_ms", "1")
        of_answer = figures_of(answer, counted)
        came_in_steps = not mean_ms.startswith("-") and not median_ms.startswith("-")
        if came_in_steps and number(mean_ms) and number(median_ms):
            tps = 1000 / number(mean_ms)
            decode = [replace(each, tps=tps, phase=DECODE, counts=STEPS) for each in of_answer]
            of_answer += decode
        figures += [replace(figure, total_s=None, line=answer.line) for figure in of_answer]
    return figures


COMPLETED: dict[str, Callable[[list[PastedAnswer], Program, str], list[Figure]]] = {
    SERVER: of_log,
    "llama-server timings": of_timings,
    "KoboldCpp": of_kobold,
    "KoboldCpp's benchmark": of_kobold_benchmark,
    "vLLM bench serve": of_serving,
}
"""How the answers of a program are completed, by its source in the table."""


def read_bare(text: str) -> list[Figure]:
    """A text that is nothing but a figure, such as `~ 35 tokens/s`."""
    bare = text.strip()
    about = ABOUT.match(bare)
    if about:
        bare = bare[about.end() :]
    match = BARE.fullmatch(bare) or only_rate(bare)
    return [_bare(match)] if match else []


def read_stated(words: str) -> list[Figure]:
    """The only rate of words that a user typed as one side of a comparison, such as `25 tok/s on
    a 3090`; none if they speak of what ought to be, or of a range."""
    match = _single_rate(words)
    if match is None or END_OF_RANGE.search(words[: match.start()]):
        return []
    return [_bare(match)]


def _bare(match: re.Match[str]) -> Figure:
    is_of_prompt = OF_PROMPT.search(match.string[: match.start()])
    phase = PREFILL if is_of_prompt else UNKNOWN
    return Figure(source="a bare figure", tps=number(match[1]), phase=phase, counts=UNKNOWN)


def only_rate(sentence: str) -> re.Match[str] | None:
    """The only rate of a short line, if the line does not speak of what ought to be."""
    match = _single_rate(sentence)
    if match is None:
        return None
    before = sentence[: match.start()]
    after = sentence[match.end() :]
    is_told = BEFORE_RATE.search(before) and re.search(r"[A-Za-z]{2}", before)
    return match if is_told and not after.strip(" .!") else None


def _single_rate(sentence: str) -> re.Match[str] | None:
    matches = list(BARE.finditer(sentence))
    is_short = len(sentence) <= LONGEST_SENTENCE and "\n" not in sentence
    if len(matches) != 1 or not is_short or NOT_MEASURED.search(sentence):
        return None
    return matches[0]
