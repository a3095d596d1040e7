"""`lab doctor`: what each verdict needs, on made-up readings and times, and a whole checkup with planted faults."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import disturbances
from lab.core.noise import Noise, NoiseReading, NoiseSamples
from lab.core.record import Device, Rate, Settings
from lab.core.script import Script
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.process.wire import Outcome, Probe, Progress
from lab.runner import builds, limits, machine, noise_watch
from lab.why import checks, checkup, plain_read
from lab.why.checks import BROKEN, FINE, LOOK, UNKNOWN, Change, Check, Effect
from tests.conftest import MACHINE, FakeWorker, died, run_lab, steps_of

CHANGE = Change("threads", "8", "With 2 instead of 8", "lab measure --threads 2", {})


def gains(low: float, high: float, noise: float = 1.02) -> Effect:
    return Effect(Ratio((low * high) ** 0.5, low, high), noise)


NOTHING, SOME, MUCH, LOSS = gains(0.97, 1.04), gains(1.15, 1.3), gains(1.8, 2.2), gains(0.5, 0.6)


def test_an_effect_is_the_ratio_of_pairs_and_its_noise_that_of_equal_measurements() -> None:
    found = checks.effect([[2.0, 2.2], [2.0, 2.0], [2.0, 2.0]], [[1.0, 1.0], [1.0, 1.0], [1.0, 1.25]])
    assert found == Effect(Ratio(2.0, 1.6, 2.2), 1.25)
    assert checks.effect([[2.0, 2.0]], [[1.0, 1.0]]) is None  # too few pairs for an interval
    assert checks.effect([[2.0]] * 6, [[1.0]] * 5) is None


def test_both_ways_are_measured_in_turns() -> None:
    order: list[str] = []

    def measure(name: str) -> Callable[[], float]:
        def measured() -> float:
            order.append(name)
            return {"A": 3.0, "B": 1.0}[name]

        return measured

    found = checkup.in_turns(measure("A"), measure("B"))
    assert "".join(order) == "ABBA" * 3
    assert found == Effect(Ratio(3.0, 3.0, 3.0), 1.0)


@pytest.mark.parametrize(
    ("effects", "verdict"),
    [
        ({}, UNKNOWN),
        ({"prefill": NOTHING, "decode": NOTHING}, FINE),
        ({"prefill": NOTHING, "decode": SOME}, LOOK),
        ({"prefill": NOTHING, "decode": MUCH}, BROKEN),
        ({"prefill": LOSS, "decode": MUCH}, LOOK),  # a trade-off, such as flash attention on some CPUs
        ({"prefill": LOSS, "decode": LOSS}, FINE),
        ({"decode": gains(1.8, 9.0, noise=2.5)}, FINE),  # equal measurements differ by more
        ({"decode": gains(0.9, 9.0)}, FINE),
    ],
)
def test_a_setting_is_broken_where_another_one_is_sure_to_gain_much(effects: dict[str, Effect], verdict: str) -> None:
    check = checks.of_change(CHANGE, effects)
    assert check.verdict == verdict
    assert (check.command is not None) == (verdict in (LOOK, BROKEN))


@pytest.mark.parametrize(
    ("n", "best", "is_busy", "effect", "verdict"),
    [
        (8, 2, False, MUCH, BROKEN),
        (8, 2, True, MUCH, BROKEN),
        (8, 2, False, NOTHING, LOOK),
        (1, 2, False, MUCH, BROKEN),
        (1, 2, False, NOTHING, FINE),
        (2, 2, False, NOTHING, FINE),
        (2, 2, False, MUCH, LOOK),
        (2, 2, True, MUCH, FINE),  # the doing of other programs
    ],
)
def test_threads(n: int, best: int, is_busy: bool, effect: Effect, verdict: str) -> None:
    assert checks.of_threads(CHANGE, {"decode": effect}, n, best, is_busy).verdict == verdict


def test_other_programs_are_never_called_broken() -> None:
    assert checks.of_others(None, [], None).verdict == UNKNOWN
    assert checks.of_others(0.05, [], None).verdict == FINE
    busy = ["another process used 0.9 of a core"]
    assert checks.of_others(0.9, busy, None).verdict == LOOK
    fewer = checks.of_threads(CHANGE, {"decode": MUCH}, 2, 2, True)
    shown = checks.of_others(0.9, busy, fewer)
    assert shown.verdict == LOOK and shown.effects == {"decode": MUCH} and "decode 1.99x as fast" in shown.words


@pytest.mark.parametrize(
    ("quota", "n_waits", "steady", "verdict"),
    [
        (None, 0, NOTHING, FINE),
        (None, 0, MUCH, LOOK),  # something halts it that the system does not name
        (0.5, 0, MUCH, BROKEN),
        (0.9, 0, SOME, LOOK),
        (0.5, 0, NOTHING, LOOK),  # other programs hide what it does
        (4.0, 0, NOTHING, FINE),
        (1.5, 3, NOTHING, LOOK),
        (None, 0, None, FINE),
    ],
)
def test_limits(quota: float | None, n_waits: int, steady: Effect | None, verdict: str) -> None:
    assert checks.of_limits(quota, 10**9, n_waits, steady).verdict == verdict


@pytest.mark.parametrize(
    ("unused", "info", "product", "verdict", "words"),
    [
        (set(), "OPENMP = 1", gains(0.6, 0.7), FINE, ""),
        (set(), "OPENMP = 1", gains(2.0, 3.0), FINE, ""),  # another BLAS, of another quality
        (set(), "OPENMP = 1", gains(60, 90), BROKEN, "without optimisation"),
        ({"AVX2", "FMA"}, "OPENMP = 1", gains(6, 14), BROKEN, "leaves out AVX2, FMA"),
        ({"AVX2", "FMA"}, "OPENMP = 1", gains(60, 90), BROKEN, "without optimisation"),
        ({"AMX_INT8"}, "OPENMP = 1", gains(0.6, 0.7), LOOK, "AMX_INT8"),
        (set(), "", gains(0.6, 0.7), LOOK, "OpenMP"),
        (None, "OPENMP = 1", None, FINE, ""),
    ],
)
def test_build(
    unused: set[str] | None,
    info: str,
    product: Effect | None,
    verdict: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(builds, "unused", lambda text: unused)
    check = checks.of_build(info, product)
    assert (check.verdict, words in check.words) == (verdict, True)


def gpu(kind: str = "gpu", description: str = "NVIDIA H200") -> Device:
    return Device("CUDA0", description, kind, None)


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (checks.of_power([], None), FINE),
        (checks.of_power(None, None), UNKNOWN),
        (checks.of_power(None, "mains"), FINE),
        (checks.of_power(None, "battery"), LOOK),
        (checks.of_power(["the governor is powersave"], None), LOOK),
        (checks.of_clocks(None, None), UNKNOWN),
        (checks.of_clocks(None, 1.02), FINE),
        (checks.of_clocks(None, 1.3), LOOK),
        (checks.of_clocks((4.4, 4.7), 1.0), FINE),
        (checks.of_clocks((0.8, 4.7), 1.0), LOOK),
        (checks.of_bandwidth({1: 14.0, 2: 25.0}, None), UNKNOWN),
        (checks.of_bandwidth({1: 14.0, 2: 25.0}, 38.4), FINE),
        (checks.of_bandwidth({1: 14.0, 2: 25.0}, 76.8), LOOK),
        (checks.of_memory(10**10, 10**9, 0, (0, 0), 16 * 10**9), FINE),
        (checks.of_memory(10**9, 10**9, 0, (0, 0), 16 * 10**9), LOOK),
        (checks.of_memory(10**10, 10**9, 2, (0, 0), 16 * 10**9), LOOK),
        (checks.of_memory(10**10, 10**9, 0, (10**9, 0), 16 * 10**9), FINE),  # old and never asked for
        (checks.of_memory(10**10, 10**9, 0, (4 * 10**9, 0), 16 * 10**9), LOOK),
        (checks.of_memory(10**10, 10**9, 0, (10**9, 10**8), 16 * 10**9), LOOK),
        (checks.of_disk(10**8, None, 0.0), UNKNOWN),
        (checks.of_disk(10**8, NOTHING, 5.0), UNKNOWN),  # it was not read from the disk
        (checks.of_disk(10**8, MUCH, 1.5), FINE),
        (checks.of_disk(10**8, MUCH, 0.05), LOOK),
        (checks.of_disk(10**6, MUCH, 0.05), FINE),  # nobody waits for so small a file
        (checks.of_disk(10**11, MUCH, 1.5), LOOK),  # 67 s
        (checks.of_gpu([], MACHINE), FINE),
        (checks.of_gpu(["NVIDIA 10de:2684"], MACHINE), LOOK),
        (checks.of_gpu(["NVIDIA 10de:2684"], dataclasses.replace(MACHINE, devices=(gpu(),))), FINE),
        (checks.of_gpu(["AMD 1002:744c"], dataclasses.replace(MACHINE, devices=(gpu("gpu", "llvmpipe"),))), LOOK),
    ],
)
def test_what_is_only_read_is_worth_a_look_at_most(check: Check, verdict: str) -> None:
    assert check.verdict == verdict
    assert (check.command is not None) == (verdict == LOOK)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


CPU = "sys/devices/system/cpu/cpu0/cpufreq"


@pytest.mark.parametrize(
    ("files", "savers"),
    [
        ({}, None),
        (
            {f"{CPU}/scaling_driver": "acpi-cpufreq", f"{CPU}/scaling_governor": "powersave"},
            ["the governor is powersave"],
        ),
        ({f"{CPU}/scaling_driver": "intel_pstate", f"{CPU}/scaling_governor": "powersave"}, []),
        ({f"{CPU}/energy_performance_preference": "power"}, ["the energy preference is power"]),
        ({"sys/firmware/acpi/platform_profile": "low-power"}, ["the platform profile is low-power"]),
        ({"sys/class/power_supply/BAT0/status": "Discharging"}, ["the machine runs on battery"]),
        ({"sys/class/power_supply/BAT0/status": "Charging"}, []),
    ],
)
def test_what_saves_power(files: dict[str, str], savers: list[str] | None, tmp_path: Path) -> None:
    assert limits.power_savers(tree(tmp_path, files)) == savers


def test_the_clock_and_the_gpus_of_a_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert limits.clock_ghz(tmp_path) is None and limits.gpus(tmp_path) == []
    pci = "sys/bus/pci/devices/0000:0"
    files = {f"{CPU}/scaling_cur_freq": "2100000", f"{CPU}/cpuinfo_max_freq": "4700000"}
    files |= {f"{pci}1:00.0/class": "0x030000", f"{pci}1:00.0/vendor": "0x10de", f"{pci}1:00.0/device": "0x2684"}
    files |= {f"{pci}2:00.0/class": "0x030000", f"{pci}2:00.0/vendor": "0x1a03", f"{pci}2:00.0/device": "0x2000"}
    files |= {f"{pci}3:00.0/class": "0x020000", f"{pci}3:00.0/vendor": "0x8086", f"{pci}3:00.0/device": "0x1533"}
    tree(tmp_path, files)
    assert limits.clock_ghz(tmp_path) == (2.1, 4.7)
    assert limits.gpus(tmp_path) == ["NVIDIA 10de:2684"]


DMIDECODE = """
Handle 0x0011, DMI type 17, 92 bytes
Memory Device
\tTotal Width: 72 bits
\tData Width: 64 bits
\tSize: 16 GB
\tSpeed: 5600 MT/s
\tConfigured Memory Speed: 4800 MT/s

Memory Device
\tData Width: Unknown
\tSize: No Module Installed
\tConfigured Memory Speed: Unknown
"""


@pytest.mark.parametrize(("text", "expected"), [(DMIDECODE, 38.4), (DMIDECODE * 2, 76.8), (None, None), ("none", None)])
def test_what_the_memory_modules_give(text: str | None, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "answer", lambda *command: text)
    assert limits.modules_gbps() == expected


def test_pieces_of_a_file_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2**16)
    assert plain_read.piece_s(path, 0, from_disk=True) > 0 and plain_read.piece_s(path, 0, from_disk=False) > 0
    assert 0 < plain_read.flop_ns(0.001) < float("inf")
    wall_s, cpu_s = plain_read.work_s(0.001)
    assert wall_s > 0 and cpu_s >= 0


class Planted(FakeWorker):
    """A fake engine whose times depend on its settings, as a fault makes them."""

    slow: Callable[[Settings], float] = staticmethod(lambda settings: 1.0)
    problem: LabError | None = None

    def new_context(self, asked: Settings) -> Settings:
        self.asked = asked
        return super().new_context(asked)

    def run(self, script: Script, watch: Callable[[Progress], None]) -> Outcome:
        if self.problem:
            raise self.problem
        factor = type(self).slow(self.asked)
        outcome = super().run(script, watch)
        return dataclasses.replace(outcome, steps=steps_of(script, factor, 10 * factor))

    def probe(self, probe: Probe) -> Rate:
        size = probe.rows, probe.columns, probe.n_tokens, probe.n_threads
        return Rate(probe.op, probe.type, "CPU", *size, probe.n_bytes, 10**6, (10**6,))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, simulated: None, mini: Path) -> type[Planted]:
    """Every measurement but the engine's is exact and healthy; `lab doctor` runs on the class that comes back."""
    chosen = type("Chosen", (Planted,), {})
    monkeypatch.setattr(checkup, "Worker", chosen)
    monkeypatch.setattr(plain_read, "work_s", lambda seconds: (1.0, 1.0))
    monkeypatch.setattr(plain_read, "burst_s", lambda: 1.0)
    monkeypatch.setattr(plain_read, "flop_ns", lambda seconds: 1.0)
    monkeypatch.setattr(plain_read, "piece_s", lambda path, at, from_disk: 4e-6 if from_disk else 1e-6)
    read = Rate("read", "I64", "numpy", 1, 1, 1, 1, 10**9, 0, (10**8,))
    monkeypatch.setattr(plain_read, "read_rate", lambda n, n_bytes=None: read)
    monkeypatch.setattr(limits, "default_threads", lambda root=None: 2)
    monkeypatch.setattr(limits, "memory_available", lambda root=None: 10**10)
    monkeypatch.setattr(limits, "cpu_quota", lambda root=None: None)
    monkeypatch.setattr(limits, "swap", lambda: (0, 0, 0))
    monkeypatch.setattr(builds, "unused", lambda text: frozenset())
    monkeypatch.setattr(limits, "gpus", lambda root: [])
    monkeypatch.setattr(machine, "describe", lambda *args: MACHINE)
    return chosen


def verdicts(path: Path, **asked: Any) -> dict[str, str]:
    found = checkup.examine({"model": str(path), **asked}, lambda status: None)
    return {check.name: check.verdict for check in found.checks if check.verdict in (LOOK, BROKEN)}


def test_a_healthy_machine_has_nothing_broken(planted: type[Planted], mini: Path) -> None:
    assert verdicts(mini) == {"build": LOOK}  # the fake build does not say OPENMP


FAULTS: list[tuple[dict[str, Any], Callable[[Settings], float], str]] = [
    ({"threads": 8}, lambda s: 10.0 if s.n_threads > 2 else 1.0, "threads"),
    ({"threads": 1}, lambda s: 2.0 / min(2, s.n_threads), "threads"),
    ({"flash_attn": "on"}, lambda s: 2.0 if s.flash_attn == "on" else 1.0, "flash attention"),
    ({"repack": False}, lambda s: 3.0 if s.repack is False else 1.0, "repacking"),
]


@pytest.mark.parametrize(("asked", "slow", "name"), FAULTS, ids=["8 threads", "1 thread", "flash", "no repack"])
def test_a_planted_setting_is_named_and_no_other(
    asked: dict[str, Any], slow: Callable[[Settings], float], name: str, planted: type[Planted], mini: Path
) -> None:
    planted.slow = staticmethod(slow)
    assert verdicts(mini, **asked) == {"build": LOOK, name: BROKEN}


def test_an_engine_that_dies_is_the_first_check_and_the_others_are_made(planted: type[Planted], mini: Path) -> None:
    planted.problem = died()
    found = checkup.examine({"model": str(mini)}, lambda status: None)
    assert (found.checks[0].name, found.checks[0].verdict) == ("engine", BROKEN)
    assert "SIGSEGV" in found.checks[0].words
    assert {"limits", "power", "bandwidth", "GPU"} <= {check.name for check in found.checks}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"threads": 0}, "--threads 0 is not possible"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"lib": "/no/such/folder"}, "no such folder"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_measured(
    asked: dict[str, Any], words: str, planted: type[Planted], mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_read, "work_s", lambda seconds: pytest.fail("something was measured"))
    with pytest.raises(LabError, match=words):
        checkup.examine({"model": str(mini), **asked}, lambda status: None)


def test_an_engine_that_cannot_plan_is_the_first_check(
    planted: type[Planted], mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(worker: object) -> None:
        raise LabError("llama.cpp crashed at its start.", "Build it here.")

    monkeypatch.setattr(builds, "of_worker", ends)
    found = checkup.examine({"model": str(mini)}, lambda status: None)
    assert (found.checks[0].name, found.checks[0].verdict) == ("engine", BROKEN)
    assert "crashed at its start" in found.checks[0].words


def test_a_neighbour_is_named_and_not_the_threads(
    planted: type[Planted], mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        def __init__(self, *_: object) -> None: ...

        def sample(self) -> None: ...

        def finish(self, *_: object) -> Noise:
            nothing = NoiseReading(None, None, None, None, None, None)
            return Noise(nothing, nothing, NoiseSamples((1000,), others_ms=(900,)))

    monkeypatch.setattr(noise_watch, "NoiseWatch", Busy)
    monkeypatch.setattr(disturbances, "n_cores", lambda record: 2)
    planted.slow = staticmethod(lambda settings: 10.0 if settings.n_threads == 2 else 1.0)
    assert verdicts(mini) == {"build": LOOK, "other programs": LOOK}


def test_the_worst_is_shown_first_and_the_exit_status_tells(planted: type[Planted], mini: Path) -> None:
    planted.slow = staticmethod(FAULTS[0][1])
    status, out, _ = run_lab("doctor", "-m", mini, "-t", "8")
    assert status == 1
    table, words = out.split("\n\n", 2)[1:]
    assert words.startswith("threads (broken): With 2 instead of 8: prefill 10.0x as fast (10.0-10.0)")
    assert "lab measure --threads 2" in words
    assert max(map(len, table.splitlines())) <= 80
    status, out, _ = run_lab("doctor", "-m", mini, "--json")
    assert status == 0
    assert {check["verdict"] for check in json.loads(out)["checks"]} <= {FINE, LOOK, UNKNOWN}


def test_a_change_that_fails_is_not_known_and_what_fails_as_it_is_ends_the_trial(
    planted: type[Planted], mini: Path
) -> None:
    def refuse(settings: Settings) -> float:
        if settings.flash_attn == refused:
            raise LabError("No flash attention here.")
        return 1.0

    planted.slow = staticmethod(refuse)
    refused = "off"
    found = checkup.examine({"model": str(mini)}, lambda status: None)
    checks = {check.name: check for check in found.checks}
    assert checks["engine"].verdict == FINE and checks["flash attention"].verdict == UNKNOWN
    assert "No flash attention here" in checks["flash attention"].words
    refused = "auto"
    assert checkup.examine({"model": str(mini)}, lambda status: None).checks[0].verdict == BROKEN


def test_the_real_engine_is_checked(mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "N_BLOCKS", 1)  # too few for a verdict
    found = checkup.examine({"model": str(mini), "threads": 1}, lambda status: None)
    checks = {check.name: check for check in found.checks}
    assert checks["engine"].verdict == FINE and found.settings and found.settings.n_threads == 1
    assert re.fullmatch(r"prefill [\d,]+, decode [\d,]+ tokens/s", checks["engine"].figure or "")
    assert checks["flash attention"].verdict == UNKNOWN
    assert {"build", "disk", "limits", "power", "clocks", "bandwidth", "memory", "GPU"} <= checks.keys()
