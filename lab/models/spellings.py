"""The ways in which people write a model of the hub, or of Ollama's library.

The hub's own addresses, llama.cpp's -hf OWNER/REPO:TAG, Ollama's hf.co/OWNER/REPO:TAG and its
library's NAME:TAG, LM Studio's OWNER/REPO@TAG, and the lab's hf:OWNER/REPO/FILE.gguf@REVISION.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote

from lab.errors import LabError
from lab.models.candidates import is_tag

HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co", "hf-mirror.com")
OLLAMA_HOSTS = ("ollama.com", "www.ollama.com", "registry.ollama.ai")
NO_REPOS = ("api", "blog", "collections", "datasets", "docs", "models", "papers", "spaces")
"""First words of the hub's pages that are no models."""
HOW = (
    "Write hf:OWNER/REPO:Q4_K_M, hf:OWNER/REPO/FILE.gguf or hf:OWNER/REPO/FILE.gguf@REVISION."
)

_NAME = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_BARE = re.compile(rf"{_NAME}/{_NAME}(?:/[^:@]+\.gguf)?(?:[:@].+)?", re.IGNORECASE)
_PREFIX = re.compile(r"(?:hf|huggingface)://?|hf:|-{1,2}hf(?:r|-repo)?[ =]+", re.IGNORECASE)


@dataclass(frozen=True)
class HubName:
    """A model of the hub as it was written: its repo, and what was said of the file."""

    repo: str
    file: str | None = None
    tag: str | None = None
    revision: str = "main"
    takes_usual: bool = False
    """Whether the repo alone means one of its models, as to the tools with this spelling."""


def hub_name(text: str) -> HubName | None:
    """The model of the hub that a text names; None if it names none. LabError for half a name.

    OWNER/REPO without a prefix may be a folder too, so `bare_hub_name` reads it.
    """
    remaining = text.strip()
    prefix = _PREFIX.match(remaining)
    while match := _PREFIX.match(remaining):
        remaining = remaining[match.end() :].strip()
    address = _hub_address(remaining)
    if address is not None:
        return _of_address(text, address)
    if prefix is None:
        return None
    name = _of_words(text, remaining)
    is_ours = prefix[0].lower() == "hf:"
    return name if is_ours else _with_usual(name)


def bare_hub_name(text: str) -> HubName | None:
    """The model that OWNER/REPO, with a file or a tag, names; None for another text."""
    text = text.strip()
    is_path = re.fullmatch(rf"{_NAME}/[^/:@]+\.gguf", text, re.IGNORECASE)
    if is_path or not _BARE.fullmatch(text):
        return None
    return _with_usual(_of_words(text, text))


def ollama_name(text: str) -> str | None:
    """A name of Ollama's library at its address there; None for another text."""
    host, _, path = re.sub(r"^https?://", "", text.strip()).partition("/")
    if host.lower() in OLLAMA_HOSTS:
        return path.removeprefix("library/").strip("/")
    return path if host == "library" else None


def _with_usual(name: HubName) -> HubName:
    is_repo_alone = name.file is None and name.tag is None
    return HubName(name.repo, name.file, name.tag, name.revision, is_repo_alone)


def _hub_address(text: str) -> str | None:
    """The part of a hub's address after the host; None for another text. LabError elsewhere."""
    scheme = re.match(r"https?://", text, re.IGNORECASE)
    host, slash, path = text[scheme.end() if scheme else 0 :].partition("/")
    host = host.lower()
    own_hub = os.environ.get("HF_ENDPOINT", "").lower().partition("://")[2].partition("/")[0]
    if slash and (host in HUB_HOSTS or (scheme and host == own_hub)):
        return path
    if scheme and host not in OLLAMA_HOSTS:
        what = f"{text} is not an address of the hub."
        raise LabError(
            what, "Download the file, and give its path. Or name a hub in HF_ENDPOINT."
        )
    return None


def _of_address(text: str, address: str) -> HubName:
    """The model at an address of the hub, without its host: a repo's page, or a file's."""
    path, _, query = address.partition("#")[0].partition("?")
    names = [unquote(name) for name in path.strip("/").split("/")]
    if len(names) < 2 or names[0] in NO_REPOS:
        raise LabError(f"{text} is not the address of a model on the hub.", HOW)
    shown = parse_qs(query).get("show_file_info")
    if len(names) < 4 or names[2] not in ("blob", "resolve", "raw", "tree"):
        name = _with_usual(_of_words(text, "/".join(names)))
        return HubName(name.repo, shown[0]) if shown else name
    n_revision = 3 if names[3] == "refs" else 1  # refs/pr/1
    revision = "/".join(names[3 : 3 + n_revision])
    file = "/".join(names[3 + n_revision :])
    repo = "/".join(names[:2])
    if file.lower().endswith(".gguf"):
        return HubName(repo, file, revision=revision)
    if file and names[2] != "tree":
        raise _not_a_model(file)
    if file:
        return HubName(repo, tag=names[-1], revision=revision)
    return HubName(repo, revision=revision, takes_usual=True)


def _of_words(text: str, words: str) -> HubName:
    """The model that OWNER/REPO, OWNER/REPO/FILE.gguf, with :TAG and @REVISION name."""
    path, _, after_at = words.partition("@")
    path, _, tag = path.partition(":")
    names = path.strip("/").split("/")
    repo = "/".join(names[:2])
    file = "/".join(names[2:])
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise LabError(f"{text!r} is not a model on the hub.", HOW)
    if tag.lower() == "latest":
        tag = ""
    if tag.lower().endswith(".gguf"):
        return HubName(repo, tag, revision=after_at or "main")
    if not file and not tag and is_tag(after_at):  # as LM Studio writes it
        return HubName(repo, tag=after_at)
    if is_tag(file):
        return HubName(repo, tag=file, revision=after_at or "main")
    if file and not file.lower().endswith(".gguf"):
        raise _not_a_model(file)
    return HubName(repo, file or None, tag or None, after_at or "main")


def _not_a_model(file: str) -> LabError:
    return LabError(f"{file} is not a model file: llama.cpp reads .gguf files.", HOW)
