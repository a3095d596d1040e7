"""What a reading or a measured effect allows `lab doctor` to say: a figure and a verdict for each check.

What is only read (a governor, swap in use) is worth a look at most. A cause is called broken where an intervention
shows it: one thing is changed, both ways are measured in turns (A B B A), and in every pair the difference is larger
than LARGE and than any difference between equal measurements made one after the other.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.core import stats
from lab.core.record import Machine
from lab.core.stats import Ratio
from lab.runner import builds, machine

FINE, LOOK, BROKEN, UNKNOWN = "fine", "worth a look", "broken", "not known here"

CLEAR, LARGE = 1.1, 1.5
"""Speed-ups by a change: from the first on it is worth a look, from the second on it mends a fault."""

UNOPTIMISED = 8.0
"""An optimised build for this CPU is slower than NumPy's BLAS by less than this factor, one for an old CPU by less than
five times this factor."""

SLOW_DISK_GBPS, SLOW_LOAD_S = 0.1, 10.0

REBUILD = 'CMAKE_ARGS="{}" python3 -m uv sync --reinstall-package llama-cpp-python --no-cache-dir'


@dataclass(frozen=True)
class Effect:
    """What a change does: the time as it is over that with the change, and by how much equal measurements differ."""

    ratio: Ratio
    noise: float

    def is_gain(self, at_least: float = CLEAR) -> bool:
        """Whether every pair is faster with the change by at least this factor, and beyond the noise."""
        return self.ratio.low > max(at_least, self.noise)

    def is_loss(self) -> bool:
        """Whether every pair is slower with the change, beyond the noise."""
        return self.ratio.high < 1 / max(CLEAR, self.noise)


Effects = Mapping[str, Effect]
"""Of one change, by what was timed: prefill, decode."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked. `command` mends it or shows more; `effects` are of the change that was tried."""

    name: str
    figure: str | None
    verdict: str
    words: str = ""
    command: str | None = None
    effects: Effects = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A setting that is tried another way: `asked` are the options of `make_plan` that change."""

    name: str
    figure: str
    words: str
    command: str
    asked: Mapping[str, Any]


def effect(as_it_is: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> Effect | None:
    """Of times of two sides by block, paired in their order; None for fewer pairs than an interval needs."""
    base, other = ([value for block in side for value in block] for side in (as_it_is, changed))
    ratio = stats.paired_ratio(other, base) if len(base) == len(other) else None
    noise = max((max(block) / min(block) for block in (*as_it_is, *changed)), default=1.0)
    return Effect(ratio, noise) if ratio else None


def told(effects: Effects) -> str:
    """`prefill 1.9x as fast (1.8 to 2.1), decode 1x (0.9 to 1.1)`."""
    parts = ((phase, one.ratio) for phase, one in effects.items())
    return ", ".join(f"{phase} {r.estimate:.2g}x as fast ({r.low:.2g} to {r.high:.2g})" for phase, r in parts)


def of_reading(name: str, figure: str | None, *signs: tuple[object, str, str | None]) -> Check:
    """A check of what was only read: the first sign (whether it is there, words, command) makes it worth a look."""
    for is_there, words, command in signs:
        if is_there:
            return Check(name, figure, LOOK, words, command)
    return Check(name, figure, UNKNOWN if figure is None else FINE)


def of_change(change: Change, effects: Effects) -> Check:
    """A check of a setting: broken where the other way gains much and loses nothing."""
    gains, loses = any(e.is_gain() for e in effects.values()), any(e.is_loss() for e in effects.values())
    verdict = UNKNOWN if not effects else FINE
    if gains:
        verdict = BROKEN if not loses and any(e.is_gain(LARGE) for e in effects.values()) else LOOK
    reason = "Not tried the other way: runs take too long here, or memory is short."
    words = f"{change.words}: {told(effects)}." if effects else reason
    return Check(change.name, change.figure, verdict, words, change.command if gains else None, effects)


def of_threads(change: Change, effects: Effects, n: int, best: int, is_busy: bool) -> Check:
    """The threads, where `best` are the default here. `is_busy`: others use cores, so that fewer may be faster."""
    check = of_change(change, effects)
    if n == best and check.verdict in (BROKEN, LOOK):  # a choice, or the doing of what else runs
        return dataclasses.replace(check, verdict=FINE if is_busy else LOOK)
    if n > best and check.verdict in (FINE, UNKNOWN):
        return dataclasses.replace(check, verdict=LOOK, command=change.command)
    return check


def of_others(n_cores: float | None, sentences: Sequence[str], fewer: Check | None) -> Check:
    """What other programs and the host took; `fewer` threads leave them a core, which shows what they cost."""
    figure = None if n_cores is None else f"{n_cores:.2f} cores used"
    if not sentences:
        return Check("other programs", figure, UNKNOWN if figure is None else FINE)
    words, effects = f"While this was measured, {'; '.join(sentences)}.", fewer.effects if fewer else {}
    if fewer and any(one.is_gain() for one in effects.values()):
        return Check("other programs", figure, LOOK, f"{words} {fewer.words}", f"top    (or {fewer.command})", effects)
    return Check("other programs", figure, LOOK, words, "top    (end what is not needed)")


def of_limits(quota: float | None, left: int | None, n_waits: int, steady: Effect | None) -> Check:
    """A container's limits. `steady`: the same work on one core sustained, and with the change to short bursts."""
    memory = "" if left is None else f"; {left / 1e9:.1f} GB of memory left"
    figure = f"{'no quota of CPU time' if quota is None else f'{quota:g} cores'}{memory}"
    words, command = "The quota of CPU time was used up in {} runs.", "docker update --cpus N CONTAINER"
    if steady is None or not steady.is_gain():
        small = quota is not None and quota < 1
        signs = (n_waits, words.format(n_waits), command), (small, "The quota is less than one core.", command)
        return of_reading("limits", figure, *signs)
    words = f"Work on one core is {told({'in short bursts': steady})}: "
    words += "something halts this process." if quota is None else "the quota of CPU time halts it."
    verdict = BROKEN if quota is not None and steady.is_gain(LARGE) else LOOK
    return Check("limits", figure, verdict, words, command, {"one core": steady})


def of_build(system_info: str, product: Effect | None) -> Check:
    """What llama.cpp was compiled for; `product`: one of F32 on one core, and by NumPy's BLAS instead."""
    lacks = builds.unused(system_info)
    names, effects = ", ".join(sorted(lacks or ())), {"F32 product": product} if product else {}
    figure = "CPU's features not known" if lacks is None else f"lacks {names}" if lacks else "made for this CPU"
    command = REBUILD.format("-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release")
    if product and product.is_gain(LARGE if lacks else UNOPTIMISED):
        is_debug = not lacks or product.is_gain(5 * UNOPTIMISED)
        cause = "was compiled without optimisation" if is_debug else f"leaves out {names}"
        words = f"It {cause}. By NumPy's BLAS on one core instead: {told(effects)}."
        return Check("build", figure, BROKEN, words, command, effects)
    openmp = "OPENMP = 1" in system_info or sys.platform == "darwin"
    signs = (
        (lacks, f"This CPU has {names}, which the build does not use.", command),
        (not openmp, "It was built without OpenMP, with ggml's own threads.", REBUILD.format("-DGGML_OPENMP=ON")),
    )
    return dataclasses.replace(of_reading("build", figure, *signs), effects=effects)


def of_power(savers: Sequence[str] | None, power: str | None) -> Check:
    """Governor, energy preference, profile and battery."""
    found = [*(savers or ()), *(["the machine runs on battery"] if power == "battery" else [])]
    figure = "; ".join(dict.fromkeys(found)) or (None if savers is None and power is None else "nothing is saved")
    command = "powerprofilesctl set performance    (and plug it in)"
    return of_reading("power", figure, (found, "The clock may be held down to save power.", command))


def of_clocks(clock: tuple[float, float] | None, slower: float | None) -> Check:
    """The clock of a core that works, and how many times as long work on one core takes after all the others worked."""
    figures = [f"{clock[0]:.1f} of {clock[1]:.1f} GHz"] if clock else []
    figures += [f"{1 / slower:.2f}x as fast after load"] if slower else []
    hot = "Work on one core takes longer after load: the machine is hot, or short of power."
    is_low, low = clock and clock[0] < 0.7 * clock[1], "A core at work is far below its highest clock."
    return of_reading(
        "clocks",
        "; ".join(figures) or None,
        ((slower or 1) > 1.15, hot, "sensors    (clean the fans, plug it in)"),
        (is_low, low, "cpupower frequency-info"),
    )


def of_bandwidth(rates: Mapping[int, float], modules: float | None) -> Check:
    """The memory bandwidth in 10^9 bytes/s, by number of threads, against what the modules transfer."""
    figure = ", ".join(f"{rate:.0f} GB/s by {n} thread{'s' * (n > 1)}" for n, rate in rates.items())
    if modules is None:
        return Check("bandwidth", figure, UNKNOWN, "What the memory should give cannot be read.")
    words = "Less than half of what the modules transfer, if each has a channel of its own."
    slow = max(rates.values()) < 0.5 * modules
    return of_reading("bandwidth", f"{figure}; modules {modules:.0f}", (slow, words, "dmidecode -t memory"))


def of_memory(available: int, need: int | None, n_short: int, swap: tuple[int, int], ram: int | None) -> Check:
    """Memory left against what a run needs; `swap`: bytes in use, and bytes that came back from it meanwhile."""
    used, back = swap
    figure = f"{available / 1e9:.1f} GB free{f', {need / 1e9:.1f} needed' if need else ''}; swap {used / 1e9:.1f} GB"
    moved = f"Memory lies in swap; {back / 1e6:.0f} MB came back from there meanwhile."
    return of_reading(
        "memory",
        figure,
        (need and available < 1.2 * need, "The model and its context hardly fit.", "free -h    (or a smaller model)"),
        (n_short, f"Programs had to wait for memory in {n_short} runs.", "free -h    (end what is not needed)"),
        (back > 2**24 or used > 0.1 * (ram or 1e12), moved, "swapoff -a && swapon -a    (after ending programs)"),
    )


def of_disk(n_bytes: int, cached: Effect | None, gbps: float) -> Check:
    """The disk of the model's file; `cached`: pieces of it read from the disk, and from the page cache instead."""
    if cached is None or not cached.is_gain():
        return Check("disk", None, UNKNOWN, "The page cache could not be kept out.")
    load_s = n_bytes / 1e9 / gbps
    words = f"The file takes {load_s:.0f} s from the disk; {told({'from the page cache': cached})}."
    is_slow = load_s > (1 if gbps < SLOW_DISK_GBPS else SLOW_LOAD_S)
    sign = is_slow, words, "cp MODEL FASTER_DISK    (keep memory free for it)"
    check = of_reading("disk", f"{gbps:.2g} GB/s", sign)
    return dataclasses.replace(check, effects={"file": cached})


def of_gpu(there: Sequence[str], here: Machine) -> Check:
    """The GPUs that the system lists, against those that the build computes on."""
    used = [device for device in machine.accelerators(here.devices) if not machine.is_software(device)]
    kind = "METAL" if sys.platform == "darwin" else "CUDA" if there and "NVIDIA" in there[0] else "VULKAN"
    words = f"The system has {', '.join(there)}, which this build of llama.cpp cannot use."
    figure = machine.in_words(used) or ("not in the build" if there else "none")
    return of_reading("GPU", figure, (there and not used, words, REBUILD.format(f"-DGGML_{kind}=ON")))
