"""How the NVIDIA GPUs are doing, and what other processes compute on them.

Read through NVML (nvidia-ml-py), where it is installed and finds a GPU. Source: NVIDIA's NVML API reference.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from lab.core.noise import Gpu

SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of NVML's clock throttle reasons (nvml.h) that mean trouble."""

EVERY_S = 1.0
"""How often the driver is asked who uses a GPU: it samples that some times a second, and a question costs time."""


class GpuWatch:
    """Reads the GPUs; `own` are the process ids whose work on them is no noise."""

    def __init__(self, own: Collection[int]) -> None:
        self._own = frozenset(own)
        self._nvml, self._handles = _start()
        self._since = time.time_ns() // 1000  # the driver's own stamps: microseconds of the system's clock
        self._most: list[int | None] = [None] * len(self._handles)
        self._sampled = time.monotonic()

    def sample(self) -> None:
        """Ask what others use, unless the last time was less than EVERY_S ago."""
        if self._handles and time.monotonic() - self._sampled >= EVERY_S:
            self._ask_for_others()

    def read(self) -> tuple[Gpu, ...] | None:
        """The GPUs now. None where there is no NVML, or no GPU that it knows."""
        if self._nvml is None:
            return None
        self._ask_for_others()
        return tuple(self._gpu(handle, most) for handle, most in zip(self._handles, self._most, strict=True))

    @property
    def n_gpus(self) -> int:
        """How many GPUs NVML knows."""
        return len(self._handles)

    def energy_mj(self, index: int) -> int | None:
        """Millijoules that a GPU has used since its driver was loaded; None where it counts none (before Volta)."""
        used = self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handles[index])
        return None if used is None else int(used)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What NVML answers; None where this driver or GPU does not have it."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _gpu(self, handle: Any, others_percent: int | None) -> Gpu:
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        slowed = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        name, others = self._ask("nvmlDeviceGetName", handle), self._others(handle)
        return Gpu(
            name=name.decode() if isinstance(name, bytes) else str(name),
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1e3,
            slowed=", ".join(words for bit, words in SLOWED_BY.items() if slowed & bit) or None,
            n_others=None if others is None else len(others),
            others_percent=others_percent,
        )

    def _others(self, handle: Any) -> set[int] | None:
        """The other processes that compute on a GPU.

        None where the engine is not among those that NVML names: then it does not use this GPU, or the ids are those
        of another namespace (a container's host).
        """
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        ids = {process.pid for process in processes or ()}
        return ids - self._own if ids & self._own else None

    def _ask_for_others(self) -> None:
        self._sampled = time.monotonic()
        for i, handle in enumerate(self._handles):
            if self._others(handle) is None:
                continue
            percent = self._percent_of_others(handle)
            if percent is not None:
                self._most[i] = max(percent, self._most[i] or 0)

    def _percent_of_others(self, handle: Any) -> int | None:
        """Of the GPU's time, what others used in the last sample since this watch began; None where it is not known."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._since)
        except AttributeError:
            return None
        except self._nvml.NVMLError as problem:  # "not found" is the answer where nobody used it
            return 0 if getattr(problem, "value", None) == self._nvml.NVML_ERROR_NOT_FOUND else None
        latest = {sample.pid: sample for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
        return int(min(100, sum(sample.smUtil for pid, sample in latest.items() if pid not in self._own)))


def _start() -> tuple[Any, list[Any]]:
    """NVML and the handles of its GPUs; (None, []) where there is none."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []
