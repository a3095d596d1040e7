"""Measure a server: send requests of several prompt lengths, one at a time, and write each to disk when it ends.

As with the engine, lengths are interleaved in rounds and shuffled within each round, because machines drift. Before the
rounds each length gets a warm-up request, which does not count: a server also loads kernels and touches memory when it
sees a length for the first time, and some load the model only then. A failed request is recorded and the others
continue; a length that fails repeatedly is abandoned, and the session ends if the server is gone.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from lab.core.record import FAILED, OK
from lab.core.request import CHAT, NO, NOT_SENT, YES, Asked, Endpoint, Events, Request, RequestRecord
from lab.core.results import unless_empty
from lab.errors import LabError
from lab.features.serve import prompts as server_prompts
from lab.features.serve.client import POLL_S
from lab.features.serve.prompts import MOST_COUNTS, USAGE, Counter, Prompt
from lab.features.serve.send_plan import Reply, SendPlan
from lab.features.serve.server_session import ServerSession, warn_of_failures
from lab.features.serve.servers import Reaching, Server, connect, prompt_text
from lab.process.worker import MAX_TOKENS
from lab.runner import progress
from lab.runner.cases import Case, shuffled, utc_now
from lab.runner.plan import DEFAULT_GEN, DEFAULT_REPEAT, parse_lengths
from lab.runner.progress import ANSWERING, Reporter, ShowStatus, Status
from lab.runner.prompts import TEXT

DEFAULT_LENGTHS = "100,1000"
"""Without 10, because the template alone is longer in most chats."""

WARMUP_GEN = 16
"""Maximum number of tokens that a warm-up generates."""

MAX_FAILURES = 3
"""Failures in a row after which a length is abandoned."""

MAX_GONE = 3
"""Failures to reach the server in a row after which the session ends."""

PAUSE_S = 1.0
"""Pause after a failure."""


class ServerKeywords(Reaching, total=False):
    """What `lab.measure` takes with `url`, besides lengths and a model."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class ServerPlan:
    """What to measure on any server. Of a server that was examined: why it refuses cases, and what is not visible."""

    cases: tuple[Case, ...]
    n_repeat: int
    text: str
    seed: int
    refused: dict[Case, str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The maximum of what a server will be sent, with warm-ups."""
        most = max(case.n_prompt + case.n_gen for case in self.cases)
        n = len(self.cases) * (self.n_repeat + 1)
        return f"{n:,} requests for up to {most:,} tokens each, and small ones to examine it"


def measure(
    url: str,
    plan: ServerPlan,
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
            plan = fitted(plan, server)
            path = server.new_file(Path(out))
            records = list(execute(plan, server, path, show, stream))
    sent = [record.request for record in records if record.request.failure != NOT_SENT]
    warn_of_failures(plan.refused.values(), [request.error for request in sent if not request.asked.warmup])
    return records


def make_plan(
    prompt_len: str | Sequence[int] | None = None,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    prompt: str = TEXT,
    seed: int = 1,
) -> ServerPlan:
    """The plan of a measurement, for any server. LabError for invalid arguments."""
    lengths = parse_lengths(DEFAULT_LENGTHS if prompt_len is None else prompt_len)
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    for name, value, most in (("gen", gen, MAX_TOKENS), ("repeat", n_repeat, 10_000)):
        if not 1 <= value <= most:
            raise LabError(f"--{name} {value:,} is not possible.", f"Give a whole number from 1 to {most:,}.")
    return ServerPlan(tuple(Case(n, gen) for n in lengths), n_repeat, prompt_text(prompt), seed)


def fitted(plan: ServerPlan, server: Server) -> ServerPlan:
    """The plan for this server. LabError if it cannot count the tokens of a prompt."""
    n_least, refused = server_prompts.least(server.how_to_count), {}
    for case in plan.cases:
        problem = server.too_long(case.n_prompt, case.n_gen)
        if case.n_prompt < n_least:
            problem = server_prompts.impossible(case.n_prompt, n_least)
        if problem:
            refused[case] = str(problem).replace("\n", " ")
    unseen = tuple(not_visible(server.endpoint, server.counter, plan.cases[0].n_gen))
    return dataclasses.replace(plan, refused=refused, unseen=unseen)


def execute(
    plan: ServerPlan, server: Server, path: Path, watch: ShowStatus, stream: bool = False
) -> Iterator[RequestRecord]:
    """Send the plan's requests, append each to `path` when it ends, and yield its record.

    With `stream` a status has the complete generated text when a request has ended. LabError if the server is gone.
    Stopping early (Ctrl-C) keeps all finished requests. The prompt is cut at another place for each repeat, or has only
    another nonce if counting costs requests.
    """
    possible = sorted((case for case in plan.cases if case not in plan.refused), key=lambda case: case.n_prompt)
    warmups = [(0, case) for case in possible]
    todo = [run for repeat in range(plan.n_repeat) for run in shuffled(possible, plan.seed, repeat)]
    reporter = Reporter(watch, todo, lambda case: (case.n_prompt, case.n_gen))
    session = ServerSession(server, path, reporter.report_status)
    prompts: dict[int, Prompt] = {}  # one for each length, if counting costs requests
    n_failed: collections.Counter[Case] = collections.Counter()  # in a row
    replies: list[Reply] = []
    with unless_empty(path):
        for case, reason in plan.refused.items():
            yield session.keep(not_sent(case, 0, reason))
        while warmups or todo:
            is_warmup, is_ok = bool(warmups), False
            repeat, case = (warmups or todo).pop(0)
            n = case.n_prompt
            try:
                known = prompts.get(n)
                prompt = known.renewed(random.Random()) if known else server.prompt(n, plan.text, plan.seed, repeat)
            except server_prompts.NotCounted as problem:
                request = not_sent(case, repeat, problem.what, is_warmup)
                session.count_lost(request)
                yield session.keep(request)
            else:
                if prompt.counted_by == USAGE:
                    prompts[n] = prompt
                n_gen = min(WARMUP_GEN, case.n_gen) if is_warmup else case.n_gen
                asked = server.asked(prompt, n, n_gen, seed=plan.seed, repeat=repeat, warmup=is_warmup)
                ask = server.ask(prompt, asked, is_sent_once=True)
                sent = SendPlan(asks=(ask,), api=server.endpoint.api, timeout_s=server.access.timeout_s)
                look = reporter.answer_watcher(case, repeat, is_warmup)
                look()
                for record in session.send(sent, POLL_S, look, replies.append, counts=not is_warmup):
                    if is_ok := record.request.status == OK:
                        reporter.learn_request(case, record.request)
                    if stream and not is_warmup:
                        reporter.report_status(ANSWERING, case, repeat, rest_s=0.0, text=replies[-1].text)
                    yield record
            session.check_reached(MAX_GONE)
            n_failed[case] = 0 if is_ok else n_failed[case] + 1
            left = [run for run in todo if run[1] == case]
            if n_failed[case] >= MAX_FAILURES and left:
                todo[:] = [run for run in todo if run[1] != case]
                more = f"{len(left)} more {'was' if len(left) == 1 else 'were'} not sent"
                yield session.keep(not_sent(case, left[0][0], f"After {MAX_FAILURES} failures in a row {more}."))
            if not is_ok and (warmups or todo):
                time.sleep(PAUSE_S)


def not_sent(case: Case, repeat: int, reason: str, warmup: bool = False) -> Request:
    """The record of a request that was not sent."""
    asked = Asked(n_prompt=case.n_prompt, n_gen=case.n_gen, repeat=repeat, warmup=warmup)
    return Request(asked=asked, started_at=utc_now(), status=FAILED, failure=NOT_SENT, error=reason, events=Events())


def not_visible(endpoint: Endpoint, counter: Counter | None, n_gen: int) -> Iterator[str]:
    """What is not visible in answers of `n_gen` tokens, from the server's capabilities."""
    how, settings = {one.name: one.how for one in endpoint.capabilities}, endpoint.settings
    streams, caches = endpoint.can("streaming"), endpoint.can("cached tokens")
    own = " The server's own times are shown separately." if endpoint.can("server timings") == YES else ""
    known = (
        (streams == NO, f"Only E2E is visible, not TTFT and TPOT: {how.get('streaming')}."),
        (
            streams not in (YES, NO),
            f"It is not known whether the server streams token by token ({how.get('streaming')}). If it buffers "
            "tokens, TTFT is later than the first token.",
        ),
        (
            streams != NO,
            "Prefill time is not visible: the lab shows TTFT, which includes the server's queue, its tokenizer and its "
            f"first token.{own}",
        ),
        (
            streams != NO and endpoint.can("tokens per event") != YES,
            "Events do not say how many tokens they contain: gaps are those between events (inter-chunk latency), not "
            "ITL, and TPOT is a range unless there are as many events as tokens.",
        ),
        (
            endpoint.can("usage in streams") != YES,
            "The stream does not count its tokens: the lab sends each request once more without streaming, which costs "
            "one more generation. If that answer differs, the server's tokenizer counts the tokens; without one, TPOT "
            "is not known.",
        ),
        (
            caches != YES,
            "The server does not report cached tokens, so it is not known whether a run was warm. Each prompt begins "
            "with different letters, so only the template before them can come from a cache.",
        ),
        (
            caches == YES and endpoint.api == CHAT and endpoint.server != "llama-server",  # with cache_prompt: false
            "All chats share the template before their prompts, which the server may cache: runs with cached tokens "
            "are shown separately, as warm. --api completions has no template.",
        ),
        (
            endpoint.can("ignore_eos") != YES and n_gen > 1,
            f"Answers may end before {n_gen:,} tokens ({how.get('ignore_eos')}); these are shown separately.",
        ),
        (
            settings is None or settings.n_ctx is None,
            "The server does not report its context length: a prompt that is too long for it fails.",
        ),
        (
            True,
            "The server processes one request at a time: a run that waits for another client's has a longer TTFT."
            if settings is not None and settings.n_slots == 1
            else "Requests of other clients make these runs slower, and are not visible.",
        ),
        (
            counter is not None and counter.by == USAGE,
            "The server has no tokenizer endpoint: the lab finds a prompt of exactly n tokens with requests for one "
            f"token (at most {MOST_COUNTS} for each length). A length's repeats differ only in their first letters.",
        ),
    )
    return (sentence for is_so, sentence in known if is_so)
