"""What is compared: files of one model, or cache types of one file; the first is the reference."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lab.app.options import seconds_of
from lab.core.asked_settings import CACHE_TYPES, check_number
from lab.errors import LabError
from lab.features.quant.texts import texts_of
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import trial
from lab.runner.cases import Plan

PART = "quant"  # of the runs that show the speed of files
EMBEDDED = ("F16", "Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M")  # of the embedded model, a Q4_1 itself
EXACT_CACHE_TYPES = ("f32", "f16", "bf16")
BLOCKS = 10
BUDGET = "10min"
PROMPT_LEN = 256
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
    cache_type: str | Sequence[str] = "",
    prompt: str | None = None,
    budget: str | float = BUDGET,
    repeat: int = BLOCKS,
    prompt_len: int = PROMPT_LEN,
    gen: int = GEN,
    **settings: Any,
) -> QuantPlan:
    """Check everything that can be checked before the models are loaded.

    LabError for files that are not of one model, or do not fit into memory together.
    """
    began = time.monotonic()
    types = cache_types(cache_type)
    shared = {"prompt_len": [prompt_len], "gen": gen, **settings}
    variants: list[Mapping[str, Any]]
    if types:
        if len(files) > 1:
            raise LabError(
                f"--cache-type compares one file, and {len(files)} are named.", "Name one."
            )
        shared["model"] = files[0] if files else catalog.DEFAULT
        variants = [{"cache_type_k": kind, "cache_type_v": kind} for kind in types]
        check_variants(types, "--cache-type f16,q8_0,q4_0")
    else:
        specs = list(expanded(files))
        variants = [{"model": spec} for spec in specs]
        check_variants(specs, example_for(specs[0]))
    check_number("repeat", repeat, 1000)
    budget_s = seconds_of(budget)
    texts = texts_of(prompt)
    plans = trial.plan(worker, trial.named(variants), repeat, **shared)
    if not types:
        check_files(worker, plans)
    for name, plan_of_variant in plans.items():
        plans[name] = replace(plan_of_variant, part=PART)
    return QuantPlan(plans, texts, prompt or "", budget_s, repeat, began)


def cache_types(option: str | Sequence[str]) -> list[str]:
    """The types of the option --cache-type. LabError for unknown ones and an inexact reference."""
    names = option.split(",") if isinstance(option, str) else option
    types = [name.strip() for name in names if name.strip()]
    for kind in types:
        if kind not in CACHE_TYPES:
            raise LabError(
                f"{kind!r} is not a cache type.", f"Use some of {', '.join(CACHE_TYPES)}."
            )
    exact = [kind for kind in types if kind in EXACT_CACHE_TYPES]
    if exact and types[0] not in exact:
        raise LabError(
            f"{types[0]} comes first, so it would be the reference of {exact[0]}.",
            f"Name the reference first: --cache-type {exact[0]},{types[0]}",
        )
    return types


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


def check_files(worker: Worker, plans: Mapping[str, Plan]) -> None:
    """LabError for two names of one file, and for files with different vocabularies."""
    reference, *candidates = plans
    names: dict[Any, str] = {}
    for name, plan_of_file in plans.items():
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
