"""A side that is measured now: a model on this machine, or a server, in a length like the other
side's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.core.asked_settings import defaults
from lab.errors import LabError
from lab.features.why.depth import prompt_length
from lab.features.why.figure import Figure
from lab.features.why.time_limit import TimeSpent, limited, until_spent
from lab.process.worker import Worker
from lab.remote import session as server_session
from lab.remote.examination import connect
from lab.runner import session
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.show.wording import seconds

SHORTEST = 100  # tokens of a server's prompt
MOST_GEN = 64
REPEATS = 10


@dataclass(frozen=True)
class SideNow:
    """What is measured now. `spec` is a model of this machine, or the server's name for one."""

    spec: str | None
    url: str | None
    budget_s: float
    folder: Path
    watch: ShowStatus
    reaching: Mapping[str, Any] = field(default_factory=dict)  # api, header ...
    of_chain: Mapping[str, object] = field(
        default_factory=dict
    )  # how tokens are chosen: temp ...


def measure_like(figure: Figure, side: SideNow) -> Path:
    """The file of runs or requests with a figure's lengths.

    LabError if none ended in the budget.
    """
    try:
        path, n_done = by_url(figure, side) if side.url else here(figure, side)
    except TimeSpent:  # while the server was examined
        raise nothing_ended(side) from None
    if not n_done:
        raise nothing_ended(side)
    return path


def nothing_ended(side: SideNow) -> LabError:
    return LabError(
        f"{side.url or side.spec}: nothing ended within {seconds(side.budget_s)}.",
        "Give more time: --budget 5min",
    )


def lengths_like(figure: Figure) -> tuple[int, int]:
    """The prompt and the generated tokens of a run like a figure."""
    n_gen = max(2, min(figure.n_gen or MOST_GEN, MOST_GEN))
    return prompt_length(figure), n_gen


def by_url(figure: Figure, side: SideNow) -> tuple[Path, int]:
    """Requests to a server: their file, and how many ended."""
    n_prompt, n_gen = lengths_like(figure)
    look = limited(side.watch, side.budget_s)

    def say(sentence: str) -> None:
        look(Status(sentence))

    with connect(side.url or "", side.spec, say, **side.reaching) as served:
        path = served.new_file(side.folder)
        plan = server_session.make_plan([max(SHORTEST, n_prompt)], n_gen, REPEATS)
        server_session.check(plan, served)
        sent = list(until_spent(server_session.execute(plan, served, path, look)))
    return path, len(sent)


def here(figure: Figure, side: SideNow) -> tuple[Path, int]:
    """Runs on this machine with the figure's settings: their file, and how many ended."""
    n_prompt, n_gen = lengths_like(figure)
    settings = {
        name: value
        for name, value in figure.settings.items()
        if value is not None and value != defaults().get(name)
    }
    settings |= side.of_chain
    look = limited(side.watch, side.budget_s)
    with Worker() as worker:
        plan = make_plan(worker, [n_prompt], n_gen, REPEATS, side.spec or "", **settings)
        path = session.new_results_file(plan, side.folder)
        records = list(until_spent(session.execute(plan, worker, path, look)))
    return path, len([record for record in records if record.run.is_timed])
