"""Setups as text: the machine and its build, the model, and a plan with the placement of its largest case."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from lab.core.lines import to_json
from lab.core.lists import plural
from lab.core.placement import CPU
from lab.core.record import Machine, Model
from lab.runner import machine, placing
from lab.runner.cases import Plan, named
from lab.show.console import Grid, console, print_json
from lab.show.wording import digits


def describe(here: Machine, model: Model | None = None) -> list[str]:
    """Lines that name the machine, its build and the model."""
    return [f"{name:8} {text}" for name, text in facts(here, model).items()]


def facts(here: Machine, model: Model | None = None) -> dict[str, str]:
    """The same by name: machine, build, model. Unknown parts are left out."""
    ram = f", {here.ram_bytes / 1e9:.0f} GB RAM" if here.ram_bytes else ""
    kind, power = ", virtual machine" if here.virtual else "", f", on {here.power}" if here.power else ""
    texts = {"machine": f"{machine.label(here)}{ram}{kind}{power}{f'; {here.os}' if here.os else ''}"}
    if here.llama_cpp_python:
        devices = machine.accelerators(here.devices)
        offload = ", ".join(f"{machine.describe_device(device)} ({device.name})" for device in devices)
        commit = f" (llama.cpp {here.llama_cpp_commit})" if here.llama_cpp_commit else ""
        commit = commit.replace("-dirty", " with changes")
        lib = f", libraries of {here.lib}" if here.lib else ""
        computes_on = offload or "the CPU (this build finds no GPU)"
        texts["build"] = f"llama-cpp-python {here.llama_cpp_python}{commit}{lib}; computes on {computes_on}"
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
    needs, placed = {case: placing.memory(plan, case) for case in plan.cases}, places(plan)
    settings = {name: value for name, value in dataclasses.asdict(plan.settings).items() if value is not None}
    if as_json:
        cases = [
            {
                **{name: value for name, value in named(case).items() if value is not None},
                "memory": dataclasses.asdict(need),
                "refused": plan.refused.get(case),
            }
            for case, need in needs.items()
        ]
        as_dicts, whole = json.loads(to_json(cases)), dataclasses.asdict(plan.settings)
        print_json({"cases": as_dicts, "repeat": plan.n_repeat, "settings": whole, "places": placed})
        return
    out, grid = console(), Grid("case", "runs", "KV cache MB", "memory MB", "note")
    rounds, tokens = plural(plan.n_repeat, "round"), plural(plan.cases[0].n_gen, "token")
    out.print(f"\nPlan: {rounds}, {tokens} generated per sequence; memory is an estimate")
    for case, need in needs.items():
        n_runs, note = "0" if case in plan.refused else f"{plan.n_repeat}", plan.refused.get(case, "")
        grid.add_row(case.name, n_runs, megabytes(need.kv_cache_bytes), megabytes(need.total_bytes), note)
    out.print(grid)
    if placed:
        grid = Grid("device", "layers", "weights MB", "KV cache MB", "compute MB", "needs MB", "has MB")
        for row in placed:
            layers = "not estimated" if row["layers"] is None else ranges(row["layers"], row["output_layer"])
            sizes = [megabytes(row[f"{name}_bytes"]) for name in ("weights", "kv_cache", "compute", "needs", "has")]
            sizes[-1] += f" with {', '.join(row['shares'])}" if row["shares"] else ""
            grid.add_row(row["device"], layers, *sizes)
        out.print(grid)
    out.print(", ".join(f"{name} {value}" for name, value in settings.items()))


def places(plan: Plan) -> list[dict[str, Any]] | None:
    """The placement for the largest case of a plan, device by device; None if everything stays on the CPU.

    In bytes; None if unknown. Devices that share a memory have the same `has_bytes`; `shares` names them.
    """
    used = machine.used(plan.machine, plan.settings)
    if not used:
        return None
    case = max(plan.cases, key=lambda case: plan.memory(case).total_bytes)
    by_device, rooms = {place.device: place for place in placing.places(plan, case) or ()}, placing.rooms(plan)
    descriptions, planned = {device.name: device.description for device in plan.machine.devices}, []
    for name in (*(device.name for device in used), CPU):
        room, place = next(room for room in rooms if name in room.devices), by_device.get(name)
        memory = place.memory if place else None
        planned.append(
            {
                "device": name,
                "description": descriptions.get(name),
                "layers": None if place is None else list(place.layers),
                "output_layer": plan.model.n_layer,
                "weights_bytes": memory and memory.weights_bytes,
                "kv_cache_bytes": memory and memory.kv_cache_bytes,
                "compute_bytes": memory and memory.compute_bytes,
                "needs_bytes": memory and memory.total_bytes,
                "has_bytes": room.n_bytes,
                "shares": [other for other in room.devices if other != name],
            }
        )
    return planned


def notes(plan: Plan) -> list[str]:
    """The result of `--n-gpu-layers auto`, and the cases that will be skipped."""
    sentences = []
    if plan.auto and plan.model.n_layer is not None and machine.accelerators(plan.machine.devices):
        n, n_all = plan.settings.n_gpu_layers, plan.model.n_layer + 1
        sentences.append(f"--n-gpu-layers auto: {n} of {n_all} layers go to devices (the output counts as one).")
    if plan.refused:
        names = "; ".join(case.name for case in plan.refused)
        sentences.append(f"{names} will be skipped: {' '.join(plan.refused.values())}")
    return sentences


def ranges(layers: Iterable[int], n_layer: int | None) -> str:
    """`0-15, output`: layers by number, that after the last one as the output."""
    numbers = sorted(layers)
    plain = [number for number in numbers if number != n_layer]
    starts = [b for a, b in pairwise([-2, *plain]) if b != a + 1]
    ends = [a for a, b in pairwise([*plain, plain[-1] + 2]) if b != a + 1] if plain else []
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join([*words, *(["output"] if len(plain) < len(numbers) else [])]) or "none"


def megabytes(n_bytes: float | None) -> str:
    return "unknown" if n_bytes is None else digits(n_bytes / 1e6)
