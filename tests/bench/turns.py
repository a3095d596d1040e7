"""How well the turns of a conversation are predicted from ceilings and plain runs, over a grid of conversations.

    python3 -m uv run python -m tests.bench.turns FOLDER [MODEL...]    # some minutes

In a folder of its own inside FOLDER for each model: ceilings, plain runs that teach the law, then the conversations,
unless they are there. Prints the predicted and the measured TTFT of each turn, and the median error.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from pathlib import Path

import lab
from lab.core import results
from lab.features.limits import probing, step_prediction
from lab.features.turns import conversation

GRID = (
    {"system": 64, "turn": "64+16", "turns": 6},
    {"system": 1024, "turn": "64+16", "turns": 6, "breaks": "system@4"},
    {"system": 1024, "turn": "256+16", "turns": 6, "breaks": "truncate@5"},
)


def main(folder: str, *models: str) -> None:
    warnings.simplefilter("ignore", UserWarning)
    errors: list[float] = []
    for model in models or ("smollm2-135m",):
        own = Path(folder) / model.replace(":", "-")
        own.mkdir(parents=True, exist_ok=True)
        if not probing.kept(own):
            lab.ceilings(model, types=(), out=own)
        if not any(one.run.is_timed and one.run.lever is None for one in results.read([own]).records):
            lab.measure("64,512,1024", 8, 2, model, out=own)
        if not any(one.run.turns for one in results.read([own]).records):
            for asked in GRID:
                lab.turns(**asked, keep="memory", repeat=2, model=model, out=own)  # type: ignore[arg-type]
        records = list(results.read([own]).records)
        timed = [one for one in records if one.run.turns and one.run.is_timed]
        prediction = step_prediction.prediction_for(timed[0], probing.kept(own), records)
        print(f"{model}: {prediction.basis if prediction else 'nothing is predicted'}")
        for row in conversation.rows(timed, prediction):
            if row.expected_ttft_s is not None:
                errors.append(abs(row.expected_ttft_s / row.ttft_s - 1))
                print(f"{row.turn} | {row.breaks} | {row.n_computed} | {row.ttft_s:.4g} | {row.expected_ttft_s:.4g}")
    if errors:
        print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} turns")


if __name__ == "__main__":
    main(*sys.argv[1:])
