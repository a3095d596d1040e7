"""The predictions of two models on one chunk of text: the reference's logits go to a file, the candidate reads them.

As llama-perplexity does, a chunk is evaluated in an empty cache and only its second half is scored. Log-probabilities
are computed in 64 bits, a few rows at a time; nothing is rounded or clamped.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

from lab.core.payloads import Divergence
from lab.engine import llama
from lab.engine.bindings import llama_cpp
from lab.engine.llama import Context
from lab.errors import LabError

N_ROWS = 16
"""Rows of logits that are computed with at once: 16 of 152,000 entries take 19 MB in 64 bits."""


def logits(context: Context, tokens: list[int], first: int) -> Any:
    """The logits at the positions from `first` to the last but one, as rows in llama.cpp's own memory."""
    import numpy as np

    lib, n = llama_cpp(), len(tokens)
    lib.llama_memory_clear(lib.llama_get_memory(context.pointer), True)
    ids = (ctypes.c_int32 * n)(*tokens)
    wanted = (ctypes.c_int8 * n)(*(int(first <= i < n - 1) for i in range(n)))
    batch = lib.llama_batch(
        n_tokens=n,
        token=ctypes.cast(ids, ctypes.POINTER(ctypes.c_int32)),
        logits=ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8)),
    )
    llama.decode(context, batch)
    address = ctypes.cast(lib.llama_get_logits(context.pointer), ctypes.c_void_p).value
    if not address:
        raise LabError("llama.cpp returns no logits for this model.", "Compare models that generate text.")
    n_rows, n_vocab = n - 1 - first, context.loaded.n_vocab
    values = (ctypes.c_float * (n_rows * n_vocab)).from_address(address)
    return np.frombuffer(memoryview(values), dtype=np.float32).reshape(n_rows, n_vocab)


def keep(context: Context, tokens: list[int], first: int, path: Path) -> None:
    """Write the reference's logits of a chunk to a file."""
    try:
        logits(context, tokens, first).tofile(path)
    except OSError as problem:
        raise LabError(
            f"The logits of a chunk cannot be written: {problem.strerror}.", "Free some disk space, or set TMPDIR."
        ) from None


def diverge(context: Context, tokens: list[int], first: int, path: Path) -> Divergence:
    """How far this model's predictions of a chunk are from the reference's, which `keep` wrote."""
    import numpy as np

    own, reference = logits(context, tokens, first), np.fromfile(path, dtype=np.float32)
    return divergence(reference.reshape(own.shape), own, tokens[first + 1 :])


def divergence(reference: Any, own: Any, following: list[int]) -> Divergence:
    """Arithmetic on two arrays of logits, a row for each position; `following` are the text's next tokens."""
    import numpy as np

    kl, n_same, nll, reference_nll = list[float](), 0, 0.0, 0.0
    for start in range(0, len(own), N_ROWS):
        p, q = (log_softmax(array[start : start + N_ROWS]) for array in (reference, own))
        kl += np.einsum("ij,ij->i", np.exp(p), p - q).tolist()
        n_same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        at = np.arange(len(p)), np.array(following[start : start + N_ROWS])
        reference_nll -= float(p[at].sum())
        nll -= float(q[at].sum())
    nll, reference_nll = nll / len(own), reference_nll / len(own)
    if not all(map(math.isfinite, [nll, reference_nll, *kl])):
        raise LabError("A model's predictions are not numbers (NaN).", "The file may be broken: get it again.")
    return Divergence(tuple(float(f"{value:.6g}") for value in kl), n_same, nll, reference_nll)


def log_softmax(rows: Any) -> Any:
    """The logarithm of softmax of each row, in 64 bits."""
    import numpy as np

    rows = np.asarray(rows, dtype=np.float64)
    rows = rows - rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
