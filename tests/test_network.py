"""What is counted on the wire is what the arithmetic says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.core import network
from lab.core import script as scripts
from lab.core.network import Traffic
from lab.core.record import DECODE, PREFILL, Settings
from lab.models import synthetic
from lab.process.rpc_server import RpcServer
from lab.process.wire import Backend
from lab.process.worker import Worker
from tests import miniature
from tests.conftest import SETTINGS
from tests.relay import Message, Relay

SMALL = dataclasses.replace(
    SETTINGS, n_ctx=1024, n_batch=2048, n_ubatch=64, n_threads=1, n_threads_batch=1, n_gpu_layers=99, prefill_wait="end"
)


@pytest.fixture(scope="module")
def linked() -> Iterator[tuple[Worker, Relay]]:
    """An engine with two servers of one thread, and the relay between."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RpcServer("127.0.0.1", 0, ["CPU"], 1)) for _ in range(2)]
        relay = stack.enter_context(Relay([server.endpoint for server in servers]))
        worker = stack.enter_context(Worker())
        worker.use(Backend(rpc=tuple(relay.endpoints)))
        yield worker, relay


def counted(messages: list[Message]) -> Traffic:
    return Traffic(
        sum(message.bytes_out for message in messages),
        sum(message.bytes_back for message in messages),
        sum(message.is_answered for message in messages),
    )


def run_and_count(
    linked: tuple[Worker, Relay], path: Path, settings: Settings, n_prompt: int, n_gen: int
) -> tuple[Traffic, Traffic | None]:
    """The traffic of a run after one of the same shapes: as it was counted, and as it is worked out."""
    worker, relay = linked
    worker.load(path, settings)
    resolved = worker.new_context(settings)
    script = scripts.run(range(1, n_prompt + 1), n_gen, settings.n_ubatch)
    for _ in range(2):
        relay.take()
        worker.run(script, lambda progress: None)
    model = worker.read_model(path, "m", "file")
    by_kind = network.of_request(model, resolved, worker.placement().layers, n_prompt, n_gen)
    return counted(relay.take()), None if by_kind is None else by_kind[PREFILL] + by_kind[DECODE]


def close(counts: Traffic, expected: Traffic | None) -> bool:
    assert expected is not None
    assert counts.n_round_trips == expected.n_round_trips
    assert counts.bytes_out == pytest.approx(expected.bytes_out, rel=0.01)
    return counts.bytes_back == expected.bytes_back


@pytest.mark.parametrize("arch", miniature.NAMES)
def test_every_architecture_costs_what_its_shape_says(linked: tuple[Worker, Relay], tmp_path: Path, arch: str) -> None:
    path = tmp_path / "model.gguf"
    synthetic.write(miniature.entry(arch, 4).shape, miniature.quantization(arch), path)
    assert close(*run_and_count(linked, path, SMALL, 250, 12))


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ("RPC0",)},
        {"tensor_split": (3.0, 1.0)},
        {"n_gpu_layers": 2},
        {"n_gpu_layers": 1},
        {"flash_attn": "off"},
        {"n_ubatch": 512},
        {"type_k": "q8_0", "type_v": "q8_0"},
    ],
)
def test_wherever_its_layers_are(linked: tuple[Worker, Relay], tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "model.gguf"
    shape = miniature.entry("llama", 5, 320, 3000).shape
    synthetic.write(dataclasses.replace(shape, head_dim=64), "Q4_0", path)
    settings = dataclasses.replace(SMALL, **changes)  # type: ignore[arg-type]
    assert close(*run_and_count(linked, path, settings, 150, 4))


def test_smollm2_over_two_servers(linked: tuple[Worker, Relay], embedded: Path) -> None:
    counts, expected = run_and_count(linked, embedded, SMALL, 100, 6)
    assert close(counts, expected)
    assert counts.n_round_trips == 2 * 1 + 1 + 2 * 5  # hidden states of two prefill steps, logits, and both of decode
