"""In a notebook: a line that says how far a measurement is, replaced in place.

Only a running Jupyter kernel gets it; a script that calls the same functions sees nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lab.runner.progress import Status, duration

ShowText = Callable[[str], None]


def line() -> ShowText:
    """A function that shows a text in place of the one that it showed before; outside a notebook it does nothing."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    if kernel is None or not kernel.ZMQInteractiveShell.initialized():
        return lambda text: None
    from IPython.display import display

    handle: list[Any] = []

    def show(text: str) -> None:
        shown = {"text/plain": text}
        if handle:
            handle[0].update(shown, raw=True)
        else:
            handle.append(display(shown, raw=True, display_id=True))  # type: ignore[no-untyped-call]

    return show


@contextmanager
def watching() -> Iterator[Callable[[Status], None]]:
    """What to call with the statuses of a measurement. The last text is how long it took."""
    show, started = line(), time.monotonic()
    n_runs = 0

    def watch(status: Status) -> None:
        nonlocal n_runs
        n_runs = status.n_runs
        left = f"; {duration(status.left_s)} left" if status.left_s is not None else ""
        show(f"{status.words}{left}")

    yield watch
    done = f"{n_runs} run{'s' * (n_runs != 1)}" if n_runs else "done"
    show(f"{done} in {duration(time.monotonic() - started)}")
