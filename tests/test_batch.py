"""Sequences decoded together: exactly with a fake engine, and on the embedded model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lab.app import kinds
from lab.core import cost, experiments, memory, results, script as scripts
from lab.core.experiments import case_of
from lab.core.record import COPY, DECODE, PREFILL, Record, Run, Settings
from lab.core.script import Operation
from lab.errors import LabError
from lab.features import batch as room
from lab.process.worker import Worker
from lab.roofline import kernel_rates, learning
from lab.roofline.step_prediction import StepPrediction
from lab.runner import batches
from lab.runner.batches import Batch
from lab.runner.cases import Plan
from lab.runner.session import execute, new_results_file
from lab.show import canvas, comparison
from lab.show.section import WIDE
from tests.bench import doubt
from tests.support import miniature
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.records import (
    MACHINE,
    MODEL,
    SETTINGS,
    column,
    make_record,
)
from tests.support.sessions import KERNELS, batch_run, case, text


def plan(worker: FakeWorker, **asked: Any) -> Plan:
    defaults: dict[str, Any] = {
        "sequences": "1,4",
        "prompt_len": "256",
        "gen": 32,
    }
    return batches.plan(worker, **{**defaults, **asked})


def prefill_shapes(script: list[Operation]) -> list[tuple[int, int, int]]:
    """Tokens, sequences and outputs of each prefill step."""
    shapes = []
    for shape in scripts.shapes(script):
        if shape.kind == PREFILL:
            shapes.append((shape.n_tokens, shape.n_seq, shape.n_outputs))
    return shapes


EQUAL_SLICES = dataclasses.replace(SETTINGS, n_ubatch=50)
SMALL_BATCH = dataclasses.replace(SETTINGS, n_ubatch=20, n_batch=40)
ONE_CACHE = dataclasses.replace(SETTINGS, n_ubatch=50, kv_unified=True)


@pytest.mark.parametrize(
    ("n_seq", "settings", "expected"),
    [
        pytest.param(5, EQUAL_SLICES, [(50, 5, 0), (50, 5, 5)], id="equal slices"),
        pytest.param(
            3,
            SMALL_BATCH,
            [
                (20, 2, 0),
                (20, 2, 2),
                (20, 1, 1),
            ],
            id="those that fit",
        ),
        pytest.param(3, ONE_CACHE, [(40, 2, 2), (20, 1, 1)], id="one cache: whole prompts"),
    ],
)
def test_prompts_share_steps(
    n_seq: int, settings: Settings, expected: list[tuple[int, int, int]]
) -> None:
    script = batches.write(case(n_seq), text, settings)

    last_tokens = {}
    for operation in script:
        for part in operation.parts:
            if operation.kind == PREFILL and part.tokens:
                last_tokens[part.sequence] = part.tokens[-1]
    assert prefill_shapes(script) == expected
    assert last_tokens == {i: 100 * i + 19 for i in range(n_seq)}


def test_every_decode_step_has_a_token_of_each_sequence() -> None:
    script = batches.write(case(3), text, SETTINGS)

    decode = [shape for shape in scripts.shapes(script) if shape.kind == DECODE]
    assert column(decode, "n_past") == [20, 21, 22, 23]
    for shape in decode:
        assert shape.n_tokens == 3
        assert shape.n_seq == 3
        assert shape.n_outputs == 3


def test_a_shared_prompt_is_prefilled_once_and_copied_but_for_its_last_tokens() -> None:
    settings = dataclasses.replace(SETTINGS, n_ubatch=64)

    together = batches.write(case(3, 40, is_shared=True), text, settings)
    alone = batches.write(case(1, 40, is_shared=True), text, settings)

    common, _, _, last_tokens, _ = together
    assert column(together, "kind") == [PREFILL, COPY, COPY, PREFILL, DECODE]
    assert common.parts[0].n_tokens == 24
    assert common.parts[0].n_outputs == 0
    assert column(last_tokens.parts, "n_tokens") == [batches.N_OWN] * 3
    assert len({part.tokens for part in last_tokens.parts}) == 3
    assert column(alone, "kind") == [PREFILL, DECODE]


def test_rows_have_the_time_of_a_step_and_what_follows_from_it() -> None:
    records = []
    for repeat in range(3):
        records.append(make_record(batch_run(1, repeat, decode_ms=10)))
        records.append(make_record(batch_run(4, repeat, decode_ms=5)))

    alone, four = room.rows(records)

    # The fake engine chooses a token in 1 ms: TPOT is 11 ms of one, 24 ms of four.
    rates = (alone.step_s, alone.total_tps, alone.user_tps, alone.efficiency)
    assert rates == pytest.approx((0.01, 1 / 0.011, 1 / 0.011, 1))
    rates = (four.step_s, four.total_tps, four.user_tps, four.efficiency)
    assert rates == pytest.approx((0.02, 4 / 0.024, 1 / 0.024, 4 * 11 / 24))
    assert four.prefill_s == pytest.approx(0.080)
    assert four.kv_bytes == 4 * 25 * (memory.kv_bytes_per_position(MODEL) or 0)
    assert four.n_runs == 3
    assert four.expected_s is None


def test_the_sentence_says_what_the_most_sequences_gain_and_where_throughput_is_highest() -> (
    None
):
    records = []
    for n_seq, decode_ms in ((1, 10), (4, 4), (8, 6)):
        records.append(make_record(batch_run(n_seq, decode_ms=decode_ms)))

    (sentence,) = room.conclude(room.rows(records))

    assert sentence == (
        "8 sequences together: 1.57x the tokens/s of one in total, 0.196x per user. "
        "Throughput is highest with 4."
    )


PREDICTION = StepPrediction(
    dataclasses.replace(MODEL, n_params=None), SETTINGS, KERNELS, learning.fit([]), 0
)


def test_predicted_steps_share_the_reading_of_the_weights() -> None:
    times_s = [room.expected_s(PREDICTION, 20, 5, n) or 0 for n in (1, 4, 16)]
    (row,) = room.rows([make_record(batch_run(4))], PREDICTION)
    ridge, errors = room.conclude([row])

    assert times_s == sorted(times_s)
    assert times_s[2] < 16 * times_s[0]
    assert row.expected_s == pytest.approx(times_s[1])
    assert row.ridge is not None
    assert 1 < row.ridge < 64
    assert ridge.startswith("Above about ")
    assert errors.startswith("Prediction error of step times: median")


def drawn_ridges(records: list[Record]) -> list[str]:
    """The labels of the ridges in the picture of these runs."""
    rows = room.rows(records, PREDICTION)
    figure = canvas.drawn(functools.partial(room.draw, rows, records, "subject"), WIDE)
    _, labels = figure.axes[0].get_legend_handles_labels()
    return [label for label in labels if label.startswith("ridge")]


def test_the_picture_has_a_ridge_for_each_prompt_length_unless_nothing_is_concluded() -> None:
    records = [
        make_record(batch_run(n_seq, n_prompt=n_prompt))
        for n_seq, n_prompt in itertools.product((2, 64), (20, 40))
    ]

    short, long = drawn_ridges(records)
    of_disturbed = drawn_ridges(list(map(doubt.neighbour, records)))

    for label, n_prompt in ((short, 20), (long, 40)):
        assert label.startswith(f"ridge, {n_prompt} prompt tokens: ")
        assert label.endswith(" sequences at the machine's best rates")
    assert of_disturbed == []
    assert drawn_ridges(records[2:]) == []  # no batch below it


def test_at_the_ridge_arithmetic_takes_as_long_as_traffic() -> None:
    roof = kernel_rates.roof(KERNELS)
    excess_s = []  # of arithmetic over traffic; it grows in proportion to the sequences
    for n_seq in (1, 2):
        step = cost.step(MODEL, 1, 402, n_seq, beside=[(1, 402)] * (n_seq - 1))
        assert step is not None
        excess_s.append(step.flops / roof.gflops - step.n_bytes / roof.gbps)

    ridge = room.ridge(PREDICTION, 400, 5)

    assert ridge is not None
    assert ridge > 1
    at_ridge_s = excess_s[0] + (ridge - 1) * (excess_s[1] - excess_s[0])
    assert at_ridge_s == pytest.approx(0, abs=1e-3 * abs(excess_s[0]))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sequences": "1,x"}, "'x' is not a whole number"),
        ({"sequences": "0"}, "--sequences 0 is not possible"),
        ({"sequences": "1,300"}, "--sequences 300 is not possible"),
        ({"sequences": "2,2"}, "--sequences has 2 twice"),
        ({"gen": 1}, "--gen 1 leaves nothing to decode together"),
        (
            {"sequences": "32", "batch": 16},
            "32 sequences do not fit into a batch of 16 tokens",
        ),
        (
            {
                "sequences": "256",
                "prompt_len": "20",
                "gen": 5000,
            },
            "would generate 1,280,000 tokens",
        ),
        ({"shared_prompt": True, "prompt_len": 16}, "needs prompts of more than 16 tokens"),
        ({"kv_unified": "maybe"}, "--kv-unified maybe is not possible"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    fake_worker: FakeWorker, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(LabError, match=message):
        plan(fake_worker, **asked)


def test_more_sequences_than_fit_into_memory_are_refused_and_the_others_are_measured(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {
        "sequences": "1,16",
        "prompt_len": "20",
        "gen": 5,
        "repeat": 2,
    }
    possible = plan(fake_worker, **asked)
    needed_bytes = sum(possible.memory(case).total_bytes for case in possible.cases)
    monkeypatch.setattr("lab.runner.machine.memory_available", lambda: needed_bytes // 2)

    small = plan(fake_worker, **asked)
    path = new_results_file(small, tmp_path)
    records = list(execute(small, fake_worker, path, lambda status: None))

    (reason,) = small.refused.values()
    finished = [run.case["n_seq"] for run in column(records, "run") if run.is_timed]
    assert "for 16 sequences needs about" in reason
    assert finished == [1, 1]
    assert fake_worker.contexts == [25, 25]  # room for what is measured only


def test_a_shared_prompt_takes_its_place_once_in_one_cache(fake_worker: FakeWorker) -> None:
    asked: dict[str, Any] = {
        "sequences": 4,
        "prompt_len": 100,
        "gen": 10,
        "shared_prompt": True,
    }

    separate = plan(fake_worker, **asked)
    unified = plan(fake_worker, **asked, kv_unified=True)

    assert separate.cases[0].sequences == (110, 110, 110, 110)
    assert separate.settings.n_ctx == 4 * 256
    assert unified.cases[0].sequences == (110, 26, 26, 26)
    assert unified.settings.n_ctx == 188
    fake_worker.model = dataclasses.replace(MODEL, windows=(8, 0))
    with pytest.raises(LabError, match="sliding-window attention"):
        plan(fake_worker, **asked)


def session(name: str, factor: float) -> list[Record]:
    """Six repeats of one and of four sequences."""
    records = []
    for repeat in range(6):
        for n_seq in (1, 4):
            run = batch_run(n_seq, repeat, decode_ms=factor * 10 / n_seq**0.5)
            records.append(make_record(run, session=name))
    return records


def test_batches_are_compared_number_by_number() -> None:
    slow_machine = dataclasses.replace(MACHINE, cpu="Slow CPU")
    slow = [dataclasses.replace(record, machine=slow_machine) for record in session("b", 2)]

    (compared,) = comparison.compare([*session("a", 1), *slow])

    verdicts = {row.case: row.verdict for row in compared.rows if row.figure == "tpot_ms"}
    assert verdicts == {"1 sequence": "slower", "4 sequences": "slower"}


TWO_SEQUENCES = dataclasses.replace(
    SETTINGS, n_threads=1, n_threads_batch=1, n_ubatch=512, n_ctx=2 * 256, n_seq_max=2
)


def test_equal_tokens_together_and_alone_on_the_embedded_model(embedded: Path) -> None:
    with Worker() as worker:
        worker.load(embedded, SETTINGS)
        worker.new_context(TWO_SEQUENCES)
        ids = worker.tokenize("The lamp was lit each evening by the keeper's daughter. " * 20)

        def prompt(sequence: int, n: int) -> list[int]:
            return ids[7 * sequence : 7 * sequence + n]

        script = batches.write(case(2, 60, 6), prompt, TWO_SEQUENCES)
        together = worker.run(script, lambda progress: None)
        alone = []
        for sequence in range(2):
            script = scripts.run(prompt(sequence, 60), 6, 512)
            alone.append(worker.run(script, lambda progress: None).token_ids)

    assert [together.token_ids[::2], together.token_ids[1::2]] == alone
    assert together.steps.n_seq == (2,) * 6
    assert together.steps.n_outputs == (2,) * 6


@pytest.mark.parametrize("kv_unified", [False, True])
def test_the_memory_of_several_sequences_is_estimated(
    embedded: Path, kv_unified: bool
) -> None:
    settings = dataclasses.replace(TWO_SEQUENCES, kv_unified=kv_unified)
    with Worker() as worker:
        model = worker.read_model(embedded, "m", "embedded")

    estimate = memory.of_context(model, settings)

    reserved = miniature.reserved(embedded, settings)
    assert (estimate.kv_cache_bytes, estimate.compute_bytes) == pytest.approx(
        reserved, rel=0.05
    )


def test_batch_command(mini: Path, tmp_path: Path) -> None:
    asked = f"batch -m {mini} --prompt random -p 24 -n 4 -r 1 -t 1 -o {tmp_path}".split()

    code, out, err = run_lab(*asked, "-s", "1,3", "--shared-prompt")

    assert code == 0, err
    assert "sequences decoded together" in out
    assert "24 prompt tokens, 3 sequences, shared prompt" in err
    assert len(list(tmp_path.glob("*-batch.png"))) == 1
    rows = json.loads(run_lab("show", tmp_path, "--json")[1])["rows"]
    assert [(row["experiment"], row["n_seq"]) for row in rows] == [("batch", 1), ("batch", 3)]
    for record in results.read([tmp_path]).records:
        if not record.run.warmup:
            assert experiments.figures(record.run)["tpot_ms"] > 0
    code, _, err = run_lab(*asked, "-s", "1,0")
    assert code == 1
    assert err.startswith("Error: --sequences 0 is not possible.")


def with_steps(run: Run, **columns: Any) -> Run:
    """The run with every row of these columns changed."""
    n_rows = len(run.steps.kind)
    changed = {name: (value,) * n_rows for name, value in columns.items()}
    return dataclasses.replace(run, steps=dataclasses.replace(run.steps, **changed))


RUN = batch_run(4)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(with_steps(RUN, kind=PREFILL), id="only prefill"),
        pytest.param(with_steps(RUN, kind=DECODE), id="only decode"),
        pytest.param(with_steps(RUN, n_tokens=1), id="one sequence"),
        pytest.param(with_steps(RUN, ready_ns=0, start_ns=0), id="no time"),
        pytest.param(
            dataclasses.replace(RUN, case=case_of(Batch(10**10, False))), id="too many"
        ),
        pytest.param(dataclasses.replace(RUN, n_prompt=0), id="no prompt"),
    ],
)
def test_steps_that_are_not_those_of_a_batch_are_passed_over(run: Run) -> None:
    record = make_record(run)

    assert experiments.figures(run) == {}
    assert room.rows([record]) == []
    assert kinds.experiments_of([record]) == []
