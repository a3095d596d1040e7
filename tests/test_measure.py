"""The loop over runs: order, warm-ups, failures, deaths, full disks; sweeps and trials on the real
engine."""

import dataclasses
import errno
import itertools
import json
import types
from pathlib import Path
from typing import Any

import pytest

from lab.core import phases, results, script as scripts, stats
from lab.core.record import CRASHED, FAILED, OK, Record, Run
from lab.errors import LabError
from lab.process.wire import Progress
from lab.process.worker import Worker
from lab.runner import cases, prompts
from lab.runner.cases import Case, Until
from lab.runner.plan import N_PILOT, make_plan, with_cases
from lab.runner.progress import Status
from lab.runner.session import execute, new_results_file, wide_figures
from lab.show import summaries, table
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker, died
from tests.support.records import MS, SETTINGS, make_run


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
            fake_worker,
            **{
                "prompt_len": "10,600",
                "gen": 5,
                "model": str(model),
                **asked,
            },
        )
        path = new_results_file(plan, tmp_path / "results")
        return list(execute(plan, fake_worker, path, seen.append)), path

    return measure


def timed_runs(records: list[Record]) -> list[Run]:
    return [record.run for record in records if not record.run.warmup]


def warm_ups(records: list[Record]) -> list[Run]:
    return [record.run for record in records if record.run.warmup]


def outcome(records: list[Record]) -> list[tuple[int, int, str]]:
    """Length, repeat and status of each timed run."""
    return sorted((run.n_prompt, run.repeat, run.status) for run in timed_runs(records))


def test_every_run_is_made_recorded_and_on_disk(bench: Any) -> None:
    records, path = bench(repeat=2)
    assert outcome(records) == [
        (10, 0, OK),
        (10, 1, OK),
        (600, 0, OK),
        (600, 1, OK),
    ]
    assert list(results.read([path]).records) == records
    assert {record.session for record in records} == {path.stem}


def test_a_cpu_is_warmed_up_by_a_short_run_and_a_whole_step_in_each_engine(bench: Any) -> None:
    records, _ = bench(prompt_len="10,600,1112", repeat=2)
    assert [run.n_prompt for run in warm_ups(records)] == [32, 512, 32, 512]


def test_a_cold_case_has_an_engine_that_has_computed_nothing(
    fake_worker: FakeWorker, tmp_path: Path, seen: list[Status]
) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    plain = make_plan(fake_worker, "10", 5, 2, str(model))
    cases = [Case(10, 5, is_cold=True), Case(20, 5), Case(30, 5), Case(40, 5, is_cold=True)]
    plan = with_cases(plain, cases, plain.write)
    path = new_results_file(plan, tmp_path / "results")
    records = list(execute(plan, fake_worker, path, seen.append))
    by_engine: dict[int | None, list[tuple[int, bool]]] = {}
    for record in records:
        run = record.run
        by_engine.setdefault(run.engine, []).append((run.n_prompt, run.warmup))
    engines = sorted(by_engine.values())
    cold = [[(10, False)]] * 2 + [[(40, False)]] * 2
    assert [runs for runs in engines if len(runs) == 1] == cold
    warm = [runs for runs in engines if len(runs) > 1]
    assert all(runs[0][1] for runs in warm)
    assert outcome(records) == sorted((case.n_prompt, n, OK) for case in cases for n in (0, 1))
    for run in timed_runs(records):
        assert run.noise is not None
        has_sentinel = run.noise.sentinel_before_ns is not None
        assert has_sentinel is (run.n_prompt in (20, 30))


def test_a_context_that_fails_costs_only_its_length(
    bench: Any, fake_worker: FakeWorker
) -> None:
    def no_room(n_ctx: int) -> None:
        if n_ctx > 100:
            raise LabError("no memory", "")

    fake_worker.on_context = no_room
    records, _ = bench(repeat=2)
    assert outcome(records) == [(10, 0, OK), (10, 1, OK), (600, 0, FAILED)]
    (error,) = [run.error for run in timed_runs(records) if run.status == FAILED]
    assert error is not None
    assert "no memory" in error


def test_progress_does_not_wait_for_runs_of_an_abandoned_length(
    bench: Any, fake_worker: FakeWorker, seen: list[Status]
) -> None:
    def no_room(n_ctx: int) -> None:
        if n_ctx > 100:
            raise LabError("no memory", "")

    fake_worker.on_context = no_room
    bench(repeat=3)
    decoding = [status for status in seen if status.doing == "decode"]
    assert [(status.n_runs_done, status.n_runs) for status in decoding] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


def die_at(fake_worker: FakeWorker, n_prompt: int | None, n_gen: int, n_deaths: int) -> None:
    """The engine dies in the first runs of these lengths (None: in runs of any prompt)."""
    deaths = iter(range(n_deaths))

    def die(length: int, n_tokens: int) -> None:
        is_here = n_prompt in (None, length) and n_tokens == n_gen
        if is_here and next(deaths, None) is not None:
            raise died()

    fake_worker.on_run = die


@pytest.mark.parametrize(
    ("n_repeat", "n_deaths", "of_600", "n_starts"),
    [
        (3, 1, [CRASHED, OK, OK], 3),  # the death ended its round: one start a round
        (4, 9, [CRASHED, CRASHED], 4),  # then the length is given up
    ],
)
def test_a_death_costs_one_run_and_the_engine_starts_again(
    bench: Any,
    fake_worker: FakeWorker,
    n_repeat: int,
    n_deaths: int,
    of_600: list[str],
    n_starts: int,
) -> None:
    die_at(fake_worker, 600, 5, n_deaths)

    records, _ = bench(repeat=n_repeat)

    of_10 = [(10, repeat, OK) for repeat in range(n_repeat)]
    crashes = [(600, repeat, status) for repeat, status in enumerate(of_600)]
    assert outcome(records) == of_10 + crashes
    assert (fake_worker.starts, fake_worker.loads) == (n_starts, n_starts)
    assert CRASHED not in [run.status for run in warm_ups(records)]


@pytest.mark.parametrize(
    ("status", "n_crashes", "most_crashes", "expected"),
    [
        (CRASHED, 1, 2, False),
        (CRASHED, 2, 2, True),
        (CRASHED, 1, 1, True),
        (FAILED, 1, 2, True),
    ],
)
def test_an_error_is_given_up_at_once_and_crashes_after_the_most(
    status: str, n_crashes: int, most_crashes: int, expected: bool
) -> None:
    assert cases.is_given_up(status, n_crashes, most_crashes) == expected


def test_a_death_while_warming_up_costs_no_run(bench: Any, fake_worker: FakeWorker) -> None:
    die_at(fake_worker, None, 4, n_deaths=1)

    records, _ = bench(repeat=2)

    assert outcome(records) == [(10, 0, OK), (10, 1, OK), (600, 0, OK), (600, 1, OK)]
    assert (fake_worker.starts, fake_worker.loads) == (3, 3)
    assert CRASHED in [run.status for run in warm_ups(records)]


def test_progress_is_told_with_time_left(bench: Any, seen: list[Status]) -> None:
    bench(repeat=2)

    decoding = [status for status in seen if status.doing == "decode"]
    assert [status.n_runs_done for status in decoding] == [0, 1, 2, 3]
    for status in decoding:
        assert status.n_runs == 4
        assert status.left_s is not None
    doing = {status.doing for status in seen}
    assert {"loading the model", "creating the context", "warming up"} <= doing


def fill_the_disk(
    fake_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, n_kept: int
) -> None:
    """The disk is full from the run after `n_kept` ones on."""
    runs = iter(range(9))

    def refuse(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(n_prompt: int, n_gen: int) -> None:
        if next(runs) == n_kept:
            monkeypatch.setattr("os.fsync", refuse)

    fake_worker.on_run = fill


def test_a_disk_that_fills_up_is_told_and_earlier_runs_stay(
    bench: Any, fake_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill_the_disk(fake_worker, monkeypatch, n_kept=2)
    with pytest.raises(LabError, match=r"cannot be written.*No space left") as problem:
        bench(repeat=1)
    assert "It contains the earlier runs" in problem.value.hint
    (path,) = (tmp_path / "results").iterdir()
    assert len(results.read([path]).records) == 2


def test_a_disk_without_room_for_a_run_keeps_no_file(
    bench: Any, fake_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill_the_disk(fake_worker, monkeypatch, n_kept=0)
    with pytest.raises(LabError, match=r"cannot be written.*No space left") as problem:
        bench(repeat=1)
    assert "It contains the earlier runs" not in problem.value.hint
    assert list((tmp_path / "results").iterdir()) == []


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
    next(runs)
    next(runs)
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
    n_steps = [len(run.steps.kind) for run in warm_ups(records)]
    assert n_steps == [3, 3]  # one warm-up for each engine


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


def test_rounds_end_when_every_interval_is_narrow(tmp_path: Path) -> None:
    until = Until(0.02, 30, None)
    worker, plan = plan_of(tmp_path, prompt_len="10,20", gen=5, repeat=1, until=until)
    runs = timed_runs(run_plan(worker, plan, tmp_path))
    assert plan.n_repeat == N_PILOT
    assert len(runs) == 2 * N_PILOT


def test_rounds_go_on_while_an_interval_is_wide(tmp_path: Path) -> None:
    until = Until(0.02, 9, None)
    worker, plan = plan_of(tmp_path, prompt_len="10,20", gen=5, repeat=1, until=until)
    shaky(worker, [0, 0, 0, 3, 0, 2, 1])
    runs = timed_runs(run_plan(worker, plan, tmp_path))
    assert max(run.repeat for run in runs) == 8
    for _, name, _ in wide_figures(runs, 0.02):
        assert name == "TPOT"


def test_every_round_has_an_engine_of_its_own(bench: Any, fake_worker: FakeWorker) -> None:
    records, _ = bench(repeat=3)
    engines = {(run.repeat, run.engine) for run in timed_runs(records)}
    assert engines == {(0, 1), (1, 2), (2, 3)}
    assert fake_worker.starts == 3
    assert fake_worker.contexts == [605] * 3


def test_lengths_that_cost_little_get_more_runs(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.chain([0.0], itertools.repeat(6.0))  # so the planned rounds took 6 s
    clock = types.SimpleNamespace(monotonic=lambda: next(moments))
    monkeypatch.setattr("lab.runner.session.time", clock)

    by_default, _ = bench()
    as_asked, _ = bench(repeat=3)

    lengths = [run.n_prompt for run in timed_runs(by_default)]
    assert lengths.count(10) == stats.fewest_for_interval()
    assert lengths.count(600) == 3
    assert len(timed_runs(as_asked)) == 6


def test_a_sentinel_stands_before_and_after_every_run(tmp_path: Path) -> None:
    worker, plan = plan_of(tmp_path, prompt_len="10", gen=5, repeat=3)
    runs = timed_runs(run_plan(worker, plan, tmp_path))
    assert len(runs) == 3
    for run in runs:
        assert run.noise is not None
        assert run.noise.sentinel_before_ns == 10 * MS
        assert run.noise.sentinel_after_ns == 10 * MS


# How much sessions differ


def test_compare_learns_from_the_sessions_where_the_results_are(tmp_path: Path) -> None:
    worker, plan = plan_of(tmp_path, prompt_len="16", gen=5, repeat=3)
    for session in range(4):
        list(execute(plan, worker, tmp_path / f"session-{session}.jsonl", lambda status: None))
    files = []
    for threads in (1, 2):
        _, plan_of_threads = plan_of(
            tmp_path, prompt_len="16", gen=5, repeat=3, threads=threads
        )
        path = tmp_path / f"threads-{threads}.jsonl"
        list(execute(plan_of_threads, worker, path, lambda status: None))
        files.append(path)
    status, out, err = run_lab("compare", *files, "--details")
    assert status == 0, err
    assert "from 5 sessions of this machine" in out  # one of the two has the setup of the four


# Sweeps and trials on the real engine, as a user runs them


def test_a_sweep_computes_what_independent_runs_compute(worker: Worker, mini: Path) -> None:
    vocabulary = worker.load(mini, SETTINGS)
    settings = dataclasses.replace(SETTINGS, n_ctx=256, n_ubatch=32, n_threads=1)
    worker.new_context(dataclasses.replace(settings, n_threads_batch=1))
    prompt = prompts.random_ids(150, vocabulary.n_vocab, None, 1, 0)
    seen: list[Progress] = []
    swept = worker.run(scripts.sweep(prompt, 5, 32, 64), seen.append)
    run = dataclasses.replace(
        make_run(150, 5), steps=swept.steps, token_ids=swept.token_ids, case={"every": 64}
    )
    legs = phases.by_length(run)
    assert [leg.n_prompt for leg in legs] == [64, 128, 150]
    for number, leg in enumerate(legs):
        script = scripts.run(prompt[: leg.n_prompt], 5, 32)
        independent = worker.run(script, lambda progress: None)
        answer = swept.token_ids[5 * number : 5 * number + 5]
        assert answer == independent.token_ids  # nothing of what was forgotten is left
        assert leg.steps.kind == independent.steps.kind
        assert leg.steps.n_tokens == independent.steps.n_tokens
        assert leg.steps.n_past == independent.steps.n_past


@pytest.mark.usefixtures("undisturbed")
def test_sweep_command(tmp_path: Path) -> None:
    options = "sweep --max-len 128 -e 32 -u 32 -n 3 -r 2 -t 1 -o"

    code, out, _ = run_lab(*options.split(), tmp_path)

    assert code == 0
    assert "at each length" in out
    assert "Prefill time: T(P) = " in out
    assert "Time per token: t(p) = " in out
    assert len(list(tmp_path.glob("*-sweep.png"))) == 1
    assert list(tmp_path.glob("*-decode.png")) == []
    rows = summaries.summary(table.runs(results.read([tmp_path]).records))
    assert rows.n_prompt.tolist() == list(range(32, 129, 32))
    assert set(rows.repeats) == {2}
    assert rows.prefill_s.is_monotonic_increasing
    assert run_lab("show", tmp_path)[0] == 0


def test_until_command(mini: Path, tmp_path: Path) -> None:
    options = "--prompt random -p 8 -n 16 -r 1 -t 1 --no-plot --until 99% --max-repeats 8 -o"

    code, out, _ = run_lab("measure", "-m", mini, *options.split(), tmp_path)

    assert code == 0
    assert " runs; below each the 95 % interval" in out
    if "Intervals still wider than 99 %: " in out:  # on a busy machine
        assert len(results.read([tmp_path]).records) >= 8
    else:
        assert "All intervals are within 99 % of their medians." in out


def test_impossible_limits_of_repeats() -> None:
    _, _, err = run_lab("measure", "--until", "2%", "--max-repeats", "3")
    assert "--max-repeats 3 is too few" in err
    code, _, _ = run_lab("measure", "--until", "many")
    assert code == 1


def test_ab_and_compare_commands(mini: Path, tmp_path: Path) -> None:
    options = "--prompt random --repeat 2 -p 32 -n 4 -t 1 -o"

    code, out, err = run_lab(
        "ab", "--flash-attn on", "--flash-attn off", "-m", mini, *options.split(), tmp_path
    )

    assert code == 0, err
    assert "Measure longer: add --budget 10min" in out
    assert (
        "2 blocks are too few for a verdict on 2 figures: it needs at least --repeat 7." in err
    )
    assert "Unclear: 2 blocks; an interval needs 7" in out
    (path,) = tmp_path.glob("*.jsonl")
    code, out, err = run_lab("compare", path, "--json", "--base", "off")
    assert code == 0, err
    document = json.loads(out)
    assert document["differences"]["flash_attn"] == ["off", "on"]
    assert document["comparisons"][0]["rows"][0]["paired"] is True


def test_a_dry_run_says_how_long_it_will_take(mini: Path, tmp_path: Path) -> None:
    model = ("-m", mini, "--prompt", "random", "--threads", 1, "-o", tmp_path)

    status, out, err = run_lab("measure", *model, "-p", "10", "-n", 4, "--dry-run")
    assert status == 0, err
    assert "Plan: " in out
    assert "Time: about " in err
    status, out, err = run_lab("ab", "-u 8", "-u 16", *model, "-p", "10", "--dry-run")
    assert status == 0, err
    assert "No block begins that would end after 2 min" in err
    assert list(tmp_path.iterdir()) == []


def test_ab_of_two_models(shallow: Path, tmp_path: Path) -> None:
    options = "--repeat 1 -p 32 -n 4 -t 1 --json --no-plot -o"
    code, out, err = run_lab("ab", "", f"-m {shallow}", *options.split(), tmp_path)
    assert code == 0, err
    names = [label.partition(":")[0] for label in json.loads(out)["groups"]]
    assert names == ["A", "B"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads 2"], "two variants"),
        (["--threads 2", "--thread 1"], "--threads"),
        (["--threads 2", "--threads many"], "not a valid integer"),
        (["--threads 2", "--threads 0"], "--threads 0 is not possible"),
        (["--threads 2", "'"], "not understood"),
        (["--threads 2", "--repeat 2"], "--repeat"),
        (["-t 1", "-t 2", "--repeat", "0"], "--repeat 0"),
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
    assert out == ""
    assert says in err
    assert "Error" in err
    assert not (tmp_path / "none").exists()
