"""What else the machine did around and during a run, as records keep it.

All values come from the operating system or the GPU's driver; what these do not give is None.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """How an NVIDIA GPU is doing. `slowed` names what holds its clock down (heat, power brake), if anything does."""

    name: str
    clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    slowed: str | None = None
    n_others: int | None = None  # processes on it other than the engine; None where they cannot be told apart
    others_percent: int | None = None  # the most of its time that those used, in a sample of the driver since the start


@dataclass(frozen=True)
class NoiseReading:
    """What else the machine was doing, from the operating system. Counters are since its start."""

    load_1min: float | None = None
    cpu_busy_s: float | None = None  # all processes, on all cores that the lab may run on
    cpu_steal_s: float | None = None  # taken by the host of a virtual machine
    cpu_pressure_s: float | None = None  # time in which some task waited for a core (Linux PSI)
    cpu_mhz: float | None = None
    memory_available_bytes: int | None = None
    memory_pressure_s: float | None = None  # time in which some task waited for memory (Linux PSI)
    own_cpu_s: float | None = None  # the part of cpu_busy_s that is the lab's and its engine's
    switches: int | None = None  # how often the engine's main thread was put off a core (on Windows: left one)
    n_throttled: int | None = None  # how often cores were slowed down by heat
    gpus: tuple[Gpu, ...] | None = None
    quota_wait_s: float | None = None  # time for which a container's quota of CPU time was used up


@dataclass(frozen=True)
class NoiseSamples:
    """What else the machine did during a run, ten times a second: each row covers the time since the row before.

    A column that the system does not give is None.
    """

    at_ms: tuple[int, ...]  # since the first reading
    others_ms: tuple[int, ...] | None = None  # CPU time of all other processes, on all cores that the lab may run on
    steal_ms: tuple[int, ...] | None = None
    pressure_ms: tuple[int, ...] | None = None
    switches: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        columns = (self.at_ms, self.others_ms, self.steal_ms, self.pressure_ms, self.switches)
        if not self.at_ms or len({len(column) for column in columns if column is not None}) > 1:
            raise ValueError("the columns of noise samples are empty, or differ in length")


PACKAGE, DRAM, GPU, BATTERY = "package", "dram", "gpu", "battery"
"""What a counter of energy covers: a CPU with all that is on its chip, its memory, a graphics card, a whole laptop."""


@dataclass(frozen=True)
class EnergyCounter:
    """What a counter of energy counted during a run. Which counters there are: runner/energy.py."""

    name: str  # such as package 0, dram 0, gpu 0, battery BAT0
    covers: str  # PACKAGE, DRAM, GPU or BATTERY
    used_mj: tuple[int, ...]  # millijoules in each row of the samples: since the row before
    idle_w: float | None = None  # its mean in the second before the session's first model was loaded


@dataclass(frozen=True)
class Energy:
    """The counters of energy that could be read during a run, and where in their samples its first step began."""

    counters: tuple[EnergyCounter, ...]
    first_start_ms: float | None = None  # since the first reading; None where the engine's clock is not the lab's


@dataclass(frozen=True)
class Noise:
    """Readings around a run. A sentinel is the same short decode before and after: the median of its steps."""

    before: NoiseReading
    after: NoiseReading
    samples: NoiseSamples | None = None
    sentinel_before_ns: int | None = None
    sentinel_after_ns: int | None = None
    energy: Energy | None = None  # None where no counter could be read, and in records of older versions

    def __post_init__(self) -> None:
        n_rows = 0 if self.samples is None else len(self.samples.at_ms)
        if self.energy is not None and any(len(counter.used_mj) != n_rows for counter in self.energy.counters):
            raise ValueError("the columns of energy do not have the length of the noise samples")
