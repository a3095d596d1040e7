"""A session of claims: what is measured for which, what a part that fails leaves, verdicts as text and on a page."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import Record
from lab.errors import LabError
from lab.features.report import page
from lab.features.claims import judging, session
from lab.features.claims.judging import CLAIMS, HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Verdicts
from lab.features.claims.session import PARTS, Session
from lab.show import console
from lab.show.section import Context, print_sections
from tests.conftest import MODEL, FakeWorker, died, make_record, make_run, run_lab
from tests.test_claims_judged import Planted
from tests.test_report import Page


@pytest.fixture
def worker(fake_worker: FakeWorker) -> Any:
    fake_worker.model = dataclasses.replace(MODEL, n_ctx_train=8192)
    return fake_worker


def planned(worker: Any, folder: Path, only: str | None, **settings: Any) -> Session:
    return session.plan(
        worker, session.choose(only), folder, **{"model": "smollm2-135m", **settings}
    )


def run(
    of: Session, worker: Any, path: Path, new_worker: Any = FakeWorker
) -> tuple[list[Record], list[str]]:
    lines = list[str]()
    return list(
        session.execute(of, worker, path, lambda status: None, lines.append, new_worker)
    ), lines


def verdicts(records: list[Record], only: str | None = None) -> Verdicts:
    (made,) = judging.of_sessions(session.choose(only), records, [])
    return made


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("0", "--only 0 is not possible"),
        ("4", "There is no claim 4.\nThe numbers are 1, 2, 3, 5,"),
        ("2,2", "2 twice"),
    ],
)
def test_numbers_that_no_claim_has_are_refused(only: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        session.choose(only)
    assert session.choose(2) == session.choose([2]) and session.choose(None) == CLAIMS


def test_what_several_claims_need_is_planned_once(worker: Any, tmp_path: Path) -> None:
    made = planned(worker, tmp_path, "3,5,10,16")
    assert list(made.plans) == ["lengths", "context", "settings", "batch"]
    assert {plan.part for plans in made.plans.values() for plan in plans.values()} == set(
        made.plans
    )
    variants = {name: plan.settings for name, plan in made.plans["settings"].items()}
    assert {name: (one.flash_attn, one.type_k) for name, one in variants.items()} == {
        "base": ("on", "f16"),
        "half": ("on", "f16"),
        "no-flash": ("off", "f16"),
        "q8_0": ("on", "q8_0"),
    }
    assert variants["half"].n_threads == variants["base"].n_threads // 2
    assert not made.probes and sum(part["seconds"] for part in PARTS.values()) <= 5 * 60
    assert {part for claim in CLAIMS for part in claim["parts"]} == {*PARTS, "ceilings"}
    assert len(planned(worker, tmp_path, "1").probes) > 5  # it needs the ceilings


def test_what_cannot_be_measured_is_told(worker: Any, tmp_path: Path, embedded: Path) -> None:
    assert "half" not in planned(worker, tmp_path, "16", threads=1).plans["settings"]
    made = planned(worker, tmp_path, "13,18", model=str(embedded))
    assert "cannot be made in other quantizations" in str(made.problems["quantizations"])
    records, _ = run(made, worker, tmp_path / "a.jsonl")
    first, second = verdicts(records, "13,18").rows
    assert (
        first["verdict"] == UNTESTABLE and "cannot be made in other quantizations" in first["words"]
    )
    assert second["verdict"] in (HOLDS, HOLDS_NOT)


def test_all_runs_are_in_one_file_with_their_part(worker: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records, lines = run(planned(worker, tmp_path, "5,10,16"), worker, path)
    assert list(results.read([path]).records) == records and {
        record.session for record in records
    } == {"a"}
    assert list(dict.fromkeys(record.run.part for record in records)) == [
        "lengths",
        "settings",
        "batch",
    ]
    timed = [record.run for record in records if record.run.is_timed]
    assert [
        sum(run.part == part for run in timed) for part in ("lengths", "settings", "batch")
    ] == [12, 12, 15]
    assert {(run.block, run.variant) for run in timed if run.part == "settings"} == {
        (block, name) for block in range(3) for name in ("base", "half", "no-flash", "q8_0")
    }
    engines = [{run.engine for run in timed if run.part == part} for part in ("lengths", "batch")]
    assert not engines[0] & engines[1]  # no two parts share a process
    assert lines[0] == f"part 1 of 3, lengths: {PARTS['lengths']['words']}"


def test_a_part_that_fails_leaves_the_reason_and_the_others_go_on(
    worker: Any, tmp_path: Path
) -> None:
    def dying(n_prompt: int, n_gen: int) -> None:
        if n_gen == 64:
            raise died()

    worker.on_run = dying
    records, _ = run(planned(worker, tmp_path, "5,10"), worker, tmp_path / "a.jsonl")
    first, second = verdicts(records, "5,10").rows
    assert (
        first["verdict"] == UNTESTABLE
        and "`lengths` failed: The engine's process ended" in first["words"]
    )
    assert second["verdict"] != UNTESTABLE


def test_an_interrupted_session_can_be_judged(worker: Any, tmp_path: Path) -> None:
    runs: Iterator[Record] = session.execute(
        planned(worker, tmp_path, "5,10"),
        worker,
        tmp_path / "a.jsonl",
        lambda status: None,
        lambda text: None,
    )
    for record in runs:
        if record.run.part == "batch":
            break
    runs.close()  # type: ignore[attr-defined]
    kept = list(results.read([tmp_path / "a.jsonl"]).records)
    assert [row["number"] for row in verdicts(kept).rows] == [5, 7, 10, 34]


@pytest.fixture(scope="module")
def judged() -> Verdicts:
    machine = Planted()
    records = machine.session(tuple(PARTS))
    (made,) = judging.of_sessions(CLAIMS, records, [machine.ceilings()])
    return made


def test_a_line_for_each_claim(judged: Verdicts, capsys: pytest.CaptureFixture[str]) -> None:
    print_sections(judging.sections([judged], Context(details=True)), console.console())
    out = " ".join(capsys.readouterr().out.split())
    assert all(row["criterion"] in out for row in judged.rows) and judged.summary in out
    assert "must be at least 60 %" in out and "16 claims: " in out
    row = json.loads(json.dumps(judged.rows, allow_nan=False))[0]
    assert row.keys() >= {"session", "claim", "verdict", "figures", "criterion", "number", "words"}
    assert row["figures"][0].keys() == {
        "name",
        "value",
        "low",
        "high",
        "unit",
        "n",
        "least",
        "most",
        "verdict",
    }


def test_a_page_has_the_verdicts_one_picture_and_the_records(
    judged: Verdicts, tmp_path: Path
) -> None:
    records = list(judged.records)
    ceilings = Planted().ceilings()
    path = page.report(tmp_path / "a.html", records, [ceilings])
    html = Page(path.read_text())
    assert (
        "Do the textbooks' claims hold on this machine?" in html.text
        and judged.summary in html.text
    )
    assert (
        all(row["criterion"] in html.text for row in judged.rows) and len(html.named("figure")) == 1
    )
    assert list(results.read([path]).records) == records
    plain = [make_record(make_run(20, 5, i), session="b") for i in range(2)]
    both = Page(page.html([*plain, *records], [ceilings]))
    assert "How fast is tiny Q4_0" in both.text and judged.summary in both.text


def test_a_record_names_no_file_and_nothing_in_a_page() -> None:
    records = [
        make_record(make_run(part="../<script>"), session="<script>"),
        make_record(make_run(part="batch")),
    ]
    assert "<script>" not in page.html(records, []).replace('<script type="application/gzip"', "")


def test_one_claim_for_real(mini: Path, tmp_path: Path) -> None:
    model = ("-m", mini, "--prompt", "random", "--threads", 1)
    status, out, err = run_lab("claims", "--only", 10, *model, "--json", "--report", "-o", tmp_path)
    assert status == 0, err
    document = json.loads(out)
    (row,) = document["rows"]
    assert (row["number"], row["verdict"] in (HOLDS, HOLDS_NOT, UNSURE)) == (10, True) and row[
        "figures"
    ]
    assert {record.run.part for record in results.read([document["results"]]).records} == {"batch"}
    assert Path(document["report"]).exists() and [
        Path(plot).suffix for plot in document["plots"]
    ] == [".png", ".svg"]
    status, out, _ = run_lab("show", document["results"], "--json")
    assert {one["number"]: one["verdict"] for one in json.loads(out)["rows"]}[10] == row["verdict"]
    assert "part 1 of 1, batch" in err
