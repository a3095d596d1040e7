"""Disturb one layer's keys in the cache of an engine: `lab quant --cache` must find it.

The child calls `disturb` by its name. It changes the state that llama.cpp saves of a sequence, and
loads it again: the keys of every layer one after the other, each with its type and the bytes of a
row before it (llama_kv_cache::state_write_data).
"""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from lab.engine.bindings import llama_cpp
from lab.engine.llama import LlamaContext

F16 = 1  # ggml's number of the type
HEADER = "<iQ"


def disturb(context: LlamaContext, layer: int, share: float, n_layer: int, n_row: int) -> None:
    """Add noise of `share` of its spread to each key of a layer; `n_row` are the numbers of a
    position's keys in a layer."""
    lib = llama_cpp()
    n_bytes = lib.llama_state_seq_get_size(context.pointer, 0)
    buffer = (ctypes.c_uint8 * n_bytes)()
    assert lib.llama_state_seq_get_data(context.pointer, buffer, n_bytes, 0) == n_bytes
    state = bytearray(buffer)
    header = struct.pack(HEADER, F16, 2 * n_row)
    first = state.index(struct.pack("<II", 0, n_layer) + header) + 8
    second = state.index(header, first + len(header))
    start = first + layer * (second - first) + len(header)
    end = start + (second - first) - len(header)
    keys = np.frombuffer(bytes(state[start:end]), dtype=np.float16).astype(np.float32)
    noise = np.random.default_rng(layer).normal(0, share * keys.std(), len(keys))
    state[start:end] = (keys + noise).astype(np.float16).tobytes()
    changed = (ctypes.c_uint8 * n_bytes).from_buffer(state)
    assert lib.llama_state_seq_set_data(context.pointer, changed, n_bytes, 0) == n_bytes
