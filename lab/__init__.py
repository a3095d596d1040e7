"""Mini-lab: see on your own machine how prefill and decode differ, token by token.

What people use is named here, and nowhere else:

    import lab
    records = lab.measure("10,1000", gen=100)   # runs, with a time stamp for every step
    lab.runs(records)                           # DataFrame, one row a run
    lab.plot_decode(records)

A small base (`core`, `process`, `engine`, `models`, `runner`, `show`, `cli`) carries the features, each in a room of
its own (`features`). lab/README.md explains both.
"""

import ast
import functools
import itertools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.errors import LabError as LabError

if TYPE_CHECKING:
    from lab.core.results import read as read
    from lab.features.batch import batch as batch
    from lab.features.claims.session import claims as claims
    from lab.show.comparison import compare as compare
    from lab.runner.trial import ab as ab
    from lab.features.ceilings import ceilings as ceilings
    from lab.features.explain.picture import plot_roofline as plot_roofline
    from lab.features.measure.measuring import measure as measure, sweep as sweep
    from lab.show.plot_runs import (
        plot_decode as plot_decode,
        plot_prefill as plot_prefill,
        plot_shares as plot_shares,
        plot_sweep as plot_sweep,
    )
    from lab.features.report import report as report
    from lab.features.predict.picture import plot_requests as plot_requests
    from lab.features.predict.prediction import predict as predict
    from lab.features.quant.comparing import quant as quant, quant_table as quant_table
    from lab.features.speculate.speculation import speculate as speculate
    from lab.features.stall import stall as stall
    from lab.features.trace.token_trace import attention as attention, trace as trace
    from lab.features.tune.result import plot_tuned as plot_tuned, show_tuned as show_tuned
    from lab.features.tune.tuning import tune as tune
    from lab.features.turns import turns as turns
    from lab.features.why.reasons import why as why
    from lab.roofline.explanation import explain as explain
    from lab.runner.as_options import settings as settings
    from lab.show.canvas import plot_lines as plot_lines
    from lab.show.table import runs as runs, steps as steps, summary as summary


@functools.cache
def _modules() -> dict[str, str]:
    """The module of each name, from the imports above: type checkers follow them, and nothing else says the names."""
    source = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    blocks = (block.body for block in source.body if isinstance(block, ast.If))
    imports = (node for node in itertools.chain(*blocks) if isinstance(node, ast.ImportFrom))
    return {name.name: str(node.module) for node in imports for name in node.names}


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


def __getattr__(name: str) -> Any:
    """Import on first use, so that `lab --help` loads neither pandas nor matplotlib."""
    if name not in _modules():
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    return getattr(import_module(_modules()[name]), name)
