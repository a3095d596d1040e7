"""Where layers, caches and buffers go: the rule, and against what llama.cpp logs on the CPU."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core import memory
from lab.core.memory import CPU, DevicePlace, Tensor
from lab.core.record import Device, Model, Placement, Settings
from lab.models import synthetic
from lab.process.worker import Worker
from lab.runner import machine
from tests.support import miniature
from tests.support.records import MACHINE, MODEL, SETTINGS


def offloaded(**changes: Any) -> Settings:
    return dataclasses.replace(
        SETTINGS,
        **{
            "n_gpu_layers": 3,
            "n_ctx": 512,
            **changes,
        },
    )


# The rule


@pytest.mark.parametrize(
    ("n_gpu_layers", "shares", "expected"),
    [
        (0, (1, 1), "....."),
        (5, (), "....."),
        (1, (1, 1), "....0"),
        (2, (1, 1), "...01"),
        (3, (1, 1), "..001"),
        (5, (1, 1), "00011"),
        (-1, (1, 1), "00011"),
        (99, (3, 1), "00001"),
        (5, (0, 1), "11111"),
        (5, (1, 0), "00000"),
        (3, (1, 1, 1), "..012"),
        (5, (24e9, 8e9, 0), "00001"),
    ],
)
def test_the_last_layers_go_to_devices_by_their_shares(
    n_gpu_layers: int, shares: tuple[float, ...], expected: str
) -> None:
    devices = memory.layers(4, n_gpu_layers, shares)
    assert "".join("." if device is None else str(device) for device in devices) == expected


TENSORS = (
    Tensor("token_embd.weight", 1000),
    Tensor("output_norm.weight", 1),
    Tensor("blk.0.attn_q.weight", 10),
    Tensor("blk.0.ffn_up_exps.weight", 100),
    Tensor("blk.1.attn_q.weight", 20),
    Tensor("blk.1.ffn_up_exps.weight", 200),
)


def places_of(
    settings: Settings, tensors: tuple[Tensor, ...] = TENSORS, model: Model = MODEL
) -> tuple[DevicePlace, ...]:
    """What two equal devices and the CPU hold."""
    places = memory.places(
        model,
        settings,
        tensors,
        ["A", "B"],
        (1, 1),
    )
    assert places is not None
    return places


def weights(settings: Settings, tensors: tuple[Tensor, ...] = TENSORS) -> dict[str, int]:
    places = places_of(settings, tensors)
    return {place.device: place.memory.weights_bytes for place in places}


def test_weights_lie_with_their_layer_and_a_tied_table_twice() -> None:
    assert weights(offloaded()) == {"A": 330, "B": 1001, CPU: 1000}
    assert weights(offloaded(n_gpu_layers=2)) == {"A": 220, "B": 1001, CPU: 1110}
    assert weights(offloaded(n_gpu_layers=0)) == {"A": 0, "B": 0, CPU: 1331}
    with_output = (*TENSORS, Tensor("output.weight", 5000))
    assert weights(offloaded(), with_output) == {"A": 330, "B": 5001, CPU: 1000}


def test_experts_go_elsewhere() -> None:
    assert weights(offloaded(n_cpu_moe=1)) == {"A": 230, "B": 1001, CPU: 1100}
    assert weights(offloaded(n_cpu_moe=2)) == {"A": 30, "B": 1001, CPU: 1300}
    experts = {place.device: place.experts for place in places_of(offloaded(n_cpu_moe=1))}
    assert experts == {"A": (1,), "B": (), CPU: (0,)}


def test_tensors_go_where_the_first_pattern_says() -> None:
    settings = offloaded(override_tensor=(r"blk\.1\..*exps=B", "exps=CPU", "attn=CPU"))
    assert weights(settings) == {"A": 0, "B": 1201, CPU: 1130}
    places = {place.device: place for place in places_of(settings)}
    assert places["A"].layers == (0, 1)
    assert places["A"].experts == ()
    assert places["B"].experts == (1,)
    assert places[CPU].experts == (0,)


@pytest.mark.parametrize("split_mode", ["row", "tensor"])
def test_parts_of_tensors_are_not_worked_out(split_mode: str) -> None:
    settings = offloaded(split_mode=split_mode)
    assert (
        memory.places(
            MODEL,
            settings,
            TENSORS,
            ["A", "B"],
            (1, 1),
        )
        is None
    )


def test_the_cache_lies_with_its_layer_or_on_the_cpu() -> None:
    layer_bytes = 2 * 2 * 16 * 2 * 512  # K and V, 2 heads of 16, F16, 512 positions

    def caches(settings: Settings) -> list[tuple[tuple[int, ...], int | None]]:
        return [(place.caches, place.memory.kv_cache_bytes) for place in places_of(settings)]

    assert caches(offloaded()) == [
        ((0, 1), 2 * layer_bytes),
        ((), 0),
        ((), 0),
    ]
    partly = caches(offloaded(n_gpu_layers=2))
    assert partly == [
        ((1,), layer_bytes),
        ((), 0),
        ((0,), layer_bytes),
    ]
    assert caches(offloaded(kv_offload=False)) == [
        ((), 0),
        ((), 0),
        ((0, 1), 2 * layer_bytes),
    ]


def test_memory_that_is_not_known_is_none() -> None:
    for place in places_of(
        offloaded(), model=dataclasses.replace(MODEL, uncounted="it is odd")
    ):
        assert place.memory.kv_cache_bytes is None
        assert place.memory.compute_bytes is None


def test_devices_come_in_llama_cpps_order() -> None:
    gpus = (
        Device("CUDA0", "A GPU", "gpu"),
        Device("CUDA1", "A GPU", "gpu"),
    )
    slow = (
        Device("CPU", "A CPU", "cpu"),
        Device("Vulkan0", "A small GPU", "igpu"),
    )
    remote = Device("RPC0", "192.0.2.1:50052", "gpu")

    def names(*devices: Device, **changes: Any) -> list[str]:
        here = dataclasses.replace(MACHINE, devices=devices)
        return [device.name for device in machine.used(here, offloaded(**changes))]

    assert names(*gpus, *slow) == ["CUDA0", "CUDA1"]
    assert names(*slow) == ["Vulkan0"]
    assert names(*slow, remote) == ["RPC0", "Vulkan0"]
    assert names(*gpus, remote) == ["RPC0", "CUDA0", "CUDA1"]
    assert names(*gpus, devices=("CUDA1", "CUDA0")) == ["CUDA1", "CUDA0"]
    assert names(*gpus, split_mode="none") == ["CUDA0"]
    assert names(*gpus, split_mode="none", main_gpu=1) == ["CUDA1"]
    assert names(*gpus, n_gpu_layers=0) == []


def test_buffers_belong_to_devices() -> None:
    servers = ("192.0.2.1:50052", "192.0.2.2:50052")
    devices = (
        Device("CUDA0", "A GPU", "gpu"),
        Device("RPC0", servers[0], "gpu"),
        Device("RPC1", servers[1], "gpu"),
        Device("RPC2", servers[1], "gpu"),
    )
    expected = {
        "CPU_REPACK": CPU,
        "AMX": CPU,
        "CUDA_Host": CPU,
        "CUDA0": "CUDA0",
        "CUDA0_Mapped": "CUDA0",
        f"RPC0[{servers[0]}]": "RPC0",
        f"RPC1[{servers[1]}]": "RPC2",  # the second device of that server
        "Metal": "Metal",
    }
    assert {buffer: memory.device_of(buffer, devices) for buffer in expected} == expected


# Against llama.cpp, on the CPU


@pytest.fixture(scope="module")
def engine() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def real_and_planned(
    engine: Worker, path: Path, settings: Settings
) -> tuple[Placement, dict[tuple[str, str], int], tuple[DevicePlace, ...]]:
    """What llama.cpp did, its bytes by device and part, and the plan."""
    model = engine.read_model(path, "m", "file")
    here = dataclasses.replace(MACHINE, devices=engine.build.devices)
    names = [device.name for device in machine.used(here, settings)]
    shares = memory.shares(engine.free_memory(), names)
    tensors = engine.tensors(path)
    system_info = engine.build.system_info
    planned = memory.places(model, settings, tensors, names, shares, system_info)
    assert planned is not None
    engine.load(path, settings)
    engine.new_context(settings)
    real = engine.placement()
    by_part: dict[tuple[str, str], int] = {}
    for buffer in real.buffers:
        key = (memory.device_of(buffer.name, here.devices), buffer.part)
        by_part[key] = by_part.get(key, 0) + buffer.n_bytes
    return real, by_part, planned


def check(
    engine: Worker,
    path: Path,
    compute_within: float | None = None,
) -> None:
    """Layers are exactly as planned, weights and caches within 1 %, compute buffers as asked."""
    settings = offloaded(
        n_gpu_layers=0, n_ctx=2048, n_ubatch=512, mmap=False, flash_attn_resolved=None
    )
    real, by_part, planned = real_and_planned(engine, path, settings)
    rounding = 2**15  # the log has hundredths of a MiB
    for place in planned:
        assert [real.layers[layer] for layer in place.layers] == [place.device] * len(
            place.layers
        )
        assert [real.caches[layer] for layer in place.caches] == [place.device] * len(
            place.caches
        )
        weights = by_part.get((place.device, "model"), 0)
        cache = by_part.get((place.device, "KV"), 0)
        compute = by_part.get((place.device, "compute"), 0)
        assert place.memory.weights_bytes == pytest.approx(weights, rel=0.01, abs=rounding)
        assert place.memory.kv_cache_bytes == pytest.approx(cache, rel=0.01, abs=rounding)
        if compute_within is not None:
            near = pytest.approx(compute, rel=compute_within, abs=rounding)
            assert place.memory.compute_bytes == near
    assert sum(len(place.layers) for place in planned) == len(real.layers)


def test_it_lies_where_llama_cpp_says(engine: Worker, embedded: Path) -> None:
    check(engine, embedded, compute_within=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def written(folder: Path, arch: str, **changes: Any) -> Path:
    entry = miniature.entry(arch, n_layer=6, n_vocab=8192)
    path = folder / f"{arch}.gguf"
    shape = dataclasses.replace(entry.shape, **changes)
    synthetic.write(shape, miniature.quantization(arch), path)
    return path


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_output_matrix_lies_with_the_output(
    engine: Worker, folder: Path, is_tied: bool
) -> None:
    path = written(folder, "llama", tied_embeddings=is_tied)
    check(engine, path)


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_experts_lie_where_llama_cpp_says(
    engine: Worker,
    folder: Path,
    arch: str,
) -> None:
    path = written(folder, arch)
    check(engine, path)
