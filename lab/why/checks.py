"""The checks of `lab doctor`: a figure and a verdict for each, from a reading or a measured effect.

A value that is only read (a governor, swap in use) is at most "worth a look". A cause is "broken" only if an
intervention shows it: one thing is changed, both ways are measured in turns (A B B A), and in every pair the difference
is larger than LARGE and than any difference between equal consecutive measurements.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.analysis.wording import digits
from lab.core import stats
from lab.core.lists import plural
from lab.core.record import Machine
from lab.core.stats import Ratio
from lab.runner import builds, machine

FINE, LOOK, BROKEN, UNKNOWN = "fine", "worth a look", "broken", "not known here"

CLEAR, LARGE = 1.1, 1.5
"""Speed-ups by a change: from the first it is worth a look, from the second it fixes a fault."""

UNOPTIMISED = 8.0
"""An optimised build for this CPU is slower than NumPy's BLAS by less than this factor, one for an old CPU by less than
five times this factor."""

SLOW_DISK_GBPS, SLOW_LOAD_S = 0.1, 10.0

REBUILD = 'CMAKE_ARGS="{}" python3 -m uv sync --reinstall-package llama-cpp-python --no-cache-dir'


@dataclass(frozen=True)
class Effect:
    """The effect of a change: the time without over that with it, and the noise of equal measurements."""

    ratio: Ratio
    noise: float

    def is_gain(self, at_least: float = CLEAR) -> bool:
        """Whether every pair is faster with the change by at least this factor, and beyond the noise."""
        return self.ratio.low > max(at_least, self.noise)

    def is_loss(self) -> bool:
        """Whether every pair is slower with the change, beyond the noise."""
        return self.ratio.high < 1 / max(CLEAR, self.noise)


Effects = Mapping[str, Effect]
"""The effects of one change, by what was timed: prefill, decode."""


@dataclass(frozen=True)
class Check:
    """One check. `command` fixes it or shows more; `effects` are those of the tried change."""

    name: str
    figure: str | None
    verdict: str
    words: str = ""
    command: str | None = None
    effects: Effects = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A setting to try with another value: `asked` are the changed options of `make_plan`."""

    name: str
    figure: str
    words: str
    command: str
    asked: Mapping[str, Any]


def effect(as_it_is: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> Effect | None:
    """The effect from the times of two sides by block, paired in order; None for too few pairs for an interval."""
    base, other = ([value for block in side for value in block] for side in (as_it_is, changed))
    ratio = stats.paired_ratio(other, base) if len(base) == len(other) else None
    noise = max((max(block) / min(block) for block in (*as_it_is, *changed)), default=1.0)
    return Effect(ratio, noise) if ratio else None


def told(effects: Effects) -> str:
    """`prefill 1.90x as fast (1.80-2.10), decode 1.00x as fast (0.900-1.10)`."""
    parts = ((phase, one.ratio) for phase, one in effects.items())
    return ", ".join(f"{phase} {digits(r.estimate)}x as fast ({digits(r.low)}-{digits(r.high)})" for phase, r in parts)


def of_reading(name: str, figure: str | None, *signs: tuple[object, str, str | None]) -> Check:
    """A check of a reading: the first present sign (is present, words, command) makes it worth a look."""
    for is_there, words, command in signs:
        if is_there:
            return Check(name, figure, LOOK, words, command)
    return Check(name, figure, UNKNOWN if figure is None else FINE)


def of_change(change: Change, effects: Effects) -> Check:
    """A check of a setting: broken if the other value gains much and loses nothing."""
    gains, loses = any(e.is_gain() for e in effects.values()), any(e.is_loss() for e in effects.values())
    verdict = UNKNOWN if not effects else FINE
    if gains:
        verdict = BROKEN if not loses and any(e.is_gain(LARGE) for e in effects.values()) else LOOK
    reason = "The other value was not tried: runs take too long here, or memory is short."
    words = f"{change.words}: {told(effects)}." if effects else reason
    return Check(change.name, change.figure, verdict, words, change.command if gains else None, effects)


def of_threads(change: Change, effects: Effects, n: int, best: int, is_busy: bool) -> Check:
    """The number of threads, with `best` as default. `is_busy`: others use cores, so that fewer can be faster."""
    check = of_change(change, effects)
    if n == best and check.verdict in (BROKEN, LOOK):  # a choice, or caused by other programs
        return dataclasses.replace(check, verdict=FINE if is_busy else LOOK)
    if n > best and check.verdict in (FINE, UNKNOWN):
        return dataclasses.replace(check, verdict=LOOK, command=change.command)
    return check


def of_others(n_cores: float | None, sentences: Sequence[str], fewer: Check | None) -> Check:
    """The CPU use of other programs and the host; `fewer` threads leave them a core, which shows their cost."""
    figure = None if n_cores is None else f"{n_cores:.2f} cores used"
    if not sentences:
        return Check("other programs", figure, UNKNOWN if figure is None else FINE)
    words, effects = f"During the measurement {'; '.join(sentences)}.", fewer.effects if fewer else {}
    if fewer and any(one.is_gain() for one in effects.values()):
        return Check("other programs", figure, LOOK, f"{words} {fewer.words}", f"top    (or {fewer.command})", effects)
    return Check("other programs", figure, LOOK, words, "top    (stop programs you do not need)")


def of_limits(quota: float | None, left: int | None, n_waits: int, steady: Effect | None) -> Check:
    """A container's limits. `steady`: the effect of short bursts against sustained work on one core."""
    memory = "" if left is None else f"; {left / 1e9:.1f} GB of memory left"
    figure = f"{'no CPU quota' if quota is None else f'{quota:g} cores'}{memory}"
    words, command = "The CPU quota was used up in {} runs.", "docker update --cpus N CONTAINER"
    if steady is None or not steady.is_gain():
        small = quota is not None and quota < 1
        signs = (n_waits, words.format(n_waits), command), (small, "The CPU quota is less than one core.", command)
        return of_reading("limits", figure, *signs)
    words = f"Work on one core is {told({'in short bursts': steady})}: "
    words += "something throttles this process." if quota is None else "the CPU quota throttles it."
    verdict = BROKEN if quota is not None and steady.is_gain(LARGE) else LOOK
    return Check("limits", figure, verdict, words, command, {"one core": steady})


def of_build(system_info: str, product: Effect | None) -> Check:
    """The CPU features of the build; `product`: an F32 product on one core, against NumPy's BLAS."""
    lacks = builds.unused(system_info)
    names, effects = ", ".join(sorted(lacks or ())), {"F32 product": product} if product else {}
    figure = "CPU features unknown" if lacks is None else f"lacks {names}" if lacks else "made for this CPU"
    command = REBUILD.format("-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release")
    if product and product.is_gain(LARGE if lacks else UNOPTIMISED):
        is_debug = not lacks or product.is_gain(5 * UNOPTIMISED)
        cause = "was compiled without optimisation" if is_debug else f"leaves out {names}"
        words = f"llama.cpp {cause}. With NumPy's BLAS on one core instead: {told(effects)}."
        return Check("build", figure, BROKEN, words, command, effects)
    openmp = "OPENMP = 1" in system_info or sys.platform == "darwin"
    signs = (
        (lacks, f"The build does not use {names}, which this CPU has.", command),
        (not openmp, "It was built without OpenMP and uses ggml's own threads.", REBUILD.format("-DGGML_OPENMP=ON")),
    )
    return dataclasses.replace(of_reading("build", figure, *signs), effects=effects)


def of_power(savers: Sequence[str] | None, power: str | None) -> Check:
    """Governor, energy preference, profile and battery."""
    found = [*(savers or ()), *(["the machine runs on battery"] if power == "battery" else [])]
    figure = "; ".join(dict.fromkeys(found)) or (None if savers is None and power is None else "no power saving")
    command = "powerprofilesctl set performance    (and plug it in)"
    return of_reading("power", figure, (found, "Power saving can lower the clock.", command))


def of_clocks(clock: tuple[float, float] | None, slower: float | None) -> Check:
    """The clock of a busy core, and the slowdown of one core after load on all cores."""
    figures = [f"{clock[0]:.1f} of {clock[1]:.1f} GHz"] if clock else []
    figures += [f"{digits(1 / slower)}x as fast after load"] if slower else []
    hot = "One core is slower after load: the machine is hot, or its power is limited."
    is_low, low = clock and clock[0] < 0.7 * clock[1], "A busy core is far below its highest clock."
    return of_reading(
        "clocks",
        "; ".join(figures) or None,
        ((slower or 1) > 1.15, hot, "sensors    (clean the fans, plug it in)"),
        (is_low, low, "cpupower frequency-info"),
    )


def of_bandwidth(rates: Mapping[int, float], modules: float | None) -> Check:
    """The memory bandwidth in 10^9 bytes/s by number of threads, against the transfer rate of the modules."""
    figure = ", ".join(f"{rate:.0f} GB/s with {plural(n, 'thread')}" for n, rate in rates.items())
    if modules is None:
        return Check("bandwidth", figure, UNKNOWN, "The nominal bandwidth of the memory cannot be read.")
    words = "Less than half of the modules' transfer rate, if each has its own channel."
    slow = max(rates.values()) < 0.5 * modules
    return of_reading("bandwidth", f"{figure}; modules {modules:.0f}", (slow, words, "dmidecode -t memory"))


def of_memory(available: int, need: int | None, n_short: int, swap: tuple[int, int], ram: int | None) -> Check:
    """Free memory against the need of a run; `swap`: bytes in use, and bytes read back during the checks."""
    used, back = swap
    figure = f"{available / 1e9:.1f} GB free{f', {need / 1e9:.1f} needed' if need else ''}; swap {used / 1e9:.1f} GB"
    moved = f"Memory is in swap; {back / 1e6:.0f} MB were read back during the checks."
    return of_reading(
        "memory",
        figure,
        (need and available < 1.2 * need, "The model and its context hardly fit.", "free -h    (or a smaller model)"),
        (
            n_short,
            f"Programs had to wait for memory in {n_short} runs.",
            "free -h    (stop programs you do not need)",
        ),
        (back > 2**24 or used > 0.1 * (ram or 1e12), moved, "swapoff -a && swapon -a    (after stopping programs)"),
    )


def of_disk(n_bytes: int, cached: Effect | None, gbps: float) -> Check:
    """The disk of the model's file; `cached`: the effect of reading pieces of it from the page cache."""
    if cached is None or not cached.is_gain():
        return Check("disk", None, UNKNOWN, "The page cache could not be bypassed.")
    load_s = n_bytes / 1e9 / gbps
    words = f"Loading the file from the disk takes {load_s:.0f} s; {told({'from the page cache': cached})}."
    is_slow = load_s > (1 if gbps < SLOW_DISK_GBPS else SLOW_LOAD_S)
    sign = is_slow, words, "cp MODEL FASTER_DISK    (keep memory free for it)"
    check = of_reading("disk", f"{digits(gbps)} GB/s", sign)
    return dataclasses.replace(check, effects={"file": cached})


def of_gpu(there: Sequence[str], here: Machine) -> Check:
    """The GPUs of the system, against those that the build can use."""
    used = [device for device in machine.accelerators(here.devices) if not machine.is_software(device)]
    kind = "METAL" if sys.platform == "darwin" else "CUDA" if there and "NVIDIA" in there[0] else "VULKAN"
    words = f"This build of llama.cpp cannot use {', '.join(there)}."
    figure = machine.in_words(used) or ("not in the build" if there else "none")
    return of_reading("GPU", figure, (there and not used, words, REBUILD.format(f"-DGGML_{kind}=ON")))
