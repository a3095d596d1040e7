"""Setups: as text (the machine and its build, the model, a plan), and as columns of a table.

The setup of a run or a request is everything that repeats have in common. A server shows only a part of its setup.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lab.core.asked_settings import table as settings_table
from lab.core.lines import to_json
from lab.core.lists import plural
from lab.core.memory import CPU
from lab.core.record import Machine, Model, Record, Settings
from lab.core.request import RequestRecord, ServerSettings, short_name
from lab.runner import machine, placing
from lab.runner.cases import Plan, named
from lab.show.console import Grid, console, print_json
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd


class HasSetup(Protocol):
    """A run, or a finding that is none."""

    @property
    def machine(self) -> Machine: ...

    @property
    def model(self) -> Model: ...

    @property
    def settings(self) -> Settings: ...


def describe(here: Machine, model: Model | None = None) -> list[str]:
    """Lines that name the machine, its build and the model."""
    return [f"{name:8} {text}" for name, text in facts(here, model).items()]


def facts(here: Machine, model: Model | None = None) -> dict[str, str]:
    """The same by name: machine, build, model. Unknown parts are left out."""
    ram = f", {here.ram_bytes / 1e9:.0f} GB RAM" if here.ram_bytes else ""
    kind = ", virtual machine" if here.virtual else ""
    power = f", on {here.power}" if here.power else ""
    texts = {
        "machine": f"{machine.label(here)}{ram}{kind}{power}{f'; {here.os}' if here.os else ''}"
    }
    if here.llama_cpp_python:
        named = [
            f"{machine.describe_device(one)} ({one.name})"
            for one in machine.accelerators(here.devices)
        ]
        commit = f" (llama.cpp {here.llama_cpp_commit})" if here.llama_cpp_commit else ""
        lib = f", libraries of {here.lib}" if here.lib else ""
        offload = ", ".join(named) or "the CPU (this build finds no GPU)"
        texts["build"] = (
            f"llama-cpp-python {here.llama_cpp_python}{commit}{lib}; computes on {offload}"
        )
    if model:
        parts = [
            f"{model.name} {model.quantization or ''}".strip(),
            f"{model.n_bytes / 1e6:,.0f} MB" if model.n_bytes else "",
            f"architecture {model.arch}" if model.arch else "",
            f"{model.n_layer} layers" if model.n_layer else "",
            f"context of {model.n_ctx_train:,} tokens" if model.n_ctx_train else "",
        ]
        texts["model"] = f"{', '.join(filter(None, parts))} ({model.source})"
    return texts


def print_plan(plan: Plan, as_json: bool) -> None:
    """Prints what `--dry-run` shows: cases with their memory, the placement, and the settings."""
    needs = {case: placing.memory(plan, case) for case in plan.cases}
    placed = places(plan)
    settings = dataclasses.asdict(plan.settings)
    if as_json:
        known = [
            {name: value for name, value in named(case).items() if value is not None}
            for case in needs
        ]
        more = (
            {"memory": dataclasses.asdict(needs[case]), "refused": plan.refused.get(case)}
            for case in needs
        )
        cases = json.loads(to_json([one | two for one, two in zip(known, more, strict=True)]))
        print_json(
            {"cases": cases, "repeat": plan.n_repeat, "settings": settings, "places": placed}
        )
        return

    out = console()
    grid = Grid("case", "runs", "KV cache MB", "memory MB", "note")
    rounds = plural(plan.n_repeat, "round")
    tokens = plural(plan.cases[0].n_gen, "token")
    out.print(f"\nPlan: {rounds}, {tokens} generated per sequence; memory is an estimate")
    for case, need in needs.items():
        n_runs = "0" if case in plan.refused else f"{plan.n_repeat}"
        note = plan.refused.get(case, "")
        grid.add_row(
            case.name, n_runs, megabytes(need.kv_cache_bytes), megabytes(need.total_bytes), note
        )
    out.print(grid)
    if placed:
        out.print(_grid_of_places(placed, plan))
    out.print(", ".join(f"{name} {value}" for name, value in settings.items() if value is not None))


def _grid_of_places(placed: list[dict[str, Any]], plan: Plan) -> Grid:
    """A row for each device: the layers, caches and experts that it holds, and its memory.

    Caches have a column if they do not lie with their layers, experts if there are any.
    """
    held = ["layers"]
    if any(row["caches"] != _without_output(row) for row in placed):
        held.append("caches")
    if any(row["experts"] for row in placed):
        held.append("experts")
    grid = Grid("device", *held, *(f"{name} MB" for name in SIZES))
    for row in placed:
        texts = [_ranges(row[name], plan.model.n_layer) for name in held]
        sizes = [megabytes(row[f"{size}_bytes"]) for size in SIZES.values()]
        grid.add_row(row["device"], *texts, *sizes)
    return grid


def _without_output(row: dict[str, Any]) -> list[int] | None:
    """The numbers of the layers of a device, without the output's."""
    if row["layers"] is None:
        return None
    return [layer for layer in row["layers"] if layer != row["output_layer"]]


def _ranges(layers: list[int] | None, output: int | None) -> str:
    """Numbers of layers as ranges: [0, 1, 2, 5] is `0-2, 5`."""
    if layers is None:
        return "not estimated"
    ranges: list[list[int]] = []
    for layer in layers:
        if layer == output:
            continue
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1].append(layer)
        else:
            ranges.append([layer])
    texts = []
    for numbers in ranges:
        first_and_last = f"{numbers[0]}-{numbers[-1]}"
        texts.append(first_and_last if len(numbers) > 1 else str(numbers[0]))
    if output in layers:
        texts.append("output")
    return ", ".join(texts) or "none"


SIZES = {
    "weights": "weights",
    "KV cache": "kv_cache",
    "compute": "compute",
    "needs": "needs",
    "has": "has",
}
"""Of each device in a plan: headings, and names in JSON without their `_bytes`."""


def places(plan: Plan) -> list[dict[str, Any]] | None:
    """The placement for the largest case of a plan, device by device, in bytes (None: unknown); None on the CPU."""
    if not (used := machine.used(plan.machine, plan.settings)):
        return None
    case = max(plan.cases, key=lambda case: plan.memory(case).total_bytes)
    free = placing.free(plan)
    by_device = {place.device: place for place in placing.places(plan, case) or ()}
    planned = []
    for name in (*(device.name for device in used), CPU):
        row: dict[str, Any] = {"device": name, "output_layer": plan.model.n_layer}
        row |= {"layers": None, "caches": None, "experts": None}
        row |= {f"{size}_bytes": None for size in SIZES.values()} | {"has_bytes": free.get(name)}
        if name in by_device:
            place = by_device[name]
            row |= {"layers": list(place.layers), **dataclasses.asdict(place.memory)}
            row |= {"caches": list(place.caches), "experts": list(place.experts)}
            row["needs_bytes"] = place.memory.total_bytes
        planned.append(row)
    return planned


def notes(plan: Plan) -> list[str]:
    """The result of `--n-gpu-layers auto`, and the cases that will be skipped."""
    sentences = []
    if plan.auto and plan.model.n_layer is not None and machine.accelerators(plan.machine.devices):
        n = plan.settings.n_gpu_layers
        n_all = plan.model.n_layer + 1
        sentences.append(
            f"--n-gpu-layers auto: {n} of {n_all} layers go to devices (the output counts as one)."
        )
    if plan.refused:
        names = "; ".join(case.name for case in plan.refused)
        sentences.append(f"{names} will be skipped: {' '.join(plan.refused.values())}")
    return sentences


def megabytes(n_bytes: float | None) -> str:
    return "unknown" if n_bytes is None else digits(n_bytes / 1e6)


PLACING = tuple(name for name, setting in settings_table().items() if setting.is_placing)
"""Settings of placement."""

SERVING = ("server", "api", "n_slots", "slot_ctx", "model_file", "quantization")
"""For requests: the server, its address and what it reports. A table without requests lacks these columns."""

SETUP = (
    *("model", "model_sha256", *SERVING, "machine", "devices", "power", "ram_gb", "os"),
    *("llama_cpp_python", "llama_cpp_commit", "system_info"),
    *(
        "n_gpu_layers",
        "n_threads",
        "n_threads_batch",
        "n_batch",
        "n_ubatch",
        "flash_attn",
        "type_k",
        "type_v",
    ),
    *("kv_unified", *PLACING, "prompt", "prompt_sha256", "sweep_every", "variant"),
)
"""Runs are repeats of each other if these, n_prompt and n_gen are equal."""

IDENTITY = (
    "model_sha256",
    "devices",
    "power",
    "ram_gb",
    "os",
    "llama_cpp_commit",
    "system_info",
    "prompt_sha256",
)
"""Parts of a setup that a label shows only if nothing else tells its setup from the others."""

OF_CLIENT = ("machine", "power", "ram_gb", "os")
"""Parts of a request's setup that describe the client's machine."""


def fields(table: pd.DataFrame) -> list[str]:
    """The names of SETUP that a table has as columns."""
    return [name for name in SETUP if name in table.columns]


def of_engine_only() -> list[str]:
    """The names of SETUP that no request has, because a server does not show them."""
    return [name for name in SETUP if name not in ("model", *SERVING, *OF_CLIENT, "variant")]


def labels(table: pd.DataFrame, firsts: Sequence[pd.Series]) -> list[str]:
    """The label of each setup of a table, from its first row: the fewest fields in which it differs from the others.

    Chosen fields come before those of IDENTITY. For a single setup: model, server and machine.
    """
    names = ["model", *(["server"] if "server" in table else []), "machine"]
    if len(firsts) > 1 and table.variant.nunique() == len(firsts):
        names = ["variant"]
    elif len(firsts) > 1:
        names = []
        n_distinct = 1
        for name in sorted(fields(table), key=lambda name: (name in IDENTITY, name != "server")):
            if (n := table.groupby([*names, name], dropna=False).ngroups) > n_distinct:
                names.append(name)
                n_distinct = n
        names.sort(key=SETUP.index)
        names = names if {"model", "machine"} & set(names) else ["model", *names]
    made = []
    for row in firsts:
        kept = list(names)
        for name in [name for name in reversed(names) if name in (*IDENTITY, "kv_unified")]:
            fewer = [other for other in kept if other != name]
            if sum(_in_words(one, fewer) == _in_words(row, fewer) for one in firsts) == 1:
                kept = fewer  # this detail does not tell it from the other rows
        made.append(", ".join(_in_words(row, kept)))
    return made


def _in_words(row: pd.Series, names: Sequence[str]) -> list[str]:
    """The named fields of a setup. A missing sweep or variant is left out."""
    words = []
    for name in names:
        value = row[name]
        if value != value or value is None:
            missing = unset(name)
            words += (
                [missing]
                if name == "server"
                else [f"{name} {missing}"]
                if missing != "none"
                else []
            )
            continue
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        if name in ("model", "server", "machine", "variant"):
            text = short_name(text) if name == "model" else text
            words.append(f"client {text}" if name == "machine" and is_request(row) else text)
        elif name == "system_info":
            words.append(plural(text.count("= 1"), "CPU instruction set"))
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


def model_label(record: HasSetup) -> str:
    """Name and quantization for titles, and whether the weights are random or re-quantized."""
    model = record.model
    origin = {"synthetic": " (random weights)", "requantized": " (re-quantised)"}.get(
        model.source, ""
    )
    return f"{model.name}{'' if model.quantization is None else f' {model.quantization}'}{origin}"


def of_run(record: Record) -> dict[str, Any]:
    """The setup of a run; None for what the record does not contain."""
    settings = record.settings
    here = record.machine
    own = {
        name: getattr(settings, name)
        for name in SETUP
        if hasattr(settings, name) and name != "devices"
    }
    own |= {
        name: None for name in ("n_threads", "n_threads_batch", "n_gpu_layers") if own[name] < 0
    }
    for name in PLACING:  # lists as one string; None: llama.cpp chooses
        value = getattr(settings, settings_table()[name].record_name or name)
        is_list = isinstance(value, tuple)
        own[name] = (
            ",".join(f"{part:g}" if isinstance(part, float) else part for part in value)
            if is_list
            else value
        )
    return {
        "model": model_label(record),
        "machine": machine.label(here, settings)
        + (" (imported)" if record.run.imported_from else ""),
        # all that can be offloaded to, such as "2 x NVIDIA H200"
        "devices": (machine.in_words(machine.accelerators(here.devices)) or "none")
        if here.devices
        else None,
        "power": here.power,
        "model_sha256": record.model.sha256,
        "ram_gb": here.ram_bytes and round(here.ram_bytes / 1e9),
        "os": here.os,
        "llama_cpp_python": here.llama_cpp_python,
        "llama_cpp_commit": here.llama_cpp_commit,
        "system_info": here.system_info,
        **own,
        "flash_attn": settings.flash_attn_resolved or settings.flash_attn,
        "prefill_wait": settings.prefill_wait or "step",
        "sweep_every": record.run.every,
        "variant": record.run.variant,
    }


def of_request(record: RequestRecord) -> dict[str, Any]:
    """The setup of a request: the server, what it reports, and the client's machine. Other fields are None."""
    endpoint = record.endpoint
    here = record.machine
    settings = endpoint.settings or ServerSettings()
    return dict.fromkeys(SETUP) | {
        "model": record.model,
        # such as "llama-server b6000 at http://127.0.0.1:8080/v1": another address is another server
        "server": f"{' '.join(filter(None, (endpoint.server or 'server', endpoint.version)))} at {endpoint.url}",
        "api": endpoint.api,
        "n_slots": settings.n_slots,
        "slot_ctx": settings.n_ctx,
        "model_file": settings.model_file,
        "quantization": settings.quantization,
        "machine": machine.label(here),
        "power": here.power,
        "ram_gb": here.ram_bytes and round(here.ram_bytes / 1e9),
        "os": here.os,
    }


def where(records: Sequence[HasSetup]) -> str:
    """The model and the machine of runs, or the number of each."""
    machines = [machine.label(record.machine, record.settings) for record in records]
    n_computers = len({(record.machine.cpu, record.machine.ram_bytes) for record in records})
    models = one_of([model_label(record) for record in records], "models")
    return f"{models} on {one_of(machines, 'machines' if n_computers > 1 else 'devices')}"


def one_of(names: Iterable[str], kind: str) -> str:
    """The only name, or the number of different ones."""
    distinct = sorted(set(names))
    return str(distinct[0]) if len(distinct) == 1 else f"{len(distinct)} {kind}"
