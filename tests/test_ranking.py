"""lab predict on many devices: what fits, in which order, and with which certainty."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core.results import read
from lab.errors import LabError
from lab.features.predict import ranking as room, tables, wording
from lab.features.predict.slo import Slo, chance, parse_slo
from lab.models import asked_devices, devices
from lab.models.devices import DeviceSheet
from lab.roofline import prediction
from lab.roofline.prediction import HERE, PhaseTime, Prediction, Shortage
from tests.support.command import run_lab
from tests.support.rates import of_catalog
from tests.support.records import MODEL, SETTINGS
from tests.support.tables import headings, lines_of

pytestmark = pytest.mark.usefixtures("one_engine")

SAMPLE = Path("results/sample-smollm2-135m-amd-epyc.jsonl")
LLAMA = "llama-3.1-8b:Q4_K_M"
UNKNOWN = (math.nan, math.nan)


def row(
    name: str = "a",
    ends: tuple[float, float] = (1.0, 1.0),
    prefill_s: float | None = 0.8,
    **fields: Any,
) -> Prediction:
    """A request of 1,000 tokens with 101 back, each of 10 to 20 ms."""
    device = None if name == HERE else DeviceSheet("test", name, name, 100, "a test")
    return Prediction(
        MODEL,
        1000,
        101,
        PhaseTime(0.5, prefill_s, ends),
        PhaseTime(0.005, 0.015, (0.01, 0.02)),
        device=device,
        needed_bytes=10**9,
        **fields,
    )


# Limits


def test_limits_are_read() -> None:
    limits = parse_slo("ttft=1s, TPOT=50ms,e2e=2.5s")
    assert limits == Slo(ttft_s=1.0, tpot_s=0.05, e2e_s=2.5)
    assert limits.label == "TTFT 1 s, TPOT 50 ms, E2E 2.5 s"


@pytest.mark.parametrize("text", ["ttft=1", "ttft=1s,ttft=2s", "tpot=0ms", "x=1s", ""])
def test_limits_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="cannot be read"):
        parse_slo(text)


def test_the_chance_to_keep_limits_follows_from_the_range() -> None:
    wide = row(ends=(1.0, 4.0))
    assert chance(wide, Slo(ttft_s=2.0)) == pytest.approx(0.5)
    assert chance(wide, Slo(ttft_s=4.0)) == pytest.approx(0.95)
    assert chance(wide, Slo(ttft_s=1.0)) == pytest.approx(0.05)
    assert chance(wide, Slo(ttft_s=4.0, tpot_s=0.001)) < 0.001
    assert chance(row(), Slo(ttft_s=1.0)) == 1.0
    assert chance(row(), Slo(ttft_s=0.9)) == 0.0
    assert chance(row(), Slo()) == 1.0
    assert math.isnan(chance(row(ends=UNKNOWN), Slo(ttft_s=1.0)))
    assert (
        chance(
            row(shortage=Shortage(9, 8, 1)),
            Slo(ttft_s=9.0),
        )
        == 0.0
    )


# The order


def test_a_request_is_its_prefill_and_its_tokens() -> None:
    assert row().e2e_s == pytest.approx((2.0, 3.0))
    assert row().tps == pytest.approx((50, 100))
    assert row().e2e.expected_s == pytest.approx(2.3)
    without = row(prefill_s=None)
    assert without.e2e.expected_s is None


def test_what_fits_comes_first_by_its_time() -> None:
    rows = lab.predict("1000", 200, LLAMA, "geforce")
    names = [row.name for row in rows]
    fitting = [row for row in rows if row.is_known]
    shown = [row.e2e.shown_s for row in fitting]
    assert set(names) == set(devices.names_of("geforce"))
    assert rows[: len(fitting)] == fitting
    assert shown == sorted(shown)
    assert names.index("rtx-5090") < names.index("rtx-3060")


def test_order_and_bars_are_those_of_the_times_in_the_table() -> None:
    rows = lab.predict("500", 300, "llama-3.2-3b:Q4_K_M", "m4-max,rtx-3060")
    expected = [row.e2e.expected_s or math.nan for row in rows]
    assert expected == sorted(expected)
    bars: list[Any] = list(lab.plot_requests(rows).patches)
    of_prefill = [bar.get_width() for bar in bars[:2]]
    ends = [bar.get_x() + bar.get_width() for bar in bars[2:]]
    assert of_prefill[::-1] == pytest.approx([row.prefill.expected_s for row in rows])
    assert ends[::-1] == pytest.approx(expected)


def test_unknown_times_come_last_but_before_what_does_not_fit() -> None:
    full = row("full", shortage=Shortage(9, 8, 1))
    unknown = row("unknown", ends=UNKNOWN)
    slow = row("slow", prefill_s=9.0)
    ordered = sorted([full, unknown, slow, row()], key=room.speed_order)
    assert [row.name for row in ordered] == ["a", "slow", "unknown", "full"]


def test_each_prompt_length_is_ranked_for_itself() -> None:
    rows = lab.predict("1000,100000", 200, LLAMA, "rtx-4060,rtx-5090")
    assert [row.n_prompt for row in rows] == [1000, 1000, 100_000, 100_000]
    assert [row.shortage is None for row in rows] == [True, True, True, False]
    assert "GB of 8" in (wording.misfit(rows[3].shortage) or "")


def test_names_kinds_and_this_machine_are_read_from_a_list() -> None:
    assert asked_devices.names_in(" rtx-4090 ,Here,, m4") == ["rtx-4090", HERE, "m4"]
    listed = room.devices_in(["rtx-4090", HERE, "geforce", "RTX 4090"])
    assert listed[0].name == "rtx-4090"
    assert len(listed) == len(devices.names_of("geforce"))
    for text, is_ranking in (
        (None, True),
        ("geforce,m4", True),
        ("m4", False),
        ("here", False),
    ):
        assert room.ranks(text) == is_ranking


def test_users_share_the_weights_and_each_has_a_cache() -> None:
    (single,) = lab.predict("1000", 200, LLAMA, "rtx-4090", sequences=1)
    (many,) = lab.predict("1000", 200, LLAMA, "rtx-4090", sequences=16)
    assert single.tpot_s[0] < many.tpot_s[0] < 16 * single.tpot_s[0]
    assert single.token.limit_s is not None
    assert many.token.limit_s is not None
    assert single.token.limit_s < many.token.limit_s <= many.tpot_s[0]
    assert many.needed_bytes > single.needed_bytes
    sizes = []
    for n in (1, 2, 3):  # layers with a window have a cache per user
        (row,) = lab.predict("4000", 200, "gemma-3-4b:Q4_0", "rtx-4090", sequences=n)
        sizes.append(row.needed_bytes)
    assert 0 < sizes[1] - sizes[0] == pytest.approx(sizes[2] - sizes[1], abs=1)
    (too_many,) = lab.predict(
        "8000", 200, LLAMA, "rtx-4060", sequences=16, slo=Slo(tpot_s=1.0)
    )
    assert "for 16 users" in (wording.misfit(too_many.shortage) or "")
    assert too_many.chance == 0.0


# This machine


def test_this_machine_stands_there_with_what_it_measured_or_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = read([SAMPLE])
    first = contents.records[0]
    plan = dataclasses.replace(
        prediction.plan_for("smollm2-135m", {}),
        machine=first.machine,
        model=first.model,
        settings=first.settings,
    )
    monkeypatch.setattr(prediction, "plan_for", lambda model, settings, watch=None: plan)
    shutil.copy(SAMPLE, tmp_path)
    rows = lab.predict("1000", 200, ceilings=tmp_path)
    (measured,) = [row for row in rows if row.name == HERE]
    assert measured.is_measured
    assert len(rows) == len(devices.devices()) + 1
    summary = lab.summary(lab.runs(contents.records)).query("n_prompt == 1000").iloc[0]
    assert measured.prefill_s == pytest.approx((summary.ttft_s_min, summary.ttft_s_max))
    (explained,) = lab.predict(
        "1000",
        200,
        device="here",
        ceilings=tmp_path,
    )
    assert not explained.is_measured
    assert "are fitted to" in wording.basis(explained)
    evidence = prediction.evidence_in(tmp_path)
    (many,) = room.ranked_here(plan, [1000], 200, 8, evidence)
    assert many.users == 8
    assert not many.is_measured
    assert explained.tpot_s[0] < many.tpot_s[0] < 8 * explained.tpot_s[0]
    assert room.same_requests(evidence.records, plan, 1052)
    assert not room.same_requests(evidence.records, plan, 1053)


def test_without_ceilings_this_machine_is_not_ranked_and_not_explained(tmp_path: Path) -> None:
    rows = lab.predict("1000", 4, ceilings=tmp_path)
    assert HERE not in [row.name for row in rows]
    with pytest.raises(LabError, match="not been measured"):
        lab.predict(
            "102",
            4,
            device="here",
            ceilings=tmp_path,
        )


# What is shown

EVERY = tables.Display(is_ranking=True, shows_all=True, is_named=True)
MOST_LINES = 14
"""A default output at 80 columns has no more."""


def test_without_a_peak_the_answer_is_the_rate_of_decode() -> None:
    unknown = row("unknown", ends=UNKNOWN)
    rate = "66.7 tokens/s (50.0 to 100). Prefill is not predicted: the peak is not known."
    explained = tables.explanation([unknown])
    assert explained.answer == f"After 1,000 tokens decode is {rate}"
    full = row("full", shortage=Shortage(9 * 10**9, 8e9, 1))
    ranked = tables.ranking([unknown, full], EVERY)
    assert ranked.words == [f"The fastest in decode is unknown: {rate}"]
    assert tables.ranking([full], EVERY).words == ["No device here can run this."]


def test_the_table_says_who_keeps_limits_and_how_many_are_not_shown() -> None:
    rows = [
        row("sure", chance=0.99),
        row("maybe", chance=0.5),
        row("never", chance=0.01),
        row("unknown", UNKNOWN),
        row("full", shortage=Shortage(9 * 10**9, 8e9, 2)),
        row(HERE, shortage=Shortage(9 * 10**9, 7e9, 2)),
    ]
    section = tables.ranking(rows, dataclasses.replace(EVERY, slo=Slo(ttft_s=1.0)))
    columns = dict(zip(headings(section), zip(*lines_of(section), strict=True), strict=True))
    assert columns["keeps\nlimits"][:3] == ("yes", "50 %", "no")
    assert columns["note"][4] == "needs 9.0 GB of 8.0 for 2 users"
    assert columns["TTFT\ns"][:2] == ("0.800", "0.800")
    assert columns["decode\ntokens/s"][0] == "66.7 (50.0-100)"
    assert [columns["E2E\ns"][index] for index in (0, 3, 4)] == ["2.30 (2.00-3.00)", "-", "-"]
    assert "1 of 6 keep TTFT 1 s with at least 95 % certainty." in section.sentences
    answer = (
        "The fastest here is sure: 2.30 s (2.00 s to 3.00 s) for the whole request. By their "
        "ranges maybe and never may be as fast."
    )
    assert section.words == [answer]
    few = tables.ranking(rows, tables.Display(is_ranking=True, is_named=True))
    assert lines_of(few)[0][0] == HERE
    wide = dataclasses.replace(row("wide"), token=PhaseTime(0.005, 0.015, (0.001, 0.02)))
    some = tables.ranking([*rows, wide], tables.Display(is_ranking=True, is_named=True))
    assert "wide" not in [cells[0] for cells in lines_of(some)]
    assert "1 with wide ranges" in some.sentences[0]


def test_the_command_ranks_all_devices() -> None:
    status, out, error = run_lab("predict", "-m", LLAMA, "-p", "8000", "-n", "300")
    assert status == 0
    assert "8,000 tokens in, 300 out" in out
    assert "Not shown: " in out
    assert "b200" not in out
    for name in devices.ordinary():
        assert name in out
    assert len(out.strip().splitlines()) <= MOST_LINES
    _, out, error = run_lab("predict", "-m", LLAMA, "--all", "--details")
    assert out.count("b200") == 2  # in its row, and as the fastest
    assert "This machine is not in the table" in error
    assert "lab ceilings -m llama-3.1-8b:Q4_K_M --types Q4_K,Q6_K; lab measure" in error


def test_a_type_that_nobody_named_is_said_to_be_chosen() -> None:
    request = ("-d", "m4", "-p", "10", "--no-plot", "--details")
    _, out, _ = run_lab("predict", "-m", "llama-3.1-405b", *request)
    assert "llama-3.1-405b is predicted in Q4_K_M, the usual type of files on the hub" in out
    _, out, _ = run_lab("predict", "-m", "qwen3-0.6b", *request)
    assert "qwen3-0.6b is predicted in Q8_0, the type of its file (lab models)" in out
    assert "Another: -m qwen3-0.6b:Q4_0" in out
    assert "is predicted in" not in run_lab("predict", "-m", LLAMA, *request)[1]


def test_the_command_ranks_a_kind() -> None:
    status, out, error = run_lab("predict", "-m", LLAMA, "-d", "apple", "--all")
    assert status == 0
    assert not error
    for name in devices.names_of("apple"):
        assert f"\n{name} " in out


def test_the_command_explains_names() -> None:
    status, out, _ = run_lab("predict", "-m", LLAMA, "-d", "rtx4090,M4 Max", "-p", "1k")
    assert status == 0
    assert re.match(r"The rtx-4090 is [\d.]+x as fast as the m4-max \([\d.]+ to", out)
    assert len(out.splitlines()) <= MOST_LINES
    _, out, _ = run_lab("predict", "-m", LLAMA, "-d", "rtx4090", "-d", "M4 Max", "--details")
    assert out.count("From the datasheet: ") == 2


def test_the_json_has_the_times_and_chances_of_each_prompt_length() -> None:
    _, out, _ = run_lab(
        "predict", "-m", LLAMA, "-d", "rtx-4090", "--slo", "tpot=50ms", "--json"
    )
    rows = json.loads(out)["rows"]
    assert [row["n_prompt"] for row in rows] == [1000, 10_000]
    assert {row["name"] for row in rows} == {"rtx-4090"}
    assert rows[0]["chance"] > 0.9
    assert rows[0]["e2e_s"][0] > rows[0]["prefill_s"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "lama"), "lama"),
        (("-d", "rtx-4091"), "Did you mean"),
        (("--slo", "fast"), "cannot be read"),
        (("-n", "1"), "leaves nothing to decode"),
        (("--sequences", "0"), "Give 1 or more"),
        (("-p", "4,000"), "Write thousands without a comma"),
    ],
)
def test_wrong_use_has_its_sentence(arguments: tuple[str, ...], message: str) -> None:
    status, _, error = run_lab("predict", *arguments)
    assert status == 1
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("available_gb", "message"),
    [
        (24, None),
        (12, "Q8_0 would fit"),
        (1, "a smaller model would fit"),
    ],
)
def test_what_does_not_fit_says_what_would(available_gb: float, message: str | None) -> None:
    request = dataclasses.replace(
        row(),
        model=of_catalog("llama-3.1-8b", "F16"),
        n_gen=200,
    )
    filled = prediction.with_memory(request, SETTINGS, available_gb * 1e9)
    sentence = wording.misfit(filled.shortage)
    if message is None:
        assert sentence is None
    else:
        assert sentence
        assert sentence.endswith(message)
    assert prediction.with_memory(request, SETTINGS, None).shortage is None


def test_a_request_that_is_too_long_says_how_long_it_may_be() -> None:
    unlisted = dataclasses.replace(of_catalog("llama-3.1-8b", "F16"), name="unlisted")
    request = dataclasses.replace(
        row(),
        model=unlisted,
        n_prompt=100_000,
    )
    filled = prediction.with_memory(request, SETTINGS, 20e9)
    assert "tokens would fit" in (wording.misfit(filled.shortage) or "")


# Before llama.cpp is built


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-cpp-python is not installed, and no engine can start."""

    def refuse(self: object) -> None:
        pytest.fail("an engine was started")

    monkeypatch.setattr("lab.process.no_engine.is_installed", lambda: False)
    monkeypatch.setattr("lab.roofline.prediction.Worker.__enter__", refuse)


@pytest.mark.usefixtures("not_installed")
def test_devices_are_ranked_without_llama_cpp(tmp_path: Path) -> None:
    request = ("-m", LLAMA, "-p", "8000", "--ceilings", tmp_path, "--no-plot")
    status, out, error = run_lab("predict", *request)
    assert status == 0, error
    assert "rtx-4090" in out


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("model", [LLAMA, "smollm2-135m", "synthetic:smollm2-135m"])
def test_a_file_in_the_cache_is_not_read_without_llama_cpp(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path))
    for name in ("llama-3.1-8b--Q4_K_M", "smollm2-135m--Q4_0"):
        (tmp_path / f"synthetic--{name}.gguf").write_bytes(b"GGUF")
    request = ("-m", model, "-d", "m4", "--measured", f"{LLAMA}=20", "--no-plot")
    status, out, error = run_lab("predict", *request)
    assert status == 0, error
    name = model.removeprefix("synthetic:").removesuffix(":Q4_K_M")
    assert f"{name} Q4_" in out


@pytest.mark.usefixtures("not_installed")
def test_a_file_cannot_be_predicted_without_llama_cpp(tmp_path: Path) -> None:
    model = tmp_path / "mine.gguf"
    model.write_bytes(b"GGUF")
    status, _, error = run_lab("predict", "-m", model, "-d", "m4")
    assert status == 1
    assert "mine.gguf cannot be read: llama.cpp is not installed." in error
    assert "python3 -m uv sync" in error
