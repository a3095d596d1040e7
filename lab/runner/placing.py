"""Where a model lies: devices and builds as settings of llama.cpp, and whether a plan fits there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lab.core import memory as sizes
from lab.core.asked_settings import END, AskedSettings, parts
from lab.core.lists import plural
from lab.core.memory import CPU, Memory, Place
from lab.core.record import Device, Model
from lab.errors import LabError
from lab.runner import builds, machine
from lab.runner.cases import Case, Plan, with_room

AS_ASKED = ("kv_offload", "op_offload", "mmap", "repack")  # settings that llama.cpp gets unchanged
MOST_TOKENS = 2**31  # llama.cpp counts positions in 32 bits


def settings(
    asked: AskedSettings, n_gpu_layers: int, devices: Sequence[Device], model: Model
) -> dict[str, Any]:
    """The fields of Settings for a model's placement. LabError for an unknown device."""
    used = _asked_devices(asked, devices)
    chosen: dict[str, Any] = {
        **{name: getattr(asked, name) for name in AS_ASKED},
        "devices": tuple(device.name for device in used) or None if parts(asked.device) else None,
        "n_cpu_moe": asked.n_cpu_moe or None,
        "lib": builds.name_of(asked.lib),
    }
    is_whole = n_gpu_layers < 0 or (model.n_layer is not None and n_gpu_layers > model.n_layer)
    waits_once = (
        len(used) > 1 and is_whole and asked.kv_offload is not False and not asked.n_cpu_moe
    )  # a pipeline
    return chosen | {"prefill_wait": asked.prefill_wait or (END if waits_once else None)}


def warnings(asked: AskedSettings, devices: Sequence[Device], model: Model) -> list[str]:
    """A sentence for each setting without effect on this model, or on these devices."""
    words = []
    n_layers = asked.n_gpu_layers
    if (
        isinstance(n_layers, int)
        and n_layers
        and not asked.is_on_cpu
        and not machine.accelerators(devices)
    ):
        words.append(
            f"--n-gpu-layers {n_layers} has no effect: this build of llama.cpp finds no GPU (see INSTALL.md)."
        )
    if asked.n_cpu_moe and not model.n_expert:
        words.append(f"--n-cpu-moe {asked.n_cpu_moe} has no effect: {model.name} has no experts.")
    return words


def _asked_devices(asked: AskedSettings, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that layers may go to. LabError for an unknown name, or one that is given twice."""
    names = parts(asked.device)
    if not names:
        return machine.by_default(devices)
    if asked.is_on_cpu:
        return ()
    known = {device.name.lower(): device for device in machine.accelerators(devices)}
    for name in names:
        if name.lower() not in known:
            there = ", ".join(device.name for device in known.values())
            offer = f"Layers can go to: {there}." if known else "This build finds no GPU."
            raise LabError(
                f"--device {name}: no such device.", f"{offer} For the CPU only: --device none"
            )
    if len({name.lower() for name in names}) < len(names):
        raise LabError(
            f"--device {','.join(names)} names a device twice.", "Name each device once."
        )
    return tuple(known[name.lower()] for name in names)


def free(plan: Plan) -> dict[str, int]:
    """Free bytes of each device, or its total bytes if only these are known, and of this machine's memory (CPU)."""
    totals = {
        device.name: device.memory_bytes for device in plan.machine.devices if device.memory_bytes
    }
    return {**totals, **plan.free, CPU: machine.memory_available()}


def places(plan: Plan, case: Case) -> tuple[Place, ...] | None:
    """The layers and memory of each device for this case alone, the CPU last; None if they cannot be computed."""
    room = with_room(plan.settings, [case])
    names = [one.name for one in machine.used(plan.machine, plan.settings)]
    shares = sizes.shares(free(plan), names)
    own = sizes.places(plan.model, room, plan.tensors or (), names, shares)
    if plan.draft is None or own is None:
        return own
    draft = plan.draft.model
    other = sizes.places(draft, room, (), names, shares)
    if other is None:
        return None
    pairs = zip(own, other, strict=True)
    return tuple(
        dataclasses.replace(one, memory=one.memory.beside(two.memory)) for one, two in pairs
    )


def memory(plan: Plan, case: Case) -> Memory:
    """The memory of a case on all devices together; each device has its own buffers."""
    whole = plan.memory(case)
    where = places(plan, case) if machine.used(plan.machine, plan.settings) else None
    if not where or None in (whole.kv_cache_bytes, whole.compute_bytes):
        return whole
    weights = sum(place.memory.weights_bytes for place in where)
    return Memory(
        weights, whole.kv_cache_bytes, sum(place.memory.compute_bytes or 0 for place in where)
    )


def memory_for(plan: Plan) -> int | None:
    """Bytes for weights, cache and buffers: those of the devices; unless all layers are there, those of RAM too."""
    n_layers = plan.settings.n_gpu_layers
    if n_layers == 0:
        return machine.memory_available()
    is_all = plan.model.n_layer is not None and not 0 <= n_layers <= plan.model.n_layer
    names = [device.name for device in machine.used(plan.machine, plan.settings)] + (
        [] if is_all else [CPU]
    )
    has = free(plan)
    return sum(has[name] for name in names) if has.keys() >= set(names) else None


def checked(plan: Plan) -> Plan:
    """The plan with `refused` cases; for --n-gpu-layers auto with as many layers on devices as fit."""
    if plan.auto and plan.model.n_layer is not None and machine.accelerators(plan.machine.devices):
        plans = (_with_layers(plan, n) for n in range(plan.model.n_layer + 1, 0, -1))
        fitting = (one for one in plans if not any(_problem(one, case) for case in one.cases))
        plan = next(fitting, _with_layers(plan, 0))
    refused = {case: problem for case in plan.cases if (problem := _problem(plan, case))}
    return dataclasses.replace(plan, refused=refused)


def _with_layers(plan: Plan, n: int) -> Plan:
    """The plan with n layers on devices, and the settings that depend on this."""
    more = settings(plan.auto, n, plan.machine.devices, plan.model) if plan.auto else {}
    return dataclasses.replace(
        plan, settings=dataclasses.replace(plan.settings, n_gpu_layers=n, **more)
    )


def _problem(plan: Plan, case: Case) -> str | None:
    """Why a case does not fit, with the largest number of layers that does; None if it fits, or this is unknown."""
    need = plan.memory(case)
    room = with_room(plan.settings, [case])
    several = f" for {room.n_seq_max:,} sequences" if room.n_seq_max > 1 else ""
    context = f"A context of {room.n_ctx:,} tokens{several}"
    cache = (need.kv_cache_bytes or 0) / 1e9
    total = f"{context} needs about {need.total_bytes / 1e9:,.1f} GB of memory (KV cache: {cache:,.1f} GB)"
    where = places(plan, case) if machine.used(plan.machine, plan.settings) else None
    if where is None:
        available = memory_for(plan)
        if room.n_ctx < MOST_TOKENS and (available is None or need.total_bytes <= available):
            return None
        return (
            f"{total}; {available / 1e9:,.1f} GB are available."
            if available is not None
            else f"{total}."
        )
    over = _over(plan, where)
    if over is None:
        return None if room.n_ctx < MOST_TOKENS else f"{total}."

    described = {
        device.name: f"{device.name} ({device.description})" for device in plan.machine.devices
    }
    needs = f"{over.memory.total_bytes / 1e9:,.1f} GB for {plural(len(over.layers), 'layer')}"
    sentence = f"{described.get(over.device, CPU)} needs {needs} and has {free(plan)[over.device] / 1e9:,.1f} GB"
    for n in range((plan.model.n_layer or 0) + 1, 0, -1):
        smaller = _with_layers(plan, n)
        fewer = places(smaller, case)
        if n != plan.settings.n_gpu_layers and fewer and _over(smaller, fewer) is None:
            most = next(len(place.layers) for place in fewer if place.device == over.device)
            return f"{context}: {sentence}: at most {most} fit: --n-gpu-layers {n}"
    return f"{context}: {sentence}: no number of layers fits."


def _over(plan: Plan, where: Sequence[Place]) -> Place | None:
    """The first device whose memory is too small."""
    has = free(plan)
    return next(
        (place for place in where if place.memory.total_bytes > has.get(place.device, math.inf)),
        None,
    )
