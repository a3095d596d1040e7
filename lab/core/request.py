"""A request to a server, as data: what was asked, and each event of the answer with the time at which it arrived.

A model behind HTTP shows no steps, only events: pieces of a stream. So a request is a line of a kind of its own in
results files, complete in itself like a run: the machine of the client, the endpoint and what it can do, what was
asked, and the raw events as columns. Everything else is derived (request_times.py).

`sent_ns` and `scheduled_ns` count from the start of the plan that the request belongs to; all other `_ns` count from
`sent_ns`. All come from one monotonic clock. Keys and passwords are in none of these fields.

A load on a server, as data: how requests came, for how long, and which limits an answer was to keep.

A closed loop has N users, each of whom sends the next request when the last one has ended. An open loop sends at
intended times, whatever the server does. A load is warmed up first, then its steady window is measured; requests of
that window end under the same load, which goes on until the last of them has.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from lab.core.lists import plural
from lab.core.record import SCHEMA, Machine
from lab.errors import LabError

CLOSED, POISSON, CONSTANT, REPLAY = "closed", "poisson", "constant", "replay"


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits that an answer is to keep (service level objectives), in seconds. None: no such limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def label(self) -> str:
        """Such as "TTFT 1 s, TPOT 50 ms"; empty without limits."""
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
        return ", ".join(
            f"{name} {seconds:g} s" if seconds >= 1 else f"{name} {1e3 * seconds:g} ms"
            for name, seconds in named
            if seconds is not None
        )


def parse_slo(text: str) -> Slo:
    """Limits as they are written: `ttft=1s,tpot=50ms,e2e=10s`, any of them. LabError for anything else."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot|e2e)=(\d+\.?\d*|\.\d+)(ms|s)", part.strip().lower())
        seconds = float(match[2]) / (1000 if match[3] == "ms" else 1) if match else 0.0
        if match is None or not 0 < seconds < float("inf") or f"{match[1]}_s" in limits:
            raise LabError(f"The limits {text!r} are not understood.", "Write them as ttft=1s,tpot=50ms,e2e=10s.")
        limits[f"{match[1]}_s"] = seconds
    return Slo(**limits)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that a request was a part of: one arm of a measurement, in one of its rounds."""

    arrivals: str  # closed, poisson, constant, replay
    concurrency: int | None = None  # of a closed loop: users
    rate: float | None = None  # of an open loop: requests per second, intended
    round: int  # arms are measured once in each round
    warmup_s: float
    duration_s: float  # of the steady window, which begins at warmup_s
    lengths: str  # of prompts and answers, in the user's words
    seed: int
    slo: Slo | None = None

    @property
    def label(self) -> str:
        """Such as "8 users" or "2 requests/s"."""
        if self.arrivals == CLOSED:
            return plural(self.concurrency or 0, "user")
        if self.arrivals == REPLAY:
            return "replay"
        word = "request" if self.rate == 1 else "requests"
        return f"{self.rate:g} {word}/s" + (", evenly" if self.arrivals == CONSTANT else "")


ROLE = "role"  # the role of who answers, without content
TEXT = "text"  # also ids of tokens that make no whole letter yet
REASONING = "reasoning"
TOOL = "tool"  # a call of a tool: its name, or a part of its arguments
USAGE = "usage"  # counts of tokens, without content
DONE = "done"
PING = "ping"  # a comment, which keeps the connection open
ERROR = "error"
OTHER = "other"  # such as the reason of the end
GENERATED = (TEXT, REASONING, TOOL)
"""Kinds of events, and those that carry generated content."""

CHAT, COMPLETIONS = "chat", "completions"
"""The two interfaces of an OpenAI-compatible server."""

YES, NO, UNKNOWN = "yes", "no", "unknown"

REFUSED = "connection refused"  # also: a name that does not resolve, a certificate that is not trusted
LOST = "connection lost"
TIMEOUT = "timeout"
STALLED = "stalled"
RATE_LIMITED = "rate limited"  # HTTP 429
SERVER_ERROR = "server error"  # HTTP 5xx
BAD_REQUEST = "bad request"  # other HTTP statuses that are not 200
HALF_LINE = "half a line"
CUT_OFF = "cut off"  # whole lines, but no reason of the end; then [DONE] does only after a count of tokens
WRONG_JSON = "wrong JSON"
ERROR_INSIDE = "error inside a 200"
NO_STREAM = "not a stream"
LONG_LINE = "line too long"
TOO_LARGE = "answer too large"
NOT_SENT = "not sent"  # by the lab: the server cannot take it, or gave it up
FAILURES = (
    *(REFUSED, LOST, TIMEOUT, STALLED, RATE_LIMITED, SERVER_ERROR, BAD_REQUEST, HALF_LINE),
    *(CUT_OFF, WRONG_JSON, ERROR_INSIDE, NO_STREAM, LONG_LINE, TOO_LARGE, NOT_SENT),
)
"""Classes of failure of a request."""


@dataclass(frozen=True)
class Capability:
    """One thing that a server can do or not: `answer` is yes, no or unknown, `how` is how that was found out."""

    name: str
    answer: str
    how: str


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server as far as it gives them. What it does not give is None."""

    n_slots: int | None = None  # requests that it works on at a time
    n_ctx: int | None = None  # of one slot
    model_file: str | None = None  # without its folder
    quantization: str | None = None
    build: str | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server and what it was seen to be able to do."""

    url: str  # without user, password, query
    api: str  # chat, completions
    server: str | None = None  # llama-server, vLLM, ...
    version: str | None = None
    capabilities: tuple[Capability, ...] = ()
    accepted: tuple[str, ...] = ()  # options that are not in every server and that this one takes
    settings: ServerSettings | None = None

    def can(self, name: str) -> str:
        """The answer for the capability `name`; unknown where it was not asked."""
        return next((one.answer for one in self.capabilities if one.name == name), UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asked for, and its place in the measurement."""

    n_prompt: int | None  # tokens that the prompt was to have; None where they could not be counted
    n_prompt_counted: int | None = None  # by the server, before the request was sent
    counted_by: str | None = None  # tokenize, usage
    n_gen: int
    temperature: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None  # None: not asked for
    repeat: int = 0
    warmup: bool = False
    prompt_sha256: str | None = None  # of the text, its nonce left out
    load: Load | None = None  # None: it ran alone


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts of tokens. What was not given is None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt
    reasoning_tokens: int | None = None  # of the completion
    counted_by: str = "usage"  # usage: by the server, in the stream; twin: of the same request, not streamed; tokenize


@dataclass(frozen=True, kw_only=True)
class ServerTimings:
    """llama-server's own times of a request."""

    n_cached: int | None = None
    n_prompt: int | None = None  # without those that were cached
    prompt_ms: float | None = None
    n_gen: int | None = None
    gen_ms: float | None = None
    n_draft: int | None = None
    n_draft_accepted: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a server does apart from running the model, asked for piece by piece: of `lab overhead`, raw.

    Each of the columns holds times from the sending of a question with the prompt in it to the first byte of its
    answer. None: the server has no such question.
    """

    http_ns: tuple[int, ...] = ()  # the server only reads it
    template_ns: tuple[int, ...] | None = None  # it applies the template of a chat
    tokenize_ns: tuple[int, ...] | None = None  # it tokenises the prompt
    whole: ServerTimings | None = None  # of the same request, not streamed
    sampling_ns: tuple[int, ...] | None = None  # the server's way to choose a token, in the lab's engine


@dataclass(frozen=True)
class Events:
    """One row per event of the stream, as columns of equal length. `n_bytes` is on the wire, inside HTTP.

    `n_tokens` is None where the server does not say how many tokens are in an event.
    """

    arrive_ns: tuple[int, ...] = ()
    n_bytes: tuple[int, ...] = ()
    kind: tuple[str, ...] = ()
    n_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lengths = {name: len(column) for name, column in columns.items() if column is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of events differ in length: {lengths}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it went."""

    asked: Asked
    started_at: str
    scheduled_ns: int | None = None  # None in a closed loop
    sent_ns: int | None = None  # taken before the request is written; None where there was no connection
    was_connected: bool | None = None  # whether the connection had been opened before
    headers_ns: int | None = None  # when the head of the answer arrived
    ended_ns: int | None = None  # when the last byte arrived
    failed_ns: int | None = None  # when a request that had been sent was known to have failed, or was given up
    status: str  # ok, failed
    failure: str | None = None  # one of FAILURES
    error: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    events: Events
    tokens_by: str | None = None  # where n_tokens of the events comes from: token ids, usage, timings, logprobs
    usage: Usage | None = None
    timings: ServerTimings | None = None
    pieces: Pieces | None = None  # of `lab overhead`


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One line of a results file: a request, self-contained."""

    session: str
    machine: Machine  # of the client
    endpoint: Endpoint
    model: str  # as the server calls it
    request: Request
    schema: int = SCHEMA
    client_error_ns: tuple[int, int] | None = None  # of a stamp, when the session began: the median, and 99 %


def short_name(model: str) -> str:
    """A model as records name it: of a path only the file, since a folder may say whose machine it is."""
    return re.split(r"[/\\]", model)[-1] if re.match(r"/|\\|[A-Za-z]:[/\\]", model) else model
