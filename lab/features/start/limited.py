"""Decode with limited memory: a fresh engine with mmap for each limit, its file dropped.

The limit is of the whole process. A round has every limit once and a start without a limit, in
random order. The first tokens after loading settle what the kernel keeps, and are not timed.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import script, stored_command
from lab.core.arguments import Texts
from lab.core.byte_sizes import parse_size
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.features.start import measuring, pages
from lab.features.start.groups import MemoryGroups, find_groups
from lab.features.start.measuring import Engines
from lab.models import obtain
from lab.process.worker import Worker, WorkerDied
from lab.roofline import paging
from lab.roofline.paging import MemoryLine
from lab.runner import prompts
from lab.runner.cases import Plan, utc_now
from lab.runner.progress import ShowStatus, Status
from lab.runner.session import new_results_file

N_SETTLING = 4
N_TOKENS = 8  # that are timed
MOST_S = 300  # for one start: otherwise the limit is too small
MOST_SHARE = 10_000  # percent of a file
HOW = "Write shares of the file or sizes, such as --memory 60%,80%,1GB."


@dataclass(frozen=True)
class LimitedStarts:
    """What is planned: the model, the limits in bytes, and how they are set."""

    plan: Plan
    limits: tuple[int, ...]
    groups: MemoryGroups


def decode_limited(
    model: str,
    limits_text: str,
    repeat: int,
    mmap: Texts,
    folder: Path,
    watch: obtain.ShowTransfer,
    settings: Mapping[str, Any],
) -> list[MemoryLine]:
    """Decode with every limit, and write a results file in a folder. LabError if impossible."""
    starts = make_limited_starts(model, limits_text, repeat, mmap, watch, settings)
    return list(execute(starts, new_results_file(starts.plan, folder)))


def make_limited_starts(
    model: str,
    limits_text: str,
    repeat: int,
    mmap: Texts,
    watch: obtain.ShowTransfer,
    settings: Mapping[str, Any],
) -> LimitedStarts:
    """Check what was asked for, before anything is measured. LabError if it is not possible."""
    memory_limits(limits_text, 1 << 62, None)
    groups = find_groups()
    plan = make_memory_plan(model, repeat, mmap, watch, settings)
    file_bytes = plan.file.n_bytes
    limits = memory_limits(limits_text, file_bytes, plan.machine.ram_bytes)
    return LimitedStarts(plan, tuple(limits), groups)


def make_memory_plan(
    model: str,
    repeat: int,
    mmap: Texts,
    watch: obtain.ShowTransfer,
    settings: Mapping[str, Any],
    engines: Engines | None = None,
) -> Plan:
    """The plan of decode on the CPU with mmap. LabError for settings that do not suit it."""
    if True not in measuring.mmap_values(mmap):
        raise LabError(
            f"--memory with --mmap {mmap} is not possible: the whole file would be copied.",
            "Omit --mmap.",
        )
    if settings.get("n_gpu_layers") or settings.get("repack"):
        raise LabError(
            "--memory measures weights that the CPU reads from the file's pages.",
            "Omit --n-gpu-layers and --repack.",
        )
    on_processor = {**settings, "n_gpu_layers": 0, "repack": False, "mmap": True}
    return measuring.make_start_plan(model, 1, repeat, watch, on_processor, engines, N_TOKENS)


def memory_limits(text: str, file_bytes: int, ram_bytes: int | None) -> list[int]:
    """The bytes that --memory asks for, each once. LabError for what is not possible."""
    limits: list[int] = []
    for part in text.split(","):
        name = part.strip()
        n_bytes = memory_limit(name, file_bytes)
        if ram_bytes is not None and n_bytes > ram_bytes:
            raise LabError(
                f"--memory {name} is more than this machine has ({ram_bytes / 1e9:.3g} GB).",
                HOW,
            )
        if n_bytes not in limits:
            limits.append(n_bytes)
    return limits


def memory_limit(name: str, file_bytes: int) -> int:
    """The bytes of one limit: a share of the file (80%) or a size (1GB)."""
    if not name.endswith("%"):
        return parse_size(name, "--memory")
    try:
        share = float(name[:-1])
    except ValueError:
        raise LabError(f"--memory {name} is no share of the file.", HOW) from None
    if not 0 < share <= MOST_SHARE:
        raise LabError(f"--memory {name} is not possible.", HOW)
    return max(1, round(share / 100 * file_bytes))


def planned_limits(planned: LimitedStarts) -> list[tuple[int, int | None]]:
    """For each start its round and its limit; None: no limit."""
    plan = planned.plan
    starts: list[tuple[int, int | None]] = []
    for number in range(plan.n_repeat):
        of_round: list[int | None] = [None, *planned.limits]
        random.Random(f"{plan.seed} {number}").shuffle(of_round)
        starts += [(number, limit) for limit in of_round]
    return starts


def execute(
    planned: LimitedStarts,
    path: Path,
    watch: ShowStatus = measuring.unseen_status,
    engines: Engines | None = None,
) -> Iterator[MemoryLine]:
    """Decode with every limit, and save each line as soon as its engine has ended."""
    engines = engines or Engines()
    starts = planned_limits(planned)
    with unless_empty(path):
        for n_done, (number, limit) in enumerate(starts):
            doing = "decode without a limit"
            if limit is not None:
                doing = f"decode with {limit / 1e6:,.0f} MB"
            watch(Status(doing, n_runs_done=n_done, n_runs=len(starts)))
            line = measured(planned, number, limit, path.stem, engines)
            save(path, line)
            yield line


def measured(
    planned: LimitedStarts, number: int, limit: int | None, session: str, engines: Engines
) -> MemoryLine:
    """Drop the file's pages, start an engine with a limit, and decode."""
    plan = planned.plan
    files = plan.file.paths
    disk_s = measuring.seconds_of_disk(*files)
    pages.drop(*files)
    resident = pages.resident_share(*files)
    started_at = utc_now()
    entrance: AbstractContextManager[tuple[str, ...]] = nullcontext(())
    if limit is not None:
        entrance = planned.groups.limited(limit)
    try:
        with (
            entrance as launcher,
            engines.new_worker(launcher) as worker,
            worker.ended_after(MOST_S),
        ):
            figures = decoded(worker, plan)
    except WorkerDied as death:
        if limit is None:
            raise
        raise LabError(
            f"With {limit / 1e6:,.0f} MB the engine did not get through: {death.what}",
            "Give more: its own memory (100 MB, and the KV cache) comes before the file's pages.",
        ) from None
    return MemoryLine(
        session=session,
        machine=plan.machine,
        model=plan.model,
        started_at=started_at,
        kernel=platform.release(),
        disk=paging.disk_of(plan.file.path),
        round=number,
        file_bytes=plan.file.n_bytes,
        limit_bytes=limit,
        resident=resident,
        n_tokens=N_TOKENS,
        disk_s=disk_s,
        command=stored_command.command(),
        **figures,
    )


def decoded(worker: Worker, plan: Plan) -> dict[str, Any]:
    """Load, settle, and decode the tokens that are timed: the fields of a line."""
    worker.load(plan.file.path, plan.settings)
    settings = worker.new_context(plan.settings)
    tokens = prompts.random_ids(1, plan.model.n_vocab or 1, None, plan.seed, 0)
    worker.run(script.run(tokens, N_SETTLING, 1), measuring.unseen)
    faults_before = measuring.major_faults(worker.pid)
    bytes_before = measuring.bytes_from_disks(worker.pid)
    outcome = worker.run(script.run(tokens, N_TOKENS, 1), measuring.unseen)
    faults = measuring.major_faults(worker.pid)
    n_bytes = measuring.bytes_from_disks(worker.pid)
    return {
        "settings": settings,
        "own_bytes": own_bytes(worker.pid),
        "decode_s": outcome.steps.end_ns[-1] / 1e9,
        "read_bytes": difference(n_bytes, bytes_before),
        "n_faults": difference(faults, faults_before),
    }


def difference(after: int | None, before: int | None) -> int | None:
    if after is None or before is None:
        return None
    return after - before


def own_bytes(pid: int) -> int | None:
    """The memory of a process beside files' pages (Linux); None if that is not known."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
    return None
