"""What a server is, which of its models is measured, and what it can do; prompts of exactly n of its tokens.

with connect("http://127.0.0.1:8080/v1") as server:
    prompt = server.prompt(1000, text, seed=1, repeat=0)
    ask = server.ask(prompt, server.asked(prompt, n_prompt=1000, n_gen=64))
    results.save(path, server.record(session, server.counted(ask, server.send(ask))))

First come requests that generate nothing (models, settings, version). Then follow at most MOST_PROBES requests of a few
tokens: chat or completions, with all options that the lab can use, or fewer if the server rejects unknown ones. A
capability that cannot be observed is `unknown`.

Sources of the addresses: llama.cpp tools/server/README.md (/props); vLLM, /version; Ollama docs/api.md (/api/version);
docs.sglang.io native_api (/get_server_info, /server_info); lmstudio.ai/docs/developer/rest (/api/v0/models).
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from lab.core import request as kinds
from lab.core import request_times as times
from lab.core import results, shell
from lab.core.lists import plural
from lab.core.record import OK, Machine
from lab.core.request import (
    CHAT,
    COMPLETIONS,
    NO,
    UNKNOWN,
    YES,
    Asked,
    Capability,
    Endpoint,
    Request,
    RequestRecord,
    ServerSettings,
    short_name,
)
from lab.errors import LabError, printable
from lab.features.serve import access as reaching
from lab.features.serve import formats, prompts
from lab.features.serve.access import Access, JsonReply, hidden
from lab.features.serve.client import Client
from lab.features.serve.formats import as_count, as_dict
from lab.features.serve.prompts import Counter, Prompt
from lab.features.serve.send_plan import TIMEOUT_S, Ask, Reply, SendPlan
from lab.runner import machine
from lab.runner.prompts import TEXT, offset, source

MOST_PROBES = 10
"""Maximum number of requests that generate tokens, besides one for counting prompts."""

N_SHORT, N_LONG = 4, 48
SHORT = "Say yes."
LONG = "Count from one to five in words, then stop. " + "Do not write anything else. " * 12

SAY_S = 5.0
"""Interval of the progress messages while waiting for an answer."""

_LADDER = (formats.OPTIONS, (formats.INCLUDE_USAGE,), formats.OPENAI_OPTIONS, ())
"""Options that a request is tried with, until the server accepts it."""


class Reaching(TypedDict, total=False):
    """How to reach a server, and how long to wait for it."""

    api: str | None  # chat or completions; None: what the server has
    api_key_env: str | None  # the environment variable with the key
    header: Sequence[str]  # each NAME: VALUE
    timeout: float  # seconds after which a request times out


def reaching_of(options: Mapping[str, Any]) -> Reaching:
    """The part of `options` that says how to reach a server."""
    how = {name: options[name] for name in Reaching.__annotations__ if name in options}
    return cast(Reaching, how)


@dataclass(frozen=True)
class Server:
    """An examined server with one of its models, and the client for it."""

    endpoint: Endpoint
    own_name: str = dataclasses.field(repr=False)  # the server's name of the model; may contain a secret
    model: str  # the same, masked
    models: tuple[str, ...]  # all that it lists
    counter: Counter | None  # None: the tokens of a prompt cannot be counted
    access: Access
    client: Client
    machine: Machine  # of the client

    @property
    def model_name(self) -> str:
        """The model as records name it."""
        return short_name(self.model)

    def prompt(self, n: int, text: str, seed: int, repeat: int) -> Prompt:
        """A prompt of n tokens, cut from `text` at a place given by the seed and the repeat.

        LabError if the server cannot count tokens, or n is too small.
        """
        start = offset(seed, repeat, len(text.split()))
        return prompts.make(n, self.how_to_count, text, random.Random(), start)

    @property
    def how_to_count(self) -> Counter:
        """The server's way to count the tokens of a prompt. LabError if it cannot."""
        if self.counter is None:
            raise LabError(
                f"The server at {self.endpoint.url} cannot count the tokens of prompts: it has no tokenizer endpoint, "
                "and no token counts in its answers.",
                "Turn one of them on, or measure another server.",
            )
        return self.counter

    def too_long(self, n_prompt: int, n_gen: int) -> LabError | None:
        """Why a request of this length does not fit into the server's context; None if it fits or may fit."""
        n_ctx = self.endpoint.settings.n_ctx if self.endpoint.settings else None
        if n_ctx is None or n_prompt + n_gen <= n_ctx:
            return None
        return LabError(
            f"{n_prompt:,} prompt tokens and {n_gen:,} more do not fit into the server's context of {n_ctx:,} tokens "
            "(of one request).",
            "Use fewer tokens, or start the server with a longer context.",
        )

    def asked(self, prompt: Prompt, n_prompt: int, n_gen: int, **more: Any) -> Asked:
        """The record's description of a request with this prompt. `more`: other fields, such as the seed."""
        return Asked(
            n_prompt=n_prompt,
            n_prompt_counted=prompt.n_tokens,
            counted_by=prompt.counted_by,
            n_gen=n_gen,
            temperature=self.temperature,
            ignore_eos=self.ignores_eos,
            prompt_sha256=hashlib.sha256(prompt.body.encode()).hexdigest(),
            **more,
        )

    def ask(self, prompt: Prompt, asked: Asked, is_sent_once: bool = False) -> Ask:
        """The request for a prompt. Unless it is sent only once, each sending gets another nonce."""
        nonce = None if is_sent_once else prompt.nonce
        return formats.ask_for(self.endpoint.api, self.own_name, prompt.text, asked, self.endpoint.accepted, nonce)

    @property
    def temperature(self) -> float | None:
        """0, or None if the server's models may reject a temperature."""
        return formats.temperature(self.endpoint.accepted)

    @property
    def ignores_eos(self) -> bool | None:
        """True if the server supports ignore_eos, otherwise None."""
        return True if formats.IGNORE_EOS in self.endpoint.accepted else None

    def send(self, ask: Ask) -> Reply:
        """Send one request, and wait for its answer."""
        plan = SendPlan(asks=(ask,), api=self.endpoint.api, timeout_s=self.access.timeout_s)
        (reply,) = self.client.run(plan)
        return reply

    def counted(self, ask: Ask, reply: Reply) -> Request:
        """The request with a token count, if the stream had none; this may send it once more."""
        return prompts.counted(self.access, self.endpoint.api, self.own_name, ask, reply)

    def record(self, session: str, request: Request) -> RequestRecord:
        """A request as a line of a results file."""
        return RequestRecord(
            session=session, machine=self.machine, endpoint=self.endpoint, model=self.model_name, request=request
        )

    def new_file(self, folder: Path) -> Path:
        """A new results file."""
        where = machine.slug(self.endpoint.server or "server")
        return results.new_file(folder, f"{machine.slug(self.model_name)}-{where}")


@contextmanager
def connect(
    url: str,
    model: str | None = None,
    say: Callable[[str], object] = lambda words: None,
    **how: Unpack[Reaching],
) -> Iterator[Server]:
    """Examine the server at `url` and connect to it; the client's process ends with the block.

    `model` is the server's name for it (None: its only one). Calls `say` with a sentence every few seconds while it
    waits for the first answers. LabError if the server cannot be reached, the choice of the model is unclear, or it
    does not stream.
    """
    asked = reaching.access(url, how.get("api_key_env"), how.get("header", ()), how.get("timeout", TIMEOUT_S))
    with Client(asked) as client:
        yield examine(asked, client, model, how.get("api"), say)


def examine(
    access: Access,
    client: Client,
    model: str | None = None,
    api: str | None = None,
    say: Callable[[str], object] = lambda words: None,
) -> Server:
    """The server with a model (None: its only one), through chat or completions (None: either). As `connect`."""
    listed = reaching.ask(access, f"{access.url}/models")
    if listed.status is None:
        raise LabError(f"No server answers at {access.url}: {listed.error}.", _hint(access, None))
    has_list = isinstance(as_dict(listed.parsed).get("data"), list)
    if listed.status in (401, 403) or (model is None and not has_list):
        answered = listed.error or "200, JSON without `data`"
        raise LabError(f"{access.url}/models lists no models. Its answer: {answered}", _hint(access, listed.status))
    own_names = tuple(one for entry in _entries(listed) if len(one := str(entry.get("id", ""))) in range(1, 500))
    models = tuple(hidden(name, access) for name in own_names)
    shown = choose_model(models, None if model is None else hidden(model, access))
    chosen = own_names[models.index(shown)] if shown in models and model not in own_names else model or shown
    program, version, settings = describe(access, listed, chosen)

    def send(api: str, prompt: str, n_gen: int, accepted: tuple[str, ...], ignore_eos: bool | None = None) -> Request:
        asked = Asked(n_prompt=None, n_gen=n_gen, temperature=formats.temperature(accepted), ignore_eos=ignore_eos)
        began = said = time.monotonic()

        def watch() -> None:
            nonlocal said
            if (now := time.monotonic()) - said >= SAY_S:
                said = now
                say(
                    f"waiting for a first answer of {n_gen} tokens through {api}: {now - began:.0f} s of at most "
                    f"{access.timeout_s:g} s (--timeout)"
                )

        plan = (formats.ask_for(api, chosen, prompt, asked, accepted),)
        (reply,) = client.run(SendPlan(asks=plan, api=api, timeout_s=access.timeout_s), watch)
        return reply.request

    used, accepted, first = _first_answer(access, send, shown, (api,) if api else (CHAT, COMPLETIONS))
    # the same prompt with a short answer, without and with ignore_eos, and with the server's cache
    takes = tuple(option for option in accepted if option != formats.NO_CACHE)
    free = send(used, LONG, N_LONG, takes, False)
    forced = send(used, LONG, N_LONG, takes, True) if formats.IGNORE_EOS in takes else None
    has_no_effect = {
        formats.INCLUDE_USAGE: times.n_generated(first) is None,
        formats.CONTINUOUS_USAGE: first.tokens_by != "usage",
        formats.TOKEN_IDS: first.tokens_by != "token ids",
        formats.TIMINGS: first.timings is None,
        formats.IGNORE_EOS: _ignores_eos(free, forced)[0] == NO,
    }
    working = tuple(option for option in accepted if not has_no_effect.get(option))
    endpoint = Endpoint(url=access.url, api=used, server=program, version=version, accepted=working, settings=settings)
    counter = prompts.counter(access, endpoint, chosen)
    capabilities = tuple(_capabilities(first, free, forced, counter, settings))
    endpoint = dataclasses.replace(endpoint, capabilities=capabilities)
    return Server(endpoint, chosen, shown, models, counter, access, client, machine.describe())


def _hint(access: Access, status: int | None) -> str:
    """What to do about an answer with this status (None: no answer)."""
    if status in (401, 403):
        name = access.api_key_env
        hint = f"Check the key in the environment variable {name}." if name else ""
        return hint or "Name the environment variable that contains the key: --api-key-env NAME"
    if status == 429:
        return "The server limits the rate of requests. Wait, then try again."
    other = "http:// for a server without TLS" if access.url.startswith("https:") else "https:// for a server with TLS"
    if status is None:
        return f"Start the server, or check the address (use {other})."
    if 300 <= status < 400:
        return "The lab does not follow redirects. Give the target address."
    return f"Check the address (use {other}), or name a model with --model."


def _entries(listed: JsonReply) -> list[dict[str, Any]]:
    """The entries of an answer of /v1/models."""
    data = as_dict(listed.raw).get("data")
    return [as_dict(entry) for entry in data] if isinstance(data, list) else []


def choose_model(models: tuple[str, ...], asked: str | None) -> str:
    """The model to measure. LabError if the server has several and none was named, or lacks the named one."""
    if asked is not None and (not models or asked in models):
        return asked
    of_that_file = [model for model in models if short_name(model) == asked]
    if len(of_that_file) == 1:
        return of_that_file[0]
    names = ", ".join(map(shell.join, models[:8])) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
    if asked is not None:
        raise LabError(f"The server has no model {asked}.", f"It has {names}.")
    if len(models) != 1:
        raise LabError(f"The server lists {len(models) or 'no'} models.", f"Name one: --model {names or 'NAME'}")
    return models[0]


def describe(access: Access, listed: JsonReply, model: str) -> tuple[str | None, str | None, ServerSettings | None]:
    """The server's program, version and settings, as far as it reports them. `model` is its name of the model."""

    def get(path: str) -> dict[str, Any]:
        answer = reaching.ask(access, access.root + path)
        return as_dict(answer.parsed) if answer.status == 200 else {}

    def text(value: Any) -> str | None:
        return printable(value)[:200] if isinstance(value, str) and value else None

    if "default_generation_settings" in (props := get("/props")):
        path = text(props.get("model_path"))
        settings = ServerSettings(
            n_slots=as_count(props.get("total_slots")),
            n_ctx=as_count(as_dict(props["default_generation_settings"]).get("n_ctx")),
            model_file=path and path.replace("\\", "/").rsplit("/", 1)[-1],
            quantization=text(props.get("model_ftype")),
            build=text(props.get("build_info")),
        )
        return "llama-server", settings.build, settings
    if "version" in (ollama := get("/api/version")):
        return "Ollama", text(ollama["version"]), None
    entry = next((entry for entry in _entries(listed) if entry.get("id") == model), {})
    owner, limit = entry.get("owned_by"), as_count(entry.get("max_model_len"))
    if owner == "sglang":
        info = get("/get_server_info") or get("/server_info")
        slots = as_count(info.get("max_running_requests"))
        return "SGLang", text(info.get("version")), ServerSettings(n_ctx=limit, n_slots=slots)
    of_model = ServerSettings(n_ctx=limit) if limit else None
    if "version" in (vllm := get("/version")):
        return "vLLM" if owner == "vllm" else None, text(vllm["version"]), of_model
    if "data" in get("/api/v0/models"):
        return "LM Studio", None, None
    return ("llama_cpp.server" if owner == "me" else None), None, of_model


def _first_answer(
    access: Access, send: Callable[[str, str, int, tuple[str, ...]], Request], shown: str, apis: tuple[str, ...]
) -> tuple[str, tuple[str, ...], Request]:
    """The first interface and set of options for which a short request returns a stream."""
    problem: Request | None = None
    for api in apis:
        for accepted in _LADDER:
            request = send(api, SHORT, N_SHORT, accepted)
            if request.status == OK:
                return api, accepted, request
            is_choosy = request.failure in (kinds.BAD_REQUEST, kinds.NO_STREAM)
            if not is_choosy or request.http_status in (401, 403, 404, 405):
                break
        if problem is None or problem.http_status in (404, 405):  # the error of an existing interface says more
            problem = request
        if request.failure in (kinds.REFUSED, kinds.TIMEOUT, kinds.STALLED, kinds.TOO_LARGE):
            break
    cause = f"{problem.failure}: {problem.error}" if problem else "no request was sent"
    hint = "Try again (some servers load a model on its first request), or read the server's log."
    if problem and (problem.http_status in (401, 403, 429) or 300 <= (problem.http_status or 0) < 400):
        hint = _hint(access, problem.http_status)
    elif problem and problem.failure == kinds.NO_STREAM:
        hint = "Check that the address is the server's own: a proxy or a login page may answer instead."
    raise LabError(f"The server at {access.url} does not stream an answer of {shown} ({cause}).", hint)


_COUNTING = {
    prompts.TOKENIZE: "the server's tokenizer counts the tokens of prompts",
    prompts.USAGE: "no /tokenize; the usage of small requests counts the tokens of prompts",
    None: "no /tokenize and no usage: the tokens of prompts cannot be counted",
}


def _capabilities(
    first: Request, free: Request, forced: Request | None, counter: Counter | None, settings: ServerSettings | None
) -> Iterator[Capability]:
    def seen(name: str, is_there: bool, how: str, how_not: str, otherwise: str = NO) -> Capability:
        return Capability(name, YES if is_there else otherwise, how if is_there else how_not)

    requests = [request for request in (first, free, forced) if request and request.status == OK]
    n_content = [len(times.generated(request)) for request in requests]
    long = [one for one, n in zip(requests, n_content, strict=True) if n >= times.AT_ONCE_EVENTS]
    if long and all(map(times.came_at_once, long)):
        how = f"{max(n_content)} events with content arrived at once: the answer was buffered until its end"
        yield Capability("streaming", NO, how)
    else:
        how = f"an answer of {N_SHORT} tokens came as {len(times.generated(first))} events"
        yield seen("streaming", len(times.generated(first)) > 1, how, how, UNKNOWN)
    usage, by = times.n_generated(first), first.tokens_by
    yield seen("usage in streams", usage is not None, f"the stream counts {usage} tokens", "no counts in the stream")
    yield seen("token ids", by == "token ids", "in every event", "none in the stream")
    yield seen("tokens per event", by is not None, f"from {by}", "events do not say how many tokens they contain")
    yield Capability("ignore_eos", *_ignores_eos(free, forced))
    cached = [request.usage.cached_tokens for request in requests if request.usage]
    n_cached = max((n for n in cached if n is not None), default=None)
    how = f"a repeated prompt: {n_cached} tokens from a cache"
    yield seen("cached tokens", n_cached is not None, how, "the answer to a repeated prompt has no such count")
    counting = counter.by if counter else None
    yield Capability("tokenize", YES if counting == prompts.TOKENIZE else NO, _COUNTING[counting])
    n_slots = settings.n_slots if settings else None
    how = f"{plural(n_slots or 0, 'slot')}, a context of {settings.n_ctx if settings else None} tokens"
    yield seen("settings", n_slots is not None, how, "the server does not report its number of slots")
    reasons = any(kinds.REASONING in request.events.kind for request in requests)
    yield seen("reasoning field", reasons, "seen", "no answer had reasoning", UNKNOWN)
    yield seen("server timings", first.timings is not None, "llama-server's `timings`", "none in the stream")


def _ignores_eos(free: Request, forced: Request | None) -> tuple[str, str]:
    """Whether an answer that stops early without ignore_eos continues to its limit with it."""
    if forced is None:
        return NO, "the server rejects requests with it"
    ends = [request.finish_reason for request in (free, forced) if request.status == OK]
    if ends == ["stop", "length"]:
        return YES, f"an answer that stops early without it kept generating to {N_LONG} tokens"
    if ends[1:] == ["stop"]:
        return NO, "an answer stopped early despite it"
    if ends == ["length", "length"]:
        return UNKNOWN, f"the answer had all {N_LONG} tokens even without it, so its effect is not visible"
    return UNKNOWN, "the server sends no finish_reason"


def prompt_text(prompt: str) -> str:
    """The text from which prompts are cut. LabError for random token ids, which servers do not accept."""
    text = source(prompt).text
    if text is None:
        raise LabError(
            f"--prompt {prompt} is not possible through a server, which accepts only text.",
            f"Use --prompt {TEXT}, some of the lab's texts by name, or a text file.",
        )
    return text
