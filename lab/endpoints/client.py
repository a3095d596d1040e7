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
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from lab.core.lines import from_json, to_json
from lab.core.request import Request
from lab.endpoints.access import Access, hidden
from lab.endpoints.wire import Plan, Reply
from lab.errors import LabError
from lab.process.spawning import detached, explain_exit

POLL_S = 0.1
END_S = 5
_DIED = b""
_CHILD = "import sys; sys.path.append(sys.argv[1]); from lab.endpoints.child import serve; serve()"


class ClientDied(LabError):
    """The client's process ended while requests ran."""


class Client:
    """The parent's end. Use it in a `with` block: leaving it ends the process and every request in flight."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.start_ns: int | None = None  # of the last plan, by the clock that all processes of a machine share
        self._folder = tempfile.TemporaryDirectory(prefix="mini-lab-")
        self._stderr_path = Path(self._folder.name) / "stderr"
        self._n_plans = 0
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with self._stderr_path.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(Path(__file__).parents[2])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                **detached(),
            )
        self._listener = threading.Thread(target=self._listen, args=(self._process, self._replies), daemon=True)
        self._listener.start()
        self.pid = int(self._replies.get() or 0)

    def run(self, plan: Plan, watch: Callable[[], None] = lambda: None) -> Iterator[Reply]:
        """Send the requests of a plan; each reply as it ends, as `batches` does. `watch` is called now and then."""
        watch()
        for replies in self.batches(plan, POLL_S):
            watch()
            yield from replies

    def batches(self, plan: Plan, poll_s: float) -> Iterator[Iterator[Reply]]:
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
        if answer == _DIED:
            self._replies.put(_DIED)  # for the next plan
            raise ClientDied(self._cause_of_death(), "The requests that had ended are kept.")
        parsed = json.loads(answer)
        if "error" in parsed:
            raise LabError(parsed["error"], parsed["hint"])

    def _read(self, file: IO[bytes]) -> Iterator[Reply]:
        """The replies that were written whole since the last time."""
        if self._first(file):
            while True:
                begun = file.tell()
                lines = [file.readline() for _ in range(3)]
                if not lines[2].endswith(b"\n"):
                    file.seek(begun)
                    return
                yield Reply(int(lines[0]), from_json(Request, lines[1].decode()), json.loads(lines[2]))

    def given_up(self) -> Iterator[Reply]:
        """All that had ended of the last plan, when it was given up; nothing where it was not."""
        with suppress(FileNotFoundError), (Path(self._folder.name) / f"plan-{self._n_plans - 1}").open("rb") as file:
            yield from self._read(file)

    def _first(self, file: IO[bytes]) -> bool:
        """Whether the plan has begun: the first line says when."""
        if file.tell() == 0:
            line = file.readline()
            if not line.endswith(b"\n"):
                file.seek(0)
                return False
            self.start_ns = int(line)
        return True

    @staticmethod
    def _listen(process: subprocess.Popen[bytes], replies: queue.SimpleQueue[bytes]) -> None:
        stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
        with suppress(ValueError, OSError):  # the parent has closed it
            for line in stdout:
                replies.put(line)
        replies.put(_DIED)

    def _cause_of_death(self) -> str:
        status = self._process.wait()
        lines = self._stderr_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last_words = f" Its last words: {' | '.join(lines[-3:])}" if lines else ""
        return hidden(f"The client's process ended: {explain_exit(status)}.{last_words}", self._access)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._listener.join(END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._folder.cleanup()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
