"""An answer while it arrives: its head, and its body in pieces with their stamps, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import h11

from lab.core import request as kinds
from lab.remote.compression import PLAIN, READABLE, decompressor
from lab.remote.formats import (
    OTHER_ERROR,
    Ask,
    JsonReply,
    error_in,
    error_words,
    status_words,
)
from lab.remote.streams import StreamReader

MOST_LINE_BYTES = 1_000_000
MOST_JSON_BYTES = 3_000_000
MOST_ANSWER_BYTES = 64_000_000
"""Maximum bytes of a line of a stream (its JSON takes up to 30 times the memory), of an answer that
is not a stream (60 times), and of all answers in flight."""

LINES_PER_TOKEN = 20
SPARE_LINES = 2_000
"""Maximum ends of lines in a stream for each requested token, and the spare ones: for pings during
a long prefill."""

_DONE = re.compile(rb'(?:^|[\r\n])data: ?"?\[DONE\]"?\s*$')
_TAIL_BYTES = 64
_STREAM_BEGINS = (b"data:", b"event:", b":")


class Failure(Exception):
    """The class of a failure, and a description in the lab's words."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(failure)
        self.failure = failure
        self.error = error


@dataclass
class MemoryInFlight:
    """The memory of all answers in flight."""

    n_bytes: int = 0


@dataclass
class AnswerMemory:
    """The memory of one answer, as a part of that in flight."""

    in_flight: MemoryInFlight
    n_bytes: int = 0

    def add(self, n_bytes: int) -> None:
        """Count bytes that are kept. Raises Failure if all answers together take too many."""
        self.n_bytes += n_bytes
        self.in_flight.n_bytes += n_bytes
        if self.in_flight.n_bytes > MOST_ANSWER_BYTES:
            raise Failure(kinds.TOO_LARGE, f"more than {MOST_ANSWER_BYTES:,} bytes arrived")

    def release(self) -> None:
        """The bytes of this answer are no longer kept."""
        self.in_flight.n_bytes -= self.n_bytes
        self.n_bytes = 0


@dataclass(frozen=True)
class AnswerHead:
    """The status of an answer, and what its headers say."""

    http_status: int | None = None
    content_type: str = ""
    encoding: str = ""  # its compression
    retry_after: str = ""  # seconds
    location: str = ""  # to which it redirects; may contain secrets

    @property
    def has_streaming_type(self) -> bool:
        """Whether its type may be that of a stream: some servers call it text."""
        is_lines = "ndjson" in self.content_type or "jsonl" in self.content_type
        is_document = "json" in self.content_type or "html" in self.content_type
        return is_lines or not is_document


def head_of(response: h11.Response) -> AnswerHead:
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in response.headers
    }
    return AnswerHead(
        http_status=response.status_code,
        content_type=headers.get("content-type", "").lower(),
        encoding=headers.get("content-encoding", "").strip().lower(),
        retry_after=seconds_until(headers.get("retry-after", "")),
        location=headers.get("location", ""),
    )


def seconds_until(retry_after: str) -> str:
    """The seconds of a header Retry-After, which may be a date; "" if it is neither."""
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", retry_after):
        return retry_after
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return ""
    if date.tzinfo is None:
        return ""
    left_s = (date - datetime.now(UTC)).total_seconds()
    return f"{min(max(0.0, left_s), 999_999):.0f}"


@dataclass
class LineCount:
    """The ends of lines in a stream, and the bytes after the last one."""

    n_ends: int = 0
    n_bytes_since_end: int = 0

    def add(self, data: bytes) -> None:
        self.n_ends += data.count(b"\n") + data.count(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if end < 0:
            self.n_bytes_since_end += len(data)
        else:
            self.n_bytes_since_end = len(data) - end - 1


class AnswerBody:
    """The part of a body that was parsed, without its compression: `pieces`, which are bytes that
    arrived together, and when."""

    def __init__(self, head: AnswerHead, ask: Ask, memory: AnswerMemory) -> None:
        is_question = ask.path is not None
        self.pieces: list[tuple[int, bytearray]] = []
        self._may_be_stream = head.http_status == 200 and not is_question  # whatever its type
        self.is_stream = self._may_be_stream and head.has_streaming_type
        self._encoding = head.encoding
        self._decompress: Callable[[bytes], bytes] | None = None
        self._n_gen = ask.asked.n_gen
        self._memory = memory
        self._lines = LineCount()
        self._tail = b""
        self._n_pieces_read = 0  # by has_content
        self._has_content = False

    def add(self, ns: int, data: bytes) -> None:
        """Keep a part of the body. Raises Failure for more than an answer may have."""
        if self._encoding not in PLAIN:
            data = self._decompressed(data)
        if not data:
            return
        if not self.pieces and data.lstrip().startswith(_STREAM_BEGINS):
            self.is_stream = self._may_be_stream
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self.pieces and self.pieces[-1][0] == ns:  # one arrival, in several chunks
            self.pieces[-1][1].extend(data)
        else:
            self.pieces.append((ns, bytearray(data)))
        if self.is_stream:
            self._lines.add(data)
            self._check_lines()
        elif self._memory.n_bytes > MOST_JSON_BYTES:
            raise Failure(kinds.TOO_LARGE, f"more than {MOST_JSON_BYTES:,} bytes arrived")

    def _decompressed(self, data: bytes) -> bytes:
        """What bytes of a compressed body add to it; Failure if they cannot be read. A server may
        compress though nobody asks it to."""
        if self._encoding not in READABLE:
            raise Failure(
                kinds.NO_STREAM, "the answer is compressed in a way nobody asked for"
            )
        if self._decompress is None:
            self._decompress = decompressor(self._encoding, data)
        try:
            plain = self._decompress(data)
        except ValueError:
            what = f"the answer is no valid {self._encoding}, or too large"
            raise Failure(kinds.NO_STREAM, what) from None
        self._memory.add(len(plain))
        return plain

    def _check_lines(self) -> None:
        n_since_end = self._lines.n_bytes_since_end
        most_lines = LINES_PER_TOKEN * self._n_gen + SPARE_LINES
        if n_since_end > MOST_LINE_BYTES:
            raise Failure(kinds.LONG_LINE, f"{n_since_end:,} bytes arrived without a line end")
        if self._lines.n_ends > most_lines:
            raise Failure(
                kinds.TOO_LARGE,
                f"more than {most_lines:,} lines arrived for at most {self._n_gen:,} requested "
                "tokens: the server ignores that limit",
            )

    def has_done(self) -> bool:
        """Whether the last line so far is [DONE]."""
        return self.is_stream and _DONE.search(self._tail) is not None

    def has_content(self) -> bool:
        """Whether the answer has any content: before it the server may read a long prompt."""
        if not self.is_stream:
            return True
        if self._n_pieces_read != len(self.pieces):
            self._n_pieces_read = len(self.pieces)
            reader = StreamReader(self.pieces, sent_ns=0)
            for _ in reader.read():
                pass
            events = reader.answer().events
            self._has_content = not set(kinds.GENERATED).isdisjoint(events.kind)
        return self._has_content

    def whole(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


# An answer that is not a stream


def json_reply(
    head: AnswerHead, body: AnswerBody, has_key: bool, target: str = ""
) -> JsonReply:
    """The JSON object of an answer, or why there is none; `has_key`: the request had one; `target`:
    where it redirects, if that may be shown. An array is the `data` of an object: some servers
    list their models so."""
    status = head.http_status or 0
    try:
        parsed = json.loads(body.whole())
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, list):
        parsed = {"data": parsed}
    if isinstance(parsed, dict):
        error = error_in(parsed)
    else:
        parsed = None
        error = _what_else(head, body)
    if status in (401, 403):
        error = "the server rejects this key" if has_key else "the server requires a key"
    if status != 200:
        what = status_words(status)
        if head.retry_after:
            what = f"{what}, Retry-After: {head.retry_after}"
        if target:
            error = f"to {target}"
        error = ": ".join(filter(None, [what, error]))
    return JsonReply(status, parsed, error)


def _what_else(head: AnswerHead, body: AnswerBody) -> str:
    """What an answer is that is not a JSON object."""
    text = body.whole()[:2000].decode(errors="replace")
    if not text.strip():
        return "the answer is empty"
    if "html" in head.content_type:
        return "the answer is a page (text/html)"
    sentence = error_words(text)
    if sentence == OTHER_ERROR:
        return "the answer is no JSON object"
    return sentence


def refusal(reply: JsonReply) -> Failure:
    """Why the answer to a request for a stream is none."""
    status = reply.status or 0
    if status == 200 and (reply.parsed is None or reply.error is None):
        return Failure(kinds.NO_STREAM, reply.error or "the answer is JSON, not a stream")
    failure = kinds.BAD_REQUEST
    if status == 200:
        failure = kinds.ERROR_INSIDE
    elif status == 429:
        failure = kinds.RATE_LIMITED
    elif status >= 500:
        failure = kinds.SERVER_ERROR
    return Failure(failure, reply.error or status_words(status))
