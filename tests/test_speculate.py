"""Tokens drafted ahead: the lookup, sessions with a fake engine, and the embedded model."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.app import command_words, kinds
from lab.core import drafts, results
from lab.core.drafts import LOOKUP, Chain, StepTimes
from lab.core.record import DECODE, DRAFT, FORGET, OK, PREFILL, VERIFY, Record, Steps
from lab.core.stored_command import storing
from lab.errors import LabError
from lab.features.report import page
from lab.features.speculate import curve, planning, speed_ups
from lab.features.speculate.child import Lookup
from lab.features.speculate.setup import Speculation, speculation_of
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.cases import Plan
from lab.runner.session import execute, new_results_file
from lab.show import canvas
from lab.show.console import console
from lab.show.section import print_sections
from tests.support import miniature
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.records import MODEL, column

LOOKUPS: dict[str, tuple[list[int], int, list[int]]] = {
    "what followed the same pair": (
        [1, 2, 3, 4, 1, 2],
        2,
        [3, 4],
    ),
    "the last time, not the first": ([1, 2, 9, 1, 2, 3, 5, 1, 2], 1, [3]),
    "three tokens come before two": ([9, 1, 2, 7, 8, 1, 2, 6, 9, 1, 2], 1, [7]),
    "past the end it repeats": (
        [1, 2, 1, 2],
        5,
        [1, 2, 1, 2, 1],
    ),
    "nothing has occurred before": ([1, 2, 3], 4, []),
    "one token is no text": ([1], 4, []),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_followed_the_same_tokens_is_guessed(name: str) -> None:
    tokens, n, expected = LOOKUPS[name]

    assert Lookup(tokens).draft(n) == expected


TIMES = StepTimes({1: 1.0, 2: 1.5, 3: 2.0, 5: 3.0}, {})
FOUR_OF_FIVE = [(4, 3)] * 5


def test_the_speed_up_is_the_formula_where_every_step_is_alike() -> None:
    with_draft_model = StepTimes(TIMES.target, {1: 0.25, 2: 0.4})

    by_lookup = drafts.speed_up(FOUR_OF_FIVE, TIMES)
    by_model = drafts.speed_up(FOUR_OF_FIVE, with_draft_model)
    of_unknown_step = drafts.speed_up([(3, 1)], TIMES)
    after_all_accepted = drafts.speed_up([(2, 2), (2, 1)], with_draft_model)

    assert by_lookup == pytest.approx(4 / 3.0)  # L / v
    assert by_model == pytest.approx(4 / (4 * 0.25 + 3))  # L / (n c + v)
    assert of_unknown_step is None
    # The last accepted token was only verified: the draft model computes it in its next step
    assert after_all_accepted == pytest.approx(5 / (2 * (2 * 0.25 + 2) + 0.4 - 0.25))


def lookup_chains(
    text: Sequence[int],
    n_prompt: int,
    n_draft: int,
) -> list[Chain]:
    """Speculation by lookup if the model writes just this text."""
    chains = []
    n = n_prompt
    while n < len(text):
        guess = Lookup(text[:n]).draft(min(n_draft, len(text) - n - 1))
        n_accepted = 0
        while n_accepted < len(guess) and guess[n_accepted] == text[n + n_accepted]:
            n_accepted += 1
        chains.append((len(guess), n_accepted))
        n += n_accepted + 1
    return chains


def n_chosen(chains: Sequence[Chain]) -> int:
    """Tokens that these steps choose: the accepted ones and one more each."""
    return sum(accepted + 1 for _, accepted in chains)


@pytest.mark.parametrize("name", ["code", "table", "story", "dialogue"])
@pytest.mark.parametrize("n_draft", [1, 2, 4])
def test_one_draft_length_tells_of_shorter_ones(name: str, n_draft: int) -> None:
    source = prompts.source(name).text
    assert source is not None
    letters = "".join(source.split())[:900]  # they repeat more than words
    text = [ord(letter) for letter in letters]

    expected = drafts.in_steps_of(lookup_chains(text, 300, 8), n_draft)

    truth = lookup_chains(text, 300, n_draft)
    assert n_chosen(expected) == n_chosen(truth) == 600
    assert len(expected) == pytest.approx(len(truth), rel=0.1)


@pytest.mark.parametrize(
    ("v", "c", "n_draft", "share"),
    [
        (1.75, 0, 2, 0.5),
        (3, 0, 2, None),
        (1, 0.5, 2, 0.618),
    ],
)
def test_the_share_at_which_it_pays(
    v: float,
    c: float,
    n_draft: int,
    share: float | None,
) -> None:
    break_even = drafts.break_even(v, c, n_draft)

    assert break_even == (share if share is None else pytest.approx(share, abs=1e-3))


@pytest.mark.parametrize(
    ("v", "sentence"),
    [
        (
            1.75,
            "A step of 3 positions takes 1.75x a step of one: drafts of 2 tokens pay if each "
            "drafted token is right with a chance above 50 %.",
        ),
        (
            3.0,
            "A step of 3 positions takes 3.00x a step of one: no draft length pays, even with "
            "every token accepted.",
        ),
    ],
)
def test_drafts_pay_above_a_chance_of_each_token(v: float, sentence: str) -> None:
    rows: list[Any] = [SimpleNamespace(n_positions=3, v=v, c=None)]
    assert curve.what_pays(rows) == sentence


def test_the_step_of_the_sentence_is_that_of_its_drafts() -> None:
    rows: list[Any] = [
        SimpleNamespace(n_positions=n, v=v, c=None) for n, v in ((4, 2.86), (5, 3.52))
    ]
    assert curve.what_pays(rows) == (
        "A step of 4 positions takes 2.86x a step of one: drafts of 3 tokens pay if each drafted "
        "token is right with a chance above 78 %."
    )


def test_the_expected_length_of_the_textbook() -> None:
    assert drafts.textbook_length(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert drafts.textbook_length(1.0, 3) == 4


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    for name in ("tiny.gguf", "draft.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path / "tiny.gguf"


def make_plan(
    worker: Any,
    model: Path,
    *,
    lengths: str = "1,2,4",
    draft: str | None = None,
    **changes: Any,
) -> Plan:
    settings = {
        "prompt_len": "20",
        "gen": 13,
        "repeat": 2,
        "prompt": "code,story",
        **changes,
    }
    return planning.plan(worker, draft, lengths, model=str(model), **settings)


def measured(worker: Any, model: Path, **changes: Any) -> list[Record]:
    """The timed runs of a session."""
    plan = make_plan(worker, model, **changes)
    path = new_results_file(plan, model.parent)
    records = execute(plan, worker, path, lambda status: None)
    return [record for record in records if not record.run.warmup]


def setup(record: Record) -> Speculation:
    speculation = speculation_of(record.run)
    assert speculation is not None
    return speculation


def has_drafts(record: Record) -> bool:
    speculation = setup(record)
    return speculation.text is not None and speculation.n_draft > 0


def test_a_block_has_the_curve_and_every_text_with_and_without_drafts(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    expected = {Speculation(LOOKUP, 4, None)}
    for text in ("code", "story"):
        expected.add(Speculation(None, 0, text))
        expected |= {Speculation(LOOKUP, n, text) for n in (1, 2, 4)}

    records = measured(fake_worker, model_file)

    for repeat in (0, 1):
        block = [setup(record) for record in records if record.run.repeat == repeat]
        assert len(block) == 9
        assert set(block) == expected
    assert set(column(records, "run.status")) == {OK}
    assert fake_worker.starts == 2


def test_all_runs_of_a_text_in_a_block_have_the_same_prompt(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    measured(
        fake_worker,
        model_file,
        repeat=1,
        prompt="code",
        lengths="1,2",
    )

    prompts_of_text = set()
    for script in fake_worker.scripts:
        tokens: list[int] = []
        for operation in script:
            if operation.kind == PREFILL:
                tokens += operation.parts[0].tokens or ()
        if len(tokens) == 20:  # the steps of the curve begin later in the text
            prompts_of_text.add(tuple(tokens))
    assert len(prompts_of_text) == 1


def test_rows_have_what_was_planted(fake_worker: FakeWorker, model_file: Path) -> None:
    """A token takes 10 ms, a verified position and choosing 1 ms, a lookup and forgetting 5 ms.

    Two drafted tokens are accepted each time; the last step drafts two.
    """
    step_ms = 5 + 10 + 5
    last_step_ms = 5 + 6
    records = measured(fake_worker, model_file)

    rows = speed_ups.rows(records)
    one_position, *_, five_positions = curve.rows(records)

    _, two, four, *_ = rows
    assert column(rows, "text") == ["code"] * 3 + ["story"] * 3
    assert column(rows, "n_draft") == [1, 2, 4] * 2
    assert four.length == 3.0
    assert four.right == 8 / 14
    assert four.plain_tpot_s == pytest.approx(0.011)
    assert four.tpot_s == pytest.approx((3 * step_ms + last_step_ms) / 12e3)
    assert four.speed_up == pytest.approx(0.011 / four.tpot_s)
    assert four.low is None
    assert two.right == 1.0
    assert one_position.step_s == pytest.approx(0.011)
    assert five_positions.n_positions == 5
    assert five_positions.v == pytest.approx(10 / 11)
    assert four.expected == pytest.approx(12 * 11 / (3 * 10 + 6))
    assert four.n_parted == 0
    assert four.bottleneck is None


def test_the_bottleneck_is_the_part_that_costs_most(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    fake_worker.n_right = 0
    records = measured(
        fake_worker,
        model_file,
        repeat=6,
        prompt="code",
    )

    best, *_ = speed_ups.conclude(speed_ups.rows(records))

    assert "does not pay, 0.800x plain decoding with 1 drafted token per step" in best
    assert (
        "Bottleneck: acceptance; with every token accepted the speed-up would be 5.50x."
        in best
    )


def changed(record: Record, **changes: Any) -> Record:
    return dataclasses.replace(record, run=dataclasses.replace(record.run, **changes))


def test_equal_texts_are_said_to_match(fake_worker: FakeWorker, model_file: Path) -> None:
    records = measured(
        fake_worker,
        model_file,
        repeat=1,
        lengths="2",
        prompt="code",
    )

    rows = speed_ups.rows(records)

    assert rows[0].n_parted == 0
    assert "In 1 run the tokens match plain decoding." in speed_ups.conclude(rows)


def test_where_the_text_differs_is_said(fake_worker: FakeWorker, model_file: Path) -> None:
    records = []
    for record in measured(
        fake_worker,
        model_file,
        repeat=1,
        lengths="2",
        prompt="code",
    ):
        ids = record.run.token_ids
        is_parted = has_drafts(record)
        records.append(
            changed(record, token_ids=(0, 1, 99, *ids[3:])) if is_parted else record
        )

    rows = speed_ups.rows(records)

    sentence = (
        "In 1 of 1 runs the text differs from plain decoding, from token 3 at the earliest"
    )
    assert rows[0].n_parted == 1
    assert sentence in " ".join(speed_ups.conclude(rows))


def scaled(steps: Steps, factor: int) -> Steps:
    """The same steps, so many times as slow."""
    stamps = {}
    for name in ("start_ns", "ready_ns", "end_ns"):
        stamps[name] = tuple(factor * ns for ns in getattr(steps, name))
    return dataclasses.replace(steps, **stamps)


def test_sessions_are_paired_with_themselves(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    """The second session is three times as slow: its own plain runs are, too."""
    first = measured(
        fake_worker,
        model_file,
        repeat=6,
        lengths="2",
        prompt="code",
    )
    second = []
    for record in first:
        slow = changed(record, steps=scaled(record.run.steps, 3))
        second.append(dataclasses.replace(slow, session="later"))

    (alone,) = speed_ups.rows(first)
    (both,) = speed_ups.rows([*first, *second])

    assert both.n_runs == 12
    assert (both.low, both.high) == pytest.approx((alone.low, alone.high))


def test_a_draft_model_reads_the_prompt_and_is_recorded(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    draft = str(model_file.with_name("draft.gguf"))
    with storing(["speculate", "--draft", "draft.gguf"]):
        records = measured(
            fake_worker, model_file, draft=draft, repeat=1, lengths="2", prompt="code"
        )

    (row,) = speed_ups.rows(records)
    one_position, *_ = curve.rows(records)

    (drafted,) = filter(has_drafts, records)
    (plain,) = [record for record in records if not setup(record).n_draft]
    assert drafted.draft_model == MODEL
    assert plain.run.steps.kind.count(DRAFT) == 0
    assert drafted.run.steps.kind[:4] == (DRAFT, PREFILL, DRAFT, DRAFT)
    assert command_words.line(records) == "lab speculate --draft FOLDER/draft.gguf"
    assert row.draft == "tiny Q4_0"
    assert one_position.c == pytest.approx(2 / 11)  # 1 ms to compute, 1 ms to choose


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": "0"}, "--draft-len 0 is not possible"),
        ({"lengths": "2,2"}, "--draft-len has 2 twice"),
        ({"lengths": "8", "ubatch": 8}, "8 drafted tokens .* do not fit into one step of 8"),
        ({"lengths": "12"}, "--gen 13 is too short for drafts of 12 tokens"),
        ({"prompt": "random"}, "Random tokens cannot be predicted"),
        ({"prompt": "no-such-file.txt"}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    fake_worker: FakeWorker, model_file: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LabError, match=message):
        make_plan(fake_worker, model_file, **changes)


def test_a_draft_of_another_vocabulary_is_refused(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    fake_worker.differ = "one has 100 tokens, the other 90"
    draft = str(model_file.with_name("draft.gguf"))

    with pytest.raises(
        LabError, match="and tiny Q4_0 differ: one has 100 tokens, the other 90"
    ):
        make_plan(fake_worker, model_file, draft=draft)


@pytest.fixture(scope="module")
def real(embedded: Path) -> Iterator[list[Record]]:
    """The embedded model, which drafts for itself, one block."""
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        model = catalog.DEFAULT
        plan = planning.plan(worker, model, "1,3", 64, 24, 1, prompt="code", threads=1)
        path = new_results_file(plan, Path(folder))
        records = list(execute(plan, worker, path, lambda status: None))
        assert list(results.read([path]).records) == records  # every field survives the file
        yield [record for record in records if not record.run.warmup]


def test_a_model_that_drafts_for_itself_is_mostly_right(real: list[Record]) -> None:
    """Not always: steps of one and of several tokens round differently."""
    row, *_ = speed_ups.rows(real)

    assert column(real, "run.status") == [OK] * 4
    assert row.right is not None
    assert row.right > 0.7


def test_every_step_with_drafts_is_accounted_for(real: list[Record]) -> None:
    drafted = list(filter(has_drafts, real))
    assert len(drafted) == 2
    for record in drafted:
        run = record.run
        steps = run.steps
        of_model = steps.frame()[lambda step: step.kind != DRAFT]
        assert record.draft_model is not None
        assert set(steps.kind) <= {PREFILL, DRAFT, VERIFY, DECODE, FORGET}
        assert n_chosen(drafts.checked(run)) == 23
        assert len(run.token_ids) == 24
        assert of_model.n_past.iloc[-1] <= 64 + 24
        stamps: list[int] = []
        for stamps_of_step in zip(steps.start_ns, steps.ready_ns, steps.end_ns, strict=True):
            stamps += stamps_of_step
        assert stamps == sorted(stamps)


def test_every_step_of_the_curve_is_forgotten_again(real: list[Record]) -> None:
    middle = 64 + 12  # of the answer
    (run,) = [record.run for record in real if setup(record).text is None]

    steps = run.steps.frame()
    verify = steps[steps.kind == VERIFY]
    decode = steps[steps.kind == DECODE]
    assert sorted(verify.n_tokens) == sorted([2, 3, 4] * planning.N_TIMES)
    assert set(verify.n_past) == {middle}
    assert set(decode.n_tokens) == {1}
    assert len(decode) == planning.N_IN_A_ROW * planning.N_TIMES
    assert set(decode.n_past) == set(range(middle, middle + planning.N_IN_A_ROW))


@pytest.mark.usefixtures("undrawn")
def test_it_is_shown_drawn_and_written(
    real: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = kinds.experiments_of(real)
    print_sections(sections, console())
    out = capsys.readouterr().out
    pictures = [*sections[0].pictures, *sections[1].pictures]
    paths = list(canvas.write(pictures[0].draw, tmp_path, "a"))
    text = page.report(tmp_path / "report.html", real).read_text()
    rows = json.loads(json.dumps(sections[0].document()["rows"]))

    assert set(column(sections, "name")) == {"speculate", "curve"}
    assert len(pictures) == 1
    assert "tokens drafted and verified together" in out
    assert "smollm2-135m Q4_1" in out
    for path in paths:
        assert path.stat().st_size > 10_000
    assert "Does it pay to draft tokens" in text
    assert {"speed_up", "expected", "bottleneck"} <= rows[0].keys()


@pytest.fixture
def small_synthetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """synthetic:smollm2-135m with few and narrow layers, in a cache of its own."""
    entry = catalog.entries()["smollm2-135m"]
    small = dataclasses.replace(entry, shape=miniature.entry("llama").shape)
    monkeypatch.setitem(catalog.entries(), small.name, small)
    monkeypatch.setenv("MINI_LAB_CACHE", str(tmp_path / "made"))
    return "synthetic:smollm2-135m"


def test_a_model_with_random_weights_has_its_curve(
    small_synthetic: str, tmp_path: Path
) -> None:
    asked_words = (
        f"speculate -m {small_synthetic} --draft-len 1,3 -p 32 -n 8 -r 1 -t 1".split()
    )

    status, out, err = run_lab(*asked_words, "--out", tmp_path, "--no-plot", "--json")

    assert status == 0, err
    rows = json.loads(out)["rows"]
    for n_positions, row in enumerate(rows, 1):
        assert row["n_positions"] == n_positions
        assert row["v"] > 0
    assert len(rows) == 4
    assert run_lab("show", tmp_path)[0] == 0
