"""`lab doctor`: what each verdict needs, on made-up readings and times, and a whole checkup with
planted faults."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.core.record import (
    CRASHED,
    Device,
    Model,
    Noise,
    NoiseReading,
    NoiseSamples,
    Rate,
    Settings,
)
from lab.core.script import Script
from lab.errors import LabError
from lab.features.doctor import attention, checkup, system, threads
from lab.features.doctor.checks import (
    BROKEN,
    FINE,
    LOOK,
    UNKNOWN,
    Check,
    Readings,
    checks_of,
    read,
)
from lab.models import catalog, synthetic
from lab.process.wire import ATTENTION, Outcome, Probe, Progress
from lab.runner import builds, cgroups, disturbances, machine, noise_watch
from lab.runner.plan import make_plan
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker, died
from tests.support.records import MACHINE, SETTINGS, make_record, make_run, steps_of

BUSY = "another process used 0.9 of a core"
CARD = Device("CUDA0", "NVIDIA H200", "gpu", None)
SOFTWARE = Device("CUDA0", "llvmpipe", "gpu", None)
HEALTHY = Readings(
    quota=None,
    limit_bytes=None,
    slowdown=None,
    power=None,
    power_savers=None,
    free_bytes=10**10,
    swap_bytes=0,
    ram_bytes=16 * 10**9,
    cards=[],
    devices=(),
    needed_bytes=10**8,
    taken_cpu=[],
    n_halted=0,
    n_short=0,
    cores_used=None,
)


def test_what_cannot_be_told_says_why() -> None:
    unknown = [check for check in checks_of(HEALTHY) if check.verdict == UNKNOWN]
    assert unknown
    assert all(check.words for check in unknown)


def checks_by_name(**planted: Any) -> dict[str, Check]:
    """The checks of a healthy machine on which some readings are different."""
    checks = checks_of(dataclasses.replace(HEALTHY, **planted))
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("name", "verdict", "planted"),
    [
        ("power", UNKNOWN, {}),
        ("power", FINE, {"power_savers": []}),
        ("power", LOOK, {"power": "battery"}),
        ("power", LOOK, {"power_savers": ["the governor is powersave"]}),
        ("throttling", FINE, {"slowdown": 1.02}),
        ("throttling", LOOK, {"slowdown": 1.3}),
        ("throttling", FINE, {"quota": 4.0}),
        ("throttling", LOOK, {"quota": 0.5}),
        ("throttling", LOOK, {"quota": 1.5, "n_halted": 1}),
        ("other programs", UNKNOWN, {}),
        ("other programs", FINE, {"cores_used": 0.01}),
        ("other programs", LOOK, {"taken_cpu": [BUSY]}),
        ("memory", FINE, {"swap_bytes": 10**9}),  # old and never asked for
        ("memory", LOOK, {"free_bytes": 10**6}),
        ("memory", LOOK, {"n_short": 1}),
        ("memory", LOOK, {"swap_bytes": 4 * 10**9}),
        ("GPU", FINE, {}),
        ("GPU", LOOK, {"cards": ["NVIDIA 10de:2684"]}),
        (
            "GPU",
            FINE,
            {
                "cards": ["NVIDIA 10de:2684"],
                "devices": (CARD,),
            },
        ),
        (
            "GPU",
            LOOK,
            {
                "cards": ["AMD 1002:744c"],
                "devices": (SOFTWARE,),
            },
        ),
    ],
)
def test_what_is_only_read_is_worth_a_look_at_most(
    name: str, verdict: str, planted: dict[str, Any]
) -> None:
    checks = checks_by_name(**planted)
    assert checks[name].verdict == verdict
    for check in checks.values():
        assert check.verdict != BROKEN
        assert (check.command is not None) == (check.verdict == LOOK)


def test_no_gpu_is_checked_without_a_plan() -> None:
    assert "GPU" not in checks_by_name(needed_bytes=None)


def test_runs_that_the_quota_or_missing_memory_halted_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    causes = {disturbances.QUOTA: 1.0, disturbances.MEMORY: 1.0}
    monkeypatch.setattr(disturbances, "disturbances", lambda record: causes)
    runs = [make_record(make_run(repeat=repeat)) for repeat in range(2)]
    readings = read(MACHINE, None, runs, None, Path("/"))
    assert readings.n_halted == 2
    assert readings.n_short == 2


class Planted(FakeWorker):
    """A fake engine whose times depend on its settings, as a fault makes them."""

    slow: Callable[[Settings], float] = staticmethod(lambda settings: 1.0)
    problem: LabError | None = None
    slow_width: int | None = None  # of heads, for which flash attention reads at a twentieth

    def probe(self, probe: Probe) -> Rate:
        """Caches are read at 10 GB/s."""
        is_slow = probe.op == ATTENTION and probe.columns == type(self).slow_width
        ns = round(probe.n_bytes / 10 * (20 if is_slow else 1))
        sizes = (probe.rows, probe.columns, probe.n_tokens, probe.n_threads)
        flops = round(probe.n_bytes * probe.rows / (probe.n_head_kv or 1))
        return Rate(probe.op, probe.type, "CPU", *sizes, probe.n_bytes, flops, (ns,))

    def new_context(self, asked: Settings) -> Settings:
        self.asked = asked
        return super().new_context(asked)

    def run(
        self,
        script: Script,
        watch: Callable[[Progress], None],
    ) -> Outcome:
        if self.problem:
            raise self.problem
        factor = type(self).slow(self.asked)
        outcome = super().run(script, watch)
        return dataclasses.replace(outcome, steps=steps_of(script, factor, 10 * factor))


@pytest.fixture
def planted(
    monkeypatch: pytest.MonkeyPatch,
    simulated: None,
    mini: Path,
) -> type[Planted]:
    """Every measurement but the engine's is exact and healthy; `lab doctor` runs on the class that
    comes back."""
    chosen = type("Chosen", (Planted,), {})
    monkeypatch.setattr(checkup, "Worker", chosen)
    monkeypatch.setattr(system, "work_s", lambda seconds: 1.0)
    monkeypatch.setattr(system, "swap_used", lambda: 0)
    monkeypatch.setattr(system, "gpus", lambda root: [])
    monkeypatch.setattr(machine, "default_threads", lambda root=None: 2)
    monkeypatch.setattr(machine, "memory_available", lambda root=None: 10**10)
    monkeypatch.setattr(cgroups, "cpu_quota", lambda root=None: None)
    monkeypatch.setattr(cgroups, "memory_limit", lambda root=None: None)
    monkeypatch.setattr(builds, "mismatch", lambda text: None)
    monkeypatch.setattr(machine, "describe", lambda *args: MACHINE)
    return chosen


def doubtful(path: Path, **asked: Any) -> dict[str, str]:
    """The verdicts of a checkup that are worth a look, or worse."""
    examined = checkup.examine(
        {
            "model": str(path),
            **asked,
        },
        lambda status: None,
    )
    return {
        check.name: check.verdict
        for check in examined.checks
        if check.verdict in (LOOK, BROKEN)
    }


def test_a_healthy_machine_has_nothing_to_look_at(planted: type[Planted], mini: Path) -> None:
    assert doubtful(mini) == {}


@pytest.mark.parametrize(
    ("n_threads", "slow"),
    [
        (8, lambda settings: 10.0 if settings.n_threads > 2 else 1.0),
        (1, lambda settings: 2.0 / min(2, settings.n_threads)),
    ],
)
def test_planted_threads_are_named_and_nothing_else(
    n_threads: int, slow: Callable[[Settings], float], planted: type[Planted], mini: Path
) -> None:
    planted.slow = staticmethod(slow)
    assert doubtful(mini, threads=n_threads) == {"threads": BROKEN}


HEADS_OF_64 = synthetic.model_of(catalog.find("smollm2-135m"), "Q4_1")
HEADS_OF_128 = synthetic.model_of(catalog.find("qwen3-0.6b"), "Q4_K_M")
FP16 = frozenset({"avx2", "avx512f", "avx512_fp16"})


def attention_check(
    flash_s: float,
    features: frozenset[str] | None = FP16,
    model: Model = HEADS_OF_64,
    **changes: Any,
) -> Check:
    """The check of a step of 0.01 s without flash attention."""
    times = attention.Times(flash_s, 0.01, 0.001, 0.001)
    return attention.check(times, model, dataclasses.replace(SETTINGS, **changes), features)


def test_a_slow_kernel_of_attention_is_worth_a_look_with_the_option_that_helps() -> None:
    check = attention_check(0.031)
    assert check.verdict == LOOK
    assert "decode is 3.1x as fast with --flash-attn off as with on" in check.words
    assert "heads of 64; for heads of 128 attention alone is 1.00x" in check.words
    assert "The reason: on this CPU (AVX512-FP16) flash attention handles 128" in check.words
    assert check.command is not None
    assert check.command.startswith("lab ab '--flash-attn on' '--flash-attn off'")


def test_runs_that_failed_have_no_rate() -> None:
    """Of three runs two crashed. A step takes 10 ms, and sampling 1 ms."""
    went_well = make_record(make_run(10, 5, decode_ms=10))
    crash = make_record(make_run(10, 5, status=CRASHED))
    check = checkup.engine_check([went_well, crash, crash])
    assert check.figure == checkup.engine_check([went_well]).figure
    assert "decode 90.9 tokens/s" in (check.figure or "")
    all_crashed = checkup.engine_check([crash, crash])
    assert all_crashed.figure is None
    assert all_crashed.verdict == UNKNOWN
    assert "No run" in all_crashed.words


def test_a_run_without_a_time_per_token_does_not_tell_how_long_a_trial_takes() -> None:
    assert threads.case_of_trial(make_run(10, 1)) is None
    assert threads.case_of_trial(make_run(10, 4)) is not None


def test_attention_is_not_judged_without_a_time_per_token(fake_worker: FakeWorker) -> None:
    plan = make_plan(fake_worker, [20], 4, 1)
    crash = make_record(make_run(10, 5, status=CRASHED))
    check = attention.examine(fake_worker, plan, [crash])
    assert check.verdict == UNKNOWN
    assert check.figure is None
    assert "No run" in check.words


@pytest.mark.parametrize(
    ("flash_s", "changes"),
    [(0.0129, {}), (0.01, {}), (0.005, {}), (0.0078, {"flash_attn_resolved": "off"})],
)
def test_kinds_of_attention_of_about_one_speed_are_fine(
    flash_s: float, changes: dict[str, Any]
) -> None:
    assert attention_check(flash_s, **changes).verdict == FINE


def test_plain_attention_that_is_slower_is_worth_a_look_too() -> None:
    check = attention_check(0.005, flash_attn="off", flash_attn_resolved="off")
    assert check.verdict == LOOK
    assert "2x as fast with --flash-attn on as with off" in check.words


@pytest.mark.parametrize(
    ("features", "model", "changes"),
    [
        (None, HEADS_OF_64, {}),
        (FP16 - {"avx512_fp16"}, HEADS_OF_64, {}),
        (FP16, HEADS_OF_128, {}),
        (FP16, HEADS_OF_64, {"type_k": "f32", "type_v": "f32"}),
        (FP16, HEADS_OF_64, {"type_k": "bf16", "type_v": "bf16"}),
        (FP16, HEADS_OF_64, {"n_gpu_layers": 99}),
    ],
)
def test_the_reason_is_told_only_where_it_holds(
    features: frozenset[str] | None, model: Model, changes: dict[str, Any]
) -> None:
    check = attention_check(0.03, features, model, **changes)
    assert check.verdict == LOOK
    assert "The reason" not in check.words


def test_a_slow_kernel_is_found_by_the_checkup(planted: type[Planted], mini: Path) -> None:
    planted.slow_width = 16
    examined = checkup.examine({"model": str(mini)}, lambda status: None)
    (found,) = [check for check in examined.checks if check.name == "attention"]
    times = re.fullmatch(r"flash (.+), plain (.+) at 2,000 tokens", found.figure or "")
    assert times
    assert times[1] != times[2]


def test_an_engine_that_fails_is_the_first_check_and_the_others_are_made(
    planted: type[Planted], mini: Path
) -> None:
    planted.problem = died()
    first, *more = checkup.examine({"model": str(mini)}, lambda status: None).checks
    assert first.name == "engine"
    assert first.verdict == BROKEN
    assert "SIGSEGV" in first.words
    assert {"throttling", "power", "memory"} <= {check.name for check in more}


def test_a_build_that_crashes_at_its_start_is_the_first_check(
    planted: type[Planted], mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(worker: object) -> None:
        raise LabError("llama.cpp crashed at its start.", "Build it here.")

    monkeypatch.setattr(builds, "of_worker", ends)
    examined = checkup.examine({"model": str(mini)}, lambda status: None)
    first = examined.checks[0]
    assert first.name == "engine"
    assert first.verdict == BROKEN
    assert "crashed at its start" in first.words
    assert "memory" in {check.name for check in examined.checks}


class BusyWatch:
    """Stands in for noise_watch.NoiseWatch beside a program that uses 0.9 of a core."""

    def __init__(self, *_: object) -> None: ...

    def sample(self) -> None: ...

    def finish(self, *_: object) -> Noise:
        nothing = NoiseReading()
        return Noise(nothing, nothing, NoiseSamples((1000,), others_ms=(900,)))


@pytest.fixture
def busy(planted: type[Planted], monkeypatch: pytest.MonkeyPatch) -> type[Planted]:
    """A machine on which another program takes a core, so that two threads wait for each other."""
    monkeypatch.setattr(noise_watch, "NoiseWatch", BusyWatch)
    monkeypatch.setattr(machine, "n_cores_watched", lambda here: 2)
    planted.slow = staticmethod(lambda settings: 10.0 if settings.n_threads == 2 else 1.0)
    return planted


def test_a_neighbour_is_named_and_not_the_threads(busy: type[Planted], mini: Path) -> None:
    assert doubtful(mini) == {"engine": LOOK, "other programs": LOOK}


def test_rates_beside_other_programs_are_not_called_fine(
    busy: type[Planted], mini: Path
) -> None:
    status, out, _ = run_lab("doctor", "-m", mini)
    assert status == 0
    assert "engine (worth a look): These are not this machine's rates: during the runs " in out
    assert "used 0.9 cores" in out


def test_the_machine_comes_first_then_a_table_then_the_worst(
    planted: type[Planted], mini: Path
) -> None:
    planted.slow = staticmethod(lambda settings: 10.0 if settings.n_threads > 2 else 1.0)
    status, out, _ = run_lab("doctor", "-m", mini, "-t", "8", "--details")
    assert status == 1
    about_machine, table, sentences = out.split("\n\n", 2)
    for name in ("machine", "device", "cores", "energy", "python", "flags"):
        assert re.search(rf"^{name} ", about_machine, re.MULTILINE)
    assert max(map(len, table.splitlines())) <= 80
    assert sentences.startswith(
        "threads (broken): With 2 instead of 8: prefill 10.0x as fast (10.0-10.0)"
    )
    assert "lab measure --threads 2" in sentences


def test_devices_cores_and_flags_are_details(planted: type[Planted], mini: Path) -> None:
    status, out, _ = run_lab("doctor", "-m", mini)
    assert status == 0
    about_machine, table, *_ = out.split("\n\n")
    names = [line.split()[0] for line in about_machine.splitlines()]
    assert names == ["machine", "build", "model"]
    assert len(about_machine.splitlines()) + len(table.splitlines()) < 14
    assert "--details" in out.splitlines()[-1]


def test_json_has_the_machine_and_the_checks(planted: type[Planted], mini: Path) -> None:
    status, out, _ = run_lab("doctor", "-m", mini, "--json")
    assert status == 0
    document = json.loads(out)
    assert document["machine"]["devices"]
    assert document["energy"]
    assert {check["verdict"] for check in document["checks"]} <= {FINE, LOOK, UNKNOWN}


def test_the_real_engine_is_checked(mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "N_BLOCKS", 1)  # too few for a verdict
    examined = checkup.examine(
        {
            "model": str(mini),
            "threads": 1,
        },
        lambda status: None,
    )
    checks = {check.name: check for check in examined.checks}
    assert checks["engine"].verdict in (FINE, LOOK)  # by what else the machine does
    assert re.fullmatch(
        r"prefill [\d,]+, decode [\d,]+ tokens/s", checks["engine"].figure or ""
    )
    assert examined.settings
    assert examined.settings.n_threads == 1
    names = {"build", "threads", "throttling", "power", "other programs", "memory", "GPU"}
    assert names <= checks.keys()


def test_progress_names_the_checks_and_says_first_how_long_they_take(
    planted: type[Planted], mini: Path
) -> None:
    """Twelve runs in fresh engines load the model as often, which no line says."""
    status, out, err = run_lab("doctor", "-m", mini)
    assert status == 0
    first, *lines = err.splitlines()
    assert "about half a minute" in first
    names = [line.removesuffix(" ...") for line in lines]
    assert len(names) == len(set(names))
    assert names[:3] == [
        "checking one core",
        "checking the build",
        "checking the engine",
    ]
    assert names[3].startswith("checking 2 against 1 thread")
    assert "loading" not in err
    assert "about half a minute" not in out
