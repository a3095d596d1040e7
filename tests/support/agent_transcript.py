"""A made-up transcript of a coding agent: the bodies of its requests, with tools, calls, results
and reasoning.

    bodies = requests(8)

Each request repeats everything before it, as clients do.
"""

from __future__ import annotations

import json
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ')} in the working folder",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "write_file", "run_tests")
]
STEPS = (
    ("First see what the parser does.", "read_file", "parser.py"),
    ("The lamp is parsed twice; look at the lexer.", "read_file", "lexer.py"),
    ("The comma is skipped. Write a test for that.", "write_file", "test_comma.py"),
    ("Now see it fail.", "run_tests", "test_comma.py"),
    ("It fails as it should. Mend the lexer.", "write_file", "lexer.py"),
    ("Does the test pass now?", "run_tests", "test_comma.py"),
    ("It passes. Run all tests.", "run_tests", "tests"),
)
LINE = "    {} = self.read({!r})  # line {} of {}\n"


def call_of(number: int) -> dict[str, Any]:
    """The answer to request `number` (from 0): reasoning and a call of a tool."""
    reasoning, name, path = STEPS[number]
    arguments = json.dumps({"path": path, "text": f"lamp {number}"})
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {
        "role": "assistant",
        "content": None,
        "reasoning_content": reasoning,
        "tool_calls": [call],
    }


def result_of(number: int) -> dict[str, Any]:
    path = STEPS[number][2]
    lines = [LINE.format(f"word_{n}", "lamp", n, path) for n in range(6 + number)]
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": "".join(lines)}


def messages(n_calls: int) -> list[dict[str, Any]]:
    """The whole conversation: at most 8 calls of the model, the last of which answers."""
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful engineer. It is 08:00Z."},
        {"role": "user", "content": "The parser reads a comma as a lamp. Mend it."},
    ]
    for number in range(n_calls - 1):
        conversation += [call_of(number), result_of(number)]
    conversation.append(
        {"role": "assistant", "content": "Mended: the lexer skipped the comma."}
    )
    return conversation


def requests(n_calls: int = 8) -> list[dict[str, Any]]:
    """The body of each request."""
    conversation = messages(n_calls)
    bodies = []
    for position, message in enumerate(conversation):
        if message["role"] == "assistant":
            bodies.append(
                {"model": "a-model", "messages": conversation[:position], "tools": TOOLS}
            )
    return bodies
