"""lab predict on many devices: what fits, in which order, with which certainty, at which price."""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.features.predict.slo import Slo, chance, parse_slo
from lab.core.results import read
from lab.errors import LabError
from lab.features.predict import tables, wording
from lab.roofline import prediction
from lab.roofline.prediction import HERE, Prediction, Shortage
from lab.models import devices
from lab.models.devices import Device
from tests.conftest import MODEL, SETTINGS, run_lab

LLAMA = "llama-3.1-8b:Q4_K_M"


def row(name: str = "a", prefill: tuple[float, float] = (1.0, 1.0), **more: Any) -> Prediction:
    device = None
    if name != HERE:
        device = Device("test", name, name, 100, "")
    return Prediction(
        MODEL,
        1000,
        101,
        0.5,
        prefill,
        0.005,
        (0.01, 0.02),
        device=device,
        needed_bytes=10**9,
        **more,
    )


def test_the_request_is_prefill_and_decode_and_what_fits_comes_first_by_its_time() -> None:
    assert row().e2e_s == pytest.approx((2.0, 3.0))
    found = lab.predict("1000", 200, LLAMA, "geforce")
    names = [one.name for one in found]
    assert set(names) == set(devices.names_of("geforce"))
    known = [one for one in found if one.is_known]
    middles = [math.prod(one.e2e_s) for one in known]
    assert middles == sorted(middles)
    assert found[: len(known)] == known and names.index("rtx-5090") < names.index("rtx-3060")
    small = lab.predict("1000,100000", 200, LLAMA, "rtx-4060,rtx-5090")
    assert [one.n_prompt for one in small] == [1000, 1000, 100_000, 100_000]
    assert [bool(one.shortage) for one in small] == [
        False,
        False,
        False,
        True,
    ] and "GB of 8" in str(wording.misfit(small[3].shortage))


def test_users_share_the_weights_and_each_has_a_cache() -> None:
    one, many = (lab.predict("1000", 200, LLAMA, "rtx-4090", users=n)[0] for n in (1, 16))
    assert one.tpot_s[0] < many.tpot_s[0] < 16 * one.tpot_s[0]
    assert (
        one.tpot_limit_s < many.tpot_limit_s <= many.tpot_s[0]
        and many.needed_bytes > one.needed_bytes
    )
    by_window = [
        lab.predict("4000", 200, "gemma-3-4b:Q4_0", "rtx-4090", users=n)[0] for n in (1, 2, 3)
    ]
    caches = [b.needed_bytes - a.needed_bytes for a, b in itertools.pairwise(by_window)]
    assert (
        caches[0] == pytest.approx(caches[1], abs=1) and caches[0] > 0
    )  # layers with a window have a cache per user
    (too_many,) = lab.predict("8000", 200, LLAMA, "rtx-4060", users=16, slo=Slo(tpot_s=1.0))
    assert "for 16 users" in str(wording.misfit(too_many.shortage)) and too_many.chance == 0.0


def test_the_chance_to_keep_limits_follows_from_the_range() -> None:
    one = row(prefill=(1.0, 4.0))
    assert chance(one, Slo(ttft_s=2.0)) == pytest.approx(0.5)
    assert chance(one, Slo(ttft_s=4.0)) == pytest.approx(0.95)
    assert chance(one, Slo(ttft_s=1.0)) == pytest.approx(0.05)
    assert chance(one, Slo(ttft_s=4.0, tpot_s=0.001)) < 0.001
    assert chance(row(prefill=(1.0, 1.0)), Slo(ttft_s=1.0)) == 1.0
    assert math.isnan(chance(row(prefill=(math.nan, math.nan)), Slo(ttft_s=1.0)))


def test_this_machine_stands_there_with_what_it_measured_or_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Path("results/sample-smollm2-135m-amd-epyc.jsonl")
    contents = read([sample])
    plan = prediction.plan_for("smollm2-135m", {})
    first = contents.records[0]
    plan = dataclasses.replace(
        plan, machine=first.machine, model=first.model, settings=first.settings
    )
    monkeypatch.setattr(prediction, "plan_for", lambda model, settings: plan)
    shutil.copy(sample, tmp_path)
    found = lab.predict("1000", 200, results=tmp_path)
    (own,) = [one for one in found if one.name == HERE]
    assert own.is_measured and len(found) == len(devices.devices()) + 1
    ends = lab.summary(lab.runs(contents.records)).query("n_prompt == 1000").iloc[0]
    assert own.prefill_s == pytest.approx((ends.ttft_s_min, ends.ttft_s_max))
    (one,) = lab.predict("1000", 200, device="here", results=tmp_path)
    many = next(
        row for row in lab.predict("1000", 200, users=8, results=tmp_path) if row.name == HERE
    )
    assert not one.is_measured and "are fitted to" in wording.basis(one)
    assert (
        one.tpot_s[0] < many.tpot_s[0] < 8 * one.tpot_s[0]
        and many.users == 8
        and not many.is_measured
    )
    (tmp_path / "none").mkdir()
    assert not [
        one for one in lab.predict("1000", 4, results=tmp_path / "none") if one.name == HERE
    ]
    with pytest.raises(LabError, match="not been measured"):
        lab.predict("102", 4, device="here", results=tmp_path / "none")


def test_the_table_says_who_keeps_limits_and_how_many_are_not_shown() -> None:
    rows = [
        row("sure", chance=0.99),
        row("maybe", chance=0.5),
        row("never", chance=0.01),
        row("unknown", (math.nan, math.nan)),
        row("full", shortage=Shortage(9 * 10**9, 8e9, 2)),
        row(HERE, shortage=Shortage(9 * 10**9, 7e9, 2)),
    ]
    shown = tables.ranking(rows, Slo(ttft_s=1.0))
    table = dict(zip(shown.headings, zip(*shown.cells, strict=True), strict=True))
    assert table["keeps\nlimits"][:3] == ("yes", "50 %", "no")
    assert table["note"][4] == "needs 9.0 GB of 8.0 for 2 users" and len(shown.cells) == 6
    assert "1 of 6 keep TTFT 1 s with at least 95 % certainty." in shown.sentences
    assert shown.words == ["The fastest is sure: 2.00 s to 3.00 s for the whole request."]
    few = tables.ranking(rows, most=2)
    assert [cells[0] for cells in few.cells] == ["sure", "maybe", HERE]
    unknown = "1 without a known peak, so prefill is not predicted"
    words = f"Not shown: 1 slower, 1 with too little memory, {unknown}. To see them: --all"
    assert words in few.sentences


def test_the_command_ranks_kinds_and_explains_names() -> None:
    status, out, err = run_lab("predict", "-m", LLAMA, "-p", "8000", "-n", "300")
    assert (
        status == 0
        and "8,000 tokens in, 300 out" in out
        and "This machine is not in the table" in err
    )
    assert (
        out.count("b200") == 2 and "Not shown: " in out and "m1 " not in out
    )  # in its row, and as the fastest
    status, out, err = run_lab("predict", "-m", LLAMA, "-d", "apple", "--all")
    assert (
        status == 0 and not err and all(f"\n{name} " in out for name in devices.names_of("apple"))
    )
    status, out, _ = run_lab("predict", "-m", LLAMA, "-d", "rtx4090,M4 Max", "-p", "1k")
    assert status == 0 and out.count("From the datasheet: ") == 2 and out.count(" on ") >= 2
    _, out, _ = run_lab("predict", "-m", LLAMA, "-d", "rtx-4090", "--slo", "tpot=50ms", "--json")
    rows = json.loads(out)["rows"]
    assert [one["n_prompt"] for one in rows] == [10, 1000, 10_000] and {
        one["name"] for one in rows
    } == {"rtx-4090"}
    assert rows[0]["chance"] > 0.9 and rows[0]["e2e_s"][0] > rows[0]["prefill_s"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "lama"), "lama"),
        (("-d", "rtx-4091"), "Did you mean"),
        (("--slo", "fast"), "cannot be read"),
        (("-n", "1"), "leaves nothing to decode"),
        (("--users", "0"), "Give 1 or more"),
    ],
)
def test_wrong_use_has_its_sentence(arguments: tuple[str, ...], words: str) -> None:
    status, _, err = run_lab("predict", *arguments)
    assert status == 1 and words in err and "Traceback" not in err


def test_what_does_not_fit_has_no_times_and_says_what_would() -> None:
    model = dataclasses.replace(prediction.plan_for("llama-3.1-8b:F16", {}).model)
    one = dataclasses.replace(row(), model=model, n_gen=200)
    fit = {
        gb: str(wording.misfit(prediction.with_memory(one, SETTINGS, gb and gb * 1e9).shortage))
        for gb in (None, 24, 12, 1)
    }
    assert (
        fit[None] == fit[24] == "None"
        and "Q8_0 would fit" in fit[12]
        and "a smaller model would fit" in fit[1]
    )


def test_limits_are_read() -> None:
    limits = parse_slo("ttft=1s, TPOT=50ms,e2e=2.5s")
    assert limits == Slo(ttft_s=1.0, tpot_s=0.05, e2e_s=2.5)
    assert limits.label == "TTFT 1 s, TPOT 50 ms, E2E 2.5 s"


@pytest.mark.parametrize("text", ["ttft=1", "ttft=1s,ttft=2s", "tpot=0ms", "x=1s", ""])
def test_limits_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="cannot be read"):
        parse_slo(text)
