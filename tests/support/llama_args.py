"""llama.cpp's own parser of command lines, as the xllamacpp wheel has it, in a process of its own.

    parse("llama-server", "--threads", "3")["cpuparams.n_threads"] == 3

The wheel exports `common_params_parse`, with which llama-server and llama-cli read their arguments,
and keeps llama.cpp's `common_params` right behind the head of a CommonParams object, whose
attributes then show what was read.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import urllib.request
from operator import attrgetter
from typing import Any

EXAMPLES = {"llama-cli": 5, "llama-server": 12}
"""`enum llama_example` in llama.cpp's common/common.h."""

SERVE = "serve"

PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
FIELDS = (
    "cpuparams.n_threads",
    "cpuparams_batch.n_threads",
    "n_ctx",
    "n_parallel",
    "n_predict",
    "n_batch",
    "n_ubatch",
    "flash_attn_type",
    "cache_type_k",
    "cache_type_v",
    "n_gpu_layers",
    "split_mode",
    "main_gpu",
    "tensor_split",
    "no_kv_offload",
    "no_op_offload",
    "load_mode",
    "no_extra_bufts",
    "kv_unified",
    "prompt",
)


class Refused(Exception):
    """llama.cpp's parser rejected an argument, in its words."""


def parse(program: str, *arguments: str) -> dict[str, Any]:
    """What the program understands by its arguments, by the names of `common_params`.

    Refused if it rejects one.
    """
    done = _child(program, *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode == 1:
        raise Refused(done.stderr)
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def slots(*arguments: str) -> list[dict[str, Any]]:
    """What the wheel's llama-server, started with these arguments, says about its slots.

    It ends again.
    """
    done = _child(SERVE, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _child(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.llama_args", program, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
    )


def _main(program: str, *arguments: str) -> int:
    import xllamacpp.xllamacpp as wheel

    read = getattr(ctypes.CDLL(wheel.__file__), PARSE)
    read.restype = ctypes.c_bool
    params = wheel.CommonParams()
    texts = [program.encode(), *map(str.encode, arguments), None]
    argv = (ctypes.c_char_p * len(texts))(*texts)
    place = ctypes.c_void_p(id(params) + object.__basicsize__)
    example = EXAMPLES["llama-server" if program == SERVE else program]
    if not read(len(arguments) + 1, argv, place, example, None):
        return 1
    if program == SERVE:
        print(_slots_of_a_server(wheel, params), flush=True)
        os._exit(0)
    values = {name: _as_json(attrgetter(name)(params)) for name in FIELDS}
    print(json.dumps(values))
    return 0


def _slots_of_a_server(wheel: Any, params: Any) -> str:
    """What a llama-server with these parameters answers about its slots."""
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.endpoint_slots = True
    params.warmup = False
    server = wheel.Server(params)
    with urllib.request.urlopen(f"{server.listening_address}/slots", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def _as_json(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return list(value) if hasattr(value, "__len__") else int(value)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
