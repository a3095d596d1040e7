"""Run the engine in a child process, so that the lab survives a crash of native code.

Parent and child exchange JSON lines over the child's stdin and stdout: one reply for each request.
Nothing crosses the pipe while a run is timed. If the parent ends, the child's stdin closes and the
child ends too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

from lab.core import script as scripts
from lab.core.lines import fields_of, from_json
from lab.core.memory import Tensor
from lab.core.record import Model, Placement, Rate, Settings
from lab.core.script import Script
from lab.errors import LabError
from lab.process import rpc
from lab.process.setup import ProcessSetup, environment
from lab.process.spawning import (
    DIED,
    END_S,
    cause_of_death,
    kill,
    listen,
    start,
    wait_for_end,
)
from lab.process.wire import (
    FIRST_TOKEN,
    N_PREFILLED,
    Build,
    Libraries,
    Outcome,
    Probe,
    Progress,
    Vocabulary,
    map_int64,
)

T = TypeVar("T")

POLL_S = 0.1  # how often a waiting parent reads the progress and the state of the machine
MAX_TOKENS = 1 << 20  # of one run: what the progress file holds

CRASH_SIGNALS = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT")
CRASH_CODES = (0xC0000005, 0xC000001D, 0xC0000094)
"""Windows: access violation, illegal instruction, division by zero."""

SIGKILLED = -9  # the exit status of a process that was killed on Linux and macOS
KILLED_HINT = (
    "If memory ran out, close other programs, or use a smaller model or shorter prompts."
)

_CHILD = "from lab.engine.child import serve; serve()"


class WorkerDied(LabError):
    """The child process ended during a request. `status` is its exit status, -N for signal N."""

    def __init__(self, what: str, hint: str = "", status: int | None = None) -> None:
        super().__init__(what, hint)
        self.status = status

    @property
    def is_native_crash(self) -> bool:
        """Whether native code crashed or aborted, which can be diagnosed; a kill from outside
        cannot."""
        if self.status is None or self.status >= 0:
            return self.status in CRASH_CODES
        signals = {number.value: number.name for number in signal.Signals}
        return signals.get(-self.status) in CRASH_SIGNALS


class Worker:
    """The parent's end. Use it in a `with` block: leaving it ends the child.

    `launcher` is a command that starts the child's Python, such as one that limits its memory.
    """

    reads_files = True

    def __init__(self, launcher: Sequence[str] = ()) -> None:
        self.launcher = tuple(launcher)
        self.setup = ProcessSetup()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="mini-lab-")
            self._progress_path = Path(self._folder.name) / "progress"
            self._stderr_path = Path(self._folder.name) / "stderr"
            self._progress = _new_progress(self._progress_path)
        except OSError as problem:
            what = f"Temporary files cannot be written: {problem.strerror}."
            hint = "Free some disk space, or set TMPDIR to another folder."
            raise LabError(what, hint) from None
        self._spawn()

    def restart(self) -> None:
        """Start a new child, without a model.

        ServerUnavailable if an RPC server does not answer.
        """
        self._end_child()
        self._spawn()

    def use(self, setup: ProcessSetup) -> None:
        """Start children with this setup from now on."""
        if setup != self.setup:
            self.__dict__.pop("build", None)
            self.setup = setup
            self.restart()

    def _spawn(self) -> None:
        for endpoint in self.setup.rpc:
            rpc.check(endpoint)
        with self._stderr_path.open("wb") as stderr:
            self._process = start(
                _CHILD,
                str(self._progress_path),
                *self.setup.rpc,
                stderr=stderr,
                env=environment(self.setup),
                launcher=self.launcher,
            )
        self._pid: int | None = None
        self._pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._listener = threading.Thread(
            target=listen, args=(self._process, self._pids, self._replies), daemon=True
        )
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process id that the child reports.

        Popen has the launcher's if Python starts through one (Windows).
        """
        if self._pid is None:
            self._pid = self._pids.get()
        return self._pid

    @cached_property
    def build(self) -> Build:
        """The llama.cpp build that the child runs on."""
        return from_json(Build, self._ask("build"))

    def libraries(self) -> Libraries:
        return from_json(Libraries, self._ask("libraries"))

    def read_model(self, path: Path, name: str, source: str) -> Model:
        """The model's shape, from its file's header."""
        text = self._ask("read_model", path=path, name=name, source=source)
        try:
            return from_json(Model, text)
        except ValueError as problem:
            what = f"The header of {path.name} has values that no model has: {problem}."
            raise LabError(what, "Get a file of the model by another maker.") from None

    def tensors(self, path: Path) -> tuple[Tensor, ...]:
        tensors = []
        for tensor in json.loads(self._ask("tensors", path=path)):
            tensors.append(Tensor(**{**tensor, "sizes": tuple(tensor["sizes"])}))
        return tuple(tensors)

    def free_memory(self) -> dict[str, int]:
        """Free bytes of each device that reports them, by name."""
        return dict(json.loads(self._ask("free_memory")))

    def quantizations(self) -> list[str]:
        return list(json.loads(self._ask("quantizations")))

    def quantize(
        self, source: Path, target: Path, quantization: str, watch: Callable[[int], None]
    ) -> None:
        """Write a model in another quantization. Calls `watch` with the bytes written so far."""

        def look() -> None:
            with suppress(OSError):
                watch(target.stat().st_size)

        self._ask("quantize", look, source=source, target=target, quantization=quantization)

    def load(self, path: Path, asked: Settings, draft: Path | None = None) -> Vocabulary:
        """Load the weights (and those of a draft model) to the devices that `asked` names."""
        return from_json(Vocabulary, self._ask("load", path=path, asked=asked, draft=draft))

    def placement(self) -> Placement:
        """Where the loaded model and its context lie."""
        return from_json(Placement, self._ask("placement"))

    def vocabularies_differ(self, path: Path, other: Path) -> str | None:
        """How the vocabularies of two model files differ, in words; None if they are equal."""
        answer = json.loads(self._ask("vocabularies_differ", path=path, other=other))
        return None if answer is None else str(answer)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without BOS."""
        return list(json.loads(self._ask("tokenize", text=text)))

    def pieces(self) -> list[bytes]:
        """The text of each token."""
        return [piece.encode("latin-1") for piece in json.loads(self._ask("pieces"))]

    def new_context(self, asked: Settings) -> Settings:
        """Open a context in the place of the last one. Returns the settings as resolved."""
        return from_json(Settings, self._ask("new_context", asked=asked))

    def grammar(self, text: str, is_schema: bool) -> list[str]:
        """The lines of a GBNF grammar that llama.cpp accepts, or of a JSON schema as one."""
        return list(json.loads(self._ask("grammar", text=text, is_schema=is_schema)))

    def run(self, script: Script, watch: Callable[[Progress], None]) -> Outcome:
        """Run a script. Calls `watch` every POLL_S while it runs, and once at the end."""
        end = FIRST_TOKEN + scripts.n_chosen(script)
        not_yet = memoryview(b"\xff" * (8 * end)).cast("q")  # -1 in each slot
        self._progress[:end] = not_yet

        def look() -> None:
            tokens = self._progress[FIRST_TOKEN:end].tolist()
            n_chosen = tokens.index(-1) if -1 in tokens else len(tokens)
            n_prefilled = max(0, self._progress[N_PREFILLED])
            watch(Progress(n_prefilled, tuple(tokens[:n_chosen])))

        outcome = from_json(Outcome, self._ask("run", look, script=list(script)))
        look()
        return outcome

    def probe(self, probe: Probe) -> Rate:
        """Time a kernel."""
        return from_json(Rate, self._ask("probe", probe=probe))

    def call(self, answer: type[T], function: str, **arguments: Any) -> T:
        """Call a feature's function in the child with the open context.

        `function` is its full name, such as lab.features.trace.child.trace.
        """
        return from_json(answer, self._ask(function, **arguments))

    @contextmanager
    def ended_after(self, seconds: float) -> Iterator[None]:
        """Kill the child if the block takes longer; its request then raises WorkerDied."""
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        self._end_child()
        mapping: Any = self._progress.obj
        self._progress.release()
        mapping.close()  # otherwise Windows keeps the file
        self._folder.cleanup()

    def _kill(self) -> None:
        with suppress(queue.Empty):
            kill(self._process, lambda: self._pid or self._pids.get(timeout=END_S))

    def _end_child(self) -> None:
        self._kill()
        wait_for_end(self._process, self._listener)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, verb: str, look: Callable[[], None] | None = None, **arguments: Any) -> str:
        """Send a request and wait for its reply. Returns the answer as JSON text.

        LabError if the child reports one; WorkerDied if it ends.
        """
        request = json.dumps({"verb": verb, **arguments}, default=fields_of)
        stdin: IO[bytes] = self._process.stdin  # type: ignore[assignment]
        with suppress(OSError):  # the child has ended; the listener reports it
            stdin.write(request.encode() + b"\n")
            stdin.flush()
        reply = self._next_reply(look)
        if reply is DIED:
            self._replies.put(DIED)  # for the next request
            raise self._death()
        answer = json.loads(reply)
        if "error" in answer:
            raise LabError(answer["error"], answer["hint"])
        return str(answer["value"])

    def _next_reply(self, look: Callable[[], None] | None) -> Any:
        """The child's next reply, or DIED. Calls `look` every POLL_S until it comes."""
        while True:
            try:
                return self._replies.get(timeout=POLL_S)
            except queue.Empty:
                if look:
                    look()

    def _death(self) -> WorkerDied:
        """Why the child ended; if an RPC server went away, this is no crash of this build."""
        status = self._process.wait()
        server_lost = rpc.lost(self.setup.rpc)
        if server_lost:
            return WorkerDied(server_lost, "Start the server again: lab rpc-server")
        stderr = self._stderr_path.read_text(encoding="utf-8", errors="replace")
        lines = stderr.strip().splitlines()
        hint = KILLED_HINT if status == SIGKILLED else ""
        return WorkerDied(cause_of_death("The engine's process", status, lines), hint, status)


def _new_progress(path: Path) -> memoryview[int]:
    """A new file for the progress of a run, mapped as an array of int64."""
    n_bytes = 8 * (FIRST_TOKEN + MAX_TOKENS)
    with path.open("wb") as file:
        file.truncate(n_bytes)
        if hasattr(os, "posix_fallocate"):
            # Otherwise a full disk would end a process by a signal, during a run.
            os.posix_fallocate(file.fileno(), 0, n_bytes)
    return map_int64(path)
