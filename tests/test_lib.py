"""`--lib`: libraries of another build, checked before anything is measured, and part of what is recorded."""

import ctypes
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.analysis import comparison, table
from lab.core.record import OK, Ceilings, Device, Rate
from lab.core.results import read
from lab.engine import bindings, llama, native
from lab.errors import LabError
from lab.process.spawning import LIB_VARIABLE
from lab.process.wire import Backend, Libraries
from lab.process.worker import Worker, WorkerDied
from lab.runner import builds, machine, side_by_side
from lab.runner.as_options import options
from lab.show import plot_runs, text_compare
from lab.why import probing
from lab.why.where import Where
from tests.conftest import MACHINE, SETTINGS, FakeWorker, make_record, run_lab

LIBLLAMA = {"darwin": "libllama.dylib", "win32": "llama.dll"}.get(sys.platform, "libllama.so")
FIELD = "the default of llama_context_params.n_batch"
FITTING = Libraries("0.25.3", (), {FIELD: "2048", "the size of llama_context_params": "160"})


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed libraries in another folder."""
    spec = find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
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
    status, out, err = run_lab(
        *("measure", "--prompt-len", 8, "--gen", 2, "--repeat", 1, "-ngl", 0, "--lib", build, "--out", tmp_path),
        "--no-plot",
    )
    assert status == 0, err
    name = builds.name_of(str(build))
    assert name and name.startswith("build/bin ") and len(name) == len("build/bin ") + 8
    assert f"libraries of {name};" in out
    assert "lab ceilings --lib FOLDER && lab explain" in out
    (path,) = tmp_path.glob("*.jsonl")
    for record in read([path]).records:
        assert (record.run.status, record.settings.lib, record.machine.lib) == (OK, name, name)
    assert str(build.parent.parent) not in path.read_text()


def test_the_engine_runs_the_libraries_of_the_folder(build: Path) -> None:
    with Worker() as worker:
        own = worker.libraries()
        worker.use(Backend(str(build)))
        theirs = worker.libraries()
    assert (own.version, own.layout) == (theirs.version, theirs.layout)
    if os.name != "nt":
        assert {Path(path).parent.resolve() for path in theirs.paths} == {build.resolve()}
        assert not {Path(path).parent for path in own.paths} & {build, build.resolve()}


def test_machine_names_the_build(build: Path) -> None:
    status, out, _ = run_lab("machine", "--lib", build)
    assert (status, f"libraries of {builds.name_of(str(build))};" in out) == (0, True)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no such folder"):
        builds.folder_of(str(tmp_path / "nowhere"))


def test_a_folder_without_libraries(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="this folder contains no libllama"):
        builds.folder_of(str(tmp_path))


def test_the_folder_above_is_answered_with_the_right_one(build: Path) -> None:
    with pytest.raises(LabError) as problem:
        builds.folder_of(str(build.parent))
    assert problem.value.hint == f"Use --lib {build}"


def test_a_broken_library(libllama: Callable[[bytes], Path]) -> None:
    with pytest.raises(LabError, match=r"libraries of llama\.cpp cannot be used"):
        builds.folder_of(str(libllama(b"not a library")))


def test_the_command_says_it_in_a_sentence(libllama: Callable[[bytes], Path]) -> None:
    for command in (("machine",), ("measure", "--prompt-len", 8), ("ceilings",)):
        status, _, err = run_lab(*command, "--lib", libllama(b"not a library"))
        assert (status, err.startswith("Error: --lib ")) == (1, True), err


def test_libraries_that_lack_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise AttributeError("libllama.so: undefined symbol: llama_new_thing")

    monkeypatch.setattr(native, "llama_cpp", missing)
    with pytest.raises(LabError, match="undefined symbol: llama_new_thing") as problem:
        native.start()
    assert "llama-cpp-python" in problem.value.hint


def test_libraries_that_crash(monkeypatch: pytest.MonkeyPatch, libllama: Callable[[bytes], Path]) -> None:
    class Crashing(FakeWorker):
        def libraries(self) -> Libraries:
            if self.backend.lib is None:
                return FITTING
            raise WorkerDied("The engine's process ended: SIGILL (llama.cpp was built for another CPU).")

    monkeypatch.setattr(builds, "Worker", Crashing)
    with pytest.raises(LabError, match="SIGILL") as problem:
        builds.folder_of(str(libllama(b"for another CPU")))
    assert "do not run here" in problem.value.hint


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"layout": {**FITTING.layout, FIELD: "512"}}, f"{FIELD} is 512, but 2048 in the installed"),
        ({"layout": {**FITTING.layout, "tensor type 43": "NEW"}}, "tensor type 43 is NEW, but unknown"),
        ({"layout": {FIELD: "2048"}}, "the size of llama_context_params is unknown, but 160"),
        ({"version": "0.26.0"}, r"have ggml 0\.26\.0; .* needs ggml 0\.25\.3"),
    ],
)
def test_libraries_of_another_version(theirs: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=words):
        builds.compare(FITTING, dataclasses.replace(FITTING, **theirs), tmp_path)  # type: ignore[arg-type]


def test_another_commit_of_the_same_version_fits(tmp_path: Path) -> None:
    builds.compare(FITTING, dataclasses.replace(FITTING, version="0.25.4"), tmp_path)


def test_a_libllama_that_works_with_libraries_of_another_folder(build: Path) -> None:
    names = {path.name for path in build.iterdir()}
    ggml = next(name for name in names if "ggml-base" in name)
    moved = dataclasses.replace(FITTING, paths=(str(build / LIBLLAMA), f"/somewhere/{ggml}"))
    with pytest.raises(LabError, match=f"does not load its own {ggml}, but /somewhere/{ggml}"):
        builds.compare(FITTING, moved, build.resolve())
    packaged = dataclasses.replace(FITTING, paths=(str(build / LIBLLAMA), "/usr/lib/libggml.so.7"))
    builds.compare(FITTING, packaged, build.resolve())  # ggml is a package of its own there


def test_the_layout_is_read_from_the_libraries() -> None:
    described = native.libraries()
    params = bindings.llama_cpp().llama_context_default_params()
    assert described.layout["the default of llama_context_params.n_ubatch"] == str(params.n_ubatch)
    assert described.layout["tensor type 0"] == "f32"
    size = described.layout.get("the size of llama_model_params")
    assert size in (None, str(-(-ctypes.sizeof(bindings.llama_cpp().llama_model_params) // 8) * 8))


def test_the_sum_is_of_what_the_libraries_hold(tmp_path: Path) -> None:
    def name() -> str | None:
        return builds.name_of(str(tmp_path / "bin"))

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "libllama.so.0.5").write_bytes(b"one")
    first = name()
    (tmp_path / "bin" / "libllama.so").write_bytes(b"one")
    (tmp_path / "bin" / "llama-bench").write_bytes(b"a program")
    assert name() == first
    (tmp_path / "bin" / "libggml-vulkan.so").write_bytes(b"more")
    assert name() not in (None, first)


def test_the_variable_of_llama_cpp_python_is_the_option(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIB_VARIABLE, str(build))
    assert builds.folder_of(None) == str(build.resolve())
    assert builds.name_of(None) == builds.name_of(str(build))
    monkeypatch.setenv(LIB_VARIABLE, "/nowhere")
    with Worker() as worker:
        assert worker.build.devices  # of the installed libraries
    with pytest.raises(LabError, match="--lib /nowhere"):
        builds.folder_of(None)


def test_a_trial_of_two_builds(build: Path, fake_worker: FakeWorker) -> None:
    variants = [("", {}), (f"--lib '{build}' -ngl 0", {"lib": str(build), "n_gpu_layers": 0})]
    plans = side_by_side.plan(fake_worker, variants, 1, prompt_len=[20], gen=4)  # type: ignore[arg-type]
    assert list(plans) == ["A: as it is", "B: --lib build/bin -ngl 0"]
    assert [plan.backend.lib for plan in plans.values()] == [None, str(build.resolve())]
    assert [plan.settings.lib for plan in plans.values()] == [None, builds.name_of(str(build))]


def test_two_builds_are_two_setups() -> None:
    other = make_record(settings=dataclasses.replace(SETTINGS, lib="build/bin 1a2b3c4d"))
    labels = [label for label, _ in table.setups(table.runs([make_record(), other]))]
    assert labels == ["tiny Q4_0, lib default", "tiny Q4_0, lib build/bin 1a2b3c4d"]
    groups = comparison.groups([make_record(), other])
    assert text_compare.differences(groups) == {"lib": ["default", "build/bin 1a2b3c4d"]}


def test_a_record_gives_the_option_back() -> None:
    record = make_record(settings=dataclasses.replace(SETTINGS, lib="build/bin 1a2b3c4d"))
    assert ("--lib", "build/bin") in options(record)


def test_ceilings_of_two_builds_are_kept_apart() -> None:
    rate = Rate("mul_mat", "Q4_0", "CPU", 8, 8, 1, 1, 100, 100, (1,))
    other = dataclasses.replace(MACHINE, lib="build/bin 1a2b3c4d")
    given = [Ceilings("2026-01-01T00:00:00Z", here, False, (rate,)) for here in (MACHINE, other)]
    for here in (MACHINE, other):
        known = probing.known(given, Where(here))
        assert known is not None and known.machine == here
    assert probing.known(given[:1], Where(other)) is None


def test_a_device_in_software_is_marked() -> None:
    vulkan = Device("Vulkan0", "llvmpipe (LLVM 15.0.6, 256 bits)", "gpu", 2 * 10**9)
    real = Device("Vulkan1", "AMD Radeon RX 7900 XTX (RADV NAVI31)", "gpu", 24 * 10**9)
    assert machine.describe_device(vulkan) == "llvmpipe (software; LLVM 15.0.6, 256 bits)"
    assert machine.describe_device(real) == real.description
    assert machine.describe_device(dataclasses.replace(vulkan, description="SwiftShader")) == "SwiftShader (software)"
    record = make_record(
        machine=dataclasses.replace(MACHINE, devices=(vulkan,)),
        settings=dataclasses.replace(SETTINGS, n_gpu_layers=99),
    )
    assert table.runs([record]).machine[0] == machine.label(record.machine, record.settings)
    assert "(software" in table.runs([record]).machine[0]
    assert json.dumps(machine.slug(machine.label(record.machine, record.settings))) == (
        '"llvmpipe-software-llvm-15.0.6-256-bits"'
    )


def test_the_title_of_cpu_against_device_is_of_two_devices() -> None:
    here = dataclasses.replace(MACHINE, devices=(Device("Vulkan0", "a GPU", "gpu"),))
    records = [
        make_record(machine=here, settings=dataclasses.replace(SETTINGS, n_gpu_layers=n), session=str(n))
        for n in (0, 99)
    ]
    assert "tiny Q4_0 on 2 devices" in plot_runs.plot_prefill(records).get_title()
    records[0] = dataclasses.replace(records[0], machine=dataclasses.replace(here, ram_bytes=8 * 10**9))
    assert "tiny Q4_0 on 2 machines" in plot_runs.plot_prefill(records).get_title()


def test_a_device_without_room_is_no_broken_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "last_warnings", lambda: "unable to allocate Vulkan0 buffer")
    assert "--n-gpu-layers" in (llama.load_error(Path("a.gguf")).hint)
    monkeypatch.setattr(native, "last_warnings", lambda: "invalid magic characters")
    assert "The file may be incomplete" in llama.load_error(Path("a.gguf")).hint
