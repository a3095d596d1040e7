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
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.core.record import FAILED, OK
from lab.core.request import CHAT, LOST, NO, NOT_SENT, REFUSED, YES, Asked, Endpoint, Events, Request, RequestRecord
from lab.core.results import save, unless_empty
from lab.endpoints import prompts as server_prompts
from lab.endpoints.prompts import MOST_COUNTS, USAGE, Counter, Prompt
from lab.endpoints.selftest import client_error
from lab.endpoints.send_plan import STALL_S, TIMEOUT_S, SendPlan
from lab.errors import LabError
from lab.process.worker import MAX_TOKENS
from lab.runner import progress
from lab.runner.cases import Case, shuffled, utc_now
from lab.runner.plan import DEFAULT_GEN, DEFAULT_REPEAT, check_lengths, parse_lengths
from lab.runner.progress import ANSWERING, Reporter, ShowStatus, Status
from lab.runner.prompts import TEXT, source
from lab.runner.servers import Server, connect

DEFAULT_LENGTHS = "100,1000"
"""Without 10: with its template, the shortest prompt of most chats is longer."""

WARMUP_GEN = 16
"""Tokens that a warm-up generates at most."""

MAX_FAILURES = 3
"""After so many failures in a row of one length, that length is given up."""

MAX_GONE = 3
"""After so many requests in a row that did not reach the server or lost it, the session ends."""

PAUSE_S = 1.0
"""How long is waited after a failure."""

GONE = (REFUSED, LOST, NOT_SENT)


@dataclass(frozen=True)
class Wanted:
    """What is to be measured, whatever the server is."""

    cases: tuple[Case, ...]
    n_repeat: int
    text: str
    seed: int

    @property
    def words(self) -> str:
        """What a server will be sent, at most."""
        n_runs = len(self.cases) * (self.n_repeat + 1)
        most = max(case.n_prompt + case.n_gen for case in self.cases)
        return f"{n_runs:,} requests for up to {most:,} tokens each, and small ones to learn what it can do"


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


def endpoint(
    url: str,
    prompt_len: str | Sequence[int] = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    *,
    model: str | None = None,
    api: str | None = None,
    api_key_env: str | None = None,
    headers: Sequence[str] = (),
    prompt: str = TEXT,
    seed: int = 1,
    timeout: float = TIMEOUT_S,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
) -> list[RequestRecord]:
    """Measure a server that speaks OpenAI's API and return the records, which are also in a new file in `out`.

        records = lab.endpoint("http://127.0.0.1:8080/v1", "100,1000", gen=100)

    Without `repeat` three runs of each length. `model` is the server's name for it (None: its only one), `api` chat or
    completions (None: what it has), `api_key_env` the environment variable that holds the key, `headers` are written
    NAME: VALUE. A request is given up after `timeout` seconds. `watch` is called with a `Status` twice a second;
    without one, a notebook shows a line. Failed requests are records too (see `record.request.status`), and are warned
    of. LabError where nobody answers.
    """
    asked = wanted(prompt_len, gen, repeat, prompt, seed)
    with progress.in_notebook() as watching:
        show = watch or watching
        with connect(url, model, api, api_key_env, headers, timeout, lambda words: show(Status(words))) as server:
            plan = make_plan(server, asked)
            records = list(execute(plan, new_results_file(plan, Path(out)), show))
    sent = [record.request for record in records if record.request.failure != NOT_SENT]
    errors = [request.error for request in sent if request.error and not request.asked.warmup]
    for warning in [*plan.refused.values(), *([f"{len(errors)} requests failed: {errors[0]}"] if errors else [])]:
        warnings.warn(warning, stacklevel=2)
    return records


def wanted(
    prompt_len: str | Sequence[int] = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    prompt: str = TEXT,
    seed: int = 1,
) -> Wanted:
    """What is asked for, checked as far as that goes without a server. LabError for what cannot be."""
    lengths = parse_lengths(prompt_len) if isinstance(prompt_len, str) else tuple(prompt_len)
    check_lengths(lengths)
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    for name, value, most in (("gen", gen, MAX_TOKENS), ("repeat", n_repeat, 10_000)):
        if not 1 <= value <= most:
            raise LabError(f"--{name} {value:,} is not possible.", f"Give a whole number from 1 to {most:,}.")
    return Wanted(tuple(Case(n, gen) for n in lengths), n_repeat, prompt_text(prompt), seed)


def prompt_text(prompt: str) -> str:
    """The text from which prompts are cut. LabError for random token ids, which no server takes."""
    text = source(prompt).text
    if text is None:
        raise LabError(
            f"--prompt {prompt} is not possible through a server, which takes text and not tokens.",
            "Use --prompt text, some of the lab's texts by name, or a text file.",
        )
    return text


def make_plan(server: Server, asked: Wanted) -> ServerPlan:
    """The plan for a server. LabError where it cannot count the tokens of a prompt."""
    n_least = server_prompts.least(server.how_to_count)
    settings = server.endpoint.settings
    n_ctx = settings.n_ctx if settings else None
    refused = {}
    for case in asked.cases:
        if case.n_prompt < n_least:
            refused[case] = str(server_prompts.impossible(case.n_prompt, n_least)).replace("\n", " ")
        elif n_ctx is not None and case.n_prompt + case.n_gen > n_ctx:
            refused[case] = (
                f"{case.n_prompt:,} prompt tokens and {case.n_gen:,} more do not fit into the server's context of "
                f"{n_ctx:,} tokens (of one request). Ask for less, or start the server with a longer context."
            )
    not_seen = not_visible(server.endpoint, server.counter, asked.cases[0].n_gen)
    return ServerPlan(server, asked, refused, tuple(not_seen))


def new_results_file(plan: ServerPlan, folder: Path) -> Path:
    """Create the session's file, and find out now whether the requests will have room in it."""
    n_bytes = sum((4000 + 60 * case.n_gen) * (plan.wanted.n_repeat + 1) for case in plan.wanted.cases)
    return plan.server.new_file(folder, n_bytes)


def execute(plan: ServerPlan, path: Path, watch: ShowStatus, stream: bool = False) -> Iterator[RequestRecord]:
    """Send the plan's requests, each appended to `path` the moment it ends, and yield their records.

    With `stream` the statuses have the generated text, whole, when a request has ended. Raises LabError when the server
    is gone. Whoever stops iterating (Ctrl-C) keeps everything that has been yielded.
    """
    todo = [run for repeat in range(plan.wanted.n_repeat) for run in shuffled(plan.possible, plan.wanted.seed, repeat)]
    reporter = Reporter(watch, todo, lambda case: (case.n_prompt, case.n_gen))
    with unless_empty(path):
        error_ns = None
        if todo:
            reporter.report_status("measuring the client's own error")
            error_ns = client_error()
        session = _Session(plan, reporter, stream)
        try:
            for request in _requests(session, todo, path):
                record = plan.server.record(path.stem, request, error_ns)
                save(path, record)
                yield record
        except KeyboardInterrupt:
            if session.uncounted:
                save(path, plan.server.record(path.stem, session.uncounted, error_ns))
            raise


@dataclass
class _Session:
    """A plan while it runs."""

    plan: ServerPlan
    reporter: Reporter
    stream: bool
    prompts: dict[int, Prompt] = field(default_factory=dict)  # where one for each length has to do
    n_failed: collections.Counter[Case] = field(default_factory=collections.Counter)  # in a row
    n_gone: int = 0  # in a row
    uncounted: Request | None = None  # has ended, and its tokens are being counted

    def send(self, case: Case, repeat: int, warmup: bool = False) -> Request:
        """One request, and what it means for those to come."""
        try:
            request = self._send(case, repeat, warmup, self._prompt(case, repeat))
        except server_prompts.NotCounted as problem:
            request = not_sent(case, repeat, problem.what, warmup)
        is_ok = request.status == OK
        self.n_failed[case] = 0 if is_ok else self.n_failed[case] + 1
        self.n_gone = self.n_gone + 1 if request.failure in GONE else 0
        if is_ok:
            self.reporter.learn_request(case, request)
        return request

    def _send(self, case: Case, repeat: int, warmup: bool, prompt: Prompt) -> Request:
        server = self.plan.server
        n_gen = min(WARMUP_GEN, case.n_gen) if warmup else case.n_gen
        of_run = {"seed": self.plan.wanted.seed, "repeat": repeat, "warmup": warmup}
        asked = server.asked(prompt, case.n_prompt, n_gen, **of_run)
        ask = server.ask(prompt, asked, is_sent_once=True)
        watch = self.reporter.answer_watcher(case, repeat, warmup)
        timeout_s = server.access.timeout_s
        plan = SendPlan(asks=(ask,), api=server.endpoint.api, timeout_s=timeout_s, stall_s=min(STALL_S, timeout_s))
        (reply,) = server.client.run(plan, watch)
        if warmup:
            return reply.request
        if self.stream:
            self.reporter.report_status(ANSWERING, case, repeat, rest_s=0.0, text=reply.text)
        self.uncounted = reply.request
        counted = server.counted(ask, reply)
        self.uncounted = None
        return counted

    def _prompt(self, case: Case, repeat: int) -> Prompt:
        """A prompt that was never sent: cut at another place for each repeat, where counting costs nothing."""
        asked, n = self.plan.wanted, case.n_prompt
        if n in self.prompts:
            return server_prompts.renewed(self.prompts[n], random.Random())
        prompt = self.plan.server.prompt(n, asked.text, asked.seed, repeat)
        if prompt.counted_by == server_prompts.USAGE:
            self.prompts[n] = prompt
        return prompt


def _requests(session: _Session, todo: list[tuple[int, Case]], path: Path) -> Iterator[Request]:
    plan = session.plan
    for case, reason in plan.refused.items():
        yield not_sent(case, 0, reason)
    warmups = [(0, case) for case in plan.possible]
    while warmups or todo:
        is_warmup = bool(warmups)
        repeat, case = (warmups or todo).pop(0)
        request = session.send(case, repeat, is_warmup)
        yield request
        if session.n_gone >= MAX_GONE:
            raise LabError(
                f"The server at {plan.server.endpoint.url} is gone: {session.n_gone} requests in a row failed "
                f"({request.failure}: {(request.error or '').rstrip('.')}).",
                f"Look into its log, and start it again. What had ended is in {path}",
            )
        if session.n_failed[case] >= MAX_FAILURES and (left := [run for run in todo if run[1] == case]):
            todo[:] = [run for run in todo if run[1] != case]
            more = f"{len(left)} more {'was' if len(left) == 1 else 'were'} not sent"
            yield not_sent(case, left[0][0], f"After {MAX_FAILURES} failures in a row {more}.")
        if request.status != OK and (warmups or todo):
            time.sleep(PAUSE_S)


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
