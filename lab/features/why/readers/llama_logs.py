"""Timings that llama.cpp and ik_llama.cpp print: llama-server's log, llama-cli, llama-cli's
footer.

The prompt's time ends with the first token, so the time of decode has a step less than the answer
has tokens. llama-cli prints these steps as `runs`. llama-server's older rate counts the first
token too. The log gives the tokens that were processed; how many came from the cache follows only
from the line that releases the slot, which has the whole context.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lab.features.why.figure import (
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    PREFILL,
    PROMPT,
    STEPS,
    Figure,
)
from lab.features.why.readers.fields import (
    check_rate,
    counts_first_token,
    matched,
    rounding_of,
)
from lab.formats.numbers import NUMBER, count, number

SLOT = re.compile(r"\bid {1,5}(\d{1,6}) {0,3}\| {0,3}task {1,5}(-?\d{1,12})")
TIMING = re.compile(
    r"\b(prompt eval|generation eval|eval) time {0,20}= {0,20}"
    rf"({NUMBER}) ?ms {{0,9}}/ {{0,9}}({NUMBER}) (tokens?|runs?)\b"
    rf"(?: {{0,9}}\( {{0,9}}({NUMBER}|inf|nan) ms per token, {{0,9}}"
    rf"({NUMBER}|inf|nan) tokens per second)?"
)
RELEASE = re.compile(r"\bstop processing: n_(?:past|tokens) = (\d{1,12})")
ACCEPTANCE = re.compile(
    r"draft acceptance(?: rate)? {0,9}= {0,9}[\d.]{1,12} {0,9}"
    r"\( {0,9}(\d{1,12}) accepted / {0,9}(\d{1,12}) generated"
)
FOOTER = re.compile(
    rf"\[ {{0,9}}Prompt: {{0,9}}({NUMBER}) t/s {{0,9}}\| {{0,9}}Generation: {{0,9}}({NUMBER}) t/s"
)
SERVER = "llama-server log"
CLI = "llama-cli"
IK = "ik_llama.cpp log"
Slot = tuple[str, str] | None


@dataclass
class Request:
    """What a log says of a request."""

    timings: dict[str, tuple[int, re.Match[str]]] = field(default_factory=dict)  # with their lines
    n_context: int | None = None  # tokens in the slot when it was released
    acceptance: tuple[int, int] | None = None  # accepted and drafted tokens


def read(text: str) -> list[Figure]:
    """The figures of a log, of each request prefill and decode. ValueError for contradictions."""
    figures = list[Figure]()
    for request in requests_of(text):
        figures += prefill_of(request) + decode_of(request)
    return figures + footers(text)


def requests_of(text: str) -> list[Request]:
    """The requests of a log in order; lines of several slots may be mixed."""
    requests = list[Request]()
    of_slot = dict[Slot, Request]()
    slot: Slot = None
    for number_of_line, line in enumerate(text.split("\n"), 1):
        match = SLOT.search(line[:400])
        if match:
            slot = (match[1], match[2])
        for timing in TIMING.finditer(line):
            request = of_slot.get(slot)
            if request is None or timing[1] in request.timings:
                request = Request()
                requests.append(request)
                of_slot[slot] = request
            request.timings[timing[1]] = (number_of_line, timing)
        request = of_slot.get(slot)
        if request is None:
            continue
        release = RELEASE.search(line[:1000])
        if release:
            request.n_context = int(release[1])
            of_slot.pop(slot)
        acceptance = ACCEPTANCE.search(line[:1000])
        if acceptance:
            request.acceptance = (int(acceptance[1]), int(acceptance[2]))
    return requests


def source_of(request: Request) -> str:
    """The program, by its words."""
    if "generation eval" in request.timings:
        return IK
    timing = request.timings.get("eval")
    if timing and timing[1][4].startswith("run"):
        return CLI
    return SERVER


def prefill_of(request: Request) -> list[Figure]:
    """The prefill of a request, if its time and tokens are there."""
    if "prompt eval" not in request.timings:
        return []
    line, timing = request.timings["prompt eval"]
    seconds = number(timing[2]) / 1e3
    n_prompt = count(timing[3])
    if not seconds or not n_prompt:
        return []
    check_rates(timing, n_prompt, seconds)
    is_cli = source_of(request) == CLI
    n_context = context_before_answer(request)
    depth = None
    if is_cli:
        depth = 0
    elif n_context is not None:
        depth = n_context - n_prompt
    return [
        Figure(
            source=source_of(request),
            tps=n_prompt / seconds,
            phase=PREFILL,
            counts=PROMPT,
            n_prompt=n_prompt,
            depth=depth,
            n_streams=1 if is_cli else None,
            prefill_s=seconds,
            line=line,
            is_of_server=not is_cli,
        )
    ]


def decode_of(request: Request) -> list[Figure]:
    """The decode of a request, if its time and tokens are there."""
    name = "generation eval" if "generation eval" in request.timings else "eval"
    if name not in request.timings:
        return []
    line, timing = request.timings[name]
    seconds = number(timing[2]) / 1e3
    n_counted = count(timing[3])
    if not seconds or not n_counted:
        return []
    source = source_of(request)
    counts = what_is_counted(source, timing, n_counted, seconds)
    is_speculative = request.acceptance is not None
    n_gen = n_counted + 1 if source == CLI else n_counted
    n_steps = None if is_speculative else n_gen - 1
    tps = n_counted / seconds
    if counts == STEPS and source != CLI:
        tps = (n_counted - 1) / seconds
    accepted = None
    if request.acceptance and request.acceptance[1]:
        accepted = request.acceptance[0] / request.acceptance[1]
    n_prompt, prefill_s = prompt_of(request)
    depth = context_before_answer(request)
    if source == CLI:
        depth = n_prompt
    return [
        Figure(
            source=source,
            tps=tps,
            phase=DECODE,
            counts=counts,
            n_prompt=n_prompt,
            n_gen=n_gen,
            depth=depth,
            n_streams=1 if source == CLI else None,
            n_steps=n_steps or None,
            prefill_s=prefill_s,
            decode_s=seconds,
            is_speculative=True if is_speculative else None,
            accepted=accepted,
            line=line,
            is_of_server=source != CLI,
        )
    ]


def prompt_of(request: Request) -> tuple[int | None, float | None]:
    """The processed tokens of the prompt, and their seconds."""
    if "prompt eval" not in request.timings:
        return None, None
    timing = request.timings["prompt eval"][1]
    return count(timing[3]) or None, number(timing[2]) / 1e3 or None


def context_before_answer(request: Request) -> int | None:
    """Tokens in the context before the first generated one, if the log has the whole context.

    The newest token is not in the context yet when a slot is released.
    """
    timing = request.timings.get("generation eval") or request.timings.get("eval")
    if request.n_context is None or timing is None:
        return None
    n_gen = count(timing[1][3])
    before = request.n_context - max(0, n_gen - 1)
    n_prompt, _ = prompt_of(request)
    return before if before >= (n_prompt or 1) else None


def what_is_counted(source: str, timing: re.Match[str], n: int, seconds: float) -> str:
    """What the printed rate counts, from its own numbers.

    ValueError if they contradict each other.
    """
    if source == CLI:
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
        rates = [(PREFILL, PROMPT, match[1]), (DECODE, MAYBE_FIRST, match[2])]
        for phase, counts, rate in rates:
            figures.append(
                Figure(
                    source=CLI,
                    tps=number(rate),
                    phase=phase,
                    counts=counts,
                    n_streams=1,
                    line=line,
                )
            )
    return figures
