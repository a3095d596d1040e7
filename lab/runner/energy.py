"""Joules of a run, from the machine's energy counters.

- RAPL: Linux shows the counters of Intel and AMD CPUs as zones in /sys/class/powercap/intel-rapl:*. The lab reads the
  packages and their memory (dram), if it is a separate zone. The other zones would count twice: core and uncore are
  parts of a package, psys contains it, and intel-rapl-mmio:* is another interface to it. The unit is microjoules; the
  counter wraps at max_energy_range_uj, and since Linux 5.10 only root can read it.
- NVML: millijoules of a whole graphics card since its driver was loaded; Volta and newer.

If one of several counters of a kind cannot be read (such as one of two packages), none of that kind counts: the sum
would be too small. Sources: docs.kernel.org, power/powercap; NVIDIA's NVML API reference,
nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.core.noise import DRAM, GPU, PACKAGE
from lab.runner.gpu_watch import GpuWatch
from lab.runner.limits import ROOT, system_number, system_text

LOCKED = (
    "Only root can read RAPL. To allow all users until the next boot: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/{energy_uj,max_energy_range_uj}"
)


@dataclass(frozen=True)
class Counter:
    """An energy counter: what it covers, a function that reads it (None: it cannot be read), and its unit."""

    covers: str  # PACKAGE, DRAM or GPU
    read: Callable[[], int | None]
    unit_j: float
    wraps_at: int = 0  # units at which it starts from 0 again; 0: it does not


def counters(gpus: GpuWatch, root: Path = ROOT) -> list[Counter]:
    """The counters of this machine, also those that this user cannot read. `root` replaces `/`."""
    found = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        name = system_text(zone / "name").strip()
        if name == "dram" or re.fullmatch(r"package-\d+(-die-\d+)?", name):
            read = functools.partial(system_number, zone / "energy_uj")
            wraps_at = system_number(zone / "max_energy_range_uj") or 0
            found.append(Counter(DRAM if name == "dram" else PACKAGE, read, 1e-6, wraps_at))
    cards = (functools.partial(gpus.energy_mj, index) for index in range(gpus.n_gpus))
    return [*found, *(Counter(GPU, read, 1e-3) for read in cards)]


def describe(found: list[Counter]) -> str:
    """What the counters of a machine cover, and how to make locked ones readable."""
    locked = {counter.covers for counter in found if counter.read() is None}
    known = [kind for kind in (PACKAGE, DRAM, GPU) if kind in {one.covers for one in found} - locked]
    words = [*([", ".join(known)] if known else []), *([LOCKED] if locked - {GPU} else [])]
    return "; ".join(words) or "no counter that can be read (RAPL on Linux, NVML of NVIDIA GPUs since Volta)"


class EnergyWatch:
    """Adds up what the counters count from one call of `sample` to the next, as a counter may wrap during a run."""

    def __init__(self, gpus: GpuWatch) -> None:
        self._counters = counters(gpus)
        self._last = [counter.read() for counter in self._counters]
        self._used: list[int | None] = [0] * len(self._last)

    def sample(self) -> None:
        """Read all counters."""
        for index, counter in enumerate(self._counters):
            last, used, now = self._last[index], self._used[index], counter.read()
            step = None if now is None or last is None else now - last if now >= last else now - last + counter.wraps_at
            self._used[index] = None if used is None or step is None or step < 0 else used + step
            self._last[index] = now

    def joules(self) -> dict[str, float] | None:
        """By kind, since the beginning. None without a kind whose counters could all be read all the time."""
        self.sample()
        pairs = list(zip(self._counters, self._used, strict=True))
        broken = {counter.covers for counter, used in pairs if used is None}
        total: dict[str, float] = {}
        for counter, used in pairs:
            if counter.covers not in broken:
                total[counter.covers] = total.get(counter.covers, 0) + (used or 0) * counter.unit_j
        return {kind: round(joules, 3) for kind, joules in total.items()} or None
