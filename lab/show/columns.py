"""The columns of the tables of runs and steps, with what they mean: an empty table has all."""

from __future__ import annotations

from lab.core import figures
from lab.show.text_setup import SERVING, SETUP

OF_BOTH = {
    "row": "the number of the row of `runs`, by which both tables are joined",
    "run": "the number of the record, the same for all lengths of a sweep",
    "session": "the name of the results file",
    "n_prompt": "prompt tokens",
    "n_gen": "generated tokens",
    "repeat": "the number of the repeat, from 0",
    "warmup": "whether it is a warm-up, which does not count",
    "disturbed": "whether other work disturbed it",
    "case": "the case of an experiment, in words",
    "status": "ok, failed (an error) or crashed (the engine's process ended, or was killed)",
}
OF_RUNS = {
    "block": "the block of `lab.ab`",
    "engine": "the number of the engine's process in the session",
    "error": "why it failed",
    "started_at": "its start (UTC)",
    "virtual": "whether the machine is virtual",
    **{figure.name: figure.meaning for figure in (*figures.FIGURES, figures.ENERGY)},
    "energy_of": "what that energy covers",
}
OF_STEPS = {
    "kind": "prefill, decode, ...",
    "generated": "the number of the answer's token; prefill makes the first",
    "n_tokens": "tokens of the step",
    "n_past": "tokens in the context when it began: its position",
    "n_seq": "sequences in the step",
    "n_outputs": "tokens whose probabilities it computed",
    "start_s": "when it began, s after the run began",
    "ready_s": "when its result was there",
    "end_s": "when the next token was chosen",
    "compute_ms": "`ready_s` - `start_s`, ms; NaN if only submission was timed",
    "itl_ms": "time since the token before, ms; NaN in prefill",
}
SETUP_OF_RUNS = [name for name in SETUP if name not in SERVING]
"""Model, machine and settings: what repeats have in common."""


def of_runs() -> list[str]:
    """The columns of `lab.runs` without requests and experiments, which add some."""
    return [*OF_BOTH, *SETUP_OF_RUNS, *OF_RUNS]


def of_steps() -> list[str]:
    return [*OF_BOTH, *SETUP_OF_RUNS, *OF_STEPS]
