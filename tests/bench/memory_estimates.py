"""Are the estimates of KV cache and compute buffer those that llama.cpp reserves? The whole catalog, three lengths.

    python3 -m uv run python -m tests.bench.memory_estimates [NAME ...]

Of each model only a header is written (the weights are a hole in the file, which takes no disk), and llama.cpp says
in its log what it would reserve, without reading a weight. With flash attention, as by default, and without.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import IO, Any
from unittest import mock

from lab.core import memory
from lab.core.record import Settings
from lab.models import catalog, synthetic
from tests import miniature
from tests.conftest import SETTINGS

LENGTHS = (512, 4096, 32768)
WITHIN = 0.05


class Hole:
    """Stands in for a tensor's random weights: the file grows, and nothing is written."""

    def __init__(self, tensor: synthetic.PlannedTensor, generator: Any) -> None:
        self.nbytes = tensor.n_bytes

    def tofile(self, file: IO[bytes]) -> None:
        file.flush()
        end = file.tell() + self.nbytes
        file.truncate(end)
        file.seek(end)


def errors(
    entry: catalog.Entry, path: Path, settings: Settings
) -> tuple[float, float, float, float]:
    """Bytes of KV cache and compute buffer that llama.cpp reserves, and the relative errors of the estimates."""
    kv, compute = miniature.reserved(path, settings)
    estimate = memory.of_context(
        synthetic.model_of(entry, miniature.quantization(entry.shape.arch)), settings
    )
    assert estimate.kv_cache_bytes is not None and estimate.compute_bytes is not None
    return kv, compute, estimate.kv_cache_bytes / kv - 1, estimate.compute_bytes / compute - 1


def main() -> None:
    names = sys.argv[1:] or list(catalog.entries())
    worst: dict[str, list[float]] = {"on": [], "off": []}
    kv_errors: list[float] = []
    print("model | flash attention | n_ctx | KV cache MiB | error | compute buffer MiB | error")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(synthetic, "_RandomArray", Hole),
    ):
        for name in names:
            entry = catalog.find(name)
            path = Path(folder) / "header.gguf"
            synthetic.write(entry.shape, miniature.quantization(entry.shape.arch), path)
            for flash, errors_found in worst.items():
                for n_ctx in LENGTHS:
                    settings = dataclasses.replace(
                        SETTINGS,
                        n_ctx=n_ctx,
                        n_ubatch=512,
                        flash_attn=flash,
                        flash_attn_resolved=None,
                    )
                    kv, compute, kv_error, compute_error = errors(entry, path, settings)
                    kv_errors.append(abs(kv_error))
                    errors_found.append(abs(compute_error))
                    cells = f"{kv / 2**20:.2f} | {kv_error:+.1%} | {compute / 2**20:.2f} | {compute_error:+.1%}"
                    print(f"{name} | {flash} | {n_ctx} | {cells}", flush=True)
            path.unlink()
    print(f"\nKV cache: at most {max(kv_errors):.2%} off")
    for flash, errors_of in worst.items():
        inside = sum(error <= WITHIN for error in errors_of)
        most = f"at most {max(errors_of):.1%} off"
        print(
            f"compute buffer, flash attention {flash}: {inside} of {len(errors_of)} within 5 %, {most}"
        )


if __name__ == "__main__":
    main()
