"""How long a session takes: forecast from its warm-ups, the time left, and what is shown
meanwhile."""

import dataclasses
import io
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from lab.core import cost, results
from lab.core.record import DECODE, PREFILL, Rate, Record
from lab.models import catalog, synthetic
from lab.process.wire import ATTENTION, PLAIN_ATTENTION, Probe
from lab.runner import pace, trial
from lab.runner.attention_probe import time_attention
from lab.runner.cases import Case, measured_run
from lab.runner.forecast import (
    DECODE_KINDS,
    AttentionRates,
    Forecast,
    planned_shapes,
    work_of_plan,
)
from lab.runner.plan import make_plan
from lab.runner.progress import Status
from lab.runner.session import dear_case, execute, is_as_sure
from lab.show import console
from lab.show.so_far import SoFar
from tests.bench import slope
from tests.support.fake_worker import FakeWorker
from tests.support.records import SETTINGS, make_record, make_run

ROOT = Path(__file__).parent.parent
LOAD_S = 2.0  # an engine of the simulated machine starts


# Forecasts of real sessions, from their warm-ups


def seconds_of(record: Record) -> tuple[float, float]:
    """What prefill and decode of a run took."""
    prefill_ns = 0
    decode_ns = 0
    steps = record.run.steps
    for kind, start, end in zip(steps.kind, steps.start_ns, steps.end_ns, strict=True):
        if kind in DECODE_KINDS:
            decode_ns += end - start
        else:
            prefill_ns += end - start
    return prefill_ns / 1e9, decode_ns / 1e9


def case_of(record: Record) -> Case:
    return Case(record.run.n_prompt, record.run.n_gen, record.run.every)


@pytest.mark.parametrize(
    ("sample", "n_cases"),
    [
        ("smollm2-135m-amd-epyc", 3),
        ("sweep-smollm2-135m-amd-epyc", 1),
        ("synthetic-llama-3.2-3b-q4_0-amd-epyc", 3),
        ("synthetic-phi-3-mini-q4_0-amd-epyc", 3),
        ("to-compare-smollm2-135m-amd-epyc", 2),
    ],
)
def test_warm_ups_tell_how_long_a_run_takes(sample: str, n_cases: int) -> None:
    path = ROOT / "results" / f"sample-{sample}.jsonl"
    records: Sequence[Any] = results.read([path]).records
    plan: Any = types.SimpleNamespace(
        model=records[0].model,
        settings=records[0].settings,
        n_tokens=lambda case: (case.n_prompt, case.n_generated),
        write=measured_run,
    )
    forecast = Forecast(work_of_plan(plan))
    runs: dict[Case, float] = {}
    for record in records:
        if record.run.warmup and not runs:
            forecast.learn(case_of(record), *seconds_of(record))
        if not record.run.warmup:
            runs.setdefault(case_of(record), sum(seconds_of(record)))
    assert len(runs) == n_cases
    for case, run_s in runs.items():
        forecast_s = sum(forecast.seconds(case) or ())
        assert 0.7 * run_s < forecast_s < 1.3 * run_s, case


@pytest.mark.parametrize("factor", [1, 15])
def test_attention_that_was_timed_at_the_longest_length_is_counted_by_its_own_rate(
    factor: float,
) -> None:
    """A kernel that is 15 times as slow as memory allows: the warm-ups hardly show it."""
    model = synthetic.model_of(catalog.find("smollm2-135m"), "Q4_1")
    rates = slope.Rates(15e9, 1e11, 0.6, 0.9, 0.0)
    plan: Any = types.SimpleNamespace(
        model=model,
        settings=SETTINGS,
        n_tokens=lambda case: (case.n_prompt, case.n_generated),
        write=measured_run,
    )

    def truth(case: Case) -> tuple[float, float]:
        both_s = {PREFILL: 0.0, DECODE: 0.0}
        for shape in planned_shapes(plan, case):
            plant = slope.Plant("kernel", shape.kind, 0, factor)
            both_s[shape.kind] += slope.seconds(model, shape, rates, plant)
        return both_s[PREFILL], both_s[DECODE]

    step = cost.step(model, 1, 10_000, 1)
    assert step
    decode_s = factor * step.kv_read_bytes / 15e9 / 0.6 / step.attention_flops
    forecast = Forecast(work_of_plan(plan))
    forecast.learn(Case(64, 4), *truth(Case(64, 4)))
    forecast.learn(Case(512, 1), *truth(Case(512, 1)))
    for n_prompt in (1000, 10_000):
        case = Case(n_prompt, 200)
        forecast.attention = AttentionRates(factor / 1e11 / 0.9, decode_s)
        assert forecast.seconds(case) == pytest.approx(truth(case), rel=0.1)
        if factor > 1:
            forecast.attention = None
            believed_s = forecast.computed(work_of_plan(plan)(case))
            assert sum(believed_s) < sum(truth(case)) / 1.3


def test_a_session_times_attention_first_and_runs_without_it_where_that_fails(
    fake_worker: FakeWorker, tmp_path: Path
) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    worker = fake_worker
    plan = make_plan(worker, "10,2000", 5, 1, model=str(model))
    probed: list[Probe] = []

    def probe(asked: Probe) -> Rate:
        probed.append(asked)
        return Rate(asked.op, asked.type, "CPU", 4, 16, 1, 1, 10**6, 10**6, (10**6,))

    assert time_attention(worker, plan) is None
    fake_worker.probe = probe  # type: ignore[method-assign, assignment]
    n_starts = fake_worker.starts
    assert time_attention(worker, plan) == AttentionRates(1e-9, 1e-9)
    assert [(one.n_tokens, one.n_positions) for one in probed] == [(64, 2005), (1, 2005)]
    assert fake_worker.starts == n_starts + 1
    assert {one.op for one in probed} == {ATTENTION}
    assert time_attention(worker, make_plan(worker, "10", 5, 1, model=str(model))) is None


def test_attention_of_an_architecture_without_flash_attention_is_timed_as_it_will_run(
    fake_worker: FakeWorker,
    tmp_path: Path,
) -> None:
    """Of auto llama.cpp makes off for Grok, whatever the device."""
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    fake_worker.model = dataclasses.replace(fake_worker.model, arch="grok")
    ops: list[str] = []

    def probe(asked: Probe) -> Rate:
        ops.append(asked.op)
        return Rate(asked.op, asked.type, "CPU", 4, 16, 1, 1, 10**6, 10**6, (10**6,))

    fake_worker.probe = probe  # type: ignore[method-assign, assignment]
    plan = make_plan(fake_worker, "2000", 5, 1, model=str(model))
    time_attention(fake_worker, plan)
    assert ops == [PLAIN_ATTENTION] * 2


def test_a_case_that_was_run_takes_as_long_as_it_took() -> None:
    forecast = Forecast(lambda case: pytest.fail("its work does not matter"))
    assert forecast.seconds(Case(10, 5)) is None


# A session on a simulated machine, where time passes only in the engine


class Machine:
    """A clock that the runs of a fake engine advance, and what the lab said at which time."""

    def __init__(self, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.said: list[tuple[float, Status]] = []
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("lab.runner.progress.time", clock)
        monkeypatch.setattr("lab.runner.session.time", clock)
        load = worker.load
        run = worker.run

        def slow_load(*arguments: object) -> Any:
            self.now += LOAD_S
            return load(*arguments)

        def slow_run(script: Any, watch: Any) -> Any:
            outcome = run(script, lambda progress: None)
            self.now += outcome.steps.end_ns[-1] / 1e9
            return outcome

        monkeypatch.setattr(worker, "load", slow_load)
        monkeypatch.setattr(worker, "run", slow_run)

    def watch(self, status: Status) -> None:
        self.said.append((self.now, status))


@pytest.fixture
def machine(fake_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(fake_worker, monkeypatch)


@pytest.fixture
def session(
    fake_worker: FakeWorker, machine: Machine, tmp_path: Path
) -> tuple[list[Record], float]:
    """A session with a dear length: its records, and its end."""
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    shape_unknown = dataclasses.replace(fake_worker.model, n_layer=None)
    fake_worker.model = shape_unknown  # its time is in proportion to its tokens
    worker = fake_worker
    plan = make_plan(worker, "10,600,20000", 50, model=str(model))
    records = list(execute(plan, worker, tmp_path / "runs.jsonl", machine.watch))
    return records, machine.now


def test_a_session_says_once_how_long_it_takes(
    machine: Machine, session: tuple[list[Record], float]
) -> None:
    records, end_s = session
    announced = [(at_s, status) for at_s, status in machine.said if status.announcement]
    assert len(announced) == 1
    at_s, status = announced[0]
    n_runs = len([record for record in records if not record.run.warmup])
    assert status.announcement.startswith(f"{n_runs} runs: about ")
    assert status.left_s == pytest.approx(end_s - at_s, rel=0.3)


def test_the_time_left_is_true_after_the_first_round(
    machine: Machine, session: tuple[list[Record], float]
) -> None:
    _, end_s = session
    n_checked = 0
    for at_s, status in machine.said:
        true_s = end_s - at_s
        if status.n_runs_done < 3 or status.left_s is None or true_s < 5:
            continue
        assert status.left_s == pytest.approx(true_s, rel=0.25, abs=2), (at_s, status)
        n_checked += 1
    assert n_checked > 5


def test_a_dear_length_that_varies_no_more_than_others_gets_two_runs(
    session: tuple[list[Record], float],
) -> None:
    records, _ = session
    lengths = [record.run.n_prompt for record in records if not record.run.warmup]
    assert lengths.count(20000) == 2
    assert lengths.count(600) == lengths.count(10) == 6


def test_the_pace_of_one_plan_tells_how_long_others_take(
    fake_worker: FakeWorker, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace(monotonic=lambda: machine.now)
    monkeypatch.setattr("lab.runner.pace.time", clock)
    fake_worker.model = dataclasses.replace(fake_worker.model, n_layer=None)
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    worker = fake_worker
    plan, long_plan = (make_plan(worker, n, 50, model=str(model)) for n in ("10", "600,2000"))
    speed = pace.measured(worker, plan, machine.watch)
    began_s = machine.now
    path = tmp_path / "runs.jsonl"
    plans = {"A": long_plan, "B": long_plan}
    list(trial.execute(plans, trial.Blocks(3, 1), path, machine.watch, lambda: worker))
    took_s = machine.now - began_s
    assert speed.seconds([long_plan, long_plan], 3) == pytest.approx(took_s, rel=0.3)


SHORT = Case(10, 5)
LONG = Case(1000, 5)


def test_dear_is_what_takes_most_of_a_round() -> None:
    assert dear_case({SHORT: 1.0, LONG: 60.0}) == LONG
    assert dear_case({SHORT: 1.0, LONG: 5.0}) is None  # too short to save anything
    assert dear_case({SHORT: 40.0, LONG: 40.0}) is None
    assert dear_case({}) is None


@pytest.mark.parametrize(
    ("decode_ms_of_long", "is_sure"),
    [
        ((20.0, 20.5), True),
        ((20.0, 25.0), False),  # more than from 10 to 11
        ((20.0,), False),
        ((20.0, 20.5, 90.0), True),  # compared over two runs each
    ],
)
def test_a_length_is_as_sure_as_the_least_sure_one(
    decode_ms_of_long: tuple[float, ...], is_sure: bool
) -> None:
    runs = {
        SHORT: [make_run(10, 5, decode_ms=10), make_run(10, 5, decode_ms=11)],
        LONG: [make_run(1000, 5, decode_ms=ms) for ms in decode_ms_of_long],
    }
    assert is_as_sure(LONG, runs) is is_sure


def test_a_single_length_is_not_compared() -> None:
    runs = {LONG: [make_run(1000, 5), make_run(1000, 5, decode_ms=11)]}
    assert not is_as_sure(LONG, runs)


# The table so far


def lines_of(table: SoFar) -> list[list[str]]:
    grid = table.grid()
    assert grid is not None
    out = console.Terminal(file=io.StringIO(), width=100)
    out.print(grid)
    return [line.split() for line in cast(io.StringIO, out.file).getvalue().splitlines()]


def test_the_table_so_far_counts_the_runs_of_each_length() -> None:
    table = SoFar()
    assert table.grid() is None
    table.add(make_record(make_run(20, 5, warmup=True)))
    assert table.grid() is None
    table.add(make_record(make_run(2000, 5)))
    table.add(make_record(make_run(20, 5, decode_ms=10)))
    table.add(make_record(make_run(20, 5, decode_ms=12)))
    *_, of_20, of_2000 = lines_of(table)
    assert of_20 == ["20", "0.0200", "1,000", "12.0", "83.3", "0.0690", "2", "runs"]
    assert (of_2000[0], of_2000[-2:]) == ("2,000", ["1", "run"])


def test_the_table_so_far_names_variants() -> None:
    table = SoFar()
    for variant in ("A: --threads 1", "B: --threads 2"):
        table.add(make_record(make_run(20, 5, variant=variant)))
    heading, *_, of_b = lines_of(table)
    assert heading[0] == "prompt"
    assert of_b[:4] == ["B:", "--threads", "2", "20"]


def test_the_table_so_far_of_a_sweep_has_few_rows() -> None:
    table = SoFar()
    table.add(make_record(make_run(400, 2, every=10)))
    rows = lines_of(table)[2:]
    assert len(rows) == 8
    assert rows[-1][0] == "400"


def test_a_terminal_shows_the_table_while_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = console.Terminal(file=io.StringIO(), width=100, force_terminal=True, highlight=False)
    with console.progress(err, None, str, SoFar()) as (watch, show_finished):
        watch(Status("loading", announcement="9 runs: about 3 min 10 s"))
        show_finished(make_record(make_run(20, 5)))
        watch(Status("prefill", left_s=60))
        watch(Status("prefill", note="the engine ended"))
    shown = cast(io.StringIO, err.file).getvalue()
    assert shown.count("9 runs: about 3 min 10 s") == 1
    assert "1 run" in shown
    assert "prefill; about 1 min 0 s left" in shown
    assert "Note: the engine ended" in shown


def test_elsewhere_each_run_is_a_line() -> None:
    err = console.Terminal(file=io.StringIO(), width=100)
    with console.progress(err, None, lambda line: "a line", SoFar()) as (watch, show_finished):
        watch(Status("loading", announcement="9 runs: about 3 min 10 s"))
        show_finished(make_record(make_run(20, 5)))
    assert cast(io.StringIO, err.file).getvalue() == "9 runs: about 3 min 10 s\na line\n"


def test_a_note_is_printed_once() -> None:
    """Each engine of a long session may find the machine busy."""
    err = console.Terminal(file=io.StringIO(), width=200)
    with console.progress(err, None, lambda line: "a line", SoFar()) as (watch, _):
        for note in ("the machine is busy", "b2 is left out", "the machine is busy"):
            watch(Status("loading", note=note))
    shown = cast(io.StringIO, err.file).getvalue()
    assert shown == "Note: the machine is busy\nNote: b2 is left out\n"
