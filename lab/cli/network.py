"""The command that says what a network would cost: network."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.help import Command
from lab.cli.options import MODEL, TOKENS, as_json_option, out_option, with_options
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.why.network_prediction import NetworkPrediction

MOST_NETWORKS = 200


@click.command(cls=Command, first=("model", "servers", "latency", "bandwidth", "prompt-len", "device"))
@with_options(
    MODEL,
    click.option("--servers", default=2, show_default=True, help="RPC servers that share the layers evenly."),
    click.option(
        "--latency",
        default="0.1ms,0.3ms,1ms",
        show_default=True,
        help="Round-trip times as ping shows them, separated by commas.",
    ),
    click.option(
        "--bandwidth", default="1Gbit,10Gbit", show_default=True, help="Bits per second, separated by commas."
    ),
    click.option("--prompt-len", "-p", type=TOKENS, default=512, show_default=True, help="Tokens of the prompt."),
    click.option("--gen", "-n", type=TOKENS, default=200, show_default=True, help="Tokens to generate."),
    click.option(
        "--device", "-d", help="The device of each server, from models/devices.toml.  [default: this machine]"
    ),
    click.option(
        "--results", default="results", show_default=True, help="Folder with ceilings and runs to learn from."
    ),
    out_option("Folder for the picture."),
    click.option("--no-plot", is_flag=True, help="Draw no picture."),
    as_json_option(),
)
def network(latency: str, bandwidth: str, out: str, no_plot: bool, as_json: bool, **asked: Any) -> None:
    """Predict the time lost by splitting a model over a network.

    \b
      lab network -m llama-3.2-3b
      lab network -m llama-3.1-8b --servers 4 --latency 0.2ms --bandwidth 1Gbit

    Prints the bytes and round trips of each token and of a prompt, their time, and the remaining decode rate. Needs
    neither the servers nor the model.
    """
    from lab.core.link import Link, parse_bandwidth, parse_round_trip
    from lab.show import console, text_network
    from lab.why import network_prediction

    round_trips = [parse_round_trip(text) for text in latency.split(",")]
    widths = [parse_bandwidth(text) for text in bandwidth.split(",")]
    links = list(dict.fromkeys(Link(round_trip, width) for width in widths for round_trip in round_trips))
    if len(links) > MOST_NETWORKS:
        raise LabError(f"{len(links)} networks are too many.", f"Give at most {MOST_NETWORKS}.")
    n_servers, n_prompt, n_gen = (asked.pop(name) for name in ("servers", "prompt_len", "gen"))
    answer = network_prediction.predict(links, n_servers, n_prompt=n_prompt, n_gen=n_gen, **asked)
    plots = [] if no_plot else _draw(answer, Path(out))
    if as_json:
        n_layers = {device: answer.layers[:-1].count(device) for device in dict.fromkeys(answer.layers)}
        document = {**dataclasses.asdict(answer), "model": answer.model.name, "layers": n_layers}
        console.print_json({**document, "plots": [str(plot) for plot in plots]})
        return
    stdout = console.console()
    text_network.print_network(answer, stdout)
    for plot in plots:
        stdout.print(f"plot     {plot}")


def _draw(answer: NetworkPrediction, folder: Path) -> list[Path]:
    """The picture; none where the time without a network is not known."""
    from lab.drawing import canvas
    from lab.runner.machine import slug
    from lab.show import plot_why

    if answer.local_s is None:
        return []
    widths = sorted({cost.link.bytes_per_s or float("inf") for cost in answer.costs}, reverse=True)
    curves = [plot_why.Curve(answer.local_s, answer.decode, answer.n_gen - 1, width) for width in widths]
    n_servers = len(set(answer.layers))
    name = f"{answer.model.name} {answer.model.quantization or ''}".strip()
    subject = f"{name} over {n_servers} {'server' if n_servers == 1 else 'servers'}, computing on {answer.where}"
    last_s = max(cost.link.round_trip_s for cost in answer.costs)
    drawing = plot_why.drawing([], curves, subject, last_s)
    return canvas.write(drawing, folder, f"network-{slug(name)}-{n_servers}-servers")
