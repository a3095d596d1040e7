"""A setup as the command line of llama-server.

The names are those of llama.cpp's common/arg.cpp.
"""

from __future__ import annotations

from lab.core import shell
from lab.core.asked_settings import table
from lab.core.memory import padded
from lab.core.record import Settings

OPTIONS = {
    setting.recorded: setting.server_option
    for setting in table().values()
    if setting.server_option is not None
}
"""What llama-server calls the settings of a record."""

ALL_LAYERS = 999  # more than any model has; llama.cpp takes it for all


def llama_server(
    model: str, settings: Settings, n_prompt: int, n_gen: int, n_users: int = 1
) -> str:
    """The command that runs a GGUF file as `settings` say, with room for `n_users` answers."""
    options = list[str]()
    for name, value in chosen_values(settings, n_users).items():
        if value is not None:
            options += option(name, value)
    n_ctx = n_users * padded(n_prompt + n_gen)
    sizes = ["--ctx-size", n_ctx, "--parallel", n_users]
    return shell.join("llama-server", "--model", model, *sizes, *options)


def chosen_values(settings: Settings, n_users: int) -> dict[str, object]:
    """The values of OPTIONS; None where llama.cpp chooses."""
    values = {name: getattr(settings, name) for name in OPTIONS}
    values["flash_attn"] = settings.flash_attention
    if n_users == 1:
        values["kv_unified"] = None
    if settings.n_threads < 1:
        values["n_threads"] = None
        values["n_threads_batch"] = None
    if settings.n_gpu_layers < 0:
        values["n_gpu_layers"] = ALL_LAYERS
    if settings.n_gpu_layers == 0:  # as in the lab, devices shall not compute prefill either
        values["devices"] = ()
    if settings.mmap is not None:
        values["mmap"] = "mmap" if settings.mmap else "none"
    return values


def option(name: str, value: object) -> list[str]:
    """The words of an option with its value."""
    flag = OPTIONS[name]
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{flag[2:]}"]
    if isinstance(value, tuple):
        return [flag, ",".join(map(str, value)) or "none"]
    return [flag, str(value)]
