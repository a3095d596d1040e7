"""A server as text: its name, and what it can and cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lab.core.lists import plural
from lab.core.request import Endpoint
from lab.features.serve.through_server import ServerPlan
from lab.show.console import Grid, console, print_json
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


def print_unseen(unseen: Sequence[str], out: Console) -> None:
    """What cannot be measured through this server, and why."""
    out.print("\nNot visible through this server:")
    for sentence in unseen:
        out.print(f"- {sentence}")


def print_plan(plan: ServerPlan, known: dict[str, Any] | None) -> None:
    """Prints what `--dry-run` shows of a server: as JSON below what is `known` where given."""
    if known is not None:
        cases = [
            {"n_prompt": case.n_prompt, "n_gen": case.n_gen, "refused": plan.refused.get(case)} for case in plan.cases
        ]
        print_json({**known, "cases": cases, "repeat": plan.n_repeat})
        return
    out = console()
    rounds, tokens = plural(plan.n_repeat, "round"), plural(plan.longest_answer, "token")
    out.print(f"\nPlan: {rounds}, {tokens} requested")
    grid = Grid("prompt\ntokens", "requests", "note")
    for case in plan.cases:
        n = "0" if case in plan.refused else f"{plan.n_repeat}"
        grid.add_row(f"{case.n_prompt:,}", n, plan.refused.get(case, ""))
    out.print(grid)
