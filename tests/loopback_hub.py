"""A local hub that speaks what huggingface_hub's real client needs, and fails on demand.

Two servers, since the real hub redirects large files to another origin: the hub answers the API and `resolve` with
the announcing headers, the CDN gives bytes by Range. Every answer is logged with the bytes that went out.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

CHUNK = 32 * 1024


@dataclass(frozen=True)
class Served:
    """One answer: `start` is the first byte of the file that was asked for, `n_bytes` what was sent of it."""

    kind: str
    method: str
    path: str
    status: int
    start: int = 0
    n_bytes: int = 0
    authorization: str | None = None


@dataclass
class Repo:
    """A repo with one revision, which branches and tags name."""

    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    refs: tuple[str, ...] = ("main",)
    gated: bool = False
    lfs: bool = True
    says_size: bool = True

    def etag(self, file: str) -> str:
        """The sha256 of a large file, git's own sum of a small one."""
        data = self.files[file]
        if self.lfs:
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Faults:
    """What goes wrong. The queues are used up, one entry by one request; the rest lasts."""

    cuts: deque[int] = field(default_factory=deque)
    """Bytes of the answer after which the CDN closes the connection."""
    statuses: dict[str, deque[int]] = field(default_factory=dict)
    """Statuses to answer with, by kind of request: `api`, `head`, `cdn`."""
    always: dict[str, int] = field(default_factory=dict)
    """A status to answer every request of a kind with."""
    reset: bool = False
    """A cut is a TCP reset, not an end of the stream."""
    headers: dict[str, str] = field(default_factory=dict)
    """Added to answers that are errors."""
    wrong_bytes: bool = False
    too_long: bool = False
    ignores_range: bool = False
    stall_s: float = 0
    """A pause in the middle of the next answer of the CDN."""
    chunk_s: float = 0
    """A pause before every chunk of CHUNK bytes."""


class LoopbackHub:
    """The hub's state; `faults` may be changed while it runs."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.faults = Faults()
        self.log: list[Served] = []
        self.in_flight: set[int] = set()
        self.hub = _server(_HubHandler, self)
        self.cdn = _server(_CdnHandler, self)
        self.endpoint = f"http://127.0.0.1:{self.hub.server_port}"

    def close(self) -> None:
        for server in (self.hub, self.cdn):
            server.shutdown()
            server.server_close()

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first byte, bytes sent) of every answer of the CDN that gave some, when the last one has ended."""
        deadline = time.monotonic() + 5
        while self.in_flight and time.monotonic() < deadline:
            time.sleep(0.005)
        return [(it.start, it.n_bytes) for it in self.log if it.kind == "cdn" and it.n_bytes]

    @property
    def n_bytes(self) -> int:
        """All bytes of files that went out."""
        return sum(n_bytes for _, n_bytes in self.pieces)

    def count(self, kind: str) -> int:
        return sum(it.kind == kind for it in self.log)


def set_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Put the hub's cache under `home`: for commands by the environment, here where the library has read it already."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))


def set_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let `endpoint` be the hub, for commands and here."""
    from huggingface_hub import constants

    for name, value in {
        "HF_ENDPOINT": endpoint,
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }.items():
        monkeypatch.setenv(name, value)  # with telemetry it asks for a list of agents to put in a header
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def running() -> Iterator[LoopbackHub]:
    """A hub for the time of a `with` block."""
    hub = LoopbackHub()
    try:
        yield hub
    finally:
        hub.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ClassVar[LoopbackHub]

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def note(self, kind: str, status: int, start: int = 0, n_bytes: int = 0) -> None:
        entry = Served(kind, self.command, self.path, status, start, n_bytes, self.headers.get("Authorization"))
        self.state.log.append(entry)

    def answer(self, kind: str, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.note(kind, status)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, kind: str, status: int, code: str = "", message: str = "") -> None:
        headers = {"X-Error-Message": message or f"status {status}", **self.state.faults.headers}
        self.answer(kind, status, {**headers, **({"X-Error-Code": code} if code else {})})

    def failed(self, kind: str) -> bool:
        """Whether a programmed status was the answer."""
        faults = self.state.faults
        queue = faults.statuses.get(kind)
        status = queue.popleft() if queue else faults.always.get(kind)
        if status:
            self.error(kind, status)
        return bool(status)


class _HubHandler(_Handler):
    def do_HEAD(self) -> None:
        self.resolve("head")

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path.startswith("/api/"):
            if not self.failed("api"):
                self.api([unquote(part) for part in url.path.split("/")[2:]], parse_qs(url.query))
        else:
            self.resolve("get")

    def json(self, value: Any) -> None:
        self.answer("api", 200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def api(self, parts: list[str], query: dict[str, list[str]]) -> None:
        if parts == ["models"]:
            owner = query["author"][0] + "/"
            self.json([{"id": name} for name in self.state.repos if name.startswith(owner)])
            return
        repo = self.known("api", "/".join(parts[1:3]), parts[4] if parts[3:4] == ["revision"] else None)
        if repo is None:
            return
        if parts[3:4] == ["refs"]:
            refs = [{"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": repo.commit} for ref in repo.refs]
            self.json({"branches": refs, "tags": [], "converts": []})
        else:
            self.json({"id": "/".join(parts[1:3]), "siblings": [{"rfilename": name} for name in repo.files]})

    def known(self, kind: str, name: str, revision: str | None) -> Repo | None:
        """The repo, or None when the answer was an error already."""
        repo = self.state.repos.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.state.tokens:
            self.error(kind, 401, message="Invalid credentials in Authorization header")
        elif repo is None:
            self.error(kind, 404, "RepoNotFound") if token else self.error(kind, 401)
        elif repo.gated and kind != "api" and not token:
            self.error(kind, 401, "GatedRepo", "Access to this model is restricted.")
        elif repo.gated and kind != "api" and token != "licensed":
            self.error(kind, 403, "GatedRepo", "Access to this model is restricted.")
        elif revision not in (None, repo.commit, *repo.refs):
            self.error(kind, 404, "RevisionNotFound", "Invalid rev id")
        else:
            return repo
        return None

    def resolve(self, kind: str) -> None:
        if self.failed(kind):
            return
        name, _, rest = self.path.lstrip("/").partition("/resolve/")
        if name in self.state.moved:
            self.answer(kind, 307, {"Location": f"/{self.state.moved[name]}/resolve/{rest}"})
            return
        revision, _, file = (unquote(part) for part in rest.partition("/"))
        repo = self.known(kind, name, revision)
        if repo is None:
            return
        if file not in repo.files:
            self.error(kind, 404, "EntryNotFound", "Entry not found")
            return
        size, etag = len(repo.files[file]), repo.etag(file)
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if repo.lfs:
            location = f"http://localhost:{self.state.cdn.server_port}/{name}/{etag}?signed=yes"
            linked = {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag}"', "Location": location}
            if not repo.says_size:
                del linked["X-Linked-Size"]
            self.answer(kind, 302, {**headers, **linked})
        else:
            self.answer(kind, 200, headers, repo.files[file])


class _CdnHandler(_Handler):
    def do_GET(self) -> None:
        if self.failed("cdn"):
            return
        name, _, etag = urlsplit(self.path).path.lstrip("/").rpartition("/")
        repo = self.state.repos[name]
        data = next(data for file, data in repo.files.items() if repo.etag(file) == etag)
        faults = self.state.faults
        if faults.wrong_bytes:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if faults.too_long:
            data += bytes(10 * CHUNK)
        asked = "" if faults.ignores_range else self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if start and start >= len(data):
            self.answer("cdn", 416, {"Content-Range": f"bytes */{len(data)}"})
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        self.state.in_flight.add(id(self))
        try:
            self.give(data, start, faults)
        finally:
            self.state.in_flight.discard(id(self))

    def give(self, data: bytes, start: int, faults: Faults) -> None:
        cut = faults.cuts.popleft() if faults.cuts else None
        end = len(data) if cut is None else min(len(data), start + cut)
        sent = start
        try:
            while sent < end:
                time.sleep(faults.chunk_s)
                piece = data[sent : min(end, sent + CHUNK)]
                self.wfile.write(piece)
                sent += len(piece)
                stall_s, faults.stall_s = faults.stall_s, 0
                time.sleep(stall_s)
        except OSError:
            self.close_connection = True  # the client has gone
        self.note("cdn", 206 if start else 200, start, sent - start)
        if cut is not None:
            if faults.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                socket.close(self.connection.detach())  # at once: the server would end the stream first
            else:
                self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests."""


def _server(handler: type[_Handler], state: LoopbackHub) -> ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), type(handler.__name__, (handler,), {"state": state}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server
