"""Prefill steps that are waited for one by one, or once: scripts, the default, what the table says, and the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lab.analysis import networks
from lab.core import record, script
from lab.core.asked_settings import AskedSettings as Asked
from lab.core.record import Device
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner import placing
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter
from lab.runner.warm_engine import WarmEngine
from tests.conftest import MACHINE, MODEL, SETTINGS, FakeWorker, make_record, make_run

TWO = (*MACHINE.devices, Device("RPC0", "one", "gpu"), Device("RPC1", "another", "gpu"))
SERVER = (*MACHINE.devices, Device("RPC0", "RPC server 10.0.0.1:50052", "gpu"), Device("CUDA0", "a GPU", "gpu"))


def test_steps_with_logits_and_those_before_a_move_are_waited_for() -> None:
    run = script.wait_once(script.run(range(20), 3, 8))
    assert [operation.waits for operation in run] == [False, False, True, True]
    sweep = script.wait_once(script.sweep(range(20), 2, 8, every=16))
    assert [(operation.kind, operation.waits) for operation in sweep] == [
        ("prefill", False),
        ("prefill", True),
        ("decode", True),
        ("forget", True),
        ("prefill", True),
        ("decode", True),
    ]
    common = [*script.prefill(0, range(16), 8, is_last=False), script.Operation(record.COPY, target=1)]
    assert [operation.waits for operation in script.wait_once(common)] == [False, True, True]


@pytest.mark.parametrize(
    ("asked", "n_gpu_layers", "wait"),
    [
        (Asked(), 3, "end"),
        (Asked(device="RPC1,RPC0"), 3, "end"),
        (Asked(), 2, None),  # not all layers
        (Asked(device="RPC1"), 3, None),
        (Asked(split_mode="tensor"), 3, None),
        (Asked(kv_offload=False), 3, None),
        (Asked(override_tensor="ffn=CPU"), 3, None),
        (Asked(prefill_wait="step"), 3, "step"),
        (Asked(device="RPC1", prefill_wait="end"), 3, "end"),
    ],
)
def test_the_default_is_once_where_devices_work_as_a_pipeline(
    asked: Asked, n_gpu_layers: int, wait: str | None
) -> None:
    assert placing.settings(asked, n_gpu_layers, TWO, MODEL)["prefill_wait"] == wait
    with pytest.raises(LabError, match="--prefill-wait never"):
        Asked(prefill_wait="never").check()


def test_an_rpc_server_does_not_say_when_a_step_is_done() -> None:
    waits = [
        (Asked(device="RPC0"), 2, "end"),
        (Asked(device="RPC0"), 0, None),
        (Asked(device="CUDA0"), 2, None),
        (Asked(device="RPC0", prefill_wait="step"), 2, "step"),
    ]
    for asked, n_gpu_layers, wait in waits:
        assert placing.settings(asked, n_gpu_layers, SERVER, MODEL)["prefill_wait"] == wait
        warned = placing.warnings(asked, SERVER, MODEL)
        assert bool(warned) == (asked.prefill_wait == "step")


def test_both_ways_are_tried_in_the_warm_up_and_the_table_names_the_difference(embedded: Path) -> None:
    worker = FakeWorker()
    plan = make_plan(worker, [20], 5, 1, str(embedded), prompt="random")  # type: ignore[arg-type]
    settings_here = dataclasses.replace(plan.settings, n_ubatch=8, prefill_wait="end", n_gpu_layers=3)
    plan = dataclasses.replace(plan, settings=settings_here, machine=dataclasses.replace(plan.machine, devices=TWO))
    engine = WarmEngine(plan, worker, Reporter(lambda status: None, plan.order, plan.n_tokens))  # type: ignore[arg-type]
    engine.load()
    engine.open(plan.cases)
    pairs = [(settings.prefill_wait, run.n_prompt) for settings, run in engine.warm_up(plan.cases)][1:]
    assert pairs == [("step", 20), ("end", 20)]
    waits = [[op.waits for op in made if op.kind == "prefill"] for made in worker.scripts[-2:]]
    assert waits == [[True, True, True], [False, False, True]]

    settings = {wait: dataclasses.replace(SETTINGS, prefill_wait=wait) for wait in ("step", "end")}
    slow, fast = (make_record(make_run(20, 1, 0, prefill_ms=ms)) for ms in (1.2, 1.0))
    records = [
        dataclasses.replace(slow, settings=settings["step"]),
        dataclasses.replace(fast, settings=settings["end"]),
    ]
    (sentence,) = networks.pipeline_gains(records)
    assert "1.20x as long" in sentence and "pipeline" in sentence
    same = [dataclasses.replace(fast, settings=settings[wait]) for wait in settings]
    assert networks.pipeline_gains(same) == [] == networks.pipeline_gains(records[:1])


def test_the_engine_chooses_the_same_tokens_either_way(embedded: Path) -> None:
    with Worker() as worker:
        settings = dataclasses.replace(SETTINGS, n_ctx=512, n_ubatch=64)
        worker.load(embedded, settings)
        worker.new_context(settings)
        ids = worker.tokenize("A long enough text about a lamp in a tower by the sea. " * 30)[:300]
        written = script.run(ids, 4, 64)
        step, end = (worker.run(one, lambda progress: None) for one in (written, script.wait_once(written)))
    assert step.token_ids == end.token_ids and step.steps.n_tokens == end.steps.n_tokens
