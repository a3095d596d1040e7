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
from typing import Any

from lab.core import cost, lever_figures, phases, stats
from lab.core.levers import in_chunks
from lab.core.lists import grouped
from lab.core.record import PREFILL, Record, Run
from lab.errors import LabError
from lab.features import batch as batching
from lab.features.claims.judging import Claim, Condition, Evidence, Figure, Value, by_block, figure, over
from lab.features.limits import roofline
from lab.features.limits.step_prediction import StepPrediction
from lab.features.predict import learning

Figures = list[Figure | None]
Point = tuple[float, float]
"""A length or position, and a time there."""

LONGEST, USUAL = 1024, 512
"""The longest prompt of the part `lengths`, and a usual one."""

APART = 1.3
"""Quantizations are compared with each other only if their sizes differ at least by this factor."""

TIMES: dict[str, Value] = {"prefill": phases.prefill_ns, "decode": phases.tpot_ns, "TTFT": phases.ttft_ns}


def at(evidence: Evidence, n_prompt: int) -> list[Record]:
    """The runs of the part `lengths` with this prompt."""
    return [record for record in evidence.of("lengths") if record.run.n_prompt == n_prompt]


def ratio(one: float | None, other: float | None) -> float | None:
    """one / other; None if a time is unknown or 0."""
    return one / other if one and other else None


def of_best(evidence: Evidence, phase: str, best: str) -> Figures:
    """The share of the best that a phase reaches: its `kernels` at their ceilings, or plain `reading`."""
    n_prompt = LONGEST if phase == "prefill" else min(record.run.n_prompt for record in evidence.of("lengths"))
    runs = at(evidence, n_prompt)
    row = next(row for row in roofline.explain(runs, evidence.best).itertuples() if row.phase == phase)
    least_ns = {"kernels": 1e9 * row.least_s, "reading": row.n_bytes / roofline.roof(evidence.best).gbps}
    value = phases.prefill_ns if phase == "prefill" else phases.decode_compute_mean_ns
    shares = [ratio(least_ns[best], value(record.run)) for record in runs]
    return [figure(f"share of the best ({best}) at {n_prompt:,} tokens", shares, "%", 100)]


def changed(evidence: Evidence, variant: str, phase: str) -> Figures:
    """The time of a phase with a changed setting over that without."""
    sides = evidence.by(lambda record: record.run.variant, "settings")
    return [figure(f"{phase}, {variant} over base", over(sides.get("base"), sides.get(variant), TIMES[phase]))]


def half_threads(evidence: Evidence, phase: str) -> Figures:
    """The time of a phase with half the threads over that with all; of prefill in % of the reduction in threads."""
    sides = evidence.by(lambda record: record.run.variant, "settings")
    if "half" not in sides or "base" not in sides:
        raise LabError("Runs with half the threads are missing; a single thread cannot be halved.")
    base, half = (sides[name][0].settings for name in ("base", "half"))
    if base.n_gpu_layers:
        raise LabError("The layers are on a GPU, where the number of CPU threads hardly matters.")
    reduction = half.n_threads_batch / base.n_threads_batch
    unit = {"prefill": ("%", 100 * reduction), "decode": ("x", 1.0)}[phase]
    name = f"{phase} with {half.n_threads} of {base.n_threads} threads over all"
    return [figure(name, over(sides["base"], sides["half"], TIMES[phase]), *unit)]


def doubled(evidence: Evidence) -> Figures:
    """Prefill of the longest prompt over that of half of it."""
    halves = at(evidence, LONGEST // 2)
    return [figure(f"{LONGEST:,} tokens over {LONGEST // 2}", over(halves, at(evidence, LONGEST), phases.prefill_ns))]


def walks(evidence: Evidence, phase: str) -> list[list[Point]]:
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

    def value(run: Run) -> float | None:
        times = phases.itl_ns(run)
        rise = stats.slope(range(len(times)), times)
        first = statistics.median(times) - rise.estimate * (len(times) - 1) / 2 if rise else 0
        return 1 + 200 * rise.estimate / first if rise and first > 0 else None

    lengths = evidence.by(lambda record: record.run.n_prompt, "lengths")
    return [figure(f"after {n:,} tokens", [value(one.run) for one in own]) for n, own in lengths.items()]


def rate_ratio(evidence: Evidence) -> Figures:
    """The tokens per second of prefill over those of decode."""
    pairs = [(phases.tpot_ns(one.run), phases.prefill_ns(one.run)) for one in at(evidence, LONGEST)]
    return [
        figure(f"prefill rate over decode rate at {LONGEST:,} tokens", [ratio(*one) for one in pairs], "x", LONGEST)
    ]


def step_s(run: Run) -> float | None:
    """The time of a step of a batch; None if its steps are not those of a batch."""
    return lever_figures.step_s(run) if lever_figures.figures(run) else None


def by_sequences(evidence: Evidence) -> dict[int, list[Record]]:
    """The runs of the part `batch` by their number of sequences."""
    return evidence.by(lambda record: record.run.batch and record.run.batch.n_seq, "batch")


def knee(evidence: Evidence) -> Figures:
    """The number of sequences at which the asymptotes of the step's time cross, over the ridge.

    With few sequences a step takes as long as with one, with many it grows by the same time for each further one: as it
    grew last. If the crossing lies beyond the measured numbers, only its least value is known.
    """
    numbers = by_sequences(evidence)
    first = next(iter(numbers.values()))[0]
    prediction = StepPrediction(first.model, first.settings, evidence.best, learning.fit([]), 0)
    ridge = batching.ridge(prediction, first.run.n_prompt, first.run.n_gen)
    if ridge is None or 1 not in numbers or len(numbers) < 3:
        raise LabError("By the ceilings no number of sequences is limited by arithmetic, or too few were measured.")
    some, most = list(numbers)[-2:]
    one, before, last = (by_block(numbers[n], step_s) for n in (1, some, most))
    slopes = [(one[key], (last[key] - before[key]) / (most - some)) for key in one if key in before and key in last]
    crossings = [alone / slope if slope * most > alone else math.inf for alone, slope in slopes]
    least = [float(most)] if math.inf in crossings else []
    return [figure(f"crossing of the asymptotes over {ridge:.3g} sequences", [n / ridge for n in crossings + least])]


def batched(evidence: Evidence, what: str) -> Figures:
    """The time of the largest `step`, or of a `token` of every step, over that of a step with one sequence."""
    numbers = by_sequences(evidence)
    many, one = [n for n in numbers if n > 1], numbers.get(1)
    if what == "step":
        return [figure(f"a step of {n} over one of 1", over(one, numbers[n], step_s)) for n in many[-1:]]
    return [figure(f"a token of {n} over one alone", over(one, numbers[n], step_s), "x", 1 / n) for n in many]


def smaller_formats(evidence: Evidence) -> Figures:
    """A token in each format over F16, and over the next larger format whose size differs enough."""
    sized = [(one.model.n_bytes, one) for one in evidence.of("quantizations") if one.model.n_bytes]
    ordered = [one for _, one in sorted(sized, key=lambda pair: -pair[0])]
    formats = grouped(ordered, lambda one: (one.model.quantization or "", one.model.n_bytes or 0))
    made = Figures()
    for (kind, n_bytes), own in formats.items():
        larger = [key for key in formats if key[1] >= APART * n_bytes]
        for key in dict.fromkeys([*(one for one in larger if one[0] == "F16"), *larger[-1:]]):
            made.append(figure(f"a token in {kind} over one in {key[0]}", over(formats[key], own, phases.tpot_ns)))
    return made


def of_limit(evidence: Evidence) -> Figures:
    """The share of bandwidth / bytes that decode reaches, at each length and quantization."""
    gbps, made = roofline.roof(evidence.best).gbps, Figures()
    setups = evidence.by(lambda one: (one.model.quantization or "", one.run.n_prompt), "lengths", "quantizations")
    for (kind, n_prompt), own in setups.items():
        settings, middle = own[0].settings, n_prompt + max(0, own[0].run.n_gen - 2) // 2
        step = cost.step(own[0].model, 1, middle, 1, settings.type_k, settings.type_v)
        if step is None:
            raise LabError(f"The cost of a step of {own[0].model.name} cannot be derived from its header.")
        shares = [ratio(step.n_bytes / gbps, phases.tpot_ns(one.run)) for one in own]
        made.append(figure(f"{kind} after {n_prompt:,} tokens", shares, "%", 100))
    return made


def speed_up(evidence: Evidence) -> Figures:
    """The speed-up of the median text, in each block."""
    times: tuple[dict[Any, float], dict[Any, float]] = ({}, {})
    for run in (record.run for record in evidence.of("speculation")):
        lever, taken = run.speculation, lever_figures.figures(run).get("tpot_ms")
        if lever and lever.text and taken:
            times[bool(lever.n_draft)][run.repeat, lever.text] = taken
    plain, drafted = times
    blocks = grouped((key for key in drafted if key in plain), lambda key: key[0]).values()
    gains = [statistics.median(plain[key] / drafted[key] for key in own) for own in blocks]
    return [figure("speed-up of the median text", gains)]


def gaps(evidence: Evidence) -> Figures:
    """The longest gap of a stream over that with the next larger chunk."""
    sizes = evidence.by(lambda one: one.run.stall and -(one.run.stall.chunk or one.run.n_prompt), "stall")
    named = [(in_chunks(own[0].run.stall.chunk), own) for own in sizes.values() if own[0].run.stall]
    return [
        figure(f"{words} over {before}", over(base, own, lambda run: lever_figures.figures(run).get("gap_ms")))
        for (before, base), (words, own) in itertools.pairwise(named)
    ]


def curves(evidence: Evidence, phase: str) -> list[list[Point]]:
    """The time in seconds over the length of the prompt, of each repeat with at least three lengths."""
    repeats = grouped(evidence.of("lengths"), lambda record: record.run.repeat).values()
    pairs = [sorted((float(one.run.n_prompt), (TIMES[phase](one.run) or 0.0) / 1e9) for one in own) for own in repeats]
    return [own for own in pairs if len(own) > 2 and all(seconds > 0 for _, seconds in own)]


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
    runs = [record.run for record in at(evidence, USUAL)]
    if what == "TTFT":
        return [figure(f"TTFT at {USUAL} tokens", [phases.ttft_ns(run) for run in runs], "s", 1e-9)]
    return [figure(f"decode after {USUAL} tokens", [ratio(1e9, phases.tpot_ns(run)) for run in runs], "tokens/s")]


def _claim(number: str, words: dict[str, Any]) -> Claim:
    conditions = []
    for one in words["conditions"]:
        name, *given = one.pop("figures").split()
        conditions.append(Condition(globals()[name], tuple(given), **one))
    return Claim(int(number), **{**words, "parts": tuple(words["parts"]), "conditions": tuple(conditions)})


TEXTS = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
CLAIMS = tuple(_claim(number, words) for number, words in TEXTS.items())
"""All claims."""
