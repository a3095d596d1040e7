"""Joules: counters that are read as they are, arithmetic with a known truth, and nothing where nothing is known."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lab.analysis import comparison, table
from lab.analysis.spread import known_spreads
from lab.core import energy, phases
from lab.core.lines import from_json, parse_line, to_json
from lab.core.noise import BATTERY, DRAM, GPU, PACKAGE, Energy, EnergyCounter, Noise, NoiseReading, NoiseSamples
from lab.core.record import FAILED, Device, Record, Steps
from lab.process.wire import Outcome
from lab.process.worker import Worker
from lab.runner import energy as counters_of_energy
from lab.runner import noise_watch, session, side_by_side
from lab.runner.energy import Counter, EnergyWatch, counters
from lab.runner.gpu_watch import GpuWatch
from lab.runner.plan import make_plan
from lab.runner.session import new_results_file
from lab.show import console, page, text_compare, text_results
from tests.conftest import MACHINE, FakeWorker, make_record, make_run
from tests.test_noise import stand_in

IDLE, PREFILL, DECODE = 20.0, 60.0, 35.0  # watts
PREFILL_S, DECODE_S, N_GEN = 2.0, 3.0, 31
OTHER = dataclasses.replace(MACHINE, cpu="Other CPU")
WITH_GPU = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, Device("CUDA0", "A GPU", "gpu")))


def steps_of_known_times() -> Steps:
    """A prefill of PREFILL_S, then decode steps of 0.1 s; choosing takes no time."""
    starts = [0, *(round(1e9 * (PREFILL_S + i * DECODE_S / (N_GEN - 1))) for i in range(N_GEN - 1))]
    ends = [*starts[1:], round(1e9 * (PREFILL_S + DECODE_S))]
    kinds = ("prefill", *["decode"] * (N_GEN - 1))
    return Steps(kinds, (20, *[1] * (N_GEN - 1)), (0, *range(20, 19 + N_GEN)), tuple(starts), tuple(ends), tuple(ends))


def joules_until(seconds: float, began: float) -> float:
    """The truth: what was used from 0 on, where the run began at `began`."""
    prefilled, ended = began + PREFILL_S, began + PREFILL_S + DECODE_S
    parts = ((0.0, began, IDLE), (began, prefilled, PREFILL), (prefilled, ended, DECODE), (ended, 1e9, IDLE))
    return sum(watts * max(0.0, min(seconds, end) - start) for start, end, watts in parts)


def planted(
    began: float, period: float = 0.001, wraps_at: int | None = 50_000_000, every: float = 0.1, **changes: Any
) -> Record:
    """A run of the known watts, seen through a counter of microjoules that moves every `period`, read each `every`."""
    n = int((began + PREFILL_S + DECODE_S) / every) + 1
    times = [0.0, *(every * (i + 1) for i in range(n))]
    readings = [round(1e6 * joules_until(period * int(t / period + 1e-9), began)) for t in times]
    column = energy.used_mj([49_000_000 + n for n in readings], 1e-3, None)
    if wraps_at is not None:
        column = energy.used_mj([(49_000_000 + n) % wraps_at for n in readings], 1e-3, wraps_at)
    assert column is not None
    at_ms = tuple(round(1e3 * t) for t in times[1:])
    counter = EnergyCounter("package 0", PACKAGE, column, IDLE)
    return with_energy(at_ms, (counter,), 1e3 * began, **changes)


def with_energy(
    at_ms: tuple[int, ...], of_counters: tuple[EnergyCounter, ...], first_start_ms: float | None, **changes: Any
) -> Record:
    reading = NoiseReading()
    noise = Noise(reading, reading, NoiseSamples(at_ms), energy=Energy(of_counters, first_start_ms))
    run = make_run(n_prompt=20, n_gen=N_GEN, steps=steps_of_known_times(), noise=noise, **changes)
    return make_record(run)


@pytest.mark.parametrize("began", [0.0, 0.013, 0.05, 0.087, 0.49])
@pytest.mark.parametrize("wraps_at", [50_000_000, 65_532_610, None])
def test_planted_watts_come_back_within_the_error_of_sampling(began: float, wraps_at: int | None) -> None:
    record = planted(began, wraps_at=wraps_at)
    known = energy.figures(record)
    assert set(known) == set(energy.FIGURES)
    at_start, between, stale = 0.1 * (PREFILL - IDLE) / 4, 0.1 * (PREFILL - DECODE) / 4, 2 * 0.001 * PREFILL
    at_end = 0.1 * (DECODE - IDLE) / 4
    assert abs(known["prefill_j"] - PREFILL * PREFILL_S) <= at_start + between + stale
    decode_j = known["decode_j_per_token"] * (N_GEN - 1)
    assert abs(decode_j - DECODE * DECODE_S) <= between + at_end + stale
    assert known["prefill_w"] == pytest.approx(known["prefill_j"] / PREFILL_S)
    assert known["decode_w"] == pytest.approx(decode_j / DECODE_S)
    assert known["prefill_above_idle_j"] == pytest.approx(known["prefill_j"] - IDLE * PREFILL_S)
    assert known["decode_above_idle_j_per_token"] * (N_GEN - 1) == pytest.approx(decode_j - IDLE * DECODE_S)


def test_where_phases_begin_with_a_reading_the_joules_are_exact() -> None:
    known = energy.figures(planted(0.1, period=0.1))
    assert known["prefill_j"] == pytest.approx(PREFILL * PREFILL_S, abs=1e-3)
    assert known["decode_j_per_token"] == pytest.approx(DECODE * DECODE_S / (N_GEN - 1), abs=1e-4)
    assert known["prefill_w"] == pytest.approx(PREFILL, abs=1e-3)


def test_the_error_is_as_large_as_the_docstring_says_and_no_larger() -> None:
    errors = [
        energy.figures(planted(0.1 + i / 100, every=0.1, period=1e-6))["prefill_j"] - PREFILL * PREFILL_S
        for i in range(10)
    ]
    # both ends lie half way between readings: energy seeps out of prefill on either side
    assert min(errors) == pytest.approx(-(0.1 * (PREFILL - IDLE) / 4 + 0.1 * (PREFILL - DECODE) / 4), abs=2e-3)
    assert max(errors) == pytest.approx(0, abs=2e-3)


@pytest.mark.parametrize("period", [0.02, 0.07, 0.1, 0.13, 0.35])
def test_a_counter_that_moves_rarely_is_wrong_by_one_update_at_each_end(period: float) -> None:
    for began in (0.0, 0.03, 0.06, 0.2):
        known = energy.figures(planted(began, period=period))
        most = 2 * (0.1 + period) * PREFILL
        assert abs(known["prefill_j"] - PREFILL * PREFILL_S) <= most
        assert abs(known["decode_j_per_token"] * (N_GEN - 1) - DECODE * DECODE_S) <= most


def test_phases_of_few_updates_have_no_joules() -> None:
    assert energy.figures(planted(0.0, period=1.0)) == {"idle_w": IDLE}  # two and three updates
    known = energy.figures(planted(0.0, period=0.6))  # three and five
    assert "prefill_j" not in known and known["decode_w"] == pytest.approx(DECODE, rel=0.35)
    still = planted(0.0)
    still_counter = EnergyCounter("package 0", PACKAGE, (0,) * 51, None)
    noise = still.run.noise
    assert noise is not None and noise.samples is not None
    assert energy.between_j(noise.samples.at_ms, still_counter.used_mj, 0, 2000) is None


def test_between_is_none_outside_of_the_samples() -> None:
    at_ms, column = (100, 200, 300, 400, 500, 600), (10, 10, 10, 10, 10, 10)
    assert energy.between_j(at_ms, column, 100, 600) == pytest.approx(0.05)
    assert energy.between_j(at_ms, column, 50, 600.9) == pytest.approx(0.055)  # the last time is a rounded one
    assert energy.between_j(at_ms, column, -1, 500) is None
    assert energy.between_j(at_ms, column, 100, 602) is None
    assert energy.between_j(at_ms, column, 150, 549) == pytest.approx(0.0399)
    assert energy.between_j(at_ms, column, 201, 599) is None  # three updates


def test_a_reading_without_an_update_is_no_place_where_the_power_changed() -> None:
    at_ms = tuple(range(100, 1300, 100))
    evenly = energy.between_j(at_ms, (0, 20) * 6, 300, 1200)
    assert evenly == pytest.approx(0.09)  # 0.1 W all the time: between the updates the power is constant


@pytest.mark.parametrize(
    ("readings", "wraps_at", "expected"),
    [
        ([5, 8, 8, 12], None, (3000, 0, 4000)),
        ([95, 99, 3, 8], 100, (4000, 4000, 5000)),
        ([95, 99, 3, 8], None, None),  # it was set back
        ([8, 5], 2, None),
        ([5, None, 8], None, None),
        ([5], None, ()),
    ],
)
def test_what_was_used_between_readings(
    readings: list[int | None], wraps_at: int | None, expected: tuple[int, ...] | None
) -> None:
    assert energy.used_mj(readings, 1e3, wraps_at) == expected


def test_rounding_to_millijoules_does_not_add_up() -> None:
    column = energy.used_mj(range(0, 400_400, 400), 1e-3, None)
    assert column is not None and sum(column) == 400 and len(column) == 1001 - 1 and set(column) == {0, 1}


def test_a_run_that_cannot_be_placed_has_no_joules_but_its_idle_watts() -> None:
    record = planted(0.05)
    noise = record.run.noise
    assert noise is not None and noise.energy is not None
    moved = dataclasses.replace(noise, energy=dataclasses.replace(noise.energy, first_start_ms=None))
    assert energy.figures(make_record(dataclasses.replace(record.run, noise=moved))) == {"idle_w": IDLE}
    failed = dataclasses.replace(record.run, status=FAILED)
    assert energy.figures(make_record(failed)) == {"idle_w": IDLE}
    assert energy.figures(make_record()) == {}
    assert energy.source(make_record()) is None


def test_a_sweep_and_an_experiment_have_none() -> None:
    record = planted(0.05)
    for run in phases.by_length(make_run(n_prompt=64, n_gen=8, every=32, noise=record.run.noise)):
        assert energy.figures(make_record(run)) == {}


def of(*kinds: str, **changes: Any) -> Record:
    """A run with a counter of 10 W of each of these kinds."""
    at_ms = tuple(range(100, 5300, 100))
    made = tuple(EnergyCounter(f"{kind} {i}", kind, (1000,) * len(at_ms), 1.0) for i, kind in enumerate(kinds))
    return dataclasses.replace(with_energy(at_ms, made, 50.0), **changes)


@pytest.mark.parametrize(
    ("kinds", "machine", "source", "watts"),
    [
        ((PACKAGE, DRAM, PACKAGE, DRAM), MACHINE, "package + dram", 40),
        ((PACKAGE, GPU), MACHINE, "package", 10),  # the build cannot compute on the GPU
        ((PACKAGE, GPU), WITH_GPU, "package + gpu", 20),
        ((GPU, BATTERY), WITH_GPU, "gpu", 10),
        ((GPU, BATTERY), MACHINE, "battery", 10),
        ((PACKAGE, BATTERY), MACHINE, "package", 10),  # a battery feeds all others
    ],
)
def test_nothing_is_counted_twice(kinds: tuple[str, ...], machine: Any, source: str, watts: float) -> None:
    record = of(*kinds, machine=machine)
    assert energy.source(record) == source
    known = energy.figures(record)
    assert [known["prefill_w"], known["decode_w"]] == pytest.approx([watts, watts])
    assert known["idle_w"] == pytest.approx(watts / 10)


def test_idle_is_known_where_it_is_of_all_counters() -> None:
    record = of(PACKAGE, DRAM)
    noise = record.run.noise
    assert noise is not None and noise.energy is not None
    one = dataclasses.replace(noise.energy.counters[1], idle_w=None)
    part = dataclasses.replace(
        noise, energy=dataclasses.replace(noise.energy, counters=(noise.energy.counters[0], one))
    )
    known = energy.figures(make_record(dataclasses.replace(record.run, noise=part)))
    assert "idle_w" not in known and "prefill_above_idle_j" not in known and known["prefill_w"] == pytest.approx(20)


def test_energy_is_part_of_a_line_and_older_lines_are_read_as_before() -> None:
    record = planted(0.05)
    line = (to_json(record) + "\n").encode()
    assert parse_line(line) == record
    assert b'"used_mj":' in line and line.count(b'"used_mj"') == 1
    old = json.loads(line)
    del old["run"]["noise"]["energy"]
    read = parse_line(json.dumps(old).encode() + b"\n")
    assert isinstance(read, Record) and read.run.noise and read.run.noise.energy is None
    old["run"]["noise"]["energy"] = {"counters": [{"name": "x", "covers": "package", "used_mj": [1]}]}
    with pytest.raises(ValueError, match="length"):
        parse_line(json.dumps(old).encode() + b"\n")
    with pytest.raises(ValueError, match="length"):
        from_json(Noise, '{"before":{},"after":{},"energy":{"counters":[{"name":"","covers":"","used_mj":[1]}]}}')


# --- the counters of a machine


def folder(root: Path, path: str, **files: object) -> Path:
    target = root / "sys/class" / path
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (target / name).write_text(f"{content}\n")
    return target


def rapl(root: Path, zone: str, name: str, energy_uj: object = 1_000_000, most: int = 262_143_328_850) -> Path:
    return folder(root, f"powercap/{zone}", name=name, energy_uj=energy_uj, max_energy_range_uj=most)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> GpuWatch:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return GpuWatch([])


def test_a_machine_without_counters_says_so(tmp_path: Path, no_gpu: GpuWatch) -> None:
    nothing = counters(no_gpu, tmp_path)
    assert (nothing.readable, nothing.problems) == ((), ())
    line = text_compare.which(nothing)
    assert line.startswith("unknown: this machine has no RAPL (on Linux")
    assert line.endswith(", no NVIDIA GPU that nvidia-ml-py finds, no battery that Linux shows")


def test_only_packages_and_their_memory_are_read(tmp_path: Path, no_gpu: GpuWatch) -> None:
    for number in range(2):
        rapl(tmp_path, f"intel-rapl:{number}", f"package-{number}")
        rapl(tmp_path, f"intel-rapl:{number}:0", "core")
        rapl(tmp_path, f"intel-rapl:{number}:1", "dram")
    rapl(tmp_path, "intel-rapl:2", "psys")
    rapl(tmp_path, "intel-rapl:0:2", "uncore")
    rapl(tmp_path, "intel-rapl-mmio:0", "package-0")
    folder(tmp_path, "powercap/intel-rapl", enabled=1)
    made = counters(no_gpu, tmp_path)
    named = [(counter.name, counter.covers, counter.wraps_at) for counter in made.readable]
    assert sorted(named) == [
        ("dram 0", DRAM, 262_143_328_850),
        ("dram 1", DRAM, 262_143_328_850),
        ("package 0", PACKAGE, 262_143_328_850),
        ("package 1", PACKAGE, 262_143_328_850),
    ]
    assert made.problems == () and len(made.missing) == 2  # no GPU, no battery
    assert text_compare.which(made).startswith("package 0 (RAPL), dram 0 (RAPL)")
    rapl(tmp_path, "intel-rapl:0", "package-0-die-1")
    assert "package 0 die 1" in {counter.name for counter in counters(no_gpu, tmp_path).readable}


def test_a_locked_counter_is_named_with_what_to_do(tmp_path: Path, no_gpu: GpuWatch) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", energy_uj="")
    rapl(tmp_path, "intel-rapl:1", "package-1")  # half of the packages would be half of the energy
    rapl(tmp_path, "intel-rapl:0:0", "dram")
    made = counters(no_gpu, tmp_path)
    assert [counter.name for counter in made.readable] == ["dram 0"]
    (problem,) = made.problems
    assert "Only root can read RAPL" in problem and "sudo chmod a+r" in problem
    assert text_compare.which(made) == f"dram 0 (RAPL); {problem}"


def test_nvml_counts_where_the_gpu_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(handle: object) -> None:
        raise nvml.NVMLError(3)

    nvml = stand_in(nvmlDeviceGetTotalEnergyConsumption=lambda handle: 123_456 + handle, nvmlDeviceGetCount=lambda: 2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    first, second = counters(GpuWatch([]), tmp_path).readable
    assert (first.name, first.covers, first.read(), first.mj_per_unit) == ("gpu 0", GPU, 123_456, 1.0)
    assert (second.name, second.read(), second.wraps_at) == ("gpu 1", 123_457, None)
    nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
    made = counters(GpuWatch([]), tmp_path)
    assert not made.readable and made.problems[0].startswith("gpu 0, gpu 1: no energy counter")
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())  # a library that does not know the question
    assert not counters(GpuWatch([]), tmp_path).readable


@pytest.fixture
def asked_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_of_energy, "BATTERY_S", 0)


@pytest.mark.usefixtures("asked_always")
def test_a_battery_counts_while_it_discharges(tmp_path: Path, no_gpu: GpuWatch) -> None:
    battery = folder(tmp_path, "power_supply/BAT0", type="Battery", status="Discharging", energy_now=50_000_000)
    folder(tmp_path, "power_supply/AC", type="Mains", online=0)
    folder(tmp_path, "power_supply/hidpp_0", type="Battery", scope="Device", status="Discharging", energy_now=1)
    (counter,) = counters(no_gpu, tmp_path).readable
    assert (counter.name, counter.covers, counter.read()) == ("battery BAT0", BATTERY, 0)
    (battery / "energy_now").write_text("49990000")
    assert counter.read() == 36_000  # 10 mWh are 36 J
    (battery / "status").write_text("Charging")
    assert counter.read() is None
    (battery / "status").write_text("Discharging")
    assert counter.read() is None  # what it took in between is not known
    (battery / "status").write_text("Full")
    made = counters(no_gpu, tmp_path)
    assert not made.readable and "battery BAT0: counts only while it discharges" in made.problems[-1]


@pytest.mark.usefixtures("asked_always")
def test_a_battery_of_charge_is_no_less_full_because_its_voltage_sags(tmp_path: Path, no_gpu: GpuWatch) -> None:
    files = {"charge_now": 4_000_000, "voltage_now": 12_000_000}
    battery = folder(tmp_path, "power_supply/BAT1", type="Battery", status="Discharging", **files)
    (counter,) = counters(no_gpu, tmp_path).readable
    (battery / "voltage_now").write_text("11000000")
    assert counter.read() == 0
    (battery / "charge_now").write_text("3999000")
    assert counter.read() == round(1000 * 11 * 3.6)  # 1 mAh at 11 V


def test_a_battery_is_not_asked_all_the_time(tmp_path: Path, no_gpu: GpuWatch) -> None:
    battery = folder(tmp_path, "power_supply/BAT0", type="Battery", status="Discharging", energy_now=50_000_000)
    (counter,) = counters(no_gpu, tmp_path).readable
    (battery / "energy_now").write_text("49990000")
    assert counter.read() == 0


# --- sampled while a run lasts


def watch_of(monkeypatch: pytest.MonkeyPatch, *made: Counter, idle_w: dict[str, float] | None = None) -> EnergyWatch:
    monkeypatch.setattr(counters_of_energy, "counters", lambda gpus: counters_of_energy.Counters(made, ()))
    return EnergyWatch(GpuWatch([]), idle_w or {})


def reads(*values: int | None) -> Callable[[], int | None]:
    return iter(values).__next__


def test_a_watch_keeps_what_it_could_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(
        monkeypatch,
        Counter("package 0", PACKAGE, reads(1000, 3000, 2000), 1.0, 4000),
        Counter("dram 0", DRAM, reads(1, 2, 3), 1.0),
        Counter("dram 1", DRAM, reads(1, None, 3), 1.0),  # so the sum of memory is not known
        idle_w={"package 0": 7.5},
    )
    for _ in range(3):
        watch.sample()
    assert watch.finish(12.5) == Energy((EnergyCounter("package 0", PACKAGE, (2000, 3000), 7.5),), 12.5)


def test_nothing_to_read_is_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(monkeypatch)
    watch.sample()
    assert watch.finish() is None and not watch.has_counters


class FakeTime:
    """Stands in for the module time: sleeping and reading a counter take time."""

    def __init__(self) -> None:
        self.now = 7.0

    def perf_counter_ns(self) -> int:
        return round(1e9 * self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.001

    monotonic = time = perf_counter_ns
    time_ns = perf_counter_ns


def test_idle_watts_are_taken_once_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(counters_of_energy, "time", clock)
    made = [
        Counter("package 0", PACKAGE, lambda: round(20e6 * clock.now), 1e-3),
        Counter("battery BAT0", BATTERY, lambda: 36_000 * int(clock.now), 1.0),
    ]
    watch_of(monkeypatch, *made)
    counters_of_energy.idle_watts.cache_clear()
    try:
        assert counters_of_energy.idle_watts("a") == {"package 0": pytest.approx(20, abs=0.02)}
        assert clock.now == pytest.approx(8.01)
        counters_of_energy.idle_watts("a")
        assert clock.now == pytest.approx(8.01)
        watch_of(monkeypatch)
        assert counters_of_energy.idle_watts("b") == {}
        assert clock.now == pytest.approx(8.01)  # nothing to read: nothing to wait for
    finally:
        counters_of_energy.idle_watts.cache_clear()


def test_a_run_is_placed_among_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(perf_counter_ns=iter([10**9, 10**9 + 10**8, 2 * 10**9, 2 * 10**9 + 1]).__next__)
    steady = itertools.count(0, 500).__next__
    watch_of(monkeypatch)
    monkeypatch.setattr(
        counters_of_energy,
        "counters",
        lambda gpus: counters_of_energy.Counters((Counter("package 0", PACKAGE, steady, 1.0),), ()),
    )
    monkeypatch.setattr(noise_watch, "time", clock)
    watch = noise_watch.NoiseWatch(1, idle_w={"package 0": 3.0})
    watch.sample()
    noise = watch.finish(10**9 + 12_345_678)
    assert noise.samples is not None and noise.samples.at_ms == (100, 1000)
    assert noise.energy == Energy((EnergyCounter("package 0", PACKAGE, (500, 500), 3.0),), 12.346)


@pytest.mark.parametrize("first_start_ns", [999_999_999, 3 * 10**9, None])
def test_a_start_of_another_clock_is_not_used(monkeypatch: pytest.MonkeyPatch, first_start_ns: int | None) -> None:
    times = random.Random(1)
    clock = types.SimpleNamespace(perf_counter_ns=lambda: 10**9 + times.randrange(10**6))
    monkeypatch.setattr(noise_watch, "time", clock)
    watch_of(monkeypatch, Counter("package 0", PACKAGE, itertools.count().__next__, 1.0))
    noise = noise_watch.NoiseWatch(1).finish(first_start_ns)
    assert noise.energy is not None and noise.energy.first_start_ms is None


# --- shown and compared


def spent(watts: float, kind: str = PACKAGE, repeat: int = 0, **changes: Any) -> Record:
    """A plain run during which a counter of that kind counted so many watts; 1 W was idle."""
    at_ms = tuple(range(100, 5300, 100))
    made = EnergyCounter(f"{kind} 0", kind, (round(100 * watts),) * len(at_ms), 1.0)
    return dataclasses.replace(with_energy(at_ms, (made,), 50.0, repeat=repeat), **changes)


def session_of(watts: float, name: str, kind: str = PACKAGE, **changes: Any) -> list[Record]:
    return [spent(watts * (1 + i / 100), kind, i, session=name, **changes) for i in range(6)]


def test_runs_have_their_energy_and_others_none() -> None:
    rows = table.runs([spent(10), make_record()])
    assert rows.energy_source[0] == "package" and rows.energy_source.isna().tolist() == [False, True]
    first, second = rows.iloc[0], rows.iloc[1]
    assert [first.prefill_j, first.decode_j_per_token] == pytest.approx([20, 1])
    assert [first.prefill_w, first.decode_w, first.idle_w] == pytest.approx([10, 10, 1])
    assert [first.prefill_above_idle_j, first.decode_above_idle_j_per_token] == pytest.approx([18, 0.9])
    assert second[list(energy.FIGURES)].isna().all()


def test_a_summary_has_energy_only_where_there_is_some_of_one_source() -> None:
    assert "energy_source" not in table.summary(table.runs([make_record()]))
    (row,) = table.summary(table.runs(session_of(10, "a"))).to_dict("records")
    assert (row["energy_source"], row["repeats"]) == ("package", 6)
    assert row["prefill_j"] == pytest.approx(20.5) and row["prefill_j_low"] == pytest.approx(20)
    mixed = [*session_of(10, "a"), *session_of(90, "a", DRAM)]
    (row,) = table.summary(table.runs(mixed)).to_dict("records")
    assert row["energy_source"] is None and row["prefill_j"] != row["prefill_j"]  # NaN
    assert row["prefill_s"] == pytest.approx(PREFILL_S)


def printed(records: list[Record], capsys: pytest.CaptureFixture[str]) -> str:
    text_results.print_results(records, console.console())
    return capsys.readouterr().out


def test_a_table_of_energy_is_shown_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(session_of(10, "a"), capsys)
    assert "Energy of package (everything running on it, including idle power); medians" in out
    *_, last = (line.split() for line in out.splitlines() if line.strip())
    assert last == ["20", "20.5", "18.5", "1.02", "0.925", "10.2", "10.2", "1.00"]
    assert "Energy" not in printed([make_record()], capsys)
    only_idle = planted(0.0, period=1.0)  # the phases are too short for this counter
    assert "Energy" not in printed([only_idle], capsys)


def test_a_page_shows_energy_where_it_is_known() -> None:
    both = page.html([*session_of(10, "a"), *session_of(20, "b", machine=OTHER)], [])
    assert "Energy of package (everything running on it" in both and "J per\nprompt" in both
    assert "more energy, 2x as much" in both and ">ratio</th>" in both and "time\nratio" not in both
    assert "Energy of" not in page.html([make_record()], [])


def compared(*records: list[Record]) -> comparison.Comparison:
    (one,) = comparison.compare([record for part in records for record in part])
    return one


def test_energy_of_one_kind_of_source_is_compared_as_times_are() -> None:
    one = compared(session_of(10, "a"), session_of(20, "b", machine=OTHER))
    by_figure = {row.figure: row for row in one.rows}
    assert set(by_figure) == {"prefill_s", "tpot_ms", *energy.COMPARED}
    for figure in energy.COMPARED:
        row = by_figure[figure]
        assert (row.verdict, row.words.partition(";")[0]) == (comparison.MORE, "more energy, 2x as much")
        assert row.estimate == pytest.approx(2) and row.ratio is not None
    assert by_figure["prefill_j"].n_gen is None and by_figure["decode_j_per_token"].n_gen == N_GEN
    assert by_figure["tpot_ms"].verdict == comparison.ALIKE
    assert (one.energy_of, one.energy_differs, one.only_base, one.only_other) == ("package", None, (), ())
    less = compared(session_of(20, "a"), session_of(10, "b", machine=OTHER))
    for row in less.rows[-1:]:
        assert row.verdict == comparison.LESS and row.words.startswith(
            "less energy, 0.5x as much; the runs of the two sides"
        )


def test_energy_of_different_sources_is_not_compared_and_that_is_said() -> None:
    one = compared(session_of(10, "a"), session_of(20, "b", DRAM, machine=OTHER))
    assert {row.figure for row in one.rows} == {"prefill_s", "tpot_ms"}
    assert (one.energy_of, one.energy_differs) == (None, ("package", "dram"))
    assert (one.only_base, one.only_other) == ((), ())
    (sentence,) = text_compare.left_out(one)
    assert "package in the base, dram in the other" in sentence
    mixed = compared(
        session_of(10, "a"), [*session_of(20, "b", machine=OTHER), *session_of(2, "c", DRAM, machine=OTHER)]
    )
    assert mixed.energy_differs == ("package", "dram or package")


def test_energy_that_one_side_lacks_is_named() -> None:
    bare = [make_record(dataclasses.replace(r.run, noise=None), session="b", machine=OTHER) for r in session_of(1, "a")]
    one = compared(session_of(10, "a"), bare)
    assert one.only_base == ("J per prompt at 20", f"J per token at 20 with {N_GEN} generated")
    assert one.energy_differs is None and one.energy_of is None


def test_a_comparison_says_who_is_faster_and_apart_from_that_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    records = [*session_of(10, "a"), *session_of(20, "b", machine=OTHER)]
    groups = comparison.groups(records)
    comparisons = comparison.compare_groups(groups)
    sentences = text_compare.answers(comparisons)
    assert sentences[0].startswith("There is no clear difference between")  # of times
    assert sentences[1] == "Other CPU, 4 cores takes 2x the energy of Test CPU, 4 cores."
    text_compare.print_comparisons(groups, comparisons, 0.01, console.console())
    out = capsys.readouterr().out
    assert "J per prompt" in out and "J per token" in out and "J per token, token" not in out
    assert "Energy is of package (everything running on it, including idle power)" in out
    json.dumps(text_compare.comparisons_as_json(groups, comparisons)["comparisons"])


def test_sessions_of_energy_show_their_spread() -> None:
    sessions = [session_of(10 * (1 + i / 10), f"s{i}") for i in range(4)]
    known = known_spreads([record for of_one in sessions for record in of_one])
    by_figure = {figure: spread for (_, figure), spread in known.items()}
    centres = [math.log(10 * (1 + i / 10)) for i in range(4)]
    assert by_figure["prefill_j"].sd == pytest.approx(statistics.stdev(centres))
    assert by_figure["prefill_s"].sd == pytest.approx(0)


class Placed(FakeWorker):
    """An engine that says when its run began."""

    def run(self, *arguments: Any) -> Outcome:
        began = time.perf_counter_ns()
        return dataclasses.replace(super().run(*arguments), started_ns=began)


def test_every_run_of_a_session_has_its_energy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = FakeTime()
    monkeypatch.setattr(counters_of_energy, "time", clock)
    watch_of(monkeypatch, Counter("package 0", PACKAGE, lambda: round(20e6 * clock.now), 1e-3))
    monkeypatch.setattr("lab.models.catalog.sha256", lambda path: "0" * 64)
    worker = cast(Worker, Placed())
    plan = make_plan(worker, "8,16", 4, 2)
    path = new_results_file(plan, tmp_path)
    counters_of_energy.idle_watts.cache_clear()
    records = list(session.execute(plan, worker, path, lambda status: None))
    variants = dict.fromkeys(("A: x", "B: y"), plan)
    records += side_by_side.execute(variants, 1, tmp_path / "trial.jsonl", lambda status: None, Placed)  # type: ignore[arg-type]
    counters_of_energy.idle_watts.cache_clear()
    assert len(records) > 8
    for record in records:
        assert record.run.noise is not None and record.run.noise.energy is not None
        (counter,) = record.run.noise.energy.counters
        assert counter.idle_w == pytest.approx(20, abs=0.02)
        assert record.run.noise.energy.first_start_ms is not None
    assert clock.now == pytest.approx(7.0 + 2 * 1.01)  # a second before each of the two sessions
