"""The client's process as its parent sees it.

    asked = access("http://127.0.0.1:8080/v1")
    with Client(asked) as client:
        for reply in client.run(plan):
            ...

A reply is there soon after its request has ended, while others run: what has ended is kept when the rest is given up.
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
from lab.endpoints.access import Access, hidden, masked
from lab.endpoints.send_plan import SEPARATOR, Reply, SendPlan
from lab.errors import LabError
from lab.process.spawning import DIED, cause_of_death, listen, start, wait_for_end

POLL_S = 0.1
_CHILD = "from lab.endpoints.client_process import serve; serve()"


class ClientDied(LabError):
    """The client's process ended while requests ran."""


class Client:
    """The parent's end. Use it in a `with` block: leaving it ends the process and every request in flight."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.start_ns: int | None = (
            None  # of the last plan that ended, by the clock that all processes of a machine share
        )
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
        """Send the requests of a plan; each reply as it ends, as `batches` does. `watch` is called now and then."""
        watch()
        for replies in self.batches(plan, POLL_S):
            watch()
            yield from replies

    def batches(self, plan: SendPlan, poll_s: float) -> Iterator[Iterator[Reply]]:
        """Send the requests of a plan, and every `poll_s` give those that have ended since the last time, if any.

        Raises ClientDied if the process ends before they do. Who stops asking before the end gives the plan up: the
        process ends, with what is in flight, and `given_up` has what had ended.
        """
        path = Path(self._folder.name) / f"plan-{self._n_plans}"
        self._n_plans += 1
        path.touch()
        request = {"access": self._access, "plan": plan, "path": str(path)}
        with suppress(OSError):  # it is dead; the listener says so
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
            raise ClientDied(self._cause_of_death(), "The requests that had ended are kept.")
        parsed = json.loads(answer)
        if "error" in parsed:
            raise LabError(parsed["error"], parsed["hint"])
        self.start_ns = parsed["start_ns"]

    def _read(self, file: IO[bytes]) -> Iterator[Reply]:
        """The replies that were written whole since the last time."""
        while True:
            begun = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):  # the client is still writing it
                file.seek(begun)
                return
            number, request, text = line.decode().split(SEPARATOR)
            yield Reply(int(number), from_json(Request, request), masked(json.loads(text), self._access))

    def given_up(self) -> Iterator[Reply]:
        """All that had ended of the last plan, when it was given up; nothing where it was not."""
        with suppress(FileNotFoundError), (Path(self._folder.name) / f"plan-{self._n_plans - 1}").open("rb") as file:
            yield from self._read(file)

    def _cause_of_death(self) -> str:
        lines = self._stderr_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return hidden(cause_of_death("The client's process", self._process.wait(), lines), self._access)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        wait_for_end(self._process, self._listener)
        self._folder.cleanup()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
