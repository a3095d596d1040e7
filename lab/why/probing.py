"""What this machine can do at best: the rates of llama.cpp's own kernels, measured one by one.

A roof has two parts: how fast weights can be read (one column: a decode step) and how fast they can be
multiplied (many columns: a prefill step). Both depend on the weights' type, because each type has a kernel of
its own; so a ceiling is measured for each type that a model uses, in the shapes it has there (probe_plan.py), in the
buffer its weights get. A plain read of memory, without any kernel, tells how much of a slow rate is the kernel's
doing. The best pass of several rounds counts: a ceiling is what the machine can do, not what it did in a bad moment.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.analysis import disturbances
from lab.core import results
from lab.core.record import Ceilings, Machine, Model, Rate
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.process.wire import ATTENTION, MUL_MAT_ID, Probe
from lab.process.worker import Worker
from lab.runner import machine, noise_watch, notebook
from lab.runner.plan import Plan, make_plan
from lab.runner.warm_engine import utc_now
from lab.why.probe_plan import MANY, pass_bytes, probes

__all__ = ["probes"]  # others look for it here

READ = "read"

ROUNDS, MOST_EXTRA_ROUNDS = 2, 3
"""Every probe is run in so many rounds; while the machine is disturbed, so many more."""

BIG = 256 * 2**20
"""Bytes of which memory is read plainly, at least."""


def ceilings(
    model: str = catalog.DEFAULT, types: Sequence[str] = ("Q4_0", "Q8_0"), *, out: str | Path = "results", **asked: Any
) -> Ceilings:
    """This machine's ceilings for a model (a SPEC), measured where they are not known; kept in `out`.

        best = lab.ceilings("smollm2-135m", types=["Q8_0"], threads=2)

    `types` are measured besides the model's own; `asked` are settings of `make_plan`, such as threads.
    """
    show, warned = notebook.line(), list[str]()
    with Worker() as worker:
        shape, plan = shapes.find(worker, model), make_plan(worker, [1], 1, 1, **asked)
        best = obtain(worker, plan, shape, types, show, warned.append, Path(out))
    for sentence in warned:
        warnings.warn(sentence, stacklevel=2)
    show(f"{len(best.rates)} kernels are known, measured {best.measured_at}")
    return best


def obtain(
    worker: Worker,
    plan: Plan,
    model: Model,
    types: Sequence[str],
    watch: Callable[[str], None],
    warn: Callable[[str], None],
    folder: Path,
    again: bool = False,
) -> Ceilings:
    """Measure what `folder` does not know of the plan's machine and settings, keep it there, and return all of it.

    With `again` everything is measured once more. `watch` is told what comes next, `warn` what disturbed it.
    """
    on_gpu = plan.settings.n_gpu_layers > 0
    wanted = probes(model, plan.settings, types)
    todo = missing(wanted, None if again else known(kept(folder, warn), plan.machine, on_gpu))
    if todo and (words := run_probes(worker, plan.machine, todo, on_gpu, watch, folder)):
        warn(
            f"While the ceilings were measured, {words}, in each of {ROUNDS + MOST_EXTRA_ROUNDS} rounds. "
            "Some may be too low: measure once more (--again)."
        )
    best = known(kept(folder, lambda sentence: None), plan.machine, on_gpu)
    assert best is not None
    return best


def run_probes(
    worker: Worker, here: Machine, wanted: Sequence[Probe], on_gpu: bool, watch: Callable[[str], None], folder: Path
) -> str:
    """Run the probes round by round, read memory plainly, and keep it all in `folder`, whatever happens to the last.

    Every probe is run once in each of ROUNDS rounds, so that a bad moment spoils none of them; while a round was
    disturbed, another follows, at most MOST_EXTRA_ROUNDS. Returns what disturbed the last round; "" for nothing.
    """
    rates: dict[tuple[object, ...], Rate] = {}
    n_all, n_done, words = ROUNDS * len(wanted), 0, ""
    n_threads = 1 if on_gpu else max(probe.n_threads for probe in wanted)
    n_free = max(0.0, (machine.cores(here) or n_threads) - n_threads)
    try:
        for round_number in range(ROUNDS + MOST_EXTRA_ROUNDS):
            if round_number >= ROUNDS:
                watch(f"{words}: another round (at most {MOST_EXTRA_ROUNDS} more are made)")
                n_all += len(wanted)
            noisy = noise_watch.NoiseWatch(worker.pid, machine.servers_here(worker.backend.rpc))
            for probe in wanted:
                n_done += 1
                noisy.sample()
                watch(f"{n_done} of {n_all}: {_describe(probe)}")
                _keep(rates, worker.probe(probe))
            if not on_gpu:
                watch("reading memory")
                _keep(rates, read_rate(n_threads))
            words = disturbances.during(noisy.finish(), n_free)
            if round_number + 1 >= ROUNDS and not words:
                break
    finally:
        if rates:
            save(Ceilings(utc_now(), here, on_gpu, tuple(rates.values())), folder)
    return words


def _describe(probe: Probe) -> str:
    what = f"attention over {probe.n_positions:,} positions, " if probe.op == ATTENTION else ""
    what = "experts, " if probe.op == MUL_MAT_ID else what
    return f"{what}{probe.type}, {probe.n_tokens} columns, {probe.n_threads} threads"


def _keep(rates: dict[tuple[object, ...], Rate], rate: Rate) -> None:
    """Add the passes of a further round to those of the same probe."""
    old = rates.get(key(rate))
    rates[key(rate)] = rate if old is None else dataclasses.replace(old, times_ns=old.times_ns + rate.times_ns)


def read_rate(n_threads: int, n_bytes: int | None = None) -> Rate:
    """How fast memory can be read without any kernel: the maximum of random numbers, a slice per thread."""
    import numpy as np

    n_bytes = n_bytes or max(BIG, pass_bytes(MANY, False))
    data = np.random.default_rng(1).integers(0, 2**62, n_bytes // 8)
    slices = np.array_split(data, n_threads)
    times = []
    with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
        for _ in range(8):
            start = time.perf_counter_ns()
            list(pool.map(np.max, slices))
            times.append(time.perf_counter_ns() - start)
    return Rate(READ, "I64", "numpy", 1, n_bytes // 8, 1, n_threads, n_bytes, 0, tuple(times[1:]))


def save(ceilings: Ceilings, folder: Path) -> Path:
    """Append to this machine's file of ceilings in `folder`."""
    where = device_label(ceilings.machine, ceilings.on_gpu).partition(",")[0]
    path = folder / f"ceilings-{machine.slug(where)}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.append(path, ceilings)
    except OSError as problem:
        raise LabError(f"{path} cannot be written: {problem.strerror}.", "Choose another folder: --out") from None
    return path


def kept(folder: Path, warn: Callable[[str], None] = warnings.warn) -> list[Ceilings]:
    """All ceilings that are kept in a folder; `warn` is called with a sentence for each line that cannot be read."""
    paths = sorted(folder.glob("ceilings-*.jsonl")) if folder.is_dir() else []
    if not paths:
        return []
    contents = results.read(paths)
    for sentence in contents.skipped:
        warn(sentence)
    return list(contents.ceilings)


def known(given: Sequence[Ceilings], here: Machine, on_gpu: bool, force: bool = False) -> Ceilings | None:
    """What was measured of this machine and build, of `given` the best of each probe; None where nothing was.

    With `force` the ceilings of any machine will do: those that were measured last.
    """
    given = sorted((old for old in given if old.on_gpu == on_gpu), key=lambda old: old.measured_at)
    fitting = [old for old in given if same(old.machine, here)]
    if force and given and not fitting:
        fitting = [old for old in given if same(old.machine, given[-1].machine)]
    if not fitting:
        return None
    best: dict[tuple[object, ...], Rate] = {}
    for rate in (rate for old in fitting for rate in old.rates):
        if key(rate) not in best or gbps(rate) > gbps(best[key(rate)]):  # a bad moment does not lower a ceiling
            best[key(rate)] = rate
    return Ceilings(fitting[-1].measured_at, fitting[-1].machine, on_gpu, tuple(best.values()))


def need(given: Sequence[Ceilings], here: Machine, on_gpu: bool, force: bool, what: str) -> Ceilings:
    """`known`, or a LabError that says what there is instead."""
    best = known(given, here, on_gpu, force)
    if best is not None:
        return best
    others = [old for old in given if old.on_gpu == on_gpu]
    if others:
        other = others[-1].machine
        raise LabError(
            f"The ceilings that are known are of another machine or build ({device_label(other, on_gpu)}, "
            f"llama.cpp {other.llama_cpp_commit}), not of {what}.",
            "Measure them there: lab ceilings. Or use these all the same: --force",
        )
    raise LabError(f"The ceilings of {what} are not measured.", "Measure them there: lab ceilings")


def device_label(here: Machine, on_gpu: bool) -> str:
    """The device that ceilings are of, in words."""
    return machine.named(here, machine.accelerators(here.devices)[:1] if on_gpu else ())


def same(one: Machine, other: Machine) -> bool:
    """Whether two descriptions are of the same machine with the same build: ceilings then hold for both."""
    fields = ("cpu", "n_cores_usable", "ram_bytes", "llama_cpp_python", "llama_cpp_commit", "system_info", "lib")
    gpus = [[device.description for device in machine.accelerators(described.devices)] for described in (one, other)]
    return gpus[0] == gpus[1] and all(getattr(one, name) == getattr(other, name) for name in fields)


def missing(wanted: Sequence[Probe], ceilings: Ceilings | None) -> list[Probe]:
    """The probes that `ceilings` does not answer yet."""
    have = {key(rate) for rate in ceilings.rates} if ceilings else set()
    return [probe for probe in wanted if key(probe) not in have]


def key(what: Probe | Rate) -> tuple[object, ...]:
    """What makes two probes the same measurement."""
    size = what.rows, what.columns, what.n_head_kv, what.n_positions, what.n_expert, what.n_expert_used
    return what.op, what.type, *size, what.n_tokens, what.n_threads


def gbps(rate: Rate) -> float:
    """10^9 bytes per second that the best pass read."""
    return rate.n_bytes / min(rate.times_ns)


def gflops(rate: Rate) -> float:
    """10^9 FLOPs per second that the best pass computed."""
    return rate.flops / min(rate.times_ns)


def age_days(ceilings: Ceilings) -> float:
    """How old they are."""
    measured = datetime.strptime(ceilings.measured_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return (datetime.now(UTC) - measured).total_seconds() / 86400
