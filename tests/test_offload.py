"""Where a model is to run: options, plans and refusals on made-up devices."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from lab.core import memory
from lab.core.memory import CPU, Tensor
from lab.core.record import Device
from lab.errors import LabError
from lab.features.measure.measuring import parse_variant
from lab.process.worker import Worker
from lab.runner.as_options import options
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.show import text_setup
from tests.conftest import MODEL, SETTINGS, FakeWorker, make_record

MB = 10**6
DEVICES = (
    Device("CUDA0", "A GPU", "gpu", 8 * MB),
    Device("CUDA1", "A smaller GPU", "gpu", 4 * MB),
    Device(CPU, "Test CPU", "cpu", None),
)
LAYERS = 8
TENSORS = (
    Tensor("token_embd.weight", MB),
    Tensor("output.weight", MB),
    *(Tensor(f"blk.{i}.ffn_up.weight", MB) for i in range(LAYERS)),
)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def worker(fake_worker: FakeWorker) -> FakeWorker:
    """An engine with two devices, and a model of eight layers of a megabyte."""
    fake_worker.build = dataclasses.replace(fake_worker.build, devices=DEVICES)
    fake_worker.model = dataclasses.replace(MODEL, n_layer=LAYERS, n_bytes=10 * MB, n_ff=16)
    fake_worker.tensors_of_file = TENSORS
    fake_worker.free = {"CUDA0": 6 * MB, "CUDA1": 4 * MB}
    return fake_worker


def plan(worker: FakeWorker, path: Path, **asked: Any) -> Plan:
    return make_plan(
        cast(Worker, worker),
        **{"model": str(path), "prompt_len": "10", "gen": 5, "ubatch": 8, **asked},
    )


ASKED: list[tuple[str, str, object]] = [
    ("--device cuda0,CUDA1", "devices", ("CUDA0", "CUDA1")),
    ("-dev CUDA1", "devices", ("CUDA1",)),
    ("--n-cpu-moe 2", "n_cpu_moe", 2),
    ("-ncmoe 3", "n_cpu_moe", 3),
    ("--no-kv-offload", "kv_offload", False),
    ("--no-op-offload", "op_offload", False),
    ("--no-mmap", "mmap", False),
    ("--no-repack", "repack", False),
    ("--repack", "repack", True),
    ("--prefill-wait end", "prefill_wait", "end"),
    ("--n-gpu-layers 3", "n_gpu_layers", 3),
    ("-ngl 0", "n_gpu_layers", 0),
    ("--device none", "n_gpu_layers", 0),
]


@pytest.mark.parametrize(("words", "field", "value"), ASKED)
def test_options_reach_the_settings_and_their_command_again(
    worker: FakeWorker, model_file: Path, words: str, field: str, value: object
) -> None:
    made = plan(worker, model_file, **parse_variant(words))
    assert getattr(made.settings, field) == value
    model = dataclasses.replace(worker.model, source="embedded", name="smollm2-135m")
    record = make_record(settings=made.settings, model=model, machine=made.machine)
    again = parse_variant(" ".join(word for pair in options(record) for word in pair))
    again.pop("model", None)
    remade = plan(worker, model_file, **again).settings
    assert dataclasses.replace(remade, prompt_sha256=None) == dataclasses.replace(
        made.settings, prompt_sha256=None
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"device": "CUDA7"}, "no such device"),
        ({"device": "CUDA1,cuda1"}, "twice"),
        ({"n_cpu_moe": -1}, "--n-cpu-moe -1"),
        ({"prefill_wait": "never"}, "--prefill-wait never"),
        ({"n_gpu_layers": "many"}, "--n-gpu-layers many"),
        ({"n_gpu_layers": -1}, "--n-gpu-layers -1"),
        ({"n_gpu_layers": 1.5}, "--n-gpu-layers 1.5"),
    ],
)
def test_bad_values(worker: FakeWorker, model_file: Path, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(LabError, match=says):
        plan(worker, model_file, **asked)


# What fits


def test_a_plan_shows_what_goes_where(
    worker: FakeWorker, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(worker, model_file)
    rows = text_setup.places(made) or []
    assert [row["device"] for row in rows] == ["CUDA0", "CUDA1", CPU]
    assert [row["layers"] for row in rows] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8],
        [],
    ]  # 6 of 10 MB free, so 6 of 9 layers
    assert [row["weights_bytes"] for row in rows] == [6 * MB, 3 * MB, MB]
    assert [row["has_bytes"] for row in rows][:2] == [6 * MB, 4 * MB]
    text_setup.print_plan(made, False)
    shown = capsys.readouterr().out.split()
    for words in ("CUDA0 0-5 6", "CUDA1 6-7, output 3", "CPU none 1"):
        assert words in " ".join(shown)
    assert text_setup.places(plan(worker, model_file, n_gpu_layers=0)) is None


def test_a_device_that_is_too_small_is_named_with_what_fits(
    worker: FakeWorker, model_file: Path
) -> None:
    worker.free = {"CUDA0": 5 * MB, "CUDA1": 3 * MB}
    made = plan(worker, model_file)
    (problem,) = made.refused.values()
    assert "CUDA0 (A GPU) needs 0.0 GB for 6 layers and has 0.0 GB: at most 4 fit" in problem
    assert problem.endswith("--n-gpu-layers 6")
    assert not plan(worker, model_file, n_gpu_layers=6).refused


def test_auto_takes_the_most_layers_that_fit(worker: FakeWorker, model_file: Path) -> None:
    worker.free = {"CUDA0": 5 * MB, "CUDA1": 3 * MB}
    made = plan(worker, model_file, n_gpu_layers="auto")
    assert made.settings.n_gpu_layers == 6 and not made.refused
    assert text_setup.notes(made) == [
        "--n-gpu-layers auto: 6 of 9 layers go to devices (the output counts as one)."
    ]
    assert made.settings.prefill_wait is None  # no pipeline
    worker.free = {"CUDA0": 60 * MB, "CUDA1": 40 * MB}
    made = plan(worker, model_file, n_gpu_layers="auto")
    assert (made.settings.n_gpu_layers, made.settings.prefill_wait) == (9, "end")
    worker.free = {"CUDA0": 1, "CUDA1": 1}
    assert plan(worker, model_file, n_gpu_layers="auto").settings.n_gpu_layers == 0
    worker.build = dataclasses.replace(worker.build, devices=DEVICES[-1:])
    made = plan(worker, model_file, n_gpu_layers="auto")
    assert made.settings.n_gpu_layers == 0 and not made.warnings


def test_a_model_that_is_not_here_is_planned_from_its_shape(
    worker: FakeWorker, tmp_path: Path
) -> None:
    gb = 10**9
    pool = tuple(Device(f"CUDA{i}", f"GPU {i}", "gpu", 16 * gb) for i in range(4))
    worker.build = dataclasses.replace(worker.build, devices=(*pool, DEVICES[-1]))
    worker.free = {device.name: 16 * gb for device in pool}
    made = make_plan(cast(Worker, worker), "1000", model="llama-3.3-70b:Q4_K_M", watch=None)
    assert "planned from its shape" in made.warnings[0] and not made.refused
    rows = text_setup.places(made) or []
    assert [len(row["layers"]) for row in rows] == [21, 20, 20, 20, 0]
    assert sum(row["weights_bytes"] for row in rows) == made.model.n_bytes
    assert all(10 * gb < row["needs_bytes"] < 12 * gb for row in rows[:4])
    worker.free = {device.name: 8 * gb for device in pool}
    small = make_plan(cast(Worker, worker), "1000", model="llama-3.3-70b:Q4_K_M", watch=None)
    assert "CUDA0 (GPU 0) needs" in next(iter(small.refused.values()))


# What was recorded


def test_weights_are_repacked_or_not(mini: Path) -> None:
    """Whatever the layouts of this CPU are called: CPU_REPACK, AMX or another name."""

    def weights(repack: bool | None) -> dict[str, int]:
        started.load(mini, dataclasses.replace(SETTINGS, repack=repack, mmap=False))
        started.new_context(SETTINGS)
        buffers = started.placement().buffers
        assert {memory.device_of(buffer.name, ()) for buffer in buffers} == {CPU}
        return {buffer.name: buffer.n_bytes for buffer in buffers if buffer.part == "model"}

    with Worker() as started:
        usual = weights(None)
        asked = weights(True)
        plain = weights(False)
    assert usual == asked and len(usual) > 1
    assert (
        plain.keys() == {CPU} and sum(plain.values()) <= sum(usual.values()) + 2**15
    )  # the log has hundredths of a MiB
