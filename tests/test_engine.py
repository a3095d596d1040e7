"""The timed loop, exactly, with a fake engine and a fake clock."""

import dataclasses
from functools import partial

from lab.core import phases, script as scripts
from lab.core.record import COPY, DECODE, FORGET, LOAD, MIXED, PREFILL, SAVE
from lab.core.script import Operation, Part
from lab.engine import loop
from tests.support.records import MS, exact_steps, make_run


def test_steps_of_a_prompt_in_three_chunks_and_four_tokens() -> None:
    steps = exact_steps(n_prompt=20, n_gen=4, n_ubatch=8)
    assert steps.kind == (PREFILL,) * 3 + (DECODE,) * 3
    assert steps.n_tokens == (8, 8, 4, 1, 1, 1)
    assert steps.n_past == (0, 8, 16, 20, 21, 22)
    assert steps.start_ns == tuple(t * MS for t in (0, 8, 16, 21, 32, 43))
    assert steps.ready_ns == tuple(t * MS for t in (8, 16, 20, 31, 42, 53))
    assert steps.end_ns == tuple(t * MS for t in (8, 16, 21, 32, 43, 54))


def test_the_loop_executes_and_chooses_in_order_and_counts_the_prompt() -> None:
    order: list[str] = []
    actions: list[loop.Action] = [
        (partial(order.append, "chunk0"), None, 2),
        (
            partial(order.append, "chunk1"),
            partial(order.append, "choose"),
            3,
        ),
        (
            partial(order.append, "token"),
            partial(order.append, "choose"),
            3,
        ),
        (partial(order.append, "forget"), None, 3),
    ]
    progress = [-1]
    clock = iter(range(100)).__next__
    stamps = loop.walk(actions, clock, progress)
    assert order == ["chunk0", "chunk1", "choose", "token", "choose", "forget"]
    # Where nothing is chosen, a step ends when it is ready.
    assert stamps == [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert progress == [3]


def test_shapes_of_a_script_count_positions_of_every_sequence() -> None:
    written = [
        *scripts.prefill(0, range(5), 4),
        *scripts.prefill(1, range(3), 4),
        *scripts.decode([0, 1], 2),
        Operation(FORGET, sequence=0, first=5),
        Operation(SAVE, sequence=0),
        Operation(COPY, sequence=0, target=2),
        Operation(MIXED, (Part(1, None, 1), Part(2, (7, 8), 1))),
        Operation(LOAD, sequence=3),
        Operation(DECODE, (Part(3, (9,), 1),)),
    ]
    shapes = [tuple(shape) for shape in scripts.shapes(written)]
    assert shapes == [
        (PREFILL, 4, 0, 1, 0),
        (PREFILL, 1, 4, 1, 1),
        (PREFILL, 3, 0, 1, 1),
        (DECODE, 2, 5, 2, 2),
        (DECODE, 2, 6, 2, 2),
        (FORGET, 0, 7, 1, 0),
        (SAVE, 0, 5, 1, 0),
        (COPY, 0, 5, 1, 0),
        (MIXED, 3, 5, 2, 2),
        (LOAD, 0, 5, 1, 0),
        (DECODE, 1, 5, 1, 1),
    ]
    assert scripts.n_prefilled(written) == 11
    assert scripts.n_chosen(written) == 9


def test_a_sweep_is_the_runs_that_it_stands_for() -> None:
    sweep = make_run(
        n_prompt=40,
        n_gen=3,
        every=16,
        per_position_ms=0.5,
    )
    assert [kind[0] for kind in sweep.steps.kind] == list("ppddfppddfpdd")
    assert sweep.steps.n_past == (0, 8, 16, 17, 18, 16, 24, 32, 33, 34, 32, 40, 41)
    legs = phases.by_length(sweep)
    assert [leg.n_prompt for leg in legs] == [16, 32, 40]
    for leg in legs:
        alone = make_run(
            n_prompt=leg.n_prompt,
            n_gen=3,
            per_position_ms=0.5,
        )
        assert leg.steps == alone.steps


def test_phases_of_a_run() -> None:
    run = make_run(n_prompt=20, n_gen=4)
    assert phases.prefill_ns(run) == 20 * MS
    assert phases.ttft_ns(run) == 21 * MS
    assert phases.itl_ns(run) == (11 * MS,) * 3
    assert phases.decode_compute_ns(run) == (10 * MS,) * 3
    assert phases.tpot_ns(run) == 11 * MS
    assert phases.e2e_ns(run) == 54 * MS


def test_what_a_run_cannot_tell_is_none_and_not_zero() -> None:
    assert phases.tpot_ns(make_run(n_gen=1)) is None
    run = make_run(n_prompt=3, n_gen=3)
    steps = dataclasses.replace(run.steps, kind=(PREFILL, "verify", "verify"))
    drafted = dataclasses.replace(run, steps=steps)
    assert phases.decode_compute_mean_ns(drafted) is None  # every token was drafted
    failed = make_run(status="failed")
    for figure in (phases.prefill_ns, phases.ttft_ns, phases.tpot_ns, phases.e2e_ns):
        assert figure(failed) is None
