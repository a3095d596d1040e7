"""Files that somebody names: regular ones alone are read, and no more of them than a limit.

A pipe would wait for its writer, and a device or an endless text fill the memory.
"""

from __future__ import annotations

import errno
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from lab.errors import LabError

STDIN = "-"
MOST_BYTES = 64_000_000
GET_AGAIN = "Get the file again."
"""The hint for a file that is damaged or incomplete."""


def opened(path: Path) -> IO[bytes]:
    """A regular file, open for reading. OSError for any other, without waiting for it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.open("rb")


def is_file(path: Path) -> bool:
    """Whether a path is of a regular file; not for a path that no system can have."""
    try:
        return path.is_file()
    except OSError:  # such as one of 5,000 letters
        return False


def expanded(text: str) -> Path:
    """A path with the user's home in place of ~; unchanged where no home is known."""
    path = Path(text)
    if text.startswith("~"):
        with suppress(RuntimeError):
            return path.expanduser()
    return path


def read(name: str | Path, what: str, hint: str, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file, or of stdin (`-`).

    LabError, with `what` the file is for a sentence such as "The prompt file", if it cannot be
    read, is no regular file, or has more bytes than `most_bytes`.
    """
    shown = f"{what} {name}".strip()
    try:
        if name == STDIN:
            shown = "stdin"
            content = sys.stdin.buffer.read(most_bytes + 1)
        else:
            with opened(Path(name).expanduser()) as file:
                content = file.read(most_bytes + 1)
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise LabError(f"{shown} cannot be read: {reason}.", hint) from None
    if len(content) > most_bytes:
        raise LabError(f"{shown} has over {most_bytes:,} bytes.", "Give a part of it.")
    return content


def read_text(name: str | Path, what: str, hint: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file as UTF-8, with or without a mark. LabError as `read`, and for others."""
    content = read(name, what, hint, most_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise LabError(f"{what} {name} is not UTF-8 text.", hint) from None
