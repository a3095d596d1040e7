"""What ended the engine in native code: one setting at a time is changed, in fresh processes, until a small job runs.

A signal says that llama.cpp died, not why. So a small job (load the model, make a context, read a few tokens, write a
few) is made again: first unchanged, then with one setting changed. A cause is named only where the job runs with the
change and then dies again without it. Each trial has a process of its own and may take TRIAL_S; all together SECONDS.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from lab.core import script as scripts
from lab.core.record import Model, Settings
from lab.errors import LabError
from lab.process.wire import MUL_MAT, Probe
from lab.process.worker import Worker, WorkerDied
from lab.runner import prompts
from lab.runner.builds import BUILD_HERE
from lab.runner.cases import Plan

SECONDS, TRIAL_S = 30.0, 10.0

N_GEN = 4
"""Tokens that the small job writes."""

Job = Callable[[], object]


@dataclass(frozen=True)
class Change:
    """A setting that avoids a part of llama.cpp: the option, the fields of Settings, and the part in words."""

    option: str
    fields: dict[str, object]
    avoids: str


REPACKED = Change("--no-repack", {"repack": False}, "the layouts that weights are repacked to (AMX, CPU_REPACK)")
ONE_THREAD = Change("--threads 1", {"n_threads": 1, "n_threads_batch": 1}, "several threads")


class Diagnosed(WorkerDied):
    """A death in native code, and what was found out about it.

    `change` is the one that makes the small job run, None where none was found. `is_lasting`: the unchanged job died
    again, so whatever is done in the same way will.
    """

    def __init__(
        self, death: WorkerDied, found: str, hint: str, is_lasting: bool, change: Change | None = None
    ) -> None:
        super().__init__(f"{death.what} {found}", hint, death.status)
        self.is_lasting, self.change = is_lasting, change


def of_job(worker: Worker, plan: Plan, n_prompt: int, death: WorkerDied) -> WorkerDied:
    """Why the engine died with a plan's settings. The job reads at most `n_prompt` tokens, in one step.

    Deaths that were no crash of native code come back as they are, and those beside RPC servers, whose end takes the
    engine along. The worker is left without a model.
    """
    if not death.is_crash or worker.backend.rpc:
        return death

    def job(settings: Settings) -> Job:
        return lambda: small_job(worker, plan, settings, min(n_prompt, plan.settings.n_ubatch))

    trials = [(change, job(changed(plan.settings, change))) for change in changes(plan.settings)]
    return _find(worker, death, job(plan.settings), lambda: _product(worker, plan.model), trials)


def of_probe(worker: Worker, probe: Probe, death: WorkerDied) -> WorkerDied:
    """Why the engine died while it timed a kernel. The worker is left in a fresh process."""
    if not death.is_crash or worker.backend.rpc:
        return death
    short = dataclasses.replace(probe, seconds=0.0)
    others = [
        (REPACKED, dataclasses.replace(short, repack=False)),
        (ONE_THREAD, dataclasses.replace(short, n_threads=1)),
    ]

    jobs: list[tuple[Change, Job]] = [
        (change, functools.partial(worker.probe, other)) for change, other in others if other != short
    ]
    found = _find(worker, death, functools.partial(worker.probe, short), None, jobs)
    worker.restart()
    return found


def changes(settings: Settings) -> list[Change]:
    """The changes that are any to these settings, that of the device first."""
    none = dict.fromkeys(("devices", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe", "prefill_wait"))
    changes = [REPACKED]
    if settings.n_gpu_layers:
        changes.insert(0, Change("--n-gpu-layers 0", {"n_gpu_layers": 0, **none}, "the device that the layers lie on"))
    if settings.type_v in ("f16", "bf16", "f32"):  # llama.cpp has other V caches with flash attention only
        changes.append(Change("--flash-attn off", {"flash_attn": "off"}, "flash attention"))
    changes.append(ONE_THREAD)
    changes.append(Change("--no-mmap", {"mmap": False}, "the mapping of the model's file into memory"))
    return [change for change in changes if changed(settings, change) != settings]


def changed(settings: Settings, change: Change) -> Settings:
    """The settings with a change."""
    return dataclasses.replace(settings, **change.fields)  # type: ignore[arg-type]


def _find(
    worker: Worker, death: WorkerDied, job: Job, product: Job | None, trials: list[tuple[Change, Job]]
) -> Diagnosed:
    until = time.monotonic() + SECONDS
    if (again := _runs(worker, job, until)) is not False:
        came = "A small job of the same kind ran afterwards: the crash did not come again."
        unknown = f"Its cause was not found: a small job of the same kind did not end within {TRIAL_S:.0f} s."
        hint = "Measure again; if it returns, build llama.cpp here: "
        return Diagnosed(death, came if again else unknown, hint + BUILD_HERE, False)
    if product is not None and _runs(worker, product, until) is False:
        found = "So does a plain product in the CPU's memory, with one thread: this build does not run on this CPU."
        return Diagnosed(death, found, f"Build llama.cpp here: {BUILD_HERE}", True)
    for change, trial in trials:
        if _runs(worker, trial, until) and _runs(worker, job, until) is False:
            found = (
                f"The cause is {change.avoids}: a small job runs with {change.option}, and ended in the same way "
                "before and after it without."
            )
            return Diagnosed(death, found, f"Add {change.option}, or build llama.cpp here: {BUILD_HERE}", True, change)
    tried = ", ".join(change.option for change, _ in trials)
    found = f"A small job ends in the same way, also with each of {tried}."
    if time.monotonic() > until:
        found = f"A small job ends in the same way; why was not found within {SECONDS:.0f} s."
    return Diagnosed(death, found, f"Build llama.cpp here: {BUILD_HERE}", True)


def _runs(worker: Worker, job: Job, until: float) -> bool | None:
    """Whether a job runs in a fresh process; None where it did not end in time, or was refused."""
    seconds = min(TRIAL_S, until - time.monotonic())
    if seconds <= 0:
        return None
    worker.restart()
    try:
        with worker.ended_after(seconds):
            job()
    except WorkerDied as death:
        return False if death.is_crash else None
    except LabError:
        return None
    return True


def small_job(worker: Worker, plan: Plan, settings: Settings, n_prompt: int) -> None:
    """The small job. Random tokens: what they are does not matter."""
    vocabulary = worker.load(plan.file.path, settings, plan.draft.file.path if plan.draft else None)
    worker.new_context(dataclasses.replace(settings, n_ctx=n_prompt + N_GEN, n_seq_max=1))
    tokens = prompts.random_ids(n_prompt, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0)
    worker.run(scripts.run(tokens, N_GEN, n_prompt), lambda progress: None)


def _product(worker: Worker, model: Model) -> None:
    """A product with weights of the type that most of the model has, in the CPU's plain memory, by one thread."""
    kind = max(model.tensor_bytes, key=lambda kind: model.tensor_bytes[kind])
    worker.probe(Probe(MUL_MAT, kind, 64, 256, None, 32, 1, 1, None, 0.0, repack=False))
