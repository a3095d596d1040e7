"""What disturbs a run is seen, put into words, and never hidden."""

import dataclasses
import subprocess
import sys
import time
import types
from typing import Any

import pytest

from lab.analysis import disturbances
from lab.core.noise import Noise, NoiseReading, NoiseSamples
from lab.core.record import Run
from lab.runner import noise_watch
from tests.conftest import make_record, make_run

READING = NoiseReading(None, None, None, None, None, None)


def watched(others_ms: list[int], every_ms: int = 100, **changes: Any) -> Run:
    """A run during which others took so much CPU time in each interval."""
    at_ms = tuple(every_ms * (i + 1) for i in range(len(others_ms)))
    samples = NoiseSamples(at_ms, tuple(others_ms), None, None, None)
    return make_run(noise=Noise(READING, dataclasses.replace(READING, **changes), samples))


def test_a_quiet_run_is_not_disturbed() -> None:
    assert disturbances.disturbances(watched([0, 10, 0, 0, 10] * 4)) == {}
    assert disturbances.disturbances(make_run()) == {}  # nothing was read


def test_another_process_is_seen_on_the_whole_and_in_the_worst_second() -> None:
    assert disturbances.disturbances(watched([90] * 20)) == {disturbances.OTHERS: pytest.approx(0.9)}
    burst = [0] * 90 + [80] * 10  # one second of ten
    assert disturbances.disturbances(watched(burst)) == {disturbances.OTHERS: pytest.approx(0.8)}
    assert disturbances.disturbances(watched([90])) == {}  # 0.1 s: too short for the system's clock


def test_steal_heat_and_short_memory_are_seen() -> None:
    steal = dataclasses.replace(READING, memory_pressure_s=0.0)
    samples = NoiseSamples((1000,), (0,), (300,), None, None)
    after = dataclasses.replace(READING, memory_pressure_s=0.5, n_throttled=4)
    run = make_run(noise=Noise(steal, after, samples))
    assert disturbances.disturbances(run) == {disturbances.STEAL: 0.3, disturbances.MEMORY: 0.5, disturbances.HEAT: 4}


def test_the_sentence_says_how_many_runs() -> None:
    runs = [watched([90] * 20)] * 2 + [watched([0] * 20)] * 4
    assert disturbances.sentences(runs) == ["another process used 0.9 of a core during 2 of 6 runs"]
    assert not disturbances.is_doubtful(runs)
    assert disturbances.is_doubtful(runs[:4])


def test_what_disturbed_something_else_than_a_run_is_told() -> None:
    for others_ms, said in (([90] * 20, "another process used 0.9 of a core"), ([0, 10] * 10, "")):
        run = watched(others_ms)
        assert run.noise and disturbances.during(run.noise) == said
    assert disturbances.during(Noise(READING, READING)) == ""


def drifting(factor: float) -> list[Any]:
    sentinels = [round(10**7 * (1 + (factor - 1) * i / 11)) for i in range(12)]
    made = [Noise(READING, READING, None, None, after) for after in sentinels]
    return [make_record(make_run(repeat=i, noise=each)) for i, each in enumerate(made)]


def test_drift_is_told_and_its_absence_not() -> None:
    (said,) = disturbances.drift(drifting(1.2))
    assert "slower" in said and "1.20x as slow" in said
    assert "faster" in disturbances.drift(drifting(0.8))[0]
    assert disturbances.drift(drifting(1.001)) == []
    assert disturbances.drift(drifting(1.2)[:2]) == []


@pytest.mark.skipif(not sys.platform.startswith(("linux", "darwin")), reason="counts CPU time of processes")
def test_a_real_busy_neighbour_is_seen() -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        watch = noise_watch.NoiseWatch(pid=1)
        for _ in range(12):
            time.sleep(0.1)
            watch.sample()
        read = watch.finish()
    finally:
        neighbour.kill()
        neighbour.wait()
    assert read.samples is not None and len(read.samples.at_ms) == 13
    assert disturbances.OTHERS in disturbances.disturbances(make_run(noise=read))
    assert read.after.own_cpu_s is not None


def test_an_nvidia_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception): ...

    def refuse(*_: object) -> None:
        raise NVMLError

    gpu = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"A GPU",
        nvmlDeviceGetClockInfo=lambda handle, kind: 1500,
        nvmlDeviceGetTemperature=lambda handle, kind: 71,
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x20 | 0x4,
    )
    monkeypatch.setitem(sys.modules, "pynvml", gpu)
    (read,) = noise_watch.read_noise([]).gpus or ()
    assert (read.name, read.clock_mhz, read.temperature_c, read.power_w) == ("A GPU", 1500, 71, None)
    assert read.slowed == "heat"
    hot = make_run(noise=Noise(READING, dataclasses.replace(READING, gpus=(read,)), NoiseSamples((500,), *[None] * 4)))
    assert disturbances.disturbances(hot) == {disturbances.HEAT: 1}


def test_no_nvidia_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert noise_watch.read_noise([]).gpus is None
