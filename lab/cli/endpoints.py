"""The commands that look at servers of OpenAI's API, and at the lab's own client: endpoint."""

from __future__ import annotations

import click

from lab.errors import LabError

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the table.")


@click.group()
def endpoint() -> None:
    """Look at a server that speaks OpenAI's API, and at the client that will measure it."""


@endpoint.command()
@click.argument("url")
@click.option("--model", "-m", help="The server's name for it.  [default: its only one]")
@click.option("--api", type=click.Choice(["chat", "completions"]), help="Which interface.  [default: what it has]")
@click.option("--api-key-env", metavar="NAME", help="The environment variable that holds the key.")
@click.option("--header", multiple=True, metavar="NAME: VALUE", help="A header to send; can be given several times.")
@click.option("--yes", is_flag=True, help="Do not ask before a server on another machine is asked.")
@AS_JSON
def probe(
    url: str,
    model: str | None,
    api: str | None,
    api_key_env: str | None,
    header: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> None:
    """Say what the server at URL can do, as a measurement would see it: tokens, usage, caches, slots.

    It is sent at most eleven requests, of a few tokens each.
    """
    import dataclasses

    from lab.endpoints import probe as probing
    from lab.endpoints.access import access, is_loopback
    from lab.endpoints.client import Client
    from lab.show import console

    asked = access(url, api_key_env, header)
    if not (yes or is_loopback(asked)):
        click.confirm(f"{asked.url} is on another machine. Send it some requests?", abort=True, err=True)
    with Client(asked) as client:
        probed = probing.probe(asked, client, model, api)
    if as_json:
        console.print_json(dataclasses.asdict(probed))
        return
    server = " ".join(word for word in (probed.endpoint.server, probed.endpoint.version) if word) or "not named"
    click.echo(f"server   {server} at {probed.endpoint.url}, through {probed.endpoint.api}")
    click.echo(f"model    {probed.model}" + (f" (of {len(probed.models)})" if len(probed.models) > 1 else ""))
    grid = console.grid_of("what it can do", "answer", "as seen in")
    for one in probed.endpoint.capabilities:
        grid.add_row(one.name, one.answer, one.how)
    console.console().print(grid)


@endpoint.command()
@click.option("--streams", default="1,16", show_default=True, help="How many streams at a time, with commas.")
@AS_JSON
def selftest(streams: str, as_json: bool) -> None:
    """Measure the error of the lab's own client, against a server here whose every event has a known time."""
    import dataclasses

    from lab.endpoints.selftest import WANTED_MEDIAN_US, WANTED_P99_US
    from lab.endpoints.selftest import selftest as measure
    from lab.show import console

    numbers = [part.strip() for part in streams.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 64 for part in numbers):
        raise LabError(f"--streams {streams} is not possible.", "Give numbers from 1 to 64, with commas: 1,16")
    tests = measure([int(part) for part in numbers])
    if as_json:
        console.print_json([dataclasses.asdict(test) for test in tests])
        return
    grid = console.grid_of("streams", "events", "events/s", "median us", "99 % us", "most us", "server late, 99 % us")
    for test in tests:
        values = test.rate, test.median_us, test.p99_us, test.max_us, test.server_late_p99_us
        grid.add_row(f"{test.n_streams}", f"{test.n_events:,}", *(f"{value:,.0f}" for value in values))
    out = console.console()
    out.print(grid)
    out.print(
        f"From the moment an event is sent until it is stamped. Wanted with 16 streams: {WANTED_MEDIAN_US:.0f} us in "
        f"the median, {WANTED_P99_US:,.0f} us in 99 %. Figures of a server near that say more about the client."
    )
