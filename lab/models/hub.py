"""Files of the hub: huggingface_hub downloads them into its cache, and the lab checks them.

`hf_hub_download` continues after a break of the connection, and starts again in a new process. It
does not compare the bytes with the announced sha256, takes the announced names as paths, and reads
whatever a server sends; so the lab does the first, refuses the second and limits the third.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab.core import parts
from lab.core.files import exists, listed, user_folder
from lab.errors import LabError
from lab.models import catalog
from lab.models.candidates import NO_MODELS, ListedFile, helper_kind
from lab.models.catalog import HUB, ModelFile

HOME = "https://huggingface.co"
# More than any model's header: a vocabulary of 262,144 tokens takes 16 MB
HEADER_BYTES = 32 << 20
# More than the table of tensors in a later part, which has no vocabulary
LATER_HEADER_BYTES = 2 << 20
MOST_ANSWER_BYTES = 32 << 20  # of an answer that is no file: a list of 10,000 files takes 1 MB
STALL_S = 60.0
LEAST_BYTES = 64 << 10
"""A transfer ends if it brings fewer than LEAST_BYTES in STALL_S seconds."""

# The name of a large file's blob; files in git itself have shorter ones
SHA256 = "[0-9a-f]{64}"
OFFLINE_HINT = (
    "Without a network, measure the embedded model (smollm2-135m), "
    "a synthetic one (synthetic:NAME:QUANT) or a file on disk (--model PATH.gguf)."
)


@dataclass(frozen=True)
class Remote:
    """A repo on the hub, or a file in it; `sha256` is the catalog's, None if it has none."""

    repo: str
    file: str = ""
    revision: str = "main"
    sha256: str | None = None

    @property
    def parts(self) -> list[Remote]:
        """All files of the model, in their order."""
        names = parts.names_of(self.file)
        return [dataclasses.replace(self, file=name) for name in names]

    @property
    def label(self) -> str:
        return f"{self.file} of {self.repo}" if self.file else self.repo

    def at(self, path: Path, sha256: str | None) -> ModelFile:
        """This file at its path in the cache, SNAPSHOT/FILE."""
        snapshot = path.parents[self.file.count("/")].name
        return ModelFile(path.stem, HUB, path, self.repo, snapshot, sha256, self.file)


def cached(remote: Remote) -> ModelFile | None:
    """The complete file in the hub's cache, if any, without using the network or reading it.

    Of a split model its first part, if all are there. None for a file with another sum than the
    catalog's. Raises LabError.
    """
    pulled = [_cached_file(part) for part in remote.parts]
    if None in pulled:
        return None
    first = pulled[0]
    return first if len(pulled) == 1 or first is None else _of_many(first)


def _of_many(first: ModelFile) -> ModelFile:
    """The model with this first part, whose sum is not the model's."""
    return dataclasses.replace(first, name=parts.stem(first.path.name), sha256=None)


def _cached_file(remote: Remote) -> ModelFile | None:
    if not exists(_folder(remote) / "snapshots"):
        return None  # importing the library would take 0.3 s
    with _errors_explained(remote):
        from huggingface_hub import try_to_load_from_cache

        location = try_to_load_from_cache(remote.repo, remote.file, _root(), remote.revision)
    if not isinstance(location, str):
        return None
    path = Path(location)
    blob_name = _blob(path).name
    sha256 = blob_name if re.fullmatch(SHA256, blob_name) else None
    if sha256 and remote.sha256 and sha256 != remote.sha256.lower():
        return None
    return remote.at(path, sha256)


def missing_bytes(remote: Remote) -> list[int]:
    """The bytes of each file of a model that is not in the cache.

    LabError also if the disk has no room for all of them.
    """
    sizes = []
    for part in remote.parts:
        if _cached_file(part) is None:
            with _errors_explained(part), _guarded():
                sizes.append(_announced(part)[1].size)
    with _errors_explained(remote):
        _need_room(sum(sizes))
    return sizes


def pull(remote: Remote) -> ModelFile:
    """Download a model into the hub's cache, with a progress bar on stderr, and check its sha256.

    Of a split model all parts. Raises LabError.
    """
    pulled = [_pull_file(part) for part in remote.parts]
    return pulled[0] if len(pulled) == 1 else _of_many(pulled[0])


def _pull_file(remote: Remote) -> ModelFile:
    folder = _folder(remote)
    with _errors_explained(remote), _guarded() as guard:
        from huggingface_hub import constants, hf_hub_download

        user_folder(lambda: Path(constants.HF_HUB_CACHE), "HF_HOME")
        _, announced = _announced(remote)
        guard.most_bytes = announced.size
        expected = announced.etag if re.fullmatch(SHA256, announced.etag) else None
        _check_announced(remote, expected, announced.size)
        where: dict[str, Any] = {
            "revision": remote.revision,
            "cache_dir": _root(),
            "endpoint": _endpoint(),
        }
        path = Path(hf_hub_download(remote.repo, remote.file, **where))
        sha256 = catalog.sha256(path)
        expected = expected or remote.sha256
        if expected and sha256 != expected.lower():
            _drop(path, folder)
            what = f"{remote.label} arrived damaged: its sha256 is {sha256} instead of {expected}."
            hint = "Pull it again. If this repeats, a proxy or mirror changes the file."
            raise LabError(f"{what} The lab deleted it.", hint)
        return remote.at(path, sha256)


def header(remote: Remote, folder: Path) -> Path:
    """Write the first bytes of each file of a model, with its header, into a folder.

    Each gets its whole length, with a hole for the rest. Returns the first. Raises LabError.
    """
    paths = [folder / Path(part.file).name for part in remote.parts]
    for part, path in zip(remote.parts, paths, strict=True):
        n_bytes = LATER_HEADER_BYTES if parts.is_later(part.file) else HEADER_BYTES
        _write_header(part, path, n_bytes)
    return paths[0]


def _write_header(remote: Remote, path: Path, n_bytes: int) -> None:
    _folder(remote)
    with _errors_explained(remote), _guarded() as guard:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        url, announced = _announced(remote)
        guard.most_bytes = announced.size
        headers = {**build_hf_headers(), "Range": f"bytes=0-{n_bytes - 1}"}
        request = get_session().stream("GET", url, headers=headers, follow_redirects=True)
        with request as answer, path.open("wb") as file:
            hf_raise_for_status(answer)
            for chunk in answer.iter_bytes():
                file.write(chunk)
                if file.tell() >= n_bytes:
                    break
            file.truncate(announced.size)


def files(repo: str, revision: str = "main") -> list[ListedFile]:
    """The .gguf files of a repo, by name. Raises LabError."""
    remote = Remote(repo, revision=revision)
    _folder(remote)
    with _errors_explained(remote), _guarded():
        from huggingface_hub import HfApi, errors

        try:
            listed = HfApi(_endpoint()).model_info(
                repo, revision=revision, files_metadata=True
            )
            siblings = listed.siblings or []
            names = [ListedFile(file.rfilename, file.size) for file in siblings]
            return sorted(_of_models(names), key=lambda file: file.name)
        except errors.HFValidationError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError):  # JSON of another form
            raise _no_hub() from None


def _of_models(files: Iterable[ListedFile]) -> list[ListedFile]:
    return [file for file in files if file.name.lower().endswith(".gguf")]


def remember(remote: Remote) -> None:
    """Write down which files the repo of a pulled file has: what a tag names does not depend on
    what was pulled."""
    path = _listing_path(remote.repo, remote.revision)
    with suppress(LabError, OSError):
        listing = files(remote.repo, remote.revision)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({file.name: file.n_bytes for file in listing}))


def known_files(repo: str, revision: str) -> list[ListedFile]:
    """The .gguf files of a repo as they were when one was pulled, else those in the cache."""
    with suppress(OSError, ValueError, AttributeError):
        listing = json.loads(_listing_path(repo, revision).read_text())
        return [ListedFile(name, n_bytes) for name, n_bytes in listing.items()]
    snapshots = _folder(Remote(repo)) / "snapshots"
    names = set()
    for path in listed(snapshots, "*/**/*.gguf"):
        in_snapshot = path.relative_to(snapshots).parts[1:]
        names.add("/".join(in_snapshot))
    return [ListedFile(name) for name in sorted(names)]


def _listing_path(repo: str, revision: str) -> Path:
    """Where `remember` writes, in the repo's folder of the cache."""
    name = f"{revision.replace('/', '--')}.json"
    return _folder(Remote(repo, revision=revision)) / "lab-listings" / name


def remove(remote: Remote) -> int:
    """Delete a model from the hub's cache, with all its names. Returns the bytes freed."""
    n_bytes = 0
    for part in remote.parts:
        pulled = _cached_file(part)
        if pulled:
            with _errors_explained(remote):
                n_bytes += _drop(pulled.path, _folder(remote))
    return n_bytes


def drop_damaged(remote: Remote) -> int:
    """Delete the files of a model in the cache whose bytes do not have the announced sum.

    Returns how many.
    """
    n_dropped = 0
    for part in remote.parts:
        pulled = _cached_file(part)
        if pulled and pulled.sha256 and catalog.sha256(pulled.path) != pulled.sha256:
            with _errors_explained(remote):
                _drop(pulled.path, _folder(remote))
            n_dropped += 1
    return n_dropped


def pulled() -> list[ModelFile]:
    """The models in the cache, each once for every commit; of a split model the first part.

    Their names are the SPECs that mean them.
    """
    models = {}
    root = _root()
    for path in listed(root, "models--*/snapshots/*/**/*"):
        if path.suffix.lower() != ".gguf" or helper_kind(path.name) in NO_MODELS:
            continue
        folder, _, commit, *names = path.relative_to(root).parts
        repo = folder.removeprefix("models--").replace("--", "/", 1)
        file = parts.names_of("/".join(names))[0]
        model = cached(Remote(repo, file, commit))
        if model and (repo, commit, file) not in models:
            is_main = _commit_of_main(root / folder) == commit
            spec = f"hf:{repo}/{file}" if is_main else f"hf:{repo}/{file}@{commit}"
            models[repo, commit, file] = dataclasses.replace(model, name=spec)
    return list(models.values())


def _commit_of_main(folder: Path) -> str:
    """The commit of a repo that its branch main has in the cache."""
    with suppress(OSError):
        return (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    return ""


# The cache


def _root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).resolve()


def _folder(remote: Remote) -> Path:
    """A repo's folder in the cache. LabError for a name that would lead outside the cache."""
    names = {"repo": remote.repo, "revision": remote.revision}
    if remote.file:
        names["file"] = remote.file
    for kind, name in names.items():
        leads_outside = {"", ".", ".."} & set(name.split("/"))
        if leads_outside or re.search(r"[\\:\x00-\x1f]", name):
            what = f"{name!r} is not the name of a {kind} on the hub."
            raise LabError(what, "Write it as hf:OWNER/REPO/FILE.gguf")
    return _root() / "--".join(["models", *remote.repo.split("/")])


def _blob(path: Path) -> Path:
    """The blob that a name in the cache links to, or the name itself if it is not a link."""
    if not path.is_symlink():
        return path
    return Path(os.path.normpath(path.parent / path.readlink()))


def _drop(path: Path, folder: Path) -> int:
    """Delete a file of a repo's folder with every name that links to it.

    Not by the library's scan of the cache, from which one broken link hides the repo. Returns the
    bytes freed. Raises OSError.
    """
    n_bytes = path.stat().st_size
    blob = _blob(path)
    for name in listed(folder / "snapshots", "**/*"):
        if _blob(name) == blob:
            name.unlink()
    blob.unlink(missing_ok=True)
    return n_bytes


# What the hub announces


def _announced(remote: Remote) -> tuple[str, Any]:
    """The address of a file, and what the hub says about it: commit, sum and size."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(remote.repo, remote.file, revision=remote.revision, endpoint=_endpoint())
    metadata = get_hf_file_metadata(url, timeout=10, endpoint=_endpoint())
    if not metadata.commit_hash or not metadata.etag:
        raise _no_hub()
    if metadata.size is None or metadata.size < 0:
        raise _no_hub()
    return url, metadata


def _check_announced(remote: Remote, sha256: str | None, n_bytes: int) -> None:
    """LabError for another sum than the catalog's, OSError for a file without room."""
    if sha256 and remote.sha256 and sha256 != remote.sha256.lower():
        what = (
            f"{remote.label} is not the file in the catalog: the hub announces sha256 {sha256}, "
            f"the catalog has {remote.sha256}. Nothing was downloaded."
        )
        hint = (
            "The repo has changed: name a revision with the old file, or correct the catalog."
        )
        raise LabError(what, hint)
    _need_room(n_bytes)


def _need_room(n_bytes: int) -> None:
    """OSError if the cache's disk has less room."""
    _root().mkdir(parents=True, exist_ok=True)
    if n_bytes > shutil.disk_usage(_root()).free:
        raise OSError(errno.ENOSPC, "")


# What a server may do


@dataclass
class _Guard:
    """Limits what the library sends and accepts: hooks of its HTTP client.

    `most_bytes`: of the body of any answer; for a file, its announced size.
    """

    most_bytes: int = MOST_ANSWER_BYTES

    def check_request(self, request: Any) -> None:
        """LabError for a request that would carry the token to another server than the hub."""
        if "Authorization" in request.headers and _origin(str(request.url)) != _origin(
            _endpoint()
        ):
            raise _no_hub()
        # So that announced bytes are bytes on disk
        request.headers["Accept-Encoding"] = "identity"

    def check_answer(self, response: Any) -> None:
        """LabError for an answer of no hub; the body of the others gets its limits."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _no_hub()
        if response.request.method == "HEAD":
            _refuse_paths(response)
        elif response.is_redirect or response.is_error:
            _limit_body(response, MOST_ANSWER_BYTES)
        else:
            _limit_body(response, self.most_bytes)


@contextmanager
def _guarded() -> Iterator[_Guard]:
    """A guard of all that the library does in a `with` block, also after it has reconnected.

    Not with Xet: its program sends the token, and writes, where no hook sees it.
    """
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    guard = _Guard()

    def new_client() -> Any:
        client: Any = default_client_factory()
        client.event_hooks["request"].append(guard.check_request)
        client.event_hooks["response"].append(guard.check_answer)
        for transport in (client._transport, *client._mounts.values()):
            if transport is not None:
                transport._pool._network_backend = _Network(transport._pool._network_backend)
        return client

    set_client_factory(new_client)
    has_disabled_xet = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield guard
    finally:
        constants.HF_HUB_DISABLE_XET = has_disabled_xet
        set_client_factory(default_client_factory)


def _refuse_paths(response: Any) -> None:
    """LabError for an announced commit or sum that would lead out of the cache.

    On every answer: the library asks again what `pull` has asked.
    """
    for name in ("X-Repo-Commit", "X-Linked-Etag", "ETag"):
        value = response.headers.get(name) or "absent"
        if not re.fullmatch(r'(W/)?"?\w[\w.-]*"?', value):
            raise _no_hub()


class _Network:
    """The client's network, with connections that are not waited for without end."""

    def __init__(self, network: Any) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def connect_tcp(self, *arguments: Any, **options: Any) -> _Connection:
        return _Connection(self._network.connect_tcp(*arguments, **options))


class _Connection:
    """A connection that ends with a LabError if an answer, its head included, drips or stays out.

    Only what the client waits for counts: time in which it writes to the disk does not.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._n_bytes = 0
        self._waited_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def start_tls(self, *arguments: Any, **options: Any) -> _Connection:
        return _Connection(self._stream.start_tls(*arguments, **options))

    def write(self, data: bytes, timeout: float | None = None) -> None:
        self._n_bytes = 0
        self._waited_s = 0.0
        self._stream.write(data, timeout)

    def read(self, most_bytes: int, timeout: float | None = None) -> bytes:
        began = time.monotonic()
        data: bytes = self._stream.read(most_bytes, min(timeout or STALL_S, STALL_S))
        self._waited_s += time.monotonic() - began
        self._n_bytes += len(data)
        if self._waited_s > STALL_S:
            if self._n_bytes < LEAST_BYTES:
                what = f"The hub sent {self._n_bytes:,} bytes in {STALL_S:g} s."
                raise LabError(f"{what} The lab stopped waiting.", "Pull it again later.")
            self._n_bytes = 0
            self._waited_s = 0.0
        return data


def _limit_body(response: Any, most_bytes: int) -> None:
    """Let the body of an answer end with a LabError if it is too long."""
    stream = response.stream
    stream_class: Any = type(stream)  # the client accepts nothing else

    class LimitedStream(stream_class):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __iter__(self) -> Iterator[bytes]:
            return _limited(stream, most_bytes)

        def close(self) -> None:
            stream.close()

    response.stream = LimitedStream()


def _limited(chunks: Any, most_bytes: int) -> Iterator[bytes]:
    """The same chunks. LabError for more than `most_bytes`."""
    n_bytes = 0
    for chunk in chunks:
        n_bytes += len(chunk)
        if n_bytes > most_bytes:
            what = f"The hub sent more than the {most_bytes:,} bytes that it may."
            raise LabError(
                f"{what} The lab stopped reading.", "Pull it again, from another hub."
            )
        yield chunk


# Errors


def _endpoint() -> str:
    """The hub's address. LabError if HF_ENDPOINT is invalid."""
    from huggingface_hub import constants

    endpoint: str = constants.ENDPOINT
    with suppress(ValueError):
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return endpoint
    what = f"HF_ENDPOINT is not a valid address: {_without_password(endpoint)!r}."
    raise LabError(what, f"Unset it, or set it to {HOME}")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """The scheme, host and port of an address."""
    parts = urlsplit(url)
    usual = 443 if parts.scheme == "https" else 80
    return parts.scheme, parts.hostname, parts.port or usual


def _without_password(text: str) -> str:
    """A text with *** in the place of the user and password of each address."""
    return re.sub(r"://[^/\s]*@", "://***@", text)


def _no_hub() -> LabError:
    what = f"The server at {_without_password(_endpoint())} is not a model hub."
    hint = "Check HF_ENDPOINT, the proxy, and whether this network requires a login in the browser."
    return LabError(what, hint)


def _rejected(problem: Any, remote: Remote) -> LabError:
    """The LabError for an error answer.

    Without a token, the hub does not tell missing repos from private ones.
    """
    from huggingface_hub import errors

    status = problem.response.status_code
    repo = remote.repo
    page = f"{HOME}/{repo}"
    licence = (
        f"accept the licence on {page}, create a token of that account on {HOME}/settings/tokens, "
        "set HF_TOKEN to it, and pull again."
    )
    if isinstance(problem, errors.GatedRepoError) or status == 403:
        what = f"{repo} is gated: downloading it requires a licence ({status})."
        return LabError(what, f"To get it, {licence}")
    if isinstance(problem, errors.RevisionNotFoundError):
        return LabError(f"{repo} has no revision {remote.revision!r}.", f"See {page}")
    if isinstance(problem, errors.EntryNotFoundError):
        what = f"{repo} has no file {remote.file!r} at revision {remote.revision!r}."
        return LabError(what, f"See {page}/tree/main")
    if "invalid credentials" in (problem.server_message or "").lower():
        what = f"The hub rejects the token in HF_TOKEN ({status})."
        return LabError(what, f"Unset it. For {repo}, {licence}")
    if status in (401, 404):
        what = f"The hub has no repo {repo}, or it is private ({status})."
        return LabError(what, f"Check the name. If it is private or gated, {licence}")
    if status in (408, 429, 500, 502, 503, 504):
        what = f"The hub is too busy to send {remote.label} ({status})."
        return LabError(what, "Pull again later.")
    what = f"The hub rejected the request for {remote.label} (status {status})."
    return LabError(what, f"See {page}")


def _disk_error(problem: OSError, remote: Remote) -> LabError:
    """The LabError for a problem of the disk, or of a file's length."""
    if problem.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        free_bytes = shutil.disk_usage(_root()).free
        free = f"{free_bytes:,} bytes are free in {_root()}"
        what = f"The disk is too full for {remote.file}: {free}."
        hint = "Free some space there, or set HF_HOME to a folder on another disk."
        return LabError(what, hint)
    if problem.errno is None:  # the library's, such as another length than announced
        what = f"{remote.label} did not arrive: {_without_password(str(problem))}"
        return LabError(what, "Pull it again.")
    place = problem.filename or _root()
    what = f"The hub's cache cannot be used: {problem.strerror} ({place})."
    return LabError(what, "Check its permissions, or set HF_HOME to another folder.")


@contextmanager
def _errors_explained(remote: Remote) -> Iterator[None]:
    """Turn exceptions of the hub, the network and the disk into LabError."""
    from huggingface_hub import errors

    # It imports HTTPError from the HTTP client in use (httpx, or httpx2 since 2.0).
    library: Any = errors
    try:
        yield
    except errors.HfHubHTTPError as problem:
        raise _rejected(problem, remote) from None
    except errors.HFValidationError:
        what = f"{remote.repo!r} is not the name of a repo on the hub."
        raise LabError(what, "Write it as OWNER/REPO.") from None
    except UnicodeEncodeError:
        what = "HF_TOKEN contains characters that are not ASCII."
        raise LabError(what, "Set it again, or unset it.") from None
    except json.JSONDecodeError:
        raise _no_hub() from None
    except errors.OfflineModeIsEnabled:
        what = "HF_HUB_OFFLINE forbids downloads."
        raise LabError(what, f"Unset it to pull. {OFFLINE_HINT}") from None
    except (
        library.HTTPError,
        ConnectionError,
        errors.LocalEntryNotFoundError,
        RuntimeError,  # Xet's
    ) as problem:
        reason = f"{type(problem).__name__}: {problem}".rstrip(": .")
        what = f"The hub ({_endpoint()}) cannot be reached, or broke off: {reason}."
        raise LabError(_without_password(what), OFFLINE_HINT) from None
    except OSError as problem:
        raise _disk_error(problem, remote) from None
