"""How to reach a server, and how secrets are masked in what it sends.

A key comes from an environment variable, by name; further headers and a password in the address may be secret too. None
of them is in the repr of an Access, and every string that a server sends passes `masked` or `hidden` before anything
else sees it.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import socket
import string
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import responses
from itertools import groupby
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from lab.core.request import CHAT
from lab.endpoints.formats import error_in
from lab.endpoints.send_plan import TIMEOUT_S
from lab.errors import LabError, printable

ANSWER_S = 30.0
"""How long a question that generates nothing may take."""

GREETING_S = 2.0
LONGEST_S = 86_400.0
"""The longest time after which a request can be asked to be given up."""

MOST_ANSWER_BYTES = 10_000_000
"""Bytes of such an answer that are read."""

PIECE = 8
"""Characters of a secret in a row that are masked. A shorter secret is masked as a whole; below 4 characters it is not
masked."""

_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_NO_SECRETS = {"bearer", "basic", "token", "application/json"}
_INTERFACES = ("/chat/completions", "/completions")


@dataclass(frozen=True)
class Access:
    """The address of a server and the credentials for it."""

    url: str  # without user, password, query, such as http://127.0.0.1:8080/v1
    api_key_env: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    credentials: str | None = field(default=None, repr=False)  # user:password
    timeout_s: float = TIMEOUT_S  # after which a request that generates is given up

    @property
    def root(self) -> str:
        """The address without /v1, where servers have what OpenAI does not."""
        return self.url.removesuffix("/v1")

    def interface(self, api: str) -> str:
        """Where requests for chats, or for completions, go."""
        return f"{self.url}/{'chat/completions' if api == CHAT else 'completions'}"


@dataclass(frozen=True)
class JsonReply:
    """A server's answer that is not streamed: `parsed` is None unless it is a JSON object.

    `raw` is `parsed` with its secrets: it is only sent back to the server, never shown.
    """

    status: int | None  # None: there was none
    parsed: dict[str, Any] | None
    error: str | None  # why it is None: the status, and the first words of the body
    raw: dict[str, Any] | None = field(default=None, repr=False)


def access(
    url: str, api_key_env: str | None = None, headers: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> Access:
    """How to reach `url`. `headers` are written NAME: VALUE; a request is given up after `timeout_s` seconds.

    Raises LabError for an invalid address, header or time, and for a variable that is not set. None of these messages
    holds a secret.
    """
    if not 0.1 <= timeout_s <= LONGEST_S:  # also for NaN
        raise LabError(f"--timeout {timeout_s:g} is not possible.", f"Give a number from 0.1 to {LONGEST_S:,g}.")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, _ = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:  # UnicodeError is one too
        host = ""
    if (
        not host
        or parts.scheme not in ("http", "https")
        or re.search(r"\s", url)
        or printable(url) != url
        or not parts.path.isascii()
    ):
        raise LabError("That is not the address of a server.", "Write it as http://HOST:PORT/v1.")
    path = parts.path.rstrip("/")
    for interface in _INTERFACES:
        path = path.removesuffix(interface)
    address = f"[{host}]" if ":" in host else host
    port = f":{parts.port}" if parts.port else ""
    clean = urlunsplit((parts.scheme, address + port, path or "/v1", "", ""))
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if not (user + password).isprintable():
        raise LabError("The user or password in the address has control characters.", "Write it without them.")
    credentials = f"{user}:{password}" if user or password else None
    asked = Access(clean, api_key_env, tuple(_header(header) for header in headers), credentials, timeout_s)
    key(asked)
    return asked


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not colon or not name.replace("-", "").replace("_", "").isalnum() or not (name + value).isascii():
        raise LabError("A header is not written as NAME: VALUE.", "For instance --header 'X-Team: lab'.")
    if not value.isprintable():
        raise LabError(f"The header {name} has a value with control characters.", "Write it without them.")
    return name, value


def key(asked: Access) -> str | None:
    """The key, from the environment. LabError where the variable is not set, or holds what cannot be sent."""
    if asked.api_key_env is None:
        return None
    value = os.environ.get(asked.api_key_env, "").strip()
    if not value:
        raise LabError(f"The environment variable {asked.api_key_env} is not set.", "Put the key of the server there.")
    if not value.isascii() or not value.isprintable():
        raise LabError(
            f"The key in {asked.api_key_env} has characters that HTTP cannot send.", "Set it again, as one line."
        )
    return value


def all_headers(asked: Access) -> list[tuple[str, str]]:
    """The headers that let a request in, and those of the user."""
    headers = list(asked.headers)
    names = {name.lower() for name, _ in headers}
    if "authorization" not in names and (value := key(asked)):
        headers.append(("Authorization", f"Bearer {value}"))
    elif "authorization" not in names and asked.credentials:
        headers.append(("Authorization", f"Basic {_base64(asked.credentials)}"))
    return headers


def masked(text: str, asked: Access) -> str:
    """`text` with *** in place of every secret of `asked`, and of every PIECE characters of one.

    In upper or lower case, as it is, as JSON or a URL writes it, or as a part of something in base64.
    """
    values = [part for _, value in all_headers(asked) for part in re.split(r"[\s=;,]+", value)]
    credentials = asked.credentials or ""
    pieces = _pieces((*values, key(asked) or "", credentials, *credentials.split(":", 1)))
    plain, covered = text.translate(_LOWER), bytearray(len(text))
    for n, of_length in pieces.items():
        for i in range(len(plain) - n + 1):
            if plain[i : i + n] in of_length:
                covered[i : i + n] = b"*" * n
    if not any(covered):
        return text
    runs = groupby(range(len(text)), key=covered.__getitem__)
    return "".join("***" if is_secret else "".join(text[i] for i in run) for is_secret, run in runs)


@lru_cache(maxsize=8)
def _pieces(secrets: tuple[str, ...]) -> dict[int, set[str]]:
    """What `masked` looks for, in lower case, by its length."""
    pieces: dict[int, set[str]] = {}
    for secret in secrets:
        if len(secret) > 3 and secret.lower() not in _NO_SECRETS:
            for form in _forms(secret):
                n = min(PIECE, len(form))
                pieces.setdefault(n, set()).update(form[i : i + n] for i in range(len(form) - n + 1))
    return pieces


def _forms(secret: str) -> set[str]:
    """How a secret may be written, in lower case."""
    data = secret.encode()
    forms = {secret, json.dumps(secret)[1:-1], quote(secret, safe=""), "".join(f"%{byte:02x}" for byte in data)}
    for n in range(3):  # bytes before it in the same group of three; characters that others share are cut off
        whole = base64.b64encode(bytes(n) + data).decode().rstrip("=")
        inside = whole[(0, 2, 3)[n] : len(whole) if (n + len(data)) % 3 == 0 else -1]
        forms |= {inside, inside.translate(str.maketrans("+/", "-_"))} if len(inside) > 3 else set()
    return {form.translate(_LOWER) for form in forms}


def hidden(text: str, asked: Access) -> str:
    """`masked`, and printable."""
    return printable(masked(text, asked))


def _masked_in(value: Any, asked: Access) -> Any:
    """JSON with every string masked except the names of fields, which are never printed unmasked."""
    if isinstance(value, dict):
        return {name: _masked_in(part, asked) for name, part in value.items()}
    if isinstance(value, list):
        return [_masked_in(part, asked) for part in value]
    return masked(value, asked) if isinstance(value, str) else value


def is_loopback(asked: Access) -> bool:
    """Whether the server is on this machine."""
    host = urlsplit(asked.url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def ask(asked: Access, url: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_S) -> JsonReply:
    """GET `url`, or POST `body` to it, and read a JSON object. Never raises for what a server does."""
    import httpx2

    has_tls = url.startswith("https:")  # else no certificates are loaded, which takes longer than most answers
    timeout_s = min(timeout_s, asked.timeout_s)
    try:
        with (
            httpx2.Client(timeout=timeout_s, headers=all_headers(asked), trust_env=False, verify=has_tls) as client,
            client.stream("GET" if body is None else "POST", url, json=body) as response,
        ):
            text, until = b"", time.monotonic() + timeout_s
            for part in response.iter_bytes():
                text += part
                if time.monotonic() > until:
                    return JsonReply(response.status_code, None, f"no whole answer within {timeout_s:g} s")
                if len(text) > MOST_ANSWER_BYTES:
                    return JsonReply(response.status_code, None, f"more than {MOST_ANSWER_BYTES:,} bytes came")
    except httpx2.TimeoutException:
        return JsonReply(None, None, f"no answer within {timeout_s:g} s")
    except (httpx2.RemoteProtocolError, httpx2.ReadError):
        return JsonReply(None, None, hidden(_not_http(url), asked))
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as problem:
        return JsonReply(None, None, hidden(str(problem), asked) or type(problem).__name__)
    headers = {name: value for name, value in response.headers.items() if name != "content-encoding"}  # it is undone
    return read_json(text, response.status_code, headers, asked)


def _not_http(url: str) -> str:
    """What a program says that does not answer as HTTP wants it."""
    parts, begin = urlsplit(url), b""
    with suppress(OSError), socket.create_connection((parts.hostname or "", parts.port or 80), GREETING_S) as peer:
        peer.settimeout(GREETING_S)
        peer.sendall(b"GET / HTTP/1.0\r\n\r\n")
        begin = peer.recv(100)
    if begin.startswith(b"\x15\x03"):  # an alert
        return "what answers there speaks TLS, and the address begins with http://"
    if not begin:
        return "the connection ended without an answer"
    return f'what answers there does not speak HTTP: it began with "{begin.decode("latin-1").strip()}"'


def read_json(text: bytes, status: int, headers: Mapping[str, str], asked: Access) -> JsonReply:
    """The JSON object in `text`, or the reason why it has none. The names of `headers` are in lower case."""
    try:
        raw = json.loads(text)
        parsed = _masked_in(raw, asked)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raw = parsed = None
    words = error_in(parsed) if parsed is not None else _first_words(text, headers)
    if status in (401, 403):  # servers quote the key
        words = "the server does not let this key in" if asked.api_key_env else "the server wants a key"
    if status == 200:
        return JsonReply(status, parsed, hidden(words, asked)[:300] if words else None, raw)
    named = {"location": "to", "retry-after": "Retry-After:"}
    further = "".join(f", {word} {headers[name]}" for name, word in named.items() if name in headers)
    error = f"{status} {responses.get(status, '')}".strip() + further + (f": {words}" if words else "")
    return JsonReply(status, parsed, hidden(error, asked)[:300], raw)


def _first_words(text: bytes, headers: Mapping[str, str]) -> str:
    """The type of a body that is not a JSON object, and how it begins, without the tags of a page."""
    kind = headers.get("content-type", "").partition(";")[0].strip() or "a body without a type"
    if (coding := headers.get("content-encoding", "identity")) != "identity":
        return f"{kind}, compressed though that was not asked for (Content-Encoding: {coding}; switch that off)"
    plain = re.sub(r"(?is)<(script|style)\b.*?</\1>|<[^>]*>", " ", text[:20_000].decode(errors="replace"))
    begin = " ".join(plain.split())[:160]
    return f'{kind}, which begins "{begin}"' if begin else f"{kind}, empty"


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
