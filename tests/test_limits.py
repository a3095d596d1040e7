"""How much of a machine may be used, where control groups limit it: faked trees."""

import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from lab.runner import cgroups, machine

GB = 10**9


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def tree(
    root: Path,
    groups: str,
    files: dict[str, str],
) -> Path:
    """A folder that stands for `/`. `files` lie in sys/fs/cgroup."""
    write(root / "proc/self/cgroup", groups)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
    return root


@pytest.fixture(autouse=True)
def a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing but the groups limits."""
    memory = SimpleNamespace(available=500 * GB, total=512 * GB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 64 if logical else 32)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)


def test_a_model_that_was_just_read_is_not_demanded_twice(tmp_path: Path) -> None:
    stat = f"anon {GB}\nfile {6 * GB}\ninactive_file {6 * GB}\nactive_file 0"
    files = {
        "memory.max": str(8 * GB),
        "memory.current": str(7 * GB),
        "memory.stat": stat,
    }
    root = tree(tmp_path, "0::/", files)
    assert machine.memory_available(root) == 7 * GB


@pytest.mark.parametrize("nearest", ["max", str(100 * GB)])
def test_the_limits_of_all_groups_above_count(tmp_path: Path, nearest: str) -> None:
    files = {
        "job.slice/memory.max": str(4 * GB),
        "job.slice/memory.current": str(GB),
        "job.slice/cpu.max": "250000 100000",
        "job.slice/step.scope/memory.max": nearest,
        "job.slice/step.scope/memory.current": str(GB),
        "job.slice/step.scope/cpu.max": "max 100000",
    }
    root = tree(tmp_path, "0::/job.slice/step.scope", files)
    assert machine.memory_available(root) == 3 * GB
    assert machine.n_cores_usable(root) == 2.5
    assert machine.default_threads(root) == 2


def test_the_time_that_a_quota_halted(tmp_path: Path) -> None:
    stat = "nr_periods 9\nnr_throttled 5\nthrottled_usec 2500000"
    root = tree(tmp_path, "0::/a", {"a/cpu.stat": stat, "cpu.stat": "usage_usec 9"})
    assert cgroups.throttled_s(root) == 2.5


PAIRS = "0-1 0-1 2-3 2-3 4-5 4-5 6-7 6-7"  # four physical cores of two threads
SINGLE = "0 1 2 3 4 5 6 7"
HYBRID = (
    "0-1 0-1 2-3 2-3 4 5 6 7"  # two performance cores of two threads, four efficiency cores
)
CAPACITY = "cpu_capacity"
FREQUENCY = "cpufreq/cpuinfo_max_freq"


class Cores(NamedTuple):
    """A machine, and the number of threads that it gets."""

    why: str
    n_threads: int
    siblings: str  # the cores that share a physical core, core by core
    allowed: tuple[int, ...] = tuple(range(8))
    quota: str = "max"  # of CPU time, in us of 0.1 s
    performance: str | None = None  # performance cores of an Intel CPU
    figure: str | None = None  # a file of each core
    values: str = ""  # its values, core by core


CASES = [
    Cores("one thread for each physical core", 4, PAIRS),
    Cores("cores without siblings are all physical", 8, SINGLE),
    Cores("affinity: two threads of one core", 1, PAIRS, allowed=(2, 3)),
    Cores("two NUMA nodes (0-3, 4-7): both have memory bandwidth", 8, SINGLE),
    Cores("a quota of 2.5 cores", 2, PAIRS, quota="250000"),
    Cores("a quota of half a core", 1, PAIRS, quota="50000"),
    Cores("Intel: performance cores only", 2, HYBRID, performance="0-3"),
    Cores("Intel: only slow ones are allowed", 3, HYBRID, (5, 6, 7), performance="0-3"),
    Cores(
        "Arm: big cores only",
        4,
        SINGLE,
        figure=CAPACITY,
        values="397 397 397 397 1024 1024 1024 1024",
    ),
    Cores(
        "Arm: only little cores are allowed",
        3,
        SINGLE,
        allowed=(0, 1, 2),
        figure=CAPACITY,
        values="397 397 397 397 1024 1024 1024 1024",
    ),
    Cores(
        "Arm: an old kernel that tells frequencies only",
        4,
        SINGLE,
        figure=FREQUENCY,
        values="1000000 1000000 1000000 1000000 2400000 2400000 2400000 2400000",
    ),
    Cores(
        "cores that clock a little higher make no second kind",
        4,
        PAIRS,
        figure=FREQUENCY,
        values="5400000 5400000 5800000 5800000 5400000 5400000 5400000 5400000",
    ),
    Cores(
        "cores above half the speed of the fastest help",
        8,
        SINGLE,
        figure=FREQUENCY,
        values="5100000 5100000 5100000 5100000 3300000 3300000 3300000 3300000",
    ),
]


@pytest.mark.parametrize("cores", CASES, ids=[cores.why for cores in CASES])
def test_threads_by_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: Cores,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores.allowed), raising=False)
    root = tree(tmp_path, "0::/", {"cpu.max": f"{cores.quota} 100000"})
    devices = root / "sys/devices"
    for number, siblings in enumerate(cores.siblings.split()):
        write(devices / f"system/cpu/cpu{number}/topology/thread_siblings_list", siblings)
    for number, value in enumerate(cores.values.split()):
        write(devices / f"system/cpu/cpu{number}/{cores.figure}", value)
    if cores.performance is not None:
        write(devices / "cpu_core/cpus", cores.performance)
        write(devices / "cpu_atom/cpus", "4-7")
    assert machine.default_threads(root) == cores.n_threads


TREES = tomllib.loads((Path(__file__).parent / "control_groups.toml").read_text())


@pytest.mark.parametrize("name", TREES)
def test_the_limits_of_containers_and_hosts(tmp_path: Path, name: str) -> None:
    planted = TREES[name]
    write(tmp_path / "proc/self/cgroup", planted["cgroup"].strip())
    write(tmp_path / "proc/self/mountinfo", planted["mountinfo"].strip())
    for path, text in planted["files"].items():
        write(tmp_path / path, text)
    assert cgroups.cpu_quota(tmp_path) == planted.get("quota")
    assert cgroups.throttled_s(tmp_path) == planted.get("throttled")
    assert cgroups.memory_limit(tmp_path) == planted.get("limit")
    assert machine.memory_available(tmp_path) == planted.get("left", 500 * GB)
    assert machine.n_cores_usable(tmp_path) == planted.get("quota", 64)
    assert machine.default_threads(tmp_path) == max(1, int(planted.get("quota", 32)))
