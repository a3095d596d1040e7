"""The figures of claims, from the runs of a session; claims.toml names these functions and their words.

Settings are compared block by block, the cases of an experiment within each repeat: so slow changes of the machine
cancel. A curve gives one value for each walk or repeat, because its points share an engine and are not independent.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core import cost, phases, stats
from lab.core.payloads import in_chunks
from lab.core.record import PREFILL
from lab.errors import LabError
from lab.features import batch as batching
from lab.features.claims.judging import Claim, Condition, Evidence, Figure, figure
from lab.features.limits import explanation, step_kernels
from lab.features.predict import learning
from lab.features.predict.learning import StepPrediction

if TYPE_CHECKING:
    import pandas as pd

Figures = list[Figure | None]

LONGEST, USUAL = 1024, 512
"""The longest prompt of the part `lengths`, and a usual one."""

APART = 1.3
"""Quantizations are compared with each other only if their sizes differ at least by this factor."""

TIMES = ["prefill", "decode", "TTFT", "compute", "batch step", "drafted token", "longest gap"]


def table(evidence: Evidence, *parts: str) -> pd.DataFrame:
    """A row for each timed run of parts: its case, its block, and its times in ns; NaN for what is unknown or 0."""
    import pandas as pd

    rows = []
    for record in evidence.of(*parts):
        run, model = record.run, record.model
        of_lever = phases.figures(run)
        case = {
            "record": record,
            "variant": run.variant,
            "n_prompt": run.n_prompt,
            "repeat": run.repeat,
            "block": run.repeat if run.block is None else run.block,
            "format": model.quantization or "",
            "n_bytes": model.n_bytes or 0,
            "n_seq": run.batch and run.batch.n_seq,
            "chunk": run.stall and (run.stall.chunk or run.n_prompt),
            "text": run.speculation and run.speculation.text,
            "n_draft": run.speculation and run.speculation.n_draft,
        }
        times = (
            *(phases.prefill_ns(run), phases.tpot_ns(run), phases.ttft_ns(run)),
            None if run.lever else phases.decode_compute_mean_ns(run),
            1e9 * phases.step_s(run) if run.batch and of_lever else None,
            *(1e6 * of_lever.get(name, math.nan) for name in ("tpot_ms", "gap_ms")),
        )
        rows.append(case | dict(zip(TIMES, times, strict=True)))
    made = pd.DataFrame(rows)
    made[TIMES] = made[TIMES].astype(float).where(lambda times: times > 0)
    return made


def over(base: pd.DataFrame, other: pd.DataFrame, time: str) -> list[float]:
    """The time of `other` over that of `base`, in each block that has both: geometric means of several runs."""
    known = (rows.dropna(subset=[time]).groupby("block")[time] for rows in (base, other))
    one, two = (times.agg(statistics.geometric_mean) for times in known)
    return [two[block] / one[block] for block in one.index if block in two.index]


def of_best(evidence: Evidence, phase: str, best: str) -> Figures:
    """The share of the best that a phase reaches: its `kernels` at their ceilings, or plain `reading`."""
    runs = table(evidence, "lengths")
    n_prompt = LONGEST if phase == "prefill" else runs.n_prompt.min()
    own = runs[runs.n_prompt == n_prompt]
    row = next(row for row in explanation.explain(list(own.record), evidence.best).itertuples() if row.phase == phase)
    least_ns = {"kernels": 1e9 * row.least_s, "reading": row.n_bytes / step_kernels.roof(evidence.best).gbps}[best]
    shares = least_ns / own["prefill" if phase == "prefill" else "compute"]
    return [figure(f"share of the best ({best}) at {n_prompt:,} tokens", shares, "%", 100)]


def compared(evidence: Evidence, part: str, case: str, base: str, other: str, time: str) -> Figures:
    """A time of the runs with one value of a column over that with another."""
    runs = table(evidence, part)
    values = runs[case].astype(str)
    return [figure(f"{time}, {other} over {base}", over(runs[values == base], runs[values == other], time))]


def half_threads(evidence: Evidence, phase: str) -> Figures:
    """The time of a phase with half the threads over that with all; of prefill in % of the reduction in threads."""
    runs = table(evidence, "settings")
    if not {"base", "half"} <= set(runs.variant):
        raise LabError("Runs with half the threads are missing; a single thread cannot be halved.")
    sides = [runs[runs.variant == name] for name in ("base", "half")]
    base, half = (side.record.iloc[0].settings for side in sides)
    if base.n_gpu_layers:
        raise LabError("The layers are on a GPU, where the number of CPU threads hardly matters.")
    unit = {"prefill": ("%", 100 * half.n_threads_batch / base.n_threads_batch), "decode": ("x", 1.0)}[phase]
    name = f"{phase} with {half.n_threads} of {base.n_threads} threads over all"
    return [figure(name, over(sides[0], sides[1], phase), *unit)]


def walks(evidence: Evidence, phase: str) -> list[list[tuple[float, float]]]:
    """Positions and times of each walk: of decoded tokens at each stop, or of prefill steps, if these are timed."""
    if phase == "decode":
        legs = [phases.by_length(record.run) for record in evidence.of("context")]
        return [[(leg.n_prompt, taken) for leg in own if (taken := phases.tpot_ns(leg))] for own in legs]
    timed = [one.run.steps for one in evidence.of("context") if phases.times_prefill_steps(one.settings)]
    columns = [zip(one.kind, one.n_past, one.start_ns, one.ready_ns, strict=True) for one in timed]
    return [[(past, end - start) for kind, past, start, end in own if kind == PREFILL] for own in columns]


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
    curves = [[time for _, time in points] for points in walks(evidence, "decode") if len(points) > 2]
    thirds = [(times, len(times) // 3) for times in curves]
    values = [statistics.fmean(one[n:-n]) / statistics.fmean([*one[:n], *one[-n:]]) for one, n in thirds]
    return [figure("middle third of a walk over the outer thirds", values)]


def growth_over_200(evidence: Evidence) -> Figures:
    """The 200th token over the first, from the slope of each run's times between tokens."""
    made = Figures()
    for n_prompt, own in table(evidence, "lengths").groupby("n_prompt"):
        values = []
        for times in (phases.itl_ns(record.run) for record in own.record):
            rise = stats.slope(range(len(times)), times)
            first = statistics.median(times) - rise.estimate * (len(times) - 1) / 2 if rise else 0
            values.append(1 + 200 * rise.estimate / first if rise and first > 0 else None)
        made.append(figure(f"after {n_prompt:,} tokens", values))
    return made


def rate_ratio(evidence: Evidence) -> Figures:
    """The tokens per second of prefill over those of decode."""
    runs = table(evidence, "lengths")
    ratios = (runs.decode / runs.prefill)[runs.n_prompt == LONGEST]
    return [figure(f"prefill rate over decode rate at {LONGEST:,} tokens", ratios, "x", LONGEST)]


def knee(evidence: Evidence) -> Figures:
    """The number of sequences at which the asymptotes of the step's time cross, over the ridge.

    With few sequences a step takes as long as with one, with many it grows by the same time for each further one: as it
    grew last. If the crossing lies beyond the measured numbers, only its least value is known.
    """
    runs = table(evidence, "batch")
    first = runs.record.iloc[0]
    prediction = StepPrediction(first.model, first.settings, evidence.best, learning.fit([]), 0)
    ridge = batching.ridge(prediction, first.run.n_prompt, first.run.n_gen)
    by_block = runs.pivot_table("batch step", "block", "n_seq", aggfunc=statistics.geometric_mean)
    numbers = sorted(runs.n_seq.unique())
    if ridge is None or numbers[0] != 1 or len(numbers) < 3:
        raise LabError("By the ceilings no number of sequences is limited by arithmetic, or too few were measured.")
    some, most = numbers[-2:]
    times = by_block.reindex(columns=[1, some, most]).dropna()
    slopes = (times[most] - times[some]) / (most - some)
    pairs = zip(times[1], slopes, strict=True)
    crossings = [alone / slope if slope * most > alone else math.inf for alone, slope in pairs]
    least = [float(most)] if math.inf in crossings else []
    return [figure(f"crossing of the asymptotes over {ridge:.3g} sequences", [n / ridge for n in crossings + least])]


def batched(evidence: Evidence, what: str) -> Figures:
    """The time of the largest `step`, or of a `token` of every step, over that of a step with one sequence."""
    runs = table(evidence, "batch")
    alone, many = runs[runs.n_seq == 1], list(runs[runs.n_seq > 1].groupby("n_seq"))
    if what == "step":
        return [figure(f"a step of {n} over one of 1", over(alone, own, "batch step")) for n, own in many[-1:]]
    return [figure(f"a token of {n} over one alone", over(alone, own, "batch step"), "x", 1 / n) for n, own in many]


def smaller_formats(evidence: Evidence) -> Figures:
    """A token in each format over F16, and over the next larger format whose size differs enough."""
    runs = table(evidence, "quantizations")
    formats = [(kind, size, own) for (size, kind), own in runs[runs.n_bytes > 0].groupby(["n_bytes", "format"])][::-1]
    made = Figures()
    for kind, size, own in formats:
        larger = [(name, rows) for name, n_bytes, rows in formats if n_bytes >= APART * size]
        for name, rows in dict([*(one for one in larger if one[0] == "F16"), *larger[-1:]]).items():
            made.append(figure(f"a token in {kind} over one in {name}", over(rows, own, "decode")))
    return made


def of_limit(evidence: Evidence) -> Figures:
    """The share of bandwidth / bytes that decode reaches, at each length and quantization."""
    gbps, made = step_kernels.roof(evidence.best).gbps, Figures()
    for (kind, n_prompt), own in table(evidence, "lengths", "quantizations").groupby(["format", "n_prompt"]):
        first = own.record.iloc[0]
        middle = n_prompt + max(0, first.run.n_gen - 2) // 2
        step = cost.step(first.model, 1, middle, 1, first.settings.type_k, first.settings.type_v)
        if step is None:
            raise LabError(f"The cost of a step of {first.model.name} cannot be derived from its header.")
        made.append(figure(f"{kind} after {n_prompt:,} tokens", step.n_bytes / gbps / own.decode, "%", 100))
    return made


def speed_up(evidence: Evidence) -> Figures:
    """The speed-up of the median text, in each block."""
    runs = table(evidence, "speculation").dropna(subset=["text", "drafted token"])
    sides = (runs[runs.n_draft == 0], runs[runs.n_draft > 0])
    plain, drafted = (own.groupby(["repeat", "text"])["drafted token"].last() for own in sides)
    return [figure("speed-up of the median text", (plain / drafted).dropna().groupby("repeat").median())]


def gaps(evidence: Evidence) -> Figures:
    """The longest gap of a stream over that with the next larger chunk."""
    sizes = [own for _, own in table(evidence, "stall").groupby("chunk")][::-1]
    named = [(in_chunks(own.record.iloc[0].run.stall.chunk), own) for own in sizes]
    return [
        figure(f"{words} over {before}", over(base, own, "longest gap"))
        for (before, base), (words, own) in itertools.pairwise(named)
    ]


def curves(evidence: Evidence, phase: str) -> list[list[tuple[float, float]]]:
    """The time in seconds over the length of the prompt, of each repeat with at least three lengths."""
    repeats = table(evidence, "lengths").sort_values(["n_prompt", phase]).groupby("repeat")
    known = [own for _, own in repeats if len(own) > 2 and own[phase].notna().all()]
    return [list(zip(own.n_prompt.astype(float), own[phase] / 1e9, strict=True)) for own in known]


def without_a_cache(evidence: Evidence) -> Figures:
    """Seconds of 500 tokens if each needs a step over the whole text; short steps take the time of the shortest."""
    whole = [one for one in curves(evidence, "prefill") if one[-1][0] >= 500]
    sums = [sum(stats.on_lines(curve, max(n, curve[0][0])) for n in range(1, 501)) for curve in whole]
    return [figure("500 tokens without a cache", sums, "s")]


def exponent(evidence: Evidence) -> Figures:
    """The exponent of a step's time over its length, between the second and the longest length of each repeat."""
    ends = [(curve[1], curve[-1]) for curve in curves(evidence, "prefill")]
    values = [math.log(last / first) / math.log(n / few) for (few, first), (n, last) in ends]
    return [figure("exponent of a step's time over its length", values, "")]


def at_one_second(evidence: Evidence) -> Figures:
    """The length at which TTFT passes 1 s, over the context that the model was trained for."""
    n_ctx = evidence.of("lengths")[0].model.n_ctx_train
    if not n_ctx:
        raise LabError("The context that the model was trained for is unknown.")
    swapped = [sorted((seconds, n) for n, seconds in curve) for curve in curves(evidence, "TTFT")]
    lengths = [max(1.0, stats.on_lines(curve, 1.0)) / n_ctx for curve in swapped]
    return [figure(f"length at which TTFT passes 1 s, over {n_ctx:,}", lengths)]


def usual(evidence: Evidence, what: str) -> Figures:
    """TTFT or the decode rate of the usual prompt."""
    runs = table(evidence, "lengths")
    own = runs[runs.n_prompt == USUAL]
    if what == "TTFT":
        return [figure(f"TTFT at {USUAL} tokens", own.TTFT, "s", 1e-9)]
    return [figure(f"decode after {USUAL} tokens", 1e9 / own.decode, "tokens/s")]


def _claim(number: str, words: dict[str, Any]) -> Claim:
    conditions = []
    for one in words["conditions"]:
        name, *given = one.pop("figures").split()
        conditions.append(Condition(globals()[name], tuple(given), **one))
    return Claim(int(number), **{**words, "parts": tuple(words["parts"]), "conditions": tuple(conditions)})


TEXTS = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
CLAIMS = tuple(_claim(number, words) for number, words in TEXTS.items())
"""All claims."""
