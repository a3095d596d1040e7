"""Are the promises of `lab explain` kept? Its changes, each tried by the command that it prints.

    python3 -m uv run python -m tests.bench.interventions [NUMBER OF A CASE ...]

For each case: runs are measured and their kernels probed, `explain` names its changes, and the
command of each change is run as it stands (with fewer blocks, in another folder). What was promised
stands next to what was measured.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import results
from lab.core.record import OK
from lab.process.worker import Worker
from lab.roofline import measuring, probes
from lab.roofline.probing import Where
from lab.runner.plan import make_plan
from lab.show import comparison
from tests.support.command import run_process

N_BLOCKS = 8
TIMEOUT_S = 1800
FIGURES = {"prefill": "prefill_s", "decode": "tpot_ms"}


class Case(NamedTuple):
    """What is measured, and the weight types that are probed besides the model's."""

    title: str
    model: str
    prompt_lengths: str
    n_gen: int
    types: list[str]


CASES = [
    Case("the embedded model", "smollm2-135m", "512,2048", 24, ["Q4_0", "Q8_0"]),
    Case("a wider one", "synthetic:qwen2.5-0.5b:Q4_1", "256", 16, ["Q4_0", "Q8_0"]),
    Case("a 3B", "synthetic:llama-3.2-3b:Q4_0", "64", 12, ["Q8_0"]),
]


def main() -> None:
    numbers = [int(text) for text in sys.argv[1:]] or range(1, len(CASES) + 1)
    print("case | change | phase | promised | measured speed-up (interval)")
    for number in numbers:
        with tempfile.TemporaryDirectory() as name:
            try_case(CASES[number - 1], Path(name))


def try_case(case: Case, folder: Path) -> None:
    """Print what each change promised, and what its command measured."""
    for index, change in enumerate(promised_changes(case, folder / "base")):
        title = f"{case.title} | {change['change']}"
        if change["command"] is None:
            print(f"{title} | no command", flush=True)
            continue
        measured = measured_gains(change["command"], folder / f"change-{index}")
        for phase, figure in FIGURES.items():
            length = change[f"{phase}_at"]
            gain = change[f"{phase}_gain"]
            if gain:
                speed_up = measured.get((figure, length), "-")
                print(f"{title} | {phase} at {length} | {gain:.2f} | {speed_up}", flush=True)


def promised_changes(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Measure, probe, and return the changes that `lab explain --json` names."""
    sizes = ["-p", case.prompt_lengths, "-n", case.n_gen, "-r", 3]
    run("measure", "-m", case.model, *sizes, "--no-plot", "-o", folder)
    good = [record for record in results.read([folder]).records if record.run.status == OK]
    with Worker() as worker:
        plan = make_plan(worker, [1], 1, 1, case.model)
        todo = probes.probes(good[0].model, plan.settings, case.types)
        measuring.obtain(worker, Where(plan.machine), todo, lambda status: None, print, folder)
    (document,) = json.loads(
        run("explain", folder, "--ceilings", folder, "--no-plot", "--json")
    )
    changes: list[dict[str, Any]] = document["levers"]
    return changes


def measured_gains(command: str, folder: Path) -> dict[tuple[str, int], str]:
    """The measured speed-up of each figure and length, with its interval, of a change's command."""
    _, *arguments = shlex.split(command)
    run(*arguments, "--repeat", N_BLOCKS, "-o", folder)
    records = [record for record in results.read([folder]).records if not record.run.warmup]
    (compared,) = comparison.compare(records)
    speed_ups = {}
    for row in compared.rows:
        if row.ratio:
            middle = 1 / row.ratio.estimate
            low = 1 / row.ratio.high
            high = 1 / row.ratio.low
            speed_ups[row.figure, row.n_prompt] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return speed_ups


def run(*arguments: object) -> str:
    """The output of a command of the lab, which must succeed."""
    code, out, err = run_process(*arguments, timeout_s=TIMEOUT_S)
    if code:
        raise SystemExit(f"lab {' '.join(map(str, arguments))}: {err}")
    return out


if __name__ == "__main__":
    main()
