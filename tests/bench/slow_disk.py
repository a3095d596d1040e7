"""A disk of a planted speed: a file system in user space (FUSE, root only) with one file, which
hands out so many bytes per second and no more.

python3 -m tests.bench.slow_disk FILE FOLDER BYTES_PER_SECOND

Ends when its folder is unmounted. The page cache lies above it, as above every disk.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOKUP = 1
FORGET = 2
GETATTR = 3
OPEN = 14
READ = 15
RELEASE = 18
FLUSH = 25
INIT = 26
INTERRUPT = 36
BATCH_FORGET = 42
UNANSWERED = (FORGET, BATCH_FORGET, INTERRUPT)
"""Requests of the kernel, by their numbers in linux/fuse.h."""

ROOT_NODE = 1
FILE_NODE = 2
FILE_NAME = "model.gguf"
REQUEST_BYTES = 1 << 20
KEEP_CACHE = 2  # of an opened file: pages stay in the cache when it is opened again
VALID_S = 3600
ASYNC_READ = 1
READ_AHEAD_BYTES = 128 * 1024
LEAD_S = 0.05  # that the disk may have read ahead: what a late wake-up costs is made up for
NO_SUCH_FILE = 2
NOT_THERE = 38  # ENOSYS
READ_ONLY = 1
NO_SUID = 2
NO_DEVICES = 4
DETACH = 2


class SlowDisk:
    """Answers the kernel's requests, one after another."""

    def __init__(self, source: Path, bytes_per_second: float) -> None:
        self.content = source.read_bytes()
        self.bytes_per_second = bytes_per_second
        self.is_busy_until = 0.0
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            INIT: self.start,
            LOOKUP: self.look_up,
            GETATTR: self.attributes,
            OPEN: self.open,
            READ: self.read,
            RELEASE: self.nothing,
            FLUSH: self.nothing,
        }

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, REQUEST_BYTES)
            except OSError:  # unmounted
                return
            opcode, unique, node = struct.unpack_from("<IQQ", request, 4)
            if opcode in UNANSWERED:
                continue
            error = 0
            answer = b""
            try:
                answer = self.answers[opcode](node, request[40:])
            except KeyError:
                error = -NOT_THERE
            except FileNotFoundError:
                error = -NO_SUCH_FILE
            head = struct.pack("<IiQ", 16 + len(answer), error, unique)
            os.write(device, head + answer)

    def start(self, _: int, body: bytes) -> bytes:
        major = struct.unpack_from("<I", body)[0]
        flags = ASYNC_READ
        sizes = (READ_AHEAD_BYTES, flags, 16, 12, READ_AHEAD_BYTES, 1, 32, 0, 0, 0)
        return struct.pack("<IIIIHHIIHHII", major, 31, *sizes) + bytes(24)

    def look_up(self, _: int, body: bytes) -> bytes:
        if body.rstrip(b"\0") != FILE_NAME.encode():
            raise FileNotFoundError
        head = struct.pack("<QQQQII", FILE_NODE, 0, VALID_S, VALID_S, 0, 0)
        return head + self.description(FILE_NODE)

    def attributes(self, node: int, _: bytes) -> bytes:
        return struct.pack("<QII", VALID_S, 0, 0) + self.description(node)

    def description(self, node: int) -> bytes:
        mode = stat.S_IFREG | 0o644
        size = len(self.content)
        if node == ROOT_NODE:
            mode = stat.S_IFDIR | 0o755
            size = 0
        blocks = (size + 511) // 512
        times = (0, 0, 0, 0, 0, 0)
        return struct.pack(
            "<QQQQQQIIIIIIIIII", node, size, blocks, *times, mode, 1, 0, 0, 0, 4096, 0
        )

    def open(self, _: int, __: bytes) -> bytes:
        return struct.pack("<QII", 1, KEEP_CACHE, 0)

    def read(self, _: int, body: bytes) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        block = self.content[offset : offset + size]
        begin = max(time.perf_counter() - LEAD_S, self.is_busy_until)
        self.is_busy_until = begin + len(block) / self.bytes_per_second
        time.sleep(max(0.0, self.is_busy_until - time.perf_counter()))
        return block

    def nothing(self, _: int, __: bytes) -> bytes:
        return b""


@contextmanager
def slow_disk(source: Path, folder: Path, bytes_per_second: float) -> Iterator[Path]:
    """The path of a copy of `source` on a disk of a planted speed."""
    words = (str(source), str(folder), str(bytes_per_second))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.slow_disk", *words], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"mounted\n":
            raise OSError("a file system in user space cannot be mounted here (it needs root)")
        yield folder / FILE_NAME
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(folder), DETACH)
        process.kill()
        process.wait()


def main() -> None:
    source, folder, bytes_per_second = sys.argv[1:]
    disk = SlowDisk(Path(source), float(bytes_per_second))
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    flags = READ_ONLY | NO_SUID | NO_DEVICES
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slow", os.fsencode(folder), b"fuse", ctypes.c_ulong(flags), options):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    disk.serve(device)


if __name__ == "__main__":
    main()
