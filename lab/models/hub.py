"""Files from the hub, pulled so that a cut costs nothing and wrong bytes never become a model.

huggingface_hub deletes a partial file on every error and compares no sha256 (tests/test_hub.py shows both). So the
library is asked what the hub announces (commit, size, sha256), and its session, headers and locks are used, but the
bytes are streamed here, into one partial file, with which the next attempt goes on, of this process or of another.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lab.errors import LabError
from lab.models import hub_cache, hub_errors
from lab.models.hub_cache import Pulled, Remote, Slot
from lab.models.hub_errors import Unreachable

__all__ = ["Pulled", "Remote", "Unreachable", "alone", "cached", "files", "pull", "remove"]

T = TypeVar("T")
ShowBytes = Callable[[int, int | None], None]
"""Called with the bytes that are on the disk and those of the whole file (None where the hub does not say)."""

WAITS_S: tuple[float, ...] = (1, 2, 4, 8, 16)
"""The pauses before further tries; after a try that brought bytes they begin again with the first."""

LONGEST_WAIT_S = 60.0  # a hub that asks for a longer pause (Retry-After) is not waited for
AGAIN = hub_errors.BUSY | {416}  # 416: there was more here than the hub has, and now there is nothing


def cached(remote: Remote) -> Pulled | None:
    """The file in the hub's cache where it is whole; the network is not asked. Raises LabError."""
    hub_cache.check(remote)
    if not os.access(hub_cache.folder(remote.repo), os.F_OK):
        return None  # without the 0.3 s that the library takes to load
    with _in_words(remote):
        return hub_cache.find(remote)


def pull(remote: Remote, watch: ShowBytes) -> Pulled:
    """The file in the hub's cache, downloaded where it is missing; its sha256 is computed and checked every time.

    What was downloaded stays on the disk when this ends by an error or Ctrl-C, and the next pull goes on with it.
    Where the hub cannot be reached, a cached file is returned. Raises LabError for whatever the hub, the network or
    the disk refuses.
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
        raise hub_errors.another_file(remote, place.sha256)
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
    """The .gguf files of a repo, sorted. Raises LabError."""
    remote = Remote(repo, "any.gguf", revision)
    hub_cache.check(remote)
    with _in_words(remote):
        return hub_errors.ggufs(_retried(lambda: _listed(hub_errors.files_of(remote))))


def remove(remote: Remote) -> int:
    """Delete the file from the hub's cache with all its names, and a partial one; the bytes freed. Raises LabError."""
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
    """One process at a time is inside. `waiting` is called once where another one is. Raises OSError."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(_utils().WeakFileLock(lock, timeout=0.1))
        except TimeoutError:
            waiting()
            held.enter_context(_utils().WeakFileLock(lock))
        yield


def _endpoint() -> str:
    """The hub's address. Raises LabError."""
    from huggingface_hub import constants

    endpoint: str = constants.ENDPOINT
    if not re.fullmatch(r"https?://[\w.-]+(:\d{1,4}|:[1-5]\d{4}|:6[0-4]\d{3}|:65[0-4]\d\d)?(/[\w./-]*)?", endpoint):
        raise LabError(f"HF_ENDPOINT is no address of a hub: {endpoint!r}.", f"Unset it, or set {hub_errors.HOME}")
    return endpoint


def _announced(remote: Remote) -> Slot:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    endpoint = _endpoint()
    url = hf_hub_url(remote.repo, remote.file, revision=remote.revision, endpoint=endpoint)
    answer = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=endpoint)
    commit, etag = answer.commit_hash or "", answer.etag or ""
    if not re.fullmatch(r"\w[\w.-]*", commit) or not re.fullmatch(r"\w[\w.-]*", etag):
        raise hub_errors.no_hub(endpoint)
    url = hf_hub_url(remote.repo, remote.file, revision=commit, endpoint=endpoint)
    return hub_cache.slot(remote, commit, etag, url, answer.size)


def _fetch(remote: Remote, place: Slot, watch: ShowBytes) -> None:
    """Bring the partial file to its full length, from where it is."""
    if place.n_bytes is not None and place.n_partial > place.n_bytes:
        place.partial.unlink()
    hub_cache.check_space(remote, place)
    watch(place.n_partial, place.n_bytes)
    try:
        _retried(lambda: _stream(place, watch), lambda: place.n_partial)
    except _utils().HfHubHTTPError:
        raise
    except _failures() as problem:
        raise hub_errors.broke_off(remote, place.n_partial, place.n_bytes, problem) from None
    except OSError as problem:
        if problem.errno in hub_cache.NO_SPACE:
            raise hub_cache.full(remote, place) from None
        raise


def _stream(place: Slot, watch: ShowBytes) -> None:
    """Append the missing bytes. Raises at a cut, after all bytes that arrived are on the disk."""
    from huggingface_hub import constants, get_session

    total, timeout = place.n_bytes, constants.HF_HUB_DOWNLOAD_TIMEOUT
    with place.partial.open("ab") as file:
        done = file.tell()
        if done == total:
            return
        headers = {**_utils().build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={done}-"}
        with get_session().stream("GET", place.url, headers=headers, timeout=timeout) as response:
            if response.status_code in (200, 416):  # it begins anew, or has no such range: then the next try will
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
    """The hub's JSON for a path below its list of models."""
    from huggingface_hub import constants, get_session

    url = f"{_endpoint()}/api/models{path}"
    response = get_session().get(url, headers=_utils().build_hf_headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    _utils().hf_raise_for_status(response)
    return response.json()


def _retried(ask: Callable[[], T], n_done: Callable[[], int] | None = None) -> T:
    """The result of `ask()`, called again while the hub is busy and, with `n_done` (bytes on the disk), after a cut."""
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
    """huggingface_hub's public helpers; they are loaded on first use, so mypy does not see them."""
    from huggingface_hub import utils

    return utils


def _failures() -> tuple[type[Exception], ...]:
    """Errors of the HTTP client (httpx in huggingface_hub 1, httpx2 in 2), answers that are errors included."""
    from huggingface_hub import errors

    client: Any = errors  # the name is imported there, from whichever client it is
    return client.HTTPError, ConnectionError


@contextmanager
def _in_words(remote: Remote) -> Iterator[None]:
    """Raises the LabError that says what went wrong inside."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    failures = _failures()

    def listed(path: str) -> Any:
        with suppress(*failures, json.JSONDecodeError):
            return _listed(path)
        return None

    try:
        yield
    except HfHubHTTPError as problem:
        raise hub_errors.refused(problem, remote, listed) from None
    except HFValidationError:
        raise LabError(f"{remote.repo!r} is not the name of a repo on the hub.", "Write it as OWNER/REPO.") from None
    except UnicodeEncodeError:
        raise LabError("HF_TOKEN holds letters that no token has.", "Set it anew, or unset it.") from None
    except json.JSONDecodeError:
        raise hub_errors.no_hub(_endpoint()) from None
    except OfflineModeIsEnabled:
        hint = f"Unset it to pull. {hub_errors.OFFLINE_HINT}"
        raise Unreachable("HF_HUB_OFFLINE is set: the hub is not asked.", hint) from None
    except failures as problem:
        raise hub_errors.no_way(_endpoint(), problem) from None
    except OSError as problem:
        raise hub_cache.unusable(problem) from None
