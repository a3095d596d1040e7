"""Published measurements: how rows are cleaned, and what is learned from them."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.core.record import DECODE, PREFILL
from lab.features.predict import published_record, wording
from lab.models import catalog, described, devices, processors, synthetic
from lab.roofline import conditioning, datasheet
from lab.roofline.datasheet import DatasheetCase
from lab.roofline.prediction import OnDevice
from lab.show import canvas
from tests.bench import clean_published, learn_published, published as bench
from tests.bench.learn_published import Row, published
from tests.support.records import SETTINGS

RAW = {
    "source": "localscore",
    "url": "https://example.com",
    "collected": "2026-04-17",
    "device": "rtx-3060-12gb",
    "model": "meta-llama/Llama-3.1-8B",
    "quantization": "q4_k_m",
    "test": "tg",
    "tps": "57.5",
    "as_published": "LocalScore · NVIDIA GeForce RTX 3060 · Q4_K - Medium",
}
BOARD = {
    "source": "board",
    "backend": "CUDA",
    "model": "llama-2-7b",
    "quantization": "Q4_0",
    "test": "pp512",
}


def cleaned(**changes: str) -> dict[str, str]:
    raw = dict.fromkeys((*clean_published.COLUMNS, "test"), "") | RAW | changes
    return clean_published.cleaned(raw)


@pytest.mark.parametrize(
    ("changes", "device", "share", "backend"),
    [
        ({}, "rtx-3060", "", "CUDA"),
        (
            {"as_published": "LocalScore · NVIDIA GeForce RTX 3060 Laptop GPU · Q4_K"},
            "rtx-3060-laptop",
            "",
            "CUDA",
        ),
        (
            {"as_published": "LocalScore · Apple M1 Max 8P+2E+24GPU · Q4_K"},
            "m1-max",
            "0.75",
            "Metal",
        ),
        (
            {"as_published": "LocalScore · Apple M4 Max 10P+4E+32GPU · Q4_K"},
            "m4-max-32core",
            "",
            "Metal",
        ),
        (
            {"as_published": "LocalScore · AMD  Radeon RX 7800 XT · Q4_K"},
            "rx-7800-xt",
            "",
            "tinyBLAS",
        ),
        (
            {"as_published": "x · Ryzen 9 7900X (Nvidia 4090)", "source": "g"},
            "rtx-4090",
            "",
            "CUDA",
        ),
        (
            {"as_published": "x · M1 Ultra (48 GPU Core) 64GB", "source": "g"},
            "m1-ultra",
            "0.75",
            "Metal",
        ),
        (
            {"as_published": "LLaMA 7B; device=rtx-2060s-8gb", "device": "rtx-2060s-8gb"},
            "rtx-2060-super",
            "",
            "CUDA",
        ),
    ],
)
def test_the_published_name_says_which_device_it_was(
    changes: dict[str, str], device: str, share: str, backend: str
) -> None:
    row = cleaned(**changes)
    assert row["device"] == device
    assert row["gpu_share"] == share
    assert row["backend"] == backend
    assert row["marks"] == ""


@pytest.mark.parametrize(
    ("changes", "marks"),
    [
        ({"tps": "90"}, "above-bandwidth"),
        ({"as_published": "LocalScore · NVIDIA Foo 9 · Q4_K"}, "unknown-device"),
        ({"as_published": "LocalScore · NVIDIA L40S-8Q · Q4_K"}, "unclear-device"),
        ({"model": "nobody/Foo-8B"}, "unknown-model"),
        (
            {
                "model": "Qwen/Qwen2.5-14B",
                "as_published": "LocalScore · NVIDIA GeForce RTX 3070 · Q4_K",
            },
            "does-not-fit",
        ),
        ({"as_published": "x · Pi 5 - 8GB (Nvidia RTX 3060)", "source": "g"}, "slow-host"),
        (
            {
                **BOARD,
                "tps": "4000",
                "as_published": "RTX 3060",
            },
            "above-peak",
        ),
        (
            {
                **BOARD,
                "tps": "40",
                "as_published": "Raspberry Pi 5",
            },
            "slow-host",
        ),
        ({"source": "somebody with vLLM"}, "other-runtime"),
    ],
)
def test_a_row_that_breaks_a_rule_is_kept_and_marked(
    changes: dict[str, str], marks: str
) -> None:
    row = cleaned(**changes)
    assert row["marks"] == marks or row["marks"].split()[0] == marks
    assert set(row["marks"].split()) <= set(clean_published.RULES)


def test_the_file_is_what_the_rules_make_of_it() -> None:
    path = Path(__file__).parent.parent / "models" / "published.csv"
    assert path.stat().st_size < 600_000
    rows = published()
    assert len(rows) == 2367
    assert sum(not row.marks for row in rows) > 1200
    for row in rows:
        assert set(clean_published.marks_of(row)) <= {
            *row.marks,
            *(["unknown-device"] if "unclear-device" in row.marks else []),
        }
        sheet = learn_published.sheet_of(row)
        assert row.marks or (sheet and (row.backend == "CPU" or sheet.name == row.device))
        assert row.phase in (DECODE, PREFILL)
        assert row.tps > 0


@pytest.mark.parametrize("law", learn_published.LAWS)
def test_the_learned_figures_are_what_the_rows_teach(law: str) -> None:
    learned = datasheet.learned()[law]
    rows = [
        row for row in learn_published.clean(published()) if learn_published.law_of(row) == law
    ]
    again = learn_published.fit(rows, law)
    for part, value in again.parts.items():
        assert learned.parts[part] == pytest.approx(value, rel=1e-3), part
    for name, values in again.factors.items():
        assert learned.factors[name] == pytest.approx(values, rel=2e-3), name
    assert learned.evaluation["all"]["n_rows"] > 5
    errors = [abs(learn_published.error(learned, row)) for row in rows]
    assert (
        sorted(errors)[len(errors) // 2] < 0.1
    )  # these rows were seen; tests/bench/published.py leaves them out


def test_nothing_is_predicted_faster_than_the_limit() -> None:
    settings = dataclasses.replace(SETTINGS, n_ubatch=512)
    for name in ("smollm2-135m", "llama-3.2-1b", "llama-3.3-70b"):
        model = synthetic.model_of(catalog.find(name), "Q4_0")
        for device in devices.devices().values():
            row = OnDevice(model, settings, device).request(512, 128)
            assert row.token.limit_s is not None
            assert (
                row.token.limit_s
                <= row.tpot_s[0]
                <= (row.token.expected_s or 0)
                <= row.tpot_s[1]
            ), device.name
            if device.peak_tflops is None:
                assert row.prefill.limit_s is None
                assert row.prefill_s[0] != row.prefill_s[0]
            else:
                low, high = row.prefill_s
                assert (
                    (row.prefill.limit_s or 0) <= low <= (row.prefill.expected_s or 0) <= high
                ), device.name


def test_a_range_is_wider_for_what_nobody_published() -> None:
    learned = datasheet.learned()[DECODE]
    row = next(
        row
        for row in published()
        if row.backend == "CUDA" and row.phase == DECODE and not row.marks
    )
    case = learn_published.case_of(row)
    low, high = learned.range(case)
    tried: list[dict[str, Any]] = [
        {"model": "foo"},
        {"backend": "SYCL"},
        {"quantization": "IQ2_S"},
    ]
    for changes in tried:
        wider = learned.range(dataclasses.replace(case, **changes))
        assert wider[0] < low, changes
        assert wider[1] / wider[0] > high / low, changes
    learned = datasheet.learned()[PREFILL]
    (case, *_) = [
        learn_published.case_of(row)
        for row in published()
        if row.phase == PREFILL and row.n_depth > 30_000 and not row.marks
    ]
    (low, high) = learned.range(case)
    unknown = learned.range(dataclasses.replace(case, backend="CANN"))
    assert unknown[1] / unknown[0] > 1.5 * high / low


def test_a_smaller_cache_makes_long_contexts_faster() -> None:
    model = synthetic.model_of(catalog.find("llama-2-7b"), "Q4_0")
    device = devices.find_device("rtx-4090")
    small = dataclasses.replace(SETTINGS, type_k="q8_0", type_v="q8_0")
    plain, packed = (
        OnDevice(model, settings, device).request(8000, 100).token.expected_s
        for settings in (SETTINGS, small)
    )
    assert plain
    assert packed
    assert packed < 0.85 * plain


def test_only_clean_rows_are_cited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = devices.find_device("rtx-3060")
    model = synthetic.model_of(catalog.find("llama-2-7b"), "Q4_0")
    rates = datasheet.published_rates(device, model)
    assert wording.cited(rates).startswith("Others measured: prefill of 512 tokens ")
    lines = learn_published.PUBLISHED.read_text().replace(",,RTX", ",does-not-fit,RTX")
    (tmp_path / "published.csv").write_text(lines)
    monkeypatch.setattr(datasheet, "data_file", tmp_path.joinpath)
    assert datasheet.published_rates(device, model) == []


DEVICES = "rtx-4090", "rtx-3090", "rtx-5090", "m2-ultra", "m4-max", "rx-7900-xtx"
MODELS = (
    ("llama-3.1-8b", "Q4_0"),
    ("qwen3-4b", "Q8_0"),
    ("gemma-3-12b", "Q4_K_M"),
    ("llama-2-7b", "Q4_0"),
)


def planted(phase: str, seconds: Callable[[DatasheetCase], float]) -> list[Row]:
    """Rows of a world in which a time is what `seconds` says: short and long ones, with and
    without flash attention."""
    rows = []
    for device, (model, kind), depth in itertools.product(DEVICES, MODELS, (0, 4096, 16384)):
        backend = datasheet.backend_of(devices.find_device(device))
        n_prompt, n_depth = (512, depth) if phase == PREFILL else (max(64, depth), 0)
        for is_flash in (True, False):
            what = f"of {device}", device, 1.0, backend, model, kind, phase, n_prompt, is_flash
            row = Row(*what, 1.0, n_depth=n_depth)
            n_tokens = 512 if phase == PREFILL else 1
            rows.append(row._replace(tps=n_tokens / seconds(learn_published.case_of(row))))
    return rows


def test_attention_is_learned_at_a_share_of_its_own() -> None:
    def seconds(case: DatasheetCase) -> float:
        arithmetic, weights, attention, *_ = case.parts
        return 2 * arithmetic + 1.2 * weights + (3 if case.flash_attn else 9) * attention

    rows = planted(PREFILL, seconds)
    for left_out in ("rtx-3090", "m2-ultra"):
        learned = learn_published.fit([row for row in rows if row.device != left_out], PREFILL)
        errors = [
            abs(learn_published.error(learned, row)) for row in rows if row.device == left_out
        ]
        assert (
            max(errors) < 0.15
        )  # gemma-3-12b's windows and what flash attention saves are in these rows
        case = learn_published.case_of(rows[0])
        on, off = (
            learned.coefficients(dataclasses.replace(case, flash_attn=is_on))[2]
            for is_on in (True, False)
        )
        assert off / on == pytest.approx(3, rel=0.15)


def test_decode_reads_the_cache_at_a_share_of_its_own() -> None:
    rows = planted(
        DECODE,
        lambda case: 1.4 * case.parts[1] + (2 if case.flash_attn else 4) * case.parts[3],
    )
    learned = learn_published.fit([row for row in rows if row.device != "rtx-3090"], DECODE)
    assert (
        max(
            abs(learn_published.error(learned, row))
            for row in rows
            if row.device == "rtx-3090"
        )
        < 0.15
    )


@pytest.mark.parametrize(
    ("device", "name", "kind", "n_prompt", "seconds"),
    [
        ("rtx-3090", "llama-3.1-8b", "Q4_0", 32_768, 14.5),
        ("rtx-4090", "llama-3.2-3b", "Q4_K_M", 4_096, 0.30),
    ],
)
def test_long_prompts_take_what_others_measured(
    device: str, name: str, kind: str, n_prompt: int, seconds: float
) -> None:
    model = synthetic.model_of(catalog.find(name), kind)
    settings = dataclasses.replace(SETTINGS, n_ubatch=512)
    row = OnDevice(model, settings, devices.find_device(device)).request(n_prompt, 2)
    expected = row.prefill.expected_s or 0
    (fast, slow) = row.prefill_s
    assert fast < seconds < slow
    assert seconds / 2 < expected < seconds * 1.5


def test_a_rate_that_a_stranger_published_is_in_its_range() -> None:
    model = synthetic.model_of(catalog.find("llama-3.2-3b"), "Q4_K_M")
    settings = dataclasses.replace(SETTINGS, n_ubatch=512)
    row = OnDevice(model, settings, devices.find_device("rtx-4090")).request(16_384, 2)
    assert row.prefill_s[0] < 2.8 < row.prefill_s[1]
    assert 2.8 / 2 < (row.prefill.expected_s or 0) < 2.8 * 1.5


@pytest.mark.parametrize(
    ("simd", "quantization", "month", "is_repacked"),
    [
        ("i8mm", "Q4_K_M", "", True),
        ("i8mm", "Q4_K_M", "2025-06", False),
        ("dotprod", "Q4_0", "2025-06", True),
        ("dotprod", "IQ3_S", "", False),
        ("avx2", "Q4_K_M", "", False),
    ],
)
def test_weights_are_rearranged_since_a_month(
    simd: str, quantization: str, month: str, is_repacked: bool
) -> None:
    assert processors.is_repacked(simd, quantization, month) is is_repacked


@pytest.mark.parametrize(
    ("words", "prompt", "token"),
    [
        ("m4-max:cpu", 12 * 4.5 * 0.256, 12 * 4.5 * 0.128),
        ("neoverse-n2 cores=4", 4 * 3.4 * 0.128, 4 * 3.4 * 0.064),
        ("graviton4 cores=4", 4 * 2.8 * 0.256, 4 * 2.8 * 0.128),
        ("intel-n100", 4 * 2.0 * 0.064, 4 * 2.0 * 0.064),
        ("ryzen 5600", 6 * 4.3 * 0.128, 6 * 4.3 * 0.128),
    ],
)
def test_vector_units_bound_prompts_and_tokens(
    words: str, prompt: float, token: float
) -> None:
    device = described.find(words)
    assert device.peak_tflops == pytest.approx(prompt)
    assert device.token_tflops == pytest.approx(token)


def test_a_group_of_enough_measurers_has_a_scale_of_its_own() -> None:
    """It leans on the larger group by as much as it has few publishers."""
    first = published()[0]
    stretches = []
    for number in range(40):
        row = first._replace(source=f"publisher{number}/x")
        is_good = number < 20
        groups = ("good" if is_good else f"bad {number}", "all")
        stretches.append(learn_published.Stretch(row, 1.0 if is_good else 2.0, groups))
    scales = learn_published.scales(stretches)
    assert scales["all"] == 2.0
    assert scales["good"] == pytest.approx(2 ** (4 / 24))
    assert set(scales) == {"all", "good"}


def test_a_rate_of_the_user_tells_less_where_files_on_one_device_differ_more() -> None:
    learned = datasheet.learned()[DECODE]
    row = next(row for row in published() if row.phase == DECODE and row.backend == "CUDA")
    case = learn_published.case_of(row)
    measured = [(case, 2 * (learned.expected_s(case) or 0))]
    near, far = (
        conditioning.condition(
            learn_published.with_noise_of_files(learned, {"models": noise}), case, measured
        )
        for noise in (0.01, 0.3)
    )
    assert 0 < far.shift < near.shift < math.log(2)
    assert near.deviation < far.deviation


def test_files_of_one_quantization_differ_by_what_their_models_differ() -> None:
    values: dict[tuple[str, ...], float] = {
        ("a", "card", "CUDA", "Q4_0", "small"): 0.1,
        ("a", "card", "CUDA", "Q4_0", "large"): 0.3,
        ("a", "card", "CUDA", "Q8_0", "small"): 0.8,
    }
    of_models = learn_published.pooled_deviation(values, 4)
    of_files = learn_published.pooled_deviation(values, 3)
    assert of_models == pytest.approx(0.2 / math.sqrt(2))
    assert of_files == pytest.approx(0.3606, abs=1e-4)


def test_a_row_stands_beside_one_of_its_quantization_and_one_of_another() -> None:
    learned = datasheet.learned()[DECODE]
    row = next(row for row in learn_published.clean(published()) if row.backend == "CUDA")
    rows = [
        row._replace(phase=DECODE, model=model, quantization=quantization, tps=tps)
        for model, quantization, tps in (
            ("llama-2-7b", "Q4_0", 50.0),
            ("llama-3.1-8b", "Q4_0", 45.0),
            ("llama-3.1-8b", "Q8_0", 25.0),
        )
    ]
    beside = learn_published.beside_own([(row, learned) for row in rows])
    kinds = [(row.quantization, own.is_of_type) for row, _, own in beside]
    assert sorted(kinds) == [
        ("Q4_0", False),
        ("Q4_0", False),
        ("Q4_0", True),
        ("Q4_0", True),
        ("Q8_0", False),
    ]


def test_few_cores_read_slower_than_the_memory_allows() -> None:
    """One core of a server reads what it can; all cores read a share of the memory's bandwidth."""
    full = described.find("epyc-9654")
    assert full.core == "zen"
    assert full.reading_slowdown == 1
    two = described.find("epyc-9654 cores=2")
    assert two.reading_slowdown == pytest.approx(0.7 * 460.8 / (2 * 31))
    assert described.find("m4-max:cpu threads=2").reading_slowdown == pytest.approx(
        0.7 * 546 / 200
    )
    assert described.find("gbps=51.2 cores=2 avx2").reading_slowdown == 1


@pytest.mark.parametrize(
    ("words", "cores", "gbps"),
    [
        ("threadripper pro 3955wx", 16, 204.8),
        ("threadripper-pro-5975wx", 32, 204.8),
        ("threadripper pro 5995wx", 64, 204.8),
        ("threadripper 7965wx", 24, 332.8),
        ("threadripper pro 7995wx", 96, 332.8),
        ("threadripper pro 9985wx", 64, 409.6),
        ("grace", 72, 500),
        ("graviton4", 96, 537.6),
        ("threadripper 7980x", 64, 179.2),
    ],
)
def test_a_name_tells_the_cores_and_the_memory_of_its_family(
    words: str, cores: int, gbps: float
) -> None:
    family = processors.family_of(words)
    assert family is not None
    assert family.cores == cores
    assert family.gbps == pytest.approx(gbps)


def test_every_family_of_processors_has_a_kind_of_cores() -> None:
    names = ("core-i5-12400", "n100", "xeon gold 6138", "ryzen 5600", "graviton4", "m2:cpu")
    kinds = [described.find(name).core for name in names]
    assert kinds == ["core", "atom", "xeon", "zen", "neoverse", "apple"]


def test_an_a100_has_other_cores_than_a_geforce() -> None:
    """Its chip, like that of the A30, is not that of the cards with the same name of years."""
    assert devices.find_device("a100-80gb").architecture == "ampere-hbm"
    assert devices.find_device("a30").architecture == "ampere-hbm"
    assert devices.find_device("rtx-3090").architecture == "ampere"


def test_every_measurer_weighs_alike_and_collections_like_all_others() -> None:
    first = published()[0]
    rows = [first._replace(source="someone/else", device=f"d{n}") for n in range(5)]
    rows += [first._replace(source="another/one")]
    rows += [first._replace(source="localscore", device=f"d{n}") for n in range(8)]
    weights = learn_published.weights_of(rows)
    assert weights[:5].sum() == pytest.approx(1)
    assert weights[5] == 1
    assert weights[6:].sum() == pytest.approx(2)


def test_the_record_holds_the_third_part_and_says_where_errors_lie() -> None:
    third = [
        row
        for row in learn_published.clean(published())
        if learn_published.part_of(row) == learn_published.TEST
    ]
    rates = published_record.recorded_rates()
    assert sorted(rate.tps for rate in rates) == pytest.approx(
        sorted(row.tps for row in third), rel=1e-3
    )
    for rate in rates:
        assert 0 < rate.low < rate.high
    nearest = published_record.place_of(PREFILL, True, [0.0])
    furthest = published_record.place_of(PREFILL, True, [9.0])
    assert "off by 0 %, are nearer than 100 % of them" in nearest
    assert "are nearer than 0 % of them" in furthest


def test_the_picture_of_the_record_says_how_many_rates_and_names_the_outliers() -> None:
    rates = published_record.recorded_rates()
    figure = canvas.drawn(bench.draw, (11, 5.6))

    assert figure.get_suptitle().startswith(f"{len(rates)} rates of ")
    for ax, phase in zip(figure.axes, published_record.PHASES, strict=True):
        of_phase = [rate for rate in rates if rate.phase == phase]
        lines: list[Any] = [line for line in ax.lines if line.get_marker() != "None"]
        n_drawn = sum(len(line.get_xdata()) for line in lines)
        texts = [text.get_text() for text in ax.texts]
        worst = max(of_phase, key=lambda rate: abs(rate.off))
        assert n_drawn == len(of_phase)
        assert f" of {len(of_phase)} inside" in ax.get_title()
        assert "above the line: predicted too fast" in texts
        assert any(text.startswith(f"{worst.model}, {worst.device}: ") for text in texts)
