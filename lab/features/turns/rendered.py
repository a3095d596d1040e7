"""A rendered request, which crosses the pipe between the child and its parent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RenderedPrompt:
    text: str
    tokens: tuple[int, ...]
