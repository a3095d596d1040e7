"""Does explain account for the time of a mixture of experts, and of a model with windows?

    python3 -m uv run python -m tests.bench.miniatures [ARCHITECTURE ...]

The miniatures have random weights, few layers and the widths of small real models, so that their
kernels are what real ones are. Their ceilings are measured, then a prefill and a decode. The
kernels at their ceilings shall account for 75 to 105 % of each.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lab.core import results
from lab.models import catalog, synthetic
from lab.models.catalog import Dimensions
from lab.process.worker import Worker
from lab.roofline import explanation, measuring, probes, probing
from lab.roofline.probing import Where
from lab.runner.plan import make_plan
from tests.support import miniature
from tests.support.command import run_process

if TYPE_CHECKING:
    import pandas as pd

LENGTHS = (512, 2048)
N_GEN = 32
N_REPEAT = 3
LOWEST = 0.75  # of the measured time, what the kernels at their ceilings account for
HIGHEST = 1.05


def shape_of(arch: str) -> Dimensions:
    """Four layers (of gemma3 twelve), 1,024 wide.

    16 experts, of which a token takes 4; a window of 256.
    """
    full = catalog.entries()[miniature.NAMES[arch]].shape
    shape = dataclasses.replace(
        full,
        n_layer=12 if arch == "gemma3" else 4,
        n_embd=1024,
        n_head=16,
        n_head_kv=4,
        head_dim=64,
        n_ff=3072,
        n_vocab=16384,
    )
    if full.n_rot:
        shape = dataclasses.replace(shape, n_rot=48)
    if full.n_expert:
        shape = dataclasses.replace(
            shape,
            n_expert=16,
            n_expert_used=4,
            n_ff_expert=1024,
        )
    if full.window:
        shape = dataclasses.replace(shape, window=256)
    return shape


def explained(arch: str, folder: Path) -> pd.DataFrame:
    """The explanation of a miniature's prefill and decode, measured here with its ceilings."""
    path = folder / f"{arch}.gguf"
    synthetic.write(shape_of(arch), miniature.quantization(arch), path)
    with Worker() as worker:
        plan = make_plan(worker, LENGTHS, N_GEN, 1, str(path), prompt="random")
        probes_of_model = probes.probes(plan.model, plan.settings)
        measuring.obtain(
            worker, Where(plan.machine), probes_of_model, lambda what: None, print, folder
        )
    lengths = ",".join(map(str, LENGTHS))
    sizes = ("-p", lengths, "-n", N_GEN, "-r", N_REPEAT)
    options = ("--prompt", "random", "--no-plot", "-o", folder)
    code, _, err = run_process("measure", "-m", path, *sizes, *options)
    assert code == 0, err
    best = probing.known(probing.kept(folder), Where(plan.machine))
    assert best is not None
    return explanation.explain(results.read([folder]).records, best)


def main() -> None:
    n_inside = 0
    n_rows = 0
    print(
        "architecture | quantization | phase | prompt | measured ms | kernels at their ceilings"
    )
    for arch in sys.argv[1:] or ["qwen3moe", "gemma3", "gpt-oss"]:
        with tempfile.TemporaryDirectory() as folder:
            rows = explained(arch, Path(folder))
        for row in rows.itertuples():
            figures = f"{row.n_prompt} | {1e3 * row.measured_s:.3g} | {row.of_ceiling:.0%}"
            quantization = miniature.quantization(arch)
            print(f"{arch} | {quantization} | {row.phase} | {figures}", flush=True)
        n_inside += int(rows.of_ceiling.between(LOWEST, HIGHEST).sum())
        n_rows += len(rows)
    print(f"{n_inside} of {n_rows} within {LOWEST:.0%} to {HIGHEST:.0%}")


if __name__ == "__main__":
    main()
