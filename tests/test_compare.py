"""Comparisons that know what they know: groups, ratios, verdicts, and trials in blocks."""

import dataclasses
import itertools
import math
import random
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import CRASHED, FAILED, OK, Record, Run, Settings, Steps
from lab.errors import LabError
from lab.runner import trial
from lab.runner.cases import Case, Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Status
from lab.runner.session import execute as execute_session
from lab.show import comparison, console, text_comparison
from lab.show.comparison import ALIKE, DISTURBED, FASTER, SLOWER, TOO_FEW
from tests.bench import doubt
from tests.support.fake_worker import FakeWorker, died
from tests.support.records import MACHINE, SETTINGS, make_record, make_run

SECOND_MACHINE = dataclasses.replace(MACHINE, cpu="Other CPU")
ONE_THREAD = dataclasses.replace(SETTINGS, n_threads=1)
BASE = [10, 10.1, 10.2, 10.3, 10.4, 10.5]  # ms of a decode step
SAMPLES = Path(__file__).parents[1] / "results"


def session(decode_ms: Sequence[float], name: str = "one", **changes: Any) -> list[Record]:
    """A run for each time of a decode step."""
    records = []
    for repeat, ms in enumerate(decode_ms):
        run = make_run(20, 5, repeat, decode_ms=ms)
        records.append(make_record(run, session=name, **changes))
    return records


def slower_session(factor: float) -> list[Record]:
    """The times of BASE times a factor, on a second machine."""
    return session([factor * ms for ms in BASE], machine=SECOND_MACHINE)


def steady_session(name: str, level: float, **changes: Any) -> list[Record]:
    return session([level, 1.001 * level, 0.999 * level], name, **changes)


def steady_sessions(*levels: float) -> list[Record]:
    """A steady session for each level."""
    records = []
    for number, level in enumerate(levels):
        records += steady_session(f"session-{number}", level)
    return records


def tpot_row(records: list[Record], **options: Any) -> comparison.ComparedFigure:
    (compared,) = comparison.compare(records, **options)
    (row,) = [row for row in compared.rows if row.figure == "tpot_ms"]
    return row


# Verdicts


@pytest.mark.parametrize(
    ("factor", "verdict", "sentence"),
    [
        (2, SLOWER, "slower, 1.91x the time"),
        (0.5, FASTER, "faster, 1.84x as fast"),
        (1, ALIKE, "no difference larger"),
    ],
)
def test_verdicts(factor: float, verdict: str, sentence: str) -> None:
    row = tpot_row(session(BASE) + slower_session(factor))
    assert row.verdict == verdict
    assert sentence in row.words
    assert (row.n_base, row.n_other, row.paired) == (6, 6, False)


def test_a_small_difference_is_claimed_only_where_it_was_asked_for() -> None:
    records = session(BASE) + slower_session(1.4)
    smaller = session(BASE) + slower_session(1.15)

    row = tpot_row(smaller, at_least=0.1)

    assert tpot_row(records).verdict == SLOWER
    assert row.verdict == ALIKE
    assert "slower by" in row.words
    assert "no difference clearly above" in row.words
    assert tpot_row(records, at_least=0.3).verdict == TOO_FEW  # more than half is not excluded


def test_sessions_need_a_larger_difference_than_their_runs_show() -> None:
    """Runs of a session lie within 0.5 %, sessions differ by 4 %: that is the machine."""
    slow = [10.4, 10.42, 10.45]
    of_one_setup = session([10, 10.02, 10.05], "a") + session(slow, "b")
    of_two_machines = session([10, 10.02, 10.05]) + session(slow, machine=SECOND_MACHINE)
    assert tpot_row(of_one_setup).verdict == ALIKE
    assert tpot_row(of_two_machines).verdict == ALIKE


def test_without_further_sessions_their_spread_is_assumed() -> None:
    pair = steady_session("a", 10) + steady_session("b", 10.7, settings=ONE_THREAD)
    (compared,) = comparison.compare(pair)
    assert tpot_row(pair).verdict == ALIKE
    assert compared.spreads == (
        "TPOT: 4.1 % (assumed for a physical machine)",
        "prefill: 4.1 % (assumed for a physical machine)",
    )


def test_further_sessions_of_the_machine_replace_the_assumption() -> None:
    pair = steady_session("a", 10) + steady_session("b", 10.7, settings=ONE_THREAD)
    quiet = steady_sessions(10, 10.02, 9.98, 10.01, 9.99)
    wild = steady_sessions(8, 12, 9, 11, 10)

    (compared,) = comparison.compare(pair, others=quiet)

    assert tpot_row(pair, others=quiet).verdict == SLOWER
    assert tpot_row(pair, others=wild).verdict == TOO_FEW
    assert "from 6 sessions of this machine" in " ".join(compared.spreads)


def test_two_real_machines_of_default_sessions_are_told_apart() -> None:
    names = ("sample-smollm2-135m-amd-epyc", "sample-smollm2-135m-intel-xeon")
    records = results.read([SAMPLES / f"{name}.jsonl" for name in names]).records

    (compared,) = comparison.compare(records)

    assert min(row.estimate for row in compared.rows) > 1.7
    # The shortest prefill has too much spread; at 10,000 tokens the host took cores from 2 of 3
    # runs of one side.
    verdicts = [row.verdict for row in compared.rows]
    assert verdicts == [TOO_FEW, SLOWER, SLOWER, SLOWER, DISTURBED, DISTURBED]
    assert compared.rows[0].words == "unclear, the interval contains 1: about 1.82x the time"


class LuckyProcess(FakeWorker):
    """An engine whose process has a level of its own (1.5 %), kept as long as it lives."""

    def __init__(self, chance: random.Random, factor: float) -> None:
        super().__init__()
        self.chance = chance
        self.factor = factor
        self.restart()

    def restart(self) -> None:
        super().restart()
        level_ms = 10 * self.factor * math.exp(self.chance.gauss(0, 0.015))
        self.decode_ms = lambda: level_ms * math.exp(self.chance.gauss(0, 0.005))


def verdict_of_sessions(true_ratio: float, seed: int, folder: Path) -> str:
    """The verdict on two sessions, beside six others of the machine; all sessions are executed."""
    model = folder / "tiny.gguf"
    model.write_bytes(b"GGUF")
    chance = random.Random(seed)
    sessions = []
    for number in range(8):
        is_slower = number == 7
        worker: Any = LuckyProcess(chance, true_ratio if is_slower else 1.0)
        plan = make_plan(worker, "20", 5, 10, str(model), threads=1 if is_slower else 2)
        path = folder / f"{seed}-{number}.jsonl"
        sessions.append(list(execute_session(plan, worker, path, lambda status: None)))
    between = [record for records in sessions[1:7] for record in records]
    return tpot_row(sessions[0] + sessions[7], others=between).verdict


def test_a_planted_difference_between_sessions_is_found_and_none_is_not(
    simulated: None, tmp_path: Path
) -> None:
    slower = [verdict_of_sessions(1.05, seed, tmp_path) for seed in range(5)]
    verdicts = [verdict_of_sessions(1.0, seed, tmp_path) for seed in range(100, 105)]
    assert slower.count(SLOWER) >= 4
    assert verdicts.count(ALIKE) >= 4


# Groups


def test_groups_name_only_what_differs() -> None:
    records = [
        *session(BASE),
        *session(BASE, settings=ONE_THREAD),
        *session(BASE, machine=SECOND_MACHINE),
    ]
    groups = comparison.groups(records)
    assert len(groups) == 3
    assert comparison.differences(groups) == {
        "machine": ["Test CPU, 4 cores", "Test CPU, 4 cores", "Other CPU, 4 cores"],
        "n_threads": [2, 1, 2],
    }


def test_a_part_of_its_label_chooses_the_base() -> None:
    records = session(BASE) + session(BASE, machine=SECOND_MACHINE)
    assert comparison.groups(records, "Other")[0].label.endswith("Other CPU, 4 cores")
    with pytest.raises(LabError, match="names no group"):
        comparison.groups(records, "nonsense")


def test_what_is_one_setup_is_compared_by_session() -> None:
    groups = comparison.groups(session(BASE, "monday") + session(BASE, "friday"))
    assert [group.label for group in groups] == ["session monday", "session friday"]
    assert "variant" not in comparison.differences(groups)
    of_two_setups = session(BASE) + session(BASE, machine=SECOND_MACHINE)
    assert comparison.by_session(of_two_setups) == of_two_setups


@pytest.mark.parametrize(
    "records",
    [session(BASE), session([10.0])],
    ids=["six runs", "one run"],
)
def test_one_session_is_not_compared(records: list[Record]) -> None:
    with pytest.raises(LabError, match="all runs are of one setup and one session"):
        comparison.groups(records)


def test_failed_runs_are_not_called_one_setup() -> None:
    failed = [make_record(make_run(status=FAILED)) for _ in range(2)]
    with pytest.raises(LabError, match="nothing to compare: no run has a result"):
        comparison.groups(failed)


def test_a_session_of_too_few_runs_does_not_count_even_if_it_was_disturbed() -> None:
    short = [doubt.neighbour(record) for record in session([30.0, 30.0], "short")]
    row = tpot_row(session(BASE, "long") + short + slower_session(2))
    assert row.n_base == len(BASE)
    assert row.doubts == tpot_row(session(BASE, "long") + slower_session(2)).doubts


def test_the_estimate_of_blocks_is_that_of_its_interval() -> None:
    records = []
    for number, (before, after) in enumerate([(10, 11), (10, 12), (10, 20), (10, 40)] * 2):
        for variant, ms in (("A", before), ("B", after)):
            run = make_run(20, 5, number, decode_ms=ms, block=number, variant=variant)
            records.append(make_record(run))
    row = tpot_row(records)
    assert row.ratio is not None
    assert row.estimate == row.ratio.estimate


def test_imported_totals_are_compared_with_decode_compute() -> None:
    decode_ns = 4 * 10**7
    decode = Steps(("decode",), (4,), (20,), (0,), (decode_ns,), (decode_ns,), (1,), (4,))
    imported = []
    for repeat in range(6):
        run = make_run(20, 5, repeat, steps=decode, imported_from="llama-bench")
        imported.append(make_record(run, machine=SECOND_MACHINE))

    (compared,) = comparison.compare(session([10] * 6) + imported)

    (row,) = compared.rows
    assert row.figure == "step_ms"
    assert row.ratio is not None
    assert row.ratio.estimate == 1.0
    assert compared.only_base == ("prefill at 20",)
    assert compared.only_other == ()


def test_printed_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    groups = comparison.groups(session(BASE) + slower_session(2))
    comparisons = comparison.compare_groups(groups)

    text_comparison.print_comparisons(groups, comparisons, 0.01, console.console())

    out = capsys.readouterr().out
    answer = (
        "Other CPU, 4 cores is slower than Test CPU, 4 cores in 1 of 2 rows "
        "(1.91 times the time); no"
    )
    assert out.lstrip().startswith(answer)
    assert "machine: Test CPU, 4 cores | Other CPU, 4 cores" in out
    assert "other / base, of session medians" in out
    (line,) = [line for line in out.splitlines() if "TPOT, ms" in line]
    assert line.split()[-2:] == ["1.91", "slower"]


# Trials


@pytest.fixture
def plans(tmp_path: Path) -> Callable[..., dict[str, Plan]]:
    """Makes the plans of a trial of numbers of threads."""
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")

    def make_plans(*numbers: int) -> dict[str, Plan]:
        worker: Any = FakeWorker()
        plan_of: dict[str, Plan] = {}
        for letter, n_threads in zip("ABC", numbers, strict=False):
            plan = make_plan(worker, "20", 5, 1, str(model), threads=n_threads)
            plan_of[f"{letter}: --threads {n_threads}"] = plan
        return plan_of

    return make_plans


def execute(
    plans: dict[str, Plan], n_blocks: int, folder: Path, workers: Any = FakeWorker
) -> list[Record]:
    path = folder / "trial.jsonl"
    return list(
        trial.execute(plans, trial.Blocks(n_blocks), path, lambda status: None, workers)
    )


def timed_runs(records: Sequence[Record]) -> list[Run]:
    return [record.run for record in records if not record.run.warmup]


def test_every_block_is_a_random_order_and_its_mirror_image(
    plans: Any, tmp_path: Path
) -> None:
    records = execute(plans(1, 2, 3), 12, tmp_path)

    orders = set()
    for block in range(12):
        runs = [run for run in timed_runs(records) if run.block == block]
        letters = [str(run.variant)[0] for run in runs]
        first_half = letters[:3]
        assert sorted(first_half) == ["A", "B", "C"]
        assert letters[3:] == first_half[::-1]
        orders.add("".join(first_half))
    assert len(orders) > 2
    assert len(results.read([tmp_path / "trial.jsonl"]).records) == len(records)


class Mood:
    """A machine that drifts with every step, and has spikes; one thread is slower."""

    def __init__(self, true_ratio: float, seed: int) -> None:
        self.true_ratio = true_ratio
        self.chance = random.Random(seed)
        self.n_steps = 0

    def step_ms(self, luck: float, n_threads: int) -> float:
        self.n_steps += 1
        ms = 10 * luck * (1 + 0.001 * self.n_steps)
        if self.chance.random() < 0.05:
            ms *= 1.5
        if n_threads == 1:
            ms *= self.true_ratio
        return ms * math.exp(self.chance.gauss(0, 0.01))


def workers_on(mood: Mood) -> type[FakeWorker]:
    """Engines whose processes have luck of their own."""

    class Worker(FakeWorker):
        def __init__(self) -> None:
            super().__init__()
            luck = math.exp(mood.chance.gauss(0, 0.01))
            self.n_threads = 0
            self.decode_ms = lambda: mood.step_ms(luck, self.n_threads)

        def new_context(self, asked: Settings) -> Settings:
            self.n_threads = asked.n_threads
            return super().new_context(asked)

    return Worker


def verdicts_of_trials(
    plans: dict[str, Plan], true_ratio: float, n_trials: int, folder: Path
) -> list[str]:
    verdicts = []
    for seed in range(n_trials):
        of_trial = folder / f"{true_ratio}-{seed}"
        of_trial.mkdir()
        workers = workers_on(Mood(true_ratio, seed))
        records = execute(plans, trial.N_BLOCKS, of_trial, workers)
        verdicts.append(tpot_row(records).verdict)
    return verdicts


def test_a_planted_slowdown_is_found_and_none_is_not(
    simulated: None, plans: Any, tmp_path: Path
) -> None:
    two_and_one = plans(2, 1)

    verdicts = verdicts_of_trials(two_and_one, 1.0, 10, tmp_path)
    slower = verdicts_of_trials(two_and_one, 1.05, 10, tmp_path)

    assert verdicts.count(ALIKE) >= 9
    assert slower.count(FASTER) == 0
    assert slower.count(SLOWER) >= 7


def test_a_trial_is_compared_block_by_block(
    simulated: None, plans: Any, tmp_path: Path
) -> None:
    row = tpot_row(execute(plans(2, 1), 8, tmp_path, workers_on(Mood(1.5, seed=1))))
    assert row.paired
    assert (row.n_base, row.n_other) == (8, 8)
    assert row.verdict == SLOWER


def test_an_engine_that_dies_once_costs_its_block(plans: Any, tmp_path: Path) -> None:
    deaths = iter([True])

    def die(n_prompt: int, n_gen: int) -> None:
        if n_gen == 5 and next(deaths, False):
            raise died()

    class Mortal(FakeWorker):
        def __init__(self) -> None:
            super().__init__()
            self.on_run = die

    runs = timed_runs(execute(plans(1, 2), 3, tmp_path, Mortal))

    assert [run.status for run in runs if run.block == 0] == [CRASHED]
    assert [run.status for run in runs if run.block != 0] == [OK] * 8


def test_a_variant_that_is_refused_ends_the_trial_and_is_named(
    plans: Any, tmp_path: Path
) -> None:
    class Small(FakeWorker):
        def new_context(self, asked: Settings) -> Settings:
            if asked.n_threads == 2:
                raise LabError("no room", "Make some.")
            return super().new_context(asked)

    with pytest.raises(LabError, match="B: --threads 2: no room"):
        execute(plans(1, 2), 3, tmp_path, Small)

    saved = results.read([tmp_path / "trial.jsonl"]).records
    assert FAILED in [record.run.status for record in saved]


def test_a_trial_needs_two_variants_and_room_for_all(
    plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LabError, match="two variants"):
        trial.check(plans(1))
    trial.check(plans(1, 2))
    (plan,) = plans(1).values()
    room = round(1.5 * plan.memory(Case(20, 5)).total_bytes)
    monkeypatch.setattr("lab.runner.machine.memory_available", lambda: room)
    with pytest.raises(LabError, match="together need about"):
        trial.check(plans(1, 2))


@pytest.mark.parametrize(
    ("budget_s", "fewest", "n_blocks"),
    [(0, 1, 1), (0, 2, 2), (3, 1, 1), (4.5, 1, 3), (math.inf, 1, 6)],
)
def test_no_block_begins_that_would_end_after_the_budget(
    budget_s: float,
    fewest: int,
    n_blocks: int,
    plans: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After k blocks the clock says k + 1 seconds."""
    clock = itertools.count()
    monkeypatch.setattr(trial, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    blocks = trial.Blocks(6, budget_s=budget_s, fewest=fewest)
    records = list(
        trial.execute(plans(1, 2), blocks, tmp_path / "a.jsonl", lambda _: None, FakeWorker)
    )
    assert {run.block for run in timed_runs(records)} == set(range(n_blocks))


def test_a_budget_bounds_the_announced_time_and_not_the_blocks(
    plans: Any, tmp_path: Path
) -> None:
    """A forecast of a disturbed start is too long: the time that passes decides."""
    statuses: list[Status] = []
    blocks = trial.Blocks(200, budget_s=5)
    path = tmp_path / "a.jsonl"
    records = trial.execute(plans(1, 2), blocks, path, statuses.append, FakeWorker)
    first = [record for record, _ in zip(records, range(30), strict=False)]
    assert len({run.block for run in timed_runs(first)}) > 1
    assert all(status.left_s is None or status.left_s <= 5 for status in statuses)
