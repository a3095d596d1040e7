"""What the notebook on servers uses: a server of its own, and what it streams.

The server is llama_cpp.server from llama-cpp-python, which uses the same libraries as the lab's engine. It reads from a
pipe of this process, so it ends when this process ends, even after a crash.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lab.analysis import loads, request_table
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.experiments import overhead_parts
from lab.experiments.overhead_parts import Phase
from lab.models import catalog
from lab.process import spawning
from lab.runner import limits
from lab.show import console, overhead_views, text_endpoint, text_load
from lab.show.section import print_section, print_sections

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

N_CTX = 2048
START_S, END_S, LOOK_S = 120, 10, 0.1
NEEDS = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
_ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
_CHILD = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
runpy.run_module("llama_cpp.server", run_name="__main__")
"""


class OwnServer:
    """A server that was started here, at `url`. It computes with `n_threads` threads."""

    def __init__(self, process: subprocess.Popen[bytes], log: tempfile.TemporaryDirectory[str], n_threads: int) -> None:
        self._process, self._log = process, log
        self.n_threads = n_threads
        self.url = f"{_address(process, Path(log.name) / 'log')}/v1"

    def end(self) -> None:
        """End the server; does nothing if it has ended."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.cleanup()


_running: list[OwnServer] = []


def serve(n_threads: int | None = None) -> OwnServer:
    """Start a server with the embedded model on a free port of this machine, and wait until it answers.

    It ends with `end()`, with this process, or when another one is started. LabError if it does not start.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise LabError(
            f"The server needs packages that are not installed: {', '.join(missing)}.",
            "Install them: pip install 'mini-lab[server]', or uv sync --extra server in a checkout.",
        )
    while _running:
        _running.pop().end()
    n_threads = n_threads or limits.default_threads()
    options = {
        "model": catalog.embedded_path(),
        "model_alias": catalog.DEFAULT,
        "host": "127.0.0.1",
        "port": 0,
        "n_ctx": N_CTX,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        "flash_attn": True,
        "interrupt_requests": False,
        "verbose": False,
    }
    log = tempfile.TemporaryDirectory(prefix="mini-lab-server-")
    with (Path(log.name) / "log").open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *(word for name in options for word in (f"--{name}", str(options[name])))],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            **spawning.detached(),
        )
    try:
        server = OwnServer(process, log, n_threads)
    except BaseException:
        process.kill()
        process.wait()
        raise
    _running.append(server)
    return server


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        if address := _ADDRESS.search(log.read_text(encoding="utf-8", errors="replace")):
            return address[1]
        time.sleep(LOOK_S)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    raise LabError(f"The server did not start: {' | '.join(lines[-3:])}", "Free some memory, and try again.")


def abilities(records: Sequence[RequestRecord]) -> None:
    """Print what the server of these requests can do, as `lab server` does."""
    text_endpoint.print_endpoint(records[0].endpoint, records[0].model, (), console.console())


def events(record: RequestRecord) -> pd.DataFrame:
    """The events of a request: when each arrived (ms after the request was sent), its bytes, and what it carried."""
    import pandas as pd

    columns = record.request.events
    arrive_ms = [ns / 1e6 for ns in columns.arrive_ns]
    return pd.DataFrame({"arrive_ms": arrive_ms, "bytes": columns.n_bytes, "kind": columns.kind})


def show_load(records: Sequence[RequestRecord]) -> None:
    """Print a load as `lab load` does."""
    samples = [loads.sample(one.request) for one in records if one.request.asked.load is not None]
    print_section(text_load.section(samples, records[0].endpoint), console.console())


def overhead(lines: Sequence[Record | RequestRecord]) -> dict[str, Phase]:
    """TTFT and TPOT of lab.overhead by name, with `in_process_ms` and `server_ms`. LabError where nothing went well."""
    rows = overhead_parts.rows(request_table.of_engine(lines), request_table.alone(lines))
    if not rows:
        raise LabError("No block went well on both sides.", "Measure again.")
    return {phase.name: phase for phase in rows[0].phases}


def show_overhead(lines: Sequence[Record | RequestRecord]) -> None:
    """Print what lab.overhead measured as `lab overhead` does."""
    sections = overhead_views.sections(request_table.of_engine(lines), request_table.alone(lines))
    print_sections(sections, console.console())


def draw_overhead(lines: Sequence[Record | RequestRecord]) -> None:
    """Draw what lab.overhead measured as `lab overhead` does."""
    draw_all(overhead_views.drawings(lines).values())


def draw_all(drawings: Iterable[Callable[[Figure], object]]) -> None:
    """Draw each picture below the cell."""
    import matplotlib
    import matplotlib.pyplot as plt

    for draw in drawings:
        figure = plt.figure(figsize=(10, 4.6), layout="constrained")  # first: a new backend would stay non-interactive
        with matplotlib.rc_context({"text.parse_math": False}):
            draw(figure)
