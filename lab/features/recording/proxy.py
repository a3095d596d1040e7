"""The proxy between a client and a server: it passes every byte on as it comes, and keeps a copy of
those that are about a prompt.

It is built on aiohttp, an HTTP library with a server and a client in one event loop whose parser is
compiled: the library of the base (httpx2) has no server, and its client needs more than the
millisecond that a proxy may add. Bodies stay compressed as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from lab.core.request import LOST, REFUSED
from lab.errors import LabError
from lab.features.recording.prompts import has_prompt
from lab.remote.exchange import DATE

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from aiohttp.web import AppRunner, BaseRequest, StreamResponse

HUNG_UP = "client hung up"
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"),
    *("transfer-encoding", "host", "expect"),
}
"""Headers of a connection, which are not passed on. What a client expects before it sends its body
(100 Continue) the proxy answers itself."""

ADDED_BY_LIBRARY = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
MOST_HEADER = 1 << 20
MOST_KEPT = 64 << 20  # bytes of a body that are copied
CONNECT_S = 10.0
GRACE_S = 1.0  # for requests in flight at the end
SENT = "headers of the server"
VERSION = "/v1"

# A connection that is used again may have been closed by the server just then, and a POST on it is
# lost: over plain HTTP, where a new one costs little, each request has a connection of its own.

Headers = Iterable[tuple[bytes, bytes]]


@dataclass
class ProxiedCall:
    """A request and its answer as they passed through the proxy; their bytes are kept if it has a
    prompt. Times are time.perf_counter_ns()."""

    path: str
    has_prompt: bool
    started_at: str
    received_ns: int
    authorization: str | None = field(default=None, repr=False)
    request: bytearray = field(default_factory=bytearray, repr=False)
    answer: bytearray = field(default_factory=bytearray, repr=False)
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """When bytes of the answer came, and how many had come then."""
    status: int | None = None
    encoding: str = ""
    content_type: str = ""
    request_encoding: str = ""
    server: str = ""
    ended_ns: int = 0
    failure: str | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the server says that it answers the request."""
        return self.status == HTTPStatus.OK

    def keep(self, data: bytes) -> None:
        """Keep bytes of the answer, with the time."""
        if not self.has_prompt:
            return
        now = time.perf_counter_ns()
        if len(self.answer) < MOST_KEPT:
            self.answer += data
        self.arrivals.append((now, len(self.answer)))

    def pieces(self) -> list[tuple[int, bytes]]:
        """The bytes of the answer as they came."""
        pieces = []
        begin = 0
        for now, end in self.arrivals:
            pieces.append((now, bytes(self.answer[begin:end])))
            begin = end
        return pieces


Keep = Callable[[ProxiedCall], None]


class Proxy:
    """Listens on `host` and `port` (0: a free one), and sends all to `root`, except that /v1 stands
    for `base`: the interface of some servers is elsewhere.

        async with Proxy("http://127.0.0.1:8080", "127.0.0.1", 8090, keep) as proxy:
            ...

    Calls `keep` with each call that has a prompt when it has ended.
    """

    def __init__(
        self, root: str, host: str, port: int, keep: Keep, base: str | None = None
    ) -> None:
        self.root = root
        self._base = base or f"{root}{VERSION}"
        self.host = host
        self.port = port
        self._keep = keep
        self._session: ClientSession | None = None
        self._runner: AppRunner | None = None

    async def __aenter__(self) -> Proxy:
        from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web

        self._session = ClientSession(
            auto_decompress=False,
            cookie_jar=DummyCookieJar(),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=TCPConnector(limit=0, force_close=self.root.startswith("http:")),
            skip_auto_headers=ADDED_BY_LIBRARY,
            max_line_size=MOST_HEADER,
            max_field_size=MOST_HEADER,
        )
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        application.on_response_prepare.append(without_added_headers)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            max_line_size=MOST_HEADER,
            max_field_size=MOST_HEADER,
            shutdown_timeout=GRACE_S,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError as problem:
            await self._close()
            raise LabError(
                f"{self.host}:{self.port} cannot be listened on: {problem.strerror}.",
                "Choose another --port, or 0 for a free one.",
            ) from None
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._runner:
            await self._runner.cleanup()
        if self._session:
            await self._session.close()

    async def _handle(self, request: BaseRequest) -> StreamResponse:
        """Pass one request on, and its answer back."""
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return no_websocket(request)
        call = call_of(request)
        try:
            return await self._pass_on(request, call)
        except asyncio.CancelledError:
            call.failure = HUNG_UP
            raise
        finally:
            call.ended_ns = time.perf_counter_ns()
            if call.has_prompt:
                self._keep(call)

    async def _pass_on(self, request: BaseRequest, call: ProxiedCall) -> StreamResponse:
        from aiohttp import ClientConnectorError, ClientError, ServerTimeoutError
        from yarl import URL

        assert self._session is not None
        path = path_of(request)
        address = f"{self.root}{path}"
        if path.startswith(f"{VERSION}/"):
            address = f"{self._base}{path.removeprefix(VERSION)}"
        body: object = None
        if request.body_exists:
            body = await whole_or_stream(request, call)
        response: StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                URL(address, encoded=True),
                headers=passed_on(request.raw_headers),
                data=body,
                allow_redirects=False,
            ) as answer:
                response = await begin_response(request, answer, call)
                async for data in answer.content.iter_any():
                    call.keep(data)
                    await response.write(data)
                await response.write_eof()
        except ConnectionResetError:  # by the client
            call.failure = HUNG_UP
        except (ClientConnectorError, ServerTimeoutError) as problem:  # while connecting
            call.failure = REFUSED
            return no_answer(self.root, problem)
        except (ClientError, OSError):
            call.failure = LOST
            abort(request)  # so that the client sees what it would see without the proxy
        return response or no_answer(self.root, None)


def path_of(request: BaseRequest) -> str:
    """The path of a request for the server: a client that adds /v1 to an address with one doubles
    it."""
    path = request.raw_path
    return path.removeprefix(VERSION) if path.startswith(f"{VERSION}{VERSION}/") else path


def call_of(request: BaseRequest) -> ProxiedCall:
    """The beginning of the record of a request."""
    path = path_of(request)
    return ProxiedCall(
        path=path,
        has_prompt=has_prompt(request.method, path),
        started_at=datetime.now(UTC).strftime(DATE),
        received_ns=time.perf_counter_ns(),
        authorization=request.headers.get("Authorization"),
        request_encoding=request.headers.get("Content-Encoding", ""),
    )


async def whole_or_stream(request: BaseRequest, call: ProxiedCall) -> object:
    """The body of a request: as a whole if it has arrived, else as a stream."""
    first = await request.content.readany()
    call.request += first
    if request.content.at_eof() and request.headers.get("Transfer-Encoding") is None:
        return bytes(first)
    return all_pieces(first, request, call)


async def all_pieces(
    first: bytes, request: BaseRequest, call: ProxiedCall
) -> AsyncIterator[bytes]:
    """The pieces of a body as they come; keeps a copy."""
    yield first
    async for piece in request.content.iter_any():
        if call.has_prompt and len(call.request) < MOST_KEPT:
            call.request += piece
        yield piece


def passed_on(headers: Headers) -> list[tuple[str, str]]:
    """Headers as they came, without those of the connection."""
    pairs = []
    for name_bytes, value in headers:
        name = name_bytes.decode("latin-1")
        if name.lower() not in HOP_BY_HOP:
            pairs.append((name, value.decode("utf-8", "surrogateescape")))
    return pairs


async def begin_response(
    request: BaseRequest, answer: ClientResponse, call: ProxiedCall
) -> StreamResponse:
    """Send the status and the headers of an answer to the client."""
    from aiohttp import web

    call.status = answer.status
    call.encoding = answer.headers.get("Content-Encoding", "").lower()
    call.content_type = answer.headers.get("Content-Type", "")
    call.server = answer.headers.get("Server", "")
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in passed_on(answer.raw_headers):
        response.headers.add(name, value)
    response[SENT] = {str(name).lower() for name in answer.headers}
    await response.prepare(request)
    return response


async def without_added_headers(_: BaseRequest, response: StreamResponse) -> None:
    """Remove what the library adds to a server's headers."""
    sent = response.get(SENT)
    if sent is None:
        return
    for name in ("Date", "Server", "Content-Type"):
        if name.lower() not in sent:
            response.headers.popall(name, None)


def no_answer(root: str, problem: BaseException | None) -> StreamResponse:
    """What the client gets where the server cannot be reached."""
    reason = f" ({type(problem).__name__})" if problem else ""
    return refusal(502, "upstream_unreachable", f"lab record: {root} does not answer{reason}.")


def no_websocket(request: BaseRequest) -> StreamResponse:
    """What the client gets that asks for a WebSocket: its frames are no requests to record."""
    message = f"lab record passes no WebSocket on: {request.path}"
    return refusal(501, "not_passed_on", message)


def refusal(status: int, kind: str, message: str) -> StreamResponse:
    """An error in the form of OpenAI's."""
    from aiohttp import web

    error = {"message": message, "type": kind, "code": status}
    return web.json_response({"error": error}, status=status)


def abort(request: BaseRequest) -> None:
    """Close the client's connection in the middle of an answer."""
    with suppress(AttributeError):
        if request.transport is not None:
            request.transport.abort()
