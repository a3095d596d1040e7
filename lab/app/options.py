"""Options that several commands share, and their types."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import click

from lab.core import arguments, sampling, shell
from lab.core.arguments import Share, Time
from lab.core.asked_settings import flag, in_digits, table
from lab.errors import LabError

Decorated = TypeVar("Decorated", bound=Callable[..., object] | click.Command)


class CommandOption(Protocol):
    """A decorator that gives a command an option."""

    def __call__(self, command: Decorated, /) -> Decorated: ...


class Unstored(click.Option):
    """An option of output, or one that may hold a secret: no record holds it."""


class UnstoredArgument(click.Argument):
    """Arguments of another program, which may hold a secret: no record holds them."""


UNSTORED = (Unstored, UnstoredArgument)


class Parsed(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A type of option: what `parse` makes of a text.

    After a ValueError the message says what the text is not (`is_not`).
    """

    def __init__(self, name: str, parse: Callable[[str], object], is_not: str) -> None:
        self.name = name
        self.parse = parse
        self.is_not = is_not

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        try:
            return self.parse(str(value).strip())
        except ValueError:
            self.fail(f"{value!r} is not {self.is_not}", param, ctx)


def _tokens(text: str) -> int:
    return int(in_digits(text))


SHARE = Parsed("percent", arguments.share_of, "a share. Write 2% or 0.02.")
TOKENS = Parsed("tokens", _tokens, "a number of tokens. Write a whole number, or 8k.")

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
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        return seconds_of(value, self.least_s)


DURATION = Duration()


def setting_option(name: str, default: object = None) -> CommandOption:
    """The option of a setting, from the table of settings, unless with another default."""
    setting = table()[name]
    default = default or setting.default
    more: dict[str, Any] = {
        "default": default,
        "help": setting.help,
        "metavar": setting.metavar,
    }
    if setting.choices:
        more["type"] = Words(setting.choices)
    elif int in setting.types and not setting.is_switch:
        more["type"] = _number_or(setting.words) if setting.words else int
    names = [flag(name)]
    if setting.is_switch:
        names = [f"{flag(name)}/--no-{flag(name)[2:]}"]
    if setting.short:
        names.append(f" /{setting.short}" if setting.is_switch else setting.short)
    names += setting.also
    return click.option(*names, show_default=default is not None, **more)


class Words(click.Choice[str]):
    """One of some words, also as llama.cpp and llama-bench spell them: `-fa 1`, `-ctk Q8_0`."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        word = str(value).strip().lower()
        return super().convert(arguments.SWITCHES.get(word, word), param, ctx)


def _number_or(words: Sequence[str]) -> Parsed:
    """The type of a setting that is a whole number or one of a few words."""

    def parse(text: str) -> int | str:
        return text.lower() if text.lower() in words else int(text)

    return Parsed("n", parse, f"a whole number, or {' or '.join(words)}.")


MODEL = click.option(
    "--model",
    "-m",
    "-hf",  # llama.cpp's: OWNER/REPO:Q4_K_M
    default="smollm2-135m",
    show_default=True,
    help="A model: a name, a .gguf file, or another form (see lab models --help).",
)


def _take_saved(context: click.Context, _: click.Parameter, name: str | None) -> None:
    """Make saved settings the defaults of the command's options."""
    from lab.runner import as_options

    if name is None or context.resilient_parsing:
        return
    values: dict[str, object] = {}
    written: list[str] = []
    for key, value in as_options.settings(name).items():
        if not _has_setting(context.command, key):
            continue
        option = as_options.option(key, value)
        is_switch = len(option) == 1
        values[key] = not option[0].startswith("--no-") if is_switch else option[1]
        written += option
    context.default_map = {**(context.default_map or {}), **values}
    options = shell.join(*written) or "nothing here"
    click.echo(f"Note: --settings {name} stands for {options}.", err=True)


def _has_setting(command: click.Command, name: str) -> bool:
    """Whether a command has the option of a setting; a --device for other purposes is not one."""
    setting = table().get(name)
    for option in command.params:
        if isinstance(option, click.Option) and option.name == name:
            return setting is not None and option.help == setting.help
    return False


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
    *(
        option
        for name, option in _OPTIONS.items()
        if name not in ("prompt", "kv_unified", "seed")
    ),
]
"""How llama.cpp runs a model."""

SETTINGS = [MODEL, PROMPT, *ENGINE, _OPTIONS["kv_unified"]]
SAMPLING = [
    click.option(flag(name), type=option.type, help=option.help)
    for name, option in sampling.table().items()
]
"""How tokens are chosen. Without any of these options: greedy."""


def as_json_option(instead_of: str = "table", help: str = "") -> CommandOption:
    help = help or f"One JSON document on stdout instead of the {instead_of}."
    return click.option("--json", "as_json", cls=Unstored, is_flag=True, help=help)


def out_option(help: str) -> CommandOption:
    return click.option(
        "--out", "-o", cls=Unstored, default="results", show_default=True, help=help
    )


def lengths_option(default: str, help: str) -> CommandOption:
    """Several prompt lengths, in the words of `parse_lengths`."""
    return click.option("--prompt-len", "-p", default=default, show_default=True, help=help)


def prompt_len_option(default: int | None, help: str) -> CommandOption:
    """One prompt length. Without a default the help says what counts."""
    return click.option(
        "--prompt-len", "-p", type=TOKENS, default=default, show_default=True, help=help
    )


def gen_option(default: int, help: str) -> CommandOption:
    return click.option(
        "--gen", "-n", type=TOKENS, default=default, show_default=True, help=help
    )


def budget_option(default: str | None, help: str) -> CommandOption:
    """The time that a command may take. Without a default the help says what counts."""
    return click.option(
        "--budget", type=DURATION, default=default, show_default=True, help=help
    )


DETAILS = click.option(
    "--details",
    cls=Unstored,
    is_flag=True,
    help="Show every column that fits, every row and every sentence.  "
    "[default: the most important]",
)
PLOTS_OUT = click.option(
    "--out",
    "-o",
    cls=Unstored,
    help="Folder for the plots.  [default: where the first results file is]",
)
NO_PLOT = click.option("--no-plot", cls=Unstored, is_flag=True, help="Draw no plots.")
OUTPUT = [
    out_option("Folder for the results and plots."),
    as_json_option(),
    NO_PLOT,
    click.option(
        "--report",
        cls=Unstored,
        is_flag=True,
        help="Write a page for the browser at the end (see lab report).",
    ),
]
AT_LEAST = click.option(
    "--at-least",
    type=SHARE,
    default="1%",
    show_default=True,
    help="Smallest difference to claim.",
)
DRY_RUN = click.option(
    "--dry-run",
    cls=Unstored,
    is_flag=True,
    help="Show the plan, the memory and the time that it needs; measure nothing.",
)


UNTIL = [
    click.option(
        "--until",
        type=SHARE,
        metavar="SHARE",
        help="Repeat until every median is known to within this share (95 % confidence), such as "
        "2%.",
    ),
    click.option(
        "--max-repeats",
        default=30,
        show_default=True,
        help="With --until: maximum number of rounds.",
    ),
    budget_option(
        None,
        "Time to spend, such as 10min: with --until no round starts after it; with --url the "
        "session ends.",
    ),
]
"""How often to repeat, for `with_until`."""


def with_until(
    until: Share | None = None,
    max_repeats: int = 30,
    budget: Time | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Keywords of `lab.measure` as `make_plan` takes them. LabError for impossible limits."""
    from lab.runner.cases import Until
    from lab.runner.plan import N_PILOT

    if until is None and budget is not None:
        raise LabError(
            "--budget has an effect only with --until.",
            "Add --until 2%, or leave it out.",
        )
    if until is None:
        return settings
    share = arguments.share("until", until)
    if share < 1e-4:
        raise LabError(
            f"--until {share:.2g} is not possible.", "Give at least 0.01%, such as 2%."
        )
    if max_repeats < N_PILOT:
        raise LabError(
            f"--max-repeats {max_repeats} is too few to see the spread.",
            f"Allow at least {N_PILOT}.",
        )
    budget_s = None if budget is None else seconds_of(budget)
    return settings | {"until": Until(share, max_repeats, budget_s)}


def with_options(
    *options: CommandOption,
) -> Callable[[Decorated], Decorated]:
    """A decorator that gives a command these options, in this order."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
