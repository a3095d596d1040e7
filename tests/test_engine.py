"""The timed loop, exactly, with a fake engine and a fake clock."""

from lab.core import phases
from lab.core.record import DECODE, PREFILL
from lab.engine import loop
from lab.engine.loop import Leg
from tests.conftest import MS, exact_steps, make_run


def test_steps_of_a_prompt_in_three_chunks_and_four_tokens() -> None:
    steps = exact_steps(n_prompt=20, n_gen=4, n_ubatch=8)
    assert steps.kind == (PREFILL,) * 3 + (DECODE,) * 3
    assert steps.n_tokens == (8, 8, 4, 1, 1, 1)
    assert steps.n_past == (0, 8, 16, 20, 21, 22)
    assert steps.start_ns == tuple(t * MS for t in (0, 8, 16, 21, 32, 43))
    assert steps.ready_ns == tuple(t * MS for t in (8, 16, 20, 31, 42, 53))
    assert steps.end_ns == tuple(t * MS for t in (8, 16, 21, 32, 43, 54))


def test_a_single_token_needs_no_decode_step() -> None:
    steps = exact_steps(n_prompt=3, n_gen=1, n_ubatch=8)
    assert steps.kind == (PREFILL,)
    assert steps.end_ns == (4 * MS,)


def test_each_token_is_chosen_into_the_slot_that_the_next_step_reads() -> None:
    order: list[str] = []
    loop.walk(
        lambda batch: order.append(f"forward {batch}"),
        lambda slot: order.append(f"choose {slot}"),
        [
            Leg([(2, "chunk0"), (1, "chunk1")], ["token0", "token1"], ["slot0", "slot1", "slot2"]),
            Leg([(4, "chunk2")], [], ["slot3"]),
        ],
        lambda n_tokens: order.append(f"forget all after {n_tokens}"),
        iter(range(100)).__next__,
        progress := [-1],
    )
    assert order == [
        "forward chunk0",
        "forward chunk1",
        "choose slot0",
        "forward token0",
        "choose slot1",
        "forward token1",
        "choose slot2",
        "forget all after 3",
        "forward chunk2",
        "choose slot3",
    ]
    assert progress == [7]


def test_a_sweep_is_the_runs_that_it_stands_for() -> None:
    sweep = make_run(n_prompt=40, n_gen=3, every=16, per_position_ms=0.5)
    assert [kind[0] for kind in sweep.steps.kind] == list("ppddppddpdd")
    assert sweep.steps.n_past == (0, 8, 16, 17, 16, 24, 32, 33, 32, 40, 41)
    legs = phases.by_length(sweep)
    assert [leg.n_prompt for leg in legs] == [16, 32, 40]
    for leg in legs:
        alone = make_run(n_prompt=leg.n_prompt, n_gen=3, per_position_ms=0.5)
        assert leg.steps == alone.steps


def test_a_sweep_without_decoding() -> None:
    legs = phases.by_length(make_run(n_prompt=20, n_gen=1, every=8))
    assert [(leg.n_prompt, phases.ttft_ns(leg)) for leg in legs] == [(8, 9 * MS), (16, 17 * MS), (20, 21 * MS)]


def test_an_ordinary_run_is_its_own_only_leg() -> None:
    run = make_run()
    assert phases.by_length(run) == (run,)


def test_phases_of_a_run() -> None:
    run = make_run(n_prompt=20, n_gen=4)
    assert phases.prefill_ns(run) == 20 * MS
    assert phases.ttft_ns(run) == 21 * MS
    assert phases.itl_ns(run) == (11 * MS,) * 3
    assert phases.decode_compute_ns(run) == (10 * MS,) * 3
    assert phases.tpot_ns(run) == 11 * MS
    assert phases.e2e_ns(run) == 54 * MS
    assert phases.between_steps_ns(run) == (0,) * 5


def test_what_a_run_cannot_tell_is_none_and_not_zero() -> None:
    assert phases.tpot_ns(make_run(n_gen=1)) is None
    failed = make_run(status="failed")
    assert (phases.prefill_ns(failed), phases.ttft_ns(failed), phases.tpot_ns(failed), phases.e2e_ns(failed)) == (
        None,
        None,
        None,
        None,
    )
