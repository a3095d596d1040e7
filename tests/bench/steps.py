"""Commands of the lab with the exit status and the words that each should end with: what benchmarks of paths run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

Step = tuple[Callable[[], tuple[int, str]], int, str]
"""What is run (it returns its exit status and all that it printed), the status that it should have, and words of it."""


def walk(steps: dict[str, Step], wanted: Collection[str], report: Path) -> None:
    """Run the steps that are wanted (all of them without any), print a line for each, and exit.

    A step that went otherwise than it should shows all that it printed; the exit status is 1 then. `report` is the JSON
    file of how each went.
    """
    told: dict[str, Any] = {}
    for name, (run, wanted_status, words) in steps.items():
        if wanted and name not in wanted:
            continue
        started = time.monotonic()
        status, text = run()
        is_as_wanted = status == wanted_status and words in text and "Traceback" not in text
        seconds = time.monotonic() - started
        told[name] = {"is_as_wanted": is_as_wanted, "status": status, "seconds": round(seconds)}
        print(f"{'ok   ' if is_as_wanted else 'WRONG'} {name:20} {seconds:4.0f} s, exit status {status}", flush=True)
        if not is_as_wanted:
            print(text)
    report.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(not all(one["is_as_wanted"] for one in told.values()))
