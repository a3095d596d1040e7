"""Streams as servers send them besides their documentation: what counts as content, when tokens
have a time, how lines end, and which numbers are no figures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from lab.core import request_times as times
from lab.core.request import (
    CUT_OFF,
    DONE,
    ERROR_INSIDE,
    HIDDEN,
    NO_CONTENT,
    NO_STREAM,
    OTHER,
    REASONING,
    ROLE,
    TEXT,
    TOOL,
    Asked,
    Request,
    ServerTimings,
    Usage,
)
from lab.core.request_times import contradictions, figures
from lab.remote.deltas import content_of
from lab.remote.streams import StreamedAnswer, StreamReader
from lab.show.text_requests import doubts, finished
from tests.support.requests import make_request, make_request_record
from tests.support.streams import delta, sse, usage

MS = 1_000_000
GAP_NS = 40 * MS


def read(pieces: Sequence[tuple[float, bytes]]) -> StreamedAnswer:
    """The stream of pieces, each with the ms at which it arrives."""
    reader = StreamReader([(round(ms * MS), data) for ms, data in pieces], 0)
    for _ in reader.read():
        pass
    return reader.answer()


def request_of(answer: StreamedAnswer, n_gen: int = 12, **changes: Any) -> Request:
    """The request that was answered so."""
    return make_request(
        asked=Asked(n_prompt=10, n_gen=n_gen),
        events=answer.events,
        tokens_by=answer.tokens_by,
        usage=answer.usage,
        timings=answer.timings,
        wrong_counts=answer.wrong_counts,
        finish_reason=answer.finish_reason,
        **changes,
    )


END = [
    (740.0, sse(delta({}, "length"))),
    (740.0, sse({"choices": [], "usage": usage(10, 12)})),
    (740.0, sse("[DONE]")),
]


def twelve(make: Any) -> list[tuple[float, bytes]]:
    """Events of 12 tokens, the first after 300 ms, then one every 40 ms; `make` has their delta."""
    return [(300.0 + 40 * i, sse(delta(make(i)))) for i in range(12)] + END


def text_part(i: int) -> dict[str, Any]:
    return {"type": "text", "text": f" w{i}"}


CONTENTS: dict[str, tuple[Any, str]] = {
    "a string": (lambda i: {"content": " w"}, TEXT),
    "parts (Mistral)": (lambda i: {"content": [text_part(i)]}, TEXT),
    "parts that are strings": (lambda i: {"content": [" w"]}, TEXT),
    "a part alone": (lambda i: {"content": text_part(i)}, TEXT),
    "a part within parts": (lambda i: {"content": [{"content": [text_part(i)]}]}, TEXT),
    "a value of a text (assistants)": (
        lambda i: {"content": [{"type": "text", "text": {"value": " w"}}]},
        TEXT,
    ),
    "thinking as a part (Mistral)": (
        lambda i: {"content": [{"type": "thinking", "thinking": [text_part(i)]}]},
        REASONING,
    ),
    "reasoning_content (DeepSeek)": (lambda i: {"reasoning_content": " t"}, REASONING),
    "reasoning (vLLM, OpenRouter)": (lambda i: {"reasoning": " t", "content": ""}, REASONING),
    "reasoning_details (OpenRouter)": (
        lambda i: {
            "content": "",
            "reasoning_details": [{"type": "reasoning.text", "text": " t"}],
        },
        REASONING,
    ),
    "reasoning as a summary": (
        lambda i: {"reasoning_details": [{"type": "reasoning.summary", "summary": " t"}]},
        REASONING,
    ),
    "thinking_blocks (LiteLLM)": (
        lambda i: {"thinking_blocks": [{"type": "thinking", "thinking": " t"}]},
        REASONING,
    ),
    "an encrypted thought": (
        lambda i: {"reasoning_details": [{"type": "reasoning.encrypted", "data": "Zm9v"}]},
        TEXT,
    ),
    "function_call": (lambda i: {"function_call": {"arguments": "x"}}, TOOL),
    "tool_calls": (
        lambda i: {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]},
        TOOL,
    ),
    "a refusal": (lambda i: {"refusal": " no"}, TEXT),
    "sound": (lambda i: {"audio": {"id": "a", "data": "AAAA"}}, TEXT),
    "a picture": (lambda i: {"images": [{"image_url": {"url": "data:"}}]}, TEXT),
    "a field that nobody knows": (lambda i: {"x_text": " w"}, TEXT),
    "a string for a delta": (lambda i: " w", TEXT),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_whatever_is_in_a_delta_is_content(name: str) -> None:
    make, kind = CONTENTS[name]
    answer = read([(5.0, sse(delta({"role": "assistant", "content": ""}))), *twelve(make)])
    assert answer.failure is None
    assert answer.events.kind[:13] == (ROLE, *[kind] * 12)
    of_answer = figures(request_of(answer))
    assert of_answer.ttft_ns == 300 * MS
    assert of_answer.tpot_ns == 40 * MS
    assert of_answer.n_generated == 12


@pytest.mark.parametrize(
    "empty",
    [
        {},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": None, "function_call": None},
        {"content": "", "reasoning": "", "reasoning_details": [], "annotations": []},
        {"content": [{"type": "text", "text": ""}], "name": "assistant"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {}}]},
        {"provider_specific_fields": {"citations": None}, "audio": None},
        {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "Zm9v"}]},
    ],
)
def test_what_only_describes_content_is_none(empty: dict[str, Any]) -> None:
    assert content_of({"index": 0, "delta": empty}).kind is None


def test_reasoning_in_two_fields_is_one_text() -> None:
    choice = {"delta": {"reasoning": " t", "reasoning_content": " t", "content": None}}
    assert content_of(choice).text == " t"


# Tokens that have a time


def growing(n: int, text: str = "", **fields: Any) -> bytes:
    return sse(delta({"content": text, **fields}, usage=usage(10, n)))


def test_tokens_before_the_first_text_count_from_when_they_were_counted() -> None:
    hidden = [(200.0 + 50 * i, growing(i + 1)) for i in range(4)]
    shown = [(400.0 + 50 * i, growing(i + 5, " w")) for i in range(8)]
    answer = read([(5.0, growing(0, role="assistant")), *hidden, *shown, *END[::2]])
    of_answer = figures(request_of(answer))
    assert answer.events.kind[:6] == (ROLE, *[HIDDEN] * 4, TEXT)
    assert of_answer.ttft_ns == 200 * MS
    assert of_answer.first_output_ns == 400 * MS
    assert of_answer.tpot_ns == 50 * MS
    assert "4 tokens per arrival" not in finished(make_request_record(request_of(answer)))
    assert "tokens that the server counts" in " ".join(doubts([request_of(answer)]))


def test_the_running_total_at_the_first_text_counts() -> None:
    """The server counts the first tokens in the event of the role, before the prompt is read."""
    shown = [(400.0 + 50 * i, growing(i + 5, " w")) for i in range(8)]
    answer = read([(5.0, growing(4, role="assistant")), *shown, *END])
    assert answer.events.n_tokens is not None
    assert answer.events.n_tokens[:3] == (0, 5, 1)
    of_answer = figures(request_of(answer))
    assert of_answer.ttft_ns == 400 * MS
    assert of_answer.tpot_ns == 50 * MS


def test_tokens_after_the_last_text_have_no_time() -> None:
    shown = [(300.0 + 40 * i, growing(i + 1, " w")) for i in range(6)]
    late = [(540.0 + 40 * i, growing(7 + i)) for i in range(6)]
    answer = read([*shown, *late, *END])
    of_answer = figures(request_of(answer))
    assert set(answer.events.kind) & {HIDDEN} == set()
    assert of_answer.e2e_ns == 500 * MS
    assert of_answer.tpot_ns == 40 * MS
    assert of_answer.n_generated == 12


@pytest.mark.parametrize("n_together", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("apart_ms", [0.0, 0.05, 1.0])
def test_tokens_that_arrive_together_are_no_steps(n_together: int, apart_ms: float) -> None:
    """They come when the last of them is generated, in one write or in several."""
    pieces = []
    for i in range(0, 12, n_together):
        at_ms = 300 + 40 * (i + n_together - 1)
        pieces += [
            (at_ms + apart_ms * j, sse(delta({"content": " w"}))) for j in range(n_together)
        ]
    request = request_of(read([*pieces, *END]))
    of_answer = figures(request)
    assert of_answer.tpot_ns == pytest.approx(40 * MS, rel=0.01)
    line = finished(make_request_record(request))
    assert (f"{n_together} tokens per arrival" in line) == (n_together > 1)
    assert ("tokens per arrival" in " ".join(doubts([request]))) == (n_together > 1)


def test_reasoning_that_did_not_come_is_before_the_first_text() -> None:
    """As of OpenAI's reasoning models: 500 tokens that nobody sees, then 12."""
    counts = usage(10, 512, completion_tokens_details={"reasoning_tokens": 500})
    end = [(740.0, sse(delta({}, "stop"), {"choices": [], "usage": counts}, "[DONE]"))]
    answer = read([*twelve(lambda i: {"content": " w"})[:12], *end])
    of_answer = figures(request_of(answer, n_gen=600))
    assert of_answer.n_generated == 512
    assert of_answer.tpot_ns == 40 * MS


@pytest.mark.parametrize(
    "counts",
    [
        {
            **usage(10, 6),
            "total_tokens": 22,
            "completion_tokens_details": {"reasoning_tokens": 6},
        },
        {**usage(10, 2), "reasoning_tokens": 10},
    ],
    ids=["the total says so", "more than all"],
)
def test_reasoning_that_is_not_counted_is_added(counts: dict[str, Any]) -> None:
    n = counts["completion_tokens"]
    pieces = twelve(lambda i: {"content": " w"} if i >= 12 - n else {"reasoning": " t"})[:12]
    end = [(740.0, sse(delta({}, "length"), {"choices": [], "usage": counts}, "[DONE]"))]
    of_answer = figures(request_of(read([*pieces, *end])))
    assert of_answer.n_generated == 12
    assert of_answer.is_short is False
    assert of_answer.tpot_ns == 40 * MS


# Lines

CHUNKS: list[dict[str, Any] | str] = [
    delta({"content": "a"}),
    delta({"content": "größe"}),
    delta({}, "stop"),
    "[DONE]",
]
KINDS = (TEXT, TEXT, OTHER, DONE)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("n_bytes", [1, 7, 10_000])
def test_lines_end_in_three_ways(line_end: str, begin: bytes, n_bytes: int) -> None:
    data = begin + sse(*CHUNKS, end=line_end * 2)
    pieces = [(float(i + 1), data[i : i + n_bytes]) for i in range(0, len(data), n_bytes)]
    answer = read(pieces)
    assert answer.failure is None
    assert answer.events.kind == KINDS
    assert answer.text == "agröße"
    assert sum(answer.events.n_bytes) == len(data)


def test_a_lone_cr_ends_an_event_when_it_arrives() -> None:
    pieces = [(10.0 * (i + 1), sse(chunk, end="\r\r")) for i, chunk in enumerate(CHUNKS)]
    assert read(pieces).events.arrive_ns == tuple(10 * MS * (i + 1) for i in range(4))


def test_events_on_lines_without_blank_ones_have_their_own_times() -> None:
    """With and without `data:`."""
    for field in ("data: ", ""):
        texts = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in CHUNKS]
        texts[-1] = "data: [DONE]".removeprefix("" if field else "nothing")
        pieces = [
            (10.0 * (i + 1), f"{'' if text.startswith('data') else field}{text}\n".encode())
            for i, text in enumerate(texts)
        ]
        answer = read(pieces)
        assert answer.failure is None
        assert answer.events.kind == KINDS
        assert answer.events.arrive_ns == tuple(10 * MS * (i + 1) for i in range(4))


MEMORY = "out of memory"
ERRORS = {
    "a field": b'error: {"code":500,"message":"CUDA error: out of memory"}\n\n',
    "a field, without its end": b'error: {"code":500,"message":"out of memory"}',
    "a field with words": b"error: out of memory\n\n",
    "JSON alone": b'{"error":{"code":500,"message":"out of memory"}}',
    "JSON alone on a line": b'{"error":{"message":"out of memory"}}\n',
    "an event": b'event: error\ndata: {"message": "out of memory"}\n\n',
    "an event with words": b"event: error\ndata: out of memory\n\n",
    "data": b'data: {"error": "out of memory"}\n\n',
    "an object of the kind error": b'data: {"object":"error","message":"out of memory"}\n\n',
    "a list": b'data: {"success": false, "errors": [{"message": "out of memory"}]}\n\n',
    "a choice": b'data: {"choices":[{"delta":{},"error":{"message":"out of memory"}}]}\n\n',
    "a message with a code": b'data: {"code": 5001, "message": "out of memory"}\n\n',
    "details": b'data: {"detail": [{"msg": "out of memory", "loc": ["body"]}]}\n\n',
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("n_before", [0, 2])
def test_an_error_is_the_servers_however_it_is_sent(name: str, n_before: int) -> None:
    before = [(10.0, sse(delta({"content": "a"})))] * n_before
    answer = read([*before, (20.0, ERRORS[name])])
    assert answer.failure == ERROR_INSIDE
    assert answer.error == MEMORY


def test_a_body_that_is_one_object_may_have_several_lines() -> None:
    body = b'{\n  "error": {\n    "message": "out of memory"\n  }\n}\n'
    assert read([(10.0, body[:9]), (20.0, body[9:])]).error == MEMORY


def test_an_empty_reason_is_none_and_an_unknown_one_is_an_end() -> None:
    cut = [(10.0, sse(delta({"content": "a"}, "", usage=usage(5, 1))))]
    assert read(cut).failure == CUT_OFF
    for reason in ("", None):
        end = [(20.0, sse(delta({}, reason), "[DONE]"))]
        answer = read([*cut, *end])
        assert answer.failure is None
        assert answer.finish_reason is None
    for reason, kept in (("MAX_TOKENS", "max_tokens"), ("SAFETY", "safety"), ("why", "other")):
        answer = read([(10.0, sse(delta({"content": "a"}, reason)))])
        assert answer.failure is None
        assert answer.finish_reason == kept


# Numbers that are no figures


@pytest.mark.parametrize("n", [5, 12, 500])
def test_tokens_that_never_came_are_a_contradiction(n: int) -> None:
    answer = read(
        [(10.0, sse(delta({}, "length"), {"choices": [], "usage": usage(5, n)}, "[DONE]"))]
    )
    assert answer.failure == NO_CONTENT
    assert answer.error == f"the server counts {n} generated tokens, and none of them arrived"


@pytest.mark.parametrize(
    "counts",
    [
        usage(5, 0),
        usage(5, 1),
        usage(5, 4),
        usage(5, 500, completion_tokens_details={"reasoning_tokens": 500}),
    ],
)
def test_an_answer_may_have_nothing_but_its_end(counts: dict[str, Any]) -> None:
    """Marks of reasoning, the end, or reasoning that the server keeps to itself."""
    end = sse(delta({}, "length"), {"choices": [], "usage": counts}, "[DONE]")
    assert read([(10.0, end)]).failure is None


def test_a_whole_message_is_no_stream() -> None:
    choice = {"index": 0, "message": {"content": "a b c"}, "finish_reason": "stop"}
    answer = read([(10.0, sse({"choices": [choice], "usage": usage(5, 3)}, "[DONE]"))])
    assert answer.failure == NO_STREAM


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        (usage(10, -3), "counts -3 completion tokens"),
        (usage(10, 11.5), "counts 11.5 completion tokens"),  # type: ignore[arg-type]
        (usage(-1, 12), "counts -1 prompt tokens"),
        (usage(10, 36), "counts 36 tokens of an answer of at most 12"),
        (
            usage(10, 12, prompt_tokens_details={"cached_tokens": 200}),
            "counts 200 cached tokens of a prompt of 10",
        ),
        (
            usage(10, 12, prompt_tokens_details={"cached_tokens": -7}),
            "counts -7 cached tokens",
        ),
    ],
)
def test_a_count_that_cannot_be_is_told_and_no_figure(
    counts: dict[str, Any], sentence: str
) -> None:
    end = [(740.0, sse(delta({}, "length"), {"choices": [], "usage": counts}, "[DONE]"))]
    request = request_of(read([*twelve(lambda i: {"content": " w"})[:12], *end]))
    assert contradictions(request) == [sentence]
    assert any(sentence in doubt for doubt in doubts([request]))
    of_answer = figures(request)
    assert of_answer.n_generated in (None, 12)
    assert of_answer.n_cached is None
    assert of_answer.tpot_ns in (None, 40 * MS)


@pytest.mark.parametrize("n", [12, 12.0, 13])
def test_ordinary_counts_are_figures(n: Any) -> None:
    counts = {"prompt_tokens": 10.0, "completion_tokens": n}
    end = [(740.0, sse(delta({}, "length"), {"choices": [], "usage": counts}, "[DONE]"))]
    request = request_of(read([*twelve(lambda i: {"content": " w"})[:12], *end]))
    assert contradictions(request) == []
    assert figures(request).n_generated == n
    assert figures(request).n_prompt == 10


@pytest.mark.parametrize(
    ("prompt_ms", "gen_ms", "is_possible"),
    [(290.0, 440.0, True), (0.0, 0.0, True), (5000.0, 440.0, False), (300.0, 600.0, False)],
)
def test_times_of_the_server_that_exceed_the_call_are_not_used(
    prompt_ms: float, gen_ms: float, is_possible: bool
) -> None:
    timings = ServerTimings(n_prompt=10, prompt_ms=prompt_ms, n_gen=12, gen_ms=gen_ms)
    answer = read(twelve(lambda i: {"content": " w"}))
    request = dataclasses.replace(request_of(answer, ended_ns=745 * MS), timings=timings)
    assert (times.server_timings(request) is not None) == is_possible
    assert bool(contradictions(request)) != is_possible


def random_stream(draw: random.Random) -> list[tuple[float, bytes]]:
    """A stream of odd deltas, counts, line ends and pauses."""
    at_ms = draw.choice([0.001, 3.0, 250.0])
    n = 0
    pieces = []
    for _ in range(draw.randrange(0, 14)):
        at_ms += draw.choice([0.0, 0.0, 0.01, 1.0, 40.0])
        n += draw.choice([0, 1, 1, 1, 3, -1])
        content: Any = draw.choice(
            ["", " w", None, [{"type": "text", "text": "x"}], [], 3, {}]
        )
        field = draw.choice(
            ["content", "content", "reasoning", "tool_calls", "unknown", "role"]
        )
        more: dict[str, Any] = draw.choice([{}, {"usage": usage(5, n)}, {"usage": None}])
        chunk = delta({field: content}, draw.choice([None, None, "", "stop"]), **more)
        pieces.append((at_ms, sse(chunk, end=draw.choice(["\n\n", "\r\n\r\n", "\r\r", "\n"]))))
    n_all: Any = draw.choice([n, 0, -3, 3.0, 2.5, 10**6, 12, None])
    counts = usage(5, 0) | {"completion_tokens": n_all}
    counts |= draw.choice(
        [{}, {"prompt_tokens_details": {"cached_tokens": draw.randrange(9)}}]
    )
    counts |= draw.choice([{}, {"reasoning_tokens": draw.randrange(20)}])
    timings = {"prompt_ms": draw.choice([1, 1e6]), "predicted_ms": 2, "predicted_n": n}
    pieces.append((at_ms, sse({"choices": [], "usage": counts, "timings": timings})))
    pieces.append((at_ms + draw.choice([0.0, 5.0]), sse("[DONE]")))
    return pieces


def test_no_stream_gives_a_negative_or_empty_figure() -> None:
    draw = random.Random(65)
    for _ in range(3000):
        pieces = random_stream(draw)
        request = request_of(read(pieces), ended_ns=round(pieces[-1][0] * MS))
        of_answer = figures(request)
        for name in ("ttft_ns", "first_output_ns", "e2e_ns", "tpot_ns", "longest_stall_ns"):
            value = getattr(of_answer, name)
            assert value is None or value > 0, (name, pieces)
        low, high = of_answer.tpot_bounds_ns or (1.0, 1.0)
        assert 0 < low <= high, pieces
        for count in (of_answer.n_generated, of_answer.n_prompt, of_answer.n_cached):
            assert count is None or count >= 0, pieces
        assert (of_answer.n_cached or 0) <= (of_answer.n_prompt or 10**9), pieces
        assert all(gap >= 0 for gap in times.chunk_gaps_ns(request)), pieces
        assert all(gap >= 0 for gap in times.itl_ns(request) or ()), pieces
        stamps = list(itertools.pairwise(request.events.arrive_ns))
        assert all(earlier <= later for earlier, later in stamps), pieces


def test_what_a_record_holds_is_what_the_server_said() -> None:
    """Only figures leave out what cannot be."""
    request = request_of(
        read(twelve(lambda i: {"content": " w"})),
        n_gen=2,
    )
    assert request.usage == Usage(prompt_tokens=10, completion_tokens=12)
    assert figures(request).n_generated is None
