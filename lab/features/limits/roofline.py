"""Explains the time of a run: its cost compared with the best of the machine's own kernels.

A phase's least time is the sum of its kernels at their ceilings: every weight type at the columns of its steps, and
attention over its positions. Measured time beyond that is overhead (norms, softmax, threads that wait for each other,
small matrices that do not fill a core). Below are the two classical roofs: arithmetic (FLOPs over the machine's best
FLOP/s) and memory traffic (bytes over its best bytes/s). The nearest of the three is the limit; attention is a separate
limit if it takes longer than all products. Williams, Waterman & Patterson, "Roofline" (2009). With layers on several
devices, each has its own kernels, and the copies between them take time too (step_kernels.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core import cost, phases, shown, stats
from lab.core.record import DECODE, PREFILL, Ceilings, Record, Run
from lab.errors import LabError
from lab.features.limits import probing, step_kernels, where
from lab.features.limits.step_kernels import Layers
from lab.process.wire import MUL_MAT, MUL_MAT_ID
from lab.show import disturbances

if TYPE_CHECKING:
    import pandas as pd

ARITHMETIC, TRAFFIC, KERNEL, OVERHEAD = "arithmetic", "memory traffic", "the kernel", "overhead"
ATTENTION = "attention"
READERS = (MUL_MAT, MUL_MAT_ID, probing.READ)
"""Probes that read all of their bytes from the device's own memory."""

OVERHEAD_SHARE = 0.5
"""A phase that spends more than this share outside its kernels is limited by overhead."""

ATTENTION_SHARE = 0.5
"""A phase whose kernels spend more than this share in attention is limited by attention."""

BEYOND = 1.005
"""A phase above this share of its ceiling shows that the ceiling is wrong, and so are its parts."""

KERNEL_FACTOR = 1.5
"""Kernels slower than both arithmetic and memory traffic by this factor are the limit."""

LAYERS, OUTPUT, BETWEEN = "layers", "output", "between devices"
"""Parts of a phase besides ATTENTION."""


class Roof(NamedTuple):
    """The machine's best, over all kernels: FLOP/s and bytes/s (both in 10^9)."""

    gflops: float
    gbps: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic is the limit."""
        return self.gflops / self.gbps


def roof(ceilings: Ceilings, layers: Layers = ()) -> Roof:
    """The best of all probes. With `layers` on several devices, weighted by their shares of the layers."""
    best = {
        one.device: Roof(
            gflops=max(map(probing.gflops, one.rates)),
            gbps=max(probing.gbps(rate) for rate in one.rates if rate.n_tokens == 1 and rate.op in READERS),
        )
        for one in where.each_device(ceilings)
    }
    if len(best) == 1 or not layers or not set(layers) <= set(best):
        return best[ceilings.device]
    seconds = (sum(n / best[name][i] for name, n in Counter(layers).items()) for i in (0, 1))
    return Roof(*(len(layers) / one for one in seconds))


CASE = ["n_prompt", "n_gen", "phase"]


def explain(records: Sequence[Record], ceilings: Ceilings) -> pd.DataFrame:
    """The cost, rates and limit of every length and phase of one setup's runs: a row each, medians over runs.

        rows = lab.explain(records, lab.ceilings())

    Times of decode are per token. `least_s` is what its kernels take at their ceilings, one after the other or (if
    `overlaps`) with devices that work at the same time; `parts` has it by part, of several devices with the name of
    each. `of_request` is the phase's share of the whole request; `choosing_s` (sampling) and `harness_s` (from one step
    to the next) are not in measured_s; `doubts` are some of core/shown.py. LabError if there is nothing to explain, or
    a ceiling is missing.
    """
    import pandas as pd

    rows, known = [], dict[Any, tuple[cost.StepCost, step_kernels.Parts]]()
    for record in records:
        for run in phases.by_length(record.run):
            if run.is_timed and run.lever is None:
                if run.totals is not None:
                    raise LabError("Imported results have no steps to explain.", "Measure here: lab measure")
                own = [phase for phase in (PREFILL, DECODE) if phase in run.steps.kind]
                rows += [_phase(phase, run, record, ceilings, known) for phase in own]
    if not rows:
        if any(record.run.lever for record in records):
            raise LabError(
                "There are only experiments here; lab explain needs runs of lab measure.",
                "The tables of experiments include predictions: lab show RESULTS",
            )
        raise LabError("No run succeeded, so there is nothing to explain.", "Look at the errors: lab show RESULTS")
    of_runs = pd.DataFrame(rows)
    cases = of_runs.groupby(CASE)
    t = of_runs.drop_duplicates(CASE).set_index(CASE).sort_index(ascending=[True, True, False])  # prefill first
    for name in ("measured_s", "choosing_s", "harness_s", "of_request"):
        t[name] = cases[name].median()
    t["n_runs"], t["n_disturbed"] = cases.size(), cases.is_disturbed.sum()
    t["intensity"], t["of_ceiling"] = t.flops / t.n_bytes, t.least_s / t.measured_s
    t["gflops"], t["gbps"] = t.flops / t.measured_s / 1e9, t.n_bytes / t.measured_s / 1e9
    t["limit"] = [limit_of(row) for row in t.itertuples()]
    of_ceilings, fewest = probing.doubts(ceilings), stats.fewest_for_interval()
    t["doubts"] = [
        shown.all_of(
            [
                shown.of_runs(row.n_runs, row.n_disturbed, fewest),
                of_ceilings,
                (shown.ABOVE,) if row.least_s > BEYOND * row.measured_s else (),
            ]
        )
        for row in t.itertuples()
    ]
    return t.reset_index().drop(columns=["is_disturbed", "n_disturbed"])


def _phase(
    phase: str,
    run: Run,
    record: Record,
    ceilings: Ceilings,
    known: dict[Any, tuple[cost.StepCost, step_kernels.Parts]],
) -> dict[str, Any]:
    """A phase of one run (decode: the mean per token); `known` are the steps of other runs. LabError without a cost."""
    model, settings, steps = record.model, record.settings, run.steps
    last, layers = phases.n_prefill_steps(run) - 1, where.layers_of(record)
    chosen = [i for i, kind in enumerate(steps.kind) if (kind == PREFILL) == (phase == PREFILL)]
    shapes = [(steps.n_tokens[i], steps.n_past[i], 1 if i >= last else 0) for i in chosen]
    for shape in shapes:
        if (shape, layers) not in known:
            step = cost.step(model, *shape, settings.type_k, settings.type_v)
            if step is None:
                raise step_kernels.not_known(model)
            known[shape, layers] = step, step_kernels.parts(model, settings, ceilings, *shape, layers=layers)
    costs, parts = zip(*(known[shape, layers] for shape in shapes), strict=True)
    n = len(chosen) if phase == DECODE else 1
    is_split, best = len(parts[0].by_device) > 1, roof(ceilings, layers)
    by_part: dict[str, float] = {}
    for name in parts[0].by_device:
        sums = [sum(times) / n for times in zip(*(step.by_device[name] for step in parts), strict=True)]
        first = f"{where.label(name)} " if is_split else ""
        by_part |= {f"{first}{LAYERS}": sums[0], f"{first}{ATTENTION}": sums[2], f"{first}{OUTPUT}": sums[1]}
    between = [step.between_s for step in parts if step.between_s is not None]
    if is_split and len(between) == len(parts):
        by_part[BETWEEN] = sum(between) / n
    overlaps = phase == PREFILL and is_split and len(chosen) > 1 and not phases.times_prefill_steps(settings)
    prefill, e2e = phases.prefill_ns(run), phases.e2e_ns(run)
    of_prefill = prefill / e2e if prefill and e2e else 0.0
    flops, n_bytes = (sum(getattr(step, name) for step in costs) / n for name in ("flops", "n_bytes"))
    return {
        "n_prompt": run.n_prompt,
        "n_gen": run.n_gen,
        "phase": phase,
        "n_steps": len(chosen),
        "measured_s": sum(steps.ready_ns[i] - steps.start_ns[i] for i in chosen) / 1e9 / n,
        "least_s": step_kernels.least_s(parts, overlaps) / n,
        "parts": by_part,
        "overlaps": overlaps,
        "is_split": is_split,
        "flops": flops,
        "n_bytes": n_bytes,
        "arithmetic_s": flops / best.gflops / 1e9,
        "traffic_s": n_bytes / best.gbps / 1e9,
        "choosing_s": sum(steps.end_ns[i] - steps.ready_ns[i] for i in chosen) / 1e9 / n,
        "harness_s": sum(steps.start_ns[i] - steps.end_ns[i - 1] for i in chosen if i) / 1e9 / n,
        "of_request": of_prefill if phase == PREFILL else 1 - of_prefill,
        "is_disturbed": bool(disturbances.disturbances(record)),
    }


def part_s(row: Any, kind: str) -> float:
    """Least seconds of LAYERS, ATTENTION or OUTPUT on all devices."""
    return float(sum(seconds for name, seconds in row.parts.items() if name.endswith(kind)))


def limit_of(row: Any) -> str:
    """What is nearest to the measured time."""
    if row.measured_s - row.least_s > OVERHEAD_SHARE * row.measured_s:
        return OVERHEAD
    if part_s(row, ATTENTION) > ATTENTION_SHARE * row.least_s:
        return ATTENTION
    if row.least_s > KERNEL_FACTOR * max(row.arithmetic_s, row.traffic_s):
        return KERNEL
    return ARITHMETIC if row.arithmetic_s > row.traffic_s else TRAFFIC
