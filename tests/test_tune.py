"""lab tune: a planted optimum is found, and nothing is recommended where nothing is faster."""

from __future__ import annotations

import dataclasses
import errno
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.app.options import seconds_of
from lab.core import results
from lab.core.record import OK, Device, Record, Settings
from lab.core.script import Script, shapes
from lab.errors import LabError
from lab.features.tune import figures, measuring, planning, section
from lab.features.tune.choices import DECODE, Choice, Timing, is_lossy, phases_of
from lab.features.tune.figures import Tuned
from lab.features.tune.lines import CONFIRM, REQUEST, SEARCH
from lab.features.tune.search import Search
from lab.process.wire import Outcome, Progress
from lab.runner import machine
from lab.runner.plan import make_plan
from tests.bench.tune import all_choices
from tests.support.fake_worker import FakeWorker, died
from tests.support.records import steps_of_shapes

SPACE: dict[str, list[Any]] = {
    "flash_attn": ["off"],
    "threads": [1],
    "threads_batch": [1],
    "ubatch": [64, 128, 256],
}
NO_FLASH: Choice = (("flash_attn", "off"),)


def searched(
    true_s: Callable[[str, Choice], float],
    seed: int,
    noise: float = 0.02,
    disturbed_run: int = -1,
) -> Search:
    """A search on a machine with these times, whose speed drifts from block to block.

    One run takes 3 times as long, and is marked as disturbed.
    """
    chance = random.Random(seed)
    phases = phases_of(REQUEST, 100, False)
    search = Search(all_choices(SPACE), phases)
    for block in range(25):
        mood = math.exp(chance.gauss(0, 0.1))
        for choice in search.next_block():
            is_disturbed = len(search.timings) == disturbed_run
            slow = 3 * mood if is_disturbed else mood
            seconds = {}
            for phase in phases:
                jitter = math.exp(chance.gauss(0, noise))
                seconds[phase.name] = slow * true_s(phase.name, choice) * jitter
            search.timings.append(Timing(block, choice, seconds, is_disturbed))
    return search


def only_together(name: str, choice: Choice) -> float:
    """Flash attention off helps only with small steps: each change alone is slower."""
    changes = dict(choice)
    if name == DECODE:
        return 0.015 if "threads" in changes else 0.01
    n_helpful = len({("ubatch", 64), ("flash_attn", "off")} & set(choice))
    seconds = [1.0, 1.05, 0.75][n_helpful]
    return 1.6 * seconds if "threads_batch" in changes else seconds


def without_flash(name: str, choice: Choice) -> float:
    return 0.8 if "flash_attn" in dict(choice) else 1.0


def test_a_planted_pair_is_found_where_each_change_alone_is_slower() -> None:
    searches = [searched(only_together, seed) for seed in range(10)]
    best = [search.best() for search in searches]
    assert best.count((("flash_attn", "off"), ("ubatch", 64))) >= 9
    assert len(searches[1].timings) < len(all_choices(SPACE))
    assert searches[1].next_block() == []


def test_one_disturbed_run_does_not_decide() -> None:
    choices = [timing.choice for timing in searched(without_flash, 3).timings]
    search = searched(without_flash, 3, disturbed_run=choices.index(NO_FLASH))
    assert search.best()[:1] == NO_FLASH


# The whole session, with a fake engine

Factors = Callable[[Settings], tuple[float, float]]  # of prefill and decode


class Planted(FakeWorker):
    """An engine whose times depend on its settings, on a machine whose clock it moves."""

    chance = random.Random(1)
    factors: Factors = staticmethod(lambda settings: (1.0, 1.0))
    now_s = 0.0

    def load(self, *asked: Any) -> Any:
        self.settings = asked[1]
        return super().load(*asked)

    def run(
        self,
        script: Script,
        watch: Callable[[Progress], None],
    ) -> Outcome:
        outcome = super().run(script, watch)
        prefill, decode = Planted.factors(self.settings)
        steps = steps_of_shapes(
            list(shapes(script)),
            prefill_ms=prefill * math.exp(Planted.chance.gauss(0, 0.01)),
            decode_ms=10 * decode * math.exp(Planted.chance.gauss(0, 0.01)),
        )
        Planted.now_s += steps.end_ns[-1] / 1e9
        return Outcome(steps, outcome.token_ids, None)


@pytest.fixture
def tiny(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    simulated: None,
) -> str:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(machine, "n_cores_usable", lambda: 2)
    monkeypatch.setattr(machine, "default_threads", lambda: 2)
    monkeypatch.setattr(Planted, "now_s", 0.0)
    return str(tmp_path / "tiny.gguf")


def session(
    tiny: str, factors: Factors, seed: int = 1, workers: Any = Planted, **options: Any
) -> list[Any]:
    Planted.factors = staticmethod(factors)
    Planted.chance = random.Random(seed)
    worker: Any = FakeWorker()
    asked = {
        "gen": 50,
        "budget": "5min",
        "seed": seed,
        **options,
    }
    plan = planning.plan(worker, 200, model=tiny, **asked)
    path = Path(tiny).parent / f"{seed}.jsonl"
    lines = measuring.execute(
        plan, worker, path, lambda status: None, workers, lambda: Planted.now_s
    )
    return list(lines)


def runs_of(lines: Sequence[Any]) -> list[Record]:
    return [line for line in lines if isinstance(line, Record)]


def tuned(lines: Sequence[Any]) -> Tuned:
    result = figures.tuned(lines)
    assert result is not None
    return result


def no_flash(settings: Settings) -> tuple[float, float]:
    """Without flash attention prefill takes 1.4 times as long, and decode 0.5 times."""
    return (1.4, 0.5) if settings.flash_attn == "off" else (1.0, 1.0)


def nothing_helps(settings: Settings) -> tuple[float, float]:
    return 1.0, 1.0


def test_a_session_finds_and_confirms(tiny: str) -> None:
    result = tuned(session(tiny, no_flash))
    assert result.is_recommended
    assert result.choice == NO_FLASH
    default_s = 0.201 + 49 * 0.011
    winner_s = 0.281 + 49 * 0.006  # with 1 ms to choose a token
    assert result.gain
    assert result.gain.low < default_s / winner_s < result.gain.high


def test_the_file_gives_the_same_result(tiny: str) -> None:
    result = tuned(session(tiny, no_flash))
    contents = results.read([Path(tiny).parent / "1.jsonl"])
    (again,) = figures.of_sessions(contents.all_lines)
    assert section.section(again).document() == section.section(result).document()


def test_only_fresh_blocks_give_the_gain(tiny: str) -> None:
    lines = session(tiny, no_flash)
    search_blocks = {run.run.block for run in runs_of(lines) if run.run.part == SEARCH}
    confirm_blocks = {run.run.block for run in runs_of(lines) if run.run.part == CONFIRM}
    assert search_blocks
    assert confirm_blocks
    assert not search_blocks & confirm_blocks
    searching = [run for run in runs_of(lines) if run.run.part == SEARCH]
    result = tuned([lines[0], *searching])
    assert result.gain is None
    assert not result.is_recommended


def test_nothing_is_recommended_where_nothing_is_faster(tiny: str) -> None:
    sessions = [session(tiny, nothing_helps, seed) for seed in range(4)]
    assert not any(tuned(lines).is_recommended for lines in sessions)


def test_a_choice_that_crashes_is_dropped_and_named(tiny: str) -> None:
    class Mortal(Planted):
        def new_context(self, asked: Settings) -> Settings:
            if asked.n_ubatch == 64:
                raise died()
            return super().new_context(asked)

    result = tuned(session(tiny, no_flash, workers=Mortal))
    assert result.is_recommended
    rows = [row for row in result.tried.itertuples() if row.choice == (("ubatch", 64),)]
    assert [math.isnan(row.time_s) for row in rows] == [True]
    assert "SIGSEGV" in rows[0].error


def test_a_default_that_cannot_run_ends_the_session(tiny: str) -> None:
    class Dead(Planted):
        def new_context(self, asked: Settings) -> Settings:
            raise died()

    with pytest.raises(LabError, match="The default cannot be measured"):
        session(tiny, no_flash, workers=Dead)


def test_a_full_disk_ends_the_session(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_saved = 0

    def fill(file: int) -> None:
        nonlocal n_saved
        n_saved += 1
        if n_saved > 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fill)
    with pytest.raises(LabError, match="cannot be written any more: No space left") as problem:
        session(tiny, no_flash)
    assert "It contains the earlier runs" in problem.value.hint
    assert len(results.read([Path(tiny).parent / "1.jsonl"]).all_lines) == 4


def test_given_settings_stay_fixed(tiny: str) -> None:
    records = runs_of(session(tiny, no_flash, flash_attn="on", threads=1))
    assert {record.settings.flash_attn for record in records} == {"on"}
    assert {record.settings.n_threads for record in records} == {1}


def choices_of(tiny: str, allow_lossy: bool) -> tuple[Choice, ...]:
    worker: Any = FakeWorker()
    return planning.plan(worker, 200, 50, tiny, allow_lossy=allow_lossy).choices


def test_only_allow_lossy_tries_settings_that_change_what_the_model_writes(tiny: str) -> None:
    assert {is_lossy(choice) for choice in choices_of(tiny, allow_lossy=False)} == {False}
    assert {is_lossy(choice) for choice in choices_of(tiny, allow_lossy=True)} == {False, True}


def test_attention_of_the_other_kind_is_tried_first(tiny: str) -> None:
    assert choices_of(tiny, allow_lossy=False)[0] == (("flash_attn", "off"),)
    assert choices_of(tiny, allow_lossy=True)[0] == (("flash_attn", "off"),)


CARD = Device("CUDA0", "A GPU", "gpu", 10**10)


@pytest.fixture
def with_card(fake_worker: FakeWorker) -> FakeWorker:
    fake_worker.build = dataclasses.replace(fake_worker.build, devices=(CARD,))
    fake_worker.free = {"CUDA0": 10**10}
    return fake_worker


@pytest.mark.parametrize(
    ("resolved", "asked", "expected"),
    [
        ("on", {}, ["off"]),
        ("off", {}, ["on"]),
        (None, {}, ["off", "on"]),  # llama.cpp did not say what it chose
        ("off", {"device": "none"}, ["off"]),  # the CPU computes it: not asked
        ("on", {"flash_attn": "off"}, ["on"]),
    ],
)
def test_the_kind_of_attention_that_auto_does_not_choose_is_tried(
    with_card: FakeWorker,
    tiny: str,
    resolved: str | None,
    asked: dict[str, Any],
    expected: list[str],
) -> None:
    with_card.resolve = lambda settings: resolved
    default = make_plan(with_card, [20], 4, 1, model=tiny, **asked)
    assert planning.other_attention(with_card, default) == expected


def test_an_architecture_without_flash_attention_has_no_other_kind(
    with_card: FakeWorker, tiny: str
) -> None:
    with_card.model = dataclasses.replace(with_card.model, arch="grok")
    default = make_plan(with_card, [20], 4, 1, model=tiny)
    assert planning.other_attention(with_card, default) == []
    assert with_card.loads == 0


def test_both_kinds_of_attention_are_tried_where_no_context_can_be_made(
    with_card: FakeWorker, tiny: str
) -> None:
    def refuse(n_ctx: int) -> None:
        raise died()

    with_card.on_context = refuse
    default = make_plan(with_card, [20], 4, 1, model=tiny)
    assert planning.other_attention(with_card, default) == ["off", "on"]


def test_packed_values_are_refused_where_an_architecture_has_no_flash_attention(
    fake_worker: FakeWorker,
) -> None:
    fake_worker.model = dataclasses.replace(fake_worker.model, arch="grok")
    with pytest.raises(LabError, match="switches off for grok"):
        make_plan(fake_worker, [10], 1, 1, cache_type_v="q8_0", watch=None)


def test_packed_values_are_tried_only_with_flash_attention(tiny: str) -> None:
    choices = map(dict, choices_of(tiny, allow_lossy=True))
    packed = [choice for choice in choices if "cache_type_v" in choice]
    assert packed
    assert all(choice.get("flash_attn") != "off" for choice in packed)


def slow_decode(on: float, off: float) -> Factors:
    """Decode takes so many times as long with flash attention, and without."""

    def factors(settings: Settings) -> tuple[float, float]:
        return 1.0, off if settings.flash_attn == "off" else on

    return factors


@pytest.mark.parametrize(
    ("factors", "gen", "budget_s"),
    [
        (slow_decode(1.02, 1.0), 50, 60),
        (slow_decode(10.0, 8.0), 300, 600),
        (slow_decode(10.0, 8.0), 1000, 700),
    ],
    ids=["quick", "slow", "too slow"],
)
def test_the_budget_is_kept(
    tiny: str,
    factors: Factors,
    gen: int,
    budget_s: float,
) -> None:
    lines = session(tiny, factors, gen=gen, budget=budget_s)
    assert Planted.now_s < 1.15 * budget_s
    assert {record.run.status for record in runs_of(lines)} == {OK}


def test_a_budget_for_four_blocks_confirms(tiny: str) -> None:
    """10 tokens per second: 4 blocks of two answers of 300 tokens take 4 minutes."""
    result = tuned(
        session(
            tiny,
            slow_decode(10.0, 8.0),
            gen=300,
            budget=600,
        )
    )
    assert result.n_confirmed >= 4
    assert result.is_recommended


def test_a_budget_for_fewer_blocks_says_that_a_larger_one_is_needed(tiny: str) -> None:
    """Four blocks of two answers of 1,000 tokens would take 13 minutes."""
    result = tuned(
        session(
            tiny,
            slow_decode(10.0, 8.0),
            gen=1000,
            budget=700,
        )
    )
    assert result.n_confirmed < 4
    assert not result.is_recommended
    assert "larger --budget" in section.sentences(result)[-1]


def test_the_budget_is_kept_where_the_winner_takes_longer_than_the_default(tiny: str) -> None:
    """--goal ttft: the first token comes in half the time, but an answer takes 3 times as long."""

    def factors(settings: Settings) -> tuple[float, float]:
        return (0.5, 3.0) if settings.flash_attn == "off" else (1.0, 1.0)

    result = tuned(
        session(
            tiny,
            factors,
            goal="ttft",
            gen=1500,
            budget=635,
        )
    )
    assert Planted.now_s < 1.06 * 635
    assert result.choice == NO_FLASH


@pytest.mark.parametrize("budget", ["", "5", "ten minutes", "25h", "-1min"])
def test_impossible_budgets(budget: str) -> None:
    with pytest.raises(LabError, match="--budget"):
        seconds_of(budget)


def test_beside_a_busy_program_how_threads_wait_is_tried_too(fake_worker: FakeWorker) -> None:
    default = make_plan(fake_worker, [20], 4, 1)
    assert "wait" not in planning.space(default, False)
    assert planning.space(default, False, 1)["wait"] == [300, "sleep"]
