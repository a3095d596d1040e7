"""What is known of a setup: facts, each stated, implied by a program's default, or unknown.

This file alone decides whether a fact is the same on both sides: equal only if both state it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.core.asked_settings import AUTO, AskedSettings, table
from lab.errors import LabError, printable

BUILD = "build"
MODEL = "model"
QUANTIZATION = "quantization"
PARAMETERS = "parameters"
FILE_ID = "file_id"
HARDWARE = "hardware"
BACKEND = "backend"
PLACEMENT = "placement"
CONTEXT = "n_ctx"
SPECULATION = "speculation"
SAMPLING = "sampling"
COMMAND = "command"  # the program that a command of the text starts
"""Names of facts; settings have their names in AskedSettings, other options their own."""

GREEDY = "greedy"
NO_DRAFTS = "no drafts"
MEASURABLE = (
    *("threads", "threads_batch", "batch", "ubatch", "n_gpu_layers", "flash_attn"),
    *("cache_type_k", "cache_type_v", "n_cpu_moe", "split_mode", "main_gpu", "mmap", "wait"),
)
"""Settings that a trial may take from a text; others could name a stranger's host or files."""

NO_OPTIONS = (BACKEND, PLACEMENT, HARDWARE, BUILD, PARAMETERS, FILE_ID)
"""Facts that no command names."""

ONE_FAMILY = {"llama-bench": "llama.cpp"}
"""Programs of a command that have the options of another one."""

STATED = "stated"
DEFAULT = "default"
LONGEST_VALUE = 60  # letters of a value in a sentence


@dataclass(frozen=True)
class Fact:
    """A value, the line of a text that states it, and how it is known. Unknown: no Fact."""

    value: object
    line: int | None = None
    how: str = STATED
    shown: str = ""  # as the text writes it

    @property
    def words(self) -> str:
        """The value as a sentence shows it."""
        value = self.shown or ("all" if self.value is None else str(self.value))
        if len(value) > LONGEST_VALUE:
            value = f"{value[:LONGEST_VALUE]}..."
        if self.how == DEFAULT:
            return f"{value} by default"
        return value


Facts = Mapping[str, Fact]


def stated(values: Mapping[str, object], line: int | None = None) -> dict[str, Fact]:
    """Facts of one line; a value of None or "" is unknown."""
    facts = dict[str, Fact]()
    for name, value in values.items():
        if value is not None and value != "":
            facts[name] = Fact(value, line)
    return facts


def defaults(values: Mapping[str, object]) -> dict[str, Fact]:
    """Facts that a program's documented defaults imply."""
    return {name: Fact(value, None, DEFAULT) for name, value in values.items()}


def value_of(facts: Facts, name: str) -> Any:
    """The value of a fact; None if it is unknown."""
    fact = facts.get(name)
    return fact.value if fact else None


def settings_of(facts: Facts) -> dict[str, Any]:
    """The settings that a trial can measure, by their keywords in AskedSettings."""
    settings = dict[str, object]()
    for name in MEASURABLE:
        fact = facts.get(name)
        if fact and is_valid(name, fact.value):
            settings[name] = fact.value
    return settings


def is_valid(name: str, value: Any) -> bool:
    """Whether the engine could be given this value."""
    try:
        AskedSettings(**{name: value}).check()
    except (LabError, TypeError, ValueError):
        return False
    return name in table()


@dataclass(frozen=True)
class FactOfBoth:
    """A fact of both sides, by letter; None where a side does not give it."""

    name: str
    sides: Mapping[str, Fact | None]
    is_same: bool  # the values of both are known and the same
    with_commands: tuple[str, ...] = ()  # letters of the sides whose command the text has

    @property
    def lacking(self) -> list[str]:
        """The letters of the sides that do not give it."""
        return [letter for letter, fact in self.sides.items() if fact is None]

    @property
    def is_equal(self) -> bool:
        """Whether both sides state the same."""
        return self.is_same and all(
            fact and fact.how == STATED for fact in self.sides.values()
        )

    @property
    def is_different(self) -> bool:
        """Whether both give it, and give different values."""
        return not self.lacking and not self.is_same and not self.is_open

    @property
    def is_open(self) -> bool:
        """Whether a side leaves it to the program."""
        return any(fact is not None and fact.value == AUTO for fact in self.sides.values())

    @property
    def is_in_one_command(self) -> bool:
        """Whether only one side names an option, though the other's command was read too."""
        if self.name in NO_OPTIONS:
            return False
        return len(self.lacking) == 1 and set(self.lacking) <= set(self.with_commands)

    @property
    def words(self) -> str:
        """The fact on each side: `99 in A, 20 in B`, or `8 in B, not given for A`."""
        parts = list[str]()
        for letter, fact in self.sides.items():
            if fact is not None:
                parts.append(f"{fact.words} in {letter}")
        if self.is_in_one_command:
            parts.append(f"not named in {self.lacking[0]}'s command")
        elif self.lacking:
            parts.append(f"not given for {' and '.join(self.lacking)}")
        return printable(", ".join(parts))


def same_value(first: object, second: object) -> bool:
    """Whether two values are the same; what a program chooses itself is not known."""
    if isinstance(first, str) and isinstance(second, str):
        return first.lower() == second.lower() != AUTO
    return bool(first == second)


def compare(
    sides: Iterable[tuple[str, Facts]],
    name: str,
    are_same: Callable[[object, object], bool] = same_value,
) -> FactOfBoth:
    """A fact of both sides, A first."""
    by_letter = dict[str, Fact | None]()
    with_commands = list[str]()
    programs = set[str]()
    for letter, facts in sides:
        by_letter[letter] = facts.get(name)
        if COMMAND in facts:
            with_commands.append(letter)
            program = str(facts[COMMAND].value)
            programs.add(ONE_FAMILY.get(program, program))
    if len(programs) > 1:  # a program does not have the other's options
        with_commands = []
    first, second = by_letter.values()
    is_same = bool(first and second and are_same(first.value, second.value))
    return FactOfBoth(name, by_letter, is_same, tuple(with_commands))
