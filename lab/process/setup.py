"""What a child process of the lab starts with: libraries, RPC servers, and how threads wait.

llama.cpp's threads meet at a barrier after each operation, hundreds of times a token. How a thread
waits there is decided by environment variables, which an OpenMP runtime reads once, when it loads:

- libgomp (GCC) spins GOMP_SPINCOUNT times and then sleeps. The default is 300,000, or 100 where
  there are more threads than processors. OMP_WAIT_POLICY=passive is 0, active 30 billion.
- libomp (Clang) and libiomp5 (Intel) spin for KMP_BLOCKTIME milliseconds, by default 200.
- vcomp (Microsoft) documents no such variable.
- A build without OpenMP uses ggml's own barrier, which spins without a limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core.asked_settings import DEFAULT, SLEEP

LIB_VARIABLE = "LLAMA_CPP_LIB_PATH"  # where llama-cpp-python finds its libraries' folder
PATH_VARIABLE = "PYTHONPATH"  # where Python looks for packages first
POLICY = "OMP_WAIT_POLICY"
SPINS = "GOMP_SPINCOUNT"
BLOCK_MS = "KMP_BLOCKTIME"
WAIT_VARIABLES = (POLICY, SPINS, BLOCK_MS)
OPENMP_VARIABLE = re.compile("(?:OMP|GOMP|KMP)_[A-Z_]+")

LIBGOMP = "libgomp"
LIBOMP = "libomp"
VCOMP = "vcomp"
NO_OPENMP = "none"
ACTIVE = "active"  # they spin as good as forever
DEFAULT_SPINS = 300_000  # of libgomp
SPINS_PER_MS = 100_000  # libgomp's own estimate
SPIN_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}

BOUNDED_SPINS = 300
"""How often a thread spins where the time is no result. On two quiet cores this costs some percent;
beside a busy program the default costs a factor of 100."""


@dataclass(frozen=True)
class ProcessSetup:
    """`lib`: the folder of another build. `wait`: as in `--wait`; None: as the user's environment
    says. `package`: a folder with another version of the Python bindings and their libraries."""

    lib: str | None = None
    rpc: tuple[str, ...] = ()
    wait: int | str | None = None
    package: str | None = None


def environment(setup: ProcessSetup = ProcessSetup()) -> dict[str, str]:
    """The environment of a child."""
    variables = dict(os.environ)
    variables.pop(LIB_VARIABLE, None)
    variables["GGML_NO_BACKTRACE"] = "1"
    if setup.lib is not None:
        variables[LIB_VARIABLE] = setup.lib
    if setup.package is not None:
        variables[PATH_VARIABLE] = setup.package
    if setup.wait is not None:
        for name in WAIT_VARIABLES:
            variables.pop(name, None)
        variables |= wait_variables(setup.wait)
    return variables


def wait_variables(wait: int | str) -> dict[str, str]:
    """The variables that make threads wait as asked, for each runtime."""
    if wait == DEFAULT:
        return {}
    if wait == SLEEP:
        return {POLICY: "passive"}
    return {SPINS: str(wait), BLOCK_MS: str(int(wait) // SPINS_PER_MS)}


def bounded(wait: int | str | None) -> int | str:
    """How threads wait where the time is no result: as asked, or with few spins."""
    return BOUNDED_SPINS if wait is None else wait


def user_variables(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The OpenMP variables of an environment, as NAME=VALUE."""
    names = sorted(filter(OPENMP_VARIABLE.fullmatch, variables))
    return tuple(f"{name}={variables[name]}" for name in names)


def other_variables(variables: Sequence[str] | None) -> tuple[str, ...]:
    """The variables of a record that do not decide how threads wait, such as OMP_PROC_BIND=true."""
    return tuple(
        text for text in variables or () if text.partition("=")[0] not in WAIT_VARIABLES
    )


def resolved_wait(openmp: str | None, variables: Mapping[str, str]) -> int | str | None:
    """How the threads of a runtime wait with these variables.

    Spins, milliseconds ("200 ms"), sleep, active, or default; None: not known.
    """
    policy = variables.get(POLICY, "").strip().lower()
    if openmp == NO_OPENMP:
        return DEFAULT
    if openmp == LIBGOMP:
        spins = _spins(variables.get(SPINS, ""))
        if spins is not None:
            return spins
    elif openmp == LIBOMP:
        block_ms = variables.get(BLOCK_MS, "").strip().lower()
        if block_ms:
            return SLEEP if block_ms in ("0", "0ms") else f"{block_ms.removesuffix('ms')} ms"
    elif policy or openmp is None:
        return None
    return {"passive": SLEEP, "active": ACTIVE}.get(policy, DEFAULT)


def _spins(text: str) -> int | str | None:
    """What libgomp makes of GOMP_SPINCOUNT; None if it ignores the text."""
    text = text.strip().lower()
    if text in ("infinite", "infinity"):
        return ACTIVE
    match = re.fullmatch(r"\+?(\d{1,18})\s*([kmgt]?)", text)
    if not match:
        return None
    spins = int(match[1]) * SPIN_UNITS[match[2]]
    if spins == DEFAULT_SPINS:
        return DEFAULT
    return spins or SLEEP
