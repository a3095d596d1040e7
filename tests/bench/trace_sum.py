"""Do the operations of `lab trace`, less the cost of their stops, add up to the step without stops?

    python -m tests.bench.trace_sum            # some minutes on a quiet machine

For prompts of several lengths and one or all cores. The exit status is 1 if a sum is further than
5 % from its step.
"""

import sys
import tempfile

from lab.features.trace import measuring
from lab.features.trace.lines import TracedPhase
from lab.features.trace.trace_section import MOST_OFF
from lab.runner import machine
from lab.show.wording import percent

LENGTHS = (50, 200, 1000)


def show(
    n_threads: int,
    n_prompt: int,
    phase: TracedPhase,
) -> None:
    sum_ms = 1e3 * phase.sum_s
    step_ms = 1e3 * phase.untraced_s
    where = f"{n_threads} threads, {n_prompt:5,} tokens, {phase.name:7}"
    print(
        f"{where}: sum {sum_ms:8.2f} ms, step {step_ms:8.2f} ms, {percent(phase.off)} off",
        flush=True,
    )


def main() -> None:
    worst = 0.0
    for n_threads in sorted({1, machine.default_threads()}):
        for n_prompt in LENGTHS:
            line = measuring.trace(
                n_prompt, 16, 10, threads=n_threads, out=tempfile.gettempdir()
            )
            for phase in line.phases:
                worst = max(worst, abs(phase.off))
                show(n_threads, n_prompt, phase)
    print(f"worst: {percent(worst)}")
    sys.exit(worst > MOST_OFF)


if __name__ == "__main__":
    main()
