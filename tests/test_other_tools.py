"""Command lines for other programs: llama.cpp's own parser reads them, and llama-cpp-python makes the model."""

import dataclasses
import inspect
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.core.asked_settings import CACHE_TYPES, table
from lab.core.record import Settings
from lab.features.exchange.other_tools import BENCH, OPTIONS, PYTHON, command_lines
from tests import llama_args
from tests.conftest import SETTINGS

MODEL = "/models/a model.gguf"
CHOSEN: dict[str, Any] = {
    "n_batch": 1024,
    "n_ubatch": 256,
    "n_threads": 3,
    "n_threads_batch": 5,
    "n_gpu_layers": 7,
    "flash_attn": "on",
    "type_k": "q8_0",
    "type_v": "q4_0",
    "kv_unified": True,
    "n_cpu_moe": 2,
    "kv_offload": False,
    "op_offload": False,
    "mmap": False,
    "repack": False,
}
ALL = dataclasses.replace(SETTINGS, **CHOSEN)
"""Every setting differs from its default; without devices and servers, which this machine would have to have."""

needs_parser = pytest.mark.skipif(sys.platform != "linux", reason="the symbol is that of the wheel for Linux")


def made(settings: Settings, n_users: int = 1, model: str = MODEL) -> dict[str, str]:
    return {line.tool: line.text for line in command_lines(model, settings, 500, 64, n_users)}


def missing(settings: Settings, n_users: int = 1) -> dict[str, tuple[str, ...]]:
    return {line.tool: line.missing for line in command_lines(MODEL, settings, 500, 64, n_users)}


def test_every_setting_of_the_engine_is_in_the_table() -> None:
    names = {setting.record_name or name for name, setting in table().items()}
    assert OPTIONS.keys() == names - {"prompt", "seed", "prefill_wait"}


# llama.cpp's programs


@needs_parser
@pytest.mark.parametrize(("program", "n_users"), [("llama-server", 4), ("llama-cli", 1)])
def test_llama_cpp_reads_what_was_chosen(program: str, n_users: int) -> None:
    read = llama_args.parse(*shlex.split(made(ALL, n_users)[program]))
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
        "load_mode": 0,  # LLAMA_LOAD_MODE_NONE
        "no_extra_bufts": True,
        "n_ctx": n_users * 768,  # 564 for each, in llama.cpp's steps of 256
        "n_parallel": n_users,
        "kv_unified": n_users > 1,
    }
    assert expected.items() <= read.items()


@needs_parser
def test_llama_server_has_room_for_every_user(embedded: Path) -> None:
    settings = dataclasses.replace(SETTINGS, n_threads=1, n_threads_batch=1, type_k="q8_0", type_v="q8_0", mmap=True)
    words = shlex.split(made(settings, 2, str(embedded))["llama-server"])[1:]
    assert [slot["n_ctx"] for slot in llama_args.slots(*words)] == [768, 768]


def test_llama_bench_has_its_own_way_to_write_values() -> None:
    devices = dataclasses.replace(ALL, devices=("CUDA0", "CUDA1"))
    words = shlex.split(made(devices)["llama-bench"])
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert given == {
        "--model": MODEL,
        "--n-prompt": "500",
        "--n-gen": "64",
        "--threads": "3",
        "--batch-size": "1024",
        "--ubatch-size": "256",
        "--flash-attn": "on",
        "--cache-type-k": "q8_0",
        "--cache-type-v": "q4_0",
        "--n-gpu-layers": "7",
        "--device": "CUDA0/CUDA1",
        "--n-cpu-moe": "2",
        "--no-kv-offload": "1",
        "--no-op-offload": "1",
        "--load-mode": "none",
        "--repack": "0",
    }
    assert given.keys() - {"--model", "--n-prompt", "--n-gen"} == {row[BENCH] for row in OPTIONS.values()} - {None}
    assert missing(ALL)["llama-bench"] == ("--threads-batch 5",)


def test_what_llama_cpp_chooses_is_left_out() -> None:
    unknown = dataclasses.replace(SETTINGS, n_threads=-1, n_threads_batch=-1, n_gpu_layers=-1)
    words = shlex.split(made(unknown)["llama-server"])
    assert "--n-gpu-layers" in words and words[words.index("--n-gpu-layers") + 1] == "999"
    assert not {"--threads", "--threads-batch", "--repack", "--no-repack", "--load-mode", "--device"} & set(words)


# llama-cpp-python


def test_llama_cpp_python_makes_the_model(embedded: Path) -> None:
    import llama_cpp

    settings = dataclasses.replace(SETTINGS, n_threads=1, n_ubatch=64, type_k="q8_0", type_v="q8_0", mmap=True)
    text = made(settings, model=str(embedded))["llama-cpp-python"]
    llama = eval(text[:-1] + ", verbose=False)", {"llama_cpp": llama_cpp})
    params = llama.context_params
    assert (params.n_ctx, params.n_ubatch, params.n_threads, params.n_threads_batch) == (768, 64, 1, 2)
    assert (params.type_k, params.flash_attn_type, params.op_offload) == (8, 1, False)
    llama.close()


def test_llama_cpp_python_knows_every_keyword_and_constant() -> None:
    """`Llama` ignores keywords that it does not know."""
    import llama_cpp
    from gguf import GGMLQuantizationType

    known = inspect.signature(llama_cpp.Llama.__init__).parameters
    assert {option for row in OPTIONS.values() if (option := row[PYTHON])} | {"model_path", "n_ctx"} <= known.keys()
    given: dict[str, Any] = {}
    library = type("library", (), {**vars(llama_cpp), "Llama": lambda **keywords: given.update(keywords)})
    eval(made(ALL)["llama-cpp-python"], {"llama_cpp": library})
    assert given["model_path"] == MODEL and given["offload_kqv"] is False
    assert (given["type_k"], given["type_v"]) == (8, 2)
    assert all(hasattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in CACHE_TYPES if name != "bf16")
    assert (
        f"type_k={GGMLQuantizationType.BF16.value},"
        in made(dataclasses.replace(ALL, type_k="bf16"))["llama-cpp-python"]
    )
    assert missing(ALL, 3)["llama-cpp-python"] == (
        *(
            "3 users at once",
            "--n-cpu-moe 2",
            "--no-repack",
        ),
    )


# Ollama


def test_ollama_gets_a_modelfile_and_an_environment() -> None:
    settings = dataclasses.replace(ALL, type_v="q8_0", n_threads_batch=3, mmap=True)
    assert made(settings, 4)["Ollama"].splitlines() == [
        "# Start the server with: "
        "OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_NUM_PARALLEL=4 ollama serve",
        f"FROM {Path(MODEL).absolute()}",
        "PARAMETER num_ctx 768",
        "PARAMETER num_thread 3",
        "PARAMETER num_batch 256",
        "PARAMETER num_gpu 7",
        "PARAMETER use_mmap true",
    ]


# The lab
