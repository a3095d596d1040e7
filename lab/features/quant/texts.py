"""The texts on which files are compared, cut into chunks as llama-perplexity cuts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import NamedTuple

from lab.core.lists import plural
from lab.errors import LabError
from lab.runner import prompts

MOST_CHUNKS = 1000  # of a kind of text
TEXTS = {
    "prose": ("manual", "story", "more/prose"),
    "code": ("code", "table", "more/code"),
    "dialogue": ("dialogue", "more/dialogue"),
    "other languages": ("german", "spanish"),
}
"""The lab's own texts by their kind; no prompt is cut from those in `more/`."""


class Chunk(NamedTuple):
    text: str  # its kind
    tokens: list[int]


def texts_of(option: str | None) -> dict[str, str]:
    """The texts by kind: the lab's own, or what --prompt names. LabError for random tokens."""
    if option is None:
        return {kind: prompts.own_text(names) for kind, names in TEXTS.items()}
    try:
        source = prompts.source(option)
    except LabError as problem:
        what = problem.what.replace("prompt file", "text")
        raise LabError(what, "Give a UTF-8 text, or leave --prompt out.") from None
    if source.text is None:
        raise LabError(
            "Random tokens say nothing about quality.", "Give a text, or leave --prompt out."
        )
    return {source.name: source.text}


def chunks(
    texts: Mapping[str, str],
    tokenize: Callable[[str], list[int]],
    bos: int | None,
    n_chunk: int,
) -> list[Chunk]:
    """All whole chunks of texts; every beginning of the list has the kinds in proportion.

    If the model adds BOS before a text, it stands before each text and replaces the first token of
    each chunk. LabError for fewer than 2 chunks.
    """
    placed: list[tuple[float, Chunk]] = []
    n_tokens = 0
    for kind, text in texts.items():
        ids = tokenize(text)
        if bos is not None:
            ids = [bos, *ids]
        n_tokens += len(ids)
        n_chunks = min(len(ids) // n_chunk, MOST_CHUNKS)
        for i in range(n_chunks):
            tokens = ids[i * n_chunk : (i + 1) * n_chunk]
            if bos is not None:
                tokens = [bos, *tokens[1:]]
            place = (i + 0.5) / n_chunks
            placed.append((place, Chunk(kind, tokens)))
    if len(placed) < 2:
        raise LabError(
            f"The text has {plural(n_tokens, 'token')}, too few for two chunks of {n_chunk}.",
            f"Give a longer one: 16 chunks ({16 * n_chunk:,} tokens) show differences of more than "
            "10 %.",
        )
    placed.sort(key=itemgetter(0))
    return [chunk for _, chunk in placed]
