"""How well the turns of a conversation are predicted from ceilings and plain runs, over a grid of conversations.

    python3 -m uv run python -m tests.bench.turns FOLDER [MODEL...]    # some minutes a model
    python3 -m uv run python -m tests.bench.turns served               # cached tokens estimated through llama-server

`served`: a conversation with two breaks through the llama-server of the xllamacpp wheel, whose cached tokens are then
estimated from the times alone. The exit status is 1 if an estimate is off by more than 10 % of the prompt. Otherwise,
in a folder of its own inside FOLDER for each model: ceilings, plain runs that teach the law, then the conversations.
Prints the predicted and the measured TTFT of each turn, and the median error.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lab
from lab.core import results
from lab.features import turns as conversation
from lab.roofline import probing
from lab.roofline import step_prediction
from lab.show import text_prediction
from lab.remote.examination import connect
from lab.models import catalog
from lab.runner import prompts
from tests.servers import wheel_server

GRID: tuple[dict[str, Any], ...] = (
    {"system": 64, "turn": "64+16", "turns": 6},
    {"system": 1024, "turn": "64+16", "turns": 6, "breaks": "system@4"},
    {"system": 1024, "turn": "256+16", "turns": 6, "breaks": "truncate@5"},
)


def main(folder: str, *models: str) -> None:
    warnings.simplefilter("ignore", UserWarning)
    errors = [
        error for model in models or ("smollm2-135m",) for error in measure(model, Path(folder))
    ]
    if errors:
        print(
            f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} turns"
        )


def measure(model: str, folder: Path) -> list[float]:
    """Measure and predict the conversations of the grid; returns the error of each turn's TTFT."""
    own = folder / model.replace(":", "-")
    errors = list[float]()
    own.mkdir(parents=True, exist_ok=True)
    if not probing.kept(own):
        lab.ceilings(model, types=(), out=own)
        lab.measure("64,512,1024", 8, 2, model, out=own)
    for asked in GRID:
        timed = [
            one
            for one in lab.turns(**asked, keep="memory", repeat=2, model=model, out=own)
            if one.run.is_timed
        ]
        prediction = step_prediction.prediction_for(
            timed[0], probing.kept(own), results.read([own]).records
        )
        print(
            f"{model} | {asked}: {text_prediction.basis(prediction) if prediction else 'nothing is predicted'}",
            flush=True,
        )
        for row in conversation.rows(timed, prediction):
            if row.expected_ttft_s is not None:
                errors.append(abs(row.expected_ttft_s / row.ttft_s - 1))
                known = f"{row.ttft_s:.4g} s | {row.expected_ttft_s:.4g} s | {errors[-1]:.1%}"
                print(
                    f"turn {row.turn} | {row.breaks} | {row.n_computed} tokens | {known}",
                    flush=True,
                )
    return errors


def served() -> bool:
    lever = conversation.lever_of(200, "60+12", 6, "system@3,truncate@5", 1)
    text = prompts.source("text").text or ""
    with (
        tempfile.TemporaryDirectory() as folder,
        wheel_server(
            catalog.embedded_path(), "--threads", "1", "--parallel", "1", "--ctx-size", "2048"
        ) as started,
        connect(started.url) as server,
    ):
        records = list(
            conversation.execute(lever, server, text, server.new_file(Path(folder)), print)
        )
    known = conversation.served(records)
    hidden = []
    for record in records:
        usage = record.request.usage and dataclasses.replace(
            record.request.usage, cached_tokens=None
        )
        blind = dataclasses.replace(record.request, usage=usage, timings=None)
        hidden.append(dataclasses.replace(record, request=blind))
    estimated = conversation.served(hidden)
    off = (estimated.n_cached - known.n_cached).astype(float) / known.n_prompt.astype(float)
    for row, other, share in zip(known.itertuples(), estimated.itertuples(), off, strict=True):
        print(
            f"turn {row.turn} {row.breaks}: {row.n_prompt} tokens, {row.n_cached} cached, {other.n_cached} estimated"
        )
        print(f"    off by {share:+.1%} of the prompt, TTFT {row.ttft_s:.3g} s")
    return bool(known.is_known.all() and not estimated.is_known.any() and (off.abs() <= 0.1).all())


if __name__ == "__main__":
    if sys.argv[1:] == ["served"]:
        sys.exit(not served())
    main(*sys.argv[1:])
