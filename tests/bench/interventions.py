"""Are the words of `lab explain` true? Predicted effects of a change beside measured ones (lab ab).

    python3 -m uv run python -m tests.bench.interventions [NUMBER OF A CASE ...]

For each case: what the kernels' ceilings say that the change does to prefill and decode, and what a trial of 7
blocks measured. The ceilings are measured first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.analysis import comparison
from lab.core.record import Ceilings, Record
from lab.process.worker import Worker
from lab.runner import side_by_side
from lab.runner.plan import Plan, make_plan
from lab.runner.progress import Status
from lab.why import probing, roofline
from lab.why.roofline import Explained

SMALL, LARGE = {"model": "smollm2-135m"}, {"model": "synthetic:llama-3.2-3b:Q4_0"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("Q4_0 instead of Q4_1", SMALL, {"model": "smollm2-135m:Q4_0"}, 512),
    ("Q8_0 instead of Q4_1", SMALL, {"model": "smollm2-135m:Q8_0"}, 512),
    ("1 thread instead of 2", SMALL, {**SMALL, "threads": 1}, 512),
    ("ubatch 512 instead of 32", {**SMALL, "ubatch": 32}, SMALL, 512),
    ("3B: 1 thread instead of 2", LARGE, {**LARGE, "threads": 1}, 64),
]
N_GEN, N_BLOCKS = 24, 7


def silent(status: Status) -> None: ...


def explained(records: list[Record], found: Ceilings) -> dict[str, Explained]:
    return {row.phase: row for row in roofline.explain(records, found)}


def main() -> None:
    print("case | phase | predicted | measured (interval)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = list(map(int, sys.argv[1:])) or range(1, len(CASES) + 1)
        for number in chosen:
            title, base, change, n_prompt = CASES[number - 1]
            plans: dict[str, Plan] = {}
            with Worker() as worker:
                for letter, settings in (("A", base), ("B", change)):
                    plan = make_plan(worker, [n_prompt], N_GEN, 1, **settings)
                    plans[letter] = plan
                    wanted = probing.missing(
                        probing.probes(plan.model, plan.settings),
                        probing.known(probing.kept(folder), plan.machine, False),
                    )
                    if wanted:
                        probing.run_probes(worker, plan.machine, wanted, False, lambda what: None, folder)
            found = probing.known(probing.kept(folder), plan.machine, False)
            assert found is not None
            path = folder / f"trial-{number}.jsonl"
            records = [r for r in side_by_side.execute(plans, N_BLOCKS, path, silent) if not r.run.warmup]
            (compared,) = comparison.compare(records)
            of_a, of_b = (explained([r for r in records if r.run.variant == letter], found) for letter in plans)
            for row in compared.rows:
                phase = "prefill" if row.figure == "prefill_s" else "decode"
                before, after = of_a[phase], of_b[phase]
                kept = before.measured_s - before.kernels.total_s
                predicted = (kept + after.kernels.total_s) / before.measured_s
                measured = (
                    f"{row.ratio.estimate:.2f} ({row.ratio.low:.2f} to {row.ratio.high:.2f})" if row.ratio else "-"
                )
                print(f"{title} | {phase} at {n_prompt} | {predicted:.2f} | {measured}", flush=True)


if __name__ == "__main__":
    main()
