"""What this machine can do at best: the rates of llama.cpp's own kernels, measured one by one.

A roof has two parts: how fast weights can be read (one column: a decode step) and how fast they can be
multiplied (many columns: a prefill step). Both depend on the weights' type, because each type has a kernel of
its own; so a ceiling is measured for each type that a model uses, on its own matrix shape, in the buffer its
weights get. A plain read of memory, without any kernel, tells how much of a slow rate is the kernel's doing.
The best pass counts: a ceiling is what the machine can do, not what it did in a bad moment.
"""

from __future__ import annotations

import concurrent.futures
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.analysis import disturbances
from lab.core import cost, results
from lab.core.record import Ceilings, Machine, Model, Rate, Settings
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.process.wire import ATTENTION, MUL_MAT, Probe
from lab.process.worker import Worker
from lab.runner import machine, noise_watch, notebook
from lab.runner.plan import Plan, make_plan
from lab.runner.warm_engine import utc_now

READ = "read"
COLUMNS = (1, 2, 4, 8, 32, 128)
"""Batch sizes between decode and prefill; a full ubatch is added."""

SECONDS = 0.4
"""How long a probe is repeated."""

MIN_SHARE = 0.01
"""Types that hold less of a model than this are not probed."""

BIG, MIDDLE, SMALL = 256 * 2**20, 64 * 2**20, 16 * 2**20
"""Bytes of distinct weights in a pass: several times the last-level cache where memory traffic can matter."""


def probes(model: Model, settings: Settings, types: Sequence[str] = ()) -> list[Probe]:
    """What to measure for a model: its weight types (and `types`) by columns, attention, and fewer threads.

    LabError where the header does not tell the shape.
    """
    if not (model.n_embd and model.n_ff and model.n_head and model.head_dim):
        raise LabError(f"The shape of {model.name} is not known from its header.", "Take another model.")
    total = sum(model.tensor_bytes.values())
    used = [kind for kind, n_bytes in model.tensor_bytes.items() if n_bytes >= MIN_SHARE * total]
    types = [kind for kind in types if kind not in used]
    on_gpu = settings.n_gpu_layers > 0
    columns = sorted({*COLUMNS, settings.n_ubatch})

    for kind in types:
        if kind not in cost.BLOCKS or kind == "F32":
            raise LabError(f"{kind} is no weight type that the lab knows.", f"Known: {', '.join(cost.BLOCKS)}.")
        if model.n_embd % cost.BLOCKS[kind][0]:
            raise LabError(
                f"{kind} packs {cost.BLOCKS[kind][0]} weights together; {model.name} is {model.n_embd} wide.",
                "Leave the type out, or give a model that fits: -m MODEL",
            )

    def mul_mat(kind: str, n_tokens: int, n_threads: int) -> Probe:
        n_bytes = BIG if n_tokens <= 8 else MIDDLE if n_tokens <= 32 else SMALL
        return Probe(
            MUL_MAT, kind, model.n_ff or 0, model.n_embd or 0, None, n_tokens, n_bytes, n_threads, on_gpu, SECONDS
        )

    def attention(n_tokens: int, n_threads: int) -> Probe:
        n_bytes = BIG if n_tokens == 1 else 4 * 2**20
        heads, kind = model.n_head or 0, settings.type_k.upper()
        return Probe(
            ATTENTION, kind, heads, model.head_dim or 0, model.n_head_kv, n_tokens, n_bytes, n_threads, on_gpu, SECONDS
        )

    found = [
        mul_mat(kind, n, settings.n_threads if n == 1 else settings.n_threads_batch)
        for kind in dict.fromkeys([*used, *types])
        for n in columns
    ]
    found += [attention(1, settings.n_threads), attention(settings.n_ubatch, settings.n_threads_batch)]
    if not on_gpu:
        fewer = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < settings.n_threads]
        for n in fewer:
            for n_tokens in (1, settings.n_ubatch):
                found += [mul_mat(kind, n_tokens, n) for kind in used] + [attention(n_tokens, n)]
    return found


def ceilings(
    model: str = catalog.DEFAULT, types: Sequence[str] = ("Q4_0", "Q8_0"), *, out: str | Path = "results", **asked: Any
) -> Ceilings:
    """This machine's ceilings for a model (a SPEC), measured where they are not known; kept in `out`.

        best = lab.ceilings("smollm2-135m", types=["Q8_0"], threads=2)

    `types` are measured beside the model's own; `asked` are settings of `make_plan`, such as threads.
    """
    tell, said = notebook.line(), list[str]()
    with Worker() as worker:
        shape, plan = shapes.find(worker, model), make_plan(worker, [1], 1, 1, **asked)
        found = obtain(worker, plan, shape, types, tell, said.append, Path(out))
    for sentence in said:
        warnings.warn(sentence, stacklevel=2)
    tell(f"{len(found.rates)} kernels are known, measured {found.measured_at}")
    return found


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
    todo = missing(wanted, None if again else known(kept(folder), plan.machine, on_gpu))
    if todo:
        noisy = noise_watch.NoiseWatch(worker.pid)

        def tell(what: str) -> None:
            noisy.sample()
            watch(what)

        run_probes(worker, plan.machine, todo, on_gpu, tell, folder)
        if words := disturbances.during(noisy.finish()):
            warn(f"While the ceilings were measured, {words}. Some may be too low: measure once more (--again).")
    found = known(kept(folder), plan.machine, on_gpu)
    assert found is not None
    return found


def run_probes(
    worker: Worker, here: Machine, wanted: Sequence[Probe], on_gpu: bool, watch: Callable[[str], None], folder: Path
) -> None:
    """Run the probes, read memory plainly, and keep it all in `folder`, whatever happens to the last of them."""
    rates = []
    try:
        for number, probe in enumerate(wanted, 1):
            what = "attention, " if probe.op == ATTENTION else ""
            watch(f"{number} of {len(wanted)}: {what}{probe.type}, {probe.n_tokens} columns, {probe.n_threads} threads")
            rates.append(worker.probe(probe))
        if not on_gpu:
            watch("reading memory")
            rates.append(read_rate(max(probe.n_threads for probe in wanted)))
    finally:
        if rates:
            save(Ceilings(utc_now(), here, on_gpu, tuple(rates)), folder)


def read_rate(n_threads: int, n_bytes: int = 2 * BIG) -> Rate:
    """How fast memory can be read without any kernel: the maximum of random numbers, a slice per thread."""
    import numpy as np

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
    where = machine.label(ceilings.machine, int(ceilings.on_gpu)).partition(",")[0]
    path = folder / f"ceilings-{machine.slug(where)}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.append(path, ceilings)
    except OSError as problem:
        raise LabError(f"{path} cannot be written: {problem.strerror}.", "Choose another folder: --out") from None
    return path


def kept(folder: Path) -> list[Ceilings]:
    """All ceilings that are kept in a folder."""
    paths = sorted(folder.glob("ceilings-*.jsonl")) if folder.is_dir() else []
    return list(results.read(paths).ceilings) if paths else []


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
    found = known(given, here, on_gpu, force)
    if found is not None:
        return found
    others = [old for old in given if old.on_gpu == on_gpu]
    if others:
        other = others[-1].machine
        raise LabError(
            f"The ceilings that are known are of another machine or build ({machine.label(other, int(on_gpu))}, "
            f"llama.cpp {other.llama_cpp_commit}), not of {what}.",
            "Measure them there: lab ceilings. Or use these all the same: --force",
        )
    raise LabError(f"The ceilings of {what} are not measured.", "Measure them there: lab ceilings")


def same(one: Machine, other: Machine) -> bool:
    """Whether two descriptions are of the same machine with the same build: ceilings then hold for both."""
    fields = ("cpu", "n_cores_usable", "ram_bytes", "llama_cpp_python", "llama_cpp_commit", "system_info")
    gpus = [[device.description for device in machine.accelerators(each.devices)] for each in (one, other)]
    return gpus[0] == gpus[1] and all(getattr(one, name) == getattr(other, name) for name in fields)


def missing(wanted: Sequence[Probe], ceilings: Ceilings | None) -> list[Probe]:
    """The probes that `ceilings` does not answer yet."""
    have = {key(rate) for rate in ceilings.rates} if ceilings else set()
    return [probe for probe in wanted if key(probe) not in have]


def key(what: Probe | Rate) -> tuple[str, str, int, int, int | None, int, int]:
    """What makes two probes the same measurement."""
    return what.op, what.type, what.rows, what.columns, what.n_head_kv, what.n_tokens, what.n_threads


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
