"""What servers say when they cannot answer, in words that say what to do; and what they do besides
what was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core.request import ERROR_INSIDE
from lab.remote import formats
from lab.remote.access import access
from lab.remote.formats import FIELD_ERROR, NO_CREDIT, NO_MODEL, OTHER_ERROR, error_words
from lab.remote.streams import StreamReader
from tests.support.command import run_lab
from tests.support.odd_server import STREAM, Canned, as_json, odd_server, paced
from tests.support.streams import delta, sse, usage

TOO_LONG = "too long for its context"
NO_MEMORY = "out of memory"
MEANINGS = {
    TOO_LONG: [
        "Prompt length 7013 exceeds max_seq_len 4000",
        "Input error: `inputs` tokens + `max_new_tokens` must be <= 900. Given: 880 and 64",
        "prompt is too long: 90210 tokens > 70000 maximum",
        "The sum of prompt tokens and answer is greater than what was configured: 5100",
        "the input is longer than 2048 tokens",
    ],
    NO_MEMORY: [
        "model requires more system memory (7.7 GiB) than is available (2.2 GiB)",
        "Insufficient memory for the key-value cache",
        "there is not enough GPU memory to load the weights",
        "failed to allocate buffer of 512 MiB",
        "CUDA out of memory. Tried to reserve 3 GiB",
    ],
    NO_CREDIT: [
        "Insufficient Balance",
        "This request requires more credits, add some in your settings",
        "insufficient funds for this key",
        "Your billing address is missing",
        "Payment is overdue",
    ],
    NO_MODEL: [
        "The model `lamp-7b` does not exist.",
        'model "lamp" not found, try pulling it first',
        "Model lamp-7b is not loaded. Load it first.",
        "No such model: lamp",
        "The requested model was not found on this node",
    ],
    "this model does not answer there": [
        "this model does not support chat",
        '"lamp-embed" does not support chat',
        "lamp does not support generate",
        "The model does not support completions through this route",
        "does not support generating text",
    ],
}
ORDINARY = {
    "Rate limit reached: tokens per minute, limit 9000": "too many requests in this time",
    "You exceeded your current quota": "too many requests in this time",
    "Loading model": formats.LOADING,
    "the server is busy": "too many requests at once",
    "invalid input: temperature exceeds 2": FIELD_ERROR,
    "max_tokens is too large: 9000": OTHER_ERROR,
    "decode failed (7)": OTHER_ERROR,
    "input validation failed": OTHER_ERROR,
    "Internal server error": OTHER_ERROR,
    "something went wrong": OTHER_ERROR,
    "bad gateway": OTHER_ERROR,
    "upstream timed out": OTHER_ERROR,
    "accredited users only": OTHER_ERROR,
    "invalid api key": "a wrong key",
    "chat template error": "a problem with the chat template",
}


@pytest.mark.parametrize("meaning", MEANINGS)
def test_a_cause_is_known_by_what_servers_write(meaning: str) -> None:
    for message in MEANINGS[meaning]:
        assert error_words(message) == meaning, message


@pytest.mark.parametrize("message", ORDINARY)
def test_other_messages_mean_what_they_meant(message: str) -> None:
    assert error_words(message) == ORDINARY[message]


@pytest.mark.parametrize(
    "message",
    [
        "X.UnsupportedParamsError: lamp does not support parameters: ['seed'], for model=m",
        "lamp does not support the parameter seed",
        "this route does not accept parameters such as seed",
        "We do not allow the field seed",
        "The option seed is one that we do not recognize",
    ],
)
def test_a_refused_field_is_named_by_any_verb(message: str) -> None:
    error = error_words(message)
    assert error.startswith(FIELD_ERROR)
    assert formats.named_options(error) == {"seed"}


# Answers that were given up


@pytest.mark.parametrize(
    "reason", ["error", "abort", "ABORTED", "cancelled", "insufficient_system_resource"]
)
def test_an_answer_that_the_server_broke_off_failed(reason: str) -> None:
    texts = [delta({"content": " w"})] * 4
    counts = {"choices": [], "usage": usage(20, 4)}
    reader = StreamReader([(5, sse(*texts, delta({}, reason), counts, "[DONE]"))], 0)
    list(reader.read())
    answer = reader.answer()
    assert answer.failure == ERROR_INSIDE
    assert reason.lower() in str(answer.error)
    assert answer.usage is not None


@pytest.mark.parametrize(
    "reason", ["stop", "length", "eos", "tool_calls", "end_turn", "content_filter", "why"]
)
def test_other_reasons_are_an_end(reason: str) -> None:
    reader = StreamReader([(5, sse(delta({"content": " w"}), delta({}, reason)))], 0)
    list(reader.read())
    assert reader.answer().failure is None


# Measured as a user does


def measured(
    tmp_path: Path,
    deciding: Callable[[dict[str, Any]], Canned],
    answers: dict[str, Canned] | None = None,
    n_prompt: int = 20,
) -> tuple[int, str, str]:
    with odd_server(answers, deciding=deciding, has_tokenizer=False) as server:
        lengths = ("-p", n_prompt, "-n", 8, "-r", 1)
        options = ("--timeout", 20, "--no-plot", "--out", tmp_path)
        return run_lab("measure", "--url", server.url, *lengths, *options)


def answer_of(asked: dict[str, Any], n: int) -> Canned:
    """An answer of n tokens; a word of the prompt is a token, too."""
    n_prompt = 5 + len(" ".join(m["content"] for m in asked["messages"]).split())
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n}
    pieces = [sse(delta({"content": " w"})) for _ in range(n)]
    end = sse(delta({}, "length"), {"choices": [], "usage": counts}, "[DONE]")
    return Canned(lambda _: paced([*pieces, end]), kind=STREAM)


def test_the_newer_name_of_the_limit_is_used_where_only_it_counts(tmp_path: Path) -> None:
    def deciding(asked: dict[str, Any]) -> Canned:
        return answer_of(asked, asked.get("max_completion_tokens", 30))

    status, out, err = measured(tmp_path, deciding)
    assert status == 0, err
    assert "longer than requested" not in out
    (record, *_) = lab.read([tmp_path]).requests
    assert formats.MAX_COMPLETION in record.endpoint.accepted


@pytest.mark.parametrize("n", [10, 30])
def test_a_limit_that_a_server_ignores_is_told_as_that(n: int, tmp_path: Path) -> None:
    status, out, err = measured(tmp_path, lambda asked: answer_of(asked, n))
    assert status == 0, err
    assert "1 of 1 answers were longer than requested: the server ignores that limit." in out
    assert "cannot be" not in out


@pytest.mark.parametrize("n_most", [18, 60, 75])
def test_a_prompt_that_a_server_cuts_is_not_measured_as_a_longer_one(
    n_most: int, tmp_path: Path
) -> None:
    """Ollama, LM Studio and others drop what does not fit into their context, and say nothing."""

    def deciding(asked: dict[str, Any]) -> Canned:
        canned = answer_of(asked, asked["max_tokens"])
        text = " ".join(m["content"] for m in asked["messages"])
        n_prompt = min(n_most, 5 + len(text.split()))
        counts = {"prompt_tokens": n_prompt, "completion_tokens": asked["max_tokens"]}
        pieces = [sse(delta({"content": " w"})) for _ in range(asked["max_tokens"])]
        end = sse(delta({}, "length"), {"choices": [], "usage": counts}, "[DONE]")
        return Canned(lambda _: paced([*pieces, end]), kind=canned.kind)

    status, _, err = measured(tmp_path, deciding, n_prompt=80)
    assert status == 1
    assert f"counts {n_most} tokens of a prompt, and no more of a longer one: it cuts" in err
    assert "longer context" in err
    status, out, err = measured(tmp_path, deciding, n_prompt=17)
    assert status == 0, err
    assert "After a prompt of 17 tokens" in out


@pytest.mark.parametrize(
    "field", ["max_model_len", "context_window", "context_length", "max_context_length"]
)
def test_a_context_in_the_list_of_models_is_a_limit(field: str, tmp_path: Path) -> None:
    for n_ctx, status_expected in ((24, 1), (28, 0), (4096, 0)):
        listing = as_json({"data": [{"id": "odd", field: n_ctx}]})
        answers = {"/v1/models": listing}
        status, _, err = measured(tmp_path, lambda asked: answer_of(asked, 8), answers)
        assert status == status_expected, err
        assert ("do not fit into the server's context of 24 tokens" in err) == bool(status)


def test_why_a_prompt_was_not_counted_is_said(tmp_path: Path) -> None:
    """The fourth answer is an error: the server still runs, and still counts."""
    n_asked = 0

    def deciding(asked: dict[str, Any]) -> Canned:
        nonlocal n_asked
        n_asked += 1
        if n_asked < 4:
            return answer_of(asked, asked["max_tokens"])
        error = {"error": {"message": "CUDA error: out of memory"}}
        return Canned(b"data: " + json.dumps(error).encode() + b"\n\n", kind=STREAM)

    status, _, err = measured(tmp_path, deciding)
    assert status == 1
    assert "did not count the tokens of a prompt of" in err
    assert "error inside a 200: out of memory" in err
    assert "read the server's log" in err


@pytest.mark.parametrize("status_of_server", [404, 400])
def test_a_model_that_does_not_exist_is_named_as_the_cause(
    status_of_server: int, tmp_path: Path
) -> None:
    """Though the other interface, which is tried next, does not exist at all."""
    error = {"error": {"message": "The model `odd` does not exist."}}
    canned = Canned(json.dumps(error).encode(), status_of_server)
    status, _, err = measured(tmp_path, lambda asked: canned)
    assert status == 1
    assert NO_MODEL in err
    assert "--model" in err


# Addresses


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://lamp.example.org/v1/models", "to https://lamp.example.org/v1/models"),
        ("/api/v1/models", "to /api/v1/models"),
        ("http://127.0.0.1:1/x?token=abcdef", "to http://127.0.0.1:1/x"),
        ("http://me:word@lamp.example.org/", "the answer is empty"),
        ("http://lamp.example.org/sk-lamp-0123456789", "the answer is empty"),
    ],
)
def test_a_redirect_says_where_to_unless_it_holds_a_secret(
    location: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "sk-lamp-0123456789")
    moved = Canned(b"", 308, headers=(("Location", location),))
    with odd_server({"/v1/models": moved}) as server:
        options = ("--api-key-env", "THE_KEY", "--out", tmp_path)
        status, _, err = run_lab("measure", "--url", server.url, *options)
    assert status == 1
    assert shown in err
    assert "does not follow redirects" in err
    assert all(secret not in err for secret in ("abcdef", "word@", "0123456789"))


ADDRESSES = {
    "http://h": "http://h/v1",
    "http://h/": "http://h/v1",
    "http://h/v1": "http://h/v1",
    "http://h/v1/": "http://h/v1",
    "http://h/v1/v1": "http://h/v1",
    "http://h/v1/chat/completions": "http://h/v1",
    "http://h/v1/completions/": "http://h/v1",
    "http://h/v1/models": "http://h/v1",
    "http://h/v1/responses": "http://h/v1",
    "http://h/v1/messages": "http://h/v1",
    "http://h/api/v1": "http://h/api/v1",
    "http://h/openai/v1/models": "http://h/openai/v1",
    "http://h/engines/llama.cpp/v1": "http://h/engines/llama.cpp/v1",
    "http://h/api/paas/v4": "http://h/api/paas/v4",
    "http://h/v1beta/openai/chat/completions": "http://h/v1beta/openai",
    "http://h/api": "http://h/api",
    "http://h/models/v1": "http://h/models/v1",
}


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_may_name_one_of_its_interfaces(url: str) -> None:
    assert access(url).url == ADDRESSES[url]
