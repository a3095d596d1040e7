"""Which kernels are timed to know a machine's ceilings for a model, in which sizes, and what makes
two of them equal.

A roof has two parts: the rate of reading weights (one column: a decode step) and of multiplying
them (many columns: a prefill step). Each type of weights has its own kernel, so the lab measures a
ceiling for each type that a model uses, in the shape that holds most of its bytes at many sizes of
step (a second shape with a large share of them only at the smallest and the largest), and in the
buffer of its weights. Attention is probed as flash attention and plain, with the model's own heads
(some kernels are slow for some widths), over short and long contexts: query heads that share a key
find it in a cache at some lengths, and read it from memory one by one at others. A plain read
of memory without a kernel shows whether the kernel or the memory is slow. Probes of the same
weights follow one another: the engine fills them once.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.core import cost
from lab.core.attention import AttentionLayers, attention_layers
from lab.core.files import listed
from lab.core.matrices import (
    BLOCKS,
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    UNMULTIPLIED,
    Matrix,
    matrices_of,
)
from lab.core.record import Model, Rate, Settings
from lab.errors import LabError
from lab.process.wire import (
    ATTENTION,
    DOWNLOAD,
    MUL_MAT,
    MUL_MAT_ID,
    PLAIN_ATTENTION,
    UPLOAD,
    Probe,
)
from lab.runner.system_files import system_text

READ = "read"  # the operation of a plain read of memory

COLUMNS = (
    1,
    2,
    4,
    8,
    32,
    128,
)  # batch sizes between decode and prefill; a full ubatch is added
FEW_COLUMNS = (
    1,
    8,
    128,
)  # of types that the model does not use: there a line lies between them
SECONDS = 0.2  # of repetitions of a probe in a round, at most
MIN_SHARE = 0.01  # of the bytes of a decode step: types with less are not probed
SECOND_SHARE = 0.2  # of the bytes of a type: from this share on a second shape is probed
MOST_ROWS = 16_384  # of a matrix, so that a pass does not take seconds
MOST_OUTPUTS = 8  # tokens for an output matrix: it works for few tokens only
DECODE_LENGTHS = (256, 512, 4096, 32768)
PREFILL_LENGTHS = (512, 4096)
"""Positions that attention of one token and of a full ubatch looks back at. From 512 on llama.cpp
splits the cache among the threads of a CPU (ops.cpp, use_split_kv_path).
"""

COPIES = (16 * 2**10, 64 * 2**20)
"""Bytes of copies: the small one shows what any copy to a device takes, the large one what a byte
takes.
"""

MOST_READ_OFTEN = 8  # tokens: up to here a product is limited by the traffic of its weights
MOST_MIXED = 32  # tokens: up to here traffic matters less, beyond it not at all
OFTEN = 4
SOMETIMES = 1
SELDOM = 0.25
"""How many times the last-level cache a pass goes through, by how much memory traffic matters."""

DEFAULT_CACHE = 64 * 2**20
"""Bytes, where the system does not tell: L2 caches of today's GPUs hold 4 to 96 MB."""

LEAST_PASS = 64 * 2**20
MOST_PASS = 640 * 2**20
"""Bytes that a pass which reads memory goes through, at least and at most. They are filled before:
where a virtual machine shows the 300 MB cache of its host, four times that took half a minute.
"""

MOST_CACHES = 256 * 2**20
"""Bytes of the caches that attention goes through: a kernel that reads 1 GB/s needs 0.3 s then."""

MOST_SCORES = 2 * 2**30  # bytes of the scores of plain attention: larger ones are not probed

MOST_LAYER = 2**30  # bytes of a layer's cache: longer contexts are not probed
SCORE_BYTES = 8  # of plain attention, for each query and position: scores and their softmax

THREAD_FLOPS = 2e9
"""FLOPs of a thread in a pass on the CPU, at most about: where arithmetic is the limit, a pass need
not go through much memory.
"""


class Kernel(NamedTuple):
    """What probes of one kernel share, at all sizes of step and of context."""

    op: str
    type: str
    rows: int
    columns: int
    n_head_kv: int | None
    n_expert: int | None


class ProbeKey(NamedTuple):
    """What makes two probes the same measurement."""

    kernel: Kernel
    n_expert_used: int | None
    n_tokens: int
    n_positions: int | None
    n_threads: int


def kernel(timed: Probe | Rate) -> Kernel:
    """The kernel of a probe, or of the rate that came of it."""
    return Kernel(
        timed.op, timed.type, timed.rows, timed.columns, timed.n_head_kv, timed.n_expert
    )


def key(timed: Probe | Rate) -> ProbeKey:
    """The key of a probe, or of the rate that came of it."""
    return ProbeKey(
        kernel(timed), timed.n_expert_used, timed.n_tokens, timed.n_positions, timed.n_threads
    )


def probes(
    model: Model, settings: Settings, types: Sequence[str] = (), device: str | None = None
) -> list[Probe]:
    """What to time for a model on a device (None: the CPU): its weights and `types`, attention,
    copies.

    LabError for a model that cannot be counted, and for a type that cannot be probed.
    """
    matrices = matrices_of(model)
    heads = attention_layers(model)
    if matrices is None or heads is None:
        reason = f" ({model.uncounted})" if model.uncounted else ""
        raise LabError(
            f"The kernels of {model.name} cannot be derived from its header{reason}.",
            "Use another model.",
        )
    if device is not None:
        settings = dataclasses.replace(settings, n_threads=1, n_threads_batch=1)
    groups = _matrices_by_type(model)
    layer_types = _layer_types(groups)
    n_own = len(groups)
    for kind in types:
        if kind not in layer_types:
            groups += [[matrix] for matrix in _matrices_packed_as(kind, model, matrices)]
    wanted_probes: list[Probe] = []
    for index, group in enumerate(groups):
        between = COLUMNS if index < n_own else FEW_COLUMNS
        for matrix in group:
            sizes = [1, settings.n_ubatch]
            if matrix is group[0]:
                sizes += between
            wanted_probes += _product_probes(model, settings, matrix, sizes, device)
    if heads:
        most_layers = max(heads, key=lambda group: group.n_layer)
        wanted_probes += _attention_probes(settings, most_layers, device)
    if device is not None:
        wanted_probes += _copy_probes(device)
    return list(dict.fromkeys(wanted_probes))


def _layer_types(groups: Sequence[Sequence[Matrix]]) -> set[str]:
    """The types of the matrices that are in layers."""
    return {matrix.type for matrix in itertools.chain(*groups) if _is_in_layers(matrix)}


def missing(wanted_probes: Sequence[Probe], rates: Sequence[Rate]) -> list[Probe]:
    """The probes without a rate."""
    timed = set(map(key, rates))
    return [probe for probe in wanted_probes if key(probe) not in timed]


def used_types(model: Model) -> list[str]:
    """The types of matrices that hold at least MIN_SHARE of what a decode step reads, the largest
    first.
    """
    n_bytes: dict[str, float] = collections.defaultdict(float)
    for product in cost.products(model, 1, 1) or ():
        n_bytes[product.matrix.type] += product.n_bytes
    least = MIN_SHARE * sum(n_bytes.values())
    ordered = sorted(n_bytes, key=lambda kind: -n_bytes[kind])
    return [kind for kind in ordered if n_bytes[kind] >= least]


def pass_bytes(times: float, device: str | None = None) -> int:
    """Bytes that a pass goes through: `times` the device's last-level cache, within limits."""
    cache_bytes = last_level_cache() if device is None else DEFAULT_CACHE
    least = round(LEAST_PASS * times / OFTEN)
    return max(least, min(MOST_PASS, round(times * cache_bytes)))


@cache
def last_level_cache() -> int:
    """Bytes of this machine's last-level caches, all of them; DEFAULT_CACHE where the system does
    not tell.
    """
    sizes: dict[int, dict[str, int]] = {}  # by level and by the cores that share the cache
    for index in listed(Path("/sys/devices/system/cpu"), "cpu[0-9]*/cache/index*"):
        level = system_text(index / "level").strip()
        size = system_text(index / "size").strip()
        shared_by = system_text(index / "shared_cpu_list").strip()
        if level.isdecimal() and re.fullmatch("[0-9]+[KMG]", size):
            unit = {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
            sizes.setdefault(int(level), {})[shared_by] = int(size[:-1]) * unit
    if not sizes:
        return DEFAULT_CACHE
    return sum(sizes[max(sizes)].values()) or DEFAULT_CACHE


def _is_in_layers(matrix: Matrix) -> bool:
    return matrix.part not in (OUTPUT, EMBEDDING, UNMULTIPLIED)


def _matrices_by_type(model: Model) -> list[list[Matrix]]:
    """For each used type the shape that a decode step reads most of, then those that matter
    besides.

    These are a second shape with a large share of the bytes, and one of experts, which have a
    kernel of their own.
    """
    read: dict[Kernel, float] = collections.defaultdict(float)
    matrices: dict[Kernel, Matrix] = {}
    for product in cost.products(model, 1, 1) or ():
        matrix = product.matrix
        form = Kernel(
            _operation(matrix), matrix.type, matrix.rows, matrix.columns, None, matrix.n_expert
        )
        read[form] += product.n_bytes
        matrices.setdefault(form, matrix)
    groups = []
    for kind in used_types(model):
        forms = [form for form in read if form.type == kind]
        forms.sort(key=lambda form: -read[form])
        least = SECOND_SHARE * sum(read[form] for form in forms)
        group: list[Matrix] = []
        ops = set()
        for place, form in enumerate(forms):
            is_large_second = place == 1 and read[form] >= least
            if is_large_second or form.op not in ops:
                group.append(matrices[form])
                ops.add(form.op)
        groups.append(group)
    return groups


def _matrices_packed_as(kind: str, model: Model, matrices: Sequence[Matrix]) -> list[Matrix]:
    """The model's largest matrix of its layers (and of its experts) that could be packed in a type,
    or a LabError.
    """
    if kind not in BLOCKS or kind == "F32":
        raise LabError(
            f"{kind} is not a weight type that the lab can probe.",
            f"Known: {', '.join(BLOCKS)}.",
        )
    block_weights, _ = BLOCKS[kind]
    largest: dict[str, Matrix] = {}
    for matrix in matrices:
        if not _is_in_layers(matrix) or matrix.columns % block_weights:
            continue
        op = _operation(matrix)
        if op not in largest or matrix.n_weights > largest[op].n_weights:
            largest[op] = matrix
    if not largest:
        raise LabError(
            f"{kind} packs {block_weights} weights together; no matrix of {model.name} is wide "
            "enough.",
            "Leave the type out, or use another model: -m MODEL",
        )
    packed = []
    for op in (MUL_MAT_ID, MUL_MAT):
        if op in largest:
            packed.append(dataclasses.replace(largest[op], type=kind))
    return packed


def _operation(matrix: Matrix) -> str:
    return MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT


def _product_probes(
    model: Model, settings: Settings, matrix: Matrix, sizes: Sequence[int], device: str | None
) -> list[Probe]:
    """Products of a matrix with these numbers of tokens."""
    n_expert = None
    n_expert_used = None
    if matrix.part == EXPERTS:
        n_expert = matrix.n_expert
        n_expert_used = model.n_expert_used
    product_probes = []
    for n_tokens in sorted(set(sizes)):
        if n_tokens > MOST_OUTPUTS and not _is_in_layers(matrix):
            continue
        n_threads = settings.n_threads if n_tokens == 1 else settings.n_threads_batch
        probe = Probe(
            _operation(matrix),
            matrix.type,
            rows=min(matrix.rows, MOST_ROWS),
            columns=matrix.columns,
            n_head_kv=None,
            n_tokens=n_tokens,
            n_bytes=_product_bytes(matrix.type, n_tokens, n_threads, device),
            n_threads=n_threads,
            device=device,
            seconds=SECONDS,
            n_expert=n_expert,
            n_expert_used=n_expert_used,
            repack=settings.repack if device is None else None,
        )
        product_probes.append(probe)
    return product_probes


def _product_bytes(kind: str, n_tokens: int, n_threads: int, device: str | None) -> int:
    """Bytes of weights that a pass of products reads at least."""
    if n_tokens <= MOST_READ_OFTEN:
        n_bytes = pass_bytes(OFTEN, device)
    elif n_tokens <= MOST_MIXED:
        n_bytes = pass_bytes(SOMETIMES, device)
    else:
        n_bytes = pass_bytes(SELDOM, device)
    if device is not None:
        return n_bytes
    block_weights, block_bytes = BLOCKS[kind]
    n_weights = THREAD_FLOPS * n_threads / (2 * n_tokens)
    return min(n_bytes, round(n_weights * block_bytes / block_weights))


def _attention_probes(
    settings: Settings, heads: AttentionLayers, device: str | None
) -> list[Probe]:
    """Flash attention and plain attention of one token and of a full ubatch, over several lengths,
    with the heads of most layers.
    """
    kinds = [ATTENTION]
    if settings.can_be_plain and settings.type_k == settings.type_v:
        kinds.append(PLAIN_ATTENTION)
    attention_probes: list[Probe] = []
    for op in kinds:
        attention_probes += _probes_of_attention(op, settings, heads, device)
    return attention_probes


def _probes_of_attention(
    op: str, settings: Settings, heads: AttentionLayers, device: str | None
) -> list[Probe]:
    head_dim = heads.head_dim
    kind = settings.cache_types[0].upper()
    block_weights, block_bytes = BLOCKS.get(kind, (1, 4))
    attention_probes = []
    for n_positions in DECODE_LENGTHS:
        n_weights = n_positions * 2 * heads.n_head_kv * head_dim
        layer_bytes = n_weights * block_bytes // block_weights
        if n_positions > PREFILL_LENGTHS[0] and layer_bytes > MOST_LAYER:
            continue
        n_bytes_of_token = min(MOST_CACHES, pass_bytes(OFTEN, device))
        sizes = [(1, settings.n_threads, n_bytes_of_token)]
        if n_positions in PREFILL_LENGTHS:
            sizes.append((settings.n_ubatch, settings.n_threads_batch, 1))
        for n_tokens, n_threads, n_bytes in sizes:
            score_bytes = SCORE_BYTES * heads.n_head * n_tokens * n_positions
            if op == PLAIN_ATTENTION and score_bytes > MOST_SCORES:
                continue
            probe = Probe(
                op,
                kind,
                rows=heads.n_head,
                columns=head_dim,
                n_head_kv=heads.n_head_kv,
                n_tokens=n_tokens,
                n_bytes=n_bytes,
                n_threads=n_threads,
                device=device,
                seconds=SECONDS,
                n_positions=n_positions,
            )
            attention_probes.append(probe)
    return attention_probes


def _copy_probes(device: str) -> list[Probe]:
    """Copies to and from a device."""
    copies = []
    for op in (UPLOAD, DOWNLOAD):
        for n_bytes in COPIES:
            copies.append(
                Probe(op, "F32", 1, n_bytes // 4, None, 1, n_bytes, 1, device, SECONDS)
            )
    return copies
