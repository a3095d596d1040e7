"""The load of the machine around and during a run, as records store it.

All values come from the operating system or the GPU's driver. Unavailable values are None.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The state of an NVIDIA GPU. `slowed` names what limits its clock (heat, power brake), if anything does."""

    name: str
    clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    slowed: str | None = None
    n_others: int | None = None  # processes on it other than the engine; None if indistinguishable
    others_percent: int | None = None  # their largest share of its time in a sample of the driver since the start


@dataclass(frozen=True)
class NoiseReading:
    """The load of the machine, from the operating system. Counters start at boot."""

    load_1min: float | None = None
    cpu_busy_s: float | None = None  # all processes, on all cores that the lab may run on
    cpu_steal_s: float | None = None  # taken by the host of a virtual machine
    cpu_pressure_s: float | None = None  # time during which some task waited for a core (Linux PSI)
    cpu_mhz: float | None = None
    memory_available_bytes: int | None = None
    memory_pressure_s: float | None = None  # time during which some task waited for memory (Linux PSI)
    own_cpu_s: float | None = None  # the part of cpu_busy_s that is the lab's and its engine's
    switches: int | None = None  # preemptions of the engine's main thread (on Windows: context switches)
    n_throttled: int | None = None  # how often heat slowed cores
    gpus: tuple[Gpu, ...] | None = None
    quota_wait_s: float | None = None  # time during which a container's CPU quota was used up


@dataclass(frozen=True)
class NoiseSamples:
    """The load of the machine during a run, ten times a second. A row covers the time since the previous row.

    A column that the system does not report is None.
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


PACKAGE, DRAM, GPU = "package", "dram", "gpu"
"""What joules cover: CPU packages, their memory, graphics cards."""


@dataclass(frozen=True)
class Noise:
    """Readings around a run. A sentinel is the same short decode before and after it: the median of its steps."""

    before: NoiseReading
    after: NoiseReading
    samples: NoiseSamples | None = None
    sentinel_before_ns: int | None = None
    sentinel_after_ns: int | None = None
    joules: dict[str, float] | None = None  # of the run, by what they cover, with everything that ran on it
