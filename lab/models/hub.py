"""Files from the hub, pulled so that a cut costs nothing and wrong bytes never become a model.

huggingface_hub throws a partial file away on every error (since 1.18) and checks no sum. So it tells what the hub
announces (commit, size, sha256) and lends its session, its headers and its locks, but the bytes are streamed here,
into one partial file that the next attempt goes on with, be it of this process or of another.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lab.errors import LabError
from lab.models import hub_cache, hub_errors
from lab.models.hub_cache import Pulled, Remote, cached
from lab.models.hub_errors import Unreachable

__all__ = ["Pulled", "Remote", "Unreachable", "cached", "files", "pull", "remove"]

T = TypeVar("T")
ShowBytes = Callable[[int, int | None], None]
"""Called with the bytes that are here and those of the whole file (None: the hub does not say)."""

WAITS_S: tuple[float, ...] = (1, 2, 4, 8, 16)
"""The pauses before further tries, counted anew whenever bytes have come."""

LONGEST_WAIT_S = 60.0  # a hub that asks for a longer pause (Retry-After) is not waited for
AGAIN = hub_errors.BUSY | {416}  # 416: there was more here than the hub has, and now there is nothing


@dataclass(frozen=True)
class _Announced:
    """What the hub says of a file before its first byte."""

    url: str
    commit: str
    etag: str
    n_bytes: int | None


def pull(remote: Remote, watch: ShowBytes) -> Pulled:
    """The file in the hub's cache, downloaded where it is missing; its sha256 is computed and checked every time.

    What has come stays on the disk when this ends by an error or Ctrl-C, and the next pull goes on with it. Without
    a way to the hub a cached file will do. Raises LabError for whatever the hub, the network or the disk refuses.
    """
    hub_cache.check(remote)
    try:
        with _in_words(remote):
            announced = _retried(lambda: _announced(remote))
    except Unreachable:
        if found := cached(remote):
            return found
        raise
    announced_sha256 = hub_cache.as_sha256(announced.etag)
    if remote.sha256 and announced_sha256 and announced_sha256 != remote.sha256.lower():
        raise hub_errors.another_file(remote, announced_sha256)
    with _in_words(remote):
        place = hub_cache.slot(remote, announced.commit, announced.etag)
        for path in (place.name, place.blob, place.lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with _utils().WeakFileLock(place.lock):  # everyone who uses huggingface_hub takes it for this file
            whole = next((hub_cache.target(path) for path in (place.name, place.blob) if path.exists()), None)
            if whole is None:
                _fetch(remote, announced, place, watch)
            sha256 = hub_cache.checked_sha256(remote, whole or place.partial, announced_sha256, announced.n_bytes)
            hub_cache.settle(place, announced.commit)
    return Pulled(place.name, announced.commit, sha256)


def files(repo: str, revision: str = "main") -> list[str]:
    """The .gguf files of a repo, sorted. Raises LabError."""
    remote = Remote(repo, "any.gguf", revision)
    hub_cache.check(remote)
    with _in_words(remote):
        return hub_errors.ggufs(_retried(lambda: _listed(hub_errors.files_of(remote))))


def remove(remote: Remote) -> int:
    """Delete the file from the hub's cache with every name it has, and a partial one; the bytes freed."""
    hub_cache.check(remote)
    with _in_words(remote):
        n_bytes = 0
        if name := hub_cache.find(remote):
            blob = hub_cache.target(name)
            n_bytes += _drop_shared(blob) if blob.is_symlink() else hub_cache.drop(remote.repo, blob)
        if remote.sha256:
            partial = hub_cache.slot(remote, "any", remote.sha256.lower()).partial
            n_bytes += hub_cache.drop(remote.repo, partial) if partial.exists() else 0
    return n_bytes


def _drop_shared(blob: Path) -> int:
    """Delete a file whose bytes lie in huggingface_hub's store for all repos: only it knows who else needs them."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(hub_cache.root())
    names = (file for repo in cache.repos for revision in repo.revisions for file in revision.files)
    plan = cache.delete_files(*(file for file in names if file.blob_path == blob))
    plan.execute()
    return plan.expected_freed_size


def _endpoint() -> str:
    """Where the hub is; the environment is read at every call. Raises LabError."""
    env = os.environ
    if (env.get("HF_HUB_OFFLINE") or env.get("TRANSFORMERS_OFFLINE") or "").upper() in {"1", "ON", "YES", "TRUE"}:
        hint = f"Unset it to pull. {hub_errors.OFFLINE_HINT}"
        raise Unreachable("HF_HUB_OFFLINE is set: the hub is not asked.", hint)
    endpoint = (env.get("HF_ENDPOINT") or hub_errors.HOME).rstrip("/")
    if not re.fullmatch(r"https?://[\w.-]+(:\d{1,4}|:[1-5]\d{4}|:6[0-4]\d{3}|:65[0-4]\d\d)?(/[\w./-]*)?", endpoint):
        raise LabError(f"HF_ENDPOINT is no address of a hub: {endpoint!r}.", f"Unset it, or set {hub_errors.HOME}")
    return endpoint


def _announced(remote: Remote) -> _Announced:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    endpoint = _endpoint()
    url = hf_hub_url(remote.repo, remote.file, revision=remote.revision, endpoint=endpoint)
    found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=endpoint)
    commit, etag = found.commit_hash or "", found.etag or ""
    if not re.fullmatch(r"\w[\w.-]*", commit) or not re.fullmatch(r"\w[\w.-]*", etag):
        raise hub_errors.no_hub(endpoint)
    url = hf_hub_url(remote.repo, remote.file, revision=commit, endpoint=endpoint)
    return _Announced(url, commit, etag, found.size)


def _fetch(remote: Remote, announced: _Announced, place: hub_cache.Slot, watch: ShowBytes) -> None:
    """Bring the partial file to its full length, from where it is."""
    total = announced.n_bytes
    if total is not None and place.n_partial > total:
        place.partial.unlink()
    hub_cache.check_space(remote, place, remote.n_bytes if total is None else total)
    watch(place.n_partial, total)
    answers, failures = _errors()
    try:
        _retried(lambda: _stream(announced, place.partial, watch), lambda: place.n_partial)
    except answers:
        raise
    except (failures, ConnectionError) as problem:
        raise hub_errors.broke_off(remote, place.n_partial, total, problem) from None
    except OSError as problem:
        if problem.errno in hub_cache.NO_SPACE:
            raise hub_cache.full(remote, place, total) from None
        raise


def _stream(announced: _Announced, partial: Path, watch: ShowBytes) -> None:
    """Append what is missing. Raises at every cut, when all that came is on the disk."""
    from huggingface_hub import constants, get_session

    total, timeout = announced.n_bytes, constants.HF_HUB_DOWNLOAD_TIMEOUT
    with partial.open("ab") as file:
        done = file.tell()
        if done == total:
            return
        headers = {**_utils().build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={done}-"}
        with get_session().stream("GET", announced.url, headers=headers, timeout=timeout) as response:
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
    """What `ask` answers; asked again while the hub is busy and, with `n_done` (bytes here), after a cut."""
    waits, before = iter(WAITS_S), n_done() if n_done else 0
    while True:
        try:
            return ask()
        except (_errors()[1], ConnectionError) as problem:
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


def _errors() -> tuple[type[Exception], type[Exception]]:
    """An answer that is an error; and any error of the HTTP client (httpx in huggingface_hub 1, httpx2 in 2)."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError, HfHubHTTPError.__mro__[1]


@contextmanager
def _in_words(remote: Remote) -> Iterator[None]:
    """Whatever goes wrong inside becomes a LabError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    def listed(path: str) -> Any:
        try:
            return _listed(path)
        except (_errors()[1], ConnectionError, json.JSONDecodeError):
            return None

    try:
        yield
    except HfHubHTTPError as problem:
        raise hub_errors.refused(problem.response.status_code, problem.response.headers, remote, listed) from None
    except HFValidationError:
        raise LabError(f"{remote.repo!r} is not the name of a repo on the hub.", "Write it as OWNER/REPO.") from None
    except UnicodeEncodeError:
        raise LabError("HF_TOKEN holds letters that no token has.", "Set it anew, or unset it.") from None
    except json.JSONDecodeError:
        raise hub_errors.no_hub(_endpoint()) from None
    except (_errors()[1], ConnectionError) as problem:
        raise hub_errors.no_way(_endpoint(), problem) from None
    except OSError as problem:
        raise hub_cache.unusable(problem) from None
