"""Predicts requests: here from the kernels' ceilings, on other devices from their datasheets.

On this machine the expected time is fitted to earlier runs (learning.py). For a device that was not
measured it is learned from what others published (datasheet.py). The range comes from the errors of
predictions of what was left out. Several users decode together in one step, which reads the weights
once and each user's cache: its time is that of a single user's step times the ratio of their
predicted times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from lab.core import cost, memory, results, shown
from lab.core.asked_settings import flash_of_architecture
from lab.core.files import listed
from lab.core.lists import plural
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.core.stats import Range
from lab.errors import LabError
from lab.models import asked_devices, catalog, named, obtain, synthetic
from lab.models.devices import DeviceSheet
from lab.process import no_engine
from lab.process.no_engine import NoEngine
from lab.process.worker import Worker
from lab.roofline import (
    conditioning,
    datasheet,
    kernel_rates,
    learning,
    probing,
    step_kernels,
)
from lab.roofline.conditioning import ComparedRate
from lab.roofline.learning import Coverage, Learned, LearnedCase, Step
from lab.roofline.probes import used_types
from lab.roofline.step_kernels import StepKernels
from lab.roofline.step_prediction import StepPrediction
from lab.runner import builds
from lab.runner.cases import Plan
from lab.runner.placement import memory_for
from lab.runner.plan import make_plan

HERE = asked_devices.HERE
MOST_TOKENS = 10_000_000  # the longest context that can be predicted
WITHIN = 0.90  # the share of requests that a range is to hold
# Runs faster than their kernels' ceilings by this factor: the ceilings are too low
TOO_FAST = 1.1

UNKNOWN: Range = (math.nan, math.nan)


class PhaseTime(NamedTuple):
    """Seconds of a prefill, or of a token of the answer: the theoretical limit, the expected time
    and the range.

    A limit or an expected time that is not known is None, such a range NaN.
    """

    limit_s: float | None
    expected_s: float | None
    range_s: Range

    @property
    def shown_s(self) -> float:
        """The seconds that tables and pictures show; NaN without a range."""
        return expected_or_middle(self.expected_s, self.range_s)

    def longer(self, wait_s: float | None, waits_s: Range) -> PhaseTime:
        """With a wait and its range beside it; the wait may be unknown."""
        expected_s = None
        if self.expected_s is not None and wait_s is not None:
            expected_s = self.expected_s + wait_s
        fastest_s, slowest_s = self.range_s
        return PhaseTime(
            self.limit_s, expected_s, (fastest_s + waits_s[0], slowest_s + waits_s[1])
        )


@dataclass(frozen=True)
class Extrapolation:
    """A phase that is predicted beyond what was measured; `factor` widens its range."""

    case: LearnedCase
    coverage: Coverage
    factor: float

    @property
    def kinds(self) -> dict[str, float]:
        return self.coverage.extrapolations(self.case)


@dataclass(frozen=True)
class Shortage:
    """Why a request does not fit into memory, and for one user what would.

    `quantization`: the largest one of the model that fits. `longest`: the tokens that fit of this.
    """

    needed_bytes: int
    available_bytes: float
    users: int
    quantization: str | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Prediction:
    """A request on a device: the times of its prefill, and of each further token.

    `device` is None for this machine; `learned` and `ceilings` are what its prediction comes from.
    `is_measured`: the range is that of runs on this machine. `chance`: the probability that it
    keeps some limits.
    """

    model: Model
    n_prompt: int
    n_gen: int
    prefill: PhaseTime
    token: PhaseTime
    extrapolations: tuple[Extrapolation, ...] = ()
    doubts: tuple[str, ...] = ()  # some of core/shown.py
    shortage: Shortage | None = None  # then no times are shown
    needed_bytes: int = 0
    memory_bytes: float | None = None
    room: float | None = None  # share of the file that fits; None: all, or not asked
    users: int = 1
    device: DeviceSheet | None = None
    own_rates: tuple[ComparedRate, ...] = ()  # what the user measured on the device
    learned: Learned | None = None
    ceilings: Ceilings | None = None
    is_measured: bool = False
    chance: float | None = None

    @property
    def name(self) -> str:
        return HERE if self.device is None else self.device.name

    @property
    def about(self) -> str:
        """The device in words."""
        return HERE if self.device is None else self.device.about

    @property
    def label(self) -> str:
        """The model and its quantization."""
        return learning.model_label(self.model)

    @property
    def prefill_s(self) -> Range:
        """The range of the seconds of prefill."""
        return self.prefill.range_s

    @property
    def tpot_s(self) -> Range:
        """The range of the seconds of each further token."""
        return self.token.range_s

    @property
    def prefill_limit_s(self) -> float | None:
        return self.prefill.limit_s

    @property
    def tpot_limit_s(self) -> float | None:
        return self.token.limit_s

    @property
    def prefill_expected_s(self) -> float | None:
        return self.prefill.expected_s

    @property
    def tpot_expected_s(self) -> float | None:
        return self.token.expected_s

    @property
    def e2e(self) -> PhaseTime:
        """The whole request."""
        n_further = self.n_gen - 1
        fastest_s = self.prefill_s[0] + n_further * self.tpot_s[0]
        slowest_s = self.prefill_s[1] + n_further * self.tpot_s[1]
        expected_s = None
        if self.prefill.expected_s is not None and self.token.expected_s is not None:
            expected_s = self.prefill.expected_s + n_further * self.token.expected_s
        return PhaseTime(None, expected_s, (fastest_s, slowest_s))

    @property
    def e2e_s(self) -> Range:
        """The range of the seconds of the whole request."""
        return self.e2e.range_s

    @property
    def tps_expected(self) -> float | None:
        """Expected tokens per second of each user."""
        return None if self.token.expected_s is None else 1 / self.token.expected_s

    @property
    def tps(self) -> Range:
        """Tokens per second of each user."""
        return 1 / self.tpot_s[1], 1 / self.tpot_s[0]

    @property
    def is_known(self) -> bool:
        """Whether it fits and has times of both phases."""
        return self.shortage is None and not math.isnan(self.e2e_s[0])


def expected_or_middle(expected: float | None, ends: Range) -> float:
    """The expected value, or the geometric mean of a range's ends; NaN without a range."""
    if expected is None or math.isnan(ends[0]):
        return math.sqrt(ends[0] * ends[1])
    return expected


def check(n_prompt: int, n_gen: int, users: int) -> None:
    """LabError for a request that cannot be predicted."""
    n_ctx = n_prompt + n_gen
    if n_ctx > MOST_TOKENS:
        raise LabError(
            f"{plural(n_ctx, 'token')} are too many.", f"Give at most {MOST_TOKENS:,}."
        )
    if n_gen < 2:
        raise LabError(f"--gen {n_gen} leaves nothing to decode.", "Give at least --gen 2.")
    if users < 1:
        raise LabError(f"--sequences {users} is not possible.", "Give 1 or more.")


def middle_of(n_prompt: int, n_gen: int) -> int:
    """The position of the middle token of an answer."""
    return n_prompt + max(0, n_gen - 2) // 2


# A device of the datasheets


@dataclass(frozen=True)
class OnDevice:
    """What predictions for a device of the datasheets are made from: as published runs on such
    devices do.

    `compared` are rates that the user measured on this device: they narrow the ranges.
    """

    model: Model
    settings: Settings
    device: DeviceSheet
    compared: Sequence[tuple[ComparedRate, datasheet.DatasheetCase]] = ()

    def request(self, n_prompt: int, n_gen: int, users: int = 1) -> Prediction:
        """The prediction of a request."""
        middle = middle_of(n_prompt, n_gen)
        prompt_case = self.case_of(PREFILL, n_prompt)
        token_case = self.case_of(DECODE, middle)
        row = Prediction(
            self.model,
            n_prompt,
            n_gen,
            prefill=self.phase_of(prompt_case),
            token=self.phase_of(token_case),
            device=self.device,
            own_rates=tuple(of_rate for of_rate, _ in self.compared),
        )
        if users > 1:
            one_s, all_s, limit_s = self.steps_of_users(token_case, middle, users)
            row = for_users(row, users, one_s, all_s, limit_s)
        return with_memory(row, self.settings, self.device.memory_bytes)

    def case_of(self, phase: str, length: int) -> datasheet.DatasheetCase:
        return datasheet.case_for(self.model, self.settings, self.device, phase, length)

    def phase_of(self, case: datasheet.DatasheetCase) -> PhaseTime:
        """The time of a phase, narrowed by the user's rates."""
        return published_phase(case, conditioning.condition_for(case, self.compared))

    def steps_of_users(
        self, token_case: datasheet.DatasheetCase, position: int, users: int
    ) -> tuple[float | None, float | None, float | None]:
        """The expected seconds of a step of one user and of all, and the limit of the latter."""
        types = self.settings.cache_types
        cases = []
        for n_users in (1, users):
            parts = datasheet.parts_of_users(self.model, self.device, position, types, n_users)
            cases.append(dataclasses.replace(token_case, parts=parts))
        published = datasheet.learned_for(token_case)
        one_s, all_s = (published.expected_s(case) for case in cases)
        return one_s, all_s, cases[-1].least_s


def published_phase(
    case: datasheet.DatasheetCase, own: datasheet.Condition | None = None
) -> PhaseTime:
    """The time of a phase by what others published; its range does not go below the limit."""
    learned = datasheet.learned_for(case)
    limit_s = case.least_s
    expected_s = learned.expected_s(case, own)
    if not limit_s or not expected_s:
        return PhaseTime(limit_s, expected_s, UNKNOWN)
    fast, slow = learned.range(case, own)
    return PhaseTime(limit_s, expected_s, (max(limit_s, fast * expected_s), slow * expected_s))


def for_users(
    row: Prediction,
    users: int,
    one_s: float | None,
    all_s: float | None,
    limit_s: float | None,
) -> Prediction:
    """A prediction for several users, whose step takes all_s where one user's step takes one_s."""
    expected_s = None
    range_s = UNKNOWN
    if one_s and all_s and limit_s:
        slower = all_s / one_s
        if row.token.expected_s is not None:
            expected_s = max(limit_s, slower * row.token.expected_s)
        fastest_s, slowest_s = row.tpot_s
        range_s = (max(limit_s, slower * fastest_s), slower * slowest_s)
    token = PhaseTime(limit_s, expected_s, range_s)
    return dataclasses.replace(row, users=users, token=token)


# This machine


@dataclass(frozen=True)
class Here:
    """What predictions for this machine are made from: a setup, its ceilings, and its runs."""

    model: Model
    settings: Settings
    ceilings: Ceilings
    learned: Learned

    @cached_property
    def roof(self) -> kernel_rates.Roof:
        machine = self.ceilings.machine
        layers = probing.layers(machine, self.model, self.settings)
        return kernel_rates.roof(self.ceilings, layers)

    def limit_s(self, step: Step, other_spans: Sequence[cost.Span] = ()) -> float:
        """The least seconds of a step, by the machine's best rates."""
        settings = self.settings
        types = settings.cache_types
        work = cost.step(self.model, *step, *types, other_spans)
        work = step_kernels.known(work, self.model)
        return max(work.n_bytes / self.roof.gbps, work.flops / self.roof.gflops) / 1e9

    def case_of(self, phase: str, length: int) -> LearnedCase:
        return learning.case_of(phase, float(length), self.model, self.settings)

    def phase_time(self, case: LearnedCase, steps: Sequence[Step]) -> PhaseTime:
        """The time of a phase. Neither the expected time nor the range goes below the limit."""
        learned = self.learned
        limit_s = sum(self.limit_s(step) for step in steps)
        costs = learning.costs_of(StepKernels(self.model, self.settings, self.ceilings), steps)
        expected_s = max(limit_s, learned.fit.seconds(case, costs))
        factor = learned.factor(case)
        fastest_s = max(limit_s, expected_s / factor * learned.fastest(case.phase))
        return PhaseTime(limit_s, expected_s, (fastest_s, expected_s * factor))

    def extrapolations(self, cases: Sequence[LearnedCase]) -> tuple[Extrapolation, ...]:
        """Of these phases those beyond what was measured."""
        beyond = []
        for case in cases:
            coverage = self.learned.coverage[case.phase]
            if coverage.extrapolations(case):
                beyond.append(Extrapolation(case, coverage, self.learned.factor(case)))
        return tuple(beyond)

    def doubts(self, phase: str) -> tuple[str, ...]:
        """The doubts of a phase's points."""
        disturbed = [point.is_disturbed for point in self.learned.points_of(phase)]
        doubts = shown.of_runs(len(disturbed), sum(disturbed), 0)
        if self.learned.fastest(phase) < 1 / TOO_FAST:
            doubts += (shown.ABOVE,)
        return doubts

    def request(self, n_prompt: int, n_gen: int, users: int = 1) -> Prediction:
        """The prediction of a request."""
        middle = middle_of(n_prompt, n_gen)
        prompt_case = self.case_of(PREFILL, n_prompt)
        token_case = self.case_of(DECODE, middle)
        prefill = self.phase_time(prompt_case, learning.prompt_steps(n_prompt, self.settings))
        token = self.phase_time(token_case, [Step(1, middle, 1)])
        extrapolations = self.extrapolations([prompt_case, token_case])
        doubts = [probing.doubts(self.ceilings), self.doubts(PREFILL), self.doubts(DECODE)]
        if extrapolations:
            doubts.append((shown.EXTRAPOLATED,))
        row = Prediction(
            self.model,
            n_prompt,
            n_gen,
            prefill,
            token,
            extrapolations=extrapolations,
            doubts=shown.all_of(doubts),
            learned=self.learned,
            ceilings=self.ceilings,
        )
        if users == 1:
            return row
        other_spans = [(1, middle)] * (users - 1)
        fit = self.learned.fit
        steps = StepPrediction(
            self.model, self.settings, self.ceilings, fit, self.learned.n_runs
        )
        one_s = steps.seconds(1, middle, 1)
        all_s = steps.seconds(1, middle, users, other_spans)
        limit_s = self.limit_s(Step(1, middle, users), other_spans)
        return for_users(row, users, one_s, all_s, limit_s)


class PredictionEvidence(NamedTuple):
    """What a folder of results holds to predict from."""

    records: Sequence[Record] = ()
    ceilings: Sequence[Ceilings] = ()


def evidence_in(folder: Path) -> PredictionEvidence:
    """The runs and ceilings of a folder; none if it is missing."""
    if not listed(folder, "*.jsonl"):
        return PredictionEvidence()
    contents = results.read([folder])
    ceilings = dict.fromkeys([*contents.ceilings, *probing.kept(folder)])
    return PredictionEvidence(contents.records, list(ceilings))


def on_this_machine(
    plan: Plan, lengths: Sequence[int], n_gen: int, users: int, evidence: PredictionEvidence
) -> list[Prediction]:
    """Requests on this machine, one for each prompt length. LabError without ceilings or runs."""
    model = plan.model
    settings = plan.settings
    place = probing.place_of(plan.machine, model, settings)
    ceilings = probing.need(evidence.ceilings, place, HERE, used_types(model))
    offload = learning.offload_of(model, settings)
    learned = learning.learn(evidence.records, ceilings, offload)
    here = Here(model, settings, ceilings, learned)
    rows = [here.request(n_prompt, n_gen, users) for n_prompt in lengths]
    available = memory_for(plan)
    system_info = plan.machine.system_info
    return [with_memory(row, settings, available, system_info) for row in rows]


def plan_for(
    model: str,
    settings: Mapping[str, Any],
    watch: obtain.ShowTransfer = obtain.silently,
) -> Plan:
    """This machine and the settings, for a model (a SPEC); its file is not needed.

    A model whose file cannot be read is what its name tells (lab/models/named.py). Where llama.cpp
    is not installed yet, this machine has no devices. With automatic placement all layers are on
    the devices. Libraries that
    LLAMA_CPP_LIB_PATH names, and that cannot be used, are no problem: nothing runs.
    """
    if settings.get("lib") is None and builds.problem_of_variable():
        settings = {**settings, "lib": builds.INSTALLED}
    # The plan finds the machine and its settings: any shape serves, and no file is read.
    any_shape = f"synthetic:{catalog.DEFAULT}"
    with Worker() if no_engine.is_installed() else cast(Worker, NoEngine()) as worker:
        try:
            shape = obtain.find(worker, model, watch)
        except LabError as problem:
            shape = named.need_named(model, problem)
        plan = make_plan(worker, [1], 1, 1, any_shape, watch=None, **settings)
    chosen = plan.settings
    is_automatic = not isinstance(settings.get("n_gpu_layers"), int)
    if chosen.n_gpu_layers and is_automatic and shape.n_layer is not None:
        chosen = dataclasses.replace(chosen, n_gpu_layers=shape.n_layer + 1)
    chosen = dataclasses.replace(chosen, flash_attn_resolved=flash_of_architecture(shape.arch))
    return dataclasses.replace(plan, model=shape, settings=chosen)


def model_called(spec: str) -> Model:
    """The model of a SPEC, from its file or its shape."""
    return plan_for(spec, {}).model


def request_on(device: str, model: str, n_prompt: int, n_gen: int, folder: Path) -> Prediction:
    """A request on a device, or with "here" on this machine from the results in a folder.

    `device` is a name, words, or a datasheet of the lessons, whose rates narrow the ranges.
    LabError for an unknown name, and if "here" lacks ceilings or runs.
    """
    check(n_prompt, n_gen, 1)
    plan = plan_for(model, {})
    if device == "here":
        return on_this_machine(plan, [n_prompt], n_gen, 1, evidence_in(folder))[0]
    sheet = asked_devices.device_called(device)
    rates = conditioning.rates_of_sheet(sheet)
    compared = conditioning.compare(rates, model_called, plan.settings, sheet)
    return OnDevice(plan.model, plan.settings, sheet, compared).request(n_prompt, n_gen)


# Memory


def memory_bytes(
    model: Model,
    settings: Settings,
    n_ctx: int,
    users: int = 1,
    system_info: str | None = None,
) -> int:
    """About how many bytes a context of n_ctx tokens for each user needs, weights included."""
    n_cells = users * (n_ctx if settings.kv_unified else memory.padded(n_ctx))
    shared = dataclasses.replace(settings, n_ctx=n_cells, n_seq_max=users)
    return memory.of_context(model, shared, system_info).total_bytes


def with_memory(
    row: Prediction,
    settings: Settings,
    available: float | None,
    system_info: str | None = None,
) -> Prediction:
    """The prediction with the bytes it needs and has, and the shortage if they do not suffice."""
    n_ctx = row.n_prompt + row.n_gen
    needed = memory_bytes(row.model, settings, n_ctx, row.users, system_info)
    row = dataclasses.replace(row, needed_bytes=needed, memory_bytes=available)
    if available is None or needed <= available:
        return row
    shortage = Shortage(needed, available, row.users)
    if row.users == 1:
        shortage = dataclasses.replace(
            shortage,
            quantization=quantization_that_fits(
                row.model, settings, n_ctx, available, system_info
            ),
            longest=memory.longest(row.model, round(available), settings, system_info),
        )
    return dataclasses.replace(row, shortage=shortage)


def quantization_that_fits(
    model: Model,
    settings: Settings,
    n_ctx: int,
    available: float,
    system_info: str | None = None,
) -> str | None:
    """The largest quantization of the catalog with which a context of n_ctx tokens fits."""
    entry = catalog.entries().get(model.name)
    if entry is None:
        return None
    sizes = {}
    for name, packed in synthetic.by_quantization(entry).items():
        size = memory_bytes(packed, settings, n_ctx, system_info=system_info)
        if size <= available:
            sizes[name] = size
    return max(sizes, key=lambda name: sizes[name], default=None)
