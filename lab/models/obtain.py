"""From a SPEC to a file on this machine: find it, pull it from the hub, or make it.

Models that the lab makes (synthetic or re-quantized) are in its own cache folder; downloads go to the standard hub
cache, which other tools share.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lab.core import shell
from lab.errors import LabError, printable
from lab.models import catalog, hub, synthetic
from lab.models.catalog import EMBEDDED, FILE, HUB, REQUANTIZED, SYNTHETIC, ModelFile, Spec
from lab.models.hub import Remote
from lab.process.worker import Worker

ShowTransfer = Callable[[str, int, int | None], None]
"""Called with a description of the work, the bytes done and the total bytes (None: unknown)."""


def silently(what: str, done: int, total: int | None) -> None:
    """Shows nothing of a transfer."""


@dataclass(frozen=True)
class Listed:
    """A model that can be measured. `n_bytes` is the size of its file or download; None for shapes."""

    spec: str
    quantization: str | None
    n_bytes: int | None
    on_disk: bool
    source: str
    about: str


def locate(spec: Spec) -> ModelFile | None:
    """The file of `spec` if it is on this machine; does not fetch or make it."""
    if spec.path:
        return ModelFile(printable(spec.path.stem), FILE, spec.path)
    if (remote := _cached_remote(spec)) and (pulled := hub.cached(remote)):
        return ModelFile(_name(spec), HUB, pulled.path, spec.repo, pulled.revision, pulled.sha256)
    if (made := _made_path(spec)) and made.exists():
        return ModelFile(_name(spec), SYNTHETIC if spec.source == SYNTHETIC else REQUANTIZED, made)
    if spec.source == EMBEDDED and not _wants_another_quantization(spec):
        return ModelFile(_name(spec), EMBEDDED, catalog.embedded_path())
    return None


def obtain(spec: Spec, worker: Worker, watch: ShowTransfer | None = silently) -> ModelFile:
    """The file of `spec`, pulled or made if necessary. With None for `watch` a missing file is a LabError."""
    if here := locate(spec):
        return here
    if watch is None:
        raise LabError(f"{spec.text} is not on this machine.", f"Get it first: {how_to_get(spec)}")
    if spec.source == SYNTHETIC or (_wants_another_quantization(spec) and base_is_here(spec)):
        return _make(spec, worker, watch)
    remote = _remote(spec) if spec.file and not _wants_another_quantization(spec) else _choose(spec)
    watch(f"downloading {remote.file}", 0, spec.entry.n_bytes if spec.entry else None)
    pulled = hub.pull(remote)
    return ModelFile(_name(spec), HUB, pulled.path, spec.repo, pulled.revision, pulled.sha256)


def how_to_get(spec: Spec) -> str:
    """The command that pulls or makes the model."""
    verb = "make" if spec.source == SYNTHETIC or base_is_here(spec) else "pull"
    return shell.lab("models", verb, spec.text)


def remove(spec: Spec) -> int:
    """Delete the pulled or made file of `spec`. Returns the bytes freed, 0 if there was none."""
    here = locate(spec)
    if here and here.source in (FILE, EMBEDDED):
        raise LabError(f"The lab did not create {spec.text}, so it does not delete it.", "Delete it yourself.")
    if here and here.source != HUB:
        n_bytes = here.path.stat().st_size
        here.path.unlink()
        return n_bytes
    remote = _cached_remote(spec)
    return hub.remove(remote) if remote else 0


def listing() -> list[Listed]:
    """The catalog, and the files in the cache folder of made models."""
    rows = []
    for entry in catalog.entries().values():
        source = EMBEDDED if entry.embedded else HUB if entry.repo else "shape only"
        here = None
        with suppress(LabError):  # the embedded model's package is not installed
            here = locate(catalog.parse(entry.name)) if entry.embedded or entry.repo else None
        n_bytes = here.path.stat().st_size if here else entry.n_bytes
        rows.append(Listed(entry.name, entry.quantization, n_bytes, here is not None, source, entry.about))
    for path in sorted(cache_folder().glob("*.gguf")):
        source, name, quantization = [*path.stem.split("--"), "", ""][:3]
        text = f"synthetic:{name}:{quantization}" if source == SYNTHETIC else f"{name}:{quantization}"
        with suppress(LabError):  # a file that the lab did not make
            if _made_path(catalog.parse(text)) == path:
                about = "random weights" if source == SYNTHETIC else "re-quantised: real speed, but lower quality"
                rows.append(Listed(text, quantization, path.stat().st_size, True, source, about))
    return rows


def cache_folder() -> Path:
    """The folder of made models: $MINI_LAB_CACHE, or the platform's."""
    import platformdirs

    chosen = os.environ.get("MINI_LAB_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("mini-lab", appauthor=False) / "models"


def _make(spec: Spec, worker: Worker, watch: ShowTransfer) -> ModelFile:
    target = _made_path(spec)
    assert spec.quantization is not None and target is not None
    known = worker.quantizations()
    if spec.quantization not in known:
        close = " or ".join(difflib.get_close_matches(spec.quantization, known, n=3))
        offer = f"Did you mean {close}?" if close else "Common ones: Q4_0, Q4_K_M, Q5_K_M, Q6_K, Q8_0, F16."
        raise LabError(f"llama.cpp has no quantization {spec.quantization!r}.", offer)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return (_build if spec.source == SYNTHETIC else _requantize)(spec, target, worker, watch)
    except OSError as problem:
        raise LabError(
            f"The folder for made models, {target.parent}, cannot be used: {problem.strerror or problem}.",
            "Set MINI_LAB_CACHE to another folder.",
        ) from None


def _build(spec: Spec, target: Path, worker: Worker, watch: ShowTransfer) -> ModelFile:
    assert spec.entry is not None and spec.quantization is not None
    shape = spec.entry.shape
    direct = spec.quantization in synthetic.QUANTIZATIONS
    base = target if direct else target.with_name(f".{target.stem}.{os.getpid()}.base")
    written = spec.quantization if direct else "Q4_0"
    _need_room(target, synthetic.n_bytes(shape, written) * (1 if direct else 3))
    try:
        what = f"writing {spec.entry.name} with random weights"
        synthetic.write(shape, written, base, watch=lambda done, total: watch(what, done, total))
        if not direct:
            _quantize(base, target, spec.quantization, worker, watch)
    finally:
        if not direct:
            base.unlink(missing_ok=True)
    return ModelFile(spec.entry.name, SYNTHETIC, target)


def _requantize(spec: Spec, target: Path, worker: Worker, watch: ShowTransfer) -> ModelFile:
    base = locate(_base(spec))
    assert base is not None and spec.quantization is not None
    _need_room(target, 4 * base.path.stat().st_size)
    _quantize(base.path, target, spec.quantization, worker, watch)
    return ModelFile(_name(spec), REQUANTIZED, target, base.repo, base.revision)


def _quantize(base: Path, target: Path, quantization: str, worker: Worker, watch: ShowTransfer) -> None:
    """Run llama.cpp's quantizer; the file gets its name when it is complete."""
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        watch(f"quantizing to {quantization}", 0, None)
        worker.quantize(base, part, quantization, lambda done: watch(f"quantizing to {quantization}", done, None))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _choose(spec: Spec) -> Remote:
    """The file with the requested quantization in the SPEC's repo."""
    assert spec.repo is not None and spec.quantization is not None
    names = hub.files(spec.repo, spec.revision)
    fitting = _fitting(names, spec.quantization)
    if not fitting:
        raise LabError(
            f"{spec.repo} has no file with quantization {spec.quantization}.",
            f"It has: {', '.join(names[:12]) or 'no .gguf file'}.",
        )
    return Remote(spec.repo, fitting[0], spec.revision)


def _fitting(names: list[str], quantization: str) -> list[str]:
    """The names that contain this quantization, the shortest first."""
    wanted = re.compile(rf"(?<![A-Z0-9]){re.escape(quantization)}(?![A-Z0-9_])", re.IGNORECASE)
    return sorted((name for name in names if wanted.search(name)), key=len)


def _cached_remote(spec: Spec) -> Remote | None:
    """The file on the hub that `spec` names; None if that requires asking the hub."""
    if spec.repo is None:
        return None
    if spec.file and not _wants_another_quantization(spec):
        return _remote(spec)
    fitting = _fitting(hub.cached_names(spec.repo), spec.quantization or "")
    return Remote(spec.repo, fitting[0], spec.revision) if fitting else None


def _wants_another_quantization(spec: Spec) -> bool:
    own = spec.entry.quantization if spec.entry else None
    return spec.source != SYNTHETIC and spec.quantization not in (None, own)


def _base(spec: Spec) -> Spec:
    """The same model in the quantization that its file has."""
    return catalog.parse(spec.entry.name) if spec.entry else spec


def base_is_here(spec: Spec) -> bool:
    return spec.entry is not None and spec.source != SYNTHETIC and locate(_base(spec)) is not None


def _remote(spec: Spec) -> Remote:
    assert spec.repo is not None and spec.file is not None
    return Remote(spec.repo, spec.file, spec.revision, spec.entry.sha256 if spec.entry else None)


def _name(spec: Spec) -> str:
    return spec.entry.name if spec.entry else printable(Path(spec.file or spec.repo or spec.text).stem)


def _made_path(spec: Spec) -> Path | None:
    """The path of a model that the lab makes: SOURCE--NAME--QUANTIZATION.gguf; None for others."""
    is_made = spec.source == SYNTHETIC or _wants_another_quantization(spec)
    if spec.entry is None or spec.quantization is None or not is_made:
        return None
    source = SYNTHETIC if spec.source == SYNTHETIC else REQUANTIZED
    return cache_folder() / f"{source}--{spec.entry.name}--{spec.quantization}.gguf"


def _need_room(target: Path, n_bytes: int) -> None:
    """LabError if the cache folder's disk has less than n_bytes free. Raises OSError."""
    free = shutil.disk_usage(target.parent).free
    if free < n_bytes:
        raise LabError(
            f"{target.name} needs about {n_bytes / 1e9:.1f} GB in {target.parent}; {free / 1e9:.1f} GB are free.",
            "Remove models (lab models remove), or set MINI_LAB_CACHE to a folder on another disk.",
        )
