"""Real servers for tests and benches, each for as long as a `with` block lasts.

    with llama_server(model, "--threads", "1", "--ctx-size", "2048") as server:
        ask(server.url)

They listen on 127.0.0.1, on a port that the system chooses. llama-server comes in two builds:
`llama_server` is the one of the llama.cpp on which the lab runs (built in minutes where it is not
there yet), `wheel_server` the one inside the xllamacpp wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.bench import llama_bench

NAME = "a-model"
"""The name of the model in every server here; without it they call it by its path."""

START_S = 120
END_S = 10
POLL_S = 0.05
PARENT_S = 2.0
_ADDRESS = re.compile(r"(?:listening|running) on (http://127\.0\.0\.1:\d+)")
_ANYWHERE = ("--host", "127.0.0.1", "--port", "0")


@dataclass(frozen=True)
class RealServer:
    """A server that runs."""

    url: str  # ends with /v1
    pid: int
    log: Path  # all that it prints


def llama_server(
    model: Path, *options: str, alias: str | None = NAME
) -> AbstractContextManager[RealServer]:
    """llama-server on the shared libraries of the installed llama-cpp-python, with these options of
    its own; without `alias` it calls the model by its path."""
    program = str(llama_bench.program("llama-server"))
    command = [
        program,
        "--model",
        str(model),
        *(("--alias", alias) if alias else ()),
        *_ANYWHERE,
        "--offline",
        *options,
    ]
    return _running(command, "/health", llama_bench.environment())


def wheel_server(
    model: Path, *options: str, alias: str | None = NAME
) -> AbstractContextManager[RealServer]:
    """llama-server as the xllamacpp wheel has it, with those of its options that `_serve` knows;
    without `alias` it calls the model by its path."""
    command = [sys.executable, "-m", "tests.support.servers", str(model), *options]
    if alias:
        command += ["--alias", alias]
    return _running(command, "/health")


def llama_cpp_server(model: Path, *options: str) -> AbstractContextManager[RealServer]:
    """llama-cpp-python's own server, which does not end an answer because another request
    arrives."""
    command = [
        sys.executable,
        "-m",
        "llama_cpp.server",
        "--model",
        str(model),
        "--model_alias",
        NAME,
        *_ANYWHERE,
    ]
    return _running([*command, "--interrupt_requests", "false", *options], "/v1/models")


@contextmanager
def _running(
    command: Sequence[str], path: str, environment: Mapping[str, str] | None = None
) -> Iterator[RealServer]:
    """The server that `command` starts, once it answers a GET of `path`."""
    with tempfile.TemporaryDirectory(prefix="mini-lab-server-") as folder:
        log = Path(folder) / "log"
        deadline = time.monotonic() + START_S
        root = ""
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        try:
            while not root and process.poll() is None and time.monotonic() < deadline:
                if address := _ADDRESS.search(log.read_text(errors="replace")):
                    with (
                        suppress(OSError),
                        urllib.request.urlopen(address[1] + path, timeout=5),
                    ):
                        root = address[1]
                time.sleep(POLL_S)
            if not root:
                raise RuntimeError(
                    f"{' '.join(command)} does not answer (status {process.poll()})"
                )
            yield RealServer(f"{root}/v1", process.pid, log)
        except BaseException:
            print(
                f"The server's log ends with:\n{log.read_text(errors='replace')[-3000:]}",
                file=sys.stderr,
            )
            raise
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _serve(arguments: Sequence[str]) -> None:
    """Be the wheel's llama-server until the process is ended, or the one that started it."""
    import xllamacpp

    parser = argparse.ArgumentParser(prog="wheel_server")
    parser.add_argument("model")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count(),
    )
    parser.add_argument("--ctx-size", type=int, default=2048)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--cache-ram", type=int)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slot-prompt-similarity", type=float)
    parser.add_argument("--context-shift", action="store_true")
    parser.add_argument("--alias")
    parser.add_argument("--jinja", action="store_true")  # it always is
    parser.add_argument("--chat-template-file", type=Path)
    parser.add_argument("--lookup", type=int, help="tokens of a draft, looked up in the text")
    asked = parser.parse_args(arguments)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = asked.model
    if asked.alias:
        parameters.model_alias = {asked.alias}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = asked.port
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = asked.threads
    parameters.n_ctx = asked.ctx_size
    parameters.n_parallel = asked.parallel
    parameters.kv_unified = parameters.warmup = False
    parameters.ctx_shift = asked.context_shift
    if asked.slot_prompt_similarity is not None:
        parameters.slot_prompt_similarity = asked.slot_prompt_similarity
    parameters.endpoint_slots = True
    if asked.chat_template_file is not None:
        parameters.chat_template = asked.chat_template_file.read_text()
    if asked.lookup is not None:
        lookup = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
        parameters.speculative.types = [lookup]
        parameters.speculative.ngram_simple.size_n = 4
        parameters.speculative.ngram_simple.size_m = asked.lookup
    if asked.cache_ram is not None:
        parameters.cache_ram_mib = asked.cache_ram
    server = xllamacpp.Server(parameters)
    print(f"listening on {server.listening_address}", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # a starter that was killed cannot end its server
        time.sleep(PARENT_S)


if __name__ == "__main__":
    _serve(sys.argv[1:])


ONE_THREAD = ("--threads", "1", "--ctx-size", "2048", "--parallel", "2")


def a_llama_server(
    model: Path, options: Sequence[str] = ONE_THREAD, alias: str | None = NAME
) -> AbstractContextManager[RealServer]:
    """A llama-server, with two slots unless the options say otherwise."""
    if not find_spec("xllamacpp") and not llama_bench.is_built("llama-server"):
        pytest.skip(
            "no llama-server here: neither the xllamacpp wheel nor one that a benchmark built"
        )
    start = wheel_server if find_spec("xllamacpp") else llama_server
    return start(model, *options, alias=alias)
