"""The child's end of the worker: a method for each request.

A request is {"verb": ..., and its arguments}, a reply {"value": ...} or {"error": ...} (process/spawning.py).
"""

from __future__ import annotations

import shutil
import sys
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lab.core.lines import converted, to_json
from lab.core.record import Placement, Settings
from lab.core.script import Operation
from lab.engine import devices, execute, gguf_header, kernels, llama
from lab.process import spawning
from lab.process.wire import Build, Outcome, Vocabulary, map_int64


def serve() -> None:
    """Answer requests from stdin until it closes. The child process runs this function."""
    progress = map_int64(Path(sys.argv[1]))
    spawning.serve(
        lambda: _Child(progress).answer,
        lambda: shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True),
    )


VERBS: dict[str, Callable[..., Any]] = {
    "libraries": devices.libraries,
    "read_model": gguf_header.read_model,
    "tensors": gguf_header.read_tensors,
    "free_memory": devices.free_memory,
    "quantizations": llama.quantizations,
    "quantize": llama.quantize,
    "vocabularies_differ": llama.vocabularies_differ,
    "probe": kernels.run,
}
"""The verbs that need no loaded model."""


class _Child:
    """A method for each other verb."""

    def __init__(self, progress: memoryview[int]) -> None:
        self._build = devices.start()
        self._progress = progress
        self._loaded: llama.Loaded
        self._context: llama.Context

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function with arguments from JSON, as it declares them; a feature's (with dots) gets the context."""
        verb = request.pop("verb")
        if verb != "probe":
            kernels.release()
        module, _, name = verb.rpartition(".")
        method = (
            getattr(import_module(module), name)
            if module
            else VERBS.get(verb) or getattr(self, verb)
        )
        hints = typing.get_type_hints(method)
        given = {name: converted(value, hints[name]) for name, value in request.items()}
        return {"value": to_json(method(*([self._context] if module else []), **given))}

    def build(self) -> Build:
        return self._build

    def load(self, path: Path, asked: Settings, draft: Path | None) -> Vocabulary:
        self._loaded = llama.load(path, asked)
        self._draft = llama.load(draft, asked) if draft else None
        return Vocabulary(self._loaded.n_vocab, self._loaded.bos, llama.describe(self._loaded))

    def tokenize(self, text: str) -> list[int]:
        return llama.tokenize(self._loaded, text)

    def pieces(self) -> list[str]:
        return [piece.decode("latin-1") for piece in llama.pieces(self._loaded)]

    def new_context(self, asked: Settings) -> Settings:
        for name in ("_context", "_draft_context"):
            if context := vars(self).pop(name, None):
                llama.free_context(context)
        self._context = llama.new_context(self._loaded, asked)
        self._draft_context = llama.new_context(self._draft, asked) if self._draft else None
        return self._context.settings

    def placement(self) -> Placement:
        return Placement(
            self._context.loaded.layers, (*self._context.loaded.buffers, *self._context.buffers)
        )

    def run(self, script: list[Operation]) -> Outcome:
        return execute.run(self._context, self._draft_context, script, self._progress)
