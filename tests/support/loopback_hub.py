"""A local hub that speaks what huggingface_hub's real client needs, and fails on demand.

Two servers, since the real hub redirects large files to another origin: the hub answers the API and
`resolve` with the announcing headers, the CDN gives bytes by Range. Every answer is logged with the
bytes that went out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from lab.models.candidates import ListedFile

CHUNK = 32 * 1024

VISION_REPO = (
    ListedFile(".gitattributes", 2_500),
    ListedFile("BF16/Pixie-VL-30B-A3B-BF16-00001-of-00002.gguf", 1_200_000),
    ListedFile("BF16/Pixie-VL-30B-A3B-BF16-00002-of-00002.gguf", 800_000),
    ListedFile("Pixie-VL-30B-A3B-Q4_K_L.gguf", 620_000),
    ListedFile("Pixie-VL-30B-A3B-Q4_K_M.gguf", 600_000),
    ListedFile("Pixie-VL-30B-A3B-Q8_0.gguf", 1_000_000),
    ListedFile("Pixie-VL-30B-A3B-UD-IQ1_M.gguf", 250_000),
    ListedFile("Pixie-VL-30B-A3B-UD-Q4_K_M.gguf", 610_000),
    ListedFile("Pixie-VL-30B-A3B-lora-F16.gguf", 9_000),
    ListedFile("README.md", 9_000),
    ListedFile("UD-Q4_K_XL/x-00001-of-00003.gguf", 300_000),
    ListedFile("UD-Q4_K_XL/x-00002-of-00003.gguf", 300_000),
    ListedFile("UD-Q4_K_XL/x-00003-of-00003.gguf", 50_000),
    ListedFile("config.json", 1_000),
    ListedFile("imatrix-Q4_K_M.gguf", 5_000),
    ListedFile("imatrix_unsloth.dat", 5_000),
    ListedFile("mmproj-BF16.gguf", 80_000),
    ListedFile("mmproj-F16.gguf", 80_000),
    ListedFile("mtp-Pixie-VL-30B-A3B-Q8_0.gguf", 40_000),
)
"""The listing of a model that sees pictures, in the manner of repos of 2026; small sizes."""


@dataclass
class Repo:
    """A repo with one revision, which branches name."""

    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    refs: tuple[str, ...] = ("main",)
    gated: bool = False
    announced: str | None = None  # instead of the true sum
    announced_bytes: int | str | None = None  # instead of the true size
    location: str | None = None  # instead of the CDN's address

    def etag(self, file: str) -> str:
        return self.announced or hashlib.sha256(self.files[file]).hexdigest()


@dataclass
class LoopbackHub:
    """The hub's state, which may be changed while it runs.

    `statuses`: an error for every request of a kind: api, head, cdn; `bare_statuses`: without the
    hub's headers. `ignores_ranges`: the CDN sends whole files. `page`: sent instead of every
    answer of the hub. `cut_at`: bytes after which the CDN closes the connection, once. `chunk`
    bytes are sent at once, after a pause of `chunk_s`. `is_endless`: neither the list of files nor
    a file ends. `log`: kind and Authorization of every request. `n_bytes`: sent by the CDN.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(default_factory=dict)
    bare_statuses: dict[str, int] = field(default_factory=dict)
    ignores_ranges: bool = False
    page: bytes = b""
    wrong_bytes: bool = False
    cut_at: int = 0
    chunk: int = CHUNK
    chunk_s: float = 0
    is_endless: bool = False
    log: list[tuple[str, str | None]] = field(default_factory=list)
    n_bytes: int = 0
    endpoint: str = ""
    cdn: str = ""


@contextmanager
def running() -> Iterator[LoopbackHub]:
    """A hub for the time of a `with` block."""
    state = LoopbackHub()
    hub = _start(_HubHandler, state)
    cdn = _start(_CdnHandler, state)
    state.endpoint = f"http://127.0.0.1:{hub.server_port}"
    state.cdn = f"http://localhost:{cdn.server_port}"
    try:
        yield state
    finally:
        for server in (hub, cdn):
            server.shutdown()
            server.server_close()


def _start(handler: type[_Handler], state: LoopbackHub) -> _Server:
    with_state = type(handler.__name__, (handler,), {"state": state})
    server = _Server(("127.0.0.1", 0), with_state)
    serve = {"poll_interval": 0.02}
    threading.Thread(
        target=server.serve_forever,
        kwargs=serve,
        daemon=True,
    ).start()
    return server


def set_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Put the hub's cache under `home`: for commands, and here where it was read already."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))


def set_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let `endpoint` be the hub, for commands and here."""
    from huggingface_hub import constants

    variables = {
        "HF_ENDPOINT": endpoint,
        "NO_PROXY": "127.0.0.1,localhost",
        # With telemetry it asks for a list of agents to put in a header.
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    url = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ClassVar[LoopbackHub]

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def answer(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(
        self,
        status: int,
        code: str = "",
        message: str = "",
    ) -> None:
        headers = {
            "X-Error-Message": message or f"status {status}",
            "X-Error-Code": code,
        }
        self.answer(status, headers)

    def is_answered(self, kind: str) -> bool:
        """Whether a programmed answer was given."""
        self.state.log.append((kind, self.headers.get("Authorization")))
        status = self.state.statuses.get(kind)
        if status:
            self.error(status)
            return True
        if kind in self.state.bare_statuses:
            self.answer(self.state.bare_statuses[kind], {})
            return True
        if self.state.page and kind != "cdn":
            self.answer(200, {}, self.state.page)
            return True
        return False

    def send_endlessly(self, part: bytes) -> None:
        """Send the part until the client goes away."""
        try:
            for _ in itertools.count():
                self.wfile.write(part)
                self.state.n_bytes += len(part)
        except OSError:
            self.close_connection = True


class _HubHandler(_Handler):
    def do_HEAD(self) -> None:
        if self.is_answered("head"):
            return
        name, _, revision_and_file = self.path.lstrip("/").partition("/resolve/")
        revision, _, file = revision_and_file.partition("/")
        file = unquote(file)
        repo = self.repo(name, unquote(revision))
        if repo is None:
            return
        if file not in repo.files:
            self.error(404, "EntryNotFound")
            return
        n_bytes = repo.announced_bytes
        if n_bytes is None:
            n_bytes = len(repo.files[file])
        etag = f'"{repo.etag(file)}"'
        headers = {
            "X-Repo-Commit": repo.commit,
            "ETag": etag,
            "X-Linked-Size": str(n_bytes),
            "X-Linked-Etag": etag,
            "Location": repo.location or f"{self.state.cdn}/{name}/{file}",
            "Content-Length": "0",
        }
        self.answer(302, headers)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if "/resolve/" in path:
            self.do_HEAD()
        elif not self.is_answered("api"):
            self.list_files(path)

    def list_files(self, path: str) -> None:
        """The answer to /api/models/OWNER/NAME or /api/models/OWNER/NAME/revision/REVISION."""
        _, _, owner, name, *revision_part = path.strip("/").split("/")
        revision = unquote(revision_part[1]) if revision_part else "main"
        repo = self.repo(f"{owner}/{name}", revision)
        if repo is None:
            return
        if self.state.is_endless:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"id": "owner/name", "siblings": [')
            self.send_endlessly(b'{"rfilename": "a.gguf"},' * 1000)
            return
        siblings = [
            {"rfilename": file, "size": len(data)} for file, data in repo.files.items()
        ]
        listed = {"id": f"{owner}/{name}", "siblings": siblings}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(listed).encode())

    def repo(
        self,
        name: str,
        revision: str,
    ) -> Repo | None:
        """The repo, or None when the answer was an error already."""
        repo = self.state.repos.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.state.tokens:
            self.error(401, message="Invalid credentials in Authorization header")
        elif repo is None and token:
            self.error(404, "RepoNotFound")
        elif repo is None:
            self.error(401)
        elif repo.gated and token != "licensed":
            status = 403 if token else 401
            self.error(status, "GatedRepo", "Access to this model is restricted.")
        elif revision not in (repo.commit, *repo.refs):
            self.error(404, "RevisionNotFound", "Invalid rev id")
        else:
            return repo
        return None


class _CdnHandler(_Handler):
    def do_GET(self) -> None:
        if self.is_answered("cdn"):
            return
        owner, name, file = unquote(self.path).lstrip("/").split("/", 2)
        data = self.state.repos[f"{owner}/{name}"].files[file]
        if self.state.wrong_bytes:
            data = data[:-1] + b"?"
        if self.state.is_endless:
            self.send_response(200)
            self.end_headers()
            self.send_endlessly(data)
            return
        self.send_range(data)

    def send_range(self, data: bytes) -> None:
        """Answer with the range that is asked for, cut off and slowed down as programmed."""
        asked = (self.headers.get("Range") or "").removeprefix("bytes=")
        if self.state.ignores_ranges:
            asked = ""
        first, _, last = asked.partition("-")
        start = int(first or 0)
        stop = int(last) + 1 if last else len(data)
        body = data[start:stop]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        if asked:
            end = start + len(body) - 1
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.end_headers()
        sent = body
        if self.state.cut_at:
            sent = body[: max(0, self.state.cut_at - start)]
        self.state.cut_at = 0
        try:
            for i in range(0, len(sent), self.state.chunk):
                time.sleep(self.state.chunk_s)
                chunk = sent[i : i + self.state.chunk]
                self.wfile.write(chunk)
                self.state.n_bytes += len(chunk)
        except OSError:
            self.close_connection = True  # the client has gone
        if len(sent) < len(body):
            self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(
        self,
        request: object,
        client_address: object,
    ) -> None:
        """A client that goes away is part of the tests."""
