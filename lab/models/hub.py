"""Download files from the hub, with resumable downloads and checked sha256.

huggingface_hub deletes a partial file on every error and does not check the sha256 (tests/test_hub.py shows both). So
the lab uses the library for the metadata (commit, size, sha256), session, headers and locks, but streams the bytes
itself into a partial file, which the next attempt (also of another process) continues.

The hub's errors say little: a status, and sometimes a code. Without a token, a missing repo and a private one give the
same status (401). For a wrong name the lab offers similar ones.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from lab.errors import LabError
from lab.models import hub_cache
from lab.models.hub_cache import Pulled, Remote, Slot

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

HOME = "https://huggingface.co"
BUSY = frozenset({408, 429, 500, 502, 503, 504})
OFFLINE_HINT = (
    "Without a network, measure the embedded model (smollm2-135m), a synthetic one (synthetic:NAME:QUANT) "
    "or a file on disk (--model PATH.gguf)."
)


class Unreachable(LabError):
    """The hub is unreachable or too busy now."""


def refused(problem: HfHubHTTPError, remote: Remote) -> LabError:
    """The LabError for an error answer of the hub; asks the hub for similar names."""
    from huggingface_hub import errors

    response, repo, page = problem.response, remote.repo, f"{HOME}/{remote.repo}"
    status: int = response.status_code
    licence = (
        f"accept the licence on {page}, create a token of that account on {HOME}/settings/tokens, "
        "set HF_TOKEN to it, and pull again."
    )
    if isinstance(problem, errors.GatedRepoError) or status == 403:
        return LabError(f"{repo} is gated: downloading it requires a licence ({status}).", f"To get it, {licence}")
    if isinstance(problem, errors.RevisionNotFoundError):
        refs = _listed_or_none(f"/{repo}/refs")
        names = _column(refs, "branches", "name") + _column(refs, "tags", "name")
        return LabError(f"{repo} has no revision {remote.revision!r}.", _offer(remote.revision, names) or f"See {page}")
    if isinstance(problem, errors.EntryNotFoundError):
        offer = _offer(remote.file, ggufs(_listed_or_none(files_of(remote)))) or f"See {page}"
        return LabError(f"{repo} has no file {remote.file!r} at revision {remote.revision!r}.", offer)
    if "invalid credentials" in (problem.server_message or "").lower():
        return LabError(f"The hub rejects the token in HF_TOKEN ({status}).", f"Unset it. For {repo}, {licence}")
    if status in (401, 404):
        owner = quote(repo.split("/")[0])
        offer = _offer(repo, _column({"repos": _listed_or_none(f"?author={owner}&limit=500")}, "repos", "id"))
        hint = f"{offer} If it is private or gated, {licence}".strip()
        return LabError(f"The hub has no repo {repo}, or it is private ({status}).", hint)
    if status in BUSY:
        asked = response.headers.get("Retry-After")
        when = f"It asks to wait {asked} s. " if asked else ""
        return Unreachable(
            f"The hub is too busy to send {remote.file} of {repo} (status {status}, several times).",
            f"{when}Pull again later: the download continues where it stopped. {OFFLINE_HINT}",
        )
    return LabError(f"The hub rejected the request for {remote.file} of {repo} (status {status}).", f"See {page}")


def another_file(remote: Remote, announced: str) -> LabError:
    """The error for a sha256 that differs from the catalog's."""
    return LabError(
        f"{remote.file} of {remote.repo} is not the file in the catalog: the hub announces sha256 {announced}, the "
        f"catalog has {remote.sha256}. Nothing was downloaded.",
        "The repo has changed: name a revision with the old file, or correct the catalog.",
    )


def broke_off(remote: Remote, n_done: int, n_bytes: int | None, problem: Exception) -> Unreachable:
    """The error for a download that stopped at `n_done` of `n_bytes`, after all retries."""
    total = f" of {n_bytes:,}" if n_bytes is not None else ""
    return Unreachable(
        f"The download of {remote.file} broke off at {n_done:,}{total} bytes, and retries did not help: "
        f"{_named(problem)}.",
        f"Pull again later: the download continues there. {OFFLINE_HINT}",
    )


def no_hub(endpoint: str) -> LabError:
    return LabError(
        f"The server at {endpoint} is not a model hub.",
        "Check HF_ENDPOINT, the proxy, and whether this network requires a login in the browser.",
    )


def files_of(remote: Remote) -> str:
    """The API path of a revision's list of files."""
    return f"/{remote.repo}/revision/{quote(remote.revision, safe='')}"


def ggufs(info: Any) -> list[str]:
    """The .gguf files in the hub's description of a revision, sorted."""
    return sorted(name for name in _column(info, "siblings", "rfilename") if name.lower().endswith(".gguf"))


def _column(info: Any, rows: str, name: str) -> list[str]:
    """One field of a table in JSON; empty if the hub sent something else."""
    table = info.get(rows) if isinstance(info, dict) else None
    return [str(row[name]) for row in table if isinstance(row, dict) and name in row] if isinstance(table, list) else []


def _offer(wanted: str, names: list[str]) -> str:
    """A sentence that offers the names similar to `wanted`, or else some names."""
    by_lower = {name.lower(): name for name in names if name != wanted}
    close = [by_lower[name] for name in difflib.get_close_matches(wanted.lower(), by_lower, n=3, cutoff=0.5)]
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"There are: {', '.join(names[:8])}{' ...' if len(names) > 8 else '.'}" if by_lower else ""


def _named(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".rstrip(": .")


T = TypeVar("T")
ShowBytes = Callable[[int, int | None], None]
"""Called with the bytes on the disk and those of the whole file (None: the hub does not say)."""

WAITS_S: tuple[float, ...] = (1, 2, 4, 8, 16)
"""The pauses before retries; after a try that brought bytes they start from the first again."""

LONGEST_WAIT_S = 60.0  # no retry if the hub asks for a longer pause (Retry-After)
AGAIN = BUSY | {416}  # 416: the partial file was longer than the hub's, and has been emptied


def cached(remote: Remote) -> Pulled | None:
    """The complete file in the hub's cache, if any, without using the network. Raises LabError."""
    hub_cache.check(remote)
    if not os.access(hub_cache.folder(remote.repo), os.F_OK):
        return None  # importing the library would take 0.3 s
    with _in_words(remote):
        return hub_cache.find(remote)


def pull(remote: Remote, watch: ShowBytes) -> Pulled:
    """The file in the hub's cache, downloaded if missing; always checks its sha256.

    After an error or Ctrl-C the partial download stays on the disk, and the next pull continues it. If the hub is
    unreachable, returns a cached file. LabError for every failure of the hub, the network or the disk.
    """
    hub_cache.check(remote)
    try:
        with _in_words(remote):
            place = _retried(lambda: _announced(remote))
    except Unreachable:
        if here := cached(remote):
            return here
        raise
    if remote.sha256 and place.sha256 and place.sha256 != remote.sha256.lower():
        raise another_file(remote, place.sha256)
    with _in_words(remote):
        for path in (place.name, place.blob):
            path.parent.mkdir(parents=True, exist_ok=True)
        with alone(place.lock):  # huggingface_hub itself takes this lock for this file
            whole = hub_cache.blob_of(place.name) if place.name.exists() else place.blob
            if not whole.exists():
                _fetch(remote, place, watch)
                whole = place.partial
            sha256 = hub_cache.checked_sha256(remote, whole, place)
            hub_cache.settle(place)
    return Pulled(place.name, place.commit, sha256)


def files(repo: str, revision: str = "main") -> list[str]:
    """The sorted .gguf files of a repo. Raises LabError."""
    remote = Remote(repo, "any.gguf", revision)
    hub_cache.check(remote)
    with _in_words(remote):
        return ggufs(_retried(lambda: _listed(files_of(remote))))


def remove(remote: Remote) -> int:
    """Delete a file from the hub's cache, with all its names, and its partial file. Returns the bytes freed."""
    hub_cache.check(remote)
    with _in_words(remote):
        here = hub_cache.find(remote)
        n_bytes = hub_cache.drop(hub_cache.blob_of(here.path)) if here else 0
        if remote.sha256:
            place = hub_cache.slot(remote, "any", remote.sha256.lower())
            n_bytes += place.n_partial
            place.partial.unlink(missing_ok=True)
    return n_bytes


@contextmanager
def alone(lock: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock for one process at a time. Calls `waiting` once if another process holds it. Raises OSError."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(_utils().WeakFileLock(lock, timeout=0.1))
        except TimeoutError:
            waiting()
            held.enter_context(_utils().WeakFileLock(lock))
        yield


def _endpoint() -> str:
    """The hub's address. LabError if HF_ENDPOINT is invalid."""
    from huggingface_hub import constants

    endpoint: str = constants.ENDPOINT
    if not re.fullmatch(r"https?://[\w.-]+(:\d{1,4}|:[1-5]\d{4}|:6[0-4]\d{3}|:65[0-4]\d\d)?(/[\w./-]*)?", endpoint):
        raise LabError(f"HF_ENDPOINT is not a valid address: {endpoint!r}.", f"Unset it, or set it to {HOME}")
    return endpoint


def _announced(remote: Remote) -> Slot:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    endpoint = _endpoint()
    url = hf_hub_url(remote.repo, remote.file, revision=remote.revision, endpoint=endpoint)
    answer = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=endpoint)
    commit, etag = answer.commit_hash or "", answer.etag or ""
    if not re.fullmatch(r"\w[\w.-]*", commit) or not re.fullmatch(r"\w[\w.-]*", etag):
        raise no_hub(endpoint)
    url = hf_hub_url(remote.repo, remote.file, revision=commit, endpoint=endpoint)
    return hub_cache.slot(remote, commit, etag, url, answer.size)


def _fetch(remote: Remote, place: Slot, watch: ShowBytes) -> None:
    """Download the missing bytes of the partial file."""
    if place.n_bytes is not None and place.n_partial > place.n_bytes:
        place.partial.unlink()
    hub_cache.check_space(remote, place)
    watch(place.n_partial, place.n_bytes)
    try:
        _retried(lambda: _stream(place, watch), lambda: place.n_partial)
    except _utils().HfHubHTTPError:
        raise
    except _failures() as problem:
        raise broke_off(remote, place.n_partial, place.n_bytes, problem) from None
    except OSError as problem:
        if problem.errno in hub_cache.NO_SPACE:
            raise hub_cache.full(remote, place) from None
        raise


def _stream(place: Slot, watch: ShowBytes) -> None:
    """Append the missing bytes. Raises if the connection breaks, after writing the bytes that arrived."""
    from huggingface_hub import constants, get_session

    total, timeout = place.n_bytes, constants.HF_HUB_DOWNLOAD_TIMEOUT
    with place.partial.open("ab") as file:
        done = file.tell()
        if done == total:
            return
        headers = {**_utils().build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={done}-"}
        with get_session().stream("GET", place.url, headers=headers, timeout=timeout) as response:
            if response.status_code in (200, 416):  # the whole file, or no such range: the next try sends all
                file.truncate(0)
                done = 0
            _utils().hf_raise_for_status(response)
            for chunk in response.iter_bytes():
                file.write(chunk)
                done += len(chunk)
                watch(done, total)
                if total is not None and done > total:
                    break
        file.flush()
        os.fsync(file.fileno())
    if total is not None and done < total:
        raise ConnectionError("the answer was too short")


def _listed(path: str) -> Any:
    """The hub's JSON for a path below /api/models."""
    from huggingface_hub import constants, get_session

    url = f"{_endpoint()}/api/models{path}"
    response = get_session().get(url, headers=_utils().build_hf_headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    _utils().hf_raise_for_status(response)
    return response.json()


def _listed_or_none(path: str) -> Any:
    with suppress(*_failures(), json.JSONDecodeError):
        return _listed(path)
    return None


def _retried(ask: Callable[[], T], n_done: Callable[[], int] | None = None) -> T:
    """The result of `ask()`, with retries while the hub is busy; with `n_done` (bytes on the disk) also after a cut."""
    waits, before = iter(WAITS_S), n_done() if n_done else 0
    while True:
        try:
            return ask()
        except _failures() as problem:
            response: Any = getattr(problem, "response", None)
            if (response.status_code not in AGAIN) if response is not None else (n_done is None):
                raise
            if n_done and n_done() > before:
                waits, before = iter(WAITS_S), n_done()
            asked = response.headers.get("Retry-After", "") if response is not None else ""
            pause_s = max(next(waits, LONGEST_WAIT_S + 1), float(asked) if asked.isdigit() else 0)
            if pause_s > LONGEST_WAIT_S:
                raise
        time.sleep(pause_s)


def _utils() -> Any:
    """huggingface_hub's public helpers, loaded on first use, so mypy does not see their types."""
    from huggingface_hub import utils

    return utils


def _failures() -> tuple[type[Exception], ...]:
    """Exceptions of the HTTP client (httpx in huggingface_hub 1, httpx2 in 2), including error answers."""
    from huggingface_hub import errors

    client: Any = errors  # this module imports HTTPError from the client in use
    return client.HTTPError, ConnectionError


@contextmanager
def _in_words(remote: Remote) -> Iterator[None]:
    """Turn exceptions of the hub, the network and the disk into LabError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as problem:
        raise refused(problem, remote) from None
    except HFValidationError:
        raise LabError(f"{remote.repo!r} is not the name of a repo on the hub.", "Write it as OWNER/REPO.") from None
    except UnicodeEncodeError:
        raise LabError("HF_TOKEN contains characters that are not ASCII.", "Set it again, or unset it.") from None
    except json.JSONDecodeError:
        raise no_hub(_endpoint()) from None
    except OfflineModeIsEnabled:
        raise Unreachable("HF_HUB_OFFLINE forbids downloads.", f"Unset it to pull. {OFFLINE_HINT}") from None
    except _failures() as problem:
        raise Unreachable(f"The hub ({_endpoint()}) cannot be reached: {_named(problem)}.", OFFLINE_HINT) from None
    except OSError as problem:
        raise hub_cache.unusable(problem) from None
