"""Why one figure is slower than another: both sides read or measured, the parts, and a sentence.

The ratio of two rates is a product of named factors, and what is left. All is done in logarithms, in which factors add
up. What is counted is arithmetic on the figures. Parts with `settings` (those that differ, and depth where no records
have its law) are measured on this machine by a trial. Another machine comes from predictions. The rest is never spread
over the others. Ranges are 95 % intervals, combined in quadrature. A factor without a known range has none, and then
neither has the rest.

A trial measures a path from the faster setup to the slower one in blocks of fresh engines. Each variant on the path
changes one group of settings more, and so do those of the reverse path; a factor is the mean of both orders, so the
order does not decide it. One run of the cheapest variant tells what a block will take; the path has as many changes,
the cheapest first, as fit into the budget. What it does not hold is cut off and not counted.

A setup alone is compared with the best that this machine can do. That is a bound, not a measurement: the least time of
the phase's kernels (lab explain), with the one change of settings that is predicted to help most.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.app.options import seconds_of
from lab.app.running import ceilings_of, read, without_tuning
from lab.core import phases, request_times, results, shell
from lab.core.asked_settings import defaults, table as settings_table
from lab.core.lists import plural
from lab.core.record import DECODE as STEP, UNKNOWN_THREADS, Record
from lab.core.request import RequestRecord
from lab.core.stats import mean_half_width as half_range
from lab.errors import LabError, printable
from lab.show import comparison
from lab.runner import trial as side_by_side
from lab.roofline import advice, explanation, prediction, probing
from lab.remote import access, through_server
from lab.remote.servers import connect
from lab.features.why import pasted
from lab.features.why.pasted import DECODE, PREFILL, Setup
from lab.models import catalog, devices
from lab.process.worker import Worker
from lab.runner import as_options, builds, machine, session
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.show import disturbances, table
from lab.show.wording import digits, seconds, times

ARITHMETIC = "arithmetic"
MEASURED = "measured here"
FROM_RECORDS = "from the records"
PREDICTED = "predicted"
EQUAL = "equal"
NOT_KNOWN = "unknown"
REST = "the rest"
NO_RANGE = "range unknown"
COUNTED = "what is counted"
DEPTH = "depth"
MODEL = "model"
QUANTIZATION = "quantization"
MACHINE = "machine"
SYSTEM = "system and driver"
BUILD = "build"
STATE = "machine state"
MORE = "more settings"
UNEXPLAINED = "not explained"
SAME_MACHINE = ("cpu", "n_cores_usable", "ram_bytes", "devices")
GROUPS = {
    "threads": ("threads", "threads_batch"),
    "ubatch": ("batch", "ubatch"),
    "flash attention": ("flash_attn",),
    "cache type": ("cache_type_k", "cache_type_v"),
}
"""Settings that change together; any others are one group. The cheapest come first."""

LEAST = 0.02
LEAST_ALONE = 0.1  # causes are named from these shares, with and without a known range
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
        return (
            None
            if self.half is None
            else (math.exp(self.log - self.half), math.exp(self.log + self.half))
        )

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
        return sorted(
            zip(self.letters, (self.fast, self.slow), strict=True), key=lambda one: one[0] == "B"
        )

    @property
    def ratio(self) -> float:
        return self.fast.tps / self.slow.tps

    @property
    def causes(self) -> list[Part]:
        """The parts that make the slower one slower, the largest first."""
        return sorted(
            (part for part in self.parts if part.is_cause and part.log > 0),
            key=lambda part: -part.log,
        )

    @property
    def rest(self) -> Part:
        return self.parts[-1]


def left_over(fast: Setup, slow: Setup, parts: Sequence[Part]) -> Part:
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
        return Part(
            UNEXPLAINED,
            log,
            None,
            REST,
            f"{NO_RANGE}, like that of {', '.join(dict.fromkeys(lacking))}",
        )
    return Part(UNEXPLAINED, log, math.sqrt(sum(squares)), REST)


UNKNOWN_COUNTS = {
    pasted.UNKNOWN: "does not say what it counts: look up tokens, context, and whether prefill is included",
    pasted.WINDOW: "is an average over a logging window, not the decode rate of a request",
    pasted.MIXED: "mixes prompt and generated tokens, or several lengths",
}


def counted(sides: Mapping[str, Setup]) -> Part:
    """The part of what the two rates count: of each, its decode steps per second over the given rate."""
    log = 0.0
    is_borrowed = False
    words = list[str]()
    (fast, slow) = sides.values()
    for (letter, one), other, sign in zip(sides.items(), (slow, fast), (-1, 1), strict=True):
        own = 0.0
        why = UNKNOWN_COUNTS.get(one.counts, "")
        borrows = False
        prefill_s = one.prefill_s
        total_s = one.total_s
        decode_s = one.decode_s
        if one.counts == pasted.WHOLE and one.n_gen:
            if decode_s is None and total_s:
                if prefill_s is None and one.n_prompt and other.n_prompt and other.prefill_s:
                    prefill_s = one.n_prompt * other.prefill_s / other.n_prompt
                    borrows = True
                decode_s = None if prefill_s is None else total_s - prefill_s
            if decode_s and decode_s > 0:
                total_s = total_s or decode_s + (prefill_s or 0.0)
                pure = max(1, one.n_gen - 1) / decode_s
                why = f"divides by prefill too: {seconds(total_s - decode_s)} of {seconds(total_s)}"
                own = math.log(pure / one.tps)
                why = f"{why} (decode {digits(pure)} tokens/s)"
                is_borrowed |= borrows
        elif one.counts == pasted.DECODE and one.n_steps and decode_s:
            steps_tps = one.n_steps / decode_s
            if abs(math.log(steps_tps / one.tps)) > 0.001:
                own = math.log(steps_tps / one.tps)
                why = "counts the first token, but not its time"
        if (
            not own
            and one.compute_tps
            and other.tps == other.compute_tps
            and one.compute_tps > 1.001 * one.tps
        ):
            own = math.log(one.compute_tps / one.tps)
            why = "includes choosing each token"
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
    name = "length" if fast.is_prefill else DEPTH
    ends = {letter: position(one) for letter, one in sides.items()}
    at = [end for end in ends.values() if end is not None]
    if len(at) < 2:
        lacking = " and ".join(sorted(letter for letter, end in ends.items() if end is None))
        return Part(name, words=f"unknown of {lacking}: the length of the context")
    if abs(at[0] - at[1]) <= max(4, 0.02 * max(at)):
        return Part(name, how=EQUAL)
    words = ", ".join(f"{letter} at {end:,.0f}" for letter, end in ends.items())
    words += " tokens" if fast.is_prefill else " (mean position)"
    names = {record.model.name for one in (fast, slow) for record in one.records}
    known = {
        id(record): record
        for record in (*fast.records, *slow.records, *others)
        if record.model.name in names
    }
    by_session: dict[
        Any, tuple[list[float], list[float]]
    ] = {}  # the logarithm of each run's time at both positions
    for record in known.values():
        steps = record.run.steps
        itls = phases.itl_ns(record.run)
        decoding = [
            past for kind, past in zip(steps.kind, steps.n_past, strict=True) if kind == STEP
        ]
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
    half = half_range(logs) if len(logs) >= FEWEST else own
    how = f"{FROM_RECORDS}, {plural(len(logs), 'session')}"
    return Part(DEPTH, statistics.fmean(logs), half, how, words)


def spec_of(one: Setup) -> str | None:
    """The SPEC of a setup's model, if records name it."""
    return catalog.spec_of(one.records[0].model) if one.records else None


def of_model(sides: Mapping[str, Setup]) -> Part:
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
    names = sorted(
        (re.sub(r"[^a-z0-9]|gguf", "", one.model_words.lower()) for one in (fast, slow)), key=len
    )
    return Part(MODEL, how=f"{EQUAL} by name") if names[0] in names[1] else Part(MODEL, words=words)


def of_settings(sides: Mapping[str, Setup]) -> list[Part]:
    """The parts of the groups of settings that differ, and one for those that are known of one side only."""
    fast, slow = (one.settings for one in sides.values())
    of_group = {key: group for group, keys in GROUPS.items() for key in keys}
    changed = dict[str, dict[str, Any]]()
    unknown = dict[str, None]()
    for key in (*of_group, *(name for name in settings_table() if name not in of_group)):
        group = of_group.get(key, "other settings")
        if key in ("prompt", "seed", "lib") or fast.get(key) == slow.get(key):
            continue
        if key not in fast or key not in slow:
            unknown[group] = None
        else:
            changed.setdefault(group, {})[key] = slow[key]
    if (
        "flash attention" in changed and "cache type" in changed
    ):  # one may be impossible without the other
        changed["flash attention and cache type"] = changed.pop("flash attention") | changed.pop(
            "cache type"
        )
    found = list[Part]()
    for group, values in changed.items():
        ends = (
            f"{', '.join(f'{key} {one.settings[key]}' for key in values)} in {x}"
            for x, one in sides.items()
        )
        found.append(Part(group, words=printable("; ".join(ends)), settings=values))
    if unknown:
        found.append(Part(MORE, words=f"not given for both: {', '.join(unknown)}"))
    return found


def of_machine(
    sides: Mapping[str, Setup], spec: str | None, out: Path, with_build: bool
) -> list[Part]:
    """The parts of machine, system, build and the machine's state, as far as records say them."""
    fast, slow = sides.values()
    if not (fast.records and slow.records):
        return [_predicted(sides, spec, out)]
    made = list[Part]()
    (one, other) = (side.records[0].machine for side in (fast, slow))
    groups = {MACHINE: SAME_MACHINE, SYSTEM: ("os", "cpu_quota")}
    groups |= (
        {BUILD: ("llama_cpp_python", "llama_cpp_commit", "lib", "system_info")}
        if with_build
        else {}
    )
    for name, fields in groups.items():
        differ = [key for key in fields if getattr(one, key) != getattr(other, key)]
        words = "; ".join(
            f"{key.replace('_', ' ')}: {getattr(one, key)}, {getattr(other, key)}" for key in differ
        )
        is_predicted = differ and name == MACHINE
        made.append(
            _predicted(sides, spec, out) if is_predicted else alike(name, not differ, words[:200])
        )
    return [*made, _of_state(sides)]


def _predicted(sides: Mapping[str, Setup], spec: str | None, out: Path) -> Part:
    """The part of two machines by predictions of the same request on both (lab predict)."""
    fast = next(iter(sides.values()))
    here = machine.describe()
    names = list[str | None]()
    said = list[str]()
    for letter, one in sides.items():
        known = (
            (devices.called(one.device) or devices.recognise(one.device)) if one.device else None
        )
        is_here = one.device == "here"
        if one.records:
            first = one.records[0]
            used = probing.device_of(first.machine, probing.place_of_record(first).devices[0])
            known = devices.recognise(used.description, used.memory_bytes) if used else None
            is_here = all(
                getattr(first.machine, key) == getattr(here, key) for key in SAME_MACHINE[:3]
            )
        names.append("here" if is_here else known.name if known else None)
        cpu = one.records[0].machine.cpu if one.records else None
        said.append(f"{names[-1] or cpu or 'unknown (--device)'} in {letter}")
    words = ", ".join(said)
    if None in names or spec is None or names[0] == names[1]:
        return alike(MACHINE, None not in names and names[0] == names[1], words)
    n_prompt = max(1, (fast.n_depth or 0) + (fast.n_prompt or 0))
    n_gen = max(2, fast.n_gen or 2)
    try:
        rows = [
            prediction.request_on(name, spec, n_prompt, n_gen, out)
            for name in names
            if name is not None
        ]
    except LabError as problem:
        return Part(MACHINE, words=f"{words}: not predicted, {problem.what}")
    ranges = [row.prefill_s if fast.is_prefill else row.tpot_s for row in rows]
    if not all(0 < low <= high for low, high in ranges):  # NaN too
        return Part(MACHINE, words=f"{words}: not predicted, it does not fit or has no known peak")
    middles = [math.log(b * a) / 2 for a, b in ranges]
    halves = [math.log(b / a) / 2 for a, b in ranges]
    how = f"{PREDICTED}, {100 * prediction.WITHIN:.0f} % ranges"
    return Part(MACHINE, middles[1] - middles[0], math.hypot(*halves), how, words)


def _of_state(sides: Mapping[str, Setup]) -> Part:
    """The part of disturbed runs: the median of all runs against that of the quiet ones.

    The range is that of the median if all runs were quiet; the quiet ones are a sample, without replacement.
    """
    log = 0.0
    squares = 0.0
    said = list[str]()
    is_known = True
    on_battery = [one.records[0].machine.power == "battery" for one in sides.values()]
    for (letter, one), sign, battery in zip(sides.items(), (-1, 1), on_battery, strict=True):
        timed = [
            (figure(run.run, one.is_prefill), not disturbances.disturbances(run))
            for run in one.records
        ]
        logs = [math.log(value) for value, _ in timed if value]
        quiet = [math.log(value) for value, is_quiet in timed if value and is_quiet]
        sentences = [*disturbances.sentences(one.records), *disturbances.drift(one.records)]
        said += [
            f"{letter}: {words}"
            for words in [*sentences, *(["it ran on battery"] if battery else [])]
        ]
        if FEWEST <= len(quiet) < len(logs):
            log += sign * (statistics.median(logs) - statistics.median(quiet))
            squares += math.pi / 2 * half_range(quiet) ** 2 * (1 - len(quiet) / len(logs))
        is_known &= len(quiet) == len(logs) or len(quiet) >= FEWEST
    words = "; ".join(said)
    if not is_known or not log or on_battery[0] != on_battery[1]:
        return Part(
            STATE,
            how=EQUAL if is_known and on_battery[0] == on_battery[1] else NOT_KNOWN,
            words=words,
        )
    return Part(STATE, log, math.sqrt(squares), f"{FROM_RECORDS}, quiet runs against all", words)


def of_server(sides: Mapping[str, Setup]) -> list[Part]:
    """What a server adds to the engine, by the times that it reports; no part for two engines or two servers."""
    served = [letter for letter, one in sides.items() if one.requests]
    if len(served) != 1:
        return []
    letter = served[0]
    one = sides[served[0]]
    requests = [record.request for record in one.requests]
    reported = one.requests[0].endpoint.settings
    sign = 1 if letter == list(sides)[1] else -1
    pairs = list[tuple[float, float]]()
    for request in requests:  # seconds of a prompt, or of a token, at the client and by the server
        figures = request_times.figures(request)
        timings = request.timings
        client_ns = figures.ttft_ns if one.is_prefill else figures.tpot_ns
        own_ms = timings and (timings.prompt_ms if one.is_prefill else timings.gen_ms)
        n = 1 if one.is_prefill else ((timings.n_gen if timings else None) or 0) - 1
        if client_ns and own_ms and n > 0:
            pairs.append((client_ns / 1e9, own_ms / 1e3 / n))
    name = "HTTP, template and tokenizing" if one.is_prefill else "HTTP"
    http = Part(
        name, words=f"only {plural(len(pairs), 'request')} with times of {letter} itself (--budget)"
    )
    if len(pairs) >= FEWEST:
        logs = [math.log(client / own) for client, own in pairs]
        client_s, own_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        words = f"{seconds(client_s)} at the client, {seconds(own_s)} in {letter}"
        how = f"from {letter}'s own times"
        http = Part(
            name,
            sign * statistics.fmean(logs),
            half_range(logs),
            f"{how}, {len(logs)} requests",
            words,
        )
    is_greedy = any(each.records for each in sides.values()) and all(
        each.asked.temperature == 0 for each in requests
    )
    n_slots = reported.n_slots if reported else None
    words = f"{n_slots or 'an unknown number of'} in {letter}; one request ran at a time"
    made = [
        http,
        alike("sampling", is_greedy, "not given for both"),
        alike("slots", n_slots == 1, words),
    ]
    cached = [request.usage.cached_tokens if request.usage else None for request in requests]
    if not one.is_prefill or None in cached or not one.n_prompt:
        return [
            *made,
            alike("cache", not one.is_prefill, f"{letter} does not report cached tokens"),
        ]
    n_cached = statistics.fmean(n or 0 for n in cached)
    log = math.log1p(-min(n_cached / one.n_prompt, 0.99))
    words = f"{n_cached:,.0f} of {one.n_prompt:,} tokens"
    return [*made, Part("cache", sign * log, 0.0, ARITHMETIC, f"{words} in {letter}")]


def figure(run: Any, is_prefill: bool) -> float | None:
    """Nanoseconds per token of a run."""
    if is_prefill:
        ns = phases.prefill_ns(run)
        return ns / run.n_prompt if ns else None
    return phases.tpot_ns(run) or phases.decode_compute_mean_ns(run)


FIGURES = {DECODE: ("tpot_ms", "decode_ms"), PREFILL: ("prefill_s", "ttft_s")}
"""Columns of a figure; the second where no run has the first."""

SHORTEST = 100
MOST_GEN = 64
REPEATS = 10
MOST_BLOCKS = 30
PLANNED_BLOCKS = FEWEST + 1
MOST_CHANGES = 6
UNSURE = ", range unknown"
SURE = 0.005  # half of a range, in logarithms, at which a trial ends


def given(name: str) -> list[list[Setup]]:
    """The figures of a file, a folder, stdin or of words, by setup."""
    path = Path(name)
    is_of_lab = False
    if len(name) < 4000 and path.is_file():
        with path.open("rb") as file:
            begin = file.read(1000)
        is_of_lab = begin.lstrip()[:1] == b"{" and (
            b'"session":' in begin or b'"machine":' in begin
        )
    if is_of_lab or path.suffix == ".html" or (len(name) < 4000 and path.is_dir()):
        return of_records(name)
    found = pasted.read(name)
    most = max(
        ([one for one in found if one.is_prefill == is_prefill] for is_prefill in (False, True)),
        key=len,
    )
    return [found] if len(most) < 2 else [[one] for one in most]


def of_records(name: str) -> list[list[Setup]]:
    """The figures of a results file by setup, or by session if all are of one setup."""
    measured = without_tuning(read((name,))).measured
    rows = comparison.sessions_apart(table.measured(table.runs(measured)))
    rows = rows[rows.lever.isna()]
    if rows.empty:
        raise LabError(f"{name} has no plain run that succeeded.", "Measure some: lab measure")
    known = comparison.known_spreads(measured)
    setups = table.setups(rows)
    groups = list[list[Setup]]()
    for label, part in setups:
        groups.append([])
        for (n_prompt, n_gen), repeats in part.groupby(["n_prompt", "n_gen"]):
            own = [measured[i] for i in dict.fromkeys(repeats.run)]
            first = repeats.iloc[0]
            runs = tuple(one for one in own if isinstance(one, Record))
            requests = tuple(one for one in own if isinstance(one, RequestRecord))
            server = requests[0].endpoint.settings if requests else None
            for counts, names in FIGURES.items():
                columns = [
                    [value for value in repeats[name] if value > 0]
                    for name in names
                    if name in repeats
                ]
                values = next(filter(None, columns), [])
                if not values:
                    continue
                logs = [math.log(value) for value in values]
                compute = columns[1:] if counts == DECODE else []
                between = known.get(
                    (comparison.machine_of(repeats), names[0])
                ) or comparison.default_spread(first)
                made = Setup(
                    source="lab" if runs else "server",
                    tps=(n_prompt if counts == PREFILL else 1e3) / statistics.median(values),
                    counts=counts,
                    n_prompt=int(n_prompt),
                    n_gen=int(n_gen),
                    n_depth=0,
                    prefill_s=float(repeats.prefill_s.median())
                    if (repeats.prefill_s > 0).any()
                    else None,
                    model=(server and server.model_file) or str(first.model),
                    quantization=runs[0].model.quantization
                    if runs
                    else server.quantization
                    if server
                    else None,
                    settings=settings_of(runs[0]) if runs else {},
                    spread=math.sqrt(math.pi / 2 / len(logs)) * statistics.stdev(logs)
                    if len(logs) > 1
                    else None,
                    between=between.sd,
                    compute_tps=1e3 / statistics.median(compute[0])
                    if compute and compute[0]
                    else None,
                    records=runs,
                    requests=requests,
                    about=label.partition(", ")[2] if len(setups) > 1 else "",
                )
                groups[-1].append(made)
    return [group for group in groups if group]


def settings_of(record: Record) -> dict[str, Any]:
    """The settings of a record as keywords of AskedSettings, with resolved values."""
    settings = record.settings
    chosen = {
        name: getattr(settings, setting.record_name or name)
        for name, setting in settings_table().items()
    }
    chosen["flash_attn"] = settings.flash_attn_resolved or settings.flash_attn
    chosen["kv_unified"] = "on" if settings.kv_unified else "off"
    if UNKNOWN_THREADS in (settings.n_threads, settings.n_threads_batch):
        chosen |= {"threads": None, "threads_batch": None}
    return {
        name: value
        for name, value in chosen.items()
        if value is not None and name not in ("prompt", "seed")
    }


def nearest(first: Sequence[Setup], second: Sequence[Setup], prefill: bool) -> tuple[Setup, Setup]:
    """The two figures of one phase, decode before prefill, whose lengths are nearest; of equal ones the longest."""

    def apart(pair: tuple[Setup, Setup]) -> float:
        lengths = [(one.n_prompt or 0) + (one.n_depth or 0) + 1 for one in pair]
        is_known = all(one.n_prompt is not None for one in pair)
        return (
            round(abs(math.log(lengths[0] / lengths[1])), 3) - 1e-9 * lengths[0]
            if is_known
            else 0.0
        )

    for wanted in (True,) if prefill else (False, True):
        both = [
            (a, b)
            for a in first
            for b in second
            if a.is_prefill == b.is_prefill == wanted and a is not b
        ]
        if both:
            return min(both, key=apart)
    figures = " and ".join(
        "/".join(dict.fromkeys(one.counts for one in side)) for side in (first, second)
    )
    raise LabError(
        f"There is no figure that both sides have: {figures}.",
        "Give two figures of the same phase.",
    )


class _Spent(Exception):
    """The budget is spent, in the middle of a run."""


@contextlib.contextmanager
def limited(watch: ShowStatus, budget_s: float) -> Iterator[ShowStatus]:
    """A watch that ends the block when the budget is spent, even within a run."""
    ends = time.monotonic() + budget_s

    def look(status: Status) -> None:
        watch(status)
        if time.monotonic() > ends:
            raise _Spent

    with contextlib.suppress(_Spent):
        yield look


def start(fast: Setup, slow: Setup) -> dict[str, Any]:
    """The keywords of the path's beginning: the faster setup; what it does not say is as in the slower one."""
    chosen = {**slow.settings, **fast.settings, "lib": None}
    kept = {name: value for name, value in chosen.items() if value != defaults().get(name)}
    return {**kept, "prompt_len": length(fast if position(fast) is not None else slow)}


def alone(
    like: Setup,
    spec: str | None,
    url: str | None,
    budget_s: float,
    out: Path,
    watch: ShowStatus,
    **how: Any,
) -> Path:
    """The file of runs with a setup on this machine, or of requests as long as its runs to a server (`url`).

    LabError where none ended in the budget.
    """
    n_gen = max(2, min(like.n_gen or MOST_GEN, MOST_GEN))
    n_done = 0
    path = out
    settings = start(like, like)
    n_prompt = settings.pop("prompt_len")
    with limited(watch, budget_s) as look, contextlib.ExitStack() as stack:
        if url:
            served = stack.enter_context(
                connect(url, spec, lambda words: look(Status(words)), **how)
            )
            path = served.new_file(out)
            asked = through_server.make_plan([max(SHORTEST, n_prompt)], n_gen, REPEATS)
            through_server.check(asked, served)
            for _ in through_server.execute(asked, served, path, look):
                n_done += 1
        else:
            worker = stack.enter_context(Worker())
            plan = make_plan(worker, [n_prompt], n_gen, REPEATS, spec or "", **settings)
            path = session.new_results_file(plan, out)
            for record in session.execute(plan, worker, path, look):
                n_done += record.run.is_timed
    if not n_done:
        raise LabError(
            f"{url or spec}: nothing ended within {seconds(budget_s)}.",
            "Give more time: --budget 5min",
        )
    return path


def measured(
    start: Mapping[str, Any],
    todo: Sequence[Part],
    is_prefill: bool,
    budget_s: float,
    out: Path,
    watch: ShowStatus,
) -> tuple[dict[str, Part], Path | None]:
    """The parts that differ, measured as far as the budget lasts, by name; and the file of the trial's records."""
    began = time.monotonic()
    gen = 1 if is_prefill else GEN
    fixed_s = math.inf
    work_s = 0.0  # seconds to start an engine, and to warm up and run
    todo = sorted(
        todo[:MOST_CHANGES], key=lambda one: ("prompt_len" in one.settings, "model" in one.settings)
    )
    ends = [
        start["prompt_len"],
        *(one.settings["prompt_len"] for one in todo if "prompt_len" in one.settings),
    ]
    short = {**start, "prompt_len": min(ends)}
    with TemporaryDirectory() as folder, limited(watch, budget_s) as look:
        first = dict(list(_plans(short, todo[:1], gen)[1].items())[:1])
        starts = time.monotonic()
        runs = list(
            side_by_side.execute(first, 1, Path(folder) / "first.jsonl", look, Worker, n_turns=1)
        )
        work_s = sum(
            (each.run.steps.end_ns[-1] - each.run.steps.start_ns[0]) / 1e9 for each in runs
        )
        fixed_s = time.monotonic() - starts - work_s
    needs = list[float]()  # seconds of a block with the first change, the first two and so on
    for n, change in enumerate(todo, 1):
        longer = (
            (sum(ends) / 2 + gen) / (min(ends) + gen) if "prompt_len" in change.settings else 1.0
        )
        needs.append(2 * n * (fixed_s + work_s * longer))
    spent_s = time.monotonic() - began
    n = sum(PLANNED_BLOCKS * need <= budget_s - spent_s for need in needs)
    found = {}
    for change, need in zip(todo[n:], needs[n:], strict=True):
        why = (
            f"needs about {seconds(spent_s + PLANNED_BLOCKS * need)}"
            if math.isfinite(need)
            else "no run fits"
        )
        found[change.name] = replace(
            change, words=f"{change.words}; not measured: {why} (--budget)"
        )
    if not n:
        return found, None
    is_deep = any("prompt_len" in change.settings for change in todo[:n])
    names, plans = _plans(start if is_deep else short, todo[:n], gen)
    path = session.new_results_file(next(iter(plans.values())), out)
    blocks = [dict[str, float]()]
    measured_parts = factors(todo[:n], names, [])
    with results.unless_empty(path), limited(watch, budget_s - (time.monotonic() - began)) as look:
        for record in side_by_side.execute(plans, MOST_BLOCKS, path, look, Worker, n_turns=1):
            if record.run.is_timed and (value := figure(record.run, is_prefill)):
                blocks[-1][record.run.variant or ""] = value
            if len(blocks[-1]) == len(plans):
                measured_parts = factors(todo[:n], names, blocks)
                if len(blocks) >= PLANNED_BLOCKS and all(
                    (part.half or 0.0) < SURE for part in measured_parts.values()
                ):
                    break
                blocks.append({})
    return found | measured_parts, path if path.exists() else None


def _plans(
    start: Mapping[str, Any], todo: Sequence[Part], gen: int
) -> tuple[dict[frozenset[int], str], dict[str, Plan]]:
    """The plans of the variants on the path and on its reverse, by name, and the name of each set of changes."""
    n = len(todo)
    sets = [frozenset(range(i)) for i in range(n + 1)] + [
        frozenset(range(i, n)) for i in range(1, n)
    ]
    variants = []
    for chosen in sets:
        settings = dict(start)
        for i in sorted(chosen):
            settings |= todo[i].settings
        shown = {**settings, "prompt_len": str(settings["prompt_len"])}
        words = [word for name, value in shown.items() for word in as_options.option(name, value)]
        variants.append((shell.join(*words), shown))
    with Worker() as worker:
        plans = side_by_side.plan(worker, variants, MOST_BLOCKS, gen=gen)
    return dict(zip(sets, plans, strict=True)), plans


def factors(
    todo: Sequence[Part], names: Mapping[frozenset[int], str], blocks: Sequence[Mapping[str, float]]
) -> dict[str, Part]:
    """The parts with their factors from blocks of times per token, with 95 % ranges."""
    n = len(todo)
    n_blocks = len(blocks)
    made = dict[str, Part]()
    if n_blocks < FEWEST:
        why = f"not measured: only {plural(n_blocks, 'block')} of {FEWEST} (--budget)"
        return {one.name: replace(one, words=f"{one.words}; {why}") for one in todo}
    for i, one in enumerate(todo):
        orders = [  # changed after those before it on the path, and before them
            [
                math.log(block[names[frozenset(after)]] / block[names[frozenset(before)]])
                for block in blocks
            ]
            for before, after in ((range(i), range(i + 1)), (range(i + 1, n), range(i, n)))
        ]
        logs = [statistics.fmean(pair) for pair in zip(*orders, strict=True)]
        how = f"{MEASURED}, {n_blocks} blocks"
        made[one.name] = replace(one, log=statistics.fmean(logs), half=half_range(logs), how=how)
    return made


def why(
    a: str | Path | Setup,
    b: str | Path | Setup | None = None,
    budget: str | float = "2min",
    model: str | None = None,
    *,
    url: str | None = None,
    lib: Sequence[str] = (),
    device: str | None = None,
    prefill: bool = False,
    out: str | Path = "results",
    watch: ShowStatus = lambda status: None,
    **how: Any,
) -> Answer:
    """Why two speeds differ: their ratio as a product of causes. What the figures leave open is measured in the budget.

        lab.why("results/mine.jsonl", "pasted.txt").parts
        lab.why("results/mine.jsonl", url="http://127.0.0.1:8080/v1")

    A side is a results file, a text that another program printed, or a figure in words. Without `b`, the two setups of
    `a` are compared, or its only one with the best that this machine can do; a figure of another program is measured
    here. With `url` B is a server, reached as `how` says (api, api_key_env, header, timeout). `lib`: the libraries of A
    and of B. `device`: that of a figure without records, as lab predict names it (of two: with a comma). `budget=0`
    measures nothing. LabError for a text that no known program printed.
    """
    began = time.monotonic()
    folder = Path(out)
    budget_s = 0.0 if str(budget).strip() in ("0", "0s", "0.0") else seconds_of(budget)
    if len(lib) not in (0, 2) or (url and b is not None):
        hint = (
            "Compare two: lab why A.jsonl B.jsonl --lib OLD --lib NEW, or lab why A.jsonl --url URL"
        )
        raise LabError(
            "There are A, B and --url." if url else f"--lib is given {len(lib)} times.", hint
        )
    libs = [path for one in lib if (path := builds.folder_of(one))]
    read = [
        [[one]] if isinstance(one, Setup) else given(str(one)) for one in (a, b) if one is not None
    ]
    groups = read[0]
    device_of_b = None
    figure = ([one for one in groups[0] if one.is_prefill == prefill] or groups[0])[-1]
    if url:
        read.append(of_records(str(alone(figure, model, url, budget_s, folder, watch, **how))))
        model = None
        device_of_b = "here" if access.is_loopback(access.access(url)) else None
    elif len(read) == len(groups) == 1:
        if figure.records:
            return best(figure, str(a), str(out))
        if model is None:
            hint = "To measure it here: --model SPEC. Or give a second figure."
            raise LabError(f"The model of {figure.label} is not known.", hint)
        read.append(of_records(str(alone(figure, model, None, budget_s, folder, watch))))
    first, second = (side[0] for side in read) if len(read) == 2 else groups[:2]
    devices = iter((device or "").split(",") if device else [])
    named = [
        one if one.records else replace(one, device=next(devices, one.device or device_of_b))
        for one in nearest(first, second, prefill)
    ]
    known = [record for side in read for group in side for one in group for record in one.records]
    left_s = max(0.0, budget_s - (time.monotonic() - began))
    return answer(
        named[0], named[1], left_s, model=model, libs=libs, out=folder, watch=watch, others=known
    )


def best(one: Setup, name: str, folder: str) -> Answer:
    """Why a figure of the file `name` is slower than the best. LabError without steps or the machine's ceilings."""
    if not one.records:
        raise LabError(
            f"{one.label} has no steps to explain.",
            "Give a second figure, or measure here: lab measure",
        )
    first = one.records[0]
    phase = "prefill" if one.is_prefill else "decode"
    known = probing.need(
        ceilings_of(results.read([name]), folder), probing.place_of_record(first), one.label
    )
    rows = explanation.explain(one.records, known).query(f"n_prompt == {one.n_prompt}")
    row = next(
        (row for row in rows.itertuples() if row.phase == phase and row.n_gen == one.n_gen), None
    )
    if row is None:
        raise LabError(
            f"{one.label} has no steps of {phase} to explain.", "Measure here: lab measure"
        )
    between_s = 0.0 if one.is_prefill else row.choosing_s + row.harness_s
    words = "choosing each token, and from one step to the next" if between_s else ""
    found = [Part(COUNTED, math.log1p(between_s / row.measured_s), 0.0, ARITHMETIC, words)]
    words = f"its kernels take longer than at their ceilings; the limit is {row.limit}"
    how = f"from ceilings: {NO_RANGE}"
    found.append(Part("kernels", math.log(row.measured_s / row.least_s), None, how, words))
    best_s = row.least_s
    command = shell.lab("explain", name)
    for lever in advice.changes(rows, first, known):
        gain = lever.figures[f"{phase}_gain"] or 0.0
        changed_s = (
            row.least_s - row.measured_s * (1 - 1 / gain) if gain >= advice.LEAST_GAIN else best_s
        )
        if 0 < changed_s < best_s:
            best_s = changed_s
            command = lever.command or command
            words = f"{lever.figures['change']}: {times(gain)} in all"
    if best_s < row.least_s:
        how = f"predicted from ceilings: {NO_RANGE}"
        found.append(Part("settings", math.log(row.least_s / best_s), None, how, words))
    tps = (row.n_prompt if one.is_prefill else 1) / best_s
    best = replace(one, source="the best that this machine can do", tps=tps, records=(), about="")
    if tps < one.tps:
        raise LabError(
            f"{one.label} is faster than its ceilings.", "Measure them again: lab ceilings --again"
        )
    rest = left_over(best, one, found)
    return Answer(best, one, ("best", "A"), (*found, rest), command=command)


def answer(
    a: Setup,
    b: Setup,
    budget_s: float = 0.0,
    *,
    model: str | None = None,
    libs: Sequence[str] = (),
    out: Path = Path("results"),
    watch: ShowStatus = lambda status: None,
    others: Sequence[Record] = (),
) -> Answer:
    """The ratio of two figures in parts. With a budget, depth, settings and builds (`libs` of A and B) are measured."""
    both = {"A": a, "B": b} if a.tps >= b.tps else {"B": b, "A": a}
    (fast, slow) = both.values()
    libs = libs if a.tps >= b.tps else libs[::-1]
    steps = [counted(both), depth(both, others), of_model(both), *of_settings(both)]
    if libs:
        ends = (f"{builds.short(lib)} in {letter}" for lib, letter in zip(libs, both, strict=True))
        steps.append(Part(BUILD, words=", ".join(ends), settings={"lib": libs[1]}))
    found = dict[str, Part]()
    path = None
    spec = model or spec_of(fast) or spec_of(slow)
    todo = [part for part in steps if part.settings]
    if todo and budget_s > 0:
        try:
            if spec is None:
                raise LabError("no model is named (--model SPEC)")
            first = {**start(fast, slow), **({"lib": libs[0]} if libs else {}), "model": spec}
            found, path = measured(first, todo, fast.is_prefill, budget_s, out, watch)
        except LabError as problem:
            found = {
                part.name: replace(part, words=f"{part.words}; not measured: {problem.what}")
                for part in todo
            }
    made = [found.get(part.name, part) for part in steps]
    made += [*of_server(both), *of_machine(both, spec, out, not libs)]
    made.append(left_over(fast, slow, made))
    return Answer(fast, slow, tuple(both), tuple(made), path)


def conclusion(found: Answer) -> tuple[str, str]:
    """The sentence that a person would say, and the command that closes most of the gap ("" if none does)."""
    rest = found.rest
    slow = found.slow
    (other, letter) = found.letters
    is_open = abs(rest.log) > max(
        rest.half or 0.0, math.log1p(LEAST if rest.range else LEAST_ALONE)
    )
    if not found.causes and not is_open:
        if not rest.range:
            return (
                f"No cause of over {LEAST_ALONE:.0%}; the figures do not say how much they vary.",
                "",
            )
        return (
            f"{letter} is not slower than {other} for certain: two sessions of one machine differ as much.",
            "",
        )
    if not found.causes or (is_open and rest.log > found.causes[0].log):
        unknown = [part.name for part in found.parts if part.how == NOT_KNOWN]
        words = f"Most of it is not explained: {times(math.exp(abs(rest.log)))}{'' if rest.range else UNSURE}."
        if len(unknown) == 1:
            words += f" The only difference without a known factor is {unknown[0]}."
        elif unknown:
            words += f" It may come from what is unknown: {', '.join(unknown)}."
        if any("(--budget)" in part.words for part in found.parts):
            return words, shell.lab("why", "A.jsonl", "B.jsonl", "--budget", "10min")
        if unknown == [BUILD]:
            return words, shell.lab("why", "A.jsonl", "B.jsonl", "--lib", "OLD", "--lib", "NEW")
        return words, "" if {COUNTED, MODEL} & set(unknown) else shell.lab("doctor")
    cause, *others = found.causes
    more = "".join(
        f"{', ' if i else '; '}{one.name} adds {times(one.factor)}" for i, one in enumerate(others)
    )
    unsure = "" if cause.range else UNSURE
    words = f"The main cause is {cause.name} ({times(cause.factor)}{unsure}): {cause.words}{more}."
    if cause.name == COUNTED:
        own = f"{digits(slow.tps * cause.factor)} tokens/s{unsure}"
        words = f"Most of it is how {letter} counts: {cause.words.partition('; ')[0]}. Its decode alone is {own}{more}."
        lengths = ["-p", slow.n_prompt, "-n", slow.n_gen] if slow.n_prompt and slow.n_gen else []
        return words, shell.lab("measure", *lengths)
    if cause.name == DEPTH:
        return words, shell.lab("sweep", "--max-len", max(512, round(position(slow) or 0)))
    if slow.requests:
        return words, shell.lab("measure", "--url", slow.requests[0].endpoint.url, "--dry-run")
    if found.command or cause.name in (STATE, MACHINE, BUILD):
        return words, found.command or (shell.lab("doctor") if cause.name == STATE else "")
    if not (found.fast.records and slow.records):
        return words, ""
    first = slow.records[0]
    best = found.fast.records[0]  # measure the slower setup with one group of settings changed
    keys = [key for group, names in GROUPS.items() if group in cause.name for key in names]
    values = {
        name: getattr(best.settings, name)
        for name in (settings_table()[key].record_name or key for key in keys)
    }
    model = best.model if cause.name in (QUANTIZATION, MODEL) else first.model
    changed = replace(first, model=model, settings=replace(first.settings, lib=None, **values))
    return words, shell.lab(
        "measure", *(word for option in as_options.options(changed) for word in option)
    )
