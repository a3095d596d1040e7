"""Where servers tell their counts, and what besides a text stands in a delta: read alike from a
stream that the lab asked for, and from one that passed through lab record."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lab.core.request import REASONING, ROLE, TEXT, TOOL, USAGE, Usage
from lab.features.recording.answers import Answer, read_answer
from lab.remote.deltas import content_of
from lab.remote.streams import StreamedAnswer, StreamReader
from tests.support.streams import delta, sse, usage

Chunk = dict[str, Any]
TEXTS: list[Chunk] = [delta({"content": f" w{i}"}) for i in range(6)]
END = delta({}, "stop")


def measured(chunks: list[Chunk]) -> StreamedAnswer:
    pieces = [(1_000_000 * i, sse(chunk)) for i, chunk in enumerate(chunks, 1)]
    reader = StreamReader([*pieces, (10**8, sse("[DONE]"))], 0)
    for _ in reader.read():
        pass
    return reader.answer()


def recorded(chunks: list[Chunk]) -> Answer:
    return read_answer(
        [(i, sse(chunk)) for i, chunk in enumerate(chunks, 1)], "", "text/event-stream"
    )


def details(n_cached: int) -> Chunk:
    return {"prompt_tokens_details": {"cached_tokens": n_cached}}


COUNTS: dict[str, list[Chunk]] = {
    "in a chunk of its own": [
        *TEXTS,
        END,
        {"choices": [], "usage": usage(70, 6, **details(48))},
    ],
    "cached ones in the first chunk only": [
        delta({"content": " w0"}, usage=usage(70, 1, **details(48))),
        *TEXTS[1:],
        delta({}, "stop", usage=usage(70, 6)),
    ],
    "cached ones written as 0 at the end": [
        delta({"content": " w0"}, usage=usage(70, 1, **details(48))),
        *TEXTS[1:],
        delta({}, "stop", usage=usage(70, 6, **details(0))),
    ],
    "details that are null at the end": [
        delta({"content": " w0"}, usage=usage(70, 1, **details(48))),
        *TEXTS[1:],
        delta({}, "stop", usage=usage(70, 6, prompt_tokens_details=None)),
    ],
    "in an object of the provider": [
        *TEXTS,
        delta({}, "stop", x_lamp={"id": "r7", "usage": usage(70, 6, **details(48))}),
    ],
    "in the choice": [
        *TEXTS,
        delta({}, "stop", choice={"usage": usage(70, 6, cached_tokens=48)}),
    ],
    "by the names of the Responses API": [
        *TEXTS,
        END,
        {
            "choices": [],
            "usage": {
                "input_tokens": 70,
                "input_tokens_details": {"cached_tokens": 48},
                "output_tokens": 6,
            },
        },
    ],
    "by two names, one of them 0": [
        *TEXTS,
        END,
        {"usage": usage(70, 6, **details(48)) | {"input_tokens": 0, "output_tokens": 0}},
    ],
    "with Anthropic's names beside": [
        *TEXTS,
        END,
        {
            "choices": [],
            "usage": usage(70, 6, **details(48))
            | {"cache_read_input_tokens": 48, "cache_creation_input_tokens": 0},
        },
    ],
    "as times of llama-server": [
        *TEXTS,
        delta({}, "stop", timings={"cache_n": 48, "prompt_n": 22, "predicted_n": 6}),
    ],
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_found_wherever_a_server_tells_them(name: str) -> None:
    answer = measured(COUNTS[name])
    assert answer.failure is None
    assert answer.usage == Usage(prompt_tokens=70, completion_tokens=6, cached_tokens=48)
    of_call = recorded(COUNTS[name])
    assert (of_call.n_prompt, of_call.n_cached, of_call.n_gen) == (70, 48, 6)


@pytest.mark.parametrize("n_cached", [None, 0, 48])
@pytest.mark.parametrize("n_gen", range(1, 35))
def test_ordinary_counts_are_as_the_server_says(n_cached: int | None, n_gen: int) -> None:
    """None: its prompt_tokens_details is null, which is not 0."""
    told = None if n_cached is None else {"cached_tokens": n_cached}
    last = {"choices": [], "usage": usage(70, n_gen, prompt_tokens_details=told)}
    answer = measured([*TEXTS, END, last])
    assert answer.usage == Usage(
        prompt_tokens=70, completion_tokens=n_gen, cached_tokens=n_cached
    )
    of_call = recorded([*TEXTS, END, last])
    assert (of_call.n_prompt, of_call.n_cached, of_call.n_gen) == (70, n_cached, n_gen)


OF_MESSAGES: dict[str, tuple[Chunk, Chunk]] = {
    "at the beginning": ({"input_tokens": 22, "cache_read_input_tokens": 48}, {}),
    "zeros at the end": (
        {"input_tokens": 22, "cache_read_input_tokens": 48},
        {"input_tokens": 0, "cache_read_input_tokens": 0},
    ),
    "zeros at the beginning": (
        {"input_tokens": 0, "cache_read_input_tokens": 0},
        {"input_tokens": 22, "cache_read_input_tokens": 48},
    ),
    "in both": (
        {"input_tokens": 22, "cache_read_input_tokens": 48},
        {"input_tokens": 22, "cache_read_input_tokens": 48},
    ),
    "null at the end": (
        {"input_tokens": 22, "cache_read_input_tokens": 48},
        {"input_tokens": None, "cache_read_input_tokens": None},
    ),
}


@pytest.mark.parametrize("name", OF_MESSAGES)
def test_counts_of_a_message_are_those_of_its_first_and_last_event(name: str) -> None:
    first, last = OF_MESSAGES[name]
    answer = recorded(
        [
            {"type": "message_start", "message": {"usage": {**first, "output_tokens": 1}}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
            {"type": "message_delta", "usage": {**last, "output_tokens": 6}},
        ]
    )
    assert (answer.n_prompt, answer.n_cached, answer.n_gen) == (70, 48, 6)
    assert answer.first_ns == 2


# What describes a text, and is none

DESCRIBED: list[Chunk] = [
    {"role": "assistant", "content": "", "token_id": 128009},
    {"content": None, "token_id": 0, "logprob": -0.25},
    {"content": "", "is_last": True},
    {"tool_calls": [{"index": 1, "function": {"arguments": "", "priority": 3}}]},
    {"reasoning": "", "reasoning_details": [{"index": 2, "tokens": 17}]},
]


@pytest.mark.parametrize("described", DESCRIBED)
def test_a_number_or_a_flag_is_no_text(described: Chunk) -> None:
    assert content_of({"index": 0, "delta": described}).kind is None
    chunks = [delta({"role": "assistant", **described}), *TEXTS, delta(described, "stop")]
    answer = measured([*chunks, {"choices": [], "usage": usage(70, 6)}])
    assert answer.events.kind[:8] == (ROLE, *[TEXT] * 6, "other")
    assert recorded(chunks).first_ns == 2


FIELDS = {"content": TEXT, "refusal": TEXT, "reasoning": REASONING, "thoughts": REASONING}
WORDS = [
    " a",
    "0",
    " 12",
    "\n",
    " ",
    "é",
    "模",
    "{}",
    "null",
    "false",
    "x" * 90,
    "</think>",
    "-",
]


@pytest.mark.parametrize("field", FIELDS)
def test_ordinary_texts_are_texts(field: str) -> None:
    for word, number in itertools.product(WORDS, (None, 0, 7)):
        content = content_of({"delta": {field: word, "token_id": number}})
        assert content == (FIELDS[field], word)
    call = {"index": 0, "function": {"name": "ls", "arguments": ""}}
    assert content_of({"delta": {"tool_calls": [call]}}).kind == TOOL


@pytest.mark.parametrize("word", WORDS)
def test_a_text_that_a_choice_writes_twice_is_one(word: str) -> None:
    twice = {"text": word, "delta": {"content": word, "token_id": 7}}
    assert content_of(twice).text == word
    for once in ({"text": word}, {"text": word, "delta": {}}, {"text": word, "delta": None}):
        assert content_of(once).text == word


def test_counts_without_a_text_are_no_text() -> None:
    answer = measured([*TEXTS, END, {"choices": [], "usage": usage(70, 6)}])
    assert answer.events.kind[-2] == USAGE
