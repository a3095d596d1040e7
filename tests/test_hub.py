"""Downloads: huggingface_hub's real client against a local hub that fails in many ways."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.models import hub, obtain, synthetic
from lab.models.hub import Remote
from lab.process.worker import Worker
from tests import loopback_hub, miniature
from tests.loopback_hub import LoopbackHub, Repo

REPO = "owner/Tiny-GGUF"
FILE = "Tiny-Q4_0.gguf"
REMOTE = Remote(REPO, FILE)
DATA = random.Random(7).randbytes(1_500_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
COMMIT = Repo({}).commit
GETADDRINFO = socket.getaddrinfo


def only_loopback(host: str, *arguments: Any, **options: Any) -> Any:
    """Stands in for socket.getaddrinfo: nothing here may leave the machine."""
    assert host in ("127.0.0.1", "localhost"), host
    return GETADDRINFO(host, *arguments, **options)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub with one model, and the environment for it."""
    from huggingface_hub import close_session, constants

    for name in [name for name in os.environ if name.startswith("HF_")] + ["HUGGINGFACE_HUB_CACHE"]:
        monkeypatch.delenv(name, raising=False)
    with loopback_hub.running() as local_hub:
        local_hub.repos[REPO] = Repo(
            {FILE: DATA, "Tiny-Q8_0.gguf": b"GGUF" * 9, "README.md": b"hello"}
        )
        loopback_hub.set_home(monkeypatch, tmp_path / "hf")
        loopback_hub.set_endpoint(monkeypatch, local_hub.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(socket, "getaddrinfo", only_loopback)
        close_session()
        yield local_hub
        close_session()


def refused(remote: Remote = REMOTE) -> str:
    with pytest.raises(LabError) as caught:
        hub.pull(remote)
    return str(caught.value)


def is_empty() -> bool:
    blobs = hub._folder(REMOTE) / "blobs"
    return hub.cached(REMOTE) is None and not (blobs.exists() and list(blobs.iterdir()))


def test_a_pull_is_whole_checked_and_found_by_other_tools(server: LoopbackHub) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    assert hub.cached(REMOTE) is None
    pulled = hub.pull(REMOTE)
    assert pulled.path.read_bytes() == DATA
    assert (pulled.revision, pulled.sha256) == (COMMIT, SHA256)
    assert hub.cached(REMOTE) == pulled == hub.cached(Remote(REPO, FILE, COMMIT, SHA256.upper()))
    assert hub.cached(Remote(REPO, FILE, sha256="0" * 64)) is None
    assert server.n_bytes == len(DATA)
    assert hf_hub_download(REPO, FILE, cache_dir=hub._root(), local_files_only=True) == str(
        pulled.path
    )
    scanned = scan_cache_dir(hub._root())
    assert not scanned.warnings and scanned.size_on_disk == len(DATA)


def test_a_prediction_reads_only_the_header(
    server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "whole.gguf"
    synthetic.write(miniature.entry("llama", n_layer=9).shape, "Q4_0", path)
    server.repos[REPO].files["whole.gguf"] = path.read_bytes()
    monkeypatch.setattr(hub, "HEADER_BYTES", 100_000)
    with Worker() as worker:
        found = obtain.find(worker, f"hf:{REPO}/whole.gguf")
        whole = worker.read_model(path, "whole", "hub")
        assert found == whole and server.n_bytes <= 100_000 < path.stat().st_size and is_empty()
        with pytest.raises(LabError, match="no file"):
            obtain.find(worker, f"hf:{REPO}/none.gguf")


def test_the_token_stays_with_the_hub(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.pull(REMOTE)
    assert set(server.log) == {("head", "Bearer secret"), ("cdn", None)}


def test_a_connection_that_breaks_is_continued(server: LoopbackHub) -> None:
    server.cut_at = 500_000
    assert hub.pull(REMOTE).sha256 == SHA256
    assert not server.cut_at


def test_wrong_bytes_are_refused_and_deleted(server: LoopbackHub) -> None:
    server.wrong_bytes = True
    error = refused()
    assert "arrived damaged" in error and SHA256 in error and "deleted" in error
    assert is_empty()
    server.wrong_bytes = False
    path = hub.pull(REMOTE).path
    path.with_name("other.gguf").symlink_to(
        "nowhere"
    )  # a broken link hides the repo from the library's scan
    path.write_bytes(DATA[:-1] + b"!")
    assert "arrived damaged" in refused()
    assert is_empty()


def test_another_sum_than_the_catalogs_is_refused_before_the_first_byte(
    server: LoopbackHub,
) -> None:
    error = refused(Remote(REPO, FILE, sha256="0" * 64))
    assert "not the file in the catalog" in error and SHA256 in error and "0" * 64 in error
    assert server.n_bytes == 0


LICENCE = (f"https://huggingface.co/{REPO}", "HF_TOKEN", "gated")
REFUSALS: dict[str, tuple[dict[str, Any], str | None, Remote, tuple[str, ...]]] = {
    # changes of the hub, the token, what is asked, words of the error
    "gated": ({"gated": True}, None, REMOTE, ("(401)", *LICENCE)),
    "gated, another token": (
        {"gated": True, "tokens": {"other"}},
        "other",
        REMOTE,
        ("(403)", *LICENCE),
    ),
    "403 without a reason": ({"statuses": {"head": 403}}, None, REMOTE, ("(403)", *LICENCE)),
    "wrong repo": ({}, None, Remote("owner/x", FILE), ("no repo owner/x", "HF_TOKEN")),
    "wrong repo, with a token": (
        {"tokens": {"t"}},
        "t",
        Remote("owner/x", FILE),
        ("no repo owner/x", "(404)"),
    ),
    "wrong file": ({}, None, Remote(REPO, "x.gguf"), ("no file 'x.gguf'", f"{REPO}/tree/main")),
    "wrong revision": ({}, None, Remote(REPO, FILE, "mian"), ("no revision 'mian'",)),
    "wrong token": ({}, "expired", REMOTE, ("rejects the token in HF_TOKEN",)),
    "token that cannot be sent": ({}, "tökén", REMOTE, ("HF_TOKEN",)),
    "busy": ({"statuses": {"head": 503}}, None, REMOTE, ("too busy", "(503)")),
    "bytes not served": ({"statuses": {"cdn": 503}}, None, REMOTE, ("(503)",)),
    "a login page": ({"page": b"<html>"}, None, REMOTE, ("is not a model hub",)),
    "a sum that is a path": ({"announced": "../" * 9 + "x"}, None, REMOTE, ("is not a model hub",)),
    "a commit that is a path": ({"commit": "../" * 9 + "x"}, None, REMOTE, ("is not a model hub",)),
    "no commit": ({"commit": ""}, None, REMOTE, ("is not a model hub",)),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_of_the_hub(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    changes, token, remote, words = REFUSALS[case]
    for name, value in changes.items():
        setattr(server if hasattr(server, name) else server.repos[REPO], name, value)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    error = refused(remote)
    assert all(word in error for word in words) and (
        token is None or len(token) < 5 or token not in error
    ), error
    assert server.n_bytes == 0 and not list(hub._root().glob("**/blobs/*"))


def test_a_hub_that_changes_its_answers(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library asks again what the lab has checked: that answer too must not lead out of the cache."""
    answers = iter([SHA256, "../" * 9 + "x"])
    monkeypatch.setattr(Repo, "etag", lambda self, file: next(answers))
    assert "is not a model hub" in refused() and server.n_bytes == 0


OUTSIDE = (
    ("../x", FILE),
    (REPO, "../../x"),
    (REPO, FILE, "/etc"),
    ("a/b/c", FILE),
    ("", FILE),
    ("a--b", FILE),
)


@pytest.mark.parametrize("names", OUTSIDE)
def test_names_that_lead_out_of_the_cache_are_refused(
    server: LoopbackHub, names: tuple[str, ...]
) -> None:
    assert "is not the name of a" in refused(Remote(*names))
    assert not server.log


def test_without_a_network_it_is_said_what_can_be_measured(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        loopback_hub.set_endpoint(
            monkeypatch, endpoint := f"http://127.0.0.1:{unused.getsockname()[1]}"
        )
        started = time.monotonic()
        error = refused()
        assert time.monotonic() - started < 5
        assert all(word in error for word in (endpoint, "embedded", "synthetic", ".gguf"))
        with pytest.raises(LabError, match="cannot be reached"):
            hub.files(REPO)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused() and not server.log


@pytest.mark.parametrize("endpoint", ["nonsense", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_none(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    loopback_hub.set_endpoint(monkeypatch, endpoint)
    assert "HF_ENDPOINT" in refused()


def test_a_file_without_room_is_refused_before_its_first_byte(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 1_234_567)
    )
    error = refused()
    assert "1,234,567 bytes are free" in error and str(hub._root()) in error and "HF_HOME" in error
    assert server.n_bytes == 0


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_or_a_kill_and_again(server: LoopbackHub, how: signal.Signals) -> None:
    server.chunk_s = 0.02
    code = f"from lab.models import hub; hub.pull(hub.Remote({REPO!r}, {FILE!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while server.n_bytes < 200_000:
        time.sleep(0.01)
    process.send_signal(how)
    assert process.wait() != 0
    assert hub.cached(REMOTE) is None
    server.chunk_s = 0
    assert hub.pull(REMOTE).sha256 == SHA256


def test_remove_frees_the_bytes_and_all_names(server: LoopbackHub) -> None:
    from huggingface_hub import scan_cache_dir

    assert hub.remove(REMOTE) == 0
    other = Remote(REPO, "Tiny-Q8_0.gguf")
    hub.pull(REMOTE), hub.pull(other)
    assert hub.remove(REMOTE) == len(DATA)
    assert hub.cached(REMOTE) is None and hub.cached(other) and hub.remove(REMOTE) == 0
    scanned = scan_cache_dir(hub._root())
    assert not scanned.warnings and scanned.size_on_disk == 36
