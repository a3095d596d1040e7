"""The commands that look at servers of OpenAI's API, and at the lab's own client: endpoint."""

from __future__ import annotations

import click

from lab.cli.options import with_options
from lab.cli.servers import REACHING, SERVED_MODEL, TIMEOUT, confirm
from lab.errors import LabError

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the table.")


@click.group()
def endpoint() -> None:
    """Look at a server that speaks OpenAI's API, and at the client that will measure it."""


@endpoint.command()
@click.argument("url")
@with_options(SERVED_MODEL, *REACHING, TIMEOUT)
@AS_JSON
def probe(
    url: str,
    model: str | None,
    api: str | None,
    api_key_env: str | None,
    header: tuple[str, ...],
    yes: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Say what the server at URL can do, as a measurement would see it: tokens, usage, caches, slots.

    It is sent at most eleven requests, of a few tokens each.
    """
    import dataclasses

    from lab.runner.servers import connect
    from lab.show import console
    from lab.show.text_endpoint import print_endpoint

    confirm(url, "some requests", yes)
    say = console.console(stderr=True).print
    with connect(url, model, api, api_key_env, header, timeout, say) as server:
        if as_json:
            console.print_json(
                {"endpoint": dataclasses.asdict(server.endpoint), "model": server.model, "models": server.models}
            )
        else:
            print_endpoint(server.endpoint, server.model, server.models, console.console())


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
