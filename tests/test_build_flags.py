"""llama.cpp is built with the options that GCC needs for AMX.

Without them it drops stores to the tiles' settings.
"""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIX = ROOT / "gcc_amx_fix" / "mini_lab_gcc_amx_fix" / "mini-lab-gcc-amx-fix.cmake"


def configured(folder: Path, *arguments: str, cmake: str = "cmake") -> dict[str, str]:
    """The compile command of each file of a small CMake project.

    It is configured with our CMake file, as our builds are.
    """
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(top)\nadd_subdirectory(part)\n"
    )
    part = folder / "part"
    part.mkdir(exist_ok=True)
    (part / "CMakeLists.txt").write_text(
        "project(part C CXX)\nadd_library(part STATIC a.cpp b.c)\n"
    )
    (part / "a.cpp").write_text("int a() { return 1; }\n")
    (part / "b.c").write_text("int b(void) { return 1; }\n")
    ours = [
        f"-DCMAKE_MODULE_PATH={FIX.parent}",
        f"-DCMAKE_USER_MAKE_RULES_OVERRIDE_CXX={FIX.stem}",
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
    assert folder / package / f"{module}.cmake" == FIX


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
    assert set(re.findall(r":(-f[\w-]+)>", FIX.read_text())) == options

    arguments = [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={flags}"]
    commands = configured(tmp_path, *arguments)
    cpp_options = set(commands["a.cpp"].split())
    if version < 15:
        assert options <= cpp_options
    else:
        assert not options & cpp_options
    assert not options & set(commands["b.c"].split())
    assert flags in commands["a.cpp"]
