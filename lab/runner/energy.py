"""Counters of energy: which this machine has, and what they count while a run lasts.

- RAPL: Linux shows the counters of Intel's and AMD's CPUs as zones in /sys/class/powercap/intel-rapl:*. Read are the
  packages and, where it is a zone of its own, their memory (dram). The other zones would count twice: core and uncore
  are parts of a package, psys contains it, and intel-rapl-mmio:* is the same package by another way. Microjoules, which
  begin again after max_energy_range_uj; updated about every millisecond; readable by root alone since Linux 5.10.
- NVML: millijoules of a whole graphics card since its driver was loaded; Volta and newer; updated every 20 to 100 ms.
  A card without the counter has no energy here: power is not summed up instead.
- A battery: what is left in it (energy_now; or charge_now, times voltage_now), on Linux, while it discharges. It counts
  the whole laptop, coarsely and rarely: phases of less than some ten seconds get no figure. `psutil`, with which other
  systems would have to be read, knows percents only, which are no joules.

A counter that cannot be read has no figure, and `counters` says what to do. Where one of several of a kind cannot (one
of two packages, say), none of that kind has a figure: their sum would be too small. `root` is the folder that stands
for `/`. Sources: docs.kernel.org, power/powercap; its ABI/testing, sysfs-class-powercap and sysfs-class-power; Intel's
Software Developer's Manual, volume 3B, "RAPL Interfaces"; NVIDIA's NVML API reference,
nvmlDeviceGetTotalEnergyConsumption; its period: PETSc's manual, PetscLogGpuEnergyMeter; CVE-2020-8694.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.core import energy
from lab.core.noise import BATTERY, DRAM, GPU, PACKAGE, Energy, EnergyCounter
from lab.runner.gpu_watch import GpuWatch
from lab.runner.limits import ROOT, system_number, system_text

IDLE_S, EVERY_S = 1.0, 0.1
"""How long the machine is watched while the lab does nothing, and how often."""

BATTERY_S = 1.0
"""How often a battery is asked: it updates more rarely, and the question can take long."""

LOCKED = (
    "RAPL may be read by root alone; until the next start for all: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/{energy_uj,max_energy_range_uj}"
)


@dataclass(frozen=True)
class Counter:
    """One counter: its name, what it covers (as in core/noise.py), how it is read, and its unit."""

    name: str
    covers: str
    read: Callable[[], int | None]  # units used since some moment; None where it cannot be read
    mj_per_unit: float
    wraps_at: int | None = None  # units after which it begins again; None: it does not
    source: str = ""  # RAPL, NVML; of a battery: that it is coarse


@dataclass(frozen=True)
class Counters:
    """The counters that can be read, a sentence for each kind that is there but cannot, and what there is none of."""

    readable: tuple[Counter, ...] = ()
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def counters(gpus: GpuWatch, root: Path = ROOT) -> Counters:
    """The counters of this machine."""
    kinds = (_rapl(root), _nvml(gpus), _batteries(root))
    return Counters(
        tuple(counter for kind in kinds for counter in kind.readable),
        tuple(problem for kind in kinds for problem in kind.problems),
        tuple(name for kind in kinds for name in kind.missing),
    )


def _rapl(root: Path) -> Counters:
    zones = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
    of_zones, locked = list[Counter](), set[str]()
    for zone in zones:
        name = system_text(zone / "name").strip()
        if name == "dram":
            covers, name = DRAM, f"dram {zone.name.split(':')[1]}"
        elif re.fullmatch(r"package-\d+(-die-\d+)?", name):
            covers, name = PACKAGE, name.replace("-", " ")
        else:
            continue
        read = functools.partial(system_number, zone / "energy_uj")
        of_zones.append(Counter(name, covers, read, 1e-3, system_number(zone / "max_energy_range_uj"), "RAPL"))
        if read() is None:
            locked.add(covers)
    if not of_zones:
        return Counters(
            missing=("RAPL (Linux has it for Intel's and AMD's CPUs; few virtual machines and containers do)",)
        )
    readable = tuple(counter for counter in of_zones if counter.covers not in locked)
    return Counters(readable, (LOCKED,) if locked else ())


def _nvml(gpus: GpuWatch) -> Counters:
    if not gpus.n_gpus:
        return Counters(missing=("NVIDIA GPU that nvidia-ml-py finds",))
    reads = [functools.partial(gpus.energy_mj, index) for index in range(gpus.n_gpus)]
    silent = [f"gpu {index}" for index, read in enumerate(reads) if read() is None]
    if silent:
        return Counters(problems=(f"{', '.join(silent)}: no counter (NVIDIA GPUs from Volta on have one)",))
    return Counters(tuple(Counter(f"gpu {i}", GPU, read, 1.0, source="NVML") for i, read in enumerate(reads)))


def _batteries(root: Path) -> Counters:
    folders = [
        folder
        for folder in sorted((root / "sys/class/power_supply").glob("*"))
        if system_text(folder / "type").strip() == "Battery" and system_text(folder / "scope").strip() != "Device"
    ]
    if not folders:
        return Counters(missing=("battery that Linux shows",))
    batteries = {folder.name: _Battery(folder) for folder in folders}
    giving = {name: battery for name, battery in batteries.items() if battery() is not None}
    return Counters(
        tuple(Counter(f"battery {name}", BATTERY, battery, 1.0, source="coarse") for name, battery in giving.items()),
        tuple(
            f"battery {name}: counts only while it discharges (unplug the power)"
            for name in batteries
            if name not in giving
        ),
    )


class _Battery:
    """Millijoules that a battery gave since the first call; None from the moment on in which it does not discharge."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given_mj: float | None = 0.0
        self._left: tuple[int, float] | None = None  # units in it, and millijoules of each
        self._asked = float("-inf")

    def __call__(self) -> int | None:
        if self._given_mj is not None and time.monotonic() - self._asked >= BATTERY_S:
            self._asked = time.monotonic()
            self._given_mj = self._ask()
        return None if self._given_mj is None else round(self._given_mj)

    def _ask(self) -> float | None:
        left, before = self._units_left(), self._left
        if left is None or self._given_mj is None or system_text(self._folder / "status").strip() != "Discharging":
            return None
        self._left = left
        if before is None:
            return 0.0
        return self._given_mj + (before[0] - left[0]) * (before[1] + left[1]) / 2

    def _units_left(self) -> tuple[int, float] | None:
        """Microwatt hours, 3.6 mJ each; or microampere hours, which at so many microvolts are 3.6e-6 mJ times these."""
        energy_now, charge, voltage = (
            system_number(self._folder / name) for name in ("energy_now", "charge_now", "voltage_now")
        )
        if energy_now is not None:
            return energy_now, 3.6
        return None if charge is None or voltage is None else (charge, 3.6e-6 * voltage)


class EnergyWatch:
    """Reads all counters whenever `sample` is called. `idle_w` are those of `idle_watts`."""

    def __init__(self, gpus: GpuWatch, idle_w: Mapping[str, float]) -> None:
        self._counters = counters(gpus).readable
        self._idle_w = idle_w
        self._rows: list[tuple[int | None, ...]] = []

    @property
    def has_counters(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._counters)

    def sample(self) -> None:
        """Read all counters."""
        if self._counters:
            self._rows.append(tuple(counter.read() for counter in self._counters))

    def finish(self, first_start_ms: float | None = None) -> Energy | None:
        """What each counter counted from one sample to the next. None where none could be read to the end."""
        used, broken = list[EnergyCounter](), set[str]()
        for counter, readings in zip(self._counters, zip(*self._rows, strict=True), strict=True):
            column = energy.used_mj(readings, counter.mj_per_unit, counter.wraps_at)
            if column is None:
                broken.add(counter.covers)
            else:
                used.append(EnergyCounter(counter.name, counter.covers, column, self._idle_w.get(counter.name)))
        whole = tuple(counter for counter in used if counter.covers not in broken)
        return Energy(whole, first_start_ms) if whole else None


@functools.lru_cache(maxsize=1)
def idle_watts(session: str) -> Mapping[str, float]:
    """The mean watts of each counter, by its name, in the next IDLE_S seconds, which the lab spends waiting.

    Once in a session, before its first model is loaded; whatever else runs counts too. Without a counter nothing is
    waited for. A battery is too coarse for it and has none.
    """
    watch = EnergyWatch(GpuWatch([]), {})
    if not watch.has_counters:
        return {}
    began, at_ms = time.perf_counter_ns(), list[int]()
    watch.sample()
    while not at_ms or at_ms[-1] < 1e3 * IDLE_S:
        time.sleep(EVERY_S)
        at_ms.append(round((time.perf_counter_ns() - began) / 1e6))
        watch.sample()
    counted = watch.finish()
    watts = {}
    for counter in counted.counters if counted else ():
        joules = energy.between_j(at_ms, counter.used_mj, 0, at_ms[-1])
        if joules is not None:
            watts[counter.name] = round(joules / (at_ms[-1] / 1e3), 3)
    return watts
