"""What a server is, which of its models is measured, and what it can do; prompts of exactly n of its tokens.

with connect("http://127.0.0.1:8080/v1") as server:
    ask = server.ask(n_prompt=1000, n_gen=64, text=text)
    results.save(path, server.record(session, server.counted(server.send(ask))))

First come requests that generate nothing (models, settings, version), then at most MOST_PROBES requests of a few
tokens. A server with /tokenize counts the tokens of any text (a chat with its template). Without it, the usage of a
request for one token says how long its prompt was. If a stream has no token counts (llama_cpp.server streams no usage),
the server's tokenizer counts the answer's text, which may join separately generated tokens. An answer that ended at its
limit has as many as were requested.

Sources of the addresses: llama.cpp tools/server/README.md (/props, /tokenize, /apply-template); vLLM, /version and
vllm/entrypoints/serve/tokenize/protocol.py (/tokenize); llama-cpp-python llama_cpp/server/app.py
(/extras/tokenize/count); Ollama docs/api.md (/api/version); lmstudio.ai/docs/developer/rest (/api/v0/models).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from lab.core import request as kinds, request_times as times, results, shell
from lab.core.lists import first_known, plural
from lab.core.record import OK, Machine
from lab.core.request import (
    Asked,
    Capability,
    Endpoint,
    Request,
    RequestRecord,
    ServerSettings,
    Usage,
    short_name,
)
from lab.errors import LabError
from lab.process import spawning
from lab.remote import formats
from lab.remote.access import Access, Client, access, hidden
from lab.remote.formats import (
    TIMEOUT_S,
    Ask,
    Reply,
    as_count,
    as_dict,
    fresh_nonce,
    n_items,
    prompt_fields,
)
from lab.runner import machine
from lab.runner.prompts import TEXT, source

TOKENIZE = "tokenize"
USAGE = "usage"

MOST_COUNTS = 24  # maximum number of counts for one prompt
FILLERS = (" a", " the", " x", " 1", ".")
"""Texts that make a prompt a little longer; in most vocabularies one token each."""

MOST_PROBES = 9  # maximum number of requests that generate tokens, besides one for counting prompts
SHORT = "Say yes."
N_SHORT = 4
LONG = "Count from one to five in words, then stop. " + "Do not write anything else. " * 12
N_LONG = 48

_LADDER = (formats.OPTIONS, (formats.INCLUDE_USAGE,), formats.OPENAI_OPTIONS, ())
"""Options that a request is tried with, until the server accepts it."""

_FINAL = (kinds.REFUSED, kinds.TIMEOUT, kinds.STALLED, kinds.TOO_LARGE, kinds.RATE_LIMITED)
"""Failures after which no other request is tried."""


@dataclass(frozen=True)
class Counter:
    """A server's way to count the tokens of a prompt, with everything that it adds."""

    by: str  # tokenize, usage
    count: Callable[[str], int | None]


class Reaching(TypedDict, total=False):
    """How to reach a server, and how long to wait for it."""

    api: str | None  # chat or completions; None: what the server has
    api_key_env: str | None  # the environment variable with the key
    header: Sequence[str]  # each NAME: VALUE
    timeout: float  # seconds after which a request times out


def reaching_of(options: Mapping[str, Any]) -> Reaching:
    """The part of `options` that says how to reach a server."""
    return cast(
        Reaching, {name: options[name] for name in Reaching.__annotations__ if name in options}
    )


def needs_count(request: Request) -> bool:
    """Whether a request succeeded, and nobody counted the tokens of its answer."""
    return request.status == OK and times.n_generated(request) is None


@dataclass(frozen=True)
class Server:
    """An examined server with one of its models, and the client for it."""

    endpoint: Endpoint
    own_name: str = dataclasses.field(
        repr=False
    )  # the server's name of the model; may contain a secret
    model: str  # the same, masked
    models: tuple[str, ...]  # all that it lists
    counter: Counter | None  # None: the tokens of a prompt cannot be counted
    client: Client
    machine: Machine  # of the client

    def count(self, text: str) -> int:
        """The tokens of a prompt. LabError if the server cannot count them, or no longer does."""
        if self.counter is None:
            raise LabError(
                f"The server at {self.endpoint.url} cannot count the tokens of prompts: it has no tokenizer endpoint, "
                "and no token counts in its answers.",
                "Turn one of them on, or measure another server.",
            )
        if (n_tokens := self.counter.count(text)) is None:
            what = f"The server no longer reports token counts (asked for a prompt of {len(text):,} characters)."
            raise LabError(what, "Check that it still runs (its log may say why), then try again.")
        return n_tokens

    def least(self, n_prompt: int) -> int:
        """Tokens of the shortest prompt: a nonce, and what the server adds. LabError if `n_prompt` is less."""
        if (n_least := self.count(fresh_nonce())) > n_prompt:
            what = f"A prompt of {plural(n_prompt, 'token')} is not possible: the shortest one has {n_least:,}."
            hint = "Its first letters and the chat template need that many (--api completions has no template)."
            raise LabError(what, hint)
        return n_least

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

    def ask(self, n_prompt: int, n_gen: int, text: str, **more: Any) -> Ask:
        """A request with a prompt of n_prompt tokens: a nonce, which each sending renews, then words of `text`.

        If no text of exactly n_prompt tokens is found within MOST_COUNTS, it is the longest one below that. `more`:
        other fields of Asked, such as the seed. LabError if the server does not count, or the prompt is too short.
        """
        words = text.split()
        nonce = fresh_nonce()
        counts = dict[str, int]()

        def count(text: str) -> int:
            if text not in counts:
                counts[text] = self.count(text)
            return counts[text]

        def first_words(k: int) -> str:
            n_whole, rest = divmod(k, len(words))
            return " ".join([nonce, *words * n_whole, *words[:rest]])

        n_least = n_low = self.least(n_prompt)
        per_word = 1.5
        low = 0
        high = 10 * n_prompt  # `high` words are too many
        while n_low < n_prompt and high - low > 1 and len(counts) < MOST_COUNTS - 2 * len(FILLERS):
            guess = low + max(1, int((n_prompt - n_low) / per_word))
            guess = guess if guess < high else (low + high) // 2
            n_guess = count(first_words(guess))
            per_word = max(0.2, (n_guess - n_least) / guess)
            low, n_low, high = (
                (guess, n_guess, high) if n_guess <= n_prompt else (low, n_low, guess)
            )
        made = first_words(low)
        for filler in FILLERS:
            missing = n_prompt - count(made)
            made = next(
                (
                    more
                    for more in (made + filler * missing, made + filler)
                    if count(more) <= n_prompt
                ),
                made,
            )
        accepted = self.endpoint.accepted
        by = self.counter.by if self.counter else None
        counted: dict[str, Any] = {"n_prompt_counted": count(made), "counted_by": by}
        asked = Asked(n_prompt=n_prompt, n_gen=n_gen, **counted, **formats.limits(accepted), **more)
        return formats.ask_for(self.endpoint.api, self.own_name, made, asked, accepted, nonce)

    def send(self, ask: Ask, watch: Callable[[], None] = lambda: None) -> Reply:
        """Send one request, and wait for its answer; calls `watch` meanwhile."""
        return self.client.send(ask, self.endpoint.api, watch=watch)

    def counted(self, reply: Reply) -> Request:
        """The request with a token count by the server's tokenizer, if its stream had none."""
        request = reply.request
        if not needs_count(request):
            return request
        ways = tokenizers(self.client, kinds.COMPLETIONS, self.own_name, is_prompt=False)
        if (n := first_known(count(reply.text) for count in ways)) is None:
            return request
        if request.finish_reason == "length" and n >= times.JOINED * request.asked.n_gen:
            n = request.asked.n_gen
        return dataclasses.replace(request, usage=Usage(completion_tokens=n, counted_by=TOKENIZE))

    def record(self, session: str, request: Request) -> RequestRecord:
        """A request as a line of a results file."""
        own: dict[str, Any] = {
            "machine": self.machine,
            "endpoint": self.endpoint,
            "model": short_name(self.model),
        }
        return RequestRecord(session=session, request=request, **own)

    def new_file(self, folder: Path) -> Path:
        """A new results file."""
        model, where = (
            machine.slug(name)
            for name in (short_name(self.model), self.endpoint.server or "server")
        )
        return results.new_file(folder, f"{model}-{where}")


@contextmanager
def connect(
    url: str,
    model: str | None = None,
    say: Callable[[str], object] = lambda words: None,
    **how: Unpack[Reaching],
) -> Iterator[Server]:
    """Examine the server at `url` and connect to it; the client's process ends with the block.

    `model` is the server's name for it (None: its only one). Calls `say` with a sentence before the first answers.
    LabError if the server cannot be reached, the choice of the model is unclear, or it does not stream.
    """
    asked = access(
        url, how.get("api_key_env"), how.get("header", ()), how.get("timeout", TIMEOUT_S)
    )
    with Client(asked) as client:
        yield _examine(client, model, how.get("api"), say)


def _examine(
    client: Client, model: str | None, api: str | None, say: Callable[[str], object]
) -> Server:
    asked = client.access
    listed = client.ask(f"{asked.url}/models")
    if listed.status is None:
        raise LabError(f"No server answers at {asked.url}: {listed.error}.", _hint(asked, None))
    entries = as_dict(listed.parsed).get("data")
    if listed.status in (401, 403) or (model is None and not isinstance(entries, list)):
        answered = listed.error or "200, JSON without `data`"
        raise LabError(
            f"{asked.url}/models lists no models. Its answer: {answered}",
            _hint(asked, listed.status),
        )
    by_name = {
        str(as_dict(one).get("id", "")): as_dict(one)
        for one in (entries if isinstance(entries, list) else [])
    }
    own_names = tuple(name for name in by_name if len(name) in range(1, 500))
    models = tuple(hidden(name, asked) for name in own_names)
    shown = choose_model(models, None if model is None else hidden(model, asked))
    chosen = (
        own_names[models.index(shown)]
        if shown in models and model not in own_names
        else model or shown
    )
    program, version, settings = _describe(client, by_name.get(chosen, {}))

    def send(api: str, prompt: str, n_gen: int, accepted: tuple[str, ...]) -> Request:
        wanted = Asked(n_prompt=None, n_gen=n_gen, **formats.limits(accepted))
        return client.send(formats.ask_for(api, chosen, prompt, wanted, accepted), api).request

    say(f"waiting for the first answers, at most {asked.timeout_s:g} s for each (--timeout) ...")
    failed = list[Request]()
    for used, accepted in itertools.product(
        (api,) if api else (kinds.CHAT, kinds.COMPLETIONS), _LADDER
    ):
        first = send(used, SHORT, N_SHORT, accepted)
        if first.status == OK:
            break
        failed.append(first)
        if first.failure in _FINAL or first.http_status in (401, 403):
            break
    if first.status != OK:  # the error of an interface that exists says more
        problem = [*failed, *(one for one in failed if one.http_status not in (404, 405))][-1]
        hint = (
            "Try again (some servers load a model on its first request), or read the server's log."
        )
        if problem.failure == kinds.NO_STREAM:
            hint = "Check that the address is the server's own: a proxy or a login page may answer instead."
        if 300 <= (problem.http_status or 0) < 400 or problem.http_status in (401, 403, 429):
            hint = _hint(asked, problem.http_status)
        cause = f"{problem.failure}: {problem.error}"
        raise LabError(
            f"The server at {asked.url} does not stream an answer of {shown} ({cause}).", hint
        )
    long = send(used, LONG, N_LONG, accepted)
    has_no_effect = {
        formats.INCLUDE_USAGE: times.n_generated(first) is None,
        formats.CONTINUOUS_USAGE: first.tokens_by != "usage",
        formats.TOKEN_IDS: first.tokens_by != "token ids",
        formats.TIMINGS: first.timings is None,
        formats.IGNORE_EOS: long.finish_reason != "length",
    }
    working = tuple(option for option in accepted if not has_no_effect.get(option))

    def by_usage(text: str) -> int | None:
        usage = send(used, text, 1, working).usage
        return usage.prompt_tokens if usage else None

    ways = [
        *(Counter(TOKENIZE, count) for count in tokenizers(client, used, chosen)),
        Counter(USAGE, by_usage),
    ]
    counter = next((way for way in ways if way.count("word") is not None), None)
    endpoint = Endpoint(
        url=asked.url,
        api=used,
        server=program,
        version=version,
        capabilities=tuple(_capabilities(first, long, working, counter, settings)),
        accepted=working,
        settings=settings,
    )
    return Server(endpoint, chosen, shown, models, counter, client, machine.describe())


def tokenizers(
    client: Client, api: str, model: str, is_prompt: bool = True
) -> Iterator[Callable[[str], int | None]]:
    """The ways in which servers count the tokens of a prompt, or of another text."""

    def llama_server(
        text: str,
    ) -> int | None:  # a prompt gets its special tokens, a chat its template
        applied = (
            client.found("/apply-template", prompt_fields(api, text)).get("prompt")
            if api == kinds.CHAT
            else text
        )
        if not isinstance(applied, str):
            return None
        fields = {"content": applied, "add_special": is_prompt, "parse_special": is_prompt}
        return n_items(client.found("/tokenize", fields).get("tokens"))

    def vllm(text: str) -> int | None:  # SGLang too; a chat is counted with its template
        return as_count(
            client.found("/tokenize", {"model": model, **prompt_fields(api, text)}).get("count")
        )

    def llama_cpp_server(text: str) -> int | None:
        return as_count(
            client.found("/extras/tokenize/count", {"model": model, "input": text}).get("count")
        )

    yield from (llama_server, vllm)
    if api != kinds.CHAT:  # which the last one does not support
        yield llama_cpp_server


def _hint(access: Access, status: int | None) -> str:
    """What to do about an answer with this status (None: no answer)."""
    key = "Name the environment variable that contains the key: --api-key-env NAME"
    if access.api_key_env:
        key = f"Check the key in the environment variable {access.api_key_env}."
    other = (
        "http:// for a server without TLS"
        if access.url.startswith("https:")
        else "https:// for a server with TLS"
    )
    known = {
        401: key,
        403: key,
        429: "The server limits the rate of requests. Wait, then try again.",
        None: f"Start the server, or check the address (use {other}).",
    }
    if 300 <= (status or 0) < 400:
        return "The lab does not follow redirects. Give the target address."
    return known.get(status, f"Check the address (use {other}), or name a model with --model.")


def choose_model(models: tuple[str, ...], asked: str | None) -> str:
    """The model to measure. LabError if the server has several and none was named, or lacks the named one."""
    if asked is not None and (not models or asked in models):
        return asked
    of_that_file = [model for model in models if short_name(model) == asked]
    if len(of_that_file) == 1:
        return of_that_file[0]
    names = ", ".join(map(shell.join, models[:8])) + (
        f" and {len(models) - 8} more" if len(models) > 8 else ""
    )
    if asked is not None:
        raise LabError(f"The server has no model {asked}.", f"It has {names}.")
    if len(models) != 1:
        raise LabError(
            f"The server lists {len(models) or 'no'} models.",
            f"Name one: --model {names or 'NAME'}",
        )
    return models[0]


def _describe(
    client: Client, entry: dict[str, Any]
) -> tuple[str | None, str | None, ServerSettings | None]:
    """The server's program, version and settings, as far as it reports them. `entry`: its list's one of the model."""

    def text(value: Any) -> str | None:
        return hidden(value, client.access)[:200] if isinstance(value, str) and value else None

    if "default_generation_settings" in (props := client.found("/props")):
        path = text(props.get("model_path"))
        settings = ServerSettings(
            n_slots=as_count(props.get("total_slots")),
            n_ctx=as_count(as_dict(props["default_generation_settings"]).get("n_ctx")),
            model_file=path and re.split(r"[/\\]", path)[-1],
            quantization=text(props.get("model_ftype")),
            build=text(props.get("build_info")),
        )
        return "llama-server", settings.build, settings
    if "version" in (ollama := client.found("/api/version")):
        return "Ollama", text(ollama["version"]), None
    owner = entry.get("owned_by")
    limit = as_count(entry.get("max_model_len"))
    of_model = ServerSettings(n_ctx=limit) if limit else None
    if "version" in (vllm := client.found("/version")):
        return "vLLM" if owner == "vllm" else None, text(vllm["version"]), of_model
    if "data" in client.found("/api/v0/models"):
        return "LM Studio", None, None
    return {"me": "llama_cpp.server", "sglang": "SGLang"}.get(str(owner)), None, of_model


def _capabilities(
    first: Request,
    long: Request,
    working: tuple[str, ...],
    counter: Counter | None,
    settings: ServerSettings | None,
) -> Iterator[Capability]:
    """What two answers, of N_SHORT and of N_LONG tokens, show of a server."""
    usage = times.n_generated(first)
    by = first.tokens_by
    n_events = len(times.generated(first))
    answer = kinds.UNKNOWN
    how = f"an answer of {N_SHORT} tokens came as {n_events} events"
    if times.came_at_once(long):
        n_events = len(times.generated(long))
        answer = kinds.NO
        how = (
            f"{n_events} events with content arrived at once: the answer was buffered until its end"
        )
    yield Capability("streaming", kinds.YES if answer != kinds.NO and n_events > 1 else answer, how)
    is_tokenizer = counter is not None and counter.by == TOKENIZE
    is_cached = any(one.usage and one.usage.cached_tokens is not None for one in (first, long))
    other = (
        f"{'the usage of small requests' if counter else 'nothing'} counts the tokens of prompts"
    )
    n_slots, n_ctx = (settings.n_slots, settings.n_ctx) if settings else (None, None)
    all_tokens = f"an answer had all {N_LONG} tokens with it"
    not_all = "rejected, or an answer ended early despite it"
    slots = f"{plural(n_slots or 0, 'slot')}, a context of {n_ctx} tokens"
    for name, is_there, how, how_not in (
        (
            "usage in streams",
            usage is not None,
            f"the stream counts {usage} tokens",
            "no counts in the stream",
        ),
        ("token ids", by == "token ids", "in every event", "none in the stream"),
        (
            "tokens per event",
            by is not None,
            f"from {by}",
            "events do not say how many tokens they contain",
        ),
        ("ignore_eos", formats.IGNORE_EOS in working, all_tokens, not_all),
        ("cached tokens", is_cached, "answers count them", "answers do not count them"),
        ("tokenize", is_tokenizer, "the server's tokenizer counts the tokens of prompts", other),
        ("settings", n_slots is not None, slots, "the server does not report its number of slots"),
        (
            "server timings",
            first.timings is not None,
            "llama-server's `timings`",
            "none in the stream",
        ),
    ):
        yield Capability(name, kinds.YES if is_there else kinds.NO, how if is_there else how_not)


def prompt_text(prompt: str) -> str:
    """The text from which prompts are cut. LabError for random token ids, which servers do not accept."""
    if text := source(prompt).text:
        return text
    problem = f"--prompt {prompt} is not possible through a server, which accepts only text."
    raise LabError(
        problem, f"Use --prompt {TEXT}, some of the lab's texts by name, or a text file."
    )


START_S = 120
LOOK_S = 0.1
_ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
KEY_ENV = "MINI_LAB_SERVER_KEY"
_CHILD = f"""
import os, sys
from lab.process.spawning import end_with_parent
end_with_parent()
from llama_cpp.server import __main__ as server, app

class SameOrigin(app.CORSMiddleware):
    def __init__(self, app, **_):
        super().__init__(app)

app.CORSMiddleware = SameOrigin
sys.argv += ["--api_key", os.environ["{KEY_ENV}"]]
server.main()
"""
_OPTIONS = "--host 127.0.0.1 --port 0 --n_ctx 2048 --flash_attn True --interrupt_requests False --verbose False"


@dataclass(frozen=True)
class OwnServer:
    """llama_cpp.server from llama-cpp-python, started here with the libraries of the lab's engine.

    It processes one request after the other, and only requests with its key, which is in the environment variable
    `key_env`: other programs of this machine, and pages in a browser, get no answer. It reads from a pipe of this
    process, so it ends when this process ends, even after a crash.
    """

    url: str
    n_threads: int
    process: subprocess.Popen[bytes]
    log: tempfile.TemporaryDirectory[str]
    key_env: str = KEY_ENV

    def end(self) -> None:
        """End the server; does nothing if it has ended."""
        self.process.kill()
        spawning.wait_for_end(self.process)
        self.log.cleanup()


def start_own(model: Path, alias: str, n_threads: int | None = None) -> OwnServer:
    """Start a server on a free port of this machine, and wait until it answers. LabError if it does not start."""
    n_threads = n_threads or machine.default_threads()
    options = f"--n_threads {n_threads} --n_threads_batch {n_threads} {_OPTIONS}".split()
    key = os.environ[KEY_ENV] = secrets.token_hex(32)
    folder = tempfile.TemporaryDirectory(prefix="mini-lab-server-")
    log = Path(folder.name) / "log"
    with log.open("wb") as file:
        words = ("--model", str(model), "--model_alias", alias, *options)
        process = spawning.start(_CHILD, *words, stdout=file, stderr=subprocess.STDOUT)
    own = OwnServer("", n_threads, process, folder)
    deadline = time.monotonic() + START_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if address := _ADDRESS.search(log.read_text(encoding="utf-8", errors="replace")):
                return dataclasses.replace(own, url=f"{address[1]}/v1")
            time.sleep(LOOK_S)
        printed = log.read_text(encoding="utf-8", errors="replace").partition("Fatal Python error")[
            0
        ]  # of its threads
        lines = printed.replace(key, "***").splitlines()
        hint = "Install its packages (pip install 'mini-lab[server]'), or free some memory, and try again."
        raise LabError(f"The server did not start: {' | '.join(lines[-3:])}", hint)
    except BaseException:
        own.end()
        raise
