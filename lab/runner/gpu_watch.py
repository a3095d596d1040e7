"""Read the state of NVIDIA GPUs, and their use by other processes.

Uses NVML (nvidia-ml-py), if it is installed and finds a GPU. Source: NVIDIA's NVML API reference.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from lab.core.noise import Gpu

SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""The bits of NVML's clock throttle reasons (nvml.h) that indicate a problem."""

EVERY_S = 1.0
"""Interval of asking the driver who uses a GPU. The driver samples a few times a second, and a query takes time."""


class GpuWatch:
    """Reads the GPUs. `own` are the process ids of the measurement itself."""

    def __init__(self, own: Collection[int]) -> None:
        self._own = frozenset(own)
        self._nvml: Any = None
        self._handles: list[Any] = []
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                n_gpus = pynvml.nvmlDeviceGetCount()
                self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(n_gpus)]
                self._nvml = pynvml
        self._since = time.time_ns() // 1000  # like the driver's stamps: microseconds of the system clock
        self._most: list[int | None] = [None] * len(self._handles)
        self._sampled = time.monotonic()

    def sample(self) -> None:
        """Update the use by others, at most every EVERY_S."""
        if self._handles and time.monotonic() - self._sampled >= EVERY_S:
            self._ask_for_others()

    def read(self) -> tuple[Gpu, ...] | None:
        """The current state of the GPUs. None without NVML, or without a GPU."""
        if self._nvml is None:
            return None
        self._ask_for_others()
        return tuple(self._gpu(handle, most) for handle, most in zip(self._handles, self._most, strict=True))

    @property
    def n_gpus(self) -> int:
        """The number of GPUs that NVML lists."""
        return len(self._handles)

    def energy_mj(self, index: int) -> int | None:
        """Millijoules that a GPU has used since its driver was loaded; None without a counter (before Volta)."""
        used = self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handles[index])
        return None if used is None else int(used)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """NVML's answer; None if this driver or GPU does not support the function."""
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

        None if NVML does not list the engine: it does not use this GPU, or the ids belong to another namespace (a
        container's host).
        """
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        ids = {process.pid for process in processes or ()}
        return ids - self._own if ids & self._own else None

    def _ask_for_others(self) -> None:
        """Note the highest percentage of each GPU's time that others used in the driver's last sample."""
        self._sampled = time.monotonic()
        for i, handle in enumerate(self._handles):
            if self._others(handle) is None:
                continue
            try:
                samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._since)
            except AttributeError:
                continue
            except self._nvml.NVMLError as problem:  # "not found" means that nobody used the GPU
                if getattr(problem, "value", None) != self._nvml.NVML_ERROR_NOT_FOUND:
                    continue
                samples = []
            latest = {sample.pid: sample for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
            percent = int(min(100, sum(one.smUtil for pid, one in latest.items() if pid not in self._own)))
            self._most[i] = max(percent, self._most[i] or 0)
