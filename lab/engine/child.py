"""The child's end of the worker: a method for each request.

A request is {"verb": ..., and its arguments}, a reply {"value": ...} or {"error": ...}
(process/spawning.py). A verb with dots names a function of a feature's module.
"""

from __future__ import annotations

import shutil
import sys
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lab.core.lines import converted, to_json
from lab.core.record import Placement, Settings
from lab.core.script import Operation
from lab.engine import devices, execute, gguf_header, kernels, llama, sampling
from lab.process import spawning
from lab.process.wire import Build, Outcome, Vocabulary, map_int64

VERBS: dict[str, Callable[..., object]] = {
    "libraries": devices.libraries,
    "read_model": gguf_header.read_model,
    "tensors": gguf_header.read_tensors,
    "free_memory": devices.free_memory,
    "quantizations": llama.quantizations,
    "quantize": llama.quantize,
    "vocabularies_differ": llama.vocabularies_differ,
    "probe": kernels.run,
    "grammar": sampling.grammar,
}
"""The verbs that need no loaded model; the others are methods of the child."""


def serve() -> None:
    """Answer requests from stdin until it closes. The child process runs this function.

    Its arguments: the file of the progress, and the addresses of RPC servers.
    """
    progress_path = Path(sys.argv[1])
    rpc_servers = sys.argv[2:]
    progress = map_int64(progress_path)

    def start() -> Callable[[dict[str, Any]], dict[str, Any]]:
        return _Child(progress, rpc_servers).answer

    def clean_up() -> None:
        shutil.rmtree(progress_path.parent, ignore_errors=True)

    spawning.serve(start, clean_up)


class _Child:
    """The state of the process: the loaded model, its draft model, and their contexts."""

    def __init__(self, progress: memoryview[int], rpc_servers: Sequence[str]) -> None:
        self._build = devices.start(rpc_servers)
        self._progress = progress
        self._model: llama.Loaded
        self._draft_model: llama.Loaded | None = None
        self._context: llama.LlamaContext | None = None
        self._draft_context: llama.LlamaContext | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the function of a request; its arguments are converted to the types it declares."""
        verb = request.pop("verb")
        if verb != "probe":
            kernels.release()
        function = self._function(verb)
        types = typing.get_type_hints(function)
        arguments = {key: converted(value, types[key]) for key, value in request.items()}
        if "." in verb:  # a feature's function gets the context before its arguments
            return {"value": to_json(function(self._context, **arguments))}
        return {"value": to_json(function(**arguments))}

    def _function(self, verb: str) -> Callable[..., object]:
        module, _, name = verb.rpartition(".")
        if module:
            function: Callable[..., object] = getattr(import_module(module), name)
            return function
        return VERBS.get(verb) or getattr(self, verb)

    def build(self) -> Build:
        return self._build

    def load(self, path: Path, asked: Settings, draft: Path | None) -> Vocabulary:
        self._model = llama.load(path, asked)
        sampling.check(self._model, asked.sampling)
        self._draft_model = llama.load(draft, asked) if draft else None
        description = llama.describe(self._model)
        return Vocabulary(self._model.n_vocab, self._model.bos, description)

    def tokenize(self, text: str) -> list[int]:
        return llama.tokenize(self._model, text)

    def pieces(self) -> list[str]:
        return [piece.decode("latin-1") for piece in llama.pieces(self._model)]

    def new_context(self, asked: Settings) -> Settings:
        self._free_contexts()
        self._context = llama.new_context(self._model, asked)
        if self._draft_model:
            self._draft_context = llama.new_context(self._draft_model, asked)
        return self._context.settings

    def _free_contexts(self) -> None:
        for context in (self._context, self._draft_context):
            if context:
                llama.free_context(context)
        self._context = None
        self._draft_context = None

    def placement(self) -> Placement:
        return self._open_context.placement

    def run(self, script: list[Operation]) -> Outcome:
        return execute.run(self._open_context, self._draft_context, script, self._progress)

    @property
    def _open_context(self) -> llama.LlamaContext:
        assert self._context, "no context is open"
        return self._context
