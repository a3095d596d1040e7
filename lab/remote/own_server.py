"""A server to try measurements with: llama_cpp.server from llama-cpp-python, started here with the
lab's libraries."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError
from lab.process import spawning
from lab.runner import machine

START_S = 120
LOOK_S = 0.1
KEY_ENV = "MINI_LAB_SERVER_KEY"
_ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
_CHILD = f"""
import os, sys
from lab.process.spawning import end_with_parent
end_with_parent()
from llama_cpp.server import __main__ as server, app

class SameOrigin(app.CORSMiddleware):
    def __init__(self, app, **_):
        super().__init__(app)

app.CORSMiddleware = SameOrigin
sys.argv += ["--api_key", os.environ["{KEY_ENV}"]]
server.main()
"""
_OPTIONS = (
    "--host 127.0.0.1 --port 0 --n_ctx 2048 --flash_attn True "
    "--interrupt_requests False --verbose False --logits_all False"  # as the lab: of the last token
)


@dataclass(frozen=True)
class OwnServer:
    """A running server.

    It processes one request after the other, and only requests with its key, which is in the
    environment variable `key_env`: other programs of this machine, and pages in a browser, get no
    answer. It reads from a pipe of this process, so it ends when this process ends, even after a
    crash.
    """

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

    def printed(self) -> str:
        """What the server has printed, without its key."""
        text = (Path(self.log.name) / "log").read_text(encoding="utf-8", errors="replace")
        return text.replace(os.environ[self.key_env], "***")


def start_own(model: Path, alias: str, n_threads: int | None = None) -> OwnServer:
    """Start a server on a free port of this machine, and wait until it answers. LabError if it does
    not start."""
    n_threads = n_threads or machine.default_threads()
    os.environ[KEY_ENV] = secrets.token_hex(32)
    folder = tempfile.TemporaryDirectory(prefix="mini-lab-server-")
    options = ["--model", str(model), "--model_alias", alias]
    options += ["--n_threads", str(n_threads), "--n_threads_batch", str(n_threads)]
    options += _OPTIONS.split()
    with (Path(folder.name) / "log").open("wb") as log:
        process = spawning.start(_CHILD, *options, stdout=log, stderr=subprocess.STDOUT)
    server = OwnServer("", n_threads, process, folder)
    try:
        return dataclasses.replace(server, url=_wait_for_address(server))
    except BaseException:
        server.end()
        raise


def _wait_for_address(server: OwnServer) -> str:
    """The address, once the server has printed it. LabError if it ends before."""
    deadline = time.monotonic() + START_S
    while server.process.poll() is None and time.monotonic() < deadline:
        address = _ADDRESS.search(server.printed())
        if address:
            return f"{address[1]}/v1"
        time.sleep(LOOK_S)
    without_threads = server.printed().partition("Fatal Python error")[0]
    lines = without_threads.splitlines()
    raise LabError(
        f"The server did not start: {' | '.join(lines[-3:])}",
        "Install its packages (pip install 'mini-lab[server]'), or free some memory, "
        "and try again.",
    )
