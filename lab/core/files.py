"""Files and folders that somebody names, or that may lie where the user may not look.

Regular files alone are read, and no more of them than a limit: a pipe would wait for its writer,
and a device or an endless text fill the memory. Whether a path is there is asked here, and nowhere
else: `Path.exists` fails in a folder that may not be entered, such as root's home.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from lab.errors import LabError

STDIN = "-"
MOST_BYTES = 64_000_000
GZIP = b"\x1f\x8b"
FOREIGN = {
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\xfd7zXZ\0": "packed with xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "packed with zstd: unpack it first",
    b"BZh": "packed with bzip2: unpack it first",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
    b"GGUF": "a model, not a text: lab models info PATH",
    b"SQLite f": "an SQLite database: export a text of it first",
    b"\x89PNG": "a picture, not a text",
    b"\xff\xd8\xff": "a picture, not a text",
    b"%PDF": "a PDF, not a text",
}
"""How files begin that people give by mistake, and what they are."""

GET_AGAIN = "Get the file again."
"""The hint for a file that is damaged or incomplete."""


def opened(path: Path) -> IO[bytes]:
    """A regular file, open for reading. OSError for any other, without waiting for it."""
    path = expanded(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    file = path.open("rb")
    begin = file.read(8)
    file.seek(0)
    try:
        for magic, kind in FOREIGN.items():
            if begin.startswith(magic):
                raise OSError(errno.EINVAL, f"it is {kind}")
        if not begin.startswith(GZIP):
            return file
        content = unpacked(file.read(MOST_BYTES))
    except OSError:
        file.close()
        raise
    file.close()
    return io.BytesIO(content)


def unpacked(data: bytes, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of gzipped data, of all its members. OSError if it is damaged or too long."""
    content = b""
    while data:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            content += unpacker.decompress(data, most_bytes + 1 - len(content))
        except zlib.error:
            raise OSError(errno.EINVAL, "its gzip data is damaged") from None
        if len(content) > most_bytes:
            raise OSError(errno.EFBIG, f"it has over {most_bytes:,} bytes when unpacked")
        if not unpacker.eof:
            raise OSError(errno.EINVAL, "its gzip data is truncated")
        data = unpacker.unused_data.lstrip(b"\0")
    return content


def exists(path: str | Path) -> bool:
    """Whether something is seen at a path."""
    return _mode(path) != 0


def is_file(path: str | Path) -> bool:
    """Whether a regular file is seen at a path."""
    return stat.S_ISREG(_mode(path))


def is_dir(path: str | Path) -> bool:
    """Whether a folder is seen at a path."""
    return stat.S_ISDIR(_mode(path))


def data_file(name: str, folder: str = "models") -> Path:
    """A file of `models/` or `prompts/`, in the checkout or in an installed wheel."""
    package = Path(__file__).parents[1]
    in_wheel = package / "data"
    root = in_wheel if is_dir(in_wheel) else package.parent
    return root / folder / name


def _mode(path: str | Path) -> int:
    """What kind of thing is seen at a path, as `stat` says it; 0 if none is."""
    try:
        return expanded(path).stat().st_mode
    except (OSError, ValueError):  # such as a path of 5,000 letters, or with a null character
        return 0


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """The sorted paths in a folder that match a pattern; none of a folder that is not seen."""
    try:
        folder = expanded(folder)
        return sorted(folder.iterdir() if pattern == "*" else folder.glob(pattern))
    except OSError:
        return []


def obstacle(path: str | Path) -> str | None:
    """Why it cannot be said whether something is at a path, such as "Permission denied"."""
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            next(Path(path).iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        return problem.strerror
    except ValueError as problem:  # a null character
        return str(problem)
    return None


def user_folder(find: Callable[[], Path], variable: str) -> Path:
    """What `find` says is the user's folder. LabError for a user without a home folder."""
    try:
        folder = find()
        if folder.parts[:1] != ("~",):
            return folder
    except RuntimeError:  # of platformdirs
        pass
    raise LabError(
        "This user has no home folder: HOME is not set, and the system's list has no entry.",
        f"Set {variable} to a folder, or HOME.",
    )


def expanded(text: str | os.PathLike[str]) -> Path:
    """A path with the user's home in place of ~; unchanged where no home is known."""
    path = Path(text)
    if str(text).startswith("~"):
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
            if content.startswith(GZIP):
                content = unpacked(content, most_bytes)
        else:
            with opened(expanded(name)) as file:
                content = file.read(most_bytes + 1)
    except (OSError, ValueError) as problem:
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
