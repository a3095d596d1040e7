"""A server as text: its name, and what it can and cannot do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from lab.core.request import Endpoint
from lab.show.section import Columns, Section, print_section, tabled


def capabilities(endpoint: Endpoint, title: str = "") -> Section:
    """What the server can do, and what showed that."""
    columns: Columns = (
        ("what it can do", lambda one: one.name),
        ("answer", lambda one: one.answer),
        ("as seen in", lambda one: one.how),
    )
    return Section(title, **tabled(columns, endpoint.capabilities, keep_all=True))


def print_endpoint(endpoint: Endpoint, model: str, models: Sequence[str], out: Console) -> None:
    """Which server, which of its models, and the table of its capabilities."""
    server = " ".join(word for word in (endpoint.server, endpoint.version) if word) or "not named"
    out.print(f"server   {server} at {endpoint.url}, through {endpoint.api}")
    out.print(f"model    {model}" + (f" (of {len(models)})" if len(models) > 1 else ""))
    print_section(capabilities(endpoint), out)
