"""Diagnose a crash of llama.cpp: change one setting at a time until a small job runs.

A signal says that llama.cpp crashed, not why. So the lab repeats a small job (load the model, make a context, read and
generate a few tokens), first unchanged, then with one setting changed. It names a cause only if the job runs with the
change and then crashes again without it. Each trial runs in a new process for at most TRIAL_S; all together take at
most SECONDS.
"""

from __future__ import annotations

import dataclasses
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
"""Tokens that the small job generates."""

Job = Callable[[], object]


@dataclass(frozen=True)
class Change:
    """A change that avoids a part of llama.cpp: the option, the fields of Settings, and the part in words."""

    option: str
    fields: dict[str, object]
    avoids: str


REPACKED = Change("--no-repack", {"repack": False}, "the repacked layouts of weights (AMX, CPU_REPACK)")
ONE_THREAD = Change("--threads 1", {"n_threads": 1, "n_threads_batch": 1}, "several threads")


class Diagnosed(WorkerDied):
    """A crash in native code with its diagnosis.

    `change` makes the small job run; None if none was found. `is_lasting`: the unchanged job crashed again, so that
    further runs will crash too.
    """

    def __init__(
        self, death: WorkerDied, found: str, hint: str, is_lasting: bool, change: Change | None = None
    ) -> None:
        super().__init__(f"{death.what} {found}", hint, death.status)
        self.is_lasting, self.change = is_lasting, change


def of_job(worker: Worker, plan: Plan, n_prompt: int, death: WorkerDied) -> WorkerDied:
    """Why the engine crashed with a plan's settings. The job reads at most `n_prompt` tokens, in one step.

    Returns `death` unchanged if it was not a crash, or with RPC servers, whose end also ends the engine. Leaves the
    worker without a model.
    """
    if not death.is_crash or worker.backend.rpc:
        return death

    def job(settings: Settings) -> Job:
        return lambda: small_job(worker, plan, settings, min(n_prompt, plan.settings.n_ubatch))

    trials = [(change, job(changed(plan.settings, change))) for change in changes(plan.settings)]
    return _find(worker, death, job(plan.settings), lambda: _product(worker, plan.model), trials)


def changes(settings: Settings) -> list[Change]:
    """The changes that differ from these settings, that of the device first."""
    none = dict.fromkeys(("devices", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe", "prefill_wait"))
    changes = [REPACKED]
    if settings.n_gpu_layers:
        changes.insert(0, Change("--n-gpu-layers 0", {"n_gpu_layers": 0, **none}, "the device of the layers"))
    if settings.type_v in ("f16", "bf16", "f32"):  # other V caches need flash attention
        changes.append(Change("--flash-attn off", {"flash_attn": "off"}, "flash attention"))
    changes.append(ONE_THREAD)
    changes.append(Change("--no-mmap", {"mmap": False}, "memory mapping of the model's file"))
    return [change for change in changes if changed(settings, change) != settings]


def changed(settings: Settings, change: Change) -> Settings:
    return dataclasses.replace(settings, **change.fields)  # type: ignore[arg-type]


def _find(worker: Worker, death: WorkerDied, job: Job, product: Job, trials: list[tuple[Change, Job]]) -> Diagnosed:
    until = time.monotonic() + SECONDS
    if (again := _runs(worker, job, until)) is not False:
        passed = "A small job of the same kind ran afterwards: the crash did not repeat."
        unknown = f"The cause was not found: a small job of the same kind did not end within {TRIAL_S:.0f} s."
        hint = "Measure again. If it crashes again, build llama.cpp here: "
        return Diagnosed(death, passed if again else unknown, hint + BUILD_HERE, False)
    if _runs(worker, product, until) is False:
        found = "A plain matrix product on the CPU with one thread crashes too: this build does not run on this CPU."
        return Diagnosed(death, found, f"Build llama.cpp here: {BUILD_HERE}", True)
    for change, trial in trials:
        if _runs(worker, trial, until) and _runs(worker, job, until) is False:
            found = (
                f"The cause is {change.avoids}: a small job runs with {change.option}, and crashed in the same way "
                "before and after that without it."
            )
            return Diagnosed(death, found, f"Add {change.option}, or build llama.cpp here: {BUILD_HERE}", True, change)
    tried = ", ".join(change.option for change, _ in trials)
    found = f"A small job crashes in the same way, also with each of {tried}."
    if time.monotonic() > until:
        found = f"A small job crashes in the same way. The cause was not found within {SECONDS:.0f} s."
    return Diagnosed(death, found, f"Build llama.cpp here: {BUILD_HERE}", True)


def _runs(worker: Worker, job: Job, until: float) -> bool | None:
    """Whether a job runs in a new process; None if it did not end in time, or failed without a crash."""
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
    vocabulary = worker.load(plan.file.path, settings, plan.draft.file.path if plan.draft else None)
    worker.new_context(dataclasses.replace(settings, n_ctx=n_prompt + N_GEN, n_seq_max=1))
    tokens = prompts.random_ids(n_prompt, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0)
    worker.run(scripts.run(tokens, N_GEN, n_prompt), lambda progress: None)


def _product(worker: Worker, model: Model) -> None:
    """A product with weights of the model's most common type, without repacking, on the CPU with one thread."""
    kind = max(model.tensor_bytes, key=lambda kind: model.tensor_bytes[kind])
    worker.probe(Probe(MUL_MAT, kind, 64, 256, None, 32, 1, 1, None, 0.0, repack=False))
