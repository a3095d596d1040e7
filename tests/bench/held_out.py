"""Predictions for this machine against runs that were never used to make them.

    python3 -m uv run python -m tests.bench.held_out

Ceilings are measured for every model's shape, the efficiency is learned from two small models at two lengths, and
predictions are made for other lengths, other quantizations, and two models twenty times as large (random weights).
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from lab.core import phases
from lab.core.record import OK, Record, Run
from lab.process.worker import Worker
from lab.runner.plan import Plan, make_plan
from lab.runner.progress import Status
from lab.runner.session import execute, new_results_file
from lab.why import prediction, probing

LEARN = {"smollm2-135m": [128, 1024], "synthetic:qwen2.5-0.5b:Q4_0": [128, 1024]}
HELD_OUT = {
    "smollm2-135m": [256, 3072],
    "smollm2-135m:Q4_0": [256, 2048],
    "smollm2-135m:Q8_0": [256, 2048],
    "synthetic:llama-3.2-3b:Q4_0": [64, 512, 1536],
    "synthetic:phi-3-mini:Q4_0": [64, 512, 1536],
}
N_GEN, N_REPEAT = 24, 3


def silent(status: Status) -> None: ...


def measure(model: str, lengths: list[int], folder: Path) -> tuple[Plan, list[Record]]:
    """Ceilings (kept in `folder`) and runs of a model."""
    with Worker() as worker:
        plan = make_plan(worker, lengths, N_GEN, N_REPEAT, model)
        wanted = probing.missing(
            probing.probes(plan.model, plan.settings), probing.known(probing.kept(folder), plan.machine, False)
        )
        if wanted:
            probing.run_probes(worker, plan.machine, wanted, False, lambda what: None, folder)
        records = list(execute(plan, worker, new_results_file(plan, folder), silent))
    return plan, [record for record in records if record.run.status == OK and not record.run.warmup]


def seconds(run: Run) -> tuple[float, float]:
    """Prefill time and decode compute per token."""
    return (phases.prefill_ns(run) or 0) / 1e9, (phases.decode_compute_mean_ns(run) or 0) / 1e9


def main() -> None:
    errors: dict[str, list[float]] = {"prefill": [], "decode": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learned: list[Record] = []
        for model, lengths in LEARN.items():
            plan, records = measure(model, lengths, folder)
            learned += records
        measured = {model: measure(model, lengths, folder) for model, lengths in HELD_OUT.items()}
        known = probing.known(probing.kept(folder), plan.machine, False)
        assert known is not None
        efficiency = prediction.learn(learned, known)
        print(prediction.basis_here(efficiency))
        print("model | prompt | prefill s: predicted, measured, error | decode ms: predicted, measured, error")
        for model, (plan, records) in measured.items():
            for n_prompt in plan.lengths:
                row = prediction.here(plan.model, plan.settings, known, efficiency, n_prompt, N_GEN)
                found = [seconds(record.run) for record in records if record.run.n_prompt == n_prompt]
                told = []
                for which, unit, predicted in (("prefill", 1, row.prefill_s), ("decode", 1e3, row.tpot_s)):
                    truth = statistics.median(pair[which == "decode"] for pair in found)
                    guess = sum(predicted) / 2
                    errors[which].append(guess / truth - 1)
                    told.append(f"{unit * guess:.3g}, {unit * truth:.3g}, {guess / truth - 1:+.0%}")
                print(f"{model} | {n_prompt:,} | {' | '.join(told)}", flush=True)
    for which, each in errors.items():
        sizes = [abs(error) for error in each]
        print(
            f"{which}: median absolute error {statistics.median(sizes):.1%}, worst {max(sizes):.1%} of {len(each)}; "
            "at most 12 % and 30 % wanted"
        )


if __name__ == "__main__":
    main()
