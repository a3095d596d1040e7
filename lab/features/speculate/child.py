"""Greedy speculative decoding: draft tokens, verify all in one step, and forget those after the
first wrong one.

A draft token is accepted if the model chooses the same token. Verifying n tokens is a step of
n + 1: the last chosen token and the draft. All get logits, so the step also yields the token after
the last accepted one. Every step yields at least one token, and the text is that of plain decoding,
except at near-ties, where another step size may round differently. Leviathan et al., "Fast
inference from transformers via speculative decoding" (2023).

The draft comes from a smaller model, or from the text so far: the tokens that followed the last
occurrence of the same two or three tokens (prompt lookup: Saxena, "Prompt lookup decoding", 2023).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lab.core.record import DECODE, DRAFT, FORGET, VERIFY
from lab.core.script import Operation, Shape
from lab.engine import llama
from lab.engine.bindings import llama_cpp
from lab.engine.llama import LlamaContext, Logits
from lab.engine.loop import Action

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

N_GRAMS = (3, 2)
"""Lengths of the token sequences to look up, in this order. Single tokens repeat too often to
predict the next one."""


class Lookup:
    """A growing list of tokens, with an index of the last occurrence of every pair and triple."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._next_at: dict[tuple[int, ...], int] = {}
        """The position of the token after the last occurrence of each pair and triple."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        end = len(self.tokens)
        for n in N_GRAMS:
            if end >= n:
                self._next_at[tuple(self.tokens[end - n :])] = end
        self.tokens.append(token)

    def draft(self, n: int) -> list[int]:
        """The n tokens after the last occurrence of the text's end; empty without an occurrence."""
        for n_same in N_GRAMS:
            if len(self.tokens) < n_same:
                continue
            place = self._next_at.get(tuple(self.tokens[-n_same:]))
            if place is not None:
                return self._repeated(place, n)
        return []

    def _repeated(self, place: int, n: int) -> list[int]:
        """n tokens from `place` on; past the end the tokens from there to the end repeat."""
        period = len(self.tokens) - place
        return [self.tokens[place + i % period] for i in range(n)]


class Speculator:
    """Makes the actions, and records the shapes of the steps and the accepted tokens of each.

    Writes chosen tokens into `tokens`.
    """

    def __init__(
        self,
        context: LlamaContext,
        draft: LlamaContext | None,
        logits: Mapping[bool, Logits],
        tokens: npt.NDArray[np.int64],
    ) -> None:
        self._context = context
        self._draft = draft
        self._logits = logits  # by whether they are the draft model's
        self._tokens = tokens
        self.shapes: list[Shape] = []
        self.accepted: list[int] = []

    def actions(
        self, prompt: Sequence[int], operation: Operation, n_prefilled: int
    ) -> Iterator[Action]:
        """Actions until `operation.times` tokens are chosen, after the prompt and one chosen token
        (`tokens[0]`).

        Drafts never go beyond the last token to generate.
        """
        self._text = Lookup([*prompt, int(self._tokens[0])])
        self._n_read = len(prompt)  # tokens of the text that the draft model's cache holds
        n_chosen = 1
        n_to_choose = operation.times + 1
        while n_chosen < n_to_choose:
            self._drafted: list[int] = []
            # The last chosen token is not in the cache yet
            n_past = len(self._text.tokens) - 1
            n_to_draft = min(operation.n_draft, n_to_choose - n_chosen - 1)
            yield from self._draft_tokens(n_to_draft, operation.of_draft, n_past, n_prefilled)
            yield self._verify(n_chosen, n_past, n_prefilled)
            # `_choose` added them, and one more
            n_accepted = len(self._text.tokens) - n_past - 2
            n_chosen += n_accepted + 1
            n_valid = n_past + 1 + n_accepted  # positions of the cache that hold the text
            if n_accepted < len(self._drafted):
                n_computed = n_past + 1 + len(self._drafted)
                self.shapes.append(Shape(FORGET, 0, n_computed, 1, 0))
                forget = functools.partial(llama.forget, self._context, 0, n_valid)
                yield forget, None, n_prefilled
            self._n_read = min(self._n_read, n_valid)
            if self._drafted:
                self.accepted.append(n_accepted)

    def _draft_tokens(
        self, n: int, of_draft_model: bool, n_past: int, n_prefilled: int
    ) -> Iterator[Action]:
        """Draft n tokens: a step of the draft model for each, or one lookup in the text."""
        if of_draft_model:
            for _ in range(n):
                yield self._draft_next(n_prefilled)
        elif n:
            self.shapes.append(Shape(DRAFT, 0, n_past, 1, 0))
            yield functools.partial(self._look_up, n), None, n_prefilled

    def _look_up(self, n: int) -> None:
        self._drafted += self._text.draft(n)

    def _draft_next(self, n_prefilled: int) -> Action:
        """One step of the draft model over the tokens that it has not read yet."""
        assert self._draft is not None
        draft = self._draft
        n_read = self._n_read
        tokens = self._text.tokens + self._drafted
        unread = tokens[n_read:]
        last = len(unread) - 1
        batch = _batch(unread, last)
        is_first = not self._drafted
        self.shapes.append(Shape(DRAFT, len(unread), n_read, 1, 1))
        self._n_read = len(tokens)

        def execute() -> None:
            if is_first:  # tokens of the last draft may have been rejected
                llama.forget(draft, 0, n_read)
            llama.decode(draft, batch)

        def choose() -> None:
            self._drafted.append(int(self._logits[True].row(last).argmax()))

        return execute, choose, n_prefilled

    def _verify(self, n_chosen: int, n_past: int, n_prefilled: int) -> Action:
        """One step of the model over the last chosen token and the drafted ones."""
        step = [self._text.tokens[-1], *self._drafted]
        kind = VERIFY if self._drafted else DECODE
        self.shapes.append(Shape(kind, len(step), n_past, 1, len(step)))
        forward = functools.partial(llama.decode, self._context, _batch(step, 0))
        return forward, functools.partial(self._choose, n_chosen), n_prefilled

    def _choose(self, n_chosen: int) -> None:
        """Choose the tokens after the last one and after each accepted one."""
        for i, drafted in enumerate([*self._drafted, None]):
            token = int(self._logits[False].row(i).argmax())
            self._tokens[n_chosen + i] = token
            self._text.append(token)
            if token != drafted:
                return


def _batch(ids: Sequence[int], first_output: int) -> object:
    """A llama_batch of sequence 0; tokens from `first_output` on get logits.

    llama.cpp counts the positions. The pointers keep their arrays alive.
    """
    n = len(ids)
    tokens = (ctypes.c_int32 * n)(*ids)
    outputs = [0] * first_output + [1] * (n - first_output)
    has_logits = (ctypes.c_int8 * n)(*outputs)
    token_pointer = ctypes.cast(tokens, ctypes.POINTER(ctypes.c_int32))
    batch = llama_cpp().llama_batch(n_tokens=n, token=token_pointer)
    batch.logits = ctypes.cast(has_logits, ctypes.POINTER(ctypes.c_int8))
    return batch
