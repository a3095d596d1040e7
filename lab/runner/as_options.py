"""A record's settings as the options of a command that makes them again."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex

from lab.core.levers import Prefix, Stall
from lab.core.record import Record, Settings
from lab.models import catalog
from lab.runner import machine, offload
from lab.runner.plan import make_plan


def options(record: Record) -> list[tuple[str, ...]]:
    """The model and the settings of a record as options, without those that are the default everywhere."""
    model, settings = record.model, record.settings
    accelerated = bool(machine.accelerators(record.machine.devices))
    all_layers = -1 if model.n_layer is None else model.n_layer + 1
    chosen: dict[str, object] = {
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
        "kv_unified": "on" if settings.kv_unified else "off",
    }
    defaults = {name: parameter.default for name, parameter in inspect.signature(make_plan).parameters.items()}
    if model.source == catalog.SYNTHETIC:
        chosen["prompt"] = None  # always random
    separate = isinstance(record.run.lever, (Prefix, Stall)) and not settings.kv_unified
    kind: list[tuple[str, ...]] = [("--kv-unified", "off")] if separate else []
    kind += _placing(settings)
    return kind + [
        (_flag(name), str(value)) for name, value in chosen.items() if value is not None and value != defaults[name]
    ]


def _placing(settings: Settings) -> list[tuple[str, ...]]:
    """What was asked about where the model runs, by the names of `offload.Asked`."""
    chosen: list[tuple[str, ...]] = []
    for field in dataclasses.fields(offload.Asked):
        value = getattr(settings, "devices" if field.name == "device" else field.name)
        if field.name == "lib" and value is not None:  # how its path began is not in a record
            value = str(value).rpartition(" ")[0]
        if value is not None:
            chosen.append(option(field.name, value))
    return chosen


def option(name: str, value: object) -> tuple[str, ...]:
    """An option with its value as it is typed; of what is on or off --NAME or --no-NAME."""
    if isinstance(value, bool) and name != "kv_unified":
        return (_flag(name if value else f"no-{name}"),)
    if isinstance(value, (tuple, list)):
        return _flag(name), ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return _flag(name), str(value)


def words(text: str) -> list[str]:
    """The words of a part of a command line, as a POSIX shell splits it; on Windows a backslash belongs to a path.

    ValueError for a quotation that does not end.
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    if os.name == "nt":
        lexer.escape = ""
    return list(lexer)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
