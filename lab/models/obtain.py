"""From a SPEC to a file on this machine: find it, pull it into the standard hub cache, or make it in the lab's own."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.core import shell
from lab.core.record import Model
from lab.errors import LabError
from lab.models import catalog, hub, synthetic
from lab.models.catalog import EMBEDDED, FILE, HUB, REQUANTIZED, SYNTHETIC, ModelFile, Spec
from lab.models.hub import Remote
from lab.process.worker import Worker

ShowTransfer = Callable[[str, int, int | None], None]
"""Called with a description of the work, the bytes done and the total bytes (None: unknown)."""


def silently(what: str, done: int, total: int | None) -> None:
    """Shows nothing of a transfer."""


def find(worker: Worker, text: str) -> Model:
    """The model that `text` names: from its file's header, also on the hub, or from its shape in the catalog."""
    spec = catalog.parse(text, or_shape=True)
    if file := locate(spec):
        return worker.read_model(file.path, file.name, file.source)
    if spec.entry:
        return synthetic.model_of(
            spec.entry, spec.quantization or spec.entry.quantization or synthetic.USUAL
        )
    if not spec.repo or not spec.file:
        raise LabError(f"{spec.text} is not on this machine.", f"Get it first: {how_to_get(spec)}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(spec.file).name
        hub.header(Remote(spec.repo, spec.file, spec.revision), path)
        return worker.read_model(path, path.stem, HUB)


def locate(spec: Spec) -> ModelFile | None:
    """The file of `spec` if it is on this machine; does not fetch or make it."""
    if spec.path:
        return ModelFile(spec.name, FILE, spec.path)
    if (remote := _remote(spec, hub.cached_names)) and (pulled := hub.cached(remote)):
        return dataclasses.replace(pulled, name=spec.name)
    if (made := _made_path(spec)) and made.exists():
        return ModelFile(spec.name, SYNTHETIC if spec.source == SYNTHETIC else REQUANTIZED, made)
    if spec.source == EMBEDDED and not spec.is_requantized:
        return ModelFile(spec.name, EMBEDDED, catalog.embedded_path())
    return None


def obtain(spec: Spec, worker: Worker, watch: ShowTransfer | None = silently) -> ModelFile:
    """The file of `spec`, pulled or made if necessary. With None for `watch` a missing file is a LabError."""
    if here := locate(spec):
        return here
    if watch is None:
        raise LabError(f"{spec.text} is not on this machine.", f"Get it first: {how_to_get(spec)}")
    if spec.source == SYNTHETIC or (spec.is_requantized and _base(spec)):
        return _make(spec, worker, watch)
    remote = _remote(spec, hub.files)
    if remote is None:
        names = ", ".join(hub.files(spec.repo or "", spec.revision)[:12]) or "no .gguf file"
        raise LabError(
            f"{spec.repo} has no file with quantization {spec.quantization}.", f"It has: {names}."
        )
    watch(f"downloading {remote.file}", 0, spec.entry.n_bytes if spec.entry else None)
    return dataclasses.replace(hub.pull(remote), name=spec.name)


def how_to_get(spec: Spec) -> str:
    return shell.lab(
        "models", "make" if spec.source == SYNTHETIC or _base(spec) else "pull", spec.text
    )


def remove(spec: Spec) -> int:
    """Delete the pulled or made file of `spec`. Returns the bytes freed, 0 if there was none."""
    here = locate(spec)
    if here and here.source in (FILE, EMBEDDED):
        raise LabError(
            f"The lab did not create {spec.text}, so it does not delete it.", "Delete it yourself."
        )
    if here and here.source != HUB:
        n_bytes = here.path.stat().st_size
        here.path.unlink()
        return n_bytes
    remote = _remote(spec, hub.cached_names)
    return hub.remove(remote) if remote else 0


def listing() -> list[dict[str, Any]]:
    """The catalog, and the files in the cache folder of made models, with the bytes of the file or download."""
    names = ("spec", "quantization", "n_bytes", "on_disk", "source", "about")
    rows: list[tuple[Any, ...]] = []
    for entry in catalog.entries().values():
        source = EMBEDDED if entry.embedded else HUB if entry.repo else "shape only"
        here = None
        with suppress(LabError):  # the embedded model's package is not installed
            here = locate(catalog.parse(entry.name)) if entry.embedded or entry.repo else None
        n_bytes = here.path.stat().st_size if here else entry.n_bytes
        rows.append(
            (entry.name, entry.quantization, n_bytes, here is not None, source, entry.about)
        )
    for path in sorted(cache_folder().glob("*.gguf")):
        source, name, quantization = [*path.stem.split("--"), "", ""][:3]
        text = (
            f"synthetic:{name}:{quantization}" if source == SYNTHETIC else f"{name}:{quantization}"
        )
        with suppress(LabError):  # a file that the lab did not make
            if _made_path(catalog.parse(text)) == path:
                about = (
                    "random weights"
                    if source == SYNTHETIC
                    else "re-quantised: real speed, but lower quality"
                )
                rows.append((text, quantization, path.stat().st_size, True, source, about))
    return [dict(zip(names, row, strict=True)) for row in rows]


def cache_folder() -> Path:
    """The folder of made models: $MINI_LAB_CACHE, or the platform's."""
    import platformdirs

    chosen = os.environ.get("MINI_LAB_CACHE")
    return (
        Path(chosen)
        if chosen
        else platformdirs.user_cache_path("mini-lab", appauthor=False) / "models"
    )


def _make(spec: Spec, worker: Worker, watch: ShowTransfer) -> ModelFile:
    """Write a synthetic model, or the catalog's model in another quantization; the file gets its name at the end."""
    target = _made_path(spec)
    kind = spec.quantization
    assert spec.entry is not None and kind is not None and target is not None
    known = worker.quantizations()
    if kind not in known:
        close = " or ".join(difflib.get_close_matches(kind, known, n=3))
        offer = (
            f"Did you mean {close}?"
            if close
            else "Common ones: Q4_0, Q4_K_M, Q5_K_M, Q6_K, Q8_0, F16."
        )
        raise LabError(f"llama.cpp has no quantization {kind!r}.", offer)
    base = _base(spec)
    part, random = (
        target.with_name(f".{target.stem}.{os.getpid()}.{end}") for end in ("part", "base")
    )
    shape = spec.entry.shape
    direct = kind in synthetic.QUANTIZATIONS
    need = (
        4 * base.path.stat().st_size
        if base
        else synthetic.n_bytes(shape, kind if direct else "Q4_0")
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(target.parent).free) < (
            need := need * (1 if base or direct else 3)
        ):
            what = f"{target.name} needs about {need / 1e9:.1f} GB in {target.parent}; {free / 1e9:.1f} GB are free."
            hint = "Remove models (lab models remove), or set MINI_LAB_CACHE to a folder on another disk."
            raise LabError(what, hint)
        if base is None:
            what = f"writing {spec.entry.name} with random weights"
            written = target if direct else random
            synthetic.write(
                shape,
                kind if direct else "Q4_0",
                written,
                watch=lambda done, all: watch(what, done, all),
            )
        if base or not direct:
            what = f"quantizing to {kind}"
            watch(what, 0, None)
            worker.quantize(
                base.path if base else random, part, kind, lambda done: watch(what, done, None)
            )
            part.replace(target)
    except OSError as problem:
        what = f"The folder for made models, {target.parent}, cannot be used: {problem.strerror or problem}."
        raise LabError(what, "Set MINI_LAB_CACHE to another folder.") from None
    finally:
        for left in (part, random):
            with suppress(OSError):
                left.unlink(missing_ok=True)
    source = REQUANTIZED if base else SYNTHETIC
    return ModelFile(
        spec.entry.name,
        source,
        target,
        base.repo if base else None,
        base.revision if base else None,
    )


def _remote(spec: Spec, files: Callable[[str, str], list[str]]) -> Remote | None:
    """The file on the hub that `spec` names: its own, or the shortest of `files` with the quantization, if any."""
    if spec.repo is None:
        return None
    if spec.file and not spec.is_requantized:
        return Remote(
            spec.repo, spec.file, spec.revision, spec.entry.sha256 if spec.entry else None
        )
    wanted = re.compile(
        rf"(?<![A-Z0-9]){re.escape(spec.quantization or '')}(?![A-Z0-9_])", re.IGNORECASE
    )
    fitting = [name for name in files(spec.repo, spec.revision) if wanted.search(name)]
    return Remote(spec.repo, min(fitting, key=len), spec.revision) if fitting else None


def _base(spec: Spec) -> ModelFile | None:
    """The catalog's own file of a model, from which others are quantized, if it is here."""
    return (
        locate(catalog.parse(spec.entry.name)) if spec.entry and spec.source != SYNTHETIC else None
    )


def _made_path(spec: Spec) -> Path | None:
    """The path of a model that the lab makes: SOURCE--NAME--QUANTIZATION.gguf; None for others."""
    if (
        not spec.entry
        or not spec.quantization
        or not (spec.source == SYNTHETIC or spec.is_requantized)
    ):
        return None
    source = SYNTHETIC if spec.source == SYNTHETIC else REQUANTIZED
    return cache_folder() / f"{source}--{spec.entry.name}--{spec.quantization}.gguf"
