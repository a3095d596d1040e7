"""Measures ceilings: the best rates of llama.cpp's own kernels on this machine, one by one.

A roof has two parts: the rate of reading weights (one column: a decode step) and of multiplying them (many columns: a
prefill step). Both depend on the weights' type, because each type has its own kernel. So the lab measures a ceiling for
each type that a model uses, in its shapes (probe_plan.py) and in the buffer of its weights. A plain read of memory
without a kernel shows whether the kernel or the memory is slow. The best pass of several rounds counts.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from lab.core import results, shown
from lab.core.asked_settings import SettingsKeywords
from lab.core.lists import plural
from lab.core.record import Ceilings, Model, Rate, Settings
from lab.errors import LabError
from lab.features.limits import plain_read
from lab.features.limits import where as places
from lab.features.limits.probe_plan import probes
from lab.features.limits.where import Where
from lab.models import catalog, shapes
from lab.process.wire import DOWNLOAD, MUL_MAT_ID, UPLOAD, Probe
from lab.process.worker import Worker, WorkerDied
from lab.runner import machine, noise_watch, progress
from lab.runner.cases import utc_now
from lab.runner.plan import make_plan
from lab.runner.progress import KERNEL, ShowStatus, Status, duration
from lab.show import disturbances

__all__ = ["probes"]  # others look for it here

ROUNDS, MOST_EXTRA_ROUNDS = 2, 1
"""Rounds in which every probe is run, and further rounds at most while the machine is disturbed."""

EACH_S, GB_S, SURE_S = 0.25, 1.2, 10
"""Seconds that a probe takes, about, and that 10^9 bytes of new weights take, where `filling_s` has not timed them. The
forecast trusts these as much as SURE_S seconds of measuring."""

TRY_BYTES = 2**25
"""Bytes of weights that are filled to see how long that takes."""

HINT = "Measure them on that machine: lab ceilings"


def ceilings(
    model: str = catalog.DEFAULT,
    types: Sequence[str] = ("Q4_0", "Q8_0"),
    *,
    out: str | Path = "results",
    **asked: Unpack[SettingsKeywords],
) -> Ceilings:
    """This machine's ceilings for a model (a SPEC), measured if unknown, and kept in `out`.

        best = lab.ceilings("smollm2-135m", types=["Q8_0"], threads=2)

    `types` are measured besides the model's own; `asked` are settings such as threads or device. The ceilings
    are those of the device with most layers; `others` are those of the further devices that the settings use.
    """
    show, warned, folder = progress.notebook_line(), list[str](), Path(out)

    def watch(status: Status) -> None:
        show(f"{status.words}; {duration(status.left_s or 0)} left")

    with Worker() as worker:
        shape, plan = shapes.find(worker, model), make_plan(worker, [1], 1, 1, **asked)
        where = places.of(plan.machine, shape, plan.settings)
        todo = unknown(shape, plan.settings, types, where, kept(folder, warned.append))
        show(announcement(worker, todo))
        best = obtain(worker, where, todo, watch, warned.append, folder)
    for sentence in warned:
        warnings.warn(sentence, stacklevel=2)
    show(f"{len(best.rates)} kernels are known, measured {best.measured_at}")
    return best


def expected_s(todo: Sequence[Probe], gb_s: float = GB_S) -> float:
    """The estimated seconds of these probes in all rounds, on a quiet machine that fills 10^9 bytes in gb_s."""
    return ROUNDS * sum(_each_s(todo, gb_s))


def _each_s(todo: Sequence[Probe], gb_s: float = GB_S) -> list[float]:
    """The estimated seconds of each probe in a round: those of the same weights follow one another."""
    weights = [(probe.device, key(dataclasses.replace(probe, n_tokens=1, n_threads=1))) for probe in todo]
    is_new = [own != before for own, before in zip(weights, [None, *weights], strict=False)]
    return [EACH_S + gb_s * probe.n_bytes / 1e9 * new for probe, new in zip(todo, is_new, strict=True)]


def _filling_s(worker: Worker, probe: Probe) -> float:
    """Seconds in which 10^9 bytes of a probe's weights are filled, from TRY_BYTES of them."""
    short = dataclasses.replace(probe, n_bytes=1, seconds=0.0)
    _timed(worker, short)  # what the first use of a device takes
    start = time.monotonic()
    _timed(worker, dataclasses.replace(short, n_bytes=TRY_BYTES))
    return (time.monotonic() - start) / TRY_BYTES * 1e9


def announcement(worker: Worker, todo: Sequence[Probe]) -> str:
    """The number of kernels to measure, and the time that it will take, after a try of how fast weights are filled."""
    if not todo:
        return "All kernels are measured already."
    by_device = [[probe for probe in todo if probe.device == name] for name in {probe.device for probe in todo}]
    seconds = sum(expected_s(own, _filling_s(worker, own[0])) for own in by_device)
    size = f"{len(todo)} kernel{'s' * (len(todo) != 1)} to measure in {ROUNDS} rounds"
    time_words = f"about {duration(seconds)}, longer if other programs use the cores"
    return f"{size}: {time_words}. Ctrl-C keeps the measured kernels."


def obtain(
    worker: Worker, where: Where, todo: Sequence[Probe], watch: ShowStatus, warn: Callable[[str], None], folder: Path
) -> Ceilings:
    """Measure these probes (those that are `unknown`), keep them in `folder`, and return all ceilings of `where`.

    `watch` gets the status, `warn` the disturbances.
    """
    if todo and (words := run_probes(worker, where, todo, watch, folder)):
        warn(
            f"While the ceilings were measured, {words}, in each of {ROUNDS + MOST_EXTRA_ROUNDS} rounds. "
            "Some can be too low. Measure again: --again"
        )
    best = known(kept(folder, lambda sentence: None), where)
    assert best is not None
    return best


def unknown(
    model: Model, settings: Settings, types: Sequence[str], where: Where, given: Sequence[Ceilings]
) -> list[Probe]:
    """The probes of a model, on every device of `where`, that `given` ceilings do not answer."""
    todo: list[Probe] = []
    kinds: set[tuple[object, ...]] = set()
    for name in where.devices:
        kind = places.identity(where.machine, name)
        if kind not in kinds:  # two devices of a kind are measured once
            of_device = known(given, dataclasses.replace(where, devices=(name,)))
            todo += missing(probes(model, settings, types, name), of_device)
        kinds.add(kind)
    return todo


def run_probes(worker: Worker, where: Where, wanted: Sequence[Probe], watch: ShowStatus, folder: Path) -> str:
    """Run the probes of each device in turn. Returns what disturbed the last rounds; "" for nothing.

    `watch` is told before each probe which it is, how long all of them will still take, and what disturbs this round.
    """
    words, later_s = list[str](), expected_s(wanted)
    for name in dict.fromkeys(probe.device for probe in wanted):
        own = [probe for probe in wanted if probe.device == name]
        later_s -= expected_s(own)
        of_device = dataclasses.replace(where, devices=(name,))
        words.append(_run_probes(worker, of_device, own, watch, folder, later_s))
    return " and ".join(dict.fromkeys(filter(None, words)))


def _run_probes(
    worker: Worker, where: Where, wanted: Sequence[Probe], watch: ShowStatus, folder: Path, later_s: float
) -> str:
    """Run the probes round by round, read memory plainly, and keep it all in `folder`, whatever happens to the last.

    Every probe is run once in each of ROUNDS rounds, so that a bad moment spoils none of them; while a round was
    disturbed, another follows, at most MOST_EXTRA_ROUNDS. Those of other devices are expected to take `later_s`
    seconds. Returns what disturbed the last round; "" for nothing.
    """
    rates: dict[tuple[object, ...], Rate] = {}
    n_all, n_done, words = ROUNDS * len(wanted), 0, ""
    started, done_s, left_s = time.monotonic(), 0.0, expected_s(wanted) + later_s
    (name,) = where.devices
    n_threads = max(probe.n_threads for probe in wanted)
    n_free = max(0.0, (machine.cores(where.machine) or n_threads) - n_threads)
    try:
        for round_number in range(ROUNDS + MOST_EXTRA_ROUNDS):
            if round_number >= ROUNDS:
                n_all, left_s = n_all + len(wanted), left_s + expected_s(wanted) / ROUNDS
            noisy = noise_watch.NoiseWatch(worker.pid, machine.servers_here(worker.backend.rpc))
            for probe, probe_s in zip(wanted, _each_s(wanted), strict=True):
                elapsed_s = time.monotonic() - started
                pace = (SURE_S + elapsed_s) / (SURE_S + done_s)
                slower = f" (slower: {words})" if words else ""
                doing = f"{KERNEL} {n_done + 1} of {n_all}: {_describe(probe)}{slower}"
                watch(Status(doing, elapsed_s=elapsed_s, left_s=pace * left_s))
                _keep(rates, _timed(worker, probe))
                n_done, done_s, left_s = n_done + 1, done_s + probe_s, left_s - probe_s
                words = disturbances.during(noisy.finish(), n_free)
            if name is None:
                _keep(rates, plain_read.read_rate(n_threads))
            if round_number + 1 >= ROUNDS and not words:
                break
    finally:
        if rates:
            lacking = tuple(_untimed(probe) for probe in wanted if key(probe) not in rates)
            repack = where.repack if name is None else None
            of_device = utc_now(), where.machine, name is not None, tuple(rates.values())
            made = Ceilings(*of_device, device=name, repack=repack)
            save(dataclasses.replace(made, missing=lacking or None, disturbed=words or None), folder)
    return words


def _untimed(probe: Probe) -> Rate:
    """What a session that ended early did not measure."""
    values: dict[str, Any] = {field.name: getattr(probe, field.name, None) for field in dataclasses.fields(Rate)}
    return Rate(**values | {"buffer": "", "n_bytes": 0, "flops": 0, "times_ns": ()})


def _timed(worker: Worker, probe: Probe) -> Rate:
    """One probe. Where it ends the engine the error names it: no RPC server can be asked what it can compute."""
    try:
        return worker.probe(probe)
    except WorkerDied as problem:
        hint = "Leave the type out (--types), or use another model. To find a setting that avoids a crash: lab doctor"
        what = f"{problem.what} It happened while measuring {_describe(probe)}."
        raise WorkerDied(what, hint, problem.status) from None


def _describe(probe: Probe) -> str:
    if probe.op in (UPLOAD, DOWNLOAD):
        return f"{probe.op} of {probe.n_bytes:,} bytes, {probe.device}"
    what = f"{probe.op.replace('_', ' ')} over {probe.n_positions:,} positions, " if probe.n_positions else ""
    what = "experts, " if probe.op == MUL_MAT_ID else what
    on = plural(probe.n_threads, "thread") if probe.device is None else probe.device
    return f"{what}{probe.type}, {plural(probe.n_tokens, 'column')}, {on}"


def _keep(rates: dict[tuple[object, ...], Rate], rate: Rate) -> None:
    """Add the passes of a further round to those of the same probe."""
    old = rates.get(key(rate))
    rates[key(rate)] = rate if old is None else dataclasses.replace(old, times_ns=old.times_ns + rate.times_ns)


def save(ceilings: Ceilings, folder: Path) -> Path:
    """Append to this machine's file of ceilings in `folder`."""
    label = places.device_label(ceilings.machine, ceilings.device).partition(",")[0]
    path = folder / f"ceilings-{machine.slug(label)}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.append(path, ceilings)
    except OSError as problem:
        raise LabError(f"{path} cannot be written: {problem.strerror}.", "Choose another folder: --out") from None
    return path


def kept(folder: Path, warn: Callable[[str], None] = warnings.warn) -> list[Ceilings]:
    """All ceilings that are kept in a folder; `warn` is called with a sentence for each line that cannot be read."""
    paths = sorted(path for path in folder.glob("ceilings-*.jsonl") if path.is_file()) if folder.is_dir() else []
    if not paths:
        return []
    contents = results.read(paths)
    for sentence in contents.skipped:
        warn(sentence)
    return list(contents.ceilings)


def known(given: Sequence[Ceilings], where: Where, force: bool = False) -> Ceilings | None:
    """What was measured there with this build, of `given` the best of each probe; None where nothing was.

    Of several devices: that of the first, with `others`; None where one was not measured. With `force` the ceilings of
    any machine will do: those that were measured last.
    """
    first, *others = [_known(given, where, name, force) for name in where.devices]
    if first is None or None in others:
        return None
    return dataclasses.replace(first, others=tuple(one for one in others if one is not None) or None)


def _known(given: Sequence[Ceilings], where: Where, name: str | None, force: bool) -> Ceilings | None:
    """`known`, of one device."""
    alike = sorted((old for old in given if old.on_gpu == (name is not None)), key=lambda old: old.measured_at)
    fitting = [old for old in alike if _is_of(old, where, name)]
    here = where.machine
    if force and alike and not fitting:
        last = alike[-1]
        here = last.machine
        fitting = [old for old in alike if _is_of(old, Where(here, repack=where.repack), last.device)]
    if not fitting:
        return None
    best: dict[tuple[object, ...], Rate] = {}
    for rate in (rate for old in fitting for rate in old.rates):
        if key(rate) not in best or gbps(rate) > gbps(best[key(rate)]):  # a bad moment does not lower a ceiling
            best[key(rate)] = rate
    lacking = {key(rate): rate for old in fitting for rate in old.missing or () if key(rate) not in best}
    quiet = {key(rate) for old in fitting if not old.disturbed for rate in old.rates}
    words = [old.disturbed for old in fitting if any(key(rate) not in quiet for rate in old.rates)]
    made = Ceilings(fitting[-1].measured_at, here, name is not None, tuple(best.values()), device=name)
    made = dataclasses.replace(made, repack=fitting[-1].repack)
    return dataclasses.replace(made, missing=tuple(lacking.values()) or None, disturbed=words[-1] if words else None)


def doubts(ceilings: Ceilings) -> tuple[str, ...]:
    """The doubts of everything that is made of ceilings (core/shown.py)."""
    every = places.each_device(ceilings)
    loaded = (shown.LOADED,) if any(one.disturbed for one in every) else ()
    return loaded + ((shown.INCOMPLETE,) if any(one.missing for one in every) else ())


def doubt_words(ceilings: Ceilings) -> list[str]:
    """Sentences on these doubts, and what to do."""
    sentences = []
    for one in places.each_device(ceilings):
        label, n = places.label(one.device), len(one.missing or ())
        if one.disturbed:
            sentences.append(
                f"While the ceilings of {label} were measured, {one.disturbed}. Some can be too low, so the lab names "
                "no limits or gains. Measure again while no other program runs: lab ceilings --again"
            )
        if n:
            sentences.append(
                f"The ceilings of {label} are incomplete: {n} of {n + len(one.rates)} probes are missing. Measure the "
                "rest: lab ceilings"
            )
    return sentences


def _is_of(ceilings: Ceilings, where: Where, name: str | None) -> bool:
    own = places.identity(ceilings.machine, ceilings.device)
    is_same = places.same(ceilings.machine, where.machine)
    alike = is_same and places.repacks_alike(ceilings, where.repack)
    return alike and own == places.identity(where.machine, name)


def need(given: Sequence[Ceilings], where: Where, what: str, force: bool | None = None) -> Ceilings:
    """`known`, or a LabError that says what there is instead. `force`: the option of a command that has it."""
    best = known(given, where, bool(force))
    if best is not None:
        return best
    lacking = next(name for name in where.devices if _known(given, where, name, bool(force)) is None)
    others = [old for old in given if old.on_gpu == (lacking is not None)]
    if len(where.devices) > 1:
        what = f"{places.label(lacking)} ({places.device_label(where.machine, lacking)}), for {what}"
    hint = "Measure them there, with the settings of the runs: lab ceilings" if lacking else HINT
    if lacking is None and where.repack is False:
        raise LabError(f"The ceilings of {what} without repacking have not been measured.", f"{HINT} --no-repack")
    if others:
        other = others[-1]
        label = places.device_label(other.machine, other.device)
        raise LabError(
            f"The known ceilings are of another machine or build ({label}, "
            f"llama.cpp {other.machine.llama_cpp_commit}), not of {what}.",
            hint if force is None else f"{hint}. Or use these anyway: --force",
        )
    raise LabError(f"The ceilings of {what} have not been measured.", hint)


def lines(ceilings: Ceilings | None) -> list[Ceilings]:
    """Ceilings as lines of a file, one for each device."""
    if ceilings is None:
        return []
    return [dataclasses.replace(one, others=None) for one in places.each_device(ceilings)]


def missing(wanted: Sequence[Probe], ceilings: Ceilings | None) -> list[Probe]:
    """The probes that are not in `ceilings` yet."""
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
