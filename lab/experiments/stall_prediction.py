"""What a stall should be: every step that the newcomer's prompt takes, predicted from the ceilings.

A step of more than n_ubatch tokens is cut by llama.cpp (llama-batch.cpp, 0c1e570), and its parts run one after the
other. Where all sequences share one cache (kv_unified) it is cut every n_ubatch tokens (split_simple); the newcomer's
tokens come first. Where each has its own, a part has equally many tokens of each sequence (split_equal): first one of
each, then what is left of the newcomer's.

In a shared cache every token's attention is computed over the cells of all, and masked. The CPU's kernel for 64 tokens
and more leaves out what is masked for 64 of them at once (a tile; ggml-cpu/ops.cpp, flash_attn_ext_tiled), so the
streams' few tokens cost a whole tile over the caches of all streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lab.core import cost
from lab.core.levers import Stall
from lab.core.record import Settings
from lab.why import step_kernels
from lab.why.step_prediction import StepPrediction

TILE = 64
"""Tokens of a tile of attention on the CPU (ggml-cpu/common.h, ggml_fa_tile_config)."""


@dataclass(frozen=True)
class Piece:
    """A part of a step that is computed in one go, as StepPrediction.seconds takes it."""

    n_tokens: int
    n_past: int
    n_outputs: int
    others: tuple[cost.Span, ...] = ()


def expected(prediction: StepPrediction, n_prompt: int, lever: Stall) -> tuple[float, float] | None:
    """Predicted seconds: the longest gap, and the newcomer's TTFT; None where a step cannot be predicted."""
    settings = prediction.settings
    if lever.chunk is None:
        alone, step = prediction.prefill(n_prompt), _seconds(prediction, answering(lever, n_prompt))
        return None if alone is None or step is None else (alone + step, alone)
    total = longest = 0.0
    for number in range(-(-n_prompt // lever.chunk)):
        taken = _seconds(prediction, mixed(lever, n_prompt, number, settings))
        if taken is None:
            return None
        total, longest = total + taken, max(longest, taken)
    return longest, total


def longest_gap(prediction: StepPrediction, n_prompt: int, lever: Stall) -> float | None:
    """The predicted time of the last full chunk, whose positions are most: the longest gap in chunks."""
    assert lever.chunk is not None
    last_full = max(0, n_prompt // lever.chunk - 1)
    return _seconds(prediction, mixed(lever, n_prompt, last_full, prediction.settings))


def mixed(lever: Stall, n_prompt: int, number: int, settings: Settings) -> Iterator[Piece]:
    """The pieces of a mixed step, the steps counted from 0."""
    assert lever.chunk is not None
    first, n_streams = number * lever.chunk, lever.n_streams
    n_new = min(lever.chunk, n_prompt - first)
    last_output = int(first + n_new == n_prompt)
    stream = (1, lever.n_context + lever.n_before + number)
    if settings.kv_unified:
        for start in range(0, n_new + n_streams, max(1, settings.n_ubatch)):
            n_piece = min(settings.n_ubatch, n_new + n_streams - start)
            n_own = max(0, min(n_new - start, n_piece))
            n_others = n_piece - n_own
            outputs = n_others + (last_output if 0 < n_own == n_new - start else 0)
            if n_own:
                yield Piece(n_own, first + start, outputs, (stream,) * n_others)
            else:
                yield Piece(*stream, outputs, (stream,) * (n_others - 1))
        return
    yield Piece(1, first, n_streams + (last_output if n_new == 1 else 0), (stream,) * n_streams)
    for start in range(1, n_new, max(1, settings.n_ubatch)):
        n_piece = min(settings.n_ubatch, n_new - start)
        yield Piece(n_piece, first + start, last_output if start + n_piece == n_new else 0)


def answering(lever: Stall, n_prompt: int) -> Iterator[Piece]:
    """The streams' first step after a prompt that was prefilled all at once; the newcomer is in it."""
    stream = (1, lever.n_context + lever.n_before)
    yield Piece(1, n_prompt, 1 + lever.n_streams, (stream,) * lever.n_streams)


def _seconds(prediction: StepPrediction, pieces: Iterable[Piece]) -> float | None:
    total = 0.0
    for piece in pieces:
        taken = prediction.seconds(piece.n_tokens, piece.n_past, piece.n_outputs, piece.others)
        if taken is None:
            return None
        total += taken + _tile_s(prediction, piece)
    return total


def _tile_s(prediction: StepPrediction, piece: Piece) -> float:
    """What the streams' tile of attention takes on the CPU; 0 where there is none."""
    settings = prediction.settings
    is_tiled = settings.kv_unified and settings.n_gpu_layers == 0 and piece.n_tokens + len(piece.others) >= TILE
    if not is_tiled or not piece.others or (settings.flash_attn_resolved or settings.flash_attn) == "off":
        return 0.0
    n_cells = sum(n_past for _, n_past in piece.others)
    tile = step_kernels.total(prediction.model, settings, prediction.ceilings, TILE, n_cells, 0)
    return tile.attention_s if tile else 0.0
