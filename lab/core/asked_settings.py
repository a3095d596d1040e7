"""One table of all settings that a user can choose: names, defaults, valid values, help.

The fields of `AskedSettings` are the table. It defines the options of the commands (cli/options.py), the checks of a
plan (`check`), and the options that reproduce a record (runner/as_options.py). `SettingsKeywords` repeats the names for
function signatures, so that editors complete them; a test keeps both equal.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypedDict

from lab.errors import LabError

CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
SPLIT_MODES = ("none", "layer", "tensor")
STEP, END = "step", "end"
AUTO = "auto"

MAX_THREADS = 512
"""ggml's limit, GGML_MAX_N_THREADS."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting, except its name, type and default.

    `record_name` is llama.cpp's name, used in record.Settings; None if it equals the setting's name.
    """

    help: str
    short: str | None = None  # llama.cpp's short option; for an on/off setting, the one that means off
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    most: int | None = None  # for integers
    least: int = 1
    record_name: str | None = None
    is_placing: bool = False  # whether it decides where or how a model is placed in memory


def _setting(default: Any, help: str, short: str | None = None, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(help=help, short=short, **more)})


def _placing(help: str, short: str | None = None, **more: Any) -> Any:
    return _setting(None, help, short, is_placing=True, **more)


@dataclass(frozen=True, kw_only=True)
class AskedSettings:
    """The settings of a measurement as the user gave them. None: llama.cpp's or the lab's choice.

    A list may also be one string with commas.
    """

    prompt: str = _setting(
        "text",
        "Where prompts come from: text (all built-in texts), names of some (code,table,story), random, or a file.",
    )
    seed: int = _setting(1, "Seed for the order of runs and for the prompts.")
    threads: int | None = _setting(
        None,
        "Threads for decode.  [default: number of fast physical cores]",
        "-t",
        most=MAX_THREADS,
        record_name="n_threads",
    )
    threads_batch: int | None = _setting(
        None, "Threads for prefill.  [default: as --threads]", most=MAX_THREADS, record_name="n_threads_batch"
    )
    batch: int = _setting(
        2048,
        "Maximum tokens that llama.cpp accepts in one call; --ubatch cannot be larger.",
        "-b",
        most=2**30,
        record_name="n_batch",
    )
    ubatch: int = _setting(512, "Tokens per prefill step.", "-u", most=2**30, record_name="n_ubatch")
    n_gpu_layers: int | str | None = _setting(
        None,
        "Layers to put on devices; the output layer counts as one. 0: none; auto: as many as fit.  [default: all]",
        "-ngl",
    )
    flash_attn: str = _setting("auto", "Use flash attention.", "-fa", choices=("on", "off", "auto"))
    cache_type_k: str = _setting(
        "f16",
        f"Type of the K cache: {', '.join(CACHE_TYPES)}.",
        "-ctk",
        choices=CACHE_TYPES,
        metavar="TYPE",
        record_name="type_k",
    )
    cache_type_v: str = _setting(
        "f16",
        "Type of the V cache, from the same list.",
        "-ctv",
        choices=CACHE_TYPES,
        metavar="TYPE",
        record_name="type_v",
    )
    device: str | Sequence[str] | None = _placing(
        "Devices to put layers on, by name (see lab machine); none: the CPU only.  [default: all]",
        "-dev",
        record_name="devices",
    )
    split_mode: str | None = _placing(
        "How to split a model over several devices: by layers, or by parts of every tensor.  [default: layer]",
        "-sm",
        choices=SPLIT_MODES,
    )
    tensor_split: str | Sequence[float] | None = _placing(
        "How to divide the model among devices, such as 3,1.  [default: by free memory]", "-ts"
    )
    main_gpu: int | None = _placing("With --split-mode none: which device.  [default: 0]", "-mg", least=0, most=10_000)
    n_cpu_moe: int | None = _placing(
        "Mixture-of-experts models: keep the experts of the first N layers on the CPU.", "-ncmoe", least=0, most=10_000
    )
    override_tensor: str | Sequence[str] | None = _placing(
        "Put tensors whose names match a regular expression into a buffer: ffn_.*_exps=CPU. Commas separate several.",
        "-ot",
        metavar="PATTERN=BUFFER",
    )
    kv_offload: bool | None = _placing("Keep the KV cache in the devices' memory.  [default: on]", "-nkvo")
    op_offload: bool | None = _placing(
        "Let a GPU compute prefill for layers in RAM.  [default: on if a device holds layers]", "-nopo"
    )
    mmap: bool | None = _placing("Map the model file into memory (mmap).  [default: llama.cpp's choice]")
    repack: bool | None = _placing(
        "Rearrange weights in memory for the CPU's fastest code (CPU_REPACK, AMX).  [default: on]", "-nr"
    )
    rpc: str | Sequence[str] | None = _placing(
        "Use the devices of RPC servers (lab rpc-server), separated by commas.", "-rpc", metavar="HOST:PORT"
    )
    lib: str | None = _placing(
        "Use the llama.cpp libraries in this folder instead of the installed ones.", metavar="FOLDER"
    )
    prefill_wait: str | None = _placing(
        "Wait for the device after every prefill step, or only at the end.  [default: step; end with RPC servers or a "
        "pipeline of devices]",
        choices=(STEP, END),
    )
    kv_unified: str | bool = _setting(
        "off", "Share one KV cache among all answers in progress; no effect with one answer.", choices=("on", "off")
    )

    @property
    def is_unified(self) -> bool:
        return self.kv_unified in (True, "on")

    @property
    def is_on_cpu(self) -> bool:
        """Whether the user chose no device."""
        return parts(self.device) == ("none",)

    def check(self) -> None:
        """LabError for a value that is invalid on every machine."""
        for name, setting in table().items():
            value = getattr(self, name)
            if setting.choices and isinstance(value, str) and value not in setting.choices:
                raise impossible(name, value, f"Choose one of {', '.join(setting.choices)}.")
            if setting.most is not None and value is not None:
                check_number(name, value, setting.most, setting.least)
        layers = self.n_gpu_layers
        if not (layers in (None, AUTO) or (isinstance(layers, int) and 0 <= layers <= 10_000)):
            raise impossible("n_gpu_layers", layers, "Give a number of layers (0: CPU only), or auto.")
        if self.flash_attn == "off" and self.cache_type_v not in ("f16", "f32", "bf16"):
            raise LabError(
                f"A {self.cache_type_v} V cache needs flash attention, which is off.",
                "Use --flash-attn on, or --cache-type-v f16.",
            )
        if self.main_gpu is not None and self.split_mode != "none":
            raise LabError("--main-gpu works only with --split-mode none.", "Add --split-mode none.")


class SettingsKeywords(TypedDict, total=False):
    """The fields of AskedSettings as keyword arguments."""

    prompt: str
    seed: int
    threads: int | None
    threads_batch: int | None
    batch: int
    ubatch: int
    n_gpu_layers: int | str | None
    flash_attn: str
    cache_type_k: str
    cache_type_v: str
    device: str | Sequence[str] | None
    split_mode: str | None
    tensor_split: str | Sequence[float] | None
    main_gpu: int | None
    n_cpu_moe: int | None
    override_tensor: str | Sequence[str] | None
    kv_offload: bool | None
    op_offload: bool | None
    mmap: bool | None
    repack: bool | None
    rpc: str | Sequence[str] | None
    lib: str | None
    prefill_wait: str | None
    kv_unified: str | bool


@cache
def table() -> dict[str, Setting]:
    """All settings by name."""
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(AskedSettings)}


@cache
def defaults() -> dict[str, Any]:
    """The default of each setting by name."""
    return {field.name: field.default for field in dataclasses.fields(AskedSettings)}


@cache
def types() -> dict[str, tuple[type, ...]]:
    """The types of each setting by name, without None; a list counts as a string."""
    hints = typing.get_type_hints(AskedSettings)
    known = {name: typing.get_args(hint) or (hint,) for name, hint in hints.items()}
    return {name: tuple(kind for kind in kinds if kind in (int, bool, str)) for name, kinds in known.items()}


def flag(name: str) -> str:
    """The option of a setting, such as `--n-gpu-layers`."""
    return f"--{name.replace('_', '-')}"


def parts(text: str | Sequence[Any] | None) -> tuple[Any, ...]:
    """The items of a list, or of a string with commas."""
    if isinstance(text, str):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return tuple(text or ())


def in_digits(text: str) -> str:
    """Lengths with k for 1,000 in digits: `8k,1.5k` is `8000,1500`."""
    return re.sub(r"(?<![\d.])(\d{1,9}(?:\.\d{1,3})?)[kK]\b", lambda match: f"{round(1000 * float(match[1]))}", text)


def check_number(name: str, value: int, most: int, least: int = 1) -> None:
    """LabError for an integer outside an option's range."""
    if not least <= value <= most:
        raise impossible(name, f"{value:,}", f"Give a whole number from {least} to {most:,}.")


def impossible(name: str, value: object, hint: str) -> LabError:
    """The error for an option's invalid value."""
    return LabError(f"{flag(name)} {value} is not possible.", hint)
