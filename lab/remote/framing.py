"""The events of a stream, as they were sent: lines, and what a blank one ends.

A stream follows WHATWG HTML, 9.2 Server-sent events: a byte order mark at its beginning, lines that
end with LF, CR LF or CR, comments, data of several lines. What servers do besides is read too: a
field `error`, JSON without a field, an event on each line without blank ones, a last line without
its end. An event's time is that of its last byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Pieces = Sequence[tuple[int, bytes | bytearray]]  # bytes that arrived together, and when

ERROR_EVENT = "error"
DONE_DATA = "[DONE]"
MOST_DOCUMENT_BYTES = 3_000_000
"""Larger streams are not read as a single JSON object."""


class StreamLine(NamedTuple):
    """A line of a stream with its end, and when it was complete."""

    ns: int
    text: bytes


class SentEvent(NamedTuple):
    """An event as it was sent."""

    ns: int
    n_bytes: int
    name: str
    data: str
    is_whole: bool = True


def sent_events(pieces: Pieces) -> Iterator[SentEvent]:
    """The events of a stream; the last one is not whole if the stream ends within a line of it."""
    document = _document(pieces)
    if document is not None:
        yield document
        return
    name = ""
    data: list[SentEvent] = []  # the lines of the event's data
    n_bytes = 0  # since the last line of data
    is_begun = False
    for number, line in enumerate(_lines(pieces)):
        n_bytes += len(line.text)
        text = line.text.decode(errors="replace").rstrip("\r\n")
        text = text if number else text.removeprefix("\ufeff")
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if _is_half(line.text, text if text.startswith("{") else value):
            yield SentEvent(line.ns, len(line.text), name, "", is_whole=False)
            return
        if text.startswith(":"):
            yield SentEvent(line.ns, n_bytes, "", "")
        elif text.startswith("{"):
            yield SentEvent(line.ns, n_bytes, name, text)
        elif field == ERROR_EVENT and value:
            yield SentEvent(line.ns, n_bytes, ERROR_EVENT, value)
        elif field == "data":
            data.append(SentEvent(line.ns, n_bytes, name, value))
            is_begun = True
        elif text:
            name = value if field == "event" else name
            is_begun = True
            continue
        elif is_begun:
            yield from _joined(line.ns, name, data, n_bytes)
            name = ""
            data = []
            is_begun = False
        else:
            continue
        n_bytes = 0


def _document(pieces: Pieces) -> SentEvent | None:
    """The event of a stream that is nothing but a JSON object, such as an error."""
    n_bytes = sum(len(data) for _, data in pieces)
    begin = b"".join(bytes(data[:10]) for _, data in pieces[:4]).removeprefix(b"\xef\xbb\xbf")
    if not begin.lstrip().startswith(b"{") or n_bytes > MOST_DOCUMENT_BYTES:
        return None
    text = b"".join(data for _, data in pieces).decode("utf-8-sig", errors="replace")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return SentEvent(pieces[-1][0], n_bytes, "", text)


def _joined(
    ns: int, name: str, lines: Sequence[SentEvent], n_bytes: int
) -> Iterator[SentEvent]:
    """The event with these lines of data, which a blank line ended; an event for each line if each
    begins an object, because the server leaves the blank lines out."""
    if len(lines) > 1 and all(line.data.startswith(("{", DONE_DATA)) for line in lines):
        yield from lines[:-1]
        yield lines[-1]._replace(n_bytes=lines[-1].n_bytes + n_bytes)
        return
    n_all = n_bytes + sum(line.n_bytes for line in lines)
    yield SentEvent(ns, n_all, name, "\n".join(line.data for line in lines))


def _is_half(line: bytes, value: str) -> bool:
    """Whether a stream ended within this line. A whole object, or [DONE], only lacks its end."""
    if not line or line.endswith((b"\n", b"\r")) or value == DONE_DATA:
        return False
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return bool(line.strip())
    return False


def _lines(pieces: Pieces) -> Iterator[StreamLine]:
    """The lines of a stream; last an empty one, which some servers omit. A CR may be half of a
    line end: the next byte tells."""
    begun = bytearray()
    ns = 0
    cr_ns: int | None = None  # when a CR arrived with which `begun` ends
    for ns, data in pieces:
        for part in bytes(data).splitlines(keepends=True):
            if cr_ns is not None and part != b"\n":
                yield StreamLine(cr_ns, bytes(begun))
                begun.clear()
            cr_ns = None
            begun += part
            if part.endswith(b"\n"):
                yield StreamLine(ns, bytes(begun))
                begun.clear()
            elif part.endswith(b"\r"):
                cr_ns = ns
    if begun:
        yield StreamLine(ns if cr_ns is None else cr_ns, bytes(begun))
    yield StreamLine(ns, b"")
