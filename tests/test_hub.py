"""Downloads: huggingface_hub's real client against a local hub that fails in many ways."""

from __future__ import annotations

import dataclasses
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest

from lab.errors import LabError
from lab.models import catalog, hub, obtain, synthetic
from lab.models.hub import HubFile
from lab.process.worker import Worker
from tests.support import loopback_hub, miniature
from tests.support.command import run_lab
from tests.support.loopback_hub import LoopbackHub, Repo

REPO = "owner/Tiny-GGUF"
FILE = "Tiny-Q4_0.gguf"
REMOTE = HubFile(REPO, FILE)
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

    for name in list(os.environ):
        if name.startswith("HF_") or name == "HUGGINGFACE_HUB_CACHE":
            monkeypatch.delenv(name)
    with loopback_hub.running() as local_hub:
        local_hub.repos[REPO] = Repo(
            {
                FILE: DATA,
                "Tiny-Q8_0.gguf": b"GGUF" * 9,
                "README.md": b"hello",
            }
        )
        loopback_hub.set_home(monkeypatch, tmp_path / "hf")
        loopback_hub.set_endpoint(monkeypatch, local_hub.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(socket, "getaddrinfo", only_loopback)
        close_session()
        yield local_hub
        close_session()


def refused(remote: HubFile = REMOTE) -> str:
    with pytest.raises(LabError) as caught:
        hub.pull(remote)
    return str(caught.value)


def is_empty() -> bool:
    blobs = hub._folder(REMOTE) / "blobs"
    has_blobs = blobs.exists() and any(blobs.iterdir())
    return hub.cached(REMOTE) is None and not has_blobs


def test_a_pull_is_whole_checked_and_found_by_other_tools(server: LoopbackHub) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    assert hub.cached(REMOTE) is None
    pulled = hub.pull(REMOTE)
    assert pulled.path.read_bytes() == DATA
    assert pulled.revision == COMMIT
    assert pulled.sha256 == SHA256
    assert (
        hub.cached(REMOTE) == pulled == hub.cached(HubFile(REPO, FILE, COMMIT, SHA256.upper()))
    )
    assert hub.cached(HubFile(REPO, FILE, sha256="0" * 64)) is None
    assert server.n_bytes == len(DATA)
    assert hf_hub_download(
        REPO,
        FILE,
        cache_dir=hub._root(),
        local_files_only=True,
    ) == str(pulled.path)
    scanned = scan_cache_dir(hub._root())
    assert not scanned.warnings
    assert scanned.size_on_disk == len(DATA)


def test_a_prediction_reads_only_the_header(
    server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "whole.gguf"
    synthetic.write(miniature.entry("llama", n_layer=9).shape, "Q4_0", path)
    server.repos[REPO].files["whole.gguf"] = path.read_bytes()
    monkeypatch.setattr(hub, "HEADER_BYTES", 100_000)
    with Worker() as worker:
        model = obtain.find(worker, f"hf:{REPO}/whole.gguf")
        of_file = worker.read_model(path, "whole", "hub")
        assert model == dataclasses.replace(of_file, repo=REPO, revision="main")
        assert server.n_bytes <= 100_000 < path.stat().st_size
        assert is_empty()
        with pytest.raises(LabError, match="no file"):
            obtain.find(worker, f"hf:{REPO}/none.gguf")


def test_the_token_stays_with_the_hub(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert "arrived damaged" in error
    assert SHA256 in error
    assert "deleted" in error
    assert is_empty()
    server.wrong_bytes = False
    path = hub.pull(REMOTE).path
    # A broken link hides the repo from the library's scan.
    path.with_name("other.gguf").symlink_to("nowhere")
    path.write_bytes(DATA[:-1] + b"!")
    assert "arrived damaged" in refused()
    assert is_empty()


def test_another_sum_than_the_catalogs_is_refused_before_the_first_byte(
    server: LoopbackHub,
) -> None:
    error = refused(HubFile(REPO, FILE, sha256="0" * 64))
    assert "not the file in the catalog" in error
    assert SHA256 in error
    assert "0" * 64 in error
    assert server.n_bytes == 0


@dataclass(frozen=True)
class Refusal:
    """What the hub and the user do, and words of the error."""

    expected: tuple[str, ...]
    of_hub: dict[str, Any] = field(default_factory=dict)
    of_repo: dict[str, Any] = field(default_factory=dict)
    token: str | None = None
    remote: HubFile = REMOTE


LICENCE = (f"https://huggingface.co/{REPO}", "HF_TOKEN", "gated")
NO_HUB = ("is not a model hub",)
ELSEWHERE = "../" * 9 + "x"
OTHER_REPO = HubFile("owner/x", FILE)
REFUSALS = {
    "gated": Refusal(("(401)", *LICENCE), of_repo={"gated": True}),
    "gated, another token": Refusal(
        ("(403)", *LICENCE), {"tokens": {"other"}}, {"gated": True}, "other"
    ),
    "403 with a reason": Refusal(
        ("refuses access", "(403): status 403", REPO), {"statuses": {"head": 403}}
    ),
    "403 of something between": Refusal(
        ("without a reason of the hub", "firewall"), {"bare_statuses": {"head": 403}}
    ),
    "403 for the token's rights": Refusal(
        ("(403): status 403", "token in HF_TOKEN", "/settings/tokens"),
        {"statuses": {"head": 403}, "tokens": {"narrow"}},
        token="narrow",
    ),
    "bytes that are missing": Refusal(
        ("The server localhost", f"does not have {FILE}", "(404)"), {"statuses": {"cdn": 404}}
    ),
    "bytes that are refused": Refusal(
        ("The server localhost", f"refuses to send {FILE}", "(403)"),
        {"statuses": {"cdn": 403}},
    ),
    "wrong repo": Refusal(("no repo owner/x", "HF_TOKEN"), remote=OTHER_REPO),
    "wrong repo, with a token": Refusal(
        ("no repo owner/x", "(404)"), {"tokens": {"t"}}, token="t", remote=OTHER_REPO
    ),
    "wrong file": Refusal(
        ("no file 'x.gguf'", f"{REPO}/tree/main"), remote=HubFile(REPO, "x.gguf")
    ),
    "wrong revision": Refusal(("no revision 'mian'",), remote=HubFile(REPO, FILE, "mian")),
    "wrong token": Refusal(("rejects the token in HF_TOKEN",), token="expired"),
    "token that cannot be sent": Refusal(("HF_TOKEN", "not ASCII"), token="tökén"),
    "busy": Refusal(("too busy", "(503)"), {"statuses": {"head": 503}}),
    "bytes not served": Refusal(("(503)",), {"statuses": {"cdn": 503}}),
    "a login page": Refusal(NO_HUB, {"page": b"<html>"}),
    "a sum that is a path": Refusal(NO_HUB, of_repo={"announced": ELSEWHERE}),
    "a commit that is a path": Refusal(NO_HUB, of_repo={"commit": ELSEWHERE}),
    "no commit": Refusal(NO_HUB, of_repo={"commit": ""}),
    "no size": Refusal(NO_HUB, of_repo={"announced_bytes": "many"}),
    "a size below zero": Refusal(NO_HUB, of_repo={"announced_bytes": -5}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_of_the_hub(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    refusal = REFUSALS[case]
    for name, value in refusal.of_hub.items():
        setattr(server, name, value)
    for name, value in refusal.of_repo.items():
        setattr(server.repos[REPO], name, value)
    if refusal.token:
        monkeypatch.setenv("HF_TOKEN", refusal.token)
    error = refused(refusal.remote)
    for text in refusal.expected:
        assert text in error
    if refusal.token and len(refusal.token) > 4:
        assert refusal.token not in error
    assert server.n_bytes == 0
    blobs = [path for path in hub._root().glob("**/blobs/*") if path.stat().st_size]
    assert not blobs


@pytest.mark.parametrize("token", ["expired", "tökén"])
def test_a_token_of_a_file_is_blamed_on_the_file(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    path = tmp_path / "token"
    path.write_text(token, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(path))
    for ask in (lambda: hub.pull(REMOTE), lambda: hub.files(REPO)):
        with pytest.raises(LabError) as caught:
            ask()
        assert f"the file {path}" in caught.value.what
        assert token not in str(caught.value)


def test_a_token_that_is_not_ascii_is_named_for_the_list_of_files(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "tökén")
    with pytest.raises(LabError, match="The token in HF_TOKEN has characters"):
        hub.files(REPO)


def test_no_inner_name_is_told_of_a_repo(server: LoopbackHub) -> None:
    server.statuses["api"] = 503
    with pytest.raises(LabError) as caught:
        hub.files(REPO)
    assert f"too busy to send {REPO} (503)" in caught.value.what
    assert "any.gguf" not in str(caught.value)


def proxies(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Let these be the proxies of the environment."""
    for name in ("HTTP", "HTTPS", "ALL", "NO"):
        for spelling in (f"{name}_PROXY", f"{name}_proxy".lower()):
            monkeypatch.delenv(spelling, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "http_proxy"])
def test_a_dead_proxy_is_named(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://me:password@127.0.0.1:{unused.getsockname()[1]}"
        proxies(monkeypatch, **{name: address})
        for text in (refused(), refused_list()):
            assert address.replace("me:password", "***") in text
            assert name.upper() in text
            assert "password" not in text


def refused_list() -> str:
    with pytest.raises(LabError) as caught:
        hub.files(REPO)
    return str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["socks5h://127.0.0.1:9", "socks5://127.0.0.1:9", "socks4://127.0.0.1:9", "x://y"],
)
def test_a_proxy_that_the_client_cannot_use(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    proxies(monkeypatch, ALL_PROXY=address)
    for text in (refused(), refused_list()):
        assert "ALL_PROXY" in text
    # The hub of the test is excepted from proxies, so none is needed.
    proxies(monkeypatch, ALL_PROXY=address, NO_PROXY="127.0.0.1,localhost")
    assert hub.pull(REMOTE).sha256 == SHA256
    assert hub.files(REPO)


SETTINGS = {
    "HF_HUB_DOWNLOAD_TIMEOUT": "abc",
    "HF_HUB_ETAG_TIMEOUT": "10s",
    "HF_ENDPOINT": "http://127.0.0.1:99999",
    "HF_ENDPOINT ": "http://host:abc",
    "HF_ENDPOINT  ": "http://[::1",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_environment_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    value = SETTINGS[name]
    (tmp_path / "hub" / "models--microsoft--Phi-3-mini-4k-instruct-gguf" / "snapshots").mkdir(
        parents=True
    )
    for spec in ("hf:owner/x:Q4_0", "phi-3-mini"):
        environment = {**os.environ, name.strip(): value, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "lab", "models", "pull", spec]
        ended = subprocess.run(
            command, env=environment, capture_output=True, check=False, text=True
        )
        assert ended.returncode == 1
        assert name.strip() in ended.stderr
        assert value in ended.stderr
        assert "Traceback" not in ended.stderr


@contextmanager
def swallowing() -> Iterator[str]:
    """The address of a server whose connections are never accepted."""
    with socket.socket() as listener, ExitStack() as clients:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # fill the queue
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems reject such connections")
def test_a_hub_that_swallows_packets_is_given_up(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    shown = []

    def watch(what: str, done: int, total: int | None) -> None:
        shown.append(what)

    spec = "hf:owner/x:Q4_0"
    worker = cast(Worker, SimpleNamespace(reads_files=True))
    with swallowing() as address:
        loopback_hub.set_endpoint(monkeypatch, address)
        with pytest.raises(LabError, match="cannot be reached"):
            obtain.obtain(catalog.parse(spec), worker, watch)
        with pytest.raises(LabError, match="cannot be reached"):
            obtain.find(worker, spec, watch)
    assert shown == ["asking the hub for hf:owner/x:Q4_0"] * 2


@pytest.mark.parametrize("command", [["predict", "-m"], ["models", "info"]])
def test_who_only_asks_for_a_model_sees_that_the_hub_is_asked(
    server: LoopbackHub, command: list[str]
) -> None:
    server.statuses["api"] = 500
    status, _, err = run_lab(*command, "hf:owner/x:Q4_0")
    assert status == 1
    assert err.startswith("asking the hub for hf:owner/x:Q4_0 ...\nError: ")


def test_a_new_process_continues_a_download(server: LoopbackHub) -> None:
    blobs = hub._folder(REMOTE) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{SHA256}.incomplete").write_bytes(DATA[:1_000_000])
    abandoned = blobs / f"{SHA256}.0123abcd.incomplete"
    in_use = blobs / f"{SHA256}.4567abcd.incomplete"
    for path in (abandoned, in_use):
        path.write_bytes(DATA[:10])
    os.utime(abandoned, (0, 0))
    assert hub.pull(REMOTE).path.read_bytes() == DATA
    assert server.n_bytes == len(DATA) - 1_000_000
    assert not abandoned.exists()
    assert in_use.exists()


@pytest.mark.parametrize("begun", [DATA[:10] + b"?" + DATA[11:1_000], DATA + b"?"])
def test_a_download_that_was_begun_wrongly_is_not_kept(
    server: LoopbackHub, begun: bytes
) -> None:
    blobs = hub._folder(REMOTE) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{SHA256}.incomplete").write_bytes(begun)
    if len(begun) < len(DATA):
        assert "arrived damaged" in refused()
    assert hub.pull(REMOTE).path.read_bytes() == DATA


def test_a_server_without_ranges_sends_all_again(server: LoopbackHub) -> None:
    server.ignores_ranges = True
    server.cut_at = 1_000_000
    assert hub.pull(REMOTE).path.read_bytes() == DATA
    assert server.n_bytes == len(DATA) + 1_000_000


def test_a_download_that_brings_nothing_ends(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos[REPO].announced_bytes = len(DATA) + 1
    assert f"ended after {len(DATA):,} of {len(DATA) + 1:,} bytes" in refused()


def test_no_more_is_written_than_was_announced(server: LoopbackHub) -> None:
    server.is_endless = True
    assert f"more than the {len(DATA):,} bytes" in refused()
    incomplete = list(hub._root().glob("**/*.incomplete"))
    assert all(path.stat().st_size <= len(DATA) for path in incomplete)
    assert hub.cached(REMOTE) is None


@pytest.mark.parametrize(
    "page", [b"[]", b"7", b'{"siblings": [{}]}', b'{"siblings": 7}', b"\xff"]
)
def test_an_answer_of_another_form_is_no_list_of_files(
    server: LoopbackHub, page: bytes
) -> None:
    server.page = page
    with pytest.raises(LabError, match="is not a model hub"):
        hub.files(REPO)


def test_redirects_in_a_circle_end(server: LoopbackHub) -> None:
    server.repos[REPO].location = f"/{REPO}/resolve/main/{FILE}"
    assert "The hub" in refused()
    assert server.n_bytes == 0


def test_the_token_is_not_sent_where_a_redirect_leads(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    headers = {"Authorization": "Bearer secret"}
    for url in (
        "http://localhost/x",
        server.endpoint.replace("http:", "https:"),
        "http://127.0.0.1:1/x",
    ):
        with pytest.raises(LabError, match="is not a model hub"):
            hub._check_request(httpx2.Request("GET", url, headers=headers))
    hub._check_request(httpx2.Request("GET", f"{server.endpoint}/x", headers=headers))
    hub.pull(REMOTE)
    assert ("cdn", "Bearer secret") not in server.log


@pytest.mark.parametrize(
    "endpoint",
    ["http://me:password@127.0.0.1:1", "ftp://me:password@127.0.0.1", "http://me:password@/x"],
)
def test_a_password_in_the_endpoint_is_not_printed(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    loopback_hub.set_endpoint(monkeypatch, endpoint)
    error = refused()
    assert "password" not in error
    assert "me:" not in error


def test_a_password_is_not_printed_with_an_answer_of_no_hub(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.endpoint.replace("http://", "http://me:password@")
    loopback_hub.set_endpoint(monkeypatch, address)
    server.page = b"<html>"
    error = refused()
    assert "is not a model hub" in error
    assert "password" not in error


OUTSIDE = (
    HubFile("../x", FILE),
    HubFile(REPO, "../../x"),
    HubFile(REPO, FILE, "/etc"),
    HubFile("a/b/c", FILE),
    HubFile("", FILE),
    HubFile("a--b", FILE),
)


@pytest.mark.parametrize("remote", OUTSIDE)
def test_names_that_lead_out_of_the_cache_are_refused(
    server: LoopbackHub, remote: HubFile
) -> None:
    assert "is not the name of a" in refused(remote)
    assert not server.log


def test_without_a_network_it_is_said_what_can_be_measured(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        _, port = unused.getsockname()
        endpoint = f"http://127.0.0.1:{port}"
        loopback_hub.set_endpoint(monkeypatch, endpoint)
        error = refused()
        for text in (endpoint, "embedded", "synthetic", ".gguf"):
            assert text in error
        with pytest.raises(LabError, match="cannot be reached"):
            hub.files(REPO)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused()
    assert not server.log


@pytest.mark.parametrize(
    "endpoint",
    [
        "nonsense",
        "http://127.0.0.1:99999",
        "http://host:abc",
        "http://[::1",
        "ftp://127.0.0.1",
    ],
)
def test_an_endpoint_that_is_none(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    loopback_hub.set_endpoint(monkeypatch, endpoint)
    assert "HF_ENDPOINT" in refused()


def test_a_file_without_room_is_refused_before_its_first_byte(
    server: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**6, 0, 1_234_567)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    error = refused()
    assert "1,234,567 bytes are free" in error
    assert str(hub._root()) in error
    assert "HF_HOME" in error
    assert server.n_bytes == 0


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_or_a_kill_and_again(server: LoopbackHub, how: signal.Signals) -> None:
    server.chunk_s = 0.02
    code = f"from lab.models import hub; hub.pull(hub.HubFile({REPO!r}, {FILE!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while server.n_bytes < 200_000:
        time.sleep(0.01)
    process.send_signal(how)
    assert process.wait() != 0
    assert hub.cached(REMOTE) is None
    server.chunk_s = 0
    n_sent = server.n_bytes
    assert hub.pull(REMOTE).sha256 == SHA256
    assert server.n_bytes - n_sent < len(DATA) - 100_000  # it went on


VISION = "org/Pixie-VL-GGUF"
STEM = "Pixie-VL-30B-A3B"


@pytest.fixture
def vision(server: LoopbackHub) -> LoopbackHub:
    """The hub with a model that sees pictures, and all that lies beside it."""
    files = {file.name: b"GGUF" + file.name.encode() for file in loopback_hub.VISION_REPO}
    server.repos[VISION] = Repo(files)
    return server


def pulled(text: str) -> str | None:
    """The name of the file that is pulled for a SPEC."""
    file = obtain.obtain(catalog.parse(text), cast(Worker, None), memory_bytes=60)
    assert file.path.read_bytes()[4:].decode().endswith(file.path.name)
    return file.path.name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"hf:{VISION}:Q4_K_M", f"{STEM}-Q4_K_M.gguf"),
        (f"{VISION}", f"{STEM}-Q4_K_M.gguf"),
        (f"-hf {VISION}:q8_0", f"{STEM}-Q8_0.gguf"),
        (f"hf.co/{VISION}:UD-Q4_K_M", f"{STEM}-UD-Q4_K_M.gguf"),
        (f"{VISION}@ud-iq1_m", f"{STEM}-UD-IQ1_M.gguf"),
        (f"https://huggingface.co/{VISION}/blob/main/mmproj-F16.gguf", "mmproj-F16.gguf"),
        (f"hf:{VISION}/{STEM}-Q4_K_L.gguf", f"{STEM}-Q4_K_L.gguf"),
    ],
)
def test_the_right_file_of_a_realistic_repo(vision: LoopbackHub, text: str, name: str) -> None:
    assert pulled(text) == name
    n_requests = len(vision.log)
    assert pulled(text) == name
    assert len(vision.log) == n_requests  # the name means the same file offline


def refused_name(text: str) -> str:
    with pytest.raises(LabError) as caught:
        pulled(text)
    return str(caught.value)


def test_a_repo_alone_lists_its_models(vision: LoopbackHub) -> None:
    error = refused_name(f"hf:{VISION}")
    assert f"{VISION} has 7 models" in error
    assert f"hf:{VISION}:Q4_K_M, 0.00 GB: fits into the free memory" in error
    assert f"hf:{VISION}:UD-Q4_K_XL, 3 parts, 0.00 GB: more than the free memory" in error
    for name in ("mmproj", "imatrix", "mtp", "lora", "README"):
        assert name not in error
    assert f"{VISION} has no file with quantization F16" in refused_name(f"hf:{VISION}:F16")
    pulled(f"hf:{VISION}:Q4_K_M")
    assert f"{VISION} has 7 models" in refused_name(f"hf:{VISION}")


def test_what_a_name_means_does_not_depend_on_the_cache(vision: LoopbackHub) -> None:
    vision.repos["org/ud"] = Repo({"m-UD-Q4_K_M.gguf": b"GGUFm-UD-Q4_K_M.gguf"})
    pulled("hf:org/ud:UD-Q4_K_M")
    spec = catalog.parse("hf:org/ud:Q4_K_M")
    assert obtain.locate(spec) is None
    assert obtain.remove(spec) == 0
    assert "no file with quantization Q4_K_M" in refused_name("hf:org/ud:Q4_K_M")
    assert obtain.locate(catalog.parse("hf:org/ud:UD-Q4_K_M"))
    two = {name: b"GGUF" + name.encode() for name in ("a-Q4_0.gguf", "b-Q4_0.gguf")}
    vision.repos["org/two"] = Repo(two)
    pulled("hf:org/two/a-Q4_0.gguf")
    error = refused_name("hf:org/two:Q4_0")
    assert "names 2 models" in error or "has 2 models" in error
    assert "hf:org/two/a-Q4_0.gguf, 0.00 GB" in error
    assert "hf:org/two/b-Q4_0.gguf, 0.00 GB" in error
    with pytest.raises(LabError, match="2 models"):
        obtain.remove(catalog.parse("hf:org/two:Q4_0"))
    assert obtain.locate(catalog.parse("hf:org/two/a-Q4_0.gguf"))


def test_a_repo_without_a_model_file(vision: LoopbackHub) -> None:
    vision.repos["org/original"] = Repo({"model.safetensors": b"x"})
    vision.repos["org/only"] = Repo({"mmproj-F16.gguf": b"x"})
    assert "GGUF in its name" in refused_name("org/original")
    assert "It has: mmproj-F16.gguf" in refused_name("hf:org/only:F16")


def test_a_name_that_is_neither_a_path_nor_on_the_hub(server: LoopbackHub) -> None:
    error = refused_name("no/such/file.gguf")
    assert "There is no file no/such/file.gguf on this machine, nor on the hub" in error
    assert "The hub has no repo no/such" in error


def test_remove_frees_the_bytes_and_all_names(server: LoopbackHub) -> None:
    from huggingface_hub import scan_cache_dir

    assert hub.remove(REMOTE) == 0
    neighbour = HubFile(REPO, "Tiny-Q8_0.gguf")
    hub.pull(REMOTE)
    hub.pull(neighbour)
    assert hub.remove(REMOTE) == len(DATA)
    assert hub.cached(REMOTE) is None
    assert hub.cached(neighbour)
    assert hub.remove(REMOTE) == 0
    scanned = scan_cache_dir(hub._root())
    assert not scanned.warnings
    assert scanned.size_on_disk == 36
