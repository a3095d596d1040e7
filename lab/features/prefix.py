"""`lab prefix`: the time to first token of a prompt whose beginning is cached.

Keys and values of a token depend only on the tokens before it. Prompts with the same beginning (instructions, a
document, a conversation so far) have the same cache there, and only the rest needs prefill. One run measures four
variants, with the same prompt of a prefix and a suffix:

    cold      prefill the prefix, then the suffix
    cached    copy the prefix's cache to another sequence, then prefill the suffix there
    RAM       load a state that was saved in memory, then the suffix
    disk      load a state that was saved in a file (dropped from the page cache), then the suffix

Every variant ends with the same step or steps, with the suffix alone. The logits must be equal bit by bit; otherwise
the restored cache differs from the computed one. Saving is timed, but belongs to none of the variants.

Loading time is proportional to bytes, prefill time to arithmetic. Restoring pays from the length at which the two
curves cross. Between two measured lengths the crossing is interpolated linearly. Outside, the curves are extrapolated:
to shorter prefixes, prefill in proportion to length (a short one costs slightly more per token) and restoring as a
fitted fixed cost plus a cost per token; to longer ones, both with their last slope (prefill grows slightly faster).
Both extrapolations err in the same direction: the true length is slightly shorter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from lab.core import lever_figures, memory, phases, prefix_times, script, stats
from lab.core.levers import Prefix
from lab.core.lists import grouped, plural
from lab.core.record import COPY, FORGET, LOAD, SAVE, Model, Record, Run, Settings
from lab.core.script import Operation
from lab.errors import LabError
from lab.features.common import cell, listed, need_every_position, numbers, off_by
from lab.features.experiment import REPEAT, Conclusions, Experiment, Keywords, Option, Table, for_plan, public
from lab.features.limits.step_prediction import StepPrediction
from lab.models import catalog
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner import limits
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.show import canvas
from lab.show.wording import seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FARTHEST = 10
"""Extrapolation ends at this multiple of the longest measured length."""


@dataclass(frozen=True)
class BreakEven:
    """From `n_tokens` on restoring from `name` is faster than prefill: 1 means always, None at no known length.

    `is_measured`: it lies between two measured lengths; `n_longest` is the longest. `wins_at` are the measured
    lengths at which restoring was faster. Restoring takes `fixed_s` plus `per_token_s` per token of the prefix.
    """

    name: str
    n_tokens: float | None
    is_measured: bool
    n_longest: int
    wins_at: tuple[int, ...]
    fixed_s: float
    per_token_s: float


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


def sentence(known: Sequence[BreakEven]) -> str:
    """All of them in one sentence, by where the state comes from."""
    by_words = grouped(known, words)
    parts = [f"{words} ({', '.join(f'from {one.name}' for one in alike)})" for words, alike in by_words.items()]
    return f"Restoring a prefix is faster than prefilling it {'; '.join(parts)}."


def words(one: BreakEven) -> str:
    if one.n_tokens is None:
        lengths, longest = ", ".join(f"{n:,}" for n in one.wins_at), f"{one.n_longest:,} tokens"
        return f"only at {lengths}, not at {longest}" if lengths else f"at no length up to {longest}"
    if one.n_tokens <= 1:
        return "at every measured length"
    about = f"from about {plural(round(one.n_tokens), 'token')}"
    return about if one.is_measured else f"{about}, extrapolated"


def _line(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """A fixed cost and a cost per token; with a single length the whole cost is fixed, the most that it can be."""
    if len(lengths) < 2 or min(seconds) <= 0:
        return seconds[0], 0.0
    fixed, per_token = stats.fit([[1.0] * len(lengths), [float(n) for n in lengths]], seconds)
    return fixed, per_token


def _beyond(lengths: Sequence[int], prefill_s: Sequence[float], gap: float, per_token: float) -> float | None:
    """The crossing beyond the longest length; None if there is none up to FARTHEST times that length."""
    if len(lengths) < 2:
        return None
    gain = (prefill_s[-1] - prefill_s[-2]) / (lengths[-1] - lengths[-2]) - per_token
    n_tokens = lengths[-1] - gap / gain if gain > 0 else None
    return n_tokens if n_tokens is not None and n_tokens <= FARTHEST * lengths[-1] else None


DEFAULT_PREFIXES, DEFAULT_SUFFIX = "256,1024,4096", 64


@dataclass(frozen=True)
class Row:
    """One prefix length of one setup: medians over runs.

    `cold_s`, `cached_s`, `ram_s` and `disk_s` are times to first token, `prefix_s` the prefill of the prefix without a
    cache. `saved_s` is cold - cached, `promised_s` the predicted prefill of the prefix, `least_load_s` the time to read
    and write the state at the memory's best rate (None without ceilings). `copy_s` is the copy alone; separate caches
    are copied whole, in the step after it.
    `logits_differ` is the largest difference from the cold logits, None if unknown. `is_same_token`: all variants chose
    the same token; `is_equal`: their logits are equal too. `n_prefilled_again` counts prefix tokens that were prefilled
    after a copy or a load.
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


def plan(
    worker: Worker,
    /,
    prefix_len: str | Sequence[int] = DEFAULT_PREFIXES,
    suffix_len: int = DEFAULT_SUFFIX,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    folder: Path = Path(),
    **settings: Unpack[Keywords],
) -> Plan:
    """Time the first token of a prompt cold, and with its prefix cached or restored; returns a record per run.

        lab.prefix("256,1024", suffix_len=64)

    States are saved in `folder`, on the disk of `out`, and deleted again. Unless `kv_unified` is "off" the sequences
    share one cache; with separate caches a copy moves the whole cache, even for a short prefix. LabError for impossible
    numbers and unsuitable models.
    """
    lengths = numbers("--prefix-len", prefix_len, MAX_TOKENS)
    numbers("--suffix-len", [suffix_len], MAX_TOKENS)
    n_prompts = [n + suffix_len for n in lengths]
    made = make_plan(worker, n_prompts, 1, repeat, model, **for_plan(settings, kv_unified="on"))
    _check(made.model, max(lengths), suffix_len)
    n_shared = 1 if made.settings.kv_unified else None  # a shared prefix is in the cache once
    wanted = [
        Case(n, 1, lever=Prefix(n - suffix_len, suffix_len), sequences=(n + 1, n_shared or n + 1))
        for n in (case.n_prompt for case in made.cases)
    ]
    return _with_room(with_cases(made, wanted, functools.partial(write, folder=folder)), folder)


def _check(model: Model, n_prefix: int, n_suffix: int) -> None:
    """LabError for prompts longer than the model's context, and for models without a key and value per position."""
    need_every_position(model)
    n_left = None if model.n_ctx_train is None else model.n_ctx_train - n_suffix - 1
    if n_left is not None and n_prefix > n_left:
        raise LabError(
            f"A prefix of {n_prefix:,} tokens and a suffix of {n_suffix:,} are longer than the context of "
            f"{model.n_ctx_train:,} tokens that {model.name} was trained for.",
            f"Give at most --prefix-len {n_left}." if n_left > 0 else "Give a shorter --suffix-len.",
        )


def _with_room(plan: Plan, folder: Path) -> Plan:
    """The same plan, refusing cases whose saved states do not fit into memory beside the context, or on the disk."""
    per_position = memory.kv_bytes_per_position(plan.model, plan.settings.type_k, plan.settings.type_v)
    if per_position is None:
        return plan
    refused = {}
    available, free = limits.memory_available(), shutil.disk_usage(folder).free
    for case in plan.cases:
        n_prefix = _lever(case).n_prefix
        n_bytes = n_prefix * per_position
        on_host = 0 if plan.settings.n_gpu_layers else plan.memory(case).total_bytes
        what = f"The saved state of a prefix of {n_prefix:,} tokens needs {n_bytes / 1e9:,.1f} GB"
        if n_bytes + on_host > available:
            refused[case] = (
                f"{what} of memory, and its context {on_host / 1e9:,.1f} GB; {available / 1e9:,.1f} GB are available."
            )
        elif n_bytes > free:
            refused[case] = f"{what}; {free / 1e9:,.1f} GB are free on the disk."
    return dataclasses.replace(plan, refused={**refused, **plan.refused})


def _lever(case: Case) -> Prefix:
    assert isinstance(case.lever, Prefix)
    return case.lever


def write(case: Case, text: Text, settings: Settings, *, folder: Path) -> list[Operation]:
    """The script: the prefix once, then the suffix four times: cold, cached, from RAM, from disk."""
    n_prefix, path = _lever(case).n_prefix, str(folder / "state")
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
    """One row for each prefix length, from the successful timed runs of one setup."""
    good = [record for record in records if record.run.prefix and lever_figures.figures(record.run)]
    by_lever = grouped(good, lambda record: record.run.prefix)
    ordered = sorted(by_lever.items(), key=lambda item: (item[0].n_suffix, item[0].n_prefix))
    return [_row(lever, own, prediction) for lever, own in ordered]


def _row(lever: Prefix, records: Sequence[Record], prediction: StepPrediction | None) -> Row:
    runs = [record.run for record in records]
    times = [prefix_times.times(one.run, phases.times_prefill_steps(one.settings)) for one in records]
    medians = {name: statistics.median(of_run[name] for of_run in times) for name in times[0]}
    n_bytes = max((run.state_bytes[0] for run in runs if run.state_bytes), default=None)
    differences = [max(run.logits_differ) for run in runs if run.logits_differ]
    logits_differ = max(differences) if len(differences) == len(runs) else None
    is_same_token = all(len(set(run.token_ids)) == 1 for run in runs)
    return Row(
        n_prefix=lever.n_prefix,
        n_suffix=lever.n_suffix,
        n_runs=len(runs),
        **medians,
        state_bytes=n_bytes,
        save_ram_gbps=_gbps(n_bytes, medians["save_ram_s"]),
        load_ram_gbps=_gbps(n_bytes, medians["load_ram_s"]),
        save_disk_gbps=_gbps(n_bytes, medians["save_disk_s"]),
        load_disk_gbps=_gbps(n_bytes, medians["load_disk_s"]),
        promised_s=prediction.prefill(lever.n_prefix, 0, 0) if prediction else None,
        least_load_s=prediction.move(lever.n_prefix) if prediction else None,
        logits_differ=logits_differ,
        is_same_token=is_same_token,
        is_equal=None if logits_differ is None else is_same_token and logits_differ == 0,
        n_prefilled_again=max(map(prefix_times.n_prefilled_again, runs)),
        kv_unified=records[0].settings.kv_unified,
    )


def break_even(measured: Sequence[Row]) -> list[BreakEven]:
    """The prefix length from which restoring is faster than prefill, from RAM and from disk."""
    by_length = {row.n_prefix: row for row in sorted(measured, key=lambda row: row.n_prefix)}
    alike = list(by_length.values())
    loads = {"RAM": [row.load_ram_s for row in alike], "disk": [row.load_disk_s for row in alike]}
    prefill_s = [row.prefix_s for row in alike]
    return [find(name, list(by_length), prefill_s, taken) for name, taken in loads.items()]


def sentences(measured: Sequence[Row], prediction: StepPrediction | None) -> list[str]:
    """What rows of one setup show, in words."""
    if not measured:
        return []
    most = max(measured, key=lambda row: row.n_prefix)
    words = [
        f"With {most.n_prefix:,} of {most.n_prefix + most.n_suffix:,} prompt tokens cached, TTFT is "
        f"{seconds(most.cached_s)} instead of {seconds(most.cold_s)} ({seconds(most.ram_s)} restored from RAM, "
        f"{seconds(most.disk_s)} from disk).",
        sentence(break_even(measured)),
        *_checked(measured),
    ]
    if not most.kv_unified:
        words.append(
            "Each sequence has its own cache: the first step after the copy copies the whole cache, even for a short "
            "prefix. With --kv-unified on nothing is copied."
        )
    words += off_by(((row.promised_s, row.saved_s) for row in measured), "the time saved")
    if most.least_load_s:
        words.append(
            f"Loading {most.n_prefix:,} tokens from RAM took {seconds(most.load_ram_s)}; at the memory's best rate, "
            f"reading and writing the same bytes takes {seconds(most.least_load_s)}."
        )
    return words


def _checked(measured: Sequence[Row]) -> list[str]:
    """Whether the restored cache equals the computed one."""
    n_runs = sum(row.n_runs for row in measured)
    if all(row.is_equal and not row.n_prefilled_again for row in measured):
        runs = f"{'all ' if n_runs > 1 else ''}{plural(n_runs, 'run')}"
        return [f"In {runs} the logits match the uncached prompt exactly, and no prefix token was prefilled again."]
    words = []
    for row in measured:
        if row.n_prefilled_again:
            again = f"{row.n_prefilled_again:,} of {row.n_prefix:,} prefix tokens were prefilled again"
            words.append(f"{again} after a copy or a load.")
        if not row.is_equal:
            by = "were not recorded" if row.logits_differ is None else f"differ by up to {row.logits_differ:.3g}"
            token = "the same token was" if row.is_same_token else "different tokens were"
            words.append(f"After a cached prefix of {row.n_prefix:,} tokens the logits {by}; {token} chosen.")
    return words


def _gbps(n_bytes: int | None, taken_s: float) -> float | None:
    return n_bytes / taken_s / 1e9 if n_bytes and taken_s > 0 else None


def _conclude(rows: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    by_suffix = grouped(rows, lambda row: row.n_suffix)
    words = [sentence for _, own in sorted(by_suffix.items()) for sentence in sentences(own, prediction)]
    return words, {"break_even": break_even(rows) if rows else []}


LABELS = ("cold", "prefix copied in the cache", "restored from RAM", "restored from disk")
NAMES = {"ram_s": "RAM", "disk_s": "disk"}
"""Names of the break-evens, by figure."""


def draw(
    rows: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None, subject: str, figure: Figure
) -> None:
    """Time to first token over the length of the prefix, both logarithmic.

    The dashed grey line is the prediction without a cache. A dotted vertical line marks a break-even between two
    measured lengths; the legend gives the others.
    """
    ax = figure.subplots()
    n_suffix = rows[0].n_suffix
    alike = [row for row in rows if row.n_suffix == n_suffix]
    own = [record for record in records if record.run.prefix and record.run.prefix.n_suffix == n_suffix]
    known = {one.name: one for one in break_even(alike)}
    lengths = [row.n_prefix for row in alike]
    for way, label, style in zip(prefix_times.WAYS, LABELS, canvas.styles(len(LABELS)), strict=True):
        pays = known.get(NAMES.get(way, ""))
        name = f"{label} (pays {words(pays)})" if pays else f"{label}: median and runs"
        ax.plot(lengths, [getattr(row, way) for row in alike], **style, ms=4, mew=0, lw=2, label=name)
        of_runs = [
            (record.run.prefix.n_prefix, figures[way], record)
            for record in own
            if record.run.prefix and (figures := prefix_times.figures(record.run))
        ]
        canvas.runs(ax, of_runs, **style, ms=7)
        if pays and pays.is_measured and pays.n_tokens is not None:
            ax.axvline(pays.n_tokens, color=style["color"], ls=":", lw=1.4)
    predicted = [(row.n_prefix, row.promised_s + row.cold_s - row.prefix_s) for row in alike if row.promised_s]
    if predicted:
        label = "cold, predicted from prefill times"
        ax.plot(*zip(*predicted, strict=True), color=canvas.GUIDE, ls="--", lw=1.2, label=label)
    canvas.over_lengths(ax, lengths)
    ax.set_xlabel("length of the prefix (tokens)")
    ax.set_yscale("log")
    ax.set_ylabel("time to first token (s)")
    canvas.finish([ax], f"Time to first token: a prefix, then a suffix of {n_suffix:,} tokens\n{subject}")


def _again(runs: Sequence[Run]) -> dict[str, object]:
    levers = [run.prefix for run in runs if run.prefix]
    return {
        "prefix_len": listed(lever.n_prefix for lever in levers),
        "suffix_len": listed(lever.n_suffix for lever in levers),
    }


def _rates(save_gbps: float | None, load_gbps: float | None) -> str:
    """The rate of saving, with the rate of loading below."""
    return "-" if save_gbps is None or load_gbps is None else f"{cell(save_gbps)}\n{cell(load_gbps)}"


TABLE = Table(
    name="prefix",
    question="What does a cached prefix save, and when does restoring it pay?",
    title="time to first token with a prefix cold, cached and restored; medians over runs; GB/s of saving, below of "
    "loading",
    caption="Time to first token over the length of the prefix: cold, copied in the cache, restored from RAM and from "
    "disk. Points are runs, lines are medians.",
    columns=(
        ("prefix\ntokens", lambda row: f"{row.n_prefix:,}"),
        ("suffix\ntokens", lambda row: f"{row.n_suffix:,}"),
        ("runs", lambda row: str(row.n_runs)),
        ("cold\ns", lambda row: cell(row.cold_s)),
        ("cached\ns", lambda row: cell(row.cached_s)),
        ("from RAM\ns", lambda row: cell(row.ram_s)),
        ("from disk\ns", lambda row: cell(row.disk_s)),
        ("saved\ns", lambda row: cell(row.saved_s)),
        ("predicted\ns", lambda row: cell(row.promised_s)),
        ("cache\nMB", lambda row: cell(row.state_bytes, 1e-6)),
        ("RAM\nGB/s", lambda row: _rates(row.save_ram_gbps, row.load_ram_gbps)),
        ("disk\nGB/s", lambda row: _rates(row.save_disk_gbps, row.load_disk_gbps)),
        ("equal\nlogits", lambda row: {True: "yes", False: "NO", None: "-"}[row.is_equal]),
    ),
    rows=rows,
    conclude=_conclude,
    draw=draw,
)

EXPERIMENT = Experiment(
    name="prefix",
    chapter="Cached prefixes",
    about="""Measure the time to first token with a cached prefix.

    \b
      lab prefix --prefix-len 256,1k,4k --suffix-len 64
      lab prefix --prefix-len 2k --model llama-3.2-3b

    Compares an empty cache, a prefix copied from another sequence, and a saved state restored from RAM and from disk
    (dropped from the page cache first, if the system allows it). Reports whether the logits match exactly, the
    predicted saving, and the length from which restoring pays. States are saved in a
    hidden folder in --out and deleted afterwards.
    """,
    lever=Prefix,
    plan=plan,
    options=(
        Option("prefix_len", "Lengths of the prefix in tokens: 256,1024."),
        Option("suffix_len", "Tokens of the prompt after the prefix."),
        REPEAT,
    ),
    again=_again,
    tables=(TABLE,),
    saves_states=True,
)

prefix = public("prefix", plan, saves_states=True)
