"""A report: what it shows, that it shows it to everybody, and that nothing in a record can act in
it."""

import base64
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.app import reading
from lab.core import results
from lab.core.record import Ceilings, Rate, Record
from lab.errors import LabError
from lab.features.report import page
from tests.support.browser import (
    EVIL,
    Page,
    contrast,
    evil,
    look,
    session,
)
from tests.support.command import run_lab, run_process
from tests.support.rates import FAST, timed
from tests.support.records import MACHINE, MODEL, SETTINGS, make_record, make_run, watched

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "results" / "sample-smollm2-135m-amd-epyc.jsonl"


def test_a_page_says_what_was_measured() -> None:
    text = page.html(session(), [])
    html = Page(text)
    assert "How fast is tiny Q4_0 on Test CPU, 4 cores?" in html.text
    assert (
        "A request of 100 tokens with 5 back takes " in html.text
    )  # 1,000 and the answer exceed the training length
    assert "; below each their range" in html.text
    assert "exceed the model's training length of 1,000" in html.text
    assert "The ceilings of tiny Q4_0, Test CPU, 4 cores have not been measured." in html.text
    assert "lab measure --prompt-len 10,100,1000 --gen 5 --repeat 2" in html.text
    assert "<title>" in text
    assert "Which is faster" not in html.text


def test_tables_and_pictures_can_be_read_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # drawn
    html = Page(page.html(timed(1.1), [FAST], explore=False))
    assert len(html.named("svg")) == 3
    for picture in html.named("div"):
        if picture.get("role") == "img":
            assert len(picture["aria-label"] or "") > 9
    assert len(html.named("table")) == len(html.named("caption"))
    assert {heading.get("scope") for heading in html.named("th")} == {"row", "col"}
    assert html.named("html")[0]["lang"] == "en"


def test_what_limited_it_is_told_where_the_ceilings_are_known() -> None:
    html = Page(page.html(timed(1.1), [FAST]))
    assert (
        "llama.cpp's kernel for this quantization (this machine is faster with others) limits"
        in html.text
    )
    assert "(91 % of the ceiling)" in html.text


def test_a_page_with_sliders_says_how_far_off_predictions_are() -> None:
    title = "How far off predictions of other devices are"
    with_sliders = Page(page.html(timed(1.1), [FAST]))
    assert title in with_sliders.text
    assert "decode, processors" in with_sliders.text
    assert title not in Page(page.html(timed(1.1), [FAST], explore=False)).text


def test_warnings_stand_beside_the_figures_that_they_concern() -> None:
    random = dataclasses.replace(MODEL, source="synthetic")
    noisy = dataclasses.replace(watched([290] * 20), repeat=0)
    unsure = [
        make_record(dataclasses.replace(noisy, repeat=repeat), model=random)
        for repeat in range(2)
    ]
    failed = make_record(make_run(50, status="failed", error="no memory"), model=random)
    text = page.html([*session(model=random), *unsure, failed], [])
    row = text[text.index('<th scope="row">20</th>') :]
    assert "! 20 prompt tokens: other processes used 2.9 cores in both runs" in row
    assert "Unreliable." in row
    html = Page(text)
    assert "(random weights)" in html.text
    assert "the text is meaningless" in html.text
    assert "failed: 50 prompt tokens, repeat 1: no memory" in html.text


def test_a_disturbed_walk_is_told_once() -> None:
    steps = make_run(20, 5, every=5).steps
    walk = dataclasses.replace(watched([290] * 20), case={"every": 5}, steps=steps)
    html = Page(page.html([make_record(walk)], []))
    assert html.text.count("other processes used") == 1


def test_two_setups_are_compared() -> None:
    four = dataclasses.replace(SETTINGS, n_threads=4)
    html = Page(page.html(session() + session(settings=four, session="b"), []))
    assert "Which is faster: tiny Q4_0, n_threads 2 or tiny Q4_0, n_threads 4?" in html.text
    assert "n_threads 2 4" in html.text
    assert "unclear, 2 against 2 runs" in html.text
    assert "--threads 4" in html.text
    assert "--threads 2" in html.text


def test_a_setup_that_failed_is_named() -> None:
    four = dataclasses.replace(SETTINGS, n_threads=4)
    failed = make_record(make_run(50, status="failed", error="x"), settings=four)
    html = Page(page.html([*session(), failed], []))
    assert "failed: tiny Q4_0, n_threads 4: 50 prompt tokens" in html.text


def test_sessions_of_one_setup_are_compared() -> None:
    html = Page(page.html(session() + session(session="b"), []))
    assert "Which is faster: session a-session or session b?" in html.text


def paces(
    label: str,
    prefill_ms: float,
    decode_ms: float,
    n_runs: int,
) -> list[Record]:
    """Runs of a machine with this name; the third of every three is one percent slower."""
    machine = dataclasses.replace(MACHINE, cpu=label)
    records: list[Record] = []
    for repeat in range(n_runs):
        slowdown = 1.01 if repeat % 3 == 2 else 1
        run = make_run(20, 3, repeat, prefill_ms=prefill_ms * slowdown, decode_ms=decode_ms)
        records.append(make_record(run, machine=machine, session=label))
    return records


QUESTION = "Which is faster: Near, 4 cores or Far, 4 cores? "


def test_a_page_answers_its_question_first() -> None:
    near = paces("Near", 1, 10, 9)
    html = Page(page.html([*near, *paces("Far", 0.5, 5, 9)], []))
    answer = (
        "Far, 4 cores is faster than Near, 4 cores in all rows (1.83 and 2 times as fast)."
    )
    assert f"{QUESTION}{answer} Prefill of" in html.text


def test_a_page_says_that_too_few_runs_leave_its_question_open() -> None:
    html = Page(page.html([*paces("Near", 1, 10, 2), *paces("Far", 2, 30, 2)], []))
    answer = "It is unclear whether Far, 4 cores or Near, 4 cores is faster: too few runs"
    assert f"{QUESTION}{answer}" in html.text
    assert (
        "Prefill of 20 tokens: unclear, 2 against 2 runs; an interval needs 3 each: "
        "about 2x the time"
    ) in html.text


def test_a_page_on_several_kinds_of_results_has_a_chapter_for_each() -> None:
    records = [*session(), *paces("Far", 2, 30, 2)]
    for repeat in range(2):
        records.append(make_record(make_run(20, 3, repeat, every=5), session="walk"))
    for name in ("big", "huge"):
        model = dataclasses.replace(MODEL, name=name)
        records.append(make_record(make_run(30, 3), model=model, session=name))
    text = page.html(records, [])
    html = Page(text)
    assert "<h1>5 sessions of tiny and 2 other models on 2 machines</h1>" in text
    links = [str(link["href"]) for link in html.named("a")]
    assert links == ["#runs", "#sweeps", "#compared", "#why", "#setups"]
    assert {link[1:] for link in links} <= {
        attributes.get("id") for _, attributes in html.tags
    }
    assert "Runs : 4 setups" in html.text
    assert "Sweeps : How fast is tiny Q4_0 on" in html.text
    assert html.text.count("have no length in common") == 1  # a sentence on all of them
    assert "The limits of 5 other setups are unknown without ceilings" in html.text
    before_chapters = text.partition("<main>")[0]
    assert (
        "By the medians" not in before_chapters
    )  # answers stand in the chapter of comparisons


def test_the_records_come_back(tmp_path: Path) -> None:
    path = page.report(tmp_path / "new" / "a.html", session(), [FAST])
    contents = results.read([path])
    assert list(contents.records) == session()
    assert contents.ceilings == (FAST,)
    page_of_sample = page.report(tmp_path / "s.html", results.read([SAMPLE]).records, [])
    assert len(results.read([SAMPLE, page_of_sample]).records) == 12  # each of them once


def test_commands_read_a_page_like_a_results_file(tmp_path: Path) -> None:
    path = page.report(tmp_path / "a.html", session(), [])
    status, out, _ = run_lab("show", path)
    assert status == 0
    assert "1,000" in out
    results.save(tmp_path / "b.jsonl", make_record(make_run(), session="b"))
    status, out, err = run_lab("compare", path, tmp_path / "b.jsonl")
    assert status == 0, err
    assert "session b" in out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<html></html>", "contains no records of the lab"),
        ('<script id="mini-lab-records">AAAA<', "are damaged"),
        ('<script id="mini-lab-records">A<', "are damaged"),
        ("cut", "are truncated or too large"),
    ],
)
def test_a_page_that_is_none_is_told(
    tmp_path: Path,
    text: str,
    why: str,
) -> None:
    path = tmp_path / "a.html"
    if text == "cut":
        whole = base64.b64decode(results.pack(session()))
        text = f'<script id="mini-lab-records">{base64.b64encode(whole[:200]).decode()}<'
    path.write_text(text)
    with pytest.raises(LabError, match=why):
        results.read([path])


def test_a_packed_file_cannot_claim_to_be_endless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = page.report(tmp_path / "a.html", session(), [])
    monkeypatch.setattr(results, "MOST_UNPACKED", 1000)
    with pytest.raises(LabError, match="too large"):
        results.read([path])


def test_nothing_in_a_record_can_act(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # drawn
    failed = make_record(make_run(50, status="failed", error="x"))
    records = [evil(record) for record in [*session(), failed]]
    text = page.html(records, [evil(FAST)])
    html = Page(text)
    assert [script.get("type") for script in html.named("script")] == ["application/gzip"]
    assert not {"img", "iframe", "link", "object", "form", "a"} & {
        name for name, _ in html.tags
    }
    for _, attributes in html.tags:
        assert not [name for name in attributes if name.startswith("on")]
    assert "49" not in html.text.replace("$", "").partition("{{")[0]
    assert "{{ 7 * 7 }}" in text
    assert (
        EVIL.split("{{", maxsplit=1)[0][:40].replace("<", "&lt;").replace(">", "&gt;") in text
    )


def test_a_report_needs_a_run_and_a_good_name(tmp_path: Path) -> None:
    results.save(tmp_path / "failed.jsonl", make_record(make_run(status="failed", error="x")))
    results.save(tmp_path / "a.jsonl", make_record())
    refused: tuple[tuple[tuple[object, ...], str], ...] = (
        ((tmp_path / "failed.jsonl",), "nothing to report"),
        ((tmp_path / "a.jsonl", "-f", tmp_path / "a.pdf"), "name must end in .html"),
        ((tmp_path / "none.jsonl",), "no results file"),
        ((tmp_path / "a.jsonl", "--ceilings", tmp_path / "none"), "no folder"),
        ((tmp_path / "a.jsonl", "-f", "/dev/null/a.html"), "cannot be written"),
    )
    for arguments, problem in refused:
        status, _, err = run_lab("report", *arguments)
        assert status == 1
        assert problem in err


def test_a_report_does_not_replace_its_results(tmp_path: Path) -> None:
    results.save(tmp_path / "a.jsonl", make_record())
    status, out, _ = run_process("report", tmp_path / "a.jsonl")
    assert status == 0
    assert out.strip() == str(tmp_path / "a.html")
    status, _, err = run_lab("report", tmp_path / "a.html")
    assert status == 1
    assert "would overwrite" in err


def test_a_measurement_ends_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # drawn
    small = ("-p", 8, "-n", 3, "-r", 1, "-t", 1, "--no-plot")
    status, out, err = run_lab("measure", *small, "--report", "-o", tmp_path)
    assert status == 0, err
    (path,) = tmp_path.glob("*.html")
    assert f"report   {path}" in out
    assert len(results.read([path]).records) == 2
    assert path.with_suffix(".jsonl").exists()


# In a browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The report of a sample, and the same with a hostile name."""
    folder = tmp_path_factory.mktemp("pages")
    records = list(results.read([SAMPLE]).records)
    hostile: list[Record] = []
    for record in records:
        model = dataclasses.replace(record.model, name=EVIL)
        hostile.append(dataclasses.replace(record, model=model))
    ceilings = [_ceilings(records[0])]
    return [
        page.report(folder / "sample.html", records, ceilings),
        page.report(folder / "hostile.html", hostile, ceilings),
    ]


def requested_urls(browser: Any) -> list[str]:
    """What the browser has asked for since the last look at its log."""
    urls: list[str] = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            urls.append(message["params"]["request"]["url"])
    return urls


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (360, "light")])
def test_a_browser_shows_it_and_asks_nobody(
    browser: Any, pages: list[Path], width: int, scheme: str
) -> None:
    for path in pages:
        browser.get_log("performance")
        seen = look(browser, path, width, scheme)
        assert seen["overflow"] <= 0
        assert seen["scripts"] == 3  # the records, the laws, the sliders
        assert contrast(seen["ink"], seen["paper"]) > 7
        assert contrast(seen["letters"], seen["paper"]) > 7
        is_dark = sum(seen["paper"]) < 300
        assert is_dark == (scheme == "dark")
        assert seen["smallest"] >= 8  # pixels of a letter in a picture, at phone width too
        assert browser.get_log("browser") == []
        assert requested_urls(browser) == [path.as_uri()]


def _ceilings(record: Record) -> Ceilings:
    """Made-up ceilings of the machine that made a record, so that its page has all its parts."""
    rates: list[Rate] = []
    for kind in record.model.tensor_bytes:
        for rate in FAST.rates:
            is_of_weights = rate.op == "mul_mat"
            rates.append(dataclasses.replace(rate, type=kind) if is_of_weights else rate)
    return dataclasses.replace(FAST, machine=record.machine, rates=tuple(rates))


def test_nothing_is_written_beside_a_committed_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout stays clean: pictures of samples need --out, and their pages go to the current
    folder."""
    folder = tmp_path / "results"
    folder.mkdir()
    for machine in ("amd-epyc", "intel-xeon"):
        shutil.copy(f"results/sample-smollm2-135m-{machine}.jsonl", folder)
    copies = sorted(folder.iterdir())
    monkeypatch.chdir(tmp_path)
    status, _, err = run_lab("compare", *copies)
    assert status == 0
    assert not err
    assert (
        reading.plot_folder([SAMPLE.name], None) == Path()
    )  # lab plot, which is asked to draw
    assert run_lab("report", "--no-explore", copies[0])[0] == 0
    assert sorted(folder.iterdir()) == copies
    assert (tmp_path / copies[0].with_suffix(".html").name).is_file()
