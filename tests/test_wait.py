"""How the CPU's threads wait for each other: asked, in the child's environment, and recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.asked_settings import AskedSettings
from lab.core.record import OK, Record
from lab.engine import openmp
from lab.process import setup
from lab.process.setup import LIBGOMP, LIBOMP, NO_OPENMP, VCOMP, ProcessSetup
from lab.runner import as_options, waiting
from lab.show import text_setup
from tests.conftest import SETTINGS, make_record, run_lab

# One thread waits for nobody: quick on a busy machine, too.
QUICK = ("-t", "1", "-p", "10", "-n", "4", "-r", "1", "--no-plot", "--json")


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
    others = {"OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0 1"}
    for name, value in (theirs | others).items():
        monkeypatch.setenv(name, value)
    variables = setup.environment(ProcessSetup(wait=wait))
    of_openmp = {
        name: variables[name] for name in variables if name[:3] in ("OMP", "GOM", "KMP")
    }
    assert of_openmp == expected | others
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


def measured(folder: Path, *options: str) -> Record:
    code, _, err = run_lab("measure", *QUICK, "-o", folder, *options)
    assert code == 0, err
    (record,) = [r for r in results.read([folder]).records if not r.run.warmup]
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = measured(tmp_path, *options).settings
    assert settings.wait == asked
    if settings.openmp == LIBGOMP:
        assert settings.wait_resolved == resolved
    kept = () if options else ("OMP_WAIT_POLICY=passive",)
    assert set(kept) <= set(settings.openmp_variables or ())


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
        as_options.asked(record.settings).get("wait")
        for record in (
            with_wait(None, "default"),
            with_wait("default", "default"),
            with_wait(None, "sleep"),
            with_wait(300, 300),
            with_wait(None, 10_240),
        )
    ]
    assert waits == [None, "default", "sleep", 300, 10_240]


def test_ab_compares_two_ways_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    variants = ("--wait default", "--wait 300")
    code, out, err = run_lab("ab", *variants, *QUICK, "-o", tmp_path)
    assert code == 0, err
    assert json.loads(out)
    resolved = {
        record.run.variant: record.settings.wait_resolved
        for record in results.read([tmp_path]).records
    }
    assert sorted(resolved) == ["A: --wait default", "B: --wait 300"]
    if openmp_of(tmp_path) == LIBGOMP:
        assert list(resolved.values()) == ["default", 300]


def openmp_of(folder: Path) -> str | None:
    return results.read([folder]).records[0].settings.openmp
