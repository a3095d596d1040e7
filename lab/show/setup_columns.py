"""The setup of a run or a request as columns of a table: everything that repeats have in common.

A server shows only a part of its setup: its name and the settings that it reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lab.core.asked_settings import table
from lab.core.record import Machine, Record
from lab.core.request import Endpoint, RequestRecord, ServerSettings, short_name
from lab.runner import machine

if TYPE_CHECKING:
    import pandas as pd

PLACING = tuple(name for name, setting in table().items() if setting.is_placing and name != "rpc")
"""Settings of placement. The machine's label names RPC servers."""

SERVING = ("server", "api", "n_slots", "slot_ctx", "model_file", "quantization")
"""For requests: the server, its address and what it reports. A table without requests lacks these columns."""

SETUP = (
    *("model", "model_sha256", *SERVING, "machine", "devices", "power", "ram_gb", "os"),
    *("llama_cpp_python", "llama_cpp_commit", "system_info"),
    *("n_gpu_layers", "n_threads", "n_threads_batch", "n_batch", "n_ubatch", "flash_attn", "type_k", "type_v"),
    *("kv_unified", *PLACING, "prompt", "prompt_sha256", "sweep_every", "variant"),
)
"""Runs are repeats of each other if these, n_prompt and n_gen are equal."""

IDENTITY = ("model_sha256", "devices", "power", "ram_gb", "os", "llama_cpp_commit", "system_info", "prompt_sha256")
"""Parts of a setup that a label shows only if nothing else tells its setup from the others."""

OF_CLIENT = ("machine", "power", "ram_gb", "os")
"""Parts of a request's setup that describe the client's machine."""


def fields(table: pd.DataFrame) -> list[str]:
    """The names of SETUP that a table has as columns."""
    return [name for name in SETUP if name in table.columns]


def of_engine_only() -> list[str]:
    """The names of SETUP that no request has, because a server does not show them."""
    return [name for name in SETUP if name not in ("model", *SERVING, *OF_CLIENT, "variant")]


def differing(table: pd.DataFrame, n_setups: int) -> list[str]:
    """The fewest fields in which setups differ: chosen fields before those of IDENTITY."""
    if table.variant.nunique() == n_setups:
        return ["variant"]
    names: list[str] = []
    n_distinct = 1
    present = fields(table)
    chosen = sorted((name for name in present if name not in IDENTITY), key=lambda name: name != "server")
    for name in (*chosen, *(name for name in present if name in IDENTITY)):
        n = table.groupby([*names, name], dropna=False).ngroups
        if n > n_distinct:
            names.append(name)
            n_distinct = n
    names.sort(key=SETUP.index)
    return names if {"model", "machine"} & set(names) else ["model", *names]


def label(row: pd.Series, rows: Sequence[pd.Series], names: Sequence[str]) -> str:
    """The named fields of a setup in words, without details that do not tell it from the other rows."""
    kept = list(names)
    for name in [name for name in reversed(names) if name in (*IDENTITY, "kv_unified")]:
        fewer = [other for other in kept if other != name]
        if sum(named(one, fewer) == named(row, fewer) for one in rows) == 1:
            kept = fewer
    return ", ".join(named(row, kept))


def named(row: pd.Series, names: Sequence[str]) -> list[str]:
    """The named fields of a setup in words. A missing sweep or variant is left out."""
    words = []
    for name in names:
        value = row[name]
        if value != value or value is None:
            missing = unset(name)
            words += [missing] if name == "server" else [f"{name} {missing}"] if missing != "none" else []
            continue
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        if name in ("model", "server", "machine", "variant"):
            text = short_name(text) if name == "model" else text
            words.append(f"client {text}" if name == "machine" and is_request(row) else text)
        else:
            words.append(f"{name} {text if len(text) <= 40 else f'{text[:12]}...'}")
    return words


def is_request(row: Any) -> bool:
    """Whether a row (of any table) is of requests to a server, not of runs of the engine."""
    return isinstance(row.get("server"), str)


def unset(name: str) -> str:
    """The meaning of a missing value of a field: none, chosen by llama.cpp, or unknown."""
    if name == "server":
        return "in process"
    if name in PLACING:
        return "default"
    return "none" if name in ("sweep_every", "variant", "api") else "unknown"


def model_label(record: Record) -> str:
    """Name and quantization for titles, and whether the weights are random or re-quantized."""
    model = record.model
    origin = {"synthetic": " (random weights)", "requantized": " (re-quantised)"}.get(model.source, "")
    return f"{model.name}{'' if model.quantization is None else f' {model.quantization}'}{origin}"


def server_label(endpoint: Endpoint) -> str:
    """Such as "llama-server b6000 at http://127.0.0.1:8080/v1". Another address is another server."""
    words = [word for word in (endpoint.server or "server", endpoint.version) if word]
    return f"{' '.join(words)} at {endpoint.url}"


def of_run(record: Record) -> dict[str, Any]:
    """The setup of a run; None for what the record does not contain."""
    settings, here = record.settings, record.machine
    own: dict[str, Any] = {}
    for name in SETUP:
        if hasattr(settings, name) and name not in ("flash_attn", "devices", *PLACING):
            value = getattr(settings, name)
            unknown = name in ("n_threads", "n_threads_batch", "n_gpu_layers") and value < 0
            own[name] = None if unknown else value
    for name in PLACING:  # lists as one string; None: llama.cpp chooses
        value = getattr(settings, table()[name].record_name or name)
        if isinstance(value, tuple):
            value = ",".join(f"{part:g}" if isinstance(part, float) else part for part in value)
        own[name] = value
    return {
        "model": model_label(record),
        "machine": machine.label(here, settings) + (" (imported)" if record.run.totals else ""),
        # all that can be offloaded to, such as "2 x NVIDIA H200"
        "devices": (machine.in_words(machine.accelerators(here.devices)) or "none") if here.devices else None,
        "power": here.power,
        "model_sha256": record.model.sha256,
        "ram_gb": _ram_gb(here),
        "os": here.os,
        "llama_cpp_python": here.llama_cpp_python,
        "llama_cpp_commit": here.llama_cpp_commit,
        "system_info": here.system_info,
        "flash_attn": settings.flash_attn_resolved or settings.flash_attn,
        **own,
        "prefill_wait": settings.prefill_wait or "step",
        "sweep_every": record.run.every,
        "variant": record.run.variant,
    }


def of_request(record: RequestRecord) -> dict[str, Any]:
    """The setup of a request: the server, what it reports, and the client's machine. Other fields are None."""
    endpoint = record.endpoint
    settings = endpoint.settings or ServerSettings()
    return dict.fromkeys(SETUP) | {
        "model": record.model,
        "server": server_label(endpoint),
        "api": endpoint.api,
        "n_slots": settings.n_slots,
        "slot_ctx": settings.n_ctx,
        "model_file": settings.model_file,
        "quantization": settings.quantization,
        "machine": machine.label(record.machine),
        "power": record.machine.power,
        "ram_gb": _ram_gb(record.machine),
        "os": record.machine.os,
    }


def _ram_gb(here: Machine) -> int | None:
    return None if here.ram_bytes is None else round(here.ram_bytes / 1e9)


def where(records: Sequence[Record]) -> str:
    """The model and the machine of runs, or the number of each."""
    machines = [machine.label(record.machine, record.settings) for record in records]
    n_computers = len({(record.machine.cpu, record.machine.ram_bytes) for record in records})
    models = one_of([model_label(record) for record in records], "models")
    return f"{models} on {one_of(machines, 'machines' if n_computers > 1 else 'devices')}"


def one_of(names: Iterable[str], kind: str) -> str:
    """The only name, or the number of different ones."""
    distinct = sorted(set(names))
    return str(distinct[0]) if len(distinct) == 1 else f"{len(distinct)} {kind}"
