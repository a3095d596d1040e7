"""Files of the hub, in the cache of huggingface_hub, which other tools share.

The library asks the hub and names the files of the cache. The lab downloads them itself: the
library begins a file again in every process, and does not compare it with the announced sha256.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from lab.core import split_files
from lab.core.files import exists, listed, user_folder
from lab.errors import LabError
from lab.models import catalog
from lab.models.candidates import NO_MODELS, ListedFile, helper_kind
from lab.models.catalog import HUB, ModelFile

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

HOME = "https://huggingface.co"
# More than any model's header: a vocabulary of 262,144 tokens takes 16 MB
HEADER_BYTES = 32 << 20
# More than the table of tensors in a later part, which has no vocabulary
LATER_HEADER_BYTES = 2 << 20
ANSWER_S = 10.0  # for the list of a repo's files, and for what a file is
MOST_BREAKS = 4  # of a download, one after the other, that brought no bytes
ABANDONED_S = 3_600.0
"""A download of the library is written to until it ends; after such a pause nobody continues it."""

# The name of a large file's blob; files in git itself have shorter ones
SHA256 = "[0-9a-f]{64}"
OFFLINE_HINT = (
    "Without a network, measure the embedded model (smollm2-135m), "
    "a synthetic one (synthetic:NAME:QUANT) or a file on disk (--model PATH.gguf)."
)


PULL_LATER = "Pull again later."
BUSY = (408, 429, 500, 502, 503, 504)  # statuses

ShowTransfer = Callable[[str, int, int | None], None]
"""Called with a description of the work, the bytes done and the total bytes (None: unknown)."""


def silently(what: str, done: int, total: int | None) -> None:
    """Shows nothing of a transfer."""


@dataclass(frozen=True)
class HubFile:
    """A repo on the hub, or a file in it; `sha256` is the catalog's, None if it has none."""

    repo: str
    file: str = ""
    revision: str = "main"
    sha256: str | None = None

    @property
    def parts(self) -> list[HubFile]:
        """All files of the model, in their order."""
        names = split_files.names_of(self.file)
        return [dataclasses.replace(self, file=name) for name in names]

    @property
    def label(self) -> str:
        return f"{self.file} of {self.repo}" if self.file else self.repo

    def at(self, path: Path, sha256: str | None) -> ModelFile:
        """This file at its path in the cache, SNAPSHOT/FILE."""
        snapshot = path.parents[self.file.count("/")].name
        return ModelFile(path.stem, HUB, path, self.repo, snapshot, sha256, self.file)


def cached(remote: HubFile) -> ModelFile | None:
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
    return dataclasses.replace(first, name=split_files.stem(first.path.name), sha256=None)


def _cached_file(remote: HubFile) -> ModelFile | None:
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


def missing_bytes(remote: HubFile) -> list[int]:
    """The bytes of each file of a model that is not in the cache.

    LabError also if the disk has no room for all of them.
    """
    sizes = []
    for part in remote.parts:
        if _cached_file(part) is None:
            with _errors_explained(part), _with_client():
                sizes.append(_announced(part)[1].size)
    with _errors_explained(remote):
        _need_room(sum(sizes))
    return sizes


def pull(remote: HubFile, watch: ShowTransfer = silently) -> ModelFile:
    """Download a model into the hub's cache, and check its sha256.

    Of a split model all parts. Raises LabError.
    """
    pulled = [_pull_file(part, watch) for part in remote.parts]
    return pulled[0] if len(pulled) == 1 else _of_many(pulled[0])


def _pull_file(remote: HubFile, watch: ShowTransfer) -> ModelFile:
    with _errors_explained(remote), _with_client():
        from huggingface_hub import constants, hf_hub_download

        user_folder(lambda: Path(constants.HF_HUB_CACHE), "HF_HOME")
        _check_names(remote)
        url, announced = _announced(remote)
        expected = announced.etag if re.fullmatch(SHA256, announced.etag) else None
        _check_announced(remote, expected, announced.size)
        _download(remote, url, announced, expected or remote.sha256, watch)
        # The bytes are there: this gives them their names
        path = hf_hub_download(
            remote.repo,
            remote.file,
            revision=remote.revision,
            cache_dir=_root(),
            endpoint=_endpoint(),
        )
    sha256 = expected or catalog.sha256(Path(path))
    return remote.at(Path(path), sha256)


def _download(
    remote: HubFile,
    url: str,
    announced: Announced,
    sha256: str | None,
    watch: ShowTransfer,
) -> None:
    """Put the bytes of a file into the cache, under the name that the library gives them.

    Continues where an earlier process stopped. LabError for bytes with another sum.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    blob = _folder(remote) / "blobs" / announced.etag
    lock = _root() / ".locks" / _folder(remote).name / f"{announced.etag}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        _delete_abandoned(blob.parent)
        part = blob.with_name(f"{blob.name}.incomplete")
        if not exists(blob):
            _fetch(remote, url, part, announced.size, watch)
        written = blob if exists(blob) else part
        watch(f"checking {remote.file}", 0, None)
        found = catalog.sha256(written)
        if sha256 and found != sha256.lower():
            _drop(written, _folder(remote))
            what = (
                f"{remote.label} arrived damaged: its sha256 is {found} instead of {sha256}."
            )
            hint = "Pull it again. If this repeats, a proxy or mirror changes the file."
            raise LabError(f"{what} The lab deleted it.", hint)
        written.replace(blob)


def _fetch(remote: HubFile, url: str, part: Path, n_bytes: int, watch: ShowTransfer) -> None:
    """Complete a file of `n_bytes`. Tries again after breaks, unless they bring no bytes."""
    from huggingface_hub import errors

    part.touch()
    n_breaks = 0
    while part.stat().st_size != n_bytes:
        n_before = part.stat().st_size
        try:
            _append(remote, url, part, n_bytes, watch)
        except errors.HfHubHTTPError:
            raise
        except _http_error():
            if n_breaks == MOST_BREAKS:
                raise
        n_breaks = 0 if part.stat().st_size > n_before else n_breaks + 1
        if n_breaks > MOST_BREAKS:
            what = f"{remote.label} ended after {n_before:,} of {n_bytes:,} bytes."
            raise LabError(what, "Pull it again later: the lab continues from there.")


def _append(remote: HubFile, url: str, part: Path, n_bytes: int, watch: ShowTransfer) -> None:
    """Append the bytes that a file lacks. LabError for more bytes than announced."""
    n_done = part.stat().st_size
    if n_done > n_bytes:
        n_done = 0
    what = f"downloading {remote.file}"
    with _stream(url, f"bytes={n_done}-") as answer:
        is_rest = answer.status_code == HTTPStatus.PARTIAL_CONTENT
        if not is_rest:
            n_done = 0
        with part.open("ab" if is_rest and n_done else "wb") as file:
            for chunk in answer.iter_bytes():
                n_done += len(chunk)
                if n_done > n_bytes:
                    much = f"The hub sent more than the {n_bytes:,} bytes that it announced"
                    file.truncate(0)
                    raise LabError(f"{much} for {remote.label}.", "Pull it again.")
                file.write(chunk)
                watch(what, n_done, n_bytes)


@contextmanager
def _stream(url: str, byte_range: str) -> Iterator[Any]:
    """An answer with a range of a file's bytes."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    headers = {**build_hf_headers(), "Range": byte_range}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    request = get_session().stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=timeout
    )
    with request as answer:
        hf_raise_for_status(answer)
        yield answer


def _delete_abandoned(folder: Path) -> None:
    """Delete what killed downloads of the library left: no process continues it."""
    for path in listed(folder, "*.????????.incomplete"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()


def header(remote: HubFile, folder: Path) -> Path:
    """Write the first bytes of each file of a model, with its header, into a folder.

    Each gets its whole length, with a hole for the rest. Returns the first. Raises LabError.
    """
    paths = [folder / Path(part.file).name for part in remote.parts]
    for part, path in zip(remote.parts, paths, strict=True):
        n_bytes = LATER_HEADER_BYTES if split_files.is_later(part.file) else HEADER_BYTES
        _write_header(part, path, n_bytes)
    return paths[0]


def _write_header(remote: HubFile, path: Path, n_bytes: int) -> None:
    _check_names(remote)
    with _errors_explained(remote), _with_client():
        url, announced = _announced(remote)
        with _stream(url, f"bytes=0-{n_bytes - 1}") as answer, path.open("wb") as file:
            for chunk in answer.iter_bytes():
                file.write(chunk)
                if file.tell() >= n_bytes:
                    break
            file.truncate(announced.size)


def files(repo: str, revision: str = "main") -> list[ListedFile]:
    """The .gguf files of a repo, by name. Raises LabError."""
    remote = HubFile(repo, revision=revision)
    _check_names(remote)
    with _errors_explained(remote), _with_client():
        from huggingface_hub import HfApi, errors

        try:
            listed = HfApi(_endpoint()).model_info(
                repo, revision=revision, files_metadata=True, timeout=ANSWER_S
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


def remember(remote: HubFile) -> None:
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
    snapshots = _folder(HubFile(repo)) / "snapshots"
    names = set()
    for path in listed(snapshots, "*/**/*.gguf"):
        in_snapshot = path.relative_to(snapshots).parts[1:]
        names.add("/".join(in_snapshot))
    return [ListedFile(name) for name in sorted(names)]


def _listing_path(repo: str, revision: str) -> Path:
    """Where `remember` writes, in the repo's folder of the cache."""
    name = f"{revision.replace('/', '--')}.json"
    return _folder(HubFile(repo, revision=revision)) / "lab-listings" / name


def remove(remote: HubFile) -> int:
    """Delete a model from the hub's cache, with all its names. Returns the bytes freed."""
    n_bytes = 0
    for part in remote.parts:
        pulled = _cached_file(part)
        if pulled:
            with _errors_explained(remote):
                n_bytes += _drop(pulled.path, _folder(remote))
    return n_bytes


def drop_damaged(remote: HubFile) -> int:
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
        file = split_files.names_of("/".join(names))[0]
        model = cached(HubFile(repo, file, commit))
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
    try:
        from huggingface_hub import constants
    except ValueError:
        raise _bad_variable() from None
    return Path(constants.HF_HUB_CACHE).resolve()


def _bad_variable() -> LabError:
    """The LabError for a setting in the environment with which the library is not imported."""
    names = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
    values = [
        f"{name}={os.environ[name]}"
        for name in names
        if not os.environ.get(name, "0").strip().isdigit()
    ]
    if not values:
        return _bad_endpoint(os.environ.get("HF_ENDPOINT", ""))
    what = (
        f"The environment has {' and '.join(values)}, which is not a whole number of seconds."
    )
    return LabError(what, "Unset it, or set it to 10.")


def _folder(remote: HubFile) -> Path:
    """A repo's folder in the cache. LabError for a name that would lead outside the cache."""
    _check_names(remote)
    return _root() / "--".join(["models", *remote.repo.split("/")])


def _check_names(remote: HubFile) -> None:
    """LabError if a name would lead outside the cache."""
    names = {"repo": remote.repo, "revision": remote.revision}
    if remote.file:
        names["file"] = remote.file
    for kind, name in names.items():
        leads_outside = {"", ".", ".."} & set(name.split("/"))
        if leads_outside or re.search(r"[\\:\x00-\x1f]", name):
            what = f"{name!r} is not the name of a {kind} on the hub."
            raise LabError(what, "Write it as hf:OWNER/REPO/FILE.gguf")


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


class Announced(NamedTuple):
    """What the hub says about a file."""

    etag: str
    size: int


def _announced(remote: HubFile) -> tuple[str, Announced]:
    """The address of a file, and what the hub says about it: sum and size."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(remote.repo, remote.file, revision=remote.revision, endpoint=_endpoint())
    metadata = get_hf_file_metadata(url, timeout=ANSWER_S, endpoint=_endpoint())
    etag = metadata.etag or ""
    for name in (metadata.commit_hash or "", etag):  # they become names in the cache
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise _no_hub()
    if metadata.size is None or metadata.size < 0:
        raise _no_hub()
    return url, Announced(etag, metadata.size)


def _check_announced(remote: HubFile, sha256: str | None, n_bytes: int) -> None:
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


# The client


@contextmanager
def _with_client() -> Iterator[None]:
    """Let the library use a client of the lab's in a `with` block, also after it has reconnected.

    Its requests carry the token to the hub only, and announced bytes are bytes on disk. Without
    Xet, whose program sends the token and writes where no hook sees it.
    """
    from huggingface_hub import constants, set_client_factory

    # Nothing public makes the default client, or gives the factory to put back
    from huggingface_hub.utils._http import default_client_factory

    def new_client() -> Any:
        try:
            client = default_client_factory()
        except (ImportError, ValueError) as problem:
            if _proxy():
                raise _bad_proxy(problem) from None
            with _proxies_unset():
                client = default_client_factory()
        client.event_hooks["request"].append(_check_request)
        return client

    _check_token()
    set_client_factory(new_client)
    has_disabled_xet = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = has_disabled_xet
        set_client_factory(default_client_factory)


def _check_request(request: Any) -> None:
    """LabError for a request that would carry the token to another server than the hub."""
    if "Authorization" in request.headers and _origin(str(request.url)) != _origin(
        _endpoint()
    ):
        raise _no_hub()
    request.headers["Accept-Encoding"] = "identity"


def _proxy() -> tuple[str, str] | None:
    """The variable that names the proxy to the hub, and its address; None without one."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(_endpoint())
    if proxy_bypass(parts.netloc):
        return None
    proxies = getproxies()
    for kind in (parts.scheme, "all"):
        if kind in proxies:
            return f"{kind.upper()}_PROXY", proxies[kind]
    return None


@contextmanager
def _proxies_unset() -> Iterator[None]:
    """Take the proxies out of the environment, from which the client is made."""
    taken = {}
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            taken[name] = os.environ.pop(name)
    try:
        yield
    finally:
        os.environ.update(taken)


def _bad_proxy(problem: Exception) -> LabError:
    """The LabError for proxies of the environment that the client does not take."""
    from urllib.request import getproxies

    for kind, address in getproxies().items():
        name = f"{kind.upper()}_PROXY"
        shown = _without_password(address)
        if address.startswith("socks") and isinstance(problem, ImportError):
            what = f"{name} names a SOCKS proxy, {shown}, which needs the package socksio."
            hint = f"Install it (pip install socksio), or unset {name}, or name an HTTP proxy."
            return LabError(what, hint)
    what = f"A proxy of the environment cannot be used: {_without_password(str(problem))}."
    return LabError(what, "Check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.")


# Errors


def _endpoint() -> str:
    """The hub's address. LabError if HF_ENDPOINT is invalid."""
    from huggingface_hub import constants

    endpoint: str = constants.ENDPOINT
    with suppress(ValueError):
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return endpoint
    raise _bad_endpoint(endpoint)


def _bad_endpoint(endpoint: str) -> LabError:
    what = f"HF_ENDPOINT is not a valid address: {_without_password(endpoint)!r}."
    return LabError(what, f"Unset it, or set it to {HOME}")


def _origin(url: str) -> tuple[str, str | None, int]:
    """The scheme, host and port of an address."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _without_password(text: str) -> str:
    """A text with *** in the place of the user and password of each address."""
    return re.sub(r"://[^/\s]*@", "://***@", text)


def _no_hub() -> LabError:
    what = f"The server at {_without_password(_endpoint())} is not a model hub."
    hint = "Check HF_ENDPOINT, the proxy, and whether this network requires a login in the browser."
    return LabError(what, hint)


def _rejected(problem: HfHubHTTPError, remote: HubFile) -> LabError:
    """The LabError for an error answer.

    Without a token, the hub does not tell missing repos from private ones.
    """
    from huggingface_hub import errors

    if _origin(str(problem.response.url)) != _origin(_endpoint()):
        return _bytes_refused(problem, remote)
    status = problem.response.status_code
    repo = remote.repo
    page = f"{HOME}/{repo}"
    licence = (
        f"accept the licence on {page}, create a token of that account on {HOME}/settings/tokens, "
        "set HF_TOKEN to it, and pull again."
    )
    if isinstance(problem, errors.GatedRepoError):
        what = f"{repo} is gated: downloading it requires a licence ({status})."
        return LabError(what, f"To get it, {licence}")
    if isinstance(problem, errors.RevisionNotFoundError):
        return LabError(f"{repo} has no revision {remote.revision!r}.", f"See {page}")
    if isinstance(problem, errors.EntryNotFoundError):
        what = f"{repo} has no file {remote.file!r} at revision {remote.revision!r}."
        return LabError(what, f"See {page}/tree/main")
    if "invalid credentials" in (problem.server_message or "").lower():
        what = f"The hub rejects the token in {_token_place()} ({status})."
        return LabError(what, f"Remove it or set another one. For {repo}, {licence}")
    if status == HTTPStatus.FORBIDDEN:
        return _forbidden(problem, remote)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND):
        what = f"The hub has no repo {repo}, or it is private ({status})."
        return LabError(what, f"Check the name. If it is private or gated, {licence}")
    if status in BUSY:
        return LabError(f"The hub is too busy to send {remote.label} ({status}).", PULL_LATER)
    what = f"The hub rejected the request for {remote.label} (status {status})."
    return LabError(what, f"See {page}")


def _bytes_refused(problem: HfHubHTTPError, remote: HubFile) -> LabError:
    """The LabError for an error answer of the server to which the hub redirects a download."""
    status = problem.response.status_code
    server = f"The server {problem.response.url.host}, which has the bytes for the hub,"
    if status in BUSY:
        return LabError(f"{server} is too busy to send {remote.label} ({status}).", PULL_LATER)
    what = f"{server} refuses to send {remote.label} ({status})."
    if status == HTTPStatus.NOT_FOUND:
        what = f"{server} does not have {remote.label} ({status})."
    return LabError(what, f"{PULL_LATER} If this repeats, see {HOME}/{remote.repo}")


def _forbidden(problem: HfHubHTTPError, remote: HubFile) -> LabError:
    """The LabError for an answer 403 of a repo that is not gated."""
    headers = problem.response.headers
    reason = headers.get("X-Error-Message")
    if reason:
        what = f"The hub refuses access to {remote.label} (403): {reason}"
        hint = f"See {HOME}/{remote.repo}"
        if "Authorization" in problem.response.request.headers:
            hint = (
                f"Check the rights of the token in {_token_place()} on {HOME}/settings/tokens"
            )
        return LabError(_without_password(what), hint)
    what = f"Access to {remote.label} was refused (403), without a reason of the hub."
    proxy = _proxy()
    between = f"the proxy {_without_password(proxy[1])} or " if proxy else ""
    hint = f"Ask whoever runs {between}the firewall of this network, or set HF_ENDPOINT."
    return LabError(what, hint)


def _check_token() -> None:
    """LabError for a token that a request cannot carry."""
    from huggingface_hub import get_token

    try:
        is_ascii = (get_token() or "").isascii()
    except UnicodeDecodeError:
        is_ascii = False
    if not is_ascii:
        what = f"The token in {_token_place()} has characters that are not ASCII."
        raise LabError(what, "Set it again, or remove it.")


def _token_place() -> str:
    """Where the library takes the token from."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return name
    return f"the file {constants.HF_TOKEN_PATH}"


def _disk_error(problem: OSError, remote: HubFile) -> LabError:
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


def _unreachable(problem: Exception) -> LabError:
    """The LabError for a hub that does not answer, or stops in the middle."""
    reason = f"{type(problem).__name__}: {problem}".rstrip(": .")
    through = ""
    hint = OFFLINE_HINT
    proxy = _proxy()
    if proxy:
        name, address = proxy
        through = f" through the proxy {address} ({name})"
        hint = f"Check the proxy, or unset {name}. {hint}"
    what = f"The hub ({_endpoint()}) cannot be reached{through}, or broke off: {reason}."
    return LabError(_without_password(what), hint)


def _http_error() -> type[Exception]:
    """The class of what the HTTP client raises: httpx, or httpx2 since 2.0 of the library, which
    imports the class from the one in use."""
    from huggingface_hub import errors

    error: type[Exception] = vars(errors)["HTTPError"]
    return error


@contextmanager
def _errors_explained(remote: HubFile) -> Iterator[None]:
    """Turn exceptions of the hub, the network and the disk into LabError."""
    from huggingface_hub import errors

    _endpoint()  # with an invalid one the library cannot be imported
    try:
        yield
    except errors.HfHubHTTPError as problem:
        raise _rejected(problem, remote) from None
    except errors.HFValidationError:
        what = f"{remote.repo!r} is not the name of a repo on the hub."
        raise LabError(what, "Write it as OWNER/REPO.") from None
    except json.JSONDecodeError:
        raise _no_hub() from None
    except errors.OfflineModeIsEnabled:
        what = "HF_HUB_OFFLINE forbids downloads."
        raise LabError(what, f"Unset it to pull. {OFFLINE_HINT}") from None
    except (
        _http_error(),
        ConnectionError,
        errors.LocalEntryNotFoundError,
        RuntimeError,  # Xet's
    ) as problem:
        raise _unreachable(problem) from None
    except OSError as problem:
        raise _disk_error(problem, remote) from None
