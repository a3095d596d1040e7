"""The models of lesson 7, as its cells define them, on cases that are worked out by hand."""

import ast
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "07-from-one-machine-to-many.ipynb"


def functions() -> list[ast.FunctionDef]:
    """The functions that the cells define."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    definitions: list[ast.FunctionDef] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            body = ast.parse(cell.source).body
            definitions += [node for node in body if isinstance(node, ast.FunctionDef)]
    return definitions


def model(name: str, **names: Any) -> Any:
    """The function of a cell; `names` are what the notebook has measured or defined before it."""
    (definition,) = [node for node in functions() if node.name == name]
    namespace = {"math": math, **names}
    exec(ast.unparse(definition), namespace)
    return namespace[name]


def linear(n: int) -> float:
    """A machine where each sequence costs a second."""
    return float(n)


def flat(n: int) -> float:
    """A machine where further sequences cost nothing."""
    return 1.0


# T(P) = 1 s + 2 s P + 3 s P^2, t(p) = 5 s + 0.5 s p
PREFILL = SimpleNamespace(seconds=lambda n: 1 + 2 * n + 3 * n**2)
DECODE = SimpleNamespace(a=5.0, b=0.5, seconds=lambda position: 5 + 0.5 * position)
KV = SimpleNamespace(kv_bytes=lambda model: 10)


@pytest.mark.parametrize(
    ("lengths", "refill", "steps", "linear_s"),
    [
        ([1, 3], False, 3, 4),  # steps of 2, 1 and 1
        ([1, 3], True, 3, 4),  # nobody waits for the free place
        ([1, 3, 1, 3], False, 6, 8),  # two batches of three steps
        ([1, 3, 1, 3], True, 5, 8),  # 2, 2, 2, 1, 1: the fourth starts with the fourth step
        ([3, 1, 1, 1], True, 3, 6),  # the short ones follow each other beside the long one
        ([], True, 0, 0),
    ],
)
def test_a_step_gives_each_running_answer_a_token(
    lengths: list[int], refill: bool, steps: int, linear_s: float
) -> None:
    serve = model("serve")
    assert serve(lengths, 2, linear, refill) == (steps, linear_s)
    assert serve(lengths, 2, flat, refill) == (steps, steps)


def test_padded_places_are_paid_to_the_end_of_the_batch() -> None:
    serve = model("serve")
    times_as_fast = model("times_as_fast", serve=serve, lengths=[1, 3, 1, 3])
    assert times_as_fast(2, linear) == (12 / 8, 1)  # padded: 6 steps of 2 s
    assert times_as_fast(2, flat) == (6 / 5, 6 / 5)


def test_a_step_lies_between_measured_ones_and_grows_with_the_context() -> None:
    step_s = model(
        "step_s", numbers=[1, 4, 8], seconds=[10, 16, 32], decode=DECODE, short_context=80
    )
    assert [step_s(n) for n in (1, 2, 4, 6, 8, 10)] == [10, 12, 16, 24, 32, 40]
    assert step_s(4, 90) == 16 + 4 * 0.5 * 10


def test_a_step_of_more_sequences_never_gets_shorter_beyond_the_measured_ones() -> None:
    step_s = model("step_s", numbers=[1, 8], seconds=[10, 9], decode=DECODE, short_context=80)
    assert step_s(1000) == 9


def test_memory_and_speed_each_end_the_number_of_sequences() -> None:
    n_fit = model("n_fit", lesson=KV)
    weights = SimpleNamespace(n_bytes=1000)
    assert n_fit(1_999, weights, 10) == 9  # 999 bytes for caches of 100
    n_fast = model("n_fast", step_s=lambda n, context: 0.01 * n)
    assert n_fast(100, 50, slowest_tps=5) == 20  # 0.2 s a token
    assert n_fast(100, 7, slowest_tps=5) == 7
    assert n_fast(100, 50, slowest_tps=101) == 0


def test_pages_hold_whole_blocks_and_a_shared_beginning_once() -> None:
    assert model("contiguous")([5, 17], 32) == 64
    paged = model("paged")
    assert paged([5, 17], 16) == 16 + 32
    assert paged([5, 17], 1) == 22
    assert paged([40, 33], 16, n_shared=32) == 32 + 16 + 16
    assert paged([40, 33], 16, n_shared=31) == 16 + 32 + 32  # half a block is not shared


def test_a_link_pays_if_it_moves_a_cache_as_fast_as_it_is_computed() -> None:
    link = model("link_bytes_per_s", lesson=KV, model=None, prefill=PREFILL)
    assert link(10) == 100 / (1 + 20 + 300)


def test_busy_seconds_share_a_decode_step_among_its_sequences() -> None:
    busy_s = model("busy_s", prefill=PREFILL, step_s=lambda places, context: 8 + context)
    prefill_s, decode_s = busy_s([(1, 4), (2, 2)], places=2)
    assert prefill_s == (6 + 17) / 2
    assert decode_s == (4 * (8 + 3) / 2 + 2 * (8 + 3) / 2) / 2


def test_a_chunk_adds_its_prefill_to_a_token() -> None:
    named = {"prefill": PREFILL, "decode": DECODE, "n_context": 2}
    gap_s = model("gap_s", **named)
    assert gap_s(10, 4) == (1 + 20 + 300) - (1 + 12 + 108) + 6
    assert gap_s(10, 10) == 321 + 6
    assert model("newcomer_s", **named)(10, 4) == 321 + 3 * 6


def test_halves_of_two_matrices_add_up() -> None:
    times = model("times")
    feed_forward = model("feed_forward", times=times)
    assert times([[1, 2], [3, 4]], [5, 6]) == [17, 39]
    # The middle is [3, 0, 7]: the second number is negative before it is cut off.
    first = [[3, 0], [-1, -1], [7, 0]]
    assert feed_forward(first, [[1, 9, 2]], [1, 0]) == [3 + 14]
    assert feed_forward(first[:1], [[1]], [1, 0]) == [3]
    assert feed_forward(first[1:], [[9, 2]], [1, 0]) == [14]


def test_two_all_reduces_a_layer_eat_the_gain() -> None:
    parallel_s = model("parallel_s")
    assert parallel_s(8.0, 1, 3, 100.0) == 8
    assert parallel_s(8.0, 2, 3, 0.5) == 4 + 3
    most_s = model("most_s")
    for n in (2, 4, 8):
        assert parallel_s(8.0, n, 3, most_s(8.0, n, 3)) == pytest.approx(8)


def test_the_parts_of_a_request_are_those_of_its_tokens() -> None:
    parts = model("parts_s", prefill=PREFILL, decode=DECODE)(3, 4)
    assert parts == {"prefill": 34, "weights": 3 * 5, "attention": 0.5 * (3 + 4 + 5)}
    with_speeds = model("with_speeds")
    assert with_speeds(parts, {}) == sum(parts.values())
    assert with_speeds(parts, {"weights": 3, "attention": 2}) == 34 + 5 + 3
