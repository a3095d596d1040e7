"""Options that several commands share, and their types."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import click

from lab.core import shell
from lab.core.asked_settings import AUTO, defaults, flag, in_digits, table, types
from lab.errors import LabError


class Parsed(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """What `parse` makes of a text. After a ValueError the message says that the text `is_not`
    that."""

    def __init__(self, name: str, parse: Callable[[str], Any], is_not: str) -> None:
        self.name = name
        self.parse = parse
        self.is_not = is_not

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(str(value).strip())
        except ValueError:
            self.fail(f"{value!r} is not {self.is_not}", param, ctx)


def _share(text: str) -> float:
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= share < 1:
        raise ValueError
    return share


SHARE = Parsed("percent", _share, "a share. Write 2% or 0.02.")
_layers = lambda text: AUTO if text.lower() == AUTO else int(text)  # noqa: E731
LAYERS = Parsed("n", _layers, "a number of layers. Write a whole number, or auto.")
TOKENS = Parsed(
    "tokens", lambda text: int(in_digits(text)), "a number of tokens. Write a whole number, or 8k."
)

DURATION_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
LONGEST_S = 86_400


def seconds_of(duration: str | float, least_s: int = 10) -> float:
    """Seconds of a duration such as `10min`, `90s`, `1h` or a number of seconds.

    LabError for another text, for less than `least_s`, and for more than a day.
    """
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*(s|min|m|h|)\s*", str(duration))
    seconds = -1.0
    if match:
        seconds = float(match[1]) * DURATION_UNITS[match[2]]
    if not least_s <= seconds <= LONGEST_S:
        raise LabError(
            f"--budget {duration} is not possible.",
            f"Give a time from {least_s}s to 24h, such as 10min.",
        )
    return seconds


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A duration such as `10min`, as seconds."""

    name = "time"

    def __init__(self, least_s: int = 10) -> None:
        self.least_s = least_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        return seconds_of(value, self.least_s)


DURATION = Duration()


def setting_option(name: str, default: object = None) -> Callable[..., Any]:
    """The option of a setting, from the table of settings; with another default where one is
    given."""
    setting = table()[name]
    default = default or defaults()[name]
    more: dict[str, Any] = {"default": default, "help": setting.help, "metavar": setting.metavar}
    names = [flag(name)] + ([setting.short] if setting.short else [])
    if bool in types()[name] and not setting.choices:
        names = [f"{flag(name)}/--no-{names[0][2:]}"] + [f" /{short}" for short in names[1:]]
    elif setting.choices:
        more["type"] = click.Choice(setting.choices)
    elif int in types()[name]:
        more["type"] = LAYERS if str in types()[name] else int
    return click.option(*names, show_default=default is not None, **more)


MODEL = click.option(
    "--model",
    "-m",
    default="smollm2-135m",
    show_default=True,
    help="A model: a name, a .gguf file, or another form (see lab models --help).",
)


def _take_saved(context: click.Context, _: click.Parameter, name: str | None) -> None:
    """Make saved settings the defaults of the command's options for settings (--device of predict
    is not one)."""
    from lab.runner import as_options

    if name is None or context.resilient_parsing:
        return
    options = {
        option.name: option for option in context.command.params if isinstance(option, click.Option)
    }
    own = {
        key
        for key, setting in table().items()
        if key in options and options[key].help == setting.help
    }
    saved = as_options.settings(name)
    written = {key: as_options.option(key, value) for key, value in saved.items() if key in own}
    values = {
        key: words[1] if len(words) == 2 else not words[0].startswith("--no-")
        for key, words in written.items()
    }
    context.default_map = {**(context.default_map or {}), **values}
    words = shell.join(*itertools.chain(*written.values())) or "nothing here"
    click.echo(f"Note: --settings {name} stands for {words}.", err=True)


SAVED_SETTINGS = click.option(
    "--settings",
    metavar="NAME",
    expose_value=False,
    is_eager=True,
    callback=_take_saved,
    help="Use the settings that lab tune saved as NAME; options given here come first.",
)

_OPTIONS = {name: setting_option(name) for name in table()}
PROMPT, SEED, DEVICE, LIB = (_OPTIONS[name] for name in ("prompt", "seed", "device", "lib"))
ENGINE = [
    SAVED_SETTINGS,
    *(option for name, option in _OPTIONS.items() if name not in ("prompt", "kv_unified", "seed")),
]
"""How llama.cpp runs a model."""

SETTINGS = [MODEL, PROMPT, *ENGINE, _OPTIONS["kv_unified"]]


def as_json_option(instead_of: str = "table", help: str = "") -> Callable[..., Any]:
    help = help or f"One JSON document on stdout instead of the {instead_of}."
    return click.option("--json", "as_json", is_flag=True, help=help)


def out_option(help: str) -> Callable[..., Any]:
    return click.option("--out", "-o", default="results", show_default=True, help=help)


DETAILS = click.option(
    "--details",
    is_flag=True,
    help="Show every column that fits, every row and every sentence.  [default: the most important]",
)
PLOTS_OUT = click.option(
    "--out", "-o", help="Folder for the plots.  [default: where the first results file is]"
)
NO_PLOT = click.option("--no-plot", is_flag=True, help="Draw no plots.")
OUTPUT = [
    out_option("Folder for the results and plots."),
    as_json_option(),
    NO_PLOT,
    click.option(
        "--report", is_flag=True, help="Write a page for the browser at the end (see lab report)."
    ),
]
AT_LEAST = click.option(
    "--at-least", type=SHARE, default="1%", show_default=True, help="Smallest difference to claim."
)
DRY_RUN = click.option(
    "--dry-run", is_flag=True, help="Show the plan and the memory it needs; measure nothing."
)


def with_options(
    *options: Callable[..., Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command these options, in this order."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
