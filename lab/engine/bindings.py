"""The functions of llama.cpp and ggml that the engine calls, with their types.

llama-cpp-python binds those of llama.cpp; those of ggml (ggml.h, ggml-alloc.h, ggml-backend.h,
gguf.h) are declared here. Only the lab's child processes load the libraries.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from lab.errors import LabError

P = ctypes.c_void_p
I64 = ctypes.c_int64
SIZE = ctypes.c_size_t
TEXT = ctypes.c_char_p
INT = ctypes.c_int
F = ctypes.c_float
B = ctypes.c_bool


class InitParams(ctypes.Structure):
    """struct ggml_init_params of ggml.h."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


class GgufParams(ctypes.Structure):
    """struct gguf_init_params of gguf.h.

    With no_alloc and without ctx, gguf reads only the header.
    """

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class TensorStruct(ctypes.Structure):
    """struct ggml_tensor of ggml.h.

    Only files that compare its size with ggml's (`tracing.py`) may read one.
    """

    _fields_ = (
        ("type", INT),
        ("buffer", P),
        ("ne", I64 * 4),
        ("nb", SIZE * 4),
        ("op", INT),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", P * 10),
        ("view_src", P),
        ("view_offs", SIZE),
        ("data", P),
        ("name", ctypes.c_char * 64),
        ("extra", P),
        ("padding", ctypes.c_char * 8),
    )


GGUF_INTEGERS = {
    # gguf's type number: the suffix of the function that reads it, and the type of its result
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
}

_BASE: dict[str, tuple[object, ...]] = {
    "ggml_commit ggml_version": (TEXT,),
    "ggml_type_name ggml_op_name": (TEXT, INT),
    "ggml_get_name ggml_backend_buft_name ggml_backend_reg_name": (TEXT, P),
    "ggml_backend_dev_name ggml_backend_dev_description": (TEXT, P),
    "ggml_nelements gguf_get_n_kv gguf_get_n_tensors": (I64, P),
    "ggml_nbytes gguf_get_data_offset": (SIZE, P),
    "ggml_init": (P, InitParams),
    "ggml_free gguf_free": (None, P),
    "ggml_backend_buffer_free ggml_backend_free ggml_backend_synchronize": (None, P),
    "ggml_tensor_overhead": (SIZE,),
    "ggml_row_size": (SIZE, INT, I64),
    "ggml_new_tensor_2d": (P, P, INT, I64, I64),
    "ggml_new_tensor_3d": (P, P, INT, I64, I64, I64),
    "ggml_permute": (P, P, P, INT, INT, INT, INT),
    "ggml_mul_mat": (P, P, P, P),
    "ggml_mul_mat_id": (P, P, P, P, P),
    "ggml_soft_max_ext": (P, P, P, P, F, F),
    "ggml_flash_attn_ext": (P, P, P, P, P, P, F, F, F),
    "ggml_new_graph_custom": (P, P, SIZE, B),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_graph_node": (P, P, INT),
    "ggml_quantize_chunk": (SIZE, INT, ctypes.POINTER(F), P, I64, I64, I64, P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, P, P),
    "ggml_backend_tensor_set": (None, P, TEXT, SIZE, SIZE),
    "ggml_backend_tensor_get": (None, P, P, SIZE, SIZE),
    "ggml_backend_buft_alloc_buffer": (P, P, SIZE),
    "ggml_backend_buffer_get_type ggml_backend_dev_backend_reg": (P, P),
    "ggml_backend_dev_buffer_type": (P, P),
    "ggml_backend_dev_memory": (None, P, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE)),
    "ggml_backend_dev_init ggml_backend_reg_get_proc_address": (P, P, TEXT),
    "ggml_backend_dev_supports_op": (B, P, P),
    "ggml_backend_dev_type": (INT, P),
    "ggml_backend_graph_compute": (INT, P, P),
    "gguf_init_from_file": (P, TEXT, GgufParams),
    "gguf_find_key": (I64, P, TEXT),
    "gguf_get_kv_type gguf_get_arr_type gguf_get_tensor_type": (INT, P, I64),
    "gguf_get_arr_n gguf_get_tensor_size gguf_get_tensor_offset": (SIZE, P, I64),
    "gguf_get_arr_data": (P, P, I64),
    "gguf_get_val_str gguf_get_tensor_name": (TEXT, P, I64),
    "gguf_get_tensor_ne": (ctypes.POINTER(I64), P, I64),
    **{f"gguf_get_val_{name}": (result, P, I64) for name, result in GGUF_INTEGERS.values()},
}
"""Functions of the library ggml-base, with the types of the result and of the arguments."""

_OF_HEADERS = ("gguf_get_tensor_ne",)
"""Functions that only a model's header is read with; the libraries of older versions lack them."""

_REGISTRY: dict[str, tuple[object, ...]] = {
    "ggml_backend_dev_count": (SIZE,),
    "ggml_backend_dev_get": (P, SIZE),
    "ggml_backend_reg_by_name ggml_backend_load": (P, TEXT),
    "ggml_backend_register": (None, P),
}
"""Functions of the library ggml, which registers all backends."""


def llama_cpp() -> ModuleType:
    """llama-cpp-python's low-level bindings of the C API. LabError if the package is missing."""
    try:
        from llama_cpp import llama_cpp as bindings
    except ModuleNotFoundError as problem:
        if problem.name != "llama_cpp":
            raise
        what = f"The package llama-cpp-python is not installed in this environment ({sys.prefix})."
        hint = (
            "Activate the environment where the lab is installed (source .venv/bin/activate), or "
            "install the package there: python3 -m uv sync"
        )
        raise LabError(what, hint) from None
    module: ModuleType = bindings
    return module


def set_fields(structure: object, **values: object) -> None:
    """Set fields of a structure of the bindings.

    LabError for one that this version does not have: ctypes would take any name, without effect.
    """
    for name, value in values.items():
        if not hasattr(type(structure), name):
            what = (
                f"llama-cpp-python {version('llama-cpp-python')} has no "
                f"{type(structure).__name__}.{name}, which the lab sets."
            )
            raise LabError(what, "Use a newer version.")
        setattr(structure, name, value)


def gbnf_of_schema(schema: str) -> str:
    """The GBNF grammar of a JSON schema, as llama-cpp-python writes it."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    return str(json_schema_to_gbnf(schema))


@cache
def ggml() -> ctypes.CDLL:
    """ggml's functions, from the libraries that llama.cpp has loaded."""
    base = loaded("ggml-base")
    registry = loaded("ggml")
    for library, signatures in ((base, _BASE), (registry, _REGISTRY)):
        for names, (result, *arguments) in signatures.items():
            for name in names.split():
                if name in _OF_HEADERS and not hasattr(library, name):
                    continue
                function = getattr(library, name)
                function.restype = result
                function.argtypes = arguments
                setattr(base, name, function)
    return base


def loaded(name: str) -> ctypes.CDLL:
    """A library that llama.cpp has loaded.

    Loading its file again could give a second copy, with devices and a log of its own.
    """
    library = llama_cpp()._lib
    if os.name != "nt":
        return ctypes.CDLL(library._name, handle=library._handle)
    return ctypes.CDLL(str(Path(library._name).with_name(f"{name}.dll")))
