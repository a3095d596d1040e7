"""The address of a server, the credentials for it, and which of a server's texts may be shown.

The key comes from an environment variable; other headers and a password in the address may be
secret too. The repr of an Access contains none of them. A server may quote them, so of its texts
only those are shown or kept that may be a name, and contain no secret.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from lab.errors import LabError, printable

TIMEOUT_S = 600.0
LONGEST_S = 86_400.0  # maximum of --timeout
PIECE = 6
PIECE_OF_CODE = 8
"""A text with this many letters of a secret in a row is not shown, nor one with this many of a
secret in another code, such as base64."""

LEAST_SECRET = 4  # letters

_NAME = re.compile(r"(?=.*\w)[^<>]{1,200}")
_HEADER = re.compile(r"\s*([A-Za-z0-9_-]+)\s*:\s*([ -~]*?)\s*")
_NO_SECRETS = {"bearer", "basic", "token", "application/json"}


@dataclass(frozen=True)
class Access:
    """The address of a server and the credentials for it."""

    url: str  # without user, password, query, such as http://127.0.0.1:8080/v1
    api_key_env: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    credentials: str | None = field(default=None, repr=False)  # user:password
    timeout_s: float = TIMEOUT_S  # for a request that generates

    @property
    def root(self) -> str:
        """The address without /v1, where servers have their own interfaces."""
        return self.url.removesuffix("/v1")


def access(
    url: str,
    api_key_env: str | None = None,
    headers: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> Access:
    """An Access for `url`. `headers` are written NAME: VALUE; a request times out after `timeout_s`
    seconds.

    LabError for an invalid address, header or time, and for a variable that is not set; no message
    contains a secret.
    """
    if not 0.1 <= timeout_s <= LONGEST_S:  # also for NaN
        raise LabError(
            f"--timeout {timeout_s:g} is not possible.",
            f"Give a number from 0.1 to {LONGEST_S:,g}.",
        )
    parts = _parsed(url)
    user = unquote(parts.username or "")
    password = unquote(parts.password or "")
    credentials = f"{user}:{password}" if user or password else None
    pairs = tuple(_header(text) for text in headers)
    server = Access(_without_secrets(parts), api_key_env, pairs, credentials, timeout_s)
    key(server)
    return server


def _parsed(url: str) -> SplitResult:
    """The parts of an address. LabError for what is no address of an HTTP server."""
    problem = LabError(
        "This is not a valid server address.", "Write it as http://HOST:PORT/v1."
    )
    has_odd_letters = printable(unquote(url)) != unquote(url) or re.search(r"\s", url)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        has_host = bool((parts.hostname or "").encode("idna"))
        _ = parts.port
    except ValueError:  # UnicodeError is one too
        raise problem from None
    is_http = parts.scheme in ("http", "https")
    if has_odd_letters or not has_host or not is_http or not parts.path.isascii():
        raise problem
    return parts


def _without_secrets(parts: SplitResult) -> str:
    """The address with the path of the interface, without user, password and query."""
    host = (parts.hostname or "").encode("idna").decode()
    if ":" in host:  # IPv6
        host = f"[{host}]"
    if parts.port:
        host = f"{host}:{parts.port}"
    path = re.sub(
        r"(/chat)?/completions$|/(models|responses|messages)$", "", parts.path.rstrip("/")
    )
    path = re.sub(r"^(/v1){2,}$", "/v1", path)
    return urlunsplit((parts.scheme, host, path or "/v1", "", ""))


def _header(text: str) -> tuple[str, str]:
    match = _HEADER.fullmatch(text)
    if match is None:
        raise LabError(
            "A header is not of the form NAME: VALUE.",
            "Write, for example, --header 'X-Team: lab'.",
        )
    return match[1], match[2]


def key(server: Access) -> str | None:
    """The key from the environment. LabError if the variable is not set, or HTTP cannot send its
    value."""
    if server.api_key_env is None:
        return None
    value = os.environ.get(server.api_key_env, "").strip()
    if not value:
        raise LabError(
            f"The environment variable {server.api_key_env} is not set.",
            "Set it to the server's key.",
        )
    if not value.isascii() or not value.isprintable():
        raise LabError(
            f"The key in {server.api_key_env} has characters that HTTP cannot send.",
            "Set it again, as one line.",
        )
    return value


def all_headers(server: Access) -> list[tuple[str, str]]:
    """The user's headers and the credentials."""
    headers = list(server.headers)
    names = [name.lower() for name, _ in headers]
    value = key(server)
    if "authorization" in names:
        return headers
    if value:
        headers.append(("Authorization", f"Bearer {value}"))
    elif server.credentials:
        encoded = base64.b64encode(server.credentials.encode()).decode()
        headers.append(("Authorization", f"Basic {encoded}"))
    return headers


def name_or_none(text: object, server: Access) -> str | None:
    """A text from the server if it may be shown: a name, an id or a version, without a secret. None
    otherwise."""
    if not isinstance(text, str) or not text.isprintable() or not _NAME.fullmatch(text):
        return None
    letters = _squeezed(text)
    for secret in _secrets(server):
        word = _squeezed(secret)
        if _has_piece(letters, word, PIECE) or _has_piece(letters, word[::-1], PIECE):
            return None
        if any(_has_piece(letters, code, PIECE_OF_CODE) for code in _codes(secret)):
            return None
    return text


def _squeezed(text: str) -> str:
    """The letters and digits of a text, without accents and what may be put between them."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKD", text).lower())


def _has_piece(text: str, secret: str, n_letters: int) -> bool:
    """Whether a text has that many letters of a secret in a row, or all of a shorter one."""
    for start in range(max(1, len(secret) - n_letters + 1)):
        piece = secret[start : start + n_letters]
        if len(piece) >= LEAST_SECRET and piece in text:
            return True
    return False


def _codes(secret: str) -> list[str]:
    """A secret, in the letters that were sent, as hex, as numbers, and as base64 at each of its
    three offsets without the letters that depend on what stands beside it."""
    data = secret.encode()
    codes = [data.hex(), "".join(map(str, data))]
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + data).decode().rstrip("=")
        codes.append(_squeezed(encoded[offset + 1 if offset else 0 : -1]))
    return codes


def _secrets(server: Access) -> set[str]:
    """The secret words that are sent."""
    texts = [value for _, value in all_headers(server)]
    texts += [key(server) or "", server.credentials or ""]
    for value in list(texts):
        if value.lower().startswith("basic "):
            with suppress(ValueError):  # not base64
                texts.append(
                    base64.b64decode(value[6:], validate=True).decode(errors="ignore")
                )
    secrets: set[str] = set()
    for text in texts:
        secrets.update(re.split(r"[\s=;,:\"']+", text))
    return {
        word
        for word in secrets
        if len(word) >= LEAST_SECRET and word.lower() not in _NO_SECRETS
    }


def is_loopback(server: Access) -> bool:
    """Whether the server is on this machine."""
    host = urlsplit(server.url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
