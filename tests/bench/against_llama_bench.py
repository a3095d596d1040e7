"""The lab's rates over llama-bench's, on the same libraries, in interleaved rounds.

    python3 -m uv run python -m tests.bench.against_llama_bench [MODEL.gguf] [ROUNDS]

Each round measures pp512 and tg128 on both sides, in alternating order and each in a fresh process:
the same file, threads and batch sizes, random tokens. llama-bench's decode starts in an empty
context and does not choose tokens, so the lab's side is a prompt of one token and decode *compute*.
Each side of a round is one sample; what counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path

from lab.core import script as scripts
from lab.core.record import PREFILL, Settings, Steps
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.plan import make_plan
from tests.bench import llama_bench

N_PROMPT = 512
N_GEN = 128
N_UBATCH = 512
N_SAMPLES = 1
PP = f"pp{N_PROMPT}"
TG = f"tg{N_GEN}"


def decode_tps(steps: Steps) -> float:
    """Tokens per second of the decode steps, without choosing tokens."""
    rows = steps.frame()
    decodes = rows[rows.kind != PREFILL]
    return float(1e9 * len(decodes) / (decodes.ready_ns - decodes.start_ns).sum())


def prefill_tps(steps: Steps) -> float:
    return N_PROMPT / (steps.ready_ns[steps.kind.count(PREFILL) - 1] / 1e9)


def timed(
    worker: Worker,
    prompt: list[int],
    n_gen: int,
    settings: Settings,
) -> Steps:
    script = scripts.run(prompt, n_gen, settings.n_ubatch)
    if settings.prefill_wait == "end":
        script = scripts.wait_once(script)
    return worker.run(script, lambda progress: None).steps


def lab_round(
    worker: Worker,
    model: Path,
    settings: Settings,
    seed: int,
) -> dict[str, float]:
    """Prefill and decode rate of the lab in tokens/s, in a fresh engine.

    Medians of N_SAMPLES runs each.
    """
    n_vocab = worker.load(model, settings).n_vocab
    worker.new_context(settings)
    prefills = []
    decodes = []
    warm_up = prompts.random_ids(N_PROMPT, n_vocab, None, seed, -1)  # as llama-bench does
    timed(worker, warm_up, 2, settings)
    for sample in range(N_SAMPLES):
        prompt = prompts.random_ids(N_PROMPT, n_vocab, None, seed, sample)
        prefills.append(prefill_tps(timed(worker, prompt, 1, settings)))
    for sample in range(N_SAMPLES):
        prompt = prompts.random_ids(1, n_vocab, None, seed, sample)
        decodes.append(decode_tps(timed(worker, prompt, N_GEN + 1, settings)))
    worker.restart()  # the next one is llama-bench
    return {
        PP: statistics.median(prefills),
        TG: statistics.median(decodes),
    }


def bench_round(model: Path, settings: Settings) -> dict[str, float]:
    """Prefill and decode rate of llama-bench, likewise."""
    work = f"-p {N_PROMPT} -n {N_GEN} -r {N_SAMPLES}"
    options = f"-t {settings.n_threads} -ub {settings.n_ubatch}"
    rates = {}
    for row in llama_bench.run(model, *work.split(), *options.split()):
        name = PP if row["n_prompt"] else TG
        rates[name] = statistics.median(row["samples_ts"])
    return rates


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else catalog.embedded_path()
    n_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 36
    llama_bench.program()
    with Worker() as worker:
        plan = make_plan(
            worker,
            [N_PROMPT],
            N_GEN + 1,
            1,
            str(model),
            prompt="random",
        )
        settings = dataclasses.replace(plan.settings, n_ctx=N_PROMPT + N_GEN)
        setup = f"{settings.n_threads} threads, ubatch {settings.n_ubatch}"
        print(f"{model.name}, {setup}; tokens/s: lab / llama-bench")
        llama_bench.in_turns(
            n_rounds,
            lambda number: lab_round(worker, model, settings, number),
            lambda: bench_round(model, settings),
            lambda name, ours, theirs: (
                f" {name} {ours:8.2f} / {theirs:8.2f} = {ours / theirs:.3f}"
            ),
            lambda name, ours, theirs, n, ratios: (
                f"{name}: median of {n} paired ratios {ratios}; at least 0.99 wanted"
            ),
        )


if __name__ == "__main__":
    main()
