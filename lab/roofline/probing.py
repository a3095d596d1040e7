"""Ceilings: the best rates of llama.cpp's own kernels on this machine: which are measured, how, and what is known.

A roof has two parts: the rate of reading weights (one column: a decode step) and of multiplying them (many columns: a
prefill step). Each type of weights has its own kernel, so the lab measures a ceiling for each type that a model uses,
in the shape that holds most of its bytes at many sizes of step (a second shape with a large share of them only at the
smallest and the largest), and in the buffer of its weights. Attention is probed over short and long contexts: query
heads that share a key find it in a cache at some lengths, and read it from memory one by one at others. A plain read of
memory without a kernel shows whether the kernel or the memory is slow. Probes of the same weights follow one another:
the engine fills them once. The best pass of several rounds counts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.core import cost, results, shape, shown
from lab.core.lists import plural
from lab.core.memory import layers as rule, shares
from lab.core.record import Ceilings, Device, Machine, Model, Placement, Rate, Record, Settings
from lab.core.shape import BLOCKS, EMBEDDING, EXPERTS, OUTPUT, Matrix
from lab.errors import LabError
from lab.models import catalog
from lab.models.obtain import find
from lab.process.wire import (
    ATTENTION,
    DOWNLOAD,
    MUL_MAT,
    MUL_MAT_ID,
    PLAIN_ATTENTION,
    UPLOAD,
    Probe,
)
from lab.process.worker import Worker
from lab.runner import machine, noise_watch, progress
from lab.runner.cases import utc_now
from lab.runner.machine import system_text
from lab.runner.plan import make_plan
from lab.runner.progress import KERNEL, ShowStatus, Status, duration
from lab.show import disturbances

Say = Callable[[str], None]
CPU = "CPU"  # what llama.cpp calls the device whose name is None here


@dataclass(frozen=True)
class Where:
    """What ceilings are measured of: a machine with its build, devices by name, and `repack` as in Settings."""

    machine: Machine
    devices: tuple[str | None, ...] = (None,)
    repack: bool | None = None


def layers(
    here: Machine, model: Model, settings: Settings, placement: Placement | None = None
) -> tuple[str | None, ...]:
    """The device of each layer, the output last; None is the CPU."""
    n_layer = model.n_layer or 0
    devices = machine.used(here, settings)
    if placement is not None and len(placement.layers) == n_layer + 1:
        return tuple(None if name == CPU else name for name in placement.layers)
    if not devices:
        return (None,) * (n_layer + 1)
    names = tuple(one.name for one in devices)
    split = shares({one.name: one.memory_bytes for one in devices if one.memory_bytes}, names)
    return tuple(
        None if i is None else names[i] for i in rule(n_layer, settings.n_gpu_layers, split)
    )


def layers_of(record: Record) -> tuple[str | None, ...]:
    """`layers`, of a run."""
    return layers(record.machine, record.model, record.settings, record.run.placement)


def place_of(
    here: Machine, model: Model, settings: Settings, placement: Placement | None = None
) -> Where:
    """Where some settings run a model: all devices whose kernels its steps need, that of most layers first."""
    counts = collections.Counter(layers(here, model, settings, placement))
    ordered = [name for name, _ in counts.most_common()]
    if (settings.kv_offload is False or settings.n_cpu_moe) and None not in ordered:
        ordered.append(None)
    return Where(here, tuple(ordered), settings.repack)


def place_of_record(record: Record) -> Where:
    """Where a run was made."""
    return place_of(record.machine, record.model, record.settings, record.run.placement)


def device_of(here: Machine, name: str | None) -> Device | None:
    """The description of a device; None for the CPU, and for one that the machine does not have."""
    return next((one for one in machine.accelerators(here.devices) if one.name == name), None)


def device_label(here: Machine, name: str | None) -> str:
    """The device that ceilings are of, in words."""
    known = device_of(here, name)
    return machine.named(here, () if known is None else (known,))


def each_device(ceilings: Ceilings) -> tuple[Ceilings, ...]:
    """The ceilings of the first device, then those of the others."""
    return ceilings, *(ceilings.others or ())


def same_machine(one: Machine, other: Machine) -> bool:
    """Whether two descriptions are of one machine and build."""
    fields = (
        "cpu",
        "n_cores_usable",
        "ram_bytes",
        "llama_cpp_python",
        "llama_cpp_commit",
        "system_info",
        "lib",
    )
    own, others = (
        [device.description for device in machine.accelerators(here.devices)]
        for here in (one, other)
    )
    return own == others and all(getattr(one, name) == getattr(other, name) for name in fields)


def hold_for(ceilings: Ceilings, where: Where) -> bool:
    """Whether ceilings were measured there: on the same machine and build, kinds of devices, and layout of weights."""

    def kinds(here: Machine, names: Sequence[str | None]) -> set[str | None]:
        return {device.description if (device := device_of(here, name)) else name for name in names}

    every = each_device(ceilings)
    own = kinds(ceilings.machine, [one.device for one in every])
    is_alike = all(one.on_gpu or (one.repack is False) == (where.repack is False) for one in every)
    return (
        is_alike
        and own == kinds(where.machine, where.devices)
        and same_machine(ceilings.machine, where.machine)
    )


COLUMNS = (1, 2, 4, 8, 32, 128)  # batch sizes between decode and prefill; a full ubatch is added
SECONDS = 0.2  # of repetitions of a probe in a round, at most
ROUNDS = 2
MOST_EXTRA_ROUNDS = 1  # every probe is run in each; further ones while the machine is disturbed
MIN_SHARE = 0.01  # of the bytes of a decode step: types with less are not probed
SECOND_SHARE = 0.2  # of the bytes of a type: from this share on a second shape is probed
MOST_ROWS = 16_384
MOST_OUTPUTS = 8  # of a matrix, and tokens for an output matrix: a pass does not take seconds
DECODE_LENGTHS = (512, 4096, 32768)
PREFILL_LENGTHS = (512, 4096)  # positions of attention: one token, a full ubatch
UNPACKED = (
    "F16",
    "BF16",
    "F32",
)  # caches without flash attention: llama.cpp wants it for a packed cache of values
COPIES = (
    16 * 2**10,
    64 * 2**20,
)  # bytes: one shows what any copy to a device takes, one what a byte takes
MANY = 4
MIDDLE = 1
FEW = 0.25  # times the last-level cache of a pass: where memory traffic matters, less, not at all
DEFAULT_CACHE = (
    64 * 2**20
)  # bytes, where the system does not tell: L2 caches of today's GPUs hold 4 to 96 MB
LEAST_PASS = 64 * 2**20
MOST_PASS = 2 * 2**30  # bytes of a pass
MOST_LAYER = 2**30  # bytes of a layer's cache: longer contexts are not probed
READ = "read"
BIG = 256 * 2**20  # a plain read in ceilings, and the smallest number of bytes that it goes through
EACH_S = 0.5
SURE = 20  # seconds of a probe, about: the forecast trusts them as much as SURE measured probes

THREAD_FLOPS = 2e9
"""FLOPs of a thread in a pass on the CPU, at most about: where arithmetic is the limit, a pass need not go through much
memory."""


def ceilings(
    model: str = catalog.DEFAULT,
    types: Sequence[str] = ("Q4_0", "Q8_0"),
    *,
    out: str | Path = "results",
    **asked: Any,
) -> Ceilings:
    """This machine's ceilings for a model (a SPEC), measured if unknown, and kept in `out`.

        best = lab.ceilings("smollm2-135m", types=["Q8_0"], threads=2)

    `types` are measured besides the model's own; `asked` are settings such as threads or device. The ceilings
    are those of the device with most layers; `others` are those of the further devices that the settings use.
    """
    show = progress.notebook_line()

    def watch(status: Status) -> None:
        show(f"{status.words}; {duration(status.left_s or 0)} left")

    best = measure(model, types, Path(out), show, watch, warnings.warn, False, watch=None, **asked)
    show(
        f"The speeds of {len(best.rates)} basic operations (kernels) were measured at {best.measured_at}"
    )
    return best


def measure(
    model: str,
    types: Sequence[str],
    out: Path,
    say: Say,
    tell: ShowStatus,
    warn: Say,
    again: bool,
    **asked: Any,
) -> Ceilings:
    """Measure the probes of a model that `out` does not answer (with `again` all), and return all its ceilings."""
    from lab.show import text_setup

    with Worker() as worker:
        shape = find(worker, model)
        plan = make_plan(worker, [1], 1, 1, **asked)
        for line in text_setup.describe(plan.machine, shape):
            say(line)
        where = place_of(plan.machine, shape, plan.settings)
        todo = unknown(shape, plan.settings, types, where, [] if again else kept(out, warn))
        say(
            f"{plural(len(todo), 'kernel')} to measure in {ROUNDS} rounds: about {duration(expected_s(todo))}, longer "
            "if other programs use the cores. Ctrl-C keeps the measured kernels."
            if todo
            else "All kernels are measured already."
        )
        try:
            return obtain(worker, where, todo, tell, warn, out)
        except KeyboardInterrupt:
            left = unknown(shape, plan.settings, types, where, kept(out, lambda text: None))
            state = (
                f"{len(left)} of {len(todo)} kernels are missing. The same command measures them."
            )
            say(f"\nInterrupted. Finished measurements are kept in {out}. {state}")
            raise


def probes(
    model: Model, settings: Settings, types: Sequence[str] = (), device: str | None = None
) -> list[Probe]:
    """What to measure for a model on a device: its weight types (and `types`) by columns, attention, and copies."""
    known = shape.matrices(model)
    layers = shape.heads(model)
    if known is None or layers is None:
        reason = f" ({model.uncounted})" if model.uncounted else ""
        raise LabError(
            f"The kernels of {model.name} cannot be derived from its header{reason}.",
            "Use another model.",
        )
    chosen = _shapes(model)
    in_layers = {m.type for group in chosen for m in group if m.part not in (OUTPUT, EMBEDDING)}
    chosen += [
        [matrix]
        for kind in types
        if kind not in in_layers
        for matrix in _shapes_for(model, known, kind)
    ]
    if device is not None:
        settings = dataclasses.replace(settings, n_threads=1, n_threads_batch=1)
    wanted = list[Probe]()
    repack = settings.repack if device is None else None
    for matrices in chosen:
        for matrix in matrices:
            columns = (
                (*COLUMNS, settings.n_ubatch) if matrix is matrices[0] else (1, settings.n_ubatch)
            )
            is_small = matrix.part not in (
                OUTPUT,
                EMBEDDING,
            )  # the output matrix works for few tokens only
            experts: dict[str, Any] = {
                "n_expert": matrix.n_expert,
                "n_expert_used": model.n_expert_used,
            }
            more, op = (experts, MUL_MAT_ID) if matrix.part == EXPERTS else ({}, MUL_MAT)
            for n in (n for n in sorted({*columns}) if n <= MOST_OUTPUTS or is_small):
                n_bytes = pass_bytes(MANY if n <= 8 else MIDDLE if n <= 32 else FEW, device)
                n_threads = settings.n_threads if n == 1 else settings.n_threads_batch
                if device is None:
                    block_weights, block_bytes = BLOCKS[matrix.type]
                    n_bytes = min(
                        n_bytes,
                        round(THREAD_FLOPS * n_threads / (2 * n) * block_bytes / block_weights),
                    )
                size = (
                    min(matrix.rows, MOST_ROWS),
                    matrix.columns,
                    None,
                    n,
                    n_bytes,
                    n_threads,
                    device,
                    SECONDS,
                )
                wanted.append(Probe(op, matrix.type, *size, repack=repack, **more))
    wanted += _attention(model, settings, max(layers, key=lambda part: part.n_layer), device)
    if device is not None:
        both = [(op, n) for op in (UPLOAD, DOWNLOAD) for n in COPIES]
        wanted += [Probe(op, "F32", 1, n // 4, None, 1, n, 1, device, SECONDS) for op, n in both]
    return list(dict.fromkeys(wanted))


def used_types(model: Model) -> list[str]:
    """The types of matrices that hold at least MIN_SHARE of what a decode step reads, the largest first."""
    read = collections.Counter[str]()
    for product in cost.products(model, 1, 1) or []:
        read[product.matrix.type] += product.n_bytes  # type: ignore[assignment]
    return [kind for kind, n_bytes in read.most_common() if n_bytes >= MIN_SHARE * read.total()]


def _shapes(model: Model) -> list[list[Matrix]]:
    """Of each used type the shape that a decode step reads most of; then the second, and experts, where they matter."""
    read = collections.Counter[tuple[object, ...]]()
    matrices = dict[tuple[object, ...], Matrix]()
    for product in cost.products(model, 1, 1) or []:
        matrix = product.matrix
        shape_of = matrix.type, matrix.part == EXPERTS, matrix.rows, matrix.columns, matrix.n_expert
        read[shape_of] += product.n_bytes  # type: ignore[assignment]
        matrices.setdefault(shape_of, matrix)
    chosen = []
    for kind in used_types(model):
        ordered = [one for one, _ in read.most_common() if one[0] == kind]
        total = sum(read[one] for one in ordered)
        kept = [one for one in ordered[:2] if read[one] >= SECOND_SHARE * total] or ordered[:1]
        for is_expert in {True, False} - {one[1] for one in kept}:  # each has a kernel of its own
            kept += [one for one in ordered if one[1] == is_expert][:1]
        chosen.append([matrices[one] for one in kept])
    return chosen


def _shapes_for(model: Model, known: Sequence[Matrix], kind: str) -> list[Matrix]:
    """The model's largest matrix of its layers (and of its experts) that could be packed in a type, or a LabError."""
    if kind not in BLOCKS or kind == "F32":
        raise LabError(
            f"{kind} is not a weight type that the lab can probe.", f"Known: {', '.join(BLOCKS)}."
        )
    fitting = [
        m for m in known if m.part not in (OUTPUT, EMBEDDING) and m.columns % BLOCKS[kind][0] == 0
    ]
    groups = ([m for m in fitting if (m.part == EXPERTS) == experts] for experts in (True, False))
    largest = [max(group, key=lambda m: m.n_weights) for group in groups if group]
    if not largest:
        what = f"{kind} packs {BLOCKS[kind][0]} weights together; no matrix of {model.name} is wide enough."
        raise LabError(what, "Leave the type out, or use another model: -m MODEL")
    return [dataclasses.replace(m, type=kind) for m in largest]


def _attention(
    model: Model, settings: Settings, heads: shape.Heads, device: str | None
) -> list[Probe]:
    """Attention of one token and of a full ubatch, over several lengths, with the heads of most layers."""
    head_dim = model.head_dim or 0
    kind = settings.type_k.upper()
    n_weights, n_bytes = BLOCKS.get(kind, (1, 4))
    is_plain = (
        settings.flash_attn == "off" and kind in UNPACKED and settings.type_k == settings.type_v
    )
    wanted = []
    for n_positions in DECODE_LENGTHS:
        layer_bytes = n_positions * 2 * heads.n_head_kv * head_dim * n_bytes // n_weights
        is_large = n_positions > DECODE_LENGTHS[0] and layer_bytes > MOST_LAYER
        for n, n_threads in (
            (1, settings.n_threads),
            (settings.n_ubatch, settings.n_threads_batch),
        ):
            if is_large or (n > 1 and n_positions not in PREFILL_LENGTHS):
                continue
            if is_plain and 8 * heads.n_head * n * n_positions > MOST_PASS:
                continue
            size = (
                heads.n_head,
                head_dim,
                heads.n_head_kv,
                n,
                pass_bytes(MANY, device) if n == 1 else 1,
            )
            op = PLAIN_ATTENTION if is_plain else ATTENTION
            wanted.append(Probe(op, kind, *size, n_threads, device, SECONDS, n_positions))
    return wanted


def pass_bytes(times: float, device: str | None = None) -> int:
    """Bytes that a pass goes through: `times` the device's last-level cache, within limits."""
    size = last_level_cache() if device is None else DEFAULT_CACHE
    return max(round(LEAST_PASS * times / MANY), min(MOST_PASS, round(times * size)))


@cache
def last_level_cache() -> int:
    """Bytes of this machine's last-level caches, all of them; DEFAULT_CACHE where the system does not tell."""
    sizes = dict[tuple[int, str], int]()  # by level and the cores that share it
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, size, shared = (
            system_text(index / name).strip() for name in ("level", "size", "shared_cpu_list")
        )
        if level.isdecimal() and re.fullmatch("[0-9]+[KMG]", size):
            sizes[int(level), shared] = int(size[:-1]) * 2 ** (10 + 10 * "KMG".index(size[-1]))
    last = max((level for level, _ in sizes), default=0)
    return sum(n_bytes for (level, _), n_bytes in sizes.items() if level == last) or DEFAULT_CACHE


def read_rate(n_threads: int, n_bytes: int | None = None) -> Rate:
    """How fast memory can be read without any kernel: the maximum of numbers (a random MiB, repeated), a slice each."""
    import numpy as np

    n_bytes = n_bytes or max(BIG, pass_bytes(MANY))
    data = np.resize(np.random.default_rng(1).integers(0, 2**62, 2**17), n_bytes // 8)
    slices = np.array_split(data, n_threads)
    times = []
    with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
        for _ in range(8):
            start = time.perf_counter_ns()
            list(pool.map(np.max, slices))
            times.append(time.perf_counter_ns() - start)
    return Rate(READ, "I64", "numpy", 1, n_bytes // 8, 1, n_threads, n_bytes, 0, tuple(times[1:]))


def expected_s(todo: Sequence[Probe]) -> float:
    """The estimated seconds of these probes in all rounds, on a quiet machine."""
    return EACH_S * ROUNDS * len(todo)


def unknown(
    model: Model, settings: Settings, types: Sequence[str], where: Where, given: Sequence[Ceilings]
) -> list[Probe]:
    """The probes of a model, on every device of `where`, that `given` ceilings do not answer. LabError for two GPUs."""
    _check_one_gpu(where)
    of_device = {
        name: known(given, dataclasses.replace(where, devices=(name,))) for name in where.devices
    }
    return [
        one
        for name, best in of_device.items()
        for one in missing(probes(model, settings, types, name), best)
    ]


def _check_one_gpu(where: Where) -> None:
    names = [name for name in where.devices if name is not None]
    if len(names) > 1:
        raise LabError(
            f"Ceilings, explanations and predictions are for one GPU, with or without layers on the CPU, not for "
            f"{' and '.join(names)}.",
            f"Choose one: --device {names[0]}",
        )


def obtain(
    worker: Worker, where: Where, todo: Sequence[Probe], watch: ShowStatus, warn: Say, folder: Path
) -> Ceilings:
    """Measure these probes (those that are `unknown`), keep them in `folder`, and return all ceilings of `where`.

    Every probe is run once in each of ROUNDS rounds, so that a bad moment spoils none of them; while a round was
    disturbed, another follows, at most MOST_EXTRA_ROUNDS. `watch` is told before each probe which it is, how long all
    of them will still take, and what disturbs this round; `warn` what disturbed the last round. Whole kernels are kept,
    whatever happens to the others.
    """
    started = time.monotonic()
    n_done = 0
    n_all = ROUNDS * len(todo)
    for name in dict.fromkeys(probe.device for probe in todo):
        own = [probe for probe in todo if probe.device == name]
        words = ""
        passes = collections.defaultdict[tuple[object, ...], list[Rate]](list)
        n_threads = max(probe.n_threads for probe in own)
        n_free = max(0.0, (machine.cores(where.machine) or n_threads) - n_threads)
        try:
            for round_number in range(ROUNDS + MOST_EXTRA_ROUNDS):
                n_all += len(own) if round_number >= ROUNDS else 0
                noisy = noise_watch.NoiseWatch(worker.pid)
                for probe in own:
                    elapsed_s = time.monotonic() - started
                    left_s = (n_all - n_done) * (elapsed_s + SURE * EACH_S) / (n_done + SURE)
                    slower = f" (slower: {words})" if words else ""
                    doing = f"{KERNEL} {n_done + 1} of {n_all}: {_describe(probe)}{slower}"
                    watch(Status(doing, left_s=left_s))
                    rate = worker.probe(probe)
                    n_done = n_done + 1
                    passes[key(rate)].append(rate)
                    words = disturbances.during(noisy.finish(), n_free)
                if name is None:
                    rate = read_rate(n_threads)
                    passes[key(rate)].append(rate)
                if round_number + 1 >= ROUNDS and not words:
                    break
        finally:
            cut = {
                _kernel(probe) for probe in own if key(probe) not in passes
            }  # nothing lies between their sizes
            whole = tuple(
                dataclasses.replace(
                    rates[0], times_ns=tuple(ns for rate in rates for ns in rate.times_ns)
                )
                for rates in passes.values()
                if _kernel(rates[0]) not in cut
            )
            if whole:
                repack = where.repack if name is None else None
                more: dict[str, Any] = {
                    "device": name,
                    "repack": repack,
                    "disturbed": words or None,
                }
                save(Ceilings(utc_now(), where.machine, name is not None, whole, **more), folder)
        if words:
            warn(
                f"While the ceilings of {name or CPU} were measured, {words}, in each of {ROUNDS + MOST_EXTRA_ROUNDS} "
                "rounds. Some can be too low. Measure again: --again"
            )
    best = known(kept(folder, lambda sentence: None), where)
    assert best is not None
    return best


def _describe(probe: Probe) -> str:
    over = f" over {probe.n_positions:,} positions" if probe.n_positions else ""
    size = (
        f"{probe.n_bytes:,} bytes"
        if probe.op in (UPLOAD, DOWNLOAD)
        else plural(probe.n_tokens, "column")
    )
    on = plural(probe.n_threads, "thread") if probe.device is None else probe.device
    return f"{probe.op.replace('_', ' ')}{over}, {probe.type}, {size}, {on}"


def save(ceilings: Ceilings, folder: Path) -> Path:
    """Append to this machine's file of ceilings in `folder`."""
    named = device_label(ceilings.machine, ceilings.device).partition(",")[0]
    path = folder / f"ceilings-{machine.slug(named)}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.save(path, ceilings)
    except OSError as problem:
        raise LabError(
            f"{path} cannot be written: {problem.strerror}.", "Choose another folder: --out"
        ) from None
    return path


def kept(folder: Path, warn: Say = warnings.warn) -> list[Ceilings]:
    """All ceilings that are kept in a folder; `warn` is called with a sentence for each line that cannot be read."""
    paths = (
        sorted(path for path in folder.glob("ceilings-*.jsonl") if path.is_file())
        if folder.is_dir()
        else []
    )
    if not paths:
        return []
    contents = results.read(paths)
    for sentence in contents.skipped:
        warn(sentence)
    return list(contents.ceilings)


def known(given: Sequence[Ceilings], where: Where) -> Ceilings | None:
    """What was measured there with this build, of `given` the best of each probe; None where something is missing."""
    found = list[Ceilings]()
    for name in where.devices:
        place = dataclasses.replace(where, devices=(name,))
        fitting = [
            dataclasses.replace(old, others=None)
            for old in given
            if old.on_gpu == (name is not None)
        ]
        fitting = sorted(
            (old for old in fitting if hold_for(old, place)), key=lambda old: old.measured_at
        )
        if not fitting or sum(one is not None for one in where.devices) > 1:
            return None
        best: dict[tuple[object, ...], Rate] = {}
        for rate in (rate for old in fitting for rate in old.rates):
            if key(rate) not in best or gbps(rate) > gbps(
                best[key(rate)]
            ):  # a bad moment does not lower a ceiling
                best[key(rate)] = rate
        quiet = {key(rate) for old in fitting if not old.disturbed for rate in old.rates}
        words = [
            None,
            *(
                old.disturbed
                for old in fitting
                if any(key(rate) not in quiet for rate in old.rates)
            ),
        ]
        newest = dataclasses.replace(
            fitting[-1], machine=where.machine, device=name, rates=tuple(best.values())
        )
        found.append(dataclasses.replace(newest, disturbed=words[-1]))
    return dataclasses.replace(found[0], others=tuple(found[1:]) or None)


def doubts(ceilings: Ceilings) -> tuple[str, ...]:
    """The doubts of everything that is made of ceilings (core/shown.py)."""
    return (shown.LOADED,) if any(one.disturbed for one in each_device(ceilings)) else ()


def doubt_words(ceilings: Ceilings) -> list[str]:
    """Sentences on these doubts, and what to do."""
    return [
        f"While the ceilings of {one.device or CPU} were measured, {one.disturbed}. Some can be too low, so the lab "
        "names no limits or gains. Measure again while no other program runs: lab ceilings --again"
        for one in each_device(ceilings)
        if one.disturbed
    ]


def need(given: Sequence[Ceilings], where: Where, what: str) -> Ceilings:
    """`known`, or a LabError that says what there is instead."""
    _check_one_gpu(where)
    if best := known(given, where):
        return best
    name = next(
        name
        for name in where.devices
        if known(given, dataclasses.replace(where, devices=(name,))) is None
    )
    on = (
        f"{name or CPU} ({device_label(where.machine, name)}), for {what}"
        if len(where.devices) > 1
        else what
    )
    others = [old for old in given if old.on_gpu == (name is not None)]
    is_plain = name is None and where.repack is False
    lacking = f"The ceilings of {on}{' without repacking' * is_plain} have not been measured."
    if others and not is_plain:
        other = device_label(others[-1].machine, others[-1].device)
        commit = others[-1].machine.llama_cpp_commit
        lacking = f"The known ceilings are of another machine or build ({other}, llama.cpp {commit}), not of {on}."
    hint = "Measure them on that machine, with the settings of the runs: lab ceilings"
    raise LabError(lacking, hint + " --no-repack" * is_plain)


def lines(ceilings: Ceilings | None) -> list[Ceilings]:
    """Ceilings as lines of a file, one for each device."""
    if ceilings is None:
        return []
    return [dataclasses.replace(one, others=None) for one in each_device(ceilings)]


def missing(wanted: Sequence[Probe], ceilings: Ceilings | None) -> list[Probe]:
    """The probes that are not in `ceilings` yet."""
    have = {key(rate) for rate in ceilings.rates} if ceilings else set()
    return [probe for probe in wanted if key(probe) not in have]


def key(what: Probe | Rate) -> tuple[object, ...]:
    """What makes two probes the same measurement."""
    size = (
        what.rows,
        what.columns,
        what.n_head_kv,
        what.n_positions,
        what.n_expert,
        what.n_expert_used,
    )
    return what.op, what.type, *size, what.n_tokens, what.n_threads


def _kernel(what: Probe | Rate) -> tuple[object, ...]:
    """What probes of one kernel share, at all sizes of step and of context."""
    return what.op, what.type, what.rows, what.columns, what.n_head_kv, what.n_expert


def gbps(rate: Rate) -> float:
    """10^9 bytes per second that the best pass read."""
    return rate.n_bytes / min(rate.times_ns)


def gflops(rate: Rate) -> float:
    """10^9 FLOPs per second that the best pass computed."""
    return rate.flops / min(rate.times_ns)
