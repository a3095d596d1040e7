"""Predictions for this machine with limited memory, where the model may not fit.

The law was measured by `lab start --memory` (paging.py). The model's file is mapped, so that only
the KV cache, the buffers and the process itself must have room. A prompt goes through the file once
for each ubatch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core import memory, results
from lab.core.files import listed
from lab.core.record import Settings
from lab.errors import LabError
from lab.roofline import paging
from lab.roofline.paging import MemoryLine, PagingLaw
from lab.roofline.prediction import Prediction, Shortage
from lab.runner.cases import Plan

HOW = "Measure it with a model that does not fit: lab start -m MODEL --memory 60%,80%,90%"


@dataclass(frozen=True)
class LimitedMemory:
    """A limit of this machine's memory, and what was measured of reading again."""

    n_bytes: int
    law: PagingLaw
    process_bytes: float  # of an engine beside its caches and the file


def limited_memory(n_bytes: int, plan: Plan, file: Path | None, folder: Path) -> LimitedMemory:
    """What is known of limits on this machine. LabError with the reason if that is nothing.

    `file` is the model's; None: it is not on this machine.
    """
    ram_bytes = plan.machine.ram_bytes
    if ram_bytes is not None and n_bytes > ram_bytes:
        raise LabError(
            f"--memory {n_bytes / 1e9:.3g} GB is more than this machine has "
            f"({ram_bytes / 1e9:.3g} GB).",
            "Give less, or omit --memory.",
        )
    if plan.settings.n_gpu_layers:
        raise LabError(
            "--memory predicts a model that the CPU reads from its file.",
            "Add --n-gpu-layers 0.",
        )
    lines = memory_lines(folder)
    here = lines_here(lines, plan, file)
    law = paging.learn(here)
    if law is None:
        raise LabError("Too few starts were measured with limited memory here.", HOW)
    process_bytes = [line.own_bytes for line in here if line.own_bytes is not None]
    return LimitedMemory(n_bytes, law, statistics.median(process_bytes))


def memory_lines(folder: Path) -> list[MemoryLine]:
    """The starts with limited memory in a folder; none if it is missing."""
    if not listed(folder, "*.jsonl"):
        return []
    findings = results.read([folder]).findings
    return [line for line in findings if isinstance(line, MemoryLine)]


def lines_here(lines: Sequence[MemoryLine], plan: Plan, file: Path | None) -> list[MemoryLine]:
    """The lines of this machine, its kernel and the file's disk. LabError if there are none.

    A model without a file is taken to lie on the disk that was measured.
    """
    if not lines:
        raise LabError("Nothing was measured with limited memory.", HOW)
    of_machine = paging.in_same_place(lines, plan.machine, None)
    if not of_machine:
        raise LabError(
            "Decode with limited memory was measured on another machine or kernel only: "
            "it does not hold here.",
            HOW,
        )
    if file is None:
        return of_machine
    of_disk = paging.in_same_place(lines, plan.machine, paging.disk_of(file))
    if not of_disk:
        raise LabError(
            f"{file.name} lies on another disk than the models measured with limited memory.",
            HOW,
        )
    return of_disk


def with_limit(row: Prediction, settings: Settings, limit: LimitedMemory) -> Prediction:
    """The prediction of a request with limited memory; its times are ranges that include the wait.

    Without room for what is no weight, it does not fit.
    """
    file_bytes = row.model.n_bytes or 0
    n_ctx = memory.padded(row.n_prompt + row.n_gen)
    cells = row.users * n_ctx
    context = memory.of_context(
        row.model, dataclasses.replace(settings, n_ctx=cells, n_seq_max=row.users)
    )
    own_bytes = context.total_bytes - context.weights_bytes + limit.process_bytes
    needed = round(own_bytes + file_bytes)
    row = dataclasses.replace(
        row, needed_bytes=needed, memory_bytes=limit.n_bytes, shortage=None
    )
    if own_bytes >= limit.n_bytes or not file_bytes:
        return dataclasses.replace(row, shortage=Shortage(needed, limit.n_bytes, row.users))
    room = (limit.n_bytes - own_bytes) / file_bytes
    wait_s = limit.law.wait_of(file_bytes, room)
    if wait_s == 0:
        return row
    fastest_s, slowest_s = limit.law.token_s(file_bytes, room, row.tpot_s)
    least_s = fastest_s - row.tpot_s[0]  # of a wait
    most_s = slowest_s - row.tpot_s[1]
    n_steps = math.ceil(row.n_prompt / settings.n_ubatch)
    waits_s = None if wait_s is None else n_steps * wait_s
    return dataclasses.replace(
        row,
        prefill=row.prefill.longer(waits_s, (n_steps * least_s, n_steps * most_s)),
        token=row.token.longer(wait_s, (least_s, most_s)),
        room=room,
    )
