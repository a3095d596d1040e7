"""Mini-lab: see on your own machine how prefill and decode differ, token by token.

What people use is named here, and nowhere else:

    import lab
    records = lab.measure("10,1000", gen=100)   # runs, with a time stamp for every step
    lab.runs(records)                           # DataFrame, one row a run
    lab.plot_decode(records)

The folders below are the wings of the lab, read from top to bottom: `cli`, `features`, `show`, `experiments`, `why`,
`drawing`, `analysis`, `runner`, `models`, `endpoints`, `engine`, `process`, `core`. lab/README.md draws them.
"""

import ast
import functools
import itertools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.errors import LabError as LabError

if TYPE_CHECKING:
    from lab.analysis.comparison import compare as compare
    from lab.analysis.load_figures import arms as arms
    from lab.analysis.table import runs as runs
    from lab.analysis.table import steps as steps
    from lab.analysis.table import summary as summary
    from lab.core.results import read as read
    from lab.drawing.canvas import plot_lines as plot_lines
    from lab.experiments.batching import batch as batch
    from lab.experiments.claims.session import claims as claims
    from lab.experiments.prefix_cache import prefix as prefix
    from lab.experiments.speculation import speculate as speculate
    from lab.experiments.stalls import stall as stall
    from lab.experiments.tuning import tune as tune
    from lab.features.page import report as report
    from lab.runner.loading import load as load
    from lab.runner.measuring import measure as measure
    from lab.runner.measuring import sweep as sweep
    from lab.runner.saved_settings import settings as settings
    from lab.runner.side_by_side import ab as ab
    from lab.show.plot_load import plot_arms as plot_arms
    from lab.show.plot_runs import plot_decode as plot_decode
    from lab.show.plot_runs import plot_prefill as plot_prefill
    from lab.show.plot_runs import plot_sweep as plot_sweep
    from lab.show.plot_why import plot_roofline as plot_roofline
    from lab.show.plot_why import plot_where as plot_where
    from lab.show.text_predict import plot_requests as plot_requests
    from lab.show.text_tune import plot_tuned as plot_tuned
    from lab.show.text_tune import show_tuned as show_tuned
    from lab.why.attention_weights import attention as attention
    from lab.why.prediction import predict as predict
    from lab.why.probing import ceilings as ceilings
    from lab.why.roofline import explain as explain
    from lab.why.token_trace import trace as trace


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
