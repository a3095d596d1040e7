"""All experiments, in the order in which they are shown."""

from __future__ import annotations

from lab.core.record import Run
from lab.features import batch as batching
from lab.features import prefix as prefix_cache
from lab.features import stall as stalls
from lab.features import turns as conversations
from lab.features.experiment import Experiment
from lab.features.speculate import speculation

EXPERIMENTS = (
    batching.EXPERIMENT,
    prefix_cache.EXPERIMENT,
    conversations.EXPERIMENT,
    stalls.EXPERIMENT,
    speculation.EXPERIMENT,
)


def of_run(run: Run) -> Experiment | None:
    """The experiment that made a run; None for a plain run."""
    return next((one for one in EXPERIMENTS if isinstance(run.lever, one.lever)), None)
