"""What agents send besides questions and answers, and what lab record makes of it: marks for a
cache, tools and documents of other kinds, questions on the side, other interfaces and addresses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import ClientSession

from lab.features.recording import breaks, sentences
from lab.features.recording.answers import read_answer
from lab.features.recording.causes import Finding, ServerState, client_cause, find_cause
from lab.features.recording.conversations import Prompt, RecordedConversation
from lab.features.recording.differences import difference, is_branch, what_changed
from lab.features.recording.prompts import blocks_of, has_prompt
from lab.features.recording.proxy import Proxy
from lab.remote.chat_bodies import as_chat
from tests.support.odd_server import Canned, odd_server
from tests.support.recordings import CLOCK, recorded

Body = dict[str, Any]
RULES = "Look at every folder before you write into it, and say what you did. " * 30


def found(before: Body, body: Body, n_cached: int, n_prompt: int = 600) -> Finding:
    """What is found of a call after one with a prompt of 500 tokens."""
    conversation = RecordedConversation(1)
    conversation.add(Prompt(1, blocks_of(before), 500, 10))
    prompt = Prompt(2, blocks_of(body), n_prompt, 10)
    return find_cause(prompt, n_cached, conversation, ServerState(), lambda text: None)


def chat(*turns: str, system: str = RULES, **more: Any) -> Body:
    """A chat whose questions and answers take turns."""
    messages = [{"role": "system", "content": system}]
    for number, text in enumerate(turns):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    return {"messages": messages, **more}


# Marks

MARK = {"cache_control": {"type": "ephemeral"}}


def of_chat(name: str, *marks: str) -> Body:
    """A tool of a chat, with the mark in the tool, in its function, or in both."""
    function = {"name": name, "parameters": {}} | (MARK if "function" in marks else {})
    return {"type": "function", "function": function} | (MARK if "tool" in marks else {})


def of_messages(name: str, *marks: str) -> Body:
    return {"name": name, "input_schema": {}} | (MARK if marks else {})


@pytest.mark.parametrize("tool", [of_chat, of_messages])
@pytest.mark.parametrize("mark", ["tool", "function"])
def test_a_mark_for_a_cache_is_no_part_of_a_tool(tool: Any, mark: str) -> None:
    plain = chat("Go.", tools=[tool("ls"), tool("cat")])
    for marked in (
        [tool("ls", mark), tool("cat")],
        [tool("ls"), tool("cat", mark)],
        [tool("ls", mark), tool("cat", "tool", "function")],
    ):
        assert blocks_of(chat("Go.", tools=marked)) == blocks_of(plain)
    other = chat("Go.", tools=[tool("ls", mark), tool("tail", mark)])
    assert blocks_of(other) != blocks_of(plain)
    assert "cache_control" in json.dumps(of_chat("ls", "tool"))


def test_a_tool_that_was_added_is_told_as_that() -> None:
    before = blocks_of(chat("Go.", tools=[of_chat("ls"), of_chat("cat")]))
    for tools in (["ls", "cat", "mcp"], ["ls", "mcp", "cat"], ["mcp", "ls", "cat"]):
        blocks = blocks_of(chat("Go.", tools=list(map(of_chat, tools))))
        result = difference(before, blocks)
        assert result is not None
        place = tools.index("mcp") + 1
        cause = client_cause(result, ServerState())
        assert sentences.label(cause) == f"tool {place}: added"
        assert sentences.where([recorded(2, 10, 0, 1.0, cause=cause)]) == (
            f"Tool {place} was added."
        )
        assert sentences.remedy(cause) == f"Send tool {place} from the first call on"


# Parts and items of other kinds

PATCH = "*** Update File: lamp.py\n" + "".join(f"+line {i}\n" for i in range(40))
PARTS: dict[str, Body] = {
    "a document": {"type": "document", "source": {"type": "text", "data": PATCH}},
    "a result of a search": {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [{"type": "web_search_result", "title": PATCH}],
    },
    "a call of a provider's tool": {
        "type": "server_tool_use",
        "id": "s2",
        "name": "web_search",
        "input": {"query": PATCH},
    },
    "a result for citations": {"type": "search_result", "source": "u", "title": PATCH},
    "a result of another server": {
        "type": "mcp_tool_result",
        "tool_use_id": "s3",
        "content": [{"type": "text", "text": PATCH}],
    },
}
ITEMS: dict[str, Body] = {
    "a patch": {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": PATCH},
    "a result": {"type": "custom_tool_call_output", "call_id": "c", "output": PATCH},
    "a shell": {"type": "local_shell_call", "call_id": "c", "action": {"command": [PATCH]}},
    "another result": {"type": "local_shell_call_output", "call_id": "c", "output": PATCH},
    "a search": {"type": "web_search_call", "action": {"query": PATCH}},
    "a result as an object": {
        "type": "function_call_output",
        "call_id": "c",
        "output": {"stdout": PATCH, "code": 0},
    },
}


def with_part(part: Body, asked: str) -> Body:
    parts = [{"type": "text", "text": "Read this."}, part]
    later = [{"role": "assistant", "content": "Read."}, {"role": "user", "content": asked}]
    return {"system": RULES, "messages": [{"role": "user", "content": parts}, *later]}


def with_item(item: Body, asked: str) -> Body:
    first = {"type": "message", "role": "user", "content": "Mend it."}
    return {"instructions": RULES, "input": [first, item, {"role": "user", "content": asked}]}


BODIES = {name: (with_part, part) for name, part in PARTS.items()} | {
    name: (with_item, item) for name, item in ITEMS.items()
}


@pytest.mark.parametrize("name", BODIES)
def test_a_change_in_a_part_of_any_kind_is_the_clients(name: str) -> None:
    make, part = BODIES[name]
    before = make(part, "And now?")
    changed = json.loads(json.dumps(part).replace("line 7", "line seven"))
    assert difference(blocks_of(before), blocks_of(make(part, "And now?"))) is None
    result = difference(blocks_of(before), blocks_of(make(changed, "And now?")))
    assert result is not None
    assert result.kind == breaks.CHANGED
    assert "7 -> seven" in result.excerpt
    finding = found(before, make(changed, "And now?"), n_cached=420)
    assert finding.cause is not None
    assert (finding.cause.by, finding.cause.kind) == ("client", breaks.CHANGED)


@pytest.mark.parametrize("name", ITEMS)
def test_ids_and_states_of_items_are_no_text(name: str) -> None:
    marked = {**ITEMS[name], "id": "i77", "status": "completed"}
    if ITEMS[name]["type"] != "function_call_output":
        assert blocks_of(with_item(marked, "?")) == blocks_of(with_item(ITEMS[name], "?"))
    assert blocks_of(with_item(ITEMS[name], "?"))[2].role == (
        "tool" if "output" in ITEMS[name]["type"] else "assistant"
    )


@pytest.mark.parametrize("name", PARTS)
def test_a_template_sees_no_part_that_it_does_not_know(name: str) -> None:
    messages: Any = as_chat(with_part(PARTS[name], "?"))["messages"]
    first = next(message for message in messages if message["role"] == "user")
    assert first["content"] == [{"type": "text", "text": "Read this."}]


# Questions on the side

SIDE = {
    "a title": "Write a title of three words.",
    "tags": "Give three tags as JSON.",
    "a summary": "Sum up what was done so far.",
    "a check": "Is this a new topic? Answer yes or no.",
    "a suggestion": "What could be asked next?",
}


@pytest.mark.parametrize("name", SIDE)
def test_a_question_on_the_side_breaks_nothing(name: str) -> None:
    answered = ("Look at src.", "It has three files.")
    before = chat(*answered, SIDE[name])
    after = chat(*answered, "Now mend the parser that fails.")
    assert is_branch(blocks_of(before), blocks_of(after))
    assert found(before, after, n_cached=448, n_prompt=510).cause is None


def test_a_prompt_that_grows_or_ends_otherwise_breaks_nothing() -> None:
    for ending in ("x", " + 1", "\n    return lamp", ""):
        assert (
            found({"prompt": f"{RULES}def"}, {"prompt": f"{RULES}def{ending}"}, 480).cause
            is None
        )
    assert found({"prompt": f"{RULES}def a"}, {"prompt": f"{RULES}class B"}, 480).cause is None


@pytest.mark.parametrize(
    "changed",
    [
        chat("Look at src at 10:01. Be quick.", "It has three files.", "And then?"),
        chat("Look at src.", "It has three files.", "And then?"),
        chat("<todo>2 of 9</todo> Look at src, please, and be quick."),
        {"prompt": f"It is 10:01. {RULES}"},
    ],
)
def test_a_change_with_something_behind_it_is_a_break(changed: Body) -> None:
    before = chat("Look at src at 10:00. Be quick.")
    if "prompt" in changed:
        before = {"prompt": f"It is 10:00. {RULES}"}
    if "todo" in json.dumps(changed):
        before = chat("<todo>1 of 9</todo> Look at src, please, and be quick.")
    assert not is_branch(blocks_of(before), blocks_of(changed))
    assert found(before, changed, n_cached=480).cause is not None


# What changed

DATES = [
    ("It is Mon Nov 30 2026 here", "It is Tue Dec 01 2026 here"),
    ("(Monday, November 30, 2026)", "(Tuesday, December 1, 2026)"),
    ("on 31 May 2026.", "on 1 June 2026."),
    ("Today: Friday", "Today: Saturday"),
    ("Sept 30th, 2026", "Oct 1st, 2026"),
]
NO_DATES = [
    "lamp",
    "Monitor 1",
    "Decide",
    "1 file",
    "Marching",
    "Sunny",
    "v1.2",
    "May I",
    "a may",
]


@pytest.mark.parametrize(("before", "now"), DATES)
def test_a_date_in_words_is_a_date(before: str, now: str) -> None:
    assert what_changed(before, now) == "a date"


@pytest.mark.parametrize("word", NO_DATES)
def test_other_words_are_no_date(word: str) -> None:
    assert what_changed(f"It says: {word} .", "It says: something else .") != "a date"


@pytest.mark.parametrize(
    ("before", "now", "what"),
    [
        ("at 10:01:00 +01:00, 71k left", "at 10:02:00 +01:00, 70k left", "a time of day"),
        ("on 2026-11-30 with 4 files", "on 2026-12-01 with 5 files", "a date"),
        ("todo 3 of 9: mend", "todo 4 of 9: test it", "a number"),
        ("id 7f3a9b21c4 by lamp", "id 90be77d1a2 by desk", "an identifier"),
        ("Sunday, all is well", "Monday, nothing is", "a date"),
        ("all is well at 10:01", "nothing is at 10:02", ""),
        ("lamp 7", "desk 8", ""),
    ],
)
def test_of_several_changes_the_first_is_named(before: str, now: str, what: str) -> None:
    assert what_changed(before, now) == what
    assert what_changed(f"{RULES} {before} {RULES}", f"{RULES} {now} {RULES}") == what


def test_an_excerpt_stands_in_one_line() -> None:
    result = difference(
        blocks_of(chat("Go.", system=f"Files:\na.py\n{RULES}")),
        blocks_of(chat("Go.", system=f"Files:\na.py\nb.py\n{RULES}")),
    )
    assert result is not None
    label = sentences.label(client_cause(result, ServerState()))
    assert "\n" not in label
    assert "b.py\\n" in label
    assert sentences.label(CLOCK)


# Ollama's own interface


def lines_of_ollama(of_text: str) -> Iterator[bytes]:
    for word in ("", " a", " b"):
        text: Any = {"role": "assistant", of_text: word} if of_text != "response" else word
        name = "response" if of_text == "response" else "message"
        yield json.dumps({"model": "m", name: text, "done": False}).encode() + b"\n"
    counts = {
        "prompt_eval_count": 70,
        "eval_count": 2,
        "prompt_eval_duration": 5,
        "done": True,
    }
    yield json.dumps({"model": "m", **counts}).encode() + b"\n"


@pytest.mark.parametrize("of_text", ["content", "thinking", "tool_name", "response"])
def test_an_answer_of_ollama_is_read(of_text: str) -> None:
    pieces = list(enumerate(lines_of_ollama(of_text)))
    answer = read_answer(pieces, "", "application/x-ndjson")
    assert (answer.n_prompt, answer.n_cached, answer.n_gen) == (70, None, 2)
    assert answer.first_ns == 1
    assert answer.timings is None  # which only a llama-server has
    whole = read_answer([(9, pieces[-1][1])], "", "application/json")
    assert (whole.n_prompt, whole.n_gen) == (70, 2)


PATHS = {
    "/api/chat": True,
    "/api/generate": True,
    "/v1/chat/completions": True,
    "/v1/messages?beta=true": True,
    "/v1/messages/count_tokens": False,
    "/api/embed": False,
    "/api/show": False,
    "/v1/embeddings": False,
    "/v1/models": False,
    "/api/tags": False,
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_with_a_prompt(path: str) -> None:
    assert has_prompt("POST", path) is PATHS[path]


# Addresses


@pytest.mark.parametrize(
    ("base", "sent_to", "arrives_at"),
    [
        ("/v1", "/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1", "/v1/chat/completions", "/api/v1/chat/completions"),
        ("/api/paas/v4", "/v1/chat/completions", "/api/paas/v4/chat/completions"),
        ("/v1beta/openai", "/v1/models", "/v1beta/openai/models"),
        ("/api", "/v1/v1/chat/completions", "/api/chat/completions"),
        ("/v1", "/slots", "/slots"),
        ("/v1", "/v1beta/x", "/v1beta/x"),
        (
            "/openai",
            "/v1/chat/completions?api-version=1",
            "/openai/chat/completions?api-version=1",
        ),
    ],
)
def test_v1_of_the_proxy_stands_for_the_address(
    base: str, sent_to: str, arrives_at: str
) -> None:
    async def status_of(address: str) -> int:
        url = f"{address.removesuffix('/v1')}{base}"
        root = url.removesuffix("/v1")
        async with Proxy(root, "127.0.0.1", 0, lambda call: None, url) as proxy:
            here = f"http://{proxy.host}:{proxy.port}"
            async with (
                ClientSession() as client,
                client.post(here + sent_to, json={}) as answer,
            ):
                return answer.status

    with odd_server({arrives_at: Canned(b"{}", 201)}, has_tokenizer=False) as server:
        assert asyncio.run(status_of(server.url)) == 201
