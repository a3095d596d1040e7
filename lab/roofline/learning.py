"""A fit to the runs of a machine that predicts other runs, and the errors of these predictions.

The fit: a phase takes its kernels' least time, times a factor of at least 1 (one for prefill, one for decode), plus a
cost of every layer per step (thread synchronization) and per token (norms, activations, copies). No cost is negative. A
setup with runs of its own is corrected by their mean deviation. All runs of one setup at one length are one point:
their median.

The errors: points are held out of the fit and predicted from the others. Each kind of extrapolation has a variance: the
mean squared error of the points held out in this way, combined with a figure of the benchmark (PRIOR). Predictions
without extrapolation and differences between sessions have one too; points of disturbed runs add theirs by their share.
The variances that apply to a prediction are added.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from lab.core import cost, phases, stats
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.core.script import Part, Script
from lab.errors import LabError
from lab.roofline import probing, step_kernels
from lab.show import disturbances

if TYPE_CHECKING:
    import pandas as pd

PRIOR_FACTOR = 1.05  # the prior factor on kernels in each phase; it counts as one more point

Step = tuple[int, int, int]  # n_tokens, n_past, n_outputs of a step
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
"""Standard deviations of log(measured / predicted); of LONGER and SHORTER for one doubling of the length.

Measured on two virtual cores of an EPYC, and rounded up. tests/bench/held_out.py: other lengths 0.06; Q4_0 and Q8_0
from Q4_1 0.10; 3B models from small ones 0.02 in prefill and 0.11 in decode. The samples in results/: sessions 0.04
in prefill and 0.08 in decode; longer prompts 0.08 and 0.02; shorter ones 0.12 and 0.04. DISTURBED: between sessions of
one thread while other processes used 1.5 of the two cores, 0.28 and 0.25. Other settings were not measured: they count
as another model does.
"""

PRIOR_WEIGHT = 4  # a figure of PRIOR counts as this number of groups of held-out points
DEVIATIONS = 2.0  # half the width of a range, in standard deviations
MOST_LENGTHS = 12  # most lengths at which points are split: a sweep has hundreds
NEAR = 1.5  # lengths up to this factor times the longest measured one do not count as extrapolation
TILE = 64  # tokens of a tile of attention on the CPU (ggml-cpu/common.h, ggml_fa_tile_config)


@dataclass(frozen=True)
class Case:
    """What decides a prediction of a phase. `length`: tokens of the prompt, or before the tokens of the answer."""

    phase: str
    length: float
    shape: tuple[object, ...]
    quantization: str | None
    settings: tuple[object, ...]

    @property
    def setup(self) -> tuple[object, ...]:
        """The properties shared by all lengths of one phase in one setup."""
        return self.phase, self.shape, self.quantization, self.settings


class Costs(NamedTuple):
    """The parts of a phase's time, the columns of the fit. For decode those of one step."""

    kernels_s: float
    layer_steps: float
    layer_values: float  # layers x tokens x (n_embd + n_ff)


@dataclass(frozen=True)
class Point:
    """The median of the undisturbed runs of one setup at one length: seconds of prefill, or of one decode step."""

    n_prompt: int
    case: Case
    costs: Costs
    seconds: float
    by_session: dict[str, float]
    is_disturbed: bool = False


@dataclass(frozen=True)
class Fit:
    """Seconds = factor x kernels + per_layer_step_s x layers x steps + per_layer_value_s x layers x tokens x width."""

    prefill_factor: float
    decode_factor: float
    per_layer_step_s: float
    per_layer_value_s: float
    own: dict[tuple[object, ...], float] = dataclasses.field(default_factory=dict)

    def seconds(self, case: Case, costs: Costs) -> float:
        factor = self.prefill_factor if case.phase == PREFILL else self.decode_factor
        return self.at_least(costs, factor, self.own.get(case.setup, 1.0))

    def at_least(self, costs: Costs, factor: float, own: float) -> float:
        layers_s = (
            self.per_layer_step_s * costs.layer_steps + self.per_layer_value_s * costs.layer_values
        )
        return max(costs.kernels_s, own * (factor * costs.kernels_s + layers_s))


class Known:
    """What the points of one phase cover."""

    def __init__(self, points: Sequence[Point]) -> None:
        cases = [point.case for point in points]
        self.shortest = min(case.length for case in cases)
        self.longest = max(case.length for case in cases)
        self.models = {(case.shape, case.quantization) for case in cases}
        self.settings = {case.settings for case in cases}

    def beyond(self, case: Case) -> dict[str, float]:
        """The kinds of extrapolation of a case, and how far: in doublings of the length, else 1."""
        ways = {}
        if case.length > NEAR * self.longest:
            ways[LONGER] = math.log2(case.length / self.longest)
        if case.length * NEAR < self.shortest:
            ways[SHORTER] = math.log2(self.shortest / max(1.0, case.length))
        is_new = all(shape != case.shape for shape, _ in self.models)
        is_packed_anew = case.quantization not in {
            kind for shape, kind in self.models if is_new or shape == case.shape
        }
        others = {
            MODEL: is_new,
            QUANTIZATION: is_packed_anew,
            SETTINGS: case.settings not in self.settings,
        }
        return ways | {way: 1.0 for way, is_so in others.items() if is_so}


def by_phase(points: Sequence[Point]) -> dict[str, Known]:
    return {
        phase: Known(own) for phase, own in grouped(points, lambda point: point.case.phase).items()
    }


@dataclass(frozen=True)
class Learned:
    """A fit to this machine's runs, with its points and the errors of its predictions."""

    fit: Fit
    points: tuple[Point, ...]
    models: tuple[str, ...]
    n_runs: int

    @cached_property
    def known(self) -> dict[str, Known]:
        return by_phase(self.points)

    @cached_property
    def held_out(self) -> list[tuple[str, str, dict[str, float], float]]:
        """Points predicted from others: phase, group held out together, extrapolations, log(measured / predicted)."""
        found = []
        for group, held in _splits(self.points):
            is_held = set(map(id, held))
            kept = [point for point in self.points if id(point) not in is_held]
            known = by_phase(kept)
            fitted = fit(kept)
            for point in held:
                if point.case.phase in known:
                    error = math.log(point.seconds / fitted.seconds(point.case, point.costs))
                    ways = known[point.case.phase].beyond(point.case)
                    found.append((point.case.phase, group or str(point.case.setup), ways, error))
        return found

    def factor(self, case: Case) -> float:
        """The factor by which a range extends to both sides of the expected time."""
        disturbed = statistics.fmean(
            point.is_disturbed for point in self.points if point.case.phase == case.phase
        )
        ways = {
            INSIDE: 1.0,
            SESSION: 1.0,
            DISTURBED: disturbed,
            **self.known[case.phase].beyond(case),
        }
        variance = sum(distance * self.variance(case.phase, way) for way, distance in ways.items())
        return math.exp(DEVIATIONS * math.sqrt(variance))

    def fastest(self, phase: str) -> float:
        """The smallest ratio of a point to its kernels' least time: 1, or less if ceilings are too low."""
        alike = [point for point in self.points if point.case.phase == phase]
        return min(1.0, *(point.seconds / point.costs.kernels_s for point in alike))

    def variance(self, phase: str, way: str) -> float:
        """The variance of one kind: the mean over held-out groups and PRIOR, which counts as PRIOR_WEIGHT groups."""
        squares: dict[str, list[float]] = {}
        if way == SESSION:
            for point in (
                point
                for point in self.points
                if point.case.phase == phase and len(point.by_session) > 1
            ):
                n = len(point.by_session)
                for session, seconds in point.by_session.items():
                    squares.setdefault(session, []).append(
                        math.log(seconds / point.seconds) ** 2 * n / (n - 1)
                    )
        else:
            for of_phase, group, ways, error in self.held_out:
                if of_phase == phase and [*ways] == ([] if way == INSIDE else [way]):
                    squares.setdefault(group, []).append(error**2 / ways.get(way, 1.0))
        means = [statistics.fmean(group) for group in squares.values()]
        return (sum(means) + PRIOR_WEIGHT * PRIOR[way][phase] ** 2) / (len(means) + PRIOR_WEIGHT)


def _splits(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    """The groups to hold out: a name (empty: that of each point's setup) and the points."""
    lengths = sorted({point.n_prompt for point in points})
    lengths = sorted(
        {lengths[i * (len(lengths) - 1) // MOST_LENGTHS] for i in range(MOST_LENGTHS + 1)}
    )
    for n in lengths[1:-1]:
        of_length = [point for point in points if point.n_prompt == n]
        yield from (
            ("", alike) for alike in grouped(of_length, lambda point: point.case.setup).values()
        )
    for n in lengths[1:]:
        yield "", [point for point in points if point.n_prompt >= n]
        yield "", [point for point in points if point.n_prompt < n]
    for names in (("shape",), ("shape", "quantization"), ("settings",)):
        case_part = attrgetter(*names)
        alike = grouped(points, lambda point, part=case_part: part(point.case))  # type: ignore[misc]
        yield from ((str(values), held) for values, held in alike.items())


def fit(points: Sequence[Point]) -> Fit:
    """The coefficients with the least relative errors of the points; factors are at least 1."""
    rows = list[tuple[float, ...]]()
    for point in points:
        kernels_s, *layers = point.costs
        kernels = (kernels_s, 0.0) if point.case.phase == PREFILL else (0.0, kernels_s)
        rows.append((*kernels, *layers, point.seconds))
    rows += [(1.0, 0.0, 0.0, 0.0, PRIOR_FACTOR), (0.0, 1.0, 0.0, 0.0, PRIOR_FACTOR)]
    *columns, seconds = zip(*rows, strict=True)
    prefill, decode, step, value = stats.fit(columns, seconds, at_least=(1, 1, 0, 0))
    common = Fit(prefill, decode, step, value)
    differs: dict[tuple[object, ...], list[float]] = {}
    for point in points:
        ratio = point.seconds / common.seconds(point.case, point.costs)
        differs.setdefault(point.case.setup, [1.0]).append(ratio)
    own = {setup: statistics.geometric_mean(ratios) for setup, ratios in differs.items()}
    return dataclasses.replace(common, own=own)


def case_of(phase: str, length: float, model: Model, settings: Settings) -> Case:
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
    threads = settings.n_threads if phase == DECODE else settings.n_threads_batch
    layers = settings.n_gpu_layers if offload_of(model, settings) == "part" else None
    waits = settings.prefill_wait if phase == PREFILL else None
    moved = settings.n_cpu_moe, settings.kv_offload, settings.op_offload, waits
    types = settings.type_k, settings.type_v, settings.repack
    chosen = layers, threads, settings.n_ubatch, *types, settings.flash_attn != "off", *moved
    return Case(phase, length, shape, model.quantization, chosen)


def prompt_steps(
    n_tokens: int, settings: Settings, n_past: int = 0, n_outputs: int = 1
) -> list[Step]:
    """The steps of a prompt after n_past tokens, each of up to n_ubatch."""
    n_ubatch = max(1, settings.n_ubatch)
    sizes = [(first, min(n_ubatch, n_tokens - first)) for first in range(0, n_tokens, n_ubatch)]
    return [(n, n_past + first, n_outputs if first + n == n_tokens else 0) for first, n in sizes]


def costs_of(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    steps: Sequence[Step],
    layers: step_kernels.Layers | None = None,
    known: dict[Step, float] | None = None,
) -> Costs:
    """The costs of some steps; `known` are kernels' seconds of steps of this model. LabError for an unknown cost."""
    known = {} if known is None else known
    for step in steps:
        if step not in known:
            known[step] = step_kernels.parts(
                model, settings, ceilings, *step, layers=layers
            ).total.total_s
    n_layer = model.n_layer or 0
    width = (model.n_embd or 0) + (model.n_ff or 0)
    n_values = n_layer * sum(n for n, _, _ in steps) * width
    return Costs(sum(known[step] for step in steps), n_layer * len(steps), n_values)


def offload_of(model: Model, settings: Settings) -> str:
    """How much of a model is on a GPU: none, part, all."""
    if settings.n_gpu_layers == 0:
        return "none"
    return (
        "all"
        if settings.n_gpu_layers < 0 or settings.n_gpu_layers > (model.n_layer or 0)
        else "part"
    )


def is_plain(record: Record) -> bool:
    """Whether it is a timed run with steps that belongs to no experiment."""
    return record.run.is_timed and record.run.totals is None and record.run.lever is None


def learn(records: Sequence[Record], ceilings: Ceilings, offload: str = "none") -> Learned:
    """The fit to runs of this machine with the same offload and devices. LabError if there are too few."""
    alike = [
        one for one in records if is_plain(one) and offload_of(one.model, one.settings) == offload
    ]
    used = [(record.model, found) for record in alike if (found := _phases(record, ceilings))]
    runs = [run for _, found in used for run in found]
    by_length = grouped(runs, lambda run: (dataclasses.replace(run.case, length=0), run.n_prompt))
    points = tuple(map(_median, by_length.values()))
    if {point.case.phase for point in points} != {PREFILL, DECODE}:
        raise LabError(
            "There are too few runs of this machine to predict from. At least one with prefill and decode is needed, "
            "and ceilings for its weight types.",
            "Measure them: lab measure, then lab ceilings",
        )
    models = {f"{model.name} {model.quantization or ''}".strip() for model, _ in used}
    return Learned(fit(points), points, tuple(sorted(models)), len(used))


def _phases(record: Record, ceilings: Ceilings) -> list[Point]:
    """Prefill and the mean decode step of a record's runs, each as a point; none if it is unusable for the fit."""
    if not probing.hold_for(ceilings, probing.place_of_record(record)):
        return []
    model = record.model
    settings = record.settings
    found = list[Point]()
    layers = probing.layers_of(record)
    known = dict[Step, float]()  # the runs of a sweep share most of their steps
    is_disturbed = bool(disturbances.disturbances(record))
    for run in phases.by_length(record.run):
        steps = run.steps
        n = phases.n_prefill_steps(run)
        if min((*steps.n_tokens, run.n_prompt), default=0) < 1 or min(steps.n_past, default=-1) < 0:
            continue  # a file may hold anything
        times = [
            (ready - start) / 1e9
            for start, ready in zip(steps.start_ns, steps.ready_ns, strict=True)
        ]
        shapes = [*zip(steps.n_tokens[:n], steps.n_past[:n], [0] * (n - 1) + [1], strict=False)]
        measured = [(PREFILL, run.n_prompt, shapes, sum(times[:n]))]
        if len(times) > n:
            middle = round(statistics.fmean(steps.n_past[n:]))
            measured.append((DECODE, middle, [(1, middle, 1)], sum(times[n:]) / (len(times) - n)))
        for phase, length, shapes, seconds in measured:
            try:
                costs = costs_of(model, settings, ceilings, shapes, layers, known)
            except LabError:  # a type or thread count without a ceiling
                return []
            if min(costs.kernels_s, seconds, length) > 0:
                case = case_of(phase, length, model, settings)
                found.append(
                    Point(
                        run.n_prompt, case, costs, seconds, {record.session: seconds}, is_disturbed
                    )
                )
    return found


def _median(runs: Sequence[Point]) -> Point:
    """The median of one setup at one length, from the medians of sessions, so that each counts the same."""
    runs = [run for run in runs if not run.is_disturbed] or runs
    sessions = grouped(
        ((session, s) for run in runs for session, s in run.by_session.items()), lambda one: one[0]
    )
    by_session = {
        session: statistics.median(seconds for _, seconds in own)
        for session, own in sessions.items()
    }
    costs = Costs(*map(statistics.median, zip(*(run.costs for run in runs), strict=True)))
    case = dataclasses.replace(
        runs[0].case, length=statistics.median(run.case.length for run in runs)
    )
    seconds = statistics.median(by_session.values())
    return Point(runs[0].n_prompt, case, costs, seconds, by_session, runs[0].is_disturbed)


@dataclass(frozen=True)
class StepPrediction:
    """Predicts steps of one model under some settings, on the machine of the ceilings."""

    model: Model
    settings: Settings
    ceilings: Ceilings
    fit: Fit
    n_runs: int  # behind the fit

    def seconds(
        self, n_tokens: int, n_past: int, n_outputs: int, others: Sequence[cost.Span] = ()
    ) -> float | None:
        """Seconds of a step, as described by `cost.step`; None if its cost is unknown, or a kernel was not probed."""
        model = self.model
        settings = self.settings
        try:
            kernels = step_kernels.total(
                model, settings, self.ceilings, n_tokens, n_past, n_outputs, others
            )
        except LabError:
            return None
        n_all = n_tokens + sum(n for n, _ in others)
        n_layer = model.n_layer or 0
        share = min(1.0, math.log(n_all) / math.log(max(2, settings.n_ubatch)))
        own = [
            self.fit.own.get(case_of(phase, 1.0, model, settings).setup, 1.0)
            for phase in (DECODE, PREFILL)
        ]
        factor, own_factor = (  # a step of many tokens is like one of prefill
            math.exp((1 - share) * math.log(one) + share * math.log(many))
            for one, many in ((self.fit.decode_factor, self.fit.prefill_factor), own)
        )
        n_values = n_layer * n_all * ((model.n_embd or 0) + (model.n_ff or 0))
        return self.fit.at_least(Costs(kernels.total_s, n_layer, n_values), factor, own_factor)

    def prefill(self, n_tokens: int, n_past: int = 0, n_outputs: int = 1) -> float | None:
        """Seconds of a prompt of n_tokens after n_past, in steps of up to n_ubatch."""
        times = [
            self.seconds(*step) for step in prompt_steps(n_tokens, self.settings, n_past, n_outputs)
        ]
        return None if None in times else sum(seconds or 0.0 for seconds in times)

    def steps(self, script: Script) -> pd.DataFrame | None:
        """The steps of a script with predicted times: kind, start_s, end_s. None if a step cannot be predicted.

        In a shared cache every token's attention is computed over the cells of all sequences, and masked. The CPU's
        kernel for 64 and more tokens skips what is masked for a whole tile (ggml-cpu/ops.cpp, flash_attn_ext_tiled):
        the few tokens of the other sequences cost a tile over all of their cells.
        """
        import pandas as pd

        settings = self.settings
        now = 0.0
        rows = []
        positions = Counter[int]()
        is_flash = (settings.flash_attn_resolved or settings.flash_attn) != "off"
        is_tiled = settings.kv_unified and settings.n_gpu_layers == 0 and is_flash
        for operation in (one for one in script for _ in range(one.times)):
            start = now
            for ((n, n_past), *others), n_outputs in pieces(operation.parts, positions, settings):
                taken = self.seconds(n, n_past, n_outputs, others)
                if taken is None:
                    return None
                now += taken
                if is_tiled and others and n + len(others) >= TILE:
                    n_cells = sum(past for _, past in others)
                    now += step_kernels.total(
                        self.model, settings, self.ceilings, TILE, n_cells, 0
                    ).attention_s
            rows.append({"kind": operation.kind, "start_s": start, "end_s": now})
            positions.update({part.sequence: part.n_tokens for part in operation.parts})
        return pd.DataFrame(rows)

    def move(self, n_positions: int) -> float | None:
        """The least seconds of a copy, save or load of n_positions: read and written at the memory's best rate."""
        moved = cost.move(self.model, n_positions, self.settings.type_k, self.settings.type_v)
        return (
            None if moved is None else moved.n_bytes / step_kernels.roof(self.ceilings).gbps / 1e9
        )

    @property
    def basis(self) -> str:
        """The basis of the prediction, in a sentence."""
        runs = (
            f"{plural(self.n_runs, 'run')} of this machine"
            if self.n_runs
            else "no runs of this machine (lab measure)"
        )
        basis = f"Predicted from the ceilings of {self.ceilings.measured_at[:10]} and {runs}."
        return " ".join([basis, *probing.doubt_words(self.ceilings)])


def pieces(
    parts: Sequence[Part], positions: Mapping[int, int], settings: Settings
) -> Iterator[tuple[list[cost.Span], int]]:
    """What llama.cpp computes in one go of a step: a span of tokens for each sequence, and the number of outputs.

    In a shared cache it cuts a step every n_ubatch tokens, in the order of the parts (llama-batch.cpp, 0c1e570,
    split_simple). Separate caches get equally many tokens of each sequence (split_equal): first one of each, then the
    rest of the longest.
    """
    n_ubatch = max(1, settings.n_ubatch)
    start = 0
    left = [(positions[part.sequence], part.n_tokens, part.n_outputs) for part in parts]
    if len(parts) > 1 and not settings.kv_unified:
        yield [(1, past) for past, _, _ in left], sum(n_outputs >= n for _, n, n_outputs in left)
        left = [(past + 1, n - 1, min(n_outputs, n - 1)) for past, n, n_outputs in left if n > 1]
    while start < sum(n for _, n, _ in left):
        end = start + n_ubatch
        first = 0
        spans = list[cost.Span]()
        outputs = 0
        for past, n, n_outputs in left:
            low = max(start - first, 0)
            high = min(end - first, n)
            if low < high:
                spans.append((high - low, past + low))
                outputs += max(0, high - max(low, n - n_outputs))
            first += n
        yield spans, outputs
        start = end


def prediction_for(
    record: Record, known: Sequence[Ceilings], runs: Sequence[Record]
) -> StepPrediction | None:
    """The prediction for the setup of a record, from plain runs of other sessions; None without ceilings."""
    ceilings = probing.known(known, probing.place_of_record(record))
    others = [other for other in runs if other.session != record.session]
    return None if ceilings is None else taught_by(others, record, ceilings)


def taught_by(runs: Sequence[Record], record: Record, ceilings: Ceilings) -> StepPrediction:
    """The prediction for the setup of a record, from these runs, or from the ceilings alone if they are too few."""
    try:
        learned = learn(runs, ceilings, offload_of(record.model, record.settings))
    except LabError:
        return StepPrediction(record.model, record.settings, ceilings, fit([]), 0)
    return StepPrediction(record.model, record.settings, ceilings, learned.fit, learned.n_runs)
