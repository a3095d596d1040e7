"""Mini-lab: see on your own machine how prefill and decode differ, token by token.

import lab
records = lab.measure("10,1000", gen=100)   # runs, with every step's time stamps
lab.runs(records)                           # DataFrame, one row a run
lab.steps(records)                          # DataFrame, one row a step
lab.plot_prefill(records)
lab.plot_decode(records)
lab.plot_sweep(lab.measure([8192], gen=16, every=512))   # both curves in one walk
lab.ab([{"threads": 1}, {"threads": 2}])    # two settings, side by side
lab.read(["results"]).records               # what earlier sessions measured
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lab.errors import LabError as LabError
from lab.measure import measure as measure  # now: later, the module of that name would hide the function

if TYPE_CHECKING:
    from lab.plot import plot_decode as plot_decode
    from lab.plot import plot_prefill as plot_prefill
    from lab.plot import plot_sweep as plot_sweep
    from lab.plot_why import plot_roofline as plot_roofline
    from lab.plot_why import plot_where as plot_where
    from lab.results import read as read
    from lab.style import plot_lines as plot_lines
    from lab.table import runs as runs
    from lab.table import steps as steps
    from lab.table import summary as summary
    from lab.trial import ab as ab

_HOMES = {
    "ab": "trial",
    "plot_lines": "style",
    "plot_roofline": "plot_why",
    "plot_where": "plot_why",
    "plot_decode": "plot",
    "plot_prefill": "plot",
    "plot_sweep": "plot",
    "read": "results",
    "runs": "table",
    "steps": "table",
    "summary": "table",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    """Import on first use, so that `lab --help` loads neither pandas nor matplotlib."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    return getattr(import_module(f"lab.{_HOMES[name]}"), name)
