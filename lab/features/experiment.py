"""An experiment as data: its command, its plan, its tables and their pictures.

An experiment is one file with one `Experiment`. The command, the tables, the pictures and the command that repeats its
runs are made from it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from lab.core.asked_settings import SettingsKeywords
from lab.core.levers import Lever
from lab.core.record import Record, Run
from lab.features.common import folder_in
from lab.features.limits.step_prediction import StepPrediction
from lab.process.worker import Worker
from lab.runner import session
from lab.runner.cases import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Asked = ParamSpec("Asked")

Conclusions = tuple[list[str], dict[str, list[Any]]]
"""Sentences, and the further lists of the JSON output by name."""


class Keywords(SettingsKeywords, total=False):
    """Parameters of every experiment besides its own; `out` and `watch` are those of `lab.measure`."""

    out: str | Path
    watch: Any


def for_plan(keywords: Keywords, **defaults: Any) -> dict[str, Any]:
    """The keywords of an experiment that `make_plan` takes."""
    return {**defaults, **{name: value for name, value in keywords.items() if name != "out"}}


@dataclass(frozen=True)
class Option:
    """An option of the command. Its default is that of the plan's parameter of the same name."""

    name: str
    help: str
    short: str = ""
    metavar: str | None = None
    type: type | None = None  # where the default does not tell
    flag: str | None = None  # on the command line, if not the name


REPEAT = Option("repeat", "Runs of each case, each in a fresh engine.  [default: 3; 6 for quick cases]", "r", type=int)


@dataclass(frozen=True)
class Table:
    """The results of one setup: the question that they answer, rows in columns, sentences, and a picture.

    `columns` are headings, each with a function that makes the cell of a row. `draw` also gets the setup in words and
    an empty figure; `caption` is that of the picture.
    """

    name: str
    question: str
    title: str
    caption: str
    columns: Sequence[tuple[str, Callable[[Any], str]]]
    rows: Callable[[Sequence[Record], StepPrediction | None], Sequence[Any]]
    conclude: Callable[[Sequence[Any], Sequence[Record], StepPrediction | None], Conclusions]
    draw: Callable[[Sequence[Any], Sequence[Record], StepPrediction | None, str, Figure], None]
    is_by_ceilings: bool = True  # its predictions need ceilings


@dataclass(frozen=True)
class Experiment:
    """An experiment. `about` is the help of its command, `again` gives the options that repeat its runs.

    `lever` is the part of a run that identifies its runs.
    """

    name: str
    chapter: str  # on a page with several kinds of results
    about: str
    lever: type[Lever]
    plan: Callable[..., Plan]
    options: tuple[Option, ...]
    again: Callable[[Sequence[Run]], dict[str, object]]
    tables: tuple[Table, ...]
    saves_states: bool = False
    is_served: bool = False  # with --url it is measured through a server

    def default(self, option: Option) -> Any:
        """The default of an option; None for one of the settings."""
        parameter = inspect.signature(self.plan).parameters.get(option.name)
        return None if parameter is None else parameter.default


@contextlib.contextmanager
def planning(plan: Callable[..., Plan], out: str | Path, saves_states: bool) -> Iterator[Callable[..., Plan]]:
    """The function that plans an experiment; if it saves states, with a folder for them in or near `out`."""
    if not saves_states:
        yield plan
        return
    with folder_in(out) as folder:
        yield functools.partial(plan, folder=folder)


def public(
    name: str,
    plan: Callable[Concatenate[Worker, Asked], Plan],
    saves_states: bool = False,
) -> Callable[Asked, list[Record]]:
    """The function `lab.NAME`, which plans and measures."""

    @functools.wraps(plan)
    def measure(*asked: Asked.args, **settings: Asked.kwargs) -> list[Record]:
        given: dict[str, Any] = dict(settings)
        out, watch = given.pop("out", "results"), given.pop("watch", None)
        with planning(plan, out, saves_states) as make:
            return session.carry_out(lambda worker: make(worker, *asked, **given), out, watch)

    parameters = inspect.signature(plan).parameters
    shown = [parameter for key, parameter in parameters.items() if key not in ("worker", "folder")]
    measure.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    measure.__name__ = measure.__qualname__ = name
    return measure
