"""What machine this is: CPUs that Linux names by numbers, and emulated programs of another CPU."""

import platform
import sys
from pathlib import Path

import pytest

from lab.runner import machine

X86 = """processor	: 0
vendor_id	: GenuineIntel
model		: 143
model name	: Intel(R) Xeon(R)
flags		: fpu sse"""
BOARD = "Raspberry Pi 5 Model B Rev 1.0"


ARM_CORE = """processor	: {number}
BogoMIPS	: 108.00
Features	: fp asimd
CPU implementer	: {maker}
CPU architecture: 8
CPU variant	: 0x4
CPU part	: {part}
CPU revision	: 1
"""


def arm(*cores: str) -> str:
    """/proc/cpuinfo of arm64 for cores such as `0x41/0xd0b`: it names neither model nor flags."""
    blocks = []
    for number, core in enumerate(cores):
        maker, _, part = core.partition("/")
        blocks.append(
            ARM_CORE.format(
                number=number,
                maker=maker,
                part=part,
            )
        )
    return "\n".join(blocks)


def tree(
    root: Path,
    cpuinfo: str,
    kernel: str = "",
    model: str = "",
) -> Path:
    """Files of the system below `root`."""
    files = {
        "proc/cpuinfo": cpuinfo,
        "proc/sys/kernel/arch": kernel,
        "proc/device-tree/model": model,
    }
    for name, text in files.items():
        if text:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


A76 = "0x41/0xd0b"
A55 = "0x41/0xd05"
NAMES = [
    (arm(*[A76] * 4), BOARD + "\0", f"{BOARD} (4 x Cortex-A76)"),
    (
        arm(*[A76] * 4) + f"\nRevision\t: d04170\nModel\t\t: {BOARD}\n",
        "",
        f"{BOARD} (4 x Cortex-A76)",
    ),
    (arm(*["0x41/0xd0c"] * 64), "", "64 x Neoverse-N1"),
    (arm(*[A55] * 4, *[A76] * 4), "", "4 x Cortex-A55, 4 x Cortex-A76"),
    (arm("0x41/0xfff", "0x99/0x001"), "", "1 x Arm core 0x41/0xfff, 1 x Arm core 0x99/0x001"),
    (X86, "", "Intel(R) Xeon(R)"),
    ("", "", None),
]


@pytest.mark.parametrize(("cpuinfo", "model", "name"), NAMES)
def test_the_name_of_a_cpu(
    tmp_path: Path,
    cpuinfo: str,
    model: str,
    name: str | None,
) -> None:
    assert machine._cpu_name(tree(tmp_path, cpuinfo, model=model)) == name


# an emulator shows the host's /proc/cpuinfo, or makes one up
EMULATED = [
    ("aarch64", "x86_64", X86, "aarch64 emulated on x86_64"),
    ("aarch64", "x86_64", arm("0x41/0xd07"), "aarch64 emulated on x86_64"),
    ("x86_64", "aarch64", X86, "x86_64 emulated on aarch64"),
    ("x86_64", "x86_64", X86, "Intel(R) Xeon(R)"),
    ("i686", "x86_64", X86, "Intel(R) Xeon(R)"),
    ("armv8l", "aarch64", arm(A76), "1 x Cortex-A76"),
    ("aarch64", "", arm(A76), "1 x Cortex-A76"),
]


@pytest.mark.parametrize(("seen", "kernel", "cpuinfo", "name"), EMULATED)
def test_programs_of_another_cpu_are_known_to_be_emulated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: str,
    kernel: str,
    cpuinfo: str,
    name: str,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: seen)
    root = tree(tmp_path, cpuinfo, kernel)
    assert machine._cpu_name(root) == name
