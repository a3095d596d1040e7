"""The child's end of the worker: answer requests from stdin until it closes.

The first line of output is the process id. A request is one JSON line, {"verb": ..., and its arguments}; a reply is one
JSON line, {"value": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lab.core.lines import converted, to_json
from lab.core.placement import Tensor
from lab.core.record import Model, Placement, Rate, Settings
from lab.core.script import Operation
from lab.engine import devices, execute, gguf_header, kernels, llama, logits, native
from lab.errors import LabError
from lab.process.wire import Build, Libraries, Outcome, Probe, Vocabulary, map_int64


def serve() -> None:
    """Answer requests from stdin until it closes. The child process runs this function."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of native code goes to stderr
    replies.write(f"{os.getpid()}\n".encode())
    progress = map_int64(Path(sys.argv[1]))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    child = _started(progress)
    while True:
        request = json.loads(requests.get())
        verb = request.pop("verb")
        try:
            if isinstance(child, LabError):
                raise child
            answer = {"value": to_json(_call(getattr(child, verb), request))}
        except LabError as problem:
            answer = {"error": problem.what, "hint": problem.hint}
        except Exception:
            _end_with_traceback()
        replies.write(json.dumps(answer).encode() + b"\n")


def _call(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a method with arguments from JSON, converted to the types that it declares."""
    hints = typing.get_type_hints(method)
    return method(**{name: converted(value, hints[name]) for name, value in arguments.items()})


def _started(progress: memoryview[int]) -> _Child | LabError:
    """The child, or the error of its start, which then answers every request."""
    try:
        return _Child(progress)
    except LabError as problem:
        return problem
    except Exception:
        _end_with_traceback()


def _end_with_traceback() -> NoReturn:
    """After a bug: the parent shows the traceback as the engine's last output."""
    traceback.print_exc()
    os._exit(1)


def _read_requests(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    os._exit(0)  # the parent has ended; native code may still run a long step


class _Child:
    """One method for each verb."""

    def __init__(self, progress: memoryview[int]) -> None:
        self._build = native.start(sys.argv[2:])
        self._progress = progress
        self._loaded: llama.Loaded | None = None
        self._context: llama.Context | None = None
        self._draft: llama.Loaded | None = None
        self._draft_context: llama.Context | None = None

    def build(self) -> Build:
        return self._build

    def libraries(self) -> Libraries:
        return native.libraries()

    def read_model(self, path: Path, name: str, source: str) -> Model:
        return gguf_header.read_model(path, name, source)

    def tensors(self, path: Path) -> tuple[Tensor, ...]:
        return gguf_header.read_tensors(path)

    def free_memory(self) -> dict[str, int]:
        return devices.free_memory()

    def quantizations(self) -> list[str]:
        return list(llama.quantizations())

    def quantize(self, source: Path, target: Path, quantization: str) -> None:
        llama.quantize(source, target, quantization)

    def load(self, path: Path, asked: Settings, draft: Path | None) -> Vocabulary:
        self._loaded = llama.load(path, asked)
        self._draft = llama.load(draft, asked) if draft else None
        return Vocabulary(self._loaded.n_vocab, self._loaded.bos, llama.describe(self._loaded))

    def vocabularies_differ(self, path: Path, other: Path) -> str | None:
        return llama.vocabularies_differ(path, other)

    def tokenize(self, text: str) -> list[int]:
        return llama.tokenize(self._model, text)

    def pieces(self) -> list[str]:
        return [piece.decode("latin-1") for piece in llama.pieces(self._model)]

    def new_context(self, asked: Settings) -> Settings:
        for context in (self._context, self._draft_context):
            if context:
                llama.free_context(context)
        self._context = self._draft_context = None
        self._context = llama.new_context(self._model, asked)
        if self._draft:
            self._draft_context = llama.new_context(self._draft, asked)
        return self._context.settings

    def placement(self) -> Placement:
        if self._context is None:
            raise LabError("There is no context to inspect.", "This is a bug of the lab.")
        return Placement(self._context.loaded.layers, (*self._context.loaded.buffers, *self._context.buffers))

    def reserve(self, path: Path, asked: Settings) -> list[str]:
        return llama.reserve(path, asked)

    def run(self, script: list[Operation]) -> Outcome:
        if self._context is None:
            raise LabError("There is no context to run in.", "This is a bug of the lab.")
        return execute.run(self._context, self._draft_context, script, self._progress)

    def time_sampling(self, samplers: list[tuple[str, float]], n_times: int) -> list[int]:
        if self._context is None:
            raise LabError("There is no context to sample in.", "This is a bug of the lab.")
        return logits.sampling_ns(self._context, samplers, n_times)

    def probe(self, probe: Probe) -> Rate:
        return kernels.run(probe)

    @property
    def _model(self) -> llama.Loaded:
        if self._loaded is None:
            raise LabError("No model is loaded.", "This is a bug of the lab.")
        return self._loaded
