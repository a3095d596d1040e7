"""The parts of model and settings: equal, different, or not given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lab.core import memory
from lab.core.asked_settings import AUTO, table
from lab.core.record import UNKNOWN_THREADS, Record
from lab.core.sampling import GREEDY, keywords
from lab.errors import printable
from lab.features.why.figure import Figure
from lab.features.why.parts import (
    CHOOSING,
    EQUAL,
    MODEL,
    MORE_SETTINGS,
    QUANTIZATION,
    GapPart,
    Pair,
    equal,
    unknown,
)
from lab.models import catalog

GROUPS = {
    "threads": ("threads", "threads_batch"),
    "ubatch": ("batch", "ubatch"),
    "flash attention": ("flash_attn",),
    "cache type": ("cache_type_k", "cache_type_v"),
}
"""Settings that change together; any others are one group. The cheapest come first."""

OTHER_SETTINGS = "other settings"
NOT_COMPARED = ("prompt", "seed", "lib")
MISSING = "missing"
SIZE = r"(?:\d{1,3}x)?\d{1,4}(?:\.\d{1,3})?[bm]"
"""The word of a model's name that says how many parameters it has, such as 1.5b or 8x7b."""

SAME_PARAMETERS = 0.005  # share by which rounded numbers of parameters may differ


def of_model(pair: Pair, specs: tuple[str | None, str | None]) -> GapPart:
    """The part of the model, or of its quantization alone.

    `specs`: what a trial may load of each.
    """
    if pair.fast.records and pair.slow.records:
        return of_recorded_models(pair, specs)
    if not (pair.fast.model and pair.slow.model):
        return unknown(MODEL, "not given for both")
    same = sameness(pair.fast, pair.slow)
    if same:
        return equal(MODEL, f"{EQUAL} by {same}")
    return unknown(MODEL, models_in_words(pair))


def of_recorded_models(pair: Pair, specs: tuple[str | None, str | None]) -> GapPart:
    """The part of two models of records; different ones can be measured if both specs are known."""
    fast = pair.fast.records[0].model
    slow = pair.slow.records[0].model
    if catalog.spec_of(fast) == catalog.spec_of(slow):
        sums = [model.sha256[:8] for model in (fast, slow) if model.sha256]
        if len(set(sums)) < 2:
            return equal(MODEL)
        return unknown(MODEL, f"the files differ: SHA-256 {' and '.join(sums)}")
    name = QUANTIZATION if fast.name == slow.name else MODEL
    if None in specs or specs[0] == specs[1]:
        return unknown(name, models_in_words(pair))
    return unknown(name, models_in_words(pair), changes={"model": specs[1]})


def models_in_words(pair: Pair) -> str:
    """Both models with their letters."""
    names = [f"{figure.model_label} in {letter}" for letter, figure in pair.sides]
    return printable(", ".join(names))


def sameness(fast: Figure, slow: Figure) -> str:
    """By what two models are the same: their names, a file's name, or parameters; "" if they are
    not.

    Names alone do not tell quantizations apart where only one of them is given.
    """
    quantizations = {quantization_of(fast), quantization_of(slow)} - {None}
    if len(quantizations) > 1:
        return ""
    has_parameters = bool(fast.n_params and slow.n_params)
    if has_parameters:
        ratio = (fast.n_params or 1) / (slow.n_params or 1)
        if abs(ratio - 1) > SAME_PARAMETERS:
            return ""
    for first in names_of(fast):
        for second in names_of(slow):
            if is_part_of(first, second) or is_part_of(second, first):
                return "name"
    if has_parameters and len(quantizations) == 1:
        return "quantization and number of parameters"
    return ""


def names_of(figure: Figure) -> list[list[str]]:
    """The names of a figure's model in words: as the text gives it, and of its file."""
    names = [figure.model_label]
    if figure.records:
        names.append(figure.records[0].model.file)
    return [words_of_name(name) for name in names if name]


def words_of_name(name: str) -> list[str]:
    """The words of a name in small letters, without the ending of a file: 1.5b is one word."""
    return re.findall(r"[a-z0-9]+(?:\.[0-9][a-z0-9]*)*", name.lower().removesuffix(".gguf"))


def is_part_of(shorter: Sequence[str], longer: Sequence[str]) -> bool:
    """Whether a name stands within another, word by word. A part must say the model's size."""
    if shorter == longer:
        return True
    if not any(re.fullmatch(SIZE, word) for word in shorter):
        return False
    n_words = len(shorter)
    places = range(len(longer) - n_words + 1)
    return any(longer[place : place + n_words] == shorter for place in places)


def plain_name(name: str) -> str:
    """A name in small letters and digits, without the ending of a file."""
    return re.sub(r"[^a-z0-9]", "", name.lower().removesuffix(".gguf"))


def quantization_of(figure: Figure) -> str | None:
    """The quantization without its marks: q4km of Q4_K_M and of `Q4_K - Medium`."""
    if figure.quantization is None:
        return None
    return plain_name(figure.quantization)


def of_settings(pair: Pair) -> list[GapPart]:
    """The parts of the groups of settings that differ, and one for settings of one side only."""
    fast = pair.fast.settings
    slow = pair.slow.settings
    group_of = dict[str, str]()
    for group, names in GROUPS.items():
        group_of |= dict.fromkeys(names, group)
    for name in table():
        group_of.setdefault(name, OTHER_SETTINGS)
    changes = dict[str, dict[str, Any]]()
    lacking = dict[str, str]()
    for name, group in group_of.items():
        ends = fast.get(name, MISSING), slow.get(name, MISSING)
        if name in NOT_COMPARED or ends[0] == ends[1]:
            continue
        if MISSING in ends or AUTO in ends:
            lacking.setdefault(group, lack_in_words(pair, ends))
        else:
            changes.setdefault(group, {})[name] = slow[name]
    lacking = {group: lack for group, lack in lacking.items() if group not in changes}
    if "flash attention" in changes and "cache type" in changes:  # one may need the other
        together = changes.pop("flash attention") | changes.pop("cache type")
        changes["flash attention and cache type"] = together
    parts = list[GapPart]()
    for group, values in changes.items():
        parts.append(unknown(group, values_in_words(pair, list(values)), changes=values))
    return parts + of_lacking_settings(lacking)


def of_lacking_settings(lacking: Mapping[str, str]) -> list[GapPart]:
    """The part of the groups of settings that cannot be compared, by what is lacking."""
    groups_of_lack = dict[str, list[str]]()
    for group, lack in lacking.items():
        groups_of_lack.setdefault(lack, []).append(group)
    if not groups_of_lack:
        return []
    reasons = [f"{lack}: {', '.join(groups)}" for lack, groups in groups_of_lack.items()]
    return [unknown(MORE_SETTINGS, "; ".join(reasons))]


def lack_in_words(pair: Pair, ends: tuple[object, object]) -> str:
    """Which side does not give a setting, or leaves it to llama.cpp."""
    for letter, value in zip(pair.letters, ends, strict=True):
        if value == MISSING:
            return f"not given for {letter}"
    of_auto = pair.letters[0] if ends[0] == AUTO else pair.letters[1]
    return f"{AUTO} in {of_auto}"


def of_sampling(pair: Pair) -> list[GapPart]:
    """The part of two chains of samplers that differ; none unless both sides are records."""
    if not (pair.fast.records and pair.slow.records):
        return []
    fast = pair.fast.records[0].settings.sampling
    slow = pair.slow.records[0].settings.sampling
    names = [sampling.label if sampling else GREEDY for sampling in (fast, slow)]
    if names[0] == names[1]:
        return []
    letters = pair.letters
    reason = printable(f"{names[0]} in {letters[0]}; {names[1]} in {letters[1]}")
    changes: dict[str, Any] = dict.fromkeys(keywords(fast))
    return [unknown(CHOOSING, reason, changes=changes | keywords(slow))]


def values_in_words(pair: Pair, names: list[str]) -> str:
    """The values of settings on both sides."""
    sides = list[str]()
    for letter, figure in pair.sides:
        values = [f"{name} {in_words(figure.settings[name])}" for name in names]
        sides.append(f"{', '.join(values)} in {letter}")
    return printable("; ".join(sides))


def in_words(value: object) -> str:
    if value is None:
        return "all"
    return str(value)


def settings_of(record: Record) -> dict[str, Any]:
    """The settings of a record as keywords of AskedSettings, with resolved values.

    None stands for all layers, as in figures of other programs. What is unknown is left out.
    """
    settings = record.settings
    values = dict[str, Any]()
    for name, setting in table().items():
        value = getattr(settings, setting.record_name or name)
        if value is not None and name not in ("prompt", "seed"):
            values[name] = value
    values["flash_attn"] = settings.flash_attention
    values["kv_unified"] = "on" if settings.kv_unified else "off"
    if UNKNOWN_THREADS in (settings.n_threads, settings.n_threads_batch):
        values.pop("threads")
        values.pop("threads_batch")
    if memory.has_all_layers(settings.n_gpu_layers, record.model):
        values["n_gpu_layers"] = None
    return values
