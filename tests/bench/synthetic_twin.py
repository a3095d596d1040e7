"""Does speed depend on what the weights say? The embedded model against its random twin.

    python3 -m uv run python -m tests.bench.synthetic_twin [PAIRS] [QUANTIZATION]

The twin has the same shape and, tensor by tensor, the same types; with a quantization, both are
made in it by llama.cpp's quantizer first. Both models stay loaded, each in a process of its own,
and take turns of less than a second in alternating order, so that a neighbour on a shared machine
disturbs both: prefill of 128 tokens, then 64 decode steps. What counts is the median of the pairs'
ratios.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from lab.core import script as scripts
from lab.models import catalog, synthetic
from lab.models.catalog import Dimensions
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.plan import make_plan
from tests.bench.against_llama_bench import decode_tps

N_PROMPT = 128
N_GEN = 64


def tensor_types(path: Path) -> dict[str, str]:
    import gguf

    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@dataclass(frozen=True)
class Side:
    """A loaded model, in a process of its own."""

    worker: Worker
    n_vocab: int


def write_twin(original: Path, twin: Path) -> None:
    """Write random weights with the shape and the types of the embedded model."""
    types = tensor_types(original)

    def type_of(
        shape: Dimensions,
        quantization: str,
        name: str,
        columns: int,
    ) -> str:
        return types[name]

    with mock.patch.object(synthetic, "type_of", type_of):
        synthetic.write(catalog.find(catalog.DEFAULT).shape, "Q4_1", twin)
    assert tensor_types(twin) == types


def load(
    worker: Worker,
    path: Path,
    quantization: str | None,
) -> Side:
    """Load a model, in another quantization if one is named, and warm it up."""
    if quantization:
        quantized = path.with_name(f"{path.stem}-{quantization}.gguf")
        worker.quantize(path, quantized, quantization, lambda done: None)
        path = quantized
    plan = make_plan(
        worker,
        [N_PROMPT],
        N_GEN + 1,
        1,
        str(path),
        prompt="random",
    )
    side = Side(worker, worker.load(path, plan.settings).n_vocab)
    worker.new_context(dataclasses.replace(plan.settings, n_ctx=N_PROMPT + N_GEN))
    take_turn(side, 0)
    print(f"{path.stem}: {plan.model.quantization}, {plan.model.tensor_bytes}")
    return side


def take_turn(side: Side, seed: int) -> tuple[float, float]:
    """Prefill and decode rate, in tokens/s."""
    prompt = prompts.random_ids(N_PROMPT, side.n_vocab, None, seed, 0)
    prefill = side.worker.run(scripts.run(prompt, 1, 512), lambda progress: None).steps
    decode = side.worker.run(
        scripts.run(prompt[:1], N_GEN + 1, 512), lambda progress: None
    ).steps
    return N_PROMPT / (prefill.ready_ns[-1] / 1e9), decode_tps(decode)


def ratios_of_pair(
    real: Side,
    twin: Side,
    n: int,
) -> tuple[float, float]:
    """Prefill and decode rate of the twin over those of the real model; odd pairs start real."""
    if n % 2:
        real_rates = take_turn(real, n + 1)
        twin_rates = take_turn(twin, n + 1)
    else:
        twin_rates = take_turn(twin, n + 1)
        real_rates = take_turn(real, n + 1)
    return twin_rates[0] / real_rates[0], twin_rates[1] / real_rates[1]


def report(name: str, ratios: Sequence[float]) -> None:
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name}: twin over real, median of {len(ratios)} paired ratios "
        f"{statistics.median(ratios):.3f} (half of them from {low:.3f} to {high:.3f}); "
        "0.97 to 1.03 wanted"
    )


def main() -> None:
    n_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    quantization = sys.argv[2] if len(sys.argv) > 2 else None
    prefill_ratios = []
    decode_ratios = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Both files are written anew into one folder: how a file came to the page cache shows in
        # the speed.
        original = Path(shutil.copy(catalog.embedded_path(), folder / "real.gguf"))
        write_twin(original, folder / "twin.gguf")
        real = load(stack.enter_context(Worker()), original, quantization)
        twin = load(stack.enter_context(Worker()), folder / "twin.gguf", quantization)
        for n in range(n_pairs):
            prefill, decode = ratios_of_pair(real, twin, n)
            print(f"pair {n + 1:3}   prefill {prefill:.3f}   decode {decode:.3f}", flush=True)
            prefill_ratios.append(prefill)
            decode_ratios.append(decode)
    report("prefill", prefill_ratios)
    report("decode", decode_ratios)


if __name__ == "__main__":
    main()
