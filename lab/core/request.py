"""The data of a request to a server.

A server shows no steps, only events: pieces of a stream, with their arrival times. A request is a
separate kind of line in results files, complete with the client's machine and the endpoint;
request_times.py derives all figures. `sent_ns` counts from the start of the request's plan, all
other `_ns` from `sent_ns`. No field contains keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lab.core.bounds import Context, Count, Nanoseconds, Number, Parts, Seed, Size, Text, Whole
from lab.core.record import OK, SCHEMA, Machine, Noise, Value

ROLE = "role"  # the assistant's role, without content
TEXT = "text"  # also token ids that do not form a complete letter yet
REASONING = "reasoning"
TOOL = "tool"  # a call of a tool: its name, or a part of its arguments
HIDDEN = "hidden"  # tokens that the server counts, and whose text does not come or comes later
USAGE = "usage"  # counts of tokens, without content
DONE = "done"
PING = "ping"  # a comment, which keeps the connection open
ERROR = "error"
OTHER = "other"  # such as the finish reason
VISIBLE = (TEXT, REASONING, TOOL)
GENERATED = (*VISIBLE, HIDDEN)
"""Kinds of events, those that carry generated content, and those whose tokens were generated."""
CHAT = "chat"
COMPLETIONS = "completions"  # the two interfaces of an OpenAI-compatible server
YES = "yes"
NO = "no"
UNKNOWN = "unknown"

REFUSED = "connection refused"
"""Also: a name that does not resolve, a certificate that is not trusted."""
LOST = "connection lost"
TIMEOUT = "timeout"
STALLED = "stalled"
RATE_LIMITED = "rate limited"  # HTTP 429
SERVER_ERROR = "server error"  # HTTP 5xx
BAD_REQUEST = "bad request"  # other HTTP statuses that are not 200
HALF_LINE = "half a line"
CUT_OFF = "cut off"
"""Complete lines without a finish reason; [DONE] suffices only after a token count."""
WRONG_JSON = "wrong JSON"
ERROR_INSIDE = "error inside a 200"
NO_STREAM = "not a stream"
NO_CONTENT = "no content"  # though the server counts generated tokens
LONG_LINE = "line too long"
TOO_LARGE = "answer too large"
IMPOSSIBLE = "impossible numbers"
TOO_EARLY = "answer before the request"
"""Classes of failure of a request."""


_PATH = re.compile(r"/|\\|[A-Za-z]:[/\\]|~[^/\\]*[/\\]|\.{1,2}[/\\]|file:")
_REPOSITORY = "models--"
_REVISION = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Capability:
    name: Text
    answer: Text  # yes, no, unknown
    how: Text  # how the lab found out


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings that a server reports. None: not reported."""

    n_slots: Parts | None = None  # requests that it processes at the same time
    n_ctx: Context | None = None  # of one slot
    model_file: Text | None = None  # without its folder
    quantization: Text | None = None
    build: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server and its observed capabilities."""

    url: Text  # without user, password, query
    api: Text  # chat, completions
    server: Text | None = None  # llama-server, vLLM, ...
    version: Text | None = None
    capabilities: tuple[Capability, ...] = ()
    accepted: tuple[Text, ...] = ()  # non-standard options that this server accepts
    settings: ServerSettings | None = None

    def can(self, name: str) -> str:
        """The answer for the capability `name`; unknown if it was not examined."""
        answers = {capability.name: capability.answer for capability in self.capabilities}
        return answers.get(name, UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asked for, and its place in the measurement."""

    n_prompt: Count | None  # intended prompt tokens; None if they could not be counted
    n_prompt_counted: Count | None = None  # by the server, before the request was sent
    counted_by: Text | None = None  # tokenize, usage
    n_gen: Count
    temperature: Number | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None  # None: not requested
    repeat: Count = 0
    warmup: bool = False
    experiment: Text | None = None  # None: it was sent alone
    # What identifies the experiment's case
    case: dict[Text, Value] = field(default_factory=dict)
    place: dict[Text, Value] = field(default_factory=dict)  # of the request within its case


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts of tokens. None: not given."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None  # of the prompt
    reasoning_tokens: Count | None = None  # of the completion, also where they did not come
    counted_by: Text = "usage"  # usage: in the stream; tokenize: by the server's tokenizer


@dataclass(frozen=True, kw_only=True)
class ServerTimings:
    """The times of a request that llama-server reports."""

    n_cached: Count | None = None
    n_prompt: Count | None = None  # without cached tokens
    prompt_ms: Number | None = None
    n_gen: Count | None = None
    gen_ms: Number | None = None


@dataclass(frozen=True)
class Events:
    """Columns of equal length with one row for each event of the stream."""

    arrive_ns: tuple[Nanoseconds, ...] = ()
    n_bytes: tuple[Size, ...] = ()  # within HTTP
    kind: tuple[Text, ...] = ()
    n_tokens: tuple[Count, ...] | None = None
    """None: the server does not say how many tokens are in an event."""

    def __post_init__(self) -> None:
        lengths = {"arrive_ns": len(self.arrive_ns)}
        lengths |= {"n_bytes": len(self.n_bytes), "kind": len(self.kind)}
        if self.n_tokens is not None:
            lengths["n_tokens"] = len(self.n_tokens)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of events differ in length: {lengths}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, its events, and how it ended."""

    asked: Asked
    started_at: Text
    # Taken before the request is written; None without a connection
    sent_ns: Nanoseconds | None = None
    headers_ns: Nanoseconds | None = None  # when the headers of the answer arrived
    ended_ns: Nanoseconds | None = None  # when the last byte arrived
    failed_ns: Nanoseconds | None = None  # when a sent request failed or timed out
    status: Text  # ok, failed
    failure: Text | None = None  # such as TIMEOUT
    error: Text | None = None
    http_status: Whole | None = None
    finish_reason: Text | None = None
    events: Events
    tokens_by: Text | None = None
    """The source of the events' n_tokens: token ids, usage, timings."""
    usage: Usage | None = None
    timings: ServerTimings | None = None
    # What the server sent as counts of tokens and cannot be one, such as -3
    wrong_counts: dict[Text, Number] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False)
class RequestRecord:
    """A line of a results file: a complete request."""

    session: Text
    machine: Machine  # of the client
    endpoint: Endpoint
    model: Text  # as the server calls it
    request: Request
    schema: Whole = SCHEMA
    kind: Text = "request"  # of a line
    # The words that asked for the session, without secrets
    command: tuple[Text, ...] | None = None
    # What disturbed this machine meanwhile; None: the server is elsewhere
    noise: Noise | None = None

    def __repr__(self) -> str:
        n_gen = self.request.asked.n_gen
        return f"<RequestRecord: {self.model}, {n_gen} tokens, {self.request.status}>"

    @property
    def status(self) -> str:
        return self.request.status

    @property
    def error(self) -> str | None:
        return self.request.error

    @property
    def started_at(self) -> str:
        return self.request.started_at

    @property
    def experiment(self) -> str | None:
        return self.request.asked.experiment

    @property
    def case(self) -> dict[str, Value]:
        return self.request.asked.case

    @property
    def is_warmup(self) -> bool:
        return self.request.asked.warmup

    @property
    def is_good(self) -> bool:
        """Whether the request succeeded and is no warm-up, so that its times count."""
        return self.status == OK and not self.is_warmup

    @property
    def model_name(self) -> str:
        return short_name(self.model)


def short_name(model: str, n_parts: int = 1) -> str:
    """A model's name for records: only the last `n_parts` of a path, because its folders may
    identify a person. A folder of a hub's cache has the name of its repository.
    """
    if not _PATH.match(model):
        return model
    parts = [part for part in re.split(r"[/\\]", model) if part]
    repositories = [part for part in parts if part.startswith(_REPOSITORY)]
    if parts and repositories and _REVISION.fullmatch(parts[-1]):
        return repositories[-1].removeprefix(_REPOSITORY).replace("--", "/")
    return "/".join(parts[-n_parts:]) or model
