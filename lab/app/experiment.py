"""An experiment as data: one file with one `Experiment`, from which its command, function and
sections are made.

Below: what experiments share, such as lists of numbers and cells of tables.
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
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, get_type_hints

import click

from lab.app.asked import words_of_call
from lab.app.help import Command
from lab.app.options import (
    DRY_RUN,
    ENGINE,
    MODEL,
    OUTPUT,
    PROMPT,
    SEED,
    setting_option,
    with_options,
)
from lab.app.running import carry_out
from lab.core import shape
from lab.core.asked_command import asking
from lab.core.asked_settings import in_digits
from lab.core.experiments import experiment_runs, run_name
from lab.core.lists import grouped
from lab.core.record import Model, Record
from lab.core.shown import MARK
from lab.errors import LabError
from lab.process.worker import Worker
from lab.roofline.step_prediction import StepPrediction, prediction_for
from lab.runner import disturbances, session
from lab.runner.cases import Plan
from lab.show import canvas, table, text_prediction
from lab.show.section import WIDE, Columns, Context, Kind, Picture, Section, is_plain, tabled
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Asked = ParamSpec("Asked")


class Option(NamedTuple):
    """What the command line says of a parameter of a plan, besides its name and its default."""

    help: str
    short: str = ""
    metavar: str | None = None
    type: Any = None  # where the default does not tell
    flag: str = ""  # if not the parameter's name


Numbers = str | int | Sequence[int]
"""What an option with several numbers takes: `1,4`, or in Python also 4 or [1, 4]."""


def options(plan: Callable[..., Any]) -> dict[str, Any]:
    """The options for click of a plan's parameters that have an Option, by their names on the
    command line."""
    parameters = inspect.signature(plan).parameters
    hints = get_type_hints(plan, include_extras=True)
    made = {}
    for name, parameter in parameters.items():
        for option in getattr(hints.get(name), "__metadata__", ()):
            flag = option.flag or name.replace("_", "-")
            default = parameter.default
            more: dict[str, Any] = {
                "type": option.type,
                "metavar": option.metavar,
                "help": option.help,
            }
            more |= {"is_flag": default is False, "show_default": default not in (None, "", False)}
            made[flag] = click.option(
                name, f"--{flag}", *filter(None, [option.short]), default=default, **more
            )
    return made


REPEAT = Option(
    "Runs of each case, each in a fresh engine.  [default: 3; 6 if that adds little time]",
    "-r",
    type=int,
)


@dataclass(frozen=True)
class Table:
    """The results of one setup: the question that they answer, rows in columns, sentences, perhaps
    a picture.

    `rows` makes the rows of records and of a prediction; `conclude` and `draw` get rows and
    records. `draw` also gets the setup in words and an empty figure; `caption` is that of the
    picture.
    """

    name: str
    question: str
    title: str
    columns: Columns
    rows: Callable[[Sequence[Record], StepPrediction | None], Sequence[Any]]
    conclude: Callable[[Sequence[Any], Sequence[Record]], list[str]]
    draw: Callable[[Sequence[Any], Sequence[Record], str, Figure], None] | None = None
    caption: str = ""
    is_by_ceilings: bool = True  # its predictions need ceilings


@dataclass(frozen=True)
class Experiment:
    """An experiment. `about` is the help of its command, whose options are the parameters of `plan`
    with an Option.

    `through_server` measures it with --url.
    """

    name: str
    chapter: str  # on a page with several kinds of results
    about: str
    plan: Callable[..., Plan]
    tables: tuple[Table, ...]
    through_server: Callable[[click.Context, str, dict[str, Any]], None] | None = None

    def as_command(self) -> click.Command:
        """The command: its own options, then those of the engine."""
        declared = options(self.plan)
        reaching = list[Any]()
        own = [*declared.values(), MODEL, *([] if "prompt" in declared else [PROMPT]), *ENGINE]
        kv_unified = experiment_runs(self.name).kv_unified
        own += [setting_option("kv_unified", kv_unified)] if kv_unified else []
        if self.through_server:
            from lab.app.server import REACHING, TIMEOUT, URL

            reaching = [URL, *REACHING, TIMEOUT]

        @click.pass_context
        @with_options(*own, SEED, *OUTPUT, DRY_RUN, *reaching)
        def measure(context: click.Context, out: str, url: str | None = None, **asked: Any) -> None:
            if self.through_server:
                from lab.features.measure.measuring import ONLY_SERVER, check_side
                from lab.app.server import given

                check_side(given(context), url)
                if url is not None:
                    return self.through_server(context, url, {"out": out, **asked})
                asked = {name: value for name, value in asked.items() if name not in ONLY_SERVER}
            with planning(self.plan, out) as make:
                carry_out(make, out, **asked)

        first = ("model", *declared)[:6]
        return click.command(self.name, cls=Command, first=first, help=self.about)(measure)

    def as_kind(self) -> Kind:
        """Its kind of results."""
        return Kind(
            self.name,
            lambda one: is_plain(one) and one.run.experiment == self.name,
            self.sections,
        )

    def sections(self, records: Sequence[Record], context: Context) -> list[Section]:
        """The results, predicted from ceilings and plain runs: a part for each table and setup."""
        own = [record for record in records if record.run.is_timed]
        parts = list[Section]()
        setups = table.setups(table.runs(own)) if own else []
        for kind in self.tables:
            for label, rows in setups:
                chosen = [own[i] for i in dict.fromkeys(rows.run)]
                prediction = prediction_for(
                    chosen[0], context.ceilings, [*context.runs, *context.others]
                )
                parts.append(section(kind, label, chosen, prediction, context.is_page))
        parts = [part for part in parts if part.rows]
        return (
            [Section(self.chapter, name=parts[0].name, question=parts[0].question, parts=parts)]
            if parts
            else []
        )


def section(
    kind: Table,
    label: str,
    records: Sequence[Record],
    prediction: StepPrediction | None,
    is_page: bool,
) -> Section:
    """A table with its sentences and the basis of its predictions. The first sentence is the
    answer."""
    rows = tuple(kind.rows(records, prediction))
    pictures = list[Picture]()
    basis = list[str]()
    shown = tabled(kind.columns, rows)
    n_disturbed = sum(map(bool, map(disturbances.disturbances, records)))
    if kind.is_by_ceilings and not prediction:
        basis = ["No predictions: measure the ceilings first (lab ceilings)."]
    elif (
        kind.is_by_ceilings
        and prediction
        and any("predicted" in heading for heading in shown["headings"])
    ):
        basis = [text_prediction.basis(prediction)]
    if any(
        map(
            disturbances.is_doubtful, grouped(records, lambda record: run_name(record.run)).values()
        )
    ):
        words = [
            f"No conclusions: {n_disturbed} of {len(records)} runs were disturbed. Measure again."
        ]
    else:
        words = kind.conclude(rows, records)
    title = (
        f"{label} ({MARK} {n_disturbed} of {len(records)} runs disturbed)" if n_disturbed else label
    )
    if kind.draw:
        pictures = [
            Picture(
                kind.name, kind.caption, functools.partial(kind.draw, rows, records, title), WIDE
            )
        ]
    n_answers = 0 if is_page else 1
    return Section(
        title,
        kind.title,
        name=kind.name,
        question=kind.question,
        answer="".join(words[:n_answers]),
        **shown,
        sentences=[*words[n_answers:], *basis],
        pictures=pictures,
        data=lambda: {
            "rows": [{"experiment": kind.name, "setup": title, **row._asdict()} for row in rows]
        },
    )


@contextlib.contextmanager
def planning(plan: Callable[..., Plan], out: str | Path) -> Iterator[Callable[..., Plan]]:
    """The function that plans an experiment; if it saves states, with a `folder` for them, which is
    deleted later."""
    if "folder" not in inspect.signature(plan).parameters:
        yield plan
        return
    there = next(
        (path for path in (Path(out).absolute(), *Path(out).absolute().parents) if path.is_dir()),
        None,
    )
    try:
        str(there).encode()  # the engine gets the path in UTF-8
        made = tempfile.TemporaryDirectory(prefix=".lab-states-", dir=there)
    except (OSError, UnicodeError):
        made = tempfile.TemporaryDirectory(prefix="lab-states-")
    with made as folder:
        yield functools.partial(plan, folder=Path(folder))


def public(
    name: str,
    plan: Callable[Concatenate[Worker, Asked], Any],
    carry_out: Callable[..., Any] = session.carry_out,
) -> Callable[Asked, list[Record]]:
    """The function `lab.NAME`, which plans and measures."""

    @functools.wraps(plan)
    def measure(*asked: Asked.args, **settings: Asked.kwargs) -> list[Record]:
        given: dict[str, Any] = dict(settings)
        out = given.pop("out", "results")
        watch = given.pop("watch", None)
        with planning(plan, out) as make:
            words = words_of_call(name, plan, asked, given)
            with asking(words):
                made: list[Record] = carry_out(
                    lambda worker: make(worker, *asked, **given), out, watch
                )
            return made

    shown = [
        one
        for key, one in inspect.signature(plan).parameters.items()
        if key not in ("worker", "folder")
    ]
    measure.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    measure.__name__ = measure.__qualname__ = name
    return measure


def numbers(option: str, asked: Numbers, most: int) -> tuple[int, ...]:
    """A list such as `1,2,4`: different numbers from 1 to `most`, in ascending order. LabError for
    anything else."""
    values = list[int]()
    for part in map(
        str,
        [asked]
        if isinstance(asked, int)
        else asked.split(",")
        if isinstance(asked, str)
        else asked,
    ):
        if not re.fullmatch(r"-?\d{1,12}", in_digits(part.strip())):
            raise LabError(
                f"{option} {asked}: {part.strip()!r} is not a whole number.",
                f"For example: {option} 1,2,4",
            )
        values.append(value := int(in_digits(part.strip())))
        if not 1 <= value <= most:
            raise LabError(
                f"{option} {value:,} is not possible.", f"Give whole numbers from 1 to {most:,}."
            )
        if values.count(value) > 1:
            raise LabError(f"{option} has {value:,} twice.", "Give each number once.")
    return tuple(sorted(values))


def listed(values: Iterable[object]) -> str:
    """Numbers as an option takes them: each once, ascending, without None."""
    return ",".join(
        str(value) for value in sorted({value for value in values if isinstance(value, int)})
    )


KEEPS_NO_POSITIONS = {
    shape.UNCOUNTED["llama4"],
    *(
        shape.SINGLE[key]
        for key in ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")
    ),
}
"""`Model.uncounted` of models that do not keep a key and a value of every position."""


def need_every_position(model: Model) -> None:
    """LabError for models that do not keep the keys and values of every position."""
    reason = model.uncounted if model.uncounted in KEEPS_NO_POSITIONS else None
    if model.n_state:
        reason = shape.SINGLE["ssm.state_size"]
    if any(model.windows or ()):
        reason = "some of its layers use sliding-window attention"
    if reason:
        hint = "Use a model in which every layer attends to all positions, such as -m smollm2-135m."
        raise LabError(f"The cache of {model.name} cannot be copied and cut: {reason}.", hint)


def first_difference(ids: Sequence[Any], others: Sequence[Any]) -> int | None:
    """The first position at which two answers to one prompt differ; None if they agree as far as
    both go."""
    return next(
        (i for i, (own, other) in enumerate(zip(ids, others, strict=False)) if own != other), None
    )


def off_by(
    pairs: Iterable[tuple[float | None, float | None]], what: str, which: str = ""
) -> list[str]:
    """A sentence on prediction errors, from pairs of predicted and measured values; none if no pair
    is known."""
    known = [
        (expected, measured)
        for expected, measured in pairs
        if expected and measured and measured > 0
    ]
    errors = [100 * abs(expected / measured - 1) for expected, measured in known] or [0.0]
    middle = statistics.median(errors)
    most = max(errors)
    return (
        [f"Prediction error of {what}: median {middle:.0f} %, maximum {most:.0f} %{which}."]
        if known
        else []
    )


def cell(value: float | None, scale: float = 1.0) -> str:
    """A number in a table with three significant digits, `-` if unknown."""
    return "-" if value is None else digits(scale * value)


def ranged(value_s: float, low_s: float, high_s: float, n_runs: int) -> str:
    """Milliseconds in a table, with their range over several runs below."""
    ends = f"\n{digits(1e3 * low_s)}-{digits(1e3 * high_s)}".replace(",", "")  # as narrow as can be
    return digits(1e3 * value_s) + ends * (n_runs > 1)


def plot_series(
    ax: Axes,
    name: str,
    style: dict[str, Any],
    measured: Iterable[tuple[float, float, Sequence[Record]]],
    medians: Iterable[tuple[float, float]],
    expected: Iterable[tuple[float, float]],
) -> None:
    """Draws measured points (x, y, the runs), hollow if disturbed; medians as a line; predictions
    dashed."""
    points = [(x, y, any(map(disturbances.disturbances, runs))) for x, y, runs in measured]
    if points:
        canvas.points(
            ax, *zip(*points, strict=True), **style, ms=5, alpha=0.6, label=f"{name}: measured"
        )
    for what, line, mark, size, pairs in (
        ("median", "-", "_", 14, medians),
        ("predicted", "--", "x", 5, expected),
    ):
        if known := list(pairs):
            own = {"color": style["color"], "ls": line, "marker": mark, "ms": size, "lw": 1.8}
            ax.plot(*zip(*known, strict=True), **own, label=f"{name}: {what}")


def as_rows(table: pd.DataFrame) -> list[Any]:
    """The rows of a table as named tuples, with None for an unknown figure."""
    known = table.astype(object)
    return list(known.where(known.notna(), None).itertuples(index=False, name="Row"))
