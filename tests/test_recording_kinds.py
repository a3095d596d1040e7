"""lab record with the requests and answers of real clients and servers: other interfaces, images,
compression, errors, missing counts and impossible times."""

import dataclasses
import itertools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import brotli
import pytest
from hypothesis import given, settings, strategies as st

from lab.app import kinds
from lab.core.lines import to_json
from lab.errors import LabError
from lab.features.recording import breaks, figures, picture, repeat, sentences
from lab.features.recording.answers import read_answer
from lab.features.recording.causes import Finding, ServerState, find_cause
from lab.features.recording.conversations import Conversations, Prompt, RecordedConversation
from lab.features.recording.differences import difference
from lab.features.recording.lines import RecordedCall
from lab.features.recording.prompts import blocks_of, length
from lab.remote.chat_bodies import as_chat
from tests.support.recordings import CLOCK, recorded, session_with_a_clock
from tests.support.tables import lines_of

IMAGE = "iVBORw0KGgoAAAANSUhEUg" * 4000
LONG = "Keep to the rules of this house. " * 30
Body = dict[str, Any]


# Other interfaces


MESSAGES_API: dict[str, tuple[Body, list[Body]]] = {
    "system as a text": (
        {"system": "Be brief.", "messages": [{"role": "user", "content": "Hello"}]},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    ),
    "system as parts": (
        {
            "system": [
                {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."},
            ],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        },
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
    ),
    "a call of a tool and its result": (
        {
            "system": "",
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Look first."},
                        {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "a b"},
                        {"type": "text", "text": "Go on."},
                    ],
                },
            ],
        },
        [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Look first.",
                "tool_calls": [
                    {
                        "id": "t1",
                        "type": "function",
                        "function": {"name": "ls", "arguments": '{"path":"."}'},
                    }
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
            {"role": "tool", "tool_call_id": "t1", "content": "a b"},
        ],
    ),
    "a result in parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t2",
                            "content": [
                                {"type": "text", "text": "a"},
                                {"type": "text", "text": "b"},
                            ],
                        }
                    ],
                }
            ]
        },
        [{"role": "tool", "tool_call_id": "t2", "content": "ab"}],
    ),
}


@pytest.mark.parametrize("name", MESSAGES_API)
def test_a_request_of_the_messages_api_is_a_chat(name: str) -> None:
    body, messages = MESSAGES_API[name]
    assert as_chat(body)["messages"] == messages


def test_tools_of_the_messages_api_are_functions() -> None:
    schema = {"type": "object", "properties": {}}
    tool = {"name": "ls", "description": "Lists", "input_schema": schema}
    search = {"type": "web_search_20250305", "name": "web_search"}
    chat = as_chat({"messages": [], "tools": [tool, search]})
    function = {"name": "ls", "description": "Lists", "parameters": schema}
    assert chat["tools"] == [{"type": "function", "function": function}]


def test_a_request_of_the_responses_api_is_a_chat() -> None:
    body = {
        "model": "m",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "input": [
            {"role": "user", "content": "List."},
            {"type": "reasoning", "summary": [], "content": [{"text": "Look first."}]},
            {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a b"},
        ],
        "tools": [
            {"type": "function", "name": "ls", "parameters": {}},
            {"type": "web_search"},
        ],
    }
    chat = as_chat(body)
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "List."}]},
        {"role": "assistant", "reasoning_content": "Look first.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a b"},
    ]
    function = {"name": "ls", "parameters": {}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["reasoning_effort"] == "low"
    assert "input" not in chat


def test_a_chat_stays_as_it_is() -> None:
    parts = [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": "x"}},
    ]
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": parts}],
        "tools": [{"type": "function", "function": {"name": "ls"}}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert as_chat(body) == body
    assert as_chat({"prompt": "Once"}) == {"prompt": "Once"}


def test_messages_are_numbered_as_the_client_sends_them() -> None:
    body, _ = MESSAGES_API["a call of a tool and its result"]
    blocks = blocks_of({**body, "system": "Be brief."})
    assert [(block.index, block.role) for block in blocks] == [
        (0, "system"),
        *[(1, "assistant")] * 2,
        (2, "user"),
        (2, "tool"),
    ]


# Images


FILES: dict[str, Body] = {
    "chat": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
    "with a detail": {
        "type": "image_url",
        "image_url": {"url": f"data:image/webp;charset=utf-8;base64,{IMAGE}", "detail": "low"},
    },
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/jpeg", "data": IMAGE},
    },
    "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"},
    "audio": {"type": "input_audio", "input_audio": {"format": "wav", "data": IMAGE}},
    "a document": {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{IMAGE}"},
    },
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_as_letters_is_no_text_but_another_file_differs(name: str) -> None:
    def prompt(part: Body) -> Any:
        content = [{"type": "text", "text": "What is this?"}, part]
        return blocks_of({"messages": [{"role": "user", "content": content}]})

    blocks = prompt(FILES[name])
    assert length(blocks) < 300
    assert blocks == prompt(json.loads(json.dumps(FILES[name])))
    changed_file = json.loads(json.dumps(FILES[name]).replace("AAAANSUhEUg", "AAAANSUhEUh", 1))
    assert blocks != prompt(changed_file)


WORDS = ("lamp", "data:", "base64,", "a/b+c==", "https://example.org/x.png", "é", "x" * 300)
ORDINARY = [" ".join(words) for words in itertools.product(WORDS, WORDS, ("go", "stop", ""))]


@pytest.mark.parametrize("text", [*ORDINARY, IMAGE])
def test_what_a_user_writes_is_text(text: str) -> None:
    assert blocks_of({"messages": [{"role": "user", "content": text}]})[0].text == text
    parts = [{"type": "text", "text": text}]
    assert blocks_of({"messages": [{"role": "user", "content": parts}]})[0].text == text


def test_tokens_of_an_image_are_not_shared_out_among_letters() -> None:
    """A prompt of 1,010 tokens is read again before an image of 300."""
    image = [{"type": "text", "text": "And now?"}, FILES["chat"]]
    first: list[Body] = [
        {"role": "system", "content": f"It is 10:00. {LONG * 4}"},
        {"role": "user", "content": "What is there?"},
    ]
    later = [
        {"role": "system", "content": f"It is 10:01. {LONG * 4}"},
        first[1],
        {"role": "assistant", "content": "Three files."},
        {"role": "user", "content": image},
    ]
    conversation = RecordedConversation(1)
    conversation.add(Prompt(1, blocks_of({"messages": first}), 1010, 2))
    prompt = Prompt(2, blocks_of({"messages": later}), 1320, 2)
    finding = find_cause(prompt, 0, conversation, ServerState(), lambda text: None)
    assert finding.cause is not None
    assert finding.cause.kind == breaks.CHANGED
    assert finding.n_new == pytest.approx(310, abs=5)


# What is new


def rendered_prompt(call: int, body: Body, text: str, n_gen: int) -> Prompt:
    """A prompt whose tokens are its characters."""
    tokens = tuple(map(ord, text))
    return Prompt(call, blocks_of(body), len(text), n_gen, text, tokens)


def test_thoughts_that_a_template_drops_are_not_read_again() -> None:
    thought = "I look at each folder and count. " * 20
    asked = [{"role": "user", "content": "How many files?"}]
    answered = [
        *asked,
        {"role": "assistant", "content": "Three.", "reasoning_content": thought},
        {"role": "tool", "content": "a.py b.py c.py"},
    ]
    later = [*answered, {"role": "user", "content": "And how many folders are there?"}]
    before = f"<user>How many files?<assistant>{thought}Three.<tool>a.py b.py c.py<assistant>"
    now = (
        "<user>How many files?<assistant>Three.<tool>a.py b.py c.py"
        "<user>And how many folders are there?<assistant>"
    )
    conversation = RecordedConversation(1)
    conversation.add(rendered_prompt(1, {"messages": answered}, before, 40))
    prompt = rendered_prompt(2, {"messages": later}, now, 5)
    n_cached = len("<user>How many files?<assistant>")
    finding = find_cause(prompt, n_cached, conversation, ServerState(), len)
    assert finding.cause is not None
    assert finding.cause.by == "template"
    n_read_again = len(now) - n_cached - (finding.n_new or 0)
    assert n_read_again == len("Three.<tool>a.py b.py c.py<")


def with_answer(text: str, n_gen: int) -> tuple[Finding, int]:
    """What is found of a call that sends this answer back after the system prompt changed, and its
    tokens behind the question."""
    first = [
        {"role": "system", "content": "It is 08:00."},
        {"role": "user", "content": "How?"},
    ]
    later = [
        {"role": "system", "content": "It is 08:01."},
        first[1],
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And then?"},
    ]
    before = "<system>It is 08:00.<user>How?<assistant>"
    now = f"<system>It is 08:01.<user>How?<assistant>{text}<user>And then?<assistant>"
    conversation = RecordedConversation(1)
    conversation.add(rendered_prompt(1, {"messages": first}, before, n_gen))
    prompt = rendered_prompt(2, {"messages": later}, now, 5)
    finding = find_cause(prompt, 18, conversation, ServerState(), len)
    return finding, len(now) - len(before)


@pytest.mark.parametrize(("text", "n_gen"), [("Three.", 4), ("Three.", 60), ("So " * 40, 7)])
def test_another_answer_than_the_generated_one_is_new(text: str, n_gen: int) -> None:
    """A replaced answer, and one without its reasoning: no cache holds its tokens there."""
    finding, n_behind = with_answer(text, n_gen)
    assert finding.cause is not None
    assert finding.n_new == n_behind


@pytest.mark.parametrize("n_words", range(1, 101))
@pytest.mark.parametrize("n_ending", [0, 1])
def test_the_generated_answer_is_not_new(n_words: int, n_ending: int) -> None:
    text = "word " * n_words + "end"
    n_gen = len(text) + n_ending
    finding, n_behind = with_answer(text, n_gen)
    assert finding.n_new == n_behind - n_gen


@pytest.mark.parametrize("n_cached", [236, 237, 200])
def test_a_prompt_that_was_served_whole_broke_nothing(n_cached: int) -> None:
    first = [{"role": "system", "content": f"Tool order: a, b. {LONG}"}]
    first.append({"role": "user", "content": "Go."})
    later = [{"role": "system", "content": f"Tool order: b, a. {LONG}"}, first[1]]
    later += [
        {"role": "assistant", "content": "Gone."},
        {"role": "user", "content": LONG[:99]},
    ]
    conversation = RecordedConversation(1)
    conversation.add(Prompt(1, blocks_of({"messages": first}), 200, 4))
    prompt = Prompt(2, blocks_of({"messages": later}), 237, 4)
    finding = find_cause(prompt, n_cached, conversation, ServerState(), lambda text: None)
    assert finding.cause is None


# Conversations


SHARED = {"role": "system", "content": LONG}
CONTEXT = {"role": "user", "content": f"<environment>{LONG}</environment>"}
OTHERS: dict[str, tuple[list[Body], list[Body]]] = {
    "another question": ([{"content": "What is 2 + 2?"}], [{"content": "What is 2 + 3?"}]),
    "after the same context": (
        [CONTEXT, {"content": "Mend the parser."}],
        [CONTEXT, {"content": "Mend the lexer."}],
    ),
    "a document and another question": (
        [{"content": f"{LONG} Question: what is a lamp?"}],
        [{"content": f"{LONG} Question: what is a comma?"}],
    ),
    "after a whole conversation": (
        [{"content": "Hello"}, {"role": "assistant", "content": "Hi"}, {"content": "Go"}],
        [{"content": "Hello again"}],
    ),
    "a longer one": (
        [{"content": "Name a colour"}],
        [{"content": "Name a colour and a stone"}],
    ),
}


def as_body(messages: list[Body]) -> Body:
    return {"messages": [SHARED, *({"role": "user", **message} for message in messages)]}


@pytest.mark.parametrize("name", OTHERS)
def test_another_question_with_the_same_system_prompt_is_another_conversation(
    name: str,
) -> None:
    conversations = Conversations()
    numbers = []
    for call, messages in enumerate(OTHERS[name], 1):
        blocks = blocks_of(as_body(messages))
        conversation = conversations.of(blocks)
        conversation.add(Prompt(call, blocks))
        numbers.append(conversation.number)
    assert numbers == [1, 2]


def test_the_same_question_with_another_clock_goes_on() -> None:
    conversations = Conversations()
    for call in range(3):
        messages = [{"role": "system", "content": f"It is 08:0{call}. {LONG}"}]
        messages.append({"role": "user", "content": "Mend the parser."})
        blocks = blocks_of({"messages": messages})
        conversation = conversations.of(blocks)
        conversation.add(Prompt(call, blocks))
        assert conversation.number == 1


def test_keys_in_another_order_are_not_a_tool_in_another_order() -> None:
    tool = {"name": "ls", "description": "Lists", "parameters": {"type": "object"}}
    turned = dict(reversed(tool.items()))
    before = blocks_of({"tools": [tool], "messages": [SHARED]})
    result = difference(before, blocks_of({"tools": [turned], "messages": [SHARED]}))
    assert result is not None
    assert (result.kind, result.what) == (breaks.REORDERED, "its keys")
    cause = dataclasses.replace(
        CLOCK, kind=result.kind, what=result.what, part="tool", index=0, character=1
    )
    sentence = sentences.where([recorded(2, 10, 0, 1.0, cause=cause)])
    assert sentence == "The keys of tool 1 came in another order, first at character 2."


# Answers


USAGE = {"prompt_tokens": 30, "completion_tokens": 2}


def event(fields: Body) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def chunk(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta}]})


STREAM = [
    chunk(role="assistant", content=""),
    chunk(content="a"),
    chunk(content="b"),
    event({"choices": [], "usage": USAGE}),
    b"data: [DONE]\n\n",
]


def gzipped(data: list[bytes]) -> list[bytes]:
    stream = zlib.compressobj(wbits=31)
    return [stream.compress(piece) + stream.flush(zlib.Z_SYNC_FLUSH) for piece in data]


def deflated(data: list[bytes], wbits: int = 15) -> list[bytes]:
    stream = zlib.compressobj(wbits=wbits)
    return [stream.compress(piece) + stream.flush(zlib.Z_SYNC_FLUSH) for piece in data]


def with_brotli(data: list[bytes]) -> list[bytes]:
    stream = brotli.Compressor()
    return [stream.process(piece) + stream.flush() for piece in data]


COMPRESSED = {
    "gzip": ("gzip", gzipped(STREAM)),
    "x-gzip": ("x-gzip", gzipped(STREAM)),
    "deflate": ("deflate", deflated(STREAM)),
    "deflate without a header": ("deflate", deflated(STREAM, -15)),
    "br": ("br", with_brotli(STREAM)),
    "none": ("identity", STREAM),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressed_stream_is_read_as_it_arrives(name: str) -> None:
    encoding, pieces = COMPRESSED[name]
    answer = read_answer(list(enumerate(pieces)), encoding, "text/event-stream")
    assert answer.first_ns == 1
    assert (answer.n_prompt, answer.n_gen) == (30, 2)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "compress"])
def test_a_body_that_cannot_be_decompressed_is_no_answer(encoding: str) -> None:
    answer = read_answer([(1, b"\x00\x01 nothing of the kind")], encoding, "text/event-stream")
    assert answer.first_ns is None
    assert answer.n_prompt is None
    assert answer.is_readable is (encoding not in ("zstd", "compress"))


ERRORS = {
    "an event of its own": [
        STREAM[1],
        b'event: error\ndata: {"message": "overloaded, try later"}\n\n',
    ],
    "a field of a chunk": [STREAM[1], event({"error": {"message": "slow down", "code": 500}})],
    "of the messages api": [
        b'event: error\ndata: {"type": "error", "error": {"message": "Overloaded"}}\n\n'
    ],
    "of the responses api": [
        event({"type": "response.failed", "response": {"error": {"message": "out of memory"}}})
    ],
    "a text": [STREAM[1], event({"error": "context size has been exceeded"})],
    "before anything": [event({"error": {"message": "Loading model", "code": 503}})],
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_a_stream_is_an_error(name: str) -> None:
    assert read_answer(list(enumerate(ERRORS[name])), "", "text/event-stream").error


def test_a_stop_reason_is_nothing_generated() -> None:
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 3}}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ]
    answer = read_answer(list(enumerate(map(event, events))), "", "text/event-stream")
    assert answer.first_ns is None


# Figures


def part_of(calls: list[RecordedCall]) -> Any:
    (chapter,) = kinds.sections(calls)
    (part,) = chapter.parts
    return part


def test_unknown_tokens_are_not_zero() -> None:
    calls = []
    for call in range(1, 4):
        cause = CLOCK if call > 1 else None
        calls.append(recorded(call, None, None, 0.3, n_gen=None, cause=cause))
    part = part_of(calls)
    assert part.answer.startswith("What the cache served is unknown")
    assert '"include_usage": true' in part.answer
    assert part.sentences[0].startswith(
        "Calls 2 and 3 read an unknown number of tokens again."
    )
    assert "saves" not in part.sentences[1]


def test_failed_calls_are_told() -> None:
    calls = [recorded(call, None, None, 0.1, failure="HTTP 404") for call in (1, 2)]
    assert part_of(calls).answer == "All 2 calls failed: nothing is known about the cache."
    good = recorded(3, 100, 90, 0.1)
    assert part_of([*calls, good]).answer == (
        "The only call that did not fail broke no cache: 90 of 100 prompt tokens were cached."
    )


@pytest.mark.parametrize(
    ("prefill_ms", "decode_ms", "is_impossible"),
    [
        (1200, 50, True),
        (90, 50, False),
        (100, 5000, True),
        (90, 2000, True),
        (104, 900, False),
    ],
)
def test_times_of_a_server_that_exceed_the_call_are_not_used(
    prefill_ms: int, decode_ms: int, is_impossible: bool
) -> None:
    """The first token came after 0.1 s, and the call took 1.1 s."""
    times = {"prefill_ns": prefill_ms * 10**6, "decode_ns": decode_ms * 10**6}
    calls = [recorded(call, 400, 0, 0.1, **times) for call in (1, 2)]
    table = figures.bill(calls)
    expected = 0.1 if is_impossible else prefill_ms / 1000
    assert list(table.prefill_s) == [expected] * 2
    assert any("exceed" in note for note in part_of(calls).notes) is is_impossible


def test_three_calls_alike_do_not_fit_three_terms() -> None:
    """3 ms a token: without the clock, calls 2 and 3 would save 2.4 s."""
    calls = []
    for call, (n_prompt, n_cached, prefill_s) in enumerate(
        [(403, 0, 1.209), (420, 4, 1.373), (437, 4, 1.158)], 1
    ):
        cause = CLOCK if call > 1 else None
        calls.append(recorded(call, n_prompt, n_cached, prefill_s, n_new=16, cause=cause))
    (mend,) = figures.mends(calls)
    assert mend.saved_s == pytest.approx(2.43, abs=0.05)
    assert mend.low_s is None


def test_a_range_of_too_few_calls_is_unknown() -> None:
    calls = session_with_a_clock()[1:3]
    (mend,) = figures.mends(calls)
    assert mend.low_s is None
    assert "range unknown" in part_of(calls).sentences[1]


counts = st.one_of(st.none(), st.integers(0, 5000))
times_s = st.floats(0, 100)
calls_drawn = st.lists(
    st.tuples(counts, counts, times_s, counts, st.booleans(), st.one_of(st.none(), times_s)),
    min_size=1,
    max_size=12,
)


@given(calls_drawn)
@settings(max_examples=40, deadline=None)
def test_no_figure_is_negative_and_no_range_is_empty(rows: list[Any]) -> None:
    calls = []
    for call, (n_prompt, n_cached, prefill_s, n_new, is_broken, server_s) in enumerate(
        rows, 1
    ):
        if n_prompt is not None and n_cached is not None:
            n_cached = min(n_cached, n_prompt)
        more = {
            "n_new": n_new,
            "cause": CLOCK if is_broken and call > 1 else None,
            "prefill_ns": None if server_s is None else round(server_s * 1e9),
        }
        calls.append(recorded(call, n_prompt, n_cached, prefill_s, **more))
    table = figures.bill(calls)
    for name in ("n_again", "again_s", "prefill_s", "n_computed"):
        assert not (table[name] < 0).any(), name
    assert not (table.prefill_s > table.total_s + 1e-9).any()
    for mend in figures.mends(calls):
        for value in (mend.n_again, mend.saved_s, mend.low_s, mend.high_s, mend.mended_s):
            assert value is None or (value >= 0 and math.isfinite(value))
        if mend.low_s is not None and mend.high_s is not None and mend.saved_s is not None:
            assert mend.low_s <= mend.saved_s <= mend.high_s
            assert mend.low_s < mend.high_s
    assert part_of(calls).answer


# A session once more


def test_a_repeated_session_goes_on_without_what_the_client_changed() -> None:
    clock = {"role": "system", "content": "It is 08:00."}
    later = {"role": "system", "content": "It is 08:03."}
    question = {"role": "user", "content": "What is here?"}
    answer = {"role": "assistant", "content": "Three files."}
    more = {"role": "user", "content": "Open one."}
    bodies: list[Body] = [
        {"messages": [clock, question], "max_tokens": 50},
        {"messages": [later, question, answer, more], "max_tokens": 50, "cache_prompt": False},
    ]
    calls = [recorded(number, 9, 0, 1.0, body=body) for number, body in enumerate(bodies, 1)]
    first, second = repeat.mended(calls)
    assert first["messages"][0]["content"].endswith(" It is 08:00.")
    assert second["messages"] == [*first["messages"], answer, more]
    assert second["max_tokens"] == 10  # as many as were generated
    assert "cache_prompt" not in second
    assert bodies[0]["messages"][0] == clock


def test_a_prediction_is_compared_with_the_repeated_session() -> None:
    calls = session_with_a_clock()
    section = repeat.compared(calls, calls)
    assert "too short" in section.answer
    assert "outside its range" in section.answer
    assert len(lines_of(section)) == len(calls)


def test_a_slower_machine_is_told_from_a_wrong_prediction() -> None:
    calls = session_with_a_clock()
    slower = [dataclasses.replace(call, ended_ns=call.ended_ns * 5 // 4) for call in calls]
    answer = repeat.compared(calls, slower).answer
    assert answer.endswith("took 25.0% more time than when they were recorded.")


@pytest.mark.parametrize("scatter", [0.0, 0.3, 1.0])
def test_the_formula_lies_in_the_middle_of_times_that_scatter(scatter: float) -> None:
    calls = []
    for call in range(1, 41):
        factor = 1 + scatter * (call % 2)
        calls.append(recorded(call, 100 + 40 * call, 0, factor * (0.1 + 0.04 * call)))
    table = figures.bill(calls)
    formula = figures.fitted(table)
    assert formula is not None
    ratios = table.prefill_s / formula.seconds(table.n_prompt, 0)
    assert ratios.mean() == pytest.approx(1, abs=1e-6)


def test_a_recording_without_prompts_cannot_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "a-record.jsonl"
    path.write_text(f"{to_json(recorded(1, 10, 0, 1.0))}\n")
    with pytest.raises(LabError, match="--keep-text"):
        repeat.read_session(path)


def test_the_picture_shows_the_time_of_calls_whose_tokens_nobody_counted() -> None:
    """A bar per call and part: the time is all prefill where nothing else is known."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    calls = [recorded(1, None, None, 0.3), recorded(2, None, None, 0.3, cause=CLOCK)]
    figure = Figure()
    picture.draw(calls, figures.bill(calls), "a server", figure)
    heights = [
        bar.get_bbox().height for bar in figure.axes[1].patches if isinstance(bar, Rectangle)
    ]
    assert heights.count(0.3) == 2
