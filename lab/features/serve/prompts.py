"""Count tokens with the server's tokenizer: make prompts of exactly n tokens, and count the tokens of answers.

A server with /tokenize counts any text (a chat with its template). Without it, the usage of a request for one token
says how long its prompt was; a few such requests find the number of words. A prompt begins with a nonce of eight
letters, so that no cache contains its beginning; after counting by usage it gets a new one.

If a stream has no token counts (llama_cpp.server streams no usage), the lab repeats the request with the same seed and
without streaming, which reports them for the price of one more generation. The count is valid only if the answer is the
same: a cache or another batch changes the last bits of a sum, and so the text. Otherwise the answer's text is
tokenized, which may join separately generated tokens.

Sources: llama.cpp tools/server/README.md (POST /tokenize, POST /apply-template); vLLM
vllm/entrypoints/serve/tokenize/protocol.py (POST /tokenize with `prompt` or `messages`, answer with `count`);
llama-cpp-python llama_cpp/server/app.py (POST /extras/tokenize/count).
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lab.core import request_times as times
from lab.core.lists import first_known
from lab.core.record import OK
from lab.core.request import CHAT, COMPLETIONS, Asked, Endpoint, Request, Usage
from lab.errors import LabError
from lab.features.serve.access import ANSWER_S, Access, ask
from lab.features.serve.formats import (
    TIMINGS,
    as_count,
    as_dict,
    body,
    first,
    n_items,
    prompt_fields,
    temperature,
    text_of,
    usage_of,
)
from lab.features.serve.send_plan import Ask, Reply, fresh_nonce

TOKENIZE, USAGE, TWIN = "tokenize", "usage", "twin"

MOST_COUNTS = 24
"""Maximum number of counts for one prompt."""

FILLERS = (" a", " the", " x", " 1", ".")
"""Texts that make a prompt a little longer; in most vocabularies one token each."""

NEAR = 50
"""If counting costs a prefill, the last n/50 tokens of a prompt may be fillers."""


class NotCounted(LabError):
    """A server that counted tokens before no longer does."""


@dataclass(frozen=True)
class Counter:
    """A server's way to count the tokens of a prompt, with everything that it adds."""

    by: str  # tokenize, usage
    count: Callable[[str], int | None]


@dataclass(frozen=True)
class Prompt:
    """A prompt with the server's token count; its text begins with `nonce`."""

    text: str
    n_tokens: int
    counted_by: str
    nonce: str

    @property
    def body(self) -> str:
        """The text after the nonce."""
        return self.text.removeprefix(self.nonce)

    def renewed(self, rng: random.Random) -> Prompt:
        """The same prompt with another nonce."""
        nonce = fresh_nonce(rng)
        return dataclasses.replace(self, text=nonce + self.body, nonce=nonce)


def counter(access: Access, endpoint: Endpoint, model: str) -> Counter | None:
    """The first way of counting that works on this server, tried on one word."""

    def by_usage(text: str) -> int | None:
        asked = Asked(n_prompt=None, n_gen=1, temperature=temperature(endpoint.accepted))
        fields = body(endpoint.api, model, text, asked, endpoint.accepted, is_streamed=False)
        usage = usage_of(as_dict(posted(access, access.interface(endpoint.api), fields, access.timeout_s).get("usage")))
        return usage.prompt_tokens if usage else None

    ways = [Counter(TOKENIZE, count) for count in tokenizers(access, endpoint.api, model)]
    return next((way for way in (*ways, Counter(USAGE, by_usage)) if way.count("word") is not None), None)


def tokenizers(access: Access, api: str, model: str, is_prompt: bool = True) -> Iterator[Callable[[str], int | None]]:
    """The ways in which servers count the tokens of a prompt, or of another text."""

    def llama_server(text: str) -> int | None:  # a prompt gets its special tokens, a chat its template
        if api == CHAT:
            chat = ask(access, f"{access.root}/apply-template", prompt_fields(api, text))
            applied = as_dict(chat.raw).get("prompt")  # unmasked, and only sent to the server
            if chat.status != 200 or not isinstance(applied, str):
                return None
            text = applied
        fields = {"content": text, "add_special": is_prompt, "parse_special": is_prompt}
        return n_items(posted(access, f"{access.root}/tokenize", fields).get("tokens"))

    def vllm(text: str) -> int | None:  # SGLang too; a chat is counted with its template
        fields = {"model": model, **prompt_fields(api, text)}
        return as_count(posted(access, f"{access.root}/tokenize", fields).get("count"))

    def llama_cpp_server(text: str) -> int | None:
        fields = {"model": model, "input": text}
        return as_count(posted(access, f"{access.root}/extras/tokenize/count", fields).get("count"))

    yield from (llama_server, vllm)
    if api != CHAT:  # which the last one does not support
        yield llama_cpp_server


def posted(access: Access, url: str, fields: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The JSON object that a POST returns; empty after a failure."""
    answer = ask(access, url, fields, timeout_s)
    return as_dict(answer.parsed) if answer.status == 200 else {}


def least(how: Counter) -> int:
    """Tokens of the shortest prompt: a nonce, and what the server adds. LabError if the server stops counting."""
    return _counted(how, fresh_nonce(random.Random()))


def impossible(n: int, n_least: int) -> LabError:
    """The error for a prompt shorter than the shortest possible one."""
    return LabError(
        f"A prompt of {n:,} token{'s' * (n != 1)} is not possible: the shortest one has {n_least:,}.",
        "Its first letters and the chat template need that many (--api completions has no template).",
    )


def make(n: int, how: Counter, source: str, rng: random.Random, start: int = 0) -> Prompt:
    """A prompt of n tokens: a nonce, then words of `source` from word `start` on.

    LabError if n is less than the shortest prompt, or the server stops counting. If no text of exactly n tokens is
    found within MOST_COUNTS, the prompt is the longest one below n (see `n_tokens`).
    """
    words = source.split()
    words = words[start % len(words) :] + words[: start % len(words)]
    head = fresh_nonce(rng)
    counts: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in counts:
            counts[text] = _counted(how, text)
        return counts[text]

    def first_words(k: int) -> str:
        n_whole, rest = divmod(k, len(words))
        return " ".join([head, *words * n_whole, *words[:rest]])

    n_least = count(head)
    if n_least > n:
        raise impossible(n, n_least)
    n_enough = n - n // NEAR if how.by == USAGE else n  # counting by usage prefills a prompt: fillers do the rest
    text = first_words(_most_words(n, n_least, n_enough, lambda k: count(first_words(k))))
    fillers = list(FILLERS)
    while fillers and counts[text] < n and len(counts) < MOST_COUNTS:
        missing = n - counts[text]
        longer = text + fillers[0] * missing
        if count(longer) > n and missing > 1:
            longer = text + fillers[0]
        if counts[text] < count(longer) <= n:
            text = longer
        else:
            fillers.pop(0)
    prompt = Prompt(text, counts[text], how.by, head)
    return prompt.renewed(rng) if how.by == USAGE else prompt  # the server has seen this one


def _counted(how: Counter, text: str) -> int:
    n_tokens = how.count(text)
    if n_tokens is None:
        raise NotCounted(
            f"The server no longer reports token counts (asked for a prompt of {len(text):,} characters).",
            "Check that it still runs (its log may say why), then try again.",
        )
    return n_tokens


def _most_words(n: int, n_least: int, n_enough: int, count: Callable[[int], int]) -> int:
    """How many words fit into n tokens (`n_enough` suffices): linear interpolation, and every fourth time bisection."""
    aim = (n + n_enough) / 2
    low, n_low = 0, n_least
    high, n_high = 0, 0  # 0: no upper bound yet
    for turn in range(MOST_COUNTS - 10):
        if n_low >= n_enough or high - low == 1:
            break
        if high:
            share = 0.5 if turn % 4 == 3 else (aim - n_low) / (n_high - n_low)
            guess = min(high - 1, low + max(1, round(share * (high - low))))
        else:
            per_word = (n_low - n_least) / low if low else 1.5
            guess = low + max(1, round((aim - n_low) / max(0.2, per_word)))
        n_guess = count(guess)
        if n_guess <= n:
            low, n_low = guess, n_guess
        else:
            high, n_high = guess, n_guess
    return low


def counted(access: Access, api: str, model: str, sent: Ask, reply: Reply) -> Request:
    """The request with a token count (`usage.counted_by` says how), if it had none and counting is possible.

    Tries the twin first if there is a seed and the prompt that was sent is known, then the tokenizer.
    """
    request, usage = reply.request, None
    if request.status != OK or times.n_generated(request) is not None:
        return request
    if request.asked.seed is not None and sent.nonce is None:  # with a nonce, another prompt was sent
        fields = json.loads(sent.body)
        for name in ("stream", "stream_options", TIMINGS):
            fields.pop(name, None)
        twin = posted(access, access.interface(api), fields, access.timeout_s)
        usage, choice = usage_of(as_dict(twin.get("usage"))), first(twin.get("choices"))
        is_same = choice.get("finish_reason") == request.finish_reason == "length"
        is_same = is_same or bool(reply.text and text_of(choice) == reply.text)
        if usage and usage.completion_tokens is not None and is_same:
            usage = dataclasses.replace(usage, cached_tokens=None, counted_by=TWIN)  # the twin's prompt was cached
            return dataclasses.replace(request, usage=usage)
    n_tokens = first_known(count(reply.text) for count in tokenizers(access, COMPLETIONS, model, is_prompt=False))
    if n_tokens is None:
        return request
    return dataclasses.replace(request, usage=Usage(completion_tokens=n_tokens, counted_by=TOKENIZE))
