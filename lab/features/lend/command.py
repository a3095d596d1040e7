"""The command that lends this machine's devices to llama.cpp on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lab.cli.help import Command
from lab.core import shell
from lab.core.asked_settings import MAX_THREADS, check_number

if TYPE_CHECKING:
    from lab.features.lend.server import RpcServer

WARNING = (
    "Warning: {endpoint} is open to the network. llama.cpp calls its RPC server fragile and insecure, and says: never "
    "run it on an open network. It asks for no password and encrypts nothing; whoever reaches this port can read and "
    "change this process. Use it only in a network where every machine is yours, and stop it afterwards."
)


@click.command("rpc-server", cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="IPv4 address to listen on; 0.0.0.0: all.")
@click.option("--port", default=50052, show_default=True, type=click.IntRange(0, 65535), help="Port; 0: any free port.")
@click.option("--device", metavar="NAME,...", help="Devices to lend.  [default: all GPUs; the CPU if there is none]")
@click.option("--threads", "-t", type=int, help="Threads of a CPU device.  [default: fast physical cores]")
@click.option("--cache", is_flag=True, help="Keep large tensors on disk, so that they are sent only once.")
@click.option(
    "--open-network", is_flag=True, help="Allow a --host that other machines can reach. There is no password."
)
def rpc_server(host: str, port: int, device: str | None, threads: int | None, cache: bool, open_network: bool) -> None:
    """Lend this machine's devices to another machine.

    \b
      lab rpc-server
      lab rpc-server --host 192.168.1.20 --open-network --cache

    Runs until Ctrl-C. It is llama.cpp's own RPC server, which serves one client at a time. Never run it on an open
    network.
    """
    from lab.features.lend.server import RpcServer, cache_folder
    from lab.runner import limits

    if threads is not None:
        check_number("threads", threads, MAX_THREADS)
    n_threads = threads or limits.default_threads()
    names = [name.strip() for name in device.split(",")] if device else []
    folder = cache_folder() if cache else None
    try:
        with RpcServer(host, port, names, n_threads, folder, open_network) as server:
            _introduce(server, n_threads, folder)
            server.watch(lambda sentence: click.echo(sentence, err=True))
    except KeyboardInterrupt:  # how a server is meant to end, so no failure
        click.echo("Stopped.", err=True)


def _introduce(server: RpcServer, n_threads: int, folder: Path | None) -> None:
    """Print what a server lends, and how to use it."""
    from lab.runner import machine

    host, _, port = server.endpoint.rpartition(":")
    if not host.startswith("127."):
        click.echo(WARNING.format(endpoint=server.endpoint), err=True)
    for lent in server.devices:
        memory = f", {lent.memory_bytes / 1e9:.1f} GB" if lent.memory_bytes else ""
        n_cores = f", {n_threads} {'thread' if n_threads == 1 else 'threads'}" if lent.type == "cpu" else ""
        click.echo(f"lends    {lent.name}: {lent.description} ({lent.type}{memory}{n_cores})")
    if folder:
        click.echo(f"cache    {folder}")
    click.echo(f"speaks   llama.cpp RPC {server.version} at {server.endpoint}")
    for address in machine.own_addresses() if host == "0.0.0.0" else [host]:
        click.echo(f"use it   {shell.lab('measure', '--rpc', f'{address}:{port}')}")
    click.echo("Press Ctrl-C to stop it.", err=True)
