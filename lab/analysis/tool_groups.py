"""What the definitions of other tools share: the requests of one of their runs, its time, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lab.core.record import OK
from lab.core.request import Endpoint, Request, RequestRecord
from lab.core.server_load import CLOSED

NS_PER_MS, NS_PER_S = 1e6, 1e9


@dataclass(frozen=True)
class Group:
    """The requests that a tool would have measured in one run: one load, or one pair of lengths without a load."""

    endpoint: Endpoint
    model: str
    requests: tuple[Request, ...]

    @property
    def ok(self) -> tuple[Request, ...]:
        return tuple(request for request in self.requests if request.status == OK)

    @property
    def n_failed(self) -> int:
        return len(self.requests) - len(self.ok)

    @property
    def n_at_once(self) -> int | None:
        """Users of a closed loop; 1 without a load; None in an open loop."""
        load = self.requests[0].asked.load
        return 1 if load is None else load.concurrency if load.arrivals == CLOSED else None

    @property
    def rate(self) -> float | None:
        """Requests per second of an open loop, as intended."""
        load = self.requests[0].asked.load
        return None if load is None else load.rate


def groups(records: Iterable[RequestRecord]) -> list[Group]:
    """The requests by session, server, model, interface and load (without a load: by lengths).

    Warm-ups are left out, and of a load what was due before or after its steady window.
    """
    collected: dict[object, list[RequestRecord]] = {}
    for record in records:
        asked = record.request.asked
        if not asked.warmup and _is_inside(record.request):
            work = (asked.n_prompt, asked.n_gen) if asked.load is None else (asked.load.words, asked.load.lengths)
            key = record.session, record.endpoint.url, record.endpoint.api, record.model, asked.load is None, work
            collected.setdefault(key, []).append(record)
    return [Group(rows[0].endpoint, rows[0].model, tuple(row.request for row in rows)) for rows in collected.values()]


def _is_inside(request: Request) -> bool:
    """Whether a request was due inside the steady window of its load, if it is of one."""
    load, due_ns = request.asked.load, request.sent_ns if request.scheduled_ns is None else request.scheduled_ns
    if load is None or due_ns is None:
        return True
    return 0 <= due_ns - load.warmup_s * NS_PER_S < load.duration_s * NS_PER_S


def seconds(requests: Sequence[Request], end_ns: Callable[[Request], int | None]) -> float | None:
    """How long the requests took, from the first sending to the last end (`end_ns`, from the sending).

    The rounds of a load are added up; without a load the requests ran one after the other. None where no end is known.
    """
    spans: dict[object, list[tuple[int, int]]] = {}
    for number, request in enumerate(requests):
        ended_ns, load = end_ns(request), request.asked.load
        if ended_ns is not None:
            begun_ns = 0 if load is None else request.sent_ns or 0
            spans.setdefault(number if load is None else (load.round,), []).append((begun_ns, begun_ns + ended_ns))
    total_ns = sum(max(end for _, end in span) - min(begin for begin, _ in span) for span in spans.values())
    return total_ns / NS_PER_S if spans else None


def per_second(amount: float | None, of_seconds: float | None) -> float | None:
    """amount / seconds; None where one of them is not known."""
    return None if amount is None or not of_seconds else amount / of_seconds


def total(counts: Sequence[int | None]) -> int | None:
    """The sum; None where there is nothing, or one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def n_prompt(request: Request) -> int | None:
    """Tokens of the prompt by the server's usage, the template of a chat included."""
    return request.usage.prompt_tokens if request.usage else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ordered values, linear between the two nearest ranks, as numpy's default."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
