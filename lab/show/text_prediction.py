"""What predicted steps come from, in a sentence below a table."""

from __future__ import annotations

from lab.core.lists import plural
from lab.roofline.step_prediction import StepPrediction
from lab.show.text_ceilings import doubt_sentences


def basis(prediction: StepPrediction) -> str:
    """The ceilings and runs behind a prediction, and their doubts."""
    day = prediction.ceilings.measured_at[:10]
    runs = "no runs of this machine (lab measure)"
    if prediction.n_runs:
        runs = f"{plural(prediction.n_runs, 'run')} of this machine"
    sentence = f"Predicted from the ceilings of {day} and {runs}."
    return " ".join([sentence, *doubt_sentences(prediction.ceilings)])
