"""The predictions of two models on one chunk of text: the reference's logits go to a file, the candidate reads them.

As llama-perplexity does, a chunk is evaluated in an empty cache and only its second half is scored. Log-probabilities
are computed in 64 bits, a few rows at a time; nothing is rounded or clamped.

Where the models do not fit into memory together, the reference runs first and keeps of each position only its N_TOP
largest log-probabilities, and two sums over the rest: of p and of p log p. The divergence is then known within bounds.
Its least value treats the rest as one entry (the log-sum inequality); its largest puts as much of the rest's
probability as possible (at most that of the N_TOP-th entry each) on the entries that the candidate finds least likely.
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

N_TOP = (
    1024  # entries of the vocabulary that are kept of each position where the reference runs alone
)
N_ROWS = (
    16  # rows of logits that are computed with at once: 16 of 152,000 entries take 19 MB in 64 bits
)


def logits(context: Context, tokens: list[int], first: int) -> Any:
    """The logits at the positions from `first` to the last but one, as rows in llama.cpp's own memory."""
    import numpy as np

    lib = llama_cpp()
    n = len(tokens)
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
        raise LabError(
            "llama.cpp returns no logits for this model.", "Compare models that generate text."
        )
    n_rows = n - 1 - first
    n_vocab = context.loaded.n_vocab
    values = (ctypes.c_float * (n_rows * n_vocab)).from_address(address)
    return np.frombuffer(memoryview(values), dtype=np.float32).reshape(n_rows, n_vocab)


def keep(context: Context, tokens: list[int], first: int, path: Path) -> None:
    """Write the reference's logits of a chunk to a file; to an .npz file only the largest, and sums of the rest."""
    import numpy as np

    own = logits(context, tokens, first)
    try:
        if path.suffix == ".npz":
            np.savez(path, **largest(own, tokens[first + 1 :]))
        else:
            own.tofile(path)
    except OSError as problem:
        hint = "Free some disk space, or set TMPDIR."
        raise LabError(
            f"The logits of a chunk cannot be written: {problem.strerror}.", hint
        ) from None


def diverge(context: Context, tokens: list[int], first: int, path: Path) -> Divergence:
    """How far this model's predictions of a chunk are from the reference's, which `keep` wrote."""
    import numpy as np

    own = logits(context, tokens, first)
    following = tokens[first + 1 :]
    if path.suffix == ".npz":
        with np.load(path) as kept:
            return bounded(dict(kept), own, following)
    return divergence(np.fromfile(path, dtype=np.float32).reshape(own.shape), own, following)


def largest(reference: Any, following: list[int]) -> dict[str, Any]:
    """What `bounded` needs: ids and log-probabilities of the largest, sums of the rest, and the next token's."""
    import numpy as np

    made: dict[str, list[Any]] = {"ids": [], "logs": [], "rest": [], "next": []}
    for row, token in zip(reference, following, strict=True):
        p = log_softmax(row)
        order = np.argsort(-p, kind="stable")
        rest = p[order[N_TOP:]]
        made["ids"].append(order[:N_TOP].astype(np.int32))
        made["logs"].append(p[order[:N_TOP]])
        made["rest"].append((np.exp(rest).sum(), np.exp(rest) @ rest))
        made["next"].append(p[token])
    return {name: np.array(rows) for name, rows in made.items()}


def bounded(kept: dict[str, Any], own: Any, following: list[int]) -> Divergence:
    """As `divergence`, from what `largest` kept: `kl` is the least that is possible, `most` the largest mean."""
    import numpy as np

    kl = list[float]()
    most = list[float]()
    nll = list[float]()
    for row, token, ids, logs, (rest, rest_log) in zip(
        own, following, kept["ids"], kept["logs"], kept["rest"], strict=True
    ):
        q = log_softmax(row)
        exact = float(np.exp(logs) @ (logs - q[ids]))
        low = 0.0
        high = 0.0
        below = np.sort(np.delete(q, ids))  # the rest, the least likely first
        if rest > 0 and below.size:
            low = rest * (math.log(rest) - float(np.logaddexp.reduce(below)))
            shares = np.diff(np.minimum(np.arange(below.size + 1) * math.exp(logs[-1]), rest))
            high = float(rest_log - shares @ below)
        kl.append(exact + low)
        most.append(exact + max(low, high))
        nll.append(-float(q[token]))
    n_same = int((own.argmax(axis=1) == kept["ids"][:, 0]).sum())
    n = len(own)
    return _checked(kl, n_same, sum(nll) / n, -float(kept["next"].mean()), sum(most) / n)


def divergence(reference: Any, own: Any, following: list[int]) -> Divergence:
    """Arithmetic on two arrays of logits, a row for each position; `following` are the text's next tokens."""
    import numpy as np

    kl = list[float]()
    n_same = 0
    nll = 0.0
    reference_nll = 0.0
    for start in range(0, len(own), N_ROWS):
        p, q = (log_softmax(array[start : start + N_ROWS]) for array in (reference, own))
        kl += np.einsum("ij,ij->i", np.exp(p), p - q).tolist()
        n_same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        at = np.arange(len(p)), np.array(following[start : start + N_ROWS])
        reference_nll -= float(p[at].sum())
        nll -= float(q[at].sum())
    return _checked(kl, n_same, nll / len(own), reference_nll / len(own))


def _checked(
    kl: list[float], n_same: int, nll: float, reference_nll: float, most: float | None = None
) -> Divergence:
    if not all(map(math.isfinite, [nll, reference_nll, most or 0.0, *kl])):
        raise LabError(
            "A model's predictions are not numbers (NaN).", "The file may be broken: get it again."
        )
    return Divergence(
        tuple(float(f"{value:.6g}") for value in kl), n_same, nll, reference_nll, most
    )


def log_softmax(rows: Any) -> Any:
    """The logarithm of softmax of each row, in 64 bits."""
    import numpy as np

    rows = np.asarray(rows, dtype=np.float64)
    rows = rows - rows.max(axis=-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
