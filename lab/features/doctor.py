"""`lab machine`: this machine and its devices. `lab doctor`: does llama.cpp run here, and what slows it down?

A value that is only read (a governor, swap in use) is at most "worth a look". The number of threads is "broken" only
if another one was measured to be faster: both run alternately (A B B A) in fresh engines, and in every pair the
difference is larger than LARGE and than any difference between equal consecutive runs.
runner/warm_engine.py diagnoses crashes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lab.app.help import EXIT_FAILED, Command
from lab.app.options import ENGINE, LIB, MODEL, as_json_option, with_options
from lab.core import phases, stats
from lab.core.lists import grouped
from lab.core.record import Machine, Model, Record, Settings
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.process.worker import Worker, WorkerDied
from lab.runner import builds, disturbances, machine, prompts, trial as side_by_side
from lab.runner.cases import Case, Plan
from lab.runner.machine import system_text
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus, Status
from lab.runner.warm_engine import WarmEngine
from lab.show.wording import digits

FINE = "fine"
LOOK = "worth a look"
BROKEN = "broken"
UNKNOWN = "not known here"

CLEAR = 1.1
LARGE = 1.5
"""Speed-ups by another number of threads: from the first it is worth a look, from the second it fixes a fault."""

N_BLOCKS = 3
N_TURNS = 2  # six pairs, the fewest for a 95 % interval
LENGTHS = (512, 256, 128, 64, 32)
N_GEN = 16
RUN_S = 0.8
MOST_RUN_S = 10.0
"""A trial uses the longest of these prompts that takes up to RUN_S; there is none if 32 tokens take MOST_RUN_S."""

AS_IT_IS = "as it is"
OTHER = "other threads"

REBUILD = 'CMAKE_ARGS="-DGGML_{}=ON -DCMAKE_BUILD_TYPE=Release" ' + builds.BUILD_HERE

OWN_GOVERNOR = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose usual governor is `powersave`: they choose the clock by the energy preference."""

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
"""PCI vendors of GPUs that llama.cpp can use; others are server consoles and virtual displays."""


@dataclass(frozen=True)
class Check:
    """One check: a figure, a verdict, and a command that mends it or shows more."""

    name: str
    figure: str | None
    verdict: str
    words: str = ""
    command: str | None = None


@dataclass(frozen=True)
class Checkup:
    """All checks. Model and settings are None if the engine could not plan a run."""

    machine: Machine
    model: Model | None
    settings: Settings | None
    checks: tuple[Check, ...]
    seconds: float


def examine(asked: Mapping[str, Any], watch: ShowStatus, root: Path = machine.ROOT) -> Checkup:
    """Check build, engine, threads and machine, in half a minute. An engine that fails is one of the checks."""
    began = time.monotonic()
    best = machine.default_threads(root)
    given: dict[str, Any] = {"threads": best, "prompt": prompts.RANDOM}
    given |= {name: value for name, value in asked.items() if value is not None}
    plan = None
    runs = list[Record]()
    found = list[Check]()
    watch(Status("working on one core"))
    before = min(work_s(0.2) for _ in range(3))
    with Worker() as worker:
        worker.use(builds.folder_of(given.get("lib")))
        try:
            compared = builds.mismatch(builds.of_worker(worker).system_info)
            names = ", ".join(sorted(compared[1])) if compared else ""
            words = f"The build does not use {names}, which this CPU has."
            figure = (
                None if compared is None else f"lacks {names}" if names else "made for this CPU"
            )
            found = [_reading("build", figure, (names, words, REBUILD.format("NATIVE")))]
            plan = make_plan(worker, [LENGTHS[0]], N_GEN, 1, **given)
            worker.use(plan.lib, plan.settings.rpc or ())
            runs, threads = _threads(worker, plan, given, best, watch)
            prefill = statistics.median(
                1e9 * one.run.n_prompt / (phases.prefill_ns(one.run) or 1) for one in runs
            )
            decode = statistics.median(1e9 / (phases.tpot_ns(one.run) or 1) for one in runs)
            engine = Check("engine", f"prefill {prefill:,.0f}, decode {decode:,.0f} tokens/s", FINE)
            found = [engine, *found, threads]
        except LabError as problem:
            if (
                found and not plan and not isinstance(problem, WorkerDied)
            ):  # settings that cannot be
                raise
            found.insert(
                0, Check("engine", "does not run", BROKEN, problem.what, problem.hint or None)
            )
    slower = min(work_s(0.2) for _ in range(3)) / before if runs else None
    here = plan.machine if plan else machine.describe()
    found += readings(here, plan, runs, slower, root)
    model, settings = (plan.model, plan.settings) if plan else (None, None)
    return Checkup(here, model, settings, tuple(found), time.monotonic() - began)


def work_s(seconds: float) -> float:
    """Seconds of CPU time that a unit of work (SHA-256 within the caches) takes, while one core is busy for so long."""
    data = bytes(2**16)
    n = 0
    start = time.perf_counter()
    start_cpu = time.thread_time()
    while time.perf_counter() - start < seconds:
        hashlib.sha256(data).digest()
        n += 1
    return (time.thread_time() - start_cpu) / n


def _reading(name: str, figure: str | None, *signs: tuple[object, str, str]) -> Check:
    """A check of a reading: the first present sign (is present, words, command) makes it worth a look."""
    for is_there, words, command in signs:
        if is_there:
            return Check(name, figure, LOOK, words, command)
    return Check(name, figure, UNKNOWN if figure is None else FINE)


def readings(
    here: Machine, plan: Plan | None, runs: Sequence[Record], slower: float | None, root: Path
) -> list[Check]:
    """The checks of what is only read. `slower`: one core after load on all. Without a plan no GPU is checked."""
    quota = machine.cpu_quota(root)
    own = [disturbances.disturbances(record) for record in runs]
    n_halted, n_short = (
        sum(c in causes for causes in own) for c in (disturbances.QUOTA, disturbances.MEMORY)
    )
    throttle = "no CPU quota" if quota is None else f"{quota:g} cores"
    throttle += f"; {digits(1 / slower)}x as fast after load" if slower else ""
    hot = "One core is slower after load: the machine is hot, or its power is limited."
    docker = "docker update --cpus N CONTAINER"
    free_up = "free -h    (stop programs you do not need)"

    savers = power_savers(root)
    saving = [
        *(savers or ()),
        *(["the machine runs on battery"] if here.power == "battery" else []),
    ]
    power = "; ".join(saving) or (
        None if savers is None and here.power is None else "no power saving"
    )
    governor = "powerprofilesctl set performance    (and plug it in)"

    others = _others(runs)
    noises = [noise for record in runs if (noise := record.run.noise)]
    samples = [(noise, noise.samples.others_ms) for noise in noises if noise.samples]
    n_cores = [max(0.0, disturbances.cores(noise.samples, ms).mean) for noise, ms in samples if ms]
    used = f"{statistics.median(n_cores):.2f} cores used" if n_cores else None

    free = machine.memory_available(root)
    need = plan.memory(plan.cases[0]).total_bytes if plan else 0
    swapped = swap_used()
    ram = here.ram_bytes or 1e12
    memory = f"{free / 1e9:.1f} GB free{f', {need / 1e9:.1f} needed' if need else ''}; swap {swapped / 1e9:.1f} GB"

    cards = gpus(root)
    usable = [
        device for device in machine.accelerators(here.devices) if not machine.is_software(device)
    ]
    kind = (
        "METAL"
        if sys.platform == "darwin"
        else "CUDA"
        if cards and "NVIDIA" in cards[0]
        else "VULKAN"
    )
    gpu = machine.in_words(usable) or ("not in the build" if cards else "none")
    no_backend = (
        cards and not usable,
        f"This build of llama.cpp cannot use {', '.join(cards)}.",
        REBUILD.format(kind),
    )
    return [
        _reading(
            "throttling",
            throttle,
            (n_halted, f"The CPU quota was used up in {n_halted} runs.", docker),
            (quota is not None and quota < 1, "The CPU quota is below one core.", docker),
            ((slower or 1) > 1.15, hot, "sensors    (clean the fans, plug it in)"),
        ),
        _reading("power", power, (saving, "Power saving can lower the clock.", governor)),
        _reading(
            "other programs",
            used,
            (
                others,
                f"During the runs {'; '.join(others)}.",
                "top    (stop programs you do not need)",
            ),
        ),
        _reading(
            "memory",
            memory,
            (
                free < 1.2 * need,
                "The model and its context hardly fit.",
                "free -h    (or a smaller model)",
            ),
            (n_short, f"Programs had to wait for memory in {n_short} runs.", free_up),
            (swapped > 0.1 * ram, "Memory is in swap.", free_up),
        ),
        *([_reading("GPU", gpu, no_backend)] if plan else []),
    ]


def of_threads(
    effects: Mapping[str, tuple[Ratio, float]], n: int, other: int, best: int, is_busy: bool
) -> Check:
    """The number of threads. `effects`: the speed-up with `other`, and the noise, by phase. `is_busy`: of others."""
    gains = {phase: ratio.low > max(CLEAR, noise) for phase, (ratio, noise) in effects.items()}
    loses = any(ratio.high < 1 / max(CLEAR, noise) for ratio, noise in effects.values())
    verdict = LOOK if any(gains.values()) else FINE if effects else UNKNOWN
    if (
        any(gains[phase] and ratio.low > LARGE for phase, (ratio, _) in effects.items())
        and not loses
    ):
        verdict = BROKEN
    if n == best and verdict in (BROKEN, LOOK):  # caused by other programs, or a choice
        verdict = FINE if is_busy else LOOK
    if n > best and verdict in (FINE, UNKNOWN):
        verdict = LOOK
    told = ", ".join(
        f"{phase} {digits(r.estimate)}x as fast ({digits(r.low)}-{digits(r.high)})"
        for phase, (r, _) in effects.items()
    )
    words = f"With {other} instead of {n}: {told or 'not tried, because runs take too long here or memory is short'}."
    command = f"lab measure --threads {other}" if verdict in (BROKEN, LOOK) else None
    return Check("threads", f"{n}; {best} by default", verdict, words, command)


def _threads(
    worker: Worker, plan: Plan, given: dict[str, Any], best: int, watch: ShowStatus
) -> tuple[list[Record], Check]:
    """Try another number of threads side by side with the given one. Returns the runs as it is, and the check."""
    if plan.refused:
        raise LabError(
            " ".join(plan.refused.values()), "Take a smaller model, or end other programs."
        )
    engine = WarmEngine(plan, worker, Reporter(watch, [], plan.n_tokens))
    case = Case(LENGTHS[-1], 4)
    engine.load()
    engine.open(plan.cases)
    run = [engine.run(case, repeat, warmup=True) for repeat in range(2)][-1]
    first = Record("doctor", plan.machine, engine.model, engine.settings, run)
    token_s = (phases.tpot_ns(run) or 0) / 1e9
    prompt_s = (phases.prefill_ns(run) or 0) / case.n_prompt / 1e9
    fits = (Case(n, N_GEN) for n in LENGTHS if n * prompt_s + N_GEN * token_s <= RUN_S)
    is_short = case.n_prompt * prompt_s + case.n_gen * token_s <= MOST_RUN_S
    case, is_short = next(((one, True) for one in fits), (case, is_short))
    has_room = 2 * plan.memory(plan.cases[0]).total_bytes < machine.memory_available()
    worker.restart()  # without the model
    n = max(plan.settings.n_threads, plan.settings.n_threads_batch)
    other = best if n != best else max(1, best // 2)
    if plan.settings.n_gpu_layers > (plan.model.n_layer or 10_000) or other == n:
        return [first], Check("threads", f"{n}; {best} by default", FINE)
    if not (is_short and has_room):
        return [first], of_threads({}, n, other, best, False)
    sides = {AS_IT_IS: given, OTHER: {**given, "threads": other, "threads_batch": other}}
    plans = {
        name: make_plan(worker, [case.n_prompt], case.n_gen, N_BLOCKS * N_TURNS, **side)
        for name, side in sides.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        done = list(
            side_by_side.execute(plans, N_BLOCKS, Path(folder) / "doctor.jsonl", watch, Worker)
        )
    timed = [record for record in done if not record.run.warmup]
    effects = {}  # the speed-up of both phases, and the largest ratio of two equal runs of a block
    for phase, figure in (("prefill", phases.prefill_ns), ("decode", phases.tpot_ns)):
        known = [(one.run, value) for one in timed if (value := figure(one.run))]
        base, changed = (
            [value for run, value in known if run.variant == side] for side in (AS_IT_IS, OTHER)
        )
        blocks = grouped(known, lambda one: (one[0].variant, one[0].block))
        if len(base) == len(changed) and (ratio := stats.paired_ratio(changed, base)):
            effects[phase] = (
                ratio,
                max(max(v for _, v in one) / min(v for _, v in one) for one in blocks.values()),
            )
    runs = [record for record in timed if record.run.variant == AS_IT_IS]
    return runs, of_threads(effects, n, other, best, bool(_others(timed)))


def _others(records: Sequence[Record]) -> list[str]:
    """Sentences on the CPU time that other programs and the host took during these runs."""
    own = [disturbances.disturbances(record) for record in records]
    causes = (disturbances.OTHERS, disturbances.STEAL)
    amounts = {cause: [amounts[cause] for amounts in own if cause in amounts] for cause in causes}
    return [disturbances.sentence(cause, max(known)) for cause, known in amounts.items() if known]


def swap_used() -> int:
    import psutil

    return int(psutil.swap_memory().used)


def power_savers(root: Path) -> list[str] | None:
    """The power-saving settings that lower the CPU's clock, in words; None if Linux has no files about them."""
    found = dict[str, None]()
    cpus = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    for cpu in cpus:
        names = ("scaling_driver", "scaling_governor", "energy_performance_preference")
        driver, governor, preference = (system_text(cpu / name).strip() for name in names)
        found |= (
            {"the governor is powersave": None}
            if governor == "powersave" and driver not in OWN_GOVERNOR
            else {}
        )
        found |= {"the energy preference is power": None} if preference == "power" else {}
    return list(found) if cpus else None


def gpus(root: Path) -> list[str]:
    """The system's GPUs that llama.cpp has a backend for, such as `NVIDIA 10de:2684`."""
    if sys.platform == "darwin":
        return ["Apple GPU"] if platform.machine() == "arm64" else []
    names = ("class", "vendor", "device")
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    read = ((system_text(device / name).strip() for name in names) for device in devices)
    return [
        f"{VENDORS[vendor]} {vendor[2:]}:{number[2:]}"
        for kind, vendor, number in read
        if kind.startswith("0x03") and vendor in VENDORS
    ]


@click.command("machine", cls=Command)
@LIB
@as_json_option(help="Everything that is known, as one JSON document.")
def show_machine(lib: str | None, as_json: bool) -> None:
    """Show this machine, the llama.cpp build and its devices.

    \b
      lab machine
      lab machine --lib FOLDER  # of another build

    If the machine has readable energy counters (RAPL of the CPU, NVML of NVIDIA GPUs), measurements show joules per
    token.
    """
    from lab.runner import noise_watch
    from lab.show import console, text_plan

    with Worker() as worker:
        worker.use(builds.folder_of(lib))
        build = builds.of_worker(worker)
    here = machine.describe(build, builds.name_of(lib))
    counters = noise_watch.describe_energy(noise_watch.energy_counters(noise_watch.GpuWatch([])))
    if as_json:
        console.print_json({**dataclasses.asdict(here), "energy": counters})
        return
    for line in text_plan.describe(here):
        click.echo(line)
    for device in here.devices:
        memory = f", {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else ""
        click.echo(
            f"device   {device.name}: {machine.describe_device(device)} ({device.type}{memory})"
        )
    click.echo(f"cores    {here.n_cores_physical} physical, {here.n_cores_usable} usable")
    click.echo(f"energy   {counters}")
    click.echo(f"python   {here.python}")
    click.echo(f"flags    {here.system_info}")


@click.command(cls=Command, first=("model", "threads", "n-gpu-layers", "flash-attn", "lib"))
@with_options(MODEL, *ENGINE)
@as_json_option(help="One JSON document on stdout, for bug reports.")
def doctor(as_json: bool, **asked: Any) -> None:
    """Find out why the lab fails or is slow.

    \b
      lab doctor                            # half a minute
      lab doctor -t 8                       # are 8 threads right?

    Checks whether the build loads and the model runs (and which setting avoids a crash), whether the number of threads
    is right, and whether the machine is throttled, on battery, busy or short of memory. Each check has a figure and a
    verdict. The threads are "broken" only if another number was measured to be faster, alternately. What the lab only
    reads from the system is "worth a look" at most.

    Keep the machine quiet during the checks. The exit status is 1 if something is broken.
    """
    from lab.show import console, text_plan
    from lab.show.section import Section, print_section

    with console.progress(console.console(stderr=True), None, str) as (watch, _):
        found = examine(asked, watch)
    n_broken = sum(check.verdict == BROKEN for check in found.checks)
    out = console.console()
    if as_json:
        console.print_json(dataclasses.asdict(found))
    else:
        for line in text_plan.describe(found.machine, found.model):
            out.print(line)
        out.print()
        cells = [[check.name, check.figure or "-", check.verdict] for check in found.checks]
        print_section(
            Section(headings=["name", "figure", "verdict"], cells=cells, rows=found.checks), out
        )
        for check in sorted(found.checks, key=lambda check: check.verdict != BROKEN):
            if check.verdict in (BROKEN, LOOK):
                out.print(f"\n{check.name} ({check.verdict}): {check.words}")
                if check.command:
                    out.print(f"    {check.command}")
        out.print(f"\n{len(found.checks)} checks in {found.seconds:.0f} s, {n_broken} broken.")
    if n_broken:
        sys.exit(EXIT_FAILED)
