"""Does explain account for the time of a mixture of experts, and of a model with windows? Miniatures of both.

    python3 -m uv run python -m tests.bench.miniatures [ARCHITECTURE ...]

The miniatures have random weights, few layers and the widths of small real models, so that their kernels are what
real ones are. Their ceilings are measured, then a prefill and a decode. The kernels at their ceilings shall account
for 75 to 105 % of each.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

from lab.core import results
from lab.roofline import explanation, measuring, probes, probing
from lab.roofline.probing import Where
from lab.models import catalog, synthetic
from lab.models.catalog import Dimensions
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from tests import miniature
from tests.conftest import run_process

LENGTHS = (512, 2048)
N_GEN = 32
N_REPEAT = 3
WANTED = (0.75, 1.05)


def shape_of(arch: str) -> Dimensions:
    """Four layers (of gemma3 twelve), 1,024 wide; 16 experts of which a token takes 4; a window of 256."""
    full = catalog.entries()[miniature.NAMES[arch]].shape
    return dataclasses.replace(
        full,
        n_layer=12 if arch == "gemma3" else 4,
        n_embd=1024,
        n_head=16,
        n_head_kv=4,
        head_dim=64,
        n_ff=3072,
        n_vocab=16384,
        n_rot=48 if full.n_rot else None,
        n_expert=16 if full.n_expert else None,
        n_expert_used=4 if full.n_expert else None,
        n_ff_expert=1024 if full.n_expert else None,
        window=256 if full.window else None,
    )


def main() -> None:
    archs = sys.argv[1:] or ["qwen3moe", "gemma3", "gpt-oss"]
    n_inside = n_all = 0
    print("architecture | quantization | phase | prompt | measured ms | kernels at their ceilings")
    with tempfile.TemporaryDirectory() as name:
        for arch in archs:
            folder = Path(name) / arch
            folder.mkdir()
            path = folder / f"{arch}.gguf"
            quantization = miniature.quantization(arch)
            synthetic.write(shape_of(arch), quantization, path)
            with Worker() as worker:
                plan = make_plan(worker, LENGTHS, N_GEN, 1, str(path), prompt="random")
                wanted = probes.probes(plan.model, plan.settings)
                measuring.obtain(
                    worker, Where(plan.machine), wanted, lambda what: None, print, folder
                )
            lengths = ",".join(map(str, LENGTHS))
            code, _, err = run_process(
                *(
                    "measure",
                    "-m",
                    path,
                    "--prompt",
                    "random",
                    "-p",
                    lengths,
                    "-n",
                    N_GEN,
                    "-r",
                    N_REPEAT,
                ),
                *("--no-plot", "-o", folder),
            )
            assert code == 0, err
            best = probing.known(probing.kept(folder), Where(plan.machine))
            assert best is not None
            for row in explanation.explain(results.read([folder]).records, best).itertuples():
                n_all = n_all + 1
                n_inside = n_inside + (WANTED[0] <= row.of_ceiling <= WANTED[1])
                cells = f"{row.n_prompt} | {1e3 * row.measured_s:.3g} | {row.of_ceiling:.0%}"
                print(f"{arch} | {quantization} | {row.phase} | {cells}", flush=True)
    print(f"{n_inside} of {n_all} within {WANTED[0]:.0%} to {WANTED[1]:.0%}")


if __name__ == "__main__":
    main()
