"""What a fresh engine costs, and the cheapest warm-up that still warms.

    python3 -m uv run python -m tests.bench.warm_up [SPEC] [ROUNDS] [N_PROMPT]

Every round starts a fresh engine for each warm-up in turn, then makes three equal runs of N_PROMPT
(600) tokens. The first run over the median of the other two shows what the warm-up left out (1 is
nothing). On Linux the page faults of the engine's process during the warm-up, the first run and the
later ones show why. Printed: medians over ROUNDS (8) and their range.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core import script as scripts, stats
from lab.core.record import PREFILL, Settings, Steps
from lab.models import catalog
from lab.models.obtain import obtain
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.runner.prompts import random_ids

N_GEN = 16
N_UBATCH = 512
WARM_UP = "warm-up"
PHASES = (WARM_UP, "first", "second", "third")


def warm_ups(n_prompt: int) -> dict[str, tuple[int, ...]]:
    """The prompt lengths of each warm-up that is tried."""
    step = min(n_prompt, N_UBATCH)
    every_shape = step
    if n_prompt > N_UBATCH:
        every_shape = step + n_prompt % N_UBATCH
    return {
        "none": (),
        "32 tokens": (32,),
        "32 and a whole step": (32, step),
        "every shape": (every_shape,),
    }


def page_faults(pid: int) -> int | None:
    """Minor page faults of a process so far (proc(5), field 10 of stat).

    None where the system does not count them.
    """
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return None
    after_name = stat.read_text().rpartition(")")[2].split()
    return int(after_name[7])


@dataclass(frozen=True)
class Trial:
    """A fresh engine with a warm-up and three runs. Ratios: the first run over the other two."""

    seconds: dict[str, float]  # of its parts
    prefill_ratio: float
    tpot_ratio: float
    n_faults: dict[str, int]  # by phase; empty where the system does not count them


def try_warm_up(
    path: Path,
    settings: Settings,
    name: str,
    n_prompt: int,
) -> Trial:
    started = time.monotonic()
    with Worker() as worker:
        n_vocab = worker.load(path, settings).n_vocab
        loaded = time.monotonic()
        worker.new_context(settings)
        opened = time.monotonic()
        faults = [page_faults(worker.pid)]
        for n in warm_ups(n_prompt)[name]:
            run(worker, random_ids(n, n_vocab, None, 1, 0), 4)
        warm = time.monotonic()
        faults.append(page_faults(worker.pid))
        prefills_ns = []
        tpots_ns = []
        for repeat in range(3):
            steps = run(worker, random_ids(n_prompt, n_vocab, None, 1, repeat), N_GEN)
            last = steps.kind.count(PREFILL) - 1
            prefills_ns.append(steps.ready_ns[last] - steps.start_ns[0])
            tpots_ns.append((steps.end_ns[-1] - steps.end_ns[last]) / (N_GEN - 1))
            faults.append(page_faults(worker.pid))
    seconds = {
        "start and load": loaded - started,
        "context": opened - loaded,
        f"warm-up: {name}": warm - opened,
    }
    return Trial(seconds, first_ratio(prefills_ns), first_ratio(tpots_ns), by_phase(faults))


def run(
    worker: Worker,
    prompt: list[int],
    n_gen: int,
) -> Steps:
    return worker.run(scripts.run(prompt, n_gen, N_UBATCH), lambda progress: None).steps


def first_ratio(values: Sequence[float]) -> float:
    """The first value over the median of the others."""
    return values[0] / statistics.median(values[1:])


def by_phase(counts: list[int | None]) -> dict[str, int]:
    """What a counter counted in each phase."""
    numbers = [count for count in counts if count is not None]
    differences = [after - before for before, after in itertools.pairwise(numbers)]
    return dict(zip(PHASES, differences, strict=False))


def show(
    name: str,
    values: list[float],
    unit: str = "",
) -> str:
    low = min(values)
    high = max(values)
    interval = stats.median_interval(values)
    if interval:
        low = interval.low
        high = interval.high
    return f"{name} {statistics.median(values):.3f}{unit} ({low:.3f} to {high:.3f})"


def main() -> None:
    spec, n_rounds, n_prompt = arguments(sys.argv[1:])
    with Worker() as worker:
        plan = make_plan(worker, [n_prompt], N_GEN, 1, spec)
        path = obtain(catalog.parse(spec), worker, lambda *_: None).path
    trials: dict[str, list[Trial]] = {name: [] for name in warm_ups(n_prompt)}
    for number in range(n_rounds):
        names = list(trials)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            trials[name].append(try_warm_up(path, plan.settings, name, n_prompt))
    print(
        f"{spec}, {n_prompt} tokens, {n_rounds} rounds, first of three runs over the other two:"
    )
    print_results(trials)


def arguments(texts: list[str]) -> tuple[str, int, int]:
    """The model, the rounds and the prompt length, or their defaults."""
    defaults = [catalog.DEFAULT, "8", "600"]
    spec, n_rounds, n_prompt = texts + defaults[len(texts) :]
    return spec, int(n_rounds), int(n_prompt)


def print_results(trials: dict[str, list[Trial]]) -> None:
    for name, of_name in trials.items():
        prefill = show("prefill", [trial.prefill_ratio for trial in of_name])
        tpot = show("TPOT", [trial.tpot_ratio for trial in of_name])
        print(f"  {name:20} {prefill}; {tpot}")
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, of_name in trials.items():
        faults: dict[str, list[int]] = defaultdict(list)
        for trial in of_name:
            for phase, n in trial.n_faults.items():
                faults[phase].append(n)
            for part, part_s in trial.seconds.items():
                seconds[part].append(part_s)
        medians = [f"{phase} {statistics.median(ns):,.0f}" for phase, ns in faults.items()]
        print(f"  {name:20} page faults: {', '.join(medians) or 'not counted by this system'}")
    for part, values in seconds.items():
        print(f"  {show(part, values, ' s')}")


if __name__ == "__main__":
    main()
