"""llama.cpp is built with the options that GCC needs for AMX: without them it drops stores to the tiles' settings."""

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
    """The compile command of each file of a small CMake project, configured with our CMake file as our builds are."""
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
    ours = [f"-DCMAKE_MODULE_PATH={FIX.parent}", f"-DCMAKE_USER_MAKE_RULES_OVERRIDE_CXX={FIX.stem}"]
    command = [
        cmake,
        "-S",
        str(folder),
        "-B",
        str(folder / "build"),
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
    ]
    subprocess.run([*command, *ours, *arguments], check=True, capture_output=True)
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


@pytest.mark.parametrize("own", [(), ("-DCMAKE_CXX_FLAGS=-O1",)])
def test_cmake_gives_the_options_to_gcc_before_15_for_cpp_only(
    own: tuple[str, ...], tmp_path: Path
) -> None:
    gcc = shutil.which("g++")
    if not gcc or not shutil.which("cmake"):
        pytest.skip("g++ or cmake is not installed")
    about = subprocess.run(
        [gcc, "-dM", "-E", "-x", "c++", "/dev/null"], check=True, capture_output=True, text=True
    ).stdout
    if "__x86_64__" not in about or "__clang__" in about:
        pytest.skip(f"{gcc} is not a GCC for x86-64")
    options = re.findall(r":(-f[\w-]+)>", FIX.read_text())
    major = int(re.findall(r"__GNUC__ (\d+)", about)[0])
    commands = configured(tmp_path, f"-DCMAKE_CXX_COMPILER={gcc}", *own)
    given = [option for option in options if option in commands["a.cpp"].split()]
    assert options == ["-fno-dse", "-fno-tree-dse"] and given == (options if major < 15 else [])
    assert not any(option in commands["b.c"] for option in options)
    assert not own or "-O1" in commands["a.cpp"]
