"""A conversation from a file of messages as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.errors import LabError, printable
from lab.features.turns.conversation import MEMORY, Conversation, parse_breaks

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
ROLES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "tool": USER,
    "assistant": ASSISTANT,
}
MOST_TURNS = 200
MOST_BYTES = 16 << 20
HINT = f'Each line is a message: {{"role": "user", "content": "..."}} Roles: {", ".join(ROLES)}.'


def read_messages(path: Path) -> list[str]:
    """The system prompt, then messages and answers alternately. LabError for other files.

    Messages of one side that follow each other are joined.
    """
    texts = [""]
    for number, line in enumerate(filter(bytes.strip, read(path).splitlines()), 1):
        try:
            role, text = message(line)
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
            raise LabError(f"{path.name}, message {number}, is not a message.", HINT) from None
        has_answer_last = len(texts) % 2 == 1
        is_first_system = role == SYSTEM and len(texts) == 1
        if (role == ASSISTANT) == has_answer_last or is_first_system:
            texts[-1] += text
        elif text:
            texts.append(text)
    if len(texts) % 2 == 0:
        texts.append("")  # the last message has no answer
    n_turns = len(texts) // 2
    if not 1 <= n_turns <= MOST_TURNS:
        raise LabError(f"{path.name} has {n_turns} turns; 1 to {MOST_TURNS} are possible.", HINT)
    return texts


def read(path: Path) -> bytes:
    """The content of a file. LabError if it cannot be read, or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise LabError(
            f"The file {path} cannot be read: {problem.strerror}.", "Check its name."
        ) from None
    if len(content) > MOST_BYTES:
        raise LabError(
            f"The file {path.name} is larger than {MOST_BYTES >> 20} MB.", "Give a part of it."
        )
    return content


def message(line: bytes) -> tuple[str, str]:
    """Who said what. Any of several errors if the line is not a message."""
    fields = json.loads(line)
    text = fields.get("content") or ""
    if isinstance(text, list):
        text = "\n".join(part["text"] for part in text if part.get("type") == "text")
    return ROLES[fields["role"]], printable(text, allowed="\n\t")


def conversation(
    texts: Sequence[str], name: str, breaks: str, count: Callable[[str], int]
) -> Conversation:
    """The conversation of a file, with the lengths that `count` gives.

    A missing or short answer has 2 tokens.
    """
    system, *lengths = map(count, texts)
    parse_breaks(breaks, len(lengths) // 2)
    return Conversation(
        system=system,
        messages=tuple(max(1, n) for n in lengths[::2]),
        answers=tuple(max(2, n) for n in lengths[1::2]),
        breaks=breaks,
        keep=MEMORY,
        replay=printable(name),
    )
