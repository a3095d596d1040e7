"""Send requests to one server and write them to one results file (for `lab measure --url` and `lab load`).

The client's process sends a plan of requests. This process writes down the finished ones at intervals and sleeps in
between, because both may share the cores with the server. Finished requests are kept even if a plan ends early.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import LOST, NOT_SENT, REFUSED, Asked, Request, RequestRecord
from lab.core.results import save
from lab.errors import LabError
from lab.features.serve.send_plan import Reply, SendPlan
from lab.features.serve.servers import Server

GONE = (REFUSED, LOST, NOT_SENT)
"""Failures that mean, several times in a row, that the server is gone."""


@dataclass
class ServerSession:
    """A running session. Calls `report` with what it is doing."""

    server: Server
    path: Path
    report: Callable[[str], object]
    n_lost: int = 0  # requests in a row with a failure in GONE
    last: Request | None = None  # the last finished one
    can_count: bool = True  # whether the server can count tokens of answers whose stream did not
    _kept: set[int] = field(default_factory=set)  # the plan's requests that are in the file
    _asked: dict[Asked, Asked] = field(default_factory=dict)  # shared by thousands of requests

    @property
    def n_kept(self) -> int:
        """Requests of the last plan in the file."""
        return len(self._kept)

    def send(
        self,
        plan: SendPlan,
        look_s: float,
        look: Callable[[], object] = lambda: None,
        ended: Callable[[Reply], object] = lambda reply: None,
        counts: bool = True,
    ) -> Iterator[RequestRecord]:
        """Send the requests of a plan; yield each record after it is written to the file.

        Every `look_s` seconds writes the finished requests; calls `ended` with each reply, then `look`. With `counts`
        the server counts the tokens of answers without a count after all have ended.
        """
        self._kept.clear()
        uncounted: list[Reply] = []
        try:
            for batch in self.server.client.batches(plan, look_s):
                counted: list[Reply] = []
                for reply in batch:
                    self.count_lost(reply.request)
                    ended(reply)
                    is_final = not counts or not self.can_count or _is_counted(reply.request)
                    (counted if is_final else uncounted).append(reply)
                yield from self._keep(counted)
                look()
            is_gone = plan.most_lost is not None and self.n_lost >= plan.most_lost
            for i, reply in enumerate([] if is_gone else uncounted):  # the server is idle now
                if len(uncounted) > 1 and i % 10 == 0:
                    self.report(f"counting the tokens of answers, {i} of {len(uncounted)}")
                request = self.server.counted(plan.ask(reply.index), reply)
                uncounted[i] = dataclasses.replace(reply, request=request)
                if not _is_counted(request) and request.asked.seed is None:  # it needs a tokenizer, and has none
                    self.can_count = False
                    break
            yield from self._keep(uncounted)
        except BaseException:  # after Ctrl-C, in a closed generator, without a client, or with a full disk
            with suppress(LabError):  # then the rest goes to the same rescue file
                self._keep((*self.server.client.given_up(), *uncounted))
            raise

    def count_lost(self, request: Request) -> None:
        """Count requests in a row with a failure in GONE."""
        self.n_lost = self.n_lost + 1 if request.failure in GONE else 0
        self.last = request

    def check_reached(self, most_lost: int, during: str = "") -> None:
        """LabError after `most_lost` requests in a row with a failure in GONE."""
        if self.n_lost >= most_lost and self.last:
            why = f"{self.last.failure}: {(self.last.error or '').rstrip('.')}"
            raise LabError(
                f"The server at {self.server.endpoint.url} is gone: {self.n_lost} requests in a row failed "
                f"({during}{why}).",
                f"Read its log, and restart it. The finished requests are in {self.path}",
            )

    def keep(self, request: Request) -> RequestRecord:
        """Write a request that no plan sent."""
        record = self.server.record(self.path.stem, request)
        save(self.path, record)
        return record

    def _keep(self, replies: Iterable[Reply]) -> list[RequestRecord]:
        """Write the new replies."""
        new = {}
        for reply in replies:
            asked = self._asked.setdefault(reply.request.asked, reply.request.asked)
            request = dataclasses.replace(reply.request, asked=asked)
            if reply.index not in self._kept:
                new[reply.index] = self.server.record(self.path.stem, request)
        if new:
            n_bytes = self.path.stat().st_size
            try:
                save(self.path, *new.values())
            finally:  # after Ctrl-C during the write, do not write them again
                if self.path.stat().st_size > n_bytes:
                    self._kept.update(new)
        return list(new.values())


def warn_of_failures(notes: Iterable[str], errors: Iterable[str | None]) -> None:
    """Python warnings for a session's notes and failed requests, at the line of the user's call."""
    failed = [error for error in errors if error]
    for sentence in (*notes, *([f"{len(failed)} requests failed: {failed[0]}"] if failed else [])):
        warnings.warn(sentence, stacklevel=3)


def _is_counted(request: Request) -> bool:
    return request.status != OK or times.n_generated(request) is not None
