"""What crosses between the lab's process and the engine's: the data of requests and replies, and shared memory.

The two processes speak JSON lines over a pipe. A run's progress does not pass through the pipe: both processes map the
same small file, an array of int64, of which the engine writes slots that the parent reads.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from lab.core.record import Device, Steps

N_PREFILLED, FIRST_TOKEN = 0, 1
"""Slots of the progress array: the prompt tokens that are done, then the tokens as they are chosen."""

MUL_MAT, MUL_MAT_ID, ATTENTION, PLAIN_ATTENTION = "mul_mat", "mul_mat_id", "attention", "plain_attention"
"""The kernels that can be probed: products, flash attention, and attention without it."""

UPLOAD, DOWNLOAD = "upload", "download"
"""What else can be: copies of bytes to a device, and from it."""


@dataclass(frozen=True)
class Build:
    """Which llama.cpp build this is, and what it can compute on."""

    llama_cpp_python: str
    llama_cpp_commit: str | None
    system_info: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Backend:
    """What an engine's process is started with: libraries of another build, and servers whose devices it uses."""

    lib: str | None = None  # a folder; None: those of llama-cpp-python
    rpc: tuple[str, ...] = ()  # HOST:PORT


DEFAULT_BACKEND = Backend()


@dataclass(frozen=True)
class Libraries:
    """What shows whether the bindings fit the loaded libraries: ggml's version, their files, and their `layout`.

    That has a value for the size and every default of each structure, and for every type of tensors, by name.
    """

    version: str
    paths: tuple[str, ...]
    layout: dict[str, str]


@dataclass(frozen=True)
class Vocabulary:
    """What the parent must know of a loaded model to make prompts for it."""

    n_vocab: int
    bos: int | None
    description: str | None  # llama.cpp's own of the model


@dataclass(frozen=True)
class Outcome:
    """What a script that was run gives back: steps, the chosen tokens, the index of the first end-of-generation one.

    What follows `end_at` is that of a Run, but for `started_ns`: when the first step began, by `time.perf_counter_ns`,
    a clock that all processes of a machine share (Python's documentation: it is system-wide).
    """

    steps: Steps
    token_ids: tuple[int, ...]
    end_at: int | None
    state_bytes: tuple[int, ...] | None = None
    logits_differ: tuple[float, ...] | None = None
    accepted: tuple[int, ...] | None = None
    margins: tuple[float, ...] | None = None
    started_ns: int | None = None


@dataclass(frozen=True)
class Probe:
    """What to time.

    mul_mat: weights of `rows` x `columns`. mul_mat_id: such weights of each of `n_expert`, of which every token goes
    through `n_expert_used`. attention, plain_attention: `rows` heads of `columns`, `n_head_kv` for keys, over
    `n_positions` a layer.
    `n_bytes` is how much distinct memory (weights, or keys and values) one pass goes through, at least. upload,
    download: `columns` numbers of 4 bytes between this machine's memory and the device's. `device` is llama.cpp's name
    of a device; None is the CPU. `repack` is that of Settings, for weights.
    """

    op: str
    type: str
    rows: int
    columns: int
    n_head_kv: int | None
    n_tokens: int
    n_bytes: int
    n_threads: int
    device: str | None
    seconds: float
    n_positions: int | None = None
    n_expert: int | None = None
    n_expert_used: int | None = None
    repack: bool | None = None


@dataclass(frozen=True)
class Progress:
    """How far a run in flight is: prompt tokens prefilled, and the tokens generated so far."""

    n_prefilled: int
    token_ids: tuple[int, ...]


def map_int64(path: Path) -> memoryview[int]:
    """A file as an array of int64, in memory that parent and child share."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
