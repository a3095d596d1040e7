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


ZEROS = "   1:\tvpxor  %xmm0,%xmm0,%xmm0\n   c:\tvmovdqa64 %zmm0,-0x40(%rsp)\n"
LOAD = "  39:\tldtilecfg -0x40(%rsp)\n"


@pytest.mark.parametrize(
    ("listing", "lost"),
    [
        (LOAD, set(range(64))),
        (ZEROS + LOAD, tile_stores.SET),
        (ZEROS + "  14:\tmovb   $0x1,-0x40(%rsp)\n" + LOAD, tile_stores.SET - {0}),
        ("  10:\tvmovdqa64 0x0(%rip),%zmm1\n  14:\tvmovdqa64 %zmm1,-0x40(%rsp)\n" + LOAD, set()),
        (
            "  10:\tmov    %rax,-0x10(%rsp)\n  14:\tmov    %r9d,-0x40(%rsp)\n" + LOAD,
            set(range(4, 48)) | set(range(56, 64)),
        ),
        ("  14:\tvmovdqa %xmm1,-0x40(%rsp)\n" + ZEROS.replace("-0x40", "0x0") + LOAD, set(range(16, 64))),
        ("  10:\tlea    -0x80(%rbp),%rax\n  14:\tvmovdqu8 %ymm1,0x20(%rax)\n  18:\tldtilecfg (%rax)\n", set(range(32))),
        ("  14:\tvmovdqu8 %zmm1,-0x80(%rbp)\n  18:\tlea    -0x80(%rbp),%rax\n  1c:\tldtilecfg (%rax)\n", set()),
    ],
)
def test_what_is_lost_is_read_from_a_listing(listing: str, lost: set[int]) -> None:
    assert tile_stores.lost_in(listing.splitlines()) == [lost]
