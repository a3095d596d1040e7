"""On which devices a model's layers lie: from the placement of a run, else by llama.cpp's rule from the settings.

llama.cpp counts the output as one more layer. The last `n_gpu_layers` of them go to devices, in the order of these,
each as many as its share says: what was asked, else its free memory (llama-model.cpp, load_tensors). Free memory is not
in a record; the whole memory stands for it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from lab.core.placement import layers as rule
from lab.core.placement import shares
from lab.core.record import Ceilings, Device, Machine, Model, Placement, Record, Settings
from lab.runner import machine

CPU = "CPU"
"""What llama.cpp calls the device whose name is None here."""


@dataclass(frozen=True)
class Where:
    """What ceilings are measured of and looked for: a machine with its build, and devices of it by name.

    `repack` is that of Settings: whether the CPU has its weights in layouts of its own kernels.
    """

    machine: Machine
    devices: tuple[str | None, ...] = (None,)
    repack: bool | None = None


def of(here: Machine, model: Model, settings: Settings, placement: Placement | None = None) -> Where:
    """Where some settings run a model: all devices whose kernels its steps need, that of most layers first."""
    counts = Counter(layers(here, model, settings, placement))
    ordered = [name for name, _ in counts.most_common()]
    if (settings.kv_offload is False or settings.n_cpu_moe) and None not in ordered:
        ordered.append(None)
    return Where(here, tuple(ordered), settings.repack)


def of_record(record: Record) -> Where:
    """Where a run was made."""
    return of(record.machine, record.model, record.settings, record.run.placement)


def layers(
    here: Machine, model: Model, settings: Settings, placement: Placement | None = None
) -> tuple[str | None, ...]:
    """The device of each layer, the output last; None is the CPU."""
    n_layer = model.n_layer or 0
    if placement is not None and len(placement.layers) == n_layer + 1:
        return tuple(None if name == CPU else name for name in placement.layers)
    devices = machine.used(here, settings)
    if not devices:
        return (None,) * (n_layer + 1)
    sizes = {one.name: one.memory_bytes for one in devices if one.memory_bytes}
    names = tuple(one.name for one in devices)
    split = shares(sizes, names, settings.tensor_split)
    return tuple(None if i is None else names[i] for i in rule(n_layer, settings.n_gpu_layers, split))


def layers_of(record: Record) -> tuple[str | None, ...]:
    """`layers`, of a run."""
    return layers(record.machine, record.model, record.settings, record.run.placement)


def label(name: str | None) -> str:
    """A device's name as llama.cpp has it."""
    return CPU if name is None else name


def device(here: Machine, name: str | None) -> Device | None:
    """The description of a device; None for the CPU, and for one that the machine does not have."""
    return next((one for one in machine.accelerators(here.devices) if one.name == name), None)


def device_label(here: Machine, name: str | None) -> str:
    """The device that ceilings are of, in words."""
    known = device(here, name)
    return machine.named(here, () if known is None else (known,))


def each_device(ceilings: Ceilings) -> tuple[Ceilings, ...]:
    """The ceilings of the first device, then those of the others."""
    return ceilings, *(ceilings.others or ())


def is_remote(one: Device) -> bool:
    """Whether an RPC server has the device."""
    return one.description.startswith("RPC server ")


def repacks_alike(ceilings: Ceilings, repack: bool | None) -> bool:
    """Whether ceilings hold for weights that are repacked, or not; of any other device than the CPU they always do."""
    return ceilings.on_gpu or (ceilings.repack is False) == (repack is False)


def identity(here: Machine, name: str | None) -> tuple[object, ...]:
    """What two names of devices share that are of one kind: ceilings of one then hold for the other.

    Of an RPC server that is its host, without the port, and how much memory its device has: what else the device is,
    the protocol does not say.
    """
    known = device(here, name)
    if known is None:
        return (name,)
    if is_remote(known):
        return re.sub(r"^(RPC server [^\s,]+):\d+", r"\1", known.description), known.memory_bytes
    return (known.description,)


def same(one: Machine, other: Machine) -> bool:
    """Whether two descriptions are of the same machine with the same build: ceilings then hold for both.

    Servers that it was connected to are not of the machine.
    """
    fields = ("cpu", "n_cores_usable", "ram_bytes", "llama_cpp_python", "llama_cpp_commit", "system_info", "lib")
    gpus = [
        [device.description for device in machine.accelerators(described.devices) if not is_remote(device)]
        for described in (one, other)
    ]
    return gpus[0] == gpus[1] and all(getattr(one, name) == getattr(other, name) for name in fields)


def same_devices(one: Where, other: Where) -> bool:
    """Whether both use the same kinds of devices."""
    kinds = [{identity(where.machine, name) for name in where.devices} for where in (one, other)]
    return kinds[0] == kinds[1]
