"""llama.cpp's low-level C API: load a model, make a context, run a step.

The lab does not use the Python class Llama of llama-cpp-python: it reuses the cached prefix of a
repeated prompt (so that prefill is free), holds back incomplete characters (so that a chunk is not
a token), and takes time between the steps. Here a step is one `llama_decode` with the clock read
before and after it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lab.core.asked_settings import table
from lab.core.lists import plural
from lab.core.record import Placement, Settings
from lab.engine import devices, openmp, placement, refusals
from lab.engine.bindings import llama_cpp, loaded as loaded_library, set_fields
from lab.errors import LabError
from lab.process import setup

NO_ROLLBACK = (
    "This run removes or copies parts of the cache, which this model (recurrent or sliding window) "
    "cannot do."
)
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
FLASH_IS_ON = ("Flash Attention enabled", "enabling flash_attn", "auto, set to enabled")
FLASH_IS_OFF = ("Flash Attention not supported", "auto, set to disabled")
"""How versions of llama.cpp log what `auto` became."""


@dataclass(frozen=True)
class Loaded:
    model: object
    vocab: object
    n_vocab: int
    bos: int | None  # only if the model adds it before a text
    placement: Placement  # of the weights
    alive: tuple[object, ...]  # objects that llama.cpp keeps pointers to


@dataclass(frozen=True)
class LlamaContext:
    """A context (KV cache and compute buffers) of a loaded model."""

    loaded: Loaded
    pointer: object
    settings: Settings  # as llama.cpp resolved them
    placement: Placement  # of the context and the weights


def load(path: Path, settings: Settings) -> Loaded:
    """Load the weights to the devices that `settings` names.

    LabError with llama.cpp's log if it fails.
    """
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    alive = placement.model_params(params, settings)
    model = _from_file(path, params)
    vocab = lib.llama_model_get_vocab(model)
    bos = lib.llama_vocab_bos(vocab) if lib.llama_vocab_get_add_bos(vocab) else None
    n_vocab = lib.llama_vocab_n_tokens(vocab)
    return Loaded(model, vocab, n_vocab, bos, placement.read_log(), alive)


def _from_file(path: Path, params: object) -> object:
    """The model in a file.

    LabError with llama.cpp's log, and for a model that does not decode token by token.
    """
    lib = llama_cpp()
    devices.clear_log()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise refusals.of_reason(path, devices.last_warnings())
    if (
        _is_embedding_model(model)
        or lib.llama_model_is_diffusion(model)
        or lib.llama_model_has_encoder(model)
    ):
        lib.llama_model_free(model)
        what = (
            f"{path.name} does not generate text token by token (it is a diffusion or embedding "
            "model, or has an encoder), so it has no prefill and decode to measure."
        )
        raise LabError(what, "Use a model that generates text token by token: lab models")
    return model


def _is_embedding_model(model: object) -> bool:
    arch = _header_text(model, "general.architecture")
    pools = _header_text(model, f"{arch}.pooling_type") not in ("", "0", "-1")
    return pools or _header_text(model, f"{arch}.attention.causal") == "false"


def _header_text(model: object, key: str) -> str:
    """A value of the model's header as text; "" if it is not there."""
    value = ctypes.create_string_buffer(256)
    n = llama_cpp().llama_model_meta_val_str(model, key.encode(), value, len(value))
    return value.value.decode(errors="replace") if n >= 0 else ""


def describe(loaded: Loaded) -> str | None:
    """llama.cpp's description of a model, such as `llama 135M Q4_1`."""
    buffer = ctypes.create_string_buffer(256)
    llama_cpp().llama_model_desc(loaded.model, buffer, len(buffer))
    return buffer.value.decode(errors="replace") or None


def new_context(loaded: Loaded, settings: Settings, on_node: object = None) -> LlamaContext:
    """A context with these settings. LabError with llama.cpp's log if there is none.

    `on_node` (ctypes) is called around each operation of each step.
    """
    lib = llama_cpp()
    params = context_params(settings)
    if on_node is not None:
        params.cb_eval = on_node
    devices.clear_log()
    pointer = lib.llama_init_from_model(loaded.model, params)
    if not pointer:
        reason = devices.last_warnings()
        what = (
            f"llama.cpp cannot create a context of {plural(settings.n_ctx, 'token')}: {reason}"
        )
        raise LabError(
            what, "Try shorter prompts, a smaller --cache-type-k/-v or a smaller model."
        )
    settings = dataclasses.replace(
        settings,
        n_ctx=lib.llama_n_ctx(pointer),
        flash_attn_resolved=_flash_attn(settings.flash_attn or "auto"),
        openmp=openmp.runtime(),
        wait_resolved=setup.resolved_wait(openmp.runtime(), os.environ),
        openmp_variables=setup.user_variables(os.environ),
    )
    of_context = placement.read_log()
    of_both = dataclasses.replace(
        loaded.placement,
        buffers=(*loaded.placement.buffers, *of_context.buffers),
        caches=of_context.caches,
    )
    return LlamaContext(loaded, pointer, settings, of_both)


def _flash_attn(asked: str) -> str | None:
    """Whether flash attention is on or off; None if unknown.

    llama.cpp has no function that says it, but logs what it chooses or forces.
    """
    log = "\n".join(devices.log_lines())
    if "flash_attn is not compatible" in log:  # Grok
        return "off"
    if asked != "auto":
        return asked
    if any(phrase in log for phrase in FLASH_IS_ON):
        return "on"
    if any(phrase in log for phrase in FLASH_IS_OFF):
        return "off"
    return None


def context_params(settings: Settings) -> ctypes.Structure:
    lib = llama_cpp()
    params = lib.llama_context_default_params()
    type_k, type_v = settings.cache_types
    set_fields(
        params,
        n_ctx=settings.n_ctx,
        flash_attn_type=FLASH_ATTN[settings.flash_attn or "auto"],
        type_k=getattr(lib, f"GGML_TYPE_{type_k.upper()}"),
        type_v=getattr(lib, f"GGML_TYPE_{type_v.upper()}"),
        op_offload=settings.n_gpu_layers != 0,
        n_seq_max=settings.n_seq_max,
        swa_full=False,  # as llama-bench has it
        no_perf=True,
    )
    for setting in table().values():
        placement.copy_setting(settings, setting, params, setting.context_param)
    structure: ctypes.Structure = params
    return structure


def decode(context: LlamaContext, batch: object) -> None:
    """Run one step and wait for its logits.

    LabError with the status of llama_decode if it fails.
    """
    submit(context, batch)
    llama_cpp().llama_synchronize(context.pointer)


def submit(context: LlamaContext, batch: object) -> None:
    """Submit one step without waiting, so that devices in a pipeline can start the next one."""
    status = llama_cpp().llama_decode(context.pointer, batch)
    if status:
        what = f"llama_decode returned {status}: {devices.last_warnings()}"
        raise LabError(what, "Try shorter prompts.")


def forget(context: LlamaContext, sequence: int, first: int) -> None:
    """Remove a sequence's positions from `first` on from the cache."""
    lib = llama_cpp()
    if not lib.llama_memory_seq_rm(lib.llama_get_memory(context.pointer), sequence, first, -1):
        raise LabError(NO_ROLLBACK, "Use lab measure.")


def check_rollback(context: LlamaContext) -> None:
    """LabError for models whose cache is not simply the keys and values of every position."""
    lib = llama_cpp()
    model = context.loaded.model
    if (
        lib.llama_model_is_recurrent(model)
        or lib.llama_model_is_hybrid(model)
        or lib.llama_model_n_swa(model) > 0
    ):
        hint = "Use lab measure, which prefills every prompt from an empty cache."
        raise LabError(NO_ROLLBACK, hint)


def free_context(context: LlamaContext) -> None:
    llama_cpp().llama_free(context.pointer)


def quantizations() -> dict[str, int]:
    """The quantizations that llama.cpp can create: name to number in its API."""
    prefix = "LLAMA_FTYPE_MOSTLY_"
    names = [name for name in vars(llama_cpp()) if name.startswith(prefix)]
    return {name.removeprefix(prefix): getattr(llama_cpp(), name) for name in names}


def quantize(source: Path, target: Path, quantization: str) -> None:
    """Write a model in one of `quantizations`, with llama.cpp's mix of tensor types."""
    lib = llama_cpp()
    params = lib.llama_model_quantize_default_params()
    params.ftype = quantizations()[quantization]
    params.allow_requantize = True
    devices.clear_log()
    if lib.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    ):
        reason = devices.last_warnings()
        if "iostream error" in reason or "No space left" in reason:
            free_bytes = shutil.disk_usage(target.parent).free
            what = (
                f"{target.name} could not be written to {target.parent}, "
                f"which has {free_bytes / 1e6:,.0f} MB free."
            )
            hint = "Free some space, or set MINI_LAB_CACHE to a folder on another disk."
            raise LabError(what, hint)
        what = f"llama.cpp cannot quantize {source.name} to {quantization}: {reason}"
        raise LabError(what, "Try another quantization.")


def tokenize(loaded: Loaded, text: str, is_prompt: bool = False) -> list[int]:
    """Token ids of `text`; of a prompt with its special tokens and those that the model adds."""
    lib = llama_cpp()
    _check_vocabulary(loaded.vocab)
    raw = text.encode()
    n_ids = len(raw) + 8  # a token is at least one byte
    ids = (ctypes.c_int32 * n_ids)()
    n = lib.llama_tokenize(loaded.vocab, raw, len(raw), ids, n_ids, is_prompt, is_prompt)
    if n < 0:
        what = f"llama.cpp could not tokenize a text of {len(raw)} bytes."
        raise LabError(what, "Try --prompt random.")
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
    """How the vocabularies of two model files differ, in words; None if they are equal.

    Reads no weights.
    """
    first = _vocabulary(path)
    second = _vocabulary(other)
    if len(first.texts) != len(second.texts):
        return f"one has {len(first.texts):,} tokens, the other {len(second.texts):,}"
    n_different = sum(map(operator.ne, first.texts, second.texts))
    if n_different:
        return f"{plural(n_different, 'token')} differ"
    if first != second:
        return "they split texts into tokens, or end them, in different ways"
    return None


class _Vocabulary(NamedTuple):
    """What must be equal for two models to exchange token ids."""

    texts: list[bytes]
    kind: int
    bos: int
    eos: int


def _vocabulary(path: Path) -> _Vocabulary:
    """The vocabulary in a model's file."""
    lib = llama_cpp()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = _from_file(path, params)
    vocab = lib.llama_model_get_vocab(model)
    _check_vocabulary(vocab)
    ids = range(lib.llama_vocab_n_tokens(vocab))
    texts = [lib.llama_vocab_get_text(vocab, token) or b"" for token in ids]
    bos = lib.llama_vocab_bos(vocab)
    eos = lib.llama_vocab_eos(vocab)
    kind = lib.llama_vocab_type(vocab)
    lib.llama_model_free(model)
    return _Vocabulary(texts, kind, bos, eos)


def _check_vocabulary(vocab: object) -> None:
    """LabError for a model without a vocabulary (random weights), which aborts llama.cpp."""
    if llama_cpp().llama_vocab_type(vocab) == llama_cpp().LLAMA_VOCAB_TYPE_NONE:
        hint = (
            "Use a model with trained weights, or measure its times: --prompt random, without "
            "--stream."
        )
        raise LabError("This model has no vocabulary, so it cannot read or write text.", hint)


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.int64] | npt.NDArray[np.int32]
    Logit = npt.NDArray[np.float32]
    Rows = list[tuple[int, npt.NDArray[np.int64], list[Ids]]]
"""A step's rows with logits: the index in the batch, the slot of the chosen token, and the batches
to copy it into."""


class Logits:
    """The rows with logits of one context.

    With `is_fixed` the first row's address is read once: llama.cpp's buffer stays where it is.
    """

    def __init__(self, context: LlamaContext, is_fixed: bool) -> None:
        self._lib = llama_cpp()
        self._pointer = context.pointer
        self._n_vocab = context.loaded.n_vocab
        # Not the bindings' function: this one returns an address.
        ith = loaded_library("llama").llama_get_logits_ith
        ith.restype = ctypes.c_void_p
        ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._ith = functools.partial(ith, context.pointer)
        self._views: dict[int, Logit] = {}  # by address
        self._first = self._view(self._address()) if is_fixed else None

    def row(self, i: int) -> Logit:
        """The logits of row i of the last step's batch.

        llama.cpp may reorder the rows of several sequences.
        """
        address = self._ith(i)
        logits = self._views.get(address)
        if logits is None:
            logits = self._view(address)
            self._views[address] = logits
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

    def _view(self, address: int | None) -> Logit:
        import numpy as np

        if not address:
            hint = "The lab can only measure models that generate text."
            raise LabError("llama.cpp returns no logits for this model.", hint)
        row = (ctypes.c_float * self._n_vocab).from_address(address)
        return np.frombuffer(memoryview(row), dtype=np.float32)

    def _address(self) -> int:
        return (
            ctypes.cast(self._lib.llama_get_logits(self._pointer), ctypes.c_void_p).value or 0
        )
