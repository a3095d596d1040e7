"""Predicts the time of any step on this machine: of several sequences, of a chunk of a prompt, or of both.

The law is that of `lab predict`: kernels at their ceilings times a factor, plus a cost per layer. The factors of decode
(one token in a step) and of prefill (a full ubatch) are fitted to runs; a step in between takes an interpolated factor,
on a logarithmic scale of its tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core import cost
from lab.core.lists import plural
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.core.script import Part, Script
from lab.errors import LabError
from lab.features.limits import probing, roofline, step_kernels, where
from lab.features.predict import learning
from lab.features.predict.learning import Fit

if TYPE_CHECKING:
    import pandas as pd

TILE = 64
"""Tokens of a tile of attention on the CPU (ggml-cpu/common.h, ggml_fa_tile_config)."""


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
        setups = (learning.case_of(phase, 1.0, self.model, self.settings).setup for phase in (DECODE, PREFILL))
        own = self._between(share, *(self.fit.own.get(setup, 1.0) for setup in setups))
        layers, width = self.model.n_layer or 0, (self.model.n_embd or 0) + (self.model.n_ff or 0)
        rest = layers * (self.fit.per_layer_step_s + self.fit.per_layer_value_s * n_all * width)
        return max(kernels.total_s, own * (factor * kernels.total_s + rest))

    def prefill(self, n_tokens: int, n_past: int = 0, n_outputs: int = 1) -> float | None:
        """Seconds of a prompt of n_tokens after n_past, in steps of up to n_ubatch."""
        steps = learning.prompt_steps(n_tokens, self.settings, n_past, n_outputs)
        times = [self.seconds(*step) for step in steps]
        return None if None in times else sum(seconds or 0.0 for seconds in times)

    def steps(self, script: Script) -> pd.DataFrame | None:
        """The steps of a script with predicted times: kind, start_s, end_s. None if a step cannot be predicted."""
        import pandas as pd

        now, rows, positions = 0.0, [], Counter[int]()
        for operation in script:
            for _ in range(operation.times):
                taken = self._step_s(operation.parts, positions)
                if taken is None:
                    return None
                rows.append({"kind": operation.kind, "start_s": now, "end_s": now + taken})
                now += taken
                positions.update({part.sequence: part.n_tokens for part in operation.parts})
        return pd.DataFrame(rows)

    def _step_s(self, parts: Sequence[Part], positions: Mapping[int, int]) -> float | None:
        """Seconds of a step of several sequences, piece by piece.

        In a shared cache every token's attention is computed over the cells of all sequences, and masked. The CPU's
        kernel for 64 and more tokens skips what is masked for a whole tile (ggml-cpu/ops.cpp, flash_attn_ext_tiled):
        the few tokens of the other sequences cost a tile over all of their cells.
        """
        settings, total = self.settings, 0.0
        is_tiled = settings.kv_unified and settings.n_gpu_layers == 0
        is_tiled = is_tiled and (settings.flash_attn_resolved or settings.flash_attn) != "off"
        for ((n, n_past), *others), n_outputs in pieces(parts, positions, settings):
            taken = self.seconds(n, n_past, n_outputs, others)
            if taken is None:
                return None
            total += taken
            if is_tiled and others and n + len(others) >= TILE:
                n_cells = sum(past for _, past in others)
                total += step_kernels.total(self.model, settings, self.ceilings, TILE, n_cells, 0).attention_s
        return total

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

    @staticmethod
    def _between(share: float, one: float, many: float) -> float:
        return math.exp((1 - share) * math.log(one) + share * math.log(many))


def pieces(
    parts: Sequence[Part], positions: Mapping[int, int], settings: Settings
) -> Iterator[tuple[list[cost.Span], int]]:
    """What llama.cpp computes in one go of a step: a span of tokens for each sequence, and the number of outputs.

    In a shared cache it cuts a step every n_ubatch tokens, in the order of the parts (llama-batch.cpp, 0c1e570,
    split_simple). Separate caches get equally many tokens of each sequence (split_equal): first one of each, then the
    rest of the longest.
    """
    n_ubatch, start = max(1, settings.n_ubatch), 0
    left = [(positions[part.sequence], part.n_tokens, part.n_outputs) for part in parts]
    if len(parts) > 1 and not settings.kv_unified:
        yield [(1, past) for past, _, _ in left], sum(n_outputs >= n for _, n, n_outputs in left)
        left = [(past + 1, n - 1, min(n_outputs, n - 1)) for past, n, n_outputs in left if n > 1]
    while start < sum(n for _, n, _ in left):
        end, first, spans, outputs = start + n_ubatch, 0, list[cost.Span](), 0
        for past, n, n_outputs in left:
            low, high = max(start - first, 0), min(end - first, n)
            if low < high:
                spans.append((high - low, past + low))
                outputs += max(0, high - max(low, n - n_outputs))
            first += n
        yield spans, outputs
        start = end


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
