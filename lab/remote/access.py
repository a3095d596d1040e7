"""Access to a server: its address and credentials, the masking of secrets, single questions, and plans of requests.

The key comes from an environment variable; other headers and a password in the address may be secret too. The repr of
an Access contains none of them, and every string from a server is `hidden` before it is shown or kept.
Plans and questions are sent by a separate process (exchange.py); a Client is the parent's end:

    with Client(access("http://127.0.0.1:8080/v1")) as client:
        for reply in client.run(plan):
            ...
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from lab.core.lines import from_json, to_json
from lab.core.record import OK
from lab.core.request import CHAT, Asked, Request
from lab.errors import LabError, printable
from lab.process.spawning import DIED, cause_of_death, listen, start, wait_for_end
from lab.remote.formats import TIMEOUT_S, Ask, Reply, SendPlan, error_in

ANSWER_S = 30.0  # time limit for a request that generates nothing
LONGEST_S = 86_400.0  # maximum of --timeout
POLL_S = 0.1
SEPARATOR = "\t"  # separates the number, the request and the text of a reply in its line

PIECE = 8
"""Length of the parts of a secret that are masked. A shorter secret is masked as a whole, unless it has fewer than 4
characters."""

_NO_SECRETS = {"bearer", "basic", "token", "application/json"}
_CHILD = "from lab.remote.exchange import serve; serve()"


@dataclass(frozen=True)
class Access:
    """The address of a server and the credentials for it."""

    url: str  # without user, password, query, such as http://127.0.0.1:8080/v1
    api_key_env: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    credentials: str | None = field(default=None, repr=False)  # user:password
    timeout_s: float = TIMEOUT_S  # for a request that generates


class JsonReply(NamedTuple):
    """A server's answer that is not streamed. Its strings may contain secrets: show and keep them `hidden`."""

    status: int | None  # None: no answer
    parsed: dict[str, Any] | None  # None: it is not a JSON object
    error: (
        str | None
    )  # the status, the server's message, or the first words of the body; without secrets


def access(
    url: str,
    api_key_env: str | None = None,
    headers: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> Access:
    """An Access for `url`. `headers` are written NAME: VALUE; a request times out after `timeout_s` seconds.

    LabError for an invalid address, header or time, and for a variable that is not set; no message contains a secret.
    """
    if not 0.1 <= timeout_s <= LONGEST_S:  # also for NaN
        raise LabError(
            f"--timeout {timeout_s:g} is not possible.",
            f"Give a number from 0.1 to {LONGEST_S:,g}.",
        )
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host = (parts.hostname or "").encode("idna").decode()
        port = parts.port
    except ValueError:  # UnicodeError is one too
        host = ""
        port = None
    is_clean = printable(unquote(url)) == unquote(url) and not re.search(r"\s", url)
    if (
        not host
        or not is_clean
        or parts.scheme not in ("http", "https")
        or not parts.path.isascii()
    ):
        raise LabError("This is not a valid server address.", "Write it as http://HOST:PORT/v1.")
    pairs = []
    for header in headers:
        if not (found := re.fullmatch(r"\s*([A-Za-z0-9_-]+)\s*:\s*([ -~]*?)\s*", header)):
            raise LabError(
                "A header is not of the form NAME: VALUE.",
                "Write, for example, --header 'X-Team: lab'.",
            )
        pairs.append((found[1], found[2]))
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    address = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    clean = urlunsplit((parts.scheme, address, path or "/v1", "", ""))
    user = unquote(parts.username or "")
    password = unquote(parts.password or "")
    asked = Access(
        clean,
        api_key_env,
        tuple(pairs),
        f"{user}:{password}" if user or password else None,
        timeout_s,
    )
    key(asked)
    return asked


def key(asked: Access) -> str | None:
    """The key from the environment. LabError if the variable is not set, or HTTP cannot send its value."""
    if asked.api_key_env is None:
        return None
    value = os.environ.get(asked.api_key_env, "").strip()
    if not value:
        raise LabError(
            f"The environment variable {asked.api_key_env} is not set.",
            "Set it to the server's key.",
        )
    if not value.isascii() or not value.isprintable():
        hint = "Set it again, as one line."
        raise LabError(
            f"The key in {asked.api_key_env} has characters that HTTP cannot send.", hint
        )
    return value


def all_headers(asked: Access) -> list[tuple[str, str]]:
    """The user's headers and the credentials."""
    own = list(asked.headers)
    basic = asked.credentials
    if any(name.lower() == "authorization" for name, _ in own):
        return own
    if value := key(asked):
        return [*own, ("Authorization", f"Bearer {value}")]
    return (
        [*own, ("Authorization", f"Basic {base64.b64encode(basic.encode()).decode()}")]
        if basic
        else own
    )


def hidden(text: str, asked: Access) -> str:
    """`text` with *** in place of every PIECE letters of a secret of `asked`, in any case, JSON or URL encoding."""
    sent = [value for _, value in all_headers(asked)]
    whole = [key(asked) or "", asked.credentials or ""]
    for value in sent:
        if value.lower().startswith("basic "):
            with suppress(ValueError):  # not base64
                whole.append(base64.b64decode(value[6:], validate=True).decode(errors="ignore"))
    words = [word for one in whole for word in (one, *one.split(":", 1))]
    cuts = (r"[\s=;,]+", r"[\s=;,:\"']+")
    words += [word for one in (*sent, *whole) for cut in cuts for word in re.split(cut, one)]
    return printable(_pattern(tuple(words)).sub("***", text))


@lru_cache(maxsize=8)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the strings that `hidden` looks for: PIECE or more characters in a row of a secret, or a short one."""
    real = {secret for secret in secrets if len(secret) >= 4 and secret.lower() not in _NO_SECRETS}
    forms = {
        form
        for secret in real
        for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""))
    }
    pieces = {
        re.escape(form[i : i + PIECE]) for form in forms for i in range(len(form) - PIECE + 1)
    }
    whole = [re.escape(form) for form in sorted(forms, key=len, reverse=True) if len(form) < PIECE]
    begins = f"(?={'|'.join(pieces)})"
    in_a_row = [f"{begins}(?:.{{1,{PIECE}}}?{begins})*.{{{PIECE}}}"] if pieces else []
    return re.compile("|".join([*in_a_row, *whole]) or "(?!)", re.IGNORECASE | re.DOTALL)


def is_loopback(asked: Access) -> bool:
    """Whether the server is on this machine."""
    host = urlsplit(asked.url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def read_json(text: bytes, status: int, headers: Mapping[str, str], asked: Access) -> JsonReply:
    """The JSON object in `text`, or why there is none. The names of `headers` are in lower case."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        words = error_in(parsed)
    else:
        kind = headers.get("content-type", "").partition(";")[0].strip() or "a body without a type"
        plain = re.sub(
            r"(?is)<(script|style)\b.*?</\1>|<[^>]*>", " ", text[:20_000].decode(errors="replace")
        )
        begin = " ".join(plain.split())[:160]
        parsed = None
        words = f'{kind}, beginning with "{begin}"' if begin else f"{kind}, empty"
    if status in (401, 403):  # servers quote the key
        words = "the server rejects this key" if asked.api_key_env else "the server requires a key"
    if status != 200:
        named = {"location": "to", "retry-after": "Retry-After:"}
        further = "".join(
            f", {word} {headers[name]}" for name, word in named.items() if name in headers
        )
        phrase = "".join(one.phrase for one in HTTPStatus if one == status)
        words = f"{status} {phrase}".strip() + further + (f": {words}" if words else "")
    return JsonReply(status, parsed, hidden(words, asked)[:300] if words else None)


class ClientDied(LabError):
    """The client's process ended during a plan."""


class Client:
    """The parent's end. Use it in a `with` block: leaving it ends the process and every request in flight."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.start_ns: int | None = None  # of the last plan that ended, by the system-wide clock
        self._folder = tempfile.TemporaryDirectory(prefix="mini-lab-")
        self._stderr_path, self._path = (
            Path(self._folder.name) / name for name in ("stderr", "plan")
        )
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._stderr_path.open("wb") as stderr:
            self._process = start(_CHILD, stderr=stderr)
        self._listener = threading.Thread(
            target=listen, args=(self._process, pids, self._replies), daemon=True
        )
        self._listener.start()
        self.pid = pids.get()

    def run(self, plan: SendPlan, watch: Callable[[], None] = lambda: None) -> Iterator[Reply]:
        """Send the requests of a plan and yield each reply when it has ended. Calls `watch` every POLL_S."""
        watch()
        for replies in self.batches(plan, POLL_S):
            watch()
            yield from replies

    def ask(self, url: str, body: dict[str, Any] | None = None) -> JsonReply:
        """GET `url`, or POST `body` to it, and read a JSON object. A failure is in the reply."""
        nothing = Asked(n_prompt=None, n_gen=0)
        text = "" if body is None else json.dumps(body)
        question = Ask(asked=nothing, body=text, path=urlsplit(url).path or "/")
        one = (reply := self.send(question, CHAT, ANSWER_S)).request
        if one.status != OK or one.http_status is None:
            return JsonReply(None, None, one.error)
        return read_json(reply.text.encode(), one.http_status, {}, self.access)._replace(
            error=one.error
        )

    def found(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object at a path of the server; empty if there is none."""
        answer = self.ask(self.access.url.removesuffix("/v1") + path, body)
        return (answer.parsed or {}) if answer.status == 200 else {}

    def send(
        self,
        ask: Ask,
        api: str,
        timeout_s: float = LONGEST_S,
        watch: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Send one request, and wait for its answer, at most `timeout_s` and the server's time limit."""
        plan = SendPlan(asks=(ask,), api=api, timeout_s=min(timeout_s, self.access.timeout_s))
        (reply,) = self.run(plan, watch)
        return reply

    def batches(self, plan: SendPlan, poll_s: float) -> Iterator[Iterator[Reply]]:
        """Send the requests of a plan, and every `poll_s` yield the replies since the last time.

        Raises ClientDied if the process ends early. Closing this iterator early kills the process with all requests in
        flight; `given_up` returns the remaining replies.
        """
        self._path.unlink(missing_ok=True)
        self._path.touch()
        request = {"access": self.access, "plan": plan, "path": str(self._path)}
        with suppress(OSError):  # the process has ended; the listener reports it
            stdin: IO[bytes] = self._process.stdin  # type: ignore[assignment]
            stdin.write(to_json(request).encode() + b"\n")
            stdin.flush()
        answer = None
        with self._path.open("rb") as file:
            try:
                while answer is None:
                    with suppress(queue.Empty):
                        answer = self._replies.get(timeout=poll_s)
                    yield self._read(file)
            finally:
                if answer is None:
                    self._process.kill()
        self._path.unlink()
        if answer is DIED:
            self._replies.put(DIED)  # for the next plan
            lines = (
                self._stderr_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            )
            cause = cause_of_death("The client's process", self._process.wait(), lines)
            raise ClientDied(
                hidden(cause, self.access), "The finished requests are kept. Try again."
            )
        parsed = json.loads(answer)
        if "error" in parsed:
            raise LabError(parsed["error"], parsed["hint"])
        self.start_ns = parsed["start_ns"]

    def _read(self, file: IO[bytes]) -> Iterator[Reply]:
        """The complete replies since the last time."""
        while True:
            begun = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):  # still being written
                file.seek(begun)
                return
            number, request, text = line.decode().split(SEPARATOR)
            yield Reply(int(number), from_json(Request, request), json.loads(text))

    def given_up(self) -> Iterator[Reply]:
        """All finished requests of the last plan, if it was abandoned; otherwise nothing."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            yield from self._read(file)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        wait_for_end(self._process, self._listener)
        self._folder.cleanup()
