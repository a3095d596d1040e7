"""The instruction sets that this CPU has, and those that a build of llama.cpp was compiled for.

A build made with `-march=native`, as the README's is, needs every instruction set of the CPU that it was built on: on a
CPU without one of them it ends with SIGILL. A build that leaves out what the CPU has runs, but more slowly. Both can be
seen before a model is loaded. The names are llama.cpp's (`llama_print_system_info`, from ggml-cpu/ggml-cpu.cpp); on x86
and arm64 it prints what the compiler was told, not what the CPU has.

Two things stay unseen: what the compiler uses and llama.cpp does not print (GFNI, for instance), and an older x86 CPU
emulated by qemu, because /proc/cpuinfo then describes the host.
"""

from __future__ import annotations

import platform
import re
import sys

from lab.runner import limits

_ELSEWHERE = {
    "SSE3": {"pni", "SSE3"},
    "SSSE3": {"ssse3", "SSSE3"},
    "AVX": {"avx", "AVX1.0"},
    "AVX_VNNI": {"avx_vnni"},
    "AVX2": {"avx2", "AVX2"},
    "F16C": {"f16c", "F16C"},
    "FMA": {"fma", "FMA"},
    "BMI2": {"bmi2", "BMI2"},
    "AVX512": {"avx512f", "AVX512F"},
    "AVX512_VBMI": {"avx512vbmi", "AVX512VBMI"},
    "AVX512_VNNI": {"avx512_vnni", "AVX512VNNI"},
    "AVX512_BF16": {"avx512_bf16"},
    "AMX_INT8": {"amx_int8"},
    "NEON": {"asimd", "AdvSIMD"},
    "FP16_VA": {"asimdhp", "arm.FEAT_FP16"},
    "MATMUL_INT8": {"i8mm", "arm.FEAT_I8MM"},
    "DOTPROD": {"asimddp", "arm.FEAT_DotProd"},
    "SVE": {"sve"},
    "SME": {"sme", "arm.FEAT_SME"},
    "SME2": {"sme2", "arm.FEAT_SME2"},
}
"""llama.cpp's names, each with Linux's in /proc/cpuinfo and then macOS's in sysctl, where it has one."""


def cpu_features() -> frozenset[str] | None:
    """The instruction sets of this CPU, in llama.cpp's names; None where the system does not list them (Windows).

    Sources: the `flags` (x86) or `Features` (arm) of /proc/cpuinfo, of which every core must have one; on macOS sysctl.
    """
    arm = platform.machine().lower() in ("arm64", "aarch64")
    if sys.platform != "darwin":
        # Under emulation of another architecture /proc/cpuinfo has the host's lines, which have the other name.
        lines = re.findall(rf"^{'Features' if arm else 'flags'}\s*:(.*)$", limits.system_text("/proc/cpuinfo"), re.M)
        listed = set.intersection(*(set(line.split()) for line in lines)) if lines else set()
    elif arm:
        names = {name for others in _ELSEWHERE.values() for name in others if name.startswith(("arm.", "Adv"))}
        listed = {name for name in names if limits.sysctl(f"hw.optional.{name}") == "1"}
    else:
        parts = ("features", "leaf7_features")
        listed = {word for part in parts for word in (limits.sysctl(f"machdep.cpu.{part}") or "").split()}
    return frozenset(ours for ours, others in _ELSEWHERE.items() if others & listed) if listed else None


def built_for(system_info: str) -> frozenset[str]:
    """The instruction sets that this build of llama.cpp uses, from the text of `llama_print_system_info`."""
    return frozenset(name for name in re.findall(r"(\w+) = 1\b", system_info) if name in _ELSEWHERE)


def missing(system_info: str) -> frozenset[str] | None:
    """What this build uses and this CPU lacks: with any, the build ends with SIGILL. None where the CPU is unknown."""
    cpu = cpu_features()
    return None if cpu is None else built_for(system_info) - cpu


def unused(system_info: str) -> frozenset[str] | None:
    """What this CPU has and this build leaves out. None where the CPU is unknown."""
    cpu = cpu_features()
    return None if cpu is None else cpu - built_for(system_info)
