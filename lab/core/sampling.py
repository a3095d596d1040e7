"""How tokens are chosen: a chain of llama.cpp's samplers, with llama-server's names and defaults.

Without a chain the most probable token is chosen (greedy). As soon as one of the options is given,
all others have the values that llama-server has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lab.core.asked_settings import flag
from lab.core.bounds import Number, Seed, Text, Whole
from lab.errors import LabError

GREEDY = "greedy"
DEFAULT = "llama-server's default"

ORDER = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    "temperature",
)
"""Samplers in the order in which llama-server applies them."""

NAMES = (*ORDER, "infill")
NEED_VOCABULARY = ("dry", "infill")

ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature"}
"""Names that llama-server takes too."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A chain of samplers. The defaults are llama-server's."""

    temp: Number = 0.8
    top_k: Whole = 40  # 0: all tokens
    top_p: Number = 0.95  # 1: off
    min_p: Number = 0.05  # 0: off
    typical: Number = 1.0  # 1: off
    repeat_penalty: Number = 1.0  # 1: off
    repeat_last_n: Whole = 64  # tokens that the three penalties look at
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    dry_multiplier: Number = 0.0  # 0: off
    xtc_probability: Number = 0.0  # 0: off
    mirostat: Whole = 0  # 1, 2: its version, in the place of all samplers but the temperature
    samplers: tuple[Text, ...] = ORDER
    seed: Seed = 1
    grammar: tuple[Text, ...] = ()  # the lines of a GBNF grammar
    grammar_file: Text | None = None  # the name of its file
    json_schema_file: Text | None = None  # the name of the schema that it was made of
    grammar_first: bool = False  # or a token is chosen, checked, and chosen again

    @property
    def needs_vocabulary(self) -> bool:
        """Whether its samplers read the texts of tokens, which random weights do not have."""
        if self.grammar:
            return True
        if self.mirostat:
            return False
        return "infill" in self.samplers or bool(self.dry_multiplier)

    @property
    def label(self) -> str:
        """The chain in words: what differs from llama-server's default; a grammar by its sum."""
        parts: list[str] = []
        for name, value in keywords(self).items():
            if name not in FILES:
                parts.append(f"{name} {_in_words(value)}")
        if self.grammar:
            text = "\n".join(self.grammar)
            file = self.json_schema_file or self.grammar_file
            parts.append(f"grammar {file} {hashlib.sha256(text.encode()).hexdigest()[:8]}")
        if self.grammar_first:
            parts.append("grammar first")
        return ", ".join(parts) or DEFAULT


FILES = ("grammar_file", "json_schema_file")
"""Options that name files."""


class SamplerOption(NamedTuple):
    """An option: its type, its range, and its help."""

    type: type
    least: float
    most: float
    help: str


@cache
def table() -> dict[str, SamplerOption]:
    """The options of a chain, in llama-server's words, from sampling.toml."""
    text = Path(__file__).with_name("sampling.toml").read_text(encoding="utf-8")
    options: dict[str, SamplerOption] = {}
    for name, entry in tomllib.loads(text).items():
        default = getattr(Sampling(), name)
        if isinstance(default, int | float):
            help = f"{entry['help']}  [{default:g}]"
            options[name] = SamplerOption(type(default), entry["least"], entry["most"], help)
        else:
            options[name] = SamplerOption(str, 0, 0, entry["help"])
    return options


def split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a chain that were given, and all other settings."""
    of_chain: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in table():
            others[name] = value
        elif value is not None:
            of_chain[name] = value
    return of_chain, others


def chain(asked: Mapping[str, Any], seed: int) -> Sampling | None:
    """The chain that options ask for, without the contents of their files; None for greedy.

    LabError for a value that no sampler takes.
    """
    if not asked:
        return None
    if not set(FILES).isdisjoint(asked) and len(set(FILES) & asked.keys()) > 1:
        raise LabError(
            "--grammar-file and --json-schema-file are given both.", "Give one of them."
        )
    values = dict(asked)
    for name, value in asked.items():
        option = table()[name]
        if option.type is not str and not _is_in_range(value, option):
            what = f"{flag(name)} {value} is not possible."
            hint = f"Give a number from {option.least:g} to {option.most:g}."
            raise LabError(what, hint)
    if "samplers" in values:
        values["samplers"] = sampler_names(values["samplers"])
    return Sampling(seed=seed % 2**32, **values)


def _is_in_range(value: object, option: SamplerOption) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    if not math.isfinite(value):
        return False
    is_whole = option.type is float or isinstance(value, int)
    return is_whole and option.least <= value <= option.most


def sampler_names(asked: str | tuple[str, ...]) -> tuple[str, ...]:
    """The samplers of a list. LabError for none, and for a name that llama.cpp does not have."""
    names = asked
    if isinstance(asked, str):
        names = tuple(filter(str.strip, asked.replace(",", ";").split(";")))
    if not names:
        raise LabError("--samplers names no sampler.", f"Use some of {'; '.join(NAMES)}.")
    samplers: list[str] = []
    for text in names:
        name = text.strip().replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in NAMES:
            raise LabError(
                f"llama.cpp has no sampler {text.strip()!r}.",
                f"Use some of {'; '.join(NAMES)}.",
            )
        samplers.append(name)
    return tuple(samplers)


def keywords(sampling: Sampling | None) -> dict[str, object]:
    """The options that ask for a chain; those with llama-server's values are left out."""
    if sampling is None:
        return {}
    differing: dict[str, object] = {}
    for each in dataclasses.fields(Sampling):
        value = getattr(sampling, each.name)
        if each.name in table() and value != each.default:
            differing[each.name] = value
    if "samplers" in differing:
        differing["samplers"] = ";".join(sampling.samplers)
    return differing or {"temp": sampling.temp}


def _in_words(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
