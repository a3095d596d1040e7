"""A server that answers as it is told to, byte for byte: what real servers, proxies and other
programs do wrong."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Body = bytes | Callable[[dict[str, Any]], Iterator[bytes]]
"""Bytes; or a function of the request that makes the pieces of a stream, at its own pace."""

PAUSE_S = 0.002
STREAM = "text/event-stream"


@dataclass(frozen=True)
class Canned:
    """An answer."""

    body: Body = b""
    status: int = 200
    kind: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class OddServer:
    """A server that runs; what is asked elsewhere is not found."""

    url: str
    answers: dict[str, Canned]
    deciding: Callable[[dict[str, Any]], Canned] | None = None  # how a chat is answered
    has_tokenizer: bool = True
    n_asked: dict[str, int] = field(default_factory=dict)


@contextmanager
def raw_server(answers: Iterable[Iterable[bytes]]) -> Iterator[str]:
    """A server that writes the next of these answers, piece by piece, to whoever asks, and hangs
    up; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def write(peer: socket.socket, pieces: Iterable[bytes]) -> None:
            with peer, suppress(OSError):
                head = b""
                while b"\r\n\r\n" not in head and (data := peer.recv(65_536)):
                    head += data
                for piece in pieces:
                    peer.sendall(piece)

        def serve() -> None:
            with suppress(OSError):
                for pieces in answers:
                    peer, _ = listening.accept()
                    Thread(
                        target=write,
                        args=(peer, pieces),
                        daemon=True,
                    ).start()

        Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def as_json(value: Any) -> Canned:
    return Canned(json.dumps(value).encode())


def event(content: str | None = None, **more: Any) -> bytes:
    """An event of a chat with this content, or with the reason of the end."""
    choice: dict[str, Any] = {
        "delta": {"content": content},
        "finish_reason": None,
    }
    if content is None:
        choice = {"delta": {}, "finish_reason": "length"}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


def stream(*texts: str) -> list[bytes]:
    """A whole answer, of one token for each text."""
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": len(texts),
    }
    return [*(event(text) for text in texts), event(), event(usage=usage), b"data: [DONE]\n\n"]


class _Handler(BaseHTTPRequestHandler):
    """Answers as `running` says; a word is a token."""

    protocol_version = "HTTP/1.1"
    running: OddServer

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        n_bytes = int(self.headers["content-length"])
        asked = json.loads(self.rfile.read(n_bytes) or b"{}")
        running = self.running
        running.n_asked[self.path] = running.n_asked.get(self.path, 0) + 1
        canned = running.answers.get(self.path, Canned(b'{"error": "not found"}', 404))
        if self.path == CHAT_PATH and running.deciding is not None:
            canned = running.deciding(asked)
        if not running.has_tokenizer:
            self._write(canned, asked)
            return
        if self.path == "/tokenize" and "content" in asked:
            canned = as_json({"tokens": asked["content"].split()})
        if self.path == "/apply-template":
            canned = as_json({"prompt": asked["messages"][0]["content"]})
        with suppress(OSError):  # who asked has hung up
            self._write(canned, asked)

    def _write(
        self,
        canned: Canned,
        asked: dict[str, Any],
    ) -> None:
        self.send_response(canned.status)
        self.send_header("content-type", canned.kind)
        for name, value in canned.headers:
            self.send_header(name, value)
        if isinstance(canned.body, bytes):
            self.send_header("content-length", str(len(canned.body)))
            self.end_headers()
            self.wfile.write(canned.body)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in canned.body(asked):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def odd_server(
    answers: Mapping[str, Canned] | None = None,
    model: str = "odd",
    deciding: Callable[[dict[str, Any]], Canned] | None = None,
    has_tokenizer: bool = True,
) -> Iterator[OddServer]:
    """A server with one model, and a tokenizer for which a word is a token. `deciding` has the
    answer of each chat."""

    class Handler(_Handler):
        """Of this server alone."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    models = {"/v1/models": as_json({"data": [{"id": model}]})}
    url = f"http://127.0.0.1:{http.server_port}/v1"
    Handler.running = OddServer(
        url,
        {
            **models,
            **(answers or {}),
        },
        deciding,
        has_tokenizer,
    )
    Thread(
        target=http.serve_forever,
        kwargs={"poll_interval": 0.05},
        daemon=True,
    ).start()
    try:
        yield Handler.running
    finally:
        http.shutdown()
        http.server_close()


def paced(pieces: Sequence[bytes], pause_s: float = PAUSE_S) -> Iterator[bytes]:
    for piece in pieces:
        time.sleep(pause_s)
        yield piece


CHAT_PATH = "/v1/chat/completions"
