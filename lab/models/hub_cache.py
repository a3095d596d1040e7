"""The hub's cache on this disk: what is whole, what has a name, what an interrupted download left.

The layout is huggingface_hub's documented one, shared with people's other tools: a repo's folder holds the bytes in
`blobs/SHA256`, names that link to them in `snapshots/COMMIT/FILE`, and in `refs/REVISION` the commit of a branch or
tag. Nothing here asks the network. A download in parts grows in a file of the lab's own beside the blobs, and gets
a name only when its bytes have the right sum.
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
    """A whole file in the cache; `revision` is its commit, `sha256` is None where its name does not tell it."""

    path: Path
    revision: str
    sha256: str | None


@dataclass(frozen=True)
class Slot:
    """Where one file of one commit belongs."""

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


def cached(remote: Remote) -> Pulled | None:
    """What is whole in the cache, without asking the network or reading the file. Raises LabError."""
    check(remote)
    try:
        name = find(remote)
        blob = target(name) if name else None
    except OSError as problem:
        raise unusable(problem) from None
    if name is None or blob is None:
        return None
    sha256 = as_sha256(blob.name)
    if remote.sha256 and sha256 and sha256 != remote.sha256.lower():
        return None
    return Pulled(name, name.parents[remote.file.count("/")].name, sha256)


def root() -> Path:
    """The cache's folder; unlike in huggingface_hub the environment is read at every call."""
    env = os.environ
    caches = env.get("XDG_CACHE_HOME") or "~/.cache"
    home = env.get("HF_HOME") or f"{caches}/huggingface"
    path = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(path)).expanduser().absolute()


def folder(repo: str) -> Path:
    """Where a repo's files are."""
    return root() / "--".join(["models", *repo.split("/")])


def names(repo: str) -> list[str]:
    """The .gguf files of a repo that have a name here, in whatever revision."""
    snapshots = folder(repo) / "snapshots"
    return sorted({"/".join(path.relative_to(snapshots).parts[1:]) for path in snapshots.glob("*/**/*.gguf")})


def find(remote: Remote) -> Path | None:
    """The file's name in the cache, None where it has none. Raises OSError."""
    ref = folder(remote.repo) / "refs" / remote.revision
    commit = ref.read_text().strip() if ref.is_file() else remote.revision
    name = folder(remote.repo) / "snapshots" / commit / remote.file
    return name if name.is_file() else None


def target(name: Path) -> Path:
    """The blob that a name links to; the name itself where the system has no links."""
    return Path(os.path.normpath(name.parent / name.readlink())) if name.is_symlink() else name


def slot(remote: Remote, commit: str, etag: str) -> Slot:
    """The place of a file that the hub announces."""
    base = folder(remote.repo)
    return Slot(
        name=base / "snapshots" / commit / remote.file,
        blob=base / "blobs" / etag,
        partial=base / "blobs" / (etag + PARTIAL),
        ref=base / "refs" / remote.revision if remote.revision != commit else None,
        lock=base.parent / ".locks" / base.name / f"{etag}.lock",
    )


def checked_sha256(remote: Remote, path: Path, announced: str | None, n_bytes: int | None) -> str:
    """A file's sha256. Raises LabError, and deletes the file, where it is not the announced or the expected one."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    wanted = announced or (remote.sha256 or sha256).lower()
    if sha256 == wanted and n_bytes in (None, size):
        return sha256
    drop(remote.repo, path)
    raise LabError(
        f"{remote.file} of {remote.repo} came with wrong bytes: {size:,} bytes with sha256 {sha256} instead of "
        f"{size if n_bytes is None else n_bytes:,} with {wanted}. The file was deleted.",
        "Pull it again. If this repeats, something on the way (a proxy, a mirror) changes the file.",
    )


def settle(place: Slot, commit: str) -> None:
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
        fresh.write_text(commit)
        fresh.replace(place.ref)


def drop(repo: str, path: Path) -> int:
    """Delete a blob or a partial file, after every name that links to it; the bytes freed. Raises OSError."""
    for name in (folder(repo) / "snapshots").rglob("*"):
        if name.is_symlink() and target(name) == path:
            name.unlink()
    n_bytes = path.lstat().st_size
    path.unlink()
    return n_bytes


def check_space(remote: Remote, place: Slot, n_bytes: int | None) -> None:
    """Raises LabError where the disk has no room for what is missing of `n_bytes`."""
    if (n_bytes or 0) - place.n_partial > shutil.disk_usage(place.partial.parent).free:
        raise full(remote, place, n_bytes)


def full(remote: Remote, place: Slot, n_bytes: int | None) -> LabError:
    """The disk has no room for what is missing of `n_bytes`."""
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
