"""What is cached need not be read: the first token of a prompt whose beginning is known already.

Keys and values of a token depend only on the tokens before it. So prompts that begin alike (instructions, a document, a
conversation so far) have the same cache there, and whoever has it prefills only the rest. One run does that in four
ways, with the same prompt of a prefix and a suffix:

    cold      prefill the prefix, then the suffix
    cached    copy the prefix's cache to another sequence, then prefill the suffix there
    RAM       load a state that was saved in memory, then the suffix
    disk      load a state that was saved in a file, and is out of the system's file cache, then the suffix

Every way ends with the same step or steps, of the suffix alone. So the logits must be equal, bit by bit: else something
else was restored than what was computed. Saving is timed, but part of no way.

Loading takes time in proportion to bytes, prefilling to arithmetic: where they meet is the length from which moving a
cache pays (py).

From which length restoring a cache beats prefilling it: where two curves over length cross.

Between two measured lengths a crossing is on the straight line between them. Outside, the curves are continued: towards
shorter prefixes, prefilling in proportion to length (a short one costs rather more a token), restoring as a fixed cost
and so much a token, both fitted; towards longer ones both as they grew last (prefilling grows rather faster). So both
continuations err on one side: the true length is rather shorter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.analysis.wording import seconds
from lab.core import lever_figures, phases, prefix_times, script, stats
from lab.core.levers import Prefix
from lab.core.lists import grouped, plural
from lab.core.record import COPY, FORGET, LOAD, SAVE, Record, Settings
from lab.core.script import Operation
from lab.experiments import cases
from lab.models import catalog
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner.plan import make_plan, with_cases
from lab.runner.planned import Case, Plan, Text
from lab.runner.progress import ShowStatus
from lab.runner.session import carry_out
from lab.why.step_prediction import StepPrediction

NETWORKS_GBIT = (1, 10, 100)
"""Lines over which a cache could be moved, in 10^9 bits per second."""

FARTHEST = 10
"""How many times the longest measured length is still guessed at."""


@dataclass(frozen=True)
class BreakEven:
    """From `n_tokens` on restoring from `name` wins: 1 is always, None is at no length that is known of.

    `is_measured`: it lies between two measured lengths, of which `n_longest` is the last. `wins_at` are the measured
    lengths at which restoring was faster. It takes `fixed_s`, and `per_token_s` for each token of the prefix.
    """

    name: str
    n_tokens: float | None
    is_measured: bool
    n_longest: int
    wins_at: tuple[int, ...]
    fixed_s: float
    per_token_s: float

    @property
    def source(self) -> str:
        return f"{'over' if 'bit' in self.name else 'from'} {self.name}"


def find(name: str, lengths: Sequence[int], prefill_s: Sequence[float], restore_s: Sequence[float]) -> BreakEven:
    """The crossing of two measured curves over ascending lengths. ValueError for none."""
    fixed, per_token = _line(lengths, restore_s)
    gaps = [prefill - restore for prefill, restore in zip(prefill_s, restore_s, strict=True)]

    wins_at = tuple(n for n, gap in zip(lengths, gaps, strict=True) if gap > 0)

    def crossed(n_tokens: float | None, is_measured: bool) -> BreakEven:
        return BreakEven(name, n_tokens, is_measured, lengths[-1], wins_at, fixed, per_token)

    if gaps[-1] <= 0:
        return crossed(None if wins_at else _beyond(lengths, prefill_s, gaps[-1], per_token), False)
    points = list(zip(lengths, gaps, strict=True))
    for (n, gap), (n_next, gap_next) in reversed(list(itertools.pairwise(points))):
        if gap <= 0 < gap_next:
            return crossed(n - gap * (n_next - n) / (gap_next - gap), True)
    gain = prefill_s[0] / lengths[0] - per_token
    return crossed(min(lengths[0], max(1.0, fixed / gain)), False) if gain > 0 else crossed(lengths[0], True)


def over_networks(load_s: Sequence[float], n_bytes: Sequence[int | None]) -> dict[str, list[float]]:
    """What restoring takes over each network: the bytes on the line, then the load from memory. Empty without bytes.

    What the line's delay adds is not counted, nor what sending and loading at once would save.
    """
    known = [n for n in n_bytes if n]
    if len(known) < len(load_s):
        return {}
    return {
        f"{gbit} Gbit/s": [load + 8 * n / (gbit * 1e9) for load, n in zip(load_s, known, strict=True)]
        for gbit in NETWORKS_GBIT
    }


def sentence(known: Sequence[BreakEven]) -> str:
    """All of them in one sentence."""
    by_words = grouped(known, words)
    parts = [f"{words} ({', '.join(one.source for one in alike)})" for words, alike in by_words.items()]
    return f"Restoring a prefix beats prefilling it {'; '.join(parts)}."


def words(one: BreakEven) -> str:
    if one.n_tokens is None:
        lengths, longest = ", ".join(f"{n:,}" for n in one.wins_at), f"{one.n_longest:,} tokens"
        return f"only at {lengths}, not at {longest}" if lengths else f"never up to {longest}"
    if one.n_tokens <= 1:
        return "at every measured length"
    about = f"from about {one.n_tokens:,.0f} tokens on"
    return about if one.is_measured else f"{about}, which is beyond what was measured"


def _line(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """A fixed cost and one for each token; of a single length everything is fixed, which is the most it can be."""
    if len(lengths) < 2 or min(seconds) <= 0:
        return seconds[0], 0.0
    fixed, per_token = stats.fit([[1.0] * len(lengths), [float(n) for n in lengths]], seconds)
    return fixed, per_token


def _beyond(lengths: Sequence[int], prefill_s: Sequence[float], gap: float, per_token: float) -> float | None:
    """Where the curves cross beyond the longest length; None where they do not, or far away."""
    if len(lengths) < 2:
        return None
    gain = (prefill_s[-1] - prefill_s[-2]) / (lengths[-1] - lengths[-2]) - per_token
    n_tokens = lengths[-1] - gap / gain if gain > 0 else None
    return n_tokens if n_tokens is not None and n_tokens <= FARTHEST * lengths[-1] else None


DEFAULT_PREFIXES, DEFAULT_SUFFIX = "256,1024,4096", 64
MOVES = ("save_ram", "load_ram", "save_disk", "load_disk")


@dataclass(frozen=True)
class Row:
    """One prefix length of one setup: medians over runs.

    `cold_s`, `cached_s`, `ram_s` and `disk_s` are times to first token, `prefix_s` the prefill of the prefix in the
    cold way. `saved_s` is cold - cached, `promised_s` what the prefill law says that the prefix costs, `least_load_s`
    what reading and writing the state takes at the memory's best rate (None without ceilings). `copy_s` is the copy
    alone; caches of their own are copied in the step after it, and whole.
    `logits_differ` is the largest difference from the cold logits, None where that is not known; `is_same_token` says
    that all ways chose one token, `is_equal` that also nothing differs. `n_prefilled_again` counts tokens that were
    prefilled after a copy or a load and are not of the suffix.
    """

    n_prefix: int
    n_suffix: int
    n_runs: int
    cold_s: float
    cached_s: float
    ram_s: float
    disk_s: float
    prefix_s: float
    copy_s: float
    save_ram_s: float
    load_ram_s: float
    save_disk_s: float
    load_disk_s: float
    state_bytes: int | None
    save_ram_gbps: float | None
    load_ram_gbps: float | None
    save_disk_gbps: float | None
    load_disk_gbps: float | None
    saved_s: float
    promised_s: float | None
    least_load_s: float | None
    logits_differ: float | None
    is_same_token: bool
    is_equal: bool | None
    n_prefilled_again: int
    kv_unified: bool


def prefix(
    prefix_len: str | Sequence[int] = DEFAULT_PREFIXES,
    suffix_len: int = DEFAULT_SUFFIX,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Any,
) -> list[Record]:
    """Time the first token of a prompt cold, and with its prefix cached or restored; a record a run, as of `measure`.

        lab.prefix("256,1024", suffix_len=64)

    States are saved on the disk of `out` and deleted again. The sequences share a cache, unless `kv_unified` is "off".
    """
    with cases.folder_in(out) as folder:

        def make(worker: Worker) -> Plan:
            return plan(worker, prefix_len, suffix_len, repeat, folder=folder, model=model, **settings)

        return carry_out(make, out, watch)


def plan(
    worker: Worker,
    prefix_len: str | Sequence[int] = DEFAULT_PREFIXES,
    suffix_len: int = DEFAULT_SUFFIX,
    repeat: int | None = None,
    *,
    folder: Path,
    kv_unified: str | None = None,
    **asked: Any,
) -> Plan:
    """The plan of `prefix`; states are saved in `folder`. LabError for numbers and models that cannot be.

    Unless asked otherwise the sequences share one cache: with one each, a copy moves all of it, however short.
    """
    lengths = cases.numbers("--prefix-len", prefix_len, MAX_TOKENS)
    cases.numbers("--suffix-len", [suffix_len], MAX_TOKENS)
    made = make_plan(worker, [n + suffix_len for n in lengths], 1, repeat, kv_unified=kv_unified or "on", **asked)
    cases.check(made.model, max(lengths), suffix_len)
    n_shared = 1 if made.settings.kv_unified else None  # what is shared takes its place once
    wanted = [
        Case(n, 1, lever=Prefix(n - suffix_len, suffix_len), sequences=(n + 1, n_shared or n + 1))
        for n in (case.n_prompt for case in made.cases)
    ]
    return cases.with_room(with_cases(made, wanted, functools.partial(write, folder=folder)), folder)


def write(case: Case, text: Text, settings: Settings, *, folder: Path) -> list[Operation]:
    """The script: the prefix once, then the suffix in four ways: cold, cached, from RAM, from disk."""
    assert isinstance(case.lever, Prefix)
    n_prefix, path = case.lever.n_prefix, str(folder / "state")
    prompt = text(0, case.n_prompt)

    def suffix(sequence: int) -> list[Operation]:
        *steps, last = script.prefill(sequence, prompt[n_prefix:], settings.n_ubatch)
        return [*steps, dataclasses.replace(last, keeps=True)]

    return [
        *script.prefill(0, prompt[:n_prefix], settings.n_ubatch, is_last=False),
        *suffix(0),
        Operation(FORGET, first=n_prefix),
        Operation(COPY, sequence=0, target=1),
        *suffix(1),
        Operation(FORGET, sequence=1),
        Operation(SAVE),
        Operation(SAVE, path=path),
        Operation(FORGET),
        Operation(LOAD),
        *suffix(0),
        Operation(FORGET),
        Operation(LOAD, path=path),
        *suffix(0),
    ]


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each prefix length, of timed runs of one setup that went well."""
    by_prefix = grouped(
        (record for record in records if lever_figures.figures(record.run)),
        lambda record: (record.run.prefix.n_suffix, record.run.prefix.n_prefix) if record.run.prefix else None,
    )
    made = []
    for (n_suffix, n_prefix), alike in sorted(by_prefix.items()):
        runs = [record.run for record in alike]
        of_runs = [prefix_times.times(one.run, phases.times_prefill_steps(one.settings)) for one in alike]
        medians = {name: statistics.median(one[name] for one in of_runs) for name in of_runs[0]}
        n_bytes = max((run.state_bytes[0] for run in runs if run.state_bytes), default=None)
        rates: dict[str, Any] = {f"{name}_gbps": _gbps(n_bytes, medians[f"{name}_s"]) for name in MOVES}
        known = [max(run.logits_differ) for run in runs if run.logits_differ]
        logits_differ = max(known) if len(known) == len(runs) else None
        is_same_token = all(len(set(run.token_ids)) == 1 for run in runs)
        made.append(
            Row(
                n_prefix=n_prefix,
                n_suffix=n_suffix,
                n_runs=len(runs),
                **medians,
                state_bytes=n_bytes,
                **rates,
                promised_s=prediction.prefill(n_prefix, 0, 0) if prediction else None,
                least_load_s=prediction.move(n_prefix) if prediction else None,
                logits_differ=logits_differ,
                is_same_token=is_same_token,
                is_equal=None if logits_differ is None else is_same_token and logits_differ == 0,
                n_prefilled_again=max(map(prefix_times.n_prefilled_again, runs)),
                kv_unified=alike[0].settings.kv_unified,
            )
        )
    return made


def break_even(measured: Sequence[Row]) -> list[BreakEven]:
    """From which prefix length restoring beats prefilling, from RAM, from disk, and over networks."""
    by_length = {row.n_prefix: row for row in sorted(measured, key=lambda row: row.n_prefix)}
    alike = list(by_length.values())
    loads = {"RAM": [row.load_ram_s for row in alike], "disk": [row.load_disk_s for row in alike]}
    over_lines = over_networks(loads["RAM"], [row.state_bytes for row in alike])
    prefill_s = [row.prefix_s for row in alike]
    return [find(name, list(by_length), prefill_s, taken) for name, taken in {**loads, **over_lines}.items()]


def sentences(measured: Sequence[Row], prediction: StepPrediction | None) -> list[str]:
    """What rows of one setup show, in words."""
    if not measured:
        return []
    most = max(measured, key=lambda row: row.n_prefix)
    words = [
        f"With {most.n_prefix:,} of its {most.n_prefix + most.n_suffix:,} tokens cached, a prompt has its first token "
        f"after {seconds(most.cached_s)} instead of {seconds(most.cold_s)}; restored from RAM, after "
        f"{seconds(most.ram_s)}, from disk, after {seconds(most.disk_s)}."
    ]
    if by := cases.off_by((row.promised_s, row.saved_s) for row in measured):
        words.append(f"The prefill law's promise is off from the time saved {by}.")
    if most.least_load_s:
        words.append(
            f"Loading {most.n_prefix:,} tokens from RAM took {seconds(most.load_ram_s)}; reading and writing as many "
            f"bytes at the memory's best rate takes {seconds(most.least_load_s)}."
        )
    words += _checked(measured)
    words.append(sentence(break_even(measured)))
    if not most.kv_unified:
        words.append(
            "Each sequence has a cache of its own: the first step after the copy copied all of it, however short the "
            "prefix is. With --kv-unified on nothing is copied."
        )
    return words


def _checked(measured: Sequence[Row]) -> list[str]:
    """Whether what was restored is what was computed."""
    n_runs = sum(row.n_runs for row in measured)
    if all(row.is_equal and not row.n_prefilled_again for row in measured):
        again = f"Nothing of a prefix was prefilled again in {plural(n_runs, 'run')}"
        return [f"{again}, and the logits are those of the cold way, bit by bit."]
    words = []
    for row in measured:
        if row.n_prefilled_again:
            words.append(f"{row.n_prefilled_again:,} tokens of the prefix of {row.n_prefix:,} were prefilled again.")
        if not row.is_equal:
            by = "are not known" if row.logits_differ is None else f"differ by up to {row.logits_differ:.2g}"
            token = "the same token was" if row.is_same_token else "different tokens were"
            words.append(f"After the prefix of {row.n_prefix:,} the logits {by}; {token} chosen.")
    return words


def _gbps(n_bytes: int | None, taken_s: float) -> float | None:
    return n_bytes / taken_s / 1e9 if n_bytes and taken_s > 0 else None
