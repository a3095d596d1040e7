"""What is counted on the wire is what the arithmetic says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import networks
from lab.core import link, network
from lab.core import script as scripts
from lab.core.lines import from_json, to_json
from lab.core.link import Link
from lab.core.network import Traffic
from lab.core.record import DECODE, PREFILL, Placement, Record, Settings, Steps
from lab.drawing import canvas
from lab.errors import LabError
from lab.models import synthetic
from lab.process.rpc_server import RpcServer
from lab.process.wire import Backend
from lab.process.worker import Worker
from lab.show import plot_why
from lab.why import network_prediction
from tests import miniature
from tests.conftest import MODEL, SETTINGS, make_record, make_run, run_lab
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


def record_over(over: Link, tpot_ms: float, prefill_ms: float = 100.0, repeat: int = 0) -> Record:
    """A run of 16 + 4 tokens over two servers, whose steps all take the same."""
    ends = [round(1e6 * (prefill_ms + i * tpot_ms)) for i in range(4)]
    steps = Steps(
        kind=("prefill", "decode", "decode", "decode"),
        n_tokens=(16, 1, 1, 1),
        n_past=(0, 16, 17, 18),
        start_ns=(0, *ends[:-1]),
        ready_ns=tuple(ends),
        end_ns=tuple(ends),
        n_outputs=(1, 1, 1, 1),
    )
    placement = Placement(network_prediction.evenly(MODEL.n_layer or 0, 2), ())
    return make_record(make_run(16, 4, repeat, steps=steps, placement=placement, link=over))


def test_a_prediction_is_the_local_time_and_what_the_network_adds() -> None:
    slow = Link(0.002, 1e6)
    fast, behind = networks.rows([record_over(networks.LOCAL, 10), record_over(slow, 20), record_over(slow, 22, 150)])
    assert (fast.link, fast.tpot_error, fast.prefill_error) == (networks.LOCAL, 0, 0)
    token = Traffic(behind.token.bytes_out, behind.token.bytes_back, 6)  # two servers, three tokens
    assert behind.token == token
    assert behind.expected_tpot_s == pytest.approx(0.010 + 2 * 0.002 + token.n_bytes / 3 / 1e6)
    assert behind.expected_prefill_s == pytest.approx(0.1 + 2 * 0.002 + behind.prompt.n_bytes / 1e6)
    assert behind.tpot_error == pytest.approx(behind.expected_tpot_s / 0.021 - 1)
    assert networks.rows([record_over(slow, 20)]) == []  # nothing to add the network to


def test_a_line_keeps_the_network() -> None:
    record = record_over(Link(0.0004, 1.25e8), 10)
    assert from_json(Record, to_json(record)).run.link == Link(0.0004, 1.25e8)


def test_the_picture_has_a_line_for_each_bandwidth_and_every_run() -> None:
    links = [networks.LOCAL, Link(0.001, 1.25e8), Link(0.005, 1.25e8)]
    records = [record_over(over, 10 + 5 * i, repeat=n) for i, over in enumerate(links) for n in range(3)]
    rows = networks.rows(records)
    curves = plot_why.curves_of(rows)
    assert [curve.bytes_per_s for curve in curves] == [None, 1.25e8]
    assert curves[0].rate(0) == pytest.approx(100)
    drawings = plot_why.drawings(records)
    assert plot_why.drawings(records[:3]) == {}  # one network is no picture
    figure = canvas.drawn(drawings["network"], (8, 5))
    (axes,) = figure.axes
    assert sum(len(list(line.get_xdata())) == 3 for line in axes.lines) == 3  # type: ignore[arg-type]
    labels = axes.get_legend_handles_labels()[1]
    assert labels[:2] == ["predicted, unlimited bandwidth", "predicted, 1 Gbit/s"]


def test_a_network_costs_less_when_it_is_wider_and_more_when_it_is_slower(tmp_path: Path) -> None:
    _, output, _ = run_lab(
        *("network", "-m", "llama-3.3-70b", "--servers", "4", "--latency", "0.1ms,1ms", "--bandwidth", "1Gbit,10Gbit"),
        *("-d", "rtx-4090", "-o", tmp_path, "--json"),
    )
    document = json.loads(output)
    near, far, wide, _ = document["costs"]
    assert document["decode"]["n_round_trips"] == 4 * 199
    assert near["token_s"] < far["token_s"] and wide["token_s"] < near["token_s"]
    assert far["token_s"] - near["token_s"] == pytest.approx(4 * 0.0009)
    assert near["decode_tps"][0] > far["decode_tps"][0]
    assert [Path(plot).suffix for plot in document["plots"]] == [".png", ".svg"]
    assert all(Path(plot).is_file() for plot in document["plots"])


def test_without_ceilings_the_table_has_the_networks_part_only(tmp_path: Path) -> None:
    _, text, _ = run_lab("network", "--results", tmp_path, "-o", tmp_path)
    assert "per token                  2 round trips" in text
    assert "Only the network's part is known. The ceilings" in text and "lab ceilings" in text
    assert not list(tmp_path.iterdir())


def test_a_latency_without_a_unit_is_an_error() -> None:
    status, _, complaint = run_lab("network", "--latency", "1")
    assert status == 1 and "--latency: '1' is not a round trip from 0 to 10 s." in complaint


@pytest.mark.parametrize("text", ["", "-1ms", "11s", "1m", "fast"])
def test_what_is_no_round_trip(text: str) -> None:
    with pytest.raises(LabError, match="is not a round trip"):
        link.parse_round_trip(text)


@pytest.mark.parametrize("text", ["", "0Gbit", "-1Gbit", "1GB", "1e9"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(LabError, match="is not a bandwidth"):
        link.parse_bandwidth(text)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_servers": 0}, "--servers 0 is not possible"),
        ({"n_servers": 17}, "--servers 17 is not possible"),
        ({"n_prompt": 0}, "A prompt length of 0"),
        ({"n_gen": 1}, "--gen 1 leaves nothing to decode"),
        ({"n_prompt": 10**8}, "are too many"),
        ({"device": "no-such-device"}, "no-such-device"),
        ({"model": "no-such-model"}, "no-such-model"),
    ],
)
def test_what_cannot_be_asked(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        network_prediction.predict([Link(0.001)], **changes)


def test_links_are_read_as_they_are_written() -> None:
    assert link.parse_round_trip("300us") == pytest.approx(link.parse_round_trip("0.3ms"))
    assert link.parse_bandwidth("2.5Gbit/s") == 2.5e9 / 8
    assert Link(0.0003, 1.25e7).words == "0.3 ms, 100 Mbit/s"


def test_a_plan_says_what_its_servers_cost(embedded: Path) -> None:
    with RpcServer("127.0.0.1", 0, ["CPU"], 1) as one, RpcServer("127.0.0.1", 0, ["CPU"], 1) as other:
        asked = ("measure", "--dry-run", "-p", "8,16", "-n", "4", "--rpc", f"{one.endpoint},{other.endpoint}")
        status, output, complaint = run_lab(*asked, "--json")
        assert status == 0, complaint
        _, text, _ = run_lab(*asked)
    planned = json.loads(output)["network"]
    assert (planned["n_prompt"], planned["prompt"]["n_round_trips"], planned["decode"]["n_round_trips"]) == (16, 2, 6)
    per_token = planned["decode"]["bytes_out"] + planned["decode"]["bytes_back"]
    at = planned["at"]["1 Gbit/s"]["token_s"]
    assert at == pytest.approx(2 * planned["round_trip_s"] + per_token / 3 / 1.25e8)
    assert "per token: 2 round trips" in text and "at 10 Gbit/s" in text


def test_without_servers_a_plan_has_no_network(tmp_path: Path) -> None:
    assert json.loads(run_lab("measure", "-p", "10", "--dry-run", "--json", "-o", tmp_path)[1])["network"] is None
