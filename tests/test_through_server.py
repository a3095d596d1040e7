"""The main job through a server, against the null server: what is sent, kept, refused, said before,
and given up."""

import dataclasses
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core import results
from lab.core.record import FAILED, OK
from lab.core.request_times import figures
from lab.errors import LabError
from lab.remote import session
from lab.remote.examination import connect
from lab.remote.servers import Server
from lab.remote.session import WARMUP_GEN, check, execute, make_plan
from lab.runner.progress import Status
from tests.support.command import run_lab
from tests.support.null_server import (
    NEVER,
    RUNNING,
    TEMPLATE_TOKENS,
    Behaviour,
    NullServer,
    NullSettings,
    null_server,
)

FAST: dict[str, Any] = {"first_ms": 2.0, "gap_ms": 1.0}
MODELS = {
    "plain": Behaviour(usage=RUNNING, **FAST),
    "uncounted": Behaviour(usage=NEVER, **FAST),
    "short": Behaviour(
        usage=RUNNING,
        stops_after=3,
        obeys_ignore_eos=False,
        **FAST,
    ),
}
LEAST = 8 + TEMPLATE_TOKENS
"""Tokens of the shortest prompt of a chat: the nonce and the template."""

KEY = "a-key-that-nobody-prints"


@pytest.fixture(scope="module")
def null() -> Iterator[NullServer]:
    with null_server(NullSettings(models=MODELS, n_ctx=500)) as server:
        yield server


@pytest.fixture(scope="module")
def plain(null: NullServer) -> Iterator[Server]:
    with connect(null.url, "plain") as server:
        yield server


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to be given time to recover."""
    monkeypatch.setattr(session, "PAUSE_S", 0.0)


def run(server: Server, folder: Path, **asked: Any) -> Any:
    """The records of a session, and its file."""
    path = server.new_file(folder)
    return list(
        execute(make_plan(**{"repeat": 2, **asked}), server, path, lambda status: None)
    ), path


def test_each_request_is_made_recorded_and_on_disk(plain: Server, tmp_path: Path) -> None:
    records, path = run(plain, tmp_path, prompt_len="20,60", gen=20)
    assert list(results.read([path]).requests) == records
    asked = [record.request.asked for record in records]
    warmups = [(ask.n_prompt, ask.n_gen, ask.warmup) for ask in asked[:2]]
    assert warmups == [(20, WARMUP_GEN, True), (60, WARMUP_GEN, True)]
    assert [(ask.n_gen, ask.repeat) for ask in asked[2:]] == [
        (20, 0),
        (20, 0),
        (20, 1),
        (20, 1),
    ]
    assert [sorted(ask.n_prompt or 0 for ask in asked[i : i + 2]) for i in (2, 4)] == [
        [20, 60],
        [20, 60],
    ]
    for record in records:
        request = record.request
        assert request.status == OK
        assert request.usage
        assert request.usage.prompt_tokens == request.asked.n_prompt
        assert request.asked.n_prompt_counted == request.asked.n_prompt
        assert request.asked.counted_by == "tokenize"
        assert request.asked.temperature == 0.0
        assert request.asked.ignore_eos is True
        assert request.asked.seed == 1
        assert record.session == path.stem
        assert figures(request).is_warm is False


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (LEAST - 1, f"the shortest one has {LEAST}"),
        (496, "context of 500 tokens"),
    ],
)
def test_a_length_that_the_server_cannot_take_is_refused(
    plain: Server, n: int, message: str
) -> None:
    check(make_plan([LEAST, 495], 5), plain)
    with pytest.raises(LabError, match=message):
        check(make_plan([20, n], 5), plain)


def test_an_answer_that_the_stream_did_not_count_is_tokenized(
    null: NullServer, tmp_path: Path
) -> None:
    with connect(null.url, "uncounted") as server:
        records, _ = run(
            server,
            tmp_path,
            prompt_len="20",
            gen=5,
            repeat=1,
        )
    warmup, measured = (record.request.usage for record in records)
    assert warmup is None  # nobody looks at it
    assert measured.completion_tokens == 5
    assert measured.counted_by == "tokenize"


def test_a_server_that_cannot_count_prompts_is_refused(plain: Server) -> None:
    with pytest.raises(LabError, match="cannot count the tokens of prompts"):
        check(make_plan("20"), dataclasses.replace(plain, counter=None))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt_len": "ten"}, "'ten' is not a prompt length"),
        ({"gen": 0}, "--gen 0"),
        ({"repeat": 0}, "--repeat 0"),
        ({"prompt": "random"}, "--prompt random"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_server_is_asked(
    asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(LabError, match=message):
        make_plan(**asked)


def test_a_server_that_is_gone_ends_the_session_and_what_ended_is_kept(tmp_path: Path) -> None:
    with (
        null_server(NullSettings(models=MODELS)) as started,
        connect(started.url, "plain") as server,
    ):
        path = server.new_file(tmp_path)
        records = []
        with pytest.raises(LabError, match="is gone"):
            for record in execute(
                make_plan("20", 5, repeat=99), server, path, lambda status: None
            ):
                records.append(record)
                if len(records) == 3:
                    os.kill(started.pid, signal.SIGKILL)
    assert [record.request.status for record in records] == [OK] * 3 + [FAILED] * 3
    assert list(results.read([path]).requests) == records


def test_who_stops_keeps_what_ended(plain: Server, tmp_path: Path) -> None:
    plan = make_plan("20", 5, repeat=99)
    path = plain.new_file(tmp_path)
    records = list(itertools.islice(execute(plan, plain, path, lambda status: None), 3))
    assert list(results.read([path]).requests) == records
    empty = plain.new_file(tmp_path)

    def interrupt(status: Status) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(execute(plan, plain, empty, interrupt))
    assert not empty.exists()


def test_as_python(null: NullServer, tmp_path: Path) -> None:
    seen: list[Status] = []
    options: dict[str, Any] = {
        "model": "short",
        "url": null.url,
        "out": tmp_path,
        "prompt": "story",
    }
    records = lab.measure(
        [20],
        gen=4,
        repeat=1,
        watch=seen.append,
        **options,
    )
    assert [record.request.status for record in records] == [OK, OK]
    assert figures(records[-1].request).is_short is True
    assert records[-1].model == "short"
    assert seen
    assert lab.read([tmp_path]).requests == tuple(records)


def test_the_command_says_what_it_can_do_first_and_measures(
    null: NullServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    asked = (
        "-m",
        "plain",
        "-p",
        "20,60",
        "-n",
        5,
        "-r",
        2,
        "--out",
        tmp_path,
        "--api-key-env",
        "THE_KEY",
    )
    status, out, err = run_lab(
        "measure", "--url", null.url, *asked, "--header", f"X-Team: {KEY}2", "--no-plot"
    )
    assert status == 0, err
    assert out.index("as seen in") < out.index("5 tokens requested")
    assert "20 prompt tokens, repeat 2: TTFT" in err
    assert "left" in err
    (path,) = tmp_path.glob("*.jsonl")
    assert KEY not in out + err + path.read_text()
    assert str(path) in out


def test_the_command_as_json(null: NullServer, tmp_path: Path) -> None:
    asked = (
        "measure",
        "--url",
        null.url,
        "-m",
        "plain",
        "-n",
        3,
        "-r",
        1,
        "--out",
        tmp_path,
        "--json",
        "--no-plot",
    )
    status, out, err = run_lab(*asked, "-p", "20")
    document = json.loads(out)
    assert status == 0
    assert document["model"] == "plain"
    assert document["endpoint"]["url"] == null.url
    assert [row["n_prompt"] for row in document["rows"]] == [20]
    assert document["failures"] == []
    assert "as seen in" in err
    status, out, err = run_lab(*asked, "-p", "5,20")
    assert status == 1
    assert out == ""
    assert "the shortest one has" in err


def test_a_dry_run_examines_and_plans(null: NullServer, tmp_path: Path) -> None:
    options = ("-p", "20,30", "-n", "3", "-r", "1", "--dry-run", "--out", tmp_path)
    asked = ("measure", "--url", null.url, "-m", "plain", *options)
    status, out, _ = run_lab(*asked)
    assert status == 0
    assert "Plan: 4 requests for up to 33 tokens each" in out
    assert [
        case["n_prompt"] for case in json.loads(run_lab(*asked, "--json")[1])["cases"]
    ] == [
        20,
        30,
    ]
    assert not list(tmp_path.iterdir())


def test_what_a_server_can_do_is_a_table_or_a_document(null: NullServer) -> None:
    asked = ("measure", "--url", null.url, "-m", "plain", "-p", "20", "--dry-run")
    status, out, err = run_lab(*asked)
    assert status == 0, err
    assert "model    plain" in out
    assert "streaming" in out
    assert "as seen in" in out
    status, out, err = run_lab(*asked, "--json")
    document = json.loads(out)
    assert document["model"] == "plain"
    answers = {capability["answer"] for capability in document["endpoint"]["capabilities"]}
    assert "yes" in answers


@pytest.mark.parametrize(
    ("command", "asked", "message"),
    [
        (
            "measure",
            ("--url", "URL", "--threads", 2, "-u", 64),
            "--threads, --ubatch are only for",
        ),
        ("measure", ("--url", "URL", "--stream"), "--stream is only for the lab's own engine"),
        ("measure", ("--api", "chat", "--yes"), "--api, --yes are only for a server"),
        ("measure", ("--url", "URL"), f"The server lists {len(MODELS)} models"),
        ("measure", ("--url", "URL", "-m", "no-such"), "no model no-such"),
        ("measure", ("--url", "not an address"), "valid server address"),
        (
            "measure",
            ("--url", "http://127.0.0.1:1/v1"),
            "No server answers at http://127.0.0.1:1/v1: Connection refused",
        ),
        (
            "measure",
            ("--url", "http://127.0.0.1:1/v1", "--api-key-env", "NO_SUCH_KEY"),
            "NO_SUCH_KEY is not set",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(
    null: NullServer, command: str, asked: tuple[Any, ...], message: str
) -> None:
    status, out, err = run_lab(
        command, *(null.url if word == "URL" else word for word in asked)
    )
    assert status == 1
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_ctrl_c_says_what_is_kept(
    null: NullServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*asked: Any) -> Iterator[Any]:
        yield from itertools.islice(execute(*asked), 3)  # a warm-up and two requests
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "execute", interrupted)
    status, _, err = run_lab(
        "measure", "--url", null.url, "-m", "plain", "-p", "20", "-n", 2, "--out", tmp_path
    )
    assert status == 130
    assert "Interrupted. 2 finished runs are in" in err


def test_another_machine_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []

    def confirm(question: str, **_: Any) -> None:
        questions.append(question)
        raise KeyboardInterrupt

    monkeypatch.setattr("click.confirm", confirm)
    asked = ("-p", "100,1000", "-n", 50, "-r", 2, "--url", "http://server.invalid/v1")
    assert run_lab("measure", *asked)[0] == 130
    (question,) = questions
    assert "6 requests for up to 1,050 tokens each" in question
