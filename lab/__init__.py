"""Mini-lab: see on your own machine how prefill and decode differ, token by token.

What people use is named here, and nowhere else:

    import lab
    records = lab.measure("10,1000", gen=100)   # runs, with a time stamp for every step
    lab.runs(records)                           # DataFrame, one row a run
    lab.plot_decode(records)

A small base (`core`, `process`, `engine`, `models`, `runner`, `formats`, `roofline`, `remote`,
`show`, `app`) carries the features, each in a room of its own (`features`). lab/README.md explains
both.
"""

from typing import TYPE_CHECKING

from lab.errors import LabError as LabError

if TYPE_CHECKING:
    __version__: str
    from lab.app.collection import read as read
    from lab.features.ab import ab as ab
    from lab.features.batch import batch as batch
    from lab.features.bisect.measuring import bisect as bisect
    from lab.features.bisect.picture import plot_bisected as plot_bisected
    from lab.features.bisect.section import show_bisected as show_bisected
    from lab.features.ceilings import ceilings as ceilings
    from lab.features.choose.command import choose as choose
    from lab.features.claims.measuring import claims as claims
    from lab.features.explain.picture import plot_roofline as plot_roofline
    from lab.features.measure import measure as measure
    from lab.features.predict.picture import plot_requests as plot_requests
    from lab.features.predict.ranking import predict as predict
    from lab.features.quant.figures import quant_table as quant_table
    from lab.features.quant.measuring import quant as quant
    from lab.features.report.page import report as report
    from lab.features.speculate.command import speculate as speculate
    from lab.features.stall import stall as stall
    from lab.features.start.measuring import start as start
    from lab.features.sweep import sweep as sweep
    from lab.features.trace.measuring import attention as attention, trace as trace
    from lab.features.tune.measuring import tune as tune
    from lab.features.tune.picture import plot_tuned as plot_tuned
    from lab.features.tune.section import show_tuned as show_tuned
    from lab.features.turns.command import turns as turns
    from lab.features.why.question import why as why
    from lab.roofline.explanation import explain as explain
    from lab.runner.as_options import settings as settings
    from lab.show.canvas import plot_lines as plot_lines
    from lab.show.comparison import compare as compare
    from lab.show.plot_decode import plot_decode as plot_decode
    from lab.show.plot_prefill import plot_prefill as plot_prefill
    from lab.show.plot_shares import plot_shares as plot_shares
    from lab.show.plot_sweep import plot_sweep as plot_sweep
    from lab.show.summaries import summary as summary
    from lab.show.table import runs as runs, steps as steps


PUBLIC = {
    "ab": "lab.features.ab",
    "attention": "lab.features.trace.measuring",
    "batch": "lab.features.batch",
    "bisect": "lab.features.bisect.measuring",
    "ceilings": "lab.features.ceilings",
    "choose": "lab.features.choose.command",
    "claims": "lab.features.claims.measuring",
    "compare": "lab.show.comparison",
    "explain": "lab.roofline.explanation",
    "measure": "lab.features.measure",
    "plot_bisected": "lab.features.bisect.picture",
    "plot_decode": "lab.show.plot_decode",
    "plot_lines": "lab.show.canvas",
    "plot_prefill": "lab.show.plot_prefill",
    "plot_requests": "lab.features.predict.picture",
    "plot_roofline": "lab.features.explain.picture",
    "plot_shares": "lab.show.plot_shares",
    "plot_sweep": "lab.show.plot_sweep",
    "plot_tuned": "lab.features.tune.picture",
    "predict": "lab.features.predict.ranking",
    "quant": "lab.features.quant.measuring",
    "quant_table": "lab.features.quant.figures",
    "read": "lab.app.collection",
    "report": "lab.features.report.page",
    "runs": "lab.show.table",
    "settings": "lab.runner.as_options",
    "show_bisected": "lab.features.bisect.section",
    "show_tuned": "lab.features.tune.section",
    "speculate": "lab.features.speculate.command",
    "stall": "lab.features.stall",
    "start": "lab.features.start.measuring",
    "steps": "lab.show.table",
    "summary": "lab.show.summaries",
    "sweep": "lab.features.sweep",
    "trace": "lab.features.trace.measuring",
    "tune": "lab.features.tune.measuring",
    "turns": "lab.features.turns.command",
    "why": "lab.features.why.question",
}
"""The module of each public name, imported on first use: `lab --help` loads neither pandas nor
matplotlib."""


__all__ = ["LabError", *PUBLIC]  # noqa: PLE0604


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib import metadata

            return metadata.version("mini-lab")
        if name not in PUBLIC:
            raise AttributeError(f"module 'lab' has no attribute {name!r}")
        from importlib import import_module

        from lab.app import entry

        globals()[name] = entry.public(name, getattr(import_module(PUBLIC[name]), name))
        return globals()[name]
