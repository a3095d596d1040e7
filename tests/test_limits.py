"""How much of a machine may be used, where control groups limit it: faked trees, and a group of this machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.runner import limits, machine

GB = 10**9
V2 = "30 20 0:26 {inside} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "3{n} 31 0:30 {inside} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}"


def tree(root: Path, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A folder that stands for `/`. `files` lie in sys/fs/cgroup."""
    contents = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    contents |= {
        "proc/self/cgroup": groups + "\n",
        "proc/self/mountinfo": "\n".join(["1 1 8:1 / / rw - ext4 x rw", *mounts]),
    }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture(autouse=True)
def a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing but the groups limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 64 if logical else 32)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 500 * GB, "total": 512 * GB}))


def test_a_model_that_was_just_read_is_not_demanded_twice(tmp_path: Path) -> None:
    stat = f"anon {GB}\nfile {6 * GB}\ninactive_file {6 * GB}\nactive_file 0"
    files = {"memory.max": str(8 * GB), "memory.current": str(7 * GB), "memory.stat": stat}
    assert limits.memory_available(tree(tmp_path, "0::/", [V2.format(inside="/")], files)) == 7 * GB


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
    root = tree(tmp_path, "0::/job.slice/step.scope", [V2.format(inside="/")], files)
    assert limits.memory_available(root) == 3 * GB
    assert (limits.n_cores_usable(root), limits.default_threads(root)) == (2.5, 2)


@pytest.mark.parametrize("inside", ["/", "/docker/abc"], ids=["all groups are mounted", "only the container's is"])
def test_version_1(tmp_path: Path, inside: str) -> None:
    below = "docker/abc/" if inside == "/" else ""
    files = {
        f"memory/{below}memory.limit_in_bytes": str(8 * GB),
        f"memory/{below}memory.usage_in_bytes": str(5 * GB),
        f"memory/{below}memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GB}",
        f"cpu/{below}cpu.cfs_quota_us": "150000",
        f"cpu/{below}cpu.cfs_period_us": "100000",
        f"cpu/{below}cpu.stat": "nr_periods 9\nnr_throttled 5\nthrottled_time 2500000000",
    }
    mounts = [V1.format(n=i, name=name, inside=inside) for i, name in enumerate(("cpu", "memory"))]
    root = tree(tmp_path, "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n0::/", mounts, files)
    assert limits.memory_available(root) == 5 * GB
    assert (limits.n_cores_usable(root), limits.default_threads(root)) == (1.5, 1)
    assert limits.throttled_s(root) == 2.5


def test_what_is_no_limit_limits_nothing(tmp_path: Path) -> None:
    version_1 = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": str(GB),
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }
    mounts = [V1.format(n=i, name=name, inside="/") for i, name in enumerate(("cpu", "memory"))]
    for root in (
        tree(tmp_path / "1", "4:memory:/\n2:cpu:/", mounts, version_1),
        tree(tmp_path / "2", "0::/", [V2.format(inside="/")], {"memory.max": "max", "memory.current": "5"}),
        tree(tmp_path / "3", "0::/../another", [V2.format(inside="/")], {"cpu.max": "max 100000"}),
        tmp_path / "no Linux",
    ):
        assert (limits.memory_left(root), limits.cpu_quota(root)) == (None, None)
        assert (limits.memory_available(root), limits.n_cores_usable(root)) == (500 * GB, 64)
        assert limits.default_threads(root) == 32


def test_a_group_outside_of_the_namespace_still_has_the_limits_that_can_be_seen(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/../another", [V2.format(inside="/")], {"cpu.max": "50000 100000"})
    assert (limits.n_cores_usable(root), limits.default_threads(root)) == (0.5, 1)


def cpus(root: Path, siblings: str, figures: dict[str, str] | None = None, quota: str = "max") -> Path:
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
    return tree(root, "0::/", [V2.format(inside="/")], {"cpu.max": f"{quota} 100000"})


PAIRS = "0-1 0-1 2-3 2-3 4-5 4-5 6-7 6-7"  # four physical cores of two threads
SINGLE = "0 1 2 3 4 5 6 7"
HYBRID = "0-1 0-1 2-3 2-3 4 5 6 7"  # two performance cores of two threads, four efficiency cores
PERFORMANCE = "0-3"
LITTLE_FIRST = {"cpu_capacity": "397 397 397 397 1024 1024 1024 1024"}
PRIME = {"cpu_capacity": "326 326 326 326 801 801 801 1024"}
FAVOURED = {"cpufreq/cpuinfo_max_freq": "5400000 5400000 5800000 5800000 5400000 5400000 5400000 5400000"}
DENSE = {"cpufreq/cpuinfo_max_freq": "5100000 5100000 5100000 5100000 3300000 3300000 3300000 3300000"}
CLUSTERS = {"cpufreq/cpuinfo_max_freq": "1000000 1000000 1000000 1000000 2400000 2400000 2400000 2400000"}
ALL = tuple(range(8))
THREADS: list[tuple[str, int, str, dict[str, str], str | None, tuple[int, ...], str]] = [
    # why, threads, siblings, figures, performance cores of an Intel CPU, allowed cores, quota of CPU time in 0.1 s
    ("one thread for each physical core", 4, PAIRS, {}, None, ALL, "max"),
    ("cores without siblings are all physical", 8, SINGLE, {}, None, ALL, "max"),
    ("affinity: two threads of one core", 1, PAIRS, {}, None, (2, 3), "max"),
    ("affinity: one thread of each core", 4, PAIRS, {}, None, (0, 2, 4, 6), "max"),
    ("two NUMA nodes (0-3, 4-7): both have memory bandwidth", 8, SINGLE, {}, None, ALL, "max"),
    ("the cores of one NUMA node, as numactl gives them", 4, SINGLE, {}, None, (4, 5, 6, 7), "max"),
    ("a quota of 2.5 cores", 2, PAIRS, {}, None, ALL, "250000"),
    ("a quota of half a core", 1, PAIRS, {}, None, ALL, "50000"),
    ("a quota above the physical cores", 4, PAIRS, {}, None, ALL, "700000"),
    ("Intel: performance cores only", 2, HYBRID, {}, PERFORMANCE, ALL, "max"),
    ("Intel: one performance core is allowed, and slow ones", 1, HYBRID, {}, PERFORMANCE, (2, 3, 4, 5), "max"),
    ("Intel: only slow ones are allowed", 3, HYBRID, {}, PERFORMANCE, (5, 6, 7), "max"),
    ("Intel: a quota below the performance cores", 1, HYBRID, {}, PERFORMANCE, ALL, "150000"),
    ("Arm: big cores only", 4, SINGLE, LITTLE_FIRST, None, ALL, "max"),
    ("Arm: two big cores are allowed", 2, SINGLE, LITTLE_FIRST, None, (0, 1, 2, 4, 7), "max"),
    ("Arm: only little cores are allowed", 3, SINGLE, LITTLE_FIRST, None, (0, 1, 2), "max"),
    ("Arm: one prime and three big cores", 4, SINGLE, PRIME, None, ALL, "max"),
    ("Arm: an old kernel that tells frequencies only", 4, SINGLE, CLUSTERS, None, ALL, "max"),
    ("cores that clock a little higher make no second kind", 4, PAIRS, FAVOURED, None, ALL, "max"),
    ("cores above half the speed of the fastest help", 8, SINGLE, DENSE, None, ALL, "max"),
]


@pytest.mark.parametrize(
    ("why", "n", "siblings", "figures", "performance", "allowed", "quota"), THREADS, ids=[row[0] for row in THREADS]
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
    assert limits.default_threads(root) == n, why


def test_what_a_system_does_not_tell_is_what_psutil_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert limits.default_threads(tmp_path) == 32
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: None)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert limits.default_threads(tmp_path) == 1
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(limits, "sysctl", {"hw.perflevel0.physicalcpu": "6"}.get)
    assert limits.default_threads(tmp_path) == 6


def test_the_quota_is_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, expected in ((1.5, (1, 1.5)), (0.5, (1, 0.5)), (8.0, (8, 8.0)), (None, (64, None)), (99.0, (64, None))):
        monkeypatch.setattr(limits, "cpu_quota", lambda root=None, quota=quota: quota)
        here = machine.describe()
        assert (here.n_cores_usable, here.cpu_quota) == expected
        assert machine.cores(here) == (quota if expected[1] else 64)


def limited_group(controller: str, files: dict[str, str]) -> Path:
    """A new group of this machine with the first of `files` that it has written; skips where there can be none."""
    for _, _, mount_point in limits._mounts(controller, limits.ROOT):
        group = mount_point / f"mini-lab-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            names = [name for name in files if (group / name).exists()]
            for name in names[:1]:
                (group / name).write_text(files[name])
                return group
        except OSError:
            pass
        group.rmdir()
    pytest.skip(f"this machine lets no group with a limit of {controller} be made")


@contextmanager
def in_group(controller: str, files: dict[str, str]) -> Iterator[Path]:
    group = limited_group(controller, files)
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:  # its process is still being taken down
                time.sleep(0.05)


def answer_from(group: Path, code: str, *arguments: str) -> Any:
    """What Python code prints as JSON that runs in the group."""
    enter = "import json, os, pathlib, sys; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
    command = [sys.executable, "-c", enter + code, str(group), *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
def test_a_real_group_with_a_quota() -> None:
    code = "from lab.runner import limits; print(json.dumps([limits.n_cores_usable(), limits.default_threads()]))"
    with in_group("cpu", {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"}) as group:
        assert answer_from(group, code) == [0.5, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
def test_a_real_group_with_a_limit_of_memory(tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], check=True, capture_output=True, text=True).stdout
    if kind.strip() in ("tmpfs", "ramfs"):
        pytest.skip("the folder for temporary files is itself memory")
    code = """
from lab.runner import limits
limits.memory_available()
before = limits.memory_left()
with open(sys.argv[2], "wb") as file:
    file.write(bytes(64_000_000))
    os.fsync(file.fileno())
print(json.dumps([before, limits.memory_left()]))
"""
    limit = 400_000_000
    with in_group("memory", dict.fromkeys(("memory.max", "memory.limit_in_bytes"), str(limit))) as group:
        before, after = answer_from(group, code, str(tmp_path / "file"))
    assert limit / 2 < before < limit
    assert abs(after - before) < 32_000_000  # the 64 MB of the file are cache
