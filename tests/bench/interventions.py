"""Are the promises of `lab explain` kept? Its levers, each tried by the very command that it prints.

    python3 -m uv run python -m tests.bench.interventions [NUMBER OF A CASE ...]

For each case: runs are measured and their kernels probed, `explain` names its levers, and the command of each lever
is run as it stands (with fewer blocks, in another folder). What was promised stands next to what was measured.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.core import results
from lab.core.record import OK
from lab.show import comparison
from lab.roofline import probing
from lab.roofline.probing import Where
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from tests.conftest import run_process

CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("the embedded model", ["-p", "512,2048", "-n", "24"], {"types": ["Q4_0", "Q8_0"]}),
    (
        "a wider one",
        ["-m", "synthetic:qwen2.5-0.5b:Q4_1", "-p", "256", "-n", "16"],
        {"types": ["Q4_0", "Q8_0"]},
    ),
    ("a 3B", ["-m", "synthetic:llama-3.2-3b:Q4_0", "-p", "64", "-n", "12"], {"types": ["Q8_0"]}),
]
N_BLOCKS = 8


def levers(arguments: list[str], types: list[str], folder: Path) -> list[dict[str, Any]]:
    """Measure, probe, and return the levers that `lab explain --json` names."""
    run("measure", *arguments, "-r", "3", "--no-plot", "-o", folder)
    (record, *_) = [record for record in results.read([folder]).records if record.run.status == OK]
    with Worker() as worker:
        plan = make_plan(
            worker, [1], 1, 1, arguments[1] if arguments[0] == "-m" else "smollm2-135m"
        )
        wanted = probing.probes(record.model, plan.settings, types)
        probing.obtain(worker, Where(plan.machine), wanted, lambda what: None, print, folder)
    (document,) = json.loads(run("explain", folder, "--ceilings", folder, "--no-plot", "--json"))
    return list(document["levers"])


def run(*arguments: object) -> str:
    code, out, err = run_process(*arguments, timeout_s=1800)
    if code:
        raise SystemExit(f"lab {' '.join(map(str, arguments))}: {err}")
    return out


def tried(command: str, folder: Path, n_blocks: int) -> dict[tuple[str, int], str]:
    """The measured speed-up of each figure and length, with its interval, of a lever's command."""
    _, *words = shlex.split(command)
    run(*words, "--blocks", n_blocks, "-o", folder)
    (compared,) = comparison.compare(
        [r for r in results.read([folder]).records if not r.run.warmup]
    )
    speed_ups = {}
    for row in compared.rows:
        if row.ratio:
            middle, low, high = (
                1 / value for value in (row.ratio.estimate, row.ratio.high, row.ratio.low)
            )
            speed_ups[row.figure, row.n_prompt] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return speed_ups


def main() -> None:
    chosen = list(map(int, sys.argv[1:])) or range(1, len(CASES) + 1)
    print("case | change | phase | promised | measured speed-up (interval)")
    for number in chosen:
        title, arguments, options = CASES[number - 1]
        with tempfile.TemporaryDirectory() as name:
            for index, lever in enumerate(levers(arguments, options["types"], Path(name) / "base")):
                if lever["command"] is None:
                    print(f"{title} | {lever['change']} | no command", flush=True)
                    continue
                measured = tried(lever["command"], Path(name) / f"lever-{index}", N_BLOCKS)
                for phase, figure in (("prefill", "prefill_s"), ("decode", "tpot_ms")):
                    n = lever[f"{phase}_at"]
                    gain = lever[f"{phase}_gain"]
                    if gain:
                        speed_up = measured.get((figure, n), "-")
                        print(
                            f"{title} | {lever['change']} | {phase} at {n} | {gain:.2f} | {speed_up}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
