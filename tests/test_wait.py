"""How the CPU's threads wait for each other: asked, in the child's environment, and recorded."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab.core import results
from lab.core.asked_settings import AskedSettings
from lab.core.record import OK, Noise, NoiseReading, NoiseSamples, Record, Threads
from lab.engine import openmp
from lab.process import setup
from lab.process.setup import LIBGOMP, LIBOMP, NO_OPENMP, VCOMP, ProcessSetup
from lab.runner import (
    as_options,
    disturbances,
    neighbours,
    noise_watch,
    thread_watch,
    waiting,
)
from lab.show import text_setup
from tests.support.command import run_lab
from tests.support.records import SETTINGS, make_record

# One thread waits for nobody: quick on a busy machine, too.
QUICK = ("--prompt", "random", "-t1", "-p10", "-n4", "-r1", "--no-plot", "--json")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if setup.OPENMP_VARIABLE.fullmatch(name):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (None, {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": "9"}),
        ("default", {}),
        ("sleep", {"OMP_WAIT_POLICY": "passive"}),
        (300, {"GOMP_SPINCOUNT": "300", "KMP_BLOCKTIME": "0"}),
        (500_000, {"GOMP_SPINCOUNT": "500000", "KMP_BLOCKTIME": "5"}),
    ],
)
def test_a_chosen_wait_replaces_the_users_and_no_choice_keeps_it(
    wait: Any, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": "9"}
    places = {"OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0 1"}
    for name, value in (theirs | places).items():
        monkeypatch.setenv(name, value)
    variables = setup.environment(ProcessSetup(wait=wait))
    of_openmp = {
        name: variables[name] for name in variables if name[:3] in ("OMP", "GOM", "KMP")
    }
    assert of_openmp == expected | places
    assert dict(os.environ).items() >= theirs.items()  # those of this process stay


RESOLVED: list[tuple[str | None, dict[str, str], Any]] = [
    (LIBGOMP, {}, "default"),
    (LIBGOMP, {"OMP_WAIT_POLICY": "passive"}, "sleep"),
    (LIBGOMP, {"OMP_WAIT_POLICY": " PASSIVE "}, "sleep"),
    (LIBGOMP, {"OMP_WAIT_POLICY": "active"}, "active"),
    (LIBGOMP, {"OMP_WAIT_POLICY": "lazy"}, "default"),
    (LIBGOMP, {"GOMP_SPINCOUNT": "300"}, 300),
    (LIBGOMP, {"GOMP_SPINCOUNT": "10k"}, 10_240),
    (LIBGOMP, {"GOMP_SPINCOUNT": "0"}, "sleep"),
    (LIBGOMP, {"GOMP_SPINCOUNT": "300000"}, "default"),
    (LIBGOMP, {"GOMP_SPINCOUNT": "infinity"}, "active"),
    (LIBGOMP, {"GOMP_SPINCOUNT": "many"}, "default"),
    (LIBGOMP, {"GOMP_SPINCOUNT": "300", "OMP_WAIT_POLICY": "passive"}, 300),
    (LIBGOMP, {"KMP_BLOCKTIME": "0"}, "default"),
    (LIBOMP, {}, "default"),
    (LIBOMP, {"KMP_BLOCKTIME": "0"}, "sleep"),
    (LIBOMP, {"KMP_BLOCKTIME": "20"}, "20 ms"),
    (LIBOMP, {"KMP_BLOCKTIME": "20ms"}, "20 ms"),
    (LIBOMP, {"OMP_WAIT_POLICY": "passive"}, "sleep"),
    (LIBOMP, {"GOMP_SPINCOUNT": "300"}, "default"),
    (VCOMP, {}, "default"),
    (VCOMP, {"OMP_WAIT_POLICY": "passive"}, None),
    (NO_OPENMP, {"OMP_WAIT_POLICY": "passive"}, "default"),
    (None, {}, None),
]


@pytest.mark.parametrize(("runtime", "variables", "expected"), RESOLVED)
def test_what_a_runtime_makes_of_the_variables(
    runtime: str | None, variables: dict[str, str], expected: Any
) -> None:
    assert setup.resolved_wait(runtime, variables) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0", LIBGOMP),
        ("/env/llama_cpp_python.libs/libgomp-a34b3233.so.1.0.0", LIBGOMP),
        ("/usr/lib/llvm-18/lib/libomp.so.5", LIBOMP),
        ("/opt/intel/oneapi/compiler/latest/lib/libiomp5.so", LIBOMP),
        ("/opt/homebrew/opt/libomp/lib/libomp.dylib", LIBOMP),
        (r"C:\llama\libomp140.x86_64.dll", LIBOMP),
        ("libiomp5md.dll", LIBOMP),
        (r"C:\Windows\System32\VCOMP140.DLL", VCOMP),
        ("libgomp-1.dll", LIBGOMP),
        ("/lib/libggml-cpu.so.0", None),
        ("/lib/libompl.so", None),
        ("/lib/libm.so.6", None),
    ],
)
def test_a_runtime_by_the_name_of_its_file(path: str, expected: str | None) -> None:
    assert openmp.runtime_of(path) == expected


def test_ordinary_waits_are_possible() -> None:
    for wait in (None, "default", "sleep", *range(90), 100, 300, 1000, 10**4, 10**5, 10**6):
        AskedSettings(wait=wait).check()


@pytest.mark.parametrize(
    ("wait", "runtime", "says"),
    [
        (300, NO_OPENMP, "--wait 300 has no effect: this build of llama.cpp has no OpenMP"),
        ("sleep", NO_OPENMP, "--wait sleep has no effect"),
        (300, VCOMP, "vcomp"),
        (300, LIBOMP, "--wait 300 is 0 ms"),
    ],
)
def test_a_wait_that_a_build_cannot_do_is_said(wait: Any, runtime: str, says: str) -> None:
    (sentence,) = waiting.warnings(wait, runtime)
    assert says in sentence


@pytest.mark.parametrize("wait", [None, "default", "sleep", 300])
def test_nothing_is_said_of_libgomp(wait: Any) -> None:
    assert waiting.warnings(wait, LIBGOMP) == []
    assert waiting.warnings(None, NO_OPENMP) == []


@pytest.fixture
def quick(mini: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("-m", mini, *QUICK, "-o", tmp_path)


def measured(quick: tuple[object, ...], *options: str) -> Record:
    code, _, err = run_lab("measure", *quick, *options)
    assert code == 0, err
    (record,) = [r for r in results.read([str(quick[-1])]).records if not r.run.warmup]
    assert record.status == OK
    return record


@pytest.mark.parametrize(
    ("options", "variables", "asked", "resolved"),
    [
        (("--wait", "300"), {}, 300, 300),
        (("--wait", "sleep"), {}, "sleep", "sleep"),
        (("--wait", "default"), {"OMP_WAIT_POLICY": "passive"}, "default", "default"),
        ((), {"OMP_WAIT_POLICY": "passive"}, None, "sleep"),
    ],
)
def test_a_real_session_records_how_its_threads_waited(
    options: tuple[str, ...],
    variables: dict[str, str],
    asked: Any,
    resolved: Any,
    quick: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = measured(quick, *options).settings
    assert settings.wait == asked
    if settings.openmp == LIBGOMP:
        assert settings.wait_resolved == resolved
    inherited = () if options else ("OMP_WAIT_POLICY=passive",)
    assert set(inherited) <= set(settings.openmp_variables or ())


def with_wait(wait: Any, resolved: Any, *variables: str) -> Record:
    changes = {"wait": wait, "wait_resolved": resolved, "openmp_variables": variables}
    return make_record(settings=SETTINGS.__class__(**(vars(SETTINGS) | changes)))


def test_different_waits_are_different_setups() -> None:
    def setup_of(record: Record) -> tuple[Any, Any]:
        columns = text_setup.of_run(record)
        return columns["wait"], columns["openmp_variables"]

    passive = "OMP_WAIT_POLICY=passive"
    assert setup_of(make_record()) == (None, None)
    assert setup_of(with_wait(None, "default")) == (None, None)
    assert setup_of(with_wait("default", "default")) == (None, None)
    assert setup_of(with_wait("sleep", "sleep")) == setup_of(with_wait(None, "sleep", passive))
    assert setup_of(with_wait(300, 300)) == (300, None)
    assert setup_of(with_wait(300, None)) == (300, None)
    bound = with_wait(None, "default", "OMP_PROC_BIND=true")
    assert setup_of(bound) == (None, "OMP_PROC_BIND=true")


def test_a_repeated_command_waits_as_the_record_did() -> None:
    waits = [
        as_options.keywords_of(record.settings).get("wait")
        for record in (
            with_wait(None, "default"),
            with_wait("default", "default"),
            with_wait(None, "sleep"),
            with_wait(300, 300),
            with_wait(None, 10_240),
        )
    ]
    assert waits == [None, "default", "sleep", 300, 10_240]


def test_ab_compares_two_ways_to_wait(
    quick: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    variants = ("--wait default", "--wait 300")
    code, out, err = run_lab("ab", *variants, *quick)
    assert code == 0, err
    assert json.loads(out)
    resolved = {
        record.run.variant: record.settings.wait_resolved
        for record in results.read([tmp_path]).records
    }
    assert sorted(map(str, resolved)) == ["A: --wait default", "B: --wait 300"]
    if openmp_of(tmp_path) == LIBGOMP:
        assert list(resolved.values()) == ["default", 300]


def openmp_of(folder: Path) -> str | None:
    return results.read([folder]).records[0].settings.openmp


def looked_at(n_looks: int, n_shared: int, **settings: Any) -> Record:
    """A run of three seconds whose threads shared a processor in some looks."""
    threads = Threads(2, n_looks, n_looks, n_shared)
    samples = NoiseSamples((1000, 2000, 3000), (0, 0, 0), (0, 0, 0))
    noise = Noise(NoiseReading(), NoiseReading(), samples, threads=threads)
    record = with_wait(None, "default")
    changed = dataclasses.replace(record.settings, **{"openmp": LIBGOMP, **settings})
    run = dataclasses.replace(record.run, noise=noise)
    return dataclasses.replace(record, settings=changed, run=run)


def is_piled(record: Record) -> bool:
    return disturbances.PILE_UP in disturbances.disturbances(record)


def test_threads_that_took_turns_on_one_core_are_said_with_the_cure() -> None:
    record = looked_at(300, 295)
    assert is_piled(record)
    (clause, *_) = disturbances.sentences([record])
    assert "took turns on one core beside another program in the only run" in clause
    assert "--wait 300 (GOMP_SPINCOUNT=300 for llama-server) avoids it" in clause


def test_the_cost_is_the_mean_step_by_the_fastest() -> None:
    record = looked_at(300, 295)
    steps = record.run.steps
    slow = [
        start + (10**9 if i == len(steps.kind) - 1 else 10**6)
        for i, start in enumerate(steps.start_ns)
    ]
    run = dataclasses.replace(
        record.run, steps=dataclasses.replace(steps, ready_ns=tuple(slow))
    )
    (clause, *_) = disturbances.sentences([dataclasses.replace(record, run=run)])
    n_decode = steps.kind.count("decode")
    times = (1000 + n_decode - 1) / n_decode
    assert f": at least {times:.0f} times slower than its fastest step; --wait 300" in clause


@pytest.mark.parametrize(("n_looks", "n_shared"), [(300, 134), (300, 200), (19, 19), (0, 0)])
def test_an_ordinary_neighbour_and_a_short_run_are_no_pile_up(
    n_looks: int, n_shared: int
) -> None:
    assert not is_piled(looked_at(n_looks, n_shared))


def test_a_hundred_ordinary_runs_are_no_pile_up() -> None:
    for n_shared in range(100):
        assert not is_piled(looked_at(200, n_shared))


@pytest.mark.parametrize("wait", ["sleep", 300, 1000])
def test_threads_that_sleep_wake_each_other_on_one_core_without_harm(wait: Any) -> None:
    assert not is_piled(looked_at(300, 295, wait=wait, wait_resolved=wait))


@pytest.mark.parametrize(
    ("runtime", "cure"),
    [
        (LIBOMP, "KMP_BLOCKTIME=0"),
        (NO_OPENMP, "--threads 1 avoids it"),
        (VCOMP, "--threads 1"),
    ],
)
def test_the_cure_is_that_of_the_runtime(runtime: str, cure: str) -> None:
    (clause, *_) = disturbances.sentences([looked_at(300, 295, openmp=runtime)])
    assert cure in clause


def task(folder: Path, tid: int, state: str, processor: int) -> None:
    """A thread as Linux shows it."""
    thread = folder / str(tid)
    thread.mkdir(parents=True, exist_ok=True)
    columns = [state, *["0"] * 35, str(processor), "0", "0"]
    (thread / "stat").write_text(f"{tid} (a name) with) {' '.join(columns)}\n")
    (thread / "status").write_text("Name:\tx\nnonvoluntary_ctxt_switches:\t7\n")
    (thread / "schedstat").write_text("1000 200 3\n")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
@pytest.mark.parametrize(
    ("threads", "together", "shared"),
    [
        ([("R", 0), ("R", 0)], 1, 1),
        ([("R", 0), ("R", 1)], 1, 0),
        ([("R", 0), ("S", 0)], 0, 0),
        ([("R", 0), ("S", 0), ("R", 0)], 1, 1),
        ([("R", 0), ("R", 1), ("R", 0), ("R", 1)], 0, 0),  # more threads than processors
        ([("S", 1), ("S", 1)], 0, 0),
    ],
)
def test_a_look_counts_threads_on_one_processor(
    threads: list[tuple[str, int]],
    together: int,
    shared: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for tid, (state, processor) in enumerate(threads, 100):
        task(tmp_path / "7/task", tid, state, processor)
    watch = thread_watch.ThreadWatch(7, tmp_path)
    watch.look()
    assert watch.finish() == Threads(2, 1, together, shared, 0, 0, 0)


def test_a_process_that_has_ended_shows_nothing(tmp_path: Path) -> None:
    watch = thread_watch.ThreadWatch(os.getpid(), tmp_path)
    watch.look()
    assert watch.finish() is None


@pytest.mark.parametrize(
    ("used", "n_busy", "changes", "says"),
    [
        (1.0, 2, {}, "Other programs use about 1 of 2 cores. 2 threads"),
        (0.4, 2, {}, ""),
        (1.0, 1, {}, ""),
        (1.0, 2, {"wait_resolved": 300}, ""),
        (1.0, 2, {"wait_resolved": "sleep"}, ""),
        (2.0, 2, {"openmp": NO_OPENMP}, "--threads 1 avoids it."),
    ],
)
def test_the_look_before_the_first_run(
    used: float, n_busy: int, changes: dict[str, Any], says: str
) -> None:
    settings = looked_at(0, 0, **changes).settings
    sentence = waiting.before_first_run(None, settings, n_busy, 2, used)
    assert says in sentence
    assert bool(sentence) == bool(says)


def test_threads_seen_on_one_core_before_the_first_run() -> None:
    settings = looked_at(0, 0).settings
    piled = waiting.before_first_run(Threads(2, 50, 50, 49), settings, 2, 2, 1.0)
    assert piled.startswith("Two of llama.cpp's threads take turns on one core")
    assert "--wait 300" in piled


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sessions")
@pytest.mark.parametrize("place", [neighbours.SESSION, neighbours.OTHER_SESSION])
def test_a_planted_neighbour_is_where_it_shall_be_and_goes(place: str) -> None:
    with neighbours.planted(1, place):
        busy = psutil.Process().children(recursive=True)[-1]
        is_here = os.getsid(busy.pid) == os.getsid(0)
        assert is_here == (place == neighbours.SESSION)
    assert not busy.is_running() or busy.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sessions")
def test_a_planted_neighbour_is_no_noise() -> None:
    with neighbours.planted(1):
        watch = noise_watch.NoiseWatch(os.getpid())
        assert set(neighbours.pids) <= {process.pid for process in watch._lab}
        assert watch.finish().threads is None
    assert neighbours.pids == []
