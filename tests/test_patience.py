"""What the lab does about a server that cannot answer now, or does not take a field: it waits and
says so, asks once more, or leaves out the field that the server names; and who a server is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core import request as kinds
from lab.core.request import UNKNOWN
from lab.errors import LabError
from lab.remote import client as client_module, formats, session
from lab.remote.answer import seconds_until
from lab.remote.examination import connect
from lab.remote.formats import FIELD_ERROR, error_words
from tests.support.command import run_lab
from tests.support.odd_server import (
    CHAT_PATH,
    STREAM,
    Canned,
    as_json,
    odd_server,
    paced,
    stream,
)

LIMITED = Canned(b'{"error": {"message": "Rate limit reached"}}', 429)
LOADING = Canned(b'{"error": {"message": "Loading model", "code": 503}}', 503)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RATE_PAUSE_S", 0.05)
    monkeypatch.setattr(client_module, "LOADING_PAUSE_S", 0.05)
    monkeypatch.setattr(session, "PAUSE_S", 0.0)


def tokens(asked: dict[str, Any]) -> Iterator[bytes]:
    yield from paced(stream(*["w "] * asked["max_tokens"]))


GOOD = Canned(tokens, kind=STREAM)


class Turns:
    """Answers by turns, the last one for ever."""

    def __init__(self, *answers: Canned) -> None:
        self.answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def __call__(self, asked: dict[str, Any]) -> Canned:
        return next(self.answers)


def measured(
    deciding: Callable[[dict[str, Any]], Canned], folder: Path, has_tokenizer: bool = True
) -> tuple[int, str, str]:
    with odd_server(deciding=deciding, has_tokenizer=has_tokenizer) as server:
        options = ("-p", 20, "-n", 4, "-r", 1, "--no-plot", "--timeout", 20, "--out", folder)
        return run_lab("measure", "--url", server.url, *options)


@pytest.mark.parametrize("place", range(4))
def test_a_server_that_limits_the_rate_is_asked_once_more(place: int, tmp_path: Path) -> None:
    """While it is examined, and while prompts are sized."""
    answers = Turns(*[GOOD] * place, LIMITED, GOOD)
    status, _, err = measured(answers, tmp_path)
    is_measured = place > 1  # the warm-up and the request are sent once
    assert ("the server limits the rate of requests (429)" in err) != is_measured
    assert (status == 0) or is_measured, err


def test_a_server_that_goes_on_limiting_the_rate_is_named(tmp_path: Path) -> None:
    status, _, err = measured(Turns(LIMITED), tmp_path)
    assert status == 1
    assert "rate limited: 429 Too Many Requests" in err
    assert "limits the rate of requests. Wait" in err


def test_a_limit_while_prompts_are_counted_is_named(tmp_path: Path) -> None:
    """Without a tokenizer, the usage of a small request counts them."""
    answers = Turns(GOOD, GOOD, GOOD, GOOD, LIMITED)
    status, _, err = measured(answers, tmp_path, has_tokenizer=False)
    assert status == 1
    assert "did not count the tokens of a prompt of" in err
    assert "rate limited: 429 Too Many Requests" in err


@pytest.mark.parametrize("n_loading", [1, 3])
def test_a_server_that_loads_its_model_is_waited_for(n_loading: int, tmp_path: Path) -> None:
    status, out, err = measured(Turns(*[LOADING] * n_loading, GOOD), tmp_path)
    assert status == 0, err
    assert "the server is loading its model (503): waiting, at most 20 s (--timeout)" in err
    (record, *_) = lab.read([tmp_path]).requests
    assert formats.IGNORE_EOS in record.endpoint.accepted
    assert "ignore_eos" in out


def test_a_server_that_is_not_available_keeps_its_options(tmp_path: Path) -> None:
    """Only an error about a field leaves options out."""
    for status_of_server in (502, 503, 504):
        canned = Canned(b"<html>bad gateway</html>", status_of_server, "text/html")
        status, _, err = measured(Turns(canned, GOOD), tmp_path)
        assert status == 1
        assert str(status_of_server) in err


FORMS: dict[str, Callable[[str], str]] = {
    "OpenAI": lambda name: f"Unrecognized request argument supplied: {name}",
    "OpenAI, new": lambda name: f"Unknown parameter: '{name}'.",
    "pydantic": lambda name: f"Extra inputs are not permitted: {name}",
    "Groq": lambda name: f"property '{name}' is unsupported",
    "Go": lambda name: f'json: unknown field "{name}"',
    "JSON schema": lambda name: (
        f"Additional properties are not allowed ('{name}' was unexpected)"
    ),
    "Python": lambda name: f"create() got an unexpected keyword argument '{name}'",
    "a sentence": lambda name: f"`{name}` is not supported by this model",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", formats.OPTIONS)
def test_an_error_about_a_field_names_it(form: str, option: str) -> None:
    error = error_words(FORMS[form](option.rpartition(".")[2]))
    assert error.startswith(FIELD_ERROR)
    assert formats.named_options(error) == {option}


def test_a_list_of_problems_names_all_fields() -> None:
    detail = [
        {
            "type": "extra_forbidden",
            "loc": ["body", name],
            "msg": "Extra inputs are not permitted",
        }
        for name in ("seed", "ignore_eos")
    ]
    assert formats.named_options(error_words(detail)) == {"seed", "ignore_eos"}


@pytest.mark.parametrize(
    "message",
    [
        "unexpected end of tool call",
        "Unexpected token < in JSON at position 0",
        "Unexpected EOF",
        "failed to parse the grammar",
        "the parser failed at 12",
        "decode failed (42)",
        "unknown error",
        "invalid UTF-8",
        "CUDA error: an illegal memory access",
        "unknown model architecture: 'x'",
        "Model is unknown",
        "The model was not loaded",
        "Loading model",
        "upstream timed out",
    ],
)
def test_other_errors_are_not_about_a_field(message: str) -> None:
    assert FIELD_ERROR not in error_words(message)


@pytest.mark.parametrize("refused", [("seed",), ("ignore_eos", "seed"), ("stream_options",)])
@pytest.mark.parametrize("names_all", [True, False])
def test_the_named_field_alone_is_left_out(refused: tuple[str, ...], names_all: bool) -> None:
    def answer(asked: dict[str, Any]) -> Canned:
        found = [name for name in refused if name in asked]
        if not found:
            return GOOD
        names = ", ".join(found if names_all else found[:1])
        error = {"error": {"message": f"Extra inputs are not permitted: {names}"}}
        return Canned(json.dumps(error).encode(), 400)

    with odd_server(deciding=answer) as server, connect(server.url) as reached:
        accepted = set(reached.endpoint.accepted)
        left_out = {name for name in formats.OPTIONS if name.partition(".")[0] in refused}
        assert not accepted & left_out
        if names_all:
            assert formats.NO_CACHE in accepted
        ask = reached.ask(20, 4, "some words of a text", seed=1)
        assert ("seed" in json.loads(ask.body)) == ("seed" not in refused)
        assert (ask.asked.seed is None) == ("seed" in refused)
        assert reached.send(ask).request.status == "ok"


def test_retry_after_is_seconds_or_a_date() -> None:
    assert seconds_until("7") == "7"
    assert seconds_until("0.5") == "0.5"
    assert seconds_until("Wed, 21 Oct 2015 07:28:00 GMT") == "0"
    for wrong in ("", "soon", "-1", "1e9", "99999999", "Wed, 99 Oct 2015"):
        assert seconds_until(wrong) == ""


def test_a_server_with_a_limit_of_its_own_does_not_show_that_it_ignores_ends() -> None:
    def capped(asked: dict[str, Any]) -> Iterator[bytes]:
        yield from paced(stream(*["w "] * min(4, asked["max_tokens"])))

    with (
        odd_server({CHAT_PATH: Canned(capped, kind=STREAM)}) as server,
        connect(server.url) as reached,
    ):
        (capability,) = [
            capability
            for capability in reached.endpoint.capabilities
            if capability.name == "ignore_eos"
        ]
        assert capability.answer == UNKNOWN
        assert (
            capability.how == "an answer of 48 tokens had 4, and its finish reason is length"
        )


@pytest.mark.parametrize(
    ("answers", "owner", "program"),
    [
        ({"/api/v0/models": {"data": [{"id": "odd"}]}}, None, None),
        (
            {
                "/api/v0/models": {
                    "data": [{"id": "odd", "state": "loaded", "compatibility_type": "gguf"}]
                }
            },
            None,
            "LM Studio",
        ),
        ({"/api/version": {"version": "0.7.0"}}, "koboldcpp", "KoboldCpp"),
        ({"/api/version": {"version": "0.12.6"}}, "library", "Ollama"),
        ({"/api/version": {"version": "0.12.6"}}, "someone", "Ollama"),
        ({"/version": {"version": "0.11.2"}}, "vllm", "vLLM"),
        ({"/version": {"version": "1"}}, "someone", None),
        ({}, "tabbyAPI", "TabbyAPI"),
        ({}, "llama-swap", "llama-swap"),
        ({}, "sglang", "SGLang"),
    ],
)
def test_a_server_is_named_for_what_only_it_has(
    answers: dict[str, Any], owner: str | None, program: str | None
) -> None:
    listed = {"data": [{"id": "odd", "owned_by": owner}]}
    canned = {path: as_json(value) for path, value in answers.items()}
    canned |= {"/v1/models": as_json(listed), CHAT_PATH: GOOD}
    with odd_server(canned) as server, connect(server.url) as reached:
        assert reached.endpoint.server == program


@pytest.mark.parametrize(
    "listing",
    [
        {"data": [{"id": "odd"}]},
        [{"id": "odd"}],
        {"models": [{"name": "odd", "model": "odd"}]},
        {"data": ["odd"]},
    ],
)
def test_models_are_listed_in_several_forms(listing: Any) -> None:
    answers = {"/v1/models": as_json(listing), CHAT_PATH: GOOD}
    with odd_server(answers) as server, connect(server.url) as reached:
        assert reached.model == reached.name == "odd"


def test_a_server_without_tls_is_named_as_such() -> None:
    with odd_server({CHAT_PATH: GOOD}) as server:
        address = server.url.replace("http:", "https:")
        with pytest.raises(LabError, match="does not use TLS"), connect(address):
            pass


def test_a_prompt_from_the_cache_is_in_the_headline(tmp_path: Path) -> None:
    def cached(asked: dict[str, Any]) -> Iterator[bytes]:
        pieces = stream(*["w "] * asked["max_tokens"])
        counts = {
            "prompt_tokens": 20,
            "completion_tokens": asked["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 19},
        }
        pieces[-2] = f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()
        yield from paced(pieces)

    status, out, err = measured(Turns(Canned(cached, kind=STREAM)), tmp_path)
    assert status == 0, err
    assert "After a prompt of 20 tokens (19 of them from the server's cache)" in out


def test_an_answer_without_tokens_has_no_dash_for_a_time(tmp_path: Path) -> None:
    def empty(asked: dict[str, Any]) -> Iterator[bytes]:
        yield from paced([*stream()[-3:]])

    status, out, err = measured(Turns(Canned(empty, kind=STREAM)), tmp_path)
    assert status == 0, err
    assert "After a prompt of 20 tokens no token arrived." in out
    assert "after -" not in out
    assert kinds.NO_CONTENT not in err
