"""Types of the KV cache: as the user writes them, which of them llama.cpp refuses, and in words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import memory
from lab.core.asked_settings import UNPACKED_TYPES, flash_of_architecture, parts, table
from lab.core.attention import attention_by_layer, attention_layers
from lab.core.matrices import BLOCKS
from lab.core.record import Model, Settings
from lab.errors import LabError
from lab.features.quant.lines import QuantLine

TYPES = "f16,q8_0,q4_0"  # compared if the user names none
EXAMPLE = "--cache f16,q8_0"
SPELLINGS = {
    "fp16": "f16",
    "half": "f16",
    "fp32": "f32",
    "float": "f32",
    "q8": "q8_0",
    "int8": "q8_0",
    "8bit": "q8_0",
    "q5": "q5_1",
    "q4": "q4_0",
    "int4": "q4_0",
    "4bit": "q4_0",
}
"""What people write for a type that llama.cpp calls otherwise."""

ROTATED = re.compile(r"attn_rot_([kv]) = 1\b|([kv])_cache_hadam\w*\s*=\s*(?:1|true)\b")
OFF = "force disabled"


@dataclass(frozen=True)
class CacheTypes:
    """The types of keys and values."""

    k: str
    v: str

    @property
    def name(self) -> str:
        return self.k if self.k == self.v else f"{self.k}:{self.v}"

    @property
    def is_exact(self) -> bool:
        return self.k in UNPACKED_TYPES and self.v in UNPACKED_TYPES

    @property
    def settings(self) -> dict[str, str]:
        return {"cache_type_k": self.k, "cache_type_v": self.v}


def types_of(option: str | Sequence[str]) -> list[CacheTypes]:
    """The types that --cache names, the reference first: `f16,q8_0,q8_0:q4_0`. LabError for
    unknown ones, for fewer than two, and for an inexact reference of exact ones."""
    types = [pair_of(text, option) for text in parts(option)]
    if len(types) < 2:
        only = types[0].name if types else ""
        what = f"--cache has one type, {only}: there is nothing to compare it with."
        if not only:
            what = "--cache names no type."
        candidate = "q8_0" if only in ("", *UNPACKED_TYPES) else only
        hint = f"Name at least two, the reference first: --cache f16,{candidate}"
        raise LabError(what, hint)
    if len(set(types)) < len(types):
        raise LabError("A cache type is named twice.", "Name each once.")
    exact = [pair for pair in types if pair.is_exact]
    if exact and not types[0].is_exact:
        candidates = [pair.name for pair in types if pair != exact[0]]
        raise LabError(
            f"{types[0].name} comes first, so it would be the reference of {exact[0].name}.",
            f"Name the reference first: --cache {','.join([exact[0].name, *candidates])}",
        )
    return types


def pair_of(text: str, option: str | Sequence[str]) -> CacheTypes:
    """`q8_0` for both, or `q8_0:q4_0` for keys and values."""
    names = text.split(":")
    if len(names) > 2 or not all(name.strip() for name in names):
        raise LabError(
            f"{text!r} is not a pair of cache types (in --cache {shown(option)}).",
            "Write K:V, such as q8_0:q4_0, or one type for both.",
        )
    types = [checked(name.strip()) for name in names]
    return CacheTypes(types[0], types[-1])


def checked(name: str) -> str:
    """A type in llama.cpp's spelling. LabError with the nearest one for others."""
    lower = name.lower()
    known = table()["cache_type_k"].choices
    if lower in known:
        return lower
    near = SPELLINGS.get(lower.replace("-", "").replace("_", ""))
    if near is None:
        matches = difflib.get_close_matches(lower.replace("-", "_"), known, 1, 0.75)
        near = matches[0] if matches else None
    hint = f"Use some of {', '.join(known)}."
    if lower.endswith(".gguf") or "/" in name:
        hint = f"Name the types, then the file: {EXAMPLE} {name}"
    elif near:
        hint = f"Did you mean {near}? {hint}"
    raise LabError(f"{name!r} is not a cache type.", hint)


def shown(option: str | Sequence[str]) -> str:
    return option if isinstance(option, str) else ",".join(option)


def check(types: Sequence[CacheTypes], settings: dict[str, object]) -> None:
    """LabError for types that llama.cpp refuses with these settings, whatever the model."""
    for name in ("cache_type_k", "cache_type_v"):
        if settings.get(name) not in (None, "f16"):
            option = f"--{name.replace('_', '-')} {settings[name]}"
            raise LabError(
                f"{option} is given beside --cache, which sets the types.",
                "Leave one of them out; K:V names both: --cache f16,q8_0:q4_0",
            )
    quantized = [pair for pair in types if pair.v not in UNPACKED_TYPES]
    if settings.get("flash_attn") == "off" and quantized:
        pair = quantized[0]
        raise LabError(
            f"llama.cpp refuses a {pair.v} V cache without flash attention, which is off.",
            f"Leave out --flash-attn off, or quantize K alone: --cache f16,{pair.k}:f16",
        )


def check_model(types: Sequence[CacheTypes], model: Model, n_tokens: int) -> None:
    """LabError for types that llama.cpp refuses for a model, for one without a KV cache, and for
    more tokens than it was trained for."""
    layers = attention_layers(model)
    if layers is not None and not any(heads.has_cache for heads in layers):
        raise LabError(
            f"{model.name} has no KV cache: its layers keep a state of fixed size.",
            "Compare files of it: lab quant REFERENCE.gguf FILE.gguf",
        )
    if model.n_ctx_train and n_tokens > model.n_ctx_train:
        raise LabError(
            f"{n_tokens:,} tokens are more than the {model.n_ctx_train:,} that {model.name} was "
            "trained for: its predictions beyond them say nothing about a cache.",
            f"Use -p {model.n_ctx_train} or less.",
        )
    for pair in types:
        reason = refusal(pair, model)
        if reason:
            raise LabError(
                f"llama.cpp refuses the cache types {pair.name} for {model.name}: {reason}.",
                "Leave them out of --cache.",
            )


def refusal(pair: CacheTypes, model: Model) -> str:
    """Why llama.cpp refuses the types for a model; "" if it does not, or that is not known."""
    if model.values_in_keys and pair.k != pair.v:
        return "its keys hold the values, so both need one type"
    if flash_of_architecture(model.arch) and pair.v not in UNPACKED_TYPES:
        return "it switches flash attention off, which a quantized V needs"
    for heads in attention_layers(model) or ():
        for kind, width in ((pair.k, heads.head_dim), (pair.v, heads.head_dim_v)):
            block = BLOCKS[kind.upper()][0]
            if width % block:
                return f"its heads of {width} do not fit blocks of {block}"
    return ""


def layers_with_cache(model: Model) -> str:
    """How many layers of a hybrid model have a KV cache, in words; "" if all have one."""
    by_layer = attention_by_layer(model)
    if by_layer is None:
        return ""
    n_cached = len([heads for heads in by_layer if heads is not None])
    if n_cached == len(by_layer):
        return ""
    return (
        f"Only {n_cached} of {len(by_layer)} layers of {model.name} have a KV cache; the others "
        "keep a state, which --cache does not change."
    )


def bytes_per_position(file: QuantLine) -> float | None:
    """Bytes of a token in the cache of a line's model and settings; None if unknown."""
    settings = file.settings
    return memory.kv_bytes_per_position(file.model, settings.type_k, settings.type_v)


def name_of(settings: Settings) -> str:
    """The types of a context's cache, as --cache has them."""
    return CacheTypes(*settings.cache_types).name


def changes(log: Sequence[str]) -> str:
    """What the log says that llama.cpp does to the cache, as a sentence; "" for nothing."""
    rotated: list[str] = []
    for line in log:
        if OFF in line:
            return (
                "llama.cpp's rotation of the cache is switched off (LLAMA_ATTN_ROT_DISABLE)."
            )
        for match in ROTATED.finditer(line):
            rotated.append((match[1] or match[2]).upper())
    if not rotated:
        return ""
    parts_of_cache = " and ".join(dict.fromkeys(rotated))
    return (
        f"This build of llama.cpp rotates {parts_of_cache} (a Hadamard transform) before it "
        "quantizes them: a build without it has other figures."
    )
