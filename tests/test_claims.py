"""A session of claims: what is measured for which, what a part that fails leaves, verdicts as text
and on a page."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import Record
from lab.errors import LabError
from lab.features.claims import judging, measuring, section
from lab.features.claims.judging import (
    CLAIMS,
    HOLDS,
    HOLDS_NOT,
    UNSURE,
    UNTESTABLE,
    ClaimRow,
    Verdicts,
)
from lab.features.claims.measuring import PARTS, ClaimsSession, Measurement
from lab.features.report import page
from lab.show import console
from lab.show.section import Context, print_sections
from tests.support.browser import Page
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker, died
from tests.support.planted import Planted
from tests.support.records import MODEL, make_record, make_run

FIGURE_FIELDS = {"name", "value", "low", "high", "unit", "n", "least", "most", "verdict"}
ROW_FIELDS = {"session", "claim", "verdict", "figures", "criterion", "number", "words"}


@pytest.fixture
def worker(fake_worker: FakeWorker) -> Any:
    fake_worker.model = dataclasses.replace(MODEL, n_ctx_train=8192)
    return fake_worker


def planned(worker: Any, folder: Path, only: str | None, **settings: Any) -> ClaimsSession:
    asked = {"model": "smollm2-135m", **settings}
    return measuring.plan(worker, measuring.choose(only), folder, **asked)


def measurement(
    plan: ClaimsSession,
    worker: Any,
    path: Path,
    lines: list[str],
) -> Iterator[Record]:
    """The runs of a session; what it announces is added to the lines."""
    new_worker: Any = FakeWorker
    return Measurement(
        plan, worker, path, lambda status: None, lines.append, new_worker
    ).execute()


def measured(
    plan: ClaimsSession,
    worker: Any,
    path: Path,
) -> list[Record]:
    return list(measurement(plan, worker, path, []))


def rows(records: list[Record], only: str | None = None) -> list[ClaimRow]:
    verdicts = next(judging.of_sessions(measuring.choose(only), records, []))
    return verdicts.rows


THE_NUMBERS = f"The numbers are {', '.join(map(str, range(1, 17)))}."


@pytest.mark.parametrize(
    ("only", "problem"),
    [
        ("0", "--only 0 is not possible."),
        ("17", "There is no claim 17."),
        ("99", "There is no claim 99."),
        ("a", "--only a: 'a' is not a whole number."),
        ("2,2", "--only has 2 twice."),
    ],
)
def test_numbers_that_no_claim_has_are_refused_with_those_that_there_are(
    only: str, problem: str
) -> None:
    with pytest.raises(LabError) as refused:
        measuring.choose(only)
    assert refused.value.what == problem
    assert refused.value.hint == THE_NUMBERS


def test_claims_are_chosen_by_their_numbers() -> None:
    by_number = measuring.choose(2)
    assert [claim["number"] for claim in by_number] == [2]
    assert measuring.choose([2]) == by_number
    assert measuring.choose(None) == CLAIMS


def test_what_several_claims_need_is_planned_once(worker: Any, tmp_path: Path) -> None:
    plan = planned(worker, tmp_path, "3,4,7,10")
    assert list(plan.plans) == ["lengths", "context", "settings", "batch"]
    for part, variants in plan.plans.items():
        assert {variant.part for variant in variants.values()} == {part}
    assert not plan.probes
    assert len(planned(worker, tmp_path, "1").probes) > 5  # it needs the ceilings


def test_the_variants_of_settings_differ_as_the_claims_say(
    worker: Any, tmp_path: Path
) -> None:
    variants = planned(worker, tmp_path, "10").plans["settings"]
    changes: dict[str, tuple[str | None, str | None]] = {}
    for name, plan in variants.items():
        changes[name] = (plan.settings.flash_attn, plan.settings.type_k)
    assert changes == {
        "base": ("on", "f16"),
        "half": ("on", "f16"),
        "no-flash": ("off", "f16"),
        "q8_0": ("on", "q8_0"),
    }
    n_threads = variants["base"].settings.n_threads
    assert variants["half"].settings.n_threads == n_threads // 2


def test_every_part_is_needed() -> None:
    assert {*PARTS, "ceilings"} == judging.PARTS


def test_what_cannot_be_measured_is_told(
    worker: Any,
    tmp_path: Path,
    embedded: Path,
) -> None:
    assert "half" not in planned(worker, tmp_path, "10", threads=1).plans["settings"]
    plan = planned(worker, tmp_path, "8,12", model=str(embedded))
    assert "cannot be made in other quantizations" in str(plan.problems["quantizations"])
    records = measured(plan, worker, tmp_path / "a.jsonl")
    quantizations, speculation = rows(records, "8,12")
    assert quantizations["verdict"] == UNTESTABLE
    assert "cannot be made in other quantizations" in quantizations["words"]
    assert speculation["verdict"] in (HOLDS, HOLDS_NOT)


def test_all_runs_are_in_one_file_with_their_part(worker: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines: list[str] = []
    plan = planned(worker, tmp_path, "6,7,10")
    records = list(measurement(plan, worker, path, lines))
    assert list(results.read([path]).records) == records
    assert {record.session for record in records} == {"a"}
    assert lines[0] == f"part 1 of 3, lengths: {PARTS['lengths']['words']}"
    n_timed: dict[str | None, int] = {}
    engines: dict[str | None, set[int | None]] = {}
    for record in records:
        if record.run.is_timed:
            part = record.run.part
            n_timed[part] = n_timed.get(part, 0) + 1
            engines.setdefault(part, set()).add(record.run.engine)
    assert n_timed == {
        "lengths": 12,
        "settings": 12,
        "batch": 15,
    }
    assert not engines["lengths"] & engines["batch"]  # no two parts share a process


@pytest.mark.parametrize(("budget_s", "n_repeats"), [(0.0, 3), (55.0, 5), (1e6, 10)])
def test_what_is_undecided_is_measured_again_until_the_budget_is_spent(
    budget_s: float,
    n_repeats: int,
    worker: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every part takes 30 s, so a repeat takes 10: 30 + 10 + 10 are spent, and 10 more are not."""
    now_s = [0.0]

    def announced(line: str) -> None:
        now_s[0] += 10.0 if line.startswith("once more") else 30.0

    new_worker: Any = FakeWorker
    plan = planned(worker, tmp_path, "7")
    path = tmp_path / "a.jsonl"
    going = Measurement(plan, worker, path, lambda status: None, announced, new_worker)
    going.budget_s = budget_s
    going.clock = lambda: now_s[0]
    monkeypatch.setattr(Measurement, "undecided", lambda self, records: ["batch"])
    records = [record for record in going.execute() if record.run.is_timed]
    assert sorted({record.run.repeat for record in records}) == list(range(n_repeats))
    assert len(records) == 5 * n_repeats


def test_only_the_parts_of_claims_that_cannot_be_told_are_measured_again(
    worker: Any, tmp_path: Path
) -> None:
    plan = planned(worker, tmp_path, "6,7")
    going = Measurement(plan, worker, tmp_path / "a.jsonl", lambda status: None, print)
    noisy = Planted(noise=0.5).session(("batch",))
    clear = Planted().session(("lengths",))
    assert going.undecided([*clear, *noisy]) == ["batch"]
    assert going.undecided([*clear, *Planted().session(("batch",))]) == []


def test_settings_are_compared_in_blocks(worker: Any, tmp_path: Path) -> None:
    records = measured(planned(worker, tmp_path, "10"), worker, tmp_path / "a.jsonl")
    for block in range(3):
        timed = [
            record for record in records if record.run.is_timed and record.run.block == block
        ]
        variants = [record.run.variant for record in timed]
        assert sorted(map(str, variants)) == ["base", "half", "no-flash", "q8_0"]


def test_a_part_that_fails_leaves_the_reason_and_the_others_go_on(
    worker: Any, tmp_path: Path
) -> None:
    def dying(n_prompt: int, n_gen: int) -> None:
        if n_gen == 64:
            raise died()

    worker.on_run = dying
    records = measured(planned(worker, tmp_path, "6,7"), worker, tmp_path / "a.jsonl")
    lengths, batch = rows(records, "6,7")
    assert lengths["verdict"] == UNTESTABLE
    assert "`lengths` failed: The engine's process ended" in lengths["words"]
    assert batch["verdict"] != UNTESTABLE


def test_an_interrupted_session_can_be_judged(worker: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for record in measurement(planned(worker, tmp_path, "6,7"), worker, path, []):
        if record.run.part == "batch":
            break
    saved = list(results.read([path]).records)
    assert [row["number"] for row in rows(saved)] == [6, 7, 14]


@pytest.fixture(scope="module")
def judged() -> Verdicts:
    machine = Planted()
    records = machine.session(tuple(PARTS))
    return next(judging.of_sessions(CLAIMS, records, [machine.ceilings()]))


def test_a_line_for_each_claim(judged: Verdicts, capsys: pytest.CaptureFixture[str]) -> None:
    print_sections(
        section.sections([judged], Context(details=True)),
        console.console(),
    )
    out = " ".join(capsys.readouterr().out.split())
    for row in judged.rows:
        assert row["criterion"] in out
    assert judged.summary in out
    assert "must be at least 60 %" in out
    assert "16 claims: " in out


def test_rows_are_json(judged: Verdicts) -> None:
    row = json.loads(json.dumps(judged.rows, allow_nan=False))[0]
    assert row.keys() >= ROW_FIELDS
    assert row["figures"][0].keys() == FIGURE_FIELDS


def test_a_page_has_the_verdicts_one_picture_and_the_records(
    judged: Verdicts, tmp_path: Path
) -> None:
    records = list(judged.records)
    path = page.report(tmp_path / "a.html", records, [Planted().ceilings()])
    html = Page(path.read_text())
    assert "Do the textbooks' claims hold on this machine?" in html.text
    assert judged.summary in html.text
    for row in judged.rows:
        assert row["criterion"] in html.text
    assert len(html.named("figure")) == 1
    assert list(results.read([path]).records) == records


@pytest.mark.usefixtures("undrawn")
def test_a_page_has_claims_beside_plain_runs(judged: Verdicts) -> None:
    plain = [make_record(make_run(20, 5, repeat), session="b") for repeat in range(2)]
    html = Page(page.html([*plain, *judged.records], [Planted().ceilings()]))
    assert "How fast is tiny Q4_0" in html.text
    assert judged.summary in html.text


def test_a_record_names_no_file_and_nothing_in_a_page() -> None:
    records = [
        make_record(make_run(part="../<script>"), session="<script>"),
        make_record(make_run(part="batch")),
    ]
    html = page.html(records, [])
    assert "<script>" not in html.replace('<script type="application/gzip"', "")


def test_one_claim_for_real(mini: Path, tmp_path: Path) -> None:
    model = ("-m", mini, "--prompt", "random", "--threads", 1)
    status, out, err = run_lab(
        "claims", "--only", 7, *model, "--json", "--report", "-o", tmp_path
    )
    assert status == 0, err
    assert "part 1 of 1, batch" in err
    document = json.loads(out)
    (row,) = document["rows"]
    assert row["number"] == 7
    assert row["verdict"] in (HOLDS, HOLDS_NOT, UNSURE)
    assert row["figures"]
    records = results.read([document["results"]]).records
    assert {record.run.part for record in records} == {"batch"}
    assert Path(document["report"]).exists()
    assert [Path(plot).suffix for plot in document["plots"]] == [".png", ".svg"]
    status, out, _ = run_lab("show", document["results"], "--json")
    assert status == 0
    shown = {row["number"]: row["verdict"] for row in json.loads(out)["rows"]}
    assert shown[7] == row["verdict"]
