"""What the commands that measure servers share: how to reach one, and the question before another machine is asked."""

from __future__ import annotations

import click
from click.core import ParameterSource

URL = click.option("--url", metavar="URL", help="A server that speaks OpenAI's API: http://127.0.0.1:8080/v1")
REACHING = [
    click.option("--api", type=click.Choice(["chat", "completions"]), help="Which interface.  [default: what it has]"),
    click.option("--api-key-env", metavar="NAME", help="The environment variable that holds the server's key."),
    click.option("--header", multiple=True, metavar="NAME: VALUE", help="A header to send. Several times: several."),
    click.option("--yes", is_flag=True, help="Do not ask before a server on another machine is asked."),
]
"""How to reach a server."""

TIMEOUT = click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds after which a request to a server is given up."
)
SERVED_MODEL = click.option("--model", "-m", help="The server's name for it.  [default: its only one]")


def given(context: click.Context) -> dict[str, str]:
    """The parameters that the user gave on the command line, and how each is written, such as --threads."""
    return {
        str(option.name): max(option.opts, key=len)
        for option in context.command.params
        if option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }


def confirm(url: str, what: str, yes: bool) -> None:
    """Ask once before a server on another machine is sent `what`, such as "at most 100 requests"."""
    from lab.endpoints.access import access, is_loopback

    asked = access(url)
    if not (yes or is_loopback(asked)):
        click.confirm(f"{asked.url} is on another machine. Send it {what}?", abort=True, err=True)
