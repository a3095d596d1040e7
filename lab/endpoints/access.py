"""How to reach a server, and what nobody may see of it.

A key comes from an environment variable, by name; further headers and a password in the address may be secret too. None
of them is in the repr of an Access, and `hidden` takes them out of every text that came from outside.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from lab.endpoints.fields import error_in
from lab.errors import LabError, printable

ANSWER_S = 30.0
"""How long a question that generates nothing may take."""

MOST_ANSWER_BYTES = 10_000_000
"""Bytes of such an answer that are read."""

_INTERFACES = ("/chat/completions", "/completions")


@dataclass(frozen=True)
class Access:
    """An address and how to be let in."""

    url: str  # without user, password, query, such as http://127.0.0.1:8080/v1
    api_key_env: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    credentials: str | None = field(default=None, repr=False)  # user:password

    @property
    def root(self) -> str:
        """The address without /v1, where servers have what OpenAI does not."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class Answer:
    """What a server answered to a question that is not streamed: `parsed` is None where it is no JSON object."""

    status: int | None  # None: there was none
    parsed: dict[str, Any] | None
    error: str | None  # why there is none, or the message of the server


def access(url: str, api_key_env: str | None = None, headers: Sequence[str] = ()) -> Access:
    """How to reach `url`. `headers` are written NAME: VALUE.

    Raises LabError for what is no address, a variable that is not set, or a header that is none. None of these
    messages holds a secret.
    """
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
    asked = Access(clean, api_key_env, tuple(_header(header) for header in headers), credentials)
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


def hidden(text: str, asked: Access) -> str:
    """`text`, printable, with every secret of `asked` replaced by ***."""
    secrets = [value for _, value in all_headers(asked)] + [key(asked) or ""]
    if asked.credentials:
        user, _, password = asked.credentials.partition(":")
        secrets += [asked.credentials, user, password, _base64(asked.credentials)]
    parts = {part for secret in secrets for part in (secret, *re.split(r"[\s=;,]+", secret))}
    parts -= {"Bearer", "Basic", "Token", "application/json"}
    parts |= {json.dumps(part)[1:-1] for part in parts}
    for secret in sorted(parts, key=len, reverse=True):
        if len(secret) > 3:  # shorter ones are no secrets, and would leave nothing readable
            text = text.replace(secret, "***")
    return printable(text)


def is_loopback(asked: Access) -> bool:
    """Whether the server is on this machine."""
    host = urlsplit(asked.url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def ask(asked: Access, url: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_S) -> Answer:
    """GET `url`, or POST `body` to it, and read a JSON object. Never raises for what a server does."""
    import httpx2

    has_tls = url.startswith("https:")  # else no certificates are loaded, which takes longer than most answers
    try:
        with (
            httpx2.Client(timeout=timeout_s, headers=all_headers(asked), trust_env=False, verify=has_tls) as client,
            client.stream("GET" if body is None else "POST", url, json=body) as response,
        ):
            text, until = b"", time.monotonic() + timeout_s
            for part in response.iter_bytes():
                text += part
                if time.monotonic() > until:
                    return Answer(response.status_code, None, f"no whole answer within {timeout_s:g} s")
                if len(text) > MOST_ANSWER_BYTES:
                    return Answer(response.status_code, None, f"more than {MOST_ANSWER_BYTES:,} bytes came")
    except httpx2.TimeoutException:
        return Answer(None, None, f"no answer within {timeout_s:g} s")
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as problem:
        return Answer(None, None, hidden(str(problem), asked) or type(problem).__name__)
    return Answer(response.status_code, *read(text, response.status_code, asked))


def read(text: bytes, status: int, asked: Access) -> tuple[dict[str, Any] | None, str | None]:
    """The JSON object in `text`, and what it says of an error."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        parsed = None
    error = None if parsed is None else error_in(parsed)
    if status in (401, 403):  # servers quote the key
        error = "the server does not let this key in" if asked.api_key_env else "the server wants a key"
    elif status != 200 and error is None:
        error = hidden(text.decode(errors="replace").strip(), asked)[:200]
    return parsed, None if error is None else hidden(error, asked)[:300]


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
