"""From a SPEC to a file on this machine.

It is found, pulled into the standard hub cache, or made in the lab's own.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from lab.core import files, shell, split_files
from lab.core.files import GET_AGAIN, exists, listed, user_folder
from lab.core.record import Model
from lab.errors import LabError, printable
from lab.models import catalog, hub, synthetic
from lab.models.candidates import Candidate, candidates, tag_in, tagged, usual
from lab.models.catalog import (
    EMBEDDED,
    FILE,
    HUB,
    OLLAMA,
    REQUANTIZED,
    SYNTHETIC,
    Entry,
    ModelFile,
    Spec,
)
from lab.models.hub import HubFile
from lab.models.spellings import bare_hub_name
from lab.process.worker import Worker

ShowTransfer = hub.ShowTransfer
silently = hub.silently

MOST_FILES = 40  # of a repo that a message names

# Random weights from which llama.cpp's quantizer makes other types
WRITTEN_FOR_OTHERS = "Q4_0"


def find(
    worker: Worker,
    text: str,
    watch: ShowTransfer = silently,
    memory_bytes: int | None = None,
) -> Model:
    """The model that `text` names.

    From its file's header, also on the hub, or from its shape in the catalog. A `worker` that reads
    no files takes the shape also where the file of a model of the catalog is on this machine.
    For a repo without a file, the LabError says which of its models fit into `memory_bytes`.
    """
    spec = catalog.parse(text, or_shape=True)
    needs_file = worker.reads_files or spec.entry is None
    file = locate(spec) if needs_file else None
    if file:
        return read(worker, spec, file)
    if spec.entry:
        kind = spec.quantization or spec.entry.usual_quantization
        return synthetic.model_of(spec.entry, kind)
    if spec.repo is None:
        raise _not_here(spec)
    _show_asking(spec, watch)
    with _as_a_path_too(spec), tempfile.TemporaryDirectory() as folder:
        remote = _remote(spec, memory_bytes)
        path = hub.header(remote, Path(folder))
        model = worker.read_model(path, spec.name, HUB)
    return dataclasses.replace(
        model, repo=remote.repo, file=remote.file, revision=remote.revision
    )


def read(worker: Worker, spec: Spec, file: ModelFile) -> Model:
    """The model in the file of `spec`. LabError for a damaged one says how to get it again."""
    try:
        model = worker.read_model(file.path, file.name, file.source)
    except LabError as problem:
        if file.source == HUB and problem.hint == GET_AGAIN:
            raise LabError(problem.what, f"Pull it again: {how_to_get(spec)}") from None
        raise
    return dataclasses.replace(
        model,
        file=printable(file.file) if file.file else model.file,
        repo=file.repo,
        revision=file.revision,
        sha256=file.sha256,
    )


def locate(spec: Spec) -> ModelFile | None:
    """The file of `spec` if it is on this machine; does not fetch or make it."""
    if spec.path:
        return ModelFile(spec.name, spec.source, split_files.first_of(spec.path))
    remote = _known_remote(spec)
    pulled = hub.cached(remote) if remote else None
    if pulled:
        return dataclasses.replace(pulled, name=spec.name)
    path = _made_path(spec)
    if path and exists(path):
        return ModelFile(spec.name, _source_when_made(spec), path)
    if spec.source == EMBEDDED and not spec.is_requantized:
        return ModelFile(spec.name, EMBEDDED, catalog.embedded_path())
    return None


def obtain(
    spec: Spec,
    worker: Worker,
    watch: ShowTransfer | None = silently,
    memory_bytes: int | None = None,
) -> ModelFile:
    """The file of `spec`, pulled or made if necessary.

    With None for `watch` a missing file is a LabError. For a repo without a file, the LabError says
    which of its models fit into `memory_bytes`.
    """
    file = locate(spec)
    if file:
        return file
    if watch is None:
        raise _not_here(spec)
    if spec.source == SYNTHETIC:
        return _make_synthetic(spec, worker, watch)
    original = _original(spec)
    if original and _can_be_made(spec):
        return _requantize(spec, original, worker, watch)
    _show_asking(spec, watch)
    with _as_a_path_too(spec):
        remote = _remote(spec, memory_bytes)
        n_bytes = spec.entry.n_bytes if spec.entry else None
        what = f"downloading {remote.file}"
        if len(remote.parts) > 1:
            sizes = hub.missing_bytes(remote)
            n_bytes = sum(sizes)
            megabytes = " + ".join(f"{size / 1e6:,.0f}" for size in sizes)
            what = f"downloading {len(sizes)} of {len(remote.parts)} parts ({megabytes} MB)"
        watch(what, 0, n_bytes)
        pulled = hub.pull(remote, watch)
    hub.remember(remote)
    return dataclasses.replace(pulled, name=spec.name)


def _show_asking(spec: Spec, watch: ShowTransfer) -> None:
    """Say what is waited for: a hub that cannot be reached answers nothing for some seconds."""
    watch(f"asking the hub for {spec.text}", 0, None)


def drop_damaged(spec: Spec, worker: Worker, watch: ShowTransfer) -> None:
    """Delete the pulled file of `spec` from the hub's cache if it is not what the hub announced.

    Where the cache does not tell the sum, a file that is shorter than its header says.
    """
    file = locate(spec)
    remote = _known_remote(spec)
    if file is None or remote is None or file.source != HUB:
        return
    watch(f"checking {file.path.name}", 0, file.n_bytes)
    n_dropped = hub.drop_damaged(remote)
    if not n_dropped and file.sha256 is None:
        try:
            worker.read_model(file.path, file.name, file.source)
        except LabError as problem:
            if problem.hint == GET_AGAIN:
                n_dropped = hub.remove(remote)
    if n_dropped:
        watch(f"{file.path.name} is damaged: the lab deleted it, and pulls it again", 0, None)


def how_to_get(spec: Spec) -> str:
    """The command that gets the file of `spec`."""
    return shell.lab("models", "make" if is_made_here(spec) else "pull", spec.text)


def is_made_here(spec: Spec) -> bool:
    """Whether a file is made on this machine and not downloaded."""
    return spec.source == SYNTHETIC or _original(spec) is not None


def _can_be_made(spec: Spec) -> bool:
    """Whether llama.cpp's quantizer makes the requested quantization of a model's file."""
    return spec.is_requantized and "UD-" not in (spec.quantization or "")


@contextmanager
def _as_a_path_too(spec: Spec) -> Iterator[None]:
    """Let a LabError about OWNER/REPO/FILE.gguf say that there is no such file here."""
    try:
        yield
    except LabError as problem:
        if spec.entry or not bare_hub_name(spec.text):
            raise
        what = f"There is no file {spec.text} on this machine, nor on the hub: {problem.what}"
        raise LabError(what, problem.hint) from None


def _not_here(spec: Spec) -> LabError:
    return LabError(
        f"{spec.text} is not on this machine.", f"Get it first: {how_to_get(spec)}"
    )


def remove(spec: Spec) -> int:
    """Delete the pulled or made file of `spec`. Returns the bytes freed, 0 if there was none."""
    file = locate(spec)
    if file is None or file.source == HUB:
        remote = _known_remote(spec, must_be_one=True)
        return hub.remove(remote) if remote else 0
    if file.source in (FILE, OLLAMA, EMBEDDED):
        what = f"The lab did not create {spec.text}, so it does not delete it."
        raise LabError(what, "Delete it yourself.")
    n_bytes = file.path.stat().st_size
    file.path.unlink()
    return n_bytes


# The list of models


class ModelRow(TypedDict):
    spec: str
    quantization: str | None
    n_bytes: int | None  # of the file, or of the download
    on_disk: bool
    source: str
    about: str


def listing() -> list[ModelRow]:
    """The catalog, the files in the cache folder of made models, and those in the hub's cache."""
    rows = []
    paths = set()
    for entry in catalog.entries().values():
        file = _file_of_entry(entry)
        rows.append(_row_of_entry(entry, file))
        if file:
            paths.add(file.path)
    for path in _made_files():
        row = _row_of_made(path)
        if row:
            rows.append(row)
    return rows + [row_of_pulled(file) for file in hub.pulled() if file.path not in paths]


def row_of_pulled(file: ModelFile) -> ModelRow:
    """The row of a file in the hub's cache, whose name is its SPEC."""
    return {
        "spec": file.name,
        "quantization": tag_in(file.name.partition("@")[0]),
        "n_bytes": file.n_bytes,
        "on_disk": True,
        "source": HUB,
        "about": "in the hub's cache",
    }


def _file_of_entry(entry: Entry) -> ModelFile | None:
    if not entry.embedded and not entry.repo:
        return None
    with suppress(LabError):  # the embedded model's package is not installed
        return locate(catalog.parse(entry.name))
    return None


def _row_of_entry(entry: Entry, file: ModelFile | None) -> ModelRow:
    source = "shape only"
    if entry.embedded:
        source = EMBEDDED
    elif entry.repo:
        source = HUB
    return {
        "spec": entry.name,
        "quantization": entry.quantization,
        "n_bytes": file.n_bytes if file else entry.n_bytes,
        "on_disk": file is not None,
        "source": source,
        "about": entry.about,
    }


def _made_files() -> list[Path]:
    with suppress(LabError):  # without a home folder there are none
        return listed(cache_folder(), "*.gguf")
    return []


def _row_of_made(path: Path) -> ModelRow | None:
    """The row of a file SOURCE--NAME--QUANTIZATION.gguf; None if the lab did not make it."""
    source, _, name_and_kind = path.stem.partition("--")
    name, _, quantization = name_and_kind.partition("--")
    if source == SYNTHETIC:
        text = f"synthetic:{name}:{quantization}"
        about = "random weights"
    else:
        text = f"{name}:{quantization}"
        about = "re-quantised: real speed, but lower quality"
    try:
        if _made_path(catalog.parse(text)) != path:
            return None
    except LabError:
        return None
    return {
        "spec": text,
        "quantization": quantization,
        "n_bytes": path.stat().st_size,
        "on_disk": True,
        "source": source,
        "about": about,
    }


def cache_folder() -> Path:
    """The folder of made models and builds: $MINI_LAB_CACHE, or the platform's."""
    import platformdirs

    chosen = os.environ.get("MINI_LAB_CACHE")
    if chosen:
        return files.expanded(chosen)
    find = functools.partial(platformdirs.user_cache_path, "mini-lab", appauthor=False)
    return user_folder(find, "MINI_LAB_CACHE") / "models"


# Making a file


def _make_synthetic(spec: Spec, worker: Worker, watch: ShowTransfer) -> ModelFile:
    """Write a model with random weights; the file gets its name at the end."""
    assert spec.entry is not None and spec.quantization is not None
    shape = spec.entry.shape
    kind = spec.quantization
    _check_quantization(worker, kind)
    target = _target(spec)
    what = f"writing {spec.entry.name} with random weights"

    def show(done: int, total: int) -> None:
        watch(what, done, total)

    if kind in synthetic.QUANTIZATIONS:
        with _in_cache_folder(target, synthetic.n_bytes(shape, kind)):
            synthetic.write(shape, kind, target, watch=show)
    else:
        n_bytes = 3 * synthetic.n_bytes(shape, WRITTEN_FOR_OTHERS)
        base = _temporary(target, "base")
        with _in_cache_folder(target, n_bytes):
            try:
                synthetic.write(shape, WRITTEN_FOR_OTHERS, base, watch=show)
                _quantize(base, target, kind, worker, watch)
            finally:
                _delete(base)
    return ModelFile(spec.entry.name, SYNTHETIC, target)


def _requantize(
    spec: Spec, original: ModelFile, worker: Worker, watch: ShowTransfer
) -> ModelFile:
    """Write the catalog's model in another quantization; the file gets its name at the end."""
    assert spec.entry is not None and spec.quantization is not None
    _check_quantization(worker, spec.quantization)
    target = _target(spec)
    with _in_cache_folder(target, 4 * original.n_bytes):
        _quantize(original.path, target, spec.quantization, worker, watch)
    name = spec.entry.name
    return ModelFile(name, REQUANTIZED, target, original.repo, original.revision)


def _quantize(
    source: Path, target: Path, kind: str, worker: Worker, watch: ShowTransfer
) -> None:
    what = f"quantizing to {kind}"
    part = _temporary(target, "part")
    watch(what, 0, None)
    try:
        worker.quantize(source, part, kind, lambda done: watch(what, done, None))
        part.replace(target)
    finally:
        _delete(part)


def _check_quantization(worker: Worker, kind: str) -> None:
    """LabError for a quantization that llama.cpp does not have."""
    kinds = worker.quantizations()
    if kind in kinds:
        return
    offer = "Common ones: Q4_0, Q4_K_M, Q5_K_M, Q6_K, Q8_0, F16."
    similar = difflib.get_close_matches(kind, kinds, n=3)
    if similar:
        offer = f"Did you mean {' or '.join(similar)}?"
    raise LabError(f"llama.cpp has no quantization {kind!r}.", offer)


@contextmanager
def _in_cache_folder(target: Path, n_bytes: int) -> Iterator[None]:
    """A `with` block that writes into the folder of made models. LabError without room for it."""
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < n_bytes:
            what = (
                f"{target.name} needs about {n_bytes / 1e9:.1f} GB in {folder}; "
                f"{free_bytes / 1e9:.1f} GB are free."
            )
            hint = (
                "Remove models (lab models remove), "
                "or set MINI_LAB_CACHE to a folder on another disk."
            )
            raise LabError(what, hint)
        yield
    except OSError as problem:
        reason = problem.strerror or problem
        what = f"The folder for made models, {folder}, cannot be used: {reason}."
        raise LabError(what, "Set MINI_LAB_CACHE to another folder.") from None


def _temporary(target: Path, ending: str) -> Path:
    """A path beside `target` that no other process uses."""
    return target.with_name(f".{target.stem}.{os.getpid()}.{ending}")


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


# Where a file lies


def _known_remote(spec: Spec, must_be_one: bool = False) -> HubFile | None:
    """The file on the hub that `spec` names, as far as it is known here, without the network.

    `must_be_one`: LabError for a name of several models.
    """
    named = _named_file(spec)
    if named or spec.repo is None:
        return named
    models = candidates(hub.known_files(spec.repo, spec.revision))
    fitting = _fitting(spec, models)
    if must_be_one and len(fitting) > 1:
        raise _not_one(spec, models, fitting, None)
    return HubFile(spec.repo, fitting[0].name, spec.revision) if len(fitting) == 1 else None


def _remote(spec: Spec, memory_bytes: int | None = None) -> HubFile:
    """The file on the hub that `spec` names, of a split model the first part.

    LabError if it names no model of its repo, or several.
    """
    assert spec.repo is not None
    named = _named_file(spec)
    if named:
        return named
    listing = hub.files(spec.repo, spec.revision)
    models = candidates(listing)
    if not models:
        what = f"{spec.repo} has no model in a .gguf file."
        if listing:
            what += f" It has: {', '.join(file.name for file in listing[:MOST_FILES])}."
        raise LabError(what, "Look for a repo of this model with GGUF in its name.")
    fitting = _fitting(spec, models)
    if len(fitting) != 1:
        raise _not_one(spec, models, fitting, memory_bytes)
    return HubFile(spec.repo, fitting[0].name, spec.revision)


def _named_file(spec: Spec) -> HubFile | None:
    """The file that `spec` names itself, of a split model the first part."""
    if spec.repo is None or spec.file is None or spec.is_requantized:
        return None
    sha256 = spec.entry.sha256 if spec.entry else None
    return HubFile(spec.repo, split_files.names_of(spec.file)[0], spec.revision, sha256)


def _fitting(spec: Spec, models: list[Candidate]) -> list[Candidate]:
    """The models of a repo that a SPEC names."""
    if spec.quantization:
        return tagged(models, spec.quantization)
    return usual(models) if spec.takes_usual else models


def _not_one(
    spec: Spec, models: list[Candidate], fitting: list[Candidate], memory_bytes: int | None
) -> LabError:
    """The LabError for a SPEC that names none of a repo's models, or several."""
    if not fitting:
        what = f"{spec.repo} has no file with quantization {spec.quantization}."
    elif fitting == models:
        what = f"{spec.repo} has {len(models)} models."
    else:
        what = f"{spec.text} names {len(fitting)} models."
    return LabError(what, _offer(spec, fitting or models, memory_bytes))


def _offer(spec: Spec, models: list[Candidate], memory_bytes: int | None) -> str:
    """The lines that name models of a repo, with their sizes and whether they fit."""
    tags = collections.Counter(model.tag for model in models)
    lines = ["Name one of these:"]
    for model in models[:MOST_FILES]:
        is_named_by_tag = model.tag and tags[model.tag] == 1
        name = f":{model.tag}" if is_named_by_tag else f"/{model.name}"
        line = f"  hf:{spec.repo}{name}"
        if model.n_parts > 1:
            line += f", {model.n_parts} parts"
        if model.n_bytes is not None:
            line += f", {model.n_bytes / 1e9:,.2f} GB"
            if memory_bytes is not None and model.n_bytes > memory_bytes:
                line += f": more than the free memory ({memory_bytes / 1e9:,.1f} GB)"
            elif memory_bytes is not None:
                line += ": fits into the free memory"
        lines.append(line)
    if len(models) > MOST_FILES:
        lines.append(f"and {len(models) - MOST_FILES} more")
    return "\n".join(lines)


def _original(spec: Spec) -> ModelFile | None:
    """The catalog's own file of a model, if it is here: others are quantized from it."""
    if not spec.entry or spec.source == SYNTHETIC:
        return None
    return locate(catalog.parse(spec.entry.name))


def _source_when_made(spec: Spec) -> str:
    return SYNTHETIC if spec.source == SYNTHETIC else REQUANTIZED


def _made_path(spec: Spec) -> Path | None:
    """The path of a model that the lab makes; None for others."""
    if not spec.entry or not spec.quantization:
        return None
    if spec.source != SYNTHETIC and not spec.is_requantized:
        return None
    with suppress(LabError):  # without a home folder none is made
        return _target(spec)
    return None


def _target(spec: Spec) -> Path:
    """The path of a made model: SOURCE--NAME--QUANTIZATION.gguf."""
    return cache_folder() / f"{_source_when_made(spec)}--{spec.name}--{spec.quantization}.gguf"
