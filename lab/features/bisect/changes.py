"""What else differs between two builds: defaults, resolved settings, layouts of the weights.

A changed default is the commonest cause of a slowdown after an update. The lab sets most settings
itself, so such a change may not show in its own figures; other programs take the default.
"""

from __future__ import annotations

from lab.core.lists import join_and
from lab.core.record import Record
from lab.features.bisect.figures import Bisected
from lab.show import comparison

UNKNOWN = "unknown"
SET_BY_THE_LAB = {
    *("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "flash_attn_type"),
    *("type_k", "type_v", "op_offload", "n_seq_max", "kv_unified", "swa_full", "no_perf"),
    "n_gpu_layers",
}
"""Fields that the lab sets for every run, whatever their default is."""


def resolved(record: Record) -> dict[str, str]:
    """What a build made of the settings, and the layouts that it keeps the weights in."""
    settings = record.settings
    return {
        "flash attention": settings.flash_attn_resolved or UNKNOWN,
        "weights in": weights_in(record),
        "threads": f"{settings.n_threads}, prefill {settings.n_threads_batch}",
        "threads wait": str(settings.thread_wait or "by default"),
        "OpenMP": settings.openmp or UNKNOWN,
    }


def weights_in(record: Record) -> str:
    """The layouts of the weights with their MB, such as `AMX 100 MB, CPU_Mapped 97 MB`."""
    placement = record.run.placement
    if placement is None:
        return UNKNOWN
    sizes: dict[str, int] = {}
    for buffer in placement.buffers:
        if buffer.part == "model":
            sizes[buffer.name] = sizes.get(buffer.name, 0) + buffer.n_bytes
    if not sizes:
        return UNKNOWN
    return ", ".join(f"{name} {n_bytes / 1e6:.0f} MB" for name, n_bytes in sizes.items())


def sentences(result: Bisected, fast: int, slow: int) -> list[str]:
    """What changed from one build to a later one, in sentences."""
    lines = []
    names = f"from {result.label(fast)} to {result.label(slow)}"
    for text in changed_defaults(result, fast, slow):
        lines.append(f"Changed default {names}: {text}.")
    before = result.records.get(fast)
    after = result.records.get(slow)
    if before is None or after is None:
        return lines
    of_before = resolved(before)
    for name, value in resolved(after).items():
        if value != of_before[name] and UNKNOWN not in (value, of_before[name]):
            lines.append(f"Changed {names}: {name} {value}, before {of_before[name]}.")
    infos = [before.machine.system_info, after.machine.system_info]
    if None not in infos and infos[0] != infos[1]:
        left, right = comparison.instructions_of_one_side([info or "" for info in infos])
        lines.append(f"llama.cpp's system info has {right} instead of {left} {names}.")
    return lines


def changed_defaults(result: Bisected, fast: int, slow: int) -> list[str]:
    """The defaults that both builds have and that differ, and the fields that only one has."""
    before = result.builds.get(fast)
    after = result.builds.get(slow)
    if before is None or after is None or not before.defaults or not after.defaults:
        return []
    changed = []
    for name, value in after.defaults.items():
        old = before.defaults.get(name)
        if old is not None and old != value:
            _, _, field = name.rpartition(".")
            remark = " (the lab sets it itself)" if field in SET_BY_THE_LAB else ""
            changed.append(f"{name} is {value} instead of {old}{remark}")
    new = sorted(set(after.defaults) - set(before.defaults))
    if new:
        changed.append(f"new are {join_and(new)}")
    return changed


def not_covered() -> str:
    """What the search cannot see."""
    return (
        "All builds ran one model with one set of settings, so the search does not see models that "
        "only newer builds read, nor defaults of llama-server, Ollama or other programs."
    )
