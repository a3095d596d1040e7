"""What a CPU has against what llama.cpp was compiled for, on described machines."""

import platform

import pytest

from lab.process.worker import Worker
from lab.runner import builds

NEHALEM = "flags\t\t: fpu sse2 ht pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm\n"
HASWELL = "flags\t\t: fpu sse2 pni ssse3 fma avx f16c bmi1 avx2 bmi2\n"
SAPPHIRE_RAPIDS = (
    "flags\t\t: pni ssse3 fma avx f16c avx2 bmi2 avx512f avx512vbmi avx_vnni avx512_bf16 "
    "avx512_vnni amx_bf16 amx_tile amx_int8\nvmx flags\t: vnmi preemption_timer\n"
)
GRAVITON_2 = (
    "Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp\n"
)
BUILT_ON_HASWELL = (
    "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | "
    "LLAMAFILE = 1 | OPENMP = 1 |"
)
WITHOUT_AMX = (
    "CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX_VNNI = 1 | "
    "AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | AVX512 = 1 | AVX512_VBMI = 1 | AVX512_VNNI = 1 | "
    "AVX512_BF16 = 1 | "
)
BUILT_ON_SAPPHIRE_RAPIDS = f"{WITHOUT_AMX}AMX_INT8 = 1 |"
BUILT_ON_GRAVITON_3 = (
    "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | MATMUL_INT8 = 1 | SVE = 1 | DOTPROD = 1 | "
    "SVE_CNT = 32 |"
)
OF_HASWELL = {"AVX", "AVX2", "F16C", "FMA", "BMI2"}
OF_AVX512 = {"AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AVX_VNNI", "AMX_INT8"}


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "build", "lacking", "unused"),
    [
        ("x86_64", HASWELL, BUILT_ON_HASWELL, set(), set()),
        ("x86_64", NEHALEM, BUILT_ON_HASWELL, OF_HASWELL, set()),
        ("x86_64", HASWELL, BUILT_ON_SAPPHIRE_RAPIDS, OF_AVX512, set()),
        ("x86_64", SAPPHIRE_RAPIDS, BUILT_ON_HASWELL, set(), OF_AVX512),
        ("x86_64", SAPPHIRE_RAPIDS, WITHOUT_AMX, set(), {"AMX_INT8"}),
        ("x86_64", HASWELL + NEHALEM, BUILT_ON_HASWELL, OF_HASWELL, set()),
        ("aarch64", GRAVITON_2, BUILT_ON_GRAVITON_3, {"SVE", "MATMUL_INT8"}, set()),
        (
            "aarch64",
            GRAVITON_2,
            "CPU : NEON = 1 | ARM_FMA = 1 |",
            set(),
            {"DOTPROD", "FP16_VA"},
        ),
    ],
)
def test_what_a_cpu_lacks_and_what_a_build_leaves_out(
    machine: str,
    cpuinfo: str,
    build: str,
    lacking: set[str],
    unused: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(builds, "system_text", {"/proc/cpuinfo": cpuinfo}.get)
    assert builds.mismatch(build) == (frozenset(lacking), frozenset(unused))


@pytest.mark.parametrize(
    ("machine", "cpuinfo"),
    [("aarch64", HASWELL), ("x86_64", "")],  # emulated: the host's /proc/cpuinfo; no such file
)
def test_nothing_is_said_of_a_cpu_that_is_not_known(
    machine: str, cpuinfo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(builds, "system_text", {"/proc/cpuinfo": cpuinfo}.get)
    assert builds.mismatch(BUILT_ON_GRAVITON_3) is None


def test_the_installed_build_needs_nothing_that_this_cpu_lacks() -> None:
    with Worker() as worker:
        differences = builds.mismatch(worker.build.system_info)
    if differences is None:
        pytest.skip("this system does not say what its CPU has")
    lacking, _ = differences
    assert not lacking
