"""Downloads that survive: huggingface_hub's real client against a local hub that fails in many ways."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.errors import LabError
from lab.models import hub, hub_cache
from lab.models.hub_cache import Remote
from tests import loopback_hub
from tests.loopback_hub import LoopbackHub, Repo

REPO, FILE = "owner/Tiny-GGUF", "Tiny-Q4_0.gguf"
REMOTE = Remote(REPO, FILE)
DATA = random.Random(7).randbytes(2_500_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
COMMIT = Repo({}).commit
KEPT_S = hub.WAITS_S
GETADDRINFO = socket.getaddrinfo


def only_loopback(host: str, *arguments: Any, **options: Any) -> Any:
    """Stands in for socket.getaddrinfo: nothing here may leave the machine."""
    assert host in ("127.0.0.1", "localhost"), host
    return GETADDRINFO(host, *arguments, **options)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub with one model; the environment and the pauses made for it."""
    from huggingface_hub import close_session, constants

    for name in [name for name in os.environ if name.startswith("HF_")] + ["HUGGINGFACE_HUB_CACHE"]:
        monkeypatch.delenv(name, raising=False)
    with loopback_hub.running() as local_hub:
        local_hub.repos[REPO] = Repo({FILE: DATA, "Tiny-Q8_0.gguf": b"GGUF" * 9, "README.md": b"hello"})
        loopback_hub.set_home(monkeypatch, tmp_path / "hf")
        loopback_hub.set_endpoint(monkeypatch, local_hub.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(socket, "getaddrinfo", only_loopback)
        monkeypatch.setattr(hub, "WAITS_S", (0.01, 0.02, 0.03))
        close_session()
        yield local_hub
        close_session()


def pull(remote: Remote = REMOTE) -> hub_cache.Pulled:
    return hub.pull(remote, lambda n_done, n_bytes: None)


def refused(remote: Remote = REMOTE) -> LabError:
    with pytest.raises(LabError) as caught:
        pull(remote)
    return caught.value


def partial() -> Path:
    return hub_cache.slot(REMOTE, COMMIT, SHA256).partial


def nothing_is_left() -> bool:
    return hub.cached(REMOTE) is None and not list((hub_cache.folder(REPO) / "blobs").iterdir())


def seamless(pieces: list[tuple[int, int]]) -> bool:
    """Whether the answers of the CDN make up the file without a byte twice."""
    ends = [start + n_bytes for start, n_bytes in pieces]
    return [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] == len(DATA)


def pull_in_a_process() -> subprocess.Popen[str]:
    """A pull in a process of its own, as the command line will do it; says the bytes that are here, then the path."""
    code = (
        "from lab.models import hub\n"
        f"pulled = hub.pull(hub.Remote({REPO!r}, {FILE!r}), lambda n_done, n_bytes: print(n_done, flush=True))\n"
        "print(pulled.path, pulled.sha256)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_bytes(process: subprocess.Popen[str], n_bytes: int) -> None:
    assert process.stdout
    for line in process.stdout:
        if int(line) >= n_bytes:
            return
    raise AssertionError(process.communicate())


# What goes well


def test_a_pull_is_whole_checked_and_found_by_other_tools(server: LoopbackHub) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    assert hub.cached(REMOTE) is None
    progress: list[tuple[int, int | None]] = []
    pulled = hub.pull(REMOTE, lambda n_done, n_bytes: progress.append((n_done, n_bytes)))
    assert pulled.path.read_bytes() == DATA
    assert (pulled.revision, pulled.sha256) == (COMMIT, SHA256)
    assert hub.cached(REMOTE) == pulled == hub.cached(Remote(REPO, FILE, COMMIT, SHA256.upper()))
    assert hub.cached(Remote(REPO, FILE, sha256="0" * 64)) is None
    assert progress[0] == (0, len(DATA)) and progress[-1] == (len(DATA), len(DATA)) and progress == sorted(progress)
    cache = hub_cache.root()
    assert hf_hub_download(REPO, FILE, cache_dir=cache, local_files_only=True) == str(pulled.path)
    scanned = scan_cache_dir(cache)
    assert not scanned.warnings and scanned.size_on_disk == len(DATA) and not scanned.incomplete_files


def test_a_second_pull_reads_the_disk_not_the_network(server: LoopbackHub) -> None:
    first = pull()
    assert pull() == first
    assert server.n_bytes == len(DATA)


def test_a_file_that_another_tool_pulled_is_taken(server: LoopbackHub) -> None:
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(REPO, FILE, cache_dir=hub_cache.root(), endpoint=server.endpoint)
    here = hub.cached(REMOTE)
    assert here and str(here.path) == path and here.sha256 == SHA256
    assert pull() == here
    assert server.n_bytes == len(DATA)


def test_files_of_a_repo(server: LoopbackHub) -> None:
    server.faults.statuses["api"] = deque([503])
    assert hub.files(REPO) == [FILE, "Tiny-Q8_0.gguf"] == hub.files(REPO, COMMIT)
    with pytest.raises(LabError, match=r"no revision 'mian'"):
        hub.files(REPO, "mian")


def test_small_files_that_git_keeps_and_files_in_folders(server: LoopbackHub) -> None:
    from huggingface_hub import scan_cache_dir

    server.repos["owner/small"] = Repo({"q4/small.gguf": b"GGUF and more"}, refs=("main", "refs/pr/1"), lfs=False)
    remote = Remote("owner/small", "q4/small.gguf", "refs/pr/1", hashlib.sha256(b"GGUF and more").hexdigest())
    pulled = pull(remote)
    assert pulled.path.read_bytes() == b"GGUF and more" and pulled.sha256 == remote.sha256
    here = hub.cached(remote)
    assert here and here.path == pulled.path and here.revision == COMMIT
    assert not scan_cache_dir(hub_cache.root()).warnings
    assert "arrived damaged" in refused(Remote(*pulled_names(remote), sha256="0" * 64)).what
    assert hub.cached(remote) is None


def pulled_names(remote: Remote) -> tuple[str, str, str]:
    return remote.repo, remote.file, remote.revision


def test_a_repo_that_moved_is_followed_and_the_token_stays_with_the_hub(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.moved["old/name"] = REPO
    server.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pull(Remote("old/name", FILE)).sha256 == SHA256
    assert {it.authorization for it in server.log if it.kind == "head"} == {"Bearer secret"}
    assert {it.authorization for it in server.log if it.kind == "cdn"} == {None}


# Cuts


def random_cuts() -> deque[int]:
    """Lengths of the answers that a connection gives when it breaks at ten random points of the file."""
    points = [0, *sorted(random.Random(3).sample(range(1, len(DATA)), 10))]
    return deque(after - before for before, after in itertools.pairwise(points))


def test_a_connection_cut_at_ten_random_points_resumes_every_time(server: LoopbackHub) -> None:
    server.faults.cuts = random_cuts()
    assert pull().sha256 == SHA256
    assert len(server.pieces) == 11 and seamless(server.pieces)
    assert not server.faults.cuts


def test_ten_pulls_that_end_by_a_cut_are_said_and_go_on_from_there(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "WAITS_S", ())
    server.faults.cuts = random_cuts()
    for _ in range(10):
        error = refused()
        assert "broke off at" in error.what and f"{partial().stat().st_size:,} of {len(DATA):,}" in error.what
        assert "the download continues there" in error.hint
        assert hub.cached(REMOTE) is None
    assert pull().sha256 == SHA256
    assert len(server.pieces) == 11 and seamless(server.pieces)


def test_a_reset_connection_resumes_too(server: LoopbackHub) -> None:
    server.faults.cuts, server.faults.reset = deque([500_000, 500_000, 500_000]), True
    server.faults.chunk_s = 0.005
    assert pull().sha256 == SHA256
    assert all(start > 0 for start, _ in server.pieces[1:])  # a reset takes what was under way with it


def test_a_cut_that_lasts_is_said_after_the_retries(server: LoopbackHub) -> None:
    server.faults.cuts = deque([1_000_000] + [0] * 50)
    assert "broke off at 1,000,000 of" in refused().what
    assert len(server.faults.cuts) == 50 - len(hub.WAITS_S)


def test_a_stalled_connection_is_given_up_and_resumed(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    server.faults.stall_s = 1
    assert pull().sha256 == SHA256
    assert max(server.pieces)[0] == loopback_hub.CHUNK


def test_a_server_that_ignores_the_range_gives_the_file_anew(server: LoopbackHub) -> None:
    server.faults.cuts, server.faults.ignores_range = deque([1_000_000]), True
    assert pull().sha256 == SHA256


def test_a_partial_file_that_is_too_long_is_thrown_away(server: LoopbackHub) -> None:
    partial().parent.mkdir(parents=True)
    partial().write_bytes(DATA + b"more")
    assert pull().sha256 == SHA256


def test_a_hub_that_does_not_say_the_size(server: LoopbackHub) -> None:
    server.repos[REPO].says_size = False
    server.faults.cuts = deque([1_000_000])
    totals: list[int | None] = []
    assert hub.pull(REMOTE, lambda _, n_bytes: totals.append(n_bytes)).sha256 == SHA256
    assert set(totals) == {None} and seamless(server.pieces)
    hub.remove(REMOTE)
    partial().write_bytes(DATA)  # whole, but the process died before it was checked
    assert pull().sha256 == SHA256


# Wrong bytes


def test_wrong_bytes_of_the_right_length_are_refused_and_deleted(server: LoopbackHub) -> None:
    server.faults.wrong_bytes = True
    error = refused()
    assert "arrived damaged" in error.what and SHA256 in error.what and "deleted" in error.what
    assert nothing_is_left()
    server.faults.wrong_bytes = False
    assert pull().sha256 == SHA256


def test_an_answer_that_does_not_end_is_left_in_time(server: LoopbackHub) -> None:
    server.faults.too_long = True
    assert "arrived damaged" in refused().what
    assert nothing_is_left()


def test_wrong_bytes_in_the_resumed_part_are_refused_too(server: LoopbackHub) -> None:
    partial().parent.mkdir(parents=True)
    partial().write_bytes(bytes(1000))
    assert "arrived damaged" in refused().what
    assert nothing_is_left()


def test_a_file_that_rotted_in_the_cache_is_refused_and_deleted_with_all_its_names(server: LoopbackHub) -> None:
    path = pull().path
    path.write_bytes(DATA[:-1] + b"!")
    assert "arrived damaged" in refused().what
    assert nothing_is_left() and not path.is_symlink()


def test_another_sum_than_the_catalogs_is_refused_before_the_first_byte(server: LoopbackHub) -> None:
    error = refused(Remote(REPO, FILE, sha256="0" * 64))
    assert "not the file in the catalog" in error.what and SHA256 in error.what and "0" * 64 in error.what
    assert server.n_bytes == 0


# Refusals


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("stranger", 403)])
def test_a_gated_repo_names_the_licence_page_and_the_token(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, token: str | None, status: int
) -> None:
    server.repos[REPO].gated = True
    server.tokens |= {"stranger", "licensed"}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    error = refused()
    assert "gated" in error.what and str(status) in error.what
    assert f"https://huggingface.co/{REPO}" in error.hint and "HF_TOKEN" in error.hint
    monkeypatch.setenv("HF_TOKEN", "licensed")
    assert pull().sha256 == SHA256


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_without_a_reason_names_them_too(server: LoopbackHub, status: int) -> None:
    server.faults.always["head"] = status
    error = refused()
    assert str(status) in error.what
    assert f"https://huggingface.co/{REPO}" in error.hint and "HF_TOKEN" in error.hint


@pytest.mark.parametrize("token", [None, "known"])
def test_a_repo_that_is_not_there_offers_close_ones(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token:
        server.tokens.add(token)
        monkeypatch.setenv("HF_TOKEN", token)
    error = refused(Remote("owner/Tiny-GUF", FILE))
    assert "no repo owner/Tiny-GUF" in error.what and f"Did you mean {REPO}?" in error.hint
    assert "HF_TOKEN" in refused(Remote("nobody/nothing", FILE)).hint


def test_a_token_that_the_hub_does_not_know_is_said(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "expired")
    error = refused()
    assert "HF_TOKEN" in error.what and "expired" not in str(error)


def test_a_token_that_cannot_be_sent_is_said(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "tökén")
    assert "HF_TOKEN" in refused().what


def test_a_file_that_is_not_there_offers_close_ones(server: LoopbackHub) -> None:
    error = refused(Remote(REPO, "tiny-q4_K.gguf"))
    assert "no file 'tiny-q4_K.gguf'" in error.what and FILE in error.hint
    assert "README" not in refused(Remote(REPO, "zzz")).hint


def test_a_revision_that_is_not_there_offers_close_ones(server: LoopbackHub) -> None:
    error = refused(Remote(REPO, FILE, "mian"))
    assert "no revision 'mian'" in error.what and "Did you mean main?" in error.hint


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_hub_is_asked_again(server: LoopbackHub, status: int) -> None:
    server.faults.statuses = {"head": deque([status] * 2), "cdn": deque([status] * 3)}
    assert pull().sha256 == SHA256
    assert (server.count("head"), server.count("cdn")) == (3, 4)


@pytest.mark.parametrize("kind", ["head", "cdn"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_stays_busy_is_said(server: LoopbackHub, kind: str, status: int) -> None:
    server.faults.always[kind] = status
    error = refused()
    assert isinstance(error, hub.Unreachable) and str(status) in error.what and "Without a network" in error.hint
    assert server.count(kind) == 1 + len(hub.WAITS_S)


def test_the_pause_that_the_hub_asks_for_is_kept_and_a_long_one_is_said(server: LoopbackHub) -> None:
    server.faults.headers["Retry-After"] = "1"
    server.faults.statuses["head"] = deque([429])
    started = time.monotonic()
    assert pull().sha256 == SHA256
    assert time.monotonic() - started >= 1
    server.faults.headers["Retry-After"] = "3600"
    server.faults.always["head"] = 429
    assert "3600 s" in refused(Remote(REPO, "Tiny-Q8_0.gguf")).hint


def test_the_real_pauses_grow_and_end() -> None:
    assert list(KEPT_S) == sorted(KEPT_S) and 20 < sum(KEPT_S) < 60


@pytest.mark.parametrize("remote", [Remote("../x", FILE), Remote(REPO, "../../x"), Remote(REPO, FILE, "/etc"),
                                    Remote("a/b/c", FILE), Remote("", FILE), Remote("a--b", FILE)])  # fmt: skip
def test_names_that_lead_out_of_the_cache_are_refused(server: LoopbackHub, remote: Remote) -> None:
    assert "is not the name of a" in refused(remote).what
    with pytest.raises(LabError, match="is not the name of a"):
        hub_cache.folder(remote.repo).mkdir(parents=True)
        hub.cached(remote)
    assert not server.log


@pytest.mark.parametrize(("commit", "etag"), [("../" * 9 + "x", SHA256), (COMMIT, "../" * 9 + "x"), ("", SHA256)])
def test_announced_names_that_lead_out_of_the_cache_are_refused(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, commit: str, etag: str
) -> None:
    server.repos[REPO].commit = commit
    monkeypatch.setattr(Repo, "etag", lambda self, file: etag)
    assert "is not a model hub" in refused().what
    assert server.count("cdn") == 0 and not hub_cache.folder(REPO).exists()


# No network


def test_without_a_network_it_is_said_what_can_be_measured(server: LoopbackHub) -> None:
    server.close()
    started = time.monotonic()
    error = refused()
    assert time.monotonic() - started < 30
    assert isinstance(error, hub.Unreachable) and server.endpoint in error.what
    assert all(word in error.hint for word in ("embedded", "synthetic", ".gguf"))
    with pytest.raises(hub.Unreachable):
        hub.files(REPO)


def test_offline_mode_asks_nobody(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused()
    assert "HF_HUB_OFFLINE" in error.what and "embedded" in error.hint and not server.log


def test_without_a_network_a_cached_file_will_do(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = pull()
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert pull() == pulled
    server.faults.always["head"] = 503
    assert pull() == pulled
    server.close()
    assert pull() == pulled


@pytest.mark.parametrize("endpoint", ["nonsense", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_none(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    loopback_hub.set_endpoint(monkeypatch, endpoint)
    assert "HF_ENDPOINT" in refused().what


def test_a_login_page_is_not_a_hub(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_hub._HubHandler, "resolve", lambda self, kind: self.answer(kind, 200, {}, b"<html>"))
    monkeypatch.setattr(loopback_hub._HubHandler, "api", lambda self, *_: self.answer("api", 200, {}, b"<html>"))
    assert "is not a model hub" in refused().what
    with pytest.raises(LabError, match="is not a model hub"):
        hub.files(REPO)


# The disk


def test_a_file_without_room_is_refused_before_its_first_byte(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 1_234_567))
    error = refused()
    assert "2,500,000 more bytes" in error.what and "1,234,567 bytes are free" in error.what
    assert str(hub_cache.root()) in error.what and "HF_HOME" in error.hint
    assert server.n_bytes == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_meanwhile_is_said(server: LoopbackHub) -> None:
    partial().parent.mkdir(parents=True)
    partial().symlink_to("/dev/full")
    error = refused()
    assert "disk is too full" in error.what and "2,500,000 more bytes" in error.what


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, where the test may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_really_full_disk_is_said_and_resumed_when_there_is_room(
    server: LoopbackHub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback_hub.set_home(monkeypatch, small_disk)
    filler = small_disk / "filler"

    def fill(n_done: int, _: int | None) -> None:
        if n_done > 500_000 and not filler.exists():
            filler.write_bytes(bytes(2_500_000))

    with pytest.raises(LabError, match="disk is too full") as caught:
        hub.pull(REMOTE, fill)
    assert " more bytes in " in caught.value.what
    n_kept = partial().stat().st_size
    assert n_kept > 500_000
    assert "disk is too full" in refused().what  # now before the first byte
    filler.unlink()
    assert pull().sha256 == SHA256
    assert max(server.pieces) == (n_kept, len(DATA) - n_kept)


def test_a_cache_that_cannot_be_used_is_said(server: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("a file where a folder should be")
    assert "cache cannot be used" in refused().what


# Two at once, Ctrl-C, kill


def test_two_processes_at_once_download_once_and_both_have_it(server: LoopbackHub) -> None:
    server.faults.chunk_s = 0.01
    first, second = pull_in_a_process(), pull_in_a_process()
    endings = [process.communicate() for process in (first, second)]
    for out, err in endings:
        assert not err and out.splitlines()[-1] == f"{hub_cache.slot(REMOTE, COMMIT, SHA256).name} {SHA256}"
    assert server.count("head") == 2 and server.n_bytes == len(DATA)


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_or_a_kill_and_again(server: LoopbackHub, how: signal.Signals) -> None:
    server.faults.chunk_s = 0.01
    process = pull_in_a_process()
    wait_for_bytes(process, 400_000)
    process.send_signal(how)
    _, err = process.communicate()
    assert process.returncode != 0 and ("KeyboardInterrupt" in err) == (how == signal.SIGINT)
    n_kept = partial().stat().st_size
    assert n_kept >= 400_000
    assert hub.cached(REMOTE) is None
    server.faults.chunk_s = 0
    assert pull().sha256 == SHA256
    assert max(server.pieces) == (n_kept, len(DATA) - n_kept)


def test_a_process_that_waits_goes_on_where_a_killed_one_was(server: LoopbackHub) -> None:
    server.faults.chunk_s = 0.05
    first = pull_in_a_process()
    wait_for_bytes(first, 300_000)
    server.faults.chunk_s = 10  # the first shall not end before the second has come, on a busy machine too
    second = pull_in_a_process()
    while server.count("head") < 2:
        time.sleep(0.01)
    time.sleep(0.1)  # now the second waits for the first
    assert not hub.cached(REMOTE)
    first.kill()
    first.communicate()
    server.faults.chunk_s = 0
    out, err = second.communicate()
    assert not err and out.split()[-1] == SHA256
    assert max(server.pieces)[0] >= 300_000


# Removing


def test_remove_frees_the_bytes_and_all_names(server: LoopbackHub) -> None:
    from huggingface_hub import scan_cache_dir

    assert hub.remove(REMOTE) == 0
    other = Remote(REPO, "Tiny-Q8_0.gguf")
    pull(), pull(other)
    assert hub.remove(REMOTE) == len(DATA)
    assert hub.cached(REMOTE) is None and hub.cached(other) and hub.remove(REMOTE) == 0
    scanned = scan_cache_dir(hub_cache.root())
    assert not scanned.warnings and scanned.size_on_disk == 36


def test_remove_drops_what_a_cut_left(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "WAITS_S", ())
    server.faults.cuts = deque([1_000_000])
    refused()
    assert hub.remove(Remote(REPO, FILE, sha256=SHA256)) == 1_000_000
    assert nothing_is_left()


def test_remove_leaves_the_shared_store_to_its_library(server: LoopbackHub) -> None:
    shared = pytest.importorskip("huggingface_hub.utils._shared_blobs")
    pulled = pull()
    blob = hub_cache.blob_of(pulled.path)
    assert shared.publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash="ab" * 32, cache_dir=hub_cache.root(), expected_size=len(DATA)
    )
    assert blob.is_symlink() and hub.cached(REMOTE) == pulled == pull()
    assert hub.remove(REMOTE) == len(DATA)
    assert hub.cached(REMOTE) is None and not blob.is_symlink()


def test_remove_in_a_repo_with_a_broken_link(server: LoopbackHub) -> None:
    name = pull().path
    name.with_name("other.gguf").symlink_to("nowhere")
    assert hub.remove(REMOTE) == len(DATA)
    assert nothing_is_left()


# What huggingface_hub does not do. Where one of these fails, code in hub.py or hub_cache.py can go.


def library_pull(server: LoopbackHub) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(REPO, FILE, cache_dir=hub_cache.root(), endpoint=server.endpoint)


def test_the_library_keeps_nothing_of_a_download_that_broke_off(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    server.faults.cuts = deque([1_000_000] + [0] * 20)
    with pytest.raises(hub._failures(), match="peer closed connection"):
        library_pull(server)
    assert server.n_bytes == 1_000_000 and nothing_is_left()


def test_the_library_does_not_try_again_after_a_reset_or_when_the_bytes_are_not_served(server: LoopbackHub) -> None:
    server.faults.cuts, server.faults.reset = deque([500_000]), True
    with pytest.raises(hub._failures()):
        library_pull(server)
    assert server.count("cdn") == 1
    server.faults.statuses["cdn"] = deque([503])
    with pytest.raises(hub._failures()):
        library_pull(server)


def test_the_library_takes_wrong_bytes(server: LoopbackHub) -> None:
    server.faults.wrong_bytes = True
    assert Path(library_pull(server)).read_bytes() != DATA


def test_the_library_reads_an_answer_that_is_too_long_to_its_end(server: LoopbackHub) -> None:
    server.faults.too_long = True
    with pytest.raises(OSError, match="Consistency check failed"):
        library_pull(server)
    assert server.n_bytes == len(DATA) + 10 * loopback_hub.CHUNK


def test_the_library_only_warns_of_a_full_disk(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 1_234_567))
    with pytest.warns(UserWarning, match="Not enough free disk space"):
        library_pull(server)


@pytest.mark.parametrize("kind", ["head", "api"])
def test_the_library_sleeps_as_long_as_a_busy_hub_asks(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from huggingface_hub import HfApi

    def sleep(seconds: float) -> None:
        raise InterruptedError(seconds)

    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=sleep))
    server.faults.headers["Retry-After"] = "3600"
    server.faults.always[kind] = 429
    with pytest.raises(InterruptedError, match="3601"):
        library_pull(server) if kind == "head" else HfApi(server.endpoint).list_repo_files(REPO)


def test_the_library_follows_a_revision_out_of_its_folder(server: LoopbackHub) -> None:
    from huggingface_hub import try_to_load_from_cache

    path = pull().path
    assert try_to_load_from_cache(REPO, FILE, hub_cache.root(), "../refs/main") == str(path)
    with pytest.raises(LabError, match="not the name of a revision"):
        hub.cached(Remote(REPO, FILE, "../refs/main"))


def test_importing_is_cheap() -> None:
    code = "import sys, lab.models.hub; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
