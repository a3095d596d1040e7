"""A call that passed through the proxy, and what its request and its answer say."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from lab.core.request import ERROR_INSIDE
from lab.errors import printable
from lab.features.recording.answers import Answer, read_answer
from lab.features.recording.prompts import Blocks, blocks_of
from lab.features.recording.proxy import ProxiedCall
from lab.remote.formats import as_dict

MOST_DEPTH = 200  # of a body; what reads results files ends at some hundreds of levels
MOST_SHOWN = 80  # characters of a stranger's text


@dataclass(frozen=True)
class ParsedCall:
    """A call, its request as JSON and as the blocks of a prompt, and what its answer says."""

    proxied: ProxiedCall
    body: dict[str, object]
    blocks: Blocks
    answer: Answer

    @property
    def was_read(self) -> bool:
        """Whether the server has read the prompt, as far as its answer shows."""
        has_begun = self.answer.first_ns is not None or self.answer.n_prompt is not None
        return self.proxied.is_accepted and (self.answer.error is None or has_begun)

    @property
    def failure(self) -> str | None:
        error = self.answer.error
        if self.proxied.failure is not None:
            return self.proxied.failure
        if self.proxied.status == HTTPStatus.NOT_FOUND:
            path = printable(self.proxied.path.partition("?")[0])[:MOST_SHOWN]
            return f"HTTP 404: the server has no {path}"
        if not self.proxied.is_accepted:
            reason = f": {error}" if error else ""
            return f"HTTP {self.proxied.status}{reason}"
        if error is not None:
            return f"{ERROR_INSIDE}: {error}"
        return None

    @property
    def ttft_ns(self) -> int | None:
        """When the first generated content came; None for an answer that was not streamed."""
        if self.answer.first_ns is None:
            return None
        return self.answer.first_ns - self.proxied.received_ns


def parsed(call: ProxiedCall) -> ParsedCall | None:
    """What a call says; None without a prompt. ValueError for a body of too many levels."""
    body = body_of(call)
    if depth(body) > MOST_DEPTH:
        raise ValueError(f"its body has more than {MOST_DEPTH} levels")
    blocks = blocks_of(body)
    if not blocks:
        return None
    answer = read_answer(call.pieces(), call.encoding, call.content_type)
    return ParsedCall(call, body, blocks, answer)


def body_of(call: ProxiedCall) -> dict[str, object]:
    """The JSON object of a request; empty for anything else."""
    data = bytes(call.request)
    with suppress(OSError, EOFError, zlib.error, ValueError, RecursionError):
        if call.request_encoding == "gzip":
            data = gzip.decompress(data)
        return as_dict(
            json.loads(data, parse_float=finite_number, parse_constant=finite_number)
        )
    return {}


def depth(value: object) -> int:
    """The levels of lists and objects in a JSON value."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def finite_number(text: str) -> float | None:
    """A number; None for NaN, Infinity and 1e999, which no JSON can hold. JavaScript writes null
    for them too."""
    number = float(text)
    return number if math.isfinite(number) else None
