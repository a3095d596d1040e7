"""The placement of a plan: devices, splits, servers and builds as settings, and whether it fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lab.core import memory as sizes
from lab.core.asked_settings import END, AskedSettings, parts
from lab.core.lists import plural
from lab.core.memory import CPU, DevicePlace, Memory
from lab.core.record import Device, Model
from lab.errors import LabError
from lab.process import rpc
from lab.runner import builds, machine
from lab.runner.cases import Case, Plan, with_room

MOST_TOKENS = 2**31  # llama.cpp counts positions in 32 bits


def rpc_servers(asked: AskedSettings) -> tuple[str, ...]:
    """The addresses of the RPC servers. LabError for an invalid one."""
    return rpc.endpoints(parts(asked.rpc))


def settings(
    asked: AskedSettings, n_gpu_layers: int, devices: Sequence[Device], model: Model
) -> dict[str, Any]:
    """The fields of Settings that depend on devices. LabError for what these cannot do."""
    used = _asked_devices(asked, devices)
    _check_split(asked, used)
    _check_overrides(asked, devices)
    fields: dict[str, Any] = {"devices": None}
    if parts(asked.device):
        fields["devices"] = tuple(machine.names(used)) or None
    fields["tensor_split"] = asked.shares
    fields["n_cpu_moe"] = asked.n_cpu_moe or None
    fields["override_tensor"] = parts(asked.override_tensor) or None
    fields["rpc"] = rpc_servers(asked) or None
    fields["lib"] = builds.name_of(asked.lib)
    fields["prefill_wait"] = asked.prefill_wait
    if not asked.prefill_wait and _waits_once(asked, n_gpu_layers, used, model):
        fields["prefill_wait"] = END
    return fields


def _waits_once(
    asked: AskedSettings, n_gpu_layers: int, used: Sequence[Device], model: Model
) -> bool:
    """Whether to wait only at the end of a prefill.

    Several devices work as a pipeline if all layers, caches and experts are theirs. An RPC server
    does not say when a step without logits is done.
    """
    if n_gpu_layers and any(map(machine.is_remote, used)):
        return True
    is_split = len(used) > 1 and asked.split_mode in (None, "layer")
    moves_tensors = bool(asked.n_cpu_moe or parts(asked.override_tensor))
    if not is_split or moves_tensors or asked.kv_offload is False:
        return False
    return sizes.has_all_layers(n_gpu_layers, model)


def warnings(asked: AskedSettings, devices: Sequence[Device], model: Model) -> list[str]:
    """A sentence for each setting without effect on this model, or on these devices."""
    sentences = []
    n_layers = asked.n_gpu_layers
    wants_gpu = isinstance(n_layers, int) and n_layers > 0 and not asked.is_on_cpu
    if wants_gpu and not machine.accelerators(devices):
        sentences.append(
            f"--n-gpu-layers {n_layers} has no effect: this build of llama.cpp finds no GPU (see "
            "INSTALL.md)."
        )
    if asked.n_cpu_moe and not model.n_expert:
        what = f"--n-cpu-moe {asked.n_cpu_moe} has no effect: {model.name} has no experts."
        sentences.append(what)
    return sentences


def _asked_devices(asked: AskedSettings, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that layers may go to. LabError for an unknown name, or one that occurs twice."""
    names = parts(asked.device)
    if not names:
        return machine.by_default(devices)
    if asked.is_on_cpu:
        return ()
    available = machine.accelerators(devices)
    by_name = {device.name.lower(): device for device in available}
    used = []
    for name in names:
        device = by_name.get(name.lower())
        if device is None:
            offer = "This build finds no GPU."
            if available:
                offer = f"Layers can go to: {', '.join(machine.names(available))}."
            what = f"--device {name}: no such device."
            raise LabError(what, f"{offer} For the CPU only: --device none")
        used.append(device)
    if len(set(used)) < len(used):
        what = f"--device {','.join(names)} names a device twice."
        raise LabError(what, "Name each device once.")
    return tuple(used)


def _check_split(asked: AskedSettings, used: Sequence[Device]) -> None:
    """LabError for shares or a main GPU that do not fit the devices."""
    shares = asked.shares
    names = ", ".join(machine.names(used)) or "none"
    if shares is not None and len(shares) != len(used):
        n_devices = plural(len(used), "device")
        what = f"--tensor-split has {plural(len(shares), 'part')}, for {n_devices}."
        raise LabError(what, f"Give a share for each device: {names}.")
    if asked.main_gpu is not None and asked.main_gpu >= len(used):
        what = f"--main-gpu {asked.main_gpu}: no such device."
        raise LabError(what, f"Devices count from 0: {names}.")


def _check_overrides(asked: AskedSettings, devices: Sequence[Device]) -> None:
    """LabError for tensors that shall go to an unknown device."""
    names = [CPU, *machine.names(machine.accelerators(devices))]
    for text in parts(asked.override_tensor):
        _, name = sizes.override_of(text)
        if name not in names:
            what = f"--override-tensor {text}: no such device {name}."
            raise LabError(what, f"Use one of: {', '.join(names)}.")


def free(plan: Plan) -> dict[str, int]:
    """Free bytes of each device and of this machine's memory (CPU).

    A device's total bytes if only these are known.
    """
    n_bytes = {}
    for device in plan.machine.devices:
        if device.memory_bytes:
            n_bytes[device.name] = device.memory_bytes
    n_bytes |= plan.free
    n_bytes[CPU] = machine.memory_available()
    return n_bytes


def places(plan: Plan, case: Case) -> tuple[DevicePlace, ...] | None:
    """What each device holds for this case alone, the CPU last; None if it cannot be computed."""
    room = with_room(plan.settings, [case])
    names = machine.names(machine.used(plan.machine, plan.settings))
    split = room.tensor_split if len(names) > 1 else None
    shares = sizes.shares(free(plan), names, split)
    system_info = plan.machine.system_info
    placed = sizes.places(plan.model, room, plan.tensors or (), names, shares, system_info)
    if plan.draft is None or placed is None:
        return placed
    of_draft = sizes.places(plan.draft.model, room, (), names, shares, system_info)
    if of_draft is None:
        return None
    together = []
    for place, draft_place in zip(placed, of_draft, strict=True):
        memory_of_both = place.memory.beside(draft_place.memory)
        together.append(dataclasses.replace(place, memory=memory_of_both))
    return tuple(together)


def memory(plan: Plan, case: Case) -> Memory:
    """The memory of a case on all devices together; each device has buffers of its own."""
    total = plan.memory(case)
    placed = places(plan, case) if machine.used(plan.machine, plan.settings) else None
    if not placed or None in (total.kv_cache_bytes, total.compute_bytes):
        return total
    weights_bytes = 0
    compute_bytes = 0
    for place in placed:
        weights_bytes += place.memory.weights_bytes
        compute_bytes += place.memory.compute_bytes or 0
    return Memory(weights_bytes, total.kv_cache_bytes, compute_bytes)


def memory_for(plan: Plan) -> int | None:
    """Bytes for weights, cache and buffers on the devices.

    Unless all layers are there, the RAM counts too. None if a device does not report its memory.
    """
    n_layers = plan.settings.n_gpu_layers
    if n_layers == 0:
        return machine.memory_available()
    names = machine.names(machine.used(plan.machine, plan.settings))
    if plan.model.n_layer is None or not sizes.has_all_layers(n_layers, plan.model):
        names.append(CPU)
    free_bytes = free(plan)
    if not free_bytes.keys() >= set(names):
        return None
    return sum(free_bytes[name] for name in names)


def checked(plan: Plan) -> Plan:
    """The plan with `refused` cases.

    For --n-gpu-layers auto with as many layers on devices as fit.
    """
    if (
        plan.auto
        and plan.model.n_layer is not None
        and machine.accelerators(plan.machine.devices)
    ):
        plan = _fitting(plan, plan.model.n_layer)
    refused = {}
    for case in plan.cases:
        problem = _problem(plan, case)
        if problem:
            refused[case] = problem
    return dataclasses.replace(plan, refused=refused)


def _fitting(plan: Plan, n_layer: int) -> Plan:
    """The plan with the largest number of layers on devices with which all cases fit."""
    for n in range(n_layer + 1, 0, -1):
        candidate = _with_layers(plan, n)
        if not any(_problem(candidate, case) for case in candidate.cases):
            return candidate
    return _with_layers(plan, 0)


def _with_layers(plan: Plan, n: int) -> Plan:
    """The plan with n layers on devices, and the settings that depend on this."""
    fields: dict[str, Any] = {"n_gpu_layers": n}
    if plan.auto:
        fields |= settings(plan.auto, n, plan.machine.devices, plan.model)
    return dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, **fields))


def _problem(plan: Plan, case: Case) -> str | None:
    """Why a case does not fit, with the largest number of layers that does.

    None if it fits, or if this is unknown.
    """
    room = with_room(plan.settings, [case])
    context = f"A context of {plural(room.n_ctx, 'token')}"
    if room.n_seq_max > 1:
        context = f"{context} for {plural(room.n_seq_max, 'sequence')}"
    is_too_long = room.n_ctx >= MOST_TOKENS
    placed = places(plan, case) if machine.used(plan.machine, plan.settings) else None
    if placed is None:
        return _problem_of_total(plan, case, context, is_too_long)
    lacking = _lacking(plan, placed)
    if lacking is not None:
        return f"{context}: {_lacks(plan, lacking)}: {_advice(plan, case, lacking)}"
    return f"{_total(plan, case, context)}." if is_too_long else None


def _total(plan: Plan, case: Case, context: str) -> str:
    need = plan.memory(case)
    cache = _gb(need.kv_cache_bytes or 0)
    return f"{context} needs about {_gb(need.total_bytes)} of memory (KV cache: {cache})"


def _gb(n_bytes: int) -> str:
    """Such as `12.3 GB`; below 1 GB with two decimals."""
    if n_bytes < 1e9:
        return f"{n_bytes / 1e9:.2f} GB"
    return f"{n_bytes / 1e9:,.1f} GB"


def _problem_of_total(plan: Plan, case: Case, context: str, is_too_long: bool) -> str | None:
    """Why a case does not fit into the memory as a whole; None if it does."""
    available = memory_for(plan)
    is_enough = available is None or plan.memory(case).total_bytes <= available
    if is_enough and not is_too_long:
        return None
    if available is None:
        return f"{_total(plan, case, context)}."
    return f"{_total(plan, case, context)}; {_gb(available)} are available."


def _lacking(plan: Plan, placed: Sequence[DevicePlace]) -> DevicePlace | None:
    """The first device whose memory is too small."""
    free_bytes = free(plan)
    for place in placed:
        if place.memory.total_bytes > free_bytes.get(place.device, math.inf):
            return place
    return None


def _lacks(plan: Plan, place: DevicePlace) -> str:
    """What a device needs and has."""
    name = CPU
    for device in plan.machine.devices:
        if device.name == place.device:
            name = f"{device.name} ({device.description})"
    needs = _gb(place.memory.total_bytes)
    has = _gb(free(plan)[place.device])
    layers = plural(len(place.layers), "layer")
    return f"{name} needs {needs} for {layers} and has {has}"


def _advice(plan: Plan, case: Case, lacking: DevicePlace) -> str:
    """The largest number of layers with which a case fits."""
    for n in range((plan.model.n_layer or 0) + 1, 0, -1):
        if n == plan.settings.n_gpu_layers:
            continue
        candidate = _with_layers(plan, n)
        placed = places(candidate, case)
        if placed is None or _lacking(candidate, placed) is not None:
            continue
        for place in placed:
            if place.device == lacking.device:
                return f"at most {len(place.layers)} fit: --n-gpu-layers {n}"
    return "no number of layers fits."
