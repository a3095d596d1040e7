"""Setups as columns of a table, and their labels.

The setup of a run or a request is everything that repeats have in common. A server shows only a
part of its setup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from lab.core.asked_settings import STEP, Setting, table as settings_table
from lab.core.lists import join_and, plural
from lab.core.record import Machine, Model, Record, Settings
from lab.core.request import RequestRecord, ServerSettings, short_name
from lab.core.sampling import GREEDY
from lab.process import setup
from lab.runner import machine

if TYPE_CHECKING:
    import pandas as pd

SERVING = ("server", "api", "n_slots", "slot_ctx", "model_file", "quantization")
"""For requests: the server, its address and what it reports. A table without requests lacks
them."""

IDENTITY = (
    *("model_sha256", "devices", "power", "ram_gb", "os", "llama_cpp_commit", "system_info"),
    "prompt_sha256",
)
"""Parts of a setup that a label shows only if nothing else tells its setup from the others."""

OF_CLIENT = ("machine", "power", "ram_gb", "os")
"""Parts of a request's setup that describe the client's machine."""

NAMED_BY_VALUE = ("server", "machine", "variant")  # a label shows them without their name
MOST_QUANTIZATIONS = 5  # of one model that a title names
UNKNOWN_KIND = "an unknown quantization"
LONGEST_VALUE = 40  # letters of a value in a label

SYNTHETIC = "synthetic"
ORIGINS = {SYNTHETIC: " (random weights)", "requantized": " (re-quantised)"}


class HasSetup(Protocol):
    """A run, or a finding that is none."""

    @property
    def machine(self) -> Machine: ...

    @property
    def model(self) -> Model: ...

    @property
    def settings(self) -> Settings: ...


def of_run(record: Record) -> dict[str, object]:
    """The setup of a run; None for what the record does not contain."""
    return {name: value_of(record) for name, value_of in OF_RUN.items()}


def model_label(record: HasSetup) -> str:
    """Name and quantization for titles, and whether the weights are random or re-quantized."""
    model = record.model
    label = model.name
    if model.quantization is not None:
        label += f" {model.quantization}"
    return label + ORIGINS.get(model.source, "")


def _machine_label(record: Record) -> str:
    label = machine.label(record.machine, record.settings)
    return f"{label} (imported)" if record.run.imported_from else label


def _devices(record: Record) -> str | None:
    """All that can be offloaded to, such as "2 x NVIDIA H200"; None if unknown."""
    here = record.machine
    if not here.devices:
        return None
    return machine.in_words(machine.accelerators(here.devices)) or "none"


def _ram_gb(here: Machine) -> int | None:
    return None if here.ram_bytes is None else round(here.ram_bytes / 1e9)


def _value_of_setting(setting: Setting, record: Record) -> object:
    """What was used, else what was asked; unknown numbers are None, and lists one string."""
    settings = record.settings
    if setting.name == "flash_attn":
        return settings.flash_attention
    if setting.name == "wait":
        return settings.thread_wait
    value = getattr(settings, setting.recorded)
    if setting.name == "prefill_wait":
        return value or STEP
    if isinstance(value, tuple):
        return _joined(value)
    is_count = isinstance(value, int) and setting.most is not None
    return None if is_count and value < 0 else value


def _openmp_variables(record: Record) -> str | None:
    variables = setup.other_variables(record.settings.openmp_variables)
    return _joined(variables) or None


def _sampling(record: Record) -> str:
    chain = record.settings.sampling
    return chain.label if chain else GREEDY


def _joined(parts: tuple[object, ...]) -> str:
    return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)


OF_MODEL: Mapping[str, Callable[[Record], object]] = {
    "model": model_label,
    "model_sha256": attrgetter("model.sha256"),
}
OF_MACHINE: Mapping[str, Callable[[Record], object]] = {
    "machine": _machine_label,
    "devices": _devices,
    "power": attrgetter("machine.power"),
    "ram_gb": lambda record: _ram_gb(record.machine),
    "os": attrgetter("machine.os"),
    "llama_cpp_python": attrgetter("machine.llama_cpp_python"),
    "llama_cpp_commit": attrgetter("machine.llama_cpp_commit"),
    "system_info": attrgetter("machine.system_info"),
}
OF_SETTINGS: Mapping[str, Callable[[Record], object]] = {
    setting.column: partial(_value_of_setting, setting)
    for setting in settings_table().values()
    if not setting.is_pooled
}
OF_RUN: Mapping[str, Callable[[Record], object]] = {
    **OF_MODEL,
    **OF_MACHINE,
    **OF_SETTINGS,
    "openmp_variables": _openmp_variables,
    "sampling": _sampling,
    "prompt_sha256": attrgetter("settings.prompt_sha256"),
    "sweep_every": attrgetter("run.every"),
    "variant": attrgetter("run.variant"),
}
"""The columns of a run's setup, and the value of each."""

SETUP = (*OF_MODEL, *SERVING, *(name for name in OF_RUN if name not in OF_MODEL))
"""Runs are repeats of each other if these, n_prompt and n_gen are equal."""

OPTIONAL = {field.name for field in dataclasses.fields(Settings) if field.default is None}
BY_DEFAULT = {s.column for s in settings_table().values() if s.recorded in OPTIONAL}
"""Columns of settings that llama.cpp chooses if they are None."""


def fields(table: pd.DataFrame) -> list[str]:
    """The names of SETUP that a table has as columns."""
    return [name for name in SETUP if name in table.columns]


def of_engine_only() -> list[str]:
    """The names of SETUP that no request has, because a server does not show them."""
    of_requests = {"model", *SERVING, *OF_CLIENT, "variant"}
    return [name for name in SETUP if name not in of_requests]


def labels(table: pd.DataFrame, firsts: Sequence[pd.Series]) -> list[str]:
    """The label of each setup of a table, from its first row.

    A label has the fewest fields in which it differs from the others. Chosen fields come before
    those of IDENTITY. For a single setup: model, server and machine.
    """
    if len(firsts) == 1:
        names = ["model", "server", "machine"] if "server" in table else ["model", "machine"]
    elif table.variant.nunique() == len(firsts):
        names = ["variant"]
    else:
        names = _distinguishing_fields(table)
    return [", ".join(_values(row, _needed_fields(row, names, firsts))) for row in firsts]


def _distinguishing_fields(table: pd.DataFrame) -> list[str]:
    """The fields that tell all setups of a table apart."""
    names: list[str] = []
    n_distinct = 1
    for name in sorted(fields(table), key=lambda name: (name in IDENTITY, name != "server")):
        n_groups = table.groupby([*names, name], dropna=False).ngroups
        if n_groups > n_distinct:
            names.append(name)
            n_distinct = n_groups
    names.sort(key=SETUP.index)
    if "model" not in names and "machine" not in names:
        names.insert(0, "model")
    return names


def _needed_fields(
    row: pd.Series, names: Sequence[str], firsts: Sequence[pd.Series]
) -> list[str]:
    """The fields without the details that do not tell this row from the other rows."""
    needed = list(names)
    for name in reversed(names):
        if name not in (*IDENTITY, "kv_unified"):
            continue
        fewer = [other for other in needed if other != name]
        alike = [first for first in firsts if _values(first, fewer) == _values(row, fewer)]
        if len(alike) == 1:
            needed = fewer
    return needed


def _values(row: pd.Series, names: Sequence[str]) -> list[str]:
    """The named fields of a setup in words. A missing sweep or variant is left out."""
    texts = (_value(row, name) for name in names)
    return [text for text in texts if text is not None]


def _value(row: pd.Series, name: str) -> str | None:
    value = row[name]
    if value is None or value != value:  # NaN
        return _missing_value(name)
    is_whole = isinstance(value, float) and value.is_integer()
    text = str(int(value) if is_whole else value)
    if name == "sampling" and text == GREEDY:
        return GREEDY
    if name == "model":
        return short_name(text)
    if name == "machine" and is_request(row):
        return f"client {text}"
    if name in NAMED_BY_VALUE:
        return text
    if name == "system_info":
        return plural(text.count("= 1"), "CPU instruction set")
    if len(text) > LONGEST_VALUE:
        text = f"{text[:12]}..."
    return f"{name} {text}"


def _missing_value(name: str) -> str | None:
    missing = unset(name)
    if name == "server":
        return missing
    return None if missing == "none" else f"{name} {missing}"


def is_request(row: pd.Series) -> bool:
    """Whether a row (of any table) is of requests to a server, not of runs of the engine."""
    return isinstance(row.get("server"), str)


def unset(name: str) -> str:
    """The meaning of a missing value of a field: none, chosen by llama.cpp, or unknown."""
    if name == "server":
        return "in process"
    if name in BY_DEFAULT:
        return "default"
    return (
        "none" if name in ("sweep_every", "variant", "api", "openmp_variables") else "unknown"
    )


def of_request(record: RequestRecord) -> dict[str, object]:
    """The setup of a request: the server, what it reports, and the client's machine.

    Other fields are None.
    """
    endpoint = record.endpoint
    here = record.machine
    settings = endpoint.settings or ServerSettings()
    server = endpoint.server or "server"
    if endpoint.version:
        server += f" {endpoint.version}"
    return dict.fromkeys(SETUP) | {
        "model": record.model,
        "server": f"{server} at {endpoint.url}",  # another address is another server
        "api": endpoint.api,
        "n_slots": settings.n_slots,
        "slot_ctx": settings.n_ctx,
        "model_file": settings.model_file,
        "quantization": settings.quantization,
        "machine": machine.label(here),
        "power": here.power,
        "ram_gb": _ram_gb(here),
        "os": here.os,
    }


def where(records: Sequence[HasSetup]) -> str:
    """The model with its quantization and the machine of runs, or the number of each."""
    machines = [machine.label(record.machine, record.settings) for record in records]
    computers = {(record.machine.cpu, record.machine.ram_bytes) for record in records}
    kind = "machines" if len(computers) > 1 else "devices"
    return f"{_models(records)} on {one_of(machines, kind)}"


def _models(records: Sequence[HasSetup]) -> str:
    """The only model, with all its quantizations, or the number of different ones.

    A path is shortened to the name of its file.
    """
    names = [short_name(record.model.name) for record in records]
    if len(set(names)) > 1:
        return f"{len(set(names))} models"
    labels = {short_name(model_label(record)) for record in records}
    if len(labels) == 1:
        return labels.pop()
    if len({record.model.source == SYNTHETIC for record in records}) > 1:
        return f"{names[0]}, with its own and with random weights"
    kinds = list(
        dict.fromkeys(record.model.quantization or UNKNOWN_KIND for record in records)
    )
    if len(kinds) == 1:
        return f"{names[0]} {kinds[0]}"
    if len(kinds) > MOST_QUANTIZATIONS:
        return f"{names[0]} in {len(kinds)} quantizations"
    return f"{names[0]} in {join_and(kinds)}"


def with_model_and_machine(label: str, records: Sequence[HasSetup]) -> str:
    """The label of a setup for a title, with the model and the machine that it does not name.

    Without records: the label.
    """
    if not records:
        return label
    first = records[0]
    parts = [label]
    if short_name(first.model.name) not in label:
        parts.insert(0, short_name(model_label(first)))
    place = machine.label(first.machine, first.settings)
    if place not in label:
        parts.append(place)
    return ", ".join(parts)


def one_of(names: Iterable[str], kind: str) -> str:
    """The only name, or the number of different ones."""
    distinct = sorted(set(names))
    return str(distinct[0]) if len(distinct) == 1 else f"{len(distinct)} {kind}"
