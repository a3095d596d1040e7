"""Predicts the time of any step on this machine: of several sequences, of a chunk of a prompt, or of both.

The law is that of `lab predict`: kernels at their ceilings times a factor, plus a cost per layer. The factors of decode
(one token in a step) and of prefill (a full ubatch) are fitted to runs; a step in between takes an interpolated factor,
on a logarithmic scale of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import cost
from lab.core.lists import plural
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.features.limits import probing, roofline, step_kernels, where
from lab.features.predict import learning
from lab.features.predict.learning import Fit


@dataclass(frozen=True)
class StepPrediction:
    """Predicts steps of one model under some settings, on the machine of the ceilings."""

    model: Model
    settings: Settings
    ceilings: Ceilings
    fit: Fit
    n_runs: int  # behind the fit

    def seconds(self, n_tokens: int, n_past: int, n_outputs: int, others: Sequence[cost.Span] = ()) -> float | None:
        """Seconds of a step, as described by `cost.step`; None if its cost is unknown, or a kernel was not probed."""
        try:
            kernels = step_kernels.total(self.model, self.settings, self.ceilings, n_tokens, n_past, n_outputs, others)
        except LabError:
            return None
        n_all = n_tokens + sum(n for n, _ in others)
        share = min(1.0, math.log(n_all) / math.log(max(2, self.settings.n_ubatch)))
        factor = self._between(share, self.fit.decode_factor, self.fit.prefill_factor)
        own = self._between(share, self._own(DECODE), self._own(PREFILL))
        layers, width = self.model.n_layer or 0, (self.model.n_embd or 0) + (self.model.n_ff or 0)
        rest = layers * (self.fit.per_layer_step_s + self.fit.per_layer_value_s * n_all * width)
        return max(kernels.total_s, own * (factor * kernels.total_s + rest))

    def prefill(self, n_tokens: int, n_past: int = 0, n_outputs: int = 1) -> float | None:
        """Seconds of a prompt of n_tokens after n_past, in steps of up to n_ubatch."""
        steps = learning.prompt_steps(n_tokens, self.settings, n_past, n_outputs)
        times = [self.seconds(*step) for step in steps]
        return None if None in times else sum(seconds or 0.0 for seconds in times)

    def move(self, n_positions: int) -> float | None:
        """The least seconds of a copy, save or load of n_positions: read and written at the memory's best rate."""
        moved = cost.move(self.model, n_positions, self.settings.type_k, self.settings.type_v)
        return None if moved is None else moved.n_bytes / roofline.roof(self.ceilings).gbps / 1e9

    @property
    def basis(self) -> str:
        """The basis of the prediction, in a sentence."""
        learned = (
            f"{plural(self.n_runs, 'run')} of this machine" if self.n_runs else "no runs of this machine (lab measure)"
        )
        basis = f"Predicted from the ceilings of {self.ceilings.measured_at[:10]} and {learned}."
        return " ".join([basis, *probing.doubt_words(self.ceilings)])

    def _own(self, phase: str) -> float:
        return self.fit.own.get(learning.case_of(phase, 1.0, self.model, self.settings).setup, 1.0)

    @staticmethod
    def _between(share: float, one: float, many: float) -> float:
        return math.exp((1 - share) * math.log(one) + share * math.log(many))


def prediction_for(record: Record, known: Sequence[Ceilings], runs: Sequence[Record]) -> StepPrediction | None:
    """The prediction for the setup of a record, from ceilings and runs of its machine; None without ceilings.

    It uses only plain runs (no experiments) of other sessions.
    """
    ceilings = probing.known(known, where.of_record(record))
    if ceilings is None:
        return None
    return taught_by([other for other in runs if other.session != record.session], record, ceilings)


def taught_by(runs: Sequence[Record], record: Record, ceilings: Ceilings) -> StepPrediction:
    """The prediction for the setup of a record, from these runs, or from the ceilings alone if they are too few."""
    try:
        learned = learning.learn(runs, ceilings, learning.offload_of(record.model, record.settings))
    except LabError:
        return StepPrediction(record.model, record.settings, ceilings, learning.fit([]), 0)
    return StepPrediction(record.model, record.settings, ceilings, learned.fit, learned.n_runs)
