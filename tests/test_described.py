"""Devices and models in the user's words: what they stand for, and what is assumed."""

from __future__ import annotations

import pytest

from lab.errors import LabError
from lab.features.predict import ranking
from lab.models import asked_devices, described, devices, named, synthetic
from lab.models.catalog import find
from tests.support.command import run_lab

pytestmark = pytest.mark.usefixtures("one_engine")


@pytest.mark.parametrize(
    ("text", "gbps", "cores", "backend"),
    [
        ("gbps=51.2 cores=8 avx2", 51.2, 8, "CPU"),
        ("DDR4-3200 x 2", 51.2, 6, "CPU"),
        ("LPDDR5X-8533 x 128 bit", 136.528, 6, "CPU"),
        ("core-i7-8700", 42.656, 6, "CPU"),
        ("13900K, DDR5-6400", 102.4, 8, "CPU"),
        ("Intel(R) Core(TM) i5-9500 CPU @ 3.00GHz", 42.656, 6, "CPU"),
        ("epyc-9374f threads=16", 460.8, 16, "CPU"),
        ("m5-max:cpu", 614.4, 18, "CPU"),
        ("Ryzen 5900X DDR4 3600", 57.6, 12, "CPU"),
        ("Pi 5 - 16GB:cpu", 17.1, 4, "CPU"),
        ("rtx-4090", 1008, None, None),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 256, None, None),
        ("apple-m3-max-36gb", 400, None, None),
        ("mac mini m4", 120, None, None),
        ("rtx-3080ti-12gb", 912, None, None),
        ("2x RTX 5090", 1792, None, None),
        ("AMD Radeon 8060S Graphics (RADV GFX1151), vulkan", 256, None, "Vulkan"),
        ("Nvidia RTX 4090 on Intel Core Ultra 265K", 1008, None, None),
        # The cores of this processor, not those of its family's largest
        ("epyc-9554", 460.8, 64, "CPU"),
        ("AMD EPYC 9354 32-Core Processor", 460.8, 32, "CPU"),
        ("EPYC 75F3", 204.8, 32, "CPU"),
        ("EPYC 7F52", 204.8, 16, "CPU"),
        ("Xeon 6747P", 409.6, 64, "CPU"),
        ("Intel(R) Xeon(R) E-2388G CPU @ 3.20GHz", 51.2, 8, "CPU"),
        ("Xeon E-2124", 42.656, 4, "CPU"),
        ("Xeon E-2488", 76.8, 8, "CPU"),
        ("i7-11800H", 51.2, 8, "CPU"),
        ("i5-9400H", 42.656, 4, "CPU"),
        ("AmpereOne A192-32X", 332.8, 192, "CPU"),
        ("Altra Max M128-30", 204.8, 128, "CPU"),
        ("VisionFive 2", 11.2, 4, "CPU"),
        # Cores of a hybrid are those for performance, and a GPU's cores are no processor's
        ("i7-12700H 14 cores", 76.8, 6, "CPU"),
        ("Intel Core i9-14900K, 24 cores, DDR5-6000", 96, 8, "CPU"),
        ("m3-max-30core:cpu", 300, 12, "CPU"),
        ("M4 Pro 14-core:cpu", 273, 10, "CPU"),
        ("ryzen 9 9950X 16 cores", 89.6, 16, None),
        ("epyc 9654 cores=8", 460.8, 8, None),
    ],
)
def test_words_name_or_describe_a_device(
    text: str, gbps: float, cores: float | None, backend: str | None
) -> None:
    device = described.find(text)
    assert device.gbps == pytest.approx(gbps, rel=0.01)
    assert device.cores == cores
    assert device.backend == backend
    assert device.peak_tflops


def test_every_name_of_the_table_keeps_its_device() -> None:
    for name, device in devices.devices().items():
        assert described.find(name) is device
        assert not described.is_addition(name)


AS_STRANGERS_WRITE = (
    *("optiplex 7050", "bc-250", "thinkpad t480", "hp elitedesk 800 g4", "mi50 32gb", "p40"),
    *("rx 580 2048sp", "jetson orin nano super", "rpi5 8gb", "orange pi 5 plus", "dgx spark"),
    *("framework desktop", "ryzen 7 7840hs igpu", "xeon e5-2690 v4 x2", "RX5500M", "RX 470"),
    *("epyc 7702 4 channel", "Lenovo ThinkCentre M920q", "NVIDIA T400 4GB", "GTX 750 Ti"),
    *("P106-100", "P104-100 8GB", "8 x nVIDIA Quadro P6000", "Radeon Pro 5500 XT 8GB"),
    *("AMD Radeon RX 6800 XT", "Radeon 8060S", "i3-6100", "16GB (DDR3) i5 6500", "5800X3D"),
    *("AMD EPYC 7443P", "Macbook Pro 2013, Intel i5, 2 cores, 8 GB RAM", "Beelink SER8"),
    *("Ryzen 7 3700X, 128GB RAM", "AMD Ryzen 7 1700X Eight-Core Processor", "Geekom A8 Max"),
    *("Minisforum UM890 Pro", "GMKtec K8 Plus", "MinisForum UM790 Pro", "Intel UHD 630"),
    *("Ryzen 7 8700G with 96 GB of DDR5", "Ryzen 5600G 32GB DDR4", "Intel Core i3-N305"),
    *(
        "Mac Studio M1 Ultra 128 GB",
        "NVIDIA Quadro T1000",
        "RTX 3090 x2",
        "HP Z440",
        "2x MI50",
    ),
    *("Dell PowerEdge R730 dual E5-2680 v4", "Xeon X5650", "FX-8350", "Intel NUC 8i5"),
)
"""Most are from issues of llama.cpp, ollama and llama2.c, and from pages on home servers; the last
ones, from "HP Z440" on, are written in their manner."""


@pytest.mark.parametrize("text", AS_STRANGERS_WRITE)
def test_machines_as_strangers_write_them_have_figures(text: str) -> None:
    row = ranking.predict("512", 128, "llama-3.1-8b:Q4_K_M", text.replace(",", " "))[0]
    for low, high in (row.prefill_s, row.tpot_s):
        assert 0 < low < high < 40 * low


@pytest.mark.parametrize(
    "text",
    ["Lenovo IdeaPad 3", "poco x3 pro", "a 2019 MacBook Pro", "Radeon r7 360", "CMP 170HX"],
)
def test_what_is_not_known_of_a_machine_is_asked_for(text: str) -> None:
    with pytest.raises(LabError) as raised:
        described.find(text)
    assert "--device" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("text", "gbps", "cores", "fields"),
    [
        ("optiplex 7050", 38.4, 4, ["gbps=", "cores="]),
        ("optiplex 7050 i7-7700 DDR4-2400 x 2", 38.4, 4, []),
        ("xeon e5-2690 v4 x2", 153.6, 28, ["gbps=", "gbps="]),
        ("snapdragon x2", 152, 12, ["gbps="]),
        ("epyc 7702 4 channel", 102.4, 64, ["gbps="]),
        ("Xeon X5650", 32, 6, ["gbps="]),
        ("rtx-4090 watts=250", 1008, None, ["tflops="]),
        ("ryzen 5600 DDR4-3200 x 2 watts=45", 51.2, 6, ["tflops="]),
        ("rtx-5060-laptop watts=46", 384, None, ["tflops="]),
    ],
)
def test_what_a_name_leaves_open_is_assumed(
    text: str, gbps: float, cores: float | None, fields: list[str]
) -> None:
    device = described.find(text)
    assert device.gbps == pytest.approx(gbps, rel=0.01)
    assert device.cores == cores
    assert [assumption.field for assumption in device.assumed] == fields


@pytest.mark.parametrize("text", ["rtx-4091", "toaster", "gbps=fast", "speed=3", "simd=mmx"])
def test_what_describes_nothing_is_refused(text: str) -> None:
    with pytest.raises(LabError):
        described.find(text)


@pytest.mark.parametrize(
    ("text", "gbps", "cores"),
    [
        ("ryzen 5600 2x16gb ddr4-3200", 51.2, 6),
        ("i7-8700 2 x 8gb ddr4-2666", 42.656, 6),
        ("epyc 7763 8x32gb ddr4", 204.8, 64),
        ("hp z440 e5-1650 v3", 68.256, 12),
        ("dell r730 2x e5-2690v4", 153.6, 28),
        ("poweredge r720", 59.712, 10),
        ("thinkpad t480", 38.4, 4),
        ("pixel 9", 68.264, 5),
        ("beelink ser5", 51.2, 6),
        ("steam deck oled", 88, 4),
    ],
)
def test_a_computer_as_people_write_it_has_its_memory_and_cores(
    text: str, gbps: float, cores: float
) -> None:
    device = described.find(text)
    assert device.gbps == pytest.approx(gbps)
    assert device.cores == cores


@pytest.mark.parametrize("text", ["2x3090", "2x 3090", "2 x rtx 3090", "dual rtx 3090"])
def test_several_cards_share_the_model(text: str) -> None:
    device = described.find(text)
    assert (device.name, device.memory_gb) == ("rtx-3090", 48)


@pytest.mark.parametrize(
    "text",
    ["m4-max:npu", "snapdragon x elite npu", "intel npu", "rk3588 npu", "ryzen ai 9 xdna2"],
)
def test_an_npu_is_answered_in_a_sentence(text: str) -> None:
    with pytest.raises(LabError, match="No rate of an NPU is predicted"):
        described.find(text)


@pytest.mark.parametrize("text", ["rtx-4090", "radeon 780m", "ryzen 5600g", "rtx-4060-laptop"])
def test_a_wide_range_says_that_a_rate_of_your_own_narrows_it(text: str) -> None:
    status, out, _ = run_lab("predict", "-m", "llama-3.1-8b:Q4_K_M", "-d", text)
    assert status == 0
    assert "--measured" in out
    assert len(out.splitlines()) <= 14


def test_a_power_limit_is_said_and_widens_the_range() -> None:
    limited = described.find("rtx-4060-laptop watts=46")
    unlimited = described.find("rtx-4060-laptop")
    assert (limited.peak_tflops or 0) < (unlimited.peak_tflops or 0)
    assert "of its arithmetic at that power" in limited.assumed[0].text


def test_what_was_assumed_is_named_with_the_field_that_narrows_most() -> None:
    _, out, _ = run_lab("predict", "-m", "llama-3.1-8b", "-d", "gbps=51.2", "-p", "512")
    assert "To narrow the range, give" in " ".join(out.split())
    wide = ranking.predict("512", 128, "llama-3.1-8b", "gbps=51.2")[0]
    narrow = ranking.predict("512", 128, "llama-3.1-8b", "gbps=51.2 cores=8 avx2")[0]
    assert narrow.prefill_s[1] / narrow.prefill_s[0] < wide.prefill_s[1] / wide.prefill_s[0]


def test_threads_count() -> None:
    few, many = (
        ranking.predict("512", 128, "llama-3.1-8b", "epyc-9654", threads=threads)[0]
        for threads in (4, 64)
    )
    assert few.prefill_s[0] > 8 * many.prefill_s[0]
    assert few.tpot_s[0] > 2 * many.tpot_s[0]


def test_commas_part_devices_but_not_their_facts() -> None:
    names = asked_devices.names_of_devices("13900K, DDR5-6400, rtx-3060,m4")
    assert names == ["13900K DDR5-6400", "rtx-3060", "m4"]


@pytest.mark.parametrize(
    ("text", "name", "quantization"),
    [
        ("llama3.2:3b", "llama-3.2-3b", "Q4_K_M"),
        ("gpt-oss:20b", "gpt-oss-20b", "MXFP4_MOE"),
        ("qwen3:30b-a3b-q4_K_M", "qwen3-30b-a3b", "Q4_K_M"),
        ("unsloth/Qwen3-30B-A3B-GGUF:UD-Q4_K_XL", "qwen3-30b-a3b", "UD-Q4_K_XL"),
        ("qwen3.8-27b", "qwen3.6-27b", "Q4_K_M"),
    ],
)
def test_a_model_is_read_from_any_tools_name(text: str, name: str, quantization: str) -> None:
    model = named.model_named(text)
    assert model
    assert (model.name, model.quantization, model.source) == (name, quantization, "shape")


@pytest.mark.parametrize(
    ("text", "total", "file_gb"),
    [
        ("13B-A2B", 13, 7.9),
        ("Midnight-Miqu-70B-v1.5:IQ4_XS", 70, 37.8),
        ("GLM-5.3-Flash:Q2_K", 320, 116),
        ("qwen3.8-flash-next", 125, 75),
        ("cosmos-reason2-8b", 8, 4.9),
        ("OLMoE-1B-7B", 6.9, 4.2),
    ],
)
def test_a_model_that_is_not_listed_has_the_size_in_its_name(
    text: str, total: float, file_gb: float
) -> None:
    model = named.model_named(text)
    assert model
    assert model.source == named.APPROXIMATE
    assert (model.n_params or 0) / 1e9 == pytest.approx(total, rel=0.03)
    assert (model.n_bytes or 0) / 1e9 == pytest.approx(file_gb, rel=0.03)


@pytest.mark.parametrize(
    "name", ["UD-Q4_K_XL", "Q4_K_L", "IQ4_KS", "Q8_K_XL", "UD-IQ2_M", "Q6_K_L"]
)
def test_every_quantization_has_a_size(name: str) -> None:
    model = synthetic.model_like(find("llama-3.1-8b"), name)
    like = synthetic.like_quantization(name)
    assert like
    assert model.quantization == name
    assert model.n_bytes


def test_two_devices_stand_side_by_side_and_a_table_has_the_quantizations() -> None:
    _, out, _ = run_lab("predict", "-m", "qwen3:8b", "-d", "mac mini m4", "-d", "rtx-3060")
    assert "x as fast as the m4 (" in out
    _, out, _ = run_lab(
        "predict", "-m", "llama-3.1-8b", "-d", "rtx-4060-laptop", "--quantizations"
    )
    assert "is the best that fits" in out
    assert "lacks" in out
    assert len(out.splitlines()) <= 14


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("llama-3.1-8b:Q4_K_M,Q5_K_M", ["llama-3.1-8b:Q4_K_M", "llama-3.1-8b:Q5_K_M"]),
        ("qwen3:8b,Q8_0", ["qwen3:8b", "qwen3:8b:Q8_0"]),
        ("qwen3-8b-Q4_K_M,IQ4_XS", ["qwen3-8b-Q4_K_M", "qwen3-8b:IQ4_XS"]),
        ("phi-4:q4_0,q5_1,f16", ["phi-4:q4_0", "phi-4:q5_1", "phi-4:f16"]),
        (
            "gemma3:12b,UD-Q4_K_XL,llama-3.2-3b",
            ["gemma3:12b", "gemma3:12b:UD-Q4_K_XL", "llama-3.2-3b"],
        ),
        ("llama-3.2-3b,qwen3-8b", ["llama-3.2-3b", "qwen3-8b"]),
        ("gpt-oss:20b,gpt-oss:120b", ["gpt-oss:20b", "gpt-oss:120b"]),
        ("llama-3.2-3b:Q4_0,qwen3-8b:Q4_0", ["llama-3.2-3b:Q4_0", "qwen3-8b:Q4_0"]),
    ],
)
def test_a_quantization_alone_belongs_to_the_model_before_it(
    text: str, names: list[str]
) -> None:
    assert ranking.names_of_models(text) == names


def test_laptops_include_their_cards_and_have_no_table_of_quantizations() -> None:
    laptops = devices.names_of("laptop")
    assert {"laptop-ddr5", "snapdragon-x-elite", "rtx-4060-laptop"} <= {*laptops}
    assert not {"rtx-4060", "m4", "rx-9070-xt"} & {*laptops}
    assert "rtx-4060-laptop" in devices.names_of("geforce")
    code, _, err = run_lab("predict", "-m", "llama-3.1-8b", "-d", "laptop", "--quantizations")
    assert code == 1
    assert "one model on one device" in err


def test_a_prediction_says_the_memory_of_its_longest_request() -> None:
    _, out, _ = run_lab(
        "predict", "-m", "qwen2.5-7b", "-d", "laptop-ddr5 16 GB", "-p", "32000", "-n", "300"
    )
    assert "memory" in out
    assert "6.87" in out
    _, out, _ = run_lab(
        "predict", "-m", "qwen2.5-7b", "-d", "apple", "-p", "32000", "-n", "300"
    )
    assert "needs 6.87 GB with its cache" in " ".join(out.split())
