"""Find out why llama.cpp crashed.

A signal says that llama.cpp crashed, not why. So after the first crash the lab repeats a small job
(load the model, make a context, read and generate a few tokens), first unchanged, then with one
setting changed. It names a cause only if the job runs with the change and then crashes again
without it. Each attempt runs in a new process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from lab.core import script as scripts
from lab.core.record import Settings
from lab.errors import LabError
from lab.process.wire import MUL_MAT, Probe
from lab.process.worker import Worker, WorkerDied
from lab.runner import prompts
from lab.runner.builds import BUILD_HERE
from lab.runner.cases import Plan

DIAGNOSIS_S = 30.0  # limit of a diagnosis
ATTEMPT_S = 10.0  # limit of each of its attempts
N_GENERATED = 4
PLACED_BY = (
    *("devices", "split_mode", "main_gpu", "tensor_split", "n_cpu_moe", "override_tensor"),
    "prefill_wait",
)  # settings that mean nothing without layers on devices


@dataclass(frozen=True)
class Change:
    """A change that avoids a part of llama.cpp: the option, the fields of Settings, and the part in
    words."""

    option: str
    fields: dict[str, object]
    avoids: str

    def of(self, settings: Settings) -> Settings:
        return dataclasses.replace(settings, **self.fields)  # type: ignore[arg-type]


CPU_ONLY = Change(
    "--n-gpu-layers 0",
    {"n_gpu_layers": 0, **dict.fromkeys(PLACED_BY)},
    "the device of the layers",
)
NO_REPACK = Change(
    "--no-repack", {"repack": False}, "the repacked layouts of weights (AMX, CPU_REPACK)"
)
NO_FLASH_ATTENTION = Change("--flash-attn off", {"flash_attn": "off"}, "flash attention")
ONE_THREAD = Change("--threads 1", {"n_threads": 1, "n_threads_batch": 1}, "several threads")
NO_MMAP = Change("--no-mmap", {"mmap": False}, "memory mapping of the model's file")


class Diagnosed(WorkerDied):
    """A crash with its diagnosis.

    `is_lasting`: further runs will crash too, without the `change` if one was found.
    """

    def __init__(
        self,
        death: WorkerDied,
        cause: str,
        hint: str,
        is_lasting: bool = True,
        change: Change | None = None,
    ):
        super().__init__(f"{death.what} {cause}", hint, death.status)
        self.is_lasting = is_lasting
        self.change = change


def diagnose(worker: Worker, plan: Plan, n_prompt: int, death: WorkerDied) -> Diagnosed:
    """Why the engine crashed with a plan's settings. Leaves the worker without a model."""
    settings = plan.settings
    until = time.monotonic() + DIAGNOSIS_S

    def runs_with(changed: Settings) -> bool | None:
        n_step = min(n_prompt, settings.n_ubatch)
        return _attempt(worker, until, lambda: small_job(worker, plan, changed, n_step))

    hint = f"Build llama.cpp here: {BUILD_HERE}"
    runs_unchanged = runs_with(settings)
    if runs_unchanged is not False:
        hint = f"Measure again. If it crashes again, build llama.cpp here: {BUILD_HERE}"
        return Diagnosed(death, _no_second_crash(runs_unchanged), hint, is_lasting=False)
    if _attempt(worker, until, lambda: _plain_product(worker, plan)) is False:
        cause = (
            "A plain matrix product on the CPU with one thread crashes too: this build does not "
            "run on this CPU."
        )
        return Diagnosed(death, cause, hint)
    tried = changes(settings)
    for change in tried:
        if runs_with(change.of(settings)) and runs_with(settings) is False:
            cause = (
                f"The cause is {change.avoids}: a small job runs with {change.option}, and crashed "
                "in the same way before and after that without it."
            )
            hint = f"Add {change.option}, or build llama.cpp here: {BUILD_HERE}"
            return Diagnosed(death, cause, hint, change=change)
    if time.monotonic() > until:
        cause = (
            "A small job crashes in the same way. "
            f"The cause was not found within {DIAGNOSIS_S:.0f} s."
        )
        return Diagnosed(death, cause, hint)
    options = ", ".join(change.option for change in tried)
    cause = f"A small job crashes in the same way, also with each of {options}."
    return Diagnosed(death, cause, hint)


def _no_second_crash(ran: bool | None) -> str:
    if ran:
        return "A small job of the same kind ran afterwards: the crash did not repeat."
    return (
        "The cause was not found: a small job of the same kind did not end within "
        f"{ATTEMPT_S:.0f} s."
    )


def _attempt(worker: Worker, until: float, job: Callable[[], None]) -> bool | None:
    """Whether a job runs in a new process (False: it crashed); None if it did not end, or failed
    otherwise."""
    seconds = min(ATTEMPT_S, until - time.monotonic())
    if seconds <= 0:
        return None
    worker.restart()
    try:
        with worker.ended_after(seconds):
            job()
    except WorkerDied as death:
        return False if death.is_native_crash else None
    except LabError:
        return None
    return True


def _plain_product(worker: Worker, plan: Plan) -> None:
    """A product with weights of the model's most common type, without repacking."""
    tensor_bytes = plan.model.tensor_bytes
    common_type = max(tensor_bytes, key=lambda kind: tensor_bytes[kind])
    worker.probe(Probe(MUL_MAT, common_type, 64, 256, None, 32, 1, 1, None, 0.0, repack=False))


def changes(settings: Settings) -> list[Change]:
    """The changes that differ from these settings, that of the device first."""
    candidates = [NO_REPACK]
    if settings.n_gpu_layers:
        candidates.insert(0, CPU_ONLY)
    if settings.can_be_plain:
        candidates.append(NO_FLASH_ATTENTION)
    candidates += [ONE_THREAD, NO_MMAP]
    return [change for change in candidates if change.of(settings) != settings]


def small_job(worker: Worker, plan: Plan, settings: Settings, n_prompt: int) -> None:
    """Load the model, make a context, read `n_prompt` tokens in one step and generate a few."""
    draft_path = plan.draft.file.path if plan.draft else None
    vocabulary = worker.load(plan.file.path, settings, draft_path)
    n_ctx = n_prompt + N_GENERATED
    worker.new_context(dataclasses.replace(settings, n_ctx=n_ctx, n_seq_max=1))
    tokens = prompts.random_ids(n_prompt, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0)
    worker.run(scripts.run(tokens, N_GENERATED, n_prompt), lambda progress: None)
