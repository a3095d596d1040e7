"""A local hub that speaks what huggingface_hub's real client needs, and fails on demand.

Two servers, since the real hub redirects large files to another origin: the hub answers the API and `resolve` with
the announcing headers, the CDN gives bytes by Range. Every answer is logged with the bytes that went out.
"""

from __future__ import annotations

import hashlib
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

CHUNK = 32 * 1024


@dataclass
class Repo:
    """A repo with one revision, which branches name."""

    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    refs: tuple[str, ...] = ("main",)
    gated: bool = False
    announced: str | None = None  # instead of the true sum

    def etag(self, file: str) -> str:
        return self.announced or hashlib.sha256(self.files[file]).hexdigest()


@dataclass
class LoopbackHub:
    """The hub's state, which may be changed while it runs."""

    repos: dict[str, Repo] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(
        default_factory=dict
    )  # an error for every request of a kind: api, head, cdn
    page: bytes = b""  # sent instead of every answer of the hub
    wrong_bytes: bool = False
    cut_at: int = 0  # bytes after which the CDN closes the connection, once
    chunk_s: float = 0  # a pause before every chunk
    log: list[tuple[str, str | None]] = field(
        default_factory=list
    )  # kind and Authorization of every request
    n_bytes: int = 0  # sent by the CDN
    endpoint: str = ""
    cdn: str = ""


@contextmanager
def running() -> Iterator[LoopbackHub]:
    """A hub for the time of a `with` block."""
    state = LoopbackHub()
    servers = []
    for handler in (_HubHandler, _CdnHandler):
        server = _Server(("127.0.0.1", 0), type(handler.__name__, (handler,), {"state": state}))
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        servers.append(server)
    state.endpoint = f"http://127.0.0.1:{servers[0].server_port}"
    state.cdn = f"http://localhost:{servers[1].server_port}"
    try:
        yield state
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def set_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Put the hub's cache under `home`: for commands by the environment, here where the library has read it already."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))


def set_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let `endpoint` be the hub, for commands and here."""
    from huggingface_hub import constants

    # with telemetry it asks for a list of agents to put in a header
    variables = {
        "HF_ENDPOINT": endpoint,
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ClassVar[LoopbackHub]

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str = "", message: str = "") -> None:
        self.answer(
            status, {"X-Error-Message": message or f"status {status}", "X-Error-Code": code}
        )

    def is_answered(self, kind: str) -> bool:
        """Whether a programmed answer was given."""
        self.state.log.append((kind, self.headers.get("Authorization")))
        if status := self.state.statuses.get(kind):
            self.error(status)
        elif self.state.page and kind != "cdn":
            self.answer(200, {}, self.state.page)
        else:
            return False
        return True


class _HubHandler(_Handler):
    def do_HEAD(self) -> None:
        if self.is_answered("head"):
            return
        name, _, rest = self.path.lstrip("/").partition("/resolve/")
        revision, _, file = (unquote(part) for part in rest.partition("/"))
        if (repo := self.known(name, revision)) is None:
            return
        if file not in repo.files:
            self.error(404, "EntryNotFound")
            return
        size = str(len(repo.files[file]))
        etag = f'"{repo.etag(file)}"'
        linked = {
            "X-Linked-Size": size,
            "X-Linked-Etag": etag,
            "Location": f"{self.state.cdn}/{name}/{file}",
        }
        self.answer(
            302, {"X-Repo-Commit": repo.commit, "ETag": etag, **linked, "Content-Length": "0"}
        )

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if "/resolve/" in path:
            name, _, rest = path.lstrip("/").partition("/resolve/")
            self.answer(200, {}, self.state.repos[name].files[unquote(rest.partition("/")[2])])
        elif not self.is_answered("api"):
            _, _, owner, name, *revision = [unquote(part) for part in path.split("/")[1:]]
            if repo := self.known(f"{owner}/{name}", revision[1] if revision else "main"):
                listed = {
                    "id": f"{owner}/{name}",
                    "siblings": [{"rfilename": file} for file in repo.files],
                }
                self.answer(200, {"Content-Type": "application/json"}, json.dumps(listed).encode())

    def known(self, name: str, revision: str) -> Repo | None:
        """The repo, or None when the answer was an error already."""
        repo = self.state.repos.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.state.tokens:
            self.error(401, message="Invalid credentials in Authorization header")
        elif repo is None:
            self.error(404, "RepoNotFound") if token else self.error(401)
        elif repo.gated and token != "licensed":
            self.error(403 if token else 401, "GatedRepo", "Access to this model is restricted.")
        elif revision not in (repo.commit, *repo.refs):
            self.error(404, "RevisionNotFound", "Invalid rev id")
        else:
            return repo
        return None


class _CdnHandler(_Handler):
    def do_GET(self) -> None:
        if self.is_answered("cdn"):
            return
        owner, name, file = unquote(urlsplit(self.path).path).lstrip("/").split("/", 2)
        data = self.state.repos[f"{owner}/{name}"].files[file]
        if self.state.wrong_bytes:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        n_bytes = len(data)
        last = asked.partition("-")[2]
        data = data[: int(last) + 1] if last else data
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{n_bytes}")
        self.end_headers()
        end = self.state.cut_at or len(data)
        self.state.cut_at = 0
        try:
            for first in range(start, end, CHUNK):
                time.sleep(self.state.chunk_s)
                self.wfile.write(data[first : min(end, first + CHUNK)])
                self.state.n_bytes += min(end, first + CHUNK) - first
        except OSError:
            self.close_connection = True  # the client has gone
        if end < len(data):
            self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests."""
