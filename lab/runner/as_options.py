"""The command-line options that reproduce a record's settings."""

from __future__ import annotations

import os
import shlex

from lab.core.asked_settings import defaults, flag, table
from lab.core.levers import Prefix, Stall
from lab.core.record import Record
from lab.models import catalog
from lab.runner import machine


def options(record: Record) -> list[tuple[str, ...]]:
    """The model and the settings of a record as options, without defaults."""
    model, settings = record.model, record.settings
    all_layers = -1 if model.n_layer is None else model.n_layer + 1
    chosen = {name: getattr(settings, setting.record_name or name) for name, setting in table().items()}
    if settings.n_threads_batch == settings.n_threads:
        chosen["threads_batch"] = None
    if settings.n_gpu_layers == (all_layers if machine.accelerators(record.machine.devices) else 0):
        chosen["n_gpu_layers"] = None
    if settings.lib is not None:  # a record has only the end of the path
        chosen["lib"] = settings.lib.rpartition(" ")[0]
    if model.source == catalog.SYNTHETIC:
        chosen["prompt"] = None  # always random
    is_unified_by_default = isinstance(record.run.lever, (Prefix, Stall))
    chosen["kv_unified"] = "on" if settings.kv_unified else "off" if is_unified_by_default else None
    changed = [name for name, value in chosen.items() if value is not None and value != defaults()[name]]
    made = {name: option(name, chosen[name]) for name in changed}
    placing = [words for name, words in made.items() if table()[name].is_placing]
    spec = catalog.spec_of(model)
    return [
        *placing,
        *([] if spec == catalog.DEFAULT else [("--model", spec)]),
        *(words for words in made.values() if words not in placing),
    ]


def option(name: str, value: object) -> tuple[str, ...]:
    """An option with its value, or --NAME or --no-NAME for an on/off setting."""
    if isinstance(value, bool) and name != "kv_unified":
        return (flag(name if value else f"no-{name}"),)
    if isinstance(value, (tuple, list)):
        return flag(name), ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return flag(name), str(value)


def words(text: str) -> list[str]:
    """Split a command line like a POSIX shell, but on Windows keep backslashes. ValueError for an open quote."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    if os.name == "nt":
        lexer.escape = ""
    return list(lexer)
