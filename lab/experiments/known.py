"""All experiments, in the order in which they are shown."""

from __future__ import annotations

from lab.core.record import Run
from lab.experiments import batching, prefix_cache, speculation, stalls
from lab.experiments.experiment import Experiment

EXPERIMENTS = (batching.EXPERIMENT, prefix_cache.EXPERIMENT, stalls.EXPERIMENT, speculation.EXPERIMENT)


def of_run(run: Run) -> Experiment | None:
    """The experiment that made a run; None for a plain run."""
    return next((one for one in EXPERIMENTS if isinstance(run.lever, one.lever)), None)
