"""`--lib`: libraries of another build, checked before anything is measured, and part of what is
recorded."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.core.record import OK
from lab.core.results import read
from lab.errors import LabError
from lab.process.setup import LIB_VARIABLE, ProcessSetup
from lab.process.wire import Libraries
from lab.process.worker import Worker, WorkerDied
from lab.runner import builds, trial as side_by_side
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.faults import LIBLLAMA

FIELD = "the default of llama_context_params.n_batch"
FITTING = Libraries("0.25.3", (), {FIELD: "2048"})


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed libraries in another folder."""
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    folder = tmp_path_factory.mktemp("private") / "build" / "bin"
    shutil.copytree(Path(spec.origin).parent / "lib", folder)
    return folder


@pytest.fixture
def libllama(tmp_path: Path) -> Callable[[bytes], Path]:
    """A folder with a library of these bytes."""

    def make(data: bytes) -> Path:
        (tmp_path / LIBLLAMA).write_bytes(data)
        return tmp_path

    return make


def test_an_equal_build_fits_and_is_measured(build: Path, tmp_path: Path) -> None:
    assert builds.folder_of(str(build)) == str(build.resolve())
    work = ["--prompt-len", 8, "--gen", 2, "--repeat", 1, "-ngl", 0, "--no-plot"]
    status, out, err = run_lab("measure", *work, "--lib", build, "--out", tmp_path)
    assert status == 0, err
    name = builds.name_of(str(build))
    assert name
    assert name.startswith("build/bin ")
    assert len(name) == len("build/bin ") + 8
    assert f"libraries of {name};" in out
    following = out.partition("\nnext ")[2]
    assert " --lib " in following  # explain, or measure again if the machine was busy
    (path,) = tmp_path.glob("*.jsonl")
    for record in read([path]).records:
        assert record.run.status == OK
        assert record.settings.lib == name
        assert record.machine.lib == name
    assert str(build.parent.parent) not in path.read_text()


def test_the_engine_runs_the_libraries_of_the_folder(build: Path) -> None:
    with Worker() as worker:
        installed = worker.libraries()
        worker.use(ProcessSetup(lib=str(build)))
        copied = worker.libraries()
    assert installed.version == copied.version
    assert installed.layout == copied.layout
    if os.name != "nt":
        assert {Path(path).parent.resolve() for path in copied.paths} == {build.resolve()}
        assert not {Path(path).parent for path in installed.paths} & {build, build.resolve()}


def test_doctor_names_the_build(
    build: Path, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.features.doctor.threads.N_BLOCKS", 1)
    monkeypatch.setattr("lab.features.doctor.system.work_s", lambda seconds: 1.0)
    monkeypatch.setattr("lab.features.doctor.attention.PROBE_S", 0.001)
    status, out, _ = run_lab("doctor", "--lib", build, "-m", mini, "-t", 1)
    assert status == 0
    assert f"libraries of {builds.name_of(str(build))};" in out


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no such folder"):
        builds.folder_of(str(tmp_path / "nowhere"))


def test_the_folder_above_is_answered_with_the_right_one(build: Path) -> None:
    with pytest.raises(LabError) as problem:
        builds.folder_of(str(build.parent))
    assert problem.value.hint == f"Use --lib {build}"


def test_a_broken_library(libllama: Callable[[bytes], Path]) -> None:
    with pytest.raises(LabError, match=r"libraries of llama\.cpp cannot be used"):
        builds.folder_of(str(libllama(b"not a library")))


def test_libraries_that_crash(
    monkeypatch: pytest.MonkeyPatch, libllama: Callable[[bytes], Path]
) -> None:
    class Crashing(FakeWorker):
        def libraries(self) -> Libraries:
            if self.setup.lib is None:
                return FITTING
            raise WorkerDied("The engine's process ended: SIGILL.")

    monkeypatch.setattr(builds, "Worker", Crashing)
    with pytest.raises(LabError, match="SIGILL") as problem:
        builds.folder_of(str(libllama(b"for another CPU")))
    assert "do not run here" in problem.value.hint


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        (
            {"layout": {**FITTING.layout, FIELD: "512"}},
            f"{FIELD} is 512, but 2048 in the installed",
        ),
        (
            {"layout": {**FITTING.layout, "tensor type 43": "NEW"}},
            "tensor type 43 is NEW, but unknown",
        ),
        ({"layout": {}}, f"{FIELD} is unknown, but 2048"),
        ({"version": "0.26.0"}, r"ggml's version is 0\.26, but 0\.25 in"),
    ],
)
def test_libraries_of_another_version(
    differences: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    libraries = dataclasses.replace(FITTING, **differences)
    with pytest.raises(LabError, match=reason):
        builds.compare(FITTING, libraries, tmp_path)


def test_the_variable_of_llama_cpp_python_is_the_option(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIB_VARIABLE, str(build))
    assert builds.folder_of(None) == str(build.resolve())
    assert builds.name_of(None) == builds.name_of(str(build))
    monkeypatch.setenv(LIB_VARIABLE, "/nowhere")
    with Worker() as worker:
        assert worker.build.devices  # of the installed libraries
    with pytest.raises(LabError, match=f"{LIB_VARIABLE}=/nowhere: no such folder"):
        builds.folder_of(None)


def test_a_trial_of_two_builds(build: Path, fake_worker: FakeWorker) -> None:
    variants = [
        ("", {}),
        (
            f"--lib '{build}' -ngl 0",
            {
                "lib": str(build),
                "n_gpu_layers": 0,
            },
        ),
    ]
    plans = side_by_side.plan(fake_worker, variants, 1, prompt_len=[20], gen=4)
    assert list(plans) == ["A: as it is", "B: --lib build/bin -ngl 0"]
    assert [plan.setup.lib for plan in plans.values()] == [None, str(build.resolve())]
    assert [plan.settings.lib for plan in plans.values()] == [None, builds.name_of(str(build))]
