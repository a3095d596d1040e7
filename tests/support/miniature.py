"""Models with an architecture of the catalog, but few and narrow layers: made in a second."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from pathlib import Path
from typing import Any

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

MAMBA = {
    "conv_kernel": 4,
    "inner_size": 256,
    "state_size": 16,
    "time_step_rank": 8,
    "group_count": 2,
}
DELTA_NET = {**MAMBA, "state_size": 32, "time_step_rank": 4, "inner_size": 128}
LATENTS = {"attention.kv_lora_rank": 64, "attention.value_length_mla": 32}
EXPERTS = {"n_expert": 8, "n_expert_used": 2, "n_ff_expert": 64, "n_ff_shared": 64}
SHARED = {"expert_shared_count": 1, "expert_gating_func": 2}
LATENT = {"n_head_kv": 1, "head_dim": 80, "head_dim_v": 64, "n_rot": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4": {
        "layers": "wwwww*",
        "n_layer": 12,
        "n_head_kv_full": 1,
        "head_dim": 64,
        "n_rot": 64,
        "window": 256,
        "tied_embeddings": True,
        "keys": {
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "rope.dimension_count_swa": 32,
            "attention.shared_kv_layers": 6,
            "embedding_length_per_layer_input": 32,
        },
    },
    "gemma3n": {
        "n_layer": 25,
        "layers": "wwww*",
        "window": 256,
        "tied_embeddings": True,
        "keys": {"embedding_length_per_layer_input": 256},
    },
    "deepseek2": {
        **EXPERTS,
        **LATENT,
        "keys": {
            **SHARED,
            **LATENTS,
            "attention.q_lora_rank": 48,
            "attention.key_length_mla": 48,
            "leading_dense_block_count": 1,
        },
    },
    "kimi-linear": {
        **EXPERTS,
        **LATENT,
        "layers": "rrr*",
        "n_head": 4,
        "ssm": {"conv_kernel": 4},
        "keys": {
            **SHARED,
            **LATENTS,
            "kda.head_dim": 32,
            "attention.key_length_mla": 48,
            "leading_dense_block_count": 1,
        },
    },
    "glm4moe": {**EXPERTS, "keys": {**SHARED, "leading_dense_block_count": 1}},
    "minimax-m2": {
        **EXPERTS,
        "n_ff": 64,
        "n_ff_shared": None,
        "keys": {"expert_gating_func": 2},
    },
    "mimo2": {
        **EXPERTS,
        "n_ff_shared": None,
        "layers": "*www",
        "n_head_kv_full": 1,
        "head_dim": 48,
        "head_dim_v": 32,
        "window": 256,
        "keys": {"leading_dense_block_count": 1},
    },
    "step35": {
        **EXPERTS,
        "layers": "*www",
        "window": 256,
        "keys": {**SHARED, "leading_dense_block_count": 1},
    },
    "llama4": {**EXPERTS, "n_expert_used": 1, "keys": {"interleave_moe_layer_step": 2}},
    "nemotron_h": {"layers": "rfr*", "n_layer": 8, "ssm": MAMBA},
    "nemotron_h_moe": {
        **EXPERTS,
        "layers": "rfr*",
        "n_layer": 8,
        "ssm": MAMBA,
        "keys": {"expert_shared_count": 1, "moe_latent_size": 32},
    },
    "granitehybrid": {**EXPERTS, "n_ff": 64, "layers": "rrr*", "ssm": MAMBA},
    "granite": {"keys": {"logit_scale": 8.0}},
    "falcon-h1": {"ssm": MAMBA},
    "mamba2": {"layers": "r", "n_head": 0, "n_ff": 0, "ssm": MAMBA},
    "lfm2": {"layers": "rr*", "tied_embeddings": True, "keys": {"shortconv.l_cache": 3}},
    "lfm2moe": {
        **EXPERTS,
        "n_ff_shared": None,
        "layers": "rr*r",
        "tied_embeddings": True,
        "keys": {
            "shortconv.l_cache": 3,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
        },
    },
    "qwen3next": {**EXPERTS, "layers": "rrr*", "ssm": DELTA_NET, "n_rot": 16},
    "seed_oss": {},
    "exaone4": {},
    "olmo2": {"layers": "www*", "window": 256},
    "hunyuan-moe": {**EXPERTS, "n_ff": 64},
    "hunyuan-dense": {},
    "ernie4_5-moe": {
        **EXPERTS,
        "keys": {"interleave_moe_layer_step": 1, "leading_dense_block_count": 1},
    },
    "bailingmoe2": {**EXPERTS, "keys": {**SHARED, "leading_dense_block_count": 1}},
    "dots1": {**EXPERTS, "n_head_kv": 4, "keys": {**SHARED, "leading_dense_block_count": 1}},
    "qwen2moe": dict(EXPERTS),
    "cohere2": {
        "layers": "www*",
        "window": 256,
        "tied_embeddings": True,
        "keys": {"logit_scale": 0.25},
    },
}
"""What differs from a plain model in miniatures of architectures of architectures.toml."""


def tiny(arch: str) -> Entry:
    """A model of an architecture of the table that no list above names."""
    plain: dict[str, Any] = {
        "n_layer": 4,
        "n_embd": 128,
        "n_head": 4,
        "n_head_kv": 2,
        "head_dim": 32,
        "n_ff": 256,
        "n_vocab": 512,
        "n_ctx_train": 4096,
        "tied_embeddings": False,
        "rope_base": 10000.0,
    }
    return Entry(f"mini-{arch}", "", Dimensions(arch, **{**plain, **CHANGES[arch]}), "")


def entry(
    arch: str, n_layer: int = 3, width: int = 128, n_vocab: int = 512, window: int = 64
) -> Entry:
    """A model of this architecture with `n_layer` layers, or FEWEST_LAYERS."""
    if arch in CHANGES:
        return tiny(arch)
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


ALIGNMENT = 32
"""Of the weights in a GGUF file, in bytes."""


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


def first_layer(path: Path, target: Path) -> Path:
    """Write the model of a file without all layers but the first: with its vocabulary and its chat
    template, and dozens of times as fast."""
    data = path.read_bytes()
    count = b"llama.block_count" + struct.pack("<I", 4)
    begin = place = data.index(b"token_embd.weight") - 8
    tensors = []
    for _ in range(*struct.unpack_from("<Q", data, 8)):
        name_end = place + 8 + struct.unpack_from("<Q", data, place)[0]
        end = name_end + 8 + 8 * struct.unpack_from("<I", data, name_end)[0]
        tensors.append((data[place:end], *struct.unpack_from("<Q", data, end)))
        place = end + 8
    first_byte = place + -place % ALIGNMENT
    ends = [offset for _, offset in tensors[1:]] + [len(data) - first_byte]
    table = weights = b""
    n_kept = 0
    for (described, offset), tensor_end in zip(tensors, ends, strict=True):
        if b"blk." not in described or b"blk.0." in described:
            n_kept += 1
            table += described + struct.pack("<Q", len(weights))
            weights += data[first_byte + offset : first_byte + tensor_end]
    keys, _, after = data[16:begin].partition(count)
    head = data[:8] + struct.pack("<Q", n_kept) + keys + count + struct.pack("<I", 1)
    head += after[4:] + table
    target.write_bytes(head + bytes(-len(head) % ALIGNMENT) + weights)
    return target
