"""What a text says of a setup besides its figures: the start of logs, devices, builds.

A fact holds for the figures below it, until another start says otherwise; what programs print at
their end (build, devices, `ollama ps`) holds for the figures above it too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.figure import Figure
from lab.features.why.readers import commands, meaning
from lab.features.why.readers.answers import compiled, matched
from lab.features.why.readers.commands import BENCH, LLAMA, OLLAMA, StartedProgram
from lab.features.why.readers.meaning import TABLE
from lab.formats import llama_bench_rows

ANY = ""  # a figure or a statement of no certain program
OF_SOURCE = {
    "llama-bench": BENCH,
    "vLLM": commands.VLLM,
    "SGLang": commands.SGLANG,
    "Ollama": OLLAMA,
    "Kobold": commands.KOBOLD,
    "mlx": commands.MLX,
    "Tabby": commands.TABBY,
    "llama": LLAMA,
    "ik_llama": LLAMA,
}
"""The program by the first letters of a figure's source."""

START = "start"
END = "end"
OF_ANY_PROGRAM = {"place": END}
BELOW = "below"  # a table: it is not of the next one
FOOT = "foot"  # of a run: it is of the figures of that run above and below it
DEVICE_ID = "device_id"
DRAFT = "draft"
OF_SERVER = ("parallel", facts.SAMPLING)  # also below the start of a draft model
OF_MODEL = (facts.FILE_ID, facts.PLACEMENT)
KEPT = (facts.HARDWARE, facts.BUILD)
"""What a new start leaves as it was."""


@dataclass(frozen=True)
class Statement:
    """Facts of a line, and the programs whose figures they are of; () for any program."""

    line: int
    programs: Sequence[str]
    place: str
    facts: Mapping[str, Fact]
    device_id: str | None = None
    draft: str | None = None

    def is_of(self, program: str) -> bool:
        return not self.programs or program in self.programs


@dataclass
class Known:
    """What is known of a program's setup at a line of the text."""

    facts: dict[str, Fact] = field(default_factory=dict)
    devices: dict[str, Fact] = field(default_factory=dict)
    drafts: set[str] = field(default_factory=set)
    has_command: bool = False
    is_of_draft: bool = False
    has_figure: bool = False  # since the last start

    def begin(self, command: StartedProgram) -> None:
        """A command starts a program: what earlier ones said no longer holds."""
        names = list(KEPT)
        model = facts.value_of(command.facts, facts.MODEL)
        if model and model == facts.value_of(self.facts, facts.MODEL):
            names += OF_MODEL
        if command.program == OLLAMA:  # a client: the settings of its server stay
            names += set(self.facts) - {facts.MODEL, facts.QUANTIZATION, *OF_MODEL}
        self.forget_but(names)
        self.facts |= command.facts
        self.has_command = True
        self.is_of_draft = False

    def forget_but(self, names: Sequence[str]) -> None:
        """Another start: only these facts still hold."""
        self.facts = {name: fact for name, fact in self.facts.items() if name in names}
        self.has_figure = False

    def learn(self, statement: Statement) -> None:
        """Take the facts of a line, unless they are of a draft model."""
        if statement.draft:
            self.drafts.add(statement.draft)
            self.is_of_draft = True
            self.facts.setdefault(facts.SPECULATION, Fact("drafts", statement.line))
        new = dict(statement.facts)
        model = new.get(facts.MODEL)
        if model and statement.place == START:
            self.is_of_draft = model.value in self.drafts
            if self.has_figure and not self.is_of_draft:
                self.forget_but(KEPT)
        if facts.HARDWARE in new:
            if self.has_figure and statement.device_id in ("0", None):
                self.devices = {}
            self.devices.setdefault(statement.device_id or "", new[facts.HARDWARE])
            self.facts[facts.HARDWARE] = hardware_of(self.devices)
            new.pop(facts.HARDWARE)
        if (
            statement.place == END and self.has_command
        ):  # a name that a server gives to its file
            model = new.pop(facts.MODEL, None)
            new.pop(facts.QUANTIZATION, None)
        if not model and facts.QUANTIZATION in self.facts:  # the file's name is more exact
            new.pop(facts.QUANTIZATION, None)
        if self.is_of_draft:
            new = {name: fact for name, fact in new.items() if name in OF_SERVER}
        self.facts |= new


def hardware_of(devices: Mapping[str, Fact]) -> Fact:
    """The devices as one fact: 2x NVIDIA GeForce RTX 3090."""
    counts = Counter(str(fact.value) for fact in devices.values())
    names = [name if n == 1 else f"{n}x {name}" for name, n in counts.items()]
    first = next(iter(devices.values()))
    return Fact(", ".join(names), first.line)


def program_of(figure: Figure) -> str:
    """The program whose commands and logs are of a figure."""
    for begin, program in OF_SOURCE.items():
        if figure.source.startswith(begin):
            return program
    return ANY


def with_setups(figures: Sequence[Figure], text: str) -> list[Figure]:
    """The figures, in order of their lines, with what the text says of their setups."""
    statements = statements_of(text)
    started = list(commands.commands(text))
    events: list[tuple[int, int, StartedProgram | Statement | Figure]] = []
    events += [(command.line, 0, command) for command in started]
    events += [(statement.line, 1, statement) for statement in statements]
    events += [(figure.line or 0, 2, figure) for figure in figures]
    states = {program: Known() for program in set(map(program_of, figures))}
    ends = [statement for statement in statements if statement.place != START]
    feet = {statement.line for statement in statements if statement.place == FOOT}
    lines = {figure.line or 0 for figure in figures}
    completed = list[Figure]()
    for _, _, event in sorted(events, key=lambda each: each[:2]):
        if isinstance(event, Figure):
            program = program_of(event)
            now = states[program]
            now.has_figure = True
            line = event.line or 0
            of_others = [each for each in ends if each.line not in lines - {line}]
            facts_below = said_below(line, program, of_others, started, now)
            of_text = {**facts_below, **now.facts}
            for name, fact in facts_below.items():
                above = of_text[name].line or 0
                is_of_last = any(above <= other < line for other in lines)
                if is_of_last and {above, fact.line} <= feet:
                    of_text[name] = fact
            completed.append(with_facts(event, of_text))
            continue
        for program, now in states.items():
            if isinstance(event, StartedProgram):
                start_or_add(now, program, event)
            elif event.is_of(program) and event.place != BELOW:
                now.learn(event)
    return completed


def start_or_add(now: Known, program: str, command: StartedProgram) -> None:
    """A command starts its program; options alone, and variables, only add to it."""
    of, comma, _ = command.program.partition(",")
    if comma:
        if of in (program, ANY):
            now.facts |= command.facts
    elif command.program == program or (not program and command.program):
        now.begin(command)
    elif not command.program and program in (LLAMA, BENCH, ANY):
        now.facts |= command.facts


def said_below(
    line: int,
    program: str,
    statements: Sequence[Statement],
    started: Sequence[StartedProgram],
    now: Known,
) -> dict[str, Fact]:
    """What is said below a figure: what programs print at their end, and the only command."""
    later = list[StartedProgram]()
    for command in started:
        if command.line > line and (command.program == program or not program):
            later.append(command)
    below = Known()
    for statement in statements:
        is_of_next = bool(later) and now.has_command and statement.line > later[0].line
        if not statement.is_of(program) or statement.line <= line or is_of_next:
            continue
        first = {
            name: fact
            for name, fact in statement.facts.items()
            if name not in below.facts or name == facts.HARDWARE
        }
        below.learn(replace(statement, facts=first))
    if not now.has_command and len(later) == 1:
        return {**below.facts, **later[0].facts}
    return below.facts


def with_facts(figure: Figure, facts_of_text: Mapping[str, Fact]) -> Figure:
    """The figure with the facts of its text; its own are nearer."""
    merged = dict(facts_of_text)
    title = merged.pop(meaning.TITLE, None)
    if title:
        merged.setdefault(facts.MODEL, title)
    merged |= figure.facts
    n_streams = figure.n_streams
    if n_streams is None and facts.value_of(merged, "parallel") == 1:
        n_streams = 1
    return replace(figure, facts=merged, n_streams=n_streams)


def statements_of(text: str) -> list[Statement]:
    """What the lines of logs say, in order."""
    statements = list[Statement]()
    for entry in TABLE["setups"]:
        for pattern in entry["patterns"]:
            for line, match in matched(text, compiled(pattern, re.M)):
                statements.append(statement_of(match, line, entry))
    for expression in llama_bench_rows.DEVICES:
        for line, match in matched(text, expression):
            statements.append(statement_of(match, line, OF_ANY_PROGRAM))
    return sorted(statements, key=lambda statement: statement.line)


def statement_of(match: re.Match[str], line: int, entry: Mapping[str, str]) -> Statement:
    """The facts of a match: its named groups, each by its meaning."""
    groups = match.groupdict()
    device_id = groups.pop(DEVICE_ID, None)
    draft = groups.pop(DRAFT, None)
    read = dict[str, Fact]()
    for name, written in groups.items():
        if written is not None:
            read |= meaning.facts_of(meaning.FACT_NAMES.get(name, name), written, line)
    if draft:
        draft = meaning.name_of_model(draft).get(facts.MODEL)
    return Statement(line, entry.get("of", ()), entry["place"], read, device_id, draft)
