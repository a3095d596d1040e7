"""What steps should take on this machine, by their kernels' ceilings and the fit of learning.py.

With the script of an experiment it gives a table of steps like that of a run which was made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lab.core import cost
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.core.script import Part, Script
from lab.errors import LabError
from lab.roofline import kernel_rates, learning, probing
from lab.roofline.learning import Costs, Fit
from lab.roofline.step_kernels import StepKernels

if TYPE_CHECKING:
    import pandas as pd

TILE = 64  # tokens of a tile of attention on the CPU (ggml-cpu/common.h, ggml_fa_tile_config)


@dataclass(frozen=True)
class StepPrediction:
    """Predicts steps of one model under some settings, on the machine of the ceilings."""

    model: Model
    settings: Settings
    ceilings: Ceilings
    fit: Fit
    n_runs: int  # behind the fit

    def seconds(
        self, n_tokens: int, n_past: int, n_outputs: int, other_spans: Sequence[cost.Span] = ()
    ) -> float | None:
        """Seconds of a step, as described by `cost.step`; None for an unknown cost or ceiling."""
        try:
            kernels = StepKernels(self.model, self.settings, self.ceilings).total(
                n_tokens, n_past, n_outputs, other_spans
            )
        except LabError:
            return None
        n_all = n_tokens + sum(n for n, _ in other_spans)
        n_layer = self.model.n_layer or 0
        costs = Costs(
            kernels.total_s, n_layer, n_layer * n_all * learning.width_of(self.model)
        )
        # A step of one token is like decode, a step of many tokens like prefill.
        share = min(1.0, math.log(n_all) / math.log(max(2, self.settings.n_ubatch)))
        factor = log_mean(share, self.fit.decode_factor, self.fit.prefill_factor)
        correction = log_mean(share, self._correction(DECODE), self._correction(PREFILL))
        return self.fit.corrected_s(costs, factor, correction)

    def _correction(self, phase: str) -> float:
        return self.fit.correction(learning.case_of(phase, 1.0, self.model, self.settings))

    def prefill(self, n_tokens: int, n_past: int = 0, n_outputs: int = 1) -> float | None:
        """Seconds of a prompt of n_tokens after n_past, in steps of up to n_ubatch."""
        total_s = 0.0
        for step in learning.prompt_steps(n_tokens, self.settings, n_past, n_outputs):
            seconds = self.seconds(*step)
            if seconds is None:
                return None
            total_s += seconds
        return total_s

    def steps(self, script: Script) -> pd.DataFrame | None:
        """The steps of a script with predicted times: kind, start_s, end_s.

        None if a step cannot be predicted.
        """
        import pandas as pd

        now_s = 0.0
        rows = []
        positions = Counter[int]()
        for operation in script:
            for _ in range(operation.times):
                end_s = self._end_s(now_s, operation.parts, positions)
                if end_s is None:
                    return None
                rows.append({"kind": operation.kind, "start_s": now_s, "end_s": end_s})
                now_s = end_s
                for part in operation.parts:
                    positions[part.sequence] += part.n_tokens
        return pd.DataFrame(rows)

    def _end_s(
        self, start_s: float, parts: Sequence[Part], positions: Mapping[int, int]
    ) -> float | None:
        """When an operation ends: after all pieces that llama.cpp cuts it into."""
        end_s = start_s
        for piece in pieces(parts, positions, self.settings):
            (n_tokens, n_past), *other_spans = piece.spans
            seconds = self.seconds(n_tokens, n_past, piece.n_outputs, other_spans)
            if seconds is None:
                return None
            end_s += seconds
            end_s += self._masked_s(n_tokens, other_spans)
        return end_s

    def _masked_s(self, n_tokens: int, other_spans: Sequence[cost.Span]) -> float:
        """Seconds of attention that is computed and masked, beside what `seconds` counts.

        In a shared cache every token's attention is computed over the cells of all sequences, and
        masked. The CPU's kernel for 64 and more tokens skips what is masked for a whole tile
        (ggml-cpu/ops.cpp, flash_attn_ext_tiled): the few tokens of the other sequences cost a tile
        over all of their cells.
        """
        settings = self.settings
        is_on_cpu = settings.n_gpu_layers == 0
        is_tiled = settings.kv_unified and is_on_cpu and settings.uses_flash
        if not is_tiled or not other_spans or n_tokens + len(other_spans) < TILE:
            return 0.0
        n_cells = sum(n_past for _, n_past in other_spans)
        tile = StepKernels(self.model, settings, self.ceilings).total(TILE, n_cells, 0)
        return tile.attention_s

    def move(self, n_positions: int) -> float | None:
        """The least seconds of a copy, save or load of n_positions, at the memory's best rate."""
        moved = cost.move(self.model, n_positions, self.settings.type_k, self.settings.type_v)
        if moved is None:
            return None
        return moved.n_bytes / kernel_rates.roof(self.ceilings).gbps / 1e9


def log_mean(share: float, low: float, high: float) -> float:
    """A value between two, at this share of the way between their logarithms."""
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


class Piece(NamedTuple):
    """What llama.cpp computes in one go: a span of tokens for each sequence, and the outputs."""

    spans: list[cost.Span]
    n_outputs: int


class Remainder(NamedTuple):
    """The tokens of a part that are still to be computed; the last n_outputs get logits."""

    n_past: int
    n_tokens: int
    n_outputs: int


def pieces(
    parts: Sequence[Part], positions: Mapping[int, int], settings: Settings
) -> Iterator[Piece]:
    """The pieces into which llama.cpp cuts a step.

    In a shared cache it cuts a step every n_ubatch tokens, in the order of the parts
    (llama-batch.cpp, 0c1e570, split_simple). Separate caches get equally many tokens of each
    sequence (split_equal): first one of each, then the rest of the longest.
    """
    remainders = []
    for part in parts:
        n_past = positions[part.sequence]
        remainders.append(Remainder(n_past, part.n_tokens, part.n_outputs))
    if len(parts) > 1 and not settings.kv_unified:
        first_tokens = []
        n_outputs = 0
        for left in remainders:
            first_tokens.append((1, left.n_past))
            if left.n_outputs >= left.n_tokens:
                n_outputs += 1
        yield Piece(first_tokens, n_outputs)
        remainders = list(map(after_first, remainders))
    n_ubatch = max(1, settings.n_ubatch)
    n_tokens = sum(left.n_tokens for left in remainders)
    for start in range(0, n_tokens, n_ubatch):
        yield piece_between(remainders, start, start + n_ubatch)


def after_first(left: Remainder) -> Remainder:
    """What remains after the first token."""
    n_tokens = left.n_tokens - 1
    return Remainder(left.n_past + 1, n_tokens, min(left.n_outputs, n_tokens))


def piece_between(remainders: Sequence[Remainder], start: int, end: int) -> Piece:
    """The tokens from `start` to before `end`, counted through all remainders."""
    spans = list[cost.Span]()
    n_outputs = 0
    offset = 0  # tokens of the remainders before this one
    for left in remainders:
        low = max(start - offset, 0)
        high = min(end - offset, left.n_tokens)
        if low < high:
            spans.append((high - low, left.n_past + low))
            first_output = max(low, left.n_tokens - left.n_outputs)
            n_outputs += max(0, high - first_output)
        offset += left.n_tokens
    return Piece(spans, n_outputs)


def prediction_for(
    record: Record, known_ceilings: Sequence[Ceilings], runs: Sequence[Record]
) -> StepPrediction | None:
    """The prediction for a record's setup, from plain runs of other sessions.

    None without ceilings.
    """
    ceilings = probing.known(known_ceilings, probing.place_of_record(record))
    if ceilings is None:
        return None
    runs_elsewhere = [run for run in runs if run.session != record.session]
    return taught_by(runs_elsewhere, record, ceilings)


def taught_by(runs: Sequence[Record], record: Record, ceilings: Ceilings) -> StepPrediction:
    """The prediction for a record's setup, from these runs; from the ceilings alone if too few."""
    model = record.model
    settings = record.settings
    try:
        learned = learning.learn(runs, ceilings, learning.offload_of(model, settings))
    except LabError:
        return StepPrediction(model, settings, ceilings, learning.fit([]), 0)
    return StepPrediction(model, settings, ceilings, learned.fit, learned.n_runs)
