"""What will be measured, as text: the machine and its build, the model, a plan with its
placement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from lab.core.lines import to_json
from lab.core.lists import plural
from lab.core.memory import CPU
from lab.core.record import Machine, Model
from lab.runner import machine, placement
from lab.runner.cases import Plan, named
from lab.show.cells import LONG_TEXT, Column
from lab.show.console import Grid, console, print_json
from lab.show.wording import digits

SIZES = {
    "weights": "weights",
    "KV cache": "kv_cache",
    "compute": "compute",
    "needs": "needs",
    "has": "has",
}
"""Of each device in a plan: headings, and names in JSON without their `_bytes`."""


def describe(here: Machine, model: Model | None = None) -> list[str]:
    """Lines that name the machine, its build and the model."""
    return [f"{name:8} {text}" for name, text in facts(here, model).items()]


def facts(here: Machine, model: Model | None = None) -> dict[str, str]:
    """The same by name: machine, build, model. Unknown parts are left out."""
    texts = {"machine": _machine_text(here)}
    if here.llama_cpp_python:
        texts["build"] = _build_text(here)
    if model:
        texts["model"] = _model_text(model)
    return texts


def _machine_text(here: Machine) -> str:
    text = machine.label(here)
    if here.cpu_quota is not None:
        text += " (CPU quota)"
    if here.ram_bytes:
        text += f", {here.ram_bytes / 1e9:.0f} GB RAM"
    if here.virtual:
        text += ", virtual machine"
    if here.power:
        text += f", on {here.power}"
    if here.os:
        text += f"; {here.os}"
    return text


def _build_text(here: Machine) -> str:
    text = f"llama-cpp-python {here.llama_cpp_python}"
    if here.llama_cpp_commit:
        text += f" (llama.cpp {here.llama_cpp_commit})"
    if here.lib:
        text += f", libraries of {here.lib}"
    devices = machine.accelerators(here.devices)
    if not devices:
        return f"{text}; computes on the CPU (this build finds no GPU)"
    names = [f"{machine.describe_device(device)} ({device.name})" for device in devices]
    return f"{text}; computes on {', '.join(names)}"


def _model_text(model: Model) -> str:
    parts = [f"{model.name} {model.quantization or ''}".strip()]
    if model.n_bytes:
        parts.append(f"{model.n_bytes / 1e6:,.0f} MB")
    if model.arch:
        parts.append(f"architecture {model.arch}")
    if model.n_layer:
        parts.append(f"{model.n_layer} layers")
    if model.n_ctx_train:
        parts.append(f"context of {plural(model.n_ctx_train, 'token')}")
    return f"{', '.join(parts)} ({model.source})"


def notes(plan: Plan) -> list[str]:
    """The result of `--n-gpu-layers auto`, and the cases that will be skipped."""
    sentences = []
    if (
        plan.auto
        and plan.model.n_layer is not None
        and machine.accelerators(plan.machine.devices)
    ):
        n_layers = plan.settings.n_gpu_layers
        n_all = plan.model.n_layer + 1
        sentences.append(
            f"--n-gpu-layers auto: {n_layers} of {n_all} layers go to devices "
            "(the output counts as one)."
        )
    if plan.refused:
        names = "; ".join(case.name for case in plan.refused)
        sentences.append(f"{names} will be skipped: {' '.join(plan.refused.values())}")
    return sentences


def print_plans(plans: Mapping[str, Plan], as_json: bool) -> None:
    """Print what `--dry-run` shows of variants: a plan for each."""
    if as_json:
        print_json({name: _plan_document(plan) for name, plan in plans.items()})
        return
    for name, plan in plans.items():
        console().print(f"\n{name}")
        print_plan(plan, as_json)


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print what `--dry-run` shows: cases with their memory, the placement, and the settings."""
    if as_json:
        print_json(_plan_document(plan))
        return
    out = console()
    rounds = plural(plan.n_repeat, "round")
    tokens = plural(plan.cases[0].n_gen, "token")
    out.print(f"\nPlan: {rounds}, {tokens} generated per sequence; memory is an estimate")
    grid = Grid(
        Column("case"),
        Column("runs"),
        Column("KV cache MB", priority=-1),
        Column("memory MB"),
        Column("note", kind=LONG_TEXT),
    )
    for case in plan.cases:
        memory = placement.memory(plan, case)
        is_refused = case in plan.refused
        grid.add_row(
            case.name,
            "0" if is_refused else f"{plan.n_repeat}",
            megabytes(memory.kv_cache_bytes),
            megabytes(memory.total_bytes),
            plan.refused.get(case, ""),
        )
    out.print(grid)
    rows = places(plan)
    if rows:
        out.print(_grid_of_places(rows, plan))
    settings = dataclasses.asdict(plan.settings)
    if plan.settings.sampling is not None:
        settings["sampling"] = plan.settings.sampling.label
    chosen = [f"{name} {value}" for name, value in settings.items() if value is not None]
    out.print(", ".join(chosen))


def _plan_document(plan: Plan) -> dict[str, object]:
    cases = []
    for case in plan.cases:
        memory = dataclasses.asdict(placement.memory(plan, case))
        fields = {name: value for name, value in named(case).items() if value is not None}
        cases.append({**fields, "memory": memory, "refused": plan.refused.get(case)})
    return {
        "cases": json.loads(to_json(cases)),
        "repeat": plan.n_repeat,
        "settings": dataclasses.asdict(plan.settings),
        "places": places(plan),
    }


def places(plan: Plan) -> list[dict[str, Any]] | None:
    """The placement for the largest case of a plan, device by device; None on the CPU.

    Sizes are in bytes (None: unknown).
    """
    devices = machine.used(plan.machine, plan.settings)
    if not devices:
        return None
    largest = max(plan.cases, key=lambda case: plan.memory(case).total_bytes)
    free = placement.free(plan)
    place_of = {place.device: place for place in placement.places(plan, largest) or ()}
    rows = []
    for name in (*(device.name for device in devices), CPU):
        row: dict[str, Any] = {"device": name, "output_layer": plan.model.n_layer}
        row |= {"layers": None, "caches": None, "experts": None}
        row |= {f"{size}_bytes": None for size in SIZES.values()}
        row["has_bytes"] = free.get(name)
        if name in place_of:
            place = place_of[name]
            row |= {"layers": list(place.layers), **dataclasses.asdict(place.memory)}
            row |= {"caches": list(place.caches), "experts": list(place.experts)}
            row["needs_bytes"] = place.memory.total_bytes
        rows.append(row)
    return rows


def _grid_of_places(rows: list[dict[str, Any]], plan: Plan) -> Grid:
    """A row for each device: the layers, caches and experts that it holds, and its memory.

    Caches have a column if they do not lie with their layers, experts if there are any.
    """
    contents = ["layers"]
    if any(
        row["caches"] != _without_output(row["layers"], row["output_layer"]) for row in rows
    ):
        contents.append("caches")
    if any(row["experts"] for row in rows):
        contents.append("experts")
    grid = Grid(*map(Column, ["device", *contents, *(f"{name} MB" for name in SIZES)]))
    for row in rows:
        texts = [_ranges(row[name], plan.model.n_layer) for name in contents]
        sizes = [megabytes(row[f"{size}_bytes"]) for size in SIZES.values()]
        grid.add_row(row["device"], *texts, *sizes)
    return grid


def _without_output(layers: list[int] | None, output: int | None) -> list[int] | None:
    """The numbers of the layers of a device, without the output's."""
    if layers is None:
        return None
    return [layer for layer in layers if layer != output]


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
        is_single = len(numbers) == 1
        texts.append(str(numbers[0]) if is_single else f"{numbers[0]}-{numbers[-1]}")
    if output in layers:
        texts.append("output")
    return ", ".join(texts) or "none"


def megabytes(n_bytes: float | None) -> str:
    return "unknown" if n_bytes is None else digits(n_bytes / 1e6)
