"""The command-line options that reproduce a record's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.core import shell
from lab.core.asked_settings import defaults, flag, table
from lab.core.record import Record, Settings
from lab.models import catalog
from lab.runner import machine


def asked(settings: Settings) -> dict[str, Any]:
    """The keywords of AskedSettings that ask for these settings, without defaults."""
    chosen = {name: getattr(settings, setting.record_name or name) for name, setting in table().items()}
    if settings.n_threads_batch == settings.n_threads:
        chosen["threads_batch"] = None
    if settings.n_gpu_layers < 0:  # all of a model that does not say how many it has
        chosen["n_gpu_layers"] = None
    if settings.lib is not None:  # a record has only the end of the path
        chosen["lib"] = settings.lib.rpartition(" ")[0]
    chosen["kv_unified"] = "on" if settings.kv_unified else "off"
    return {name: value for name, value in chosen.items() if value is not None and value != defaults()[name]}


def options(record: Record) -> list[tuple[str, ...]]:
    """The model and the settings of a record as options, without defaults."""
    model, settings = record.model, record.settings
    chosen = asked(settings)
    all_layers = -1 if model.n_layer is None else model.n_layer + 1
    if settings.n_gpu_layers == (all_layers if machine.accelerators(record.machine.devices) else 0):
        chosen.pop("n_gpu_layers", None)
    if model.source == catalog.SYNTHETIC:
        chosen.pop("prompt", None)  # always random
    if record.run.lever and record.run.lever.kv_unified == "on":  # by default
        chosen["kv_unified"] = "on" if settings.kv_unified else "off"
    made = {name: option(name, value) for name, value in chosen.items()}
    placing = [words for name, words in made.items() if table()[name].is_placing]
    spec = catalog.spec_of(model)
    return [
        *placing,
        *([] if spec == catalog.DEFAULT else [("--model", spec)]),
        *(words for words in made.values() if words not in placing),
    ]


def option(name: str, value: object) -> tuple[str, ...]:
    """An option with its value, or --NAME or --no-NAME for an on/off setting."""
    if isinstance(value, bool) and name == "kv_unified":
        return flag(name), "on" if value else "off"
    if isinstance(value, bool):
        return (flag(name if value else f"no-{name}"),)
    if isinstance(value, (tuple, list)):
        return flag(name), ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return flag(name), str(value)


def timed(records: Sequence[Record]) -> list[Record]:
    """The records without warm-ups; all of them where there are only warm-ups."""
    return [record for record in records if not record.run.warmup] or list(records)


def shared(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The options that all of the records have."""
    return [option for option in options(records[0]) if all(option in options(record) for record in records)]


def line(
    name: str, given: Mapping[str, object], first: Sequence[Sequence[str]] = (), last: Sequence[Sequence[str]] = ()
) -> str:
    """A command with options, without those that are None or empty; other words come first, or last."""
    known = [option(key, value) for key, value in given.items() if value not in (None, "", [])]
    return shell.lab(name, *first, *(word for words in (*known, *last) for word in words))
