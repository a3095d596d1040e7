"""The session of a server: the cases of a plan as volleys of requests, each kept when it has ended.

A volley is requests of one length that are sent at the same moment; most have one request. The
cases are those of the engine (runner/cases.py): a case of B sequences is a volley of B requests. As
with the engine, cases are shuffled within each round, because machines drift. Before the rounds
each case gets a warm-up, which does not count. A failed request is recorded and the others
continue; the session ends if the server is gone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from lab.core.arguments import Numbers, Reaching, StrPath
from lab.core.lists import plural
from lab.core.record import OK
from lab.core.request import LOST, REFUSED, Request, RequestRecord
from lab.core.request_times import figures
from lab.core.results import save, unless_empty
from lab.errors import LabError, warn
from lab.process.worker import MAX_TOKENS
from lab.remote.client import TimeIsOver, with_asked
from lab.remote.examination import connect
from lab.remote.formats import MOST_AT_ONCE, Ask, Reply, SendPlan
from lab.remote.servers import Server, needs_count, prompt_text
from lab.remote.watching import RequestWatch, server_pids
from lab.runner import progress
from lab.runner.cases import Case, shuffled
from lab.runner.plan import DEFAULT_GEN, DEFAULT_REPEAT, parse_lengths
from lab.runner.progress import Reporter, ShowStatus, Status, Watch
from lab.runner.prompts import TEXT
from lab.runner.run_list import RunList

GONE = (REFUSED, LOST)  # failures that mean, several times in a row, that the server is gone
DEFAULT_LENGTHS = "100,1000"  # without 10: in most chats the template alone is longer
WARMUP_GEN = 16  # maximum number of tokens that a warm-up generates
MAX_GONE = 3  # failures in a row to reach the server, which end the session
PAUSE_S = 1.0  # after a failure


@dataclass(frozen=True)
class ServerPlan:
    """What to measure on any server."""

    cases: tuple[Case, ...]
    n_repeat: int
    text: str
    seed: int
    budget_s: float | None = None  # no request is sent later, and none lasts longer

    @property
    def n_requests(self) -> int:
        """The requests, with warm-ups."""
        return sum(n_at_once(case) for case in self.cases) * (self.n_repeat + 1)

    @property
    def summary(self) -> str:
        """The maximum of what a server will be sent, with warm-ups."""
        longest = max(case.n_prompt + case.n_gen for case in self.cases)
        requests = plural(self.n_requests, "request")
        return f"{requests} for up to {plural(longest, 'token')} each, and small ones to examine it"


def n_at_once(case: Case) -> int:
    """The number of requests that a volley of this case has."""
    return max(1, len(case.sequences))


def make_plan(
    prompt_len: Numbers | None = None,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    prompt: str = TEXT,
    seed: int = 1,
    budget_s: float | None = None,
) -> ServerPlan:
    """The plan of a measurement, for any server. LabError for invalid arguments."""
    lengths = parse_lengths(DEFAULT_LENGTHS if prompt_len is None else prompt_len)
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    for name, value, most in (("gen", gen, MAX_TOKENS), ("repeat", n_repeat, 10_000)):
        if not 1 <= value <= most:
            raise LabError(
                f"--{name} {value:,} is not possible.",
                f"Give a whole number from 1 to {most:,}.",
            )
    cases = tuple(Case(n_prompt, gen) for n_prompt in lengths)
    return ServerPlan(cases, n_repeat, prompt_text(prompt), seed, budget_s)


def check(plan: ServerPlan, server: Server) -> None:
    """LabError if the server cannot count the tokens of a prompt, or a case is not possible on
    it.
    """
    for case in plan.cases:
        server.least(case.n_prompt)
        problem = server.too_long(case.n_prompt, case.n_gen)
        if problem:
            raise problem
        if n_at_once(case) > MOST_AT_ONCE:
            raise LabError(
                f"{n_at_once(case):,} requests at once are too many.",
                f"Send at most {MOST_AT_ONCE} at once.",
            )


def carry_out(
    url: str,
    plan: ServerPlan,
    model: str | None,
    out: StrPath,
    watch: Watch,
    **how: Unpack[Reaching],
) -> list[RequestRecord]:
    """Examine a server and make all requests of a plan, with a warning for failed ones."""
    with progress.shown_to(watch) as show:

        def say(sentence: str) -> None:
            show(Status(sentence))

        with connect(url, model, say, plan.budget_s, **how) as server:
            check(plan, server)
            records = list(execute(plan, server, server.new_file(Path(out)), show))
    errors = [record.error for record in records if record.error and not record.is_warmup]
    if errors:
        warn(f"{plural(len(errors), 'request')} failed: {errors[0]}")
    return records


def execute(
    plan: ServerPlan, server: Server, path: Path, watch: ShowStatus
) -> Iterator[RequestRecord]:
    """Send the plan's requests, append each to `path` when its volley ends, and yield its record.

    Ends when the time of the session is over. LabError if the server is gone.
    """
    with unless_empty(path):
        watch(Status("sizing prompts"))
        session = _Session(plan, server, path, watch)
        with suppress(TimeIsOver):
            for records in session.volleys():
                yield from records
                session.check_reached(records)


class _Session:
    """A running plan: the volleys still to send, and the requests in a row that could not reach the
    server."""

    def __init__(
        self, plan: ServerPlan, server: Server, path: Path, watch: ShowStatus
    ) -> None:
        self._plan = plan
        self._server = server
        self._path = path
        self._asks = {case: self._sized(case) for case in plan.cases}
        self._volleys = RunList()
        for repeat in range(plan.n_repeat):
            self._volleys.add(shuffled(plan.cases, plan.seed, repeat))
        self._reporter = Reporter(
            watch, self._volleys, lambda case: (case.n_prompt, n_at_once(case) * case.n_gen)
        )
        self._server_pids = server_pids(server.client.access)
        self._lost: list[Request] = []  # in a row

    def _sized(self, case: Case) -> Ask:
        ask = self._server.ask(
            case.n_prompt, case.n_gen, self._plan.text, seed=self._plan.seed
        )
        return with_asked(ask, experiment=case.experiment, case=case.values)

    def volleys(self) -> Iterator[list[RequestRecord]]:
        """The records of each volley: first the warm-ups, the shortest prompt first."""
        for case in sorted(self._plan.cases, key=lambda case: case.n_prompt):
            yield self._send(case, 0, is_warmup=True)
        while self._volleys:
            repeat, case = self._volleys.take()
            yield self._send(case, repeat, is_warmup=False)

    def _send(self, case: Case, repeat: int, is_warmup: bool) -> list[RequestRecord]:
        """Send a volley, and keep what has ended, also after Ctrl-C. LabError if the server is
        gone."""
        n_gen = min(WARMUP_GEN, case.n_gen) if is_warmup else case.n_gen
        ask = with_asked(self._asks[case].of_length(n_gen), repeat=repeat, warmup=is_warmup)
        n = n_at_once(case)
        plan = SendPlan(
            asks=(ask,) * n,
            api=self._server.endpoint.api,
            n_at_once=n,
            timeout_s=self._server.client.access.timeout_s,
        )
        watch = RequestWatch(
            self._server_pids, self._reporter.answer_watcher(case, repeat, is_warmup)
        )
        replies: list[Reply] = []
        records: list[RequestRecord] = []
        try:
            for reply in self._server.client.run(plan, watch.look):
                replies.append(reply)
            replies = self._counted(replies, is_warmup)
        finally:
            noise = watch.finish()
            records = [
                self._server.record(self._path.stem, reply.request, noise)
                for reply in sorted(replies, key=lambda reply: reply.index)
            ]
            if records:
                save(self._path, *records)
        self._learn(case, [record.request for record in records])
        return records

    def _counted(self, replies: Sequence[Reply], is_warmup: bool) -> list[Reply]:
        """The replies with their answers counted by the server's tokenizer, where no stream did; it
        is idle now."""
        if is_warmup:
            return list(replies)
        counted = []
        for reply in replies:
            if needs_count(reply.request):
                reply = dataclasses.replace(reply, request=self._server.counted(reply))
            counted.append(reply)
        return counted

    def _learn(self, case: Case, requests: Sequence[Request]) -> None:
        """Tell the forecast how long the slowest answer of a volley took."""
        slowest = max(map(figures, requests), key=lambda times: times.e2e_ns or 0)
        if slowest.request.status != OK or slowest.ttft_ns is None or slowest.e2e_ns is None:
            return
        n_generated = len(requests) * slowest.asked.n_gen
        self._reporter.learn(
            case, slowest.ttft_ns, slowest.e2e_ns - slowest.ttft_ns, n_generated
        )

    def check_reached(self, records: Sequence[RequestRecord]) -> None:
        """LabError if the last requests could not reach the server; a pause after a failure."""
        for record in records:
            if record.request.failure in GONE:
                self._lost.append(record.request)
            else:
                self._lost.clear()
        if len(self._lost) >= MAX_GONE:
            last = self._lost[-1]
            raise LabError(
                f"The server at {self._server.endpoint.url} is gone: {len(self._lost)} requests "
                f"in a row failed ({last.failure}: {(last.error or '').rstrip('.')}).",
                f"Read its log, and restart it. The finished requests are in {self._path}",
            )
        if self._volleys and any(record.error for record in records):
            time.sleep(PAUSE_S)
