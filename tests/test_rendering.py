"""The prompt that a server renders from a request, and its tokens."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.remote.access import access
from lab.remote.client import Client
from lab.remote.rendering import apply_template, tokenize
from tests.support.agent_transcript import requests
from tests.support.null_server import TEMPLATE_TOKENS, NullSettings, null_server
from tests.support.servers import wheel_server

BODY: dict[str, Any] = {
    "model": "null",
    "messages": [{"role": "user", "content": "one two"}],
    "stream": True,
}


@pytest.fixture
def client() -> Iterator[Client]:
    with null_server(NullSettings()) as server, Client(access(server.url)) as client:
        yield client


def test_the_server_renders_and_counts_a_request(client: Client) -> None:
    prompt = apply_template(client, BODY)
    assert prompt is not None
    assert prompt.endswith("one two")
    assert len(prompt.split()) == TEMPLATE_TOKENS + 2


def test_a_completion_is_its_own_prompt(client: Client) -> None:
    assert apply_template(client, {"prompt": "as it is"}) == "as it is"


def test_a_server_without_such_paths_cannot_say() -> None:
    settings = NullSettings(has_tokenize=False)
    with null_server(settings) as server, Client(access(server.url)) as client:
        assert apply_template(client, BODY) is None
        assert tokenize(client, "one") is None


def test_tokens_that_are_no_numbers_are_none(client: Client) -> None:
    assert tokenize(client, "one two") is None  # the null server's tokens are words


def test_a_dead_server_is_told() -> None:
    with (
        Client(access("http://127.0.0.1:9/v1")) as client,
        pytest.raises(LabError, match=r"does not answer /tokenize"),
    ):
        tokenize(client, "one")


def test_a_real_server_says_what_it_will_read(embedded: Path) -> None:
    """The rendered prompt of a call with tools and results has the tokens that it counts."""
    if not find_spec("xllamacpp"):
        pytest.skip("no llama-server here: the xllamacpp wheel is not installed")
    body = requests(3)[2]
    with (
        wheel_server(embedded, "--threads", "1", "--ctx-size", "4096") as started,
        Client(access(started.url)) as client,
    ):
        prompt = apply_template(client, body)
        assert prompt is not None
        tokens = tokenize(client, prompt)
        answer = client.ask(f"{started.url}/chat/completions", {**body, "max_tokens": 1})

    assert "line 6 of lexer.py" in prompt
    assert tokens is not None
    assert answer.parsed is not None
    assert len(tokens) == answer.parsed["usage"]["prompt_tokens"]
