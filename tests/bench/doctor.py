"""Does `lab doctor` name what is wrong, and nothing where nothing is?

    python3 -m uv run python -m tests.bench.doctor faults [NAME ...]   # all 12, or these; some 90 s each
    python3 -m uv run python -m tests.bench.doctor healthy N           # N trials of the machine as it is
    python3 -m uv run python -m tests.bench.doctor builds              # compile the two bad libraries first (10 min)

A planted fault is told rightly where the check that belongs to it is broken (or worth a look, where nothing can be
changed to show it, or where it is a choice), and no other check is broken. Wanted: 11 of 12; and of 40 healthy trials
none with anything broken. Limits, throttles and neighbours are real: control groups of Linux (version 1, or 2 with its
controllers delegated; as root) and a process that burns a core. Of swap and of the battery the readings are faked: a
machine that others use shall not be made to swap. Where this machine lets no group be made the trial says so and fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.why.checks import BROKEN, FINE, LOOK, UNKNOWN
from tests.bench import llama_bench

CGROUPS = Path("/sys/fs/cgroup")
BURN = "while True: pass"
GENERIC = {"CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "OFF"} | dict.fromkeys(
    ("GGML_AVX", "GGML_AVX2", "GGML_FMA", "GGML_F16C", "GGML_BMI2"), "OFF"
)

EXAMINE = """
import dataclasses, json, sys
from pathlib import Path
from lab.runner import limits
from lab.why import checkup
asked = json.loads(sys.argv[1])
root = Path(asked.pop("root", "/"))
swap = asked.pop("swap", None)
if swap:
    limits.swap = lambda: tuple(swap)
asked.setdefault("model", "smollm2-135m")
print(json.dumps(dataclasses.asdict(checkup.examine(asked, lambda status: None, root))))
"""
"""What `lab doctor --json` does, with readings that may be faked."""


def examine(asked: dict[str, Any], groups: dict[str, Path] | None = None) -> dict[str, Any]:
    """The checkup of a fresh process, which is moved into control groups before it begins."""

    def join() -> None:
        for folder in (groups or {}).values():
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-c", EXAMINE, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=join)
    if done.returncode:
        raise SystemExit(f"the doctor failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def group(controller: str, limits: dict[str, str]) -> Iterator[dict[str, Path]]:
    """A control group (version 1) below our own, with these limits."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if controller in names.split(",")), None)
    if own is None:
        raise SystemExit(f"this machine has no control groups of version 1 for {controller}")
    folder = CGROUPS / controller / own.lstrip("/") / f"lab-doctor-{os.getpid()}"
    folder.mkdir()
    try:
        for name, value in limits.items():
            (folder / name).write_text(value)
        yield {controller: folder}
    finally:
        folder.rmdir()


def library(name: str, options: dict[str, str]) -> Path:
    """A folder with the installed libraries, but for a libggml-cpu that was compiled with these options, once."""
    home = llama_bench.source().parents[2] / f"doctor-{name}"
    build, folder = home / "build", home / "lib"
    if not folder.exists():
        defined = [f"-D{key}={value}" for key, value in options.items()]
        only = [f"-DLLAMA_BUILD_{what}=OFF" for what in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")]
        shared = ["-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]
        make = ["cmake", "-S", str(llama_bench.source()), "-B", str(build), *only, *shared, *defined]
        subprocess.run(make, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "ggml-cpu", "-j2"], check=True)
        spec = find_spec("llama_cpp")
        assert spec and spec.origin
        shutil.copytree(Path(spec.origin).parent / "lib", folder)
        (built,) = (path for path in build.glob("bin/libggml-cpu.so*") if not path.is_symlink())
        for old in folder.glob("libggml-cpu.so*"):
            shutil.copy(built, old)
    return folder


def too_many_threads() -> dict[str, Any]:
    return examine({"threads": 4 * (os.cpu_count() or 1)})


def one_thread() -> dict[str, Any]:
    return examine({"threads": 1})


def quota_of_half_a_core() -> dict[str, Any]:
    with group("cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}) as groups:
        return examine({}, groups)


def build_without_avx2() -> dict[str, Any]:
    return examine({"lib": str(library("noavx2", GENERIC))})


def debug_build() -> dict[str, Any]:
    return examine({"lib": str(library("debug", {"CMAKE_BUILD_TYPE": "Debug"}))})


def a_neighbour_on_a_core() -> dict[str, Any]:
    neighbour = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        return examine({})
    finally:
        neighbour.kill()
        neighbour.wait()


def mmap_on_a_slow_disk() -> dict[str, Any]:
    """A copy of the model, on whose disk at most 10 MB/s may be read: a limit of the block device."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        copy = Path(name) / "model.gguf"
        shutil.copy(catalog.embedded_path(), copy)
        os.sync()
        device = copy.stat().st_dev
        throttle = f"{os.major(device)}:{os.minor(device)} {10 * 10**6}"
        with group("blkio", {"blkio.throttle.read_bps_device": throttle}) as groups:
            return examine({"model": str(copy), "mmap": True}, groups)


def memory_almost_full() -> dict[str, Any]:
    with group("memory", {"memory.limit_in_bytes": str(260 * 2**20)}) as groups:
        return examine({}, groups)


def swap_in_use() -> dict[str, Any]:
    return examine({"swap": [6 * 10**9, 8 * 10**9, 0]})


def without_repacking() -> dict[str, Any]:
    return examine({"model": "smollm2-135m:Q4_0", "repack": False})


def a_slow_quantization() -> dict[str, Any]:
    return examine({"model": "smollm2-135m"})  # Q4_1


def on_battery() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        for file, text in (
            ("sys/class/power_supply/BAT0/status", "Discharging"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "acpi-cpufreq"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave"),
        ):
            path = Path(name) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return examine({"root": name})


FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], str, tuple[str, ...]]] = {
    "threads": (too_many_threads, "threads", (BROKEN,)),
    "one-thread": (one_thread, "threads", (BROKEN,)),
    "quota": (quota_of_half_a_core, "limits", (BROKEN,)),
    "noavx2": (build_without_avx2, "build", (BROKEN,)),
    "debug": (debug_build, "build", (BROKEN,)),
    "neighbour": (a_neighbour_on_a_core, "other programs", (LOOK,)),
    "disk": (mmap_on_a_slow_disk, "disk", (LOOK,)),
    "memory": (memory_almost_full, "memory", (LOOK,)),
    "swap": (swap_in_use, "memory", (LOOK,)),
    "no-repack": (without_repacking, "repacking", (BROKEN,)),
    "quantization": (a_slow_quantization, "quantization", (LOOK,)),
    "battery": (on_battery, "power", (LOOK,)),
}
"""The fault, the check that belongs to it, and its verdicts that are right."""


def told(found: dict[str, Any]) -> str:
    """The checks that are not fine, each with its verdict and the ratios that were measured."""
    words = []
    for check in (check for check in found["checks"] if check["verdict"] not in (FINE, UNKNOWN)):
        ratios = (f"{what} {e['ratio']['estimate']:.2f}" for what, e in check["effects"].items())
        words.append(f"{check['name']}: {check['verdict']} ({', '.join(ratios) or check['figure']})")
    return "; ".join(words) or "all fine"


def faults(names: list[str]) -> None:
    n_right = 0
    for name in names or list(FAULTS):
        plant, belongs, right = FAULTS[name]
        found = plant()
        verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
        ends = {"engine"} if name == "memory" else set()  # where memory is too short, the engine does not run
        others = [one for one, verdict in verdicts.items() if verdict == BROKEN and one not in {belongs, *ends}]
        is_right = verdicts.get(belongs) in right and not others
        n_right += is_right
        print(f"{name:12} {'right' if is_right else 'WRONG'} {found['seconds']:4.0f} s  {told(found)}", flush=True)
    print(f"{n_right} of {len(names or FAULTS)} faults told rightly; 11 of 12 wanted")


def healthy(n_trials: int) -> None:
    n_broken = 0
    for number in range(n_trials):
        found = examine({})
        n_broken += any(check["verdict"] == BROKEN for check in found["checks"])
        print(f"healthy {number + 1:2} {found['seconds']:4.0f} s  {told(found)}", flush=True)
    print(f"{n_broken} of {n_trials} healthy trials with something broken; 0 of 40 wanted")


def main() -> None:
    what, *names = sys.argv[1:] or ["faults"]
    with Worker() as worker:  # a model that has to be made is made before the clock runs
        make_plan(worker, [1], 1, 1, "smollm2-135m:Q4_0")
    if what == "healthy":
        healthy(int(names[0]) if names else 40)
    elif what == "builds":
        print(library("noavx2", GENERIC), library("debug", {"CMAKE_BUILD_TYPE": "Debug"}))
    else:
        faults(names)


if __name__ == "__main__":
    main()
