"""lab tune: a planted optimum is found, and nothing is recommended where nothing is faster."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.app.options import seconds_of
from lab.core import results
from lab.core.record import OK, Record, Settings
from lab.core.script import Script, shapes
from lab.errors import LabError
from lab.features.tune import result as tuning, tuning as experiment
from lab.features.tune.result import (
    CONFIRM,
    DECODE,
    REQUEST,
    SEARCH,
    Choice,
    Search,
    Timing,
    phases_of,
)
from lab.process.wire import Outcome, Progress
from lab.runner import machine
from tests.bench.tune import every
from tests.conftest import FakeWorker, died, steps_of_shapes

SPACE: dict[str, list[Any]] = {
    "flash_attn": ["off"],
    "threads": [1],
    "threads_batch": [1],
    "ubatch": [64, 128, 256],
}


def searched(
    true_s: Callable[[str, Choice], float], seed: int, noise: float = 0.02, spiked: int = -1
) -> Search:
    """A search on a machine with these times, whose speed drifts from block to block; one run takes 3 times as long."""
    chance = random.Random(seed)
    of = phases_of(REQUEST, 100, False)
    search = Search(every(SPACE), of)
    for block in range(25):
        mood = math.exp(chance.gauss(0, 0.1))
        for choice in search.next_block():
            is_spike = len(search.timings) == spiked
            slow = mood * (3 if is_spike else 1)
            seconds = {
                one.name: slow * true_s(one.name, choice) * math.exp(chance.gauss(0, noise))
                for one in of
            }
            search.timings.append(Timing(block, choice, seconds, is_spike))
    return search


def pair_only(name: str, choice: Choice) -> float:
    """Flash attention off helps only with small steps: each change alone makes the request slower."""
    own = dict(choice)
    if name == DECODE:
        return 0.01 * (1.5 if "threads" in own else 1.0)
    both = own.get("ubatch") == 64 and "flash_attn" in own
    either = 1.05 if own.get("ubatch") == 64 or "flash_attn" in own else 1.0
    return 1.0 * (0.75 if both else either) * (1.6 if "threads_batch" in own else 1.0)


def test_a_planted_pair_is_found_where_each_change_alone_is_slower() -> None:
    found = [searched(pair_only, seed) for seed in range(10)]
    assert [search.best() for search in found].count((("flash_attn", "off"), ("ubatch", 64))) >= 9
    assert (
        len(found[1].timings) < len(every(SPACE)) and found[1].next_block() == []
    )  # a part of the choices


def test_one_disturbed_run_does_not_decide() -> None:
    true_s = lambda name, choice: 0.8 if "flash_attn" in dict(choice) else 1.0  # noqa: E731
    numbers = [
        i
        for i, one in enumerate(searched(true_s, 3).timings)
        if one.choice == (("flash_attn", "off"),)
    ]
    assert searched(true_s, 3, spiked=numbers[0]).best()[:1] == (("flash_attn", "off"),)


# The whole session, with a fake engine


class Planted(FakeWorker):
    """An engine whose times depend on its settings, with noise, on a machine whose clock it moves."""

    chance = random.Random(1)
    factor: Callable[[Settings], tuple[float, float]] = staticmethod(lambda settings: (1.0, 1.0))
    now_s = 0.0

    def load(self, *asked: Any) -> Any:
        self.settings = asked[1]
        return super().load(*asked)

    def run(self, script: Script, watch: Callable[[Progress], None]) -> Outcome:
        outcome = super().run(script, watch)
        prefill, decode = (
            own * math.exp(Planted.chance.gauss(0, 0.01)) for own in Planted.factor(self.settings)
        )
        steps = steps_of_shapes(list(shapes(script)), prefill_ms=prefill, decode_ms=10 * decode)
        Planted.now_s += steps.end_ns[-1] / 1e9
        return Outcome(steps, outcome.token_ids, None)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: None) -> str:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(machine, "n_cores_usable", lambda: 2)
    monkeypatch.setattr(machine, "default_threads", lambda: 2)
    return str(tmp_path / "tiny.gguf")


def session(
    tiny: str,
    factor: Callable[[Settings], tuple[float, float]],
    seed: int = 1,
    workers: Any = Planted,
    **asked: Any,
) -> list[Record]:
    Planted.factor = staticmethod(factor)
    Planted.chance = random.Random(seed)
    worker: Any = FakeWorker()
    plan = experiment.plan(
        worker, 200, model=tiny, **{"gen": 50, "budget": "5min", "seed": seed, **asked}
    )
    path = Path(tiny).parent / f"{seed}.jsonl"
    return list(
        experiment.execute(plan, worker, path, lambda status: None, workers, lambda: Planted.now_s)
    )


def no_flash(settings: Settings) -> tuple[float, float]:
    """Without flash attention prefill takes 1.4 times as long, and decode 0.5 times."""
    return (1.4, 0.5) if settings.flash_attn == "off" else (1.0, 1.0)


def test_a_session_finds_and_confirms(tiny: str) -> None:
    found = tuning.tuned(session(tiny, no_flash))
    assert found is not None and found.is_recommended and found.gain is not None
    assert found.choice == (("flash_attn", "off"),)
    default_s = 0.201 + 49 * 0.011
    winner_s = 0.281 + 49 * 0.006  # with 1 ms to choose a token
    assert found.gain.low < default_s / winner_s < found.gain.high


def test_only_fresh_blocks_give_the_gain_and_the_file_gives_the_same(tiny: str) -> None:
    records = session(tiny, no_flash)
    kept = results.read([Path(tiny).parent / "1.jsonl"]).records
    (again,) = tuning.of_sessions(kept)
    found = tuning.tuned(records)
    assert (
        found is not None and tuning.section(again).document() == tuning.section(found).document()
    )
    assert tuning.without(kept) == []
    stages = {
        stage: {r.run.block for r in records if r.run.tuning and r.run.tuning.stage == stage}
        for stage in (SEARCH, CONFIRM)
    }
    assert stages[SEARCH] and stages[CONFIRM] and not stages[SEARCH] & stages[CONFIRM]
    search_only = tuning.tuned(
        [r for r in records if r.run.tuning and r.run.tuning.stage == SEARCH]
    )
    assert search_only is not None and search_only.gain is None and not search_only.is_recommended


def test_nothing_is_recommended_where_nothing_is_faster(tiny: str) -> None:
    found = [tuning.tuned(session(tiny, lambda settings: (1.0, 1.0), seed)) for seed in range(4)]
    assert not any(one is not None and one.is_recommended for one in found)


def test_a_choice_that_crashes_is_dropped_and_named(tiny: str) -> None:
    class Mortal(Planted):
        def new_context(self, asked: Settings) -> Settings:
            if asked.n_ubatch == 64:
                raise died()
            return super().new_context(asked)

    found = tuning.tuned(session(tiny, no_flash, workers=Mortal))
    assert found is not None and found.is_recommended
    (row,) = [one for one in found.tried.itertuples() if one.choice == (("ubatch", 64),)]
    assert math.isnan(row.time_s) and "SIGSEGV" in row.error


def test_a_default_that_cannot_run_ends_the_session(tiny: str) -> None:
    class Dead(Planted):
        def new_context(self, asked: Settings) -> Settings:
            raise died()

    with pytest.raises(LabError, match="The default cannot be measured"):
        session(tiny, no_flash, workers=Dead)


def test_given_settings_stay_fixed(tiny: str) -> None:
    records = session(tiny, no_flash, flash_attn="on", threads=1)
    assert {record.settings.flash_attn for record in records} == {"on"}
    assert {record.settings.n_threads for record in records} == {1}


def test_only_allow_lossy_tries_settings_that_change_what_the_model_writes(tiny: str) -> None:
    plans = [
        experiment.plan(FakeWorker(), 200, 50, tiny, allow_lossy=lossy) for lossy in (False, True)
    ]  # type: ignore[arg-type]
    of, of_lossy = ({tuning.is_lossy(choice) for choice in plan.choices} for plan in plans)
    assert of == {False} and of_lossy == {False, True}
    packed = [dict(choice) for choice in plans[1].choices if "cache_type_v" in dict(choice)]
    assert packed and all(choice.get("flash_attn") != "off" for choice in packed)


@pytest.mark.parametrize(
    ("decode", "gen", "budget_s", "n_confirmed"),
    [
        ((1.02, 1.0), 50, 60, range(99)),
        ((10.0, 8.0), 300, 600, range(4, 99)),
        ((10.0, 8.0), 1000, 700, range(4)),
    ],
)
def test_the_budget_is_kept(
    tiny: str, decode: tuple[float, float], gen: int, budget_s: float, n_confirmed: range
) -> None:
    """10 tokens per second: 4 blocks of two answers of 300 tokens take 4 minutes, of 1,000 tokens 13."""
    Planted.now_s = 0.0
    records = session(
        tiny, lambda settings: (1.0, decode[settings.flash_attn == "off"]), gen=gen, budget=budget_s
    )
    assert (
        records
        and Planted.now_s < 1.15 * budget_s
        and all(record.run.status == OK for record in records)
    )
    found = tuning.tuned(records)
    assert found is not None and found.n_confirmed in n_confirmed
    assert gen < 300 or found.is_recommended == (found.n_confirmed >= 4)
    assert gen < 1000 or "larger --budget" in tuning.sentences(found)[-1]


def test_the_budget_is_kept_where_the_winner_takes_longer_than_the_default(tiny: str) -> None:
    """--goal ttft: the first token comes in half the time, but an answer takes 3 times as long."""
    Planted.now_s = 0.0
    times = {"off": (0.5, 3.0)}
    records = session(
        tiny, lambda of: times.get(of.flash_attn, (1, 1)), goal="ttft", gen=1500, budget=635
    )
    found = tuning.tuned(records)
    assert (
        Planted.now_s < 1.06 * 635
        and found is not None
        and found.choice == (("flash_attn", "off"),)
    )


@pytest.mark.parametrize("budget", ["", "5", "ten minutes", "25h", "-1min"])
def test_impossible_budgets(budget: str) -> None:
    with pytest.raises(LabError, match="--budget"):
        seconds_of(budget)
