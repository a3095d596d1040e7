"""The checksum of a model's file, computed anew where the file has changed since."""

from __future__ import annotations

from pathlib import Path

from lab.errors import LabError
from lab.models import catalog

_Stamp = tuple[int, int, int]  # size, time of the last change, number of the file
_computed: dict[tuple[Path, ...], tuple[list[_Stamp], str]] = {}


def checked(paths: tuple[Path, ...], expected: str | None) -> str:
    """The sha256 of a file, or of the parts of a model as one file.

    `expected`: what the hub announced, or what the records so far have; None: unknown. LabError
    if the file has another one by now.
    """
    stamps = _stamps(paths)
    before, checksum = _computed.get(paths, (stamps, expected))
    if checksum is None or before != stamps:
        checksum = catalog.sha256(*paths)
    _computed[paths] = (stamps, checksum)
    if expected is not None and checksum != expected:
        what = (
            f"{paths[0].name} was replaced during the measurement: its sha256 began with "
            f"{expected[:8]}, and now with {checksum[:8]}."
        )
        raise LabError(
            what, "The runs so far are saved. Measure the new file in a session of its own."
        )
    return checksum


def _stamps(paths: tuple[Path, ...]) -> list[_Stamp]:
    """What changes with a file; nothing for one that cannot be looked at."""
    try:
        looks = [path.stat() for path in paths]
    except OSError:
        return []
    return [(look.st_size, look.st_mtime_ns, look.st_ino) for look in looks]
