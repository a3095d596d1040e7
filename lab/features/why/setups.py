"""The parts of model, program and settings: equal, different, or not given."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from lab.core import memory
from lab.core.asked_settings import DEFAULT, table
from lab.core.record import UNKNOWN_THREADS, Record
from lab.core.sampling import GREEDY, keywords
from lab.errors import printable
from lab.features.why import facts
from lab.features.why.facts import Fact, FactOfBoth, compare
from lab.features.why.figure import LONGEST_NAME, Figure, quoted
from lab.features.why.parts import (
    CHOOSING,
    EQUAL,
    LABEL,
    MODEL,
    MORE_SETTINGS,
    OTHER_SETTINGS,
    PROGRAM,
    QUANTIZATION,
    GapPart,
    Pair,
    equal,
    unknown,
)
from lab.features.why.readers.commands import MLX, SGLANG, TABBY, VLLM
from lab.features.why.readers.setup import program_of
from lab.features.why.readers.tables import LLAMA_BENCH, TABLE_OF_A_PERSON
from lab.models import catalog

GROUPS = {
    "threads": ("threads", "threads_batch"),
    "ubatch": ("batch", "ubatch"),
    "GPU layers": ("n_gpu_layers", "n_cpu_moe"),
    "flash attention": ("flash_attn",),
    "cache type": ("cache_type_k", "cache_type_v"),
    "how threads wait": ("wait",),
}
"""Settings that change together; any others are one group. The cheapest come first."""

ASKED_FOR = ("threads", "ubatch", "n_gpu_layers", "flash_attn", "cache_type_k")
"""Settings of llama.cpp that matter for speed: who does not give them is asked."""

NOT_OF_LLAMA = (VLLM, SGLANG, MLX, TABBY)
IDENTITY = (
    *(facts.MODEL, facts.QUANTIZATION, facts.PARAMETERS, facts.FILE_ID, facts.HARDWARE),
    *(facts.BUILD, facts.SPECULATION, facts.SAMPLING, facts.COMMAND),
)
"""Facts with parts of their own."""

NOT_COMPARED = ("prompt", "seed", "lib", *IDENTITY)
SIZE = r"(?:\d{1,3}x)?\d{1,4}(?:\.\d{1,3})?[bm]"
"""The word of a model's name that says how many parameters it has, such as 1.5b or 8x7b."""

SAME_PARAMETERS = 0.005  # share by which rounded numbers of parameters may differ


def of_model(pair: Pair, specs: tuple[str | None, str | None]) -> GapPart:
    """The part of the model, or of its quantization alone.

    `specs`: what a trial may load of each.
    """
    if has_spec(pair.fast) and has_spec(pair.slow):
        return of_recorded_models(pair, specs)
    by_id = compare(pair.facts_in_order, facts.FILE_ID)
    if by_id.is_equal:
        return equal(MODEL, f"{EQUAL} by ID")
    if pair.fast.model and pair.slow.model:
        same = sameness(pair.fast, pair.slow)
        lacking = [
            letter for letter, figure in pair.in_order if quantization_of(figure) is None
        ]
        if same and len(lacking) == 1:
            quantizations = compare(pair.facts_in_order, facts.QUANTIZATION)
            return unknown(QUANTIZATION, quantizations.words, lacking=lacking)
        if same:
            return equal(MODEL, f"{EQUAL} by {same}")
    named = models(pair)
    kinds = [letter for letter, figure in pair.in_order if names_kind(figure, pair)]
    lacking = named.lacking or kinds
    return unknown(MODEL, named.words, differs=not lacking, lacking=lacking)


def names_kind(figure: Figure, pair: Pair) -> bool:
    """Whether a figure names only the kind of the other's model, as llama-bench does: llama 8B."""
    if figure.source != LLAMA_BENCH:
        return False
    opposite = pair.slow if figure is pair.fast else pair.fast
    words = iter(words_of_name(opposite.model_label))
    return all(word in words for word in words_of_name(figure.model_label))


def has_spec(figure: Figure) -> bool:
    """Whether the records of a figure name a file, and not only a model."""
    return bool(figure.records and catalog.spec_of(figure.records[0].model))


def of_recorded_models(pair: Pair, specs: tuple[str | None, str | None]) -> GapPart:
    """The part of two models of records; different ones can be measured if both specs are known."""
    fast = pair.fast.records[0].model
    slow = pair.slow.records[0].model
    if catalog.spec_of(fast) == catalog.spec_of(slow):
        sums = [model.sha256[:8] for model in (fast, slow) if model.sha256]
        if len(set(sums)) < 2:
            return equal(MODEL)
        return unknown(MODEL, f"the files differ: SHA-256 {' and '.join(sums)}", differs=True)
    name = QUANTIZATION if fast.name == slow.name else MODEL
    text = models(pair).words
    if None in specs or specs[0] == specs[1]:
        return unknown(name, text, differs=True)
    return unknown(name, text, differs=True, changes={"model": specs[1]})


def models(pair: Pair) -> FactOfBoth:
    """Both models by their names and quantizations."""
    labels = list[tuple[str, Mapping[str, Fact]]]()
    for letter, figure in pair.in_order:
        labels.append((letter, facts.stated({MODEL: figure.model_label})))
    return compare(labels, MODEL)


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


def quantization_of(figure: Figure) -> str | None:
    """The quantization without its marks: q4km of Q4_K_M and of `Q4_K - Medium`."""
    if figure.quantization is None:
        return None
    plain = re.sub(r"[^a-z0-9]", "", figure.quantization.lower())
    return {"fp16": "f16", "udq": "q"}.get(plain, plain.removeprefix("ud"))


def of_program(pair: Pair) -> list[GapPart]:
    """The part of the programs and their builds; none for two records, which have one of their
    own.
    """
    if pair.fast.records and pair.slow.records:
        return []
    if pair.fast.requests and pair.slow.requests:
        return []
    builds = compare(pair.facts_in_order, facts.BUILD)
    is_one_program = program_of(pair.fast) == program_of(pair.slow) != ""
    if is_one_program and builds.is_equal:
        return [equal(PROGRAM)]
    text = builds.words
    if not is_one_program:
        sources = [f"{figure.source} in {letter}" for letter, figure in pair.in_order]
        text = f"{', '.join(sources)}; build {text}"
    differs = builds.is_different or (
        not is_one_program and "" not in map(program_of, (pair.fast, pair.slow))
    )
    return [unknown(PROGRAM, printable(text), differs=differs, lacking=builds.lacking)]


def of_labels(pair: Pair) -> list[GapPart]:
    """The part of what the author of a text calls the two, in headings or in the row of a table;
    none if both are called the same.
    """
    figures = [figure for _, figure in pair.in_order]
    headings = [str(figure.heading.value) if figure.heading else "" for figure in figures]
    of_rows = [
        figure.about if figure.source == TABLE_OF_A_PERSON else "" for figure in figures
    ]
    for first, second in (headings, of_rows):
        is_model = (first, second) == (figures[0].model, figures[1].model)
        if first != second and first and second and not is_model:
            names = shortened(first, second)
            reason = f"{quoted(names[0])} in A, {quoted(names[1])} in B"
            return [unknown(LABEL, printable(reason), differs=True)]
    return []


def shortened(first: str, second: str) -> tuple[str, str]:
    """Two labels; long ones without the words that both begin with."""
    if max(len(first), len(second)) <= LONGEST_NAME:
        return first, second
    words = [first.split(), second.split()]
    same = list(
        itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False))
    )
    begin = "..." if same else ""
    left = [begin + " ".join(each[len(same) :]) for each in words]
    return left[0], left[1]


def comparisons_of(pair: Pair) -> Iterable[FactOfBoth]:
    """The settings that a side gives, or that are asked for."""
    names = dict.fromkeys([*table(), *pair.fast.facts, *pair.slow.facts])
    are_of_llama = all(program_of(figure) not in NOT_OF_LLAMA for _, figure in pair.sides)
    for name in names:
        if name in NOT_COMPARED:
            continue
        comparison = compare(pair.facts_in_order, name)
        is_given = len(comparison.lacking) < len(pair.sides)
        if is_given or (are_of_llama and name in ASKED_FOR):
            yield comparison


GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def of_settings(pair: Pair) -> list[GapPart]:
    """The parts of settings: of groups that a trial can measure, of others, of those not given."""
    can_change = set(pair.fast.settings) & set(pair.slow.settings)
    changed = dict[str, list[FactOfBoth]]()
    different = dict[str, list[FactOfBoth]]()
    lacking = list[FactOfBoth]()
    for comparison in comparisons_of(pair):
        group = GROUP_OF.get(comparison.name, OTHER_SETTINGS)
        if comparison.is_different and comparison.name in can_change:
            changed.setdefault(group, []).append(comparison)
        elif comparison.is_different or comparison.is_in_one_command:
            different.setdefault(group, []).append(comparison)
        elif comparison.lacking or comparison.is_open:
            lacking.append(comparison)
    parts = of_changes(pair, changed)
    names = {part.name for part in parts}
    for group, comparisons in different.items():
        name = OTHER_SETTINGS if group in names else group
        parts.append(unknown(name, in_words(comparisons), differs=True))
    shown = {part.name for part in parts}
    left = [each for each in lacking if GROUP_OF.get(each.name) not in shown]
    if left:
        silent = [letter for letter, figure in pair.in_order if not gives_settings(figure)]
        parts.append(unknown(MORE_SETTINGS, in_words(left), lacking=silent))
    return parts


def in_words(comparisons: Iterable[FactOfBoth]) -> str:
    """Settings with the values of both sides; those with the same words stand together."""
    names_by_words = dict[str, list[str]]()
    for comparison in comparisons:
        names_by_words.setdefault(comparison.words, []).append(comparison.name)
    return "; ".join(f"{', '.join(names)} {each}" for each, names in names_by_words.items())


def gives_settings(figure: Figure) -> bool:
    """Whether a side has a command, or all settings that are asked for."""
    has_command = bool(figure.records) or facts.COMMAND in figure.facts
    return has_command or all(name in figure.facts for name in ASKED_FOR)


def of_changes(pair: Pair, changed: dict[str, list[FactOfBoth]]) -> list[GapPart]:
    """The parts of the groups of settings that a trial can change."""
    if "flash attention" in changed and "cache type" in changed:  # one may need the other
        together = changed.pop("flash attention") + changed.pop("cache type")
        changed["flash attention and cache type"] = together
    parts = list[GapPart]()
    slow = pair.slow.settings
    for group, comparisons in changed.items():
        values = {each.name: slow[each.name] for each in comparisons}
        parts.append(unknown(group, in_words(comparisons), differs=True, changes=values))
    return parts


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
    changes: dict[str, object] = dict.fromkeys(keywords(fast))
    return [unknown(CHOOSING, reason, differs=True, changes=changes | keywords(slow))]


def facts_of(record: Record, model: str) -> dict[str, Fact]:
    """The setup of a record; what is unknown is left out."""
    record_facts = facts.stated(settings_of(record))
    for name, value in settings_of(record).items():
        record_facts.setdefault(name, Fact(value))  # None stands for all layers
    sampling = record.settings.sampling
    return record_facts | facts.stated(
        {
            facts.MODEL: model,
            facts.QUANTIZATION: record.model.quantization,
            facts.PARAMETERS: record.model.n_params,
            facts.BUILD: record.machine.llama_cpp_commit,
            facts.SPECULATION: facts.NO_DRAFTS,
            facts.SAMPLING: sampling.label if sampling else facts.GREEDY,
        }
    )


def settings_of(record: Record) -> dict[str, object]:
    """The settings of a record as keywords of AskedSettings, with resolved values.

    None stands for all layers, as in figures of other programs. What is unknown is left out.
    """
    settings = record.settings
    values = dict[str, object]()
    for name, setting in table().items():
        value = getattr(settings, setting.recorded)
        if value is not None and name not in ("prompt", "seed"):
            values[name] = value
    if settings.flash_attention is not None:
        values["flash_attn"] = settings.flash_attention
    values["kv_unified"] = "on" if settings.kv_unified else "off"
    if settings.wait_resolved is not None:
        values["wait"] = settings.thread_wait or DEFAULT
    if UNKNOWN_THREADS in (settings.n_threads, settings.n_threads_batch):
        values.pop("threads")
        values.pop("threads_batch")
    if memory.has_all_layers(settings.n_gpu_layers, record.model):
        values["n_gpu_layers"] = None
    return values
