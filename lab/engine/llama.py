"""llama.cpp, through its low-level C API: load a model, make a context for it.

Why not the comfortable Python class on top of it: that class reuses the cached prefix of a repeated prompt
(its prefill is then free), withholds characters until they are whole (a chunk is not a token), and spends
time between the steps. Here a step is one `llama_decode` and the clock before and after it.

This module runs in the lab's child process (see process/worker.py); only there is native code loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core.record import Buffer, Settings
from lab.engine import model_params, native
from lab.engine.bindings import llama_cpp
from lab.errors import LabError

NO_ROLLBACK = "This forgets or moves what was computed, which this model's memory (recurrent, sliding window) cannot."
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class Loaded:
    """A model in memory."""

    model: Any
    vocab: Any
    n_vocab: int
    bos: int | None  # only where the model puts one before a text
    layers: tuple[str, ...]  # the device of each, the output last
    buffers: tuple[Buffer, ...]
    alive: tuple[Any, ...]  # what llama.cpp keeps pointers to


@dataclass(frozen=True)
class Context:
    """A context (KV cache and compute buffers) of a loaded model; `settings` as llama.cpp resolved them."""

    loaded: Loaded
    pointer: Any
    settings: Settings
    buffers: tuple[Buffer, ...]


def load(path: Path, asked: Settings) -> Loaded:
    """Load the weights where `asked` wants them. LabError with llama.cpp's own words where it refuses."""
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    alive = model_params.apply(params, asked)
    native.forget_log()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise refusal(path)
    vocab = lib.llama_model_get_vocab(model)
    bos = lib.llama_vocab_bos(vocab) if lib.llama_vocab_get_add_bos(vocab) else None
    return Loaded(model, vocab, lib.llama_vocab_n_tokens(vocab), bos, *model_params.placed(), alive)


def refusal(path: Path) -> LabError:
    """Why a model was not loaded, in llama.cpp's words, and what to do about it."""
    reason = native.complaint()
    hint = "Is the file whole? Try another one."
    if "allocate" in reason:
        hint = "There is no room for it: keep layers on the CPU (--n-gpu-layers N), or take a smaller model."
    return LabError(f"llama.cpp cannot load {path.name}: {reason}", hint)


def describe(loaded: Loaded) -> str | None:
    """llama.cpp's own words for a model, such as `llama 135M Q4_1`."""
    buffer = ctypes.create_string_buffer(256)
    llama_cpp().llama_model_desc(loaded.model, buffer, len(buffer))
    return buffer.value.decode(errors="replace") or None


def new_context(loaded: Loaded, asked: Settings) -> Context:
    """A context as `asked`. LabError where llama.cpp refuses, which for a long context means: no memory."""
    lib = llama_cpp()
    params = _context_params(asked)
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
    return Context(loaded, pointer, resolved, model_params.placed()[1])


def reserve(path: Path, asked: Settings) -> list[str]:
    """llama.cpp's log of what it would reserve for a context of a model file, without reading a weight of it."""
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    alive = model_params.apply(params, asked)
    params.no_alloc, params.load_mode = True, 0
    native.forget_log()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise refusal(path)
    native.forget_log()
    pointer = lib.llama_init_from_model(model, _context_params(asked))
    lines = native.log_lines()
    if pointer:
        lib.llama_free(pointer)
    lib.llama_model_free(model)
    del alive
    return lines


def _context_params(asked: Settings) -> Any:
    lib = llama_cpp()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = asked.n_ctx, asked.n_batch, asked.n_ubatch
    params.n_threads, params.n_threads_batch = asked.n_threads, asked.n_threads_batch
    params.flash_attn_type = FLASH_ATTN[asked.flash_attn]
    params.type_k, params.type_v = _type_id(asked.type_k), _type_id(asked.type_v)
    params.op_offload = asked.n_gpu_layers != 0 if asked.op_offload is None else asked.op_offload
    if asked.kv_offload is not None:
        params.offload_kqv = asked.kv_offload
    params.n_seq_max, params.kv_unified = asked.n_seq_max, asked.kv_unified
    params.swa_full = False  # as llama-bench has it
    params.no_perf = True
    return params


def decode(context: Context, batch: Any) -> None:
    """One step, until its logits are there. LabError with the status of llama_decode where it refuses."""
    submit(context, batch)
    llama_cpp().llama_synchronize(context.pointer)


def submit(context: Context, batch: Any) -> None:
    """One step, without waiting for it: devices that work as a pipeline begin the next one meanwhile."""
    status = llama_cpp().llama_decode(context.pointer, batch)
    if status:
        raise LabError(f"llama_decode returned {status}: {native.complaint()}", "Try shorter prompts.")


def forget(context: Context, sequence: int, first: int) -> None:
    """Take all of a sequence from position `first` on out of the cache."""
    lib = llama_cpp()
    if not lib.llama_memory_seq_rm(lib.llama_get_memory(context.pointer), sequence, first, -1):
        raise LabError(NO_ROLLBACK, "Use lab measure.")


def need_rollback(context: Context) -> None:
    """LabError for models that keep more, or less, than the keys and values of every position."""
    lib, model = llama_cpp(), context.loaded.model
    if lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model) or lib.llama_model_n_swa(model) > 0:
        raise LabError(NO_ROLLBACK, "Use lab measure, which prefills every prompt by itself.")


def free_context(context: Context) -> None:
    """Give the context's memory back."""
    llama_cpp().llama_free(context.pointer)


def quantizations() -> dict[str, int]:
    """The quantizations that llama.cpp can make, by name, with their number in its API."""
    prefix = "LLAMA_FTYPE_MOSTLY_"
    return {name.removeprefix(prefix): value for name, value in vars(llama_cpp()).items() if name.startswith(prefix)}


def quantize(source: Path, target: Path, quantization: str) -> None:
    """Write `source` in one of `quantizations`, with llama.cpp's own mix of tensor types for it."""
    lib = llama_cpp()
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
    lib = llama_cpp()
    _need_vocabulary(loaded)
    raw = text.encode()
    n_ids = len(raw) + 8  # a token is at least one byte
    ids = (ctypes.c_int32 * n_ids)()
    n = lib.llama_tokenize(loaded.vocab, raw, len(raw), ids, n_ids, False, False)
    if n < 0:
        raise LabError(f"llama.cpp could not tokenise a text of {len(raw)} bytes.", "Try --prompt random.")
    return ids[:n]


def pieces(loaded: Loaded) -> list[bytes]:
    """The bytes of every token of the vocabulary, by id."""
    lib = llama_cpp()
    _need_vocabulary(loaded)
    buffer = ctypes.create_string_buffer(1024)
    pieces_by_id = []
    for token in range(loaded.n_vocab):
        n = lib.llama_token_to_piece(loaded.vocab, token, buffer, len(buffer), 0, False)
        pieces_by_id.append(buffer.raw[:n] if n > 0 else b"")
    return pieces_by_id


def vocabularies_differ(path: Path, other: Path) -> str | None:
    """In what the tokens of two model files differ, in words; None where they are the same. No weight is read."""
    sides = [_vocabulary(one) for one in (path, other)]
    (kind, ends, tokens), (other_kind, other_ends, other_tokens) = sides
    if len(tokens) != len(other_tokens):
        return f"one has {len(tokens):,} tokens, the other {len(other_tokens):,}"
    if kind != other_kind:
        return "they cut texts into tokens in another way"
    for i, (token, other_token) in enumerate(zip(tokens, other_tokens, strict=True)):
        if token != other_token:
            return f"token {i:,} is {token!r} in one and {other_token!r} in the other"
    return None if ends == other_ends else "other tokens begin and end their texts"


def _vocabulary(path: Path) -> tuple[int, tuple[int, int], list[bytes]]:
    """Of a model file: llama.cpp's kind of vocabulary, which tokens begin and end a text, the text of every token."""
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    native.forget_log()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise refusal(path)
    vocab = lib.llama_model_get_vocab(model)
    tokens = [lib.llama_vocab_get_text(vocab, i) or b"" for i in range(lib.llama_vocab_n_tokens(vocab))]
    ends = lib.llama_vocab_bos(vocab), lib.llama_vocab_eos(vocab)
    kind = lib.llama_vocab_type(vocab)
    lib.llama_model_free(model)
    return kind, ends, tokens


def _need_vocabulary(loaded: Loaded) -> None:
    """LabError for a model without one (random weights): llama.cpp would end the process."""
    if llama_cpp().llama_vocab_type(loaded.vocab) == llama_cpp().LLAMA_VOCAB_TYPE_NONE:
        raise LabError(
            "This model has no vocabulary, so there is no text for it.", "Use --prompt random, without --stream."
        )


def _type_id(name: str) -> int:
    return int(getattr(llama_cpp(), f"GGML_TYPE_{name.upper()}"))


def _flash_attn_resolved(asked: Settings) -> str | None:
    """llama.cpp has no function that returns it; its log has it where it had the choice."""
    if asked.flash_attn != "auto":
        return asked.flash_attn
    if native.log_says("Flash Attention enabled") or native.log_says("enabling flash_attn"):
        return "on"
    return "off" if native.log_says("Flash Attention not supported") else None
