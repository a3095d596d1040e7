"""The memory that a plan needs on each device, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import placement
from lab.core.lists import join_and, plural
from lab.core.memory import Memory
from lab.core.placement import CPU, Place
from lab.core.record import Device
from lab.runner import limits, machine, placing
from lab.runner.cases import Case, Plan, with_room

MOST_TOKENS = 2**31
"""llama.cpp counts positions in 32 bits."""


@dataclass(frozen=True)
class Room:
    """Devices that share one memory, and its free bytes; None if unknown."""

    devices: tuple[str, ...]
    n_bytes: int | None

    def needed(self, where: Sequence[Place]) -> int:
        """Bytes that this memory must hold."""
        return sum(place.memory.total_bytes for place in where if place.device in self.devices)

    def n_layers(self, where: Sequence[Place]) -> int:
        return sum(len(place.layers) for place in where if place.device in self.devices)


def places(plan: Plan, case: Case) -> tuple[Place, ...] | None:
    """The layers and memory of each device for this case alone, the CPU last; None if they cannot be computed."""
    room, names = with_room(plan.settings, [case]), [one.name for one in machine.used(plan.machine, plan.settings)]
    shares = placement.shares(_free(plan), names, room.tensor_split)
    models = [(plan.model, plan.tensors), *([(plan.draft.model, ())] if plan.draft else [])]
    own, *rest = [
        placement.of(model, room, tensors or placement.alike(model), names, shares) for model, tensors in models
    ]
    for other in rest:
        if own is None or other is None:
            return None
        pairs = zip(own, other, strict=True)
        own = tuple(dataclasses.replace(one, memory=one.memory.beside(two.memory)) for one, two in pairs)
    return own


def memory(plan: Plan, case: Case) -> Memory:
    """The memory of a case on all devices together; each device has its own buffers."""
    whole = plan.memory(case)
    where = places(plan, case) if machine.used(plan.machine, plan.settings) else None
    if not where or None in (whole.kv_cache_bytes, whole.compute_bytes):
        return whole
    weights = sum(place.memory.weights_bytes for place in where)
    return Memory(weights, whole.kv_cache_bytes, sum(place.memory.compute_bytes or 0 for place in where))


def rooms(plan: Plan) -> tuple[Room, ...]:
    """The memories of the devices with layers and of the CPU, with their free bytes."""
    free, ram_bytes = _free(plan) | {CPU: limits.memory_available()}, plan.machine.ram_bytes
    devices = (*machine.used(plan.machine, plan.settings), Device(CPU, "", "cpu", ram_bytes))
    known = []
    for names, _ in placing.shared_memory(devices, ram_bytes, machine.own_addresses()):
        own = tuple(device.name for device in devices if device.name in names)
        known.append(Room(own, min((free[name] for name in own if name in free), default=None)))
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
    more = placing.settings(plan.auto, n, plan.machine.devices, plan.model) if plan.auto else {}
    return dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, n_gpu_layers=n, **more))


def _problem(plan: Plan, case: Case) -> str | None:
    """Why a case does not fit, with the largest number of layers that does; None if it fits, or this is unknown."""
    need, room = plan.memory(case), with_room(plan.settings, [case])
    several = f" for {room.n_seq_max:,} sequences" if room.n_seq_max > 1 else ""
    context = f"A context of {room.n_ctx:,} tokens{several}"
    total = (
        f"{context} needs about {need.total_bytes / 1e9:,.1f} GB of memory "
        f"(KV cache: {(need.kv_cache_bytes or 0) / 1e9:,.1f} GB)"
    )
    where = places(plan, case) if machine.used(plan.machine, plan.settings) else None
    if where is None:
        available = memory_for(plan)
        if room.n_ctx < MOST_TOKENS and (available is None or need.total_bytes <= available):
            return None
        return f"{total}; {available / 1e9:,.1f} GB are available." if available is not None else f"{total}."
    over = _over(plan, where)
    if over is None:
        return None if room.n_ctx < MOST_TOKENS else f"{total}."
    has = f"{over.needed(where) / 1e9:,.1f} GB for {plural(over.n_layers(where), 'layer')}"
    have = f"{(over.n_bytes or 0) / 1e9:,.1f} GB"
    described = {device.name: f"{device.name} ({device.description})" for device in plan.machine.devices}
    names = [name if name == CPU else described[name] for name in over.devices]
    sentence = f"{names[0]} needs {has} and has {have}"
    if len(names) > 1:
        sentence = f"{join_and(names)} share one memory: they need {has} and have {have}"
    for n in range((plan.model.n_layer or 0) + 1, 0, -1):
        smaller = _with_layers(plan, n)
        fewer = places(smaller, case)
        if n != plan.settings.n_gpu_layers and fewer and _over(smaller, fewer) is None:
            return f"{context}: {sentence}: at most {over.n_layers(fewer)} fit: --n-gpu-layers {n}"
    return f"{context}: {sentence}: no number of layers fits."


def _over(plan: Plan, where: Sequence[Place]) -> Room | None:
    """The first memory that is too small."""
    return next((room for room in rooms(plan) if room.n_bytes is not None and room.needed(where) > room.n_bytes), None)
