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
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    PREFILL,
    PROMPT,
    STEPS,
    Figure,
)
from lab.features.why.readers.values import (
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
NOTES: Mapping[str, re.Pattern[str]] = {
    "n_end": re.compile(
        r"\bstop processing: n_(?:past|tokens) = (\d{1,12})(?!\d|, truncated = 1)"
    ),
    "n_whole": re.compile(
        r"\bnew prompt, [^\n]{0,90}\b(?:task\.n_tokens|n_prompt_tokens) = (\d{1,12})"
    ),
    "shifted": re.compile(r"(\btruncated = 1\b|\binput truncated\b|\bcontext shift\b)"),
    "n_decoded": re.compile(
        rf"\bn_(?:decoded|gen) {{0,9}}= {{0,9}}(\d{{1,12}}), tg = {{0,9}}{NUMBER}"
    ),
    "tg": re.compile(rf"\btg {{0,9}}= {{0,9}}({NUMBER}) t/s"),
    "tg_3s": re.compile(rf"\btg_3s {{0,9}}= {{0,9}}({NUMBER}) t/s"),
    "n_processed": re.compile(
        rf"\bprompt processing, n_tokens = {{1,12}}(\d{{1,12}}), progress = {{1,5}}[\d.]{{1,9}}, "
        rf"t = {{1,9}}{NUMBER} s / {{1,12}}{NUMBER} tokens per second"
    ),
    "pp": re.compile(
        rf"\bprompt processing, [^\n]{{1,90}} s / {{1,12}}({NUMBER}) tokens per second"
    ),
    "accepted": re.compile(r"draft acceptance[^\n(]{0,40}\( {0,9}(\d{1,12}) accepted"),
    "drafted": re.compile(
        r"draft acceptance[^\n(]{0,40}\([^\n/)]{1,40}/ {0,9}(\d{1,12}) generated"
    ),
    "mean_len": re.compile(rf"\bmean len {{0,5}}= {{0,9}}({NUMBER})"),
}
"""What lines of a slot say besides its timings; of a note that comes again the last one counts."""

OF_SLOTS = ("n_end", "n_whole", "shifted")  # only in lines that name their slot
SAMPLING = re.compile(
    rf"\bsampl(?:e|ing) time {{0,9}}= {{0,12}}({NUMBER}) ms"
    r"(?: {0,9}/ {0,9}(\d{1,9}) (?:runs|tokens))?"
)
PREFIX_HIT = re.compile(r"\bLlama\.generate: (\d{1,12}) prefix-match hit")
SEVERAL_EVALUATIONS = re.compile(
    r"interactive mode|\bperplexity\b|session file|prompt cache|available commands", re.I
)
"""Words of programs whose timings sum up several prompts, or leave a part of one out."""

OF_LIBRARY = re.compile(r"\bllama_cpp\b|llama-cpp-python|\bLlama\.generate\b")
OLD_SERVER = re.compile(r"\bPrintTimings\b")
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

SPEED_CHANGED = 0.1

Slot = tuple[str, str] | None


@dataclass(frozen=True)
class Signs:
    """What words anywhere in a text say of the program that printed its timings."""

    has_several: bool  # prompts in one sum
    is_of_library: bool


@dataclass
class LoggedRequest:
    """What a log says of a request: timings and notes, each with its line."""

    timings: dict[str, tuple[int, re.Match[str]]] = field(default_factory=dict)
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    sampling_s: float | None = None  # of a token
    is_listed: bool = False

    @property
    def has_figure(self) -> bool:
        return bool(self.timings) or not self.notes.keys().isdisjoint(("tg", "pp"))

    def count(self, note: str) -> int | None:
        """A note as a number of tokens."""
        return count(self.notes[note][1]) if note in self.notes else None

    def number(self, note: str) -> float | None:
        return number(self.notes[note][1]) if note in self.notes else None


def read(text: str) -> list[Figure]:
    """The figures of a log, of each request prefill and decode. ValueError for contradictions."""
    programs = Signs(
        has_several=SEVERAL_EVALUATIONS.search(text) is not None,
        is_of_library=OF_LIBRARY.search(text) is not None,
    )
    figures = list[Figure]()
    for request in requests_of(text):
        figures += figures_of(request, programs)
    for line, match in matched(text, FOOTER):
        shared: dict[str, Any] = {"source": CLI, "n_streams": 1, "line": line}
        prefill_tps = number(match[1])
        decode_tps = number(match[2])
        if prefill_tps:
            figures.append(Figure(tps=prefill_tps, phase=PREFILL, counts=PROMPT, **shared))
        if decode_tps:
            figures.append(Figure(tps=decode_tps, phase=DECODE, counts=MAYBE_FIRST, **shared))
    return figures


def requests_of(text: str) -> list[LoggedRequest]:
    """The requests of a log in order.

    Lines of several slots may be mixed, and a slot is released before or after its timings.
    """
    requests = list[LoggedRequest]()
    of_slot = dict[Slot, LoggedRequest]()
    slot: Slot = None
    sampling_s: float | None = None
    for line_number, line in enumerate(text.split("\n"), 1):
        match = SLOT.search(line[:400])
        if match:
            slot = (match[1], match[2])
            of_slot.setdefault(slot, LoggedRequest())
        sampling_s = sampling_of(line) or sampling_s
        for timing in TIMING.finditer(line):
            request = of_slot.get(slot)
            if request is None or is_of_next_request(timing[1], request):
                request = LoggedRequest()
                of_slot[slot] = request
            if not request.timings:
                request.sampling_s = sampling_s
                sampling_s = None
            request.timings[timing[1]] = (line_number, timing)
        hit = PREFIX_HIT.search(line[:400])
        if hit:
            of_slot[slot] = LoggedRequest(notes={"n_cached": (line_number, hit[1])})
        current = of_slot.get(slot)
        if current:
            take_notes(current, line[:1000], line_number, has_slot=match is not None)
        if current and current.has_figure and not current.is_listed:
            current.is_listed = True
            requests.append(current)
    return requests


def sampling_of(line: str) -> float | None:
    """Seconds of a token's choice, if the line has them."""
    sampling = SAMPLING.search(line[:400])
    if not sampling or not sampling[2]:
        return None
    return number(sampling[1]) / 1e3 / max(1, int(sampling[2]))


def take_notes(request: LoggedRequest, line: str, line_number: int, has_slot: bool) -> None:
    """Note what a line says besides timings; of some notes only where it names its slot."""
    for name, pattern in NOTES.items():
        note = pattern.search(line)
        if note and (has_slot or name not in OF_SLOTS):
            request.notes[name] = (line_number, note[1])


def is_of_next_request(label: str, request: LoggedRequest) -> bool:
    """Whether a timing is no longer of this request: the prompt's timing comes first."""
    return label in request.timings or (label == PROMPT_EVAL and bool(request.timings))


def source_of(request: LoggedRequest, is_of_library: bool) -> str:
    """The program, by its words."""
    timing = request.timings.get("eval")
    if "generation eval" in request.timings or (
        timing and OLD_SERVER.search(timing[1].string)
    ):
        return IK
    if timing and timing[1][4].startswith("run"):
        return LIBRARY if is_of_library or "n_cached" in request.notes else CLI
    return SERVER


def figures_of(request: LoggedRequest, programs: Signs) -> list[Figure]:
    """Prefill and decode of a request, as far as their times and tokens are there.

    Timings of several evaluations sum up several prompts, if they are not a server's.
    """
    source = source_of(request, programs.is_of_library)
    n_prompt, prefill_s = size_and_time(request.timings.get(PROMPT_EVAL))
    shared: dict[str, Any] = {"source": source, "n_prompt": n_prompt, "prefill_s": prefill_s}
    n_context = None
    if source not in COUNTING_STEPS:
        n_context = context_before_answer(request, n_prompt)
        shared["is_of_server"] = True
    elif programs.has_several:
        shared["source"] = SEVERAL
    elif n_prompt is not None:
        n_context = (request.count("n_cached") or 0) + n_prompt
        shared["n_streams"] = 1
    n_cached = None
    if n_context is not None and n_prompt is not None:
        n_cached = n_context - n_prompt
    figures = list[Figure]()
    if n_prompt and prefill_s:
        line, timing = request.timings[PROMPT_EVAL]
        check_rates(timing, n_prompt, prefill_s)
        prefill = Figure(tps=n_prompt / prefill_s, phase=PREFILL, counts=PROMPT, **shared)
        figures.append(replace(prefill, depth=n_cached, line=line))
    decode = request.timings.get("generation eval") or request.timings.get("eval")
    n_counted, decode_s = size_and_time(decode)
    if decode and n_counted and decode_s:
        figures.append(decode_of(request, decode, n_counted, decode_s, n_context, shared))
    elif decode is None:
        figures += unfinished(request, n_context, shared)
    return figures


def decode_of(
    request: LoggedRequest,
    decode: tuple[int, re.Match[str]],
    n_counted: int,
    decode_s: float,
    n_context: int | None,
    shared: Mapping[str, Any],
) -> Figure:
    """Decode of a request. llama-cli counts steps, the others tokens."""
    line, timing = decode
    source = str(shared["source"])
    counts = what_is_counted(source, timing, n_counted, decode_s)
    n_gen = n_counted
    if source in COUNTING_STEPS:
        n_gen = n_counted + 1
    n_rated = n_gen
    if counts == STEPS:
        n_rated = n_gen - 1
    drafts = drafts_of(request, n_gen)
    return Figure(
        tps=max(1, n_rated) / decode_s,
        phase=DECODE,
        counts=counts,
        n_gen=n_gen,
        depth=n_context,
        decode_s=decode_s,
        n_steps=None if drafts else n_gen - 1 or None,
        sampling_s=request.sampling_s,
        line=line,
        **drafts,
        **shared,
    )


def drafts_of(request: LoggedRequest, n_gen: int) -> dict[str, Any]:
    """Drafted and accepted tokens of a request, and the tokens that a step brings with them."""
    accepted = request.count("accepted")
    drafted = request.count("drafted")
    if not drafted:
        return {}
    each = request.number("mean_len")
    if not each and accepted is not None and n_gen > accepted:
        each = n_gen / (n_gen - accepted)
    return {"accepted": accepted, "drafted": drafted, "tokens_per_step": each}


def unfinished(
    request: LoggedRequest, n_context: int | None, shared: Mapping[str, Any]
) -> list[Figure]:
    """The figures of a request whose last lines are missing, from its lines of progress."""
    figures = list[Figure]()
    tps = request.number("pp")
    n_processed = request.count("n_processed")
    fields: dict[str, Any] = dict(shared)
    if tps and PROMPT_EVAL not in request.timings:
        line = request.notes["pp"][0]
        fields = {**shared, "n_prompt": n_processed}
        prefill = Figure(tps=tps, phase=PREFILL, counts=PROMPT, **fields)
        figures.append(replace(prefill, line=line, about="still running"))
    decode_tps = request.number("tg")
    if not decode_tps:
        return figures
    line = request.notes["tg"][0]
    about = "still running"
    recent_tps = request.number("tg_3s")
    if recent_tps is not None and abs(recent_tps / decode_tps - 1) > SPEED_CHANGED:
        about = f"still running, {recent_tps:g} tokens/s in its last 3 s"
    depth = n_context if n_context is not None else request.count("n_whole")
    decode = Figure(tps=decode_tps, phase=DECODE, counts=MAYBE_FIRST, **fields)
    n_gen = request.count("n_decoded")
    figures.append(replace(decode, n_gen=n_gen, depth=depth, line=line, about=about))
    return figures


def size_and_time(
    timing_of_line: tuple[int, re.Match[str]] | None,
) -> tuple[int | None, float | None]:
    """Tokens and seconds of a line of timings; None if it is missing, or says 0."""
    if timing_of_line is None:
        return None, None
    timing = timing_of_line[1]
    return count(timing[3]) or None, number(timing[2]) / 1e3 or None


def context_before_answer(request: LoggedRequest, n_prompt: int | None) -> int | None:
    """Tokens in the context before the first generated one, if the log has the whole context.

    The newest token is not in the context yet when a slot is released.
    """
    if "shifted" in request.notes:
        return None
    before = request.count("n_whole")
    n_end = request.count("n_end")
    timing = request.timings.get("generation eval") or request.timings.get("eval")
    if n_end is not None and timing is not None:
        before = n_end - max(0, count(timing[1][3]) - 1)
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
