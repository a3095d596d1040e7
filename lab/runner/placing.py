"""Turn the user's choice of devices, splits, servers and builds into settings of llama.cpp.

Also finds devices that share one memory. An RPC server of a CPU reports the whole memory of its machine, so two servers
on one machine report it twice. The protocol does not identify devices; the lab compares addresses and sizes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.core import placement
from lab.core.asked_settings import END, STEP, AskedSettings, parts
from lab.core.record import Device, Model
from lab.errors import LabError
from lab.process import rpc
from lab.process.wire import Backend
from lab.runner import builds, machine

AS_ASKED = ("split_mode", "main_gpu", "kv_offload", "op_offload", "mmap", "repack")
"""Settings that llama.cpp gets unchanged."""

MOST_DEVICES = 16
"""llama_max_devices() of llama.cpp."""


def backend(asked: AskedSettings) -> Backend:
    """The libraries and servers for the engine's process. LabError for libraries that do not fit."""
    servers = rpc.parse(",".join(parts(asked.rpc))) if asked.rpc else ()
    return Backend(builds.folder_of(asked.lib), servers)


def n_layers(asked: AskedSettings, devices: Sequence[Device], model: Model) -> tuple[int, list[str]]:
    """The number of layers on devices (the output counts as one, -1: all), and warnings.

    AUTO counts as all until plan_needs.py has computed what fits.
    """
    wanted = asked.n_gpu_layers if isinstance(asked.n_gpu_layers, int) else None
    if asked.is_on_cpu:
        return 0, []
    if not machine.accelerators(devices):
        warning = (
            f"--n-gpu-layers {wanted} has no effect: this build of llama.cpp finds no GPU. "
            "INSTALL.md says how to install a build for a GPU."
        )
        return 0, [warning] if wanted else []
    n_all = -1 if model.n_layer is None else model.n_layer + 1
    return n_all if wanted is None else wanted, []


def settings(asked: AskedSettings, n_gpu_layers: int, devices: Sequence[Device], model: Model) -> dict[str, Any]:
    """The fields of Settings for a model's placement. LabError for an unknown device or an invalid split."""
    names = _device_names(asked, devices)
    usable = machine.by_default(devices)
    n_used = len(names) if names is not None else len(usable)
    if asked.main_gpu is not None and n_used and asked.main_gpu >= n_used:
        raise LabError(
            f"--main-gpu {asked.main_gpu}: no such device.", f"The first device is 0, the last {n_used - 1}."
        )
    buffers = [placement.CPU, *(device.name for device in machine.accelerators(devices))]
    for text in parts(asked.override_tensor):
        pattern, _, buffer = text.rpartition("=")
        if not pattern:
            raise LabError(f"--override-tensor {text} names no buffer.", "Write PATTERN=BUFFER: ffn_.*_exps=CPU")
        if placement.device_of_override(buffer, buffers) is None:
            raise LabError(f"--override-tensor {text}: no buffer {buffer}.", f"Use one of: {', '.join(buffers)}.")
        try:
            re.compile(pattern)
            if foreign := re.search(r"\(\?[^:=!]", pattern):
                raise re.error(f"llama.cpp uses C++ syntax, which has no {foreign[0]}")
        except re.error as problem:
            raise LabError(
                f"--override-tensor {text}: {pattern} is not a valid regular expression ({problem}).",
                "A dot matches any character, .* any text: ffn_.*_exps=CPU",
            ) from None
    chosen: dict[str, Any] = {
        **{name: getattr(asked, name) for name in AS_ASKED},
        "devices": names or None,
        "tensor_split": _split(asked.tensor_split, n_used),
        "n_cpu_moe": asked.n_cpu_moe or None,
        "override_tensor": parts(asked.override_tensor) or None,
        "rpc": backend(asked).rpc or None,
        "lib": builds.name_of(asked.lib),
    }
    kinds = asked.split_mode, asked.kv_offload, bool(chosen["n_cpu_moe"] or chosen["override_tensor"])
    is_pipeline = placement.is_pipeline(model.n_layer, n_gpu_layers, n_used, *kinds)
    waits_once = is_pipeline or (n_gpu_layers and _is_remote(asked, devices))
    return chosen | {"prefill_wait": asked.prefill_wait or (END if waits_once else None)}


def warnings(asked: AskedSettings, devices: Sequence[Device], model: Model) -> list[str]:
    """A sentence for each setting without effect on this model, or on these devices."""
    moe = f"--n-cpu-moe {asked.n_cpu_moe} has no effect: {model.name} has no experts."
    wait = (
        "--prefill-wait step has no effect on steps without logits: an RPC server does not report when they end. "
        "The time of the whole prompt is valid, those of its steps are not."
    )
    is_useless = asked.prefill_wait == STEP and _is_remote(asked, devices)
    return [moe] * bool(asked.n_cpu_moe and not model.n_expert) + [wait] * is_useless


def _is_remote(asked: AskedSettings, devices: Sequence[Device]) -> bool:
    """Whether layers may go to a device of an RPC server."""
    names = _device_names(asked, devices)
    used = machine.by_default(devices) if names is None else [one for one in devices if one.name in names]
    return any(endpoint_of(device) for device in used)


def _device_names(asked: AskedSettings, devices: Sequence[Device]) -> tuple[str, ...] | None:
    """The names of the requested devices; None if none was named."""
    names = parts(asked.device)
    if not names:
        return None
    if asked.is_on_cpu:
        return ()
    known = {device.name.lower(): device.name for device in machine.accelerators(devices)}
    for name in names:
        if name.lower() not in known:
            offer = f"Layers can go to: {', '.join(known.values())}." if known else "This build finds no GPU."
            raise LabError(f"--device {name}: no such device.", f"{offer} For the CPU only: --device none")
    if len({name.lower() for name in names}) < len(names):
        raise LabError(f"--device {','.join(names)} names a device twice.", "Name each device once.")
    return tuple(known[name.lower()] for name in names)


def _split(asked: str | Sequence[float] | None, n_devices: int) -> tuple[float, ...] | None:
    """The shares of the devices in --tensor-split."""
    if not asked:
        return None
    given = parts(asked.replace("/", ",")) if isinstance(asked, str) else tuple(map(str, asked))
    try:
        shares = tuple(float(part) for part in given)
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share < float("inf") for share in shares) or not any(shares):
        raise LabError(f"--tensor-split {','.join(given)} is not possible.", "Give a share for each device: 3,1")
    if len(shares) > min(max(n_devices, 1), MOST_DEVICES):
        raise LabError(
            f"--tensor-split {','.join(given)} has {len(shares)} shares for {n_devices} devices.",
            "Give one share for each device, in the order of lab machine.",
        )
    return shares


SAME = 0.01
"""Memory sizes that differ by at most this share count as the same memory."""


@dataclass
class _Memory:
    n_bytes: int | None
    host: str | None = None  # None: this machine
    names: set[str] = field(default_factory=set)
    endpoints: set[str] = field(default_factory=set)


def shared_memory(
    devices: Sequence[Device], ram_bytes: int | None, own_addresses: Collection[str] = ()
) -> list[tuple[frozenset[str], int | None]]:
    """Groups of devices that share one memory, by name, and the memory's bytes; each device is in one group.

    Devices of two servers on one host count as one memory if their sizes are equal within 1 %. At a loopback address or
    one of `own_addresses` they count as this machine's memory if their size is `ram_bytes`. So two equal GPUs behind
    two servers of one host wrongly count once; behind one server they count twice.
    """
    own = _Memory(ram_bytes)
    memories = [own]
    for device in devices:
        endpoint = endpoint_of(device)
        if device.type == "cpu":
            memory = own
        elif endpoint is None or device.memory_bytes is None:
            memory = _Memory(device.memory_bytes)
            memories.append(memory)
        else:
            n_bytes, address = device.memory_bytes, endpoint.rpartition(":")[0]
            is_here = ipaddress.IPv4Address(address).is_loopback or address in own_addresses
            host = None if is_here else address
            for memory in memories:
                size = memory.n_bytes or 0
                is_alike = abs(n_bytes - size) <= SAME * max(n_bytes, size)
                if memory.host == host and is_alike and endpoint not in memory.endpoints:
                    break
            else:
                memory = _Memory(n_bytes, host)
                memories.append(memory)
            memory.endpoints.add(endpoint)
        memory.names.add(device.name)
    return [(frozenset(memory.names), memory.n_bytes) for memory in memories if memory.names]


def endpoint_of(device: Device) -> str | None:
    """HOST:PORT of a device's RPC server; None for a device of this machine."""
    match = re.match(r"RPC server ([\d.]+:\d+)", device.description)
    return match[1] if match else None
