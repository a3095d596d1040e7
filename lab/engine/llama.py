"""llama.cpp's low-level C API: load a model, make a context, run a step.

The lab does not use the Python class Llama of llama-cpp-python: it reuses the cached prefix of a repeated prompt (so
that prefill is free), holds back incomplete characters (so that a chunk is not a token), and takes time between the
steps. Here a step is one `llama_decode` with the clock read before and after it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core.memory import EXPERTS
from lab.core.record import Buffer, Settings
from lab.engine import devices
from lab.engine.bindings import P, ggml, llama_cpp, loaded as loaded_library
from lab.errors import LabError

NO_ROLLBACK = "This run removes or copies parts of the cache, which this model (recurrent or sliding window) cannot do."
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True)
class Loaded:
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
    alive = model_params(params, asked)
    model = _from_file(path, params)
    vocab = lib.llama_model_get_vocab(model)
    bos = lib.llama_vocab_bos(vocab) if lib.llama_vocab_get_add_bos(vocab) else None
    return Loaded(model, vocab, lib.llama_vocab_n_tokens(vocab), bos, *placed(), alive)


def _from_file(path: Path, params: Any) -> Any:
    """The model in a file. LabError with llama.cpp's log, and for a model that does not decode token by token."""
    lib = llama_cpp()
    value = ctypes.create_string_buffer(256)
    devices.clear_log()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        hint = "The file may be incomplete: get it again, or try another one."
        reason = devices.last_warnings()
        if "allocate" in reason:
            hint = "The memory is too small: keep layers on the CPU (--n-gpu-layers N), or use a smaller model."
        raise LabError(f"llama.cpp cannot load {path.name}: {reason}", hint)

    def header(key: str) -> str:
        n = lib.llama_model_meta_val_str(model, key.encode(), value, len(value))
        return value.value.decode(errors="replace") if n >= 0 else ""

    arch = header("general.architecture")
    pools = (
        header(f"{arch}.pooling_type") not in ("", "0", "-1")
        or header(f"{arch}.attention.causal") == "false"
    )
    if pools or lib.llama_model_is_diffusion(model) or lib.llama_model_has_encoder(model):
        lib.llama_model_free(model)
        what = f"{path.name} does not generate text token by token (it is a diffusion or embedding model, or has an "
        what += "encoder), so it has no prefill and decode to measure."
        raise LabError(what, "Use a model that generates text token by token: lab models")
    return model


def describe(loaded: Loaded) -> str | None:
    """llama.cpp's description of a model, such as `llama 135M Q4_1`."""
    buffer = ctypes.create_string_buffer(256)
    llama_cpp().llama_model_desc(loaded.model, buffer, len(buffer))
    return buffer.value.decode(errors="replace") or None


def new_context(loaded: Loaded, asked: Settings, on_node: Any = None) -> Context:
    """A context with the settings `asked`; `on_node` (ctypes) is called around each operation of each step."""
    lib = llama_cpp()
    params = context_params(asked)
    if on_node is not None:
        params.cb_eval = on_node
    devices.clear_log()
    pointer = lib.llama_init_from_model(loaded.model, params)
    if not pointer:
        what = f"llama.cpp cannot create a context of {asked.n_ctx:,} tokens: {devices.last_warnings()}"
        raise LabError(what, "Try shorter prompts, a smaller --cache-type-k/-v or a smaller model.")
    # llama.cpp has no function that says whether flash attention is on, but logs what it chooses or forces
    flash_attn = None if asked.flash_attn == "auto" else asked.flash_attn
    log = "\n".join(devices.log_lines())
    if "flash_attn is not compatible" in log:  # Grok
        flash_attn = "off"
    elif flash_attn is None:
        is_on = "Flash Attention enabled" in log or "enabling flash_attn" in log
        flash_attn = "on" if is_on else "off" if "Flash Attention not supported" in log else None
    resolved = dataclasses.replace(
        asked, n_ctx=lib.llama_n_ctx(pointer), flash_attn_resolved=flash_attn
    )
    return Context(loaded, pointer, resolved, placed()[1])


def context_params(asked: Settings) -> Any:
    lib = llama_cpp()
    params = lib.llama_context_default_params()
    params.n_ctx = asked.n_ctx
    params.n_batch = asked.n_batch
    params.n_ubatch = asked.n_ubatch
    params.n_threads = asked.n_threads
    params.n_threads_batch = asked.n_threads_batch
    params.flash_attn_type = FLASH_ATTN[asked.flash_attn]
    params.type_k, params.type_v = (
        getattr(lib, f"GGML_TYPE_{kind.upper()}") for kind in (asked.type_k, asked.type_v)
    )
    params.op_offload = asked.n_gpu_layers != 0 if asked.op_offload is None else asked.op_offload
    if asked.kv_offload is not None:
        params.offload_kqv = asked.kv_offload
    params.n_seq_max = asked.n_seq_max
    params.kv_unified = asked.kv_unified
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
        raise LabError(
            f"llama_decode returned {status}: {devices.last_warnings()}", "Try shorter prompts."
        )


def forget(context: Context, sequence: int, first: int) -> None:
    """Remove a sequence's positions from `first` on from the cache."""
    lib = llama_cpp()
    if not lib.llama_memory_seq_rm(lib.llama_get_memory(context.pointer), sequence, first, -1):
        raise LabError(NO_ROLLBACK, "Use lab measure.")


def check_rollback(context: Context) -> None:
    """LabError for models whose cache is not simply the keys and values of every position."""
    lib = llama_cpp()
    model = context.loaded.model
    if (
        lib.llama_model_is_recurrent(model)
        or lib.llama_model_is_hybrid(model)
        or lib.llama_model_n_swa(model) > 0
    ):
        raise LabError(
            NO_ROLLBACK, "Use lab measure, which prefills every prompt from an empty cache."
        )


def free_context(context: Context) -> None:
    llama_cpp().llama_free(context.pointer)


def quantizations() -> dict[str, int]:
    """The quantizations that llama.cpp can create: name to number in its API."""
    prefix = "LLAMA_FTYPE_MOSTLY_"
    return {
        name.removeprefix(prefix): value
        for name, value in vars(llama_cpp()).items()
        if name.startswith(prefix)
    }


def quantize(source: Path, target: Path, quantization: str) -> None:
    """Write `source` to `target` in one of `quantizations`, with llama.cpp's mix of tensor types."""
    lib = llama_cpp()
    params = lib.llama_model_quantize_default_params()
    params.ftype = quantizations()[quantization]
    params.allow_requantize = True
    devices.clear_log()
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        what = (
            f"llama.cpp cannot quantize {source.name} to {quantization}: {devices.last_warnings()}"
        )
        raise LabError(what, "Try another quantization.")


def tokenize(loaded: Loaded, text: str) -> list[int]:
    """Token ids of `text`, without a leading BOS."""
    lib = llama_cpp()
    _check_vocabulary(loaded.vocab)
    raw = text.encode()
    n_ids = len(raw) + 8  # a token is at least one byte
    ids = (ctypes.c_int32 * n_ids)()
    n = lib.llama_tokenize(loaded.vocab, raw, len(raw), ids, n_ids, False, False)
    if n < 0:
        raise LabError(
            f"llama.cpp could not tokenize a text of {len(raw)} bytes.", "Try --prompt random."
        )
    return ids[:n]


def pieces(loaded: Loaded) -> list[bytes]:
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
    lib = llama_cpp()
    tokens = []
    ends = []
    for file in (path, other):
        params = lib.llama_model_default_params()
        params.vocab_only = True
        model = _from_file(file, params)
        vocab = lib.llama_model_get_vocab(model)
        _check_vocabulary(vocab)
        tokens.append(
            [
                lib.llama_vocab_get_text(vocab, i) or b""
                for i in range(lib.llama_vocab_n_tokens(vocab))
            ]
        )
        ends.append(
            (lib.llama_vocab_type(vocab), lib.llama_vocab_bos(vocab), lib.llama_vocab_eos(vocab))
        )
        lib.llama_model_free(model)
    if len(tokens[0]) != len(tokens[1]):
        return f"one has {len(tokens[0]):,} tokens, the other {len(tokens[1]):,}"
    if n := sum(token != other_token for token, other_token in zip(*tokens, strict=True)):
        return f"{n:,} tokens differ"
    return (
        None
        if ends[0] == ends[1]
        else "they split texts into tokens, or end them, in different ways"
    )


def _check_vocabulary(vocab: Any) -> None:
    """LabError for a model without a vocabulary (random weights): llama.cpp would abort the process."""
    if llama_cpp().llama_vocab_type(vocab) == llama_cpp().LLAMA_VOCAB_TYPE_NONE:
        hint = "Use a model with trained weights, or measure its times: --prompt random, without --stream."
        raise LabError("This model has no vocabulary, so it cannot read or write text.", hint)


_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_LAYER = re.compile(r"layer\s+\d+ assigned to device ([^\s,]+)")


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", P))


def model_params(params: Any, asked: Settings) -> tuple[Any, ...]:
    """Copy the settings into a llama_model_params. Returns the objects that must live as long as the model."""
    params.n_gpu_layers = asked.n_gpu_layers
    if asked.mmap is not None:
        params.load_mode = int(asked.mmap)  # LLAMA_LOAD_MODE_NONE and _MMAP
    if asked.repack is not None:
        params.use_extra_bufts = asked.repack
    alive: list[Any] = []
    if asked.devices is not None or asked.n_gpu_layers == 0:
        # With 0 layers and no list, a GPU build keeps the weights in memory that its GPU can read, and prefills there.
        names = asked.devices if asked.n_gpu_layers and asked.devices else ()
        pointers = (P * (len(names) + 1))(*(devices.device_of(name) for name in names), None)
        params.devices = ctypes.addressof(pointers)
        alive.append(pointers)
    if asked.n_cpu_moe:  # the experts of the first layers stay in the CPU's memory
        on_cpu = ggml().ggml_backend_dev_buffer_type(devices.device_of(None))
        overrides = [
            _Override(EXPERTS.format(layer).encode(), on_cpu) for layer in range(asked.n_cpu_moe)
        ]
        array = (_Override * (len(overrides) + 1))(*overrides, _Override(None, None))
        params.tensor_buft_overrides = ctypes.addressof(array)
        alive.append(array)
    return tuple(alive)


def placed() -> tuple[tuple[str, ...], tuple[Buffer, ...]]:
    """The device of every layer (the output last), and the buffers, from llama.cpp's log since it was cleared."""
    lines = devices.log_lines()
    buffers = [
        Buffer(m[2], m[1], round(float(m[3]) * 2**20))
        for line in lines
        if (m := _BUFFER.search(line))
    ]
    return tuple(m[1] for line in lines if (m := _LAYER.search(line))), tuple(buffers)


Rows = list[tuple[int, Any, list[Any]]]
"""A step's rows with logits: the index in the batch, the slot of the chosen token, and the batches to copy it into."""


class Logits:
    """The rows of one context. With `is_fixed` the first row's address is read once: llama.cpp's buffer stays."""

    def __init__(self, context: Context, is_fixed: bool) -> None:
        self._lib = llama_cpp()
        self._pointer = context.pointer
        self._n_vocab = context.loaded.n_vocab
        ith = loaded_library(
            "llama"
        ).llama_get_logits_ith  # not the bindings' function: this one returns an address
        ith.restype = ctypes.c_void_p
        ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._ith = functools.partial(ith, context.pointer)
        self._views: dict[int, Any] = {}  # by address
        self._first = self._view(self._address()) if is_fixed else None

    def row(self, i: int) -> Any:
        """The logits of row i of the last step's batch. llama.cpp may reorder the rows of several sequences."""
        address = self._ith(i)
        logits = self._views.get(address)
        if logits is None:
            logits = self._views[address] = self._view(address)
        return logits

    def chooser(self, rows: Rows) -> Callable[[], object]:
        """The function that chooses a step's tokens."""
        if len(rows) == 1 and not rows[0][2] and self._first is not None:
            return functools.partial(self._first.argmax, None, rows[0][1])
        return functools.partial(self._choose, rows)

    def _choose(self, rows: Rows) -> None:
        """Write each row's token into its slot, and copy it into the batches that need it."""
        for i, slot, targets in rows:
            self.row(i).argmax(None, slot)
            for target in targets:
                target[()] = slot

    def has_moved(self) -> bool:
        """Whether the address of the first row has changed."""
        return self._first is not None and self._first.ctypes.data != self._address()

    def _view(self, address: int | None) -> Any:
        import numpy as np

        if not address:
            hint = "The lab can only measure models that generate text."
            raise LabError("llama.cpp returns no logits for this model.", hint)
        row = (ctypes.c_float * self._n_vocab).from_address(address)
        return np.frombuffer(memoryview(row), dtype=np.float32)

    def _address(self) -> int:
        return ctypes.cast(self._lib.llama_get_logits(self._pointer), ctypes.c_void_p).value or 0
