"""Real servers for tests and benches, each for as long as a `with` block lasts.

    with llama_server(model, "--threads", "1", "--ctx-size", "2048") as server:
        ask(server.url)

They listen on 127.0.0.1, on a port that the system chooses, and end with the block, also where it fails.
llama-server comes in two builds: `llama_server` is the one of the llama.cpp on which the lab runs (built in minutes
where it is not there yet), `wheel_server` the one inside the xllamacpp wheel.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.bench import llama_bench

NAME = "a-model"
"""The name of the model in every server here; without it they call it by its path."""

START_S, END_S, POLL_S = 120, 10, 0.05
_ADDRESS = re.compile(r"(?:listening|running) on (http://127\.0\.0\.1:\d+)")


@dataclass(frozen=True)
class RealServer:
    """A server that runs."""

    url: str  # ends with /v1
    pid: int
    log: Path  # all that it prints


@contextmanager
def llama_server(model: Path, *options: str) -> Iterator[RealServer]:
    """llama-server on the shared libraries of the installed llama-cpp-python, with these options of its own."""
    command = [str(llama_bench.program("llama-server")), "--model", str(model), "--alias", NAME]
    command += ["--host", "127.0.0.1", "--port", "0", "--offline", *options]
    with _running(command, "/health", llama_bench.environment()) as server:
        yield server


@contextmanager
def wheel_server(model: Path, *options: str) -> Iterator[RealServer]:
    """llama-server as the xllamacpp wheel has it, with those of its options that `_serve` knows."""
    with _running([sys.executable, "-m", "tests.servers", str(model), *options], "/health") as server:
        yield server


@contextmanager
def llama_cpp_server(model: Path, *options: str) -> Iterator[RealServer]:
    """llama-cpp-python's own server, with these options of its own.

    Unless asked to, it does not end an answer because another request arrives.
    """
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--model_alias", NAME]
    command += ["--host", "127.0.0.1", "--port", "0", "--interrupt_requests", "false", *options]
    with _running(command, "/v1/models") as server:
        yield server


@contextmanager
def _running(command: Sequence[str], path: str, environment: Mapping[str, str] | None = None) -> Iterator[RealServer]:
    """The server that `command` starts, once it answers a GET of `path` with 200."""
    with tempfile.TemporaryDirectory(prefix="mini-lab-server-") as folder:
        log = Path(folder) / "log"
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
            root = _wait(process, log, path)
            try:
                yield RealServer(f"{root}/v1", process.pid, log)
            except BaseException:
                print(f"The server's log ends with:\n{_end_of(log)}", file=sys.stderr)
                raise
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], log: Path, path: str) -> str:
    """The address of the server, as soon as it answers. RuntimeError with the end of its log where it does not."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        address = _ADDRESS.search(log.read_text(errors="replace"))
        if address is not None:
            with suppress(OSError), urllib.request.urlopen(address[1] + path, timeout=5) as answer:
                if answer.status == 200:
                    return address[1]
        time.sleep(POLL_S)
    state = f"ended with status {process.returncode}" if process.poll() is not None else f"no answer in {START_S} s"
    raise RuntimeError(f"{' '.join(map(str, process.args))}: {state}\n{_end_of(log)}")  # type: ignore[arg-type]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _serve(arguments: Sequence[str]) -> None:
    """Be the wheel's llama-server until the process is ended."""
    import xllamacpp

    parser = argparse.ArgumentParser(prog="wheel_server")
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--ctx-size", type=int, default=2048)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--no-cache-prompt", action="store_true")
    for hidden in ("--kv-unified", "--context-shift"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = asked.model, {NAME}
    parameters.hostnames, parameters.port = ["127.0.0.1"], asked.port
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = asked.threads
    parameters.n_ctx, parameters.n_parallel = asked.ctx_size, asked.parallel
    parameters.cache_prompt = parameters.cache_idle_slots = not asked.no_cache_prompt
    parameters.kv_unified, parameters.ctx_shift = asked.kv_unified, asked.context_shift
    parameters.warmup = False
    parameters.endpoint_slots = True
    server = xllamacpp.Server(parameters)
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    _serve(sys.argv[1:])
