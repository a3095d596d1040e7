"""What servers stream, read as their published formats say.

Each stream is written here from the named source; none was recorded. A piece is what one write of
the server holds.
"""

from typing import Any

import pytest

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import (
    CUT_OFF,
    DONE,
    ERROR,
    ERROR_INSIDE,
    IMPOSSIBLE,
    OTHER,
    PING,
    REASONING,
    ROLE,
    TEXT,
    TOOL,
    USAGE,
    WRONG_JSON,
    Asked,
    Request,
)
from lab.core.request_times import figures
from lab.remote.streams import StreamedAnswer, StreamReader
from tests.support.streams import delta, sse, usage


def read(*pieces: bytes) -> StreamedAnswer:
    """The stream of pieces that arrive at 10, 20, 30 ns ..."""
    reader = StreamReader([(10 * (i + 1), piece) for i, piece in enumerate(pieces)], 0)
    for _ in reader.read():
        pass
    return reader.answer()


def as_request(stream: Any) -> Request:
    asked = Asked(n_prompt=None, n_gen=100)
    return Request(
        asked=asked,
        started_at="",
        status=OK,
        events=stream.events,
        usage=stream.usage,
    )


def assert_complete(stream: Any) -> None:
    assert stream.failure is None
    assert stream.error is None


# https://platform.openai.com/docs/api-reference/chat-streaming: usage is null in all chunks but the
# last, which has no choices; `obfuscation` pads each delta
def test_openai() -> None:
    def chunk(*args: Any, **more: Any) -> dict[str, Any]:
        return delta(
            *args,
            usage=None,
            service_tier="default",
            obfuscation="a8Kx",
            **more,
        )

    counts = usage(
        19,
        2,
        prompt_tokens_details={"cached_tokens": 0},
        completion_tokens_details={"reasoning_tokens": 0},
    )
    stream = read(
        sse(
            chunk(
                {
                    "role": "assistant",
                    "content": "",
                    "refusal": None,
                }
            )
        ),
        sse(chunk({"content": "Hello"})),
        sse(chunk({"content": "!"})),
        sse(chunk({}, "stop")),
        sse(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": counts,
            }
        ),
        sse("[DONE]"),
    )
    assert_complete(stream)
    assert stream.events.kind == (ROLE, TEXT, TEXT, OTHER, USAGE, DONE)
    assert stream.events.arrive_ns == (10, 20, 30, 40, 50, 60)
    assert stream.text == "Hello!"
    assert stream.finish_reason == "stop"
    assert stream.tokens_by is None
    assert stream.usage
    assert stream.usage.completion_tokens == 2
    assert stream.usage.cached_tokens == 0


# vLLM vllm/entrypoints/openai/chat_completion/serving.py, chat_completion_stream_generator: the
# role with content "" and prompt_token_ids; with return_token_ids a chunk that has ids and no text;
# running usage; `reasoning`
def test_vllm() -> None:
    def chunk(
        content: dict[str, Any], n: int, ids: list[int], finish: str | None = None
    ) -> dict[str, Any]:
        return delta(
            content, finish, usage=usage(16, n), choice={"logprobs": None, "token_ids": ids}
        )

    last = {
        "id": "1",
        "object": "chat.completion.chunk",
        "choices": [],
        "usage": usage(16, 6),
    }
    stream = read(
        sse(
            delta(
                {"role": "assistant", "content": ""},
                prompt_token_ids=[1, 2],
                usage=usage(16, 0),
            )
        ),
        sse(chunk({"reasoning": "Hm"}, 1, [5])),
        sse(chunk({}, 3, [6, 7])),  # the marks between reasoning and answer
        sse(chunk({"content": "Hi there"}, 5, [8, 9])),
        sse(chunk({"content": ""}, 6, [2], "stop")),
        sse(last, "[DONE]"),
    )
    assert_complete(stream)
    assert stream.events.kind == (ROLE, REASONING, TEXT, TEXT, USAGE, USAGE, DONE)
    assert stream.tokens_by == "token ids"
    assert stream.events.n_tokens == (0, 1, 2, 2, 1, 0, 0)
    assert stream.usage
    assert stream.usage.completion_tokens == 6
    assert stream.usage.cached_tokens is None  # without --enable-prompt-tokens-details
    request = as_request(stream)
    assert figures(request).ttft_ns == 20
    assert figures(request).tpot_ns == 20 / 4  # the last token came after the last text
    assert times.itl_ns(request) == [10, 0, 10, 0]


# SGLang python/sglang/srt/entrypoints/openai/serving_chat.py: every field is there, null where
# there is nothing; the chunk with finish_reason comes apart, with matched_stop; usage has
# reasoning_tokens next to the others
def test_sglang() -> None:
    def chunk(finish: str | None = None, **content: Any) -> dict[str, Any]:
        fields = (
            dict.fromkeys(("role", "content", "reasoning_content", "tool_calls"), None)
            | content
        )
        return delta(
            fields,
            finish,
            usage=None,
            choice={
                "logprobs": None,
                "matched_stop": 2 if finish else None,
            },
        )

    counts = usage(
        9,
        3,
        prompt_tokens_details=None,
        reasoning_tokens=1,
    )
    stream = read(
        sse(chunk(role="assistant", content="")),
        sse(chunk(reasoning_content="So")),
        sse(chunk(content="Yes.")),
        sse(chunk("stop")),
        sse(delta({}) | {"choices": [], "usage": counts}, "[DONE]"),
    )
    assert_complete(stream)
    assert stream.events.kind == (ROLE, REASONING, TEXT, OTHER, USAGE, DONE)
    assert stream.usage
    assert stream.usage.completion_tokens == 3
    assert stream.usage.cached_tokens is None


# Ollama openai/openai.go and middleware/openai.go: the role is in every chunk; `reasoning`;
# system_fingerprint; with include_usage the last chunk comes again with usage and without choices
def test_ollama() -> None:
    def chunk(finish: str | None = None, **content: Any) -> dict[str, Any]:
        return delta(
            {
                "role": "assistant",
                "content": "",
                **content,
            },
            finish,
            system_fingerprint="fp_ollama",
        )

    stream = read(
        sse(chunk(reasoning="Well")),
        sse(chunk(content="Hi")),
        sse(
            chunk(
                tool_calls=[
                    {
                        "index": 0,
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ]
            )
        ),
        sse(chunk("stop")),
        sse(
            chunk()
            | {
                "choices": [],
                "usage": usage(26, 3),
            }
        ),
        sse("[DONE]"),
    )
    assert_complete(stream)
    assert stream.events.kind == (REASONING, TEXT, TOOL, OTHER, USAGE, DONE)
    assert figures(as_request(stream)).ttft_ns == 10


def timings(n: int, n_cached: int = 0) -> dict[str, Any]:
    """llama.cpp tools/server/server-common.cpp, server_slot_stats::to_json."""
    times_ms = {
        "prompt_ms": 12.5,
        "prompt_per_token_ms": 1.25,
        "prompt_per_second": 800.0,
    }
    more = {
        "predicted_ms": 30.0,
        "predicted_per_token_ms": 10.0,
        "predicted_per_second": 100.0,
    }
    return {
        "cache_n": n_cached,
        "prompt_n": 10,
        "predicted_n": n,
        **times_ms,
        **more,
    }


# llama.cpp tools/server/server-task.cpp (0c1e570), to_json_oaicompat_chat and ..._chat_stream: the
# role (content null) and the first text leave in one write; with timings_per_token the last chunk
# of a write has running counts; then finish_reason, usage without choices, with the timings; ":" is
# a ping (server-context.cpp)
def test_llama_server() -> None:
    counts = usage(10, 4, prompt_tokens_details={"cached_tokens": 3})
    stream = read(
        b":\n\n",
        sse(
            delta({"role": "assistant", "content": None}),
            delta({"content": "Once"}, timings=timings(1, 3)),
        ),
        sse(
            delta({"content": " upon"}, timings=timings(3, 3))
        ),  # one token was held back: half a letter
        sse(
            delta({}, "length"),
            {
                "choices": [],
                "usage": counts,
                "timings": timings(4, 3),
            },
        ),
        sse("[DONE]"),
    )
    assert_complete(stream)
    assert stream.events.kind == (PING, ROLE, TEXT, TEXT, OTHER, USAGE, DONE)
    assert stream.events.arrive_ns == (10, 20, 20, 30, 40, 40, 50)
    assert stream.tokens_by == "timings"
    assert stream.events.n_tokens == (0, 0, 1, 2, 0, 1, 0)
    assert stream.usage
    assert stream.usage.cached_tokens == 3
    assert stream.timings
    assert stream.timings.prompt_ms == 12.5
    assert stream.timings.n_gen == 4
    assert stream.timings.n_cached == 3
    assert times.itl_ns(as_request(stream)) == [10, 0]


# The same file: reasoning_content in deltas; an error during the stream is {"error": {"code",
# "message", "type"}}, and nothing follows it
def test_llama_server_reasoning_and_error() -> None:
    error = {
        "error": {
            "code": 500,
            "message": "Context size has been exceeded.",
            "type": "server_error",
        }
    }
    stream = read(
        sse(
            delta({"role": "assistant", "content": None}),
            delta({"reasoning_content": "Hm"}),
        ),
        sse(error),
    )
    assert stream.events.kind == (ROLE, REASONING, ERROR)
    assert stream.failure == ERROR_INSIDE
    assert stream.error == "Context size has been exceeded"


# llama-cpp-python 0.3.36 llama_cpp/server/app.py (get_event_publisher): where interrupt_requests is
# on, which it is unless it is switched off, the answer to one request ends in its middle when the
# next one arrives
def test_llama_cpp_server_interrupted() -> None:
    stream = read(
        sse(delta({"role": "assistant"})),
        sse(delta({"content": "Hi"})),
        sse("[DONE]"),
    )
    assert stream.failure == CUT_OFF
    assert stream.error is not None
    assert "before the answer was complete" in stream.error
    assert_complete(
        read(
            sse(delta({"content": "Hi"}, usage=usage(3, 1))),
            sse("[DONE]"),
        )
    )


# llama-cpp-python 0.3.36 llama_cpp/llama_chat_format.py (_convert_text_completion_chunks_to_chat),
# sent by sse-starlette: lines end with CRLF, a ping is a comment with a date, and there is no usage
def test_llama_cpp_server() -> None:
    def chunk(content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return delta(content, finish, choice={"logprobs": None})

    end = "\r\n\r\n"
    stream = read(
        b": ping - 2026-01-01 00:00:00.000000+00:00\r\n\r\n",
        sse(chunk({"role": "assistant"}), end=end),
        sse(chunk({"content": "Hi"}), end=end),
        sse(chunk({}, "stop"), end=end),
        sse("[DONE]", end=end),
    )
    assert_complete(stream)
    assert stream.events.kind == (PING, ROLE, TEXT, OTHER, DONE)
    assert stream.usage is None


# https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6: comments, other fields,
# data of several lines
def test_server_sent_events_as_specified() -> None:
    stream = read(
        b': a comment\nevent: message\nid: 7\nretry: 1000\ndata: {"choices":\n',
        b'data:[{"finish_reason":"stop","delta":{"content":"x"}}]}\n\n',
        b"event: ping\ndata: {}\n\n",
        b"data:[DONE]\n\n",
    )
    assert_complete(stream)
    assert stream.events.kind == (PING, TEXT, PING, DONE)


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_bytes_may_be_cut_anywhere(n: int) -> None:
    data = b": hi\r\n\r\n" + sse(
        delta({"content": "größe"}), delta({}, "stop"), "[DONE]", end="\r\n\r\n"
    )
    pieces = [data[i : i + n] for i in range(0, len(data), n)]
    stream = read(*pieces)
    assert_complete(stream)
    assert stream.events.kind == (PING, TEXT, OTHER, DONE)
    assert stream.text == "größe"
    assert sum(stream.events.n_bytes) == len(data)
    assert stream.events.arrive_ns[-1] == 10 * len(pieces)


def test_events_without_data_only_keep_the_connection_open() -> None:
    empty = [b"data:\n\n", b"data: \n\n", b"id: 7\n\n", b"event: ping\n\n", b": hello\n\n"]
    stream = read(
        *empty,
        sse(
            delta({"content": "a"}),
            delta({}, "stop"),
            "[DONE]",
        ),
    )
    assert_complete(stream)
    assert stream.events.kind == (*[PING] * 5, TEXT, OTHER, DONE)
    assert stream.text == "a"
    assert read(b"event: error\ndata:\n\n").failure is not None


def test_the_last_empty_line_may_be_missing() -> None:
    for last in (b"data: [DONE]\n", b"data: [DONE]"):
        stream = read(sse(delta({"content": "x"}, "stop")), last)
        assert_complete(stream)
        assert stream.events.kind == (TEXT, DONE)


@pytest.mark.parametrize(
    "data", ["{", "[]", "[" * 100_000, '{"choices": [{"delta": {"content": "x"}}]} trailing']
)
def test_what_is_no_json_object_is_wrong(data: str) -> None:
    stream = read(
        sse(delta({"content": "x"})),
        sse(data),
        sse("[DONE]"),
    )
    assert stream.failure == WRONG_JSON
    assert stream.events.kind == (TEXT, ERROR, DONE)


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [None]},
        {"choices": [{"delta": None, "finish_reason": 3}]},
        {
            "choices": [
                {
                    "delta": [],
                    "token_ids": "x",
                    "logprobs": [],
                }
            ],
            "usage": [],
            "timings": "no",
        },
        {
            "choices": {},
            "usage": {"completion_tokens": -1, "prompt_tokens": True},
        },
        {
            "choices": [],
            "usage": {"completion_tokens": 1.5, "prompt_tokens_details": 3},
            "timings": {"prompt_ms": "x"},
        },
    ],
)
def test_fields_of_the_wrong_type_are_not_there(chunk: dict[str, Any]) -> None:
    stream = read(sse(chunk), sse("[DONE]"))
    assert_complete(stream)
    assert not set(stream.events.kind) & {TEXT, REASONING, TOOL}
    assert stream.usage is None


@pytest.mark.parametrize(
    "counts",
    [
        {
            "usage": {
                "prompt_tokens": 10**30,
                "completion_tokens": 2,
            }
        },
        {
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 2**63,
            }
        },
        {"timings": {"prompt_ms": 1e300, "predicted_n": 2}},
        {"timings": {"prompt_ms": float("nan")}},
    ],
)
def test_impossible_numbers_are_a_failure_with_a_reason(counts: dict[str, Any]) -> None:
    stream = read(
        sse(delta({"content": "a"})),
        sse(delta({}, "stop", **counts)),
        sse("[DONE]"),
    )
    assert stream.failure == IMPOSSIBLE
    assert stream.error == "the server counts more than is possible"
    assert stream.usage is None
    assert stream.timings is None


def test_a_finish_reason_is_a_plain_word_or_other() -> None:
    assert read(sse(delta({"content": "a"}, "tool_calls"))).finish_reason == "tool_calls"
    assert read(sse(delta({"content": "a"}, "<script>"))).finish_reason == "other"
