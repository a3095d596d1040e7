"""Models with the architecture of one in the catalog, but few and narrow layers: made and run in a second."""

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


def entry(
    arch: str, n_layer: int = 3, width: int = 128, n_vocab: int = 512, window: int = 64
) -> Entry:
    """A model of this architecture: `n_layer` layers (gemma3: at least 7, so that one sees everything; hybrids: 4)."""
    full = catalog.entries()[NAMES[arch]]
    state = {
        "state_size": 32,
        "group_count": 2,
        "time_step_rank": 4,
        "inner_size": 128,
        "conv_kernel": 4,
    }
    shape: Dimensions = dataclasses.replace(
        full.shape,
        n_layer=max({"gemma3": 7, "qwen35": 4, "qwen35moe": 4}.get(arch, 0), n_layer),
        n_embd=width,
        n_head=4,
        n_head_kv=2,
        head_dim=32,
        n_ff=2 * width,
        n_vocab=n_vocab,
        n_ctx_train=4096,
        n_rot=24 if full.shape.n_rot else None,
        n_expert=16 if full.shape.n_expert else None,
        n_expert_used=2 if full.shape.n_expert else None,
        n_ff_expert=width if full.shape.n_expert else None,
        window=window if full.shape.window else None,
        n_ff_shared=width if full.shape.n_ff_shared else None,
        ssm=state if full.shape.ssm else None,
    )
    return dataclasses.replace(full, name=f"mini-{arch}", shape=shape)


def quantization(arch: str) -> str:
    return "MXFP4_MOE" if arch == "gpt-oss" else "Q4_0"


def reserved(path: Path, asked: Settings) -> tuple[float, float]:
    """Bytes of the KV cache and of the compute buffers that llama.cpp would reserve, by its log; reads no weights."""
    devices.start()
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    alive = placement.model_params(params, asked)
    params.no_alloc = True
    params.load_mode = 0
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    devices.clear_log()
    context = lib.llama_init_from_model(model, llama.context_params(asked))
    lines = devices.log_lines()
    if context:
        lib.llama_free(context)
    lib.llama_model_free(model)
    del alive
    caches = [re.search(r": size = +([0-9.]+) MiB \( *\d+ cells", line) for line in lines]
    computed = [re.search(r"compute buffer size = +([0-9.]+) MiB", line) for line in lines]
    kv, compute = (
        sum(float(match[1]) for match in matches if match) * 2**20 for matches in (caches, computed)
    )
    return kv, compute
