"""The devices of models/devices.toml: whole entries, and the right one for a name or a driver."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.models import devices

FILE = Path(__file__).parent.parent / "models" / "devices.toml"
ENTRIES: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(FILE.read_text())
WHOLE = {
    "about": "a",
    "gbps": 100,
    "source": "b",
}


def test_devices_are_named_in_the_order_of_the_file() -> None:
    names = list[str]()
    for kind, entries in ENTRIES.items():
        assert devices.names_of(kind)[: len(entries)] == tuple(entries)
        names += entries
    assert devices.kinds() == tuple(ENTRIES)
    assert devices.names_of(" All ") == tuple(names)
    assert devices.names_of("m4") == ()


def test_no_two_devices_answer_to_one_name_or_to_that_of_a_kind() -> None:
    every_device = devices.devices().values()
    names = {device.name for device in every_device}
    assert len(names) == sum(len(entries) for entries in ENTRIES.values())
    assert not names & {*ENTRIES, devices.ALL}
    assert len({device.about for device in every_device}) == len(names)
    by_key: dict[str, str] = {}
    for device in every_device:
        for name in (device.name, *device.aliases):
            key = devices.key_of(name)
            assert by_key.setdefault(key, device.name) == device.name
    assert not {"", *devices.kinds()} & set(by_key)


@pytest.mark.parametrize("name", sorted(devices.devices()))
def test_an_entry_is_whole_and_sane(name: str) -> None:
    device = devices.find_device(name)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", device.name)
    for text in (device.about, device.source, device.checked or "by nobody"):
        assert text
        assert text == text.strip()
    assert 10 <= device.gbps <= 30_000
    if device.peak_tflops is not None:
        ridge = 1e3 * device.peak_tflops / device.gbps  # in FLOPs per byte
        least = 20 if device.tflops else 10
        assert least <= ridge <= 1_000
    if device.memory_gb is not None:
        assert 2 <= device.memory_gb <= 1_024
    for size in (
        re.search(r"-(\d+)gb", device.name),
        re.search(r"(\d+) GB\b", device.about),
    ):
        assert size is None or device.memory_gb == float(size[1])


def test_bandwidth_by_arithmetic_is_that_of_the_bus_and_the_rate_in_its_source() -> None:
    n_by_arithmetic = 0
    for entries in ENTRIES.values():
        for name, facts in entries.items():
            if "mtps" not in facts:
                continue
            n_by_arithmetic += 1
            bus_bits = facts["bus_bits"]
            mtps = facts["mtps"]
            source = facts["source"]
            assert devices.find_device(name).gbps == pytest.approx(bus_bits // 8 * mtps / 1000)
            assert "gbps" not in facts
            assert bus_bits % 64 == 0
            assert f"-{mtps}" in source or f"{mtps // 1000} Gbit/s" in source, source
            assert f"{bus_bits} bits" in source or f"{bus_bits // 64} " in source, source
    assert n_by_arithmetic > 10
    assert devices.find_device("laptop-ddr5").gbps == 89.6
    assert devices.find_device("ryzen-ai-max-395").gbps == 256
    assert devices.find_device("ryzen-ai-395").gbps == 256


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"about": "a", "source": "b"}, "gbps"),
        (
            {
                "about": "a",
                "source": "b",
                "bus_bits": 64,
            },
            "bus_bits",
        ),
        (
            {
                **WHOLE,
                "bus_bits": 64,
                "mtps": "fast",
            },
            "unsupported operand",
        ),
        ({"about": "a", "gbps": 100}, "source"),
        ({**WHOLE, "watts": 300}, "watts"),
        ("a laptop", "not a mapping"),
    ],
)
def test_an_entry_that_is_not_whole_is_named(facts: object, reason: str) -> None:
    place = r"\[small\.mine\] of models/devices\.toml cannot be used"
    with pytest.raises(LabError, match=f"{place}: .*{reason}"):
        devices.from_entry("small", "mine", facts)


def test_a_whole_entry_is_a_device() -> None:
    device = devices.from_entry(
        "small",
        "mine",
        {
            **WHOLE,
            "aliases": ["x"],
            "memory_gb": 8,
        },
    )
    assert device.gbps == 100
    assert device.aliases == ("x",)
    assert device.memory_bytes == 8e9
    assert devices.from_entry("small", "mine", WHOLE).memory_bytes is None


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("4090", "rtx-4090 or rtx-4090-d or rtx-4090-laptop"),
        ("a100", "a100-40gb or a100-80gb or a100-80gb-pcie"),
        ("m4-mx", "m4-max"),
        ("9070 xtx", "rx-9070-xt"),
        ("", "lab predict --all shows all names"),
        ("geforce", "Name one: rtx-3050-6gb"),
        ("all", "Name one: "),
    ],
)
def test_an_unknown_name_is_answered_with_close_ones(name: str, offered: str) -> None:
    with pytest.raises(LabError) as raised:
        devices.find_device(name)
    assert offered in str(raised.value.hint)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090-d"),
        ("RTX 4060 mobile", "rtx-4060-laptop"),
        ("GTX 1070 with Max-Q Design", "gtx-1070-max-q"),
        ("dgx spark", "gb10"),
        ("Apple M4 Max", "m4-max"),
    ],
)
def test_a_name_is_understood_as_people_write_it(text: str, name: str) -> None:
    assert devices.find_device(text).name == name


def test_a_peak_is_published_or_follows_from_the_architecture() -> None:
    assert devices.find_device("rtx-4090").peak_tflops == 330
    assert devices.find_device("rtx-2080-ti").peak_tflops == pytest.approx(107.6)
    assert devices.find_device("raspberry-pi-5").peak_tflops == pytest.approx(4 * 2.4 * 0.064)
    with_fp32 = [device for device in devices.devices().values() if device.fp32]
    assert {device.architecture for device in with_fp32} <= set(devices.PEAK_OVER_FP32)


@pytest.mark.parametrize(
    ("description", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.4, None),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA GeForce RTX 3080", 9.7, "rtx-3080"),
        ("NVIDIA GeForce RTX 3080", 11.7, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3080", None, None),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 15.7, "rtx-3080-ti-laptop"),
        ("NVIDIA GeForce RTX 3080 with Max-Q Design", 8, None),
        ("NVIDIA GeForce RTX 3060 Ti", 8, None),  # GDDR6 and GDDR6X are described alike
        ("NVIDIA GeForce RTX 4090", None, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4090 D", 24, "rtx-4090-d"),
        ("NVIDIA GeForce RTX 5090 D", 32, None),
        ("NVIDIA GeForce RTX 4060 Ti", 7.6, "rtx-4060-ti-8gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95, "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95, "rtx-pro-6000-server"),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", 24, "rx-7900-xtx"),
        ("AMD Radeon RX 6800S", 8, None),
        ("AMD Radeon RX 9070 GRE", 12, "rx-9070-gre"),
        ("Intel(R) Arc(TM) A770 Graphics (DG2)", 16, "arc-a770"),
        ("Intel(R) Arc(TM) A770M Graphics", 16, "arc-a770m"),
        ("Apple M1", 10.7, "m1"),
        ("Apple M4 Max", 96, None),  # GPUs of 32 and of 40 cores are described alike
        ("Apple M6", 16, None),  # what 24 GB leave for a GPU
        ("Tesla M4", 4, None),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", 2, None),
    ],
)
def test_a_device_is_recognised_only_where_it_is_the_same(
    description: str, gib: float | None, name: str | None
) -> None:
    memory_bytes = None if gib is None else int(gib * 2**30)
    device = devices.recognise(description, memory_bytes)
    assert (device and device.name) == name
