"""Every figure of a run's phases, counted by hand on runs of three to seven steps."""

import dataclasses
from typing import Any

import pytest

from lab.core import phases
from lab.core.record import DECODE, FAILED, FORGET, PREFILL, Run, Steps
from tests.support.records import SETTINGS, make_run

# Two prefill steps and three decode steps
STEPS = Steps(
    kind=(PREFILL, PREFILL, DECODE, DECODE, DECODE),
    n_tokens=(8, 4, 1, 1, 1),
    n_past=(0, 8, 12, 13, 14),
    start_ns=(100, 210, 330, 450, 580),
    ready_ns=(200, 310, 430, 560, 700),
    end_ns=(205, 320, 445, 570, 720),
    n_seq=(1, 1, 1, 1, 1),
    n_outputs=(0, 1, 1, 1, 1),
)


def run_of(steps: Steps, **changes: Any) -> Run:
    return dataclasses.replace(
        make_run(12, 4),
        steps=steps,
        **changes,
    )


RUN = run_of(STEPS)
ONE_DECODE_STEP = Steps(
    kind=(DECODE,),
    n_tokens=(5,),
    n_past=(0,),
    start_ns=(10,),
    ready_ns=(1_010,),
    end_ns=(1_010,),
    n_seq=(1,),
    n_outputs=(5,),
)


def test_each_phase_is_a_difference_of_stamps() -> None:
    assert phases.n_prefill_steps(RUN) == 2
    assert phases.prefill_ns(RUN) == 310 - 100
    assert phases.ttft_ns(RUN) == 320 - 100
    assert phases.itl_ns(RUN) == (445 - 320, 570 - 445, 720 - 570)
    assert phases.decode_compute_ns(RUN) == (100, 110, 120)
    assert phases.decode_compute_mean_ns(RUN) == 110
    assert phases.tpot_ns(RUN) == (720 - 320) / 3
    assert phases.e2e_ns(RUN) == 720 - 100


def test_a_run_that_failed_has_only_the_times_of_its_steps() -> None:
    failed = run_of(STEPS, status=FAILED)
    assert phases.prefill_ns(failed) is None
    assert phases.ttft_ns(failed) is None
    assert phases.tpot_ns(failed) is None
    assert phases.decode_compute_mean_ns(failed) is None
    assert phases.e2e_ns(failed) is None
    assert len(phases.itl_ns(failed)) == 3


def test_a_run_without_steps_has_no_times() -> None:
    empty = run_of(Steps())
    assert phases.prefill_ns(empty) is None
    assert phases.ttft_ns(empty) is None
    assert phases.decode_compute_mean_ns(empty) is None
    assert phases.e2e_ns(empty) is None
    assert phases.itl_ns(empty) == ()


@pytest.mark.parametrize(
    ("n_gen", "tpot_ns"),
    [
        (1, None),
        (2, 400),
        (5, 100),
    ],
)
def test_the_time_per_output_token_needs_two_tokens(n_gen: int, tpot_ns: float | None) -> None:
    assert phases.tpot_ns(run_of(STEPS, n_gen=n_gen)) == tpot_ns


def test_the_first_step_of_a_run_has_no_latency_before_it() -> None:
    assert phases.itl_ns(run_of(ONE_DECODE_STEP)) == ()


def test_an_imported_run_has_one_step_for_all_its_tokens_and_no_choice_of_them() -> None:
    imported = run_of(STEPS, imported_from="llama-bench")
    assert phases.prefill_ns(imported) == 210
    assert phases.ttft_ns(imported) is None
    assert phases.tpot_ns(imported) is None
    assert phases.e2e_ns(imported) is None
    decode = run_of(ONE_DECODE_STEP, imported_from="llama-bench")
    assert phases.decode_compute_mean_ns(decode) == 1_000 / 5


def test_prefill_steps_are_timed_unless_the_engine_waits_at_the_end() -> None:
    assert phases.times_prefill_steps(SETTINGS)
    at_the_end = dataclasses.replace(SETTINGS, prefill_wait="end")
    assert not phases.times_prefill_steps(at_the_end)


# A sweep: after each 4 tokens of the prompt, two tokens are generated and forgotten
SWEEP = run_of(
    Steps(
        kind=(PREFILL, DECODE, FORGET, PREFILL, DECODE, FORGET, PREFILL),
        n_tokens=(4, 1, 0, 4, 1, 0, 2),
        n_past=(0, 4, 4, 4, 8, 8, 8),
        start_ns=(0, 20, 35, 40, 70, 95, 100),
        ready_ns=(10, 28, 36, 55, 82, 96, 107),
        end_ns=(12, 30, 37, 60, 90, 97, 109),
        n_seq=(1, 1, 1, 1, 1, 1, 1),
        n_outputs=(1, 1, 0, 1, 1, 0, 1),
    ),
    case={"every": 4},
)


def test_a_sweep_is_a_run_for_each_length_without_what_was_generated_between() -> None:
    first, second, last = phases.by_length(SWEEP)
    assert first.n_prompt == 4
    assert second.n_prompt == 8
    assert last.n_prompt == 10
    assert first.steps.kind == (PREFILL, DECODE)
    assert first.steps.start_ns == (0, 20)
    assert first.steps.end_ns == (12, 30)
    # The second prefill step, and the decode step after it, begin when the first prefill is done.
    assert second.steps.kind == (PREFILL, PREFILL, DECODE)
    assert second.steps.start_ns == (0, 10, 40)
    assert second.steps.ready_ns == (10, 25, 52)
    assert second.steps.end_ns == (10, 30, 60)
    assert second.steps.n_past == (0, 4, 8)
    assert second.steps.n_outputs == (0, 1, 1)
    assert last.steps.kind == (PREFILL, PREFILL, PREFILL)
    assert last.steps.start_ns == (0, 10, 25)
    assert last.steps.end_ns == (10, 25, 34)
    assert last.steps.n_outputs == (0, 0, 1)
    assert last.token_ids == ()


def test_a_length_between_those_of_a_sweep_is_none_of_its_runs() -> None:
    sweep = dataclasses.replace(SWEEP, case={"every": 8})
    assert [run.n_prompt for run in phases.by_length(sweep)] == [8, 10]


def test_any_other_run_is_not_divided() -> None:
    assert phases.by_length(RUN) == (RUN,)
    empty = run_of(Steps(), case={"every": 4})
    assert phases.by_length(empty) == (empty,)
