"""Find out what a server can do.

First come requests that generate nothing (models, settings, version). Then follow at most MOST_PROBES requests of a few
tokens: chat or completions, with all options that the lab can use, or fewer if the server rejects unknown ones. A
capability that cannot be observed is `unknown`.

Sources of the addresses: llama.cpp tools/server/README.md (/props); vLLM, /version; Ollama docs/api.md (/api/version);
docs.sglang.io native_api (/get_server_info, /server_info); lmstudio.ai/docs/developer/rest (/api/v0/models).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lab.core import request as kinds
from lab.core import request_times as times
from lab.core import shell
from lab.core.lists import plural
from lab.core.record import OK
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
    ServerSettings,
    short_name,
)
from lab.errors import LabError, printable
from lab.features.serve import formats as options
from lab.features.serve import prompts
from lab.features.serve.access import Access, JsonReply, ask, hidden
from lab.features.serve.client import Client
from lab.features.serve.formats import as_count, as_dict, ask_for
from lab.features.serve.send_plan import SendPlan

MOST_PROBES = 10
"""Maximum number of requests that generate tokens, besides one for counting prompts."""

N_SHORT, N_LONG = 4, 48
SHORT = "Say yes."
LONG = "Count from one to five in words, then stop. " + "Do not write anything else. " * 12

SAY_S = 5.0
"""Interval of the progress messages while waiting for an answer."""

_LADDER = (
    options.OPTIONS,
    (options.INCLUDE_USAGE,),
    options.OPENAI_OPTIONS,
    (),
)


@dataclass(frozen=True)
class Probed:
    """The endpoint, the model to measure, and all models that the server lists.

    `own_name` is the server's name of the model, for requests; it may contain a secret, which `model` masks.
    """

    endpoint: Endpoint
    own_name: str = dataclasses.field(repr=False)
    model: str
    models: tuple[str, ...]
    counter: prompts.Counter | None  # None: the tokens of a prompt cannot be counted


def probe(
    access: Access,
    client: Client,
    model: str | None = None,
    api: str | None = None,
    say: Callable[[str], object] = lambda words: None,
) -> Probed:
    """Examine a server with a model (None: its only one), through chat or completions (None: either).

    Calls `say` with a sentence every few seconds while it waits. LabError if no server answers, the choice of the model
    is unclear, or no answer is a stream.
    """
    listed = ask(access, f"{access.url}/models")
    if listed.status is None:
        raise LabError(f"No server answers at {access.url}: {listed.error}.", _hint(access, None))
    has_list = isinstance(as_dict(listed.parsed).get("data"), list)
    if listed.status in (401, 403) or (model is None and not has_list):
        answered = listed.error or "200, JSON without `data`"
        raise LabError(f"{access.url}/models lists no models. Its answer: {answered}", _hint(access, listed.status))
    own_names = tuple(one for entry in _entries(listed.raw) if len(one := str(entry.get("id", ""))) in range(1, 500))
    models = tuple(hidden(name, access) for name in own_names)
    shown = choose_model(models, None if model is None else hidden(model, access))
    chosen = own_names[models.index(shown)] if shown in models and model not in own_names else model or shown
    name, version, settings = describe(access, listed, chosen)
    asking = _Asking(client, access.timeout_s, chosen, say)
    used, accepted, first = _first_answer(access, asking, shown, (api,) if api else (CHAT, COMPLETIONS))
    free, forced = _pair(asking, used, accepted)
    working = tuple(_that_work(accepted, first, free, forced))
    endpoint = Endpoint(url=access.url, api=used, server=name, version=version, accepted=working, settings=settings)
    counter = prompts.counter(access, endpoint, chosen)
    capabilities = tuple(_capabilities(first, free, forced, counter, settings))
    return Probed(dataclasses.replace(endpoint, capabilities=capabilities), chosen, shown, models, counter)


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


def _entries(parsed: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The entries of an answer of /v1/models."""
    data = as_dict(parsed).get("data")
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
    if (props := _get(access, "/props")) and "default_generation_settings" in props:
        generation = as_dict(props["default_generation_settings"])
        settings = ServerSettings(
            n_slots=as_count(props.get("total_slots")),
            n_ctx=as_count(generation.get("n_ctx")),
            model_file=_file_name(props.get("model_path")),
            quantization=_string(props.get("model_ftype")),
            build=_string(props.get("build_info")),
        )
        return "llama-server", settings.build, settings
    if (ollama := _get(access, "/api/version")) and "version" in ollama:
        return "Ollama", _string(ollama["version"]), None
    entry = next((entry for entry in _entries(listed.raw) if entry.get("id") == model), {})
    limit = as_count(entry.get("max_model_len"))
    settings_of_model = ServerSettings(n_ctx=limit) if limit else None
    owner = entry.get("owned_by")
    if owner == "sglang":
        info = _get(access, "/get_server_info") or _get(access, "/server_info") or {}
        slots = as_count(info.get("max_running_requests"))
        return "SGLang", _string(info.get("version")), ServerSettings(n_ctx=limit, n_slots=slots)
    if (vllm := _get(access, "/version")) and "version" in vllm:
        return "vLLM" if owner == "vllm" else None, _string(vllm["version"]), settings_of_model
    if (studio := _get(access, "/api/v0/models")) and "data" in studio:
        return "LM Studio", None, None
    return ("llama_cpp.server" if owner == "me" else None), None, settings_of_model


@dataclass(frozen=True)
class _Asking:
    """What the requests of a probe have in common."""

    client: Client
    timeout_s: float
    model: str  # the server's name of it
    say: Callable[[str], object]

    def send(self, api: str, prompt: str, n_gen: int, accepted: tuple[str, ...], ignore_eos: bool | None) -> Request:
        """Send one request; `say` gets the waiting time."""
        temperature = options.temperature(accepted)
        asked = Asked(n_prompt=None, n_gen=n_gen, temperature=temperature, ignore_eos=ignore_eos)
        began = said = time.monotonic()

        def watch() -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= SAY_S:
                said = now
                self.say(
                    f"waiting for a first answer of {n_gen} tokens through {api}: {now - began:.0f} s of at most "
                    f"{self.timeout_s:g} s (--timeout)"
                )

        asks = (ask_for(api, self.model, prompt, asked, accepted),)
        plan = SendPlan(asks=asks, api=api, timeout_s=self.timeout_s)
        (reply,) = self.client.run(plan, watch)
        return reply.request


def _first_answer(
    access: Access, asking: _Asking, shown: str, apis: tuple[str, ...]
) -> tuple[str, tuple[str, ...], Request]:
    """The first interface and set of options for which a short request returns a stream."""
    problem: Request | None = None
    for api in apis:
        for accepted in _LADDER:
            request = asking.send(api, SHORT, N_SHORT, accepted, None)
            if request.status == OK:
                return api, accepted, request
            if request.failure not in (kinds.BAD_REQUEST, kinds.NO_STREAM) or request.http_status in (
                401,
                403,
                404,
                405,
            ):
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


def _pair(asking: _Asking, api: str, accepted: tuple[str, ...]) -> tuple[Request, Request | None]:
    """The same prompt with a short answer, without and with ignore_eos, and with the server's cache."""
    takes = tuple(option for option in accepted if option != options.NO_CACHE)
    free = asking.send(api, LONG, N_LONG, takes, False)
    if options.IGNORE_EOS not in takes:
        return free, None
    return free, asking.send(api, LONG, N_LONG, takes, True)


def _that_work(accepted: tuple[str, ...], first: Request, free: Request, forced: Request | None) -> Iterator[str]:
    """The accepted options, without those that visibly had no effect."""
    usage = times.n_generated(first) is not None
    does = {
        options.INCLUDE_USAGE: usage,
        options.CONTINUOUS_USAGE: first.tokens_by == "usage",
        options.TOKEN_IDS: first.tokens_by == "token ids",
        options.TIMINGS: first.timings is not None,
        options.IGNORE_EOS: _ignores_eos(free, forced)[0] != NO,
    }
    yield from (option for option in accepted if does.get(option, True))


def _capabilities(
    first: Request,
    free: Request,
    forced: Request | None,
    counter: prompts.Counter | None,
    settings: ServerSettings | None,
) -> Iterator[Capability]:
    requests = [request for request in (first, free, forced) if request and request.status == OK]
    yield _streaming(first, requests)
    usage, by = times.n_generated(first), first.tokens_by
    yield _seen("usage in streams", usage is not None, f"the stream counts {usage} tokens", "no counts in the stream")
    yield _seen("token ids", by == "token ids", "in every event", "none in the stream")
    yield _seen("tokens per event", by is not None, f"from {by}", "events do not say how many tokens they contain")
    yield Capability("ignore_eos", *_ignores_eos(free, forced))
    cached = [request.usage.cached_tokens for request in requests if request.usage]
    n_cached = max((n for n in cached if n is not None), default=None)
    how = f"a repeated prompt: {n_cached} tokens from a cache"
    yield _seen("cached tokens", n_cached is not None, how, "the answer to a repeated prompt has no such count")
    counting = counter.by if counter else None
    yield Capability("tokenize", YES if counting == prompts.TOKENIZE else NO, _COUNTING[counting])
    n_slots = settings.n_slots if settings else None
    how = f"{plural(n_slots or 0, 'slot')}, a context of {settings.n_ctx if settings else None} tokens"
    yield _seen("settings", n_slots is not None, how, "the server does not report its number of slots")
    reasons = any(kinds.REASONING in request.events.kind for request in requests)
    yield Capability("reasoning field", YES if reasons else UNKNOWN, "seen" if reasons else "no answer had reasoning")
    yield _seen("server timings", first.timings is not None, "llama-server's `timings`", "none in the stream")


def _streaming(first: Request, requests: Sequence[Request]) -> Capability:
    """Whether events arrived one by one: the short answer had several, and no long one arrived at once."""
    n_content = [len(times.generated(request)) for request in requests]
    long = [request for request, n in zip(requests, n_content, strict=True) if n >= times.AT_ONCE_EVENTS]
    if long and all(map(times.came_at_once, long)):
        how = f"{max(n_content)} events with content arrived at once: the answer was buffered until its end"
        return Capability("streaming", NO, how)
    n_first = len(times.generated(first))
    how = f"an answer of {N_SHORT} tokens came as {n_first} events"
    return Capability("streaming", YES if n_first > 1 else UNKNOWN, how)


_COUNTING = {
    prompts.TOKENIZE: "the server's tokenizer counts the tokens of prompts",
    prompts.USAGE: "no /tokenize; the usage of small requests counts the tokens of prompts",
    None: "no /tokenize and no usage: the tokens of prompts cannot be counted",
}


def _seen(name: str, is_there: bool, how: str, how_not: str) -> Capability:
    return Capability(name, YES if is_there else NO, how if is_there else how_not)


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


def _get(access: Access, path: str) -> dict[str, Any] | None:
    answer = ask(access, access.root + path)
    return answer.parsed if answer.status == 200 else None


def _string(value: Any) -> str | None:
    return printable(value)[:200] if isinstance(value, str) and value else None


def _file_name(value: Any) -> str | None:
    path = _string(value)
    return None if path is None else path.replace("\\", "/").rsplit("/", 1)[-1]
