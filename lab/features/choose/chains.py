"""The chains that are measured: by name, with their options; a JSON grammar and a JSON schema."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import click
from click.core import ParameterSource

from lab.app.options import SAMPLING
from lab.core import shell
from lab.core.sampling import GREEDY, Sampling, chain
from lab.errors import LabError
from lab.process.worker import Worker
from lab.roofline.choosing import DEFAULT
from lab.runner import samplers

JSON = "JSON grammar"
SCHEMA = "JSON schema"
MASKED = "masked"  # after a name: its grammar masks the vocabulary before each choice

OPTIONS: dict[str, dict[str, object]] = {
    GREEDY: {},
    DEFAULT: {"temp": 0.8},
    "top-k 1": {"samplers": "top_k", "top_k": 1},
    "top-k 40": {"samplers": "top_k;temperature"},
    "no top-k": {"top_k": 0},
    "penalties 64": {"repeat_penalty": 1.1},
    "penalties 1024": {"repeat_penalty": 1.1, "repeat_last_n": 1024},
    "DRY": {"dry_multiplier": 0.8},
    "mirostat": {"mirostat": 2},
}
"""Options of each chain; all others are as in llama-server."""

N_FIELDS = 40
FIELD_TYPES = ("string", "integer", "boolean", "number")

EXAMPLE = 'Write it as options: --chain "--temp 0.8 --top-k 0"'

GRAMMAR = r"""root ::= object
object ::= "{" space (member ("," space member)*)? "}" space
member ::= text ":" space value
array ::= "[" space (value ("," space value)*)? "]" space
value ::= object | array | text | number | ("true" | "false" | "null") space
text ::= "\"" letter* "\"" space
letter ::= [^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" hex hex hex hex)
hex ::= [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? space
space ::= [ \n]?
"""


@dataclass(frozen=True)
class NamedChain:
    name: str
    sampling: Sampling | None  # None: greedy

    @property
    def label(self) -> str:
        """The name, and what the chain consists of, as a record keeps it."""
        if self.sampling is None:
            return f"{self.name}: the most probable token"
        return f"{self.name}: {self.sampling.label}"


def schema_text() -> str:
    """A JSON schema of N_FIELDS fields, all of them required."""
    fields: dict[str, dict[str, str]] = {}
    for number in range(N_FIELDS):
        kind = FIELD_TYPES[number % len(FIELD_TYPES)]
        fields[f"{kind}_{number + 1}"] = {"type": kind}
    return json.dumps(
        {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
    )


def of_texts(worker: Worker, seed: int) -> list[NamedChain]:
    """The chains of models with a vocabulary: all, with both ways to apply a grammar."""
    chains = without_texts(seed)
    base = chain(OPTIONS[DEFAULT], seed)
    assert base is not None
    for name, text in ((JSON, GRAMMAR), (SCHEMA, schema_text())):
        lines = tuple(worker.grammar(text, is_schema=name == SCHEMA))
        checked = dataclasses.replace(base, grammar=lines, grammar_file=name)
        masked = dataclasses.replace(checked, grammar_first=True)
        chains += [NamedChain(name, checked), NamedChain(f"{name} {MASKED}", masked)]
    dry = NamedChain("DRY", chain(OPTIONS["DRY"], seed))
    return [*chains, dry]


def without_texts(seed: int) -> list[NamedChain]:
    """The chains that need no vocabulary."""
    chains: list[NamedChain] = []
    for name, options in OPTIONS.items():
        if name != "DRY":
            chains.append(NamedChain(name, chain(options, seed)))
    return chains


def asked(worker: Worker, texts: Sequence[str], seed: int) -> list[NamedChain]:
    """The user's chains, written as options, beside greedy and the default."""
    chains = [NamedChain(name, chain(OPTIONS[name], seed)) for name in (GREEDY, DEFAULT)]
    for text in texts:
        sampling = samplers.planned(worker, _parsed(text), seed)
        name = " ".join(shell.split(text)).replace("|", " ").replace(": ", " ")
        chains.append(NamedChain(name, sampling))
    names = [named.name for named in chains]
    if len(set(names)) < len(names):
        raise LabError("A --chain is given twice.", "Give each chain once.")
    return chains


def _parsed(text: str) -> dict[str, object]:
    """The options of a chain. LabError if there are none, or if they are not understood."""
    if not text.strip():
        raise LabError("A --chain is empty.", EXAMPLE)
    command = click.Command("chain", add_help_option=False)
    for option in SAMPLING:
        option(command)
    try:
        context = command.make_context("chain", shell.split(text))
    except (click.ClickException, ValueError) as problem:
        message = str(problem)
        if isinstance(problem, click.ClickException):
            message = problem.format_message()
        raise LabError(
            f"The chain {text!r} is not understood: {message}",
            EXAMPLE,
        ) from None
    options: dict[str, object] = {}
    for name, value in context.params.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            options[name] = value
    return options
