"""Chooses the kernels to probe for a model: its types and shapes, and the memory to read.

Each type of weights is probed in the shape that holds most of its bytes, at many sizes of step; a second shape with a
large share of them only at the smallest and the largest size. Attention is probed over short and long contexts (query
heads that share a key find it in a cache at some lengths, and read it from memory one by one at others), as the
settings ask for it. Probes of the same weights follow one another, the one that needs most of them first: the engine
fills them once.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from lab.core import cost, shape
from lab.core.record import Model, Settings
from lab.core.shape import BLOCKS, EMBEDDING, EXPERTS, OUTPUT, Matrix
from lab.errors import LabError
from lab.process.wire import ATTENTION, DOWNLOAD, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION, UPLOAD, Probe
from lab.runner.limits import sysctl, system_text

COLUMNS = (1, 2, 4, 8, 32, 128)
"""Batch sizes between decode and prefill; a full ubatch is added."""

SECONDS = 0.2
"""Seconds of repetitions of a probe in a round, at most."""

MIN_SHARE = 0.01
"""Types with less than this share of the bytes of a decode step are not probed."""

SECOND_SHARE = 0.2
"""A second shape is probed from this share of its type."""

MOST_ROWS, MOST_OUTPUTS = 16_384, 8
"""The most rows of a probed matrix, and the most tokens for an output matrix, so that a pass does not take seconds."""

DECODE_LENGTHS, PREFILL_LENGTHS = (512, 4096, 32768), (512, 4096)
"""Positions a layer that attention is probed over: of one token, of a full ubatch."""

UNPACKED = ("F16", "BF16", "F32")
"""Types of caches that attention works on without flash attention: llama.cpp wants it for a packed cache of values."""

COPIES = (16 * 2**10, 64 * 2**20)
"""Bytes of the copies to and from a device: one that shows what any copy takes, one that shows what a byte takes."""

THREAD_FLOPS = 2e9
"""FLOPs of a thread in a pass on the CPU, at most about: where arithmetic is the limit, a pass need not go through much
memory."""

MANY, MIDDLE, FEW = 4, 1, 0.25
"""How many times the last-level cache a pass goes through: where memory traffic matters, less, not at all."""

DEFAULT_CACHE = 64 * 2**20
"""Bytes taken for the last-level cache where the system does not tell, and for that of any other device than the CPU:
the L2 caches of today's GPUs hold 4 to 96 MB."""

LEAST_PASS, MOST_PASS, MOST_LAYER = 64 * 2**20, 2 * 2**30, 2**30
"""The least and most bytes of a pass; contexts whose cache is larger than MOST_LAYER per layer are not probed."""


def probes(model: Model, settings: Settings, types: Sequence[str] = (), device: str | None = None) -> list[Probe]:
    """What to measure for a model on a device: its weight types (and `types`) by columns, and attention.

    On another device than the CPU, where threads are nothing, copies to and from it. LabError where the header does not
    tell the shape, and for types that cannot be.
    """
    known, layers = shape.matrices(model), shape.heads(model)
    if known is None or layers is None:
        reason = f" ({model.uncounted})" if model.uncounted else ""
        raise LabError(f"The kernels of {model.name} cannot be derived from its header{reason}.", "Use another model.")
    by_type = _shapes(model)
    in_layers = {kind for kind, group in by_type.items() if any(m.part not in (OUTPUT, EMBEDDING) for m in group)}
    extra = [[matrix] for kind in types if kind not in in_layers for matrix in _shapes_for(model, known, kind)]
    if device is not None:
        settings = dataclasses.replace(settings, n_threads=1, n_threads_batch=1)

    def product(matrix: Matrix, n_tokens: int) -> Probe:
        n_bytes = pass_bytes(MANY if n_tokens <= 8 else MIDDLE if n_tokens <= 32 else FEW, device)
        n_threads = settings.n_threads if n_tokens == 1 else settings.n_threads_batch
        if device is None:
            block_weights, block_bytes = BLOCKS[matrix.type]
            n_bytes = min(n_bytes, round(THREAD_FLOPS * n_threads / (2 * n_tokens) * block_bytes / block_weights))
        size = min(matrix.rows, MOST_ROWS), matrix.columns, None, n_tokens, n_bytes, n_threads, device, SECONDS, None
        repack = settings.repack if device is None else None
        if matrix.part == EXPERTS:
            return Probe(MUL_MAT_ID, matrix.type, *size, matrix.n_expert, model.n_expert_used, repack)
        return Probe(MUL_MAT, matrix.type, *size, repack=repack)

    wanted = []
    for matrices in (*by_type.values(), *extra):
        for matrix in matrices:
            columns = (*COLUMNS, settings.n_ubatch) if matrix is matrices[0] else (1, settings.n_ubatch)
            is_small = matrix.part not in (OUTPUT, EMBEDDING)  # the output matrix works for few tokens only
            wanted += [product(matrix, n) for n in sorted({*columns}) if n <= MOST_OUTPUTS or is_small]
    wanted += _attention(model, settings, max(layers, key=lambda part: part.n_layer), device)
    if device is not None:
        wanted += [
            Probe(op, "F32", 1, n // 4, None, 1, n, 1, device, SECONDS) for op in (UPLOAD, DOWNLOAD) for n in COPIES
        ]
    return list(dict.fromkeys(wanted))


def used_types(model: Model) -> list[str]:
    """The types of matrices that hold at least MIN_SHARE of what a decode step reads, the largest first."""
    read: dict[str, float] = {}
    for product in cost.products(model, 1, 1) or []:
        read[product.matrix.type] = read.get(product.matrix.type, 0) + product.n_bytes
    least = MIN_SHARE * sum(read.values())
    return [kind for kind in sorted(read, key=lambda kind: -read[kind]) if read[kind] >= least]


def _shapes(model: Model) -> dict[str, list[Matrix]]:
    """Of each used type the shape that a decode step reads most of; then the second, and experts, where they matter."""
    used = used_types(model)
    read: dict[str, dict[tuple[object, ...], tuple[float, Matrix]]] = {kind: {} for kind in used}
    for product in cost.products(model, 1, 1) or []:
        matrix = product.matrix
        if matrix.type in read:
            key = matrix.part == EXPERTS, matrix.rows, matrix.columns, matrix.n_expert
            n_bytes = read[matrix.type].get(key, (0.0, matrix))[0] + product.n_bytes
            read[matrix.type][key] = n_bytes, matrix
    chosen = {}
    for kind, sizes in read.items():
        ordered = sorted(sizes.values(), key=lambda size: -size[0])
        total = sum(n_bytes for n_bytes, _ in ordered)
        kept = [matrix for n_bytes, matrix in ordered[:2] if n_bytes >= SECOND_SHARE * total] or [ordered[0][1]]
        for experts in (True, False):  # each has a kernel of its own
            alike = [matrix for _, matrix in ordered if (matrix.part == EXPERTS) == experts]
            if alike and not any((matrix.part == EXPERTS) == experts for matrix in kept):
                kept.append(alike[0])
        chosen[kind] = kept
    return chosen


def _shapes_for(model: Model, known: Sequence[Matrix], kind: str) -> list[Matrix]:
    """The model's largest matrix of its layers (and of its experts) that could be packed in a type.

    LabError where none can.
    """
    if kind not in BLOCKS or kind == "F32":
        raise LabError(f"{kind} is not a weight type that the lab can probe.", f"Known: {', '.join(BLOCKS)}.")
    fitting = [m for m in known if m.part not in (OUTPUT, EMBEDDING) and m.columns % BLOCKS[kind][0] == 0]
    groups = ([m for m in fitting if (m.part == EXPERTS) == experts] for experts in (True, False))
    largest = [max(group, key=lambda m: m.n_weights) for group in groups if group]
    if not largest:
        raise LabError(
            f"{kind} packs {BLOCKS[kind][0]} weights together; no matrix of {model.name} is wide enough.",
            "Leave the type out, or use another model: -m MODEL",
        )
    return [dataclasses.replace(m, type=kind) for m in largest]


def _attention(model: Model, settings: Settings, heads: shape.Heads, device: str | None) -> list[Probe]:
    """Attention of one token and of a full ubatch, over several lengths, with the heads of most layers.

    Without flash attention where settings say so and the cache is not packed, at lengths whose scores fit a pass.
    """
    head_dim, kind = model.head_dim or 0, settings.type_k.upper()
    n_weights, n_bytes = BLOCKS.get(kind, (1, 4))
    is_plain = settings.flash_attn == "off" and kind in UNPACKED and settings.type_k == settings.type_v
    wanted = []
    for n_positions in DECODE_LENGTHS:
        layer_bytes = n_positions * 2 * heads.n_head_kv * head_dim * n_bytes // n_weights
        if n_positions > DECODE_LENGTHS[0] and layer_bytes > MOST_LAYER:
            continue
        for n, n_threads in ((1, settings.n_threads), (settings.n_ubatch, settings.n_threads_batch)):
            if n > 1 and n_positions not in PREFILL_LENGTHS:
                continue
            if is_plain and 8 * heads.n_head * n * n_positions > MOST_PASS:
                continue
            size = heads.n_head, head_dim, heads.n_head_kv, n, pass_bytes(MANY, device) if n == 1 else 1
            op = PLAIN_ATTENTION if is_plain else ATTENTION
            wanted.append(Probe(op, kind, *size, n_threads, device, SECONDS, n_positions))
    return wanted


def pass_bytes(times: float, device: str | None = None) -> int:
    """Bytes that a pass goes through: `times` the device's last-level cache, within limits."""
    size = last_level_cache() if device is None else DEFAULT_CACHE
    return max(round(LEAST_PASS * times / MANY), min(MOST_PASS, round(times * size)))


@cache
def last_level_cache() -> int:
    """Bytes of this machine's last-level caches, all of them; DEFAULT_CACHE where the system does not tell."""
    return linux_cache(Path("/sys/devices/system/cpu")) or _mac_cache() or DEFAULT_CACHE


def linux_cache(folder: Path) -> int:
    """Bytes of the caches of the highest level that Linux lists in `folder`, each shared one once; 0 for none."""
    by_level: dict[int, dict[str, int]] = {}
    for index in folder.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, shared = (system_text(index / name).strip() for name in ("level", "size", "shared_cpu_list"))
            number, unit = re.fullmatch(r"(\d+)([KMG]?)", size).groups()  # type: ignore[union-attr]
            n_bytes = int(number) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[unit]
            by_level.setdefault(int(level), {})[shared] = n_bytes
        except (ValueError, AttributeError):  # what a system does not list, it does not have
            continue
    return sum(by_level[max(by_level)].values()) if by_level else 0


def _mac_cache() -> int:
    """Bytes of the last-level cache that macOS tells; 0 elsewhere."""
    if platform.system() != "Darwin":
        return 0
    names = ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize")
    answers = (sysctl(name) or "" for name in names)
    return next((int(answer) for answer in answers if answer.isdigit() and int(answer)), 0)
