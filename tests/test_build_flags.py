"""llama.cpp is built without its library `common`, and with the options that GCC needs for AMX.

Without them GCC drops stores to the tiles' settings.
"""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RULES = ROOT / "llama_build" / "mini_lab_llama_build" / "mini-lab-llama-build.cmake"

TOP = """
cmake_minimum_required(VERSION 3.21)
project(llama_cpp)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "Build llama.cpp common library" FORCE)
add_subdirectory(part)
"""
PART = """
cmake_minimum_required(VERSION 3.14...3.28)
project(part C CXX)
option(LLAMA_BUILD_COMMON "llama: build common utils library" OFF)
add_library(part STATIC a.cpp b.c)
if (LLAMA_BUILD_COMMON)
    add_library(common STATIC common.cpp)
endif()
"""


def configured(folder: Path, *arguments: str, cmake: str = "cmake") -> dict[str, str]:
    """The compile command of each file of a small CMake project.

    It has the options and versions of llama-cpp-python and llama.cpp, and is configured with our
    CMake file, as our builds are.
    """
    (folder / "CMakeLists.txt").write_text(TOP)
    part = folder / "part"
    part.mkdir(exist_ok=True)
    (part / "CMakeLists.txt").write_text(PART)
    (part / "a.cpp").write_text("int a() { return 1; }\n")
    (part / "b.c").write_text("int b(void) { return 1; }\n")
    (part / "common.cpp").write_text("int c() { return 1; }\n")
    ours = [
        f"-DCMAKE_MODULE_PATH={RULES.parent}",
        f"-DCMAKE_USER_MAKE_RULES_OVERRIDE_CXX={RULES.stem}",
    ]
    folders = [
        "-S",
        str(folder),
        "-B",
        str(folder / "build"),
    ]
    options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *ours, *arguments]
    subprocess.run(
        [cmake, *folders, *options],
        check=True,
        capture_output=True,
    )
    entries = json.loads((folder / "build" / "compile_commands.json").read_text())
    return {Path(entry["file"]).name: entry["command"] for entry in entries}


def test_the_settings_of_uv_lead_to_the_cmake_file() -> None:
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    (helper,) = uv["extra-build-dependencies"]["llama-cpp-python"]
    folder = ROOT / uv["sources"][helper]["path"]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == helper
    (package,) = project["entry-points"]["cmake.module"].values()
    settings = uv["config-settings-package"]["llama-cpp-python"]
    module = settings["cmake.define.CMAKE_USER_MAKE_RULES_OVERRIDE_CXX"]
    assert folder / package / f"{module}.cmake" == RULES


def gcc() -> tuple[str, int]:
    """GCC for x86-64, and its major version."""
    compiler = shutil.which("g++")
    if not compiler or not shutil.which("cmake"):
        pytest.skip("g++ or cmake is not installed")
    command = [compiler, "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    if "__x86_64__" not in macros or "__clang__" in macros:
        pytest.skip(f"{compiler} is not a GCC for x86-64")
    return compiler, int(re.findall(r"__GNUC__ (\d+)", macros)[0])


@pytest.mark.parametrize("flags", ["", "-O1"])
def test_cmake_gives_the_options_to_gcc_before_15_for_cpp_only(
    flags: str, tmp_path: Path
) -> None:
    compiler, version = gcc()
    options = {"-fno-dse", "-fno-tree-dse"}
    assert set(re.findall(r":(-f[\w-]+)>", RULES.read_text())) == options

    arguments = [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={flags}"]
    commands = configured(tmp_path, *arguments)
    cpp_options = set(commands["a.cpp"].split())
    if version < 15:
        assert options <= cpp_options
    else:
        assert not options & cpp_options
    assert not options & set(commands["b.c"].split())
    assert flags in commands["a.cpp"]


def test_common_is_not_built_although_llama_cpp_python_forces_it_on(tmp_path: Path) -> None:
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    with_our_file = configured(tmp_path)
    assert {"a.cpp", "b.c"} == set(with_our_file)


def test_it_would_be_built_without_the_cmake_file(tmp_path: Path) -> None:
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    nothing = tmp_path / f"{RULES.stem}.cmake"
    nothing.touch()
    commands = configured(tmp_path, f"-DCMAKE_MODULE_PATH={tmp_path}")
    assert set(commands) == {"a.cpp", "b.c", "common.cpp"}
