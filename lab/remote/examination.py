"""What a server is, which of its models is measured, and what it can do.

First come requests that generate nothing (models, settings, version), then at most MOST_PROBES
requests of a few tokens: one with each set of options until the server accepts it, and a longer
one.

Sources of the addresses: llama.cpp tools/server/README.md (/props); vLLM (/version); Ollama
docs/api.md (/api/version); lmstudio.ai/docs/developer/rest (/api/v0/models).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Unpack, cast

from lab.core import request as kinds, request_times as times, shell
from lab.core.arguments import Reaching
from lab.core.lists import first_known, plural
from lab.core.record import OK
from lab.core.request import (
    Asked,
    Capability,
    Endpoint,
    Request,
    ServerSettings,
    short_name,
)
from lab.errors import LabError, printable
from lab.remote import formats
from lab.remote.access import TIMEOUT_S, Access, access, name_or_none
from lab.remote.client import Client
from lab.remote.formats import MOST_CTX, JsonReply, as_count, as_dict
from lab.remote.servers import TOKENIZE, USAGE, Server, TokenCounter, tokenizers
from lab.runner import machine

# Maximum number of requests that generate tokens, besides one for counting prompts
MOST_PROBES = 12
MOST_NAMES = 8  # models that a message lists
MOST_PARTS = 4  # of a path that a name has
DEFAULT_TAG = ":latest"  # which Ollama's users leave out
SHORT = "Say yes."
N_SHORT = 4
LONG = "Count from one to five in words, then stop. " + "Do not write anything else. " * 12
N_LONG = 48

_LADDER = (
    formats.OPTIONS,
    (formats.INCLUDE_USAGE, formats.SEED),
    formats.OPENAI_OPTIONS,
    (),
)
"""Options that a request is tried with, until the server accepts it."""

_FINAL = (kinds.REFUSED, kinds.TIMEOUT, kinds.STALLED, kinds.TOO_LARGE, kinds.RATE_LIMITED)
"""Failures after which no other request is tried."""

OWNERS = {
    "me": "llama_cpp.server",
    "sglang": "SGLang",
    "vllm": "vLLM",
    "library": "Ollama",
    "koboldcpp": "KoboldCpp",
    "tabbyapi": "TabbyAPI",
    "llama-swap": "llama-swap",
}
"""Programs by what they write as the owner of their models. Some of them answer at the addresses of
other programs too."""

CONTEXT_FIELDS = ("max_model_len", "context_window", "context_length", "max_context_length")
"""Fields of a model in a server's list that hold its longest context."""

LM_STUDIO_FIELDS = {"state", "compatibility_type"}

_REJECTED = (401, 403)
_UNAVAILABLE = (502, 503, 504, 529)
"""Statuses of a server, or a proxy before it, that cannot answer now."""

_TRANSIENT = (*_FINAL, kinds.SERVER_ERROR, kinds.LOST)
"""Failures of a server that could do what was asked."""


def reaching_of(options: Mapping[str, object]) -> Reaching:
    """The part of `options` that says how to reach a server."""
    names = [name for name in Reaching.__annotations__ if name in options]
    return cast(Reaching, {name: options[name] for name in names})


@dataclass(frozen=True)
class Probes:
    """Two answers of a server, through the interface and with the options that it accepts."""

    api: str
    accepted: tuple[str, ...]
    short: Request
    long: Request

    @property
    def working(self) -> tuple[str, ...]:
        """The accepted options that have an effect."""
        has_no_effect = {
            formats.INCLUDE_USAGE: counted(self.short) is None,
            formats.CONTINUOUS_USAGE: self.short.tokens_by != "usage",
            formats.TOKEN_IDS: self.short.tokens_by != "token ids",
            formats.TIMINGS: self.short.timings is None,
            formats.IGNORE_EOS: self.long.status == OK and self.long.finish_reason != "length",
        }
        return tuple(option for option in self.accepted if not has_no_effect.get(option))


@contextmanager
def connect(
    url: str,
    model: str | None = None,
    say: Callable[[str], object] = lambda sentence: None,
    budget_s: float | None = None,
    **how: Unpack[Reaching],
) -> Iterator[Server]:
    """Examine the server at `url` and connect to it; the client ends with the block.

    `model` is the server's name for it (None: its only one). `budget_s` is the limit of all that
    is asked within the block. Calls `say` with a sentence before the
    first answers. LabError if the server cannot be reached, the choice of the model is unclear, or
    it does not stream.
    """
    address = access(
        url, how.get("api_key_env"), how.get("header", ()), how.get("timeout", TIMEOUT_S)
    )
    with Client(address, budget_s, say) as client:
        yield _examine(client, model, how.get("api"), say)


def _examine(
    client: Client, model: str | None, api: str | None, say: Callable[[str], object]
) -> Server:
    address = client.access
    entries = _listed_models(client, model)
    models = named_models(list(entries), address)
    chosen = choose_model(models, model)
    program, version, settings = _describe(client, entries.get(chosen.id, {}))
    say(
        f"waiting for the first answers, at most {address.timeout_s:g} s for each (--timeout) ..."
    )
    probes = _probe(client, chosen, api)
    counter = _counter(client, chosen.id, probes)
    endpoint = Endpoint(
        url=address.url,
        api=probes.api,
        server=program,
        version=version,
        capabilities=tuple(_capabilities(probes, counter, settings)),
        accepted=probes.working,
        settings=settings,
    )
    names = tuple(listed.name for listed in models)
    return Server(endpoint, chosen.id, chosen.name, names, counter, client, machine.describe())


def _listed_models(client: Client, model: str | None) -> dict[str, dict[str, object]]:
    """The entries of the server's list of models by their ids. LabError if it has none and the
    user named none."""
    address = client.access
    answer = client.ask(f"{address.url}/models")
    if answer.status is None:
        raise LabError(
            f"No server answers at {address.url}: {answer.error}.", _hint(address, None)
        )
    listing = as_dict(answer.parsed)
    entries = listing.get("data", listing.get("models"))
    if answer.status in _REJECTED or (model is None and not isinstance(entries, list)):
        raise LabError(
            f"{address.url}/models lists no models. Its answer: {_error_of(answer)}",
            _hint(address, answer.status),
        )
    by_id: dict[str, dict[str, object]] = {}
    for entry in entries if isinstance(entries, list) else ():
        fields = as_dict(entry)
        ids = [fields.get(field) for field in ("id", "model", "name")]
        for model_id in (*ids, entry):  # an entry may be its id
            if isinstance(model_id, str):
                by_id.setdefault(model_id, fields)
                break
    return by_id


class ListedModel(NamedTuple):
    """A model of a server: the id that is sent, and the name that is shown and kept."""

    id: str
    name: str


def named_models(ids: Sequence[str], address: Access) -> list[ListedModel]:
    """The models with these ids. Of a path the end is shown that no other path has; an id that may
    not be shown is called by its place in the list."""
    n_alike = Counter(map(short_name, ids))
    models = []
    for number, model_id in enumerate(ids, 1):
        name = short_name(model_id)
        n_parts = 1
        while n_alike[name] > 1 and n_parts < MOST_PARTS:
            n_parts += 1
            name = short_name(model_id, n_parts)
            n_alike[name] = [short_name(other, n_parts) for other in ids].count(name)
        shown = name_or_none(printable(name).strip(), address)
        models.append(ListedModel(model_id, shown or f"model-{number}"))
    return models


def _error_of(answer: JsonReply) -> str:
    return answer.error or "200, JSON without `data`"


def choose_model(models: Sequence[ListedModel], requested: str | None) -> ListedModel:
    """The model to measure. LabError if the server has several and none was named, or lacks the
    named one."""
    if requested is None and len(models) == 1:
        return models[0]
    if requested is not None:
        for is_meant in (
            lambda model: model.id == requested,
            lambda model: model.name == requested,
            lambda model: short_name(model.id) == requested,
            lambda model: model.id == f"{requested}{DEFAULT_TAG}",
        ):
            meant = list(filter(is_meant, models))
            if len(meant) == 1:
                return meant[0]
        if not models:
            return ListedModel(requested, short_name(requested))
    names = ", ".join(shell.join(model.name) for model in models[:MOST_NAMES])
    if len(models) > MOST_NAMES:
        names = f"{names} and {len(models) - MOST_NAMES} more"
    if requested is not None:
        raise LabError(f"The server has no model {requested}.", f"It has {names}.")
    raise LabError(
        f"The server lists {len(models) or 'no'} models.",
        f"Name one: --model {names or 'NAME'}",
    )


def _probe(client: Client, model: ListedModel, api: str | None) -> Probes:
    """The first answers that the server streams. LabError if it streams none."""
    failed: list[Request] = []
    for tried in (api,) if api else (kinds.CHAT, kinds.COMPLETIONS):
        for options in _options_to_try(failed):
            short = _generate(client, model.id, tried, SHORT, N_SHORT, options)
            if times.has_too_many(short):  # it may know the limit by its newer name only
                others = (*options, formats.MAX_COMPLETION)
                other = _generate(client, model.id, tried, SHORT, N_SHORT, others)
                if other.status == OK and not times.has_too_many(other):
                    options, short = others, other
            if short.status == OK:
                long = _generate(client, model.id, tried, LONG, N_LONG, options)
                return Probes(tried, options, short, long)
            failed.append(short)
            if short.failure in _FINAL or short.http_status in (*_REJECTED, *_UNAVAILABLE):
                raise _streams_nothing(client.access, model.name, failed)
            if not formats.is_about_a_field(short):
                break
    raise _streams_nothing(client.access, model.name, failed)


def _options_to_try(failed: Sequence[Request]) -> Iterator[tuple[str, ...]]:
    """All options; without those that the answer names; then fewer and fewer. `failed` are the
    requests so far."""
    refused: set[str] = set()
    for step, options in enumerate((_LADDER[0], *_LADDER)):
        if step == 1 and not refused:
            continue
        yield tuple(option for option in options if option not in refused)
        refused |= formats.named_options(failed[-1].error)


def _generate(
    client: Client, model: str, api: str, prompt: str, n_gen: int, options: tuple[str, ...]
) -> Request:
    seed = 1 if formats.SEED in options else None
    asked = Asked(n_prompt=None, n_gen=n_gen, seed=seed, **formats.limits(options))
    ask = formats.ask_for(api, model, prompt, asked, options)
    return client.send(ask, api).request


def _streams_nothing(address: Access, model: str, failed: Sequence[Request]) -> LabError:
    """The error for a server that streams no answer."""
    problem = failed[-1]
    for request in failed:
        is_missing = request.http_status in (404, 405)  # an interface that exists says more
        if not is_missing or formats.NO_MODEL in (request.error or ""):
            problem = request
    status = problem.http_status or 0
    hint = (
        "Try again (some servers load a model on its first request), or read the server's log."
    )
    if problem.failure == kinds.NO_STREAM:
        hint = (
            "Check that the address is the server's own: "
            "a proxy or a login page may answer instead."
        )
    if formats.NO_MODEL in (problem.error or ""):
        hint = "Load it on the server, or name another one with --model."
    if 300 <= status < 400 or status in (*_REJECTED, 429):
        hint = _hint(address, status)
    cause = f"{problem.failure}: {problem.error}"
    return LabError(
        f"The server at {address.url} does not stream an answer of {model} ({cause}).", hint
    )


def _counter(client: Client, model: str, probes: Probes) -> TokenCounter | None:
    """The first way in which the server counts the tokens of a prompt; None if there is none."""

    def by_usage(text: str) -> int | None:
        request = _generate(client, model, probes.api, text, 1, probes.working)
        if request.failure in _TRANSIENT or (request.failure and request.usage is None):
            hint = _hint(client.access, request.http_status)
            if request.http_status == 200:
                hint = "Try again, or read the server's log."
            raise LabError(
                f"The server did not count the tokens of a prompt of {len(text):,} characters "
                f"({request.failure}: {request.error}).",
                hint,
            )
        return request.usage.prompt_tokens if request.usage else None

    ways = [TokenCounter(TOKENIZE, count) for count in tokenizers(client, probes.api, model)]
    for way in (*ways, TokenCounter(USAGE, by_usage)):
        if way.count("word") is not None:
            return way
    return None


def _hint(address: Access, status: int | None) -> str:
    """What to do about an answer with this status (None: no answer)."""
    scheme = "https:// for a server with TLS"
    if address.url.startswith("https:"):
        scheme = "http:// for a server without TLS"
    if status is None:
        return f"Start the server, or check the address (use {scheme})."
    if status in _REJECTED and address.api_key_env:
        return f"Check the key in the environment variable {address.api_key_env}."
    if status in _REJECTED:
        return "Name the environment variable that contains the key: --api-key-env NAME"
    if status == 429:
        return "The server limits the rate of requests. Wait, then try again."
    if 300 <= status < 400:
        return "The lab does not follow redirects. Give the target address."
    if not address.url.endswith("/v1"):
        return f"Check the address (use {scheme}): OpenAI's API is mostly at HOST:PORT/v1."
    return f"Check the address (use {scheme}), or name a model with --model."


def _describe(
    client: Client, entry: dict[str, object]
) -> tuple[str | None, str | None, ServerSettings | None]:
    """The server's program, version and settings, as far as it reports them. `entry`: its list's
    one of the model."""
    address = client.access
    props = client.object_at("/props")
    if "default_generation_settings" in props:
        settings = _llama_server_settings(props, address)
        return "llama-server", settings.build, settings
    n_ctx = first_known(as_count(entry.get(name), MOST_CTX) for name in CONTEXT_FIELDS)
    settings_of_model = ServerSettings(n_ctx=n_ctx) if n_ctx else None
    owner = str(entry.get("owned_by")).lower()
    program = OWNERS.get(owner)
    vllm = client.object_at("/version")
    if "version" in vllm and program in (None, "vLLM"):
        return program, name_or_none(vllm["version"], address), settings_of_model
    if program is None and _is_lm_studio(client.object_at("/api/v0/models")):
        return "LM Studio", None, None
    ollama = client.object_at("/api/version")
    if "version" in ollama and program in (None, "Ollama"):
        return "Ollama", name_or_none(ollama["version"], address), None
    return program, None, settings_of_model


def _is_lm_studio(listing: dict[str, object]) -> bool:
    """Whether a list of models has the fields of LM Studio's: other servers answer any path."""
    entries = listing.get("data")
    if not isinstance(entries, list):
        return False
    return any(as_dict(entry).keys() >= LM_STUDIO_FIELDS for entry in entries)


def _llama_server_settings(props: dict[str, object], address: Access) -> ServerSettings:
    path = props.get("model_path")
    file = re.split(r"[/\\]", path)[-1] if isinstance(path, str) else None
    return ServerSettings(
        n_slots=as_count(props.get("total_slots")),
        n_ctx=as_count(as_dict(props["default_generation_settings"]).get("n_ctx"), MOST_CTX),
        model_file=name_or_none(file, address),
        quantization=name_or_none(props.get("model_ftype"), address),
        build=name_or_none(props.get("build_info"), address),
    )


def _capabilities(
    probes: Probes, counter: TokenCounter | None, settings: ServerSettings | None
) -> Iterator[Capability]:
    """What two answers, of N_SHORT and of N_LONG tokens, show of a server."""
    yield _streaming(probes)
    yield from _of_streams(probes)
    yield from _of_server(probes, counter, settings)


def _of_streams(probes: Probes) -> Iterator[Capability]:
    """What the events of the answers say."""
    usage = counted(probes.short)
    yield _capability(
        "usage in streams",
        usage is not None,
        f"the stream counts {usage} tokens",
        "no counts in the stream",
    )
    source = probes.short.tokens_by
    yield _capability(
        "token ids", source == "token ids", "in every event", "none in the stream"
    )
    yield _capability(
        "tokens per event",
        source is not None,
        f"from {source}",
        "events do not say how many tokens they contain",
    )
    yield _ignoring_eos(probes)
    usages = [request.usage for request in (probes.short, probes.long) if request.usage]
    yield _capability(
        "cached tokens",
        any(usage.cached_tokens is not None for usage in usages),
        "answers count them",
        "answers do not count them",
    )


def counted(request: Request) -> int | None:
    """The tokens of an answer by the server's count, which may be wrong."""
    return request.usage.completion_tokens if request.usage else None


def _ignoring_eos(probes: Probes) -> Capability:
    """Whether answers go on to their limit; unknown if the server has a lower one of its own."""
    name = formats.IGNORE_EOS
    n = counted(probes.long)
    if probes.long.status != OK:
        how = f"the request for an answer of {N_LONG} tokens failed: {probes.long.failure}"
        return Capability(name, kinds.UNKNOWN, how)
    if name not in probes.working:
        how = "rejected, or an answer ended early despite it"
        return Capability(name, kinds.NO, how)
    if n is not None and n < N_LONG:
        how = f"an answer of {N_LONG} tokens had {n}, and its finish reason is length"
        return Capability(name, kinds.UNKNOWN, how)
    return Capability(name, kinds.YES, f"an answer had all {N_LONG} tokens with it")


def _of_server(
    probes: Probes, counter: TokenCounter | None, settings: ServerSettings | None
) -> Iterator[Capability]:
    """What the server says besides its answers."""
    counts_by_usage = "the usage of small requests counts the tokens of prompts"
    yield _capability(
        TOKENIZE,
        counter is not None and counter.by == TOKENIZE,
        "the server's tokenizer counts the tokens of prompts",
        counts_by_usage if counter else "nothing counts the tokens of prompts",
    )
    settings = settings or ServerSettings()
    yield _capability(
        "settings",
        settings.n_slots is not None,
        f"{plural(settings.n_slots or 0, 'slot')}, a context of {settings.n_ctx} tokens",
        "the server does not report its number of slots",
    )
    yield _capability(
        "server timings",
        probes.short.timings is not None,
        "llama-server's `timings`",
        "none in the stream",
    )


def _capability(name: str, has_it: bool, seen: str, missing: str) -> Capability:
    if has_it:
        return Capability(name, kinds.YES, seen)
    return Capability(name, kinds.NO, missing)


def _streaming(probes: Probes) -> Capability:
    """Whether answers come in pieces; unknown if the short one came as one event."""
    name = "streaming"
    if times.came_at_once(probes.long):
        n_events = len(times.generated(probes.long))
        how = (
            f"{n_events} events with content arrived at once: "
            "the answer was buffered until its end"
        )
        return Capability(name, kinds.NO, how)
    n_events = len(times.generated(probes.short))
    answer = kinds.YES if n_events > 1 else kinds.UNKNOWN
    return Capability(name, answer, f"an answer of {N_SHORT} tokens came as {n_events} events")
