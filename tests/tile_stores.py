"""What an object file stores before it loads the configuration of AMX tiles, and the compiler options of our builds.

`ldtilecfg` reads 64 bytes. A compiler that takes it to read fewer removes the stores to the others (gcc_amx_fix/). The
object code shows that, without a CPU that has AMX.
"""

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIX = ROOT / "gcc_amx_fix" / "mini_lab_gcc_amx_fix" / "mini-lab-gcc-amx-fix.cmake"

SOURCE = """
#include <immintrin.h>

struct Configuration {  // Intel 64 and IA-32 Architectures Software Developer's Manual, LDTILECFG
    unsigned char palette = 0, start_row = 0, reserved[14] = {};
    unsigned short bytes_per_row[16] = {};
    unsigned char rows[16] = {};
};

void configure_tiles() {
    alignas(64) Configuration tiles = {};
    tiles.palette = 1;
    for (int i = 0; i < 8; ++i) {
        tiles.rows[i] = 16;
        tiles.bytes_per_row[i] = 64;
    }
    _tile_loadconfig(&tiles);
}
"""
"""The pattern of llama.cpp's ggml-cpu/amx/mmq.cpp: a struct of 64 bytes on the stack, filled and loaded."""

SET = {0, *range(16, 32, 2), *range(48, 56)}
"""Which of the 64 bytes are not 0: the palette, and bytes per row and rows of the first 8 tiles."""

_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t(?P<name>\w+)\s*(?P<operands>\S*)")
_ADDRESS = re.compile(r"^(?P<offset>-?0x[0-9a-f]+)?\((?P<base>%\w+)\)$")
_SUFFIXES = {"b": 1, "w": 2, "l": 4, "q": 8}
_PARTS_OF_VECTORS = {"movd": 4, "movss": 4, "movq": 8, "movsd": 8, "movlps": 8, "movlpd": 8, "movhps": 8, "movhpd": 8}


def our_options() -> list[str]:
    """The options that our builds give to GCC, read from the CMake file."""
    return re.findall(r":(-f[\w-]+)>", FIX.read_text())


def gcc_major(compiler: str) -> int:
    """The major version of a GCC."""
    version = subprocess.run([compiler, "-dumpversion"], check=True, capture_output=True, text=True).stdout
    return int(version.split(".")[0].split("-")[0])  # MinGW's says 12-win32


def compile_object(compiler: list[str], source: Path, options: list[str], folder: Path) -> Path:
    """`source` compiled for a CPU with AMX, as llama.cpp's release builds are."""
    built = folder / f"{source.stem}.o"
    fixed = ["-O3", "-DNDEBUG", "-std=gnu++17", "-fPIC", "-march=sapphirerapids"]
    subprocess.run([*compiler, *fixed, *options, "-c", str(source), "-o", str(built)], check=True)
    return built


def lost(built: Path, objdump: str = "objdump") -> list[set[int]]:
    """For each `ldtilecfg` of an object file: which of its 64 bytes are not stored before it, or only as 0.

    A byte of SET that was last stored as 0 has lost its value: GCC keeps the zeros that the struct begins with.
    """
    command = [objdump, "-d", "--no-show-raw-insn", str(built)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [bytes_ for function in listing.split("\n\n") for bytes_ in lost_in(function.splitlines())]


def lost_in(lines: list[str]) -> list[set[int]]:
    """The same in one function's listing. A register that a `lea` set stands for the address that it holds."""
    found: list[set[int]] = []
    zero: dict[tuple[str, int], bool] = {}  # of each byte stored, by base register and offset: whether 0 was stored
    addresses: dict[str, tuple[str, int]] = {}
    zeroed: set[str] = set()
    for instruction in filter(None, map(_INSTRUCTION.match, lines)):
        name, operands = instruction["name"], re.split(r",(?![^(]*\))", instruction["operands"])
        target = _ADDRESS.match(operands[-1])
        if not target:
            register = _whole(operands[-1])
            addresses.pop(register, None)
            zeroed.discard(register)
            if name == "lea" and (source := _ADDRESS.match(operands[0])):
                addresses[register] = _place(source, addresses)
            elif "xor" in name and len(set(operands)) == 1:
                zeroed.add(register)
            continue
        base, start = _place(target, addresses)
        if name == "ldtilecfg":
            stored = [zero.get((base, start + i)) for i in range(64)]
            found.append({i for i, is_zero in enumerate(stored) if is_zero is None or (is_zero and i in SET)})
        elif "mov" in name:
            is_zero = operands[0] == "$0x0" or _whole(operands[0]) in zeroed
            zero |= {(base, start + i): is_zero for i in range(_width(name, operands[0]))}
    return found


def _place(address: re.Match[str], addresses: dict[str, tuple[str, int]]) -> tuple[str, int]:
    """An address as a register and an offset."""
    base, start = addresses.get(_whole(address["base"]), (_whole(address["base"]), 0))
    return base, start + int(address["offset"] or "0", 16)


def _whole(register: str) -> str:
    """The register that this one is a part of: `%rax` of `%eax`, `%zmm0` of `%xmm0`."""
    return re.sub(r"^%[xyz]mm", "%zmm", re.sub(r"^%e", "%r", register))


def _width(name: str, source: str) -> int:
    """How many bytes a `mov` to memory stores: told by its register, or for a constant by its last letter."""
    vector = {"%x": 16, "%y": 32, "%z": 64}.get(source[:2])
    if vector:
        return _PARTS_OF_VECTORS.get(name.removeprefix("v"), vector)
    if source.startswith("$"):
        return _SUFFIXES[name[-1]]
    if source.startswith("%r"):
        return {"b": 1, "w": 2, "d": 4}.get(source[-1], 8) if source[2:3].isdigit() else 8
    return 4 if source.startswith("%e") else 1 if source.endswith(("l", "h")) else 2


def configured(folder: Path, *arguments: str, cmake: str = "cmake") -> dict[str, str]:
    """The compile command of each file of a small CMake project, configured with our CMake file as our builds are."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(top)\nadd_subdirectory(part)\n"
    )
    part = folder / "part"
    part.mkdir(exist_ok=True)
    (part / "CMakeLists.txt").write_text("project(part C CXX)\nadd_library(part STATIC a.cpp b.c)\n")
    (part / "a.cpp").write_text("int a() { return 1; }\n")
    (part / "b.c").write_text("int b(void) { return 1; }\n")
    ours = [f"-DCMAKE_MODULE_PATH={FIX.parent}", f"-DCMAKE_USER_MAKE_RULES_OVERRIDE_CXX={FIX.stem}"]
    command = [cmake, "-S", str(folder), "-B", str(folder / "build"), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    subprocess.run([*command, *ours, *arguments], check=True, capture_output=True)
    entries = json.loads((folder / "build" / "compile_commands.json").read_text())
    return {Path(entry["file"]).name: entry["command"] for entry in entries}
