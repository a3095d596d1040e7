"""lab trace: the arithmetic on made-up stamps, and the real operations of a small model."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.core import cost, results
from lab.core.record import Ceilings, Rate
from lab.engine import kernels
from lab.errors import LabError
from lab.features.trace import child, command, operations, phases
from lab.features.trace.lines import Looks, TracedPart, TracedPhase, TraceLine
from lab.features.trace.nodes import Node, Operand, StepTrace, Trace
from lab.process.wire import Probe
from lab.process.worker import Worker
from lab.show.section import Context, Section
from tests.support.command import run_lab
from tests.support.records import MACHINE, MODEL, SETTINGS
from tests.support.tables import headings


def operand(name: str, *ne: int, kind: str = "F32", n_bytes: int | None = None) -> Operand:
    sizes = (*ne, 1, 1, 1, 1)[:4]
    if n_bytes is None:
        n_bytes = 4 * sizes[0] * sizes[1] * sizes[2]
    return Operand(name, kind, sizes, n_bytes)


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
    """One decode step at position 40: 5 us outside its operations, 7 us to choose a token."""
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


def decode_phase(planted: StepTrace, ceilings: Ceilings | None = None) -> TracedPhase:
    return phases.phase("decode", planted, MODEL, SETTINGS, ceilings)


def chapter(decode: TracedPhase) -> Section:
    """The section of decode, on a page with a prefill of the same operations."""
    line = TraceLine(
        session="session",
        machine=MACHINE,
        model=MODEL,
        settings=SETTINGS,
        started_at="2026-01-01T00:00:00Z",
        prefill=decode,
        decode=decode,
        ceilings_measured_at=None,
    )
    (section,) = command.chapters([line], Context())
    return section.parts[-1]


def text_of(decode: TracedPhase) -> str:
    section = chapter(decode)
    return " ".join([*section.sentences, *section.notes, *section.warnings])


def test_the_cost_of_a_stop_is_that_of_a_view() -> None:
    phase = decode_phase(steps(EMBEDDING, Q, VIEW, untraced_us=9))

    assert phase.stops_s == pytest.approx({"CPU": 1e-6})
    names = [part.operation for part in phase.parts]
    assert names == ["embedding", "Q", "outside operations", "sampling"]
    assert [1e6 * part.seconds for part in phase.parts] == pytest.approx([2, 2, 5, 7])
    assert phase.sum_s == pytest.approx(9e-6)
    assert phase.off == pytest.approx(0)


def test_the_start_of_threads_is_taken_off_what_uses_several_on_the_cpu() -> None:
    on_gpu = dataclasses.replace(Q, buffer="CUDA0")
    planted = steps(EMBEDDING, Q, VIEW, on_gpu, untraced_us=9)
    planted = dataclasses.replace(planted, threads_ns=1500)

    phase = decode_phase(planted)

    times_us = {}
    for part in phase.parts:
        times_us[part.operation, part.device] = 1e6 * part.seconds
    assert times_us["embedding", "CPU"] == pytest.approx(2)
    assert times_us["Q", "CPU"] == pytest.approx(0.5)
    assert times_us["Q", "CUDA0"] == pytest.approx(3)
    costs = "each stop on CPU and 1.50 us for the start and end of the CPU's threads,"
    assert costs in text_of(phase)


@pytest.mark.parametrize(
    ("n_threads", "expected_ns"),
    [(1, 0), (4, 700)],
)
def test_the_start_and_end_of_threads_is_what_a_product_alone_takes_longer_with_them(
    monkeypatch: pytest.MonkeyPatch, n_threads: int, expected_ns: int
) -> None:
    """A product takes 50 ns; a graph takes 300 ns more, and with several threads another 700 ns."""
    sizes: set[int] = set()

    def run(probe: Probe) -> Any:
        sizes.add(probe.n_bytes)
        n_products = 2 if probe.n_bytes == max(sizes) else 1
        graph_ns = 300 if probe.n_threads == 1 else 1000
        return SimpleNamespace(times_ns=(graph_ns + 50 * n_products,))

    monkeypatch.setattr(kernels, "run", run)
    assert child.threads_ns(n_threads) == expected_ns


@pytest.mark.parametrize(
    ("op", "result", "weights", "previous", "expected"),
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
    op: str, result: str, weights: str, previous: int | None, expected: tuple[str, int | None]
) -> None:
    planted = node(
        op,
        result,
        operand(weights, 8, 8),
        operand("x", 8),
    )
    assert operations.place_of(planted, previous) == expected


def test_bytes_and_flops_follow_from_shapes() -> None:
    assert operations.cost_of(EMBEDDING) == (9 + 4, None)  # one row of 100, and its number
    assert operations.cost_of(Q) == (72 + 32, 2 * 8 * 16)
    writes = node(
        "SET_ROWS",
        "c",
        operand("k", 8),
        operand("ids", 1),
        operand("cache", 8, 1000),
    )
    assert operations.cost_of(writes) == (32 + 4, None)


def test_of_experts_only_those_that_are_used_count() -> None:
    experts = operand("blk.0.ffn_up_exps.weight", 8, 16, 4, kind="F32")
    ids = operand("ids", 1, 1)
    product = node("MUL_MAT_ID", "ffn_moe_up-0", experts, operand("x", 8), ids, ne=(16, 1, 1))
    n_bytes, _ = operations.cost_of(product)
    assert n_bytes == pytest.approx(4 * 8 * 16 + 32 + 4)


def test_attention_counts_the_positions_of_all_heads() -> None:
    heads = operand("q", 8, 1, 6), operand("k", 8, 256, 2), operand("v", 4, 256, 2)
    _, flops = operations.cost_of(node("FLASH_ATTN_EXT", "node_1", *heads))
    assert flops == 2 * 6 * 256 * (8 + 4)


RATE = Rate("mul_mat", "Q4_0", "CPU", 16, 8, 1, SETTINGS.n_threads, 720, 1, (5000,))


def ceilings_of(rate: Rate) -> Ceilings:
    return Ceilings("2026-11-22T00:00:00Z", MACHINE, False, (rate,))


def test_an_operation_is_held_against_the_ceiling_of_its_kernel() -> None:
    phase = decode_phase(steps(Q, VIEW, untraced_us=7), ceilings_of(RATE))
    assert phase.parts[0].least_s == pytest.approx(0.5e-6)
    assert phase.parts[0].held_s == pytest.approx(2e-6)
    assert "1 operation of the step would take 500 ns instead of 2.00 us" in text_of(phase)


def test_an_operation_above_its_ceiling_shows_that_the_ceiling_is_too_low() -> None:
    slow = dataclasses.replace(RATE, times_ns=(50_000,))
    phase = decode_phase(steps(Q, VIEW, untraced_us=7), ceilings_of(slow))
    assert "faster than their ceiling, so the ceiling was measured too low" in text_of(phase)


def test_a_kernel_that_was_not_probed_has_no_ceiling() -> None:
    another_type = dataclasses.replace(RATE, type="Q8_0")
    phase = decode_phase(steps(Q, VIEW), ceilings_of(another_type))
    assert phase.parts[0].least_s is None


def test_a_sum_that_is_near_has_shares() -> None:
    section = chapter(decode_phase(steps(Q, VIEW, untraced_us=7)))
    assert not section.warnings
    assert "share" in headings(section)
    assert section.sentences[0].startswith("Where do the 14.0 us of a decode step")


def test_a_sum_that_is_far_off_says_so_and_has_no_shares() -> None:
    phase = decode_phase(steps(Q, VIEW, untraced_us=7), ceilings_of(RATE))
    section = chapter(dataclasses.replace(phase, untraced_s=14e-6))
    (warning,) = section.warnings
    assert warning.startswith(
        "Decode: 2 operations, less 1.00 us for each stop on CPU, add up to 7.00 us, 50 % less than"
    )
    assert "too far for shares" in warning
    assert not {"share", "of\nceiling"} & set(headings(section))
    assert not any("takes" in sentence for sentence in section.sentences)


def test_the_real_operations_have_the_flops_and_weights_of_the_model(mini: Path) -> None:
    settings = dataclasses.replace(
        SETTINGS,
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
    )
    with Worker() as worker:
        model = worker.read_model(mini, "mini", "file")
        worker.load(mini, settings)
        worker.new_context(settings)
        asked = {
            "tokens": [5, 6, 7, 8, 9],
            "n_gen": 2,
            "n_rounds": 2,
        }
        traced = worker.call(Trace, "lab.features.trace.child.trace", **asked)
    assert traced.prefill.n_tokens == 5
    assert traced.prefill.n_past == 0
    assert traced.prefill.n_steps == 2
    assert traced.decode.n_tokens == 1
    assert traced.decode.n_past == 5
    assert traced.decode.n_steps == 4
    for step in (traced.prefill, traced.decode):
        phase = phases.phase("decode", step, model, settings)
        products = cost.products(model, step.n_tokens, 1)
        assert products
        expected_flops = sum(product.flops for product in products)
        assert flops_of_weights(phase.parts) == pytest.approx(expected_flops)
        assert {part.layer for part in phase.parts} == {None, *range(model.n_layer or 0)}
        assert not [part for part in phase.parts if part.operation.startswith("other")]
        assert phase.stops_s["CPU"] > 0
        assert phase.sum_s > 0
        assert phase.untraced_s > 0
        assert step.threads_ns == 0


def flops_of_weights(parts: tuple[TracedPart, ...]) -> float:
    return sum(part.flops or 0 for part in parts if part.operation != operations.ATTENTION)


def look(worker: Worker, replacement: int) -> Looks:
    asked = {
        "tokens": [5, 6, 7, 8],
        "replaced": 0,
        "replacement": replacement,
    }
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
        looks = look(worker, replacement=9)
        unchanged = look(worker, replacement=5)
        worker.new_context(dataclasses.replace(settings, flash_attn="on"))
        with pytest.raises(LabError, match="does not show the attention weights"):
            look(worker, replacement=9)
    assert len(looks.prefill) == len(looks.decode) == len(looks.changes) == 3
    for rows, decoded in zip(looks.prefill, looks.decode, strict=True):
        for i, row in enumerate(rows):
            assert sum(row) == pytest.approx(1)
            assert min(row[: i + 1]) > 0
            assert set(row[i + 1 :]) <= {0.0}
        assert decoded == pytest.approx(rows[-1], abs=1e-4)
    first, *later = looks.changes
    assert max(first) == 0
    assert all(min(changes) > 0.001 for changes in later)
    assert not any(map(any, unchanged.changes))


def test_the_command_shows_what_a_text_attends_to(shallow: Path, tmp_path: Path) -> None:
    asked = ("--attention", "The cat sat", "-m", shallow, "-t", 1, "-o", tmp_path)
    status, out, _ = run_lab("trace", *asked)
    assert status == 0
    assert "Attention of ' sat', the last of 3 tokens" in out
    assert "stay exactly the same in layer 0:" in " ".join(out.split())
    assert {path.suffix for path in tmp_path.glob("*-attention.*")} == {".png", ".svg"}
    (path,) = tmp_path.glob("*.jsonl")
    assert "Attention of ' sat', the last of 3 tokens" in run_lab("show", path)[1]
    assert run_lab("report", path)[0] == 0
    page = path.with_suffix(".html").read_text()
    model = f"--model FOLDER/{shallow.name}"
    assert f"lab trace --attention &#39;The cat sat&#39; {model} --threads 1" in page
    assert "<svg" in page
    assert "<image" not in page  # the page's content security policy would block it


def test_attention_refuses_flash_attention_and_options_of_times() -> None:
    asked = "trace", "--attention", "The cat sat"
    assert "Flash attention never writes" in run_lab(*asked, "-fa", "on")[2]
    assert "does not use --prompt-len and --repeat." in run_lab(*asked, "-p", 10, "-r", 2)[2]


def test_the_results_file_shows_reports_and_draws_the_same_again(
    mini: Path, tmp_path: Path
) -> None:
    lengths = "-p", 6, "-n", 2, "-r", 1
    options = "-m", mini, "-t", 1, "--prompt", "random", "-o", tmp_path, "--report"
    status, out, _ = run_lab("trace", *lengths, *options)
    assert status == 0
    for phrase in ("Prefill of 6 tokens", "last matrix", "times the FLOPs", "each stop"):
        assert phrase in run_lab("show", *tmp_path.glob("*.jsonl"), "--details")[1]
    assert {drawn.suffix for drawn in tmp_path.glob("*-trace.*")} == {".png", ".svg"}

    (path,) = tmp_path.glob("*.jsonl")
    assert run_lab("show", path)[1].splitlines()[:8] == out.splitlines()[:8]
    assert len(run_lab("plot", path, "-o", tmp_path / "again")[1].split()) == 2
    document = json.loads(run_lab("show", path, "--json")[1])
    assert document["traces"][0]["phases"][1]["n_past"] == 6

    page = path.with_suffix(".html")
    for phrase in (
        "Where does the time of a token go?",
        "Decode of 1 token by ",
        "last matrix",
        "<svg",
        "lab trace --prompt-len 6 --gen 2 --repeat 1 --model FOLDER/mini.gguf",
    ):
        assert phrase in page.read_text(), phrase
    (line,) = results.read([path]).findings
    assert results.read([page]).findings == (line,)


def test_commands_for_runs_say_that_a_file_has_none(mini: Path, tmp_path: Path) -> None:
    options = (
        "-p",
        6,
        "-n",
        2,
        "-r",
        1,
        "-m",
        mini,
        "-t",
        1,
        "-o",
        tmp_path,
        "--prompt",
        "random",
    )
    run_lab("trace", *options)
    (path,) = tmp_path.glob("*.jsonl")
    for name in ("explain", "compare", "export"):
        status, _, err = run_lab(name, path)
        assert status == 1
        assert "no runs of steps, only other results" in err, name
