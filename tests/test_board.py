"""lab board: one request on many devices: what fits, in which order, with which certainty, at which price."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lab
from lab.core.request import Slo
from lab.core.results import read, save
from lab.drawing.canvas import drawn
from lab.errors import LabError
from lab.show import text_board
from lab.why import candidates as board
from lab.why import datasheet, prediction
from lab.why.candidates import HERE, MEASURED, PREDICTED, Candidate, Price
from lab.why.serving import Demand
from tests.conftest import MODEL, make_record, make_run, run_lab

LLAMA = "llama-3.1-8b:Q4_K_M"


def candidate(name: str = "a", ttft: tuple[float, float] = (1.0, 1.0), **more: Any) -> Candidate:
    return Candidate(name, "predicted", MODEL, 1000, 101, 1, ttft, more.pop("tpot", (0.01, 0.02)), 10**9, **more)


def test_the_request_is_prefill_and_decode_and_what_fits_comes_first_by_its_time() -> None:
    assert candidate().e2e_s == pytest.approx((2.0, 3.0))
    found = board.board([LLAMA], 1000, 200, devices=["geforce"])
    names = [one.name for one in found]
    assert set(names) == set(datasheet.names_of("geforce"))
    known = [one for one in found if not one.problem and one.e2e_s[0] == one.e2e_s[0]]
    middles = [math.prod(one.e2e_s) for one in known]
    assert middles == sorted(middles)
    assert found[: len(known)] == known and names.index("rtx-5090") < names.index("rtx-3060")
    small = board.board([LLAMA], 100_000, 200, devices=["rtx-4060", "rtx-5090"])
    assert [bool(one.problem) for one in small] == [False, True] and "GB of 8" in small[1].problem


def test_users_share_the_weights_and_each_has_a_cache() -> None:
    one, many = (board.board([LLAMA], 1000, 200, devices=["rtx-4090"], users=n)[0] for n in (1, 16))
    assert one.tpot_s[0] < many.tpot_s[0] < 16 * one.tpot_s[0]
    assert many.needed_bytes > one.needed_bytes
    by_window = [board.board(["gemma-3-4b:Q4_0"], 4000, 200, devices=["rtx-4090"], users=n)[0] for n in (1, 2, 3)]
    caches = [b.needed_bytes - a.needed_bytes for a, b in itertools.pairwise(by_window)]
    assert caches[0] == pytest.approx(caches[1], abs=1) and caches[0] > 0  # layers with a window have a cache per user
    too_many = board.board([LLAMA], 8000, 200, devices=["rtx-4060"], users=16)[0]
    assert "for 16 users" in too_many.problem and board.chance(too_many, Slo(tpot_s=1.0)) == 0.0


def test_the_chance_to_keep_limits_follows_from_the_range() -> None:
    one = candidate(ttft=(1.0, 4.0))
    assert board.chance(one, Slo(ttft_s=2.0)) == pytest.approx(0.5)
    assert board.chance(one, Slo(ttft_s=4.0)) == pytest.approx(0.95)
    assert board.chance(one, Slo(ttft_s=1.0)) == pytest.approx(0.05)
    assert board.chance(one, Slo(ttft_s=4.0, tpot_s=0.001)) < 0.001
    assert board.chance(candidate(ttft=(1.0, 1.0)), Slo(ttft_s=1.0)) == 1.0
    assert math.isnan(board.chance(candidate(ttft=(math.nan, math.nan)), Slo(ttft_s=1.0)))


def test_this_machine_stands_there_with_what_it_measured(tmp_path: Path) -> None:
    here = lab.measure("100", gen=4, repeat=2, out=tmp_path)
    found = board.board(["smollm2-135m"], 102, 4, results=tmp_path)
    own = [one for one in found if one.name == HERE]
    assert len(own) == 1 and own[0].kind == MEASURED
    ends = lab.summary(lab.runs(here)).iloc[0]
    assert own[0].ttft_s == pytest.approx((ends.ttft_s_min, ends.ttft_s_max))
    for model in ("smollm2-135m", "smollm2-135m:F16"):  # neither measured nor are there ceilings
        assert not [one for one in board.board([model], 5000, 4, results=tmp_path) if one.name == HERE]
    save(tmp_path / "another.jsonl", make_record(make_run(5000, 4), model=MODEL))
    assert not [one for one in board.board(["smollm2-135m"], 5000, 4, results=tmp_path) if one.name == HERE]


def test_the_largest_models_that_a_device_decodes_at_a_rate() -> None:
    found = board.largest("rtx-4090", 20, 1000, 200)
    sizes = [one.model.n_bytes or 0 for one in found]
    assert sizes == sorted(sizes, reverse=True) and all(one.tps[0] >= 20 for one in found)
    assert len({one.model.name for one in found}) == len(found)
    faster = board.largest("rtx-4090", 200, 1000, 200)
    assert 0 < len(faster) < len(found)


def test_prices_are_read_and_each_fault_has_its_sentence(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("device, price, watts\nRTX 4090, 1599, 450\nthis machine, 0,\n")
    assert board.read_prices(file) == {"rtx-4090": Price(1599, 450), HERE: Price(0, None)}
    for text, words in (
        ("name,euro\nrtx-4090,1\n", "needs the columns device and price; it has euro, name"),
        ("", "it has none"),
        ("device,price\nrtx-4090,much\n", "Line 2 of .* the price 'much' is not a number"),
        ("device,price\nrtx-4090,\n", "rtx-4090 has no price"),
        ("device,price\nrtx-4999,3\n", "no device named 'rtx-4999'"),
    ):
        file.write_text(text)
        with pytest.raises(LabError, match=words):
            board.read_prices(file)
    with pytest.raises(LabError, match="cannot be read"):
        board.read_prices(tmp_path / "none.csv")


def test_energy_of_a_token_is_power_times_time_shared_by_users() -> None:
    one = dataclasses.replace(candidate(), price=Price(1000, 100.0), users=2)
    assert one.joules_per_token(None) == pytest.approx((0.5, 1.0))
    assert candidate().joules_per_token(None) is None
    assert candidate().joules_per_token(50) == pytest.approx((0.5, 1.0))


def test_the_table_says_who_keeps_limits_and_what_energy_costs() -> None:
    rows = [
        candidate("sure", chance=0.99, price=Price(500, 100)),
        candidate("maybe", chance=0.5),
        candidate("never", chance=0.01),
        candidate("full", problem="needs 9 GB of 8"),
    ]
    shown = text_board.section(rows, Slo(ttft_s=1.0), watts=50, kwh=0.36)
    table = dict(zip(shown.headings, zip(*shown.cells, strict=True), strict=True))
    assert table["keeps\nlimits"] == ("yes", "50 %", "no", "-")
    assert table["per million\ntokens"][:2] == ("0.100-0.200", "0.0500-0.100") and table["note"][3] == "needs 9 GB of 8"
    assert "1 of 4 keep TTFT 1 s with at least 95 % certainty." in shown.sentences
    assert shown.sentences[0] == "Fastest: sure, 2.00 s to 3.00 s for the whole request."


def test_pictures_have_a_bar_for_each_device_and_a_limit_line() -> None:
    found = board.board([LLAMA], 1000, 200, devices=["geforce"])
    pictures = {one.name: one for one in text_board.section(found).pictures}
    bars = drawn(pictures["requests"].draw, (10, 5)).axes[0]
    assert len(bars.get_yticklabels()) == text_board.MOST_BARS
    rates = drawn(pictures["bandwidth"].draw, (10, 5)).axes[0]
    (x0, y0), (x1, y1) = np.asarray(rates.lines[0].get_xydata(), dtype=float)
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    assert rates.get_xscale() == "log" and slope == pytest.approx(1)


def test_what_others_published_of_the_model_is_in_the_picture() -> None:
    for model, has_points in (("llama-2-7b:Q4_0", True), ("smollm2-135m:Q8_0", False)):
        found = board.board([model], 512, 128, devices=["geforce"])
        pictures = {one.name: one for one in text_board.section(found).pictures}
        labels = drawn(pictures["bandwidth"].draw, (10, 5)).axes[0].get_legend_handles_labels()[1]
        assert any("published" in label for label in labels) == has_points


def test_the_command(tmp_path: Path) -> None:
    status, out, _ = run_lab("board", "-m", LLAMA, "-d", "rtx-4090,rtx-3090", "-p", "8000", "-n", "300", "-o", tmp_path)
    assert status == 0 and "8,000 tokens in, 300 out" in out
    assert (tmp_path / "board-requests.png").exists()
    _, out, _ = run_lab("board", "-m", LLAMA, "-d", "rtx-4090", "--slo", "tpot=50ms", "--no-plot", "--json")
    row = json.loads(out)["rows"][0]
    assert row["name"] == "rtx-4090" and row["chance"] > 0.9 and row["e2e_s"][0] > row["ttft_s"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "lama"), "lama"),
        (("-d", "rtx-4091"), "Did you mean"),
        (("--memory", "much"), "not a size"),
        (("--memory", "1GB"), "No device here has 1GB or less"),
        (("--slo", "fast"), "cannot be read"),
        (("-n", "1"), "--gen 2 or more"),
        (("--every", "0"), "Give seconds above 0"),
        (("--every", "60", "--kwh", "0.3"), "without --at-least and --kwh"),
        (("--at-least", "20"), "needs one --device"),
        (("--at-least", "1e9", "-d", "m1"), "decodes no model of the catalog"),
        (("--check",), "needs the folder to check"),
        (("nowhere",), "no results file nowhere"),
    ],
)
def test_wrong_use_has_its_sentence(arguments: tuple[str, ...], words: str) -> None:
    status, _, err = run_lab("board", *arguments)
    assert status == 1 and words in err and "Traceback" not in err


def test_many_users_need_devices_and_slow_ones_never_keep_the_limits(tmp_path: Path) -> None:
    asked: Any = {"devices": ["rtx-4090", "rtx-3060", "m1", "rtx-4060"], "every_s": 60.0, "slo": Slo(ttft_s=1.0)}
    many, few = (board.board([LLAMA], 1000, 200, users=n, **asked) for n in (1000, 10))
    needs = {one.name: one.needs for one in many}
    fast, slow = needs["rtx-4090"] or (None, None)
    assert fast and slow and 1 < fast.n_devices < slow.n_devices and slow.ttft_s <= 1.0
    assert needs["m1"] == (None, None) and many[-1].name == "m1"
    assert few[0].needs and few[0].needs[1] and few[0].needs[1].n_devices == 1
    slots = {one.name: one.n_slots or 0 for one in many}
    assert 1 < slots["rtx-4060"] < slots["rtx-3060"] < slots["rtx-4090"] <= board.MOST_SLOTS
    shown = text_board.section(many, has_here=False)
    table = dict(zip(shown.headings, zip(*shown.cells, strict=True), strict=True))
    assert table["devices"][0] == f"{fast.n_devices}-{slow.n_devices}" and table["devices"][-1] == "never"
    assert "each gets at most 80 % of the requests that it can answer" in " ".join(shown.sentences)
    assert any(line.startswith("never: a request that has a device for itself") for line in shown.sentences)
    out = run_lab("board", "-m", LLAMA, "-d", "m1,rtx-4090", "--users", "1000", "--every", "60", "--json")[1]
    rows = {row["name"]: row for row in json.loads(out)["rows"]}
    assert [need["n_devices"] for need in rows["rtx-4090"]["needs"]] > [1, 1]
    assert rows["m1"]["demand"] == {"users": 1000, "every_s": 60, "n_prompt": 1000, "n_gen": 200, "slo": None}


def test_this_machine_serves_users_by_its_ceilings_and_runs() -> None:
    contents = read([Path("results/sample-smollm2-135m-amd-epyc.jsonl")])
    first = contents.records[0]
    plan = prediction.plan_for("smollm2-135m", {})
    plan = dataclasses.replace(plan, machine=first.machine, model=first.model, settings=first.settings)
    kept = list(contents.records), list(contents.ceilings)
    (one,) = board._here(plan, 1000, 200, Demand(100, 60.0, 1000, 200), kept)
    assert one.name == HERE and one.kind == PREDICTED and one.n_slots and one.needs
    fast, slow = one.needs
    assert fast and slow and fast.n_devices <= slow.n_devices
    # 100 / 60 s * (prefill + 199 steps shared by the slots) / 80 % is the least that 100 users need
    least = 100 / 60 * (one.ttft_s[0] + 199 * one.tpot_s[0] / one.n_slots) / 0.8
    assert least <= fast.n_devices <= 100 / 60 * one.e2e_s[0] / 0.8 + 1


def test_a_folder_becomes_a_page_or_is_checked(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", *[make_record(make_run(100, 10, i)) for i in range(3)])
    assert run_lab("board", tmp_path, "--out", tmp_path / "page")[0] == 0
    assert (tmp_path / "page" / "index.html").exists()
    assert run_lab("board", tmp_path, "--check")[1] == "Nothing to refuse.\n"
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    status, out, _ = run_lab("board", tmp_path, "--check")
    assert status == 1 and "refused  b.jsonl: 3 runs of it are in a.jsonl too" in out
