"""The command line of llama-server: llama.cpp's own parser reads it."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.core.asked_settings import table
from lab.formats.other_tools import llama_server
from tests.support import llama_args
from tests.support.records import SETTINGS

MODEL = "/models/a model.gguf"
NOT_HERE = ("device", "rpc", "tensor_split", "override_tensor")
"""Settings that need devices and servers, which llama.cpp's parser looks for."""

CHOSEN: dict[str, Any] = {
    setting.recorded: setting.example
    for name, setting in table().items()
    if setting.server_option and name not in NOT_HERE
} | {"kv_unified": True}
ALL = dataclasses.replace(SETTINGS, **CHOSEN)
"""Every setting differs from its default."""

needs_parser = pytest.mark.skipif(
    sys.platform != "linux", reason="the symbol is that of the wheel for Linux"
)


@needs_parser
@pytest.mark.parametrize("n_users", [4, 1])
def test_llama_cpp_reads_what_was_chosen(n_users: int) -> None:
    command = llama_server(MODEL, ALL, 500, 64, n_users)
    parsed = llama_args.parse(*shlex.split(command))
    types = {"f16": 1, "q4_0": 2, "q8_0": 8}  # enum ggml_type
    expected = {
        "cpuparams.n_threads": 3,
        "cpuparams_batch.n_threads": 5,
        "n_batch": 1024,
        "n_ubatch": 256,
        "n_gpu_layers": 7,
        "flash_attn_type": 1,  # LLAMA_FLASH_ATTN_TYPE_ENABLED
        "cache_type_k": types["q8_0"],
        "cache_type_v": types["q4_0"],
        "no_kv_offload": True,
        "no_op_offload": True,
        "split_mode": 0,  # LLAMA_SPLIT_MODE_NONE
        "main_gpu": 1,
        "load_mode": 0,  # LLAMA_LOAD_MODE_NONE
        "no_extra_bufts": True,
        "n_ctx": n_users * 768,  # 564 for each, in llama.cpp's steps of 256
        "n_parallel": n_users,
        "kv_unified": n_users > 1,
    }
    assert expected.items() <= parsed.items()


@needs_parser
def test_llama_server_has_room_for_every_user(embedded: Path) -> None:
    settings = dataclasses.replace(
        SETTINGS, n_threads=1, n_threads_batch=1, type_k="q8_0", type_v="q8_0", mmap=True
    )
    command = llama_server(str(embedded), settings, 500, 64, 2)
    slots = llama_args.slots(*shlex.split(command)[1:])
    assert [slot["n_ctx"] for slot in slots] == [768, 768]


def test_what_llama_cpp_chooses_is_left_out() -> None:
    unknown = dataclasses.replace(
        SETTINGS,
        n_threads=-1,
        n_threads_batch=-1,
        n_gpu_layers=-1,
    )
    options = shlex.split(llama_server(MODEL, unknown, 500, 64))
    assert options[options.index("--n-gpu-layers") + 1] == "999"
    for option in (
        "--threads",
        "--threads-batch",
        "--repack",
        "--no-repack",
        "--load-mode",
        "--device",
    ):
        assert option not in options
