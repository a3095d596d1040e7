"""The predictions of two models on one chunk of text.

The reference's logits go to a file, which the candidate reads. A chunk is evaluated in an empty
cache, stretch after stretch. Log-probabilities are computed in 64 bits, a few rows at a time;
nothing is rounded or clamped.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.engine import devices, llama
from lab.engine.bindings import llama_cpp
from lab.engine.llama import LlamaContext
from lab.errors import LabError
from lab.features.quant.lines import Divergence, Stretch

N_ROWS = 16
"""Rows of logits that are computed with at once: 16 of 152,000 entries take 19 MB in 64 bits."""

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CHANGES_CACHE = re.compile(r"attn_rot|hadam|rotat", re.IGNORECASE)
"""Of a line of llama.cpp's log; its forks have other words for the same."""


def logits(context: LlamaContext, stretch: Stretch) -> npt.NDArray[np.float32] | None:
    """The logits at the scored places of a stretch, as rows in llama.cpp's memory; None for no
    such places.

    A stretch at the beginning of a text clears the cache; others continue what is in it.
    """
    import numpy as np

    lib = llama_cpp()
    if stretch.n_past == 0:
        lib.llama_memory_clear(lib.llama_get_memory(context.pointer), True)
    n_tokens = len(stretch.tokens)
    ids = (ctypes.c_int32 * n_tokens)(*stretch.tokens)
    has_logits = (ctypes.c_int8 * n_tokens)()
    for place in stretch.scored:
        has_logits[place] = 1
    batch = lib.llama_batch(
        n_tokens=n_tokens,
        token=ctypes.cast(ids, ctypes.POINTER(ctypes.c_int32)),
        logits=ctypes.cast(has_logits, ctypes.POINTER(ctypes.c_int8)),
    )
    llama.decode(context, batch)
    n_rows = len(stretch.scored)
    if n_rows == 0:
        return None
    address = ctypes.cast(lib.llama_get_logits(context.pointer), ctypes.c_void_p).value
    if not address:
        raise LabError(
            "llama.cpp returns no logits for this model.", "Compare models that generate text."
        )
    n_vocab = context.loaded.n_vocab
    values = (ctypes.c_float * (n_rows * n_vocab)).from_address(address)
    return np.frombuffer(memoryview(values), dtype=np.float32).reshape(n_rows, n_vocab)


def keep(context: LlamaContext, stretch: Stretch, path: Path) -> None:
    """Write the reference's logits of a stretch to a file."""
    rows = logits(context, stretch)
    if rows is None:
        return
    try:
        rows.tofile(path)
    except OSError as problem:
        raise LabError(
            f"The logits of a chunk cannot be written: {problem.strerror}.",
            "Free some disk space, or set TMPDIR.",
        ) from None


def diverge(context: LlamaContext, stretch: Stretch, path: Path) -> tuple[Divergence, ...]:
    """How far this model's predictions are from the reference's, which `keep` wrote; nothing for a
    stretch without scored places.
    """
    import numpy as np

    candidate = logits(context, stretch)
    if candidate is None:
        return ()
    reference = np.fromfile(path, dtype=np.float32).reshape(candidate.shape)
    return (divergence(reference, candidate, stretch.next_tokens),)


def cache_log(context: LlamaContext) -> tuple[str, ...]:
    """What llama.cpp logged of changes of the cache when it made the context, such as a rotation
    of keys and values before they are quantized."""
    del context  # the log is that of the newest
    lines = []
    for line in devices.log_lines():
        if CHANGES_CACHE.search(line):
            lines.append(line)
    return tuple(dict.fromkeys(lines))


def divergence(
    reference: npt.NDArray[np.float32],
    candidate: npt.NDArray[np.float32],
    next_tokens: Sequence[int],
) -> Divergence:
    """Arithmetic on two arrays of logits with a row for each position, and the text's next tokens.

    LabError for logits that are not numbers.
    """
    import numpy as np

    kl: list[float] = []
    n_same = 0
    nll = 0.0
    reference_nll = 0.0
    for start in range(0, len(candidate), N_ROWS):
        rows = slice(start, start + N_ROWS)
        p = log_softmax(reference[rows])
        q = log_softmax(candidate[rows])
        kl += np.einsum("ij,ij->i", np.exp(p), p - q).tolist()
        n_same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        of_text = np.arange(len(p)), np.array(next_tokens[rows])
        reference_nll -= float(p[of_text].sum())
        nll -= float(q[of_text].sum())
    if not all(map(math.isfinite, [nll, reference_nll, *kl])):
        raise LabError(
            "A model's predictions are not numbers (NaN).",
            "The file may be broken: get it again.",
        )
    rounded = tuple(float(f"{value:.6g}") for value in kl)
    return Divergence(rounded, n_same, nll / len(candidate), reference_nll / len(candidate))


def log_softmax(logits_of_rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The logarithm of softmax of each row, in 64 bits."""
    import numpy as np

    rows = np.asarray(logits_of_rows, dtype=np.float64)
    rows = rows - rows.max(axis=-1, keepdims=True)
    softmax: npt.NDArray[np.float64] = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return softmax
