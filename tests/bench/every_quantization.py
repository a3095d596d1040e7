"""Do ceilings, explain and predict work for every quantization that llama.cpp can make of the embedded model?

    python3 -m uv run python -m tests.bench.every_quantization [QUANTIZATION ...]

Each is made by llama.cpp's quantizer (what it refuses is listed with its reason), measured at three lengths, its
kernels are probed in the shapes and types that its tensors have (in a small part of the time and memory that
`lab ceilings` takes), and the real commands explain and predict. Then the same for four mixes of a synthetic shape.
Then every shape of the catalog in these mixes, without a file: its kernels run in their real shapes (with one token
each), and a step of a prompt and one of decode are explained and predicted from them.
A figure of speed is no result here: only whether each step works.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

from lab.core.record import Ceilings, Rate
from lab.errors import LabError
from lab.models import catalog, shapes, synthetic
from lab.process.wire import Probe
from lab.process.worker import Worker
from lab.runner.cases import utc_now
from lab.runner.plan import make_plan
from lab.why import learning, plain_read, probing
from lab.why.step_prediction import StepPrediction
from tests import miniature
from tests.conftest import run_process

OF_SYNTHETIC = ("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS")
SIZES = ("-u", "64", "--threads", "1")


def probe(worker: Worker, path: Path, folder: Path) -> int:
    """Probe what the model needs, briefly; the number of kernels."""
    plan = make_plan(worker, [1], 1, 1, str(path), ubatch=64, threads=1)
    wanted = [
        dataclasses.replace(probe, n_bytes=2**20, seconds=0.005, n_positions=probe.n_positions and 512)
        for probe in probing.probes(plan.model, plan.settings)
    ]
    rates = (*map(worker.probe, dict.fromkeys(wanted)), plain_read.read_rate(1, 2**22))
    probing.save(Ceilings(utc_now(), plan.machine, False, rates), folder)
    return len(rates)


def tried(worker: Worker, path: Path, folder: Path) -> str:
    """What came of a model file: "ok", or which step failed, and how."""
    steps = {
        "measure": (
            "measure",
            "-m",
            path,
            "-p",
            "16,64,128",
            "-n",
            4,
            "-r",
            1,
            "--no-plot",
            "--prompt",
            "random",
            "-o",
            folder,
            *SIZES,
        ),
        "explain": ("explain", folder, "--ceilings", folder, "--no-plot"),
        "predict": ("predict", "-m", path, "-p", "256", "-n", 8, "--results", folder, *SIZES),
    }
    try:
        n_rates = probe(worker, path, folder)
    except LabError as problem:
        worker.restart()
        return f"ceilings: {problem.what}"
    for name, arguments in steps.items():
        code, _, err = run_process(*arguments)
        if code:
            return f"{name}: {err.strip().splitlines()[-1]}"
    return f"ok ({n_rates} kernels)"


def of_shape(worker: Worker, name: str, kind: str, known: dict[Probe, Rate]) -> str:
    """What came of a shape of the catalog in a mix: "ok", or what did not work. `known` are kernels that have run."""
    plan = make_plan(worker, [1], 1, 1, threads=1)
    try:
        model = shapes.find(worker, f"synthetic:{name}:{kind}")
        wanted = {
            dataclasses.replace(probe, n_tokens=1, n_bytes=1, seconds=0.0, n_positions=probe.n_positions and 512)
            for probe in probing.probes(model, plan.settings)
        }
        for probe in wanted - known.keys():
            known[probe] = worker.probe(probe)
    except LabError as problem:
        return problem.what
    ceilings = Ceilings(utc_now(), plan.machine, False, tuple(known[probe] for probe in wanted))
    prediction = StepPrediction(model, plan.settings, ceilings, learning.fit([]), 0)
    steps = (prediction.seconds(1, 1000, 1), prediction.seconds(512, 512, 1))
    return f"ok ({len(wanted)} kernels)" if all(steps) else "no prediction"


def main() -> None:
    asked = [name.upper() for name in sys.argv[1:]]
    n_ok = n_refused = n_failed = 0
    with tempfile.TemporaryDirectory() as name, Worker() as worker:
        base = Path(name) / "synthetic.gguf"
        synthetic.write(miniature.entry("llama", 2, 512, 1024).shape, "Q8_0", base)
        cases = [("smollm2-135m", catalog.embedded_path(), kind) for kind in worker.quantizations()]
        cases += [("synthetic", base, kind) for kind in OF_SYNTHETIC]
        for model, source, kind in cases:
            if asked and kind not in asked:
                continue
            folder = Path(name) / f"{model}-{kind}"
            folder.mkdir()
            path = folder / f"{kind}.gguf"
            try:
                worker.quantize(source, path, kind, lambda done: None)
            except LabError as problem:
                n_refused += 1
                print(f"{model} {kind}: llama.cpp does not make it: {problem.what}", flush=True)
                worker.restart()
                continue
            types = worker.read_model(path, kind, "file").tensor_bytes
            outcome = tried(worker, path, folder)
            n_ok, n_failed = n_ok + outcome.startswith("ok"), n_failed + (not outcome.startswith("ok"))
            print(f"{model} {kind}: {outcome}; {', '.join(sorted(types))}", flush=True)
            path.unlink()
        known: dict[Probe, Rate] = {}
        for model in catalog.entries():
            for kind in OF_SYNTHETIC:
                outcome = of_shape(worker, model, kind, known)
                n_ok, n_failed = n_ok + outcome.startswith("ok"), n_failed + (not outcome.startswith("ok"))
                print(f"shape of {model} {kind}: {outcome}", flush=True)
    print(f"\n{n_ok} work, {n_failed} do not, {n_refused} cannot be made of this model")
    raise SystemExit(n_failed > 0)


if __name__ == "__main__":
    main()
