"""What a server can do, found out by asking it.

Questions that generate nothing come first (models, settings, version). Then at most MOST_PROBES requests of a few
tokens: chat or completions, with all options that the lab has a use for, and with fewer where a server refuses those
that it does not know. What cannot be seen is `unknown`, never a guess.

Sources of the addresses: llama.cpp tools/server/README.md (/props); vLLM, /version; Ollama docs/api.md (/api/version);
docs.sglang.io native_api (/get_server_info, /server_info); lmstudio.ai/docs/developer/rest (/api/v0/models).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import (
    BAD_REQUEST,
    CHAT,
    COMPLETIONS,
    NO,
    NO_STREAM,
    REASONING,
    REFUSED,
    UNKNOWN,
    YES,
    Asked,
    Capability,
    Endpoint,
    Request,
    ServerSettings,
)
from lab.endpoints import body as options
from lab.endpoints import prompts
from lab.endpoints.access import Access, ask
from lab.endpoints.body import ask_for
from lab.endpoints.client import Client
from lab.endpoints.fields import as_count, as_dict
from lab.endpoints.wire import Plan
from lab.errors import LabError, printable

MOST_PROBES = 10
"""Requests for tokens that a probe sends at most, besides one for the counting of prompts."""

N_SHORT, N_LONG = 4, 48
SHORT = "Say yes."
LONG = "Count from one to five in words, then stop. " + "Do not write anything else. " * 12

_LADDER = (
    options.OPTIONS,
    (options.INCLUDE_USAGE,),
    options.OPENAI_OPTIONS,
    (),
)


@dataclass(frozen=True)
class Probed:
    """What a server is: the endpoint, the model that was asked, and all models that it names."""

    endpoint: Endpoint
    model: str
    models: tuple[str, ...]
    counter: prompts.Counter | None  # None: nobody can count the tokens of a prompt


def probe(access: Access, client: Client, model: str | None = None, api: str | None = None) -> Probed:
    """Find out what a server can do with a model (None: its only one), through chat or completions (None: either).

    Raises LabError where nobody answers, the model is not clear, or no request comes back as a stream.
    """
    listed = ask(access, f"{access.url}/models")
    if listed.status is None:
        hint = "Start it, or check the address."
        if access.url.startswith("https:"):
            hint += " One without TLS begins with http://."
        raise LabError(f"No server answers at {access.url}: {listed.error}.", hint)
    if listed.status in (401, 403):
        hint = "Name the environment variable that holds the key: --api-key-env NAME"
        if access.api_key_env:
            hint = f"Look at what the environment variable {access.api_key_env} holds."
        raise LabError(f"{access.url}: {listed.error}.", hint)
    models = model_names(listed.parsed)
    chosen = choose_model(models, model)
    name, version, settings = describe(access, listed.parsed, chosen)
    used, accepted, first = _first_answer(access, client, chosen, (api,) if api else (CHAT, COMPLETIONS))
    free, forced = _pair(client, chosen, used, accepted)
    working = tuple(_that_work(accepted, first, free, forced))
    endpoint = Endpoint(url=access.url, api=used, server=name, version=version, accepted=working, settings=settings)
    counter = prompts.counter(access, endpoint, chosen)
    capabilities = tuple(_capabilities(first, free, forced, counter, settings))
    return Probed(dataclasses.replace(endpoint, capabilities=capabilities), chosen, models, counter)


def model_names(parsed: dict[str, Any] | None) -> tuple[str, ...]:
    """The names in an answer of /v1/models."""
    data = as_dict(parsed).get("data")
    entries = data if isinstance(data, list) else []
    return tuple(printable(str(as_dict(entry)["id"])) for entry in entries if "id" in as_dict(entry))


def choose_model(models: tuple[str, ...], asked: str | None) -> str:
    """The model to ask. Raises LabError where the server has several and none was named, or another one was."""
    if asked is not None and (not models or asked in models):
        return asked
    of_that_file = [model for model in models if short_name(model) == asked]
    if len(of_that_file) == 1:
        return of_that_file[0]
    names = ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
    if asked is not None:
        raise LabError(f"The server has no model {asked}.", f"It has {names}.")
    if len(models) != 1:
        raise LabError(f"The server has {len(models) or 'no'} models.", f"Name one with --model: {names or 'its name'}")
    return models[0]


def short_name(model: str) -> str:
    """A model as records name it: of a path only the file, since a folder may say whose machine it is."""
    return re.split(r"[/\\]", model)[-1] if re.match(r"/|\\|[A-Za-z]:[/\\]", model) else model


def describe(
    access: Access, listed: dict[str, Any] | None, model: str
) -> tuple[str | None, str | None, ServerSettings | None]:
    """Which server it is, its version, and its settings, as far as it gives them."""
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
    entries = as_dict(listed).get("data")
    named = (
        [as_dict(entry) for entry in entries if as_dict(entry).get("id") == model] if isinstance(entries, list) else []
    )
    entry = named[0] if named else {}
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


def _first_answer(
    access: Access, client: Client, model: str, apis: tuple[str, ...]
) -> tuple[str, tuple[str, ...], Request]:
    """The first interface and set of options with which a short request comes back as a stream."""
    problem: Request | None = None
    for api in apis:
        for accepted in _LADDER:
            request = _send(client, api, model, SHORT, N_SHORT, accepted, None)
            if request.status == OK:
                return api, accepted, request
            problem = request
            if request.failure not in (BAD_REQUEST, NO_STREAM) or request.http_status in (401, 403, 404, 405):
                break
        if problem and problem.failure == REFUSED:
            break
    cause = f"{problem.failure}: {problem.error}" if problem else "nothing was asked"
    raise LabError(
        f"The server at {access.url} streams no answer of {model} ({cause}).",
        "Look into the server's log; some servers load a model only on its first request: try again.",
    )


def _pair(client: Client, model: str, api: str, accepted: tuple[str, ...]) -> tuple[Request, Request | None]:
    """The same prompt, whose answer is short, without and with ignore_eos. No cache is forbidden here."""
    takes = tuple(option for option in accepted if option != options.NO_CACHE)
    free = _send(client, api, model, LONG, N_LONG, takes, False)
    if options.IGNORE_EOS not in takes:
        return free, None
    return free, _send(client, api, model, LONG, N_LONG, takes, True)


def _send(
    client: Client, api: str, model: str, prompt: str, n_gen: int, accepted: tuple[str, ...], ignore_eos: bool | None
) -> Request:
    temperature = None if options.MAX_COMPLETION in accepted else 0.0  # OpenAI's reasoning models refuse any
    asked = Asked(n_prompt=None, n_gen=n_gen, temperature=temperature, ignore_eos=ignore_eos)
    (reply,) = client.run(Plan(asks=(ask_for(api, model, prompt, asked, accepted),), api=api, timeout_s=300.0))
    return reply.request


def _that_work(accepted: tuple[str, ...], first: Request, free: Request, forced: Request | None) -> Iterator[str]:
    """The options that were seen to do something, or of which that cannot be seen."""
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
    n_content = len(times.generated(first))
    usage = times.n_generated(first)
    streams = YES if n_content > 1 else UNKNOWN
    yield Capability("streaming", streams, f"an answer of {N_SHORT} tokens came as {n_content} events with content")
    yield _seen("usage in streams", usage is not None, f"the stream counts {usage} tokens", "no counts in the stream")
    has_ids = first.tokens_by == "token ids"
    yield _seen("token ids", has_ids, "in every event", "none in the stream")
    by = first.tokens_by
    yield _seen("tokens per event", by is not None, f"from {by}", "no event says how many tokens it has")
    yield Capability("ignore_eos", *_ignores_eos(free, forced))
    cached = [request.usage.cached_tokens for request in requests if request.usage]
    counts = [n for n in cached if n is not None]
    how = f"a repeated prompt: {max(counts)} tokens from a cache" if counts else ""
    yield _seen("cached tokens", bool(counts), how, "a repeated prompt came back without such a count")
    counting = counter.by if counter else None
    yield Capability("tokenize", YES if counting == prompts.TOKENIZE else NO, _COUNTING[counting])
    has_slots = settings is not None and settings.n_slots is not None
    slots = "1 slot" if settings and settings.n_slots == 1 else f"{settings.n_slots} slots" if settings else ""
    how = f"{slots}, a context of {settings.n_ctx} tokens" if settings else ""
    yield _seen("settings", has_slots, how, "the server gives no number of slots")
    reasons = any(REASONING in request.events.kind for request in requests)
    yield Capability("reasoning field", YES if reasons else UNKNOWN, "seen" if reasons else "no answer had reasoning")
    yield _seen("server timings", first.timings is not None, "llama-server's `timings`", "none in the stream")


_COUNTING = {
    prompts.TOKENIZE: "prompts are sized by the server's own tokenizer",
    prompts.USAGE: "no /tokenize; prompts are sized by the usage of small requests",
    None: "no /tokenize, and no usage: prompts cannot be sized",
}


def _seen(name: str, is_there: bool, how: str, how_not: str) -> Capability:
    return Capability(name, YES if is_there else NO, how if is_there else how_not)


def _ignores_eos(free: Request, forced: Request | None) -> tuple[str, str]:
    """Whether an answer that ends by itself without ignore_eos goes on to its limit with it."""
    if forced is None:
        return NO, "the server refuses requests with it"
    ends = [request.finish_reason for request in (free, forced) if request.status == OK]
    if ends == ["stop", "length"]:
        return YES, f"an answer that ended by itself had {N_LONG} tokens with it"
    if ends[1:] == ["stop"]:
        return NO, "an answer ended by itself with it too"
    if ends == ["length", "length"]:
        return UNKNOWN, "the model did not end by itself without it either"
    return UNKNOWN, "the server gives no reason of the end"


def _get(access: Access, path: str) -> dict[str, Any] | None:
    answer = ask(access, access.root + path)
    return answer.parsed if answer.status == 200 else None


def _string(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) and value else None


def _file_name(value: Any) -> str | None:
    path = _string(value)
    return None if path is None else path.replace("\\", "/").rsplit("/", 1)[-1]
