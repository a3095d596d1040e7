"""A miniature of each architecture of the catalog is made, read, run and counted: by the real llama.cpp."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.core import cost, memory, script as scripts
from lab.core.shape import read_layers
from lab.models import catalog, synthetic
from lab.process.worker import Worker
from tests import miniature
from tests.conftest import SETTINGS

SMALL = dataclasses.replace(
    SETTINGS, n_ctx=1024, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


def test_every_architecture_of_the_catalog_has_a_miniature() -> None:
    assert {entry.shape.arch for entry in catalog.entries().values()} == miniature.NAMES.keys()


@pytest.mark.parametrize("arch", miniature.NAMES)
def test_a_miniature_loads_runs_and_is_what_its_shape_says(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    entry = miniature.entry(arch)
    quantization = miniature.quantization(arch)
    path = tmp_path / f"{arch}.gguf"
    synthetic.write(entry.shape, quantization, path)
    read = worker.read_model(path, entry.name, "synthetic")
    expected = synthetic.model_of(entry, quantization)
    for name in (
        "matrices",
        "windows",
        "n_head",
        "n_head_kv",
        "head_dim",
        "n_params",
        "tensor_bytes",
        "n_expert_used",
    ):
        assert getattr(read, name) == getattr(expected, name), name
    assert read.n_expert == entry.shape.n_expert and cost.step(read, 8, 100, 1) is not None
    worker.load(path, SETTINGS)
    worker.new_context(SMALL)
    outcome = worker.run(scripts.run(range(1, 101), 4, 64), lambda progress: None)
    assert outcome.steps.n_tokens == (64, 36, 1, 1, 1) and len(outcome.token_ids) == 4
    kv_bytes, _ = miniature.reserved(path, SMALL)
    assert memory.of_context(read, SMALL).kv_cache_bytes == pytest.approx(
        kv_bytes, rel=0.05, abs=6000
    )


NEED_IMPORTANCES = {
    "F32",
    "Q2_K_S",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ2_M",
    "IQ3_XXS",
    "IQ3_XS",
}
"""What llama.cpp cannot make without an importance matrix, and F32, which needs no quantizer."""


@pytest.mark.parametrize(
    ("arch", "width"), [("llama", 256), ("llama", 320), ("phi3", 256), ("qwen3moe", 256)]
)
def test_mixes_of_types_are_those_of_llama_cpps_quantizer(
    worker: Worker, tmp_path: Path, arch: str, width: int
) -> None:
    entry = miniature.entry(arch, 9, width)
    base = tmp_path / "base.gguf"
    mixed = tmp_path / "mixed.gguf"
    synthetic.write(entry.shape, "Q8_0", base)
    common = {"Q4_0", "Q5_K_M", "Q4_K_M", "Q3_K_S", "Q2_K", "IQ4_XS"}
    kinds = {
        "llama": synthetic.quantizations("types").keys() - NEED_IMPORTANCES,
        "qwen3moe": {"Q4_K_M"},
    }
    for kind in kinds[arch] if (arch, width) != ("llama", 320) and arch in kinds else common:
        worker.quantize(base, mixed, kind, lambda done: None)
        expected = synthetic.model_of(entry, kind).tensor_bytes
        assert worker.read_model(mixed, "m", "file").tensor_bytes == expected, kind


def layers(
    arch: str, n_layer: int, values: dict[str, int], lists: dict[str, tuple[int, ...]] | None = None
):  # type: ignore[no-untyped-def]
    prefix = f"{arch}.attention."
    own = lambda key: values.get(key.removeprefix(prefix))
    listed = lambda key: (lists or {}).get(key.removeprefix(prefix))
    return SimpleNamespace(**read_layers(arch, n_layer, own, listed))


@pytest.mark.parametrize(
    ("arch", "windows"),
    [
        ("gemma3", (9, 9, 9, 9, 9, 0, 9)),
        ("gpt-oss", (9, 0, 9, 0, 9, 0, 9)),
        ("cohere2", (9, 9, 9, 0, 9, 9, 9)),
        ("cohere2moe", (0, 9, 9, 9, 0, 9, 9)),
        ("phi3", None),
        ("llama", None),
    ],
)
def test_which_layers_have_a_window_is_known_by_architecture(
    arch: str, windows: tuple[int, ...] | None
) -> None:
    assert layers(arch, 7, {"sliding_window": 9, "head_count": 4}).windows == windows


def test_a_list_of_windows_in_the_file_counts() -> None:
    listed = layers(
        "gemma4", 3, {"sliding_window": 9, "head_count": 4}, {"sliding_window_pattern": (0, 1, 1)}
    )
    assert listed.windows == (0, 9, 9) and listed.uncounted is None
    assert layers("gemma4", 3, {"sliding_window": 9, "shared_kv_layers": 1}).uncounted
    assert layers("llama4", 3, {"head_count": 4}).uncounted


def test_heads_of_single_layers() -> None:
    given = layers("deci", 3, {"head_count": 4}, {"head_count_kv": (2, 0, 4)})
    assert (given.n_head, given.heads_kv, given.n_head_kv) == (4, (2, 0, 4), None)
    alike = layers("deci", 3, {}, {"head_count": (4, 4, 4)})
    assert (alike.n_head, alike.heads, alike.n_head_kv) == (4, None, 4)
    for absurd in ((4, -4, 4), (4, 10**6, 4), ()):
        assert layers("deci", 3, {}, {"head_count": absurd}).heads is None
