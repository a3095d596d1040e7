"""Does `lab ab` find what is not there, and does it find what is?

    python3 -m uv run python -m tests.bench.cry_wolf [TRIALS]

A/A: TRIALS trials (40) of the default settings against themselves on the embedded model; at most 2
of 40 may call a difference. Planted: one thread instead of two, and the model re-quantised to Q8_0.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import trial
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Status
from lab.show import comparison
from lab.show.comparison import ALIKE, TOO_FEW, ComparedFigure

N_PROMPT = 32
N_GEN = 8


def compare(variants: list[dict[str, Any]], seed: int) -> list[ComparedFigure]:
    """The rows of one trial of these settings."""
    plans: dict[str, Plan] = {}
    with Worker() as worker:
        for letter, settings in zip("AB", variants, strict=True):
            plans[letter] = make_plan(
                worker,
                [N_PROMPT],
                N_GEN,
                seed=seed,
                **settings,
            )

    def watch(status: Status) -> None: ...

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.jsonl"
        records = list(trial.execute(plans, trial.Blocks(trial.N_BLOCKS), path, watch))
    (compared,) = comparison.compare(records)
    return list(compared.rows)


def sentence(rows: list[ComparedFigure]) -> str:
    """What a trial says about each figure."""
    parts = []
    for row in rows:
        ratio = row.ratio
        interval = "-"
        if ratio:
            interval = f"{ratio.estimate:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        parts.append(f"{row.figure} {interval} {row.verdict}")
    return "; ".join(parts)


def main() -> None:
    n_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    n_called = 0
    for seed in range(n_trials):
        compared = compare([{}, {}], seed)
        if any(row.verdict not in (ALIKE, TOO_FEW) for row in compared):
            n_called += 1
        print(f"A/A {seed + 1:2}: {sentence(compared)}", flush=True)
    calls = f"{n_called} of {n_trials} A/A trials called a difference"
    print(f"{calls}; at most 2 of 40 wanted", flush=True)
    for settings in ({"threads": 1}, {"model": f"{catalog.DEFAULT}:Q8_0"}):
        print(f"planted {settings}: {sentence(compare([{}, settings], 1))}", flush=True)


if __name__ == "__main__":
    main()
