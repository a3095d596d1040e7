"""llama.cpp is built so that its AMX code is right, seen in object code: no CPU with AMX is needed."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import tile_stores
from tests.tile_stores import FIX, ROOT, our_options


@pytest.fixture(scope="module")
def gcc() -> str:
    """A GCC that compiles for x86-64 CPUs with AMX."""
    compiler = shutil.which("g++")
    if not compiler or not shutil.which("objdump"):
        pytest.skip("g++ or objdump is not installed")
    macros = subprocess.run(
        [compiler, "-march=sapphirerapids", "-dM", "-E", "-x", "c++", "/dev/null"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    if "__AMX_INT8__" not in macros or "__clang__" in macros:
        pytest.skip(f"{compiler} is not a GCC for x86-64 with AMX (GCC 11 or newer)")
    return compiler


def bytes_lost(gcc: str, options: list[str], folder: Path) -> set[int]:
    source = folder / "tiles.cpp"
    source.write_text(tile_stores.SOURCE)
    (lost,) = tile_stores.lost(tile_stores.compile_object([gcc], source, options, folder))
    return lost


def test_with_our_options_all_64_bytes_of_the_tile_configuration_are_stored(gcc: str, tmp_path: Path) -> None:
    assert our_options() == ["-fno-dse", "-fno-tree-dse"]
    assert bytes_lost(gcc, our_options(), tmp_path) == set()


def test_without_our_options_gcc_removes_stores(gcc: str, tmp_path: Path) -> None:
    text = subprocess.run(
        [gcc, "-march=sapphirerapids", "-E", "-include", "immintrin.h", "-x", "c++", "/dev/null"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    if not re.search(r"ldtilecfg.*\(const void \*\*\)", text):
        pytest.skip("this GCC's _tile_loadconfig declares all that it reads: the options are not needed here")
    assert len(bytes_lost(gcc, [], tmp_path)) >= 8


def test_the_settings_of_uv_lead_to_the_cmake_file() -> None:
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    (helper,) = uv["extra-build-dependencies"]["llama-cpp-python"]
    folder = ROOT / uv["sources"][helper]["path"]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == helper
    (package,) = project["entry-points"]["cmake.module"].values()
    settings = uv["config-settings-package"]["llama-cpp-python"]
    module = settings["cmake.define.CMAKE_USER_MAKE_RULES_OVERRIDE_CXX"]
    assert folder / package / f"{module}.cmake" == FIX


@pytest.mark.parametrize("own", [(), ("-DCMAKE_CXX_FLAGS=-O1",)])
def test_cmake_gives_the_options_to_gcc_before_15_for_cpp_only(gcc: str, own: tuple[str, ...], tmp_path: Path) -> None:
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    commands = tile_stores.configured(tmp_path, f"-DCMAKE_CXX_COMPILER={gcc}", *own)
    given = [option for option in our_options() if option in commands["a.cpp"].split()]
    assert given == (our_options() if tile_stores.gcc_major(gcc) < 15 else [])
    assert not any(option in commands["b.c"] for option in our_options())
    assert not own or "-O1" in commands["a.cpp"]
