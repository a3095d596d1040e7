"""`lab server` as a command, against the null server."""

import json
from collections.abc import Iterator

import pytest

from tests.conftest import run_lab
from tests.null_parts import NullServer
from tests.null_server import RUNNING, Behaviour, NullSettings, null_server


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server(NullSettings(models={"null": Behaviour(usage=RUNNING, gap_ms=1)})) as started:
        yield started


def test_what_a_server_can_do_is_a_table_or_a_document(server: NullServer, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = run_lab("server", server.url)
    assert status == 0, err
    assert "model    null" in out and "streaming" in out and "as seen in" in out
    monkeypatch.setenv("THE_KEY", "a-secret-that-nobody-prints")
    status, out, err = run_lab("server", server.url, "--api-key-env", "THE_KEY", "--json")
    assert status == 0 and "a-secret" not in out + err
    known = json.loads(out)
    assert known["model"] == "null" and {one["answer"] for one in known["endpoint"]["capabilities"]} >= {"yes"}


def test_what_cannot_be_asked_is_said() -> None:
    for asked, words in (
        (("server", "not an address"), "valid server address"),
        (("server", "http://127.0.0.1:1/v1"), "127.0.0.1:1"),
        (("server", "http://127.0.0.1:1/v1", "--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY"),
    ):
        status, out, err = run_lab(*asked)
        assert status == 1 and out == "" and words in err and "Traceback" not in err


def test_another_machine_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.confirm", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run_lab("server", "http://server.invalid/v1")[0] == 130
