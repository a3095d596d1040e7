"""Diagnose a crash of llama.cpp: change one setting at a time until a small job runs.

A signal says that llama.cpp crashed, not why. So the lab repeats a small job (load the model, make a context, read and
generate a few tokens), first unchanged, then with one setting changed. It names a cause only if the job runs with the
change and then crashes again without it. Each trial runs in a new process for at most TRIAL_S; all together take at
most SECONDS.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from lab.core import script as scripts
from lab.core.record import Settings
from lab.errors import LabError
from lab.process.wire import MUL_MAT, Probe
from lab.process.worker import Worker, WorkerDied
from lab.runner import prompts
from lab.runner.builds import BUILD_HERE
from lab.runner.cases import Plan

SECONDS, TRIAL_S = 30.0, 10.0

N_GEN = 4
"""Tokens that the small job generates."""


@dataclass(frozen=True)
class Change:
    """A change that avoids a part of llama.cpp: the option, the fields of Settings, and the part in words."""

    option: str
    fields: dict[str, object]
    avoids: str


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
    until = time.monotonic() + SECONDS

    def runs(settings: Settings | None = plan.settings) -> bool | None:
        """Whether the small job (None: a plain product) runs in a new process; None if it did not end, or failed."""
        if (seconds := min(TRIAL_S, until - time.monotonic())) <= 0:
            return None
        worker.restart()
        try:
            with worker.ended_after(seconds):
                if settings:
                    small_job(worker, plan, settings, min(n_prompt, plan.settings.n_ubatch))
                else:  # with weights of the model's most common type, without repacking
                    kind = max(plan.model.tensor_bytes, key=lambda kind: plan.model.tensor_bytes[kind])
                    worker.probe(Probe(MUL_MAT, kind, 64, 256, None, 32, 1, 1, None, 0.0, repack=False))
        except WorkerDied as end:
            return False if end.is_crash else None
        except LabError:
            return None
        return True

    if (again := runs()) is not False:
        found = f"The cause was not found: a small job of the same kind did not end within {TRIAL_S:.0f} s."
        if again:
            found = "A small job of the same kind ran afterwards: the crash did not repeat."
        hint = f"Measure again. If it crashes again, build llama.cpp here: {BUILD_HERE}"
        return Diagnosed(death, found, hint, False)
    hint = f"Build llama.cpp here: {BUILD_HERE}"
    if runs(None) is False:
        found = "A plain matrix product on the CPU with one thread crashes too: this build does not run on this CPU."
        return Diagnosed(death, found, hint, True)
    known = changes(plan.settings)
    for change in known:
        if runs(changed(plan.settings, change)) and runs() is False:
            found = (
                f"The cause is {change.avoids}: a small job runs with {change.option}, and crashed in the same way "
                "before and after that without it."
            )
            return Diagnosed(death, found, f"Add {change.option}, or build llama.cpp here: {BUILD_HERE}", True, change)
    tried = ", ".join(change.option for change in known)
    found = f"A small job crashes in the same way, also with each of {tried}."
    if time.monotonic() > until:
        found = f"A small job crashes in the same way. The cause was not found within {SECONDS:.0f} s."
    return Diagnosed(death, found, hint, True)


def changes(settings: Settings) -> list[Change]:
    """The changes that differ from these settings, that of the device first."""
    none = dict.fromkeys(("devices", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe", "prefill_wait"))
    known = [
        Change("--n-gpu-layers 0", {"n_gpu_layers": 0, **none}, "the device of the layers"),
        Change("--no-repack", {"repack": False}, "the repacked layouts of weights (AMX, CPU_REPACK)"),
        Change("--flash-attn off", {"flash_attn": "off"}, "flash attention"),
        Change("--threads 1", {"n_threads": 1, "n_threads_batch": 1}, "several threads"),
        Change("--no-mmap", {"mmap": False}, "memory mapping of the model's file"),
    ]
    if settings.type_v not in ("f16", "bf16", "f32"):  # other V caches need flash attention
        del known[2]
    return [change for change in known[not settings.n_gpu_layers :] if changed(settings, change) != settings]


def changed(settings: Settings, change: Change) -> Settings:
    return dataclasses.replace(settings, **change.fields)  # type: ignore[arg-type]


def small_job(worker: Worker, plan: Plan, settings: Settings, n_prompt: int) -> None:
    vocabulary = worker.load(plan.file.path, settings, plan.draft.file.path if plan.draft else None)
    worker.new_context(dataclasses.replace(settings, n_ctx=n_prompt + N_GEN, n_seq_max=1))
    tokens = prompts.random_ids(n_prompt, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0)
    worker.run(scripts.run(tokens, N_GEN, n_prompt), lambda progress: None)
