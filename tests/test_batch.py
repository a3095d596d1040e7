"""Sequences decoded together: exactly with a fake engine, and on the embedded model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lab.app import kinds
from lab.core import cost, memory, phases, results, script as scripts
from lab.core.record import COPY, DECODE, PREFILL, Ceilings, Rate, Record, Run
from lab.errors import LabError
from lab.features import batch as batching
from lab.show import comparison
from lab.roofline import step_kernels
from lab.roofline import learning
from lab.roofline.step_prediction import StepPrediction
from lab.features.batch import Batch
from lab.process.wire import ATTENTION, MUL_MAT
from lab.process.worker import Worker
from lab.runner.cases import Case
from lab.runner.session import execute, new_results_file
from tests import miniature
from tests.conftest import (
    MACHINE,
    MODEL,
    SETTINGS,
    FakeWorker,
    make_record,
    make_run,
    run_lab,
    steps_of,
)


def text(sequence: int, n: int) -> list[int]:
    return [100 * sequence + i for i in range(n)]


def case(n_seq: int, n_prompt: int = 20, gen: int = 5, is_shared: bool = False) -> Case:
    return Case(
        n_prompt,
        gen,
        experiment="batch",
        setup=Batch(n_seq, is_shared),
        sequences=(n_prompt + gen,) * n_seq,
    )


def batch_run(n_seq: int, repeat: int = 0, decode_ms: float = 10, **changes: Any) -> Run:
    written = batching.write(case(n_seq), text, SETTINGS)
    steps = steps_of(written, decode_ms=decode_ms)
    return dataclasses.replace(
        make_run(20, 5, repeat, **changes),
        steps=steps,
        experiment="batch",
        setup=Batch(n_seq, False),
    )


@pytest.mark.parametrize(
    ("n_seq", "settings", "prefill"),
    [
        (5, {"n_ubatch": 50}, [(50, 5, 0), (50, 5, 5)]),  # equal slices
        (
            3,
            {"n_ubatch": 20, "n_batch": 40},
            [(20, 2, 0), (20, 2, 2), (20, 1, 1)],
        ),  # as many as fit into the batch
        (
            3,
            {"n_ubatch": 50, "kv_unified": True},
            [(40, 2, 2), (20, 1, 1)],
        ),  # one cache: whole prompts
    ],
)
def test_prompts_share_steps_and_every_decode_step_has_a_token_of_each(
    n_seq: int, settings: dict[str, Any], prefill: list[tuple[int, int, int]]
) -> None:
    written = batching.write(case(n_seq), text, dataclasses.replace(SETTINGS, **settings))
    shapes = list(scripts.shapes(written))
    assert [(s.n_tokens, s.n_seq, s.n_outputs) for s in shapes if s.kind == PREFILL] == prefill
    decode = [(s.n_tokens, s.n_past, s.n_seq, s.n_outputs) for s in shapes if s.kind == DECODE]
    assert decode == [(n_seq, 20 + i, n_seq, n_seq) for i in range(4)]
    parts = [part for operation in written if operation.kind == PREFILL for part in operation.parts]
    assert {part.sequence: part.tokens[-1] for part in parts if part.tokens} == {
        i: 100 * i + 19 for i in range(n_seq)
    }


def test_a_shared_prompt_is_prefilled_once_and_copied_but_for_its_last_tokens() -> None:
    written = batching.write(
        case(3, 40, is_shared=True), text, dataclasses.replace(SETTINGS, n_ubatch=64)
    )
    assert [op.kind for op in written] == [PREFILL, COPY, COPY, PREFILL, DECODE]
    assert (written[0].parts[0].n_tokens, written[0].parts[0].n_outputs) == (24, 0)
    assert [part.n_tokens for part in written[3].parts] == [batching.N_OWN] * 3
    assert len({part.tokens for part in written[3].parts}) == 3
    alone = batching.write(
        case(1, 40, is_shared=True), text, dataclasses.replace(SETTINGS, n_ubatch=64)
    )
    assert [op.kind for op in alone] == [PREFILL, DECODE]


def test_rows_have_the_time_of_a_step_and_what_follows_from_it() -> None:
    records = [
        make_record(batch_run(n, i, decode_ms=ms)) for n, ms in ((1, 10), (4, 5)) for i in range(3)
    ]
    one, four = batching.rows(records)
    assert (one.step_s, one.total_tps, one.user_tps, one.efficiency) == pytest.approx(
        (0.01, 100, 100, 1)
    )
    assert (four.step_s, four.total_tps, four.user_tps, four.efficiency) == pytest.approx(
        (0.02, 200, 50, 2)
    )
    assert four.prefill_s == pytest.approx(0.080)
    assert four.kv_bytes == 4 * 25 * (memory.kv_bytes_per_position(MODEL) or 0)
    assert (four.n_runs, four.expected_s) == (3, None)


KERNELS = Ceilings(
    "2026-01-01T00:00:00Z",
    MACHINE,
    False,
    tuple(
        Rate(
            MUL_MAT,
            "Q4_0",
            "CPU",
            128,
            64,
            n,
            2,
            10**6,
            2 * n * 10**6,
            (round(10**6 * (1 + n / 16)),),
        )
        for n in (1, 2, 4, 8, 32, 128, 512)
    )
    + tuple(
        Rate(ATTENTION, "F16", "CPU", 4, 16, n, 2, 10**4, 10**4, (10**4,), 2, 512) for n in (1, 512)
    ),
)


def test_what_is_predicted_is_shared_reading_up_to_a_ridge_where_arithmetic_takes_as_long_as_traffic() -> (
    None
):
    prediction = StepPrediction(
        dataclasses.replace(MODEL, n_params=None), SETTINGS, KERNELS, learning.fit([]), 0
    )
    times = [batching.expected_s(prediction, 20, 5, n) or 0 for n in (1, 4, 16)]
    assert times == sorted(times) and times[2] < 16 * times[0]
    (row,) = batching.rows([make_record(batch_run(4))], prediction)
    assert row.expected_s == pytest.approx(times[1])
    ridge, *errors = batching.sentences([row])
    assert ridge.startswith(
        "Above about "
    ) and "Prediction error of step times: median" in " ".join(errors)
    n = batching.ridge(prediction, 400, 5)
    best = step_kernels.roof(KERNELS)
    assert 1 < row.ridge < 64 and n is not None and n > 1
    over = []
    for n_seq in (1, 2):  # what arithmetic takes beyond the traffic grows in proportion
        step = cost.step(MODEL, 1, 402, n_seq, beside=[(1, 402)] * (n_seq - 1))
        assert step
        over.append(step.flops / best.gflops - step.n_bytes / best.gbps)
    assert over[0] + (n - 1) * (over[1] - over[0]) == pytest.approx(0, abs=1e-3 * abs(over[0]))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"sequences": "1,x"}, "'x' is not a whole number"),
        ({"sequences": "0"}, "--sequences 0 is not possible"),
        ({"sequences": "1,300"}, "--sequences 300 is not possible"),
        ({"sequences": "2,2"}, "--sequences has 2 twice"),
        ({"gen": 1}, "--gen 1 leaves nothing to decode together"),
        ({"sequences": "32", "batch": 16}, "32 sequences do not fit into a batch of 16 tokens"),
        ({"sequences": "256", "prompt_len": "20", "gen": 5000}, "would generate 1,280,000 tokens"),
        (
            {"shared_prompt": True, "prompt_len": 16},
            "--shared-prompt needs prompts of more than 16 tokens",
        ),
        ({"kv_unified": "maybe"}, "--kv-unified maybe is not possible"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    fake_worker: FakeWorker, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(LabError, match=words):
        batching.plan(fake_worker, **asked)  # type: ignore[arg-type]


def test_more_sequences_than_fit_into_memory_are_refused_and_the_others_are_measured(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = fake_worker
    made = batching.plan(worker, "1,16", "20", 5, 2)
    enough = sum(made.memory(case).total_bytes for case in made.cases) // 2
    monkeypatch.setattr("lab.runner.machine.memory_available", lambda: enough)
    made = batching.plan(worker, "1,16", "20", 5, 2)
    assert ["for 16 sequences needs about" in words for words in made.refused.values()] == [True]
    records = list(execute(made, worker, new_results_file(made, tmp_path), lambda status: None))
    assert [r.run.batch.n_seq for r in records if r.run.batch and r.run.status == "ok"] == [1, 1]
    assert worker.contexts == [25, 25]  # room for what is measured only


def session(n_seqs: tuple[int, ...] = (1, 4), name: str = "a", factor: float = 1) -> list[Record]:
    runs = [batch_run(n, i, decode_ms=factor * 10 / n**0.5) for n in n_seqs for i in range(6)]
    return [make_record(run, session=name) for run in runs]


def test_batches_are_compared_number_by_number() -> None:
    slow = dataclasses.replace(MACHINE, cpu="Slow CPU")
    other = [dataclasses.replace(record, machine=slow) for record in session(name="b", factor=2)]
    (compared,) = comparison.compare([*session(), *other])
    tpot = {row.lever: row.verdict for row in compared.rows if row.figure == "tpot_ms"}
    assert tpot == {"1 sequence": "slower", "4 sequences": "slower"}


def test_equal_tokens_together_and_alone_on_the_embedded_model(embedded: Path) -> None:
    one_thread = dataclasses.replace(SETTINGS, n_threads=1, n_threads_batch=1)
    settings = dataclasses.replace(one_thread, n_ubatch=512, n_ctx=2 * 256, n_seq_max=2)
    with Worker() as worker:
        worker.load(embedded, SETTINGS)
        worker.new_context(settings)
        ids = worker.tokenize("The lamp was lit each evening by the keeper's daughter. " * 20)

        def prompt(sequence: int, n: int) -> list[int]:
            return ids[7 * sequence : 7 * sequence + n]

        together = worker.run(
            batching.write(case(2, 60, 6), prompt, settings), lambda progress: None
        )
        for i in range(2):
            alone = worker.run(scripts.run(prompt(i, 60), 6, 512), lambda progress: None)
            assert together.token_ids[i::2] == alone.token_ids
        assert together.steps.n_seq == (2,) * 6 and together.steps.n_outputs == (2,) * 6
        for unified in (False, True):
            wanted = dataclasses.replace(settings, kv_unified=unified)
            kv_bytes, compute = miniature.reserved(embedded, wanted)
            estimate = memory.of_context(worker.read_model(embedded, "m", "embedded"), wanted)
            assert (estimate.kv_cache_bytes, estimate.compute_bytes) == pytest.approx(
                (kv_bytes, compute), rel=0.05
            )


def test_batch_command(mini: Path, tmp_path: Path) -> None:
    few = (
        "batch",
        "-m",
        mini,
        "--prompt",
        "random",
        "-p",
        "24",
        "-n",
        "4",
        "-r",
        "1",
        "-t",
        "1",
        "-o",
        tmp_path,
    )
    code, out, err = run_lab(*few, "-s", "1,3", "--shared-prompt")
    assert code == 0, err
    assert (
        "sequences decoded together" in out
        and "24 prompt tokens, 3 sequences, shared prompt" in err
    )
    assert len(list(tmp_path.glob("*-batch.png"))) == 1
    code, out, _ = run_lab("show", tmp_path, "--json")
    assert [(row["experiment"], row["n_seq"]) for row in json.loads(out)["rows"]] == [
        ("batch", 1),
        ("batch", 3),
    ]
    timed = [record.run for record in results.read([tmp_path]).records if not record.run.warmup]
    assert all(phases.figures(run)["tpot_ms"] > 0 for run in timed)
    code, _, err = run_lab(*few, "-s", "1,0")
    assert code == 1 and err.startswith("Error: --sequences 0 is not possible.")


def test_a_shared_prompt_takes_its_place_once_in_one_cache(fake_worker: FakeWorker) -> None:
    worker: Any = fake_worker
    asked: dict[str, Any] = {"sequences": 4, "prompt_len": 100, "gen": 10, "shared_prompt": True}
    apart = batching.plan(worker, **asked)
    together = batching.plan(worker, **asked, kv_unified=True)
    assert apart.cases[0].sequences == (110,) * 4 and apart.settings.n_ctx == 4 * 256
    assert together.cases[0].sequences == (110, 26, 26, 26) and together.settings.n_ctx == 188
    fake_worker.model = dataclasses.replace(MODEL, windows=(8, 0))
    with pytest.raises(LabError, match="sliding-window attention"):
        batching.plan(worker, **asked)


BROKEN = (
    {"kind": (PREFILL,) * 9},
    {"kind": (DECODE,) * 9},
    {"n_tokens": (1,) * 9},
    {"ready_ns": (0,) * 9, "start_ns": (0,) * 9},
)


@pytest.mark.parametrize("changes", BROKEN)
def test_steps_that_are_not_those_of_a_batch_are_passed_over(changes: dict[str, Any]) -> None:
    run = batch_run(4)
    n = len(run.steps.kind)
    columns = {name: values[:1] * n for name, values in changes.items()}
    broken = dataclasses.replace(run, steps=dataclasses.replace(run.steps, **columns))
    for changed in (
        broken,
        dataclasses.replace(run, experiment="batch", setup=Batch(10**10, False)),
        dataclasses.replace(run, n_prompt=0),
    ):
        assert phases.figures(changed) == {} and batching.rows([make_record(changed)]) == []
        assert kinds.experiments_of([make_record(changed)]) == []
