"""The hub's cache on this disk: complete files and partial downloads. Does not use the network.

The layout is huggingface_hub's documented one, shared with other tools: a repo's folder has the bytes in
`blobs/SHA256`, links to them in `snapshots/COMMIT/FILE`, and the commit of a branch or tag in `refs/REVISION`. The
library finds and deletes files, but cannot add a file that it did not download; `settle` does that.
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
"""Suffix of partial files: `hf cache prune` knows .incomplete, and no other tool writes to this name."""

NO_SPACE = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


@dataclass(frozen=True)
class Remote:
    """A file on the hub; `sha256` and `n_bytes` are the catalog's, None if it has none."""

    repo: str
    file: str
    revision: str = "main"
    sha256: str | None = None
    n_bytes: int | None = None


@dataclass(frozen=True)
class Pulled:
    """A complete file in the cache; `revision` is its commit, `sha256` is None if its blob has another name."""

    path: Path
    revision: str
    sha256: str | None


@dataclass(frozen=True)
class Slot:
    """The hub's metadata of a file, and the file's paths in the cache."""

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
        """Bytes of the partial file."""
        return self.partial.stat().st_size if self.partial.exists() else 0


def check(remote: Remote) -> None:
    """LabError for a name that would lead outside the cache."""
    for what, path in (("repo", remote.repo), ("file", remote.file), ("revision", remote.revision)):
        if {"", ".", ".."} & set(path.split("/")) or re.search(r"[\\:\x00-\x1f]", path):
            raise LabError(f"{path!r} is not the name of a {what} on the hub.", "Write it as hf:OWNER/REPO/FILE.gguf")


def root() -> Path:
    """The cache's folder, with links resolved."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).resolve()


def folder(repo: str) -> Path:
    """The folder of a repo's files."""
    return root() / "--".join(["models", *repo.split("/")])


def names(repo: str) -> list[str]:
    """The .gguf files of a repo in the cache, of any revision."""
    snapshots = folder(repo) / "snapshots"
    return sorted({"/".join(path.relative_to(snapshots).parts[1:]) for path in snapshots.glob("*/**/*.gguf")})


def find(remote: Remote) -> Pulled | None:
    """The complete file in the cache, if any; does not read it. Raises OSError."""
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
    """The blob that a name links to, or the name itself if it is not a link."""
    return Path(os.path.normpath(name.parent / name.readlink())) if name.is_symlink() else name


def slot(remote: Remote, commit: str, etag: str, url: str = "", n_bytes: int | None = None) -> Slot:
    """The paths of a file with this metadata."""
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
    """The sha256 of the file at `path`. If it is not the announced or expected one, deletes the file; LabError."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    wanted = place.sha256 or (remote.sha256 or sha256).lower()
    if sha256 == wanted and place.n_bytes in (None, size):
        return sha256
    drop(path)
    raise LabError(
        f"{remote.file} of {remote.repo} arrived damaged: {size:,} bytes with sha256 {sha256} instead of "
        f"{size if place.n_bytes is None else place.n_bytes:,} with {wanted}. The lab deleted the file.",
        "Pull it again. If this repeats, a proxy or mirror changes the file.",
    )


def settle(place: Slot) -> None:
    """Move a checked partial file to its blob, and create its names. Raises OSError."""
    if not place.blob.exists() and not place.name.exists():
        place.partial.replace(place.blob)
    if not place.name.exists():
        place.name.unlink(missing_ok=True)  # a dangling link
        try:
            place.name.symlink_to(os.path.relpath(place.blob, place.name.parent))
        except OSError:  # Windows without the right to create links: move the file, as in huggingface_hub
            place.blob.replace(place.name)
    place.partial.unlink(missing_ok=True)  # if another tool was faster
    if place.ref:
        place.ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.ref.with_name(f"{place.ref.name}.{os.getpid()}.tmp")
        fresh.write_text(place.commit, encoding="utf-8")
        fresh.replace(place.ref)


def drop(blob: Path) -> int:
    """Delete a blob of the cache with every name that links to it. Returns the bytes freed. Raises OSError."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(root())
    files = (file for repo in cache.repos for revision in repo.revisions for file in revision.files)
    plan = cache.delete_files(*(file for file in files if file.blob_path == blob))
    plan.execute()
    if not blob.exists():
        return plan.expected_freed_size
    n_bytes = blob.stat().st_size  # the library misses blobs without a name, or in a repo with a broken link
    blob.unlink()
    return n_bytes


def check_space(remote: Remote, place: Slot) -> None:
    """LabError if the disk has too little space for the rest of the file."""
    n_bytes = place.n_bytes or remote.n_bytes or 0
    if n_bytes - place.n_partial > shutil.disk_usage(place.partial.parent).free:
        raise full(remote, place)


def full(remote: Remote, place: Slot) -> LabError:
    """The error for a full disk."""
    n_bytes = place.n_bytes or remote.n_bytes
    needed = f"{n_bytes - place.n_partial:,} more bytes" if n_bytes else "more space"
    free = shutil.disk_usage(place.partial.parent).free
    return LabError(
        f"The disk is too full for {remote.file}: it needs {needed} in {root()}; {free:,} bytes are free.",
        "Free some space there, or set HF_HOME to a folder on another disk. The partial download is kept.",
    )


def unusable(problem: OSError) -> LabError:
    where = problem.filename or root()
    return LabError(
        f"The hub's cache cannot be used: {problem.strerror or problem} ({where}).",
        "Check its permissions, or set HF_HOME to another folder.",
    )


def as_sha256(text: str) -> str | None:
    """`text` if it is a sha256. Blobs of files in git itself have shorter names."""
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else None
