"""One setup in the words of every program that runs GGUF models: llama.cpp's own, llama-cpp-python, Ollama, the lab.

`OPTIONS` is the table: a setting of the lab, and what each program calls it. The names are those of llama.cpp's
common/arg.cpp and tools/llama-bench, of `llama_cpp.Llama`, and of Ollama's documentation (docs/modelfile.mdx, the
options in docs/api.md, the environment variables in docs/faq.mdx). Ollama computes `num_batch` tokens per prefill step
and accepts that many for each user in one call (`NewContextParams` in llama/llama.go), so it is the lab's --ubatch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import shell
from lab.core.asked_settings import defaults, table
from lab.core.memory import padded
from lab.core.record import Settings
from lab.errors import printable
from lab.runner import as_options

OPTIONS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    # name in record.Settings: llama-server and llama-cli, llama-bench, llama_cpp.Llama, Ollama
    "n_threads": ("--threads", "--threads", "n_threads", "num_thread"),
    "n_threads_batch": ("--threads-batch", None, "n_threads_batch", None),
    "n_batch": ("--batch-size", "--batch-size", "n_batch", None),
    "n_ubatch": ("--ubatch-size", "--ubatch-size", "n_ubatch", "num_batch"),
    "flash_attn": ("--flash-attn", "--flash-attn", "flash_attn", "OLLAMA_FLASH_ATTENTION"),
    "type_k": ("--cache-type-k", "--cache-type-k", "type_k", "OLLAMA_KV_CACHE_TYPE"),
    "type_v": ("--cache-type-v", "--cache-type-v", "type_v", "OLLAMA_KV_CACHE_TYPE"),
    "n_gpu_layers": ("--n-gpu-layers", "--n-gpu-layers", "n_gpu_layers", "num_gpu"),
    "devices": ("--device", "--device", None, None),
    "n_cpu_moe": ("--n-cpu-moe", "--n-cpu-moe", None, None),
    "kv_offload": ("--kv-offload", "--no-kv-offload", "offload_kqv", None),
    "op_offload": ("--op-offload", "--no-op-offload", "op_offload", None),
    "mmap": ("--load-mode", "--load-mode", "use_mmap", "use_mmap"),
    "repack": ("--repack", "--repack", None, None),
    "lib": (None, None, None, None),
    "kv_unified": ("--kv-unified", None, None, None),  # only with several users
}
"""What each program calls a setting; None: it has no such option. Two options get the same value."""

LLAMA, BENCH, PYTHON, OLLAMA = range(4)
"""The columns of OPTIONS."""

OLLAMA_TYPES = ("f16", "q8_0", "q4_0")
"""Cache types that Ollama knows. It has one type for keys and values."""

GGML_TYPE_BF16 = "30"
"""Its number in ggml.h; llama-cpp-python has names for the other types of a cache."""

ALL_LAYERS = 999
"""More than any model has; llama.cpp takes it for all."""

USUAL = {"kv_offload": True, "op_offload": True, "repack": True}
"""What programs do that have no option for it, in addition to the lab's defaults, which are llama.cpp's."""


@dataclass(frozen=True)
class ToolLine:
    """What to give to a program. `missing`: options of the lab for which the program has none, such as --no-repack."""

    tool: str
    text: str
    missing: tuple[str, ...]


def command_lines(model: str, settings: Settings, n_prompt: int, n_gen: int, n_users: int = 1) -> list[ToolLine]:
    """Ready command lines that run a model as `settings` say, with room for `n_users` answers at once.

    `model` is the path of a GGUF file, `n_prompt` and `n_gen` are tokens of one answer. For Ollama the text is a
    Modelfile that names its environment variables in a comment, for llama-cpp-python an expression. What `settings`
    leave to llama.cpp is left out, and so are prompts and seeds.
    """
    n_ctx = padded(n_prompt + n_gen)
    one_user = () if n_users == 1 else (f"{n_users} users at once",)
    lines = []
    for tool, column, users, sizes in (
        ("llama-server", LLAMA, n_users, ("--ctx-size", n_users * n_ctx, "--parallel", n_users)),
        ("llama-cli", LLAMA, 1, ("--ctx-size", n_ctx, "--predict", n_gen)),
        ("llama-bench", BENCH, 1, ("--n-prompt", n_prompt, "--n-gen", n_gen)),
    ):
        found, missing = _split(settings, column, users)
        words = [word for name, option, value in found for word in _words(name, option, value, column)]
        lacks = missing if tool == "llama-server" else one_user + missing
        lines.append(ToolLine(tool, shell.join(tool, "--model", model, *sizes, *words), lacks))
    asked = as_options.asked(settings)
    chosen = [word for name in asked if name not in ("prompt", "seed") for word in as_options.option(name, asked[name])]
    command = ("measure",) if n_users == 1 else ("batch", "--sequences", n_users)
    own = shell.lab(command[0], "--model", model, *command[1:], "--prompt-len", n_prompt, "--gen", n_gen, *chosen)
    python, ollama = _python(model, settings, n_ctx, one_user), _modelfile(model, settings, n_ctx, n_users)
    return [*lines, python, ollama, ToolLine("lab", own, ())]


def _split(settings: Settings, column: int, n_users: int) -> tuple[list[tuple[str, str, Any]], tuple[str, ...]]:
    """The chosen settings that a program has (name, its option, value), and the options of the lab that it lacks."""
    values = {name: getattr(settings, name) for name in OPTIONS} | {
        "flash_attn": settings.flash_attn_resolved or settings.flash_attn,
        "lib": as_options.asked(settings).get("lib"),
        "kv_unified": settings.kv_unified if n_users > 1 else None,
    }
    if settings.n_threads < 1:
        values |= {"n_threads": None, "n_threads_batch": None}
    if settings.n_gpu_layers < 0:
        values["n_gpu_layers"] = ALL_LAYERS
    if settings.n_gpu_layers == 0:  # as in the lab, devices shall not compute prefill either
        values |= {"devices": ()} if OPTIONS["devices"][column] else {"op_offload": False if column == PYTHON else None}
    lab_names = {setting.record_name or name: name for name, setting in table().items()}
    usual = {name: defaults()[own] for name, own in lab_names.items()} | USUAL
    usual |= {"n_threads_batch": settings.n_threads, "flash_attn": None, "kv_unified": False}
    found, missing = [], []
    for name, value in ((name, value) for name, value in values.items() if value is not None):
        option = OPTIONS[name][column]
        if column in (PYTHON, OLLAMA) and value == "auto":
            option = None
        if option == "OLLAMA_KV_CACHE_TYPE":  # one for keys and values
            option = option if settings.type_k == settings.type_v and value in OLLAMA_TYPES else None
            if option and name == "type_v":
                continue
        if option is not None:
            found.append((name, option, value))
        elif value != usual[name]:
            missing.append(shell.join(*as_options.option(lab_names[name], value)))
    return found, tuple(missing)


def _words(name: str, options: str, value: Any, column: int) -> list[str]:
    """Options of llama.cpp's programs with their value."""
    if name == "mmap":
        value = "mmap" if value else "none"
    if isinstance(value, bool):
        if column == LLAMA:
            return [options if value else f"--no-{options[2:]}"]
        value = int(value != options.startswith("--no-"))
    if isinstance(value, tuple):
        between = "," if column == LLAMA else "/"
        value = between.join(f"{part:g}" if isinstance(part, float) else part for part in value) or "none"
    return [options, str(value)]


def _python(model: str, settings: Settings, n_ctx: int, one_user: tuple[str, ...]) -> ToolLine:
    """The object of llama-cpp-python."""
    found, missing = _split(settings, PYTHON, 1)

    def written(name: str, value: Any) -> str:
        if not re.fullmatch(r"\w+", str(value)):
            return repr(list(value) if isinstance(value, tuple) else value)
        if name in ("type_k", "type_v"):
            return GGML_TYPE_BF16 if value == "bf16" else f"llama_cpp.GGML_TYPE_{value.upper()}"
        return repr(value == "on" if name == "flash_attn" else value)

    keywords = "".join(f", {option}={written(name, value)}" for name, option, value in found)
    text = f"llama_cpp.Llama(model_path={model!r}, n_ctx={n_ctx}{keywords})"
    return ToolLine("llama-cpp-python", text, one_user + missing)


def _modelfile(model: str, settings: Settings, n_ctx: int, n_users: int) -> ToolLine:
    """Ollama's file for `ollama create`. Without a folder, even ./, a path would be the name of a model."""
    found, missing = _split(settings, OLLAMA, n_users)
    values = {option: int(value == "on") if name == "flash_attn" else value for name, option, value in found}
    values["OLLAMA_NUM_PARALLEL"] = n_users
    path = printable(model if model.startswith("./") else str(Path(model).absolute()))
    environment = " ".join(f"{name}={value}" for name, value in values.items() if name.isupper())
    words = (
        f"PARAMETER {name} {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in {"num_ctx": n_ctx, **values}.items()
        if not name.isupper()
    )
    lines = [f"# Start the server with: {environment} ollama serve", f"FROM {path}", *words]
    return ToolLine("Ollama", "\n".join(lines), missing)
