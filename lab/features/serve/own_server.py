"""A server that the lab starts: llama_cpp.server from llama-cpp-python, with the libraries of the lab's engine.

It processes one request after the other, and only requests with its key: other programs of this machine, and pages in
a browser, get no answer. It reads from a pipe of this process, so it ends when this process ends, even after a crash.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lab.errors import LabError
from lab.process import spawning
from lab.runner import limits

N_CTX = 2048
START_S, LOOK_S = 120, 0.1
NEEDS = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
_ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
KEY_ENV = "MINI_LAB_SERVER_KEY"
_CHILD = f"""
import os, sys
from lab.process.served import end_with_parent
end_with_parent()
from llama_cpp.server import __main__ as server, app

class SameOrigin(app.CORSMiddleware):
    def __init__(self, app, **_):
        super().__init__(app)

app.CORSMiddleware = SameOrigin
sys.argv += ["--api_key", os.environ["{KEY_ENV}"]]
server.main()
"""


@dataclass(frozen=True)
class OwnServer:
    """A server that was started here, at `url`; its key is in the environment variable `key_env`."""

    url: str
    n_threads: int
    process: subprocess.Popen[bytes]
    log: tempfile.TemporaryDirectory[str]
    key_env: str = KEY_ENV

    def end(self) -> None:
        """End the server; does nothing if it has ended."""
        self.process.kill()
        spawning.wait_for_end(self.process)
        self.log.cleanup()


def start(model: Path, alias: str, n_threads: int | None = None, n_gpu_layers: int = 0) -> OwnServer:
    """Start a server on a free port of this machine, and wait until it answers. LabError if it does not start."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise LabError(
            f"The server needs packages that are not installed: {', '.join(missing)}.",
            "Install them: pip install 'mini-lab[server]', or uv sync --extra server in a checkout.",
        )
    n_threads = n_threads or limits.default_threads()
    options = {
        "model": model,
        "model_alias": alias,
        "host": "127.0.0.1",
        "port": 0,
        "n_ctx": N_CTX,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        "n_gpu_layers": n_gpu_layers,
        "flash_attn": True,
        "interrupt_requests": False,
        "verbose": False,
    }
    key = os.environ[KEY_ENV] = secrets.token_urlsafe(32)
    folder = tempfile.TemporaryDirectory(prefix="mini-lab-server-")
    log = Path(folder.name) / "log"
    with log.open("wb") as file:
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        process = spawning.start(_CHILD, *words, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + START_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if address := _ADDRESS.search(log.read_text(encoding="utf-8", errors="replace")):
                return OwnServer(f"{address[1]}/v1", n_threads, process, folder)
            time.sleep(LOOK_S)
        printed = log.read_text(encoding="utf-8", errors="replace").partition("Fatal Python error")[0]  # of its threads
        lines = printed.replace(key, "***").splitlines()
        raise LabError(f"The server did not start: {' | '.join(lines[-3:])}", "Free some memory, and try again.")
    except BaseException:
        process.kill()
        spawning.wait_for_end(process)
        raise
