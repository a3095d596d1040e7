"""One table of all settings that a user can choose: `table`.

The class AskedSettings has their names, types and defaults; settings.toml has the rest.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.errors import LabError

UNPACKED_TYPES = ("f16", "bf16", "f32")  # of values that plain attention can read
_WITHOUT_FLASH = ("grok",)  # architectures for which llama.cpp switches flash attention off
STEP = "step"
END = "end"
AUTO = "auto"
DEFAULT = "default"
SLEEP = "sleep"

HOW_TO_SPLIT = "Give a share for each device, such as 3,1."
THOUSANDS = re.compile(r"(?<![\d.])(\d{1,9}(?:\.\d{1,3})?)[kK]\b")

MAX_THREADS = 512  # ggml's limit, GGML_MAX_N_THREADS


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that is known of a setting; settings.toml explains the fields."""

    name: str
    default: Any
    types: tuple[type, ...]  # without None; a list counts as a string
    help: str
    example: object
    group: str | None = None
    short: str | None = None
    also: Sequence[str] = ()
    metavar: str | None = None
    choices: Sequence[str] = ()
    words: Sequence[str] = ()
    most: int | None = None
    least: int = 1
    record_name: str | None = None
    column: str = ""
    model_param: str | None = None
    context_param: str | None = None
    server_option: str | None = None
    is_pooled: bool = False
    changes_start: bool = False

    @property
    def recorded(self) -> str:
        """Its name in record.Settings."""
        return self.record_name or self.name

    @property
    def is_switch(self) -> bool:
        """Whether its option has no value: --NAME or --no-NAME."""
        return bool in self.types and not self.choices


@dataclass(frozen=True, kw_only=True)
class AskedSettings:
    """The settings as the user gave them; a list may be a string with commas.

    None: llama.cpp's or the lab's choice.
    """

    prompt: str = "text"
    seed: int = 1
    threads: int | None = None
    threads_batch: int | None = None
    batch: int = 2048
    ubatch: int = 512
    n_gpu_layers: int | str | None = None
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    device: str | Sequence[str] | None = None
    split_mode: str | None = None
    main_gpu: int | None = None
    tensor_split: str | Sequence[float] | None = None
    n_cpu_moe: int | None = None
    override_tensor: str | Sequence[str] | None = None
    kv_offload: bool | None = None
    op_offload: bool | None = None
    mmap: bool | None = None
    repack: bool | None = None
    rpc: str | Sequence[str] | None = None
    lib: str | None = None
    prefill_wait: str | None = None
    wait: int | str | None = None
    kv_unified: str | bool = "off"

    @property
    def is_unified(self) -> bool:
        return self.kv_unified in (True, "on")

    @property
    def is_on_cpu(self) -> bool:
        """Whether the user chose no device."""
        return parts(self.device) == ("none",)

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The devices' shares of the model. LabError for a part that is not a number."""
        if self.tensor_split is None:
            return None
        texts = self.tensor_split
        if isinstance(texts, str):
            texts = parts(texts.replace("/", ","))
        try:
            shares = tuple(map(float, texts))
        except ValueError:
            raise impossible("tensor_split", self.tensor_split, HOW_TO_SPLIT) from None
        if not any(shares) or not all(0 <= share < math.inf for share in shares):
            raise impossible("tensor_split", self.tensor_split, HOW_TO_SPLIT)
        return shares

    def check(self) -> None:
        """LabError for a value that is invalid on every machine."""
        for name, setting in table().items():
            value = getattr(self, name)
            if setting.choices and isinstance(value, str) and value not in setting.choices:
                raise impossible(name, value, f"Choose one of {', '.join(setting.choices)}.")
            if setting.most is not None and value is not None and value not in setting.words:
                check_number(name, value, setting.most, setting.least, setting.words)
        if self.flash_attn == "off" and self.cache_type_v not in UNPACKED_TYPES:
            what = f"A {self.cache_type_v} V cache needs flash attention, which is off."
            raise LabError(what, "Use --flash-attn on, or --cache-type-v f16.")
        if self.main_gpu is not None and self.split_mode != "none":
            what = "--main-gpu works only with --split-mode none."
            raise LabError(what, "Add --split-mode none.")
        _ = self.shares
        for text in parts(self.override_tensor):
            _check_override(text)


def _check_override(text: str) -> None:
    """LabError if an override of tensors is not PATTERN=DEVICE."""
    pattern, _, device = text.rpartition("=")
    if not pattern or not device:
        what = f"--override-tensor {text} names no device."
        raise LabError(what, "Write PATTERN=DEVICE, such as ffn_.*_exps=CPU")
    try:
        re.compile(pattern)
    except re.error as problem:
        what = f"--override-tensor {text}: {pattern} is no regular expression ({problem})."
        hint = "A dot matches any character, .* any text: ffn_.*_exps=CPU"
        raise LabError(what, hint) from None


def flash_of_architecture(arch: str | None) -> str | None:
    """Flash attention of an architecture that has none: off. None: llama.cpp decides."""
    return "off" if arch in _WITHOUT_FLASH else None


@cache
def table() -> dict[str, Setting]:
    """All settings by name, in the order of settings.toml."""
    text = Path(__file__).with_name("settings.toml").read_text(encoding="utf-8")
    hints = typing.get_type_hints(AskedSettings)
    defaults = {field.name: field.default for field in dataclasses.fields(AskedSettings)}
    settings: dict[str, Setting] = {}
    for name, entry in tomllib.loads(text).items():
        alternatives = typing.get_args(hints[name]) or (hints[name],)
        kinds = tuple(kind for kind in alternatives if kind in (int, bool, str))
        setting = Setting(name=name, default=defaults[name], types=kinds, **entry)
        column = setting.column or setting.recorded
        settings[name] = dataclasses.replace(setting, column=column)
    return settings


@cache
def defaults() -> dict[str, object]:
    return {name: setting.default for name, setting in table().items()}


def flag(name: str) -> str:
    """The option of a setting, such as `--n-gpu-layers`."""
    return f"--{name.replace('_', '-')}"


def parts(text: str | Iterable[Any] | None) -> tuple[Any, ...]:
    """The items of a list, or of a string with commas."""
    if isinstance(text, str):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return tuple(text or ())


def in_digits(text: str) -> str:
    """Lengths with k for 1,000 in digits: `8k,1.5k` is `8000,1500`."""
    return THOUSANDS.sub(lambda match: f"{round(1000 * float(match[1]))}", text)


def check_number(
    name: str, value: object, most: int, least: int = 1, words: Sequence[str] = ()
) -> None:
    """LabError for a value that is no integer of an option's range."""
    shown = value
    if isinstance(value, int):
        if least <= value <= most:
            return
        shown = f"{value:,}"
    alternatives = "".join(f", or {word}" for word in words)
    raise impossible(
        name, shown, f"Give a whole number from {least} to {most:,}{alternatives}."
    )


def impossible(name: str, value: object, hint: str) -> LabError:
    return LabError(f"{flag(name)} {value} is not possible.", hint)
