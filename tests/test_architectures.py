"""A miniature of each architecture of the catalog: made, read, run and counted by llama.cpp."""

import dataclasses
from pathlib import Path

import pytest

from lab.core import cost, memory, script as scripts
from lab.models import catalog, synthetic
from lab.process.worker import Worker
from tests.support import counted, miniature
from tests.support.records import SETTINGS

SMALL = dataclasses.replace(
    SETTINGS, n_ctx=1024, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1
)


def test_every_architecture_of_the_catalog_has_a_miniature() -> None:
    architectures = {entry.shape.arch for entry in catalog.entries().values()}
    assert architectures <= {*miniature.NAMES, *miniature.CHANGES}
    assert set(miniature.NAMES) <= architectures


SAME_AS_IN_THE_FILE = (
    "matrices",
    "windows",
    "n_head",
    "n_head_kv",
    "head_dim",
    "n_params",
    "tensor_bytes",
    "n_expert",
    "n_expert_used",
)

QUICK = (
    "gemma4",
    "gemma3n",
    "deepseek2",
    "kimi-linear",
    "nemotron_h_moe",
    "granitehybrid",
    "lfm2moe",
    "llama4",
    "qwen3next",
    "mimo2",
)
"""Each kind of attention, state and cache once; tests/bench/architectures.py tries all."""


@pytest.mark.parametrize("arch", QUICK)
def test_what_is_counted_is_what_llama_cpp_computes(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    examined = counted.examine(worker, arch, tmp_path)
    for name in (*SAME_AS_IN_THE_FILE, "heads", "heads_kv", "head_dims", "states"):
        in_file = getattr(examined.model, name)
        assert in_file == getattr(examined.expected, name), name
    for comparison in counted.comparisons(examined):
        assert comparison.is_equal, comparison


def test_layers_that_only_draft_are_neither_loaded_nor_counted(
    worker: Worker, tmp_path: Path
) -> None:
    entry = miniature.entry("glm4moe")
    keys = {**(entry.shape.keys or {}), "nextn_predict_layers": 1}
    drafting = dataclasses.replace(
        entry, shape=dataclasses.replace(entry.shape, n_layer=5, keys=keys)
    )
    examined = counted.examine_entry(worker, drafting, "Q4_0", tmp_path)
    assert examined.model.n_layer == 4
    for comparison in counted.comparisons(examined):
        assert comparison.is_equal, comparison


@pytest.mark.parametrize("arch", miniature.NAMES)
def test_a_miniature_loads_runs_and_is_what_its_shape_says(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    entry = miniature.entry(arch)
    quantization = miniature.quantization(arch)
    path = tmp_path / f"{arch}.gguf"
    synthetic.write(entry.shape, quantization, path)

    model = worker.read_model(path, entry.name, "synthetic")
    worker.load(path, SETTINGS)
    worker.new_context(SMALL)
    outcome = worker.run(scripts.run(range(1, 101), 4, 64), lambda progress: None)

    expected = synthetic.model_of(entry, quantization)
    for name in SAME_AS_IN_THE_FILE:
        assert getattr(model, name) == getattr(expected, name), name
    assert cost.step(model, 8, 100, 1) is not None
    assert outcome.steps.n_tokens == (64, 36, 1, 1, 1)
    assert len(outcome.token_ids) == 4
    kv_bytes, _ = miniature.reserved(path, SMALL)
    estimate = memory.of_context(model, SMALL)
    assert estimate.kv_cache_bytes == pytest.approx(kv_bytes, rel=0.05, abs=6000)


NEED_IMPORTANCES = {
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
"""What llama.cpp cannot make without an importance matrix."""

NEEDS_NO_QUANTIZER = {"F32"}
ALL_TYPES = synthetic.quantizations("types").keys() - NEED_IMPORTANCES - NEEDS_NO_QUANTIZER
SOME_TYPES = ("Q4_0", "Q5_K_M", "Q4_K_M", "Q3_K_S", "Q2_K", "IQ4_XS")


@pytest.mark.parametrize(
    ("arch", "width", "quantizations"),
    [
        ("llama", 256, sorted(ALL_TYPES)),
        ("llama", 320, SOME_TYPES),
        ("phi3", 256, SOME_TYPES),
        ("qwen3moe", 256, ("Q4_K_M",)),
    ],
)
def test_mixes_of_types_are_those_of_llama_cpps_quantizer(
    worker: Worker, tmp_path: Path, arch: str, width: int, quantizations: list[str]
) -> None:
    entry = miniature.entry(arch, 9, width)
    shape = dataclasses.replace(entry.shape, n_ff=width)
    entry = dataclasses.replace(entry, shape=shape)
    base = tmp_path / "base.gguf"
    mixed = tmp_path / "mixed.gguf"
    synthetic.write(shape, "Q8_0", base)
    for quantization in quantizations:
        worker.quantize(base, mixed, quantization, lambda done: None)
        expected = synthetic.model_of(entry, quantization).tensor_bytes
        tensor_bytes = worker.read_model(mixed, "m", "file").tensor_bytes
        assert tensor_bytes == expected, quantization
