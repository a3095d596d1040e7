"""Do the operations of `lab trace`, less the cost of their stops, add up to the step without stops?

    python -m tests.bench.trace_sum            # some minutes on a quiet machine

For prompts of several lengths and one or all cores. The exit status is 1 if a sum is further than 5 % from its step.
"""

import sys
import tempfile

from lab.features.trace import token_trace
from lab.runner import machine
from lab.show.wording import percent

LENGTHS = (50, 200, 1000)


def main() -> None:
    worst = 0.0
    for n_threads in sorted({1, machine.default_threads()}):
        for n_prompt in LENGTHS:
            traced = token_trace.trace(
                n_prompt, 16, 10, threads=n_threads, out=tempfile.gettempdir()
            ).run.trace
            for phase in traced.phases if traced else ():
                worst = max(worst, abs(phase.off))
                print(
                    f"{n_threads} threads, {n_prompt:5,} tokens, {phase.name:7}: sum {1e3 * phase.sum_s:8.2f} ms, "
                    f"step {1e3 * phase.untraced_s:8.2f} ms, {percent(phase.off)} off",
                    flush=True,
                )
    print(f"worst: {percent(worst)}")
    sys.exit(worst > token_trace.OFF)


if __name__ == "__main__":
    main()
