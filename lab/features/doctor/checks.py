"""The verdicts on what is only read from the system: at most "worth a look"."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core.lists import plural
from lab.core.record import Device, Machine, Record
from lab.features.doctor import system
from lab.runner import builds, cgroups, disturbances, machine
from lab.runner.cases import Plan
from lab.show.wording import digits

FINE = "fine"
LOOK = "worth a look"
BROKEN = "broken"
UNKNOWN = "cannot be told"

SLOWED = 1.15  # times as long after load: from here on a core is worth a look
SWAPPED = 0.1  # the share of the memory's size in swap that is worth a look
ROOM = 1.2  # free memory over what the model needs

REBUILD = 'CMAKE_ARGS="-DGGML_{}=ON -DCMAKE_BUILD_TYPE=Release" ' + builds.BUILD_HERE
MORE_CPU = "docker update --cpus N CONTAINER"
COOL = "sensors    (clean the fans, plug it in)"
FULL_POWER = "powerprofilesctl set performance    (and plug it in)"
BUSY = "Other programs used the CPU meanwhile. Run lab doctor again when they have ended."
STOP_PROGRAMS = "top    (stop programs you do not need)"
NO_TPOT = "No run has a time per output token."
FREE_MEMORY = "free -h    (stop programs you do not need)"
SMALLER_MODEL = "free -h    (or a smaller model)"


@dataclass(frozen=True)
class Check:
    """One check: a figure, a verdict, and a command that mends it or shows more."""

    name: str
    figure: str | None
    verdict: str
    words: str = ""
    command: str | None = None


def read_check(name: str, figure: str | None) -> Check:
    """A reading in which nothing is worth a look; None: it cannot be read."""
    if figure is None:
        return Check(name, None, UNKNOWN, "This system does not say it.")
    return Check(name, figure, FINE)


@dataclass(frozen=True)
class Readings:
    """What is read from the system and from the runs. None: unknown."""

    quota: float | None  # CPU time that a container allows, in cores
    limit_bytes: int | None  # memory that a container allows
    slowdown: float | None  # the time of one core after load on all cores over that before
    power: str | None  # mains, battery
    power_savers: list[str] | None
    free_bytes: int
    swap_bytes: int
    ram_bytes: int | None
    cards: list[str]  # GPUs of the system
    devices: tuple[Device, ...]  # of the build
    needed_bytes: int | None  # by the model and its context; None: nothing could be planned
    taken_cpu: list[str]  # sentences on the CPU time that other programs and the host took
    n_halted: int  # runs in which the CPU quota was used up
    n_short: int  # runs in which programs had to wait for memory
    cores_used: float | None  # by other programs, in the median run


def read(
    here: Machine,
    plan: Plan | None,
    runs: Sequence[Record],
    slowdown: float | None,
    root: Path,
) -> Readings:
    """Read the system whose files are below `root`."""
    causes = [disturbances.disturbances(record) for record in runs]
    return Readings(
        quota=cgroups.cpu_quota(root),
        limit_bytes=cgroups.memory_limit(root),
        slowdown=slowdown,
        power=here.power,
        power_savers=system.power_savers(root),
        free_bytes=machine.memory_available(root),
        swap_bytes=system.swap_used(),
        ram_bytes=here.ram_bytes,
        cards=system.gpus(root),
        devices=here.devices,
        needed_bytes=plan.memory(plan.cases[0]).total_bytes if plan else None,
        taken_cpu=taken_cpu(runs),
        n_halted=len([run for run in causes if disturbances.QUOTA in run]),
        n_short=len([run for run in causes if disturbances.MEMORY in run]),
        cores_used=cores_used(runs),
    )


def taken_cpu(records: Sequence[Record]) -> list[str]:
    """Sentences on the CPU time that other programs and the host took during these runs."""
    largest: dict[str, float] = {}
    for record in records:
        amounts = disturbances.disturbances(record)
        for cause in (disturbances.OTHERS, disturbances.STEAL):
            if cause in amounts:
                largest[cause] = max(largest.get(cause, 0.0), amounts[cause])
    return [disturbances.sentence(cause, amount) for cause, amount in largest.items()]


def cores_used(records: Sequence[Record]) -> float | None:
    """The cores that other programs used in the median run."""
    means: list[float] = []
    for record in records:
        samples = record.run.noise.samples if record.run.noise else None
        if samples and samples.others_ms:
            means.append(max(0.0, disturbances.cores(samples, samples.others_ms).mean))
    return statistics.median(means) if means else None


def checks_of(readings: Readings) -> list[Check]:
    """The checks of the machine; without a plan no GPU is checked."""
    checks = [
        throttling(readings),
        power(readings),
        other_programs(readings),
        memory(readings),
    ]
    if readings.needed_bytes is not None:
        checks.append(gpu(readings))
    return checks


def build(system_info: str) -> Check:
    """Whether the build uses what the CPU has."""
    features = builds.mismatch(system_info)
    if features is None:
        return read_check("build", None)
    _, unused = features
    if not unused:
        return read_check("build", "made for this CPU")
    names = ", ".join(sorted(unused))
    sentence = f"The build does not use {names}, which this CPU has."
    return Check("build", f"lacks {names}", LOOK, sentence, REBUILD.format("NATIVE"))


def throttling(readings: Readings) -> Check:
    quota = readings.quota
    slowdown = readings.slowdown
    figure = "no CPU quota"
    if quota is not None:
        figure = f"CPU quota of {machine.cores_in_words(quota)}"
    if slowdown:
        figure += f"; {digits(1 / slowdown)}x as fast after load"
    sentence = ""
    command = MORE_CPU
    if readings.n_halted:
        runs = plural(readings.n_halted, "run")
        sentence = f"The CPU quota was used up in {runs}: the threads had to wait."
    elif quota is not None and quota < 1:
        sentence = "The CPU quota is below one core."
    elif slowdown and slowdown > SLOWED:
        sentence = (
            "One core is slower after load: the machine is hot, or its power is limited."
        )
        command = COOL
    if not sentence:
        return read_check("throttling", figure)
    return Check("throttling", figure, LOOK, sentence, command)


def power(readings: Readings) -> Check:
    savers = list(readings.power_savers or ())
    if readings.power == "battery":
        savers.append("the machine runs on battery")
    if savers:
        sentence = "Power saving can lower the clock."
        return Check("power", "; ".join(savers), LOOK, sentence, FULL_POWER)
    is_unknown = readings.power_savers is None and readings.power is None
    return read_check("power", None if is_unknown else "no power saving")


def other_programs(readings: Readings) -> Check:
    figure = None
    if readings.cores_used is not None:
        figure = f"{readings.cores_used:.2f} cores used"
    if readings.taken_cpu:
        sentence = f"During the runs {'; '.join(readings.taken_cpu)}."
        return Check("other programs", figure, LOOK, sentence, STOP_PROGRAMS)
    return read_check("other programs", figure)


def memory(readings: Readings) -> Check:
    needed_bytes = readings.needed_bytes or 0
    figure = f"{readings.free_bytes / 1e9:.1f} GB free"
    if needed_bytes:
        figure += f", {needed_bytes / 1e9:.1f} needed"
    if readings.limit_bytes is not None:
        figure += f"; limit {readings.limit_bytes / 1e9:.1f} GB"
    figure += f"; swap {readings.swap_bytes / 1e9:.1f} GB"
    if readings.free_bytes < ROOM * needed_bytes:
        sentence = "The model and its context hardly fit."
        return Check("memory", figure, LOOK, sentence, SMALLER_MODEL)
    if readings.n_short:
        sentence = f"Programs had to wait for memory in {readings.n_short} runs."
        return Check("memory", figure, LOOK, sentence, FREE_MEMORY)
    if readings.ram_bytes and readings.swap_bytes > SWAPPED * readings.ram_bytes:
        return Check("memory", figure, LOOK, "Memory is in swap.", FREE_MEMORY)
    return read_check("memory", figure)


def gpu(readings: Readings) -> Check:
    """Whether the build can use the graphics cards."""
    devices = machine.accelerators(readings.devices)
    usable = [device for device in devices if not machine.is_software(device)]
    if usable:
        return read_check("GPU", machine.in_words(usable))
    if not readings.cards:
        return read_check("GPU", "none")
    sentence = f"This build of llama.cpp cannot use {', '.join(readings.cards)}."
    command = REBUILD.format(backend(readings.cards))
    return Check("GPU", "not in the build", LOOK, sentence, command)


def backend(cards: Sequence[str]) -> str:
    """llama.cpp's backend for the first card."""
    if sys.platform == "darwin":
        return "METAL"
    return "CUDA" if "NVIDIA" in cards[0] else "VULKAN"
