"""What a fresh engine costs, and the cheapest warm-up that still warms.

    python3 -m uv run python -m tests.bench.warm_up [SPEC] [ROUNDS]

Every round starts a fresh engine for each warm-up in turn, then makes three equal runs. The first run over the median
of the other two says what the warm-up left out (1 is nothing). Printed: medians over ROUNDS (8) and their range.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict

from lab.core import script as scripts
from lab.core import stats
from lab.models import catalog
from lab.models.obtain import obtain
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.runner.prompts import random_ids

N_PROMPT, N_GEN = 600, 16
WARM_UPS: dict[str, tuple[int, ...]] = {
    "none": (),
    "1 token": (1,),
    "32 tokens": (32,),
    "a full ubatch": (512,),
    "every shape": (88, 600),
}


def show(name: str, values: list[float], unit: str = "") -> str:
    interval = stats.median_interval(values)
    low, high = (interval.low, interval.high) if interval else (min(values), max(values))
    return f"{name} {statistics.median(values):.3f}{unit} ({low:.3f} to {high:.3f})"


def main() -> None:
    spec = sys.argv[1] if len(sys.argv) > 1 else catalog.DEFAULT
    n_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with Worker() as worker:
        plan = make_plan(worker, [N_PROMPT], N_GEN, 1, spec)
        path = obtain(catalog.parse(spec), worker, lambda *_: None).path
    costs: dict[str, list[float]] = defaultdict(list)
    firsts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_number in range(n_rounds):
        names = list(WARM_UPS)
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            started = time.monotonic()
            with Worker() as worker:
                vocabulary = worker.load(path, plan.settings)
                loaded = time.monotonic()
                worker.new_context(plan.settings)
                opened = time.monotonic()
                for n in WARM_UPS[name]:
                    worker.run(scripts.run(random_ids(n, vocabulary.n_vocab, None, 1, 0), 4, 512), lambda _: None)
                costs["start and load"].append(loaded - started)
                costs["context"].append(opened - loaded)
                costs[f"warm-up: {name}"].append(time.monotonic() - opened)
                prefills, tpots = [], []
                for repeat in range(3):
                    ids = random_ids(N_PROMPT, vocabulary.n_vocab, None, 1, repeat)
                    steps = worker.run(scripts.run(ids, N_GEN, 512), lambda _: None).steps
                    n_prefill = steps.kind.count("prefill")
                    prefills.append(steps.ready_ns[n_prefill - 1] - steps.start_ns[0])
                    tpots.append((steps.end_ns[-1] - steps.end_ns[n_prefill - 1]) / (N_GEN - 1))
            firsts[name, "prefill"].append(prefills[0] / statistics.median(prefills[1:]))
            firsts[name, "TPOT"].append(tpots[0] / statistics.median(tpots[1:]))
    print(f"{spec}, {n_rounds} rounds, first of three runs over the other two:")
    for name in WARM_UPS:
        print(f"  {name:14} {show('prefill', firsts[name, 'prefill'])}; {show('TPOT', firsts[name, 'TPOT'])}")
    for name, values in costs.items():
        print(f"  {show(name, values, ' s')}")


if __name__ == "__main__":
    main()
