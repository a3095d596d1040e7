"""One figure against the best that this machine can do: its kernels at their ceilings, with the best known setting.

The best is a bound, not a measurement: the least time of the phase's kernels (lab explain), with the one change of
settings that is predicted to help most. Overhead is what the phase takes beyond its kernels.
"""

from __future__ import annotations

import dataclasses
import math

from lab.core import results, shell
from lab.errors import LabError
from lab.features.limits import advice, probing, roofline, where
from lab.features.running import ceilings_of
from lab.features.why import parts
from lab.features.why.parts import Answer, Part
from lab.features.why.pasted import Setup
from lab.show.wording import times

OVERHEAD, SETTINGS = "beyond its kernels", "settings"


def answer(one: Setup, name: str, folder: str) -> Answer:
    """Why a figure of the file `name` is slower than the best. LabError without steps or the machine's ceilings."""
    if not one.records:
        raise LabError(f"{one.label} has no steps to explain.", "Give a second figure, or measure here: lab measure")
    first, phase = one.records[0], "prefill" if one.is_prefill else "decode"
    known = probing.need(ceilings_of(results.read([name]), folder), where.of_record(first), one.label)
    rows = roofline.explain(one.records, known).query(f"n_prompt == {one.n_prompt}")
    row = next((row for row in rows.itertuples() if row.phase == phase and row.n_gen == one.n_gen), None)
    if row is None:
        raise LabError(f"{one.label} has no steps of {phase} to explain.", "Measure here: lab measure")
    between_s = 0.0 if one.is_prefill else row.choosing_s + row.harness_s
    words = "choosing each token, and from one step to the next" if between_s else ""
    found = [Part(parts.COUNTED, math.log1p(between_s / row.measured_s), 0.0, parts.ARITHMETIC, words)]
    words = f"{times(row.measured_s / row.least_s)} the least time of its kernels; the limit is {row.limit}"
    how = f"from ceilings: {parts.NO_RANGE}"
    found.append(Part(OVERHEAD, math.log(row.measured_s / row.least_s), None, how, words))
    best_s, command = row.least_s, shell.lab("explain", name)
    for lever in advice.levers(rows, first, known):
        gain = (lever.prefill_gain if one.is_prefill else lever.decode_gain) or 0.0
        changed_s = row.least_s - row.measured_s * (1 - 1 / gain) if gain >= advice.LEAST_GAIN else best_s
        if 0 < changed_s < best_s:
            best_s, command, words = changed_s, lever.command or command, f"{lever.change}: {times(gain)} in all"
    if best_s < row.least_s:
        how = f"predicted from ceilings: {parts.NO_RANGE}"
        found.append(Part(SETTINGS, math.log(row.least_s / best_s), None, how, words))
    tps = (row.n_prompt if one.is_prefill else 1) / best_s
    best = dataclasses.replace(one, source="the best that this machine can do", tps=tps, records=(), about="")
    if tps < one.tps:
        raise LabError(f"{one.label} is faster than its ceilings.", "Measure them again: lab ceilings --again")
    rest = parts.rest(best, one, found)
    return Answer(best, one, ("best", "A"), (*found, rest), command=command)
