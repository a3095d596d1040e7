"""Is the number of threads right? Another number is tried beside it.

Both run alternately (A B B A) in fresh engines. The number is "broken" only if in every pair the
other one is faster by more than LARGE and by more than any difference between equal runs of a
block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import phases, stats
from lab.core.lists import plural
from lab.core.record import Record, Run
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.features.doctor.checks import BROKEN, FINE, LOOK, UNKNOWN, Check, taken_cpu
from lab.process.worker import Worker
from lab.runner import machine, trial
from lab.runner.cases import Case, Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.run_list import RunList
from lab.runner.warm_engine import WarmEngine
from lab.show.wording import digits

CLEAR = 1.1  # a speed-up that is worth a look
LARGE = 1.5  # a speed-up that shows a fault

N_BLOCKS = 3
N_TURNS = 2  # six pairs, the fewest for a 95 % interval
LENGTHS = (512, 256, 128, 64, 32)
N_GEN = 16
RUN_S = 0.8  # a trial uses the longest of these prompts that takes up to this
MOST_RUN_S = 10.0  # there is no trial if the shortest prompt takes longer

AS_IT_IS = "as it is"
OTHER_THREADS = "other threads"
PHASES = {"prefill": phases.prefill_ns, "decode": phases.tpot_ns}


@dataclass(frozen=True)
class Effect:
    """The speed-up of a phase with the other number of threads, and the largest ratio of two equal
    runs of a block."""

    ratio: Ratio
    noise: float

    @property
    def is_gain(self) -> bool:
        return self.ratio.low > max(CLEAR, self.noise)

    @property
    def is_large_gain(self) -> bool:
        return self.is_gain and self.ratio.low > LARGE

    @property
    def is_loss(self) -> bool:
        return self.ratio.high < 1 / max(CLEAR, self.noise)

    @property
    def text(self) -> str:
        estimate = digits(self.ratio.estimate)
        return f"{estimate}x as fast ({digits(self.ratio.low)}-{digits(self.ratio.high)})"


def examine(
    worker: Worker,
    plan: Plan,
    options: Mapping[str, Any],
    best: int,
    named: Callable[[str], ShowStatus],
    new_worker: type[Worker],
) -> tuple[list[Record], Check]:
    """Run the plan, and beside it another number of threads. Returns the runs as asked, and the
    check.

    `best` is the default number of threads; `named` shows the progress of a check with its name.
    LabError if the engine fails.
    """
    if plan.refused:
        raise LabError(
            " ".join(plan.refused.values()), "Take a smaller model, or end other programs."
        )
    first = first_run(worker, plan, named("the engine"))
    case = case_of_trial(first.run)
    has_room = 2 * plan.memory(plan.cases[0]).total_bytes < machine.memory_available()
    worker.restart()  # without the model
    n = max(plan.settings.n_threads, plan.settings.n_threads_batch)
    candidate = best if n != best else max(1, best // 2)
    is_on_gpu = plan.settings.n_gpu_layers > (plan.model.n_layer or 10_000)
    if is_on_gpu or candidate == n:
        return [first], Check("threads", figure(n, best), FINE)
    if case is None or not has_room:
        return [first], check({}, n, candidate, best, bool(taken_cpu([first])))
    sides = {
        AS_IT_IS: options,
        OTHER_THREADS: {**options, "threads": candidate, "threads_batch": candidate},
    }
    plans: dict[str, Plan] = {}
    for name, settings in sides.items():
        n_runs = N_BLOCKS * N_TURNS
        plans[name] = make_plan(worker, [case.n_prompt], case.n_gen, n_runs, **settings)
    watch = named(f"{n} against {plural(candidate, 'thread')}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "doctor.jsonl"
        records = list(trial.execute(plans, trial.Blocks(N_BLOCKS), path, watch, new_worker))
    timed = [record for record in records if not record.run.warmup]
    runs = [record for record in timed if record.run.variant == AS_IT_IS]
    return runs, check(effects(timed), n, candidate, best, bool(taken_cpu(timed)))


def first_run(worker: Worker, plan: Plan, watch: ShowStatus) -> Record:
    """The second of two short runs, which tells how long others will take."""
    engine = WarmEngine(plan, worker, Reporter(watch, RunList(), plan.n_tokens))
    engine.load()
    engine.open(plan.cases)
    case = Case(LENGTHS[0], 4)
    engine.run(case, 0, warmup=True)
    run = engine.run(case, 1, warmup=True)
    return Record("doctor", plan.machine, engine.model, engine.settings, run)


def case_of_trial(run: Run) -> Case | None:
    """The longest prompt that takes up to RUN_S, by the times of a run; None if all take too long,
    or the run has no times."""
    tpot_ns = phases.tpot_ns(run)
    prefill_ns = phases.prefill_ns(run)
    if tpot_ns is None or prefill_ns is None:
        return None
    token_s = tpot_ns / 1e9
    prompt_token_s = prefill_ns / run.n_prompt / 1e9
    for n_prompt in LENGTHS:
        if n_prompt * prompt_token_s + N_GEN * token_s <= RUN_S:
            return Case(n_prompt, N_GEN)
    if run.n_prompt * prompt_token_s + run.n_gen * token_s <= MOST_RUN_S:
        return Case(run.n_prompt, run.n_gen)
    return None


def effects(records: Sequence[Record]) -> dict[str, Effect]:
    """What the other number of threads changes, by phase, from the timed runs of a trial."""
    effect_of_phase: dict[str, Effect] = {}
    for phase, time_of in PHASES.items():
        times: dict[str | None, list[float]] = {AS_IT_IS: [], OTHER_THREADS: []}
        times_of_block: dict[tuple[str | None, int | None], list[float]] = {}
        for record in records:
            run = record.run
            time_ns = time_of(run)
            if time_ns:
                times[run.variant].append(time_ns)
                times_of_block.setdefault((run.variant, run.block), []).append(time_ns)
        as_it_is = times[AS_IT_IS]
        changed = times[OTHER_THREADS]
        ratio = (
            stats.paired_ratio(changed, as_it_is) if len(changed) == len(as_it_is) else None
        )
        if ratio:
            noise = max(max(block) / min(block) for block in times_of_block.values())
            effect_of_phase[phase] = Effect(ratio, noise)
    return effect_of_phase


def check(
    effect_of_phase: Mapping[str, Effect], n: int, candidate: int, best: int, is_busy: bool
) -> Check:
    """The check of n threads. `is_busy`: other programs took CPU time during the trial."""
    verdict = verdict_on(effect_of_phase, n, best, is_busy)
    results = ", ".join(f"{phase} {effect.text}" for phase, effect in effect_of_phase.items())
    if not results:
        results = "not tried, because runs take too long here or memory is short"
        if is_busy:
            results = "not tried, because runs take too long beside other programs"
    command = f"lab measure --threads {candidate}" if verdict in (BROKEN, LOOK) else None
    sentence = f"With {candidate} instead of {n}: {results}."
    return Check("threads", figure(n, best), verdict, sentence, command)


def figure(n: int, best: int) -> str:
    return f"{n}; {best} by default"


def verdict_on(effect_of_phase: Mapping[str, Effect], n: int, best: int, is_busy: bool) -> str:
    """The default number is never broken: what it loses is caused by other programs, or a
    choice."""
    effects = list(effect_of_phase.values())
    has_gain = any(effect.is_gain for effect in effects)
    has_loss = any(effect.is_loss for effect in effects)
    if has_gain and n == best:
        return FINE if is_busy else LOOK
    if any(effect.is_large_gain for effect in effects) and not has_loss:
        return BROKEN
    if has_gain or n > best:
        return LOOK
    return FINE if effects else UNKNOWN
