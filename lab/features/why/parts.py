"""The ratio of two rates as a product of named factors, and what is left.

All is done in logarithms, in which factors add up. What is counted is arithmetic on the figures. Depth and settings
come from a trial on this machine: variants on a path from the faster setup to the slower one, each changing one group
more, and on the reverse path; a factor is the mean of both, so the order does not decide it. The rest is never spread
over the others. A range is 95 %, or of two blocks that of the blocks; ranges are combined in quadrature. A factor
without a known range has none, and then neither has the rest.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.core import phases, shell, stats
from lab.core.asked_settings import defaults, table
from lab.core.lists import plural
from lab.core.record import DECODE, UNKNOWN_THREADS, Record
from lab.errors import LabError, printable
from lab.features.compare import side_by_side
from lab.features.why import pasted
from lab.features.why.pasted import Setup
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import as_options
from lab.runner.cases import Plan
from lab.runner.progress import ShowStatus
from lab.runner.session import new_results_file
from lab.show import disturbances
from lab.show.wording import digits, seconds, times

ARITHMETIC, MEASURED, FROM_RECORDS, EQUAL, NOT_KNOWN, REST = (
    "arithmetic",
    "measured here",
    "from the records",
    "equal",
    "unknown",
    "the rest",
)
COUNTED, DEPTH, MACHINE, STATE, BUILD, MODEL, UNEXPLAINED = (
    "what is counted",
    "depth",
    "machine",
    "machine state",
    "build",
    "model",
    "not explained",
)
GROUPS = {
    "threads": ("threads", "threads_batch"),
    "ubatch": ("batch", "ubatch"),
    "flash attention": ("flash_attn",),
    "cache type": ("cache_type_k", "cache_type_v"),
}
"""Settings that change together; any others are one group. The cheapest come first."""

LEAST, LEAST_ALONE = 0.02, 0.1
"""Causes are named from the first share if their range excludes 1, and from the second if their range is unknown."""

GEN, MOST_BLOCKS, FEWEST_BLOCKS, MOST_GROUPS, N_DRAWN = 24, 30, 3, 6, 400
NO_RANGE, OF_2 = "range unknown", "range of 2 blocks"


@dataclass(frozen=True)
class Part:
    """A factor of the ratio: its logarithm, half of its range (None: unknown), how both are known, and in words why."""

    name: str
    log: float
    half: float | None
    how: str
    words: str = ""

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    @property
    def range(self) -> tuple[float, float] | None:
        return None if self.half is None else (math.exp(self.log - self.half), math.exp(self.log + self.half))

    @property
    def is_cause(self) -> bool:
        """Whether it changes the ratio for certain, by at least LEAST."""
        if self.how in (NOT_KNOWN, REST, EQUAL) or self.half is None:
            return self.half is None and self.how != REST and abs(self.log) > math.log1p(LEAST_ALONE)
        return abs(self.log) - self.half > math.log1p(LEAST) / 2 < abs(self.log)


@dataclass(frozen=True)
class Answer:
    """Why `slow` is slower than `fast`: the parts, the last of them what is not explained. Letters name the two."""

    fast: Setup
    slow: Setup
    letters: tuple[str, str]  # of fast and slow
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()  # of the trial
    path: Path | None = None
    command: str = ""  # that tries the largest change, where it is known already

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


def answer(
    a: Setup,
    b: Setup,
    budget_s: float = 0.0,
    *,
    model: str | None = None,
    out: Path = Path("results"),
    watch: ShowStatus = lambda status: None,
    new_worker: Callable[[], Any] = Worker,
    others: Sequence[Record] = (),
) -> Answer:
    """The ratio of two figures in parts. With a budget, depth and settings are measured here, in blocks."""
    if a.is_prefill != b.is_prefill:
        raise LabError("One figure is of prefill and the other of decode.", "Give two figures of the same phase.")
    (fast, slow), letters = ((a, b), ("A", "B")) if a.tps >= b.tps else ((b, a), ("B", "A"))
    counted, notes = _counted(fast, slow, letters)
    known, path = _changes(fast, slow, letters, others)
    todo = [change for change in path if change.part is None]
    records, file, found = list[Record](), None, dict[str, Part]()
    if todo and budget_s > 0:
        spec = model or spec_of(fast) or spec_of(slow)
        if spec is None:
            notes.append("Name a model to measure depth and settings with: --model SPEC")
        else:
            try:
                start = _start(fast, slow, spec)
                records, file, found = measured(start, todo, fast.is_prefill, budget_s, out, watch, new_worker)
            except LabError as problem:
                notes.append(f"Nothing was measured: {problem.what}")
    parts = [counted] if counted else []
    for change in path:
        part = change.part or found.get(change.name)
        parts.append(part or Part(change.name, 0.0, 0.0, NOT_KNOWN, change.words))
    parts += known
    parts.append(rest(fast, slow, parts))
    return Answer(fast, slow, letters, tuple(parts), tuple(notes), tuple(records), file)


def rest(fast: Setup, slow: Setup, parts: Sequence[Part]) -> Part:
    """What the parts leave of the ratio. Its range has that of the parts, of both figures, and between sessions."""
    sessions = [{record.session for record in one.records} for one in (fast, slow)]
    log = math.log(fast.tps / slow.tps) - sum(part.log for part in parts)
    lacking = [part.name for part in parts if part.half is None]
    squares = [part.half**2 for part in parts if part.half is not None]
    for one in (fast, slow):
        between = 0.0 if sessions[0] & sessions[1] else one.between
        if one.spread is None or between is None:
            lacking.append(f"the figure of {one.source}")
        else:
            squares.append(1.96**2 * (one.spread**2 + between**2))
    if lacking:
        return Part(UNEXPLAINED, log, None, REST, f"{NO_RANGE}, like that of {', '.join(dict.fromkeys(lacking))}")
    assumed = (
        {one.between_source for one in (fast, slow) if one.between_source} if not sessions[0] & sessions[1] else ()
    )
    words = [f"spread between sessions {source}" for source in sorted(assumed)]
    words += (
        ["its range contains one of 2 blocks, so it is not 95 %"] if any(OF_2 in part.how for part in parts) else []
    )
    return Part(UNEXPLAINED, log, math.sqrt(sum(squares)), REST, "; ".join(words))


def _counted(fast: Setup, slow: Setup, letters: tuple[str, str]) -> tuple[Part | None, list[str]]:
    """The part of what the two rates count, and notes."""
    logs, is_borrowed, words, notes = [], False, [], list[str]()
    for one, other, letter in ((fast, slow, letters[0]), (slow, fast, letters[1])):
        log, borrows, why = _to_steps(one, other)
        logs.append(log)
        is_borrowed |= borrows
        words += [f"{letter} {why}"] if why else []
        if one.counts in (pasted.UNKNOWN, pasted.WINDOW, pasted.MIXED):
            notes.append(f"{letter}: {_unknown(one)}")
    if not words:
        is_known = not notes
        return (Part(COUNTED, 0.0, 0.0, EQUAL if is_known else NOT_KNOWN, "" if is_known else "see below"), notes)
    how = f"{ARITHMETIC}, with the other's prefill rate: {NO_RANGE}" if is_borrowed else ARITHMETIC
    return Part(COUNTED, logs[1] - logs[0], None if is_borrowed else 0.0, how, "; ".join(words)), notes


def _unknown(one: Setup) -> str:
    if one.counts == pasted.UNKNOWN:
        return "the text does not say what the rate counts. Look up tokens, context and whether prefill is included."
    if one.counts == pasted.WINDOW:
        return "an average over a logging window is not the decode rate of a request."
    return "the rate mixes prompt and generated tokens, or several lengths."


def _to_steps(one: Setup, other: Setup) -> tuple[float, bool, str]:
    """The logarithm of (steps per second of decode / the given rate), whether it needs the other's, and why."""
    if one.counts == pasted.WHOLE and one.n_gen:
        prefill_s, total, is_borrowed = one.prefill_s, one.total_s, False
        decode_s = one.decode_s
        if decode_s is None and total:
            if prefill_s is None and one.n_prompt and other.n_prompt and other.prefill_s:
                prefill_s, is_borrowed = one.n_prompt * other.prefill_s / other.n_prompt, True
            if prefill_s is None or prefill_s >= total:
                return 0.0, False, ""
            decode_s = total - prefill_s
        if decode_s:
            total = total or decode_s + (prefill_s or 0.0)
            pure = max(1, one.n_gen - 1) / decode_s
            why = f"divides by prefill too: {seconds(total - decode_s)} of {seconds(total)}"
            return math.log(pure / one.tps), is_borrowed, f"{why} (decode {digits(pure)} tokens/s)"
    if one.counts == pasted.DECODE and one.n_steps and one.decode_s:
        log = math.log(one.n_steps / one.decode_s / one.tps)
        if abs(log) > 0.001:
            return log, False, "counts the first token, but not its time"
    if one.compute_tps and other.compute_tps and other.tps == other.compute_tps and one.compute_tps > 1.001 * one.tps:
        return math.log(one.compute_tps / one.tps), False, "includes choosing each token"
    return 0.0, False, ""


@dataclass(frozen=True)
class Change:
    """A step of the path from fast to slow: keywords that change, or a part that is known already."""

    name: str
    settings: Mapping[str, Any]
    words: str
    part: Part | None = None


def position(one: Setup) -> float | None:
    """The mean position of the tokens that a figure is of; for prefill its length."""
    if one.is_prefill:
        return None if one.n_depth else one.n_prompt
    if one.n_prompt is None and one.n_depth is None:
        return None
    return (one.n_depth or 0) + (one.n_prompt or 0) + (one.n_gen or 0) / 2


def _changes(
    fast: Setup, slow: Setup, letters: tuple[str, str], others: Sequence[Record]
) -> tuple[list[Part], list[Change]]:
    """What is known of machine, build, state and model; and the path of depth and settings from fast to slow."""
    known, path = _of_settings(fast, slow)
    kinds = [(one.model, one.quantization) for one in (fast, slow)]
    specs = [spec_of(one) for one in (fast, slow)]
    if None not in specs:
        names = [one.records[0].model.name for one in (fast, slow)]
        if specs[0] == specs[1]:
            known.append(Part(MODEL, 0.0, 0.0, EQUAL))
        else:
            name = "quantization" if names[0] == names[1] else MODEL
            path.append(Change(name, {"model": specs[1]}, f"{specs[0]} against {specs[1]}"))
    elif None not in (kinds[0][0], kinds[1][0]) and kinds[0] != kinds[1]:
        shown = [" ".join(filter(None, kind)) for kind in kinds]
        known.append(Part(MODEL, 0.0, 0.0, NOT_KNOWN, printable(f"{shown[0]} against {shown[1]}")))
    else:
        known.append(Part(MODEL, 0.0, 0.0, NOT_KNOWN, "not given for both"))
    return [*known, *_of_machine(fast, slow, letters)], [_depth(fast, slow, letters, others), *path]


def _depth(fast: Setup, slow: Setup, letters: tuple[str, str], others: Sequence[Record]) -> Change:
    """The change of depth, or of the prompt's length; a known part if there is none, or records have its law."""
    name = "length" if fast.is_prefill else DEPTH
    ends = position(fast), position(slow)
    if ends[0] is None or ends[1] is None:
        lacking = " and ".join(letter for letter, end in zip(letters, ends, strict=True) if end is None)
        words = f"unknown of {lacking}: the length of the context"
        return Change(name, {}, words, Part(name, 0.0, 0.0, NOT_KNOWN, words))
    at = ends[0], ends[1]
    if abs(at[0] - at[1]) <= max(4, 0.02 * max(at)):
        return Change(name, {}, "", Part(name, 0.0, 0.0, EQUAL))
    if fast.is_prefill:
        words = f"{letters[0]} has {at[0]:,.0f} tokens, {letters[1]} {at[1]:,.0f}"
        return Change(name, {"prompt_len": _length(slow)}, words)
    words = f"{letters[0]} at position {at[0]:,.0f}, {letters[1]} at {at[1]:,.0f} (mean)"
    return Change(name, {"prompt_len": _length(slow)}, words, _law(fast, slow, at, others, words))


def _of_settings(fast: Setup, slow: Setup) -> tuple[list[Part], list[Change]]:
    """The groups of settings that differ, and a part for those that are known of one side only."""
    of_group = {key: group for group, keys in GROUPS.items() for key in keys}
    changed: dict[str, dict[str, Any]] = {}
    unknown = dict[str, None]()
    for key in (*of_group, *(name for name in table() if name not in of_group)):
        is_known = key in fast.settings, key in slow.settings
        if key in ("prompt", "seed", "lib", "rpc") or not any(is_known):
            continue
        group = of_group.get(key, "other settings")
        if not all(is_known):
            unknown[group] = None
        elif fast.settings[key] != slow.settings[key]:
            changed.setdefault(group, {})[key] = slow.settings[key]
    if "flash attention" in changed and "cache type" in changed:  # one may be impossible without the other
        changed["flash attention and cache type"] = changed.pop("flash attention") | changed.pop("cache type")
    path = []
    for group, values in changed.items():
        ends = (", ".join(f"{key} {one.settings[key]}" for key in values) for one in (fast, slow))
        path.append(Change(group, values, printable(" against ".join(ends))))
    words = f"not given for both: {', '.join(unknown)}"
    return [Part("more settings", 0.0, 0.0, NOT_KNOWN, words)] if unknown else [], path


def _of_machine(fast: Setup, slow: Setup, letters: tuple[str, str]) -> list[Part]:
    """The parts of machine, build and the machine's state, as far as records say them."""
    if not (fast.records and slow.records):
        return [Part(MACHINE, 0.0, 0.0, NOT_KNOWN, "not given for both")]
    made, machines = list[Part](), [one.records[0].machine for one in (fast, slow)]
    for name, fields in (
        (MACHINE, ("cpu", "n_cores_usable", "ram_bytes", "devices", "power")),
        (BUILD, ("llama_cpp_python", "llama_cpp_commit", "lib")),
    ):
        differ = [key for key in fields if getattr(machines[0], key) != getattr(machines[1], key)]
        words = "; ".join(
            f"{key.replace('_', ' ')}: {getattr(machines[0], key)} against {getattr(machines[1], key)}"
            for key in differ
        )
        made.append(Part(name, 0.0, 0.0, NOT_KNOWN if differ else EQUAL, words[:200]))
    return [*made, _of_state(fast, slow, letters)]


def _of_state(fast: Setup, slow: Setup, letters: tuple[str, str]) -> Part:
    """The part of disturbed runs: medians of all runs over those of quiet ones, with a bootstrapped range."""
    said, is_certain, chance = list[str](), True, random.Random(0)
    drawn = [0.0] * (N_DRAWN + 1)  # the first is of the runs themselves
    for one, letter, sign in ((fast, letters[0], -1), (slow, letters[1], 1)):
        timed = [(_figure(run.run, one.is_prefill), not disturbances.disturbances(run)) for run in one.records]
        logs = [(math.log(value), is_quiet) for value, is_quiet in timed if value]
        n_quiet = sum(is_quiet for _, is_quiet in logs)
        if n_quiet == len(logs):
            continue
        said.append(f"{len(logs) - n_quiet} of {len(logs)} runs of {letter} were disturbed")
        is_certain &= n_quiet >= FEWEST_BLOCKS
        for i in range(N_DRAWN + 1) if n_quiet else ():
            own = chance.choices(logs, k=len(logs)) if i else logs
            quiet = [value for value, is_quiet in own if is_quiet]
            drawn[i] += sign * (statistics.median(value for value, _ in own) - statistics.median(quiet)) if quiet else 0
    if not said or not any(drawn):
        return Part(STATE, 0.0, 0.0, NOT_KNOWN if said else EQUAL, "; ".join(said))
    half = 1.96 * statistics.pstdev(drawn[1:], drawn[0]) if is_certain else None
    how = f"{FROM_RECORDS}, {NO_RANGE if half is None else '95 % by bootstrap'}"
    return Part(STATE, drawn[0], half, how, "; ".join(said))


def _figure(run: Any, is_prefill: bool) -> float | None:
    """Nanoseconds per token of a run."""
    if is_prefill:
        ns = phases.prefill_ns(run)
        return ns / run.n_prompt if ns else None
    return phases.tpot_ns(run) or phases.decode_compute_mean_ns(run)


def _law(fast: Setup, slow: Setup, at: Sequence[float], others: Sequence[Record], words: str) -> Part | None:
    """Depth from steps of one setup and session that has both positions; None without such a session."""
    logs, halves = list[float](), list[float | None]()
    for sessions in (fast.records, slow.records, others):
        by_session: dict[Any, tuple[list[float], list[float]]] = {}  # a run's median at both positions
        for record in sessions:
            steps, itls = record.run.steps, phases.itl_ns(record.run)
            setup = record.session, record.settings, record.model.name, record.model.quantization
            decoding = [past for kind, past in zip(steps.kind, steps.n_past, strict=True) if kind == DECODE]
            timed = list(zip(decoding[-len(itls) :], itls, strict=False))
            for place, own in zip(at, by_session.setdefault(setup, ([], [])), strict=True):
                near = [itl for past, itl in timed if abs(past - place) <= max(16, 0.05 * place)]
                own += [math.log(statistics.median(near))] if len(near) >= 3 else []
        for ends in by_session.values():
            if all(ends):
                logs.append(statistics.fmean(ends[1]) - statistics.fmean(ends[0]))
                is_certain = min(map(len, ends)) >= FEWEST_BLOCKS
                half = math.hypot(*(stats.mean_half_width(own, stats.CONFIDENCE) for own in ends))
                halves.append(half if is_certain else None)
        if logs:
            known = [half for half in halves if half is not None]
            half_of_all = math.hypot(*known) / len(known) if len(known) == len(logs) else None
            if len(logs) >= FEWEST_BLOCKS:
                half_of_all = stats.mean_half_width(logs, stats.CONFIDENCE)
            of_all = NO_RANGE if half_of_all is None else f"95 % of {plural(len(logs), 'session')}"
            how = f"{FROM_RECORDS}, {of_all}"
            return Part(DEPTH, statistics.fmean(logs), half_of_all, how, words)
    return None


def spec_of(one: Setup) -> str | None:
    """The SPEC of a setup's model, if records name it."""
    return catalog.spec_of(one.records[0].model) if one.records else None


def _length(one: Setup) -> int:
    """The prompt length with which GEN tokens are at a setup's mean position."""
    place = position(one)
    if place is None:
        return 128
    return max(1, round(place) if one.is_prefill else round(place - GEN / 2))


def _start(fast: Setup, slow: Setup, spec: str) -> dict[str, Any]:
    """The keywords of the path's beginning: the faster setup; what it does not say is as in the slower one."""
    of_fast = {**slow.settings, **fast.settings}
    settings = {
        name: value for name, value in of_fast.items() if value != defaults().get(name) and name not in ("lib", "rpc")
    }
    one = fast if position(fast) is not None else slow
    return {**settings, "model": spec, "prompt_len": _length(one)}


def measured(
    start: Mapping[str, Any],
    todo: Sequence[Change],
    is_prefill: bool,
    budget_s: float,
    out: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Any] = Worker,
) -> tuple[list[Record], Path | None, dict[str, Part]]:
    """Measure the variants on the path and on its reverse, block by block, as far as the budget goes.

    One run of the cheapest variant tells what a block will take. The path has as many changes, the cheapest first, as
    three blocks fit, or else one. Each block runs every variant once, in random order and with fresh engines.
    """
    began, gen = time.monotonic(), 1 if is_prefill else GEN
    todo = sorted(todo[:MOST_GROUPS], key=lambda change: ("prompt_len" in change.settings, "model" in change.settings))
    ends = [start["prompt_len"], *(one.settings["prompt_len"] for one in todo if "prompt_len" in one.settings)]
    short = {**start, "prompt_len": min(ends)}
    first = dict(list(_plans(short, todo[:1], gen, new_worker)[1].items())[:1])
    with TemporaryDirectory() as folder:
        list(side_by_side.execute(first, 1, Path(folder) / "first.jsonl", watch, new_worker, n_turns=1))
    run_s = time.monotonic() - began
    needs = list[float]()  # seconds of a block with the first change, the first two and so on
    for n in range(1, len(todo) + 1):
        n_variants, is_long = max(2, 2 * n), "prompt_len" in todo[n - 1].settings
        factor = sum(end + gen for end in ends) / 2 / (min(ends) + gen) if is_long else 1.0
        needs.append(run_s * n_variants * factor)
    left_s = budget_s - run_s
    fitting = [sum(n_blocks * need <= left_s for need in needs) for n_blocks in (FEWEST_BLOCKS, 1)]
    n = fitting[0] or fitting[1]
    found = {}
    for change, need in zip(todo[n:], needs[n:], strict=True):
        why = f"not measured: needs about {seconds(run_s + FEWEST_BLOCKS * need)} (--budget)"
        found[change.name] = Part(change.name, 0.0, 0.0, NOT_KNOWN, f"{change.words}; {why}")
    if not n:
        return [], None, found
    is_deep = any("prompt_len" in change.settings for change in todo[:n])
    names, plans = _plans(start if is_deep else short, todo[:n], gen, new_worker)
    path, records, by_block = (
        new_results_file(next(iter(plans.values())), out),
        list[Record](),
        list[dict[str, float]](),
    )
    turned = time.monotonic()
    runs = side_by_side.execute(plans, MOST_BLOCKS, path, watch, new_worker, n_turns=1)
    for record in runs:
        records.append(record)
        value = _figure(record.run, is_prefill) if record.run.is_timed else None
        if value and record.run.variant is not None:
            if not by_block or len(by_block[-1]) == len(plans):
                by_block.append({})
            by_block[-1][record.run.variant] = value
        now, is_whole = time.monotonic(), bool(by_block) and len(by_block[-1]) == len(plans)
        next_s = (now - turned) / len(by_block) if is_whole else -0.2 * budget_s - needs[n - 1]
        if now - began + next_s > budget_s:
            runs.close()  # type: ignore[attr-defined]
            break
    return records, path, found | _factors(todo[:n], names, [own for own in by_block if len(own) == len(plans)])


def _plans(
    start: Mapping[str, Any], todo: Sequence[Change], gen: int, new_worker: Callable[[], Any]
) -> tuple[dict[frozenset[int], str], dict[str, Plan]]:
    """The plans of the variants on the path and on its reverse, by name, and the name of each set of changes."""
    n = len(todo)
    sets = [frozenset(range(i)) for i in range(n + 1)] + [frozenset(range(i, n)) for i in range(1, n)]
    variants = []
    for chosen in sets:
        settings = dict(start)
        for i in sorted(chosen):
            settings |= todo[i].settings
        shown = {**settings, "prompt_len": str(settings["prompt_len"])}
        words = [word for name, value in shown.items() for word in as_options.option(name, value)]
        variants.append((shell.join(*words), shown))
    with new_worker() as worker:
        plans = side_by_side.plan(worker, variants, MOST_BLOCKS, gen=gen)
    return dict(zip(sets, plans, strict=True)), plans


def _factors(
    todo: Sequence[Change], names: Mapping[frozenset[int], str], blocks: Sequence[Mapping[str, float]]
) -> dict[str, Part]:
    """The factor of each change from blocks of times per token, with its range."""
    n, made = len(todo), dict[str, Part]()
    for i, change in enumerate(todo):
        forward = frozenset(range(i)), frozenset(range(i + 1))
        backward = frozenset(range(i + 1, n)), frozenset(range(i, n))
        each = [
            [math.log(own[names[after]] / own[names[before]]) for before, after in (forward, backward)]
            for own in blocks
        ]
        if not each:
            continue
        logs = [statistics.fmean(pair) for pair in each]
        first, last = (statistics.fmean(pair[i] for pair in each) for i in (0, 1))
        words = change.words
        if abs(first - last) > 0.05:
            words += f"; changed first {times(math.exp(first))}, changed last {times(math.exp(last))}"
        half = stats.mean_half_width(logs, stats.CONFIDENCE) if len(logs) >= FEWEST_BLOCKS else None
        how = f"1 block: {NO_RANGE}" if half is None else f"95 % of {len(logs)} blocks"
        if len(logs) == 2:
            half, how = (max(logs) - min(logs)) / 2, OF_2
        made[change.name] = Part(change.name, statistics.fmean(logs), half, f"{MEASURED}, {how}", words)
    return made


def of_settings(record: Record) -> dict[str, Any]:
    """The settings of a record as keywords of AskedSettings, with resolved values."""
    settings = record.settings
    chosen = {name: getattr(settings, setting.record_name or name) for name, setting in table().items()}
    if settings.flash_attn_resolved:
        chosen["flash_attn"] = settings.flash_attn_resolved
    chosen["kv_unified"] = "on" if settings.kv_unified else "off"
    if UNKNOWN_THREADS in (settings.n_threads, settings.n_threads_batch):
        chosen |= {"threads": None, "threads_batch": None}
    return {name: value for name, value in chosen.items() if value is not None and name not in ("prompt", "seed")}
