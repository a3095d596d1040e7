"""How well the turns of a conversation are predicted from ceilings and plain runs, over a grid of conversations.

    python3 -m uv run python -m tests.bench.turns FOLDER [MODEL...]    # some minutes; a conversation at a time
    python3 -m uv run python -m tests.bench.turns served               # cached tokens estimated through llama-server

`served`: a conversation with two breaks through the llama-server of the xllamacpp wheel, whose cached tokens are then
estimated from the times alone. The exit status is 1 if an estimate is off by more than 10 % of the prompt. Otherwise,
in a folder of its own inside FOLDER for each model: ceilings, plain runs that teach the law, then the conversations,
unless they are there. Prints the predicted and the measured TTFT of each turn as soon as a conversation has ended, and
the median error. The grid gets about 6 minutes a model: a conversation that might end later is not begun, and another
run measures the rest.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lab
from lab.core import results
from lab.core.payloads import Turns
from lab.core.record import Record
from lab.features import turns as conversation
from lab.features.limits import probing
from lab.features.predict import learning
from lab.features.serve.servers import connect
from lab.models import catalog
from lab.runner import prompts
from tests.servers import wheel_server

GRID: tuple[dict[str, Any], ...] = (
    {"system": 64, "turn": "64+16", "turns": 6},
    {"system": 1024, "turn": "64+16", "turns": 6, "breaks": "system@4"},
    {"system": 1024, "turn": "256+16", "turns": 6, "breaks": "truncate@5"},
)


MOST_S = 360
"""Of the conversations of a model, after its ceilings and plain runs."""


def main(folder: str, *models: str) -> None:
    warnings.simplefilter("ignore", UserWarning)
    errors = [error for model in models or ("smollm2-135m",) for error in measure(model, Path(folder))]
    if errors:
        print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} turns")


def measure(model: str, folder: Path) -> list[float]:
    """Measure and predict the conversations of the grid; returns the error of each turn's TTFT."""
    began, own, errors, taken_s = time.monotonic(), folder / model.replace(":", "-"), list[float](), 0.0

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s | {model} | {words}", flush=True)

    own.mkdir(parents=True, exist_ok=True)
    if not probing.kept(own):
        lab.ceilings(model, types=(), out=own)
        say("ceilings measured")
    if not any(one.run.is_timed and one.run.lever is None for one in results.read([own]).records):
        lab.measure("64,512,1024", 8, 2, model, out=own)
        say("plain runs measured")
    ends = time.monotonic() + MOST_S
    for asked in GRID:
        lever = conversation.lever_of(asked["system"], asked["turn"], asked["turns"], "", 1)
        started = time.monotonic()
        if not of_cell(lever, own):
            if started + 2 * taken_s > ends:
                say(f"{asked} not begun: run again")
                continue
            lab.turns(**asked, keep="memory", repeat=2, model=model, out=own)
            taken_s = time.monotonic() - started
        timed, records = of_cell(lever, own), list(results.read([own]).records)
        prediction = learning.prediction_for(timed[0], probing.kept(own), records)
        say(f"{asked}: {prediction.basis if prediction else 'nothing is predicted'}")
        for row in conversation.rows(timed, prediction):
            if row.expected_ttft_s is not None:
                errors.append(abs(row.expected_ttft_s / row.ttft_s - 1))
                known = f"{row.ttft_s:.4g} | {row.expected_ttft_s:.4g} | {errors[-1]:.1%}"
                say(f"turn {row.turn} | {row.breaks} | {row.n_computed} | {known}")
    return errors


def of_cell(lever: Turns, folder: Path) -> list[Record]:
    """The timed runs of a conversation, with and without its breaks."""
    timed = [one for one in results.read([folder]).records if one.run.turns and one.run.is_timed]
    return [
        one for one in timed if one.run.turns and dataclasses.replace(one.run.turns, breaks="", whole=False) == lever
    ]


def served() -> bool:
    lever = conversation.lever_of(200, "60+12", 6, "system@3,truncate@5", 1)
    text = prompts.source("text").text or ""
    with (
        tempfile.TemporaryDirectory() as folder,
        wheel_server(catalog.embedded_path(), "--threads", "1", "--parallel", "1", "--ctx-size", "2048") as started,
        connect(started.url) as server,
    ):
        records = list(conversation.execute(lever, server, text, server.new_file(Path(folder)), print))
    known = conversation.served(records)
    hidden = []
    for record in records:
        usage = record.request.usage and dataclasses.replace(record.request.usage, cached_tokens=None)
        blind = dataclasses.replace(record.request, usage=usage, timings=None)
        hidden.append(dataclasses.replace(record, request=blind))
    estimated = conversation.served(hidden)
    off = (estimated.n_cached - known.n_cached).astype(float) / known.n_prompt.astype(float)
    for row, other, share in zip(known.itertuples(), estimated.itertuples(), off, strict=True):
        print(f"turn {row.turn} {row.breaks}: {row.n_prompt} tokens, {row.n_cached} cached, {other.n_cached} estimated")
        print(f"    off by {share:+.1%} of the prompt, TTFT {row.ttft_s:.3g} s")
    return bool(known.is_known.all() and not estimated.is_known.any() and (off.abs() <= 0.1).all())


if __name__ == "__main__":
    if sys.argv[1:] == ["served"]:
        sys.exit(not served())
    main(*sys.argv[1:])
