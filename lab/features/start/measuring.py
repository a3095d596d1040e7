"""Start a fresh engine again and again, with the model's file in the page cache and without it.

The stamps are the parent's, between requests to the engine, so that the stages of a start leave no
gap. Rounds have every combination of `mmap` and cache once, in random order.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from lab.core import script, stored_command
from lab.core.arguments import StrPath, Texts
from lab.core.asked_settings import check_number, parts
from lab.core.keywords import CommonSettings
from lab.core.record import Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.features.start import pages
from lab.features.start.lines import COLD, STAGES, WARM, StartLine
from lab.models import catalog, obtain
from lab.process.wire import Progress
from lab.process.worker import Worker
from lab.roofline.paging import MemoryLine
from lab.runner import prompts
from lab.runner.cases import Plan, utc_now
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.runner.session import new_results_file

MMAP_VALUES = {"on": True, "off": False}
FAULTS_FIELD = 9  # majflt of /proc/PID/stat, after the name in parentheses


def unseen(progress: Progress) -> None:
    """Shows nothing of a prefill."""


def unseen_status(status: Status) -> None:
    """Shows nothing of a session."""


@dataclass(frozen=True)
class Engines:
    """How an engine is started and which clock stamps it; tests have their own."""

    new_worker: Callable[..., Worker] = Worker
    clock_s: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Start:
    """A start that is planned."""

    round: int
    settings: Settings
    cache: str


class StartSettings(CommonSettings, total=False):
    prompt: Texts | None
    device: Texts | None


def start(
    model: str = catalog.DEFAULT,
    prompt_len: int = 128,
    mmap: Texts = "on,off",
    repeat: int = 5,
    memory: str | None = None,
    *,
    out: StrPath = "results",
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[StartSettings],
) -> list[StartLine] | list[MemoryLine]:
    """Start a fresh engine from the disk and from the page cache, with and without mmap.

        lab.start("smollm2-135m")[0].stages
        lab.start("llama-3.2-1b", memory="60%,80%,1GB")[0].token_s

    With `memory` each start has a limit, and decodes. Returns a line for each start, and writes a
    results file in `out`. LabError for impossible values.
    """
    if memory is not None:
        from lab.features.start import limited

        return limited.decode_limited(model, memory, repeat, mmap, Path(out), watch, settings)
    mapped = mmap_values(mmap)
    plan = make_start_plan(model, prompt_len, repeat, watch, settings)
    path = new_results_file(plan, Path(out))
    return list(execute(plan, mapped, path))


def mmap_values(values: Texts) -> list[bool]:
    """What --mmap asks for. LabError for anything else than on and off."""
    names = parts(values)
    if not names or len(set(names)) < len(names) or not set(names) <= MMAP_VALUES.keys():
        raise LabError(f"--mmap {values} is not possible.", "Write on, off, or on,off.")
    return [MMAP_VALUES[name] for name in names]


def make_start_plan(
    model: str,
    prompt_len: int,
    repeat: int,
    watch: obtain.ShowTransfer,
    settings: Mapping[str, Any],
    engines: Engines | None = None,
    n_gen: int = 1,
) -> Plan:
    """The plan of one prompt. Its engine has ended, so that nobody has the file mapped."""
    check_number("repeat", repeat, 1000)
    engines = engines or Engines()
    with engines.new_worker() as worker:
        with_prompt = {**settings, "prompt": prompts.RANDOM}
        plan = make_plan(
            worker, [prompt_len], n_gen, repeat, model, watch=watch, **with_prompt
        )
    if plan.refused:
        hint = "Use a smaller model or a shorter prompt."
        raise LabError(" ".join(plan.refused.values()), hint)
    if plan.model.n_vocab is None:
        raise LabError(
            f"{plan.model.name} does not say how many tokens it has.", "Use another file."
        )
    return plan


def planned_starts(plan: Plan, mapped: list[bool]) -> list[Start]:
    """Every combination once in each round, in random order."""
    starts = []
    for number in range(plan.n_repeat):
        of_round = []
        for is_mapped in mapped:
            settings = dataclasses.replace(plan.settings, mmap=is_mapped)
            of_round += [Start(number, settings, cache) for cache in (COLD, WARM)]
        random.Random(f"{plan.seed} {number}").shuffle(of_round)
        starts += of_round
    return starts


def execute(
    plan: Plan,
    mapped: list[bool],
    path: Path,
    watch: ShowStatus = unseen_status,
    engines: Engines | None = None,
) -> Iterator[StartLine]:
    """Make every start, and save its line as soon as it has ended."""
    engines = engines or Engines()
    starts = planned_starts(plan, mapped)
    with unless_empty(path):
        for n_done, planned in enumerate(starts):
            watch(Status(f"a {planned.cache} start", n_runs_done=n_done, n_runs=len(starts)))
            line = measured(plan, planned, path.stem, engines)
            save(path, line)
            yield line


def measured(plan: Plan, planned: Start, session: str, engines: Engines) -> StartLine:
    """Bring the page cache into the state of a start, look at it, and start."""
    files = plan.file.paths
    disk_s = None
    if planned.cache == COLD:
        disk_s = seconds_of_disk(*files)
        pages.drop(*files)
    else:
        pages.read_seconds(*files)
    resident = pages.resident_share(*files)
    started_at = utc_now()
    timed = timed_start(plan, planned.settings, engines)
    return StartLine(
        session=session,
        machine=plan.machine,
        model=plan.model,
        settings=timed.settings,
        started_at=started_at,
        round=planned.round,
        cache=planned.cache,
        resident=resident,
        n_prompt=plan.cases[0].n_prompt,
        stages=timed.stages,
        second_prefill_s=timed.second_prefill_s,
        n_faults=timed.n_faults,
        read_bytes=timed.read_bytes,
        disk_s=disk_s,
        command=stored_command.command(),
    )


def seconds_of_disk(*paths: Path) -> float | None:
    """The time of a read in order from the disk; None if the pages did not leave the cache."""
    pages.drop(*paths)
    resident = pages.resident_share(*paths)
    if resident is None or resident > 0:
        return None
    return pages.read_seconds(*paths)


@dataclass(frozen=True)
class TimedStart:
    """What one start gave; its settings are as llama.cpp resolved them."""

    settings: Settings
    stages: dict[str, float]
    second_prefill_s: float
    n_faults: int | None
    read_bytes: int | None


def timed_start(plan: Plan, settings: Settings, engines: Engines) -> TimedStart:
    """Start an engine and prefill the same prompt twice, with a stamp after each stage."""
    n_prompt = plan.cases[0].n_prompt
    n_vocab = plan.model.n_vocab or 1
    tokens = prompts.random_ids(n_prompt, n_vocab, None, plan.seed, 0)
    warm_up = script.prefill(0, tokens[:1], settings.n_ubatch)
    prefill = script.prefill(0, tokens, settings.n_ubatch)
    stamps_s = [engines.clock_s()]
    with engines.new_worker() as worker:
        _ = worker.build
        stamps_s.append(engines.clock_s())
        worker.load(plan.file.path, settings)
        stamps_s.append(engines.clock_s())
        chosen = worker.new_context(settings)
        stamps_s.append(engines.clock_s())
        worker.run(warm_up, unseen)
        stamps_s.append(engines.clock_s())
        worker.run(prefill, unseen)
        stamps_s.append(engines.clock_s())
        n_faults = major_faults(worker.pid)
        read_bytes = bytes_from_disks(worker.pid)
        second_from_s = engines.clock_s()
        worker.run(prefill, unseen)
        second_prefill_s = engines.clock_s() - second_from_s
    stages = {}
    for number, stage in enumerate(STAGES):
        stages[stage] = stamps_s[number + 1] - stamps_s[number]
    return TimedStart(chosen, stages, second_prefill_s, n_faults, read_bytes)


def major_faults(pid: int) -> int | None:
    """How often a process waited for a page from a disk (Linux); None if that is not known."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[FAULTS_FIELD])
    return None


def bytes_from_disks(pid: int) -> int | None:
    """The bytes that a process had to get from disks (Linux); None if that is not known."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.partition(":")[2])
    return None
