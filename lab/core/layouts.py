"""The layouts that llama.cpp's CPU backend keeps weights in, and how much memory they take.

For each matrix llama.cpp takes the first of AMX, CPU_REPACK and the layout of the file that can
multiply it (make_cpu_buft_list in src/llama-model.cpp; supports_op in amx/amx.cpp and repack.cpp of
ggml/src/ggml-cpu). AMX adds bytes to each block of some types (get_row_size in amx/mmq.cpp);
CPU_REPACK adds none. A tied embedding table is read by rows, in the layout of the file: where the
output matrix has another layout, it is a second copy. The embedded model has 96.6 MB of weights,
its table (Q8_0) 30.1 MB; AMX keeps a copy of 33.6 MB: 130.2 MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lab.core.matrices import BLOCKS, EMBEDDING, EXPERTS, UNMULTIPLIED, Matrix, group
from lab.core.record import Settings

AMX = frozenset({"AMX_INT8", "AVX512_VNNI"})
"""What a build needs for the layout AMX, by the names in llama.cpp's system_info."""


class AmxType(NamedTuple):
    """A type that AMX multiplies: the columns are a multiple; each block grows by some bytes."""

    columns: int
    added_bytes: int


AMX_ROWS = 32  # two tiles: the rows are a multiple
AMX_TYPES = {
    "F16": AmxType(16, 0),
    "Q4_0": AmxType(32, 0),
    "Q4_1": AmxType(32, 0),
    "Q8_0": AmxType(32, 4),
    "Q4_K": AmxType(256, 4),
    "Q5_K": AmxType(256, 4),
    "Q6_K": AmxType(256, 0),
    "IQ4_XS": AmxType(256, 2),
}

AVX2 = frozenset({"AVX2"})
DOTPROD = frozenset({"NEON", "DOTPROD"})
INT8_ARM = frozenset({"NEON", "MATMUL_INT8"})
REPACKED = {
    # Multiples of rows that CPU_REPACK takes with these instruction sets
    AVX2: {"Q4_0": 8, "Q4_K": 8, "IQ4_NL": 8, "MXFP4": 8},
    frozenset({"AVX512"}): {"Q2_K": 8},
    INT8_ARM: {"Q4_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8, "Q8_0": 4, "Q1_0": 4},
    DOTPROD: {
        **{"Q4_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8, "Q8_0": 4, "Q1_0": 4},
        **{"IQ4_NL": 4, "MXFP4": 4},
    },
    frozenset({"VXE"}): {"Q4_0": 4},
}

NO_HOST_MEMORY = re.compile(r"RPC|MTL|Metal")
"""Names of devices without memory of their own for weights on the CPU."""

CpuFeatures = frozenset[str]
"""What llama.cpp's system_info lists as there; empty: weights stay as they are in the file."""


def features(
    settings: Settings, system_info: str | None, devices: Sequence[str] = ()
) -> CpuFeatures:
    """What decides about the layouts on the CPU, with layers on these devices.

    Other devices than servers and Apple's have host memory, which llama.cpp prefers to layouts.
    """
    has_host_memory = not all(map(NO_HOST_MEMORY.match, devices))
    if settings.repack is False or has_host_memory or not system_info:
        return frozenset()
    return frozenset(re.findall(r"(\w+) = 1\b", system_info))


def added_bytes(matrices: Iterable[Matrix], cpu: CpuFeatures) -> int:
    """Bytes that matrices take on the CPU beyond those in the file, without copies."""
    n_bytes = 0.0
    for matrix in matrices:
        # Tables are read by rows, and AMX does not multiply by experts
        is_multiplied = matrix.part not in (EMBEDDING, UNMULTIPLIED, EXPERTS)
        if is_multiplied and _has_amx(matrix, cpu):
            n_bytes += _amx_bytes(matrix) - matrix.n_bytes
    return round(n_bytes)


def copy_bytes(table: Matrix, cpu: CpuFeatures) -> int:
    """Bytes of the copy of a tied embedding table that is the output matrix; 0 without a copy."""
    if _has_amx(table, cpu):
        return round(_amx_bytes(table))
    for instruction_sets, types in REPACKED.items():
        rows = types.get(table.type)
        if rows and table.rows % rows == 0 and instruction_sets | {"REPACK"} <= cpu:
            return round(table.n_bytes)
    return 0


def matrix_of(name: str, kind: str, sizes: Sequence[int]) -> Matrix | None:
    """A tensor as a matrix; None for a vector, and if its sizes or its type are unknown."""
    if kind not in BLOCKS or not sizes:
        return None
    for matrix in group([(name, kind, sizes)]):
        return matrix
    return None


def _has_amx(matrix: Matrix, cpu: CpuFeatures) -> bool:
    of_type = AMX_TYPES.get(matrix.type)
    if of_type is None or not cpu >= AMX:
        return False
    return matrix.rows % AMX_ROWS == 0 and matrix.columns % of_type.columns == 0


def _amx_bytes(matrix: Matrix) -> float:
    n_weights, _ = BLOCKS[matrix.type]
    return matrix.n_bytes + matrix.n_weights / n_weights * AMX_TYPES[matrix.type].added_bytes
