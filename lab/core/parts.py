"""The files of a model that was split into parts: NAME-00001-of-00003.gguf and so on.

llama.cpp loads such a model from its first part, and finds the others beside it by their names.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


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


def stem(name: str) -> str:
    """A file's name without its folder and its suffix, and without the number of its part."""
    match = _NAME.fullmatch(name)
    return PurePosixPath(match[1] if match else name).name.removesuffix(".gguf")
