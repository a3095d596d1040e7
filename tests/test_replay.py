"""Recorded requests replayed: an agent's calls as turns, with tools, results and reasoning, in
process and through servers."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import PREFILL
from lab.core.request import RequestRecord
from lab.core.request_times import figures as figures_of_request
from lab.core.script import Operation
from lab.errors import LabError
from lab.features.turns import planning, recorded_calls
from lab.features.turns.conversation import NAME, Conversation
from lab.features.turns.figures import figures, rows
from lab.features.turns.prompts import n_repeated, recorded_conversation
from lab.features.turns.recorded_calls import Call, Recording, read_recording
from lab.features.turns.recorded_turns import prepared, with_nonce
from lab.features.turns.rendered import RenderedPrompt
from lab.features.turns.sentences import sentences
from lab.features.turns.server_figures import (
    answered,
    not_cold,
    not_longer,
    served,
    was_cached,
)
from lab.features.turns.through_server import replay as send_recorded
from lab.process.worker import Worker
from lab.remote.examination import connect
from lab.runner.cases import Case, Plan
from tests.support.agent_transcript import messages, requests
from tests.support.command import run_lab
from tests.support.null_server import NullSettings, null_server
from tests.support.records import SETTINGS, column, make_record, make_run, steps_of
from tests.support.servers import wheel_server


def written(folder: Path, values: list[Any], name: str = "agent.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, values)))
    return path


def test_each_request_of_an_agent_is_a_turn_with_its_recorded_answer(tmp_path: Path) -> None:
    bodies = requests(8)

    recording = read_recording(written(tmp_path, bodies))

    answers = column(recording.calls, "answer")
    assert [call.body["messages"] for call in recording.calls] == [
        body["messages"] for body in bodies
    ]
    assert recording.calls[3].body["tools"] == bodies[3]["tools"]
    assert [answer["tool_calls"][0]["id"] for answer in answers[:7]] == [
        f"call_{number}" for number in range(7)
    ]
    assert answers[7] is None
    assert recording.notes == []


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(requests(4), id="bodies"),
        pytest.param([{"kind": "x", "body": body} for body in requests(4)], id="recording"),
        pytest.param(
            [{"kind": "x", "body": json.dumps(body)} for body in requests(4)], id="texts"
        ),
        pytest.param([requests(4)], id="array"),
        pytest.param(messages(4), id="messages"),
        pytest.param([{"messages": messages(4)}], id="one body"),
    ],
)
def test_a_file_has_bodies_lines_of_a_recording_or_messages(
    tmp_path: Path, values: list[Any]
) -> None:
    recording = read_recording(written(tmp_path, values))

    n_messages = [len(call.messages) for call in recording.calls]
    assert n_messages == [2, 4, 6, 8]


def test_an_answer_is_found_though_the_client_changes_earlier_messages(tmp_path: Path) -> None:
    """Here it shortens the first result and inserts a reminder in front."""
    bodies = copy.deepcopy(requests(4))
    bodies[3]["messages"][3]["content"] = "shortened"
    bodies[3]["messages"].insert(0, {"role": "system", "content": "Remember."})

    recording = read_recording(written(tmp_path, bodies))

    answer = recording.calls[2].answer
    assert answer is not None
    assert answer["tool_calls"][0]["id"] == "call_2"


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    content = [{"type": "text", "text": "What is it?"}, image]
    body = {"messages": [{"role": "user", "content": content}]}

    recording = read_recording(written(tmp_path, [body, {"kind": "request", "path": "/"}]))

    left_out = "1 image_url part and 1 line without a prompt"
    assert recording.notes[0] == f"Left out of the replay of agent.jsonl: {left_out}."
    assert recording.calls[0].messages[0]["content"] == content[:1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "has 0 calls", id="empty"),
        pytest.param(b"\xff\xfe", "line 1, is not JSON", id="no text"),
        pytest.param(b'{"role": "user", "content": 5}', "line 1, is no request", id="number"),
        pytest.param(b'{"role": "judge", "content": "x"}', "line 1, is no request", id="role"),
        pytest.param(b'{"messages": [5]}', "line 1, is no request", id="no messages"),
        pytest.param(b'{"messages": 5}', "line 1, is no request", id="no list"),
        pytest.param(b'{"input": "x"}', "line 1, is no request", id="responses"),
        pytest.param(b'{"kind": "x"}', "has no prompt to replay", id="without texts"),
        pytest.param(b"[" * 100_000, "line 1, is not JSON", id="deep"),
        pytest.param(b'{"prompt": "x"}\n' * 201, "has 201 calls", id="many calls"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)

    with pytest.raises(LabError, match=message):
        read_recording(path)


def test_a_missing_or_large_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_calls, "MOST_BYTES", 1 << 20)
    large = tmp_path / "large.jsonl"
    large.write_bytes(b" " * ((1 << 20) + 1))

    with pytest.raises(LabError, match="cannot be read"):
        read_recording(tmp_path / "no.jsonl")
    with pytest.raises(LabError, match="has over 1,048,576 bytes"):
        read_recording(large)


def by_letters(body: dict[str, Any]) -> RenderedPrompt:
    """A template in which each letter is a token; it strips the thinking of earlier answers."""
    texts = []
    for position, message in enumerate(body["messages"]):
        is_newest = position >= len(body["messages"]) - 1
        thinking = message.get("reasoning_content", "") if is_newest else ""
        texts.append(f"<{message['role']}>{thinking}{message.get('content') or ''}")
    text = "".join(texts)
    return RenderedPrompt(text, tuple(map(ord, text)))


def letters_of_answer(call: Call, prompt: RenderedPrompt) -> tuple[int, ...]:
    if call.answer is None:
        return ()
    messages = [*call.messages, call.answer]
    return by_letters({"messages": messages}).tokens[len(prompt.tokens) :]


def recorded(*conversations: list[tuple[str, str]]) -> Conversation:
    """The conversation of requests, each a list of roles and contents."""
    bodies = []
    for texts in conversations:
        listed = [{"role": role, "content": content} for role, content in texts]
        bodies.append({"messages": listed})
    recording = Recording("x.jsonl", recorded_calls.answered_calls(bodies), {})
    return recorded_conversation(recording, by_letters, letters_of_answer, True)[0]


SYSTEM = ("system", "It is 08:00. You are a careful engineer with a lamp.")
ASKED = ("user", "Where does the parser read a comma?")
ANSWERED = ("assistant", "In the lexer, at line 12.")
ASKED_AGAIN = ("user", "Mend it.")


def test_a_conversation_that_grows_reads_nothing_again() -> None:
    first = [SYSTEM, ASKED]
    second = [*first, ANSWERED, ASKED_AGAIN]

    conversation = recorded(first, second)

    n_first = len("<system><user>") + len(SYSTEM[1]) + len(ASKED[1])
    n_answer = len("<assistant>") + len(ANSWERED[1])
    n_second = len("<user>") + len(ASKED_AGAIN[1])
    assert conversation.prompts == [n_first, n_first + n_answer + n_second]
    assert conversation.same == (0, n_first + n_answer)
    assert conversation.again == (0, 0)
    assert conversation.answers == (n_answer, 2)
    assert conversation.breaks == ""


def test_a_changed_clock_is_the_clients_and_costs_all_after_it() -> None:
    first = [SYSTEM, ASKED]
    changed = ("system", SYSTEM[1].replace("08:00", "09:27"))

    conversation = recorded(first, [changed, ASKED, ANSWERED, ASKED_AGAIN])

    n_before = len("<system>It is 0")
    n_changed = len("9:27")
    n_again = conversation.prompts[0] + conversation.answers[0] - n_before - len("8:00")
    assert conversation.breaks == "client@2"
    assert conversation.same[1] == n_before
    assert conversation.again[1] == pytest.approx(n_again, abs=8)
    assert conversation.messages[1] == pytest.approx(
        n_changed + len("<user>") + len(ASKED_AGAIN[1]), abs=8
    )


def test_thinking_that_the_template_strips_is_the_templates_break() -> None:
    bodies = [
        {"messages": [{"role": "user", "content": "Where is the comma read?"}]},
        {
            "messages": [
                {"role": "user", "content": "Where is the comma read?"},
                {
                    "role": "assistant",
                    "reasoning_content": "First look at the parser, then at the lexer.",
                    "content": "It is read in the lexer, at line 12.",
                },
                {"role": "user", "content": "Mend it."},
            ]
        },
    ]
    recording = Recording("x.jsonl", recorded_calls.answered_calls(bodies), {})

    conversation, _ = recorded_conversation(recording, by_letters, letters_of_answer, True)

    assert conversation.breaks == "template@2"
    assert conversation.again[1] >= len("It is read in the lexer, at line 12.")


def schema(*keys: str) -> dict[str, Any]:
    """A tool whose parameters have their keys in this order."""
    values = {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    }
    parameters = {key: values[key] for key in keys}
    return {"type": "function", "function": {"name": "read", "parameters": parameters}}


def calls_with(**changes: tuple[Any, Any]) -> tuple[Call, Call]:
    """Two calls, the second of which repeats the first, with these values of fields."""
    user = {"role": "user", "content": "What is here?"}
    answer = {"role": "assistant", "content": "Three files."}
    before: dict[str, Any] = {"messages": [user]}
    after: dict[str, Any] = {"messages": [user, answer, {"role": "user", "content": "Why?"}]}
    for name, (first, second) in changes.items():
        before[name] = first
        after[name] = second
    return Call(before, answer), Call(after, None)


CLIENTS_CHANGES: dict[str, tuple[Any, Any]] = {
    "tools": (
        [schema("type", "properties", "required")],
        [schema("required", "properties", "type")],
    ),
    "tool_choice": ("auto", "none"),
    "chat_template_kwargs": ({"enable_thinking": True}, {"enable_thinking": False}),
    "reasoning_effort": ("low", "high"),
    "parallel_tool_calls": (True, False),
}


@pytest.mark.parametrize("name", CLIENTS_CHANGES)
def test_what_is_sent_in_another_order_or_with_another_option_is_the_clients(
    name: str,
) -> None:
    first, second = CLIENTS_CHANGES[name]
    assert not recorded_calls.appends_only(*calls_with(**{name: (first, second)}))
    assert recorded_calls.appends_only(*calls_with(**{name: (first, copy.deepcopy(first))}))


def test_arguments_in_another_order_are_the_clients() -> None:
    def called(arguments: dict[str, int]) -> dict[str, Any]:
        function = {"name": "read", "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"function": function}]}

    before, call = calls_with()
    early = called({"a": 1, "b": 2})
    late = called({"b": 2, "a": 1})
    before.body["messages"].insert(0, early)
    call.body["messages"].insert(0, copy.deepcopy(early))
    assert recorded_calls.appends_only(before, call)
    call.body["messages"][0] = late
    assert not recorded_calls.appends_only(before, call)


def test_keys_of_a_message_may_have_another_order() -> None:
    """Templates pick the fields of a message by name."""
    before, call = calls_with()
    first = call.body["messages"][0]
    call.body["messages"][0] = dict(reversed(first.items()))
    assert recorded_calls.appends_only(before, call)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "read", "description": "Reads.", "x": 1}},
        {"type": "function", "function": {"name": "read"}},
        {"name": "read", "description": "Reads.", "input_schema": {}},
    ],
)
def test_letters_that_keep_a_cache_away_stand_before_tools_too(tool: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool, tool]}
    changed = with_nonce(body, "q w e")
    first, second = changed["tools"]
    described = first.get("function", first)
    assert described["description"].startswith("q w e")
    assert list(described)[:2] == ["name", "description"]
    assert changed["messages"][0]["content"] == "q w e x"
    assert second == tool
    assert body["tools"][0] == tool


def replayed(folder: Path, bodies: list[dict[str, Any]]) -> list[RequestRecord]:
    """The requests of a recording, sent to a server that counts words."""
    recording = read_recording(written(folder, bodies))
    with null_server(NullSettings()) as started, connect(started.url) as server:
        path = server.new_file(folder)
        turns = prepared(recording, server)
        return list(send_recorded(turns, server, path, lambda status: None))


def test_a_cold_request_that_was_served_by_a_cache_is_no_cold_one(tmp_path: Path) -> None:
    records = replayed(tmp_path, requests(3))
    assert not_cold(records) == []
    warm = []
    for record in records:
        usage = record.request.usage
        place = record.request.asked.place
        assert usage is not None
        if place["is_cold"]:
            n_cached = round(0.9 * (usage.prompt_tokens or 0))
            usage = dataclasses.replace(usage, cached_tokens=n_cached)
        request = dataclasses.replace(record.request, usage=usage)
        warm.append(dataclasses.replace(record, request=request))
    (sentence,) = not_cold(warm)
    assert sentence.startswith("2 of 3 requests that no cache may serve were served by it: ")
    assert "Their times are not used." in sentence
    assert was_cached(answered(warm)).sum() == 2


def test_a_server_that_cuts_prompts_counts_as_many_tokens_in_each_turn(tmp_path: Path) -> None:
    records = replayed(tmp_path, requests(3))
    assert not_longer(records) == []
    cut = []
    for record in records:
        usage = record.request.usage
        assert usage is not None
        usage = dataclasses.replace(usage, prompt_tokens=min(64, usage.prompt_tokens or 0))
        request = dataclasses.replace(record.request, usage=usage)
        cut.append(dataclasses.replace(record, request=request))
    (sentence,) = not_longer(cut)
    assert "has 64 prompt tokens by the server's count, as many as the turn before" in sentence


def test_a_request_that_was_sent_again_is_no_cut_prompt(tmp_path: Path) -> None:
    first, second, third = requests(3)
    assert not_longer(replayed(tmp_path, [first, second, second, third])) == []


def test_rows_of_eight_tokens_that_were_read_before_are_found() -> None:
    held = list(range(100))

    assert n_repeated([200, *range(20, 60)], held) == 40
    assert n_repeated([*range(20, 40), *range(20, 40)], held) == 20 + 8 - 8
    assert n_repeated(list(range(200, 240)), held) == 0
    assert n_repeated(held[:7], held) == 0


REPLAYED = Conversation(
    system=0,
    messages=(30, 10, 12),
    answers=(5, 4, 3),
    breaks="client@3",
    keep="memory",
    replay="agent.jsonl",
    same=(0, 35, 20),
    again=(0, 0, 25),
)


def script_of(conversation: Conversation) -> list[Operation]:
    case = Case(1, 1, experiment=NAME, setup=conversation)
    return planning.write(case, lambda slot, n: list(range(n)), SETTINGS)


def record_of(conversation: Conversation) -> Any:
    steps = steps_of(script_of(conversation), move_ms=5)
    return make_record(make_run(40, 3, steps=steps, experiment=NAME, setup=conversation))


def test_a_replay_computes_what_its_requests_do_not_share() -> None:
    """A prompt that shares 20 tokens with the turn before, and has 25 later ones of it again."""
    steps = steps_of(script_of(REPLAYED)).frame()

    table = figures(steps, REPLAYED)

    assert table.n_prompt.tolist() == [30, 45, 57]
    assert table.n_cached.tolist() == [0, 34, 20]
    assert table.n_again.tolist() == [0, 0, 25]
    assert table.n_computed.sum() == steps[steps.kind == PREFILL].n_tokens.sum()


def test_a_replay_is_compared_with_a_client_that_changes_nothing() -> None:
    perfect = planning.setups(REPLAYED, ["memory"])[1]

    table = rows([record_of(REPLAYED), record_of(perfect)])

    sentence = " ".join(sentences(table))
    assert perfect.breaks == ""
    assert figures(steps_of(script_of(perfect)).frame(), perfect).n_cached.tolist() == [
        0,
        34,
        45,
    ]
    assert "Turn 3 (client): the prompt differs from token 21 on, and 25 tokens" in sentence
    # 25 tokens of 1 ms, and the cut
    assert "A client that leaves earlier messages as they were would save" in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"same": (0, 36, 20)},
        {"same": (0, 35)},
        {"again": (0, 0, -1)},
        {"same": (1, 35, 20)},
    ],
)
def test_lengths_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="contradict"):
        Conversation(**{**vars(REPLAYED), **changes})


def planned_in_process(path: Path, model: str, folder: Path) -> Plan:
    with Worker() as worker:
        return planning.plan(
            worker,
            *(500, "100+50", 8, "", "memory"),
            1,
            model,
            replay=str(path),
            threads=1,
            folder=folder,
        )


def test_the_models_own_template_renders_a_replay(embedded: Path, tmp_path: Path) -> None:
    """SmolLM2's knows no tools, and that is said."""
    path = written(tmp_path, requests(3))

    plan = planned_in_process(path, str(embedded), tmp_path)

    (setup,) = column(plan.cases, "setup")
    assert setup.n_turns == 3
    assert (
        "The chat template leaves out: tools (3 calls), tool calls (2 calls) and reasoning of "
        "earlier answers (2 calls)."
    ) in plan.warnings
    assert setup.same[1] >= setup.prompts[0]
    assert setup.breaks == ""


def test_a_break_of_the_options_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, requests(3))

    code, _, err = run_lab("turns", "--replay", path, "--break", "system@2")

    assert code == 1
    assert "--break and --replay do not go together" in err


def test_a_server_that_cannot_render_gets_the_bodies_all_the_same(tmp_path: Path) -> None:
    recording = read_recording(written(tmp_path, requests(3)))
    settings = NullSettings(has_tokenize=False)
    with null_server(settings) as started, connect(started.url) as server:
        turns = prepared(recording, server)
        path = server.new_file(tmp_path)
        records = list(send_recorded(turns, server, path, lambda status: None))

    assert "The server has no /apply-template and /tokenize" in " ".join(turns.notes)
    assert [record.request.status for record in records] == ["ok"] * 5  # 2 without a cache
    assert len(served(records)) == 3


def test_an_agents_prompts_have_the_servers_own_numbers_of_tokens(
    shallow: Path, tmp_path: Path
) -> None:
    if not find_spec("xllamacpp"):
        pytest.skip("no llama-server here: the xllamacpp wheel is not installed")
    recording = read_recording(written(tmp_path, requests(3)))
    options = ("--threads", "1", "--ctx-size", "4096")
    with wheel_server(shallow, *options) as started, connect(started.url) as server:
        turns = prepared(recording, server)
        path = server.new_file(tmp_path)
        records = list(send_recorded(turns, server, path, lambda status: None))

    counted = [len(prompt.tokens) for prompt in turns.prompts]
    figures_of_turns = [figures_of_request(record.request) for record in records[:3]]
    table = served(list(results.read([path]).requests))
    assert column(figures_of_turns, "n_prompt") == counted
    assert turns.conversation.prompts == counted
    assert table.n_cached.tolist()[1:] == [len_same(turns, number) for number in (2, 3)]
    assert table.n_again.tolist() == [0, 0, 0]


def len_same(turns: Any, number: int) -> int:
    return int(turns.conversation.same[number - 1])
