"""What the hub's refusals mean, what could have been meant instead, and what to do next.

The hub says little: a status, and sometimes an error code. A repo that is not there and one that is private look the
same to a stranger (401); a gated one wants a licence click on its page. A wrong name is answered with close ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lab.errors import LabError
from lab.models.hub_cache import Remote

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

HOME = "https://huggingface.co"
BUSY = frozenset({408, 429, 500, 502, 503, 504})
OFFLINE_HINT = (
    "Without a network, measure the embedded model (smollm2-135m), a synthetic one (synthetic:NAME:QUANT) "
    "or a file on disk (--model PATH.gguf)."
)

Listed = Callable[[str], Any]
"""The hub's JSON for a path below its list of models, None where it gives none."""


class Unreachable(LabError):
    """There is no way to the hub now, or it is too busy."""


def refused(problem: HfHubHTTPError, remote: Remote, listed: Listed) -> LabError:
    """The error for a user of an answer that is an error; `listed` is asked for names that are close."""
    from huggingface_hub import errors

    response, repo, page = problem.response, remote.repo, f"{HOME}/{remote.repo}"
    status: int = response.status_code
    licence = (
        f"accept the licence on {page}, make a token of that account on {HOME}/settings/tokens, "
        "set HF_TOKEN to it, and pull again."
    )
    if isinstance(problem, errors.GatedRepoError) or status == 403:
        return LabError(f"{repo} is gated: the hub does not give it to everyone ({status}).", f"To get it, {licence}")
    if isinstance(problem, errors.RevisionNotFoundError):
        refs = listed(f"/{repo}/refs")
        names = _column(refs, "branches", "name") + _column(refs, "tags", "name")
        return LabError(f"{repo} has no revision {remote.revision!r}.", _offer(remote.revision, names) or f"See {page}")
    if isinstance(problem, errors.EntryNotFoundError):
        offer = _offer(remote.file, ggufs(listed(files_of(remote)))) or f"See {page}"
        return LabError(f"{repo} has no file {remote.file!r} at revision {remote.revision!r}.", offer)
    if "invalid credentials" in (problem.server_message or "").lower():
        return LabError(f"The hub does not know the token in HF_TOKEN ({status}).", f"Unset it. For {repo}, {licence}")
    if status in (401, 404):
        owner = quote(repo.split("/")[0])
        offer = _offer(repo, _column({"repos": listed(f"?author={owner}&limit=500")}, "repos", "id"))
        hint = f"{offer} If it is private or gated, {licence}".strip()
        return LabError(f"The hub has no repo {repo}, or does not show it to everyone ({status}).", hint)
    if status in BUSY:
        asked = response.headers.get("Retry-After")
        when = f"It asks to wait {asked} s. " if asked else ""
        return Unreachable(
            f"The hub is too busy to give {remote.file} of {repo} (status {status}, several times).",
            f"{when}Pull it again later: it goes on from where it is. {OFFLINE_HINT}",
        )
    return LabError(f"The hub refuses {remote.file} of {repo} (status {status}).", f"See {page}")


def another_file(remote: Remote, announced: str) -> LabError:
    """The hub announces another sha256 than the catalog names."""
    return LabError(
        f"{remote.file} of {remote.repo} is not the file that the catalog names: the hub announces sha256 {announced}, "
        f"the catalog {remote.sha256}. Nothing was downloaded.",
        "The repo has changed: name a revision that holds the old file, or mend the catalog.",
    )


def broke_off(remote: Remote, n_done: int, n_bytes: int | None, problem: Exception) -> Unreachable:
    """A download that no retry could help: bytes here, bytes of the whole."""
    whole = f" of {n_bytes:,}" if n_bytes is not None else ""
    return Unreachable(
        f"The download of {remote.file} broke off at {n_done:,}{whole} bytes, and trying again brought no more: "
        f"{_named(problem)}.",
        f"Pull it again later: it goes on from there. {OFFLINE_HINT}",
    )


def no_way(endpoint: str, problem: Exception) -> Unreachable:
    """No connection to the hub at all."""
    return Unreachable(f"The hub ({endpoint}) cannot be reached: {_named(problem)}.", OFFLINE_HINT)


def no_hub(endpoint: str) -> LabError:
    """Something answers at the hub's address that is not a hub."""
    return LabError(
        f"What answers at {endpoint} is not a hub.",
        "Check HF_ENDPOINT, the proxy, and whether this network wants a login in the browser.",
    )


def files_of(remote: Remote) -> str:
    """The path of a revision's list of files."""
    return f"/{remote.repo}/revision/{quote(remote.revision, safe='')}"


def ggufs(info: Any) -> list[str]:
    """The .gguf files in the hub's description of a revision, sorted."""
    return sorted(name for name in _column(info, "siblings", "rfilename") if name.lower().endswith(".gguf"))


def _column(info: Any, rows: str, name: str) -> list[str]:
    """One field of a table in JSON; nothing where the hub sent something else."""
    table = info.get(rows) if isinstance(info, dict) else None
    return [str(row[name]) for row in table if isinstance(row, dict) and name in row] if isinstance(table, list) else []


def _offer(wanted: str, names: list[str]) -> str:
    """The names that are close to the wanted one, else some names."""
    by_lower = {name.lower(): name for name in names if name != wanted}
    close = [by_lower[name] for name in difflib.get_close_matches(wanted.lower(), by_lower, n=3, cutoff=0.5)]
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"There are: {', '.join(names[:8])}{' ...' if len(names) > 8 else '.'}" if by_lower else ""


def _named(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".rstrip(": .")
