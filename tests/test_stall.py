"""Stalls: exact on the fake engine, and once with the real engine."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import phases, results, script as scripts
from lab.core.record import DECODE, FORGET, MIXED, PREFILL, Record, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features import stall as stalls
from lab.roofline import step_kernels
from lab.roofline import learning
from lab.roofline.step_prediction import StepPrediction, pieces
from lab.features.stall import Stall
from lab.process.worker import Worker
from tests.conftest import SETTINGS, FakeWorker, make_record, make_run, run_lab, steps_of
from tests.test_explain import BIG, FAST, WIDE

SHARED = dataclasses.replace(SETTINGS, kv_unified=True, n_ubatch=512)

ON_GPU = dataclasses.replace(SHARED, n_gpu_layers=1)


def text(sequence: int, n: int) -> list[int]:
    return [(7 * sequence + i) % 100 for i in range(n)]


def stall_record(
    n_prompt: int,
    chunk: int | None,
    n_streams: int = 1,
    repeat: int = 0,
    settings: Settings = SHARED,
    **times: float,
) -> Record:
    """A run of the fake engine: a prompt's token takes 1 ms, a decode step 10 ms a sequence, choosing a token 1 ms."""
    case = stalls.case(n_prompt, n_streams, chunk)
    script = stalls.write(case, text, settings)
    steps = steps_of(script, **times)
    token_ids = tuple(range(scripts.n_chosen(script)))
    assert isinstance(case.lever, Stall)
    run = make_run(n_prompt, case.n_gen, repeat, steps=steps, stall=case.lever, token_ids=token_ids)
    return make_record(run, settings=settings)


def plan(worker: FakeWorker, *asked: Any, **settings: Any) -> Any:
    return stalls.plan(worker, *asked, model="smollm2-135m", **settings)  # type: ignore[arg-type, misc]


def test_the_script_rides_chunks_in_the_streams_steps() -> None:
    operations = stalls.write(stalls.case(100, 2, 40), text, SHARED)
    mixed = [operation for operation in operations if operation.kind == MIXED]
    assert [[part.n_tokens for part in operation.parts] for operation in mixed] == [
        [40, 1, 1],
        [40, 1, 1],
        [20, 1, 1],
    ]
    assert [operation.parts[0].n_outputs for operation in mixed] == [0, 0, 1]
    assert all(part.n_outputs == 1 for operation in mixed for part in operation.parts[1:])
    assert [token for operation in mixed for token in operation.parts[0].tokens or ()] == text(
        0, 100
    )
    assert operations[0].parts[0].tokens == tuple(text(1, stalls.N_CONTEXT))
    alone = stalls.write(stalls.case(1200, 2, None), text, SHARED)
    assert [operation.parts[0].n_tokens for operation in alone if operation.kind == PREFILL][
        2:
    ] == [512, 512, 176]
    assert not [operation for operation in alone if operation.kind == MIXED]


@pytest.mark.parametrize("chunk", [7, 100, None])
def test_a_case_has_room_for_exactly_what_its_script_computes(chunk: int | None) -> None:
    case = stalls.case(100, 3, chunk)
    held = dict.fromkeys(range(4), 0)
    for operation in stalls.write(case, text, SHARED):
        for part in operation.parts:
            held[part.sequence] += operation.times * part.n_tokens
    assert [n + 1 for n in held.values()] == list(
        case.sequences
    )  # the last token that is chosen is not computed


@pytest.mark.parametrize(("n_prompt", "chunk"), [(1000, 64), (1000, 1000), (999, 333)])
def test_there_are_as_many_stalls_as_chunks(n_prompt: int, chunk: int) -> None:
    (row,) = stalls.rows([stall_record(n_prompt, chunk, 4, decode_ms=2)])
    assert row.n_steps == row.n_stalls == math.ceil(n_prompt / chunk)
    (at_once,) = stalls.rows([stall_record(n_prompt, None, 4)])
    assert at_once.n_stalls == 1


def test_the_figures_are_those_of_the_steps() -> None:
    records = [stall_record(1000, 300, 2), stall_record(1000, None, 2)]
    mixed, at_once = stalls.rows(records)
    usual = 2 * 10 + 2
    chunk = 300 + 2 + 2  # ms: a step of the streams; a mixed one, which costs 1 ms a token
    assert mixed.usual_gap_s == at_once.usual_gap_s == pytest.approx(usual / 1e3)
    assert mixed.longest_gap_s == mixed.median_gap_s == pytest.approx(chunk / 1e3)
    assert mixed.newcomer_s == pytest.approx((3 * chunk + 100 + 2 + 3) / 1e3)
    assert at_once.longest_gap_s == pytest.approx((1001 + 3 * 10 + 3) / 1e3)
    assert at_once.newcomer_s == pytest.approx(1.001)
    assert mixed.lost == pytest.approx(1 - (1.001 + 4 * usual / 1e3) / mixed.newcomer_s)
    assert at_once.lost == pytest.approx(0)
    assert (mixed.n_steps, at_once.n_steps) == (4, 2)
    assert phases.figures(records[0].run) == {
        "gap_ms": pytest.approx(chunk),
        "newcomer_s": pytest.approx(mixed.newcomer_s),
    }
    (alone,) = stalls.rows(records[:1])
    assert alone.lost is None and alone.expected_gap_s is None


@pytest.mark.parametrize(
    "lever",
    [
        None,
        Stall(1, 8, 128, 1),
        Stall(1, 8, 128, 99),
        Stall(1, 0, 128, 32),
        Stall(-1, None, 128, 32),
    ],
)
def test_steps_that_show_no_stall_have_no_gaps(lever: Stall | None) -> None:
    record = stall_record(100, 50)
    run = dataclasses.replace(record.run, stall=lever)
    assert phases.stall_steps(run) is None and phases.figures(run) == {}
    assert not stalls.rows([dataclasses.replace(record, run=run)])


def test_the_plan_has_each_chunk_and_all_at_once(fake_worker: FakeWorker) -> None:
    made = plan(fake_worker, 300, "64,256", "1,2")
    levers = [case.lever for case in made.cases]
    assert [(lever.n_streams, lever.chunk) for lever in levers if isinstance(lever, Stall)] == [
        (1, 64), (1, 256), (1, None), (2, 64), (2, 256), (2, None)
    ]  # fmt: skip
    assert made.settings.kv_unified and made.settings.n_seq_max == 3
    assert made.settings.n_ctx == max(sum(case.sequences) for case in made.cases)
    assert [case.lever.chunk for case in plan(fake_worker, 300, None, "1").cases] == [64, 256, None]


@pytest.mark.parametrize(
    ("asked", "settings", "problem"),
    [
        ((300, "64,301", "1"), {}, "--chunk 301 is longer than the prompt of 300 tokens"),
        (
            (300, "64,256", "2"),
            {"batch": 257},
            "A chunk of 256 tokens and 2 streams do not fit into a batch of 257",
        ),
        ((300, "0", "1"), {}, "--chunk 0 is not possible"),
        ((300, "64", "256"), {}, "--streams 256 is not possible"),
        ((0, "64", "1"), {}, "A prompt length of 0 cannot be measured"),
        ((30_000, "1", "99"), {}, "would generate 2,9"),
    ],
)
def test_what_cannot_be_is_refused_before(
    fake_worker: FakeWorker, asked: tuple[Any, ...], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(LabError, match=problem):
        plan(fake_worker, *asked, **settings)


def test_a_step_is_cut_where_llama_cpp_cuts_it() -> None:
    def cut(
        n_new: int, n_past: int, n_outputs: int, settings: Settings, at: int = 161
    ) -> list[Any]:
        parts = [Part(0, (7,) * n_new, n_outputs), Part(1, None, 1), Part(2, None, 1)]
        return list(pieces(parts, {0: n_past, 1: at, 2: at}, settings))

    small = dataclasses.replace(SHARED, n_ubatch=8)
    stream = (1, 161)
    assert cut(10, 10, 1, SHARED) == [([(10, 10), stream, stream], 3)]
    assert cut(10, 10, 1, small) == [([(8, 10)], 0), ([(2, 18), stream, stream], 3)]
    assert cut(8, 8, 0, small) == [([(8, 8)], 0), ([stream, stream], 2)]
    separate = dataclasses.replace(small, kv_unified=False)
    assert cut(10, 10, 1, separate) == [
        ([(1, 10), stream, stream], 2),
        ([(8, 11)], 0),
        ([(1, 19)], 1),
    ]
    assert cut(1, 19, 1, separate, 179) == [([(1, 19), (1, 179), (1, 179)], 3)]


@dataclasses.dataclass(frozen=True)
class Straight(StepPrediction):
    """A prediction in which a token takes 1 ms, and each position that it looks back at 1 us."""

    is_known: bool = True

    def seconds(
        self, n_tokens: int, n_past: int, n_outputs: int, others: Sequence[tuple[int, int]] = ()
    ) -> Any:
        spans = [(n_tokens, n_past), *others]
        return sum(n * (1e-3 + 1e-6 * past) for n, past in spans) if self.is_known else None


STRAIGHT = Straight(BIG, ON_GPU, FAST, learning.fit([]), 0)


def test_the_longest_gap_and_the_newcomer_are_predicted_step_by_step() -> None:
    first, second = (50 * (1e-3 + 1e-6 * 50 * i) + 2 * (1e-3 + 1e-6 * (160 + i)) for i in (0, 1))
    assert stalls.expected_s(STRAIGHT, 100, 2, 50, 2) == pytest.approx((second, first + second))
    assert stalls.expected_s(STRAIGHT, 100, 2, None, 1) == pytest.approx(
        (0.1 + 1e-3 + 1e-6 * 100 + 2 * (1e-3 + 1e-6 * 160), 0.1)
    )
    unknown = dataclasses.replace(STRAIGHT, is_known=False)
    others = (
        (unknown, 100, 2, 50, 2),
        (STRAIGHT, 100, 2, 50, 3),
        (STRAIGHT, 2**40, 2, None, 2**31),
        (None, 100, 2, 50, 2),
    )
    assert all(map(math.isnan, (stalls.expected_s(*one)[0] for one in others)))


def test_on_a_cpu_the_streams_tokens_cost_a_whole_tile_of_attention() -> None:
    settings = dataclasses.replace(WIDE, kv_unified=True)
    prediction = StepPrediction(BIG, settings, FAST, learning.fit([]), 0)
    tile = step_kernels.total(BIG, settings, FAST, 64, 4 * 161, 0)
    later = prediction.seconds(64, 64, 5, [(1, 161)] * 4)
    longest_s, _ = stalls.expected_s(
        prediction, 128, 4, 64, 2
    )  # the longest gap is the last chunk: 64 to 128
    assert later and longest_s - later == pytest.approx(tile.attention_s)
    few = prediction.seconds(32, 96, 5, [(1, 163)] * 4)
    assert stalls.expected_s(prediction, 128, 4, 32, 4)[0] == pytest.approx(few)
    separate = dataclasses.replace(
        prediction, settings=dataclasses.replace(settings, kv_unified=False)
    )
    cut = separate.seconds(1, 64, 4, [(1, 161)] * 4), separate.seconds(63, 65, 1)
    assert stalls.expected_s(separate, 128, 4, 64, 2)[0] == pytest.approx(
        sum(one or 0 for one in cut)
    )


def test_the_sentences_say_what_a_chunk_costs() -> None:
    records = [stall_record(1000, 100), stall_record(1000, None)]
    words = stalls.sentences(stalls.rows(records))
    assert words[0] == (
        "With 1 stream, a prompt of 1,000 tokens all at once causes a gap of up to 1.02 s (usual gap 11.0 ms)."
    )
    assert words[1].startswith("The longest gap is 103 ms in chunks of 100 (")
    assert (
        words[1].endswith("x the TTFT of the new request, 9 % higher throughput).")
        and len(words) == 2
    )
    assert "Prediction error of the longest gap: median" in " ".join(
        stalls.sentences(stalls.rows(records, STRAIGHT))
    )


def test_the_newcomer_computes_what_it_would_alone(embedded: Path) -> None:
    """Its first token, in chunks of 24 among two streams, and in steps of 24 by itself."""
    with Worker() as worker:
        made = stalls.plan(worker, 96, "24", "2", 1, model=str(embedded), threads=1)
        worker.load(embedded, made.settings)
        ids = worker.tokenize("Chunks of a long prompt ride in the steps of running answers. " * 40)
        worker.new_context(made.settings)

        def prompt(sequence: int, n: int) -> list[int]:
            return ids[7 * sequence : 7 * sequence + n]

        mixed = stalls.write(made.cases[0], prompt, made.settings)
        last = max(i for i, operation in enumerate(mixed) if operation.kind == MIXED)
        alone = scripts.prefill(0, prompt(0, 96), 24)
        chosen = worker.run(
            [*alone, Operation(FORGET), *mixed[: last + 1]], lambda progress: None
        ).token_ids
    assert chosen[-len(mixed[last].parts)] == chosen[0]


def test_stall_command(mini: Path, tmp_path: Path) -> None:
    few = (
        "stall",
        "-m",
        mini,
        "--prompt",
        "random",
        "-p",
        96,
        "--streams",
        2,
        "-r",
        1,
        "-t",
        1,
        "-o",
        tmp_path,
    )
    code, out, err = run_lab(*few, "--chunk", "24,50", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [(row["chunk"], row["n_steps"]) for row in rows] == [(24, 4), (50, 2), (None, 1)]
    assert all(
        row["longest_gap_s"] >= row["median_gap_s"] > 0 and row["newcomer_s"] > 0 for row in rows
    )
    assert len(list(tmp_path.glob("*-stall.png"))) == 1
    code, out, _ = run_lab("show", tmp_path)
    assert code == 0 and "in chunks of 24" in out.lower()
    for record in results.read([tmp_path]).records:
        assert record.settings.kv_unified and record.settings.n_seq_max == 3
        assert (
            record.run.warmup
            or record.run.steps.kind.count(DECODE) == stalls.N_BEFORE + stalls.N_GEN - 1
        )
