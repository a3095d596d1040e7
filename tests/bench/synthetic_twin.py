"""Does speed depend on what the weights say? The embedded model against its twin with random weights.

    python3 -m uv run python -m tests.bench.synthetic_twin [ROUNDS] [QUANTIZATION]

The twin has the same shape and, tensor by tensor, the same types; with a quantization, both are made in it by
llama.cpp's quantizer first. Both models stay loaded, each in a process of its own; a round measures prefill of
512 tokens and 128 decode steps on both, in alternating order. What counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from lab import catalog, synthetic
from lab.plan import make_plan
from lab.worker import Worker
from tests.bench.against_llama_bench import N_GEN, N_PROMPT, lab_round


def tensor_types(path: Path) -> dict[str, str]:
    import gguf

    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def main() -> None:
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    quantization = sys.argv[2] if len(sys.argv) > 2 else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        real, twin = catalog.embedded_path(), folder / "twin.gguf"
        synthetic.write(catalog.find(catalog.DEFAULT).shape, "Q4_1", twin, types=tensor_types(real))
        assert tensor_types(twin) == tensor_types(real)
        workers = {name: stack.enter_context(Worker()) for name in ("real", "twin")}
        for name, path in {"real": real, "twin": twin}.items():
            worker, model = workers[name], path
            if quantization:
                model = folder / f"{name}-{quantization}.gguf"
                worker.quantize(path, model, quantization, lambda done: None)
            plan = make_plan(worker, [N_PROMPT], N_GEN + 1, 1, str(model), "random")
            n_vocab = worker.load(model, plan.settings.n_gpu_layers).n_vocab
            worker.new_context(dataclasses.replace(plan.settings, n_ctx=N_PROMPT + N_GEN))
            lab_round(worker, n_vocab, 0)  # warm-up
            print(f"{name}: {plan.model.quantization}, {plan.model.tensor_bytes}")
        ratios: list[tuple[float, float]] = []
        for n in range(n_rounds):
            order = ("real", "twin") if n % 2 else ("twin", "real")
            rates = {name: lab_round(workers[name], n_vocab, n + 1) for name in order}
            ratios.append((rates["twin"][0] / rates["real"][0], rates["twin"][1] / rates["real"][1]))
            print(f"round {n + 1:2}   prefill {ratios[-1][0]:.3f}   decode {ratios[-1][1]:.3f}", flush=True)
    for name, values in (("prefill", [p for p, _ in ratios]), ("decode", [d for _, d in ratios])):
        print(
            f"{name}: twin over real, median of {len(values)} paired ratios {statistics.median(values):.3f} "
            f"(range {min(values):.3f} to {max(values):.3f}); 0.97 to 1.03 wanted"
        )


if __name__ == "__main__":
    main()
