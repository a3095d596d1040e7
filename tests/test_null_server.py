"""The null server: what it sends, when, and what it keeps of it."""

import json
from typing import Any

from lab.core.request import CHAT, Asked
from lab.endpoints.access import access, ask
from lab.endpoints.client import Client
from lab.endpoints.formats import ask_for
from lab.endpoints.send_plan import SendPlan
from tests.null_server import ACCEPT, EMPTY, Behaviour, NullSettings, chunks, null_server, prompt_of

CHAT_BODY = {"model": "null", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2}
COMPLETION = {"model": "null", "prompt": "a b c", "max_tokens": 2}


def sent(body: dict[str, Any], how: Behaviour, n_cached: int = 0) -> list[tuple[float, Any]]:
    """When each event comes, and its choice."""
    events = [(chunk.at_ms, chunk.data.decode()[6:]) for chunk in chunks(body, how, n_cached)]
    return [(at_ms, json.loads(data)["choices"][0]) for at_ms, data in events if not data.startswith("[DONE]")]


def test_an_empty_chunk_has_no_role() -> None:
    assert sent(CHAT_BODY, Behaviour(role=EMPTY))[0] == (
        0.0,
        {"index": 0, "finish_reason": None, "delta": {"content": ""}},
    )
    assert sent(COMPLETION, Behaviour(role=EMPTY))[0] == (0.0, {"index": 0, "finish_reason": None, "text": ""})


def test_a_role_comes_in_chats_only() -> None:
    assert sent(CHAT_BODY, Behaviour(role=ACCEPT))[0][1]["delta"] == {"role": "assistant", "content": ""}
    assert sent(COMPLETION, Behaviour(role=ACCEPT))[0][1]["text"] == " word"


def test_tokens_of_the_prompt_cost_time_unless_they_are_cached() -> None:
    how = Behaviour(first_ms=10, prompt_token_ms=2, gap_ms=1)
    assert [at_ms for at_ms, _ in sent(COMPLETION, how)] == [16, 17, 17]
    assert sent(COMPLETION, how, n_cached=2)[0][0] == 12


def test_objects_are_named_as_openai_names_them() -> None:
    names = [json.loads(next(chunks(body, Behaviour(), 0)).data[6:])["object"] for body in (CHAT_BODY, COMPLETION)]
    assert names == ["chat.completion.chunk", "text_completion"]


def test_a_message_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    assert prompt_of({"messages": [{"role": "user", "content": parts}]}) == "a b c"


def test_each_stream_is_kept_in_the_order_in_which_it_came() -> None:
    settings = NullSettings(models={"null": Behaviour(first_ms=1, gap_ms=0.1, bundle=2, has_cache=True)})
    with null_server(settings) as server, Client(reached := access(server.url)) as client:
        asks = [ask_for(CHAT, "null", "a b c", Asked(n_prompt=8, n_gen=5, seed=seed), ()) for seed in (7, 7)]
        list(client.run(SendPlan(asks=tuple(asks), api=CHAT)))
        streams = (ask(reached, f"{reached.root}/null/sent").parsed or {})["streams"]
    assert [(log["seed"], log["model"], log["n_prompt"], log["n_cached"]) for log in streams] == [
        (7, "null", 8, 0),
        (7, "null", 8, 3),  # the template is in no cache
    ]
    for log in streams:
        assert log["n_tokens"] == [2, 2, 1]
        assert log["received_ns"] < log["due_ns"][0] <= log["sent_ns"][0] < log["sent_ns"][2]
