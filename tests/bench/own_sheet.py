"""Whether the datasheet of this machine predicts models that it has not seen, blind.

    python -m tests.bench.own_sheet           # about 3 minutes; nothing else may run meanwhile

Writes a datasheet from one sweep of the embedded model and the ceilings, as notebooks 1 and 2 do.
From it alone it predicts other models, with random weights of their shapes, and then measures
them. The exit status is 1 if fewer than LEAST_INSIDE of the rates are in their ranges.
"""

import os
import sys
import tempfile

import lab
from lab.features.lessons import lesson

MODELS = ("qwen2.5-0.5b:Q8_0", "llama-3.2-1b:Q4_0")
N_PROMPT = 512
N_GEN = 32
LEAST_INSIDE = 0.75


def write_sheet() -> None:
    """datasheet.toml in the current folder."""
    sweep = lab.measure([2048], gen=8, repeat=2, every=256, ubatch=256, out="results")
    prefill, decode = lesson.both_laws(sweep)
    roof = lesson.roof(lab.ceilings(types=(), out="results"))
    lesson.note(
        1,
        sweep,
        w=1e3 * decode.a,
        k=1e6 * decode.b,
        prefill=N_PROMPT / prefill.seconds(N_PROMPT),
    )
    lesson.note(2, sweep, read_rate=roof.gbps, ridge=roof.ridge)


def main() -> int:
    n_inside = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_sheet()
        for spec in MODELS:
            row = lab.predict(str(N_PROMPT), N_GEN, spec, "datasheet.toml")[0]
            records = lab.measure([N_PROMPT], N_GEN, 3, f"synthetic:{spec}", out="results")
            measured = lesson.figures(records).iloc[0]
            for name, seconds, span in (
                ("prefill", measured.prefill_s, row.prefill_s),
                ("a token", measured.tpot_ms / 1e3, row.tpot_s),
            ):
                is_inside = span[0] <= seconds <= span[1]
                n_inside += is_inside
                verdict = "inside" if is_inside else "outside"
                print(
                    f"{spec}, {name}: {seconds:.4g} s measured, "
                    f"{span[0]:.4g} to {span[1]:.4g} s predicted, {verdict}",
                    flush=True,
                )
        os.chdir("/")
    n = 2 * len(MODELS)
    print(f"{n_inside} of {n} in their ranges")
    return int(n_inside < LEAST_INSIDE * n)


if __name__ == "__main__":
    sys.exit(main())
