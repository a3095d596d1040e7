"""Tokens guessed ahead: the arithmetic, the session with a fake engine, and the embedded model."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.app import asked as asked_words, kinds
from lab.core import guesses, results
from lab.core.guesses import LOOKUP, StepTimes
from lab.core.record import DECODE, DRAFT, FORGET, OK, PREFILL, VERIFY, Record, Steps
from lab.errors import LabError
from lab.features.report import page
from lab.features.speculate import speculation
from lab.features.speculate.child import Lookup
from lab.features.speculate.speculation import Speculation
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.session import execute, new_results_file
from lab.show import canvas
from lab.show.console import console
from lab.show.section import print_sections
from tests import miniature
from tests.conftest import MODEL, FakeWorker, run_lab


def test_what_followed_the_same_words_last_is_guessed() -> None:
    assert Lookup([1, 2, 3, 4, 1, 2]).guess(2) == [3, 4]
    assert Lookup([1, 2, 9, 1, 2, 3, 5, 1, 2]).guess(1) == [3]  # the last time, not the first
    assert Lookup([9, 1, 2, 7, 8, 1, 2, 6, 9, 1, 2]).guess(1) == [
        7
    ]  # three words say more than two
    assert Lookup([1, 2, 3]).guess(4) == []
    assert Lookup([1]).guess(4) == []


TIMES = StepTimes({1: 1.0, 2: 1.5, 3: 2.0, 5: 3.0}, {})


def test_the_speed_up_is_the_formula_where_every_step_is_alike() -> None:
    chains = [(4, 3)] * 5
    assert guesses.speed_up(chains, TIMES) == pytest.approx(4 / 3.0)  # L / v
    with_draft = StepTimes(TIMES.target, {1: 0.25, 2: 0.4})
    assert guesses.speed_up(chains, with_draft) == pytest.approx(
        4 / (4 * 0.25 + 3)
    )  # L / (n c + v)
    assert guesses.speed_up([(3, 1)], TIMES) is None  # no step of 4 was timed


def simulate(text: list[int], n_known: int, n_draft: int) -> list[guesses.Chain]:
    """Speculation by lookup where the model writes just this text."""
    steps = []
    n = n_known
    while n < len(text):
        guess = Lookup(text[:n]).guess(min(n_draft, len(text) - n - 1))
        right = next((i for i, token in enumerate(guess) if token != text[n + i]), len(guess))
        steps.append((len(guess), right))
        n += right + 1
    return steps


@pytest.mark.parametrize("name", ["code", "table", "story", "dialogue"])
def test_one_draft_length_tells_of_shorter_ones(name: str) -> None:
    """The truth is known: each length is also simulated by itself."""
    words = (prompts.source(name).text or "").split()
    numbers = {word: i for i, word in enumerate(dict.fromkeys("".join(words)))}
    text = [numbers[letter] for letter in "".join(words)[:900]]  # letters repeat more than words
    teacher = simulate(text, 300, 8)
    for n in (1, 2, 4):
        truth = simulate(text, 300, n)
        expected = guesses.in_steps_of(teacher, n)
        assert (
            sum(right + 1 for _, right in expected) == sum(right + 1 for _, right in truth) == 600
        )
        assert len(expected) == pytest.approx(len(truth), rel=0.1)


@pytest.mark.parametrize(
    ("v", "c", "n", "share"), [(1.75, 0, 2, 0.5), (3, 0, 2, None), (1, 0.5, 2, 0.618)]
)
def test_the_share_at_which_it_pays(v: float, c: float, n: int, share: float | None) -> None:
    assert guesses.break_even(v, c, n) == (
        share and pytest.approx(share, abs=1e-3)
    )  # 3: three tokens make up for it
    assert (
        guesses.textbook_length(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
        and guesses.textbook_length(1.0, 3) == 4
    )


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    for name in ("tiny.gguf", "draft.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path / "tiny.gguf"


def make_plan(
    worker: Any, model: Path, *, lengths: str = "1,2,4", draft: str | None = None, **asked: Any
) -> Any:
    settings: dict[str, Any] = {
        "prompt_len": "20",
        "gen": 13,
        "repeat": 2,
        "prompt": "code,story",
    } | asked
    return speculation.plan(worker, draft, lengths, model=str(model), **settings)


def measured(worker: Any, model: Path, folder: Path, **asked: Any) -> list[Record]:
    plan = make_plan(worker, model, **asked)
    records = list(execute(plan, worker, new_results_file(plan, folder), lambda status: None))
    return [record for record in records if not record.run.warmup]


def test_a_block_has_the_curve_and_every_text_with_and_without_guesses(
    fake_worker: FakeWorker, model_file: Path, tmp_path: Path
) -> None:
    records = measured(fake_worker, model_file, tmp_path)
    for repeat in (0, 1):
        block = [record.run.speculation for record in records if record.run.repeat == repeat]
        wanted = {
            Speculation(LOOKUP if n else None, n, text)
            for text in ("code", "story")
            for n in (0, 1, 2, 4)
        }
        assert set(block) == wanted | {Speculation(LOOKUP, 4, None)} and len(block) == 9
    assert fake_worker.starts == 2
    code = [
        r.run
        for r in records
        if r.run.repeat == 0 and r.run.speculation and r.run.speculation.text == "code"
    ]
    assert (
        len({run.prompt_offset for run in code}) == 1
    )  # the same prompt, or nothing could be compared
    assert all(run.status == OK for run in code)


def test_rows_have_what_was_planted(
    fake_worker: FakeWorker, model_file: Path, tmp_path: Path
) -> None:
    """A token takes 10 ms, a position of a verification 1 ms, choosing 1 ms each, forgetting 5 ms; 2 are right."""
    records = measured(fake_worker, model_file, tmp_path)
    rows = {(row.text, row.n_draft): row for row in speculation.rows(records)}
    assert list(rows) == [(text, n) for text in ("code", "story") for n in (1, 2, 4)]
    four = rows["code", 4]
    assert (four.length, four.right) == (3.0, 8 / 14)  # the last step guesses 2
    assert four.plain_tpot_s == pytest.approx(0.011)
    assert four.tpot_s == pytest.approx(
        (3 * (5 + 10 + 5) + 5 + 6) / 12e3
    )  # looking up, verifying, forgetting
    assert four.speed_up == pytest.approx(0.011 / four.tpot_s) and four.low is None
    assert rows["code", 2].right == 1.0
    curve = {row.n_positions: row for row in speculation.curve(records)}
    assert curve[1].step_s == pytest.approx(0.011) and curve[5].v == pytest.approx(10 / 11)
    assert four.expected == pytest.approx(12 * 11 / (3 * 10 + 6))
    assert four.n_parted == 0 and four.bottleneck is None


def changed(record: Record, **changes: Any) -> Record:
    return dataclasses.replace(record, run=dataclasses.replace(record.run, **changes))


def guessed(record: Record) -> bool:
    return record.run.speculation is not None and bool(
        record.run.speculation.text and record.run.speculation.n_draft
    )


def test_where_the_text_differs_is_said(
    fake_worker: FakeWorker, model_file: Path, tmp_path: Path
) -> None:
    records = measured(fake_worker, model_file, tmp_path, repeat=1, lengths="2", prompt="code")
    other = [
        changed(r, token_ids=(0, 1, 99, *r.run.token_ids[3:])) if guessed(r) else r for r in records
    ]
    for own, n_parted, words in (
        (records, 0, "the tokens match plain decoding"),
        (
            other,
            1,
            "In 1 of 1 runs the text differs from plain decoding, from token 3 at the earliest",
        ),
    ):
        rows = speculation.rows(own)
        assert rows[0].n_parted == n_parted and words in " ".join(speculation.sentences(rows))


def test_sessions_are_paired_with_themselves(
    fake_worker: FakeWorker, model_file: Path, tmp_path: Path
) -> None:
    """The second session is three times as slow: its own plain runs are, too."""
    first = measured(fake_worker, model_file, tmp_path, repeat=6, lengths="2", prompt="code")
    second = [
        dataclasses.replace(changed(r, steps=scaled(r.run.steps, 3)), session="later")
        for r in first
    ]
    (alone,) = speculation.rows(first)
    (both,) = speculation.rows([*first, *second])
    assert both.n_runs == 12 and (both.low, both.high) == pytest.approx((alone.low, alone.high))


def scaled(steps: Steps, factor: int) -> Steps:
    stamps = {
        name: tuple(factor * ns for ns in getattr(steps, name))
        for name in ("start_ns", "ready_ns", "end_ns")
    }
    return dataclasses.replace(steps, **stamps)


def test_a_draft_model_reads_the_prompt_and_is_recorded(
    fake_worker: FakeWorker, model_file: Path, tmp_path: Path
) -> None:
    draft = str(model_file.with_name("draft.gguf"))
    records = measured(
        fake_worker, model_file, tmp_path, draft=draft, repeat=1, lengths="2", prompt="code"
    )
    by_n = {
        r.run.speculation.n_draft: r.run
        for r in records
        if r.run.speculation and r.run.speculation.text
    }
    assert by_n[0].draft is None and by_n[2].draft == MODEL
    kinds = by_n[2].steps.kind
    assert kinds[:4] == (DRAFT, PREFILL, DRAFT, DRAFT)  # it reads the prompt first
    assert "speculate --draft" in str(asked_words.line(records))
    (row,) = speculation.rows(records)
    assert row.draft == "tiny Q4_0"
    (curve, *_) = speculation.curve(records)
    assert curve.c == pytest.approx(2 / 11)  # 1 ms to compute, 1 ms to choose


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"lengths": "0"}, "--draft-len 0 is not possible"),
        ({"lengths": "2,2"}, "--draft-len has 2 twice"),
        (
            {"lengths": "8", "ubatch": 8},
            "8 drafted tokens and the token before them do not fit into one step of 8",
        ),
        ({"lengths": "12"}, "--gen 13 is too short for drafts of 12 tokens"),
        ({"prompt": "random"}, "Random tokens cannot be predicted"),
        ({"prompt": "no-such-file.txt"}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    fake_worker: FakeWorker, model_file: Path, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(LabError, match=words):
        make_plan(fake_worker, model_file, **asked)


def test_a_draft_of_another_vocabulary_is_refused(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    fake_worker.differ = "one has 100 tokens, the other 90"
    with pytest.raises(LabError, match="and tiny Q4_0 differ: one has 100 tokens, the other 90"):
        make_plan(fake_worker, model_file, draft=str(model_file.with_name("draft.gguf")))


@pytest.fixture(scope="module")
def real(embedded: Path) -> Iterator[list[Record]]:
    """The embedded model, which guesses for itself, one block."""
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        plan = speculation.plan(worker, catalog.DEFAULT, "1,3", 64, 24, 1, prompt="code", threads=1)
        path = new_results_file(plan, Path(folder))
        made = list(execute(plan, worker, path, lambda status: None))
        assert list(results.read([path]).records) == made  # every new field survives the file
        yield [record for record in made if not record.run.warmup]


def test_a_model_that_guesses_for_itself_is_mostly_right_and_every_step_is_accounted_for(
    real: list[Record],
) -> None:
    assert [record.run.status for record in real] == [OK] * 4
    (row, *_) = speculation.rows(real)
    assert (
        row.right is not None and row.right > 0.7
    )  # steps of one and of several tokens round differently
    for run in (record.run for record in real if guessed(record)):
        assert run.draft is not None and set(run.steps.kind) <= {
            PREFILL,
            DRAFT,
            VERIFY,
            DECODE,
            FORGET,
        }
        assert (
            sum(right + 1 for _, right in guesses.checked(run)) == 23 and len(run.token_ids) == 24
        )
        assert [
            n for kind, n in zip(run.steps.kind, run.steps.n_past, strict=True) if kind != DRAFT
        ][-1] <= 64 + 24
        times = list(zip(run.steps.start_ns, run.steps.ready_ns, run.steps.end_ns, strict=True))
        assert all(a <= b <= c for a, b, c in times) and times == sorted(times)
    for run in (
        record.run
        for record in real
        if record.run.speculation and record.run.speculation.text is None
    ):
        sizes = [
            n
            for kind, n in zip(run.steps.kind, run.steps.n_tokens, strict=True)
            if kind in (DECODE, VERIFY)
        ]
        assert sorted(sizes) == sorted(
            [*[1] * speculation.N_IN_A_ROW, 2, 3, 4] * speculation.N_TIMES
        )
        past = {
            (kind, n)
            for kind, n in zip(run.steps.kind, run.steps.n_past, strict=True)
            if kind in (DECODE, VERIFY)
        }
        assert past == {
            (VERIFY, 64 + 12),
            *((DECODE, 64 + 12 + i) for i in range(4)),
        }  # each is forgotten again


def test_it_is_shown_drawn_and_written(
    real: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = kinds.experiments_of(real)
    assert {section.name for section in shown} == {"speculate", "curve"}
    print_sections(shown, console())
    out = capsys.readouterr().out
    assert "tokens drafted and verified together" in out and "smollm2-135m Q4_1" in out
    (picture,) = [picture for section in shown for picture in section.pictures]
    assert all(path.stat().st_size > 10_000 for path in canvas.write(picture.draw, tmp_path, "a"))
    text = page.report(tmp_path / "report.html", real).read_text()
    assert "Does it pay to draft tokens" in text
    rows = json.loads(json.dumps(shown[0].document()["rows"]))
    assert {"speed_up", "expected", "bottleneck"} <= rows[0].keys()


@pytest.fixture
def small_synthetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """synthetic:smollm2-135m with few and narrow layers, in a cache of its own."""
    small = dataclasses.replace(
        catalog.entries()["smollm2-135m"], shape=miniature.entry("llama").shape
    )
    monkeypatch.setitem(catalog.entries(), small.name, small)
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path / "made"))


def test_a_model_with_random_weights_has_its_curve(small_synthetic: None, tmp_path: Path) -> None:
    asked = [
        "speculate",
        "-m",
        "synthetic:smollm2-135m",
        "--draft-len",
        "1,3",
        "-p",
        "32",
        "-n",
        "8",
        "-r",
        "1",
    ]
    status, out, err = run_lab(*asked, "-t", "1", "--out", tmp_path, "--no-plot", "--json")
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert [row["n_positions"] for row in rows] == [1, 2, 3, 4]
    assert all(row["v"] > 0 for row in rows)
    assert run_lab("show", tmp_path)[0] == 0
