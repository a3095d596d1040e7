"""The loop over runs: order, warm-ups, failures, deaths, full disks; sweeps and trials on the real
engine."""

import dataclasses
import errno
import itertools
import json
import types
from pathlib import Path
from typing import Any, cast

import pytest

from lab.core import phases, results, script as scripts, stats
from lab.core.record import CRASHED, FAILED, OK, Record, Run
from lab.errors import LabError
from lab.process.wire import Progress
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.cases import Until
from lab.runner.plan import N_PILOT, make_plan
from lab.runner.progress import Status
from lab.runner.session import execute, new_results_file, wide_figures
from lab.show import table
from tests.conftest import MS, FakeWorker, died, make_run, run_lab, run_process
from tests.test_real import REAL


@pytest.fixture
def seen() -> list[Status]:
    return []


@pytest.fixture
def bench(
    fake_worker: FakeWorker,
    tmp_path: Path,
    seen: list[Status],
) -> Any:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")

    def measure(**asked: Any) -> tuple[list[Record], Path]:
        plan = make_plan(
            cast(Worker, fake_worker),
            **{
                "prompt_len": "10,600",
                "gen": 5,
                "model": str(model),
                **asked,
            },
        )
        path = new_results_file(plan, tmp_path / "results")
        return list(execute(plan, cast(Worker, fake_worker), path, seen.append)), path

    return measure


def outcome(records: list[Record]) -> list[tuple[int, int, str]]:
    return sorted((r.run.n_prompt, r.run.repeat, r.run.status) for r in records if not r.run.warmup)


def test_every_run_is_made_recorded_and_on_disk(bench: Any) -> None:
    records, path = bench(repeat=2)
    assert outcome(records) == [
        (10, 0, OK),
        (10, 1, OK),
        (600, 0, OK),
        (600, 1, OK),
    ]
    assert list(results.read([path]).records) == records
    assert {r.session for r in records} == {path.stem}


def test_a_cpu_is_warmed_up_by_a_short_run_and_a_whole_step_in_each_engine(bench: Any) -> None:
    records, _ = bench(prompt_len="10,600,1112", repeat=2)
    assert [r.run.n_prompt for r in records if r.run.warmup] == [32, 512, 32, 512]


def test_a_context_that_fails_costs_only_its_length(bench: Any, fake_worker: FakeWorker) -> None:
    def no_room(n_ctx: int) -> None:
        if n_ctx > 100:
            raise LabError("no memory", "")

    fake_worker.on_context = no_room
    records, _ = bench(repeat=2)
    assert outcome(records) == [
        (10, 0, OK),
        (10, 1, OK),
        (600, 0, FAILED),
    ]
    assert "no memory" in next(r.run.error for r in records if r.run.status == FAILED)


@pytest.mark.parametrize(
    ("n_repeat", "dies_at", "n_deaths", "of_600", "n_starts"),
    [
        (
            3,
            (600, 5),
            1,
            [CRASHED, OK, OK],
            4,
        ),  # one a round, and one after the death
        (
            4,
            (600, 5),
            9,
            [CRASHED, CRASHED],
            5,
        ),  # then the length is given up
        (
            2,
            (None, 4),
            1,
            [OK, OK],
            3,
        ),  # while warming up
    ],
)
def test_a_death_costs_one_run_and_the_engine_starts_again(
    bench: Any,
    fake_worker: FakeWorker,
    n_repeat: int,
    dies_at: Any,
    n_deaths: int,
    of_600: list[str],
    n_starts: int,
) -> None:
    deaths = iter(range(n_deaths))

    def die(n_prompt: int, n_gen: int) -> None:
        if (n_prompt if dies_at[0] else None, n_gen) == dies_at and next(deaths, None) is not None:
            raise died()

    fake_worker.on_run = die
    records, _ = bench(repeat=n_repeat)
    of_10 = [(10, i, OK) for i in range(n_repeat)]
    assert outcome(records) == [*of_10, *((600, i, status) for i, status in enumerate(of_600))]
    assert fake_worker.starts == n_starts == fake_worker.loads
    assert any(r.run.status == CRASHED for r in records if r.run.warmup) == (dies_at[0] is None)


def test_progress_is_told_with_time_left(bench: Any, seen: list[Status]) -> None:
    bench(repeat=2)
    timed = [status for status in seen if status.doing == "decode"]
    assert [status.n_runs_done for status in timed] == [0, 1, 2, 3]
    assert all(status.n_runs == 4 and status.left_s is not None for status in timed)
    assert {"loading the model", "creating the context", "warming up"} <= {
        status.doing for status in seen
    }


@pytest.mark.parametrize("n_kept", [0, 2])
def test_a_disk_that_fills_up_is_told(
    bench: Any,
    fake_worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    n_kept: int,
) -> None:
    runs = iter(range(9))

    def fill(n_prompt: int, n_gen: int) -> None:
        if next(runs) == n_kept:
            monkeypatch.setattr("os.fsync", full)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fake_worker.on_run = fill
    with pytest.raises(LabError, match=r"cannot be written.*No space left") as problem:
        bench(repeat=1)
    assert ("It contains the earlier runs" in problem.value.hint) == bool(n_kept)
    left = list((tmp_path / "results").iterdir())
    assert [len(results.read([path]).records) for path in left] == [n_kept] * bool(n_kept)


# Sweeps, and repeats until it is believable


def plan_of(folder: Path, **options: Any) -> Any:
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    worker: Any = FakeWorker()
    return worker, make_plan(
        worker,
        model=str(folder / "tiny.gguf"),
        **options,
    )


def run_plan(
    worker: Any,
    plan: Any,
    folder: Path,
) -> list[Record]:
    return list(execute(plan, worker, new_results_file(plan, folder), lambda status: None))


def test_an_interrupted_session_keeps_what_it_has(tmp_path: Path) -> None:
    worker, plan = plan_of(tmp_path, prompt_len="10", gen=5, repeat=3)
    path = new_results_file(plan, tmp_path)
    runs = execute(plan, worker, path, lambda status: None)
    next(runs), next(runs)
    runs.close()  # type: ignore[attr-defined]
    assert len(results.read([path]).records) == 2


def test_a_session_without_a_run_leaves_no_file(tmp_path: Path) -> None:
    worker, plan = plan_of(tmp_path, prompt_len="10", gen=5, repeat=3)

    def refuse(*_: object) -> None:
        raise LabError("cannot load", "")

    worker.load = refuse
    with pytest.raises(LabError, match="cannot load"):
        run_plan(worker, plan, tmp_path)
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_sweep_is_one_run_with_a_row_per_length(tmp_path: Path) -> None:
    worker, plan = plan_of(
        tmp_path,
        prompt_len="40",
        gen=3,
        repeat=2,
        every=16,
    )
    assert [case.n_generated for case in plan.cases] == [9]
    records = run_plan(worker, plan, tmp_path)
    timed = [record for record in records if not record.run.warmup]
    assert len(timed) == 2
    assert worker.contexts == [43, 43]
    rows = table.runs(timed)
    assert rows.n_prompt.tolist() == [16, 32, 40] * 2
    assert rows.prefill_s.tolist() == [0.016, 0.032, 0.040] * 2
    assert rows.tpot_ms.tolist() == [11] * 6
    assert [len(r.run.steps.kind) for r in records if r.run.warmup] == [3, 3]  # one for each engine


def test_impossible_sweeps(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="--every 41"):
        plan_of(tmp_path, prompt_len="40", every=41)
    with pytest.raises(LabError, match="generate"):
        plan_of(
            tmp_path,
            prompt_len="100000",
            gen=100,
            every=1,
        )


def shaky(worker: Any, spreads: list[float]) -> None:
    """Decode takes 10 ms and a spread more; the list is gone through, then begun again."""
    values = iter(spreads * 1000)
    worker.decode_ms = lambda: 10 + next(values)


def test_rounds_go_on_until_every_interval_is_narrow(tmp_path: Path) -> None:
    worker, plan = plan_of(
        tmp_path, prompt_len="10,20", gen=5, repeat=1, until=Until(0.02, 30, None)
    )
    assert plan.n_repeat == N_PILOT
    steady = [r.run for r in run_plan(worker, plan, tmp_path) if not r.run.warmup]
    assert len(steady) == 2 * N_PILOT
    worker, plan = plan_of(
        tmp_path, prompt_len="10,20", gen=5, repeat=1, until=Until(0.02, 9, None)
    )
    shaky(worker, [0, 0, 0, 3, 0, 2, 1])
    runs = [r.run for r in run_plan(worker, plan, tmp_path / "shaky") if not r.run.warmup]
    assert max(run.repeat for run in runs) == 8
    assert {(n_prompt, name) for n_prompt, name, _ in wide_figures(runs, 0.02)} <= {
        (10, "TPOT"),
        (20, "TPOT"),
    }


def test_every_round_has_an_engine_of_its_own(bench: Any, fake_worker: FakeWorker) -> None:
    records, _ = bench(repeat=3)
    engines = {(r.run.repeat, r.run.engine) for r in records if not r.run.warmup}
    assert engines == {(0, 1), (1, 2), (2, 3)}
    assert fake_worker.starts == 3
    assert fake_worker.contexts == [605] * 3


def test_lengths_that_cost_little_get_more_runs(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.chain([0.0], itertools.repeat(6.0))  # so the planned rounds took 6 s
    monkeypatch.setattr(
        "lab.runner.session.time", types.SimpleNamespace(monotonic=lambda: next(moments))
    )
    records, _ = bench()
    lengths = [r.run.n_prompt for r in records if not r.run.warmup]
    assert lengths.count(10) == stats.fewest_for_interval()
    assert lengths.count(600) == 3
    records, _ = bench(repeat=3)
    assert len([r for r in records if not r.run.warmup]) == 6  # as it was asked for


def test_a_sentinel_stands_before_and_after_every_run(tmp_path: Path) -> None:
    worker, plan = plan_of(tmp_path, prompt_len="10", gen=5, repeat=3)
    runs = [r.run for r in run_plan(worker, plan, tmp_path) if not r.run.warmup]
    assert [(r.noise.sentinel_before_ns, r.noise.sentinel_after_ns) for r in runs if r.noise] == [
        (10 * MS, 10 * MS)
    ] * 3


# How much sessions differ


def test_compare_learns_from_the_sessions_where_the_results_are(tmp_path: Path) -> None:
    worker, plan = plan_of(tmp_path, prompt_len="16", gen=5, repeat=3)
    for session in range(4):
        list(execute(plan, worker, tmp_path / f"session-{session}.jsonl", lambda status: None))
    files = []
    for threads in (1, 2):
        _, other = plan_of(
            tmp_path,
            prompt_len="16",
            gen=5,
            repeat=3,
            threads=threads,
        )
        path = tmp_path / f"threads-{threads}.jsonl"
        list(execute(other, worker, path, lambda status: None))
        files.append(path)
    status, out, err = run_lab("compare", *files, "--no-plot")
    assert status == 0, err
    assert "from 5 sessions of this machine" in out  # one of the two has the setup of the four


# Sweeps and trials on the real engine, as a user runs them


@pytest.fixture(scope="module")
def worker() -> object:
    with Worker() as started:
        yield started


def test_a_sweep_computes_what_independent_runs_compute(worker: Worker, embedded: Path) -> None:
    vocabulary = worker.load(embedded, REAL)
    worker.new_context(dataclasses.replace(REAL, n_ctx=256, n_ubatch=32))
    prompt = prompts.random_ids(150, vocabulary.n_vocab, None, 1, 0)
    seen: list[Progress] = []
    swept = worker.run(scripts.sweep(prompt, 5, 32, 64), seen.append)
    run = Run(
        **{
            **make_run(150, 5).__dict__,
            "steps": swept.steps,
            "token_ids": swept.token_ids,
            "case": {"every": 64},
        }
    )
    assert [leg.n_prompt for leg in phases.by_length(run)] == [64, 128, 150]
    for i, n in enumerate((64, 128, 150)):
        alone = worker.run(scripts.run(prompt[:n], 5, 32), lambda progress: None)
        assert (
            swept.token_ids[5 * i : 5 * i + 5] == alone.token_ids
        )  # nothing of what was forgotten is left
        leg = phases.by_length(run)[i].steps
        assert leg.kind == alone.steps.kind
        assert leg.n_tokens == alone.steps.n_tokens
        assert leg.n_past == alone.steps.n_past


@pytest.mark.usefixtures("undisturbed")
def test_sweep_command(tmp_path: Path) -> None:
    code, out, _ = run_lab(
        "sweep",
        "--max-len",
        "256",
        "-e",
        "32",
        "-u",
        "32",
        "-n",
        "3",
        "-r",
        "2",
        "-t",
        "1",
        "-o",
        tmp_path,
    )
    assert code == 0
    assert "at each length" in out
    assert "Prefill time: T(P) = " in out
    assert "Time per token: t(p) = " in out
    assert len(list(tmp_path.glob("*-sweep.png"))) == 1
    assert not list(tmp_path.glob("*-decode.png"))
    rows = table.summary(table.runs(results.read([tmp_path]).records))
    assert rows.n_prompt.tolist() == list(range(32, 257, 32))
    assert set(rows.repeats) == {2}
    assert rows.prefill_s.is_monotonic_increasing
    assert run_lab("show", tmp_path)[0] == 0


def test_until_command(tmp_path: Path) -> None:
    arguments = [
        "-p",
        "8",
        "-n",
        "16",
        "-r",
        "1",
        "-t",
        "1",
        "--no-plot",
        "-o",
        tmp_path,
        "--until",
        "99%",
    ]
    code, out, _ = run_lab("measure", *arguments, "--max-repeats", "8")
    assert code == 0
    assert " runs; below each the 95 % interval" in out
    is_reached = (
        "All intervals are within 99 % of their medians." in out
    )  # a busy machine may not reach it in 8 runs
    assert is_reached != ("Intervals still wider than 99 %: " in out)
    assert is_reached or len(results.read([tmp_path]).records) >= 8
    assert (
        "--max-repeats 3 is too few" in run_lab("measure", "--until", "2%", "--max-repeats", "3")[2]
    )
    assert run_lab("measure", "--until", "many")[0] == 1


def test_ab_and_compare_commands(mini: Path, tmp_path: Path) -> None:
    common = ["-p", "32", "-n", "4", "-t", "1", "-o", tmp_path]
    code, out, err = run_lab(
        "ab",
        "--flash-attn on",
        "--flash-attn off",
        "-m",
        mini,
        "--prompt",
        "random",
        "--blocks",
        "2",
        *common,
    )
    assert code == 0, err
    assert "flash_attn: on | off" in out
    assert "Unclear: 2 blocks; an interval needs " in out
    (path,) = tmp_path.glob("*.jsonl")
    code, out, err = run_process("compare", path, "--json", "--base", "off", "--no-plot")
    document = json.loads(out)
    assert code == 0
    assert document["differences"]["flash_attn"] == ["off", "on"]
    assert document["comparisons"][0]["rows"][0]["paired"] is True
    code, out, err = run_lab(
        "ab", "", "-m smollm2-135m:Q8_0", "--blocks", "1", *common, "--json", "--no-plot"
    )
    assert code == 0, err
    assert [label.partition(":")[0] for label in json.loads(out)["groups"]] == ["A", "B"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads 2"], "two variants"),
        (["--threads 2", "--thread 1"], "--threads"),
        (["--threads 2", "--threads many"], "not a valid integer"),
        (["--threads 2", "--threads 0"], "--threads 0 is not possible"),
        (["--threads 2", "'"], "not understood"),
        (["--threads 2", "--repeat 2"], "--repeat"),
        (["-t 1", "-t 2", "--blocks", "0"], "--blocks 0"),
        (["-t 1", "-m nonsense"], "no model named"),
    ],
)
def test_impossible_trials(
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    code, out, err = run_lab("ab", *arguments, "-o", tmp_path / "none")
    assert code == 1
    assert not out
    assert says in err
    assert "Error" in err
    assert not (tmp_path / "none").exists()
