"""The memory that a plan needs on each device, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import placement
from lab.core.lists import join_and
from lab.core.memory import Memory
from lab.core.placement import CPU, Place
from lab.core.record import Device, Model, Settings
from lab.runner import limits, machine, placing
from lab.runner.cases import Case, Plan, with_room
from lab.runner.placing import shared_memory

MOST_TOKENS = 2**31
"""llama.cpp counts positions in 32 bits."""


@dataclass(frozen=True)
class Room:
    """Devices that share one memory, and its free bytes; None if unknown."""

    devices: tuple[str, ...]
    n_bytes: int | None


def places(plan: Plan, case: Case) -> tuple[Place, ...] | None:
    """The layers and memory of each device for this case alone, the CPU last; None if they cannot be computed."""
    room = with_room(plan.settings, [case])
    own = _of_model(plan, plan.model, room, plan.tensors)
    if plan.draft is None or own is None:
        return own
    other = _of_model(plan, plan.draft.model, room, ())
    if other is None:
        return None
    return tuple(
        dataclasses.replace(place, memory=place.memory.beside(of_draft.memory))
        for place, of_draft in zip(own, other, strict=True)
    )


def memory(plan: Plan, case: Case) -> Memory:
    """The memory of a case on all devices together; each device has its own buffers."""
    whole = plan.memory(case)
    where = places(plan, case) if machine.used(plan.machine, plan.settings) else None
    if not where or None in (whole.kv_cache_bytes, whole.compute_bytes):
        return whole
    weights = sum(place.memory.weights_bytes for place in where)
    return Memory(weights, whole.kv_cache_bytes, sum(place.memory.compute_bytes or 0 for place in where))


def _of_model(
    plan: Plan, model: Model, settings: Settings, tensors: Sequence[placement.Tensor]
) -> tuple[Place, ...] | None:
    names = [device.name for device in machine.used(plan.machine, settings)]
    shares = placement.shares(_free(plan), names, settings.tensor_split)
    return placement.of(model, settings, tensors or placement.alike(model), names, shares)


def rooms(plan: Plan) -> tuple[Room, ...]:
    """The memories of the devices with layers and of the CPU, with their free bytes."""
    free, on_this_machine = _free(plan), limits.memory_available()
    devices = (*machine.used(plan.machine, plan.settings), Device(CPU, "", "cpu", plan.machine.ram_bytes))
    known = []
    for names, _ in shared_memory(devices, plan.machine.ram_bytes, machine.own_addresses()):
        own = tuple(device.name for device in devices if device.name in names)
        sizes = [on_this_machine if name == CPU else free.get(name) for name in own]
        sure = [size for size in sizes if size is not None]
        known.append(Room(own, min(sure, default=None)))
    return tuple(known)


def _free(plan: Plan) -> dict[str, int]:
    """Free bytes of each device, or its total bytes if only these are known."""
    sizes = {device.name: device.memory_bytes for device in plan.machine.devices if device.memory_bytes}
    return {**sizes, **plan.free}


def memory_for(plan: Plan) -> int | None:
    """Bytes for weights, cache and buffers: those of the devices; unless all layers are there, those of RAM too."""
    n_layers = plan.settings.n_gpu_layers
    if n_layers == 0:
        return limits.memory_available()
    is_all = plan.model.n_layer is not None and not 0 <= n_layers <= plan.model.n_layer
    sizes = [room.n_bytes for room in rooms(plan) if not is_all or room.devices != (CPU,)]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def too_large(plan: Plan) -> dict[Case, str]:
    """The cases that do not fit, with the reason. Allocating them anyway could bring the machine down."""
    return {case: problem for case in plan.cases if (problem := _problem(plan, case))}


def with_most_layers(plan: Plan) -> Plan:
    """The plan, for --n-gpu-layers auto with as many layers on devices as fit in all cases."""
    if plan.auto is None or plan.model.n_layer is None or not machine.accelerators(plan.machine.devices):
        return plan
    plans = (_with_layers(plan, n) for n in range(plan.model.n_layer + 1, 0, -1))
    return next((fitting for fitting in plans if not too_large(fitting)), _with_layers(plan, 0))


def _with_layers(plan: Plan, n: int) -> Plan:
    """The plan with n layers on devices, and the settings that depend on this."""
    settings = dataclasses.replace(plan.settings, n_gpu_layers=n)
    if plan.auto is not None:
        devices = plan.machine.devices
        settings = dataclasses.replace(settings, **placing.settings(plan.auto, n, devices, plan.model))
    return dataclasses.replace(plan, settings=settings)


def _problem(plan: Plan, case: Case) -> str | None:
    """Why a case does not fit; None if it fits, or this is unknown."""
    need, room = plan.memory(case), with_room(plan.settings, [case])
    several = f" for {room.n_seq_max:,} sequences" if room.n_seq_max > 1 else ""
    context = f"A context of {room.n_ctx:,} tokens{several}"
    total = (
        f"{context} needs about {need.total_bytes / 1e9:,.1f} GB of memory "
        f"(KV cache: {(need.kv_cache_bytes or 0) / 1e9:,.1f} GB)"
    )
    used = machine.used(plan.machine, plan.settings)
    where = places(plan, case) if used else None
    if where is None:
        available = memory_for(plan)
        if room.n_ctx < MOST_TOKENS and (available is None or need.total_bytes <= available):
            return None
        return f"{total}; {available / 1e9:,.1f} GB are available." if available is not None else f"{total}."
    over = _over(plan, where)
    if over is None:
        return None if room.n_ctx < MOST_TOKENS else f"{total}."
    return f"{context}: {_refusal(plan, case, over, where)}"


def _over(plan: Plan, where: Sequence[Place]) -> Room | None:
    """The first memory that is too small."""
    sizes = ((room, room.n_bytes) for room in rooms(plan))
    return next((room for room, size in sizes if size is not None and needed(room, where) > size), None)


def needed(room: Room, where: Sequence[Place]) -> int:
    """Bytes that a memory must hold."""
    return sum(place.memory.total_bytes for place in where if place.device in room.devices)


def _refusal(plan: Plan, case: Case, room: Room, where: Sequence[Place]) -> str:
    """A sentence that says what does not fit, and the largest number of layers that fits."""
    n_layers = sum(len(place.layers) for place in where if place.device in room.devices)
    need, have = needed(room, where) / 1e9, (room.n_bytes or 0) / 1e9
    described = {device.name: f"{device.name} ({device.description})" for device in plan.machine.devices}
    names = [name if name == CPU else described[name] for name in room.devices]
    layers = f"{n_layers} layer{'' if n_layers == 1 else 's'}"
    if len(names) == 1:
        sentence = f"{names[0]} needs {need:,.1f} GB for {layers} and has {have:,.1f} GB"
    else:
        together = f"{join_and(names)} share one memory"
        sentence = f"{together}: they need {need:,.1f} GB for {layers} and have {have:,.1f} GB"
    for n in range((plan.model.n_layer or 0) + 1, 0, -1):
        smaller = _with_layers(plan, n)
        fewer = places(smaller, case)
        if n != plan.settings.n_gpu_layers and fewer and _over(smaller, fewer) is None:
            n_fit = sum(len(place.layers) for place in fewer if place.device in room.devices)
            return f"{sentence}: at most {n_fit} fit: --n-gpu-layers {n}"
    return f"{sentence}: no number of layers fits."
