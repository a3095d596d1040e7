"""A conversation from a file of messages as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.core import files
from lab.core.lists import join_and
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
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of an answer, by server
MOST_TURNS = 200
MOST_BYTES = 16 << 20
HINT = (
    f'Each line is a message: {{"role": "user", "content": "..."}} Roles: {", ".join(ROLES)}.'
)


class Recording(NamedTuple):
    """The system prompt, then messages and answers alternately; and the kinds of content that are
    no text, and are left out."""

    texts: list[str]
    left_out: list[str]

    @property
    def notes(self) -> list[str]:
        """A sentence on what is left out, if anything is."""
        if not self.left_out:
            return []
        kinds = join_and(self.left_out)
        return [
            f"Only texts and tool calls are replayed; the file's {kinds} parts are left out."
        ]


def read_messages(path: Path) -> Recording:
    """The messages of a file. LabError for other files.

    Messages of one side that follow each other are joined. An answer that calls a tool is an
    answer: each call of the model is a turn.
    """
    texts = [""]
    left_out: dict[str, None] = {}
    for number, line in enumerate(filter(bytes.strip, read(path).splitlines()), 1):
        try:
            role, text, kinds = message(line)
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
            raise LabError(f"{path.name}, message {number}, is not a message.", HINT) from None
        left_out |= dict.fromkeys(kinds)
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
        raise LabError(
            f"{path.name} has {n_turns} turns; 1 to {MOST_TURNS} are possible.", HINT
        )
    return Recording(texts, list(left_out))


def read(path: Path) -> bytes:
    """The content of a file. LabError if it cannot be read, or is too large."""
    return files.read(path, "The file", "Check its name.", MOST_BYTES)


def message(line: bytes) -> tuple[str, str, list[str]]:
    """Who said what, and the kinds of content that are no text. Any of several errors if the line
    is not a message.

    Reasoning comes before the text, and tool calls after it, as JSON.
    """
    fields = json.loads(line)
    content = fields.get("content") or ""
    left_out: list[str] = []
    texts = [fields[name] for name in REASONING if fields.get(name)]
    if isinstance(content, list):
        for part in content:
            if part.get("type") == "text":
                texts.append(part["text"])
            else:
                left_out.append(printable(str(part.get("type"))[:40]))
    elif content:
        texts.append(content)
    if fields.get("tool_calls"):
        texts.append(json.dumps(fields["tool_calls"], ensure_ascii=False))
    return ROLES[fields["role"]], printable("\n".join(texts), allowed="\n\t"), left_out


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
