"""The ratio of two rates as a product of named factors, and what is left.

All is done in logarithms, in which factors add up. What is counted is arithmetic on the figures. Parts with `settings`
(those that differ, and depth where no records have its law) are measured on this machine by a trial. Another machine
comes from predictions. The rest is never spread over the others. Ranges are 95 % intervals, combined in quadrature. A
factor without a known range has none, and then neither has the rest.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.core import phases, request_times
from lab.core.asked_settings import table
from lab.core.lists import plural
from lab.core.record import DECODE, Record
from lab.core.stats import mean_half_width as half_range
from lab.errors import LabError, printable
from lab.features.limits import probing
from lab.features.predict import prediction
from lab.features.why import pasted
from lab.features.why.pasted import Setup
from lab.models import catalog, devices
from lab.runner import machine
from lab.show import disturbances
from lab.show.wording import digits, seconds

ARITHMETIC, MEASURED, FROM_RECORDS, PREDICTED = "arithmetic", "measured here", "from the records", "predicted"
EQUAL, NOT_KNOWN, REST, NO_RANGE = "equal", "unknown", "the rest", "range unknown"
COUNTED, DEPTH, MODEL, QUANTIZATION, MACHINE = "what is counted", "depth", "model", "quantization", "machine"
SYSTEM, BUILD, STATE, MORE = "system and driver", "build", "machine state", "more settings"
UNEXPLAINED = "not explained"
SAME_MACHINE = ("cpu", "n_cores_usable", "ram_bytes", "devices")
GROUPS = {
    "threads": ("threads", "threads_batch"),
    "ubatch": ("batch", "ubatch"),
    "flash attention": ("flash_attn",),
    "cache type": ("cache_type_k", "cache_type_v"),
}
"""Settings that change together; any others are one group. The cheapest come first."""

LEAST, LEAST_ALONE = 0.02, 0.1
"""Causes are named from the first share if their range excludes 1, and from the second if their range is unknown."""

FEWEST = 3  # blocks, runs or sessions that a range needs


@dataclass(frozen=True)
class Part:
    """A factor of the ratio: its logarithm, half of its range (None: unknown), how both are known, and in words why.

    `settings` are keywords that change on the way from fast to slow, if a trial can measure the part.
    """

    name: str
    log: float = 0.0
    half: float | None = 0.0
    how: str = NOT_KNOWN
    words: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    @property
    def range(self) -> tuple[float, float] | None:
        return None if self.half is None else (math.exp(self.log - self.half), math.exp(self.log + self.half))

    @property
    def is_cause(self) -> bool:
        """Whether it changes the ratio for certain, by at least LEAST."""
        if self.how == REST or self.half is None:
            return self.how != REST and abs(self.log) > math.log1p(LEAST_ALONE)
        return abs(self.log) - self.half > math.log1p(LEAST) / 2 < abs(self.log)


def alike(name: str, is_equal: bool, words: str = "") -> Part:
    """The part of what is equal, or unknown for the reason in `words`."""
    return Part(name, how=EQUAL) if is_equal else Part(name, words=words)


@dataclass(frozen=True)
class Answer:
    """Why `slow` is slower than `fast`: the parts, the last of them what is not explained. Letters name the two."""

    fast: Setup
    slow: Setup
    letters: tuple[str, ...]  # of fast and slow
    parts: tuple[Part, ...]
    path: Path | None = None  # of the trial's records
    command: str = ""  # that tries the largest change, where it is known already

    @property
    def sides(self) -> list[tuple[str, Setup]]:
        """Both setups with their letters, A or the best first."""
        return sorted(zip(self.letters, (self.fast, self.slow), strict=True), key=lambda one: one[0] == "B")

    @property
    def ratio(self) -> float:
        return self.fast.tps / self.slow.tps

    @property
    def causes(self) -> list[Part]:
        """The parts that make the slower one slower, the largest first."""
        return sorted((part for part in self.parts if part.is_cause and part.log > 0), key=lambda part: -part.log)

    @property
    def rest(self) -> Part:
        return self.parts[-1]


def rest(fast: Setup, slow: Setup, parts: Sequence[Part]) -> Part:
    """What the parts leave of the ratio. Its range has that of the parts, of both figures, and between sessions."""
    sessions = [{record.session for record in one.records} for one in (fast, slow)]
    is_together = bool(sessions[0] & sessions[1])
    log = math.log(fast.tps / slow.tps) - sum(part.log for part in parts)
    lacking = [part.name for part in parts if part.half is None]
    squares = [part.half**2 for part in parts if part.half is not None]
    for one in (fast, slow):
        between = 0.0 if is_together else one.between
        if one.spread is None or between is None:
            lacking.append(f"the figure of {one.source}")
        else:
            squares.append(1.96**2 * (one.spread**2 + between**2))
    if lacking:
        return Part(UNEXPLAINED, log, None, REST, f"{NO_RANGE}, like that of {', '.join(dict.fromkeys(lacking))}")
    return Part(UNEXPLAINED, log, math.sqrt(sum(squares)), REST)


UNKNOWN_COUNTS = {
    pasted.UNKNOWN: "does not say what it counts: look up tokens, context, and whether prefill is included",
    pasted.WINDOW: "is an average over a logging window, not the decode rate of a request",
    pasted.MIXED: "mixes prompt and generated tokens, or several lengths",
}


def counted(sides: Mapping[str, Setup]) -> Part:
    """The part of what the two rates count: of each, its decode steps per second over the given rate."""
    log, is_borrowed, words, (fast, slow) = 0.0, False, list[str](), sides.values()
    for (letter, one), other, sign in zip(sides.items(), (slow, fast), (-1, 1), strict=True):
        own, why, borrows = 0.0, UNKNOWN_COUNTS.get(one.counts, ""), False
        prefill_s, total_s, decode_s = one.prefill_s, one.total_s, one.decode_s
        if one.counts == pasted.WHOLE and one.n_gen:
            if decode_s is None and total_s:
                if prefill_s is None and one.n_prompt and other.n_prompt and other.prefill_s:
                    prefill_s, borrows = one.n_prompt * other.prefill_s / other.n_prompt, True
                decode_s = None if prefill_s is None else total_s - prefill_s
            if decode_s and decode_s > 0:
                total_s, pure = total_s or decode_s + (prefill_s or 0.0), max(1, one.n_gen - 1) / decode_s
                why = f"divides by prefill too: {seconds(total_s - decode_s)} of {seconds(total_s)}"
                own, why = math.log(pure / one.tps), f"{why} (decode {digits(pure)} tokens/s)"
                is_borrowed |= borrows
        elif one.counts == pasted.DECODE and one.n_steps and decode_s:
            steps_tps = one.n_steps / decode_s
            if abs(math.log(steps_tps / one.tps)) > 0.001:
                own, why = math.log(steps_tps / one.tps), "counts the first token, but not its time"
        if not own and one.compute_tps and other.tps == other.compute_tps and one.compute_tps > 1.001 * one.tps:
            own, why = math.log(one.compute_tps / one.tps), "includes choosing each token"
        log += sign * own
        words += [f"{letter} {why}"] if why else []
    how = f"{ARITHMETIC}, with the other's prefill rate: {NO_RANGE}" if is_borrowed else ARITHMETIC
    how = how if log else NOT_KNOWN if words else EQUAL
    return Part(COUNTED, log, None if is_borrowed else 0.0, how, "; ".join(words))


GEN = 24  # tokens that a trial generates


def position(one: Setup) -> float | None:
    """The mean position of the tokens that a figure is of; for prefill its length."""
    if one.is_prefill:
        return None if one.n_depth else one.n_prompt
    if one.n_prompt is None and one.n_depth is None:
        return None
    return (one.n_depth or 0) + (one.n_prompt or 0) + (one.n_gen or 0) / 2


def length(one: Setup) -> int:
    """The prompt length with which GEN tokens are at a setup's mean position."""
    place = position(one)
    return 128 if place is None else max(1, round(place if one.is_prefill else place - GEN / 2))


def depth(sides: Mapping[str, Setup], others: Sequence[Record]) -> Part:
    """The part of depth, or of the prompt's length, to be measured unless records have its law.

    The law comes from sessions of one setup that have each position in three runs.
    """
    fast, slow = sides.values()
    name, ends = "length" if fast.is_prefill else DEPTH, {letter: position(one) for letter, one in sides.items()}
    at = [end for end in ends.values() if end is not None]
    if len(at) < 2:
        lacking = " and ".join(sorted(letter for letter, end in ends.items() if end is None))
        return Part(name, words=f"unknown of {lacking}: the length of the context")
    if abs(at[0] - at[1]) <= max(4, 0.02 * max(at)):
        return Part(name, how=EQUAL)
    words = ", ".join(f"{letter} at {end:,.0f}" for letter, end in ends.items())
    words += " tokens" if fast.is_prefill else " (mean position)"
    names = {record.model.name for one in (fast, slow) for record in one.records}
    known = {id(record): record for record in (*fast.records, *slow.records, *others) if record.model.name in names}
    by_session: dict[Any, tuple[list[float], list[float]]] = {}  # the logarithm of each run's time at both positions
    for record in known.values():
        steps, itls = record.run.steps, phases.itl_ns(record.run)
        decoding = [past for kind, past in zip(steps.kind, steps.n_past, strict=True) if kind == DECODE]
        key = record.session, record.settings, record.model.name, record.model.quantization
        for place, column in zip(at, by_session.setdefault(key, ([], [])), strict=True):
            timed = zip(decoding[-len(itls) :], itls, strict=False)
            near = [itl for past, itl in timed if abs(past - place) <= max(16, 0.05 * place)]
            column += [math.log(statistics.median(near))] if len(near) >= 3 else []
    pairs = [columns for columns in by_session.values() if min(map(len, columns)) >= FEWEST]
    if fast.is_prefill or not pairs:
        return Part(name, words=words, settings={"prompt_len": length(slow)})
    logs = [statistics.fmean(b) - statistics.fmean(a) for a, b in pairs]
    own = math.hypot(*(half_range(column) for columns in pairs for column in columns)) / len(logs)
    half, how = (
        half_range(logs) if len(logs) >= FEWEST else own,
        f"{FROM_RECORDS}, {plural(len(logs), 'session')}",
    )
    return Part(DEPTH, statistics.fmean(logs), half, how, words)


def spec_of(one: Setup) -> str | None:
    """The SPEC of a setup's model, if records name it."""
    return catalog.spec_of(one.records[0].model) if one.records else None


def model(sides: Mapping[str, Setup]) -> Part:
    """The part of the model, or of its quantization alone."""
    fast, slow = sides.values()
    words = printable(", ".join(f"{one.model_words} in {letter}" for letter, one in sides.items()))
    if fast.records and slow.records:
        one, other = (side.records[0].model for side in (fast, slow))
        if spec_of(fast) != spec_of(slow):
            name = QUANTIZATION if one.name == other.name else MODEL
            return Part(name, words=words, settings={"model": spec_of(slow)})
        sums = [file.sha256[:8] for file in (one, other) if file.sha256]
        return alike(MODEL, len(set(sums)) < 2, f"the files differ: SHA-256 {' and '.join(sums)}")
    if not (fast.model and slow.model):
        return Part(MODEL, words="not given for both")
    names = sorted((re.sub(r"[^a-z0-9]|gguf", "", one.model_words.lower()) for one in (fast, slow)), key=len)
    return Part(MODEL, how=f"{EQUAL} by name") if names[0] in names[1] else Part(MODEL, words=words)


def of_settings(sides: Mapping[str, Setup]) -> list[Part]:
    """The parts of the groups of settings that differ, and one for those that are known of one side only."""
    fast, slow = (one.settings for one in sides.values())
    of_group = {key: group for group, keys in GROUPS.items() for key in keys}
    changed, unknown = dict[str, dict[str, Any]](), dict[str, None]()
    for key in (*of_group, *(name for name in table() if name not in of_group)):
        group = of_group.get(key, "other settings")
        if key in ("prompt", "seed", "lib") or fast.get(key) == slow.get(key):
            continue
        if key not in fast or key not in slow:
            unknown[group] = None
        else:
            changed.setdefault(group, {})[key] = slow[key]
    if "flash attention" in changed and "cache type" in changed:  # one may be impossible without the other
        changed["flash attention and cache type"] = changed.pop("flash attention") | changed.pop("cache type")
    found = list[Part]()
    for group, values in changed.items():
        ends = (f"{', '.join(f'{key} {one.settings[key]}' for key in values)} in {x}" for x, one in sides.items())
        found.append(Part(group, words=printable("; ".join(ends)), settings=values))
    if unknown:
        found.append(Part(MORE, words=f"not given for both: {', '.join(unknown)}"))
    return found


def of_machine(sides: Mapping[str, Setup], spec: str | None, out: Path, with_build: bool) -> list[Part]:
    """The parts of machine, system, build and the machine's state, as far as records say them."""
    fast, slow = sides.values()
    if not (fast.records and slow.records):
        return [_predicted(sides, spec, out)]
    made, (one, other) = list[Part](), (side.records[0].machine for side in (fast, slow))
    groups = {MACHINE: SAME_MACHINE, SYSTEM: ("os", "cpu_quota")}
    groups |= {BUILD: ("llama_cpp_python", "llama_cpp_commit", "lib", "system_info")} if with_build else {}
    for name, fields in groups.items():
        differ = [key for key in fields if getattr(one, key) != getattr(other, key)]
        words = "; ".join(f"{key.replace('_', ' ')}: {getattr(one, key)}, {getattr(other, key)}" for key in differ)
        is_predicted = differ and name == MACHINE
        made.append(_predicted(sides, spec, out) if is_predicted else alike(name, not differ, words[:200]))
    return [*made, _of_state(sides)]


def _predicted(sides: Mapping[str, Setup], spec: str | None, out: Path) -> Part:
    """The part of two machines by predictions of the same request on both (lab predict)."""
    fast, here, names, said = next(iter(sides.values())), machine.describe(), list[str | None](), list[str]()
    for letter, one in sides.items():
        known = (devices.called(one.device) or devices.recognise(one.device)) if one.device else None
        is_here = one.device == "here"
        if one.records:
            first = one.records[0]
            used = probing.device_of(first.machine, probing.place_of_record(first).devices[0])
            known = devices.recognise(used.description, used.memory_bytes) if used else None
            is_here = all(getattr(first.machine, key) == getattr(here, key) for key in SAME_MACHINE[:3])
        names.append("here" if is_here else known.name if known else None)
        cpu = one.records[0].machine.cpu if one.records else None
        said.append(f"{names[-1] or cpu or 'unknown (--device)'} in {letter}")
    words = ", ".join(said)
    if None in names or spec is None or names[0] == names[1]:
        return alike(MACHINE, None not in names and names[0] == names[1], words)
    n_prompt, n_gen = max(1, (fast.n_depth or 0) + (fast.n_prompt or 0)), max(2, fast.n_gen or 2)
    try:
        rows = [prediction.predict([n_prompt], n_gen, spec, name, results=out)[0] for name in names]
    except LabError as problem:
        return Part(MACHINE, words=f"{words}: not predicted, {problem.what}")
    ranges = [row.prefill_s if fast.is_prefill else row.tpot_s for row in rows]
    if not all(0 < low <= high for low, high in ranges):  # NaN too
        return Part(MACHINE, words=f"{words}: not predicted, it does not fit or has no known peak")
    middles, halves = ([math.log(b * a) / 2 for a, b in ranges], [math.log(b / a) / 2 for a, b in ranges])
    how = f"{PREDICTED}, {100 * prediction.WITHIN:.0f} % ranges"
    return Part(MACHINE, middles[1] - middles[0], math.hypot(*halves), how, words)


def _of_state(sides: Mapping[str, Setup]) -> Part:
    """The part of disturbed runs: the median of all runs against that of the quiet ones.

    The range is that of the median if all runs were quiet; the quiet ones are a sample, without replacement.
    """
    log, squares, said, is_known = 0.0, 0.0, list[str](), True
    on_battery = [one.records[0].machine.power == "battery" for one in sides.values()]
    for (letter, one), sign, battery in zip(sides.items(), (-1, 1), on_battery, strict=True):
        timed = [(figure(run.run, one.is_prefill), not disturbances.disturbances(run)) for run in one.records]
        logs = [math.log(value) for value, _ in timed if value]
        quiet = [math.log(value) for value, is_quiet in timed if value and is_quiet]
        sentences = [*disturbances.sentences(one.records), *disturbances.drift(one.records)]
        said += [f"{letter}: {words}" for words in [*sentences, *(["it ran on battery"] if battery else [])]]
        if FEWEST <= len(quiet) < len(logs):
            log += sign * (statistics.median(logs) - statistics.median(quiet))
            squares += math.pi / 2 * half_range(quiet) ** 2 * (1 - len(quiet) / len(logs))
        is_known &= len(quiet) == len(logs) or len(quiet) >= FEWEST
    words = "; ".join(said)
    if not is_known or not log or on_battery[0] != on_battery[1]:
        return Part(STATE, how=EQUAL if is_known and on_battery[0] == on_battery[1] else NOT_KNOWN, words=words)
    return Part(STATE, log, math.sqrt(squares), f"{FROM_RECORDS}, quiet runs against all", words)


def of_server(sides: Mapping[str, Setup]) -> list[Part]:
    """What a server adds to the engine, by the times that it reports; no part for two engines or two servers."""
    served = [letter for letter, one in sides.items() if one.requests]
    if len(served) != 1:
        return []
    letter, one = served[0], sides[served[0]]
    requests, reported = [record.request for record in one.requests], one.requests[0].endpoint.settings
    sign, pairs = 1 if letter == list(sides)[1] else -1, list[tuple[float, float]]()
    for request in requests:  # seconds of a prompt, or of a token, at the client and by the server
        figures, timings = request_times.figures(request), request.timings
        client_ns = figures.ttft_ns if one.is_prefill else figures.tpot_ns
        own_ms = timings and (timings.prompt_ms if one.is_prefill else timings.gen_ms)
        n = 1 if one.is_prefill else ((timings.n_gen if timings else None) or 0) - 1
        if client_ns and own_ms and n > 0:
            pairs.append((client_ns / 1e9, own_ms / 1e3 / n))
    name = "HTTP, template and tokenizing" if one.is_prefill else "HTTP"
    http = Part(name, words=f"only {plural(len(pairs), 'request')} with times of {letter} itself (--budget)")
    if len(pairs) >= FEWEST:
        logs = [math.log(client / own) for client, own in pairs]
        client_s, own_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        words, how = f"{seconds(client_s)} at the client, {seconds(own_s)} in {letter}", f"from {letter}'s own times"
        http = Part(name, sign * statistics.fmean(logs), half_range(logs), f"{how}, {len(logs)} requests", words)
    is_greedy = any(each.records for each in sides.values()) and all(each.asked.temperature == 0 for each in requests)
    n_slots = reported.n_slots if reported else None
    words = f"{n_slots or 'an unknown number of'} in {letter}; one request ran at a time"
    made = [http, alike("sampling", is_greedy, "not given for both"), alike("slots", n_slots == 1, words)]
    cached = [request.usage.cached_tokens if request.usage else None for request in requests]
    if not one.is_prefill or None in cached or not one.n_prompt:
        return [*made, alike("cache", not one.is_prefill, f"{letter} does not report cached tokens")]
    n_cached = statistics.fmean(n or 0 for n in cached)
    log, words = math.log1p(-min(n_cached / one.n_prompt, 0.99)), f"{n_cached:,.0f} of {one.n_prompt:,} tokens"
    return [*made, Part("cache", sign * log, 0.0, ARITHMETIC, f"{words} in {letter}")]


def figure(run: Any, is_prefill: bool) -> float | None:
    """Nanoseconds per token of a run."""
    if is_prefill:
        ns = phases.prefill_ns(run)
        return ns / run.n_prompt if ns else None
    return phases.tpot_ns(run) or phases.decode_compute_mean_ns(run)
