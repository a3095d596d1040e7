"""Where layers, caches and buffers go: the rule, and against what llama.cpp logs on the CPU."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core import memory
from lab.core.memory import CPU, Place, Tensor
from lab.core.record import Device, Model, Placement, Settings
from lab.models import synthetic
from lab.process.worker import Worker
from lab.runner import machine
from tests import miniature
from tests.conftest import MACHINE, MODEL, SETTINGS


def offloaded(**changes: Any) -> Settings:
    return dataclasses.replace(SETTINGS, **{"n_gpu_layers": 3, "n_ctx": 512, **changes})


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
    known = tuple(None if letter == "." else int(letter) for letter in expected)
    assert memory.layers(4, n_gpu_layers, shares) == known


TENSORS = (
    Tensor("token_embd.weight", 1000),
    Tensor("output_norm.weight", 1),
    Tensor("blk.0.attn_q.weight", 10),
    Tensor("blk.0.ffn_up_exps.weight", 100),
    Tensor("blk.1.attn_q.weight", 20),
    Tensor("blk.1.ffn_up_exps.weight", 200),
)


def weights(
    settings: Settings, tensors: tuple[Tensor, ...] = TENSORS, model: Model = MODEL
) -> dict[str, int]:
    places = memory.places(model, settings, tensors, ["A", "B"], (1, 1))
    assert places is not None
    return {place.device: place.memory.weights_bytes for place in places}


def test_weights_lie_with_their_layer_and_a_tied_table_twice() -> None:
    assert weights(offloaded()) == {"A": 330, "B": 1001, CPU: 1000}
    assert weights(offloaded(n_gpu_layers=2)) == {"A": 220, "B": 1001, CPU: 1110}
    assert weights(offloaded(n_gpu_layers=0)) == {"A": 0, "B": 0, CPU: 1331}
    own = (*TENSORS, Tensor("output.weight", 5000))
    assert weights(offloaded(), own) == {"A": 330, "B": 5001, CPU: 1000}


def test_experts_go_elsewhere() -> None:
    assert weights(offloaded(n_cpu_moe=1)) == {"A": 230, "B": 1001, CPU: 1100}
    assert weights(offloaded(n_cpu_moe=2)) == {"A": 30, "B": 1001, CPU: 1300}


def test_the_cache_lies_with_its_layer_or_on_the_cpu() -> None:
    a_layer = 2 * 2 * 16 * 2 * 512  # K and V, 2 heads of 16, F16, 512 positions

    def caches(settings: Settings) -> list[int | None]:
        return [
            place.memory.kv_cache_bytes
            for place in memory.places(MODEL, settings, TENSORS, ["A", "B"], (1, 1)) or ()
        ]

    assert caches(offloaded()) == [2 * a_layer, 0, 0]
    assert caches(offloaded(n_gpu_layers=2)) == [a_layer, 0, a_layer]
    assert caches(offloaded(kv_offload=False)) == [0, 0, 2 * a_layer]
    unknown = dataclasses.replace(MODEL, uncounted="it is odd")
    places = memory.places(unknown, offloaded(), TENSORS, ["A", "B"], (1, 1)) or ()
    assert {(place.memory.kv_cache_bytes, place.memory.compute_bytes) for place in places} == {
        (None, None)
    }


def test_devices_come_in_llama_cpps_order() -> None:
    kinds = (("CUDA0", "gpu"), ("CUDA1", "gpu"), ("CPU", "cpu"), ("Vulkan0", "igpu"))
    here = dataclasses.replace(
        MACHINE, devices=tuple(Device(name, name, kind) for name, kind in kinds)
    )
    small = dataclasses.replace(here, devices=here.devices[2:])

    def names(machine_here: Any, **changes: Any) -> list[str]:
        return [device.name for device in machine.used(machine_here, offloaded(**changes))]

    assert names(here) == ["CUDA0", "CUDA1"]
    assert names(small) == ["Vulkan0"]
    assert names(here, devices=("CUDA1", "CUDA0")) == ["CUDA1", "CUDA0"]
    assert names(here, n_gpu_layers=0) == []


# Against llama.cpp, on the CPU


@pytest.fixture(scope="module")
def engine() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def real_and_planned(
    engine: Worker, path: Path, settings: Settings
) -> tuple[Placement, dict[tuple[str, str], int], tuple[Place, ...]]:
    """What llama.cpp did, its bytes by device and part, and what was worked out."""
    model = engine.read_model(path, "m", "file")
    here = dataclasses.replace(MACHINE, devices=engine.build.devices)
    names = [device.name for device in machine.used(here, settings)]
    shares = memory.shares(engine.free_memory(), names)
    planned = memory.places(model, settings, engine.tensors(path), names, shares)
    assert planned is not None
    engine.load(path, settings)
    engine.new_context(settings)
    real = engine.placement()
    by_part: dict[tuple[str, str], int] = {}
    for buffer in real.buffers:
        key = memory.device_of(buffer.name, here.devices), buffer.part
        by_part[key] = by_part.get(key, 0) + buffer.n_bytes
    return real, by_part, planned


def check(engine: Worker, path: Path, compute_within: float | None = None) -> None:
    """Layers are exactly those worked out, weights and caches within 1 %, compute buffers where that is asked for."""
    settings = offloaded(
        n_gpu_layers=0, n_ctx=2048, n_ubatch=512, mmap=False, flash_attn_resolved=None
    )
    real, by_part, planned = real_and_planned(engine, path, settings)
    of_layers = {layer: place.device for place in planned for layer in place.layers}
    assert [of_layers[layer] for layer in range(len(of_layers))] == list(real.layers)
    for place in planned:
        rest = 2**15  # the log has hundredths of a MiB
        assert place.memory.weights_bytes == pytest.approx(
            by_part.get((place.device, "model"), 0), rel=0.01, abs=rest
        )
        assert place.memory.kv_cache_bytes == pytest.approx(
            by_part.get((place.device, "KV"), 0), rel=0.01, abs=rest
        )
        if compute_within is None:
            continue
        compute = by_part.get((place.device, "compute"), 0)
        assert place.memory.compute_bytes == pytest.approx(compute, rel=compute_within, abs=rest)


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
def test_experts_lie_where_llama_cpp_says(engine: Worker, folder: Path, arch: str) -> None:
    path = written(folder, arch)
    check(engine, path)
