"""Setups as text: the machine and its build, the models, and a plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.core.lines import to_json
from lab.core.lists import plural
from lab.core.record import Machine, Model
from lab.models.catalog import SYNTHETIC, Entry, Spec
from lab.models.obtain import Listed
from lab.runner import builds, machine, plan_needs
from lab.runner.cases import Plan, named
from lab.show import text_places, wording
from lab.show.console import Grid, console, print_json


def describe(here: Machine, model: Model | None = None) -> list[str]:
    """Lines that name the machine, its build and the model."""
    return [f"{name:8} {text}" for name, text in facts(here, model).items()]


def facts(here: Machine, model: Model | None = None) -> dict[str, str]:
    """The same by name: machine, build, model. Unknown parts are left out."""
    ram = f", {here.ram_bytes / 1e9:.0f} GB RAM" if here.ram_bytes else ""
    kind = ", virtual machine" if here.virtual else ""
    power = f", on {here.power}" if here.power else ""
    system = f"; {here.os}" if here.os else ""
    offload = ", ".join(
        f"{machine.describe_device(device)} ({device.name})" for device in machine.accelerators(here.devices)
    )
    commit = f" (llama.cpp {here.llama_cpp_commit})" if here.llama_cpp_commit else ""
    computes_on = offload or "the CPU (this build finds no GPU)"
    texts = {"machine": f"{machine.label(here)}{ram}{kind}{power}{system}"}
    if here.llama_cpp_python:
        lib = f", libraries of {here.lib}" if here.lib else ""
        texts["build"] = f"llama-cpp-python {here.llama_cpp_python}{commit}{lib}; computes on {computes_on}"
    if model:
        parts = [
            f"{model.name} {model.quantization or ''}".strip(),
            f"{model.n_bytes / 1e6:,.0f} MB" if model.n_bytes else "",
            f"architecture {model.arch}" if model.arch else "",
            f"{model.n_layer} layers" if model.n_layer else "",
            f"context of {model.n_ctx_train:,} tokens" if model.n_ctx_train else "",
        ]
        texts["model"] = f"{', '.join(part for part in parts if part)} ({model.source})"
    return texts


def amx(system_info: str) -> list[str]:
    """Lines on whether this build uses AMX, the matrix instructions of Intel Xeons; none if the CPU lacks them.

    The cost of a build without AMX was measured on one Xeon (llama-bench, 512 tokens of prompt, 64 generated).
    """
    if "AMX_INT8" not in (builds.cpu_features() or ()):
        return []
    if "AMX_INT8" in builds.built_for(system_info):
        return ["amx      this CPU has AMX, and this build uses it"]
    return [
        "amx      this CPU has AMX, but this build does not use it and is slower for it. SmolLM2 135M Q4_1 on 2 cores",
        "         of a Xeon: prefill 300 tokens/s without AMX and 1,100 with it, decode 80 and 170. To build with AMX:",
        "         python3 -m uv sync --reinstall-package llama-cpp-python --no-cache-dir",
    ]


def models_table(rows: Sequence[Listed]) -> Grid:
    """The available models. A size after ~ is the size of a download."""
    grid = Grid("name", "quantization", "MB", "on disk", "from", "what it is")
    for row in rows:
        size = "-" if row.n_bytes is None else f"{'' if row.on_disk else '~'}{row.n_bytes / 1e6:,.0f}"
        on_disk = "yes" if row.on_disk else "no"
        grid.add_row(row.spec, row.quantization or "-", size, on_disk, row.source, row.about)
    return grid


def describe_model(
    model: Model,
    path: Path | None,
    bytes_per_step: int | None,
    kv_per_position: float | None,
    kv_bytes: dict[int, int | None],
    n_ctx_fits: int | None,
) -> list[str]:
    """Lines that describe a model: file, shape, tensors, bytes per decode step, KV cache, longest context."""

    def megabytes(n: float | None) -> str:
        return "unknown" if n is None else f"{wording.digits(n / 1e6)} MB"

    heads = f"{model.n_head} heads of {model.head_dim}, {model.n_head_kv} for keys and values"
    tied = {True: "tied to the embedding", False: "separate", None: "unknown"}[model.tied_embeddings]
    types = ", ".join(f"{kind} {megabytes(n)}" for kind, n in sorted(model.tensor_bytes.items(), key=lambda kv: -kv[1]))
    cache = ", ".join(f"{megabytes(n_bytes)} at {n:,}" for n, n_bytes in kv_bytes.items())
    position = "unknown" if kv_per_position is None else f"{kv_per_position:,.0f}"
    reason = f" ({model.uncounted})" if model.uncounted else ""
    fits = f"unknown{reason}" if n_ctx_fits is None else f"a context of about {n_ctx_fits:,} tokens"
    return [
        f"name      {model.name} {model.quantization or ''} ({model.source})",
        f"file      {path or 'not on this machine'}, {megabytes(model.n_bytes)}",
        f"shape     {model.arch}: {model.n_layer} layers, {model.n_embd} wide, feed-forward {model.n_ff}, {heads}",
        f"tokens    vocabulary of {model.n_vocab}, output matrix {tied}, trained for {model.n_ctx_train}",
        f"tensors   {types}",
        f"decode    reads {megabytes(bytes_per_step)} of weights per step",
        f"KV cache  {position} bytes per position (F16): {cache}",
        f"fits      {fits} in the currently free memory",
    ]


def print_plan(plan: Plan, as_json: bool) -> None:
    """Prints what `--dry-run` shows."""
    if as_json:
        cases = [
            {
                **{name: value for name, value in named(case).items() if value is not None},
                "memory": dataclasses.asdict(plan_needs.memory(plan, case)),
                "refused": plan.refused.get(case),
            }
            for case in plan.cases
        ]
        settings = dataclasses.asdict(plan.settings)
        as_dicts = json.loads(to_json(cases))
        print_json({"cases": as_dicts, "repeat": plan.n_repeat, "settings": settings, "places": text_places.rows(plan)})
        return
    out = console()
    n_gen = plan.cases[0].n_gen
    rounds, tokens = plural(plan.n_repeat, "round"), plural(n_gen, "token")
    out.print(f"\nPlan: {rounds}, {tokens} generated per sequence; memory is an estimate")
    out.print(plan_table(plan))
    if placed := text_places.rows(plan):
        out.print(text_places.plan_table(placed))
    out.print(
        ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(plan.settings).items() if value is not None)
    )


def plan_table(plan: Plan) -> Grid:
    """The runs and estimated memory of a plan, one row per case."""
    grid = Grid("case", "runs", "KV cache MB", "memory MB", "note")
    for case in plan.cases:
        memory = plan_needs.memory(plan, case)
        grid.add_row(
            case.name,
            "0" if case in plan.refused else f"{plan.n_repeat}",
            "unknown" if memory.kv_cache_bytes is None else wording.digits(memory.kv_cache_bytes / 1e6),
            wording.digits(memory.total_bytes / 1e6),
            plan.refused.get(case, ""),
        )
    return grid


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


def sizes_table(by_quantization: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row for each quantization: the file's size, the bytes read per decode step, and the context that fits."""
    grid = Grid("quantization", "MB", "MB read per decode step", "context that fits")
    for quantization, figures in by_quantization.items():
        read, fits = figures["weight_bytes_per_decode_step"], figures["n_ctx_that_fits"]
        grid.add_row(
            quantization,
            wording.digits(figures["n_bytes"] / 1e6),
            "unknown" if read is None else wording.digits(read / 1e6),
            "unknown" if fits is None else f"{fits:,}" if fits else "none",
        )
    return grid


def how_to_get(spec: Spec, entry: Entry, commands: list[str]) -> list[str]:
    """The source of the shape, and the commands that download the file or make one with random weights."""
    n_bytes = entry.n_bytes if spec.quantization in (None, entry.quantization) else None
    lines = [f"Computed from the shape ({entry.shape_source}). The context fits into the memory that is free now."]
    if spec.source != SYNTHETIC:
        download = f" (a download of about {n_bytes / 1e6:,.0f} MB)" if n_bytes else ""
        lines.append(f"To get it: {commands[0]}{download}")
    lines.append(f"With random weights, to measure its speed: {commands[-1]}")
    return lines
