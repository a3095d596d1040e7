"""lab trace: the arithmetic on made-up stamps, and the real operations of a small model."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.core import cost, results
from lab.core.payloads import Looks, Phase, TokenTrace
from lab.core.record import Ceilings, Rate, Record
from lab.engine import kernels
from lab.errors import LabError
from lab.features.trace import child, token_trace
from lab.features.trace.nodes import Node, Operand, StepTrace, Trace
from lab.process.wire import Probe
from lab.process.worker import Worker
from lab.show.section import Context, Section
from tests.conftest import MACHINE, MODEL, SETTINGS, make_run, run_lab


def operand(name: str, *ne: int, kind: str = "F32", n_bytes: int | None = None) -> Operand:
    sizes = (*ne, 1, 1, 1, 1)[:4]
    return Operand(
        name, kind, sizes, 4 * sizes[0] * sizes[1] * sizes[2] if n_bytes is None else n_bytes
    )


def node(
    op: str,
    result: str,
    *sources: Operand,
    ne: tuple[int, ...] = (8,),
    us: float = 3.0,
    gap_us: float = 1,
) -> Node:
    return Node(op, operand(result, *ne), sources, "CPU", 1000 * us, 1000 * gap_us)


def steps(*nodes: Node, untraced_us: int = 100) -> StepTrace:
    return StepTrace(1, 40, nodes, 3, 5000, 1000 * untraced_us, 7000)


EMBEDDING = node(
    "GET_ROWS",
    "embd",
    operand("token_embd.weight", 8, 100, kind="Q8_0", n_bytes=900),
    operand("ids", 1),
)
Q = node(
    "MUL_MAT",
    "Qcur-3",
    operand("blk.3.attn_q.weight", 8, 16, kind="Q4_0", n_bytes=72),
    operand("x", 8),
    ne=(16,),
)
VIEW = node("VIEW", "Qcur-3 (view)", operand("Qcur-3", 16), us=1)


def test_the_cost_of_a_stop_is_that_of_a_view_and_threads_are_taken_off_what_uses_them() -> None:
    phase = token_trace.phase("decode", steps(EMBEDDING, Q, VIEW, untraced_us=9), MODEL, SETTINGS)
    assert phase.stops_s == pytest.approx({"CPU": 1e-6})
    assert [part.operation for part in phase.parts] == [
        "embedding",
        "Q",
        "outside operations",
        "sampling",
    ]
    assert [1e6 * part.seconds for part in phase.parts] == pytest.approx([2, 2, 5, 7])
    assert phase.sum_s == pytest.approx(9e-6) and phase.off == pytest.approx(0)
    there = dataclasses.replace(Q, buffer="CUDA0")
    planted = dataclasses.replace(steps(EMBEDDING, Q, VIEW, there, untraced_us=9), threads_ns=1500)
    phase = token_trace.phase("decode", planted, MODEL, SETTINGS)
    took = {(part.operation, part.device): 1e6 * part.seconds for part in phase.parts}
    expected = {("embedding", "CPU"): 2, ("Q", "CPU"): 0.5, ("Q", "CUDA0"): 3}
    assert {key: took[key] for key in expected} == pytest.approx(expected)
    assert "each stop on CPU and 1.50 us for the start and end of the CPU's threads," in told(phase)


@pytest.mark.parametrize(("n_threads", "expected_ns"), [(1, 0), (4, 700)])
def test_the_start_and_end_of_threads_is_what_a_product_alone_takes_longer_with_them(
    monkeypatch: pytest.MonkeyPatch, n_threads: int, expected_ns: int
) -> None:
    """Each of two products takes 50 ns; a graph takes 300 ns more, and with several threads another 700 ns."""
    sizes: set[int] = set()

    def run(probe: Probe) -> Any:
        sizes.add(probe.n_bytes)
        n_products = 2 if probe.n_bytes == max(sizes) else 1
        return SimpleNamespace(times_ns=(300 + 700 * (probe.n_threads > 1) + 50 * n_products,))

    monkeypatch.setattr(kernels, "run", run)
    assert child._threads_ns(n_threads) == expected_ns


@pytest.mark.parametrize(
    ("op", "result", "weights", "before", "expected"),
    [
        ("MUL", "node_5", "blk.7.attn_norm.weight", 2, ("norm", 7)),
        ("MUL_MAT", "node_5", "blk.7.ffn_gate.weight", 2, ("feed-forward gate", 7)),
        (
            "MUL_MAT_ID",
            "node_5",
            "blk.7.ffn_down_exps.weight",
            2,
            ("feed-forward down, experts", 7),
        ),
        ("MUL_MAT", "result_output", "token_embd.weight", 29, ("last matrix", None)),
        ("FLASH_ATTN_EXT", "node_21", "Qcur-0", 4, ("attention", 4)),
        ("SET_ROWS", "cache_k_l11 (view)", "Kcur-11 (view)", 4, ("write K and V", 11)),
        ("MUL_MAT", "ffn_up-2", "CUDA0#blk.2.ffn_up.weight#0", None, ("feed-forward up", 2)),
        ("SSM_SCAN", "y-1", "x", None, ("other (ssm_scan)", 1)),
    ],
)
def test_operations_and_layers_come_from_weights_and_names(
    op: str, result: str, weights: str, before: int | None, expected: tuple[str, int | None]
) -> None:
    assert (
        token_trace.place_of(node(op, result, operand(weights, 8, 8), operand("x", 8)), before)
        == expected
    )


def test_bytes_and_flops_follow_from_shapes() -> None:
    assert token_trace.cost_of(EMBEDDING) == (9 + 4, None)  # one row of 100, and its number
    assert token_trace.cost_of(Q) == (72 + 32, 2 * 8 * 16)
    writes = node("SET_ROWS", "c", operand("k", 8), operand("ids", 1), operand("cache", 8, 1000))
    assert token_trace.cost_of(writes) == (32 + 4, None)
    experts = operand("blk.0.ffn_up_exps.weight", 8, 16, 4, kind="F32")
    chosen = node(
        "MUL_MAT_ID", "ffn_moe_up-0", experts, operand("x", 8), operand("ids", 1, 1), ne=(16, 1, 1)
    )
    assert token_trace.cost_of(chosen)[0] == pytest.approx(
        4 * 8 * 16 + 32 + 4
    )  # one of four experts
    heads = operand("q", 8, 1, 6), operand("k", 8, 256, 2), operand("v", 4, 256, 2)
    assert token_trace.cost_of(node("FLASH_ATTN_EXT", "node_1", *heads))[1] == 2 * 6 * 256 * (8 + 4)


def test_an_operation_is_held_against_the_ceiling_of_its_kernel() -> None:
    rate = Rate("mul_mat", "Q4_0", "CPU", 16, 8, 1, SETTINGS.n_threads, 720, 1, (5000,))
    ceilings = Ceilings("2026-11-22T00:00:00Z", MACHINE, False, (rate,))
    phase = token_trace.phase("decode", steps(Q, VIEW), MODEL, SETTINGS, ceilings)
    assert phase.parts[0].least_s == pytest.approx(0.5e-6) and phase.parts[
        0
    ].held_s == pytest.approx(2e-6)
    assert "1 operation of the step would take 500 ns instead of 2.00 us" in told(phase)
    slow = dataclasses.replace(ceilings, rates=(dataclasses.replace(rate, times_ns=(50_000,)),))
    too_low = token_trace.phase("decode", steps(Q, VIEW), MODEL, SETTINGS, slow)
    assert "faster than their ceiling, so the ceiling was measured too low" in told(too_low)
    unknown = dataclasses.replace(ceilings, rates=(dataclasses.replace(rate, type="Q8_0"),))
    assert (
        token_trace.phase("decode", steps(Q, VIEW), MODEL, SETTINGS, unknown).parts[0].least_s
        is None
    )


def chapter(decode: Phase) -> Section:
    run = dataclasses.replace(
        make_run(40, 2), trace=TokenTrace(dataclasses.replace(decode), decode, None)
    )
    (made,) = token_trace.chapters([Record("session", MACHINE, MODEL, SETTINGS, run)], Context())
    return made.parts[-1]


def told(decode: Phase) -> str:
    section = chapter(decode)
    return " ".join([*section.sentences, *section.notes, *section.warnings])


def test_a_sum_that_is_far_off_says_so() -> None:
    phase = token_trace.phase("decode", steps(Q, VIEW, untraced_us=7), MODEL, SETTINGS)
    assert not chapter(phase).warnings
    (warning,) = chapter(dataclasses.replace(phase, untraced_s=14e-6)).warnings
    assert warning.startswith(
        "Decode: 2 operations, less 1.00 us for each stop on CPU, add up to 7.00 us, 50 % less than"
    )
    assert "too far for the shares to be right" in warning


def test_the_real_operations_have_the_flops_and_weights_of_the_model(mini: Path) -> None:
    settings = dataclasses.replace(SETTINGS, n_ctx=256, n_threads=1, n_threads_batch=1)
    with Worker() as worker:
        model = worker.read_model(mini, "mini", "file")
        worker.load(mini, settings)
        worker.new_context(settings)
        both = worker.call(
            Trace, "lab.features.trace.child.trace", tokens=[5, 6, 7, 8, 9], n_gen=2, n_rounds=2
        )
    for steps, n_tokens, n_past in ((both.prefill, 5, 0), (both.decode, 1, 5)):
        phase = token_trace.phase("decode", steps, model, settings)
        products = cost.products(model, n_tokens, 1)
        assert products
        of_weights = [
            part for part in phase.parts if part.flops and part.operation != token_trace.ATTENTION
        ]
        assert sum(part.flops or 0 for part in of_weights) == pytest.approx(
            sum(one.flops for one in products)
        )
        assert {part.layer for part in phase.parts} == {None, *range(model.n_layer or 0)}
        assert not [part for part in phase.parts if part.operation.startswith("other")]
        assert phase.stops_s["CPU"] > 0 and phase.n_steps == (2 if n_past == 0 else 4)
        assert phase.sum_s > 0 and phase.untraced_s > 0 and not steps.threads_ns


def look(worker: Worker, replacement: int) -> Looks:
    asked = {"tokens": [5, 6, 7, 8], "replaced": 0, "replacement": replacement}
    return worker.call(Looks, "lab.features.trace.child.look", **asked)


def test_weights_are_a_triangle_and_k_and_v_depend_on_earlier_tokens_except_in_the_first_layer(
    mini: Path,
) -> None:
    settings = dataclasses.replace(
        SETTINGS, n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn="off"
    )
    with Worker() as worker:
        worker.load(mini, settings)
        worker.new_context(settings)
        looks, alike = (look(worker, replacement) for replacement in (9, 5))
        worker.new_context(dataclasses.replace(settings, flash_attn="on"))
        with pytest.raises(LabError, match="does not show the attention weights"):
            look(worker, 9)
    assert len(looks.prefill) == len(looks.decode) == len(looks.changes) == 3
    for rows, decoded in zip(looks.prefill, looks.decode, strict=True):
        for i, row in enumerate(rows):
            assert sum(row) == pytest.approx(1) and not any(row[i + 1 :]) and all(row[: i + 1])
        assert decoded == pytest.approx(rows[-1], abs=1e-4)
    first, *later = looks.changes
    assert max(first) == 0 and all(k > 0.001 and v > 0.001 for k, v in later)
    assert not any(map(any, alike.changes))


def test_the_command_shows_what_a_text_attends_to(tmp_path: Path) -> None:
    asked = "trace", "--attention", "The cat sat", "-t", 1, "-o", tmp_path
    status, out, _ = run_lab(*asked)
    assert status == 0 and "Attention of ' sat', the last of 3 tokens" in out
    assert "stay exactly the same in layer 0:" in " ".join(out.split())
    assert {path.suffix for path in tmp_path.glob("*-attention.*")} == {".png", ".svg"}
    (path,) = tmp_path.glob("*.jsonl")
    assert "Attention of ' sat', the last of 3 tokens" in run_lab("show", path)[1]
    assert run_lab("report", path)[0] == 0
    page = path.with_suffix(".html").read_text()
    assert "lab trace --attention &#39;The cat sat&#39; --threads 1 --flash-attn off" in page
    assert (
        "<svg" in page and "<image" not in page
    )  # which the page's content security policy would block
    for options, words in {
        ("-fa", "on"): "Flash attention never writes",
        ("-p", 10, "-r", 2): "does not use --prompt-len and --repeat.",
    }.items():
        assert words in run_lab("trace", "--attention", "The cat sat", *options)[2]


def test_the_results_file_shows_reports_and_draws_the_same_again(
    mini: Path, tmp_path: Path
) -> None:
    asked = (
        "trace",
        "-m",
        mini,
        "-p",
        6,
        "-n",
        2,
        "-r",
        1,
        "-t",
        1,
        "--prompt",
        "random",
        "-o",
        tmp_path,
        "--report",
    )
    status, out, _ = run_lab(*asked)
    (path,) = tmp_path.glob("*.jsonl")
    text = path.with_suffix(".html").read_text()
    assert status == 0 and all(
        words in out for words in ("Prefill of 6 tokens", "last matrix", "Where do ", "each stop")
    )
    assert {drawn.suffix for drawn in tmp_path.glob("*-trace.*")} == {".png", ".svg"}
    assert run_lab("show", path)[1].splitlines()[:8] == out.splitlines()[:8]
    assert len(run_lab("plot", path, "-o", tmp_path / "again")[1].split()) == 2
    for words in (
        "Where does the time of a token go?",
        "Decode of 1 token by ",
        "last matrix",
        "<svg",
    ):
        assert words in text
    assert "lab trace --prompt-len 6 --gen 2 --repeat 1" in text
    (record,) = results.read([path.with_suffix(".html")]).traces
    assert record == results.read([path]).traces[0]
    for command in ("explain", "compare", "export"):
        status, _, err = run_lab(command, path)
        assert status == 1 and "only results of lab trace" in err
    assert json.loads(run_lab("show", path, "--json")[1])["traces"][0]["phases"][1]["n_past"] == 6
