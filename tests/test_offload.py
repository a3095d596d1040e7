"""Where a model is to run: options, plans and refusals on made-up devices."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from lab.core import memory
from lab.core.asked_settings import table
from lab.core.memory import CPU, Tensor
from lab.core.record import Device, Record, Settings
from lab.errors import LabError
from lab.features.ab import parse_variant
from lab.models import synthetic
from lab.process.worker import Worker
from lab.runner.as_options import options
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.show import text_plan, text_setup
from tests.support import miniature
from tests.support.fake_worker import FakeWorker
from tests.support.records import MODEL, SETTINGS, make_record

MB = 10**6
GB = 10**9
DEVICES = (
    Device("CUDA0", "A GPU", "gpu", 8 * MB),
    Device("CUDA1", "A smaller GPU", "gpu", 4 * MB),
    Device(CPU, "Test CPU", "cpu", None),
)
N_LAYER = 8
TENSORS = (
    Tensor("token_embd.weight", MB),
    Tensor("output.weight", MB),
    *(Tensor(f"blk.{i}.ffn_up_exps.weight", MB) for i in range(N_LAYER)),
)


@pytest.fixture
def worker(fake_worker: FakeWorker) -> FakeWorker:
    """An engine with two devices, and a model of eight layers of a megabyte."""
    fake_worker.build = dataclasses.replace(fake_worker.build, devices=DEVICES)
    fake_worker.model = dataclasses.replace(
        MODEL,
        n_layer=N_LAYER,
        n_bytes=10 * MB,
        n_ff=16,
    )
    fake_worker.tensors_of_file = TENSORS
    fake_worker.free = {
        "CUDA0": 6 * MB,
        "CUDA1": 4 * MB,
    }
    return fake_worker


def plan_of(worker: FakeWorker, path: Path, **asked: Any) -> Plan:
    usual = {
        "model": str(path),
        "prompt_len": "10",
        "gen": 5,
        "ubatch": 8,
    }
    return make_plan(worker, **{**usual, **asked})


ASKED: list[tuple[str, str, object]] = [
    ("--device cuda0,CUDA1", "devices", ("CUDA0", "CUDA1")),
    ("-dev CUDA1", "devices", ("CUDA1",)),
    ("--split-mode row", "split_mode", "row"),
    ("-sm none --main-gpu 1", "main_gpu", 1),
    ("--tensor-split 3,1", "tensor_split", (3.0, 1.0)),
    ("-ts 0.5/2", "tensor_split", (0.5, 2.0)),
    ("--n-cpu-moe 2", "n_cpu_moe", 2),
    ("-ncmoe 3", "n_cpu_moe", 3),
    ("-ot exps=CPU,attn=CUDA1", "override_tensor", ("exps=CPU", "attn=CUDA1")),
    ("--rpc 127.0.0.1:50052", "rpc", ("127.0.0.1:50052",)),
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


@pytest.mark.parametrize(("text", "field", "value"), ASKED)
def test_options_reach_the_settings_and_their_command_again(
    worker: FakeWorker, model_file: Path, text: str, field: str, value: object
) -> None:
    plan = plan_of(worker, model_file, **parse_variant(text))
    assert getattr(plan.settings, field) == value
    assert settings_again(worker, model_file, plan) == plan.settings


def settings_again(worker: FakeWorker, model_file: Path, plan: Plan) -> Settings:
    """The settings of the plan that the command of a plan's record makes."""
    keywords = parse_variant(" ".join(itertools.chain(*options(record_of(worker, plan)))))
    keywords.pop("model", None)
    again = plan_of(worker, model_file, **keywords).settings
    return dataclasses.replace(again, prompt_sha256=plan.settings.prompt_sha256)


def record_of(worker: FakeWorker, plan: Plan) -> Record:
    model = dataclasses.replace(worker.model, source="embedded", name="smollm2-135m")
    return make_record(settings=plan.settings, model=model, machine=plan.machine)


NEEDS: dict[str, dict[str, Any]] = {
    "main_gpu": {"split_mode": "none"},
    "tensor_split": {"split_mode": "row"},
    "prefill_wait": {"n_gpu_layers": 0},
}
ELSEWHERE = ("lib", "rpc", "seed")  # they need libraries and servers; a variant has no seed


@pytest.mark.parametrize("name", [name for name in table() if name not in ELSEWHERE])
def test_every_setting_reaches_its_record_its_column_and_the_command_again(
    worker: FakeWorker, model_file: Path, name: str
) -> None:
    setting = table()[name]
    needs = NEEDS.get(name, {})
    usual = plan_of(worker, model_file, **needs)
    plan = plan_of(worker, model_file, **needs, **{name: setting.example})
    assert getattr(plan.settings, setting.recorded) != getattr(
        usual.settings, setting.recorded
    )
    assert settings_again(worker, model_file, plan) == plan.settings
    columns = text_setup.of_run(record_of(worker, plan))
    of_usual = text_setup.of_run(record_of(worker, usual))
    assert columns[setting.column] != of_usual[setting.column]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"device": "CUDA7"}, "no such device"),
        ({"device": "CUDA1,cuda1"}, "twice"),
        ({"n_cpu_moe": -1}, "--n-cpu-moe -1"),
        ({"prefill_wait": "never"}, "--prefill-wait never"),
        ({"n_gpu_layers": "many"}, "--n-gpu-layers many"),
        ({"n_gpu_layers": -1}, "--n-gpu-layers -1"),
        ({"n_gpu_layers": 1.5}, "--n-gpu-layers 1.5"),
        ({"split_mode": "columns"}, "--split-mode columns"),
        ({"main_gpu": 0}, "--main-gpu works only with --split-mode none"),
        ({"main_gpu": 2, "split_mode": "none"}, "--main-gpu 2: no such device"),
        ({"tensor_split": "1,2,3"}, "--tensor-split has 3 parts, for 2 devices"),
        ({"tensor_split": "1", "device": "CUDA0,CUDA1"}, "1 part, for 2 devices"),
        ({"tensor_split": "1,1", "device": "none"}, "2 parts, for 0 devices"),
        ({"tensor_split": "a,1"}, "--tensor-split a,1"),
        ({"tensor_split": "0,0"}, "--tensor-split 0,0"),
        ({"tensor_split": "-1,2"}, "--tensor-split -1,2"),
        ({"override_tensor": "ffn_.*"}, "--override-tensor ffn_.* names no device"),
        ({"override_tensor": "ffn_.*="}, "names no device"),
        ({"override_tensor": "ffn_.*=CUDA7"}, "no such device CUDA7"),
        ({"override_tensor": "ffn_(=CPU"}, r"ffn_\( is no regular expression"),
    ],
)
def test_bad_values(
    worker: FakeWorker, model_file: Path, asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LabError, match=reason):
        plan_of(worker, model_file, **asked)
    assert not worker.loads


# What fits


def shown(plan: Plan, capsys: pytest.CaptureFixture[str]) -> str:
    """What `--dry-run` prints, with single spaces."""
    text_plan.print_plan(plan, False)
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_shows_what_goes_where(
    worker: FakeWorker, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(worker, model_file)
    rows = text_plan.places(plan) or []
    assert [row["device"] for row in rows] == ["CUDA0", "CUDA1", CPU]
    # 6 of 10 MB are free there, so 6 of 9 layers
    assert [row["layers"] for row in rows] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8],
        [],
    ]
    assert [row["weights_bytes"] for row in rows] == [6 * MB, 3 * MB, MB]
    assert [row["has_bytes"] for row in rows][:2] == [6 * MB, 4 * MB]
    text = shown(plan, capsys)
    for line in ("CUDA0 0-5 0-5 6", "CUDA1 6-7, output 6-7 3", "CPU none none 1"):
        assert line in text
    assert text_plan.places(plan_of(worker, model_file, n_gpu_layers=0)) is None


def test_a_plan_shows_experts_and_caches_that_lie_apart(
    worker: FakeWorker, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = r"blk\.(0|1|5|7)\..*exps=CPU"
    plan = plan_of(
        worker,
        model_file,
        override_tensor=override,
        kv_offload=False,
    )
    rows = {row["device"]: row for row in text_plan.places(plan) or []}
    assert rows[CPU]["experts"] == [0, 1, 5, 7]
    assert rows[CPU]["caches"] == list(range(N_LAYER))
    assert rows["CUDA0"]["experts"] == [2, 3, 4]
    assert rows["CUDA0"]["caches"] == []
    assert rows[CPU]["weights_bytes"] == 5 * MB
    text = shown(plan, capsys)
    assert "device layers caches experts" in text
    assert "CPU none 0-7 0-1, 5, 7 5" in text


def test_shares_and_a_single_gpu_decide_where_layers_go(
    worker: FakeWorker, model_file: Path
) -> None:
    def layers(**asked: Any) -> dict[str, list[int]]:
        rows = text_plan.places(plan_of(worker, model_file, **asked)) or []
        return {row["device"]: row["layers"] for row in rows}

    assert layers(tensor_split="1,2")["CUDA0"] == [0, 1, 2]
    assert layers(tensor_split=[0, 1])["CUDA1"] == list(range(9))
    assert layers(split_mode="none", main_gpu=1) == {
        "CUDA1": list(range(9)),
        CPU: [],
    }
    assert layers(split_mode="tensor") == {
        "CUDA0": None,
        "CUDA1": None,
        CPU: None,
    }


def test_a_device_that_is_too_small_is_named_with_what_fits(
    worker: FakeWorker, model_file: Path
) -> None:
    worker.free = {
        "CUDA0": 5 * MB,
        "CUDA1": 3 * MB,
    }
    (problem,) = plan_of(worker, model_file).refused.values()
    assert "CUDA0 (A GPU) needs 0.01 GB for 6 layers and has 0.01 GB: at most 4 fit" in problem
    assert problem.endswith("--n-gpu-layers 6")
    assert not plan_of(worker, model_file, n_gpu_layers=6).refused


def test_auto_takes_the_most_layers_that_fit(worker: FakeWorker, model_file: Path) -> None:
    worker.free = {
        "CUDA0": 5 * MB,
        "CUDA1": 3 * MB,
    }
    plan = plan_of(worker, model_file, n_gpu_layers="auto")
    assert plan.settings.n_gpu_layers == 6
    assert not plan.refused
    assert text_plan.notes(plan) == [
        "--n-gpu-layers auto: 6 of 9 layers go to devices (the output counts as one)."
    ]
    assert plan.settings.prefill_wait is None  # no pipeline


def test_auto_takes_all_or_no_layers(worker: FakeWorker, model_file: Path) -> None:
    worker.free = {
        "CUDA0": 60 * MB,
        "CUDA1": 40 * MB,
    }
    plan = plan_of(worker, model_file, n_gpu_layers="auto")
    assert plan.settings.n_gpu_layers == 9
    assert plan.settings.prefill_wait == "end"
    worker.free = {"CUDA0": 1, "CUDA1": 1}
    assert plan_of(worker, model_file, n_gpu_layers="auto").settings.n_gpu_layers == 0
    worker.build = dataclasses.replace(worker.build, devices=DEVICES[-1:])
    plan = plan_of(worker, model_file, n_gpu_layers="auto")
    assert plan.settings.n_gpu_layers == 0
    assert not plan.warnings


def plan_of_70b(worker: FakeWorker, free_bytes: int) -> Plan:
    """A model that is not on this machine, for four GPUs of 16 GB."""
    gpus = tuple(Device(f"CUDA{i}", f"GPU {i}", "gpu", 16 * GB) for i in range(4))
    worker.build = dataclasses.replace(worker.build, devices=(*gpus, DEVICES[-1]))
    worker.free = {device.name: free_bytes for device in gpus}
    return make_plan(
        worker,
        "1000",
        model="llama-3.3-70b:Q4_K_M",
        watch=None,
    )


def test_a_model_that_is_not_here_is_planned_from_its_shape(worker: FakeWorker) -> None:
    plan = plan_of_70b(worker, 16 * GB)
    assert "planned from its shape" in plan.warnings[0]
    assert not plan.refused
    rows = text_plan.places(plan) or []
    assert [len(row["layers"]) for row in rows] == [21, 20, 20, 20, 0]
    assert sum(row["weights_bytes"] for row in rows) == plan.model.n_bytes
    assert all(10 * GB < row["needs_bytes"] < 12 * GB for row in rows[:4])
    (problem,) = plan_of_70b(worker, 8 * GB).refused.values()
    assert "CUDA0 (GPU 0) needs" in problem


# What was recorded


def test_weights_are_repacked_or_not(mini: Path) -> None:
    """Whatever the layouts of this CPU are called: CPU_REPACK, AMX or another name."""

    def weights(repack: bool | None) -> dict[str, int]:
        engine.load(mini, dataclasses.replace(SETTINGS, repack=repack, mmap=False))
        engine.new_context(SETTINGS)
        buffers = engine.placement().buffers
        assert {memory.device_of(buffer.name, ()) for buffer in buffers} == {CPU}
        return {buffer.name: buffer.n_bytes for buffer in buffers if buffer.part == "model"}

    with Worker() as engine:
        usual = weights(None)
        asked = weights(True)
        plain = weights(False)
    assert usual == asked
    assert len(usual) > 1
    rounding = 2**15  # the log has hundredths of a MiB
    assert plain.keys() == {CPU}
    assert sum(plain.values()) <= sum(usual.values()) + rounding


def test_the_engine_says_which_experts_were_moved(tmp_path: Path) -> None:

    path = tmp_path / "experts.gguf"
    synthetic.write(miniature.entry("qwen3moe").shape, "Q4_0", path)
    asked = dataclasses.replace(
        SETTINGS,
        override_tensor=(r"blk\.1\..*exps=CPU",),
        repack=False,
    )
    with Worker() as engine:
        engine.load(path, asked)
        engine.new_context(asked)
        placement = engine.placement()
    n_layer = len(placement.layers) - 1
    assert placement.caches == (CPU,) * n_layer
    assert placement.experts == (CPU,) * n_layer
