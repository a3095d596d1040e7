"""What disturbs a run is seen, put into words, and never hidden; joules are added up as counters
count them."""

import dataclasses
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from lab.app import kinds
from lab.core.record import (
    DRAM,
    FAILED,
    GPU,
    PACKAGE,
    Device,
    Gpu,
    Noise,
    NoiseReading,
    NoiseSamples,
    Record,
)
from lab.runner import disturbances, machine, noise_watch
from lab.runner.noise_watch import EnergyCounter, EnergyWatch, GpuWatch, describe_energy
from lab.show import table
from lab.show.section import Section
from tests.support.records import MACHINE, READING, SETTINGS, make_record, make_run, watched

TWO_CORES = dataclasses.replace(MACHINE, n_cores_physical=2, n_cores_usable=2)
ON_GPU = dataclasses.replace(SETTINGS, n_gpu_layers=99)


def on_two_cores(others_ms: list[int], **changes: Any) -> Record:
    """Its two threads need all of that machine."""
    return make_record(watched(others_ms, **changes), machine=TWO_CORES)


def on(
    n_physical: int, n_logical: int, n_threads: int, cores_used: float, **changes: Any
) -> Record:
    """A run of so many threads, during which other processes used so many cores."""
    here = dataclasses.replace(MACHINE, n_cores_physical=n_physical, n_cores_usable=n_logical)
    settings = dataclasses.replace(
        SETTINGS, n_threads=n_threads, n_threads_batch=n_threads, **changes
    )
    return make_record(
        watched([round(100 * cores_used)] * 20),
        machine=here,
        settings=settings,
    )


def test_another_process_is_seen_on_the_whole_and_in_the_worst_second() -> None:
    assert disturbances.disturbances(on_two_cores([90] * 20)) == {
        disturbances.OTHERS: pytest.approx(0.9)
    }
    burst = [0] * 90 + [80] * 10  # one second of ten
    assert disturbances.disturbances(on_two_cores(burst)) == {
        disturbances.OTHERS: pytest.approx(0.8)
    }
    too_short = on_two_cores([90])  # 0.1 s, for the system's clock
    assert disturbances.disturbances(too_short) == {}


def test_steal_heat_and_short_memory_are_seen() -> None:
    before = dataclasses.replace(READING, memory_pressure_s=0.0, n_throttled=1)
    samples = NoiseSamples((1000,), (0,), (300,))
    after = dataclasses.replace(READING, memory_pressure_s=0.5, n_throttled=5)
    record = make_record(make_run(noise=Noise(before, after, samples)))
    assert disturbances.disturbances(record) == {
        disturbances.STEAL: 0.3,
        disturbances.MEMORY: 0.5,
        disturbances.HEAT: 4,
    }


def test_the_sentence_says_how_many_runs() -> None:
    records = [on_two_cores([30] * 20)] * 2 + [on_two_cores([0] * 20)] * 4
    assert disturbances.sentences(records) == ["other processes used 0.3 cores in 2 of 6 runs"]
    assert not disturbances.is_doubtful(records)
    assert disturbances.is_doubtful(records[:4])


@pytest.mark.parametrize(
    ("record", "disturbed"),
    [
        (on(2, 2, 2, 0.2), True),
        (on(64, 64, 56, 7), False),
        (on(64, 64, 56, 8.3), True),
        (on(64, 64, 64, 0.2), True),
        (
            on(8, 16, 8, 0.5),
            False,
        ),  # on the second logical core of a physical one, which takes a part of it
        (on(8, 16, 8, 0.7), True),
        (on(16, 16, 16, 8, n_gpu_layers=99), False),  # one thread feeds the GPU
        (on(16, 16, 16, 15.3, n_gpu_layers=99), True),
        (on(16, 16, 16, 0.2, n_gpu_layers=1), True),  # the other layers are on the CPU
        (on(16, 16, 16, 8, n_gpu_layers=99, n_cpu_moe=2), True),  # ... the experts
        (on(16, 16, 16, 8, n_gpu_layers=99, kv_offload=False), True),  # ... the cache
        (on(16, 16, 16, 8, n_gpu_layers=99, override_tensor=("exps=CPU",)), True),
        (on(16, 16, 16, 8, n_gpu_layers=99, override_tensor=("exps=CUDA1",)), False),
    ],
)
def test_what_others_take_counts_where_the_run_needs_it(
    record: Record, disturbed: bool
) -> None:
    assert (disturbances.OTHERS in disturbances.disturbances(record)) is disturbed


def test_threads_without_a_core_are_reported_as_what_was_measured() -> None:
    quiet = on(2, 2, 2, 0)
    used, waited = disturbances.sentences([on(2, 2, 2, 0.9), quiet])
    assert used == "other processes used 0.9 cores in 1 of 2 runs"
    assert waited.startswith("only 1.1 cores were free for 2 threads in 1 of 2 runs")
    assert waited.endswith("(stop other programs; if that is usual there, use --threads 1)")
    assert "use --threads 5" in disturbances.sentences([on(8, 8, 8, 2.5)])[1]
    not_one_whole_core = disturbances.sentences([on(2, 2, 2, 1.7)])[1]
    assert "--threads" not in not_one_whole_core
    assert disturbances.sentences([on(8, 8, 5, 2.5), quiet]) == []
    assert (
        "only 0.1 cores were free for 1 thread in"
        in disturbances.sentences([on(2, 2, 1, 1.9)])[1]
    )
    assert "--threads" not in disturbances.sentences([on(2, 2, 1, 1.9)])[1]


@pytest.mark.parametrize(
    ("n_affinity", "cores_used", "is_disturbed"),
    [
        (64, 30.0, False),
        (64, 32.0, True),
        (4, 2.0, False),
        (4, 3.7, True),
        (None, 30.0, False),
    ],
)
def test_with_a_quota_others_may_use_the_cores_that_the_process_may_run_on(
    n_affinity: int | None, cores_used: float, is_disturbed: bool
) -> None:
    """A container with a quota of one core: of 64 cores, or of four that a cpuset leaves.

    None: a record of an older version, which knows only the machine's 32 physical cores.
    """
    here = dataclasses.replace(
        MACHINE,
        n_cores_physical=32,
        n_cores_usable=1,
        cpu_quota=1.0,
        n_cores_affinity=n_affinity,
    )
    settings = dataclasses.replace(SETTINGS, n_threads=1, n_threads_batch=1)
    run = watched([round(100 * cores_used)] * 20)
    record = make_record(run, machine=here, settings=settings)
    assert (disturbances.OTHERS in disturbances.disturbances(record)) == is_disturbed


def test_of_runs_that_nobody_disturbed_no_core_is_missing() -> None:
    """More threads than the quota has cores, and nothing else on the machine."""
    here = dataclasses.replace(MACHINE, n_cores_physical=8, n_cores_usable=2, cpu_quota=2.0)
    settings = dataclasses.replace(SETTINGS, n_threads=4, n_threads_batch=4)
    record = make_record(watched([0] * 20), machine=here, settings=settings)
    assert disturbances.disturbances(record) == {}
    assert disturbances.sentences([record]) == []


QUOTA_OF_FOUR = dataclasses.replace(
    MACHINE, n_cores_physical=64, n_cores_usable=4, cpu_quota=4.0, n_cores_affinity=64
)
FOUR_THREADS = dataclasses.replace(SETTINGS, n_threads=4, n_threads_batch=4)


@pytest.mark.parametrize(
    ("cores_used", "before", "missing"),
    [
        (3, "", ""),
        (60, "", ""),
        (
            62,
            "Other programs use about 62 of 64 cores",
            "only 2 cores were free for 4 threads",
        ),
    ],
)
def test_with_a_quota_the_look_before_the_first_run_agrees_with_the_runs(
    cores_used: int, before: str, missing: str
) -> None:
    """A quota of 4 of 64 cores: the samples count others on all 64."""
    run = watched([100 * cores_used] * 20)
    record = make_record(run, machine=QUOTA_OF_FOUR, settings=FOUR_THREADS)
    assert run.noise is not None
    seen = disturbances.seen_before(run.noise, QUOTA_OF_FOUR, record.model, FOUR_THREADS)
    assert seen.startswith(before)
    assert bool(seen) == bool(before)
    clauses = "; ".join(disturbances.sentences([record]))
    assert missing in clauses
    assert bool(clauses) == bool(missing)


def test_the_cores_that_a_quota_allows_are_not_those_that_are_watched() -> None:
    here = QUOTA_OF_FOUR
    assert machine.n_cores_allowed(here) == 4
    assert machine.n_cores_watched(here) == 64
    assert machine.n_cores_free(here, taken=3) == 4
    assert machine.n_cores_free(here, taken=62) == 2


@pytest.mark.parametrize(
    ("n_cores", "words"),
    [(1, "1 core"), (0.05, "0.05 cores"), (2.5, "2.5 cores"), (128, "128 cores")],
)
def test_cores_are_written_as_a_plain_number(n_cores: float, words: str) -> None:
    assert machine.cores_in_words(n_cores) == words


def test_a_used_up_quota_is_seen() -> None:
    noise = watched([0] * 20, quota_wait_s=0.5).noise
    assert noise is not None
    before = dataclasses.replace(READING, quota_wait_s=0.4)
    record = make_record(make_run(noise=dataclasses.replace(noise, before=before)))
    assert disturbances.sentences([record]) == [
        "the container used up its quota of CPU time in the only run"
    ]


def drifting(factor: float) -> list[Record]:
    """Twelve runs whose sentinels took from 10 ms to `factor` times as long."""
    records = []
    for repeat in range(12):
        sentinel_ns = round(10**7 * (1 + (factor - 1) * repeat / 11))
        noise = Noise(READING, READING, None, None, sentinel_ns)
        records.append(make_record(make_run(repeat=repeat, noise=noise)))
    return records


def test_drift_is_reported_and_its_absence_not() -> None:
    (sentence,) = disturbances.drift(drifting(1.2))
    assert "slower" in sentence
    assert "took 1.2x as long" in sentence
    assert "faster" in disturbances.drift(drifting(0.8))[0]
    assert disturbances.drift(drifting(1.001)) == []
    assert disturbances.drift(drifting(1.2)[:2]) == []


@pytest.mark.skipif(
    not sys.platform.startswith(("linux", "darwin")), reason="counts CPU time of processes"
)
def test_a_real_busy_neighbour_is_seen() -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        watch = noise_watch.NoiseWatch(1)
        for _ in range(12):
            time.sleep(0.1)
            watch.sample()
        read = watch.finish()
    finally:
        neighbour.kill()
        neighbour.wait()
    assert read.samples is not None
    assert len(read.samples.at_ms) == 13
    usable = 1  # whatever else this machine has
    here = dataclasses.replace(MACHINE, n_cores_physical=usable, n_cores_usable=usable)
    assert disturbances.OTHERS in disturbances.disturbances(
        make_record(make_run(noise=read), machine=here)
    )


ENGINE = 100
NEIGHBOUR = 200
DESKTOP = 300


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def stand_in(**changes: Any) -> types.SimpleNamespace:
    """NVML with one GPU, on which the engine and two others have memory; `changes` are other
    answers."""

    def refuse(*_: object) -> None:
        raise NVMLError(3)

    answers = {
        "NVMLError": NVMLError,
        "NVML_ERROR_NOT_FOUND": 6,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"A GPU",
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x20 | 0x4,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            types.SimpleNamespace(pid=pid) for pid in (ENGINE, NEIGHBOUR, DESKTOP)
        ],
        "nvmlDeviceGetProcessUtilization": refuse,
    }
    return types.SimpleNamespace(**(answers | changes))


def used(*samples: tuple[int, int, int]) -> Any:
    """NVML's answer: process id, time stamp, percent of the GPU's time."""
    return lambda handle, since: [
        types.SimpleNamespace(pid=p, timeStamp=t, smUtil=n) for p, t, n in samples
    ]


def gpu_record(*gpus: Gpu, **changes: Any) -> Record:
    samples = NoiseSamples((500,))
    noise = Noise(READING, dataclasses.replace(READING, gpus=gpus), samples)
    return make_record(make_run(noise=noise), **{"settings": ON_GPU, **changes})


def test_an_nvidia_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    (read,) = noise_watch.read_noise(GpuWatch([])).gpus or ()
    assert read == Gpu("A GPU", "heat", None)
    assert disturbances.disturbances(gpu_record(read)) == {disturbances.HEAT: 1}
    assert (
        disturbances.disturbances(gpu_record(read, settings=SETTINGS)) == {}
    )  # it ran on the CPU


def test_other_processes_on_the_gpu_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cool = {"nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0}
    busy = used(
        (ENGINE, 2, 60), (NEIGHBOUR, 1, 90), (NEIGHBOUR, 2, 30), (DESKTOP, 2, 2)
    )  # the latest of each counts
    monkeypatch.setitem(
        sys.modules, "pynvml", stand_in(nvmlDeviceGetProcessUtilization=busy, **cool)
    )
    (read,) = GpuWatch([1, ENGINE]).read() or ()
    assert read.others_percent == 32
    assert disturbances.sentences([gpu_record(read)]) == [
        "other processes used 32 % of the GPU in the only run"
    ]
    assert disturbances.sentences([gpu_record(read, settings=SETTINGS)]) == []
    # The engine is not among them: the ids are of another namespace.
    (read,) = GpuWatch([1]).read() or ()
    assert read.others_percent is None
    idle = used((ENGINE, 2, 99), (DESKTOP, 2, 2))
    monkeypatch.setitem(
        sys.modules, "pynvml", stand_in(nvmlDeviceGetProcessUtilization=idle, **cool)
    )
    (read,) = GpuWatch([1, ENGINE]).read() or ()
    assert disturbances.disturbances(gpu_record(read)) == {}


# Energy

NO_GPU = cast(GpuWatch, types.SimpleNamespace(energy_counters=list))
WITH_GPU = dataclasses.replace(
    MACHINE, devices=(*MACHINE.devices, Device("CUDA0", "A GPU", "gpu"))
)
READ_COUNTERS = noise_watch.energy_counters
"""The real function: other tests have none (conftest.py)."""


def write_zone(root: Path, zone: str, **files: object) -> None:
    folder = root / "sys/class/powercap" / zone
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_only_packages_and_their_memory_are_read(tmp_path: Path) -> None:
    zones = {
        "0": "package-0",
        "0:0": "core",
        "0:1": "dram",
        "1": "package-1-die-0",
        "2": "psys",
    }
    counts = {"energy_uj": 5_000_000, "max_energy_range_uj": 9_000_000}
    for zone, name in zones.items():
        write_zone(
            tmp_path,
            f"intel-rapl:{zone}",
            name=name,
            **counts,
        )
    write_zone(
        tmp_path,
        "intel-rapl-mmio:0",
        name="package-0",
        energy_uj=5,
    )
    counters = READ_COUNTERS(NO_GPU, tmp_path)
    assert [counter.covers for counter in counters] == [PACKAGE, DRAM, PACKAGE]
    for counter in counters:
        assert counter.read() == 5_000_000
        assert counter.wraps_at == 9_000_000
    assert describe_energy(counters) == "package, dram"


def reads(*values: int | None) -> Callable[[], int | None]:
    return iter(values).__next__


@pytest.mark.parametrize(
    ("counters", "joules"),
    [
        ([], None),
        # 2000, then 3000 over the wrap
        (
            [EnergyCounter(PACKAGE, reads(1000, 3000, 2000), 1.0, 4000)],
            {PACKAGE: 5000},
        ),
        ([EnergyCounter(PACKAGE, reads(1000, 3000, 2000), 1.0)], None),  # it was set back
        ([EnergyCounter(PACKAGE, reads(1, None, 3), 1.0)], None),
        (
            [
                EnergyCounter(GPU, reads(5, 6, 7), 1e-3),
                EnergyCounter(GPU, reads(5, 6, 9), 1e-3),
            ],
            {GPU: 0.006},
        ),
        # half of a sum
        (
            [
                EnergyCounter(PACKAGE, reads(1, 2, 4), 1.0),
                EnergyCounter(PACKAGE, reads(1, None, 4), 1.0),
            ],
            None,
        ),
        (
            [
                EnergyCounter(PACKAGE, reads(1, 2, 4), 1.0),
                EnergyCounter(DRAM, reads(1, 1, None), 1.0),
            ],
            {PACKAGE: 3},
        ),
    ],
)
def test_what_was_used_between_readings(
    monkeypatch: pytest.MonkeyPatch, counters: Any, joules: Any
) -> None:
    monkeypatch.setattr(noise_watch, "energy_counters", lambda gpus: counters)
    watch = EnergyWatch(NO_GPU)
    watch.sample()
    assert watch.joules() == joules


def with_joules(joules: dict[str, float] | None, **changes: Any) -> Record:
    reading = NoiseReading()
    machine = changes.pop("machine", MACHINE)
    return make_record(
        make_run(
            20,
            10,
            noise=Noise(reading, reading, joules=joules),
            **changes,
        ),
        machine=machine,
    )


def test_a_run_has_joules_per_generated_token() -> None:
    records = [
        with_joules({PACKAGE: 30, DRAM: 5, GPU: 10}),
        with_joules({PACKAGE: 30, GPU: 10}, machine=WITH_GPU),
        with_joules(None),
        with_joules({PACKAGE: 30}, status=FAILED),
    ]
    rows = table.runs(records)
    # Without a GPU in the build its card does not count.
    assert rows.j_per_token[:2].tolist() == [3.5, 4.0]
    assert rows.energy_of[:2].tolist() == ["package + dram", "package + gpu"]
    assert rows.j_per_token[2:].isna().all()
    assert rows.energy_of[2:].isna().all()


def test_the_table_shows_joules_where_they_are_known() -> None:
    def table_of(records: list[Record]) -> Sequence[Section]:
        return kinds.sections(records)[0].parts

    (section,) = table_of(
        [
            with_joules({PACKAGE: 30}),
            with_joules({PACKAGE: 50}, repeat=1),
        ]
    )
    sentence = "J per token: energy of the whole run (package, all that ran on it)"
    assert sentence in " ".join(section.notes)
    assert "J per\\ntoken" in str(section)
    mixed = [
        with_joules({PACKAGE: 30}),
        with_joules({PACKAGE: 30, DRAM: 5}, repeat=1),
    ]
    for records in (mixed, [with_joules(None)]):
        (section,) = table_of(records)
        assert "J per" not in str(section)
