"""Conversations: planted breaks found to the token, figures with a fake engine, and answers of the embedded model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from lab.app import kinds
from lab.app.experiment import first_difference
from lab.core import results, script as scripts
from lab.core.record import FORGET, LOAD, PREFILL, SAVE, Ceilings, Rate, Record
from lab.core.experiments import case_of
from lab.core.request import TEXT, Asked, Events, RequestRecord, Usage
from lab.errors import LabError
from lab.features import turns as conversations
from lab.roofline import learning
from lab.roofline.step_prediction import StepPrediction
from lab.features.turns import Turns
from lab.process.wire import ATTENTION, MUL_MAT
from lab.process.worker import Worker
from lab.runner.cases import Case
from lab.runner.session import execute, new_results_file
from tests.conftest import (
    MACHINE,
    MODEL,
    SETTINGS,
    FakeWorker,
    make_record,
    make_run,
    run_lab,
    steps_of,
)
from tests.test_request import make_request, make_request_record

LEVER = Turns(20, (10, 8, 6), (5, 4, 3), "", "memory")
broken = functools.partial(dataclasses.replace, LEVER)


def distinct(sequence: int, n: int) -> list[int]:
    return list(range(n))


def record_of(lever: Turns = LEVER, repeat: int = 0, move_ms: float = 5, **changes: Any) -> Record:
    """A run of an engine that takes 1 ms a prompt token, 10 ms a decode step, and 1 ms to choose a token."""
    written = conversations.write(Case(1, 1, lever=lever), distinct, SETTINGS)
    run = dataclasses.replace(
        make_run(40, 3, repeat), steps=steps_of(written, move_ms=move_ms), turns=lever
    )
    ids = tuple(range(scripts.n_chosen(written)))
    saved = tuple(1000 * (i + 1) for i, op in enumerate(op for op in written if op.kind == SAVE))
    return make_record(
        dataclasses.replace(run, token_ids=ids, state_bytes=saved or None, **changes)
    )


def test_planted_breaks_are_located_to_the_token() -> None:
    """100 random conversations with a break at a random turn; where it lies is counted here from lengths alone."""
    rng = random.Random(1)
    for _ in range(100):
        n_turns = rng.randint(3, 9)
        kind = rng.choice(list(conversations.BREAKS))
        system = rng.randint(40, 400)
        at = rng.randint(3, n_turns)
        messages = tuple(rng.randint(8, 60) for _ in range(n_turns))
        answers = tuple(rng.randint(4, 9) for _ in range(n_turns))
        shortened = (at - 2) // 2  # turns, from 0
        n_before = system + sum(messages[:shortened]) + sum(answers[:shortened])
        differs_at = {
            "system": conversations.CLOCK_AT,
            "tools": system // 2,
            "truncate": n_before + max(1, messages[shortened] // 4),
            "second": system,
            "shift": system,
            "thinking": system + messages[0],
        }[kind]
        lever = Turns(system, messages, answers, f"{kind}@{at}", "memory")
        written = conversations.write(Case(1, 1, lever=lever), distinct, SETTINGS)
        steps = steps_of(written).frame()
        t = conversations.figures(steps, lever)
        assert t.differs_at.dropna().to_dict() == {at: differs_at}, lever
        assert t.n_computed.sum() == steps[steps.kind == PREFILL].n_tokens.sum()
        assert t.n_cached[at] == differs_at and set(t.index[t.n_again > 0]) <= {at}


def test_the_figures_are_those_of_the_steps() -> None:
    rows = conversations.rows([record_of(), record_of(broken(keep="none"))])
    assert [(row.n_prompt, row.n_cached, row.n_computed, row.n_again) for row in rows] == [
        (30, 0, 30, 0),
        (43, 34, 9, 0),
        (53, 46, 7, 0),
    ]
    assert [row.ttft_s for row in rows] == pytest.approx([0.031, 0.010, 0.008])
    assert [row.decode_s for row in rows] == pytest.approx([0.044, 0.033, 0.022])
    assert [row.sum_s for row in rows] == pytest.approx(
        list(itertools.accumulate([0.075, 0.043, 0.030]))
    )
    assert [row.without_s for row in rows] == pytest.approx(
        [0.075, 0.049 + 0.033, 0.059 + 0.022]
    )  # 5 ms to cut
    assert [row.perfect_s for row in rows] == pytest.approx([0.075, 0.043, 0.030])
    words = conversations.sentences(rows)
    assert words[0] == "3 turns take 148 ms; 49.0 ms of it is prefill, no token was read twice."
    assert "Without a cache they take 238 ms." in words


def test_the_answer_says_what_a_break_costs() -> None:
    levers = [
        broken(breaks="system@3"),
        LEVER,
        broken(breaks="system@3", keep="none"),
    ]
    rows = conversations.rows([record_of(lever) for lever in levers])
    assert [row.turn for row in rows] == [1, 2, 3] and [row.n_again for row in rows] == [0, 0, 30]
    words = " ".join(conversations.sentences(rows))
    assert (
        "Turn 3 (system): the prompt differs from token 17 on, and 30 tokens after it were read again."
        in words
    )
    assert (
        "A system prompt that does not change would save 35.0 ms." in words
    )  # 30 tokens, and the cut


def test_a_cache_on_disk_is_saved_after_each_turn_and_loaded_before_the_next() -> None:
    lever = broken(keep="disk", breaks="truncate@3")
    written = conversations.write(
        Case(1, 1, lever=lever), distinct, SETTINGS, folder=Path("states")
    )
    assert [op.kind for op in written if op.kind in (SAVE, LOAD, FORGET)] == [
        *[SAVE, FORGET, LOAD],
        *[SAVE, FORGET, LOAD, FORGET, SAVE],
    ]
    rows = conversations.rows([record_of(lever)])
    assert [row.load_s for row in rows] == [None, pytest.approx(0.005), pytest.approx(0.005)]
    assert rows[1].ttft_s == pytest.approx(0.005 + 0.005 + 0.010)  # forget, load, prefill
    assert [row.state_bytes for row in rows] == [1000, 2000, 3000]
    assert "Saving 0.0 MB took 5.00 ms" in " ".join(conversations.sentences(rows))


def test_a_prediction_is_the_same_script_with_other_times() -> None:
    rates = tuple(
        Rate(
            MUL_MAT,
            "Q4_0",
            "CPU",
            128,
            64,
            n,
            2,
            10**6,
            2 * n * 10**6,
            (round(10**6 * (1 + n / 16)),),
        )
        for n in (1, 2, 4, 8, 32)
    )
    attention = tuple(
        Rate(ATTENTION, "F16", "CPU", 4, 16, n, 2, 10**4, 10**4, (10**4,), 2, 512) for n in (1, 512)
    )
    ceilings = Ceilings("2026-01-01T00:00:00Z", MACHINE, False, rates + attention)
    prediction = StepPrediction(MODEL, SETTINGS, ceilings, learning.fit([]), 0)
    rows = conversations.rows([record_of()], prediction)
    assert [row.expected_ttft_s for row in rows] == pytest.approx(
        [prediction.prefill(30), prediction.prefill(9, 34), prediction.prefill(7, 46)]
    )
    assert any("Prediction error of TTFT" in words for words in conversations.sentences(rows))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"turn": "300"}, "has one length"),
        ({"turn": "300+1"}, "has no decode"),
        ({"turn": "a+b"}, "--turn a is not possible"),
        ({"turns": 0}, "--turns 0 is not possible"),
        ({"system": -1}, "--system -1 is not possible"),
        ({"keep": "cloud"}, "--keep cloud is not possible"),
        ({"breaks": "moon@3"}, "'moon@3' is not an event at a turn"),
        ({"breaks": "system@1"}, "'system@1' is not an event at a turn"),
        ({"breaks": "system@9"}, "'system@9' is not an event at a turn"),
        ({"turns": 70}, "was trained for 1,000"),
    ],
)
def test_what_cannot_be_is_refused(
    fake_worker: FakeWorker, asked: dict[str, Any], words: str
) -> None:
    given = {"system": 20, "turn": "10+5", "turns": 3} | asked
    with pytest.raises(LabError, match=words):
        conversations.plan(fake_worker, **given)  # type: ignore[arg-type]


def test_drawn_lengths_are_in_the_record_and_each_break_has_its_perfect_case(
    fake_worker: FakeWorker,
) -> None:
    plan = conversations.plan(
        fake_worker, 20, "lognormal:10,0.5+4-8", 5, "tools@3", "memory,disk,none"
    )  # type: ignore[arg-type]
    levers = [case.lever for case in plan.cases]
    assert [(one.keep, one.breaks) for one in levers if isinstance(one, Turns)] == [
        *[
            ("memory", "tools@3"),
            ("memory", ""),
            ("disk", "tools@3"),
            ("disk", ""),
            ("none", "tools@3"),
        ],
    ]
    first = levers[0]
    assert (
        isinstance(first, Turns)
        and len(set(first.messages)) > 1
        and first.asked == "lognormal:10,0.5+4-8"
    )


def test_a_cached_turn_chooses_what_an_uncached_one_does(mini: Path, tmp_path: Path) -> None:
    asked = (30, "12+6", 3, "truncate@3,second@2", "memory,slot,disk,none", 1, str(mini))
    with Worker() as worker:
        plan = conversations.plan(worker, *asked, threads=1, prompt="random", folder=tmp_path)
        made = list(execute(plan, worker, new_results_file(plan, tmp_path), lambda status: None))
    assert all(one.run.status == "ok" for one in made), [one.run.error for one in made]
    runs = {one.run.turns.keep: one.run for one in made if one.run.turns and one.run.turns.breaks}
    assert runs["memory"].token_ids == runs["disk"].token_ids  # the same steps
    at = first_difference(runs["memory"].token_ids, runs["none"].token_ids)
    assert at is None or at > 6, "the first answer has no cache"
    ids = runs["slot"].token_ids  # of both conversations in turns, 6 each
    at = first_difference([*ids[:6], *ids[12:18], *ids[24:30]], runs["none"].token_ids)
    assert at is None or at > 6, "the second conversation does not change the first"
    assert ids[6:12] != ids[:6]
    for run, lever in ((one.run, one.run.turns) for one in made if not one.run.warmup):
        assert lever is not None
        steps = run.steps.frame()
        n_prefilled = steps[steps.kind == PREFILL].n_tokens.sum()
        n_computed = conversations.figures(steps, lever).n_computed.sum()
        assert n_computed == n_prefilled if lever.keep != "slot" else 2 * n_computed == n_prefilled


def test_a_second_conversation_in_a_slot_of_its_own_breaks_nothing() -> None:
    """Beside it, the first conversation is as if it were alone; in one slot the second one takes its cache away."""
    broken_by = broken(breaks="second@2+")
    rows = conversations.rows([record_of(broken_by), record_of(broken(keep="slot"))])
    one, two = ([row for row in rows if row.keep == keep] for keep in ("memory", "slot"))
    assert [row.n_again for row in one] == [0, 14, 26] and [row.differs_at for row in one] == [
        None,
        20,
        20,
    ]
    alone = conversations.rows([record_of()])
    assert [(row.n_cached, row.ttft_s, row.turn_s) for row in two] == [
        (row.n_cached, pytest.approx(row.ttft_s), pytest.approx(row.turn_s)) for row in alone
    ]
    n_bytes = (
        2 * 2 * 2 * 16 * 2 * 256
    )  # layers, heads, key and value, elements of two bytes, positions
    assert two[0].slot_bytes == n_bytes
    words = " ".join(conversations.sentences(rows))
    assert "slot costs 0.1 MB of memory." in words
    assert (
        "A slot of its own for the second conversation would save" not in words
    )  # no case without breaks


@pytest.mark.usefixtures("undisturbed")
def test_turns_command(mini: Path, tmp_path: Path) -> None:
    asked = "--prompt random --system 40 --turn 20+4 --turns 3 --break system@3 -r 1 -t 1 -o"
    code, out, err = run_lab("turns", "-m", mini, *asked.split(), tmp_path)
    assert code == 0, err
    assert (
        "3 turns take" in out
        and "Turn 3 (system): the prompt differs from token 17 on" in " ".join(out.split())
    )
    assert len(list(tmp_path.glob("*-turns.png"))) == 1 and not list(tmp_path.glob(".lab-states*"))
    rows = json.loads(run_lab("show", tmp_path, "--json")[1])["rows"]
    assert [(row["turn"], row["differs_at"]) for row in rows] == [(1, None), (2, None), (3, 16)]


def turn(
    number: int, n_prompt: int, ttft_ms: int, n_cached: int | None = None, is_cold: bool = False
) -> RequestRecord:
    """A turn of a conversation whose turn 3 is broken, through a server that takes 10 ms for each further token."""
    of = Turns(60, (40, 20, 20), (11, 11, 11), "system@3", "memory")
    differs_at = None if is_cold or number == 1 else 64
    place = conversations.Turn(number, differs_at, is_cold)
    stamps = tuple((ttft_ms + 10 * i) * 10**6 for i in range(11))
    request = make_request(
        asked=Asked(
            n_prompt=None, n_gen=11, experiment="turns", case=case_of(of), place=vars(place)
        ),
        events=Events(arrive_ns=stamps, n_bytes=(10,) * 11, kind=(TEXT,) * 11),
        usage=Usage(prompt_tokens=n_prompt, completion_tokens=11, cached_tokens=n_cached),
        sent_ns=0,
    )
    return make_request_record(request)


SERVED = [turn(1, 100, 200), turn(2, 130, 60), turn(3, 165, 190)]  # 2 ms a token


def test_without_the_servers_figures_cached_tokens_are_estimated_and_marked() -> None:
    t = conversations.served(SERVED)
    assert t.n_cached.tolist() == [0, 100, 70] and not t.is_known.any()
    assert t.n_again.tolist() == [
        0,
        10,
        75,
    ]  # 130 - 100 - 10 new in turn 2; its message of 20 in turn 3
    words = " ".join(conversations.sentences(conversations.finished(t)))
    assert "from letter 65 on, and about 75 tokens after it were read again" in words
    assert "estimated from the TTFT" in words


def test_the_law_of_uncached_prompts_finds_cached_tokens_at_depth() -> None:
    """A server that takes 20 ms + n / 2 ms + n^2 / 1000 ms: a token at position 1,000 takes five times as long."""

    def ms(n_cached: int, n_prompt: int) -> int:
        return round(20 + (n_prompt - n_cached) / 2 + (n_prompt**2 - n_cached**2) / 1000)

    prompts = (300, 900, 1500)
    cached = (0, 290, 880)
    cold = [turn(i, n, ms(0, n), is_cold=True) for i, n in ((2, 900), (3, 1500))]
    both = list(enumerate(zip(prompts, cached, strict=True), 1))
    t = conversations.served([*(turn(i, n, ms(n_cached, n)) for i, (n, n_cached) in both), *cold])
    assert t.turn.tolist() == [1, 2, 3] and t.n_cached.tolist() == pytest.approx(cached, abs=2)
    assert t.without_s.tolist() == pytest.approx(
        [(ms(0, n) + 100) / 1e3 for n in prompts], rel=0.01
    )
    known_of = conversations.served(
        [*(turn(i, n, ms(n_cached, n), 7) for i, (n, n_cached) in both), *cold]
    )
    assert known_of.n_cached.tolist() == [7, 7, 7] and known_of.is_known.all()


@pytest.mark.parametrize("speed", [0.85, 1, 1.15])
def test_estimates_survive_a_host_that_changes_its_speed(speed: float) -> None:
    """2 ms a token and 20 ms; the uncached turns at the end are measured on a faster or slower host."""
    cached = {1: (300, 0), 2: (330, 310), 3: (365, 60)}
    cold = [turn(i, n, round(speed * (20 + 2 * n)), is_cold=True) for i, n in ((2, 330), (3, 365))]
    t = conversations.served(
        [*(turn(i, n, 20 + 2 * (n - known)) for i, (n, known) in cached.items()), *cold]
    )
    assert t.n_cached.tolist() == pytest.approx(
        [known for _, known in cached.values()], abs=0.2 * 365
    )
    assert (
        t.n_cached[0] == 0 and t.n_cached[1] <= 330 - 20
    )  # a turn computes its own message at least


def test_a_message_longer_than_the_prompt_and_a_missing_first_turn_make_no_negative_counts() -> (
    None
):
    short = conversations.served(
        [turn(1, 100, 200), turn(2, 15, 30), turn(3, 15, 30)]
    )  # messages of 20 tokens
    assert (short.n_cached >= 0).all() and (short.n_computed <= short.n_prompt).all()
    cold = turn(3, 1000, 2000, is_cold=True)
    later = conversations.served([turn(2, 900, 100), cold])
    assert later.n_cached.tolist() == pytest.approx([850], abs=35)  # 50 of 900 tokens at 2 ms


def test_without_a_cache_two_turns_are_measured_and_the_others_computed(
    fake_worker: FakeWorker,
) -> None:
    plan = conversations.plan(fake_worker, 20, "10+5", 8, "", "memory,none")  # type: ignore[arg-type]
    memory, none = (case.lever for case in plan.cases)
    assert (
        isinstance(none, Turns)
        and isinstance(memory, Turns)
        and (memory.only, none.only) == ((), (5, 8))
    )
    whole = conversations.rows([record_of(memory), record_of(dataclasses.replace(none, only=()))])
    some = conversations.rows([record_of(memory), record_of(none)])
    assert [row.without_s for row in some] == pytest.approx(
        [row.without_s for row in whole], rel=0.12
    )
    assert some[4].without_s == pytest.approx(whole[4].without_s, rel=0.05)


def test_a_conversation_is_replayed_with_the_lengths_of_its_messages(
    fake_worker: FakeWorker, tmp_path: Path
) -> None:
    path = tmp_path / "session.jsonl"
    lines = [
        {"role": "system", "content": "s" * 30},
        {"role": "user", "content": [{"type": "text", "text": "u" * 10}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "t" * 5},
        {"role": "assistant", "content": "a" * 7 + chr(27)},
        {"role": "user", "content": "v" * 6},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    said = conversations.read_messages(path)
    assert [len(part) for part in said] == [30, 15, 8, 6, 0] and said[2][-1] == "?"
    plan = conversations.plan(fake_worker, replay=str(path))  # type: ignore[arg-type]
    lever = plan.cases[0].lever
    assert isinstance(lever, Turns) and (lever.system, lever.messages, lever.answers) == (
        30,
        (15, 6),
        (8, 2),
    )
    assert conversations.again([lever]) == {
        "replay": "session.jsonl",
        "break": None,
        "keep": "memory",
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 turns"),
        (b"\xff\xfe", "message 1, is not a message"),
        (b'{"role": "user", "content": 5}', "message 1, is not a message"),
        (b'{"role": "judge", "content": "x"}', "message 1, is not a message"),
        (b"[" * 100_000, "message 1, is not a message"),
        (
            b'{"role": "user", "content": "x"}\n{"role": "assistant", "content": "x"}\n' * 201,
            "has 201 turns",
        ),
        (b" " * (17 << 20), "larger than 16 MB"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(LabError, match=words):
        conversations.read_messages(path)
    with pytest.raises(LabError, match="cannot be read"):
        conversations.read_messages(tmp_path / "no.jsonl")


def test_a_served_conversation_is_shown_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    results.save(path, *SERVED)
    code, out, err = run_lab("show", path)
    assert code == 0 and "3 turns take" in out, err
    (line,) = kinds.commands(SERVED)
    assert (
        line.startswith("lab turns ")
        and "--break system@3" in line
        and "--url http://127.0.0.1:1/v1" in line
    )
    rows = json.loads(run_lab("show", path, "--json")[1])["rows"]
    assert [row["turn"] for row in rows] == [1, 2, 3]
    page = tmp_path / "page.html"
    code, out, err = run_lab("report", path, "--out", page)
    assert code == 0 and "3 turns take" in page.read_text(), err


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ('"keep":"cloud"', '"keep":"memory"'),
        ("system@99", "system@3"),
        ('"number":9', '"number":3'),
    ],
)
def test_a_conversation_that_contradicts_itself_is_a_damaged_line(
    tmp_path: Path, wrong: str, right: str
) -> None:
    path = tmp_path / "served.jsonl"
    results.save(path, *SERVED)
    path.write_text(path.read_text().replace(right, wrong))
    contents = results.read([path])
    assert contents.skipped and len(contents.requests) < 3
