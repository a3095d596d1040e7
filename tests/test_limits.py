"""How much of a machine may be used, where control groups limit it: faked trees."""

import os
import sys
from pathlib import Path

import pytest

from lab.runner import machine

GB = 10**9


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A folder that stands for `/`. `files` lie in sys/fs/cgroup."""
    contents = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {**contents, "proc/self/cgroup": groups}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture(autouse=True)
def a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing but the groups limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 64 if logical else 32)
    monkeypatch.setattr(
        "psutil.virtual_memory",
        lambda: type("Memory", (), {"available": 500 * GB, "total": 512 * GB}),
    )


def test_a_model_that_was_just_read_is_not_demanded_twice(tmp_path: Path) -> None:
    stat = f"anon {GB}\nfile {6 * GB}\ninactive_file {6 * GB}\nactive_file 0"
    files = {"memory.max": str(8 * GB), "memory.current": str(7 * GB), "memory.stat": stat}
    assert machine.memory_available(tree(tmp_path, "0::/", files)) == 7 * GB


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
    assert (machine.n_cores_usable(root), machine.default_threads(root)) == (2.5, 2)


def test_the_time_that_a_quota_halted(tmp_path: Path) -> None:
    stat = "nr_periods 9\nnr_throttled 5\nthrottled_usec 2500000"
    assert (
        machine.throttled_s(
            tree(tmp_path, "0::/a", {"a/cpu.stat": stat, "cpu.stat": "usage_usec 9"})
        )
        == 2.5
    )


def cpus(
    root: Path, siblings: str, figures: dict[str, str] | None = None, quota: str = "max"
) -> Path:
    """A folder that stands for `/` of a machine whose cores' siblings are such as `0-1 0-1 2 3`, core by core.

    `figures` are files of each core, with a value for every core.
    """
    for n, text in enumerate(siblings.split()):
        folder = root / f"sys/devices/system/cpu/cpu{n}"
        contents = {"topology/thread_siblings_list": text}
        contents |= {name: values.split()[n] for name, values in (figures or {}).items()}
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content + "\n")
    return tree(root, "0::/", {"cpu.max": f"{quota} 100000"})


PAIRS = "0-1 0-1 2-3 2-3 4-5 4-5 6-7 6-7"  # four physical cores of two threads
SINGLE = "0 1 2 3 4 5 6 7"
HYBRID = "0-1 0-1 2-3 2-3 4 5 6 7"  # two performance cores of two threads, four efficiency cores
PERFORMANCE = "0-3"
LITTLE_FIRST = {"cpu_capacity": "397 397 397 397 1024 1024 1024 1024"}
FAVOURED = {
    "cpufreq/cpuinfo_max_freq": "5400000 5400000 5800000 5800000 5400000 5400000 5400000 5400000"
}
DENSE = {
    "cpufreq/cpuinfo_max_freq": "5100000 5100000 5100000 5100000 3300000 3300000 3300000 3300000"
}
CLUSTERS = {
    "cpufreq/cpuinfo_max_freq": "1000000 1000000 1000000 1000000 2400000 2400000 2400000 2400000"
}
ALL = tuple(range(8))
THREADS: list[tuple[str, int, str, dict[str, str], str | None, tuple[int, ...], str]] = [
    # why, threads, siblings, figures, performance cores of an Intel CPU, allowed cores, quota of CPU time in 0.1 s
    ("one thread for each physical core", 4, PAIRS, {}, None, ALL, "max"),
    ("cores without siblings are all physical", 8, SINGLE, {}, None, ALL, "max"),
    ("affinity: two threads of one core", 1, PAIRS, {}, None, (2, 3), "max"),
    ("two NUMA nodes (0-3, 4-7): both have memory bandwidth", 8, SINGLE, {}, None, ALL, "max"),
    ("a quota of 2.5 cores", 2, PAIRS, {}, None, ALL, "250000"),
    ("a quota of half a core", 1, PAIRS, {}, None, ALL, "50000"),
    ("Intel: performance cores only", 2, HYBRID, {}, PERFORMANCE, ALL, "max"),
    ("Intel: only slow ones are allowed", 3, HYBRID, {}, PERFORMANCE, (5, 6, 7), "max"),
    ("Arm: big cores only", 4, SINGLE, LITTLE_FIRST, None, ALL, "max"),
    ("Arm: only little cores are allowed", 3, SINGLE, LITTLE_FIRST, None, (0, 1, 2), "max"),
    ("Arm: an old kernel that tells frequencies only", 4, SINGLE, CLUSTERS, None, ALL, "max"),
    ("cores that clock a little higher make no second kind", 4, PAIRS, FAVOURED, None, ALL, "max"),
    ("cores above half the speed of the fastest help", 8, SINGLE, DENSE, None, ALL, "max"),
]


@pytest.mark.parametrize(
    ("why", "n", "siblings", "figures", "performance", "allowed", "quota"),
    THREADS,
    ids=[row[0] for row in THREADS],
)
def test_threads_by_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    n: int,
    siblings: str,
    figures: dict[str, str],
    performance: str | None,
    allowed: tuple[int, ...],
    quota: str,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    root = cpus(tmp_path, siblings, figures, quota)
    if performance:
        for kind, text in (("cpu_core", performance), ("cpu_atom", "4-7")):
            (root / "sys/devices" / kind).mkdir()
            (root / "sys/devices" / kind / "cpus").write_text(text + "\n")
    assert machine.default_threads(root) == n, why
