"""Is what each device needs that which llama.cpp reserves there? Models of real width over one, two and four servers.

    python3 -m uv run python -m tests.bench.placement [NAME ...]

Of each model only a header is written (the weights are a hole in the file), and llama.cpp says in its log which compute
buffer it would reserve on each device, without reading a weight. The servers are on loopback. That layers, weights and
caches lie where they should is shown by tests/test_placement.py, which loads models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from lab.core import memory
from lab.core.record import Settings
from lab.engine.llama import read_log
from lab.features.lend.server import RpcServer
from lab.models import catalog, synthetic
from lab.process.wire import Backend
from lab.process.worker import Worker
from tests import miniature
from tests.bench.memory_estimates import Hole
from tests.conftest import SETTINGS

NAMES = ("smollm2-135m", "llama-3.2-3b", "phi-3-mini", "gemma-3-1b", "llama-3.3-70b", "gpt-oss-20b", "qwen3-30b-a3b")
N_SERVERS = (1, 2, 4)
LENGTHS = (512, 4096, 32768)
WITHIN = 0.1


@contextlib.contextmanager
def engine(n_servers: int) -> Iterator[Worker]:
    """An engine that uses so many servers."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RpcServer("127.0.0.1", 0)) for _ in range(n_servers)]
        worker = stack.enter_context(Worker())
        worker.use(Backend(None, tuple(server.endpoint for server in servers)))
        yield worker


@contextlib.contextmanager
def header(entry: catalog.Entry) -> Iterator[Path]:
    """A file of the model, with a hole for its weights."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(synthetic, "_Random", Hole):
        path = Path(folder) / "header.gguf"
        synthetic.write(entry.shape, miniature.quantization(entry.shape.arch), path)
        yield path


def compared(worker: Worker, entry: catalog.Entry, path: Path, settings: Settings) -> list[tuple[str, int, int]]:
    """(device, bytes worked out, bytes that llama.cpp reserves) of compute buffers."""
    devices = [device for device in worker.build.devices if device.type == "gpu"]
    names = [device.name for device in devices]
    kind = miniature.quantization(entry.shape.arch)
    model = synthetic.model_of(entry, kind)
    tensors = tuple(memory.Tensor(one.name, one.n_bytes) for one in synthetic.tensors(entry.shape, kind))
    shares = memory.shares(worker.free_memory(), names, settings.tensor_split)
    real = dict.fromkeys([*names, memory.CPU], 0)
    for buffer in read_log(worker.reserve(path, settings))[1]:
        if buffer.part == "compute":
            real[memory.device_of(buffer, devices)] += buffer.n_bytes
    places = memory.places(model, settings, tensors, names, shares) or ()
    return [(place.device, place.memory.compute_bytes or 0, real[place.device]) for place in places]


def cases(entry: catalog.Entry) -> Iterator[dict[str, Any]]:
    n = entry.shape.n_layer
    for flash in ("on", "off"):
        for n_ctx in LENGTHS:
            common = {"n_ctx": n_ctx, "flash_attn": flash}
            for own in (
                {"n_gpu_layers": n + 1},
                {"n_gpu_layers": n // 2},
                {"n_gpu_layers": n + 1, "kv_offload": False},
            ):
                yield {**common, **own}


def main() -> None:
    errors: list[float] = []
    print("servers | model | settings | device | compute buffer worked out MiB | reserved MiB | error")
    for n_servers in N_SERVERS:
        with engine(n_servers) as worker:
            for entry in map(catalog.find, sys.argv[1:] or NAMES):
                with header(entry) as path:
                    for changes in cases(entry):
                        settings = dataclasses.replace(SETTINGS, n_ubatch=512, flash_attn_resolved=None, **changes)
                        words = " ".join(f"{name}={value}" for name, value in changes.items())
                        for device, worked_out, real in compared(worker, entry, path, settings):
                            errors.append(worked_out / real - 1)
                            sizes = f"{worked_out / 2**20:.2f} | {real / 2**20:.2f} | {errors[-1]:+.1%}"
                            print(f"{n_servers} | {entry.name} | {words} | {device} | {sizes}", flush=True)
    inside = sum(abs(error) <= WITHIN for error in errors)
    print(f"\n{inside} of {len(errors)} within {WITHIN:.0%}, median {statistics.median(errors):+.1%}")
    print(f"from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main()
