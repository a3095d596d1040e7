"""Files of the hub: huggingface_hub downloads them into its cache, and the lab checks their sha256.

`hf_hub_download` continues after a break of the connection, and starts again in a new process. It does not compare the
bytes with the announced sha256, and takes the announced names as paths; so the lab does the one and refuses the other.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab.errors import LabError
from lab.models import catalog
from lab.models.catalog import HUB, ModelFile

HOME = "https://huggingface.co"
HEADER_BYTES = 32 << 20  # more than any model's header: a vocabulary of 262,144 tokens takes 16 MB
SHA256 = "[0-9a-f]{64}"  # the name of a large file's blob; files in git itself have shorter ones
OFFLINE_HINT = (
    "Without a network, measure the embedded model (smollm2-135m), a synthetic one (synthetic:NAME:QUANT) "
    "or a file on disk (--model PATH.gguf)."
)


@dataclass(frozen=True)
class Remote:
    """A file on the hub; `sha256` is the catalog's, None if it has none."""

    repo: str
    file: str
    revision: str = "main"
    sha256: str | None = None

    def at(self, path: Path, sha256: str | None) -> ModelFile:
        """This file at its path in the cache, SNAPSHOT/FILE."""
        return ModelFile(
            path.stem, HUB, path, self.repo, path.parents[self.file.count("/")].name, sha256
        )


def cached(remote: Remote) -> ModelFile | None:
    """The complete file in the hub's cache, if any, without using the network or reading it. Raises LabError."""
    if not (_folder(remote) / "snapshots").exists():
        return None  # importing the library would take 0.3 s
    with _in_words(remote):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(remote.repo, remote.file, _root(), remote.revision)
    if not isinstance(found, str):
        return None
    sha256 = name if re.fullmatch(SHA256, name := _blob(Path(found)).name) else None
    return (
        None
        if sha256 and remote.sha256 and sha256 != remote.sha256.lower()
        else remote.at(Path(found), sha256)
    )


def pull(remote: Remote) -> ModelFile:
    """Download a file into the hub's cache, with a progress bar on stderr, and check its sha256. Raises LabError."""
    folder = _folder(remote)
    name = f"{remote.file} of {remote.repo}"
    with _in_words(remote):
        from huggingface_hub import get_session, hf_hub_download

        answers = get_session().event_hooks["response"]
        if _refuse_paths not in answers:
            answers.append(_refuse_paths)
        _, announced = _announced(remote)
        if not announced.commit_hash or not announced.etag:
            raise _no_hub()
        wanted = announced.etag if re.fullmatch(SHA256, announced.etag) else None
        if wanted and remote.sha256 and wanted != remote.sha256.lower():
            what = f"{name} is not the file in the catalog: the hub announces sha256 {wanted}, the catalog has "
            hint = (
                "The repo has changed: name a revision with the old file, or correct the catalog."
            )
            raise LabError(f"{what}{remote.sha256}. Nothing was downloaded.", hint)
        _root().mkdir(parents=True, exist_ok=True)
        if (announced.size or 0) > shutil.disk_usage(_root()).free:
            raise OSError(errno.ENOSPC, "")
        where: dict[str, Any] = {
            "revision": remote.revision,
            "cache_dir": _root(),
            "endpoint": _endpoint(),
        }
        path = Path(hf_hub_download(remote.repo, remote.file, **where))
        sha256 = catalog.sha256(path)
        if sha256 != (wanted or remote.sha256 or sha256).lower():
            _drop(path, folder)
            what = f"{name} arrived damaged: its sha256 is {sha256} instead of {wanted or remote.sha256}."
            hint = "Pull it again. If this repeats, a proxy or mirror changes the file."
            raise LabError(f"{what} The lab deleted it.", hint)
        return remote.at(path, sha256)


def header(remote: Remote, path: Path) -> None:
    """Write the first HEADER_BYTES of a file to `path`, which gets the file's length: the rest is a hole."""
    _folder(remote)
    with _in_words(remote):
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        url, announced = _announced(remote)
        asked = {**build_hf_headers(), "Range": f"bytes=0-{HEADER_BYTES - 1}"}
        with (
            get_session().stream("GET", url, headers=asked, follow_redirects=True) as answer,
            path.open("wb") as file,
        ):
            hf_raise_for_status(answer)
            for chunk in answer.iter_bytes():
                file.write(chunk)
                if file.tell() >= HEADER_BYTES:
                    break
            file.truncate(announced.size or 0)


def files(repo: str, revision: str = "main") -> list[str]:
    """The sorted .gguf files of a repo. Raises LabError."""
    remote = Remote(repo, "any.gguf", revision)
    _folder(remote)
    with _in_words(remote):
        from huggingface_hub import HfApi

        listed = HfApi(_endpoint()).model_info(repo, revision=revision).siblings or []
        return sorted(file.rfilename for file in listed if file.rfilename.lower().endswith(".gguf"))


def cached_names(repo: str, _: str) -> list[str]:
    """The .gguf files of a repo in the cache, of any revision."""
    snapshots = _folder(Remote(repo, "any.gguf")) / "snapshots"
    return sorted(
        {"/".join(path.relative_to(snapshots).parts[1:]) for path in snapshots.glob("*/**/*.gguf")}
    )


def remove(remote: Remote) -> int:
    """Delete a file from the hub's cache, with all its names. Returns the bytes freed."""
    here = cached(remote)
    with _in_words(remote):
        return _drop(here.path, _folder(remote)) if here else 0


def _root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).resolve()


def _folder(remote: Remote) -> Path:
    """A repo's folder in the cache. LabError for a name that would lead outside the cache."""
    for what, path in (("repo", remote.repo), ("file", remote.file), ("revision", remote.revision)):
        if {"", ".", ".."} & set(path.split("/")) or re.search(r"[\\:\x00-\x1f]", path):
            raise LabError(
                f"{path!r} is not the name of a {what} on the hub.",
                "Write it as hf:OWNER/REPO/FILE.gguf",
            )
    return _root() / "--".join(["models", *remote.repo.split("/")])


def _blob(path: Path) -> Path:
    """The blob that a name in the cache links to, or the name itself if it is not a link."""
    return Path(os.path.normpath(path.parent / path.readlink())) if path.is_symlink() else path


def _drop(path: Path, folder: Path) -> int:
    """Delete a file of a repo's folder with every name that links to it. Returns the bytes freed. Raises OSError."""
    n_bytes = path.stat().st_size
    blob = _blob(path)
    for name in (folder / "snapshots").rglob("*"):
        if _blob(name) == blob:
            name.unlink()
    blob.unlink(missing_ok=True)
    return n_bytes


def _announced(remote: Remote) -> tuple[str, Any]:
    """The address of a file, and what the hub says about it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(remote.repo, remote.file, revision=remote.revision, endpoint=_endpoint())
    return url, get_hf_file_metadata(url, timeout=10, endpoint=_endpoint())


def _refuse_paths(response: Any) -> None:
    """LabError for an announced commit or sum that would lead out of the cache. On every answer: the library asks
    again what `pull` has asked."""
    names = ("X-Repo-Commit", "X-Linked-Etag", "ETag") if response.request.method == "HEAD" else ()
    if not all(
        re.fullmatch(r'(W/)?"?\w[\w.-]*"?', response.headers.get(name) or "absent")
        for name in names
    ):
        raise _no_hub()


def _endpoint() -> str:
    """The hub's address. LabError if HF_ENDPOINT is invalid."""
    from huggingface_hub import constants

    endpoint: str = constants.ENDPOINT
    with suppress(ValueError):
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return endpoint
    raise LabError(
        f"HF_ENDPOINT is not a valid address: {endpoint!r}.", f"Unset it, or set it to {HOME}"
    )


def _no_hub() -> LabError:
    hint = "Check HF_ENDPOINT, the proxy, and whether this network requires a login in the browser."
    return LabError(f"The server at {_endpoint()} is not a model hub.", hint)


def _refused(problem: Any, remote: Remote) -> LabError:
    """The LabError for an error answer. Without a token, the hub does not tell missing repos from private ones."""
    from huggingface_hub import errors

    status = problem.response.status_code
    repo = remote.repo
    file = remote.file
    page = f"{HOME}/{remote.repo}"
    licence = (
        f"accept the licence on {page}, create a token of that account on {HOME}/settings/tokens, "
        "set HF_TOKEN to it, and pull again."
    )
    what = f"The hub rejected the request for {file} of {repo} (status {status})."
    hint = f"See {page}"
    if isinstance(problem, errors.GatedRepoError) or status == 403:
        what = f"{repo} is gated: downloading it requires a licence ({status})."
        hint = f"To get it, {licence}"
    elif isinstance(problem, errors.RevisionNotFoundError):
        what = f"{repo} has no revision {remote.revision!r}."
    elif isinstance(problem, errors.EntryNotFoundError):
        what = f"{repo} has no file {file!r} at revision {remote.revision!r}."
        hint = f"See {page}/tree/main"
    elif "invalid credentials" in (problem.server_message or "").lower():
        what = f"The hub rejects the token in HF_TOKEN ({status})."
        hint = f"Unset it. For {repo}, {licence}"
    elif status in (401, 404):
        what = f"The hub has no repo {repo}, or it is private ({status})."
        hint = f"Check the name. If it is private or gated, {licence}"
    elif status in (408, 429, 500, 502, 503, 504):
        what = f"The hub is too busy to send {file} of {repo} ({status})."
        hint = "Pull again later."
    return LabError(what, hint)


@contextmanager
def _in_words(remote: Remote) -> Iterator[None]:
    """Turn exceptions of the hub, the network and the disk into LabError."""
    from huggingface_hub import errors

    library: Any = (
        errors  # it imports HTTPError from the HTTP client in use (httpx, or httpx2 since 2.0)
    )
    repo = remote.repo
    file = remote.file
    try:
        yield
    except errors.HfHubHTTPError as problem:
        raise _refused(problem, remote) from None
    except errors.HFValidationError:
        raise LabError(
            f"{repo!r} is not the name of a repo on the hub.", "Write it as OWNER/REPO."
        ) from None
    except UnicodeEncodeError:
        raise LabError(
            "HF_TOKEN contains characters that are not ASCII.", "Set it again, or unset it."
        ) from None
    except json.JSONDecodeError:
        raise _no_hub() from None
    except errors.OfflineModeIsEnabled:
        raise LabError(
            "HF_HUB_OFFLINE forbids downloads.", f"Unset it to pull. {OFFLINE_HINT}"
        ) from None
    except (
        library.HTTPError,
        ConnectionError,
        errors.LocalEntryNotFoundError,
        RuntimeError,
    ) as problem:  # Xet's
        said = f"{type(problem).__name__}: {problem}".rstrip(": .")
        raise LabError(
            f"The hub ({_endpoint()}) cannot be reached, or broke off: {said}.", OFFLINE_HINT
        ) from None
    except OSError as problem:
        what = (
            f"The hub's cache cannot be used: {problem.strerror} ({problem.filename or _root()})."
        )
        hint = "Check its permissions, or set HF_HOME to another folder."
        if problem.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            what = f"The disk is too full for {file}: {shutil.disk_usage(_root()).free:,} bytes are free in {_root()}."
            hint = "Free some space there, or set HF_HOME to a folder on another disk."
        elif problem.errno is None:  # the library's, such as another length than announced
            what = f"{file} of {repo} did not arrive: {problem}"
            hint = "Pull it again."
        raise LabError(what, hint) from None
