"""`lab machine`: this machine, the llama.cpp build and its devices."""

from __future__ import annotations

import dataclasses

import click

from lab.cli.help import Command
from lab.cli.options import LIB, RPC, as_json_option


@click.command(cls=Command)
@RPC
@LIB
@as_json_option(help="Everything that is known, as one JSON document.")
def machine(rpc: str | None, lib: str | None, as_json: bool) -> None:
    """Show this machine, the llama.cpp build and its devices.

    \b
      lab machine
      lab machine --rpc 192.168.1.20:50052  # and of an RPC server

    If the machine has readable energy counters (RAPL of the CPU, NVML of NVIDIA GPUs), measurements show joules per
    token.
    """
    from lab.core.asked_settings import AskedSettings
    from lab.process.worker import Worker
    from lab.runner import builds, noise_watch, placing
    from lab.runner import machine as this_machine
    from lab.show import console, text_setup

    with Worker() as worker:
        worker.use(placing.backend(AskedSettings(rpc=rpc, lib=lib)))
        build, servers = builds.of_worker(worker), worker.servers
    here = this_machine.describe(build, builds.name_of(lib))
    counters = noise_watch.describe_energy(noise_watch.energy_counters(noise_watch.GpuWatch([])))
    if as_json:
        of_servers = {"rpc_servers": [dataclasses.asdict(server) for server in servers]} if servers else {}
        console.print_json({**dataclasses.asdict(here), "energy": counters, **of_servers})
        return
    for line in text_setup.describe(here):
        click.echo(line)
    for device in here.devices:
        memory = f", {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else ""
        click.echo(f"device   {device.name}: {this_machine.describe_device(device)} ({device.type}{memory})")
    for one in servers:
        memories = ", ".join(f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free" for free, total in one.memories)
        click.echo(f"server   {one.endpoint}: {1e3 * one.round_trip_s:.3g} ms for a small request; {memories}")
    click.echo(f"cores    {here.n_cores_physical} physical, {here.n_cores_usable} usable")
    click.echo(f"energy   {counters}")
    click.echo(f"python   {here.python}")
    click.echo(f"flags    {here.system_info}")
    for line in amx(build.system_info):
        click.echo(line)


def amx(system_info: str) -> list[str]:
    """Lines on whether this build uses AMX, the matrix instructions of Intel Xeons; none if the CPU lacks them.

    The cost of a build without AMX was measured on one Xeon (llama-bench, 512 tokens of prompt, 64 generated).
    """
    from lab.runner import builds

    if "AMX_INT8" not in (builds.cpu_features() or ()):
        return []
    if "AMX_INT8" in builds.built_for(system_info):
        return ["amx      this CPU has AMX, and this build uses it"]
    return [
        "amx      this CPU has AMX, but this build does not use it and is slower for it. SmolLM2 135M Q4_1 on 2 cores",
        "         of a Xeon: prefill 300 tokens/s without AMX and 1,100 with it, decode 80 and 170. To build with AMX:",
        "         python3 -m uv sync --reinstall-package llama-cpp-python --no-cache-dir",
    ]
