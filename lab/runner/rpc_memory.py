"""Which devices share one memory, where some are behind RPC servers.

A server of a CPU reports all memory of its machine, so two servers on one machine report it twice. The protocol does
not say what a device is; it is concluded from addresses and sizes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lab.core.record import Device

SAME = 0.01
"""Sizes that differ by no more than this share are taken for one memory."""


@dataclass
class _Memory:
    n_bytes: int | None
    host: str | None = None  # None: this machine
    own: frozenset[str] = frozenset()  # further addresses of this machine
    names: set[str] = field(default_factory=set)
    endpoints: set[str] = field(default_factory=set)

    def is_also_of(self, endpoint: str, n_bytes: int) -> bool:
        host = _host(endpoint)
        is_own = ipaddress.IPv4Address(host).is_loopback or host in self.own
        is_there = is_own if self.host is None else self.host == host
        return (
            is_there
            and self.n_bytes is not None
            and endpoint not in self.endpoints
            and abs(n_bytes - self.n_bytes) <= SAME * max(n_bytes, self.n_bytes)
        )


def shared_memory(
    devices: Sequence[Device], ram_bytes: int | None, own_addresses: Collection[str] = ()
) -> list[tuple[frozenset[str], int | None]]:
    """Groups of devices, by name, that share one memory, and its bytes; each device is in one group.

    Devices of two servers at one host count once where their sizes are the same within 1 %. At a loopback address, or
    one of `own_addresses`, they count as this machine's own memory where their size is `ram_bytes`. The limit: two
    equal GPUs behind two servers of one host count once. One server can lend both, and then they count twice.
    """
    own = _Memory(ram_bytes, own=frozenset(own_addresses))
    memories = [own]
    for device in devices:
        endpoint = endpoint_of(device)
        if device.type == "cpu":
            memory = own
        elif endpoint is None or device.memory_bytes is None:
            memory = _Memory(device.memory_bytes)
            memories.append(memory)
        else:
            n_bytes = device.memory_bytes
            known = [memory for memory in memories if memory.is_also_of(endpoint, n_bytes)]
            if not known:
                memories.append(_Memory(n_bytes, _host(endpoint)))
            memory = (known or memories[-1:])[0]
            memory.endpoints.add(endpoint)
        memory.names.add(device.name)
    return [(frozenset(memory.names), memory.n_bytes) for memory in memories if memory.names]


def endpoint_of(device: Device) -> str | None:
    """HOST:PORT of the server that a device is behind; None for one of this machine."""
    match = re.match(r"RPC server ([\d.]+:\d+)", device.description)
    return match[1] if match else None


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
