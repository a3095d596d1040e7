"""Model files that other tools keep on this machine: Ollama, LM Studio and llama.cpp.

They are measured where they lie: nothing is copied, and nothing of theirs is deleted.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import files, split_files
from lab.errors import LabError
from lab.models.candidates import NO_MODELS, helper_kind

OLLAMA = "Ollama"
LM_STUDIO = "LM Studio"
LLAMA_CPP = "llama.cpp"

PREFIX = "ollama:"
REGISTRY = "registry.ollama.ai"
LIBRARY = "library"
LATEST = "latest"
WEIGHTS = "application/vnd.ollama.image.model"
MOST_MANIFEST_BYTES = 1_000_000
MOST_FOLDERS = 4  # below a folder of LM Studio: PUBLISHER/REPO/QUANTIZATION/FILE
SHOWN_NAMES = 5


@dataclass(frozen=True)
class StoredModel:
    """A model of another tool. `spec` names it after -m.

    `path`: the file, or the first part of several; None with the `problem` that it has none.
    """

    spec: str
    tool: str
    path: Path | None = None
    n_bytes: int | None = None
    problem: str | None = None


# Ollama


def ollama_folders() -> list[Path]:
    """The folders in which Ollama keeps models: a user's, and those of the system's service."""
    folders = [_home() / ".ollama" / "models"]
    chosen = os.environ.get("OLLAMA_MODELS", "").strip("\"' ")
    if chosen:
        folders.insert(0, files.expanded(chosen))
    if os.name != "nt":
        folders += [
            Path("/usr/share/ollama/.ollama/models"),
            Path("/var/lib/ollama/.ollama/models"),
            Path("/var/lib/ollama/models"),
            Path("/var/lib/ollama"),
            Path("/var/snap/ollama/common/models"),
        ]
    return folders


def find_ollama(name: str) -> StoredModel:
    """The model of Ollama with this name, such as llama3.2:3b. LabError if it has no file here."""
    wanted = _full_name(name)
    models = list(_ollama_models())
    for model in models:
        if _full_name(model.spec.removeprefix(PREFIX)) == wanted:
            if model.path is None:
                raise LabError(
                    f"{model.spec} cannot be measured: {model.problem}.", _OTHERWISE
                )
            return model
    names = [model.spec for model in models]
    if names:
        family = PREFIX + re.split("[:/]", name)[0]
        similar = [spec for spec in names if spec.startswith(family)]
        hint = (
            f"It has: {', '.join((similar or names)[:SHOWN_NAMES])}. All: lab models --found"
        )
    else:
        places = ", ".join(str(folder) for folder in ollama_folders()[:3])
        hint = f"No model of Ollama is in {places}. Set OLLAMA_MODELS to its folder."
    closed = _closed(ollama_folders())
    if closed:
        hint = f"The folder {closed[0]} may not be read by this user. {hint}"
    raise LabError(f"Ollama has no model {name!r} on this machine.", hint)


_OTHERWISE = "Measure a GGUF file of the model from the hub: hf:OWNER/REPO:Q4_K_M"


def _full_name(name: str) -> tuple[str, ...]:
    """Host, namespace, model and tag of a name as Ollama takes it, in lower case."""
    path, _, tag = name.lower().strip().strip("/").partition(":")
    if "/" in tag:  # a host with a port
        host, _, rest = tag.partition("/")
        model, _, tag = rest.partition(":")
        path = f"{path}:{host}/{model}"
    names = path.split("/")
    usual = [REGISTRY, LIBRARY]
    return (*usual[: max(0, 3 - len(names))], *names, tag or LATEST)


def _short_name(host: str, namespace: str, model: str, tag: str) -> str:
    """The name as Ollama lists it."""
    names = [host, namespace, model]
    if host == REGISTRY:
        names.pop(0)
        if namespace == LIBRARY:
            names.pop(0)
    return f"{'/'.join(names)}:{tag}"


def _ollama_models() -> Iterator[StoredModel]:
    """The models in all folders of Ollama; of equal names the first."""
    seen = set()
    for folder in ollama_folders():
        for names in _tree(folder / "manifests", 4):
            spec = PREFIX + _short_name(*names)
            if spec not in seen:
                seen.add(spec)
                yield _of_manifest(spec, folder, folder.joinpath("manifests", *names))


def _tree(folder: Path, depth: int) -> Iterator[tuple[str, ...]]:
    """The names of the files that lie exactly `depth` folders deep."""
    for name in _names_in(folder):
        if depth == 1:
            if not name.startswith("."):
                yield (name,)
        else:
            for rest in _tree(folder / name, depth - 1):
                yield (name, *rest)


def _of_manifest(spec: str, folder: Path, manifest: Path) -> StoredModel:
    """The model of a manifest, with its largest layer of weights."""
    try:
        with files.opened(manifest) as file:
            content = json.loads(file.read(MOST_MANIFEST_BYTES))
        layers = list(content["layers"] or ())
        weights = [_blob_of(layer) for layer in layers if layer.get("mediaType") == WEIGHTS]
    except OSError as problem:
        return StoredModel(
            spec, OLLAMA, problem=f"its manifest cannot be read: {problem.strerror}"
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return StoredModel(spec, OLLAMA, problem=f"its manifest {manifest} is broken")
    if not weights:
        why = "it has no GGUF file on this machine, as Ollama's cloud and safetensors models"
        return StoredModel(spec, OLLAMA, problem=why)
    n_bytes, digest = max(weights)
    for name in (f"sha256-{digest}", f"sha256:{digest}"):
        path = folder / "blobs" / name
        if files.is_file(path):
            return StoredModel(spec, OLLAMA, path, path.stat().st_size)
    why = f"its file {folder / 'blobs' / f'sha256-{digest}'} is missing or may not be read"
    return StoredModel(spec, OLLAMA, n_bytes=n_bytes, problem=why)


def _blob_of(layer: Any) -> tuple[int, str]:
    """The size and the sha256 of a layer. ValueError for others."""
    match = re.fullmatch(r"sha256:([0-9a-f]{64})", str(layer["digest"]))
    if match is None:
        raise ValueError("no digest")
    return int(layer.get("size") or 0), match[1]


# LM Studio and llama.cpp


def lm_studio_folders() -> list[Path]:
    """The folders of LM Studio's models: those of its homes, and the one in its settings."""
    homes = [_home() / ".lmstudio", _home() / ".cache" / "lm-studio"]
    pointer = _text_of(_home() / ".lmstudio-home-pointer")
    if pointer:
        homes.insert(0, Path(pointer.strip()))
    folders = []
    for home in homes:
        chosen = re.search(
            r'"downloadsFolder"\s*:\s*("[^"]+")', _text_of(home / "settings.json")
        )
        if chosen:
            folders.append(Path(json.loads(chosen[1])))
        folders.append(home / "models")
    return list(dict.fromkeys(folders))


def llama_cpp_folders() -> list[Path]:
    """The folder into which llama.cpp's programs download."""
    chosen = os.environ.get("LLAMA_CACHE")
    if chosen:
        return [files.expanded(chosen)]
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = _home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache")
    return [base / "llama.cpp"]


def _in_folders(tool: str, folders: list[Path]) -> Iterator[StoredModel]:
    seen = set()
    for folder in folders:
        for path in _gguf_files(folder, MOST_FOLDERS):
            if path in seen or helper_kind(path.name) in NO_MODELS:
                continue
            seen.add(path)
            yield _of_path(tool, path)


def _of_path(tool: str, path: Path) -> StoredModel:
    try:
        n_bytes = sum(part.stat().st_size for part in split_files.paths_of(path))
    except LabError as problem:
        return StoredModel(str(path), tool, problem=problem.what.rstrip("."))
    except OSError as problem:
        return StoredModel(str(path), tool, problem=f"it cannot be read: {problem.strerror}")
    return StoredModel(str(path), tool, path, n_bytes)


def _gguf_files(folder: Path, depth: int) -> Iterator[Path]:
    """The .gguf files in a folder and `depth` levels below; of a split model one part."""
    split = set()
    for name in _names_in(folder):
        path = folder / name
        if name.lower().endswith(".gguf"):
            first = split_files.names_of(name)[0]
            if first not in split and (files.is_file(path) or path.is_symlink()):
                split.add(first)
                yield path
        elif depth and not name.startswith("."):
            yield from _gguf_files(path, depth - 1)


# All of them


def found() -> list[StoredModel]:
    """The models of other tools on this machine, in the order of tools and names."""
    return [
        *_ollama_models(),
        *_in_folders(LM_STUDIO, lm_studio_folders()),
        *_in_folders(LLAMA_CPP, llama_cpp_folders()),
    ]


def unreadable() -> list[Path]:
    """The folders that may not be read, though other tools may have models in them."""
    return _closed([*ollama_folders(), *lm_studio_folders(), *llama_cpp_folders()])


def _closed(folders: list[Path]) -> list[Path]:
    """The folders that may not be read, or the outermost folder around each that may not."""
    closed: dict[Path, None] = {}
    for folder in folders:
        around = [path for path in (folder, *folder.parents) if files.obstacle(path)]
        if around and files.obstacle(folder):
            closed[around[-1]] = None
    return list(closed)


def _home() -> Path:
    return files.expanded("~")


def _names_in(folder: Path) -> list[str]:
    """The sorted names in a folder; none for a file, and for a folder that may not be read."""
    return [path.name for path in files.listed(folder)]


def _text_of(path: Path) -> str:
    try:
        with files.opened(path) as file:
            return file.read(MOST_MANIFEST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
