"""A server as text: which it is, and what it can do and what not."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from lab.core.request import Endpoint
from lab.show.console import grid_of


def print_endpoint(endpoint: Endpoint, model: str, models: Sequence[str], out: Console) -> None:
    """Which server, which of its models, and the table of its capabilities."""
    server = " ".join(word for word in (endpoint.server, endpoint.version) if word) or "not named"
    out.print(f"server   {server} at {endpoint.url}, through {endpoint.api}")
    out.print(f"model    {model}" + (f" (of {len(models)})" if len(models) > 1 else ""))
    grid = grid_of("what it can do", "answer", "as seen in")
    for one in endpoint.capabilities:
        grid.add_row(one.name, one.answer, one.how)
    out.print(grid)
