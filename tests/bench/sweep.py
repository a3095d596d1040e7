"""The sweep beside independent runs, and beside llama-bench: does it agree, and what does it save?

    python3 -m uv run python -m tests.bench.sweep agree [ROUNDS]
    python3 -m uv run python -m tests.bench.sweep cost [MAX_LEN] [EVERY]

agree: in one process, on one context, in random order each round: one sweep and an independent run
at each of 5 lengths, on the same tokens. What counts is the median over rounds of sweep / run.
cost: the wall time of `lab sweep` (its results stay in results/) and of llama-bench for the same
grid and repeats, each run to its end; half an hour.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import subprocess
import sys
import time

from lab.core import phases, script as scripts
from lab.core.record import OK, Run
from lab.models import catalog
from lab.process.wire import Progress
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.plan import make_plan
from tests.bench import llama_bench

LENGTHS = (512, 1024, 2048, 3072, 4096)
N_GEN = 16
N_REPEAT = 3


def agree(n_rounds: int) -> None:
    ratios: dict[tuple[int, str], list[float]] = {
        (n, name): [] for n in LENGTHS for name in ("prefill", "TPOT")
    }
    with Worker() as worker:
        model = catalog.embedded_path()
        plan = make_plan(
            worker,
            [max(LENGTHS)],
            N_GEN,
            1,
            str(model),
            prompt="random",
        )
        vocabulary = worker.load(model, plan.settings)
        worker.new_context(dataclasses.replace(plan.settings, n_ctx=max(LENGTHS) + N_GEN))
        for n_round in range(n_rounds):
            prompt = prompts.random_ids(max(LENGTHS), vocabulary.n_vocab, None, 1, n_round)
            legs: dict[int, Run] = {}
            alone: dict[int, Run] = {}
            for n in random.Random(n_round).sample([0, *LENGTHS], 1 + len(LENGTHS)):
                if n:
                    alone[n] = run(worker, prompt[:n], None)
                else:
                    legs = {
                        leg.n_prompt: leg
                        for leg in phases.by_length(run(worker, prompt, LENGTHS[0]))
                    }
            for n in LENGTHS:
                ratios[n, "prefill"].append(
                    (phases.prefill_ns(legs[n]) or 0) / (phases.prefill_ns(alone[n]) or 1)
                )
                ratios[n, "TPOT"].append(
                    (phases.tpot_ns(legs[n]) or 0) / (phases.tpot_ns(alone[n]) or 1)
                )
            print(
                f"round {n_round + 1}",
                *(f"{values[-1]:.3f}" for values in ratios.values()),
                flush=True,
            )
    print("sweep / independent run, median over rounds (range); within 0.97 to 1.03 wanted")
    for (n, name), values in ratios.items():
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"{name:8} at {n:5,}: {statistics.median(values):.3f} ({spread})")


def run(
    worker: Worker,
    prompt: list[int],
    every: int | None,
) -> Run:
    def look(progress: Progress) -> None: ...

    outcome = worker.run(scripts.sweep(prompt, N_GEN, 512, every or len(prompt)), look)
    return Run(
        n_prompt=len(prompt),
        n_gen=N_GEN,
        repeat=0,
        warmup=False,
        started_at="",
        status=OK,
        steps=outcome.steps,
        token_ids=outcome.token_ids,
        case={"every": every} if every else {},
    )


def cost(max_len: int, every: int) -> None:
    lengths = ",".join(str(n) for n in range(every, max_len + 1, every))
    grid = [
        "--max-len",
        str(max_len),
        "--every",
        str(every),
        "--gen",
        str(N_GEN),
        "--repeat",
        str(N_REPEAT),
    ]
    started = time.monotonic()
    command = [sys.executable, "-m", "lab", "sweep", *grid]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    ours = time.monotonic() - started
    print(f"lab sweep {' '.join(grid)}: {ours:.0f} s, plots included", flush=True)
    model = catalog.embedded_path()
    repeat = str(N_REPEAT)
    started = time.monotonic()
    llama_bench.run(model, "-p", lengths, "-n", "0", "-r", repeat)
    prefill = time.monotonic() - started
    print(f"llama-bench -p {lengths} -n 0 -r {repeat}: {prefill:.0f} s", flush=True)
    started = time.monotonic()
    llama_bench.run(model, "-p", "0", "-n", str(N_GEN - 1), "-d", lengths, "-r", repeat)
    decode = time.monotonic() - started
    print(f"llama-bench -p 0 -n {N_GEN - 1} -d {lengths} -r {repeat}: {decode:.0f} s")
    print(f"lab / llama-bench = {ours / (prefill + decode):.3f}; at most 0.1 wanted")


def main() -> None:
    what, *numbers = sys.argv[1:] or ["agree"]
    if what == "agree":
        agree(*map(int, numbers or ["8"]))
    else:
        cost(*map(int, numbers or ["8192", "512"]))


if __name__ == "__main__":
    main()
