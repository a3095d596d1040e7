"""The time left that is shown while a run is slower than it was forecast: a planted machine with a
clock of its own."""

import dataclasses
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.process.wire import Progress
from lab.runner.in_flight import RunInFlight
from lab.runner.plan import make_plan
from lab.runner.progress import DECODE, PREFILL, Status
from lab.runner.session import execute
from tests.support.fake_worker import FakeWorker

TICK_S = 0.1


def left_by_time(
    run: RunInFlight,
    step_s: Callable[[int], float],
    token_s: float = 0.05,
    *,
    n_prefill: int = 10_000,
    n_gen: int = 64,
    n_ubatch: int = 512,
) -> list[tuple[float, float]]:
    """(time, seconds left as told), ten times a second, of a run whose steps take `step_s` of the
    tokens before them (512 tokens)."""
    ends: list[tuple[float, Progress]] = []
    now = 0.0
    for n_past in range(0, n_prefill, n_ubatch):
        n = min(n_ubatch, n_prefill - n_past)
        now += step_s(n_past) * n / n_ubatch
        ends.append((now, Progress(min(n_prefill, n_past + n_ubatch), ())))
    for n in range(1, n_gen + 1):
        now += token_s
        ends.append((now, Progress(n_prefill, tuple(range(n)))))
    estimates = []
    progress = Progress(0, ())
    for i in range(int(now / TICK_S)):
        at_s = i * TICK_S
        while ends and ends[0][0] <= at_s:
            _, progress = ends.pop(0)
        estimates.append((at_s, run.rest_s(progress, at_s)))
    return [*estimates, (now, run.rest_s(Progress(n_prefill, tuple(range(n_gen))), now))]


FORECAST_S = 60.0
N_STEPS = 20
MACHINES: dict[str, Callable[[int], float]] = {
    # The seconds of a step; forecast were 3 s for each
    "as forecast": lambda n_past: 3.0,
    "three times slower": lambda n_past: 9.0,
    "ten times slower": lambda n_past: 30.0,
    "twice as fast": lambda n_past: 1.5,
    "slower with every token, as by attention": lambda n_past: 1 + 16 * n_past / 10_000,
    "slow attention only": lambda n_past: 0.2 + 36 * n_past / 10_000,
    "slower by turns, beside other work": lambda n_past: 4.0 if n_past // 512 % 2 else 8.0,
    "quiet, then beside other work": lambda n_past: 3.0 if n_past < 5000 else 9.0,
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_time_left_comes_down_steadily(name: str) -> None:
    """After three tenths it falls in every further tenth of the run, and is near the truth."""
    run = RunInFlight((FORECAST_S, 3.2), 10_000, 64)
    estimates = left_by_time(run, MACHINES[name])
    end_s, last_s = estimates[-1]
    assert last_s == 0
    changes_late = name.startswith("quiet, then")
    marks = [left_s for at_s, left_s in estimates if at_s >= 0.3 * end_s][
        :: int(0.1 * end_s / TICK_S)
    ]
    if not changes_late:
        for before_s, after_s in itertools.pairwise(marks):
            assert after_s < before_s - 0.01 * end_s, marks
    for at_s, left_s in estimates:
        if at_s >= (0.7 if changes_late else 0.3) * end_s:
            assert left_s == pytest.approx(end_s - at_s, rel=0.5, abs=0.06 * end_s), (
                at_s,
                estimates,
            )


@pytest.mark.parametrize("name", MACHINES)
def test_it_never_stands_still(name: str) -> None:
    """Whole seconds are shown; no value stays for more than three seconds."""
    estimates = left_by_time(RunInFlight((FORECAST_S, 3.2), 10_000, 64), MACHINES[name])
    shown = [round(left_s) for _, left_s in estimates]
    longest = 0
    n_equal = 0
    for before, after in itertools.pairwise(shown):
        n_equal = n_equal + 1 if before == after else 0
        longest = max(longest, n_equal)
    assert longest * TICK_S <= 3.0


def test_attention_that_was_forecast_is_no_slowness() -> None:
    """Half of the work grows with the square of the tokens: the time left is true from the first
    step on."""
    run = RunInFlight((FORECAST_S, 3.2), 10_000, 64, linear=0.5)

    def step_s(n_past: int) -> float:
        first = n_past / 10_000
        last = min(10_000, n_past + 512) / 10_000
        return FORECAST_S * (0.5 * (last - first) + 0.5 * (last**2 - first**2))

    estimates = left_by_time(run, step_s)
    end_s = estimates[-1][0]
    for at_s, left_s in estimates:
        assert left_s == pytest.approx(end_s - at_s, abs=3)


def test_a_short_run_says_little_about_others() -> None:
    run = RunInFlight((0.1, 0.1), 10, 4)
    run.rest_s(Progress(10, (1,)), 0.9)
    assert 1 < run.slowness(0.9) < 3
    long = RunInFlight((10.0, 0.1), 5120, 4)
    for n in range(1, 6):
        long.rest_s(Progress(512 * n, ()), 3.0 * n)
    assert long.slowness(15.0) == pytest.approx(3, rel=0.1)


def test_prefill_and_decode_by_turns() -> None:
    """A sweep decodes after every 512 tokens; it is three times slower than forecast."""
    run = RunInFlight((10.0, 10.0), 5120, 40)
    for n in range(1, 11):
        left_s = run.rest_s(Progress(512 * n, tuple(range(4 * n))), 6.0 * n)
        if n > 4:
            assert left_s == pytest.approx(60 - 6 * n, rel=0.4, abs=1)


# A whole session


class TickingMachine:
    """A clock that the steps of a fake engine advance, and what the lab told at which time."""

    def __init__(
        self,
        worker: FakeWorker,
        monkeypatch: pytest.MonkeyPatch,
        slowness_of: Callable[[int], float],
    ) -> None:
        self.now = 0.0
        self.estimates: list[tuple[float, Status]] = []
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("lab.runner.progress.time", clock)
        monkeypatch.setattr("lab.runner.session.time", clock)
        monkeypatch.setattr("lab.runner.warm_engine.time", clock)
        run = worker.run

        def slow_run(script: Any, watch: Any) -> Any:
            outcome = run(script, lambda progress: None)
            steps = outcome.steps
            slowness = slowness_of(sum(steps.n_tokens))
            n_prefilled = 0
            token_ids: tuple[int, ...] = ()
            for kind, n, start, end in zip(
                steps.kind, steps.n_tokens, steps.start_ns, steps.end_ns, strict=True
            ):
                for _ in range(10):
                    self.now += slowness * (end - start) / 1e10
                    watch(Progress(n_prefilled, token_ids))
                if kind == "prefill":
                    n_prefilled += n
                else:
                    token_ids = (*token_ids, 1)
            watch(Progress(n_prefilled, token_ids))
            slow = dataclasses.replace(
                steps,
                start_ns=tuple(round(slowness * ns) for ns in steps.start_ns),
                ready_ns=tuple(round(slowness * ns) for ns in steps.ready_ns),
                end_ns=tuple(round(slowness * ns) for ns in steps.end_ns),
            )
            return dataclasses.replace(outcome, steps=slow)

        monkeypatch.setattr(worker, "run", slow_run)

    def watch(self, status: Status) -> None:
        self.estimates.append((self.now, status))


def test_a_session_on_a_machine_that_is_three_times_slower_than_its_warm_up(
    fake_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = TickingMachine(fake_worker, monkeypatch, lambda n: 3.0 if n > 5000 else 1.0)
    fake_worker.model = dataclasses.replace(fake_worker.model, n_layer=None)
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    worker = fake_worker
    plan = make_plan(worker, "10,10000,20000", 50, 2, str(model))
    list(execute(plan, worker, tmp_path / "runs.jsonl", machine.watch))
    estimates = []
    for at_s, status in machine.estimates:
        if status.doing in (PREFILL, DECODE) and status.left_s is not None:
            estimates.append((at_s, status.left_s))
    began_s = estimates[0][0]
    end_s = machine.now
    length_s = end_s - began_s
    assert length_s > 60
    late = [(at_s, left_s) for at_s, left_s in estimates if at_s > began_s + 0.1 * length_s]
    for at_s, left_s in late:
        assert left_s == pytest.approx(end_s - at_s, rel=0.35, abs=0.05 * length_s)
    # It falls in every twentieth of the session
    marks: list[float] = []
    due_s = 0.0
    for at_s, left_s in late:
        if at_s >= due_s:
            marks.append(left_s)
            due_s = at_s + length_s / 20
    assert len(marks) > 12
    for before_s, after_s in itertools.pairwise(marks):
        assert after_s < before_s
