"""Does speed depend on what the weights say? The embedded model against its twin with random weights.

    python3 -m uv run python -m tests.bench.synthetic_twin [PAIRS] [QUANTIZATION]

The twin has the same shape and, tensor by tensor, the same types; with a quantization, both are made in it by
llama.cpp's quantizer first. Both models stay loaded, each in a process of its own, and take turns of less than a
second in alternating order, so that a neighbour on a shared machine disturbs both: prefill of 128 tokens, then 64
decode steps. What counts is the median of the pairs' ratios.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from lab.core import script as scripts
from lab.models import catalog, synthetic
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.plan import make_plan
from tests.bench.against_llama_bench import decode_tps

N_PROMPT = 128
N_GEN = 64


def tensor_types(path: Path) -> dict[str, str]:
    import gguf

    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def one_turn(worker: Worker, n_vocab: int, seed: int) -> tuple[float, float]:
    """Prefill and decode rate, in tokens/s."""
    prompt = prompts.random_ids(N_PROMPT, n_vocab, None, seed, 0)
    prefill = worker.run(scripts.run(prompt, 1, 512), lambda progress: None).steps
    decode = worker.run(scripts.run(prompt[:1], N_GEN + 1, 512), lambda progress: None).steps
    return N_PROMPT / (prefill.ready_ns[-1] / 1e9), decode_tps(decode)


def main() -> None:
    n_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    quantization = sys.argv[2] if len(sys.argv) > 2 else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Both files are written anew into one folder: how a file came to the page cache shows in the speed.
        real = Path(shutil.copy(catalog.embedded_path(), folder / "real.gguf"))
        twin = folder / "twin.gguf"
        types = tensor_types(real)
        with mock.patch.object(
            synthetic, "type_of", lambda shape, quantization, name, columns: types[name]
        ):
            synthetic.write(catalog.find(catalog.DEFAULT).shape, "Q4_1", twin)
        assert tensor_types(twin) == tensor_types(real)
        workers = {name: stack.enter_context(Worker()) for name in ("real", "twin")}
        for name, path in {"real": real, "twin": twin}.items():
            worker = workers[name]
            model = path
            if quantization:
                model = folder / f"{name}-{quantization}.gguf"
                worker.quantize(path, model, quantization, lambda done: None)
            plan = make_plan(worker, [N_PROMPT], N_GEN + 1, 1, str(model), prompt="random")
            n_vocab = worker.load(model, plan.settings).n_vocab
            worker.new_context(dataclasses.replace(plan.settings, n_ctx=N_PROMPT + N_GEN))
            one_turn(worker, n_vocab, 0)  # warm-up
            print(f"{name}: {plan.model.quantization}, {plan.model.tensor_bytes}")
        ratios: list[tuple[float, float]] = []
        for n in range(n_pairs):
            order = ("real", "twin") if n % 2 else ("twin", "real")
            rates = {name: one_turn(workers[name], n_vocab, n + 1) for name in order}
            ratios.append(
                (rates["twin"][0] / rates["real"][0], rates["twin"][1] / rates["real"][1])
            )
            print(
                f"pair {n + 1:3}   prefill {ratios[-1][0]:.3f}   decode {ratios[-1][1]:.3f}",
                flush=True,
            )
    for name, values in (("prefill", [p for p, _ in ratios]), ("decode", [d for _, d in ratios])):
        low, high = statistics.quantiles(values, n=4)[::2]
        print(
            f"{name}: twin over real, median of {len(values)} paired ratios {statistics.median(values):.3f} "
            f"(half of them from {low:.3f} to {high:.3f}); 0.97 to 1.03 wanted"
        )


if __name__ == "__main__":
    main()
