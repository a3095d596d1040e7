"""From records back to the command that makes them again.

Every record holds what was chosen, so the command can be written out in full. Options that have their default
value are left out, but for the number of threads: its default is another one on another machine.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Sequence

from lab.core.record import Record
from lab.models import catalog
from lab.runner import machine
from lab.runner.plan import make_plan


def command(records: Sequence[Record]) -> str | None:
    """The command line of one session; None for imported results. Options that all variants share come last, once."""
    timed = [record for record in records if not record.run.warmup] or list(records)
    if not timed or any(record.run.totals for record in timed):
        return None
    run = timed[0].run
    lengths = ",".join(str(n) for n in sorted({record.run.n_prompt for record in timed}))
    repeat = 1 + max(record.run.repeat for record in timed)
    shared = [option for option in options(timed[0]) if all(option in options(record) for record in records)]
    if run.block is not None:
        blocks = 1 + max(record.run.block or 0 for record in timed)
        by_name = {record.run.variant or "": options(record) for record in records}
        own = [
            shlex.join(w for option in by_name[name] if option not in shared for w in option)
            for name in sorted(by_name)
        ]
        words = ["lab", "ab", *own, "--prompt-len", lengths, "--gen", str(run.n_gen), "--blocks", str(blocks)]
    elif run.every is not None:
        words = ["lab", "sweep", "--max-len", lengths, "--every", str(run.every), "--gen", str(run.n_gen)]
        words += ["--repeat", str(repeat)]
    else:
        words = ["lab", "measure", "--prompt-len", lengths, "--gen", str(run.n_gen), "--repeat", str(repeat)]
    return shlex.join([*words, *(word for option in shared for word in option)])


def options(record: Record) -> list[tuple[str, str]]:
    """The model and the settings of a record as options, without those that are the default everywhere."""
    model, settings = record.model, record.settings
    accelerated = bool(machine.accelerators(record.machine.devices))
    all_layers = -1 if model.n_layer is None else model.n_layer + 1
    values: dict[str, object] = {
        "model": catalog.spec_of(model),
        "prompt": settings.prompt,
        "seed": settings.seed,
        "threads": settings.n_threads,
        "threads_batch": None if settings.n_threads_batch == settings.n_threads else settings.n_threads_batch,
        "batch": settings.n_batch,
        "ubatch": settings.n_ubatch,
        "n_gpu_layers": None if settings.n_gpu_layers == (all_layers if accelerated else 0) else settings.n_gpu_layers,
        "flash_attn": settings.flash_attn,
        "cache_type_k": settings.type_k,
        "cache_type_v": settings.type_v,
    }
    defaults = {name: parameter.default for name, parameter in inspect.signature(make_plan).parameters.items()}
    if model.source == catalog.SYNTHETIC:
        values["prompt"] = None  # always random
    return [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in values.items()
        if value is not None and value != defaults[name]
    ]
