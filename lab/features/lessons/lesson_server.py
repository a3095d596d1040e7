"""What the notebook on servers uses: a server of its own (features/serve/own_server.py), and what it streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from lab.core.request import RequestRecord
from lab.features.serve import load_views, own_server, text_endpoint
from lab.features.serve.own_server import OwnServer
from lab.models import catalog
from lab.show import console
from lab.show.section import print_section

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_running: list[OwnServer] = []


def serve(n_threads: int | None = None) -> OwnServer:
    """Start a server with the embedded model on a free port of this machine, and wait until it answers.

    It ends with `end()`, with this process, or when another one is started. LabError if it does not start.
    """
    while _running:
        _running.pop().end()
    _running.append(own_server.start(catalog.embedded_path(), catalog.DEFAULT, n_threads))
    return _running[-1]


def abilities(records: Sequence[RequestRecord]) -> None:
    """Print what the server of these requests can do, as `lab server` does."""
    text_endpoint.print_endpoint(records[0].endpoint, records[0].model, (), console.console())


def events(record: RequestRecord) -> pd.DataFrame:
    """The events of a request: when each arrived (ms after the request was sent), its bytes, and what it carried."""
    import pandas as pd

    columns = record.request.events
    arrive_ms = [ns / 1e6 for ns in columns.arrive_ns]
    return pd.DataFrame({"arrive_ms": arrive_ms, "bytes": columns.n_bytes, "kind": columns.kind})


def show_load(records: Sequence[RequestRecord]) -> None:
    """Print a load as `lab load` does."""
    (section,) = load_views.sections(records)
    print_section(dataclasses.replace(section, title=""), console.console())


def draw_all(drawings: Iterable[Callable[[Figure], object]], size: tuple[float, float] = (10, 4.6)) -> None:
    """Draw each picture below the cell."""
    import matplotlib
    import matplotlib.pyplot as plt

    for draw in drawings:
        figure = plt.figure(figsize=size, layout="constrained")  # first: a new backend would stay non-interactive
        with matplotlib.rc_context({"text.parse_math": False}):
            draw(figure)
