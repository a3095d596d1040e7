"""The texts on which files are compared, cut into chunks as llama-perplexity cuts them.

A chunk is evaluated in stretches, so that the logits of long ones fit into memory. Some texts of
the lab are scored only where a token decides: the final number of a reasoning chain, the arguments
of a tool call. What decides stands at the text's beginning, and a filler makes it as long as asked.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from lab.core.lists import plural
from lab.errors import LabError
from lab.features.quant.lines import Stretch
from lab.runner import prompts

MOST_CHUNKS = 1000  # of a kind of text
N_STRETCH = 512  # most tokens that are evaluated in one call
TEXTS = {
    "prose": ("manual", "story", "more/prose"),
    "code": ("code", "table", "more/code"),
    "dialogue": ("dialogue", "more/dialogue"),
    "other languages": ("german", "spanish"),
}
"""The lab's own texts by their kind; no prompt is cut from those in `more/`."""

LONGEST_OF_KIND = 4096  # tokens of a chunk; longer ones need all kinds in one text
DECIDING = {"reasoning": "deciding/reasoning", "tool calls": "deciding/tools"}
BETWEEN_PARTS = "---\n"
DECIDES = re.compile(r"\[\[(.+?)\]\]")
LETTERS_BEFORE = 12  # of a mark, by which it is found
EDGES = (256, 1024, 4096, 16_384, 65_536, 262_144)
"""Where the bins of positions end, if at least as many positions follow."""


class Chunk(NamedTuple):
    text: str  # its kind
    tokens: list[int]
    # Places of the tokens that decide, item by item; empty: all positions count
    items: tuple[tuple[int, ...], ...] = ()


def texts_of(option: str | None, n_chunk: int = 0) -> dict[str, str]:
    """The texts by kind: the lab's own, or what --prompt names. LabError for random tokens."""
    if option is None:
        texts = {kind: prompts.own_text(names) for kind, names in TEXTS.items()}
        if n_chunk > LONGEST_OF_KIND:
            return {"all kinds": "\n\n".join(texts.values())}
        return texts
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
            f"The text has {plural(n_tokens, 'token')}, too few for two chunks of {n_chunk:,}.",
            f"Give a longer one: 16 chunks ({16 * n_chunk:,} tokens) show differences of more than "
            "10 %.",
        )
    placed.sort(key=itemgetter(0))
    return [chunk for _, chunk in placed]


def deciding_chunks(
    filler: str,
    tokenize: Callable[[str], list[int]],
    pieces: Sequence[bytes],
    bos: int | None,
    n_chunk: int,
) -> list[Chunk]:
    """The lab's texts with tokens that decide, each of n_chunk tokens; none that are longer.

    The filler stands between the facts at the beginning and the items at the end.
    """
    deciding = []
    filler_ids = tokenize(filler)
    for kind, name in DECIDING.items():
        facts, *parts = prompts.own_text([name]).split(BETWEEN_PARTS)
        first = tokenize(facts)
        if bos is not None:
            first = [bos, *first]
        last, places = marked_tokens(parts, tokenize, pieces)
        n_filler = n_chunk - len(first) - len(last)
        if n_filler < 0 or not places:
            continue
        between = prompts.cut(filler_ids, n_filler, 0, None)
        start = len(first) + n_filler
        items = tuple(tuple(start + place for place in item) for item in places)
        deciding.append(Chunk(kind, [*first, *between, *last], items))
    return deciding


def marked_tokens(
    parts: Sequence[str], tokenize: Callable[[str], list[int]], pieces: Sequence[bytes]
) -> tuple[list[int], list[list[int]]]:
    """The tokens of texts with marks [[so]], and for each text the places of the marked tokens.

    No places if the pieces of the tokens are not the text.
    """
    ids = tokenize(DECIDES.sub(r"\1", "".join(parts)))
    text = b"".join(pieces[token] for token in ids)
    ends = list(itertools.accumulate(len(pieces[token]) for token in ids))
    items: list[list[int]] = []
    searched = 0
    for part in parts:
        places: list[int] = []
        for mark in DECIDES.finditer(part):
            before = DECIDES.sub(r"\1", part[: mark.start()])[-LETTERS_BEFORE:].encode()
            marked = mark[1].encode()
            at = text.find(before + marked, max(0, searched - len(before)))
            if at < 0:
                return ids, []
            begin = at + len(before)
            searched = begin + len(marked)
            first = bisect.bisect_right(ends, begin)
            last = bisect.bisect_left(ends, searched)
            places += range(first, last + 1)
        items.append(places)
    return ids, items


def bin_ends(n_tokens: int) -> list[int]:
    """Where the bins of positions of a text end, such as 256, 1,024 and 4,000."""
    inner = [edge for edge in EDGES if 2 * edge <= n_tokens]
    return [*inner, n_tokens]


def stretches(
    tokens: Sequence[int], ends: Sequence[int], scored: Collection[int]
) -> list[list[Stretch]]:
    """Stretches of a text for each of its parts, which end at `ends`.

    `scored` are the positions whose prediction of the next token is scored.
    """
    parts = []
    start = 0
    for end in ends:
        part = []
        for begin in range(start, end, N_STRETCH):
            part.append(stretch(tokens, begin, min(begin + N_STRETCH, end), scored))
        parts.append(part)
        start = end
    return parts


def stretch(tokens: Sequence[int], begin: int, end: int, scored: Collection[int]) -> Stretch:
    positions = [position for position in range(begin, end) if position in scored]
    return Stretch(
        n_past=begin,
        tokens=tuple(tokens[begin:end]),
        scored=tuple(position - begin for position in positions),
        next_tokens=tuple(tokens[position + 1] for position in positions),
    )


def parts_by_depth(tokens: Sequence[int]) -> list[list[Stretch]]:
    """The stretches of a text in bins of positions; all predictions are scored."""
    return stretches(tokens, bin_ends(len(tokens)), range(len(tokens) - 1))


def parts_by_item(chunk: Chunk) -> list[list[Stretch]]:
    """The stretches of a text with tokens that decide: those before the items, and each item's."""
    scored = {place - 1 for item in chunk.items for place in item}
    ends = [item[0] - 1 for item in chunk.items]
    return stretches(chunk.tokens, [*ends, len(chunk.tokens)], scored)
