"""Measure how much results vary between sessions of this machine, with short sessions of one setup.

An interval within a session does not show what changes from one session to the next. So the lab runs a few sessions
with new engines and pauses between them, and keeps them in a separate folder next to the results. From these (and all
other sessions of equal setup) `lab compare` derives how large a difference must be to count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from lab.core import results
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.core.results import Contents
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner import session
from lab.runner.cases import Plan
from lab.runner.progress import ShowStatus, duration

FOLDER = "repeatability"
LENGTHS, N_GEN, N_REPEAT = "16,256", 32, 3
FEWEST_SESSIONS = 4
MOST_NEARBY = 50_000_000
"""Maximum bytes read of other sessions."""


def check(n_sessions: int, pause_s: float) -> None:
    """LabError for invalid numbers."""
    if not FEWEST_SESSIONS <= n_sessions <= 1000:
        raise LabError(
            f"--sessions {n_sessions} is not possible.",
            f"Give {FEWEST_SESSIONS} to 1,000: fewer do not show how much sessions differ.",
        )
    if not 0 <= pause_s <= 86_400:
        raise LabError(f"--pause {pause_s:g} is not possible.", "Give seconds, from 0 to 86,400.")


def execute(
    plan: Plan,
    worker: Worker,
    folder: Path,
    n_sessions: int,
    pause_s: float,
    watch: ShowStatus,
    report: Callable[[str], None],
    why_not: Callable[[Sequence[Record]], str],
) -> Iterator[Record]:
    """Run the sessions, each into a file in `folder`/repeatability, and yield their records.

    `why_not` returns why a session does not count, or "". LabError as soon as too few can count.
    """
    check(n_sessions, pause_s)
    n_good = 0
    for number in range(1, n_sessions + 1):
        if number > 1:
            report(f"pause of {duration(pause_s)}")
            time.sleep(pause_s)
            worker.restart()
        records = list[Record]()
        for record in session.execute(plan, worker, session.new_results_file(plan, folder / FOLDER), watch):
            records.append(record)
            yield record
        problem = why_not(records)
        n_good += not problem
        report(f"session {number} of {n_sessions} is done{f' and does not count: {problem}' if problem else ''}")
        if n_good + n_sessions - number < FEWEST_SESSIONS:
            raise LabError(
                f"{number - n_good} of {number} sessions do not count, so at most {n_good + n_sessions - number} of "
                f"{n_sessions} can; {FEWEST_SESSIONS} are needed.",
                "Close other programs and run lab repeatability again: the sessions that count are kept.",
            )


def nearby(folders: Iterable[Path], measured: Iterable[Record | RequestRecord] = (), holding: bytes = b"") -> Contents:
    """The results in these folders and their folders `repeatability`, except the sessions of `measured`.

    They show how much sessions differ. Reads at most MOST_NEARBY bytes, the newest files first; skips unreadable
    files, and those that do not contain `holding`.
    """
    known, contents = {one.session for one in measured}, list(_nearby(folders, holding))
    return Contents(
        records=tuple(one for each in contents for one in each.records if one.session not in known),
        ceilings=tuple(one for each in contents for one in each.ceilings),
        requests=tuple(one for each in contents for one in each.requests if one.session not in known),
        skipped=(),
    )


def _nearby(folders: Iterable[Path], holding: bytes) -> Iterator[Contents]:
    paths = [path for folder in folders for path in (*folder.glob("*.jsonl"), *(folder / FOLDER).glob("*.jsonl"))]
    n_bytes = 0
    newest_first = sorted(filter(Path.is_file, paths), key=lambda path: path.name, reverse=True)  # names: times
    for path in newest_first:
        with contextlib.suppress(OSError, LabError):  # the user did not name this file, so errors do not matter
            n_bytes += path.stat().st_size
            if n_bytes > MOST_NEARBY:
                break
            if holding in path.read_bytes():
                yield results.read([path])
