"""Comparisons that know what they know: groups, ratios, verdicts, and trials in blocks."""

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import CRASHED, FAILED, OK, Record, Settings, Steps
from lab.errors import LabError
from lab.show import text_comparison
from lab.runner import trial as side_by_side
from lab.runner.cases import Case, Plan
from lab.runner.plan import make_plan
from lab.runner.session import execute as execute_session
from lab.show import comparison, console
from lab.show.comparison import ALIKE, DISTURBED, FASTER, SLOWER, TOO_FEW
from tests.conftest import MACHINE, SETTINGS, FakeWorker, died, make_record, make_run

OTHER = dataclasses.replace(MACHINE, cpu="Other CPU")


def session(decode_ms: Sequence[float], name: str = "one", **changes: Any) -> list[Record]:
    runs = [make_run(20, 5, i, decode_ms=ms) for i, ms in enumerate(decode_ms)]
    return [make_record(run, session=name, **changes) for run in runs]


def only_tpot(records: list[Record], **options: Any) -> comparison.ComparedFigure:
    (compared,) = comparison.compare(records, **options)
    (row,) = [row for row in compared.rows if row.figure == "tpot_ms"]
    return row


BASE = [10, 10.1, 10.2, 10.3, 10.4, 10.5]


@pytest.mark.parametrize(
    ("factor", "verdict", "words"),
    [
        (2, SLOWER, "slower, 1.91x the time"),
        (0.5, FASTER, "faster, 1.84x as fast"),
        (1, ALIKE, "no difference larger"),
    ],
)
def test_verdicts(factor: float, verdict: str, words: str) -> None:
    row = only_tpot(session(BASE) + session([factor * ms for ms in BASE], machine=OTHER))
    assert row.verdict == verdict and words in row.words
    assert (row.n_base, row.n_other, row.paired) == (6, 6, False)


def test_a_small_difference_is_claimed_only_where_it_was_asked_for() -> None:
    records = session(BASE) + session([1.4 * ms for ms in BASE], machine=OTHER)
    assert only_tpot(records).verdict == SLOWER
    row = only_tpot(
        session(BASE) + session([1.15 * ms for ms in BASE], machine=OTHER), at_least=0.1
    )
    assert (
        row.verdict == ALIKE
        and "slower by" in row.words
        and "no difference clearly above" in row.words
    )
    assert (
        only_tpot(records, at_least=0.3).verdict == TOO_FEW
    )  # a difference of more than half is not excluded


def test_sessions_of_one_setup_need_more_than_their_runs_say() -> None:
    """Runs of a session lie within 0.5 %, sessions differ by 4 %: that is the machine, and no difference."""
    rows = [only_tpot(session([10, 10.02, 10.05], "a") + session([10.4, 10.42, 10.45], "b"))]
    rows.append(
        only_tpot(session([10, 10.02, 10.05]) + session([10.4, 10.42, 10.45], machine=OTHER))
    )
    assert [row.verdict for row in rows] == [ALIKE, ALIKE]


def steady(name: str, level: float, **changes: Any) -> list[Record]:
    return session([level, 1.001 * level, 0.999 * level], name, **changes)


def test_known_sessions_of_the_machine_replace_the_assumption() -> None:
    slow = dataclasses.replace(SETTINGS, n_threads=1)
    pair = steady("a", 10) + steady("b", 10.7, settings=slow)
    assert only_tpot(pair).verdict == ALIKE
    quiet = [
        record
        for i, level in enumerate([10, 10.02, 9.98, 10.01, 9.99])
        for record in steady(f"q{i}", level)
    ]
    row = only_tpot(pair, others=quiet)
    assert row.verdict == SLOWER
    wild = [
        record for i, level in enumerate([8, 12, 9, 11, 10]) for record in steady(f"w{i}", level)
    ]
    assert only_tpot(pair, others=wild).verdict == TOO_FEW
    (compared,) = comparison.compare(pair, others=quiet)
    assert any("from 6 sessions of this machine" in words for words in compared.spreads)
    (compared,) = comparison.compare(pair)
    assert compared.spreads == (
        "TPOT: 4.1 % (assumed for a physical machine)",
        "prefill: 4.1 % (assumed for a physical machine)",
    )


def test_two_real_machines_of_default_sessions_are_told_apart() -> None:
    samples = Path(__file__).parent.parent / "results"
    records = [
        record
        for name in ("sample-smollm2-135m-amd-epyc", "sample-smollm2-135m-intel-xeon")
        for record in results.read([samples / f"{name}.jsonl"]).records
    ]
    (compared,) = comparison.compare(records)
    assert len(compared.rows) == 6
    assert all(row.estimate > 1.7 for row in compared.rows)
    assert [row.verdict for row in compared.rows] == [TOO_FEW, *[SLOWER] * 3, DISTURBED, DISTURBED]
    # the shortest prefill has too much spread; at 10,000 tokens the host took cores from 2 of 3 runs of one side
    assert compared.rows[0].words == "unclear, the interval contains 1: about 1.82x the time"


def sessions_of(true_ratio: float, seed: int, folder: Path, plan_of: Any) -> list[Record]:
    """Real sessions of the main loop on fake engines of which every process has a level of its own (2 %)."""
    chance = random.Random(seed)

    class Process(FakeWorker):
        def __init__(self) -> None:
            super().__init__()
            self.restart()

        def restart(self) -> None:
            super().restart()
            level = math.exp(chance.gauss(0, 0.015))
            self.decode_ms = lambda: 10 * level * self.slower * math.exp(chance.gauss(0, 0.005))

        slower = 1.0

    records: list[Record] = []
    for number in range(8):
        worker: Any = Process()
        worker.slower = true_ratio if number == 7 else 1.0
        plan = plan_of(worker, 1 if number == 7 else 2)
        path = folder / f"{seed}-{number}.jsonl"
        records += list(execute_session(plan, worker, path, lambda status: None))
    return records


def test_a_planted_difference_between_sessions_is_found_and_none_is_not(
    simulated: None, tmp_path: Path
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    def plan_of(worker: Any, n_threads: int) -> Plan:
        return make_plan(worker, "20", 5, 10, str(tmp_path / "tiny.gguf"), threads=n_threads)

    def verdict(true_ratio: float, seed: int) -> str:
        records = sessions_of(true_ratio, seed, tmp_path, plan_of)
        names = sorted({record.session for record in records})
        pair = [record for record in records if record.session in (names[0], names[7])]
        return only_tpot(pair, others=[record for record in records if record not in pair]).verdict

    assert sum(verdict(1.05, seed) == SLOWER for seed in range(5)) >= 4
    assert sum(verdict(1.0, 100 + seed) != ALIKE for seed in range(5)) <= 1


def test_groups_name_only_what_differs() -> None:
    slow = dataclasses.replace(SETTINGS, n_threads=1)
    found = comparison.groups(
        session(BASE) + session(BASE, settings=slow) + session(BASE, machine=OTHER)
    )
    assert len(found) == 3
    assert comparison.differences(found) == {
        "machine": ["Test CPU, 4 cores", "Test CPU, 4 cores", "Other CPU, 4 cores"],
        "n_threads": [2, 1, 2],
    }
    assert comparison.groups(session(BASE) + session(BASE, machine=OTHER), "Other")[
        0
    ].label.endswith("Other CPU, 4 cores")
    with pytest.raises(LabError, match="names no group"):
        comparison.groups(session(BASE) + session(BASE, machine=OTHER), "nonsense")


def test_what_is_one_setup_is_compared_by_session_or_not_at_all() -> None:
    found = comparison.groups(session(BASE, "monday") + session(BASE, "friday"))
    assert [group.label for group in found] == ["session monday", "session friday"]
    assert "variant" not in comparison.differences(found)
    several = session(BASE) + session(BASE, machine=OTHER)
    assert comparison.by_session(several) == several
    with pytest.raises(LabError, match="nothing to compare"):
        comparison.groups(session(BASE))
    with pytest.raises(LabError, match="nothing to compare"):
        comparison.groups([make_record(make_run(status=FAILED))])


def test_imported_totals_are_compared_with_decode_compute() -> None:
    decode_ns = 4 * 10**7
    decode = Steps(("decode",), (4,), (20,), (0,), (decode_ns,), (decode_ns,), (1,), (4,))
    there = [
        make_record(make_run(20, 5, i, steps=decode, imported_from="llama-bench"), machine=OTHER)
        for i in range(6)
    ]
    (compared,) = comparison.compare(session([10] * 6) + there)
    assert [(row.figure, row.ratio.estimate if row.ratio else None) for row in compared.rows] == [
        ("decode_ms", 1.0)
    ]
    assert compared.only_base == ("prefill at 20",)
    assert compared.only_other == ()


def test_printed_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    records = session(BASE) + session([2 * ms for ms in BASE], machine=OTHER)
    found = comparison.groups(records)
    text_comparison.print_comparisons(
        found, comparison.compare_groups(found), 0.01, console.console()
    )
    said = capsys.readouterr().out
    assert "machine: Test CPU, 4 cores | Other CPU, 4 cores" in said
    assert said.startswith(
        "Other CPU, 4 cores is slower than Test CPU, 4 cores in 1 of 2 rows (1.91 times the time); no"
    )
    (line,) = (line for line in said.splitlines() if "TPOT, ms" in line)
    assert line.split()[-2:] == ["1.91", "slower"] and "other / base, of session medians" in said


# Trials


@pytest.fixture
def plans(tmp_path: Path) -> Any:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    def make(*threads: int, lengths: str = "20") -> dict[str, Plan]:
        worker: Any = FakeWorker()
        return {
            f"{chr(65 + i)}: --threads {n}": make_plan(
                worker, lengths, 5, 1, str(tmp_path / "tiny.gguf"), threads=n
            )
            for i, n in enumerate(threads)
        }

    return make


def execute(
    plans: dict[str, Plan], n_blocks: int, folder: Path, workers: Any = FakeWorker
) -> list[Record]:
    return list(
        side_by_side.execute(plans, n_blocks, folder / "trial.jsonl", lambda status: None, workers)
    )


def test_every_block_is_a_random_order_and_its_mirror_image(plans: Any, tmp_path: Path) -> None:
    records = execute(plans(1, 2, 3), 12, tmp_path)
    timed = [record.run for record in records if not record.run.warmup]
    orders = set()
    for block in range(12):
        names = [str(run.variant)[0] for run in timed if run.block == block]
        assert sorted(names[:3]) == ["A", "B", "C"] and names[3:] == names[:3][::-1]
        orders.add("".join(names[:3]))
    assert len(orders) > 2
    assert len(results.read([tmp_path / "trial.jsonl"]).records) == len(records)


def moody(true_ratio: float, chance: random.Random) -> Any:
    """Workers whose process has luck of its own, on a machine that drifts, with spikes; B takes true_ratio as long."""
    calls = 0

    class Moody(FakeWorker):
        def __init__(self) -> None:
            super().__init__()
            luck = math.exp(chance.gauss(0, 0.01))

            def decode_ms() -> float:
                nonlocal calls
                calls += 1
                spike = 1.5 if chance.random() < 0.05 else 1
                slow = true_ratio if self.n_threads == 1 else 1
                return (
                    10 * luck * (1 + 0.001 * calls) * spike * slow * math.exp(chance.gauss(0, 0.01))
                )

            self.decode_ms = decode_ms
            self.n_threads = 0

        def new_context(self, asked: Settings) -> Settings:
            self.n_threads = asked.n_threads
            return super().new_context(asked)

    return Moody


def verdicts(plans: dict[str, Plan], true_ratio: float, seed: int, folder: Path) -> str:
    folder.mkdir()
    records = execute(plans, side_by_side.N_BLOCKS, folder, moody(true_ratio, random.Random(seed)))
    return only_tpot(records).verdict


def test_a_planted_slowdown_is_found_and_none_is_not(
    simulated: None, plans: Any, tmp_path: Path
) -> None:
    two = plans(2, 1)
    found = [verdicts(two, 1.0, seed, tmp_path / f"none-{seed}") for seed in range(10)]
    assert sum(verdict != ALIKE for verdict in found) <= 1
    found = [verdicts(two, 1.05, seed, tmp_path / f"five-{seed}") for seed in range(10)]
    assert found.count(FASTER) == 0 and found.count(SLOWER) >= 7
    row = only_tpot(execute(two, 8, tmp_path, moody(1.5, random.Random(1))))
    assert row.paired and row.n_base == row.n_other == 8 and row.verdict == SLOWER


def test_an_engine_that_dies_once_costs_its_block(plans: Any, tmp_path: Path) -> None:
    deaths = iter([True])

    class Mortal(FakeWorker):
        def __init__(self) -> None:
            super().__init__()
            self.on_run = self.die

        def die(self, n_prompt: int, n_gen: int) -> None:
            if n_gen == 5 and next(deaths, False):
                raise died()

    records = execute(plans(1, 2), 3, tmp_path, Mortal)
    timed = [record.run for record in records if not record.run.warmup]
    assert [run.status for run in timed if run.block == 0] == [CRASHED]
    assert [run.status for run in timed if run.block != 0] == [OK] * 8


def test_a_variant_that_is_refused_ends_the_trial_and_is_named(plans: Any, tmp_path: Path) -> None:
    class Small(FakeWorker):
        def new_context(self, asked: Settings) -> Settings:
            if asked.n_threads == 2:
                raise LabError("no room", "Make some.")
            return super().new_context(asked)

    with pytest.raises(LabError, match="B: --threads 2: no room"):
        execute(plans(1, 2), 3, tmp_path, Small)
    assert any(r.run.status == FAILED for r in results.read([tmp_path / "trial.jsonl"]).records)


def test_a_trial_needs_two_variants_and_room_for_all(
    plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LabError, match="two variants"):
        side_by_side.check(plans(1))
    side_by_side.check(plans(1, 2))
    one = next(iter(plans(1).values())).memory(Case(20, 5)).total_bytes
    monkeypatch.setattr("lab.runner.machine.memory_available", lambda: round(1.5 * one))
    with pytest.raises(LabError, match="together need about"):
        side_by_side.check(plans(1, 2))
