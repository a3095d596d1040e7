"""What llama.cpp computes, holds and loads of a model, beside what the lab counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core import cost, memory
from lab.core.matrices import UNMULTIPLIED
from lab.core.record import Model
from lab.features.trace.nodes import Node, StepTrace, Trace
from lab.models import synthetic
from lab.models.catalog import Entry
from lab.process.worker import Worker
from tests.support import miniature
from tests.support.records import SETTINGS

N_PAST = 255
"""Tokens before the decoded one: with it they fill the 256 cells that llama.cpp computes."""

SMALL = dataclasses.replace(
    SETTINGS,
    n_ctx=512,
    n_batch=512,
    n_ubatch=512,
    n_threads=1,
    n_threads_batch=1,
    flash_attn="on",
    mmap=False,
    repack=False,
)
TOLERANCE = 0.02
LOGGED_DIGITS = 6000  # bytes: llama.cpp prints hundredths of a MiB
MAPPED_PAGES = 80_000  # bytes that a mapped tensor may be rounded by


@dataclass(frozen=True)
class Comparison:
    """A figure as the lab counts it, and as llama.cpp has it."""

    name: str
    counted: float
    actual: float
    slack: float = 0.0

    @property
    def ratio(self) -> float:
        return self.counted / self.actual if self.actual else math.inf

    @property
    def is_equal(self) -> bool:
        difference = abs(self.counted - self.actual)
        return difference <= TOLERANCE * self.actual + self.slack


@dataclass(frozen=True)
class Examined:
    """A model of the catalog or of a table, made, loaded and run."""

    model: Model
    expected: Model
    trace: Trace
    weight_bytes: float
    cache_bytes: float


def examine(worker: Worker, arch: str, folder: Path) -> Examined:
    """Make a miniature of an architecture, load it, and trace a prompt and a token."""
    entry = miniature.entry(arch, window=N_PAST + 1)
    return examine_entry(worker, entry, miniature.quantization(arch), folder)


def examine_entry(worker: Worker, entry: Entry, quantization: str, folder: Path) -> Examined:
    """Make a model of a shape, load it, and trace a prompt and a token."""
    path = folder / f"{entry.name}.gguf"
    synthetic.write(entry.shape, quantization, path)
    model = worker.read_model(path, entry.name, "synthetic")
    worker.load(path, SMALL)  # each weight in one buffer
    worker.new_context(SMALL)
    script = {"tokens": list(range(1, N_PAST + 1)), "n_gen": 1, "n_rounds": 1}
    trace = worker.call(Trace, "lab.features.trace.child.trace", **script)
    buffers = worker.placement().buffers
    weight_bytes = sum(buffer.n_bytes for buffer in buffers if buffer.part == "model")
    cache_bytes, _ = miniature.reserved(path, SMALL)
    path.unlink()
    expected = synthetic.model_of(entry, quantization)
    return Examined(model, expected, trace, weight_bytes, cache_bytes)


def comparisons(examined: Examined) -> Iterator[Comparison]:
    """The figures of a model: weights, cache, and FLOPs of a prompt and of a decoded token."""
    model = examined.model
    counted = sum(model.tensor_bytes.values())
    slack = LOGGED_DIGITS
    if any(matrix.part == UNMULTIPLIED for matrix in model.matrices or ()):
        slack = MAPPED_PAGES  # a table that is read by rows stays in the file
    yield Comparison("weights in buffers", counted, examined.weight_bytes, slack)
    cache = memory.of_context(model, SMALL).kv_cache_bytes
    yield Comparison("cache", cache or 0.0, examined.cache_bytes, LOGGED_DIGITS)
    steps = {
        "prompt": (examined.trace.prefill, N_PAST, 0),
        "token": (examined.trace.decode, 1, N_PAST),
    }
    for name, (traced, n_tokens, n_past) in steps.items():
        step = cost.step(model, n_tokens, n_past, 1)
        assert step is not None, model.uncounted
        products = step.layer_flops + step.head_flops
        yield Comparison(f"products of a {name}", products, product_flops(traced))
        state = cost.state_flops(model) * n_tokens
        yield Comparison(f"states of a {name}", state, state_flops(traced.nodes))
        if name == "token":
            attention = step.attention_flops - state
            yield Comparison("attention of a token", attention, attention_flops(traced.nodes))


def product_flops(traced: StepTrace) -> float:
    """FLOPs of products with weights, and of convolutions."""
    total = 0.0
    for node in traced.nodes:
        if node.op in ("MUL_MAT", "MUL_MAT_ID"):
            total += 2.0 * node.sources[0].ne[0] * math.prod(node.result.ne)
        elif node.op == "SSM_CONV":
            total += 2.0 * node.sources[1].ne[0] * math.prod(node.result.ne)
    return total


def attention_flops(nodes: Sequence[Node]) -> float:
    """FLOPs over all cells that flash attention computes."""
    total = 0.0
    for node in nodes:
        if node.op == "FLASH_ATTN_EXT":
            queries, keys, values = node.sources[:3]
            width = keys.ne[0] + values.ne[0]
            total += 2.0 * math.prod(queries.ne[1:]) * keys.ne[1] * width
    return total


def state_flops(nodes: Sequence[Node]) -> float:
    """FLOPs on the states of recurrent layers, from the sizes of the operations' operands."""
    total = 0.0
    for node in nodes:
        if node.op == "SSM_SCAN":
            # state {n_state, width, heads, sequences}, inputs {width, heads, tokens, sequences}
            state, inputs = node.sources[:2]
            total += 5.0 * math.prod(state.ne[:3]) * inputs.ne[2]
        elif node.op == "GATED_DELTA_NET":
            # values {width, heads, tokens, sequences}, keys of the same width
            values = node.sources[2]
            total += 7.0 * values.ne[0] * math.prod(values.ne[:3])
    return total
