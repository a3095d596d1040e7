"""A file's pages in the system's page cache: drop them, read them, and look how many are there.

`posix_fadvise(DONTNEED)` is only a request: pages that a process has mapped, and those not yet
written to the disk, stay. So nothing is called cold before `mincore` has said how many are left.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

BLOCK_BYTES = 1 << 20  # of a read in order


def drop(*paths: Path) -> None:
    """Ask the system to forget the pages of files. Does nothing where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(*paths: Path) -> float:
    """Read whole files in order, in blocks of BLOCK_BYTES. Returns the seconds that took."""
    block = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - began


def resident_share(*paths: Path) -> float | None:
    """The share of the files' pages that are in the page cache; None where that is not known.

    Linux says that all pages are there if the file is somebody else's and cannot be written.
    """
    n_pages = 0
    n_resident = 0
    for path in paths:
        flags = _resident(path)
        if flags is None:
            return None
        n_pages += len(flags)
        n_resident += sum(flag & 1 for flag in flags)
    return n_resident / n_pages


def _resident(path: Path) -> bytes | None:
    """A flag for each page of a file: whether it is in the page cache. None: not known."""
    n_bytes = path.stat().st_size
    if os.name == "nt" or n_bytes == 0:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    n_pages = -(n_bytes // -mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * n_pages)()
    with path.open("rb") as file, _mapped(file.fileno()) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        size = ctypes.c_size_t(n_bytes)
        status = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), size, flags)
        del start  # otherwise the mapping cannot be closed
    return None if status else bytes(flags)


def _mapped(number: int) -> mmap.mmap:
    """A private mapping of a file; nothing is read until somebody looks at it."""
    return mmap.mmap(number, 0, access=mmap.ACCESS_COPY)
