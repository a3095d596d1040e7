"""The figures of claims, from the runs of a session; claims.toml names these functions and their words.

Settings are compared block by block, the cases of an experiment within each repeat: so slow changes of the machine
cancel. A curve gives one value for each walk or repeat, because its points share an engine and are not independent.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lab.core import cost, experiments, phases, stats
from lab.core.record import PREFILL, Ceilings, Record
from lab.errors import LabError
from lab.features.batch import step_s as batch_step_s
from lab.features.speculate.setup import speculation_of
from lab.features.stall import in_chunks, stall_of
from lab.features.turns.conversation import NONE, conversation_of
from lab.features.turns.figures import figures as turn_figures
from lab.roofline import explanation, step_kernels
from lab.runner.batches import batch_of
from lab.show import session_spread

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 1024
USUAL = 512  # the longest prompt of the part `lengths`, and a usual one
APART = 1.3  # quantizations are compared with each other only if their sizes differ at least by this factor
ASSUMED = math.exp(2 * math.sqrt(2) * session_spread.VIRTUAL)
"""The factor by which the range of one or two values is widened: two sessions of a virtual machine rarely exceed it."""

TIMES = [
    *("prefill", "decode", "TTFT", "compute", "batch step", "drafted token", "longest gap"),
    *("TTFT of the last turn", "decode of the last turn", "share of TTFT"),
]
CASE = [
    "record",
    "part",
    "variant",
    "n_prompt",
    "block",
    "format",
    "n_bytes",
    "n_seq",
    "chunk",
    "text",
    "cache",
]

Figures = list[dict[str, Any] | None]
"""A figure has its `name`, `value`, `low` and `high` end (None: infinite), `unit`, and `n`, the values behind it."""


def figure(
    name: str, values: Iterable[float | None], unit: str = "x", scale: float = 1.0
) -> dict[str, Any] | None:
    """The centre of positive values, one for each engine, walk or block, with its 95 % interval; None for no values.

    6 and more: the median with its order-statistics interval. 3 to 5: the geometric mean with Student's t interval on
    logarithms. One or two: their range, widened by the factor ASSUMED. If one is infinite: from the least one upwards.
    """
    known = sorted(scale * value for value in values if value is not None and value > 0)
    if not known:
        return None
    made = {
        "name": name,
        "value": None,
        "low": known[0],
        "high": None,
        "unit": unit,
        "n": len(known),
    }
    if known[-1] == math.inf:
        return made
    interval = stats.median_interval(known)
    centre = statistics.median(known)
    if interval is None:
        interval = stats.log_interval(known)
        centre = statistics.geometric_mean(known)
    low, high = (
        (interval.low, interval.high) if interval else (known[0] / ASSUMED, known[-1] * ASSUMED)
    )
    return made | {"value": centre, "low": low, "high": high}


@dataclass(frozen=True)
class Evidence:
    """The records of one session of claims, and the ceilings of its machine, None if they are not known."""

    records: Sequence[Record]
    ceilings: Ceilings | Any = None

    def of(self, *parts: str) -> pd.DataFrame:
        """The timed runs of parts."""
        return self.runs[self.runs.part.isin(parts)]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row for each timed run: its case, its block, and its times in ns; NaN for what is unknown or 0."""
        import pandas as pd

        rows = []
        for record in (one for one in self.records if one.run.is_timed):
            run = record.run
            model = record.model
            of_lever = experiments.figures(record.run)
            place = (
                record,
                run.part,
                run.variant,
                run.n_prompt,
                run.repeat if run.block is None else run.block,
            )
            batch = batch_of(run)
            stall = stall_of(run)
            speculation = speculation_of(run)
            chunk = stall and (stall.chunk or run.n_prompt)
            text = speculation and speculation.text
            case = (
                model.quantization or "",
                model.n_bytes or 0,
                batch and batch.n_seq,
                chunk,
                text,
            )
            plain = phases.prefill_ns(run), phases.tpot_ns(run), phases.ttft_ns(run)
            compute = None if not run.is_plain else phases.decode_compute_mean_ns(run)
            batch_step = 1e9 * batch_step_s(run) if run.experiment == "batch" and of_lever else None
            drafted, gap = (1e6 * of_lever.get(name, math.nan) for name in ("tpot_ms", "gap_ms"))
            cache, *last = _last_turn(record)
            rows.append((*place, *case, cache, *plain, compute, batch_step, drafted, gap, *last))
        made = pd.DataFrame(rows, columns=[*CASE, *TIMES])
        made[TIMES] = made[TIMES].astype(float).where(lambda times: times > 0)
        return made


def _last_turn(record: Record) -> tuple[str | None, float, float, float]:
    """The cache and the times of a conversation's last turn; None and NaN for other runs."""
    lever = conversation_of(record.run)
    if lever is None or (of_turns := turn_figures(record.run.steps.frame(), lever)).empty:
        return None, math.nan, math.nan, math.nan
    cache = (
        "no cache" if lever.keep == NONE else "changed prompt" if lever.breaks else "cached prompt"
    )
    last = of_turns.iloc[-1]
    token_s = of_turns.ttft_s / of_turns.n_computed
    share = token_s.iloc[-1] / token_s.iloc[0] if token_s.iloc[0] > 0 else math.nan
    return cache, 1e9 * last.ttft_s, 1e9 * last.decode_s, share


def over(base: pd.DataFrame, other: pd.DataFrame, time: str) -> list[float]:
    """The time of `other` over that of `base`, in each block that has both: geometric means of several runs."""
    known = (rows.dropna(subset=[time]).groupby("block")[time] for rows in (base, other))
    one, two = (times.agg(statistics.geometric_mean) for times in known)
    return list((two / one).dropna())


def of_best(evidence: Evidence, phase: str, best: str) -> Figures:
    """The share of the best that a phase reaches: its `kernels` at their ceilings, or plain `reading`."""
    runs = evidence.of("lengths")
    n_prompt = LONGEST if phase == "prefill" else runs.n_prompt.min()
    own = runs[runs.n_prompt == n_prompt]
    row = next(
        row
        for row in explanation.explain(list(own.record), evidence.ceilings).itertuples()
        if row.phase == phase
    )
    least_ns = (
        1e9 * row.least_s
        if best == "kernels"
        else row.n_bytes / step_kernels.roof(evidence.ceilings).gbps
    )
    shares = least_ns / own["prefill" if phase == "prefill" else "compute"]
    return [figure(f"share of the best ({best}) at {n_prompt:,} tokens", shares, "%", 100)]


def value(
    evidence: Evidence, name: str, part: str, column: str, case: str, time: str, unit: str = "x"
) -> Figures:
    """A time of the runs with one value of a column: in s, in tokens/s its reciprocal, or a ratio."""
    runs = evidence.of(part)
    own = runs[runs[column].astype(str) == case][time]
    return [
        figure(
            name,
            1 / own if unit == "tokens/s" else own,
            unit,
            {"s": 1e-9, "tokens/s": 1e9}.get(unit, 1.0),
        )
    ]


def compared(
    evidence: Evidence, part: str, column: str, base: str, other: str, time: str
) -> Figures:
    """A time of the runs with one value of a column over that with another."""
    runs = evidence.of(part)
    values = runs[column].astype(str)
    return [
        figure(
            f"{time}, {other} over {base}", over(runs[values == base], runs[values == other], time)
        )
    ]


def half_threads(evidence: Evidence, phase: str) -> Figures:
    """The time of a phase with half the threads over that with all; of prefill in % of the reduction in threads."""
    runs = evidence.of("settings")
    sides = [runs[runs.variant == name] for name in ("base", "half")]
    if not all(map(len, sides)):
        raise LabError("Runs with half the threads are missing; a single thread cannot be halved.")
    base, half = (side.record.iloc[0].settings for side in sides)
    if base.n_gpu_layers:
        raise LabError("The layers are on a GPU, where the number of CPU threads hardly matters.")
    unit = {
        "prefill": ("%", 100 * half.n_threads_batch / base.n_threads_batch),
        "decode": ("x", 1.0),
    }[phase]
    name = f"{phase} with {half.n_threads} of {base.n_threads} threads over all"
    return [figure(name, over(sides[0], sides[1], phase), *unit)]


def walks(evidence: Evidence, phase: str) -> list[list[tuple[float, float]]]:
    """Positions and times of each walk: of decoded tokens at each stop, or of prefill steps, if these are timed."""
    records: list[Record] = list(evidence.of("context").record)
    if phase == "decode":
        legs = [phases.by_length(record.run) for record in records]
        return [
            [(leg.n_prompt, taken) for leg in own if (taken := phases.tpot_ns(leg))] for own in legs
        ]
    timed = [one.run.steps for one in records if phases.times_prefill_steps(one.settings)]
    columns = [zip(one.kind, one.n_past, one.start_ns, one.ready_ns, strict=True) for one in timed]
    return [
        [(past, end - start) for kind, past, start, end in own if kind == PREFILL]
        for own in columns
    ]


def growth(evidence: Evidence, phase: str) -> Figures:
    """The end of a walk over its beginning, by the median slope of each walk."""
    values = []
    for points in walks(evidence, phase):
        rise = stats.slope([place for place, _ in points], [time for _, time in points])
        if rise is not None:
            middle = statistics.median(time for _, time in points)
            half = rise.estimate * (points[-1][0] - points[0][0]) / 2
            values.append((middle + half) / (middle - half) if middle > half else math.inf)
    return [figure(f"{phase}: end of a walk over its beginning", values)]


def bend(evidence: Evidence) -> Figures:
    """The middle third of a walk over the mean of the outer thirds: on a straight line 1."""
    curves = [
        [time for _, time in points] for points in walks(evidence, "decode") if len(points) > 2
    ]
    thirds = [(times, len(times) // 3) for times in curves]
    values = [
        statistics.fmean(one[n:-n]) / statistics.fmean([*one[:n], *one[-n:]]) for one, n in thirds
    ]
    return [figure("middle third of a walk over the outer thirds", values)]


def growth_over_200(evidence: Evidence) -> Figures:
    """The 200th token over the first, from the slope of each run's times between tokens."""
    made = Figures()
    for n_prompt, own in evidence.of("lengths").groupby("n_prompt"):
        values = []
        for times in (phases.itl_ns(record.run) for record in own.record):
            rise = stats.slope(range(len(times)), times)
            first = statistics.median(times) - rise.estimate * (len(times) - 1) / 2 if rise else 0
            values.append(1 + 200 * rise.estimate / first if rise and first > 0 else None)
        made.append(figure(f"after {n_prompt:,} tokens", values))
    return made


def rate_ratio(evidence: Evidence) -> Figures:
    """The tokens per second of prefill over those of decode."""
    runs = evidence.of("lengths")
    ratios = (runs.decode / runs.prefill)[runs.n_prompt == LONGEST]
    return [figure(f"prefill rate over decode rate at {LONGEST:,} tokens", ratios, "x", LONGEST)]


def batched(evidence: Evidence, what: str) -> Figures:
    """The time of the largest `step`, or of a `token` of every step, over that of a step with one sequence."""
    runs = evidence.of("batch")
    alone = runs[runs.n_seq == 1]
    many = list(runs[runs.n_seq > 1].groupby("n_seq"))
    if what == "step":
        return [
            figure(f"a step of {n:g} over one of 1", over(alone, own, "batch step"))
            for n, own in many[-1:]
        ]
    return [
        figure(f"a token of {n:g} over one alone", over(alone, own, "batch step"), "x", 1 / n)
        for n, own in many
    ]


def smaller_formats(evidence: Evidence) -> Figures:
    """A token in each format over F16, and over the next larger format whose size differs enough."""
    runs = evidence.of("quantizations")
    formats = [
        (kind, size, own)
        for (size, kind), own in runs[runs.n_bytes > 0].groupby(["n_bytes", "format"])
    ][::-1]
    made = Figures()
    for kind, size, own in formats:
        larger = [(name, rows) for name, n_bytes, rows in formats if n_bytes >= APART * size]
        for name, rows in dict([*(one for one in larger if one[0] == "F16"), *larger[-1:]]).items():
            made.append(figure(f"a token in {kind} over one in {name}", over(rows, own, "decode")))
    return made


def of_limit(evidence: Evidence) -> Figures:
    """The share of bandwidth / bytes that decode reaches, at each length and quantization."""
    gbps = step_kernels.roof(evidence.ceilings).gbps
    made = Figures()
    for (kind, n_prompt), own in evidence.of("lengths", "quantizations").groupby(
        ["format", "n_prompt"]
    ):
        first = own.record.iloc[0]
        middle = n_prompt + max(0, first.run.n_gen - 2) // 2
        step = cost.step(first.model, 1, middle, 1, first.settings.type_k, first.settings.type_v)
        if step is None:
            raise LabError(
                f"The cost of a step of {first.model.name} cannot be derived from its header."
            )
        made.append(
            figure(f"{kind} after {n_prompt:,} tokens", step.n_bytes / gbps / own.decode, "%", 100)
        )
    return made


def speed_up(evidence: Evidence) -> Figures:
    """The speed-up of the median text, in each block."""
    runs = evidence.of("speculation").dropna(subset=["text", "drafted token"])
    has_drafts = runs.record.map(lambda record: record.run.case["n_draft"] > 0).astype(bool)
    plain, drafted = (
        own.groupby(["block", "text"])["drafted token"].last()
        for own in (runs[~has_drafts], runs[has_drafts])
    )
    return [
        figure("speed-up of the median text", (plain / drafted).dropna().groupby("block").median())
    ]


def gaps(evidence: Evidence) -> Figures:
    """The longest gap of a stream over that with the next larger chunk."""
    sizes = [own for _, own in evidence.of("stall").groupby("chunk")][::-1]
    named = [(in_chunks(own.record.iloc[0].run.case["chunk"]), own) for own in sizes]
    return [
        figure(f"{words} over {before}", over(base, own, "longest gap"))
        for (before, base), (words, own) in itertools.pairwise(named)
    ]
