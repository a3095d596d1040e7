"""llama.cpp, through its low-level C API: load a model, make a context, step through it.

Why not the comfortable Python class on top of it: that class reuses the cached prefix of a repeated prompt
(its prefill is then free), withholds characters until they are whole (a chunk is not a token), and spends
time between the steps. Here a step is one `llama_decode` and the two clock readings around it.

This module runs in the lab's child process (see worker.py); only there is native code loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import native
from lab.errors import LabError
from lab.record import DECODE, PREFILL, Settings, Steps

FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
N_PREFILLED, FIRST_TOKEN = 0, 1
"""Slots of the progress array: the prompt tokens that are done, then the tokens as they are chosen."""


@dataclass(frozen=True)
class Loaded:
    """A model in memory."""

    model: Any
    vocab: Any
    n_vocab: int
    bos: int | None  # only where the model puts one before a text


@dataclass(frozen=True)
class Context:
    """A context (KV cache and compute buffers) of a loaded model; `settings` as llama.cpp resolved them."""

    loaded: Loaded
    pointer: Any
    settings: Settings


def load(path: Path, n_gpu_layers: int) -> Loaded:
    """Load the weights. LabError with llama.cpp's own words where it refuses."""
    lib = native.llama()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    no_devices = (ctypes.c_void_p * 1)(None)
    if n_gpu_layers == 0:  # else a GPU build keeps the weights where its GPU can read them, and prefills on it
        params.devices = ctypes.addressof(no_devices)
    native.forget_log()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise LabError(
            f"llama.cpp cannot load {path.name}: {native.complaint()}", "Is the file whole? Try another one."
        )
    vocab = lib.llama_model_get_vocab(model)
    adds_bos = lib.llama_vocab_get_add_bos(vocab)
    return Loaded(model, vocab, lib.llama_vocab_n_tokens(vocab), lib.llama_vocab_bos(vocab) if adds_bos else None)


def new_context(loaded: Loaded, asked: Settings) -> Context:
    """A context as `asked`. LabError where llama.cpp refuses, which for a long context means: no memory."""
    lib = native.llama()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = asked.n_ctx, asked.n_batch, asked.n_ubatch
    params.n_threads, params.n_threads_batch = asked.n_threads, asked.n_threads_batch
    params.flash_attn_type = FLASH_ATTN[asked.flash_attn]
    params.type_k, params.type_v = _type_id(asked.type_k), _type_id(asked.type_v)
    params.op_offload = asked.n_gpu_layers != 0
    params.swa_full = False  # as llama-bench has it
    params.no_perf = True
    native.forget_log()
    pointer = lib.llama_init_from_model(loaded.model, params)
    if not pointer:
        raise LabError(
            f"llama.cpp cannot make a context of {asked.n_ctx:,} tokens: {native.complaint()}",
            "Try shorter prompts, a smaller --cache-type-k/-v or a smaller model.",
        )
    resolved = dataclasses.replace(
        asked, n_ctx=lib.llama_n_ctx(pointer), flash_attn_resolved=_flash_attn_resolved(asked)
    )
    return Context(loaded, pointer, resolved)


def free_context(context: Context) -> None:
    """Give the context's memory back."""
    native.llama().llama_free(context.pointer)


def quantizations() -> dict[str, int]:
    """The quantizations that llama.cpp can make, by name, with their number in its API."""
    prefix = "LLAMA_FTYPE_MOSTLY_"
    return {name.removeprefix(prefix): value for name, value in vars(native.llama()).items() if name.startswith(prefix)}


def quantize(source: Path, target: Path, quantization: str) -> None:
    """Write `source` in one of `quantizations`, with llama.cpp's own mix of tensor types for it."""
    lib = native.llama()
    params = lib.llama_model_quantize_default_params()
    params.ftype = quantizations()[quantization]
    params.allow_requantize = True
    native.forget_log()
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        raise LabError(
            f"llama.cpp cannot make {quantization} of {source.name}: {native.complaint()}", "Try another one."
        )


def tokenize(loaded: Loaded, text: str) -> list[int]:
    """Token ids of `text`, without a leading BOS."""
    lib = native.llama()
    _need_vocabulary(loaded)
    raw = text.encode()
    room = len(raw) + 8  # a token is at least one byte
    ids = (ctypes.c_int32 * room)()
    n = lib.llama_tokenize(loaded.vocab, raw, len(raw), ids, room, False, False)
    if n < 0:
        raise LabError(f"llama.cpp could not tokenise a text of {len(raw)} bytes.", "Try --prompt random.")
    return ids[:n]


def pieces(loaded: Loaded) -> list[bytes]:
    """The bytes of every token of the vocabulary, by id."""
    lib = native.llama()
    _need_vocabulary(loaded)
    buffer = ctypes.create_string_buffer(1024)
    found = []
    for token in range(loaded.n_vocab):
        n = lib.llama_token_to_piece(loaded.vocab, token, buffer, len(buffer), 0, False)
        found.append(buffer.raw[:n] if n > 0 else b"")
    return found


def run(
    context: Context, prompt: Sequence[int], n_gen: int, progress: memoryview[int]
) -> tuple[Steps, tuple[int, ...], int | None]:
    """One run from an empty KV cache: the steps, the n_gen chosen tokens, the index of the first end token.

    `progress` is an array of int64 that the parent shares: slot N_PREFILLED, then the tokens as they are
    chosen (-1 before). LabError where llama.cpp refuses a step; nothing of the run is returned then.
    """
    import numpy as np

    lib, pointer = native.llama(), context.pointer
    lib.llama_memory_clear(lib.llama_get_memory(pointer), False)
    native.forget_log()

    def forward(batch: Any) -> None:
        status = lib.llama_decode(pointer, batch)
        if status:
            raise LabError(f"llama_decode returned {status}: {native.complaint()}", "Try shorter prompts.")
        lib.llama_synchronize(pointer)

    tokens = np.frombuffer(progress, dtype=np.int64)[FIRST_TOKEN : FIRST_TOKEN + n_gen]
    tokens.fill(-1)
    slots = [tokens[i : i + 1].reshape(()) for i in range(n_gen)]
    chunks = prefill_chunks(prompt, context.settings.n_ubatch)
    singles = [_batch(tokens.ctypes.data + 8 * i, 1, last=True) for i in range(n_gen - 1)]
    address = _logits_address(context)
    if not address:
        raise LabError("llama.cpp gives no logits for this model.", "Only models that generate text can be measured.")
    row = (ctypes.c_float * context.loaded.n_vocab).from_address(address)
    logits = np.frombuffer(memoryview(row), dtype=np.float32)
    choose = functools.partial(logits.argmax, None)  # greedy, straight from llama.cpp's own buffer
    gc.collect()
    gc.disable()
    try:
        stamps = walk(forward, choose, chunks, singles, slots, time.perf_counter_ns, progress)
    finally:
        gc.enable()
    if _logits_address(context) != address:
        raise LabError("llama.cpp moved its logits during the run.", "Please report this with the model's name.")
    if not np.isfinite(logits).all():
        raise LabError("The model's last logits are not finite numbers.", "The file's weights are damaged.")
    steps = as_steps([n for n, _ in chunks], n_gen - 1, stamps)
    chosen = tuple(int(token) for token in tokens)
    ends = (i for i, token in enumerate(chosen) if lib.llama_vocab_is_eog(context.loaded.vocab, token))
    return steps, chosen, next(ends, None)


def prefill_chunks(prompt: Sequence[int], n_ubatch: int) -> list[tuple[int, Any]]:
    """The prompt as (n_tokens, batch), up to n_ubatch tokens each; only the very last token asks for logits."""
    ids = (ctypes.c_int32 * len(prompt))(*prompt)
    chunks = []
    for first in range(0, len(prompt), n_ubatch):
        n = min(n_ubatch, len(prompt) - first)
        batch = _batch(ctypes.addressof(ids) + 4 * first, n, last=first + n == len(prompt))
        batch.ids = ids  # keeps the memory alive
        chunks.append((n, batch))
    return chunks


def walk(
    forward: Callable[[Any], None],
    choose: Callable[[Any], Any],
    chunks: Sequence[tuple[int, Any]],
    singles: Sequence[Any],
    slots: Sequence[Any],
    clock: Callable[[], int],
    progress: memoryview[int] | list[int],
) -> list[int]:
    """The timed loop: prefill the chunks, then decode the singles. Returns start, ready, end of each step.

    `forward` runs a batch to its end, `choose` puts the most likely next token into a slot. A slot is the
    memory that the next single batch reads its token from, so no token passes through Python: after
    megabytes of weights have gone through the caches, every object that is touched here costs time.
    """
    stamps: list[int] = []
    stamp = stamps.append
    n_prefilled = progress[N_PREFILLED] = 0
    for n, batch in chunks[:-1]:
        stamp(clock())
        forward(batch)
        stamp(clock())
        stamp(stamps[-1])  # no token is chosen here: the step ends when it is ready
        n_prefilled += n
        progress[N_PREFILLED] = n_prefilled
    batches = [chunks[-1][1], *singles]
    for batch, slot in zip(batches, slots, strict=True):
        stamp(clock())
        forward(batch)
        stamp(clock())
        choose(slot)
        stamp(clock())
    return stamps


def as_steps(chunk_sizes: Sequence[int], n_decode: int, stamps: Sequence[int]) -> Steps:
    """The stamps of `walk` as columns, counted from the first start."""
    n_prompt = sum(chunk_sizes)
    sizes = [*chunk_sizes] + [1] * n_decode
    since_start = [stamp - stamps[0] for stamp in stamps]
    return Steps(
        kind=(PREFILL,) * len(chunk_sizes) + (DECODE,) * n_decode,
        n_tokens=tuple(sizes),
        n_past=(*itertools.accumulate(chunk_sizes[:-1], initial=0), *range(n_prompt, n_prompt + n_decode)),
        start_ns=tuple(since_start[0::3]),
        ready_ns=tuple(since_start[1::3]),
        end_ns=tuple(since_start[2::3]),
    )


def _logits_address(context: Context) -> int:
    """Where llama.cpp keeps the logits: it moves only to grow, and every step here has one row of them."""
    logits = native.llama().llama_get_logits(context.pointer)
    return ctypes.cast(logits, ctypes.c_void_p).value or 0


def _batch(address: int, n: int, last: bool) -> Any:
    """A llama_batch over the n token ids (int32) at `address`; positions and sequence are llama.cpp's defaults."""
    wants_logits = (ctypes.c_int8 * n)()
    wants_logits[n - 1] = last
    batch = native.llama().llama_batch(n_tokens=n, token=ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)))
    batch.logits = wants_logits
    return batch


def _need_vocabulary(loaded: Loaded) -> None:
    """LabError for a model without one (random weights): llama.cpp would end the process."""
    if native.llama().llama_vocab_type(loaded.vocab) == native.llama().LLAMA_VOCAB_TYPE_NONE:
        raise LabError(
            "This model has no vocabulary, so there is no text for it.", "Use --prompt random, without --stream."
        )


def _type_id(name: str) -> int:
    return int(getattr(native.llama(), f"GGML_TYPE_{name.upper()}"))


def _flash_attn_resolved(asked: Settings) -> str | None:
    """llama.cpp has no call that tells; its log does where it had the choice."""
    if asked.flash_attn != "auto":
        return asked.flash_attn
    if native.log_says("Flash Attention enabled") or native.log_says("enabling flash_attn"):
        return "on"
    return "off" if native.log_says("Flash Attention not supported") else None
