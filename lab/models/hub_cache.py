"""The hub's cache on this disk: which files are whole, and where a download grows until it is.

The layout is huggingface_hub's documented one, shared with other tools: a repo's folder holds the bytes in
`blobs/SHA256`, links to them in `snapshots/COMMIT/FILE`, and in `refs/REVISION` the commit of a branch or tag. The
library finds and deletes files. It has no way to put a file in that it did not download, so `settle` does that.
Nothing here asks the network.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError

PARTIAL = ".mini-lab.incomplete"
"""How partial files end: `hf cache prune` knows the last part, and no other tool writes to the name."""

NO_SPACE = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


@dataclass(frozen=True)
class Remote:
    """A file on the hub; `sha256` and `n_bytes` are what the catalog expects, None where it does not say."""

    repo: str
    file: str
    revision: str = "main"
    sha256: str | None = None
    n_bytes: int | None = None


@dataclass(frozen=True)
class Pulled:
    """A whole file in the cache; `revision` is its commit, `sha256` is None where its blob has another name."""

    path: Path
    revision: str
    sha256: str | None


@dataclass(frozen=True)
class Slot:
    """What the hub announces of a file before its first byte, and the file's places in the cache."""

    url: str
    commit: str
    sha256: str | None
    n_bytes: int | None
    name: Path
    blob: Path
    partial: Path
    ref: Path | None
    lock: Path

    @property
    def n_partial(self) -> int:
        """Bytes that an earlier download left."""
        return self.partial.stat().st_size if self.partial.exists() else 0


def check(remote: Remote) -> None:
    """Raises LabError where a name would lead out of the cache."""
    for what, path in (("repo", remote.repo), ("file", remote.file), ("revision", remote.revision)):
        if {"", ".", ".."} & set(path.split("/")) or re.search(r"[\\:\x00-\x1f]", path):
            raise LabError(f"{path!r} is not the name of a {what} on the hub.", "Write it as hf:OWNER/REPO/FILE.gguf")


def root() -> Path:
    """The cache's folder, without links in it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).resolve()


def folder(repo: str) -> Path:
    """The folder of a repo's files."""
    return root() / "--".join(["models", *repo.split("/")])


def names(repo: str) -> list[str]:
    """The .gguf files of a repo that have a name here, in whatever revision."""
    snapshots = folder(repo) / "snapshots"
    return sorted({"/".join(path.relative_to(snapshots).parts[1:]) for path in snapshots.glob("*/**/*.gguf")})


def find(remote: Remote) -> Pulled | None:
    """The whole file in the cache, None where there is none; the file is not read. Raises OSError."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(remote.repo, remote.file, root(), remote.revision)
    if not isinstance(path, str):
        return None
    name = Path(path)
    sha256 = as_sha256(blob_of(name).name)
    if remote.sha256 and sha256 and sha256 != remote.sha256.lower():
        return None
    return Pulled(name, name.parents[remote.file.count("/")].name, sha256)


def blob_of(name: Path) -> Path:
    """The blob that a name links to; the name itself where the system has no links."""
    return Path(os.path.normpath(name.parent / name.readlink())) if name.is_symlink() else name


def slot(remote: Remote, commit: str, etag: str, url: str = "", n_bytes: int | None = None) -> Slot:
    """The places of a file that the hub announces."""
    base = folder(remote.repo)
    return Slot(
        url=url,
        commit=commit,
        sha256=as_sha256(etag),
        n_bytes=n_bytes,
        name=base / "snapshots" / commit / remote.file,
        blob=base / "blobs" / etag,
        partial=base / "blobs" / (etag + PARTIAL),
        ref=base / "refs" / remote.revision if remote.revision != commit else None,
        lock=base.parent / ".locks" / base.name / f"{etag}.lock",
    )


def checked_sha256(remote: Remote, path: Path, place: Slot) -> str:
    """The sha256 of the file at `path`. Where it is not the one announced or expected: deletes it, raises LabError."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    wanted = place.sha256 or (remote.sha256 or sha256).lower()
    if sha256 == wanted and place.n_bytes in (None, size):
        return sha256
    drop(path)
    raise LabError(
        f"{remote.file} of {remote.repo} came with wrong bytes: {size:,} bytes with sha256 {sha256} instead of "
        f"{size if place.n_bytes is None else place.n_bytes:,} with {wanted}. The file was deleted.",
        "Pull it again. If this repeats, something on the way (a proxy, a mirror) changes the file.",
    )


def settle(place: Slot) -> None:
    """Give a checked file its names; the partial file becomes the blob. Raises OSError."""
    if not place.blob.exists() and not place.name.exists():
        place.partial.replace(place.blob)
    if not place.name.exists():
        place.name.unlink(missing_ok=True)  # a link to nothing
        try:
            place.name.symlink_to(os.path.relpath(place.blob, place.name.parent))
        except OSError:  # Windows without the right to make links: the file itself moves, as in huggingface_hub
            place.blob.replace(place.name)
    place.partial.unlink(missing_ok=True)  # where another tool was quicker
    if place.ref:
        place.ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.ref.with_name(f"{place.ref.name}.{os.getpid()}.tmp")
        fresh.write_text(place.commit, encoding="utf-8")
        fresh.replace(place.ref)


def drop(blob: Path) -> int:
    """Delete a blob of the cache, after every name that links to it; the bytes freed. Raises OSError."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(root())
    files = (file for repo in cache.repos for revision in repo.revisions for file in revision.files)
    plan = cache.delete_files(*(file for file in files if file.blob_path == blob))
    plan.execute()
    if not blob.exists():
        return plan.expected_freed_size
    n_bytes = blob.stat().st_size  # without a name, or in a repo with a broken link, which the library does not list
    blob.unlink()
    return n_bytes


def check_space(remote: Remote, place: Slot) -> None:
    """Raises LabError where the disk has no room for what is missing of the file."""
    n_bytes = place.n_bytes or remote.n_bytes or 0
    if n_bytes - place.n_partial > shutil.disk_usage(place.partial.parent).free:
        raise full(remote, place)


def full(remote: Remote, place: Slot) -> LabError:
    """The disk has no room for what is missing of the file."""
    n_bytes = place.n_bytes or remote.n_bytes
    needed = f"{n_bytes - place.n_partial:,} more bytes are" if n_bytes else "more is"
    free = shutil.disk_usage(place.partial.parent).free
    return LabError(
        f"The disk is too full for {remote.file}: {needed} needed in {root()}, {free:,} bytes are free.",
        "Free some space there, or set HF_HOME to a folder on another disk. What has come so far is kept.",
    )


def unusable(problem: OSError) -> LabError:
    """The cache's folder cannot be read or written."""
    where = problem.filename or root()
    return LabError(
        f"The hub's cache cannot be used: {problem.strerror or problem} ({where}).",
        "Check its permissions, or set HF_HOME to another folder.",
    )


def as_sha256(text: str) -> str | None:
    """`text` if it is a sha256: files that git itself keeps have a shorter name."""
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else None
