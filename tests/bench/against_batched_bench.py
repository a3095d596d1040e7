"""`lab batch` over llama-batched-bench, on the same libraries, in interleaved rounds.

    python3 -m uv run python -m tests.bench.against_batched_bench [MODEL.gguf] [ROUNDS]

Each round measures 1, 4 and 16 sequences on both sides, in alternating order and each in a fresh
process: the same file, threads, batch sizes, context and random tokens. llama-batched-bench
chooses no tokens, so the lab's side is the time of its steps without choosing. What counts is the
median of the ratios of rates; it should be within 0.97 to 1.03.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from lab.core import script as scripts
from lab.core.record import Settings
from lab.features import batch as room
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import batches, prompts
from lab.runner.batches import Batch
from lab.runner.cases import named
from lab.runner.plan import make_plan
from tests.bench import llama_bench
from tests.support.records import make_run

SEQUENCES = (1, 4, 16)
N_PROMPT = 256
N_GEN = 32
N_CTX = max(SEQUENCES) * 512

Rates = dict[tuple[int, str], float]  # tokens per second, by sequences and phase


def lab_round(
    worker: Worker,
    model: Path,
    asked: Settings,
    seed: int,
) -> Rates:
    worker.restart()
    n_vocab = worker.load(model, asked).n_vocab
    settings = worker.new_context(asked)

    def text(sequence: int, n: int) -> list[int]:
        return prompts.random_ids(n, n_vocab, None, seed, 0, sequence)

    warm_up = scripts.prefill(0, text(0, 16), 16)  # as llama-batched-bench warms up
    worker.run(warm_up, lambda progress: None)
    rates: Rates = {}
    for n_seq in SEQUENCES:
        case = batches.case(Batch(n_seq, is_shared=False), N_PROMPT, N_GEN + 1, settings)
        outcome = worker.run(batches.write(case, text, settings), lambda progress: None)
        run = make_run(**named(case))
        timed = dataclasses.replace(run, steps=outcome.steps)
        figures = room.figures(timed)
        rates[n_seq, "prefill"] = n_seq * N_PROMPT / figures["prefill_s"]
        rates[n_seq, "decode"] = n_seq / room.step_s(timed)
    return rates


def bench_round(model: Path, threads: int) -> Rates:
    n_seqs = ",".join(map(str, SEQUENCES))
    lengths = [
        "-npp",
        str(N_PROMPT),
        "-ntg",
        str(N_GEN),
        "-npl",
        n_seqs,
        "-c",
        str(N_CTX),
    ]
    threads_options = [
        "-t",
        str(threads),
        "-tb",
        str(threads),
    ]
    rows = llama_bench.run_batched(
        model, *lengths, *threads_options, "-b", "2048", "-ub", "512"
    )
    rates: Rates = {}
    for row in rows:
        rates[row["pl"], "prefill"] = row["speed_pp"]
        rates[row["pl"], "decode"] = row["speed_tg"]
    return rates


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else catalog.embedded_path()
    n_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    llama_bench.program("llama-batched-bench")
    with Worker() as worker:
        plan = make_plan(
            worker,
            [N_PROMPT],
            N_GEN,
            1,
            str(model),
            prompt="random",
        )
        asked = dataclasses.replace(
            plan.settings,
            n_ctx=N_CTX,
            n_seq_max=max(SEQUENCES),
        )
        threads = plan.settings.n_threads
        title = f"{model.name}, {threads} threads"
        print(f"{title}; tokens/s in all: lab / llama-batched-bench = ratio")
        llama_bench.in_turns(
            n_rounds,
            lambda number: lab_round(worker, model, asked, number),
            lambda: bench_round(model, threads),
            lambda name, ours, theirs: f"{name[0]} {name[1]} {ours / theirs:.3f}",
            lambda name, ours, theirs, n, ratios: (
                f"{name[0]:2} sequences, {name[1]:7}: {ours:6.1f} / {theirs:6.1f}, "
                f"median of {n} ratios {ratios}"
            ),
        )


if __name__ == "__main__":
    main()
