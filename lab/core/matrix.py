"""Weight types with their block sizes, and groups of equal weight matrices."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = {
    # weights per block, bytes per block: the block structures of ggml-common.h
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}


@dataclass(frozen=True)
class Matrix:
    """`n` weight matrices of the same shape and type. A matrix of `n_expert` experts counts once."""

    part: str
    type: str
    rows: int
    columns: int
    n: float
    n_expert: int = 1

    @property
    def n_weights(self) -> float:
        return self.n * self.n_expert * self.rows * self.columns

    @property
    def n_bytes(self) -> float:
        n_weights, n_bytes = BLOCKS[self.type]
        return self.n_weights / n_weights * n_bytes
