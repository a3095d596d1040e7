"""A fit to the runs of a machine that predicts other runs, and the errors of these predictions.

The fit: a phase takes its kernels' least time, times a factor of at least 1 (one for prefill, one
for decode), plus a cost of every layer per step (thread synchronization) and per token (norms,
activations, copies). No cost is negative. A setup with runs of its own is corrected by their mean
deviation. All runs of one setup at one length are one point: their median.

The errors: points are held out of the fit and predicted from the others. Each kind of extrapolation
has a variance: the mean squared error of the points held out in this way, combined with a figure of
the benchmark (PRIOR). Predictions without extrapolation and differences between sessions have one
too; points of disturbed runs add theirs by their share. The variances that apply to a prediction
are added.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lab.core import phases, stats
from lab.core.lists import grouped
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Run, Settings
from lab.errors import LabError
from lab.roofline import probing
from lab.roofline.step_kernels import StepKernels
from lab.runner import disturbances

PRIOR_FACTOR = 1.05  # the prior factor on kernels in each phase; it counts as one more point

INSIDE = "inside"
SESSION = "session"
DISTURBED = "disturbed"
LONGER = "longer"
SHORTER = "shorter"
MODEL = "model"
QUANTIZATION = "quantization"
SETTINGS = "settings"

PRIOR = {
    INSIDE: {PREFILL: 0.07, DECODE: 0.06},
    SESSION: {PREFILL: 0.05, DECODE: 0.08},
    DISTURBED: {PREFILL: 0.28, DECODE: 0.25},
    LONGER: {PREFILL: 0.08, DECODE: 0.08},
    SHORTER: {PREFILL: 0.12, DECODE: 0.06},
    MODEL: {PREFILL: 0.12, DECODE: 0.12},
    QUANTIZATION: {PREFILL: 0.10, DECODE: 0.10},
    SETTINGS: {PREFILL: 0.12, DECODE: 0.12},
}
"""Standard deviations of log(measured / predicted); of LONGER and SHORTER for one doubling.

Measured on two virtual cores of an EPYC, and rounded up. tests/bench/held_out.py: other lengths
0.06; Q4_0 and Q8_0 from Q4_1 0.10; 3B models from small ones 0.02 in prefill and 0.11 in decode.
The samples in results/: sessions 0.04 in prefill and 0.08 in decode; longer prompts 0.08 and 0.02;
shorter ones 0.12 and 0.04. DISTURBED: between sessions of one thread while other processes used 1.5
of the two cores, 0.28 and 0.25. Other settings were not measured: they count as another model does.
"""

PRIOR_WEIGHT = 4  # a figure of PRIOR counts as this number of groups of held-out points
DEVIATIONS = 2.0  # half the width of a range, in standard deviations
MOST_LENGTHS = 12  # most lengths at which points are split: a sweep has hundreds
NEAR = 1.5  # lengths up to this factor times the longest measured one do not count as extrapolation

Setup = tuple[object, ...]


class Step(NamedTuple):
    """A step of one sequence: its tokens, those before them, and how many get logits."""

    n_tokens: int
    n_past: int
    n_outputs: int


@dataclass(frozen=True)
class LearnedCase:
    """What decides a prediction of a phase.

    `length`: tokens of the prompt, or before the tokens of the answer.
    """

    phase: str
    length: float
    shape: tuple[object, ...]
    quantization: str | None
    settings: tuple[object, ...]

    @property
    def setup(self) -> Setup:
        """The properties shared by all lengths of one phase in one setup."""
        return self.phase, self.shape, self.quantization, self.settings


class Costs(NamedTuple):
    """The parts of a phase's time, the columns of the fit. For decode those of one step."""

    kernels_s: float
    layer_steps: float
    layer_values: float  # layers x tokens x (n_embd + n_ff)


@dataclass(frozen=True)
class Point:
    """The median of the undisturbed runs of one setup at one length.

    `seconds`: of prefill, or of one decode step. `by_session`: the median of each session.
    """

    n_prompt: int
    case: LearnedCase
    costs: Costs
    seconds: float
    by_session: dict[str, float]
    is_disturbed: bool = False


@dataclass(frozen=True)
class Fit:
    """Seconds = factor x kernels + per_layer_step_s x layers x steps + per_layer_value_s x values.

    `corrections`: factors of the setups with points, by which their points differ from this law.
    """

    prefill_factor: float
    decode_factor: float
    per_layer_step_s: float
    per_layer_value_s: float
    corrections: dict[Setup, float] = dataclasses.field(default_factory=dict)

    def seconds(self, case: LearnedCase, costs: Costs) -> float:
        """Expected seconds of a phase."""
        factor = self.prefill_factor if case.phase == PREFILL else self.decode_factor
        return self.corrected_s(costs, factor, self.correction(case))

    def correction(self, case: LearnedCase) -> float:
        """The factor of the case's setup; 1 for a setup without points."""
        return self.corrections.get(case.setup, 1.0)

    def corrected_s(self, costs: Costs, factor: float, correction: float) -> float:
        """Seconds with this factor on kernels and this correction, never below the kernels."""
        steps_s = self.per_layer_step_s * costs.layer_steps
        values_s = self.per_layer_value_s * costs.layer_values
        law_s = factor * costs.kernels_s + (steps_s + values_s)
        return max(costs.kernels_s, correction * law_s)


class Coverage:
    """The lengths, models and settings that the points of one phase cover."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.shortest = math.inf
        self.longest = 0.0
        self.settings = set[tuple[object, ...]]()
        self.quantizations = set[str | None]()
        self.by_shape = defaultdict[tuple[object, ...], set[str | None]](set)
        for point in points:
            case = point.case
            self.shortest = min(self.shortest, case.length)
            self.longest = max(self.longest, case.length)
            self.settings.add(case.settings)
            self.quantizations.add(case.quantization)
            self.by_shape[case.shape].add(case.quantization)

    def extrapolations(self, case: LearnedCase) -> dict[str, float]:
        """The kinds of extrapolation of a case, and how far: in doublings of the length, else 1."""
        distances = {}
        if case.length > NEAR * self.longest:
            distances[LONGER] = math.log2(case.length / self.longest)
        if case.length * NEAR < self.shortest:
            distances[SHORTER] = math.log2(self.shortest / max(1.0, case.length))
        if case.shape not in self.by_shape:
            distances[MODEL] = 1.0
        if case.quantization not in self.by_shape.get(case.shape, self.quantizations):
            distances[QUANTIZATION] = 1.0
        if case.settings not in self.settings:
            distances[SETTINGS] = 1.0
        return distances


def coverage_by_phase(points: Sequence[Point]) -> dict[str, Coverage]:
    by_phase = grouped(points, lambda point: point.case.phase)
    return {phase: Coverage(points_of_phase) for phase, points_of_phase in by_phase.items()}


class HeldOutError(NamedTuple):
    """The error of a point predicted from other points: log(measured / predicted).

    `group`: the points that were held out together, for the same reason.
    """

    phase: str
    group: str
    extrapolations: dict[str, float]
    error: float


@dataclass(frozen=True)
class Learned:
    """A fit to this machine's runs, with its points and the errors of its predictions."""

    fit: Fit
    points: tuple[Point, ...]
    models: tuple[str, ...]
    n_runs: int

    @cached_property
    def coverage(self) -> dict[str, Coverage]:
        return coverage_by_phase(self.points)

    @cached_property
    def held_out(self) -> list[HeldOutError]:
        """The errors of points predicted from others, for every way to hold some out."""
        errors = list[HeldOutError]()
        for group, points in groups_to_hold_out(self.points):
            errors += self._errors_without(group, points)
        return errors

    def _errors_without(self, group: str, points: Sequence[Point]) -> Iterator[HeldOutError]:
        """The errors of these points, predicted from the others."""
        ids = set(map(id, points))
        remaining = [point for point in self.points if id(point) not in ids]
        coverage = coverage_by_phase(remaining)
        fit_of_remaining = fit(remaining)
        for point in points:
            case = point.case
            if case.phase in coverage:
                error = math.log(point.seconds / fit_of_remaining.seconds(case, point.costs))
                extrapolations = coverage[case.phase].extrapolations(case)
                yield HeldOutError(case.phase, group or str(case.setup), extrapolations, error)

    def points_of(self, phase: str) -> list[Point]:
        return [point for point in self.points if point.case.phase == phase]

    def factor(self, case: LearnedCase) -> float:
        """The factor by which a range extends to both sides of the expected time."""
        share = statistics.fmean(point.is_disturbed for point in self.points_of(case.phase))
        distances = {INSIDE: 1.0, SESSION: 1.0, DISTURBED: share}
        distances |= self.coverage[case.phase].extrapolations(case)
        variance = 0.0
        for kind, distance in distances.items():
            variance += distance * self.variance(case.phase, kind)
        return math.exp(DEVIATIONS * math.sqrt(variance))

    def fastest(self, phase: str) -> float:
        """The smallest ratio of a point to its kernels' least time, at most 1.

        Less than 1 shows that ceilings are too low.
        """
        ratios = [point.seconds / point.costs.kernels_s for point in self.points_of(phase)]
        return min(1.0, *ratios)

    def variance(self, phase: str, kind: str) -> float:
        """The variance of one kind of error of a phase, of log(measured / predicted).

        The mean over groups of points and PRIOR, which counts as PRIOR_WEIGHT groups.
        """
        if kind == SESSION:
            squares = self._squares_of_sessions(phase)
        else:
            squares = self._squares_of_errors(phase, kind)
        means = list(map(statistics.fmean, squares.values()))
        prior = PRIOR[kind][phase] ** 2
        return (sum(means) + PRIOR_WEIGHT * prior) / (len(means) + PRIOR_WEIGHT)

    def _squares_of_sessions(self, phase: str) -> dict[str, list[float]]:
        """Squared deviations of sessions from their point's median, by session."""
        squares: dict[str, list[float]] = {}
        for point in self.points_of(phase):
            n = len(point.by_session)
            if n == 1:
                continue
            for session, seconds in point.by_session.items():
                deviation = math.log(seconds / point.seconds)
                squares.setdefault(session, []).append(deviation**2 * n / (n - 1))
        return squares

    def _squares_of_errors(self, phase: str, kind: str) -> dict[str, list[float]]:
        """Squared errors of held-out points that extrapolate in this way alone, by group."""
        squares: dict[str, list[float]] = {}
        kinds = [] if kind == INSIDE else [kind]
        for held in self.held_out:
            if held.phase == phase and list(held.extrapolations) == kinds:
                distance = held.extrapolations.get(kind, 1.0)
                squares.setdefault(held.group, []).append(held.error**2 / distance)
        return squares


def groups_to_hold_out(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    """The groups to hold out: a name (empty: each point's setup names it) and the points."""
    lengths = lengths_to_split_at(points)
    by_length = grouped(points, lambda point: point.n_prompt)
    for length in lengths[1:-1]:
        for group in grouped(by_length[length], lambda point: point.case.setup).values():
            yield "", group
    for length in lengths[1:]:
        yield "", [point for point in points if point.n_prompt >= length]
        yield "", [point for point in points if point.n_prompt < length]
    keys: list[Callable[[Point], tuple[object, ...]]] = [
        lambda point: point.case.shape,
        lambda point: (point.case.shape, point.case.quantization),
        lambda point: point.case.settings,
    ]
    for key in keys:
        for value, group in grouped(points, key).items():
            yield str(value), group


def lengths_to_split_at(points: Sequence[Point]) -> list[int]:
    """Up to MOST_LENGTHS + 1 of the prompt lengths, evenly spread over their order."""
    lengths = sorted({point.n_prompt for point in points})
    last = len(lengths) - 1
    if last <= MOST_LENGTHS:
        return lengths
    return [lengths[number * last // MOST_LENGTHS] for number in range(MOST_LENGTHS + 1)]


def fit(points: Sequence[Point]) -> Fit:
    """The coefficients with the least relative errors of the points; factors are at least 1."""
    rows = list[tuple[float, ...]]()  # kernels of prefill, of decode, layers' steps and values
    seconds = list[float]()
    for point in points:
        kernels_s, layer_steps, layer_values = point.costs
        if point.case.phase == PREFILL:
            rows.append((kernels_s, 0.0, layer_steps, layer_values))
        else:
            rows.append((0.0, kernels_s, layer_steps, layer_values))
        seconds.append(point.seconds)
    rows += [(1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)]
    seconds += [PRIOR_FACTOR, PRIOR_FACTOR]
    columns = list(zip(*rows, strict=True))
    prefill, decode, step, value = stats.fit(columns, seconds, at_least=(1, 1, 0, 0))
    common = Fit(prefill, decode, step, value)
    return dataclasses.replace(common, corrections=corrections_of(common, points))


def corrections_of(common: Fit, points: Sequence[Point]) -> dict[Setup, float]:
    """The geometric mean of measured over fitted times of each setup.

    A ratio of 1 counts as one more point, so that few points correct little.
    """
    ratios: dict[Setup, list[float]] = {}
    for point in points:
        ratio = point.seconds / common.seconds(point.case, point.costs)
        ratios.setdefault(point.case.setup, [1.0]).append(ratio)
    return {setup: statistics.geometric_mean(values) for setup, values in ratios.items()}


def case_of(phase: str, length: float, model: Model, settings: Settings) -> LearnedCase:
    """The case of a phase of a model under some settings."""
    shape = (
        model.arch,
        model.n_layer,
        model.n_embd,
        model.n_ff,
        model.n_head,
        model.n_head_kv,
        model.n_vocab,
    )
    chosen = (
        settings.n_gpu_layers if offload_of(model, settings) == "part" else None,
        settings.n_threads if phase == DECODE else settings.n_threads_batch,
        settings.n_ubatch,
        settings.type_k,
        settings.type_v,
        settings.repack,
        settings.stated_flash,
        settings.n_cpu_moe,
        settings.kv_offload,
        settings.op_offload,
        settings.prefill_wait if phase == PREFILL else None,
        settings.thread_wait,
    )
    return LearnedCase(phase, length, shape, model.quantization, chosen)


def prompt_steps(
    n_tokens: int, settings: Settings, n_past: int = 0, n_outputs: int = 1
) -> list[Step]:
    """The steps of a prompt after n_past tokens; the last one has n_outputs."""
    n_ubatch = max(1, settings.n_ubatch)
    steps = []
    for start in range(0, n_tokens, n_ubatch):
        size = min(n_ubatch, n_tokens - start)
        is_last = start + size == n_tokens
        steps.append(Step(size, n_past + start, n_outputs if is_last else 0))
    return steps


def costs_of(
    kernels: StepKernels,
    steps: Sequence[Step],
    kernel_times: dict[Step, float] | None = None,
) -> Costs:
    """The costs of some steps. LabError for an unknown cost.

    `kernel_times` keeps the seconds of steps of this model from call to call.
    """
    if kernel_times is None:
        kernel_times = {}
    kernels_s = 0.0
    n_tokens = 0
    for step in steps:
        if step not in kernel_times:
            kernel_times[step] = kernels.total(*step).total_s
        kernels_s += kernel_times[step]
        n_tokens += step.n_tokens
    model = kernels.model
    n_layer = model.n_layer or 0
    return Costs(kernels_s, n_layer * len(steps), n_layer * n_tokens * width_of(model))


def width_of(model: Model) -> int:
    """The values of a token in each layer that are neither products nor attention."""
    return (model.n_embd or 0) + (model.n_ff or 0)


def offload_of(model: Model, settings: Settings) -> str:
    """How much of a model is on a GPU: none, part, all."""
    if settings.n_gpu_layers == 0:
        return "none"
    if 0 < settings.n_gpu_layers <= (model.n_layer or 0):
        return "part"
    return "all"


def is_plain(record: Record) -> bool:
    """Whether it is a timed run with steps that belongs to no experiment."""
    return record.run.is_timed and record.run.imported_from is None and record.run.is_plain


def model_label(model: Model) -> str:
    """The model and its quantization."""
    return f"{model.name} {model.quantization or ''}".strip()


def learn(records: Sequence[Record], ceilings: Ceilings, offload: str = "none") -> Learned:
    """The fit to runs of this machine with this offload. LabError if there are too few."""
    runs = []
    models = set[str]()
    n_records = 0
    for record in records:
        if not is_plain(record) or offload_of(record.model, record.settings) != offload:
            continue
        points_of_run = points_of_record(record, ceilings)
        if points_of_run:
            runs += points_of_run
            models.add(model_label(record.model))
            n_records += 1
    same_length = grouped(runs, lambda run: (run.case.setup, run.n_prompt))
    points = tuple(map(median_point, same_length.values()))
    if {point.case.phase for point in points} != {PREFILL, DECODE}:
        raise LabError(
            "There are too few runs of this machine to predict from. At least one with prefill and"
            " decode is needed, and ceilings for its weight types.",
            "Measure them: lab measure, then lab ceilings",
        )
    return Learned(fit(points), points, tuple(sorted(models)), n_records)


class TimedPhase(NamedTuple):
    """A phase of a run as it was measured; decode as its mean step."""

    phase: str
    length: int
    steps: list[Step]
    seconds: float


def points_of_record(record: Record, ceilings: Ceilings) -> list[Point]:
    """Prefill and the mean decode step of a record's runs, each as a point.

    Empty if the ceilings are of another machine or lack a kernel.
    """
    if not probing.hold_for(ceilings, probing.place_of_record(record)):
        return []
    model = record.model
    settings = record.settings
    layers = probing.layers_of(record)
    kernel_times = dict[Step, float]()  # the runs of a sweep share most of their steps
    is_disturbed = bool(disturbances.disturbances(record))
    points = []
    for run in phases.by_length(record.run):
        for phase, length, steps, seconds in timed_phases(run):
            try:
                costs = costs_of(
                    StepKernels(model, settings, ceilings, layers),
                    steps,
                    kernel_times,
                )
            except LabError:  # a type or thread count without a ceiling
                return []
            if min(costs.kernels_s, seconds, length) > 0:
                case = case_of(phase, length, model, settings)
                by_session = {record.session: seconds}
                points.append(
                    Point(run.n_prompt, case, costs, seconds, by_session, is_disturbed)
                )
    return points


def timed_phases(run: Run) -> list[TimedPhase]:
    """Prefill and decode of a run. Empty if its steps are impossible: a file may hold anything."""
    steps = run.steps
    if not steps.n_tokens or min(run.n_prompt, *steps.n_tokens) < 1 or min(steps.n_past) < 0:
        return []
    seconds = list[float]()
    for start_ns, ready_ns in zip(steps.start_ns, steps.ready_ns, strict=True):
        seconds.append((ready_ns - start_ns) / 1e9)
    n_prefill = phases.n_prefill_steps(run)
    prefill = []
    for index in range(n_prefill):
        n_outputs = 1 if index == n_prefill - 1 else 0
        prefill.append(Step(steps.n_tokens[index], steps.n_past[index], n_outputs))
    timed = [TimedPhase(PREFILL, run.n_prompt, prefill, sum(seconds[:n_prefill]))]
    decode_s = seconds[n_prefill:]
    if decode_s:
        middle = round(statistics.fmean(steps.n_past[n_prefill:]))
        mean_s = sum(decode_s) / len(decode_s)
        timed.append(TimedPhase(DECODE, middle, [Step(1, middle, 1)], mean_s))
    return timed


def median_point(runs: Sequence[Point]) -> Point:
    """The median of one setup at one length, from the medians of sessions: each counts the same."""
    quiet = [run for run in runs if not run.is_disturbed]
    runs = quiet or runs
    times = defaultdict[str, list[float]](list)
    for run in runs:
        for session, seconds in run.by_session.items():
            times[session].append(seconds)
    by_session = {session: statistics.median(seconds) for session, seconds in times.items()}
    columns = zip(*(run.costs for run in runs), strict=True)
    costs = Costs(*map(statistics.median, columns))
    length = statistics.median(run.case.length for run in runs)
    case = dataclasses.replace(runs[0].case, length=length)
    seconds = statistics.median(by_session.values())
    return Point(runs[0].n_prompt, case, costs, seconds, by_session, runs[0].is_disturbed)
