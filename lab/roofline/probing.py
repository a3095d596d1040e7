"""Ceilings: the best rates of llama.cpp's own kernels on a machine: where they hold, which are
kept, which are known.

A session of `lab ceilings` is a line of a file; each line is of one device. What is known of a
place is the best rate of each kernel over all sessions that were made there. `probes.py` says what
is timed, `measuring.py` times it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab import errors
from lab.core import results, shell, shown
from lab.core.files import is_file, listed
from lab.core.memory import computes_on_cpu, layers as offloaded_layers, shares
from lab.core.record import Ceilings, Device, Machine, Model, Placement, Rate, Record, Settings
from lab.errors import LabError
from lab.models import asked_devices
from lab.roofline import probes
from lab.roofline.probes import READ, Kernel, ProbeKey, key
from lab.runner import as_options, machine

Say = Callable[[str], None]
CPU = "CPU"  # what llama.cpp calls the device whose name is None here
HERE = asked_devices.HERE

OF_KERNELS = (
    "--model",
    "--threads",
    "--threads-batch",
    "--ubatch",
    "--flash-attn",
    "--cache-type-k",
    "--cache-type-v",
    "--no-repack",
    "--device",
    "--n-gpu-layers",
    "--n-cpu-moe",
    "--no-kv-offload",
)
"""The options that decide which kernels a run uses, and on which device."""

SAME_IN = {
    "cpu": "CPU",
    "n_cores_usable": "number of cores",
    "ram_bytes": "memory",
    "llama_cpp_python": "version of llama-cpp-python",
    "llama_cpp_commit": "commit of llama.cpp",
    "system_info": "CPU instructions that llama.cpp uses",
    "lib": "llama.cpp libraries",
}
"""The fields in which two descriptions of one machine and build agree, and their names in a
sentence.
"""


@dataclass(frozen=True)
class Where:
    """What ceilings are measured of: a machine with its build, devices by name, and `repack` as in
    Settings.

    With a model and settings, only their kernels count when it is judged whether the ceilings are
    to be trusted.
    """

    machine: Machine
    devices: tuple[str | None, ...] = (None,)
    repack: bool | None = None
    model: Model | None = None
    settings: Settings | None = None


def layers(
    here: Machine, model: Model, settings: Settings, placement: Placement | None = None
) -> tuple[str | None, ...]:
    """The device of each layer, the output last; None is the CPU."""
    n_layer = model.n_layer or 0
    if placement is not None and len(placement.layers) == n_layer + 1:
        return tuple(None if name == CPU else name for name in placement.layers)
    devices = machine.used(here, settings)
    if not devices:
        return (None,) * (n_layer + 1)
    names = machine.names(devices)
    memory = {device.name: device.memory_bytes for device in devices if device.memory_bytes}
    by_layer: list[str | None] = []
    for number in offloaded_layers(
        n_layer, settings.n_gpu_layers, shares(memory, names, settings.tensor_split)
    ):
        by_layer.append(None if number is None else names[number])
    return tuple(by_layer)


def layers_of(record: Record) -> tuple[str | None, ...]:
    """The device of each layer of a run, the output last; None is the CPU."""
    return layers(record.machine, record.model, record.settings, record.run.placement)


def place_of(
    here: Machine, model: Model, settings: Settings, placement: Placement | None = None
) -> Where:
    """Where some settings run a model: all devices whose kernels its steps need, first the one with
    most layers.
    """
    n_layers = collections.Counter(layers(here, model, settings, placement))
    devices = [name for name, _ in n_layers.most_common()]
    if None not in devices and computes_on_cpu(settings, model):
        devices.append(None)
    return Where(here, tuple(devices), settings.repack, model, settings)


def place_of_record(record: Record) -> Where:
    """Where a run was made."""
    return place_of(record.machine, record.model, record.settings, record.run.placement)


def device_of(here: Machine, name: str | None) -> Device | None:
    """The description of a device; None for the CPU, and for one that the machine does not have."""
    for device in machine.accelerators(here.devices):
        if device.name == name:
            return device
    return None


def memory_bytes(record: Record) -> float | None:
    """Bytes of the device of a run; None for several devices, where each has an unknown share."""
    names = place_of_record(record).devices
    if len(names) > 1:
        return None
    if names[0] is None:
        return record.machine.ram_bytes
    device = device_of(record.machine, names[0])
    if device is None:
        return None
    return device.memory_bytes


def device_label(here: Machine, name: str | None) -> str:
    """The device that ceilings are of, in words."""
    device = device_of(here, name)
    return machine.named(here, () if device is None else (device,))


def each_device(ceilings: Ceilings) -> tuple[Ceilings, ...]:
    """The ceilings of the first device, then those of the others."""
    return (ceilings, *(ceilings.others or ()))


def same_machine(first: Machine, second: Machine) -> bool:
    """Whether two descriptions are of one machine and build."""
    return not differences(first, second)


def differences(first: Machine, second: Machine) -> list[str]:
    """In what two descriptions of machines and builds differ; nothing for one machine and build."""
    names = []
    for field, name in SAME_IN.items():
        if getattr(first, field) != getattr(second, field):
            names.append(name)
    if _device_descriptions(first) != _device_descriptions(second):
        names.append("devices")
    return names


def _device_descriptions(here: Machine) -> list[str]:
    return [device.description for device in machine.accelerators(here.devices)]


def hold_for(ceilings: Ceilings, where: Where) -> bool:
    """Whether ceilings were measured there: on the same machine and build, kinds of devices, and
    layout of weights.
    """
    devices = []
    for of_device in each_device(ceilings):
        devices.append(of_device.device)
        is_repacked = of_device.repack is not False
        if not of_device.on_gpu and is_repacked != (where.repack is not False):
            return False
    if _kinds_of_devices(ceilings.machine, devices) != _kinds_of_devices(
        where.machine, where.devices
    ):
        return False
    return same_machine(ceilings.machine, where.machine)


def _kinds_of_devices(here: Machine, names: Iterable[str | None]) -> set[str | None]:
    """The descriptions of devices, or their names where the machine does not have them."""
    kinds: set[str | None] = set()
    for name in names:
        device = device_of(here, name)
        kinds.add(name if device is None else device.description)
    return kinds


# What is kept in files


def save(ceilings: Ceilings, folder: Path) -> Path:
    """Append to this machine's file of ceilings in `folder`."""
    label = device_label(ceilings.machine, ceilings.device).partition(",")[0]
    path = folder / f"ceilings-{machine.slug(label)}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.save(path, ceilings)
    except OSError as problem:
        raise LabError(
            f"{path} cannot be written: {problem.strerror}.", "Choose another folder: --out"
        ) from None
    return path


def kept(folder: Path, warn: Say = errors.warn) -> list[Ceilings]:
    """All ceilings that are kept in a folder; `warn` is called with a sentence for each line that
    cannot be read.
    """
    paths = [path for path in listed(folder, "ceilings-*.jsonl") if is_file(path)]
    if not paths:
        return []
    contents = results.read(paths)
    for sentence in contents.skipped:
        warn(sentence)
    return list(contents.ceilings)


def lines(ceilings: Ceilings | None) -> list[Ceilings]:
    """Ceilings as lines of a file, one for each device."""
    if ceilings is None:
        return []
    return [dataclasses.replace(of_device, others=None) for of_device in each_device(ceilings)]


def commands(records: Sequence[Record]) -> list[str]:
    """The commands that measure the ceilings of runs, with what decides which kernels they use."""
    lines = []
    for record in records:
        arguments: list[str] = []
        for name, *values in as_options.options(record):
            if name == "--lib":
                arguments += [name, "FOLDER"]
            elif (
                name == "--threads" and record.settings.n_threads == machine.default_threads()
            ):
                continue
            elif name in OF_KERNELS:
                arguments += [name, *values]
        lines.append(shell.lab("ceilings", *arguments))
    return list(dict.fromkeys(lines))


# What is known of a place


def known(sessions: Sequence[Ceilings], where: Where) -> Ceilings | None:
    """What was measured there with this build, the best rate of each probe; None where a device was
    not measured.
    """
    if len(_gpus(where)) > 1:
        return None
    by_device = []
    for name in where.devices:
        ceilings = _known_of_device(sessions, where, name)
        if ceilings is None:
            return None
        by_device.append(ceilings)
    first, *further = by_device
    return dataclasses.replace(first, others=tuple(further) or None)


def _known_of_device(
    sessions: Sequence[Ceilings], where: Where, name: str | None
) -> Ceilings | None:
    """The best rate of each probe of a device: a bad moment does not lower a ceiling.

    A rate that only disturbed sessions have makes the whole doubtful if the place needs its kernel.
    If it does not, and there is a quiet session, the rate is left out.
    """
    place = dataclasses.replace(where, devices=(name,))
    fitting = []
    for session in sessions:
        line = dataclasses.replace(session, others=None)
        if line.on_gpu == (name is not None) and hold_for(line, place):
            fitting.append(line)
    if not fitting:
        return None
    fitting.sort(key=lambda session: session.measured_at)
    quiet_sessions = [session for session in fitting if not session.disturbed]
    quiet_keys = set[ProbeKey]()
    for session in quiet_sessions:
        quiet_keys.update(map(key, session.rates))
    has_disturbed = len(quiet_sessions) < len(fitting)
    needed = _needed_kernels(place) if has_disturbed else None
    best: dict[ProbeKey, Rate] = {}
    disturbed: str | None = None
    for session in fitting:
        for rate in session.rates:
            is_doubtful = key(rate) not in quiet_keys
            if is_doubtful and quiet_keys and not _is_needed(rate, needed):
                continue
            if is_doubtful:
                disturbed = session.disturbed
            if key(rate) not in best or gbps(rate) > gbps(best[key(rate)]):
                best[key(rate)] = rate
    newest = (quiet_sessions or fitting)[-1]
    return dataclasses.replace(
        newest,
        machine=where.machine,
        device=name,
        rates=tuple(best.values()),
        disturbed=disturbed,
    )


def _needed_kernels(place: Where) -> set[tuple[Kernel, int]] | None:
    """The kernels of a place with one device, and their numbers of threads; None: all count."""
    if place.model is None or place.settings is None:
        return None
    try:
        timed = probes.probes(place.model, place.settings, (), place.devices[0])
    except LabError:
        return None
    return {(probes.kernel(probe), probe.n_threads) for probe in timed}


def _is_needed(rate: Rate, needed: set[tuple[Kernel, int]] | None) -> bool:
    if needed is None:
        return True
    if rate.op == READ:
        return rate.n_threads in {n_threads for _, n_threads in needed}
    return (probes.kernel(rate), rate.n_threads) in needed


MEASURE_THERE = "Measure them on that machine, with the settings of the runs"


def need(
    sessions: Sequence[Ceilings],
    where: Where,
    label: str,
    types: Sequence[str] = (),
    command: str | None = None,
) -> Ceilings:
    """What is known of a place, or a LabError that says what there is instead.

    `label` says what it is needed for, `types` are those of the model's weights,
    `command` measures what is needed.
    """
    check_one_gpu(where)
    ceilings = known(sessions, where)
    if ceilings is not None:
        return ceilings
    lacking = None
    for name in where.devices:
        if known(sessions, dataclasses.replace(where, devices=(name,))) is None:
            lacking = name
            break
    subject = label
    if len(where.devices) > 1:
        subject = f"{lacking or CPU} ({device_label(where.machine, lacking)}), for {label}"
    is_without_repack = lacking is None and where.repack is False
    what = f"The ceilings of {subject}"
    arguments = []
    if is_without_repack:
        what += " without repacking"
        arguments.append("--no-repack")
    if types:
        arguments += ["--types", ",".join(types)]
    start = "Measure them" if label == HERE else MEASURE_THERE
    hint = f"{start}: {command or shell.lab('ceilings', *arguments)}"
    sessions = [session for session in sessions if session.on_gpu == (lacking is not None)]
    if is_without_repack or not sessions:
        raise LabError(f"{what} have not been measured.", hint)
    last = sessions[-1]
    last_label = device_label(last.machine, last.device)
    names = differences(last.machine, where.machine)
    differ = ""
    if names:
        differ = f"; what differs: {', '.join(names)}"
    raise LabError(
        f"The known ceilings are of another machine or build ({last_label}, llama.cpp "
        f"{last.machine.llama_cpp_commit}), not of {subject}{differ}.",
        hint,
    )


def check_one_gpu(where: Where) -> None:
    """LabError for a place with several GPUs."""
    names = _gpus(where)
    if len(names) > 1:
        raise LabError(
            "Ceilings, explanations and predictions are for one GPU, with or without layers on "
            f"the CPU, not for {' and '.join(names)}.",
            f"Choose one: --device {names[0]}",
        )


def _gpus(where: Where) -> list[str]:
    return [name for name in where.devices if name is not None]


def doubts(ceilings: Ceilings) -> tuple[str, ...]:
    """The doubts of everything that is computed from ceilings (core/shown.py)."""
    for of_device in each_device(ceilings):
        if of_device.disturbed:
            return (shown.LOADED,)
    return ()


def gbps(rate: Rate) -> float:
    """10^9 bytes per second that the best pass read."""
    return rate.n_bytes / min(rate.times_ns)


def gflops(rate: Rate) -> float:
    """10^9 FLOPs per second that the best pass computed."""
    return rate.flops / min(rate.times_ns)
