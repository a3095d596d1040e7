"""The files of a model that was split into parts: NAME-00001-of-00003.gguf and so on.

llama.cpp loads such a model from its first part, and finds the others beside it by their names.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from lab.core import files
from lab.errors import LabError

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
MOST_NAMED = 4  # missing parts that a message names


def names_of(name: str) -> tuple[str, ...]:
    """The names of all parts, in their order, of a model with this part; else the name alone.

    A name may have folders, with slashes.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return (name,)
    stem, number, count, suffix = match.groups()
    if not 1 <= int(number) <= int(count):
        return (name,)
    return tuple(f"{stem}-{i:05}-of-{count}{suffix}" for i in range(1, int(count) + 1))


def is_later(name: str) -> bool:
    """Whether a file is a part after the first."""
    return names_of(name)[0] != name


def stem(name: str) -> str:
    """A file's name without its folder and its suffix, and without the number of its part."""
    match = _NAME.fullmatch(name)
    whole = PurePosixPath(match[1] if match else name).name
    return whole[:-5] if whole.lower().endswith(".gguf") else whole


def paths_of(path: Path) -> tuple[Path, ...]:
    """The files of the model with this file, in their order. LabError if parts are missing."""
    paths = tuple(path.with_name(name) for name in names_of(path.name))
    missing = [part.name for part in paths if not files.is_file(part)]
    if not missing or len(paths) == 1:
        return paths
    named = ", ".join(missing[:MOST_NAMED])
    if len(missing) > MOST_NAMED:
        named += f" and {len(missing) - MOST_NAMED} more"
    what = f"{path.name} is one of {len(paths)} parts of a model. Missing: {named}."
    hint = (
        f"Put all parts into {path.parent}. "
        "For a model on the hub, lab models pull gets them all."
    )
    raise LabError(what, hint)


def check_beside(path: Path) -> None:
    """LabError for a missing part whose other parts are there."""
    names = names_of(path.name)
    if any(files.is_file(path.with_name(name)) for name in names if len(names) > 1):
        paths_of(path)


def first_of(path: Path) -> Path:
    """The file from which llama.cpp loads the model with this file."""
    return path.with_name(names_of(path.name)[0])


def models_in(folder: Path) -> list[Path]:
    """The .gguf files in a folder, in the order of their names; of a split model its first part.

    The first part that is there, if it has none; none of a folder that cannot be read.
    """
    models: dict[str, Path] = {}
    for path in files.listed(folder):
        if path.name.lower().endswith(".gguf"):
            models.setdefault(names_of(path.name)[0], path)
    return list(models.values())
