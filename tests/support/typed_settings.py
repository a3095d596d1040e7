"""Write `lab/core/keywords.py`, the types of settings as keyword arguments, from their tables.

python -m tests.support.typed_settings
"""

from __future__ import annotations

from pathlib import Path

from lab.core import sampling
from lab.core.asked_settings import table

FILE = Path(__file__).parents[2] / "lab/core/keywords.py"
HEAD = '''"""The types of settings as keyword arguments of public functions.

Generated from the tables of settings: python -m tests.support.typed_settings
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from lab.core.arguments import StrPath, Texts

'''
WITH_A_MEANING_OF_ITS_OWN = ("prompt", "device", "mmap")
"""Settings that some functions have as an argument of another meaning."""

OWN_MEANING = ("prompt", "device", "mmap")
"""Settings that some functions have as an argument of another meaning."""

OF_LISTS = {"tensor_split": "str | Sequence[float]", "lib": "StrPath"}


def literal(words: list[str]) -> str:
    quoted = ", ".join(f'"{word}"' for word in words)
    return f"Literal[{quoted}]"


def type_of(name: str) -> str:
    setting = table()[name]
    if setting.choices:
        alternative = " | bool" if {"on", "off"} <= set(setting.choices) else ""
        return literal(list(setting.choices)) + alternative
    if bool in table()[name].types:
        return "bool"
    if int in table()[name].types:
        return "int | " + literal(list(setting.words)) if setting.words else "int"
    return OF_LISTS.get(name, "Texts")


def written() -> str:
    """The file."""
    types_of_engine = {name: type_of(name) for name in table()}
    shared = "CacheType"
    cache_type = types_of_engine["cache_type_k"]
    lines = ["class CommonSettings(TypedDict, total=False):"]
    lines.append('    """Settings that mean the same in every function."""\n')
    for name, kind in types_of_engine.items():
        if name not in OWN_MEANING:
            lines.append(f"    {name}: {shared if kind == cache_type else kind} | None")
    lines.append("\n\nclass EngineSettings(CommonSettings, total=False):")
    lines.append(
        '    """How llama.cpp runs a model; `lab measure --help-all` explains each."""\n'
    )
    lines += [f"    {name}: {types_of_engine[name]} | None" for name in OWN_MEANING]
    lines.append("\n\nclass SamplerSettings(TypedDict, total=False):")
    lines.append('    """How tokens are chosen; without any of these: greedy."""\n')
    for name, option in sampling.table().items():
        kind = "Texts" if name == "samplers" else option.type.__name__
        kind = "StrPath" if name in sampling.FILES else kind
        lines.append(f"    {name}: {kind} | None")
    alias = f"{shared} = {cache_type}\n"
    body = "\n".join(lines)
    return f"{HEAD}{alias}\n\n{body}\n"


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
