"""A server that was examined: prompts of exactly n of its tokens, requests to it, and their
records.

    with connect("http://127.0.0.1:8080/v1") as server:  # examination.py
        ask = server.ask(n_prompt=1000, n_gen=64, text=text)
        results.save(path, server.record(session, server.counted(server.send(ask))))

A server with /tokenize counts the tokens of any text (a chat with its template). Without it, the
usage of a request for one token says how long its prompt was. If a stream has no token counts
(llama_cpp.server streams no usage), the server's tokenizer counts the answer's text, which may join
separately generated tokens. An answer that ended at its limit has as many as were requested.

Sources of the addresses: llama.cpp tools/server/README.md (/tokenize, /apply-template); vLLM,
vllm/entrypoints/serve/tokenize/protocol.py (/tokenize); llama-cpp-python llama_cpp/server/app.py
(/extras/tokenize/count).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import request as kinds, request_times as times, results, stored_command
from lab.core.lists import plural
from lab.core.record import OK, Machine, Noise
from lab.core.request import Asked, Endpoint, Request, RequestRecord, Usage
from lab.errors import LabError
from lab.remote import formats
from lab.remote.client import Client
from lab.remote.formats import Ask, Reply, as_count, fresh_nonce, n_items, prompt_fields
from lab.runner import machine
from lab.runner.prompts import TEXT, source

TOKENIZE = "tokenize"
USAGE = "usage"

MOST_COUNTS = 24  # maximum number of counts for one prompt
FILLERS = (" a", " the", " x", " 1", ".")
"""Texts that make a prompt a little longer; in most vocabularies one token each."""

Count = Callable[[str], int | None]  # the tokens of a text; None if they cannot be counted


@dataclass(frozen=True)
class TokenCounter:
    """A server's way to count the tokens of a prompt, with everything that it adds."""

    by: str  # tokenize, usage
    count: Count


def needs_count(request: Request) -> bool:
    """Whether a request succeeded, and nobody counted the tokens of its answer."""
    return request.status == OK and times.n_generated(request) is None


@dataclass(frozen=True)
class Server:
    """An examined server with one of its models, and the client for it."""

    endpoint: Endpoint
    model: str  # its id, which requests name
    name: str  # which is shown and kept
    models: tuple[str, ...]  # the names of all that it lists
    counter: TokenCounter | None  # None: the tokens of a prompt cannot be counted
    client: Client
    machine: Machine  # of the client

    def count(self, text: str) -> int:
        """The tokens of a prompt. LabError if the server cannot count them, or no longer does."""
        if self.counter is None:
            raise LabError(
                f"The server at {self.endpoint.url} cannot count the tokens of prompts: it has no "
                "tokenizer endpoint, and no token counts in its answers.",
                "Turn one of them on, or measure another server.",
            )
        n_tokens = self.counter.count(text)
        if n_tokens is None:
            raise LabError(
                "The server no longer reports token counts (asked for a prompt of "
                f"{len(text):,} characters).",
                "Check that it still runs (its log may say why), then try again.",
            )
        return n_tokens

    def least(self, n_prompt: int) -> int:
        """Tokens of the shortest prompt: a nonce, and what the server adds. LabError if `n_prompt`
        is less."""
        n_least = self.count(fresh_nonce())
        if n_least > n_prompt:
            raise LabError(
                f"A prompt of {plural(n_prompt, 'token')} is not possible: "
                f"the shortest one has {n_least:,}.",
                "Its first letters and the chat template need that many "
                "(--api completions has no template).",
            )
        return n_least

    def too_long(self, n_prompt: int, n_gen: int) -> LabError | None:
        """Why a request of this length does not fit into the server's context; None if it may
        fit.
        """
        n_ctx = self.endpoint.settings.n_ctx if self.endpoint.settings else None
        if n_ctx is None or n_prompt + n_gen <= n_ctx:
            return None
        return LabError(
            f"{n_prompt:,} prompt tokens and {n_gen:,} more do not fit into the server's context "
            f"of {plural(n_ctx, 'token')} (of one request).",
            "Use fewer tokens, or start the server with a longer context.",
        )

    def ask(self, n_prompt: int, n_gen: int, text: str, **more: Any) -> Ask:
        """A request with a prompt of n_prompt tokens: a nonce, which each sending renews, then
        words of `text`.

        If no text of exactly n_prompt tokens is found within MOST_COUNTS, it is the longest one
        below that. `more`: other fields of Asked, such as the seed. LabError if the server does not
        count, or the prompt is too short.
        """
        prompt = _PromptSearch(self, n_prompt, text)
        best = prompt.search()
        if formats.SEED not in self.endpoint.accepted:
            more = {**more, "seed": None}
        asked = Asked(
            n_prompt=n_prompt,
            n_gen=n_gen,
            n_prompt_counted=prompt.count(best),
            counted_by=self.counter.by if self.counter else None,
            **formats.limits(self.endpoint.accepted),
            **more,
        )
        endpoint = self.endpoint
        return formats.ask_for(
            endpoint.api, self.model, best, asked, endpoint.accepted, prompt.nonce
        )

    def send(self, ask: Ask, watch: Callable[[], None] = lambda: None) -> Reply:
        """Send one request, and wait for its answer; calls `watch` meanwhile."""
        return self.client.send(ask, self.endpoint.api, watch=watch)

    def counted(self, reply: Reply) -> Request:
        """The request with a token count by the server's tokenizer, if its stream had none."""
        request = reply.request
        if not needs_count(request):
            return request
        n_tokens = None
        for count in tokenizers(self.client, kinds.COMPLETIONS, self.model, is_prompt=False):
            n_tokens = count(reply.text)
            if n_tokens is not None:
                break
        if n_tokens is None:
            return request
        n_gen = request.asked.n_gen
        if request.finish_reason == "length" and n_tokens >= times.JOINED * n_gen:
            n_tokens = n_gen
        usage = Usage(completion_tokens=n_tokens, counted_by=TOKENIZE)
        return dataclasses.replace(request, usage=usage)

    def record(
        self, session: str, request: Request, noise: Noise | None = None
    ) -> RequestRecord:
        """A request as a line of a results file."""
        return RequestRecord(
            session=session,
            machine=self.machine,
            endpoint=self.endpoint,
            model=self.name,
            request=request,
            command=stored_command.command(),
            noise=noise,
        )

    def new_file(self, folder: Path) -> Path:
        """A new results file."""
        model = machine.slug(self.name)
        program = machine.slug(self.endpoint.server or "server")
        return results.new_file(folder, f"{model}-{program}")


class _PromptSearch:
    """The search for a prompt of exactly `n_prompt` tokens: how many words of a text it has."""

    def __init__(self, server: Server, n_prompt: int, text: str) -> None:
        self.nonce = fresh_nonce()
        self._server = server
        self._n_prompt = n_prompt
        self._words = text.split()
        self._counts: dict[str, int] = {}

    def count(self, text: str) -> int:
        if text not in self._counts:
            self._counts[text] = self._server.count(text)
        return self._counts[text]

    def search(self) -> str:
        """The longest prompt that was found, of at most `n_prompt` tokens."""
        prompt = self._first_words(self._n_words())
        for filler in FILLERS:
            n_missing = self._n_prompt - self.count(prompt)
            for longer in (prompt + filler * n_missing, prompt + filler):
                if self.count(longer) <= self._n_prompt:
                    prompt = longer
                    break
        return prompt

    def _n_words(self) -> int:
        """How many words fit: guessed by the tokens of a word so far, between a lower and an upper
        bound. LabError if the server counts no more tokens of a longer prompt."""
        n_least = self._server.least(self._n_prompt)
        low = 0
        n_low = n_least
        high = 10 * self._n_prompt  # this many words are too many
        tokens_per_word = 1.5
        most_counts = MOST_COUNTS - 2 * len(FILLERS)
        while n_low < self._n_prompt and high - low > 1 and len(self._counts) < most_counts:
            guess = low + max(1, int((self._n_prompt - n_low) / tokens_per_word))
            if guess >= high:
                guess = (low + high) // 2
            n_guess = self.count(self._first_words(guess))
            if low and n_guess <= n_low:
                raise LabError(
                    f"The server counts {plural(n_guess, 'token')} of a prompt, and no more of a "
                    "longer one: it cuts prompts, or counts only a part of them.",
                    "Use fewer tokens, or start the server with a longer context.",
                )
            tokens_per_word = max(0.2, (n_guess - n_least) / guess)
            if n_guess <= self._n_prompt:
                low = guess
                n_low = n_guess
            else:
                high = guess
        return low

    def _first_words(self, n_words: int) -> str:
        """The nonce and this many words; the text begins again where it ends."""
        n_whole, n_rest = divmod(n_words, len(self._words))
        return " ".join([self.nonce, *self._words * n_whole, *self._words[:n_rest]])


def tokenizers(
    client: Client, api: str, model: str, is_prompt: bool = True
) -> Iterator[Count]:
    """The ways in which servers count the tokens of a prompt, or of another text."""

    def llama_server(text: str) -> int | None:
        """A prompt gets its special tokens, a chat its template."""
        content: object = text
        if api == kinds.CHAT:
            applied = client.object_at("/apply-template", prompt_fields(api, text))
            content = applied.get("prompt")
        if not isinstance(content, str):
            return None
        fields = {"content": content, "add_special": is_prompt, "parse_special": is_prompt}
        return n_items(client.object_at("/tokenize", fields).get("tokens"))

    def vllm(text: str) -> int | None:
        """SGLang too; a chat is counted with its template."""
        fields = {"model": model, **prompt_fields(api, text)}
        return as_count(client.object_at("/tokenize", fields).get("count"))

    def llama_cpp_server(text: str) -> int | None:
        fields = {"model": model, "input": text}
        return as_count(client.object_at("/extras/tokenize/count", fields).get("count"))

    yield from (llama_server, vllm)
    if api != kinds.CHAT:  # which the last one does not support
        yield llama_cpp_server


def prompt_text(prompt: str) -> str:
    """The text from which prompts are cut. LabError for random token ids, which servers do not
    accept."""
    text = source(prompt).text
    if text:
        return text
    raise LabError(
        f"--prompt {prompt} is not possible through a server, which accepts only text.",
        f"Use --prompt {TEXT}, some of the lab's texts by name, or a text file.",
    )
