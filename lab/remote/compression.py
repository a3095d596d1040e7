"""Answers without their compression, piece by piece: what arrived together stays together, so that
each event has the time of its own bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

Piece = tuple[int, bytes]  # when bytes arrived, and the bytes
Pieces = Sequence[Piece]

MOST_AT_ONCE = 16_000_000  # bytes that an arrival may become
ANY_WITH_HEADER = zlib.MAX_WBITS | 32
WITHOUT_HEADER = -zlib.MAX_WBITS
PLAIN = ("", "identity")
READABLE = (*PLAIN, "gzip", "x-gzip", "deflate", "br")


def decompressed(pieces: Pieces, encoding: str) -> Iterator[Piece]:
    """The pieces without their compression, as far as it is whole; none of an unknown one."""
    if encoding in PLAIN:
        yield from pieces
        return
    if encoding not in READABLE:
        return
    decompress = decompressor(encoding, next((data for _, data in pieces if data), b""))
    for ns, data in pieces:
        try:
            yield ns, decompress(data)
        except ValueError:  # damaged, or not compressed as announced
            return


def decompressor(encoding: str, begin: bytes) -> Callable[[bytes], bytes]:
    """What decompresses the next bytes of a body that starts with `begin`."""
    if encoding == "br":
        return brotli_decompressor()
    has_header = (
        len(begin) > 1 and begin[0] & 0x0F == 8 and int.from_bytes(begin[:2]) % 31 == 0
    )
    is_raw = encoding == "deflate" and not has_header
    return inflating(WITHOUT_HEADER if is_raw else ANY_WITH_HEADER)


def inflating(bits: int) -> Callable[[bytes], bytes]:
    """What decompresses deflated bytes, also of several streams one after the other. ValueError for
    damaged ones, and for more than MOST_AT_ONCE."""
    stream = zlib.decompressobj(bits)

    def decompress(data: bytes) -> bytes:
        nonlocal stream
        plain = bytearray()
        try:
            while data:
                plain += stream.decompress(data, MOST_AT_ONCE)
                if stream.unconsumed_tail or len(plain) > MOST_AT_ONCE:
                    raise ValueError("too large")
                data = stream.unused_data
                if data:
                    stream = zlib.decompressobj(bits)
        except zlib.error as problem:
            raise ValueError(str(problem)) from None
        return bytes(plain)

    return decompress


def brotli_decompressor() -> Callable[[bytes], bytes]:
    import brotli

    stream = brotli.Decompressor()

    def decompress(data: bytes) -> bytes:
        try:
            return bytes(stream.process(data))
        except brotli.error as problem:
            raise ValueError(str(problem)) from None

    return decompress
