"""lab record with a llama-server: what its slots, its properties and its log show of a lost cache,
on planted logs and on a real server."""

import dataclasses
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.features.recording import breaks, sentences
from lab.features.recording.answers import Answer
from lab.features.recording.causes import Finding, ServerState, find_cause
from lab.features.recording.conversations import Prompt, RecordedConversation
from lab.features.recording.lines import CLIENT, SERVER, Cause, RecordedCall
from lab.features.recording.prompts import blocks_of
from lab.features.recording.server_log import OLDEST, SIMILAR, Served, ServerLog
from lab.features.recording.server_side import ServerQuestions, Slot
from lab.remote.access import access
from lab.remote.client import Client
from tests.bench.record import recorded as recorder_before, wait_for
from tests.support.recordings import messages, recorded, with_next
from tests.support.servers import NAME, RealServer, a_llama_server

# The log


NEW = """\
0.01.145.997 I srv    load_model: loading model '/models/a.gguf'
0.01.300.998 I slot get_availabl: id  1 | task -1 | selected slot by LRU, t_last = -1
0.01.301.226 I slot launch_slot_: id  1 | task 0 | processing task, is_child = 0
0.02.168.500 I slot print_timing: id  1 | task 0 | prompt eval time =     806.67 ms /    57 tokens \
(   14.15 ms per token,    70.66 tokens per second)
0.02.168.533 I slot      release: id  1 | task 0 | stop processing: n_tokens = 60, truncated = 0
0.02.172.666 I slot get_availabl: id  1 | task -1 | selected slot by LCP similarity, \
f_sim_best = 0.911 (> 0.100 thold), f_keep = 0.950
0.02.175.932 I slot launch_slot_: id  1 | task 6 | processing task, is_child = 0
0.02.280.318 I slot print_timing: id  1 | task 6 | prompt eval time =      27.84 ms /    11 tokens \
(   27.84 ms per token,    35.92 tokens per second)
"""
OLD = """\
srv    load_model: loading model '/models/a.gguf'
slot get_availabl: id  0 | task 12 | selected slot by lcs similarity, lcs_len = 3, similarity = 0.1
slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, sim_best = 0.800 (> 0.100 \
thold), f_keep = 0.900
slot launch_slot_: id  0 | task 17 | processing task
slot update_slots: id  0 | task 17 | forcing full prompt re-processing due to lack of cache data
slot print_timing: id  0 | task 17 | prompt eval time =     100.00 ms /   100 tokens
slot update_slots: id  0 | task 17 | slot context shift, n_keep = 0, n_left = 9, n_discard = 4
slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = 5
srv        update:  - cache size limit reached, removing oldest entry (size = 12.500 MiB)
slot launch_slot_: id  0 | task 31 | processing task
slot print_timing: id  0 | task 31 | prompt eval time =      70.00 ms /    70 tokens
"""


def log_of(tmp_path: Path, text: str) -> ServerLog:
    path = tmp_path / "server.log"
    path.write_text(text)
    return ServerLog(path)


def test_a_log_says_which_slot_served_a_request_and_why(tmp_path: Path) -> None:
    log = log_of(tmp_path, NEW)
    first = log.find(57, 806.671)
    second = log.find(11, None)
    assert first is not None
    assert second is not None
    assert (first.slot, first.task, first.chosen_by) == (1, 0, OLDEST)
    assert (second.slot, second.task, second.chosen_by) == (1, 6, SIMILAR)
    assert second.similarity == 0.911
    assert second.n_begun - first.n_begun == 1
    assert log.find(11, 99.0) is None


def test_an_older_log_says_it_too(tmp_path: Path) -> None:
    log = log_of(tmp_path, OLD)
    forced = log.find(100, 100.0)
    later = log.find(70, 70.0)
    assert forced is not None
    assert later is not None
    assert forced.is_forced
    assert forced.similarity == 0.8
    assert (forced.n_dropped, later.n_dropped) == (0, 1)


def test_a_log_that_begins_anew_or_goes_on_shows_a_new_start(tmp_path: Path) -> None:
    log = log_of(tmp_path, NEW)
    first = log.find(57, 806.67)
    (tmp_path / "server.log").write_text(NEW + NEW)
    again = log.find(57, 806.67)
    (tmp_path / "server.log").write_text(OLD)  # shorter: another file
    following = log.find(100, 100.0)
    assert first is not None
    assert again is not None
    assert following is not None
    assert first.start < again.start < following.start


def test_a_log_of_something_else_says_nothing(tmp_path: Path) -> None:
    lines = ["INFO: 127.0.0.1 POST /v1/chat 200", "slot", "slot x: id", "", "\x00", "task 3"]
    log = log_of(tmp_path, "\n".join(lines * 20))
    log.read()
    assert not log.served


# The causes


def prompts(before: Served | None, now: Served | None, **more: Any) -> tuple[Prompt, Prompt]:
    """Two prompts of a conversation that only grows, 400 and 460 tokens long."""
    first = Prompt(
        1, blocks_of({"messages": messages()}), 400, 10, "", tuple(range(400)), before
    )
    second = Prompt(
        3, blocks_of({"messages": with_next(messages())}), 460, 10, "", tuple(range(460)), now
    )
    return first, dataclasses.replace(second, **more)


def finding_of(
    first: Prompt, second: Prompt, state: ServerState, n_cached: int = 3
) -> Finding:
    conversation = RecordedConversation(1)
    conversation.add(first)
    return find_cause(second, n_cached, conversation, state, lambda text: None)


SLOT_0 = Served(0, 5)
ENGINE: dict[str, tuple[Served, Served, ServerState]] = {
    breaks.OTHER_SLOT: (SLOT_0, Served(1, 9), ServerState(held={0: 5, 1: 9})),
    breaks.NO_CHECKPOINT: (
        SLOT_0,
        Served(0, 9, chosen_by=SIMILAR, similarity=0.87),
        ServerState(),
    ),
    breaks.CONTEXT_SHIFT: (Served(0, 5, is_shifted=True), Served(0, 9), ServerState()),
    breaks.CACHE_FULL: (SLOT_0, Served(0, 9, n_dropped=2), ServerState()),
    breaks.RESTARTED: (SLOT_0, Served(0, 1, start=1), ServerState()),
    breaks.EVICTED: (SLOT_0, Served(0, 9), ServerState()),
}


@pytest.mark.parametrize("kind", ENGINE)
def test_what_the_engine_did_is_named(kind: str) -> None:
    before, now, state = ENGINE[kind]
    finding = finding_of(*prompts(before, now), state)
    assert finding.cause is not None
    assert (finding.cause.kind, finding.cause.by) == (kind, SERVER)
    assert finding_of(*prompts(before, now), state, n_cached=399).cause is None


def test_more_tokens_than_a_context_holds_were_shifted() -> None:
    first, second = prompts(SLOT_0, Served(0, 9))
    cause = finding_of(first, second, ServerState(n_ctx=405)).cause
    assert cause is not None
    assert cause.kind == breaks.CONTEXT_SHIFT


def test_a_request_that_switches_the_cache_off_is_the_clients_doing() -> None:
    first, second = prompts(SLOT_0, Served(0, 9), asks_for_cache=False)
    cause = finding_of(first, second, ServerState()).cause
    assert cause is not None
    assert (cause.kind, cause.by) == (breaks.NOT_ASKED, CLIENT)


def test_a_conversation_in_another_slot_is_no_intruder() -> None:
    first, second = prompts(Served(0, 5, n_begun=1), Served(0, 9, n_begun=4))
    cause = finding_of(first, second, ServerState()).cause
    assert cause is not None
    assert cause.kind == breaks.EVICTED
    assert "did not come through lab record" in cause.what


UNSEEN: dict[str, tuple[Served, Served, ServerState]] = {
    "the earlier one": (Served(None, None), Served(1, 9), ServerState(held={0: 7, 1: 9})),
    "this one": (SLOT_0, Served(None, None), ServerState(held={0: 12, 1: 11})),
    "its task": (Served(0, None), Served(1, 9), ServerState(held={0: 12, 1: 9})),
    "used again since": (SLOT_0, Served(1, 9), ServerState(held={0: 12, 1: 9})),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_slot_that_was_not_seen_is_not_guessed(name: str) -> None:
    before, now, state = UNSEEN[name]
    first, second = prompts(before, now)
    following = dataclasses.replace(first, call=2)
    several = dataclasses.replace(state, n_slots=2, latest_other=following, other_number=2)
    cause = finding_of(first, second, several).cause
    assert cause is not None
    assert (cause.kind, cause.by) == (breaks.UNSEEN_SLOT, SERVER)
    single = finding_of(first, second, dataclasses.replace(state, n_slots=1)).cause
    assert single is not None
    assert single.kind == breaks.EVICTED


def test_a_slot_that_something_else_used_before_had_lost_the_prompt() -> None:
    state = ServerState(held={0: 7, 1: 9}, n_slots=2)
    cause = finding_of(*prompts(SLOT_0, Served(1, 9)), state).cause
    assert cause is not None
    assert cause.kind == breaks.EVICTED


def test_a_prompt_that_is_still_in_its_slot_was_not_taken_from_there() -> None:
    cause = finding_of(
        *prompts(SLOT_0, Served(None, None)), ServerState(held={0: 5}, n_slots=2)
    ).cause
    assert cause is not None
    assert cause.kind == breaks.OTHER_SLOT
    assert sentences.label(cause).startswith("another slot took the call, but slot 0 holds")


# The slots


def seen(*calls: tuple[int, list[Slot]]) -> list[tuple[int | None, int | None]]:
    """The slot and the task of calls, each with its tokens and the slots as they were seen."""
    questions = ServerQuestions(access("http://127.0.0.1:9/v1"))
    questions._client = Client(access("http://127.0.0.1:9/v1"))
    places = []
    for n_held, slots in calls:
        served = questions.served(Answer(n_prompt=n_held - 10, n_gen=10), slots)
        assert served is not None
        places.append((served.slot, served.task))
    return places


def test_calls_that_follow_each_other_at_once_are_told_apart_by_their_tokens() -> None:
    both = [Slot(0, 5, 99), Slot(1, 9, 299)]
    assert seen((100, both), (300, both)) == [(0, 5), (1, 9)]
    assert seen((300, both), (100, both)) == [(1, 9), (0, 5)]
    slots = [Slot(0, 5, 99), Slot(1, 9, 99)]
    assert seen((100, slots)) == [(None, None)]


def test_a_slot_that_serves_the_next_call_already_says_where_but_not_which_task() -> None:
    begun = Slot(0, 9, 99, is_busy=True)
    assert seen((100, [begun, Slot(1, None, None)])) == [(0, None)]
    assert seen((100, [begun, Slot(1, 2, 50)])) == [(None, None)]
    ended = [Slot(0, 9, 149), Slot(1, None, None)]
    assert seen((100, [begun, Slot(1, None, None)]), (150, ended)) == [(0, None), (0, 9)]


@pytest.mark.parametrize("n_calls", range(1, 101))
def test_calls_that_are_seen_in_time_have_their_slots(n_calls: int) -> None:
    slots = [Slot(0, None, None), Slot(1, None, None)]
    calls = []
    expected = []
    for number in range(n_calls):
        n_held = 40 + 10 * number
        slots = list(slots)
        slots[number % 2] = Slot(number % 2, 3 * number, n_held - number % 3)
        calls.append((n_held, slots))
        expected.append((number % 2, 3 * number))
    assert seen(*calls) == expected


@pytest.mark.parametrize("kind", [*breaks.OF_ENGINE, breaks.UNSEEN_SLOT, breaks.NOT_ASKED])
@pytest.mark.parametrize("what", ["", "the chat template changed", "busy"])
def test_each_cause_of_the_engine_has_its_sentences(kind: str, what: str) -> None:
    cause = Cause(kind=kind, by=SERVER, slot=1, held_by=0, similarity=0.25, what=what)
    call = recorded(2, 10, 0, 1.0, cause=cause)
    text = f"{sentences.where([call])} {sentences.remedy(cause)} {sentences.label(cause)}"
    assert "None" not in text
    assert "{" not in text


# A real server


SIZES = ("--threads", "1", "--ctx-size", "4096", "--parallel", "2", "--cache-ram", "0")


@pytest.fixture(scope="module")
def server(shallow: Path) -> Iterator[RealServer]:
    with a_llama_server(shallow, SIZES) as started:
        yield started


def post(url: str, path: str, body: dict[str, Any]) -> None:
    data = json.dumps({"model": NAME, "temperature": 0, **body}).encode()
    headers = {"Content-Type": "application/json"}
    address = url.removesuffix("/v1") + path
    with urllib.request.urlopen(urllib.request.Request(address, data, headers)) as answer:
        answer.read()


RULES = " ".join(f"Keep rule {number} of this house." for number in range(20))
GROWING = [
    {"role": "user", "content": "What is here?"},
    {"role": "assistant", "content": "Three files."},
    {"role": "user", "content": "Open the first of them."},
]


def bodies(path: str, clock: str, n_messages: int) -> dict[str, Any]:
    """A call of an interface whose system prompt has a clock."""
    system = f"It is {clock}. {RULES}"
    grown = GROWING[:n_messages]
    if path == "/v1/messages":
        parts = [{**message, "content": text_part(message)} for message in grown]
        return {"system": system, "messages": parts, "max_tokens": 3}
    if path == "/v1/responses":
        items = [{"type": "message", **message} for message in grown]
        return {"instructions": system, "input": items, "max_output_tokens": 3}
    return {"messages": [{"role": "system", "content": system}, *grown], "max_tokens": 3}


def text_part(message: dict[str, str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": message["content"]}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_clock_in_the_system_prompt_is_found_exactly(
    server: RealServer, tmp_path: Path, path: str
) -> None:
    with recorder_before(server.url, str(tmp_path)) as (url, recorder):
        post(url, path, bodies(path, f"08:00 at {path}", 1))
        post(url, path, bodies(path, f"08:01 at {path}", 3))
    first, second = recorder.calls
    assert second.is_exact
    assert second.cause is not None
    assert (second.cause.kind, second.cause.by) == (breaks.CHANGED, CLIENT)
    assert second.cause.character == len("It is 08:0")
    assert again(second) > (first.n_prompt or 0) - 30


def again(call: RecordedCall) -> int:
    return (call.n_prompt or 0) - (call.n_cached or 0) - (call.n_new or 0)


def test_a_slot_that_is_not_similar_enough_is_named(
    server: RealServer, tmp_path: Path
) -> None:
    """The prompt grows to more than ten times its length, so the server takes the other slot."""
    with recorder_before(server.url, str(tmp_path)) as (url, recorder):
        short = [{"role": "system", "content": RULES[:150]}, GROWING[0]]
        for n_calls in (1, 2):
            post(url, "/v1/chat/completions", {"messages": short, "max_tokens": 2})
            wait_for(recorder, n_calls)
        long = " ".join(f"word {number}" for number in range(300))
        grown = [*short, GROWING[1], {"role": "user", "content": long}]
        post(url, "/v1/chat/completions", {"messages": grown, "max_tokens": 2})
    third = recorder.calls[2]
    assert third.cause is not None
    assert third.cause.kind == breaks.OTHER_SLOT
    assert third.cause.similarity is not None
    assert third.cause.similarity < 0.1
    assert recorder.calls[1].cause is None
    assert third.slot != recorder.calls[1].slot


def test_a_request_without_a_cache_is_named_on_a_real_server(
    server: RealServer, tmp_path: Path
) -> None:
    with recorder_before(server.url, str(tmp_path)) as (url, recorder):
        chat = bodies("", "noon", 1)
        post(url, "/v1/chat/completions", chat)
        grown = bodies("", "noon", 3)
        post(url, "/v1/chat/completions", {**grown, "cache_prompt": False})
    cause = recorder.calls[1].cause
    assert cause is not None
    assert (cause.kind, cause.by) == (breaks.NOT_ASKED, CLIENT)


def test_a_server_without_an_alias_is_recorded_by_its_files_name(
    shallow: Path, tmp_path: Path
) -> None:
    """The server calls its model by a path; a client that names none, or the path, is passed on."""
    with (
        a_llama_server(shallow, SIZES, alias=None) as started,
        recorder_before(started.url, str(tmp_path)) as (url, recorder),
    ):
        with urllib.request.urlopen(f"{url}/models") as answer:
            name = json.load(answer)["data"][0]["id"]
        for number, (clock, n_messages) in enumerate([("08:00", 1), ("08:01", 3)], 1):
            body = bodies("", clock, n_messages)
            post(url, "/v1/chat/completions", {**body, "model": name} if number > 1 else body)
            wait_for(recorder, number)
    second = recorder.calls[1]
    assert name != NAME
    assert second.model == shallow.name
    assert second.endpoint.server == "llama-server"
    assert second.is_exact
    assert second.cause is not None
    assert (second.cause.kind, second.cause.by) == (breaks.CHANGED, CLIENT)
    assert again(second) > 100
    assert str(shallow.parent) not in recorder.recording.path.read_text()
