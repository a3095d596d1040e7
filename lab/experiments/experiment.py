"""What an experiment is, as data: its command, its plan, its tables. And what all of them share.

An experiment is one file. It says everything of itself in one `Experiment`; the command, the tables and the command
that makes its runs again follow from it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from lab.analysis.wording import digits
from lab.core import layers
from lab.core.asked_settings import SettingsKeywords
from lab.core.record import Model, Record, Run
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner import session
from lab.runner.cases import Plan
from lab.why.step_prediction import StepPrediction

Asked = ParamSpec("Asked")

Conclusions = tuple[list[str], dict[str, list[Any]]]
"""Sentences, and what JSON has besides the rows, by name."""


class Keywords(SettingsKeywords, total=False):
    """What every experiment takes besides its own parameters; `out` and `watch` are those of `lab.measure`."""

    out: str | Path
    watch: Any
    fetch: bool


def for_plan(keywords: Keywords, **defaults: Any) -> dict[str, Any]:
    """What `make_plan` takes of the keywords of an experiment."""
    return {**defaults, **{name: value for name, value in keywords.items() if name != "out"}}


@dataclass(frozen=True)
class Option:
    """An option of the command. Its default is that of the plan's parameter of the same name."""

    name: str
    help: str
    short: str = ""
    metavar: str | None = None
    type: type | None = None  # where the default does not tell


REPEAT = Option("repeat", "Runs of each case, each in a fresh engine.  [default: 3; 6 of cheap cases]", "r", type=int)


@dataclass(frozen=True)
class Table:
    """What an experiment shows of one setup: the question that it answers, its rows in columns, what they say.

    `columns` are headings, each with what shows a row there. `caption` is that of the picture.
    """

    name: str
    question: str
    title: str
    caption: str
    columns: Sequence[tuple[str, Callable[[Any], str]]]
    rows: Callable[[Sequence[Record], StepPrediction | None], Sequence[Any]]
    conclude: Callable[[Sequence[Any], Sequence[Record], StepPrediction | None], Conclusions]
    is_by_ceilings: bool = True  # what is predicted needs ceilings


@dataclass(frozen=True)
class Experiment:
    """An experiment. `about` is the help of its command, `again` gives the options that make its runs again.

    `kv_unified` is the default of that option, None where all runs have one sequence. `run` makes the runs of a plan.
    """

    name: str
    about: str
    lever: type
    plan: Callable[..., Plan]
    options: tuple[Option, ...]
    again: Callable[[Sequence[Run]], dict[str, object]]
    tables: tuple[Table, ...]
    kv_unified: str | None = None
    saves_states: bool = False
    run: Callable[..., Iterator[Record]] = session.execute

    def default(self, option: Option) -> Any:
        """What an option is where it is not given; None for one of the settings."""
        parameter = inspect.signature(self.plan).parameters.get(option.name)
        return None if parameter is None else parameter.default


@contextlib.contextmanager
def planning(plan: Callable[..., Plan], out: str | Path, saves_states: bool) -> Iterator[Callable[..., Plan]]:
    """What plans an experiment whose results go to `out`. Where it saves states, its plan gets a folder for them."""
    if not saves_states:
        yield plan
        return
    with folder_in(out) as folder:
        yield functools.partial(plan, folder=folder)


@contextlib.contextmanager
def folder_in(out: str | Path) -> Iterator[Path]:
    """A folder for saved states, deleted afterwards: in `out`, or above it where that is yet to be made.

    Where nothing can be written there, it is in the system's folder for temporary files.
    """
    with contextlib.ExitStack() as stack:
        try:
            there = next(path for path in (Path(out).absolute(), *Path(out).absolute().parents) if path.is_dir())
            str(there).encode()  # the engine is told in UTF-8
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".lab-states-", dir=there))
        except (OSError, UnicodeError, StopIteration):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-states-"))
        yield Path(folder)


def public(
    name: str,
    plan: Callable[Concatenate[Worker, Asked], Plan],
    run: Callable[..., Iterator[Record]] = session.execute,
    saves_states: bool = False,
) -> Callable[Asked, list[Record]]:
    """The function `lab.NAME`, which measures what the plan says."""

    @functools.wraps(plan)
    def measure(*asked: Asked.args, **settings: Asked.kwargs) -> list[Record]:
        given: dict[str, Any] = dict(settings)
        out, watch = given.pop("out", "results"), given.pop("watch", None)
        with planning(plan, out, saves_states) as make:
            return session.carry_out(lambda worker: make(worker, *asked, **given), out, watch, run=run)

    parameters = inspect.signature(plan).parameters
    shown = [parameter for key, parameter in parameters.items() if key not in ("worker", "folder")]
    measure.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    measure.__name__ = measure.__qualname__ = name
    return measure


def numbers(
    option: str, asked: str | int | Sequence[int], most: int, more: str = "; --repeat measures it more often"
) -> tuple[int, ...]:
    """A list such as `1,2,4`, each from 1 to `most` and given once, in ascending order. LabError for anything else.

    `more`: what the hint adds for a number that is given twice.
    """
    given = [asked] if isinstance(asked, int) else asked.split(",") if isinstance(asked, str) else list(asked)
    values = []
    for part in (str(part).strip() for part in given):
        if not re.fullmatch(r"-?\d{1,12}", part):
            raise LabError(f"{part!r} is not a whole number (in {option} {asked}).", f"For example: {option} 1,2,4")
        value = int(part)
        if not 1 <= value <= most:
            raise LabError(f"{option} {value:,} is not possible.", f"Give whole numbers from 1 to {most:,}.")
        if value in values:
            raise LabError(f"{option} has {value:,} twice.", f"Give each number once{more}.")
        values.append(value)
    return tuple(sorted(values))


def as_lengths(prompt_len: str | int | Sequence[int]) -> str | Sequence[int]:
    """Prompt lengths as `make_plan` takes them."""
    return [prompt_len] if isinstance(prompt_len, int) else prompt_len


def listed(values: Iterable[object]) -> str:
    """Numbers as an option takes them: each once, ascending, without None."""
    return ",".join(str(value) for value in sorted({value for value in values if isinstance(value, int)}))


KEEPS_NO_POSITIONS = {
    layers.UNCOUNTED["llama4"],
    *(layers.SINGLE[key] for key in ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")),
}
"""What `Model.uncounted` says of models that do not keep a key and a value of every position."""


def need_every_position(model: Model) -> None:
    """LabError for models that do not keep the keys and values of every position."""
    reason = model.uncounted if model.uncounted in KEEPS_NO_POSITIONS else None
    if any(model.windows or ()):
        reason = "some of its layers look back only through a sliding window"
    if reason:
        raise LabError(
            f"The cache of {model.name} cannot be copied and cut: {reason}.",
            "Take a model in which every layer sees all positions, such as -m smollm2-135m.",
        )


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Where two answers to one prompt part; None where neither does before the other ends."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (own, other) in pairs if own != other), None)


def off_by(
    pairs: Iterable[tuple[float | None, float | None]], what: str = "Predictions are off", which: str = ""
) -> list[str]:
    """How far predictions are off, in a sentence, of pairs of what is predicted and what is measured; none without."""
    known = [(expected, measured) for expected, measured in pairs if expected and measured and measured > 0]
    errors = [abs(expected / measured - 1) for expected, measured in known]
    if not errors:
        return []
    return [f"{what} by {statistics.median(errors):.0%}, the median; at most {max(errors):.0%}{which}."]


def cell(value: float | None, scale: float = 1.0, form: str = "") -> str:
    """A number in a table; `-` where it is not known. Without a `form` it has three digits."""
    if value is None:
        return "-"
    return format(scale * value, form) if form else digits(scale * value)


def ranged(values: tuple[float, float, float], n_runs: int) -> str:
    """A value in a table, and below it its range over several runs."""
    value, low, high = (1e3 * seconds for seconds in values)
    ends = f"\n{digits(low)}-{digits(high)}".replace(",", "")  # as narrow as can be
    return digits(value) + (ends if n_runs > 1 else "")
