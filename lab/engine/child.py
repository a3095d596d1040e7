"""The child's end of the worker: a method for each request.

A request is {"verb": ..., and its arguments}, a reply {"value": ...} or {"error": ...} (process/served.py).
"""

from __future__ import annotations

import shutil
import sys
import typing
from pathlib import Path
from typing import Any

from lab.core.lines import converted, to_json
from lab.core.placement import Tensor
from lab.core.record import Model, Placement, Rate, Settings
from lab.core.script import Operation
from lab.core.traced import Looks
from lab.engine import devices, execute, gguf_header, kernels, llama, native, tracing
from lab.errors import LabError
from lab.process import served
from lab.process.wire import Build, Libraries, Outcome, Probe, Trace, Vocabulary, map_int64


def serve() -> None:
    """Answer requests from stdin until it closes. The child process runs this function."""
    progress = map_int64(Path(sys.argv[1]))
    served.serve(lambda: _Child(progress).answer, lambda: shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True))


class _Child:
    """One method for each verb."""

    def __init__(self, progress: memoryview[int]) -> None:
        self._build = native.start(sys.argv[2:])
        self._progress = progress
        self._loaded: llama.Loaded | None = None
        self._context: llama.Context | None = None
        self._draft: llama.Loaded | None = None
        self._draft_context: llama.Context | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a method with arguments from JSON, converted to the types that it declares."""
        verb = request.pop("verb")
        if verb != "probe":
            kernels.release()
        method = getattr(self, verb)
        hints = typing.get_type_hints(method)
        return {"value": to_json(method(**{name: converted(value, hints[name]) for name, value in request.items()}))}

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

    def probe(self, probe: Probe) -> Rate:
        return kernels.run(probe)

    def trace(self, tokens: list[int], n_gen: int, n_rounds: int) -> Trace:
        if self._context is None:
            raise LabError("There is no context to trace in.", "This is a bug of the lab.")
        return tracing.trace(self._context, tokens, n_gen, n_rounds)

    def look(self, tokens: list[int], replaced: int, replacement: int) -> Looks:
        if self._context is None:
            raise LabError("There is no context to look into.", "This is a bug of the lab.")
        return tracing.look(self._context, tokens, replaced, replacement)

    @property
    def _model(self) -> llama.Loaded:
        if self._loaded is None:
            raise LabError("No model is loaded.", "This is a bug of the lab.")
        return self._loaded
