"""What is compared: files of one model, types of its KV cache, or both; the first is the
reference."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.app.options import seconds_of
from lab.core.asked_settings import check_number
from lab.errors import LabError
from lab.features.quant import caches
from lab.features.quant.texts import bin_ends, texts_of
from lab.models import catalog, obtain
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner import trial
from lab.runner.cases import Plan

PART = "quant"  # of the runs that show the speed of files
EMBEDDED = ("F16", "Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M")  # of the embedded model, a Q4_1 itself
BLOCKS = 10
BUDGET = "10min"
BUDGET_OF_CACHE = "5min"
PROMPT_LEN = 256
DEPTH = 2048  # tokens of the texts with --cache
SHORTEST_DEPTH = 64
GEN = 32


@dataclass(frozen=True)
class QuantPlan:
    """The plans by variant (the first is the reference), and the texts by kind."""

    plans: dict[str, Plan]
    texts: dict[str, str]
    prompt: str  # the option --prompt; "" for the lab's own texts
    budget_s: float  # of the whole command, from `began` on
    repeat: int
    began: float = field(default_factory=time.monotonic)
    depth: int | None = None  # tokens of each text with --cache; None: files are compared

    @property
    def end(self) -> float:
        """When the budget is spent, by time.monotonic()."""
        return self.began + self.budget_s

    @property
    def reference(self) -> str:
        return next(iter(self.plans))

    @property
    def candidates(self) -> list[str]:
        return [name for name in self.plans if name != self.reference]


def plan(
    worker: Worker,
    *files: str,
    cache: str | Sequence[str] = "",
    prompt: str | None = None,
    budget: str | float | None = None,
    repeat: int = BLOCKS,
    prompt_len: int | None = None,
    gen: int = GEN,
    **settings: Any,
) -> QuantPlan:
    """Check everything that can be checked before the models are loaded.

    LabError for files that are not of one model, or do not fit into memory together, and for cache
    types that llama.cpp refuses.
    """
    began = time.monotonic()
    types = caches.types_of(cache) if cache else []
    depth = None
    lengths = [PROMPT_LEN if prompt_len is None else prompt_len]
    if types:
        caches.check(types, settings)
        depth = DEPTH if prompt_len is None else prompt_len
        check_number("prompt_len", depth, MAX_TOKENS, SHORTEST_DEPTH)
        lengths = bin_ends(depth)
        if len(files) < 2:
            settings["model"] = files[0] if files else catalog.DEFAULT
    check_number("repeat", repeat, 1000)
    budget_s = seconds_of(budget or (BUDGET_OF_CACHE if types else BUDGET))
    texts = texts_of(prompt, depth or 0)
    plans = trial.plan(
        worker,
        trial.named(variants_of(files, types)),
        repeat,
        prompt_len=lengths,
        gen=gen,
        **settings,
    )
    if not types or len(files) > 1:
        check_files(worker, plans, max(1, len(types)))
    for name, plan_of_variant in plans.items():
        plans[name] = replace(plan_of_variant, part=PART)
        if depth:
            caches.check_model(types, plan_of_variant.model, depth)
    return QuantPlan(plans, texts, prompt or "", budget_s, repeat, began, depth)


def variants_of(
    files: Sequence[str], types: Sequence[caches.CacheTypes]
) -> list[Mapping[str, object]]:
    """The settings of each variant: files, cache types of one file, or each type of each file."""
    if not types:
        specs = list(expanded(files))
        check_variants(specs, example_for(specs[0]))
        return [{"model": spec} for spec in specs]
    if len(files) < 2:
        return [pair.settings for pair in types]
    if len(set(files)) < len(files):
        raise LabError("A file is named twice.", "Name each once.")
    return [{"model": spec, **pair.settings} for spec in files for pair in types]


def check_variants(names: Sequence[str], example: str) -> None:
    if len(names) < 2:
        raise LabError(
            f"There is nothing to compare {names[0]} with.",
            f"Name at least two, the reference first: {example}",
        )
    if len(set(names)) < len(names):
        raise LabError("A file or type is named twice.", "Name each once.")


def example_for(spec: str) -> str:
    """A command that compares a file with a reference."""
    name, _, kind = spec.partition(":")
    if name not in catalog.entries():
        return f"lab quant REFERENCE.gguf {spec}"
    reference = "Q8_0" if kind == "F16" else "F16"
    return f"lab quant {name}:{reference} {spec}"


def check_files(worker: Worker, plans: Mapping[str, Plan], n_types: int) -> None:
    """LabError for two names of one file, and for files with different vocabularies.

    Each file has `n_types` plans, one after the other.
    """
    reference, *candidates = list(plans)[::n_types]
    names: dict[Path, str] = {}
    for name in (reference, *candidates):
        plan_of_file = plans[name]
        path = plan_of_file.file.path.resolve()
        if path in names:
            raise LabError(f"{names[path]} and {name} are one file.", "Name each file once.")
        names[path] = name
    for name in candidates:
        path = plans[reference].file.path
        difference = worker.vocabularies_differ(path, plans[name].file.path)
        if difference:
            raise LabError(
                f"{reference} and {name} have different vocabularies: {difference}.",
                "Compare files of one model.",
            )


def expanded(files: Sequence[str]) -> dict[str, int]:
    """The files to compare, with bytes of those that a catalog's name stands for (0: others)."""
    if list(files) in ([], [catalog.DEFAULT]):
        return {f"{catalog.DEFAULT}:{kind}": 0 for kind in EMBEDDED}
    entry = catalog.entries().get(files[0])
    if len(files) == 1 and entry and entry.repo and entry.quantizations:
        specs = {}
        for kind, n_bytes in entry.quantizations.items():
            specs[f"hf:{entry.repo}:{kind}"] = n_bytes
        return specs
    if len(set(files)) < len(files):
        raise LabError("A file or type is named twice.", "Name each once.")
    return dict.fromkeys(files, 0)


def missing(files: Sequence[str]) -> dict[str, int]:
    """Bytes to download, by SPEC, of the quantizations that a name of the catalog stands for."""
    sizes = {}
    for spec, n_bytes in expanded(files).items():
        if n_bytes and not obtain.locate(catalog.parse(spec)):
            sizes[spec] = n_bytes
    return sizes
