"""The plan: what will be measured, checked before an hour is spent on it.

Everything that can be known beforehand is found out here, from the model's header and the machine: wrong
settings, lengths that cannot fit into memory, lengths that the model was not trained for.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.core.lists import join_and
from lab.core.placement import Tensor
from lab.core.record import Model, Settings
from lab.core.script import Operation
from lab.errors import LabError
from lab.models import catalog, obtain, shapes
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner import builds, fits, limits, machine, offload, prompts
from lab.runner.planned import Case, Plan, Text, Until, with_room


def parse_lengths(text: str, option: str = "--prompt-len") -> tuple[int, ...]:
    """Lengths as llama-bench writes them: `10,1000`, `100-500+100`, `512-4096*2`."""
    lengths: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,12})(?:-(\d{1,12})(?:([+*])(\d{1,12}))?)?\s*", part)
        if not match:
            raise LabError(
                f"{part!r} is not a {'prompt' if option == '--prompt-len' else 'draft'} length (in {option} {text}).",
                "Write whole numbers: 10,1000,10000, or ranges: 100-500+100, 512-4096*2.",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        sign, step = match[3] or "+", int(match[4] or 1)
        if step < (2 if sign == "*" else 1) or last < first or (sign == "*" and first == 0):
            raise LabError(f"The range {part!r} does not grow.", "Write it as first-last+step or first-last*factor.")
        while first <= last and len(lengths) <= 1000:
            lengths.append(first)
            first = first * step if sign == "*" else first + step
    return tuple(lengths)


def check_lengths(lengths: Sequence[int]) -> None:
    """LabError for what cannot be a list of prompt lengths."""
    if not lengths:
        raise LabError("No prompt length is given.", "For example: --prompt-len 10,1000")
    if len(lengths) > 1000:
        raise LabError("More than 1,000 prompt lengths are given.", "Use a larger step: 100-10000+100.")
    for n in lengths:
        if n < 1:
            raise LabError(f"A prompt length of {n} cannot be measured.", "A prompt has at least 1 token.")
    for n, times in collections.Counter(lengths).items():
        if times > 1:
            raise LabError(
                f"Prompt length {n} is given {times} times.", "Give it once; --repeat measures it more often."
            )


DEFAULT_LENGTHS = "10,100,1000"
DEFAULT_GEN = 64
DEFAULT_REPEAT = 3

N_PILOT = 8
"""Rounds of `--until` before it is decided how many more are needed."""


def make_plan(
    worker: Worker,
    prompt_len: str | Sequence[int] = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    prompt: str = prompts.TEXT,
    seed: int = 1,
    threads: int | None = None,
    threads_batch: int | None = None,
    batch: int = 2048,
    ubatch: int = 512,
    n_gpu_layers: int | str | None = None,
    flash_attn: str = "auto",
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    kv_unified: str | bool = "off",
    every: int | None = None,
    until: Until | None = None,
    watch: obtain.ShowTransfer = lambda what, done, total: None,
    fetch: bool = True,
    **where: Any,
) -> Plan:
    """Check everything that can be checked before a weight is loaded. LabError where it cannot work.

    Without `repeat` three rounds are planned, and lengths that cost little get more. With `every` the plan is a
    sweep up to its only length; with `until` it has rounds until that is reached. A model that is not on this
    machine is pulled or made, and `watch` is called with the bytes done; with `fetch` False it is planned from its
    shape, where the catalog has that, and cannot be run. `where` is that of `offload.Asked`: device, split_mode,
    tensor_split, rpc, lib and so on; `n_gpu_layers` is a number, or auto for as many as fit.
    """
    asked = offload.Asked(**where)
    worker.use(offload.backend(asked))
    build = builds.of_worker(worker)  # before the child computes anything
    lengths = parse_lengths(prompt_len) if isinstance(prompt_len, str) else tuple(prompt_len)
    check_lengths(lengths)
    ranges = {
        "gen": (gen, MAX_TOKENS),
        "repeat": (DEFAULT_REPEAT if repeat is None else repeat, 10_000),
        "batch": (batch, 2**30),
        "ubatch": (ubatch, 2**30),
    }
    ranges |= {
        "threads": (1 if threads is None else threads, limits.MAX_THREADS),
        "threads-batch": (1 if threads_batch is None else threads_batch, limits.MAX_THREADS),
    }
    if every is not None:
        ranges |= {"every": (every, max(lengths))}
    for name, (value, most) in ranges.items():
        if not 1 <= value <= most:
            raise LabError(f"--{name} {value:,} is not possible.", f"Give a whole number from 1 to {most:,}.")
    if flash_attn == "off" and cache_type_v not in ("f16", "f32", "bf16"):
        raise LabError(
            f"A {cache_type_v} V cache needs flash attention, which is off.",
            "Use --flash-attn on, or --cache-type-v f16.",
        )
    is_unified = _is_on("kv-unified", kv_unified)
    source = prompts.source(prompt)
    file, shape, tensors, warnings = _model(worker, model, watch, fetch)
    if file.source == catalog.SYNTHETIC:
        if prompt not in (prompts.TEXT, prompts.RANDOM):
            raise LabError(
                f"{model} has random weights: the prompt file {prompt} would mean nothing to it.",
                "Use --prompt random.",
            )
        source = prompts.source(prompts.RANDOM)
    here = machine.describe(build, builds.name_of(asked.lib))
    n_offloaded, unused = offload.n_layers(asked, n_gpu_layers, here.devices, shape)
    warnings += [*unused, *offload.warnings(asked, here.devices, shape)]
    if here.n_cores_usable and max(threads or 1, threads_batch or 1) > here.n_cores_usable:
        warnings.append(
            f"This machine has {here.n_cores_usable} cores: more threads than that wait for one another, and "
            "everything becomes many times slower."
        )
    n_threads = threads or limits.default_threads()
    cases = tuple(Case(n, gen, every) for n in lengths)
    settings = Settings(
        n_ctx=max(lengths) + gen,
        n_batch=batch,
        n_ubatch=min(batch, ubatch),
        n_threads=n_threads,
        n_threads_batch=threads_batch or n_threads,
        n_gpu_layers=n_offloaded,
        flash_attn=flash_attn,
        flash_attn_resolved=None,
        type_k=cache_type_k,
        type_v=cache_type_v,
        prompt=source.name,
        prompt_sha256=source.sha256,
        seed=seed,
        kv_unified=is_unified,
        **offload.settings(asked, n_offloaded, here.devices, shape),
    )
    beyond = [n for n in lengths if shape.n_ctx_train and n + gen > shape.n_ctx_train]
    if beyond:
        warnings.append(
            f"{join(beyond)} prompt tokens and {gen} more go beyond the {shape.n_ctx_train:,} tokens that "
            f"{shape.name} was trained for: the timing holds, the text does not."
        )
    is_more_if_cheap = repeat is None and until is None and every is None
    repeat = DEFAULT_REPEAT if repeat is None else repeat
    if until:
        repeat = min(max(repeat, N_PILOT), until.max_repeats)
    plan = Plan(
        *(file, shape, here, settings, source, cases, repeat, {}, tuple(warnings), until, is_more_if_cheap),
        backend=worker.backend,
        tensors=tensors or (worker.tensors(file.path) if n_offloaded else ()),
        free=worker.free_memory() if n_offloaded else {},
        round_trips_s=tuple(answer.round_trip_s for answer in worker.servers),
        auto=asked if n_gpu_layers == offload.AUTO else None,
    )
    if max(case.n_generated for case in cases) > MAX_TOKENS:
        raise LabError(
            f"The sweep would generate {max(case.n_generated for case in cases):,} tokens.",
            f"At most {MAX_TOKENS:,}: use a larger --every.",
        )
    return checked(plan)


def checked(plan: Plan) -> Plan:
    """The plan with the layers on devices that fit, where that was asked for, and the cases that cannot fit."""
    plan = fits.with_most_layers(plan)
    return dataclasses.replace(plan, refused=fits.too_large(plan))


def _model(
    worker: Worker, text: str, watch: obtain.ShowTransfer, fetch: bool
) -> tuple[catalog.ModelFile, Model, tuple[Tensor, ...], list[str]]:
    """A model's file and header; without `fetch`, of one that is not here, the shape, its tensors, and a note of it."""
    spec = catalog.parse(text) if fetch else shapes.parse(text)
    if fetch or spec.entry is None or obtain.locate(spec):
        file = obtain.obtain(spec, worker, watch, fetch)
        return file, read_header(worker, file), (), []
    entry = spec.entry
    quantization = spec.quantization or entry.quantization or shapes.USUAL
    file = catalog.ModelFile(entry.name, spec.source, Path())
    note = f"{spec.text} is not on this machine: planned from its shape ({entry.shape_source}) in {quantization}."
    return file, shapes.model_of(entry, quantization), shapes.tensors(entry, quantization), [note]


def read_header(worker: Worker, file: catalog.ModelFile) -> Model:
    """The model in a file, and where it is from."""
    return dataclasses.replace(
        worker.read_model(file.path, file.name, file.source),
        repo=file.repo,
        revision=file.revision,
        sha256=file.sha256,
    )


def _is_on(option: str, asked: str | bool) -> bool:
    """Whether it was asked to be on. LabError for other words than on and off."""
    words = {"on": True, "off": False, True: True, False: False}
    if asked not in words:
        raise LabError(f"--{option} {asked} is not possible.", "Give on or off.")
    return words[asked]


def with_cases(plan: Plan, cases: Sequence[Case], write: Callable[[Case, Text, Settings], list[Operation]]) -> Plan:
    """The same plan for other cases, of a script of their own. LabError for a case that chooses too many tokens."""
    changed = dataclasses.replace(plan, cases=tuple(cases), write=write, settings=with_room(plan.settings, cases))
    changed = checked(changed)
    for case in changed.cases:
        if case not in changed.refused and (n_chosen := changed.n_tokens(case)[1]) > MAX_TOKENS:
            raise LabError(f"{case.name} would choose {n_chosen:,} tokens.", f"At most {MAX_TOKENS:,} can be.")
    return changed


def join(numbers: Sequence[int]) -> str:
    """`1,000 and 10,000`: numbers in a sentence."""
    return join_and([f"{n:,}" for n in sorted(numbers)])
