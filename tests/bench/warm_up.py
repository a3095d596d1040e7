"""What a fresh engine costs, and the cheapest warm-up that still warms.

    python3 -m uv run python -m tests.bench.warm_up [SPEC] [ROUNDS] [N_PROMPT]

Every round starts a fresh engine for each warm-up in turn, then makes three equal runs of N_PROMPT (600) tokens. The
first run over the median of the other two shows what the warm-up left out (1 is nothing). On Linux the page faults of
the engine's process during the warm-up, the first run and the later ones show why. Printed: medians over ROUNDS (8) and
their range.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from lab.core import script as scripts, stats
from lab.models import catalog
from lab.models.obtain import obtain
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.runner.prompts import random_ids

N_GEN = 16
N_UBATCH = 512
RUNS = ("warm-up", "first", "second", "third")


def warm_ups(n_prompt: int) -> dict[str, tuple[int, ...]]:
    """The prompt lengths of each warm-up that is tried."""
    full = min(n_prompt, N_UBATCH)
    shapes = (full + n_prompt % N_UBATCH,) if n_prompt > N_UBATCH else (full,)
    return {
        "none": (),
        "32 tokens": (32,),
        "32 and a whole step": (32, full),
        "every shape": shapes,
    }


def page_faults(pid: int) -> int | None:
    """Minor page faults of a process so far (proc(5), field 10 of stat); None where the system does not count them."""
    stat = Path(f"/proc/{pid}/stat")
    return int(stat.read_text().rpartition(")")[2].split()[7]) if stat.exists() else None


def show(name: str, values: list[float], unit: str = "") -> str:
    interval = stats.median_interval(values)
    low, high = (interval.low, interval.high) if interval else (min(values), max(values))
    return f"{name} {statistics.median(values):.3f}{unit} ({low:.3f} to {high:.3f})"


def main() -> None:
    spec = sys.argv[1] if len(sys.argv) > 1 else catalog.DEFAULT
    n_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    n_prompt = int(sys.argv[3]) if len(sys.argv) > 3 else 600
    with Worker() as worker:
        plan = make_plan(worker, [n_prompt], N_GEN, 1, spec)
        path = obtain(catalog.parse(spec), worker, lambda *_: None).path
    tried = warm_ups(n_prompt)
    costs: dict[str, list[float]] = defaultdict(list)
    firsts: dict[tuple[str, str], list[float]] = defaultdict(list)
    faults: dict[tuple[str, str], list[int]] = defaultdict(list)
    for round_number in range(n_rounds):
        names = list(tried)
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            started = time.monotonic()
            with Worker() as worker:
                vocabulary = worker.load(path, plan.settings)
                loaded = time.monotonic()
                worker.new_context(plan.settings)
                opened = time.monotonic()
                counts = [page_faults(worker.pid)]
                for n in tried[name]:
                    worker.run(
                        scripts.run(random_ids(n, vocabulary.n_vocab, None, 1, 0), 4, N_UBATCH),
                        lambda _: None,
                    )
                costs["start and load"].append(loaded - started)
                costs["context"].append(opened - loaded)
                costs[f"warm-up: {name}"].append(time.monotonic() - opened)
                prefills = []
                tpots = []
                for repeat in range(3):
                    counts.append(page_faults(worker.pid))
                    ids = random_ids(n_prompt, vocabulary.n_vocab, None, 1, repeat)
                    steps = worker.run(scripts.run(ids, N_GEN, N_UBATCH), lambda _: None).steps
                    n_prefill = steps.kind.count("prefill")
                    prefills.append(steps.ready_ns[n_prefill - 1] - steps.start_ns[0])
                    tpots.append((steps.end_ns[-1] - steps.end_ns[n_prefill - 1]) / (N_GEN - 1))
                counts.append(page_faults(worker.pid))
            firsts[name, "prefill"].append(prefills[0] / statistics.median(prefills[1:]))
            firsts[name, "TPOT"].append(tpots[0] / statistics.median(tpots[1:]))
            known = [count for count in counts if count is not None]
            for when, (before, after) in zip(
                ("warm-up", "first", "second", "third"), itertools.pairwise(known), strict=False
            ):
                faults[name, when].append(after - before)
    print(f"{spec}, {n_prompt} tokens, {n_rounds} rounds, first of three runs over the other two:")
    for name in tried:
        print(
            f"  {name:20} {show('prefill', firsts[name, 'prefill'])}; {show('TPOT', firsts[name, 'TPOT'])}"
        )
    for name in tried:
        medians = [
            f"{when} {statistics.median(ns):,.0f}"
            for (of, when), ns in faults.items()
            if of == name
        ]
        print(f"  {name:20} page faults: {', '.join(medians) or 'not counted by this system'}")
    for name, values in costs.items():
        print(f"  {show(name, values, ' s')}")


if __name__ == "__main__":
    main()
