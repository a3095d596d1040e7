"""What `lab tune` can choose: the settings that this machine, build and model can have."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from lab.app.options import seconds_of
from lab.core.asked_settings import (
    AUTO,
    SLEEP,
    check_number,
    defaults,
    flash_of_architecture,
    table,
)
from lab.errors import LabError
from lab.features.tune.choices import LOSSY, NO_CHANGE, Choice, TunedPhase, phases_of
from lab.features.tune.lines import CONFIRM, GOALS, REQUEST, SEARCH, TPOT
from lab.features.tune.search import Search
from lab.models import catalog
from lab.process.setup import BOUNDED_SPINS
from lab.process.worker import Worker
from lab.runner import batches, machine
from lab.runner.cases import Plan
from lab.runner.plan import make_plan

BUDGET = "10min"
PROMPT_LEN = 1000
GEN = 200
MOST_CHOICES = 600
MOST_BESIDE = 64
N_SEARCH_GEN = 48
"""Tokens that a run of the search generates at most: its time per token stands for the rest."""
UBATCHES = (64, 128, 256, 512, 1024, 2048)
# llama.cpp packs the values of a cache only with flash attention
PACKED = ("flash_attn", "off")

Space = Mapping[str, Sequence[object]]  # the values to try of each setting


@dataclass(frozen=True)
class TuningRequest:
    """What was asked: lengths, users and the settings that stay fixed."""

    goal: str
    n_prompt: int
    n_gen: int
    n_users: int
    settings: Mapping[str, Any]

    def plan(self, worker: Worker, changes: Mapping[str, object], part: str) -> Plan:
        """One run with some settings changed, in a part of the session."""
        changed = {**self.settings, **changes}
        n_gen = min(self.n_gen, N_SEARCH_GEN) if part == SEARCH else self.n_gen
        if self.n_users > 1:
            plan = batches.plan(
                worker, str(self.n_users), str(self.n_prompt), max(2, n_gen), 1, **changed
            )
        else:
            plan = make_plan(worker, [self.n_prompt], n_gen, 1, **changed)
        return dataclasses.replace(plan, part=part, n_repeat=1, may_change_repeats=False)


@dataclass(frozen=True)
class TunePlan:
    """What will be searched, from a default."""

    budget_s: float
    request: TuningRequest
    default: Plan  # of the whole request
    choices: tuple[Choice, ...]
    phases: tuple[TunedPhase, ...]
    n_beside: int = 0  # busy programs that run during all of it

    def plan(self, worker: Worker, choice: Choice, part: str) -> Plan:
        """The plan of a choice. Threads of decode alone leave those of prefill as they are."""
        changes = dict(choice)
        if "threads" in changes and not self.request.settings.get("threads_batch"):
            changes.setdefault("threads_batch", self.default.settings.n_threads_batch)
        return self.request.plan(worker, changes, part)


def plan(
    worker: Worker,
    prompt_len: int = PROMPT_LEN,
    gen: int = GEN,
    model: str = catalog.DEFAULT,
    *,
    goal: str = REQUEST,
    sequences: int = 1,
    budget: str | float = BUDGET,
    allow_lossy: bool = False,
    beside: int = 0,
    **settings: Any,
) -> TunePlan:
    """Find out what can be chosen. LabError if nothing is left, or if the default is impossible."""
    budget_s = seconds_of(budget)
    if goal not in GOALS:
        raise LabError(f"--goal {goal} is not known.", f"Choose one of {', '.join(GOALS)}.")
    if goal == TPOT and gen < 2:
        raise LabError(
            "--goal tpot needs at least two generated tokens.", "Use --gen 2 or more."
        )
    check_number("sequences", sequences, batches.MOST_SEQUENCES)
    check_number("beside", beside, MOST_BESIDE, 0)
    request = TuningRequest(goal, prompt_len, gen, sequences, {**settings, "model": model})
    default = request.plan(worker, {}, CONFIRM)
    if default.refused:
        reasons = " ".join(default.refused.values())
        raise LabError(reasons, "Use a shorter prompt or a smaller model.")
    phases = phases_of(goal, gen, sequences > 1)
    tune_plan = TunePlan(budget_s, request, default, (), phases, beside)
    values = space(default, allow_lossy, beside)
    values["flash_attn"] = other_attention(worker, default)
    possible = possible_values(worker, tune_plan, values)
    candidates = itertools.islice(combinations(possible), MOST_CHOICES)
    choices = Search(candidates, phases).choices[1:]
    if not choices:
        raise LabError(
            "There is no setting left to choose.",
            "Give fewer settings: those that you give stay fixed.",
        )
    return dataclasses.replace(tune_plan, choices=tuple(choices))


def possible_values(worker: Worker, plan: TunePlan, values_of: Space) -> list[Choice]:
    """For each setting that was not given, the values that can be planned and change something.

    Settings that change the output come last.
    """
    searched = plan.plan(worker, NO_CHANGE, SEARCH)
    names = sorted(values_of, key=lambda name: (name in LOSSY, name))
    possible: list[Choice] = []
    for name in names:
        values = []
        if not is_given(name, plan.request.settings):
            for value in values_of[name]:
                if is_possible(worker, plan, searched, (name, value)):
                    values.append((name, value))
        if values:
            possible.append(tuple(values))
    return possible


def is_given(name: str, settings: Mapping[str, object]) -> bool:
    return name in table() and name in settings and settings[name] != defaults()[name]


def is_possible(
    worker: Worker, plan: TunePlan, searched: Plan, setting: tuple[str, object]
) -> bool:
    """Whether a setting alone can be planned and changes something.

    Some builds, machines and models refuse it.
    """
    try:
        changed = plan.plan(worker, (setting,), SEARCH)
    except LabError:
        return False
    is_change = (changed.settings, changed.file) != (searched.settings, searched.file)
    return is_change and not changed.refused


def combinations(values: list[Choice]) -> Iterator[Choice]:
    """All combinations of one value of some settings; those with the fewest changes first."""
    for n_changes in range(1, len(values) + 1):
        for settings in itertools.combinations(values, n_changes):
            for choice in itertools.product(*settings):
                has_packed_values = "cache_type_v" in map(itemgetter(0), choice)
                if not (has_packed_values and PACKED in choice):
                    yield choice


def space(default: Plan, allow_lossy: bool, n_beside: int = 0) -> dict[str, Sequence[object]]:
    """The values to try of each setting: what this machine and this model can have."""
    settings = default.settings
    n_layer = default.model.n_layer or 0
    devices = machine.used(default.machine, settings)
    has_layers_on_cpu = not devices or settings.n_gpu_layers <= n_layer
    values: dict[str, Sequence[object]] = {
        "ubatch": ubatches(default),
        "mmap": [False],
    }
    if has_layers_on_cpu:
        values["threads"] = other_threads(settings.n_threads)
        values["threads_batch"] = other_threads(settings.n_threads_batch)
        values["repack"] = [False]
        if n_beside:
            values["wait"] = [BOUNDED_SPINS, SLEEP]
    if devices:
        values["n_gpu_layers"] = [0, n_layer // 2]
        values["kv_offload"] = [False]
        if settings.n_gpu_layers <= n_layer or default.model.n_expert:
            values["op_offload"] = [False]
        if len(devices) > 1:
            values["device"] = [devices[0].name]
        if default.model.n_expert:
            values["n_cpu_moe"] = [n_layer // 2, n_layer]
    if allow_lossy:
        values |= lossy_values(default)
    return values


def other_attention(worker: Worker, default: Plan) -> list[str]:
    """The kind of attention that the default does not use; both if nothing says which it uses."""
    if flash_of_architecture(default.model.arch):
        return []
    used = attention_used(worker, default)
    return [value for value in ("off", "on") if value != used]


def attention_used(worker: Worker, default: Plan) -> str | None:
    """Flash attention of the default: on or off; None if llama.cpp does not say what it chose.

    Of auto the CPU makes on. A device may have no kernel for it: only a context tells.
    """
    settings = default.settings
    if settings.flash_attn != AUTO:
        return settings.flash_attn
    if not machine.used(default.machine, settings):
        return "on"
    try:
        worker.use(default.setup)
        worker.load(default.file.path, settings)
        used = worker.new_context(settings).flash_attn_resolved
    except LabError:  # the session itself will say what is wrong
        used = None
    worker.restart()
    return used


def ubatches(default: Plan) -> list[int]:
    """Sizes of steps that differ for these prompts: of equal ones the smallest."""
    (case, *_) = default.cases
    n_tokens = case.n_prompt * max(1, len(case.sequences))
    by_largest_step: dict[int, int] = {}
    for n_ubatch in reversed(UBATCHES):
        if n_ubatch <= default.settings.n_batch:
            by_largest_step[min(n_ubatch, n_tokens)] = n_ubatch
    by_largest_step.pop(min(default.settings.n_ubatch, n_tokens), None)
    return list(by_largest_step.values())


def other_threads(n_threads: int) -> list[int]:
    """A quarter, half, one less, and all cores that the process may use."""
    n_usable = max(1, int(machine.n_cores_usable() or n_threads))
    numbers = {n_threads // 4, n_threads // 2, n_threads - 1, n_usable}
    return sorted(n for n in numbers if n >= 1 and n != n_threads)


def lossy_values(default: Plan) -> dict[str, list[object]]:
    """Values that change what the model writes."""
    values: dict[str, list[object]] = {}
    for name in ("cache_type_k", "cache_type_v"):
        values[name] = ["q8_0", "q4_0"]
    if default.file.source in (catalog.EMBEDDED, catalog.REQUANTIZED, catalog.SYNTHETIC):
        values["model"] = []
        for kind in ("Q8_0", "Q4_0"):
            if kind != default.model.quantization:
                values["model"].append(catalog.spec_of(default.model, kind))
    return values
