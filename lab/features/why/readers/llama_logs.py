"""Timings that llama.cpp and ik_llama.cpp print: llama-server's log, llama-cli, llama-cli's
footer.

The prompt's time ends with the first token, so the time of decode has a step less than the answer
has tokens. llama-cli prints these steps as `runs`. llama-server's older rate counts the first
token too. The log gives the tokens that were processed; how many came from the cache follows only
from the line that releases the slot, which has the whole context.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lab.features.why.figure import (
    FIRST_FREE,
    MAYBE_FIRST,
    PROMPT,
    STEPS,
    Figure,
)
from lab.features.why.readers import log_start
from lab.features.why.readers.fields import (
    check_rate,
    counts_first_token,
    matched,
    phases,
    rounding_of,
    share,
)
from lab.formats.numbers import NUMBER, count, number

SLOT = re.compile(r"\bid {1,5}(\d{1,6}) {0,3}\| {0,3}task {1,5}(-?\d{1,12})")
TIMING = re.compile(
    r"\b(prompt eval|generation eval|eval) time {0,20}= {0,20}"
    rf"({NUMBER}) ?ms {{0,9}}/ {{0,9}}({NUMBER}) (tokens?|runs?)\b"
    rf"(?: {{0,9}}\( {{0,9}}({NUMBER}|inf|nan) ms per token, {{0,9}}"
    rf"({NUMBER}|inf|nan) tokens per second)?"
)
RELEASE = re.compile(
    r"\bstop processing: n_(?:past|tokens) = (\d{1,12})(?!\d|, truncated = 1)"
)
NEW_PROMPT = re.compile(
    r"\bnew prompt, [^\n]{0,90}\b(?:task\.n_tokens|n_prompt_tokens) = (\d{1,12})"
)
SHIFTED = re.compile(r"\btruncated = 1\b|\binput truncated\b|\bcontext shift\b")
PREFIX_HIT = re.compile(r"\bLlama\.generate: (\d{1,12}) prefix-match hit")
SEVERAL_EVALUATIONS = re.compile(
    r"interactive mode|\bperplexity\b|session file|prompt cache|available commands", re.I
)
"""Words of programs whose timings sum up several prompts, or leave a part of one out."""

ACCEPTANCE = re.compile(
    r"draft acceptance(?: rate)? {0,9}= {0,9}[\d.]{1,12} {0,9}"
    r"\( {0,9}(\d{1,12}) accepted / {0,9}(\d{1,12}) generated"
)
FOOTER = re.compile(
    rf"\[ {{0,9}}Prompt: {{0,9}}({NUMBER}) t/s {{0,9}}\| {{0,9}}Generation: {{0,9}}({NUMBER}) t/s"
)
SERVER = "llama-server log"
CLI = "llama-cli"
LIBRARY = "llama-cpp-python"
SEVERAL = "llama.cpp, several evaluations"
IK = "ik_llama.cpp or old llama-server log"
PROMPT_EVAL = "prompt eval"
COUNTING_STEPS = (CLI, LIBRARY, SEVERAL)
"""Programs whose `runs` are decode steps: the first token comes out of the prompt."""

Slot = tuple[str, str] | None


@dataclass
class LoggedRequest:
    """What a log says of a request."""

    # With their lines
    timings: dict[str, tuple[int, re.Match[str]]] = field(default_factory=dict)
    n_context: int | None = None  # tokens in the slot when it was released
    n_whole_prompt: int | None = None  # with its cached part
    n_cached: int | None = None  # of llama-cpp-python
    is_shifted: bool = False  # a part of the context was dropped
    acceptance: tuple[int, int] | None = None  # accepted and drafted tokens


def read(text: str) -> list[Figure]:
    """The figures of a log, of each request prefill and decode. ValueError for contradictions."""
    has_several = SEVERAL_EVALUATIONS.search(text) is not None
    figures = list[Figure]()
    for request in requests_of(text):
        figures += figures_of(request, has_several)
    figures += footers(text)
    setup = log_start.fields_of(text)
    return [replace(figure, **setup) for figure in figures]


def requests_of(text: str) -> list[LoggedRequest]:
    """The requests of a log in order.

    Lines of several slots may be mixed, and a slot is released before or after its timings.
    """
    requests = list[LoggedRequest]()
    of_slot = dict[Slot, LoggedRequest]()
    slot: Slot = None
    for number_of_line, line in enumerate(text.split("\n"), 1):
        match = SLOT.search(line[:400])
        if match:
            slot = (match[1], match[2])
        for timing in TIMING.finditer(line):
            request = of_slot.get(slot)
            if request is None or is_of_next_request(timing[1], request):
                request = LoggedRequest()
                of_slot[slot] = request
            if not request.timings:
                requests.append(request)
            request.timings[timing[1]] = (number_of_line, timing)
        hit = PREFIX_HIT.search(line[:400])
        if hit:
            of_slot[slot] = LoggedRequest(n_cached=int(hit[1]))
        if match:
            look_at_context(line[:1000], of_slot.setdefault(slot, LoggedRequest()))
        acceptance = ACCEPTANCE.search(line[:1000])
        if acceptance and slot in of_slot:
            of_slot[slot].acceptance = (int(acceptance[1]), int(acceptance[2]))
    return requests


def is_of_next_request(label: str, request: LoggedRequest) -> bool:
    """Whether a timing is no longer of this request: the prompt's timing comes first."""
    return label in request.timings or (label == PROMPT_EVAL and bool(request.timings))


def look_at_context(line: str, request: LoggedRequest) -> None:
    """Note what a line of a slot tells about its context."""
    release = RELEASE.search(line)
    if release:
        request.n_context = int(release[1])
    new_prompt = NEW_PROMPT.search(line)
    if new_prompt:
        request.n_whole_prompt = int(new_prompt[1])
    if SHIFTED.search(line):
        request.is_shifted = True


def source_of(request: LoggedRequest) -> str:
    """The program, by its words."""
    if "generation eval" in request.timings:
        return IK
    timing = request.timings.get("eval")
    if timing and timing[1][4].startswith("run"):
        return CLI if request.n_cached is None else LIBRARY
    return SERVER


def figures_of(request: LoggedRequest, has_several: bool) -> list[Figure]:
    """Prefill and decode of a request, as far as their times and tokens are there.

    `has_several`: the timings sum up several prompts, if they are not a server's.
    """
    source = source_of(request)
    n_prompt, prefill_s = size_and_time(request.timings.get(PROMPT_EVAL))
    prefill_tps = None
    if n_prompt and prefill_s:
        check_rates(request.timings[PROMPT_EVAL][1], n_prompt, prefill_s)
        prefill_tps = n_prompt / prefill_s
    shared: dict[str, Any] = {"source": source, "n_prompt": n_prompt, "prefill_s": prefill_s}
    n_context = None
    if source not in COUNTING_STEPS:
        n_context = context_before_answer(request)
        shared["is_of_server"] = True
    elif has_several:
        shared["source"] = SEVERAL
    elif n_prompt is not None:
        n_context = (request.n_cached or 0) + n_prompt
        shared["n_streams"] = 1
    n_cached = None
    if n_context is not None and n_prompt is not None:
        n_cached = n_context - n_prompt
    figures = list[Figure]()
    if prefill_tps:
        line = request.timings[PROMPT_EVAL][0]
        figures += phases(prefill_tps, None, PROMPT, (n_cached, None), line=line, **shared)
    decode = request.timings.get("generation eval") or request.timings.get("eval")
    n_counted, decode_s = size_and_time(decode)
    if decode and n_counted and decode_s:
        figures += decode_of(request, decode, n_counted, decode_s, n_context, shared)
    return figures


def decode_of(
    request: LoggedRequest,
    decode: tuple[int, re.Match[str]],
    n_counted: int,
    decode_s: float,
    n_context: int | None,
    shared: Mapping[str, Any],
) -> list[Figure]:
    """Decode of a request. llama-cli counts steps, the others tokens."""
    line, timing = decode
    counts = what_is_counted(shared["source"], timing, n_counted, decode_s)
    n_gen = n_counted
    if shared["source"] in COUNTING_STEPS:
        n_gen = n_counted + 1
    n_rated = n_gen
    if counts == STEPS:
        n_rated = n_gen - 1
    fields: dict[str, Any] = {"n_gen": n_gen, "decode_s": decode_s, "line": line, **shared}
    if request.acceptance:
        fields |= {"is_speculative": True, "accepted": share(*request.acceptance)}
    else:
        fields["n_steps"] = n_gen - 1 or None
    return phases(None, n_rated / decode_s, counts, (None, n_context), **fields)


def size_and_time(
    timing_of_line: tuple[int, re.Match[str]] | None,
) -> tuple[int | None, float | None]:
    """Tokens and seconds of a line of timings; None if it is missing, or says 0."""
    if timing_of_line is None:
        return None, None
    timing = timing_of_line[1]
    return count(timing[3]) or None, number(timing[2]) / 1e3 or None


def context_before_answer(request: LoggedRequest) -> int | None:
    """Tokens in the context before the first generated one, if the log has the whole context.

    The newest token is not in the context yet when a slot is released.
    """
    if request.is_shifted:
        return None
    n_prompt, _ = size_and_time(request.timings.get(PROMPT_EVAL))
    before = request.n_whole_prompt
    timing = request.timings.get("generation eval") or request.timings.get("eval")
    if request.n_context is not None and timing is not None:
        before = request.n_context - max(0, count(timing[1][3]) - 1)
    if before is None or before < (n_prompt or 1):
        return None
    return before


def what_is_counted(source: str, timing: re.Match[str], n: int, seconds: float) -> str:
    """What the printed rate counts, from its own numbers.

    ValueError if they contradict each other.
    """
    if source in COUNTING_STEPS:
        check_rates(timing, n, seconds)
        return STEPS
    if not is_number(timing[6]):
        return FIRST_FREE if source == IK else STEPS
    if n < 2:
        check_rates(timing, n, seconds)
        return MAYBE_FIRST
    is_first_counted = counts_first_token(timing[6], n, seconds)
    if is_first_counted is None and is_number(timing[5]):
        is_first_counted = by_time_per_token(timing[5], n, seconds)
    if is_first_counted is None:
        return MAYBE_FIRST
    return FIRST_FREE if is_first_counted else STEPS


def is_number(text: str | None) -> bool:
    """Whether a rate is printed, and is not infinite."""
    return text not in (None, "inf", "nan")


def by_time_per_token(printed_ms: str, n: int, seconds: float) -> bool | None:
    """Whether the milliseconds per token count the first one; None if both would print them."""
    rounding_ms = rounding_of(printed_ms)
    milliseconds = number(printed_ms)
    fits_with = abs(milliseconds - 1e3 * seconds / n) <= rounding_ms
    fits_without = abs(milliseconds - 1e3 * seconds / (n - 1)) <= rounding_ms
    return None if fits_with == fits_without else fits_with


def check_rates(timing: re.Match[str], n: int, seconds: float) -> None:
    """ValueError if the printed rates contradict tokens and time."""
    if is_number(timing[6]):
        check_rate(number(timing[6]), n, seconds)


def footers(text: str) -> list[Figure]:
    """llama-cli's last line, such as [ Prompt: 19.5 t/s | Generation: 11.8 t/s ]."""
    figures = list[Figure]()
    for line, match in matched(text, FOOTER):
        rates = number(match[1]), number(match[2])
        figures += phases(
            *rates, MAYBE_FIRST, (None, None), source=CLI, n_streams=1, line=line
        )
    return figures
