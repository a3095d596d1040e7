"""A session of claims: what is measured for which, what a part that fails leaves, verdicts as text and on a page."""

import dataclasses
import json
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core import request, results
from lab.core.record import FAILED, OK, Record
from lab.core.request import TEXT, Events, Request
from lab.core.traced import Looks
from lab.errors import LabError
from lab.experiments.claims import claim_parts, claim_session, claim_verdicts
from lab.experiments.claims.claim import (
    HOLDS,
    HOLDS_NOT,
    UNSURE,
    UNTESTABLE,
    Claim,
    Condition,
    Evidence,
    Figure,
    Judgement,
    Measured,
)
from lab.experiments.claims.claim_parts import CEILINGS, PARTS, Asked, Trial
from lab.experiments.claims.claim_session import Progress, Session
from lab.experiments.claims.claim_verdicts import CLAIMS, Judged, Verdicts
from lab.runner import own_server, side_by_side
from lab.runner.plan import make_plan
from lab.runner.progress import Status
from lab.show import claim_views, console, page, reproduce, section
from lab.why.where import Where
from tests.conftest import MACHINE, MODEL, FakeWorker, died, make_record, make_run, run_lab, run_process
from tests.odd_server import CHAT_PATH, STREAM, Canned, odd_server, stream
from tests.test_explain import FAST
from tests.test_report import Page

WHOLE = 8192


@pytest.fixture
def worker(fake_worker: FakeWorker) -> Any:
    fake_worker.model = dataclasses.replace(MODEL, n_ctx_train=WHOLE)
    return fake_worker


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> tuple[Claim, ...]:
    """Claims that need two parts, one, and none."""
    claims = (
        claim(1, "lengths", "batch"),
        claim(2, "batch"),
        claim(3),
        claim(4, "threads", CEILINGS),
        claim(5, "flash"),
    )
    for module in (claim_session, claim_verdicts):
        monkeypatch.setattr(module, "CLAIMS", claims)
    return claims


def claim(number: int, *parts: str) -> Claim:
    """Holds where every part was measured."""

    def measure(evidence: Evidence) -> Measured:
        lacking = [part for part in parts if part != CEILINGS and not evidence.of(part)]
        if lacking:
            raise LabError(f"{lacking[0]} is lacking.")
        return Measured([[Figure("runs", float(len(evidence.records)), "", 1, 99)]])

    conditions = (Condition(f"Criterion {number}", 1),)
    return Claim(number, f"claim {number} <b>", (), conditions, measure, also=parts, source="a book")


def planned(worker: Any, folder: Path, only: str | None = None, quick: bool = True, **settings: Any) -> Session:
    settings = {"model": "smollm2-135m", **settings}
    return claim_session.plan(worker, claim_session.choose(only), quick, folder, folder, **settings)


def of_part(part: str, **changes: Any) -> Record:
    return make_record(make_run(part=part, **changes))


def test_numbers_that_no_claim_has_are_refused(toys: Any) -> None:
    for only, words in {
        "0": "--only 0 is not possible",
        "29": "--only 29 is not possible",
        "two": "'two' is not a whole number",
        "": "'' is not a whole number",
        "1.5": "'1.5' is not a whole number",
        "2,2": "--only has 2 twice.\nGive each number once.",
    }.items():
        with pytest.raises(LabError) as caught:
            claim_session.choose(only)
        assert words in str(caught.value)
    assert [one.number for one in claim_session.choose("4, 1")] == [1, 4]
    assert [one.number for one in claim_session.choose([2])] == [one.number for one in claim_session.choose(2)] == [2]
    assert claim_session.choose(None) is toys


def test_what_several_claims_need_is_planned_once(worker: Any, tmp_path: Path, toys: Any) -> None:
    session = planned(worker, tmp_path, "1,2")
    assert list(session.trials) == ["lengths", "batch"] and not session.problems and not session.probes
    assert {plan.part for trials in session.trials.values() for t in trials for plan in t.plans.values()} == {
        "lengths",
        "batch",
    }
    assert session.n_runs == 3 * 3 + 3
    assert session.expected_s == {"lengths": PARTS["lengths"].quick_s, "batch": PARTS["batch"].quick_s}
    assert list(planned(worker, tmp_path, "3").trials) == []


def test_ceilings_are_measured_for_those_that_need_them(worker: Any, tmp_path: Path, toys: Any) -> None:
    assert not planned(worker, tmp_path, "1", quick=False).probes
    whole = planned(worker, tmp_path, "4", quick=False)
    assert len(whole.probes) > 10 and CEILINGS in whole.expected_s
    assert {probe.type for probe in whole.probes} >= {"Q8_0", "F16"}
    assert planned(worker, tmp_path, quick=False).probes == whole.probes
    quick = planned(worker, tmp_path, "4")
    assert 0 < len(quick.probes) < len(whole.probes)


def test_a_quick_session_has_no_part_that_is_whole_only(worker: Any, tmp_path: Path, toys: Any) -> None:
    assert not planned(worker, tmp_path, "5").trials
    assert list(planned(worker, tmp_path, "5", quick=False).trials) == ["flash"]
    assert sum(part.quick_s or 0 for part in PARTS.values()) <= claim_session.QUICK_MOST_S
    assert sum(part.seconds for part in PARTS.values()) <= 25 * 60 - 60


def test_every_part_is_as_the_contract_has_it(worker: Any, tmp_path: Path) -> None:
    """Names and variants are what judges look for."""
    settings = {"model": "smollm2-135m"}
    base = make_plan(worker, [1], 1, 1, **settings)  # type: ignore[arg-type]
    asked = Asked(worker, settings, base, tmp_path, False)
    made = {
        name: part.plan(asked) for name, part in PARTS.items() if name not in ("speculation", "quantizations", "heads")
    }
    assert {name for name, trials in made.items() if trials[0].n_blocks} == {"threads", "flash", "cache", "buffers"}
    (threads,) = made["threads"]
    assert {name: plan.settings.n_threads for name, plan in threads.plans.items()} == {
        "all": base.settings.n_threads,
        "half": base.settings.n_threads // 2,
    }
    assert {name: plan.settings.flash_attn for name, plan in made["flash"][0].plans.items()} == {
        "on": "on",
        "off": "off",
    }
    assert {plan.settings.type_k for plan in made["cache"][0].plans.values()} == {"f16", "q8_0", "q4_0"}
    (context,) = made["context"][0].plans.values()
    assert [(case.n_prompt, case.every) for case in context.cases] == [(8000, 1000)]
    (prefix,) = made["prefix"][0].plans.values()
    assert [case.n_prompt for case in prefix.cases] == [64 + n for n in (64, 256, 1024, 4096)]
    assert all(plan.n_repeat > 0 for trials in made.values() for trial in trials for plan in trial.plans.values())


def test_the_buffers_are_those_of_the_whole_context(worker: Any, tmp_path: Path) -> None:
    for n_ctx, longest in ((4096, 4096), (WHOLE, claim_parts.LONGEST)):
        worker.model = dataclasses.replace(MODEL, n_ctx_train=n_ctx)
        asked = Asked(worker, {"model": "smollm2-135m"}, make_plan(worker, [1], 1, 1), tmp_path, True)
        (trial,) = PARTS["buffers"].plan(asked)
        assert {plan.settings.n_ctx for plan in trial.plans.values()} == {longest}
        assert [plan.settings.flash_attn for plan in trial.plans.values()] == ["on", "off"]


def test_what_k_and_v_depend_on_is_kept_in_a_run(worker: Any, tmp_path: Path) -> None:
    changes = ((0.0, 0.0), (0.1, 0.25))
    row = (1 / len(claim_parts.SENTENCE),) * len(claim_parts.SENTENCE)
    worker.look = lambda tokens, replaced, other: Looks(((row,) * len(row),) * 2, (row,) * 2, changes)
    records, _, _ = run(planned(worker, tmp_path, "29"), worker, tmp_path / "a.jsonl")
    assert [(one.run.part, one.run.is_quick, one.run.changes) for one in records] == [("dependence", True, changes)]
    assert list(results.read([tmp_path / "a.jsonl"]).records) == records
    ((_, verdicts),) = claim_verdicts.of_sessions(records)
    of_it = next(one for one in verdicts.judged if one.claim.number == 29)
    assert of_it.judgement.verdict == HOLDS_NOT and "They change in 1 of 2 layers." in of_it.judgement.words


def test_a_model_whose_k_and_v_do_not_show_is_not_testable(worker: Any, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise LabError("llama.cpp does not show K and V.", "Use another model.")

    worker.look = refuse
    session = planned(worker, tmp_path, "29")
    records, _, _ = run(session, worker, tmp_path / "a.jsonl")
    (one,) = claim_session.judge(session.claims, records, Where(MACHINE), tmp_path, True).judged
    assert one.judgement.verdict == UNTESTABLE and "does not show K and V" in one.judgement.words


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """In place of llama_cpp.server: a server that answers one request after the other. Lists what happens to it."""
    place, happened = threading.Semaphore(1), list[str]()

    def answer(question: dict[str, Any]) -> Canned:
        def pieces(_: dict[str, Any]) -> Iterator[bytes]:
            with place:
                for piece in stream(*[" word"] * question["max_tokens"]):
                    time.sleep(0.003)
                    yield piece

        return Canned(pieces, kind=STREAM)

    with odd_server({CHAT_PATH: answer}) as server:

        def start(path: Path, *_: object) -> Any:
            happened.append(f"started with {path.name}")
            return types.SimpleNamespace(url=server.url, end=lambda: happened.append("ended"))

        monkeypatch.setattr(own_server, "check", lambda: None)
        monkeypatch.setattr(own_server, "start", start)
        monkeypatch.setattr(claim_parts, "LEAST_S", 0.4)
        yield happened


def test_requests_wait_for_a_server_above_its_capacity(worker: Any, tmp_path: Path, one_at_a_time: list[str]) -> None:
    records, _, _ = run(planned(worker, tmp_path, "36", quick=False), worker, tmp_path / "a.jsonl")
    below, above = (record.run.arrivals for record in records)
    assert below and above and (below.rate, above.rate) == (0.5 * below.capacity, 2 * below.capacity)
    for one in (below, above):
        assert (
            one.n_failed == 0 and len(one.due_ns) >= claim_parts.FEWEST_DUE and list(one.due_ns) == sorted(one.due_ns)
        )
    assert max(above.ttft_ns) > 0.2e9  # most of those that were due until 0.8 s are still before the last one
    assert one_at_a_time[0].startswith("started with ") and one_at_a_time[1:] == ["ended"]
    assert list(results.read([tmp_path / "a.jsonl"]).records) == records
    assert {record.run.part for record in records} == {"queue"}


def test_a_server_that_gives_no_answer_is_not_testable(
    worker: Any, tmp_path: Path, one_at_a_time: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise LabError("The server did not start: no memory", "Free some.")

    monkeypatch.setattr(own_server, "start", refuse)
    session = planned(worker, tmp_path, "36", quick=False)
    records, _, _ = run(session, worker, tmp_path / "a.jsonl")
    (one,) = claim_session.judge(session.claims, records, Where(MACHINE), tmp_path, False).judged
    assert one.judgement.verdict == UNTESTABLE and "did not start" in one.judgement.words


def test_without_the_packages_of_a_server_the_queue_is_not_testable(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_server, "NEEDS", ("no_such_package",))
    session = planned(worker, tmp_path, "36", quick=False)
    assert "not installed: no_such_package" in str(session.problems["queue"]) and not session.trials


def test_failed_requests_have_no_times() -> None:
    asked = request.Asked(n_prompt=4, n_gen=2)
    events = Events((50, 60), (1, 1), (TEXT, TEXT))
    good = Request(asked=asked, started_at="", scheduled_ns=100, sent_ns=130, status=OK, events=events)
    failed = dataclasses.replace(good, status=FAILED)
    earlier = dataclasses.replace(good, scheduled_ns=0, sent_ns=0)
    found = claim_parts.arrivals([good, failed, earlier], 2.0, 4.0)
    assert (found.due_ns, found.ttft_ns, found.n_failed) == ((0, 100), (50, 80), 1)


def test_a_short_context_shortens_the_parts_or_leaves_them_out(worker: Any, tmp_path: Path) -> None:
    for n_ctx, walk, prefixes in ((4096, 4000, 3), (2500, 2000, 3), (1500, None, 3)):
        worker.model = dataclasses.replace(MODEL, n_ctx_train=n_ctx)
        base = make_plan(worker, [1], 1, 1)
        asked = Asked(worker, {"model": "smollm2-135m"}, base, tmp_path, False)
        (prefix,) = PARTS["prefix"].plan(asked)[0].plans.values()
        assert len(prefix.cases) == prefixes
        if walk is None:
            with pytest.raises(LabError, match="too short to measure a slope"):
                PARTS["context"].plan(asked)
        else:
            (context,) = PARTS["context"].plan(asked)[0].plans.values()
            assert context.cases[0].n_prompt == walk


def test_one_thread_has_no_half(worker: Any, tmp_path: Path, toys: Any) -> None:
    session = planned(worker, tmp_path, "4", quick=False, threads=1)
    assert not session.trials and "one thread" in str(session.problems["threads"])


def test_a_model_of_no_list_is_not_requantised(worker: Any, tmp_path: Path, embedded: Path) -> None:
    base = make_plan(worker, [1], 1, 1)
    with pytest.raises(LabError, match="not in the lab's list"):
        PARTS["quantizations"].plan(Asked(worker, {"model": str(embedded)}, base, tmp_path, True))


def run(
    session: Session, worker: Any, path: Path, new_worker: Any = FakeWorker
) -> tuple[list[Record], list[str], list[Status]]:
    lines: list[str] = []
    statuses: list[Status] = []
    records = list(claim_session.execute(session, worker, path, statuses.append, lines.append, new_worker))
    return records, lines, statuses


def test_all_runs_are_in_one_file_with_their_part(worker: Any, tmp_path: Path, toys: Any) -> None:
    path = tmp_path / "a.jsonl"
    records, lines, statuses = run(planned(worker, tmp_path, "1"), worker, path)
    assert list(results.read([path]).records) == records
    assert {record.session for record in records} == {"a"}
    parts = [record.run.part for record in records]
    assert parts == ["lengths"] * parts.count("lengths") + ["batch"] * parts.count("batch")
    assert len([record for record in records if not record.run.warmup]) == 9 + 3
    engines = {part: {r.run.engine for r in records if r.run.part == part} for part in ("lengths", "batch")}
    assert engines == {"lengths": {2, 3, 4}, "batch": {5}}  # no two parts share a process
    assert lines == [f"part 1 of 2, lengths: {PARTS['lengths'].what}", f"part 2 of 2, batch: {PARTS['batch'].what}"]
    assert statuses[-1].words.startswith("part 2 of 2, batch: run ") and statuses[-1].left_s is not None


def test_blocks_have_one_turn_of_each_variant(worker: Any, tmp_path: Path, toys: Any) -> None:
    session = dataclasses.replace(planned(worker, tmp_path, "4", quick=False), probes=())
    records, _, _ = run(session, worker, tmp_path / "a.jsonl")
    timed = [record.run for record in records if record.run.part == "threads" and not record.run.warmup]
    n_blocks = 6
    assert sorted((one.block, one.variant) for one in timed) == [
        (i, name) for i in range(n_blocks) for name in ("all", "half")
    ]
    assert [one.repeat for one in timed] == [one.block for one in timed]


def test_a_part_that_fails_leaves_the_reason_and_the_others_go_on(worker: Any, tmp_path: Path, toys: Any) -> None:
    def refuse(n_prompt: int, n_gen: int) -> None:
        if n_prompt >= 256 and worker.refuses:
            raise LabError("No room.", "Buy some.")

    worker.on_run, worker.refuses = refuse, True
    session = planned(worker, tmp_path, "1,2")
    session.trials["lengths"] = session.trials.pop("lengths")  # after batch
    records, _, _ = run(session, worker, tmp_path / "a.jsonl")
    judged = claim_session.judge(session.claims, records, Where(MACHINE), tmp_path, True)
    assert [(one.claim.number, one.judgement.verdict) for one in judged.judged] == [(1, UNTESTABLE), (2, UNTESTABLE)]
    assert claim_verdicts.failures(records) == {"batch": "No room.\nBuy some."}
    assert any(record.run.part == "lengths" and record.run.status == OK for record in records)


def test_an_engine_that_dies_in_a_block_ends_its_part_only(worker: Any, tmp_path: Path, toys: Any) -> None:
    class Dying(FakeWorker):
        def load(self, *_: object) -> Any:
            raise died()

    session = planned(worker, tmp_path, quick=False)
    session = dataclasses.replace(session, probes=(), trials={**session.trials, "batch": session.trials["batch"]})
    order = {name: session.trials[name] for name in ("threads", "batch")}
    records, _, _ = run(dataclasses.replace(session, trials=order), worker, tmp_path / "a.jsonl", Dying)
    assert list(claim_verdicts.failures(records)) == ["threads"]
    errors = {record.run.error for record in records if record.run.part == "threads"}
    assert errors == {str(died())}  # what the engine said, and no further run that says it again
    assert any(record.run.part == "batch" and record.run.status == OK for record in records)


def test_a_part_that_cannot_be_planned_is_a_failed_run(worker: Any, tmp_path: Path, toys: Any) -> None:
    worker.model = dataclasses.replace(MODEL, n_ctx_train=WHOLE, windows=(8, 8), uncounted=None)

    def refuse(asked: Asked) -> list[Trial]:
        raise LabError("There is no disk.", "")

    parts = {**PARTS, "batch": dataclasses.replace(PARTS["batch"], plan=refuse)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim_session, "PARTS", parts)
        session = planned(worker, tmp_path, "2")
    assert {name: str(problem) for name, problem in session.problems.items()} == {"batch": "There is no disk."}
    (record,) = run(session, worker, tmp_path / "a.jsonl")[0]
    assert (record.run.part, record.run.status, record.run.error) == ("batch", FAILED, "There is no disk.")
    assert claim_views.failures([record]) == ["batch: There is no disk."]
    assert list(results.read([tmp_path / "a.jsonl"]).records) == [record]


def test_ceilings_that_cannot_be_measured_are_announced(worker: Any, tmp_path: Path, toys: Any) -> None:
    session = planned(worker, tmp_path, "4", quick=False)

    def refuse(probe: object) -> None:
        raise LabError("No kernel.", "")

    worker.probe = refuse
    records, lines, _ = run(session, worker, tmp_path / "a.jsonl")
    assert lines[:2] == [
        "part 1 of 2, ceilings: the best rate of each kernel",
        "The ceilings could not be measured: No kernel.",
    ]
    assert {record.run.part for record in records} == {"threads"}


def test_an_interrupted_session_can_be_judged(worker: Any, tmp_path: Path, toys: Any) -> None:
    session, path = planned(worker, tmp_path), tmp_path / "a.jsonl"
    session = dataclasses.replace(session, probes=())
    runs: Iterator[Record] = claim_session.execute(session, worker, path, lambda status: None, lambda text: None)
    for record in runs:
        if record.run.part == "batch":
            break
    runs.close()  # type: ignore[attr-defined]
    kept = results.read([path]).records
    ((name, verdicts),) = claim_verdicts.of_sessions(kept)
    assert name == "a" and [one.claim.number for one in verdicts.judged] == [1, 2, 3]
    assert [one.judgement.verdict for one in verdicts.judged] == [UNTESTABLE, UNTESTABLE, HOLDS]
    assert verdicts.unmeasured == (4, 5)
    assert "Claims without measurements: 4, 5. Run: lab claims --only 4,5" in claim_views.notes(verdicts)


def test_the_ceilings_that_are_known_go_with_the_runs(worker: Any, tmp_path: Path, toys: Any) -> None:
    session, path = planned(worker, tmp_path, "2"), tmp_path / "a.jsonl"
    results.append(tmp_path / "ceilings-here.jsonl", dataclasses.replace(FAST, machine=session.base.machine))
    run(dataclasses.replace(session, probes=()), worker, path)
    (kept,) = results.read([path]).ceilings
    assert set(kept.rates) == set(FAST.rates)


def test_a_session_without_runs_leaves_no_file(worker: Any, tmp_path: Path, toys: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    assert run(planned(worker, tmp_path, "3"), worker, path)[0] == []
    assert not path.exists()


def test_evidence_is_of_this_machine_and_others(tmp_path: Path, toys: Any) -> None:
    other = dataclasses.replace(MACHINE, cpu="Another")
    theirs = make_record(make_run(), machine=other, session="theirs")
    far = dataclasses.replace(FAST, machine=other)
    near = make_record(make_run(), session="mine, earlier")
    faster = dataclasses.replace(FAST, rates=(dataclasses.replace(FAST.rates[0], times_ns=(1,)),))
    made = claim_verdicts.evidence_of([of_part("batch")], Where(MACHINE), [FAST], [theirs, near], [far, faster])
    assert made.others == (theirs,) and made.other_ceilings == (far,)
    assert made.ceilings is not None and set(made.ceilings.rates) == set(FAST.rates)  # not those of a sample
    assert made.ceilings is not None and made.ceilings.machine == MACHINE


def test_runs_say_whether_a_session_was_quick(worker: Any, tmp_path: Path, toys: Any) -> None:
    quick, _, _ = run(planned(worker, tmp_path, "1"), worker, tmp_path / "a.jsonl")
    whole, _, _ = run(planned(worker, tmp_path, "1", quick=False), worker, tmp_path / "b.jsonl")
    assert claim_parts.is_quick(quick) and claim_parts.is_quick(quick[:1])
    assert not claim_parts.is_quick(whole) and not claim_parts.is_quick(whole[:1])


def test_progress_counts_all_parts() -> None:
    seen: list[Status] = []
    progress = Progress({"lengths": 20.0, "batch": 30.0}, seen.append)
    assert progress.begin("lengths") == f"part 1 of 2, lengths: {PARTS['lengths'].what}"
    progress.watch(Status("prefill", left_s=5.0))
    progress.watch(Status("loading the model"))
    assert seen[0].left_s == pytest.approx(5 + 30) and seen[1].left_s == pytest.approx(20 + 30, abs=1)
    progress.end("lengths")
    progress.begin("batch")
    progress.watch(Status("prefill", left_s=7.0))
    assert seen[2].left_s == pytest.approx(7) and seen[2].words == "part 2 of 2, batch: prefill"


JUDGED = (
    Judged(claim(1), Judgement(HOLDS, "Of course.", (Figure("share", 64.25, "%", 61, 67), Figure("n", 3)))),
    Judged(claim(2), Judgement(HOLDS_NOT, "Too slow.", (Figure("gain", 1.5, "times"),))),
    Judged(claim(3), Judgement(UNSURE, "Too noisy.")),
    Judged(claim(4), Judgement(UNTESTABLE, "One machine.")),
)


def test_a_line_for_each_claim(capsys: pytest.CaptureFixture[str]) -> None:
    claim_views.print_verdicts(Verdicts(JUDGED, (), (), False), console.console())
    out = capsys.readouterr().out
    assert "1 | claim 1 <b> | share: 64.2 % (61.0-67.0); n: 3.00 | Criterion 1 is at least 1. | holds here\n" in out
    assert "2 | claim 2 <b> | gain: 1.50x | Criterion 2 is at least 1. | does not hold here\n" in out
    assert "2, does not hold here: Too slow.\n" in out and "4, not testable here: One machine.\n" in out
    assert "Of course." not in out
    assert "Of 4 claims 1 holds, 1 does not, 1 cannot be told and 1 is not testable here.\n" in out


def test_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    out = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, soft_wrap=True, markup=False)
    claim_views.print_verdicts(Verdicts(JUDGED, ()), out)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 100
    assert any("claim 2 <b>" in line and "does not hold" in line for line in lines)


def test_many_figures_are_cut_in_a_line() -> None:
    one = Judged(claim(1), Judgement(HOLDS, "", tuple(Figure(f"f{i}", i) for i in range(1, 6))))
    assert one.cells[2] == "f1: 1.00; f2: 2.00; f3: 3.00; 2 more"
    assert len(one.as_row()["figures"]) == 5


def test_a_notebook_shows_a_table() -> None:
    shown = Verdicts(JUDGED, ())._repr_html_()
    assert "claim 1 &lt;b&gt;" in shown and "<b>" not in shown and shown.count("<tr") == 5
    assert "holds here" in repr(Verdicts(JUDGED, ()))


def test_rows_are_those_of_json() -> None:
    rows = json.loads(json.dumps(Verdicts(JUDGED, ()).rows))
    assert rows[0].keys() >= {"claim", "verdict", "figures", "criterion", "number", "words"}
    assert rows[0]["figures"][0] | {"n": None} == {
        "name": "share",
        "value": 64.25,
        "unit": "%",
        "low": 61,
        "high": 67,
        "n": None,
    }


@pytest.fixture
def session_records(worker: Any, tmp_path: Path, toys: Any) -> list[Record]:
    return run(planned(worker, tmp_path, "1"), worker, tmp_path / "a.jsonl")[0]


def test_the_pictures_are_those_of_the_parts(session_records: list[Record]) -> None:
    drawings = claim_views.drawings(session_records)
    assert [(one.part, one.name) for one in drawings] == [
        ("lengths", "lengths-prefill"),
        ("lengths", "lengths-decode"),
        ("batch", "batch"),
    ]


def test_a_page_has_the_verdicts_and_each_picture_once(session_records: list[Record]) -> None:
    text = page.html(session_records, [])
    html = Page(text)
    assert "Do the textbooks' claims hold on this machine?" in html.text
    assert "Of 3 claims 3 hold." in html.text and "<b>" not in text
    assert len(html.named("figure")) == 3
    assert "Picture: sequences decoded together, at claim 1" in html.text
    targets = {tag.get("id") for _, tag in html.tags}
    assert {str(tag["href"])[1:] for tag in html.named("a")} <= targets
    assert "Figures" not in [words.strip() for words in html.text.split("  ")]
    assert "lab claims --quick --model tiny.gguf --threads 2" in html.text
    assert list(results.read([_written(text, session_records)]).records) == session_records


def _written(text: str, records: list[Record]) -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "page.html"
    path.write_text(text)
    return path


def test_a_page_of_claims_and_other_runs_has_both(session_records: list[Record]) -> None:
    plain = [make_record(make_run(20, 5, i), session="b") for i in range(2)]
    html = Page(page.html([*plain, *session_records], []))
    assert "How fast is tiny Q4_0" in html.text and "The evidence, claim by claim" in html.text
    assert "Of 3 claims 3 hold." in html.text


def test_a_record_names_no_file_and_nothing_in_a_page(toys: Any) -> None:
    records = [make_record(make_run(part="../<script>"), session="<script>"), of_part("batch")]
    assert claim_views.drawings(records) == []
    assert "<script>" not in page.html(records, []).replace('<script type="application/gzip"', "")


def test_verdicts_that_were_asked_for_are_those_of_the_page(session_records: list[Record]) -> None:
    sections = claim_views.sections(session_records, judged=[("a", Verdicts(JUDGED, tuple(session_records)))])
    assert [section.as_cell(line[0]).text for line in sections[0].cells] == ["1", "2", "3", "4"]


def test_the_command_that_makes_a_session_again(session_records: list[Record]) -> None:
    assert reproduce.command(session_records) == "lab claims --quick --model tiny.gguf --threads 2"


def test_sessions_nearby_come_with_their_ceilings(tmp_path: Path) -> None:
    for name, line in (("a", make_record(session="a")), ("b", make_record(session="b")), ("c", FAST)):
        results.append(tmp_path / f"{name}.jsonl", line)
    (tmp_path / "d.jsonl").write_text("no line\n")
    near = results.nearby([tmp_path], [make_record(session="a")])
    assert [record.session for record in near.records] == ["b"] and near.ceilings == (FAST,)
    assert len(results.nearby([tmp_path]).records) == 2


def test_records_are_judged_again_as_python(
    session_records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = lab.claims(records=session_records, out=tmp_path)
    assert [one.claim.number for one in again.judged] == [1, 2, 3] and again.is_quick
    assert [row["number"] for row in lab.claims(1, records=session_records, out=tmp_path).rows] == [1]
    with pytest.raises(LabError, match="These records have 0 sessions of claims"):
        lab.claims(records=[make_record()])
    other = [dataclasses.replace(record, session="another") for record in session_records]
    with pytest.raises(LabError, match="have 2 sessions of claims: a, another"):
        lab.claims(records=[*session_records, *other])


def test_one_turn_a_block_is_half_the_runs(worker: Any, tmp_path: Path) -> None:
    plans = {name: make_plan(worker, "8", 2, 4) for name in ("a", "b")}
    runs = side_by_side.execute(plans, 4, tmp_path / "a.jsonl", lambda status: None, FakeWorker, n_turns=1)  # type: ignore[arg-type]
    timed = [record.run for record in runs if not record.run.warmup]
    assert sorted((one.block, one.variant) for one in timed) == [(i, name) for i in range(4) for name in "ab"]


def test_the_command(tmp_path: Path) -> None:
    status, out, _ = run_process("claims", "--only", "1", "--quick", "--dry-run", "-o", tmp_path)
    assert status == 0 and "prompts of several lengths" in out
    assert not list(tmp_path.iterdir())
    status, _, err = run_lab("claims", "--only", "0", "-o", tmp_path)
    assert status == 1 and err.startswith("Error: --only 0 is not possible.")


def test_one_claim_for_real(mini: Path, tmp_path: Path) -> None:
    number = next(one.number for one in CLAIMS if one.parts == ("no_cache",))
    model = ("-m", mini, "--prompt", "random", "--threads", 1)
    status, out, err = run_lab("claims", "--only", number, "--quick", *model, "--json", "--report", "-o", tmp_path)
    assert status == 0, err
    document = json.loads(out)
    (row,) = document["rows"]
    assert (row["number"], row["verdict"] in (HOLDS, HOLDS_NOT, UNSURE)) == (number, True) and row["figures"]
    records = results.read([document["results"]]).records
    assert {record.run.part for record in records} == {"no_cache"}
    assert {record.run.n_prompt for record in records if not record.run.warmup} == {16, 32, 64, 128, 256, 512}
    assert Path(document["report"]).exists() and all(Path(plot).exists() for plot in document["plots"])
    status, out, _ = run_lab("show", document["results"], "--json")
    assert next(row for row in json.loads(out)["rows"] if row["number"] == number)["verdict"] == row["verdict"]
    assert "part 1 of 1, no_cache" in err
