"""What the runs of a machine teach about runs that were not made: a fit to points that each have a length and a setup.

A phase takes its kernels' least time, times a factor of at least 1 (one for prefill, one for decode), plus what every
layer costs in addition: per step (threads that meet) and per token (norms, activations, copies). No cost is negative.
A setup that has runs of its own also takes what these differ from that on average. All runs of one setup at one length
are one point: their median.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lab.analysis import disturbances
from lab.core import phases, stats
from lab.core.record import DECODE, OK, PREFILL, Ceilings, Model, Record, Run, Settings
from lab.errors import LabError
from lab.why import step_kernels, where
from lab.why.step_kernels import Layers, Parts
from lab.why.where import Where

PRIOR_FACTOR = 1.05
"""What the factor on kernels is taken to be in each phase: counts as one more point."""


Step = tuple[int, int, int]
"""n_tokens, n_past, n_outputs of a step."""


@dataclass(frozen=True)
class Case:
    """A phase of a run, as far as predictions differ.

    `length`: tokens of the prompt, of decode the positions that its tokens look back at.
    """

    phase: str
    length: float
    shape: tuple[object, ...]
    quantization: str | None
    settings: tuple[object, ...]

    @property
    def setup(self) -> tuple[object, ...]:
        """What lengths of one phase share that were measured alike."""
        return self.phase, self.shape, self.quantization, self.settings


@dataclass(frozen=True)
class Costs:
    """What a phase's time is made of: the columns of the fit. Of decode those of one step."""

    kernels_s: float
    layer_steps: float
    layer_values: float  # layers x tokens x (n_embd + n_ff)


@dataclass(frozen=True)
class Row:
    """One phase of one run."""

    session: str
    is_disturbed: bool
    n_prompt: int
    case: Case
    costs: Costs
    seconds: float


@dataclass(frozen=True)
class Point:
    """The median of the runs of one setup at one length: seconds of prefill, or of one decode step.

    Of runs that nothing disturbed, where there are such.
    """

    n_prompt: int
    case: Case
    costs: Costs
    seconds: float
    by_session: dict[str, float]
    is_disturbed: bool = False


@dataclass(frozen=True)
class Fit:
    """Seconds = factor x kernels + per_layer_step_s x layers x steps + per_layer_value_s x layers x tokens x width.

    A setup that was learned from takes `own` times that, but not less than its kernels.
    """

    prefill_factor: float
    decode_factor: float
    per_layer_step_s: float
    per_layer_value_s: float
    own: dict[tuple[object, ...], float] = dataclasses.field(default_factory=dict)

    def seconds(self, case: Case, costs: Costs) -> float:
        factor = self.prefill_factor if case.phase == PREFILL else self.decode_factor
        layers_s = self.per_layer_step_s * costs.layer_steps + self.per_layer_value_s * costs.layer_values
        return max(costs.kernels_s, self.own.get(case.setup, 1.0) * (factor * costs.kernels_s + layers_s))


@dataclass(frozen=True)
class Learned:
    """A fit to this machine's runs, and what it was fitted to."""

    fit: Fit
    points: tuple[Point, ...]
    models: tuple[str, ...]
    n_runs: int


def learn(records: Sequence[Record], ceilings: Ceilings, offload: str = "none") -> Learned:
    """What runs of this machine teach that had as much on the same devices. LabError where there are too few."""
    by_point: dict[tuple[Case, int], list[Row]] = {}
    models, n_runs = set(), 0
    for record in records:
        rows = _rows_of(record, ceilings, offload)
        if rows:
            n_runs += 1
            models.add(f"{record.model.name} {record.model.quantization or ''}".strip())
        for row in rows:
            by_point.setdefault((dataclasses.replace(row.case, length=0), row.n_prompt), []).append(row)
    points = tuple(map(_point, by_point.values()))
    if {point.case.phase for point in points} != {PREFILL, DECODE}:
        raise LabError(
            "There are too few runs of this machine to learn from: at least one with prefill and decode is needed, and "
            "ceilings for its weight types.",
            "Measure some: lab measure, then lab ceilings",
        )
    return Learned(fit(points), points, tuple(sorted(models)), n_runs)


def fit(points: Sequence[Point]) -> Fit:
    """The coefficients that bring the points' seconds nearest, by relative error; factors are at least 1.

    How a setup differs from them is the geometric mean of its points, and of one point more that does not differ.
    """
    rows = [(_columns(point.case.phase, point.costs), point.seconds) for point in points]
    rows += [((1.0, 0.0, 0.0, 0.0), PRIOR_FACTOR), ((0.0, 1.0, 0.0, 0.0), PRIOR_FACTOR)]
    columns = [*zip(*(row for row, _ in rows), strict=True)]
    prefill, decode, step, value = stats.fit(columns, [seconds for _, seconds in rows], at_least=(1, 1, 0, 0))
    common = Fit(prefill, decode, step, value)
    differs: dict[tuple[object, ...], list[float]] = {}
    for point in points:
        ratio = point.seconds / common.seconds(point.case, point.costs)
        differs.setdefault(point.case.setup, [1.0]).append(ratio)
    return dataclasses.replace(
        common, own={setup: statistics.geometric_mean(ratios) for setup, ratios in differs.items()}
    )


def case_of(phase: str, length: float, model: Model, settings: Settings) -> Case:
    """The case that a phase of a model is, under some settings."""
    shape = model.arch, model.n_layer, model.n_embd, model.n_ff, model.n_head, model.n_head_kv, model.n_vocab
    threads = settings.n_threads if phase == DECODE else settings.n_threads_batch
    layers = settings.n_gpu_layers if offload_of(model, settings) == "part" else None
    split = settings.split_mode, settings.tensor_split, settings.main_gpu, settings.n_cpu_moe, settings.override_tensor
    moved = settings.kv_offload, settings.op_offload, settings.prefill_wait if phase == PREFILL else None
    types = settings.type_k, settings.type_v, settings.repack
    chosen = layers, threads, settings.n_ubatch, *types, settings.flash_attn != "off", *split, *moved
    return Case(phase, length, shape, model.quantization, chosen)


def costs_of(
    model: Model, steps: Sequence[Step], parts_of: Callable[[Step], Parts | None], overlaps: bool = False
) -> Costs | None:
    """Of some steps. None where what a step's kernels cost is not known. `overlaps`: the devices work as a pipeline."""
    parts = [split for split in map(parts_of, steps) if split is not None]
    if len(parts) < len(steps):
        return None
    kernels_s = step_kernels.least_s(parts, overlaps)
    layers, width = model.n_layer or 0, (model.n_embd or 0) + (model.n_ff or 0)
    return Costs(kernels_s, layers * len(steps), layers * sum(n for n, _, _ in steps) * width)


def step_costs(
    model: Model, settings: Settings, ceilings: Ceilings, layers: Layers | None = None
) -> Callable[[Step], Parts | None]:
    """What a step's kernels cost, remembered: the runs that a sweep stands for share most of their steps."""

    @cache
    def parts_of(step: Step) -> Parts | None:
        return step_kernels.parts(model, settings, ceilings, *step, layers=layers)

    return parts_of


def overlaps(settings: Settings, ceilings: Ceilings) -> bool:
    """Whether several devices work at steps of a prompt at the same time."""
    return bool(ceilings.others) and not phases.times_prefill_steps(settings)


def offload_of(model: Model, settings: Settings) -> str:
    """How much of a model is on a GPU: none, part, all."""
    if settings.n_gpu_layers == 0:
        return "none"
    return "all" if settings.n_gpu_layers < 0 or settings.n_gpu_layers > (model.n_layer or 0) else "part"


def _rows_of(record: Record, ceilings: Ceilings, offload: str) -> list[Row]:
    """The phases of a record's run, if it can be learned from."""
    run = record.run
    measured = run.status == OK and not run.warmup and run.totals is None and run.lever is None
    here = where.same(record.machine, ceilings.machine) and offload_of(record.model, record.settings) == offload
    if not (measured and here and _is_on(record, ceilings)):
        return []
    parts_of = step_costs(record.model, record.settings, ceilings, where.layers_of(record))
    try:
        return [row for part in phases.by_length(run) for row in _rows(record, part, parts_of, ceilings)]
    except LabError:  # a type or thread count without a ceiling
        return []


def _is_on(record: Record, ceilings: Ceilings) -> bool:
    """Whether a run was made on the devices that ceilings are of."""
    parts = (ceilings, *(ceilings.others or ()))
    is_same = where.same_devices(
        where.of_record(record), Where(ceilings.machine, tuple(where.measured_on(one) for one in parts))
    )
    return is_same and all(where.repacks_alike(one, record.settings.repack) for one in parts)


def _rows(record: Record, run: Run, parts_of: Callable[[Step], Parts | None], ceilings: Ceilings) -> Iterator[Row]:
    """A run's prefill and its mean decode step."""
    model, settings, steps = record.model, record.settings, run.steps
    if min((*steps.n_tokens, run.n_prompt), default=0) < 1 or min(steps.n_past, default=-1) < 0:
        return  # a file may hold anything
    n_prefill = phases.n_prefill_steps(run)
    times = [(ready - start) / 1e9 for start, ready in zip(steps.start_ns, steps.ready_ns, strict=True)]
    shapes = [(steps.n_tokens[i], steps.n_past[i], int(i == n_prefill - 1)) for i in range(n_prefill)]
    is_disturbed = _is_disturbed(record)
    parts = [(PREFILL, run.n_prompt, shapes, sum(times[:n_prefill]))]
    if n_decode := len(times) - n_prefill:
        middle = round(statistics.fmean(steps.n_past[n_prefill:]))
        parts.append((DECODE, middle, [(1, middle, 1)], sum(times[n_prefill:]) / n_decode))
    for phase, length, shapes, seconds in parts:
        costs = costs_of(model, shapes, parts_of, phase == PREFILL and overlaps(settings, ceilings))
        if costs is not None and min(costs.kernels_s, seconds, length) > 0:
            case = case_of(phase, length, model, settings)
            yield Row(record.session, is_disturbed, run.n_prompt, case, costs, seconds)


def _is_disturbed(record: Record) -> bool:
    return bool(disturbances.disturbances(record))


def _point(rows: Sequence[Row]) -> Point:
    """The median of one setup at one length: of each session first, so that none outweighs another."""
    rows = [row for row in rows if not row.is_disturbed] or rows
    sessions = {row.session for row in rows}
    by_session = {name: statistics.median(row.seconds for row in rows if row.session == name) for name in sessions}
    costs = Costs(*map(statistics.median, zip(*(dataclasses.astuple(row.costs) for row in rows), strict=True)))
    case = dataclasses.replace(rows[0].case, length=statistics.median(row.case.length for row in rows))
    return Point(
        rows[0].n_prompt, case, costs, statistics.median(by_session.values()), by_session, rows[0].is_disturbed
    )


def _columns(phase: str, costs: Costs) -> tuple[float, float, float, float]:
    kernels = (costs.kernels_s, 0.0) if phase == PREFILL else (0.0, costs.kernels_s)
    return *kernels, costs.layer_steps, costs.layer_values
