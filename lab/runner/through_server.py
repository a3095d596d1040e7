"""The main job through a server: requests of several prompt lengths, one at a time, each on disk the moment it ends.

As with the engine, lengths are interleaved in rounds and shuffled within each, since machines drift. Before the rounds,
each length is asked for once, untimed and marked: a server, too, loads kernels and touches memory when it sees a length
for the first time, and some load the model only then. A request that fails is a record, and the rest goes on; a length
that fails again and again is given up, and so is a server that is gone.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from lab.core.record import FAILED, OK
from lab.core.request import CHAT, NO, NOT_SENT, YES, Asked, Endpoint, Events, Request, RequestRecord
from lab.core.results import unless_empty
from lab.endpoints import prompts as server_prompts
from lab.endpoints.client import POLL_S
from lab.endpoints.prompts import MOST_COUNTS, USAGE, Counter, Prompt
from lab.endpoints.send_plan import Reply, SendPlan
from lab.errors import LabError
from lab.process.worker import MAX_TOKENS
from lab.runner import progress
from lab.runner.cases import Case, shuffled, utc_now
from lab.runner.plan import DEFAULT_GEN, DEFAULT_REPEAT, check_lengths, parse_lengths
from lab.runner.progress import ANSWERING, Reporter, ShowStatus, Status
from lab.runner.prompts import TEXT
from lab.runner.server_session import ServerSession, warn_of_failures
from lab.runner.servers import Reaching, Server, connect, prompt_text

DEFAULT_LENGTHS = "100,1000"
"""Without 10: with its template, the shortest prompt of most chats is longer."""

WARMUP_GEN = 16
"""Tokens that a warm-up generates at most."""

MAX_FAILURES = 3
"""Failures in a row of one length after which that length is not measured any more."""

MAX_GONE = 3
"""Requests in a row that did not reach the server, or lost it, after which the session ends."""

PAUSE_S = 1.0
"""How long is waited after a failure."""


class ServerKeywords(Reaching, total=False):
    """What `lab.measure` takes with `url`, besides lengths and a model."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Wanted:
    """What is to be measured, whatever the server is."""

    cases: tuple[Case, ...]
    n_repeat: int
    text: str
    seed: int

    @property
    def summary(self) -> str:
        """What a server will be sent, at most."""
        n_runs = len(self.cases) * (self.n_repeat + 1)
        most = max(case.n_prompt + case.n_gen for case in self.cases)
        return f"{n_runs:,} requests for up to {most:,} tokens each, and small ones to examine it"


@dataclass(frozen=True)
class ServerPlan:
    """What a server will be asked. `refused` says of cases that cannot be why not, `unseen` what will not be seen."""

    server: Server
    wanted: Wanted
    refused: dict[Case, str]
    unseen: tuple[str, ...]

    @property
    def possible(self) -> list[Case]:
        """The cases that will be tried, from the shortest prompt on."""
        return sorted((case for case in self.wanted.cases if case not in self.refused), key=lambda case: case.n_prompt)


def measure(
    url: str,
    asked: Wanted,
    model: str | None,
    out: str | Path,
    watch: ShowStatus | None,
    stream: bool,
    **how: Unpack[Reaching],
) -> list[RequestRecord]:
    """What `lab.measure` does with `url`."""
    with progress.in_notebook() as watching:
        show = watch or watching
        with connect(url, model, lambda words: show(Status(words)), **how) as server:
            plan = make_plan(server, asked)
            records = list(execute(plan, new_results_file(plan, Path(out)), show, stream))
    sent = [record.request for record in records if record.request.failure != NOT_SENT]
    warn_of_failures(plan.refused.values(), [request.error for request in sent if not request.asked.warmup])
    return records


def wanted(
    prompt_len: str | Sequence[int] | None = None,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    prompt: str = TEXT,
    seed: int = 1,
) -> Wanted:
    """What is asked for, checked as far as that goes without a server. LabError for what cannot be."""
    lengths = parse_lengths(DEFAULT_LENGTHS if prompt_len is None else prompt_len)
    check_lengths(lengths)
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    for name, value, most in (("gen", gen, MAX_TOKENS), ("repeat", n_repeat, 10_000)):
        if not 1 <= value <= most:
            raise LabError(f"--{name} {value:,} is not possible.", f"Give a whole number from 1 to {most:,}.")
    return Wanted(tuple(Case(n, gen) for n in lengths), n_repeat, prompt_text(prompt), seed)


def make_plan(server: Server, asked: Wanted) -> ServerPlan:
    """The plan for a server. LabError where it cannot count the tokens of a prompt."""
    n_least = server_prompts.least(server.how_to_count)
    refused = {}
    for case in asked.cases:
        is_too_short = case.n_prompt < n_least
        too_short = server_prompts.impossible(case.n_prompt, n_least) if is_too_short else None
        if problem := too_short or server.too_long(case.n_prompt, case.n_gen):
            refused[case] = str(problem).replace("\n", " ")
    not_seen = not_visible(server.endpoint, server.counter, asked.cases[0].n_gen)
    return ServerPlan(server, asked, refused, tuple(not_seen))


def new_results_file(plan: ServerPlan, folder: Path) -> Path:
    """Create the session's file, and find out now whether the requests will have room in it."""
    cases = plan.wanted.cases
    return plan.server.new_file(folder, len(cases) * (plan.wanted.n_repeat + 1), cases[0].n_gen)


def execute(plan: ServerPlan, path: Path, watch: ShowStatus, stream: bool = False) -> Iterator[RequestRecord]:
    """Send the plan's requests, each appended to `path` the moment it ends, and yield their records.

    With `stream` the statuses have the generated text, whole, when a request has ended. Raises LabError when the server
    is gone. Whoever stops iterating (Ctrl-C) keeps everything that has been yielded.
    """
    todo = [run for repeat in range(plan.wanted.n_repeat) for run in shuffled(plan.possible, plan.wanted.seed, repeat)]
    reporter = Reporter(watch, todo, lambda case: (case.n_prompt, case.n_gen))
    session = ServerSession(plan.server, path, reporter.report_status)
    rounds = _Rounds(plan, session, reporter, stream)
    n_failed: collections.Counter[Case] = collections.Counter()  # in a row
    with unless_empty(path):
        if todo:
            session.measure_client(1)
        for case, reason in plan.refused.items():
            yield session.keep(not_sent(case, 0, reason))
        warmups = [(0, case) for case in plan.possible]
        while warmups or todo:
            is_warmup = bool(warmups)
            repeat, case = (warmups or todo).pop(0)
            is_ok = yield from rounds.measure(case, repeat, is_warmup)
            session.check_reached(MAX_GONE)
            n_failed[case] = 0 if is_ok else n_failed[case] + 1
            left = [run for run in todo if run[1] == case]
            if n_failed[case] >= MAX_FAILURES and left:
                todo[:] = [run for run in todo if run[1] != case]
                more = f"{len(left)} more {'was' if len(left) == 1 else 'were'} not sent"
                yield session.keep(not_sent(case, left[0][0], f"After {MAX_FAILURES} failures in a row {more}."))
            if not is_ok and (warmups or todo):
                time.sleep(PAUSE_S)


@dataclass
class _Rounds:
    """A plan while it runs."""

    plan: ServerPlan
    session: ServerSession
    reporter: Reporter
    stream: bool
    prompts: dict[int, Prompt] = field(default_factory=dict)  # where one for each length has to do

    def measure(self, case: Case, repeat: int, warmup: bool) -> Generator[RequestRecord, None, bool]:
        """Send one request, and give its record. Returns whether it went well."""
        try:
            prompt = self._prompt(case, repeat)
        except server_prompts.NotCounted as problem:
            request = not_sent(case, repeat, problem.what, warmup)
            self.session.count_lost(request)
            yield self.session.keep(request)
            return False
        server = self.plan.server
        n_gen = min(WARMUP_GEN, case.n_gen) if warmup else case.n_gen
        of_run = {"seed": self.plan.wanted.seed, "repeat": repeat, "warmup": warmup}
        ask = server.ask(prompt, server.asked(prompt, case.n_prompt, n_gen, **of_run), is_sent_once=True)
        plan = SendPlan(asks=(ask,), api=server.endpoint.api, timeout_s=server.access.timeout_s)
        look = self.reporter.answer_watcher(case, repeat, warmup)

        def show(reply: Reply) -> None:
            if self.stream and not warmup:
                self.reporter.report_status(ANSWERING, case, repeat, rest_s=0.0, text=reply.text)

        look()
        is_ok = False
        for record in self.session.send(plan, POLL_S, look, show, counts=not warmup):
            if is_ok := record.request.status == OK:
                self.reporter.learn_request(case, record.request)
            yield record
        return is_ok

    def _prompt(self, case: Case, repeat: int) -> Prompt:
        """A prompt that was never sent: cut at another place for each repeat, where counting costs nothing."""
        asked, n = self.plan.wanted, case.n_prompt
        if n in self.prompts:
            return server_prompts.renewed(self.prompts[n], random.Random())
        prompt = self.plan.server.prompt(n, asked.text, asked.seed, repeat)
        if prompt.counted_by == server_prompts.USAGE:
            self.prompts[n] = prompt
        return prompt


def not_sent(case: Case, repeat: int, reason: str, warmup: bool = False) -> Request:
    """The request that could not be sent."""
    return Request(
        asked=Asked(n_prompt=case.n_prompt, n_gen=case.n_gen, repeat=repeat, warmup=warmup),
        started_at=utc_now(),
        status=FAILED,
        failure=NOT_SENT,
        error=reason,
        events=Events(),
    )


def not_visible(endpoint: Endpoint, counter: Counter | None, n_gen: int) -> Iterator[str]:
    """What is not visible of answers of `n_gen` tokens, from what the server was seen to be able to do."""
    how = {one.name: one.how for one in endpoint.capabilities}
    if endpoint.can("streaming") == NO:
        yield f"TTFT and TPOT are not visible, only E2E is: {how.get('streaming')}."
    elif endpoint.can("streaming") != YES:
        yield (
            f"Whether the server streams token by token is not known ({how.get('streaming')}): one that holds tokens "
            "back has a TTFT that is later than its first token."
        )
    own = " What the server says of its own times is shown apart." if endpoint.can("server timings") == YES else ""
    if endpoint.can("streaming") != NO:
        yield (
            "Prefill time is not visible from outside: TTFT stands for it, with the server's queue, its tokenizer and "
            f"its first token in it.{own}"
        )
    if endpoint.can("streaming") != NO and endpoint.can("tokens per event") != YES:
        yield (
            "No event says how many tokens it holds: gaps are those between events (inter-chunk latency), there is no "
            "ITL, and TPOT lies between two bounds wherever there are not as many events as tokens."
        )
    if endpoint.can("usage in streams") != YES:
        yield (
            "The stream does not count its tokens: each request is sent once more, not streamed, which costs one more "
            "generation. Where that answers differently, the server's tokenizer counts, if it has one; else TPOT is "
            "not known."
        )
    if endpoint.can("cached tokens") != YES:
        yield (
            "The server does not say how much of a prompt came from a cache: nobody can say whether a run was warm. "
            "Each prompt begins with letters of its own, so only the template before them can have come from one."
        )
    elif endpoint.api == CHAT and endpoint.server != "llama-server":  # which takes cache_prompt: false
        yield (
            "All chats share the template before their prompts, which the server may have in a cache: runs for which "
            "it says so are shown apart, as warm. --api completions has no template."
        )
    if endpoint.can("ignore_eos") != YES and n_gen > 1:
        yield f"Answers may end before {n_gen:,} tokens ({how.get('ignore_eos')}): those that do are shown apart."
    yield from _of_settings(endpoint)
    if counter is not None and counter.by == USAGE:
        yield (
            f"The server has no tokenizer to ask: a prompt of exactly n tokens is found by some requests for one token "
            f"(at most {MOST_COUNTS}), once for each length; its repeats differ in their first letters only."
        )


def _of_settings(endpoint: Endpoint) -> Iterator[str]:
    settings = endpoint.settings
    if settings is None or settings.n_ctx is None:
        yield "The server does not say how long its context is: a prompt that is too long for it fails."
    if settings is not None and settings.n_slots == 1:
        yield (
            "The server works on one request at a time: while it works on somebody else's, a run waits, and its TTFT "
            "is longer."
        )
    else:
        yield "What others ask the server meanwhile makes these runs slower, and cannot be seen from here."
