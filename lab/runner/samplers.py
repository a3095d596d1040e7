"""The chain of samplers that options ask for, checked by llama.cpp before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.core import files
from lab.core.bounds import MOST_LETTERS
from lab.core.sampling import Sampling, chain
from lab.errors import LabError, printable
from lab.process.worker import Worker

CONTENT = "Give a grammar (GBNF) or a JSON schema."
MOST_BYTES = 1 << 20
MOST_LINES = 10_000


def planned(worker: Worker, asked: Mapping[str, Any], seed: int) -> Sampling | None:
    """The chain, with the grammar of its file; None for greedy.

    LabError for an unknown sampler, and with llama.cpp's reason for a grammar that it refuses.
    """
    sampling = chain(asked, seed)
    if sampling is None:
        return None
    name = sampling.json_schema_file or sampling.grammar_file
    if name is None:
        return sampling
    path = files.expanded(name)
    is_schema = sampling.json_schema_file is not None
    lines = worker.grammar(text_of(path), is_schema)
    return dataclasses.replace(
        sampling,
        grammar=checked_lines(lines, path),
        grammar_file=None if is_schema else printable(path.name),
        json_schema_file=printable(path.name) if is_schema else None,
    )


def text_of(path: Path) -> str:
    """The text of a grammar's or schema's file. LabError if it cannot be read."""
    text = files.read_text(path, "The file", CONTENT, MOST_BYTES)
    if not text.strip():
        raise LabError(f"{path.name} is empty.", CONTENT)
    return text


def checked_lines(lines: list[str], path: Path) -> tuple[str, ...]:
    """The lines of a grammar as a record keeps them. LabError for more than it can keep."""
    is_long = max(map(len, lines)) > MOST_LETTERS or len(lines) > MOST_LINES
    if is_long:
        raise LabError(
            f"The grammar of {path.name} has a rule of over {MOST_LETTERS:,} letters, or over "
            f"{MOST_LINES:,} rules.",
            "Give a smaller one.",
        )
    return tuple(printable(line) for line in lines)
