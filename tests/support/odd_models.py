"""Small models with random weights of architectures that the lab's synthetic models do not have."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH = 64
N_FF = 128
N_VOCAB = 256
N_LAYER = 2
HEAD = 16
SQUARE = (WIDTH, WIDTH)
UP = (WIDTH, N_FF)
DOWN = (N_FF, WIDTH)
NORM = (WIDTH,)
Sizes = dict[str, tuple[int, ...]]
"""Tensors by name with their sizes, the inner one first."""

EMBEDDING: Sizes = {"token_embd.weight": (WIDTH, N_VOCAB)}
OUTPUT: Sizes = {**EMBEDDING, "output_norm.weight": NORM}
FEED_FORWARD: Sizes = {
    "ffn_gate.weight": UP,
    "ffn_up.weight": UP,
    "ffn_down.weight": DOWN,
}
PRODUCTS: Sizes = {f"attn_{name}.weight": SQUARE for name in ("q", "k", "v", "output")}
LLAMA: Sizes = {
    **PRODUCTS,
    **FEED_FORWARD,
    "attn_norm.weight": NORM,
    "ffn_norm.weight": NORM,
}


def per_layer(
    sizes: Sizes,
    start: str = "blk",
    layers: range = range(N_LAYER),
) -> Sizes:
    return {f"{start}.{i}.{name}": size for i in layers for name, size in sizes.items()}


def _t5() -> Sizes:
    attention: Sizes = {f"attn_{name}.weight": SQUARE for name in "qkvo"}
    both: Sizes = {
        **attention,
        "attn_norm.weight": NORM,
        "ffn_norm.weight": NORM,
        **FEED_FORWARD,
    }
    cross: Sizes = {f"cross_{name}": size for name, size in attention.items()}
    decoder = {
        **both,
        **cross,
        "cross_attn_norm.weight": NORM,
        "attn_rel_b.weight": (4, 32),
    }
    encoder = {
        **both,
        "attn_rel_b.weight": (4, 32),
    }
    norms = {"enc.output_norm.weight": NORM, "dec.output_norm.weight": NORM}
    return {
        **EMBEDDING,
        **norms,
        **per_layer(encoder, "enc.blk"),
        **per_layer(decoder, "dec.blk"),
    }


def _mamba() -> Sizes:
    inner = 2 * WIDTH
    state = 16
    rank = 8
    layer: Sizes = {
        "attn_norm.weight": NORM,
        "ssm_in.weight": (WIDTH, 2 * inner),
        "ssm_conv1d.weight": (4, inner),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (inner, rank + 2 * state),
        "ssm_dt.weight": (rank, inner),
        "ssm_dt.bias": (inner,),
        "ssm_a": (state, inner),
        "ssm_d": (inner,),
        "ssm_out.weight": (inner, WIDTH),
    }
    return {
        **OUTPUT,
        **per_layer(layer),
    }


def _lfm2() -> Sizes:
    """A layer of convolution, then one of attention."""
    both: Sizes = {
        **FEED_FORWARD,
        "attn_norm.weight": NORM,
        "ffn_norm.weight": NORM,
    }
    convolution = {
        "conv.weight": (3, WIDTH),
        "in_proj.weight": (WIDTH, 3 * WIDTH),
        "out_proj.weight": SQUARE,
    }
    first: Sizes = {
        **both,
        **{f"shortconv.{name}": size for name, size in convolution.items()},
    }
    second: Sizes = {
        **both,
        **PRODUCTS,
        "attn_q_norm.weight": (HEAD,),
        "attn_k_norm.weight": (HEAD,),
    }
    norm = {"token_embd_norm.weight": NORM}
    return {
        **EMBEDDING,
        **norm,
        **per_layer(first, layers=range(1)),
        **per_layer(second, layers=range(1, 2)),
    }


def _grok() -> Sizes:
    layer = {name: size for name, size in LLAMA.items() if name not in FEED_FORWARD}
    experts: Sizes = {
        name.replace(".", "_exps."): (*size, 2) for name, size in FEED_FORWARD.items()
    }
    norms = {
        "attn_output_norm.weight": NORM,
        "layer_output_norm.weight": NORM,
        "ffn_gate_inp.weight": (WIDTH, 2),
    }
    return {
        **OUTPUT,
        **per_layer({**layer, **experts, **norms}),
    }


_MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * WIDTH,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
}
MODELS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "llada": (
        {
            **OUTPUT,
            **per_layer(LLAMA),
        },
        {},
    ),
    "t5": (_t5(), {"attention.relative_buckets_count": 32}),
    "mamba": (
        _mamba(),
        {
            **_MAMBA,
            "attention.head_count": 0,
            "feed_forward_length": 0,
        },
    ),
    "lfm2": (
        _lfm2(),
        {
            "shortconv.l_cache": 3,
            "attention.head_count_kv": [0, 4],
        },
    ),
    "grok": (_grok(), {"expert_count": 2, "expert_used_count": 1}),
    "llama": (
        {
            **OUTPUT,
            **per_layer(LLAMA),
        },
        {"pooling_type": 3},
    ),
}
"""Tensors and keys by architecture; llama is one that was made an embedding model."""


def write(arch: str, path: Path) -> Path:
    """Write the model of an architecture."""
    sizes, keys = MODELS[arch]
    usual: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": WIDTH,
        "block_count": N_LAYER,
        "feed_forward_length": N_FF,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": N_VOCAB,
    }
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_type_count(2)
    for name, value in {**usual, **keys}.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](f"{arch}.{name}", value)  # type: ignore[operator]
    chance = np.random.default_rng(1)
    for name, size in sizes.items():
        values = chance.standard_normal(size[::-1], dtype=np.float32) / np.float32(
            size[0] ** 0.5
        )
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
