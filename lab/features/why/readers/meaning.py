"""What programs call a fact, and what its written value means: the one place that decides it.

Options of commands, variables, columns of tables and lines of logs all end here.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from lab.core.asked_settings import AUTO, table
from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.formats import llama_bench_rows

TABLE: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("programs.toml").read_text(encoding="utf-8")
)
"""The table of programs: what their lines mean, and how options are called."""

CACHE_TYPES = ("cache_type_k", "cache_type_v")
THREADS = ("threads", "threads_batch")
OF_SEVERAL = {"cache_types": CACHE_TYPES, "quantkv": CACHE_TYPES, "threads_of_both": THREADS}
"""Words that state two facts at once."""

OFFLOADED = "offloaded"  # layers of all, such as 20/33
TITLE = "title"  # of a model, weaker than its file's name
TEXTS = (facts.BUILD, facts.SAMPLING, facts.FILE_ID, facts.PLACEMENT, facts.BACKEND, TITLE)
BOOLEANS = ("mmap", "kv_offload", "op_offload", "repack")
NEGATED = ("-nkvo", "-nopo", "-nr", "no_kv_offload", "nkvo", "nopo")
ON = ("on", "1", "true", "enabled", "yes")
OFF = ("off", "0", "false", "disabled", "no")
QUANTIZED_CACHES = {"0": "f16", "1": "q8_0", "2": "q4_0"}  # KoboldCpp's numbers
ALL_LAYERS = 99  # more layers than most models have: how people write `all`
FILE = re.compile(r"(?:-\d{5}-of-\d{5})?\.(?:gguf|bin|safetensors)$", re.I)
QUANTIZATION = re.compile(
    r"(?<![a-z0-9])((?:UD-)?I?Q[1-8]_[A-Z0-9_]{1,12}|I?Q[1-8]|TQ[12]_0|BF16|F16|FP16|F32|FP8|FP4"
    r"|MXFP4(?:_MOE)?|NVFP4|AWQ|GPTQ|INT[48]|W4A16|[2-8]-?bit|\d\.\d{1,2}bpw)(?![a-z0-9])",
    re.I,
)


def fact_names() -> dict[str, str]:
    """The fact that each option, variable and column states."""
    names = dict[str, str]()
    for name, setting in table().items():
        names[setting.recorded] = name
        if setting.short:
            names[setting.short] = name
        if setting.server_option and name != "mmap":
            names[setting.server_option] = name
    for name, also in TABLE["names"].items():
        names |= dict.fromkeys(also, name)
    return names


FACT_NAMES = fact_names()


def name_of_model(written: str) -> dict[str, str | None]:
    """The name of a model and its quantization, from a path, a repository or a tag."""
    last = re.split(r"[/\\]", written.strip().rstrip("/\\"))[-1]
    name = FILE.sub("", last)
    head, _, tag = name.partition(":")
    matches = list(QUANTIZATION.finditer(tag or head))
    quantization = matches[-1][1] if matches else None
    if tag and quantization and quantization.lower() == tag.lower():
        name = head
    if name.startswith("sha256"):  # a blob of Ollama
        return {}
    return {facts.MODEL: name or None, facts.QUANTIZATION: quantization}


def facts_of(name: str, written: str | None, line: int | None) -> dict[str, Fact]:
    """The facts that a value states under the name of a fact; none for an unknown value."""
    text = (written or "").strip().strip("\"'")
    if name == facts.MODEL:
        return facts.stated(name_of_model(text), line)
    if name == "quantkv":
        return facts.stated(dict.fromkeys(CACHE_TYPES, QUANTIZED_CACHES.get(text)), line)
    if name == OFFLOADED:
        layers, _, total = text.partition("/")
        value = None if layers == total else int(layers)
        return {"n_gpu_layers": Fact(value, line, shown=text)}
    read = dict[str, Fact]()
    for single in OF_SEVERAL.get(name, (name,)):
        fact = fact_of(single, text, line)
        if fact:
            read[single] = fact
    return read


def fact_of(name: str, text: str, line: int | None) -> Fact | None:
    """The fact of one value; None if it says nothing."""
    if name in TEXTS:
        return Fact(text, line) if text else None
    if name == facts.QUANTIZATION:
        return Fact(llama_bench_rows.model_of(text)[1] or text, line)
    if name == facts.PARAMETERS:
        n_params = llama_bench_rows.params_of(text)
        return Fact(n_params, line) if n_params else None
    if name == facts.HARDWARE:
        device = llama_bench_rows.device_named(text)
        return Fact(device, line) if device else None
    if name == facts.SPECULATION:
        return Fact(facts.NO_DRAFTS if text == "None" else "drafts", line)
    return fact_of_setting(name, text, line)


def fact_of_setting(name: str, text: str, line: int | None) -> Fact | None:
    """The fact of a setting; None for a value that stands for the default."""
    small = text.lower()
    if name == "flash_attn":
        if small in ON or not small:
            return Fact("on", line)
        return Fact("off" if small in OFF else AUTO, line)
    if name == "n_gpu_layers":
        return fact_of_layers(small, line)
    if name in BOOLEANS and small in (*ON, *OFF):
        return Fact(small in ON, line)
    if re.fullmatch(r"\d{1,9}", small):
        return Fact(int(small), line)
    if name in THREADS or small.startswith("-"):
        return None
    return Fact(small if name in CACHE_TYPES else text or "on", line)


def fact_of_layers(text: str, line: int | None) -> Fact:
    """The fact of a number of layers on a device; None stands for all."""
    if text == "all":
        return Fact(None, line)
    if not re.fullmatch(r"\d{1,9}", text):
        return Fact(AUTO, line)
    layers = int(text)
    return Fact(None if layers >= ALL_LAYERS else layers, line, shown=text)


def facts_of_column(head: str, cell: str, line: int) -> dict[str, Fact]:
    """The facts of a cell, by the head of its column: a short option, or a name of its own."""
    name = FACT_NAMES.get(head) or FACT_NAMES.get(f"-{head}") or head
    if name == "n_gpu_layers" and re.fullmatch(
        r"-\d{1,4}", cell
    ):  # llama-bench's word for all
        return {name: Fact(None, line, shown=cell)}
    if head in NEGATED:
        return {name: Fact(cell.lower() not in ON, line)}
    return facts_of(name, cell, line)
