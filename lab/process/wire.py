"""What the lab's process and the engine's exchange.

Dataclasses as JSON lines over a pipe; the progress of a run in a file that both map.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path

from lab.core.record import Device, Steps

N_PREFILLED = 0
FIRST_TOKEN = 1
"""Slots of the progress array: the number of prompt tokens done, then each token as it is chosen.
"""

MUL_MAT = "mul_mat"
MUL_MAT_ID = "mul_mat_id"
ATTENTION = "attention"
PLAIN_ATTENTION = "plain_attention"
UPLOAD = "upload"
DOWNLOAD = "download"
"""What can be probed: matrix products, attention with and without flash attention, copies to and
from a device."""


@dataclass(frozen=True)
class Build:
    """A build of llama.cpp, and the devices that it can use."""

    llama_cpp_python: str
    llama_cpp_commit: str | None
    system_info: str
    devices: tuple[Device, ...]
    openmp: str | None = None  # the runtime of the CPU's threads, as in Settings


@dataclass(frozen=True)
class Libraries:
    """The loaded libraries."""

    version: str  # ggml's
    paths: tuple[str, ...]
    layout: dict[str, str]
    """Each default of each structure, and each tensor type: it must fit the Python bindings."""


@dataclass(frozen=True)
class Vocabulary:
    """What the parent needs to make prompts for a loaded model."""

    n_vocab: int
    bos: int | None
    description: str | None  # by llama.cpp, such as `llama 135M Q4_1`


@dataclass(frozen=True)
class Outcome:
    """The result of a script; the fields are those of Run."""

    steps: Steps
    token_ids: tuple[int, ...]
    end_of_generation_at: int | None
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """`state_bytes` of saves, `accepted` draft tokens, `built_ns` of chains of samplers."""


@dataclass(frozen=True)
class Probe:
    """A kernel or copy to time.

    mul_mat: weights of `rows` x `columns`; mul_mat_id: such weights for each expert. attention,
    plain_attention: `rows` heads of `columns` elements. upload, download: `columns` numbers of 4
    bytes.
    """

    op: str
    type: str
    rows: int
    columns: int
    n_head_kv: int | None
    n_tokens: int
    n_bytes: int  # the least distinct memory (weights, or keys and values) that one pass reads
    n_threads: int
    device: str | None  # llama.cpp's name; None: the CPU
    seconds: float
    n_positions: int | None = None  # of attention, in each layer
    n_expert: int | None = None
    n_expert_used: int | None = None  # by a token
    repack: bool | None = None  # as in Settings


@dataclass(frozen=True)
class Progress:
    """The progress of a run: prompt tokens prefilled, and the tokens generated so far."""

    n_prefilled: int
    token_ids: tuple[int, ...]


def map_int64(path: Path) -> memoryview[int]:
    """A file mapped as an array of int64, shared by parent and child."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
