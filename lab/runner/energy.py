"""Read the machine's energy counters while a run lasts.

- RAPL: Linux shows the counters of Intel and AMD CPUs as zones in /sys/class/powercap/intel-rapl:*. The lab reads the
  packages and their memory (dram), if it is a separate zone. The other zones would count twice: core and uncore are
  parts of a package, psys contains it, and intel-rapl-mmio:* is another interface to it. The unit is microjoules; the
  counter wraps at max_energy_range_uj, updates about every millisecond, and since Linux 5.10 only root can read it.
- NVML: millijoules of a whole graphics card since its driver was loaded; Volta and newer; updated every 20 to 100 ms.
  A card without the counter gets no energy figure; the lab does not integrate its power instead.
- A battery: its remaining energy (energy_now, or charge_now times voltage_now), on Linux, while it discharges. It
  counts the whole laptop, and updates coarsely and rarely, so phases shorter than about ten seconds get no figure. On
  other systems `psutil` gives only percentages, which cannot be converted to joules.

A counter that cannot be read gets no figure, and `counters` says what to do. If one of several counters of a kind
cannot be read (such as one of two packages), none of that kind gets a figure: the sum would be too small. `root`
replaces `/`. Sources: docs.kernel.org, power/powercap; its ABI/testing, sysfs-class-powercap and sysfs-class-power;
Intel's Software Developer's Manual, volume 3B, "RAPL Interfaces"; NVIDIA's NVML API reference,
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
"""Duration of the idle measurement, and the interval of its samples."""

BATTERY_S = 1.0
"""Interval of reading a battery: it updates less often, and a read can take long."""

LOCKED = (
    "Only root can read RAPL. To allow all users until the next boot: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/{energy_uj,max_energy_range_uj}"
)


@dataclass(frozen=True)
class Counter:
    """An energy counter: its name, what it covers (as in core/noise.py), a function that reads it, and its unit."""

    name: str
    covers: str
    read: Callable[[], int | None]  # units used since some moment; None if it cannot be read
    mj_per_unit: float
    wraps_at: int | None = None  # units at which it starts from 0 again
    source: str = ""  # RAPL, NVML; coarse for a battery


@dataclass(frozen=True)
class Counters:
    """The readable counters, a sentence for each kind that cannot be read, and the missing kinds."""

    readable: tuple[Counter, ...] = ()
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def counters(gpus: GpuWatch, root: Path = ROOT) -> Counters:
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
        return Counters(missing=("RAPL (on Linux with Intel and AMD CPUs; rarely in virtual machines and containers)",))
    readable = tuple(counter for counter in of_zones if counter.covers not in locked)
    return Counters(readable, (LOCKED,) if locked else ())


def _nvml(gpus: GpuWatch) -> Counters:
    if not gpus.n_gpus:
        return Counters(missing=("NVIDIA GPU that nvidia-ml-py finds",))
    reads = [functools.partial(gpus.energy_mj, index) for index in range(gpus.n_gpus)]
    silent = [f"gpu {index}" for index, read in enumerate(reads) if read() is None]
    if silent:
        return Counters(problems=(f"{', '.join(silent)}: no energy counter (NVIDIA GPUs have one since Volta)",))
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
    """Millijoules that a battery supplied since the first call; None as soon as it does not discharge."""

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
        """The remaining units, and millijoules of each: uWh have 3.6 mJ, uAh have 3.6e-6 mJ per microvolt."""
        energy_now, charge, voltage = (
            system_number(self._folder / name) for name in ("energy_now", "charge_now", "voltage_now")
        )
        if energy_now is not None:
            return energy_now, 3.6
        return None if charge is None or voltage is None else (charge, 3.6e-6 * voltage)


class EnergyWatch:
    """Reads all counters at each call of `sample`. `idle_w` comes from `idle_watts`."""

    def __init__(self, gpus: GpuWatch, idle_w: Mapping[str, float]) -> None:
        self._counters = counters(gpus).readable
        self._idle_w = idle_w
        self._rows: list[tuple[int | None, ...]] = []

    @property
    def has_counters(self) -> bool:
        return bool(self._counters)

    def sample(self) -> None:
        """Read all counters."""
        if self._counters:
            self._rows.append(tuple(counter.read() for counter in self._counters))

    def finish(self, first_start_ms: float | None = None) -> Energy | None:
        """What each counter counted between samples. None if no counter could be read in every sample."""
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
    """Mean watts of each counter, by name, while the lab waits for IDLE_S; other programs count too.

    Measured once in a session, before the first model is loaded. Does not wait without a counter. Batteries are too
    coarse and get no figure.
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
