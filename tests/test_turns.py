"""Conversations: planted breaks found to the token, figures with a fake engine, turns through a
server, and answers of the embedded model."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.app import kinds
from lab.app.experiment_tables import first_difference
from lab.core import results, script as scripts
from lab.core.experiments import case_of
from lab.core.record import FORGET, LOAD, PREFILL, SAVE, Ceilings, Rate, Record, Run
from lab.core.request import TEXT, Asked, Events, RequestRecord, Usage
from lab.core.script import Operation
from lab.errors import LabError
from lab.features.turns import planning
from lab.features.turns.conversation import (
    CLOCK_AT,
    EVENTS,
    NAME,
    Conversation,
    conversation_of,
)
from lab.features.turns.figures import figures, finished, rows
from lab.features.turns.sentences import sentences
from lab.features.turns.server_figures import TurnPlace, served
from lab.features.turns.through_server import execute as send_turns
from lab.process.wire import ATTENTION, MUL_MAT
from lab.process.worker import Worker
from lab.remote.examination import connect
from lab.roofline import learning
from lab.roofline.step_prediction import StepPrediction
from lab.runner.cases import Case, Plan
from lab.runner.session import execute, new_results_file
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.null_server import NullSettings, null_server
from tests.support.records import (
    MACHINE,
    MODEL,
    SETTINGS,
    column,
    make_record,
    make_run,
    steps_of,
)
from tests.support.requests import make_request, make_request_record, noise_of

UNBROKEN = Conversation(
    20,
    (10, 8, 6),
    (5, 4, 3),
    "",
    "memory",
)
MS = 10**6


def changed(**changes: Any) -> Conversation:
    return dataclasses.replace(UNBROKEN, **changes)


def distinct(sequence: int, n: int) -> list[int]:
    return list(range(n))


def script_of(conversation: Conversation, folder: Path = Path()) -> list[Operation]:
    case = Case(1, 1, experiment=NAME, setup=conversation)
    return planning.write(case, distinct, SETTINGS, folder=folder)


def record_of(conversation: Conversation = UNBROKEN, repeat: int = 0) -> Record:
    """A run of an engine that takes 1 ms a prompt token, 10 ms a decode step, 1 ms to choose a
    token, and 5 ms to cut, save or load a cache."""
    script = script_of(conversation)
    n_saves = column(script, "kind").count(SAVE)
    run = make_run(
        40,
        3,
        repeat,
        steps=steps_of(script, move_ms=5),
        experiment=NAME,
        setup=conversation,
        token_ids=tuple(range(scripts.n_chosen(script))),
        counts={"state_bytes": tuple(1000 * (i + 1) for i in range(n_saves))},
    )
    return make_record(run)


def text_of(conversations: Sequence[Conversation]) -> str:
    """The sentences on a run of each conversation."""
    return " ".join(sentences(rows([record_of(setup) for setup in conversations])))


def random_conversation(rng: random.Random) -> tuple[Conversation, int, int]:
    """A conversation with a break, its turn, and where its prompt then differs, from the lengths
    alone."""
    n_turns = rng.randint(3, 9)
    event = rng.choice(EVENTS)
    system = rng.randint(40, 400)
    at = rng.randint(3, n_turns)
    messages = tuple(rng.randint(8, 60) for _ in range(n_turns))
    answers = tuple(rng.randint(4, 9) for _ in range(n_turns))
    shortened = (at - 2) // 2  # message, from 0
    before_shortened = system + sum(messages[:shortened]) + sum(answers[:shortened])
    before_newest_answer = system + sum(messages[: at - 1]) + sum(answers[: at - 2])
    differs_at = {
        "system": CLOCK_AT,
        "tools": system // 2,
        "truncate": before_shortened + max(1, messages[shortened] // 4),
        "second": system,
        "shift": system,
        "thinking": before_newest_answer,
    }
    conversation = Conversation(system, messages, answers, f"{event}@{at}", "memory")
    return conversation, at, differs_at[event]


def test_planted_breaks_are_located_to_the_token() -> None:
    rng = random.Random(1)
    for _ in range(40):
        conversation, at, differs_at = random_conversation(rng)

        steps = steps_of(script_of(conversation)).frame()
        table = figures(steps, conversation)

        assert table.differs_at.dropna().to_dict() == {at: differs_at}, conversation
        assert table.n_computed.sum() == steps[steps.kind == PREFILL].n_tokens.sum()
        assert table.n_cached[at] == differs_at
        assert set(table.index[table.n_again > 0]) <= {at}


def test_thinking_leaves_the_newest_answer_only() -> None:
    """A client removes it once: each turn reads half of one answer again, however long the
    conversation is."""
    conversation = Conversation(50, (20,) * 8, (30,) * 8, "thinking@2+", "memory")

    table = rows([record_of(conversation)])

    prompts = column(table, "n_prompt")
    assert column(table[1:], "n_computed") == [15 + 20] * 7
    assert prompts == [70 + 35 * i for i in range(8)]


def test_the_figures_are_those_of_the_steps() -> None:
    first, second, third = rows([record_of(), record_of(changed(keep="none"))])

    for turn, counts in (
        (first, (30, 0, 30, 0)),
        (second, (43, 34, 9, 0)),
        (third, (53, 46, 7, 0)),
    ):
        assert (turn.n_prompt, turn.n_cached, turn.n_computed, turn.n_again) == counts
    cut_s = 0.005
    for turn, ttft_s, decode_s, without_s, sum_s in (
        (first, 0.031, 0.044, 0.075, 0.075),
        (second, 0.010, 0.033, cut_s + 0.044 + 0.033, 0.118),
        (third, 0.008, 0.022, cut_s + 0.054 + 0.022, 0.148),
    ):
        assert turn.ttft_s == pytest.approx(ttft_s)
        assert turn.decode_s == pytest.approx(decode_s)
        assert turn.without_s == pytest.approx(without_s)
        assert turn.perfect_s == pytest.approx(ttft_s + decode_s)
        assert turn.sum_s == pytest.approx(sum_s)
    time, without = sentences([first, second, third])
    assert time == "3 turns take 148 ms; 49.0 ms of it is prefill, no token was read twice."
    assert without == "Without a cache they take 238 ms."


def test_the_answer_says_what_a_break_costs() -> None:
    broken = changed(breaks="system@3")

    sentence = text_of([broken, UNBROKEN, changed(breaks="system@3", keep="none")])

    assert column(rows([record_of(broken)]), "n_again") == [0, 0, 30]
    assert "Turn 3 (system): the prompt differs from token 17 on, and 30 tokens" in sentence
    # 30 tokens, and the cut
    assert "A system prompt that does not change would save 35.0 ms." in sentence


def test_only_columns_that_are_shown_are_explained() -> None:
    about = [
        kinds.experiments_of([record_of(conversation)])[0].about
        for conversation in (UNBROKEN, changed(breaks="system@3"))
    ]

    assert ["again:" in text for text in about] == [False, True]
    assert ["differs:" in text for text in about] == [False, True]


def test_runs_that_differ_by_a_token_have_whole_counts() -> None:
    """Two texts may happen to be equal for a token more; the median is then between the counts."""
    broken = changed(breaks="system@3")
    record = record_of(broken)
    script = script_of(broken)
    cut = len(script) - 1 - column(reversed(script), "kind").index(FORGET)
    prefill = cut + 1
    (part,) = script[prefill].parts
    shorter = dataclasses.replace(part, tokens=(part.tokens or ())[1:])
    script[cut] = dataclasses.replace(script[cut], first=script[cut].first + 1)
    script[prefill] = dataclasses.replace(script[prefill], parts=(shorter,))
    run = dataclasses.replace(
        record.run,
        steps=steps_of(script, move_ms=5),
        repeat=1,
    )

    *_, third = rows([record, make_record(run)])

    assert third.n_cached == 16
    assert third.n_computed == third.n_prompt - 16


def test_a_cache_on_disk_is_saved_after_each_turn_and_loaded_before_the_next() -> None:
    on_disk = changed(keep="disk", breaks="truncate@3")
    record = record_of(on_disk)

    moves = [op for op in script_of(on_disk) if op.kind in (SAVE, LOAD, FORGET)]
    operations = column(moves, "kind")
    first, second, third = rows([record])

    later = [SAVE, FORGET, LOAD]
    assert operations == [*later, *later, FORGET, SAVE]
    assert first.load_s is None
    assert column([second, third], "load_s") == pytest.approx([0.005, 0.005])
    assert second.ttft_s == pytest.approx(0.005 + 0.005 + 0.010)  # forget, load, prefill
    assert column([first, second, third], "state_bytes") == [1000, 2000, 3000]
    assert "Saving 0.0 MB took 5.00 ms" in text_of([on_disk])


def products(n: int) -> Rate:
    times_ns = (round(10**6 * (1 + n / 16)),)
    return Rate(MUL_MAT, "Q4_0", "CPU", 128, 64, n, 2, 10**6, 2 * n * 10**6, times_ns)


def attention(n: int) -> Rate:
    return Rate(ATTENTION, "F16", "CPU", 4, 16, n, 2, 10**4, 10**4, (10**4,), 2, 512)


def test_a_prediction_is_the_same_script_with_other_times() -> None:
    rates = (
        *map(products, (1, 2, 4, 8, 32)),
        attention(1),
        attention(512),
    )
    ceilings = Ceilings("2026-01-01T00:00:00Z", MACHINE, False, rates)
    prediction = StepPrediction(MODEL, SETTINGS, ceilings, learning.fit([]), 0)

    table = rows([record_of()], prediction)

    prompts = [(30, 0), (9, 34), (7, 46)]  # tokens, after so many cached ones
    expected_s = [prediction.prefill(n, n_past) for n, n_past in prompts]
    assert column(table, "expected_ttft_s") == pytest.approx(expected_s)
    assert "Prediction error of TTFT" in " ".join(sentences(table))


def plan(worker: FakeWorker, **asked: Any) -> Plan:
    defaults: dict[str, Any] = {
        "system": 20,
        "turn": "10+5",
        "turns": 3,
        "breaks": "",
        "keep": "memory,none",
    }
    return planning.plan(worker, **{**defaults, **asked})


@pytest.mark.parametrize(
    ("asked", "message"),
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
        ({"breaks": "client@2"}, "'client@2' is not an event at a turn"),
    ],
)
def test_what_cannot_be_is_refused(
    fake_worker: FakeWorker, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(LabError, match=message):
        plan(fake_worker, **asked)


def test_drawn_lengths_are_in_the_record_and_each_break_has_its_perfect_case(
    fake_worker: FakeWorker,
) -> None:
    turn = "lognormal:10,0.5+4-8"

    planned = plan(
        fake_worker,
        turn=turn,
        turns=5,
        breaks="tools@3",
        keep="memory,disk,none",
    )

    setups = column(planned.cases, "setup")
    assert column(setups, "keep") == ["memory", "memory", "disk", "disk", "none"]
    assert column(setups, "breaks") == ["tools@3", "", "tools@3", "", "tools@3"]
    assert len(set(setups[0].messages)) > 1
    assert setups[0].asked == turn


def test_without_a_cache_two_turns_are_measured_and_the_others_computed(
    fake_worker: FakeWorker,
) -> None:
    memory, uncached = column(plan(fake_worker, turns=8).cases, "setup")
    every_turn = dataclasses.replace(uncached, only=())

    by_law = rows([record_of(memory), record_of(uncached)])
    measured = rows([record_of(memory), record_of(every_turn)])

    assert memory.only == ()
    assert uncached.only == (5, 8)
    expected_s = column(measured, "without_s")
    assert column(by_law, "without_s") == pytest.approx(expected_s, rel=0.12)
    assert by_law[4].without_s == pytest.approx(measured[4].without_s, rel=0.05)


def test_a_second_conversation_in_a_slot_of_its_own_breaks_nothing() -> None:
    """In one slot the second one takes the first one's cache away."""
    shared = changed(breaks="second@2+")
    own_slot = changed(keep="slot")
    records = [record_of(shared), record_of(own_slot)]

    table = rows(records)

    in_one_slot = [row for row in table if row.keep == "memory"]
    in_two_slots = [row for row in table if row.keep == "slot"]
    assert column(in_one_slot, "n_again") == [0, 14, 26]
    assert column(in_one_slot, "differs_at") == [None, 20, 20]
    for row, alone in zip(in_two_slots, rows([record_of()]), strict=True):
        assert row.n_cached == alone.n_cached
        assert row.ttft_s == pytest.approx(alone.ttft_s)
        assert row.turn_s == pytest.approx(alone.turn_s)
    # layers, heads, key and value, elements of two bytes, positions
    assert in_two_slots[0].slot_bytes == 2 * 2 * 2 * 16 * 2 * 256
    sentence = " ".join(sentences(table))
    assert "slot costs 0.1 MB of memory." in sentence
    assert "would save" not in sentence  # no case without breaks was measured


def run_conversation(
    worker: Worker,
    mini: Path,
    folder: Path,
) -> list[Run]:
    """The timed runs of a conversation of three turns, with a cache everywhere and without one."""
    asked = (30, "12+6", 3, "truncate@3,second@2", "memory,slot,disk,none", 1, str(mini))
    planned = planning.plan(
        worker,
        *asked,
        threads=1,
        prompt="random",
        folder=folder,
    )
    path = new_results_file(planned, folder)
    records = list(execute(planned, worker, path, lambda status: None))
    runs = column(records, "run")
    assert set(column(runs, "error")) == {None}
    return [run for run in runs if not run.warmup]


def test_a_cached_turn_chooses_what_an_uncached_one_does(mini: Path, tmp_path: Path) -> None:
    """The first answer, of 6 tokens, is the same with and without a cache in any case."""
    with Worker() as worker:
        runs = run_conversation(worker, mini, tmp_path)

    ids = {run.case["keep"]: run.token_ids for run in runs if run.case["breaks"]}
    of_two = ids["slot"]  # both conversations in turns
    of_first = [*of_two[:6], *of_two[12:18], *of_two[24:30]]
    assert ids["memory"] == ids["disk"]  # the same steps
    assert (first_difference(ids["memory"], ids["none"]) or 99) > 6
    assert (first_difference(of_first, ids["none"]) or 99) > 6
    assert of_two[6:12] != of_two[:6]


def test_all_computed_tokens_are_in_the_figures(mini: Path, tmp_path: Path) -> None:
    with Worker() as worker:
        runs = run_conversation(worker, mini, tmp_path)

    for run in runs:
        conversation = conversation_of(run)
        assert conversation is not None
        steps = run.steps.frame()
        n_prefilled = steps[steps.kind == PREFILL].n_tokens.sum()
        n_computed = figures(steps, conversation).n_computed.sum()
        assert conversation.n_slots * n_computed == n_prefilled


@pytest.mark.usefixtures("undisturbed")
def test_turns_command(mini: Path, tmp_path: Path) -> None:
    asked = "--prompt random --system 40 --turn 20+4 --turns 3"
    asked += " --break system@3,second@3 -r 1 -t 1 -o"

    code, out, err = run_lab("turns", "-m", mini, *asked.split(), tmp_path)

    assert code == 0, err
    assert "3 turns take" in out
    (again,) = kinds.commands(results.read([tmp_path]).all_lines)
    assert "--break system@3,second@3" in again
    assert "Turn 3 (system, second): the prompt differs from token 17 on" in " ".join(
        out.split()
    )
    assert len(list(tmp_path.glob("*-turns.png"))) == 1
    assert list(tmp_path.glob(".lab-states*")) == []
    table = json.loads(run_lab("show", tmp_path, "--json")[1])["rows"]
    assert [row["differs_at"] for row in table] == [None, None, 16]  # of turns 1 to 3


def turn(
    number: int,
    n_prompt: int,
    ttft_ms: int,
    n_cached: int | None = None,
    is_cold: bool = False,
    breaks: str = "system@3",
) -> RequestRecord:
    """A turn of a conversation through a server that takes 10 ms for each further token."""
    conversation = Conversation(
        60,
        (40, 20, 20),
        (11, 11, 11),
        breaks,
        "memory",
    )
    differs_at = None if is_cold or number == 1 else 64
    asked = Asked(
        n_prompt=None,
        n_gen=11,
        experiment=NAME,
        case=case_of(conversation),
        place=vars(TurnPlace(number, differs_at, is_cold)),
    )
    arrive_ns = tuple((ttft_ms + 10 * i) * MS for i in range(11))
    request = make_request(
        asked=asked,
        events=Events(
            arrive_ns=arrive_ns,
            n_bytes=(10,) * 11,
            kind=(TEXT,) * 11,
        ),
        usage=Usage(
            prompt_tokens=n_prompt,
            completion_tokens=11,
            cached_tokens=n_cached,
        ),
        sent_ns=0,
    )
    return make_request_record(request)


SERVED = [
    turn(1, 100, 200),
    turn(2, 130, 60),
    turn(3, 165, 190),
]  # 2 ms a token


def text_of_served(records: Sequence[RequestRecord], n_slots: int | None = None) -> str:
    return " ".join(sentences(finished(served(records)), n_slots))


def test_without_the_servers_figures_cached_tokens_are_estimated_and_marked() -> None:
    table = served(SERVED)

    sentence = text_of_served(SERVED)

    assert table.n_cached.tolist() == [0, 100, 70]
    assert not table.is_known.any()
    # 130 - 100 - 10 new in turn 2; its message of 20 in turn 3
    assert table.n_again.tolist() == [0, 10, 75]
    assert "from letter 65 on, and about 75 tokens after it were read again" in sentence
    assert "estimated from the TTFT" in sentence


def test_what_a_server_reads_again_without_a_planned_break_is_said() -> None:
    """Its template strips the thinking of the answer before: 50 tokens of turn 2 are computed."""
    stripping = [
        turn(1, 100, 200, 0, breaks=""),
        turn(2, 130, 100, 80, breaks=""),
        turn(3, 165, 60, 140, breaks=""),
    ]

    sentence = text_of_served(stripping)

    assert (
        "Turn 2: 30 tokens of earlier turns were read again, though no break was planned"
        in sentence
    )
    assert "though no break was planned" not in text_of_served(SERVED)


def test_a_slot_is_not_recommended_where_the_server_has_an_idle_one() -> None:
    broken = [
        turn(1, 100, 200, 0, breaks="second@3"),
        turn(2, 130, 60, 110, breaks="second@3"),
        turn(3, 165, 210, 60, breaks="second@3"),
    ]

    with_one_slot = text_of_served(broken, n_slots=1)
    with_two_slots = text_of_served(broken, n_slots=2)

    assert "A slot of its own for the second conversation would save" in with_one_slot
    assert "would save" not in with_two_slots
    assert (
        "The server has 2 slots, and yet the second conversation took this one's cache."
        in with_two_slots
    )


def quadratic_ms(n_cached: int, n_prompt: int) -> int:
    """A server's time: a token at position 1,000 takes five times as long as the first one."""
    return round(20 + (n_prompt - n_cached) / 2 + (n_prompt**2 - n_cached**2) / 1000)


PROMPTS = (300, 900, 1500)
CACHED = (0, 290, 880)
COLD = [
    turn(2, 900, quadratic_ms(0, 900), is_cold=True),
    turn(3, 1500, quadratic_ms(0, 1500), is_cold=True),
]


def test_the_law_of_uncached_prompts_finds_cached_tokens_at_depth() -> None:
    turns = []
    for number, (n_prompt, n_cached) in enumerate(zip(PROMPTS, CACHED, strict=True), 1):
        turns.append(turn(number, n_prompt, quadratic_ms(n_cached, n_prompt)))

    table = served([*turns, *COLD])

    without_s = [(quadratic_ms(0, n) + 100) / 1e3 for n in PROMPTS]
    assert table.turn.tolist() == [1, 2, 3]
    assert table.n_cached.tolist() == pytest.approx(CACHED, abs=2)
    assert table.without_s.tolist() == pytest.approx(without_s, rel=0.01)


def test_what_the_server_reports_as_cached_is_taken() -> None:
    turns = [turn(number, n, 100 * number, 7) for number, n in enumerate(PROMPTS, 1)]

    table = served([*turns, *COLD])

    assert table.n_cached.tolist() == [7, 7, 7]
    assert table.is_known.all()


def test_all_turns_with_known_cached_tokens_teach_the_formula() -> None:
    """One of the two uncached turns was three times too slow by chance: the others outweigh it."""
    case = case_of(Conversation(60, (40,) * 9, (11,) * 9, "", "memory"))
    true_ms = 20 + 2 * 500  # without a cache, of turn 5
    records = []
    for number in range(1, 10):
        n_prompt = 100 * number
        n_computed = 50 + 10 * number if number > 1 else n_prompt
        ttft_ms = 20 + 2 * n_computed
        records.append(turn(number, n_prompt, ttft_ms, n_prompt - n_computed))
    records.append(turn(5, 500, 3 * true_ms, 0, is_cold=True))
    records.append(turn(9, 900, 20 + 2 * 900, 0, is_cold=True))

    table = served([with_case(record, case) for record in records])

    assert table.is_known.all()
    fifth = table.iloc[4]
    assert 1e3 * (fifth.without_s - fifth.decode_s) < 2 * true_ms


def test_a_formula_that_does_not_fit_is_flagged() -> None:
    """A request without a cache took three times what the others say."""
    case = case_of(Conversation(60, (40,) * 5, (11,) * 5, "", "memory"))
    records = []
    for number in range(1, 6):
        n_prompt = 200 * number
        records.append(turn(number, n_prompt, 20 + 2 * n_prompt, 0))
    slow = turn(5, 1000, 3 * 2020, 0, is_cold=True)

    fits = text_of_served([with_case(record, case) for record in records])
    misses = text_of_served([with_case(record, case) for record in [*records, slow]])

    assert "The formula for the TTFT is off" not in fits
    assert "The formula for the TTFT is off by up to" in misses


def with_case(record: RequestRecord, case: dict[str, Any]) -> RequestRecord:
    asked = dataclasses.replace(record.request.asked, case=case)
    return dataclasses.replace(
        record, request=dataclasses.replace(record.request, asked=asked)
    )


def is_cold(record: RequestRecord) -> bool:
    return bool(record.request.asked.place["is_cold"])


def number_of(record: RequestRecord) -> object:
    return record.request.asked.place["number"]


@pytest.mark.parametrize("speed", [0.85, 1, 1.15])
def test_estimates_survive_a_host_that_changes_its_speed(speed: float) -> None:
    """2 ms a token and 20 ms; the uncached turns at the end are on a faster or slower host."""
    prompts_and_cached = [
        (300, 0),
        (330, 310),
        (365, 60),
    ]
    turns = []
    for number, (n_prompt, n_cached) in enumerate(prompts_and_cached, 1):
        turns.append(turn(number, n_prompt, 20 + 2 * (n_prompt - n_cached)))
    for number, n_prompt in ((2, 330), (3, 365)):
        ttft_ms = round(speed * (20 + 2 * n_prompt))
        turns.append(turn(number, n_prompt, ttft_ms, is_cold=True))

    table = served(turns)

    cached = [n_cached for _, n_cached in prompts_and_cached]
    assert table.n_cached.tolist() == pytest.approx(cached, abs=0.2 * 365)
    assert table.n_cached[0] == 0
    assert table.n_cached[1] <= 330 - 20  # a turn computes its own message at least


def test_a_message_longer_than_the_prompt_makes_no_negative_counts() -> None:
    table = served(
        [
            turn(1, 100, 200),
            turn(2, 15, 30),
            turn(3, 15, 30),
        ]
    )  # messages of 20 tokens

    assert table.n_cached.min() >= 0
    assert (table.n_computed <= table.n_prompt).all()


def test_a_missing_first_turn_does_not_hide_the_cached_tokens() -> None:
    table = served([turn(2, 900, 100), turn(3, 1000, 2000, is_cold=True)])

    assert table.n_cached.tolist() == pytest.approx([850], abs=35)  # 50 of 900 tokens at 2 ms


def test_a_conversation_is_sent_turn_by_turn_and_two_turns_again_without_a_cache(
    tmp_path: Path,
) -> None:
    conversation = Conversation(
        40,
        (10, 10, 10, 10),
        (4, 4, 4, 4),
        "second@3",
        "memory",
    )
    with null_server(NullSettings()) as started, connect(started.url) as server:
        path = server.new_file(tmp_path)
        text = "one two three four five six seven eight nine ten "

        records = list(send_turns(conversation, server, text, path, lambda status: None))

    assert all(record.noise is not None for record in records)  # the server is on this machine
    assert list(map(number_of, records)) == [1, 2, 3, 4, 3, 4]
    assert list(map(is_cold, records)) == [False, False, False, False, True, True]
    assert list(results.read([path]).requests) == records
    assert len(served(records)) == 4


def test_a_place_for_the_cache_is_refused_with_a_server() -> None:
    code, _, err = run_lab("turns", "--url", "http://127.0.0.1:9/v1", "--keep", "disk")

    assert code == 1
    assert "--keep is only for the lab's own engine, not for a server." in err


def test_a_served_conversation_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    page = tmp_path / "page.html"
    results.save(path, *SERVED)

    code, out, err = run_lab("show", path)
    table = json.loads(run_lab("show", path, "--json")[1])["rows"]
    page_code, _, page_err = run_lab("report", path, "--file", page)

    assert code == 0, err
    assert "3 turns take" in out
    assert [row["turn"] for row in table] == [1, 2, 3]
    assert page_code == 0, page_err
    assert "3 turns take" in page.read_text()


@pytest.mark.parametrize(
    ("n_busy", "expected"),
    [(1, "3 turns take"), (2, "No conclusions: 2 of 3 requests were disturbed.")],
)
def test_turns_on_a_busy_machine_are_marked(n_busy: int, expected: str) -> None:
    records = []
    for number, record in enumerate(SERVED[:3]):
        others_ms = 400 if number < n_busy else 10
        records.append(dataclasses.replace(record, noise=noise_of(others_ms)))

    (chapter,) = kinds.sections(records)
    (part,) = chapter.parts

    assert part.title.endswith(f"(! {n_busy} of 3 requests disturbed)")
    assert part.answer.startswith(expected)
    (warning,) = part.warnings
    assert warning == f"Other processes used 0.8 cores during {n_busy} of 3 requests."


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ('"keep":"cloud"', '"keep":"memory"'),
        ("system@99", "system@3"),
        ('"number":9', '"number":3'),
    ],
)
def test_a_turn_that_contradicts_itself_is_passed_over(
    tmp_path: Path, wrong: str, right: str
) -> None:
    path = tmp_path / "served.jsonl"
    results.save(path, *SERVED)
    path.write_text(path.read_text().replace(right, wrong))

    requests = results.read([path]).requests

    assert len(served(requests)) < 3
    assert len(kinds.sections(requests)) < 3
