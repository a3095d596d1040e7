"""The engine in a child process, so that native code may die and the lab lives.

llama.cpp is native: a bad file, a failed assertion or the system's out-of-memory killer ends its process.
So it gets one of its own. Parent and child speak JSON lines over the child's stdin and stdout: a request,
one reply. Nothing crosses while a run is timed; a small file that both map into memory tells the parent
how far the run is. When the parent is gone, the child's stdin ends, and the child with it.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from lab import engine, header, native
from lab.errors import LabError
from lab.record import Model, Settings, Steps, from_json, to_json

POLL_S = 0.2
"""How often a waiting parent looks at the progress: rarely, since it needs a core for it."""

MAX_TOKENS = 1 << 20
"""Most tokens of one run that the progress file has room for."""

_DIED = object()

# -P: a file named random.py in the folder where the lab is started shall not become part of it.
_CHILD = "import sys; sys.path.append(sys.argv[2]); from lab.worker import serve; serve()"


class WorkerDied(LabError):
    """The child process ended in the middle of a request."""


@dataclass(frozen=True)
class Progress:
    """How far a run in flight is: prompt tokens prefilled, and the tokens generated so far."""

    n_prefilled: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Vocabulary:
    """What the parent must know of a loaded model to make prompts for it."""

    n_vocab: int
    bos: int | None


class Worker:
    """The parent's end. Use it in a `with` block: leaving it ends the child."""

    def __init__(self) -> None:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="mini-lab-")
            self._progress_path = Path(self._folder.name) / "progress"
            self._stderr_path = Path(self._folder.name) / "stderr"
            with self._progress_path.open("wb") as file:
                file.truncate(8 * (engine.FIRST_TOKEN + MAX_TOKENS))
            self._progress = _map_int64(self._progress_path)
        except OSError as problem:
            raise LabError(
                f"The folder for temporary files cannot be used: {problem.strerror}.",
                "Free some space there, or set TMPDIR to another folder.",
            ) from None
        self._spawn()

    def restart(self) -> None:
        """A fresh child, without a model."""
        self._end_child()
        self._spawn()

    def _spawn(self) -> None:
        detached: dict[str, Any] = {"start_new_session": True}  # Ctrl-C reaches the parent alone
        if os.name == "nt":
            detached = {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP
        with self._stderr_path.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(self._progress_path), str(Path(__file__).parents[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
                **detached,
            )
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self._process.stdout, self._replies), daemon=True).start()

    @cached_property
    def build(self) -> native.Build:
        """The llama.cpp build that the child runs on."""
        return from_json(native.Build, self._ask("build"))

    def read_model(self, path: Path, name: str, source: str, sha256: str | None) -> Model:
        """The model's shape, from its header."""
        return from_json(Model, self._ask("read_model", path=str(path), name=name, source=source, sha256=sha256))

    def load(self, path: Path, n_gpu_layers: int) -> Vocabulary:
        """Load the weights."""
        return from_json(Vocabulary, self._ask("load", path=str(path), n_gpu_layers=n_gpu_layers))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS."""
        return list(json.loads(self._ask("tokenize", text=text)))

    def pieces(self) -> list[bytes]:
        """The bytes of every token, by id."""
        return [piece.encode("latin-1") for piece in json.loads(self._ask("pieces"))]

    def new_context(self, asked: Settings) -> Settings:
        """Replace the context; the settings come back as llama.cpp resolved them."""
        return from_json(Settings, self._ask("new_context", asked=json.loads(to_json(asked))))

    def run(
        self, prompt: list[int], n_gen: int, watch: Callable[[Progress], None]
    ) -> tuple[Steps, tuple[int, ...], int | None]:
        """One run; `watch` is called every POLL_S while it lasts."""
        self._progress[: engine.FIRST_TOKEN + n_gen] = _unset(engine.FIRST_TOKEN + n_gen)

        def look() -> None:
            chosen = self._progress[engine.FIRST_TOKEN : engine.FIRST_TOKEN + n_gen].tolist()
            n = chosen.index(-1) if -1 in chosen else n_gen
            n_prefilled = len(prompt) if n else max(0, self._progress[engine.N_PREFILLED])
            watch(Progress(n_prefilled, tuple(chosen[:n])))

        reply = json.loads(self._ask("run", look, prompt=prompt, n_gen=n_gen))
        look()
        return from_json(Steps, json.dumps(reply["steps"])), tuple(reply["token_ids"]), reply["end_at"]

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._end_child()
        mapping: Any = self._progress.obj
        self._progress.release()
        mapping.close()  # else Windows keeps the file
        self._folder.cleanup()

    def _end_child(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, verb: str, look: Callable[[], None] | None = None, **arguments: Any) -> str:
        """Send a request and wait for its reply: the JSON text of the answer."""
        try:
            stdin: IO[bytes] = self._process.stdin  # type: ignore[assignment]
            stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            stdin.flush()
        except OSError:
            pass  # it is dead; the listener says so
        while True:
            try:
                reply = self._replies.get(timeout=POLL_S)
                break
            except queue.Empty:
                if look:
                    look()
        if reply is _DIED:
            self._replies.put(_DIED)  # so that the next request is told as well
            raise WorkerDied(self._cause_of_death())
        answer = json.loads(reply)
        if "error" in answer:
            raise LabError(answer["error"], answer["hint"])
        return str(answer["value"])

    @staticmethod
    def _listen(stdout: IO[bytes], replies: queue.SimpleQueue[Any]) -> None:
        with suppress(ValueError, OSError):  # the parent has closed it
            for line in stdout:
                replies.put(line)
        replies.put(_DIED)

    def _cause_of_death(self) -> str:
        status = self._process.wait()
        lines = self._stderr_path.read_text(errors="replace").strip().splitlines()
        said = f" Its last words: {' | '.join(lines[-3:])}" if lines else ""
        return f"The engine's process ended: {explain_exit(status)}.{said}"


def explain_exit(status: int) -> str:
    """An exit status of the child in words."""
    if status >= 0:
        return f"exit status {status:#x}" if status > 255 else f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "an unknown signal"
    causes = {
        "SIGKILL": "killed from outside; when memory is short, the system does this",
        "SIGSEGV": "a crash in native code",
        "SIGABRT": "native code gave up (a failed assertion)",
        "SIGILL": "a build for another CPU",
    }
    return f"{name} ({causes[name]})" if name in causes else name


def _map_int64(path: Path) -> memoryview[int]:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def _unset(n: int) -> memoryview[int]:
    return memoryview(b"\xff" * (8 * n)).cast("q")


# The child's end


def serve() -> None:
    """Answer requests from stdin until it ends. The child process runs this."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever native code prints belongs to stderr
    progress = _map_int64(Path(sys.argv[1]))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    child = _Child(progress)
    while True:
        request = json.loads(requests.get())
        verb = request.pop("verb")
        try:
            answer = {"value": to_json(getattr(child, verb)(**request))}
        except LabError as problem:
            answer = {"error": problem.what, "hint": problem.hint}
        replies.write(json.dumps(answer).encode() + b"\n")


def _read_requests(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    os._exit(0)  # the parent is gone; native code may be in the middle of a long step


class _Child:
    """One method per verb."""

    def __init__(self, progress: memoryview[int]) -> None:
        self._build = native.start()
        self._progress = progress
        self._loaded: engine.Loaded | None = None
        self._context: engine.Context | None = None

    def build(self) -> native.Build:
        return self._build

    def read_model(self, path: str, name: str, source: str, sha256: str | None) -> Model:
        return header.read_model(Path(path), name, source, sha256)

    def load(self, path: str, n_gpu_layers: int) -> Vocabulary:
        self._loaded = engine.load(Path(path), n_gpu_layers)
        return Vocabulary(self._loaded.n_vocab, self._loaded.bos)

    def tokenize(self, text: str) -> list[int]:
        return engine.tokenize(self._model, text)

    def pieces(self) -> list[str]:
        return [piece.decode("latin-1") for piece in engine.pieces(self._model)]

    def new_context(self, asked: dict[str, Any]) -> Settings:
        if self._context:
            engine.free_context(self._context)
            self._context = None
        self._context = engine.new_context(self._model, from_json(Settings, json.dumps(asked)))
        return self._context.settings

    def run(self, prompt: list[int], n_gen: int) -> dict[str, Any]:
        if self._context is None:
            raise LabError("There is no context to run in.", "This is a bug of the lab.")
        steps, token_ids, end_at = engine.run(self._context, prompt, n_gen, self._progress)
        return {"steps": steps, "token_ids": token_ids, "end_at": end_at}

    @property
    def _model(self) -> engine.Loaded:
        if self._loaded is None:
            raise LabError("No model is loaded.", "This is a bug of the lab.")
        return self._loaded
