"""The models among the files of a repo, and which of them a tag names.

A listing of a repo has more than its models: a projector for pictures, a drafter, the importance
matrix that the quantizer used, an adapter, and the later parts of a split model. A tag such as
Q4_K_M names a model by the quantization in its file's name, or else in its folder's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from lab.core import split_files

DEFAULT_TAGS = ("Q4_K_M", "UD-Q4_K_M", "Q8_0")
"""What a repo without a tag means to llama.cpp, the first that it has; else its first model."""

SAME_TAGS = {
    "FP16": "F16",
    "FP32": "F32",
    "MXFP4": "MXFP4_MOE",
    "Q3_K": "Q3_K_M",
    "Q4_K": "Q4_K_M",
    "Q5_K": "Q5_K_M",
}
"""Other spellings of llama.cpp's quantizations."""

_TAG = re.compile(
    r"(?<![A-Z0-9])"
    r"((?:UD[-_])?"
    r"(?:I?Q\d+|TQ\d|TL\d|I2|BF16|FP?(?:16|32)|(?:MX|NV)FP\d+)"
    r"(?:_[A-Z0-9]+)*)"
    r"(?![A-Z0-9_])",
    re.IGNORECASE,
)
"""A quantization, also one that llama.cpp's quantizer does not make, such as UD-Q4_K_XL."""

_PROJECTOR = re.compile(r"mmproj|(^|[-_.])clip-vit|(vision|image|audio)[-_]?projector")
_MATRIX = re.compile(r"imatrix")
_ADAPTER = re.compile(r"(^|[-_.])(adapter|lora|control[-_]?vector)([-_.]|$)")
_DRAFTER = re.compile(r"^(mtp|eagle\d?|dflash|dspark)[-_.]|(^|[-_.])(draft|drafter)([-_.]|$)")
_HELPERS = {
    "projector": _PROJECTOR,
    "adapter": _ADAPTER,
    "drafter": _DRAFTER,
}
NO_MODELS = ("projector", "importance matrix")
_MAY_BE_MODELS = ("adapter", "drafter")
"""A merged adapter and a small drafter are models; a repo with nothing else has them as such."""


@dataclass(frozen=True)
class ListedFile:
    """A file of a repo; `n_bytes` is None where the listing does not tell."""

    name: str  # with folders
    n_bytes: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A model of a repo: a file, or all listed parts of a split one, in their order."""

    files: tuple[ListedFile, ...]

    @property
    def name(self) -> str:
        """The name of the file from which llama.cpp loads the model."""
        return split_files.names_of(self.files[0].name)[0]

    @property
    def n_parts(self) -> int:
        return len(split_files.names_of(self.name))

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of parts that the listing does not have."""
        listed = {file.name for file in self.files}
        return tuple(name for name in split_files.names_of(self.name) if name not in listed)

    @property
    def n_bytes(self) -> int | None:
        """The bytes of all parts; None if one is unknown or missing."""
        sizes = [file.n_bytes for file in self.files]
        if self.missing:
            return None
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @cached_property
    def tag(self) -> str | None:
        """The quantization in the file's name, or in its folder's, in capitals."""
        return tag_in(self.name)


def tag_in(name: str) -> str | None:
    """The last quantization in a file's name, or in its folder's; None without one."""
    path = PurePosixPath(name)
    for text in (split_files.stem(name), *reversed(path.parts[:-1])):
        tags = _TAG.findall(text)
        if tags:
            return str(tags[-1]).upper().replace("UD_", "UD-")
    return None


def is_tag(text: str) -> bool:
    """Whether a text is nothing but a quantization."""
    return _TAG.fullmatch(text) is not None


def quantization_of(tag: str) -> str:
    """A tag as llama.cpp's quantizer writes it, if it is one of its quantizations."""
    return SAME_TAGS.get(tag.upper(), tag.upper())


def without_tag(text: str) -> tuple[str, str | None]:
    """A name without the quantization at its end, and this: llama3.2-3b, Q4_K_M."""
    for match in _TAG.finditer(text):
        if match.end() == len(text) and match.start() > 0:
            return text[: match.start()].rstrip("-_.:@ "), match[1]
    return text, None


def helper_kind(name: str) -> str | None:
    """What a file is if it is no model of its own, such as a projector; None for a model."""
    stem = split_files.stem(name).lower()
    folder = PurePosixPath(name.lower()).parent.name
    if _MATRIX.search(stem):
        return "importance matrix"
    if "merged" in stem:
        return None
    for kind, pattern in _HELPERS.items():
        if pattern.search(stem) or pattern.search(f"{folder}-"):
            return kind
    return None


def candidates(listing: Iterable[ListedFile]) -> list[Candidate]:
    """The models in a listing, by name. A split model is one, with its parts in their order."""
    models: dict[str, list[ListedFile]] = {}
    perhaps: dict[str, list[ListedFile]] = {}
    for file in sorted(listing, key=lambda file: file.name):
        if not file.name.lower().endswith(".gguf"):
            continue
        kind = helper_kind(file.name)
        group = models if kind is None else perhaps
        if kind is None or kind in _MAY_BE_MODELS:
            group.setdefault(split_files.names_of(file.name)[0], []).append(file)
    return [Candidate(tuple(files)) for files in (models or perhaps).values()]


def tagged(models: Sequence[Candidate], tag: str) -> list[Candidate]:
    """The models that a tag names. It is compared as a whole, in any case.

    The tag as it is written goes before another spelling of it.
    A tag that is not a quantization, such as 4k-instruct, names the files with these words.
    """
    wanted = tag.upper()
    fitting = [model for model in models if model.tag == wanted]
    if not fitting:
        same = quantization_of(tag)
        fitting = [model for model in models if quantization_of(model.tag or "") == same]
    if not fitting and not is_tag(tag):
        words = re.compile(rf"(?<![A-Z0-9_]){re.escape(wanted)}(?![A-Z0-9_])", re.IGNORECASE)
        fitting = [model for model in models if words.search(model.name)]
    return fitting


def usual(models: Sequence[Candidate]) -> list[Candidate]:
    """The models that a repo without a tag means: those of the first of DEFAULT_TAGS that it has.

    The first model by name if it has neither.
    """
    for tag in DEFAULT_TAGS:
        fitting = tagged(models, tag)
        if fitting:
            return fitting
    return list(models[:1])
