"""Make prompts of exactly n tokens: slices of a tokenized text, from different offsets, wrapping at
its end."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core import files
from lab.core.files import data_file
from lab.errors import LabError, printable

TEXT = "text"
RANDOM = "random"
MOST_BYTES = 16_000_000  # of a text file: 100 times the longest prompt


@dataclass(frozen=True)
class Source:
    """The text that prompts are cut from; `text` is None for random prompts."""

    name: str
    text: str | None
    sha256: str | None


def source(option: str) -> Source:
    """The source that --prompt names.

    `text` (all of the lab's texts), some of them, `random`, or a UTF-8 text file.
    """
    if option == RANDOM:
        return Source(RANDOM, None, None)
    names = own_texts()
    if option != TEXT:
        names = [name.strip() for name in option.split(",")]
    if set(names) <= set(own_texts()):
        text = own_text(names)
        return Source(option, text, _sha256(text))
    hint = f"Use --prompt text, random, a UTF-8 file, or some of {', '.join(own_texts())}."
    text = files.read_text(Path(option), "The prompt file", hint, MOST_BYTES)
    if not text.strip():
        what = f"The prompt file {option} is empty."
        raise LabError(what, "Write some text to it, or use --prompt text.")
    return Source(printable(Path(option).name), text, _sha256(text))


def own_texts() -> list[str]:
    """The names of the lab's own texts, such as `code`."""
    return [path.stem for path in files.listed(data_file("", "prompts"), "*.txt")]


def own_text(names: Sequence[str]) -> str:
    texts = []
    for name in names:
        texts.append(data_file(f"{name}.txt", "prompts").read_text(encoding="utf-8"))
    return "\n\n".join(texts)


def offset(seed: int, repeat: int, n_available: int, sequence: int = 0) -> int:
    """Where in the tokenized text the prompt of a repeat and sequence starts."""
    return random.Random(_seed(seed, repeat, sequence)).randrange(n_available)


def cut(ids: Sequence[int], n: int, start: int, bos: int | None) -> list[int]:
    """Exactly n token ids: BOS if the model has one, then ids from `start` on, wrapping around."""
    prompt = [] if bos is None else [bos]
    for position in range(start, start + n - len(prompt)):
        prompt.append(ids[position % len(ids)])
    return prompt


def random_ids(
    n: int, n_vocab: int, bos: int | None, seed: int, repeat: int, sequence: int = 0
) -> list[int]:
    """Exactly n uniformly random token ids; the first is BOS if the model has one."""
    ids = random.Random(_seed(seed, repeat, sequence)).choices(range(n_vocab), k=n)
    if bos is not None:
        ids[0] = bos
    return ids


def _seed(seed: int, repeat: int, sequence: int) -> str:
    if sequence:
        return f"{seed} {repeat} {sequence}"
    return f"{seed} {repeat}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
