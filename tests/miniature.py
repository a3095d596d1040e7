"""Models with an architecture of the catalog, but few and narrow layers: made in a second."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from lab.core.record import Settings
from lab.engine import devices, llama, placement
from lab.engine.bindings import llama_cpp
from lab.models import catalog
from lab.models.catalog import Dimensions, Entry

NAMES = {
    "llama": "llama-3.2-1b",
    "phi3": "phi-4-mini",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-0.6b",
    "qwen3moe": "qwen3-30b-a3b",
    "gemma3": "gemma-3-1b",
    "gpt-oss": "gpt-oss-20b",
    "smollm3": "smollm3-3b",
    "gemma2": "gemma-2-2b",
    "mistral3": "ministral-3-3b",
    "glm4": "glm-4-9b",
    "qwen35": "qwen3.5-0.8b",
    "qwen35moe": "qwen3.6-35b-a3b",
}
"""A model of the catalog for each architecture."""


FEWEST_LAYERS = {
    "gemma3": 7,
    "qwen35": 4,
    "qwen35moe": 4,
}
"""So that at least one layer sees everything."""


def entry(
    arch: str, n_layer: int = 3, width: int = 128, n_vocab: int = 512, window: int = 64
) -> Entry:
    """A model of this architecture with `n_layer` layers, or FEWEST_LAYERS."""
    full = catalog.entries()[NAMES[arch]]
    shape: Dimensions = dataclasses.replace(
        full.shape,
        n_layer=max(FEWEST_LAYERS.get(arch, 0), n_layer),
        n_embd=width,
        n_head=4,
        n_head_kv=2,
        head_dim=32,
        n_ff=2 * width,
        n_vocab=n_vocab,
        n_ctx_train=4096,
    )
    if shape.n_rot:
        shape = dataclasses.replace(shape, n_rot=24)
    if shape.n_expert:
        shape = dataclasses.replace(
            shape,
            n_expert=16,
            n_expert_used=2,
            n_ff_expert=width,
        )
    if shape.window:
        shape = dataclasses.replace(shape, window=window)
    if shape.n_ff_shared:
        shape = dataclasses.replace(shape, n_ff_shared=width)
    if shape.ssm:
        state = {
            "state_size": 32,
            "group_count": 2,
            "time_step_rank": 4,
            "inner_size": 128,
            "conv_kernel": 4,
        }
        shape = dataclasses.replace(shape, ssm=state)
    return dataclasses.replace(full, name=f"mini-{arch}", shape=shape)


def quantization(arch: str) -> str:
    return "MXFP4_MOE" if arch == "gpt-oss" else "Q4_0"


def reserved(path: Path, settings: Settings) -> tuple[float, float]:
    """Bytes of the KV cache and of the compute buffers that llama.cpp would reserve.

    By its log; reads no weights.
    """
    devices.start()
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    alive = placement.model_params(params, settings)
    params.no_alloc = True
    params.load_mode = 0
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    devices.clear_log()
    context = lib.llama_init_from_model(model, llama.context_params(settings))
    log = "\n".join(devices.log_lines())
    if context:
        lib.llama_free(context)
    lib.llama_model_free(model)
    del alive
    caches = re.findall(r": size = +([0-9.]+) MiB \( *\d+ cells", log)
    buffers = re.findall(r"compute buffer size = +([0-9.]+) MiB", log)
    return 2**20 * sum(map(float, caches)), 2**20 * sum(map(float, buffers))
