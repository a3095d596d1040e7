"""The client's process, seen from the parent.

    asked = access("http://127.0.0.1:8080/v1")
    with Client(asked) as client:
        for reply in client.run(plan):
            ...

A reply arrives soon after its request has ended, while others run, so it is kept even if the plan is abandoned.
"""

from __future__ import annotations

import json
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lab.core.lines import from_json, to_json
from lab.core.request import Request
from lab.errors import LabError
from lab.features.serve.access import Access, hidden, masked
from lab.features.serve.send_plan import SEPARATOR, Reply, SendPlan
from lab.process.spawning import DIED, cause_of_death, listen, start, wait_for_end

POLL_S = 0.1
_CHILD = "from lab.features.serve.client_process import serve; serve()"


class ClientDied(LabError):
    """The client's process ended during a plan."""


class Client:
    """The parent's end. Use it in a `with` block: leaving it ends the process and every request in flight."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.start_ns: int | None = None  # of the last plan that ended, by the system-wide clock
        self._folder = tempfile.TemporaryDirectory(prefix="mini-lab-")
        self._stderr_path = Path(self._folder.name) / "stderr"
        self._n_plans = 0
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._stderr_path.open("wb") as stderr:
            self._process = start(_CHILD, stderr=stderr)
        self._listener = threading.Thread(target=listen, args=(self._process, pids, self._replies), daemon=True)
        self._listener.start()
        self.pid = pids.get()

    def run(self, plan: SendPlan, watch: Callable[[], None] = lambda: None) -> Iterator[Reply]:
        """Send the requests of a plan and yield each reply when it has ended. Calls `watch` every POLL_S."""
        watch()
        for replies in self.batches(plan, POLL_S):
            watch()
            yield from replies

    def batches(self, plan: SendPlan, poll_s: float) -> Iterator[Iterator[Reply]]:
        """Send the requests of a plan, and every `poll_s` yield the replies since the last time.

        Raises ClientDied if the process ends early. Closing this iterator early kills the process with all requests in
        flight; `given_up` returns the remaining replies.
        """
        path = Path(self._folder.name) / f"plan-{self._n_plans}"
        self._n_plans += 1
        path.touch()
        request = {"access": self._access, "plan": plan, "path": str(path)}
        with suppress(OSError):  # the process has ended; the listener reports it
            stdin: IO[bytes] = self._process.stdin  # type: ignore[assignment]
            stdin.write(to_json(request).encode() + b"\n")
            stdin.flush()
        answer = None
        with path.open("rb") as file:
            try:
                while answer is None:
                    with suppress(queue.Empty):
                        answer = self._replies.get(timeout=poll_s)
                    yield self._read(file)
            finally:
                if answer is None:
                    self._process.kill()
        path.unlink()
        if answer is DIED:
            self._replies.put(DIED)  # for the next plan
            lines = self._stderr_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            cause = cause_of_death("The client's process", self._process.wait(), lines)
            raise ClientDied(hidden(cause, self._access), "The finished requests are kept. Try again.")
        parsed = json.loads(answer)
        if "error" in parsed:
            raise LabError(parsed["error"], parsed["hint"])
        self.start_ns = parsed["start_ns"]

    def _read(self, file: IO[bytes]) -> Iterator[Reply]:
        """The complete replies since the last time."""
        while True:
            begun = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):  # still being written
                file.seek(begun)
                return
            number, request, text = line.decode().split(SEPARATOR)
            yield Reply(int(number), from_json(Request, request), masked(json.loads(text), self._access))

    def given_up(self) -> Iterator[Reply]:
        """All finished requests of the last plan, if it was abandoned; otherwise nothing."""
        with suppress(FileNotFoundError), (Path(self._folder.name) / f"plan-{self._n_plans - 1}").open("rb") as file:
            yield from self._read(file)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        wait_for_end(self._process, self._listener)
        self._folder.cleanup()
