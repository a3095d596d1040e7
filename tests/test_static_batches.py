"""Static against continuous batching: exactly with a fake engine, and on the embedded model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import comparison, table
from lab.core import results
from lab.core import script as scripts
from lab.core.levers import CONTINUOUS, STATIC, Batch
from lab.core.record import DECODE, FORGET, PREFILL, Record, Run
from lab.drawing import canvas
from lab.errors import LabError
from lab.experiments import batching, static_batches
from lab.models import catalog
from lab.runner import load_plan
from lab.runner.cases import Case
from lab.show import levers, reproduce
from tests.conftest import MODEL, SETTINGS, FakeWorker, make_record, make_run, run_lab, steps_of

LENGTHS = (5, 2, 1, 3, 2)


def lever(schedule: str, n_seq: int = 2, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    return Batch(n_seq, False, schedule, "1-5", lengths)


def static_run(schedule: str, repeat: int = 0, decode_ms: float = 10, prefill_ms: float = 0, **changes: Any) -> Run:
    one = lever(schedule, **changes)
    case = Case(4, max(one.lengths or ()), lever=one)
    written = batching.write(case, lambda i, n: [100 * i + k for k in range(n)], SETTINGS)
    steps = steps_of(written, prefill_ms=prefill_ms, decode_ms=decode_ms)
    return dataclasses.replace(make_run(4, 5, repeat), steps=steps, batch=one)


def turns(schedule: str) -> list[tuple[dict[int, int], tuple[int, ...], int]]:
    return [(turn.started, turn.decoding, turn.n_steps) for turn in static_batches.turns(lever(schedule))]


def test_a_static_batch_waits_for_its_longest_answer() -> None:
    assert turns(STATIC) == [
        ({0: 0, 1: 1}, (0, 1), 1),
        ({}, (0,), 3),
        ({0: 3, 1: 2}, (0,), 2),  # the longest first; request 2 ends with its prefill
        ({0: 4}, (0,), 1),
    ]


def test_continuous_batching_gives_a_free_place_to_the_next_request_at_once() -> None:
    assert turns(CONTINUOUS) == [
        ({0: 0, 1: 1}, (0, 1), 1),
        ({1: 2}, (0,), 3),
        ({0: 3, 1: 4}, (0, 1), 1),
        ({}, (0,), 1),
    ]


@pytest.mark.parametrize("schedule", [STATIC, CONTINUOUS])
@pytest.mark.parametrize("n_seq", [1, 2, 3, 8])
def test_each_request_is_served_once_and_gets_all_its_tokens(schedule: str, n_seq: int) -> None:
    drawn = static_batches.draw_lengths(load_plan.parse("--gen", "lognormal:8,0.8"), n_seq, 1)
    assert len(drawn) == static_batches.N_BATCHES * n_seq
    places: dict[int, int] = {}
    tokens = dict.fromkeys(range(len(drawn)), 0)
    for turn in static_batches.turns(lever(schedule, n_seq, drawn)):
        places |= turn.started
        for request in turn.started.values():
            tokens[request] += 1
        for place in turn.decoding:
            tokens[places[place]] += turn.n_steps
    assert list(tokens.values()) == list(drawn)


def test_the_prompt_of_a_request_is_the_same_in_both_and_a_used_place_is_emptied() -> None:
    def text(request: int, n: int) -> list[int]:
        return [100 * request + k for k in range(n)]

    prompts = {}
    for schedule in (STATIC, CONTINUOUS):
        written = batching.write(Case(4, 5, lever=lever(schedule)), text, SETTINGS)
        prompts[schedule] = {part.tokens for op in written if op.kind == PREFILL for part in op.parts}
        prefilled = set[int]()
        for operation in written:
            if operation.kind == FORGET:
                prefilled.remove(operation.sequence)
            elif operation.kind == PREFILL:
                own = {part.sequence for part in operation.parts}
                assert not own & prefilled
                prefilled |= own
        past = [shape.n_past for shape in scripts.shapes(written) if shape.kind == PREFILL]
        assert set(past) == {0}
    assert prompts[STATIC] == prompts[CONTINUOUS] and len(prompts[STATIC]) == 5


def test_the_waste_is_counted_in_the_steps_and_computed_from_the_lengths() -> None:
    assert static_batches.wasted(static_run(STATIC)) == pytest.approx(1 - 8 / 14)
    assert static_batches.wasted(static_run(CONTINUOUS)) == pytest.approx(1 - 8 / 12)
    assert static_batches.computed_waste(LENGTHS, 2) == pytest.approx((3 / 10 + 2 / 6 + 2 / 4) / 3)
    even = static_run(STATIC, lengths=(4, 4, 4, 4))
    assert static_batches.wasted(even) == 0 == static_batches.computed_waste((4, 4, 4, 4), 2)
    assert static_batches.wasted(make_run()) is None and static_batches.useful_tps(make_run()) is None


def both(n: int, factor: float = 1.0) -> list[Record]:
    """n rounds; in the fake engine a step's time is proportional to its tokens, so only `factor` is a gain."""
    times = {STATIC: 10.0 * factor, CONTINUOUS: 10.0}
    return [make_record(static_run(kind, i, decode_ms=ms)) for i in range(n) for kind, ms in times.items()]


def test_rows_pair_the_runs_of_a_round() -> None:
    (row,) = static_batches.rows(both(6, factor=2))
    # 8 decoded tokens of 10 (or 20) ms and 1 ms to choose each; 5 prompts without time, 1 ms to choose each first token
    assert (row.continuous_tps, row.static_tps) == pytest.approx((13 / 0.093, 13 / 0.173))
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx((173 / 93,) * 3)
    assert row.places_ratio == pytest.approx(14 / 12)
    assert (row.n_runs, row.n_requests, row.n_seq, row.answers) == (6, 5, 2, "1-5")
    words = " ".join(static_batches.sentences([row]))
    assert "static batching leaves 42.9 % of the places idle (37.8 % computed from the lengths)" in words
    assert "Continuous batching generates 1.86x (1.86-1.86) the useful tokens/s; it would be 1.17x if" in words
    alone = static_batches.rows(both(1)[:1])
    assert alone == []  # static without continuous
    (once,) = static_batches.rows(both(1))
    assert once.ratio_low is None and once.ratio_high is None


def test_a_run_without_all_its_tokens_has_no_figures() -> None:
    run = static_run(STATIC)
    damaged = dataclasses.replace(run, batch=dataclasses.replace(lever(STATIC), lengths=(9, *LENGTHS[1:])))
    assert static_batches.useful_tps(run) and static_batches.useful_tps(damaged) is None


def test_sections_and_pictures_keep_schedules_apart_from_plain_batches() -> None:
    plain = dataclasses.replace(make_run(20, 5), batch=Batch(2, False))
    written = batching.write(Case(20, 5, lever=Batch(2, False)), lambda i, n: list(range(n)), SETTINGS)
    records = [*both(2), make_record(dataclasses.replace(plain, steps=steps_of(written)))]
    batch, static = levers.sections(records)
    assert [section.name for section in (batch, static)] == ["batch", "static"]
    assert len(batch.rows) == len(static.rows) == 1
    assert not any("ceilings" in sentence for sentence in static.sentences)
    figure = canvas.drawn(levers.drawings([static])["static"], (11, 5))
    titles = [ax.get_title() for ax in figure.axes]
    assert "static, 2 sequences" in titles[0] and "42.9 % idle" in titles[0] and "33.3 % idle" in titles[1]
    assert {ax.get_ylim()[1] for ax in figure.axes} == {2.16}
    rows = table.runs(records)
    assert rows.token_ms.dropna().tolist() == pytest.approx([93 / 13] * 4)


def test_a_record_is_read_again_and_older_ones_have_no_schedule(tmp_path: Path) -> None:
    record = make_record(static_run(STATIC))
    results.append(tmp_path / "a.jsonl", record)
    assert results.read([tmp_path]).records[0].run.batch == lever(STATIC)
    older = json.loads((tmp_path / "a.jsonl").read_text())
    older["run"]["batch"] = {"n_seq": 4, "is_shared": False}
    (tmp_path / "b.jsonl").write_text(json.dumps(older) + "\n")
    assert results.read([tmp_path / "b.jsonl"]).records[0].run.batch == Batch(4, False)


def test_the_command_that_makes_them_again() -> None:
    embedded = dataclasses.replace(MODEL, name=catalog.DEFAULT, source="embedded")
    command = reproduce.command([dataclasses.replace(record, model=embedded) for record in both(2)])
    assert command is not None
    assert command.startswith("lab batch --sequences 2 --prompt-len 4 --gen 1-5 --static --repeat 2")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gen": "lognormal:64,0.8"}, "the answers of a batch have one length"),
        ({"gen": "many", "static": True}, "--gen many is not a length"),
        ({"static": True, "shared_prompt": True}, "--static and --shared-prompt are not possible together"),
        ({"gen": 1, "static": True}, "--gen 1 leaves nothing to decode together"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, asked: dict[str, Any], words: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    worker: Any = FakeWorker()
    with pytest.raises(LabError, match=words):
        batching.plan(worker, model=str(tmp_path / "tiny.gguf"), **asked)


def test_a_plan_has_both_kinds_with_the_same_requests_and_room_for_the_longest(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    worker: Any = FakeWorker()
    plan = batching.plan(worker, "2,4", "20", "3-30", 1, str(tmp_path / "tiny.gguf"), static=True)
    levers_of = [case.lever for case in plan.cases]
    assert [(one.n_seq, one.schedule) for one in levers_of if isinstance(one, Batch)] == [
        *((2, STATIC), (2, CONTINUOUS)),
        *((4, STATIC), (4, CONTINUOUS)),
    ]
    two, same, four, _ = (one.lengths or () for one in levers_of if isinstance(one, Batch))
    assert two == same == four[:12] and len(set(four)) > 5
    assert {case.sequences for case in plan.cases} == {(50,) * 2, (50,) * 4}


def test_without_numbers_there_are_fewer_sequences_than_in_a_plain_batch(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    worker: Any = FakeWorker()
    plans = [batching.plan(worker, model=str(tmp_path / "tiny.gguf"), static=static) for static in (False, True)]
    plain, static = ([case.lever for case in plan.cases if isinstance(case.lever, Batch)] for plan in plans)
    assert [one.n_seq for one in plain] == [1, 2, 4, 8, 16] and {one.lengths for one in plain} == {None}
    assert {one.n_seq for one in static} == {4, 8} and {one.answers for one in static} == {"lognormal:64,0.8"}


def test_the_time_of_a_useful_token_is_compared_schedule_by_schedule() -> None:
    slow = dataclasses.replace(make_record().machine, cpu="Slow CPU")
    other = [dataclasses.replace(record, machine=slow, session="b") for record in both(6, factor=2)]
    (compared,) = comparison.compare([*both(6), *other])
    verdicts = {(row.lever, row.figure): row.verdict for row in compared.rows}
    assert verdicts == {
        ("2 sequences, static, answers of 1-5", "token_ms"): "slower",
        ("2 sequences, continuous, answers of 1-5", "token_ms"): "no difference",
    }


def test_static_command(tmp_path: Path) -> None:
    given = ("-s", "2", "-p", "8", "-n", "2-6", "-r", "1", "-t", "1", "-o", tmp_path)
    code, out, err = run_lab("batch", "--static", *given)
    assert code == 0, err
    assert "the same requests with both" in " ".join(out.split())
    assert len(list(tmp_path.glob("*-static.png"))) == 1
    timed = [record.run for record in results.read([tmp_path]).records if record.run.is_timed]
    assert len(timed) == 2 and all(static_batches.useful_tps(run) for run in timed)
    answers = [sorted(run.token_ids) for run in timed]
    assert len(answers[0]) == len(answers[1]) == sum((timed[0].batch and timed[0].batch.lengths) or ())
    assert all(DECODE in run.steps.kind for run in timed)
