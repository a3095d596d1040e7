"""The board's page: which rows it has, that its kinds cannot be mixed up, that its script only sorts and filters."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import Device, Record, Steps
from lab.core.shown import Shown
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.show import board_page
from lab.show.board_page import MEASURED, PREDICTED, PUBLISHED, BoardRow
from lab.why import contributions
from tests.conftest import MACHINE, MODEL, SETTINGS, make_record, make_run
from tests.test_report import EVIL, Page, browser, contrast, evil, look

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "results"
__all__ = ["browser"]  # a fixture


def other(kind: str, device: str, tps: float | None, model: str = "tiny Q4_0") -> BoardRow:
    rate = None if tps is None else Shown(tps, None, None, 1)
    return BoardRow(kind, device, model, rate, rate, (512, None), source="somebody", date="2026-01-01")


def machines() -> list[Record]:
    """Runs of two machines, with three prompt lengths each."""
    runs = [make_run(n, 10, i, prefill_ms=0.1) for n in (10, 500, 4000) for i in range(3)]
    far = dataclasses.replace(MACHINE, cpu="Far")
    slow = [make_run(n, 10, i, prefill_ms=0.2, decode_ms=40) for n in (10, 500, 4000) for i in range(3)]
    return [*map(make_record, runs), *(make_record(run, machine=far, session="far") for run in slow)]


def test_a_row_has_the_prefill_nearest_to_512_tokens_and_the_decode_of_the_shortest_prompt() -> None:
    rows = [row for row, _ in board_page.measured_rows(machines())]
    assert [(row.device, row.at) for row in rows] == [("Test CPU, 4 cores", (500, 10)), ("Far, 4 cores", (500, 10))]
    assert rows[1].prefill is not None and rows[1].prefill.value == pytest.approx(5000)
    assert rows[1].decode is not None and rows[1].decode.value == pytest.approx(1000 / 41, rel=0.03)
    assert rows[0].setup == "" and rows[0].kind == MEASURED


def test_setups_of_a_machine_are_rows_of_their_own_with_pages_of_their_own(tmp_path: Path) -> None:
    four = dataclasses.replace(SETTINGS, n_threads=4)
    both = [*machines()[:9], *(dataclasses.replace(one, settings=four, session="b") for one in machines()[:9])]
    index = board_page.write_board(tmp_path, both)
    rows = [row for row, _ in board_page.measured_rows(both)]
    assert {row.setup for row in rows} == {"n_threads 2", "n_threads 4"}
    files = {name for row in rows for _, name in row.links}
    assert len(files) == 4 and all((tmp_path / name).exists() for name in files)
    links = {one["href"] for one in Page(index.read_text()).named("a")}
    assert links == files
    data = next(name for name in files if name.endswith(".jsonl"))
    assert len(results.read([tmp_path / data]).records) == 9


def test_measured_published_and_predicted_are_told_apart_and_come_in_this_order() -> None:
    measured = [row for row, _ in board_page.measured_rows(machines())]
    text = board_page.html([other(PREDICTED, "fast", 9000), other(PUBLISHED, "known", 8000), *measured])
    kinds = [one["data-kind"] for one in Page(text).named("tr") if "data-kind" in one]
    assert kinds == [MEASURED, MEASURED, PUBLISHED, PREDICTED]
    assert "nobody measured it" in text and "by others, as their source says it" in text
    assert "nobody measured it" not in board_page.html(measured)


def test_published_rates_of_the_same_models_and_predictions_for_other_devices_are_rows() -> None:
    llama = shapes.model_of(catalog.find("llama-2-7b"), "Q4_0")
    records = [dataclasses.replace(record, model=llama) for record in machines()]
    rows = board_page.other_rows(records, [])
    assert {row.kind for row in rows} == {PUBLISHED, PREDICTED} and {row.model for row in rows} == {"llama-2-7b Q4_0"}
    one = next(row for row in rows if row.device == "rtx-5090" and row.kind == PUBLISHED)
    assert one.decode and one.decode.value > 100 and one.source and one.date
    guessed = next(row for row in rows if row.kind == PREDICTED and row.prefill and row.decode)
    assert guessed.decode and guessed.decode.low and guessed.decode.high
    assert guessed.decode.low < guessed.decode.value < guessed.decode.high
    assert not {row.device for row in rows if row.kind == PREDICTED} & {
        row.device for row in rows if row.kind == PUBLISHED
    }


def test_disturbed_rates_are_marked_and_unknown_ones_are_a_dash() -> None:
    doubtful = dataclasses.replace(other(MEASURED, "noisy", None), decode=Shown(5, 4, 6, 3, ("disturbed",)))
    cells = [text for text, _, _ in doubtful.cells]
    assert cells[3:5] == ["-", "5.00!!"]


def test_nothing_good_is_a_sentence(tmp_path: Path) -> None:
    failed = make_record(make_run(10, status="failed", error="no memory"))
    with pytest.raises(LabError, match="nothing to put on a board"):
        board_page.write_board(tmp_path, [failed])


def test_a_hostile_record_stays_text(tmp_path: Path) -> None:
    hostile = [evil(record) for record in machines()[:9]]
    text = board_page.write_board(tmp_path, hostile).read_text()
    assert "<img" not in text and text.count("<script>") == 1
    assert "alert(1)" in Page(text).text and "{{ 7 * 7 }}" in Page(text).text
    row = dataclasses.replace(other(PUBLISHED, EVIL, 1.0), source=EVIL)
    assert "<img" not in board_page.html([row])


def test_contributed_samples_pass_and_copies_and_the_impossible_are_refused(tmp_path: Path) -> None:
    sample = SAMPLES / "sample-smollm2-135m-amd-epyc.jsonl"
    shutil.copy(sample, tmp_path / "mine.jsonl")
    assert contributions.refusals([sample]) == []
    renamed = (tmp_path / "mine.jsonl").read_text().replace('"session":"', '"session":"another-')
    (tmp_path / "theirs.jsonl").write_text(renamed)
    (tmp_path / "broken.jsonl").write_text('{"schema": 1, "what": 3}\n')
    found = contributions.refusals([tmp_path])
    assert any(text.startswith("theirs.jsonl: ") and "are in mine.jsonl too" in text for text in found)
    assert any(text.startswith("broken.jsonl: ") and "skipped" in text for text in found)
    assert contributions.refusals([tmp_path / "none"]) == [f"none: There is no results file {tmp_path / 'none'}."]


def large(n_bytes: int, gpu: str) -> dict[str, Any]:
    """A model that fits into no cache, wholly on a GPU."""
    model = dataclasses.replace(MODEL, tensor_bytes={"Q4_0": n_bytes}, n_bytes=n_bytes)
    device = Device(name="CUDA0", description=gpu, type="gpu", memory_bytes=24_000_000_000)
    return {
        "model": model,
        "machine": dataclasses.replace(MACHINE, devices=(device,)),
        "settings": dataclasses.replace(SETTINGS, n_gpu_layers=99),
    }


@pytest.mark.parametrize(("decode_ms", "is_possible"), [(10, True), (0.5, False)])
def test_decode_above_the_bandwidth_of_the_device_is_refused(decode_ms: float, is_possible: bool) -> None:
    run = make_run(10, 10, decode_ms=decode_ms)
    found = list(contributions.impossibilities(make_record(run, **large(4_000_000_000, "NVIDIA GeForce RTX 4090"))))
    assert (found == []) == is_possible
    assert is_possible or "rtx-4090 has 1,008 GB/s" in found[0].replace("1.01e+03", "1,008")


def test_a_run_without_decode_is_possible() -> None:
    run = dataclasses.replace(make_run(10, 1), steps=Steps())
    assert list(contributions.impossibilities(make_record(run))) == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_it_sorts_filters_and_can_be_read(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    others = [other(PUBLISHED, "known", 8000), other(PREDICTED, "guess", None), other(PREDICTED, "fast", 9000)]
    index = board_page.write_board(tmp_path, machines(), others=others)
    found = look(browser, index, width, scheme)
    assert found["overflow"] <= 0 and contrast(found["paper"], found["ink"]) > 7
    visible = (
        "return [...document.querySelectorAll('#board tbody tr')].filter(row => !row.hidden)"
        ".map(row => row.cells[0].dataset.value)"
    )
    assert len(browser.execute_script(visible)) == 5
    by_decode = browser.find_elements("css selector", "thead button")[4]
    by_decode.click()
    assert browser.execute_script(visible)[:2] == ["fast", "known"]
    by_decode.click()  # the slowest first; what is not known stays last
    assert browser.execute_script(visible)[0] == "Far, 4 cores" and browser.execute_script(visible)[-1] == "guess"
    browser.find_element("css selector", "#kinds input[value=predicted]").click()
    assert browser.execute_script(visible)[-1] == "known"
    browser.find_element("css selector", "#search").send_keys("FAR tiny")
    assert browser.execute_script(visible) == ["Far, 4 cores"]
    assert "1 of 5 rows" in browser.find_element("css selector", "#count").text
    assert not [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]
