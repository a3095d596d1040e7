"""Results files as they are written: room for all before the first run, and nothing lost when the disk fills up."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from lab.core import results
from lab.core.lines import Line
from lab.errors import LabError

_BLOCK = 1 << 20


def new_file(folder: Path, name: str, n_bytes: int) -> Path:
    """Create `<UTC time>-<name>.jsonl` in `folder`, and find out now whether so many bytes will have room in it."""
    stem = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{name}"
    path = folder / f"{stem}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = results.free_path(folder, stem)  # two sessions can begin in one second
        with path.open("xb") as file:
            for first in range(0, n_bytes, _BLOCK):
                file.write(bytes(min(_BLOCK, n_bytes - first)))
            file.flush()
            os.fsync(file.fileno())
            file.truncate(0)
    except OSError as problem:
        if not isinstance(problem, FileExistsError):
            with contextlib.suppress(OSError):
                path.unlink()
        raise LabError(
            f"Results cannot be written to {folder}: {problem.strerror} (about {n_bytes:,} bytes are needed).",
            "Choose another folder: --out FOLDER",
        ) from None
    return path


@contextlib.contextmanager
def unless_empty(path: Path) -> Iterator[None]:
    """Removes the file in the end where nothing was written into it."""
    try:
        yield
    finally:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()


def save(path: Path, *lines: Line) -> None:
    """Append, and where the disk has filled up meanwhile, save the run elsewhere before giving up."""
    try:
        results.append(path, *lines)
    except OSError as problem:
        rescue = Path(tempfile.gettempdir()) / path.name
        what = f"The results file {path} cannot be written any more: {problem.strerror or problem}."
        try:
            results.append(rescue, *lines)
        except OSError:
            raise LabError(
                what, f"The runs before this one are in it. This one could not be saved in {rescue} either."
            ) from None
        raise LabError(what, f"The runs before this one are in it; this one is saved in {rescue}.") from None
