"""`lab doctor`: what each verdict needs, on made-up readings and times, and a whole checkup with planted faults."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.core.record import Device, Noise, NoiseReading, NoiseSamples, Settings
from lab.core.script import Script
from lab.errors import LabError
from lab.features import doctor as checkup
from lab.features.doctor import BROKEN, FINE, LOOK, UNKNOWN
from lab.process.wire import Outcome, Progress
from lab.runner import builds, disturbances, machine, noise_watch
from lab.runner.plan import make_plan
from tests.conftest import MACHINE, FakeWorker, died, make_record, make_run, run_lab, steps_of

BUSY = "another process used 0.9 of a core"
CARD, LAVAPIPE = (Device("CUDA0", name, "gpu", None) for name in ("NVIDIA H200", "llvmpipe"))


@pytest.mark.parametrize(
    ("name", "verdict", "planted"),
    [
        ("power", UNKNOWN, {}),
        ("power", FINE, {"power_savers": []}),
        ("power", LOOK, {"power": "battery"}),
        ("power", LOOK, {"power_savers": ["the governor is powersave"]}),
        ("throttling", FINE, {"slower": 1.02}),
        ("throttling", LOOK, {"slower": 1.3}),
        ("throttling", FINE, {"cpu_quota": 4.0}),
        ("throttling", LOOK, {"cpu_quota": 0.5}),
        ("throttling", LOOK, {"cpu_quota": 1.5, "disturbed": disturbances.QUOTA}),
        ("other programs", UNKNOWN, {}),
        ("other programs", LOOK, {"_others": [BUSY]}),
        ("memory", FINE, {"swap_used": 10**9}),  # old and never asked for
        ("memory", LOOK, {"memory_available": 10**6}),
        ("memory", LOOK, {"disturbed": disturbances.MEMORY}),
        ("memory", LOOK, {"swap_used": 4 * 10**9}),
        ("GPU", FINE, {}),
        ("GPU", LOOK, {"gpus": ["NVIDIA 10de:2684"]}),
        ("GPU", FINE, {"gpus": ["NVIDIA 10de:2684"], "devices": (CARD,)}),
        ("GPU", LOOK, {"gpus": ["AMD 1002:744c"], "devices": (LAVAPIPE,)}),
    ],
)
def test_what_is_only_read_is_worth_a_look_at_most(
    name: str,
    verdict: str,
    planted: dict[str, Any],
    fake_worker: FakeWorker,
    mini: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts: dict[str, Any] = dict.fromkeys(("power_savers", "cpu_quota"))
    facts |= {"_others": [], "swap_used": 0, "gpus": [], "memory_available": 10**10, **planted}
    for fact in ("power_savers", "cpu_quota", "_others", "swap_used", "gpus", "memory_available"):
        where = machine if hasattr(machine, fact) else checkup
        monkeypatch.setattr(where, fact, lambda *_, fact=fact: facts[fact])
    own = {planted["disturbed"]: 1.0} if "disturbed" in planted else {}
    monkeypatch.setattr(disturbances, "disturbances", lambda record: own)
    plan = make_plan(fake_worker, [8], 4, model=str(mini))  # type: ignore[arg-type]
    here = dataclasses.replace(
        MACHINE,
        ram_bytes=16 * 10**9,
        power=planted.get("power"),
        devices=planted.get("devices", MACHINE.devices),
    )
    runs = [make_record(make_run())]
    checks = {
        check.name: check
        for check in checkup.readings(here, plan, runs, planted.get("slower"), Path("/"))
    }
    assert checks[name].verdict == verdict
    assert all((check.command is not None) == (check.verdict == LOOK) for check in checks.values())


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
        return dataclasses.replace(
            super().run(script, watch), steps=steps_of(script, factor, 10 * factor)
        )


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, simulated: None, mini: Path) -> type[Planted]:
    """Every measurement but the engine's is exact and healthy; `lab doctor` runs on the class that comes back."""
    chosen = type("Chosen", (Planted,), {})
    monkeypatch.setattr(checkup, "Worker", chosen)
    monkeypatch.setattr(checkup, "work_s", lambda seconds: 1.0)
    monkeypatch.setattr(machine, "default_threads", lambda root=None: 2)
    monkeypatch.setattr(machine, "memory_available", lambda root=None: 10**10)
    monkeypatch.setattr(machine, "cpu_quota", lambda root=None: None)
    monkeypatch.setattr(checkup, "swap_used", lambda: 0)
    monkeypatch.setattr(checkup, "gpus", lambda root: [])
    monkeypatch.setattr(builds, "mismatch", lambda text: None)
    monkeypatch.setattr(machine, "describe", lambda *args: MACHINE)
    return chosen


def verdicts(path: Path, **asked: Any) -> dict[str, str]:
    found = checkup.examine({"model": str(path), **asked}, lambda status: None)
    return {check.name: check.verdict for check in found.checks if check.verdict in (LOOK, BROKEN)}


@pytest.mark.parametrize(
    ("asked", "slow", "expected"),
    [
        ({}, lambda s: 1.0, {}),
        ({"threads": 8}, lambda s: 10.0 if s.n_threads > 2 else 1.0, {"threads": BROKEN}),
        ({"threads": 1}, lambda s: 2.0 / min(2, s.n_threads), {"threads": BROKEN}),
    ],
)
def test_planted_threads_are_named_and_nothing_else(
    asked: dict[str, Any],
    slow: Callable[[Settings], float],
    expected: dict[str, str],
    planted: type[Planted],
    mini: Path,
) -> None:
    planted.slow = staticmethod(slow)
    assert verdicts(mini, **asked) == expected


def test_an_engine_that_fails_is_the_first_check_and_the_others_are_made(
    planted: type[Planted], mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(worker: object) -> None:
        raise LabError("llama.cpp crashed at its start.", "Build it here.")

    planted.problem = died()
    for words in ("SIGSEGV", "crashed at its start"):
        first, *others = checkup.examine({"model": str(mini)}, lambda status: None).checks
        assert (first.name, first.verdict) == ("engine", BROKEN) and words in first.words
        assert {"throttling", "power", "memory"} <= {check.name for check in others}
        monkeypatch.setattr(builds, "of_worker", ends)


def test_a_neighbour_is_named_and_not_the_threads(
    planted: type[Planted], mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        def __init__(self, *_: object) -> None: ...

        def sample(self) -> None: ...

        def finish(self, *_: object) -> Noise:
            nothing = NoiseReading()
            return Noise(nothing, nothing, NoiseSamples((1000,), others_ms=(900,)))

    monkeypatch.setattr(noise_watch, "NoiseWatch", Busy)
    monkeypatch.setattr(disturbances, "n_cores", lambda record: 2)
    planted.slow = staticmethod(lambda settings: 10.0 if settings.n_threads == 2 else 1.0)
    assert verdicts(mini) == {"other programs": LOOK}


def test_the_worst_is_shown_first_and_the_exit_status_tells(
    planted: type[Planted], mini: Path
) -> None:
    planted.slow = staticmethod(lambda settings: 10.0 if settings.n_threads > 2 else 1.0)
    status, out, _ = run_lab("doctor", "-m", mini, "-t", "8")
    assert status == 1
    table, words = out.split("\n\n", 2)[1:]
    assert words.startswith(
        "threads (broken): With 2 instead of 8: prefill 10.0x as fast (10.0-10.0)"
    )
    assert "lab measure --threads 2" in words
    assert max(map(len, table.splitlines())) <= 80
    status, out, _ = run_lab("doctor", "-m", mini, "--json")
    assert status == 0
    assert {check["verdict"] for check in json.loads(out)["checks"]} <= {FINE, LOOK, UNKNOWN}


def test_the_real_engine_is_checked(mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "N_BLOCKS", 1)  # too few for a verdict
    found = checkup.examine({"model": str(mini), "threads": 1}, lambda status: None)
    checks = {check.name: check for check in found.checks}
    assert checks["engine"].verdict == FINE and found.settings and found.settings.n_threads == 1
    assert re.fullmatch(r"prefill [\d,]+, decode [\d,]+ tokens/s", checks["engine"].figure or "")
    assert {
        "build",
        "threads",
        "throttling",
        "power",
        "other programs",
        "memory",
        "GPU",
    } <= checks.keys()
