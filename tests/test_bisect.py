"""lab bisect: a planted slowdown is found, none where none is, and every build is named."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import random
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.core.record import CRASHED, Record
from lab.core.results import read
from lab.engine.bindings import set_fields
from lab.errors import LabError
from lab.features.bisect import figures, measuring, names, package_index, series
from lab.features.bisect.figures import Bisected
from lab.features.bisect.lines import DECODE, FIGURES, PREFILL, BisectLine
from lab.features.bisect.search import (
    AGAIN,
    ENDS,
    FAST,
    FASTER,
    GOOD,
    LOOKS,
    SAME,
    SLOW,
    SLOWER,
    UNCLEAR,
    ComparedBlock,
    RegressionSearch,
    ratio_of,
)
from lab.features.bisect.section import document, section
from lab.features.bisect.sentences import sentences
from lab.process.setup import ProcessSetup
from lab.process.wire import Libraries
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.faults import LIBLLAMA

AT_LEAST = 0.03
FLAT = [1.0] * 8

# The search


def slow_from(place: int, size: float, n_builds: int = 8) -> list[float]:
    return [1.0] * place + [size] * (n_builds - place)


def searched(
    truth: Mapping[str, Sequence[float]],
    seed: int,
    noise: float = 0.015,
    disturbed: float = 0.0,
    noise_of: Callable[[int], float] | None = None,
) -> RegressionSearch:
    """A search on a machine with these times by figure and build.

    Each run differs by `noise`, and a share of `disturbed` runs takes 1.3 times as long.
    """
    chance = random.Random(seed)
    search = RegressionSearch(len(next(iter(truth.values()))), tuple(truth), AT_LEAST)
    upcoming = search.next_trial()
    while upcoming:
        times: dict[int, dict[str, float]] = {}
        for place in upcoming.places:
            spread = noise_of(place) if noise_of else noise
            times[place] = {}
            for figure, factors in truth.items():
                slow = 1.3 if chance.random() < disturbed else 1.0
                jitter = math.exp(chance.gauss(0, spread))
                times[place][figure] = slow * jitter * factors[max(GOOD, place)]
        search.take(ComparedBlock(upcoming.stage, times))
        upcoming = search.next_trial()
    return search


def proven_pairs(search: RegressionSearch) -> dict[str, tuple[int, int]]:
    return {
        figure: (halving.fast, halving.slow)
        for figure, halving in search.halvings.items()
        if figure in search.proven
    }


def planted(number: int) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
    """One of twenty series of eight builds, and the pairs that are to be found."""
    size = (1.03, 1.05, 1.1, 1.5)[number % 4]
    place = random.Random(number).randrange(1, 8)
    slow = (("prefill",), ("decode",), FIGURES)[number % 3]
    truth = {figure: slow_from(place, size) if figure in slow else FLAT for figure in FIGURES}
    return truth, dict.fromkeys(slow, (place - 1, place))


@pytest.mark.parametrize("disturbed", [0.0, 0.03])
def test_planted_slowdowns_are_found(disturbed: float) -> None:
    n_right = 0
    for number in range(20):
        truth, expected = planted(number)
        n_right += proven_pairs(searched(truth, number, disturbed=disturbed)) == expected
    assert n_right >= 19


@pytest.mark.parametrize("noise", [0.005, 0.015, 0.04])
def test_nothing_is_found_where_nothing_is_slower(noise: float) -> None:
    for seed in range(60):
        search = searched({PREFILL: FLAT, DECODE: FLAT}, seed, noise)
        assert SLOWER not in search.ends.values()
        assert search.next_trial() is None


def test_wrong_answers_stay_below_the_promised_rate() -> None:
    """With noise near the limit of what is looked for, a wrong pair is rarer than 5 %."""
    n_wrong = 0
    for seed in range(200):
        place = 1 + seed % 7
        search = searched({DECODE: slow_from(place, 1.04)}, seed, noise=0.03)
        (pair,) = proven_pairs(search).values() or [(place - 1, place)]
        n_wrong += not pair[0] < place <= pair[1]
    assert n_wrong <= 10


def test_two_figures_break_at_different_builds() -> None:
    truth = {PREFILL: slow_from(2, 1.2), DECODE: slow_from(6, 1.1)}
    assert proven_pairs(searched(truth, 1)) == {PREFILL: (1, 2), DECODE: (5, 6)}


def test_a_build_that_is_not_clear_is_left_out_with_its_neighbours() -> None:
    search = searched(
        {DECODE: slow_from(5, 1.1)}, 3, noise_of=lambda place: 0.6 if place == 4 else 0.01
    )
    assert search.unclear[DECODE] == {4}
    assert proven_pairs(search) == {DECODE: (3, 5)}
    assert search.left_out(DECODE) == [4]


def test_a_faster_end_is_told_and_ends_the_search() -> None:
    search = searched({DECODE: [1.0, 1.0, 0.8]}, 1)
    assert search.ends == {DECODE: FASTER}
    assert search.halvings == {}


def test_a_slowdown_in_two_steps_names_one_of_them() -> None:
    truth = [1.0, 1.0, 1.1, 1.1, 1.1, 1.25, 1.25, 1.25]
    for seed in range(10):
        pair = proven_pairs(searched({PREFILL: truth}, seed))[PREFILL]
        assert pair in ((1, 2), (4, 5))


def test_no_interval_before_the_first_look() -> None:
    assert ratio_of([1.0] * (LOOKS[0] - 1), [2.0] * (LOOKS[0] - 1), 0.01) is None
    search = RegressionSearch(2, [DECODE], AT_LEAST)
    search.take(ComparedBlock(ENDS, {place: {DECODE: 1.0} for place in (AGAIN, 0, 1)}))
    assert search.ends == {}
    assert search.ends_ratio(1, DECODE) is None


def test_an_interval_misses_the_truth_at_most_as_often_as_it_says() -> None:
    chance = random.Random(5)
    n_above = 0
    for _ in range(400):
        pairs = [
            (math.exp(chance.gauss(0, 0.02)), math.exp(chance.gauss(0, 0.02)))
            for _ in range(9)
        ]
        ratio = ratio_of([first for first, _ in pairs], [second for _, second in pairs], 0.05)
        n_above += ratio is not None and ratio.low > 1
    assert n_above <= 0.05 * 400 + 3 * math.sqrt(0.05 * 0.95 * 400)


# Names

BUILD_NUMBERS = """b9518 B9518 llama-b9518-bin-ubuntu-x64 llama-b9518 llama_b9518 build-9518
build_9518 build9518 Build-9518 llama.cpp-b9518 llama.cpp-9518 llama-cpp-b9518 llamacpp-b9518
llama-b9518-bin-win-cuda-12.4-x64 llama-b9518-bin-win-avx2-x64 llama-b9518-bin-macos-arm64
llama-b9518-bin-ubuntu-vulkan-x64 llama-b9518-bin-ubuntu-arm64 llama-b9518-bin-win-hip-x64-gfx1030
llama-b9518-bin-win-sycl-x64 llama-b9518-bin-win-vulkan-x64 llama-b9518-bin-win-cpu-x64
llama-release-dll-b9518-11eb9fb-bin-win-cublas-cu12.2.0-x64 master-b9518-abc1234 9518 r9518.abc1234
b9518-d643bb2c 9518-d643bb2c version-9518 release-b9518 b9518-good b9518_bad old-b9518 9518_cuda
llama.cpp_b9518 llama.cpp.b9518 cudart-llama-b9518 ik-b9518 lemonade-b9518-gfx1151 bin-b9518
llama-cpp-9518 llama-9518 rev9518 rev-9518 release-9518 cpu-b9518 b9518-avx512 b9518.cpu
unsloth-b9518 rocm-b9518-gfx1100 b9518-linux b9518-x64 llama-b9518-xcframework b9518-native
llama-b9518-bin-310p-openEuler-x86 llama-b9518-bin-win-opencl-adreno-arm64 b-9518 b_9518"""
WITH_SPACES = [
    "version: 9518 (d643bb2c)",
    "build: f470bc36 (9518)",
    "llama b9518",
    "build 9518",
]
DATES = """2026-05-23 20260523 llama-2026-05-23 llama.cpp-20260523 build-2026.05.23 2026_05_23
llama-2026-05-23-cuda master-20260523 nightly-2026-05-23 llama.cpp_2026-05-23"""
SHORT_DATES = ["26.05.23", "llama-26.05.23", "26-05-23"]
VERSIONS = """0.3.20 v0.3.20 V0.3.20 llama-cpp-python==0.3.20 llama-cpp-python-0.3.20
llama_cpp_python-0.3.20 llama_cpp_python-0.3.20.tar.gz llama-cpp-python@0.3.20 ==0.3.20
llama_cpp_python-0.3.20-cp311-cp311-linux_x86_64.whl llama-cpp-python_0.3.20
LLAMA-CPP-PYTHON==0.3.20 llama.cpp.python-0.3.20 -0.3.20 llama-cpp-python=0.3.20"""
NO_NUMBER = """f470bc36 a2b5057a build-android-f470bc36 master-b9b7d94 good bad old new cuda-12.4
ec456322 llama.cpp build bin x64 avx512 sm_86 gfx1151 ollama koboldcpp latest main master"""


def test_ordinary_names_are_read() -> None:
    for name in [*BUILD_NUMBERS.split(), *WITH_SPACES]:
        assert names.build_number(name) == (9518,), name
    for name in DATES.split():
        assert names.date(name) == (2026, 5, 23), name
        assert names.build_number(name) is None, name
    for name in SHORT_DATES:
        assert names.dotted_number(name) == (26, 5, 23), name
    for name in VERSIONS.split():
        assert names.version_of(name) == "0.3.20", name
    for name in NO_NUMBER.split():
        assert names.build_number(name) is None, name
        assert names.version_of(name) is None, name


def test_names_of_one_kind_have_one_flavour() -> None:
    kinds = [
        ("llama-b9100-bin-ubuntu-x64", "llama-b9518-bin-ubuntu-x64"),
        ("b9100", "b9518"),
        ("b4567-d643bb2c", "b4570-11eb9fb"),
        ("llama-2026-05-23", "llama-2026-06-01"),
        ("26.05.23", "26.06.22"),
    ]
    for first, second in kinds:
        assert names.flavour(first) == names.flavour(second)
    vulkan = names.flavour("llama-b9518-bin-ubuntu-vulkan-x64")
    assert vulkan != names.flavour("llama-b9518-bin-ubuntu-x64")


def test_an_order_needs_a_number_for_each() -> None:
    assert (
        names.order_of(["b9100", "b9204", "llama-b9518-bin-ubuntu-x64"]) is names.build_number
    )
    assert names.order_of(["26.05.23", "26.06.22"]) is names.dotted_number
    assert names.order_of(["2026-05-23", "20260601"]) is names.date
    assert names.order_of(["f470bc36", "8f47e25f"]) is None
    assert names.order_of(["b9100", "f470bc36"]) is None
    assert names.order_of(["llama-b9100-cpu", "llama-b9100-vulkan"]) is None


# The series


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., Path]:
    """Makes folders with a file libllama; returns the folder that they are in."""

    def make(*labels: str, below: str = "") -> Path:
        for label in labels:
            folder = tmp_path / "builds" / label / below
            folder.mkdir(parents=True)
            (folder / LIBLLAMA).write_bytes(b"")
        return tmp_path / "builds"

    return make


def test_folders_are_in_the_order_of_their_numbers(folders: Callable[..., Path]) -> None:
    parent = folders("b10002", "b9100", "b9518", "b9204", "b900", below="build/bin")
    candidates = series.find(str(parent / "b9100"), str(parent / "b10002"), [str(parent)])
    assert candidates.labels == ("b9100", "b9204", "b9518", "b10002")
    backwards = series.find(str(parent / "b9518"), str(parent / "b9100"))
    assert backwards.labels == ("b9518", "b9204", "b9100")
    assert candidates.builds[1].folder == (parent / "b9204" / "build" / "bin").resolve()


def test_folders_of_another_kind_and_archives_are_noted(folders: Callable[..., Path]) -> None:
    labels = [f"llama-b{number}-bin-ubuntu-x64" for number in (1000, 2000, 3000)]
    parent = folders(*labels, "llama-b2000-bin-ubuntu-vulkan-x64")
    (parent / "llama-b2500-bin-ubuntu-x64.zip").write_bytes(b"PK")
    (parent / "notes").mkdir()
    candidates = series.find(str(parent / labels[0]), str(parent / labels[2]))
    assert candidates.labels == tuple(labels)
    notes = " ".join(candidates.notes)
    assert "vulkan" in notes
    assert "b2500" in notes


def test_folders_without_an_order_can_be_listed(folders: Callable[..., Path]) -> None:
    parent = folders("f470bc36", "8f47e25f", "a2b5057a")
    ends = [str(parent / "f470bc36"), str(parent / "a2b5057a")]
    with pytest.raises(LabError, match="order of these 3 folders is not known") as problem:
        series.find(ends[0], ends[1])
    assert "--among" in problem.value.hint
    among = [str(parent / label) for label in ("f470bc36", "8f47e25f", "a2b5057a")]
    assert series.find(ends[0], ends[1], among).labels == ("f470bc36", "8f47e25f", "a2b5057a")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b9518", "no build numbers"),
        ("f470bc36", "A commit must be built"),
        ("ollama-0.12.3x", "not Ollama"),
        ("nowhere", "no version such as"),
        ("README.md", "A build is a folder"),
        ("tests", "contains libllama"),
    ],
)
def test_what_is_no_build_is_said(text: str, reason: str) -> None:
    with pytest.raises(LabError, match=reason):
        series.named(text, "--good")


def test_a_folder_of_ollama_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "lib" / "ollama"
    folder.mkdir(parents=True)
    (folder / "libggml-base.so").write_bytes(b"")
    with pytest.raises(LabError, match="those of Ollama have none"):
        series.named(str(tmp_path), "--bad")


def test_versions_are_those_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    index = [f"0.3.{number}" for number in range(8, 13)]
    monkeypatch.setattr(package_index, "available", lambda: index)
    assert series.find("v0.3.9", "0.3.12").labels == ("0.3.9", "0.3.10", "0.3.11", "0.3.12")
    assert series.find("0.3.12", "0.3.9").labels[0] == "0.3.12"
    assert series.find("0.3.8", "0.3.12", ["0.3.10,0.3.11"]).labels[1] == "0.3.10"
    with pytest.raises(LabError, match=r"no version 0\.12\.3") as problem:
        series.find("0.3.8", "0.12.3")
    assert "Ollama" in problem.value.hint
    with pytest.raises(LabError, match="the same build"):
        series.find("0.3.9", "v0.3.9")
    with pytest.raises(LabError, match="no version of llama-cpp-python"):
        series.find("0.3.8", "0.3.12", ["b9518"])


def test_without_the_index_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline() -> list[str]:
        raise LabError("The package index cannot be asked.", "")

    monkeypatch.setattr(package_index, "available", offline)
    monkeypatch.setattr(package_index, "built", lambda: ["0.3.9", "0.3.12"])
    candidates = series.find("0.3.9", "0.3.12")
    assert candidates.labels == ("0.3.9", "0.3.12")
    assert "Only versions in the cache" in candidates.notes[0]
    with pytest.raises(LabError, match="cannot be asked"):
        series.find("0.3.9", "0.3.13")


# The package index


def test_the_options_of_a_build_are_those_of_the_lab() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())
    settings = project["tool"]["uv"]["config-settings-package"]["llama-cpp-python"]
    expected = {f"cmake.define.{name}": value for name, value in package_index.OPTIONS.items()}
    rules = settings.pop("cmake.define.CMAKE_USER_MAKE_RULES_OVERRIDE_CXX")
    assert settings == expected
    assert package_index.rules().name == f"{rules}.cmake"
    assert package_index.rules().exists()


def fake_pip(folder: Path, script: str) -> tuple[str, ...]:
    path = folder / "pip"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


def test_versions_of_the_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = "llama-cpp-python (0.3.10)\nAvailable versions: 0.3.10, 0.3.9, 0.3.9rc1, 0.2.90"
    command = fake_pip(tmp_path, f"echo '{listing}'")
    monkeypatch.setattr(package_index, "pip", lambda: command)
    assert package_index.available() == ["0.2.90", "0.3.9", "0.3.10"]
    broken = fake_pip(tmp_path, "echo 'ERROR: No matching distribution' >&2; exit 1")
    monkeypatch.setattr(package_index, "pip", lambda: broken)
    with pytest.raises(LabError, match="No matching distribution"):
        package_index.available()


def test_a_build_goes_into_the_cache_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path / "cache"))
    script = f"""
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/llama_cpp/lib"; touch "$2/llama_cpp/lib/{LIBLLAMA}"
echo '[1/2] Building'; echo '[2/2] Linking'"""
    command = fake_pip(tmp_path, script)
    monkeypatch.setattr(package_index, "pip", lambda: command)
    seen: list[tuple[int, int]] = []
    path = package_index.build("0.3.9", lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert package_index.built() == ["0.3.9"]
    assert package_index.build("0.3.9", lambda done, total: seen.append((0, 0))) == path
    assert len(seen) == 2
    failing = fake_pip(tmp_path, "echo 'x.cpp: error: no such thing'; exit 1")
    monkeypatch.setattr(package_index, "pip", lambda: failing)
    with pytest.raises(LabError, match="no such thing"):
        package_index.build("0.3.8", lambda done, total: None)
    assert package_index.built() == ["0.3.9"]


def test_folders_of_killed_builds_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path))
    for name in ("building-killed", "building-now", "llama-cpp-python-0.3.9-12345678"):
        (package_index.folder() / name / "package").mkdir(parents=True)
    for name in ("building-killed", "llama-cpp-python-0.3.9-12345678"):
        os.utime(package_index.folder() / name, (0, 0))
    package_index.remove_abandoned()
    left = {path.name for path in package_index.folder().iterdir()}
    assert left == {"building-now", "llama-cpp-python-0.3.9-12345678"}


# What a build runs with


def test_a_child_runs_the_bindings_of_a_package(tmp_path: Path) -> None:
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    shutil.copytree(installed, tmp_path / "llama_cpp")
    (info,) = installed.parent.glob("llama_cpp_python-*.dist-info")
    shutil.copytree(info, tmp_path / "llama_cpp_python-9.8.7.dist-info")
    metadata = tmp_path / "llama_cpp_python-9.8.7.dist-info" / "METADATA"
    text = metadata.read_text()
    version = info.name.removeprefix("llama_cpp_python-").removesuffix(".dist-info")
    metadata.write_text(text.replace(f"Version: {version}", "Version: 9.8.7", 1))
    with Worker() as worker:
        worker.use(ProcessSetup(package=str(tmp_path)))
        assert worker.build.llama_cpp_python == "9.8.7"
        for path in worker.libraries().paths:
            assert Path(path).is_relative_to(tmp_path)


def test_a_field_that_a_version_lacks_is_refused() -> None:
    class Old(ctypes.Structure):
        _fields_ = (("n_ctx", ctypes.c_int),)

    params = Old()
    set_fields(params, n_ctx=5)
    assert params.n_ctx == 5
    with pytest.raises(LabError, match=r"has no Old\.flash_attn_type"):
        set_fields(params, flash_attn_type=1)


# A session


LABELS = ("b1", "b2", "b3", "b4", "b5")


class BuildWorker(FakeWorker):
    """Runs builds whose decode is slow from b4 on; b3 does not load."""

    slow_from = "b4"
    broken: tuple[str, ...] = ()

    def use(self, setup: ProcessSetup) -> None:
        self.setup = setup
        label = setup.lib or ""
        jitter = random.Random(f"{label} {random.random()}").uniform(0.99, 1.01)
        factor = 1.2 if label >= self.slow_from else 1.0
        self.decode_ms = lambda: 10 * factor * jitter

    def libraries(self) -> Libraries:
        if self.setup.lib in self.broken:
            raise LabError(f"{self.setup.lib} does not fit.", "")
        value = "0" if (self.setup.lib or "") < self.slow_from else "1"
        name = "the default of llama_context_params"
        return Libraries("1.0", (), {f"{name}.swa_full": value, f"{name}.n_ctx": "512"})


@pytest.fixture
def session(
    simulated: None, undisturbed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[Any]]:
    """Runs a search over LABELS with BuildWorker; returns its lines."""
    random.seed(7)
    monkeypatch.setattr(series, "setup_of", lambda build, watch: ProcessSetup(lib=build.label))

    def run(**changes: Any) -> list[Any]:
        labels = changes.pop("labels", LABELS)
        builds = tuple(series.SeriesBuild(label, folder=Path(label)) for label in labels)
        base = make_plan(BuildWorker(), "20", 5, 1, str(tmp_path / "tiny.gguf"))
        plan = measuring.BisectPlan(
            series.Series(builds), base, FIGURES, AT_LEAST, changes.pop("budget_s", 1e9)
        )
        path = tmp_path / "session.jsonl"
        return list(measuring.execute(plan, path, lambda status: None, BuildWorker, **changes))

    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    return run


def result_of(path: Path) -> Bisected:
    contents = read([path])
    (result,) = figures.of_sessions(contents.findings, contents.records)
    return result


def test_a_session_finds_the_build(session: Callable[..., list[Any]], tmp_path: Path) -> None:
    lines = session()
    result = figures.bisected(lines)
    assert proven_pairs(result.search) == {DECODE: (2, 3)}
    assert result.search.ends[PREFILL] == SAME
    assert result.search.verdicts[DECODE, 2] == FAST
    assert result.search.verdicts[DECODE, 3] == SLOW
    answer = " ".join(sentences(result))
    assert "Decode became slower in b4" in answer
    assert "No regression from b1 to b5: prefill" in answer
    shown = section(result)
    assert any("llama_context_params.swa_full is 1 instead of 0" in s for s in shown.sentences)
    issue_text = str(document(result)["issue_text"])
    assert "| b4 |" in issue_text
    again = result_of(tmp_path / "session.jsonl")
    assert document(again) == document(result)


@pytest.mark.usefixtures("undrawn")
def test_the_results_are_shown_compared_and_drawn(
    session: Callable[..., list[Any]], tmp_path: Path
) -> None:
    session()
    path = tmp_path / "session.jsonl"
    status, out, err = run_lab("show", path)
    assert status == 0, err
    assert "Decode became slower in b4" in out
    status, out, err = run_lab("show", path, "--json")
    assert status == 0, err
    (search,) = json.loads(out)["searches"]
    assert search["pairs"][0]["slow"] == "b4"
    status, out, err = run_lab("compare", path)
    assert status == 0, err
    assert "003 b4 is slower than 000 b1" in out
    status, out, err = run_lab("plot", path)
    assert status == 0, err
    assert (tmp_path / "session-bisect.png").exists()
    status, out, err = run_lab("report", path)
    assert status == 0, err


def test_a_build_that_does_not_run_is_left_out(
    session: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(BuildWorker, "broken", ("b3",))
    result = figures.bisected(session())
    assert proven_pairs(result.search) == {DECODE: (1, 3)}
    answer = " ".join(sentences(result))
    assert "between b2 and b4" in answer
    assert "b3 does not run (b3 does not fit)" in answer
    assert document(result_of(tmp_path / "session.jsonl")) == document(result)


def test_an_end_that_does_not_run_ends_the_search(
    session: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BuildWorker, "broken", ("b5",))
    with pytest.raises(LabError, match="b5 cannot be measured: b5 does not fit"):
        session()


def test_a_spent_budget_leaves_what_is_known(session: Callable[..., list[Any]]) -> None:
    ticks = iter(range(10_000))
    result = figures.bisected(session(budget_s=4, clock=lambda: float(next(ticks))))
    assert not result.is_finished
    assert "Not decided from b1 to b5" in sentences(result)[0]
    ticks = iter(range(10_000))
    result = figures.bisected(session(budget_s=9, clock=lambda: float(next(ticks))))
    assert any("--budget" in sentence for sentence in sentences(result))


@pytest.mark.parametrize(
    ("run_s", "n_runs"),
    [(0.0, 6), (0.3, 6), (0.8, 4), (1.9, 2), (3.0, 2), (9.0, 1), (300.0, 1)],
)
def test_short_runs_are_repeated_in_a_block(run_s: float, n_runs: int) -> None:
    assert measuring.turns(run_s) == n_runs


def test_a_block_with_a_failed_run_does_not_count(session: Callable[..., list[Any]]) -> None:
    lines = session()
    n_blocks = len(figures.bisected(lines).search.blocks)
    runs = [line for line in lines if isinstance(line, Record)]
    last = next(line for line in reversed(runs) if line.run.is_timed)
    lines.append(dataclasses.replace(last, run=dataclasses.replace(last.run, status=CRASHED)))
    assert len(figures.bisected(lines).search.blocks) == n_blocks - 1


def test_impossible_searches_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"figure": DECODE, "gen": 1}, "two generated tokens"),
        ({"at_least": 0.001}, "at-least"),
        ({"lib": "/x"}, "each build has its own libraries"),
        ({"budget": "3"}, "budget"),
    ]
    for changes, reason in cases:
        with pytest.raises(LabError, match=reason):
            measuring.plan(FakeWorker(), "0.3.1", "0.3.2", **changes)


def test_lines_of_strangers_are_checked() -> None:
    fields = {"session": "s", "machine": None, "model": None, "settings": None}
    for change in ({"builds": ("a",)}, {"figures": ("speed",)}, {"at_least": -1.0}):
        values = {"builds": ("a", "b"), "figures": FIGURES, "at_least": 0.1, **change}
        with pytest.raises(ValueError, match="a search"):
            BisectLine(started_at="", **fields, **values)  # type: ignore[arg-type]


def test_a_dry_run_lists_the_builds(folders: Callable[..., Path]) -> None:
    parent = folders("b1000", "b2000", "b3000")
    ends = ["--good", parent / "b1000", "--bad", parent / "b3000"]
    status, out, err = run_lab("bisect", *ends, "--dry-run")
    assert status == 0, err
    assert out.index("b1000") < out.index("b2000") < out.index("b3000")
    assert "measures up to 3 of them" in out
    status, out, _ = run_lab("bisect", *ends, "--dry-run", "--json")
    assert status == 0
    assert json.loads(out)["builds"] == ["b1000", "b2000", "b3000"]


def test_verdicts_need_proof() -> None:
    noisy = searched({DECODE: slow_from(1, 1.02, 2)}, 1, noise=0.2)
    assert noisy.ends == {DECODE: UNCLEAR}
