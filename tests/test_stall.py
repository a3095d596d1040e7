"""Stalls: exact on the fake engine, and once with the real engine."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import experiments, results, script as scripts
from lab.core.experiments import case_of
from lab.core.record import DECODE, FORGET, MIXED, PREFILL
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features import stall as room
from lab.features.stall import Stall
from lab.process.worker import Worker
from lab.roofline import learning
from lab.roofline.step_kernels import StepKernels
from lab.roofline.step_prediction import StepPrediction, pieces
from lab.runner import prompts
from lab.runner.cases import Plan
from lab.show import canvas, section
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.rates import BIG, FAST, WIDE
from tests.support.records import column
from tests.support.stalls import ONE_CACHE, stall_record, text

ON_GPU = dataclasses.replace(ONE_CACHE, n_gpu_layers=1)


def plan(
    worker: FakeWorker, prompt_len: int, chunk: str | None, streams: str, **settings: Any
) -> Plan:
    return room.plan(worker, prompt_len, chunk, streams, **settings)


def test_chunks_of_the_prompt_share_steps_with_the_streams() -> None:
    script = room.write(room.case(100, 2, 40), text, ONE_CACHE)

    mixed = [operation for operation in script if operation.kind == MIXED]
    prompt: list[int] = []
    sizes = []
    for operation in mixed:
        chunk, *streams = operation.parts
        prompt += chunk.tokens or ()
        sizes.append(column(operation.parts, "n_tokens"))
        assert column(streams, "n_outputs") == [1, 1]
    assert sizes == [
        [40, 1, 1],
        [40, 1, 1],
        [20, 1, 1],
    ]
    assert prompt == text(0, 100)
    assert [operation.parts[0].n_outputs for operation in mixed] == [0, 0, 1]
    assert script[0].parts[0].tokens == tuple(text(1, room.N_CONTEXT))


def test_a_prompt_all_at_once_is_prefilled_while_the_streams_wait() -> None:
    script = room.write(room.case(1200, 2, None), text, ONE_CACHE)

    prefill = [operation.parts[0] for operation in script if operation.kind == PREFILL]
    of_newcomer = [part.n_tokens for part in prefill if part.sequence == 0]
    assert of_newcomer == [512, 512, 176]
    assert MIXED not in {operation.kind for operation in script}


@pytest.mark.parametrize(
    ("streams", "is_of_the_stream"),
    [((1,), True), ((1, 2), False)],
)
def test_the_legend_has_the_colour_of_the_line_of_one_stream_and_is_grey_for_more(
    streams: Sequence[int], is_of_the_stream: bool
) -> None:
    records = [stall_record(100, 40, n_streams) for n_streams in streams]
    draw = functools.partial(room.draw, room.rows(records), records, "subject")
    (ax,) = canvas.drawn(draw, section.WIDE).axes
    handles, labels = ax.get_legend_handles_labels()
    of_label: dict[str, Any] = dict(zip(labels, handles, strict=True))
    entry = of_label["first token of the new request"]
    stream = of_label["1 stream"]
    assert entry.get_linestyle() == ":"
    assert (entry.get_color() == stream.get_color()) == is_of_the_stream
    assert is_of_the_stream or entry.get_color() == canvas.GUIDE


@pytest.mark.parametrize("chunk", [7, 100, None])
def test_a_case_has_room_for_exactly_what_its_script_computes(chunk: int | None) -> None:
    case = room.case(100, 3, chunk)

    n_tokens = [1, 1, 1, 1]  # the last token that is chosen is not computed
    for operation in room.write(case, text, ONE_CACHE):
        for part in operation.parts:
            n_tokens[part.sequence] += operation.times * part.n_tokens
    assert tuple(n_tokens) == case.sequences


@pytest.mark.parametrize(
    ("n_prompt", "chunk"),
    [
        (1000, 64),
        (1000, 1000),
        (999, 333),
    ],
)
def test_there_are_as_many_stalls_as_chunks(n_prompt: int, chunk: int) -> None:
    (in_chunks,) = room.rows([stall_record(n_prompt, chunk, 4, decode_ms=2)])
    (at_once,) = room.rows([stall_record(n_prompt, None, 4)])

    assert in_chunks.n_steps == in_chunks.n_stalls == math.ceil(n_prompt / chunk)
    assert at_once.n_stalls == 1


def test_the_figures_are_those_of_the_steps() -> None:
    usual_s = (2 * 10 + 2) / 1e3  # a step of both streams: a decode and a choice each
    chunk_s = (300 + 2 + 2) / 1e3  # a step of a chunk and both streams
    records = [stall_record(1000, 300, 2), stall_record(1000, None, 2)]

    mixed, at_once = room.rows(records)

    assert mixed.usual_gap_s == at_once.usual_gap_s == pytest.approx(usual_s)
    assert mixed.longest_gap_s == mixed.median_gap_s == pytest.approx(chunk_s)
    assert mixed.newcomer_s == pytest.approx(3 * chunk_s + (100 + 2 + 3) / 1e3)
    assert at_once.longest_gap_s == pytest.approx((1001 + 3 * 10 + 3) / 1e3)
    assert at_once.newcomer_s == pytest.approx(1.001)
    assert mixed.lost == pytest.approx(1 - (1.001 + 4 * usual_s) / mixed.newcomer_s)
    assert at_once.lost == pytest.approx(0)
    assert mixed.n_steps == 4
    assert at_once.n_steps == 2
    assert experiments.figures(records[0].run) == {
        "gap_ms": pytest.approx(1e3 * chunk_s),
        "newcomer_s": pytest.approx(mixed.newcomer_s),
    }


def test_without_a_run_all_at_once_and_without_ceilings_figures_are_unknown() -> None:
    (row,) = room.rows([stall_record(1000, 300, 2)])

    assert row.lost is None
    assert row.expected_gap_s is None


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(Stall(1, 8, 128, 1), id="no usual gap"),
        pytest.param(Stall(1, 8, 128, 99), id="more steps before"),
        pytest.param(Stall(1, 0, 128, 32), id="empty chunks"),
        pytest.param(Stall(-1, None, 128, 32), id="no streams"),
    ],
)
def test_steps_that_show_no_stall_have_no_figures(setup: Stall) -> None:
    record = stall_record(100, 50)
    run = dataclasses.replace(record.run, case=case_of(setup))

    assert experiments.figures(run) == {}
    assert room.rows([dataclasses.replace(record, run=run)]) == []


def test_the_plan_has_each_chunk_and_all_at_once(fake_worker: FakeWorker) -> None:
    planned = plan(fake_worker, 300, "64,256", "1,2")

    setups = [(case.setup.n_streams, case.setup.chunk) for case in planned.cases]
    assert setups == [
        (1, 64),
        (1, 256),
        (1, None),
        (2, 64),
        (2, 256),
        (2, None),
    ]
    assert planned.settings.kv_unified
    assert planned.settings.n_seq_max == 3
    assert planned.settings.n_ctx == max(sum(case.sequences) for case in planned.cases)


def test_without_chunks_those_that_fit_the_prompt_are_planned(fake_worker: FakeWorker) -> None:
    planned = plan(fake_worker, 300, None, "1")

    assert column(planned.cases, "setup.chunk") == [64, 256, None]


@pytest.mark.parametrize(
    ("prompt_len", "chunk", "streams", "settings", "problem"),
    [
        (300, "64,301", "1", {}, "--chunk 301 is longer than the prompt of 300 tokens"),
        (
            300,
            "64,256",
            "2",
            {"batch": 257},
            "256 tokens and 2 streams do not fit into a batch",
        ),
        (300, "0", "1", {}, "--chunk 0 is not possible"),
        (300, "64", "256", {}, "--sequences 256 is not possible"),
        (0, "64", "1", {}, "A prompt length of 0 cannot be measured"),
        (30_000, "1", "99", {}, "would generate 2,9"),
    ],
)
def test_what_cannot_be_is_refused_before(
    fake_worker: FakeWorker,
    prompt_len: int,
    chunk: str,
    streams: str,
    settings: dict[str, Any],
    problem: str,
) -> None:
    with pytest.raises(LabError, match=problem):
        plan(fake_worker, prompt_len, chunk, streams, **settings)


STREAM = (1, 161)  # a token of a stream, after 161 positions


@pytest.mark.parametrize(
    ("n_chunk", "n_past", "n_outputs", "n_ubatch", "kv_unified", "expected"),
    [
        pytest.param(10, 10, 1, 512, True, [([(10, 10), STREAM, STREAM], 3)], id="whole"),
        pytest.param(
            *(10, 10, 1, 8, True),
            [([(8, 10)], 0), ([(2, 18), STREAM, STREAM], 3)],
            id="chunk first, then its rest with the streams",
        ),
        pytest.param(
            *(8, 8, 0, 8, True), [([(8, 8)], 0), ([STREAM, STREAM], 2)], id="streams alone"
        ),
        pytest.param(
            *(10, 10, 1, 8, False),
            [
                ([(1, 10), STREAM, STREAM], 2),
                ([(8, 11)], 0),
                ([(1, 19)], 1),
            ],
            id="separate caches: equal slices",
        ),
        pytest.param(
            *(1, 19, 1, 8, False),
            [([(1, 19), STREAM, STREAM], 3)],
            id="separate caches: one each",
        ),
    ],
)
def test_a_step_is_cut_where_llama_cpp_cuts_it(
    n_chunk: int,
    n_past: int,
    n_outputs: int,
    n_ubatch: int,
    kv_unified: bool,
    expected: list[Any],
) -> None:
    settings = dataclasses.replace(ONE_CACHE, n_ubatch=n_ubatch, kv_unified=kv_unified)
    parts = [
        Part(0, (7,) * n_chunk, n_outputs),
        Part(1, None, 1),
        Part(2, None, 1),
    ]

    cut = list(pieces(parts, {0: n_past, 1: 161, 2: 161}, settings))

    assert cut == expected


@dataclasses.dataclass(frozen=True)
class Straight(StepPrediction):
    """A prediction in which a token takes 1 ms, and each position that it looks back at 1 us."""

    is_known: bool = True

    def seconds(
        self,
        n_tokens: int,
        n_past: int,
        n_outputs: int,
        other_spans: Sequence[tuple[int, int]] = (),
    ) -> float | None:
        if not self.is_known:
            return None
        total_s = 0.0
        for n, past in [(n_tokens, n_past), *other_spans]:
            total_s += token_s(n, past)
        return total_s


def token_s(n: int, n_past: int) -> float:
    return n * (1e-3 + 1e-6 * n_past)


STRAIGHT = Straight(BIG, ON_GPU, FAST, learning.fit([]), 0)
UNKNOWN = dataclasses.replace(STRAIGHT, is_known=False)


def test_the_longest_gap_and_the_newcomer_are_predicted_step_by_step() -> None:
    first_s = token_s(50, 0) + token_s(2, 160)
    second_s = token_s(50, 50) + token_s(2, 161)
    decode_s = token_s(1, 100) + token_s(2, 160)

    in_chunks = room.expected_s(STRAIGHT, 100, 2, 50, 2)
    at_once = room.expected_s(STRAIGHT, 100, 2, None, 1)

    assert in_chunks == pytest.approx((second_s, first_s + second_s))
    assert at_once == pytest.approx((token_s(100, 0) + decode_s, token_s(100, 0)))


@pytest.mark.parametrize(
    ("prediction", "n_prompt", "n_streams", "chunk", "n_steps"),
    [
        pytest.param(UNKNOWN, 100, 2, 50, 2, id="unknown cost"),
        pytest.param(STRAIGHT, 100, 2, 50, 3, id="more steps than chunks"),
        pytest.param(STRAIGHT, 2**40, 2, None, 2**31, id="too long"),
        pytest.param(None, 100, 2, 50, 2, id="no ceilings"),
    ],
)
def test_what_cannot_be_predicted_is_unknown(
    prediction: StepPrediction | None,
    n_prompt: int,
    n_streams: int,
    chunk: int | None,
    n_steps: int,
) -> None:
    longest_s, newcomer_s = room.expected_s(prediction, n_prompt, n_streams, chunk, n_steps)

    assert math.isnan(longest_s)
    assert math.isnan(newcomer_s)


@pytest.mark.parametrize(
    ("chunk", "n_tiles"),
    [
        pytest.param(59, 0, id="63 tokens of all sequences"),
        pytest.param(60, 1, id="64 tokens of all sequences"),
        pytest.param(64, 1, id="64 tokens of the prompt"),
    ],
)
def test_on_a_cpu_the_streams_tokens_cost_a_whole_tile_of_attention(
    chunk: int, n_tiles: int
) -> None:
    settings = dataclasses.replace(WIDE, kv_unified=True)
    prediction = StepPrediction(BIG, settings, FAST, learning.fit([]), 0)
    tile = StepKernels(BIG, settings, FAST).total(64, 4 * 161, 0)
    last_chunk_s = prediction.seconds(chunk, chunk, 5, [(1, 161)] * 4)  # the longest gap
    assert last_chunk_s is not None

    longest_s, _ = room.expected_s(prediction, 2 * chunk, 4, chunk, 2)

    assert longest_s == pytest.approx(last_chunk_s + n_tiles * tile.attention_s)


def test_with_separate_caches_the_parts_of_a_step_add_up() -> None:
    settings = dataclasses.replace(WIDE, kv_unified=False)
    prediction = StepPrediction(BIG, settings, FAST, learning.fit([]), 0)
    with_streams_s = prediction.seconds(1, 64, 4, [(1, 161)] * 4)
    rest_s = prediction.seconds(63, 65, 1)
    assert with_streams_s is not None
    assert rest_s is not None

    longest_s, _ = room.expected_s(prediction, 128, 4, 64, 2)

    assert longest_s == pytest.approx(with_streams_s + rest_s)


def test_the_sentences_say_what_a_chunk_costs() -> None:
    records = [stall_record(1000, 100), stall_record(1000, None)]

    at_once, in_chunks = room.conclude(room.rows(records))
    *_, errors = room.conclude(room.rows(records, STRAIGHT))

    assert at_once == (
        "With 1 stream, a prompt of 1,000 tokens all at once causes a gap of up to 1.02 s "
        "(usual gap 11.0 ms)."
    )
    assert in_chunks.startswith("The longest gap is 103 ms in chunks of 100 (")
    assert in_chunks.endswith("x that at once, throughput 9 % higher).")
    assert errors.startswith("Prediction error of the longest gap: median")


def test_the_newcomer_computes_what_it_would_alone(mini: Path) -> None:
    """Its first token, in chunks of 24 among two streams, and in steps of 24 by itself."""
    with Worker() as worker:
        planned = room.plan(worker, 96, "24", "2", 1, str(mini), threads=1, prompt="random")
        n_vocab = worker.load(mini, planned.settings).n_vocab
        ids = prompts.random_ids(200, n_vocab, None, 1, 0)
        worker.new_context(planned.settings)

        def prompt(sequence: int, n: int) -> list[int]:
            return ids[7 * sequence : 7 * sequence + n]

        script = room.write(planned.cases[0], prompt, planned.settings)
        mixed = [i for i, operation in enumerate(script) if operation.kind == MIXED]
        among_streams = script[: mixed[-1] + 1]
        alone = scripts.prefill(0, prompt(0, 96), 24)
        outcome = worker.run(
            [*alone, Operation(FORGET), *among_streams], lambda progress: None
        )

    n_last = len(among_streams[-1].parts)
    assert outcome.token_ids[-n_last] == outcome.token_ids[0]


def test_stall_command(mini: Path, tmp_path: Path) -> None:
    asked = (
        f"stall -m {mini} --prompt random -p 96 --sequences 2 -r 1 -t 1 -o {tmp_path}".split()
    )

    code, out, err = run_lab(*asked, "--chunk", "24,50", "--json")

    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [(row["chunk"], row["n_steps"]) for row in rows] == [(24, 4), (50, 2), (None, 1)]
    for row in rows:
        assert row["longest_gap_s"] >= row["median_gap_s"] > 0
        assert row["newcomer_s"] > 0
    assert len(list(tmp_path.glob("*-stall.png"))) == 1
    code, out, _ = run_lab("show", tmp_path)
    assert code == 0
    assert "in chunks of 24" in out.lower()
    for record in results.read([tmp_path]).records:
        assert record.settings.kv_unified
        assert record.settings.n_seq_max == 3
        if not record.run.warmup:
            assert record.run.steps.kind.count(DECODE) == room.N_BEFORE + room.N_GEN - 1
