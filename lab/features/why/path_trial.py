"""Measure what differs: a trial from the faster setup to the slower one and back.

Blocks of fresh engines hold a variant for each step of the way. Each variant on the way changes
one group of settings more, and so do those of the way back; a factor is the mean of both orders.
One run of the cheapest variant tells what a block will take: the way has as many changes, the
cheapest first, as fit into the budget. What it does not hold is cut off and not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.core import results, sampling, shell
from lab.core.asked_settings import defaults
from lab.core.files import exists
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.stats import mean_half_width
from lab.errors import LabError
from lab.features.why.depth import GEN, prompt_length
from lab.features.why.machines import ns_per_token
from lab.features.why.parts import FEWEST, MEASURED, NOT_MEASURED, GapPart, Pair
from lab.features.why.time_limit import TimeSpent, limited, until_spent
from lab.process.worker import Worker
from lab.runner import as_options, disturbances, session, trial
from lab.runner.cases import Plan
from lab.runner.progress import ShowStatus
from lab.show.wording import seconds, times

PROMPT_LEN = "prompt_len"  # the setting of a change of depth
MOST_BLOCKS = 30
PLANNED_BLOCKS = FEWEST + 1  # for which the changes must fit into the budget
MOST_CHANGES = 6
OVER_BUDGET = "(--budget)"
WITHOUT_BUDGET = "--budget 0"
SURE = 0.005  # a trial ends when half of each range, in logarithms, is below this

Way = Mapping[frozenset[int], str]
"""The name of each variant, by the numbers of the changes that are made in it, from 0."""

Block = Mapping[str, float]
"""Times per token by the variants' names."""


@dataclass(frozen=True)
class PathTrial:
    """What a trial does: where the way begins, the changes on it, and how long it may take."""

    start: Mapping[str, Any]  # settings, and the model's SPEC
    changes: Sequence[GapPart]
    is_prefill: bool
    budget_s: float
    folder: Path
    watch: ShowStatus
    new_worker: Callable[[], Worker] = Worker

    @property
    def n_gen(self) -> int:
        return 1 if self.is_prefill else GEN

    @property
    def prompt_lens(self) -> list[int]:
        """The prompt lengths on the way."""
        later = [part.changes[PROMPT_LEN] for part in self.changes if is_depth(part)]
        return [self.start[PROMPT_LEN], *later]

    def after_shortest_prompt(self) -> PathTrial:
        """The same, beginning after the shortest prompt: the cheapest one."""
        return replace(self, start={**self.start, PROMPT_LEN: min(self.prompt_lens)})


@dataclass
class BlockTimes:
    """The blocks in which all variants ran, and all timed records so far."""

    n_variants: int
    is_prefill: bool
    blocks: list[Block] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    _number: int | None = None  # of the block under way
    _times_ns: dict[str, float] = field(default_factory=dict)  # in it

    def add(self, record: Record) -> bool:
        """Add a record; returns whether all variants of its block have run now."""
        run = record.run
        if run.block != self._number:
            self._number = run.block
            self._times_ns = {}
        if not run.is_timed:
            return False
        self.records.append(record)
        ns = ns_per_token(run, self.is_prefill)
        if ns:
            self._times_ns[run.variant or ""] = ns
        if len(self._times_ns) < self.n_variants:
            return False
        self.blocks.append(self._times_ns)
        self._times_ns = {}
        return True


@dataclass
class Measured:
    """The measured parts by name, and the file of the trial's records."""

    parts: dict[str, GapPart] = field(default_factory=dict)
    path: Path | None = None
    ended_by: str | None = None  # what ended it early


def start_of(pair: Pair, spec: str, lib: str | None) -> dict[str, object]:
    """The settings of the faster side; what it does not say is as in the slower one."""
    figure = pair.fast if pair.fast.position is not None else pair.slow
    chosen = {**pair.slow.settings, **pair.fast.settings, "lib": lib}
    start = {name: value for name, value in chosen.items() if value != defaults().get(name)}
    if pair.fast.records:
        start |= sampling.keywords(pair.fast.records[0].settings.sampling)
    start[PROMPT_LEN] = prompt_length(figure)
    start["model"] = spec
    return start


def run(path_trial: PathTrial) -> Measured:
    """Measure the changes as far as the budget lasts."""
    began = time.monotonic()
    in_order = sorted(path_trial.changes, key=cost_order)
    too_many = f"a trial holds {MOST_CHANGES} changes, the cheapest"
    parts = {part.name: not_measured(part, too_many) for part in in_order[MOST_CHANGES:]}
    possible = replace(path_trial, changes=in_order[:MOST_CHANGES])
    blocks_s = needed_seconds(possible)
    spent_s = time.monotonic() - began
    left_s = path_trial.budget_s - spent_s
    fitting: list[GapPart] = []
    for part, block_s in zip(possible.changes, blocks_s, strict=True):  # each takes longer
        trial_s = PLANNED_BLOCKS * block_s
        if trial_s <= left_s:
            fitting.append(part)
        elif math.isfinite(trial_s):
            reason = f"needs about {seconds(spent_s + trial_s)} {OVER_BUDGET}"
            parts[part.name] = not_measured(part, reason)
        else:
            parts[part.name] = not_measured(part, f"no run fits {OVER_BUDGET}")
    if not fitting:
        return Measured(parts)
    if not any(map(is_depth, fitting)):
        possible = possible.after_shortest_prompt()
    way = measure_way(replace(possible, changes=fitting, budget_s=left_s))
    return replace(way, parts=parts | way.parts)


def cost_order(part: GapPart) -> tuple[bool, bool]:
    """Settings first, then models, then depth."""
    return is_depth(part), "model" in part.changes


def is_depth(part: GapPart) -> bool:
    return PROMPT_LEN in part.changes


def not_measured(part: GapPart, reason: str) -> GapPart:
    """The part, with the reason why it has no factor."""
    return replace(part, how=NOT_MEASURED, reason=f"{part.reason}; not measured: {reason}")


def needed_seconds(path_trial: PathTrial) -> list[float]:
    """Seconds of a block with the first change, the first two, and so on; inf if no run fits.

    From one run of a single variant, after the shortest prompt.
    """
    changes = path_trial.changes
    prompt_lens = path_trial.prompt_lens
    first_change = replace(path_trial.after_shortest_prompt(), changes=changes[:1])
    try:
        fixed_s, work_s = seconds_of_one_run(first_change)
    except TimeSpent:
        return [math.inf] * len(changes)
    n_tokens = min(prompt_lens) + path_trial.n_gen
    blocks_s: list[float] = []
    for n_changes, part in enumerate(changes, 1):
        if is_depth(part):  # half of the variants have the long prompt
            work_s *= (sum(prompt_lens) / 2 + path_trial.n_gen) / n_tokens
        n_variants = 2 * n_changes
        blocks_s.append(n_variants * (fixed_s + work_s))
    return blocks_s


def seconds_of_one_run(path_trial: PathTrial) -> tuple[float, float]:
    """Seconds of a run of the first variant: to start an engine and to warm up, and for its steps.

    TimeSpent if it does not end within the budget.
    """
    look = limited(path_trial.watch, path_trial.budget_s)
    _, plans = plans_of(path_trial)
    name = next(iter(plans))
    variant = {name: plans[name]}
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "first.jsonl"
        records = trial.execute(variant, trial.Blocks(1, 1), path, look, path_trial.new_worker)
        work_s = sum(map(seconds_of_steps, records))
        fixed_s = time.monotonic() - began - work_s
    return fixed_s, work_s


def seconds_of_steps(record: Record) -> float:
    """Seconds from the first step's start to the last one's end."""
    steps = record.run.steps
    if not steps.end_ns:
        return 0.0
    return (steps.end_ns[-1] - steps.start_ns[0]) / 1e9


def measure_way(path_trial: PathTrial) -> Measured:
    """Run blocks until all factors are sure, the budget is spent, or a variant cannot run.

    A block that the budget or a crash has ended counts for no factor.
    """
    changes = path_trial.changes
    way, plans = plans_of(path_trial)
    path = session.new_results_file(next(iter(plans.values())), path_trial.folder)
    measured = BlockTimes(len(plans), path_trial.is_prefill)
    parts = factors(changes, way, measured)
    ended_by: str | None = None
    look = limited(path_trial.watch, path_trial.budget_s)
    planned = trial.Blocks(MOST_BLOCKS, 1)
    with results.unless_empty(path):
        records = trial.execute(plans, planned, path, look, path_trial.new_worker)
        try:
            for record in until_spent(records):
                if not measured.add(record):
                    continue
                parts = factors(changes, way, measured)
                if len(measured.blocks) >= PLANNED_BLOCKS and are_sure(parts):
                    break
        except LabError as problem:
            ended_by = problem.what
    if ended_by and len(measured.blocks) < FEWEST:
        reason = ended_by.rstrip(".")
        parts = {part.name: not_measured(part, reason) for part in changes}
    return Measured(parts, path if exists(path) else None, ended_by)


def are_sure(parts: Mapping[str, GapPart]) -> bool:
    """Whether all factors are known well enough."""
    return all((part.half or 0.0) < SURE for part in parts.values())


def plans_of(path_trial: PathTrial) -> tuple[Way, dict[str, Plan]]:
    """The variants of the way there and back, and their plans by name."""
    n_changes = len(path_trial.changes)
    there = [range(n) for n in range(n_changes + 1)]  # the first n changes are made
    back = [range(n, n_changes) for n in range(1, n_changes)]  # the first n are undone
    made_in_variants = there + back
    variants: list[tuple[str, Mapping[str, object]]] = []
    for numbers in made_in_variants:
        settings = dict(path_trial.start)
        for number in numbers:
            settings |= path_trial.changes[number].changes
        settings = {name: value for name, value in settings.items() if value is not None}
        settings[PROMPT_LEN] = str(settings[PROMPT_LEN])
        options: list[str] = []
        for name, value in settings.items():
            options += as_options.option(name, value)
        variants.append((shell.join(*options), settings))
    with path_trial.new_worker() as worker:
        plans = trial.plan(worker, variants, MOST_BLOCKS, gen=path_trial.n_gen)
    way = dict(zip(map(frozenset, made_in_variants), plans, strict=True))
    return way, plans


def factors(changes: Sequence[GapPart], way: Way, measured: BlockTimes) -> dict[str, GapPart]:
    """The parts by name with their factors and 95 % ranges."""
    blocks = measured.blocks
    if len(blocks) < FEWEST:
        few = f"only {plural(len(blocks), 'block')} of {FEWEST} {OVER_BUDGET}"
        return {part.name: not_measured(part, few) for part in changes}
    parts: dict[str, GapPart] = {}
    n_changes = len(changes)
    n_disturbed = disturbances.n_disturbed(measured.records)
    for number, part in enumerate(changes):
        there = log_ratios(blocks, way, range(number), range(number + 1))
        back = log_ratios(blocks, way, range(number + 1, n_changes), range(number, n_changes))
        logs = [statistics.fmean(pair) for pair in zip(there, back, strict=True)]
        with_factor = replace(
            part,
            log=statistics.fmean(logs),
            half=mean_half_width(logs),
            how=f"{MEASURED}, {len(blocks)} blocks",
            orders=(statistics.fmean(there), statistics.fmean(back)),
            n_runs=len(measured.records),
            n_disturbed=n_disturbed,
        )
        parts[part.name] = replace(with_factor, reason=reason_of(with_factor))
    return parts


def log_ratios(blocks: Sequence[Block], way: Way, before: range, after: range) -> list[float]:
    """For each block the logarithm of the ratio of two variants, with these changes made."""
    name_before = way[frozenset(before)]
    name_after = way[frozenset(after)]
    return [math.log(block[name_after] / block[name_before]) for block in blocks]


def reason_of(part: GapPart) -> str:
    """What changed, whether its factor depends on the order, and how disturbed the trial was."""
    reasons = [part.reason]
    if part.depends_on_order and part.orders:
        there, back = map(times, map(math.exp, part.orders))
        reasons.append(f"it depends on the order of the changes: {there} or {back}")
    if part.n_disturbed:
        reasons.append(f"{part.n_disturbed} of {part.n_runs} runs of the trial were disturbed")
    return "; ".join(reasons)
