"""Guess what comes next from the text so far: what followed these words when they came last (prompt lookup).

Texts repeat themselves: code its names, tables their columns, answers the words of the question. Such a guess costs no
model, only a look into an index of all pairs and triples of tokens. Saxena, "Prompt lookup decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable

N_GRAMS = (3, 2)
"""How many of the last tokens must have come before, in this order: one alone comes too often to say anything."""


class Lookup:
    """A text of tokens that grows, and where in it every pair and triple came last."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the token lies that followed
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """The text goes on with this token."""
        end = len(self.tokens)
        for n in N_GRAMS:
            if end >= n:
                self._after[tuple(self.tokens[end - n :])] = end
        self.tokens.append(token)

    def guess(self, n: int) -> list[int]:
        """The next n tokens, as they followed the last time; nothing where these words have not come before."""
        for n_same in N_GRAMS:
            place = self._after.get(tuple(self.tokens[-n_same:])) if len(self.tokens) >= n_same else None
            if place is None:
                continue
            text = self.tokens[place : place + n]
            while len(text) < n:  # the end is reached: the text repeats what lies between there and here
                text.append(text[len(text) - (len(self.tokens) - place)])
            return text
        return []
