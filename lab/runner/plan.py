"""Make a plan, and check everything that can be known before the first run: settings, lengths, memory."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.core.asked_settings import AUTO, AskedSettings, check_number, in_digits
from lab.core.lists import join_and
from lab.core.memory import Tensor
from lab.core.record import Model, Settings
from lab.core.script import Operation
from lab.errors import LabError
from lab.models import catalog, obtain, synthetic
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner import builds, machine, placing, prompts
from lab.runner.cases import Case, Plan, Text, Until, with_room


def parse_lengths(
    asked: str | int | Sequence[int], option: str = "--prompt-len"
) -> tuple[int, ...]:
    """Lengths in llama-bench's format: `10,1000`, `100-500+100`, `512-4096*2`. k means 1,000: `8k`, `1.5k`."""
    lengths = [] if isinstance(asked, str) else [asked] if isinstance(asked, int) else list(asked)
    for part in asked.split(",") if isinstance(asked, str) else ():
        match = re.fullmatch(
            r"\s*(\d{1,12})(?:-(\d{1,12})(?:([+*])(\d{1,12}))?)?\s*", in_digits(part)
        )
        if not match:
            what = f"{part!r} is not a {'prompt' if option == '--prompt-len' else 'draft'} length (in {option} {asked})."
            raise LabError(
                what, "Write whole numbers: 10,1000,8k, or ranges: 100-500+100, 512-4096*2."
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        sign = match[3] or "+"
        step = int(match[4] or 1)
        if step < (2 if sign == "*" else 1) or last < first or (sign == "*" and first == 0):
            raise LabError(
                f"The range {part!r} does not increase.",
                "Write first-last+step or first-last*factor.",
            )
        while first <= last and len(lengths) <= 1000:
            lengths.append(first)
            first = first * step if sign == "*" else first + step
    if option != "--prompt-len":
        return tuple(lengths)
    if not lengths:
        raise LabError("There is no prompt length.", "Give one, for example: --prompt-len 10,1000")
    if len(lengths) > 1000:
        raise LabError(
            "There are more than 1,000 prompt lengths.", "Use a larger step: 100-10000+100."
        )
    for n, times in collections.Counter(lengths).items():
        if n < 1:
            raise LabError(
                f"A prompt length of {n} cannot be measured.", "A prompt has at least 1 token."
            )
        if times > 1:
            raise LabError(
                f"Prompt length {n} occurs {times} times.",
                "Give it once; --repeat measures it more often.",
            )
    return tuple(lengths)


DEFAULT_LENGTHS = "10,100,1000"
DEFAULT_GEN = 64
DEFAULT_REPEAT = 3

N_PILOT = 8  # pilot rounds of `--until`, from which the number of further rounds is computed


def make_plan(
    worker: Worker,
    prompt_len: str | int | Sequence[int] = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    every: int | None = None,
    until: Until | None = None,
    watch: obtain.ShowTransfer | None = obtain.silently,
    **settings: Any,
) -> Plan:
    """Check everything that can be checked before the weights are loaded. LabError for a plan that cannot work.

    Without `repeat` the plan has three rounds, and more for quick lengths. With `every` it is a sweep up to its only
    length; with `until` it has rounds until that accuracy. A missing model is pulled or made, with calls of `watch`;
    with None for `watch` the plan uses its shape in the catalog and cannot be run.
    """
    asked = AskedSettings(**settings)
    worker.use(builds.folder_of(asked.lib), placing.rpc_servers(asked))
    build = builds.of_worker(worker)  # before the child computes anything
    lengths = parse_lengths(prompt_len)
    check_number("gen", gen, MAX_TOKENS)
    if every is not None:
        check_number("every", every, max(lengths))
    cases = tuple(Case(n, gen, every) for n in lengths)
    if (most := max(case.n_generated for case in cases)) > MAX_TOKENS:
        raise LabError(
            f"The sweep would generate {most:,} tokens.",
            f"At most {MAX_TOKENS:,}: increase --every.",
        )
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    check_number("repeat", n_repeat, 10_000)
    asked.check()
    source = prompts.source(asked.prompt)
    file, shape, tensors, notes = _model(worker, model, watch)
    if file.source == catalog.SYNTHETIC:
        if asked.prompt not in (prompts.TEXT, prompts.RANDOM):
            raise LabError(
                f"{model} has random weights, so it cannot read {asked.prompt}.",
                "Use --prompt random.",
            )
        source = prompts.source(prompts.RANDOM)
    here = machine.describe(build, builds.name_of(asked.lib))
    n_threads = asked.threads or machine.default_threads()
    n_offloaded = 0
    if (
        machine.accelerators(here.devices) and not asked.is_on_cpu
    ):  # auto: all, until `checked` knows what fits
        n_all = -1 if shape.n_layer is None else shape.n_layer + 1
        n_offloaded = asked.n_gpu_layers if isinstance(asked.n_gpu_layers, int) else n_all
    chosen = Settings(
        n_ctx=max(case.n_prompt + case.n_gen for case in cases),
        n_batch=asked.batch,
        n_ubatch=min(asked.batch, asked.ubatch),
        n_threads=n_threads,
        n_threads_batch=asked.threads_batch or n_threads,
        n_gpu_layers=n_offloaded,
        flash_attn=asked.flash_attn,
        type_k=asked.cache_type_k,
        type_v=asked.cache_type_v,
        prompt=source.name,
        prompt_sha256=source.sha256,
        seed=asked.seed,
        kv_unified=asked.is_unified,
        **placing.settings(asked, n_offloaded, here.devices, shape),
    )
    warnings = [*notes, *placing.warnings(asked, here.devices, shape)]
    if (
        here.n_cores_usable
        and max(asked.threads or 1, asked.threads_batch or 1) > here.n_cores_usable
    ):
        waits = "with more threads the threads wait for each other, and every step becomes many times slower."
        warnings.append(f"This machine has {here.n_cores_usable} cores: {waits}")
    if beyond := [n for n in lengths if shape.n_ctx_train and n + gen > shape.n_ctx_train]:
        trained = f"the {shape.n_ctx_train:,} tokens that {shape.name} was trained for: timing is valid; text quality is not."
        warnings.append(f"{join(beyond)} prompt tokens and {gen} more exceed {trained}")
    plan = Plan(
        file=file,
        model=shape,
        machine=here,
        settings=chosen,
        prompt=source,
        cases=cases,
        n_repeat=n_repeat if until is None else min(max(n_repeat, N_PILOT), until.max_repeats),
        refused={},
        warnings=tuple(warnings),
        until=until,
        is_more_if_cheap=repeat is None and until is None and every is None,
        lib=worker.lib,
        tensors=tensors or (worker.tensors(file.path) if n_offloaded else ()),
        free=worker.free_memory() if n_offloaded else {},
        auto=asked if asked.n_gpu_layers == AUTO else None,
    )
    return placing.checked(plan)


def _model(
    worker: Worker, text: str, watch: obtain.ShowTransfer | None
) -> tuple[catalog.ModelFile, Model, tuple[Tensor, ...], list[str]]:
    """A model's file and header; for a missing model without `watch` its shape, its tensors, and a note."""
    spec = catalog.parse(text) if watch else catalog.parse(text, or_shape=True)
    if watch or spec.entry is None or obtain.locate(spec):
        file = obtain.obtain(spec, worker, watch)
        return file, read_header(worker, file), (), []
    entry = spec.entry
    kind = spec.quantization or spec.entry.quantization or synthetic.USUAL
    tensors = tuple(
        Tensor(one.name, one.n_bytes)
        for one in synthetic.tensors(entry.shape, synthetic.quantization_name(kind))
    )
    note = f"{spec.text} is not on this machine: planned from its shape ({entry.shape_source}) in {kind}."
    file = catalog.ModelFile(entry.name, spec.source, Path())
    return file, synthetic.model_of(entry, kind), tensors, [note]


def read_header(worker: Worker, file: catalog.ModelFile) -> Model:
    """The model in a file, with its source."""
    model = worker.read_model(file.path, file.name, file.source)
    return dataclasses.replace(model, repo=file.repo, revision=file.revision, sha256=file.sha256)


def with_cases(
    plan: Plan, cases: Sequence[Case], write: Callable[[Case, Text, Settings], list[Operation]]
) -> Plan:
    """The same plan for other cases with their own scripts. LabError for a case that chooses too many tokens."""
    changed = dataclasses.replace(
        plan, cases=tuple(cases), write=write, settings=with_room(plan.settings, cases)
    )
    changed = placing.checked(changed)
    for case in changed.cases:
        if case not in changed.refused and (n_chosen := changed.n_tokens(case)[1]) > MAX_TOKENS:
            raise LabError(
                f"{case.name} would generate {n_chosen:,} tokens.",
                f"The maximum is {MAX_TOKENS:,}.",
            )
    return changed


def join(numbers: Sequence[int]) -> str:
    return join_and([f"{n:,}" for n in sorted(numbers)])
