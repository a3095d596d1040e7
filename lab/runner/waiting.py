"""How the CPU's threads wait for each other, and what that costs beside another program."""

from __future__ import annotations

from lab.core.asked_settings import DEFAULT, SLEEP
from lab.process.setup import LIBOMP, NO_OPENMP, SPINS_PER_MS, VCOMP

NO_EFFECT = {
    NO_OPENMP: "this build of llama.cpp has no OpenMP, and its own threads spin without a limit",
    VCOMP: "the OpenMP runtime of this build (vcomp) documents no variable for it",
}


def warnings(wait: int | str | None, openmp: str | None) -> list[str]:
    """A sentence if `--wait` has no effect, or another one, with the runtime of this build."""
    if wait in (None, DEFAULT):
        return []
    if openmp in NO_EFFECT and (openmp, wait) != (VCOMP, SLEEP):
        advice = "Beside other programs use one thread less: --threads"
        return [f"--wait {wait} has no effect: {NO_EFFECT[openmp]}. {advice}"]
    if openmp == LIBOMP and wait != SLEEP:
        ms = int(wait or 0) // SPINS_PER_MS
        return [f"The OpenMP runtime of this build counts no spins: --wait {wait} is {ms} ms."]
    return []
