"""How well the turns of a conversation are predicted from ceilings and plain runs.

    python3 -m uv run python -m tests.bench.turns FOLDER [MODEL...]    # some minutes a model
    python3 -m uv run python -m tests.bench.turns served               # through llama-server
    python3 -m uv run python -m tests.bench.turns replayed             # an agent's requests

In a folder of its own inside FOLDER for each model: ceilings, plain runs that teach the law, then a
grid of conversations. Prints the predicted and the measured TTFT of each turn, and the median
error.

`served`: a conversation with two breaks through the llama-server of the xllamacpp wheel; its cached
tokens are then estimated from the times alone. The exit status is 1 if an estimate is off by more
than 10 % of the prompt.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lab
from lab.core import results
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.features.turns import planning, through_server
from lab.features.turns.figures import rows
from lab.features.turns.recorded_calls import Call, read_recording
from lab.features.turns.recorded_turns import prepared
from lab.features.turns.server_figures import served
from lab.models import catalog
from lab.process.worker import Worker
from lab.remote.examination import connect
from lab.roofline import probing, step_prediction
from lab.runner import prompts
from lab.runner.plan import make_plan
from lab.show import text_prediction
from tests.support.agent_transcript import requests
from tests.support.servers import wheel_server

GRID: tuple[dict[str, Any], ...] = (
    {
        "system": 64,
        "turn": "64+16",
        "turns": 6,
    },
    {
        "system": 1024,
        "turn": "64+16",
        "turns": 6,
        "breaks": "system@4",
    },
    {
        "system": 1024,
        "turn": "256+16",
        "turns": 6,
        "breaks": "truncate@5",
    },
)
MOST_OFF = 0.1  # of the prompt
TOOL_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.last %}{{ message.reasoning_content + '\\n' }}{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def main(folder: str, *models: str) -> None:
    warnings.simplefilter("ignore", UserWarning)
    errors: list[float] = []
    for model in models or ("smollm2-135m",):
        errors += measure(model, Path(folder) / model.replace(":", "-"))
    if errors:
        median = statistics.median(errors)
        print(f"median error {median:.1%}, largest {max(errors):.1%}, of {len(errors)} turns")


def measure(model: str, folder: Path) -> list[float]:
    """Measure and predict the conversations of the grid; returns the error of each turn's TTFT."""
    folder.mkdir(parents=True, exist_ok=True)
    if not probing.kept(folder):
        lab.ceilings(model, types=(), out=folder)
        lab.measure("64,512,1024", 8, 2, model, out=folder)
    errors: list[float] = []
    for asked in GRID:
        records = lab.turns(
            **asked,
            keep="memory",
            repeat=2,
            model=model,
            out=folder,
        )
        timed = [record for record in records if record.run.is_timed]
        print(f"{model} | {asked}", flush=True)
        errors += prediction_errors(timed, folder)
    return errors


def prediction_errors(records: list[Record], folder: Path) -> list[float]:
    """Print the turns of a conversation; returns the error of each prediction."""
    ceilings = probing.kept(folder)
    runs = results.read([folder]).records
    prediction = step_prediction.prediction_for(records[0], ceilings, runs)
    if prediction is None:
        print("nothing is predicted", flush=True)
        return []
    print(text_prediction.basis(prediction), flush=True)
    errors = []
    for row in rows(records, prediction):
        if row.expected_ttft_s is not None:
            error = abs(row.expected_ttft_s / row.ttft_s - 1)
            errors.append(error)
            turn = f"turn {row.turn} | {row.breaks} | {row.n_computed} tokens"
            times = f"{row.ttft_s:.4g} s | {row.expected_ttft_s:.4g} s | {error:.1%}"
            print(f"{turn} | {times}", flush=True)
    return errors


def through_llama_server() -> bool:
    """Whether the estimates of cached tokens are near what the server reports."""
    conversation = planning.conversation(200, "60+12", 6, "system@3,truncate@5", 1)
    text = prompts.source("text").text or ""
    options = ["--threads", "1", "--parallel", "1", "--ctx-size", "2048"]
    with (
        tempfile.TemporaryDirectory() as folder,
        wheel_server(catalog.embedded_path(), *options) as started,
        connect(started.url) as server,
    ):
        path = server.new_file(Path(folder))
        records = list(through_server.execute(conversation, server, text, path, print))
    reported = served(records)
    estimated = served([without_counts(record) for record in records])
    off = (estimated.n_cached - reported.n_cached).astype(float) / reported.n_prompt.astype(
        float
    )
    for row, n_estimated, share in zip(
        reported.itertuples(), estimated.n_cached, off, strict=True
    ):
        tokens = f"{row.n_prompt} tokens, {row.n_cached} cached, {n_estimated} estimated"
        print(f"turn {row.turn} {row.breaks}: {tokens}")
        print(f"    off by {share:+.1%} of the prompt, TTFT {row.ttft_s:.3g} s")
    are_apart = reported.is_known.all() and not estimated.is_known.any()
    return bool(are_apart and off.abs().max() <= MOST_OFF)


def replayed() -> bool:
    """Whether all counts of an agent's prompts agree, with two templates."""
    with tempfile.TemporaryDirectory() as folder:
        with_tools = Path(folder, "tools.gguf")
        script = "gguf.scripts.gguf_new_metadata"
        options = [str(catalog.embedded_path()), str(with_tools)]
        options += ["--chat-template", TOOL_TEMPLATE, "--force"]
        subprocess.run(
            [sys.executable, "-m", script, *options], check=True, capture_output=True
        )
        path = Path(folder, "agent.jsonl")
        path.write_text("\n".join(map(json.dumps, requests(8))))
        own = replay_agrees(catalog.embedded_path(), path, "own template")
        return replay_agrees(with_tools, path, "template with tools") and own


def replay_agrees(model: Path, path: Path, label: str) -> bool:
    print(label)
    recording = read_recording(path)
    options = ["--threads", "1", "--parallel", "1", "--ctx-size", "4096"]
    with wheel_server(model, *options) as started, connect(started.url) as server:
        turns = prepared(recording, server)
        results_path = server.new_file(path.parent)
        records = list(through_server.replay(turns, server, results_path, lambda status: None))
    calls = [
        Call(body, call.answer)
        for body, call in zip(turns.bodies, recording.calls, strict=True)
    ]
    with Worker() as worker:
        plan = make_plan(worker, [16], 2, 1, str(model), threads=1)
        worker.load(plan.file.path, plan.settings)
        worker.new_context(plan.settings)
        in_process, _ = planning.rendered_in(worker, recording._replace(calls=calls))
    for note in turns.notes:
        print(note)
    agrees = True
    for number in range(1, len(calls) + 1):
        request = records[number - 1].request
        usage = request.usage
        if usage is None:
            print(f"call {number} failed: {request.error}")
            return False
        counts = {
            "rendered by the server": turns.n_prompt(number),
            "in process": in_process.prompts[number - 1],
            "counted": usage.prompt_tokens,
        }
        n_same = turns.conversation.same[number - 1]
        row = ", ".join(f"{name} {n}" for name, n in counts.items())
        print(f"call {number}: {row}; shared {n_same}, cached {usage.cached_tokens}")
        n_cached = usage.cached_tokens or 0
        n_answer = turns.conversation.answers[number - 2]  # it may begin as the recorded one
        has_cached = number == 1 or n_same <= n_cached <= n_same + n_answer
        agrees = agrees and len(set(counts.values())) == 1 and has_cached
    return agrees


def without_counts(record: RequestRecord) -> RequestRecord:
    """The record as if the server did not report cached tokens."""
    request = record.request
    usage = request.usage
    if usage is not None:
        usage = dataclasses.replace(usage, cached_tokens=None)
    return dataclasses.replace(
        record, request=dataclasses.replace(request, usage=usage, timings=None)
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["served"]:
        sys.exit(0 if through_llama_server() else 1)
    if sys.argv[1:] == ["replayed"]:
        sys.exit(0 if replayed() else 1)
    main(*sys.argv[1:])
