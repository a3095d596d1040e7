"""The types of settings as keyword arguments of public functions.

Generated from the tables of settings: python -m tests.support.typed_settings
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from lab.core.arguments import StrPath, Texts

CacheType = Literal["f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


class CommonSettings(TypedDict, total=False):
    """Settings that mean the same in every function."""

    seed: int | None
    threads: int | None
    threads_batch: int | None
    batch: int | None
    ubatch: int | None
    n_gpu_layers: int | Literal["auto"] | None
    flash_attn: Literal["on", "off", "auto"] | bool | None
    cache_type_k: CacheType | None
    cache_type_v: CacheType | None
    kv_unified: Literal["on", "off"] | bool | None
    repack: bool | None
    prefill_wait: Literal["step", "end"] | None
    wait: int | Literal["default", "sleep"] | None
    lib: StrPath | None
    split_mode: Literal["none", "layer", "row", "tensor"] | None
    main_gpu: int | None
    tensor_split: str | Sequence[float] | None
    n_cpu_moe: int | None
    override_tensor: Texts | None
    kv_offload: bool | None
    op_offload: bool | None
    rpc: Texts | None


class EngineSettings(CommonSettings, total=False):
    """How llama.cpp runs a model; `lab measure --help-all` explains each."""

    prompt: Texts | None
    device: Texts | None
    mmap: bool | None


class SamplerSettings(TypedDict, total=False):
    """How tokens are chosen; without any of these: greedy."""

    temp: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    xtc_probability: float | None
    mirostat: int | None
    samplers: Texts | None
    grammar_file: StrPath | None
    json_schema_file: StrPath | None
