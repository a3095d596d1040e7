"""How much this machine differs from itself: short sessions of one setup, spread over minutes.

No interval within a session can show what changes from one session to the next. So a few sessions are made, each in
fresh engines, with pauses between them, and kept in a folder of their own next to the results. `lab compare` learns
from them (and from all other sessions of equal setup) how large a difference must be to be claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lab.core.record import Record
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner.plan import Plan
from lab.runner.progress import ShowStatus, duration
from lab.runner.session import execute, new_results_file

FOLDER = "calibration"
LENGTHS, N_GEN, N_REPEAT = "16,256", 32, 3
FEWEST_SESSIONS = 4


def check(n_sessions: int, pause_s: float) -> None:
    """LabError for numbers that make no calibration."""
    if not FEWEST_SESSIONS <= n_sessions <= 1000:
        raise LabError(
            f"--sessions {n_sessions} is not possible.",
            f"Give {FEWEST_SESSIONS} to 1,000: fewer do not show how much sessions differ.",
        )
    if not 0 <= pause_s <= 86_400:
        raise LabError(f"--pause {pause_s:g} is not possible.", "Give seconds, from 0 to 86,400.")


def calibrate(
    plan: Plan,
    worker: Worker,
    folder: Path,
    n_sessions: int,
    pause_s: float,
    watch: ShowStatus,
    report: Callable[[str], None],
) -> Iterator[Record]:
    """Make the sessions in `folder`/calibration, a file each, and yield their records as they are made."""
    check(n_sessions, pause_s)
    for number in range(n_sessions):
        if number:
            report(f"session {number} of {n_sessions} is done; {duration(pause_s)} pause")
            time.sleep(pause_s)
            worker.restart()
        yield from execute(plan, worker, new_results_file(plan, folder / FOLDER), watch)
