"""Make a plan, and check everything that can be known before the first run: settings, lengths,
memory."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import arguments, sampling
from lab.core.arguments import Numbers
from lab.core.asked_settings import (
    AUTO,
    UNPACKED_TYPES,
    AskedSettings,
    check_number,
    flash_of_architecture,
    in_digits,
    table,
)
from lab.core.lists import join_and, plural
from lab.core.memory import Tensor
from lab.core.record import Machine, Model, Settings
from lab.errors import LabError
from lab.models import catalog, obtain, synthetic
from lab.process.setup import ProcessSetup
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner import builds, machine, placement, prompts, samplers, waiting
from lab.runner.cases import Case, Plan, Until, Write, with_room

RANDOM_EXPERTS = (
    "Random tokens choose experts at random, and text does not: decode of a mixture of experts"
    " depends on it. Use --prompt text, or your own: --prompt FILE"
)
DEFAULT_LENGTHS = "10,100,1000"
DEFAULT_GEN = 64
DEFAULT_REPEAT = 3

N_PILOT = 8  # pilot rounds of `--until`, from which the number of further rounds is computed

MOST_LENGTHS = 1000
MOST_PROMPT = 10_000_000  # tokens that a results file can hold
LENGTHS = re.compile(r"\s*(\d{1,12})(?:-(\d{1,12})(?:([+*])(\d{1,12}))?)?\s*")
"""A length, or a range: first, last, + or *, step or factor."""


def parse_lengths(asked: Numbers, option: str = "--prompt-len") -> tuple[int, ...]:
    """Lengths in llama-bench's format: `10,1000`, `100-500+100`, `512-4096*2`. k means 1,000: `8k`,
    `1.5k`."""
    lengths: list[int] = []
    items = arguments.whole_numbers("prompt_len", asked)
    if isinstance(items, str):
        for part in items.split(","):
            lengths += _range_of_lengths(part, items, option, MOST_LENGTHS + 1 - len(lengths))
    else:
        lengths += items
    if option == "--prompt-len":
        _check_prompt_lengths(lengths)
    return tuple(lengths)


def _range_of_lengths(part: str, asked: str, option: str, most: int) -> list[int]:
    """A single length, or at most `most` lengths of a range."""
    if re.fullmatch(r"\s*0\d\d\s*", part):
        raise LabError(
            f"{asked} is not one length: commas separate lengths (in {option} {asked}).",
            "Write thousands without a comma, or with k: 4000 or 4k.",
        )
    match = LENGTHS.fullmatch(in_digits(part))
    if not match:
        kind = "prompt" if option == "--prompt-len" else "draft"
        hint = "Write whole numbers: 10,1000,8k, or ranges: 100-500+100, 512-4096*2."
        if re.search("[a-z]{3}", part, re.IGNORECASE):
            hint = f"{hint} A model is named by --model phi-3-mini"
        raise LabError(f"{part!r} is not a {kind} length (in {option} {asked}).", hint)
    first = int(match[1])
    last = int(match[2] or match[1])
    is_factor = match[3] == "*"
    step = int(match[4] or 1)
    grows = step >= 1
    if is_factor:
        grows = step >= 2 and first > 0
    if not grows or last < first:
        raise LabError(
            f"The range {part!r} does not increase.",
            "Write first-last+step or first-last*factor.",
        )
    lengths: list[int] = []
    length = first
    while length <= last and len(lengths) < most:
        lengths.append(length)
        length = length * step if is_factor else length + step
    return lengths


def _check_prompt_lengths(lengths: Sequence[int]) -> None:
    if not lengths:
        hint = "Give one, for example: --prompt-len 10,1000"
        raise LabError("There is no prompt length.", hint)
    if len(lengths) > MOST_LENGTHS:
        hint = "Use a larger step: 100-10000+100."
        raise LabError(f"There are more than {MOST_LENGTHS:,} prompt lengths.", hint)
    for length, n_times in collections.Counter(lengths).items():
        if length < 1:
            message = f"A prompt length of {length} cannot be measured."
            raise LabError(message, "A prompt has at least 1 token.")
        if length > MOST_PROMPT:
            message = f"A prompt of {length:,} tokens cannot be measured."
            raise LabError(message, f"A prompt has at most {MOST_PROMPT:,} tokens.")
        if n_times > 1:
            message = f"Prompt length {length} occurs {n_times} times."
            raise LabError(message, "Give it once; --repeat measures it more often.")


def make_plan(
    worker: Worker,
    prompt_len: Numbers = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    every: int | None = None,
    until: Until | None = None,
    watch: obtain.ShowTransfer | None = obtain.silently,
    **settings: Any,
) -> Plan:
    """Check all that can be checked without loading weights. LabError for an impossible plan.

    Without `repeat` the plan has three rounds, and more for quick lengths. With `every` it is a
    sweep up to its only length; with `until` it has rounds until that accuracy. A missing model is
    pulled or made, with calls of `watch`; with None for `watch` the plan uses its shape in the
    catalog and cannot be run.
    """
    of_chain, settings = sampling.split(settings)
    asked = AskedSettings(**settings)
    setup = process_setup(asked)
    worker.use(setup)
    build = builds.of_worker(worker)  # before the child computes anything
    cases = _cases(parse_lengths(prompt_len), gen, every)
    n_repeat = _n_repeat(repeat, until)
    asked.check()
    source = prompts.source(asked.prompt)
    planned = _model(worker, model, watch)
    if planned.file.source == catalog.SYNTHETIC:
        source = _random_prompt(asked, model)
    here = machine.describe(build, builds.name_of(asked.lib))
    chosen = dataclasses.replace(
        _settings(asked, cases, source, here, planned.model),
        sampling=samplers.planned(worker, of_chain, asked.seed),
    )
    has_devices = chosen.n_gpu_layers != 0
    plan = Plan(
        file=planned.file,
        model=planned.model,
        machine=here,
        settings=chosen,
        prompt=source,
        cases=cases,
        n_repeat=n_repeat,
        refused={},
        warnings=(
            *planned.notes,
            *_on_experts(planned, source),
            *_warnings(asked, cases, here, planned.model),
            *waiting.warnings(asked.wait, build.openmp),
        ),
        until=until,
        may_change_repeats=repeat is None and until is None and every is None,
        setup=setup,
        tensors=_tensors(worker, planned) if has_devices else planned.tensors,
        free=worker.free_memory() if has_devices else {},
        auto=asked if asked.n_gpu_layers == AUTO else None,
    )
    return placement.checked(plan)


def _cases(lengths: Sequence[int], gen: int, every: int | None) -> tuple[Case, ...]:
    check_number("gen", gen, MAX_TOKENS)
    if every is not None:
        check_number("every", every, max(lengths))
    cases = tuple(Case(length, gen, every) for length in lengths)
    most = max(case.n_generated for case in cases)
    if most > MAX_TOKENS:
        hint = f"At most {MAX_TOKENS:,}: increase --every."
        raise LabError(f"The sweep would generate {plural(most, 'token')}.", hint)
    return cases


def _on_experts(planned: _PlannedModel, source: prompts.Source) -> list[str]:
    """A warning of random tokens where the text decides which experts are read."""
    is_real = planned.file.source != catalog.SYNTHETIC
    if is_real and planned.model.n_expert and source.text is None:
        return [RANDOM_EXPERTS]
    return []


def _n_repeat(repeat: int | None, until: Until | None) -> int:
    """The planned rounds; with `until` at least the pilot rounds."""
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    check_number("repeat", n_repeat, 10_000)
    if until is None:
        return n_repeat
    return min(max(n_repeat, N_PILOT), until.max_repeats)


def _random_prompt(asked: AskedSettings, model: str) -> prompts.Source:
    """The only prompt of a model with random weights."""
    if asked.prompt not in (prompts.TEXT, prompts.RANDOM):
        message = f"{model} has random weights, so it cannot read {asked.prompt}."
        raise LabError(message, "Use --prompt random.")
    return prompts.source(prompts.RANDOM)


def _settings(
    asked: AskedSettings,
    cases: Sequence[Case],
    source: prompts.Source,
    here: Machine,
    model: Model,
) -> Settings:
    """The settings as asked, with what the lab resolves; for automatic placement all layers, until
    it is known what fits."""
    n_threads = asked.threads or machine.default_threads()
    n_offloaded = 0
    if machine.accelerators(here.devices) and not asked.is_on_cpu:
        if isinstance(asked.n_gpu_layers, int):
            n_offloaded = asked.n_gpu_layers
        else:
            n_offloaded = -1 if model.n_layer is None else model.n_layer + 1
    fields = {setting.recorded: getattr(asked, name) for name, setting in table().items()}
    fields |= {
        "n_ctx": max(case.n_prompt + case.n_gen for case in cases),
        "n_ubatch": min(asked.batch, asked.ubatch),
        "n_threads": n_threads,
        "n_threads_batch": asked.threads_batch or n_threads,
        "n_gpu_layers": n_offloaded,
        "prompt": source.name,
        "prompt_sha256": source.sha256,
        "kv_unified": asked.is_unified,
    }
    fields["flash_attn_resolved"] = flash_of_architecture(model.arch)
    if fields["flash_attn_resolved"] and asked.cache_type_v not in UNPACKED_TYPES:
        what = (
            f"A {asked.cache_type_v} V cache needs flash attention, which llama.cpp switches off "
            f"for {model.arch}."
        )
        raise LabError(what, "Use --cache-type-v f16.")
    fields |= placement.settings(asked, n_offloaded, here.devices, model)
    return Settings(**fields)


def process_setup(asked: AskedSettings) -> ProcessSetup:
    """What the child starts with. LabError for a library or a server that cannot be used."""
    names = {field.name for field in dataclasses.fields(ProcessSetup)}
    fields = {name: getattr(asked, name) for name in table() if name in names}
    fields["lib"] = builds.folder_of(asked.lib)
    fields["rpc"] = placement.rpc_servers(asked)
    return ProcessSetup(**fields)


def _warnings(
    asked: AskedSettings, cases: Sequence[Case], here: Machine, model: Model
) -> list[str]:
    warnings = list(placement.warnings(asked, here.devices, model))
    n_threads = max(asked.threads or 1, asked.threads_batch or 1)
    if here.cpu_quota is not None and n_threads > here.cpu_quota:
        quota = machine.cores_in_words(here.cpu_quota)
        warnings.append(
            f"The container's CPU quota is {quota}: {n_threads} threads use it up early, and then "
            "all wait for the next period (0.1 s by default)."
        )
    elif here.n_cores_usable and n_threads > here.n_cores_usable:
        warnings.append(
            f"This machine has {here.n_cores_usable} cores: with more threads the threads wait for "
            "each other, and every step becomes many times slower."
        )
    n_trained = model.n_ctx_train
    if n_trained:
        beyond = [case.n_prompt for case in cases if case.n_prompt + case.n_gen > n_trained]
        if beyond:
            warnings.append(
                f"{join(beyond)} prompt tokens and {cases[0].n_gen} more exceed the {n_trained:,} "
                f"tokens that {model.name} was trained for: timing is valid; text quality is not."
            )
    return warnings


class _PlannedModel(NamedTuple):
    """A model's file and header; of a missing model its shape, its tensors and a note."""

    file: catalog.ModelFile
    model: Model
    tensors: tuple[Tensor, ...] = ()
    notes: tuple[str, ...] = ()


def _model(worker: Worker, text: str, watch: obtain.ShowTransfer | None) -> _PlannedModel:
    """The model of a plan. Without `watch` a missing model, or one that the worker cannot read, is
    planned from its shape in the catalog."""
    spec = catalog.parse(text) if watch else catalog.parse(text, or_shape=True)
    entry = spec.entry
    is_readable = worker.reads_files and obtain.locate(spec) is not None
    if watch or entry is None or is_readable:
        file = obtain.obtain(spec, worker, watch, machine.memory_available())
        return _PlannedModel(file, obtain.read(worker, spec, file))
    quantization = spec.quantization or entry.usual_quantization
    name = synthetic.quantization_name(quantization)
    tensors = []
    for tensor in synthetic.tensors(entry.shape, name):
        tensors.append(Tensor(tensor.name, tensor.n_bytes, tensor.type, tensor.dimensions))
    note = (
        f"{spec.text} is not on this machine: planned from its shape ({entry.shape_source}) "
        f"in {quantization}."
    )
    file = catalog.ModelFile(entry.name, spec.source, Path())
    model = synthetic.model_of(entry, quantization)
    return _PlannedModel(file, model, tuple(tensors), (note,))


def _tensors(worker: Worker, planned: _PlannedModel) -> tuple[Tensor, ...]:
    """The tensors of a model; of a file those in its header."""
    return planned.tensors or worker.tensors(planned.file.path)


def with_cases(plan: Plan, cases: Sequence[Case], write: Write) -> Plan:
    """The same plan for other cases with their own scripts. LabError for a case that chooses too
    many tokens."""
    settings = with_room(plan.settings, cases)
    changed = dataclasses.replace(plan, cases=tuple(cases), write=write, settings=settings)
    changed = placement.checked(changed)
    for case in changed.cases:
        if case in changed.refused:
            continue
        n_chosen = changed.n_tokens(case)[1]
        if n_chosen > MAX_TOKENS:
            hint = f"The maximum is {MAX_TOKENS:,}."
            raise LabError(f"{case.name} would generate {plural(n_chosen, 'token')}.", hint)
    return changed


def join(numbers: Sequence[int]) -> str:
    return join_and([f"{n:,}" for n in sorted(numbers)])
