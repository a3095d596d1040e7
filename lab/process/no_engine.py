"""Stands in for the engine's process where llama.cpp is not installed: for plans that are not
run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NoReturn

from lab.errors import LabError
from lab.process.setup import ProcessSetup
from lab.process.wire import Build


def is_installed() -> bool:
    """Whether llama-cpp-python is installed in this environment."""
    return importlib.util.find_spec("llama_cpp") is not None


class NoEngine:
    """Knows no device and reads no file."""

    reads_files = False
    setup = ProcessSetup()
    build = Build("", None, "", ())

    def __enter__(self) -> NoEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def use(self, setup: ProcessSetup) -> None: ...

    def read_model(self, path: Path, *_: object) -> NoReturn:
        """LabError: llama.cpp reads the files of models."""
        raise LabError(
            f"{path.name} cannot be read: llama.cpp is not installed.",
            "Name a model of the list (lab models), or install it: python3 -m uv sync",
        )
