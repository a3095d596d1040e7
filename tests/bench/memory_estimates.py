"""Are the estimates of KV cache and compute buffer those that llama.cpp reserves?

    python3 -m uv run python -m tests.bench.memory_estimates [NAME ...]

For the whole catalog (or the named models) at three lengths, with and without flash attention. Only
a header of each model is written (the weights are a hole in the file, which takes no disk), and
llama.cpp says in its log what it would reserve, without reading a weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from unittest import mock

from lab.core import memory
from lab.models import catalog, synthetic
from tests.support import miniature
from tests.support.records import SETTINGS

LENGTHS = (512, 4096, 32768)
WITHIN = 0.05  # of the compute buffer
EQUAL = 0.001  # llama.cpp prints hundredths of a MiB


class Hole:
    """Stands in for a tensor's random weights: the file grows, and nothing is written."""

    def __init__(
        self,
        tensor: synthetic.PlannedTensor,
        generator: Any,
        sharpness: float,
    ) -> None:
        self.nbytes = tensor.n_bytes

    def tofile(self, file: IO[bytes]) -> None:
        file.flush()
        end = file.tell() + self.nbytes
        file.truncate(end)
        file.seek(end)


@dataclass(frozen=True)
class Row:
    """What llama.cpp reserves for a context, and by how much the estimate is off (a share)."""

    name: str
    flash_attn: str
    n_ctx: int
    kv_bytes: float
    kv_error: float
    compute_bytes: float
    compute_error: float

    def print(self) -> None:
        cells = [
            self.name,
            self.flash_attn,
            str(self.n_ctx),
            f"{self.kv_bytes / 2**20:.2f}",
            f"{self.kv_error:+.1%}",
            f"{self.compute_bytes / 2**20:.2f}",
            f"{self.compute_error:+.1%}",
        ]
        print(" | ".join(cells), flush=True)


def compare(
    name: str,
    path: Path,
    flash_attn: str,
    n_ctx: int,
) -> Row | None:
    """One context of a model whose header is in a file; None if llama.cpp reserves nothing."""
    entry = catalog.find(name)
    settings = dataclasses.replace(
        SETTINGS, n_ctx=n_ctx, n_ubatch=512, flash_attn=flash_attn, flash_attn_resolved=None
    )
    kv_bytes, compute_bytes = miniature.reserved(path, settings)
    if not compute_bytes:
        return None
    model = synthetic.model_of(entry, miniature.quantization(entry.shape.arch))
    estimate = memory.of_context(model, settings)
    assert estimate.kv_cache_bytes is not None
    assert estimate.compute_bytes is not None
    kv_error = estimate.kv_cache_bytes / kv_bytes - 1
    compute_error = estimate.compute_bytes / compute_bytes - 1
    return Row(name, flash_attn, n_ctx, kv_bytes, kv_error, compute_bytes, compute_error)


def compare_all(names: list[str], path: Path) -> list[Row]:
    rows = []
    for name in names:
        shape = catalog.find(name).shape
        synthetic.write(shape, miniature.quantization(shape.arch), path)
        for flash_attn, n_ctx in itertools.product(("on", "off"), LENGTHS):
            row = compare(name, path, flash_attn, n_ctx)
            if row is None:
                print(
                    f"{name} | {flash_attn} | {n_ctx} | llama.cpp makes no context", flush=True
                )
                continue
            row.print()
            rows.append(row)
        path.unlink()
    return rows


def main() -> None:
    names = sys.argv[1:] or list(catalog.entries())
    print(
        "model | flash attention | n_ctx | KV cache MiB | error | compute buffer MiB | error"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(synthetic, "_RandomArray", Hole),
    ):
        rows = compare_all(names, Path(folder) / "header.gguf")
    kv_errors = [abs(row.kv_error) for row in rows]
    n_equal = len([error for error in kv_errors if error <= EQUAL])
    print(
        f"\nKV cache: {n_equal} of {len(rows)} within 0.1 %, at most {max(kv_errors):.1%} off"
    )
    for flash_attn in ("on", "off"):
        errors = [abs(row.compute_error) for row in rows if row.flash_attn == flash_attn]
        n_near = len([error for error in errors if error <= WITHIN])
        near = f"{n_near} of {len(errors)} within 5 %, at most {max(errors):.1%} off"
        print(f"compute buffer, flash attention {flash_attn}: {near}")


if __name__ == "__main__":
    main()
