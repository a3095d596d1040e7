"""llama.cpp's low-level C API: load a model, make a context, run a step.

The lab does not use the Python class Llama of llama-cpp-python: it reuses the cached prefix of a repeated prompt (so
that prefill is free), holds back incomplete characters (so that a chunk is not a token), and takes time between the
steps. Here a step is one `llama_decode` with the clock read before and after it.
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

NO_ROLLBACK = "This run removes or copies parts of the cache, which this model (recurrent or sliding window) cannot do."
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class Loaded:
    """A model in memory."""

    model: Any
    vocab: Any
    n_vocab: int
    bos: int | None  # only if the model adds it before a text
    layers: tuple[str, ...]  # the device of each layer, the output last
    buffers: tuple[Buffer, ...]
    alive: tuple[Any, ...]  # objects that llama.cpp keeps pointers to


@dataclass(frozen=True)
class Context:
    """A context (KV cache and compute buffers) of a loaded model; `settings` as llama.cpp resolved them."""

    loaded: Loaded
    pointer: Any
    settings: Settings
    buffers: tuple[Buffer, ...]


def load(path: Path, asked: Settings) -> Loaded:
    """Load the weights to the devices that `asked` names. LabError with llama.cpp's log if it fails."""
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    alive = model_params.apply(params, asked)
    model = _from_file(path, params)
    vocab = lib.llama_model_get_vocab(model)
    bos = lib.llama_vocab_bos(vocab) if lib.llama_vocab_get_add_bos(vocab) else None
    return Loaded(model, vocab, lib.llama_vocab_n_tokens(vocab), bos, *model_params.placed(), alive)


def _from_file(path: Path, params: Any) -> Any:
    """The model in a file. LabError with llama.cpp's log, and for a model that does not decode token by token."""
    native.clear_log()
    model = llama_cpp().llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise load_error(path)
    if reason := _no_generator(model):
        llama_cpp().llama_model_free(model)
        raise LabError(
            f"{path.name} {reason}, so it has no prefill and decode to measure.",
            "Use a model that generates text token by token: lab models",
        )
    return model


def load_error(path: Path) -> LabError:
    """Why llama.cpp could not load a model, from its log, and what to do."""
    hint, reason = "The file may be incomplete: get it again, or try another one.", native.last_warnings()
    if "allocate" in reason:
        hint = "The memory is too small: keep layers on the CPU (--n-gpu-layers N), or use a smaller model."
    return LabError(f"llama.cpp cannot load {path.name}: {reason}", hint)


def _no_generator(model: Any) -> str:
    """What a model is instead of one that decodes token by token; "" if it does that."""
    lib, value = llama_cpp(), ctypes.create_string_buffer(256)

    def header(key: str) -> str:
        n = lib.llama_model_meta_val_str(model, key.encode(), value, len(value))
        return value.value.decode(errors="replace") if n >= 0 else ""

    arch = header("general.architecture")
    if lib.llama_model_is_diffusion(model):
        return "is a diffusion model, which computes all tokens of an answer together, again and again"
    if lib.llama_model_has_encoder(model):
        return "has an encoder, which reads the whole prompt apart from the decoder"
    if header(f"{arch}.pooling_type") not in ("", "0", "-1") or header(f"{arch}.attention.causal") == "false":
        return "is an embedding model, which turns a text into a vector and generates nothing"
    return ""


def describe(loaded: Loaded) -> str | None:
    """llama.cpp's description of a model, such as `llama 135M Q4_1`."""
    buffer = ctypes.create_string_buffer(256)
    llama_cpp().llama_model_desc(loaded.model, buffer, len(buffer))
    return buffer.value.decode(errors="replace") or None


def new_context(loaded: Loaded, asked: Settings, on_node: Any = None) -> Context:
    """A context with the settings `asked`. LabError if llama.cpp cannot create it, usually for lack of memory.

    `on_node`, a ctypes function that outlives the context, is called before and after each operation of each step.
    """
    lib = llama_cpp()
    params = _context_params(asked)
    if on_node is not None:
        params.cb_eval = on_node
    native.clear_log()
    pointer = lib.llama_init_from_model(loaded.model, params)
    if not pointer:
        raise LabError(
            f"llama.cpp cannot create a context of {asked.n_ctx:,} tokens: {native.last_warnings()}",
            "Try shorter prompts, a smaller --cache-type-k/-v or a smaller model.",
        )
    resolved = dataclasses.replace(
        asked, n_ctx=lib.llama_n_ctx(pointer), flash_attn_resolved=_flash_attn_resolved(asked)
    )
    return Context(loaded, pointer, resolved, model_params.placed()[1])


def reserve(path: Path, asked: Settings) -> list[str]:
    """llama.cpp's log of the memory that a context of a model file needs, without loading the weights."""
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    alive = model_params.apply(params, asked)
    params.no_alloc, params.load_mode = True, 0
    model = _from_file(path, params)
    native.clear_log()
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
    params.type_k, params.type_v = (getattr(lib, f"GGML_TYPE_{kind.upper()}") for kind in (asked.type_k, asked.type_v))
    params.op_offload = asked.n_gpu_layers != 0 if asked.op_offload is None else asked.op_offload
    if asked.kv_offload is not None:
        params.offload_kqv = asked.kv_offload
    params.n_seq_max, params.kv_unified = asked.n_seq_max, asked.kv_unified
    params.swa_full = False  # as llama-bench has it
    params.no_perf = True
    return params


def decode(context: Context, batch: Any) -> None:
    """Run one step and wait for its logits. LabError with the status of llama_decode if it fails."""
    submit(context, batch)
    llama_cpp().llama_synchronize(context.pointer)


def submit(context: Context, batch: Any) -> None:
    """Submit one step without waiting for it, so that devices in a pipeline can start the next one."""
    status = llama_cpp().llama_decode(context.pointer, batch)
    if status:
        raise LabError(f"llama_decode returned {status}: {native.last_warnings()}", "Try shorter prompts.")


def forget(context: Context, sequence: int, first: int) -> None:
    """Remove a sequence's positions from `first` on from the cache."""
    lib = llama_cpp()
    if not lib.llama_memory_seq_rm(lib.llama_get_memory(context.pointer), sequence, first, -1):
        raise LabError(NO_ROLLBACK, "Use lab measure.")


def check_rollback(context: Context) -> None:
    """LabError for models whose cache is not simply the keys and values of every position."""
    lib, model = llama_cpp(), context.loaded.model
    if lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model) or lib.llama_model_n_swa(model) > 0:
        raise LabError(NO_ROLLBACK, "Use lab measure, which prefills every prompt from an empty cache.")


def free_context(context: Context) -> None:
    llama_cpp().llama_free(context.pointer)


def quantizations() -> dict[str, int]:
    """The quantizations that llama.cpp can create: name to number in its API."""
    prefix = "LLAMA_FTYPE_MOSTLY_"
    return {name.removeprefix(prefix): value for name, value in vars(llama_cpp()).items() if name.startswith(prefix)}


def quantize(source: Path, target: Path, quantization: str) -> None:
    """Write `source` to `target` in one of `quantizations`, with llama.cpp's mix of tensor types."""
    lib = llama_cpp()
    params = lib.llama_model_quantize_default_params()
    params.ftype = quantizations()[quantization]
    params.allow_requantize = True
    native.clear_log()
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        raise LabError(
            f"llama.cpp cannot quantize {source.name} to {quantization}: {native.last_warnings()}",
            "Try another quantization.",
        )


def tokenize(loaded: Loaded, text: str) -> list[int]:
    """Token ids of `text`, without a leading BOS."""
    lib = llama_cpp()
    _check_vocabulary(loaded.vocab)
    raw = text.encode()
    n_ids = len(raw) + 8  # a token is at least one byte
    ids = (ctypes.c_int32 * n_ids)()
    n = lib.llama_tokenize(loaded.vocab, raw, len(raw), ids, n_ids, False, False)
    if n < 0:
        raise LabError(f"llama.cpp could not tokenize a text of {len(raw)} bytes.", "Try --prompt random.")
    return ids[:n]


def pieces(loaded: Loaded) -> list[bytes]:
    """The bytes of every token of the vocabulary, by id."""
    lib = llama_cpp()
    _check_vocabulary(loaded.vocab)
    buffer = ctypes.create_string_buffer(1024)
    pieces_by_id = []
    for token in range(loaded.n_vocab):
        n = lib.llama_token_to_piece(loaded.vocab, token, buffer, len(buffer), 0, False)
        pieces_by_id.append(buffer.raw[:n] if n > 0 else b"")
    return pieces_by_id


def vocabularies_differ(path: Path, other: Path) -> str | None:
    """How the vocabularies of two model files differ, in words; None if they are equal. Reads no weights."""
    sides = [_vocabulary(one) for one in (path, other)]
    (kind, ends, tokens), (other_kind, other_ends, other_tokens) = sides
    if len(tokens) != len(other_tokens):
        return f"one has {len(tokens):,} tokens, the other {len(other_tokens):,}"
    if kind != other_kind:
        return "they split texts into tokens in different ways"
    for i, (token, other_token) in enumerate(zip(tokens, other_tokens, strict=True)):
        if token != other_token:
            return f"token {i:,} is {token!r} in one and {other_token!r} in the other"
    return None if ends == other_ends else "their texts begin or end with different tokens"


def _vocabulary(path: Path) -> tuple[int, tuple[int, int], list[bytes]]:
    """A model file's vocabulary: llama.cpp's kind, the tokens that begin and end a text, the text of every token."""
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = _from_file(path, params)
    vocab = lib.llama_model_get_vocab(model)
    _check_vocabulary(vocab)
    tokens = [lib.llama_vocab_get_text(vocab, i) or b"" for i in range(lib.llama_vocab_n_tokens(vocab))]
    ends = lib.llama_vocab_bos(vocab), lib.llama_vocab_eos(vocab)
    kind = lib.llama_vocab_type(vocab)
    lib.llama_model_free(model)
    return kind, ends, tokens


def _check_vocabulary(vocab: Any) -> None:
    """LabError for a model without a vocabulary (random weights): llama.cpp would abort the process."""
    if llama_cpp().llama_vocab_type(vocab) == llama_cpp().LLAMA_VOCAB_TYPE_NONE:
        raise LabError(
            "This model has no vocabulary, so it cannot read or write text.",
            "Use a model with trained weights, or measure its times: --prompt random, without --stream.",
        )


def _flash_attn_resolved(asked: Settings) -> str | None:
    """Whether flash attention is on. llama.cpp has no function for this, but logs what it chooses or forces."""
    if native.log_says("flash_attn is not compatible"):  # Grok
        return "off"
    if asked.flash_attn != "auto":
        return asked.flash_attn
    if native.log_says("Flash Attention enabled") or native.log_says("enabling flash_attn"):
        return "on"
    return "off" if native.log_says("Flash Attention not supported") else None
